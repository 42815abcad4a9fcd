//! The program cannot write a buffer that other requests may be sending.
#![allow(unused)]

use uverbs::owned::{Buffer, SharedBuffer};

fn write(mut alone: Buffer, mut shared: SharedBuffer) {
    alone[0] = 1;
}

fn main() {
    let _ = write;
}
