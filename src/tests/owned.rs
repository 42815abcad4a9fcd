//! The memory of a request comes back with its completion, once, and not before.
#![allow(clippy::drop_non_drop, clippy::forget_non_drop, reason = "callers may do either")]

use super::{Bench, bring_up, wc};
use crate::owned::{
    BufferPool, Memory, OwnedCompletionQueue, OwnedQueuePair, OwnedSharedReceiveQueue, PushError,
    RegionSlice,
};
use crate::uverbs::scripted::{Op, Role, Script};
use crate::{
    Access, CompletionQueue, Errno, Lkey, PostError, QpControl, QpType, Remote, RingError, Rkey,
    SendWr, Sge, WcOpcode, WcStatus, WindowType,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use uverbs_uapi::object::UVERBS_OBJECT_QP;
use uverbs_uapi::wc::ib_uverbs_wc;

const REMOTE: Remote = Remote { addr: 0x2000, rkey: Rkey(6) };

pub(super) struct Owned {
    pub(super) bench: Bench,
    pub(super) pool: BufferPool,
    pub(super) cq: OwnedCompletionQueue<&'static str>,
    pub(super) qp: OwnedQueuePair<&'static str>,
}

impl Owned {
    pub(super) fn new() -> Owned {
        let bench = Bench::new();
        let pool = bench.pd.buffer_pool_builder(64).count(8).build().unwrap();
        let mut cq = OwnedCompletionQueue::new(bench.context.cq_builder(64).build().unwrap());
        let qp = cq.adopt(fresh(&bench, cq.queue())).unwrap();
        bring_up_owned(&bench.script, &qp);
        Owned { bench, pool, cq, qp }
    }

    /// The `wr_id` of the next request in a queue.
    fn taken(&self, role: Role) -> u64 {
        let request = self.bench.script.take(self.qp.handle(), role).expect("a request");
        u64::from_ne_bytes(request[..8].try_into().unwrap())
    }

    fn complete(&self, wr_id: u64) {
        self.complete_as(wc(self.qp.qpn().0, wr_id));
    }

    fn complete_as(&self, wc: ib_uverbs_wc) {
        assert!(self.bench.script.complete(self.cq.queue().handle(), wc));
    }

    fn tags(&mut self) -> Vec<&'static str> {
        self.cq.poll().unwrap().map(|done| done.tag).collect()
    }

    pub(super) fn send(&mut self, tag: &'static str) {
        let buffer = self.pool.copy(tag.as_bytes()).expect("a buffer");
        let mut batch = self.qp.send_batch().unwrap();
        batch.push(SendWr::send(&[]), buffer, tag).unwrap();
        batch.ring().unwrap();
    }

    pub(super) fn recv(&mut self, tag: &'static str) {
        let buffer = self.pool.take().expect("a buffer");
        let mut batch = self.qp.recv_batch().unwrap();
        batch.push(buffer, tag).unwrap();
        batch.ring().unwrap();
    }
}

fn error<L>(refused: PushError<L, &'static str>) -> PostError {
    refused.error
}

pub(super) fn fresh(bench: &Bench, cq: &CompletionQueue) -> crate::QueuePair {
    let builder = bench.pd.qp_builder(cq, cq, QpType::RC).max_send_wr(4).max_recv_wr(4);
    builder.max_inline_data(32).build().unwrap()
}

pub(super) fn bring_up_owned<T>(script: &Script, qp: &OwnedQueuePair<T>) {
    qp.qp.set_state(crate::QpState::RTS);
    script.set_qp_state(qp.handle(), crate::QpState::RTS.0);
}

#[test]
fn a_buffer_comes_back_with_its_completion() {
    let mut owned = Owned::new();
    owned.send("one");
    owned.recv("two");
    assert_eq!(owned.pool.idle(), 6);
    let (send, recv) = (owned.taken(Role::Send), owned.taken(Role::Recv));
    assert!(owned.tags().is_empty());
    owned.complete_as(ib_uverbs_wc { byte_len: 5, ..wc(owned.qp.qpn().0, recv) });
    let done = owned.cq.poll().unwrap().next().unwrap();
    assert_eq!((done.tag, done.outcome.byte_len, done.outcome.status.0), ("two", 5, 0));
    let mut buffer = done.memory.into_buffer().unwrap();
    assert_eq!(owned.pool.idle(), 6);
    buffer[0] = 1;
    owned.complete(send);
    let done = owned.cq.poll().unwrap().next().unwrap();
    assert_eq!(done.tag, "one");
    assert_eq!(&*done.memory.into_buffer().unwrap(), b"one");
    assert_eq!(owned.pool.idle(), 7);
    drop(buffer);
    assert_eq!(owned.pool.idle(), 8);
}

#[test]
fn a_wr_id_of_another_request_gives_nothing_back() {
    let mut owned = Owned::new();
    owned.send("one");
    let send = owned.taken(Role::Send);
    let qpn = owned.qp.qpn().0;
    // Completions with another queue pair, slot, table and generation; then the right one twice.
    let strays = [wc(qpn + 1, send), wc(qpn, send + 4), wc(qpn, send ^ 2), wc(qpn, send ^ 1 << 56)];
    for stray in strays {
        owned.complete_as(stray);
    }
    assert!(owned.tags().is_empty());
    assert_eq!((owned.pool.idle(), owned.cq.unmatched()), (7, 4));
    owned.complete(send);
    owned.complete(send);
    assert_eq!(owned.tags(), ["one"]);
    owned.send("two");
    owned.complete(send);
    assert!(owned.tags().is_empty());
    assert_eq!((owned.pool.idle(), owned.cq.unmatched()), (7, 6));
}

