//! One thread's view of the requests in flight.

use super::queue::Queue;
use super::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Wake;

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn waker() -> (Arc<Count>, Waker) {
    let count = Arc::<Count>::default();
    (count.clone(), Waker::from(count))
}

/// Completes a request, and returns how many tasks that wakes.
fn finish(queue: &Queue, wr_id: u64) -> usize {
    let mut deferred = Deferred::default();
    Queue::complete(&queue.inflight, wr_id, 0, &mut deferred);
    queue.table.make_room(true, &mut deferred);
    let woken = deferred.wakers();
    deferred.run();
    woken
}

#[test]
fn waiters_are_admitted_in_the_order_in_which_they_came() {
    let mut queue = Queue::new(4);
    let inflight = queue.inflight.clone();
    let (first, one) = waker();
    let (second, two) = waker();
    let (mut a, mut b) = (None, None);
    assert!(!inflight.is_busy(Side::Send));
    inflight.wait(Side::Send, &mut a, &one);
    assert!(inflight.is_busy(Side::Send) && !inflight.is_busy(Side::Recv));
    assert_eq!(inflight.admit(Side::Send, &mut b, &two), Admission::Wait);
    assert_eq!(inflight.admit(Side::Recv, &mut None, &two), Admission::Granted);
    assert_eq!(inflight.admit(Side::Send, &mut a, &one), Admission::Granted);
    let wr_id = queue.post(&one).unwrap();
    inflight.leave(Side::Send, a.take());
    assert_eq!(second.0.load(Ordering::Relaxed), 1, "the next waiter may find room, too");
    // A waiter who was woken and leaves wakes the next one.
    let (third, three) = waker();
    let mut c = None;
    assert_eq!(inflight.admit(Side::Send, &mut c, &three), Admission::Wait);
    inflight.leave(Side::Send, b.take());
    assert_eq!(third.0.load(Ordering::Relaxed), 1);
    assert_eq!(finish(&queue, wr_id), 2, "the request's future, and a waiter for room");
    assert_eq!(first.0.load(Ordering::Relaxed), 1);
    assert!(matches!(inflight.progress(wr_id, &one), OpProgress::Over(..)));
    assert!(queue.table.anyone_waits());
    inflight.leave(Side::Send, c.take());
    assert!(!queue.table.anyone_waits() && !inflight.is_busy(Side::Send));
}

/// Only futures of queues that completed something are woken, if the driver knew that some wait.
#[test]
fn room_in_one_queue_wakes_the_waiters_of_that_queue() {
    let mut queue = Queue::new(1);
    let other = Inflight::<Shared>::new(None, queue.inflight.loans.clone(), queue.table.waiting());
    let key = queue.table.insert(other.clone());
    let (count, waker) = waker();
    other.wait(Side::Recv, &mut None, &waker);
    let woken = |queue: &Queue, made_room: Option<InflightKey>, all| {
        let mut deferred = Deferred::default();
        made_room.into_iter().for_each(|key| deferred.make_room(key));
        queue.table.make_room(all, &mut deferred);
        deferred.wakers()
    };
    assert_eq!((woken(&queue, None, false), woken(&queue, Some(key), false)), (0, 1));
    assert_eq!(woken(&queue, None, true), 1, "they may have begun to wait during the poll");
    drop((queue.table.remove(key), other));
    assert!(!queue.table.anyone_waits(), "its ticket was forgotten");
    assert_eq!(count.0.load(Ordering::Relaxed), 0);
}

