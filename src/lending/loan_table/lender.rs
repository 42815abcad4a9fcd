//! The lender's side of a loan table: which slot is lent next, and how the lender takes back loans of
//! requests that were never posted.
//!
//! Pairs with [`LoanTable`], by which the poller of the completion queue takes back.
//!
//! Slots are lent in a circle, because most queues complete in order: if the next slot is still lent, all
//! slots are. A shared receive queue completes in about that order, and its lender skips slots that are still
//! lent: those of messages that are only partly received, of completions that were not polled, and of
//! receives that a queue pair had consumed when it was dropped.

use super::{
    COVERS, FLAG_BITS, FREE, LoanSlot, LoanTable, NOT_LENT, SCOPED, STEP, TAKEN, UNSIGNALED,
};
use super::{SETTLES_ALONE, WrIds};
use crate::lending::compact_enum::CompactEnum;
use crate::sync::Ordering;
use std::fmt;
use std::mem::MaybeUninit;

/// The owner of a queue, who lends in its table.
pub(crate) struct Lender<P> {
    table: LoanTable<P>,
    next: NextLoan,
}

/// The place of the next loan.
struct NextLoan {
    /// The `wr_id` after the last one that was posted. It has [`COVERS`] while there may be unsignaled loans
    /// that no signaled one follows.
    wr_id: u64,
    /// Unsignaled loans since the last signaled one; may be too large.
    unsignaled: u32,
    /// Whether loans come back in the order in which they were lent.
    in_order: bool,
    /// How many slots were examined in search of a free one.
    #[cfg(test)]
    looks: u64,
}

impl NextLoan {
    /// Whether the loan before `wr_id` is a signaled one, which covers all unsignaled loans before it.
    fn follows_signaled<P>(table: &LoanTable<P>, wr_id: u64) -> bool {
        let last = wr_id.wrapping_sub(STEP);
        let state = table.slot(last).state.load(Ordering::Relaxed);
        // `false` if the poller has taken it back already: it could have been an unsignaled one that failed.
        state & (NOT_LENT | UNSIGNALED) == 0 && (state ^ last) >> FLAG_BITS == 0
    }

    /// All loans were posted: if the last one is signaled, the next need not cover any.
    #[cold]
    #[inline(never)]
    fn uncover<P>(&mut self, table: &LoanTable<P>) {
        if Self::follows_signaled(table, self.wr_id) {
            self.wr_id &= !COVERS;
            self.unsignaled = 0;
        }
    }

    /// Loans were taken back unposted. The signaled one that was to cover posted unsignaled ones may be among
    /// them, so the next one must be signaled.
    fn undo(&mut self) {
        if self.wr_id & COVERS != 0 {
            self.unsignaled = u32::MAX;
        }
    }

