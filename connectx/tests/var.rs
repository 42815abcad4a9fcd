//! VAR pages in plain memory.

mod driver;

use driver::Driver;
use uverbs_connectx::bar0::{TLP_PAGES, VAR_BYTES, VAR_OFFSET};
use uverbs_connectx::function::Region;

/// VAR pages of virtio emulation, and those of TLP emulation behind them.
#[test]
fn var_pages_keep_what_a_guest_wrote() {
    let mut driver = Driver::new();
    let pages = (VAR_BYTES / 4096) as u32;
    let last = pages + TLP_PAGES as u32 - 1;
    for page in [0, pages - 1, pages, last] {
        let value = (page + 7).to_be_bytes();
        let place = VAR_OFFSET + u64::from(page) * 4096;
        driver.fabric.function(0).write(Region::Bar0, place, &value);
        let mut bytes = [0; 4];
        driver.fabric.function(0).device().bar_memory().read(place, &mut bytes);
        assert_eq!(bytes, value);
    }
}
