//! Posting and polling at the limits: full and wrapping rings, wrong requests, wrong states.
#![allow(clippy::drop_non_drop, clippy::forget_non_drop, reason = "callers may do either")]

use super::{Bench, poll_ids, ring, ring_recv, wc};
use crate::uverbs::scripted::{Op, Role};
use crate::{
    Access, AddressVector, Destination, Errno, FlushLevel, Gid, Lkey, MaskedSwap, Placement,
    PostError, Qkey, QpState, QpType, Qpn, RecvWr, Remote, RingError, Rkey, SendWr, Sge, WcStatus,
    WindowType,
};

const SGE: Sge = Sge { addr: 0x1000, length: 8, lkey: Lkey(5) };
const REMOTE: Remote = Remote { addr: 0x2000, rkey: Rkey(6) };

fn wr_id(request: &[u8]) -> u64 {
    u64::from_ne_bytes(request[..8].try_into().unwrap())
}

#[test]
fn a_ring_wraps_and_keeps_order() {
    let bench = Bench::new();
    let mut qp = bench.qp(QpType::RC);
    let handle = qp.handle();
    assert_eq!(qp.caps().max_send_wr, 6, "one place stays spare");
    let (mut posted, mut taken) = (0u64, 0u64);
    for size in [1, 7, 3, 5, 2, 6, 4, 7, 7] {
        let mut batch = qp.send_batch().unwrap();
        assert_eq!(batch.room(), 7);
        for n in 0..size {
            assert_eq!((batch.len(), batch.room()), (n, 7 - n));
            batch.push(SendWr::send(&[SGE]).id(posted)).unwrap();
            posted += 1;
        }
        ring(batch).unwrap();
        while let Some(request) = bench.script.take(handle, Role::Send) {
            assert_eq!(wr_id(&request), taken);
            taken += 1;
        }
        assert_eq!(taken, posted);
    }
}

#[test]
fn a_full_queue_refuses_until_the_device_takes_a_request() {
    let bench = Bench::new();
    let mut qp = bench.qp(QpType::RC);
    let handle = qp.handle();
    for id in 0..7 {
        let mut batch = qp.send_batch().unwrap();
        batch.push(SendWr::send(&[SGE]).id(id)).unwrap();
        ring(batch).unwrap();
        let mut batch = qp.recv_batch().unwrap();
        batch.push(RecvWr::new(&[SGE]).id(id)).unwrap();
        ring_recv(batch).unwrap();
    }
    let mut sends = qp.send_batch().unwrap();
    assert_eq!((sends.room(), sends.push(SendWr::send(&[]))), (0, Err(PostError::Full)));
    ring(sends).unwrap();
    let mut receives = qp.recv_batch().unwrap();
    let push = receives.push(RecvWr::new(&[]).id(9));
    assert_eq!((receives.room(), push), (0, Err(PostError::Full)));
    ring_recv(receives).unwrap();
    assert_eq!(bench.script.pending(handle, Role::Send), 7);
    assert_eq!(bench.script.pending(handle, Role::Recv), 7);
    for role in [Role::Send, Role::Recv] {
        assert_eq!(wr_id(&bench.script.take(handle, role).unwrap()), 0);
    }
    let mut batch = qp.send_batch().unwrap();
    assert_eq!(batch.room(), 1);
    batch.push(SendWr::send(&[]).id(8)).unwrap();
    assert_eq!(batch.push(SendWr::send(&[])), Err(PostError::Full));
    ring(batch).unwrap();
    assert_eq!(bench.script.pending(handle, Role::Send), 7);
    assert_eq!(qp.recv_batch().unwrap().room(), 1);
}

