//! Requests bit for bit, and queues at their limits.

use super::{BUFFER, Receiver, SGE, Sender, Shape, SharedReceiver, bytes};
use crate::memory::queue_memory::QueueMemory;
use crate::number::{Rkey, SrqNumber};
use crate::provider::SendCursor;
use crate::provider::SendLimits;
use crate::provider::mlx5::context::RawPacketLimits;
use crate::provider::mlx5::rq::{self, Mlx5Rq};
use crate::provider::mlx5::sq::{Mlx5Sq, Setup};
use crate::provider::mlx5::srq;
use crate::provider::mlx5::uidx::UidxAllocator;
use crate::provider::mlx5::wr_ids::{Receives, SharedQp};
use crate::wr::{
    FlushLevel, MaskedSwap, Placement, PostError, RecvWr, Remote, SendOps, SendWr, Sge,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const REMOTE: Remote = Remote { addr: 0x0102_0304_0506_0708, rkey: Rkey(0x0a0b_0c0d) };
const NONE: Sge = Sge { length: 0, ..SGE };

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of one request after its control segment, and that segment's segments.
fn posted(wr: SendWr<'_>) -> (String, usize) {
    let mut sends = Sender::new(Shape::default());
    sends.post(&[wr]).unwrap();
    let segments = usize::from(sends.bytes(0, 16)[7]);
    (hex(&sends.bytes(0, segments * 16)[16..]), segments)
}

const DATA: &str = "00001000010404001122334455667788";
const RADDR: &str = "01020304050607080a0b0c0d00000000";

#[test]
fn control_segments() {
    let control = |wr: SendWr<'_>| {
        let mut sends = Sender::new(Shape::default());
        sends.post(&[wr]).unwrap();
        hex(&sends.bytes(0, 16))
    };
    let send = SendWr::send(&[]);
    assert_eq!(control(send), "0000000a000042010000000000000000");
    assert_eq!(control(send.signaled()), "0000000a000042010000000800000000");
    assert_eq!(control(send.solicited()), "0000000a000042010000000200000000");
    assert_eq!(control(send.fence()), "0000000a000042010000008000000000");
    assert_eq!(control(SendWr::send_imm(&[], 0x0102_0304)), "0000000b000042010000000001020304");
    assert_eq!(control(SendWr::send_inv(&[], Rkey(7))), "00000001000042010000000000000007");
    assert_eq!(control(SendWr::write_imm(REMOTE, &[], 9)), "00000009000042020000000000000009");
    for (wr, flags) in
        [(send, 8), (send.signaled(), 8), (send.signaled().solicited().fence(), 0x8a)]
    {
        let mut sends = Sender::new(Shape { signal_all: true, ..Shape::default() });
        sends.post(&[wr]).unwrap();
        let expected = format!("0000000a00004201000000{flags:02x}00000000");
        assert_eq!(hex(&sends.bytes(0, 16)), expected, "signaled, asked for or not");
    }
}

#[test]
fn segments_by_operation() {
    let two = format!("{DATA}{DATA}");
    assert_eq!(posted(SendWr::send(&[SGE, NONE, SGE])), (two, 3), "empty pieces are left out");
    assert_eq!(posted(SendWr::write(REMOTE, &[SGE])), (format!("{RADDR}{DATA}"), 3));
    assert_eq!(posted(SendWr::read(REMOTE, &[SGE])), (format!("{RADDR}{DATA}"), 3));
    let eight = "00000008010404001122334455667788";
    let operands = "00000000000000050000000000000003";
    let swap = SendWr::compare_swap(REMOTE, 3, 5, &[SGE]);
    assert_eq!(posted(swap), (format!("{RADDR}{operands}{eight}"), 4));
    let add = SendWr::fetch_add(REMOTE, 7, &[SGE, SGE]);
    let operands = "00000000000000070000000000000000";
    assert_eq!(posted(add), (format!("{RADDR}{operands}{eight}"), 4), "eight bytes and no more");
}

