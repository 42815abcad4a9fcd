//! Rings of WQEBBs: send queues, whose WQEs begin at a WQEBB and are written segment by segment.
//!
//! Pairs with [`WqeSegments`], which writes data that goes on at the ring's
//! beginning.

use super::queue_memory::QueueMemory;
#[cfg(test)]
use super::recorded_order::{RecordedStep, record_step};
use super::wqe_segment::{SEGMENT, WqeSegments};
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;
use uverbs_uapi::endian::Be32;

/// Segments of a WQEBB.
pub(crate) const SEGMENTS_PER_WQEBB: u32 = 4;

/// Units of a [`WqebbOffset`] in a WQEBB.
const SPAN: u32 = 16;
/// Bytes of the ring in one unit of a [`WqebbOffset`].
const SCALE: usize = SEGMENTS_PER_WQEBB as usize * SEGMENT / SPAN as usize;

/// The position of a WQEBB in its ring, in units of four bytes. x86 scales an index by four for free, so
/// that one shifted number addresses the WQEBB, and unscaled the entry of 16 bytes that belongs to it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WqebbOffset(u32);

impl WqebbOffset {
    /// Bytes before its entry in a table of one `T` for each WQEBB. Free if a `T` has 16 bytes.
    #[inline(always)]
    pub(super) fn beside<T>(self) -> usize {
        if size_of::<T>() == SPAN as usize {
            self.0 as usize
        } else {
            (self.0 / SPAN) as usize * size_of::<T>()
        }
    }

    /// The number of segments before the WQEBB.
    fn segments(self) -> u32 {
        self.0 / (SPAN / SEGMENTS_PER_WQEBB)
    }
}

/// A ring of WQEBBs of four [segments](WqeSegments), a power of two of them: a send queue, whose requests
/// begin at WQEBBs.
#[derive(Debug)]
pub(crate) struct Wqebbs {
    segments: WqeSegments,
    /// Turns a WQEBB's number, as an offset, into one inside the ring.
    mask: u32,
    /// The address behind the last WQEBB.
    end: usize,
}

impl Wqebbs {
    /// `count` WQEBBs at byte `offset`; `None` unless they are inside, aligned and a power of two.
    pub(crate) fn new(memory: Arc<QueueMemory>, offset: usize, count: u32) -> Option<Wqebbs> {
        let segments = WqeSegments::new(memory, offset, count.checked_mul(SEGMENTS_PER_WQEBB)?)?;
        let last = (segments.count() / SEGMENTS_PER_WQEBB).checked_sub(1)?;
        let end = segments.base().addr() + segments.count() as usize * SEGMENT;
        Some(Wqebbs { mask: last.checked_mul(SPAN)?, end, segments })
    }

