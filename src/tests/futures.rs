//! Requests as futures, on the scripted kernel, in an event loop that the test drives.

use super::wakers::waker_of;
use super::{Bench, connect_to_itself, wc};
use crate::aio::{
    AsyncCompletionQueue, AsyncQueuePair, AsyncSharedReceiveQueue, Driver, Locking, OpError,
    OpErrorKind, Readiness,
};
use crate::memory::region::StableBytes;
use crate::owned::{BufferPool, Finished, Lend, Memory, RegionSge, RegionSlice, RegisteredBuffer};
use crate::uverbs::scripted::{Op, Role, Script};
use crate::{
    Access, Errno, Exclusive, PostError, ProtectionDomain, QpState, QpType, Remote, Result, Rkey,
    Shared, WcOpcode, WcStatus,
};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::future::Future;
use std::pin::Pin;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;
use uverbs_uapi::object::{UVERBS_OBJECT_CQ, UVERBS_OBJECT_SRQ};
use uverbs_uapi::wc::ib_uverbs_wc;

/// An event loop that reports the file as readable when the test says so.
#[derive(Default)]
pub(crate) struct Watched(Arc<AtomicBool>);

impl Watched {
    /// Reports the file as readable once.
    pub(crate) fn report(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Readiness for Watched {
    fn poll_read(
        &mut self,
        _: &mut Context<'_>,
        read: &mut dyn FnMut() -> Result<()>,
    ) -> Poll<Result<()>> {
        if self.0.swap(false, Ordering::Relaxed) { Poll::Ready(read()) } else { Poll::Pending }
    }
}

/// A waker that counts its calls.
#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

pub(crate) struct Futures<S: Kind = Shared> {
    pub(crate) bench: Bench,
    pub(crate) pd: ProtectionDomain<S>,
    pub(crate) pool: BufferPool,
    pub(crate) driver: Driver<Watched, S>,
    pub(crate) cq: AsyncCompletionQueue<S>,
    pub(crate) qp: AsyncQueuePair<S>,
    /// The kernel's completion queue.
    handle: u32,
}

pub(crate) fn cx() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

/// The kinds of futures: those of any thread, and those of one.
pub(crate) trait Kind: Locking {
    /// A protection domain, a completion queue and its driver.
    fn make(bench: &Bench) -> Made<Self>;
}

type Made<S> = (ProtectionDomain<S>, AsyncCompletionQueue<S>, Driver<Watched, S>);

impl Kind for Shared {
    fn make(bench: &Bench) -> Made<Shared> {
        let made = bench.context.cq_builder(64).build_async(|_| Ok(Watched::default()));
        let (cq, driver) = made.unwrap();
        (ProtectionDomain::of(bench.pd.inner.clone()), cq, driver)
    }
}

impl Kind for Exclusive {
    fn make(bench: &Bench) -> Made<Exclusive> {
        let td = bench.context.alloc_td().unwrap();
        let domain = bench.pd.parent_domain_builder().thread_domain(&td).build().unwrap();
        let worker = bench.context.cq_builder(64).build_worker(td).unwrap();
        let (cq, driver) = worker.start(|_| Ok(Watched::default())).unwrap();
        (ProtectionDomain::of(domain.inner.clone()), cq, driver)
    }
}

/// Each test once for futures of any thread, and once for those of one.
macro_rules! for_each_kind {
    ($($test:ident)*) => {
        mod shared {
            $(#[test] fn $test() { super::$test::<crate::Shared>(); })*
        }

        mod exclusive {
            $(#[test] fn $test() { super::$test::<crate::Exclusive>(); })*
        }
    };
}
pub(crate) use for_each_kind;

for_each_kind! {
    futures_fail_when_the_device_is_gone
    a_request_that_the_kernel_refuses_to_send_is_flushed
    an_inbox_has_receives_posted_when_it_is_made
    an_inbox_deeper_than_the_queue_keeps_it_full
    an_inbox_posts_in_batches
    an_inbox_without_another_message_has_all_receives_posted
    an_inbox_leaves_the_pool_to_others
    a_shared_inbox_posts_all_receives_that_have_room
    a_shared_inbox_returns_all_messages_before_the_drivers_end
    fill_wakes_for_new_receives_only
    fill_wakes_a_task_that_found_no_buffer
    an_inbox_that_was_filled_too_early_is_filled_later
    a_message_shows_no_byte_that_did_not_arrive
    a_datagram_without_a_header_lies_behind_zeros
    an_inbox_of_a_broken_connection_repeats_its_error
    an_inbox_whose_driver_has_ended_repeats_its_error
    a_shared_receive_queue_of_another_completion_queue_is_refused
    a_queue_pair_that_was_dropped_leaves_its_requests_to_nobody
    a_queue_pair_that_is_dropped_ends_the_receives_that_it_took
    adopting_leaves_the_requests_of_others_to_their_futures
    a_driver_ends_when_the_last_handle_is_dropped
    messages_of_a_shared_queue_are_shown_in_the_order_in_which_they_came
    an_inbox_says_why_its_receives_cannot_be_posted
    aborting_flushes_posted_requests_and_refuses_the_rest
    completions_of_no_request_are_counted
    memory_comes_back_from_a_request_with_its_type
    requests_that_are_over_leave_room_although_nobody_fetched_them
}

impl Futures {
    pub(crate) fn new() -> Futures {
        Futures::of()
    }
}

impl<S: Kind> Futures<S> {
    pub(crate) fn of() -> Futures<S> {
        let mut futures = Futures::on(Bench::new());
        futures.bring_up();
        futures
    }

    /// On mlx5, whose sends need no checks, with a queue pair that is connected to itself.
    pub(crate) fn connected() -> Futures<S> {
        let futures = Futures::on(Bench::on(Script::mlx5()));
        connect_to_itself(&futures.bench.context, &futures.qp);
        futures
    }

    fn on(bench: Bench) -> Futures<S> {
        let pool = bench.pd.buffer_pool_builder(64).count(64).build().unwrap();
        let (pd, cq, driver) = S::make(&bench);
        let mut cqs = bench.script.live().into_iter().filter(|(kind, _)| *kind == UVERBS_OBJECT_CQ);
        let (_, handle) = cqs.next_back().unwrap();
        let builder = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(4).max_recv_wr(4);
        let qp = cq.adopt(builder.max_inline_data(8).build().unwrap()).unwrap();
        Futures { bench, pd, pool, driver, cq, qp, handle }
    }

    /// Gives the test a queue pair of so many receives.
    fn with_receives(&mut self, max_recv_wr: u32) {
        let builder = self.pd.qp_builder(&self.cq, &self.cq, QpType::RC).max_send_wr(1);
        self.qp = self.cq.adopt(builder.max_recv_wr(max_recv_wr).build().unwrap()).unwrap();
        self.bring_up();
    }

    /// How many receives the queue pair has posted.
    fn posted(&self) -> usize {
        self.bench.script.pending(self.qp.handle(), Role::Recv) as usize
    }

    /// Lets a message arrive in the oldest receive of a shared receive queue, and polls the driver.
    fn receive(&mut self, srq: u32) {
        let request = self.bench.script.take(srq, Role::Recv).expect("a receive");
        let wr_id = u64::from_ne_bytes(request[..8].try_into().unwrap());
        let wc = ib_uverbs_wc { opcode: WcOpcode::RECV.0, ..wc(self.qp.qpn().0, wr_id) };
        assert!(self.bench.script.complete(self.handle, wc));
        assert!(Pin::new(&mut self.driver).poll(&mut cx()).is_pending());
    }

    fn srq(&self) -> AsyncSharedReceiveQueue<S> {
        self.cq.adopt_srq(self.bench.pd.srq_builder(4).build().unwrap()).unwrap()
    }

    fn qp_on(&self, srq: &AsyncSharedReceiveQueue<S>) -> AsyncQueuePair<S> {
        let builder = self.pd.qp_builder(&self.cq, &self.cq, QpType::RC).srq(srq);
        self.cq.adopt_on(builder.build().unwrap(), srq).unwrap()
    }

    fn bring_up(&mut self) {
        self.qp.qp.set_state(QpState::RTS);
        self.bench.script.set_qp_state(self.qp.handle(), QpState::RTS.0);
    }

    /// Completes the oldest request of a queue, and polls the driver.
    pub(crate) fn complete(&mut self, role: Role, status: WcStatus) {
        self.complete_as(role, ib_uverbs_wc { status: status.0, ..wc(0, 0) });
    }

    /// The same, with a completion whose queue pair and `wr_id` are filled in.
    pub(super) fn complete_as(&mut self, role: Role, wc: ib_uverbs_wc) {
        let request = self.bench.script.take(self.qp.handle(), role).expect("a request");
        let wr_id = u64::from_ne_bytes(request[..8].try_into().unwrap());
        let wc = ib_uverbs_wc { qp_num: self.qp.qpn().0, wr_id, ..wc };
        assert!(self.bench.script.complete(self.handle, wc));
        assert!(Pin::new(&mut self.driver).poll(&mut cx()).is_pending());
    }
}

/// The kernel neither sends the requests nor flushes them.
fn futures_fail_when_the_device_is_gone<S: Kind>() {
    let futures = Futures::<S>::of();
    let (mut sent, mut received) = (
        futures.qp.send(futures.pool.take().unwrap()),
        futures.qp.recv(futures.pool.take().unwrap()),
    );
    assert!(Pin::new(&mut received).poll(&mut cx()).is_pending());
    futures.bench.script.refuse(Op::POST_SEND, Errno::IO);
    futures.bench.script.refuse(Op::MODIFY_QP, Errno::IO);
    assert!(Pin::new(&mut sent).poll(&mut cx()).is_pending(), "it stays in the queue");
    for op in [sent, received] {
        let Poll::Ready(end) = Pin::new(&mut { op }).poll(&mut cx()) else { panic!("it waits") };
        let OpError { memory, kind } = end.unwrap_err();
        assert_eq!((memory.is_none(), kind), (true, OpErrorKind::DriverGone));
    }
    assert_eq!(futures.qp.in_flight(), 2, "the device may yet work on them");
    let mut late = futures.qp.send(futures.pool.take().unwrap());
    let Poll::Ready(Err(error)) = Pin::new(&mut late).poll(&mut cx()) else { panic!("posted") };
    assert_eq!((error.memory.is_some(), error.kind), (true, OpErrorKind::DriverGone));
}

/// The device is still there, and flushes the posted requests.
fn a_request_that_the_kernel_refuses_to_send_is_flushed<S: Kind>() {
    let mut futures = Futures::<S>::of();
    futures.bench.script.refuse(Op::POST_SEND, Errno::NOMEM);
    let mut sent = futures.qp.send(futures.pool.take().unwrap());
    assert!(Pin::new(&mut sent).poll(&mut cx()).is_pending());
    assert_eq!(futures.bench.script.object(futures.qp.handle()).state, QpState::ERR.0);
    assert!(Pin::new(&mut sent).poll(&mut cx()).is_pending());
    futures.complete(Role::Send, WcStatus::WR_FLUSH_ERR);
    let Poll::Ready(Err(error)) = Pin::new(&mut sent).poll(&mut cx()) else { panic!("it waits") };
    assert_eq!(error.kind, OpErrorKind::Status(WcStatus::WR_FLUSH_ERR));
    assert!(error.memory.is_some());
}

/// A datagram that comes before the inbox is polled is not lost.
fn an_inbox_has_receives_posted_when_it_is_made<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let posted =
        |futures: &Futures<S>| futures.bench.script.pending(futures.qp.handle(), Role::Recv);
    let mut inbox = futures.qp.inbox(&futures.pool, 2);
    assert_eq!(posted(&futures), 2);
    futures.complete(Role::Recv, WcStatus::SUCCESS);
    assert!(matches!(inbox.poll_next(&mut cx()), Poll::Ready(Ok(Finished { .. }))));
    // In state RESET nothing can be posted, and it is no error.
    let builder = futures.pd.qp_builder(&futures.cq, &futures.cq, QpType::RC).max_recv_wr(4);
    futures.qp = futures.cq.adopt(builder.build().unwrap()).unwrap();
    let mut inbox = futures.qp.inbox(&futures.pool, 2);
    assert_eq!(posted(&futures), 0);
    futures.bring_up();
    assert_eq!(inbox.fill(), 2);
    // A shared receive queue has no state.
    let srq = futures.pd.srq_builder(4).build().unwrap();
    let handle = srq.handle();
    let srq = futures.cq.adopt_srq(srq).unwrap();
    let inbox = srq.inbox(&futures.pool, 3);
    assert_eq!(futures.bench.script.pending(handle, Role::Recv), 3);
    drop(inbox);
}

fn an_inbox_deeper_than_the_queue_keeps_it_full<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let room = futures.qp.caps().max_recv_wr as usize;
    let mut inbox = futures.qp.inbox(&futures.pool, 2 * room);
    assert_eq!(inbox.fill(), room);
    for round in 0..4 * room {
        futures.complete(Role::Recv, WcStatus::SUCCESS);
        let Poll::Ready(Ok(Finished { .. })) = inbox.poll_next(&mut cx()) else {
            panic!("{round}")
        };
        let pending = futures.bench.script.pending(futures.qp.handle(), Role::Recv);
        assert_eq!(pending as usize, room, "after {round}");
    }
    assert!(inbox.poll_next(&mut cx()).is_pending());
    // More receives than any queue holds.
    drop(inbox);
    drop(futures.qp.inbox(&futures.pool, usize::MAX));
}

/// While other messages are there, receives are posted when a quarter of the depth is missing.
fn an_inbox_posts_in_batches<S: Kind>() {
    let mut futures = Futures::<S>::of();
    futures.with_receives(16);
    let mut inbox = futures.qp.inbox(&futures.pool, 16);
    (0..6).for_each(|_| futures.complete(Role::Recv, WcStatus::SUCCESS));
    for posted in [10, 10, 10, 14, 14, 16] {
        let Poll::Ready(Ok(Finished { .. })) = inbox.poll_next(&mut cx()) else { panic!("none") };
        assert_eq!(futures.posted(), posted);
    }
    drop(inbox);
    // The same on a shared receive queue.
    let srq = futures.cq.adopt_srq(futures.bench.pd.srq_builder(16).build().unwrap()).unwrap();
    let handle = srq_handle(&futures.bench);
    futures.qp = futures.qp_on(&srq);
    let mut inbox = srq.inbox(&futures.pool, 16);
    (0..6).for_each(|_| futures.receive(handle));
    for posted in [10, 10, 10, 14, 14, 16] {
        let Poll::Ready(Ok(Finished { .. })) = inbox.poll_next(&mut cx()) else { panic!("none") };
        assert_eq!(futures.bench.script.pending(handle, Role::Recv), posted);
    }
}

/// A peer that may send as many messages as there are receives finds them, although the program does not poll again.
fn an_inbox_without_another_message_has_all_receives_posted<S: Kind>() {
    let mut futures = Futures::<S>::of();
    futures.with_receives(8);
    let mut inbox = futures.qp.inbox(&futures.pool, 8);
    for _ in 0..20 {
        futures.complete(Role::Recv, WcStatus::SUCCESS);
        assert!(matches!(inbox.poll_next(&mut cx()), Poll::Ready(Ok(_))));
        assert_eq!(futures.posted(), 8);
    }
}

/// A waker is cloned while receives are posted.
fn an_inbox_leaves_the_pool_to_others<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let room = futures.qp.caps().max_recv_wr as usize;
    let fewest = Arc::new(AtomicUsize::new(64));
    let (pool, noted) = (futures.pool.clone(), fewest.clone());
    let waker = waker_of(move || _ = noted.fetch_min(pool.idle(), Ordering::Relaxed));
    let mut context = Context::from_waker(&waker);
    let mut inbox = futures.qp.inbox(&futures.pool, usize::MAX);
    assert!(inbox.poll_next(&mut context).is_pending());
    for _ in 0..2 * room {
        futures.complete(Role::Recv, WcStatus::SUCCESS);
        assert!(matches!(inbox.poll_next(&mut context), Poll::Ready(Ok(_))));
    }
    // Those that are posted, one that waits, and one that is tried.
    let fewest = fewest.load(Ordering::Relaxed);
    assert!(fewest < 64 && fewest >= 64 - room - 2, "{fewest}");
}

/// The first one waited for room, and there is room for the others, too.
fn a_shared_inbox_posts_all_receives_that_have_room<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let make = |futures: &Futures<S>| {
        futures.cq.adopt_srq(futures.bench.pd.srq_builder(16).build().unwrap()).unwrap()
    };
    // A device may grant more than 16.
    let room = make(&futures).inbox(&futures.pool, 64).fill();
    let srq = make(&futures);
    let handle = srq_handle(&futures.bench);
    futures.qp = futures.qp_on(&srq);
    let mut others = [(); 4].map(|()| srq.recv(futures.pool.take().unwrap()));
    others.iter_mut().for_each(|op| assert!(Pin::new(op).poll(&mut cx()).is_pending()));
    let mut inbox = srq.inbox(&futures.pool, room);
    assert_eq!(inbox.fill(), room - 4);
    for op in &mut others {
        futures.receive(handle);
        assert!(Pin::new(op).poll(&mut cx()).is_ready());
    }
    assert!(inbox.poll_next(&mut cx()).is_pending());
    assert_eq!(futures.bench.script.pending(handle, Role::Recv) as usize, room);
}

