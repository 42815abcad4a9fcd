//! The lender in one thread; `model` has its threads.

use super::*;
use crate::lending::compact_enum::Content;
use crate::lending::loan_table::{FLAG_BITS, RECV};
use std::sync::Arc;

#[test]
fn wr_ids_wrap() {
    let mut lender = Lender::new(1, RECV);
    lender.next.wr_id |= !0 << FLAG_BITS;
    for payload in [7, 8] {
        let wr_id = lender.lend(payload).unwrap();
        assert_eq!(wr_id & RECV, RECV);
        assert_eq!(lender.table().take(wr_id), Some(payload));
    }
    assert_eq!(lender.next.wr_id, RECV | STEP);
}

/// The table's size need not be a power of two.
#[test]
fn all_slots_are_lent_whatever_the_order_in_which_they_come_back() {
    let mut lender = Lender::new(5, 0).in_any_order();
    let mut lent: Vec<(u64, u32)> = Vec::new();
    // A shared receive queue may complete any of its receives.
    const ROUNDS: u32 = if cfg!(miri) { 50 } else { 1000 };
    for round in 0..ROUNDS {
        let mut lending = lender.begin();
        while lent.len() < 5 {
            lent.push((lending.hold(round).unwrap(), round));
        }
        assert_eq!(lending.hold(round), Err(round));
        lending.commit();
        for _ in 0..=round % 5 {
            let (wr_id, payload) = lent.swap_remove((round * 7 % lent.len() as u32) as usize);
            assert_eq!(lender.table().take(wr_id), Some(payload));
        }
        // A batch that is dropped leaves the other loans alone.
        let mut lending = lender.begin();
        let held = (0..round % 3).filter(|_| lending.hold(round).is_ok()).count();
        drop(lending);
        assert_eq!(lender.room(), 5 - lent.len(), "{held} were held");
    }
    let mut none = Lender::new(0, 0);
    assert!((0..3).all(|_| none.lend(()).is_err()));
    assert_eq!(none.room(), 0);
}

/// To find a queue full, the lender looks at one slot.
#[test]
fn a_full_table_is_found_full_at_once() {
    let looks = |lender: &Lender<u32>| lender.next.looks;
    const COUNTS: [u32; 2] = if cfg!(miri) { [64, 100] } else { [4096, 5000] };
    for count in COUNTS {
        let mut lender = Lender::new(count, 0);
        let wr_ids: Vec<u64> = (0..count).map(|n| lender.lend(n).unwrap()).collect();
        for (n, wr_id) in (0..count).zip(&wr_ids).take(40) {
            let before = looks(&lender);
            assert_eq!(lender.lend(n), Err(n));
            assert_eq!(looks(&lender) - before, 1, "of {count}");
            assert_eq!(lender.table().take(*wr_id), Some(n));
            lender.lend(n).unwrap();
        }
        // A loan that was taken back and forgotten is lost, but none behind it.
        std::mem::forget(lender.table().take_back(wr_ids[40]));
        lender.table().take(wr_ids[41]).unwrap();
        lender.lend(0).unwrap();
        assert_eq!(lender.lend(0), Err(0));
    }
}

#[test]
fn a_dropped_batch_takes_its_loans_back() {
    let payload = Arc::new(());
    let mut lender = Lender::new(4, 0);
    let given = lender.lend(payload.clone()).unwrap();
    for round in 1..4 {
        let mut lending = lender.begin();
        let held: Vec<u64> = (0..3).map(|_| lending.hold(payload.clone()).unwrap()).collect();
        assert!(lending.hold(payload.clone()).is_err());
        drop(lending);
        assert_eq!((Arc::strong_count(&payload), lender.room()), (2, 3), "round {round}");
        assert!(held.iter().all(|wr_id| lender.table().take(*wr_id).is_none()));
    }
    // All slots are lent, and one comes back.
    let table = lender.table().clone();
    let mut lending = lender.begin();
    assert!((0..3).all(|_| lending.hold(payload.clone()).is_ok()));
    table.take(given);
    let given = lending.hold(payload.clone()).unwrap();
    assert!(lending.hold(payload.clone()).is_err());
    drop(lending);
    assert!(table.take(given).is_none());
    assert_eq!((Arc::strong_count(&payload), lender.room()), (1, 4));
    let given = lender.lend(payload.clone()).unwrap();
    drop(lender.begin());
    assert!(table.take(given).is_some());
    // Some come back while others are free.
    let again = lender.lend(payload.clone()).unwrap();
    assert_eq!(lender.room(), 3);
    table.take(again);
    assert_eq!((lender.room(), lender.room()), (4, 4));
    assert!((0..4).all(|_| lender.lend(payload.clone()).is_ok()));
    assert_eq!(lender.room(), 0);
}

