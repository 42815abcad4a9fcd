//! The requests in flight of one queue pair, as their futures and the driver share them: in the slot of its loan, each
//! request has its memory, the waker of its future, and later its end. Beside the slots are the futures that wait for
//! room in the queue, and why no more requests are posted. Model-checked with loom.
//!
//! The states of a slot are in [`loan_table`](crate::lending::loan_table). The fate in its tag:
//!
//! ```text
//!             post                         completion                       poll, drop
//!    (free) ---------> Pending(waker) -------------------> Sent, Over(outcome) ---------> (free)
//!       |                 ^  |                                  ^
//!       |     watch       |  | drop, or driver gone             |
//!       |  +--------------+  v            completion            |
//!       |  |    +-----> Abandoned --------------> (free)        |
//!       |  |    | drop               completion                 |
//!       +--+-- Unwatched, Sent ---------------------------------+
//!     post of a list or an inbox
//! ```
//!
//! A request of a list is not `Pending`, unless its end is the one that wakes the list. A send or a write of a list is
//! `Sent` while it is lent as well: its completion [settles its slot alone](crate::lending::loan_table::SETTLES_ALONE),
//! which says that it is over.
//!
//! The poster and the driver, which flag something for each other and then look, have a `SeqCst` fence in between: a
//! future that waits for room ([`Inflight::wait`], [`InflightTable::make_room`]); a request that is posted while its
//! queue breaks ([`Inflight::is_late`], [`Inflight::driver_gone`]).

use super::deferred::Deferred;
use super::locking::Locking;
use crate::error::Error;
use crate::first_panic::FirstPanic;
use crate::lending::compact_enum::Content;
use crate::lending::loan_table::{Claim, RECV, ReturnedLoan, wait};
use crate::number::Qpn;
use crate::owned::{
    Lent, Loans, Memory, Outcome, VisitedCompletion, memory_and_tag, open_buffer, tag_mut,
};
use crate::pd::Shared;
use crate::qp::{QpAttr, QpControl, QpState, WeakQpHandle};
use crate::sync::fork::Epoch;
use crate::sync::lock::AnyLock;
use crate::sync::{AtomicU32, AtomicUsize, Ordering, fence};
use crate::wc::{WcOpcode, WcStatus};
use std::collections::VecDeque;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::task::Waker;

/// Which queue of a queue pair a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Send,
    Recv,
}

impl Side {
    /// The bit of [`Inflight::flags`] that says that futures wait for room.
    fn waits(self) -> u32 {
        match self {
            Side::Send => 1,
            Side::Recv => 2,
        }
    }
}

/// Set in [`Inflight::flags`] when no more requests are posted.
const BROKEN: u32 = 4;
/// Set in [`Inflight::flags`] when nobody completes the requests any more.
const GONE: u32 = 8;

/// The tag of a request. In this order it is in the first cache line of its slot, but for an outcome.
#[derive(Debug)]
#[repr(C)]
pub(super) struct OpTag {
    /// The queue that the request was posted to.
    pub(super) queue: InflightKey,
    pub(super) fate: Fate,
}

/// How far a request is.
#[derive(Debug)]
pub(super) enum Fate {
    /// In flight, with the waker of its future.
    Pending(Waker),
    /// In flight, and its end wakes nobody, until a task watches it.
    Unwatched,
    /// In flight, and no future waits for it.
    Abandoned,
    /// A send or a write that succeeded, and its future was not polled since: of its completion the future needs no
    /// other field. One of a list has this fate while it is in flight, too: then its slot is not settled.
    Sent(WcOpcode),
    /// Any other request that is over, and its future was not polled since. The number says how many were over before
    /// it.
    Over(Outcome, u64),
}

impl Fate {
    /// How a request of queue pair `qpn` ended, if it is over.
    #[inline(always)]
    fn outcome(&self, qpn: Qpn) -> Option<Outcome> {
        match self {
            Fate::Sent(opcode) => Some(Outcome::new(WcStatus::SUCCESS, *opcode, qpn)),
            Fate::Over(outcome, _) => Some(*outcome),
            _ => None,
        }
    }
}

/// The key of a queue in an [`InflightTable`]: an index and a generation. The key of a removed queue finds nothing,
/// whatever takes its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InflightKey(u64);

impl InflightKey {
    fn new(index: u32, generation: u32) -> InflightKey {
        InflightKey(u64::from(generation) << u32::BITS | u64::from(index))
    }

