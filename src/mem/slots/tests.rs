//! One thread's view of a table.

use super::*;
use std::sync::Arc;

#[test]
fn a_ticket_settles_once() {
    let mut lender = Lender::new(2, 0);
    let first = lender.lend("a").unwrap();
    let second = lender.lend("b").unwrap();
    assert_eq!(lender.lend("c"), Err("c"));
    let slots = lender.slots().clone();
    assert_eq!(slots.give(first), Some("a"));
    assert_eq!(slots.give(first), None);
    let third = lender.lend("d").unwrap();
    assert_eq!(slots.give(first), None, "a stale ticket of the same slot");
    assert_eq!((slots.give(third), slots.give(second)), (Some("d"), Some("b")));
    assert_eq!(lender.room(), 2);
}

#[test]
fn forged_tickets_settle_nothing() {
    let mut lender = Lender::new(1, 0);
    let ticket = lender.lend(1).unwrap();
    let forged = [
        ticket + NEXT,
        ticket.wrapping_sub(NEXT),
        ticket ^ 1 << 63,
        ticket | MARK,
        FREE,
        TAKEN,
        !ticket,
    ];
    for forged in forged {
        assert_eq!(lender.slots().give(forged), None, "{forged:#x}");
    }
    assert_eq!(lender.slots().give(ticket), Some(1));
}

#[test]
fn tickets_wrap() {
    let mut lender = Lender::new(1, MARK);
    lender.next |= !0 << MARKS;
    lender.told = lender.next;
    for payload in [7, 8] {
        let ticket = lender.lend(payload).unwrap();
        assert_eq!(ticket & MARK, MARK);
        assert_eq!(lender.slots().give(ticket), Some(payload));
    }
    assert_eq!(lender.next, TICKET | MARK | NEXT);
}

/// A table of another size than a power of two lends no more than it has, whatever the order.
#[test]
fn slots_are_skipped_and_found_again() {
    let mut lender = Lender::new(5, 0).out_of_turn();
    let mut lent: Vec<(u64, u32)> = Vec::new();
    // As a shared receive queue may complete: any of those that are lent.
    for round in 0..1000 {
        while lent.len() < 5 {
            lent.push((lender.hold(round).unwrap(), round));
        }
        assert_eq!(lender.hold(round), Err(round));
        lender.hand_over();
        for _ in 0..=round % 5 {
            let (ticket, payload) = lent.swap_remove((round * 7 % lent.len() as u32) as usize);
            assert_eq!(lender.slots().give(ticket), Some(payload));
        }
        // What is taken back between them leaves the others alone.
        let held = (0..round % 3).filter(|_| lender.hold(round).is_ok()).count();
        lender.take_back();
        assert_eq!(lender.room(), 5 - lent.len(), "{held} were held");
    }
    let mut none = Lender::new(0, 0);
    assert!((0..3).all(|_| none.hold(()).is_err()));
    assert_eq!(none.room(), 0);
}

/// Who finds a large queue full looks at one slot of it, but for those that nobody lends.
#[test]
fn a_full_table_is_found_full_at_once() {
    for count in [4096, 5000] {
        let mut lender = Lender::new(count, 0);
        let unused = u64::from(lender.slots().slots.len() - count);
        let tickets: Vec<u64> = (0..count).map(|n| lender.lend(n).unwrap()).collect();
        for (n, ticket) in (0..count).zip(&tickets).take(100) {
            let before = lender.looks;
            assert_eq!(lender.lend(n), Err(n));
            let most = if n == 0 { unused + 1 } else { 1 };
            assert!(lender.looks - before <= most, "{} of {count}", lender.looks - before);
            assert_eq!(lender.slots().give(*ticket), Some(n));
            lender.lend(n).unwrap();
        }
        // What somebody took and forgot is lost, and nothing behind it.
        std::mem::forget(lender.slots().settle(tickets[100]));
        lender.slots().give(tickets[101]).unwrap();
        lender.lend(0).unwrap();
        assert_eq!(lender.lend(0), Err(0));
    }
}

#[test]
fn a_panic_keeps_nothing_from_being_reclaimed() {
    let mut lenders = [Lender::new(4, 0), Lender::new(4, 0)];
    lenders.iter_mut().for_each(|lender| (0..4).for_each(|n| _ = lender.lend(n).unwrap()));
    let tables = lenders.each_ref().map(|lender| lender.slots().clone());
    let mut seen = Vec::new();
    let reclaim = AssertUnwindSafe(|| {
        Slots::reclaim(&tables, |n| {
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
fn everything_can_be_reclaimed() {
    let mut lender = Lender::new(8, 0);
    let tickets: Vec<u64> = (0..5).map(|n| lender.lend(n).unwrap()).collect();
    lender.slots().give(tickets[1]);
    let mut back = Vec::new();
    Slots::reclaim([lender.slots()], |n| back.push(n));
    back.sort();
    assert_eq!(back, [0, 2, 3, 4]);
    assert_eq!((lender.room(), lender.slots().give(tickets[0])), (8, None));
}

#[test]
fn what_is_held_can_be_taken_back() {
    let payload = Arc::new(());
    let mut lender = Lender::new(4, 0);
    let given = lender.lend(payload.clone()).unwrap();
    for round in 1..4 {
        let held: Vec<u64> = (0..3).map(|_| lender.hold(payload.clone()).unwrap()).collect();
        assert!(lender.is_holding() && lender.hold(payload.clone()).is_err());
        lender.take_back();
        assert_eq!((Arc::strong_count(&payload), lender.room()), (2, 3), "round {round}");
        assert!(held.iter().all(|ticket| lender.slots().give(*ticket).is_none()));
    }
    // A list that ends while something is held goes on with what came back.
    assert!((0..3).all(|_| lender.hold(payload.clone()).is_ok()));
    lender.slots().give(given);
    let given = lender.hold(payload.clone()).unwrap();
    assert!(lender.hold(payload.clone()).is_err());
    lender.take_back();
    assert!(lender.slots().give(given).is_none());
    assert_eq!((Arc::strong_count(&payload), lender.room()), (1, 4));
    let given = lender.lend(payload.clone()).unwrap();
    lender.take_back();
    assert!(lender.slots().give(given).is_some());
    // Some came back while others are free.
    let again = lender.lend(payload.clone()).unwrap();
    assert_eq!(lender.room(), 3);
    lender.slots().give(again);
    assert_eq!((lender.room(), lender.room()), (4, 4));
    assert!((0..4).all(|_| lender.lend(payload.clone()).is_ok()));
    assert_eq!(lender.room(), 0);
}

#[test]
fn dropping_the_table_drops_what_is_lent() {
    let payload = Arc::new(());
    let mut lender = Lender::new(2, 0);
    lender.lend(payload.clone()).unwrap();
    drop(lender);
    assert_eq!(Arc::strong_count(&payload), 1);
}