#[test]
fn a_batch_that_is_dropped_or_forgotten_leaves_no_trace() {
    let bench = Bench::new();
    let mut qp = bench.qp(QpType::RC);
    let handle = qp.handle();
    let doorbells = || bench.script.log().iter().filter(|op| **op == Op::POST_SEND).count();
    for round in 0..20 {
        let mut batch = qp.send_batch().unwrap();
        batch.push(SendWr::send(&[SGE]).id(100)).unwrap();
        if round % 2 == 0 {
            drop(batch)
        } else {
            std::mem::forget(batch)
        }
        let mut batch = qp.recv_batch().unwrap();
        batch.push(RecvWr::new(&[]).id(100)).unwrap();
        if round % 2 == 0 {
            drop(batch)
        } else {
            std::mem::forget(batch)
        }
        assert_eq!(bench.script.pending(handle, Role::Send), 0);
        assert_eq!(bench.script.pending(handle, Role::Recv), 0);
    }
    ring(qp.send_batch().unwrap()).unwrap();
    assert_eq!(doorbells(), 0, "nothing was posted");
    let mut batch = qp.send_batch().unwrap();
    batch.push(SendWr::send(&[SGE]).id(1)).unwrap();
    batch.push(SendWr::send(&[SGE]).id(2)).unwrap();
    ring(batch).unwrap();
    assert_eq!(doorbells(), 1, "one for the batch");
    assert_eq!(wr_id(&bench.script.take(handle, Role::Send).unwrap()), 1);
    assert_eq!(wr_id(&bench.script.take(handle, Role::Send).unwrap()), 2);
}

#[test]
fn a_request_that_is_refused_leaves_the_batch_as_it_was() {
    let bench = Bench::new();
    let mut qp = bench.qp(QpType::RC);
    let handle = qp.handle();
    let ah = bench.pd.create_ah(&AddressVector::global(1, 0, Gid([1; 16]))).unwrap();
    let to = Destination::new(&ah, Qpn(1), Qkey(1));
    let huge = Sge { length: u32::MAX, ..SGE };
    let short = [Sge { length: 7, ..SGE }];
    let too_long = [huge, SGE];
    let odd = Remote { addr: 0x2004, ..REMOTE };
    let long = [0u8; 33];
    let refused = [
        (SendWr::send(&[SGE; 3]), PostError::TooManySge { max: 2 }),
        (SendWr::send(&too_long), PostError::TooLong),
        (SendWr::send(&[]).inline(&long), PostError::InlineTooLong { max: 32 }),
        (SendWr::read(REMOTE, &[]).inline(&[1]), PostError::NoInline),
        (SendWr::read(REMOTE, &[]).inline_list(&[]), PostError::NoInline),
        (SendWr::local_inv(Rkey(1)).inline(&[1]), PostError::NoInline),
        (SendWr::atomic_write(REMOTE, [0; 8]).inline(&[1]), PostError::NoInline),
        (SendWr::compare_swap(odd, 0, 0, &[SGE]), PostError::Unaligned),
        (SendWr::fetch_add(odd, 0, &[SGE]), PostError::Unaligned),
        (SendWr::atomic_write(odd, [0; 8]), PostError::Unaligned),
        (SendWr::compare_swap(REMOTE, 0, 0, &short), PostError::AtomicTooShort),
        (SendWr::fetch_add(REMOTE, 0, &[]), PostError::AtomicTooShort),
        (SendWr::send(&[SGE]).to(to), PostError::Destination),
    ];
    let mut batch = qp.send_batch().unwrap();
    batch.push(SendWr::send(&[SGE]).id(1)).unwrap();
    for (wr, error) in refused {
        assert_eq!(batch.push(wr), Err(error), "{wr:?}");
        assert_eq!((batch.len(), batch.room()), (1, 6));
    }
    batch.push(SendWr::send(&[SGE]).id(2)).unwrap();
    ring(batch).unwrap();
    assert_eq!(wr_id(&bench.script.take(handle, Role::Send).unwrap()), 1);
    assert_eq!(wr_id(&bench.script.take(handle, Role::Send).unwrap()), 2);
    assert_eq!(bench.script.take(handle, Role::Send), None);

    let mut batch = qp.recv_batch().unwrap();
    let sges = [SGE; 3];
    let refused = RecvWr::new(&sges).id(1);
    assert_eq!(batch.push(refused), Err(PostError::TooManySge { max: 2 }));
    assert_eq!(batch.push(RecvWr::new(&[SGE, huge]).id(1)), Err(PostError::TooLong));
    batch.push(RecvWr::new(&sges[..2]).id(2)).unwrap();
    ring_recv(batch).unwrap();
    assert_eq!(bench.script.pending(handle, Role::Recv), 1);
    assert_eq!(wr_id(&bench.script.take(handle, Role::Recv).unwrap()), 2);
}

