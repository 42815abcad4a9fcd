//! Every request as rxe must find it in its queue, byte for byte.
//!
//! The expected bytes are written down from `rdma/rdma_user_rxe.h` as numbers and offsets, without
//! the structs that the library fills in: one wrong bit in either reading of the header fails.

use super::{Bench, ring, ring_recv};
use crate::uverbs::scripted::Role;
use crate::{
    Access, AddressVector, Destination, FlushLevel, Gid, Lkey, Placement, Qkey, QpType, Qpn,
    QueuePair, RecvWr, Remote, Rkey, SendWr, Sge, WindowType,
};

const SGES: [Sge; 2] = [
    Sge { addr: 0x1122_3344_5566_7788, length: 0x10, lkey: Lkey(0xa1b2_c3d4) },
    Sge { addr: 0x99aa_bbcc_ddee_ff00, length: 0x203, lkey: Lkey(0x0102_0304) },
];
const REMOTE: Remote = Remote { addr: 0x0f1e_2d3c_4b5a_6978, rkey: Rkey(0x5566_7788) };
const ID: u64 = 0xfedc_ba98_7654_3210;

/// Bytes of a request: the named fields, and zeros elsewhere.
struct Golden(Vec<u8>);

impl Golden {
    /// A send request's header with its opcode.
    fn send(opcode: u32, flags: u32) -> Golden {
        Golden(vec![0; 208]).u64(0, ID).u32(12, opcode).u32(16, flags)
    }

    fn bytes(mut self, at: usize, bytes: &[u8]) -> Golden {
        if self.0.len() < at + bytes.len() {
            self.0.resize(at + bytes.len(), 0);
        }
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    fn u32(self, at: usize, value: u32) -> Golden {
        self.bytes(at, &value.to_ne_bytes())
    }

    fn u64(self, at: usize, value: u64) -> Golden {
        self.bytes(at, &value.to_ne_bytes())
    }

    /// The remote address: in the operation, and as the `iova` from which rxe counts up.
    fn remote(self) -> Golden {
        self.u64(24, 0x0f1e_2d3c_4b5a_6978).u64(152, 0x0f1e_2d3c_4b5a_6978)
    }

    /// Both entries, and the length over all, at `dma`; the entries lie behind.
    fn sges(self, dma: usize) -> Golden {
        self.u32(dma, 0x213)
            .u32(dma + 4, 0x213)
            .u32(dma + 12, 2)
            .u64(dma + 24, 0x1122_3344_5566_7788)
            .u32(dma + 32, 0x10)
            .u32(dma + 36, 0xa1b2_c3d4)
            .u64(dma + 40, 0x99aa_bbcc_ddee_ff00)
            .u32(dma + 48, 0x203)
            .u32(dma + 52, 0x0102_0304)
    }
}

/// The offset of the payload's description in a send request.
const DMA: usize = 184;

/// The bytes of a slot that held an older request.
fn posted(bench: &Bench, qp_type: QpType, wr: SendWr<'_>) -> Vec<u8> {
    posted_to(bench, bench.qp(qp_type), wr)
}

fn posted_to(bench: &Bench, mut qp: QueuePair, wr: SendWr<'_>) -> Vec<u8> {
    bench.script.poison(qp.handle(), Role::Send);
    let mut batch = qp.send_batch().unwrap();
    batch.push(wr.id(ID)).unwrap();
    ring(batch).unwrap();
    bench.script.take(qp.handle(), Role::Send).expect("a request")
}

#[track_caller]
fn assert_bytes(found: &[u8], expected: Golden) {
    let expected = expected.0;
    for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_eq!(found, expected, "byte {at}");
    }
    assert!(found[expected.len()..].iter().all(|byte| *byte == 0xa5), "written beyond the end");
}

#[test]
fn sends_have_the_golden_bytes() {
    let bench = Bench::new();
    let post = |wr| posted(&bench, QpType::RC, wr);
    assert_bytes(&post(SendWr::send(&SGES)), Golden::send(2, 0).sges(DMA));
    assert_bytes(
        &post(SendWr::send_imm(&SGES, 0x0102_0304)),
        Golden::send(3, 0).bytes(20, &[1, 2, 3, 4]).sges(DMA),
    );
    assert_bytes(
        &post(SendWr::send_inv(&SGES, Rkey(0x0102_0304))),
        Golden::send(9, 0).u32(20, 0x0102_0304).sges(DMA),
    );
    assert_bytes(&post(SendWr::send(&[])), Golden::send(2, 0));
}