/// A future's destructor lets the next waiter try: a second panic would abort the process.
#[test]
fn a_waiter_whose_waker_panics_does_not_abort_a_task_that_panics() {
    struct Panics;
    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("the waker");
        }
    }
    struct Leaves<'a>(&'a Inflight, Option<Ticket>);
    impl Drop for Leaves<'_> {
        fn drop(&mut self) {
            self.0.leave(Side::Send, self.1.take());
        }
    }
    let inflight = Queue::new(1).inflight;
    let (_, first) = waker();
    let mut leaves = Leaves(&inflight, None);
    inflight.wait(Side::Send, &mut leaves.1, &first);
    inflight.wait(Side::Send, &mut None, &Waker::from(Arc::new(Panics)));
    let end = catch_unwind(AssertUnwindSafe(|| {
        let _leaves = leaves;
        panic!("the task");
    }));
    assert_eq!(end.unwrap_err().downcast_ref::<&str>(), Some(&"the task"));
}

/// A task that looks at several requests one after the other would miss the first if it ends in between.
#[test]
fn the_request_that_was_over_first_is_found() {
    let mut queue = Queue::new(4);
    let inflight = queue.inflight.clone();
    let (count, waker) = waker();
    let wr_ids = [(); 3].map(|()| queue.post(&waker).unwrap());
    let finish = |wr_id, over| {
        let mut deferred = Deferred::default();
        Queue::complete(&inflight, wr_id, over, &mut deferred);
        deferred.run();
    };
    assert_eq!(inflight.first_over(wr_ids.into_iter()), None);
    assert!(wr_ids.iter().all(|wr_id| inflight.watch(*wr_id, &waker)));
    finish(wr_ids[2], 0);
    finish(wr_ids[0], 1);
    assert_eq!(count.0.load(Ordering::Relaxed), 2);
    assert!(!inflight.watch(wr_ids[0], &waker) && inflight.watch(wr_ids[1], &waker));
    assert_eq!(inflight.first_over(wr_ids.into_iter()), Some(wr_ids[2]));
    assert!(inflight.move_ends(Side::Send));
    assert_eq!(
        inflight.first_over(wr_ids.into_iter()),
        Some(wr_ids[2]),
        "also of those that were moved"
    );
    assert!(matches!(inflight.progress(wr_ids[2], &waker), OpProgress::Over(..)));
    let left = [wr_ids[0], wr_ids[1]];
    assert_eq!(inflight.first_over(left.into_iter()), Some(left[0]));
    let mut deferred = Deferred::default();
    inflight.driver_gone(&mut deferred);
    deferred.run();
    assert_eq!(
        inflight.first_over([wr_ids[1]].into_iter()),
        Some(wr_ids[1]),
        "nobody completes it any more"
    );
}

/// Otherwise a program that waits for the next request before it looks at these would wait for ever.
#[test]
fn ends_that_nobody_fetched_leave_room_for_other_requests() {
    let mut queue = Queue::new(2);
    let inflight = queue.inflight.clone();
    let (_, waker) = waker();
    let wr_ids = [(); 2].map(|()| queue.post(&waker).unwrap());
    assert!(!inflight.move_ends(Side::Send), "they are in flight");
    wr_ids.iter().for_each(|wr_id| assert_eq!(finish(&queue, *wr_id), 1));
    assert_eq!((queue.post(&waker), inflight.in_flight()), (None, 0));
    assert!(inflight.move_ends(Side::Send) && !inflight.move_ends(Side::Send));
    let next = queue.post(&waker).unwrap();
    assert!(matches!(inflight.progress(wr_ids[0], &waker), OpProgress::Over(..)));
    assert!(matches!(inflight.progress(wr_ids[0], &waker), OpProgress::Lost(_)), "only once");
    inflight.abandon(wr_ids[1]);
    assert!(inflight.state().unwrap().moved.is_empty());
    assert!(matches!(inflight.progress(next, &waker), OpProgress::Pending));
}

/// A task that only its waker holds, and that has a request of the same queue pair.
struct Holder(Arc<Inflight>, u64);

impl Wake for Holder {
    fn wake(self: Arc<Self>) {}
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.0.abandon(self.1);
    }
}

