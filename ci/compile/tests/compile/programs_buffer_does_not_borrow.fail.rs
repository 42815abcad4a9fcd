//! A buffer that borrows could be forgotten with its queue, and the device would write what is in other use.
#![allow(unused)]

use uverbs::owned::{OwnedRecvBatch, RegionSge, RegisteredBuffer};

struct Page<'m> {
    sge: RegionSge,
    bytes: &'m mut [u8],
}

unsafe impl RegisteredBuffer for Page<'_> {
    fn sge(&self) -> RegionSge {
        self.sge
    }
}

fn main() {}
