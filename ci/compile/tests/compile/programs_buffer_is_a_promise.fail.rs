//! Memory that stays registered and unborrowed is a promise that its implementer makes.
#![allow(unused)]

use uverbs::owned::{RegionSge, RegisteredBuffer};

struct Page(RegionSge);

 impl RegisteredBuffer for Page {
    fn sge(&self) -> RegionSge {
        self.0
    }
}

fn main() {}