#[test]
fn masked_atomics_bring_their_masks() {
    let eight = "00000008010404001122334455667788";
    let operands = MaskedSwap { compare: 1, compare_mask: 2, swap: 3, swap_mask: 4 };
    let words = "00000000000000030000000000000001\
                 00000000000000040000000000000002";
    let swap = SendWr::masked_compare_swap(REMOTE, &operands, &[SGE]);
    assert_eq!(posted(swap), (format!("{RADDR}{words}{eight}"), 5));
    let add = SendWr::masked_fetch_add(REMOTE, 7, 1 << 31, &[SGE]);
    let words = "00000000000000070000000080000000";
    assert_eq!(posted(add), (format!("{RADDR}{words}{eight}"), 4));
    let mut sends = Sender::new(Shape::default());
    sends.post(&[swap]).unwrap();
    assert_eq!(hex(&sends.bytes(0, 8)), "0900001400004205", "an extended atomic of 8 bytes");
    let mut sends = Sender::new(Shape::default());
    sends.post(&[add]).unwrap();
    assert_eq!(hex(&sends.bytes(0, 8)), "0900001500004204");
}

/// With its masks and many SGEs for its result, an atomic is longer than the queue has room for.
#[test]
fn masked_atomics_stay_within_their_room() {
    let operands = MaskedSwap { compare: 1, compare_mask: 2, swap: 3, swap_mask: 4 };
    // Two WQEBBs for each request.
    let mut sends = Sender::new(Shape { max_post: 32, ..Shape::default() });
    let piece = Sge { length: 1, ..SGE };
    let (four, five) = ([piece, piece, piece, Sge { length: 5, ..SGE }], [piece; 8]);
    sends.post(&[SendWr::masked_compare_swap(REMOTE, &operands, &four)]).unwrap();
    let long = SendWr::masked_compare_swap(REMOTE, &operands, &five);
    assert_eq!(sends.post(&[long]).unwrap_err(), PostError::TooManySge { max: 4 });
    assert_eq!(sends.bytes(4, 16), [0xa5; 16], "nothing was written behind its place");
    // Only SGEs that are written take room.
    let spare = [NONE, NONE, SGE, SGE, SGE, SGE];
    sends.post(&[SendWr::masked_compare_swap(REMOTE, &operands, &spare)]).unwrap();
    assert_eq!(sends.bytes(2, 16)[7], 5);
}

/// The XRC segment is first in every operation.
#[test]
fn queues_at_the_far_end_of_xrc() {
    const TARGET: &str = "00012345000000000000000000000000";
    let number = SrqNumber(0x01_2345);
    assert_eq!(posted(SendWr::send(&[SGE]).to_srq(number)), (format!("{TARGET}{DATA}"), 3));
    assert_eq!(posted(SendWr::send(&[]).to_srq(number)), (TARGET.to_owned(), 2));
    let write = SendWr::write(REMOTE, &[SGE]).to_srq(number);
    assert_eq!(posted(write), (format!("{TARGET}{RADDR}{DATA}"), 4));
    let operands = "00000000000000070000000000000000";
    let eight = "00000008010404001122334455667788";
    let add = SendWr::fetch_add(REMOTE, 7, &[SGE]).to_srq(number);
    assert_eq!(posted(add), (format!("{TARGET}{RADDR}{operands}{eight}"), 5));
    let (inline, segments) = posted(SendWr::send(&[]).inline(&[1, 2, 3]).to_srq(number));
    assert_eq!((inline.starts_with(&format!("{TARGET}80000003010203")), segments), (true, 3));
}

#[test]
fn inline_data_of_every_length() {
    let data: Vec<u8> = (1..=200).collect();
    const STEP: usize = if cfg!(miri) { 13 } else { 1 };
    for length in (0..data.len()).step_by(STEP) {
        let (found, segments) = posted(SendWr::send(&[]).inline(&data[..length]));
        if length == 0 {
            assert_eq!(segments, 1);
            continue;
        }
        let expected = format!("{:08x}{}", 0x8000_0000 + length, hex(&data[..length]));
        assert_eq!(segments, 1 + (4 + length).div_ceil(16), "{length} bytes");
        assert!(found.starts_with(&expected), "{length} bytes: {found}");
    }
}

