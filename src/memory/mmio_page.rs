//! Pages that a device or the kernel shows, read and written one word at a time.
//!
//! Pairs with doorbell pages (the device acts on each store) and with the pages of a device's clock.
//! Every access is one volatile load or store of its width, so that none is split, merged or left
//! out.

use super::barrier::{mmio_flush, mmio_wc_start};
use super::mapping::Mapping;
#[cfg(test)]
use super::recorded_order::{RecordedStep, record_step};
use std::sync::atomic::{Ordering, fence};
use zerocopy::{Immutable, IntoBytes};

/// A mapped page, or several.
#[derive(Debug)]
pub(crate) struct MmioPage {
    base: *mut u8,
    mapping: Mapping,
}

// SAFETY: the mapping may be reached from any thread, and all access is by single loads and stores.
unsafe impl Send for MmioPage {}
// SAFETY: as above. Two threads may store to the same word; one of the stores is then the last.
unsafe impl Sync for MmioPage {}
impl std::panic::UnwindSafe for MmioPage {}
impl std::panic::RefUnwindSafe for MmioPage {}

/// An integer that one access moves.
pub(crate) trait Word: Copy + IntoBytes + Immutable {}
impl Word for u16 {}
impl Word for u32 {}
impl Word for u64 {}

impl MmioPage {
    pub(crate) fn new(mapping: Mapping) -> MmioPage {
        MmioPage { base: mapping.as_ptr(), mapping }
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.base
    }

    pub(crate) fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Whether the caller runs in a child of the process that mapped the page, whose doorbells are
    /// not the child's to ring.
    pub(crate) fn is_inherited(&self) -> bool {
        self.mapping.is_inherited()
    }

    fn place<T: Word>(&self, offset: usize) -> Option<*mut T> {
        let end = offset.checked_add(size_of::<T>())?;
        if end > self.mapping.len() || offset % size_of::<T>() != 0 {
            return None;
        }
        // SAFETY: the whole word is inside the mapping, as checked above.
        Some(unsafe { self.base.add(offset) }.cast())
    }

    /// Stores `value` in the byte order of the page; `None`, and nothing stored, unless it is
    /// inside and aligned. Earlier stores to memory are seen by the device first, and the store
    /// leaves the CPU before this returns. The page must be writable.
    pub(crate) fn store<T: Word>(&self, offset: usize, value: T) -> Option<()> {
        let place = self.place::<T>(offset)?;
        mmio_wc_start();
        #[cfg(test)]
        record_step(RecordedStep::Doorbell);
        // SAFETY: inside and aligned; a device's page is no Rust object.
        unsafe { place.write_volatile(value) };
        mmio_flush();
        if self.mapping.is_hosted() {
            self.mapping.tell(offset, value.as_bytes());
        }
        Some(())
    }

    /// The word at `offset`, in the byte order of the page; `None` unless it is inside and aligned.
    /// Later loads are ordered after this one.
    pub(crate) fn load<T: Word>(&self, offset: usize) -> Option<T> {
        let place = self.place::<T>(offset)?;
        if self.mapping.is_hosted() {
            self.mapping.look();
        }
        // SAFETY: inside and aligned, and any bytes are an integer.
        let value = unsafe { place.read_volatile() };
        fence(Ordering::Acquire);
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::fake_mapping::FakeMapping;
    use crate::sync::fork::Epoch;

    #[test]
    fn words_are_inside_and_aligned() {
        let epoch = Epoch::current().unwrap();
        let page = MmioPage::new(FakeMapping::new("page", 4096).map(4096, epoch).unwrap());
        assert_eq!(page.store(4088, 0x0102_0304_0506_0708_u64.to_be()), Some(()));
        assert_eq!(page.load::<u32>(4092), Some(0x0506_0708_u32.to_be()));
        assert_eq!(page.store(0, 7u16), Some(()));
        assert_eq!(page.load::<u64>(0), Some(7));
        for (offset, fits) in [(4090, false), (4092, false), (4096, false), (usize::MAX, false)] {
            assert_eq!(page.store(offset, 1u64).is_some(), fits, "{offset}");
            assert_eq!(page.load::<u64>(offset).is_some(), fits, "{offset}");
        }
        assert_eq!(page.load::<u16>(4094), Some(0x0708_u16.to_be()));
        assert_eq!(page.load::<u16>(4095), None);
        assert_eq!(page.len(), 4096);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_page_is_inherited_in_a_child_and_nowhere_else() {
        let epoch = Epoch::current().unwrap();
        let page = MmioPage::new(FakeMapping::new("page", 4096).map(4096, epoch).unwrap());
        crate::sync::fork::in_child(|| assert!(page.is_inherited()));
        assert!(!page.is_inherited());
    }

    #[cfg(not(loom))]
    #[test]
    fn a_store_is_behind_memory_and_in_front_of_the_next() {
        let epoch = Epoch::current().unwrap();
        let page = MmioPage::new(FakeMapping::new("page", 4096).map(4096, epoch).unwrap());
        let store = || assert_eq!(page.store(0, 1u64), Some(()));
        let steps = crate::memory::recorded_order::steps_of(store);
        assert_eq!(steps, [RecordedStep::WcStart, RecordedStep::Doorbell, RecordedStep::Flush]);
    }
}
