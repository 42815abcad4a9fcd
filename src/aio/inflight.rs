//! The requests in flight of one queue pair, shared by their futures and the driver: a slot for each request
//! with the waker of its future, and the futures that wait for room in the queue. Model-checked with loom.

use super::deferred::Deferred;
use super::locking::Locking;
use crate::error::Error;
use crate::first_panic::FirstPanic;
use crate::owned::{Memory, Outcome};
use crate::pd::Shared;
use crate::qp::{QpAttr, QpControl, QpState, WeakQpHandle};
use crate::sync::lock::AnyLock;
use crate::wc::WcStatus;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::task::Waker;

/// Which queue of a queue pair a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Send,
    Recv,
}

/// The tag of a request, by which the driver finds its future.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpTag {
    /// The queue that the request was posted to.
    pub(super) queue: InflightKey,
    pub(super) index: u32,
    pub(super) side: Side,
}

/// The key of a queue in an [`InflightTable`]: an index and a generation. The key of a removed queue finds nothing,
/// whatever takes its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InflightKey {
    index: u32,
    generation: u32,
}

/// The requests in flight of the queues that complete to one completion queue.
#[derive(Debug)]
pub(super) struct InflightTable<S: Locking> {
    entries: Vec<(u32, Option<Arc<Inflight<S>>>)>,
    free: Vec<u32>,
}

impl<S: Locking> Default for InflightTable<S> {
    fn default() -> Self {
        InflightTable { entries: Vec::new(), free: Vec::new() }
    }
}

impl<S: Locking> InflightTable<S> {
    pub(super) fn insert(&mut self, inflight: Arc<Inflight<S>>) -> InflightKey {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push((0, None));
            (self.entries.len() - 1) as u32
        });
        let mut key = InflightKey { index, generation: 0 };
        if let Some((generation, entry)) = self.entries.get_mut(index as usize) {
            *entry = Some(inflight);
            key.generation = *generation;
        }
        key
    }

    /// `None` if the queue was removed.
    #[inline]
    pub(super) fn find(&self, key: InflightKey) -> Option<&Inflight<S>> {
        match self.entries.get(key.index as usize) {
            Some((generation, Some(inflight))) if *generation == key.generation => Some(inflight),
            _ => None,
        }
    }

    /// Removes a queue; what is in flight has no future.
    pub(super) fn remove(&mut self, key: InflightKey) -> Option<Arc<Inflight<S>>> {
        let (generation, entry) = self.entries.get_mut(key.index as usize)?;
        if *generation != key.generation {
            return None;
        }
        let inflight = entry.take()?;
        // An entry whose generations are used up stays empty.
        if let Some(next) = generation.checked_add(1) {
            *generation = next;
            self.free.push(key.index);
        }
        Some(inflight)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<Inflight<S>>> {
        self.entries.iter().filter_map(|(_, inflight)| inflight.as_ref())
    }
}

/// A slot of the table of requests in flight.
#[derive(Debug)]
enum OpSlot {
    Free,
    /// In flight, with the waker of its future.
    Pending(Waker),
    /// In flight, and its future was dropped.
    Abandoned,
    /// Over; its future was not polled since. The number says how many were over before it.
    Over(Memory, Outcome, u64),
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

#[derive(Debug, Default)]
struct State {
    slots: Vec<OpSlot>,
    free: Vec<u32>,
    sends: Waiters,
    recvs: Waiters,
    broken: Option<Broken>,
    /// How many requests were over so far.
    over: u64,
}

impl State {
    fn waiters(&mut self, side: Side) -> &mut Waiters {
        match side {
            Side::Send => &mut self.sends,
            Side::Recv => &mut self.recvs,
        }
    }

    /// Takes a slot for a request.
    fn take_slot(&mut self, waker: Waker) -> u32 {
        let pending = OpSlot::Pending(waker);
        match self.free.pop() {
            Some(index) => {
                if let Some(slot) = self.slots.get_mut(index as usize) {
                    *slot = pending;
                }
                index
            }
            None => {
                self.slots.push(pending);
                (self.slots.len() - 1) as u32
            }
        }
    }

