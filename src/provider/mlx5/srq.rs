//! Shared receive queues: entries that form a linked list, in which the device finds the next.
//!
//! Who posts takes entries from the front of the list. Whoever polls a completion of any of the
//! queue pairs gives the entry back to [`Slots`], and who posts puts it at the end of the list. The
//! last entry stays where it is until something is put behind it, because the device follows its
//! link.

use super::rq::{scatter, scatter_any};
use super::wqe::{link, linked};
use crate::mem::barrier::udma_to_device;
use crate::mem::dbrec::{DoorbellRecord, Gate, RecordWord};
use crate::mem::masked::Masked;
use crate::mem::queue::{QueueMemory, UNIT, Units};
use crate::mem::sync::{AtomicU32, AtomicU64, Ordering};
use crate::provider::Cursor;
use crate::wr::{PostError, Recv};
use std::sync::Arc;

/// No entry.
const NONE: u32 = u32::MAX;

/// What who posts and those who poll share: the numbers that the user gave, and the entries that
/// come back.
#[derive(Debug)]
pub(crate) struct Slots {
    wr_ids: Masked<AtomicU64>,
    /// Which entry came back before.
    before: Masked<AtomicU32>,
    /// The entry that came back last.
    last: AtomicU32,
}

impl Slots {
    fn new(entries: u32) -> Slots {
        Slots {
            wr_ids: Masked::new(entries),
            before: Masked::new(entries),
            last: AtomicU32::new(NONE),
        }
    }

    /// Gives the entry back that a completion names, and answers the number of its request. Any
    /// number of threads may do so at once.
    #[inline]
    pub(crate) fn complete(&self, at: u32) -> u64 {
        let at = at & (self.wr_ids.len() - 1);
        let wr_id = self.wr_ids.at(at).load(Ordering::Relaxed);
        let mut last = self.last.load(Ordering::Relaxed);
        loop {
            self.before.at(at).store(last, Ordering::Relaxed);
            // Release: the number is read, and the entry before is noted, before the poster finds
            // the entry. The list is only ever taken whole, so no entry is compared after it was
            // used again.
            match self.last.compare_exchange_weak(last, at, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return wr_id,
                Err(seen) => last = seen,
            }
        }
    }

    /// Takes all entries that came back.
    #[inline]
    fn take(&self, mut put: impl FnMut(u32)) {
        if self.last.load(Ordering::Relaxed) == NONE {
            return;
        }
        // Acquire pairs with the Release of `complete`.
        let mut at = self.last.swap(NONE, Ordering::Acquire);
        // A device that names an entry twice makes the list a circle.
        for _ in 0..self.wr_ids.len() {
            if at == NONE {
                return;
            }
            let before = self.before.at(at).load(Ordering::Relaxed);
            put(at);
            at = before;
        }
    }
}

/// Links `entries` of `stride` bytes, both powers of two, from the first to the last; `None` if
/// they do not fit into `memory`. To be done before the device knows them.
pub(crate) fn prepare(memory: &Arc<QueueMemory>, entries: u32, stride: u32) -> Option<Units> {
    let shift = stride / UNIT as u32;
    if !entries.is_power_of_two() || entries > 1 << 16 || !shift.is_power_of_two() || shift < 2 {
        return None;
    }
    let units = Units::new(memory.clone(), 0, entries.checked_mul(shift)?)?;
    for entry in 0..entries {
        units.write(entry * shift, link((entry + 1) & (entries - 1)));
    }
    Some(units)
}

/// The poster's side of a shared receive queue.
#[derive(Debug)]
pub(crate) struct SrqRing {
    // Before the memory, as it is where the kernel's object holds both.
    word: RecordWord<0>,
    units: Units,
    /// Units of an entry, as a shift.
    stride: u8,
    /// Units of an entry after its link.
    room: u32,
    max_sge: u32,
    /// One less than the entries.
    capacity: u32,
    /// The entry that is posted next.
    head: u32,
    /// The last entry of the list.
    tail: u32,
    /// Entries that can be posted: all of the list but the last.
    free: u32,
    /// Receives posted in all.
    posted: u32,
    wr_ids: Masked<AtomicU64>,
    gate: Gate,
    slots: Arc<Slots>,
}

impl SrqRing {
    /// Takes what [`prepare`] made.
    pub(crate) fn new(
        units: Units,
        entries: u32,
        stride: u32,
        max_sge: u32,
        dbrec: Arc<DoorbellRecord>,
        gate: Gate,
    ) -> SrqRing {
        let stride = stride / UNIT as u32;
        let slots = Arc::new(Slots::new(entries));
        // There are no states to wait for.
        gate.word().store(1, std::sync::atomic::Ordering::Relaxed);
        SrqRing {
            units,
            stride: stride.trailing_zeros() as u8,
            room: stride - 1,
            // The first unit of an entry is its link.
            max_sge: max_sge.min(stride - 1),
            capacity: entries - 1,
            head: 0,
            tail: entries - 1,
            free: entries - 1,
            posted: 0,
            word: dbrec.word(),
            wr_ids: slots.wr_ids.clone(),
            gate,
            slots,
        }
    }

