//! The [gate](Gate) of a completion queue: whether the poller has to read the control path's updates (queue
//! pairs that were attached and retired) before it polls.
//!
//! The same load says whether this process created the queue. Pairs with the lists of updates that the
//! control path writes: [`QpRegistry`] and [`Retirements`].
//!
//! [`QpRegistry`]: super::mlx5::qp_table::QpRegistry
//! [`Retirements`]: super::rxe::retired::Retirements

use crate::memory::gate::Gate;
use crate::sync::{AtomicU8, Ordering};
use std::num::NonZeroU8;

/// The level of a gate while there may be updates to read.
const DIRTY: u8 = 1;
/// The level of a gate while there are none.
pub(crate) const QUIET: NonZeroU8 = NonZeroU8::new(2).unwrap();

/// The gate of a completion queue.
#[derive(Debug)]
pub(crate) struct PollGate {
    gate: Gate,
    /// Replaces the gate's level in models, so that loom sees its accesses.
    #[cfg(loom)]
    level: AtomicU8,
}

impl PollGate {
    /// A gate that is dirty.
    pub(crate) fn new(gate: Gate) -> PollGate {
        let gate = PollGate {
            gate,
            #[cfg(loom)]
            level: AtomicU8::new(0),
        };
        gate.mark_dirty();
        gate
    }

    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }

    fn level(&self) -> &AtomicU8 {
        #[cfg(not(loom))]
        return self.gate.level();
        #[cfg(loom)]
        return &self.level;
    }

    /// Makes the next poll read the updates. Called after an update was added.
    pub(crate) fn mark_dirty(&self) {
        // Release pairs with the Acquire of `clear`. Both sides swap, so that one of them comes first.
        self.level().swap(DIRTY, Ordering::Release);
    }

    /// Clears the mark; the poller then reads the updates. Not to be called in a forked child.
    pub(crate) fn clear(&self) {
        // A swap that clears a mark sees the update that was added before it; a later mark stays.
        self.level().swap(QUIET.get(), Ordering::AcqRel);
    }

    /// Whether there are no updates.
    pub(crate) fn is_quiet(&self) -> bool {
        self.level().load(Ordering::Acquire) == QUIET.get()
    }
}
