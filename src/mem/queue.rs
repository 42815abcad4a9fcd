//! Memory of queues that a device reads or writes by itself, and how rings reach into it.
//!
//! A ring holds an `Arc` of the memory, and whoever owns the kernel's object holds another that it
//! gives up only after the kernel confirmed that the object is gone. The views [`Units`] and
//! [`Blocks`], and [`Elements`](super::element::Elements) of completions, check once that they fit,
//! and then mask every index, so that no index can leave the memory and no access needs a check.

use super::allocator::DmaBufPart;
use super::chunk::{self, Part};
use super::fork::Epoch;
#[cfg(test)]
use super::order::{Step, note};
use memmap2::MmapRaw;
use rustix::io::Errno;
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, compiler_fence};
use uverbs_uapi::endian::Be32;

/// What is called with custom memory when nothing uses it any more.
pub(crate) type Release = Box<dyn FnOnce(NonNull<u8>) + Send + Sync>;

enum Keeper {
    Part(ManuallyDrop<Part>),
    Pages(ManuallyDrop<MmapRaw>),
    Custom(Option<Release>),
}

/// The memory of one queue: zeroed when it was made, and in one piece.
pub(crate) struct QueueMemory {
    base: NonNull<u8>,
    length: usize,
    /// What the kernel is told of in place of the address, if the memory is of a dma-buf.
    dmabuf: Option<DmaBufPart>,
    keeper: Keeper,
    epoch: Epoch,
}

// SAFETY: the memory may be reached from any thread; access goes through views, which the queue
// types give to one writer each.
unsafe impl Send for QueueMemory {}
// SAFETY: `&QueueMemory` gives no access but through views, see there.
unsafe impl Sync for QueueMemory {}
impl std::panic::UnwindSafe for QueueMemory {}
impl std::panic::RefUnwindSafe for QueueMemory {}

impl QueueMemory {
    /// At least `length` bytes of whole pages, of a mapping that others share if they are few.
    ///
    /// The kernel wipes them in a forked child (`MADV_WIPEONFORK`). As with `MADV_DONTFORK` no
    /// page is shared with the child, so none moves away from under the device; but whoever in
    /// the child still holds a guard finds zeros where it would find nothing.
    pub(crate) fn pages(length: usize) -> Result<QueueMemory, Errno> {
        let epoch = Epoch::current()?;
        let page = rustix::param::page_size();
        let length = length.max(1).checked_next_multiple_of(page).ok_or(Errno::NOMEM)?;
        let (base, keeper) = match Part::take(length)? {
            Some(part) => (part.base(), Keeper::Part(ManuallyDrop::new(part))),
            None => {
                let pages = chunk::map(length)?;
                (pages.as_mut_ptr(), Keeper::Pages(ManuallyDrop::new(pages)))
            }
        };
        let base = NonNull::new(base).ok_or(Errno::NOMEM)?;
        // What a device only reads the kernel pins without making it writable, so that the first
        // request in each page would fault.
        for offset in (0..length).step_by(page) {
            // SAFETY: inside the memory.
            let first = unsafe { base.add(offset) };
            // SAFETY: nobody else has the memory yet, in which zero is what lies there already.
            unsafe { first.write_volatile(0) };
        }
        Ok(QueueMemory { base, length, dmabuf: None, keeper, epoch })
    }

    /// Takes over `length` bytes at `base` and zeroes them: what an allocator left there would be
    /// taken for requests and completions. `release` is called once, when the last holder is
    /// gone, and never in a forked child.
    ///
    /// # Safety
    ///
    /// The memory is readable and writable, nobody else uses it until `release` is called, and it
    /// stays at its physical place across `fork`.
    pub(crate) unsafe fn custom(
        base: NonNull<u8>,
        length: usize,
        release: Release,
    ) -> Result<QueueMemory, Errno> {
        let epoch = match Epoch::current() {
            Ok(epoch) => epoch,
            Err(errno) => {
                release(base);
                return Err(errno);
            }
        };
        // SAFETY: the caller gives the whole range away.
        unsafe { base.as_ptr().write_bytes(0, length) };
        let keeper = Keeper::Custom(Some(release));
        Ok(QueueMemory { base, length, dmabuf: None, keeper, epoch })
    }

