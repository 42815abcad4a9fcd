//! Completion queues that give memory back.

use super::completion::{Done, Outcome, Settled};
use super::lending::Desk;
use super::queue::OwnedQueuePair;
use super::qp_map::{RECV, Routes, SEND, entry, parts};
use super::srq::OwnedSharedReceiveQueue;
use crate::completion::Completion;
use crate::cq::{CompletionQueue, Completions, Direct, Notify, PollError};
use crate::error::{Error, Result};
use crate::memory::loan_table::Spare;
use crate::pd::{KernelPd, Shared, Sharing};
use crate::qp::{Base, QpState, QpType, QueuePair};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

const VERB: &str = "adopt";

/// A completion queue that gives back what its queue pairs were lent.
///
/// It [adopts](Self::adopt) queue pairs that were made with it. As every request has a completion
/// and queue pairs are adopted only while there is room for all that they can have, it does not
/// overflow, as long as all queue pairs that complete to it are adopted: it knows nothing of
/// others that were made with its [queue](Self::queue). That holds for who posts during a poll, too,
/// in a visit or from another thread, in place of what is being taken out: a poll gives entries back
/// to the device before more requests could complete than there is room for. Room beside that of all
/// queue pairs lets it do so less often.
pub struct OwnedCompletionQueue<T> {
    pub(super) cq: CompletionQueue,
    routes: Routes<T>,
    /// Entries that are nobody's: as many may be consumed and not yet given back while what they
    /// completed can be posted again.
    slack: u32,
    /// Of those, what may still be consumed; all of them, unless a poll was forgotten.
    left: u32,
    /// What a scope found that was not its own.
    stash: VecDeque<Done<T>>,
    /// What was found of a scope's requests, by number.
    pub(super) scoped: Vec<(u64, Outcome)>,
    strays: u64,
}

/// A queue pair that was not adopted.
pub struct AdoptError<S: Sharing = Shared> {
    /// The queue pair.
    pub qp: QueuePair<S>,
    /// Why it was not.
    pub error: Error,
}

impl<S: Sharing> From<AdoptError<S>> for Error {
    fn from(failed: AdoptError<S>) -> Error {
        failed.error
    }
}

impl<S: Sharing> fmt::Debug for AdoptError<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdoptError").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<S: Sharing> fmt::Display for AdoptError<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<S: Sharing> std::error::Error for AdoptError<S> {}

impl<T> OwnedCompletionQueue<T> {
    /// Takes over `cq`. Completions of queue pairs that are not adopted are dropped and
    /// [counted](Self::strays).
    pub fn new(cq: CompletionQueue) -> Self {
        let (routes, stash, scoped) = (Routes::new(), VecDeque::new(), Vec::new());
        OwnedCompletionQueue { cq, routes, slack: 0, left: 0, stash, scoped, strays: 0 }
    }

    /// The queue itself, to make queue pairs with. [Adopt](Self::adopt) them: one that is used
    /// without fills the queue with completions that were not counted on, and it may overflow.
    pub fn queue(&self) -> &CompletionQueue {
        &self.cq
    }

    /// Takes over a queue pair that was made with this queue for both its sends and its receives,
    /// and is in state [`RESET`](QpState::RESET).
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is not, if its receives come from a shared receive queue, if it
    /// [scatters to completions](crate::QueuePairBuilder::scatter_to_cqe), or if the queue has not
    /// room for all completions that it may have besides those of others. The queue pair comes back
    /// with the error.
    pub fn adopt<S: Sharing>(
        &mut self,
        qp: QueuePair<S>,
    ) -> std::result::Result<OwnedQueuePair<T, S>, AdoptError<S>> {
        self.take_over(qp, None)
    }

    /// As [`adopt`](Self::adopt), for a queue pair that takes its receives from `srq`. The queue
    /// must have room for all receives of the shared queue, but only once for all queue pairs.
    ///
    /// # Errors
    ///
    /// As [`adopt`](Self::adopt), and `EINVAL` if it takes its receives elsewhere.
    pub fn adopt_on<S: Sharing>(
        &mut self,
        qp: QueuePair<S>,
        srq: &OwnedSharedReceiveQueue<T>,
    ) -> std::result::Result<OwnedQueuePair<T, S>, AdoptError<S>> {
        self.take_over(qp, Some(srq))
    }

