//! The memory of receive queues, and beside each WQE an entry that the device does not see; see
//! [`sq_buffer`](super::sq_buffer) for send queues.

use super::queue_memory::QueueMemory;
#[cfg(test)]
use super::recorded_order::{RecordedStep, record_step};
use super::wqe_segment::{SEGMENT, WqeSegments};
use crate::sync::ring_array::RingArray;
use std::sync::Arc;

/// A ring of WQEs of 2^n [segments](WqeSegments), `LEAST` or more, and beside each an entry `T`.
#[derive(Debug)]
pub(crate) struct RqBuffer<T, const LEAST: usize> {
    segments: WqeSegments,
    entries: RingArray<T>,
    /// Turns a WQE's number into its index.
    mask: u32,
    /// Binary logarithm of a WQE's segments.
    log: u8,
    /// Binary logarithm of a WQE's bytes.
    shift: u8,
    /// Whether a WQE has more segments than `LEAST`.
    more: bool,
}

impl<T, const LEAST: usize> RqBuffer<T, LEAST> {
    /// `count` WQEs of `each` segments at byte `offset`; `None` unless they are inside and aligned, both are
    /// powers of two, there are `LEAST` segments or more, and there is an entry for each WQE.
    pub(crate) fn new(
        memory: Arc<QueueMemory>,
        offset: usize,
        count: u32,
        each: u32,
        entries: RingArray<T>,
    ) -> Option<Self> {
        let fits = count.is_power_of_two() && each.is_power_of_two() && each as usize >= LEAST;
        if !fits || entries.len() != count {
            return None;
        }
        let segments = WqeSegments::new(memory, offset, count.checked_mul(each)?)?;
        let log = each.trailing_zeros() as u8;
        let (mask, shift) = (count - 1, log + SEGMENT.trailing_zeros() as u8);
        Some(RqBuffer { segments, entries, mask, log, shift, more: each as usize > LEAST })
    }

    /// The ring as segments.
    #[inline(always)]
    pub(crate) fn segments(&self) -> &WqeSegments {
        &self.segments
    }

    /// The first WQE.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.segments.base().cast()
    }

    /// The index of a WQE's first segment.
    pub(crate) fn first(&self, index: u32) -> u32 {
        index << self.log
    }

    /// The number of segments of a WQE.
    pub(crate) fn each(&self) -> u32 {
        1 << self.log
    }

    /// The entry of the WQE `index`.
    #[inline(always)]
    pub(crate) fn entry(&self, index: u32) -> &T {
        // SAFETY: there are as many entries as WQEs.
        unsafe { self.entries.get(index & self.mask) }
    }

    /// The WQE `index`, which is taken modulo the ring, with its entry.
    #[inline(always)]
    pub(crate) fn at(&self, index: u32) -> (RqSlot<'_, LEAST>, &T) {
        let within = index & self.mask;
        // SAFETY: there are as many entries as WQEs.
        let entry = unsafe { self.entries.get(within) };
        // SAFETY: `new` found room for as many WQEs of so many bytes.
        let base = unsafe { self.segments.base().byte_add((within as usize) << self.shift) };
        (RqSlot { base, more: &self.more }, entry)
    }
}

/// A WQE of a ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RqSlot<'r, const LEAST: usize> {
    base: *mut [u64; 2],
    /// Whether there are more than `LEAST` segments. The borrow keeps the ring.
    more: &'r bool,
}

impl<const LEAST: usize> RqSlot<'_, LEAST> {
    /// Writes the segment `N`, which all WQEs have; `value` as it shall lie in memory.
    #[inline(always)]
    pub(crate) fn write<const N: usize>(self, value: [u64; 2]) {
        const { assert!(N < LEAST) };
        #[cfg(test)]
        record_step(RecordedStep::Request);
        // SAFETY: a WQE has as many segments.
        let place = unsafe { self.base.add(N) };
        // SAFETY: inside and aligned. A batch borrows its queue alone, so that no other thread writes here, and
        // pollers read only entries. The device reads the WQE only after the doorbell record counts it.
        unsafe { place.write(value) };
    }

    /// Writes the first half of the segment `N`.
    #[inline(always)]
    pub(crate) fn write_half<const N: usize>(self, half: u64) {
        const { assert!(N < LEAST) };
        #[cfg(test)]
        record_step(RecordedStep::Request);
        // SAFETY: a WQE has as many segments.
        let place = unsafe { self.base.add(N) }.cast::<u64>();
        // SAFETY: as in `write`.
        unsafe { place.write(half) };
    }

    /// Writes the segment behind those that all WQEs have, if this ring's have more.
    #[inline(always)]
    pub(crate) fn write_behind(self, value: [u64; 2]) {
        if !*self.more {
            return;
        }
        #[cfg(test)]
        record_step(RecordedStep::Request);
        // SAFETY: a WQE has one more.
        let place = unsafe { self.base.add(LEAST) };
        // SAFETY: as in `write`.
        unsafe { place.write(value) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_wqe_has_its_entry_and_the_segment_behind_it() {
        let memory = QueueMemory::page();
        let segments = WqeSegments::new(memory.clone(), 64, 16).unwrap();
        let entries = |count, each, entries| {
            RqBuffer::<_, 2>::new(
                memory.clone(),
                64,
                count,
                each,
                RingArray::<AtomicU32>::new(entries),
            )
        };
        assert!(entries(4, 1, 4).is_none(), "less than the least");
        assert!(entries(4, 3, 4).is_none() && entries(3, 4, 4).is_none(), "no powers of two");
        assert!(entries(4, 4, 8).is_none() && entries(4, 4, 2).is_none(), "entries of others");
        assert!(entries(1 << 10, 4, 1 << 10).is_none(), "not inside");
        for (each, behind) in [(2, 0), (4, 9)] {
            let ring = entries(4, each, 4).unwrap();
            assert_eq!((ring.each(), ring.segments().count()), (each, 4 * each));
            for index in [2, 4 + 2, u32::MAX - 1] {
                let first = ring.first(index);
                (0..each)
                    .for_each(|segment| ring.segments().write(first.wrapping_add(segment), [0; 2]));
                let (wqe, entry) = ring.at(index);
                wqe.write::<0>([7, 7]);
                wqe.write_half::<0>(u64::from(index));
                wqe.write::<1>([8, 8]);
                wqe.write_behind([9, 9]);
                entry.store(index, Ordering::Relaxed);
                let at = 2 * each;
                let found = [at, at + 1, at + 2].map(|segment| segments.read(segment));
                assert_eq!(found, [[u64::from(index), 7], [8, 8], [behind; 2]]);
                assert_eq!(ring.entry(2).load(Ordering::Relaxed), index);
            }
        }
    }
}
