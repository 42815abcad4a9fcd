//! Memory that is cut into buffers of one size. A buffer has one owner at a time, or many that only read it.
//!
//! Buffers are taken and come back from any thread, without a lock and without an allocation. This file
//! does not track the device's accesses: the holder of a buffer keeps it until the device is done, and
//! registers the memory without the right for peers to write, because buffers are slices.

use super::region::StableBytes;
use crate::abort::abort;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use memmap2::{MmapOptions, MmapRaw};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

/// The bytes of a slab, shared with the region that registers them. Nobody reaches the bytes through the
/// region.
#[derive(Clone)]
pub(crate) struct SlabPages {
    mapping: Arc<MmapRaw>,
    /// The mapping of a huge page may be longer. Only this length is registered, because the kernel counts
    /// registered bytes against the limit of locked memory.
    length: usize,
}

impl SlabPages {
    /// `length` zeroed bytes; if `huge` has the system's default size of huge pages, in these.
    pub(crate) fn new(length: usize, huge: Option<usize>) -> std::io::Result<SlabPages> {
        let mut options = MmapOptions::new();
        options.len(length);
        if let Some(page) = huge {
            options.len(length.checked_next_multiple_of(page).unwrap_or(usize::MAX)).huge(None);
        }
        Ok(SlabPages { mapping: Arc::new(MmapRaw::from(options.map_anon()?)), length })
    }
}

// SAFETY: a mapping stays where it is as long as somebody holds it. Only the owners of its buffers access
// the bytes, and never while a device may write them. Nobody accesses them through the region, which is
// private to the pool.
unsafe impl StableBytes for SlabPages {
    type Item = u8;

    fn items(&mut self) -> NonNull<[u8]> {
        let start = NonNull::new(self.mapping.as_mut_ptr()).unwrap_or(NonNull::dangling());
        NonNull::slice_from_raw_parts(start, self.length)
    }
}

/// Buffers of one size, and their owner `K`: the region. Each buffer has a copy of `N`.
pub(crate) struct BufferSlab<K, N> {
    /// Dropped first: the region is deregistered before the pages are unmapped.
    owner: K,
    _pages: Arc<MmapRaw>,
    size: u32,
    /// The list of free buffers. The low half is the index of its first buffer, plus one. The high half
    /// counts changes, so that a list that was changed and looks the same compares unequal (ABA).
    free: AtomicU64,
    heads: Box<[BufferHead<K, N>]>,
}

/// The head of one buffer, on a cache line of its own. It has all fields of the buffer that a request needs.
#[repr(align(64))]
struct BufferHead<K, N> {
    start: *mut u8,
    common: N,
    /// Alive as long as one of its buffers is.
    slab: *const BufferSlab<K, N>,
    index: u32,
    /// The index of the next buffer in the list of free ones, plus one; 0 at its end.
    next: AtomicU32,
    /// The number of owners: 0 in the list, 1, or more if the buffer is shared.
    holders: AtomicU32,
}

// SAFETY: the pointers lead to bytes that only a buffer's owners access, and to the slab, which is `Sync`
// if `K` and `N` are.
unsafe impl<K: Send + Sync, N: Send + Sync> Send for BufferHead<K, N> {}
// SAFETY: as above.
unsafe impl<K: Send + Sync, N: Send + Sync> Sync for BufferHead<K, N> {}

impl<K, N: Copy> BufferSlab<K, N> {
    /// Cuts `pages` into `count` buffers of `size` bytes. `None` if the pages do not hold as much.
    pub(crate) fn new(
        pages: &SlabPages,
        size: u32,
        count: u32,
        owner: K,
        common: N,
    ) -> Option<Arc<BufferSlab<K, N>>> {
        let total = (size as usize).checked_mul(count as usize)?;
        if total > pages.length || count == u32::MAX {
            return None;
        }
        Some(Arc::new_cyclic(|slab| {
            let head = |index: u32| BufferHead {
                start: pages.mapping.as_mut_ptr().wrapping_add(index as usize * size as usize),
                common,
                slab: slab.as_ptr(),
                index,
                next: AtomicU32::new(if index + 1 < count { index + 2 } else { 0 }),
                holders: AtomicU32::new(0),
            };
            BufferSlab {
                owner,
                _pages: pages.mapping.clone(),
                size,
                free: AtomicU64::new(u64::from(count.min(1))),
                heads: (0..count).map(head).collect(),
            }
        }))
    }
}

