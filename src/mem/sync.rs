//! The atomics of the shared queue state: the standard library's, or loom's when a model checker
//! drives the code (`--cfg loom`).

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicPtr, Ordering};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicPtr, Ordering};
