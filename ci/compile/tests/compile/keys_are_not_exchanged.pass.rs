//! A local key cannot take the place of a remote key.
#![allow(unused)]

use uverbs::{MemoryRegion, Remote};

fn remote(region: &MemoryRegion) -> Remote {
    Remote { addr: region.addr(), rkey: region.rkey() }
}

fn main() {
    let _ = remote;
}
