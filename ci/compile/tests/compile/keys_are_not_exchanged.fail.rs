//! The key for this side does not stand where the key for peers is due.
#![allow(unused)]

use uverbs::{MemoryRegion, Remote};

fn remote(region: &MemoryRegion) -> Remote {
    Remote { addr: region.addr(), rkey: region.lkey() }
}

fn main() {
    let _ = remote;
}