fn a_shared_inbox_returns_all_messages_before_the_drivers_end<S: Kind>() {
    for depth in [3, 16] {
        let mut futures = Futures::<S>::of();
        let srq = futures.cq.adopt_srq(futures.bench.pd.srq_builder(16).build().unwrap()).unwrap();
        let handle = srq_handle(&futures.bench);
        futures.qp = futures.qp_on(&srq);
        let mut inbox = srq.inbox(&futures.pool, depth);
        (0..2).for_each(|_| futures.receive(handle));
        drop(futures.driver);
        for n in 0..2 {
            let next = inbox.poll_next(&mut cx());
            assert!(matches!(next, Poll::Ready(Ok(_))), "message {n} of depth {depth}: {next:?}");
            inbox.fill();
        }
        let Poll::Ready(Err(error)) = inbox.poll_next(&mut cx()) else { panic!("it waits") };
        assert_eq!(error.kind, OpErrorKind::DriverGone);
    }
}

/// A task that keeps receives posted and takes no message would run for ever.
fn fill_wakes_for_new_receives_only<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let count = Arc::<Count>::default();
    let (waker, woken) = (Waker::from(count.clone()), &count.0);
    let srq = futures.srq();
    let handle = srq_handle(&futures.bench);
    let mut inbox = futures.qp.inbox(&futures.pool, 4);
    assert!(inbox.poll_next(&mut Context::from_waker(&waker)).is_pending());
    futures.complete(Role::Recv, WcStatus::SUCCESS);
    assert_eq!(woken.load(Ordering::Relaxed), 1, "by the message");
    (0..3).for_each(|_| assert_eq!(inbox.fill(), 4));
    assert_eq!(woken.swap(0, Ordering::Relaxed), 1);
    // A message of an older receive wakes the task that polled last.
    assert!(inbox.poll_next(&mut Context::from_waker(&waker)).is_ready());
    inbox.fill();
    futures.complete(Role::Recv, WcStatus::SUCCESS);
    assert_eq!(woken.swap(0, Ordering::Relaxed), 1);
    // Of a shared receive queue.
    futures.qp = futures.qp_on(&srq);
    let mut inbox = srq.inbox(&futures.pool, 4);
    assert!(inbox.poll_next(&mut Context::from_waker(&waker)).is_pending());
    futures.receive(handle);
    assert_eq!(woken.load(Ordering::Relaxed), 1, "by the message");
    (0..3).for_each(|_| assert_eq!(inbox.fill(), 4));
    assert_eq!(woken.load(Ordering::Relaxed), 1);
}

