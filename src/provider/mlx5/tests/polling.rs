//! Completions: the queue pair of each, their fields, and the discarding of those of destroyed queue pairs.

use super::PollGate;
use super::{CQN, Completed, FakeRegister, Sender, Shape, SharedReceiver, bytes, cqe, dbrec, next};
use crate::memory::gate::Gate;
use crate::memory::queue_memory::QueueMemory;
use crate::provider::mlx5::cq::{self, Mlx5Cq};
use crate::provider::mlx5::uidx::UidxAllocator;
use crate::provider::mlx5::wr_ids::{Receives, SharedQp};
use crate::sync::Ordering;
use crate::wc::{WcOpcode, WcStatus};
use crate::wr::{RecvWr, SendWr};
use std::sync::Arc;

const REQ: u8 = 0;
const WRITE_IMM: u8 = 1;
const SEND: u8 = 2;
const SEND_IMM: u8 = 3;
const SEND_INV: u8 = 4;
const RESIZED: u8 = 5;
const REQ_ERR: u8 = 13;
const RESP_ERR: u8 = 14;

/// A queue pair with the user index 1 whose sends 0 to 3 and receives 0 to 3 have the numbers 100 to 103
/// and 200 to 203.
fn member() -> Arc<SharedQp> {
    let uidx = UidxAllocator::new().take().unwrap();
    let qp = SharedQp::new(0x42, uidx, Some(4), Receives::Own(4));
    for at in 0..4 {
        qp.sends.entries().at(at).set(u64::from(at) + 100, at + 1, WcOpcode::READ.0);
        let entries = qp.receives.own.entries();
        entries.at(at).store(u64::from(at) + 200, Ordering::Relaxed);
    }
    qp
}

fn ids(ring: &mut Mlx5Cq) -> Vec<u64> {
    let mut ids = Vec::new();
    while let Some(wc) = next(ring) {
        ids.push(wc.wr_id);
    }
    ring.release();
    ids
}

#[test]
fn cqes_change_hands_by_their_owner_bit() {
    for size in [64, 128] {
        let mut completed = Completed::new(4, size);
        let qp = member();
        completed.ring.registry().attach(&qp);
        assert_eq!(ids(&mut completed.ring), [0; 0], "of {size} bytes");
        for round in 0..5u32 {
            for count in [1, 4, 3] {
                for n in 0..count {
                    completed.write(cqe(REQ, 1, 0x42, n));
                }
                let expected: Vec<_> = (0..u64::from(count)).map(|n| n + 100).collect();
                assert_eq!(completed.ring.pending(), u32::from(count));
                assert_eq!(ids(&mut completed.ring), expected, "round {round} of {size} bytes");
                assert_eq!(completed.consumed(), completed.device.producer);
                assert_eq!(ids(&mut completed.ring), [0; 0]);
            }
        }
    }
}

#[test]
fn a_poller_that_learned_everything_need_not_look_again() {
    let mut completed = Completed::new(4, 64);
    let qp = member();
    let registry = completed.ring.registry().clone();
    assert!(completed.next().is_none());
    assert!(registry.poll_gate.is_quiet());
    registry.attach(&qp);
    assert!(!registry.poll_gate.is_quiet(), "it has to look");
    assert!(completed.next().is_none());
    assert!(registry.poll_gate.is_quiet());
    // A completion in the queue may be of the destroyed queue pair: the next poll checks again.
    completed.write(cqe(REQ, 1, 0x42, 0));
    registry.retire(&qp);
    completed.ring.catch_up();
    assert!(!registry.poll_gate.is_quiet());
    while completed.next().is_some() {}
    assert!(completed.next().is_none());
    assert!(registry.poll_gate.is_quiet());
}

