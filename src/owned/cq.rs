//! Completion queues that give memory back.

use super::completion::{Finished, Outcome, VisitedCompletion};
use super::lending::{Lent, Memory, OtherLoan, QueueLender, lent, memory_and_tag};
use super::qp::OwnedQueuePair;
use super::qp_map::QpMap;
use super::srq::OwnedSharedReceiveQueue;
use crate::completion::Completion;
use crate::cq::{
    CompletionQueue, Completions, CqControl, CqRef, Direct, Notify, PollError, sealed,
};
use crate::error::{Error, ErrorWith, Result};
use crate::lending::compact_enum::Content;
use crate::lending::loan_table::{COVERS, DetachedSlot, RECV, ReturnedLoan, SentLoan};
use crate::pd::{KernelPd, Sharing};
use crate::qp::{Base, QpState, QpType, QueuePair};
use crate::srq::SharedReceiveQueue;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

const VERB: &str = "adopt";

/// A completion queue that gives back what its queue pairs were lent.
///
/// It [adopts](Self::adopt) queue pairs that were created with it, and only as long as it has room for all
/// completions that they may have at once. So it does not overflow if every queue pair that completes to
/// it is adopted, even if the program posts during a poll, from a visitor or from another thread: a poll
/// gives entries back to the device before their places could be posted to again. With more room than the
/// queue pairs need, it does so less often.
///
/// Polling takes `&mut self`; the value moves between threads. See [`owned`](super#) for an example.
pub struct OwnedCompletionQueue<T> {
    pub(super) cq: CompletionQueue,
    qps: QpMap<T>,
    /// Entries beyond those that the queue pairs need. A poll may consume as many before it gives entries
    /// back, although the places of the requests are free again.
    spare: u32,
    /// How many of the spare entries may still be consumed: all, unless a poll was forgotten.
    spare_left: u32,
    pub(super) backlog: Backlog<T>,
}

/// Requests that are over, for the next poll to give back.
pub(super) struct Backlog<T> {
    /// Found by a scope, or by a reset.
    done: VecDeque<Finished<Memory, T>>,
    /// A completion that stands for several requests.
    covered: Option<Covered>,
    /// Requests of scopes that are over, by `wr_id`.
    pub(super) scoped: Vec<(u64, Outcome)>,
    /// Completions that gave nothing back.
    unmatched: u64,
}

/// A completion that stands for unsignaled requests and, last, for its own.
struct Covered {
    /// The queue pair's.
    number: u32,
    /// Where to look for the first request that was not given back.
    next: u64,
    /// The request of the completion.
    last: u64,
    outcome: Outcome,
}

/// Who is shown what a poll finds. Most completions are successes that are visited in place, by a method that is inlined
/// into the loop; any may be shown as one of the others.
pub(crate) trait Visit<T> {
    /// Whether `sent` is called for sends, in place of `success`.
    #[inline(always)]
    fn wants_sent(&self) -> bool {
        false
    }

    /// A send that succeeded, and is neither unsignaled nor stands for such.
    #[inline(always)]
    fn sent(&mut self, loan: ReturnedLoan<'_, Lent<T>>, completion: Completion<'_>) {
        self.success(VisitedCompletion::success(loan, completion));
    }

