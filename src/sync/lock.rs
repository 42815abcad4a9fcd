//! The locks of the library. A forked child waits for none of them.
//!
//! Only the thread that forked goes on in a child: a lock that another thread held at that moment
//! stays locked there for ever, and its value may be half changed. Everything that the library
//! locks is in one of the types below; `tests/locks.rs` finds every other lock.

use super::fork::Epoch;
use super::{Mutex, MutexGuard};
use std::cell::{RefCell, RefMut};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::{PoisonError, TryLockError};

/// A value of this process that one caller at a time may access: behind a [`Lock`], or in a [`LocalLock`].
pub trait AnyLock<T> {
    /// Gives access to the value.
    type Guard<'l>: DerefMut<Target = T>
    where
        Self: 'l;

    fn new(value: T) -> Self;

    /// The value; `None` in a child of the process that made this.
    fn lock(&self) -> Option<Self::Guard<'_>>;

    /// As [`lock`](Self::lock), for a value whose use begins behind a gate that is shut in a forked child. A [`LocalLock`] need
    /// not look then: 5 instructions.
    #[inline(always)]
    fn lock_gated(&self) -> Option<Self::Guard<'_>> {
        self.lock()
    }

    /// As [`lock`](Self::lock), without locking: the borrow is exclusive.
    fn get_mut(&mut self) -> Option<&mut T>;
}

/// A value of this process, for one thread at a time. Children of a fork may not lock it.
pub struct Lock<T> {
    value: Mutex<ManuallyDrop<T>>,
    /// Over if the kernel cannot wipe a page on fork: then nobody may lock it.
    epoch: Epoch,
}

/// The value behind a [`Lock`], for as long as this is held.
pub struct Guard<'l, T>(MutexGuard<'l, ManuallyDrop<T>>);

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Lock { value: Mutex::new(ManuallyDrop::new(value)), epoch: Epoch::current_or_none() }
    }

    fn is_here(&self) -> bool {
        !self.epoch.is_over()
    }

    /// The value; `None` in a child of the process that made this.
    pub(crate) fn lock(&self) -> Option<Guard<'_, T>> {
        self.is_here().then(|| Guard(self.value.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// As [`lock`](Self::lock), without locking: the borrow is exclusive.
    pub(crate) fn get_mut(&mut self) -> Option<&mut T> {
        self.is_here().then(|| &mut **self.value.get_mut().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<T> AnyLock<T> for Lock<T> {
    type Guard<'l>
        = Guard<'l, T>
    where
        T: 'l;

    fn new(value: T) -> Self {
        Lock::new(value)
    }

    fn lock(&self) -> Option<Guard<'_, T>> {
        self.lock()
    }

    fn get_mut(&mut self) -> Option<&mut T> {
        self.get_mut()
    }
}

/// A value of one thread, which borrows it for a moment at a time: no other thread can name it, because the
/// cell is not `Sync`. Children of a fork may not lock it.
pub struct LocalLock<T> {
    value: RefCell<T>,
    /// Over if the kernel cannot wipe a page on fork: then nobody may lock it.
    epoch: Epoch,
}

impl<T> AnyLock<T> for LocalLock<T> {
    type Guard<'l>
        = RefMut<'l, T>
    where
        T: 'l;

    fn new(value: T) -> Self {
        LocalLock { value: RefCell::new(value), epoch: Epoch::current_or_none() }
    }

    /// The value; `None` in a child of the process that made this. The library runs no code of the program
    /// while it has the value, so that no call finds it borrowed: a [`Lock`] would wait for itself.
    #[inline]
    fn lock(&self) -> Option<RefMut<'_, T>> {
        let is_here = !self.epoch.is_over();
        if is_here { self.value.try_borrow_mut().ok() } else { None }
    }

    #[inline(always)]
    fn lock_gated(&self) -> Option<RefMut<'_, T>> {
        self.value.try_borrow_mut().ok()
    }

    fn get_mut(&mut self) -> Option<&mut T> {
        let is_here = !self.epoch.is_over();
        is_here.then(|| self.value.get_mut())
    }
}

impl<T: Default> Default for Lock<T> {
    fn default() -> Self {
        Lock::new(T::default())
    }
}

impl<T> Drop for Lock<T> {
    /// Drops the value, unless a thread that a fork left behind in the parent was changing it.
    fn drop(&mut self) {
        let mut value = match self.value.try_lock() {
            Ok(value) => value,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        // SAFETY: nobody uses the value after this.
        unsafe { ManuallyDrop::drop(&mut value) };
    }
}

/// Without the value: the writer is the program's, and may take the same lock.
impl<T> fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock").finish_non_exhaustive()
    }
}

