//! Requests as futures, on the scripted kernel, in an event loop that the test drives.

use super::{Bench, wc};
use crate::aio::{CompletionQueue, Driver, Message, OpError, OpErrorKind, QueuePair, Readiness};
use crate::memory::region::StableBytes;
use crate::owned::{BufferPool, RegionSlice};
use crate::uverbs::scripted::{Op, Role};
use crate::{Access, Errno, Exclusive, QpState, QpType, Result, RingError, WcOpcode, WcStatus};
use std::future::Future;
use std::pin::Pin;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use uverbs_uapi::object::UVERBS_OBJECT_CQ;
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

pub(crate) struct Futures {
    pub(crate) bench: Bench,
    pub(crate) pool: BufferPool,
    pub(crate) driver: Driver<Watched>,
    pub(crate) cq: CompletionQueue,
    pub(crate) qp: QueuePair,
    /// The kernel's completion queue.
    handle: u32,
}

pub(crate) fn cx() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

impl Futures {
    pub(crate) fn new() -> Futures {
        let bench = Bench::new();
        let pool = bench.pd.buffer_pool_builder(64).count(64).build().unwrap();
        let (cq, driver) =
            CompletionQueue::new(&bench.context, 64, |_| Ok(Watched(Arc::default()))).unwrap();
        let mut cqs = bench.script.live().into_iter().filter(|(kind, _)| *kind == UVERBS_OBJECT_CQ);
        let (_, handle) = cqs.next_back().unwrap();
        let qp =
            cq.create_qp(&bench.pd, QpType::RC, |qp| qp.max_send_wr(4).max_recv_wr(4)).unwrap();
        qp.qp.set_state(QpState::RTS);
        bench.script.set_qp_state(qp.handle(), QpState::RTS.0);
        Futures { bench, pool, driver, cq, qp, handle }
    }

    /// Completes the oldest request of a queue, and polls the driver.
    pub(crate) fn complete(&mut self, role: Role, status: WcStatus) {
        self.complete_as(role, ib_uverbs_wc { status: status.0, ..wc(0, 0) });
    }

    /// The same, with a completion whose queue pair and `wr_id` are filled in.
    fn complete_as(&mut self, role: Role, wc: ib_uverbs_wc) {
        let request = self.bench.script.take(self.qp.handle(), role).expect("a request");
        let wr_id = u64::from_ne_bytes(request[..8].try_into().unwrap());
        let wc = ib_uverbs_wc { qp_num: self.qp.qpn().0, wr_id, ..wc };
        assert!(self.bench.script.complete(self.handle, wc));
        assert!(Pin::new(&mut self.driver).poll(&mut cx()).is_pending());
    }
}