/// At most as many as are asked for. Memory that the visitor does not take is freed.
#[test]
fn completions_are_visited_in_place() {
    let mut owned = Owned::new();
    for tag in ["taken", "kept", "left", "later"] {
        owned.send(tag);
        let send = owned.taken(Role::Send);
        owned.complete(send);
    }
    let (mut kept, mut seen) = (None, Vec::new());
    let visited = owned.cq.poll_each(3, |request| {
        assert!(request.is_success());
        seen.push(*request.tag().unwrap());
        match seen.len() {
            1 => {
                let (buffer, tag) = request.into_buffer().unwrap();
                assert_eq!((&*buffer, tag), (&b"taken"[..], "taken"));
            }
            2 => kept = request.into_owned(),
            _ => {}
        }
    });
    assert_eq!((visited, seen), (Ok(3), vec!["taken", "kept", "left"]));
    let kept = kept.unwrap();
    assert_eq!((kept.tag, kept.outcome.qpn), ("kept", owned.qp.qpn()));
    assert_eq!(&*kept.memory.into_buffer().unwrap(), b"kept");
    assert_eq!((owned.pool.idle(), owned.tags()), (7, vec!["later"]));
    assert_eq!(
        (owned.pool.idle(), owned.qp.send_room()),
        (8, owned.qp.caps().max_send_wr as usize)
    );
    // A request without a buffer comes back itself.
    let mut batch = owned.qp.send_batch().unwrap();
    batch.push(SendWr::send(&[]).inline(b"x"), (), "none").unwrap();
    batch.ring().unwrap();
    let send = owned.taken(Role::Send);
    owned.complete(send);
    let visited = owned.cq.poll_each(1, |request| {
        let request = request.into_buffer().unwrap_err();
        assert_eq!(request.into_owned().unwrap().tag, "none");
    });
    assert_eq!(visited, Ok(1));
}

/// Without a copy of the completion.
#[test]
fn a_visitor_learns_how_much_arrived() {
    let mut owned = Owned::new();
    let (recv, imm) = (WcOpcode::RECV, WcOpcode::RECV_WRITE_IMM);
    for (opcode, byte_len, filled) in [(recv, 5, 5), (imm, 21, 0), (recv, 0, 0), (recv, 64, 64)] {
        owned.recv("message");
        let id = owned.taken(Role::Recv);
        let done = ib_uverbs_wc { opcode: opcode.0, byte_len, ..wc(owned.qp.qpn().0, id) };
        owned.complete_as(done);
        let visited = owned.cq.poll_each(9, |request| {
            assert_eq!((request.opcode(), request.byte_len()), (opcode, byte_len));
            assert_eq!(request.filled(), filled, "{opcode:?}");
        });
        assert_eq!(visited, Ok(1));
    }
}

/// Completions from before are found unchanged.
#[test]
fn closing_a_queue_pair_returns_the_memory_of_unfinished_requests() {
    let mut owned = Owned::new();
    owned.send("sent");
    let sent = owned.taken(Role::Send);
    owned.complete(sent);
    owned.send("waits");
    owned.recv("receives");
    let Owned { bench, pool, mut cq, qp } = owned;
    qp.close(&mut cq).unwrap();
    assert_eq!(bench.script.count(UVERBS_OBJECT_QP), 0);
    let found: Vec<_> = cq.poll().unwrap().map(|done| (done.tag, done.outcome.status)).collect();
    let (success, flushed) = (WcStatus::SUCCESS, WcStatus::WR_FLUSH_ERR);
    assert_eq!(found, [("sent", success), ("waits", flushed), ("receives", flushed)]);
    assert_eq!((pool.idle(), bench.context.leaked()), (8, 0));
}

#[test]
fn a_full_queue_gives_the_buffer_back() {
    let mut owned = Owned::new();
    let depth = owned.qp.caps().max_send_wr;
    for _ in 0..depth {
        owned.send("x");
    }
    assert_eq!(owned.qp.send_room(), 0);
    let first = owned.taken(Role::Send);
    let buffer = owned.pool.take().unwrap();
    let mut batch = owned.qp.send_batch().unwrap();
    let refused = batch.push(SendWr::send(&[]), buffer, "y").unwrap_err();
    assert_eq!((refused.error, refused.tag), (PostError::Full, "y"), "the device took one");
    drop(batch);
    owned.complete(first);
    assert_eq!((owned.tags(), owned.qp.send_room()), (vec!["x"], 1));
    let mut batch = owned.qp.send_batch().unwrap();
    batch.push(SendWr::send(&[]), refused.memory, refused.tag).unwrap();
    batch.ring().unwrap();
    assert_eq!(owned.qp.send_room(), 0);
}

/// rxe flushes a queue in this order: it publishes the completion, and then frees the place.
#[test]
fn a_completed_request_makes_room_before_the_kernel_frees_its_place() {
    for role in [Role::Send, Role::Recv] {
        let mut owned = Owned::new();
        let caps = owned.qp.caps();
        let (depth, post): (_, fn(&mut Owned, _)) = match role {
            Role::Send => (caps.max_send_wr, Owned::send),
            _ => (caps.max_recv_wr, Owned::recv),
        };
        (0..depth).for_each(|_| post(&mut owned, "x"));
        let oldest = owned.bench.script.peek(owned.qp.handle(), role).expect("a request");
        owned.complete(u64::from_ne_bytes(oldest[..8].try_into().unwrap()));
        assert_eq!(owned.tags(), ["x"]);
        post(&mut owned, "y");
        assert_eq!(owned.bench.script.pending(owned.qp.handle(), role), depth + 1);
    }
}

