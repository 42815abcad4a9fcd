//! What is lent to a device: a table that takes something in when a request is posted, and gives
//! it back once, to whoever sees the request complete.
//!
//! The owner of a queue lends; the poller of its completion queue, perhaps another thread, settles.
//! A ticket stands for the one in the other's hands: it is what the device carries from the request
//! to the completion. A ticket that is forged, stale or shown twice settles nothing. Neither side
//! locks, waits or allocates. Model-checked with loom. Which slot is lent next is told beside the
//! [lender].

pub(crate) mod lender;

use super::compact_enum::CompactEnum;
use super::sync::{AtomicU64, Ordering, Turns};
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, RefUnwindSafe, UnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::sync::Arc;

/// Clear in every ticket, and set in the two states below, so that neither is taken for the other.
const STATE: u64 = 1;
/// Set in the tickets of tables that were [marked](lender::Lender::new), and in no others.
pub(crate) const MARK: u64 = 1 << 1;
/// Set in tickets that are to be told from others without a look at what they settle.
pub(crate) const APART: u64 = 1 << 2;
/// Bits of a ticket below those that count; the count, modulo the size of the table, is the slot. As
/// many as an offset among slots has below its number: one is made of the other without a shift.
const MARKS: u32 = 6;
/// What a ticket and the next one differ by.
const NEXT: u64 = 1 << MARKS;

/// The state of a slot that can be lent.
const FREE: u64 = STATE;
/// That of one whose payload somebody is taking out, and of those that are never lent.
const TAKEN: u64 = STATE | 1 << MARKS;

/// On cache lines of its own, for two threads may be at work in neighbours. What is looked at comes
/// first.
#[derive(Debug)]
#[repr(C, align(64))]
struct Loan<P> {
    /// The ticket under which it is lent, or one of the two above.
    state: AtomicU64,
    /// There while the slot is lent.
    payload: Turns<MaybeUninit<P>>,
}

impl<P> Loan<P> {
    /// Gives back what is lent here under `ticket`.
    #[inline(always)]
    fn settle(&self, ticket: u64) -> Option<Settling<'_, P>> {
        // Acquire pairs with the Release of `Vacancy::lend`. Of several who show the same ticket one
        // wins.
        self.state.compare_exchange(ticket, TAKEN, Ordering::Acquire, Ordering::Relaxed).ok()?;
        Some(Settling { slot: self, payload: PhantomData })
    }

    /// Takes the payload out of a slot that is taken, which is the caller's alone, and frees it.
    #[inline(always)]
    fn empty(&self) -> P {
        // SAFETY: the lender leaves the slot alone until it is free.
        let payload = unsafe { self.payload.place().read() };
        // SAFETY: a slot is lent with its payload, and nobody took it out: that frees the slot.
        let payload = unsafe { payload.assume_init() };
        // Release pairs with the Acquire of `vacancy`: the payload is out before another comes.
        self.state.store(FREE, Ordering::Release);
        payload
    }

    /// Drops the payload of a slot that is taken, out of the way of those who do not.
    #[cold]
    #[inline(never)]
    fn discard(&self) {
        drop(self.empty());
    }

    /// Gives back what is lent here, if anything is.
    fn settle_any(&self) -> Option<P> {
        let state = self.state.load(Ordering::Relaxed);
        if state & STATE != 0 { None } else { self.settle(state).map(Settling::take) }
    }

    fn is_free(&self) -> bool {
        self.state.load(Ordering::Relaxed) == FREE
    }
}

impl<P> Default for Loan<P> {
    fn default() -> Self {
        Loan { state: AtomicU64::new(FREE), payload: Turns::new(MaybeUninit::uninit()) }
    }
}

impl<P> Drop for Loan<P> {
    fn drop(&mut self) {
        drop(self.settle_any());
    }
}

/// What comes back, in the place where it was lent. The place is free when it was taken out.
pub(crate) struct Settling<'s, P> {
    /// Taken, and holds its payload.
    slot: &'s Loan<P>,
    /// It shows the payload by reference, so only one that can be shared makes it so.
    payload: PhantomData<P>,
}

