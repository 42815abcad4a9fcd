//! A completion is lent until the next one is asked for.
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
