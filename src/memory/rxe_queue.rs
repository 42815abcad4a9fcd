//! The ring that rxe shares with its user: a header with two indices, then the elements.
//!
//! Pairs with the kernel's `rxe_queue.h`. Each index has one writer. An index is loaded with
//! Acquire by the side that does not write it, which pairs with the Release store of the side
//! that does: the side that sees an index move also sees the elements that it moved over.

use super::mapping::Mapping;
use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use uverbs_uapi::rxe::rxe_queue_buf;
use zerocopy::{FromBytes, Immutable, IntoBytes};

const HEADER: usize = size_of::<rxe_queue_buf>();
const LOG2_ELEM_SIZE: usize = offset_of!(rxe_queue_buf, log2_elem_size);
const INDEX_MASK: usize = offset_of!(rxe_queue_buf, index_mask);
const PRODUCER_INDEX: usize = offset_of!(rxe_queue_buf, producer_index);
const CONSUMER_INDEX: usize = offset_of!(rxe_queue_buf, consumer_index);

/// A mapped queue. Geometry is read once and checked against the mapping, so that no later index
/// can leave it.
#[derive(Debug)]
pub(crate) struct RxeQueue {
    /// Shared with watches only.
    mapping: Arc<Mapping>,
    /// The beginning of the mapping.
    base: *mut u8,
    stride: usize,
    mask: u32,
}

// SAFETY: the mapping may be reached from any thread; all access goes through the methods below.
unsafe impl Send for RxeQueue {}
// SAFETY: `&RxeQueue` offers atomics and element copies; the queue types give each role (producer,
// consumer) to one `&mut` owner, so that no element is written and read at once.
unsafe impl Sync for RxeQueue {}
impl std::panic::RefUnwindSafe for RxeQueue {}

impl RxeQueue {
    /// Takes a mapping whose elements have room for `element` bytes; `None` if the header does
    /// not describe a queue that fits into it.
    pub(crate) fn new(mapping: Mapping, element: usize) -> Option<RxeQueue> {
        if mapping.len() < HEADER {
            return None;
        }
        let base = mapping.as_ptr();
        let mut ring = RxeQueue { mapping: Arc::new(mapping), base, stride: 0, mask: 0 };
        let log2 = ring.word(LOG2_ELEM_SIZE).load(Ordering::Relaxed);
        let mask = ring.word(INDEX_MASK).load(Ordering::Relaxed);
        let stride = 1usize.checked_shl(log2)?;
        let slots = usize::try_from(mask).ok()?.checked_add(1)?;
        let bytes = slots.checked_mul(stride)?.checked_add(HEADER)?;
        if !slots.is_power_of_two() || stride < element || bytes > ring.mapping.len() {
            return None;
        }
        ring.stride = stride;
        ring.mask = mask;
        Some(ring)
    }

    /// Read access to the indices, for other threads than this queue's owner.
    pub(crate) fn watch(&self) -> ProducerWatch {
        ProducerWatch { mapping: self.mapping.clone(), mask: self.mask }
    }

