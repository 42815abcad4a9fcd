//! Memory that is registered with a device: its owner, its address, and this process's access to it
//! while the device and peers access it, too.
//!
//! Pairs with `ib_umem_get` in the kernel, which takes an address range on trust. That range comes
//! from here and from nowhere else.

use crate::abort::abort;
use crate::sync::fork::Epoch;
use memmap2::{MmapMut, MmapOptions};
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use zerocopy::{FromBytes, IntoBytes};

/// Owned memory that stays where it is, and that can be registered without `unsafe`.
///
/// The library moves the value onto the heap, asks it once for its elements, and leaves it alone
/// until the device can no longer reach them. If that never happens, because the kernel refuses to
/// destroy the region or the process is a forked child, it is leaked and never dropped.
///
/// # Safety
///
/// From the call of [`items`](Self::items) until the value is next moved, accessed or dropped, the implementer
/// promises about the returned memory:
///
/// - **Valid.** It is one range within one allocation, of at most `isize::MAX` bytes, initialised, readable and
///   writable from any thread, and it keeps its pages.
/// - **Aligned.** It begins at a multiple of the alignment of [`Item`](Self::Item):
///   [`as_slice`](crate::MemoryRegion::as_slice) makes a slice of it. Registering memory that does not is refused.
/// - **Alone.** Nobody else accesses it. A device and peers across the network write it whenever they like.
///
/// # Example
///
/// Memory of a program's own type, which begins at a page:
///
/// ```no_run
/// use std::ptr::NonNull;
/// use uverbs::{MemoryRegion, StableBytes};
///
/// #[repr(align(4096))]
/// struct Page([u8; 4096]);
///
/// struct Pages(Box<[Page]>);
///
/// // SAFETY: the box owns the pages alone, they stay as long as the box, and they are bytes throughout.
/// unsafe impl StableBytes for Pages {
///     type Item = u8;
///
///     fn items(&mut self) -> NonNull<[u8]> {
///         let pages = NonNull::from(&mut *self.0);
///         NonNull::slice_from_raw_parts(pages.cast(), size_of_val(&*self.0))
///     }
/// }
///
/// # fn f(pd: &uverbs::ProtectionDomain) -> Result<(), Box<dyn std::error::Error>> {
/// let pages = Pages((0..64).map(|_| Page([0; 4096])).collect());
/// let region: MemoryRegion<u8, Pages> = pd.mr_builder().register(pages)?;
/// let second_page = region.sge(4096..8192)?;
/// // … requests that work on it …
/// let Pages(pages) = region.destroy()?;
/// # let _ = (second_page, pages); Ok(()) }
/// ```
pub unsafe trait StableBytes: Send + 'static {
    /// The type of the memory's items. Peers write them, so any bytes must be a valid value.
    type Item: FromBytes + IntoBytes;

    /// The memory.
    fn items(&mut self) -> NonNull<[Self::Item]>;
}

// SAFETY: a vector that is not touched neither frees nor moves its buffer, and it owns it alone.
unsafe impl<T: FromBytes + IntoBytes + Send + 'static> StableBytes for Vec<T> {
    type Item = T;

    fn items(&mut self) -> NonNull<[T]> {
        NonNull::from(self.as_mut_slice())
    }
}

// SAFETY: a box owns its slice alone, and the slice stays as long as the box.
unsafe impl<T: FromBytes + IntoBytes + Send + 'static> StableBytes for Box<[T]> {
    type Item = T;

    fn items(&mut self) -> NonNull<[T]> {
        NonNull::from(&mut **self)
    }
}

// SAFETY: the borrow is exclusive and lasts forever.
unsafe impl<T: FromBytes + IntoBytes + Send + 'static> StableBytes for &'static mut [T] {
    type Item = T;

    fn items(&mut self) -> NonNull<[T]> {
        NonNull::from(&mut **self)
    }
}

// SAFETY: a writable mapping is unmapped only when it is dropped. The program that mapped a file promised
// memmap2 that nothing else changes the file.
unsafe impl StableBytes for MmapMut {
    type Item = u8;

