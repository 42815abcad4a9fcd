//! vfio-user: how QEMU (`vfio-user-pci`) reaches a device in another process.
//!
//! Pairs with QEMU's `hw/vfio-user`, from 10.1 on. The README of this package says why the framing
//! is our own.

pub mod connection;
pub mod session;