#[test]
fn operations_that_a_transport_lacks_are_refused() {
    let bench = Bench::new();
    let region = bench.pd.mr_builder().access(Access::MW_BIND).allocate::<u8>(8).unwrap();
    let mut window = bench.pd.alloc_mw(WindowType::One).unwrap();
    let mut uc = bench.qp(QpType::UC);
    let binding = window.bind(&uc, &region, .., Access::REMOTE_READ).unwrap();
    let reliable = [
        SendWr::read(REMOTE, &[SGE]),
        SendWr::compare_swap(REMOTE, 0, 0, &[SGE]),
        SendWr::fetch_add(REMOTE, 0, &[SGE]),
        SendWr::flush(REMOTE, 8, Placement::GLOBAL, FlushLevel::RANGE),
        SendWr::atomic_write(REMOTE, [0; 8]),
    ];
    let connected = [
        SendWr::send_inv(&[SGE], Rkey(1)),
        SendWr::write(REMOTE, &[SGE]),
        SendWr::write_imm(REMOTE, &[SGE], 1),
        SendWr::local_inv(Rkey(1)),
        SendWr::bind_mw(binding),
    ];
    let mut batch = uc.send_batch().unwrap();
    for wr in reliable {
        assert_eq!(batch.push(wr), Err(PostError::Unsupported), "{wr:?}");
    }
    for wr in connected {
        batch.push(wr).unwrap();
    }
    let mut rc = bench.qp(QpType::RC);
    for wrs in [reliable, connected] {
        let mut batch = rc.send_batch().unwrap();
        for wr in wrs {
            batch.push(wr).unwrap();
        }
    }
    // rxe has none of these.
    let operands = MaskedSwap::default();
    let masked = [
        SendWr::masked_compare_swap(REMOTE, &operands, &[SGE]),
        SendWr::masked_fetch_add(REMOTE, 0, 0, &[SGE]),
    ];
    for qp in [&mut rc, &mut uc] {
        let mut batch = qp.send_batch().unwrap();
        for wr in masked {
            assert_eq!(batch.push(wr), Err(PostError::Unsupported), "{wr:?}");
        }
    }
    let ah = bench.pd.create_ah(&AddressVector::global(1, 0, Gid([1; 16]))).unwrap();
    let to = Destination::new(&ah, Qpn(1), Qkey(1));
    let mut ud = bench.qp(QpType::UD);
    let mut batch = ud.send_batch().unwrap();
    for wr in reliable.into_iter().chain(connected).chain(masked) {
        assert_eq!(batch.push(wr.to(to)), Err(PostError::Unsupported), "{wr:?}");
    }
    assert_eq!(batch.push(SendWr::send(&[SGE])), Err(PostError::Destination));
    batch.push(SendWr::send(&[SGE]).to(to)).unwrap();
    batch.push(SendWr::send_imm(&[SGE], 1).to(to)).unwrap();
}

#[test]
fn the_state_decides_which_requests_may_be_posted() {
    let bench = Bench::new();
    let mut qp = bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::RC).build().unwrap();
    let states = [
        (QpState::RESET, false, false),
        (QpState::INIT, false, true),
        (QpState::RTR, false, true),
        (QpState::RTS, true, true),
        (QpState::SQD, true, true),
        (QpState::SQE, true, true),
        (QpState::ERR, true, true),
    ];
    for (state, sends, receives) in states {
        qp.qp.set_state(state);
        assert_eq!(qp.send_batch().err(), (!sends).then_some(PostError::State(state)));
        assert_eq!(qp.recv_batch().err(), (!receives).then_some(PostError::State(state)));
    }
}