#[test]
fn completions_are_read_from_the_fields_of_the_cqe() {
    let mut completed = Completed::new(16, 64);
    let qp = member();
    completed.ring.registry().attach(&qp);
    completed.write(cqe(REQ, 1, 0x1000_0042, 3));
    let wc = completed.next().unwrap();
    assert_eq!((wc.wr_id, wc.opcode(), wc.status()), (103, WcOpcode::READ, WcStatus::SUCCESS));
    assert_eq!((wc.qpn(), wc.imm(), wc.vendor_err()), (0x42, None, 0));

    let mut core = cqe(SEND_IMM, 1, 0x42, 2);
    core[17] = 0x85;
    core[22..24].copy_from_slice(&[0x12, 0x34]);
    core[24..28].copy_from_slice(&[0x1b, 0x11, 0x22, 0x33]);
    core[36..40].copy_from_slice(&[1, 2, 3, 4]);
    core[44..48].copy_from_slice(&[0, 0, 2, 1]);
    core[48..56].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
    completed.write(core);
    let wc = completed.next().unwrap();
    assert_eq!((wc.wr_id, wc.opcode(), wc.byte_len()), (202, WcOpcode::RECV, 0x201));
    assert_eq!((wc.imm(), wc.invalidated_rkey()), (Some(0x0102_0304), None));
    assert_eq!((wc.src_qpn(), wc.path().service_level, wc.has_grh()), (0x11_2233, 0xb, true));
    assert_eq!((wc.path().src_lid, wc.path().path_bits, wc.path().pkey_index), (0x1234, 5, 0x0304));
    assert_eq!(wc.timestamp(), Some(0x0102_0304_0506_0708));

    let mut core = cqe(SEND_INV, 1, 0x42, 3);
    core[36..40].copy_from_slice(&[9, 8, 7, 6]);
    completed.write(core);
    let wc = completed.next().unwrap();
    assert_eq!((wc.invalidated_rkey(), wc.imm(), wc.has_grh()), (Some(0x0908_0706), None, false));

    completed.write(cqe(WRITE_IMM, 1, 0x42, 0));
    assert_eq!(completed.next().unwrap().opcode(), WcOpcode::RECV_WRITE_IMM);
    completed.write(cqe(SEND, 1, 0x42, 1));
    let wc = completed.next().unwrap();
    assert_eq!((wc.wr_id, wc.opcode(), wc.imm()), (201, WcOpcode::RECV, None));
}

#[test]
fn errors_have_names_and_the_device_s_own_code() {
    let mut completed = Completed::new(4, 64);
    let qp = member();
    completed.ring.registry().attach(&qp);
    let named = [
        (0x01, WcStatus::LOC_LEN_ERR),
        (0x02, WcStatus::LOC_QP_OP_ERR),
        (0x04, WcStatus::LOC_PROT_ERR),
        (0x05, WcStatus::WR_FLUSH_ERR),
        (0x06, WcStatus::MW_BIND_ERR),
        (0x10, WcStatus::BAD_RESP_ERR),
        (0x11, WcStatus::LOC_ACCESS_ERR),
        (0x12, WcStatus::REM_INV_REQ_ERR),
        (0x13, WcStatus::REM_ACCESS_ERR),
        (0x14, WcStatus::REM_OP_ERR),
        (0x15, WcStatus::RETRY_EXC_ERR),
        (0x16, WcStatus::RNR_RETRY_EXC_ERR),
        (0x22, WcStatus::REM_ABORT_ERR),
        (0x77, WcStatus::GENERAL_ERR),
    ];
    for (syndrome, status) in named {
        for opcode in [REQ_ERR, RESP_ERR] {
            let mut core = cqe(opcode, 1, 0x42, 1);
            (core[54], core[55]) = (0x8f, syndrome);
            completed.write(core);
            let wc = completed.next().unwrap();
            assert_eq!((wc.status(), wc.vendor_err(), wc.qpn()), (status, 0x8f, 0x42));
            assert_eq!(wc.timestamp(), None);
            let wr_id = if opcode == REQ_ERR { 101 } else { 201 };
            assert_eq!(wc.wr_id, wr_id);
            completed.ring.release();
        }
    }
}

