//! A region whose memory the program accesses by itself does not access the memory.
#![allow(unused)]

use uverbs::{MemoryRegion, RawRange, Unowned};

fn first(region: &MemoryRegion<u8, Unowned>) -> Option<u8> {
    region.read_at(0)
}

fn main() {
    let _ = first;
}
