//! The one way into the kernel: ioctls on `/dev/infiniband/uverbsN`.
//!
//! A [`Command`](command::Command) has an object, a method and attributes; a [`Kernel`](kernel::Kernel)
//! runs it. The real one is [`fd::UverbsFd`]; tests script one, in `scripted`.

pub(crate) mod command;
pub(crate) mod doorbell;
pub(crate) mod fd;
pub(crate) mod invoke_write;
pub(crate) mod kernel;
pub(crate) mod open_file;
#[cfg(test)]
pub(crate) mod scripted;