impl<P> Settling<'_, P> {
    /// What it is.
    #[inline(always)]
    pub(crate) fn get(&self) -> &P {
        // SAFETY: whoever made the slot a taken one and made this of it is alone with the payload.
        let payload = unsafe { &*self.slot.payload.place() };
        // SAFETY: it is there until `take`, which consumes this.
        unsafe { payload.assume_init_ref() }
    }

    /// Takes it out.
    #[inline(always)]
    pub(crate) fn take(self) -> P {
        let slot = self.slot;
        std::mem::forget(self);
        slot.empty()
    }
}

impl<K, A, B> Settling<'_, CompactEnum<K, A, B>> {
    /// Takes out what is small, and moves nothing but that.
    #[inline(always)]
    pub(crate) fn take_small(self) -> Result<(K, A), Self> {
        // SAFETY: it is there, and if anything is read nobody sees it again: the slot is freed as one
        // that is empty.
        let small = unsafe { CompactEnum::read_small(self.get()) };
        let Some(small) = small else { return Err(self) };
        let slot = self.slot;
        std::mem::forget(self);
        // Release pairs with the Acquire of `vacancy`, as in `empty`.
        slot.state.store(FREE, Ordering::Release);
        Ok(small)
    }
}

impl<P> Drop for Settling<'_, P> {
    #[inline(always)]
    fn drop(&mut self) {
        self.slot.discard();
    }
}

/// Something that comes back another way than from a table.
#[derive(Debug)]
pub(crate) struct Spare<P>(Loan<P>);

impl<P> Spare<P> {
    pub(crate) fn new() -> Self {
        Spare(Loan::default())
    }

    /// As if it had been lent. What is there already, because nobody took it out, stays for ever.
    pub(crate) fn settle(&mut self, payload: P) -> Settling<'_, P> {
        self.0.state.store(TAKEN, Ordering::Relaxed);
        // SAFETY: it is borrowed exclusively.
        unsafe { self.0.payload.put(MaybeUninit::new(payload)) };
        Settling { slot: &self.0, payload: PhantomData }
    }
}

/// The table, seen by everybody. Clones are the same table.
pub(crate) struct LoanTable<P> {
    /// The first of `slots`.
    base: NonNull<Loan<P>>,
    /// The bits of a ticket that say which slot it is of.
    span: u64,
    slots: Arc<[Loan<P>]>,
    len: u32,
}

impl<P> Clone for LoanTable<P> {
    fn clone(&self) -> Self {
        LoanTable { base: self.base, span: self.span, slots: self.slots.clone(), len: self.len }
    }
}

// SAFETY: all access is to `slots` by shared reference.
unsafe impl<P: Send> Send for LoanTable<P> {}
// SAFETY: as above.
unsafe impl<P: Send> Sync for LoanTable<P> {}
impl<P> UnwindSafe for LoanTable<P> {}
impl<P> RefUnwindSafe for LoanTable<P> {}

// SAFETY: payloads are moved in by one thread and out by another, and never shared.
unsafe impl<P: Send> Send for Loan<P> {}
// SAFETY: `&Loan` only moves payloads in and out, which needs `P: Send` and no more; `Settling`, which
// shows one, is not shared unless payloads can be.
unsafe impl<P: Send> Sync for Loan<P> {}
// Payloads are taken out whole before they are dropped: a panic leaves nothing half done.
impl<P> UnwindSafe for Loan<P> {}
impl<P> RefUnwindSafe for Loan<P> {}

impl<P> LoanTable<P> {
    /// Of `count` slots and as many as are missing to a power of two, which are never lent.
    fn new(count: u32) -> LoanTable<P> {
        let all = count.max(1).next_power_of_two();
        let slots: Arc<[Loan<P>]> = (0..all).map(|_| Loan::default()).collect();
        for beyond in slots.iter().skip(count as usize) {
            beyond.state.store(TAKEN, Ordering::Relaxed);
        }
        let span = u64::from(all - 1) << MARKS;
        let base = NonNull::from(&*slots).cast();
        LoanTable { base, span, slots, len: count }
    }

    /// How many can be lent at once.
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    /// What tells the table from others that are alive.
    pub(crate) fn key(&self) -> usize {
        self.base.addr().get()
    }

