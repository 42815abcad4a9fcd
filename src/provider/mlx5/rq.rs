//! The receive queue of a queue pair: we produce, the device consumes when the doorbell record says
//! so. Nothing is rung.

use super::record::{Posted, Record, Source};
use super::wqe::{TERMINATOR, data};
use crate::mem::barrier::udma_to_device;
use crate::mem::dbrec::{DoorbellRecord, RecordWord};
use crate::mem::queue::{QueueMemory, UNIT, Units};
use crate::provider::Cursor;
use crate::wr::{PostError, Recv, Sge};
use std::sync::Arc;
use uverbs_uapi::mlx5::wqe::MLX5_RCV_DBR;

#[derive(Debug)]
pub(crate) struct RecvRing {
    units: Units,
    entries: u32,
    /// Units of an entry, as a shift.
    stride: u8,
    max_sge: u32,
    /// Receives posted in all.
    head: u32,
    word: RecordWord<MLX5_RCV_DBR>,
    record: Arc<Record>,
}

impl RecvRing {
    /// `entries` of `stride` bytes, both powers of two, at byte `offset` of `memory`; `None` if
    /// they do not fit there, or if `max_sge` pieces do not fit into one.
    pub(crate) fn new(
        memory: Arc<QueueMemory>,
        offset: usize,
        entries: u32,
        stride: u32,
        max_sge: u32,
        dbrec: Arc<DoorbellRecord>,
        record: Arc<Record>,
    ) -> Option<RecvRing> {
        let units = stride / UNIT as u32;
        if !entries.is_power_of_two() || !units.is_power_of_two() || max_sge > units {
            return None;
        }
        Some(RecvRing {
            units: Units::new(memory, offset, entries.checked_mul(units)?)?,
            entries,
            stride: units.trailing_zeros() as u8,
            max_sge,
            head: 0,
            word: dbrec.word(),
            record,
        })
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.entries
    }

    /// Takes no more requests.
    pub(crate) fn close(&mut self) {
        self.entries = 0;
    }

    #[inline(always)]
    fn posted(&self) -> Option<&Posted> {
        match &self.record.receives {
            Source::Own(posted) => Some(posted),
            Source::Shared(_) => None,
        }
    }

    #[inline(always)]
    pub(crate) fn cursor(&self) -> Cursor {
        let tail = self.posted().map_or(self.head, Posted::tail);
        let room = self.entries.saturating_sub(self.head.wrapping_sub(tail));
        Cursor { at: self.head, room, ..Cursor::default() }
    }

    #[inline(always)]
    pub(crate) fn push(&self, cursor: &mut Cursor, recv: &Recv<'_>) -> Result<(), PostError> {
        // A batch may be older than the fork.
        if self.units.epoch().is_over() {
            return Err(PostError::Forked);
        }
        if cursor.room == 0 {
            return Err(PostError::Full);
        }
        let Some(posted) = self.posted() else { return Err(PostError::SharedReceives) };
        scatter(&self.units, cursor.at << self.stride, 1 << self.stride, self.max_sge, recv.sges)?;
        posted.note(cursor.at, recv.wr_id);
        cursor.at = cursor.at.wrapping_add(1);
        cursor.room -= 1;
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn publish(&mut self, cursor: Cursor) {
        if self.units.epoch().is_over() {
            return;
        }
        self.head = cursor.at;
        // Pairs with the device reading entries after the record that counts them.
        udma_to_device();
        self.word.set(self.head & 0xffff);
    }

    /// Begins anew, as the device does in state `RESET`.
    pub(crate) fn reset(&mut self) {
        self.head = 0;
        if let Some(posted) = self.posted() {
            posted.reset();
        }
        self.word.set(0);
    }
}

/// Writes the pieces of a receive to `room` units from `at` on, and marks their end if there is
/// room for a mark.
#[inline(always)]
pub(super) fn scatter(
    units: &Units,
    at: u32,
    room: u32,
    max: u32,
    sges: &[Sge],
) -> Result<(), PostError> {
    if sges.len() > max as usize {
        return Err(PostError::TooManySge { max });
    }
    let mut length = 0u32;
    for sge in sges {
        length = length.checked_add(sge.length).ok_or(PostError::TooLong)?;
    }
    // The uppermost bit of a piece's length would make it something else.
    if length > i32::MAX as u32 {
        return Err(PostError::TooLong);
    }
    let mut next = at;
    for sge in sges {
        // To the device a length of zero is 2^31.
        if sge.length > 0 {
            units.write(next, data(sge));
            next = next.wrapping_add(1);
        }
    }
    if next.wrapping_sub(at) < room {
        units.write(next, TERMINATOR);
    }
    Ok(())
}
