//! Completions of dropped queue pairs are discarded, and all others arrive.

use super::{Bench, poll_ids, wc};
use crate::{CompletionQueue, Errno, QpState, QpType, QueuePair};

/// A queue pair whose receives complete elsewhere than its sends.
fn on(bench: &Bench, send: &CompletionQueue, recv: &CompletionQueue) -> QueuePair {
    let qp = bench.pd.qp_builder(send, recv, QpType::RC).build().unwrap();
    super::bring_up(&bench.script, &qp);
    qp
}

#[test]
fn completions_of_a_dropped_queue_pair_are_discarded() {
    let mut bench = Bench::new();
    let (dead, live) = (bench.qp(QpType::RC), bench.qp(QpType::RC));
    let cq = bench.cq.handle();
    let (dead_qpn, live_qpn) = (dead.qpn().0, live.qpn().0);
    for id in 0..8 {
        let qpn = if id % 2 == 0 { dead_qpn } else { live_qpn };
        assert!(bench.script.complete(cq, wc(qpn, id)));
    }
    drop(dead);
    assert_eq!(poll_ids(&mut bench.cq), [1, 3, 5, 7]);
    assert!(bench.script.complete(cq, wc(live_qpn, 9)));
    assert_eq!(poll_ids(&mut bench.cq), [9]);
}

#[test]
fn dropping_between_polls_discards_the_remaining_completions() {
    let mut bench = Bench::new();
    let (dead, live) = (bench.qp(QpType::RC), bench.qp(QpType::RC));
    let (cq, dead_qpn) = (bench.cq.handle(), dead.qpn().0);
    for id in 0..4 {
        assert!(bench.script.complete(cq, wc(dead_qpn, id)));
    }
    let mut completions = bench.cq.poll().unwrap();
    assert_eq!(completions.next().unwrap().wr_id(), 0);
    drop(completions);
    drop(dead);
    assert!(bench.script.complete(cq, wc(live.qpn().0, 5)));
    assert_eq!(poll_ids(&mut bench.cq), [5]);
}

/// Neither an unfinished poll nor a forgotten one changes where the completions of the dropped
/// queue pair end.
#[test]
fn dropping_during_a_poll_takes_effect_with_the_next() {
    for forget in [false, true] {
        let mut bench = Bench::new();
        let (dead, live) = (bench.qp(QpType::RC), bench.qp(QpType::RC));
        let (cq, dead_qpn, live_qpn) = (bench.cq.handle(), dead.qpn().0, live.qpn().0);
        for id in 0..4 {
            assert!(bench.script.complete(cq, wc(dead_qpn, id)));
        }
        let mut completions = bench.cq.poll().unwrap();
        assert_eq!(completions.next().unwrap().wr_id(), 0);
        drop(dead);
        assert_eq!(completions.next().unwrap().wr_id(), 1);
        if forget {
            std::mem::forget(completions)
        } else {
            drop(completions)
        }
        assert!(bench.script.complete(cq, wc(live_qpn, 7)));
        assert_eq!(poll_ids(&mut bench.cq), [7]);
    }
}

/// The kernel may give the number to the next queue pair before the completion queue is polled.
#[test]
fn a_number_that_is_used_again_does_not_lose_completions() {
    let mut bench = Bench::new();
    let cq = bench.cq.handle();
    for round in 0..if cfg!(miri) { 10 } else { 40 } {
        bench.script.set_next_qpn(77);
        let dead = bench.qp(QpType::RC);
        for id in 0..round % 5 {
            assert!(bench.script.complete(cq, wc(77, 1000 + id)));
        }
        drop(dead);
        bench.script.set_next_qpn(77);
        let live = bench.qp(QpType::RC);
        assert_eq!(live.qpn().0, 77);
        for id in 0..7 {
            assert!(bench.script.complete(cq, wc(77, id)));
        }
        assert_eq!(poll_ids(&mut bench.cq), [0, 1, 2, 3, 4, 5, 6], "round {round}");
        drop(live);
    }
}

/// Completions of its last owner may be in either queue.
#[test]
fn a_number_that_is_leased_in_either_completion_queue_is_not_taken() {
    let bench = Bench::new();
    let queue = || bench.context.cq_builder(4).build().unwrap();
    let (one, other) = (queue(), queue());
    let make = || {
        bench.script.set_next_qpn(77);
        on(&bench, &one, &other).qpn().0
    };
    for cq in [&one, &other] {
        let lease = cq.inner.numbers.lease(77);
        assert_eq!(make(), 78);
        drop(lease);
        assert_eq!(make(), 77);
    }
}

