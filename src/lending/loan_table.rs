//! The loan table of a queue: memory goes in when a request is posted, and comes out once, when the
//! request has completed.
//!
//! The queue's owner lends, by the [lender]. The poller of the completion queue, perhaps another thread,
//! takes back. A loan is named by the `wr_id` that the device carries from the request to the
//! completion: a slot, a count, and flags. A `wr_id` that is forged, stale or shown twice takes nothing
//! back. Neither side locks or allocates. Model-checked with loom.
//!
//! The loan of a future has a third user: the future, which holds its slot for a moment to change the waker in it, and
//! later takes from it how the request ended. docs/ARCHITECTURE.md draws the bits of a `wr_id` and the states of a
//! slot.

pub(crate) mod lender;

use super::compact_enum::CompactEnum;
use crate::first_panic::FirstPanic;
use crate::sync::ring_array::ring_size;
use crate::sync::{AtomicU64, LoomCell, Ordering, spin_loop, yield_now};
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::NonNull;
use std::sync::Arc;

/// Set in the states of slots that are not lent, and clear in every `wr_id`.
const NOT_LENT: u64 = 1;
/// Set in every `wr_id` of a receive, and in no other: receives have a table of their own.
pub(crate) const RECV: u64 = 1 << 1;
/// Set in the `wr_id` of a request that a scope posted.
pub(crate) const SCOPED: u64 = 1 << 2;
/// Set in the `wr_id` of a request that completes without a completion of its own.
const UNSIGNALED: u64 = 1 << 3;
/// Set in the `wr_id` of a request that may follow unsignaled ones: its completion then completes them, too.
pub(crate) const COVERS: u64 = 1 << 4;
/// Set in the `wr_id` of a send or a write that succeeds without news for anybody: no task waits for it, and its
/// outcome is in the payload. Its completion settles the slot without a look at the payload, which takes 20
/// instructions less. The first holder of the slot clears the bit in the state, and then a task may wait.
pub(crate) const SETTLES_ALONE: u64 = 1 << 5;
/// The lowest bits of a `wr_id` are flags. The bits above them are a count, and the count modulo the size of
/// the table is the slot's index. A slot has 64 bytes, or a multiple: with six flag bits, the masked count is
/// the slot's offset in bytes, without a shift.
const FLAG_BITS: u32 = 6;
/// The difference between a `wr_id` and the next one.
const STEP: u64 = 1 << FLAG_BITS;

/// A run of `wr_id`s, without flags beside [`RECV`]: the loans follow each other in their table.
#[derive(Clone, Debug, Default)]
pub(crate) struct WrIds {
    first: u64,
    end: u64,
}

impl WrIds {
    #[inline(always)]
    pub(crate) fn one(wr_id: u64) -> WrIds {
        WrIds { first: wr_id, end: wr_id.wrapping_add(STEP) }
    }

    /// Appends others, if they are next, or this run is empty. Returns whether it did.
    #[inline(always)]
    pub(crate) fn append(&mut self, more: &WrIds) -> bool {
        if self.is_empty() {
            *self = more.clone();
        } else if self.end == more.first {
            self.end = more.end;
        } else {
            return false;
        }
        true
    }

    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.first == self.end
    }

    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        (self.end.wrapping_sub(self.first) / STEP) as usize
    }

    #[inline(always)]
    pub(crate) fn first(&self) -> Option<u64> {
        if self.is_empty() { None } else { Some(self.first) }
    }

    pub(crate) fn newest(&self) -> Option<u64> {
        if self.is_empty() { None } else { Some(self.end.wrapping_sub(STEP)) }
    }

    /// Removes the [first](Self::first) one, which is `wr_id`.
    #[inline(always)]
    pub(crate) fn remove_first(&mut self, wr_id: u64) {
        debug_assert_eq!(self.first(), Some(wr_id), "not the first one");
        self.first = wr_id.wrapping_add(STEP);
    }

    /// Splits at `wr_id`, which is in neither part afterwards; `None` if it is not in this run.
    pub(crate) fn split_off(&mut self, wr_id: u64) -> Option<WrIds> {
        let (at, length) = (wr_id.wrapping_sub(self.first), self.end.wrapping_sub(self.first));
        if at >= length || has_flags(at) {
            return None;
        }
        let behind = WrIds { first: wr_id.wrapping_add(STEP), end: self.end };
        self.end = wr_id;
        Some(behind)
    }
}

