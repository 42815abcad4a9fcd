//! A mapping whose pages several queues share, so that a queue of a few pages costs no system call.
//!
//! Pairs with [`queue_memory`](super::queue_memory), which takes its memory from here. As there, pages
//! are zero when they are taken, and the kernel wipes them in a forked child.

use crate::sync::fork::{Epoch, wipe_in_children};
use crate::sync::lock::TryLock;
use crate::sync::{AtomicU64, Ordering};
use memmap2::{MmapOptions, MmapRaw};
use rustix::io::Errno;
use std::sync::Arc;

/// Pages of a chunk: one for each bit of a word.
const PAGES: u32 = u64::BITS;
/// Pages of the largest part; a queue that needs more gets a mapping of its own.
const LARGEST: u32 = PAGES / 4;

/// The mapping that parts are taken from. A creation that finds it locked makes a mapping of its own.
static CURRENT: TryLock<Option<Arc<SharedPages>>> = TryLock::new(None);

/// Contiguous pages, with a bit for each page that is taken.
#[derive(Debug)]
struct SharedPages {
    pages: MmapRaw,
    taken: AtomicU64,
    epoch: Epoch,
}

impl SharedPages {
    fn new() -> Result<Arc<SharedPages>, Errno> {
        let epoch = Epoch::current()?;
        let pages = map(PAGES as usize * rustix::param::page_size())?;
        Ok(Arc::new(SharedPages { pages, taken: AtomicU64::new(0), epoch }))
    }

    /// The first `count` pages in a row that are free.
    fn take(self: &Arc<Self>, count: u32) -> Option<PageRange> {
        let run = (1u64 << count) - 1;
        let mut taken = self.taken.load(Ordering::Relaxed);
        loop {
            let first = (0..=PAGES - count).find(|first| taken & run << first == 0)?;
            let after = taken | run << first;
            // Acquire pairs with the Release that gave them back after zeroing them.
            match self.taken.compare_exchange_weak(
                taken,
                after,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(PageRange { chunk: self.clone(), first, count }),
                Err(seen) => taken = seen,
            }
        }
    }
}

/// Maps zeroed pages that the kernel wipes in a forked child.
pub(super) fn map(length: usize) -> Result<MmapRaw, Errno> {
    let pages = MmapOptions::new()
        .len(length)
        .map_anon()
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOMEM))?;
    let pages = MmapRaw::from(pages);
    wipe_in_children(&pages)?;
    Ok(pages)
}

/// Some pages of a chunk. Not to be dropped in a forked child.
#[derive(Debug)]
pub(super) struct PageRange {
    chunk: Arc<SharedPages>,
    first: u32,
    count: u32,
}

impl PageRange {
    /// `length` bytes, a multiple of the page; `None` if that is more than [`LARGEST`] pages, or if
    /// another thread holds the lock.
    pub(super) fn take(length: usize) -> Result<Option<PageRange>, Errno> {
        // Loom's atomics do not outlive a run of a model, and this chunk would.
        if cfg!(loom) {
            return Ok(None);
        }
        let count = length / rustix::param::page_size();
        let Some(count) = u32::try_from(count).ok().filter(|count| *count <= LARGEST) else {
            return Ok(None);
        };
        let Some(mut current) = CURRENT.try_lock() else { return Ok(None) };
        if current.as_ref().is_some_and(|chunk| chunk.epoch.is_over()) {
            // It is the parent's mapping, and guards of it may be left in this child: it stays mapped.
            std::mem::forget(current.take());
        }
        if let Some(part) = current.as_ref().and_then(|chunk| chunk.take(count)) {
            return Ok(Some(part));
        }
        // The old chunk stays as long as its parts do.
        let chunk = current.insert(SharedPages::new()?);
        Ok(chunk.take(count))
    }

    pub(super) fn base(&self) -> *mut u8 {
        let offset = self.first as usize * rustix::param::page_size();
        // SAFETY: the chunk has so many pages.
        unsafe { self.chunk.pages.as_mut_ptr().add(offset) }
    }
}