    fn items(&mut self) -> NonNull<[u8]> {
        NonNull::from(&mut **self)
    }
}

/// Memory that the region does not own, named by its address.
#[derive(Debug)]
pub struct RawRange(());

/// Memory that the program owns and accesses by itself: the region has keys for it and no access.
#[derive(Debug)]
pub struct Unowned(());

/// Memory that was borrowed for as long as the region lives.
#[derive(Debug)]
pub struct Borrowed<'a>(PhantomData<&'a mut [u8]>);

/// Memory that was borrowed for the time of a [scope](crate::owned::Scope).
#[derive(Debug)]
pub(crate) struct Pledged(#[expect(dead_code, reason = "it is counted")] Arc<()>);

/// Memory behind a dma-buf, of a GPU for example: this process has no address for it.
#[derive(Debug)]
pub struct DmaBuf(());

/// The whole address space of this process, faulted in on demand.
#[derive(Debug)]
pub struct AddressSpace(());

/// Memory of another process: this one can name it in requests and cannot touch it.
#[derive(Debug)]
pub struct Foreign(());

/// The owner of registered memory, which keeps it alive, and the memory's address.
pub(crate) struct Backing<M> {
    /// Came from `Box::into_raw`, so that moving this struct does not move the owner of the memory,
    /// which would claim the memory for itself.
    owner: NonNull<M>,
    start: *mut u8,
    /// Bytes that this process can reach.
    length: usize,
    /// Bytes that the device can reach.
    reach: u64,
    location: Location,
    /// Whether the program accesses the memory itself. In `unsafe` it then answered for the rights that it
    /// registered the memory with.
    rights_are_promised: bool,
}

/// The location of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    /// In this process.
    Mapped,
    /// In a dma-buf, which this process need not have mapped.
    DmaBuf,
    /// On the device.
    Device,
    /// In the process that exported the region.
    Foreign,
}

// SAFETY: the owner is only ever dropped or moved out, which `M: Send` allows on any thread.
unsafe impl<M: Send> Send for Backing<M> {}
// SAFETY: a shared reference gives no access to the owner, and to the memory only by copying; see
// `transfer` for why copies do not race.
unsafe impl<M: Send> Sync for Backing<M> {}

impl<M: StableBytes> Backing<M> {
    pub(crate) fn own(memory: M) -> Self {
        // Made before the call of the program's `items`, which may panic: `backing` then drops the memory.
        let mut backing = Backing::with(memory, ptr::null_mut(), 0, 0);
        // SAFETY: it came from a box just now, so nobody else knows of it.
        let items = unsafe { backing.owner.as_mut() }.items();
        backing.start = items.as_ptr().cast();
        backing.length = items.len().saturating_mul(size_of::<M::Item>());
        backing.reach = backing.length as u64;
        backing
    }
}

impl Backing<MmapMut> {
    /// Fresh pages, zeroed.
    pub(crate) fn pages(length: usize) -> std::io::Result<Self> {
        MmapOptions::new().len(length).map_anon().map(Backing::own)
    }
}

impl<M> Backing<M> {
    fn with(owner: M, start: *mut u8, length: usize, reach: u64) -> Self {
        let owner = NonNull::from(Box::leak(Box::new(owner)));
        let location = Location::Mapped;
        Backing { owner, start, length, reach, location, rights_are_promised: false }
    }

    /// Memory that this process has no address for, and the owner that keeps it alive.
    fn elsewhere(owner: M, reach: u64, location: Location) -> Self {
        let mut backing = Backing::with(owner, ptr::null_mut(), 0, reach);
        backing.location = location;
        backing
    }

    /// Memory on the device, and the owner that keeps it alive.
    pub(crate) fn on_device(owner: M, reach: u64) -> Self {
        Backing::elsewhere(owner, reach, Location::Device)
    }

    /// Whether it begins at a multiple of the alignment of `T`.
    pub(crate) fn is_aligned_to<T>(&self) -> bool {
        self.start.cast::<T>().is_aligned()
    }