    /// The number by which the kernel is told of the memory.
    pub(crate) fn addr(&self) -> u64 {
        self.base.as_ptr().expose_provenance() as u64
    }

    /// The same memory, of which the kernel is told by a dma-buf if there is one.
    pub(crate) fn known_by(mut self, dmabuf: Option<DmaBufPart>) -> QueueMemory {
        self.dmabuf = dmabuf;
        self
    }

    /// The dma-buf that the memory is of, and where in it the memory begins.
    pub(crate) fn dmabuf(&self) -> Option<&DmaBufPart> {
        self.dmabuf.as_ref()
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// The process that made the memory.
    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// A pointer to `length` bytes at `offset`, if they are inside and the pointer is a multiple
    /// of `align`.
    pub(super) fn range(&self, offset: usize, length: usize, align: usize) -> Option<NonNull<u8>> {
        if offset.checked_add(length)? > self.length {
            return None;
        }
        // SAFETY: `offset` is within the memory, as checked above.
        let start = unsafe { self.base.add(offset) };
        (start.as_ptr().addr() % align == 0).then_some(start)
    }
}

impl Drop for QueueMemory {
    fn drop(&mut self) {
        let inherited = self.epoch.is_over();
        match &mut self.keeper {
            Keeper::Part(_) | Keeper::Pages(_) if inherited => {}
            // SAFETY: dropped once, here, and not used afterwards.
            Keeper::Part(part) => unsafe { ManuallyDrop::drop(part) },
            // SAFETY: dropped once, here, and not used afterwards.
            Keeper::Pages(pages) => unsafe { ManuallyDrop::drop(pages) },
            Keeper::Custom(release) => match release.take() {
                Some(release) if inherited => std::mem::forget(release),
                Some(release) => release(self.base),
                None => {}
            },
        }
    }
}

impl fmt::Debug for QueueMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueMemory")
            .field("length", &self.length)
            .field("custom", &matches!(self.keeper, Keeper::Custom(_)))
            .finish()
    }
}

/// Bytes of the unit that requests are made of.
pub(crate) const UNIT: usize = 16;

/// A ring of 16-byte units, a power of two of them: what work queues are made of. Requests are
/// whole units, so one that reaches the end of the ring goes on at its beginning by itself.
#[derive(Debug)]
pub(crate) struct Units {
    base: *mut [u64; 2],
    mask: u32,
    _memory: Arc<QueueMemory>,
}

// SAFETY: see `QueueMemory`; the queue that owns the view writes through `&mut` of itself, or into
// slots of a batch that it lent exclusively.
unsafe impl Send for Units {}
// SAFETY: as above: one queue owns a view and gives the writing end to one borrower at a time.
unsafe impl Sync for Units {}

impl Units {
    /// `count` units at byte `offset`; `None` unless they are inside, aligned and a power of two.
    pub(crate) fn new(memory: Arc<QueueMemory>, offset: usize, count: u32) -> Option<Units> {
        if !count.is_power_of_two() {
            return None;
        }
        let length = UNIT.checked_mul(usize::try_from(count).ok()?)?;
        let base = memory.range(offset, length, UNIT)?.as_ptr().cast();
        Some(Units { base, mask: count - 1, _memory: memory })
    }

    /// How many units there are.
    pub(crate) fn count(&self) -> u32 {
        self.mask + 1
    }

    /// The first.
    #[inline(always)]
    pub(super) fn base(&self) -> *mut [u64; 2] {
        self.base
    }

    #[inline(always)]
    fn unit(&self, index: u32) -> *mut [u64; 2] {
        // SAFETY: `new` checked that units up to and including `mask` are inside.
        unsafe { self.base.add((index & self.mask) as usize) }
    }

