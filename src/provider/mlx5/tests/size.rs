//! The sizes of queues: the requested capacities, rounded as the device requires.

use crate::provider::mlx5::context::Limits;
use crate::provider::mlx5::context::RawPacketLimits;
use crate::provider::mlx5::cq::CqSize;
use crate::provider::mlx5::rq::RqSize;
use crate::provider::mlx5::sq::{DATA, SqSize, overhead};
use crate::provider::mlx5::srq::SrqSize;
use crate::qp::state::QpType;
use uverbs_uapi::qp::ib_uverbs_qp_cap;

/// The limits of a ConnectX.
const LIMITS: Limits = Limits {
    bf_reg_size: 512,
    max_sq_desc_sz: 512,
    max_rq_desc_sz: 512,
    max_send_wqebb: 1 << 15,
    max_recv_wr: 1 << 15,
    max_srq_recv_wr: 1 << 15,
    max_cqe: (1 << 22) - 1,
    rd_atomic: crate::provider::RdAtomic { answered: 16, sent: 16, atomics: true },
    uars_per_page: 1,
    raw_packet: RawPacketLimits { min_header: 0, checksums: true },
    ece: false,
    clock_offset: None,
    clock_info_versions: 0,
    null_lkey: None,
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
    let entries = |cqe| CqSize::new(LIMITS.max_cqe, cqe, 64).map(|size| size.entries);
    assert_eq!([1, 2, 3, 4, 127, 128].map(entries), [2, 4, 4, 8, 128, 256].map(Ok));
    assert_eq!(entries(LIMITS.max_cqe), Ok(1 << 22));
    assert!(entries(LIMITS.max_cqe + 1).unwrap_err().contains("4194303"));
    assert!(entries(u32::MAX).unwrap_err().contains("4294967295"));
    // A device may report more entries than indices can tell apart.
    let endless = Limits { max_cqe: (1 << 24) - 1, ..LIMITS };
    assert_eq!(CqSize::new(endless.max_cqe, (1 << 22) - 1, 64).unwrap().entries, 1 << 22);
    let error = CqSize::new(endless.max_cqe, 1 << 22, 64).unwrap_err();
    assert_eq!(error, "4194304 entries; the maximum is 4194303");
    assert_eq!(CqSize::new(LIMITS.max_cqe, 3, 128).unwrap().bytes(), 512);
    assert!(CqSize::new(LIMITS.max_cqe, 3, 32).unwrap_err().contains("32 bytes"));
}

#[test]
fn send_queues_hold_the_requested_number() {
    let size = |qp_type, cap: &_| SqSize::new(&LIMITS, qp_type, cap);
    // Bindings are the largest requests, 192 bytes.
    let rc = SqSize { wqebbs: 4, max_post: 1, max_sge: 1, max_inline: 156 };
    assert_eq!(size(QpType::RC, &cap(1, 1, 0)), Ok(rc));
    let rc = SqSize { wqebbs: 64, max_post: 21, max_sge: 3, max_inline: 156 };
    assert_eq!(size(QpType::RC, &cap(16, 3, 100)), Ok(rc));
    let ud = SqSize { wqebbs: 2, max_post: 1, max_sge: 2, max_inline: 60 };
    assert_eq!(size(QpType::UD, &cap(1, 2, 0)), Ok(ud));
    let inline = size(QpType::UC, &cap(10, 1, 220)).unwrap();
    assert_eq!((inline.max_post, inline.max_inline), (16, 220));
    let all = [QpType::RC, QpType::UC, QpType::UD, QpType::XRC_INI, QpType::RAW_PACKET];
    for qp_type in all {
        for (wr, sge, inline) in [(1, 1, 0), (7, 5, 64), (100, 20, 300), (8, 25, 8)] {
            let size = size(qp_type, &cap(wr, sge, inline)).unwrap();
            assert!(size.wqebbs.is_power_of_two() && size.max_post >= wr, "{size:?}");
            assert!(size.max_inline >= inline && size.max_sge == sge, "{size:?}");
            let request = overhead(qp_type) + DATA * u64::from(sge);
            assert!(u64::from(size.max_post) * request <= size.bytes() as u64, "{size:?}");
        }
    }
}

/// A ConnectX reports room for 64 segments, a number that does not fit into the size field of a WQE.
#[test]
fn no_request_is_longer_than_its_size_field_can_hold() {
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
fn capacities_above_the_device_are_refused_with_its_limit() {
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
    let doubled = RqSize::out_of_order(&LIMITS, &cap(5, 1, 0)).unwrap();
    assert_eq!((doubled.entries, doubled.max_post), (16, 8));
    assert_eq!(RqSize::out_of_order(&LIMITS, &cap(1, 1, 0)), RqSize::new(&LIMITS, &cap(1, 1, 0)));
    let most = LIMITS.max_recv_wr / 2;
    assert!(RqSize::out_of_order(&LIMITS, &cap(most, 1, 0)).is_ok());
    assert!(RqSize::out_of_order(&LIMITS, &cap(most + 1, 1, 0)).is_err());
    let size = |wr, sge| RqSize::new(&LIMITS, &cap(wr, sge, 0)).unwrap();
    assert_eq!(size(1, 1), RqSize { entries: 4, max_post: 4, stride_log: 4, max_sge: 1 });
    assert_eq!(size(5, 3), RqSize { entries: 8, max_post: 8, stride_log: 6, max_sge: 4 });
    assert_eq!(size(5, 3).bytes(), 512);
    assert_eq!(RqSize::new(&LIMITS, &cap(0, 1, 0)).unwrap().bytes(), 0);
    let size = |wr, sge| SrqSize::new(&LIMITS, wr, sge).unwrap();
    assert_eq!(size(1, 1), SrqSize { entries: 2, stride_log: 5, max_sge: 1 });
    assert_eq!(size(100, 4), SrqSize { entries: 128, stride_log: 7, max_sge: 7 });
}
