//! Code of the program that panics in a poll of the library: a waker that is cloned, called or dropped, memory that is
//! asked for its bytes. Afterwards the state is as before the poll or one step further, and no request or waker is
//! lost.
#![allow(
    unsafe_code,
    reason = "a waker whose clone and drop are the program's code is made by hand"
)]

use super::futures::{Futures, Kind, cx, for_each_kind};
use super::wc;
use crate::aio::{Op, OpErrorKind, Transfer};
use crate::owned::{Buffer, Finished, RegionSge, RegisteredBuffer};
use crate::uverbs::scripted::Role;
use crate::{Access, QpType, WcOpcode, WcStatus};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Waker};
use uverbs_uapi::wc::ib_uverbs_wc;

for_each_kind! {
    a_waker_that_panics_in_any_call_costs_no_request
    a_waker_that_panics_in_any_call_costs_no_request_of_a_queue_full_of_ends
    a_waker_that_panics_in_any_call_costs_no_write_on_mlx5
    a_waker_that_panics_in_any_call_costs_no_message
    memory_that_panics_when_it_is_asked_is_lent_later
    a_future_whose_waker_panics_is_dropped_by_a_panic
    a_queue_pair_whose_drivers_waker_panics_leaves_no_entry
}

/// Counts down its calls, and panics at zero.
struct Fuse(AtomicIsize);

impl Fuse {
    /// A waker that panics in its call `number`, from 0 on: whenever it is cloned, called or dropped.
    fn waker(number: isize) -> (Arc<Fuse>, Waker) {
        let fuse = Arc::new(Fuse(AtomicIsize::new(number)));
        let data = Arc::into_raw(fuse.clone()).cast();
        // SAFETY: the functions of the table treat the pointer as the `Arc` that it came from.
        (fuse, unsafe { Waker::new(data, &TABLE) })
    }

    /// Whether it has panicked.
    fn is_blown(&self) -> bool {
        self.0.load(Ordering::Relaxed) < 0
    }

    fn call(&self) {
        if self.0.fetch_sub(1, Ordering::Relaxed) == 0 {
            // Without a message on standard error.
            resume_unwind(Box::new("a waker"));
        }
    }

    fn defuse(&self) {
        self.0.store(isize::MAX, Ordering::Relaxed);
    }
}

static TABLE: RawWakerVTable = RawWakerVTable::new(clone, wake, wake_by_ref, drop_waker);

unsafe fn clone(data: *const ()) -> RawWaker {
    let fuse = data.cast::<Fuse>();
    // SAFETY: the pointer came from an `Arc`, one of whose counts is the waker's.
    unsafe { &*fuse }.call();
    // SAFETY: as above; the new waker holds the new count.
    unsafe { Arc::increment_strong_count(fuse) };
    RawWaker::new(data, &TABLE)
}

unsafe fn wake(data: *const ()) {
    // SAFETY: the caller gives the waker up, and its count with it.
    let fuse = unsafe { Arc::from_raw(data.cast::<Fuse>()) };
    fuse.call();
}

unsafe fn wake_by_ref(data: *const ()) {
    // SAFETY: as in `clone`.
    unsafe { &*data.cast::<Fuse>() }.call();
}

unsafe fn drop_waker(data: *const ()) {
    // SAFETY: as in `wake`.
    unsafe { wake(data) };
}

/// Runs a test for each call of a waker, which panics in that call, until the test makes fewer.
pub(crate) fn each_call(test: impl Fn(&Waker)) {
    for number in 0.. {
        let (fuse, waker) = Fuse::waker(number);
        test(&waker);
        let blown = fuse.is_blown();
        fuse.defuse();
        if !blown {
            assert!(number > 2, "the waker was hardly called");
            return;
        }
    }
}

/// Calls `act`, and again if it panics.
pub(crate) fn again<R>(mut act: impl FnMut() -> R) -> R {
    match catch_unwind(AssertUnwindSafe(&mut act)) {
        Ok(result) => result,
        Err(_) => act(),
    }
}

fn poll<S: Kind>(op: &mut Op<Buffer, S>, waker: &Waker) -> Poll<bool> {
    Pin::new(op).poll(&mut Context::from_waker(waker)).map(|end| end.is_ok())
}

/// Lets the device complete a request.
fn complete<S: Kind>(futures: &mut Futures<S>, role: Role, wc: ib_uverbs_wc) {
    let completed = AssertUnwindSafe(|| futures.complete_as(role, wc));
    if catch_unwind(completed).is_err() {
        // A waker panicked, and the driver goes on.
        assert!(Pin::new(&mut futures.driver).poll(&mut cx()).is_pending());
    }
}

