//! The lender's side of a loan table: which slot is lent next, and how loans come back that the device
//! was never told of.
//!
//! Pairs with [`LoanTable`], by which the poller of the completion queue takes back.
//!
//! Slots are lent in a circle, because most queues complete in order. Where the next slot is still lent,
//! all are. A shared receive queue completes in about that order; the lender skips slots that are still
//! lent: those of messages that are only partly received, of completions that were not polled, and of
//! receives that a queue pair took along when it was dropped.

use super::{COVERS, FLAG_BITS, FREE, LoanSlot, LoanTable, SCOPED, STATE, STEP, UNSIGNALED};
use crate::memory::compact_enum::CompactEnum;
use crate::memory::sync::Ordering;
use std::fmt;
use std::mem::MaybeUninit;

/// The owner of a queue, who lends in its table.
pub(crate) struct Lender<P> {
    slots: LoanTable<P>,
    next: NextLoan,
}

/// What the next loan depends on.
struct NextLoan {
    /// The `wr_id` after the last that the device was told of. It has [`COVERS`] while there may be
    /// unsignaled loans that no signaled one follows.
    wr_id: u64,
    /// Unsignaled loans since the last signaled one, or more.
    unsignaled: u32,
    /// Whether loans come back in the order in which they were lent.
    in_order: bool,
    /// How many slots were looked at in search of a free one.
    #[cfg(test)]
    looks: u64,
}

impl NextLoan {
    /// If the loan before `wr_id` is a signaled one, it covers all unsignaled loans before it.
    fn follows_signaled<P>(slots: &LoanTable<P>, wr_id: u64) -> bool {
        let last = wr_id.wrapping_sub(STEP);
        let state = slots.slot(last).state.load(Ordering::Relaxed);
        // Not if the poller has taken it back already: it could have been an unsignaled one that failed.
        state & (STATE | UNSIGNALED) == 0 && (state ^ last) >> FLAG_BITS == 0
    }

    /// The device was told of all loans: if the last is signaled, the next need not cover any.
    #[cold]
    #[inline(never)]
    fn uncover<P>(&mut self, slots: &LoanTable<P>) {
        if Self::follows_signaled(slots, self.wr_id) {
            self.wr_id &= !COVERS;
            self.unsignaled = 0;
        }
    }

    /// Loans came back because the device was not told of them. The signaled one that was to follow
    /// unsignaled ones may be among them: the next one is signaled.
    fn undo(&mut self) {
        if self.wr_id & COVERS != 0 {
            self.unsignaled = u32::MAX;
        }
    }

    /// The first `wr_id` from `first` on whose slot is free. The slots between are skipped: they are
    /// never lent, or their payload is being taken out. In a queue that completes in order, the first
    /// slot that is lent tells that all others are. Loans of forgotten batches are taken back as soon as
    /// one of them is met, so none is left before the `wr_id` that is answered.
    #[cold]
    #[inline(never)]
    fn skip<P>(&mut self, slots: &LoanTable<P>, first: u64) -> Option<u64> {
        let mut wr_id = first;
        for _ in 0..slots.len {
            #[cfg(test)]
            (self.looks += 1);
            wr_id = slots.lendable(wr_id);
            let slot = slots.slot(wr_id);
            // Acquire as in `free_slot`.
            let mut state = slot.state.load(Ordering::Acquire);
            if slots.is_unposted(state, first) {
                slots.drop_unposted(first);
                self.undo();
                state = slot.state.load(Ordering::Acquire);
            }
            if state == FREE {
                return Some(wr_id);
            }
            if self.in_order && state & STATE == 0 {
                return None;
            }
            wr_id = wr_id.wrapping_add(STEP);
        }
        None
    }
}

impl<P> Lender<P> {
    /// A lender of `count` slots; `flag` is 0 or [`RECV`](super::RECV).
    pub(crate) fn new(count: u32, flag: u64) -> Self {
        // Each table begins to count elsewhere, so that a `wr_id` of one table takes nothing back from
        // another. Not loom's, because the threads of a model do not share it.
        static TABLES: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let table = TABLES.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let wr_id = table.wrapping_mul(0x9e37_79b1 << u32::BITS) | flag;
        Lender {
            slots: LoanTable::new(count),
            next: NextLoan {
                wr_id,
                unsignaled: 0,
                in_order: true,
                #[cfg(test)]
                looks: 0,
            },
        }
    }

    /// The same for a queue that does not complete in the order of its requests.
    pub(crate) fn in_any_order(self) -> Self {
        Lender { next: NextLoan { in_order: false, ..self.next }, ..self }
    }

    /// The table, for the poller.
    pub(crate) fn slots(&self) -> &LoanTable<P> {
        &self.slots
    }

