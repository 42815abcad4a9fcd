//! Receive queues of queue pairs: their size, and the WQEs that this process writes. The device reads
//! the producer index from the doorbell record; no register is rung.

use super::context::Limits;
use super::wqe::{TERMINATOR, data};
use super::wr_ids::SharedQp;
use crate::memory::barrier::udma_to_device;
use crate::memory::doorbell_record::{DoorbellRecord, RecordWord};
use crate::memory::gate::Gate;
use crate::memory::queue_layout::WqLayout;
use crate::memory::queue_memory::QueueMemory;
use crate::memory::rq_buffer::RqBuffer;
use crate::memory::wqe_segment::{SEGMENT, WqeSegments};
use crate::provider::RecvCursor;
use crate::sync::{AtomicU64, Ordering};
use crate::wr::{PostError, RecvWr, RingError, Sge};
use std::sync::Arc;
use uverbs_uapi::mlx5::wqe::{MLX5_RCV_DBR, mlx5_wqe_data_seg};
use uverbs_uapi::qp::ib_uverbs_qp_cap;

/// Bytes of a data segment.
const DATA: u64 = size_of::<mlx5_wqe_data_seg>() as u64;
/// Bytes of the smallest receive queue.
const LEAST: u64 = 64;

/// The size of a receive queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RqSize {
    /// Receives, a power of two; 0 if there is no receive queue.
    pub(crate) entries: u32,
    /// Receives that may be posted at once.
    pub(crate) max_post: u32,
    /// Bytes of a receive, as a power of two.
    pub(crate) stride_log: u32,
    pub(crate) max_sge: u32,
}

impl RqSize {
    pub(crate) fn new(limits: &Limits, cap: &ib_uverbs_qp_cap) -> Result<RqSize, String> {
        if cap.max_recv_wr == 0 {
            return Ok(RqSize::default());
        }
        if cap.max_recv_wr > limits.max_recv_wr {
            return Err(format!(
                "{} receives; the maximum is {}",
                cap.max_recv_wr, limits.max_recv_wr
            ));
        }
        let request = DATA * u64::from(cap.max_recv_sge.max(1));
        let largest = u64::from(limits.max_rq_desc_sz);
        if request > largest {
            return Err(format!(
                "{} entries in a receive; the maximum is {}",
                cap.max_recv_sge,
                largest / DATA
            ));
        }
        let stride = request.next_power_of_two();
        let bytes = (u64::from(cap.max_recv_wr).next_power_of_two() * stride).max(LEAST);
        Ok(RqSize {
            entries: (bytes / stride) as u32,
            max_post: (bytes / stride) as u32,
            stride_log: stride.trailing_zeros(),
            max_sge: (stride / DATA) as u32,
        })
    }

    /// As [`new`](Self::new), for a device that consumes receives out of order: half of the entries stay free, so that none
    /// is written anew while the device has one before it.
    pub(crate) fn out_of_order(limits: &Limits, cap: &ib_uverbs_qp_cap) -> Result<RqSize, String> {
        if cap.max_recv_wr < 2 {
            return RqSize::new(limits, cap);
        }
        if cap.max_recv_wr > limits.max_recv_wr / 2 {
            return Err(format!(
                "{} receives; the maximum is {} with placement out of order",
                cap.max_recv_wr,
                limits.max_recv_wr / 2
            ));
        }
        let twice = ib_uverbs_qp_cap { max_recv_wr: 2 * cap.max_recv_wr, ..*cap };
        let size = RqSize::new(limits, &twice)?;
        Ok(RqSize { max_post: size.entries / 2, ..size })
    }

    pub(crate) fn bytes(&self) -> usize {
        if self.entries == 0 { 0 } else { (self.entries as usize) << self.stride_log }
    }
}

#[derive(Debug)]
pub(crate) struct Mlx5Rq {
    // Declared first, so that the record is dropped before the memory, as in `Mlx5Resources`.
    dbrec: RecordWord<MLX5_RCV_DBR>,
    buffer: RqBuffer<AtomicU64, 1>,
    entries: u32,
    max_post: u32,
    max_sge: u32,
    /// Receives posted in all.
    head: u32,
    pub(super) gate: Gate,
    shared: Arc<SharedQp>,
}

/// The place of a queue in its memory, and the size of its receives.
pub(crate) struct RqLayout {
    /// In bytes.
    pub(crate) offset: usize,
    pub(crate) entries: u32,
    /// Receives that may be posted at once.
    pub(crate) max_post: u32,
    /// Bytes of an entry.
    pub(crate) stride: u32,
    pub(crate) max_sge: u32,
}

impl Mlx5Rq {
    /// `None` if the entries do not fit into the memory, if they or their size are no powers of
    /// two, or if an entry does not take so many SGEs.
    pub(crate) fn new(
        memory: Arc<QueueMemory>,
        place: RqLayout,
        dbrec: Arc<DoorbellRecord>,
        shared: Arc<SharedQp>,
        gate: Gate,
    ) -> Option<Mlx5Rq> {
        let RqLayout { offset, entries, max_post, stride, max_sge } = place;
        let segments = stride / SEGMENT as u32;
        if !(1..=segments).contains(&max_sge) {
            return None;
        }
        if shared.srq_wr_ids().is_some() {
            return None;
        }
        let wr_ids = shared.receives.own.entries();
        Some(Mlx5Rq {
            buffer: RqBuffer::new(memory, offset, entries, segments, wr_ids)?,
            entries,
            max_post,
            max_sge,
            head: 0,
            dbrec: dbrec.word(),
            gate,
            shared,
        })
    }

