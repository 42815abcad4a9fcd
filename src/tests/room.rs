//! A completion queue does not overflow if all its queue pairs were adopted, even if they post during polls.
#![allow(clippy::forget_non_drop, reason = "callers may do either")]

use super::owned::{bring_up_owned, fresh};
use super::{Bench, wc};
use crate::QpType;
use crate::SendWr;
use crate::owned::{OwnedCompletionQueue, OwnedQueuePair};
use crate::uverbs::scripted::{Op, Role, Script};

/// Posts as many sends as there is room for, and completes each at once.
fn fill(script: &Script, qp: &mut OwnedQueuePair<u32>, cq: u32) {
    for _ in 0..qp.send_room() {
        let mut batch = qp.send_batch().unwrap();
        batch.push(SendWr::send(&[]).inline(b"x"), (), 0).unwrap();
        batch.ring().unwrap();
        let request = script.take(qp.handle(), Role::Send).unwrap();
        let id = u64::from_ne_bytes(request[..8].try_into().unwrap());
        assert!(script.complete(cq, wc(qp.qpn().0, id)), "it overflowed");
    }
}

/// A program that posts during a poll, one request for each completion, overflows no completion
/// queue, not even one of the least size.
#[test]
fn posting_during_a_poll_does_not_overflow_the_queue() {
    const POSTS: u32 = if cfg!(miri) { 12 } else { 1000 };
    /// The ways to visit completions and post in between.
    type Look = fn(&mut OwnedCompletionQueue<u32>, &mut dyn FnMut());
    let looks: [Look; 4] = [
        |cq, post| cq.poll().unwrap().for_each(|_| post()),
        |cq, post| {
            let _ = cq.poll_each(usize::MAX, |settled| (drop(settled), post()).1);
        },
        |cq, post| {
            // Forgotten polls.
            for _ in 0..3 {
                let mut completions = cq.poll().unwrap();
                for _ in 0..3 {
                    drop(completions.next());
                    post();
                }
                std::mem::forget(completions);
            }
        },
        |cq, post| {
            for _ in 0..9 {
                let _ = cq.poll_each(1, |settled| (settled.into_owned().map(drop), post()).1);
            }
        },
    ];
    // Receives of the queue pair, sends of another one, and spare entries.
    for (recvs, others, spare) in [(7, 1, 0), (7, 0, 1), (3, 3, 2), (0, 0, 8)] {
        for look in looks {
            let bench = Bench::new();
            let (script, pd) = (&bench.script, &bench.pd);
            let mut cq = OwnedCompletionQueue::new(bench.context.cq_builder(15).build().unwrap());
            let mut adopt = |sends, recvs| {
                let builder = pd.qp_builder(cq.queue(), cq.queue(), QpType::RC);
                let builder = builder.max_send_wr(sends).max_recv_wr(recvs).max_inline_data(4);
                let qp = cq.adopt(builder.build().unwrap()).unwrap();
                bring_up_owned(&bench.script, &qp);
                qp
            };
            let (mut qp, other) = (adopt(7, recvs), (others > 0).then(|| adopt(others, 0)));
            let all: u32 = std::iter::once(&qp)
                .chain(&other)
                .map(|qp| qp.caps().max_send_wr + qp.caps().max_recv_wr)
                .sum();
            let handle = cq.queue().handle();
            assert_eq!(cq.queue().capacity() - all, spare, "room to spare");
            fill(script, &mut qp, handle);
            // The completions of the other queue pair come last.
            for _ in 7..all {
                assert!(script.complete(handle, wc(0xff_ffff, 0)));
            }
            let mut posts = 0;
            look(&mut cq, &mut || {
                posts += 1;
                if posts < POSTS {
                    fill(script, &mut qp, handle);
                }
            });
            assert!(posts >= 7);
        }
    }
}

/// Completions that a reset discards still occupy the completion queue.
#[test]
fn completions_that_a_reset_discards_make_room() {
    let bench = Bench::new();
    let script = &bench.script;
    let mut cq = OwnedCompletionQueue::new(bench.context.cq_builder(15).build().unwrap());
    let mut qp = cq.adopt(fresh(&bench, cq.queue())).unwrap();
    let handle = cq.queue().handle();
    let (theirs, qpn) = (script.clone(), qp.qpn().0);
    // The request completes during the reset, too late for the reset to discard the completion.
    script.before(Op::MODIFY_QP, move || {
        (0..4).for_each(|id| assert!(theirs.complete(handle, wc(qpn, id))));
    });
    for _ in 0..3 {
        bring_up_owned(&bench.script, &qp);
        fill(script, &mut qp, handle);
        qp.reset(&mut cq).unwrap();
        assert_eq!(script.pending(handle, Role::Cq), 0);
        let _ = cq.poll().unwrap().count();
    }
}

/// CQEs that a forgotten poll consumed are given back before a queue pair counts on the room.
#[test]
fn a_forgotten_poll_counts_when_a_queue_pair_is_adopted() {
    let bench = Bench::new();
    let mut cq = OwnedCompletionQueue::new(bench.context.cq_builder(15).build().unwrap());
    let handle = cq.queue().handle();
    let adopt = |cq: &mut OwnedCompletionQueue<u32>, sends| {
        let builder = bench.pd.qp_builder(cq.queue(), cq.queue(), QpType::RC).max_send_wr(sends);
        let builder = builder.max_recv_wr(0).max_inline_data(4);
        cq.adopt(builder.build().unwrap()).unwrap()
    };
    let mut qp = adopt(&mut cq, 7);
    bring_up_owned(&bench.script, &qp);
    fill(&bench.script, &mut qp, handle);
    let mut completions = cq.poll().unwrap();
    (0..7).for_each(|_| drop(completions.next().unwrap()));
    std::mem::forget(completions);
    let _other = adopt(&mut cq, 1);
    fill(&bench.script, &mut qp, handle);
    for (posts, _) in cq.poll().unwrap().enumerate() {
        if posts < 100 {
            fill(&bench.script, &mut qp, handle);
        }
    }
}