    fn success(&mut self, done: VisitedCompletion<'_, T>);

    fn other(&mut self, done: VisitedCompletion<'_, T>);
}

impl<T, F: FnMut(VisitedCompletion<'_, T>)> Visit<T> for F {
    #[inline(always)]
    fn success(&mut self, done: VisitedCompletion<'_, T>) {
        self(done);
    }

    fn other(&mut self, done: VisitedCompletion<'_, T>) {
        self(done);
    }
}

/// A queue pair, as errors name it.
pub(super) fn name_of_qp<S: Sharing>(qp: &QueuePair<S>) -> String {
    format!("queue pair {} of type {}", qp.qpn(), qp.qp_type())
}

/// A shared receive queue, as errors name it.
pub(super) fn name_of_srq(srq: &SharedReceiveQueue) -> String {
    format!("shared receive queue {} of {}", srq.handle(), srq.inner.file().device.name())
}

impl<T> CqRef for OwnedCompletionQueue<T> {}

impl<T> sealed::Sealed for OwnedCompletionQueue<T> {
    fn control(&self) -> &CqControl {
        sealed::Sealed::control(&self.cq)
    }

    fn compact_updates(&self) {
        sealed::Sealed::compact_updates(&self.cq);
    }
}

impl<T> Backlog<T> {
    /// Whether a poll has nothing to give back before it looks for completions.
    #[inline(always)]
    fn is_empty(&self) -> bool {
        self.done.is_empty() && self.covered.is_none()
    }

    /// The loan of a completion whose `wr_id` is not common. `None` if the completion gives nothing back to
    /// a poll, or stands for several requests, which [`next_covered`](Self::next_covered) returns.
    #[cold]
    #[inline(never)]
    fn sort<'q>(
        &mut self,
        qps: &'q QpMap<T>,
        (number, wr_id): (u32, u64),
        outcome: Outcome,
    ) -> Option<ReturnedLoan<'q, Lent<T>>> {
        let loans = qps.find(number).map(|entry| entry.loans(wr_id));
        if wr_id & COVERS != 0 {
            if let Some(next) = loans.and_then(|loans| loans.first_covered(wr_id)) {
                if next != wr_id {
                    self.covered = Some(Covered { number, next, last: wr_id, outcome });
                    return None;
                }
            }
        }
        let Some(loan) = loans.and_then(|loans| loans.take_back_either(wr_id)) else {
            self.unmatched += 1;
            return None;
        };
        if let Content::Large(OtherLoan::Scoped) = loan.get().get() {
            // There is nothing to drop: the scope has the memory.
            self.scoped.push((wr_id, outcome));
            return None;
        }
        Some(loan)
    }

    /// The next request that a completion stands for, in the order of its queue.
    #[cold]
    #[inline(never)]
    fn next_covered<'q>(
        &mut self,
        qps: &'q QpMap<T>,
    ) -> Option<(ReturnedLoan<'q, Lent<T>>, Outcome)> {
        let Covered { number, next, last, outcome } = self.covered.as_mut()?;
        if let Some(entry) = qps.find(*number) {
            if let Some(loan) = entry.loans(*last).take_back_covered(next, *last) {
                let outcome = match loan.get().get() {
                    Content::Large(OtherLoan::Unsignaled { opcode, byte_len, .. }) => {
                        Outcome::covered(outcome, *opcode, *byte_len)
                    }
                    _ => *outcome,
                };
                return Some((loan, outcome));
            }
        }
        let (number, last, outcome) = (*number, *last, *outcome);
        self.covered = None;
        self.sort(qps, (number, last), outcome).map(|loan| (loan, outcome))
    }
}

impl<T> OwnedCompletionQueue<T> {
    /// Takes over `cq`. Completions of queue pairs that are not adopted are dropped and
    /// [counted](Self::unmatched).
    pub fn new(cq: CompletionQueue) -> Self {
        let (done, covered, scoped, unmatched) = (VecDeque::new(), None, Vec::new(), 0);
        let backlog = Backlog { done, covered, scoped, unmatched };
        OwnedCompletionQueue { cq, qps: QpMap::new(), spare: 0, spare_left: 0, backlog }
    }

    /// The queue itself, to create queue pairs with. [Adopt](Self::adopt) each of them: the completions of one
    /// that is not adopted are not counted on, and the queue may overflow.
    pub fn queue(&self) -> &CompletionQueue {
        &self.cq
    }

    /// Takes over a queue pair that was created with this queue for its sends and its receives, and is in
    /// state [`RESET`](QpState::RESET): adopt first, then connect by
    /// [`handshake`](crate::QpControl::handshake).
    ///
    /// The sizes that count are those of the queues as they were made, [`caps`](crate::QpControl::caps): the device may
    /// have made them larger than they were asked for. [`cq_builder`](crate::Context::cq_builder) says how large a completion queue
    /// is then enough.
    ///
    /// Where another thread polls the queue, a [`CqControl`](crate::CqControl) creates queue pairs for it, and
    /// each is sent to that thread to be adopted: see [`owned`](super#one-thread-polls-others-post).
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is not, if its receives come from a shared receive queue, if it
    /// [scatters to completions](crate::QpBuilder::scatter_to_cqe), or if the queue has not
    /// room for all completions that it may have besides those of others. The queue pair comes back
    /// with the error.
    pub fn adopt<S: Sharing>(
        &mut self,
        qp: QueuePair<S>,
    ) -> std::result::Result<OwnedQueuePair<T, S>, ErrorWith<QueuePair<S>>> {
        self.take_over(qp, None, Self::poll_into_backlog)
    }