#[test]
fn a_dropped_or_forgotten_batch_gives_its_memory_back() {
    for forget in [false, true] {
        let mut owned = Owned::new();
        let mut batch = owned.qp.send_batch().unwrap();
        for _ in 0..3 {
            batch.push(SendWr::send(&[]), owned.pool.take().unwrap(), "never").unwrap();
        }
        if forget {
            std::mem::forget(batch)
        } else {
            drop(batch)
        }
        let mut batch = owned.qp.recv_batch().unwrap();
        batch.push(owned.pool.take().unwrap(), "never").unwrap();
        if forget {
            std::mem::forget(batch)
        } else {
            drop(batch)
        }
        assert_eq!(owned.pool.idle(), if forget { 4 } else { 8 });
        owned.send("one");
        owned.recv("two");
        assert_eq!(owned.pool.idle(), 6);
        let (send, recv) = (owned.taken(Role::Send), owned.taken(Role::Recv));
        owned.complete(send);
        owned.complete(recv);
        assert_eq!(owned.tags(), ["one", "two"]);
    }
}

/// No doorbell announced the requests of a forgotten batch, so they are not flushed.
#[test]
fn a_reset_does_not_report_requests_that_were_not_posted() {
    let mut owned = Owned::new();
    owned.send("one");
    owned.recv("two");
    let mut batch = owned.qp.send_batch().unwrap();
    batch.push(SendWr::send(&[]), owned.pool.take().unwrap(), "never").unwrap();
    std::mem::forget(batch);
    let mut batch = owned.qp.recv_batch().unwrap();
    batch.push(owned.pool.take().unwrap(), "never").unwrap();
    std::mem::forget(batch);
    owned.qp.reset(&mut owned.cq).unwrap();
    assert_eq!((owned.tags(), owned.pool.idle()), (vec!["one", "two"], 8));
}

#[test]
fn memory_that_a_request_must_not_have_is_refused() {
    let mut owned = Owned::new();
    let other = owned.bench.context.alloc_pd().unwrap();
    let foreign = other.buffer_pool_builder(64).build().unwrap();
    let sge = owned.pool.take().unwrap().sge();
    let shared = owned.pool.take().unwrap().share();
    let control = QpControl { qp: (*owned.qp).qp.clone() };
    let mut batch = owned.qp.send_batch().unwrap();
    let refused = batch.push(SendWr::send(&[]), foreign.take().unwrap(), "x").map_err(error);
    assert_eq!(refused, Err(PostError::ForeignMemory));
    let refused = batch.push(SendWr::send(&[sge]), (), "x").map_err(error);
    assert_eq!(refused, Err(PostError::NamesMemory));
    let mut window = owned.bench.pd.alloc_mw(WindowType::Two).unwrap();
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    let region = owned.bench.pd.mr_builder().access(access).register(vec![0u8; 64]).unwrap();
    let binding = window.bind(&control, &region, .., Access::REMOTE_READ).unwrap();
    let refused = batch.push(SendWr::bind_mw(binding), (), "x").map_err(error);
    assert_eq!(refused, Err(PostError::NamesMemory));
    let refused = batch.push(SendWr::read(REMOTE, &[]), shared.clone(), "x").map_err(error);
    assert_eq!(refused, Err(PostError::ReadOnly));
    for wr in [SendWr::fetch_add(REMOTE, 1, &[]), SendWr::compare_swap(REMOTE, 1, 1, &[])] {
        let memory = Memory::Shared(shared.clone());
        assert_eq!(batch.push(wr, memory, "x").unwrap_err().error, PostError::ReadOnly);
    }
    let odd = SendWr::fetch_add(Remote { addr: 1, ..REMOTE }, 1, &[]);
    let refused = batch.push(odd, owned.pool.take().unwrap(), "x").map_err(error);
    assert_eq!(refused, Err(PostError::Unaligned));
    batch.push(SendWr::write(REMOTE, &[]), shared, "shared").unwrap();
    batch.push(SendWr::send(&[]).inline(b"inline"), (), "inline").unwrap();
    assert_eq!(batch.len(), 2);
    batch.ring().unwrap();
    let mut batch = owned.qp.recv_batch().unwrap();
    let refused = batch.push(foreign.take().unwrap(), "x").map_err(error);
    assert_eq!(refused, Err(PostError::ForeignMemory));
    drop(batch);
    let (one, two) = (owned.taken(Role::Send), owned.taken(Role::Send));
    owned.complete(one);
    owned.complete(two);
    assert_eq!(owned.tags(), ["shared", "inline"]);
    assert_eq!((owned.pool.idle(), foreign.idle()), (8, 64));
}

/// The test sees it in a buffer that comes back because the queue is full.
#[test]
fn only_a_receive_of_datagrams_clears_the_room_of_the_header() {
    for (qp_type, cleared) in [(QpType::UD, 40), (QpType::RC, 0)] {
        let Owned { bench, pool, mut cq, .. } = Owned::new();
        let builder = bench.pd.qp_builder(cq.queue(), cq.queue(), qp_type);
        let qp = builder.max_send_wr(1).max_recv_wr(1).build().unwrap();
        let mut qp: OwnedQueuePair<&'static str> = cq.adopt(qp).unwrap();
        bring_up_owned(&bench.script, &qp);
        let foreign = bench.context.alloc_pd().unwrap().buffer_pool_builder(64).build().unwrap();
        let mut batch = qp.recv_batch().unwrap();
        for memory in [foreign.copy(&[7; 64]).unwrap(), foreign.copy(&[7; 8]).unwrap()] {
            let refused = batch.push(memory, "foreign").unwrap_err();
            assert_eq!(refused.error, PostError::ForeignMemory);
            assert!(refused.memory.iter().all(|byte| *byte == 7));
        }
        batch.push((), "no memory").unwrap();
        let refused = loop {
            if let Err(refused) = batch.push(pool.copy(&[7; 64]).unwrap(), "x") {
                break refused;
            }
        };
        assert_eq!(refused.error, PostError::Full);
        let kept = refused.memory.iter().position(|byte| *byte == 7);
        assert_eq!(kept, Some(cleared), "{qp_type}");
        assert!(refused.memory.iter().skip(cleared).all(|byte| *byte == 7));
    }
}

