//! Doorbell registers of a device: one store announces WQEs of a queue, and a BlueFlame register
//! takes a copy of the WQE itself.
//!
//! Pairs with a mapped UAR page. Pages are write-combining where the processor supports it. So a
//! ring begins with [`mmio_wc_start`], which orders the doorbell record before the register, and
//! ends with [`mmio_flush`], which orders this ring before the next.

use super::barrier::{mmio_flush, mmio_wc_start};
use super::mapping::Mapping;
#[cfg(test)]
use super::recorded_order::{RecordedStep, record_step};
use super::wqe_segment::SEGMENT;
use super::wqebb::{SEGMENTS_PER_WQEBB, Wqebb, WqebbOffset, Wqebbs};
use crate::sync::{AtomicBool, AtomicUsize, Ordering, spin_loop, yield_now};
use std::sync::Arc;

/// Bytes that one burst moves.
const BURST: usize = 64;

/// A register in a mapped page.
///
/// If two threads rang one register at the same time, their words would mix. A thread that is not the only
/// user of the register takes the lock first: [`hold`](Self::hold).
#[derive(Debug)]
pub(crate) struct DoorbellRegister {
    base: *mut u64,
    /// Bytes of each of the two buffers that requests are copied to in turn; 0 where the register
    /// takes doorbells only.
    buffer: usize,
    /// The most segments of a request that a buffer takes, less one.
    most: u32,
    /// The offset of the next buffer.
    next: AtomicUsize,
    held: AtomicBool,
    mapping: Arc<Mapping>,
}

// SAFETY: the mapping may be written from any thread.
unsafe impl Send for DoorbellRegister {}
// SAFETY: `&DoorbellRegister` stores whole words to a device, and has no other state than atomics.
unsafe impl Sync for DoorbellRegister {}

/// A register that this thread has locked.
#[derive(Debug)]
pub(crate) struct LockedRegister<'r> {
    register: &'r DoorbellRegister,
}

impl Drop for LockedRegister<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        #[cfg(test)]
        record_step(RecordedStep::Unlock);
        // Pairs with the Acquire of `try_hold`: the next holder sees which buffer comes next.
        self.register.held.store(false, Ordering::Release);
    }
}

impl DoorbellRegister {
    /// The register at byte `offset` of a mapping, with two BlueFlame buffers of `buffer` bytes, or
    /// none if that is 0. `None` unless all is inside, aligned to 8 bytes, or to a burst with buffers,
    /// and `buffer` is a power of two of whole bursts.
    pub(crate) fn new(
        mapping: Arc<Mapping>,
        offset: usize,
        buffer: usize,
    ) -> Option<DoorbellRegister> {
        let bursts = buffer.is_power_of_two() && buffer >= BURST && offset % BURST == 0;
        if buffer != 0 && !bursts {
            return None;
        }
        let length = buffer.checked_mul(2)?.max(size_of::<u64>());
        if offset.checked_add(length)? > mapping.len() || offset % size_of::<u64>() != 0 {
            return None;
        }
        // SAFETY: inside the mapping, as checked above.
        let base = unsafe { mapping.as_ptr().add(offset) }.cast();
        Some(DoorbellRegister {
            base,
            buffer,
            most: ((buffer / SEGMENT) as u32).saturating_sub(1),
            next: AtomicUsize::new(0),
            held: AtomicBool::new(false),
            mapping,
        })
    }

    /// The register, which its mapping keeps mapped.
    pub(crate) fn as_ptr(&self) -> *mut u64 {
        self.base
    }

    /// Bytes of each of the two buffers; 0 where the register takes doorbells only.
    pub(crate) fn buffer(&self) -> usize {
        self.buffer
    }

    /// Whether the device is in this process, so that [`tell`](Self::tell) must follow each ring.
    pub(crate) fn is_hosted(&self) -> bool {
        self.mapping.is_hosted()
    }

