//! Doorbell records: eight bytes of ordinary memory from which a device reads a queue's producer or consumer
//! index.
//!
//! One per cache line, in pages that a context shares: records are written often, and by
//! different threads. The kernel pins the page of a record, so none lies across two.

use super::queue_memory::QueueMemory;
#[cfg(test)]
use super::recorded_order::{RecordedStep, record_step};
use crate::sync::lock::Lock;
use rustix::io::Errno;
use std::ptr::NonNull;
use std::sync::Arc;
use uverbs_uapi::endian::Be32;

/// Bytes of a record.
pub(crate) const RECORD: usize = 8;
/// Bytes between records in a shared page.
const LINE: usize = 64;

/// The doorbell records of a context. Pages stay until the last record and the context are gone. They need no loom
/// model: each call is one step under a lock.
#[derive(Debug)]
pub(crate) struct DoorbellPages {
    free: Lock<Vec<Line>>,
}

#[derive(Debug)]
struct Line {
    page: Arc<QueueMemory>,
    offset: usize,
}

impl DoorbellPages {
    pub(crate) fn new() -> Result<Arc<DoorbellPages>, Errno> {
        Ok(Arc::new(DoorbellPages { free: Lock::default() }))
    }

    /// A record of zeros.
    pub(crate) fn alloc(self: &Arc<Self>) -> Result<DoorbellRecord, Errno> {
        let place = {
            let mut free = self.free.lock().ok_or(Errno::OWNERDEAD)?;
            match free.pop() {
                Some(place) => place,
                None => {
                    let page = Arc::new(QueueMemory::pages(1)?);
                    let offsets = (LINE..page.len()).step_by(LINE).rev();
                    free.extend(offsets.map(|offset| Line { page: page.clone(), offset }));
                    Line { page, offset: 0 }
                }
            }
        };
        let base = place.page.range(place.offset, RECORD, RECORD).ok_or(Errno::INVAL)?;
        let record = DoorbellRecord { base, home: Some((self.clone(), place)), memory: None };
        record.set(0, 0);
        record.set(1, 0);
        Ok(record)
    }
}

/// A doorbell record. Goes back to its pages when it is dropped: keep it until the kernel
/// confirmed that the object which it belongs to is gone.
#[derive(Debug)]
pub(crate) struct DoorbellRecord {
    base: NonNull<u8>,
    home: Option<(Arc<DoorbellPages>, Line)>,
    memory: Option<QueueMemory>,
}

// SAFETY: the record may be written from any thread; each of its words has one writer.
unsafe impl Send for DoorbellRecord {}
// SAFETY: `&DoorbellRecord` stores whole words only, which a device reads.
unsafe impl Sync for DoorbellRecord {}

impl DoorbellRecord {
    /// A record in memory of its own, which is zeroed; `None` unless there are eight bytes at a
    /// multiple of eight, so that they are in one page.
    pub(crate) fn custom(memory: QueueMemory) -> Option<DoorbellRecord> {
        let base = memory.range(0, RECORD, RECORD)?;
        Some(DoorbellRecord { base, home: None, memory: Some(memory) })
    }

    /// The address of the record, as commands carry it.
    pub(crate) fn addr(&self) -> u64 {
        self.base.as_ptr().expose_provenance() as u64
    }

    /// The record's two words, big-endian.
    pub(crate) fn as_ptr(&self) -> *mut u32 {
        self.base.as_ptr().cast()
    }

    /// The record's own memory, if it is not in a shared page.
    pub(crate) fn memory(&self) -> Option<&QueueMemory> {
        self.memory.as_ref()
    }

    /// The byte behind the record in its cache line; `None` if the record is in memory of its own.
    pub(super) fn byte_behind(&self) -> Option<NonNull<u8>> {
        let (_, place) = self.home.as_ref()?;
        place.page.range(place.offset + RECORD, 1, 1)
    }

    /// The word `N`, 0 or 1, for the ring that writes it.
    pub(crate) fn word<const N: usize>(self: &Arc<Self>) -> RecordWord<N> {
        RecordWord { place: self.place(N), record: self.clone() }
    }

    fn place(&self, n: usize) -> *mut Be32 {
        // SAFETY: the record has two words, and `n` is taken modulo two.
        unsafe { self.base.cast::<Be32>().as_ptr().add(n & 1) }
    }