    /// As [`adopt`](Self::adopt), for a queue pair that takes its receives from `srq`. The queue needs room
    /// for all receives of the shared queue once, however many queue pairs take them.
    ///
    /// # Errors
    ///
    /// As [`adopt`](Self::adopt), and `EINVAL` if it takes its receives elsewhere, or is an XRC initiator,
    /// which takes none.
    pub fn adopt_on<S: Sharing>(
        &mut self,
        qp: QueuePair<S>,
        srq: &OwnedSharedReceiveQueue<T>,
    ) -> std::result::Result<OwnedQueuePair<T, S>, ErrorWith<QueuePair<S>>> {
        self.take_over(qp, Some(srq), Self::poll_into_backlog)
    }

    /// Takes over a shared receive queue of an [XRC domain](crate::XrcDomain), which was created with this queue.
    /// The completions of its receives give the memory back here, whichever [target](crate::XrcTarget) a message
    /// came to; [`Outcome::qpn`] tells which. A target has nothing that could be taken over, and an
    /// initiator is [adopted](Self::adopt) as any queue pair.
    ///
    /// Dropping the shared receive queue discards the completions that were not polled, and frees what it was
    /// lent.
    ///
    /// ```no_run
    /// # use uverbs::{Context, ProtectionDomain, XrcDomain, owned::*};
    /// # fn f(context: &Context, pd: &ProtectionDomain, xrcd: &XrcDomain, pool: &BufferPool)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// let mut cq = OwnedCompletionQueue::new(context.cq_builder(256).build()?);
    /// let mut srq = cq.adopt_srq(pd.srq_builder(64).xrc(xrcd, cq.queue()).build()?)?;
    /// let target = xrcd.create_target()?;
    /// let mut batch = srq.batch()?;
    /// batch.push(pool.take()?, 1)?;
    /// batch.ring()?;
    /// # let _ = target; Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// `EINVAL` if the queue is of no XRC domain, completes elsewhere, was posted to, or holds more receives than
    /// this queue has room for besides the completions of others. The shared receive queue comes back with the
    /// error.
    pub fn adopt_srq(
        &mut self,
        srq: SharedReceiveQueue,
    ) -> std::result::Result<OwnedSharedReceiveQueue<T>, ErrorWith<SharedReceiveQueue>>
    where
        T: Send + 'static,
    {
        self.take_over_srq(srq, Self::poll_into_backlog)
    }

    /// As [`adopt_srq`](Self::adopt_srq). `poll` polls until there is nothing more.
    pub(crate) fn take_over_srq(
        &mut self,
        srq: SharedReceiveQueue,
        poll: impl FnOnce(&mut Self) -> std::result::Result<(), PollError>,
    ) -> std::result::Result<OwnedSharedReceiveQueue<T>, ErrorWith<SharedReceiveQueue>>
    where
        T: Send + 'static,
    {
        const VERB: &str = "adopt_srq";
        if let Err(error) = srq.inner.file().check_fork(VERB) {
            return Err(error.with(srq));
        }
        self.forget_closed(poll);
        let Some((cq, member)) = srq.xrc() else {
            let detail = format!(
                "{} is of no XRC domain, and has no completions of its own: \
                 OwnedSharedReceiveQueue::new takes it over",
                name_of_srq(&srq)
            );
            return Err(Error::invalid(VERB, detail).with(srq));
        };
        let number = member.number.filter(|_| Arc::ptr_eq(cq, &self.cq.inner));
        let (Some(number), member) = (number, member.clone()) else {
            let detail = format!("the receives of {} complete to another queue", name_of_srq(&srq));
            return Err(Error::invalid(VERB, detail).with(srq));
        };
        OwnedSharedReceiveQueue::of_xrc(srq, |loans| {
            let spare = self.spare_with(VERB, loans.len() as u64)?;
            let sends = self.qps.no_loans();
            let adopted = self.qps.new_qp((number, member, None), sends, loans.clone(), 0);
            self.qps.add(adopted.clone());
            (self.spare, self.spare_left) = (spare, spare);
            Ok(adopted)
        })
    }

