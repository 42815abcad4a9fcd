//! Queue memory out of one mapping that is made at the beginning.

use super::lent::{anonymous, huge};
use super::{Allocation, DomainView, QueueAllocator, ResourceType};
use crate::error::{Error, Result};
use crate::memory::mapping::Mapping;
use crate::number::ByteCount;
use crate::sync::lock::Lock;
use rustix::io::Errno;
use rustix::param::page_size;
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ptr::NonNull;

/// Cuts buffers out of one mapping, and fails with `ENOMEM` when that is used up: for programs that must not
/// ask the system for memory once they run, or that limit the memory of queues.
///
/// In a forked child the mapping is zero (`MADV_WIPEONFORK`), or, of huge pages, not there (`MADV_DONTFORK`),
/// and the arena has no free memory: the child makes an arena of its own. A buffer that is freed joins with
/// free neighbours; a new one takes the first free range that is large enough.
///
/// `examples/per_thread.rs` gives the queues of several threads memory of one arena of huge pages.
#[derive(Debug)]
pub struct Arena {
    mapping: Mapping,
    space: Lock<Space>,
}

/// The free and the lent ranges of the mapping: the length of each, by its offset.
#[derive(Debug, Default)]
struct Space {
    free: BTreeMap<usize, usize>,
    lent: BTreeMap<usize, usize>,
}

impl Arena {
    /// An arena of at least `bytes`, rounded to whole pages.
    ///
    /// # Errors
    ///
    /// `EINVAL` for 0 bytes, `ENOMEM`.
    pub fn new(bytes: usize) -> Result<Self> {
        Arena::of_pages(bytes, page_size().trailing_zeros(), anonymous)
    }

    /// An arena of at least `bytes`, in huge pages of 2 MiB: all doorbell records and most queues of a
    /// program fit into one, so that the device and the processor translate one address in place of many.
    ///
    /// # Errors
    ///
    /// `EINVAL` for 0 bytes; `ENOMEM` if too few huge pages are free, which
    /// `/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages` sets aside.
    pub fn huge_pages(bytes: usize) -> Result<Self> {
        const PAGE_BITS: u8 = 21;
        let map = |length| huge(length, PAGE_BITS);
        Arena::of_pages(bytes, PAGE_BITS.into(), map).map_err(|error| match error.errno() {
            Errno::NOMEM => error.detail(format!(
                "{} in huge pages of 2 MiB, which \
                 /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages sets aside",
                ByteCount::of(bytes)
            )),
            _ => error,
        })
    }

    fn of_pages(
        bytes: usize,
        page_bits: u32,
        map: impl FnOnce(usize) -> std::result::Result<Mapping, Errno>,
    ) -> Result<Self> {
        const VERB: &str = "make_arena";
        if bytes == 0 {
            return Err(Error::invalid(VERB, "an arena of 0 bytes"));
        }
        let length = bytes.checked_next_multiple_of(1 << page_bits);
        let mapping = length.ok_or(Errno::NOMEM).and_then(map);
        let mapping = mapping.map_err(|errno| {
            Error::new(VERB, errno).detail(format!("no {} of memory", ByteCount::of(bytes)))
        })?;
        let free = BTreeMap::from([(0, mapping.len())]);
        let space = Space { free, lent: BTreeMap::new() };
        Ok(Arena { mapping, space: Lock::new(space) })
    }

    /// Bytes in all.
    #[allow(clippy::len_without_is_empty, reason = "an arena is never empty")]
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Bytes that are lent; none in a forked child.
    pub fn used(&self) -> usize {
        self.space.lock().map_or(0, |space| space.lent.values().sum())
    }

    /// Buffers that are in use; none in a forked child.
    pub fn buffers(&self) -> usize {
        self.space.lock().map_or(0, |space| space.lent.len())
    }
}

impl Space {
    /// Takes `size` bytes and returns their offset; the address, `base` plus the offset, is a multiple of
    /// `align`.
    fn take(&mut self, base: usize, size: usize, align: usize) -> Option<usize> {
        let size = size.max(1);
        let (at, length, offset) = self.free.iter().find_map(|(&at, &length)| {
            let offset = (base + at).checked_next_multiple_of(align)? - base;
            let fits = offset.checked_add(size)? <= at + length;
            fits.then_some((at, length, offset))
        })?;
        self.free.remove(&at);
        if offset > at {
            self.free.insert(at, offset - at);
        }
        if offset + size < at + length {
            self.free.insert(offset + size, at + length - offset - size);
        }
        self.lent.insert(offset, size);
        Some(offset)
    }