#[test]
fn flags_have_the_golden_bytes() {
    let bench = Bench::new();
    let post = |wr| posted(&bench, QpType::UC, wr);
    assert_bytes(&post(SendWr::send(&[]).fence()), Golden::send(2, 1));
    assert_bytes(&post(SendWr::send(&[]).signaled()), Golden::send(2, 2));
    assert_bytes(&post(SendWr::send(&[]).solicited()), Golden::send(2, 4));
    let all = SendWr::send(&[]).fence().signaled().solicited().inline(b"x");
    assert_bytes(&post(all), Golden::send(2, 15).u32(DMA, 1).u32(DMA + 4, 1).bytes(208, b"x"));
}

#[test]
fn inline_data_has_the_golden_bytes() {
    let bench = Bench::new();
    let data: Vec<u8> = (1..=32).collect();
    assert_bytes(
        &posted(&bench, QpType::RC, SendWr::write(REMOTE, &[]).inline(&data)),
        Golden::send(0, 8)
            .remote()
            .u32(32, 0x5566_7788)
            .u32(DMA, 32)
            .u32(DMA + 4, 32)
            .bytes(208, &data),
    );
    assert_bytes(&posted(&bench, QpType::RC, SendWr::send(&SGES).inline(&[])), Golden::send(2, 8));
}

#[test]
fn reads_and_writes_have_the_golden_bytes() {
    let bench = Bench::new();
    let post = |wr| posted(&bench, QpType::RC, wr);
    let rdma = |opcode| Golden::send(opcode, 0).remote().u32(32, 0x5566_7788).sges(DMA);
    assert_bytes(&post(SendWr::write(REMOTE, &SGES)), rdma(0));
    assert_bytes(
        &post(SendWr::write_imm(REMOTE, &SGES, 0x0a0b_0c0d)),
        rdma(1).bytes(20, &[10, 11, 12, 13]),
    );
    assert_bytes(&post(SendWr::read(REMOTE, &SGES)), rdma(4));
}

#[test]
fn atomics_have_the_golden_bytes() {
    let bench = Bench::new();
    let post = |wr| posted(&bench, QpType::RC, wr);
    assert_bytes(
        &post(SendWr::compare_swap(REMOTE, 0x1111_2222_3333_4444, 0x5555_6666_7777_8888, &SGES)),
        Golden::send(5, 0)
            .remote()
            .u64(32, 0x1111_2222_3333_4444)
            .u64(40, 0x5555_6666_7777_8888)
            .u32(48, 0x5566_7788)
            .sges(DMA),
    );
    assert_bytes(
        &post(SendWr::fetch_add(REMOTE, 0x1111_2222_3333_4444, &SGES)),
        Golden::send(6, 0).remote().u64(32, 0x1111_2222_3333_4444).u32(48, 0x5566_7788).sges(DMA),
    );
    assert_bytes(
        &post(SendWr::atomic_write(REMOTE, *b"abcdefgh")),
        Golden::send(15, 0)
            .remote()
            .u32(32, 0x5566_7788)
            .u32(DMA, 8)
            .u32(DMA + 4, 8)
            .bytes(208, b"abcdefgh"),
    );
}

#[test]
fn flushes_have_the_golden_bytes() {
    let bench = Bench::new();
    let post = |wr| posted(&bench, QpType::RC, wr);
    let flush = |kind, level| {
        Golden::send(14, 0).remote().u32(32, 0x1000).u32(36, 0x5566_7788).bytes(40, &[kind, level])
    };
    assert_bytes(
        &post(SendWr::flush(REMOTE, 0x1000, Placement::GLOBAL, FlushLevel::RANGE)),
        flush(1, 0),
    );
    let both = Placement::GLOBAL | Placement::PERSISTENT;
    assert_bytes(&post(SendWr::flush(REMOTE, 0x1000, both, FlushLevel::REGION)), flush(3, 1));
}