    /// Takes closed queue pairs out of the map. `poll` polls until there is nothing more.
    fn forget_closed(
        &mut self,
        poll: impl FnOnce(&mut Self) -> std::result::Result<(), PollError>,
    ) {
        self.give_back_forgotten();
        // Completions of closed queue pairs are in the queue until it is polled. A queue pair that is closed
        // after this line counts once more.
        let closed = self.qps.take_closed();
        if !closed.is_empty() && poll(self).is_ok() {
            self.qps.remove_closed(closed);
        }
    }

    /// How many entries are spare with `more` completions that may be there at once.
    fn spare_with(&self, verb: &'static str, more: u64) -> Result<u32> {
        let (needed, capacity) = (self.qps.needed() + more, self.cq.capacity());
        match u64::from(capacity).checked_sub(needed) {
            Some(spare) => Ok(spare as u32),
            None => Err(Error::invalid(
                verb,
                format!(
                    "the completion queue has room for {capacity} completions, and its queue pairs may have \
                     {needed}: create it larger, with cq_builder({needed}) for these; devices round queues up, \
                     and `caps` tells how far"
                ),
            )),
        }
    }

    /// As [`adopt`](Self::adopt), or [`adopt_on`](Self::adopt_on). `poll` polls until there is nothing more.
    pub(crate) fn take_over<S: Sharing>(
        &mut self,
        qp: QueuePair<S>,
        srq: Option<&OwnedSharedReceiveQueue<T>>,
        poll: impl FnOnce(&mut Self) -> std::result::Result<(), PollError>,
    ) -> std::result::Result<OwnedQueuePair<T, S>, ErrorWith<QueuePair<S>>> {
        if let Err(error) = qp.qp.file().check_fork(VERB) {
            return Err(error.with(qp));
        }
        self.forget_closed(poll);
        let (number, domain, spare) = match self.check(&qp, srq) {
            Ok(fits) => fits,
            Err(error) => return Err(error.with(qp)),
        };
        let caps = qp.caps();
        let sends = QueueLender::new(caps.max_send_wr, 0, &domain);
        let sends = sends.with_loans_settling_alone(!qp.send.checks_all());
        let own = if srq.is_some() { 0 } else { caps.max_recv_wr };
        let recvs = QueueLender::new(own, RECV, &domain).with_datagrams(qp.qp_type() == QpType::UD);
        let recvs = if qp.qp.out_of_order { recvs.in_any_order() } else { recvs };
        let recv = srq.map_or(recvs.loans(), OwnedSharedReceiveQueue::loans).clone();
        let (send, depth) = (sends.loans().clone(), caps.max_send_wr);
        let member = qp.qp.member.clone();
        let by_kernel = qp.qp.file().provider.traits().kernel_numbers_members;
        let lease = by_kernel.then(|| self.cq.inner.numbers.lease(number));
        let adopted = self.qps.new_qp((number, member, lease), send, recv, depth);
        self.qps.add(adopted.clone());
        (self.spare, self.spare_left) = (spare, spare);
        Ok(OwnedQueuePair::new(qp, adopted, sends, recvs))
    }