    /// What those share who poll for the receives of this queue.
    pub(crate) fn slots(&self) -> &Arc<Slots> {
        &self.slots
    }

    /// Shut in a forked child.
    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Where the next receive goes, after what came back was put at the end of the list. Not to be
    /// called in a forked child.
    #[inline(always)]
    pub(crate) fn cursor(&mut self) -> Cursor {
        self.collect();
        Cursor { at: self.head, room: self.free, ..Cursor::default() }
    }

    #[inline]
    fn collect(&mut self) {
        let SrqRing { units, stride, tail, free, capacity, slots, .. } = self;
        slots.take(|entry| {
            // A device that names entries which it never had cannot make the list longer than it is.
            if *free < *capacity {
                units.write(*tail << *stride, link(entry));
                *tail = entry;
                *free += 1;
            }
        });
    }

    /// As [`push`](Self::push) for usual requests that nothing is wrong with; `false`, and nothing
    /// done, for all others. Who calls has seen the gate open.
    #[inline(always)]
    pub(crate) fn try_push(&self, cursor: &mut Cursor, recv: &Recv<'_>) -> bool {
        if cursor.room == 0 {
            return false;
        }
        let unit = cursor.at << self.stride;
        // Before anything is written, so that the way to it need not be found twice.
        let next = linked(self.units.read(unit));
        if !scatter(&self.units, unit.wrapping_add(1), self.room, recv.sges) {
            return false;
        }
        self.noted(cursor, recv.wr_id, next);
        true
    }

    /// Writes a request where the cursor stands; after an error the cursor has not moved.
    pub(crate) fn push(&self, cursor: &mut Cursor, recv: &Recv<'_>) -> Result<(), PostError> {
        // A batch may be older than the fork.
        if self.gate.is_shut() {
            return Err(PostError::Forked);
        }
        if cursor.room == 0 {
            return Err(PostError::Full);
        }
        let unit = cursor.at << self.stride;
        scatter_any(&self.units, unit.wrapping_add(1), self.room, self.max_sge, recv.sges)?;
        self.noted(cursor, recv.wr_id, linked(self.units.read(unit)));
        Ok(())
    }

    #[inline(always)]
    fn noted(&self, cursor: &mut Cursor, wr_id: u64, next: u32) {
        self.wr_ids.at(cursor.at).store(wr_id, Ordering::Relaxed);
        cursor.at = next;
        cursor.room -= 1;
    }

    /// Shows the device the requests up to the cursor. Who calls has seen the gate open: in a forked
    /// child the record is none of ours.
    #[inline(always)]
    pub(crate) fn publish(&mut self, cursor: Cursor) {
        self.posted = self.posted.wrapping_add(self.free - cursor.room);
        self.head = cursor.at;
        self.free = cursor.room;
        // Pairs with the device reading entries after the record that counts them.
        udma_to_device();
        self.word.set(self.posted & 0xffff);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::mem::sync::Touched;
    use loom::sync::Arc;
    use loom::thread;

    /// Two pollers give entries back while the poster takes: each entry comes back once, and its
    /// number was read before. That numbers are atomics hides from loom when they are read too
    /// late; `held` is read and written with them.
    #[test]
    fn two_give_back_while_one_takes() {
        loom::model(|| {
            let slots = Arc::new(Slots::new(2));
            let held = Arc::new([Touched::new(), Touched::new()]);
            slots.wr_ids.at(0).store(10, Ordering::Relaxed);
            slots.wr_ids.at(1).store(11, Ordering::Relaxed);
            let pollers: Vec<_> = (0..2u32)
                .map(|at| {
                    let (slots, held) = (slots.clone(), held.clone());
                    thread::spawn(move || {
                        held[at as usize].read();
                        assert_eq!(slots.complete(at), u64::from(at) + 10);
                    })
                })
                .collect();
            let poster = {
                let slots = slots.clone();
                thread::spawn(move || {
                    let mut seen = Vec::new();
                    slots.take(|at| {
                        seen.push(at);
                        // The entry is posted again at once.
                        held[at as usize].write();
                        slots.wr_ids.at(at).store(99, Ordering::Relaxed);
                    });
                    seen
                })
            };
            for poller in pollers {
                poller.join().unwrap();
            }
            let mut seen = poster.join().unwrap();
            slots.take(|at| seen.push(at));
            seen.sort_unstable();
            assert_eq!(seen, [0, 1]);
        });
    }
}
