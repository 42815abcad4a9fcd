//! A worker owns the token of its thread domain, so that no other code rings with it.
#![allow(unused)]

use uverbs::{CqBuilder, Exclusive, RingError, SendBatch, ThreadDomain};

fn f(td: ThreadDomain, mut other: ThreadDomain, cq: CqBuilder, batch: SendBatch<'_, Exclusive>) {
    let mut mine = td;
    let worker = cq.build_worker(mine);
    // SAFETY: the batch is empty.
    let _: Result<(), RingError> = unsafe { batch.ring(&mut mine) };
}

fn main() {
    let _ = f;
}