/// Data in the core of a CQE of either size, and in front of the core of a long one.
#[test]
fn inline_data_is_found_by_the_last_byte_of_the_cqe() {
    const IN_CORE: u8 = 4;
    const IN_FRONT: u8 = 8;
    let pattern: [u8; 64] = std::array::from_fn(|at| at as u8 ^ 0x5a);
    for size in [64, 128] {
        let mut completed = Completed::new(4, size);
        let qp = member();
        completed.ring.registry().attach(&qp);
        for (opcode, length, data) in [
            (SEND, 1, 1),
            (SEND_IMM, 31, 31),
            (SEND_INV, 32, 32),
            (REQ, 32, 32),
            // No device reports this length: a core holds no more than 32 bytes.
            (SEND, 33, 32),
        ] {
            let mut core = cqe(opcode, 1, 0x42, 1);
            core[..32].copy_from_slice(&pattern[..32]);
            core[47] = length;
            core[63] |= IN_CORE;
            completed.write(core);
            let wc = completed.next().unwrap();
            assert_eq!(wc.scattered().as_deref(), Some(&pattern[..data]), "of {size} bytes");
            assert_eq!((wc.status(), wc.byte_len()), (WcStatus::SUCCESS, length.into()));
            let (from, path) =
                ((wc.src_qpn(), wc.path().src_lid), (wc.path().service_level, wc.path().path_bits));
            assert_eq!((from, path), ((0, 0), (0, 0)), "a peer's bytes say where it is");
            assert_eq!(
                (wc.has_grh(), wc.packet().ip_checksum_ok, wc.packet().vlan),
                (false, false, None)
            );
            completed.ring.release();
        }
        for (opcode, bits) in [(SEND, 0), (REQ, 0), (REQ_ERR, IN_CORE), (RESP_ERR, IN_FRONT)] {
            let mut core = cqe(opcode, 1, 0x42, 1);
            core[47] = 8;
            core[63] |= bits;
            completed.write(core);
            assert!(completed.next().unwrap().scattered().is_none(), "{opcode} {bits}");
            completed.ring.release();
        }
    }
    let mut completed = Completed::new(4, 128);
    let qp = member();
    completed.ring.registry().attach(&qp);
    for length in [1, 63, 64, 40, 7] {
        let at = completed.device.producer % 4 * 8;
        completed.device.segments.copy(at, 0, &pattern);
        let mut core = cqe(SEND, 1, 0x42, 1);
        core[47] = length;
        core[63] |= IN_FRONT;
        completed.write(core);
        let wc = completed.next().unwrap();
        assert_eq!(wc.scattered().as_deref(), Some(&pattern[..length.into()]));
        completed.ring.release();
    }
}

/// The device need not fill in `byte_cnt` for an atomic.
#[test]
fn atomics_bring_eight_bytes() {
    let mut completed = Completed::new(4, 64);
    let uidx = UidxAllocator::new().take().unwrap();
    let qp = SharedQp::new(0x42, uidx, Some(4), Receives::None);
    for (at, kind) in [(0, WcOpcode::COMPARE_SWAP), (1, WcOpcode::FETCH_ADD)] {
        qp.sends.entries().at(at).set(0, at + 1, kind.0);
    }
    completed.ring.registry().attach(&qp);
    for at in 0..2 {
        let mut core = cqe(REQ, 1, 0x42, at);
        core[..8].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        core[63] |= 4;
        completed.write(core);
        let wc = completed.next().unwrap();
        assert_eq!(wc.scattered().as_deref(), Some(&[1, 2, 3, 4, 5, 6, 7, 8][..]));
        assert_eq!(wc.byte_len(), 8);
    }
}

#[test]
fn cqes_of_no_queue_pair_are_consumed_unseen() {
    let mut completed = Completed::new(4, 64);
    let qp = member();
    completed.ring.registry().attach(&qp);
    for uidx in [0, 2, 65, 0xff_ffff] {
        completed.write(cqe(REQ, uidx, 0x42, 0));
        assert!(completed.next().is_none());
    }
    assert_eq!(completed.consumed(), 4, "nobody else gives them back");
    completed.write(cqe(RESIZED, 1, 0, 0));
    completed.write(cqe(REQ, 1, 0x42, 1));
    assert_eq!(ids(&mut completed.ring), [101]);
}