    fn take_over<S: Sharing>(
        &mut self,
        qp: QueuePair<S>,
        srq: Option<&OwnedSharedReceiveQueue<T>>,
    ) -> std::result::Result<OwnedQueuePair<T, S>, AdoptError<S>> {
        self.remember();
        // What those left that are gone lies in the queue as anything else does. Who dies meanwhile
        // counts once more.
        let dead = self.routes.dead();
        if !dead.is_empty() && self.gather().is_ok() {
            self.routes.forget(dead);
        }
        let (number, domain, slack) = match self.check(&qp, srq) {
            Ok(fits) => fits,
            Err(error) => return Err(AdoptError { qp, error }),
        };
        let caps = qp.caps();
        let sends = Desk::new(caps.max_send_wr, SEND, &domain);
        let recvs = srq.is_none().then(|| {
            Desk::new(caps.max_recv_wr, RECV, &domain).with_headers(qp.qp_type() == QpType::UD)
        });
        let recv = match (&recvs, srq) {
            (Some(recvs), _) => recvs.lent().clone(),
            (None, Some(srq)) => srq.lent().clone(),
            (None, None) => sends.lent().clone(),
        };
        let (send, depth) = (sends.lent().clone(), caps.max_send_wr);
        let member = qp.qp.member.clone();
        let lease = member.is_numbered_by_the_kernel().then(|| self.cq.inner.numbers.lease(number));
        let route = self.routes.route((number, member, lease), send, recv, depth);
        self.routes.add(route.clone());
        (self.slack, self.left) = (slack, slack);
        Ok(OwnedQueuePair::new(qp, route, sends, recvs))
    }

    /// Answers the queue pair's number, its protection domain, and how many entries are left with it.
    fn check<S: Sharing>(
        &self,
        qp: &QueuePair<S>,
        srq: Option<&OwnedSharedReceiveQueue<T>>,
    ) -> Result<(u32, Arc<KernelPd>, u32)> {
        let invalid = |detail: String| Err(Error::invalid(VERB, detail));
        let base = (&qp.qp.base, qp.qp.member.number());
        let (Base::Domain { send_cq, recv_cq, srq: own, pd }, Some(number)) = base else {
            return invalid(format!("{qp:?} has no queues"));
        };
        if qp.qp_type() == QpType::RAW_PACKET {
            return invalid(format!("completions of {qp:?} do not say that they are its"));
        }
        if qp.qp.scatters {
            return invalid(format!("{qp:?} scatters to completions what its memory should hold"));
        }
        for (cq, which) in [(send_cq, "sends"), (recv_cq, "receives")] {
            if !Arc::ptr_eq(cq, &self.cq.inner) {
                return invalid(format!("the {which} of {qp:?} complete to another queue"));
            }
        }
        let shared = match (own, srq) {
            (None, None) => true,
            (Some(its), Some(srq)) => Arc::ptr_eq(its, &srq.queue().inner),
            _ => false,
        };
        if !shared {
            return invalid(format!("{qp:?} takes its receives elsewhere"));
        }
        if qp.state() != QpState::RESET {
            return invalid(format!("{qp:?} is not in state RESET, and may have requests"));
        }
        qp.check_fresh(VERB)?;
        let caps = qp.caps();
        let own = u64::from(caps.max_send_wr) + u64::from(caps.max_recv_wr);
        let needed = self.routes.needed() + own + srq.map_or(0, |srq| self.routes.more(srq.lent()));
        let capacity = self.cq.capacity();
        match u64::from(capacity).checked_sub(needed) {
            Some(slack) => Ok((number, pd.kernel.clone(), slack as u32)),
            None => invalid(format!(
                "the completion queue has room for {capacity} completions, and its queue pairs \
                 may have {needed}"
            )),
        }
    }