    fn index(self) -> u32 {
        self.0 as u32
    }

    fn generation(self) -> u32 {
        (self.0 >> u32::BITS) as u32
    }
}

/// The requests in flight of the queues that complete to one completion queue.
#[derive(Debug)]
pub(super) struct InflightTable<S: Locking> {
    entries: Vec<(u32, Option<Arc<Inflight<S>>>)>,
    free: Vec<u32>,
    /// In how many queues futures wait for room.
    waiting: Arc<AtomicUsize>,
}

impl<S: Locking> Default for InflightTable<S> {
    fn default() -> Self {
        let waiting = Arc::new(AtomicUsize::new(0));
        InflightTable { entries: Vec::new(), free: Vec::new(), waiting }
    }
}

impl<S: Locking> InflightTable<S> {
    pub(super) fn insert(&mut self, inflight: Arc<Inflight<S>>) -> InflightKey {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push((0, None));
            (self.entries.len() - 1) as u32
        });
        let mut key = InflightKey::new(index, 0);
        if let Some((generation, entry)) = self.entries.get_mut(index as usize) {
            *entry = Some(inflight);
            key = InflightKey::new(index, *generation);
        }
        key
    }

    /// `None` if the queue was removed.
    #[inline]
    pub(super) fn find(&self, key: InflightKey) -> Option<&Inflight<S>> {
        match self.entries.get(key.index() as usize) {
            Some((generation, Some(inflight))) if *generation == key.generation() => Some(inflight),
            _ => None,
        }
    }

    /// Removes a queue; what is in flight has no future.
    pub(super) fn remove(&mut self, key: InflightKey) -> Option<Arc<Inflight<S>>> {
        let (generation, entry) = self.entries.get_mut(key.index() as usize)?;
        if *generation != key.generation() {
            return None;
        }
        let inflight = entry.take()?;
        // An entry whose generations are used up stays empty.
        if let Some(next) = generation.checked_add(1) {
            *generation = next;
            self.free.push(key.index());
        }
        Some(inflight)
    }

    /// The count of queues in which futures wait for room, for a queue that is to be inserted.
    pub(super) fn waiting(&self) -> Arc<AtomicUsize> {
        self.waiting.clone()
    }

    /// Whether futures wait for room in any queue. They may not be seen yet unless a fence is in front.
    #[inline]
    pub(super) fn anyone_waits(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) != 0
    }

    /// Requests were over: lets futures that wait for room try again, of the queues that `deferred` knows, or with
    /// `all` of any queue.
    #[inline]
    pub(super) fn make_room(&self, all: bool, deferred: &mut Deferred) {
        // Pairs with the fence of `wait`: either the future finds the room, or this call finds the future.
        fence(Ordering::SeqCst);
        if self.anyone_waits() {
            self.wake_waiters(all, deferred);
        }
    }

    #[cold]
    fn wake_waiters(&self, all: bool, deferred: &mut Deferred) {
        if all {
            self.iter().for_each(|inflight| inflight.wake_first_waiters(deferred));
        }
        deferred.each_with_room(|queue, deferred| {
            if let Some(inflight) = self.find(queue) {
                inflight.wake_first_waiters(deferred);
            }
        });
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<Inflight<S>>> {
        self.entries.iter().filter_map(|(_, inflight)| inflight.as_ref())
    }
}

/// Why requests are not posted any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Broken {
    /// A request failed, or the program aborted: the queue pair is in an error state.
    Failed(WcStatus),
    /// The driver has ended, and nobody polls.
    DriverGone,
    /// This process is a child of the one that created the queue.
    Forked,
}

#[derive(Default)]
struct State {
    sends: Waiters,
    recvs: Waiters,
    broken: Option<Broken>,
    /// Ends that their futures did not fetch before a poster needed their slots, by `wr_id`.
    moved: Vec<(u64, Lent<OpTag>)>,
}

impl State {
    fn waiters(&mut self, side: Side) -> &mut Waiters {
        match side {
            Side::Send => &mut self.sends,
            Side::Recv => &mut self.recvs,
        }
    }

    /// The flags that tell a poster that it has to look here.
    fn flags(&self) -> u32 {
        let waits = |waiters: &Waiters, side: Side| match waiters.queue.is_empty() {
            true => 0,
            false => side.waits(),
        };
        let broken = match self.broken {
            None => 0,
            Some(Broken::DriverGone) => BROKEN | GONE,
            Some(_) => BROKEN,
        };
        waits(&self.sends, Side::Send) | waits(&self.recvs, Side::Recv) | broken
    }

