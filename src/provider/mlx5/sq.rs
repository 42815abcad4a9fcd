//! Send queues: their size, the WQEs that this process writes, and the doorbell.
//!
//! A WQE begins at a WQEBB and is as many segments as its request needs. The doorbell record counts
//! WQEBBs; the register takes the first eight bytes of the newest WQE, or a whole WQE (BlueFlame).

mod packet;

use super::context::{Limits, RawPacketLimits};
use super::umr::{self, Change};
use super::wqe::{
    LONGEST, MASKED_EIGHT, Segment, atomic, control, data, inline_length, pair, remote, segments,
    target,
};
use super::wr_ids::{SharedQp, SqWrId};
use crate::memory::barrier::udma_to_device;
use crate::memory::doorbell_record::{DoorbellRecord, RecordWord};
use crate::memory::doorbell_register::DoorbellRegister;
use crate::memory::gate::Gate;
use crate::memory::queue_layout::{RawPacketNumbers, RegisterLayout, WqLayout};
use crate::memory::queue_memory::QueueMemory;
use crate::memory::sq_buffer::{SqBuffer, WqeSlot};
use crate::memory::wqe_segment::SEGMENT;
use crate::memory::wqebb::{SEGMENTS_PER_WQEBB, Wqebbs};
use crate::provider::{SendCursor, SendLimits};
use crate::qp::state::QpType;
use crate::wc::WcOpcode;
use crate::wr::{
    Address, Destination, Payload, PostError, QpTransport, Remote, RingError, SendFlags, SendOp,
    SendOps, SendWr, Sge, inline_bytes,
};
use std::sync::Arc;
use uverbs_uapi::mlx5::wqe;
use uverbs_uapi::mlx5::wqe::{
    MLX5_EXTENDED_UD_AV, MLX5_FENCE_MODE_SMALL_AND_FENCE, MLX5_SEND_WQE_MAX_WQEBBS, MLX5_SND_DBR,
    mlx5_av, mlx5_wqe_ctrl_flags as flags, mlx5_wqe_opcode as opcode,
};
use uverbs_uapi::qp::ib_uverbs_qp_cap;

/// Segments of an address vector.
const VECTOR: u32 = (size_of::<mlx5_av>() / SEGMENT) as u32;
/// Bytes that an atomic works on.
const ATOMIC: u32 = 8;
/// The WQE waits for earlier reads and atomics, and for key changes.
const FENCE: u8 = MLX5_FENCE_MODE_SMALL_AND_FENCE;
/// The WQE waits for earlier key changes.
const SMALL_FENCE: u8 = flags::MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE.bits();

// Bytes of the segments that the size of a WQE is made of.
const CTRL: u64 = size_of::<wqe::mlx5_wqe_ctrl_seg>() as u64;
const RADDR: u64 = size_of::<wqe::mlx5_wqe_raddr_seg>() as u64;
pub(super) const DATA: u64 = size_of::<wqe::mlx5_wqe_data_seg>() as u64;
const INLINE: u64 = size_of::<wqe::mlx5_wqe_inline_seg>() as u64;
const AV: u64 = size_of::<wqe::mlx5_av>() as u64;
const XRC: u64 = size_of::<wqe::mlx5_wqe_xrc_seg>() as u64;
const ETH: u64 = 32;
const UMR_CTRL: u64 = 48;
const MKEY: u64 = 64;
/// Bytes of a UMR's translation list: entries (KLMs) come in fours.
const KLMS: u64 = 64;
/// Bytes of a WQEBB.
const WQEBB: u64 = 64;

/// The size of a send queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SqSize {
    /// A power of two; 0 if there is no send queue.
    pub(crate) wqebbs: u32,
    /// WQEs that fit if all are of the largest size.
    pub(crate) max_post: u32,
    pub(crate) max_sge: u32,
    pub(crate) max_inline: u32,
}

