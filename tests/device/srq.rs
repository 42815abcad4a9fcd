//! Shared receive queues without traffic.
#![allow(clippy::drop_non_drop, clippy::forget_non_drop, reason = "callers may do either")]

use crate::capability::Capability;
use crate::env;
use crate::pair::{Config, Pair};
use crate::verdict::{Verdict, supported, trials};
use uverbs::{Errno, ProtectionDomain, QpType, RecvWr, SendWr, Sge, SharedReceiveQueue, WcOpcode};

trials![
    holds_at_least_the_wqes_asked_for,
    zero_wqes_are_refused,
    limit_is_queried_back,
    limit_beyond_the_queue_is_refused,
    resize_keeps_the_limit,
    resize_below_the_limit_is_refused,
    resize_keeps_posted_receives,
    full_queue_refuses_more,
    too_many_entries_are_refused,
    dropped_batch_leaves_no_trace,
    queue_is_busy_until_its_queue_pairs_are_destroyed,
];

fn make(pd: &ProtectionDomain, max_wr: u32, max_sge: u32) -> Verdict<SharedReceiveQueue> {
    supported(pd.srq_builder(max_wr).max_sge(max_sge).build(), Capability::Srq)
}

fn holds_at_least_the_wqes_asked_for() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    for (max_wr, max_sge) in [(1, 1), (2, 3), (63, 1), (64, 4), (1000, 2)] {
        let srq = make(&pd, max_wr, max_sge)?;
        let attr = srq.query()?;
        assert!(attr.max_wr >= max_wr, "{attr:?}, asked for {max_wr}");
        assert!(attr.max_sge >= max_sge, "{attr:?}, asked for {max_sge}");
        assert_eq!(attr.limit, 0);
    }
    Ok(())
}

fn zero_wqes_are_refused() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    make(&pd, 1, 1)?;
    assert_eq!(pd.srq_builder(0).build().unwrap_err().errno(), Errno::INVAL);
    Ok(())
}

fn limit_is_queried_back() -> Verdict {
    let mut pair = Pair::new(Config { srq: true, ..Config::rc() })?;
    // Some devices check at once that as many receives are posted.
    for wr_id in 0..8 {
        pair.b.recv(wr_id, 0..8)?;
    }
    let srq = pair.b.srq.as_mut().expect("a pair with a shared receive queue");
    srq.set_limit(5)?;
    assert_eq!(srq.query()?.limit, 5);
    srq.set_limit(0)?;
    assert_eq!(srq.query()?.limit, 0);
    Ok(())
}

fn limit_beyond_the_queue_is_refused() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let mut srq = make(&pd, 16, 1)?;
    let beyond = srq.query()?.max_wr + 1;
    let error = srq.set_limit(beyond).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    assert!(error.message().contains(&beyond.to_string()), "{error}");
    assert_eq!(srq.query()?.limit, 0, "a refused limit was set");
    Ok(())
}

fn resize_keeps_the_limit() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let mut srq = make(&pd, 16, 2)?;
    supported(srq.resize(17), Capability::SrqResize)?;
    srq.set_limit(3)?;
    for max_wr in [100, 8, 500] {
        srq.resize(max_wr)?;
        let attr = srq.query()?;
        assert!(attr.max_wr >= max_wr, "{attr:?}, asked for {max_wr}");
        assert_eq!((attr.limit, attr.max_sge >= 2), (3, true), "{attr:?}");
    }
    Ok(())
}

fn resize_below_the_limit_is_refused() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let mut srq = make(&pd, 64, 1)?;
    supported(srq.resize(65), Capability::SrqResize)?;
    srq.set_limit(40)?;
    let before = srq.query()?;
    assert_eq!(srq.resize(8).unwrap_err().errno(), Errno::INVAL);
    assert_eq!(srq.query()?, before, "a refused resize changed the queue");
    Ok(())
}

fn resize_keeps_posted_receives() -> Verdict {
    let mut pair = Pair::new(Config { srq: true, ..Config::rc() })?;
    for round in 0..3 {
        for n in 0..6 {
            let range = n * 100..(n + 1) * 100;
            pair.b.poison(range.clone());
            pair.b.recv(n as u64, range)?;
        }
        let srq = pair.b.srq.as_mut().expect("a pair with a shared receive queue");
        supported(srq.resize([200, 8, 31][round]), Capability::SrqResize)?;
        for n in 0..6 {
            let seed = (10 * round + n) as u64;
            pair.a.fill(0..100, seed);
            let sges = [pair.a.sge(0..100)];
            pair.a.send(SendWr::send(&sges).id(seed).signaled())?;
            pair.a.expect(seed, WcOpcode::SEND)?;
            pair.b.expect(n as u64, WcOpcode::RECV)?;
            pair.b.check(n * 100..(n + 1) * 100, seed);
        }
    }
    Ok(())
}

/// Scatter entries that no message is received into.
fn nowhere(count: usize) -> Vec<Sge> {
    vec![Sge { addr: 0, length: 8, lkey: uverbs::Lkey(0) }; count]
}

fn full_queue_refuses_more() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let mut srq = make(&pd, 5, 1)?;
    let max_wr = srq.query()?.max_wr;
    let sges = nowhere(1);
    let mut batch = srq.batch()?;
    assert_eq!(batch.room(), max_wr);
    for wr_id in 0..max_wr.into() {
        batch.push(RecvWr::new(&sges).id(wr_id))?;
    }
    assert_eq!((batch.room(), batch.len()), (0, max_wr));
    assert_eq!(batch.push(RecvWr::new(&sges).id(99)), Err(uverbs::PostError::Full));
    assert_eq!(batch.len(), max_wr, "a refused request was counted");
    Ok(())
}

fn too_many_entries_are_refused() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let mut srq = make(&pd, 4, 2)?;
    let max = srq.query()?.max_sge;
    let mut batch = srq.batch()?;
    batch.push(RecvWr::new(&nowhere(max as usize)).id(1))?;
    let refused = batch.push(RecvWr::new(&nowhere(max as usize + 1)).id(2));
    assert_eq!(refused, Err(uverbs::PostError::TooManySge { max }));
    Ok(())
}

fn dropped_batch_leaves_no_trace() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let mut srq = make(&pd, 8, 1)?;
    let sges = nowhere(1);
    let room = srq.batch()?.room();
    for _ in 0..3 {
        let mut batch = srq.batch()?;
        batch.push(RecvWr::new(&sges).id(1))?;
        assert_eq!(batch.room(), room - 1);
    }
    let mut batch = srq.batch()?;
    batch.push(RecvWr::new(&sges).id(1))?;
    std::mem::forget(batch);
    assert_eq!(srq.batch()?.room(), room);
    Ok(())
}

fn queue_is_busy_until_its_queue_pairs_are_destroyed() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let cq = context.cq_builder(1).build()?;
    let srq = make(&pd, 4, 1)?;
    let mut qp = pd.qp_builder(&cq, &cq, QpType::RC).srq(&srq).build()?;
    assert_eq!(qp.recv_batch().unwrap_err(), uverbs::PostError::SharedReceives);
    assert_eq!(qp.caps().max_recv_wr, 0);
    let (srq, error) = srq.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    drop(qp);
    srq.destroy()?;
    Ok(())
}
