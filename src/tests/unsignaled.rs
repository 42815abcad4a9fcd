//! The memory of an unsignaled request comes back with the completion of a later one, once, and in order.

use super::owned::{Owned, bring_up_owned};
use super::{Bench, wc};
use crate::owned::{BufferPool, OwnedCompletionQueue, OwnedQueuePair};
use crate::uverbs::scripted::{Op, Role};
use crate::{
    Access, Errno, PostError, QpType, Remote, RingError, Rkey, SendWr, WcOpcode, WcStatus,
};
use uverbs_uapi::wc::ib_uverbs_wc;

const REMOTE: Remote = Remote { addr: 0x2000, rkey: Rkey(6) };
const SUCCESS: WcStatus = WcStatus::SUCCESS;
const FLUSHED: WcStatus = WcStatus::WR_FLUSH_ERR;

/// A queue pair of 16 sends on the scripted kernel.
struct Sender {
    bench: Bench,
    pool: BufferPool,
    cq: OwnedCompletionQueue<u32>,
    qp: OwnedQueuePair<u32>,
}

impl Sender {
    fn new() -> Sender {
        let bench = Bench::new();
        let pool = bench.pd.buffer_pool_builder(64).count(32).build().unwrap();
        let mut cq = OwnedCompletionQueue::new(bench.context.cq_builder(64).build().unwrap());
        let builder = bench.pd.qp_builder(cq.queue(), cq.queue(), QpType::RC);
        let qp = builder.max_send_wr(16).max_recv_wr(1).max_inline_data(16).build().unwrap();
        let qp = cq.adopt(qp).unwrap();
        bring_up_owned(&bench.script, &qp);
        Sender { bench, pool, cq, qp }
    }

    /// Posts one batch: a tag, and whether the request is signaled.
    fn post(&mut self, requests: &[(u32, bool)]) {
        let mut batch = self.qp.send_batch().unwrap();
        for (tag, signaled) in requests {
            let (wr, buffer) = (SendWr::write(REMOTE, &[]), self.pool.take().unwrap());
            match signaled {
                true => batch.push(wr, buffer, *tag).unwrap(),
                false => batch.push_unsignaled(wr, buffer, *tag).unwrap(),
            }
        }
        batch.ring().unwrap();
    }

    /// The `wr_id` of the next request in the queue, and whether it is signaled.
    fn take(&self) -> Option<(u64, bool)> {
        const FLAGS: usize = std::mem::offset_of!(uverbs_uapi::rxe::rxe_send_wqe, wr)
            + std::mem::offset_of!(uverbs_uapi::rxe::rxe_send_wr, send_flags);
        let request = self.bench.script.take(self.qp.handle(), Role::Send)?;
        let flags = u32::from_ne_bytes(request[FLAGS..FLAGS + 4].try_into().unwrap());
        Some((u64::from_ne_bytes(request[..8].try_into().unwrap()), flags & 2 != 0))
    }

    /// The number of requests of the queue that were not given back.
    fn lent(&mut self) -> usize {
        self.qp.caps().max_send_wr as usize - self.qp.send_room()
    }

    fn complete(&self, wr_id: u64, status: WcStatus) {
        let wc = ib_uverbs_wc { status: status.0, ..wc(self.qp.qpn().0, wr_id) };
        assert!(self.bench.script.complete(self.cq.queue().handle(), wc));
    }

    /// Completes as rxe does: signaled requests, and failures.
    fn run(&self, statuses: &[WcStatus]) {
        for status in statuses {
            let (wr_id, signaled) = self.take().expect("a request");
            if signaled || *status != SUCCESS {
                self.complete(wr_id, *status);
            }
        }
    }

    /// Polls by iteration, or by visits of at most `most`.
    fn poll(&mut self, most: Option<usize>) -> Vec<(u32, WcStatus)> {
        match most {
            None => self.cq.poll().unwrap().map(|done| (done.tag, done.outcome.status)).collect(),
            Some(most) => {
                let mut seen = Vec::new();
                loop {
                    let before = seen.len();
                    let found = self.cq.poll_each(most, |request| {
                        let status = request.status();
                        let (_buffer, tag) = request.into_buffer().expect("a buffer");
                        seen.push((tag, status));
                    });
                    assert_eq!(found, Ok(seen.len() - before));
                    assert!(seen.len() - before <= most);
                    if seen.len() == before {
                        return seen;
                    }
                }
            }
        }
    }
}

