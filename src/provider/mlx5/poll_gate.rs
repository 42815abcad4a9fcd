//! Whether a poller has to listen to the control path before it believes what it finds.
//!
//! It is one look, and the same that tells whether this is the process that made the queue: a
//! [gate](crate::memory::doorbell_record::Gate) beside the queue's doorbell record. Pairs with
//! [`book`](super::qp_table), where the letters are.

use crate::memory::doorbell_record::Gate;
use crate::memory::sync::{AtomicU8, Ordering};
use std::num::NonZeroU8;

/// There may be something to learn.
const NEWS: u8 = 1;
/// What a gate says where there is nothing to learn.
pub(crate) const QUIET: NonZeroU8 = NonZeroU8::new(2).unwrap();
/// The same where somebody hears of completions, so that it makes sense to ask for events.
pub(crate) const HEARD: NonZeroU8 = NonZeroU8::new(3).unwrap();

/// What says so to the poller of one queue.
#[derive(Debug)]
pub(crate) struct PollGate {
    gate: Gate,
    /// What it says when there is nothing: one of the two above.
    quiet: NonZeroU8,
    /// Stands in for it.
    #[cfg(loom)]
    word: AtomicU8,
}

impl PollGate {
    pub(crate) fn new(gate: Gate) -> PollGate {
        PollGate::with(gate, QUIET)
    }

    /// Of a queue that announces completions.
    pub(crate) fn heard(gate: Gate) -> PollGate {
        PollGate::with(gate, HEARD)
    }

    fn with(gate: Gate, quiet: NonZeroU8) -> PollGate {
        let news = PollGate {
            gate,
            quiet,
            #[cfg(loom)]
            word: AtomicU8::new(0),
        };
        news.mark_dirty();
        news
    }

    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }

    fn word(&self) -> &AtomicU8 {
        #[cfg(not(loom))]
        return self.gate.word();
        #[cfg(loom)]
        return &self.word;
    }

    /// Says that there is something, which is there by now.
    pub(crate) fn mark_dirty(&self) {
        // Release pairs with the Acquire of `clear`. Swaps on both sides: one of the two comes first.
        self.word().swap(NEWS, Ordering::Release);
    }

    /// Says that there is nothing. To be called before the poller looks for what there is, and not
    /// in a forked child.
    pub(crate) fn clear(&self) {
        // If it takes an announcement back, what was announced is seen by who looks now; if it does
        // not, the announcement is yet to come and stays.
        self.word().swap(self.quiet.get(), Ordering::AcqRel);
    }

    /// Whether there is nothing to learn.
    pub(crate) fn is_quiet(&self) -> bool {
        self.word().load(Ordering::Acquire) == self.quiet.get()
    }
}
