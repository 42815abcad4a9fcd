//! A visited request is lent until the visit ends.
#![allow(unused)]

use uverbs::PollError;
use uverbs::owned::OwnedCompletionQueue;

fn keep<T>(request: T) -> Option<T> {
    Some(request)
}

fn lose<T>(request: T) -> Option<()> {
    Some(drop(request))
}

fn visit(cq: &mut OwnedCompletionQueue<u32>) -> Result<usize, PollError> {
    let mut kept = None;
    cq.poll_each(1, |request| kept = lose(request))
}

fn main() {
    let _ = visit;
}