impl Iterator for WrIds {
    type Item = u64;

    #[inline(always)]
    fn next(&mut self) -> Option<u64> {
        let first = self.first()?;
        self.remove_first(first);
        Some(first)
    }
}

/// Whether any flag is set in `wr_id`.
#[inline(always)]
pub(crate) fn has_flags(wr_id: u64) -> bool {
    wr_id & (STEP - 1) != 0
}

/// The state of a slot that can be lent.
const FREE: u64 = NOT_LENT;
/// The state of a slot whose payload is being taken out, and of slots that are never lent.
const TAKEN: u64 = NOT_LENT | 1 << FLAG_BITS;
/// The state of a slot whose payload a future changes.
const HELD: u64 = NOT_LENT | 2 << FLAG_BITS;
/// Set beside the `wr_id` in the state of a slot whose request is over, and whose payload waits for the future.
const SETTLED: u64 = NOT_LENT | SETTLES_ALONE;

/// A slot, on cache lines of its own, because two threads may work in neighbouring slots.
#[derive(Debug)]
#[repr(C, align(64))]
struct LoanSlot<P> {
    /// The `wr_id` of the loan, with or without [`SETTLES_ALONE`], or a state above.
    state: AtomicU64,
    /// Initialised while the slot is lent, and until a taken payload is moved out.
    payload: LoomCell<MaybeUninit<P>>,
}

impl<P> LoanSlot<P> {
    /// Takes the loan `wr_id` back, if it is in this slot.
    #[inline(always)]
    fn take_back(&self, wr_id: u64) -> Option<ReturnedLoan<'_, P>> {
        // Acquire pairs with the Release of `FreeSlot::lend`. If two threads show the same `wr_id`, one
        // of them gets the loan.
        match self.state.compare_exchange(wr_id, TAKEN, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Some(ReturnedLoan { slot: self, wr_id, payload: PhantomData }),
            Err(HELD) => self.take_back_held(wr_id),
            Err(_) => None,
        }
    }

    /// As [`take_back`](Self::take_back), when the future is done with the slot.
    #[cold]
    #[inline(never)]
    fn take_back_held(&self, wr_id: u64) -> Option<ReturnedLoan<'_, P>> {
        for tries in 0.. {
            wait(tries);
            if self.state.load(Ordering::Relaxed) != HELD {
                break;
            }
        }
        self.take_back(wr_id)
    }

    /// Takes back the loan in whose state this was seen, also if a holder has cleared [`SETTLES_ALONE`] there since.
    #[cold]
    fn take_back_lent(&self, state: u64) -> Option<ReturnedLoan<'_, P>> {
        self.take_back(state).or_else(|| self.take_back(state & !SETTLES_ALONE))
    }

    /// Settles the loan `wr_id`, which has [`SETTLES_ALONE`], if it is in this slot and has it still.
    #[inline(always)]
    fn settle_alone(&self, wr_id: u64) -> bool {
        let settled = wr_id | SETTLED;
        // Release pairs with the Acquire of `take_settled`.
        self.state.compare_exchange(wr_id, settled, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Holds the loan that `state` is lent to, if it is in this slot.
    #[inline]
    fn hold(&self, state: u64) -> Option<HeldLoan<'_, P>> {
        // Acquire pairs with the Release of `lend`, and with that of another `HeldLoan`.
        self.state.compare_exchange(state, HELD, Ordering::Acquire, Ordering::Relaxed).ok()?;
        Some(HeldLoan { slot: self, wr_id: state & !SETTLES_ALONE, payload: PhantomData })
    }

    /// Takes the loan `wr_id`, if it is in this slot and settled.
    #[inline(always)]
    fn take_settled(&self, wr_id: u64) -> Option<ReturnedLoan<'_, P>> {
        let settled = wr_id | SETTLED;
        // Acquire pairs with the Release of `settle`.
        self.state.compare_exchange(settled, TAKEN, Ordering::Acquire, Ordering::Relaxed).ok()?;
        Some(ReturnedLoan { slot: self, wr_id, payload: PhantomData })
    }

    /// The loan `wr_id`, for the future that posted it.
    #[inline]
    fn claim(&self, wr_id: u64) -> Claim<'_, P> {
        for tries in 0.. {
            let state = self.state.load(Ordering::Relaxed);
            if state == wr_id | SETTLED {
                if let Some(loan) = self.take_settled(wr_id) {
                    return Claim::Settled(loan);
                }
            } else if state & !SETTLES_ALONE == wr_id {
                if let Some(loan) = self.hold(state) {
                    return Claim::Lent(loan);
                }
            } else if state == TAKEN || state == HELD {
                wait(tries);
            } else {
                break;
            }
        }
        Claim::Moved
    }

    /// Moves the payload out of a slot in state `TAKEN`, and frees the slot. Only the thread that set
    /// this state may call it, and once.
    #[inline(always)]
    fn release(&self) -> P {
        // SAFETY: the lender does not touch a slot that is not free.
        let payload = unsafe { self.payload.get().read() };
        // SAFETY: a slot is lent with its payload, and moving the payload out frees the slot.
        let payload = unsafe { payload.assume_init() };
        // Release pairs with the Acquire of `find_free`: the payload is moved out before the next is written.
        self.state.store(FREE, Ordering::Release);
        payload
    }

    /// Drops the payload of a slot in state `TAKEN`. Out of line: most callers take the payload out.
    #[cold]
    #[inline(never)]
    fn discard(&self) {
        drop(self.release());
    }

    /// Takes back whatever is lent in this slot.
    fn take_back_any(&self) -> Option<P> {
        let state = self.state.load(Ordering::Relaxed);
        if state & NOT_LENT == 0 {
            return self.take_back(state).map(ReturnedLoan::take);
        }
        self.take_any_settled().map(|(_, payload)| payload)
    }

    /// Takes whatever waits for its future in this slot.
    fn take_any_settled(&self) -> Option<(u64, P)> {
        let state = self.state.load(Ordering::Relaxed);
        if state & SETTLED != SETTLED {
            return None;
        }
        let wr_id = state & !SETTLED;
        Some((wr_id, self.take_settled(wr_id)?.take()))
    }

    /// The state, once nobody holds the slot: a driver that ends may hold it, too, which knows no `wr_id`.
    fn state_unless_held(&self) -> u64 {
        let mut tries = 0;
        loop {
            match self.state.load(Ordering::Relaxed) {
                HELD => wait(tries),
                state => return state,
            }
            tries += 1;
        }
    }

    fn is_free(&self) -> bool {
        self.state.load(Ordering::Relaxed) == FREE
    }
}

