//! Posting takes the queue for itself, so that two threads cannot do it at once.
#![allow(unused)]

use uverbs::{PostError, SendQueue};

fn room(queue: &mut SendQueue) -> Result<u32, PostError> {
    Ok(queue.batch()?.room())
}

fn main() {
    let _ = room;
}
