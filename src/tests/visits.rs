//! Visiting completions in place (`poll_each`) on mlx5, on the scripted kernel.

use super::{bring_up, ring};
use crate::owned::{OwnedCompletionQueue, OwnedQueuePair};
use crate::provider::mlx5::fake_device::{FakeCq, cqe};
use crate::uverbs::scripted::Script;
use crate::{QpControl, QpState, QpType, QueuePair, SendWr, WcStatus};
use std::panic::{AssertUnwindSafe, catch_unwind};

const REQ: u8 = 0;
const REQ_ERR: u8 = 13;
/// The syndrome of a failure, and the vendor's.
const SYNDROME: u8 = 0x13;
const VENDOR: u8 = 0x8f;

/// The outcome of the next request.
#[derive(Clone, Copy)]
enum Event {
    Done,
    Failed,
    /// It succeeds, and raises no completion.
    Silent,
    /// It belongs to the queue pair that was not adopted.
    Stray,
    FailedStray,
}
use Event::*;

/// A completion queue of two queue pairs, one of which is adopted and has posted the requests 1 to 3.
/// The other has posted as many.
struct Bench {
    cq: OwnedCompletionQueue<u32>,
    ours: OwnedQueuePair<u32>,
    theirs: QueuePair,
    device: FakeCq,
    /// Requests of each that have completed; each is one WQEBB.
    completed: [u16; 2],
    /// CQEs that the completion queue has beyond those that its queue pairs can need.
    spare: u32,
    _third: Option<OwnedQueuePair<u32>>,
}

impl Bench {
    /// With room for `capacity` completions, and with a third queue pair of `third_sends` sends, if that is not 0.
    fn new(capacity: u32, third_sends: u32) -> Bench {
        Bench::posting(capacity, third_sends, [true; 3])
    }

    /// As [`new`](Self::new); says which of the three requests are signaled.
    fn posting(capacity: u32, third_sends: u32, signaled: [bool; 3]) -> Bench {
        let script = Script::mlx5();
        let context = script.open("mlx5_0");
        let pd = context.alloc_pd().unwrap();
        let mut cq = OwnedCompletionQueue::new(context.cq_builder(capacity).build().unwrap());
        let device = cq.queue().fake_device();
        let mut spare = cq.queue().capacity();
        assert_eq!(spare, capacity);
        let make = |cq: &OwnedCompletionQueue<u32>, sends| {
            let qp = pd.qp_builder(cq.queue(), cq.queue(), QpType::RC).max_send_wr(sends);
            qp.max_recv_wr(0).max_inline_data(4).build().unwrap()
        };
        let mut adopt = |sends| {
            let qp = cq.adopt(make(&cq, sends)).unwrap();
            spare -= qp.caps().max_send_wr + qp.caps().max_recv_wr;
            qp.qp.set_state(QpState::RTS);
            script.set_qp_state(qp.handle(), QpState::RTS.0);
            qp
        };
        let (mut ours, third) = (adopt(4), (third_sends > 0).then(|| adopt(third_sends)));
        let mut theirs = make(&cq, 4);
        bring_up(&script, &theirs);
        for (tag, signaled) in (1..).zip(signaled) {
            let mut batch = ours.send_batch().unwrap();
            let wr = SendWr::send(&[]).inline(b"x");
            match signaled {
                true => batch.push(wr, (), tag).unwrap(),
                false => batch.push_unsignaled(wr, (), tag).unwrap(),
            }
            batch.ring().unwrap();
            let mut batch = theirs.send_batch().unwrap();
            batch.push(SendWr::send(&[]).inline(b"x")).unwrap();
            ring(batch).unwrap();
        }
        Bench { cq, ours, theirs, device, completed: [0; 2], spare, _third: third }
    }

