//! A visited request shows its tag to other threads only if the tag's type is `Sync`.
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
