//! A completion is lent until the program asks for the next one.
#![allow(unused)]

use uverbs::{CompletionQueue, PollError};

fn sum(cq: &mut CompletionQueue) -> Result<Option<u64>, PollError> {
    let mut completions = cq.poll()?;
    let first = completions.next();
    let _first_id = first.map(|completion| completion.wr_id());
    let second = completions.next();
    Ok(first.map(|completion| completion.wr_id()))
}

fn main() {
    let _ = sum;
}