impl<P> Default for LoanSlot<P> {
    fn default() -> Self {
        LoanSlot { state: AtomicU64::new(FREE), payload: LoomCell::new(MaybeUninit::uninit()) }
    }
}

impl<P> Drop for LoanSlot<P> {
    fn drop(&mut self) {
        drop(self.take_back_any());
    }
}

/// A loan that was taken back, while its payload is still in the slot. The slot is free as soon as the
/// payload is moved out or dropped.
pub(crate) struct ReturnedLoan<'s, P> {
    /// In state `TAKEN`, with its payload.
    slot: &'s LoanSlot<P>,
    wr_id: u64,
    /// `get` shares the payload, so this is `Sync` only if the payload is.
    payload: PhantomData<P>,
}

/// The loan of a send that succeeded.
pub(crate) enum SentLoan<'s, P> {
    Returned(ReturnedLoan<'s, P>),
    /// It stays in its slot, for the future that posted it.
    Settled,
}

/// A loan, as the future finds it that posted it.
pub(crate) enum Claim<'s, P> {
    /// The request is not over.
    Lent(HeldLoan<'s, P>),
    /// The request is over, and its end is in the payload.
    Settled(ReturnedLoan<'s, P>),
    /// The request is over, and a poster that needed the slot took the payload away.
    Moved,
}

/// A loan whose payload a future changes while the request is in flight. The poller waits until this is dropped, so
/// that no code of the program may run meanwhile.
pub(crate) struct HeldLoan<'s, P> {
    /// In state `HELD`, with its payload.
    slot: &'s LoanSlot<P>,
    wr_id: u64,
    payload: PhantomData<P>,
}

