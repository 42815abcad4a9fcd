//! Memory that the device accesses by DMA, and memory that it shares with a guest or with the process.
//!
//! There are two kinds of DMA memory. *Guest memory* is mapped from files: pairs with the DMA_MAP
//! messages of vfio-user. *Process memory* is ranges of this process's own address space, which a
//! kernel in the process pins: pairs with the page lists of its commands. The driver chooses the
//! addresses that the device accesses; an address without memory returns [`DmaFault`].
//!
//! The other side accesses the memory at the same time. So an access goes through atomics, word by
//! word in ascending order, and every store is a release: a driver that reads the last word of a CQE
//! sees all of it. Long accesses to memory of the process are copied at once but for their last bytes;
//! queues and doorbell records never are.
//!
//! This is the only module with `unsafe`.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// An address range that the memory does not cover, or that is not writable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaFault {
    /// First byte of the access.
    pub address: u64,
    /// Length of the access in bytes.
    pub len: usize,
}

/// An access to memory of the process is copied at once from this many bytes on: more than any WQE, CQE or EQE has.
const BULK: usize = 1024;
/// Bytes of a word of a doorbell record.
const DOORBELL_WORD: usize = 4;
/// Pairs of spans of recent accesses that are remembered.
const FOUND: usize = 32;
/// Bytes at the end of a write that follow word by word: a program that polls the end of its buffer
/// then finds all before it.
const BULK_TAIL: usize = 64;

/// A piece of memory. It exists for `'a`, is readable, and writable if its maker says so. All other
/// accesses to it are of another process, atomic, or ordered before or after those of the device.
struct Place<'a> {
    address: *mut u8,
    len: usize,
    /// Whether long accesses are copied at once.
    bulk: bool,
    memory: PhantomData<&'a Cell<u8>>,
}

impl Place<'_> {
    /// The bytes from `at` on, so many.
    fn bytes(&self, at: usize, count: usize) -> &[AtomicU8] {
        assert!(at <= self.len && count <= self.len - at);
        let first = self.address.wrapping_add(at).cast::<AtomicU8>();
        // SAFETY: the bytes are inside; other accesses to them do not race, as `Place` says.
        unsafe { std::slice::from_raw_parts(first, count) }
    }

    /// The words of eight bytes from `at` on, so many.
    fn words(&self, at: usize, count: usize) -> &[AtomicU64] {
        if count == 0 {
            return &[];
        }
        let first = self.address.wrapping_add(at).cast::<AtomicU64>();
        assert!(at <= self.len && count <= (self.len - at) / 8 && first.is_aligned());
        // SAFETY: the words are inside and aligned; other accesses to them do not race, as `Place` says.
        unsafe { std::slice::from_raw_parts(first, count) }
    }

    fn half(&self, at: usize) -> &AtomicU32 {
        let address = self.address.wrapping_add(at);
        assert!(at + 4 <= self.len && address.addr() % 4 == 0);
        // SAFETY: the word is inside and aligned; other accesses to it do not race, as `Place` says.
        unsafe { AtomicU32::from_ptr(address.cast()) }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        let address = self.address.wrapping_add(at);
        assert!(at + 8 <= self.len && address.addr() % 8 == 0);
        // SAFETY: the word is inside and aligned; other accesses to it do not race, as `Place` says.
        unsafe { AtomicU64::from_ptr(address.cast()) }
    }

    /// Bytes from `at` to the next word.
    fn to_word(&self, at: usize) -> usize {
        self.address.wrapping_add(at).addr().wrapping_neg() % 8
    }

    /// Reads the whole piece.
    fn read(&self, to: &mut [u8]) {
        assert_eq!(to.len(), self.len);
        if self.bulk && self.len >= BULK {
            // SAFETY: the piece is readable, `to` is as long and the device's own; other accesses do
            // not race, as `Place` says.
            unsafe { std::ptr::copy_nonoverlapping(self.address, to.as_mut_ptr(), self.len) };
            return fence(Ordering::Acquire);
        }
        let read = |at: usize, to: &mut [u8]| {
            let from = self.bytes(at, to.len());
            for (to, from) in to.iter_mut().zip(from) {
                *to = from.load(Ordering::Acquire);
            }
        };
        let head = self.to_word(0).min(to.len());
        let (first, rest) = to.split_at_mut(head);
        read(0, first);
        let count = rest.len() / 8;
        let (words, last) = rest.split_at_mut(count * 8);
        for (to, from) in words.chunks_exact_mut(8).zip(self.words(head, count)) {
            to.copy_from_slice(&from.load(Ordering::Acquire).to_ne_bytes());
        }
        read(head + count * 8, last);
    }

    /// Writes the whole piece.
    fn write(&self, from: &[u8]) {
        assert_eq!(from.len(), self.len);
        let mut at = 0;
        if self.bulk && self.len >= BULK {
            at = self.len - BULK_TAIL;
            // SAFETY: the piece is writable and longer than `at`, `from` is the device's own; other
            // accesses do not race, as `Place` says.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.address, at) };
        }
        let write = |at: usize, from: &[u8]| {
            for (from, to) in from.iter().zip(self.bytes(at, from.len())) {
                to.store(*from, Ordering::Release);
            }
        };
        let rest = &from[at..];
        let (first, rest) = rest.split_at(self.to_word(at).min(rest.len()));
        write(at, first);
        at += first.len();
        let count = rest.len() / 8;
        let (words, last) = rest.split_at(count * 8);
        for (from, to) in words.chunks_exact(8).zip(self.words(at, count)) {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(from);
            to.store(u64::from_ne_bytes(bytes), Ordering::Release);
        }
        write(at + count * 8, last);
    }

    /// Writes the whole piece with bytes of another one, which is as long. They may overlap: up to [`BULK`] bytes are
    /// read before one is written.
    fn copy_from(&self, from: &Place<'_>) {
        assert_eq!(from.len, self.len);
        if self.bulk && from.bulk && self.len >= BULK {
            let at = self.len - BULK_TAIL;
            let mut tail = [0; BULK_TAIL];
            from.part(at, BULK_TAIL).read(&mut tail);
            // SAFETY: `from` is readable, this piece is writable, and both are longer than `at`; other accesses to them
            // do not race, as `Place` says.
            unsafe { std::ptr::copy(from.address, self.address, at) };
            fence(Ordering::Acquire);
            return self.part(at, BULK_TAIL).write(&tail);
        }
        let mut bytes = [0; BULK];
        for at in (0..self.len).step_by(BULK) {
            let len = (self.len - at).min(BULK);
            from.part(at, len).read(&mut bytes[..len]);
            self.part(at, len).write(&bytes[..len]);
        }
    }

    /// A part of the piece, inside of it.
    fn part(&self, at: usize, len: usize) -> Place<'_> {
        assert!(at + len <= self.len);
        Place { address: self.address.wrapping_add(at), len, ..*self }
    }

    /// Replaces the piece, a word of 4 or 8 bytes, atomically, and returns the old value; `None` if
    /// it is none, or not aligned to its size.
    fn update(&self, mut change: impl FnMut(u64) -> u64) -> Option<u64> {
        if !matches!(self.len, 4 | 8) || self.address.addr() % self.len != 0 {
            return None;
        }
        let order = Ordering::AcqRel;
        if self.len == 8 {
            let word = self.word(0);
            let mut old = word.load(Ordering::Acquire);
            loop {
                match word.compare_exchange(old, change(old), order, Ordering::Acquire) {
                    Ok(old) => return Some(old),
                    Err(now) => old = now,
                }
            }
        }
        let word = self.half(0);
        let mut old = word.load(Ordering::Acquire);
        loop {
            let new = change(u64::from(old)) as u32;
            match word.compare_exchange(old, new, order, Ordering::Acquire) {
                Ok(old) => return Some(u64::from(old)),
                Err(now) => old = now,
            }
        }
    }
}