/// A later batch takes back the loans of a forgotten one, and no others, when it needs one of their slots.
#[test]
fn loans_of_a_forgotten_batch_are_taken_back_later() {
    let count = 4;
    // How many are committed before, which of these come back before the forgotten batch, and how many are
    // forgotten.
    for (before, back, forgotten) in
        (0..=count).flat_map(|n| (0..16u32).flat_map(move |b| (0..=4).map(move |f| (n, b, f))))
    {
        let (told, lost) = (Arc::new(()), Arc::new(()));
        let mut lender = Lender::new(count, 0).in_any_order();
        lender.next.wr_id |= 0xf0 << FLAG_BITS;
        let mut wr_ids: Vec<u64> =
            (0..before).map(|_| lender.lend(told.clone()).unwrap()).collect();
        let table = lender.table().clone();
        let give = |wr_ids: &mut Vec<u64>, which: u32| {
            let mut at = 0;
            wr_ids.retain(|wr_id| {
                at += 1;
                let gives = which >> (at - 1) & 1 != 0;
                assert!(!gives || table.take(*wr_id).is_some());
                !gives
            });
        };
        give(&mut wr_ids, back);
        for _ in 0..2 {
            let mut lending = lender.begin();
            let held = (0..forgotten).filter(|_| lending.hold(lost.clone()).is_ok()).count();
            assert_eq!(held, forgotten.min(4 - wr_ids.len()));
            std::mem::forget(lending);
        }
        // The loans in the way come back, and then all free slots are lent.
        give(&mut wr_ids, !back & 5);
        let mut lending = lender.begin();
        for _ in wr_ids.len()..4 {
            wr_ids.push(lending.hold(told.clone()).expect("a forgotten loan is in the way"));
        }
        assert!(lending.hold(told.clone()).is_err());
        lending.commit();
        let counts = (Arc::strong_count(&told), Arc::strong_count(&lost));
        assert_eq!(counts, (5, 1), "{before} {back:#b} {forgotten}");
        assert_eq!(lender.room(), 0);
        assert!(wr_ids.iter().all(|wr_id| lender.table().take(*wr_id).is_some()));
        assert_eq!(lender.room(), 4);
    }
}

type Small = CompactEnum<Box<u8>, u16, ()>;

/// A loan that was taken back although the device was not told of it is not read a second time.
#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "not the last loan")]
fn a_loan_that_was_taken_back_cannot_be_undone() {
    let mut lender = Lender::<CompactEnum<u8, u16, ()>>::new(4, 0);
    let table = lender.table().clone();
    let mut lending = lender.begin();
    let free_slot = lending.free_slot().expect("a slot");
    let wr_id = free_slot.wr_id();
    let filled = free_slot.fill(1, 2);
    assert_eq!(table.take(wr_id).map(CompactEnum::open), Some(Content::Small(1, 2)));
    filled.undo();
}

/// Whether a batch has one loan or more does not depend on slots that are skipped before the first.
#[test]
fn slots_skipped_before_the_first_loan_are_not_counted() {
    let mut lender = Lender::<Small>::new(4, 0).in_any_order();
    let small = |n: u8| Content::Small(Box::new(n), u16::from(n));
    let early = [0, 1, 2, 3].map(|n| lender.lend(CompactEnum::new(small(n))).ok().unwrap());
    let table = lender.table().clone();
    assert_eq!(table.take(early[2]).map(CompactEnum::open), Some(small(2)));
    let mut lending = lender.begin();
    let free_slot = lending.free_slot().expect("a slot");
    let wr_id = free_slot.wr_id();
    assert_eq!(free_slot.fill(Box::new(4), 4).undo(), (Box::new(4), 4));
    assert_eq!((wr_id, lending.count()), (early[3] + 3 * STEP, 0));
    let free_slot = lending.free_slot().expect("the same");
    assert_eq!(free_slot.wr_id(), wr_id);
    free_slot.fill(Box::new(5), 5).keep();
    assert_eq!(lending.count(), 1);
    lending.commit();
    assert_eq!(table.take(wr_id).map(CompactEnum::open), Some(small(5)));
    assert_eq!(lender.room(), 1);
}