/// All ways to poll.
const POLLS: [Option<usize>; 4] = [None, Some(1), Some(2), Some(64)];

#[test]
fn one_completion_gives_back_all_requests_before_it_in_order() {
    for most in POLLS {
        let mut sender = Sender::new();
        sender.post(&[(1, false), (2, false), (3, true)]);
        sender.post(&[(4, true), (5, false)]);
        assert_eq!((sender.poll(most), sender.pool.idle()), (vec![], 27));
        sender.run(&[SUCCESS; 5]);
        let found = [1, 2, 3, 4].map(|tag| (tag, SUCCESS));
        assert_eq!(sender.poll(most), found, "{most:?}");
        assert_eq!((sender.pool.idle(), sender.lent()), (31, 1));
        sender.post(&[(6, true)]);
        sender.run(&[SUCCESS]);
        assert_eq!(sender.poll(most), [(5, SUCCESS), (6, SUCCESS)]);
        assert_eq!((sender.pool.idle(), sender.cq.unmatched()), (32, 0));
    }
}

/// A poll that stops early, and is dropped, leaves the rest to the next one.
#[test]
fn a_poll_that_stops_in_between_loses_nothing() {
    let mut sender = Sender::new();
    sender.post(&[(1, false), (2, false), (3, true), (4, true)]);
    sender.run(&[SUCCESS; 4]);
    assert_eq!(sender.cq.poll().unwrap().next().unwrap().tag, 1);
    let mut seen = Vec::new();
    let visited = sender.cq.poll_each(2, |request| seen.push(*request.tag().unwrap()));
    assert_eq!((visited, seen), (Ok(2), vec![2, 3]));
    assert_eq!(sender.poll(None), [(4, SUCCESS)]);
}

#[test]
fn an_unsignaled_request_has_no_completion_even_if_it_asks_for_one() {
    let mut sender = Sender::new();
    let mut batch = sender.qp.send_batch().unwrap();
    let wr = SendWr::write(REMOTE, &[]).signaled();
    batch.push_unsignaled(wr, sender.pool.take().unwrap(), 1).unwrap();
    batch.ring().unwrap();
    assert!(matches!(sender.take(), Some((_, false))));
}

/// The library derives the outcome from the request.
#[test]
fn an_unsignaled_read_counts_its_bytes() {
    let mut sender = Sender::new();
    let mut batch = sender.qp.send_batch().unwrap();
    let mut buffer = sender.pool.take().unwrap();
    buffer.set_len(40);
    batch.push_unsignaled(SendWr::read(REMOTE, &[]), buffer, 1).unwrap();
    let buffer = sender.pool.take().unwrap();
    batch.push_unsignaled(SendWr::fetch_add(REMOTE, 1, &[]), buffer, 2).unwrap();
    batch.push_unsignaled(SendWr::send(&[]).inline(b"x"), (), 3).unwrap();
    batch.push(SendWr::send(&[]).inline(b"x"), (), 4).unwrap();
    batch.ring().unwrap();
    sender.run(&[SUCCESS; 4]);
    let outcomes: Vec<_> = sender
        .cq
        .poll()
        .unwrap()
        .map(|done| {
            let outcome = done.outcome;
            (done.tag, outcome.opcode, outcome.byte_len, outcome.filled(), outcome.qpn)
        })
        .collect();
    let qpn = sender.qp.qpn();
    let expected = [
        (1, WcOpcode::READ, 40, 40, qpn),
        (2, WcOpcode::FETCH_ADD, 8, 8, qpn),
        (3, WcOpcode::SEND, 0, 0, qpn),
        (4, WcOpcode::SEND, 0, 0, qpn),
    ];
    assert_eq!(outcomes, expected);
}

/// A request that fails has a completion of its own, and so has each that is flushed after it.
#[test]
fn failures_complete_by_themselves() {
    for most in POLLS {
        let mut sender = Sender::new();
        sender.post(&[(1, false), (2, false), (3, false), (4, true), (5, false), (6, true)]);
        let failed = WcStatus::REM_ACCESS_ERR;
        sender.run(&[SUCCESS, SUCCESS, failed, FLUSHED, FLUSHED, FLUSHED]);
        let expected = [
            // The outcome of requests before a failure is unknown.
            (1, FLUSHED),
            (2, FLUSHED),
            (3, failed),
            (4, FLUSHED),
            (5, FLUSHED),
            (6, FLUSHED),
        ];
        assert_eq!(sender.poll(most), expected, "{most:?}");
        assert_eq!((sender.pool.idle(), sender.cq.unmatched()), (32, 0));
    }
}