#[test]
fn a_request_names_the_memory_that_it_was_lent() {
    let mut owned = Owned::new();
    let region =
        owned.bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u64; 16]).unwrap();
    let region = Arc::new(region);
    let slice = RegionSlice::new(&region, 8..24).unwrap();
    let other = Arc::new(
        owned.bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u64; 16]).unwrap(),
    );
    assert!(slice.is_of(&region) && !slice.is_of(&other));
    let mut buffer = owned.pool.copy(b"header and body").unwrap();
    buffer.advance(7);
    let shared = owned.pool.copy(b"read by many").unwrap().share().slice(5..7).unwrap();
    let expected = [buffer.sge(), region.sge(8..24).unwrap(), shared.sge()];
    let mut batch = owned.qp.send_batch().unwrap();
    batch.push(SendWr::send(&[]), buffer, "buffer").unwrap();
    batch.push(SendWr::read(REMOTE, &[]), slice, "slice").unwrap();
    batch.push(SendWr::send(&[]), shared, "shared").unwrap();
    let mut empty = owned.pool.take().unwrap();
    empty.set_len(0);
    batch.push(SendWr::send(&[]), empty, "empty").unwrap();
    batch.ring().unwrap();
    let header = size_of::<uverbs_uapi::rxe::rxe_send_wqe>();
    for expected in expected {
        let request = owned.bench.script.take(owned.qp.handle(), Role::Send).unwrap();
        let word = |at: usize| u64::from_ne_bytes(request[at..at + 8].try_into().unwrap());
        assert_eq!(word(header), expected.addr);
        assert_eq!(word(header + 8), u64::from(expected.lkey.0) << 32 | u64::from(expected.length));
    }
    let dma = std::mem::offset_of!(uverbs_uapi::rxe::rxe_send_wqe, dma);
    let request = owned.bench.script.take(owned.qp.handle(), Role::Send).unwrap();
    assert!(request[dma..dma + 8].iter().all(|byte| *byte == 0), "no bytes, no entry");
}

#[test]
fn a_part_of_a_region_is_as_long_as_its_range() {
    let bench = Bench::new();
    let region = Arc::new(
        bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 128]).unwrap(),
    );
    for range in [8..24, 0..128, 127..128] {
        assert_eq!(RegionSlice::new(&region, range.clone()).unwrap().len(), range.len());
    }
}

#[test]
fn requests_that_the_kernel_refuses_to_send_keep_their_memory() {
    let mut owned = Owned::new();
    owned.bench.script.refuse(Op::POST_SEND, Errno::NOMEM);
    let mut batch = owned.qp.send_batch().unwrap();
    batch.push(SendWr::send(&[]), owned.pool.take().unwrap(), "late").unwrap();
    assert_eq!(batch.ring(), Err(RingError::StillQueued(Errno::NOMEM)));
    assert_eq!(owned.pool.idle(), 7);
    owned.bench.script.allow(Op::POST_SEND);
    owned.send("next");
    for _ in 0..2 {
        let id = owned.taken(Role::Send);
        owned.complete(id);
    }
    assert_eq!(owned.tags(), ["late", "next"]);
}

#[test]
fn dropping_a_queue_pair_frees_its_memory_after_the_reset() {
    let mut owned = Owned::new();
    owned.send("one");
    owned.recv("two");
    let send = owned.taken(Role::Send);
    owned.complete(send);
    drop(owned.qp);
    assert_eq!(owned.pool.idle(), 8);
    assert!(owned.cq.poll().unwrap().next().is_none());
    assert_eq!(owned.bench.context.leaked(), 0);
}

/// The device may still write it, unless the kernel destroyed the queue pair.
#[test]
fn dropping_a_queue_pair_leaks_its_memory_if_it_is_neither_reset_nor_destroyed() {
    for destroyed in [true, false] {
        let mut owned = Owned::new();
        owned.send("one");
        owned.recv("two");
        owned.bench.script.refuse(Op::MODIFY_QP, Errno::NOMEM);
        if !destroyed {
            owned.bench.script.refuse_destroy(owned.qp.handle(), Errno::NOMEM);
        }
        drop(owned.qp);
        let seen = (owned.pool.idle(), owned.bench.context.leaked());
        assert_eq!(seen, if destroyed { (8, 0) } else { (6, 1) });
    }
}

#[test]
fn memory_is_freed_when_the_device_is_gone() {
    let mut owned = Owned::new();
    owned.recv("one");
    owned.bench.script.vanish();
    drop(owned.qp);
    assert_eq!((owned.pool.idle(), owned.bench.context.leaked()), (8, 0));
}