impl<K, N> BufferSlab<K, N> {
    pub(crate) fn owner(&self) -> &K {
        &self.owner
    }

    /// Bytes of a buffer.
    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    /// The number of buffers.
    pub(crate) fn count(&self) -> usize {
        self.heads.len()
    }

    /// The number of buffers that are free right now.
    pub(crate) fn idle(&self) -> usize {
        let idle = |head: &&BufferHead<K, N>| head.holders.load(Ordering::Relaxed) == 0;
        self.heads.iter().filter(idle).count()
    }

    /// Takes a free buffer.
    #[inline]
    pub(crate) fn take(self: &Arc<Self>) -> Option<SlabBuffer<K, N>> {
        let mut free = self.free.load(Ordering::Acquire);
        loop {
            let head = self.heads.get((free as u32).checked_sub(1)? as usize)?;
            let next = head.next.load(Ordering::Relaxed);
            let changed = list_after(free, next);
            // Acquire pairs with the Release of `give_back`, so that the last owner's accesses come first.
            match self.free.compare_exchange_weak(
                free,
                changed,
                Ordering::Acquire,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    head.holders.store(1, Ordering::Relaxed);
                    // The buffer holds the slab until it is dropped.
                    std::mem::forget(self.clone());
                    return Some(SlabBuffer { head: NonNull::from(head) });
                }
                Err(seen) => free = seen,
            }
        }
    }

    #[inline]
    fn give_back(&self, head: &BufferHead<K, N>) {
        let mut free = self.free.load(Ordering::Relaxed);
        loop {
            head.next.store(free as u32, Ordering::Relaxed);
            let changed = list_after(free, head.index + 1);
            match self.free.compare_exchange_weak(
                free,
                changed,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(seen) => free = seen,
            }
        }
    }
}

/// The list of free buffers after a change of `list`: it begins with `first`, an index plus one, or is empty with 0.
#[inline]
fn list_after(list: u64, first: u32) -> u64 {
    ((list >> 32) + 1) << 32 | u64::from(first)
}

/// The only owner of a buffer.
pub(crate) struct SlabBuffer<K, N> {
    /// The head, in the slab that this buffer keeps alive.
    head: NonNull<BufferHead<K, N>>,
}

// SAFETY: it owns the bytes alone, and a count of the slab's `Arc`.
unsafe impl<K: Send + Sync, N: Send + Sync> Send for SlabBuffer<K, N> {}
// SAFETY: `&SlabBuffer` gives `&[u8]`, `&K` and `&N`.
unsafe impl<K: Send + Sync, N: Send + Sync> Sync for SlabBuffer<K, N> {}

impl<K, N> SlabBuffer<K, N> {
    #[inline(always)]
    fn head(&self) -> &BufferHead<K, N> {
        // SAFETY: the slab does not move its heads, and this holds the slab.
        unsafe { self.head.as_ref() }
    }

    /// The buffer's copy of the value that all buffers share.
    #[inline(always)]
    pub(crate) fn common(&self) -> &N {
        &self.head().common
    }

    #[inline]
    pub(crate) fn slab(&self) -> &BufferSlab<K, N> {
        // SAFETY: this holds the slab, by the clone that `take` forgot or `share` made.
        unsafe { &*self.head().slab }
    }

    /// The address of the buffer's first byte.
    #[inline(always)]
    pub(crate) fn address(&self) -> u64 {
        self.head().start.addr() as u64
    }

    /// The bytes of the buffer.
    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        let (start, size) = (self.head().start, self.slab().size as usize);
        // SAFETY: `new` checked that all buffers lie in the pages, which the slab keeps and which began as
        // zeros; nobody else writes the buffer.
        unsafe { std::slice::from_raw_parts(start, size) }
    }

    /// The bytes of the buffer, to write.
    #[inline]
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let (start, size) = (self.head().start, self.slab().size as usize);
        // SAFETY: as in `bytes`, and borrowed exclusively with the only owner.
        unsafe { std::slice::from_raw_parts_mut(start, size) }
    }

    /// Gives up the right to write, so that the buffer can have many owners.
    pub(crate) fn share(self) -> SharedSlabBuffer<K, N> {
        SharedSlabBuffer(self)
    }
}