impl<P> HeldLoan<'_, P> {
    /// The payload, to be changed.
    #[inline]
    pub(crate) fn get_mut(&mut self) -> &mut P {
        // SAFETY: only the thread that changed the state to `HELD` has this value, which is borrowed exclusively.
        let payload = unsafe { &mut *self.slot.payload.get() };
        // SAFETY: a loan that is held stays in its slot.
        unsafe { payload.assume_init_mut() }
    }
}

impl<P> Drop for HeldLoan<'_, P> {
    #[inline]
    fn drop(&mut self) {
        // Release pairs with the Acquire of `take_back` and `claim`.
        self.slot.state.store(self.wr_id, Ordering::Release);
    }
}

/// Lets the thread go on that has a slot; `tries` counts the calls. A caller that waits for a slot in `TAKEN` has no lock:
/// the driver, which has taken it, may wait for that. A thread that holds a slot waits for none.
#[cold]
pub(crate) fn wait(tries: u32) {
    // The other one is about ten instructions from its end, unless it was preempted.
    if tries < 64 { spin_loop() } else { yield_now() }
}

impl<P> ReturnedLoan<'_, P> {
    /// The payload.
    #[inline(always)]
    pub(crate) fn get(&self) -> &P {
        // SAFETY: only the thread that changed the state to `TAKEN` has this value.
        let payload = unsafe { &*self.slot.payload.get() };
        // SAFETY: the payload stays until `take`, which consumes this value.
        unsafe { payload.assume_init_ref() }
    }

    /// The payload, to be changed.
    #[inline(always)]
    pub(crate) fn get_mut(&mut self) -> &mut P {
        // SAFETY: as in `get`, and this is borrowed exclusively.
        let payload = unsafe { &mut *self.slot.payload.get() };
        // SAFETY: as in `get`.
        unsafe { payload.assume_init_mut() }
    }

    /// Moves the payload out.
    #[inline(always)]
    pub(crate) fn take(self) -> P {
        let slot = self.slot;
        std::mem::forget(self);
        slot.release()
    }

    /// Leaves the payload in the slot, where the future that has the `wr_id` [claims](LoanTable::claim) it.
    #[inline(always)]
    pub(crate) fn settle(self) {
        let (slot, wr_id) = (self.slot, self.wr_id);
        std::mem::forget(self);
        // Release pairs with the Acquire of `take_settled`.
        slot.state.store(wr_id | SETTLED, Ordering::Release);
    }
}

impl<'s, K, A, B> ReturnedLoan<'s, CompactEnum<K, A, B>> {
    /// Moves a small payload out, word by word; a large one stays.
    #[inline(always)]
    pub(crate) fn take_small(self) -> Result<(K, A), Self> {
        self.open_small().map(|(small, _emptied)| small)
    }

    /// The same; the slot is free when the second value is dropped.
    #[inline(always)]
    pub(crate) fn open_small(self) -> Result<((K, A), impl Drop + use<'s, K, A, B>), Self> {
        // SAFETY: the payload is initialised, and if it is read, the slot is freed without another look
        // at it.
        let small = unsafe { CompactEnum::read_small(self.get()) };
        let Some(small) = small else { return Err(self) };
        let slot = self.slot;
        std::mem::forget(self);
        Ok((small, EmptiedSlot(slot)))
    }
}

/// A slot whose payload was moved out.
struct EmptiedSlot<'s, P>(&'s LoanSlot<P>);

impl<P> Drop for EmptiedSlot<'_, P> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release as in `release`.
        self.0.state.store(FREE, Ordering::Release);
    }
}

impl<P> Drop for ReturnedLoan<'_, P> {
    #[inline(always)]
    fn drop(&mut self) {
        self.slot.discard();
    }
}

/// A slot outside of any table, for a payload that is moved out of its table before a visitor sees it.
#[derive(Debug)]
pub(crate) struct DetachedSlot<P>(LoanSlot<P>);

impl<P> DetachedSlot<P> {
    pub(crate) fn new() -> Self {
        DetachedSlot(LoanSlot::default())
    }

    /// `payload` as if it had been lent and taken back. A payload that is in the slot already, because the
    /// caller forgot (`mem::forget`) the earlier [`ReturnedLoan`], is leaked.
    pub(crate) fn put(&mut self, payload: P) -> ReturnedLoan<'_, P> {
        self.0.state.store(TAKEN, Ordering::Relaxed);
        // SAFETY: the slot is borrowed exclusively.
        unsafe { self.0.payload.write(MaybeUninit::new(payload)) };
        ReturnedLoan { slot: &self.0, wr_id: 0, payload: PhantomData }
    }
}

