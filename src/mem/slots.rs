//! What is lent to a device: a table that takes something in when a request is posted, and gives
//! it back once, to whoever sees the request complete.
//!
//! The owner of a queue lends; the poller of its completion queue, perhaps another thread, settles.
//! A ticket stands for the one in the other's hands: it is what the device carries from the request
//! to the completion. A ticket that is forged, stale or shown twice settles nothing. Neither side
//! locks, waits or allocates. Model-checked with loom.
//!
//! Slots are lent in turn, because most queues complete in turn: where to lend next is the lender's
//! own knowledge, and a slot that comes back is free by what stands in it. Where the next is still
//! lent, all are. A shared receive queue completes in about that order; slots that are still lent when
//! their turn comes are skipped, and there are never more of those than queue pairs that are in the
//! middle of a message, completions that nobody polled, and receives that queue pairs took along when
//! they were dropped.

use super::masked::Masked;
use super::sync::{AtomicU64, Ordering, Turns};
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, RefUnwindSafe, UnwindSafe, catch_unwind, resume_unwind};

/// Set in every ticket, so that none is taken for one of the two states below.
const TICKET: u64 = 1;
/// Set in the tickets of tables that were [marked](Lender::new), and in no others.
pub(crate) const MARK: u64 = 1 << 1;
/// Bits of a ticket below those that count; the count, modulo the size of the table, is the slot.
const MARKS: u32 = 2;
/// What a ticket and the next one differ by.
const NEXT: u64 = 1 << MARKS;

/// The state of a slot that can be lent.
const FREE: u64 = 0;
/// That of one whose payload somebody is taking out, and of those that are never lent.
const TAKEN: u64 = 1 << MARKS;

#[derive(Debug)]
struct Slot<P> {
    /// The ticket under which it is lent, or one of the two above.
    state: AtomicU64,
    /// There while the slot is lent.
    payload: Turns<MaybeUninit<P>>,
}

impl<P> Slot<P> {
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
        if state & TICKET == 0 { None } else { self.settle(state).map(Settling::take) }
    }

    fn is_free(&self) -> bool {
        self.state.load(Ordering::Relaxed) == FREE
    }
}

impl<P> Default for Slot<P> {
    fn default() -> Self {
        Slot { state: AtomicU64::new(FREE), payload: Turns::new(MaybeUninit::uninit()) }
    }
}

impl<P> Drop for Slot<P> {
    fn drop(&mut self) {
        drop(self.settle_any());
    }
}

/// What comes back, in the place where it was lent. The place is free when it was taken out.
pub(crate) struct Settling<'s, P> {
    /// Taken, and holds its payload.
    slot: &'s Slot<P>,
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

/// What is lent where most of it is of one small kind.
#[derive(Debug)]
pub(crate) enum Parcel<A, B> {
    /// Usual, and few words.
    Small(A),
    /// Anything else.
    Large(B),
}