/// Requests whose doorbell call the kernel refused stay in the queue, and go with the next batch.
#[test]
fn a_refused_doorbell_loses_nothing() {
    let bench = Bench::new();
    let mut qp = bench.qp(QpType::RC);
    bench.script.refuse(Op::POST_SEND, Errno::NOMEM);
    let mut batch = qp.send_batch().unwrap();
    batch.push(SendWr::send(&[]).id(1)).unwrap();
    assert_eq!(ring(batch), Err(RingError::StillQueued(Errno::NOMEM)));
    bench.script.allow(Op::POST_SEND);
    let mut batch = qp.send_batch().unwrap();
    assert_eq!(batch.room(), 6);
    batch.push(SendWr::send(&[]).id(2)).unwrap();
    ring(batch).unwrap();
    assert_eq!(wr_id(&bench.script.take(qp.handle(), Role::Send).unwrap()), 1);
    assert_eq!(wr_id(&bench.script.take(qp.handle(), Role::Send).unwrap()), 2);
}

#[test]
fn a_queue_pair_with_a_shared_receive_queue_has_none_of_its_own() {
    let bench = Bench::new();
    let mut srq = bench.pd.srq_builder(4).max_sge(2).build().unwrap();
    let cq = &bench.cq;
    let mut qp = bench.pd.qp_builder(cq, cq, QpType::RC).srq(&srq).max_recv_wr(9).build().unwrap();
    super::bring_up(&bench.script, &qp);
    assert_eq!(qp.recv_batch().err(), Some(PostError::SharedReceives));
    let mut batch = srq.batch().unwrap();
    batch.push(RecvWr::new(&[SGE, SGE]).id(3)).unwrap();
    let sges = [SGE; 3];
    let refused = batch.push(RecvWr::new(&sges).id(4));
    assert_eq!(refused, Err(PostError::TooManySge { max: 2 }));
    ring_recv(batch).unwrap();
    let handle = srq.handle();
    assert_eq!(bench.script.pending(handle, Role::Recv), 1);
    // Growing keeps the posted receives, and makes room.
    srq.resize(12).unwrap();
    let mut batch = srq.batch().unwrap();
    assert_eq!(batch.room(), 14);
    batch.push(RecvWr::new(&[]).id(5)).unwrap();
    ring_recv(batch).unwrap();
    assert_eq!(wr_id(&bench.script.take(handle, Role::Recv).unwrap()), 3);
    assert_eq!(wr_id(&bench.script.take(handle, Role::Recv).unwrap()), 5);
    srq.set_limit(2).unwrap();
    assert_eq!(srq.query().unwrap().limit, 2);
    assert_eq!(srq.set_limit(100).unwrap_err().errno(), Errno::INVAL);
    // A ring that the kernel has left takes no receives: they would be lost.
    bench.script.fail_step(2, Errno::NOMEM);
    assert_eq!(srq.resize(20).unwrap_err().errno(), Errno::NOMEM);
    let mut batch = srq.batch().unwrap();
    assert_eq!(batch.push(RecvWr::new(&[]).id(6)), Err(PostError::Full));
}

