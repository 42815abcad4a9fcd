//! Devices in the process: `--sim`.

use std::sync::atomic::{AtomicBool, Ordering};
use uverbs::sim::{Fabric, Mode};

static INSTALLED: AtomicBool = AtomicBool::new(false);

/// Makes `count` devices, which are listed and opened in place of the machine's.
pub(crate) fn install(count: u8) {
    let fabric = Fabric::new(count.into(), Mode::Trapped);
    INSTALLED.store(fabric.install().is_ok(), Ordering::Relaxed);
}

/// Whether [`install`] was called.
pub(crate) fn is_installed() -> bool {
    INSTALLED.load(Ordering::Relaxed)
}
