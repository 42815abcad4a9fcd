//! Tests of features that only mlx5 has.

mod allocator;
mod clock;
mod context;
mod cq;
pub(crate) mod devx;
pub(crate) mod dm;
mod dmabuf;
pub(crate) mod qp_path;
mod raw;
mod scatter;
pub(crate) mod stress;
mod td;
mod uar;
mod var;
mod var_sharing;

use crate::capability::Capability;
use crate::env;
use crate::verdict::{Verdict, require};
use libtest_mimic::Trial;
use uverbs::Context;
use uverbs::device::DriverId;

pub(crate) fn trials() -> Vec<Trial> {
    let modules = [
        allocator::trials(),
        #[cfg(feature = "tokio")]
        allocator::futures::trials(),
        clock::trials(),
        context::trials(),
        cq::trials(),
        devx::trials(),
        devx::objects::trials(),
        devx::sharing::trials(),
        devx::virtio::trials(),
        dm::trials(),
        dmabuf::trials(),
        qp_path::trials(),
        raw::trials(),
        scatter::trials(),
        stress::trials(),
        td::trials(),
        uar::trials(),
        var::trials(),
        var_sharing::trials(),
    ];
    modules.into_iter().flatten().collect()
}

/// The number of pages that a context allocates for so many registers. A UAR of 4 KiB has two. A context that allocates
/// its UARs itself has one UAR in a page by the driver's word, regardless of the size of the kernel's pages.
fn pages_for(registers: usize) -> usize {
    registers.div_ceil(2)
}

/// A context on the device under test; skips if the driver is not mlx5.
fn open() -> Verdict<Context> {
    let mlx5 = env::device().driver() == Some(DriverId::MLX5);
    require(mlx5, Capability::Mlx5, "the device under test is driven by something else")?;
    env::open()
}
