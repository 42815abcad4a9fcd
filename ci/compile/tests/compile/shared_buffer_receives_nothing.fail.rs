//! A buffer that others may be reading cannot be lent to a receive.
#![allow(unused)]

use uverbs::aio::AsyncQueuePair;
use uverbs::owned::{Buffer, SharedBuffer};

fn receive(qp: &AsyncQueuePair, alone: Buffer, shared: SharedBuffer) {
    let _ = qp.recv(shared);
}

fn main() {
    let _ = receive;
}
