//! Queue pairs without a peer: their granted sizes, their states, and the requests that each state takes.

use crate::env;
use crate::pair::{Config, PATIENCE, Pair};
use crate::verdict::{Verdict, trials};
use std::time::Instant;
use uverbs::{
    Access, AddressVector, Errno, Gid, PostError, Psn, Qkey, QpAttr, QpState, QpType, QueuePair,
    RecvWr, SendWr,
};

trials![
    grants_at_least_the_requested_sizes,
    queue_pair_starts_in_reset,
    queue_pair_numbers_are_unique,
    missing_attribute_is_named,
    superfluous_attribute_is_named,
    impossible_transition_is_refused,
    refused_transition_changes_nothing,
    query_returns_the_attributes_that_were_set,
    queue_pair_works_again_after_reset,
    posting_in_the_wrong_state_is_refused,
    split_parts_join_again,
    parts_of_different_pairs_do_not_join,
    last_part_destroys_the_queue_pair,
    unknown_type_is_refused,
    queues_of_no_requests_are_none,
];

fn lone(qp_type: QpType) -> Verdict<QueuePair> {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let cq = context.cq_builder(16).build()?;
    Ok(pd.qp_builder(&cq, &cq, qp_type).max_send_wr(4).max_recv_wr(4).build()?)
}

fn init(qp: &QueuePair) -> Verdict {
    let attr = QpAttr::new().state(QpState::INIT).port(env::port()).pkey_index(env::pkey_index());
    let attr = match qp.qp_type() {
        QpType::UD => attr.qkey(Qkey(0x1111_1111)),
        _ => attr.access(Access::REMOTE_READ | Access::REMOTE_WRITE),
    };
    Ok(qp.modify(&attr)?)
}

fn grants_at_least_the_requested_sizes() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let cq = context.cq_builder(16).build()?;
    for (wr, sge, inline) in [(1, 1, 0), (7, 2, 32), (64, 4, 128), (100, 16, 200)] {
        let qp = pd
            .qp_builder(&cq, &cq, QpType::RC)
            .max_send_wr(wr)
            .max_recv_wr(wr)
            .max_send_sge(sge)
            .max_recv_sge(sge)
            .max_inline_data(inline)
            .build()?;
        let caps = qp.caps();
        assert!(
            caps.max_send_wr >= wr
                && caps.max_recv_wr >= wr
                && caps.max_send_sge >= sge
                && caps.max_recv_sge >= sge
                && caps.max_inline_data >= inline,
            "{caps:?}, asked for {wr} requests of {sge} entries and {inline} bytes"
        );
    }
    Ok(())
}

fn queue_pair_starts_in_reset() -> Verdict {
    for qp_type in [QpType::RC, QpType::UC, QpType::UD] {
        let qp = lone(qp_type)?;
        assert_eq!((qp.state(), qp.query()?.state), (QpState::RESET, QpState::RESET));
        assert_eq!(qp.qp_type(), qp_type);
    }
    Ok(())
}

fn queue_pair_numbers_are_unique() -> Verdict {
    let (one, other) = (lone(QpType::RC)?, lone(QpType::RC)?);
    assert_ne!(one.qpn(), other.qpn());
    assert_ne!(one.qpn().0, 0);
    assert!(one.qpn().0 < 1 << 24);
    Ok(())
}

fn missing_attribute_is_named() -> Verdict {
    let qp = lone(QpType::RC)?;
    let error = qp
        .modify(&QpAttr::new().state(QpState::INIT).port(env::port()).pkey_index(env::pkey_index()))
        .unwrap_err();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None));
    assert!(error.message().to_lowercase().contains("access"), "{error}");
    let qp = lone(QpType::UD)?;
    let error = qp
        .modify(&QpAttr::new().state(QpState::INIT).port(env::port()).pkey_index(env::pkey_index()))
        .unwrap_err();
    assert!(error.message().to_lowercase().contains("qkey"), "{error}");
    Ok(())
}