    /// Tells a device in this process that the register was rung: with this word, or with a WQE that begins with
    /// it. As with a ring, the caller is the only user, or holds the lock.
    #[cold]
    pub(crate) fn tell(&self, word: u64) {
        // The ring has switched buffers already, so its own buffer is the other one.
        let buffer = self.next.load(Ordering::Relaxed) ^ self.buffer;
        let at = self.base.addr() - self.mapping.as_ptr().addr() + buffer;
        self.mapping.tell(at, &word.to_ne_bytes());
    }

    /// Locks the register for a few stores; a thread that finds it locked spins.
    #[inline(always)]
    pub(crate) fn hold(&self) -> LockedRegister<'_> {
        if !self.try_hold() {
            self.wait();
        }
        #[cfg(test)]
        record_step(RecordedStep::Lock);
        LockedRegister { register: self }
    }

    #[inline(always)]
    fn try_hold(&self) -> bool {
        #[cfg(not(loom))]
        return !self.held.swap(true, Ordering::Acquire);
        // The same for a loom model, in which a thread could read its own old store for ever.
        #[cfg(loom)]
        return self
            .held
            .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
            .is_ok();
    }

    #[cold]
    fn wait(&self) {
        /// Attempts before the thread yields the processor, to the holder for example.
        const PATIENCE: u32 = 100;
        let mut looks = 0u32;
        while self.held.load(Ordering::Relaxed) || !self.try_hold() {
            looks = looks.wrapping_add(1);
            match looks % PATIENCE {
                0 => yield_now(),
                _ => spin_loop(),
            }
        }
    }

    /// The buffer that comes next; the other one comes after it.
    ///
    /// Load and store are not one atomic step: the caller is the only user, or holds the lock.
    #[inline(always)]
    fn take_turn(&self) -> usize {
        let now = self.next.load(Ordering::Relaxed);
        self.next.store(now ^ self.buffer, Ordering::Relaxed);
        now
    }

    /// Rings by one word, in the byte order of the register.
    #[inline(always)]
    pub(crate) fn doorbell(&self, word: u64) {
        let offset = self.take_turn();
        self.store(offset, word);
    }

    /// The register's first word alone.
    pub(crate) fn word(self: &Arc<Self>) -> DoorbellRegisterWord {
        DoorbellRegisterWord { place: self.base, register: self.clone() }
    }

    /// `offset` is that of a buffer.
    #[inline(always)]
    fn store(&self, offset: usize, word: u64) {
        // SAFETY: `new` checked that both buffers, or one word, are inside.
        let place = unsafe { self.base.byte_add(offset) };
        // SAFETY: inside and aligned.
        unsafe { store_word(place, word) };
    }

    /// Hands over a request of `count` segments that begins at a WQEBB of its queue; `false`, and nothing done,
    /// if it is not `single`, does not fit, or is a single segment, for which a doorbell does.
    #[inline(always)]
    #[must_use]
    pub(crate) fn blueflame(
        &self,
        queue: &Wqebbs,
        wqe: WqebbOffset,
        count: u32,
        single: bool,
    ) -> bool {
        // The length first: without buffers no length fits, and lengths below two wrap.
        if count.wrapping_sub(2) >= self.most || !single {
            return false;
        }
        let offset = self.take_turn();
        // Pairs with the device's read of the doorbell record and, where the copy does not suffice,
        // of the WQE in the ring.
        mmio_wc_start();
        #[cfg(test)]
        record_step(RecordedStep::BlueFlame);
        // SAFETY: `new` checked that both buffers are inside.
        let place = unsafe { self.base.byte_add(offset) }.cast::<[u64; 2]>();
        // One burst moves one WQEBB, and most requests are one.
        // SAFETY: a buffer has room for a WQEBB, and is aligned to a burst.
        unsafe { store_wqebb(place, queue.wqebb(wqe)) };
        if count > SEGMENTS_PER_WQEBB {
            // SAFETY: a buffer is whole WQEBBs, and takes as many segments as there are.
            unsafe { store_rest(place, queue, wqe, count) };
        }
        // Pairs with the device gathering one burst: later stores must not be combined with it.
        mmio_flush();
        true
    }
}

