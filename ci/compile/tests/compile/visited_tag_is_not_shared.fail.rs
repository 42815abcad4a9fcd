//! A request that is visited shows its tag to other threads only if tags can be shared.
#![allow(unused)]

use std::cell::Cell;
use uverbs::PollError;
use uverbs::owned::OwnedCompletionQueue;

fn visit(cq: &mut OwnedCompletionQueue<Cell<u32>>) -> Result<usize, PollError> {
    cq.poll_each(1, |request| {
        std::thread::scope(|threads| {
            threads.spawn(|| request.is_success());
        });
    })
}

fn main() {
    let _ = visit;
}