/// Dropping a waker may drop futures of the same queue, which take the lock.
#[test]
fn wakers_are_dropped_after_the_lock_and_the_slot_are_released() {
    let (_, other) = waker();
    let end: [fn(&Queue, u64, &Waker); 4] = [
        |queue, wr_id, other| {
            assert!(matches!(queue.inflight.progress(wr_id, other), OpProgress::Pending))
        },
        |queue, wr_id, _| queue.inflight.abandon(wr_id),
        |queue, wr_id, _| assert_eq!(finish(queue, wr_id), 1),
        |queue, wr_id, other| {
            queue.inflight.fail_all();
            assert!(matches!(queue.inflight.progress(wr_id, other), OpProgress::Lost(_)));
        },
    ];
    // Of a slot, and of a waiter.
    for end in end {
        let mut queue = Queue::new(4);
        let held = queue.post(&other).unwrap();
        let holder = Waker::from(Arc::new(Holder(queue.inflight.clone(), held)));
        let wr_id = queue.post(&holder).unwrap();
        drop(holder);
        end(&queue, wr_id, &other);
        assert_eq!(finish(&queue, held), 0, "it was abandoned");
    }
    let end: [fn(&Inflight, &mut Option<Ticket>, &Waker); 2] = [
        |inflight, number, other| inflight.wait(Side::Send, number, other),
        |inflight, number, _| inflight.leave(Side::Send, number.take()),
    ];
    for end in end {
        let mut queue = Queue::new(4);
        let held = queue.post(&other).unwrap();
        let holder = Waker::from(Arc::new(Holder(queue.inflight.clone(), held)));
        let mut number = None;
        queue.inflight.wait(Side::Send, &mut number, &holder);
        drop(holder);
        end(&queue.inflight, &mut number, &other);
        queue.inflight.leave(Side::Send, number);
        assert_eq!(finish(&queue, held), 0, "it was abandoned");
    }
}

/// With a request in flight, and with a waiter for room.
#[test]
#[cfg_attr(miri, ignore = "it forks")]
fn a_child_does_not_wait_for_a_lock_or_a_slot_of_its_parent() {
    let mut queue = Queue::new(2);
    let inflight = queue.inflight.clone();
    let (count, waker) = waker();
    let wr_id = queue.post(&waker).unwrap();
    let mut number = None;
    inflight.wait(Side::Send, &mut number, &waker);
    let hold = || (inflight.state(), inflight.loans(wr_id).claim(wr_id));
    crate::sync::lock::in_child_while_held(hold, || {
        let mut number = number;
        let admission = inflight.admit(Side::Send, &mut number, &waker);
        assert_eq!(admission, Admission::Broken(Broken::Forked));
        let progress = inflight.progress(wr_id, &waker);
        assert!(matches!(progress, OpProgress::Lost(Broken::Forked)));
        assert_eq!(inflight.first_over([wr_id].into_iter()), Some(wr_id));
        assert!(!inflight.watch(wr_id, &waker) && !inflight.move_ends(Side::Send));
        inflight.wait(Side::Recv, &mut None, &waker);
        inflight.leave(Side::Send, number.take());
        inflight.abandon(wr_id);
        inflight.fail_all();
        inflight.fail(WcStatus::LOC_LEN_ERR, &mut Deferred::default());
        assert!(inflight.abort().unwrap_err().is_forked());
        assert_eq!(inflight.in_flight(), 0);
        assert_eq!(count.0.load(Ordering::Relaxed), 0, "a task of the parent was woken");
    });
    assert_eq!(inflight.in_flight(), 1);
}

/// A task that waits for many requests then finds all of them over.
#[test]
fn wakers_are_called_after_all_completions_are_stored() {
    let mut queue = Queue::new(4);
    let (count, waker) = waker();
    let mut deferred = Deferred::default();
    let wr_ids = [(); 3].map(|()| queue.post(&waker).unwrap());
    for wr_id in wr_ids {
        Queue::complete(&queue.inflight, wr_id, 0, &mut deferred);
        assert_eq!(count.0.load(Ordering::Relaxed), 0, "the others are not stored yet");
    }
    deferred.run();
    assert_eq!(count.0.load(Ordering::Relaxed), 3);
    let is_over = |wr_id| matches!(queue.inflight.progress(wr_id, &waker), OpProgress::Over(..));
    assert!(wr_ids.into_iter().all(is_over));
}