    /// The WQEBBs of `count` segments from an offset on, if they do not go on at the beginning.
    #[inline(always)]
    pub(super) fn run(&self, offset: WqebbOffset, count: u32) -> Option<WqebbRun<'_>> {
        let offset = self.behind(offset, 0);
        // SAFETY: of this ring.
        let first = unsafe { self.get(offset) };
        // The ring is whole WQEBBs, so the rest of the last WQEBB is inside as well.
        let end = first.base.addr() + count as usize * SEGMENT;
        (end <= self.end).then_some(WqebbRun { first })
    }

    /// The first WQEBB.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.segments.base().cast()
    }

    /// The number of WQEBBs.
    pub(crate) fn count(&self) -> u32 {
        self.mask / SPAN + 1
    }

    /// The offset of the WQEBB `index`, which is taken modulo the ring.
    #[inline(always)]
    pub(super) fn offset_of(&self, index: u32) -> WqebbOffset {
        WqebbOffset(index.wrapping_mul(SPAN) & self.mask)
    }

    /// The offset `count` WQEBBs behind `offset`. An offset of another ring is masked into this one.
    #[inline(always)]
    pub(super) fn behind(&self, offset: WqebbOffset, count: u32) -> WqebbOffset {
        WqebbOffset(offset.0.wrapping_add(count.wrapping_mul(SPAN)) & self.mask)
    }

    /// The WQEBB there.
    ///
    /// # Safety
    ///
    /// The offset is of this ring.
    #[inline(always)]
    pub(super) unsafe fn get(&self, offset: WqebbOffset) -> Wqebb<'_> {
        // SAFETY: `new` found room for as many as there are.
        let base = unsafe { self.segments.base().byte_add(offset.0 as usize * SCALE) };
        Wqebb { base, ring: PhantomData }
    }

    /// The WQEBB at the offset. An offset of another ring is masked into this one.
    #[inline(always)]
    pub(super) fn wqebb(&self, offset: WqebbOffset) -> Wqebb<'_> {
        // SAFETY: of this ring.
        unsafe { self.get(self.behind(offset, 0)) }
    }

    /// Writes the segment `segment` behind the beginning of a WQEBB, which may be one of another WQEBB.
    #[inline(always)]
    pub(super) fn write(&self, offset: WqebbOffset, segment: u32, value: [u64; 2]) {
        self.segments.write(offset.segments().wrapping_add(segment), value);
    }

    /// Writes inline data from the segment `segment` of a WQEBB on: a word that says how long it is, and
    /// `bytes`, which go on at the ring's beginning where it ends. More than the whole ring is cut off.
    /// Returns how many segments that are: none for no bytes.
    ///
    /// # Safety
    ///
    /// The offset is of this ring.
    #[inline(always)]
    pub(super) unsafe fn inline(
        &self,
        offset: WqebbOffset,
        segment: u32,
        length: Be32,
        bytes: &[u8],
    ) -> u32 {
        // SAFETY: the caller's promise.
        let wqebb = unsafe { self.get(offset) };
        if wqebb.inline(segment, length, bytes) {
            return inline_segments(bytes.len());
        }
        // SAFETY: the caller's promise.
        if unsafe { self.inline_long(offset, segment, length, bytes) } {
            return inline_segments(bytes.len());
        }
        if bytes.is_empty() {
            return 0;
        }
        self.segments.inline(offset.segments().wrapping_add(segment), length, bytes);
        inline_segments(bytes.len())
    }

    /// As [`inline`](Self::inline), for data of several slices: `length` bytes behind the first `skipped`.
    pub(super) fn inline_list(
        &self,
        offset: WqebbOffset,
        segment: u32,
        word: Be32,
        length: usize,
        parts: &[&[u8]],
        skipped: usize,
    ) -> u32 {
        if length == 0 {
            return 0;
        }
        self.segments.inline_list(offset.segments().wrapping_add(segment), word, parts, skipped);
        inline_segments(length)
    }

    /// As [`inline`](Self::inline) for data that ends before the ring does; `false`, and nothing done, for all other data.
    ///
    /// # Safety
    ///
    /// The offset is of this ring.
    #[inline(always)]
    unsafe fn inline_long(
        &self,
        offset: WqebbOffset,
        segment: u32,
        length: Be32,
        bytes: &[u8],
    ) -> bool {
        #[cfg(test)]
        record_step(RecordedStep::Request);
        // SAFETY: the caller's promise.
        let wqebb = unsafe { self.get(offset) };
        let place = wqebb.base.wrapping_add(segment as u8 as usize).cast::<Be32>();
        let to = place.wrapping_add(1).cast::<u8>();
        // Negative if the data would begin behind the end.
        let room = self.end.wrapping_sub(to.addr()) as isize;
        if bytes.is_empty() || bytes.len() as isize > room {
            return false;
        }
        // SAFETY: inside, as the data is that follows, and aligned as a segment is.
        unsafe { place.write(length) };
        // SAFETY: there is room for all bytes; queue memory is never lent as a slice, so that the two lie
        // apart.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        true
    }

    /// As [`inline_list`](Self::inline_list) for all bytes of the slices, if each is [short](copy_list), and they are at
    /// most `most` and end before the ring does; `word` says how long they are. `None` for all other data, of which some
    /// may have been written.
    ///
    /// # Safety
    ///
    /// The offset is of this ring.
    #[inline(always)]
    pub(super) unsafe fn inline_list_in_one_piece(
        &self,
        offset: WqebbOffset,
        segment: u32,
        most: usize,
        word: impl FnOnce(usize) -> Be32,
        parts: &[&[u8]],
    ) -> Option<u32> {
        #[cfg(test)]
        record_step(RecordedStep::Request);
        // SAFETY: the caller's promise.
        let wqebb = unsafe { self.get(offset) };
        let place = wqebb.base.wrapping_add(segment as u8 as usize).cast::<Be32>();
        let first = place.wrapping_add(1).cast::<u8>();
        // Negative if the data would begin behind the end.
        let room = (self.end.wrapping_sub(first.addr()) as isize).min(most as isize);
        // SAFETY: there is so much room; queue memory is never lent as a slice, so that the two lie apart.
        let end = unsafe { copy_list(parts, first, room) };
        // One comparison: no slice was copied if there is no end, or no byte if it is the beginning.
        if end <= first {
            return None;
        }
        let length = end.addr() - first.addr();
        // SAFETY: inside, as the data is that follows, and aligned as a segment is.
        unsafe { place.write(word(length)) };
        Some(inline_segments(length))
    }
}

