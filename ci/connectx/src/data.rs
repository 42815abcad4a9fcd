//! The data path: what work requests do.
//!
//! [`doorbell`] hears of new work, [`ring`] finds it and [`wqe`] reads it; `send` carries it out on
//! the requester's side as a [`message`], `respond` on the other side, with [`receive`] for the
//! receives that it uses; `complete` says how it ended. `ethernet` does the same for frames, with
//! `frame` for what is in one and `steer` for where it goes. `memory` is what their keys lead to.

pub(crate) mod complete;
pub(crate) mod cq;
pub(crate) mod doorbell;
pub(crate) mod eq;
pub(crate) mod ethernet;
pub(crate) mod memory;
pub(crate) mod message;
pub(crate) mod port;
pub(crate) mod respond;
pub(crate) mod send;
pub(crate) mod srq;
pub(crate) mod steer;
pub(crate) mod timer;
pub(crate) mod umr;
