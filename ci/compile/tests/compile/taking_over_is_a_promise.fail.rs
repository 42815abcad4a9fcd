//! A caller that becomes the owner of an object promises that it has no other owner.
#![allow(unused)]

use uverbs::{Foreign, Imported, MemoryRegion};

fn own(region: Imported<MemoryRegion<u8, Foreign>>) -> bool {
    { region.into_owner().is_ok() }
}

fn main() {
    let _ = own;
}
