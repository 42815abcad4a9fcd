//! Whoever rings a batch vouches for the memory that it names.
#![allow(unused)]

use uverbs::{PostError, SendBatch};

fn ring(batch: SendBatch<'_>) -> Result<(), PostError> {
    unsafe { batch.ring() }
}

fn main() {
    let _ = ring;
}