impl SqSize {
    pub(crate) fn new(
        limits: &Limits,
        qp_type: QpType,
        cap: &ib_uverbs_qp_cap,
    ) -> Result<SqSize, String> {
        if cap.max_send_wr == 0 {
            return Ok(SqSize::default());
        }
        let overhead = overhead(qp_type);
        let largest = u64::from(limits.max_sq_desc_sz);
        // A WQE may not be able to use all of its last WQEBB.
        let room = u64::from(limits.max_send_request()).saturating_sub(overhead);
        if u64::from(cap.max_send_sge) > room / DATA {
            return Err(format!(
                "{} entries in a send; the maximum is {} for type {qp_type}",
                cap.max_send_sge,
                room / DATA
            ));
        }
        let max_inline = room.saturating_sub(INLINE);
        if u64::from(cap.max_inline_data) > max_inline {
            return Err(format!(
                "{} bytes inline; the maximum is {max_inline} for type {qp_type}",
                cap.max_inline_data
            ));
        }
        let gathered = overhead + DATA * u64::from(cap.max_send_sge);
        let inline = match cap.max_inline_data {
            0 => 0,
            bytes => overhead + (INLINE + u64::from(bytes)).next_multiple_of(16),
        };
        let request = gathered.max(inline).max(fixed(qp_type)).next_multiple_of(WQEBB);
        if request > largest {
            return Err(format!(
                "{} entries and {} bytes inline make requests of {request} bytes; the maximum is \
                 {largest}",
                cap.max_send_sge, cap.max_inline_data
            ));
        }
        let bytes = (u64::from(cap.max_send_wr) * request).next_power_of_two();
        let wqebbs = bytes / WQEBB;
        let most = u64::from(limits.max_send_wqebb);
        if wqebbs > most {
            return Err(format!(
                "{} sends of {request} bytes; the maximum is {} of that size",
                cap.max_send_wr,
                most * WQEBB / request
            ));
        }
        Ok(SqSize {
            wqebbs: wqebbs as u32,
            max_post: (bytes / request) as u32,
            max_sge: cap.max_send_sge,
            max_inline: room.min(request - overhead).saturating_sub(INLINE) as u32,
        })
    }

    /// WQEBBs of the ring in this process. Without a send queue it has one, which the device does not know and
    /// nothing is ever written to.
    pub(crate) fn ring(&self) -> u32 {
        self.wqebbs.max(1)
    }

    /// Bytes of the ring.
    pub(crate) fn bytes(&self) -> usize {
        self.ring() as usize * WQEBB as usize
    }
}

/// Bytes before the payload of the operation with the longest header.
pub(super) fn overhead(qp_type: QpType) -> u64 {
    match qp_type {
        QpType::UD => CTRL + AV,
        QpType::RAW_PACKET => CTRL + ETH,
        QpType::XRC_INI | QpType::XRC_TGT => CTRL + XRC + RADDR,
        _ => CTRL + RADDR,
    }
}

/// Bytes of the longest WQE whose size does not depend on the requested capacities.
fn fixed(qp_type: QpType) -> u64 {
    match qp_type {
        QpType::UD | QpType::RAW_PACKET => WQEBB,
        // Binding a window changes a key by a list of four entries, which is longer than any atomic.
        _ => CTRL + UMR_CTRL + MKEY + KLMS,
    }
}

/// The parts that a send queue is made from.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) memory: Arc<QueueMemory>,
    /// The offset in the memory where the queue begins, in bytes.
    pub(crate) offset: usize,
    /// WQEBBs, a power of two.
    pub(crate) wqebbs: u32,
    /// WQEs that fit, of any operation.
    pub(crate) max_post: u32,
    pub(crate) limits: SendLimits,
    /// The operations that the transport takes without a further check.
    pub(crate) unchecked: SendOps,
    pub(crate) transport: QpTransport,
    pub(crate) signal_all: bool,
    pub(crate) dbrec: Arc<DoorbellRecord>,
    pub(crate) register: Arc<DoorbellRegister>,
    /// Whether no other queue rings the register while a batch of this queue is rung.
    pub(crate) owns_register: bool,
    pub(crate) shared: Arc<SharedQp>,
    pub(crate) raw_packet: RawPacketLimits,
    pub(crate) gate: Gate,
    /// Open as `gate` is. Shut for ever where the device is in this process: each ring then notifies it by a call.
    pub(crate) ring_gate: Gate,
}

/// A send queue.
#[derive(Debug)]
pub(crate) struct Mlx5Sq {
    // Declared first, so that the record is dropped before the memory, as in `Mlx5Resources`.
    dbrec: RecordWord<MLX5_SND_DBR>,
    buffer: SqBuffer<SqWrId>,
    /// The operations that need only a size check now: none while a fence is pending.
    unchecked_now: SendOps,
    unchecked: SendOps,
    pub(super) transport: QpTransport,
    /// The queue pair's number, in the byte order and place of a control segment.
    qpn: u64,
    /// Flags of every WQE, in the byte order and place of a control segment.
    always: u64,
    /// WQEBBs written in all: the producer index.
    producer: u32,
    /// WQEs posted in all.
    head: u32,
    max_post: u32,
    fence: Option<PendingFence>,
    max_sge: u32,
    max_inline: usize,
    register: Arc<DoorbellRegister>,
    owns_register: bool,
    /// Segments of the longest WQE.
    max_segments: u32,
    shared: Arc<SharedQp>,
    raw_packet: RawPacketLimits,
    pub(super) gate: Gate,
    ring_gate: Gate,
    /// Boxed: posting never reads it.
    told: Box<Told>,
}