    /// The address of the first byte, as the kernel takes it.
    pub(crate) fn address(&self) -> u64 {
        self.start.expose_provenance() as u64
    }

    pub(crate) fn location(&self) -> Location {
        self.location
    }

    /// Whether safe code must not add rights, because the caller of an `unsafe` function answered for the present ones.
    pub(crate) fn rights_are_promised(&self) -> bool {
        self.rights_are_promised
    }

    /// The number of bytes from `address` on that the device can reach.
    pub(crate) fn reach(&self) -> u64 {
        self.reach
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// Bytes that this process can reach.
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// The owner that the memory was registered with.
    pub(crate) fn into_owner(self) -> M {
        let owner = self.owner;
        std::mem::forget(self);
        // SAFETY: it came from a box, and `self`, which would have freed it, is forgotten.
        *unsafe { Box::from_raw(owner.as_ptr()) }
    }

    /// A pointer to `length` bytes at `offset`, if they are there.
    fn at(&self, offset: usize, length: usize) -> Option<*mut u8> {
        let end = offset.checked_add(length)?;
        (end <= self.length).then(|| self.start.wrapping_add(offset))
    }

    /// A copy of the value at `offset`. It may be torn if a peer writes it meanwhile, unless it is
    /// an aligned word.
    #[inline]
    pub(crate) fn read<T: FromBytes>(&self, offset: usize) -> Option<T> {
        let from = self.at(offset, size_of::<T>())?;
        let mut value = MaybeUninit::<T>::uninit();
        // SAFETY: `at` checked the range, and `value` has room for as much.
        unsafe { transfer::<false>(from, value.as_mut_ptr().cast(), size_of::<T>()) };
        // SAFETY: all bytes were written, and any bytes are a `T`.
        Some(unsafe { value.assume_init() })
    }

    /// Stores `value` at `offset`; `false`, and nothing stored, if it does not fit.
    ///
    /// The caller holds the region exclusively.
    #[inline]
    #[must_use]
    pub(crate) fn write<T: FromBytes + IntoBytes>(&self, offset: usize, mut value: T) -> bool {
        self.store(offset, value.as_mut_bytes())
    }

    /// Copies from `offset` on to `bytes`; `false`, and nothing copied, if there is not as much.
    #[inline]
    #[must_use]
    pub(crate) fn load(&self, offset: usize, bytes: &mut [u8]) -> bool {
        let Some(from) = self.at(offset, bytes.len()) else { return false };
        // SAFETY: `at` checked the range, and `bytes` has room for as much.
        unsafe { transfer::<false>(from, bytes.as_mut_ptr(), bytes.len()) };
        true
    }

    /// Copies `bytes` to `offset`; `false`, and nothing copied, if there is no room.
    ///
    /// The caller holds the region exclusively.
    #[inline]
    #[must_use]
    pub(crate) fn store(&self, offset: usize, bytes: &[u8]) -> bool {
        let Some(to) = self.at(offset, bytes.len()) else { return false };
        // SAFETY: `at` checked the range, and from `bytes` as much is only read.
        unsafe { transfer::<true>(to, bytes.as_ptr().cast_mut(), bytes.len()) };
        true
    }

    /// The memory as atomic words; `None` if it does not begin at one. A rest that is no whole
    /// word is left out.
    ///
    /// The caller holds the region exclusively, and does not read or write it otherwise while the words are
    /// borrowed.
    pub(crate) fn words(&self) -> Option<&[AtomicU64]> {
        let words = self.length / size_of::<u64>();
        if words == 0 {
            return Some(&[]);
        }
        let start: *const AtomicU64 = self.start.cast();
        // SAFETY: aligned as checked here and in bounds by division; the memory stays as long as
        // `self`; within this process nobody accesses it otherwise, as said above. Others do, as
        // with memory that processes share, for which atomics are made.
        start.is_aligned().then(|| unsafe { std::slice::from_raw_parts(start, words) })
    }
}

impl Backing<RawRange> {
    /// # Safety
    ///
    /// The memory stays valid and is accessed by nobody as an ordinary variable for as long as
    /// this lives, or longer if it is leaked.
    pub(crate) unsafe fn raw(start: *mut u8, length: usize) -> Self {
        Backing::with(RawRange(()), start, length, length as u64)
    }
}

impl Backing<Unowned> {
    /// # Safety
    ///
    /// The range stays mapped for as long as this lives, or longer if it is leaked.
    pub(crate) unsafe fn unowned(start: *mut u8, length: usize) -> Self {
        // This process reaches none of its bytes through the region.
        let mut backing = Backing::with(Unowned(()), start, 0, length as u64);
        backing.rights_are_promised = true;
        backing
    }
}

impl<'a> Backing<Borrowed<'a>> {
    /// # Safety
    ///
    /// This must not be forgotten or leaked while the memory is in use after the borrow.
    pub(crate) unsafe fn borrow<T: FromBytes + IntoBytes>(memory: &'a mut [T]) -> Self {
        let length = size_of_val(memory);
        Backing::with(Borrowed(PhantomData), memory.as_mut_ptr().cast(), length, length as u64)
    }
}

/// Memory of others that is registered within the time of one call; see [`Pledges::during`].
pub(crate) struct Pledges<'env> {
    /// One `Arc` for each region, which holds a clone.
    held: Vec<Arc<()>>,
    epoch: Epoch,
    memory: PhantomData<&'env mut &'env mut [u8]>,
}

