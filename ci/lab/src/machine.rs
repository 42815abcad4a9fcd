//! A guest: its root file system, its RDMA devices, QEMU, and the session that boots it.

pub(crate) mod accelerator;
pub(crate) mod device;
pub(crate) mod initramfs;
mod monitor;
pub(crate) mod session;
mod vcpus;
pub(crate) mod vm;
