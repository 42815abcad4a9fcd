//! A scope's request leaves its memory with the program, which could drop a buffer of its own meanwhile.
#![allow(unused)]

use uverbs::owned::{LendScoped, RegionSge, RegisteredBuffer};

struct Page(RegionSge);

unsafe impl RegisteredBuffer for Page {
    fn sge(&self) -> RegionSge {
        self.0
    }
}

trait Writable<'s, 'env> {
    fn is_writable(&self) -> bool;
}

impl Writable<'_, '_> for Page {
    fn is_writable(&self) -> bool {
        true
    }
}

fn main() {}
