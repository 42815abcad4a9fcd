//! A queue pair is not destroyed under a batch.
#![allow(unused)]

use uverbs::{PostError, QueuePair, SendWr};

fn push(mut qp: QueuePair, other: QueuePair) -> Result<(), PostError> {
    let mut batch = qp.send_batch()?;
    drop(other);
    batch.push(SendWr::send(&[]))
}

fn main() {
    let _ = push;
}
