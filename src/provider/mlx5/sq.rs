//! The send queue of a queue pair: requests of 64-byte blocks that we produce, and the register
//! that makes the device look.

mod packet;

pub(crate) use packet::Frames;

use super::umr::{self, Change};
use super::wqe::{
    LONGEST, MASKED_EIGHT, Unit, atomic, control, data, inline_length, pair, remote, target, units,
};
use super::wr_ids::{SharedQp, SqWrId};
use crate::memory::barrier::udma_to_device;
use crate::memory::doorbell_record::{DoorbellRecord, Gate, RecordWord};
use crate::memory::doorbell_register::DoorbellRegister;
use crate::memory::queue_memory::QueueMemory;
use crate::memory::sq_buffer::{SqBuffer, WqeSlot};
use crate::memory::wqe_segment::SEGMENT;
use crate::memory::wqebb::{SEGMENTS_PER_WQEBB, Wqebbs};
use crate::provider::{Cursor, SendLimits};
use crate::wc::WcOpcode;
use crate::wr::{Address, Destination, Payload, PostError, Remote, SendFlags, SendOp, SendWr, Sge};
use std::sync::Arc;
use uverbs_uapi::mlx5::wqe::{
    MLX5_EXTENDED_UD_AV, MLX5_FENCE_MODE_SMALL_AND_FENCE, MLX5_SEND_WQE_MAX_WQEBBS, MLX5_SND_DBR,
    mlx5_av, mlx5_wqe_ctrl_flags as flags, mlx5_wqe_opcode as opcode,
};

/// WqeSegments of an address vector.
const VECTOR: u32 = (size_of::<mlx5_av>() / SEGMENT) as u32;
/// Bytes that an atomic works on.
const ATOMIC: u32 = 8;
/// Waits for reads and atomics, and for changes of keys.
const FENCE: u8 = MLX5_FENCE_MODE_SMALL_AND_FENCE;
/// Waits for changes of keys.
const SMALL_FENCE: u8 = flags::MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE.bits();

/// What a send queue is made from.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) memory: Arc<QueueMemory>,
    /// Where in the memory it begins, in bytes.
    pub(crate) offset: usize,
    /// Wqebbs of 64 bytes, a power of two.
    pub(crate) wqebbs: u32,
    /// Requests that fit, whatever they are.
    pub(crate) max_post: u32,
    pub(crate) limits: SendLimits,
    pub(crate) qpn: u32,
    pub(crate) signal_all: bool,
    pub(crate) dbrec: Arc<DoorbellRecord>,
    pub(crate) register: Arc<DoorbellRegister>,
    /// Whether nobody else rings the register while a batch of this queue is rung.
    pub(crate) alone: bool,
    pub(crate) record: Arc<SharedQp>,
    pub(crate) frames: Frames,
    pub(crate) gate: Gate,
}

#[derive(Debug)]
pub(crate) struct SendRing {
    // Before the memory, as it is where the kernel's object holds both.
    word: RecordWord<MLX5_SND_DBR>,
    blocks: SqBuffer<SqWrId>,
    gate: Gate,
    /// The queue pair's number, as it lies in a request.
    qpn: u64,
    /// Flags of every request, as they lie there.
    always: u64,
    /// Wqebbs written in all.
    at: u32,
    /// Requests posted in all.
    head: u32,
    max_post: u32,
    /// Requests that wait for changes of keys before them.
    waits: Option<PendingFence>,
    max_sge: u32,
    max_inline: usize,
    register: Arc<DoorbellRegister>,
    alone: bool,
    /// The greatest request, in units.
    largest: u32,
    record: Arc<SharedQp>,
    frames: Frames,
}

impl SendRing {
    /// `None` if the queue does not fit into its memory.
    pub(crate) fn new(setup: Setup) -> Option<SendRing> {
        let largest = setup.wqebbs.checked_div(setup.max_post)?;
        let always = if setup.signal_all { flags::MLX5_WQE_CTRL_CQ_UPDATE.bits() } else { 0 };
        Some(SendRing {
            blocks: SqBuffer::new(
                Wqebbs::new(setup.memory, setup.offset, setup.wqebbs)?,
                setup.record.sends.notes(),
            )?,
            gate: setup.gate,
            qpn: pair(0, setup.qpn << 8),
            always: pair(always.into(), 0),
            at: 0,
            head: 0,
            max_post: setup.max_post,
            waits: None,
            max_sge: setup.limits.max_sge,
            max_inline: setup.limits.max_inline as usize,
            word: setup.dbrec.word(),
            register: setup.register,
            alone: setup.alone,
            largest: largest
                .min(MLX5_SEND_WQE_MAX_WQEBBS as u32)
                .saturating_mul(SEGMENTS_PER_WQEBB)
                .min(LONGEST),
            record: setup.record,
            frames: setup.frames,
        })
    }