impl<'env> Pledges<'env> {
    /// Runs `body`, within which memory can be registered that is borrowed for longer. Even if
    /// `body` leaks a region or panics, this does not return while the kernel may still let a
    /// device reach the memory: if a region is left when `body` ends, the process aborts.
    pub(crate) fn during<R>(epoch: Epoch, body: impl FnOnce(&mut Pledges<'env>) -> R) -> R {
        body(&mut Pledges { held: Vec::new(), epoch, memory: PhantomData })
    }

    pub(crate) fn backing<T: FromBytes + IntoBytes>(
        &mut self,
        memory: &'env mut [T],
    ) -> Backing<Pledged> {
        let half = Arc::new(());
        self.held.push(half.clone());
        let length = size_of_val(memory);
        Backing::with(Pledged(half), memory.as_mut_ptr().cast(), length, length as u64)
    }
}

impl Drop for Pledges<'_> {
    fn drop(&mut self) {
        // A child of a fork has a copy of the memory, which no device knows of.
        let kept = self.held.iter().any(|half| Arc::strong_count(half) > 1);
        if kept && !self.epoch.is_over() {
            abort("uverbs: the kernel keeps borrowed memory registered: aborting\n");
        }
    }
}

impl Backing<DmaBuf> {
    pub(crate) fn dmabuf(reach: u64) -> Self {
        Backing::elsewhere(DmaBuf(()), reach, Location::DmaBuf)
    }
}

impl Backing<Foreign> {
    pub(crate) fn foreign(reach: u64) -> Self {
        Backing::elsewhere(Foreign(()), reach, Location::Foreign)
    }
}

impl Backing<AddressSpace> {
    /// # Safety
    ///
    /// The caller gives the keys only to code and peers that may write anything in this process.
    pub(crate) unsafe fn everything() -> Self {
        let mut backing = Backing::with(AddressSpace(()), ptr::null_mut(), 0, u64::MAX);
        backing.rights_are_promised = true;
        backing
    }
}

impl<M> Drop for Backing<M> {
    fn drop(&mut self) {
        // SAFETY: it came from a box, and is freed once, here, or moved out by `into_owner`.
        drop(unsafe { Box::from_raw(self.owner.as_ptr()) });
    }
}

impl<M> fmt::Debug for Backing<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backing").field("start", &self.start).field("reach", &self.reach).finish()
    }
}

