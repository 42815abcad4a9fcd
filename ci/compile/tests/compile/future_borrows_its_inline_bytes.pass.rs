//! A future that was not polled has not copied its bytes yet.
#![allow(unused)]

use uverbs::aio::{Op, AsyncQueuePair};
use uverbs::{SendWr, Shared};

fn send<'a>(qp: &AsyncQueuePair, bytes: &'a [u8]) -> Op<(), Shared, SendWr<'a>> {
    qp.send_inline(bytes)
}

fn main() {
    let _ = send;
}