fn fill_wakes_a_task_that_found_no_buffer<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let pool = futures.bench.pd.buffer_pool_builder(64).count(2).build().unwrap();
    let count = Arc::<Count>::default();
    let (waker, woken) = (Waker::from(count.clone()), &count.0);
    let mut context = Context::from_waker(&waker);
    let held = [pool.take().unwrap(), pool.take().unwrap()];
    let mut inbox = futures.qp.inbox(&pool, 2);
    assert!(inbox.poll_next(&mut context).is_pending());
    drop(held);
    assert_eq!((inbox.fill(), woken.load(Ordering::Relaxed)), (2, 0));
    futures.complete(Role::Recv, WcStatus::SUCCESS);
    assert_eq!(woken.swap(0, Ordering::Relaxed), 1, "by the message");
    drop(inbox);
    // A receive that is refused is told of once.
    let builder = futures.pd.qp_builder(&futures.cq, &futures.cq, QpType::RC).max_recv_wr(4);
    let qp = futures.cq.adopt(builder.build().unwrap()).unwrap();
    let (pool, mut buffers) = (futures.pool.clone(), Vec::new());
    buffers.extend(std::iter::from_fn(|| pool.take().ok()));
    let mut inbox = qp.inbox(&pool, 2);
    assert!(inbox.poll_next(&mut context).is_pending());
    drop(buffers);
    (0..3).for_each(|_| assert_eq!(inbox.fill(), 0));
    assert_eq!(woken.load(Ordering::Relaxed), 1);
    let Poll::Ready(Err(error)) = inbox.poll_next(&mut context) else { panic!("it waits") };
    assert_eq!(error.kind, OpErrorKind::Post(PostError::State(QpState::RESET)));
}

