//! State that threads share, and the check whether this process is a fork of the one that made it.
//!
//! Atomics and locks are the standard library's, or loom's when a model checker drives the code
//! (`--cfg loom`).
#![allow(unsafe_code)]

pub(crate) mod fork;
pub(crate) mod lock;
pub(crate) mod ring_array;
pub(crate) mod update_list;

#[cfg(loom)]
pub(crate) use loom::hint::spin_loop;
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard};
#[cfg(loom)]
pub(crate) use loom::thread::yield_now;
#[cfg(not(loom))]
pub(crate) use std::hint::spin_loop;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, MutexGuard};
#[cfg(not(loom))]
pub(crate) use std::thread::yield_now;

/// An `UnsafeCell` that one thread at a time accesses; an atomic beside it says which. In a model loom checks that.
#[derive(Debug)]
pub(crate) struct LoomCell<T>(
    #[cfg(loom)] loom::cell::UnsafeCell<T>,
    #[cfg(not(loom))] std::cell::UnsafeCell<T>,
);

impl<T> LoomCell<T> {
    pub(crate) fn new(value: T) -> Self {
        #[cfg(loom)]
        return LoomCell(loom::cell::UnsafeCell::new(value));
        #[cfg(not(loom))]
        return LoomCell(std::cell::UnsafeCell::new(value));
    }

    /// Writes `value`, without dropping the old one.
    ///
    /// # Safety
    ///
    /// No other thread accesses the cell, and the accesses of earlier threads happened before this one.
    #[inline(always)]
    pub(crate) unsafe fn write(&self, value: T) {
        #[cfg(loom)]
        // SAFETY: the caller's promise.
        self.0.with_mut(|cell| unsafe { std::ptr::write(cell, value) });
        #[cfg(not(loom))]
        // SAFETY: the caller's promise.
        unsafe {
            std::ptr::write(self.0.get(), value)
        };
    }

    /// The value's address. Only the thread whose turn it is may use it.
    #[inline(always)]
    pub(crate) fn get(&self) -> *mut T {
        #[cfg(loom)]
        return self.0.with_mut(|cell| cell);
        #[cfg(not(loom))]
        return self.0.get();
    }
}

/// Explores a model that has too many interleavings for all of them: those with up to `usual` preemptions
/// of threads, in `cargo ci soak loom` up to `soak`.
#[cfg(all(test, loom))]
pub(crate) fn bounded_model(usual: usize, soak: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    let in_soak = std::env::var_os("UVERBS_LOOM_SOAK").is_some();
    builder.preemption_bound = Some(if in_soak { soak } else { usual });
    builder.check(model);
}

/// A cell without content, for models: loom fails a model in which two threads access it at once.
#[cfg(all(test, loom))]
#[derive(Debug)]
pub(crate) struct AccessProbe(loom::cell::UnsafeCell<()>);

#[cfg(all(test, loom))]
// SAFETY: the cell holds no data; loom's own state in it may be used from any thread.
unsafe impl Sync for AccessProbe {}

#[cfg(all(test, loom))]
impl AccessProbe {
    pub(crate) fn new() -> AccessProbe {
        AccessProbe(loom::cell::UnsafeCell::new(()))
    }

    /// Records a read.
    pub(crate) fn read(&self) {
        self.0.with(|_| ());
    }

    /// Records a write.
    pub(crate) fn write(&self) {
        self.0.with_mut(|_| ());
    }
}
