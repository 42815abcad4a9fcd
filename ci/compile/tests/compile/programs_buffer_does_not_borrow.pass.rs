//! If a buffer could borrow, a program could forget it with its queue, and the device would write reused memory.
#![allow(unused)]

use uverbs::owned::{OwnedRecvBatch, RegionSge, RegisteredBuffer};

struct Page<'m> {
    sge: RegionSge,
    bytes: &'m mut [u8],
}

unsafe impl RegisteredBuffer for Page<'static> {
    fn sge(&self) -> RegionSge {
        self.sge
    }
}

fn main() {}
