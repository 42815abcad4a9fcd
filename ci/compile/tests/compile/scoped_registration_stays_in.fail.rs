//! A request cannot name a scope's registration after the scope: its key may belong to other memory then.
#![allow(unused)]

use uverbs::ProtectionDomain;
use uverbs::owned::{OwnedCompletionQueue, OwnedQueuePair};

fn run(
    qp: &mut OwnedQueuePair<u32>,
    cq: &mut OwnedCompletionQueue<u32>,
    pd: &ProtectionDomain,
    memory: &mut [u8],
) {
    let local = qp.scope(cq, |scope| scope.register(pd, memory).unwrap()).unwrap();
}

fn main() {
    let _ = run;
}