/// The first word of a register.
#[derive(Debug)]
pub(crate) struct DoorbellRegisterWord {
    place: *mut u64,
    register: Arc<DoorbellRegister>,
}

// SAFETY: see `DoorbellRegister`.
unsafe impl Send for DoorbellRegisterWord {}
// SAFETY: see `DoorbellRegister`.
unsafe impl Sync for DoorbellRegisterWord {}

impl DoorbellRegisterWord {
    /// Rings by a word in the byte order of the register. A register without buffers needs no lock:
    /// the store is one access, and no buffer is switched.
    #[inline(always)]
    pub(crate) fn ring(&self, word: u64) {
        const { assert!(usize::BITS >= u64::BITS || !super::barrier::KNOWN, "stores of two halves") };
        // SAFETY: inside and aligned since `DoorbellRegister::new`, in the mapping that the register keeps.
        unsafe { store_word(self.place, word) };
    }

    /// The register, which its mapping keeps mapped.
    pub(crate) fn as_ptr(&self) -> *mut u64 {
        self.place
    }

    /// Tells a device in this process of the ring.
    #[cold]
    pub(crate) fn tell(&self, word: u64) {
        self.register.tell(word);
    }
}

/// Stores a word to a register.
///
/// # Safety
///
/// The place is inside a register, and aligned.
#[inline(always)]
unsafe fn store_word(place: *mut u64, word: u64) {
    // Pairs with the device reading the doorbell record when the register tells it to.
    mmio_wc_start();
    #[cfg(test)]
    record_step(RecordedStep::Doorbell);
    // SAFETY: the caller's promise; one volatile store of eight bytes is what a device expects.
    unsafe { place.write_volatile(word) };
    // Pairs with the device taking words in the order of the rings that they belong to.
    mmio_flush();
}

/// Stores all but the first WQEBB of a request of `count` segments, more than one WQEBB, which begins at a
/// WQEBB of a queue, behind `place`.
///
/// # Safety
///
/// There is room for all of its WQEBBs at `place` in a register's buffer, which is aligned to a segment.
#[inline(always)]
unsafe fn store_rest(place: *mut [u64; 2], queue: &Wqebbs, wqe: WqebbOffset, count: u32) {
    let store = |nth: u32, wqebb: Wqebb<'_>| {
        // SAFETY: within the room that the caller promises, as only WQEBBs of the request are stored.
        let place = unsafe { place.add((nth * SEGMENTS_PER_WQEBB) as usize) };
        // SAFETY: as above.
        unsafe { store_wqebb(place, wqebb) };
    };
    let Some(run) = queue.run(wqe, count) else {
        // SAFETY: the caller's promise.
        return unsafe { store_from(1, place, queue, wqe, count) };
    };
    // Unrolled up to the usual length of a buffer: a loop takes 12 instructions more for a send of 200 bytes. SAFETY: the
    // run has more than one WQEBB.
    store(1, unsafe { run.get(1) });
    if count <= 2 * SEGMENTS_PER_WQEBB {
        return;
    }
    // SAFETY: and more than two.
    store(2, unsafe { run.get(2) });
    if count <= 3 * SEGMENTS_PER_WQEBB {
        return;
    }
    // SAFETY: and more than three.
    store(3, unsafe { run.get(3) });
    if count > 4 * SEGMENTS_PER_WQEBB {
        // SAFETY: the caller's promise.
        unsafe { store_from(4, place, queue, wqe, count) };
    }
}

/// As [`store_rest`], from the WQEBB `first` of the request on, wherever they are.
///
/// # Safety
///
/// As there.
#[cold]
#[inline(never)]
unsafe fn store_from(
    first: u32,
    place: *mut [u64; 2],
    queue: &Wqebbs,
    wqe: WqebbOffset,
    count: u32,
) {
    for nth in first..count.div_ceil(SEGMENTS_PER_WQEBB) {
        // SAFETY: within the room that the caller promises.
        let place = unsafe { place.add((nth * SEGMENTS_PER_WQEBB) as usize) };
        // SAFETY: as above.
        unsafe { store_wqebb(place, queue.wqebb(queue.behind(wqe, nth))) };
    }
}

