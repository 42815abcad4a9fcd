//! An outer scope, whose requests last longer, cannot lend memory that an inner scope registered.
#![allow(unused)]

use uverbs::owned::{OwnedCompletionQueue, OwnedQueuePair};
use uverbs::{ProtectionDomain, SendWr};

fn run(
    (qp, cq): (&mut OwnedQueuePair<u32>, &mut OwnedCompletionQueue<u32>),
    (other_qp, other_cq): (&mut OwnedQueuePair<u32>, &mut OwnedCompletionQueue<u32>),
    pd: &ProtectionDomain,
    memory: &mut [u8],
) {
    qp.scope(cq, |outer| {
        other_qp
            .scope(other_cq, |inner| {
                let local = inner.register(pd, memory).unwrap();
                let _ = inner.post(SendWr::send(&[]), local).unwrap();
            })
            .unwrap();
    })
    .unwrap();
}

fn main() {
    let _ = run;
}