/// A refused receive keeps none of later calls from posting.
fn an_inbox_that_was_filled_too_early_is_filled_later<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let builder = futures.pd.qp_builder(&futures.cq, &futures.cq, QpType::RC).max_recv_wr(4);
    futures.qp = futures.cq.adopt(builder.build().unwrap()).unwrap();
    let mut inbox = futures.qp.inbox(&futures.pool, 3);
    assert_eq!((inbox.fill(), inbox.fill()), (0, 0));
    futures.bring_up();
    assert_eq!(inbox.fill(), 3);
    futures.complete(Role::Recv, WcStatus::SUCCESS);
    assert!(matches!(inbox.poll_next(&mut cx()), Poll::Ready(Ok(_))));
}

/// An earlier holder left bytes in the buffer, and completions report any length.
fn a_message_shows_no_byte_that_did_not_arrive<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let pool = futures.bench.pd.buffer_pool_builder(64).count(1).build().unwrap();
    pool.take().unwrap().fill(0xee);
    let mut inbox = futures.qp.inbox(&pool, 1);
    let (recv, imm) = (WcOpcode::RECV.0, WcOpcode::RECV_WRITE_IMM.0);
    // The last length is beyond the buffer.
    for (opcode, byte_len, shown) in [(recv, 5, 5), (imm, 21, 0), (recv, 0, 0), (recv, 999, 64)] {
        assert_eq!(inbox.fill(), 1);
        futures.complete_as(Role::Recv, ib_uverbs_wc { opcode, byte_len, ..wc(0, 0) });
        let Poll::Ready(Ok(message)) = inbox.poll_next(&mut cx()) else { panic!("no message") };
        assert_eq!((message.memory.len(), message.outcome.byte_len), (shown, byte_len), "{opcode}");
    }
    assert_eq!(inbox.fill(), 1);
    let failed = ib_uverbs_wc { status: WcStatus::LOC_LEN_ERR.0, byte_len: 21, ..wc(0, 0) };
    futures.complete_as(Role::Recv, failed);
    let Poll::Ready(Err(error)) = inbox.poll_next(&mut cx()) else { panic!("no error") };
    assert_eq!(error.memory.map(|buffer| buffer.len()), Some(0));
}

/// On a device that writes no header.
fn a_datagram_without_a_header_lies_behind_zeros<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let pool = futures.bench.pd.buffer_pool_builder(64).count(1).build().unwrap();
    pool.take().unwrap().fill(0xee);
    let builder = futures.pd.qp_builder(&futures.cq, &futures.cq, QpType::UD).max_recv_wr(4);
    futures.qp = futures.cq.adopt(builder.build().unwrap()).unwrap();
    futures.bring_up();
    let mut inbox = futures.qp.inbox(&pool, 1);
    assert_eq!(inbox.fill(), 1);
    let opcode = WcOpcode::RECV.0;
    futures.complete_as(Role::Recv, ib_uverbs_wc { opcode, byte_len: 45, ..wc(0, 0) });
    let Poll::Ready(Ok(message)) = inbox.poll_next(&mut cx()) else { panic!("no message") };
    assert_eq!(message.memory[..], [[0; 40].as_slice(), &[0xee; 5]].concat());
}

/// The inbox returns the error in every poll.
fn an_inbox_of_a_broken_connection_repeats_its_error<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let mut inbox = futures.qp.inbox(&futures.pool, 3);
    assert_eq!(inbox.fill(), 3);
    #[cfg(feature = "stream")]
    assert!(!futures_core::FusedStream::is_terminated(&inbox));
    futures.complete(Role::Recv, WcStatus::LOC_LEN_ERR);
    let mut next = || match inbox.poll_next(&mut cx()) {
        Poll::Ready(Err(OpError { kind, .. })) => kind,
        other => panic!("{other:?}"),
    };
    assert_eq!(next(), OpErrorKind::Status(WcStatus::LOC_LEN_ERR));
    for _ in 0..3 {
        assert_eq!(next(), OpErrorKind::Earlier(WcStatus::LOC_LEN_ERR));
    }
    assert_eq!(inbox.fill(), 0);
    #[cfg(feature = "stream")]
    {
        use futures_core::{FusedStream, Stream};
        assert!(inbox.is_terminated());
        let next = Stream::poll_next(Pin::new(&mut inbox), &mut cx());
        assert!(matches!(next, Poll::Ready(None)), "a stream ends: {next:?}");
    }
    for _ in 0..2 {
        futures.complete(Role::Recv, WcStatus::WR_FLUSH_ERR);
    }
    assert_eq!((futures.pool.idle(), futures.qp.in_flight()), (64, 0));
    // The same for the future of a send.
    let mut sent = futures.qp.send(futures.pool.take().unwrap());
    for kind in [
        OpErrorKind::Earlier(WcStatus::LOC_LEN_ERR),
        OpErrorKind::AlreadyFinished,
        OpErrorKind::AlreadyFinished,
    ] {
        let Poll::Ready(Err(error)) = Pin::new(&mut sent).poll(&mut cx()) else { panic!("posted") };
        assert_eq!(error.kind, kind);
    }
}