#[test]
fn a_completion_gives_back_nothing_that_was_posted_after_it() {
    let mut sender = Sender::new();
    sender.post(&[(1, true), (2, false), (3, false)]);
    sender.run(&[SUCCESS]);
    assert_eq!((sender.poll(None), sender.pool.idle()), (vec![(1, SUCCESS)], 30));
    // A repeated completion, and one of a request that was never posted, return no memory.
    let (two, three) = (sender.take().unwrap().0, sender.take().unwrap().0);
    for forged in [three + 64, three + 64 + 16, two ^ 8, three ^ 16] {
        sender.complete(forged, SUCCESS);
    }
    assert_eq!((sender.poll(None), sender.cq.unmatched(), sender.pool.idle()), (vec![], 4, 30));
}

#[test]
fn at_least_one_request_in_half_a_queue_is_signaled() {
    let mut sender = Sender::new();
    let depth = sender.qp.caps().max_send_wr;
    let half = depth.div_ceil(2) as usize;
    let mut in_queue = std::collections::VecDeque::new();
    let mut expected = 0..;
    for tag in 0..3 * depth {
        if sender.qp.send_room() == 0 {
            // The queue is full. Its signaled requests free at least half of it.
            let buffer = sender.pool.take().unwrap();
            let mut batch = sender.qp.send_batch().unwrap();
            let refused = batch.push_unsignaled(SendWr::write(REMOTE, &[]), buffer, 0);
            assert_eq!(refused.unwrap_err().error, PostError::Full);
            drop(batch);
            for (wr_id, signaled) in in_queue.drain(..) {
                if signaled {
                    sender.complete(wr_id, SUCCESS);
                }
            }
            let tags: Vec<u32> = sender.poll(None).iter().map(|(tag, _)| *tag).collect();
            assert!(tags.len() >= half);
            assert_eq!(tags, expected.by_ref().take(tags.len()).collect::<Vec<_>>());
        }
        sender.post(&[(tag, false)]);
        in_queue.push_back(sender.take().unwrap());
        let unsignaled = in_queue.iter().rev().take_while(|(_, signaled)| !signaled).count();
        assert!(unsignaled < half, "{unsignaled} of {depth}");
    }
}

/// The signaled request that was to follow is not posted after all; the next one stands in for it.
#[test]
fn a_signaled_request_that_is_not_posted_leaves_the_others_to_the_next() {
    type Lose = fn(&mut Sender);
    let ways: [Lose; 4] = [
        |sender| {
            let mut batch = sender.qp.send_batch().unwrap();
            batch.push(SendWr::write(REMOTE, &[]), sender.pool.take().unwrap(), 9).unwrap();
        },
        |sender| {
            let mut batch = sender.qp.send_batch().unwrap();
            batch.push(SendWr::write(REMOTE, &[]), sender.pool.take().unwrap(), 9).unwrap();
            batch.push_unsignaled(SendWr::write(REMOTE, &[]), (), 9).unwrap();
            std::mem::forget(batch);
        },
        |sender| {
            let odd = SendWr::fetch_add(Remote { addr: 1, ..REMOTE }, 1, &[]);
            let mut batch = sender.qp.send_batch().unwrap();
            let refused = batch.push(odd, sender.pool.take().unwrap(), 9).unwrap_err();
            assert_eq!(refused.error, PostError::Unaligned);
            drop(refused);
            let refused = batch.push_unsignaled(odd, (), 9).unwrap_err();
            assert!(matches!(refused.error, PostError::Unaligned | PostError::AtomicTooShort));
        },
        |sender| {
            // The kernel refuses the doorbell: both stay in the queue.
            sender.bench.script.refuse(Op::POST_SEND, Errno::NOMEM);
            let mut batch = sender.qp.send_batch().unwrap();
            batch.push_unsignaled(SendWr::write(REMOTE, &[]), (), 2).unwrap();
            assert_eq!(batch.ring(), Err(RingError::StillQueued(Errno::NOMEM)));
            sender.bench.script.allow(Op::POST_SEND);
        },
    ];
    for (which, lose) in ways.into_iter().enumerate() {
        let mut sender = Sender::new();
        sender.post(&[(1, false)]);
        lose(&mut sender);
        let before = sender.take().expect("the first");
        let also = (which == 3).then(|| sender.take().expect("the second"));
        assert!(!before.1 && also.is_none_or(|(_, signaled)| !signaled));
        sender.post(&[(3, true)]);
        sender.run(&[SUCCESS]);
        let tags: Vec<u32> = sender.poll(None).iter().map(|(tag, _)| *tag).collect();
        assert_eq!(tags, if which == 3 { vec![1, 2, 3] } else { vec![1, 3] }, "way {which}");
        assert_eq!((sender.pool.idle(), sender.lent()), (32, 0), "way {which}");
    }
}