    fn set(&self, n: usize, value: u32) {
        // SAFETY: the word is inside and aligned; volatile because the device reads it.
        unsafe { self.place(n).write_volatile(Be32::new(value)) };
    }

    /// The value of a word.
    #[cfg(test)]
    pub(crate) fn get(&self, n: usize) -> u32 {
        // SAFETY: the word is inside, aligned and initialised.
        unsafe { self.place(n).read_volatile() }.get()
    }
}

impl Drop for DoorbellRecord {
    fn drop(&mut self) {
        if let Some((pages, place)) = self.home.take() {
            match pages.free.lock() {
                Some(mut free) => free.push(place),
                None => std::mem::forget(place),
            }
        }
    }
}

/// One word of a record, written by one ring.
#[derive(Debug)]
pub(crate) struct RecordWord<const N: usize> {
    place: *mut Be32,
    record: Arc<DoorbellRecord>,
}

// SAFETY: see `DoorbellRecord`.
unsafe impl<const N: usize> Send for RecordWord<N> {}
// SAFETY: see `DoorbellRecord`.
unsafe impl<const N: usize> Sync for RecordWord<N> {}

impl<const N: usize> RecordWord<N> {
    pub(crate) fn record(&self) -> &Arc<DoorbellRecord> {
        &self.record
    }

    /// Stores the index for the device. The caller orders the stores that the index announces before it.
    #[inline]
    pub(crate) fn set(&self, value: u32) {
        #[cfg(test)]
        record_step(RecordedStep::Record(N));
        // SAFETY: inside and aligned since `word` made it, and alive as long as `record`; volatile
        // because the device reads it at any time.
        unsafe { self.place.write_volatile(Be32::new(value)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn records_have_a_line_of_their_own_and_come_back() {
        let pages = DoorbellPages::new().unwrap();
        let lines = 2 * rustix::param::page_size() / LINE;
        let records: Vec<_> = (0..lines).map(|_| pages.alloc().unwrap()).collect();
        let places: HashSet<u64> = records.iter().map(DoorbellRecord::addr).collect();
        assert_eq!(places.len(), lines);
        assert!(places.iter().all(|place| place % LINE as u64 == 0));
        drop(records);
        let again: HashSet<u64> =
            (0..lines).map(|_| pages.alloc().unwrap()).map(|record| record.addr()).collect();
        assert!(again.is_subset(&places));
    }

    #[test]
    fn words_are_big_endian_and_begin_as_zero() {
        let pages = DoorbellPages::new().unwrap();
        let record = Arc::new(pages.alloc().unwrap());
        let (receive, send) = (record.word::<0>(), record.word::<1>());
        receive.set(0x0102_0304);
        send.set(5);
        assert_eq!((record.get(0), record.get(1)), (0x0102_0304, 5));
        let addr = record.addr();
        drop((receive, send, record));
        let fresh = pages.alloc().unwrap();
        assert_eq!((fresh.addr(), fresh.get(0), fresh.get(1)), (addr, 0, 0));
    }

    #[test]
    fn a_record_of_its_own_needs_eight_bytes() {
        let record = DoorbellRecord::custom(QueueMemory::pages(8).unwrap()).unwrap();
        let record = Arc::new(record);
        record.word::<0>().set(1 << 31);
        assert_eq!(record.get(0), 1 << 31);
        // A command names the record's dma-buf by this memory.
        assert_eq!(record.memory().map(QueueMemory::addr), Some(record.addr()));
        assert!(DoorbellPages::new().unwrap().alloc().unwrap().memory().is_none());
        let mut short = [0u64; 1];
        let base = NonNull::from(&mut short).cast();
        // SAFETY: the array outlives the memory, which is dropped at the end of the statement.
        let memory = unsafe { QueueMemory::custom(base, 4, Box::new(|_| ())) }.unwrap();
        assert!(DoorbellRecord::custom(memory).is_none());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_drops_records_without_a_trace() {
        let pages = DoorbellPages::new().unwrap();
        let mut record = Some(pages.alloc().unwrap());
        let held = pages.free.lock().unwrap();
        crate::sync::fork::in_child(|| drop(record.take()));
        drop(held);
    }
}