/// The table as lender and poller share it. Clones are the same table.
pub(crate) struct LoanTable<P> {
    /// The first slot.
    base: NonNull<LoanSlot<P>>,
    /// The bits of a `wr_id` that are the slot's index.
    index_mask: u64,
    slots: Arc<[LoanSlot<P>]>,
    len: u32,
    /// Whether loans may [settle alone](SETTLES_ALONE). Not where `wr_id`s come from a kernel, which could set the bit.
    may_settle_alone: bool,
}

impl<P> Clone for LoanTable<P> {
    fn clone(&self) -> Self {
        LoanTable {
            base: self.base,
            index_mask: self.index_mask,
            slots: self.slots.clone(),
            len: self.len,
            may_settle_alone: self.may_settle_alone,
        }
    }
}

// SAFETY: all access goes to `slots` by shared reference.
unsafe impl<P: Send> Send for LoanTable<P> {}
// SAFETY: as above.
unsafe impl<P: Send> Sync for LoanTable<P> {}
impl<P> UnwindSafe for LoanTable<P> {}
impl<P> RefUnwindSafe for LoanTable<P> {}

// SAFETY: one thread moves a payload in and another one moves it out; two never have it at a time.
unsafe impl<P: Send> Send for LoanSlot<P> {}
// SAFETY: `&LoanSlot` only moves payloads in and out, which needs `P: Send` and no more. `ReturnedLoan`,
// which shares one, is `Sync` only if `P` is.
unsafe impl<P: Send> Sync for LoanSlot<P> {}
// A payload is moved out whole before it is dropped, so a panic in a drop leaves no slot half taken.
impl<P> UnwindSafe for LoanSlot<P> {}
impl<P> RefUnwindSafe for LoanSlot<P> {}

impl<P> LoanTable<P> {
    /// A table that lends `count` slots, at most 2^31. Slots beyond `count`, up to a power of two, are never lent.
    fn new(count: u32) -> LoanTable<P> {
        let all = ring_size(count);
        let count = count.min(all);
        let slots: Arc<[LoanSlot<P>]> = (0..all).map(|_| LoanSlot::default()).collect();
        for beyond in slots.iter().skip(count as usize) {
            beyond.state.store(TAKEN, Ordering::Relaxed);
        }
        let index_mask = u64::from(all - 1) << FLAG_BITS;
        let base = NonNull::from(&*slots).cast();
        LoanTable { base, index_mask, slots, len: count, may_settle_alone: false }
    }

    /// How many slots can be lent at once.
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    /// A number that no other table has while this one is alive.
    pub(crate) fn key(&self) -> usize {
        self.base.addr().get()
    }