/// That holds for the first slot, for the last, and for one behind slots that were skipped.
#[test]
fn the_slot_of_a_request_that_could_not_be_posted_is_the_next_again() {
    let mut lender = Lender::<Small>::new(4, 0).in_any_order();
    let small = |n: u8| Content::Small(Box::new(n), u16::from(n));
    let early = [0, 1, 2].map(|n| lender.lend(CompactEnum::new(small(n))).ok().unwrap());
    let table = lender.table().clone();
    assert_eq!(table.take(early[0]).map(CompactEnum::open), Some(small(0)));
    assert_eq!(table.take(early[2]).map(CompactEnum::open), Some(small(2)));
    let mut lending = lender.begin();
    let mut lend = |n: u8, undone: bool| {
        let free_slot = lending.free_slot().expect("a slot");
        let wr_id = free_slot.wr_id();
        let filled = free_slot.fill(Box::new(n), n.into());
        match undone {
            true => assert_eq!(filled.undo(), (Box::new(n), n.into())),
            false => filled.keep(),
        }
        (wr_id, lending.count())
    };
    // The last slot, then the first, then the slot behind the one that is still lent.
    assert_eq!(lend(3, true).1, 0);
    let (first, one) = lend(4, false);
    assert_eq!((first, one), (early[2] + STEP, 1));
    assert_eq!(lend(5, true), (first + STEP, 1));
    let (second, two) = lend(6, false);
    assert_eq!((second, two), (first + STEP, 2));
    let (third, more) = lend(7, true);
    assert_eq!((third, more), (second + 2 * STEP, 3));
    assert_eq!(lend(8, false), (third, 4));
    lending.commit();
    for (wr_id, n) in [(first, 4), (second, 6), (third, 8), (early[1], 1)] {
        assert_eq!(table.take(wr_id).map(CompactEnum::open), Some(small(n)));
    }
    assert_eq!(lender.room(), 4);
}

/// The payloads that the completion of `wr_id` gives back, in order.
fn covered(table: &LoanTable<u32>, wr_id: u64) -> Option<Vec<u32>> {
    let mut at = table.first_covered(wr_id)?;
    let mut back = Vec::new();
    while let Some(loan) = table.take_back_covered(&mut at, wr_id) {
        back.push(loan.take());
    }
    back.push(table.take(wr_id)?);
    Some(back)
}

/// The table wraps, some slots are never lent, and the payload of one is being taken out.
#[test]
fn a_signaled_loan_covers_the_unsignaled_ones_before_it() {
    for count in [8, 11, 16] {
        for unsignaled in 1..count / 2 {
            let mut lender = Lender::new(count, 0);
            let table = lender.table().clone();
            let mut held = Vec::new();
            for round in 0..40 {
                let mut batch = lender.begin();
                let ids: Vec<u64> =
                    (0..unsignaled).map(|n| batch.hold_unsignaled(n).unwrap()).collect();
                assert!(ids.iter().all(|wr_id| wr_id & UNSIGNALED != 0));
                let last = batch.hold(unsignaled).unwrap();
                batch.commit();
                assert_ne!(last & COVERS, 0);
                assert!(table.take_back_common(last).is_none(), "it is not common");
                let lone = lender.lend(99).unwrap();
                assert_eq!(lone & (COVERS | UNSIGNALED), 0);
                assert_eq!(covered(&table, last), Some((0..=unsignaled).collect()));
                assert_eq!(covered(&table, last), None, "it was given back");
                match round {
                    // The lender skips slots that are being visited.
                    3 | 17 => held.push(table.take_back(lone).unwrap()),
                    _ => drop(table.take(lone).unwrap()),
                }
                if round % 7 == 0 {
                    held.clear();
                }
            }
            held.clear();
            assert_eq!(lender.room(), count as usize);
        }
    }
}

