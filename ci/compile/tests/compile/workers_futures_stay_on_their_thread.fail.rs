//! The queue pairs, futures and driver of a worker stay on its thread; the worker itself moves there.
#![allow(unused)]

use uverbs::aio::{AsyncCompletionQueue, AsyncQueuePair, AsyncSharedReceiveQueue, AtomicOp, Driver, Inbox, Op, PostAll};
use uverbs::{Exclusive, Shared};

type All<S> = (
    AsyncQueuePair<S>,
    (Op<(), S>, PostAll<(), S>, AtomicOp<S>, Inbox<S>),
    AsyncSharedReceiveQueue<S>,
    AsyncCompletionQueue<S>,
    Driver<(), S>,
);

fn moves<T: Send>(to_another_thread: T) {}

fn f(all: All<Exclusive>) {
    moves(all);
}

fn main() {
    let _ = f;
}
