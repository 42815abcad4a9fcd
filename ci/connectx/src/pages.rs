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
pub struct Pages {
    pub(crate) held: BTreeSet<u64>,
    /// Whether the driver may create objects.
    pub(crate) running: bool,
    /// Whether the driver has not answered the last event yet.
    pub(crate) asked: bool,
}

impl Pages {
    /// How many pages firmware holds.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Records INIT_HCA or TEARDOWN_HCA.
    pub fn run(&mut self, running: bool) {
        self.running = running;
        self.asked = false;
    }

    /// How many pages to ask for with this number of objects; a negative number offers pages back.
    pub fn change(&mut self, objects: usize) -> Option<i32> {
        if !self.running || self.asked {
            return None;
        }
        let [least, middle, most] = SPARE;
        let needed = BOOT_PAGES + INIT_PAGES + objects.div_ceil(OBJECTS);
        let held = self.held.len();
        if held >= needed + least && held <= needed + most {
            return None;
        }
        self.asked = true;
        Some((needed + middle) as i32 - held as i32)
    }
}