    /// Writes the unit `index`, which is taken modulo the ring; `value` as it shall lie in memory.
    #[inline(always)]
    pub(crate) fn write(&self, index: u32, value: [u64; 2]) {
        #[cfg(test)]
        note(Step::Request);
        // SAFETY: inside and aligned, as `unit` says; whoever may write here is the only one, as
        // the ring's protocol has it, and the device does not look before it is told.
        unsafe { self.unit(index).write(value) };
    }

    /// The unit `index` as it lies in memory.
    #[cfg(test)]
    pub(crate) fn read(&self, index: u32) -> [u64; 2] {
        // SAFETY: inside and aligned, as `unit` says; initialised since the memory was zeroed.
        unsafe { self.unit(index).read() }
    }

    /// Writes inline data from the unit `index` on: a word that says how long it is, and `bytes`,
    /// which go on at the ring's beginning where it ends. More than the whole ring is cut off.
    #[cold]
    #[inline(never)]
    fn inline(&self, index: u32, length: Be32, bytes: &[u8]) {
        // SAFETY: a unit has room for a word, and is aligned for one.
        unsafe { self.unit(index).cast::<Be32>().write(length) };
        self.copy(index, size_of::<Be32>(), bytes);
    }

    /// Copies `bytes` to byte `offset` of the unit `index`, going on at the ring's beginning where
    /// it ends. More than the whole ring is cut off.
    pub(crate) fn copy(&self, index: u32, offset: usize, bytes: &[u8]) {
        #[cfg(test)]
        note(Step::Request);
        let ring = (self.mask as usize + 1) * UNIT;
        let start = ((index & self.mask) as usize * UNIT + offset) & (ring - 1);
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

/// Units of a block.
pub(crate) const BLOCK: u32 = 4;

/// A ring of blocks of four [units](Units), a power of two of them: a send queue, whose requests
/// begin at blocks.
#[derive(Debug)]
pub(crate) struct Blocks {
    units: Units,
    /// Of numbers of blocks.
    mask: u32,
    /// Bytes of all.
    length: usize,
}

impl Blocks {
    /// `count` blocks at byte `offset`; `None` unless they are inside, aligned and a power of two.
    pub(crate) fn new(memory: Arc<QueueMemory>, offset: usize, count: u32) -> Option<Blocks> {
        let units = Units::new(memory, offset, count.checked_mul(BLOCK)?)?;
        let length = units.count() as usize * UNIT;
        Some(Blocks { mask: (units.count() / BLOCK).checked_sub(1)?, length, units })
    }

    /// The ring as units.
    #[inline(always)]
    pub(crate) fn units(&self) -> &Units {
        &self.units
    }

    /// The block `index`, which is taken modulo the ring.
    #[inline(always)]
    pub(crate) fn at(&self, index: u32) -> Block<'_> {
        // SAFETY: `within` answers what is.
        unsafe { self.get(self.within(index)) }
    }

    /// The blocks of `count` units from the block `index` on, if they do not go on at the beginning.
    #[inline(always)]
    pub(super) fn row(&self, index: u32, count: u32) -> Option<Row<'_>> {
        let within = self.within(index);
        // SAFETY: `within` answers what is.
        let first = unsafe { self.get(within) };
        // The ring is whole blocks, so that what is behind the units in the last is inside as well.
        let end = within as usize * (BLOCK as usize * UNIT) + count as usize * UNIT;
        (end <= self.length).then_some(Row { first })
    }

    /// How many there are.
    pub(super) fn count(&self) -> u32 {
        self.mask + 1
    }

    /// `index` modulo the ring.
    #[inline(always)]
    pub(super) fn within(&self, index: u32) -> u32 {
        index & self.mask
    }