    #[inline]
    fn word(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset + 4 <= HEADER && offset % 4 == 0);
        // SAFETY: callers pass header offsets, and `new` refused mappings shorter than the header.
        let word = unsafe { self.base.add(offset) };
        // SAFETY: the word is aligned, lives as long as the mapping that `self` owns, and both
        // sides access it as an atomic.
        unsafe { AtomicU32::from_ptr(word.cast()) }
    }

    /// The index that the producer publishes.
    #[inline]
    pub(crate) fn producer(&self) -> u32 {
        self.word(PRODUCER_INDEX).load(Ordering::Acquire) & self.mask
    }

    /// The index that the consumer publishes.
    #[inline]
    pub(crate) fn consumer(&self) -> u32 {
        self.word(CONSUMER_INDEX).load(Ordering::Acquire) & self.mask
    }

    /// Whether the caller runs in a child of the process that mapped the queue, and must leave it
    /// alone.
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        self.mapping.is_inherited()
    }

    /// Hands all elements before `index` to the kernel. Does nothing in a forked child, which may
    /// still hold a guard of its parent.
    #[inline]
    pub(crate) fn publish_producer(&self, index: u32) {
        if self.is_inherited() {
            return;
        }
        self.word(PRODUCER_INDEX).store(index & self.mask, Ordering::Release);
    }

    /// Hands all slots before `index` back to the kernel. Does nothing in a forked child, which may
    /// still hold a guard of its parent.
    #[inline]
    pub(crate) fn publish_consumer(&self, index: u32) {
        if self.is_inherited() {
            return;
        }
        self.word(CONSUMER_INDEX).store(index & self.mask, Ordering::Release);
    }

    /// The slot after `index`.
    #[inline]
    pub(crate) fn next(&self, index: u32) -> u32 {
        index.wrapping_add(1) & self.mask
    }

    /// The number of elements that fit: one slot always stays free, or full and empty would look alike.
    pub(crate) fn capacity(&self) -> u32 {
        self.mask
    }

    /// The number of elements between two indices.
    #[inline]
    pub(crate) fn distance(&self, from: u32, to: u32) -> u32 {
        to.wrapping_sub(from) & self.mask
    }

    /// Writes `value` at `offset` into the element `index`; `false`, and nothing written, if it
    /// does not fit.
    ///
    /// Only the owner of the producer role may call this, for slots that it has not published.
    #[inline]
    #[must_use]
    pub(crate) fn write<T: IntoBytes + Immutable + ?Sized>(
        &self,
        index: u32,
        offset: usize,
        value: &T,
    ) -> bool {
        let bytes = value.as_bytes();
        let Some(to) = self.element(index, offset, bytes.len()) else { return false };
        // SAFETY: `element` checked that the range lies in the mapping. The kernel does not read
        // an unpublished slot, and `bytes` is memory of ours, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        true
    }

    /// A copy of the element `index`, or `None` if a `T` does not fit into one.
    ///
    /// Only the owner of the consumer role may call this, for slots that were published to it.
    #[inline]
    pub(crate) fn read<T: FromBytes>(&self, index: u32) -> Option<T> {
        let from = self.element(index, 0, size_of::<T>())?;
        // SAFETY: in bounds as checked by `element`; any bytes are a valid `T`; the kernel does
        // not write a published slot until the consumer index has passed it.
        Some(unsafe { from.cast::<T>().read_unaligned() })
    }

    #[inline]
    fn element(&self, index: u32, offset: usize, length: usize) -> Option<*mut u8> {
        if offset.checked_add(length)? > self.stride {
            return None;
        }
        let start = HEADER + (index & self.mask) as usize * self.stride + offset;
        // SAFETY: `new` checked that all `mask + 1` elements lie inside the mapping.
        Some(unsafe { self.base.add(start) })
    }
}

/// Reads the producer and consumer index of an [`RxeQueue`], and keeps the ring mapped.
#[derive(Debug)]
pub(crate) struct ProducerWatch {
    mapping: Arc<Mapping>,
    mask: u32,
}

impl ProducerWatch {
    /// The index that the producer publishes.
    pub(crate) fn producer(&self) -> u32 {
        self.index::<PRODUCER_INDEX>()
    }

    /// The index that the consumer publishes.
    pub(crate) fn consumer(&self) -> u32 {
        self.index::<CONSUMER_INDEX>()
    }

    fn index<const OFFSET: usize>(&self) -> u32 {
        const { assert!(OFFSET + 4 <= HEADER && OFFSET % 4 == 0) };
        // SAFETY: the ring that this watch was made by refused mappings shorter than the header.
        let word = unsafe { self.mapping.as_ptr().add(OFFSET) };
        // SAFETY: the word is aligned, lives as long as the mapping that `self` shares, and both
        // sides access it as an atomic.
        let word = unsafe { AtomicU32::from_ptr(word.cast()) };
        word.load(Ordering::Acquire) & self.mask
    }