#[test]
fn completions_of_a_destroyed_qp_are_discarded_and_its_uidx_stays_in_use_until_then() {
    let indices = UidxAllocator::new();
    let mut completed = Completed::new(4, 64);
    let dead = SharedQp::new(7, indices.take().unwrap(), Some(4), Receives::None);
    dead.sends.entries().at(0).set(500, 1, 0);
    completed.ring.registry().attach(&dead);
    completed.write(cqe(REQ, 1, 7, 0));
    assert_eq!(ids(&mut completed.ring), [500]);
    completed.write(cqe(REQ, 1, 7, 0));
    completed.ring.registry().retire(&dead);
    drop(dead);
    // The next queue pair has another index, and the same number.
    let live = SharedQp::new(7, indices.take().unwrap(), Some(4), Receives::None);
    assert_eq!(live.uidx().get(), 2);
    live.sends.entries().at(0).set(600, 1, 0);
    completed.ring.registry().attach(&live);
    completed.write(cqe(REQ, 2, 7, 0));
    assert_eq!(ids(&mut completed.ring), [600]);
    // The queue was found empty: the index is free when the poller reads its updates again.
    completed.ring.registry().retire(&live);
    assert_eq!(ids(&mut completed.ring), [0; 0]);
    assert_eq!(indices.take().unwrap().get(), 1);
}

/// A queue pair is destroyed while its last completion is in the queue. No update tells the poller
/// that this completion is consumed.
#[test]
fn an_index_is_free_one_poll_after_its_last_completion() {
    let indices = UidxAllocator::new();
    let mut completed = Completed::new(4, 64);
    let dead = SharedQp::new(7, indices.take().unwrap(), Some(4), Receives::None);
    completed.ring.registry().attach(&dead);
    completed.write(cqe(REQ, 1, 7, 0));
    completed.ring.registry().retire(&dead);
    drop(dead);
    assert!(completed.next().is_none());
    assert_eq!(indices.take().unwrap().get(), 2, "its completion was there when the poll began");
    assert!(completed.next().is_none());
    assert_eq!(indices.take().unwrap().get(), 1);
}

/// A resize gives the completions in the queue new indices.
#[test]
fn destroyed_queue_pairs_stay_known_across_a_resize() {
    let mut shared = SharedReceiver::new(4, 32);
    shared.post(&[RecvWr::new(&[]).id(0)]).unwrap();
    let indices = UidxAllocator::new();
    let live = SharedQp::new(7, indices.take().unwrap(), Some(4), Receives::None);
    let receives = Receives::Shared(shared.ring.wr_ids().clone());
    let dead = SharedQp::new(8, indices.take().unwrap(), Some(4), receives);
    let mut completed = Completed::new(4, 64);
    for qp in [&live, &dead] {
        completed.ring.registry().attach(qp);
    }
    for at in 0..2 {
        live.sends.entries().at(at).set(u64::from(at) + 100, at + 1, 0);
        completed.write(cqe(REQ, 1, 7, at as u16));
    }
    completed.write(cqe(SEND, 2, 8, 0));
    completed.ring.registry().retire(&dead);
    drop(dead);
    completed.ring.catch_up();
    for entries in [8, 16] {
        completed.write(cqe(RESIZED, 0, 0, 0));
        let memory = Arc::new(QueueMemory::pages(entries as usize * 64).unwrap());
        completed.ring.exchange(cq::prepare(&memory, entries, 64).unwrap());
        completed.device.exchange(&memory, entries);
    }
    for wr_id in [100, 101] {
        assert_eq!(completed.ring.next().unwrap().wr_id, wr_id);
    }
    assert!(completed.ring.next().is_none());
    assert_eq!(shared.ring.begin().room, 3, "the entry of the dead is back");
}

/// A queue pair is created, posted to and completed after a poll began.
#[test]
fn a_newcomer_is_found_within_a_poll() {
    let mut completed = Completed::new(4, 64);
    assert!(completed.next().is_none());
    let qp = member();
    completed.ring.registry().attach(&qp);
    completed.write(cqe(REQ, 1, 0x42, 2));
    assert_eq!(completed.ring.next().unwrap().wr_id, 102);
}

