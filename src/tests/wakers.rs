//! Cloning, calling or dropping a waker runs code of the program, which may use the same queues. So the
//! library holds no lock meanwhile.
#![allow(unsafe_code, reason = "a waker whose clone is the program's code is made by hand")]

use super::futures::Futures;
use crate::aio::AsyncQueuePair;
use crate::uverbs::scripted::Role;
use crate::{QpState, QpType, WcStatus};
use std::cell::Cell;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Wake, Waker};
use std::time::Duration;

/// The function that a waker calls, and the count of its calls.
struct Callback {
    act: Box<dyn Fn() + Send + Sync>,
    calls: AtomicUsize,
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

impl Callback {
    fn call(&self) {
        // The callback clones and drops wakers itself.
        if !INSIDE.replace(true) {
            self.calls.fetch_add(1, Ordering::Relaxed);
            (self.act)();
            INSIDE.set(false);
        }
    }

    fn waker(self: &Arc<Self>) -> Waker {
        let data = Arc::into_raw(self.clone()).cast();
        // SAFETY: the functions of the table treat the pointer as the `Arc` that it came from.
        unsafe { Waker::new(data, &TABLE) }
    }
}

/// A waker that calls `act` whenever it is cloned, called or dropped.
pub(super) fn waker_of(act: impl Fn() + Send + Sync + 'static) -> Waker {
    Arc::new(Callback { act: Box::new(act), calls: AtomicUsize::new(0) }).waker()
}

// `Waker::will_wake` compares addresses of tables; a constant may have several.
static TABLE: RawWakerVTable = RawWakerVTable::new(clone, wake, wake_by_ref, drop_waker);

unsafe fn clone(data: *const ()) -> RawWaker {
    let data = data.cast::<Callback>();
    // SAFETY: the pointer came from an `Arc`, one of whose counts is the waker's.
    unsafe { &*data }.call();
    // SAFETY: as above; the new waker holds the new count.
    unsafe { Arc::increment_strong_count(data) };
    RawWaker::new(data.cast(), &TABLE)
}

unsafe fn wake(data: *const ()) {
    // SAFETY: the caller gives the waker up, and its count with it.
    unsafe { drop_waker(data) };
}

unsafe fn wake_by_ref(data: *const ()) {
    // SAFETY: as in `clone`.
    unsafe { &*data.cast::<Callback>() }.call();
}

unsafe fn drop_waker(data: *const ()) {
    // SAFETY: the waker held a count, and is dropped.
    let callback = unsafe { Arc::from_raw(data.cast::<Callback>()) };
    callback.call();
}

/// A callback that takes every lock: those of the requests in flight of both queue pairs, of posting, of the
/// completion queue and, by dropping a queue pair on a shared receive queue, of the driver's waker.
fn callback(futures: &Futures, shared: Vec<AsyncQueuePair>) -> Arc<Callback> {
    let (qp, cq, shared) = (futures.qp.clone(), futures.cq.clone(), Mutex::new(shared));
    let act = move || {
        assert!(qp.in_flight() <= 8);
        assert_eq!(cq.unmatched(), 0);
        let mut sent = qp.send_inline(&[]);
        let _ = Pin::new(&mut sent).poll(&mut super::futures::cx());
        drop(sent);
        let last = shared.lock().unwrap().pop();
        drop(last);
    };
    Arc::new(Callback { act: Box::new(act), calls: AtomicUsize::new(0) })
}

/// Runs `test` with futures and a callback, and fails if it deadlocks.
fn in_time(test: impl FnOnce(&mut Futures, &Arc<Callback>) + Send + 'static) {
    let (told, heard) = channel();
    std::thread::spawn(move || {
        let mut futures = Futures::new();
        let Futures { bench, cq, .. } = &futures;
        let srq = cq.adopt_srq(bench.pd.srq_builder(4).build().unwrap()).unwrap();
        let make = |_| {
            let builder = bench.pd.qp_builder(cq, cq, QpType::RC).max_send_wr(1).srq(&srq);
            cq.adopt_on(builder.build().unwrap(), &srq).unwrap()
        };
        let shared = (0..8).map(make).collect();
        let callback = callback(&futures, shared);
        test(&mut futures, &callback);
        assert!(callback.calls.load(Ordering::Relaxed) > 0, "nothing was called");
        told.send(()).unwrap();
    });
    assert_eq!(heard.recv_timeout(Duration::from_secs(10)), Ok(()), "a waker waits for itself");
}

fn poll<F: Future + Unpin>(future: &mut F, waker: &Waker) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(waker))
}