/// The bytes of one slice with the same contents, which are libmlx5's.
#[test]
fn a_list_of_slices_is_posted_as_one_slice() {
    let data: Vec<u8> = (1..=200).collect();
    const STEP: usize = if cfg!(miri) { 37 } else { 3 };
    for first in (0..100).step_by(STEP) {
        for last in (first..200).step_by(STEP) {
            let parts = [&data[..first], &[], &data[first..last]];
            let number = SrqNumber(0x01_2345);
            for list in [SendWr::send(&[]), SendWr::write(REMOTE, &[]).to_srq(number)] {
                let whole = list.inline(&data[..last]);
                assert_eq!(posted(list.inline_list(&parts)), posted(whole), "{first} {last}");
            }
        }
    }
    let parts = [&data[..]; 5];
    let mut sends = Sender::new(Shape::default());
    let too_long = sends.post(&[SendWr::send(&[]).inline_list(&parts)]).map(drop);
    assert_eq!(too_long, Err(PostError::InlineTooLong { max: 980 }));
    let overflowing = [&data[..]; 300];
    let too_long = sends.post(&[SendWr::send(&[]).inline_list(&overflowing)]).map(drop);
    assert_eq!(too_long, Err(PostError::InlineTooLong { max: 980 }));
}

/// Requests of one to eight WQEBBs, which begin at every WQEBB of the queue.
#[test]
fn blueflame_copies_equal_the_wqe_in_the_queue() {
    let shape = Shape { wqebbs: 16, max_post: 2, buffer: 512, ..Shape::default() };
    let mut sends = Sender::new(shape);
    let data: Vec<u8> = (0..492u32).map(|n| (n * 7 + 1) as u8).collect();
    let (mut begun, mut buffer) = (std::collections::HashSet::new(), 0);
    // Under Miri few turns, with lengths far apart, also begin at every WQEBB.
    const TURNS: (usize, usize) = if cfg!(miri) { (152, 186) } else { (2000, 37) };
    for turn in 0..TURNS.0 {
        let length = 1 + turn * TURNS.1 % data.len();
        let at = sends.ring.begin().at;
        let cursor = sends.post(&[SendWr::send(&[]).inline(&data[..length])]).unwrap();
        let segments = 1 + (4 + length).div_ceil(16);
        let expected = sends.bytes(at, segments * 16);
        assert_eq!(expected[20..20 + length], data[..length], "{length} bytes at wqebb {at}");
        assert_eq!(
            sends.page.bytes(buffer, segments * 16),
            expected,
            "{length} bytes at wqebb {at}"
        );
        begun.insert((at % 16, cursor.at - at));
        sends.qp.sends.complete(at);
        buffer ^= 512;
    }
    assert_eq!(begun.len(), 16 * 8, "wqebbs at places");
}

/// A CQE has 16 bits for the index of a WQE, and the table has as many entries; fewer under Miri.
#[test]
fn no_queue_has_more_entries_than_completions_tell_apart() {
    const WQE_INDICES: u32 = if cfg!(miri) { 1 << 4 } else { 1 << 16 };
    for (wqebbs, fits) in [(WQE_INDICES, true), (2 * WQE_INDICES, false)] {
        let buffer = if cfg!(miri) { WQE_INDICES } else { wqebbs };
        let memory = Arc::new(QueueMemory::pages(wqebbs as usize * 64).unwrap());
        let (dbrec, page) = (super::dbrec(), super::FakeRegister::new(BUFFER));
        let uidx = UidxAllocator::new().take().unwrap();
        let qp = SharedQp::new(super::QPN, uidx, Some(buffer), Receives::Own(buffer));
        let ring = Mlx5Sq::new(Setup {
            memory: memory.clone(),
            offset: 0,
            wqebbs,
            max_post: wqebbs,
            limits: SendLimits { max_sge: 1, max_inline: 0 },
            unchecked: SendOps::default(),
            transport: super::transport(&SendWr::send(&[])),
            signal_all: false,
            dbrec: dbrec.clone(),
            register: page.register.clone(),
            owns_register: true,
            shared: qp.clone(),
            raw_packet: RawPacketLimits { min_header: 0, checksums: false },
            gate: super::open(&dbrec),
            ring_gate: super::open(&dbrec),
        });
        assert_eq!(ring.is_some(), fits);
        let place =
            rq::RqLayout { offset: 0, entries: wqebbs, max_post: wqebbs, stride: 16, max_sge: 1 };
        let gate = super::open(&dbrec);
        let shared = srq::prepare(&memory, wqebbs, 32).is_some();
        // Its limit is no smaller under Miri.
        assert_eq!(shared, fits || cfg!(miri));
        assert_eq!(Mlx5Rq::new(memory, place, dbrec, qp, gate).is_some(), fits);
    }
}

