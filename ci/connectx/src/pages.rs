//! Host pages that the driver lends to firmware.
//!
//! Pairs with mlx5_core's `pagealloc.c`: QUERY_PAGES says how many are wanted to boot, events ask for
//! more and offer some back as objects come and go, MANAGE_PAGES gives them or takes them back. This
//! firmware keeps nothing in them; it counts them, so that a page that the driver does not get back
//! shows.

use std::collections::BTreeSet;

pub(crate) const BOOT_PAGES: usize = 16;
pub(crate) const INIT_PAGES: usize = 64;

/// Objects whose contexts share a page.
const OBJECTS: usize = 8;
/// Pages beyond what objects need: below the first more are asked for, above the last some are
/// offered back, either way up to the one between.
const SPARE: [usize; 3] = [4, 16, 32];

/// The pages held.
#[derive(Default)]
pub struct Pages {
    pub(crate) held: BTreeSet<u64>,
    /// Whether objects may come and go.
    pub(crate) running: bool,
    /// Whether the driver has yet to answer an event.
    pub(crate) asked: bool,
}

impl Pages {
    /// How many pages are held.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// The driver begins, or ends, to make objects.
    pub fn run(&mut self, running: bool) {
        self.running = running;
        self.asked = false;
    }

    /// How many pages to ask for, or below zero to offer, now that there are this many objects.
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