    /// Admits no request from now on, and wakes the futures that wait for room.
    fn break_with(&mut self, broken: Broken, deferred: &mut Deferred) {
        self.broken = Some(broken);
        for waker in self.sends.drain().chain(self.recvs.drain()) {
            deferred.wake(waker);
        }
    }

    /// Frees a slot, and returns what was in it.
    fn free_slot(&mut self, index: u32) -> OpSlot {
        let Some(slot) = self.slots.get_mut(index as usize) else { return OpSlot::Free };
        self.free.push(index);
        std::mem::replace(slot, OpSlot::Free)
    }
}

/// The futures that wait for room in a queue, in the order in which they came. Each has a ticket, a number.
///
/// Cloning and dropping a waker runs code of the program, which may use the same queue. So nothing here
/// clones one, and a waker that is removed goes to the caller, who first releases the lock.
#[derive(Debug, Default)]
struct Waiters {
    /// By increasing ticket.
    queue: VecDeque<(u64, Waker)>,
    next_ticket: u64,
}

impl Waiters {
    /// Whether the waiter with `ticket` is the first; without a ticket, whether nobody waits.
    fn is_first(&self, ticket: Option<u64>) -> bool {
        match (self.queue.front(), ticket) {
            (None, _) => true,
            (Some((first, _)), Some(ticket)) => *first == ticket,
            (Some(_), None) => false,
        }
    }

    /// Appends a waiter, or replaces the waker of the one with this ticket; returns the old waker.
    fn enter(&mut self, ticket: &mut Option<u64>, waker: Waker) -> Option<Waker> {
        if let Some(ticket) = *ticket {
            if let Ok(at) = self.queue.binary_search_by_key(&ticket, |(other, _)| *other) {
                return self.queue.get_mut(at).map(|(_, old)| std::mem::replace(old, waker));
            }
        }
        *ticket = Some(self.next_ticket);
        self.queue.push_back((self.next_ticket, waker));
        self.next_ticket += 1;
        None
    }

    /// Removes a waiter; returns its waker, and the waker of the next one if the waiter was the first.
    fn leave(&mut self, ticket: u64) -> [Option<Waker>; 2] {
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
    /// It may be posted, and has this slot.
    Granted(u32),
    /// It has to wait: others came first.
    Wait,
    Broken(Broken),
}

/// What a posted request's future finds when it is polled.
#[derive(Debug)]
pub(super) enum OpProgress {
    Pending,
    Over(Memory, Outcome),
    /// Nobody will see its completion.
    Lost(Broken),
}

/// Moves a queue pair to state [`ERR`](QpState::ERR), unless it is destroyed.
pub(super) fn flush(qp: Option<&WeakQpHandle>) -> crate::Result<()> {
    match qp.and_then(WeakQpHandle::upgrade) {
        Some(qp) => QpControl { qp }.modify(&QpAttr::new().state(QpState::ERR)),
        None => Ok(()),
    }
}

/// The requests in flight of one queue pair, or of one shared receive queue.
///
/// No code of the program runs under the lock: wakers are cloned before, and called and dropped after.
pub(super) struct Inflight<S: Locking = Shared> {
    state: S::Lock<State>,
    /// The queue pair that is flushed when a request fails; `None` for a shared receive queue. Weak, because
    /// the completion queue's table keeps this value alive, and must not keep the queue pair alive.
    qp: Option<WeakQpHandle>,
}

impl<S: Locking> Inflight<S> {
    pub(super) fn new(qp: Option<&QpControl>) -> Arc<Inflight<S>> {
        let qp = qp.map(|control| control.qp.downgrade());
        Arc::new(Inflight { state: S::Lock::new(State::default()), qp })
    }

    /// `None` in a forked child, which has no request in flight.
    fn state(&self) -> Option<<S::Lock<State> as AnyLock<State>>::Guard<'_>> {
        self.state.lock()
    }

    /// Admits a request to be posted, unless others wait for room.
    pub(super) fn admit(&self, side: Side, ticket: &mut Option<u64>, waker: &Waker) -> Admission {
        let waker = waker.clone();
        let Some(mut state) = self.state() else { return Admission::Broken(Broken::Forked) };
        if let Some(broken) = state.broken {
            drop(state);
            return Admission::Broken(broken);
        }
        let waiters = state.waiters(side);
        if !waiters.is_first(*ticket) {
            let old = waiters.enter(ticket, waker);
            drop(state);
            drop(old);
            return Admission::Wait;
        }
        Admission::Granted(state.take_slot(waker))
    }

