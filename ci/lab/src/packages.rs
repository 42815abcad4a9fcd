//! Debian packages in the download cache: kernels, QEMU, compilers, and programs for the guest.

pub(crate) mod apt;
pub(crate) mod busybox;
pub(crate) mod cache;
pub(crate) mod cross;
pub(crate) mod deb;
pub(crate) mod fetch;
pub(crate) mod kernel;
pub(crate) mod musl;
pub(crate) mod python;
pub(crate) mod qemu;
pub(crate) mod rdma_core;
pub(crate) mod toolchain;
