//! A thread domain cannot be cloned; a context can.
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
