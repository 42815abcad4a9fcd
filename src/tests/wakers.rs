//! Wakers are the program's: what they do when they are cloned, woken or dropped may use the same
//! queues, so that no lock of the library is held meanwhile.
#![allow(unsafe_code, reason = "a waker whose clone is the program's code is made by hand")]

use super::futures::Futures;
use crate::aio::QueuePair;
use crate::uverbs::scripted::Role;
use crate::{QpType, WcStatus};
use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Waker};
use std::time::Duration;

/// What a waker calls back, and how often.
struct Callback {
    act: Box<dyn Fn() + Send + Sync>,
    calls: AtomicUsize,
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

impl Callback {
    fn call(&self) {
        // What it does clones and drops wakers in turn.
        if !INSIDE.replace(true) {
            self.calls.fetch_add(1, Ordering::Relaxed);
            (self.act)();
            INSIDE.set(false);
        }
    }

    fn waker(self: &Arc<Self>) -> Waker {
        let data = Arc::into_raw(self.clone()).cast();
        // SAFETY: the table does with the pointer what it would do with the `Arc` that it came from.
        unsafe { Waker::new(data, &TABLE) }
    }
}

const TABLE: RawWakerVTable = RawWakerVTable::new(clone, wake, wake_by_ref, drop_waker);

unsafe fn clone(data: *const ()) -> RawWaker {
    let data = data.cast::<Callback>();
    // SAFETY: the pointer is that of an `Arc` which the waker holds.
    unsafe { &*data }.call();
    // SAFETY: as above; the new waker holds the new count.
    unsafe { Arc::increment_strong_count(data) };
    RawWaker::new(data.cast(), &TABLE)
}

unsafe fn wake(data: *const ()) {
    // SAFETY: as the caller promises, who gives the waker up.
    unsafe { drop_waker(data) };
}

unsafe fn wake_by_ref(data: *const ()) {
    // SAFETY: as in `clone`.
    unsafe { &*data.cast::<Callback>() }.call();
}

unsafe fn drop_waker(data: *const ()) {
    // SAFETY: the waker held a count, and is no more.
    let callback = unsafe { Arc::from_raw(data.cast::<Callback>()) };
    callback.call();
}

/// Everything that locks: the requests of both queue pairs, posting, and the completion queue; and once a
/// call, the driver's waker, which the last handle of a queue pair on a shared receive queue calls.
fn callback(futures: &Futures, shared: Vec<QueuePair>) -> Arc<Callback> {
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

/// Runs `test` with futures, a callback and another waker, and fails if it waits for itself.
fn in_time(test: impl FnOnce(&mut Futures, &Arc<Callback>) + Send + 'static) {
    let (told, heard) = channel();
    std::thread::spawn(move || {
        let mut futures = Futures::new();
        let srq = futures.cq.create_srq(&futures.bench.pd, 4, |srq| srq).unwrap();
        let make = |_| {
            let pd = &futures.bench.pd;
            futures.cq.create_qp_on(pd, QpType::RC, &srq, |qp| qp.max_send_wr(1)).unwrap()
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
fn a_driver_s_waker_is_cloned_and_dropped_without_a_lock() {
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

#[test]
fn a_request_s_waker_is_cloned_and_dropped_without_a_lock() {
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

#[test]
fn the_wakers_of_a_line_are_cloned_woken_and_dropped_without_a_lock() {
    in_time(|futures, callback| {
        let (one, other) = (callback.waker(), Waker::noop());
        let mut sends: Vec<_> =
            (0..8).map(|_| futures.qp.send(futures.pool.take().unwrap())).collect();
        for waker in [&one, other, &one] {
            sends.iter_mut().for_each(|send| assert!(poll(send, waker).is_pending()));
        }
        assert!(!sends[7].is_posted(), "the queue has room for all");
        // Those that wait leave, from the first on, and each wakes the next.
        sends.drain(5..7).for_each(drop);
        futures.complete(Role::Send, WcStatus::SUCCESS);
        // The rest breaks, and everybody is told.
        futures.complete(Role::Send, WcStatus::RETRY_EXC_ERR);
        for send in &mut sends {
            let _ = poll(send, &one);
        }
    });
}

#[test]
fn the_end_of_a_driver_wakes_without_a_lock() {
    in_time(|futures, callback| {
        let one = callback.waker();
        let mut received = futures.qp.recv(futures.pool.take().unwrap());
        assert!(poll(&mut received, &one).is_pending());
        let fresh = Futures::new();
        drop(std::mem::replace(&mut futures.driver, fresh.driver));
        assert!(poll(&mut received, &one).is_ready());
    });
}
