//! Device memory (MEMIC): a few pages of BAR0 that processors and keys reach.
//!
//! Pairs with ALLOC_MEMIC of mlx5_ib's `dm.c`, which chooses pages by itself and asks for memory to
//! be put there, and with keys whose access mode is device memory.

use std::collections::BTreeMap;

use uverbs_uapi::mlx5::prm::object::{alloc_memic_in, alloc_memic_out, dealloc_memic_in};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::cmd::refusal::{Refused, refuse};
use crate::device::Device;

/// Where device memory lies in BAR0.
pub const OFFSET: u64 = 24 << 20;
/// How much room there is in BAR0.
pub const BYTES: u64 = 256 << 10;
/// How much of it can be filled with memory.
pub const MEMORY: u64 = 128 << 10;
/// The unit of allocations, as a power of two.
pub const LOG_UNIT: u64 = 6;
/// The largest alignment that can be asked for, in units, as a power of two.
pub const LOG_MAX_ALIGNMENT: u64 = 6;

const PAGE: u64 = 4096;

/// Memory at a place of BAR0.
struct Allocation {
    len: u64,
    range: u64,
    keys: u32,
}

/// The device memory in use, by place in BAR0.
#[derive(Default)]
pub struct Memic {
    allocations: BTreeMap<u64, Allocation>,
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

impl Device {
    pub(crate) fn alloc_memic(&mut self, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<alloc_memic_in, _>::new(input);
        let start = input.get(alloc_memic_in::range_start_addr);
        let range = input.get(alloc_memic_in::range_size);
        let len = input.get(alloc_memic_in::memic_size);
        let alignment = input.get(alloc_memic_in::log_memic_addr_alignment);
        let inside = start >= OFFSET
            && start.checked_add(range).is_some_and(|end| end <= OFFSET + BYTES)
            && start % PAGE == 0
            && range % PAGE == 0;
        if !inside || len == 0 || len > range || len % (1 << LOG_UNIT) != 0 {
            return refuse!(BadParam, "{len:#x} bytes of device memory at {start:#x}+{range:#x}");
        }
        if alignment > LOG_MAX_ALIGNMENT {
            return refuse!(BadParam, "alignment {alignment} is above {LOG_MAX_ALIGNMENT}");
        }
        let taken = &mut self.objects.memic.allocations;
        let previous = taken.range(..start + range).next_back();
        if previous.is_some_and(|(at, last)| at + last.range > start) {
            return refuse!(NoResources, "{start:#x}+{range:#x} of device memory is taken");
        }
        let used: u64 = taken.values().map(|allocation| allocation.len).sum();
        if used + len > MEMORY {
            return refuse!(LimitExceeded, "{used:#x} bytes of device memory of {MEMORY:#x} used");
        }
        // A page is aligned to everything that can be asked for.
        taken.insert(start, Allocation { len, range, keys: 0 });
        let mut out = Bits::<alloc_memic_out, _>::new(vec![0; alloc_memic_out::SIZE]);
        out.set(alloc_memic_out::memic_start_addr, start);
        Ok(out.into_inner())
    }

    pub(crate) fn dealloc_memic(&mut self, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<dealloc_memic_in, _>::new(input);
        let start = input.get(dealloc_memic_in::memic_start_addr);
        let len = input.get(dealloc_memic_in::memic_size);
        let taken = &mut self.objects.memic.allocations;
        match taken.get(&start) {
            Some(allocation) if allocation.len != len => {
                refuse!(BadParam, "{len:#x} bytes, {:#x} are allocated", allocation.len)
            }
            Some(allocation) if allocation.keys > 0 => {
                refuse!(ResourceBusy, "device memory at {start:#x} has {} keys", allocation.keys)
            }
            Some(allocation) => {
                // What one owner wrote is not for the next one.
                self.bar.fill(start, allocation.range);
                taken.remove(&start);
                Ok(vec![])
            }
            None => refuse!(BadResource, "no device memory at {start:#x}"),
        }
    }
}
