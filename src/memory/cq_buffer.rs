//! The ring that a device writes CQEs to, and the consumer index.
//!
//! Pairs with [`queue_memory`](super::queue_memory), which has the memory. A CQE is read only after its
//! `op_own`; the poller puts a barrier between the two, and uses nothing of a CQE that is marked as unwritten.

use super::queue_memory::QueueMemory;
#[cfg(test)]
use super::recorded_order::{RecordedStep, record_step};
use crate::sync::fork::Epoch;
use std::marker::PhantomData;
use std::sync::Arc;
use uverbs_uapi::endian::{Be16, Be32};

/// A ring of completions, 64 or 128 bytes each and a power of two of them.
#[derive(Clone, Debug)]
pub(crate) struct CqBuffer {
    /// The core of the first CQE: its last 64 bytes, with the fields of every completion.
    base: *mut u8,
    mask: u32,
    /// Binary logarithm of a CQE's bytes.
    shift: u8,
    memory: Arc<QueueMemory>,
}

// SAFETY: see `QueueMemory`; one poller owns the view.
unsafe impl Send for CqBuffer {}
// SAFETY: as above; shared use reads only.
unsafe impl Sync for CqBuffer {}

/// Bytes of a CQE's core, the fields that every completion has. In a CQE of 128 bytes it is the second half.
const CORE: usize = 64;

impl CqBuffer {
    /// `count` CQEs of `size` bytes; `None` unless they are inside, aligned, of 64 or 128 bytes, and a power of two.
    pub(crate) fn new(memory: Arc<QueueMemory>, count: u32, size: usize) -> Option<CqBuffer> {
        if !count.is_power_of_two() || !(size == CORE || size == 2 * CORE) {
            return None;
        }
        let length = size.checked_mul(usize::try_from(count).ok()?)?;
        // To a multiple of two cores for either size: `Cqe::front` relies on it.
        let base = memory.range(0, length, 2 * CORE)?;
        // SAFETY: a CQE is at least `CORE` bytes, and the first is inside.
        let base = unsafe { base.add(size - CORE) }.as_ptr();
        Some(CqBuffer { base, mask: count - 1, shift: size.trailing_zeros() as u8, memory })
    }

    /// The process that may use the ring.
    pub(crate) fn epoch(&self) -> Epoch {
        self.memory.epoch()
    }

    /// The first CQE, from its first byte on.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.base.wrapping_sub(self.size() - CORE)
    }

    #[cfg(test)]
    pub(crate) fn memory(&self) -> &Arc<QueueMemory> {
        &self.memory
    }

    /// The number of CQEs.
    #[inline(always)]
    pub(crate) fn count(&self) -> u32 {
        self.mask + 1
    }

    /// The bytes of a CQE.
    pub(crate) fn size(&self) -> usize {
        1 << self.shift
    }

    /// The CQE `index`, which is taken modulo the ring.
    #[inline(always)]
    pub(crate) fn at(&self, index: u32) -> Cqe<'_> {
        let offset = ((index & self.mask) as usize) << self.shift;
        // SAFETY: `new` checked that CQEs up to and including `mask` are inside.
        let core = unsafe { self.base.add(offset) };
        Cqe { core, ring: PhantomData }
    }

    /// Copies the CQE `from` of another ring, of the same size, to `to`. Its last byte becomes `op_own`.
    pub(crate) fn take_over(&self, to: u32, other: &CqBuffer, from: u32, op_own: u8) {
        if self.shift != other.shift {
            return;
        }
        let before = self.size() - CORE;
        let (to, from) = (self.at(to), other.at(from));
        // SAFETY: a CQE has `before` bytes before its core, inside the memory.
        let target = unsafe { to.core.sub(before) };
        // SAFETY: as above, in the other ring.
        let source = unsafe { from.core.sub(before) };
        // SAFETY: both are whole CQEs, of two memories or of two places in one; the device
        // writes neither: one is ours to consume, the other not yet known to it.
        unsafe { source.copy_to(target, self.size()) };
        to.set_op_own(op_own);
    }
}

