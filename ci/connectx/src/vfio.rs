//! vfio-user: the protocol by which QEMU (`vfio-user-pci`) reaches a device in another process.
//!
//! Pairs with QEMU's `hw/vfio-user`, from 10.1 on. The README of this package gives the reason for our own framing.

pub mod connection;
pub mod session;