    /// Admits no request from now on, and wakes the futures that wait for room.
    fn break_with(&mut self, broken: Broken, deferred: &mut Deferred) {
        self.broken = Some(broken);
        for waker in self.sends.drain().chain(self.recvs.drain()) {
            deferred.wake(waker);
        }
    }
}

/// A future's turn.
pub(super) type Ticket = NonZeroU64;

/// The futures that wait for room in a queue, in the order in which they came. Each has a ticket, a number.
///
/// Cloning and dropping a waker runs code of the program, which may use the same queue. So nothing here
/// clones one, and a waker that is removed goes to the caller, who first releases the lock.
#[derive(Debug, Default)]
struct Waiters {
    /// By increasing ticket.
    queue: VecDeque<(Ticket, Waker)>,
    last_ticket: u64,
}

impl Waiters {
    /// Whether the waiter with `ticket` is the first; without a ticket, whether nobody waits.
    fn is_first(&self, ticket: Option<Ticket>) -> bool {
        match (self.queue.front(), ticket) {
            (None, _) => true,
            (Some((first, _)), Some(ticket)) => *first == ticket,
            (Some(_), None) => false,
        }
    }

    /// Appends a waiter, or replaces the waker of the one with this ticket; returns the old waker.
    fn enter(&mut self, ticket: &mut Option<Ticket>, waker: Waker) -> Option<Waker> {
        if let Some(ticket) = *ticket {
            if let Ok(at) = self.queue.binary_search_by_key(&ticket, |(other, _)| *other) {
                return self.queue.get_mut(at).map(|(_, old)| std::mem::replace(old, waker));
            }
        }
        self.last_ticket += 1;
        let new = NonZeroU64::new(self.last_ticket)?;
        *ticket = Some(new);
        self.queue.push_back((new, waker));
        None
    }

    /// Removes a waiter; returns its waker, and the waker of the next one if the waiter was the first.
    fn leave(&mut self, ticket: Ticket) -> [Option<Waker>; 2] {
        let at = self.queue.binary_search_by_key(&ticket, |(other, _)| *other).ok();
        let left = at.and_then(|at| self.queue.remove(at)).map(|(_, waker)| waker);
        [left, if at == Some(0) { self.take_first_waker() } else { None }]
    }

    /// Empties the queue.
    fn drain(&mut self) -> impl Iterator<Item = Waker> + '_ {
        self.queue.drain(..).map(|(_, waker)| waker)
    }

    /// Takes the waker of the first waiter, who stays the first. When woken, the waiter looks for room, and
    /// stores its waker again if there is none.
    fn take_first_waker(&mut self) -> Option<Waker> {
        self.queue.front_mut().map(|(_, waker)| take_waker(waker))
    }
}

/// Takes a waker that is to be called once, and leaves one that does nothing.
fn take_waker(waker: &mut Waker) -> Waker {
    std::mem::replace(waker, Waker::noop().clone())
}

/// The answer to a request that wants to be posted.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// It may be posted.
    Granted,
    /// It has to wait: others came first.
    Wait,
    Broken(Broken),
}

/// The state of a posted request, as its future finds it.
#[derive(Debug)]
pub(super) enum OpProgress {
    Pending,
    Over(Memory, Outcome),
    /// Nobody will see its completion.
    Lost(Broken),
}

/// Moves a queue pair to state [`ERR`](QpState::ERR), unless it is destroyed.
pub(super) fn flush(qp: Option<&WeakQpHandle>) -> crate::Result<()> {
    // Pairs with the fence of `is_late`: either the flush finds the receive, or its poster finds `broken`.
    fence(Ordering::SeqCst);
    match qp.and_then(WeakQpHandle::upgrade) {
        Some(qp) => QpControl { qp }.modify(&QpAttr::new().state(QpState::ERR)),
        None => Ok(()),
    }
}

/// Notes in its slot that a send or a write succeeded, and defers what runs code of the program.
#[inline(always)]
pub(super) fn complete_sent(
    loan: ReturnedLoan<'_, Lent<OpTag>>,
    opcode: WcOpcode,
    deferred: &mut Deferred,
) {
    settle(loan, Fate::Sent(opcode), deferred);
}

