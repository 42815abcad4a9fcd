//! A scope borrows only objects that outlive it.
#![allow(unused)]

use uverbs::SendWr;
use uverbs::owned::{BufferPool, OwnedCompletionQueue, OwnedQueuePair};

fn run(qp: &mut OwnedQueuePair<u32>, cq: &mut OwnedCompletionQueue<u32>, pool: &BufferPool) {
    let outer = pool.take().unwrap();
    qp.scope(cq, |scope| {
        let inner = pool.take().unwrap();
        let _ = scope.post(SendWr::send(&[]), &outer).unwrap();
    })
    .unwrap();
}

fn main() {
    let _ = run;
}