/// The kernel answers that there is no device before it detaches the device from its objects.
#[test]
fn memory_is_not_freed_while_the_device_is_being_removed() {
    for (errno, patient) in [(Errno::NOMEM, false), (Errno::BUSY, false), (Errno::BUSY, true)] {
        let mut owned = Owned::new();
        owned.recv("one");
        let (script, handle) = (owned.bench.script.clone(), owned.qp.handle());
        script.begin_to_vanish();
        script.refuse_destroy(handle, errno);
        if patient {
            // DESTROY succeeds at the third attempt.
            let tries = AtomicU32::new(0);
            let permit = move || {
                if tries.fetch_add(1, Ordering::Relaxed) == 2 {
                    script.permit_destroy(handle);
                }
            };
            owned.bench.script.before(Op::destroy(uverbs_uapi::object::UVERBS_OBJECT_QP), permit);
        }
        drop(owned.qp);
        let seen = (owned.pool.idle(), owned.bench.context.leaked());
        assert_eq!(seen, if patient { (8, 0) } else { (7, 1) }, "{errno}");
        assert_eq!(owned.bench.script.complaints(), [""; 0], "destroyed twice");
    }
    let mut owned = Owned::new();
    owned.recv("one");
    owned.bench.script.begin_to_vanish();
    drop(owned.qp);
    assert_eq!((owned.pool.idle(), owned.bench.context.leaked()), (8, 0));
    assert_eq!(owned.bench.script.count(uverbs_uapi::object::UVERBS_OBJECT_QP), 0);
    assert_eq!(owned.bench.script.complaints(), [""; 0], "destroyed twice");
}

#[test]
fn a_forgotten_queue_pair_keeps_its_memory() {
    let mut owned = Owned::new();
    owned.recv("one");
    std::mem::forget(owned.qp);
    assert_eq!(owned.pool.idle(), 7);
    drop(owned.cq);
    assert_eq!(owned.pool.idle(), 7);
}

/// The next queue pair may get the number of a dropped one, whose completions are still in the queue.
#[test]
fn a_completion_of_an_earlier_queue_pair_with_the_number_gives_nothing_back() {
    let mut owned = Owned::new();
    owned.send("old");
    let old = owned.taken(Role::Send);
    let qpn = owned.qp.qpn().0;
    let next = owned.cq.adopt(fresh(&owned.bench, owned.cq.queue())).unwrap();
    drop(std::mem::replace(&mut owned.qp, next));
    // Adopting the next one removes the first from the map.
    let _between = owned.cq.adopt(fresh(&owned.bench, owned.cq.queue())).unwrap();
    owned.bench.script.set_next_qpn(qpn);
    let qp = owned.cq.adopt(fresh(&owned.bench, owned.cq.queue())).unwrap();
    bring_up_owned(&owned.bench.script, &qp);
    assert_eq!(qp.qpn().0, qpn);
    owned.qp = qp;
    owned.complete(old);
    assert!(owned.tags().is_empty(), "nothing was posted to the new one yet");
    owned.send("new");
    owned.complete(old);
    assert_eq!((owned.tags(), owned.pool.idle()), (vec![], 7));
    let new = owned.taken(Role::Send);
    owned.complete(new);
    assert_eq!(owned.tags(), ["new"]);
}

#[test]
fn queue_pairs_that_could_overflow_the_queue_are_not_adopted() {
    let mut owned = Owned::new();
    let other = owned.bench.context.cq_builder(16).build().unwrap();
    let pd = &owned.bench.pd;
    let cases: [(_, &str); 2] = [
        (pd.qp_builder(owned.cq.queue(), &other, QpType::RC), "complete to another queue"),
        (
            pd.qp_builder(owned.cq.queue(), owned.cq.queue(), QpType::RC).max_send_wr(127),
            "room for",
        ),
    ];
    for (builder, why) in cases {
        let failed = owned.cq.adopt(builder.build().unwrap()).unwrap_err();
        assert_eq!(failed.error.errno(), Errno::INVAL);
        assert!(failed.to_string().contains(why), "{failed}");
    }
    let ready = fresh(&owned.bench, owned.cq.queue());
    bring_up(&owned.bench.script, &ready);
    let failed = owned.cq.adopt(ready).unwrap_err();
    assert!(failed.to_string().contains("not in state RESET"), "{failed}");
    // A dropped queue pair makes room.
    let mut more = Vec::new();
    while let Ok(qp) = owned.cq.adopt(fresh(&owned.bench, owned.cq.queue())) {
        more.push(qp);
    }
    assert!(more.len() > 2);
    more.pop();
    owned.cq.adopt(fresh(&owned.bench, owned.cq.queue())).unwrap();
}

/// Completions of dropped queue pairs take room until the queue is polled.
#[test]
fn completions_of_dropped_queue_pairs_make_room_for_new_ones() {
    let mut owned = Owned::new();
    let (script, handle) = (owned.bench.script.clone(), owned.cq.queue().handle());
    let depth = owned.qp.caps().max_send_wr;
    // Each queue pair leaves completions in the queue, and nobody polls.
    for _ in 0..=owned.cq.queue().capacity() / depth {
        let mut qp = owned.cq.adopt(fresh(&owned.bench, owned.cq.queue())).unwrap();
        bring_up_owned(&owned.bench.script, &qp);
        for _ in 0..depth {
            let mut batch = qp.send_batch().unwrap();
            batch.push(SendWr::send(&[]).inline(b"x"), (), "x").unwrap();
            batch.ring().unwrap();
            let request = script.take(qp.handle(), Role::Send).unwrap();
            let id = u64::from_ne_bytes(request[..8].try_into().unwrap());
            assert!(script.complete(handle, wc(qp.qpn().0, id)), "the queue overflowed");
        }
    }
    assert!(owned.tags().is_empty());
}

