//! The one way into the kernel: ioctls on `/dev/infiniband/uverbsN`.
//!
//! A [`Command`](command::Command) says what to do in terms of attributes; a
//! [`Kernel`](kernel::Kernel) does it. The real one is [`fd::UverbsFd`]; tests play one.

pub(crate) mod command;
pub(crate) mod doorbell;
pub(crate) mod fd;
pub(crate) mod invoke_write;
pub(crate) mod kernel;
#[cfg(test)]
pub(crate) mod scripted;