    /// Returns the queue pair's number, its protection domain, and how many entries of the completion queue
    /// are spare with it.
    fn check<S: Sharing>(
        &self,
        qp: &QueuePair<S>,
        srq: Option<&OwnedSharedReceiveQueue<T>>,
    ) -> Result<(u32, Arc<KernelPd>, u32)> {
        let invalid = |detail: String| Err(Error::invalid(VERB, detail));
        let name = name_of_qp(qp);
        let base = (&qp.qp.base, qp.qp.member.number);
        let (Base::Domain { send_cq, recv_cq, srq: own, pd }, Some(number)) = base else {
            return invalid(format!("{name} has no queues"));
        };
        if qp.qp_type() == QpType::RAW_PACKET {
            return invalid(format!(
                "completions of {name} do not say which queue pair they belong to"
            ));
        }
        if qp.qp.scatters {
            return invalid(format!(
                "{name} scatters data to completions: build it without scatter_to_cqe"
            ));
        }
        for (cq, which) in [(send_cq, "sends"), (recv_cq, "receives")] {
            if !Arc::ptr_eq(cq, &self.cq.inner) {
                return invalid(format!("the {which} of {name} complete to another queue"));
            }
        }
        if qp.qp_type() == QpType::XRC_INI && srq.is_some() {
            return invalid(format!("{name} is an XRC initiator and receives nothing: call adopt"));
        }
        let other_source = match (own, srq) {
            (None, None) => None,
            (Some(its), Some(srq)) if Arc::ptr_eq(its, &srq.queue().inner) => None,
            (Some(_), None) => Some("a shared receive queue: call adopt_on with it"),
            (Some(_), Some(_)) => Some("another shared receive queue than the one given"),
            (None, Some(_)) => Some("its own queue: build it with srq"),
        };
        if let Some(source) = other_source {
            return invalid(format!("{name} takes its receives from {source}"));
        }
        if qp.state() != QpState::RESET {
            return invalid(format!(
                "{name} is not in state RESET but in {}, and may have requests: adopt first, then connect",
                qp.state()
            ));
        }
        qp.check_fresh(VERB)?;
        let caps = qp.caps();
        let own = u64::from(caps.max_send_wr) + u64::from(caps.max_recv_wr);
        let shared = srq.map_or(0, |srq| self.qps.needed_for(srq.loans()));
        let spare = self.spare_with(VERB, own + shared)?;
        Ok((number, pd.kernel.clone(), spare))
    }

    /// Polls: returns an iterator over the requests that are over.
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
    #[doc(alias = "ibv_poll_cq")]
    #[inline(always)]
    pub fn poll(&mut self) -> std::result::Result<OwnedCompletions<'_, T>, PollError> {
        self.give_back_forgotten();
        let OwnedCompletionQueue { cq, qps, spare, spare_left, backlog } = self;
        let (completions, spare) = (cq.poll()?, *spare);
        Ok(OwnedCompletions { completions, qps, spare, spare_left, backlog })
    }

    /// Polls for at most `most` requests that are over, shows each to `visit`, and returns how many there
    /// were. The same as [`poll`](Self::poll), but memory and completion are not moved unless the visitor
    /// asks for them.
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
    #[doc(alias = "ibv_poll_cq")]
    #[inline(always)]
    pub fn poll_each(
        &mut self,
        most: usize,
        mut visit: impl FnMut(VisitedCompletion<'_, T>),
    ) -> std::result::Result<usize, PollError> {
        self.poll_visiting(most, &mut visit)
    }

    /// As [`poll_each`](Self::poll_each).
    #[inline(always)]
    pub(crate) fn poll_visiting(
        &mut self,
        most: usize,
        visit: &mut impl Visit<T>,
    ) -> std::result::Result<usize, PollError> {
        self.give_back_forgotten();
        let mut found = 0;
        loop {
            if self.spare == 0 || !self.backlog.is_empty() || !self.cq.is_direct() {
                found += self.poll_copies(most - found, visit)?;
            }
            let OwnedCompletionQueue { cq, qps, spare, backlog, .. } = self;
            let Some(mut completions) = cq.poll_direct()? else { return Ok(found) };
            match poll_in_place(qps, &mut completions, *spare, backlog, most - found, visit) {
                Ok(more) => return Ok(found + more),
                Err(more) => found += more,
            }
        }
    }

    /// Polls for what [`poll_in_place`] does not: for the backlog, for a queue without a spare entry, and
    /// for a provider whose completions are not visited in place. An entry goes back to the device before
    /// its request's memory is shown.
    #[cold]
    #[inline(never)]
    fn poll_copies(
        &mut self,
        most: usize,
        visit: &mut dyn Visit<T>,
    ) -> std::result::Result<usize, PollError> {
        let OwnedCompletionQueue { cq, qps, spare, backlog, .. } = self;
        let in_place = *spare > 0 && cq.is_direct();
        let mut completions = cq.poll()?;
        let mut found = 0;
        while found < most {
            if let Some(Finished { memory, tag, outcome }) = backlog.done.pop_front() {
                let mut slot = DetachedSlot::new();
                visit.other(VisitedCompletion::copied(slot.put(lent(memory, tag)), outcome));
                found += 1;
                continue;
            }
            if backlog.covered.is_some() {
                if let Some((loan, outcome)) = backlog.next_covered(qps) {
                    visit.other(VisitedCompletion::copied(loan, outcome));
                    found += 1;
                }
                continue;
            }
            if in_place {
                break;
            }
            let Some(completion) = completions.next() else { break };
            let (number, wr_id) = (completion.number(), completion.wr_id());
            let outcome = Outcome::of(&completion);
            completions.give_back();
            let common = qps.find(number).and_then(|entry| entry.take_back_common(wr_id));
            let loan = common.or_else(|| backlog.sort(qps, (number, wr_id), outcome));
            if let Some(loan) = loan {
                visit.other(VisitedCompletion::copied(loan, outcome));
                found += 1;
            }
        }
        Ok(found)
    }

    /// Gives the entries back to the device that a forgotten poll consumed.
    #[inline(always)]
    fn give_back_forgotten(&mut self) {
        if self.spare_left != self.spare {
            self.cq.give_back();
            self.spare_left = self.spare;
        }
    }

    /// Polls, and keeps everything for the next poll.
    pub(crate) fn poll_into_backlog(&mut self) -> std::result::Result<(), PollError> {
        let mut done = std::mem::take(&mut self.backlog.done);
        if let Ok(completions) = self.poll() {
            done.extend(completions);
        }
        self.backlog.done = done;
        self.cq.poll().map(drop)
    }

    /// Keeps a completion for the next poll.
    pub(super) fn keep(&mut self, done: Finished<Memory, T>) {
        self.backlog.done.push_back(done);
    }

    /// Asks for one event at the channel when a completion arrives; see [`CompletionQueue::req_notify`].
    ///
    /// # Errors
    ///
    /// Those of [`CompletionQueue::req_notify`].
    #[doc(alias = "ibv_req_notify_cq")]
    pub fn req_notify(&mut self, notify: Notify) -> Result<()> {
        self.cq.req_notify(notify)
    }

    /// How many completions gave nothing back, because their queue pairs are not adopted or were dropped.
    pub fn unmatched(&self) -> u64 {
        self.backlog.unmatched
    }
}

