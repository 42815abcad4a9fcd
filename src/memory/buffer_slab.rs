//! Memory of equal buffers, each of which has one owner at a time, or many who only read it.
//!
//! Pieces are taken and come back from any thread, without a lock and without an allocation. What
//! a device does to the memory is not known here: whoever hands a buffer to one must keep it until
//! the device is done, and must register the memory without rights for peers to write, or the
//! slices that buffers give would not be what Rust takes slices for.

use super::region::StableBytes;
use super::sync::{AtomicU32, AtomicU64, Ordering};
use memmap2::{MmapOptions, MmapRaw};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

/// The pages under a slab, shared with the region that makes a device reach them. Nobody touches
/// them through the region.
#[derive(Clone)]
pub(crate) struct Pages(Arc<MmapRaw>);

impl Pages {
    /// `length` zeroed bytes; with `huge` in pages of the system's default huge size, of which
    /// `length` must be a multiple.
    pub(crate) fn new(length: usize, huge: bool) -> std::io::Result<Pages> {
        let mut options = MmapOptions::new();
        options.len(length);
        if huge {
            options.huge(None);
        }
        Ok(Pages(Arc::new(MmapRaw::from(options.map_anon()?))))
    }
}

// SAFETY: a mapping stays where it is as long as somebody holds it. Its buffers are accessed, but
// by those who own them and never while a device may write them, and through the region by nobody:
// who registers these pages keeps the region to themselves.
unsafe impl StableBytes for Pages {
    type Item = u8;

    fn items(&mut self) -> NonNull<[u8]> {
        let start = NonNull::new(self.0.as_mut_ptr()).unwrap_or(NonNull::dangling());
        NonNull::slice_from_raw_parts(start, self.0.len())
    }
}

/// Equal buffers of memory, and `K`: what belongs to all of them.
pub(crate) struct BufferSlab<K, N> {
    /// First, so that a device lets go of the pages before they go.
    keep: K,
    _pages: Arc<MmapRaw>,
    size: u32,
    /// Above, how often a buffer was taken or came back, so that a list that looks the same was not
    /// changed meanwhile; below, one more than the buffer that came back last.
    free: AtomicU64,
    heads: Box<[Head<K, N>]>,
}

/// What is known of one buffer, on a cache line of its own: the way from a buffer to what a request
/// asks of it is one load long.
#[repr(align(64))]
struct Head<K, N> {
    start: *mut u8,
    near: N,
    /// Alive as long as a buffer of it is.
    slab: *const BufferSlab<K, N>,
    index: u32,
    /// One more than the buffer behind this in the list of free ones.
    next: AtomicU32,
    /// How many hold it: one, but for those that are shared.
    holders: AtomicU32,
}

// SAFETY: the pointers are to memory that is accessed by those who own buffers alone, and to the slab,
// which is `Sync` if `K` and `N` are.
unsafe impl<K: Send + Sync, N: Send + Sync> Send for Head<K, N> {}
// SAFETY: as above.
unsafe impl<K: Send + Sync, N: Send + Sync> Sync for Head<K, N> {}

impl<K, N: Copy> BufferSlab<K, N> {
    /// Cuts `pages` into `count` buffers of `size` bytes, each with a copy of `near` at hand. `None`
    /// if they do not hold as much.
    pub(crate) fn new(
        pages: &Pages,
        size: u32,
        count: u32,
        keep: K,
        near: N,
    ) -> Option<Arc<BufferSlab<K, N>>> {
        let total = (size as usize).checked_mul(count as usize)?;
        if total > pages.0.len() || count == u32::MAX {
            return None;
        }
        Some(Arc::new_cyclic(|slab| {
            let head = |index: u32| Head {
                start: pages.0.as_mut_ptr().wrapping_add(index as usize * size as usize),
                near,
                slab: slab.as_ptr(),
                index,
                next: AtomicU32::new(if index + 1 < count { index + 2 } else { 0 }),
                holders: AtomicU32::new(0),
            };
            BufferSlab {
                keep,
                _pages: pages.0.clone(),
                size,
                free: AtomicU64::new(u64::from(count.min(1))),
                heads: (0..count).map(head).collect(),
            }
        }))
    }
}