#[test]
fn requests_go_on_at_the_beginning() {
    let mut sends = Sender::new(Shape { wqebbs: 8, max_post: 2, ..Shape::default() });
    let data: Vec<u8> = (1..=150).collect();
    // Three WQEBBs each: the third request begins in WQEBB 6 and ends in WQEBB 0.
    for at in [0u32, 3, 6, 9] {
        let cursor = sends.post(&[SendWr::send(&[]).inline(&data).id(at.into())]).unwrap();
        assert_eq!(cursor.at, at + 3);
        let found = sends.bytes(at, 16 + 4 + data.len());
        assert_eq!(found[20..], data, "at wqebb {at}");
        assert_eq!(found[1..3], (at as u16).to_be_bytes());
        assert_eq!(sends.dbrec.get(1), at + 3);
        assert_eq!(sends.qp.sends.complete(at).wr_id, at.into());
    }
}

#[test]
#[cfg_attr(miri, ignore = "it goes around 16 bits, one by one")]
fn the_index_has_sixteen_bits() {
    let mut sends = Sender::new(Shape { wqebbs: 4, max_post: 4, ..Shape::default() });
    for at in 0..0x1_0003u32 {
        sends.post(&[SendWr::send(&[]).id(at.into())]).unwrap();
        let counter = at as u16;
        assert_eq!(sends.bytes(at, 4)[1..3], counter.to_be_bytes());
        assert_eq!(sends.dbrec.get(1), u32::from(counter.wrapping_add(1)));
        assert_eq!(sends.qp.sends.complete(counter.into()).wr_id, at.into());
    }
}

#[test]
fn one_request_goes_by_blueflame_and_a_batch_by_doorbell() {
    let mut sends = Sender::new(Shape::default());
    sends.post(&[SendWr::send(&[SGE])]).unwrap();
    let request = sends.bytes(0, 64);
    assert_eq!(sends.page.bytes(0, 64), request, "the first buffer");
    assert_eq!(sends.page.bytes(64, BUFFER), [0; BUFFER]);
    // Sixteen segments fill a buffer, and seventeen do not fit.
    let data = [0x5a; BUFFER - 16 - 4];
    sends.post(&[SendWr::send(&[]).inline(&data)]).unwrap();
    assert_eq!(sends.page.bytes(BUFFER, BUFFER), sends.bytes(1, BUFFER), "the second buffer");
    let data = [0x5a; BUFFER - 16 - 3];
    sends.post(&[SendWr::send(&[]).inline(&data)]).unwrap();
    assert_eq!(sends.page.bytes(0, 8), sends.bytes(5, 8), "a doorbell");
    assert_eq!(sends.page.bytes(8, 56), request[8..64], "and no more");
    sends.qp.sends.complete(5);
    // A batch rings the doorbell with its last WQE.
    let wr = SendWr::send(&[SGE]);
    sends.post(&[wr, wr]).unwrap();
    assert_eq!(sends.page.bytes(BUFFER, 8), sends.bytes(11, 8));
    // A request of one segment is its own doorbell.
    sends.post(&[SendWr::send(&[])]).unwrap();
    assert_eq!(sends.page.bytes(0, 8), sends.bytes(12, 8));
}

#[test]
fn without_blueflame_every_ring_is_a_doorbell() {
    let mut sends = Sender::new(Shape { buffer: 0, ..Shape::default() });
    for at in 0..2 {
        sends.post(&[SendWr::send(&[SGE])]).unwrap();
        assert_eq!(sends.page.bytes(0, 8), sends.bytes(at, 8));
        assert_eq!(sends.page.bytes(8, 8), [0; 8]);
    }
}

#[test]
fn a_key_is_changed_before_the_next_request_uses_it() {
    let mut sends = Sender::new(Shape::default());
    let fences = |sends: &Sender, at| sends.bytes(at, 16)[11];
    sends.post(&[SendWr::local_inv(Rkey(5)), SendWr::send(&[]), SendWr::send(&[])]).unwrap();
    assert_eq!([0, 2, 3].map(|at| fences(&sends, at)), [0, 0x20, 0]);
    sends.qp.sends.complete(3);
    // The fence crosses batches, but not from a dropped one.
    sends.post(&[SendWr::local_inv(Rkey(5))]).unwrap();
    let mut dropped = sends.ring.begin();
    sends.push(&mut dropped, &SendWr::send(&[])).unwrap();
    sends.post(&[SendWr::send(&[])]).unwrap();
    assert_eq!(fences(&sends, 6), 0x20);
    sends.post(&[SendWr::send(&[]).fence()]).unwrap();
    assert_eq!(fences(&sends, 7), 0x80);
}