    /// Whether sends may be posted here and now; shut in a forked child.
    #[inline(always)]
    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Whether a request may name memory; else [`try_push`](Self::try_push) is not to be called with one
    /// that does.
    pub(crate) fn takes_pieces(&self) -> bool {
        self.max_sge > 0
    }

    #[inline(always)]
    pub(crate) fn cursor(&self) -> Cursor {
        let used = self.head.wrapping_sub(self.record.sends.tail());
        let room = self.max_post.wrapping_sub(used);
        Cursor { at: self.at, room, head: self.head, ..Cursor::default() }
    }

    /// Requests up to a cursor that are not published.
    pub(crate) fn pushed(&self, cursor: &Cursor) -> u32 {
        cursor.head.wrapping_sub(self.head)
    }

    /// As [`push`](Self::push) for usual requests that nothing is wrong with; `false`, and
    /// nothing done, for all others. So there is one way out of what is inlined. Who calls has seen the
    /// gate open, that the request [suits](Cursor::suits), and that it need not [wait](Self::may_wait).
    #[inline(always)]
    pub(crate) fn try_push(&self, cursor: &mut Cursor, wr: &SendWr<'_>) -> bool {
        debug_assert!(cursor.suits(wr) && !self.may_wait());
        match &wr.destination {
            None => self.write(cursor, wr, Validation::Seen).is_ok(),
            Some(to) => self.datagram(cursor, to, wr, Validation::Seen).is_ok(),
        }
    }

    /// Writes a request where the cursor stands; after an error the cursor has not moved. Who calls
    /// has seen to it that datagrams, and they alone, have a destination.
    #[cold]
    #[inline(never)]
    pub(crate) fn push(&mut self, cursor: &mut Cursor, wr: &SendWr<'_>) -> Result<(), PostError> {
        self.check(cursor)?;
        let care = if self.waits(cursor) { Validation::Wait } else { Validation::All };
        match &wr.destination {
            None => self.write(cursor, wr, care)?,
            Some(to) => self.datagram(cursor, to, wr, care)?,
        }
        if wr.op.changes_keys() {
            self.wait(cursor.head);
        } else {
            self.waited(cursor.head);
        }
        Ok(())
    }

    /// Whether requests may have to wait for a change of keys, so that they have to be
    /// [looked at](Self::push).
    pub(crate) fn may_wait(&self) -> bool {
        self.waits.is_some()
    }

    /// What a usual request is looked at for before it is written.
    fn check(&self, cursor: &Cursor) -> Result<(), PostError> {
        // A batch may be older than the fork.
        if self.gate.is_shut() {
            return Err(PostError::Forked);
        }
        if cursor.room == 0 {
            return Err(PostError::Full);
        }
        Ok(())
    }

    /// Lets requests up to the number `last` wait for changes of keys before them.
    ///
    /// That is kept here, and not in the cursor, so that requests which have nothing to do with it need
    /// not carry it along. A batch that is dropped lets others wait in vain.
    pub(crate) fn wait(&mut self, last: u32) {
        let since = self.head;
        // What was said of an earlier batch is about what was posted, as far as is known here.
        let older =
            |waits: &PendingFence| waits.older || waits.since != since && waits.reaches(since);
        self.waits =
            Some(PendingFence { last, since, older: self.waits.as_ref().is_some_and(older) });
    }

    /// Whether the request where the cursor stands waits for changes of keys. When all that do are posted
    /// that is over.
    fn waits(&mut self, cursor: &Cursor) -> bool {
        let Some(waits) = self.waits else { return false };
        if !waits.reaches(self.head) {
            self.waits = None;
        }
        waits.reaches(cursor.head)
    }

    /// All requests before the number `next` are written. Those of the same batch that wait are over with it:
    /// without them the change is not posted either.
    fn waited(&mut self, next: u32) {
        let same = |waits: &PendingFence| !waits.older && waits.since == self.head;
        self.waits = self.waits.filter(|waits| !same(waits) || waits.reaches(next));
    }