#[test]
fn a_resize_keeps_the_completions_of_living_queue_pairs_only() {
    let mut bench = Bench::new();
    let cq = bench.cq.handle();
    let live = bench.qp(QpType::RC);
    for (size, early) in [(40, true), (20, false), (63, true), (20, true)] {
        bench.script.set_next_qpn(77);
        let dead = bench.qp(QpType::RC);
        for id in 0..6 {
            let qpn = if id % 3 == 0 { live.qpn().0 } else { 77 };
            assert!(bench.script.complete(cq, wc(qpn, id)));
        }
        let mut completions = bench.cq.poll().unwrap();
        assert_eq!(completions.next().unwrap().wr_id(), 0);
        drop(completions);
        let mut dead = Some(dead);
        if early {
            drop(dead.take());
        }
        bench.cq.resize(size).unwrap();
        drop(dead);
        bench.script.set_next_qpn(77);
        let again = bench.qp(QpType::RC);
        assert!(bench.script.complete(cq, wc(77, 8)));
        assert_eq!(poll_ids(&mut bench.cq), [3, 8], "resized to {size}");
        drop(again);
    }
}

#[test]
fn both_completion_queues_discard() {
    let bench = Bench::new();
    let mut send = bench.context.cq_builder(8).build().unwrap();
    let mut recv = bench.context.cq_builder(8).build().unwrap();
    let dead = on(&bench, &send, &recv);
    let live = on(&bench, &send, &recv);
    for cq in [send.handle(), recv.handle()] {
        assert!(bench.script.complete(cq, wc(dead.qpn().0, 1)));
        assert!(bench.script.complete(cq, wc(live.qpn().0, 2)));
    }
    // The queue pair is destroyed with its last part.
    let parts = dead.split();
    drop((parts.send, parts.recv));
    assert_eq!(poll_ids(&mut send), [1, 2]);
    drop(parts.control);
    assert_eq!(poll_ids(&mut recv), [2]);
}

#[test]
fn completions_of_a_queue_pair_that_the_kernel_keeps_are_discarded() {
    let mut bench = Bench::new();
    let dead = bench.qp(QpType::RC);
    let (cq, qpn) = (bench.cq.handle(), dead.qpn().0);
    bench.script.refuse_destroy(dead.handle(), Errno::BUSY);
    drop(dead);
    assert_eq!(bench.context.leaked(), 1);
    for id in 0..40 {
        assert!(bench.script.complete(cq, wc(qpn, id)));
        assert_eq!(poll_ids(&mut bench.cq), [0; 0]);
    }
}

#[test]
fn a_reset_discards_completions_that_were_not_polled() {
    let mut bench = Bench::new();
    let mut qp = bench.qp(QpType::RC);
    let (cq, qpn) = (bench.cq.handle(), qp.qpn().0);
    for id in 0..3 {
        assert!(bench.script.complete(cq, wc(qpn, id)));
    }
    let other = bench.context.cq_builder(4).build().unwrap();
    let mut other = other;
    assert_eq!(qp.reset(&mut [&mut other]).unwrap_err().errno(), Errno::INVAL);
    assert_eq!(qp.reset(&mut []).unwrap_err().errno(), Errno::INVAL);
    qp.reset(&mut [&mut bench.cq]).unwrap();
    assert_eq!(qp.state(), QpState::RESET);
    assert!(bench.script.complete(cq, wc(qpn, 3)));
    assert_eq!(poll_ids(&mut bench.cq), [3]);
}

#[test]
fn a_queue_pair_can_be_destroyed_while_another_thread_polls() {
    const COUNT: u64 = if cfg!(miri) { 12 } else { 50 };
    let mut bench = Bench::new();
    let live = bench.qp(QpType::RC).qpn().0;
    let dead: Vec<_> = (0..COUNT).map(|_| bench.qp(QpType::RC)).collect();
    let (script, cq) = (bench.script.clone(), bench.cq.handle());
    let owner = std::thread::spawn(move || {
        for (id, qp) in dead.into_iter().enumerate() {
            let complete = |qpn| {
                while !script.complete(cq, wc(qpn, id as u64)) {
                    std::thread::yield_now();
                }
            };
            complete(qp.qpn().0);
            drop(qp);
            complete(live);
        }
    });
    let (mut seen, mut last) = (0, None);
    while seen < COUNT {
        let mut completions = bench.cq.poll().unwrap();
        while let Some(completion) = completions.next() {
            if completion.qpn().0 == live {
                assert_eq!(completion.wr_id(), seen);
                seen += 1;
            } else {
                assert!(last < Some(completion.wr_id()), "twice");
                last = Some(completion.wr_id());
            }
        }
    }
    owner.join().unwrap();
    assert_eq!(poll_ids(&mut bench.cq), [0; 0]);
}