/// Dropping a queue pair drops tags of the program, which may panic.
#[test]
fn a_panic_while_a_queue_pair_is_dropped_frees_its_room() {
    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("as planned");
        }
    }
    let bench = Bench::new();
    let pool = bench.pd.buffer_pool_builder(64).count(8).build().unwrap();
    let mut cq = OwnedCompletionQueue::new(bench.context.cq_builder(20).build().unwrap());
    for _ in 0..3 {
        let mut qp = cq.adopt(fresh(&bench, cq.queue())).unwrap();
        bring_up_owned(&bench.script, &qp);
        let mut batch = qp.send_batch().unwrap();
        batch.push(SendWr::send(&[]), pool.take().unwrap(), Some(Panics)).unwrap();
        batch.push(SendWr::send(&[]), pool.take().unwrap(), None).unwrap();
        batch.ring().unwrap();
        let mut batch = qp.recv_batch().unwrap();
        batch.push(pool.take().unwrap(), None).unwrap();
        batch.push(pool.take().unwrap(), Some(Panics)).unwrap();
        batch.push(pool.take().unwrap(), None).unwrap();
        batch.ring().unwrap();
        let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(qp)));
        assert!(dropped.is_err());
        assert_eq!(pool.idle(), 8, "a panic keeps nothing else lent");
    }
}

#[test]
fn a_shared_receive_comes_back_through_any_queue_pair() {
    let bench = Bench::new();
    let pool = bench.pd.buffer_pool_builder(64).count(8).build().unwrap();
    let mut cq = OwnedCompletionQueue::new(bench.context.cq_builder(64).build().unwrap());
    let srq = bench.pd.srq_builder(4).build().unwrap();
    let mut srq = OwnedSharedReceiveQueue::new(srq).unwrap();
    let make = |cq: &CompletionQueue| {
        bench.pd.qp_builder(cq, cq, QpType::RC).max_send_wr(4).srq(srq.queue()).build().unwrap()
    };
    let qps = [make(cq.queue()), make(cq.queue())];
    let qps = qps.map(|qp| cq.adopt_on(qp, &srq).unwrap());
    let failed = cq.adopt(make(cq.queue())).unwrap_err();
    assert!(failed.to_string().contains("call adopt_on"), "{failed}");
    drop(failed);
    let other = bench.pd.srq_builder(4).build().unwrap();
    let other = OwnedSharedReceiveQueue::new(other).unwrap();
    let plain = bench.pd.qp_builder(cq.queue(), cq.queue(), QpType::RC).build().unwrap();
    for (qp, srq, source) in
        [(make(cq.queue()), &other, "another shared receive queue"), (plain, &srq, "its own queue")]
    {
        let failed = cq.adopt_on(qp, srq).unwrap_err();
        assert!(failed.to_string().contains(source), "{failed}");
    }
    let mut batch = srq.batch().unwrap();
    for tag in 0..3 {
        batch.push(pool.take().unwrap(), tag).unwrap();
    }
    batch.ring().unwrap();
    let handle = srq.queue().handle();
    let taken = || bench.script.take(handle, Role::Recv).unwrap();
    for qp in &qps {
        let request = taken();
        let id = u64::from_ne_bytes(request[..8].try_into().unwrap());
        assert!(bench.script.complete(cq.queue().handle(), wc(qp.qpn().0, id)));
    }
    let tags: Vec<i32> = cq.poll().unwrap().map(|done| done.tag).collect();
    assert_eq!((tags, pool.idle()), (vec![0, 1], 7));
    let [one, other] = qps;
    drop((srq, one));
    assert_eq!(pool.idle(), 7, "a queue pair still takes from it");
    drop(other);
    assert_eq!((pool.idle(), bench.context.leaked()), (8, 0));
    assert_eq!(bench.script.complaints(), [""; 0]);
}

/// The oldest receive may wait for a message of a peer that is silent.
#[test]
fn a_shared_queue_has_room_as_soon_as_any_of_its_receives_is_over() {
    let bench = Bench::new();
    let pool = bench.pd.buffer_pool_builder(64).count(16).build().unwrap();
    let mut cq = OwnedCompletionQueue::new(bench.context.cq_builder(64).build().unwrap());
    let mut srq = OwnedSharedReceiveQueue::new(bench.pd.srq_builder(4).build().unwrap()).unwrap();
    let builder = bench.pd.qp_builder(cq.queue(), cq.queue(), QpType::RC).srq(srq.queue());
    let qp = cq.adopt_on(builder.build().unwrap(), &srq).unwrap();
    let post = |srq: &mut OwnedSharedReceiveQueue<u32>, tag| {
        let mut batch = srq.batch().unwrap();
        let posted = batch.push(pool.take().unwrap(), tag).map_err(|refused| refused.error);
        batch.ring().unwrap();
        posted
    };
    let depth = srq.depth() as u32;
    (0..depth).for_each(|tag| post(&mut srq, tag).unwrap());
    let handle = srq.queue().handle();
    let take = || {
        let request = bench.script.take(handle, Role::Recv).unwrap();
        u64::from_ne_bytes(request[..8].try_into().unwrap())
    };
    let mut ids: Vec<_> = (0..depth).map(|_| take()).collect();
    for (at, next) in [(2, depth), (1, depth + 1), (2, depth + 2)] {
        assert!(bench.script.complete(cq.queue().handle(), wc(qp.qpn().0, ids[at])));
        assert_eq!((cq.poll().unwrap().count(), srq.room()), (1, 1));
        post(&mut srq, next).unwrap();
        ids[at] = take();
        assert_eq!(post(&mut srq, 99), Err(PostError::Full));
    }
}

