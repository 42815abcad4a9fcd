//! The queue pairs, futures and driver of a worker stay on its thread; the worker itself moves there.
#![allow(unused)]

use uverbs::aio::{CompletionQueue, Driver, Op, QueuePair, SharedReceiveQueue};
use uverbs::{Exclusive, Shared};

type All<S> = (
    QueuePair<S>,
    Op<'static, (), S>,
    SharedReceiveQueue<S>,
    CompletionQueue<S>,
    Driver<(), S>,
);

fn moves<T: Send>(to_another_thread: T) {}

fn f(all: All<Shared>) {
    moves(all);
}

fn main() {
    let _ = f;
}
