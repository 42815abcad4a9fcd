//! What work costs: entries of lists that are looked at, and bytes that are moved.
//!
//! Pairs with [`crate::fabric`], which ends a turn when it has cost too much. A guest chooses how long
//! its lists are, and how often one leads to the other; others wait meanwhile.

use std::cell::Cell;

/// The most entries that are looked at for one request.
const MAX_STEPS: u64 = 1 << 22;
/// Bytes that take about as long to move as a step takes.
const STEP_BYTES: u64 = 64;

/// What a request has cost one function so far.
#[derive(Debug, Default)]
pub(crate) struct Effort {
    steps: Cell<u64>,
    bytes: Cell<u64>,
}

impl Effort {
    /// Notes `count` steps; false if the request has taken too many.
    #[must_use]
    pub(crate) fn step(&self, count: u64) -> bool {
        let steps = self.steps.get().saturating_add(count);
        self.steps.set(steps);
        steps <= MAX_STEPS
    }

    /// Notes bytes that are moved.
    pub(crate) fn moved(&self, count: u64) {
        self.bytes.set(self.bytes.get().saturating_add(count));
    }

    /// What it comes to, in steps. The next request begins at nothing.
    pub(crate) fn take(&self) -> u64 {
        self.steps.take().saturating_add(self.bytes.take() / STEP_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_takes_so_many_steps_and_no_more() {
        let effort = Effort::default();
        assert!(effort.step(MAX_STEPS));
        assert!(!effort.step(1));
        assert!(!effort.step(u64::MAX));
        effort.moved(10 * STEP_BYTES);
        assert_eq!(effort.take(), u64::MAX);
        effort.moved(10 * STEP_BYTES);
        assert!(effort.step(1));
        assert_eq!((effort.take(), effort.take()), (11, 0));
    }
}
