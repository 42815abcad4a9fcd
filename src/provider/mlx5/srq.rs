//! Shared receive queues: WQEs that form a linked list.
//!
//! The device follows the list from the WQE that it took last. So the poster fills the WQE at the end of the list, and
//! links it to any free WQE, the new end. The poller of a completion gives the WQE back to [`SrqWrIds`], where the
//! poster finds all returned WQEs as one list. One WQE always stays free, as the end of the list.

use super::context::Limits;
use super::resources::Mlx5Resources;
use super::rq::scatter;
use super::srq_wr_ids::{SrqWrId, SrqWrIds};
use super::wqe::{TERMINATOR, data, link};
use super::wr_ids::{Receives, SharedQp};
use super::{Mlx5, misfit};
use crate::error::{Error, Result};
use crate::memory::allocator::{ResourceType, Source};
use crate::memory::barrier::udma_to_device;
use crate::memory::doorbell_record::{DoorbellRecord, RecordWord};
use crate::memory::gate::Gate;
use crate::memory::queue_layout::{SrqLayout, WqLayout};
use crate::memory::queue_memory::QueueMemory;
use crate::memory::rq_buffer::RqBuffer;
use crate::memory::wqe_segment::SEGMENT;
use crate::provider::{
    CreateRequest, CreatedSrq, Execute, Member, RecvCursor, SharedReceives, SrqInitAttr, SrqRing,
};
use crate::sync::Ordering;
use crate::uverbs::command::Command;
use crate::wr::{PostError, RecvWr, RingError};
use rustix::param::page_size;
use std::sync::Arc;
use uverbs_uapi::mlx5::abi::{mlx5_ib_create_srq, mlx5_ib_create_srq_resp};
use uverbs_uapi::mlx5::wqe::{mlx5_wqe_data_seg, mlx5_wqe_srq_next_seg};
use uverbs_uapi::object::{UVERBS_ATTR_UHW_IN, UVERBS_ATTR_UHW_OUT, UVERBS_OBJECT_SRQ};
use uverbs_uapi::srq::{
    UVERBS_ATTR_CREATE_SRQ_MAX_SGE, UVERBS_ATTR_CREATE_SRQ_MAX_WR,
    UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE, UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR,
    UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM, UVERBS_METHOD_SRQ_CREATE,
};

/// Bytes of the segment that links a WQE to the next.
const NEXT: u64 = size_of::<mlx5_wqe_srq_next_seg>() as u64;
/// Bytes of a data segment.
const DATA: u64 = size_of::<mlx5_wqe_data_seg>() as u64;

/// The size of a shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SrqSize {
    /// WQEs, a power of two; one of them stays in the list as its end.
    pub(crate) entries: u32,
    pub(crate) stride_log: u32,
    pub(crate) max_sge: u32,
}

