//! Rings of blocks: send queues, whose requests begin at a block and are written piece by piece.
//!
//! Pairs with [`WqeSegments`](super::wqe_segment::WqeSegments), whose ring it is: data that goes on at the beginning is
//! left to it, and all other data is written here.

use super::queue_memory::QueueMemory;
#[cfg(test)]
use super::recorded_order::{RecordedStep, note};
use super::wqe_segment::{SEGMENT, WqeSegments};
use std::marker::PhantomData;
use std::sync::Arc;
use uverbs_uapi::endian::Be32;

/// WqeSegments of a block.
pub(crate) const SEGMENTS_PER_WQEBB: u32 = 4;

/// What one block adds to a [`WqebbOffset`].
const SPAN: u32 = 16;
/// Bytes of the ring for each that a [`WqebbOffset`] counts.
const SCALE: usize = SEGMENTS_PER_WQEBB as usize * SEGMENT / SPAN as usize;

/// Where in its ring a block is, as a quarter of the bytes before it: addresses can be scaled by four, so
/// that one shift of a block's number leads to it, and to a note of 16 bytes beside it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WqebbOffset(u32);

impl WqebbOffset {
    /// Bytes before it in a table of values `T`, one for each block. Of 16 bytes they cost nothing.
    #[inline(always)]
    pub(super) fn beside<T>(self) -> usize {
        if size_of::<T>() == SPAN as usize {
            self.0 as usize
        } else {
            (self.0 / SPAN) as usize * size_of::<T>()
        }
    }

    /// WqeSegments before it.
    fn units(self) -> u32 {
        self.0 / (SPAN / SEGMENTS_PER_WQEBB)
    }
}

/// A ring of blocks of four [units](WqeSegments), a power of two of them: a send queue, whose requests
/// begin at blocks.
#[derive(Debug)]
pub(crate) struct Wqebbs {
    units: WqeSegments,
    /// Of spots.
    mask: u32,
    /// The address behind the last.
    end: usize,
}

impl Wqebbs {
    /// `count` blocks at byte `offset`; `None` unless they are inside, aligned and a power of two.
    pub(crate) fn new(memory: Arc<QueueMemory>, offset: usize, count: u32) -> Option<Wqebbs> {
        let units = WqeSegments::new(memory, offset, count.checked_mul(SEGMENTS_PER_WQEBB)?)?;
        let last = (units.count() / SEGMENTS_PER_WQEBB).checked_sub(1)?;
        let end = units.base().addr() + units.count() as usize * SEGMENT;
        Some(Wqebbs { mask: last.checked_mul(SPAN)?, end, units })
    }

