//! What is lent to a device: a table that takes something in when a request is posted, and gives
//! it back once, to whoever sees the request complete.
//!
//! The owner of a queue lends; the poller of its completion queue, perhaps another thread, settles.
//! A ticket stands for the one in the other's hands: it is what the device carries from the request
//! to the completion. A ticket that is forged, stale or shown twice settles nothing. Neither side
//! locks, waits or allocates. Model-checked with loom.

use super::sync::{AtomicU32, AtomicU64, Ordering, Turns};
use std::fmt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;

/// Bits of a ticket that say which slot; the rest count how often the slot was used.
const INDEX_BITS: u32 = 24;
/// Bits of a ticket in all, so that there is room for its holder's own.
pub(crate) const TICKET_BITS: u32 = 56;
const GENERATIONS: u64 = 1 << (TICKET_BITS - INDEX_BITS);
/// The most slots of a table.
pub(crate) const MAX_SLOTS: u32 = 1 << INDEX_BITS;

struct Slot<P> {
    /// Twice the generation, and one while it is lent.
    state: AtomicU64,
    /// One more than the slot that came back before this one.
    next: AtomicU32,
    /// Whose turn it is, `state` says, and whose list the slot is in.
    payload: Turns<Option<P>>,
}

/// The table, seen by everybody.
pub(crate) struct Slots<P> {
    slots: Box<[Slot<P>]>,
    /// One more than the slot that came back last; 0 for none.
    returned: AtomicU32,
}

// SAFETY: payloads are moved in by one thread and out by another, and never shared.
unsafe impl<P: Send> Send for Slots<P> {}
// SAFETY: `&Slots` only moves payloads in and out, which needs `P: Send` and no more.
unsafe impl<P: Send> Sync for Slots<P> {}
// Payloads are taken out whole before they are dropped: a panic leaves nothing half done.
impl<P> UnwindSafe for Slots<P> {}
impl<P> RefUnwindSafe for Slots<P> {}

impl<P> Slots<P> {
    /// How many can be lent at once.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Gives back what was lent under `ticket`; `None` if nothing is, or no longer.
    #[inline]
    pub(crate) fn settle(&self, ticket: u64) -> Option<P> {
        let index = (ticket & u64::from(MAX_SLOTS - 1)) as u32;
        let lent = (ticket >> INDEX_BITS) << 1 | 1;
        let slot = self.slots.get(index as usize)?;
        // Acquire pairs with the Release of `Vacancy::lend`. Of several who show the same ticket one wins.
        slot.state.compare_exchange(lent, lent - 1, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // SAFETY: the exchange above chose this caller, and the lender leaves the slot alone until
        // it is in the list below.
        let payload = unsafe { slot.payload.replace(None) };
        let mut head = self.returned.load(Ordering::Relaxed);
        loop {
            slot.next.store(head, Ordering::Relaxed);
            // Release pairs with the Acquire of `collect`: the slot is empty before it is found.
            match self.returned.compare_exchange_weak(
                head,
                index + 1,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return payload,
                Err(seen) => head = seen,
            }
        }
    }

    /// Takes back everything that is lent: for when the device can complete nothing any more.
    pub(crate) fn reclaim(&self, mut visit: impl FnMut(P)) {
        for (index, slot) in self.slots.iter().enumerate() {
            let state = slot.state.load(Ordering::Relaxed);
            if state & 1 == 1 {
                if let Some(payload) = self.settle((state >> 1) << INDEX_BITS | index as u64) {
                    visit(payload);
                }
            }
        }
    }
}

/// A table whose payloads are of no interest any more.
pub(crate) trait Reclaim: fmt::Debug + Send + Sync + UnwindSafe + RefUnwindSafe {
    /// Drops everything that is lent.
    fn reclaim_all(&self);
}

impl<P: Send> Reclaim for Slots<P> {
    fn reclaim_all(&self) {
        self.reclaim(drop);
    }
}

impl<P> fmt::Debug for Slots<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slots").field("slots", &self.slots.len()).finish_non_exhaustive()
    }
}

