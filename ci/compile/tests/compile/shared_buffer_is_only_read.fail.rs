//! A buffer that others may be sending is not written.
#![allow(unused)]

use uverbs::owned::{Buffer, SharedBuffer};

fn write(mut alone: Buffer, mut shared: SharedBuffer) {
    shared[0] = 1;
}

fn main() {
    let _ = write;
}