    /// Writes a message that says itself where it goes.
    #[inline(always)]
    fn datagram(
        &self,
        cursor: &mut Cursor,
        to: &Destination<'_>,
        wr: &SendWr<'_>,
        care: Validation,
    ) -> Result<(), PostError> {
        let (code, immediate) = match wr.op {
            SendOp::Send => (opcode::MLX5_OPCODE_SEND, 0),
            SendOp::SendImm(imm) => (opcode::MLX5_OPCODE_SEND_IMM, imm),
            _ => return Err(PostError::Unsupported),
        };
        let Address::Mlx5(av) = to.address else { return Err(PostError::Destination) };
        let request = Request::new(self, cursor.at, care.is_over());
        let mut size = 1;
        for unit in vector(av, to.qkey.0, to.qpn.0) {
            request.append(&mut size, unit);
        }
        request.payload(&mut size, &wr.payload)?;
        let head = control(cursor.at, code.0, size) | self.qpn;
        let tail = self.tail(care, wr.flags, immediate);
        self.finish(cursor, &request, [head, tail], size, wr.wr_id, WcOpcode::SEND);
        Ok(())
    }

    /// The second word of a request.
    #[inline(always)]
    fn tail(&self, care: Validation, asked: SendFlags, immediate: u32) -> u64 {
        let fence = match (asked.contains(SendFlags::FENCE), care) {
            (true, _) => FENCE,
            (false, Validation::Wait) => SMALL_FENCE,
            (false, _) => 0,
        };
        pair((announced(asked) | fence).into(), immediate) | self.always
    }

    /// Writes any request but a datagram.
    #[inline(always)]
    fn write(
        &self,
        cursor: &mut Cursor,
        wr: &SendWr<'_>,
        care: Validation,
    ) -> Result<(), PostError> {
        let request = Request::new(self, cursor.at, care.is_over());
        // WqeSegments written so far. The first is written last, when the size is known.
        let mut size = 1;
        if let Some(srq) = wr.srq {
            request.append(&mut size, target(srq.0));
        }
        let mut immediate = 0;
        let mut modifier = 0;
        let (code, kind) = match &wr.op {
            SendOp::Send => {
                request.payload(&mut size, &wr.payload)?;
                (opcode::MLX5_OPCODE_SEND, WcOpcode::SEND)
            }
            SendOp::SendImm(imm) => {
                immediate = *imm;
                request.payload(&mut size, &wr.payload)?;
                (opcode::MLX5_OPCODE_SEND_IMM, WcOpcode::SEND)
            }
            SendOp::SendInv(rkey) => {
                immediate = rkey.0;
                request.payload(&mut size, &wr.payload)?;
                (opcode::MLX5_OPCODE_SEND_INVAL, WcOpcode::SEND)
            }
            SendOp::Write(to) => {
                request.append(&mut size, remote(to.addr, to.rkey.0));
                request.payload(&mut size, &wr.payload)?;
                (opcode::MLX5_OPCODE_RDMA_WRITE, WcOpcode::WRITE)
            }
            SendOp::WriteImm(to, imm) => {
                immediate = *imm;
                request.append(&mut size, remote(to.addr, to.rkey.0));
                request.payload(&mut size, &wr.payload)?;
                (opcode::MLX5_OPCODE_RDMA_WRITE_IMM, WcOpcode::WRITE)
            }
            SendOp::Read(from) => {
                request.append(&mut size, remote(from.addr, from.rkey.0));
                request.payload(&mut size, &wr.payload)?;
                (opcode::MLX5_OPCODE_RDMA_READ, WcOpcode::READ)
            }
            SendOp::CompareSwap { remote: at, compare, swap } => {
                request.atomic(&mut size, at, &[atomic(*swap, *compare)], &wr.payload)?;
                (opcode::MLX5_OPCODE_ATOMIC_CS, WcOpcode::COMPARE_SWAP)
            }
            SendOp::FetchAdd { remote: at, add } => {
                request.atomic(&mut size, at, &[atomic(*add, 0)], &wr.payload)?;
                (opcode::MLX5_OPCODE_ATOMIC_FA, WcOpcode::FETCH_ADD)
            }
            SendOp::MaskedCompareSwap { remote: at, operands: with } => {
                modifier = MASKED_EIGHT;
                let values = atomic(with.swap, with.compare);
                let masks = atomic(with.swap_mask, with.compare_mask);
                size = request.masked(size, at, &[values, masks], &wr.payload)?;
                (opcode::MLX5_OPCODE_ATOMIC_MASKED_CS, WcOpcode::COMPARE_SWAP)
            }
            SendOp::MaskedFetchAdd { remote: at, add, boundary } => {
                modifier = MASKED_EIGHT;
                size = request.masked(size, at, &[atomic(*add, *boundary)], &wr.payload)?;
                (opcode::MLX5_OPCODE_ATOMIC_MASKED_FA, WcOpcode::FETCH_ADD)
            }
            // The next request has to know of these.
            SendOp::LocalInv(_) | SendOp::BindMw(_) if care.is_over() => {
                return Err(PostError::Unsupported);
            }
            SendOp::LocalInv(rkey) => {
                immediate = rkey.0;
                request.change(&mut size, &umr::invalidate())?;
                (opcode::MLX5_OPCODE_UMR, WcOpcode::LOCAL_INV)
            }
            SendOp::BindMw(binding) => {
                immediate = binding.old_rkey.0;
                let qpn = self.record.qpn();
                request.change(&mut size, &umr::bind(binding, qpn)?)?;
                (opcode::MLX5_OPCODE_UMR, WcOpcode::BIND_MW)
            }
            SendOp::Flush { .. } | SendOp::AtomicWrite { .. } | SendOp::Packet(_) => {
                return Err(PostError::Unsupported);
            }
        };
        let head = control(cursor.at, code.0, size) | self.qpn | modifier;
        let tail = self.tail(care, wr.flags, immediate);
        self.finish(cursor, &request, [head, tail], size, wr.wr_id, kind);
        Ok(())
    }