    /// Takes back and drops the loans of batches that were [forgotten](LoanBatch).
    #[cold]
    #[inline(never)]
    pub(crate) fn drop_unposted(&mut self) {
        self.slots.drop_unposted(self.next.wr_id);
        self.next.undo();
    }

    /// How many slots are free. Takes back what was forgotten, and looks at each slot.
    pub(crate) fn room(&mut self) -> usize {
        self.drop_unposted();
        self.slots.lendable_slots().filter(|slot| slot.is_free()).count()
    }

    /// Starts a batch of loans.
    #[inline(always)]
    pub(crate) fn begin(&mut self) -> LoanBatch<'_, P> {
        LoanBatch { lender: self, ahead: 0 }
    }
}

/// Loans that the device was not told of yet. Dropping the batch takes them back. If the batch is
/// forgotten, a later one takes them back, at the latest when it needs one of their slots.
pub(crate) struct LoanBatch<'l, P> {
    lender: &'l mut Lender<P>,
    /// The difference between the `wr_id` of the next loan and the lender's.
    ahead: u64,
}

impl<P> LoanBatch<'_, P> {
    /// A free slot, if there is one.
    #[inline(always)]
    pub(crate) fn free_slot(&mut self) -> Option<FreeSlot<'_, P>> {
        let LoanBatch { lender, ahead } = self;
        let Lender { slots, next } = &mut **lender;
        let slots: &LoanTable<P> = slots;
        let mut wr_id = next.wr_id.wrapping_add(*ahead);
        let mut slot = slots.slot(wr_id);
        // Acquire pairs with the Release of `LoanSlot::release`.
        if slot.state.load(Ordering::Acquire) != FREE {
            wr_id = next.skip(slots, wr_id)?;
            slot = slots.slot(wr_id);
            if *ahead == 0 {
                // In a batch of one, the compiler then knows `ahead`.
                next.wr_id = wr_id;
            } else {
                *ahead = wr_id.wrapping_sub(next.wr_id);
            }
        }
        Some(FreeSlot { slots, slot, wr_id, next, ahead })
    }

    /// Whether the batch holds no loan (0), one (1), or more. Skipped slots between loans are counted.
    #[inline(always)]
    pub(crate) fn count(&self) -> u64 {
        self.ahead / STEP
    }

    /// The device was told of all loans of the batch.
    #[inline(always)]
    pub(crate) fn commit(mut self) {
        let Lender { slots, next } = &mut *self.lender;
        next.wr_id = next.wr_id.wrapping_add(self.ahead);
        self.ahead = 0;
        if next.wr_id & COVERS != 0 {
            next.uncover(slots);
        }
    }
}

impl<P> Drop for LoanBatch<'_, P> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.ahead != 0 {
            self.lender.drop_unposted();
        }
    }
}

/// A free slot, whose `wr_id` is known before anything is lent in it.
pub(crate) struct FreeSlot<'l, P> {
    slots: &'l LoanTable<P>,
    /// In state `FREE`, which only the lender changes.
    slot: &'l LoanSlot<P>,
    wr_id: u64,
    next: &'l mut NextLoan,
    /// The batch's.
    ahead: &'l mut u64,
}

impl<'l, P> FreeSlot<'l, P> {
    /// Names the loan, in the request and in its completion.
    #[inline(always)]
    pub(crate) fn wr_id(&self) -> u64 {
        self.wr_id
    }

    /// The same for a request of a [scope](SCOPED).
    pub(crate) fn scoped(self) -> Self {
        FreeSlot { wr_id: self.wr_id | SCOPED, ..self }
    }

    /// The same for an [unsignaled](UNSIGNALED) request. `Err` if the request has to be signaled: at least
    /// one in half a queue is, or a queue full of unsignaled requests would never have room again.
    pub(crate) fn unsignaled(self) -> Result<UnsignaledSlot<'l, P>, Self> {
        let mut wr_id = self.wr_id | UNSIGNALED;
        if wr_id & COVERS != 0 && NextLoan::follows_signaled(self.slots, wr_id) {
            // It is the first after a signaled one.
            wr_id &= !COVERS;
            self.next.unsignaled = 0;
        }
        if self.next.unsignaled < self.slots.len.div_ceil(2).saturating_sub(1) {
            Ok(UnsignaledSlot(FreeSlot { wr_id, ..self }))
        } else {
            Err(self)
        }
    }

    /// Lends `payload`.
    #[inline(always)]
    pub(crate) fn lend(self, payload: P) {
        // SAFETY: the slot is free, and the Acquire of `free_slot` orders this after what the last
        // `release` read.
        unsafe { self.slot.payload.put(MaybeUninit::new(payload)) };
        // Release pairs with the Acquire of `LoanSlot::take_back`.
        self.slot.state.store(self.wr_id, Ordering::Release);
        *self.ahead = self.ahead.wrapping_add(STEP);
    }
}