impl<A, B> Settling<'_, Parcel<A, B>> {
    /// Takes out what is small, and moves nothing but that.
    #[inline(always)]
    pub(crate) fn take_small(self) -> Result<A, Self> {
        let Parcel::Small(small) = self.get() else { return Err(self) };
        let small: *const A = small;
        // SAFETY: it is there, and nobody sees it again: the slot is freed as one that is empty.
        let small = unsafe { small.read() };
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
pub(crate) struct Spare<P>(Slot<P>);

impl<P> Spare<P> {
    pub(crate) fn new() -> Self {
        Spare(Slot::default())
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
pub(crate) struct Slots<P> {
    slots: Masked<Slot<P>>,
    len: u32,
}

impl<P> Clone for Slots<P> {
    fn clone(&self) -> Self {
        Slots { slots: self.slots.clone(), len: self.len }
    }
}

// SAFETY: payloads are moved in by one thread and out by another, and never shared.
unsafe impl<P: Send> Send for Slot<P> {}
// SAFETY: `&Slot` only moves payloads in and out, which needs `P: Send` and no more; `Settling`, which
// shows one, is not shared unless payloads can be.
unsafe impl<P: Send> Sync for Slot<P> {}
// Payloads are taken out whole before they are dropped: a panic leaves nothing half done.
impl<P> UnwindSafe for Slot<P> {}
impl<P> RefUnwindSafe for Slot<P> {}

impl<P> Slots<P> {
    /// How many can be lent at once.
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    /// What tells the table from others that are alive.
    pub(crate) fn key(&self) -> usize {
        self.slots.key()
    }

    /// Gives back what was lent under `ticket`; `None` if nothing is, or no longer.
    #[inline(always)]
    pub(crate) fn settle(&self, ticket: u64) -> Option<Settling<'_, P>> {
        // What is no ticket is made one that was never given.
        self.slot(ticket).settle(ticket | TICKET)
    }

    /// The slot that is lent under `ticket`, if any.
    #[inline(always)]
    fn slot(&self, ticket: u64) -> &Slot<P> {
        self.slots.at((ticket >> MARKS) as u32)
    }

    /// Those that can be lent.
    fn all(&self) -> impl Iterator<Item = &Slot<P>> {
        (0..self.len).map(|index| self.slots.at(index))
    }

    /// Takes back everything that is lent in these tables: for when the device can complete nothing
    /// any more. What `visit` panics at keeps no other from coming back; the first panic goes on
    /// afterwards.
    pub(crate) fn reclaim<'t>(
        tables: impl IntoIterator<Item = &'t Slots<P>>,
        mut visit: impl FnMut(P),
    ) where
        P: 't,
    {
        let mut first = None;
        for payload in tables.into_iter().flat_map(Slots::all).filter_map(Slot::settle_any) {
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

impl<P: Send> Reclaim for Slots<P> {
    fn reclaim_all(&self) {
        Slots::reclaim([self], drop);
    }
}

impl<P> fmt::Debug for Slots<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slots").field("slots", &self.len).finish_non_exhaustive()
    }
}

/// The one who lends.
///
/// What it hands to the device at once is lent piece by piece before; until it says that the device
/// [has it](Self::hand_over), all of that can be [taken back](Self::take_back).
pub(crate) struct Lender<P> {
    slots: Slots<P>,
    /// The ticket of the slot to be lent next.
    next: u64,
    /// What it was when the device was told last.
    told: u64,
    /// Slots come back in the order in which they were lent.
    in_turn: bool,
    /// Slots looked at in search of a free one.
    #[cfg(test)]
    looks: u64,
}

impl<P> Lender<P> {
    /// With `count` slots; `mark` is 0 or [`MARK`].
    pub(crate) fn new(count: u32, mark: u64) -> Self {
        // Each table counts from elsewhere, so that tickets of one open nothing in another. Not
        // loom's: this is no part of what is shared.
        static TABLES: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let table = TABLES.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let first = table.wrapping_mul(0x9e37_79b1 << u32::BITS) | mark | TICKET;
        let slots = Slots { slots: Masked::new(count), len: count };
        for beyond in count..slots.slots.len() {
            slots.slots.at(beyond).state.store(TAKEN, Ordering::Relaxed);
        }
        Lender {
            slots,
            next: first,
            told: first,
            in_turn: true,
            #[cfg(test)]
            looks: 0,
        }
    }

    /// For a queue that does not complete in the order in which it was posted to.
    pub(crate) fn out_of_turn(self) -> Self {
        Lender { in_turn: false, ..self }
    }

    /// What settles what is lent here.
    pub(crate) fn slots(&self) -> &Slots<P> {
        &self.slots
    }

    /// How many more can be lent. Takes back what the device does not know of, and looks at each.
    pub(crate) fn room(&mut self) -> usize {
        self.take_back();
        self.slots.all().filter(|slot| slot.is_free()).count()
    }

    /// A slot that is free, if there is one.
    #[inline(always)]
    pub(crate) fn vacancy(&mut self) -> Option<Vacancy<'_, P>> {
        // Acquire pairs with the Release of `settle`.
        let free = self.slots.slot(self.next).state.load(Ordering::Acquire) == FREE;
        (free || self.skip()).then_some(Vacancy { lender: self })
    }

    /// Moves on to a slot that is free; whether there is one. Those between lose their turn. They are
    /// never lent, or somebody took their payload and forgot it; where slots come back in turn, the
    /// first that is lent tells that all others are.
    #[cold]
    #[inline(never)]
    fn skip(&mut self) -> bool {
        for distance in 0..u64::from(self.slots.slots.len()) {
            #[cfg(test)]
            (self.looks += 1);
            let ticket = self.next.wrapping_add(distance * NEXT);
            // Acquire as in `vacancy`.
            let state = self.slots.slot(ticket).state.load(Ordering::Acquire);
            if state == FREE {
                self.next = ticket;
                return true;
            }
            if self.in_turn && state & TICKET != 0 {
                return false;
            }
        }
        false
    }

    /// Whether something is lent that the device does not know of.
    #[inline(always)]
    pub(crate) fn is_holding(&self) -> bool {
        self.told != self.next
    }

    /// The device knows of everything that is lent.
    #[inline(always)]
    pub(crate) fn hand_over(&mut self) {
        self.told = self.next;
    }

    /// Takes back, and drops, what the device does not know of.
    #[cold]
    pub(crate) fn take_back(&mut self) {
        while self.is_holding() {
            // First: what is dropped may unwind.
            self.next = self.next.wrapping_sub(NEXT);
            // Slots that were skipped are lent under other tickets, or not at all.
            drop(self.slots.slot(self.next).settle(self.next));
        }
    }
}

/// A free slot, that what is to be lent may be told its ticket before.
pub(crate) struct Vacancy<'l, P> {
    /// Its next slot is free.
    lender: &'l mut Lender<P>,
}

impl<P> Vacancy<'_, P> {
    /// Under which what is lent here will be settled.
    #[inline(always)]
    pub(crate) fn ticket(&self) -> u64 {
        self.lender.next
    }

    /// Takes `payload` in.
    #[inline(always)]
    pub(crate) fn lend(self, payload: P) {
        let Lender { slots, next, .. } = self.lender;
        let slot = slots.slot(*next);
        // SAFETY: the slot is free, which only the lender changes, and what `settle` did to it is
        // known by the Acquire of `vacancy`.
        unsafe { slot.payload.put(MaybeUninit::new(payload)) };
        // Release pairs with the Acquire of `settle`.
        slot.state.store(*next, Ordering::Release);
        *next = next.wrapping_add(NEXT);
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

#[cfg(test)]
impl<P> Slots<P> {
    fn give(&self, ticket: u64) -> Option<P> {
        self.settle(ticket).map(Settling::take)
    }
}

#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, not(loom)))]
mod tests;
