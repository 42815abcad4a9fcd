//! Two threads that share a handle of a worker's queue pair would post at once, without a lock.
#![allow(unused)]

use uverbs::aio::AsyncQueuePair;
use uverbs::{Exclusive, Shared};

fn shared<T: Sync>(by_threads: &T) {}

fn f(qp: AsyncQueuePair<Exclusive>) {
    shared(&qp);
}

fn main() {
    let _ = f;
}