/// A ring of completions, and its consumer index. A pointer leads to the next CQE, so that a poll that
/// finds nothing costs little.
#[derive(Clone, Debug)]
pub(crate) struct CqReader {
    cqes: CqBuffer,
    /// The next CQE.
    next: *mut u8,
    /// The address behind the last CQE.
    end: *mut u8,
    /// Bytes of a CQE.
    stride: usize,
    /// The number of CQEs consumed, shifted left by 8: the 24 bits of the consumer index are left, and need no mask.
    consumed: u32,
    /// The parity of the pass over the ring, as the lowest bit.
    parity: u8,
}

// SAFETY: see `CqBuffer`, whose memory `next` points into.
unsafe impl Send for CqReader {}
// SAFETY: as above.
unsafe impl Sync for CqReader {}

/// The parity bit in a CQE's last byte.
const PARITY: u8 = 1;
/// CQEs that the device has not written have this in their last byte, or more.
pub(crate) const UNWRITTEN: u8 = 0xf0;
/// The `op_own` of a CQE before the device knows the ring: in the first pass its owner bit, too, says that the
/// CQE is the device's.
const INITIAL: u8 = UNWRITTEN | PARITY;
/// Bits by which `consumed` is shifted.
const UNUSED: u32 = 8;

impl CqReader {
    /// Begins with the CQE `consumer`.
    pub(crate) fn new(cqes: CqBuffer, consumer: u32) -> CqReader {
        let stride = cqes.size();
        let log = cqes.count().trailing_zeros();
        CqReader {
            next: cqes.at(consumer).core,
            end: cqes.base.wrapping_add(stride * cqes.count() as usize),
            cqes,
            stride,
            consumed: consumer << UNUSED,
            parity: (consumer >> log) as u8 & PARITY,
        }
    }

    pub(crate) fn cqes(&self) -> &CqBuffer {
        &self.cqes
    }

    /// The consumer index, of 24 bits.
    #[inline(always)]
    pub(crate) fn consumer(&self) -> u32 {
        self.consumed >> UNUSED
    }

    /// The `op_own` of the next CQE with the owner bit cleared, if that bit says that the CQE is software's.
    /// After a resize the CQE may still be [unwritten](UNWRITTEN), which is no success: a caller that compares
    /// with a success first need not check for it.
    #[inline(always)]
    pub(crate) fn next_op_own(&self) -> Option<u8> {
        let op_own = self.next().op_own() ^ self.parity;
        (op_own & PARITY == 0).then_some(op_own)
    }

    /// Whether there is a next CQE.
    pub(crate) fn is_empty(&self) -> bool {
        self.next_op_own().is_none_or(|op_own| op_own >= UNWRITTEN)
    }

    /// The next CQE.
    #[inline(always)]
    pub(crate) fn next(&self) -> Cqe<'_> {
        Cqe { core: self.next, ring: PhantomData }
    }

    /// Advances to the CQE after it.
    #[inline(always)]
    pub(crate) fn advance(&mut self) {
        self.advance_past(self.next);
    }

    /// As [`advance`](Self::advance), for a caller that has the pointer to the next CQE.
    #[inline(always)]
    fn advance_past(&mut self, next: *mut u8) {
        self.consumed = self.consumed.wrapping_add(1 << UNUSED);
        // Never beyond `end`, and not left there: `next` is always a CQE.
        let after = next.wrapping_add(self.stride);
        self.next = after;
        if after == self.end {
            self.next = self.cqes.base;
            self.parity ^= PARITY;
        }
    }

    /// Shows `take` the next CQE, and goes on to the one after it if `take` returns `Some`.
    #[inline(always)]
    pub(crate) fn consume<T>(&mut self, take: impl FnOnce(Cqe<'_>) -> Option<T>) -> Option<T> {
        let next = self.next;
        let found = take(Cqe { core: next, ring: PhantomData })?;
        self.advance_past(next);
        Some(found)
    }

    /// The CQE before the next one.
    #[inline(always)]
    pub(crate) fn last(&self) -> Cqe<'_> {
        let after = if self.next == self.cqes.base { self.end } else { self.next };
        // Inside, as `next` and `end` are whole CQEs from the first.
        Cqe { core: after.wrapping_sub(self.stride), ring: PhantomData }
    }

    /// CQEs from the next on that the device has written, with their indices.
    pub(crate) fn written(&self) -> impl Iterator<Item = (u32, Cqe<'_>)> {
        let log = self.cqes.count().trailing_zeros();
        let first = self.consumer();
        (0..self.cqes.count())
            .map(move |n| first.wrapping_add(n))
            .map(|at| (at, self.cqes.at(at)))
            .take_while(move |(at, cqe)| {
                let op_own = cqe.op_own();
                (op_own ^ (at >> log) as u8) & PARITY == 0 && op_own < UNWRITTEN
            })
    }
}