#[test]
fn a_scope_gives_unsignaled_requests_to_the_next_poll() {
    let mut sender = Sender::new();
    sender.post(&[(1, false), (2, false)]);
    let (script, cq, qpn) =
        (sender.bench.script.clone(), sender.cq.queue().handle(), sender.qp.qpn().0);
    let (handle, region) = (
        sender.qp.handle(),
        sender.bench.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64).unwrap(),
    );
    let part = crate::owned::RegionRef::new(&region, ..8).unwrap();
    let scoped = sender.qp.scope(&mut sender.cq, |scope| {
        let pending = scope.post(SendWr::write(REMOTE, &[]), part).unwrap();
        let ids: Vec<u64> = (0..3)
            .map(|_| script.take(handle, Role::Send).unwrap())
            .map(|request| u64::from_ne_bytes(request[..8].try_into().unwrap()))
            .collect();
        assert!(script.complete(cq, wc(qpn, ids[2])));
        scope.wait(pending).unwrap().1.status
    });
    assert_eq!(scoped.unwrap(), SUCCESS);
    assert_eq!(sender.poll(None), [(1, SUCCESS), (2, SUCCESS)]);
}

#[test]
fn a_reset_gives_unsignaled_requests_back_as_flushed() {
    for most in POLLS {
        let mut sender = Sender::new();
        sender.post(&[(1, false), (2, true), (3, false)]);
        sender.run(&[SUCCESS, SUCCESS]);
        sender.qp.reset(&mut sender.cq).unwrap();
        assert_eq!(sender.poll(most), [(1, SUCCESS), (2, SUCCESS), (3, FLUSHED)], "{most:?}");
        assert_eq!(sender.pool.idle(), 32);
    }
}

#[test]
fn dropping_the_queue_pair_frees_unsignaled_requests() {
    let Sender { bench, pool, mut cq, qp } = {
        let mut sender = Sender::new();
        sender.post(&[(1, false), (2, false), (3, true), (4, false)]);
        sender.run(&[SUCCESS; 3]);
        // A poll that has given back one of three.
        assert_eq!(sender.cq.poll().unwrap().next().unwrap().tag, 1);
        sender
    };
    drop(qp);
    assert_eq!((pool.idle(), bench.context.leaked()), (32, 0));
    assert!(cq.poll().unwrap().next().is_none());
}

/// The other kinds of memory, which do not take the fast path of buffers.
#[test]
fn all_memory_can_be_lent_unsignaled() {
    let mut owned = Owned::new();
    let region =
        owned.bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 64]).unwrap();
    let slice = crate::owned::RegionSlice::new(&std::sync::Arc::new(region), ..).unwrap();
    let mut batch = owned.qp.send_batch().unwrap();
    batch.push_unsignaled(SendWr::read(REMOTE, &[]), slice, "region").unwrap();
    let shared = owned.pool.take().unwrap().share();
    let refused = batch.push_unsignaled(SendWr::read(REMOTE, &[]), shared.clone(), "shared");
    assert_eq!(refused.unwrap_err().error, PostError::ReadOnly);
    batch.push(SendWr::write(REMOTE, &[]), shared, "shared").unwrap();
    batch.ring().unwrap();
    let ids: Vec<u64> = (0..2)
        .map(|_| owned.bench.script.take(owned.qp.handle(), Role::Send).unwrap())
        .map(|request| u64::from_ne_bytes(request[..8].try_into().unwrap()))
        .collect();
    let done = wc(owned.qp.qpn().0, ids[1]);
    assert!(owned.bench.script.complete(owned.cq.queue().handle(), done));
    let tags: Vec<_> = owned.cq.poll().unwrap().map(|done| done.tag).collect();
    assert_eq!(tags, ["region", "shared"]);
}