/// Shared memory. It stays on one thread: concurrent accesses of different sizes to one address are
/// undefined between threads of a program, but not between the program and the guest.
///
/// ```compile_fail
/// fn shared_by_threads<T: Sync>() {}
/// shared_by_threads::<uverbs_connectx::guest::SharedMemory>();
/// ```
pub struct SharedMemory {
    map: MmapRaw,
    /// Whether only this process has it: long accesses are copied at once.
    own: bool,
    not_sync: PhantomData<Cell<u8>>,
}

impl SharedMemory {
    /// Maps `len` bytes of `file` from `offset`.
    ///
    /// # Errors
    /// If the file is shorter than that, or cannot be mapped for reading and writing.
    pub fn map(file: &File, offset: u64, len: usize) -> io::Result<Self> {
        let end = offset.checked_add(len as u64).ok_or(io::ErrorKind::InvalidInput)?;
        if len == 0 || file.metadata()?.len() < end {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let map = MmapOptions::new().offset(offset).len(len).map_raw(file)?;
        Ok(Self { map, own: false, not_sync: PhantomData })
    }

    /// Creates `len` zero bytes in a file that another process may map but not resize.
    ///
    /// # Errors
    /// If there is no memory left.
    pub fn create(name: &str, len: usize) -> io::Result<(File, Self)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create(name, flags)?);
        file.set_len(len as u64)?;
        // Seal the size: shrinking the file would take the memory away from under the mapping.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let memory = Self::map(&file, 0, len)?;
        Ok((file, memory))
    }

    /// Maps `len` zero bytes in this process. A page takes memory from its first access on.
    ///
    /// # Errors
    /// If `len` is zero, or there is no memory left.
    pub fn allocate(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let map = MmapRaw::from(MmapOptions::new().len(len).map_anon()?);
        // A program reaches pages of the device by their address.
        map.as_mut_ptr().expose_provenance();
        Ok(Self { map, own: true, not_sync: PhantomData })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether the memory is empty; never true.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The address in this process of `len` bytes from `offset`; `None` if they are not inside. It is
    /// valid as long as this memory.
    pub fn address(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let end = offset.checked_add(len)?;
        let start = self.map.as_mut_ptr();
        NonNull::new(start.wrapping_add(offset)).filter(|_| end <= self.len())
    }

    fn place(&self, offset: usize, len: usize) -> Option<Place<'_>> {
        let address = self.address(offset, len)?.as_ptr();
        Some(Place { address, len, bulk: self.own, memory: PhantomData })
    }

    /// Reads `to.len()` bytes from `offset`; `None` if the range is not inside.
    #[must_use]
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Option<()> {
        self.place(offset, to.len())?.read(to);
        Some(())
    }

    /// Writes `from` to `offset`; `None`, and nothing written, if the range is not inside.
    #[must_use]
    pub fn write(&self, offset: usize, from: &[u8]) -> Option<()> {
        self.place(offset, from.len())?.write(from);
        Some(())
    }

    /// Replaces a word of 4 or 8 bytes atomically, and returns the old value; `None` if the word is
    /// not inside or not aligned to its size.
    pub fn update(&self, offset: usize, len: usize, change: impl FnMut(u64) -> u64) -> Option<u64> {
        self.place(offset, len)?.update(change)
    }
}