/// Facts of a queue pair for foreign code, beside its rings.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) mmap_offset: u64,
    pub(crate) raw_packet: RawPacketNumbers,
}

impl Mlx5Sq {
    /// `None` if the queue does not fit into its memory.
    pub(crate) fn new(setup: Setup) -> Option<Mlx5Sq> {
        let longest = setup.wqebbs.checked_div(setup.max_post).unwrap_or(0);
        let always = if setup.signal_all { flags::MLX5_WQE_CTRL_CQ_UPDATE.bits() } else { 0 };
        // A single SGE is one too many for a queue that takes none; the inline way does not count it.
        let unchecked = match setup.limits.max_sge {
            0 => SendOps { gather: 0, datagram: 0, srq_gather: 0, ..setup.unchecked },
            _ => setup.unchecked,
        };
        Some(Mlx5Sq {
            buffer: SqBuffer::new(
                Wqebbs::new(setup.memory, setup.offset, setup.wqebbs)?,
                setup.shared.sends.entries(),
            )?,
            unchecked_now: unchecked,
            unchecked,
            qpn: pair(0, setup.transport.qpn.0 << 8),
            transport: setup.transport,
            always: pair(always.into(), 0),
            producer: 0,
            head: 0,
            max_post: setup.max_post,
            fence: None,
            max_sge: setup.limits.max_sge,
            max_inline: setup.limits.max_inline as usize,
            dbrec: setup.dbrec.word(),
            register: setup.register,
            owns_register: setup.owns_register,
            max_segments: longest
                .min(MLX5_SEND_WQE_MAX_WQEBBS as u32)
                .saturating_mul(SEGMENTS_PER_WQEBB)
                .min(LONGEST),
            shared: setup.shared,
            raw_packet: setup.raw_packet,
            gate: setup.gate,
            ring_gate: setup.ring_gate,
            told: Box::default(),
        })
    }

    /// The cursor at which a batch begins.
    #[inline(always)]
    pub(crate) fn begin(&self) -> SendCursor {
        let used = self.head.wrapping_sub(self.shared.sends.tail());
        let room = self.max_post.wrapping_sub(used);
        SendCursor { at: self.producer, room, head: self.head, ..SendCursor::default() }
    }

    /// Whether no other queue pair rings the register.
    pub(crate) fn owns_register(&self) -> bool {
        self.owns_register
    }

    /// WQEs up to a cursor that are not published.
    pub(crate) fn pushed(&self, cursor: &SendCursor) -> u32 {
        cursor.head.wrapping_sub(self.head)
    }

    /// Writes a WQE at the cursor, and advances the cursor; after an error it has not moved.
    #[inline(always)]
    pub(crate) fn push(
        &mut self,
        cursor: &mut SendCursor,
        wr: &SendWr<'_>,
    ) -> Result<(), PostError> {
        if self.try_push(cursor, wr) {
            return Ok(());
        }
        // Copied, so that cursor and request stay in registers: 45 instructions.
        let (mut copy, wr) = (*cursor, *wr);
        self.push_checked(&mut copy, &wr)?;
        *cursor = copy;
        Ok(())
    }

    /// Writes a WQE if only its SGE count and its inline length are left to check, and both are right;
    /// `false`, and the cursor has not moved, for all others.
    #[inline(always)]
    pub(crate) fn try_push(&self, cursor: &mut SendCursor, wr: &SendWr<'_>) -> bool {
        let fits = match wr.payload {
            // A zero length means 2^31 to the device, and the uppermost bit means inline data.
            Payload::Sges([sge]) => sge.length as i32 > 0,
            Payload::Sges(_) | Payload::Inline(_) | Payload::InlineList(_) => true,
        };
        let unchecked = match (&wr.destination, wr.srq, &wr.payload) {
            (None, None, Payload::Sges(_)) => self.unchecked_now.gather,
            (None, None, _) => self.unchecked_now.inline,
            (None, Some(_), Payload::Sges(_)) => self.unchecked_now.srq_gather,
            (None, Some(_), _) => self.unchecked_now.srq_inline,
            (Some(to), None, _) if to.domain == self.transport.domain => {
                self.unchecked_now.datagram
            }
            (Some(_), _, _) => 0,
        };
        if !fits || cursor.room == 0 || wr.op.bit() & unchecked == 0 {
            return false;
        }
        // A batch may be older than a fork.
        if self.gate.is_shut() {
            return false;
        }
        match &wr.destination {
            None => self.write(cursor, wr, Validation::Size).is_ok(),
            Some(to) => self.datagram(cursor, to, wr, Validation::Size).is_ok(),
        }
    }