/// The kernel neither sends the requests nor flushes them.
#[test]
fn futures_fail_when_the_device_is_gone() {
    let futures = Futures::new();
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

/// The device is still there, and flushes what is posted.
#[test]
fn a_request_that_the_kernel_refuses_to_send_is_flushed() {
    let mut futures = Futures::new();
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

#[test]
fn an_inbox_deeper_than_the_queue_keeps_it_full() {
    let mut futures = Futures::new();
    let room = futures.qp.caps().max_recv_wr as usize;
    let mut inbox = futures.qp.inbox(&futures.pool, 2 * room);
    assert_eq!(inbox.refill(&mut cx()), room);
    for round in 0..4 * room {
        futures.complete(Role::Recv, WcStatus::SUCCESS);
        let Poll::Ready(Ok(Message { .. })) = inbox.poll_next(&mut cx()) else { panic!("{round}") };
        let pending = futures.bench.script.pending(futures.qp.handle(), Role::Recv);
        assert_eq!(pending as usize, room, "after {round}");
    }
    assert!(inbox.poll_next(&mut cx()).is_pending());
    // No queue is that deep.
    drop(inbox);
    drop(futures.qp.inbox(&futures.pool, usize::MAX));
}

/// Whatever an earlier holder left in the buffer, and whatever length the completion reports.
#[test]
fn a_message_shows_no_byte_that_did_not_arrive() {
    let mut futures = Futures::new();
    let pool = futures.bench.pd.buffer_pool_builder(64).count(1).build().unwrap();
    pool.take().unwrap().fill(0xee);
    let mut inbox = futures.qp.inbox(&pool, 1);
    let (recv, imm) = (WcOpcode::RECV.0, WcOpcode::RECV_WRITE_IMM.0);
    // Nor does a length beyond the buffer.
    for (opcode, byte_len, shown) in [(recv, 5, 5), (imm, 21, 0), (recv, 0, 0), (recv, 999, 64)] {
        assert_eq!(inbox.refill(&mut cx()), 1);
        futures.complete_as(Role::Recv, ib_uverbs_wc { opcode, byte_len, ..wc(0, 0) });
        let Poll::Ready(Ok(message)) = inbox.poll_next(&mut cx()) else { panic!("no message") };
        assert_eq!((message.buffer.len(), message.outcome.byte_len), (shown, byte_len), "{opcode}");
    }
    assert_eq!(inbox.refill(&mut cx()), 1);
    let failed = ib_uverbs_wc { status: WcStatus::LOC_LEN_ERR.0, byte_len: 21, ..wc(0, 0) };
    futures.complete_as(Role::Recv, failed);
    let Poll::Ready(Err(error)) = inbox.poll_next(&mut cx()) else { panic!("no error") };
    assert_eq!(error.memory.map(|buffer| buffer.len()), Some(0));
}

/// Where the device writes no header.
#[test]
fn a_datagram_without_a_header_lies_behind_zeros() {
    let mut futures = Futures::new();
    let pool = futures.bench.pd.buffer_pool_builder(64).count(1).build().unwrap();
    pool.take().unwrap().fill(0xee);
    let pd = &futures.bench.pd;
    futures.qp = futures.cq.create_qp(pd, QpType::UD, |qp| qp.max_recv_wr(4)).unwrap();
    futures.qp.qp.set_state(QpState::RTS);
    futures.bench.script.set_qp_state(futures.qp.handle(), QpState::RTS.0);
    let mut inbox = futures.qp.inbox(&pool, 1);
    assert_eq!(inbox.refill(&mut cx()), 1);
    let opcode = WcOpcode::RECV.0;
    futures.complete_as(Role::Recv, ib_uverbs_wc { opcode, byte_len: 45, ..wc(0, 0) });
    let Poll::Ready(Ok(message)) = inbox.poll_next(&mut cx()) else { panic!("no message") };
    assert_eq!(message.buffer[..], [[0; 40].as_slice(), &[0xee; 5]].concat());
}

/// However often it is polled.
#[test]
fn an_inbox_of_a_broken_connection_repeats_its_error() {
    let mut futures = Futures::new();
    let mut inbox = futures.qp.inbox(&futures.pool, 3);
    assert_eq!(inbox.refill(&mut cx()), 3);
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
    assert_eq!(inbox.refill(&mut cx()), 0);
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
    // The same for a future.
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

#[test]
fn a_queue_pair_of_another_thread_domain_is_refused() {
    let futures = Futures::new();
    let Futures { bench, cq, .. } = &futures;
    let (td, other) = (bench.context.alloc_td().unwrap(), bench.context.alloc_td().unwrap());
    let domain = bench.pd.parent_domain_builder().thread_domain(&td).build().unwrap();
    let make = |td| cq.create_exclusive_qp(&domain, &Arc::new(Mutex::new(td)), QpType::RC, |qp| qp);
    let error = make(other).unwrap_err();
    assert!(error.errno() == Errno::INVAL && error.message().contains("thread domain"), "{error}");
    make(td).unwrap();
}

/// Memory that sends a message when it is dropped, by a queue pair that it holds.
struct Farewell(Box<[u8]>, Arc<Mutex<Option<QueuePair<Exclusive>>>>);

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
        let Futures { bench, cq, .. } = &futures;
        let (td, mut other) =
            (bench.context.alloc_td().unwrap(), bench.context.alloc_td().unwrap());
        let domain = bench.pd.parent_domain_builder().thread_domain(&td).build().unwrap();
        let token = Arc::new(Mutex::new(td));
        let qp = cq
            .create_exclusive_qp(&domain, &token, QpType::RC, |qp| {
                qp.max_send_wr(4).max_recv_wr(4).max_inline_data(8)
            })
            .unwrap();
        qp.qp.set_state(QpState::RTS);
        bench.script.set_qp_state(qp.handle(), QpState::RTS.0);
        let memory = Farewell(Box::new([0; 64]), Arc::new(Mutex::new(Some(qp.clone()))));
        let region = Arc::new(bench.pd.register(memory, Access::LOCAL_WRITE).unwrap());
        let mut sent = qp.send(RegionSlice::new(&region, ..).unwrap());
        drop(region);
        // The program replaces the thread domain behind the mutex.
        std::mem::swap(&mut *token.lock().unwrap(), &mut other);
        let Poll::Ready(end) = Pin::new(&mut sent).poll(&mut cx()) else { panic!("posted") };
        let OpError { memory, kind } = end.unwrap_err();
        assert_eq!(kind, OpErrorKind::Post(RingError::ForeignThreadDomain.into()));
        assert!(memory.is_some());
        drop(memory);
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