/// A mapped range of guest physical addresses.
struct DmaMapping {
    base: u64,
    len: u64,
    writable: bool,
    /// `None` if the client sent no file: the device cannot access such memory.
    memory: Option<SharedMemory>,
}

/// Neighbouring bytes of the process that are pinned equally often.
#[derive(Clone, Copy)]
struct Span {
    end: u64,
    pins: usize,
    /// The number of writable pins.
    writable: usize,
}

/// A span with its first address; empty before it was found.
#[derive(Clone, Copy, Default)]
struct FoundSpan {
    start: u64,
    end: u64,
    writable: bool,
}

/// The ranges of the process's memory that are pinned. They may overlap.
#[derive(Default)]
struct PinnedRanges {
    /// By first address, not overlapping.
    spans: BTreeMap<u64, Span>,
    /// The spans of recent accesses, by page: a message has about ten, to the same queues and regions as the one
    /// before, and the search took a sixth of its instructions.
    found: Box<[[Cell<FoundSpan>; 2]; FOUND]>,
    /// How often each range is pinned: address, length, writable.
    ranges: BTreeMap<(u64, u64, bool), usize>,
}

impl PinnedRanges {
    /// How many bytes from `address` on are pinned for such an access, `most` at most; `None` if there
    /// are none. Where other ranges start or end in them does not matter.
    fn extent(&self, address: u64, most: usize, write: bool) -> Option<usize> {
        let fits = |span: &Span| span.writable > 0 || !write;
        let first = self.find(address, most).filter(|span| span.writable || !write)?;
        let mut end = first.end;
        while end - address < most as u64 {
            let Some(next) = self.spans.get(&end).filter(|next| fits(next)) else { break };
            end = next.end;
        }
        Some(usize::try_from(end - address).map_or(most, |len| len.min(most)))
    }

    /// Where the span of an address is remembered, by its page: the last one, and the one before. A doorbell record
    /// shares its page with others, and has a place of its own.
    fn recent(&self, address: u64, len: usize) -> &[Cell<FoundSpan>; 2] {
        const { assert!(FOUND == 1 << 5) };
        let place = if len == DOORBELL_WORD { address >> 3 } else { address >> 12 };
        let mixed = place.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.found[(mixed >> (64 - 5)) as usize]
    }

    /// The span of an address.
    fn find(&self, address: u64, len: usize) -> Option<FoundSpan> {
        let [first, second] = self.recent(address, len);
        let covers = |span: &FoundSpan| (span.start..span.end).contains(&address);
        if !covers(&first.get()) {
            first.swap(second);
        }
        if !covers(&first.get()) {
            let (start, found) = self.spans.range(..=address).next_back()?;
            let writable = found.writable > 0;
            first.set(FoundSpan { start: *start, end: found.end, writable });
        }
        Some(first.get()).filter(covers)
    }

    /// Forgets the spans that were found, before they change.
    fn forget(&mut self) {
        self.found.iter().flatten().for_each(|found| found.set(FoundSpan::default()));
    }

    /// Divides the span that crosses an address.
    fn split(&mut self, at: u64) {
        let Some((_, span)) = self.spans.range_mut(..at).next_back() else { return };
        if at < span.end {
            let rest = *span;
            span.end = at;
            self.spans.insert(at, rest);
        }
    }

    /// Joins the spans that meet at an address, if they are pinned equally often.
    fn join(&mut self, at: u64) {
        let Some(right) = self.spans.get(&at).copied() else { return };
        let Some((_, left)) = self.spans.range_mut(..at).next_back() else { return };
        if left.end == at && (left.pins, left.writable) == (right.pins, right.writable) {
            left.end = right.end;
            self.spans.remove(&at);
        }
    }

    fn pin(&mut self, address: u64, end: u64, writable: bool) {
        self.forget();
        self.split(address);
        self.split(end);
        let mut at = address;
        while at < end {
            match self.spans.range_mut(at..end).next() {
                Some((start, span)) if *start == at => {
                    span.pins += 1;
                    span.writable += usize::from(writable);
                    at = span.end;
                }
                next => {
                    let gap = next.map_or(end, |(start, _)| *start);
                    self.spans.insert(at, Span { end: gap, pins: 1, writable: writable.into() });
                    at = gap;
                }
            }
        }
        self.join(address);
        self.join(end);
        *self.ranges.entry((address, end - address, writable)).or_default() += 1;
    }