impl<T> fmt::Debug for OwnedCompletionQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnedCompletionQueue").field(&self.cq).finish()
    }
}

/// Shows completions where the device wrote them. `Ok` with their number if there are no more, or `most`;
/// `Err` with their number if the backlog comes next.
#[inline(always)]
fn poll_in_place<T>(
    qps: &QpMap<T>,
    completions: &mut Direct<'_>,
    spare: u32,
    backlog: &mut Backlog<T>,
    most: usize,
    visit: &mut impl Visit<T>,
) -> std::result::Result<usize, usize> {
    let missing = qps.missing();
    // Completions that may be visited in later rounds. In each, `left` entries are consumed before they are given back.
    let mut rest = most;
    while rest > 0 && spare > 0 {
        let mut left = (spare as usize).min(rest);
        rest -= left;
        loop {
            // Successes have a loop of their own, in which the compiler knows the status.
            while left > 0 {
                let Some(completion) = completions.next_success() else { break };
                let (wr_id, number) = (completion.wr_id(), completion.number());
                let entry = qps.find(number).unwrap_or(missing);
                if visit.wants_sent() {
                    if let Some(sent) = entry.take_back_sent(wr_id) {
                        if let SentLoan::Returned(loan) = sent {
                            visit.sent(loan, completion);
                        }
                        left -= 1;
                        continue;
                    }
                }
                match entry.take_back_common(wr_id) {
                    Some(loan) => visit.success(VisitedCompletion::success(loan, completion)),
                    None => {
                        if !visit_other(qps, completion.reload(), backlog, &mut rest, visit) {
                            return Err(most - rest - (left - 1));
                        }
                    }
                }
                left -= 1;
            }
            if left == 0 {
                break;
            }
            match visit_next(qps, completions, backlog, &mut rest, visit) {
                None => return Ok(most - rest - left),
                Some(false) => return Err(most - rest - (left - 1)),
                Some(true) => left -= 1,
            }
        }
        completions.give_back();
    }
    Ok(most - rest)
}

