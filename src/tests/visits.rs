//! What a poll shows, to who looks at it in place, of completions that a device of mlx5 wrote; on a
//! kernel that the test plays.

use super::{bring_up, ring};
use crate::owned::{OwnedCompletionQueue, OwnedQueuePair};
use crate::provider::mlx5::fake_device::{Device, cqe};
use crate::uverbs::scripted::Script;
use crate::{QpControl, QpState, QpType, QueuePair, SendWr, WcStatus};
use std::panic::{AssertUnwindSafe, catch_unwind};

const REQ: u8 = 0;
const REQ_ERR: u8 = 13;
/// How what fails does, by the device, and its own code for it.
const SYNDROME: u8 = 0x13;
const VENDOR: u8 = 0x8f;

/// What becomes of the next request.
#[derive(Clone, Copy)]
enum Event {
    Done,
    Failed,
    /// It is one of the queue pair that was not adopted.
    Stray,
    FailedStray,
}
use Event::*;

/// A completion queue of two queue pairs, one of which is adopted and has posted the requests 1 to 3.
/// The other has as many.
struct Bench {
    cq: OwnedCompletionQueue<u32>,
    ours: OwnedQueuePair<u32>,
    theirs: QueuePair,
    device: Device,
    /// Requests of each that completed, of a block each.
    completed: [u16; 2],
    /// Entries to spare.
    slack: u32,
    _others: Option<OwnedQueuePair<u32>>,
}

impl Bench {
    /// With room for `capacity` completions; with a third queue pair if that is to take `others`.
    fn new(capacity: u32, others: u32) -> Bench {
        let script = Script::mlx5();
        let context = script.open("mlx5_0");
        let pd = context.alloc_pd().unwrap();
        let mut cq = OwnedCompletionQueue::new(context.create_cq(capacity).build().unwrap());
        let device = cq.queue().played();
        let mut slack = cq.queue().capacity();
        assert_eq!(slack, capacity);
        let make = |cq: &OwnedCompletionQueue<u32>, sends| {
            let qp = pd.create_qp(cq.queue(), cq.queue(), QpType::RC).max_send_wr(sends);
            qp.max_recv_wr(0).max_inline_data(4).build().unwrap()
        };
        let mut adopt = |sends| {
            let qp = cq.adopt(make(&cq, sends)).unwrap();
            slack -= qp.caps().max_send_wr + qp.caps().max_recv_wr;
            qp.qp.set_state(QpState::RTS);
            script.set_qp_state(qp.handle(), QpState::RTS.0);
            qp
        };
        let (mut ours, others) = (adopt(4), (others > 0).then(|| adopt(others)));
        let mut theirs = make(&cq, 4);
        bring_up(&script, &theirs);
        for tag in 1..=3 {
            let mut batch = ours.send_batch().unwrap();
            batch.push(SendWr::send(&[]).inline(b"x"), (), tag).unwrap();
            batch.ring().unwrap();
            let mut batch = theirs.send_batch().unwrap();
            batch.push(SendWr::send(&[]).inline(b"x")).unwrap();
            ring(batch).unwrap();
        }
        Bench { cq, ours, theirs, device, completed: [0; 2], slack, _others: others }
    }

    fn complete<const N: usize>(&mut self, events: [Event; N]) {
        for event in events {
            let (qp, of): (&QpControl, _) = match event {
                Done | Failed => (&self.ours, 0),
                Stray | FailedStray => (&self.theirs, 1),
            };
            let opcode = match event {
                Done | Stray => REQ,
                Failed | FailedStray => REQ_ERR,
            };
            let number = qp.qp.member.number().unwrap();
            let mut core = cqe(opcode, number, qp.qpn().0, self.completed[of]);
            if opcode == REQ_ERR {
                (core[54], core[55]) = (VENDOR, SYNDROME);
            }
            self.completed[of] += 1;
            self.device.write(core);
        }
    }

    /// What a poll says that it found, and the tags of what it showed.
    fn visits(&mut self, most: usize) -> (usize, Vec<u32>) {
        let mut seen = Vec::new();
        let found = self.cq.poll_each(most, |request| seen.push(*request.tag().unwrap()));
        (found.unwrap(), seen)
    }

    /// Strays that were found, and how many completions the device was told to be consumed.
    fn found(&self) -> (u64, u32) {
        (self.cq.strays(), self.device.consumed())
    }

    /// Requests of the adopted queue pair that are over and given back.
    fn free(&mut self) -> usize {
        self.ours.send_room() + 3 - self.ours.caps().max_send_wr as usize
    }
}

#[test]
fn strays_take_nobody_s_turn() {
    let mut bench = Bench::new(63, 0);
    assert_eq!(bench.visits(3), (0, vec![]));
    bench.complete([Done, Stray, Done, Stray, Done]);
    assert_eq!(bench.visits(3), (3, vec![1, 2, 3]));
    assert_eq!((bench.found(), bench.free()), ((2, 5), 3));
}

/// Whatever there is to spare, and no more than that is held back meanwhile.
#[test]
fn a_poll_ends_with_the_last_that_was_asked_for() {
    for (capacity, others, slack) in [(63, 0, 54), (15, 0, 6), (15, 1, 1), (15, 2, 0)] {
        let mut bench = Bench::new(capacity, others);
        assert_eq!(bench.slack, slack, "entries to spare");
        bench.complete([Stray, Done, Stray, Done, Stray, Done]);
        assert_eq!((bench.visits(0), bench.found()), ((0, vec![]), (0, 0)));
        let mut seen = Vec::new();
        let found = bench.cq.poll_each(2, |request| {
            let tag = *request.tag().unwrap();
            assert!(2 * tag - bench.device.consumed() <= slack, "{slack} to spare, at {tag}");
            seen.push(tag);
        });
        assert_eq!((found, seen), (Ok(2), vec![1, 2]), "{slack} to spare");
        assert_eq!((bench.found(), bench.free()), ((2, 4), 2), "{slack} to spare");
        assert_eq!((bench.visits(9), bench.found()), ((1, vec![3]), (3, 6)), "{slack} to spare");
    }
}

#[test]
fn failures_are_shown_as_what_they_are() {
    let mut bench = Bench::new(63, 0);
    bench.complete([Done, FailedStray, Failed, Done]);
    let mut seen = Vec::new();
    let found = bench.cq.poll_each(2, |request| {
        let (status, success) = (request.status(), request.is_success());
        let done = request.into_done().unwrap();
        assert_eq!((done.outcome.status, done.outcome.is_success()), (status, success));
        seen.push((done.tag, status, done.outcome.vendor_err));
    });
    let failed = (2, WcStatus::REM_ACCESS_ERR, VENDOR.into());
    assert_eq!((found, seen), (Ok(2), vec![(1, WcStatus::SUCCESS, 0), failed]));
    assert_eq!((bench.found(), bench.free()), ((1, 3), 2));
    assert_eq!((bench.visits(9), bench.found()), ((1, vec![3]), (1, 4)));
}

#[test]
fn a_poll_goes_on_behind_what_a_visitor_panicked_at() {
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
