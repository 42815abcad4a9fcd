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
const TICKETS: u64 = 1 << TICKET_BITS;
/// The most slots of a table.
pub(crate) const MAX_SLOTS: u32 = 1 << INDEX_BITS;
/// Set in the state of a slot that is lent.
const LENT: u64 = 1 << 63;

struct Slot<P> {
    /// The ticket under which it is lent, or will be next.
    state: AtomicU64,
    /// One more than the slot behind this one, in whichever list it is.
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

    /// The slot of a link of a list: one more than its index.
    #[inline]
    fn get(&self, link: u32) -> Option<&Slot<P>> {
        self.slots.get(link.checked_sub(1)? as usize)
    }

    /// Gives back what was lent under `ticket`; `None` if nothing is, or no longer.
    #[inline(always)]
    pub(crate) fn settle(&self, ticket: u64) -> Option<P> {
        if ticket >= TICKETS {
            return None;
        }
        let index = (ticket & u64::from(MAX_SLOTS - 1)) as u32;
        let slot = self.slots.get(index as usize)?;
        let (lent, free) = (ticket | LENT, (ticket + (1 << INDEX_BITS)) & (TICKETS - 1));
        // Acquire pairs with the Release of `Vacancy::lend`. Of several who show the same ticket one
        // wins.
        slot.state.compare_exchange(lent, free, Ordering::Acquire, Ordering::Relaxed).ok()?;
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

    /// Gives back what a slot holds, if it is lent.
    fn settle_lent(&self, slot: &Slot<P>) -> Option<P> {
        let state = slot.state.load(Ordering::Relaxed);
        if state & LENT == 0 { None } else { self.settle(state & !LENT) }
    }

    /// Takes back everything that is lent: for when the device can complete nothing any more.
    pub(crate) fn reclaim(&self, mut visit: impl FnMut(P)) {
        for slot in &self.slots {
            if let Some(payload) = self.settle_lent(slot) {
                visit(payload);
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
///
/// What it hands to the device at once is lent piece by piece before; until it says that the device
/// [has it](Self::hand_over), all of that can be [taken back](Self::take_back).
pub(crate) struct Lender<P> {
    slots: Arc<Slots<P>>,
    /// One more than the first slot that is free; the others follow by `next`, as those that came
    /// back do.
    free: u32,
    /// Where `free` was when the device was told last: the slots from there are lent, and the device
    /// does not know of them.
    told: u32,
}

impl<P> Lender<P> {
    /// With `count` slots, at most [`MAX_SLOTS`].
    pub(crate) fn new(count: u32) -> Self {
        // Each table counts from elsewhere, so that tickets of one open nothing in another. Not
        // loom's: this is no part of what is shared.
        static TABLES: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let table = TABLES.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let first = table.wrapping_mul(0x9e37_79b1) << INDEX_BITS & (TICKETS - 1);
        let count = count.min(MAX_SLOTS);
        let slots = (0..count)
            .map(|slot| Slot {
                state: AtomicU64::new(first | u64::from(slot)),
                next: AtomicU32::new(if slot + 1 < count { slot + 2 } else { 0 }),
                payload: Turns::new(None),
            })
            .collect();
        let slots = Slots { slots, returned: AtomicU32::new(0) };
        let free = count.min(1);
        Lender { slots: Arc::new(slots), free, told: free }
    }

    /// What settles what is lent here.
    pub(crate) fn slots(&self) -> &Arc<Slots<P>> {
        &self.slots
    }

    /// How many more can be lent. Takes back what the device does not know of, and looks at each.
    pub(crate) fn room(&mut self) -> usize {
        self.take_back();
        // Those that came back go behind the others.
        let returned = self.slots.returned.swap(0, Ordering::Acquire);
        self.append(returned);
        let (mut count, mut at) = (0, self.free);
        while let Some(slot) = self.slots.get(at) {
            count += 1;
            at = slot.next.load(Ordering::Relaxed);
        }
        count
    }

    /// A slot that is free, if there is one.
    #[inline(always)]
    pub(crate) fn vacancy(&mut self) -> Option<Vacancy<'_, P>> {
        if self.free == 0 {
            self.collect();
        }
        let index = self.free.checked_sub(1)?;
        let slot = self.slots.slots.get(index as usize)?;
        let ticket = slot.state.load(Ordering::Relaxed);
        if ticket & LENT != 0 {
            // Only a device that completes what it never got can bring a list into disorder.
            return None;
        }
        Some(Vacancy { free: &mut self.free, slot, ticket })
    }

    /// Fetches the slots that came back.
    #[cold]
    fn collect(&mut self) {
        // Acquire pairs with the Release of `settle`.
        let returned = self.slots.returned.swap(0, Ordering::Acquire);
        self.append(returned);
    }

    /// Puts a list of free slots behind those that are free, and those behind what is lent last.
    fn append(&mut self, list: u32) {
        let (mut at, mut last) = (self.told, None);
        // No list is longer, whatever is wrong with it.
        for _ in 0..self.slots.len() {
            let Some(slot) = self.slots.get(at) else { break };
            at = slot.next.load(Ordering::Relaxed);
            last = Some(slot);
        }
        match last {
            Some(last) => last.next.store(list, Ordering::Relaxed),
            None => self.told = list,
        }
        if self.free == 0 {
            self.free = list;
        }
    }

    /// Whether something is lent that the device does not know of.
    #[inline(always)]
    pub(crate) fn is_holding(&self) -> bool {
        self.told != self.free
    }

    /// The device knows of everything that is lent.
    #[inline(always)]
    pub(crate) fn hand_over(&mut self) {
        self.told = self.free;
    }

    /// Takes back, and drops, what the device does not know of.
    #[cold]
    pub(crate) fn take_back(&mut self) {
        while self.is_holding() {
            let Some(slot) = self.slots.get(self.told) else { break };
            // First: once it is settled it is in another list.
            self.told = slot.next.load(Ordering::Relaxed);
            drop(self.slots.settle_lent(slot));
        }
        self.hand_over();
    }
}

/// A free slot, that what is to be lent may be told its ticket before.
pub(crate) struct Vacancy<'l, P> {
    free: &'l mut u32,
    /// The first of `free`.
    slot: &'l Slot<P>,
    ticket: u64,
}

impl<P> Vacancy<'_, P> {
    /// Under which what is lent here will be settled.
    #[inline(always)]
    pub(crate) fn ticket(&self) -> u64 {
        self.ticket
    }

    /// Takes `payload` in.
    #[inline(always)]
    pub(crate) fn lend(self, payload: P) {
        // It keeps its place in the list, behind what the device knows and before what is free.
        *self.free = self.slot.next.load(Ordering::Relaxed);
        // SAFETY: the slot is not lent and was in the list of free ones, which has one reader, so
        // that nobody else has it; and what `settle` did to it is known by the Acquire of `collect`.
        let empty = unsafe { self.slot.payload.replace(Some(payload)) };
        debug_assert!(empty.is_none());
        // It is; the compiler cannot know, and would drop it.
        std::mem::forget(empty);
        // Release pairs with the Acquire of `settle`.
        self.slot.state.store(self.ticket | LENT, Ordering::Release);
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
        let ticket = self.hold(payload)?;
        self.hand_over();
        Ok(ticket)
    }

    fn hold(&mut self, payload: P) -> Result<u64, P> {
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
        let forged = [
            ticket + 1,
            ticket ^ 1 << INDEX_BITS,
            ticket | 1 << TICKET_BITS,
            ticket | LENT,
            !ticket,
        ];
        for forged in forged {
            assert_eq!(lender.slots().settle(forged), None, "{forged:#x}");
        }
        assert_eq!(lender.slots().settle(ticket), Some(1));
    }

    #[test]
    fn generations_wrap() {
        let mut lender = Lender::new(1);
        let last = TICKETS - (1 << INDEX_BITS);
        lender.slots.slots[0].state.store(last, Ordering::Relaxed);
        let ticket = lender.lend(7).unwrap();
        assert_eq!((ticket, lender.slots().settle(ticket)), (last, Some(7)));
        let ticket = lender.lend(8).unwrap();
        assert_eq!((ticket, lender.slots().settle(ticket)), (0, Some(8)));
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
    fn what_is_held_can_be_taken_back() {
        let payload = Arc::new(());
        let mut lender = Lender::new(4);
        let given = lender.lend(payload.clone()).unwrap();
        for round in 1..4 {
            let held: Vec<u64> = (0..3).map(|_| lender.hold(payload.clone()).unwrap()).collect();
            assert!(lender.is_holding() && lender.hold(payload.clone()).is_err());
            lender.take_back();
            assert_eq!((Arc::strong_count(&payload), lender.room()), (2, 3), "round {round}");
            assert!(held.iter().all(|ticket| lender.slots().settle(*ticket).is_none()));
        }
        // A list that ends while something is held goes on with what came back.
        assert!((0..3).all(|_| lender.hold(payload.clone()).is_ok()));
        lender.slots().settle(given);
        let given = lender.hold(payload.clone()).unwrap();
        assert!(lender.hold(payload.clone()).is_err());
        lender.take_back();
        assert!(lender.slots().settle(given).is_none());
        assert_eq!((Arc::strong_count(&payload), lender.room()), (1, 4));
        let given = lender.lend(payload.clone()).unwrap();
        lender.take_back();
        assert!(lender.slots().settle(given).is_some());
        // Some came back while others are free.
        let again = lender.lend(payload.clone()).unwrap();
        assert_eq!(lender.room(), 3);
        lender.slots().settle(again);
        assert_eq!((lender.room(), lender.room()), (4, 4));
        assert!((0..4).all(|_| lender.lend(payload.clone()).is_ok()));
        assert_eq!(lender.room(), 0);
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