    /// Returns false if the range is not pinned.
    fn unpin(&mut self, address: u64, end: u64, writable: bool) -> bool {
        let range = (address, end.wrapping_sub(address), writable);
        let Some(count) = self.ranges.get_mut(&range) else { return false };
        *count -= 1;
        if *count == 0 {
            self.ranges.remove(&range);
        }
        self.forget();
        self.split(address);
        self.split(end);
        for span in self.spans.range_mut(address..end) {
            span.1.pins -= 1;
            span.1.writable -= usize::from(writable);
        }
        let gone: Vec<u64> = self
            .spans
            .range(address..end)
            .filter(|(_, span)| span.pins == 0)
            .map(|(start, _)| *start)
            .collect();
        for start in gone {
            self.spans.remove(&start);
        }
        self.join(address);
        self.join(end);
        true
    }
}

enum AddressSpace {
    /// Sorted by base, not overlapping.
    Guest(Vec<DmaMapping>),
    Process(PinnedRanges),
}

/// The memory that the device may access: of a guest, or of this process.
pub struct GuestMemory {
    space: AddressSpace,
}

impl Default for GuestMemory {
    /// Guest memory without mappings.
    fn default() -> Self {
        Self { space: AddressSpace::Guest(vec![]) }
    }
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

impl GuestMemory {
    /// Memory of `len` zero bytes at `base`, without a guest.
    ///
    /// # Errors
    /// If there is no memory left.
    pub fn plain(base: u64, len: usize) -> io::Result<Self> {
        let memory = Some(SharedMemory::allocate(len)?);
        let mapping = DmaMapping { base, len: len as u64, writable: true, memory };
        Ok(Self { space: AddressSpace::Guest(vec![mapping]) })
    }

    /// Memory of this process, at its own addresses. The device may access nothing before
    /// [`GuestMemory::pin`].
    pub fn process() -> Self {
        Self { space: AddressSpace::Process(PinnedRanges::default()) }
    }

    /// Lets the device access `len` bytes of the process from `address`, which it may write only if
    /// they are `writable`. Ranges may overlap, and may be pinned more than once.
    ///
    /// # Errors
    /// `InvalidInput` for a range that is empty or wraps, and for guest memory.
    ///
    /// # Safety
    /// Until the range is unpinned as often as it was pinned, or this memory is cleared or dropped:
    ///
    /// - The bytes are allocated and readable, and writable if they are pinned so. The provenance of a
    ///   pointer to them is exposed.
    /// - No reference to them says otherwise: no `&mut` is used between two accesses of the device, and no
    ///   `&` to bytes that the device may write, unless they are atomics or in an `UnsafeCell`.
    /// - While one thread runs the device, others access the bytes of queues and doorbell records only
    ///   with atomics, and other bytes only when the device does not: before the doorbell of a request
    ///   that names them, or after its completion.
    pub unsafe fn pin(&mut self, address: u64, len: u64, writable: bool) -> io::Result<()> {
        let AddressSpace::Process(pinned) = &mut self.space else {
            return Err(invalid("guest memory is mapped, only memory of the process is pinned"));
        };
        let end = address.checked_add(len).filter(|end| usize::try_from(*end).is_ok());
        match end {
            Some(end) if len > 0 && address > 0 => {
                pinned.pin(address, end, writable);
                Ok(())
            }
            _ => Err(invalid("the range is empty or wraps")),
        }
    }

    /// Undoes one [`GuestMemory::pin`] with the same arguments.
    ///
    /// # Errors
    /// `InvalidInput` if no such range is pinned.
    pub fn unpin(&mut self, address: u64, len: u64, writable: bool) -> io::Result<()> {
        let unpinned = match &mut self.space {
            AddressSpace::Process(pinned) => {
                pinned.unpin(address, address.saturating_add(len), writable)
            }
            AddressSpace::Guest(_) => false,
        };
        unpinned.then_some(()).ok_or_else(|| invalid("the range is not pinned"))
    }

    /// The number of pinned ranges; one that is pinned twice counts twice.
    pub fn pins(&self) -> usize {
        match &self.space {
            AddressSpace::Process(pinned) => pinned.ranges.values().sum(),
            AddressSpace::Guest(_) => 0,
        }
    }