/// WQEBBs side by side.
#[derive(Clone, Copy, Debug)]
pub(super) struct WqebbRun<'r> {
    first: Wqebb<'r>,
}

impl<'r> WqebbRun<'r> {
    /// The WQEBB `nth`.
    ///
    /// # Safety
    ///
    /// The run has more than `nth`.
    #[inline(always)]
    pub(super) unsafe fn get(&self, nth: usize) -> Wqebb<'r> {
        // SAFETY: the caller's promise, and `Wqebbs::run` found room for all.
        let base = unsafe { self.first.base.add(nth * SEGMENTS_PER_WQEBB as usize) };
        Wqebb { base, ring: PhantomData }
    }
}

/// Copies slices one after the other, and returns the end of the last one; null if there is too little room, or if a
/// slice has 1 to 3 or more than 64 bytes, as few headers have. A call of `memcpy` would take 20 instructions more for
/// each slice, and 20 for each list, because its caller keeps registers. An `Option` of the length would take 7.
///
/// # Safety
///
/// `room` bytes behind `to` may be written, and lie apart from the slices.
#[inline(never)]
unsafe fn copy_list(parts: &[&[u8]], mut to: *mut u8, mut room: isize) -> *mut u8 {
    for part in parts {
        room -= part.len() as isize;
        if room < 0 {
            return ptr::null_mut();
        }
        // In 32 bits, as all constants fit into instructions then.
        match part.len() as u32 {
            // SAFETY: there is room for the slice, which has at least as many bytes.
            16 => unsafe { to.copy_from_nonoverlapping(part.as_ptr(), 16) },
            // SAFETY: there is room for the slice.
            4..8 => unsafe { copy_ends::<4>(part, to) },
            // SAFETY: as before.
            8..16 => unsafe { copy_ends::<8>(part, to) },
            // SAFETY: as before.
            17..=32 => unsafe { copy_ends::<16>(part, to) },
            // SAFETY: as before.
            33..=64 => unsafe { copy_ends::<32>(part, to) },
            // Asked last: an arm of its own comes first, which takes two instructions for each slice.
            length if length > 0 => return ptr::null_mut(),
            _ => {}
        }
        to = to.wrapping_add(part.len());
    }
    to
}

/// Copies the first and the last `N` bytes of a slice, which overlap unless it has twice as many.
///
/// # Safety
///
/// The slice's length of bytes behind `to` may be written, and they lie apart from it.
#[inline(always)]
unsafe fn copy_ends<const N: usize>(part: &[u8], to: *mut u8) {
    let (Some(first), Some(last)) = (part.first_chunk::<N>(), part.last_chunk::<N>()) else {
        return;
    };
    // SAFETY: the caller's promise.
    unsafe { to.copy_from_nonoverlapping(first.as_ptr(), N) };
    let to = to.wrapping_add(part.len() - N);
    // SAFETY: the same of the last bytes.
    unsafe { to.copy_from_nonoverlapping(last.as_ptr(), N) };
}

/// Segments of inline data, with the word that says how long it is.
#[inline(always)]
fn inline_segments(bytes: usize) -> u32 {
    // A shift: `div_ceil` costs three instructions for an overflow that cannot happen, as inline data is shorter
    // than a queue.
    let last = SEGMENT - 1;
    (bytes + size_of::<Be32>() + last) as u32 >> SEGMENT.ilog2()
}

/// One WQEBB of a ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wqebb<'r> {
    base: *mut [u64; 2],
    ring: PhantomData<&'r Wqebbs>,
}