#[test]
fn invalidates_and_binds_have_the_golden_bytes() {
    let bench = Bench::new();
    assert_bytes(
        &posted(&bench, QpType::RC, SendWr::local_inv(Rkey(0x0102_0304))),
        Golden::send(7, 0).u32(20, 0x0102_0304),
    );
    let region = bench
        .pd
        .mr_builder()
        .access(Access::LOCAL_WRITE | Access::MW_BIND)
        .allocate::<u8>(4096)
        .unwrap();
    let mut window = bench.pd.alloc_mw(WindowType::Two).unwrap();
    let old = window.rkey().0;
    let qp = bench.qp(QpType::RC);
    let binding =
        window.bind(&qp, &region, 16..80, Access::REMOTE_WRITE | Access::REMOTE_READ).unwrap();
    assert_bytes(
        &posted_to(&bench, qp, SendWr::bind_mw(binding)),
        Golden::send(8, 0)
            .u64(24, region.addr() + 16)
            .u64(32, 64)
            .u32(40, region.lkey().0)
            .u32(44, old)
            .u32(48, old + 1)
            .u32(52, 2 | 4),
    );
}

#[test]
fn datagrams_have_the_golden_bytes() {
    let bench = Bench::new();
    let ah = bench.pd.create_ah(&AddressVector::global(1, 0, Gid([1; 16]))).unwrap();
    let ah_num = bench.script.object(bench.script.live().last().unwrap().1).number;
    let to = Destination::new(&ah, Qpn(0x0012_3456), Qkey(0x8001_0203));
    let ud =
        |opcode| Golden::send(opcode, 2).u32(24, 0x0012_3456).u32(28, 0x8001_0203).u32(36, ah_num);
    let post = |wr: SendWr<'_>| posted(&bench, QpType::UD, wr.signaled());
    assert_bytes(&post(SendWr::send(&SGES).to(to)), ud(2).sges(DMA));
    assert_bytes(
        &post(SendWr::send_imm(&SGES, 0x0102_0304).to(to)),
        ud(3).bytes(20, &[1, 2, 3, 4]).sges(DMA),
    );
}

#[test]
fn receives_have_the_golden_bytes() {
    let bench = Bench::new();
    let mut qp = bench.qp(QpType::RC);
    bench.script.poison(qp.handle(), Role::Recv);
    let mut batch = qp.recv_batch().unwrap();
    batch.push(RecvWr::new(&SGES).id(ID)).unwrap();
    batch.push(RecvWr::new(&[]).id(1)).unwrap();
    ring_recv(batch).unwrap();
    let take = || bench.script.take(qp.handle(), Role::Recv).expect("a request");
    assert_bytes(&take(), Golden(vec![0; 40]).u64(0, ID).sges(16));
    assert_bytes(&take(), Golden(vec![0; 40]).u64(0, 1));
}

#[test]
fn completions_are_read_from_golden_bytes() {
    let mut bench = Bench::new();
    let mut bytes = [0u8; 48];
    let fields: [(usize, &[u8]); 13] = [
        (0, &ID.to_ne_bytes()),
        (8, &12u32.to_ne_bytes()),
        (12, &128u32.to_ne_bytes()),
        (16, &0x77u32.to_ne_bytes()),
        (20, &0x213u32.to_ne_bytes()),
        (24, &[1, 2, 3, 4]),
        (28, &0x11u32.to_ne_bytes()),
        (32, &0x22u32.to_ne_bytes()),
        (36, &3u32.to_ne_bytes()),
        (40, &0x55u16.to_ne_bytes()),
        (42, &0x66u16.to_ne_bytes()),
        (44, &[7]),
        (45, &[8]),
    ];
    for (at, field) in fields {
        bytes[at..at + field.len()].copy_from_slice(field);
    }
    assert!(bench.script.complete_raw(bench.cq.handle(), &bytes));
    bytes[36] = 4;
    assert!(bench.script.complete_raw(bench.cq.handle(), &bytes));
    let mut completions = bench.cq.poll().unwrap();
    let wc = completions.next().unwrap();
    assert_eq!((wc.wr_id(), wc.status()), (ID, crate::WcStatus::RETRY_EXC_ERR));
    assert_eq!((wc.opcode(), wc.vendor_err()), (crate::WcOpcode::RECV, 0x77));
    assert_eq!((wc.byte_len(), wc.qpn(), wc.src_qpn()), (0x213, Qpn(0x11), Qpn(0x22)));
    assert_eq!((wc.imm(), wc.invalidated_rkey()), (Some(0x0102_0304), None));
    assert!(wc.has_grh() && !wc.is_success());
    assert_eq!((wc.pkey_index(), wc.src_lid()), (0x55, 0x66));
    assert_eq!((wc.service_level(), wc.path_bits()), (7, 8));
    let wc = completions.next().unwrap();
    let key = Rkey(u32::from_ne_bytes([1, 2, 3, 4]));
    assert_eq!((wc.imm(), wc.invalidated_rkey(), wc.has_grh()), (None, Some(key), false));
}