    /// The first `wr_id` from `first` on whose slot is free. It skips slots that are never lent, or whose
    /// payload is being taken out, and in a queue that completes in any order slots that are lent. In one
    /// that completes in order, a slot that is lent means that all others are. The first loan of a forgotten
    /// batch that this meets makes it take back all of them, so none is left before the result.
    #[cold]
    #[inline(never)]
    fn skip<P>(&mut self, table: &LoanTable<P>, first: u64) -> Option<u64> {
        let mut wr_id = first;
        for _ in 0..table.len {
            #[cfg(test)]
            (self.looks += 1);
            wr_id = table.lendable(wr_id);
            let slot = table.slot(wr_id);
            // Acquire as in `find_free`.
            let mut state = slot.state.load(Ordering::Acquire);
            if LoanTable::<P>::is_unposted(state, first) {
                // Before the program's destructors, which may panic.
                self.undo();
                table.drop_unposted(first);
                state = slot.state.load(Ordering::Acquire);
            }
            if state == FREE {
                return Some(wr_id);
            }
            if self.in_order && state & NOT_LENT == 0 {
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
        // Each table's counts begin elsewhere, so that a `wr_id` of one table takes nothing back from
        // another. Not loom's atomic, because the threads of a model do not share it.
        static TABLES: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let table = TABLES.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let wr_id = table.wrapping_mul(0x9e37_79b1 << u32::BITS) | flag;
        Lender {
            table: LoanTable::new(count),
            next: NextLoan {
                wr_id,
                unsignaled: 0,
                in_order: true,
                #[cfg(test)]
                looks: 0,
            },
        }
    }

    /// A lender some of whose loans [settle alone](SETTLES_ALONE).
    pub(crate) fn with_loans_settling_alone(mut self, may_settle_alone: bool) -> Self {
        self.table.may_settle_alone = may_settle_alone;
        self
    }

    /// A lender for a queue that does not complete in the order of its requests.
    pub(crate) fn in_any_order(self) -> Self {
        Lender { next: NextLoan { in_order: false, ..self.next }, ..self }
    }

    /// The table, for the poller.
    pub(crate) fn table(&self) -> &LoanTable<P> {
        &self.table
    }

    /// Takes back and drops the loans of batches that were [forgotten](LoanBatch) (`mem::forget`).
    #[cold]
    #[inline(never)]
    pub(crate) fn drop_unposted(&mut self) {
        // Before the program's destructors, which may panic.
        self.next.undo();
        self.table.drop_unposted(self.next.wr_id);
    }

    /// As [`drop_unposted`](Self::drop_unposted), but adds the loans to `to`, where nothing drops them.
    pub(crate) fn take_unposted(&mut self, to: &mut Vec<P>) {
        self.next.undo();
        to.extend(self.table.take_unposted(self.next.wr_id));
    }

    /// How many slots are free. Takes back the loans of forgotten batches, and examines each slot.
    pub(crate) fn room(&mut self) -> usize {
        self.drop_unposted();
        self.table.lendable_slots().filter(|slot| slot.is_free()).count()
    }

    /// Starts a batch of loans.
    #[inline(always)]
    pub(crate) fn begin(&mut self) -> LoanBatch<'_, P> {
        LoanBatch { lender: self, ahead: 0 }
    }
}

/// Loans of requests that are not posted yet. Dropping the batch takes them back. If the batch is forgotten
/// (`mem::forget`), a later one takes them back, at the latest when it needs one of their slots.
pub(crate) struct LoanBatch<'l, P> {
    lender: &'l mut Lender<P>,
    /// The difference between the `wr_id` of the next loan and the lender's.
    ahead: u64,
}

