//! User indices: the 24-bit numbers by which completions name their queue pair.
//!
//! The context assigns them, the command that creates a queue pair carries one (`uidx`), and the device
//! copies it into every CQE. A number is assigned again only when its holders have dropped it: the queue
//! pair, and the poller of each completion queue that may still hold a CQE with it.

use crate::sync::lock::Lock;
use std::sync::Arc;

/// The number that stands for no index; the device has no greater ones.
const NO_INDEX: u32 = (1 << 24) - 1;

/// The user indices of a context. The free indices change under one lock. `qp_table.rs` model-checks that no index
/// is assigned while a poller may find a CQE with it.
#[derive(Debug)]
pub(crate) struct UidxAllocator {
    free: Lock<Free>,
}

#[derive(Debug)]
struct Free {
    /// The least number that was never assigned.
    fresh: u32,
    returned: Vec<u32>,
}

impl UidxAllocator {
    pub(crate) fn new() -> Arc<UidxAllocator> {
        // Zero is never assigned: memory that was wiped names no queue pair.
        Arc::new(UidxAllocator { free: Lock::new(Free { fresh: 1, returned: Vec::new() }) })
    }

    /// An index that is not in use; `None` when all are.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Arc<Uidx>> {
        let mut free = self.free.lock()?;
        let uidx = match free.returned.pop() {
            Some(uidx) => uidx,
            None if free.fresh < NO_INDEX => {
                free.fresh += 1;
                free.fresh - 1
            }
            None => return None,
        };
        Some(Arc::new(Uidx { uidx, indices: self.clone() }))
    }
}

/// An index in use.
#[derive(Debug)]
pub(crate) struct Uidx {
    uidx: u32,
    indices: Arc<UidxAllocator>,
}

impl Uidx {
    pub(crate) fn get(&self) -> u32 {
        self.uidx
    }
}

impl Drop for Uidx {
    fn drop(&mut self) {
        if let Some(mut free) = self.indices.free.lock() {
            free.returned.push(self.uidx);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn indices_are_assigned_again_only_when_nobody_holds_them() {
        let indices = UidxAllocator::new();
        let first = indices.take().unwrap();
        let second = indices.take().unwrap();
        assert_eq!((first.get(), second.get()), (1, 2));
        let held = first.clone();
        drop(first);
        assert_eq!(indices.take().unwrap().get(), 3);
        drop(held);
        assert_eq!(indices.take().unwrap().get(), 1);
    }

    #[test]
    fn the_last_index_is_never_assigned() {
        let indices = UidxAllocator::new();
        indices.free.lock().unwrap().fresh = NO_INDEX - 1;
        let last = indices.take().unwrap();
        assert_eq!(last.get(), 0xff_fffe);
        assert!(indices.take().is_none());
        drop(last);
        assert!(indices.take().is_some());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_waits_for_no_index() {
        let indices = UidxAllocator::new();
        let mut index = indices.take();
        let child = || {
            assert!(indices.take().is_none());
            drop(index.take());
        };
        crate::sync::lock::in_child_while_held(|| indices.free.lock(), child);
    }
}