/// As [`complete_sent`], for any request. `over` is the number of such that were over before.
#[inline(always)]
pub(super) fn complete(done: VisitedCompletion<'_, OpTag>, over: u64, deferred: &mut Deferred) {
    let outcome = done.outcome();
    settle(done.into_loan(), Fate::Over(outcome, over), deferred);
}

#[inline(always)]
fn settle(mut loan: ReturnedLoan<'_, Lent<OpTag>>, end: Fate, deferred: &mut Deferred) {
    let Some(tag) = tag_mut(loan.get_mut()) else { return };
    match std::mem::replace(&mut tag.fate, end) {
        Fate::Pending(waker) => {
            loan.settle();
            deferred.wake(waker);
        }
        Fate::Abandoned => discard(loan, deferred),
        _ => loan.settle(),
    }
}

/// No future waits for the request.
#[cold]
#[inline(never)]
fn discard(loan: ReturnedLoan<'_, Lent<OpTag>>, deferred: &mut Deferred) {
    match open_buffer(loan) {
        Ok((buffer, _tag, _slot)) => deferred.drop_buffer(buffer),
        Err(loan) => {
            memory_and_tag(loan.take()).into_iter().for_each(|(memory, _)| deferred.drop(memory));
        }
    }
}

/// The requests in flight of one queue pair, or of one shared receive queue.
///
/// No code of the program runs under the lock, or while a slot is held: wakers are cloned before, and called and
/// dropped after.
pub(super) struct Inflight<S: Locking = Shared> {
    state: S::Lock<State>,
    /// [`State::flags`] as of the last change, for posters.
    flags: AtomicU32,
    /// The slots of sends and receives.
    loans: [Loans<OpTag>; 2],
    /// [`InflightTable::waiting`].
    waiting: Arc<AtomicUsize>,
    epoch: Epoch,
    /// The queue pair's number; of a shared receive queue 0.
    qpn: Qpn,
    /// The queue pair that is flushed when a request fails; `None` for a shared receive queue. Weak, because
    /// the completion queue's table keeps this value alive, and must not keep the queue pair alive.
    qp: Option<WeakQpHandle>,
    /// In place of the queue pair's receives in a model: see `model::Ring`.
    #[cfg(all(test, loom))]
    ring: model::Ring,
}

type StateGuard<'l, S> = <<S as Locking>::Lock<State> as AnyLock<State>>::Guard<'l>;

impl<S: Locking> Inflight<S> {
    pub(super) fn new(
        qp: Option<&QpControl>,
        loans: [Loans<OpTag>; 2],
        waiting: Arc<AtomicUsize>,
    ) -> Arc<Inflight<S>> {
        let (state, flags) = (S::Lock::new(State::default()), AtomicU32::new(0));
        let (qpn, epoch) = (qp.map_or(Qpn(0), QpControl::qpn), Epoch::current_or_none());
        let qp = qp.map(|control| control.qp.downgrade());
        Arc::new(Inflight {
            state,
            flags,
            loans,
            waiting,
            epoch,
            qpn,
            qp,
            #[cfg(all(test, loom))]
            ring: model::Ring::default(),
        })
    }