    /// Lets a request wait for room. The caller then tries to post once more: a completion that came before
    /// this call made room and woke nobody.
    pub(super) fn wait(&self, side: Side, ticket: &mut Option<u64>, waker: &Waker) {
        let waker = waker.clone();
        let Some(mut state) = self.state() else { return };
        let old = state.waiters(side).enter(ticket, waker);
        drop(state);
        drop(old);
    }

    /// Frees the slot of a request that was admitted and not posted.
    pub(super) fn release(&self, index: u32) {
        let Some(mut state) = self.state() else { return };
        let left = state.free_slot(index);
        drop(state);
        drop(left);
    }

    /// Stops waiting for room, because the request is posted or its future is dropped. The next waiter may
    /// find room, too.
    pub(super) fn leave(&self, side: Side, ticket: &mut Option<u64>) {
        let Some(ticket) = ticket.take() else { return };
        let Some(mut state) = self.state() else { return };
        let [left, next] = state.waiters(side).leave(ticket);
        drop(state);
        // A future's destructor comes here: a waker that panics while the thread unwinds must not abort the process.
        let mut calls = FirstPanic::default();
        calls.catch(|| next.into_iter().for_each(Waker::wake));
        calls.catch(|| drop(left));
        calls.resume();
    }

    /// Which of these requests was over before the others: its place among `indices`. `None` while all of
    /// them are pending.
    pub(super) fn first_over(&self, mut indices: impl Iterator<Item = u32>) -> Option<usize> {
        // In a forked child nothing is in flight, and the first future that is asked reports it.
        let Some(state) = self.state() else { return indices.next().map(|_| 0) };
        let order = |index: u32| match state.slots.get(index as usize) {
            Some(OpSlot::Over(_, _, order)) => Some(*order),
            Some(OpSlot::Pending(_)) if state.broken != Some(Broken::DriverGone) => None,
            _ => Some(u64::MAX),
        };
        let over = indices.enumerate().filter_map(|(at, index)| Some((order(index)?, at)));
        over.min().map(|(_, at)| at)
    }

    /// Lets the end of a request wake this task. Returns whether the request is pending; if it is not, nobody
    /// is woken.
    pub(super) fn watch(&self, index: u32, waker: &Waker) -> bool {
        // A clone of the waker, made without the lock held, and only if the slot has another waker.
        let mut fresh = None;
        loop {
            let Some(mut state) = self.state() else { return false };
            let gone = state.broken == Some(Broken::DriverGone);
            let left = match state.slots.get_mut(index as usize) {
                Some(OpSlot::Pending(_)) if gone => return false,
                Some(OpSlot::Pending(old)) if old.will_wake(waker) => return true,
                Some(OpSlot::Pending(old)) => match fresh.take() {
                    Some(new) => std::mem::replace(old, new),
                    None => {
                        drop(state);
                        fresh = Some(waker.clone());
                        continue;
                    }
                },
                _ => return false,
            };
            drop(state);
            drop(left);
            return true;
        }
    }

    /// Says how far the request in a slot is. Unless the request is pending, its slot is freed.
    pub(super) fn progress(&self, index: u32, waker: &Waker) -> OpProgress {
        if self.watch(index, waker) {
            return OpProgress::Pending;
        }
        let Some(mut state) = self.state() else { return OpProgress::Lost(Broken::Forked) };
        let (progress, left) = match state.slots.get_mut(index as usize) {
            // The driver is gone, and its completion will not be seen.
            Some(slot @ OpSlot::Pending(_)) => {
                let left = std::mem::replace(slot, OpSlot::Abandoned);
                (OpProgress::Lost(Broken::DriverGone), left)
            }
            _ => match state.free_slot(index) {
                OpSlot::Over(memory, outcome, _) => {
                    (OpProgress::Over(memory, outcome), OpSlot::Free)
                }
                left => (OpProgress::Lost(Broken::DriverGone), left),
            },
        };
        drop(state);
        drop(left);
        progress
    }