/// The one who lends.
pub(crate) struct Lender<P> {
    slots: Arc<Slots<P>>,
    /// Slots that are free, with room for all.
    free: Vec<u32>,
}

impl<P> Lender<P> {
    /// With `count` slots, at most [`MAX_SLOTS`].
    pub(crate) fn new(count: u32) -> Self {
        // Each table counts from elsewhere, so that tickets of one open nothing in another. Not
        // loom's: this is no part of what is shared.
        static TABLES: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let table = TABLES.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let first = table.wrapping_mul(0x9e37_79b1) & (GENERATIONS - 1);
        let count = count.min(MAX_SLOTS);
        let slots = (0..count)
            .map(|_| Slot {
                state: AtomicU64::new(first << 1),
                next: AtomicU32::new(0),
                payload: Turns::new(None),
            })
            .collect();
        let slots = Slots { slots, returned: AtomicU32::new(0) };
        Lender { slots: Arc::new(slots), free: (0..count).rev().collect() }
    }

    /// What settles what is lent here.
    pub(crate) fn slots(&self) -> &Arc<Slots<P>> {
        &self.slots
    }

    /// How many more can be lent.
    pub(crate) fn room(&mut self) -> usize {
        self.collect();
        self.free.len()
    }

    /// A slot that is free, if there is one.
    #[inline]
    pub(crate) fn vacancy(&mut self) -> Option<Vacancy<'_, P>> {
        if self.free.is_empty() {
            self.collect();
        }
        let index = *self.free.last()?;
        let slot = self.slots.slots.get(index as usize)?;
        let generation = ((slot.state.load(Ordering::Relaxed) >> 1) + 1) & (GENERATIONS - 1);
        let ticket = generation << INDEX_BITS | u64::from(index);
        Some(Vacancy { free: &mut self.free, slot, ticket })
    }

    /// Fetches the slots that came back.
    #[cold]
    fn collect(&mut self) {
        let mut next = self.slots.returned.swap(0, Ordering::Acquire);
        while let Some(slot) = next.checked_sub(1).and_then(|at| self.slots.slots.get(at as usize))
        {
            self.free.push(next - 1);
            next = slot.next.load(Ordering::Relaxed);
        }
    }
}

/// A free slot, that what is to be lent may be told its ticket before.
pub(crate) struct Vacancy<'l, P> {
    free: &'l mut Vec<u32>,
    /// The last of `free`.
    slot: &'l Slot<P>,
    ticket: u64,
}

impl<P> Vacancy<'_, P> {
    /// Under which what is lent here will be settled.
    #[inline]
    pub(crate) fn ticket(&self) -> u64 {
        self.ticket
    }

    /// Takes `payload` in.
    #[inline]
    pub(crate) fn lend(self, payload: P) {
        self.free.pop();
        // SAFETY: the slot was in the list of free ones, which has one reader, so that nobody else
        // has it; and what `settle` did to it is known by the Acquire of `collect`.
        let empty = unsafe { self.slot.payload.replace(Some(payload)) };
        debug_assert!(empty.is_none());
        // It is; the compiler cannot know, and would drop it.
        std::mem::forget(empty);
        // Release pairs with the Acquire of `settle`.
        self.slot.state.store((self.ticket >> INDEX_BITS) << 1 | 1, Ordering::Release);
    }
}

impl<P> fmt::Debug for Lender<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lender").field("slots", &self.slots).finish_non_exhaustive()
    }
}

