//! The protocol between host and guest over the VM's channel.
//!
//! Both ends live in this workspace and are built together, so the format carries no version. The
//! guest end is this package's binary, the host end is `machine/vm.rs` of the package `lab`.

pub mod frame;
pub mod order;
