//! Work that waits until all locks are released: flushing queue pairs, calling wakers, and dropping memory.
//! All of it may run code of the program, which may use the same queues.

use super::inflight::{InflightKey, flush};
use crate::first_panic::FirstPanic;
use crate::owned::{Buffer, Memory};
use crate::qp::WeakQpHandle;
use std::task::Waker;

/// Queue pairs to be flushed, wakers to be called, and memory to be dropped.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    failed: Vec<WeakQpHandle>,
    wakers: Vec<Waker>,
    memory: Vec<Memory>,
    /// Memory that is a buffer, which leaves its slot word by word and not as a payload of 136 bytes.
    buffers: Vec<Buffer>,
    /// Queues in which requests were over while futures waited for room. It is here to be allocated once.
    made_room: Vec<InflightKey>,
}

impl Deferred {
    /// With room for `wakers` wakers.
    pub(super) fn with_capacity(wakers: usize) -> Deferred {
        Deferred { wakers: Vec::with_capacity(wakers), ..Deferred::default() }
    }

    pub(super) fn flush(&mut self, qp: Option<WeakQpHandle>) {
        self.failed.extend(qp);
    }

    #[inline]
    pub(super) fn wake(&mut self, waker: Waker) {
        self.wakers.push(waker);
    }

    /// Requests of a queue were over while futures waited for room.
    pub(super) fn make_room(&mut self, queue: InflightKey) {
        if self.made_room.last() != Some(&queue) {
            self.made_room.push(queue);
        }
    }

    /// Begins anew, should an earlier poll have found nobody waiting in the end.
    pub(super) fn forget_room(&mut self) {
        self.made_room.clear();
    }

    /// Calls `wake` for each queue that [made room](Self::make_room).
    pub(super) fn each_with_room(&mut self, mut wake: impl FnMut(InflightKey, &mut Deferred)) {
        let mut queues = std::mem::take(&mut self.made_room);
        queues.drain(..).for_each(|queue| wake(queue, self));
        self.made_room = queues;
    }

    #[inline]
    pub(super) fn drop_buffer(&mut self, buffer: Buffer) {
        self.buffers.push(buffer);
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
        self.run_all().resume();
    }

    fn is_empty(&self) -> bool {
        self.failed.is_empty()
            && self.wakers.is_empty()
            && self.memory.is_empty()
            && self.buffers.is_empty()
    }

    /// Does all the work, and ignores panics.
    pub(super) fn run_quietly(&mut self) {
        self.run_all().ignore();
    }

    fn run_all(&mut self) -> FirstPanic {
        let mut calls = FirstPanic::default();
        if !self.failed.is_empty() {
            for qp in self.failed.drain(..) {
                calls.catch(|| drop(flush(Some(&qp))));
            }
        }
        let mut wakers = self.wakers.drain(..);
        while wakers.len() > 0 {
            // Again after a waker that panicked.
            calls.catch(|| wakers.by_ref().for_each(Waker::wake));
        }
        drop(wakers);
        // The last buffer of a pool may be the last user of a parent domain, whose allocator is the program's.
        let mut buffers = self.buffers.drain(..);
        while buffers.len() > 0 {
            calls.catch(|| buffers.by_ref().for_each(drop));
        }
        drop(buffers);
        if !self.memory.is_empty() {
            for memory in self.memory.drain(..) {
                calls.catch(|| drop(memory));
            }
        }
        calls
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
    use std::panic::{AssertUnwindSafe, catch_unwind};
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