impl Wqebb<'_> {
    /// Writes the segment `n` of the WQEBB, modulo four; `value` in the byte order of memory.
    #[inline(always)]
    pub(crate) fn write(self, n: u32, value: [u64; 2]) {
        #[cfg(test)]
        record_step(RecordedStep::Request);
        // SAFETY: a WQEBB has four segments.
        let place = unsafe { self.base.add((n % SEGMENTS_PER_WQEBB) as usize) };
        // SAFETY: inside and aligned. Only the poster writes here, and the device does not read the WQE before
        // the doorbell.
        unsafe { place.write(value) };
    }

    /// Writes inline data from the segment `n` on: a word that says how long it is, and `bytes`; `false`,
    /// and nothing done, unless they are at least a segment and end in the WQEBB.
    #[inline(always)]
    fn inline(self, n: u32, length: Be32, bytes: &[u8]) -> bool {
        const WORD: usize = size_of::<Be32>();
        let room = (SEGMENTS_PER_WQEBB.saturating_sub(n) as usize * SEGMENT).saturating_sub(WORD);
        // As many as are copied below. A control segment stands first, so that there is never more room.
        let room = room.min(3 * SEGMENT);
        // Both bounds in one comparison: less than a segment wraps.
        if room < SEGMENT || bytes.len().wrapping_sub(SEGMENT) > room - SEGMENT {
            return false;
        }
        #[cfg(test)]
        record_step(RecordedStep::Request);
        // SAFETY: `n` is less than the segments of a WQEBB, or there were no room.
        let start = unsafe { self.base.add(n as usize) }.cast::<u8>();
        // SAFETY: inside, and aligned as a segment is; only the poster writes here, as in `write`.
        unsafe { start.cast::<Be32>().write(length) };
        // SAFETY: inside, as a segment has room for more than a word.
        let to = unsafe { start.add(WORD) };
        // The first segment, the last from the end back, and one between where these two do not meet;
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

    /// The segment `n` of the WQEBB, modulo four, as it lies in memory.
    #[inline(always)]
    pub(super) fn read(self, n: u32) -> [u64; 2] {
        // SAFETY: a WQEBB has four segments.
        let place = unsafe { self.base.add((n % SEGMENTS_PER_WQEBB) as usize) };
        // SAFETY: inside and aligned; initialised since the memory was zeroed.
        unsafe { place.read() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A control segment always stands before the data, so at most 48 bytes fit.
    #[test]
    fn inline_data_from_one_segment_to_the_end_of_the_wqebb_goes_in_one_piece() {
        let bytes = [7; 100];
        let word = Be32::new(1 << 31);
        for (segment, most) in [(0, 48), (1, 44), (2, 28), (3, 0), (4, 0)] {
            for length in 0..=bytes.len() {
                let ring = Wqebbs::new(QueueMemory::page(), 64, 1).unwrap();
                let whole = ring.wqebb(ring.offset_of(0)).inline(segment, word, &bytes[..length]);
                assert_eq!(whole, (16..=most).contains(&length), "{length} at {segment}");
            }
        }
    }

    #[test]
    fn a_request_is_one_run_unless_it_goes_on_at_the_beginning() {
        const COUNT: u32 = 4;
        let ring = Wqebbs::new(QueueMemory::page(), 64, COUNT).unwrap();
        for index in 0..COUNT {
            let left = (COUNT - index) * SEGMENTS_PER_WQEBB;
            for segments in 1..=COUNT * SEGMENTS_PER_WQEBB {
                let run = ring.run(ring.offset_of(index), segments);
                assert_eq!(run.is_some(), segments <= left, "{segments} from {index}");
            }
        }
    }

    /// Each of the three code paths writes the same bytes.
    #[test]
    fn inline_data_is_the_same_as_copied_byte_by_byte() {
        const COUNT: u32 = 4;
        const STEP: usize = if cfg!(miri) { 7 } else { 1 };
        let bytes: Vec<u8> = (1..=100).collect();
        for (index, segment) in (0..COUNT)
            .flat_map(|index| (0..SEGMENTS_PER_WQEBB).map(move |segment| (index, segment)))
        {
            for length in (0..=bytes.len()).step_by(STEP) {
                let data = &bytes[..length];
                let ring = Wqebbs::new(QueueMemory::page(), 64, COUNT).unwrap();
                let plain =
                    WqeSegments::new(QueueMemory::page(), 64, COUNT * SEGMENTS_PER_WQEBB).unwrap();
                let word = Be32::new(length as u32 | 1 << 31);
                // SAFETY: a offset of this ring.
                let segments = unsafe { ring.inline(ring.offset_of(index), segment, word, data) };
                assert_eq!(segments, if length == 0 { 0 } else { inline_segments(length) });
                if length > 0 {
                    plain.inline(index * SEGMENTS_PER_WQEBB + segment, word, data);
                }
                for n in 0..COUNT * SEGMENTS_PER_WQEBB {
                    assert_eq!(
                        ring.segments.read(n),
                        plain.read(n),
                        "{index} {segment} {length} {n}"
                    );
                }
            }
        }
    }
}
