//! Futures and the driver at the same time.

use super::*;
use crate::lending::loan_table::lender::Lender;
use crate::number::Qpn;
use crate::wc::WcOpcode;
use loom::sync::Notify;
use loom::thread;
use std::task::Wake;

/// A task that sleeps until it is woken.
struct Task(Notify);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.0.notify();
    }
}

fn task() -> (Arc<Task>, Waker) {
    let task = Arc::new(Task(Notify::new()));
    (task.clone(), Waker::from(task))
}

fn complete(inflight: &Inflight, index: u32) {
    let outcome = Outcome::new(WcStatus::SUCCESS, WcOpcode::SEND, Qpn(1));
    let mut deferred = Deferred::default();
    inflight.complete(index, Side::Send, Memory::None, outcome, &mut deferred);
    deferred.run();
}

fn admit(inflight: &Inflight, waker: &Waker) -> u32 {
    match inflight.admit(Side::Send, &mut None, waker) {
        Admission::Granted(index) => index,
        other => panic!("{other:?}"),
    }
}

/// A request completes while its future is polled: the future is over, or is woken. Both run in threads of
/// their own, here and below: loom does not preempt a model's first thread as it does others.
#[test]
fn a_future_polled_while_its_request_completes_is_woken() {
    loom::model(|| {
        let inflight = Inflight::<Shared>::new(None);
        let (task, waker) = task();
        let index = admit(&inflight, &waker);
        let theirs = inflight.clone();
        let driver = thread::spawn(move || complete(&theirs, index));
        let theirs = inflight.clone();
        let future = thread::spawn(move || {
            while let OpProgress::Pending = theirs.progress(index, &waker) {
                task.0.wait();
            }
        });
        driver.join().unwrap();
        future.join().unwrap();
        assert_eq!(inflight.in_flight(), 0);
    });
}

/// A future is dropped while its request completes.
#[test]
fn a_future_dropped_while_its_request_completes_leaves_its_slot_free() {
    loom::model(|| {
        let inflight = Inflight::<Shared>::new(None);
        let (_, waker) = task();
        let index = admit(&inflight, &waker);
        let theirs = inflight.clone();
        let driver = thread::spawn(move || complete(&theirs, index));
        let theirs = inflight.clone();
        let future = thread::spawn(move || theirs.abandon(index));
        driver.join().unwrap();
        future.join().unwrap();
        let state = inflight.state().unwrap();
        assert_eq!((state.slots.len(), &state.free[..]), (1, &[0][..]));
    });
}

/// The queue is full when a future wants to post, and a request completes: the future finds room, or is
/// woken. A loan table stands for the queue.
#[test]
fn a_future_that_finds_the_queue_full_is_woken() {
    loom::model(|| {
        let inflight = Inflight::<Shared>::new(None);
        let mut queue = Lender::new(1, 0);
        let (_, other) = task();
        let index = admit(&inflight, &other);
        let mut lending = queue.begin();
        let wr_id = lending.free_slot().ok().map(|free_slot| {
            let wr_id = free_slot.wr_id();
            free_slot.lend(());
            wr_id
        });
        lending.commit();
        let (theirs, table) = (inflight.clone(), queue.table().clone());
        let driver = thread::spawn(move || {
            table.take_back(wr_id.unwrap()).unwrap().take();
            complete(&theirs, index);
        });
        let future = thread::spawn(move || {
            let (task, waker) = task();
            let mut number = None;
            loop {
                let Admission::Granted(index) = inflight.admit(Side::Send, &mut number, &waker)
                else {
                    panic!("nobody else waits");
                };
                if queue.begin().free_slot().is_ok() {
                    break;
                }
                inflight.wait(Side::Send, &mut number, &waker);
                if queue.begin().free_slot().is_ok() {
                    break;
                }
                inflight.release(index);
                task.0.wait();
            }
        });
        driver.join().unwrap();
        future.join().unwrap();
    });
}
