//! Lender, poller, and a thread that reclaims, at the same time.

use super::lender::Lender;
use super::*;
use loom::sync::atomic::AtomicUsize;
use loom::thread;

/// The lender uses a slot again while the poller takes the loan before out of it. Both run in threads of
/// their own, because loom does not preempt a model's first thread as it does others.
#[test]
fn a_slot_is_lent_again_only_when_it_is_empty() {
    loom::model(|| {
        let mut lender = Lender::new(1, 0);
        let first = lender.lend(Box::new(1)).unwrap();
        let table = lender.table().clone();
        let poller = thread::spawn(move || {
            assert_eq!(table.take(first).as_deref(), Some(&1));
        });
        let poster = thread::spawn(move || {
            let second = lender.lend(Box::new(2));
            (lender, second)
        });
        poller.join().unwrap();
        let (mut lender, second) = poster.join().unwrap();
        let second = second.or_else(|payload| lender.lend(payload)).unwrap();
        assert_eq!(lender.table().take(first), None);
        assert_eq!(lender.table().take(second).as_deref(), Some(&2));
    });
}

/// Loans come back in any order while the lender looks for a free slot: the one that it finds is empty.
#[test]
fn a_slot_found_by_skipping_is_empty() {
    loom::model(|| {
        let mut lender = Lender::new(2, 0).in_any_order();
        let wr_ids = [lender.lend(Box::new(1)).unwrap(), lender.lend(Box::new(2)).unwrap()];
        let pollers = wr_ids.map(|wr_id| {
            let table = lender.table().clone();
            thread::spawn(move || assert!(table.take(wr_id).is_some()))
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

/// A thread that destroyed the queue reclaims its loans while the poller still takes back.
#[test]
fn each_loan_comes_back_to_the_poller_or_to_the_reclaiming_thread() {
    loom::model(|| {
        let mut lender = Lender::new(2, 0);
        let wr_ids = [lender.lend(Box::new(1)).unwrap(), lender.lend(Box::new(2)).unwrap()];
        let sum = loom::sync::Arc::new(AtomicUsize::new(0));
        let (table, theirs) = (lender.table().clone(), sum.clone());
        let poller = thread::spawn(move || {
            for wr_id in wr_ids {
                if let Some(payload) = table.take(wr_id) {
                    theirs.fetch_add(*payload, Ordering::Relaxed);
                }
            }
        });
        let (table, theirs) = (lender.table().clone(), sum.clone());
        let owner = thread::spawn(move || {
            LoanTable::reclaim([&table], |payload| {
                theirs.fetch_add(*payload, Ordering::Relaxed);
            });
        });
        poller.join().unwrap();
        owner.join().unwrap();
        assert_eq!(sum.load(Ordering::Relaxed), 3);
        assert_eq!(lender.room(), 2);
    });
}

/// The driver ends, and holds each slot, while the poster takes the payload of a refused request back.
#[test]
fn the_payload_of_a_refused_request_comes_back_once() {
    use super::CompactEnum;
    loom::model(|| {
        let payload = std::sync::Arc::new(());
        let mut lender = Lender::<CompactEnum<std::sync::Arc<()>, u16, ()>>::new(1, 0);
        let table = lender.table().clone();
        let driver = thread::spawn(move || table.each_lent(|_| ()));
        let mine = payload.clone();
        let poster = thread::spawn(move || {
            let mut lending = lender.begin();
            let filled = lending.free_slot().ok().unwrap().fill(mine, 2);
            let back = filled.undo();
            drop(lending);
            (lender, back)
        });
        driver.join().unwrap();
        let (mut lender, back) = poster.join().unwrap();
        assert_eq!((lender.table().lent(), lender.room()), (0, 1));
        assert_eq!(std::sync::Arc::strong_count(&payload), 2);
        drop(back);
    });
}

/// The lender lends again while the poller takes back what a completion covers.
#[test]
fn covered_loans_come_back_once_while_others_are_lent() {
    loom::model(|| {
        let mut lender = Lender::new(4, 0);
        let mut batch = lender.begin();
        batch.hold_unsignaled(Box::new(1)).unwrap();
        let last = batch.hold(Box::new(2)).unwrap();
        batch.commit();
        let table = lender.table().clone();
        let poller = thread::spawn(move || {
            let mut at = table.first_covered(last).unwrap();
            let first = table.take_back_covered(&mut at, last).map(ReturnedLoan::take);
            assert_eq!(first.as_deref(), Some(&1));
            assert!(table.take_back_covered(&mut at, last).is_none());
            assert_eq!(table.take(last).as_deref(), Some(&2));
        });
        let poster = thread::spawn(move || {
            for n in 3..6 {
                let mut batch = lender.begin();
                let _ = batch.hold_unsignaled(Box::new(n));
                batch.commit();
            }
            lender
        });
        poller.join().unwrap();
        drop(poster.join().unwrap());
    });
}
