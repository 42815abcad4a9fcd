//! Gates: one byte that says whether a queue may be used.
//!
//! A gate lies behind a doorbell record, in a page that the kernel wipes in a forked child. One load
//! says whether the queue's state allows an operation and whether the queue belongs to this process.

use super::doorbell_record::{DoorbellPages, DoorbellRecord};
use rustix::io::Errno;
use std::num::NonZeroU8;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// The operations that a queue's state allows, as a level: each operation needs a least level. Level 0 is shut.
#[derive(Clone, Debug)]
pub(crate) struct Gate {
    level: *const AtomicU8,
    _record: Arc<DoorbellRecord>,
}

// SAFETY: see `DoorbellRecord`; the level is an atomic.
unsafe impl Send for Gate {}
// SAFETY: as above.
unsafe impl Sync for Gate {}
impl std::panic::UnwindSafe for Gate {}
impl std::panic::RefUnwindSafe for Gate {}

impl Gate {
    /// The gate behind a record, shut; `None` if the record is in memory of its own, which a fork need
    /// not wipe.
    pub(crate) fn beside(record: &Arc<DoorbellRecord>) -> Option<Gate> {
        let level = record.byte_behind()?.as_ptr().cast();
        let gate = Gate { level, _record: record.clone() };
        gate.level().store(0, Ordering::Relaxed);
        Some(gate)
    }

    /// A gate in a cache line of its own, for a queue without a doorbell record in these pages.
    pub(crate) fn alone(pages: &Arc<DoorbellPages>) -> Result<Gate, Errno> {
        Gate::beside(&Arc::new(pages.alloc()?)).ok_or(Errno::INVAL)
    }

    /// The level; only the owner of the queue's state writes it.
    #[inline]
    pub(crate) fn level(&self) -> &AtomicU8 {
        // SAFETY: inside the page, which `_record` keeps, and only ever used as an atomic.
        unsafe { &*self.level }
    }

    /// Whether the gate is at `least` or above.
    #[inline]
    pub(crate) fn is_at(&self, least: NonZeroU8) -> bool {
        // Acquire pairs with the Release of the store that raised the level, so that the setup before it is visible.
        self.level().load(Ordering::Acquire) >= least.get()
    }

    /// Whether the gate is shut: in a forked child, or before the queue was first made ready.
    #[inline]
    pub(crate) fn is_shut(&self) -> bool {
        self.level().load(Ordering::Relaxed) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::super::queue_memory::QueueMemory;
    use super::*;

    #[test]
    fn a_gate_is_open_up_to_its_level() {
        let gate = Gate::alone(&DoorbellPages::new().unwrap()).unwrap();
        let level = |level| NonZeroU8::new(level).unwrap();
        assert!(gate.is_shut() && !gate.is_at(level(1)));
        gate.level().store(3, Ordering::Relaxed);
        assert!(!gate.is_shut() && gate.is_at(level(1)) && gate.is_at(level(3)));
        assert!(!gate.is_at(level(4)));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_gate_is_shut_in_a_child() {
        let pages = DoorbellPages::new().unwrap();
        let record = Arc::new(pages.alloc().unwrap());
        let gate = Gate::beside(&record).unwrap();
        assert!(gate.is_shut());
        gate.level().store(3, Ordering::Relaxed);
        record.word::<0>().set(!0);
        record.word::<1>().set(!0);
        assert_eq!(gate.level().load(Ordering::Relaxed), 3, "apart from the record");
        crate::sync::fork::in_child(|| assert!(gate.is_shut()));
        assert!(!gate.is_shut());
        drop((gate, record));
        let again = Arc::new(pages.alloc().unwrap());
        assert!(Gate::beside(&again).unwrap().is_shut(), "the cache line is reused");
        let own = DoorbellRecord::custom(QueueMemory::pages(8).unwrap()).unwrap();
        assert!(Gate::beside(&Arc::new(own)).is_none());
    }
}