    /// Checks everything about a request, and writes it.
    #[cold]
    #[inline(never)]
    pub(crate) fn push_checked(
        &mut self,
        cursor: &mut SendCursor,
        wr: &SendWr<'_>,
    ) -> Result<(), PostError> {
        if self.gate.is_shut() {
            return Err(PostError::Forked);
        }
        self.transport.check(wr)?;
        if cursor.room == 0 {
            return Err(PostError::no_room(self.max_post as usize));
        }
        if self.transport.qp_type == QpType::RAW_PACKET {
            return self.push_packet(cursor, wr);
        }
        let validation =
            if self.needs_fence(cursor) { Validation::AllAndFence } else { Validation::All };
        match &wr.destination {
            None => self.write(cursor, wr, validation)?,
            Some(to) => self.datagram(cursor, to, wr, validation)?,
        }
        if wr.op.changes_keys() {
            self.fence_up_to(cursor.head);
        } else {
            self.end_own_fence(cursor.head);
        }
        Ok(())
    }

    /// Lets WQEs up to the number `last` wait for the key changes before them.
    ///
    /// The fence is kept here and not in the cursor, which all other batches would carry along. A batch
    /// that is dropped after it changed keys can leave an unneeded fence on later WQEs.
    pub(crate) fn fence_up_to(&mut self, last: u32) {
        let since = self.head;
        // An earlier batch may have set a fence for key changes that were posted.
        let older =
            |fence: &PendingFence| fence.older || fence.since != since && fence.reaches(since);
        let older = self.fence.as_ref().is_some_and(older);
        self.set_fence(Some(PendingFence { last, since, older }));
    }

    /// Whether the WQE at the cursor needs a fence. The fence is over when all WQEs that need it are posted.
    fn needs_fence(&mut self, cursor: &SendCursor) -> bool {
        let Some(fence) = self.fence else { return false };
        if !fence.reaches(self.head) {
            self.set_fence(None);
        }
        fence.reaches(cursor.head)
    }

    /// Ends a fence that this batch set, when all WQEs before the number `next` are written: if the batch is
    /// dropped, neither they nor the key change are posted.
    fn end_own_fence(&mut self, next: u32) {
        let same = |fence: &PendingFence| !fence.older && fence.since == self.head;
        self.set_fence(self.fence.filter(|fence| !same(fence) || fence.reaches(next)));
    }

    fn set_fence(&mut self, fence: Option<PendingFence>) {
        self.fence = fence;
        self.unchecked_now = if fence.is_some() { SendOps::default() } else { self.unchecked };
    }

    /// Writes the WQE of a datagram, with its address vector.
    #[inline(always)]
    fn datagram(
        &self,
        cursor: &mut SendCursor,
        to: &Destination<'_>,
        wr: &SendWr<'_>,
        validation: Validation,
    ) -> Result<(), PostError> {
        let (code, immediate) = match wr.op {
            SendOp::Send => (opcode::MLX5_OPCODE_SEND, 0),
            SendOp::SendImm(imm) => (opcode::MLX5_OPCODE_SEND_IMM, imm),
            _ => return Err(PostError::Unsupported),
        };
        let Address::Mlx5(av) = to.address else { return Err(PostError::Destination) };
        let wqe = Wqe::new(self, cursor.at, validation == Validation::Size);
        let mut size = 1;
        for segment in vector(av, to.qkey.0, to.qpn.0) {
            wqe.append(&mut size, segment);
        }
        wqe.payload(&mut size, &wr.payload)?;
        let head = control(cursor.at, code.0, size) | self.qpn;
        let tail = self.tail(validation, wr.flags, immediate);
        self.finish(cursor, &wqe, [head, tail], size, wr.wr_id, WcOpcode::SEND);
        Ok(())
    }