impl<K, N> Drop for SlabBuffer<K, N> {
    // Out of line, with the pointer by value, so that a buffer that is moved on stays in registers: 3 instructions of an
    // owned receive, and 30 to 70 at each place that may drop one.
    #[inline(always)]
    fn drop(&mut self) {
        release(self.head);
    }
}

/// Drops one owner of the buffer.
#[inline(never)]
fn release<K, N>(head: NonNull<BufferHead<K, N>>) {
    let buffer = ManuallyDrop::new(SlabBuffer { head });
    {
        let head = buffer.head();
        // The last owner gives the buffer back after all others have finished: Release by each, Acquire by
        // the last. A single owner needs no exchange, because nobody else can clone it.
        let last = head.holders.load(Ordering::Acquire) == 1
            || head.holders.fetch_sub(1, Ordering::AcqRel) == 1;
        let slab = head.slab;
        if last {
            head.holders.store(0, Ordering::Relaxed);
            buffer.slab().give_back(head);
        }
        // SAFETY: the pointer came from an `Arc`, one of whose counts is this buffer's.
        unsafe { Arc::decrement_strong_count(slab) };
    }
}

/// One of several owners of a buffer, all of which only read it.
pub(crate) struct SharedSlabBuffer<K, N>(SlabBuffer<K, N>);

impl<K, N> SharedSlabBuffer<K, N> {
    /// The buffer's copy of the value that all buffers share.
    #[inline(always)]
    pub(crate) fn common(&self) -> &N {
        self.0.common()
    }

    /// The address of the buffer's first byte.
    #[inline(always)]
    pub(crate) fn address(&self) -> u64 {
        self.0.address()
    }

    /// The bytes of the buffer.
    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    /// The buffer with the right to write, if this is its only owner.
    pub(crate) fn unshare(self) -> Result<SlabBuffer<K, N>, Self> {
        // Acquire pairs with the Release of the owners that were dropped. A single owner cannot be cloned by
        // anybody else.
        match self.0.head().holders.load(Ordering::Acquire) == 1 {
            true => Ok(self.0),
            false => Err(self),
        }
    }
}

impl<K, N> Clone for SharedSlabBuffer<K, N> {
    fn clone(&self) -> Self {
        let head = self.0.head();
        let before = head.holders.fetch_add(1, Ordering::Relaxed);
        if before > u32::MAX / 2 {
            // The caller forgot billions of clones. A count that wraps would free a buffer in use.
            abort("uverbs: a buffer has 2,147,483,648 owners: aborting\n");
        }
        // SAFETY: the pointer came from an `Arc`, one of whose counts is this buffer's.
        unsafe { Arc::increment_strong_count(head.slab) };
        SharedSlabBuffer(SlabBuffer { head: self.0.head })
    }
}

