//! The data path: what work requests do.
//!
//! [`doorbell`] hears of new work, [`ring`] finds it and [`wqe`] reads it; `send` carries it out on
//! the requester's side as a [`message`], `respond` on the other side, with [`receive`] for the
//! receives that it uses; `complete` says how it ended. `ethernet` does the same for frames, with
//! `frame` for what is in one and `steer` for where it goes. `memory` is what their keys lead to.

mod complete;
pub mod doorbell;
pub(crate) mod ethernet;
pub(crate) mod frame;
mod memory;
pub mod message;
pub mod receive;
mod respond;
pub mod ring;
pub(crate) mod send;
mod steer;
mod umr;
pub mod wqe;