#[test]
fn an_abandoned_request_wakes_no_task() {
    let mut queue = Queue::new(1);
    let inflight = queue.inflight.clone();
    let (count, waker) = waker();
    for late in [false, true] {
        let wr_id = queue.post(&waker).unwrap();
        if late {
            assert_eq!(finish(&queue, wr_id), 1);
            inflight.abandon(wr_id);
        } else {
            inflight.abandon(wr_id);
            assert_eq!((inflight.in_flight(), finish(&queue, wr_id)), (1, 0));
        }
        assert_eq!(inflight.in_flight(), 0);
    }
    assert_eq!(count.0.load(Ordering::Relaxed), 1);
    assert!(queue.post(&waker).is_some(), "the slot is free");
}

/// The waker of a task that moved to another thread, and of one that did not.
#[test]
fn a_future_is_woken_by_the_waker_that_polled_it_last() {
    let mut queue = Queue::new(2);
    let ((first, one), (second, two)) = (waker(), waker());
    let wr_id = queue.post(&one).unwrap();
    for _ in 0..2 {
        assert!(matches!(queue.inflight.progress(wr_id, &two), OpProgress::Pending));
    }
    assert_eq!(finish(&queue, wr_id), 1);
    let counts = [&first, &second].map(|count| count.0.load(Ordering::Relaxed));
    assert_eq!(counts, [0, 1]);
    assert!(matches!(queue.inflight.progress(wr_id, &one), OpProgress::Over(..)));
}

/// Also one that was posted while the driver ended.
#[test]
fn a_request_that_nobody_completes_is_lost_and_stays_lent() {
    let mut queue = Queue::new(2);
    let (count, waker) = waker();
    let wr_id = queue.post(&waker).unwrap();
    assert!(!queue.inflight.is_late(Side::Send));
    queue.inflight.fail_all();
    assert_eq!(count.0.load(Ordering::Relaxed), 1);
    let late = queue.post(&waker).unwrap();
    assert!(queue.inflight.is_late(Side::Send));
    for wr_id in [wr_id, late] {
        let progress = queue.inflight.progress(wr_id, &waker);
        assert!(matches!(progress, OpProgress::Lost(Broken::DriverGone)));
    }
    assert_eq!(queue.inflight.in_flight(), 2);
}

/// The driver has taken the loan of a request that failed, and needs the lock that a poster has which looks for ends.
#[test]
fn a_request_fails_while_a_poster_moves_ends() {
    use std::sync::mpsc::channel;
    use std::time::Duration;
    let (done, is_done) = channel();
    let mut queue = Queue::new(1);
    let wr_id = queue.post(Waker::noop()).unwrap();
    std::thread::spawn(move || {
        let inflight = queue.inflight.clone();
        let loan = inflight.loans(wr_id).take_back(wr_id).expect("it is in flight");
        let theirs = inflight.clone();
        let poster = std::thread::spawn(move || theirs.move_ends(Side::Send));
        // The poster has found the loan by then.
        std::thread::sleep(Duration::from_millis(50));
        let mut deferred = Deferred::default();
        inflight.refuse(WcStatus::RETRY_EXC_ERR, &mut deferred);
        let outcome = Outcome::new(WcStatus::RETRY_EXC_ERR, WcOpcode::SEND, Qpn(1));
        super::complete(VisitedCompletion::copied(loan, outcome), 0, &mut deferred);
        assert!(poster.join().unwrap(), "the end was moved");
        done.send(()).unwrap();
    });
    assert_eq!(is_done.recv_timeout(Duration::from_secs(10)), Ok(()), "they wait for each other");
}
