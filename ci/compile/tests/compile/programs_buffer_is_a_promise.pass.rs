//! The implementer of the trait promises that the memory stays registered and unborrowed.
#![allow(unused)]

use uverbs::owned::{RegionSge, RegisteredBuffer};

struct Page(RegionSge);

unsafe impl RegisteredBuffer for Page {
    fn sge(&self) -> RegionSge {
        self.0
    }
}

fn main() {}
