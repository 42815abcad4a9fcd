//! Memory of queues that a device reads or writes by itself.
//!
//! A ring holds an `Arc` of the memory. The owner of the kernel's object holds another one, which it drops
//! only after the kernel confirmed that the object is gone. The rings that are laid into it,
//! [`WqeSegments`](super::wqe_segment::WqeSegments) and [`Wqebbs`](super::wqebb::Wqebbs) of requests and
//! [`CqBuffer`](super::cq_buffer::CqBuffer) of completions, check once that they fit, and then mask every
//! index, so that no index can leave the memory. Only data longer than a WQEBB is compared with the end, to
//! see whether it wraps around.

use super::shared_pages::{self, PageRange};
use crate::sync::fork::Epoch;
use memmap2::MmapRaw;
use rustix::io::Errno;
use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

/// A dma-buf that memory is a part of: that of a queue, or of the device.
#[derive(Debug)]
pub struct DmaBufPart {
    /// The dma-buf, or a duplicate of its file.
    pub file: OwnedFd,
    /// The offset in it where the memory begins, in bytes.
    pub offset: u64,
}

/// Gives custom memory back when nothing uses it any more.
pub(crate) type Release = Box<dyn FnOnce(NonNull<u8>) + Send + Sync>;

/// The owner of the memory, which decides how it is released.
enum Keeper {
    PageRange(ManuallyDrop<PageRange>),
    Pages(ManuallyDrop<MmapRaw>),
    Custom(Option<Release>),
}

/// The memory of one queue: contiguous, and zeroed when it was made.
pub(crate) struct QueueMemory {
    base: NonNull<u8>,
    length: usize,
    /// The dma-buf that the kernel gets in place of the address, if the memory is part of one.
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
    /// The kernel wipes them in a forked child (`MADV_WIPEONFORK`). As with `MADV_DONTFORK` no page is
    /// shared with the child, so that copy-on-write moves none away from under the device. A guard that the
    /// child inherited reads zeros; with `MADV_DONTFORK` it would fault.
    pub(crate) fn pages(length: usize) -> Result<QueueMemory, Errno> {
        let epoch = Epoch::current()?;
        let page = rustix::param::page_size();
        let length = length.max(1).checked_next_multiple_of(page).ok_or(Errno::NOMEM)?;
        let (base, keeper) = match PageRange::take(length)? {
            Some(range) => (range.base(), Keeper::PageRange(ManuallyDrop::new(range))),
            None => {
                let pages = shared_pages::map(length)?;
                (pages.as_mut_ptr(), Keeper::Pages(ManuallyDrop::new(pages)))
            }
        };
        let base = NonNull::new(base).ok_or(Errno::NOMEM)?;
        // Written once, so that the first request in each page does not fault: the kernel pins memory that a device only
        // reads without making it writable.
        for offset in (0..length).step_by(page) {
            // SAFETY: inside the memory.
            let first = unsafe { base.add(offset) };
            // SAFETY: nobody else has the memory yet; it is zero already, so the store changes nothing.
            unsafe { first.write_volatile(0) };
        }
        Ok(QueueMemory { base, length, dmabuf: None, keeper, epoch })
    }

    /// Takes over `length` bytes at `base` and zeroes them: stale bytes would be taken for requests and completions.
    /// `release` is called once, when the last holder is gone, and never in a forked child.
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

    /// The address of the memory, as commands carry it.
    pub(crate) fn addr(&self) -> u64 {
        self.base.as_ptr().expose_provenance() as u64
    }

    /// The same memory, which commands name by `dmabuf` if there is one.
    pub(crate) fn with_dmabuf(mut self, dmabuf: Option<DmaBufPart>) -> QueueMemory {
        self.dmabuf = dmabuf;
        self
    }

    /// The dma-buf that backs the memory, and the offset where the memory begins.
    pub(crate) fn dmabuf(&self) -> Option<&DmaBufPart> {
        self.dmabuf.as_ref()
    }

