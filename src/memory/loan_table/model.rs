//! What lender, poller and whoever reclaims do to one table at the same time.

use super::lender::Lender;
use super::*;
use loom::sync::atomic::AtomicUsize;
use loom::thread;

/// The lender uses a slot again while the poller settles what was lent in it before. Both are
/// threads of their own, because the model's first is not preempted as others are.
#[test]
fn lend_while_another_settles() {
    loom::model(|| {
        let mut lender = Lender::new(1, 0);
        let first = lender.lend(Box::new(1)).unwrap();
        let slots = lender.slots().clone();
        let poller = thread::spawn(move || {
            assert_eq!(slots.take(first).as_deref(), Some(&1));
        });
        let poster = thread::spawn(move || {
            let second = lender.lend(Box::new(2));
            (lender, second)
        });
        poller.join().unwrap();
        let (mut lender, second) = poster.join().unwrap();
        let second = second.or_else(|payload| lender.lend(payload)).unwrap();
        assert_eq!(lender.slots().take(first), None);
        assert_eq!(lender.slots().take(second).as_deref(), Some(&2));
    });
}

/// LoanTable come back out of turn while the lender looks for one: what it finds is empty.
#[test]
fn skip_while_others_settle() {
    loom::model(|| {
        let mut lender = Lender::new(2, 0).in_any_order();
        let wr_ids = [lender.lend(Box::new(1)).unwrap(), lender.lend(Box::new(2)).unwrap()];
        let pollers = wr_ids.map(|wr_id| {
            let slots = lender.slots().clone();
            thread::spawn(move || assert!(slots.take(wr_id).is_some()))
        });
        let poster = thread::spawn(move || {
            drop(lender.begin().hold(Box::new(3)));
            lender
        });
        pollers.into_iter().for_each(|poller| poller.join().unwrap());
        let mut lender = poster.join().unwrap();
        assert_eq!(lender.room(), 2);
    });
}

/// Somebody who destroyed the queue takes everything back while the poller still settles:
/// each payload is seen by exactly one of them.
#[test]
fn settle_while_another_reclaims() {
    loom::model(|| {
        let mut lender = Lender::new(2, 0);
        let wr_ids = [lender.lend(Box::new(1)).unwrap(), lender.lend(Box::new(2)).unwrap()];
        let sum = loom::sync::Arc::new(AtomicUsize::new(0));
        let (slots, theirs) = (lender.slots().clone(), sum.clone());
        let poller = thread::spawn(move || {
            for wr_id in wr_ids {
                if let Some(payload) = slots.take(wr_id) {
                    theirs.fetch_add(*payload, Ordering::Relaxed);
                }
            }
        });
        let (slots, theirs) = (lender.slots().clone(), sum.clone());
        let owner = thread::spawn(move || {
            LoanTable::reclaim([&slots], |payload| {
                theirs.fetch_add(*payload, Ordering::Relaxed);
            });
        });
        poller.join().unwrap();
        owner.join().unwrap();
        assert_eq!(sum.load(Ordering::Relaxed), 3);
        assert_eq!(lender.room(), 2);
    });
}
