//! The lender's side of a table: where the next slot is, what is lent to requests that the device has
//! not heard of yet, and how all of that comes back if it never does.
//!
//! Pairs with [`LoanTable`], by which whoever sees a request complete settles it.
//!
//! LoanTable are lent in turn, because most queues complete in turn: where to lend next is the lender's
//! own knowledge, and a slot that comes back is free by what stands in it. Where the next is still
//! lent, all are. A shared receive queue completes in about that order; slots that are still lent when
//! their turn comes are skipped, and there are never more of those than queue pairs that are in the
//! middle of a message, completions that nobody polled, and receives that queue pairs took along when
//! they were dropped.

use super::{APART, FREE, Loan, LoanTable, NEXT, STATE};
use crate::memory::compact_enum::CompactEnum;
use crate::memory::sync::Ordering;
use std::fmt;
use std::mem::MaybeUninit;

/// The one who lends.
pub(crate) struct Lender<P> {
    slots: LoanTable<P>,
    /// The ticket after the last that was handed over. What is lent under it or later ones is known
    /// to nobody.
    next: u64,
    /// LoanTable come back in the order in which they were lent.
    in_turn: bool,
    /// LoanTable looked at in search of a free one.
    #[cfg(test)]
    looks: std::sync::atomic::AtomicU64,
}

impl<P> Lender<P> {
    /// With `count` slots; `mark` is 0 or [`MARK`](super::MARK).
    pub(crate) fn new(count: u32, mark: u64) -> Self {
        // Each table counts from elsewhere, so that tickets of one open nothing in another. Not
        // loom's: this is no part of what is shared.
        static TABLES: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let table = TABLES.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let next = table.wrapping_mul(0x9e37_79b1 << u32::BITS) | mark;
        Lender {
            slots: LoanTable::new(count),
            next,
            in_turn: true,
            #[cfg(test)]
            looks: Default::default(),
        }
    }

    /// For a queue that does not complete in the order in which it was posted to.
    pub(crate) fn out_of_turn(self) -> Self {
        Lender { in_turn: false, ..self }
    }

    /// What settles what is lent here.
    pub(crate) fn slots(&self) -> &LoanTable<P> {
        &self.slots
    }

    /// Takes back, and drops, what was lent and [forgotten](Lending).
    pub(crate) fn tidy(&mut self) {
        self.slots.forget(self.next);
    }

    /// How many more can be lent. Takes back what was forgotten, and looks at each.
    pub(crate) fn room(&mut self) -> usize {
        self.tidy();
        self.slots.all().filter(|slot| slot.is_free()).count()
    }

    /// Starts to lend what is handed to the device at once.
    #[inline(always)]
    pub(crate) fn begin(&mut self) -> Lending<'_, P> {
        Lending { lender: self, ahead: 0 }
    }

    /// The first ticket from `next` on whose slot is free. Those between lose their turn. They are
    /// never lent, or somebody took their payload and forgot it; where slots come back in turn, the
    /// first that is lent tells that all others are. What was forgotten is taken back by who comes
    /// upon it: so nothing is left of it under tickets before that which is found.
    #[cold]
    #[inline(never)]
    fn skip(&self, next: u64) -> Option<u64> {
        let mut ticket = next;
        for _ in 0..self.slots.len {
            #[cfg(test)]
            self.looks.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            ticket = self.slots.lendable(ticket);
            let slot = self.slots.slot(ticket);
            // Acquire as in `vacancy`.
            let mut state = slot.state.load(Ordering::Acquire);
            if self.slots.is_untold(state, next) {
                self.slots.forget(next);
                state = slot.state.load(Ordering::Acquire);
            }
            if state == FREE {
                return Some(ticket);
            }
            if self.in_turn && state & STATE == 0 {
                return None;
            }
            ticket = ticket.wrapping_add(NEXT);
        }
        None
    }
}

/// What is lent piece by piece before the device hears of it. Dropping it takes all of that back; if
/// it is forgotten, a later one does, at the latest when it comes upon something of it.
pub(crate) struct Lending<'l, P> {
    lender: &'l mut Lender<P>,
    /// What the ticket of the slot to be lent next is ahead of the lender's.
    ahead: u64,
}

impl<P> Lending<'_, P> {
    /// A slot that is free, if there is one.
    #[inline(always)]
    pub(crate) fn vacancy(&mut self) -> Option<Vacancy<'_, P>> {
        let Lending { lender, ahead } = self;
        let mut ticket = lender.next.wrapping_add(*ahead);
        let mut slot = lender.slots.slot(ticket);
        // Acquire pairs with the Release of `settle`.
        if slot.state.load(Ordering::Acquire) != FREE {
            let found = lender.skip(ticket)?;
            if *ahead == 0 {
                // Of a batch of one it is known when it is compiled how far it is ahead.
                lender.next = found;
            } else {
                *ahead = found.wrapping_sub(lender.next);
            }
            ticket = found;
            slot = lender.slots.slot(ticket);
        }
        Some(Vacancy { lender, slot, ticket, ahead })
    }

    /// How much is lent: nothing, one, or more. It is one or less only if that is so: slots that were
    /// skipped count as well, if something is lent before them.
    #[inline(always)]
    pub(crate) fn count(&self) -> u64 {
        self.ahead / NEXT
    }

    /// The device knows of everything that is lent.
    #[inline(always)]
    pub(crate) fn hand_over(mut self) {
        self.lender.next = self.lender.next.wrapping_add(self.ahead);
        self.ahead = 0;
    }
}