    /// The second half of a control segment.
    #[inline(always)]
    fn tail(&self, validation: Validation, asked: SendFlags, immediate: u32) -> u64 {
        let fence = match (asked.contains(SendFlags::FENCE), validation) {
            (true, _) => FENCE,
            (false, Validation::AllAndFence) => SMALL_FENCE,
            (false, _) => 0,
        };
        pair((completion_flags(asked) | fence).into(), immediate) | self.always
    }

    /// Writes the WQE of any request but a datagram.
    #[inline(always)]
    fn write(
        &self,
        cursor: &mut SendCursor,
        wr: &SendWr<'_>,
        validation: Validation,
    ) -> Result<(), PostError> {
        let wqe = Wqe::new(self, cursor.at, validation == Validation::Size);
        // Segments so far. The control segment is written last, when their number is known.
        let mut size = if wr.srq.is_some() { 2 } else { 1 };
        let mut immediate = 0;
        let mut modifier = 0;
        let (code, kind) = match &wr.op {
            SendOp::Send => {
                wqe.payload(&mut size, &wr.payload)?;
                (opcode::MLX5_OPCODE_SEND, WcOpcode::SEND)
            }
            SendOp::SendImm(imm) => {
                immediate = *imm;
                wqe.payload(&mut size, &wr.payload)?;
                (opcode::MLX5_OPCODE_SEND_IMM, WcOpcode::SEND)
            }
            SendOp::SendInv(rkey) => {
                immediate = rkey.0;
                wqe.payload(&mut size, &wr.payload)?;
                (opcode::MLX5_OPCODE_SEND_INVAL, WcOpcode::SEND)
            }
            SendOp::Write(to) => {
                wqe.append(&mut size, remote(to.addr, to.rkey.0));
                wqe.payload(&mut size, &wr.payload)?;
                (opcode::MLX5_OPCODE_RDMA_WRITE, WcOpcode::WRITE)
            }
            SendOp::WriteImm(to, imm) => {
                immediate = *imm;
                wqe.append(&mut size, remote(to.addr, to.rkey.0));
                wqe.payload(&mut size, &wr.payload)?;
                (opcode::MLX5_OPCODE_RDMA_WRITE_IMM, WcOpcode::WRITE)
            }
            SendOp::Read(from) => {
                wqe.append(&mut size, remote(from.addr, from.rkey.0));
                wqe.payload(&mut size, &wr.payload)?;
                (opcode::MLX5_OPCODE_RDMA_READ, WcOpcode::READ)
            }
            SendOp::CompareSwap { remote: at, compare, swap } => {
                wqe.atomic(&mut size, at, &[atomic(*swap, *compare)], &wr.payload)?;
                (opcode::MLX5_OPCODE_ATOMIC_CS, WcOpcode::COMPARE_SWAP)
            }
            SendOp::FetchAdd { remote: at, add } => {
                wqe.atomic(&mut size, at, &[atomic(*add, 0)], &wr.payload)?;
                (opcode::MLX5_OPCODE_ATOMIC_FA, WcOpcode::FETCH_ADD)
            }
            SendOp::MaskedCompareSwap { remote: at, operands: with } => {
                modifier = MASKED_EIGHT;
                let values = atomic(with.swap, with.compare);
                let masks = atomic(with.swap_mask, with.compare_mask);
                size = wqe.masked(size, at, &[values, masks], &wr.payload)?;
                (opcode::MLX5_OPCODE_ATOMIC_MASKED_CS, WcOpcode::COMPARE_SWAP)
            }
            SendOp::MaskedFetchAdd { remote: at, add, boundary } => {
                modifier = MASKED_EIGHT;
                size = wqe.masked(size, at, &[atomic(*add, *boundary)], &wr.payload)?;
                (opcode::MLX5_OPCODE_ATOMIC_MASKED_FA, WcOpcode::FETCH_ADD)
            }
            // Later WQEs have to wait for these; only `push_checked` sets the fence.
            SendOp::LocalInv(_) | SendOp::BindMw(_) if validation == Validation::Size => {
                return Err(PostError::Unsupported);
            }
            SendOp::LocalInv(rkey) => {
                immediate = rkey.0;
                wqe.change(&mut size, &umr::invalidate())?;
                (opcode::MLX5_OPCODE_UMR, WcOpcode::LOCAL_INV)
            }
            SendOp::BindMw(binding) => {
                immediate = binding.old_rkey.0;
                let qpn = self.shared.qpn();
                wqe.change(&mut size, &umr::bind(binding, qpn)?)?;
                (opcode::MLX5_OPCODE_UMR, WcOpcode::BIND_MW)
            }
            SendOp::Flush { .. } | SendOp::AtomicWrite { .. } | SendOp::Packet(_) => {
                return Err(PostError::Unsupported);
            }
        };
        // Written after the request's other fields are read: after a store to the queue the compiler reads them
        // from memory again, which costs 80 instructions.
        if let Some(srq) = wr.srq {
            wqe.slot.write(1, target(srq.0));
        }
        let head = control(cursor.at, code.0, size) | self.qpn | modifier;
        let tail = self.tail(validation, wr.flags, immediate);
        self.finish(cursor, &wqe, [head, tail], size, wr.wr_id, kind);
        Ok(())
    }

