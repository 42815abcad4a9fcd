//! Memory that was lent to a request is not there until it is over.
#![allow(unused)]

use uverbs::SendWr;
use uverbs::owned::{Buffer, OwnedSendBatch};

fn push(batch: &mut OwnedSendBatch<'_, u32>, buffer: Buffer, other: Buffer) -> usize {
    batch.push(SendWr::send(&[]), buffer, 1).unwrap();
    other.len()
}

fn main() {
    let _ = push;
}