/// It also gives its buffers back: a driver that has ended is not started again.
fn an_inbox_whose_driver_has_ended_repeats_its_error<S: Kind>() {
    let futures = Futures::<S>::of();
    let mut inbox = futures.qp.inbox(&futures.pool, 3);
    assert_eq!(inbox.fill(), 3);
    drop(futures.driver);
    for _ in 0..5 {
        let Poll::Ready(Err(error)) = inbox.poll_next(&mut cx()) else { panic!("it waits") };
        assert_eq!(error.kind, OpErrorKind::DriverGone);
        assert_eq!(inbox.fill(), 0, "no receive is kept for the next call");
    }
    #[cfg(feature = "stream")]
    assert!(futures_core::FusedStream::is_terminated(&inbox));
}

#[test]
fn a_queue_pair_of_another_thread_domain_is_refused() {
    let futures = Futures::<Exclusive>::of();
    let Futures { bench, cq, pd, .. } = &futures;
    let other = bench.context.alloc_td().unwrap();
    let domain = bench.pd.parent_domain_builder().thread_domain(&other).build().unwrap();
    let build =
        |pd: &ProtectionDomain<Exclusive>| pd.qp_builder(cq, cq, QpType::RC).build().unwrap();
    let error = cq.adopt(build(&domain)).unwrap_err().error;
    assert!(error.errno() == Errno::INVAL && error.message().contains("thread domain"), "{error}");
    cq.adopt(build(pd)).unwrap();
}

/// A worker moves with its queue pairs, as one value.
#[test]
fn a_worker_moves_to_its_thread() {
    let bench = Bench::new();
    let td = bench.context.alloc_td().unwrap();
    let domain = bench.pd.parent_domain_builder().thread_domain(&td).build().unwrap();
    // Without the token nothing could ring the domain's queue pairs again.
    let refused = bench.context.cq_builder(0).build_worker(td).unwrap_err();
    assert_eq!(refused.error.errno(), Errno::INVAL);
    let td = refused.into_object();
    let worker = bench.context.cq_builder(64).build_worker(td).unwrap();
    let make = |cq| domain.qp_builder(cq, cq, QpType::RC).max_send_wr(4).build().unwrap();
    let (qp, elsewhere) = (make(worker.queue()), make(&bench.cq));
    let pool = domain.buffer_pool_builder(64).build().unwrap();
    let (script, before) = (bench.script.clone(), pool.idle());
    let mine = (worker, qp, elsewhere, pool.clone());
    std::thread::spawn(move || {
        let (worker, qp, elsewhere, pool) = mine;
        let cq_handle = worker.queue().handle();
        let (cq, mut driver) = worker.start(|_| Ok(Watched::default())).unwrap();
        let failed = cq.adopt(elsewhere).unwrap_err();
        assert_eq!(failed.error.errno(), Errno::INVAL);
        let qp = cq.adopt(qp).unwrap();
        qp.qp.set_state(QpState::RTS);
        script.set_qp_state(qp.handle(), QpState::RTS.0);
        let mut sent = qp.send(pool.take().unwrap());
        assert!(Pin::new(&mut sent).poll(&mut cx()).is_pending());
        let request = script.take(qp.handle(), Role::Send).expect("a request");
        let wr_id = u64::from_ne_bytes(request[..8].try_into().unwrap());
        assert!(script.complete(cq_handle, wc(qp.qpn().0, wr_id)));
        assert!(Pin::new(&mut driver).poll(&mut cx()).is_pending());
        assert!(matches!(Pin::new(&mut sent).poll(&mut cx()), Poll::Ready(Ok(_))));
    })
    .join()
    .unwrap();
    assert_eq!(pool.idle(), before);
}

fn a_shared_receive_queue_of_another_completion_queue_is_refused<S: Kind>() {
    let (futures, other) = (Futures::<S>::of(), Futures::<S>::of());
    let srq = other.srq();
    let qp = other.pd.qp_builder(&other.cq, &other.cq, QpType::RC).srq(&srq).build().unwrap();
    let refused = futures.cq.adopt_on(qp, &srq).unwrap_err();
    assert!(refused.error.message().contains("of another completion queue"), "{refused}");
    // The refused queue pair is unchanged: its own completion queue adopts it.
    other.cq.adopt_on(refused.into_object(), &srq).unwrap();
}

#[test]
fn a_queue_whose_driver_has_ended_returns_the_queue_pair_to_adopt() {
    let Futures { bench: _bench, pd, driver, cq, qp: _qp, .. } = Futures::new();
    let qp = pd.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
    let srq = pd.srq_builder(4).build().unwrap();
    drop(driver);
    let (qp, error) = cq.adopt(qp).unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::PIPE);
    qp.destroy().unwrap();
    let (srq, error) = cq.adopt_srq(srq).unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::PIPE);
    srq.destroy().unwrap();
}

/// The completion comes after the place of the queue pair in the table was given to another.
fn a_queue_pair_that_was_dropped_leaves_its_requests_to_nobody<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let srq = futures.srq();
    futures.qp = futures.qp_on(&srq);
    futures.bring_up();
    let all = futures.pool.idle();
    let mut received = srq.recv(futures.pool.take().unwrap());
    assert!(Pin::new(&mut received).poll(&mut cx()).is_pending());
    let request = futures.bench.script.take(srq_handle(&futures.bench), Role::Recv).unwrap();
    let wr_id = u64::from_ne_bytes(request[..8].try_into().unwrap());
    // Drops the future and the last handle of the queue pair; the next queue pair gets its place in the table.
    drop((received, srq));
    let next = futures.srq();
    let mut waits = next.recv(futures.pool.take().unwrap());
    assert!(Pin::new(&mut waits).poll(&mut cx()).is_pending());
    assert_eq!(futures.pool.idle(), all - 2);
    assert!(futures.bench.script.complete(futures.handle, wc(futures.qp.qpn().0, wr_id)));
    assert!(Pin::new(&mut futures.driver).poll(&mut cx()).is_pending());
    assert!(Pin::new(&mut waits).poll(&mut cx()).is_pending(), "it is another's");
    assert_eq!(futures.pool.idle(), all - 1);
}

