//! Devices in the process: `--sim`.

use uverbs::sim::{Fabric, Mode};

/// Makes `count` devices, which are listed and opened in place of the machine's. Called once.
pub(crate) fn install(count: u8) {
    let installed = Fabric::new(count.into(), Mode::Trapped).install();
    debug_assert!(installed.is_ok(), "another system was installed");
}
