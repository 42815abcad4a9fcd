//! One thread's view of the requests in flight.

use super::*;
use crate::number::Qpn;
use crate::wc::WcOpcode;
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

fn finish(inflight: &Inflight, index: u32) -> usize {
    let mut deferred = Deferred::default();
    inflight.complete(index, Side::Send, Memory::None, outcome(), &mut deferred);
    let woken = deferred.wakers();
    deferred.run();
    woken
}

pub(super) fn outcome() -> Outcome {
    Outcome::new(WcStatus::SUCCESS, WcOpcode::SEND, Qpn(1))
}

#[test]
fn waiters_are_admitted_in_the_order_in_which_they_came() {
    let inflight = Inflight::<Shared>::new(None);
    let (first, one) = waker();
    let (second, two) = waker();
    let (mut a, mut b) = (None, None);
    inflight.wait(Side::Send, &mut a, &one);
    assert_eq!(inflight.admit(Side::Send, &mut b, &two), Admission::Wait);
    assert!(matches!(inflight.admit(Side::Recv, &mut None, &two), Admission::Granted(_)));
    let Admission::Granted(index) = inflight.admit(Side::Send, &mut a, &one) else {
        panic!("first")
    };
    inflight.leave(Side::Send, &mut a);
    assert_eq!(second.0.load(Ordering::Relaxed), 1, "the next waiter may find room, too");
    // A waiter who was woken and leaves wakes the next one.
    let (third, three) = waker();
    let mut c = None;
    assert_eq!(inflight.admit(Side::Send, &mut c, &three), Admission::Wait);
    inflight.leave(Side::Send, &mut b);
    assert_eq!(third.0.load(Ordering::Relaxed), 1);
    assert_eq!(finish(&inflight, index), 2, "the request's future, and a waiter for room");
    assert_eq!(first.0.load(Ordering::Relaxed), 1);
    assert!(matches!(inflight.progress(index, &one), OpProgress::Over(..)));
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
    struct Leaves<'a>(&'a Inflight, Option<u64>);
    impl Drop for Leaves<'_> {
        fn drop(&mut self) {
            self.0.leave(Side::Send, &mut self.1);
        }
    }
    let inflight = Inflight::<Shared>::new(None);
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
    let inflight = Inflight::<Shared>::new(None);
    let (count, waker) = waker();
    let slots = [(); 3].map(|()| match inflight.admit(Side::Recv, &mut None, &waker) {
        Admission::Granted(index) => index,
        admission => panic!("{admission:?}"),
    });
    assert_eq!(inflight.first_over(slots.into_iter()), None);
    assert!(slots.iter().all(|index| inflight.watch(*index, &waker)));
    finish(&inflight, slots[2]);
    finish(&inflight, slots[0]);
    assert_eq!(count.0.load(Ordering::Relaxed), 2);
    assert!(!inflight.watch(slots[0], &waker) && inflight.watch(slots[1], &waker));
    assert_eq!(inflight.first_over(slots.into_iter()), Some(2));
    assert!(matches!(inflight.progress(slots[2], &waker), OpProgress::Over(..)));
    let left = [slots[0], slots[1]];
    assert_eq!(inflight.first_over(left.into_iter()), Some(0));
    let mut deferred = Deferred::default();
    inflight.driver_gone(&mut deferred);
    deferred.run();
    assert_eq!(
        inflight.first_over([slots[1]].into_iter()),
        Some(0),
        "nobody completes it any more"
    );
}

