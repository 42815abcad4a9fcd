//! The operations of send requests, with their operands.

use super::Remote;
use super::packet::Packet;
use crate::access::Access;
use crate::number::{Lkey, Qpn, Rkey, open_enum};
use uverbs_uapi::wr::{ib_placement_type, ib_selectivity_level};

bitflags::bitflags! {
    /// The placement that a flush guarantees.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Placement: u8 {
        /// Visible to all of the peer's processors and devices.
        const GLOBAL = ib_placement_type::IB_FLUSH_GLOBAL.bits() as u8;
        /// In persistent memory.
        const PERSISTENT = ib_placement_type::IB_FLUSH_PERSISTENT.bits() as u8;
    }
}

open_enum! {
    /// The range of a flush.
    pub struct FlushLevel(u8) {
        /// The range that the request names.
        RANGE = ib_selectivity_level::IB_FLUSH_RANGE.0, "range";
        /// The whole memory region.
        REGION = ib_selectivity_level::IB_FLUSH_MR.0, "region";
    }
}

/// The binding of a memory window, made by [`MemoryWindow`](crate::MemoryWindow).
#[derive(Clone, Copy, Debug)]
pub struct WindowBinding {
    /// The queue pair that it was prepared for, where it matters.
    pub(crate) qpn: Option<Qpn>,
    pub(crate) addr: u64,
    pub(crate) length: u64,
    pub(crate) mr_lkey: Lkey,
    pub(crate) old_rkey: Rkey,
    pub(crate) new_rkey: Rkey,
    pub(crate) access: Access,
}

/// The operands of a [masked compare and swap](crate::SendWr::masked_compare_swap).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct MaskedSwap {
    /// Expected values of the bits in `compare_mask`.
    pub compare: u64,
    /// Bits that are compared. Without any, the swap always happens.
    pub compare_mask: u64,
    /// New values of the bits in `swap_mask`.
    pub swap: u64,
    /// Bits that are replaced.
    pub swap_mask: u64,
}

/// Requests are moved often, so long operands are borrowed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SendOp<'a> {
    Send,
    SendImm(u32),
    SendInv(Rkey),
    Write(Remote),
    WriteImm(Remote, u32),
    Read(Remote),
    CompareSwap { remote: Remote, compare: u64, swap: u64 },
    FetchAdd { remote: Remote, add: u64 },
    MaskedCompareSwap { remote: Remote, operands: &'a MaskedSwap },
    MaskedFetchAdd { remote: Remote, add: u64, boundary: u64 },
    LocalInv(Rkey),
    BindMw(WindowBinding),
    Flush { remote: Remote, length: u32, placement: Placement, level: FlushLevel },
    AtomicWrite { remote: Remote, value: [u8; 8] },
    Packet(Packet),
}

impl SendOp<'_> {
    /// The operation as a member of a set of operations.
    #[inline]
    pub(crate) fn bit(&self) -> u32 {
        match self {
            SendOp::Send => 1,
            SendOp::SendImm(_) => 1 << 1,
            SendOp::SendInv(_) => 1 << 2,
            SendOp::Write(_) => 1 << 3,
            SendOp::WriteImm(..) => 1 << 4,
            SendOp::Read(_) => 1 << 5,
            SendOp::CompareSwap { .. } => 1 << 6,
            SendOp::FetchAdd { .. } => 1 << 7,
            SendOp::LocalInv(_) => 1 << 8,
            SendOp::BindMw(_) => 1 << 9,
            SendOp::Flush { .. } => 1 << 10,
            SendOp::AtomicWrite { .. } => 1 << 11,
            SendOp::MaskedCompareSwap { .. } => 1 << 12,
            SendOp::MaskedFetchAdd { .. } => 1 << 13,
            SendOp::Packet(_) => 1 << 14,
        }
    }

    /// Whether requests behind it may use a key that it changes.
    #[inline]
    pub(crate) fn changes_keys(&self) -> bool {
        matches!(self, SendOp::LocalInv(_) | SendOp::BindMw(_))
    }

    /// Whether the device writes memory of this side.
    #[inline]
    pub(crate) fn writes_here(&self) -> bool {
        matches!(
            self,
            SendOp::Read(_)
                | SendOp::CompareSwap { .. }
                | SendOp::FetchAdd { .. }
                | SendOp::MaskedCompareSwap { .. }
                | SendOp::MaskedFetchAdd { .. }
        )
    }
}