impl<P> Drop for Lending<'_, P> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.ahead != 0 {
            self.lender.slots.forget(self.lender.next);
        }
    }
}

/// A free slot, that what is to be lent may be told its ticket before.
pub(crate) struct Vacancy<'l, P> {
    lender: &'l Lender<P>,
    /// Free, and the lender's alone.
    slot: &'l Loan<P>,
    ticket: u64,
    /// The lender's.
    ahead: &'l mut u64,
}

impl<P> Vacancy<'_, P> {
    /// Under which what is lent here will be settled.
    #[inline(always)]
    pub(crate) fn ticket(&self) -> u64 {
        self.ticket
    }

    /// Sets the ticket [apart](APART).
    pub(crate) fn apart(self) -> Self {
        Vacancy { ticket: self.ticket | APART, ..self }
    }

    /// Takes `payload` in.
    #[inline(always)]
    pub(crate) fn lend(self, payload: P) {
        // SAFETY: the slot is free, which only the lender changes, and what `settle` did to it is
        // known by the Acquire of `vacancy`.
        unsafe { self.slot.payload.put(MaybeUninit::new(payload)) };
        self.lent();
    }

    /// There is a payload.
    #[inline(always)]
    fn lent(self) {
        // Release pairs with the Acquire of `settle`.
        self.slot.state.store(self.ticket, Ordering::Release);
        *self.ahead = self.ahead.wrapping_add(NEXT);
    }
}

impl<'l, K, A, B> Vacancy<'l, CompactEnum<K, A, B>> {
    /// Lends what is small, and writes nothing but that, before anybody is told of the ticket: who asks
    /// for that need hold neither meanwhile.
    #[inline(always)]
    pub(crate) fn fill(self, key: K, small: A) -> Filled<'l, K, A, B> {
        let Vacancy { lender, slot, ticket, ahead } = self;
        // SAFETY: as in `lend`.
        let place = unsafe { &mut *slot.payload.place() };
        CompactEnum::put_small(place, key, small);
        // As in `lent`.
        slot.state.store(ticket, Ordering::Release);
        Filled { lender, ahead }
    }
}

/// What is lent under the next ticket, of which nobody was told but who writes the request.
pub(crate) struct Filled<'l, K, A, B> {
    lender: &'l Lender<CompactEnum<K, A, B>>,
    /// The lender's.
    ahead: &'l mut u64,
}

impl<K, A, B> Filled<'_, K, A, B> {
    /// Somebody was told.
    #[inline(always)]
    pub(crate) fn lend(self) {
        *self.ahead = self.ahead.wrapping_add(NEXT);
    }

    /// Takes it out again.
    #[inline(always)]
    pub(crate) fn empty(self) -> (K, A) {
        self.lender.take_back(*self.ahead)
    }
}

impl<K, A, B> Lender<CompactEnum<K, A, B>> {
    /// Takes back what is lent this far ahead, of which nobody was told but who writes the request.
    #[cold]
    #[inline(never)]
    fn take_back(&self, ahead: u64) -> (K, A) {
        let ticket = self.next.wrapping_add(ahead);
        let slot = self.slots.slot(ticket);
        // Not apart, as nothing small is.
        debug_assert_eq!(slot.state.load(Ordering::Relaxed), ticket, "not what was lent last");
        let parcel = slot.payload.place().cast_const().cast();
        // SAFETY: `fill` wrote it, and nobody settled it, for nobody was told how but who wrote the
        // request, which the device has not heard of.
        let small = unsafe { CompactEnum::<K, A, B>::take_small(parcel) };
        slot.state.store(FREE, Ordering::Release);
        small
    }
}

impl<P> fmt::Debug for Lender<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lender").field("slots", &self.slots).finish_non_exhaustive()
    }
}

impl<P> fmt::Debug for Lending<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lending").finish_non_exhaustive()
    }
}

#[cfg(test)]
impl<P> Lender<P> {
    pub(super) fn lend(&mut self, payload: P) -> Result<u64, P> {
        let mut lending = self.begin();
        let ticket = lending.hold(payload)?;
        lending.hand_over();
        Ok(ticket)
    }
}

#[cfg(test)]
impl<P> Lending<'_, P> {
    pub(super) fn hold(&mut self, payload: P) -> Result<u64, P> {
        let Some(vacancy) = self.vacancy() else { return Err(payload) };
        let ticket = vacancy.ticket();
        vacancy.lend(payload);
        Ok(ticket)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