/// The tests above complete in order, where the loans of an earlier completion are gone already.
#[test]
fn a_completion_gives_back_no_loan_that_another_completion_covers() {
    let mut lender = Lender::new(8, 0);
    let table = lender.table().clone();
    // Two signaled loans in a row: the second covers nothing.
    let mut batch = lender.begin();
    batch.hold_unsignaled(0).unwrap();
    let [first, second] = [1, 2].map(|n| batch.hold(n).unwrap());
    batch.commit();
    assert_ne!(second & COVERS, 0, "it may cover some, as far as its `wr_id` says");
    assert_eq!(covered(&table, second), Some(vec![2]));
    assert_eq!(covered(&table, first), Some(vec![0, 1]));
    // An unsignaled loan behind a signaled one that came back alone.
    let mut batch = lender.begin();
    let early = batch.hold_unsignaled(3).unwrap();
    let first = batch.hold(4).unwrap();
    batch.hold_unsignaled(5).unwrap();
    let second = batch.hold(6).unwrap();
    batch.commit();
    assert_eq!(table.take(first), Some(4));
    assert_eq!(covered(&table, second), Some(vec![5, 6]));
    assert_eq!((table.take(early), lender.room()), (Some(3), 8));
}

/// An unsignaled request that fails has a completion of its own, and its slot is lent again while what the next
/// completion covers is being taken back.
#[test]
fn a_completion_gives_back_no_newer_loan_in_a_slot_that_it_covers() {
    let mut lender = Lender::new(4, 0);
    let table = lender.table().clone();
    let mut batch = lender.begin();
    let failed = batch.hold_unsignaled(0).unwrap();
    let last = batch.hold(1).unwrap();
    batch.commit();
    let mut at = table.first_covered(last).unwrap();
    assert_eq!((at, table.take(failed)), (failed & !UNSIGNALED | COVERS, Some(0)));
    (2..4).for_each(|n| _ = lender.lend(n).unwrap());
    let mut batch = lender.begin();
    let newer = batch.hold_unsignaled(4).unwrap();
    batch.commit();
    assert_eq!(newer - failed, 4 * STEP, "the same slot");
    assert!(table.take_back_covered(&mut at, last).is_none());
    assert_eq!((table.take(last), table.take(newer)), (Some(1), Some(4)));
}

#[test]
fn a_dropped_batch_lets_the_next_request_be_unsignaled_only_if_none_waits_for_a_signaled_one() {
    // Three of eight may be unsignaled, and the signaled one that was to cover them is not posted.
    let mut lender = Lender::new(8, 0);
    for n in 0..3 {
        let mut batch = lender.begin();
        assert_ne!(batch.hold_unsignaled(n).unwrap() & UNSIGNALED, 0);
        batch.commit();
    }
    let mut batch = lender.begin();
    batch.hold(3).unwrap();
    assert_ne!(batch.hold_unsignaled(4).unwrap() & UNSIGNALED, 0);
    drop(batch);
    assert_eq!(lender.begin().hold_unsignaled(5).unwrap() & UNSIGNALED, 0);
    // Nothing waits.
    let mut lender = Lender::new(8, 0);
    lender.lend(0).unwrap();
    lender.begin().hold(1).unwrap();
    assert_ne!(lender.begin().hold_unsignaled(2).unwrap() & UNSIGNALED, 0);
}