#[test]
fn wqes_after_a_key_change_are_fenced() {
    let mut sends = Sender::new(Shape::default());
    let fences = |sends: &Sender, at| sends.bytes(at, 16)[11];
    let wr = SendWr::send(&[]);
    let room = sends.ring.begin().room;
    // A request on the unchecked path changes no key.
    let mut cursor = sends.ring.begin();
    assert!(!sends.try_push(&mut cursor, &SendWr::local_inv(Rkey(5))));
    assert_eq!(cursor.at, 0);
    // A dropped batch keeps the fence for a posted key change, even if the batch had a key change of its own.
    sends.post(&[SendWr::local_inv(Rkey(5))]).unwrap();
    let mut dropped = sends.ring.begin();
    sends.push(&mut dropped, &wr).unwrap();
    sends.push(&mut dropped, &SendWr::local_inv(Rkey(6))).unwrap();
    assert_eq!(dropped.room, room - 3, "a flag is no room");
    let mut cursor = sends.ring.begin();
    assert!(!sends.try_push(&mut cursor, &wr), "it may have to wait");
    sends.post(&[wr]).unwrap();
    assert_eq!(fences(&sends, 2), 0x20);
    sends.qp.sends.complete(2);
    // Only as many requests as the dropped batch had get an unneeded fence.
    sends.post(&[wr, wr]).unwrap();
    sends.post(&[wr]).unwrap();
    assert_eq!([3, 4, 5].map(|at| fences(&sends, at)), [0x20, 0x20, 0]);
    let mut cursor = sends.ring.begin();
    assert!(sends.try_push(&mut cursor, &wr));
    // A full queue refuses requests with and without the flag.
    sends.qp.sends.complete(5);
    let all = vec![SendWr::local_inv(Rkey(5)); sends.ring.begin().room as usize];
    sends.post(&all).unwrap();
    assert_eq!(sends.ring.begin().room, 0);
    assert_eq!(sends.post(&[wr]).unwrap_err(), PostError::Full);
    // A reset clears the fence.
    sends.ring.reset();
    let mut cursor = sends.ring.begin();
    assert!(sends.try_push(&mut cursor, &wr));
}

#[test]
fn a_refused_request_leaves_the_cursor() {
    let mut sends = Sender::new(Shape::default());
    let many = [SGE; 31];
    let huge = [Sge { length: 1 << 31, ..SGE }];
    let long = [0u8; 981];
    let odd = Remote { addr: 12, ..REMOTE };
    let flush = SendWr::flush(REMOTE, 8, Placement::GLOBAL, FlushLevel::RANGE);
    let refused = [
        (SendWr::send(&many), PostError::TooManySge { max: 30 }),
        (SendWr::send(&huge), PostError::TooLong),
        (SendWr::send(&[]).inline(&long), PostError::InlineTooLong { max: 980 }),
        (SendWr::fetch_add(odd, 1, &[SGE]), PostError::Unaligned),
        (SendWr::compare_swap(odd, 1, 1, &[SGE]), PostError::Unaligned),
        (SendWr::masked_fetch_add(odd, 1, 0, &[SGE]), PostError::Unaligned),
        (SendWr::masked_fetch_add(REMOTE, 1, 0, &[]), PostError::AtomicTooShort),
        (SendWr::fetch_add(REMOTE, 1, &[]), PostError::AtomicTooShort),
        (flush, PostError::Unsupported),
        (SendWr::atomic_write(REMOTE, [0; 8]), PostError::Unsupported),
    ];
    let mut cursor = sends.ring.begin();
    for (wr, error) in refused {
        assert_eq!(sends.push(&mut cursor, &wr), Err(error), "{wr:?}");
        assert_eq!((cursor.at, cursor.head, cursor.room), (0, 0, 4));
    }
}

