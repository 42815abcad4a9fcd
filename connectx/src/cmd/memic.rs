//! Commands of device memory.
//!
//! Pairs with `dm.c` of mlx5_ib, which chooses the pages of BAR0 and asks for memory in them.

use uverbs_uapi::mlx5::prm::object::{alloc_memic_in, alloc_memic_out, dealloc_memic_in};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::bar0::{MEMIC_BYTES, MEMIC_OFFSET, PAGE};
use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::object::memic::{Allocation, LOG_MAX_ALIGNMENT, LOG_UNIT, MEMORY};

pub(crate) fn alloc_memic(device: &mut Device, input: &[u8]) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<alloc_memic_in, _>::new(input);
    let start = input.get(alloc_memic_in::range_start_addr);
    let range = input.get(alloc_memic_in::range_size);
    let len = input.get(alloc_memic_in::memic_size);
    let alignment = input.get(alloc_memic_in::log_memic_addr_alignment);
    let inside = start >= MEMIC_OFFSET
        && start.checked_add(range).is_some_and(|end| end <= MEMIC_OFFSET + MEMIC_BYTES)
        && start % PAGE == 0
        && range % PAGE == 0;
    if !inside || len == 0 || len > range || len % (1 << LOG_UNIT) != 0 {
        return refuse!(BadParam, "device memory {start:#x}+{range:#x} cannot hold {len:#x} bytes");
    }
    if alignment > LOG_MAX_ALIGNMENT {
        return refuse!(BadParam, "alignment {alignment} is above {LOG_MAX_ALIGNMENT}");
    }
    let taken = &mut device.objects.memic.allocations;
    let previous = taken.range(..start + range).next_back();
    if previous.is_some_and(|(at, last)| at + last.range > start) {
        return refuse!(NoResources, "{start:#x}+{range:#x} of device memory is taken");
    }
    let used: u64 = taken.values().map(|allocation| allocation.len).sum();
    if used + len > MEMORY {
        return refuse!(
            LimitExceeded,
            "{len:#x} bytes of device memory, {used:#x} of {MEMORY:#x} are in use"
        );
    }
    // A page has every alignment that the driver may ask for.
    taken.insert(start, Allocation { len, range, keys: 0 });
    let mut out = Bits::<alloc_memic_out, _>::new(vec![0; alloc_memic_out::SIZE]);
    out.set(alloc_memic_out::memic_start_addr, start);
    Ok(out.into_inner())
}

pub(crate) fn dealloc_memic(device: &mut Device, input: &[u8]) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<dealloc_memic_in, _>::new(input);
    let start = input.get(dealloc_memic_in::memic_start_addr);
    let len = input.get(dealloc_memic_in::memic_size);
    let taken = &mut device.objects.memic.allocations;
    match taken.get(&start) {
        Some(allocation) if allocation.len != len => {
            refuse!(
                BadParam,
                "DEALLOC_MEMIC names {len:#x} bytes, {:#x} are allocated",
                allocation.len
            )
        }
        Some(allocation) if allocation.keys > 0 => {
            refuse!(ResourceBusy, "device memory at {start:#x} has {} keys", allocation.keys)
        }
        Some(allocation) => {
            // The next owner must not read the bytes of this one.
            device.bar.fill(start, allocation.range);
            taken.remove(&start);
            Ok(vec![])
        }
        None => refuse!(BadResource, "no device memory at {start:#x}"),
    }
}
