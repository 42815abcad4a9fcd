//! The receive queue of a queue pair: we produce, the device consumes when the doorbell record says
//! so. Nothing is rung.

use super::wqe::{TERMINATOR, data};
use super::wr_ids::SharedQp;
use crate::memory::barrier::udma_to_device;
use crate::memory::doorbell_record::{DoorbellRecord, Gate, RecordWord};
use crate::memory::queue_memory::QueueMemory;
use crate::memory::rq_buffer::RqBuffer;
use crate::memory::sync::{AtomicU64, Ordering};
use crate::memory::wqe_segment::{SEGMENT, WqeSegments};
use crate::provider::RecvCursor;
use crate::wr::{PostError, RecvWr, Sge};
use std::sync::Arc;
use uverbs_uapi::mlx5::wqe::MLX5_RCV_DBR;

#[derive(Debug)]
pub(crate) struct RecvRing {
    // Before the memory, as it is where the kernel's object holds both.
    word: RecordWord<MLX5_RCV_DBR>,
    ring: RqBuffer<AtomicU64, 1>,
    entries: u32,
    max_sge: u32,
    /// Receives posted in all.
    head: u32,
    gate: Gate,
    record: Arc<SharedQp>,
}

/// Where a queue stands in its memory, and how large its receives are.
pub(crate) struct Place {
    /// In bytes.
    pub(crate) offset: usize,
    pub(crate) entries: u32,
    /// Bytes of an entry.
    pub(crate) stride: u32,
    pub(crate) max_sge: u32,
}

impl RecvRing {
    /// `None` if the entries do not fit into the memory, if they or their size are no powers of
    /// two, or if an entry does not take so many pieces.
    pub(crate) fn new(
        memory: Arc<QueueMemory>,
        place: Place,
        dbrec: Arc<DoorbellRecord>,
        record: Arc<SharedQp>,
        gate: Gate,
    ) -> Option<RecvRing> {
        let Place { offset, entries, stride, max_sge } = place;
        let units = stride / SEGMENT as u32;
        if !(1..=units).contains(&max_sge) {
            return None;
        }
        if record.slots().is_some() {
            return None;
        }
        let notes = record.receives.own.notes();
        Some(RecvRing {
            ring: RqBuffer::new(memory, offset, entries, units, notes)?,
            entries,
            max_sge,
            head: 0,
            word: dbrec.word(),
            gate,
            record,
        })
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.entries
    }

    /// Whether receives may be posted here and now; shut in a forked child.
    #[inline(always)]
    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }

    #[inline(always)]
    pub(crate) fn cursor(&self) -> RecvCursor {
        let tail = self.record.receives.own.tail();
        let room = self.entries.wrapping_sub(self.head.wrapping_sub(tail));
        RecvCursor { at: self.head, room, ..RecvCursor::default() }
    }

    /// As [`push`](Self::push) for usual requests that nothing is wrong with; `false`, and nothing
    /// done, for all others. Who calls has seen the gate open.
    #[inline(always)]
    pub(crate) fn try_push(&self, cursor: &mut RecvCursor, recv: &RecvWr<'_>) -> bool {
        if cursor.room == 0 {
            return false;
        }
        let [sge] = recv.sges else { return false };
        if sge.length as i32 <= 0 {
            return false;
        }
        let (entry, note) = self.ring.at(cursor.at);
        // First, or whether there is room for it would be kept at hand meanwhile.
        entry.write_behind(TERMINATOR);
        entry.write::<0>(data(sge));
        noted(cursor, note, recv.wr_id);
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
        let (first, room) = (self.ring.first(cursor.at), self.ring.each());
        scatter_any(self.ring.units(), first, room, self.max_sge, recv.sges)?;
        noted(cursor, self.ring.note(cursor.at), recv.wr_id);
        Ok(())
    }

    /// Shows the device the requests up to the cursor. Who calls has seen the gate open: in a forked
    /// child the record is none of ours.
    #[inline(always)]
    pub(crate) fn publish(&mut self, cursor: RecvCursor) {
        self.head = cursor.at;
        // Pairs with the device reading entries after the record that counts them.
        udma_to_device();
        self.word.set(self.head & 0xffff);
    }

    /// Begins anew, as the device does in state `RESET`.
    pub(crate) fn reset(&mut self) {
        self.head = 0;
        self.record.receives.own.reset();
        self.word.set(0);
    }
}

/// Moves on behind an entry, of which the number of its request is noted.
#[inline(always)]
fn noted(cursor: &mut RecvCursor, note: &AtomicU64, wr_id: u64) {
    note.store(wr_id, Ordering::Relaxed);
    cursor.at = cursor.at.wrapping_add(1);
    cursor.room -= 1;
}

/// Writes the pieces of a receive to `room` units from `at` on, and marks their end if there is
/// room for a mark. `max` pieces fit, one at least.
pub(super) fn scatter_any(
    units: &WqeSegments,
    at: u32,
    room: u32,
    max: u32,
    sges: &[Sge],
) -> Result<(), PostError> {
    if sges.len() > max as usize {
        return Err(PostError::TooManySge { max });
    }
    let mut next = at;
    let mut length = 0u64;
    for sge in sges {
        length += u64::from(sge.length);
        // To the device a length of zero is 2^31.
        if sge.length > 0 {
            units.write(next, data(sge));
            next = next.wrapping_add(1);
        }
    }
    if next.wrapping_sub(at) < room {
        units.write(next, TERMINATOR);
    }
    // The uppermost bit of a piece's length would make it something else.
    if length > i32::MAX as u64 { Err(PostError::TooLong) } else { Ok(()) }
}
