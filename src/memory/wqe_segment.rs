//! Rings of the segments that WQEs are made of.
//!
//! Pairs with [`queue_memory`](super::queue_memory), which has the memory; `new` checks once that it is large
//! enough. Receive queues are such a ring, and [`Wqebbs`](super::wqebb::Wqebbs) are four segments each.

use super::queue_memory::QueueMemory;
#[cfg(test)]
use super::recorded_order::{RecordedStep, record_step};
use std::sync::Arc;
use uverbs_uapi::endian::Be32;

/// Bytes of the segment that requests are made of.
pub(crate) const SEGMENT: usize = 16;

/// A ring of 16-byte segments, a power of two of them, of which work queues are made. Requests are whole segments, and
/// each segment's index is masked, so a request that reaches the end of the ring wraps around.
#[derive(Debug)]
pub(crate) struct WqeSegments {
    base: *mut [u64; 2],
    mask: u32,
    _memory: Arc<QueueMemory>,
}

// SAFETY: see `QueueMemory`; the queue that owns the view writes through `&mut` of itself, or into
// slots of a batch that it lent exclusively.
unsafe impl Send for WqeSegments {}
// SAFETY: as above: one queue owns a view and gives the writing end to one borrower at a time.
unsafe impl Sync for WqeSegments {}

impl WqeSegments {
    /// `count` segments at byte `offset`; `None` unless they are inside, aligned and a power of two.
    pub(crate) fn new(memory: Arc<QueueMemory>, offset: usize, count: u32) -> Option<WqeSegments> {
        if !count.is_power_of_two() {
            return None;
        }
        let length = SEGMENT.checked_mul(usize::try_from(count).ok()?)?;
        let base = memory.range(offset, length, SEGMENT)?.as_ptr().cast();
        Some(WqeSegments { base, mask: count - 1, _memory: memory })
    }

    /// The number of segments.
    pub(crate) fn count(&self) -> u32 {
        self.mask + 1
    }

    /// The first.
    #[inline(always)]
    pub(super) fn base(&self) -> *mut [u64; 2] {
        self.base
    }

    #[inline(always)]
    fn segment(&self, index: u32) -> *mut [u64; 2] {
        // SAFETY: `new` checked that segments up to and including `mask` are inside.
        unsafe { self.base.add((index & self.mask) as usize) }
    }

    /// Writes the segment `index`, which is taken modulo the ring; `value` in the byte order of memory.
    #[inline(always)]
    pub(crate) fn write(&self, index: u32, value: [u64; 2]) {
        #[cfg(test)]
        record_step(RecordedStep::Request);
        // SAFETY: inside and aligned, as `segment` says. A batch borrows its queue alone, so that no other thread
        // writes here. The device reads the segment only after the doorbell record counts its WQE.
        unsafe { self.segment(index).write(value) };
    }

    /// The segment `index` as it lies in memory.
    #[cfg(test)]
    pub(crate) fn read(&self, index: u32) -> [u64; 2] {
        // SAFETY: inside and aligned, as `segment` says; initialised since the memory was zeroed.
        unsafe { self.segment(index).read() }
    }

    /// Writes inline data from the segment `index` on: a word that says how long it is, and `bytes`,
    /// which go on at the ring's beginning where it ends. More than the whole ring is cut off.
    #[cold]
    #[inline(never)]
    pub(super) fn inline(&self, index: u32, length: Be32, bytes: &[u8]) {
        // SAFETY: a segment has room for a word, and is aligned for one.
        unsafe { self.segment(index).cast::<Be32>().write(length) };
        self.copy(index, size_of::<Be32>(), bytes);
    }

    /// As [`inline`](Self::inline), from several slices without their first `skipped` bytes.
    #[inline]
    pub(super) fn inline_list(&self, index: u32, word: Be32, parts: &[&[u8]], mut skipped: usize) {
        // SAFETY: a segment has room for a word, and is aligned for one.
        unsafe { self.segment(index).cast::<Be32>().write(word) };
        let mut offset = size_of::<Be32>();
        for part in parts {
            let (begin, rest) = part.split_at(skipped.min(part.len()));
            skipped -= begin.len();
            self.copy(index, offset, rest);
            offset += rest.len();
        }
    }

    /// Copies `bytes` to byte `offset` of the segment `index`, going on at the ring's beginning where
    /// it ends. More than the whole ring is cut off.
    pub(crate) fn copy(&self, index: u32, offset: usize, bytes: &[u8]) {
        #[cfg(test)]
        record_step(RecordedStep::Request);
        let ring = (self.mask as usize + 1) * SEGMENT;
        let start = ((index & self.mask) as usize * SEGMENT + offset) & (ring - 1);
        let (first, rest) = bytes.split_at(bytes.len().min(ring - start));
        let rest = &rest[..rest.len().min(ring)];
        // SAFETY: `start` is inside, because the ring's size is a power of two.
        let to = unsafe { self.base.cast::<u8>().add(start) };
        // SAFETY: `first` fits between `start` and the end; queue memory is never lent as a slice,
        // so that `bytes` lie elsewhere.
        unsafe { to.copy_from_nonoverlapping(first.as_ptr(), first.len()) };
        // SAFETY: `rest` fits into the ring, and lies elsewhere, as above.
        unsafe {
            self.base.cast::<u8>().copy_from_nonoverlapping(rest.as_ptr(), rest.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_that_do_not_fit_are_refused() {
        let memory = QueueMemory::page();
        let segments = (memory.len() / SEGMENT) as u32;
        assert!(WqeSegments::new(memory.clone(), 0, segments).is_some());
        assert!(WqeSegments::new(memory.clone(), 0, segments * 2).is_none(), "too long");
        assert!(WqeSegments::new(memory.clone(), SEGMENT, segments).is_none(), "too far");
        assert!(WqeSegments::new(memory.clone(), 8, 1).is_none(), "unaligned");
        assert!(WqeSegments::new(memory.clone(), 0, 3).is_none(), "no power of two");
        assert!(WqeSegments::new(memory, usize::MAX, 1).is_none());
    }

    #[test]
    fn segments_wrap_around() {
        let segments = WqeSegments::new(QueueMemory::page(), 64, 4).unwrap();
        for segment in 6..10 {
            segments.write(segment, [u64::from(segment), !0]);
        }
        let first: Vec<_> = (0..4).map(|segment| segments.read(segment)[0]).collect();
        assert_eq!(first, [8, 9, 6, 7]);
        let bytes: Vec<u8> = (1..=40).collect();
        segments.copy(2, 12, &bytes);
        assert_eq!(segments.read(2), [6, 0x0403_0201_ffff_ffff]);
        assert_eq!(segments.read(3), [0x0c0b_0a09_0807_0605, 0x1413_1211_100f_0e0d]);
        assert_eq!(segments.read(0), [0x1c1b_1a19_1817_1615, 0x2423_2221_201f_1e1d]);
        assert_eq!(segments.read(1), [0x0000_0000_2827_2625 | segments.read(1)[0] >> 32 << 32, !0]);
    }
}