/// The `wr_id` of a receive that was posted before may equal that of a receive that lends memory.
#[test]
fn a_shared_queue_that_was_posted_to_is_not_taken_over() {
    let bench = Bench::new();
    let post = |srq: &mut crate::SharedReceiveQueue| {
        let mut batch = srq.batch().unwrap();
        batch.push(crate::RecvWr::new(&[]).id(7)).unwrap();
        // SAFETY: the receive names no memory.
        #[allow(unsafe_code, reason = "the point of the test")]
        unsafe {
            batch.ring().unwrap();
        }
    };
    let mut posted = bench.pd.srq_builder(4).build().unwrap();
    post(&mut posted);
    let refused = OwnedSharedReceiveQueue::<u32>::new(posted).unwrap_err();
    assert_eq!(refused.error.errno(), Errno::INVAL);
    assert!(refused.error.message().contains("posted to before"), "{refused}");
    // It comes back with the error.
    let mut posted = refused.into_object();
    post(&mut posted);
    posted.destroy().unwrap();

    let mut resized = bench.pd.srq_builder(4).build().unwrap();
    resized.resize(8).unwrap();
    OwnedSharedReceiveQueue::<u32>::new(resized).unwrap();
    let mut resized = bench.pd.srq_builder(4).build().unwrap();
    post(&mut resized);
    assert!(bench.script.take(resized.handle(), Role::Recv).is_some());
    resized.resize(8).unwrap();
    assert!(OwnedSharedReceiveQueue::<u32>::new(resized).is_err(), "resizing forgets nothing");

    let context = Script::mlx5().open("mlx5_0");
    let pd = context.alloc_pd().unwrap();
    let mut srq = pd.srq_builder(4).build().unwrap();
    post(&mut srq);
    assert!(OwnedSharedReceiveQueue::<u32>::new(srq).is_err(), "mlx5");
    let fresh = OwnedSharedReceiveQueue::<u32>::new(pd.srq_builder(4).build().unwrap()).unwrap();
    assert!(fresh.depth() >= 4);
}

#[test]
fn a_flushed_request_gives_its_memory_back() {
    let mut owned = Owned::new();
    owned.recv("one");
    let id = owned.taken(Role::Recv);
    let status = WcStatus::WR_FLUSH_ERR.0;
    owned.complete_as(ib_uverbs_wc { status, ..wc(owned.qp.qpn().0, id) });
    let done = owned.cq.poll().unwrap().next().unwrap();
    assert!(!done.outcome.is_success());
    assert!(done.memory.into_buffer().is_some());
}

/// rxe assigns numbers in a circle. The next queue pair with a number may be one that chooses its `wr_id`s
/// itself.
#[test]
fn completions_of_a_queue_pair_that_was_not_adopted_give_no_shared_receive_back() {
    let bench = Bench::new();
    let pool = bench.pd.buffer_pool_builder(64).count(8).build().unwrap();
    let mut cq = OwnedCompletionQueue::new(bench.context.cq_builder(64).build().unwrap());
    let mut srq = OwnedSharedReceiveQueue::new(bench.pd.srq_builder(4).build().unwrap()).unwrap();
    let (pd, script) = (&bench.pd, &bench.script);
    let make = |cq: &CompletionQueue, srq: &OwnedSharedReceiveQueue<i32>| {
        script.set_next_qpn(77);
        pd.qp_builder(cq, cq, QpType::RC).srq(srq.queue()).build().unwrap()
    };
    let first = make(cq.queue(), &srq);
    assert_eq!(first.qpn().0, 77);
    let first = cq.adopt_on(first, &srq).unwrap();
    let mut batch = srq.batch().unwrap();
    batch.push(pool.take().unwrap(), 1).unwrap();
    batch.ring().unwrap();
    let request = script.take(srq.queue().handle(), Role::Recv).unwrap();
    let id = u64::from_ne_bytes(request[..8].try_into().unwrap());
    drop(first);
    script.set_next_qpn(77);
    let stranger = pd.qp_builder(cq.queue(), cq.queue(), QpType::RC).build().unwrap();
    assert!(script.complete(cq.queue().handle(), wc(stranger.qpn().0, id)));
    assert_eq!((cq.poll().unwrap().count(), cq.unmatched()), (0, 1));
    assert_eq!(pool.idle(), 7, "the device may write it yet");
    // When the number is no longer in the map, it can be assigned again.
    drop(stranger);
    let _second = cq.adopt_on(make(cq.queue(), &srq), &srq).unwrap();
    assert_eq!(make(cq.queue(), &srq).qpn().0, 77);
}

#[test]
fn a_shared_buffer_and_its_slices_read_the_same_bytes() {
    let owned = Owned::new();
    let mut buffer = owned.pool.copy(b"to be read by many").unwrap();
    assert_eq!(buffer.as_ref(), b"to be read by many");
    buffer.advance(3);
    let shared = buffer.share();
    let part = shared.slice(3..5).unwrap();
    for (buffer, bytes) in
        [(&shared, &b"be read by many"[..]), (&part, b"re"), (&part.clone(), b"re")]
    {
        let looks: [&[u8]; 2] = [buffer, buffer.as_ref()];
        assert_eq!(looks, [bytes; 2]);
        assert_eq!(buffer.sge().length as usize, bytes.len());
    }
    assert_eq!(part.sge().addr, shared.sge().addr + 3);
}