/// A free slot for an unsignaled request.
pub(crate) struct UnsignaledSlot<'l, P>(FreeSlot<'l, P>);

impl<P> UnsignaledSlot<'_, P> {
    /// Names the loan.
    pub(crate) fn wr_id(&self) -> u64 {
        self.0.wr_id
    }

    /// Lends `payload`. Later loans cover this one until the device was told of a signaled one.
    pub(crate) fn lend(self, payload: P) {
        self.0.next.wr_id |= COVERS;
        self.0.next.unsignaled = self.0.next.unsignaled.saturating_add(1);
        self.0.lend(payload);
    }
}

impl<'l, K, A, B> FreeSlot<'l, CompactEnum<K, A, B>> {
    /// Lends a small payload before its request is written, and writes only the words that it has. While
    /// the request is written, the compiler need not keep the payload in registers.
    #[inline(always)]
    pub(crate) fn fill(self, key: K, small: A) -> FilledSlot<'l, K, A, B> {
        let FreeSlot { slots, slot, wr_id, next, ahead } = self;
        // SAFETY: as in `lend`.
        let place = unsafe { &mut *slot.payload.place() };
        CompactEnum::put_small(place, key, small);
        // Release as in `lend`.
        slot.state.store(wr_id, Ordering::Release);
        FilledSlot { slots, next, ahead }
    }
}

/// A loan whose request is not written yet, so that nobody knows its `wr_id`.
pub(crate) struct FilledSlot<'l, K, A, B> {
    slots: &'l LoanTable<CompactEnum<K, A, B>>,
    next: &'l NextLoan,
    /// The batch's.
    ahead: &'l mut u64,
}

impl<K, A, B> FilledSlot<'_, K, A, B> {
    /// The request is written.
    #[inline(always)]
    pub(crate) fn keep(self) {
        *self.ahead = self.ahead.wrapping_add(STEP);
    }

    /// The request could not be written: takes the payload back.
    #[inline(always)]
    pub(crate) fn undo(self) -> (K, A) {
        // `ahead` by value: the compiler then keeps it in a register where nothing fails.
        self.next.take_small(self.slots, *self.ahead)
    }
}

impl NextLoan {
    /// Takes the small payload back that was lent this far ahead, and whose request was not written.
    #[cold]
    #[inline(never)]
    fn take_small<K, A, B>(&self, slots: &LoanTable<CompactEnum<K, A, B>>, ahead: u64) -> (K, A) {
        let wr_id = self.wr_id.wrapping_add(ahead);
        let slot = slots.slot(wr_id);
        let state = slot.state.load(Ordering::Relaxed);
        // A small payload is neither scoped nor unsignaled.
        debug_assert_eq!(state, wr_id, "not what was lent last");
        let small = slot.payload.place().cast_const().cast();
        // SAFETY: `fill` wrote it, and nobody took it back, because only the writer of the request, which
        // the device was not told of, knew its `wr_id`.
        let small = unsafe { CompactEnum::<K, A, B>::take_small(small) };
        slot.state.store(FREE, Ordering::Release);
        small
    }
}

impl<P> fmt::Debug for Lender<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lender").field("slots", &self.slots).finish_non_exhaustive()
    }
}

impl<P> fmt::Debug for LoanBatch<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoanBatch").finish_non_exhaustive()
    }
}

#[cfg(test)]
impl<P> Lender<P> {
    pub(super) fn lend(&mut self, payload: P) -> Result<u64, P> {
        let mut batch = self.begin();
        let wr_id = batch.hold(payload)?;
        batch.commit();
        Ok(wr_id)
    }
}

#[cfg(test)]
impl<P> LoanBatch<'_, P> {
    pub(super) fn hold(&mut self, payload: P) -> Result<u64, P> {
        let Some(slot) = self.free_slot() else { return Err(payload) };
        let wr_id = slot.wr_id();
        slot.lend(payload);
        Ok(wr_id)
    }

    /// Lends for an unsignaled request, or for a signaled one if there has to be one.
    pub(super) fn hold_unsignaled(&mut self, payload: P) -> Result<u64, P> {
        let Some(slot) = self.free_slot() else { return Err(payload) };
        match slot.unsignaled() {
            Ok(slot) => {
                let wr_id = slot.wr_id();
                slot.lend(payload);
                Ok(wr_id)
            }
            Err(slot) => {
                let wr_id = slot.wr_id();
                slot.lend(payload);
                Ok(wr_id)
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