    /// Looks for completions.
    ///
    /// ```no_run
    /// # fn f(cq: &mut uverbs::owned::OwnedCompletionQueue<u32>) -> Result<(), uverbs::PollError> {
    /// let mut completions = cq.poll()?;
    /// while let Some(done) = completions.next() {
    ///     println!("{}: {}", done.tag, done.outcome.status);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`PollError::Forked`] in a child of the process that created the queue.
    #[inline(always)]
    pub fn poll(&mut self) -> std::result::Result<OwnedCompletions<'_, T>, PollError> {
        self.remember();
        let OwnedCompletionQueue { cq, routes, slack, left, stash, scoped, strays } = self;
        let (completions, slack) = (cq.poll()?, *slack);
        Ok(OwnedCompletions { completions, routes, slack, left, stash, scoped, strays })
    }

    /// Looks for at most `most` completions and shows each to `visit`; how many there were. It does
    /// what [`poll`](Self::poll) does, and moves nothing about that nobody asks for.
    ///
    /// ```no_run
    /// # fn f(cq: &mut uverbs::owned::OwnedCompletionQueue<u32>,
    /// #      free: &mut Vec<uverbs::owned::Buffer>) -> Result<(), uverbs::PollError> {
    /// cq.poll_each(64, |request| {
    ///     if !request.is_success() {
    ///         println!("{:?}: {}", request.tag(), request.status());
    ///     }
    ///     if let Ok((buffer, _tag)) = request.into_buffer() {
    ///         free.push(buffer);
    ///     }
    /// })?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`PollError::Forked`] in a child of the process that created the queue.
    #[inline(always)]
    pub fn poll_each(
        &mut self,
        most: usize,
        mut visit: impl FnMut(Settled<'_, T>),
    ) -> std::result::Result<usize, PollError> {
        self.remember();
        let mut found = 0;
        if self.slack == 0 || !self.stash.is_empty() || !self.cq.is_direct() {
            found = self.poll_aside(most, &mut visit)?;
        }
        let OwnedCompletionQueue { cq, routes, slack, scoped, strays, .. } = self;
        let Some(mut completions) = cq.poll_direct()? else { return Ok(found) };
        let nobody = routes.nobody();
        // What may be visited yet, beyond what is left of a round.
        let mut rest = most - found;
        while rest > 0 && *slack > 0 {
            let mut left = (*slack as usize).min(rest);
            rest -= left;
            loop {
                // Successes alone, so that whoever visits need not be asked about it.
                while left > 0 {
                    let Some(completion) = completions.next_usual() else { break };
                    let (wr_id, number) = (completion.wr_id(), completion.number());
                    match routes.find(number).unwrap_or(nobody).settle_usual(wr_id) {
                        Some(place) => visit(Settled::good(place, completion)),
                        None => {
                            rare(routes, completion.again(), scoped, strays, &mut rest, &mut visit)
                        }
                    }
                    left -= 1;
                }
                if left == 0 {
                    break;
                }
                if !unusual(routes, &mut completions, scoped, strays, &mut rest, &mut visit) {
                    return Ok(most - rest - left);
                }
                left -= 1;
            }
            completions.give_back();
        }
        Ok(most - rest)
    }

    /// The same for what was found before, for a queue that has not a single entry to spare, and for one
    /// that others poll otherwise: what it consumes goes back before what was lent does.
    #[cold]
    #[inline(never)]
    fn poll_aside(
        &mut self,
        most: usize,
        visit: &mut dyn FnMut(Settled<'_, T>),
    ) -> std::result::Result<usize, PollError> {
        let OwnedCompletionQueue { cq, routes, slack, stash, scoped, strays, .. } = self;
        let direct = cq.is_direct();
        let mut completions = cq.poll()?;
        let mut found = 0;
        while found < most {
            if let Some(Done { memory, tag, outcome }) = stash.pop_front() {
                let mut spare = Spare::new();
                visit(Settled::kept(spare.settle(entry(memory, tag)), outcome));
                found += 1;
                continue;
            }
            if *slack > 0 && direct {
                break;
            }
            let Some(completion) = completions.next() else { break };
            let (number, wr_id) = (completion.number(), completion.wr_id());
            let outcome = Outcome::of(&completion);
            completions.give_back();
            let known = routes.find(number);
            match known.and_then(|known| known.settle_usual(wr_id)) {
                Some(place) => {
                    visit(Settled::kept(place, outcome));
                    found += 1;
                }
                None => set_aside(routes, (number, wr_id), outcome, scoped, strays),
            }
        }
        Ok(found)
    }

    /// Gives back what a poll consumed whose answer was forgotten.
    #[inline(always)]
    fn remember(&mut self) {
        if self.left != self.slack {
            self.cq.give_back();
            self.left = self.slack;
        }
    }

    /// Looks for completions on behalf of a scope, and keeps those of others for the next poll.
    pub(super) fn gather(&mut self) -> std::result::Result<(), PollError> {
        let mut stash = std::mem::take(&mut self.stash);
        if let Ok(completions) = self.poll() {
            stash.extend(completions);
        }
        self.stash = stash;
        self.cq.poll().map(drop)
    }

    /// Keeps something for the next poll.
    pub(super) fn keep(&mut self, done: Done<T>) {
        self.stash.push_back(done);
    }

    /// Asks for an event; see [`CompletionQueue::req_notify`].
    ///
    /// # Errors
    ///
    /// Those of [`CompletionQueue::req_notify`].
    pub fn req_notify(&mut self, notify: Notify) -> Result<()> {
        self.cq.req_notify(notify)
    }

    /// Completions that gave nothing back, because they were of queue pairs that are not adopted
    /// or gone.
    pub fn strays(&self) -> u64 {
        self.strays
    }
}

impl<T> fmt::Debug for OwnedCompletionQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnedCompletionQueue").field(&self.cq).finish()
    }
}

