//! The atomics and locks of the shared queue state: the standard library's, or loom's when a model
//! checker drives the code (`--cfg loom`).

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, MutexGuard};

/// What one thread at a time touches, because something else says whose turn it is. loom checks
/// that.
#[derive(Debug)]
pub(crate) struct Turns<T>(
    #[cfg(loom)] loom::cell::UnsafeCell<T>,
    #[cfg(not(loom))] std::cell::UnsafeCell<T>,
);

impl<T> Turns<T> {
    pub(crate) fn new(value: T) -> Self {
        #[cfg(loom)]
        return Turns(loom::cell::UnsafeCell::new(value));
        #[cfg(not(loom))]
        return Turns(std::cell::UnsafeCell::new(value));
    }

    /// Puts `value` there. What was there before is forgotten.
    ///
    /// # Safety
    ///
    /// Nobody else is at it, and whoever was before is known to have finished.
    #[inline(always)]
    pub(crate) unsafe fn put(&self, value: T) {
        #[cfg(loom)]
        // SAFETY: the caller is alone with it.
        self.0.with_mut(|cell| unsafe { std::ptr::write(cell, value) });
        #[cfg(not(loom))]
        // SAFETY: the caller is alone with it.
        unsafe {
            std::ptr::write(self.0.get(), value)
        };
    }
}

impl<T> Turns<std::mem::MaybeUninit<T>> {
    /// What is there; it is not there any more.
    ///
    /// # Safety
    ///
    /// As [`put`](Self::put).
    #[inline(always)]
    pub(crate) unsafe fn take(&self) -> std::mem::MaybeUninit<T> {
        #[cfg(loom)]
        // SAFETY: the caller is alone with it, and a copy of what may be nothing is no second one.
        return self.0.with_mut(|cell| unsafe { std::ptr::read(cell) });
        #[cfg(not(loom))]
        // SAFETY: as above.
        return unsafe { std::ptr::read(self.0.get()) };
    }
}