impl<P> LoanBatch<'_, P> {
    /// A free slot; if there is none, how many slots the table has.
    #[inline(always)]
    pub(crate) fn free_slot(&mut self) -> Result<FreeSlot<'_, P>, usize> {
        self.find_free::<true>()
    }

    /// The same, and none if a slot had to be skipped between two loans of the batch.
    #[inline(always)]
    pub(crate) fn next_slot(&mut self) -> Result<FreeSlot<'_, P>, usize> {
        self.find_free::<false>()
    }

    #[inline(always)]
    fn find_free<const SKIPS: bool>(&mut self) -> Result<FreeSlot<'_, P>, usize> {
        let LoanBatch { lender, ahead } = self;
        let Lender { table, next } = &mut **lender;
        let table: &LoanTable<P> = table;
        let mut wr_id = next.wr_id.wrapping_add(*ahead);
        let mut slot = table.slot(wr_id);
        // Acquire pairs with the Release of `LoanSlot::release`.
        if slot.state.load(Ordering::Acquire) != FREE {
            if !SKIPS && *ahead != 0 {
                return Err(table.len());
            }
            wr_id = next.skip(table, wr_id).ok_or_else(|| table.len())?;
            slot = table.slot(wr_id);
            if *ahead == 0 {
                // In a batch of one, the compiler then knows `ahead`.
                next.wr_id = wr_id;
            } else {
                *ahead = wr_id.wrapping_sub(next.wr_id);
            }
        }
        Ok(FreeSlot { table, slot, wr_id, next, ahead })
    }

    /// The `wr_id`s of the loans, if all slots are [next](Self::next_slot) to each other.
    #[inline(always)]
    pub(crate) fn wr_ids(&self) -> WrIds {
        let first = self.lender.next.wr_id;
        WrIds { first, end: first.wrapping_add(self.ahead) }
    }

    /// The number of loans if it is 0 or 1; otherwise at least 2, because slots that were skipped between loans
    /// are counted.
    #[inline(always)]
    pub(crate) fn count(&self) -> u64 {
        self.ahead / STEP
    }

    /// The `wr_id` of the last loan.
    #[inline(always)]
    pub(crate) fn last(&self) -> u64 {
        self.lender.next.wr_id.wrapping_add(self.ahead).wrapping_sub(STEP)
    }

    /// The `wr_id` of the only loan.
    #[inline(always)]
    pub(crate) fn only(&self) -> u64 {
        debug_assert_eq!(self.ahead, STEP, "one loan");
        self.lender.next.wr_id
    }

    /// As [`commit`](Self::commit), of a batch of one. The compiler does not know `ahead` if the WQE may have been
    /// written out of line: 8 instructions.
    #[inline(always)]
    pub(crate) fn commit_one(mut self) {
        debug_assert_eq!(self.ahead, STEP, "one loan");
        self.ahead = STEP;
        self.commit();
    }

    /// The requests of the batch were posted: keeps its loans.
    #[inline(always)]
    pub(crate) fn commit(mut self) {
        self.keep();
        let Lender { table, next } = &mut *self.lender;
        if next.wr_id & COVERS != 0 {
            next.uncover(table);
        }
    }

    /// As [`commit`](Self::commit), for receives, none of which is unsignaled.
    #[inline(always)]
    pub(crate) fn commit_recvs(mut self) {
        self.keep();
    }

    #[inline(always)]
    fn keep(&mut self) {
        let next = &mut self.lender.next;
        next.wr_id = next.wr_id.wrapping_add(self.ahead);
        self.ahead = 0;
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
    table: &'l LoanTable<P>,
    /// In state `FREE`, which only the lender changes.
    slot: &'l LoanSlot<P>,
    wr_id: u64,
    next: &'l mut NextLoan,
    /// [`LoanBatch::ahead`].
    ahead: &'l mut u64,
}

impl<'l, P> FreeSlot<'l, P> {
    /// The `wr_id` for the request; its completion names the loan by it.
    #[inline(always)]
    pub(crate) fn wr_id(&self) -> u64 {
        self.wr_id
    }

    /// The slot for a request of a [scope](SCOPED).
    pub(crate) fn scoped(self) -> Self {
        FreeSlot { wr_id: self.wr_id | SCOPED, ..self }
    }

    /// The slot for a send that [settles alone](SETTLES_ALONE).
    #[inline(always)]
    pub(crate) fn settling_alone(self) -> Self {
        debug_assert!(self.table.may_settle_alone, "its completion would not be found");
        FreeSlot { wr_id: self.wr_id | SETTLES_ALONE, ..self }
    }

    /// The slot for an [unsignaled](UNSIGNALED) request. `Err` if the request has to be signaled, which at
    /// least one request in half a queue is: a queue full of unsignaled requests would never have room again.
    pub(crate) fn unsignaled(self) -> Result<UnsignaledSlot<'l, P>, Self> {
        let mut wr_id = self.wr_id | UNSIGNALED;
        if wr_id & COVERS != 0 && NextLoan::follows_signaled(self.table, wr_id) {
            // This request is the first after a signaled one.
            wr_id &= !COVERS;
            self.next.unsignaled = 0;
        }
        if self.next.unsignaled < self.table.len.div_ceil(2).saturating_sub(1) {
            Ok(UnsignaledSlot(FreeSlot { wr_id, ..self }))
        } else {
            Err(self)
        }
    }

    /// Lends `payload`.
    #[inline(always)]
    pub(crate) fn lend(self, payload: P) {
        // SAFETY: the slot is free, and the Acquire of `find_free` orders this after what the last
        // `release` read.
        unsafe { self.slot.payload.write(MaybeUninit::new(payload)) };
        // Release pairs with the Acquire of `LoanSlot::take_back`, and puts the program's loads of the memory
        // before the doorbell, which `udma_to_device` does not.
        self.slot.state.store(self.wr_id, Ordering::Release);
        *self.ahead = self.ahead.wrapping_add(STEP);
    }
}

