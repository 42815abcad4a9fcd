//! The send queue of a queue pair: requests of 64-byte blocks that we produce, and the register
//! that makes the device look.

use super::record::Record;
use super::umr::{self, Change};
use super::wqe::{Unit, atomic, control, data, inline_length, pair, remote, target};
use crate::completion::WcOpcode;
use crate::mem::barrier::udma_to_device;
use crate::mem::dbrec::{DoorbellRecord, RecordWord};
use crate::mem::queue::{QueueMemory, UNIT, Units};
use crate::mem::register::Register;
use crate::provider::{Address, Cursor, SendLimits};
use crate::qp::QpType;
use crate::wr::{Payload, PostError, SendFlags, SendOp, SendWr, Sge};
use std::sync::Arc;
use uverbs_uapi::mlx5::wqe::{
    MLX5_EXTENDED_UD_AV, MLX5_FENCE_MODE_FENCE, MLX5_SEND_WQE_BB, MLX5_SEND_WQE_MAX_WQEBBS,
    MLX5_SND_DBR, mlx5_av, mlx5_wqe_ctrl_flags as flags, mlx5_wqe_opcode as opcode,
};

/// Units of a block.
const BLOCK: u32 = (MLX5_SEND_WQE_BB / UNIT) as u32;
/// Units of an address vector.
const VECTOR: u32 = (size_of::<mlx5_av>() / UNIT) as u32;
/// Bytes that an atomic works on.
const ATOMIC: u32 = 8;
/// Keeps the next request from using a key before this one has changed it.
const SMALL_FENCE: u8 = flags::MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE.bits();

/// What a send queue is made from.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) memory: Arc<QueueMemory>,
    /// Where in the memory it begins, in bytes.
    pub(crate) offset: usize,
    /// Blocks of 64 bytes, a power of two.
    pub(crate) wqebbs: u32,
    /// Requests that fit, whatever they are.
    pub(crate) max_post: u32,
    pub(crate) limits: SendLimits,
    pub(crate) qpn: u32,
    pub(crate) qp_type: QpType,
    pub(crate) signal_all: bool,
    pub(crate) dbrec: Arc<DoorbellRecord>,
    pub(crate) register: Arc<Register>,
    /// Whether nobody else rings the register while a batch of this queue is rung.
    pub(crate) alone: bool,
    pub(crate) record: Arc<Record>,
}

#[derive(Debug)]
pub(crate) struct SendRing {
    units: Units,
    /// Where the queue pair's number belongs in a request.
    qpn: u32,
    /// Flags of every request.
    always: u8,
    /// Whether requests go to different places.
    datagram: bool,
    alone: bool,
    /// What the next request has to wait for.
    fence: u8,
    /// The greatest request, in units.
    largest: u32,
    /// Blocks written in all.
    at: u32,
    /// Requests posted in all.
    head: u32,
    max_post: u32,
    limits: SendLimits,
    word: RecordWord<MLX5_SND_DBR>,
    register: Arc<Register>,
    record: Arc<Record>,
}

impl SendRing {
    /// `None` if the queue does not fit into its memory.
    pub(crate) fn new(setup: Setup) -> Option<SendRing> {
        let units = setup.wqebbs.checked_mul(BLOCK)?;
        let blocks = setup.wqebbs.checked_div(setup.max_post)?;
        let always = if setup.signal_all { flags::MLX5_WQE_CTRL_CQ_UPDATE.bits() } else { 0 };
        Some(SendRing {
            units: Units::new(setup.memory, setup.offset, units)?,
            qpn: setup.qpn << 8,
            always,
            datagram: setup.qp_type == QpType::UD,
            alone: setup.alone,
            fence: 0,
            largest: blocks.min(MLX5_SEND_WQE_MAX_WQEBBS as u32) * BLOCK,
            at: 0,
            head: 0,
            max_post: setup.max_post,
            limits: setup.limits,
            word: setup.dbrec.word(),
            register: setup.register,
            record: setup.record,
        })
    }

    #[inline]
    pub(crate) fn cursor(&self) -> Cursor {
        let used = self.head.wrapping_sub(self.record.sends.tail());
        Cursor {
            at: self.at,
            room: self.max_post.saturating_sub(used),
            head: self.head,
            fence: self.fence,
            ..Cursor::default()
        }
    }

