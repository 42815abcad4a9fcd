//! Work that waits until all locks are released: flushing queue pairs, calling wakers, and dropping memory.
//! All of it may run code of the program, which may use the same queues.

use super::inflight::flush;
use crate::owned::Memory;
use crate::qp::WeakQpHandle;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::task::Waker;

/// Queue pairs to be flushed, wakers to be called, and memory to be dropped.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    failed: Vec<WeakQpHandle>,
    wakers: Vec<Waker>,
    memory: Vec<Memory>,
}

impl Deferred {
    /// With room for `wakers` wakers.
    pub(super) fn with_capacity(wakers: usize) -> Deferred {
        Deferred { wakers: Vec::with_capacity(wakers), ..Deferred::default() }
    }

    pub(super) fn flush(&mut self, qp: Option<WeakQpHandle>) {
        self.failed.extend(qp);
    }

    pub(super) fn wake(&mut self, waker: Waker) {
        self.wakers.push(waker);
    }

    pub(super) fn drop(&mut self, memory: Memory) {
        // Most requests without a future have no memory.
        if !matches!(memory, Memory::None) {
            self.memory.push(memory);
        }
    }

    /// Does all the work, and then lets the first panic go on: a waker that panics must not cost another
    /// task its wake-up.
    pub(super) fn run(&mut self) {
        // Most polls find nothing.
        if self.is_empty() {
            return;
        }
        if let Some(panic) = self.run_all() {
            resume_unwind(panic);
        }
    }

    fn is_empty(&self) -> bool {
        self.failed.is_empty() && self.wakers.is_empty() && self.memory.is_empty()
    }

    /// Does all the work, and ignores panics.
    pub(super) fn run_quietly(&mut self) {
        // What a panic carries may panic in turn when it is dropped.
        if let Some(panic) = self.run_all() {
            std::mem::forget(panic);
        }
    }

    fn run_all(&mut self) -> Option<Box<dyn std::any::Any + Send>> {
        let mut first = None;
        let mut attempt = |work: &mut dyn FnMut()| {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
                match &first {
                    None => first = Some(panic),
                    Some(_) => std::mem::forget(panic),
                }
            }
        };
        if !self.failed.is_empty() {
            for qp in self.failed.drain(..) {
                attempt(&mut || drop(flush(Some(&qp))));
            }
        }
        for waker in self.wakers.drain(..) {
            let mut waker = Some(waker);
            attempt(&mut || waker.take().into_iter().for_each(Waker::wake));
        }
        if !self.memory.is_empty() {
            for memory in self.memory.drain(..) {
                let mut memory = Some(memory);
                attempt(&mut || drop(memory.take()));
            }
        }
        first
    }
}

#[cfg(all(test, not(loom)))]
impl Deferred {
    /// How many wakers are to be called.
    pub(super) fn wakers(&self) -> usize {
        self.wakers.len()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    #[derive(Debug, Default)]
    struct Panics(AtomicUsize);

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
            panic!("as planned");
        }
    }

    #[test]
    fn a_waker_that_panics_does_not_keep_others_from_being_called() {
        let count = Arc::<Panics>::default();
        for quietly in [false, true] {
            count.0.store(0, Ordering::Relaxed);
            let mut deferred = Deferred::default();
            (0..3).for_each(|_| deferred.wake(Waker::from(count.clone())));
            let ended = catch_unwind(AssertUnwindSafe(|| match quietly {
                false => deferred.run(),
                true => deferred.run_quietly(),
            }));
            assert_eq!((ended.is_ok(), count.0.load(Ordering::Relaxed)), (quietly, 3));
            assert!(deferred.wakers.is_empty());
        }
    }
}