/// The device wrote the completion, and the driver did not poll it yet.
fn a_queue_pair_that_is_dropped_ends_the_receives_that_it_took<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let srq = futures.srq();
    let before = futures.cq.registered();
    let qp = futures.qp_on(&srq);
    assert_eq!(futures.cq.registered(), before + 1);
    let mut received = srq.recv(futures.pool.take().unwrap());
    assert!(Pin::new(&mut received).poll(&mut cx()).is_pending());
    let request = futures.bench.script.take(srq_handle(&futures.bench), Role::Recv).unwrap();
    let wr_id = u64::from_ne_bytes(request[..8].try_into().unwrap());
    assert!(futures.bench.script.complete(futures.handle, wc(qp.qpn().0, wr_id)));
    drop(qp);
    assert_eq!(futures.cq.registered(), before);
    assert!(Pin::new(&mut futures.driver).poll(&mut cx()).is_pending());
    assert!(matches!(Pin::new(&mut received).poll(&mut cx()), Poll::Ready(Ok(_))));
    drop((srq, received));
    assert_eq!(futures.cq.registered(), before - 1, "the driver keeps no queue alive");
}

/// The device wrote the completion, and the driver did not poll it yet: taking closed queue pairs out of the table, which
/// is done for the next one, polls.
fn adopting_leaves_the_requests_of_others_to_their_futures<S: Kind>() {
    for adopts_srq in [false, true] {
        let mut futures = Futures::<S>::of();
        let adopt = |futures: &Futures<S>| {
            let builder = futures.pd.qp_builder(&futures.cq, &futures.cq, QpType::RC);
            futures.cq.adopt(builder.build().unwrap()).unwrap()
        };
        let gone = adopt(&futures);
        let all = futures.pool.idle();
        let mut sent = futures.qp.send(futures.pool.copy(b"hi").unwrap());
        assert!(Pin::new(&mut sent).poll(&mut cx()).is_pending());
        drop(gone);
        let request = futures.bench.script.take(futures.qp.handle(), Role::Send).unwrap();
        let wr_id = u64::from_ne_bytes(request[..8].try_into().unwrap());
        let completion = ib_uverbs_wc { opcode: WcOpcode::SEND.0, ..wc(futures.qp.qpn().0, wr_id) };
        assert!(futures.bench.script.complete(futures.handle, completion));
        match adopts_srq {
            true => drop(futures.srq()),
            false => drop(adopt(&futures)),
        }
        assert!(Pin::new(&mut futures.driver).poll(&mut cx()).is_pending());
        let Poll::Ready(Ok(finished)) = Pin::new(&mut sent).poll(&mut cx()) else {
            panic!("the request of another queue pair was lost")
        };
        assert_eq!(&finished.memory[..], b"hi");
        drop(finished);
        assert_eq!(futures.pool.idle(), all);
    }
}

fn a_driver_ends_when_the_last_handle_is_dropped<S: Kind>() {
    let Futures { bench: _bench, mut driver, cq, qp, .. } = Futures::<S>::of();
    drop(cq);
    assert!(Pin::new(&mut driver).poll(&mut cx()).is_pending(), "its queue pair may post");
    drop(qp);
    assert!(matches!(Pin::new(&mut driver).poll(&mut cx()), Poll::Ready(Ok(()))));
}

/// The receives may complete in another order than they were posted in.
fn messages_of_a_shared_queue_are_shown_in_the_order_in_which_they_came<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let srq = futures.srq();
    futures.qp = futures.qp_on(&srq);
    futures.bring_up();
    let mut inbox = srq.inbox(&futures.pool, 3);
    assert!(inbox.poll_next(&mut cx()).is_pending(), "it posts its receives");
    let handle = srq_handle(&futures.bench);
    let ids = [(); 3].map(|()| {
        let request = futures.bench.script.take(handle, Role::Recv).expect("a receive");
        u64::from_ne_bytes(request[..8].try_into().unwrap())
    });
    let complete = |wr_id, byte_len| {
        let done = wc(futures.qp.qpn().0, wr_id);
        let done = ib_uverbs_wc { opcode: WcOpcode::RECV.0, byte_len, ..done };
        assert!(futures.bench.script.complete(futures.handle, done));
    };
    for came in [&[(ids[2], 7), (ids[0], 9)][..], &[(ids[1], 5)]] {
        came.iter().for_each(|(wr_id, byte_len)| complete(*wr_id, *byte_len));
        assert!(Pin::new(&mut futures.driver).poll(&mut cx()).is_pending());
        for (_, byte_len) in came {
            let Poll::Ready(Ok(message)) = inbox.poll_next(&mut cx()) else { panic!("none") };
            assert_eq!(message.memory.len(), *byte_len as usize);
        }
        assert!(inbox.poll_next(&mut cx()).is_pending());
    }
    assert_eq!(futures.bench.script.pending(handle, Role::Recv), 3, "each makes room for another");
}

/// On a shared receive queue, too, where the inbox looks for the receive that completed first.
fn an_inbox_says_why_its_receives_cannot_be_posted<S: Kind>() {
    let futures = Futures::<S>::of();
    let foreign = futures.bench.context.alloc_pd().unwrap();
    let foreign = foreign.buffer_pool_builder(64).build().unwrap();
    let srq = futures.srq();
    for mut inbox in [futures.qp.inbox(&foreign, 3), srq.inbox(&foreign, 3)] {
        let Poll::Ready(Err(error)) = inbox.poll_next(&mut cx()) else { panic!("it waits") };
        assert_eq!(error.kind, OpErrorKind::Post(PostError::ForeignMemory));
        assert!(error.memory.is_some());
    }
    assert_eq!(foreign.idle(), 64);
}

fn aborting_flushes_posted_requests_and_refuses_the_rest<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let mut posted = futures.qp.recv(futures.pool.take().unwrap());
    assert!(Pin::new(&mut posted).poll(&mut cx()).is_pending());
    futures.qp.abort().unwrap();
    assert_eq!(futures.bench.script.object(futures.qp.handle()).state, QpState::ERR.0);
    let mut late = futures.qp.recv(futures.pool.take().unwrap());
    let Poll::Ready(Err(error)) = Pin::new(&mut late).poll(&mut cx()) else { panic!("posted") };
    assert_eq!(error.kind, OpErrorKind::Earlier(WcStatus::WR_FLUSH_ERR));
    assert!(Pin::new(&mut posted).poll(&mut cx()).is_pending());
    futures.complete(Role::Recv, WcStatus::WR_FLUSH_ERR);
    let Poll::Ready(Err(error)) = Pin::new(&mut posted).poll(&mut cx()) else { panic!("it waits") };
    assert_eq!(error.kind, OpErrorKind::Status(WcStatus::WR_FLUSH_ERR));
    assert!(error.memory.is_some());
}