#[cfg(test)]
impl<P> Lender<P> {
    fn lend(&mut self, payload: P) -> Result<u64, P> {
        let Some(vacancy) = self.vacancy() else { return Err(payload) };
        let ticket = vacancy.ticket();
        vacancy.lend(payload);
        Ok(ticket)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_settles_once() {
        let mut lender = Lender::new(2);
        let first = lender.lend("a").unwrap();
        let second = lender.lend("b").unwrap();
        assert_eq!(lender.lend("c"), Err("c"));
        let slots = lender.slots().clone();
        assert_eq!(slots.settle(first), Some("a"));
        assert_eq!(slots.settle(first), None);
        let third = lender.lend("d").unwrap();
        assert_eq!(slots.settle(first), None, "a stale ticket of the same slot");
        assert_eq!((slots.settle(third), slots.settle(second)), (Some("d"), Some("b")));
        assert_eq!(lender.room(), 2);
    }

    #[test]
    fn forged_tickets_settle_nothing() {
        let mut lender = Lender::new(1);
        let ticket = lender.lend(1).unwrap();
        let forged =
            [ticket + 1, ticket ^ 1 << INDEX_BITS, ticket | 1 << TICKET_BITS, u64::MAX, !ticket];
        for forged in forged {
            assert_eq!(lender.slots().settle(forged), None, "{forged:#x}");
        }
        assert_eq!(lender.slots().settle(ticket), Some(1));
    }

    #[test]
    fn generations_wrap() {
        let mut lender = Lender::new(1);
        lender.slots.slots[0].state.store((GENERATIONS - 1) << 1, Ordering::Relaxed);
        let ticket = lender.lend(7).unwrap();
        assert_eq!(ticket >> INDEX_BITS, 0);
        assert_eq!(lender.slots().settle(ticket), Some(7));
    }

    #[test]
    fn everything_can_be_reclaimed() {
        let mut lender = Lender::new(8);
        let tickets: Vec<u64> = (0..5).map(|n| lender.lend(n).unwrap()).collect();
        lender.slots().settle(tickets[1]);
        let mut back = Vec::new();
        lender.slots().reclaim(|n| back.push(n));
        back.sort();
        assert_eq!(back, [0, 2, 3, 4]);
        assert_eq!((lender.room(), lender.slots().settle(tickets[0])), (8, None));
    }

    #[test]
    fn dropping_the_table_drops_what_is_lent() {
        let payload = Arc::new(());
        let mut lender = Lender::new(2);
        lender.lend(payload.clone()).unwrap();
        drop(lender);
        assert_eq!(Arc::strong_count(&payload), 1);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;

    /// The lender uses a slot again while the poller settles what was lent in it before.
    #[test]
    fn lend_while_another_settles() {
        loom::model(|| {
            let mut lender = Lender::new(1);
            let first = lender.lend(Box::new(1)).unwrap();
            let slots = lender.slots().clone();
            let poller = thread::spawn(move || {
                let settled = slots.settle(first);
                assert_eq!(settled.as_deref(), Some(&1));
            });
            let second = lender.lend(Box::new(2));
            poller.join().unwrap();
            let second = second.or_else(|payload| lender.lend(payload)).unwrap();
            assert_eq!(lender.slots().settle(first), None);
            assert_eq!(lender.slots().settle(second).as_deref(), Some(&2));
        });
    }

    /// Somebody who destroyed the queue takes everything back while the poller still settles:
    /// each payload is seen by exactly one of them.
    #[test]
    fn settle_while_another_reclaims() {
        loom::model(|| {
            let mut lender = Lender::new(2);
            let tickets = [lender.lend(Box::new(1)).unwrap(), lender.lend(Box::new(2)).unwrap()];
            let slots = lender.slots().clone();
            let sum = loom::sync::Arc::new(AtomicUsize::new(0));
            let (other, theirs) = (slots.clone(), sum.clone());
            let poller = thread::spawn(move || {
                for ticket in tickets {
                    if let Some(payload) = other.settle(ticket) {
                        theirs.fetch_add(*payload, Ordering::Relaxed);
                    }
                }
            });
            slots.reclaim(|payload| {
                sum.fetch_add(*payload, Ordering::Relaxed);
            });
            poller.join().unwrap();
            assert_eq!(sum.load(Ordering::Relaxed), 3);
            assert_eq!(lender.room(), 2);
        });
    }
}