    /// The future of a request was dropped. The memory stays lent until the request is over.
    pub(super) fn abandon(&self, index: u32) {
        let Some(mut state) = self.state() else { return };
        let left = match state.slots.get_mut(index as usize) {
            Some(slot @ OpSlot::Pending(_)) => std::mem::replace(slot, OpSlot::Abandoned),
            _ => state.free_slot(index),
        };
        drop(state);
        // After the lock: dropping memory or a waker runs code of the program. As in `leave`, it may panic.
        FirstPanic::of_one(|| drop(left));
    }

    /// A request is over: stores how it ended for its future, and defers what runs code of the program.
    pub(super) fn complete(
        &self,
        index: u32,
        side: Side,
        memory: Memory,
        outcome: Outcome,
        deferred: &mut Deferred,
    ) {
        let Some(mut state) = self.state() else { return deferred.drop(memory) };
        let first = !outcome.is_success() && self.qp.is_some() && state.broken.is_none();
        if first {
            state.break_with(Broken::Failed(outcome.status), deferred);
        }
        state.waiters(side).take_first_waker().into_iter().for_each(|waker| deferred.wake(waker));
        let order = state.over;
        state.over += 1;
        match state.slots.get_mut(index as usize) {
            Some(slot @ OpSlot::Pending(_)) => {
                if let OpSlot::Pending(waker) =
                    std::mem::replace(slot, OpSlot::Over(memory, outcome, order))
                {
                    deferred.wake(waker);
                }
            }
            Some(OpSlot::Abandoned) => {
                state.free_slot(index);
                deferred.drop(memory);
            }
            // The slot is not the request's any more: no future waits for it.
            _ => deferred.drop(memory),
        }
        drop(state);
        if first {
            // The device moved the queue pair to ERR by itself. Moving it there once more makes rxe flush the
            // receives that were posted since.
            deferred.flush(self.qp.clone());
        }
    }

    /// Admits no request any more, and flushes those that are posted.
    pub(super) fn abort(&self) -> crate::Result<()> {
        let mut deferred = Deferred::default();
        let Some(mut state) = self.state() else { return Err(Error::forked("abort")) };
        if state.broken.is_none() {
            state.break_with(Broken::Failed(WcStatus::WR_FLUSH_ERR), &mut deferred);
        }
        drop(state);
        // Only now that `broken` is set: a receive that is posted meanwhile sees it in `recv_posted`.
        let flushed = self.flush();
        deferred.run();
        flushed
    }

    fn flush(&self) -> crate::Result<()> {
        flush(self.qp.as_ref())
    }

    /// A receive was posted. If the queue pair broke after the receive was admitted, the queue pair is moved
    /// to ERR again, because rxe flushes receives only then.
    pub(super) fn recv_posted(&self) {
        // `broken` is set under this lock before the queue pair is flushed: either that flush finds the
        // receive, or this call finds `broken`.
        let broken = self.state().and_then(|state| state.broken);
        if matches!(broken, Some(Broken::Failed(_))) {
            let _ = self.flush();
        }
    }

    /// The driver has ended: fails all futures.
    pub(super) fn driver_gone(&self, deferred: &mut Deferred) {
        let Some(mut state) = self.state() else { return };
        state.break_with(Broken::DriverGone, deferred);
        for slot in &mut state.slots {
            if let OpSlot::Pending(waker) = slot {
                deferred.wake(take_waker(waker));
            }
        }
    }

    /// As [`driver_gone`](Self::driver_gone), for one queue pair that completes nothing any more.
    pub(super) fn fail_all(&self) {
        let mut deferred = Deferred::default();
        self.driver_gone(&mut deferred);
        deferred.run();
    }

    /// How many requests are in flight, abandoned ones included.
    pub(super) fn in_flight(&self) -> usize {
        let Some(state) = self.state() else { return 0 };
        let in_flight = |slot: &&OpSlot| matches!(slot, OpSlot::Pending(_) | OpSlot::Abandoned);
        state.slots.iter().filter(in_flight).count()
    }
}

impl<S: Locking> fmt::Debug for Inflight<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inflight").field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, not(loom)))]
mod tests;