fn memory_comes_back_from_a_request_with_its_type<S: Kind>() {
    /// Writes from the memory, and returns it from the completed request.
    fn back<S: Kind, L: Lend>(futures: &mut Futures<S>, memory: L) -> L {
        let remote = Remote { addr: 0x2000, rkey: Rkey(6) };
        let mut written = futures.qp.write(remote, memory);
        assert!(Pin::new(&mut written).poll(&mut cx()).is_pending());
        futures.complete(Role::Send, WcStatus::SUCCESS);
        let Poll::Ready(Ok(finished)) = Pin::new(&mut written).poll(&mut cx()) else {
            panic!("it fails")
        };
        finished.memory
    }
    let mut futures = Futures::<S>::of();
    let region =
        futures.bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 64]).unwrap();
    let region = Arc::new(region);
    let slice = RegionSlice::new(&region, 8..24).unwrap();
    let sge = RegionSge::new(&region, 24..).unwrap();
    let [buffer, shared, erased] =
        [b"buffer", b"shared", b"erased"].map(|bytes| futures.pool.copy(bytes).unwrap());
    assert_eq!(&*back(&mut futures, buffer), b"buffer");
    assert_eq!(&*back(&mut futures, shared.share()), b"shared");
    assert_eq!(back(&mut futures, slice).len(), 16);
    assert_eq!(back(&mut futures, Page { sge, breaks: Box::default() }).sge, sge);
    back(&mut futures, ());
    let erased = back(&mut futures, erased.into_memory()).into_buffer().expect("a buffer");
    assert_eq!(&*erased, b"erased");
    // And it does not come back as another type.
    assert!(<()>::back(erased.into_memory()).is_none());
    assert!(Page::back(Memory::None).is_none() && RegionSlice::back(Memory::None).is_none());
}

/// Otherwise a program that waits for one more request, before it looks at those that it posted, would wait for ever.
fn requests_that_are_over_leave_room_although_nobody_fetched_them<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let depth = futures.qp.caps().max_send_wr;
    let mut posted = Vec::new();
    for round in 0..3 * depth {
        let mut sent = futures.qp.send(futures.pool.copy(&[round as u8]).unwrap());
        assert!(Pin::new(&mut sent).poll(&mut cx()).is_pending());
        assert!(sent.is_posted(), "{round}");
        futures.complete(Role::Send, WcStatus::SUCCESS);
        posted.push(sent);
    }
    assert_eq!(futures.qp.in_flight(), 0);
    drop(posted.remove(1));
    assert_eq!(futures.pool.idle(), 64 - posted.len());
    for (sent, round) in posted.iter_mut().zip((0..).filter(|round| *round != 1)) {
        let Poll::Ready(Ok(finished)) = Pin::new(sent).poll(&mut cx()) else { panic!("{round}") };
        assert_eq!(finished.memory[..], [round]);
    }
}

fn completions_of_no_request_are_counted<S: Kind>() {
    let mut futures = Futures::<S>::of();
    assert_eq!(futures.cq.unmatched(), 0);
    for _ in 0..2 {
        let stray = wc(futures.qp.qpn().0 + 1, 0);
        assert!(futures.bench.script.complete(futures.handle, stray));
    }
    assert!(Pin::new(&mut futures.driver).poll(&mut cx()).is_pending());
    assert_eq!(futures.cq.unmatched(), 2);
}

/// The stream yields messages until the connection breaks.
#[cfg(feature = "stream")]
#[test]
fn an_inbox_is_a_stream_of_messages() {
    use futures_core::{FusedStream, Stream};
    let mut futures = Futures::new();
    let mut inbox = futures.qp.inbox(&futures.pool, 3);
    for _ in 0..5 {
        assert!(Stream::poll_next(Pin::new(&mut inbox), &mut cx()).is_pending());
        futures.complete(Role::Recv, WcStatus::SUCCESS);
        let next = Stream::poll_next(Pin::new(&mut inbox), &mut cx());
        assert!(matches!(next, Poll::Ready(Some(Ok(_)))), "{next:?}");
        assert!(!inbox.is_terminated());
    }
}

/// A task that was woken may post a request that completes before the driver sleeps.
#[test]
fn a_driver_arms_the_queue_before_it_sleeps_and_after_each_event() {
    let mut futures = Futures::new();
    let arms = |futures: &Futures| {
        let log = futures.bench.script.log();
        log.into_iter().filter(|op| *op == Op::REQ_NOTIFY_CQ).count()
    };
    let drive = |futures: &mut Futures| {
        assert!(Pin::new(&mut futures.driver).poll(&mut cx()).is_pending());
        arms(futures)
    };
    assert_eq!((arms(&futures), drive(&mut futures)), (0, 1));
    for round in 1..4 {
        let mut received = futures.qp.recv(futures.pool.take().unwrap());
        assert!(Pin::new(&mut received).poll(&mut cx()).is_pending());
        futures.complete(Role::Recv, WcStatus::SUCCESS);
        assert!(Pin::new(&mut received).poll(&mut cx()).is_ready());
        assert_eq!(arms(&futures), round, "other tasks run first");
        assert_eq!(drive(&mut futures), round, "its event is still to be read");
        futures.bench.script.notify(futures.handle);
        futures.driver.readiness_mut().report();
        assert_eq!(drive(&mut futures), round + 1, "the event was read");
    }
}

/// After a false alarm the channel may hold two events, and the event loop reports one.
#[test]
#[cfg_attr(miri, ignore = "it polls a file")]
fn a_driver_reads_all_events_after_a_false_alarm_and_one_otherwise() {
    let mut futures = Futures::new();
    let readable = |futures: &Futures| {
        let mut file = [PollFd::new(&futures.cq, PollFlags::IN)];
        rustix::event::poll(&mut file, Some(&Timespec::default())).unwrap() == 1
    };
    for (false_alarm, leaves_one) in [(false, true), (true, false)] {
        while readable(&futures) {
            futures.driver.readiness_mut().report();
            assert!(Pin::new(&mut futures.driver).poll(&mut cx()).is_pending());
        }
        // The driver sleeps, or wakes without an event.
        for report in [false, false_alarm, false] {
            if report {
                futures.driver.readiness_mut().report();
            }
            assert!(Pin::new(&mut futures.driver).poll(&mut cx()).is_pending());
        }
        (0..2).for_each(|_| futures.bench.script.notify(futures.handle));
        futures.driver.readiness_mut().report();
        assert!(Pin::new(&mut futures.driver).poll(&mut cx()).is_pending());
        assert_eq!(readable(&futures), leaves_one, "false alarm: {false_alarm}");
    }
}

/// When the device goes away the channel's file is in error, and never readable again.
#[test]
#[cfg_attr(miri, ignore = "it polls a file")]
fn a_driver_whose_channel_is_in_error_ends_and_fails_its_futures() {
    let mut futures = Futures::new();
    let mut received = futures.qp.recv(futures.pool.take().unwrap());
    assert!(Pin::new(&mut received).poll(&mut cx()).is_pending());
    assert!(Pin::new(&mut futures.driver).poll(&mut cx()).is_pending());
    // The file yields no more events, and the kernel reports it as hung up.
    rustix::net::shutdown(&futures.cq, rustix::net::Shutdown::Both).unwrap();
    futures.driver.readiness_mut().report();
    let Poll::Ready(end) = Pin::new(&mut futures.driver).poll(&mut cx()) else {
        panic!("it waits")
    };
    assert_eq!(end.unwrap_err().errno(), Errno::IO);
    let Poll::Ready(Err(error)) = Pin::new(&mut received).poll(&mut cx()) else { panic!("waits") };
    assert_eq!(error.kind, OpErrorKind::DriverGone);
}