    /// One less than the slots.
    pub(crate) fn mask(&self) -> u32 {
        self.mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::fake_mapping::FakeMapping;
    use crate::sync::fork::Epoch;

    /// A file whose header describes `mask + 1` elements of `1 << log2` bytes.
    fn file(log2: u32, mask: u32) -> FakeMapping {
        let file = FakeMapping::new("ring", HEADER + 1024);
        file.write(LOG2_ELEM_SIZE as u64, &log2.to_ne_bytes());
        file.write(INDEX_MASK as u64, &mask.to_ne_bytes());
        file
    }

    fn ring(file: &FakeMapping, length: usize, element: usize) -> Option<RxeQueue> {
        RxeQueue::new(file.map(length, Epoch::current().unwrap()).unwrap(), element)
    }

    #[test]
    fn a_ring_that_does_not_fit_into_its_mapping_is_refused() {
        for (log2, mask) in [(6, 7), (7, 3), (9, 0)] {
            let (file, all) = (file(log2, mask), HEADER + ((mask as usize + 1) << log2));
            let queue = ring(&file, all, 1 << log2).expect("it fits");
            assert_eq!((queue.capacity(), queue.watch().mask()), (mask, mask));
            assert!(ring(&file, all - 1, 1 << log2).is_none(), "one byte less");
            assert!(ring(&file, all, (1 << log2) + 1).is_none(), "too short an element");
        }
        for (log2, mask) in [(6, 6), (usize::BITS, 0), (63, 1), (u32::MAX, 1), (0, u32::MAX)] {
            assert!(ring(&file(log2, mask), HEADER + 1024, 0).is_none(), "{log2} {mask}");
        }
        let file = file(0, 0);
        assert!(ring(&file, HEADER - 1, 0).is_none() && ring(&file, HEADER, 0).is_none());
        assert!(ring(&file, HEADER + 1, 1).is_some());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps a file for each input")]
    fn any_header_is_a_ring_inside_its_mapping_or_none() {
        let known = [[6u32, 7, 0, 0].map(u32::to_le_bytes).concat()];
        let tally = crate::tests::hostile::explore("rings of rxe", 20, &known, |bytes| {
            let mut u = arbitrary::Unstructured::new(bytes);
            let mut next = || u32::from_le_bytes(u.arbitrary().unwrap_or_default());
            let (log2, mask, producer, consumer, at) = (next(), next(), next(), next(), next());
            let file = file(log2, mask);
            file.write(PRODUCER_INDEX as u64, &producer.to_ne_bytes());
            file.write(CONSUMER_INDEX as u64, &consumer.to_ne_bytes());
            let Some(queue) = ring(&file, HEADER + 1024, 4) else { return false };
            assert!((queue.capacity() as usize) < 1024);
            for index in [queue.producer(), queue.consumer(), queue.watch().consumer(), at] {
                assert!(queue.read::<u32>(index).is_some() && queue.write(index, 0, &7u32));
                assert!(queue.distance(index, at) <= queue.capacity() && queue.next(index) <= mask);
            }
            true
        });
        assert!(tally.taken > 0 && tally.refused > 0, "{tally:?}");
    }

    #[test]
    fn an_element_is_written_and_read_to_its_end_and_no_byte_beyond() {
        let file = file(4, 3);
        let queue = ring(&file, HEADER + 64, 16).unwrap();
        let at = |element: u64| HEADER as u64 + 16 * element;
        // Indices are taken modulo the ring.
        assert!(queue.write(5, 0, &[1u8; 16]) && queue.write(6, 12, &[2u8; 4]));
        assert_eq!(queue.read::<[u8; 16]>(1), Some([1; 16]));
        let refused = [
            queue.write(0, 0, &[9u8; 17]),
            queue.write(0, 13, &[9u8; 4]),
            queue.write(0, 17, &[9u8; 0]),
            queue.write(0, usize::MAX, &[9u8; 4]),
        ];
        assert_eq!((refused, queue.read::<[u8; 17]>(3)), ([false; 4], None));
        assert!(queue.write(0, 16, &[9u8; 0]), "nothing fits at the end");
        let elements = [0, 1, 2, 3].map(|element| file.read(at(element), 16));
        let mut third = [0; 16];
        third[12..].fill(2);
        assert_eq!(elements, [[0; 16], [1; 16], third, [0; 16]]);
    }
}