/// A task that only its waker holds, and that has a request of the same queue pair.
struct Holder(Arc<Inflight>, u32);

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
fn wakers_are_dropped_after_the_lock_is_released() {
    let (_, other) = waker();
    let admit =
        |inflight: &Inflight, waker: &Waker| match inflight.admit(Side::Send, &mut None, waker) {
            Admission::Granted(index) => index,
            admission => panic!("{admission:?}"),
        };
    let end: [fn(&Inflight, u32, &Waker); 4] = [
        |inflight, index, other| {
            assert!(matches!(inflight.progress(index, other), OpProgress::Pending))
        },
        |inflight, index, _| inflight.abandon(index),
        |inflight, index, _| inflight.release(index),
        |inflight, index, _| assert_eq!(finish(inflight, index), 1),
    ];
    for end in end {
        let inflight = Inflight::<Shared>::new(None);
        let held = admit(&inflight, &other);
        let holder = Waker::from(Arc::new(Holder(inflight.clone(), held)));
        let index = admit(&inflight, &holder);
        drop(holder);
        end(&inflight, index, &other);
        assert!(matches!(inflight.state().unwrap().slots[held as usize], OpSlot::Abandoned));
    }
    // The same for waiters.
    let end: [fn(&Inflight, &mut Option<u64>, &Waker); 2] = [
        |inflight, number, other| inflight.wait(Side::Send, number, other),
        |inflight, number, _| inflight.leave(Side::Send, number),
    ];
    for end in end {
        let inflight = Inflight::<Shared>::new(None);
        let held = admit(&inflight, &other);
        let holder = Waker::from(Arc::new(Holder(inflight.clone(), held)));
        let mut number = None;
        inflight.wait(Side::Send, &mut number, &holder);
        drop(holder);
        end(&inflight, &mut number, &other);
        assert!(matches!(inflight.state().unwrap().slots[held as usize], OpSlot::Abandoned));
    }
}

/// With a request in flight, and with a waiter for room.
#[test]
#[cfg_attr(miri, ignore = "it forks")]
fn a_child_does_not_wait_for_a_lock_of_its_parent() {
    let inflight = Inflight::<Shared>::new(None);
    let (count, waker) = waker();
    let Admission::Granted(index) = inflight.admit(Side::Send, &mut None, &waker) else { panic!() };
    let mut number = None;
    inflight.wait(Side::Send, &mut number, &waker);
    crate::sync::lock::in_child_while_held(
        || inflight.state(),
        || {
            let mut number = number;
            let admission = inflight.admit(Side::Send, &mut number, &waker);
            assert_eq!(admission, Admission::Broken(Broken::Forked));
            let progress = inflight.progress(index, &waker);
            assert!(matches!(progress, OpProgress::Lost(Broken::Forked)));
            inflight.wait(Side::Recv, &mut None, &waker);
            inflight.leave(Side::Send, &mut number);
            inflight.abandon(index);
            inflight.release(index);
            inflight.recv_posted();
            inflight.fail_all();
            assert!(inflight.abort().unwrap_err().is_forked());
            assert_eq!((inflight.in_flight(), finish(&inflight, index)), (0, 0));
            assert_eq!(count.0.load(Ordering::Relaxed), 0, "a task of the parent was woken");
        },
    );
    assert_eq!(inflight.in_flight(), 1);
}

/// A task that waits for many requests then finds all of them over.
#[test]
fn wakers_are_called_after_all_completions_are_stored() {
    let inflight = Inflight::<Shared>::new(None);
    let (count, waker) = waker();
    let mut deferred = Deferred::default();
    let slots = [(); 3].map(|()| match inflight.admit(Side::Send, &mut None, &waker) {
        Admission::Granted(index) => index,
        admission => panic!("{admission:?}"),
    });
    for index in slots {
        inflight.complete(index, Side::Send, Memory::None, outcome(), &mut deferred);
        assert_eq!(count.0.load(Ordering::Relaxed), 0, "the others are not stored yet");
    }
    deferred.run();
    assert_eq!(count.0.load(Ordering::Relaxed), 3);
    assert!(
        slots.iter().all(|&index| matches!(inflight.progress(index, &waker), OpProgress::Over(..)))
    );
}

#[test]
fn an_abandoned_request_wakes_no_task() {
    let inflight = Inflight::<Shared>::new(None);
    let (count, waker) = waker();
    for late in [false, true] {
        let Admission::Granted(index) = inflight.admit(Side::Send, &mut None, &waker) else {
            panic!("room");
        };
        if late {
            assert_eq!(finish(&inflight, index), 1);
            inflight.abandon(index);
        } else {
            inflight.abandon(index);
            assert_eq!((inflight.in_flight(), finish(&inflight, index)), (1, 0));
        }
        assert_eq!(inflight.in_flight(), 0);
    }
    assert_eq!((count.0.load(Ordering::Relaxed), inflight.state().unwrap().slots.len()), (1, 1));
}
