//! The command queue: how the driver asks firmware for something.
//!
//! Pairs with mlx5_core's `cmd.c`. [`queue`] takes commands out of guest memory, [`mailbox`] walks
//! the chains behind them, [`dispatch`] finds who carries one out, and [`refusal`] says no.

pub mod dispatch;
pub mod mailbox;
pub mod queue;
pub mod refusal;