    /// The blocks of `count` units from a spot on, if they do not go on at the beginning.
    #[inline(always)]
    pub(super) fn row(&self, spot: WqebbOffset, count: u32) -> Option<WqebbRun<'_>> {
        let spot = self.behind(spot, 0);
        // SAFETY: of this ring.
        let first = unsafe { self.get(spot) };
        // The ring is whole blocks, so that what is behind the units in the last is inside as well.
        let end = first.base.addr() + count as usize * SEGMENT;
        (end <= self.end).then_some(WqebbRun { first })
    }

    /// How many there are.
    pub(super) fn count(&self) -> u32 {
        self.mask / SPAN + 1
    }

    /// Where the block `index` is, which is taken modulo the ring.
    #[inline(always)]
    pub(super) fn spot(&self, index: u32) -> WqebbOffset {
        WqebbOffset(index.wrapping_mul(SPAN) & self.mask)
    }

    /// The spot `count` blocks behind another, or behind what that is in this ring if it is of another.
    #[inline(always)]
    pub(super) fn behind(&self, spot: WqebbOffset, count: u32) -> WqebbOffset {
        WqebbOffset(spot.0.wrapping_add(count.wrapping_mul(SPAN)) & self.mask)
    }

    /// The block there.
    ///
    /// # Safety
    ///
    /// The spot is of this ring.
    #[inline(always)]
    pub(super) unsafe fn get(&self, spot: WqebbOffset) -> Wqebb<'_> {
        // SAFETY: `new` found room for as many as there are.
        let base = unsafe { self.units.base().byte_add(spot.0 as usize * SCALE) };
        Wqebb { base, ring: PhantomData }
    }

    /// The block there, or what is there in this ring if the spot is of another.
    #[inline(always)]
    pub(super) fn block(&self, spot: WqebbOffset) -> Wqebb<'_> {
        // SAFETY: of this ring.
        unsafe { self.get(self.behind(spot, 0)) }
    }

    /// Writes the unit `unit` behind the beginning of a block, which may be one of another block.
    #[inline(always)]
    pub(super) fn write(&self, spot: WqebbOffset, unit: u32, value: [u64; 2]) {
        self.units.write(spot.units().wrapping_add(unit), value);
    }

    /// Writes inline data from the unit `unit` of a block on: a word that says how long it is, and
    /// `bytes`, which go on at the ring's beginning where it ends. More than the whole ring is cut off.
    /// Answers how many units that are: none for no bytes.
    ///
    /// # Safety
    ///
    /// The spot is of this ring.
    #[inline(always)]
    pub(super) unsafe fn inline(
        &self,
        spot: WqebbOffset,
        unit: u32,
        length: Be32,
        bytes: &[u8],
    ) -> u32 {
        // SAFETY: the caller's promise.
        let block = unsafe { self.get(spot) };
        if block.inline(unit, length, bytes) {
            return inline_units(bytes);
        }
        // SAFETY: the caller's promise.
        if unsafe { self.inline_long(spot, unit, length, bytes) } {
            return inline_units(bytes);
        }
        if bytes.is_empty() {
            return 0;
        }
        self.units.inline(spot.units().wrapping_add(unit), length, bytes);
        inline_units(bytes)
    }

    /// The same of data that goes no further than the ring; `false`, and nothing done, for all other data.
    ///
    /// # Safety
    ///
    /// As there.
    #[inline(always)]
    unsafe fn inline_long(&self, spot: WqebbOffset, unit: u32, length: Be32, bytes: &[u8]) -> bool {
        #[cfg(test)]
        note(RecordedStep::Request);
        // SAFETY: the caller's promise.
        let block = unsafe { self.get(spot) };
        let place = block.base.wrapping_add(unit as u8 as usize).cast::<Be32>();
        let to = place.wrapping_add(1).cast::<u8>();
        // Negative if the data would begin behind the end.
        let room = self.end.wrapping_sub(to.addr()) as isize;
        if bytes.is_empty() || bytes.len() as isize > room {
            return false;
        }
        // SAFETY: inside, as the data is that follows, and aligned as a unit is.
        unsafe { place.write(length) };
        // SAFETY: there is room for all bytes; queue memory is never lent as a slice, so that the two lie
        // apart.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        true
    }
}

/// Wqebbs side by side.
#[derive(Clone, Copy, Debug)]
pub(super) struct WqebbRun<'r> {
    first: Wqebb<'r>,
}

impl<'r> WqebbRun<'r> {
    /// The block `nth`.
    ///
    /// # Safety
    ///
    /// The row has more than `nth`.
    #[inline(always)]
    pub(super) unsafe fn get(&self, nth: usize) -> Wqebb<'r> {
        // SAFETY: the caller's promise, and `Wqebbs::row` found room for all.
        let base = unsafe { self.first.base.add(nth * SEGMENTS_PER_WQEBB as usize) };
        Wqebb { base, ring: PhantomData }
    }
}

/// WqeSegments of inline data, with the word that says how long it is.
#[inline(always)]
fn inline_units(bytes: &[u8]) -> u32 {
    (bytes.len() as u32 + size_of::<Be32>() as u32 + (SEGMENT as u32 - 1)) / SEGMENT as u32
}

/// One block of a ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wqebb<'r> {
    base: *mut [u64; 2],
    ring: PhantomData<&'r Wqebbs>,
}