impl<K, N> fmt::Debug for BufferSlab<K, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferSlab")
            .field("size", &self.size)
            .field("count", &self.count())
            .finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memory::region::Backing;

    fn slab(size: u32, count: u32) -> Arc<BufferSlab<(), ()>> {
        let pages = SlabPages::new(4096, None).unwrap();
        BufferSlab::new(&pages, size, count, (), ()).unwrap()
    }

    #[test]
    fn buffers_do_not_overlap_and_come_back() {
        let slab = slab(64, 3);
        let mut buffers: Vec<_> = std::iter::from_fn(|| slab.take()).collect();
        assert_eq!((buffers.len(), slab.idle()), (3, 0));
        for (n, buffer) in buffers.iter_mut().enumerate() {
            buffer.bytes_mut().fill(n as u8 + 1);
        }
        for (n, buffer) in buffers.iter().enumerate() {
            assert!(buffer.bytes().iter().all(|byte| *byte == n as u8 + 1));
            assert_eq!(buffer.address(), buffer.bytes().as_ptr().addr() as u64);
        }
        let address = buffers[1].address();
        buffers.remove(1);
        assert_eq!(slab.take().unwrap().address(), address);
        drop(buffers);
        assert_eq!(slab.idle(), 3);
    }

    #[test]
    fn a_shared_buffer_comes_back_with_its_last_owner() {
        let slab = slab(16, 1);
        let mut buffer = slab.take().unwrap();
        buffer.bytes_mut()[0] = 9;
        let one = buffer.share();
        let other = one.clone();
        let one = one.unshare().err().unwrap();
        assert_eq!(other.bytes()[0], 9);
        let addresses = [one.address(), other.address()];
        assert_eq!(addresses, [other.bytes().as_ptr().addr() as u64; 2]);
        drop(other);
        let mut buffer = one.unshare().ok().unwrap();
        buffer.bytes_mut()[0] = 8;
        assert!(slab.take().is_none());
        drop(buffer);
        assert!(slab.take().is_some());
    }

    #[test]
    fn a_slab_that_does_not_fit_into_its_pages_is_refused() {
        let pages = SlabPages::new(4096, None).unwrap();
        assert!(BufferSlab::new(&pages, 64, 65, (), ()).is_none());
        assert!(BufferSlab::new(&pages, u32::MAX, u32::MAX - 1, (), ()).is_none());
        assert!(BufferSlab::new(&pages, 64, 0, (), ()).unwrap().take().is_none());
    }

    #[test]
    fn the_region_of_the_pages_contains_every_buffer() {
        let pages = SlabPages::new(10_000, None).unwrap();
        let slab = BufferSlab::new(&pages, 100, 100, (), ()).unwrap();
        let region = Backing::own(pages);
        let buffers: Vec<_> = std::iter::from_fn(|| slab.take()).collect();
        let first = buffers.iter().map(SlabBuffer::address).min();
        let last = buffers.iter().map(SlabBuffer::address).max();
        assert_eq!((first, region.reach()), (Some(region.address()), 10_000));
        assert_eq!(last, Some(region.address() + 9_900));
    }

    /// A thread that read the list before a change must not take its first buffer (ABA): that buffer's successor
    /// may be in use.
    #[test]
    fn a_list_that_was_changed_and_looks_the_same_compares_unequal() {
        let slab = slab(64, 2);
        let mut seen = std::collections::HashSet::new();
        let mut is_new = || seen.insert(slab.free.load(Ordering::Relaxed));
        assert!(is_new());
        for _ in 0..3 {
            let buffers = [slab.take().unwrap(), slab.take().unwrap()];
            for buffer in buffers {
                assert!(is_new());
                drop(buffer);
            }
            assert!(is_new());
            drop(slab.take());
            assert!(is_new());
        }
    }

    #[test]
    fn no_buffer_has_two_owners_on_different_threads() {
        const ROUNDS: u32 = if cfg!(miri) { 20 } else { 1000 };
        let slab = slab(8, 4);
        std::thread::scope(|scope| {
            for id in 0..4u8 {
                let slab = &slab;
                scope.spawn(move || {
                    for _ in 0..ROUNDS {
                        let Some(mut buffer) = slab.take() else { continue };
                        buffer.bytes_mut().fill(id);
                        let shared = buffer.share();
                        let other = shared.clone();
                        assert!(other.bytes().iter().all(|byte| *byte == id));
                        drop((shared, other));
                    }
                });
            }
        });
        assert_eq!(slab.idle(), 4);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::thread;

    /// Two threads take and give back buffers of one slab.
    #[test]
    fn no_buffer_has_two_owners() {
        loom::model(|| {
            let pages = SlabPages::new(4096, None).unwrap();
            let slab = BufferSlab::new(&pages, 8, 2, (), ()).unwrap();
            let other = slab.clone();
            let thread = thread::spawn(move || {
                // Both buffers may be taken.
                drop(other.take());
            });
            let (one, two) = (slab.take(), slab.take());
            if let (Some(one), Some(two)) = (&one, &two) {
                assert_ne!(one.address(), two.address());
            }
            drop((one, two));
            thread.join().unwrap();
            let (one, two) = (slab.take().unwrap(), slab.take().unwrap());
            assert_ne!(one.address(), two.address());
            assert!(slab.take().is_none());
        });
    }
}