/// A buffer begins later after `advance`, and never ends later than it did.
#[test]
fn a_buffer_s_capacity_reaches_from_its_first_byte_to_its_end() {
    let owned = Owned::new();
    assert_eq!((owned.pool.buffer_size(), owned.pool.count()), (64, 8));
    let mut buffer = owned.pool.take().unwrap();
    for (byte, at) in buffer.iter_mut().zip(0..) {
        *byte = at;
    }
    let sizes = |buffer: &crate::owned::Buffer| (buffer.len(), buffer.capacity());
    assert_eq!(sizes(&buffer), (64, 64));
    buffer.advance(7);
    assert_eq!((sizes(&buffer), buffer[0]), ((57, 57), 7));
    buffer.set_len(5);
    assert_eq!(sizes(&buffer), (5, 57));
    buffer.set_len(100);
    assert_eq!((sizes(&buffer), buffer[56]), ((57, 57), 63));
    buffer.set_len(5);
    buffer.advance(9);
    assert_eq!(sizes(&buffer), (0, 52));
    buffer.set_len(1);
    assert_eq!(buffer[..], [12]);
    buffer.reset();
    assert_eq!((sizes(&buffer), buffer[0]), ((64, 64), 0));
}

#[test]
fn a_pool_has_1_to_2_to_the_31st_buffers_and_bytes_in_each() {
    const MOST: usize = 1 << 31;
    let bench = Bench::new();
    for (size, count) in [(0, 1), (1, 0), (MOST + 1, 1), (1, MOST + 1), (usize::MAX, 1)] {
        let error = bench.pd.buffer_pool_builder(size).count(count).build().unwrap_err();
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
        assert!(error.message().contains("1 to 2147483648 can be had"), "{error}");
    }
    let least = bench.pd.buffer_pool_builder(1).count(1).build().unwrap();
    assert!(least.take().is_ok());
}

/// The remote address for a peer is the buffer's present beginning.
#[test]
fn peers_may_read_the_buffers_of_a_pool_that_was_built_so() {
    let bench = Bench::new();
    for readable in [false, true] {
        let builder = bench.pd.buffer_pool_builder(64).count(2);
        let (builder, access) = match readable {
            false => (builder, Access::LOCAL_WRITE),
            true => (builder.remote_read(), Access::LOCAL_WRITE | Access::REMOTE_READ),
        };
        let pool = builder.build().unwrap();
        let (_, region) = bench.script.live().pop().unwrap();
        let region = bench.script.object(region);
        assert_eq!(region.access, access.bits());
        for _ in 0..2 {
            let mut buffer = pool.take().unwrap();
            buffer.advance(5);
            let Remote { addr, rkey } = buffer.remote();
            assert_eq!((addr, rkey), (buffer.as_ptr().addr() as u64, Rkey(region.number)));
            let Sge { addr, length, lkey } = buffer.sge();
            assert_eq!((addr, lkey), (buffer.as_ptr().addr() as u64, Lkey(region.number)));
            assert_eq!(length, 59);
        }
    }
}

/// For all requested depths.
#[test]
fn a_queue_takes_as_many_requests_as_its_depth_says() {
    let bench = Bench::new();
    for wanted in [1, 4, 9] {
        let pool = bench.pd.buffer_pool_builder(64).count(32).build().unwrap();
        let srq = bench.pd.srq_builder(wanted).build().unwrap();
        let granted = srq.query().unwrap().max_wr as usize;
        let mut srq = OwnedSharedReceiveQueue::new(srq).unwrap();
        assert_eq!((srq.depth(), srq.room()), (granted, granted), "of {wanted}");
        srq.set_limit(granted as u32).unwrap();
        assert_eq!(srq.queue().query().unwrap().limit as usize, granted);
        let depth = srq.depth();
        let mut batch = srq.batch().unwrap();
        for posted in 0..depth {
            assert_eq!((batch.len() as usize, batch.is_empty()), (posted, posted == 0));
            batch.push(pool.take().unwrap(), "x").unwrap();
        }
        assert_eq!(error(batch.push(pool.take().unwrap(), "x").unwrap_err()), PostError::Full);
        batch.ring().unwrap();
        assert_eq!((srq.depth(), srq.room()), (depth, 0));

        let mut cq = OwnedCompletionQueue::new(bench.context.cq_builder(64).build().unwrap());
        let builder = bench.pd.qp_builder(cq.queue(), cq.queue(), QpType::RC);
        let builder = builder.max_send_wr(wanted).max_recv_wr(wanted).max_inline_data(4);
        let mut qp = cq.adopt(builder.build().unwrap()).unwrap();
        bring_up_owned(&bench.script, &qp);
        let (sends, recvs) = (qp.caps().max_send_wr, qp.caps().max_recv_wr);
        assert!(sends >= wanted && recvs >= wanted, "{:?}", qp.caps());
        assert_eq!((qp.send_room(), qp.recv_room()), (sends as usize, recvs as usize));
        let mut batch = qp.send_batch().unwrap();
        for posted in 0..sends {
            assert_eq!((batch.len(), batch.is_empty()), (posted, posted == 0));
            batch.push(SendWr::send(&[]).inline(b"x"), (), "x").unwrap();
        }
        let refused = batch.push(SendWr::send(&[]).inline(b"x"), (), "x").unwrap_err();
        assert_eq!(error(refused), PostError::Full);
        batch.ring().unwrap();
        let mut batch = qp.recv_batch().unwrap();
        for posted in 0..recvs {
            assert_eq!((batch.len(), batch.is_empty()), (posted, posted == 0));
            batch.push(pool.take().unwrap(), "x").unwrap();
        }
        assert_eq!(error(batch.push(pool.take().unwrap(), "x").unwrap_err()), PostError::Full);
        batch.ring().unwrap();
        assert_eq!((qp.send_room(), qp.recv_room()), (0, 0));
    }
}
