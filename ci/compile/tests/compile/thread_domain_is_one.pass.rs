//! A thread domain cannot be in two places; a context can.
#![allow(unused)]

use uverbs::{Context, ThreadDomain};

fn two<T: Clone>(one: T) -> (T, T) {
    (one.clone(), one)
}

fn f(td: ThreadDomain, context: Context) {
    two(context);
}

fn main() {
    let _ = f;
}