fn a_waker_that_panics_in_any_call_costs_no_request<S: Kind>() {
    each_call(|waker| {
        let mut futures = Futures::<S>::of();
        let room = futures.qp.caps().max_send_wr as usize;
        let mut ops: Vec<_> =
            (0..room + 3).map(|_| futures.qp.send(futures.pool.take().unwrap())).collect();
        let mut ended = vec![false; ops.len()];
        // All but the first are polled with the waker: those that are posted, and those that wait for room.
        for (at, op) in ops.iter_mut().enumerate() {
            let waker = if at == 0 { Waker::noop() } else { waker };
            for _ in 0..2 {
                assert!(again(|| poll(op, waker)).is_pending());
            }
        }
        for _ in 0..ops.len() {
            complete(&mut futures, Role::Send, wc(0, 0));
            for (op, ended) in ops.iter_mut().zip(&mut ended) {
                if !*ended {
                    *ended = again(|| poll(op, waker)) == Poll::Ready(true);
                }
            }
        }
        assert!(ended.iter().all(|ended| *ended), "{ended:?}");
        drop(ops);
        assert_eq!((futures.qp.in_flight(), futures.pool.idle()), (0, 64));
    });
}

/// The ends of requests that nobody fetched have all slots when the next one is posted.
fn a_waker_that_panics_in_any_call_costs_no_request_of_a_queue_full_of_ends<S: Kind>() {
    each_call(|waker| {
        let mut futures = Futures::<S>::of();
        let room = futures.qp.caps().max_send_wr as usize;
        let mut ops: Vec<_> =
            (0..room).map(|_| futures.qp.send(futures.pool.take().unwrap())).collect();
        for op in &mut ops {
            assert!(poll(op, Waker::noop()).is_pending());
            complete(&mut futures, Role::Send, wc(0, 0));
        }
        let mut op = futures.qp.send(futures.pool.take().unwrap());
        for _ in 0..2 {
            assert!(again(|| poll(&mut op, waker)).is_pending());
        }
        complete(&mut futures, Role::Send, wc(0, 0));
        ops.push(op);
        for op in &mut ops {
            assert_eq!(again(|| poll(op, waker)), Poll::Ready(true));
        }
        drop(ops);
        assert_eq!((futures.qp.in_flight(), futures.pool.idle()), (0, 64));
    });
}

/// Writes that need no check, and all of them together as a list.
fn a_waker_that_panics_in_any_call_costs_no_write_on_mlx5<S: Kind>() {
    each_call(|waker| {
        let mut futures = Futures::<S>::connected();
        let region = futures.bench.pd.mr_builder().access(Access::ALL_REMOTE);
        let region = region.allocate::<u64>(1).unwrap();
        let to = region.remote(0).unwrap();
        let room = futures.qp.caps().max_send_wr as usize;
        let word = || futures.pool.copy(&7u64.to_ne_bytes()).unwrap();
        let mut ops: Vec<_> = (0..room + 2).map(|_| futures.qp.write(to, word())).collect();
        let mut list = futures.qp.post_all((0..room + 2).map(|_| (Transfer::Write(to), word())));
        let mut ended = vec![false; ops.len()];
        let mut ends = 0;
        for (at, op) in ops.iter_mut().enumerate() {
            let waker = if at == 0 { Waker::noop() } else { waker };
            assert!(again(|| poll(op, waker)).is_pending());
        }
        for _ in 0..2 * ops.len() {
            futures.bench.script.settle();
            let polled = || assert!(Pin::new(&mut futures.driver).poll(&mut cx()).is_pending());
            again(polled);
            for (op, ended) in ops.iter_mut().zip(&mut ended) {
                if !*ended {
                    *ended = again(|| poll(op, waker)) == Poll::Ready(true);
                }
            }
            let mut context = Context::from_waker(waker);
            while let Poll::Ready(Some(end)) = again(|| list.poll_next(&mut context)) {
                ends += usize::from(end.is_ok());
            }
        }
        assert!(ended.iter().all(|ended| *ended), "{ended:?}");
        assert_eq!((ends, region.read_at(0)), (ops.len(), Some(7)));
        drop((ops, list));
        assert_eq!((futures.qp.in_flight(), futures.pool.idle()), (0, 64));
    });
}

fn a_waker_that_panics_in_any_call_costs_no_message<S: Kind>() {
    each_call(|waker| {
        let mut futures = Futures::<S>::of();
        let mut inbox = futures.qp.inbox(&futures.pool, 2);
        let mut context = Context::from_waker(waker);
        inbox.fill();
        let mut lengths = Vec::new();
        for byte_len in 1..=6 {
            let wc = ib_uverbs_wc { opcode: WcOpcode::RECV.0, byte_len, ..wc(0, 0) };
            complete(&mut futures, Role::Recv, wc);
            if let Poll::Ready(Ok(Finished { memory: buffer, .. })) =
                again(|| inbox.poll_next(&mut context))
            {
                lengths.push(buffer.len());
            }
        }
        while let Poll::Ready(Ok(message)) = again(|| inbox.poll_next(&mut cx())) {
            lengths.push(message.memory.len());
        }
        assert_eq!(lengths, [1, 2, 3, 4, 5, 6]);
        complete(
            &mut futures,
            Role::Recv,
            ib_uverbs_wc { status: WcStatus::LOC_LEN_ERR.0, ..wc(0, 0) },
        );
        let Poll::Ready(Err(error)) = again(|| inbox.poll_next(&mut context)) else {
            panic!("it waits")
        };
        assert_eq!(error.kind, OpErrorKind::Status(WcStatus::LOC_LEN_ERR));
        // Drops the wakers of receives that are still posted.
        let _ = catch_unwind(AssertUnwindSafe(|| drop((inbox, futures))));
    });
}

