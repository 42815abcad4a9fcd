//! vfio-user: how QEMU (`vfio-user-pci`) reaches a device in another process.
//!
//! Pairs with QEMU's `hw/vfio-user`, from 10.1 on. The framing is our own; the package's README says
//! why.

pub mod session;
pub mod wire;