#[test]
fn a_completion_queue_wraps_overflows_and_recovers() {
    let mut bench = Bench::new();
    let mut cq = bench.context.cq_builder(4).build().unwrap();
    assert_eq!(cq.capacity(), 7);
    let mut next = 0;
    for count in [7, 1, 5, 7, 3, 7, 6, 7] {
        for id in next..next + count {
            assert!(bench.script.complete(cq.handle(), wc(99, id)));
        }
        assert_eq!(bench.script.complete(cq.handle(), wc(99, 1000)), count < 7);
        let mut expected: Vec<u64> = (next..next + count).collect();
        expected.extend((count < 7).then_some(1000));
        assert_eq!(poll_ids(&mut cq), expected);
        assert_eq!(poll_ids(&mut cq), [0; 0]);
        next += count;
    }
    // Entries go back to the device when the poll ends, and not before.
    for id in 0..7 {
        assert!(bench.script.complete(cq.handle(), wc(99, id)));
    }
    let handle = cq.handle();
    let mut completions = cq.poll().unwrap();
    assert_eq!(completions.next().unwrap().wr_id(), 0);
    assert!(!bench.script.complete(handle, wc(99, 7)));
    drop(completions);
    assert!(bench.script.complete(handle, wc(99, 7)));
    assert_eq!(poll_ids(&mut cq), [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(poll_ids(&mut bench.cq), [0; 0]);
}

#[test]
fn resizing_keeps_completions() {
    let bench = Bench::new();
    let mut cq = bench.context.cq_builder(4).build().unwrap();
    for id in 0..6 {
        assert!(bench.script.complete(cq.handle(), wc(99, id)));
    }
    assert_eq!(cq.poll().unwrap().next().unwrap().wr_id(), 0);
    let error = cq.resize(4).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    assert!(error.to_string().contains("cqe 4 is below the 5 completions"), "{error}");
    assert_eq!(cq.resize(0).unwrap_err().errno(), Errno::INVAL);
    assert_eq!(cq.resize(1 << 20).unwrap_err().errno(), Errno::INVAL);
    cq.resize(20).unwrap();
    assert_eq!(cq.capacity(), 31);
    assert!(bench.script.complete(cq.handle(), wc(99, 6)));
    assert_eq!(poll_ids(&mut cq), [1, 2, 3, 4, 5, 6]);
    let mappings = if cfg!(miri) { 0 } else { 2 };
    assert_eq!(bench.script.mappings(), mappings, "the old ring is unmapped");
    // Refused, or not mapped: the queue yields no completion that was not there.
    bench.script.fail_step(1, Errno::NOMEM);
    assert_eq!(cq.resize(40).unwrap_err().errno(), Errno::NOMEM);
    assert!(bench.script.complete(cq.handle(), wc(99, 7)));
    assert_eq!(poll_ids(&mut cq), [7]);
    bench.script.fail_step(2, Errno::NOMEM);
    assert_eq!(cq.resize(40).unwrap_err().errno(), Errno::NOMEM);
    assert!(bench.script.complete(cq.handle(), wc(99, 8)));
    assert_eq!(poll_ids(&mut cq), [0; 0]);
}

#[test]
fn a_binding_goes_to_the_queue_pair_that_it_was_made_for() {
    let bench = Bench::new();
    let (mut own, mut other) = (bench.qp(QpType::RC), bench.qp(QpType::RC));
    let registration = bench.pd.mr_builder().access(Access::LOCAL_WRITE | Access::MW_BIND);
    let region = registration.allocate::<u8>(64).unwrap();
    let mut window = bench.pd.alloc_mw(WindowType::Two).unwrap();
    let binding = window.bind(&own, &region, .., Access::REMOTE_READ).unwrap();
    let refused = other.send_batch().unwrap().push(SendWr::bind_mw(binding));
    assert_eq!(refused, Err(PostError::ForeignBinding));
    assert_eq!(own.send_batch().unwrap().push(SendWr::bind_mw(binding)), Ok(()));
    window.settle(WcStatus::GENERAL_ERR);
}

/// The indices are in memory that the kernel writes, and that a forked child shares.
#[test]
fn rings_stay_in_bounds_with_any_indices() {
    let mut bench = Bench::new();
    let (cq, capacity) = (bench.cq.handle(), 31);
    let mut qp = bench.qp(QpType::UD);
    let handle = qp.handle();
    let ah = || bench.pd.create_ah(&AddressVector::global(1, 0, Gid([1; 16]))).unwrap();
    let indices = [0, 1, 7, 8, 31, 32, 0x7fff_ffff, 0x8000_0001, u32::MAX];
    bench.script.poison(cq, Role::Cq);
    for producer in indices {
        for consumer in indices {
            bench.script.scribble(cq, Role::Cq, producer, consumer);
            assert!(poll_ids(&mut bench.cq).len() <= capacity);
            bench.script.scribble(handle, Role::Send, producer, consumer);
            bench.script.scribble(handle, Role::Recv, producer, consumer);
            let ah = ah();
            let to = Destination::new(&ah, Qpn(1), Qkey(1));
            let mut batch = qp.send_batch().unwrap();
            let room = batch.room();
            let pushed = (0..100).take_while(|_| batch.push(SendWr::send(&[SGE]).to(to)).is_ok());
            assert_eq!((pushed.count() as u32, room <= 7), (room, true));
            ring(batch).unwrap();
            drop(ah);
            let mut batch = qp.recv_batch().unwrap();
            let room = batch.room();
            let recv = RecvWr::new(&[SGE]).id(1);
            let pushed = (0..100).take_while(|_| batch.push(recv).is_ok());
            assert_eq!((pushed.count() as u32, room <= 7), (room, true));
            ring_recv(batch).unwrap();
        }
    }
}