fn superfluous_attribute_is_named() -> Verdict {
    let qp = lone(QpType::UC)?;
    let attr = QpAttr::new()
        .state(QpState::INIT)
        .port(env::port())
        .pkey_index(env::pkey_index())
        .access(Access::empty())
        .timeout(14);
    let error = qp.modify(&attr).unwrap_err();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None));
    assert!(error.message().to_lowercase().contains("timeout"), "{error}");
    Ok(())
}

fn impossible_transition_is_refused() -> Verdict {
    let qp = lone(QpType::RC)?;
    let error = qp.modify(&QpAttr::new().state(QpState::RTS).sq_psn(Psn(0))).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    assert!(error.message().contains("RESET") && error.message().contains("RTS"), "{error}");
    Ok(())
}

fn refused_transition_changes_nothing() -> Verdict {
    let qp = lone(QpType::RC)?;
    let attr = QpAttr::new().state(QpState::INIT).port(99).pkey_index(0).access(Access::empty());
    let error = qp.modify(&attr).unwrap_err();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
    assert_eq!((qp.state(), qp.query()?.state), (QpState::RESET, QpState::RESET));
    init(&qp)?;
    assert_eq!((qp.state(), qp.query()?.state), (QpState::INIT, QpState::INIT));
    // The library accepts this: only the kernel knows that GID 255 is empty.
    let attr = QpAttr::new()
        .state(QpState::RTR)
        .path(AddressVector::global(env::port(), 255, Gid([1; 16])))
        .path_mtu(env::mtu())
        .dest_qpn(qp.qpn())
        .rq_psn(Psn::new(0))
        .max_dest_rd_atomic(1)
        .min_rnr_timer(1);
    let error = qp.modify(&attr).unwrap_err();
    assert!(error.kernel_errno().is_some(), "{error}");
    assert_eq!((qp.state(), qp.query()?.state), (QpState::INIT, QpState::INIT));
    Ok(())
}

fn query_returns_the_attributes_that_were_set() -> Verdict {
    let pair = Pair::new(Config::rc())?;
    for (side, peer) in [(&pair.a, &pair.b), (&pair.b, &pair.a)] {
        let info = side.qp.query()?;
        assert_eq!(info.state, QpState::RTS);
        assert_eq!(info.dest_qpn, peer.qp.qpn());
        assert_eq!((info.port, info.pkey_index), (env::port(), env::pkey_index()));
        assert_eq!(info.path_mtu, pair.config.mtu);
        assert_eq!(info.timeout, pair.config.timeout);
        assert_eq!(info.retry_count, pair.config.retry_count);
        assert_eq!(info.rnr_retry, pair.config.rnr_retry);
        let (queried, granted) = (info.caps, side.qp.caps());
        // rxe of Linux 6.1 reports more in QUERY_QP than in its answer to CREATE_QP.
        assert!(queried.max_send_wr >= granted.max_send_wr, "{queried:?} {granted:?}");
        assert!(queried.max_recv_wr >= granted.max_recv_wr, "{queried:?} {granted:?}");
        assert_eq!(queried.max_send_sge, granted.max_send_sge);
        assert_eq!(queried.max_recv_sge, granted.max_recv_sge);
        assert_eq!(queried.max_inline_data, granted.max_inline_data);
        assert!(info.access.contains(Access::REMOTE_WRITE), "{:?}", info.access);
        assert!(!info.signal_all);
    }
    Ok(())
}

fn queue_pair_works_again_after_reset() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    for round in 0..3 {
        pair.message(round, 1000)?;
        for side in [&mut pair.a, &mut pair.b] {
            side.reset()?;
            assert_eq!(side.qp.query()?.state, QpState::RESET);
        }
        pair.connect()?;
    }
    pair.message(9, 1000)
}