/// A number that one load reads, without alignment.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Anywhere(u32);

/// One completion in its ring, as the device wrote it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cqe<'r> {
    core: *mut u8,
    ring: PhantomData<&'r CqBuffer>,
}

// SAFETY: reading a completion needs nothing of the thread that found it.
unsafe impl Send for Cqe<'_> {}
// SAFETY: as above.
unsafe impl Sync for Cqe<'_> {}
impl std::panic::UnwindSafe for Cqe<'_> {}
impl std::panic::RefUnwindSafe for Cqe<'_> {}

impl Cqe<'_> {
    /// The last byte, loaded now: the opcode, the format of inline data, and the owner bit.
    #[inline(always)]
    pub(crate) fn op_own(&self) -> u8 {
        #[cfg(test)]
        record_step(RecordedStep::OpOwn);
        // SAFETY: the last byte of the core is inside.
        let place = unsafe { self.core.add(CORE - 1) };
        // SAFETY: inside and initialised; volatile because the device writes it at any time.
        unsafe { place.read_volatile() }
    }

    /// Marks a CQE as unwritten, before the device knows the ring.
    pub(crate) fn mark_unwritten(&self) {
        self.set_op_own(INITIAL);
    }

    fn set_op_own(&self, op_own: u8) {
        // SAFETY: the last byte of the core is inside.
        let place = unsafe { self.core.add(CORE - 1) };
        // SAFETY: inside; only called for CQEs that the device does not write.
        unsafe { place.write_volatile(op_own) };
    }

    /// The byte at `AT`.
    #[inline(always)]
    pub(crate) fn byte<const AT: usize>(&self) -> u8 {
        const { assert!(AT < CORE) };
        #[cfg(test)]
        record_step(RecordedStep::Completion);
        // SAFETY: inside, as asserted.
        let place = unsafe { self.core.add(AT) };
        // SAFETY: inside and initialised; the device has finished with the CQE.
        unsafe { place.read() }
    }

    /// The number of 16 bits at `AT`.
    #[inline(always)]
    pub(crate) fn be16<const AT: usize>(&self) -> u16 {
        const { assert!(AT + 2 <= CORE && AT % 2 == 0) };
        #[cfg(test)]
        record_step(RecordedStep::Completion);
        // SAFETY: inside, as asserted.
        let place = unsafe { self.core.add(AT) };
        // SAFETY: inside, aligned and initialised; the device has finished with the CQE.
        unsafe { place.cast::<Be16>().read() }.get()
    }

    /// The number of 24 bits at `AT`, behind which there is one more byte.
    #[inline(always)]
    pub(crate) fn be24<const AT: usize>(&self) -> u32 {
        const { assert!(AT + 4 <= CORE) };
        // Loaded with the byte behind it, which is shifted out: masking a byte before it would cost
        // more. SAFETY: inside, as asserted.
        unsafe { self.unaligned(AT) >> 8 }
    }

    /// The 16 bits at `AT` in the lower half of the result. The upper half holds the bytes before them, for
    /// callers that mask both.
    #[inline(always)]
    pub(crate) fn low16<const AT: usize>(&self) -> u32 {
        const { assert!(AT >= 2 && AT + 2 <= CORE) };
        // SAFETY: inside, as asserted.
        unsafe { self.unaligned(AT - 2) }
    }

    /// The number of 32 bits at `at`, without alignment.
    ///
    /// # Safety
    ///
    /// `at` is four bytes or more before the end of the core.
    #[inline(always)]
    unsafe fn unaligned(&self, at: usize) -> u32 {
        #[cfg(test)]
        record_step(RecordedStep::Completion);
        // SAFETY: inside, as the caller promises.
        let place = unsafe { self.core.add(at) };
        // SAFETY: inside and initialised. Volatile, as an unwritten CQE may look written, and the
        // device may be writing it; the value is not used then.
        let Anywhere(number) = unsafe { place.cast::<Anywhere>().read_volatile() };
        u32::from_be(number)
    }

    /// The number of 32 bits at `AT`.
    #[inline(always)]
    pub(crate) fn be32<const AT: usize>(&self) -> u32 {
        const { assert!(AT + 4 <= CORE && AT % 4 == 0) };
        #[cfg(test)]
        record_step(RecordedStep::Completion);
        // SAFETY: inside, as asserted.
        let place = unsafe { self.core.add(AT) };
        // SAFETY: inside, aligned and initialised; the device has finished with the CQE.
        unsafe { place.cast::<Be32>().read() }.get()
    }

    /// The first half of the core.
    pub(crate) fn start(&self) -> [u8; CORE / 2] {
        // SAFETY: inside, aligned for bytes and initialised; the device has finished with the CQE.
        unsafe { self.core.cast::<[u8; CORE / 2]>().read() }
    }

    /// The first 64 bytes of a CQE of 128 bytes; `None` where a CQE cannot be so long. For a CQE of 64
    /// bytes the result may be the CQE before it.
    pub(crate) fn front(&self) -> Option<[u8; CORE]> {
        // A ring begins at a multiple of two cores. The core in the second half of such a block has bytes of
        // the ring before it: the front of its own CQE, or another CQE.
        if self.core.addr() & CORE == 0 {
            return None;
        }
        // SAFETY: the first half of the block is inside, because the block began with the ring.
        let front = unsafe { self.core.sub(CORE) }.cast::<[u8; CORE]>();
        // SAFETY: inside, aligned for bytes and initialised; volatile because a neighbour may be the
        // device's to write.
        Some(unsafe { front.read_volatile() })
    }

    /// Replaces the number of 32 bits at `AT` in a CQE that is ours to consume.
    pub(crate) fn set_be32<const AT: usize>(&self, value: u32) {
        const { assert!(AT + 4 <= CORE && AT % 4 == 0) };
        // SAFETY: inside, as asserted.
        let place = unsafe { self.core.add(AT) };
        // SAFETY: inside and aligned; the device does not write a CQE that it handed over.
        unsafe { place.cast::<Be32>().write(Be32::new(value)) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::wqe_segment::WqeSegments;
    use super::*;

    #[test]
    fn rings_that_do_not_fit_are_refused() {
        let memory = QueueMemory::page();
        let cqes = (memory.len() / 64) as u32;
        assert!(CqBuffer::new(memory.clone(), cqes, 64).is_some());
        assert!(CqBuffer::new(memory.clone(), cqes, 128).is_none(), "too long");
        assert!(CqBuffer::new(memory.clone(), 1, 32).is_none(), "no such size");
        assert!(CqBuffer::new(memory, 3, 64).is_none(), "no power of two");
    }

    #[test]
    fn the_core_of_a_long_cqe_is_its_end() {
        let memory = QueueMemory::page();
        let raw = WqeSegments::new(memory.clone(), 0, 16).unwrap();
        for unit in 0..16 {
            raw.write(unit, [u64::from_be(u64::from(unit)); 2]);
        }
        let short = CqBuffer::new(memory.clone(), 4, 64).unwrap();
        assert_eq!(
            (short.at(1).be32::<4>(), short.at(1).be16::<30>(), short.at(5).op_own()),
            (4, 5, 7)
        );
        let long = CqBuffer::new(memory, 2, 128).unwrap();
        assert_eq!((long.at(1).be32::<4>(), long.at(3).op_own(), long.size()), (12, 15, 128));
    }

    #[test]
    fn the_front_of_a_cqe_is_never_outside() {
        let memory = QueueMemory::page();
        let raw = WqeSegments::new(memory.clone(), 0, 16).unwrap();
        for unit in 0..16 {
            raw.write(unit, [u64::from_be(u64::from(unit)); 2]);
        }
        let long = CqBuffer::new(memory.clone(), 2, 128).unwrap();
        for (at, unit) in [(0, 0), (1, 8)] {
            let front = long.at(at).front().unwrap();
            let starts: Vec<u8> = (0..4).map(|n| front[16 * n + 7]).collect();
            assert_eq!(starts, [unit, unit + 1, unit + 2, unit + 3]);
            assert_eq!((long.at(at).start()[7], long.at(at).start()[31]), (unit + 4, unit + 5));
        }
        let short = CqBuffer::new(memory.clone(), 4, 64).unwrap();
        assert!(short.at(0).front().is_none() && short.at(2).front().is_none());
        assert_eq!(short.at(1).front().unwrap()[7], 0, "a neighbour");
        assert!(memory.range(64, 64, 128).is_none(), "rings begin where the front is inside");
    }

    #[test]
    fn a_cqe_that_is_taken_over_is_whole_and_leaves_its_neighbours_alone() {
        for size in [64, 128] {
            let rings = [0x10, 0x20].map(|mark: u64| {
                let memory = QueueMemory::page();
                let raw = WqeSegments::new(memory.clone(), 0, 64).unwrap();
                (0..64).for_each(|unit| raw.write(unit, [mark, u64::from(unit)]));
                (CqBuffer::new(memory, 4, size).unwrap(), raw)
            });
            let [(new, raw), (old, other)] = &rings;
            let units = (size / 16) as u32;
            // Both indices are taken modulo the ring.
            new.take_over(7, old, 6, 0x85);
            for unit in 0..64 {
                let mut expected = [0x10, u64::from(unit)];
                if unit / units == 3 {
                    expected = [0x20, u64::from(unit - units)];
                }
                if unit == 4 * units - 1 {
                    let mut last = expected[1].to_ne_bytes();
                    last[7] = 0x85;
                    expected[1] = u64::from_ne_bytes(last);
                }
                assert_eq!(raw.read(unit), expected, "{unit} of {size}");
                assert_eq!(other.read(unit), [0x20, u64::from(unit)]);
            }
        }
        let [short, long] =
            [64, 128].map(|size| CqBuffer::new(QueueMemory::page(), 4, size).unwrap());
        short.at(0).set_be32::<0>(1);
        long.take_over(0, &short, 0, 9);
        assert_eq!((long.at(0).be32::<0>(), long.at(0).op_own()), (0, 0), "of another size");
    }

    #[test]
    fn a_reader_advances_only_past_cqes_that_its_caller_takes() {
        let cqes = CqBuffer::new(QueueMemory::page(), 2, 64).unwrap();
        (0..2).for_each(|at| cqes.at(at).set_be32::<0>(at + 1));
        let mut reader = CqReader::new(cqes, 0);
        for (consumed, number) in [1, 2, 1, 2, 1].into_iter().enumerate() {
            assert_eq!(reader.consume(|_| None::<u32>), None);
            assert_eq!(reader.consumer(), consumed as u32);
            assert_eq!(reader.consume(|cqe| Some(cqe.be32::<0>())), Some(number));
            assert_eq!(
                (reader.consumer(), reader.last().be32::<0>()),
                (consumed as u32 + 1, number)
            );
        }
    }
}
