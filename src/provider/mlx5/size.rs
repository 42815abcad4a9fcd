//! How large queues are: what was asked for, rounded the way the device wants it.
//!
//! Pairs with `set_user_buf_size`, `set_rq_size`, `create_cq_user` and `create_srq_user` of the
//! kernel, which take these numbers and pin the memory that they amount to. An error says which
//! number was beyond which limit.

use super::context::Limits;
use crate::qp::QpType;
use uverbs_uapi::mlx5::wqe;
use uverbs_uapi::qp::ib_uverbs_qp_cap;

type Result<T> = std::result::Result<T, String>;

/// Bytes of a basic block of a send queue.
const BLOCK: u64 = 64;
/// Entries of a completion queue.
const MAX_CQE: u64 = 1 << 24;

const CTRL: u64 = size_of::<wqe::mlx5_wqe_ctrl_seg>() as u64;
const RADDR: u64 = size_of::<wqe::mlx5_wqe_raddr_seg>() as u64;
const ATOMIC: u64 = size_of::<wqe::mlx5_wqe_atomic_seg>() as u64;
const MASKED_ATOMIC: u64 = size_of::<wqe::mlx5_wqe_masked_atomic_seg>() as u64;
const DATA: u64 = size_of::<wqe::mlx5_wqe_data_seg>() as u64;
const INLINE: u64 = size_of::<wqe::mlx5_wqe_inline_seg>() as u64;
const AV: u64 = size_of::<wqe::mlx5_av>() as u64;
const XRC: u64 = size_of::<wqe::mlx5_wqe_xrc_seg>() as u64;
const ETH: u64 = 32;
const UMR_CTRL: u64 = 48;
const MKEY: u64 = 64;
/// Entries of a list of a UMR come four at a time.
const KLMS: u64 = 64;
const SRQ_NEXT: u64 = 16;

/// A completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CqSize {
    /// A power of two; one of them stays free.
    pub(crate) entries: u32,
    /// Bytes of an entry, 64 or 128.
    pub(crate) cqe: u32,
}

impl CqSize {
    pub(crate) fn new(cqe: u32, cqe_size: u32) -> Result<CqSize> {
        if cqe_size != 64 && cqe_size != 128 {
            return Err(format!("completions of {cqe_size} bytes; there are 64 and 128"));
        }
        let entries = (u64::from(cqe) + 1).next_power_of_two();
        if entries > MAX_CQE {
            return Err(format!("{cqe} entries; the maximum is {}", MAX_CQE - 1));
        }
        Ok(CqSize { entries: entries as u32, cqe: cqe_size })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.entries as usize * self.cqe as usize
    }
}

/// A send queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SqSize {
    /// Basic blocks, a power of two; 0 if there is no send queue.
    pub(crate) blocks: u32,
    /// Requests that fit, all of the largest kind.
    pub(crate) max_post: u32,
    pub(crate) max_sge: u32,
    pub(crate) max_inline: u32,
}

impl SqSize {
    pub(crate) fn new(limits: &Limits, qp_type: QpType, cap: &ib_uverbs_qp_cap) -> Result<SqSize> {
        if cap.max_send_wr == 0 {
            return Ok(SqSize::default());
        }
        let overhead = overhead(qp_type);
        let largest = u64::from(limits.max_sq_desc_sz);
        let room = largest.saturating_sub(overhead);
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
        // A request that would just fit may not do so in whole blocks.
        let request = gathered.max(inline).next_multiple_of(BLOCK);
        if request > largest {
            return Err(format!(
                "{} entries and {} bytes inline make requests of {request} bytes; the maximum is \
                 {largest}",
                cap.max_send_sge, cap.max_inline_data
            ));
        }
        let bytes = (u64::from(cap.max_send_wr) * request).next_power_of_two();
        let blocks = bytes / BLOCK;
        let most = u64::from(limits.max_send_wqebb);
        if blocks > most {
            return Err(format!(
                "{} sends of {request} bytes; the maximum is {} of that size",
                cap.max_send_wr,
                most * BLOCK / request
            ));
        }
        Ok(SqSize {
            blocks: blocks as u32,
            max_post: (bytes / request) as u32,
            max_sge: cap.max_send_sge,
            max_inline: (request - overhead - INLINE) as u32,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.blocks as usize * BLOCK as usize
    }
}

/// What precedes the payload in the largest request that a queue pair of this type takes.
fn overhead(qp_type: QpType) -> u64 {
    let rdma = CTRL + RADDR;
    // Atomics name one entry of 8 bytes, which counts as payload.
    let atomic = CTRL + RADDR + ATOMIC.max(MASKED_ATOMIC);
    let umr = CTRL + UMR_CTRL + MKEY + KLMS;
    let connected = rdma.max(atomic).max(umr);
    match qp_type {
        QpType::UD => CTRL + AV,
        QpType::RAW_PACKET => CTRL + ETH,
        QpType::XRC_INI | QpType::XRC_TGT => connected + XRC,
        _ => connected,
    }
}

/// A receive queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RqSize {
    /// Receives, a power of two; 0 if there is no receive queue.
    pub(crate) entries: u32,
    /// Bytes of a receive, as a power of two.
    pub(crate) stride_log: u32,
    pub(crate) max_sge: u32,
}

impl RqSize {
    pub(crate) fn new(limits: &Limits, cap: &ib_uverbs_qp_cap) -> Result<RqSize> {
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
        let bytes = (u64::from(cap.max_recv_wr).next_power_of_two() * stride).max(BLOCK);
        Ok(RqSize {
            entries: (bytes / stride) as u32,
            stride_log: stride.trailing_zeros(),
            max_sge: (stride / DATA) as u32,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        if self.entries == 0 { 0 } else { (self.entries as usize) << self.stride_log }
    }
}

/// A shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SrqSize {
    /// Elements, a power of two; one of them stays in the list as its end.
    pub(crate) entries: u32,
    pub(crate) stride_log: u32,
    pub(crate) max_sge: u32,
}

impl SrqSize {
    pub(crate) fn new(limits: &Limits, max_wr: u32, max_sge: u32) -> Result<SrqSize> {
        let most = u64::from(limits.max_srq_recv_wr);
        let entries = (u64::from(max_wr) + 1).next_power_of_two();
        if entries > most {
            return Err(format!("{max_wr} receives; the maximum is {}", most.saturating_sub(1)));
        }
        let request = SRQ_NEXT + DATA * u64::from(max_sge);
        let largest = u64::from(limits.max_rq_desc_sz);
        if request > largest {
            return Err(format!(
                "{max_sge} entries in a receive; the maximum is {}",
                largest.saturating_sub(SRQ_NEXT) / DATA
            ));
        }
        let stride = request.max(32).next_power_of_two();
        Ok(SrqSize {
            entries: entries as u32,
            stride_log: stride.trailing_zeros(),
            max_sge: ((stride - SRQ_NEXT) / DATA) as u32,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        (self.entries as usize) << self.stride_log
    }
}
