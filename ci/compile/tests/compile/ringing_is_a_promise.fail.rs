//! The caller of `ring` makes promises about the memory that the batch names.
#![allow(unused)]

use uverbs::{RingError, SendBatch};

fn ring(batch: SendBatch<'_>) -> Result<(), RingError> {
    { batch.ring() }
}

fn main() {
    let _ = ring;
}