/// A free slot for an unsignaled request.
pub(crate) struct UnsignaledSlot<'l, P>(FreeSlot<'l, P>);

impl<P> UnsignaledSlot<'_, P> {
    /// The `wr_id` for the request.
    pub(crate) fn wr_id(&self) -> u64 {
        self.0.wr_id
    }

    /// Lends `payload`. The loans that follow cover this one, until a signaled one of them was posted.
    pub(crate) fn lend(self, payload: P) {
        self.0.next.wr_id |= COVERS;
        self.0.next.unsignaled = self.0.next.unsignaled.saturating_add(1);
        self.0.lend(payload);
    }
}

impl<'l, K, A, B> FreeSlot<'l, CompactEnum<K, A, B>> {
    /// Lends a small payload before its WQE is written, and writes only the words that it has. While the WQE is
    /// written, the compiler need not keep the payload in registers.
    #[inline(always)]
    pub(crate) fn fill(self, key: K, small: A) -> FilledSlot<'l, K, A, B> {
        let FreeSlot { table, slot, wr_id, next, ahead } = self;
        // SAFETY: as in `lend`.
        let place = unsafe { &mut *slot.payload.get() };
        CompactEnum::put_small(place, key, small);
        // Release as in `lend`.
        slot.state.store(wr_id, Ordering::Release);
        FilledSlot { table, next, ahead }
    }
}

/// A loan whose WQE is not written yet, so that nobody knows its `wr_id`.
pub(crate) struct FilledSlot<'l, K, A, B> {
    table: &'l LoanTable<CompactEnum<K, A, B>>,
    next: &'l NextLoan,
    /// [`LoanBatch::ahead`].
    ahead: &'l mut u64,
}

impl<K, A, B> FilledSlot<'_, K, A, B> {
    /// The WQE is written: keeps the loan.
    #[inline(always)]
    pub(crate) fn keep(self) {
        *self.ahead = self.ahead.wrapping_add(STEP);
    }

    /// The WQE could not be written: takes the payload back.
    #[inline(always)]
    pub(crate) fn undo(self) -> (K, A) {
        // `ahead` by value: the compiler then keeps it in a register where nothing fails.
        self.next.take_small(self.table, *self.ahead)
    }
}

impl NextLoan {
    /// Takes back the small payload that was lent `ahead` of `self.wr_id`, and whose WQE was not written.
    #[cold]
    #[inline(never)]
    fn take_small<K, A, B>(&self, table: &LoanTable<CompactEnum<K, A, B>>, ahead: u64) -> (K, A) {
        let wr_id = self.wr_id.wrapping_add(ahead);
        let slot = table.slot(wr_id);
        let order = Ordering::Acquire;
        loop {
            let state = slot.state_unless_held();
            // A small payload is neither scoped nor unsignaled.
            debug_assert_eq!(state & !SETTLES_ALONE, wr_id, "not the last loan");
            // Acquire pairs with the Release of a driver that ends, which may hold the slot, and change the payload.
            if slot.state.compare_exchange(state, TAKEN, order, Ordering::Relaxed).is_ok() {
                break;
            }
        }
        let small = slot.payload.get().cast_const().cast();
        // SAFETY: `fill` wrote the payload, and nobody took it back: the request was not posted, so only its writer knew
        // the `wr_id`. The state was changed to `TAKEN` here, so nobody holds it.
        let small = unsafe { CompactEnum::<K, A, B>::take_small(small) };
        slot.state.store(FREE, Ordering::Release);
        small
    }
}

impl<P> fmt::Debug for Lender<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lender").field("table", &self.table).finish_non_exhaustive()
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
        let Ok(slot) = self.free_slot() else { return Err(payload) };
        let wr_id = slot.wr_id();
        slot.lend(payload);
        Ok(wr_id)
    }

    /// Lends for an unsignaled request, or for a signaled one if there has to be one.
    pub(super) fn hold_unsignaled(&mut self, payload: P) -> Result<u64, P> {
        let Ok(slot) = self.free_slot() else { return Err(payload) };
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