/// Copies between registered memory and this process's own, in the direction of `TO_SHARED`.
///
/// Each access to shared memory is volatile, at its natural alignment, and as wide as a word
/// allows, so that an aligned word is never torn and the compiler neither repeats nor invents one.
/// Other threads of this process do not race with it: a writer holds the region exclusively, and readers
/// share it with readers only. The device is no thread of the program.
///
/// # Safety
///
/// `length` bytes are readable and writable at `shared`. They are writable at `own`, or with
/// `TO_SHARED` only readable, and nobody else writes them.
unsafe fn transfer<const TO_SHARED: bool>(shared: *mut u8, own: *mut u8, length: usize) {
    let mut at = 0;
    while at < length {
        let (to, from) = (shared.wrapping_add(at), own.wrapping_add(at));
        let width = width(to.addr(), length - at);
        match width {
            // SAFETY: the word lies within both ranges, and is aligned in the shared one.
            1 => unsafe { word::<u8, TO_SHARED>(to, from) },
            // SAFETY: as above.
            2 => unsafe { word::<u16, TO_SHARED>(to, from) },
            // SAFETY: as above.
            4 => unsafe { word::<u32, TO_SHARED>(to, from) },
            _ => {
                // The following words are aligned as well, so the widest access fits until the rest.
                while length - at >= 16 {
                    let (to, from) = (shared.wrapping_add(at), own.wrapping_add(at));
                    // SAFETY: as above.
                    unsafe { word::<u64, TO_SHARED>(to, from) };
                    at += 8;
                }
                let (to, from) = (shared.wrapping_add(at), own.wrapping_add(at));
                // SAFETY: as above.
                unsafe { word::<u64, TO_SHARED>(to, from) };
            }
        }
        at += width;
    }
}

/// The widest access of up to eight bytes that `address` is aligned to and that is no longer than
/// `left`, which is not 0.
#[inline]
fn width(address: usize, left: usize) -> usize {
    1 << address.trailing_zeros().min(left.min(8).ilog2())
}