    /// Writes the control segment of a WQE whose other segments are written, and advances the cursor.
    #[inline(always)]
    fn finish(
        &self,
        cursor: &mut SendCursor,
        wqe: &Wqe<'_>,
        control: Segment,
        size: u32,
        wr_id: u64,
        kind: WcOpcode,
    ) {
        wqe.slot.write(0, control);
        cursor.word = control[0];
        cursor.newest = wqe.slot.offset();
        cursor.at =
            cursor.at.wrapping_add((size + (SEGMENTS_PER_WQEBB - 1)) >> SEGMENTS_PER_WQEBB.ilog2());
        cursor.head = cursor.head.wrapping_add(1);
        cursor.room -= 1;
        wqe.slot.entry().set(wr_id, cursor.head, kind.0);
    }

    /// Hands the WQEs up to a cursor to the device and rings its doorbell; `single` if there is one WQE.
    #[inline(always)]
    pub(crate) fn ring(&mut self, cursor: &SendCursor, single: bool) -> Result<(), RingError> {
        // A batch may be older than a fork, and the register is the parent's.
        if self.ring_gate.is_shut() {
            // By value, so that the batch's cursor stays in registers: 11 instructions.
            return self.ring_hosted(*cursor, single);
        }
        self.publish(cursor);
        if self.owns_register {
            self.ring_register(single, cursor);
        } else {
            let held = self.register.hold();
            self.ring_register(single, cursor);
            drop(held);
        }
        Ok(())
    }

    /// As [`ring`](Self::ring), also where the device is in this process; in a forked child an error.
    #[cold]
    #[inline(never)]
    fn ring_hosted(&mut self, cursor: SendCursor, single: bool) -> Result<(), RingError> {
        if self.gate.is_shut() {
            return Err(RingError::Forked);
        }
        self.publish(&cursor);
        let held = (!self.owns_register).then(|| self.register.hold());
        self.ring_register(single, &cursor);
        self.register.tell(cursor.word);
        drop(held);
        Ok(())
    }

    /// Hands the WQEs up to a cursor to the device.
    #[inline(always)]
    fn publish(&mut self, cursor: &SendCursor) {
        self.producer = cursor.at;
        self.head = cursor.head;
        // Pairs with the device reading WQEs after the doorbell record that counts their WQEBBs.
        udma_to_device();
        self.dbrec.set(cursor.at & 0xffff);
    }

    #[inline(always)]
    fn ring_register(&self, single: bool, cursor: &SendCursor) {
        // A WQE that fits goes into the register whole, and the device need not fetch it.
        let (wqebbs, count) = (self.buffer.wqebbs(), segments(cursor.word));
        if !self.register.blueflame(wqebbs, cursor.newest, count, single) {
            self.register.doorbell(cursor.word);
        }
    }

    /// The queue and its register, for foreign code.
    pub(crate) fn layout(&self) -> (WqLayout, RegisterLayout) {
        let wqebbs = self.buffer.wqebbs();
        let stride = SEGMENTS_PER_WQEBB * SEGMENT as u32;
        // Without a send queue the ring is a stand-in; see `SqSize::ring`.
        let wqe_count = if self.max_post == 0 { 0 } else { wqebbs.count() };
        let sq = WqLayout { buf: wqebbs.as_ptr(), wqe_count, stride };
        let (reg, blueflame_bytes) = (self.register.as_ptr(), self.register.buffer() as u32);
        (sq, RegisterLayout { reg, blueflame_bytes, mmap_offset: self.told.mmap_offset })
    }

    /// Sets what foreign code will be told.
    pub(crate) fn tell(&mut self, told: Told) {
        *self.told = told;
    }

    pub(crate) fn raw_packet_numbers(&self) -> RawPacketNumbers {
        self.told.raw_packet
    }

    /// WQEBBs posted, modulo 2^16.
    pub(crate) fn posted(&self) -> u16 {
        self.producer as u16
    }

