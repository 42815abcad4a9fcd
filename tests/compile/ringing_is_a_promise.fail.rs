//! Whoever rings a batch vouches for the memory that it names.
#![allow(unused)]

use uverbs::{RingError, SendBatch};

fn ring(batch: SendBatch<'_>) -> Result<(), RingError> {
    { batch.ring() }
}

fn main() {
    let _ = ring;
}