    #[inline]
    pub(crate) fn push(&self, cursor: &mut Cursor, wr: &SendWr<'_>) -> Result<(), PostError> {
        // A batch may be older than the fork.
        if self.units.epoch().is_over() {
            return Err(PostError::Forked);
        }
        if cursor.room == 0 {
            return Err(PostError::Full);
        }
        let first = cursor.at.wrapping_mul(BLOCK);
        // The first unit is written last, when the size is known.
        let mut next = first.wrapping_add(1);
        if self.datagram {
            let Some(to) = &wr.destination else { return Err(PostError::Destination) };
            let Address::Mlx5(av) = to.address else { return Err(PostError::Destination) };
            for unit in vector(av, to.qkey.0, to.qpn.0) {
                self.units.write(next, unit);
                next = next.wrapping_add(1);
            }
        }
        if let Some(srq) = wr.srq {
            self.append(&mut next, target(srq.0));
        }
        let mut immediate = 0;
        let mut fence = 0;
        // An atomic works on eight bytes, whatever room there is for the answer.
        let mut most = u32::MAX;
        let (code, kind) = match &wr.op {
            SendOp::Send => (opcode::MLX5_OPCODE_SEND, WcOpcode::SEND),
            SendOp::SendImm(imm) => {
                immediate = *imm;
                (opcode::MLX5_OPCODE_SEND_IMM, WcOpcode::SEND)
            }
            SendOp::SendInv(rkey) => {
                immediate = rkey.0;
                (opcode::MLX5_OPCODE_SEND_INVAL, WcOpcode::SEND)
            }
            SendOp::Write(to) => {
                self.append(&mut next, remote(to.addr, to.rkey.0));
                (opcode::MLX5_OPCODE_RDMA_WRITE, WcOpcode::WRITE)
            }
            SendOp::WriteImm(to, imm) => {
                self.append(&mut next, remote(to.addr, to.rkey.0));
                immediate = *imm;
                (opcode::MLX5_OPCODE_RDMA_WRITE_IMM, WcOpcode::WRITE)
            }
            SendOp::Read(from) => {
                self.append(&mut next, remote(from.addr, from.rkey.0));
                (opcode::MLX5_OPCODE_RDMA_READ, WcOpcode::READ)
            }
            SendOp::CompareSwap { remote: at, compare, swap } => {
                if at.addr % u64::from(ATOMIC) != 0 {
                    return Err(PostError::Unaligned);
                }
                self.append(&mut next, remote(at.addr, at.rkey.0));
                self.append(&mut next, atomic(*swap, *compare));
                most = ATOMIC;
                (opcode::MLX5_OPCODE_ATOMIC_CS, WcOpcode::COMPARE_SWAP)
            }
            SendOp::FetchAdd { remote: at, add } => {
                if at.addr % u64::from(ATOMIC) != 0 {
                    return Err(PostError::Unaligned);
                }
                self.append(&mut next, remote(at.addr, at.rkey.0));
                self.append(&mut next, atomic(*add, 0));
                most = ATOMIC;
                (opcode::MLX5_OPCODE_ATOMIC_FA, WcOpcode::FETCH_ADD)
            }
            SendOp::LocalInv(rkey) => {
                self.change(&mut next, &umr::invalidate())?;
                immediate = rkey.0;
                fence = SMALL_FENCE;
                (opcode::MLX5_OPCODE_UMR, WcOpcode::LOCAL_INV)
            }
            SendOp::BindMw(binding) => {
                self.change(&mut next, &umr::bind(binding, self.qpn >> 8)?)?;
                immediate = binding.old_rkey.0;
                fence = SMALL_FENCE;
                (opcode::MLX5_OPCODE_UMR, WcOpcode::BIND_MW)
            }
            SendOp::Flush { .. } | SendOp::AtomicWrite { .. } => {
                return Err(PostError::Unsupported);
            }
        };
        match wr.payload {
            Payload::Sges(sges) => self.gather(&mut next, sges, most)?,
            Payload::Inline(bytes) => self.inline(&mut next, bytes)?,
        }
        let size = next.wrapping_sub(first);
        let flags = wr.flags;
        let bits = self.always
            | if flags.contains(SendFlags::FENCE) { MLX5_FENCE_MODE_FENCE } else { cursor.fence }
            | if flags.contains(SendFlags::SIGNALED) {
                flags::MLX5_WQE_CTRL_CQ_UPDATE.bits()
            } else {
                0
            }
            | if flags.contains(SendFlags::SOLICITED) {
                flags::MLX5_WQE_CTRL_SOLICITED.bits()
            } else {
                0
            };
        self.units.write(first, control(cursor.at, code.0, self.qpn, size, bits, immediate));
        self.record.sends.note(cursor.at, wr.wr_id, cursor.head, kind.0);
        cursor.last = cursor.at;
        cursor.size = size;
        cursor.fence = fence;
        cursor.at = cursor.at.wrapping_add(size.div_ceil(BLOCK));
        cursor.head = cursor.head.wrapping_add(1);
        cursor.room -= 1;
        Ok(())
    }

    #[inline(always)]
    fn append(&self, next: &mut u32, unit: Unit) {
        self.units.write(*next, unit);
        *next = next.wrapping_add(1);
    }

    #[cold]
    fn change(&self, next: &mut u32, change: &Change) -> Result<(), PostError> {
        let units = change.units();
        if units.len() as u32 >= self.largest {
            return Err(PostError::Unsupported);
        }
        for unit in units {
            self.append(next, *unit);
        }
        Ok(())
    }