    /// Requests that have no completion yet, nor one behind them.
    pub(crate) fn outstanding(&self) -> u32 {
        self.head.wrapping_sub(self.shared.sends.tail())
    }

    /// The doorbell record, which the receive queue shares.
    pub(crate) fn dbrec(&self) -> &DoorbellRecord {
        self.dbrec.record()
    }

    /// Lets completions of WQEs that foreign code posts have the WQE's index as their `wr_id`.
    pub(crate) fn number_wqes(&self) {
        self.shared.sends.number_wqes();
    }

    /// Rings for WQEs that foreign code wrote, up to the WQEBB `producer`; `word` is the beginning of the newest.
    pub(crate) fn ring_foreign(&mut self, producer: u16, word: u64) -> Result<(), RingError> {
        let cursor =
            SendCursor { at: producer.into(), head: self.head, word, ..SendCursor::default() };
        self.ring_hosted(cursor, false)
    }

    /// Goes on behind WQEBBs that foreign code posted, none of which is outstanding.
    pub(crate) fn resume(&mut self, wqebbs: u16) {
        (self.producer, self.head) = (wqebbs.into(), 0);
        self.set_fence(None);
        self.shared.sends.reset();
    }

    /// Resets the ring, as the device does in state `RESET`.
    pub(crate) fn reset(&mut self) {
        (self.producer, self.head) = (0, 0);
        self.set_fence(None);
        self.shared.sends.reset();
        self.dbrec.set(0);
    }
}

/// The range of WQEs that wait for key changes before them.
#[derive(Clone, Copy, Debug)]
struct PendingFence {
    /// The number of the last such WQE.
    last: u32,
    /// The producer's WQE number when the fence was set.
    since: u32,
    /// Whether the WQEs also wait for a key change of an earlier batch, which may be posted.
    older: bool,
}

impl PendingFence {
    fn reaches(&self, head: u32) -> bool {
        self.last.wrapping_sub(head) as i32 >= 0
    }
}

/// The checks that a WQE still needs when it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Validation {
    /// The SGE count and the inline length. A single SGE is valid, and no fence is pending.
    Size,
    /// Everything; no fence is pending.
    All,
    /// Everything, and a fence is pending.
    AllAndFence,
}

/// The control segment's flags that say which completion and event the WQE raises.
#[inline(always)]
fn completion_flags(asked: SendFlags) -> u8 {
    let mut bits = 0;
    for (flag, bit) in [
        (SendFlags::SIGNALED, flags::MLX5_WQE_CTRL_CQ_UPDATE.bits()),
        (SendFlags::SOLICITED, flags::MLX5_WQE_CTRL_SOLICITED.bits()),
    ] {
        if asked.contains(flag) {
            bits |= bit;
        }
    }
    bits
}

/// A WQE that is being written.
#[derive(Clone, Copy)]
struct Wqe<'r> {
    ring: &'r Mlx5Sq,
    slot: WqeSlot<'r, SqWrId>,
    /// Whether a single SGE needs no check: it fits, and its length is not 0.
    sge_is_checked: bool,
}

impl<'r> Wqe<'r> {
    #[inline(always)]
    fn new(ring: &'r Mlx5Sq, at: u32, sge_is_checked: bool) -> Self {
        Wqe { ring, slot: ring.buffer.at(at), sge_is_checked }
    }
}

