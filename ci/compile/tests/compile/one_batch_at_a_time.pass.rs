//! A queue has one unfinished batch at a time.
#![allow(unused)]

use uverbs::{PostError, SendQueue, SendWr};

fn push(queue: &mut SendQueue) -> Result<(), PostError> {
    let mut first = queue.batch()?;
    first.push(SendWr::send(&[]))?;
    let mut second = queue.batch()?;
    second.push(SendWr::send(&[]))
}

fn main() {
    let _ = push;
}