/// As [`visit_other`], for the next completion of any status, if there is one.
#[cold]
#[inline(never)]
fn visit_next<T>(
    qps: &QpMap<T>,
    completions: &mut Direct<'_>,
    backlog: &mut Backlog<T>,
    rest: &mut usize,
    visit: &mut dyn Visit<T>,
) -> Option<bool> {
    let completion = completions.next()?;
    Some(visit_other(qps, completion, backlog, rest, visit))
}

/// Shows a completion that is a failure, or whose `wr_id` is not common. If it gives nothing back to a poll,
/// one more may be visited. Returns `false` if the backlog comes next.
#[cold]
#[inline(never)]
fn visit_other<T>(
    qps: &QpMap<T>,
    completion: Completion<'_>,
    backlog: &mut Backlog<T>,
    rest: &mut usize,
    visit: &mut dyn Visit<T>,
) -> bool {
    let (number, wr_id) = (completion.number(), completion.wr_id());
    let common = qps.find(number).and_then(|entry| entry.take_back_common(wr_id));
    let outcome = Outcome::of(&completion);
    match common.or_else(|| backlog.sort(qps, (number, wr_id), outcome)) {
        Some(loan) => visit.other(VisitedCompletion::in_queue(loan, completion)),
        None => *rest += 1,
    }
    backlog.covered.is_none()
}

/// The requests that one poll found to be over; see [`OwnedCompletionQueue::poll`].
pub struct OwnedCompletions<'q, T> {
    completions: Completions<'q>,
    qps: &'q QpMap<T>,
    spare: u32,
    /// Entries that may still be consumed before they are given back.
    spare_left: &'q mut u32,
    backlog: &'q mut Backlog<T>,
}

impl<T> OwnedCompletions<'_, T> {
    /// The next of the backlog.
    #[cold]
    fn next_of_backlog(&mut self) -> Option<Finished<Memory, T>> {
        if let Some(done) = self.backlog.done.pop_front() {
            return Some(done);
        }
        let (loan, outcome) = self.backlog.next_covered(self.qps)?;
        let (memory, tag) = memory_and_tag(loan.take())?;
        Some(Finished { memory, tag, outcome })
    }

    /// The loan of a completion whose `wr_id` is not common.
    #[cold]
    fn sort(&mut self, name: (u32, u64), outcome: Outcome) -> Option<Finished<Memory, T>> {
        match self.backlog.sort(self.qps, name, outcome) {
            Some(loan) => {
                let (memory, tag) = memory_and_tag(loan.take())?;
                Some(Finished { memory, tag, outcome })
            }
            None => self.next_of_backlog(),
        }
    }
}

impl<T> Iterator for OwnedCompletions<'_, T> {
    type Item = Finished<Memory, T>;

    #[inline]
    fn next(&mut self) -> Option<Finished<Memory, T>> {
        if !self.backlog.is_empty() {
            if let Some(done) = self.next_of_backlog() {
                return Some(done);
            }
        }
        loop {
            let completion = self.completions.next()?;
            let (number, wr_id) = (completion.number(), completion.wr_id());
            let outcome = Outcome::of(&completion);
            // Before the memory comes back and its place can be posted to again.
            match self.spare_left.checked_sub(1) {
                Some(left) => *self.spare_left = left,
                None => {
                    self.completions.give_back();
                    *self.spare_left = self.spare;
                }
            }
            let common = self.qps.find(number).and_then(|entry| entry.take_back_common(wr_id));
            let done = match common {
                Some(loan) => memory_and_tag(loan.take()).map(|(memory, tag)| Finished {
                    memory,
                    tag,
                    outcome,
                }),
                None => self.sort((number, wr_id), outcome),
            };
            if done.is_some() {
                return done;
            }
        }
    }
}

impl<T> Drop for OwnedCompletions<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Dropping `completions` gives the entries back.
        *self.spare_left = self.spare;
    }
}

impl<T> fmt::Debug for OwnedCompletions<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedCompletions").finish_non_exhaustive()
    }
}
