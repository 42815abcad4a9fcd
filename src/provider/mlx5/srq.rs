//! Shared receive queues: entries that form a linked list, in which the device finds the next.
//!
//! The device goes on with the entry that the last one was linked to. So who posts fills that one, and
//! links it to any that is free, which is next. Whoever polls a completion of any of the queue pairs
//! gives the entry back to [`Slots`], where who posts finds all of them in a row. One entry is always
//! kept, to be the next.

use super::rq::scatter_any;
use super::wqe::{TERMINATOR, data, link};
use crate::memory::barrier::udma_to_device;
use crate::memory::doorbell_record::{DoorbellRecord, Gate, RecordWord};
use crate::memory::queue_memory::QueueMemory;
use crate::memory::ring_array::RingArray;
use crate::memory::rq_buffer::RqBuffer;
use crate::memory::sync::{AtomicU32, AtomicU64, Ordering};
use crate::memory::wqe_segment::SEGMENT;
use crate::provider::RecvCursor;
use crate::wr::{PostError, RecvWr};
use std::sync::Arc;

/// An entry, as who posts and those who poll know it.
#[derive(Debug, Default)]
struct Slot {
    /// The number that the user gave.
    wr_id: AtomicU64,
    /// The entry behind it, while it is free.
    next: AtomicU32,
}

/// RqBuffer that came back, linked in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    first: u16,
    last: u16,
    count: u32,
}

impl Row {
    #[inline(always)]
    fn of(word: u64) -> Row {
        Row { first: word as u16, last: (word >> 16) as u16, count: (word >> 32) as u32 }
    }

    #[inline(always)]
    fn word(self) -> u64 {
        u64::from(self.count) << 32 | u64::from(self.last) << 16 | u64::from(self.first)
    }
}

/// What who posts and those who poll share: the numbers that the user gave, and the entries that
/// come back.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: RingArray<Slot>,
    /// A [`Row`], the entry that came back last first.
    back: AtomicU64,
}

impl Slots {
    fn new(entries: u32) -> Slots {
        Slots { slots: RingArray::new(entries), back: AtomicU64::new(0) }
    }

    /// Gives the entry back that a completion names, and answers the number of its request. Any
    /// number of threads may do so at once.
    #[inline]
    pub(crate) fn complete(&self, at: u32) -> u64 {
        let at = at & (self.slots.len() - 1);
        let slot = self.slots.at(at);
        let wr_id = slot.wr_id.load(Ordering::Relaxed);
        let mut word = self.back.load(Ordering::Relaxed);
        loop {
            let back = Row::of(word);
            // Behind the last of a row is whatever the poster puts there.
            slot.next.store(back.first.into(), Ordering::Relaxed);
            let first = at as u16;
            let last = if back.count == 0 { first } else { back.last };
            let row = Row { first, last, count: back.count.wrapping_add(1) };
            // Release: the number is read, and the entry behind is noted, before the poster finds
            // the entry. The row is only ever taken whole, so no entry is compared after it was
            // used again.
            match self.back.compare_exchange_weak(
                word,
                row.word(),
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return wr_id,
                Err(seen) => word = seen,
            }
        }
    }

    /// Takes all entries that came back, and puts those `behind` that the poster has.
    #[inline]
    fn take(&self, behind: u32) -> Option<Row> {
        if self.back.load(Ordering::Relaxed) == 0 {
            return None;
        }
        // Acquire pairs with the Release of `complete`.
        let row = Row::of(self.back.swap(0, Ordering::Acquire));
        self.slots.at(row.last.into()).next.store(behind, Ordering::Relaxed);
        Some(row)
    }
}

/// RqBuffer, which begin with a link and a piece of memory.
type Linked = RqBuffer<Slot, 2>;

/// A queue that the device does not know yet.
#[derive(Debug)]
pub(crate) struct Prepared {
    ring: Linked,
    slots: Arc<Slots>,
    entries: u32,
}

/// Links `entries` of `stride` bytes, both powers of two, from the first to the last; `None` if
/// they do not fit into `memory`. To be done before the device knows them.
pub(crate) fn prepare(memory: &Arc<QueueMemory>, entries: u32, stride: u32) -> Option<Prepared> {
    if !entries.is_power_of_two() || entries > 1 << 16 {
        return None;
    }
    let slots = Arc::new(Slots::new(entries));
    let units = stride / SEGMENT as u32;
    let ring = Linked::new(memory.clone(), 0, entries, units, slots.slots.clone())?;
    for at in 0..entries {
        let (entry, slot) = ring.at(at);
        entry.write_half::<0>(link((at + 1) & (entries - 1)));
        slot.next.store(at + 1, Ordering::Relaxed);
    }
    Some(Prepared { ring, slots, entries })
}

/// The poster's side of a shared receive queue.
#[derive(Debug)]
pub(crate) struct SrqRing {
    // Before the memory, as it is where the kernel's object holds both.
    word: RecordWord<0>,
    ring: Linked,
    max_sge: u32,
    /// One less than the entries.
    capacity: u32,
    /// Where the next receive stands, as those before it are posted.
    next: RecvCursor,
    /// Receives posted in all.
    posted: u32,
    gate: Gate,
    slots: Arc<Slots>,
}