/// Memory that panics when the library asks for its address.
struct Shy {
    sge: RegionSge,
    is_shy: Arc<AtomicBool>,
}

// SAFETY: the test keeps the region, which nobody else reads or writes.
unsafe impl RegisteredBuffer for Shy {
    fn sge(&self) -> RegionSge {
        if self.is_shy.load(Ordering::Relaxed) {
            resume_unwind(Box::new("the memory"));
        }
        self.sge
    }
}

fn memory_that_panics_when_it_is_asked_is_lent_later<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let region =
        futures.bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 64]).unwrap();
    let is_shy = Arc::new(AtomicBool::new(true));
    let shy = || Shy { sge: RegionSge::new(&region, ..).unwrap(), is_shy: is_shy.clone() };
    let poll = |op: &mut Op<Shy, S>| {
        let poll = AssertUnwindSafe(|| Pin::new(op).poll(&mut cx()).map(|end| end.is_ok()));
        catch_unwind(poll).map_err(|panic| *panic.downcast::<&str>().unwrap())
    };
    // While there is room, and when it has to wait for room.
    let room = futures.qp.caps().max_send_wr as usize;
    let mut first = futures.qp.send(shy());
    assert_eq!((poll(&mut first), futures.qp.in_flight()), (Err("the memory"), 0));
    is_shy.store(false, Ordering::Relaxed);
    assert_eq!(poll(&mut first), Ok(Poll::Pending));
    let mut ops: Vec<_> = (1..room + 2).map(|_| futures.qp.send(shy())).collect();
    ops.iter_mut().for_each(|op| assert_eq!(poll(op), Ok(Poll::Pending)));
    let mut waiting = ops.split_off(room - 1);
    futures.complete(Role::Send, WcStatus::SUCCESS);
    is_shy.store(true, Ordering::Relaxed);
    assert_eq!(poll(&mut waiting[0]), Err("the memory"));
    assert_eq!((poll(&mut waiting[1]), futures.qp.in_flight()), (Ok(Poll::Pending), room - 1));
    assert!(!waiting[1].is_posted(), "it is not its turn");
    is_shy.store(false, Ordering::Relaxed);
    waiting.iter_mut().for_each(|op| assert_eq!(poll(op), Ok(Poll::Pending)));
    assert_eq!(waiting.iter().map(Op::is_posted).collect::<Vec<_>>(), [true, false]);
    for _ in 0..room + 1 {
        futures.complete(Role::Send, WcStatus::SUCCESS);
        waiting.iter_mut().filter(|op| !op.is_posted()).for_each(|op| _ = poll(op));
    }
    for op in [first].iter_mut().chain(&mut ops).chain(&mut waiting) {
        assert_eq!(poll(op), Ok(Poll::Ready(true)));
    }
}

/// Dropping the queue pair wakes the driver.
fn a_queue_pair_whose_drivers_waker_panics_leaves_no_entry<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let Futures { bench, pd, cq, driver, .. } = &mut futures;
    let srq = cq.adopt_srq(bench.pd.srq_builder(4).build().unwrap()).unwrap();
    let before = cq.registered();
    let qp = pd.qp_builder(&*cq, &*cq, QpType::RC).srq(&srq).build().unwrap();
    let qp = cq.adopt_on(qp, &srq).unwrap();
    let (fuse, waker) = Fuse::waker(isize::MAX);
    assert!(Pin::new(&mut *driver).poll(&mut Context::from_waker(&waker)).is_pending());
    fuse.0.store(0, Ordering::Relaxed);
    let end = catch_unwind(AssertUnwindSafe(|| drop(qp)));
    assert!(end.is_err() && fuse.is_blown());
    fuse.defuse();
    assert_eq!(cq.registered(), before);
}

/// A second panic would abort the process.
fn a_future_whose_waker_panics_is_dropped_by_a_panic<S: Kind>() {
    for waits in [false, true] {
        let futures = Futures::<S>::of();
        let room = if waits { futures.qp.caps().max_recv_wr } else { 0 };
        let mut others: Vec<_> =
            (0..room).map(|_| futures.qp.recv(futures.pool.take().unwrap())).collect();
        others.iter_mut().for_each(|op| assert!(poll(op, Waker::noop()).is_pending()));
        let (fuse, waker) = Fuse::waker(isize::MAX);
        let mut dropped = futures.qp.recv(futures.pool.take().unwrap());
        assert!(poll(&mut dropped, &waker).is_pending());
        assert_eq!(dropped.is_posted(), !waits);
        fuse.0.store(0, Ordering::Relaxed);
        let end = catch_unwind(AssertUnwindSafe(|| {
            let _dropped = dropped;
            resume_unwind(Box::new("the task"));
        }));
        assert_eq!(end.map(|()| "no panic").unwrap_err().downcast_ref::<&str>(), Some(&"the task"));
        assert!(fuse.is_blown());
        fuse.defuse();
    }
}