    /// Adds a mapping of guest memory.
    ///
    /// # Errors
    /// `InvalidInput` for a range that is empty, wraps or overlaps another mapping, for memory of the
    /// process, or an error of mapping the file.
    pub fn map(
        &mut self,
        base: u64,
        len: u64,
        file: Option<(&File, u64)>,
        writable: bool,
    ) -> io::Result<()> {
        let AddressSpace::Guest(mappings) = &mut self.space else {
            return Err(invalid("memory of the process is pinned, only guest memory is mapped"));
        };
        let end = base.checked_add(len).ok_or(io::ErrorKind::InvalidInput)?;
        let at = mappings.partition_point(|mapping| mapping.base < base);
        let after_previous = at == 0 || {
            let previous = &mappings[at - 1];
            previous.base + previous.len <= base
        };
        let before_next = mappings.get(at).is_none_or(|next| end <= next.base);
        if len == 0 || !after_previous || !before_next {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let memory = match file {
            Some((file, offset)) => {
                let len = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
                Some(SharedMemory::map(file, offset, len)?)
            }
            None => None,
        };
        mappings.insert(at, DmaMapping { base, len, writable, memory });
        Ok(())
    }

    /// Removes every mapping of guest memory inside the range.
    ///
    /// # Errors
    /// `InvalidInput` if there is none, or a mapping extends outside.
    pub fn unmap(&mut self, base: u64, len: u64) -> io::Result<()> {
        let AddressSpace::Guest(mappings) = &mut self.space else {
            return Err(invalid("memory of the process is pinned, only guest memory is mapped"));
        };
        let end = base.checked_add(len).ok_or(io::ErrorKind::InvalidInput)?;
        let inside =
            |mapping: &DmaMapping| mapping.base >= base && mapping.base + mapping.len <= end;
        let touches =
            |mapping: &DmaMapping| mapping.base < end && mapping.base + mapping.len > base;
        let mut hit = mappings.iter().filter(|mapping| touches(mapping)).peekable();
        if hit.peek().is_none() || !hit.all(inside) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        mappings.retain(|mapping| !inside(mapping));
        Ok(())
    }

    /// Removes every mapping, and unpins every range.
    pub fn clear(&mut self) {
        match &mut self.space {
            AddressSpace::Guest(mappings) => mappings.clear(),
            AddressSpace::Process(pinned) => *pinned = PinnedRanges::default(),
        }
    }

    /// The piece of memory of an access that lies in the span of a recent one: most accesses.
    fn recent(&self, address: u64, len: usize, write: bool) -> Option<Place<'_>> {
        let AddressSpace::Process(pinned) = &self.space else { return None };
        let span = pinned.recent(address, len)[0].get();
        let inside = address >= span.start
            && span.end.checked_sub(address).is_some_and(|left| left >= len as u64);
        // `pin` has the promise of its caller that this memory is as `Place` says.
        let address = std::ptr::with_exposed_provenance_mut(address as usize);
        (inside && (span.writable || !write) && len > 0).then_some(Place {
            address,
            len,
            bulk: true,
            memory: PhantomData,
        })
    }

    /// The piece of memory at an address, of at least one byte and at most `most`. In memory of the
    /// process it is as long as it can be, so that a word that is pinned as a whole is one piece.
    fn place(&self, address: u64, most: usize, write: bool) -> Option<Place<'_>> {
        match &self.space {
            AddressSpace::Guest(mappings) => {
                let at = mappings.partition_point(|mapping| mapping.base <= address);
                let mapping = &mappings[at.checked_sub(1)?];
                let offset = usize::try_from(address - mapping.base).ok()?;
                let memory = mapping.memory.as_ref().filter(|_| mapping.writable || !write)?;
                let len = memory.len().checked_sub(offset).filter(|len| *len > 0)?;
                memory.place(offset, len.min(most))
            }
            AddressSpace::Process(pinned) => {
                let len = pinned.extent(address, most, write)?;
                // `pin` has the promise of its caller that this memory is as `Place` says.
                let address = std::ptr::with_exposed_provenance_mut(usize::try_from(address).ok()?);
                Some(Place { address, len, bulk: true, memory: PhantomData })
            }
        }
    }

    /// The pieces of memory of an access, each with its position in the access.
    fn places(
        &self,
        address: u64,
        len: usize,
        write: bool,
    ) -> impl Iterator<Item = Result<(usize, Place<'_>), DmaFault>> {
        let mut done = 0;
        std::iter::from_fn(move || {
            let at = done;
            let place = address
                .checked_add(at as u64)
                .filter(|_| at < len)
                .and_then(|address| self.place(address, len - at, write));
            match place {
                _ if at >= len => None,
                Some(place) => {
                    done += place.len;
                    Some(Ok((at, place)))
                }
                None => {
                    done = len;
                    Some(Err(DmaFault { address, len }))
                }
            }
        })
    }

