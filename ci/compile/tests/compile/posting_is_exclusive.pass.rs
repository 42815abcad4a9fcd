//! Posting borrows the queue exclusively, so that two threads cannot post at once.
#![allow(unused)]

use uverbs::{PostError, SendQueue};

fn room(queue: &mut SendQueue) -> Result<u32, PostError> {
    Ok(queue.batch()?.room())
}

fn main() {
    let _ = room;
}