/// # Safety
///
/// `shared` is aligned, and both point to a `W` that may be accessed as `transfer` says.
#[inline]
unsafe fn word<W: Copy, const TO_SHARED: bool>(shared: *mut u8, own: *mut u8) {
    let (shared, own) = (shared.cast::<W>(), own.cast::<W>());
    if TO_SHARED {
        // SAFETY: readable as the caller says.
        let value = unsafe { own.read_unaligned() };
        // SAFETY: writable and aligned as the caller says.
        unsafe { shared.write_volatile(value) };
    } else {
        // SAFETY: readable and aligned as the caller says.
        let value = unsafe { shared.read_volatile() };
        // SAFETY: writable as the caller says.
        unsafe { own.write_unaligned(value) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn accesses_are_aligned_and_as_wide_as_fits() {
        assert_eq!(width(0x1000, 100), 8);
        assert_eq!(width(0x1008, 8), 8);
        assert_eq!(width(0x1008, 7), 4);
        assert_eq!(width(0x1004, 100), 4);
        assert_eq!(width(0x1002, 3), 2);
        assert_eq!(width(0x1001, 100), 1);
        assert_eq!(width(0x1000, 1), 1);
    }

    #[test]
    fn copies_arrive_at_any_alignment() {
        let memory = Backing::own(vec![0u8; 64]);
        let pattern: Vec<u8> = (1..=64).collect();
        for start in 0..9 {
            for length in 0..40 {
                assert!(memory.store(0, &[0; 64]));
                assert!(memory.store(start, &pattern[..length]));
                let mut back = [0xff; 64];
                assert!(memory.load(0, &mut back));
                assert!(back[..start].iter().all(|&byte| byte == 0), "{start} {length}");
                assert_eq!(back[start..start + length], pattern[..length]);
                assert!(back[start + length..].iter().all(|&byte| byte == 0), "{start} {length}");
            }
        }
    }

    #[test]
    fn nothing_is_copied_beyond_the_end() {
        let memory = Backing::own(vec![7u8; 16]);
        let mut bytes = [1; 8];
        assert!(!memory.load(9, &mut bytes));
        assert!(!memory.load(usize::MAX, &mut bytes));
        assert_eq!(bytes, [1; 8]);
        assert!(!memory.store(9, &bytes) && !memory.store(usize::MAX, &bytes));
        assert_eq!(memory.read::<u64>(9), None);
        assert!(!memory.write(9, 0u64));
        assert!(memory.load(16, &mut []) && !memory.load(17, &mut []));
        assert_eq!(memory.into_owner(), vec![7; 16]);
    }

    #[test]
    fn values_are_written_and_read_at_any_offset() {
        let memory = Backing::own(vec![0u8; 32].into_boxed_slice());
        assert!(memory.write(3, 0x0102_0304_0506_0708u64));
        assert_eq!(memory.read::<u64>(3), Some(0x0102_0304_0506_0708));
        assert!(memory.write(16, [1u32, 2, 3]));
        assert_eq!(memory.read::<[u32; 3]>(16), Some([1, 2, 3]));
    }

    #[test]
    fn fresh_pages_are_zeroed_and_page_aligned() {
        let memory = Backing::pages(10_000).unwrap();
        assert_eq!(memory.as_ptr().addr() % rustix::param::page_size(), 0);
        assert_eq!((memory.len(), memory.reach()), (10_000, 10_000));
        let mut bytes = vec![1; 10_000];
        assert!(memory.load(0, &mut bytes));
        assert!(bytes.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn the_owner_comes_back_with_the_written_bytes() {
        let memory = Backing::own(vec![1u16, 2, 3]);
        assert_eq!((memory.len(), memory.reach()), (6, 6));
        assert!(memory.write(2, 9u16));
        assert_eq!(memory.into_owner(), [1, 9, 3]);
    }

    struct Counted {
        bytes: [u8; 8],
        _alive: Arc<()>,
    }

    // SAFETY: the bytes are part of the value, which is not moved.
    unsafe impl StableBytes for Counted {
        type Item = u8;

        fn items(&mut self) -> NonNull<[u8]> {
            NonNull::from(self.bytes.as_mut_slice())
        }
    }

    #[test]
    fn the_owner_is_dropped_once_and_not_when_leaked() {
        let alive = Arc::new(());
        let counted = || Counted { bytes: [0; 8], _alive: alive.clone() };
        drop(Backing::own(counted()));
        assert_eq!(Arc::strong_count(&alive), 1);
        let memory = Backing::own(counted());
        assert!(memory.write(0, 5u8));
        assert_eq!(memory.into_owner().bytes[0], 5);
        assert_eq!(Arc::strong_count(&alive), 1);
        std::mem::forget(Backing::own(counted()));
        assert_eq!(Arc::strong_count(&alive), 2);
    }

    #[test]
    fn words_need_alignment_and_leave_out_the_rest() {
        let memory = Backing::own(vec![0u64; 4]);
        let words = memory.words().unwrap();
        assert_eq!(words.len(), 4);
        words[3].fetch_add(5, Ordering::Relaxed);
        assert_eq!(memory.read::<u64>(24), Some(5));

        let mut bytes = vec![0u64; 3];
        let start: *mut u8 = bytes.as_mut_ptr().cast();
        // SAFETY: `bytes` outlives both and is not touched otherwise.
        let odd = unsafe { Backing::raw(start.wrapping_add(1), 16) };
        assert!(odd.words().is_none());
        // SAFETY: as above.
        let short = unsafe { Backing::raw(start, 15) };
        assert_eq!(short.words().unwrap().len(), 1);
    }

    #[test]
    fn unowned_memory_has_an_address_and_is_never_accessed() {
        let mut memory = [std::mem::MaybeUninit::<u8>::uninit(); 64];
        // SAFETY: `memory` outlives it.
        let backing = unsafe { Backing::unowned(memory.as_mut_ptr().cast(), 64) };
        assert_eq!((backing.len(), backing.reach()), (0, 64));
        assert_eq!(backing.address(), memory.as_ptr().addr() as u64);
        assert_eq!(backing.read::<u8>(0), None);
        assert!(!backing.write(0, 1u8));
    }

    #[test]
    fn memory_without_an_address_cannot_be_touched() {
        let memory = Backing::dmabuf(4096);
        assert_eq!((memory.len(), memory.reach()), (0, 4096));
        assert_eq!(memory.read::<u8>(0), None);
        assert!(!memory.write(0, 1u8));
    }
}
