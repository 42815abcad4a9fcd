//! A region of memory that the program accesses by itself does not access it.
#![allow(unused)]

use uverbs::{MemoryRegion, RawRange, Unowned};

fn first(region: &MemoryRegion<u8, Unowned>) -> Option<u8> {
    region.read_at(0)
}

fn main() {
    let _ = first;
}