    /// Appends pieces of memory, `most` bytes of them at most, and those of no bytes not at all.
    #[inline(always)]
    fn gather(&self, next: &mut u32, sges: &[Sge], most: u32) -> Result<(), PostError> {
        if sges.len() > self.limits.max_sge as usize {
            return Err(PostError::TooManySge { max: self.limits.max_sge });
        }
        let mut length = 0u32;
        for sge in sges {
            length = length.checked_add(sge.length).ok_or(PostError::TooLong)?;
        }
        // The uppermost bit of a piece's length would make it inline data.
        if length > i32::MAX as u32 {
            return Err(PostError::TooLong);
        }
        if most == ATOMIC {
            return self.gather_atomic(next, sges, length);
        }
        for sge in sges {
            if sge.length > 0 {
                self.append(next, data(sge));
            }
        }
        Ok(())
    }

    #[inline]
    fn gather_atomic(&self, next: &mut u32, sges: &[Sge], length: u32) -> Result<(), PostError> {
        if length < ATOMIC {
            return Err(PostError::AtomicTooShort);
        }
        let mut left = ATOMIC;
        for sge in sges {
            let length = sge.length.min(left);
            if length > 0 {
                self.append(next, data(&Sge { length, ..*sge }));
                left -= length;
            }
        }
        Ok(())
    }

    /// Appends the data itself, filled up to whole units.
    #[inline(always)]
    fn inline(&self, next: &mut u32, bytes: &[u8]) -> Result<(), PostError> {
        /// Bytes of the first unit that are data.
        const FIRST: usize = UNIT - size_of::<u32>();
        let max = self.limits.max_inline;
        if bytes.len() > max as usize {
            return Err(PostError::InlineTooLong { max });
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let length = inline_length(bytes.len() as u32);
        let Some((head, _)) = bytes.split_first_chunk::<UNIT>() else {
            return self.inline_short(next, bytes);
        };
        // Four bytes of length and twelve of data.
        let head = u128::from_le_bytes(*head) << 32 | u128::from(u32::from_le(length));
        self.append(next, words(head));
        let mut chunks = bytes[FIRST..].chunks_exact(UNIT);
        for chunk in &mut chunks {
            if let Ok(chunk) = <[u8; UNIT]>::try_from(chunk) {
                self.append(next, words(u128::from_le_bytes(chunk)));
            }
        }
        let rest = chunks.remainder().len();
        if rest > 0 {
            if let Some((_, tail)) = bytes.split_last_chunk::<UNIT>() {
                let tail = u128::from_le_bytes(*tail) >> (8 * (UNIT - rest));
                self.append(next, words(tail));
            }
        }
        Ok(())
    }

    /// As `inline`, for less than a unit of data.
    #[inline]
    fn inline_short(&self, next: &mut u32, bytes: &[u8]) -> Result<(), PostError> {
        let mut units = [0u8; 2 * UNIT];
        let (length, room) = units.split_at_mut(size_of::<u32>());
        length.copy_from_slice(&inline_length(bytes.len() as u32).to_ne_bytes());
        if let Some(room) = room.get_mut(..bytes.len()) {
            room.copy_from_slice(bytes);
        }
        let count = (size_of::<u32>() + bytes.len()).div_ceil(UNIT);
        for unit in units.chunks_exact(UNIT).take(count) {
            if let Ok(unit) = <[u8; UNIT]>::try_from(unit) {
                self.append(next, words(u128::from_le_bytes(unit)));
            }
        }
        Ok(())
    }

    /// Takes over where a cursor ended, and makes the device look.
    #[inline]
    pub(crate) fn publish(&mut self, cursor: Cursor) {
        if self.units.epoch().is_over() {
            return;
        }
        let single = cursor.head == self.head.wrapping_add(1);
        self.at = cursor.at;
        self.head = cursor.head;
        self.fence = cursor.fence;
        // Pairs with the device reading requests after the record that counts their blocks.
        udma_to_device();
        self.word.set(self.at & 0xffff);
        let held = if self.alone { None } else { Some(self.register.hold()) };
        let last = cursor.last.wrapping_mul(BLOCK);
        // A request that fits goes whole, and the device need not fetch it; one unit alone is
        // nothing but the doorbell.
        if single && cursor.size > 1 && cursor.size <= self.register.blueflame_units() {
            self.register.blueflame(&self.units, last, cursor.size);
        } else {
            self.register.doorbell(self.units.read(last)[0]);
        }
        drop(held);
    }

    /// Begins anew, as the device does in state `RESET`.
    pub(crate) fn reset(&mut self) {
        (self.at, self.head, self.fence) = (0, 0, 0);
        self.record.sends.reset();
        self.word.set(0);
    }
}

/// A unit's words, as they lie in memory.
#[inline(always)]
fn words(unit: u128) -> Unit {
    [(unit as u64).to_le(), ((unit >> 64) as u64).to_le()]
}

/// The units of an address vector for the queue pair `qpn` with the key `qkey`.
#[inline(always)]
fn vector(av: &mlx5_av, qkey: u32, qpn: u32) -> [Unit; VECTOR as usize] {
    let mut units: [Unit; VECTOR as usize] = zerocopy::transmute!(*av);
    units[0][0] = pair(qkey, 0);
    let rest = u64::from_be(units[0][1]) as u32;
    units[0][1] = pair(qpn | MLX5_EXTENDED_UD_AV, rest);
    units
}
