//! The command interface, by which the driver sends commands to firmware.
//!
//! Pairs with mlx5_core's `cmd.c`. `queue` reads commands from guest memory, [`mailbox`] walks
//! their mailbox chains, and `dispatch` calls the function of the opcode. Each other file has the
//! commands of one kind of object.

pub(crate) mod cq;
pub(crate) mod dispatch;
pub(crate) mod domain;
pub(crate) mod eq;
pub(crate) mod flow_counter;
pub(crate) mod flow_table;
pub(crate) mod general_object;
pub(crate) mod hca_cap;
pub(crate) mod lag;
pub mod mailbox;
pub(crate) mod mcg;
pub(crate) mod memic;
pub(crate) mod mkey;
pub(crate) mod pages;
pub(crate) mod ppcnt;
pub(crate) mod q_counter;
pub(crate) mod qp;
pub(crate) mod queue;
pub(crate) mod register;
pub(crate) mod rq;
pub(crate) mod rqt;
pub(crate) mod sq;
pub(crate) mod srq;
pub(crate) mod tir;
pub(crate) mod tis;
pub(crate) mod uar;
pub(crate) mod uctx;
pub(crate) mod umem;
pub(crate) mod vport;