    /// `None` in a forked child, which has no request in flight.
    fn state(&self) -> Option<StateGuard<'_, S>> {
        self.state.lock()
    }

    /// Whether this process made the queue. In a forked child a slot may stay as a thread of the parent held it.
    #[inline]
    fn is_here(&self) -> bool {
        !self.epoch.is_over()
    }

    /// The slots among which that of `wr_id` is.
    #[inline]
    fn loans(&self, wr_id: u64) -> &Loans<OpTag> {
        let [send, recv] = &self.loans;
        if wr_id & RECV == 0 { send } else { recv }
    }

    /// The slots of one side.
    fn loans_of(&self, side: Side) -> &Loans<OpTag> {
        let [send, recv] = &self.loans;
        if side == Side::Send { send } else { recv }
    }

    /// Lets posters see what was changed.
    fn publish(&self, state: &State) {
        let (before, after) = (self.flags.load(Ordering::Relaxed), state.flags());
        self.flags.store(after, Ordering::Relaxed);
        let waits = |flags: u32| flags & (Side::Send.waits() | Side::Recv.waits()) != 0;
        match (waits(before), waits(after)) {
            (false, true) => _ = self.waiting.fetch_add(1, Ordering::Relaxed),
            (true, false) => _ = self.waiting.fetch_sub(1, Ordering::Relaxed),
            _ => {}
        }
    }

    /// Whether a request has to be [admitted](Self::admit) before it is posted.
    #[inline]
    pub(super) fn is_busy(&self, side: Side) -> bool {
        self.flags.load(Ordering::Relaxed) & (side.waits() | BROKEN) != 0
    }

    /// Admits a request to be posted, unless others wait for room.
    pub(super) fn admit(
        &self,
        side: Side,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
    ) -> Admission {
        let waker = waker.clone();
        let Some(mut state) = self.state() else { return Admission::Broken(Broken::Forked) };
        if let Some(broken) = state.broken {
            drop(state);
            return Admission::Broken(broken);
        }
        let waiters = state.waiters(side);
        if waiters.is_first(*ticket) {
            drop(state);
            return Admission::Granted;
        }
        let old = waiters.enter(ticket, waker);
        drop(state);
        drop(old);
        Admission::Wait
    }

    /// For a request that found its queue full: moves ends that their futures did not fetch, or lets it wait for room.
    /// Either way the caller tries to post once more. Returns whether the request waits; if it finds no room then, a
    /// later completion wakes it.
    ///
    /// Ends are looked for once more after the wait has begun, as a completion that came before woke nobody, and to
    /// fetch an end wakes nobody either. Then each slot is free, or has a request whose completion is to come.
    pub(super) fn make_or_await_room(
        &self,
        side: Side,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
    ) -> bool {
        if self.move_ends(side) {
            return false;
        }
        self.wait(side, ticket, waker);
        self.move_ends(side);
        true
    }

    /// Lets a request wait for room.
    fn wait(&self, side: Side, ticket: &mut Option<Ticket>, waker: &Waker) {
        let waker = waker.clone();
        let Some(mut state) = self.state() else { return };
        if state.broken.is_some() {
            // Those that wait were woken already. The next look finds why.
            drop(state);
            return waker.wake();
        }
        let old = state.waiters(side).enter(ticket, waker);
        self.publish(&state);
        drop(state);
        // Pairs with the fence of `make_room`.
        fence(Ordering::SeqCst);
        drop(old);
    }

    /// Stops waiting for room, because the request is posted or its future is dropped. The next waiter may
    /// find room, too.
    pub(super) fn leave(&self, side: Side, ticket: Option<Ticket>) {
        let Some(ticket) = ticket else { return };
        let Some(mut state) = self.state() else { return };
        let [left, next] = state.waiters(side).leave(ticket);
        self.publish(&state);
        drop(state);
        // A future's destructor comes here: a waker that panics while the thread unwinds must not abort the process.
        let mut calls = FirstPanic::default();
        calls.catch(|| next.into_iter().for_each(Waker::wake));
        calls.catch(|| drop(left));
        calls.resume();
    }

    /// Lets the first future of each side that waits for room try again.
    fn wake_first_waiters(&self, deferred: &mut Deferred) {
        let Some(mut state) = self.state() else { return };
        let first = [state.sends.take_first_waker(), state.recvs.take_first_waker()];
        first.into_iter().flatten().for_each(|waker| deferred.wake(waker));
    }

    /// Moves ends that their futures did not fetch out of the slots, and returns whether that made room. Otherwise a
    /// program that waits for one request before it looks at those posted earlier would wait for ever.
    #[cold]
    pub(super) fn move_ends(&self, side: Side) -> bool {
        let loans = self.loans_of(side);
        let mut moved = false;
        for tries in 0.. {
            let Some(mut state) = self.state() else { break };
            let before = state.moved.len();
            let others = loans.take_all_settled(|wr_id, lent| state.moved.push((wr_id, lent)));
            moved |= state.moved.len() > before;
            drop(state);
            if !others {
                break;
            }
            // The driver may have taken a loan of a request that failed, and wait for the lock.
            wait(tries);
        }
        moved
    }

    /// The end of a request that is not in its slot.
    #[cold]
    fn take_moved(&self, wr_id: u64) -> Option<Lent<OpTag>> {
        let mut state = self.state()?;
        let at = state.moved.iter().position(|(other, _)| *other == wr_id)?;
        Some(state.moved.swap_remove(at).1)
    }

    /// How many receives were over before this one; `None` while it is pending.
    fn order(&self, wr_id: u64) -> Option<u64> {
        let order = |lent: &mut Lent<OpTag>| match tag_mut(lent) {
            Some(OpTag { fate: Fate::Over(_, order), .. }) => *order,
            _ => u64::MAX,
        };
        match self.loans(wr_id).claim(wr_id) {
            Claim::Lent(_) => (self.flags.load(Ordering::Relaxed) & GONE != 0).then_some(u64::MAX),
            Claim::Settled(mut loan) => {
                let order = order(loan.get_mut());
                loan.settle();
                Some(order)
            }
            Claim::Moved => {
                let mut state = self.state()?;
                let moved = state.moved.iter_mut().find(|(other, _)| *other == wr_id);
                Some(moved.map_or(u64::MAX, |(_, lent)| order(lent)))
            }
        }
    }

    /// Which of these requests was over before the others. `None` while all of them are pending.
    pub(super) fn first_over(&self, wr_ids: impl Iterator<Item = u64> + Clone) -> Option<u64> {
        // In a forked child nothing is in flight, and the first future that is asked reports it.
        if !self.is_here() {
            return wr_ids.clone().next();
        }
        let find = || {
            let over = wr_ids.clone().filter_map(|wr_id| Some((self.order(wr_id)?, wr_id)));
            over.min_by_key(|(order, _)| *order).map(|(_, wr_id)| wr_id)
        };
        // Requests that were looked at may have ended before the one that was found. Having found it, this thread
        // sees the ends of all that were over before.
        find().and_then(|_| find())
    }

    /// Lets the end of a request wake this task. Returns whether the request is pending; if it is not, nobody
    /// is woken.
    pub(super) fn watch(&self, wr_id: u64, waker: &Waker) -> bool {
        if !self.is_here() {
            return false;
        }
        // A clone of the waker, made while the slot is not held, and only if the slot has another waker.
        let mut fresh = None;
        loop {
            let mut loan = match self.loans(wr_id).claim(wr_id) {
                Claim::Lent(loan) => loan,
                Claim::Settled(loan) => {
                    loan.settle();
                    return false;
                }
                Claim::Moved => return false,
            };
            // The slot is held: either `driver_gone` finds the waker in it, or this finds its flag.
            if self.flags.load(Ordering::Relaxed) & GONE != 0 {
                return false;
            }
            let fate = tag_mut(loan.get_mut()).map(|tag| &mut tag.fate);
            let Some(fate @ (Fate::Pending(_) | Fate::Unwatched | Fate::Sent(_))) = fate else {
                return false;
            };
            if matches!(fate, Fate::Pending(old) if old.will_wake(waker)) {
                return true;
            }
            let left = match fresh.take() {
                Some(new) => std::mem::replace(fate, Fate::Pending(new)),
                None => {
                    drop(loan);
                    fresh = Some(waker.clone());
                    continue;
                }
            };
            drop(loan);
            drop(left);
            return true;
        }
    }

    /// The slots among which that of `wr_id` is; `None` in a forked child.
    #[inline(always)]
    pub(super) fn loans_here(&self, wr_id: u64) -> Option<&Loans<OpTag>> {
        if self.is_here() { Some(self.loans(wr_id)) } else { None }
    }

    /// The loan of a request that is over, if it is in its slot.
    #[inline(always)]
    pub(super) fn take_settled(&self, wr_id: u64) -> Option<ReturnedLoan<'_, Lent<OpTag>>> {
        self.loans_here(wr_id)?.take_settled(wr_id)
    }

    /// Whether a request is over, and its end is in its slot.
    #[inline(always)]
    pub(super) fn is_settled(&self, wr_id: u64) -> bool {
        self.loans(wr_id).is_settled(wr_id)
    }

    /// Says how far a request is. Unless it is pending, its slot is freed, or is left to the device.
    pub(super) fn progress(&self, wr_id: u64, waker: &Waker) -> OpProgress {
        if !self.is_here() {
            return OpProgress::Lost(Broken::Forked);
        }
        if self.watch(wr_id, waker) {
            return OpProgress::Pending;
        }
        let lent = match self.loans(wr_id).claim(wr_id) {
            Claim::Settled(loan) => Some(loan.take()),
            // The driver is gone, and its completion will not be seen.
            Claim::Lent(mut loan) => {
                let left = tag_mut(loan.get_mut())
                    .map(|tag| std::mem::replace(&mut tag.fate, Fate::Abandoned));
                drop(loan);
                drop(left);
                None
            }
            Claim::Moved => self.take_moved(wr_id),
        };
        let end = lent.and_then(|lent| self.end_of(lent));
        end.map_or(OpProgress::Lost(Broken::DriverGone), |(memory, outcome)| {
            OpProgress::Over(memory, outcome)
        })
    }

    /// The outcome of a send of a buffer that succeeded.
    #[inline(always)]
    pub(super) fn sent_in(&self, loan: &ReturnedLoan<'_, Lent<OpTag>>) -> Option<Outcome> {
        match loan.get().get() {
            Content::Small(_, (_, OpTag { fate: Fate::Sent(opcode), .. })) => {
                Some(Outcome::new(WcStatus::SUCCESS, *opcode, self.qpn))
            }
            _ => None,
        }
    }

    /// How a request on a buffer ended, if it is over.
    #[inline(always)]
    pub(super) fn outcome_in(&self, loan: &ReturnedLoan<'_, Lent<OpTag>>) -> Option<Outcome> {
        match loan.get().get() {
            Content::Small(_, (_, tag)) => tag.fate.outcome(self.qpn),
            Content::Large(_) => None,
        }
    }

    /// The end of a request that is over; `None` for any other.
    pub(super) fn end_of(&self, lent: Lent<OpTag>) -> Option<(Memory, Outcome)> {
        let (memory, tag) = memory_and_tag(lent)?;
        Some((memory, tag.fate.outcome(self.qpn)?))
    }

    /// The future of a request was dropped. The memory stays lent until the request is over.
    pub(super) fn abandon(&self, wr_id: u64) {
        if !self.is_here() {
            return;
        }
        match self.loans(wr_id).claim(wr_id) {
            Claim::Lent(mut loan) => {
                let fate = tag_mut(loan.get_mut())
                    .map(|tag| std::mem::replace(&mut tag.fate, Fate::Abandoned));
                drop(loan);
                // With the slot released: dropping a waker runs code of the program. As in `leave`, it may panic.
                FirstPanic::of_one(|| drop(fate));
            }
            // Memory may be the program's, too.
            Claim::Settled(loan) => FirstPanic::of_one(|| drop(loan)),
            Claim::Moved => {
                let moved = self.take_moved(wr_id);
                FirstPanic::of_one(|| drop(moved));
            }
        }
    }

    /// A request failed: admits none from now on.
    #[cold]
    pub(super) fn fail(&self, status: WcStatus, deferred: &mut Deferred) {
        if self.qp.is_some() && self.refuse(status, deferred) {
            // The device moved the queue pair to ERR by itself. Moving it there once more makes rxe flush the
            // receives that were posted since.
            deferred.flush(self.qp.clone());
        }
    }

    /// Admits no request from now on. Returns whether some were admitted before.
    fn refuse(&self, status: WcStatus, deferred: &mut Deferred) -> bool {
        let Some(mut state) = self.state() else { return false };
        if state.broken.is_some() {
            return false;
        }
        state.break_with(Broken::Failed(status), deferred);
        self.publish(&state);
        true
    }

    /// Admits no request any more, and flushes those that are posted.
    pub(super) fn abort(&self) -> crate::Result<()> {
        let mut deferred = Deferred::default();
        if !self.is_here() {
            return Err(Error::forked("abort"));
        }
        self.refuse(WcStatus::WR_FLUSH_ERR, &mut deferred);
        // Only now that `broken` is set: a receive that is posted meanwhile sees it in `is_late`.
        let flushed = self.flush();
        deferred.run();
        flushed
    }

    pub(super) fn flush(&self) -> crate::Result<()> {
        let flushed = flush(self.qp.as_ref());
        #[cfg(all(test, loom))]
        self.ring.flush();
        flushed
    }

    /// A request was posted. Returns whether nobody will complete it. A receive whose queue pair broke after it was
    /// admitted has the queue pair moved to ERR again, because rxe flushes receives only then.
    #[inline]
    pub(super) fn is_late(&self, side: Side) -> bool {
        // Pairs with the fences of `flush` and `driver_gone`.
        fence(Ordering::SeqCst);
        let flags = self.flags.load(Ordering::Relaxed);
        flags & BROKEN != 0 && self.is_later_than(flags, side)
    }

    #[cold]
    fn is_later_than(&self, flags: u32, side: Side) -> bool {
        let gone = flags & GONE != 0;
        if side == Side::Recv && !gone {
            let _ = self.flush();
        }
        gone
    }

    /// The driver has ended: fails all futures.
    pub(super) fn driver_gone(&self, deferred: &mut Deferred) {
        let Some(mut state) = self.state() else { return };
        state.break_with(Broken::DriverGone, deferred);
        self.publish(&state);
        drop(state);
        // Pairs with the fence of `is_late`: either this call finds the request, or its poster finds the flag.
        fence(Ordering::SeqCst);
        for loans in &self.loans {
            loans.each_lent(|lent| {
                if let Some(OpTag { fate: Fate::Pending(waker), .. }) = tag_mut(lent) {
                    deferred.wake(take_waker(waker));
                }
            });
        }
    }

    /// As [`driver_gone`](Self::driver_gone), for one queue pair that completes nothing any more.
    pub(super) fn fail_all(&self) {
        let mut deferred = Deferred::default();
        self.driver_gone(&mut deferred);
        deferred.run();
    }

    /// The number of slots of one side whose requests are over, or that are free.
    pub(super) fn room(&self, side: Side) -> usize {
        let loans = self.loans_of(side);
        loans.len() - loans.lent()
    }

    /// How many requests are in flight, abandoned ones included.
    pub(super) fn in_flight(&self) -> usize {
        if self.is_here() { self.loans.iter().map(Loans::lent).sum() } else { 0 }
    }
}

