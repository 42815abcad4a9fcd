//! VAR pages in plain memory: the control socket reads what a guest wrote.

#[path = "../../../connectx/tests/driver/mod.rs"]
mod driver;

use connectx_vfio::control::{ControlRequest, Reply, answer};
use driver::Driver;
use uverbs_connectx::bar0::{TLP_PAGES, VAR_BYTES, VAR_OFFSET};
use uverbs_connectx::function::Region;

/// VAR pages of virtio emulation, and those of TLP emulation behind them.
#[test]
fn the_control_socket_reads_back_var_pages() {
    let mut driver = Driver::new();
    let pages = (VAR_BYTES / 4096) as u32;
    let last = pages + TLP_PAGES as u32 - 1;
    for page in [0, pages - 1, pages, last] {
        let value = (page + 7).to_be_bytes();
        let place = VAR_OFFSET + u64::from(page) * 4096;
        driver.fabric.function(0).write(Region::Bar0, place, &value);
        let asked = ControlRequest::Var { function: 0, page, len: 4 };
        assert_eq!(answer(&mut driver.fabric, &asked), Reply::Var { bytes: value.to_vec() });
    }
    for (page, len) in [(last + 1, 1), (last, 4097), (u32::MAX, 4)] {
        let asked = ControlRequest::Var { function: 0, page, len };
        let reply = answer(&mut driver.fabric, &asked);
        assert!(matches!(reply, Reply::Error { .. }), "{page} {len}: {reply:?}");
    }
}