    fn complete<const N: usize>(&mut self, events: [Event; N]) {
        for event in events {
            let (qp, of): (&QpControl, _) = match event {
                Done | Failed | Silent => (&self.ours, 0),
                Stray | FailedStray => (&self.theirs, 1),
            };
            let opcode = match event {
                Done | Silent | Stray => REQ,
                Failed | FailedStray => REQ_ERR,
            };
            let number = qp.qp.member.number.unwrap();
            let mut core = cqe(opcode, number, qp.qpn().0, self.completed[of]);
            if opcode == REQ_ERR {
                (core[54], core[55]) = (VENDOR, SYNDROME);
            }
            self.completed[of] += 1;
            if !matches!(event, Silent) {
                self.device.write(core);
            }
        }
    }

    /// The count that a poll returns, and the tags that it visited.
    fn visits(&mut self, most: usize) -> (usize, Vec<u32>) {
        let mut seen = Vec::new();
        let found = self.cq.poll_each(most, |request| seen.push(*request.tag().unwrap()));
        (found.unwrap(), seen)
    }

    /// The numbers of completions that matched no request, and of CQEs that were given back to the device.
    fn found(&self) -> (u64, u32) {
        (self.cq.unmatched(), self.device.consumed())
    }

    /// The number of the three requests that are over and given back.
    fn free(&mut self) -> usize {
        self.ours.send_room() + 3 - self.ours.caps().max_send_wr as usize
    }
}

#[test]
fn a_stray_completion_does_not_count_towards_the_limit() {
    let mut bench = Bench::new(63, 0);
    assert_eq!(bench.visits(3), (0, vec![]));
    bench.complete([Done, Stray, Done, Stray, Done]);
    assert_eq!(bench.visits(3), (3, vec![1, 2, 3]));
    assert_eq!((bench.found(), bench.free()), ((2, 5), 3));
}

/// While it runs, the poll keeps no more CQEs from the device than the completion queue has to spare.
#[test]
fn a_poll_ends_at_its_limit() {
    for (capacity, third_sends, spare) in [(63, 0, 58), (15, 0, 10), (7, 1, 1), (7, 2, 0)] {
        let mut bench = Bench::new(capacity, third_sends);
        assert_eq!(bench.spare, spare, "CQEs to spare");
        bench.complete([Stray, Done, Stray, Done, Stray, Done]);
        assert_eq!((bench.visits(0), bench.found()), ((0, vec![]), (0, 0)));
        let mut seen = Vec::new();
        let found = bench.cq.poll_each(2, |request| {
            let tag = *request.tag().unwrap();
            assert!(2 * tag - bench.device.consumed() <= spare, "{spare} to spare, at {tag}");
            seen.push(tag);
        });
        assert_eq!((found, seen), (Ok(2), vec![1, 2]), "{spare} to spare");
        assert_eq!((bench.found(), bench.free()), ((2, 4), 2), "{spare} to spare");
        assert_eq!((bench.visits(9), bench.found()), ((1, vec![3]), (3, 6)), "{spare} to spare");
    }
}

/// Otherwise a poll could keep `spare` CQEs besides those of the forgotten one, and the queue could overflow.
#[test]
fn cqes_of_a_forgotten_poll_are_given_back_by_the_next_one() {
    for (capacity, third_sends, spare) in [(15, 1, 1), (15, 0, 6)] {
        let mut bench = Bench::new(capacity, third_sends);
        bench.complete([Done, Done, Done]);
        let mut completions = bench.cq.poll().unwrap();
        assert_eq!(completions.next().unwrap().tag, 1);
        std::mem::forget(completions);
        assert_eq!(bench.found(), (0, 0), "{spare} to spare");
        let mut seen = Vec::new();
        let found = bench.cq.poll_each(1, |request| {
            seen.push((*request.tag().unwrap(), bench.device.consumed()));
        });
        assert_eq!((found, seen), (Ok(1), vec![(2, 1)]), "{spare} to spare");
        assert_eq!((bench.visits(9), bench.found()), ((1, vec![3]), (0, 3)));
    }
}

