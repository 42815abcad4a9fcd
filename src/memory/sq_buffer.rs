//! The memory of send queues, and a table with an entry for each WQEBB, which the device does not see: one
//! index finds both. [`RqBuffer`](super::rq_buffer::RqBuffer) is the same for receive queues.

use super::wqebb::{SEGMENTS_PER_WQEBB, Wqebb, WqebbOffset, Wqebbs};
use crate::sync::ring_array::RingArray;
use uverbs_uapi::endian::Be32;

/// A ring of WQEBBs, and an entry `T` for each.
#[derive(Debug)]
pub(crate) struct SqBuffer<T> {
    wqebbs: Wqebbs,
    entries: RingArray<T>,
}

impl<T> SqBuffer<T> {
    /// `None` unless there is an entry for each WQEBB.
    pub(crate) fn new(wqebbs: Wqebbs, entries: RingArray<T>) -> Option<SqBuffer<T>> {
        (entries.len() == wqebbs.count()).then_some(SqBuffer { wqebbs, entries })
    }

    /// The ring alone.
    #[inline(always)]
    pub(crate) fn wqebbs(&self) -> &Wqebbs {
        &self.wqebbs
    }

    /// The WQEBB `index`, which is taken modulo the ring, with its entry.
    #[inline(always)]
    pub(crate) fn at(&self, index: u32) -> WqeSlot<'_, T> {
        let offset = self.wqebbs.offset_of(index);
        // SAFETY: there are as many entries as WQEBBs.
        let entry = unsafe { self.entries.at_byte(offset.beside::<T>()) };
        // SAFETY: `offset_of` returns offsets of this ring.
        let wqebb = unsafe { self.wqebbs.get(offset) };
        WqeSlot { wqebbs: &self.wqebbs, offset, wqebb, entry }
    }
}

/// The WQEBB where a WQE begins, and its entry. Most WQEs fit in one WQEBB.
#[derive(Debug)]
pub(crate) struct WqeSlot<'r, T> {
    wqebbs: &'r Wqebbs,
    /// The WQEBB's offset in `wqebbs`.
    offset: WqebbOffset,
    wqebb: Wqebb<'r>,
    entry: &'r T,
}

impl<T> Clone for WqeSlot<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for WqeSlot<'_, T> {}

impl<'r, T> WqeSlot<'r, T> {
    /// The WQEBB's offset in the ring.
    #[inline(always)]
    pub(crate) fn offset(self) -> WqebbOffset {
        self.offset
    }

    #[inline(always)]
    pub(crate) fn entry(self) -> &'r T {
        self.entry
    }

    /// Writes the segment `n` from the beginning of the WQEBB on, `value` in the byte order of memory.
    #[inline(always)]
    pub(crate) fn write(self, n: u32, value: [u64; 2]) {
        if n < SEGMENTS_PER_WQEBB {
            self.wqebb.write(n, value);
        } else {
            self.write_anywhere(n, value);
        }
    }

    /// As [`write`](Self::write), for a segment that is often in another WQEBB.
    #[inline(always)]
    pub(crate) fn write_anywhere(self, n: u32, value: [u64; 2]) {
        self.wqebbs.write(self.offset, n, value);
    }

    /// Writes inline data from the segment `n` on; see [`Wqebbs::inline`].
    #[inline(always)]
    pub(crate) fn inline(self, n: u32, length: Be32, bytes: &[u8]) -> u32 {
        // SAFETY: the offset is of these WQEBBs, since only `SqBuffer::at` makes slots.
        unsafe { self.wqebbs.inline(self.offset, n, length, bytes) }
    }

    /// The same from several slices; see [`Wqebbs::inline_list`].
    #[inline(always)]
    pub(crate) fn inline_list(
        self,
        n: u32,
        word: Be32,
        length: usize,
        parts: &[&[u8]],
        skipped: usize,
    ) -> u32 {
        self.wqebbs.inline_list(self.offset, n, word, length, parts, skipped)
    }

    /// The same of all their bytes at once, at most `most`; see [`Wqebbs::inline_list_in_one_piece`].
    #[inline(always)]
    pub(crate) fn inline_list_in_one_piece(
        self,
        n: u32,
        most: usize,
        word: impl FnOnce(usize) -> Be32,
        parts: &[&[u8]],
    ) -> Option<u32> {
        // SAFETY: the offset is of these WQEBBs, since only `SqBuffer::at` makes slots.
        unsafe { self.wqebbs.inline_list_in_one_piece(self.offset, n, most, word, parts) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::queue_memory::QueueMemory;
    use super::super::wqe_segment::WqeSegments;
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_wqebb_has_its_entry() {
        let memory = QueueMemory::page();
        let segments = WqeSegments::new(memory.clone(), 0, 32).unwrap();
        let wqebbs = || Wqebbs::new(memory.clone(), 0, 8).unwrap();
        /// As long as the entries of a send queue.
        #[derive(Debug, Default)]
        struct TestEntry {
            number: AtomicU32,
            _rest: [u32; 3],
        }
        assert!(SqBuffer::new(wqebbs(), RingArray::<TestEntry>::new(4)).is_none(), "too few");
        assert!(
            SqBuffer::new(wqebbs(), RingArray::<TestEntry>::new(16)).is_none(),
            "of another queue"
        );
        let entries = RingArray::<TestEntry>::new(8);
        let buffer = SqBuffer::new(wqebbs(), entries.clone()).unwrap();
        for index in [3, 8 + 3, u32::MAX - 4] {
            let slot = buffer.at(index);
            slot.write(1, [u64::from(index), 0]);
            slot.entry().number.store(index, Ordering::Relaxed);
            assert_eq!(segments.read(4 * 3 + 1), [u64::from(index), 0]);
            assert_eq!(entries.at(3).number.load(Ordering::Relaxed), index);
            // Beyond the WQEBB, and beyond the ring.
            slot.write(5, [u64::from(index), 1]);
            slot.write(4 * 5 + 2, [u64::from(index), 2]);
            assert_eq!(segments.read(4 * 4 + 1), [u64::from(index), 1]);
            assert_eq!(segments.read(2), [u64::from(index), 2]);
        }
    }

    /// In loom models the entries consist of loom's atomics, which are longer.
    #[test]
    fn entries_may_be_of_any_length() {
        let memory = QueueMemory::page();
        let wqebbs = || Wqebbs::new(memory.clone(), 0, 8).unwrap();
        let short = SqBuffer::new(wqebbs(), RingArray::of(8, |index| index as u8)).unwrap();
        let long =
            SqBuffer::new(wqebbs(), RingArray::of(8, |index| [u64::from(index); 5])).unwrap();
        for index in [0, 3, 7, 8 + 5] {
            assert_eq!(*short.at(index).entry(), index as u8 % 8);
            assert_eq!(*long.at(index).entry(), [u64::from(index) % 8; 5]);
        }
    }
}