    /// Writes the first unit of a request whose others are written, and moves on behind it.
    #[inline(always)]
    fn finish(
        &self,
        cursor: &mut Cursor,
        request: &Request<'_>,
        control: Unit,
        size: u32,
        wr_id: u64,
        kind: WcOpcode,
    ) {
        request.place.write(0, control);
        cursor.word = control[0];
        cursor.newest = request.place.spot();
        cursor.at =
            cursor.at.wrapping_add((size + (SEGMENTS_PER_WQEBB - 1)) >> SEGMENTS_PER_WQEBB.ilog2());
        cursor.head = cursor.head.wrapping_add(1);
        cursor.room -= 1;
        cursor.count += 1;
        request.place.note().set(wr_id, cursor.head, kind.0);
    }

    /// Takes over where a cursor ended, and makes the device look; `single` if it is about one
    /// request. Not to be called in a forked child, whose registers are its parent's.
    #[inline(always)]
    pub(crate) fn publish(&mut self, cursor: Cursor, single: bool) {
        self.at = cursor.at;
        self.head = cursor.head;
        // Pairs with the device reading requests after the record that counts their blocks.
        udma_to_device();
        self.word.set(cursor.at & 0xffff);
        if self.alone {
            self.make_look(single, &cursor);
        } else {
            let held = self.register.hold();
            self.make_look(single, &cursor);
            drop(held);
        }
    }

    #[inline(always)]
    fn make_look(&self, single: bool, cursor: &Cursor) {
        // A request that fits goes whole, and the device need not fetch it.
        let (blocks, count) = (self.blocks.blocks(), units(cursor.word));
        if !self.register.blueflame(blocks, cursor.newest, count, single) {
            self.register.doorbell(cursor.word);
        }
    }

    /// Begins anew, as the device does in state `RESET`.
    pub(crate) fn reset(&mut self) {
        (self.at, self.head) = (0, 0);
        self.waits = None;
        self.record.sends.reset();
        self.word.set(0);
    }
}

/// Which requests wait for changes of keys.
#[derive(Clone, Copy, Debug)]
struct PendingFence {
    /// Up to this number.
    last: u32,
    /// Where the queue stood when that was said.
    since: u32,
    /// Others, which may have been posted by then, were waited for already.
    older: bool,
}

impl PendingFence {
    fn reaches(&self, head: u32) -> bool {
        self.last.wrapping_sub(head) as i32 >= 0
    }
}

