//! Mappings that an allocator has lent out, by the address that it returned.

use super::Allocation;
use crate::memory::mapping::Mapping;
use crate::sync::fork::Epoch;
use crate::sync::lock::Lock;
use memmap2::{MmapOptions, MmapRaw};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use rustix::param::page_size;
use std::collections::BTreeMap;
use std::ptr::NonNull;

/// The mappings, by address. In a forked child nothing is lent, taken back or counted: they are the parent's.
#[derive(Debug, Default)]
pub(super) struct LentMappings(Lock<BTreeMap<usize, Mapping>>);

impl LentMappings {
    /// Lends the part of a mapping that begins at a multiple of `align`.
    pub(super) fn lend(&self, mapping: Result<Mapping, Errno>, align: usize) -> Allocation {
        let Ok(mapping) = mapping else { return Allocation::Failed };
        let offset = mapping.as_ptr().align_offset(align);
        if offset >= mapping.len() {
            return Allocation::Failed;
        }
        // SAFETY: `offset` is inside the mapping, as just checked.
        let start = unsafe { mapping.as_ptr().add(offset) };
        let Some(memory) = NonNull::new(start) else { return Allocation::Failed };
        let Some(mut mappings) = self.0.lock() else { return Allocation::Failed };
        mappings.insert(memory.as_ptr().addr(), mapping);
        Allocation::Memory(memory)
    }

    /// Unmaps the mapping that was lent at this address.
    pub(super) fn take_back(&self, memory: NonNull<u8>) {
        let mapping = self.0.lock().and_then(|mut lent| lent.remove(&memory.as_ptr().addr()));
        // Unmapped after the lock is released.
        drop(mapping);
    }

    pub(super) fn count(&self) -> usize {
        self.0.lock().map_or(0, |lent| lent.len())
    }
}

/// Bytes to map so that `size` of them begin at a multiple of `align`, in pages of `page` bytes.
pub(super) fn room(size: usize, align: usize, page: usize) -> Option<usize> {
    let slack = if align > page { align } else { 0 };
    size.max(1).checked_add(slack)?.checked_next_multiple_of(page)
}

/// Anonymous memory that is zero in forked children (`MADV_WIPEONFORK`): no page of it moves, and a guard that a
/// child still holds reads zeros.
pub(super) fn anonymous(length: usize) -> Result<Mapping, Errno> {
    let raw = MmapOptions::new().len(length).map_anon().map(MmapRaw::from);
    unshared(raw, Advice::LinuxWipeOnFork)
}

/// Anonymous memory in huge pages of `1 << page_bits` bytes. Forked children have no mapping in its place, because
/// the kernel does not wipe huge pages.
pub(super) fn huge(length: usize, page_bits: u8) -> Result<Mapping, Errno> {
    let raw = MmapOptions::new().len(length).huge(Some(page_bits)).map_anon().map(MmapRaw::from);
    unshared(raw, Advice::LinuxDontFork)
}

/// The mapping, which a forked child does not share because of `advice`.
fn unshared(raw: std::io::Result<MmapRaw>, advice: Advice) -> Result<Mapping, Errno> {
    let mapping = Mapping::of_raw(raw, Epoch::current()?)?;
    if cfg!(miri) {
        // Miri has no such advice, and no fork.
        return Ok(mapping);
    }
    // SAFETY: the range is the mapping made above, which nobody else uses yet.
    unsafe { madvise(mapping.as_ptr().cast(), mapping.len(), advice) }?;
    Ok(mapping)
}

/// Anonymous memory with room for `size` bytes at a multiple of `align`.
pub(super) fn pages(size: usize, align: usize) -> Result<Mapping, Errno> {
    anonymous(room(size, align, page_size()).ok_or(Errno::NOMEM)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_has_room_at_any_beginning_and_no_page_too_many() {
        const PAGE: usize = 4096;
        for size in [0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE] {
            let pages = size.max(1).next_multiple_of(PAGE);
            // Every page begins at such a multiple.
            for align in [1, 64, PAGE] {
                assert_eq!(room(size, align, PAGE), Some(pages), "{size} at {align}");
            }
            for align in [2 * PAGE, 64 * PAGE] {
                let room = room(size, align, PAGE).unwrap();
                // A mapping may begin one page behind a multiple.
                assert!(room >= size.max(1) + align - PAGE && room % PAGE == 0);
                assert!(room <= pages + align, "{size} at {align}");
            }
        }
        assert_eq!(room(usize::MAX, 1, PAGE), None);
        assert_eq!(room(usize::MAX - PAGE, 2 * PAGE, PAGE), None);
    }
}