impl Drop for PageRange {
    fn drop(&mut self) {
        let length = self.count as usize * rustix::param::page_size();
        // SAFETY: the pages are this part's alone, and by the rule of queue memory no device reaches them any more.
        unsafe { self.base().write_bytes(0, length) };
        let run = (1u64 << self.count) - 1;
        // Release: the pages are zero before the next owner takes them.
        self.chunk.taken.fetch_and(!(run << self.first), Ordering::Release);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::sync::AccessProbe;
    use loom::thread;

    /// Two threads take and give back parts of a chunk with two free pages: a page has one owner, and the next
    /// owner sees the stores of the last, such as the zeros.
    #[test]
    fn no_page_has_two_owners() {
        loom::model(|| {
            let chunk = SharedPages::new().unwrap();
            chunk.taken.store(!0b11, Ordering::Relaxed);
            let pages = Arc::new([AccessProbe::new(), AccessProbe::new()]);
            let work = move |counts: &[u32]| {
                for &count in counts {
                    let Some(part) = chunk.take(count) else { continue };
                    (part.first..part.first + count).for_each(|page| pages[page as usize].write());
                }
                chunk
            };
            let other = work.clone();
            let thread = thread::spawn(move || drop(other(&[1, 1])));
            let chunk = work(&[1, 2]);
            thread.join().unwrap();
            assert_eq!(chunk.taken.load(Ordering::Relaxed), !0b11, "all came back");
            assert_eq!(chunk.take(2).map(|part| part.first), Some(0));
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn page() -> usize {
        rustix::param::page_size()
    }

    #[test]
    fn parts_lie_apart_and_come_back_zeroed() {
        let chunk = SharedPages::new().unwrap();
        let (one, two) = (chunk.take(3).unwrap(), chunk.take(2).unwrap());
        assert_eq!(one.base().wrapping_add(3 * page()), two.base());
        let last = one.base().wrapping_add(2 * page());
        // SAFETY: the first byte of its last page.
        unsafe { last.write(7) };
        drop(one);
        let again = chunk.take(3).unwrap();
        assert_eq!((again.first, chunk.taken.load(Ordering::Relaxed)), (0, 0b11111));
        // SAFETY: as above.
        assert_eq!(unsafe { last.read() }, 0);
        let rest = chunk.take(PAGES - 5).unwrap();
        assert!(chunk.take(1).is_none());
        drop((again, two, rest));
        assert_eq!(chunk.taken.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_gap_is_used_if_it_is_long_enough() {
        let chunk = SharedPages::new().unwrap();
        let (one, _two) = (chunk.take(2).unwrap(), chunk.take(1).unwrap());
        drop(one);
        assert_eq!(chunk.take(3).unwrap().first, 3);
        assert_eq!(chunk.take(2).unwrap().first, 0);
    }

    #[test]
    fn large_memory_does_not_share_a_chunk() {
        let largest = LARGEST as usize * page();
        assert!(PageRange::take(largest + page()).unwrap().is_none());
    }

    /// A part of so many bytes. Other tests take parts meanwhile, and a call that finds the chunk
    /// locked has none.
    fn taken(length: usize) -> PageRange {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        loop {
            if let Some(part) = PageRange::take(length).unwrap() {
                return part;
            }
            assert!(std::time::Instant::now() < deadline, "no part of {length} bytes");
            std::thread::yield_now();
        }
    }

    #[test]
    fn small_queues_share_a_mapping() {
        // One chunk may be full in between, with the parts of other tests.
        let parts: Vec<PageRange> = (0..5).map(|_| taken(page())).collect();
        assert!(parts.iter().all(|part| part.count == 1), "{parts:?}");
        let shared = |pair: &[PageRange]| Arc::ptr_eq(&pair[0].chunk, &pair[1].chunk);
        assert!(parts.windows(2).any(shared), "{parts:?}");
        assert_eq!(taken(LARGEST as usize * page()).count, LARGEST, "the largest part");
    }
}