#[test]
fn overflow_is_exact_and_completions_make_room() {
    let mut sends = Sender::new(Shape::default());
    let wr = |id| SendWr::send(&[]).id(id);
    assert!(sends.post(&[wr(0), wr(1), wr(2), wr(3), wr(4)]).is_err());
    assert_eq!(sends.dbrec.get(1), 0, "nothing was rung");
    sends.post(&[wr(0), wr(1), wr(2), wr(3)]).unwrap();
    assert_eq!(sends.ring.begin().room, 0);
    assert_eq!(sends.post(&[wr(4)]).unwrap_err(), PostError::Full);
    // The third request completes, and with it the two before.
    assert_eq!(sends.qp.sends.complete(2).wr_id, 2);
    assert_eq!(sends.ring.begin().room, 3);
    sends.ring.reset();
    let SendCursor { at, room, .. } = sends.ring.begin();
    assert_eq!((at, room, sends.dbrec.get(1)), (0, 4, 0));
}

/// Requests of every length: with one SGE, with none, and with inline data.
#[test]
fn a_queue_that_is_full_or_was_shut_by_a_fork_takes_no_request() {
    for wr in [SendWr::send(&[SGE]), SendWr::send(&[]), SendWr::send(&[]).inline(&[1; 16])] {
        let mut sends = Sender::new(Shape::default());
        let mut cursor = sends.ring.begin();
        sends.ring.gate.level().store(0, Ordering::Relaxed);
        assert_eq!(sends.push(&mut cursor, &wr), Err(PostError::Forked));
        assert_eq!((cursor.at, cursor.head, cursor.room), (0, 0, 4));
        sends.ring.gate.level().store(1, Ordering::Relaxed);
        sends.post(&[wr; 4]).unwrap();
        assert_eq!(sends.post(&[wr]).unwrap_err(), PostError::Full);
    }
    for recv in [RecvWr::new(&[SGE]), RecvWr::new(&[])] {
        let mut receiver = Receiver::new(4, 16);
        let mut cursor = receiver.ring.begin();
        receiver.ring.gate.level().store(0, Ordering::Relaxed);
        assert_eq!(receiver.push(&mut cursor, &recv), Err(PostError::Forked));
        assert_eq!((cursor.at, cursor.room), (0, 4));
        receiver.ring.gate.level().store(1, Ordering::Relaxed);
        receiver.post(&[recv; 4]).unwrap();
        assert_eq!(receiver.post(&[recv]), Err(PostError::Full));
        assert_eq!(receiver.dbrec.get(0), 4);

        let mut shared = SharedReceiver::new(4, 32);
        let mut cursor = shared.ring.begin();
        shared.ring.gate.level().store(0, Ordering::Relaxed);
        assert_eq!(shared.push(&mut cursor, &recv), Err(PostError::Forked));
        assert_eq!((cursor.at, cursor.room), (0, 3));
        shared.ring.gate.level().store(1, Ordering::Relaxed);
        shared.post(&[recv; 3]).unwrap();
        assert_eq!(shared.post(&[recv]), Err(PostError::Full));
        assert_eq!(shared.dbrec.get(0), 3);
    }
}

#[test]
fn receives_bit_for_bit() {
    let mut receiver = Receiver::new(4, 32);
    receiver.post(&[RecvWr::new(&[NONE, SGE]).id(3)]).unwrap();
    let end = "00000000000001000000000000000000";
    assert_eq!(hex(&bytes(&receiver.device, 0, 32)), format!("{DATA}{end}"));
    let full = RecvWr::new(&[SGE, SGE]).id(4);
    receiver.post(&[full, RecvWr::new(&[]).id(5)]).unwrap();
    assert_eq!(hex(&bytes(&receiver.device, 2, 32)), format!("{DATA}{DATA}"), "no room to end it");
    assert_eq!(hex(&bytes(&receiver.device, 4, 16)), end);
    assert_eq!(receiver.dbrec.get(0), 3);
    let last = RecvWr::new(&[]).id(6);
    receiver.post(&[last]).unwrap();
    assert_eq!(receiver.post(&[last]), Err(PostError::Full));
    let many = RecvWr::new(&[SGE; 3]).id(7);
    assert!(receiver.qp.srq_wr_ids().is_none());
    let qp = receiver.qp.clone();
    let posted = &qp.receives.own;
    assert_eq!(posted.complete(0), 3);
    assert_eq!(receiver.post(&[many]), Err(PostError::TooManySge { max: 2 }));
    receiver.post(&[last]).unwrap();
    assert_eq!((receiver.dbrec.get(0), posted.complete(1), posted.complete(0x1_0002)), (5, 4, 5));
    receiver.ring.reset();
    assert_eq!((receiver.dbrec.get(0), receiver.ring.begin().room), (0, 4));
}

