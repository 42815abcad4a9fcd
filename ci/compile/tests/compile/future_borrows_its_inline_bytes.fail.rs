//! A future that was not polled has not copied its bytes yet.
#![allow(unused)]

use uverbs::aio::{Op, AsyncQueuePair};

fn send<'a>(qp: &AsyncQueuePair, bytes: &'a [u8]) -> Op<'static, ()> {
    qp.send_inline(bytes)
}

fn main() {
    let _ = send;
}