/// Stores a WQEBB to a register, segment by segment.
///
/// # Safety
///
/// There is room for it in a register's buffer, and the place is aligned to a segment.
#[inline(always)]
unsafe fn store_wqebb(place: *mut [u64; 2], wqebb: Wqebb<'_>) {
    for segment in 0..SEGMENTS_PER_WQEBB {
        // SAFETY: within the room that the caller promises.
        let place = unsafe { place.add(segment as usize) };
        // SAFETY: as above, and aligned as the WQEBB's place is.
        unsafe { store_segment(place, wqebb.read(segment)) };
    }
}

/// Stores a segment to a register, in ascending order and at once where the processor can.
///
/// # Safety
///
/// The place is inside a register's buffer, and aligned to a segment.
#[inline(always)]
unsafe fn store_segment(place: *mut [u64; 2], segment: [u64; 2]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::__m128i;
        // SAFETY: any bytes are a vector, and both are as long.
        let vector = unsafe { std::mem::transmute::<[u64; 2], __m128i>(segment) };
        // SAFETY: the caller's promise; every processor of this architecture has such vectors.
        unsafe { place.cast::<__m128i>().write_volatile(vector) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let [first, second] = segment;
        // SAFETY: the caller's promise. Ascending stores of eight bytes are what a device expects.
        unsafe { place.cast::<u64>().write_volatile(first) };
        // SAFETY: the second half of the segment.
        let place = unsafe { place.cast::<u64>().add(1) };
        // SAFETY: the caller's promise.
        unsafe { place.write_volatile(second) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memory::fake_mapping::FakeMapping;
    use crate::sync::fork::Epoch;

    #[test]
    fn a_thread_that_finds_the_register_locked_waits_and_then_has_it_alone() {
        let mapping = FakeMapping::new("register", 4096).map(4096, Epoch::current().unwrap());
        let register = DoorbellRegister::new(Arc::new(mapping.unwrap()), 0, 0).unwrap();
        let (begun, had) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let held = register.hold();
            let other = scope.spawn(|| {
                begun.store(true, Ordering::Relaxed);
                let held = register.hold();
                had.store(true, Ordering::Relaxed);
                assert!(register.held.load(Ordering::Relaxed), "nobody else gets it meanwhile");
                drop(held);
            });
            while !begun.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            // Time for a thread that does not wait.
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!had.load(Ordering::Relaxed));
            drop(held);
            other.join().unwrap();
        });
        assert!(had.load(Ordering::Relaxed) && !register.held.load(Ordering::Relaxed));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::memory::fake_mapping::FakeMapping;
    use crate::sync::AccessProbe;
    use crate::sync::fork::Epoch;
    use loom::thread;

    /// Two threads ring one register. Each has it alone, and the buffers are used in turn: two in a row in the
    /// same buffer would mix in the device.
    #[test]
    fn threads_have_the_register_alone_and_its_buffers_in_turn() {
        let mapping = FakeMapping::new("register", 4096).map(4096, Epoch::current().unwrap());
        let mapping = Arc::new(mapping.unwrap());
        loom::model(move || {
            let register = Arc::new(DoorbellRegister::new(mapping.clone(), 0, BURST).unwrap());
            let (alone, order) = (Arc::new(AccessProbe::new()), Arc::new(AtomicUsize::new(0)));
            let ring = move || {
                let held = register.hold();
                alone.write();
                let turn = (order.fetch_add(1, Ordering::Relaxed), held.register.take_turn());
                drop(held);
                turn
            };
            let other = thread::spawn(ring.clone());
            let mut turns = [ring(), other.join().unwrap()];
            turns.sort_unstable();
            assert_eq!(turns, [(0, 0), (1, BURST)]);
        });
    }
}