/// Each behind a link, by both paths of posting.
#[test]
fn shared_receives_bit_for_bit() {
    let mut shared = SharedReceiver::new(8, 64);
    let pieces = [SGE; 4];
    for wr_id in 0..4 {
        shared.post(&[RecvWr::new(&pieces[..wr_id as usize]).id(wr_id)]).unwrap();
    }
    let many = RecvWr::new(&pieces).id(4);
    assert_eq!(shared.post(&[many]), Err(PostError::TooManySge { max: 3 }));
    let end = "00000000000001000000000000000000";
    for (at, data) in
        [(0u32, String::new()), (1, DATA.into()), (2, DATA.repeat(2)), (3, DATA.repeat(3))]
    {
        let next = format!("{:08x}{}", at + 1, "0".repeat(24));
        let mut expected = next + &data + if at < 3 { end } else { "" };
        // Bytes that were never written are zero here.
        expected += &"0".repeat(128 - expected.len());
        assert_eq!(hex(&bytes(&shared.device, at * 4, 64)), expected, "{at} pieces");
    }
}

/// The device counts receives in 16 bits.
#[test]
#[cfg_attr(miri, ignore = "it goes around 16 bits, one by one")]
fn receives_are_counted_in_sixteen_bits() {
    let (mut own, mut shared) = (Receiver::new(4, 16), SharedReceiver::new(4, 32));
    let (qp, slots) = (own.qp.clone(), shared.ring.wr_ids().clone());
    for wr_id in 0..0x1_0003u64 {
        let recv = [RecvWr::new(&[]).id(wr_id)];
        let count = u32::from(wr_id as u16).wrapping_add(1) & 0xffff;
        own.post(&recv).unwrap();
        assert_eq!((own.dbrec.get(0), qp.receives.complete(wr_id as u32 & 0xffff)), (count, wr_id));
        let at = shared.ring.begin().at;
        shared.post(&recv).unwrap();
        assert_eq!((shared.dbrec.get(0), slots.complete(at)), (count, wr_id));
    }
}

#[test]
fn shared_receives_are_a_list() {
    let mut shared = SharedReceiver::new(4, 32);
    let link = |shared: &SharedReceiver, at: u32| shared.device.read(at * 2)[0].to_be() as u32;
    assert_eq!([0, 1, 2, 3].map(|at| shared.device.read(at * 2)[0].to_be() >> 32), [1, 2, 3, 0]);
    assert_eq!(link(&shared, 0), 0);
    let recv = |wr_id| RecvWr::new(&[SGE]).id(wr_id);
    shared.post(&[recv(10), recv(11), recv(12)]).unwrap();
    assert_eq!(shared.dbrec.get(0), 3);
    assert_eq!(hex(&bytes(&shared.device, 3, 16)), DATA);
    assert_eq!(shared.post(&[recv(13)]), Err(PostError::Full), "the last stays in the list");
    let slots = shared.ring.wr_ids().clone();
    assert_eq!((slots.complete(1), slots.complete(0)), (11, 10));
    assert_eq!(shared.ring.begin().room, 2);
    shared.post(&[recv(13), recv(14)]).unwrap();
    // The list continues where it ended: 3, and then the WQEs that came back.
    assert_eq!((slots.complete(3), slots.complete(2)), (13, 12));
    let next = shared.device.read(6)[0].to_be() >> 32;
    assert!(next < 2, "linked to one that came back");
    assert_eq!(slots.complete(next as u32), 14);
    assert_eq!(shared.dbrec.get(0), 5);
}

/// A device that names an entry twice, or one that is free, harms only its user.
#[test]
fn wqes_that_complete_twice_keep_the_list_inside_the_ring() {
    let mut shared = SharedReceiver::new(4, 32);
    let slots = shared.ring.wr_ids().clone();
    for at in [0, 0, 1, 7, 0xffff] {
        slots.complete(at);
    }
    assert_eq!(shared.ring.begin().room, 3);
    shared.post(&[RecvWr::new(&[]).id(1)]).unwrap();
    let links = [0, 1, 2, 3].map(|at| shared.device.read(at * 2)[0].to_be() >> 32);
    assert!(links.iter().all(|next| *next < 4), "the device goes nowhere else: {links:?}");
    slots.complete(0);
    slots.complete(0);
    assert!(shared.ring.begin().room <= 3);
}