impl<K, N> BufferSlab<K, N> {
    pub(crate) fn keep(&self) -> &K {
        &self.keep
    }

    /// Bytes of a buffer.
    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    /// How many buffers there are in all.
    pub(crate) fn count(&self) -> usize {
        self.heads.len()
    }

    /// How many buffers nobody holds right now.
    pub(crate) fn idle(&self) -> usize {
        let idle = |head: &&Head<K, N>| head.holders.load(Ordering::Relaxed) == 0;
        self.heads.iter().filter(idle).count()
    }

    /// A buffer that nobody holds.
    #[inline]
    pub(crate) fn take(self: &Arc<Self>) -> Option<SlabBuffer<K, N>> {
        let mut free = self.free.load(Ordering::Acquire);
        loop {
            let head = self.heads.get((free as u32).checked_sub(1)? as usize)?;
            let next = head.next.load(Ordering::Relaxed);
            let changed = ((free >> 32) + 1) << 32 | u64::from(next);
            // Acquire pairs with the Release of `put`: what the last owner did is done.
            match self.free.compare_exchange_weak(
                free,
                changed,
                Ordering::Acquire,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    head.holders.store(1, Ordering::Relaxed);
                    // One more holds the slab, and says so until the buffer is dropped.
                    std::mem::forget(self.clone());
                    return Some(SlabBuffer { head: NonNull::from(head) });
                }
                Err(seen) => free = seen,
            }
        }
    }

    #[inline]
    fn put(&self, head: &Head<K, N>) {
        let mut free = self.free.load(Ordering::Relaxed);
        loop {
            head.next.store(free as u32, Ordering::Relaxed);
            let changed = ((free >> 32) + 1) << 32 | u64::from(head.index + 1);
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

/// One buffer, and its only owner.
pub(crate) struct SlabBuffer<K, N> {
    /// Of a slab that this holds.
    head: NonNull<Head<K, N>>,
}

// SAFETY: a buffer is memory that it owns alone, and a share of the slab.
unsafe impl<K: Send + Sync, N: Send + Sync> Send for SlabBuffer<K, N> {}
// SAFETY: `&SlabBuffer` gives `&[u8]`, `&K` and `&N`.
unsafe impl<K: Send + Sync, N: Send + Sync> Sync for SlabBuffer<K, N> {}

impl<K, N> SlabBuffer<K, N> {
    #[inline(always)]
    fn head(&self) -> &Head<K, N> {
        // SAFETY: the slab holds its heads in place, and this holds the slab.
        unsafe { self.head.as_ref() }
    }

    /// What was put near all buffers.
    #[inline(always)]
    pub(crate) fn near(&self) -> &N {
        &self.head().near
    }

    #[inline]
    pub(crate) fn slab(&self) -> &BufferSlab<K, N> {
        // SAFETY: this holds the slab, by the clone that `take` forgot or `share` made.
        unsafe { &*self.head().slab }
    }

    /// The address of its first byte.
    #[inline(always)]
    pub(crate) fn address(&self) -> u64 {
        self.head().start.addr() as u64
    }

    /// All of it.
    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        let (start, size) = (self.head().start, self.slab().size as usize);
        // SAFETY: `new` checked that all buffers lie in the pages, which the slab keeps and which were
        // zeroed; nobody else has the buffer.
        unsafe { std::slice::from_raw_parts(start, size) }
    }

    /// All of it, to write.
    #[inline]
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let (start, size) = (self.head().start, self.slab().size as usize);
        // SAFETY: as in `bytes`, and borrowed exclusively with the only owner.
        unsafe { std::slice::from_raw_parts_mut(start, size) }
    }

    /// Gives up on writing it, to have many owners.
    pub(crate) fn share(self) -> SharedSlabBuffer<K, N> {
        SharedSlabBuffer(self)
    }
}

impl<K, N> Drop for SlabBuffer<K, N> {
    // By value and out of line: a buffer that was handed on in between stays in registers.
    #[inline(always)]
    fn drop(&mut self) {
        let_go(self.head);
    }
}

