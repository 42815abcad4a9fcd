//! Send queues with what their posters note of each request: one number finds both. Receive queues are
//! made of [`RqBuffer`](super::rq_buffer::RqBuffer).

use super::ring_array::RingArray;
use super::wqebb::{SEGMENTS_PER_WQEBB, Wqebb, WqebbOffset, Wqebbs};
use uverbs_uapi::endian::Be32;

/// A ring of blocks, and beside each a `T`.
#[derive(Debug)]
pub(crate) struct SqBuffer<T> {
    blocks: Wqebbs,
    notes: RingArray<T>,
}

impl<T> SqBuffer<T> {
    /// `None` unless there is a note for each block.
    pub(crate) fn new(blocks: Wqebbs, notes: RingArray<T>) -> Option<SqBuffer<T>> {
        (notes.len() == blocks.count()).then_some(SqBuffer { blocks, notes })
    }

    /// The ring alone.
    #[inline(always)]
    pub(crate) fn blocks(&self) -> &Wqebbs {
        &self.blocks
    }

    /// The block `index`, which is taken modulo the ring, with its note.
    #[inline(always)]
    pub(crate) fn at(&self, index: u32) -> WqeSlot<'_, T> {
        let spot = self.blocks.spot(index);
        // SAFETY: there are as many notes as blocks.
        let note = unsafe { self.notes.at_byte(spot.beside::<T>()) };
        // SAFETY: of this ring.
        let block = unsafe { self.blocks.get(spot) };
        WqeSlot { blocks: &self.blocks, spot, block, note }
    }
}

/// A block of a ring, and what is noted beside it. It is at hand, and takes all of most requests.
#[derive(Debug)]
pub(crate) struct WqeSlot<'r, T> {
    blocks: &'r Wqebbs,
    /// Of these.
    spot: WqebbOffset,
    block: Wqebb<'r>,
    note: &'r T,
}

impl<T> Clone for WqeSlot<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for WqeSlot<'_, T> {}

impl<'r, T> WqeSlot<'r, T> {
    /// By which the block is found again.
    #[inline(always)]
    pub(crate) fn spot(self) -> WqebbOffset {
        self.spot
    }

    #[inline(always)]
    pub(crate) fn note(self) -> &'r T {
        self.note
    }

    /// Writes the unit `n` from the beginning of the block on, `value` as it shall lie in memory.
    #[inline(always)]
    pub(crate) fn write(self, n: u32, value: [u64; 2]) {
        if n < SEGMENTS_PER_WQEBB {
            self.block.write(n, value);
        } else {
            self.write_anywhere(n, value);
        }
    }

    /// The same of a unit that is as often in another block.
    #[inline(always)]
    pub(crate) fn write_anywhere(self, n: u32, value: [u64; 2]) {
        self.blocks.write(self.spot, n, value);
    }

    /// Writes inline data from the unit `n` on; see [`Wqebbs::inline`].
    #[inline(always)]
    pub(crate) fn inline(self, n: u32, length: Be32, bytes: &[u8]) -> u32 {
        // SAFETY: the spot is of these blocks, since only `SqBuffer::at` makes places.
        unsafe { self.blocks.inline(self.spot, n, length, bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::queue_memory::QueueMemory;
    use super::super::wqe_segment::WqeSegments;
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_block_has_its_note() {
        let memory = QueueMemory::page();
        let units = WqeSegments::new(memory.clone(), 0, 32).unwrap();
        let blocks = || Wqebbs::new(memory.clone(), 0, 8).unwrap();
        /// As long as a note is.
        #[derive(Debug, Default)]
        struct Note {
            number: AtomicU32,
            _rest: [u32; 3],
        }
        assert!(SqBuffer::new(blocks(), RingArray::<Note>::new(4)).is_none(), "too few");
        assert!(SqBuffer::new(blocks(), RingArray::<Note>::new(16)).is_none(), "of another queue");
        let notes = RingArray::<Note>::new(8);
        let noted = SqBuffer::new(blocks(), notes.clone()).unwrap();
        for index in [3, 8 + 3, u32::MAX - 4] {
            let place = noted.at(index);
            place.write(1, [u64::from(index), 0]);
            place.note().number.store(index, Ordering::Relaxed);
            assert_eq!(units.read(4 * 3 + 1), [u64::from(index), 0]);
            assert_eq!(notes.at(3).number.load(Ordering::Relaxed), index);
            // Beyond the block, and beyond the ring.
            place.write(5, [u64::from(index), 1]);
            place.write(4 * 5 + 2, [u64::from(index), 2]);
            assert_eq!(units.read(4 * 4 + 1), [u64::from(index), 1]);
            assert_eq!(units.read(2), [u64::from(index), 2]);
        }
    }

    /// As those of atomics that loom watches.
    #[test]
    fn notes_may_be_of_any_length() {
        let memory = QueueMemory::page();
        let blocks = || Wqebbs::new(memory.clone(), 0, 8).unwrap();
        let short = SqBuffer::new(blocks(), RingArray::of(8, |index| index as u8)).unwrap();
        let long =
            SqBuffer::new(blocks(), RingArray::of(8, |index| [u64::from(index); 5])).unwrap();
        for index in [0, 3, 7, 8 + 5] {
            assert_eq!(*short.at(index).note(), index as u8 % 8);
            assert_eq!(*long.at(index).note(), [u64::from(index) % 8; 5]);
        }
    }
}
