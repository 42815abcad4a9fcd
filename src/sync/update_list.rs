//! A list to which any thread adds updates, and from which its one owner takes all of them.
//!
//! The control path tells the poller of a completion queue, which may be another thread, of new and destroyed
//! queue pairs. The poller owns its tables and applies the updates itself. One load says that there are none.
//! Model-checked with loom.

use super::{AtomicPtr, Ordering};
use std::ptr;

struct Node<T> {
    value: T,
    next: *mut Node<T>,
}

/// A multi-producer stack. Its consumer takes the whole stack at once, so that no node is compared
/// after it was freed (no ABA).
pub(crate) struct UpdateList<T> {
    head: AtomicPtr<Node<T>>,
}

// SAFETY: the list owns its updates until they are taken, and moves them between threads without sharing.
unsafe impl<T: Send> Send for UpdateList<T> {}
// SAFETY: `&UpdateList` only moves values of `T` in and out, which needs `T: Send` and no more.
unsafe impl<T: Send> Sync for UpdateList<T> {}
impl<T> std::panic::UnwindSafe for UpdateList<T> {}
impl<T> std::panic::RefUnwindSafe for UpdateList<T> {}

impl<T> UpdateList<T> {
    pub(crate) fn new() -> Self {
        UpdateList { head: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Adds an update. It allocates, so it belongs to the control path.
    pub(crate) fn put(&self, value: T) {
        let node = Box::into_raw(Box::new(Node { value, next: ptr::null_mut() }));
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            // SAFETY: `node` came from `Box::into_raw` and nobody else knows it yet.
            unsafe { (*node).next = head };
            // Release pairs with the Acquire of `take`: the update is written before it is found.
            match self.head.compare_exchange_weak(head, node, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(seen) => head = seen,
            }
        }
    }

    /// Whether there is nothing to take: one load.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        // If this thread knows that an update was added, it synchronised with the thread that added it, and the
        // load sees the update. The next call sees later ones.
        self.head.load(Ordering::Relaxed).is_null()
    }

    /// Takes all updates, newest first, and gives each to `read`.
    pub(crate) fn take(&self, mut read: impl FnMut(T)) {
        // Acquire pairs with the Release of `put`.
        let mut next = self.head.swap(ptr::null_mut(), Ordering::Acquire);
        while !next.is_null() {
            // SAFETY: the swap made this thread the only one that knows the chain, and each of its updates
            // came from `Box::into_raw`.
            let update = unsafe { Box::from_raw(next) };
            next = update.next;
            read(update.value);
        }
    }
}

impl<T> std::fmt::Debug for UpdateList<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UpdateList").field("empty", &self.is_empty()).finish()
    }
}

impl<T> Drop for UpdateList<T> {
    fn drop(&mut self) {
        self.take(drop);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn all_updates_are_taken_newest_first() {
        let list = UpdateList::new();
        assert!(list.is_empty());
        for n in 0..3 {
            list.put(n);
        }
        let mut seen = Vec::new();
        list.take(|n| seen.push(n));
        assert_eq!(seen, [2, 1, 0]);
        assert!(list.is_empty());
    }

    #[test]
    fn dropping_the_list_frees_its_updates() {
        let update = Arc::new(());
        let list = UpdateList::new();
        list.put(update.clone());
        drop(list);
        assert_eq!(Arc::strong_count(&update), 1);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    /// A value that loom watches: loom fails a read that is not ordered after the write.
    struct Watched(UnsafeCell<u32>);

    impl Watched {
        fn new(value: u32) -> Watched {
            let watched = Watched(UnsafeCell::new(0));
            // SAFETY: nobody else has it yet.
            watched.0.with_mut(|cell| unsafe { *cell = value });
            watched
        }

        fn read(&self) -> u32 {
            // SAFETY: it is written once, before it is added to the list; loom checks that.
            self.0.with(|cell| unsafe { *cell })
        }
    }

    /// Two control threads put while the poller takes: every update arrives exactly once, with its content.
    #[test]
    fn every_update_arrives_once() {
        loom::model(|| {
            let list = Arc::new(UpdateList::new());
            let writers: Vec<_> = (1..=2u32)
                .map(|n| {
                    let list = list.clone();
                    thread::spawn(move || list.put(Watched::new(n)))
                })
                .collect();
            let mut sum = 0;
            list.take(|n| sum += n.read());
            for writer in writers {
                writer.join().unwrap();
            }
            assert!(sum == 3 || !list.is_empty());
            list.take(|n| sum += n.read());
            assert_eq!(sum, 3);
        });
    }
}
