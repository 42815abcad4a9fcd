//! Requests to mlx5's driver: it finds each queue at the address and in the size that the library passes.

use super::mlx5::Bench;
use crate::uverbs::scripted::Op;
use crate::{QpType, ResourceType};
use uverbs_uapi::cq::ib_uverbs_resize_cq;
use uverbs_uapi::device::UVERBS_ATTR_CORE_IN;
use uverbs_uapi::mlx5::abi::{
    mlx5_ib_create_cq, mlx5_ib_create_qp, mlx5_ib_resize_cq, mlx5_qp_flags,
};
use uverbs_uapi::srq::UVERBS_ATTR_CREATE_SRQ_MAX_WR;

/// The driver's part of the last creation of a queue pair.
fn asked_qp(bench: &Bench) -> mlx5_ib_create_qp {
    bench.script.asked(Op::CREATE_QP)
}

/// The bytes of both queues of a queue pair: receives and sends.
fn bytes(asked: &mlx5_ib_create_qp) -> (usize, usize) {
    let receive = if asked.rq_wqe_count == 0 { 0 } else { 1 << asked.rq_wqe_shift };
    (asked.rq_wqe_count as usize * receive, asked.sq_wqe_count as usize * 64)
}

#[test]
fn the_queues_of_a_queue_pair_fill_the_memory_that_the_driver_pins() {
    let bench = Bench::new();
    let cq = bench.context.cq_builder(10).build().unwrap();
    // Sends, receives, and segments of a receive.
    for (sends, receives, segments) in
        [(0, 0, 1), (0, 3, 1), (5, 0, 1), (1, 1, 1), (5, 3, 2), (64, 100, 7), (3, 2, 16)]
    {
        let qp = bench.domain.qp_builder(&cq, &cq, QpType::RC);
        let qp = qp.max_send_wr(sends).max_recv_wr(receives).max_recv_sge(segments);
        let qp = qp.build().unwrap();
        let asked = asked_qp(&bench);
        let case = format!("{sends}, {receives}, {segments}: {asked:?}");

        for (count, wanted) in [(asked.rq_wqe_count, receives), (asked.sq_wqe_count, sends)] {
            let fits = count >= wanted && count.is_power_of_two();
            assert!(if wanted == 0 { count == 0 } else { fits }, "{case}");
        }
        if (sends, receives) == (0, 0) {
            assert_eq!((asked.buf_addr, asked.sq_buf_addr), (0, 0), "{case}");
            continue;
        }
        let receive = 1usize << asked.rq_wqe_shift;
        assert!(receives == 0 || receive >= segments as usize * 16, "{case}");
        assert_eq!(asked.flags, mlx5_qp_flags::MLX5_QP_FLAG_UAR_PAGE_INDEX.bits(), "{case}");

        let [(address, size)] = bench.buffers(ResourceType::MLX5_QP)[..] else { panic!("{case}") };
        let (of_receives, of_sends) = bytes(&asked);
        assert_eq!((asked.buf_addr, asked.sq_buf_addr), (address, 0), "{case}");
        assert_eq!(address % receive as u64, 0, "{case}");
        let used = of_receives + of_sends;
        assert!(size >= used && size - used < rustix::param::page_size(), "{case}: {size} bytes");
        drop(qp);
    }
}

/// The kernel pins the memory of the queue pair's queues.
#[test]
fn the_kernel_gets_the_size_of_both_queues() {
    let bench = Bench::new();
    let cq = bench.context.cq_builder(10).build().unwrap();
    let qp = bench.domain.qp_builder(&cq, &cq, QpType::RC);
    let _qp = qp.max_recv_wr(5).max_recv_sge(3).max_send_wr(4).build().unwrap();
    // 8 receives of 64 bytes, and 16 WQEBBs for 4 requests of at most 192 bytes.
    assert_eq!(bytes(&asked_qp(&bench)), (8 * 64, 16 * 64));
}

