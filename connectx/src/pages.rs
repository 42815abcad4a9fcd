//! Host pages that the driver lends to firmware.
//!
//! Pairs with mlx5_core's `pagealloc.c`. QUERY_PAGES tells how many pages firmware needs to boot,
//! events ask for more or offer some back, and MANAGE_PAGES gives or takes them. This firmware
//! stores nothing in the pages. It counts them, so that a page that the driver does not get back is
//! noticed.

use std::collections::BTreeSet;

pub(crate) const BOOT_PAGES: usize = 16;
pub(crate) const INIT_PAGES: usize = 64;

/// Objects whose contexts share a page.
const OBJECTS: usize = 8;
/// Spare pages. Below the first number firmware asks for more, above the last it offers some back,
/// in both cases up to the middle one.
const SPARE: [usize; 3] = [4, 16, 32];

/// The pages that firmware holds.
#[derive(Default)]
pub struct FirmwarePages {
    pub(crate) held: BTreeSet<u64>,
    /// Whether the driver may create objects.
    pub(crate) running: bool,
    /// Whether the driver has not answered the last event yet.
    pub(crate) requested: bool,
}

impl FirmwarePages {
    /// The number of pages that firmware holds.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Records INIT_HCA or TEARDOWN_HCA.
    pub fn set_running(&mut self, running: bool) {
        self.running = running;
        self.requested = false;
    }

    /// The most pages that firmware holds with this number of objects. It offers further ones back.
    pub fn most(objects: usize) -> usize {
        Self::needed(objects) + SPARE[2]
    }

    fn needed(objects: usize) -> usize {
        BOOT_PAGES + INIT_PAGES + objects.div_ceil(OBJECTS)
    }

    /// The number of pages to ask for with this number of objects; a negative number offers pages back.
    pub fn wanted(&mut self, objects: usize) -> Option<i32> {
        if !self.running || self.requested {
            return None;
        }
        let [least, middle, _] = SPARE;
        let needed = Self::needed(objects);
        let held = self.held.len();
        if held >= needed + least && held <= Self::most(objects) {
            return None;
        }
        self.requested = true;
        Some((needed + middle) as i32 - held as i32)
    }
}
