//! Device memory (MEMIC): pages of BAR0 that processors and memory keys reach.

use std::collections::BTreeMap;

use crate::command_error::{CommandError, refuse};

/// Bytes that may be allocated.
pub const MEMORY: u64 = 128 << 10;
/// log2 of the unit of allocations.
pub const LOG_UNIT: u64 = 6;
/// log2 of the largest alignment, in units.
pub const LOG_MAX_ALIGNMENT: u64 = 6;

/// An allocation of device memory.
pub(crate) struct Allocation {
    pub(crate) len: u64,
    pub(crate) range: u64,
    pub(crate) keys: u32,
}

/// The allocations by offset in BAR0.
#[derive(Default)]
pub struct Memic {
    pub(crate) allocations: BTreeMap<u64, Allocation>,
}

impl Memic {
    /// The number of allocations.
    pub fn len(&self) -> usize {
        self.allocations.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.allocations.is_empty()
    }

    fn holding(&mut self, start: u64, len: u64) -> Option<&mut Allocation> {
        let end = start.checked_add(len)?;
        let (at, allocation) = self.allocations.range_mut(..=start).next_back()?;
        (end <= at + allocation.len).then_some(allocation)
    }

    /// Counts one more mkey of a range.
    ///
    /// # Errors
    /// If the range is not inside one allocation.
    pub(crate) fn hold(&mut self, start: u64, len: u64) -> Result<(), CommandError> {
        let Some(allocation) = self.holding(start, len) else {
            return refuse!(BadParam, "{start:#x}+{len:#x} is not allocated device memory");
        };
        allocation.keys += 1;
        Ok(())
    }

    /// Counts one mkey of a range less.
    pub(crate) fn release(&mut self, start: u64, len: u64) {
        if let Some(allocation) = self.holding(start, len) {
            allocation.keys = allocation.keys.saturating_sub(1);
        }
    }
}