#[test]
fn shared_receives_come_back_from_the_living_the_dead_and_the_reset() {
    let mut shared = SharedReceiver::new(4, 32);
    let recv = |wr_id| RecvWr::new(&[]).id(wr_id);
    shared.post(&[recv(0), recv(1), recv(2)]).unwrap();
    let mut completed = Completed::new(4, 64);
    let slots = shared.ring.wr_ids();
    let uidx = UidxAllocator::new().take().unwrap();
    let qp = SharedQp::new(7, uidx, Some(4), Receives::Shared(slots.clone()));
    completed.ring.registry().attach(&qp);
    completed.write(cqe(SEND, 1, 7, 1));
    assert_eq!(ids(&mut completed.ring), [1]);
    assert_eq!(shared.ring.begin().room, 1);
    completed.write(cqe(SEND, 1, 7, 0));
    completed.write(cqe(REQ, 1, 7, 0));
    completed.ring.purge(&qp);
    assert_eq!(ids(&mut completed.ring), [0; 0]);
    assert_eq!(shared.ring.begin().room, 2, "after a reset");
    completed.write(cqe(RESP_ERR, 1, 7, 2));
    completed.ring.registry().retire(&qp);
    drop(qp);
    assert_eq!(ids(&mut completed.ring), [0; 0]);
    assert_eq!(shared.ring.begin().room, 3, "after the end");
}

/// The index of a send completion would name a receive that the device still has.
#[test]
fn a_send_of_a_queue_pair_that_is_gone_gives_no_shared_receive_back() {
    let mut shared = SharedReceiver::new(4, 32);
    shared.post(&[RecvWr::new(&[]); 3]).unwrap();
    let mut completed = Completed::new(4, 64);
    let uidx = UidxAllocator::new().take().unwrap();
    let slots = shared.ring.wr_ids().clone();
    let dead = SharedQp::new(7, uidx, Some(4), Receives::Shared(slots));
    completed.ring.registry().attach(&dead);
    completed.write(cqe(REQ, 1, 7, 0));
    completed.write(cqe(REQ_ERR, 1, 7, 1));
    completed.ring.registry().retire(&dead);
    drop(dead);
    assert_eq!(ids(&mut completed.ring), [0; 0]);
    assert_eq!((completed.consumed(), shared.ring.begin().room), (2, 0));
}

#[test]
fn shared_receives_that_nobody_reads_come_back_with_the_queue() {
    // The poller goes first or last, and the queue pair before or between.
    for early in [true, false] {
        let mut shared = SharedReceiver::new(8, 32);
        let recv = |wr_id| RecvWr::new(&[]).id(wr_id);
        shared.post(&[0, 1, 2, 3, 4].map(recv)).unwrap();
        let mut completed = Completed::new(8, 64);
        let slots = shared.ring.wr_ids().clone();
        let indices = UidxAllocator::new();
        let member = || {
            let uidx = indices.take().unwrap();
            SharedQp::new(7, uidx, Some(4), Receives::Shared(slots.clone()))
        };
        let [alive, dead] = [member(), member()];
        let registry = completed.ring.registry().clone();
        registry.attach(&alive);
        registry.attach(&dead);
        completed.write(cqe(SEND, 1, 7, 0));
        completed.write(cqe(SEND, 2, 7, 1));
        completed.write(cqe(SEND, 2, 7, 2));
        completed.write(cqe(REQ, 1, 7, 3));
        assert_eq!(completed.next().unwrap().wr_id, 0);
        completed.ring.release();
        let gone = |qp: Arc<SharedQp>| {
            registry.retire(&qp);
            drop(qp);
        };
        if early {
            gone(dead);
            completed.write(cqe(RESP_ERR, 1, 7, 4));
            drop(completed);
            gone(alive);
        } else {
            // The device goes on after the poller was dropped.
            let Completed { ring, device, .. } = completed;
            drop(ring);
            device.segments.copy(4 * 4, 0, &cqe(RESP_ERR, 1, 7, 4));
            gone(dead);
            gone(alive);
        }
        assert_eq!(shared.ring.begin().room, 3, "somebody may look yet");
        drop(registry);
        assert_eq!(shared.ring.begin().room, 6, "{early}: all but one that was not consumed");
    }
}