#[test]
fn failures_are_shown_with_their_status() {
    let mut bench = Bench::new(63, 0);
    bench.complete([Done, FailedStray, Failed, Done]);
    let mut seen = Vec::new();
    let found = bench.cq.poll_each(2, |request| {
        let (status, success) = (request.status(), request.is_success());
        let done = request.into_owned().unwrap();
        assert_eq!((done.outcome.status, done.outcome.is_success()), (status, success));
        seen.push((done.tag, status, done.outcome.vendor_err()));
    });
    let failed = (2, WcStatus::REM_ACCESS_ERR, VENDOR.into());
    assert_eq!((found, seen), (Ok(2), vec![(1, WcStatus::SUCCESS, 0), failed]));
    assert_eq!((bench.found(), bench.free()), ((1, 3), 2));
    assert_eq!((bench.visits(9), bench.found()), ((1, vec![3]), (1, 4)));
}

#[test]
fn a_poll_continues_after_the_completion_whose_visitor_panicked() {
    let mut bench = Bench::new(63, 0);
    bench.complete([Done, Stray, Done, Done]);
    let mut seen = Vec::new();
    let polled = catch_unwind(AssertUnwindSafe(|| {
        bench.cq.poll_each(usize::MAX, |request| {
            seen.push(*request.tag().unwrap());
            assert!(seen.len() < 2, "as it should");
        })
    }));
    assert!(polled.is_err() && seen == [1, 2]);
    assert_eq!((bench.found(), bench.free()), ((1, 3), 2));
    assert_eq!((bench.visits(9), bench.found()), ((1, vec![3]), (1, 4)));
    assert_eq!(bench.free(), 3);
}

/// The third request's completion also completes the second request, with any CQEs in between.
#[test]
fn a_visitor_is_shown_unsignaled_requests() {
    for most in [1, 2, 3, 9].into_iter().step_by(if cfg!(miri) { 3 } else { 1 }) {
        for (capacity, third_sends) in [(63, 0), (15, 1), (15, 2)] {
            // The outcome of the second is unknown if the third fails.
            for third in [Done, Failed] {
                let mut bench = Bench::posting(capacity, third_sends, [true, false, true]);
                bench.complete([Stray, Done, Silent, Stray, third, Stray]);
                let mut seen = Vec::new();
                loop {
                    let (found, tags) = bench.visits(most);
                    assert!(found == tags.len() && found <= most);
                    seen.extend(tags);
                    if found == 0 {
                        break;
                    }
                }
                let all = (vec![1, 2, 3], 3);
                assert_eq!((seen, bench.free()), all, "{most} of {capacity}, {third_sends}");
                assert_eq!(bench.found(), (3, 5));
            }
        }
    }
}

#[test]
fn a_failed_unsignaled_request_is_visited_by_itself() {
    let mut bench = Bench::posting(63, 0, [true, false, true]);
    bench.complete([Done, Failed]);
    let mut seen = Vec::new();
    let found = bench.cq.poll_each(9, |request| {
        seen.push((*request.tag().unwrap(), request.status(), request.outcome().vendor_err()));
    });
    let failed = (2, WcStatus::REM_ACCESS_ERR, VENDOR.into());
    assert_eq!((found, seen), (Ok(2), vec![(1, WcStatus::SUCCESS, 0), failed]));
}

/// The CQE of a completion that is visited in place goes back to the device after the visit.
#[test]
fn completions_after_an_interrupted_poll_are_visited_in_place() {
    let mut bench = Bench::posting(63, 0, [false, true, true]);
    bench.complete([Silent, Done, Done]);
    assert_eq!((bench.visits(1), bench.found()), ((1, vec![1]), (0, 1)));
    let mut seen = Vec::new();
    let found = bench.cq.poll_each(9, |request| {
        seen.push((*request.tag().unwrap(), bench.device.consumed()));
    });
    assert_eq!((found, seen), (Ok(2), vec![(2, 1), (3, 1)]));
    assert_eq!((bench.found(), bench.free()), ((0, 2), 3));
}
