//! One thread's view of a table.

use super::lender::Lender;
use super::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

#[test]
fn a_loan_comes_back_once() {
    let mut lender = Lender::new(2, 0);
    let first = lender.lend("a").unwrap();
    let second = lender.lend("b").unwrap();
    assert_eq!(lender.lend("c"), Err("c"));
    let table = lender.table().clone();
    assert_eq!(table.take(first), Some("a"));
    assert_eq!(table.take(first), None);
    let third = lender.lend("d").unwrap();
    assert_eq!(table.take(first), None, "a stale wr_id of the same slot");
    assert_eq!((table.take(third), table.take(second)), (Some("d"), Some("b")));
    assert_eq!(lender.room(), 2);
}

#[test]
fn a_forged_wr_id_takes_nothing_back() {
    let mut lender = Lender::new(1, 0);
    let wr_id = lender.lend(1).unwrap();
    let forged = [
        wr_id + STEP,
        wr_id.wrapping_sub(STEP),
        wr_id ^ 1 << 63,
        wr_id | RECV,
        wr_id | SETTLES_ALONE,
        FREE,
        TAKEN,
        !wr_id,
    ];
    for forged in forged {
        assert_eq!(lender.table().take(forged), None, "{forged:#x}");
        assert!(lender.table().take_back_either(forged).is_none(), "{forged:#x}");
        assert!(lender.table().take_back_sent(forged).is_none(), "{forged:#x}");
    }
    assert_eq!(lender.table().take(wr_id), Some(1));
}

/// A send that nobody waits for succeeds, or fails, before or after somebody comes to wait for it.
#[test]
fn a_loan_that_settles_alone_stays_in_its_slot_until_somebody_comes() {
    let mut lender = Lender::new(1, 0).with_loans_settling_alone(true);
    let table = lender.table().clone();
    let mut lend = |payload| {
        let mut batch = lender.begin();
        let slot = batch.next_slot().unwrap().settling_alone();
        let wr_id = slot.wr_id();
        slot.lend(payload);
        batch.commit();
        (wr_id, wr_id & !SETTLES_ALONE)
    };
    let (completed, wr_id) = lend(1);
    assert!(matches!(table.take_back_sent(completed), Some(SentLoan::Settled)));
    assert!(
        table.take_back_sent(completed).is_none() && table.take_back_either(completed).is_none()
    );
    let Claim::Settled(loan) = table.claim(wr_id) else { panic!("it is not over") };
    assert_eq!(loan.take(), 1);
    let (completed, wr_id) = lend(2);
    let Claim::Lent(held) = table.claim(wr_id) else { panic!("it is over") };
    drop(held);
    let Some(SentLoan::Returned(loan)) = table.take_back_sent(completed) else {
        panic!("it was settled")
    };
    assert_eq!(loan.take(), 2);
    let (completed, _) = lend(3);
    assert_eq!(table.take_back_either(completed).map(ReturnedLoan::take), Some(3));
    let (completed, wr_id) = lend(4);
    drop(table.claim(wr_id));
    assert_eq!(table.take_back_either(completed).map(ReturnedLoan::take), Some(4));
    let (completed, wr_id) = lend(5);
    assert!(table.take_back_sent(wr_id ^ STEP | SETTLES_ALONE).is_none(), "a forged one");
    assert!(table.take_back_sent(completed | RECV).is_none() && table.lent() == 1);
    assert_eq!(table.take(completed), Some(5));
}

/// The driver finds the request over while its future changes the waker.
#[test]
fn a_loan_that_is_held_comes_back_when_it_is_let_go() {
    let mut lender = Lender::new(1, 0);
    let wr_id = lender.lend(7).unwrap();
    let table = lender.table().clone();
    let Claim::Lent(held) = table.claim(wr_id) else { panic!("it is over") };
    std::thread::scope(|scope| {
        let driver = scope.spawn(|| table.take(wr_id));
        std::thread::sleep(std::time::Duration::from_millis(2));
        drop(held);
        assert_eq!(driver.join().unwrap(), Some(7));
    });
}