/// Without the value, as that of [`Lock`].
impl<T> fmt::Debug for LocalLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalLock").finish_non_exhaustive()
    }
}

/// Without the value, as that of [`Lock`].
impl<T> fmt::Debug for TryLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TryLock").finish_non_exhaustive()
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// A value for forked children, too: a caller that finds it locked does without it.
#[derive(Default)]
pub(crate) struct TryLock<T>(std::sync::Mutex<T>);

impl<T> TryLock<T> {
    pub(crate) const fn new(value: T) -> Self {
        TryLock(std::sync::Mutex::new(value))
    }

    /// The value; `None` while another thread has it.
    pub(crate) fn try_lock(&self) -> Option<std::sync::MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// Forks while another thread is inside `hold`, and runs `child` in the child, which must come to its
/// end.
#[cfg(all(test, not(loom)))]
pub(crate) fn in_child_while_held<G>(hold: impl FnOnce() -> G + Send, child: impl FnOnce()) {
    use std::sync::mpsc;
    let (held, is_held) = mpsc::channel();
    let (forked, is_forked) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let guard = hold();
            held.send(()).unwrap();
            // Waits until the other end is dropped, even by a panic.
            let _ = is_forked.recv();
            drop(guard);
        });
        is_held.recv().unwrap();
        let _forked = forked;
        super::fork::in_child(child);
    });
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::fork::in_child;
    use std::cell::Cell;
    use std::rc::Rc;

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_does_not_wait_for_a_thread_that_it_has_not() {
        let lock = Lock::new(7);
        in_child_while_held(|| lock.lock(), || assert!(lock.lock().is_none()));
        assert_eq!(lock.lock().as_deref(), Some(&7));
        let tried = TryLock::new(7);
        in_child_while_held(|| tried.try_lock(), || assert!(tried.try_lock().is_none()));
        in_child(|| assert_eq!(tried.try_lock().as_deref(), Some(&7)));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_does_not_lock_a_value_of_its_parents_thread() {
        let mut local = <LocalLock<u32> as AnyLock<u32>>::new(7);
        in_child(|| assert!(local.lock().is_none() && local.get_mut().is_none()));
        assert_eq!(local.lock().as_deref(), Some(&7));
        assert!(local.lock().is_some_and(|_held| local.lock().is_none()), "one borrow at a time");
    }

    /// Panics when it is dropped, so that the child's exit status tells of it.
    struct Trap;

    impl Drop for Trap {
        fn drop(&mut self) {
            panic!("another thread was changing this");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_does_not_drop_a_value_that_another_thread_was_changing() {
        let lock = std::sync::Arc::new(Lock::new(Some(Trap)));
        let (there, mut here) = (lock.clone(), Some(lock.clone()));
        in_child_while_held(
            || there.lock(),
            || {
                // The other thread of the parent, which this child has not, holds all but one.
                let lock = here.take();
                let last = lock.as_ref().map(std::sync::Arc::as_ptr);
                std::mem::forget(lock);
                // SAFETY: a copy in a process of its own, which ends before anybody else drops it.
                last.into_iter().for_each(|last| drop(unsafe { std::ptr::read(last) }));
            },
        );
        std::mem::forget(lock.lock().and_then(|mut trap| trap.take()));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_drops_a_value_that_nobody_was_changing() {
        struct Note(Rc<Cell<bool>>);
        impl Drop for Note {
            fn drop(&mut self) {
                self.0.set(true);
            }
        }
        let dropped = Rc::new(Cell::new(false));
        let mut lock = Some(Lock::new(Note(dropped.clone())));
        in_child(|| {
            assert!(lock.as_mut().is_some_and(|lock| lock.get_mut().is_none()));
            drop(lock.take());
            assert!(dropped.get());
        });
        assert!(!dropped.get() && lock.as_mut().is_some_and(|lock| lock.get_mut().is_some()));
        drop(lock);
        assert!(dropped.get());
    }
}