    /// Gives back what was lent under `ticket`; `None` if nothing is, or no longer.
    #[inline(always)]
    pub(crate) fn settle(&self, ticket: u64) -> Option<Settling<'_, P>> {
        // What is no ticket is one that was never given.
        if ticket & STATE != 0 { None } else { self.slot(ticket).settle(ticket) }
    }

    /// The same, but `None` as well for a ticket that is [apart](APART) from others.
    #[inline(always)]
    pub(crate) fn settle_usual(&self, ticket: u64) -> Option<Settling<'_, P>> {
        if ticket & (STATE | APART) != 0 { None } else { self.slot(ticket).settle(ticket) }
    }

    /// The slot that is lent under `ticket`, if any.
    #[inline(always)]
    fn slot(&self, ticket: u64) -> &Loan<P> {
        // LoanTable are as far apart as their alignment, or a multiple of that.
        let offset = (ticket & self.span) as usize * (size_of::<Loan<P>>() >> MARKS);
        // SAFETY: `span` is less than the number of slots, `MARKS` bits up.
        let slot = unsafe { self.base.byte_add(offset) };
        // SAFETY: one of `slots`, which `self` holds and never lends mutably.
        unsafe { slot.as_ref() }
    }

    /// Those that can be lent.
    fn all(&self) -> impl Iterator<Item = &Loan<P>> {
        self.slots.iter().take(self.len as usize)
    }

    /// The first ticket from this on that is of a slot which can be lent.
    fn lendable(&self, ticket: u64) -> u64 {
        let at = ticket & self.span;
        let end = self.span + NEXT;
        if at >> MARKS < self.len.into() { ticket } else { ticket.wrapping_add(end - at) }
    }

    /// Whether a state is a ticket that nobody was told of, where `next` is the first of those. They
    /// end somewhere: each that was given was at most a round away from that before it.
    fn is_untold(&self, state: u64, next: u64) -> bool {
        let round = self.slots.len() as u64;
        let end = round.saturating_mul(round).min(1 << (u64::BITS - 1 - MARKS)) << MARKS;
        state & STATE == 0 && state.wrapping_sub(next) < end
    }

    /// Takes back, and drops, what was lent under tickets from `next` on.
    #[cold]
    #[inline(never)]
    fn forget(&self, next: u64) {
        for slot in self.all() {
            let state = slot.state.load(Ordering::Relaxed);
            if self.is_untold(state, next) {
                drop(slot.settle(state));
            }
        }
    }

    /// Takes back everything that is lent in these tables: for when the device can complete nothing
    /// any more. What `visit` panics at keeps no other from coming back; the first panic goes on
    /// afterwards.
    pub(crate) fn reclaim<'t>(
        tables: impl IntoIterator<Item = &'t LoanTable<P>>,
        mut visit: impl FnMut(P),
    ) where
        P: 't,
    {
        let mut first = None;
        for payload in tables.into_iter().flat_map(LoanTable::all).filter_map(Loan::settle_any) {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| visit(payload))) {
                match &first {
                    None => first = Some(panic),
                    // What a panic carries may panic in turn when it is dropped.
                    Some(_) => std::mem::forget(panic),
                }
            }
        }
        if let Some(panic) = first {
            match std::thread::panicking() {
                // Two at once would end the process.
                true => std::mem::forget(panic),
                false => resume_unwind(panic),
            }
        }
    }
}

/// A table whose payloads are of no interest any more.
pub(crate) trait Reclaim: fmt::Debug + Send + Sync + UnwindSafe + RefUnwindSafe {
    /// Drops everything that is lent.
    fn reclaim_all(&self);
}

impl<P: Send> Reclaim for LoanTable<P> {
    fn reclaim_all(&self) {
        LoanTable::reclaim([self], drop);
    }
}

impl<P> fmt::Debug for LoanTable<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoanTable").field("slots", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
impl<P> LoanTable<P> {
    fn give(&self, ticket: u64) -> Option<P> {
        self.settle(ticket).map(Settling::take)
    }
}

#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, not(loom)))]
mod tests;