    /// The length in bytes.
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
            Keeper::PageRange(_) | Keeper::Pages(_) if inherited => {}
            // SAFETY: dropped once, here, and not used afterwards.
            Keeper::PageRange(range) => unsafe { ManuallyDrop::drop(range) },
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

#[cfg(test)]
impl QueueMemory {
    /// A page, the smallest queue memory.
    pub(super) fn page() -> std::sync::Arc<QueueMemory> {
        std::sync::Arc::new(QueueMemory::pages(1).unwrap())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::wqe_segment::{SEGMENT, WqeSegments};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn pages_are_whole_and_zero() {
        let memory = Arc::new(QueueMemory::pages(5000).unwrap());
        assert_eq!(memory.len() % rustix::param::page_size(), 0);
        assert!(memory.len() >= 5000);
        let segments = WqeSegments::new(memory, 0, 256).unwrap();
        assert!((0..256).all(|segment| segments.read(segment) == [0, 0]));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it counts page faults")]
    fn first_writes_do_not_fault() {
        use nix::sys::resource::{UsageWho, getrusage};
        let faults = || getrusage(UsageWho::RUSAGE_THREAD).unwrap().minor_page_faults();
        let page = rustix::param::page_size();
        for pages in [8, 512] {
            let segments = (pages * page / SEGMENT) as u32;
            let faults_of_writes = || {
                let memory = Arc::new(QueueMemory::pages(pages * page).unwrap());
                let ring = WqeSegments::new(memory, 0, segments).unwrap();
                let before = faults();
                (0..segments).for_each(|segment| ring.write(segment, [1, 2]));
                faults() - before
            };
            // The code's own pages may be new, and a kernel that is short of memory takes some back.
            let least = (0..5).map(|_| faults_of_writes()).min().unwrap();
            assert!(least < 4, "{pages} pages: {least} faults");
        }
    }

    #[test]
    fn custom_memory_is_zeroed_and_released_once_by_the_last_holder() {
        static RELEASED: AtomicUsize = AtomicUsize::new(0);
        // Not a `Box`: moving it would claim unique access to the buffer.
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
        let segments = WqeSegments::new(Arc::new(memory), 0, 16);
        // Eight-byte alignment of the vector does not promise the sixteen of a segment.
        if let Some(segments) = &segments {
            assert!((0..32).all(|segment| segments.read(segment) == [0, 0]));
            assert_eq!(RELEASED.load(Ordering::Relaxed), 0);
        }
        drop(segments);
        assert_eq!(RELEASED.load(Ordering::Relaxed), 1);
    }

    /// Queue memory of a shared chunk, and of a mapping of its own.
    #[test]
    #[cfg_attr(miri, ignore = "Miri seldom gives an address again")]
    fn memory_that_is_dropped_is_lent_again() {
        for length in [1, 1 << 17] {
            let mut seen = std::collections::HashSet::new();
            const ROUNDS: usize = 200;
            for _ in 0..ROUNDS {
                seen.insert(QueueMemory::pages(length).unwrap().addr());
            }
            assert!(seen.len() < ROUNDS / 2, "{} places in {ROUNDS} rounds", seen.len());
        }
    }

    /// Queue memory of a shared chunk, of a mapping of its own, and of an allocator.
    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn memory_that_a_child_drops_stays_mapped_and_is_not_given_back() {
        static RELEASED: AtomicUsize = AtomicUsize::new(0);
        for length in [1, 1 << 17] {
            let mut memory = Some(QueueMemory::pages(length).unwrap());
            let base = memory.as_ref().unwrap().base;
            crate::sync::fork::in_child(|| {
                drop(memory.take());
                // A guard of the parent's may still read it. The kernel ends the child if it is not mapped.
                // SAFETY: inside the memory, which the child never unmaps.
                assert_eq!(unsafe { base.read_volatile() }, 0);
            });
        }
        let mut buffer = [0u64; 8];
        let base = NonNull::from(&mut buffer).cast();
        let release = Box::new(|_: NonNull<u8>| _ = RELEASED.fetch_add(1, Ordering::Relaxed));
        // SAFETY: the array outlives the memory.
        let mut memory = Some(unsafe { QueueMemory::custom(base, 64, release) }.unwrap());
        crate::sync::fork::in_child(|| {
            drop(memory.take());
            assert_eq!(RELEASED.load(Ordering::Relaxed), 0);
        });
        drop(memory);
        assert_eq!(RELEASED.load(Ordering::Relaxed), 1);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_finds_zeros_and_releases_nothing() {
        let memory = QueueMemory::page();
        let segments = WqeSegments::new(memory.clone(), 0, 4).unwrap();
        segments.write(0, [7, 7]);
        crate::sync::fork::in_child(|| {
            assert_eq!(segments.read(0), [0, 0]);
            assert!(memory.epoch().is_over());
            segments.write(0, [9, 9]);
        });
        assert_eq!(segments.read(0), [7, 7]);
    }
}