fn posting_in_the_wrong_state_is_refused() -> Verdict {
    let mut qp = lone(QpType::RC)?;
    assert_eq!(qp.send_batch().unwrap_err(), PostError::State(QpState::RESET));
    assert_eq!(qp.recv_batch().unwrap_err(), PostError::State(QpState::RESET));
    init(&qp)?;
    assert_eq!(qp.send_batch().unwrap_err(), PostError::State(QpState::INIT));
    qp.recv_batch()?.push(RecvWr::new(&[]).id(1))?;
    qp.modify(&QpAttr::new().state(QpState::ERR))?;
    // In an error state both queues take requests, to flush them.
    qp.recv_batch()?.push(RecvWr::new(&[]).id(1))?;
    qp.send_batch()?.push(SendWr::send(&[]))?;
    Ok(())
}

fn split_parts_join_again() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    pair.message(1, 64)?;
    let parts = pair.a.qp.split();
    assert_eq!(parts.control.query()?.state, QpState::RTS);
    pair.a.qp = QueuePair::join(parts)?;
    pair.message(2, 64)
}

fn parts_of_different_pairs_do_not_join() -> Verdict {
    let (one, other) = (lone(QpType::RC)?.split(), lone(QpType::RC)?.split());
    let mixed = uverbs::QpParts { send: one.send, recv: other.recv, control: one.control };
    let (parts, error) = QueuePair::join(mixed).unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::INVAL);
    let missing = uverbs::QpParts { send: parts.send, recv: None, control: parts.control };
    assert_eq!(QueuePair::join(missing).unwrap_err().error.errno(), Errno::INVAL);
    Ok(())
}

fn last_part_destroys_the_queue_pair() -> Verdict {
    let before = env::resources()?;
    let parts = lone(QpType::UD)?.split();
    let (send, control) = (parts.send, parts.control);
    drop(parts.recv);
    drop(control);
    assert_eq!(env::resources()?.qp(), before.qp() + 1);
    drop(send);
    env::unchanged(&before)
}

fn unknown_type_is_refused() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let cq = context.cq_builder(1).build()?;
    let error = pd.qp_builder(&cq, &cq, QpType(77)).build().unwrap_err();
    assert!(matches!(error.errno(), Errno::INVAL | Errno::OPNOTSUPP), "{error:?}");
    assert!(error.message().contains("77"), "{error}");
    Ok(())
}

/// One queue pair only sends, and the other one only receives.
#[allow(unsafe_code, reason = "batches are rung")]
fn queues_of_no_requests_are_none() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let mut cq = context.cq_builder(64).build()?;
    let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64)?;
    let make = |sends, receives| {
        let builder = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(sends);
        builder.max_recv_wr(receives).build()
    };
    let (mut sender, mut receiver) = (make(4, 0)?, make(0, 4)?);
    assert_eq!((sender.caps().max_recv_wr, receiver.caps().max_send_wr), (0, 0));
    let gid = context.default_gid(env::port())?;
    let ends = [sender.endpoint(&gid)?, receiver.endpoint(&gid)?];
    env::handshake(&sender, &ends[1])?;
    env::handshake(&receiver, &ends[0])?;
    assert_eq!(sender.recv_batch().unwrap_err(), PostError::NoQueue);
    assert_eq!(receiver.send_batch()?.push(SendWr::send(&[])), Err(PostError::NoQueue));
    let sges = [memory.sge(..8)?];
    let mut batch = receiver.recv_batch()?;
    batch.push(RecvWr::new(&sges).id(1))?;
    // SAFETY: the memory outlives the queue pairs.
    unsafe { batch.ring()? };
    let mut batch = sender.send_batch()?;
    batch.push(SendWr::send(&sges).id(2).signaled())?;
    // SAFETY: the same.
    unsafe { batch.ring()? };
    let deadline = Instant::now() + PATIENCE;
    let mut done = Vec::new();
    while done.len() < 2 && Instant::now() < deadline {
        let mut completions = cq.poll()?;
        while let Some(completion) = completions.next() {
            done.push(completion.ok()?.wr_id());
        }
    }
    done.sort_unstable();
    assert_eq!(done, [1, 2]);
    // Neither queue at all.
    let make_none = || pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(0).max_recv_wr(0).build();
    make_none()?.destroy()?;
    receiver.destroy()?;
    sender.destroy()?;
    Ok(())
}