    /// The memory of an access that lies in one piece, as most do.
    fn piece(&self, address: u64, len: usize, write: bool) -> Option<Place<'_>> {
        self.recent(address, len, write)
            .or_else(|| self.place(address, len, write).filter(|place| place.len == len && len > 0))
    }

    /// Reads memory; after an error the content of `to` is unspecified.
    ///
    /// # Errors
    /// [`DmaFault`] if any byte has no memory.
    pub fn read(&self, address: u64, to: &mut [u8]) -> Result<(), DmaFault> {
        if let Some(place) = self.piece(address, to.len(), false) {
            place.read(to);
            return Ok(());
        }
        for piece in self.places(address, to.len(), false) {
            let (at, place) = piece?;
            place.read(&mut to[at..at + place.len]);
        }
        Ok(())
    }

    /// Checks that a range can be written.
    ///
    /// # Errors
    /// [`DmaFault`] if any byte has no memory or is not writable.
    pub fn writable(&self, address: u64, len: usize) -> Result<(), DmaFault> {
        self.places(address, len, true).try_for_each(|piece| piece.map(|_| ()))
    }

    /// Writes memory, or nothing if the range is not writable as a whole.
    ///
    /// # Errors
    /// [`DmaFault`] if any byte has no memory or is not writable.
    pub fn write(&self, address: u64, from: &[u8]) -> Result<(), DmaFault> {
        if let Some(place) = self.piece(address, from.len(), true) {
            place.write(from);
            return Ok(());
        }
        self.writable(address, from.len())?;
        for piece in self.places(address, from.len(), true) {
            let (at, place) = piece?;
            place.write(&from[at..at + place.len]);
        }
        Ok(())
    }

    /// Writes `len` bytes of another memory, or of this one, or nothing if the range is not writable as a whole.
    ///
    /// # Errors
    /// [`DmaFault`] if any byte has no memory or is not writable.
    pub(crate) fn copy(
        &self,
        address: u64,
        from: (&GuestMemory, u64),
        len: usize,
    ) -> Result<(), DmaFault> {
        let (source, start) = from;
        let pieces = (self.piece(address, len, true), source.piece(start, len, false));
        if let (Some(to), Some(from)) = pieces {
            to.copy_from(&from);
            return Ok(());
        }
        self.writable(address, len)?;
        for piece in self.places(address, len, true) {
            let (at, place) = piece?;
            let mut bytes = vec![0; place.len];
            source.read(start.saturating_add(at as u64), &mut bytes)?;
            place.write(&bytes);
        }
        Ok(())
    }

    /// Checks that a range can be read.
    ///
    /// # Errors
    /// [`DmaFault`] if any byte has no memory.
    pub(crate) fn readable(&self, address: u64, len: usize) -> Result<(), DmaFault> {
        self.places(address, len, false).try_for_each(|piece| piece.map(|_| ()))
    }

    /// Reads a big-endian 32-bit word.
    ///
    /// # Errors
    /// [`DmaFault`] if the word has no memory.
    pub fn read_be32(&self, address: u64) -> Result<u32, DmaFault> {
        let place = self.piece(address, DOORBELL_WORD, false);
        if let Some(place) = place.filter(|place| place.address.cast::<u32>().is_aligned()) {
            return Ok(u32::from_be(place.half(0).load(Ordering::Acquire)));
        }
        let mut bytes = [0; 4];
        self.read(address, &mut bytes)?;
        Ok(u32::from_be_bytes(bytes))
    }

    /// Replaces a word of 4 or 8 bytes atomically, and returns the old value.
    ///
    /// # Errors
    /// [`DmaFault`] if the word is not aligned to its size, has no memory or is not writable.
    pub fn update(
        &self,
        address: u64,
        len: usize,
        change: impl FnMut(u64) -> u64,
    ) -> Result<u64, DmaFault> {
        let fault = DmaFault { address, len };
        let place = self.place(address, len, true).filter(|place| place.len == len).ok_or(fault)?;
        place.update(change).ok_or(fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unaligned_accesses_round_trip() {
        let memory = GuestMemory::plain(0x1000, 4096).unwrap();
        let data: Vec<u8> = (0..61).collect();
        for offset in 0..9 {
            memory.write(0x1000 + offset, &data).unwrap();
            let mut back = vec![0; data.len()];
            memory.read(0x1000 + offset, &mut back).unwrap();
            assert_eq!(back, data);
        }
    }

    #[test]
    fn an_access_outside_of_guest_memory_faults() {
        let memory = GuestMemory::plain(0x1000, 4096).unwrap();
        let mut bytes = [0; 8];
        assert!(memory.read(0xffc, &mut bytes).is_err());
        assert!(memory.read(0x1ffc, &mut bytes).is_err());
        assert!(memory.read(u64::MAX - 3, &mut bytes).is_err());
        assert!(memory.read(0x1ff8, &mut bytes).is_ok());
        assert!(memory.write(0x1ff9, &bytes).is_err());
        assert!(memory.update(0x1004, 8, |old| old).is_err());
        assert!(memory.update(0x1004, 4, |old| old + 1).is_ok());
        assert!(GuestMemory::default().read(0, &mut bytes).is_err());
    }

    #[test]
    fn a_partly_backed_write_changes_nothing() {
        let memory = GuestMemory::plain(0, 4096).unwrap();
        assert_eq!(memory.write(4092, &[1; 8]), Err(DmaFault { address: 4092, len: 8 }));
        let mut bytes = [7; 4];
        memory.read(4092, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 4]);
    }

    #[test]
    fn mappings_do_not_overlap_and_are_removed_whole() {
        let mut memory = GuestMemory::plain(0x2000, 4096).unwrap();
        assert!(memory.map(0x1800, 0x1000, None, true).is_err());
        assert!(memory.map(0x2fff, 1, None, true).is_err());
        assert!(memory.map(0x3000, 0x1000, None, true).is_ok());
        assert!(memory.map(u64::MAX, 2, None, true).is_err());
        let mut byte = [0];
        assert!(memory.read(0x3000, &mut byte).is_err());
        assert!(memory.unmap(0x2000, 0x800).is_err());
        assert!(memory.unmap(0x2000, 0x2000).is_ok());
        assert!(memory.unmap(0x2000, 0x2000).is_err());
    }

    /// Bytes of the process, each with its place as its value, and their address.
    fn bytes(len: usize) -> (Vec<u8>, u64) {
        let mut bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
        let address = bytes.as_mut_ptr().expose_provenance() as u64;
        (bytes, address)
    }

    #[test]
    fn the_device_accesses_pinned_ranges_only() {
        let (_bytes, at) = bytes(4096);
        let mut memory = GuestMemory::process();
        let mut four = [0; 4];
        assert_eq!(memory.read(at, &mut four), Err(DmaFault { address: at, len: 4 }));
        // SAFETY: the bytes outlive `memory`, and nothing else uses them until then.
        unsafe { memory.pin(at + 100, 50, true) }.unwrap();
        // SAFETY: as above.
        unsafe { memory.pin(at + 140, 60, false) }.unwrap();
        assert!(
            memory.read(at + 98, &mut four).is_err() && memory.read(at + 197, &mut four).is_err()
        );
        memory.read(at + 100, &mut four).unwrap();
        assert_eq!(four, [100, 101, 102, 103]);
        // Across the ranges, which overlap: readable in both, writable in the first.
        let mut all = [0; 100];
        memory.read(at + 100, &mut all).unwrap();
        assert!(all.iter().zip(100..).all(|(byte, at)| *byte == at as u8), "{all:?}");
        memory.write(at + 146, &[1; 4]).unwrap();
        assert!(memory.write(at + 147, &[2; 4]).is_err());
        memory.read(at + 146, &mut four).unwrap();
        assert_eq!(four, [1; 4], "a refused write changes nothing");
        let word = (at + 100).next_multiple_of(8);
        let expected = memory.update(word, 8, |old| old.wrapping_add(1)).unwrap();
        assert_eq!(memory.update(word, 8, |old| old), Ok(expected.wrapping_add(1)));
        assert!(memory.update(word + 4, 8, |old| old).is_err(), "not aligned");
        assert!(memory.update(at.next_multiple_of(8), 8, |old| old).is_err(), "not pinned");
        assert!(memory.update((at + 160).next_multiple_of(8), 8, |old| old).is_err(), "read only");
    }

    /// Regions that overlap, and regions that meet, divide the memory inside of a word.
    #[test]
    fn a_word_is_updated_where_other_ranges_start_and_end_in_it() {
        let (_bytes, at) = bytes(4096);
        let at = at.next_multiple_of(8);
        let mut memory = GuestMemory::process();
        let ranges = [
            (0, 64, true),
            (4, 56, true),
            (128, 12, true),
            (139, 3, true),
            (141, 3, true),
            (192, 4, true),
            (196, 4, false),
            (256, 4, true),
            (261, 3, true),
            (320, 8, false),
            (324, 4, true),
        ];
        for (offset, len, writable) in ranges {
            // SAFETY: the bytes outlive `memory`, and nothing else uses them until then.
            unsafe { memory.pin(at + offset, len, writable) }.unwrap();
        }
        // Words in which a second range begins, in which it ends, and which three ranges share.
        for offset in [0, 56, 136] {
            let mut word = [0; 8];
            memory.read(at + offset, &mut word).unwrap();
            let old = u64::from_ne_bytes(word);
            assert_eq!(memory.update(at + offset, 8, |old| old + 1), Ok(old), "{offset}");
            memory.read(at + offset, &mut word).unwrap();
            assert_eq!(u64::from_ne_bytes(word), old + 1, "{offset}");
        }
        for offset in [4, 60, 136, 140, 192, 256, 324] {
            assert!(memory.update(at + offset, 4, |old| old).is_ok(), "{offset}");
        }
        // Words that are partly read only, have a byte that is not pinned, or lie past the end.
        for (offset, len) in [(192, 8), (196, 4), (256, 8), (260, 4), (320, 8), (320, 4), (64, 8)] {
            let fault = DmaFault { address: at + offset, len };
            assert_eq!(memory.update(at + offset, len, |old| old), Err(fault), "{offset}");
        }
        assert_eq!(memory.places(at, 64, true).count(), 1);
        assert!(memory.read(at + 192, &mut [0; 8]).is_ok());
    }

    #[test]
    fn remembered_spans_end_with_their_pins() {
        let bytes = [AtomicU64::new(7), AtomicU64::new(8)];
        let start = bytes.as_ptr().expose_provenance() as u64;
        let mut memory = GuestMemory::process();
        let read = |memory: &GuestMemory| memory.read(start, &mut [0; 16]).is_ok();
        // SAFETY: atomics of this test, which outlive the memory.
        unsafe { memory.pin(start, 16, false) }.unwrap();
        assert!(read(&memory) && memory.write(start, &[0; 16]).is_err());
        // SAFETY: as above.
        unsafe { memory.pin(start, 8, true) }.unwrap();
        assert!(read(&memory) && memory.write(start, &[9; 8]).is_ok());
        assert!(memory.write(start, &[9; 16]).is_err());
        memory.unpin(start, 8, true).unwrap();
        assert!(read(&memory) && memory.write(start, &[0; 8]).is_err());
        memory.unpin(start, 16, false).unwrap();
        assert!(!read(&memory));
        memory.clear();
        assert!(!read(&memory));
        assert_eq!(bytes[1].load(Ordering::Relaxed), 8);
    }

    #[test]
    fn a_range_is_unpinned_as_often_as_it_was_pinned() {
        let (_bytes, at) = bytes(4096);
        let mut memory = GuestMemory::process();
        let ranges = [(0, 4096, false), (64, 64, true), (64, 64, true), (100, 1000, true)];
        for (offset, len, writable) in ranges {
            // SAFETY: the bytes outlive `memory`, and nothing else uses them until then.
            unsafe { memory.pin(at + offset, len, writable) }.unwrap();
        }
        assert_eq!(memory.pins(), 4);
        assert!(
            memory.unpin(at + 64, 64, false).is_err() && memory.unpin(at + 65, 63, true).is_err()
        );
        let writable = |memory: &GuestMemory, offset| memory.writable(at + offset, 8).is_ok();
        memory.unpin(at + 64, 64, true).unwrap();
        assert!(writable(&memory, 64) && writable(&memory, 120) && !writable(&memory, 1096));
        memory.unpin(at + 64, 64, true).unwrap();
        assert!(!writable(&memory, 64) && writable(&memory, 100) && !writable(&memory, 98));
        assert!(memory.unpin(at + 64, 64, true).is_err());
        memory.unpin(at + 100, 1000, true).unwrap();
        assert!(!writable(&memory, 100) && memory.read(at, &mut [0; 4096]).is_ok());
        let AddressSpace::Process(pinned) = &memory.space else { panic!("memory of the process") };
        assert_eq!(pinned.spans.len(), 1, "equal neighbours are joined");
        memory.unpin(at, 4096, false).unwrap();
        assert!(memory.read(at, &mut [0]).is_err() && memory.pins() == 0);
        // SAFETY: a refused call pins nothing.
        let refused =
            [(0, 8), (at, 0), (u64::MAX, 2)].map(|(at, len)| unsafe { memory.pin(at, len, true) });
        assert!(refused.iter().all(Result::is_err));
    }

    #[test]
    fn long_copies_keep_every_byte_whatever_their_alignment() {
        let (_bytes, at) = bytes(3 * BULK);
        let mut memory = GuestMemory::process();
        // SAFETY: the bytes outlive `memory`, and nothing else uses them until then.
        unsafe { memory.pin(at, 3 * BULK as u64, true) }.unwrap();
        for (offset, len) in [(0, BULK), (1, BULK + 1), (7, BULK - 1), (3, 2 * BULK + 5)] {
            let data: Vec<u8> = (0..len).map(|at| (at * 7 + offset) as u8).collect();
            memory.write(at, &vec![0; 3 * BULK]).unwrap();
            memory.write(at + offset as u64, &data).unwrap();
            let mut back = vec![0xff; 3 * BULK];
            memory.read(at, &mut back).unwrap();
            assert_eq!(back[offset..offset + len], data);
            assert!(back[..offset].iter().chain(&back[offset + len..]).all(|byte| *byte == 0));
        }
    }

    #[test]
    fn a_copy_may_overlap_its_source() {
        let (_bytes, start) = bytes(4 * BULK);
        let mut process = GuestMemory::process();
        // SAFETY: the bytes outlive `process`, and nothing else uses them until then.
        unsafe { process.pin(start, 4 * BULK as u64, true) }.unwrap();
        let guest = GuestMemory::plain(0, 4 * BULK).unwrap();
        let whole: Vec<u8> = (0..4 * BULK).map(|at| (at ^ at >> 8) as u8).collect();
        for (memory, start, most) in [(&process, start, 2 * BULK), (&guest, 0, BULK)] {
            for len in [1, 255, BULK - 1, BULK, BULK + 3, 2 * BULK] {
                for (from, to) in [(0, 0), (0, 8), (8, 0), (500, 7), (3, 700)] {
                    let len = len.min(most);
                    memory.write(start, &whole).unwrap();
                    memory.copy(start + to as u64, (memory, start + from as u64), len).unwrap();
                    let mut expected = whole.clone();
                    expected.copy_within(from..from + len, to);
                    let mut found = vec![0; whole.len()];
                    memory.read(start, &mut found).unwrap();
                    assert!(found == expected, "{len} bytes from {from} to {to}");
                }
            }
        }
    }

    #[test]
    fn guest_memory_is_not_pinned_and_process_memory_not_mapped() {
        let mut guest = GuestMemory::plain(0, 4096).unwrap();
        // SAFETY: a refused call pins nothing.
        assert!(unsafe { guest.pin(0x1000, 8, true) }.is_err());
        assert!(guest.unpin(0x1000, 8, true).is_err());
        let mut process = GuestMemory::process();
        assert!(process.map(0, 4096, None, true).is_err() && process.unmap(0, 4096).is_err());
    }

    #[test]
    fn own_pages_take_no_memory_before_an_access() {
        let memory = SharedMemory::allocate(64 << 20).unwrap();
        let range = memory.address(0, 1).unwrap().addr().get();
        memory.write(8192, &[1]).unwrap();
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        // The kernel may join neighbouring mappings into one.
        let inside = |line: &&str| {
            let range_of = |line: &str| {
                let (start, end) = line.split_whitespace().next()?.split_once('-')?;
                let address = |text| usize::from_str_radix(text, 16).ok();
                Some(address(start)?..address(end)?)
            };
            range_of(line).is_some_and(|mapping| mapping.contains(&range))
        };
        let mut lines = smaps.lines().skip_while(|line| !inside(line));
        let resident = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
        let kib: usize = resident.trim().trim_end_matches(" kB").parse().unwrap();
        assert!((4..32 << 10).contains(&kib), "{kib} KiB");
    }

    #[test]
    fn own_pages_are_reached_by_their_address() {
        let pages = SharedMemory::allocate(8192).unwrap();
        assert!(pages.address(8190, 4).is_none() && SharedMemory::allocate(0).is_err());
        let at = pages.address(64, 8).unwrap().addr().get() as u64;
        let mut memory = GuestMemory::process();
        // SAFETY: `pages` outlives `memory`, and nothing else uses the bytes meanwhile.
        unsafe { memory.pin(at, 8, true) }.unwrap();
        pages.write(64, &[1, 2, 3]).unwrap();
        let mut bytes = [0; 8];
        memory.read(at, &mut bytes).unwrap();
        assert_eq!((bytes, at % 4096), ([1, 2, 3, 0, 0, 0, 0, 0], 64));
    }
}