    /// The block `index`.
    ///
    /// # Safety
    ///
    /// There are more than `index`.
    #[inline(always)]
    pub(super) unsafe fn get(&self, index: u32) -> Block<'_> {
        // SAFETY: `new` found room for as many as there are.
        let base = unsafe { self.units.base.add(index as usize * BLOCK as usize) };
        Block { base, ring: PhantomData }
    }

    /// Writes inline data from the unit `unit` of the block `index` on: a word that says how long it
    /// is, and `bytes`, which go on at the ring's beginning where it ends. More than the whole ring
    /// is cut off. Answers how many units that are: none for no bytes.
    #[inline(always)]
    pub(crate) fn inline(&self, index: u32, unit: u32, length: Be32, bytes: &[u8]) -> u32 {
        if self.at(index).inline(unit, length, bytes)
            || self.inline_long(index, unit, length, bytes)
        {
            return inline_units(bytes);
        }
        if bytes.is_empty() {
            return 0;
        }
        self.units.inline(index.wrapping_mul(BLOCK).wrapping_add(unit), length, bytes);
        inline_units(bytes)
    }

    /// The same of at least a unit that ends before the ring does; `false`, and nothing done, for all
    /// other data.
    #[inline(always)]
    fn inline_long(&self, index: u32, unit: u32, length: Be32, bytes: &[u8]) -> bool {
        #[cfg(test)]
        note(Step::Request);
        let block = (index & self.mask) as usize * BLOCK as usize;
        let start = (block + unit as u8 as usize) * UNIT;
        let data = start + size_of::<Be32>();
        // Of many bytes it need not be asked whether they are few.
        let many = bytes.len() > 4 * UNIT;
        if !many && bytes.len() < UNIT || data + bytes.len() > self.length {
            return false;
        }
        let ring = self.units.base.cast::<u8>();
        // SAFETY: less than the ring's length, as the data is that follows.
        let place = unsafe { ring.add(start) }.cast::<Be32>();
        // SAFETY: inside, and aligned as a unit is.
        unsafe { place.write(length) };
        // SAFETY: there is room for all bytes up to the end of the ring.
        let to = unsafe { ring.add(data) };
        if many {
            // SAFETY: inside, as above; queue memory is never lent as a slice, so that the two lie
            // apart.
            unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            return true;
        }
        // Whole units, and the last one again from the end back: for so few a call would cost more.
        let last = bytes.len() - UNIT;
        let mut at = 0;
        while at < last {
            // SAFETY: `at + UNIT` is less than the length.
            let piece = unsafe { bytes.as_ptr().add(at) };
            // SAFETY: there is room for all bytes up to the end of the ring.
            let place = unsafe { to.add(at) };
            // SAFETY: as above.
            unsafe { place.copy_from_nonoverlapping(piece, UNIT) };
            // Or the loop becomes a call after all.
            compiler_fence(Ordering::SeqCst);
            at += UNIT;
        }
        // SAFETY: the last `UNIT` bytes.
        let piece = unsafe { bytes.as_ptr().add(last) };
        // SAFETY: there is room for all bytes up to the end of the ring.
        let place = unsafe { to.add(last) };
        // SAFETY: as above.
        unsafe { place.copy_from_nonoverlapping(piece, UNIT) };
        true
    }
}

/// Blocks side by side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row<'r> {
    first: Block<'r>,
}

impl<'r> Row<'r> {
    /// The block `nth`.
    ///
    /// # Safety
    ///
    /// The row has more than `nth`.
    #[inline(always)]
    pub(super) unsafe fn get(&self, nth: usize) -> Block<'r> {
        // SAFETY: the caller's promise, and `Blocks::row` found room for all.
        let base = unsafe { self.first.base.add(nth * BLOCK as usize) };
        Block { base, ring: PhantomData }
    }
}

/// Units of inline data, with the word that says how long it is.
#[inline(always)]
fn inline_units(bytes: &[u8]) -> u32 {
    (bytes.len() as u32 + size_of::<Be32>() as u32).div_ceil(UNIT as u32)
}

/// One block of a ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block<'r> {
    base: *mut [u64; 2],
    ring: PhantomData<&'r Blocks>,
}

