//! How large queues are: what was asked for, rounded the way the device wants it.
//!
//! Pairs with `set_user_buf_size`, `set_rq_size`, `create_cq_user` and `create_srq_user` of the
//! kernel, which take these numbers and pin the memory that they amount to. An error says which
//! number was beyond which limit.

use super::context::Limits;
use crate::qp::state::QpType;
use uverbs_uapi::mlx5::wqe;
use uverbs_uapi::qp::ib_uverbs_qp_cap;

type Result<T> = std::result::Result<T, String>;

/// Bytes of a basic block of a send queue.
const SEGMENTS_PER_WQEBB: u64 = 64;

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

/// However many the device has: completions are counted in 24 bits, and what is ahead and what is
/// behind is told apart by half of that.
const MAX_CQE: u32 = (1 << 22) - 1;

impl CqSize {
    pub(crate) fn new(limits: &Limits, cqe: u32, cqe_size: u32) -> Result<CqSize> {
        if cqe_size != 64 && cqe_size != 128 {
            return Err(format!("completions of {cqe_size} bytes; there are 64 and 128"));
        }
        let most = limits.max_cqe.min(MAX_CQE);
        if cqe > most {
            return Err(format!("{cqe} entries; the maximum is {most}"));
        }
        let entries = (u64::from(cqe) + 1).next_power_of_two();
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
        // Of its last block a request may not be able to use all.
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
        let request = gathered.max(inline).max(fixed(qp_type)).next_multiple_of(SEGMENTS_PER_WQEBB);
        if request > largest {
            return Err(format!(
                "{} entries and {} bytes inline make requests of {request} bytes; the maximum is \
                 {largest}",
                cap.max_send_sge, cap.max_inline_data
            ));
        }
        let bytes = (u64::from(cap.max_send_wr) * request).next_power_of_two();
        let blocks = bytes / SEGMENTS_PER_WQEBB;
        let most = u64::from(limits.max_send_wqebb);
        if blocks > most {
            return Err(format!(
                "{} sends of {request} bytes; the maximum is {} of that size",
                cap.max_send_wr,
                most * SEGMENTS_PER_WQEBB / request
            ));
        }
        Ok(SqSize {
            blocks: blocks as u32,
            max_post: (bytes / request) as u32,
            max_sge: cap.max_send_sge,
            max_inline: room.min(request - overhead).saturating_sub(INLINE) as u32,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.blocks as usize * SEGMENTS_PER_WQEBB as usize
    }
}

/// What precedes the payload of the requests that have the longest head and carry any payload.
fn overhead(qp_type: QpType) -> u64 {
    match qp_type {
        QpType::UD => CTRL + AV,
        QpType::RAW_PACKET => CTRL + ETH,
        QpType::XRC_INI | QpType::XRC_TGT => CTRL + XRC + RADDR,
        _ => CTRL + RADDR,
    }
}

/// The largest request whose size does not depend on what the user asks for.
fn fixed(qp_type: QpType) -> u64 {
    // An atomic has one entry, of 8 bytes. Binding a window changes a key by a list of four.
    let atomic = RADDR + MASKED_ATOMIC.max(ATOMIC) + DATA;
    let binding = UMR_CTRL + MKEY + KLMS;
    match qp_type {
        QpType::UD | QpType::RAW_PACKET => SEGMENTS_PER_WQEBB,
        QpType::XRC_INI | QpType::XRC_TGT => CTRL + (XRC + atomic).max(binding),
        _ => CTRL + atomic.max(binding),
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
        let bytes =
            (u64::from(cap.max_recv_wr).next_power_of_two() * stride).max(SEGMENTS_PER_WQEBB);
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
    /// CqBuffer, a power of two; one of them stays in the list as its end.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::mlx5::sq::Frames;

    /// What a ConnectX says of itself.
    const LIMITS: Limits = Limits {
        bf_reg_size: 512,
        max_sq_desc_sz: 512,
        max_rq_desc_sz: 512,
        max_send_wqebb: 1 << 15,
        max_recv_wr: 1 << 15,
        max_srq_recv_wr: 1 << 15,
        max_cqe: (1 << 22) - 1,
        rd_atomic: crate::provider::RdAtomic { answered: 16, sent: 16 },
        uars_per_page: 1,
        frames: Frames { min_header: 0, checksums: true },
        ece: false,
        clock_offset: None,
        clock_info_versions: 0,
        real_time: false,
        devx: None,
    };

    fn cap(max_send_wr: u32, max_send_sge: u32, max_inline_data: u32) -> ib_uverbs_qp_cap {
        ib_uverbs_qp_cap {
            max_send_wr,
            max_recv_wr: max_send_wr,
            max_send_sge,
            max_recv_sge: max_send_sge,
            max_inline_data,
        }
    }

    #[test]
    fn completion_queues_have_one_entry_more_in_a_power_of_two() {
        let entries = |cqe| CqSize::new(&LIMITS, cqe, 64).map(|size| size.entries);
        assert_eq!([1, 2, 3, 4, 127, 128].map(entries), [2, 4, 4, 8, 128, 256].map(Ok));
        assert_eq!(entries(LIMITS.max_cqe), Ok(1 << 22));
        assert!(entries(LIMITS.max_cqe + 1).unwrap_err().contains("4194303"));
        assert!(entries(u32::MAX).unwrap_err().contains("4294967295"));
        // A device may have more than can be told apart.
        let endless = Limits { max_cqe: (1 << 24) - 1, ..LIMITS };
        assert_eq!(CqSize::new(&endless, (1 << 22) - 1, 64).unwrap().entries, 1 << 22);
        let error = CqSize::new(&endless, 1 << 22, 64).unwrap_err();
        assert_eq!(error, "4194304 entries; the maximum is 4194303");
        assert_eq!(CqSize::new(&LIMITS, 3, 128).unwrap().bytes(), 512);
        assert!(CqSize::new(&LIMITS, 3, 32).unwrap_err().contains("32 bytes"));
    }

    #[test]
    fn send_queues_hold_what_was_asked_for() {
        let size = |qp_type, cap: &_| SqSize::new(&LIMITS, qp_type, cap);
        // Bindings are the largest requests, 192 bytes.
        let rc = SqSize { blocks: 4, max_post: 1, max_sge: 1, max_inline: 156 };
        assert_eq!(size(QpType::RC, &cap(1, 1, 0)), Ok(rc));
        let rc = SqSize { blocks: 64, max_post: 21, max_sge: 3, max_inline: 156 };
        assert_eq!(size(QpType::RC, &cap(16, 3, 100)), Ok(rc));
        let ud = SqSize { blocks: 2, max_post: 1, max_sge: 2, max_inline: 60 };
        assert_eq!(size(QpType::UD, &cap(1, 2, 0)), Ok(ud));
        let inline = size(QpType::UC, &cap(10, 1, 220)).unwrap();
        assert_eq!((inline.max_post, inline.max_inline), (16, 220));
        let all = [QpType::RC, QpType::UC, QpType::UD, QpType::XRC_INI, QpType::RAW_PACKET];
        for qp_type in all {
            for (wr, sge, inline) in [(1, 1, 0), (7, 5, 64), (100, 20, 300), (8, 25, 8)] {
                let size = size(qp_type, &cap(wr, sge, inline)).unwrap();
                assert!(size.blocks.is_power_of_two() && size.max_post >= wr, "{size:?}");
                assert!(size.max_inline >= inline && size.max_sge == sge, "{size:?}");
                let request = overhead(qp_type) + DATA * u64::from(sge);
                assert!(u64::from(size.max_post) * request <= size.bytes() as u64, "{size:?}");
            }
        }
    }

    /// A ConnectX takes blocks for 64 units, whose number its requests have no room for.
    #[test]
    fn no_request_is_longer_than_it_can_say() {
        let limits = Limits { max_sq_desc_sz: 1024, ..LIMITS };
        let size = |qp_type, sge, inline| SqSize::new(&limits, qp_type, &cap(1, sge, inline));
        for (qp_type, sge, inline) in [
            (QpType::RC, 61, 972),
            (QpType::UC, 61, 972),
            (QpType::UD, 59, 940),
            (QpType::XRC_INI, 60, 956),
            (QpType::RAW_PACKET, 60, 956),
        ] {
            let longest = size(qp_type, 1, inline - 47).unwrap();
            assert_eq!((longest.bytes(), longest.max_inline), (1024, inline), "{qp_type}");
            assert_eq!(size(qp_type, sge, inline).unwrap().bytes(), 1024);
            let error = size(qp_type, 1, inline + 1).unwrap_err();
            assert!(error.contains(&format!("the maximum is {inline} ")), "{error}");
            let error = size(qp_type, sge + 1, 0).unwrap_err();
            assert!(error.contains(&format!("the maximum is {sge} ")), "{error}");
        }
        assert_eq!((limits.max_send_request(), LIMITS.max_send_request()), (1008, 512));
    }

    #[test]
    fn what_the_device_cannot_is_refused_with_its_limit() {
        let refusal = |cap: &_| SqSize::new(&LIMITS, QpType::RC, cap).unwrap_err();
        SqSize::new(&LIMITS, QpType::RC, &cap(1, 30, 476)).unwrap();
        assert_eq!(refusal(&cap(1, 31, 0)), "31 entries in a send; the maximum is 30 for type RC");
        assert_eq!(refusal(&cap(1, 1, 477)), "477 bytes inline; the maximum is 476 for type RC");
        let many = refusal(&cap(u32::MAX, 1, 0));
        assert!(many.starts_with("4294967295 sends of 192 bytes; the maximum is 10922"), "{many}");
        let receives = |cap: &_| RqSize::new(&LIMITS, cap).unwrap_err();
        assert_eq!(receives(&cap(32769, 1, 0)), "32769 receives; the maximum is 32768");
        assert_eq!(receives(&cap(1, 33, 0)), "33 entries in a receive; the maximum is 32");
        let shared = |wr, sge| SrqSize::new(&LIMITS, wr, sge).unwrap_err();
        assert_eq!(shared(32768, 1), "32768 receives; the maximum is 32767");
        assert_eq!(shared(1, 32), "32 entries in a receive; the maximum is 31");
    }

    #[test]
    fn receive_queues_are_powers_of_two() {
        let size = |wr, sge| RqSize::new(&LIMITS, &cap(wr, sge, 0)).unwrap();
        assert_eq!(size(1, 1), RqSize { entries: 4, stride_log: 4, max_sge: 1 });
        assert_eq!(size(5, 3), RqSize { entries: 8, stride_log: 6, max_sge: 4 });
        assert_eq!(size(5, 3).bytes(), 512);
        assert_eq!(RqSize::new(&LIMITS, &cap(0, 1, 0)).unwrap().bytes(), 0);
        let size = |wr, sge| SrqSize::new(&LIMITS, wr, sge).unwrap();
        assert_eq!(size(1, 1), SrqSize { entries: 2, stride_log: 5, max_sge: 1 });
        assert_eq!(size(100, 4), SrqSize { entries: 128, stride_log: 7, max_sge: 7 });
    }
}
