//! Futures and the driver at the same time.

use super::queue::Queue;
use super::*;
use crate::lending::loan_table::SETTLES_ALONE;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Mutex, Notify};
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

/// A ring of receives with room for one, which the device writes no completion for until it is flushed.
#[derive(Debug, Default)]
pub(super) struct Ring(AtomicU32);

impl Ring {
    const POSTED: u32 = 1;
    const FLUSHED: u32 = 2;

    fn post(&self) {
        self.0.store(Ring::POSTED, Ordering::Relaxed);
    }

    /// Flushes a receive that is there, as rxe does when the queue pair is moved to ERR.
    pub(super) fn flush(&self) {
        let _ = self.0.compare_exchange(
            Ring::POSTED,
            Ring::FLUSHED,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
    }
}

fn complete(inflight: &Inflight, wr_id: u64) {
    let mut deferred = Deferred::default();
    Queue::complete_sent(inflight, wr_id, &mut deferred);
    deferred.run();
}

/// Runs driver and future at the same time, each in a thread of its own: loom does not preempt a model's first thread
/// as it does others.
fn at_once(driver: impl FnOnce() + Send + 'static, future: impl FnOnce() + Send + 'static) {
    let (driver, future) = (thread::spawn(driver), thread::spawn(future));
    driver.join().unwrap();
    future.join().unwrap();
}

/// Polls the future of a request in a task until it is over.
fn await_end(inflight: &Inflight, wr_id: u64, (task, waker): (Arc<Task>, Waker)) {
    while let OpProgress::Pending = inflight.progress(wr_id, &waker) {
        task.0.wait();
    }
}

/// Watches a request in a task until it is not pending any more.
fn await_watched(inflight: &Inflight, wr_id: u64) {
    let (task, waker) = task();
    while inflight.watch(wr_id, &waker) {
        task.0.wait();
    }
}

/// A request completes while its future is polled: the future is over, or is woken.
#[test]
fn a_future_polled_while_its_request_completes_is_woken() {
    loom::model(|| {
        let mut queue = Queue::new(1);
        let (task, waker) = task();
        let wr_id = queue.post(&waker).unwrap();
        let [a, b] = [queue.inflight.clone(), queue.inflight.clone()];
        at_once(move || complete(&a, wr_id), move || await_end(&b, wr_id, (task, waker)));
        assert!(queue.post(Waker::noop()).is_some());
    });
}

/// The same for a future that moved to another task.
#[test]
fn a_future_that_moved_to_another_task_wakes_that_one() {
    loom::model(|| {
        let mut queue = Queue::new(1);
        let (_, other) = task();
        let wr_id = queue.post(&other).unwrap();
        let [a, b] = [queue.inflight.clone(), queue.inflight.clone()];
        at_once(move || complete(&a, wr_id), move || await_end(&b, wr_id, task()));
    });
}

/// A future is dropped while its request completes.
#[test]
fn a_future_dropped_while_its_request_completes_leaves_its_slot_free() {
    loom::model(|| {
        let mut queue = Queue::new(1);
        let (_, waker) = task();
        let wr_id = queue.post(&waker).unwrap();
        let [a, b] = [queue.inflight.clone(), queue.inflight.clone()];
        at_once(move || complete(&a, wr_id), move || b.abandon(wr_id));
        assert!(queue.post(&waker).is_some());
    });
}

/// A poster needs the slot of a request whose future fetches its end at that time.
#[test]
fn an_end_is_fetched_from_its_slot_or_from_where_it_was_moved() {
    loom::model(|| {
        let mut queue = Queue::new(1);
        let wr_id = queue.post(Waker::noop()).unwrap();
        complete(&queue.inflight, wr_id);
        let theirs = queue.inflight.clone();
        let future = thread::spawn(move || {
            let progress = theirs.progress(wr_id, Waker::noop());
            assert!(matches!(progress, OpProgress::Over(..)));
        });
        let poster = thread::spawn(move || {
            if queue.inflight.move_ends(Side::Send) {
                assert!(queue.post(Waker::noop()).is_some());
            }
        });
        future.join().unwrap();
        poster.join().unwrap();
    });
}

/// A request fails while a poster needs its slot: the driver, which has taken the loan, waits for the lock that posters
/// take.
#[test]
fn a_request_fails_while_a_poster_moves_ends() {
    loom::model(|| {
        let mut queue = Queue::new(1);
        let wr_id = queue.post(Waker::noop()).unwrap();
        let theirs = queue.inflight.clone();
        let driver = thread::spawn(move || {
            let loan = theirs.loans(wr_id).take_back(wr_id).expect("it is in flight");
            let mut deferred = Deferred::default();
            theirs.refuse(WcStatus::RETRY_EXC_ERR, &mut deferred);
            let outcome = Outcome::new(WcStatus::RETRY_EXC_ERR, WcOpcode::SEND, Qpn(1));
            super::complete(VisitedCompletion::copied(loan, outcome), 0, &mut deferred);
            deferred.run();
        });
        let poster = thread::spawn(move || {
            queue.inflight.move_ends(Side::Send);
            queue
        });
        driver.join().unwrap();
        let mut queue = poster.join().unwrap();
        queue.inflight.move_ends(Side::Send);
        assert!(queue.post(Waker::noop()).is_some());
    });
}

/// The driver ends while a future posts and waits: the future learns of it.
#[test]
fn a_request_that_is_posted_while_the_driver_ends_is_lost() {
    loom::model(|| {
        let mut queue = Queue::new(1);
        let theirs = queue.inflight.clone();
        let driver = thread::spawn(move || theirs.fail_all());
        let future = thread::spawn(move || {
            let (task, waker) = task();
            let wr_id = queue.post(&waker).unwrap();
            if !queue.inflight.is_late(Side::Send) {
                task.0.wait();
            }
            let progress = queue.inflight.progress(wr_id, &waker);
            assert!(matches!(progress, OpProgress::Lost(Broken::DriverGone)));
        });
        driver.join().unwrap();
        future.join().unwrap();
    });
}

/// A receive is posted while the program aborts: it is flushed by the one, or by the other.
#[test]
fn a_receive_that_is_posted_while_the_program_aborts_is_flushed() {
    loom::model(|| {
        let inflight = Queue::new(1).inflight;
        let [a, b] = [inflight.clone(), inflight.clone()];
        let poster = move || {
            b.ring.post();
            b.is_late(Side::Recv);
        };
        at_once(move || a.abort().unwrap(), poster);
        assert_eq!(inflight.ring.0.load(Ordering::Relaxed), Ring::FLUSHED);
    });
}

/// A task that posts its next request in its waker.
struct Posts(Mutex<Queue>);

impl Wake for Posts {
    fn wake(self: Arc<Self>) {
        let mut queue = self.0.lock().unwrap();
        queue.inflight.move_ends(Side::Send);
        assert!(queue.post(Waker::noop()).is_some());
    }
}

/// The waker posts while the future is polled, to whose request the slot has belonged.
#[test]
fn a_waker_that_posts_finds_room() {
    loom::model(|| {
        let posts = Arc::new(Posts(Mutex::new(Queue::new(1))));
        let waker = Waker::from(posts.clone());
        let (a, wr_id) = {
            let mut queue = posts.0.lock().unwrap();
            (queue.inflight.clone(), queue.post(&waker).unwrap())
        };
        let b = a.clone();
        drop((waker, posts));
        let future = move || drop(b.progress(wr_id, Waker::noop()));
        at_once(move || complete(&a, wr_id), future);
    });
}

/// A task that drops the future of another request in its waker.
struct Abandons(Arc<Inflight>, u64);

impl Wake for Abandons {
    fn wake(self: Arc<Self>) {
        self.0.abandon(self.1);
    }
}

/// A request is over in one thread and its future is dropped by the waker of another one: a driver and the end of a queue
/// pair poll in two threads.
#[test]
fn a_waker_that_abandons_a_request_leaves_its_slot_free() {
    loom::model(|| {
        let mut queue = Queue::new(2);
        let abandoned = queue.post(Waker::noop()).unwrap();
        let abandons = Abandons(queue.inflight.clone(), abandoned);
        let wr_id = queue.post(&Waker::from(Arc::new(abandons))).unwrap();
        let [a, b] = [queue.inflight.clone(), queue.inflight.clone()];
        at_once(move || complete(&a, wr_id), move || complete(&b, abandoned));
        queue.inflight.abandon(wr_id);
        assert!((0..2).all(|_| queue.post(Waker::noop()).is_some()));
    });
}

/// The driver ends while a task begins to watch a request of a list.
#[test]
fn a_list_that_is_polled_while_the_driver_ends_is_woken() {
    loom::model(|| {
        let mut queue = Queue::new(1);
        let wr_id = queue.post_settling_alone().unwrap();
        let [a, b] = [queue.inflight.clone(), queue.inflight.clone()];
        at_once(move || a.fail_all(), move || await_watched(&b, wr_id));
    });
}

/// The driver ends while a future changes its waker.
#[test]
fn a_future_polled_while_the_driver_ends_is_woken() {
    loom::model(|| {
        let mut queue = Queue::new(1);
        let (_, other) = task();
        let wr_id = queue.post(&other).unwrap();
        let [a, b] = [queue.inflight.clone(), queue.inflight.clone()];
        at_once(move || a.fail_all(), move || await_end(&b, wr_id, task()));
    });
}

/// The driver's part of a completion, beside futures that may wait for room in the queue.
fn complete_and_make_room(queue: &Queue, wr_id: u64) -> impl FnOnce() + Send + use<> {
    let inflight = queue.inflight.clone();
    let mut table =
        InflightTable::<Shared> { waiting: queue.table.waiting(), ..Default::default() };
    table.insert(inflight.clone());
    move || {
        let mut deferred = Deferred::default();
        let someone_waits = table.anyone_waits();
        if someone_waits {
            deferred.make_room(InflightKey::new(0, 0));
        }
        Queue::complete(&inflight, wr_id, 0, &mut deferred);
        table.make_room(!someone_waits, &mut deferred);
        deferred.run();
    }
}

/// The queue is full when a future wants to post, and a request completes: the future finds room, or is
/// woken.
#[test]
fn a_future_that_finds_the_queue_full_is_woken() {
    loom::model(|| {
        let mut queue = Queue::new(1);
        let wr_id = queue.post(Waker::noop()).unwrap();
        // Its future was dropped.
        queue.inflight.abandon(wr_id);
        let driver = complete_and_make_room(&queue, wr_id);
        let future = move || {
            let (task, waker) = task();
            let mut ticket = None;
            loop {
                if queue.post(&waker).is_some() {
                    break;
                }
                queue.inflight.wait(Side::Send, &mut ticket, &waker);
                if queue.post(&waker).is_some() {
                    break;
                }
                task.0.wait();
            }
            queue.inflight.leave(Side::Send, ticket);
        };
        at_once(driver, future);
    });
}

/// The same, with a task that waits for the request: its end is in the slot, and fetching it wakes nobody.
#[test]
fn a_future_that_finds_an_unfetched_end_moves_it_or_is_woken() {
    crate::sync::bounded_model(2, 3, || {
        let mut queue = Queue::new(1);
        let wr_id = queue.post(Waker::noop()).unwrap();
        let (inflight, complete) = (queue.inflight.clone(), complete_and_make_room(&queue, wr_id));
        let driver = move || {
            complete();
            let progress = inflight.progress(wr_id, Waker::noop());
            assert!(matches!(progress, OpProgress::Over(..)));
        };
        let future = move || {
            let (task, waker) = task();
            let mut ticket = None;
            while queue.post(&waker).is_none() {
                let side = Side::Send;
                if queue.inflight.make_or_await_room(side, &mut ticket, &waker) {
                    if queue.post(&waker).is_some() {
                        break;
                    }
                    task.0.wait();
                }
            }
            queue.inflight.leave(Side::Send, ticket);
        };
        at_once(driver, future);
    });
}

/// The driver ends before a future waits for room: it is woken, and finds why.
#[test]
fn a_future_that_begins_to_wait_while_the_driver_ends_is_woken() {
    loom::model(|| {
        let mut queue = Queue::new(1);
        queue.post(Waker::noop()).unwrap();
        let theirs = queue.inflight.clone();
        let future = move || {
            let (task, waker) = task();
            let mut ticket = None;
            queue.inflight.wait(Side::Send, &mut ticket, &waker);
            task.0.wait();
            let admitted = queue.inflight.admit(Side::Send, &mut ticket, &waker);
            assert!(matches!(admitted, Admission::Broken(Broken::DriverGone)));
            queue.inflight.leave(Side::Send, ticket);
        };
        at_once(move || theirs.fail_all(), future);
    });
}

/// The last request of a list is watched only after it was posted.
#[test]
fn a_list_that_watches_its_last_request_is_woken() {
    loom::model(|| {
        let mut queue = Queue::new(1);
        let wr_id = queue.post_settling_alone().unwrap();
        let [a, b] = [queue.inflight.clone(), queue.inflight.clone()];
        let list = move || {
            await_watched(&b, wr_id);
            let progress = b.progress(wr_id, Waker::noop());
            assert!(matches!(progress, OpProgress::Over(..)));
        };
        at_once(move || complete(&a, wr_id | SETTLES_ALONE), list);
        assert!(queue.post(Waker::noop()).is_some());
    });
}

/// A list finds in the slot that its request is over, or drops it before.
#[test]
fn a_list_that_waits_for_nothing_takes_its_end_or_leaves_it() {
    loom::model(|| {
        let mut queue = Queue::new(1);
        let wr_id = queue.post_settling_alone().unwrap();
        let [a, b] = [queue.inflight.clone(), queue.inflight.clone()];
        let list = move || match b.take_settled(wr_id) {
            Some(loan) => assert!(b.end_of(loan.take()).is_some()),
            None => b.abandon(wr_id),
        };
        at_once(move || complete(&a, wr_id | SETTLES_ALONE), list);
        assert!(queue.post(Waker::noop()).is_some());
    });
}
