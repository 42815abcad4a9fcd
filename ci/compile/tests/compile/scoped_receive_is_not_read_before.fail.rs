//! The program cannot read memory of a scope's receive before the scope has ended.
#![allow(unused)]

use uverbs::owned::{Buffer, OwnedCompletionQueue, OwnedQueuePair};

fn run(
    qp: &mut OwnedQueuePair<u32>,
    cq: &mut OwnedCompletionQueue<u32>,
    mut inbox: Buffer,
    other: Buffer,
) {
    qp.scope(cq, |scope| {
        let _ = scope.recv(&mut inbox).unwrap();
        inbox.len()
    })
    .unwrap();
}

fn main() {
    let _ = run;
}