impl Wqe<'_> {
    #[inline(always)]
    fn append(self, size: &mut u32, segment: Segment) {
        self.slot.write(*size, segment);
        *size += 1;
    }

    #[inline(always)]
    fn payload(self, size: &mut u32, payload: &Payload<'_>) -> Result<(), PostError> {
        match payload {
            Payload::Sges(sges) => self.gather(size, sges),
            Payload::Inline(bytes) => self.inline(size, bytes),
            Payload::InlineList(parts) => {
                *size = match self.inline_list(*size, parts) {
                    Some(size) => size,
                    None => self.inline_list_checked(*size, parts, 0)?,
                };
                Ok(())
            }
        }
    }

    /// Appends SGEs; those of zero length are left out.
    #[inline(always)]
    fn gather(self, size: &mut u32, sges: &[Sge]) -> Result<(), PostError> {
        if let ([sge], true) = (sges, self.sge_is_checked) {
            self.append(size, data(sge));
            return Ok(());
        }
        let max = self.ring.max_sge;
        if sges.len() > max as usize {
            return Err(PostError::TooManySge { max });
        }
        let mut length = 0u64;
        for sge in sges {
            length += u64::from(sge.length);
            if sge.length > 0 {
                self.slot.write_anywhere(*size, data(sge));
                *size += 1;
            }
        }
        // The uppermost bit of a length would make it inline data.
        if length > i32::MAX as u64 { Err(PostError::TooLong) } else { Ok(()) }
    }

    /// Appends the remote address and the operands of an atomic, and the SGEs that its result goes to.
    #[inline(always)]
    fn atomic(
        self,
        size: &mut u32,
        at: &Remote,
        operands: &[Segment],
        payload: &Payload<'_>,
    ) -> Result<(), PostError> {
        if at.addr % u64::from(ATOMIC) != 0 {
            return Err(PostError::Unaligned);
        }
        let Payload::Sges(sges) = payload else { return Err(PostError::NoInline) };
        let max = self.ring.max_sge;
        if sges.len() > max as usize {
            return Err(PostError::TooManySge { max });
        }
        self.append(size, remote(at.addr, at.rkey.0));
        for segment in operands {
            self.append(size, *segment);
        }
        let mut left = ATOMIC;
        for sge in *sges {
            let length = sge.length.min(left);
            if length > 0 {
                self.append(size, data(&Sge { length, ..*sge }));
                left -= length;
            }
        }
        if left > 0 { Err(PostError::AtomicTooShort) } else { Ok(()) }
    }

    /// As [`atomic`](Self::atomic) for a masked atomic, which is rare and longer.
    #[cold]
    #[inline(never)]
    fn masked(
        self,
        mut size: u32,
        at: &Remote,
        operands: &[Segment],
        payload: &Payload<'_>,
    ) -> Result<u32, PostError> {
        // With its masks the WQE may exceed the size that the queue reserves for each.
        if let Payload::Sges(sges) = payload {
            let mut left = ATOMIC;
            let is_used = |sge: &&Sge| {
                let length = sge.length.min(left);
                left -= length;
                length > 0
            };
            let used = sges.iter().filter(is_used).count() as u32;
            let before = size.saturating_add(1).saturating_add(operands.len() as u32);
            let max = self.ring.max_segments.saturating_sub(before);
            if used > max {
                return Err(PostError::TooManySge { max });
            }
        }
        self.atomic(&mut size, at, operands, payload)?;
        Ok(size)
    }

    #[cold]
    fn change(self, size: &mut u32, change: &Change) -> Result<(), PostError> {
        let segments = change.segments();
        if segments.len() as u32 >= self.ring.max_segments {
            return Err(PostError::Unsupported);
        }
        for segment in segments {
            self.append(size, *segment);
        }
        Ok(())
    }

    /// Appends inline data. The rest of its last segment stays as it was.
    #[inline(always)]
    fn inline(self, size: &mut u32, bytes: &[u8]) -> Result<(), PostError> {
        let max = self.ring.max_inline;
        if bytes.len() > max {
            return Err(PostError::InlineTooLong { max: max as u32 });
        }
        let length = inline_length(bytes.len() as u32);
        *size += self.slot.inline(*size, length, bytes);
        Ok(())
    }

    /// As [`inline`](Self::inline), of several short slices that fit and lie in one piece in the ring; `None` for others.
    #[inline(always)]
    fn inline_list(self, size: u32, parts: &[&[u8]]) -> Option<u32> {
        let word = |length: usize| inline_length(length as u32);
        let max = self.ring.max_inline;
        Some(size + self.slot.inline_list_in_one_piece(size, max, word, parts)?)
    }

    /// As [`inline_list`](Self::inline_list) for any slices, without their first `skipped` bytes.
    #[cold]
    #[inline(never)]
    fn inline_list_checked(
        self,
        size: u32,
        parts: &[&[u8]],
        skipped: usize,
    ) -> Result<u32, PostError> {
        let max = self.ring.max_inline;
        let length = inline_bytes(parts).saturating_sub(skipped);
        if length > max {
            return Err(PostError::InlineTooLong { max: max as u32 });
        }
        let word = inline_length(length as u32);
        Ok(size + self.slot.inline_list(size, word, length, parts, skipped))
    }
}

/// The segments of an address vector for the queue pair `qpn` with the key `qkey`.
#[inline(always)]
fn vector(av: &mlx5_av, qkey: u32, qpn: u32) -> [Segment; VECTOR as usize] {
    let mut segments: [Segment; VECTOR as usize] = zerocopy::transmute!(*av);
    segments[0][0] = pair(qkey, 0);
    // This field of the address vector is zero.
    segments[0][1] |= pair(qpn | MLX5_EXTENDED_UD_AV, 0);
    segments
}
