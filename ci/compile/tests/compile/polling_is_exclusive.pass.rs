//! Polling borrows the queue exclusively.
#![allow(unused)]

use uverbs::{CompletionQueue, PollError};

fn any(cq: &mut CompletionQueue) -> Result<bool, PollError> {
    Ok(cq.poll()?.next().is_some())
}

fn main() {
    let _ = any;
}