impl Wqebb<'_> {
    /// Writes the unit `n` of the block, modulo four; `value` as it shall lie in memory.
    #[inline(always)]
    pub(crate) fn write(self, n: u32, value: [u64; 2]) {
        #[cfg(test)]
        note(RecordedStep::Request);
        // SAFETY: a block has four units.
        let place = unsafe { self.base.add((n % SEGMENTS_PER_WQEBB) as usize) };
        // SAFETY: inside and aligned; whoever may write here is the only one, as the ring's
        // protocol has it, and the device does not look before it is told.
        unsafe { place.write(value) };
    }

    /// Writes inline data from the unit `n` on: a word that says how long it is, and `bytes`; `false`,
    /// and nothing done, unless they are at least a unit and end in the block.
    #[inline(always)]
    fn inline(self, n: u32, length: Be32, bytes: &[u8]) -> bool {
        const WORD: usize = size_of::<Be32>();
        let room = (SEGMENTS_PER_WQEBB.saturating_sub(n) as usize * SEGMENT).saturating_sub(WORD);
        // As many as are copied below. A control unit stands first, so that there is never more room.
        let room = room.min(3 * SEGMENT);
        // Both at once, as what is less than a unit wraps.
        if room < SEGMENT || bytes.len().wrapping_sub(SEGMENT) > room - SEGMENT {
            return false;
        }
        #[cfg(test)]
        note(RecordedStep::Request);
        // SAFETY: `n` is less than the units of a block, or there were no room.
        let start = unsafe { self.base.add(n as usize) }.cast::<u8>();
        // SAFETY: inside, and aligned as a unit is; see `write` for who else may be there.
        unsafe { start.cast::<Be32>().write(length) };
        // SAFETY: inside, as a unit has room for more than a word.
        let to = unsafe { start.add(WORD) };
        // The first unit, the last from the end back, and one between where these two do not meet;
        // there is no room for more.
        // SAFETY: `SEGMENT` bytes are there to read, and room to write them. Queue memory is never lent as
        // a slice, so that the two lie apart.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), SEGMENT) };
        if bytes.len() > 2 * SEGMENT {
            // SAFETY: there are as many bytes.
            let piece = unsafe { bytes.as_ptr().add(SEGMENT) };
            // SAFETY: inside, since there is room for all bytes.
            let place = unsafe { to.add(SEGMENT) };
            // SAFETY: as for the first.
            unsafe { place.copy_from_nonoverlapping(piece, SEGMENT) };
        }
        let last = bytes.len() - SEGMENT;
        // SAFETY: the last `SEGMENT` bytes.
        let piece = unsafe { bytes.as_ptr().add(last) };
        // SAFETY: inside, since there is room for all bytes.
        let place = unsafe { to.add(last) };
        // SAFETY: as for the first.
        unsafe { place.copy_from_nonoverlapping(piece, SEGMENT) };
        true
    }

    /// The unit `n` of the block, modulo four, as it lies in memory.
    #[inline(always)]
    pub(super) fn read(self, n: u32) -> [u64; 2] {
        // SAFETY: a block has four units.
        let place = unsafe { self.base.add((n % SEGMENTS_PER_WQEBB) as usize) };
        // SAFETY: inside and aligned; initialised since the memory was zeroed.
        unsafe { place.read() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whichever of the three ways is taken.
    #[test]
    fn inline_data_lies_as_byte_by_byte() {
        const COUNT: u32 = 4;
        let bytes: Vec<u8> = (1..=100).collect();
        for (index, unit) in
            (0..COUNT).flat_map(|index| (0..SEGMENTS_PER_WQEBB).map(move |unit| (index, unit)))
        {
            for length in 0..=bytes.len() {
                let data = &bytes[..length];
                let ring = Wqebbs::new(QueueMemory::page(), 64, COUNT).unwrap();
                let plain =
                    WqeSegments::new(QueueMemory::page(), 64, COUNT * SEGMENTS_PER_WQEBB).unwrap();
                let word = Be32::new(length as u32 | 1 << 31);
                // SAFETY: a spot of this ring.
                let units = unsafe { ring.inline(ring.spot(index), unit, word, data) };
                assert_eq!(units, if length == 0 { 0 } else { inline_units(data) });
                if length > 0 {
                    plain.inline(index * SEGMENTS_PER_WQEBB + unit, word, data);
                }
                for n in 0..COUNT * SEGMENTS_PER_WQEBB {
                    assert_eq!(ring.units.read(n), plain.read(n), "{index} {unit} {length} {n}");
                }
            }
        }
    }
}