    fn give_back(&mut self, mut offset: usize) {
        let Some(mut size) = self.lent.remove(&offset) else { return };
        if let Some(behind) = self.free.remove(&(offset + size)) {
            size += behind;
        }
        if let Some((&at, &length)) = self.free.range(..offset).next_back() {
            if at + length == offset {
                self.free.remove(&at);
                (offset, size) = (at, size + length);
            }
        }
        self.free.insert(offset, size);
    }
}

// SAFETY: the ranges that are lent do not overlap, have the size and alignment asked for, and stay
// until they are given back; the arena stays as long as the allocator, and is not copied by a fork.
unsafe impl QueueAllocator for Arena {
    fn alloc(&self, _: &DomainView<'_>, layout: Layout, _: ResourceType) -> Allocation {
        let base = self.mapping.as_ptr();
        let space = self.space.lock();
        let (size, align) = (layout.size(), layout.align());
        let Some(offset) = space.and_then(|mut space| space.take(base.addr(), size, align)) else {
            return Allocation::Failed;
        };
        // SAFETY: the taken range lies inside the mapping.
        let start = unsafe { base.add(offset) };
        match NonNull::new(start) {
            Some(memory) => Allocation::Memory(memory),
            None => Allocation::Failed,
        }
    }

    unsafe fn free(&self, _: &DomainView<'_>, memory: NonNull<u8>, _: Layout, _: ResourceType) {
        let offset = memory.as_ptr().addr().wrapping_sub(self.mapping.as_ptr().addr());
        if let Some(mut space) = self.space.lock() {
            space.give_back(offset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(length: usize) -> Space {
        Space { free: BTreeMap::from([(0, length)]), lent: BTreeMap::new() }
    }

    #[test]
    fn pieces_are_aligned_and_do_not_overlap() {
        let mut space = space(1 << 16);
        // An address that is aligned to 4096 and no more.
        let base = 0x1000;
        let asked = [(8, 8), (4096, 4096), (8, 8), (100, 64), (8192, 8192)];
        let pieces =
            asked.map(|(size, align)| (space.take(base, size, align).unwrap(), size, align));
        for (nth, (offset, size, align)) in pieces.iter().enumerate() {
            assert_eq!((base + offset) % align, 0);
            for (other, length, _) in &pieces[..nth] {
                assert!(offset + size <= *other || other + length <= *offset, "{pieces:?}");
            }
        }
        assert_eq!(pieces[2].0, 8, "the first free place");
        for (offset, ..) in pieces {
            space.give_back(offset);
        }
        assert_eq!(space.free, BTreeMap::from([(0, 1 << 16)]), "all joined again");
        assert!(space.lent.is_empty());
    }

    #[test]
    fn an_arena_has_whole_pages() {
        let page = rustix::param::page_size();
        for (asked, length) in [(1, page), (page, page), (page + 1, 2 * page)] {
            assert_eq!(Arena::new(asked).unwrap().len(), length);
        }
        assert_eq!(Arena::new(0).unwrap_err().errno(), Errno::INVAL);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it asks for huge pages")]
    fn an_arena_without_huge_pages_names_the_file_that_sets_them_aside() {
        assert_eq!(Arena::huge_pages(0).unwrap_err().errno(), Errno::INVAL);
        // More than machines have.
        for bytes in [1 << 46, usize::MAX] {
            let error = Arena::huge_pages(bytes).unwrap_err();
            assert_eq!(error.errno(), Errno::NOMEM);
            assert!(error.message().contains("hugepages-2048kB/nr_hugepages"), "{error}");
        }
    }

    #[test]
    fn an_arena_that_is_full_takes_buffers_back() {
        let mut space = space(4096);
        let halves = [space.take(0, 2048, 8).unwrap(), space.take(0, 2048, 8).unwrap()];
        assert_eq!((space.take(0, 1, 1), space.free.len()), (None, 0), "no empty range is left");
        space.give_back(halves[0]);
        space.give_back(99);
        assert_eq!(space.take(0, 2049, 8), None);
        assert_eq!(space.take(0, 2048, 8), Some(0));
        assert_eq!(space.take(0, usize::MAX, 8), None);
    }
}