/// Dropping payloads runs code of the program.
#[test]
fn a_panic_while_a_batch_is_taken_back_leaves_no_loan_and_the_next_one_signaled() {
    struct Payload(bool);
    impl Drop for Payload {
        fn drop(&mut self) {
            if self.0 {
                std::panic::resume_unwind(Box::new("a payload"));
            }
        }
    }
    for is_forgotten in [false, true] {
        let mut lender = Lender::new(8, 0);
        for _ in 0..3 {
            let mut batch = lender.begin();
            assert!(batch.hold_unsignaled(Payload(false)).is_ok_and(|id| id & UNSIGNALED != 0));
            batch.commit();
        }
        let back = std::panic::AssertUnwindSafe(|| {
            let mut batch = lender.begin();
            (0..3).for_each(|_| assert!(batch.hold(Payload(true)).is_ok()));
            if is_forgotten {
                std::mem::forget(batch);
                assert!(lender.begin().hold(Payload(false)).is_ok());
            }
        });
        let panic = std::panic::catch_unwind(back).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"a payload"));
        assert_eq!(lender.table().lendable_slots().filter(|slot| slot.is_free()).count(), 5);
        let next = lender.begin().hold_unsignaled(Payload(false));
        assert!(next.is_ok_and(|id| id & UNSIGNALED == 0), "the unsignaled ones wait for it");
    }
}

/// Each loan is then almost a whole round ahead of the one before.
#[test]
fn a_dropped_batch_takes_its_loans_back_whatever_the_order_in_which_slots_came_back() {
    for (count, begin) in [1, 2, 4, 7, 8].into_iter().flat_map(|n| [0, 5, !0].map(|b| (n, b))) {
        let mut lender = Lender::new(count, 0).in_any_order();
        lender.next.wr_id = begin << FLAG_BITS;
        let payload = Arc::new(());
        let early: Vec<u64> = (0..count).map(|_| lender.lend(payload.clone()).unwrap()).collect();
        let table = lender.table().clone();
        let mut batch = lender.begin();
        for wr_id in early.iter().rev() {
            assert!(table.take(*wr_id).is_some() && batch.hold(payload.clone()).is_ok());
        }
        drop(batch);
        assert_eq!(Arc::strong_count(&payload), 1, "{count} from {begin}");
        assert_eq!(lender.room(), count as usize, "{count} from {begin}");
    }
}

#[test]
fn an_unsignaled_loan_becomes_a_signaled_one_before_half_the_table_is_unsignaled() {
    for (count, most) in [(1, 0), (2, 0), (3, 1), (4, 1), (8, 3), (9, 4), (64, 31)] {
        let mut lender = Lender::new(count, 0);
        let ids: Vec<u64> = (0..count)
            .map(|n| {
                let mut batch = lender.begin();
                let wr_id = batch.hold_unsignaled(n).unwrap();
                batch.commit();
                wr_id
            })
            .collect();
        let signaled = ids.iter().position(|wr_id| wr_id & UNSIGNALED == 0);
        assert_eq!(signaled, Some(most), "of {count}");
    }
}

/// The driver ends, and holds the slot, while the poster takes a refused request's payload back.
#[test]
fn a_refused_request_comes_back_once_while_the_driver_ends() {
    use std::sync::mpsc::channel;
    use std::time::Duration;
    let payload = Arc::new(());
    let mut lender = Lender::<CompactEnum<Arc<()>, u16, ()>>::new(1, 0);
    let table = lender.table().clone();
    let mut lending = lender.begin();
    let filled = lending.free_slot().ok().unwrap().fill(payload.clone(), 2);
    let (held, is_held) = channel();
    let driver = std::thread::spawn(move || {
        table.each_lent(|_| {
            held.send(()).unwrap();
            std::thread::sleep(Duration::from_millis(50));
        });
    });
    is_held.recv().unwrap();
    let back = filled.undo();
    driver.join().unwrap();
    drop(lending);
    assert_eq!(lender.table().lent(), 0, "the slot is lent, and its payload was moved out");
    drop(back);
    assert_eq!(Arc::strong_count(&payload), 1);
}

/// The same with a batch that is dropped before it is posted.
#[test]
fn an_unposted_loan_comes_back_while_the_driver_ends() {
    use std::sync::mpsc::channel;
    use std::time::Duration;
    let mut lender = Lender::new(1, 0);
    let table = lender.table().clone();
    let mut lending = lender.begin();
    lending.hold(7).unwrap();
    let (held, is_held) = channel();
    let driver = std::thread::spawn(move || {
        table.each_lent(|_| {
            held.send(()).unwrap();
            std::thread::sleep(Duration::from_millis(50));
        });
    });
    is_held.recv().unwrap();
    drop(lending);
    driver.join().unwrap();
    assert_eq!((lender.table().lent(), lender.room()), (0, 1));
}