/// Gives up the share in a buffer that the caller has, and forgets.
#[inline(never)]
fn let_go<K, N>(head: NonNull<Head<K, N>>) {
    let buffer = ManuallyDrop::new(SlabBuffer { head });
    {
        let head = buffer.head();
        // Release, and Acquire by the last: it puts the buffer away after everybody has finished. Who
        // is alone, as Acquire tells, needs no exchange: nobody else can make new ones meanwhile.
        let last = head.holders.load(Ordering::Acquire) == 1
            || head.holders.fetch_sub(1, Ordering::AcqRel) == 1;
        let slab = head.slab;
        if last {
            head.holders.store(0, Ordering::Relaxed);
            buffer.slab().put(head);
        }
        // SAFETY: the pointer is an `Arc`'s, and one of its counts is this buffer's.
        unsafe { Arc::decrement_strong_count(slab) };
    }
}

/// One buffer, and one of its owners, who only read it.
pub(crate) struct SharedSlabBuffer<K, N>(SlabBuffer<K, N>);

impl<K, N> SharedSlabBuffer<K, N> {
    /// What was put near all buffers.
    #[inline(always)]
    pub(crate) fn near(&self) -> &N {
        self.0.near()
    }

    /// The address of its first byte.
    #[inline(always)]
    pub(crate) fn address(&self) -> u64 {
        self.0.address()
    }

    /// All of it.
    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    /// The buffer for its only owner, if this is the only one.
    pub(crate) fn unshare(self) -> Result<SlabBuffer<K, N>, Self> {
        // Acquire pairs with the Release of those who have dropped theirs. Nobody else can make
        // new ones meanwhile.
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
            // Only by forgetting clones: a count that wraps would free what is in use.
            std::process::abort();
        }
        // SAFETY: the pointer is an `Arc`'s, one of whose counts is this buffer's.
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

    fn slab(size: u32, count: u32) -> Arc<BufferSlab<(), ()>> {
        let pages = Pages::new(4096, false).unwrap();
        BufferSlab::new(&pages, size, count, (), ()).unwrap()
    }

    #[test]
    fn pieces_are_apart_and_come_back() {
        let slab = slab(64, 3);
        let mut buffers: Vec<_> = std::iter::from_fn(|| slab.take()).collect();
        assert_eq!((buffers.len(), slab.idle()), (3, 0));
        for (n, buffer) in buffers.iter_mut().enumerate() {
            buffer.bytes_mut().fill(n as u8 + 1);
        }
        for (n, buffer) in buffers.iter().enumerate() {
            assert!(buffer.bytes().iter().all(|byte| *byte == n as u8 + 1));
        }
        let address = buffers[1].address();
        buffers.remove(1);
        assert_eq!(slab.take().unwrap().address(), address);
        drop(buffers);
        assert_eq!(slab.idle(), 3);
    }

    #[test]
    fn what_is_shared_comes_back_with_the_last() {
        let slab = slab(16, 1);
        let mut buffer = slab.take().unwrap();
        buffer.bytes_mut()[0] = 9;
        let one = buffer.share();
        let other = one.clone();
        let one = one.unshare().err().unwrap();
        assert_eq!(other.bytes()[0], 9);
        drop(other);
        let mut buffer = one.unshare().ok().unwrap();
        buffer.bytes_mut()[0] = 8;
        assert!(slab.take().is_none());
        drop(buffer);
        assert!(slab.take().is_some());
    }

    #[test]
    fn a_slab_is_no_larger_than_its_pages() {
        let pages = Pages::new(4096, false).unwrap();
        assert!(BufferSlab::new(&pages, 64, 65, (), ()).is_none());
        assert!(BufferSlab::new(&pages, u32::MAX, u32::MAX - 1, (), ()).is_none());
        assert!(BufferSlab::new(&pages, 64, 0, (), ()).unwrap().take().is_none());
    }

    #[test]
    fn many_threads_take_and_give() {
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

    /// Two threads take and give back buffers of one slab; no buffer has two owners.
    #[test]
    fn take_and_give_back() {
        loom::model(|| {
            let pages = Pages::new(4096, false).unwrap();
            let slab = BufferSlab::new(&pages, 8, 2, (), ()).unwrap();
            let other = slab.clone();
            let thread = thread::spawn(move || {
                // Both may be taken.
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