/// What is still to be looked at when a request is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Validation {
    /// Whether several pieces, or what it has inside, are too much. One piece is good, and it waits for no
    /// change of keys.
    Seen,
    /// Everything but that it does not wait.
    All,
    /// Everything, and it waits.
    Wait,
}

impl Validation {
    #[inline(always)]
    fn is_over(self) -> bool {
        matches!(self, Validation::Seen)
    }
}

/// What a request asks for when it completes.
#[inline(always)]
fn announced(asked: SendFlags) -> u8 {
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

/// A request in the making.
#[derive(Clone, Copy)]
struct Request<'r> {
    ring: &'r SendRing,
    place: WqeSlot<'r, SqWrId>,
    /// Whether a lone piece of memory was looked at before.
    usual: bool,
}

impl<'r> Request<'r> {
    #[inline(always)]
    fn new(ring: &'r SendRing, at: u32, usual: bool) -> Self {
        Request { ring, place: ring.blocks.at(at), usual }
    }
}

impl Request<'_> {
    #[inline(always)]
    fn append(self, size: &mut u32, unit: Unit) {
        self.place.write(*size, unit);
        *size += 1;
    }

    #[inline(always)]
    fn payload(self, size: &mut u32, payload: &Payload<'_>) -> Result<(), PostError> {
        match payload {
            Payload::Sges(sges) => self.gather(size, sges),
            Payload::Inline(bytes) => self.inline(size, bytes),
        }
    }

    /// Appends pieces of memory, and those of no bytes not at all.
    #[inline(always)]
    fn gather(self, size: &mut u32, sges: &[Sge]) -> Result<(), PostError> {
        if let ([sge], true) = (sges, self.usual) {
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
                self.place.write_anywhere(*size, data(sge));
                *size += 1;
            }
        }
        // The uppermost bit of a length would make it inline data.
        if length > i32::MAX as u64 { Err(PostError::TooLong) } else { Ok(()) }
    }

    /// Appends what an atomic works on, with what, and where the eight bytes go that were there.
    #[inline(always)]
    fn atomic(
        self,
        size: &mut u32,
        at: &Remote,
        operands: &[Unit],
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
        for unit in operands {
            self.append(size, *unit);
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

    /// As [`atomic`](Self::atomic), from a size to a size: out of the way of what is more frequent.
    #[cold]
    #[inline(never)]
    fn masked(
        self,
        mut size: u32,
        at: &Remote,
        operands: &[Unit],
        payload: &Payload<'_>,
    ) -> Result<u32, PostError> {
        // With its masks it may be longer than what the ring has room for each request.
        if let Payload::Sges(sges) = payload {
            let mut left = ATOMIC;
            let is_used = |sge: &&Sge| {
                let length = sge.length.min(left);
                left -= length;
                length > 0
            };
            let used = sges.iter().filter(is_used).count() as u32;
            let before = size.saturating_add(1).saturating_add(operands.len() as u32);
            let max = self.ring.largest.saturating_sub(before);
            if used > max {
                return Err(PostError::TooManySge { max });
            }
        }
        self.atomic(&mut size, at, operands, payload)?;
        Ok(size)
    }

    #[cold]
    fn change(self, size: &mut u32, change: &Change) -> Result<(), PostError> {
        let units = change.units();
        if units.len() as u32 >= self.ring.largest {
            return Err(PostError::Unsupported);
        }
        for unit in units {
            self.append(size, *unit);
        }
        Ok(())
    }

    /// Appends the data itself, filled up to whole units with what was there.
    #[inline(always)]
    fn inline(self, size: &mut u32, bytes: &[u8]) -> Result<(), PostError> {
        let max = self.ring.max_inline;
        if bytes.len() > max {
            return Err(PostError::InlineTooLong { max: max as u32 });
        }
        let length = inline_length(bytes.len() as u32);
        *size += self.place.inline(*size, length, bytes);
        Ok(())
    }
}

/// The units of an address vector for the queue pair `qpn` with the key `qkey`.
#[inline(always)]
fn vector(av: &mlx5_av, qkey: u32, qpn: u32) -> [Unit; VECTOR as usize] {
    let mut units: [Unit; VECTOR as usize] = zerocopy::transmute!(*av);
    units[0][0] = pair(qkey, 0);
    // Nothing is there yet.
    units[0][1] |= pair(qpn | MLX5_EXTENDED_UD_AV, 0);
    units
}
