//! The cost of work: list entries that the device looks at, and bytes that it moves.
//!
//! Pairs with [`crate::fabric`], which ends a poll when it has cost too much. A guest chooses the
//! length and the nesting of its lists, and other guests wait while the device walks them.

use std::cell::Cell;

/// The most list entries that one WQE may look at.
const MAX_STEPS: u64 = 1 << 22;
/// Bytes that take as long to move as one step.
const STEP_BYTES: u64 = 64;
/// The cost in steps that ends the turn of a queue pair.
const TURN: u64 = 1 << 17;

/// The cost of a WQE so far.
#[derive(Debug, Default)]
pub(crate) struct Cost {
    steps: Cell<u64>,
    bytes: Cell<u64>,
}

impl Cost {
    /// Adds `count` steps; returns false if the WQE has taken too many.
    #[must_use]
    pub(crate) fn add_steps(&self, count: u64) -> bool {
        let steps = self.steps.get().saturating_add(count);
        self.steps.set(steps);
        steps <= MAX_STEPS
    }

    /// Adds bytes that were moved.
    pub(crate) fn add_bytes(&self, count: u64) {
        self.bytes.set(self.bytes.get().saturating_add(count));
    }

    /// Whether the cost since the last [`Cost::take`] is that of a whole turn.
    pub(crate) fn ends_turn(&self) -> bool {
        self.steps.get().saturating_add(self.bytes.get() / STEP_BYTES) >= TURN
    }

    /// The cost in steps since the last call.
    pub(crate) fn take(&self) -> u64 {
        self.steps.take().saturating_add(self.bytes.take() / STEP_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_above_the_limit_are_refused() {
        let cost = Cost::default();
        assert!(cost.add_steps(MAX_STEPS));
        assert!(!cost.add_steps(1));
        assert!(!cost.add_steps(u64::MAX));
        cost.add_bytes(10 * STEP_BYTES);
        assert_eq!(cost.take(), u64::MAX);
        cost.add_bytes(10 * STEP_BYTES);
        assert!(cost.add_steps(1));
        assert_eq!((cost.take(), cost.take()), (11, 0));
    }
}
