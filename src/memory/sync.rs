//! The atomics and locks of the shared queue state: the standard library's, or loom's when a model
//! checker drives the code (`--cfg loom`).

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
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

    /// Where it is, for who is alone with it.
    #[inline(always)]
    pub(crate) fn place(&self) -> *mut T {
        #[cfg(loom)]
        return self.0.with_mut(|cell| cell);
        #[cfg(not(loom))]
        return self.0.get();
    }
}

/// A place without content, for models: loom finds who touches it while nothing says that it is
/// their turn.
#[cfg(all(test, loom))]
#[derive(Debug)]
pub(crate) struct Touched(loom::cell::UnsafeCell<()>);

#[cfg(all(test, loom))]
// SAFETY: there is nothing behind it but loom's bookkeeping, which is made for that.
unsafe impl Sync for Touched {}

#[cfg(all(test, loom))]
impl Touched {
    pub(crate) fn new() -> Touched {
        Touched(loom::cell::UnsafeCell::new(()))
    }

    /// As if it were read.
    pub(crate) fn read(&self) {
        self.0.with(|_| ());
    }

    /// As if it were written.
    pub(crate) fn write(&self) {
        self.0.with_mut(|_| ());
    }
}