    /// The cursor at which a batch begins.
    #[inline(always)]
    pub(crate) fn begin(&self) -> RecvCursor {
        let tail = self.shared.receives.own.tail();
        let room = self.max_post.wrapping_sub(self.head.wrapping_sub(tail));
        RecvCursor { at: self.head, room, ..RecvCursor::default() }
    }

    /// Writes a WQE at the cursor, and advances the cursor; after an error it has not moved.
    #[inline(always)]
    pub(crate) fn push(&self, cursor: &mut RecvCursor, recv: &RecvWr<'_>) -> Result<(), PostError> {
        if self.try_push(cursor, recv) {
            return Ok(());
        }
        // Copied, so that the caller's request stays in registers: 4 instructions of 39 with 32 to a doorbell.
        let recv = *recv;
        self.push_checked(cursor, &recv)
    }

    /// Writes a WQE of one SGE if it is valid; `false`, and the cursor has not moved, for all others.
    #[inline(always)]
    pub(crate) fn try_push(&self, cursor: &mut RecvCursor, recv: &RecvWr<'_>) -> bool {
        let [sge] = recv.sges else { return false };
        // A batch may be older than a fork.
        if sge.length as i32 <= 0 || cursor.room == 0 || self.gate.is_shut() {
            return false;
        }
        let (wqe, wr_id) = self.buffer.at(cursor.at);
        wqe.write_behind(TERMINATOR);
        wqe.write::<0>(data(sge));
        wr_id.store(recv.wr_id, Ordering::Relaxed);
        advance(cursor);
        true
    }

    /// As [`push`](Self::push), with all checks.
    #[inline(always)]
    pub(crate) fn push_checked(
        &self,
        cursor: &mut RecvCursor,
        recv: &RecvWr<'_>,
    ) -> Result<(), PostError> {
        self.write_checked(*cursor, recv)?;
        advance(cursor);
        Ok(())
    }

    /// Checks everything about a request, and writes it.
    #[cold]
    #[inline(never)]
    fn write_checked(&self, cursor: RecvCursor, recv: &RecvWr<'_>) -> Result<(), PostError> {
        if self.gate.is_shut() {
            return Err(PostError::Forked);
        }
        if cursor.room == 0 {
            return Err(PostError::Full);
        }
        let (first, room) = (self.buffer.first(cursor.at), self.buffer.each());
        scatter(self.buffer.segments(), first, room, self.max_sge, recv.sges)?;
        self.buffer.entry(cursor.at).store(recv.wr_id, Ordering::Relaxed);
        Ok(())
    }

    /// Hands the WQEs up to a cursor to the device;
    /// nothing in a forked child, whose doorbell record may be its parent's.
    #[inline(always)]
    pub(crate) fn ring(&mut self, cursor: RecvCursor) -> Result<(), RingError> {
        if self.gate.is_shut() {
            return Err(RingError::Forked);
        }
        self.head = cursor.at;
        // Pairs with the device reading WQEs after the doorbell record that counts them.
        udma_to_device();
        self.dbrec.set(self.head & 0xffff);
        Ok(())
    }

    /// The queue, for foreign code.
    pub(crate) fn layout(&self) -> WqLayout {
        let stride = self.buffer.each() * SEGMENT as u32;
        WqLayout { buf: self.buffer.as_ptr(), wqe_count: self.entries, stride }
    }

    /// Receives posted, modulo 2^16.
    pub(crate) fn posted(&self) -> u16 {
        self.head as u16
    }

    /// Receives that have no completion yet.
    pub(crate) fn outstanding(&self) -> u32 {
        self.head.wrapping_sub(self.shared.receives.own.tail())
    }

    /// Lets completions of WQEs that foreign code posts have the WQE's index as their `wr_id`.
    pub(crate) fn number_wqes(&self) {
        self.shared.receives.own.number_wqes();
    }

    /// Goes on behind receives that foreign code posted, none of which is outstanding.
    pub(crate) fn resume(&mut self, receives: u16) {
        self.head = receives.into();
        self.shared.receives.own.resume(self.head);
    }

    /// Resets the ring, as the device does in state `RESET`.
    pub(crate) fn reset(&mut self) {
        self.head = 0;
        self.shared.receives.own.reset();
        self.dbrec.set(0);
    }
}

/// Advances a cursor past a WQE that is written.
#[inline(always)]
fn advance(cursor: &mut RecvCursor) {
    cursor.at = cursor.at.wrapping_add(1);
    cursor.room -= 1;
}

/// Writes the SGEs of a receive to `room` segments from `at` on, and ends their list if there is a
/// segment left. `max` SGEs fit, one at least.
pub(super) fn scatter(
    segments: &WqeSegments,
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
        // The device takes a length of zero as 2^31.
        if sge.length > 0 {
            segments.write(next, data(sge));
            next = next.wrapping_add(1);
        }
    }
    if next.wrapping_sub(at) < room {
        segments.write(next, TERMINATOR);
    }
    // The uppermost bit of a length would mark inline data.
    if length > i32::MAX as u64 { Err(PostError::TooLong) } else { Ok(()) }
}
