//! Receive queues with what their posters note of each request; see [`noted`](super::sq_buffer) for send
//! queues.

use super::queue_memory::QueueMemory;
#[cfg(test)]
use super::recorded_order::{RecordedStep, note};
use super::ring_array::RingArray;
use super::wqe_segment::{SEGMENT, WqeSegments};
use std::sync::Arc;

/// A ring of entries of 2^n [units](WqeSegments), `LEAST` or more, and beside each a `T`.
#[derive(Debug)]
pub(crate) struct RqBuffer<T, const LEAST: usize> {
    units: WqeSegments,
    notes: RingArray<T>,
    /// Of numbers of entries.
    mask: u32,
    /// Binary logarithm of an entry's units.
    log: u8,
    /// The same of its bytes.
    shift: u8,
    /// Whether an entry has more units than `LEAST`.
    more: bool,
}

impl<T, const LEAST: usize> RqBuffer<T, LEAST> {
    /// `count` entries of `each` units at byte `offset`; `None` unless they are inside and aligned, both
    /// are powers of two, there are `LEAST` units or more, and there is a note for each entry.
    pub(crate) fn new(
        memory: Arc<QueueMemory>,
        offset: usize,
        count: u32,
        each: u32,
        notes: RingArray<T>,
    ) -> Option<Self> {
        let fits = count.is_power_of_two() && each.is_power_of_two() && each as usize >= LEAST;
        if !fits || notes.len() != count {
            return None;
        }
        let units = WqeSegments::new(memory, offset, count.checked_mul(each)?)?;
        let log = each.trailing_zeros() as u8;
        let (mask, shift) = (count - 1, log + SEGMENT.trailing_zeros() as u8);
        Some(RqBuffer { units, notes, mask, log, shift, more: each as usize > LEAST })
    }

    /// The ring as units.
    #[inline(always)]
    pub(crate) fn units(&self) -> &WqeSegments {
        &self.units
    }

    /// The number of an entry's first unit.
    pub(crate) fn first(&self, index: u32) -> u32 {
        index << self.log
    }

    /// How many units an entry has.
    pub(crate) fn each(&self) -> u32 {
        1 << self.log
    }

    /// What is noted of the entry `index`.
    #[inline(always)]
    pub(crate) fn note(&self, index: u32) -> &T {
        // SAFETY: there are as many notes as entries.
        unsafe { self.notes.get(index & self.mask) }
    }

    /// The entry `index`, which is taken modulo the ring, with its note.
    #[inline(always)]
    pub(crate) fn at(&self, index: u32) -> (RqSlot<'_, LEAST>, &T) {
        let within = index & self.mask;
        // SAFETY: there are as many notes as entries.
        let note = unsafe { self.notes.get(within) };
        // SAFETY: `new` found room for as many entries of so many bytes.
        let base = unsafe { self.units.base().byte_add((within as usize) << self.shift) };
        (RqSlot { base, more: &self.more }, note)
    }
}

/// An entry of a ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RqSlot<'r, const LEAST: usize> {
    base: *mut [u64; 2],
    /// Looked at when it matters.
    more: &'r bool,
}

impl<const LEAST: usize> RqSlot<'_, LEAST> {
    /// Writes the unit `N`, which all entries have; `value` as it shall lie in memory.
    #[inline(always)]
    pub(crate) fn write<const N: usize>(self, value: [u64; 2]) {
        const { assert!(N < LEAST) };
        #[cfg(test)]
        note(RecordedStep::Request);
        // SAFETY: an entry has as many units.
        let place = unsafe { self.base.add(N) };
        // SAFETY: inside and aligned; whoever may write here is the only one, as the ring's protocol has
        // it, and the device does not look before it is told.
        unsafe { place.write(value) };
    }

    /// Writes the first half of the unit `N`.
    #[inline(always)]
    pub(crate) fn write_half<const N: usize>(self, half: u64) {
        const { assert!(N < LEAST) };
        #[cfg(test)]
        note(RecordedStep::Request);
        // SAFETY: an entry has as many units.
        let place = unsafe { self.base.add(N) }.cast::<u64>();
        // SAFETY: as in `write`.
        unsafe { place.write(half) };
    }

    /// Writes the unit behind those that all entries have, if this ring's have more.
    #[inline(always)]
    pub(crate) fn write_behind(self, value: [u64; 2]) {
        if !*self.more {
            return;
        }
        #[cfg(test)]
        note(RecordedStep::Request);
        // SAFETY: an entry has one more.
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
    fn an_entry_has_its_note_and_what_is_behind_it() {
        let memory = QueueMemory::page();
        let units = WqeSegments::new(memory.clone(), 64, 16).unwrap();
        let entries = |count, each, notes| {
            RqBuffer::<_, 2>::new(
                memory.clone(),
                64,
                count,
                each,
                RingArray::<AtomicU32>::new(notes),
            )
        };
        assert!(entries(4, 1, 4).is_none(), "less than the least");
        assert!(entries(4, 3, 4).is_none() && entries(3, 4, 4).is_none(), "no powers of two");
        assert!(entries(4, 4, 8).is_none() && entries(4, 4, 2).is_none(), "notes of others");
        assert!(entries(1 << 20, 4, 1 << 20).is_none(), "not inside");
        for (each, behind) in [(2, 0), (4, 9)] {
            let ring = entries(4, each, 4).unwrap();
            assert_eq!((ring.each(), ring.units().count()), (each, 4 * each));
            for index in [2, 4 + 2, u32::MAX - 1] {
                let first = ring.first(index);
                (0..each).for_each(|unit| ring.units().write(first.wrapping_add(unit), [0; 2]));
                let (entry, note) = ring.at(index);
                entry.write::<0>([7, 7]);
                entry.write_half::<0>(u64::from(index));
                entry.write::<1>([8, 8]);
                entry.write_behind([9, 9]);
                note.store(index, Ordering::Relaxed);
                let at = 2 * each;
                let found = [at, at + 1, at + 2].map(|unit| units.read(unit));
                assert_eq!(found, [[u64::from(index), 7], [8, 8], [behind; 2]]);
                assert_eq!(ring.note(2).load(Ordering::Relaxed), index);
            }
        }
    }
}
