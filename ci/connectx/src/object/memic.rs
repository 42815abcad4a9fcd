//! Device memory (MEMIC): pages of BAR0 that processors and memory keys reach.

use std::collections::BTreeMap;

use crate::refusal::{Refused, refuse};

/// How much of it can be filled with memory.
pub const MEMORY: u64 = 128 << 10;
/// The unit of allocations, as a power of two.
pub const LOG_UNIT: u64 = 6;
/// The largest alignment that can be asked for, in units, as a power of two.
pub const LOG_MAX_ALIGNMENT: u64 = 6;

/// Memory at a place of BAR0.
pub(crate) struct Allocation {
    pub(crate) len: u64,
    pub(crate) range: u64,
    pub(crate) keys: u32,
}

/// The device memory in use, by place in BAR0.
#[derive(Default)]
pub struct Memic {
    pub(crate) allocations: BTreeMap<u64, Allocation>,
}

impl Memic {
    /// How many allocations there are.
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

    /// Notes one more key of a range.
    ///
    /// # Errors
    /// If the range is not inside one allocation.
    pub(crate) fn hold(&mut self, start: u64, len: u64) -> Result<(), Refused> {
        let Some(allocation) = self.holding(start, len) else {
            return refuse!(BadParam, "{start:#x}+{len:#x} is not allocated device memory");
        };
        allocation.keys += 1;
        Ok(())
    }

    /// Notes one key of a range less.
    pub(crate) fn release(&mut self, start: u64, len: u64) {
        if let Some(allocation) = self.holding(start, len) {
            allocation.keys = allocation.keys.saturating_sub(1);
        }
    }
}