/// Does with the next completion, if there is one, as [`rare`] does.
#[cold]
#[inline(never)]
fn unusual<T>(
    routes: &Routes<T>,
    completions: &mut Direct<'_>,
    scoped: &mut Vec<(u64, Outcome)>,
    strays: &mut u64,
    rest: &mut usize,
    visit: &mut dyn FnMut(Settled<'_, T>),
) -> bool {
    let Some(completion) = completions.next() else { return false };
    rare(routes, completion, scoped, strays, rest, visit);
    true
}

/// Shows a completion to `visit` that is a failure, or takes note of one that gives nothing back to a
/// poll: one more may be visited then.
#[cold]
#[inline(never)]
fn rare<T>(
    routes: &Routes<T>,
    completion: Completion<'_>,
    scoped: &mut Vec<(u64, Outcome)>,
    strays: &mut u64,
    rest: &mut usize,
    visit: &mut dyn FnMut(Settled<'_, T>),
) {
    let (number, wr_id) = (completion.number(), completion.wr_id());
    let known = routes.find(number);
    if let Some(place) = known.and_then(|known| known.settle_usual(wr_id)) {
        return visit(Settled::lent(place, completion));
    }
    set_aside(routes, (number, wr_id), Outcome::of(&completion), scoped, strays);
    *rest += 1;
}

/// Takes note of a completion that gives nothing back to a poll.
#[cold]
#[inline(never)]
fn set_aside<T>(
    routes: &Routes<T>,
    (number, wr_id): (u32, u64),
    outcome: Outcome,
    scoped: &mut Vec<(u64, Outcome)>,
    strays: &mut u64,
) {
    match routes.find(number).and_then(|known| known.settle(wr_id)) {
        // There is nothing to drop: a scope keeps what it lends.
        Some(_) => scoped.push((wr_id, outcome)),
        None => *strays += 1,
    }
}

/// The completions of one poll; see [`OwnedCompletionQueue::poll`].
pub struct OwnedCompletions<'q, T> {
    completions: Completions<'q>,
    routes: &'q Routes<T>,
    slack: u32,
    /// Entries that may yet be consumed before they are given back.
    left: &'q mut u32,
    stash: &'q mut VecDeque<Done<T>>,
    scoped: &'q mut Vec<(u64, Outcome)>,
    strays: &'q mut u64,
}

impl<T> OwnedCompletions<'_, T> {
    #[cold]
    fn stashed(&mut self) -> Option<Done<T>> {
        self.stash.pop_front()
    }
}

impl<T> Iterator for OwnedCompletions<'_, T> {
    type Item = Done<T>;

    #[inline]
    fn next(&mut self) -> Option<Done<T>> {
        if !self.stash.is_empty() {
            return self.stashed();
        }
        loop {
            let completion = self.completions.next()?;
            let (number, wr_id) = (completion.number(), completion.wr_id());
            let outcome = Outcome::of(&completion);
            // Before what was lent comes back and its place can be posted to again.
            match self.left.checked_sub(1) {
                Some(left) => *self.left = left,
                None => {
                    self.completions.give_back();
                    *self.left = self.slack;
                }
            }
            let place = self.routes.find(number).and_then(|known| known.settle(wr_id));
            match place.map(|place| parts(place.take())) {
                Some(Some((memory, tag))) => return Some(Done { memory, tag, outcome }),
                Some(None) => self.scoped.push((wr_id, outcome)),
                None => *self.strays += 1,
            }
        }
    }
}

impl<T> Drop for OwnedCompletions<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // What it consumed is given back when this is gone.
        *self.left = self.slack;
    }
}

impl<T> fmt::Debug for OwnedCompletions<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedCompletions").finish_non_exhaustive()
    }
}