impl Block<'_> {
    /// Writes the unit `n` of the block, modulo four; `value` as it shall lie in memory.
    #[inline(always)]
    pub(crate) fn write(self, n: u32, value: [u64; 2]) {
        #[cfg(test)]
        note(Step::Request);
        // SAFETY: a block has four units.
        let place = unsafe { self.base.add((n % BLOCK) as usize) };
        // SAFETY: inside and aligned; whoever may write here is the only one, as the ring's
        // protocol has it, and the device does not look before it is told.
        unsafe { place.write(value) };
    }

    /// Writes inline data from the unit `n` on: a word that says how long it is, and `bytes`; `false`,
    /// and nothing done, unless they are at least a unit and end in the block.
    #[inline(always)]
    fn inline(self, n: u32, length: Be32, bytes: &[u8]) -> bool {
        const WORD: usize = size_of::<Be32>();
        let room = (BLOCK.saturating_sub(n) as usize * UNIT).saturating_sub(WORD);
        // As many as are copied below. A control unit stands first, so that there is never more room.
        let room = room.min(3 * UNIT);
        // Both at once, as what is less than a unit wraps.
        if room < UNIT || bytes.len().wrapping_sub(UNIT) > room - UNIT {
            return false;
        }
        #[cfg(test)]
        note(Step::Request);
        // SAFETY: `n` is less than the units of a block, or there were no room.
        let start = unsafe { self.base.add(n as usize) }.cast::<u8>();
        // SAFETY: inside, and aligned as a unit is; see `write` for who else may be there.
        unsafe { start.cast::<Be32>().write(length) };
        // SAFETY: inside, as a unit has room for more than a word.
        let to = unsafe { start.add(WORD) };
        // The first unit, the last from the end back, and one between where these two do not meet;
        // there is no room for more.
        // SAFETY: `UNIT` bytes are there to read, and room to write them. Queue memory is never lent as
        // a slice, so that the two lie apart.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), UNIT) };
        if bytes.len() > 2 * UNIT {
            // SAFETY: there are as many bytes.
            let piece = unsafe { bytes.as_ptr().add(UNIT) };
            // SAFETY: inside, since there is room for all bytes.
            let place = unsafe { to.add(UNIT) };
            // SAFETY: as for the first.
            unsafe { place.copy_from_nonoverlapping(piece, UNIT) };
        }
        let last = bytes.len() - UNIT;
        // SAFETY: the last `UNIT` bytes.
        let piece = unsafe { bytes.as_ptr().add(last) };
        // SAFETY: inside, since there is room for all bytes.
        let place = unsafe { to.add(last) };
        // SAFETY: as for the first.
        unsafe { place.copy_from_nonoverlapping(piece, UNIT) };
        true
    }

    /// The unit `n` of the block, modulo four, as it lies in memory.
    #[inline(always)]
    pub(super) fn read(self, n: u32) -> [u64; 2] {
        // SAFETY: a block has four units.
        let place = unsafe { self.base.add((n % BLOCK) as usize) };
        // SAFETY: inside and aligned; initialised since the memory was zeroed.
        unsafe { place.read() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn page() -> Arc<QueueMemory> {
        Arc::new(QueueMemory::pages(1).unwrap())
    }

    #[test]
    fn pages_are_whole_and_zero() {
        let memory = Arc::new(QueueMemory::pages(5000).unwrap());
        assert_eq!(memory.len() % rustix::param::page_size(), 0);
        assert!(memory.len() >= 5000);
        let units = Units::new(memory, 0, 256).unwrap();
        assert!((0..256).all(|unit| units.read(unit) == [0, 0]));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it counts page faults")]
    fn first_writes_do_not_fault() {
        use nix::sys::resource::{UsageWho, getrusage};
        let faults = || getrusage(UsageWho::RUSAGE_THREAD).unwrap().minor_page_faults();
        let page = rustix::param::page_size();
        for pages in [8, 512] {
            let units = (pages * page / UNIT) as u32;
            let memory = Arc::new(QueueMemory::pages(pages * page).unwrap());
            let ring = Units::new(memory, 0, units).unwrap();
            let before = faults();
            (0..units).for_each(|unit| ring.write(unit, [1, 2]));
            // The code's own pages may be new.
            assert!(faults() - before < 4, "{pages} pages");
        }
    }

    #[test]
    fn custom_memory_is_zeroed_and_released_once_by_the_last_holder() {
        static RELEASED: AtomicUsize = AtomicUsize::new(0);
        // No box, which may be used by nobody else from when it is moved.
        let mut buffer = vec![[0xa5a5_a5a5_a5a5_a5a5u64; 8]; 8];
        let base = NonNull::new(buffer.as_mut_ptr()).unwrap().cast::<u8>();
        let address = base.as_ptr() as u64;
        let release = move |released: NonNull<u8>| {
            assert_eq!(released.as_ptr() as u64, address);
            RELEASED.fetch_add(1, Ordering::Relaxed);
            drop(buffer);
        };
        // SAFETY: the buffer is the closure's, which gives it up when it is called.
        let memory = unsafe { QueueMemory::custom(base, 512, Box::new(release)) }.unwrap();
        assert_eq!((memory.len(), memory.addr()), (512, address));
        let units = Units::new(Arc::new(memory), 0, 16);
        // Eight-byte alignment of the vector does not promise the sixteen of a unit.
        if let Some(units) = &units {
            assert!((0..32).all(|unit| units.read(unit) == [0, 0]));
            assert_eq!(RELEASED.load(Ordering::Relaxed), 0);
        }
        drop(units);
        assert_eq!(RELEASED.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn views_that_do_not_fit_are_refused() {
        let memory = page();
        let units = (memory.len() / UNIT) as u32;
        assert!(Units::new(memory.clone(), 0, units).is_some());
        assert!(Units::new(memory.clone(), 0, units * 2).is_none(), "too long");
        assert!(Units::new(memory.clone(), UNIT, units).is_none(), "too far");
        assert!(Units::new(memory.clone(), 8, 1).is_none(), "unaligned");
        assert!(Units::new(memory.clone(), 0, 3).is_none(), "no power of two");
        assert!(Units::new(memory, usize::MAX, 1).is_none());
    }

    #[test]
    fn units_go_on_at_the_beginning() {
        let units = Units::new(page(), 64, 4).unwrap();
        for unit in 6..10 {
            units.write(unit, [u64::from(unit), !0]);
        }
        let first: Vec<_> = (0..4).map(|unit| units.read(unit)[0]).collect();
        assert_eq!(first, [8, 9, 6, 7]);
        let bytes: Vec<u8> = (1..=40).collect();
        units.copy(2, 12, &bytes);
        assert_eq!(units.read(2), [6, 0x0403_0201_ffff_ffff]);
        assert_eq!(units.read(3), [0x0c0b_0a09_0807_0605, 0x1413_1211_100f_0e0d]);
        assert_eq!(units.read(0), [0x1c1b_1a19_1817_1615, 0x2423_2221_201f_1e1d]);
        assert_eq!(units.read(1), [0x0000_0000_2827_2625 | units.read(1)[0] >> 32 << 32, !0]);
    }

    /// Whichever of the three ways is taken.
    #[test]
    fn inline_data_lies_as_byte_by_byte() {
        const COUNT: u32 = 4;
        let bytes: Vec<u8> = (1..=100).collect();
        for (index, unit) in (0..COUNT).flat_map(|index| (0..BLOCK).map(move |unit| (index, unit)))
        {
            for length in 0..=bytes.len() {
                let data = &bytes[..length];
                let ring = Blocks::new(page(), 64, COUNT).unwrap();
                let plain = Units::new(page(), 64, COUNT * BLOCK).unwrap();
                let word = Be32::new(length as u32 | 1 << 31);
                let units = ring.inline(index, unit, word, data);
                assert_eq!(units, if length == 0 { 0 } else { inline_units(data) });
                if length > 0 {
                    plain.inline(index * BLOCK + unit, word, data);
                }
                for n in 0..COUNT * BLOCK {
                    assert_eq!(ring.units().read(n), plain.read(n), "{index} {unit} {length} {n}");
                }
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_finds_zeros_and_releases_nothing() {
        let memory = page();
        let units = Units::new(memory.clone(), 0, 4).unwrap();
        units.write(0, [7, 7]);
        crate::mem::fork::in_child(|| {
            assert_eq!(units.read(0), [0, 0]);
            assert!(memory.epoch().is_over());
            units.write(0, [9, 9]);
        });
        assert_eq!(units.read(0), [7, 7]);
    }
}