#[test]
fn a_run_of_wr_ids_grows_shrinks_and_splits() {
    let at = |n: u64| (n << FLAG_BITS).wrapping_sub(3 << FLAG_BITS);
    let mut run = WrIds::default();
    assert!((0..6).all(|n| run.append(&WrIds::one(at(n)))));
    assert!(!run.append(&WrIds::one(at(7))) && !run.append(&WrIds::one(at(5))));
    assert_eq!((run.first(), run.newest(), run.len()), (Some(at(0)), Some(at(5)), 6));
    assert!(run.split_off(at(6)).is_none() && run.split_off(at(2) | RECV).is_none());
    let mut behind = run.split_off(at(2)).unwrap();
    assert_eq!(run.collect::<Vec<_>>(), [at(0), at(1)]);
    behind.remove_first(at(3));
    assert_eq!((behind.first(), behind.len()), (Some(at(4)), 2));
    assert_eq!(behind.by_ref().collect::<Vec<_>>(), [at(4), at(5)]);
    assert!(behind.is_empty() && behind.first().is_none());
}

/// The poller's short way takes back the loans that most requests are, and no other.
#[test]
fn the_short_way_finds_every_loan_without_flags_but_that_of_a_receive() {
    let mut send = Lender::new(8, 0);
    let table = send.table().clone();
    let common = [send.lend(0).unwrap(), send.lend(1).unwrap()];
    assert!(common.iter().all(|wr_id| !has_flags(*wr_id)));
    assert_eq!(table.take_back_common(common[1]).map(ReturnedLoan::take), Some(1));
    assert_eq!(table.take_back_common(common[0]).map(ReturnedLoan::take), Some(0));
    let mut batch = send.begin();
    let slot = batch.free_slot().unwrap().scoped();
    let scoped = slot.wr_id();
    slot.lend(2);
    let unsignaled = batch.hold_unsignaled(3).unwrap();
    let covering = batch.hold(4).unwrap();
    batch.commit();
    for (wr_id, n) in [(scoped, 2), (unsignaled, 3), (covering, 4)] {
        assert!(has_flags(wr_id) && table.take_back_common(wr_id).is_none(), "{n}");
        assert_eq!(table.take(wr_id), Some(n));
    }
    let mut receives = Lender::new(1, RECV);
    let wr_id = receives.lend(5).unwrap();
    assert!(has_flags(wr_id) && table.take_back_common(wr_id).is_none());
    assert_eq!(receives.table().take_back_common(wr_id).map(ReturnedLoan::take), Some(5));
}

#[test]
fn a_panic_does_not_keep_other_loans_from_being_reclaimed() {
    let mut lenders = [Lender::new(4, 0), Lender::new(4, 0)];
    lenders.iter_mut().for_each(|lender| (0..4).for_each(|n| _ = lender.lend(n).unwrap()));
    let tables = lenders.each_ref().map(|lender| lender.table().clone());
    let mut seen = Vec::new();
    let reclaim = AssertUnwindSafe(|| {
        LoanTable::reclaim(&tables, |n| {
            seen.push(n);
            assert!(n % 2 == 0, "{n}");
        })
    });
    let panic = catch_unwind(reclaim).unwrap_err();
    assert_eq!(panic.downcast_ref::<String>().map(String::as_str), Some("1"));
    assert_eq!(seen, [0, 1, 2, 3, 0, 1, 2, 3]);
    assert!(lenders.iter_mut().all(|lender| lender.room() == 4));
}

#[test]
fn reclaiming_takes_every_loan_back() {
    let mut lender = Lender::new(8, 0);
    let wr_ids: Vec<u64> = (0..5).map(|n| lender.lend(n).unwrap()).collect();
    lender.table().take(wr_ids[1]);
    let mut back = Vec::new();
    LoanTable::reclaim([lender.table()], |n| back.push(n));
    back.sort();
    assert_eq!(back, [0, 2, 3, 4]);
    assert_eq!((lender.room(), lender.table().take(wr_ids[0])), (8, None));
}

/// Requests of a queue that is reset end in the order in which they were posted, as a device flushes them.
#[test]
fn reclaiming_keeps_the_order_of_the_queue() {
    let mut lender = Lender::new(4, 0);
    for n in 0..11 {
        let wr_id = lender.lend(n).unwrap();
        if n < 7 {
            assert_eq!(lender.table().take(wr_id), Some(n));
        }
    }
    let mut back = Vec::new();
    LoanTable::reclaim([lender.table()], |n| back.push(n));
    assert_eq!(back, [7, 8, 9, 10]);
}

#[test]
fn dropping_the_table_drops_its_loans() {
    let payload = Arc::new(());
    let mut lender = Lender::new(2, 0);
    lender.lend(payload.clone()).unwrap();
    drop(lender);
    assert_eq!(Arc::strong_count(&payload), 1);
}