#[test]
#[cfg_attr(miri, ignore = "it forks")]
fn a_child_settles_nothing() {
    let mut shared = SharedReceiver::new(4, 32);
    shared.post(&[RecvWr::new(&[]).id(0)]).unwrap();
    let mut completed = Completed::new(4, 64);
    let uidx = UidxAllocator::new().take().unwrap();
    let slots = shared.ring.wr_ids().clone();
    let qp = SharedQp::new(7, uidx, Some(4), Receives::Shared(slots));
    completed.ring.registry().attach(&qp);
    completed.write(cqe(SEND, 1, 7, 0));
    let mut completed = Some(completed);
    crate::sync::fork::in_child(|| {
        let mut completed = completed.take().unwrap();
        // As in memory of a program's allocator, which no kernel wipes.
        completed.device.producer = 0;
        completed.write(cqe(SEND, 1, 7, 0));
        drop(completed);
        assert_eq!(shared.ring.begin().room, 2);
    });
    drop(completed);
    assert_eq!(shared.ring.begin().room, 3);
}

/// Numbers of 24 and 16 bits are read with their neighbours.
#[test]
fn neighbouring_bytes_are_no_part_of_a_number() {
    for (uidx, qpn) in [(1, u32::MAX), (0xff00_0001, 0), (0xff00_0001, u32::MAX)] {
        let mut completed = Completed::new(4, 64);
        let qp = member();
        completed.ring.registry().attach(&qp);
        completed.write(cqe(REQ, uidx, qpn, 2));
        completed.write(cqe(SEND, uidx, qpn, 3));
        completed.write(cqe(REQ_ERR, uidx, qpn, 3));
        assert_eq!(ids(&mut completed.ring), [102, 203, 103]);
    }
}

#[test]
fn completions_are_counted_in_24_bits() {
    let mut completed = Completed::new(4, 64);
    let qp = member();
    completed.ring.registry().attach(&qp);
    completed.ring.pretend(CQN, 0xff_fffe);
    completed.device.producer = 0xff_fffe;
    for consumed in [0xff_ffff, 0, 1] {
        completed.write(cqe(REQ, 1, 0x42, 0));
        assert_eq!(completed.ring.pending(), 1);
        assert_eq!(ids(&mut completed.ring), [100]);
        assert_eq!(completed.consumed(), consumed);
    }
}

#[test]
fn arming_names_the_queue_the_kind_and_the_consumer_index() {
    let mut completed = Completed::new(4, 64);
    let qp = member();
    completed.ring.registry().attach(&qp);
    completed.ring.arm(false, 0);
    assert_eq!(completed.device.dbrec.get(1), 0);
    assert_eq!(completed.page.bytes(0, 8), [0, 0, 0, 0, 0, 0, 4, 0x0d]);
    completed.write(cqe(REQ, 1, 0x42, 1));
    assert_eq!(ids(&mut completed.ring).len(), 1);
    completed.ring.arm(true, 3 << 28);
    assert_eq!(completed.device.dbrec.get(1), 0x3100_0001);
    assert_eq!(completed.page.bytes(0, 8), [0x31, 0, 0, 1, 0, 0, 4, 0x0d]);
    assert_eq!(CQN, 0x40d);
}

#[test]
fn a_resized_queue_keeps_its_completions() {
    for (entries, size) in [(2u32, 64usize), (8, 64), (4, 128)] {
        let mut completed = Completed::new(4, size);
        let qp = member();
        completed.ring.registry().attach(&qp);
        for n in 0..3 {
            completed.write(cqe(REQ, 1, 0x42, n));
        }
        assert_eq!(ids(&mut completed.ring).len(), 3);
        // A CQE with inline data is in the queue when the device moves to the new ring, and ends
        // the old one with a mark.
        let mut waiting = cqe(REQ, 1, 0x42, 3);
        (waiting[0], waiting[47]) = (0xd7, 1);
        waiting[63] |= if size == 64 { 4 } else { 8 };
        if size == 128 {
            completed.device.segments.copy(3 * completed.device.stride, 0, &[0xd7; 64]);
        }
        completed.write(waiting);
        completed.write(cqe(RESIZED, 0, 0, 0));
        let memory = Arc::new(QueueMemory::pages(entries as usize * size).unwrap());
        let cqes = cq::prepare(&memory, entries, size).unwrap();
        completed.ring.exchange(cqes);
        completed.device.exchange(&memory, entries);
        assert_eq!(completed.consumed(), 4, "the mark is consumed");
        completed.write(cqe(REQ, 1, 0x42, 0));
        let moved = completed.next().unwrap();
        assert_eq!((moved.wr_id, moved.scattered().as_deref()), (103, Some(&[0xd7][..])));
        assert_eq!(ids(&mut completed.ring), [100], "{entries} of {size} bytes");
        assert_eq!(completed.consumed(), 6);
    }
}