impl SrqRing {
    /// Takes what [`prepare`] made.
    pub(crate) fn new(
        prepared: Prepared,
        max_sge: u32,
        dbrec: Arc<DoorbellRecord>,
        gate: Gate,
    ) -> SrqRing {
        let Prepared { ring, slots, entries } = prepared;
        // There are no states to wait for.
        gate.word().store(1, std::sync::atomic::Ordering::Relaxed);
        SrqRing {
            // The first unit of an entry is its link.
            max_sge: max_sge.min(ring.each() - 1),
            ring,
            capacity: entries - 1,
            next: RecvCursor { at: 0, free: 1, room: entries - 1 },
            posted: 0,
            word: dbrec.word(),
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

    /// Whether nothing was ever posted. The count comes round after 2^32 receives, all of which have
    /// completed if there is room for as many as at first.
    pub(crate) fn is_fresh(&self) -> bool {
        self.posted == 0 && self.next.room == self.capacity
    }

    /// Where the next receive goes, with what came back. Not to be called in a forked child.
    #[inline(always)]
    pub(crate) fn cursor(&mut self) -> RecvCursor {
        if let Some(row) = self.slots.take(self.next.free) {
            self.next.free = row.first.into();
            // A device that names entries which it never had cannot make room that there is not.
            self.next.room = self.next.room.wrapping_add(row.count).min(self.capacity);
        }
        self.next
    }

    /// As [`push`](Self::push) for usual requests that nothing is wrong with; `false`, and nothing
    /// done, for all others. Who calls has seen the gate open.
    #[inline(always)]
    pub(crate) fn try_push(&self, cursor: &mut RecvCursor, recv: &RecvWr<'_>) -> bool {
        let [sge] = recv.sges else { return false };
        if sge.length as i32 <= 0 || cursor.room == 0 {
            return false;
        }
        let (entry, slot) = self.ring.at(cursor.at);
        // First, as in the queue of a queue pair.
        entry.write_behind(TERMINATOR);
        entry.write_half::<0>(link(cursor.free));
        entry.write::<1>(data(sge));
        self.noted(cursor, slot, recv.wr_id);
        true
    }

    /// Writes a request where the cursor stands; after an error the cursor has not moved.
    pub(crate) fn push(&self, cursor: &mut RecvCursor, recv: &RecvWr<'_>) -> Result<(), PostError> {
        // A batch may be older than the fork.
        if self.gate.is_shut() {
            return Err(PostError::Forked);
        }
        if cursor.room == 0 {
            return Err(PostError::Full);
        }
        let (first, room) = (self.ring.first(cursor.at), self.ring.each() - 1);
        scatter_any(self.ring.units(), first.wrapping_add(1), room, self.max_sge, recv.sges)?;
        let (entry, slot) = self.ring.at(cursor.at);
        entry.write_half::<0>(link(cursor.free));
        self.noted(cursor, slot, recv.wr_id);
        Ok(())
    }

    /// Moves on to the entry that this one is linked to.
    #[inline(always)]
    fn noted(&self, cursor: &mut RecvCursor, slot: &Slot, wr_id: u64) {
        slot.wr_id.store(wr_id, Ordering::Relaxed);
        cursor.at = cursor.free;
        cursor.free = self.ring.note(cursor.free).next.load(Ordering::Relaxed);
        cursor.room -= 1;
    }

    /// Shows the device the `count` requests up to the cursor. Who calls has seen the gate open: in a
    /// forked child the record is none of ours.
    #[inline(always)]
    pub(crate) fn publish(&mut self, cursor: RecvCursor, count: u32) {
        self.posted = self.posted.wrapping_add(count);
        self.next = cursor;
        // Pairs with the device reading entries after the record that counts them.
        udma_to_device();
        self.word.set(self.posted & 0xffff);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::memory::sync::Touched;
    use loom::sync::Arc;
    use loom::thread;

    /// Two pollers give entries back while the poster takes: each entry comes back once, and its
    /// number was read before. That numbers are atomics hides from loom when they are read too
    /// late; `held` is read and written with them.
    #[test]
    fn two_give_back_while_one_takes() {
        let mut builder = loom::model::Builder::new();
        // All interleavings take minutes; `cargo ci soak loom` explores them.
        if std::env::var_os("UVERBS_LOOM_UNBOUNDED").is_none() {
            builder.preemption_bound = Some(3);
        }
        builder.check(|| {
            let slots = Arc::new(Slots::new(2));
            let held = Arc::new([Touched::new(), Touched::new()]);
            slots.slots.at(0).wr_id.store(10, Ordering::Relaxed);
            slots.slots.at(1).wr_id.store(11, Ordering::Relaxed);
            let pollers: Vec<_> = (0..2u32)
                .map(|at| {
                    let (slots, held) = (slots.clone(), held.clone());
                    thread::spawn(move || {
                        held[at as usize].read();
                        assert_eq!(slots.complete(at), u64::from(at) + 10);
                    })
                })
                .collect();
            // All of a row, and what is behind it.
            let take = |slots: &Slots| {
                let mut seen = Vec::new();
                let Some(row) = slots.take(7) else { return seen };
                let mut at = u32::from(row.first);
                for _ in 0..row.count {
                    seen.push(at);
                    at = slots.slots.at(at).next.load(Ordering::Relaxed);
                }
                assert_eq!((seen.last(), at), (Some(&row.last.into()), 7));
                seen
            };
            let poster = {
                let slots = slots.clone();
                thread::spawn(move || {
                    let seen = take(&slots);
                    for at in &seen {
                        // The entry is posted again at once.
                        held[*at as usize].write();
                        slots.slots.at(*at).wr_id.store(99, Ordering::Relaxed);
                    }
                    seen
                })
            };
            for poller in pollers {
                poller.join().unwrap();
            }
            let mut seen = poster.join().unwrap();
            seen.extend(take(&slots));
            seen.sort_unstable();
            assert_eq!(seen, [0, 1]);
        });
    }
}