impl<S: Locking> Drop for Inflight<S> {
    fn drop(&mut self) {
        // A forgotten future may wait for ever.
        if self.flags.load(Ordering::Relaxed) & (Side::Send.waits() | Side::Recv.waits()) != 0 {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl<S: Locking> fmt::Debug for Inflight<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inflight").field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

/// A queue without a device: its lender posts, and a call completes.
#[cfg(test)]
mod queue {
    use super::*;
    use crate::lending::loan_table::lender::Lender;
    #[cfg(loom)]
    use crate::lending::loan_table::{SETTLES_ALONE, SentLoan};
    use crate::owned::lent;

    pub(super) struct Queue {
        pub(super) inflight: Arc<Inflight>,
        pub(super) table: InflightTable<Shared>,
        lender: Lender<Lent<OpTag>>,
        key: InflightKey,
    }

    impl Queue {
        /// A queue of `depth` sends.
        pub(super) fn new(depth: u32) -> Queue {
            let lender = Lender::new(depth, 0).with_loans_settling_alone(true);
            let mut table = InflightTable::default();
            let no_receives = Lender::new(0, RECV).table().clone();
            let loans = [lender.table().clone(), no_receives];
            let inflight = Inflight::new(None, loans, table.waiting());
            let key = table.insert(inflight.clone());
            Queue { inflight, table, lender, key }
        }

        /// Posts a request; `None` if the queue is full.
        pub(super) fn post(&mut self, waker: &Waker) -> Option<u64> {
            self.post_as(Fate::Pending(waker.clone()))
        }

        /// Posts a request of a list.
        #[cfg(loom)]
        pub(super) fn post_settling_alone(&mut self) -> Option<u64> {
            Some(self.post_as(Fate::Sent(WcOpcode::SEND))? & !SETTLES_ALONE)
        }

        /// Returns the `wr_id` of the completion.
        fn post_as(&mut self, fate: Fate) -> Option<u64> {
            let settles_alone = matches!(fate, Fate::Sent(_));
            let tag = OpTag { queue: self.key, fate };
            let mut batch = self.lender.begin();
            let Ok(slot) = batch.free_slot() else { return None };
            let slot = if settles_alone { slot.settling_alone() } else { slot };
            let wr_id = slot.wr_id();
            slot.lend(lent(Memory::None, tag));
            batch.commit();
            Some(wr_id)
        }

        /// Completes a send that succeeded, as the driver does, and wakes nobody yet.
        #[cfg(loom)]
        pub(super) fn complete_sent(inflight: &Inflight, wr_id: u64, deferred: &mut Deferred) {
            match inflight.loans(wr_id).take_back_sent(wr_id).expect("it is in flight") {
                SentLoan::Returned(loan) => super::complete_sent(loan, WcOpcode::SEND, deferred),
                SentLoan::Settled => {}
            }
        }

        /// The same for any request.
        pub(super) fn complete(
            inflight: &Inflight,
            wr_id: u64,
            over: u64,
            deferred: &mut Deferred,
        ) {
            let outcome = Outcome::new(WcStatus::SUCCESS, WcOpcode::SEND, Qpn(1));
            let loan = inflight.loans(wr_id).take_back(wr_id).expect("it is in flight");
            super::complete(VisitedCompletion::copied(loan, outcome), over, deferred);
        }
    }
}

#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, not(loom)))]
mod tests;