impl SrqSize {
    pub(crate) fn new(
        limits: &Limits,
        max_wr: u32,
        max_sge: u32,
    ) -> std::result::Result<SrqSize, String> {
        let most = u64::from(limits.max_srq_recv_wr);
        let entries = (u64::from(max_wr) + 1).next_power_of_two();
        if entries > most {
            return Err(format!("{max_wr} receives; the maximum is {}", most.saturating_sub(1)));
        }
        let request = NEXT + DATA * u64::from(max_sge);
        let largest = u64::from(limits.max_rq_desc_sz);
        if request > largest {
            return Err(format!(
                "{max_sge} entries in a receive; the maximum is {}",
                largest.saturating_sub(NEXT) / DATA
            ));
        }
        let stride = request.max(32).next_power_of_two();
        Ok(SrqSize {
            entries: entries as u32,
            stride_log: stride.trailing_zeros(),
            max_sge: ((stride - NEXT) / DATA) as u32,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        (self.entries as usize) << self.stride_log
    }
}

/// Creates a shared receive queue: its size, its memory, the driver's part of the command, and the ring.
///
/// Pairs with `create_srq_user` in `hw/mlx5/srq.c`, which pins the memory that is named here.
pub(super) fn create(
    mlx5: &Mlx5,
    attr: SrqInitAttr,
    source: Source<'_>,
    execute: Execute<'_>,
) -> Result<CreatedSrq> {
    let size = SrqSize::new(&mlx5.limits, attr.max_wr, attr.max_sge)
        .map_err(|detail| Error::invalid(source.verb, detail))?;
    let memory = Arc::new(source.alloc(size.bytes(), page_size(), ResourceType::MLX5_SRQ)?);
    let prepared =
        prepare(&memory, size.entries, 1 << size.stride_log).ok_or_else(|| misfit(source.verb))?;
    let dbrec = mlx5.doorbell_record(&source)?;
    let gate = mlx5.gate(&dbrec, source.verb)?;
    // The kernel asks only queues of XRC domains for a user index.
    let uidx = if attr.xrc { Some(mlx5.user_index(source.verb)?) } else { None };

    let request = mlx5_ib_create_srq {
        buf_addr: memory.addr(),
        db_addr: dbrec.addr(),
        uidx: uidx.as_ref().map_or(0, |uidx| uidx.get()),
        ..Default::default()
    };
    let mut response = mlx5_ib_create_srq_resp::default();
    let (max_wr, max_sge) = (size.entries - 1, size.max_sge);
    let (mut granted_wr, mut granted_sge, mut number) = (0u32, 0u32, 0u32);
    let mut command = Command::new(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_CREATE);
    command
        .u32(UVERBS_ATTR_CREATE_SRQ_MAX_WR, max_wr)
        .u32(UVERBS_ATTR_CREATE_SRQ_MAX_SGE, max_sge)
        .output(UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR, &mut granted_wr)
        .output(UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE, &mut granted_sge)
        .input(UVERBS_ATTR_UHW_IN, &request)
        .output(UVERBS_ATTR_UHW_OUT, &mut response);
    if attr.xrc {
        command.output(UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM, &mut number);
    }
    let (pinned, resources) = (memory.len(), Mlx5Resources::new(&dbrec, Some(memory)));
    execute(CreateRequest { command, pinned, resources: Some(Arc::new(resources)) })?;

    let mut ring = Mlx5Srq::new(prepared, max_sge, dbrec, gate.clone());
    ring.srqn = response.srqn;
    let wr_ids = ring.wr_ids().clone();
    let member = match uidx {
        Some(uidx) => SharedQp::new(number, uidx, None, Receives::Shared(wr_ids.clone())).member(),
        None => Member::default(),
    };
    let shared_receives = SharedReceives { wr_ids: Some(wr_ids) };
    let ring = SrqRing::Mlx5(ring);
    Ok(CreatedSrq { ring, gate, shared_receives, member, number, max_wr, max_sge })
}

/// WQEs of two segments or more: the link, and an SGE.
type Linked = RqBuffer<SrqWrId, 2>;

/// A queue that the device does not know yet.
#[derive(Debug)]
pub(crate) struct Prepared {
    buffer: Linked,
    wr_ids: Arc<SrqWrIds>,
    entries: u32,
}

/// Links `entries` of `stride` bytes, both powers of two, from the first to the last; `None` if
/// they do not fit into `memory`. To be called before the device knows the ring.
pub(crate) fn prepare(memory: &Arc<QueueMemory>, entries: u32, stride: u32) -> Option<Prepared> {
    if !entries.is_power_of_two() || entries > 1 << 16 {
        return None;
    }
    let wr_ids = Arc::new(SrqWrIds::new(entries));
    let segments = stride / SEGMENT as u32;
    let ring = Linked::new(memory.clone(), 0, entries, segments, wr_ids.entries().clone())?;
    for at in 0..entries {
        let (wqe, entry) = ring.at(at);
        wqe.write_half::<0>(link((at + 1) & (entries - 1)));
        entry.next.store(at + 1, Ordering::Relaxed);
    }
    Some(Prepared { buffer: ring, wr_ids, entries })
}

/// The poster's side of a shared receive queue.
#[derive(Debug)]
pub(crate) struct Mlx5Srq {
    // Declared first, so that the record is dropped before the memory, as in `Mlx5Resources`.
    dbrec: RecordWord<0>,
    buffer: Linked,
    max_sge: u32,
    /// One less than the entries.
    capacity: u32,
    /// The cursor of the next receive.
    next: RecvCursor,
    /// Receives posted in all.
    posted: u32,
    /// The device's number of the queue.
    srqn: u32,
    pub(super) gate: Gate,
    wr_ids: Arc<SrqWrIds>,
}

impl Mlx5Srq {
    /// A poster of the ring that [`prepare`] linked.
    pub(crate) fn new(
        prepared: Prepared,
        max_sge: u32,
        dbrec: Arc<DoorbellRecord>,
        gate: Gate,
    ) -> Mlx5Srq {
        let Prepared { buffer, wr_ids, entries } = prepared;
        // A shared receive queue has no states to wait for.
        gate.level().store(1, std::sync::atomic::Ordering::Relaxed);
        Mlx5Srq {
            // The first segment of an entry is its link.
            max_sge: max_sge.min(buffer.each() - 1),
            buffer,
            capacity: entries - 1,
            next: RecvCursor { at: 0, free: 1, room: entries - 1 },
            posted: 0,
            srqn: 0,
            dbrec: dbrec.word(),
            gate,
            wr_ids,
        }
    }

    /// The work request ids, which the pollers share with the poster.
    pub(crate) fn wr_ids(&self) -> &Arc<SrqWrIds> {
        &self.wr_ids
    }

    /// Whether nothing was ever posted. The count wraps after 2^32 receives; all of them have
    /// completed if the room is what it was at first.
    pub(crate) fn is_fresh(&self) -> bool {
        self.posted == 0 && self.next.room == self.capacity
    }

    /// The queue, for foreign code.
    pub(crate) fn layout(&self) -> SrqLayout {
        let (wqe_count, stride) = (self.capacity + 1, self.buffer.each() * SEGMENT as u32);
        SrqLayout {
            srqn: self.srqn,
            wq: WqLayout { buf: self.buffer.as_ptr(), wqe_count, stride },
            head: (self.next.at & self.capacity) as u16,
            dbrec: self.dbrec.record().as_ptr(),
            posted: self.posted as u16,
        }
    }

    /// Receives whose completion was not polled.
    pub(crate) fn outstanding(&mut self) -> u32 {
        self.capacity - self.begin().room
    }

    /// Goes on with the WQE `head`, which the device takes next, behind `posted` receives, none of which is outstanding:
    /// links each WQE to the one behind it.
    pub(crate) fn resume(&mut self, head: u16, posted: u16) {
        self.wr_ids.resume();
        for at in 0..=self.capacity {
            self.buffer.at(at).0.write_half::<0>(link((at + 1) & self.capacity));
        }
        let at = u32::from(head) & self.capacity;
        self.next = RecvCursor { at, free: (at + 1) & self.capacity, room: self.capacity };
        self.posted = posted.into();
    }

    /// The cursor at which a batch begins, with the WQEs that came back since the last batch.
    #[inline(always)]
    pub(crate) fn begin(&mut self) -> RecvCursor {
        if let Some(row) = self.wr_ids.take(self.next.free) {
            self.next.free = row.first.into();
            // The room stays within the capacity even if a faulty device completes WQEs that it never had.
            self.next.room = self.next.room.wrapping_add(row.count).min(self.capacity);
        }
        self.next
    }

    /// Writes a WQE at the cursor, and advances the cursor; after an error it has not moved.
    #[inline(always)]
    pub(crate) fn push(
        &self,
        cursor: &mut RecvCursor,
        recv: &RecvWr<'_>,
    ) -> std::result::Result<(), PostError> {
        if self.try_push(cursor, recv) {
            return Ok(());
        }
        // Copied, so that the caller's request stays in registers: 4 instructions of 48 with 32 to a doorbell.
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
        let (wqe, entry) = self.buffer.at(cursor.at);
        wqe.write_behind(TERMINATOR);
        wqe.write_half::<0>(link(cursor.free));
        wqe.write::<1>(data(sge));
        entry.wr_id.store(recv.wr_id, Ordering::Relaxed);
        self.advance(cursor);
        true
    }

    /// As [`push`](Self::push), with all checks.
    #[inline(always)]
    pub(crate) fn push_checked(
        &self,
        cursor: &mut RecvCursor,
        recv: &RecvWr<'_>,
    ) -> std::result::Result<(), PostError> {
        self.write_checked(*cursor, recv)?;
        self.advance(cursor);
        Ok(())
    }

    /// Checks everything about a request, and writes it.
    #[cold]
    #[inline(never)]
    fn write_checked(
        &self,
        cursor: RecvCursor,
        recv: &RecvWr<'_>,
    ) -> std::result::Result<(), PostError> {
        if self.gate.is_shut() {
            return Err(PostError::Forked);
        }
        if cursor.room == 0 {
            return Err(PostError::Full);
        }
        let (first, room) = (self.buffer.first(cursor.at), self.buffer.each() - 1);
        scatter(self.buffer.segments(), first.wrapping_add(1), room, self.max_sge, recv.sges)?;
        let (wqe, entry) = self.buffer.at(cursor.at);
        wqe.write_half::<0>(link(cursor.free));
        entry.wr_id.store(recv.wr_id, Ordering::Relaxed);
        Ok(())
    }

    /// Advances a cursor to the next WQE in the linked list.
    #[inline(always)]
    fn advance(&self, cursor: &mut RecvCursor) {
        cursor.at = cursor.free;
        cursor.free = self.buffer.entry(cursor.free).next.load(Ordering::Relaxed);
        cursor.room -= 1;
    }

    /// Hands the `count` WQEs up to a cursor to the device. Nothing in a forked child, whose doorbell
    /// record may be its parent's.
    #[inline(always)]
    pub(crate) fn ring(
        &mut self,
        cursor: RecvCursor,
        count: u32,
    ) -> std::result::Result<(), RingError> {
        if self.gate.is_shut() {
            return Err(RingError::Forked);
        }
        self.posted = self.posted.wrapping_add(count);
        self.next = cursor;
        // Pairs with the device reading WQEs after the doorbell record that counts them.
        udma_to_device();
        self.dbrec.set(self.posted & 0xffff);
        Ok(())
    }
}