#[test]
fn the_drivers_waker_is_cloned_and_dropped_without_a_lock() {
    in_time(|futures, callback| {
        for _ in 0..3 {
            let waker = Callback::waker(&Arc::new(Callback {
                act: Box::new({
                    let callback = callback.clone();
                    move || callback.call_outside()
                }),
                calls: AtomicUsize::new(0),
            }));
            let _ = poll(&mut futures.driver, &waker);
            let _ = poll(&mut futures.driver, &callback.waker());
        }
    });
}

impl Callback {
    /// As [`call`](Self::call), within a call of another.
    fn call_outside(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        (self.act)();
    }
}

/// The task drops the last handle of the queue, which wakes the driver: a second panic would abort the process.
#[test]
fn a_driver_whose_waker_panics_does_not_abort_a_task_that_panics() {
    struct Panics;
    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("the waker");
        }
    }
    let Futures { cq, qp, mut driver, .. } = Futures::new();
    assert!(poll(&mut driver, &Waker::from(Arc::new(Panics))).is_pending());
    drop(qp);
    let end = catch_unwind(AssertUnwindSafe(|| {
        let _cq = cq;
        panic!("the task");
    }));
    assert_eq!(end.unwrap_err().downcast_ref::<&str>(), Some(&"the task"));
}

#[test]
fn a_requests_waker_is_cloned_and_dropped_without_a_lock() {
    in_time(|futures, callback| {
        let (one, other) = (callback.waker(), Waker::noop());
        let mut received = futures.qp.recv(futures.pool.take().unwrap());
        for waker in [&one, other, &one, &one] {
            assert!(poll(&mut received, waker).is_pending());
        }
        futures.complete(Role::Recv, WcStatus::SUCCESS);
        assert!(poll(&mut received, &one).is_ready());
        let mut dropped = futures.qp.recv(futures.pool.take().unwrap());
        assert!(poll(&mut dropped, &one).is_pending());
        drop(dropped);
    });
}

/// A task polls all its requests whenever one of them is over.
#[test]
fn polling_a_request_again_neither_clones_nor_drops_its_waker() {
    in_time(|futures, callback| {
        let waker = callback.waker();
        let mut received = futures.qp.recv(futures.pool.take().unwrap());
        assert!(poll(&mut received, &waker).is_pending());
        let calls = callback.calls.load(Ordering::Relaxed);
        for _ in 0..3 {
            assert!(poll(&mut received, &waker).is_pending());
        }
        assert_eq!(callback.calls.load(Ordering::Relaxed), calls);
    });
}

#[test]
fn wakers_that_wait_for_room_are_used_without_a_lock() {
    in_time(|futures, callback| {
        let (one, other) = (callback.waker(), Waker::noop());
        let mut sends: Vec<_> =
            (0..8).map(|_| futures.qp.send(futures.pool.take().unwrap())).collect();
        for waker in [&one, other, &one] {
            sends.iter_mut().for_each(|send| assert!(poll(send, waker).is_pending()));
        }
        assert!(!sends[7].is_posted(), "the queue has room for all");
        // The waiters leave, first to last, and each wakes the next.
        sends.drain(5..7).for_each(drop);
        futures.complete(Role::Send, WcStatus::SUCCESS);
        // The connection breaks, and all other waiters are woken.
        futures.complete(Role::Send, WcStatus::RETRY_EXC_ERR);
        for send in &mut sends {
            let _ = poll(send, &one);
        }
    });
}

/// For its memory, and for the state of its queue pair.
#[test]
fn the_waker_of_a_refused_request_is_dropped_without_a_lock() {
    in_time(|futures, callback| {
        let one = callback.waker();
        let foreign = futures.bench.context.alloc_pd().unwrap();
        let foreign = foreign.buffer_pool_builder(64).build().unwrap();
        assert!(poll(&mut futures.qp.send(foreign.take().unwrap()), &one).is_ready());
        assert!(poll(&mut futures.qp.recv(foreign.take().unwrap()), &one).is_ready());
        futures.qp.qp.set_state(QpState::RESET);
        assert!(poll(&mut futures.qp.send(futures.pool.take().unwrap()), &one).is_ready());
        assert!(poll(&mut futures.qp.recv(futures.pool.take().unwrap()), &one).is_ready());
        assert!(poll(&mut futures.qp.send_inline(&[]), &one).is_ready());
    });
}

#[test]
fn the_end_of_the_driver_calls_wakers_without_a_lock() {
    in_time(|futures, callback| {
        let one = callback.waker();
        let mut received = futures.qp.recv(futures.pool.take().unwrap());
        assert!(poll(&mut received, &one).is_pending());
        let fresh = Futures::new();
        drop(std::mem::replace(&mut futures.driver, fresh.driver));
        assert!(poll(&mut received, &one).is_ready());
    });
}
