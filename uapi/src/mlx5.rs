//! The mlx5 driver: its part of the commands, its objects, and the formats of its queues.

pub mod abi;
pub mod context;
pub mod cqe;
pub mod devx;
pub mod dm;
pub mod flow;
pub mod object;
pub mod prm;
pub mod uar;
pub mod var;
pub mod wqe;
