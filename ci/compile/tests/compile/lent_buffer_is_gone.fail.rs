//! The program cannot use memory that it lent to a request until the request has ended.
#![allow(unused)]

use uverbs::SendWr;
use uverbs::owned::{Buffer, OwnedSendBatch};

fn push(batch: &mut OwnedSendBatch<'_, u32>, buffer: Buffer, other: Buffer) -> usize {
    batch.push(SendWr::send(&[]), buffer, 1).unwrap();
    buffer.len()
}

fn main() {
    let _ = push;
}