fn srq_handle(bench: &Bench) -> u32 {
    let mut live = bench.script.live().into_iter();
    live.rfind(|(kind, _)| *kind == UVERBS_OBJECT_SRQ).unwrap().1
}

/// Memory that sends a message when it is dropped, by a queue pair that it holds.
struct Farewell(Box<[u8]>, Arc<Mutex<Option<AsyncQueuePair>>>);

// SAFETY: the box owns its bytes alone, and they stay as long as it does.
#[allow(unsafe_code)]
unsafe impl StableBytes for Farewell {
    type Item = u8;

    fn items(&mut self) -> NonNull<[u8]> {
        NonNull::from(&mut *self.0)
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        let qp = self.1.lock().unwrap().take().expect("once");
        let _ = Pin::new(&mut qp.send_inline(b"gone")).poll(&mut cx());
    }
}

/// Dropping memory of the program may post another request, which takes the locks.
#[test]
fn refused_memory_is_dropped_after_the_locks_are_released() {
    let (told, heard) = channel();
    std::thread::spawn(move || {
        let futures = Futures::new();
        let Futures { bench, qp, .. } = &futures;
        let memory = Farewell(Box::new([0; 64]), Arc::new(Mutex::new(Some(qp.clone()))));
        // Memory of another protection domain.
        let foreign = bench.context.alloc_pd().unwrap();
        let region =
            Arc::new(foreign.mr_builder().access(Access::LOCAL_WRITE).register(memory).unwrap());
        let mut sent = qp.send(RegionSlice::new(&region, ..).unwrap());
        drop(region);
        let Poll::Ready(end) = Pin::new(&mut sent).poll(&mut cx()) else { panic!("posted") };
        let OpError { memory, kind } = end.unwrap_err();
        assert_eq!(kind, OpErrorKind::Post(PostError::ForeignMemory));
        assert!(memory.is_some());
        drop(memory);
        told.send(()).unwrap();
    });
    assert_eq!(heard.recv_timeout(Duration::from_secs(5)), Ok(()), "somebody waits for himself");
}

/// A waker may post another request, which takes the locks.
#[test]
fn memory_of_an_abandoned_request_is_dropped_after_the_locks_are_released() {
    let (told, heard) = channel();
    std::thread::spawn(move || {
        let mut futures = Futures::new();
        let memory = Farewell(Box::new([0; 64]), Arc::new(Mutex::new(Some(futures.qp.clone()))));
        let region = Arc::new(
            futures.bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(memory).unwrap(),
        );
        let mut sent = futures.qp.send(RegionSlice::new(&region, ..).unwrap());
        assert!(Pin::new(&mut sent).poll(&mut cx()).is_pending());
        drop((region, sent));
        futures.complete(Role::Send, WcStatus::SUCCESS);
        assert_eq!(futures.qp.in_flight(), 1, "the message that it sent");
        told.send(()).unwrap();
    });
    assert_eq!(heard.recv_timeout(Duration::from_secs(5)), Ok(()), "somebody waits for himself");
}

/// A page of a region.
struct Page {
    sge: RegionSge,
    /// Breaks the queue pair when the key is asked for: after the request was admitted, and before it is posted.
    breaks: Box<Mutex<Option<(AsyncQueuePair, Script)>>>,
}

// SAFETY: the test keeps the region, which nobody else reads or writes.
#[allow(unsafe_code)]
unsafe impl RegisteredBuffer for Page {
    fn sge(&self) -> RegionSge {
        if let Some((qp, script)) = self.breaks.lock().unwrap().take() {
            qp.abort().unwrap();
            // As if the kernel had flushed all earlier requests, and none since.
            script.set_qp_state(qp.handle(), QpState::RTS.0);
        }
        self.sge
    }
}

/// rxe flushes a receive only on a change to ERR after the receive was posted.
#[test]
fn a_receive_that_is_posted_while_the_queue_pair_breaks_is_flushed() {
    let (told, heard) = channel();
    std::thread::spawn(move || {
        let mut futures = Futures::new();
        let region = futures
            .bench
            .pd
            .mr_builder()
            .access(Access::LOCAL_WRITE)
            .register(vec![0u8; 64])
            .unwrap();
        let both = (futures.qp.clone(), futures.bench.script.clone());
        let sge = RegionSge::new(&region, ..).unwrap();
        let page = Page { sge, breaks: Box::new(Mutex::new(Some(both))) };
        let mut received = futures.qp.recv(page);
        assert!(Pin::new(&mut received).poll(&mut cx()).is_pending());
        assert!(received.is_posted());
        assert_eq!(futures.bench.script.object(futures.qp.handle()).state, QpState::ERR.0);
        futures.complete(Role::Recv, WcStatus::WR_FLUSH_ERR);
        let Poll::Ready(Err(error)) = Pin::new(&mut received).poll(&mut cx()) else {
            panic!("it waits")
        };
        assert_eq!(error.kind, OpErrorKind::Status(WcStatus::WR_FLUSH_ERR));
        told.send(()).unwrap();
    });
    assert_eq!(heard.recv_timeout(Duration::from_secs(5)), Ok(()), "somebody waits for himself");
}

/// The flush is a system call, and may drop the last handle of the queue pair, and with it memory of the
/// program.
#[test]
fn a_failed_queue_pair_is_flushed_after_the_locks_are_released() {
    let mut futures = Futures::new();
    let mut sent = futures.qp.send(futures.pool.take().unwrap());
    assert!(Pin::new(&mut sent).poll(&mut cx()).is_pending());
    let (cq, calls) = (futures.cq.clone(), Arc::new(AtomicBool::new(false)));
    let seen = calls.clone();
    futures.bench.script.before(Op::MODIFY_QP, move || {
        let (cq, (told, heard)) = (cq.clone(), channel());
        // This waits while a thread holds the queue's lock.
        std::thread::spawn(move || told.send(cq.unmatched()));
        assert_eq!(heard.recv_timeout(Duration::from_secs(5)), Ok(0), "the queue is held");
        seen.store(true, Ordering::Relaxed);
    });
    futures.complete(Role::Send, WcStatus::RETRY_EXC_ERR);
    assert!(calls.load(Ordering::Relaxed));
    assert_eq!(futures.bench.script.object(futures.qp.handle()).state, QpState::ERR.0);
}