/// The first flag is for receives; the second for reads and atomics, also if not all sends are signaled.
#[test]
fn data_in_completions_is_asked_for_in_both_directions() {
    const UAR: u32 = 1 << 10;
    const RECEIVED: u32 = 1 << 1;
    const READ: u32 = 1 << 8;
    let bench = Bench::new();
    let cq = bench.context.cq_builder(16).build().unwrap();
    for qp_type in [QpType::RC, QpType::UC] {
        let make = || bench.domain.qp_builder(&cq, &cq, qp_type);
        let flags = || asked_qp(&bench).flags;
        let _plain = make().build().unwrap();
        assert_eq!(flags(), UAR);
        let _short = make().scatter_to_cqe().build().unwrap();
        assert_eq!(flags(), UAR | RECEIVED | READ);
    }
}

#[test]
fn a_queue_pair_without_receives_of_its_own_asks_for_none() {
    let bench = Bench::new();
    let cq = bench.context.cq_builder(10).build().unwrap();
    let srq = bench.domain.srq_builder(10).build().unwrap();
    let shared = bench.domain.qp_builder(&cq, &cq, QpType::RC).max_recv_wr(9).srq(&srq);
    let shared = shared.build().unwrap();
    let asked = asked_qp(&bench);
    assert_eq!((asked.rq_wqe_count, asked.rq_wqe_shift), (0, 0));
    drop(shared);
    let _initiator = bench.domain.qp_builder(&cq, &cq, QpType::XRC_INI).build().unwrap();
    let asked = asked_qp(&bench);
    assert_eq!((asked.rq_wqe_count, asked.rq_wqe_shift), (0, 0));
}

#[test]
fn raw_packets_have_a_buffer_for_each_direction() {
    let bench = Bench::new();
    let cq = bench.context.cq_builder(10).build().unwrap();
    let qp = bench.domain.qp_builder(&cq, &cq, QpType::RAW_PACKET);
    let _qp = qp.max_send_wr(300).max_recv_wr(20).build().unwrap();
    let asked = asked_qp(&bench);
    let (of_receives, of_sends) = bytes(&asked);
    let page = rustix::param::page_size();
    let expected = [
        (asked.buf_addr, of_receives.next_multiple_of(page)),
        (asked.sq_buf_addr, of_sends.next_multiple_of(page)),
    ];
    assert_eq!(bench.buffers(ResourceType::MLX5_QP), expected);
}

#[test]
fn the_driver_gets_the_cqe_size_at_creation_and_at_a_resize() {
    for size in [64, 128] {
        let bench = Bench::new();
        let cq = bench.context.cq_builder(10).cqe_size(size).parent_domain(&bench.domain);
        let mut cq = cq.build().unwrap();
        let asked = bench.script.asked::<mlx5_ib_create_cq>(Op::CREATE_CQ);
        let buffers = bench.buffers(ResourceType::MLX5_CQ);
        assert_eq!((asked.cqe_size, buffers[0].0), (size, asked.buf_addr));
        assert!(buffers[0].1 >= (cq.capacity() + 1) as usize * size as usize);

        cq.resize(1000).unwrap();
        let asked = bench.script.asked::<mlx5_ib_resize_cq>(Op::RESIZE_CQ);
        let [(address, bytes)] = bench.buffers(ResourceType::MLX5_CQ)[..] else { panic!("freed") };
        assert_eq!((u32::from(asked.cqe_size), asked.buf_addr), (size, address));
        assert!(bytes >= (cq.capacity() + 1) as usize * size as usize);
        let resized = bench.script.attribute(Op::RESIZE_CQ, UVERBS_ATTR_CORE_IN);
        let told = resized.map(|request: ib_uverbs_resize_cq| request.cqe).unwrap();
        assert!((1000..1024).contains(&told) && told == cq.capacity(), "{told}");
    }
}

#[test]
fn a_shared_receive_queue_reports_one_receive_fewer_than_its_memory_holds() {
    let bench = Bench::new();
    for asked in [1, 2, 10, 63, 64, 1000] {
        let _srq = bench.domain.srq_builder(asked).build().unwrap();
        let told: u32 =
            bench.script.attribute(Op::CREATE_SRQ, UVERBS_ATTR_CREATE_SRQ_MAX_WR).unwrap();
        let [(_, bytes)] = bench.buffers(ResourceType::MLX5_SRQ)[..] else { panic!("one buffer") };
        // The driver rounds it up to a power of two, with one entry that stays free.
        let entries = told + 1;
        assert!(told >= asked && entries.is_power_of_two(), "{asked}: {told}");
        assert_eq!(bytes, entries as usize * 32, "{asked}: {told}");
    }
}
