//! Queues under a thread domain are rung with its token.
#![allow(unused)]

use uverbs::{Exclusive, PostError, SendQueue, ThreadDomain};

fn ring(queue: &mut SendQueue<Exclusive>, td: &mut ThreadDomain) -> Result<(), PostError> {
    let batch = queue.batch()?;
    Ok(unsafe { batch.ring(td) }?)
}

fn main() {
    let _ = ring;
}