#[test]
fn wiped_memory_holds_no_completion() {
    let mut completed = Completed::new(4, 64);
    completed.ring.registry().attach(&member());
    for segment in 0..16 {
        completed.device.segments.write(segment, [0, 0]);
    }
    assert!(completed.next().is_none());
    assert_eq!(bytes(&completed.device.segments, 0, 4), [0; 4]);
}

#[test]
fn a_dropped_poller_frees_the_indices_in_its_table() {
    let indices = UidxAllocator::new();
    let (page, dbrec) = (FakeRegister::new(0), dbrec());
    let memory = Arc::new(QueueMemory::pages(256).unwrap());
    let cqes = cq::prepare(&memory, 4, 64).unwrap();
    let gate = Gate::beside(&dbrec).unwrap();
    let ring = Mlx5Cq::new(cqes, dbrec, PollGate::new(gate), &page.register, CQN);
    let qp = SharedQp::new(7, indices.take().unwrap(), Some(4), Receives::None);
    ring.registry().attach(&qp);
    ring.registry().retire(&qp);
    drop((qp, ring));
    assert_eq!(indices.take().unwrap().get(), 1);
}

/// Poster and poller are apart, with the real rings on both sides.
#[test]
fn a_completion_makes_room_for_the_poster() {
    let mut sends = Sender::new(Shape::default());
    let mut completed = Completed::new(8, 64);
    completed.ring.registry().attach(&sends.qp);
    let wr = |id| SendWr::send(&[]).id(id);
    sends.post(&[wr(1), wr(2), wr(3), wr(4)]).unwrap();
    completed.write(cqe(REQ, 1, 0x42, 2));
    assert_eq!(ids(&mut completed.ring), [3]);
    assert_eq!(sends.ring.begin().room, 3);
}

/// A broken device may name any queue pair, any index and any length.
#[test]
fn garbage_ends_a_poll_and_stays_within_the_queues() {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut draw = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for size in [64, 128] {
        let mut shared = SharedReceiver::new(4, 32);
        let recv = |wr_id| RecvWr::new(&[]).id(wr_id);
        shared.post(&[recv(0), recv(1), recv(2)]).unwrap();
        let mut completed = Completed::new(8, size);
        let indices = UidxAllocator::new();
        let slots = shared.ring.wr_ids().clone();
        let receives = [Receives::Own(4), Receives::Shared(slots), Receives::None];
        let qps: Vec<_> = receives
            .into_iter()
            .map(|from| SharedQp::new(7, indices.take().unwrap(), Some(4), from))
            .collect();
        qps.iter().for_each(|qp| completed.ring.registry().attach(qp));
        let mut seen = 0;
        for _ in 0..if cfg!(miri) { 50 } else { 20_000 } {
            for _ in 0..draw() % 8 {
                let mut core = [0; 64];
                core.iter_mut().for_each(|byte| *byte = draw() as u8);
                if draw() % 4 > 0 {
                    core[32..36].copy_from_slice(&(draw() as u32 % 5).to_be_bytes());
                }
                // Not the opcode of an entry that was never written, or all polls would end there.
                core[63] &= 0xef;
                completed.write(core);
            }
            let before = seen;
            while let Some(wc) = next(&mut completed.ring) {
                let said = (wc.status(), wc.byte_len(), wc.imm(), wc.timestamp(), wc.packet().vlan);
                let said = (said, wc.qpn(), wc.src_qpn(), wc.vendor_err(), wc.invalidated_rkey());
                let length = wc.scattered().map_or(0, |bytes| bytes.len());
                assert!(length <= 64, "{said:?}");
                seen += 1;
            }
            assert!(seen - before <= 8, "more than were written");
            completed.ring.release();
            let room = shared.ring.begin().room;
            assert!(room <= 3);
            (0..room).for_each(|n| shared.post(&[recv(n.into())]).unwrap());
        }
        assert!(seen > 0);
    }
}