    /// Takes the loan `wr_id` back; `None` if there is no such loan, or no longer.
    #[inline(always)]
    pub(crate) fn take_back(&self, wr_id: u64) -> Option<ReturnedLoan<'_, P>> {
        // A forged `wr_id` with `NOT_LENT` could equal the state of a free or taken slot.
        if wr_id & NOT_LENT != 0 { None } else { self.slot(wr_id).take_back(wr_id) }
    }

    /// As [`take_back`](Self::take_back), with or without [`SETTLES_ALONE`] in the slot's state.
    #[cold]
    pub(crate) fn take_back_either(&self, wr_id: u64) -> Option<ReturnedLoan<'_, P>> {
        self.take_back(wr_id).or_else(|| self.take_back_watched(wr_id))
    }

    /// Takes back a loan that was to settle alone, and that a task has come to wait for.
    #[inline]
    fn take_back_watched(&self, wr_id: u64) -> Option<ReturnedLoan<'_, P>> {
        if self.may_settle_alone { self.take_back(wr_id & !SETTLES_ALONE) } else { None }
    }

    /// A send that succeeded: takes the loan `wr_id` back, or settles it if no task waits for it. `None` if there is no
    /// such loan, or it is scoped, unsignaled or covers unsignaled ones, too.
    #[inline(always)]
    pub(crate) fn take_back_sent(&self, wr_id: u64) -> Option<SentLoan<'_, P>> {
        if !has_flags(wr_id) {
            return self.take_back(wr_id).map(SentLoan::Returned);
        }
        if wr_id & (STEP - 1) != SETTLES_ALONE {
            return None;
        }
        if self.slot(wr_id).settle_alone(wr_id) {
            return Some(SentLoan::Settled);
        }
        self.take_back_watched(wr_id).map(SentLoan::Returned)
    }

    /// As [`take_back`](Self::take_back), but `None` also for a `wr_id` that is [scoped](SCOPED) or unsignaled,
    /// or [covers](COVERS) others.
    #[inline(always)]
    pub(crate) fn take_back_common(&self, wr_id: u64) -> Option<ReturnedLoan<'_, P>> {
        if wr_id & (NOT_LENT | SCOPED | UNSIGNALED | COVERS) != 0 {
            None
        } else {
            self.slot(wr_id).take_back(wr_id)
        }
    }

    /// The first of the unsignaled loans that the completion of the loan `wr_id` completes, which has
    /// [`COVERS`]; `wr_id` itself if there are none. `None` if `wr_id` is not lent: its completion is stale.
    #[cold]
    pub(crate) fn first_covered(&self, wr_id: u64) -> Option<u64> {
        if wr_id & NOT_LENT != 0 || self.slot(wr_id).state.load(Ordering::Relaxed) != wr_id {
            return None;
        }
        let (mut first, mut at) = (wr_id, wr_id);
        for _ in 1..self.slots.len() {
            at = at.wrapping_sub(STEP);
            let state = self.slot(at).state.load(Ordering::Relaxed);
            if state & NOT_LENT != 0 {
                // Not lent: this loan was taken back by its own completion, or the slot was skipped.
                continue;
            }
            if state & UNSIGNALED == 0 || (state ^ at) >> FLAG_BITS != 0 {
                break;
            }
            first = at;
            if state & COVERS == 0 {
                // This loan is the first after a signaled one.
                break;
            }
        }
        Some(first)
    }

    /// Takes back the first unsignaled loan from `at` on and before `end`, and advances `at` past it. `at` begins
    /// as what [`first_covered`](Self::first_covered) found for the loan `end`.
    #[cold]
    pub(crate) fn take_back_covered(&self, at: &mut u64, end: u64) -> Option<ReturnedLoan<'_, P>> {
        while *at != end {
            let slot = self.slot(*at);
            let state = slot.state.load(Ordering::Relaxed);
            let unsignaled =
                state & (NOT_LENT | UNSIGNALED) == UNSIGNALED && (state ^ *at) >> FLAG_BITS == 0;
            *at = at.wrapping_add(STEP);
            if unsignaled {
                if let Some(loan) = slot.take_back(state) {
                    return Some(loan);
                }
            }
        }
        None
    }

    /// The loan `wr_id`, for the future that posted it.
    #[inline]
    pub(crate) fn claim(&self, wr_id: u64) -> Claim<'_, P> {
        self.slot(wr_id).claim(wr_id)
    }

    /// The loan `wr_id`, if it is settled.
    #[inline(always)]
    pub(crate) fn take_settled(&self, wr_id: u64) -> Option<ReturnedLoan<'_, P>> {
        self.slot(wr_id).take_settled(wr_id)
    }

    /// Whether the loan `wr_id` is settled.
    #[inline(always)]
    pub(crate) fn is_settled(&self, wr_id: u64) -> bool {
        self.slot(wr_id).state.load(Ordering::Relaxed) == wr_id | SETTLED
    }

    /// Shows each payload whose request is in flight, to be changed. Runs no code of the program.
    pub(crate) fn each_lent(&self, mut visit: impl FnMut(&mut P)) {
        for slot in self.lendable_slots() {
            for tries in 0.. {
                let state = slot.state.load(Ordering::Relaxed);
                if state == HELD {
                    // A future may have stored its waker, and looked elsewhere before this call's reason was there.
                    wait(tries);
                } else if state & NOT_LENT != 0 {
                    break;
                } else if let Some(mut loan) = slot.hold(state) {
                    visit(loan.get_mut());
                    break;
                }
            }
        }
    }

    /// Takes the payloads that wait for their futures, with their `wr_id`s, which makes room for other loans. Returns
    /// whether other threads were taking payloads meanwhile: their slots are to be looked at again.
    #[cold]
    pub(crate) fn take_all_settled(&self, mut visit: impl FnMut(u64, P)) -> bool {
        let mut others = false;
        for slot in self.lendable_slots() {
            let state = slot.state.load(Ordering::Relaxed);
            if state & SETTLED == SETTLED {
                match slot.take_any_settled() {
                    Some((wr_id, payload)) => visit(wr_id, payload),
                    None => others = true,
                }
            } else {
                others |= state == TAKEN;
            }
        }
        others
    }

    /// How many requests are in flight.
    pub(crate) fn lent(&self) -> usize {
        let lent = |state: u64| state & NOT_LENT == 0 || state == HELD;
        self.lendable_slots().filter(|slot| lent(slot.state.load(Ordering::Relaxed))).count()
    }

    /// The slot of the count in `wr_id`, whatever is in it.
    #[inline(always)]
    fn slot(&self, wr_id: u64) -> &LoanSlot<P> {
        // The size of a slot is a multiple of its alignment, which is `STEP`.
        let offset = (wr_id & self.index_mask) as usize * (size_of::<LoanSlot<P>>() >> FLAG_BITS);
        // SAFETY: the masked count is less than the number of slots.
        let slot = unsafe { self.base.byte_add(offset) };
        // SAFETY: this is one of `slots`, which `self` holds and never borrows mutably.
        unsafe { slot.as_ref() }
    }

    /// The slots that can be lent.
    fn lendable_slots(&self) -> impl Iterator<Item = &LoanSlot<P>> {
        self.slots.iter().take(self.len as usize)
    }

    /// The first `wr_id`, from `wr_id` on, whose slot can be lent.
    fn lendable(&self, wr_id: u64) -> u64 {
        let at = wr_id & self.index_mask;
        let end = self.index_mask + STEP;
        if at >> FLAG_BITS < self.len.into() { wr_id } else { wr_id.wrapping_add(end - at) }
    }

    /// Whether a slot's state is the `wr_id` of a loan that was not posted; `next` is the first such `wr_id`.
    /// Counts wrap: half of them are ahead of `next`, and those of posted loans are behind it.
    fn is_unposted(state: u64, next: u64) -> bool {
        state & NOT_LENT == 0 && state.wrapping_sub(next & !COVERS) as i64 >= 0
    }

    /// Takes back the loans from `next` on, which were not posted.
    fn take_unposted(&self, next: u64) -> impl Iterator<Item = P> {
        self.lendable_slots().filter_map(move |slot| {
            let state = slot.state_unless_held();
            let unposted = Self::is_unposted(state, next);
            if unposted { slot.take_back_lent(state).map(ReturnedLoan::take) } else { None }
        })
    }

    /// Takes back and drops the loans from `next` on, which were not posted.
    #[cold]
    #[inline(never)]
    fn drop_unposted(&self, next: u64) {
        FirstPanic::drop_each(self.take_unposted(next));
    }

    /// Takes back everything that is lent in these tables, of each in the order in which it was lent. The caller
    /// knows that the device completes no more of these requests. If `visit` panics, the other loans are still
    /// visited, and the first panic is resumed afterwards.
    pub(crate) fn reclaim<'t>(
        tables: impl IntoIterator<Item = &'t LoanTable<P>>,
        mut visit: impl FnMut(P),
    ) where
        P: 't,
    {
        let mut visits = FirstPanic::default();
        for table in tables {
            let lent = |slot: &'t LoanSlot<P>| {
                let state = slot.state_unless_held();
                (state & NOT_LENT == 0).then_some((state, slot))
            };
            let mut loans: Vec<_> = table.lendable_slots().filter_map(lent).collect();
            // Counts wrap, and those that are lent at a time are near each other.
            let first = loans.first().map_or(0, |(wr_id, _)| *wr_id);
            loans.sort_unstable_by_key(|(wr_id, _)| wr_id.wrapping_sub(first) as i64);
            for (wr_id, slot) in loans {
                if let Some(loan) = slot.take_back_lent(wr_id) {
                    visits.catch(|| visit(loan.take()));
                }
            }
        }
        visits.resume();
    }
}

/// A table of any payload type, whose payloads are only to be dropped.
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
    fn take(&self, wr_id: u64) -> Option<P> {
        self.take_back(wr_id).map(ReturnedLoan::take)
    }
}

#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, not(loom)))]
mod tests;
