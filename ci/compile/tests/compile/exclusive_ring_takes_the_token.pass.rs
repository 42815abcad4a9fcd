//! Queues under a thread domain are rung with its token.
#![allow(unused)]

use uverbs::{Exclusive, PostError, SendQueue, ThreadDomain};

fn ring(queue: &mut SendQueue<Exclusive>, td: &mut ThreadDomain) -> Result<(), PostError> {
    let batch = queue.batch()?;
    unsafe { batch.ring(td) }.map_err(PostError::Ring)
}

fn main() {
    let _ = ring;
}
