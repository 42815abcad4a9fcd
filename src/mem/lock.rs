//! A mutex that a forked child does not wait for.
//!
//! Only the thread that forked goes on in a child: what another thread had locked at that moment
//! stays locked there for ever.

use super::fork::Epoch;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A value of this process, one thread at a time. Children of a fork do not get at it.
#[derive(Debug)]
pub(crate) struct Lock<T> {
    value: Mutex<T>,
    /// `None` where the kernel could not say which process this is: then nobody gets at it.
    epoch: Option<Epoch>,
}

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Lock { value: Mutex::new(value), epoch: Epoch::current().ok() }
    }

    /// The value; `None` in a child of the process that made this.
    pub(crate) fn lock(&self) -> Option<MutexGuard<'_, T>> {
        let here = self.epoch.is_some_and(|epoch| !epoch.is_over());
        here.then(|| self.value.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<T: Default> Default for Lock<T> {
    fn default() -> Self {
        Lock::new(T::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::fork::in_child;
    use std::sync::mpsc;

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_does_not_wait_for_a_thread_that_it_has_not() {
        let lock = Lock::new(7);
        let (locked, is_locked) = mpsc::channel();
        let (forked, is_forked) = mpsc::channel::<()>();
        let here = &lock;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let guard = here.lock();
                locked.send(()).unwrap();
                // Until the other end is dropped, be it by a panic.
                let _ = is_forked.recv();
                drop(guard);
            });
            is_locked.recv().unwrap();
            let _forked = forked;
            in_child(|| assert!(lock.lock().is_none()));
        });
        assert_eq!(lock.lock().as_deref(), Some(&7));
    }
}
