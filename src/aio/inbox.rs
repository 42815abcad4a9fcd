//! A stream of received messages.

use super::inflight::{Admission, Side, Ticket};
use super::list::Posted;
use super::locking::Locking;
use super::op::{OpError, OpErrorKind, OpResult};
use super::qp::AsyncQueuePair;
use super::queue::{Posting, Queue, Refill};
use super::srq::AsyncSharedReceiveQueue;
use crate::first_panic::FirstPanic;
use crate::owned::{Buffer, BufferPool, Finished};
use crate::pd::Shared;
use crate::qp::QpState;
use crate::wr::PostError;
use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

/// The most receives that are missing, however deep the inbox. A batch of 32 has most of the saving: a receive takes 66
/// instructions there, and 90 alone.
const BATCH: usize = 32;

/// A stream of received messages, in the order in which they arrive. The inbox keeps receives posted, into
/// buffers of a pool.
///
/// Receives for returned messages are posted in batches: [`poll_next`](Self::poll_next) leaves as many posted as the
/// depth says when no other message is there. While others are, up to a quarter of the depth, or 31, may be missing. A
/// peer that counts on receives gets credit for that many fewer, or the program calls [`fill`](Self::fill) before it
/// grants credit.
///
/// A message is as long as the peer sent it; after a write with immediate data, whose bytes the peer wrote elsewhere,
/// it is empty. On a UD queue pair its first 40 bytes are the global route header, or zeros if there was none. A
/// dropped message's buffer goes back to its pool.
///
/// Made by [`AsyncQueuePair::inbox`] and [`AsyncSharedReceiveQueue::inbox`], which post the first receives at once,
/// unless the queue pair is in state [`RESET`](crate::QpState::RESET). A queue pair has one inbox, and no other
/// receives beside it; a shared receive queue may have several.
///
/// ```no_run
/// # use uverbs::aio::{OpError, AsyncQueuePair};
/// # use uverbs::owned::{Buffer, BufferPool};
/// # async fn f(qp: &AsyncQueuePair, pool: &BufferPool) -> Result<(), OpError<Buffer>> {
/// let mut inbox = qp.inbox(pool, 16);
/// loop {
///     let message = inbox.next().await?;
///     println!("{} bytes", message.memory.len());
/// }
/// # }
/// ```
pub struct Inbox<S: Locking = Shared> {
    queue: Arc<Queue<S>>,
    /// The receives whose messages were not returned. At most one was refused.
    posted: Posted<Buffer>,
    /// The ticket of the next one, while it waits for room.
    ticket: Option<Ticket>,
    pool: BufferPool,
    depth: usize,
    /// How many may be missing while messages are there.
    batch: usize,
    /// That of the task that polled last.
    waker: Waker,
    /// Why no more messages come; `None` while they may.
    ended: Option<OpErrorKind>,
    /// The end of a receive that `poll_next` has still to return, should code of the program panic meanwhile.
    arrived: Option<OpResult<Buffer>>,
}

impl<S: Locking> AsyncQueuePair<S> {
    /// A stream of the messages to come, with up to `depth` receives (at least one) posted ahead into buffers
    /// of `pool`; a quarter of them may be missing [while messages are there](Inbox).
    ///
    /// The first receives are posted before this returns. In state [`RESET`](crate::QpState::RESET) none can be:
    /// make the inbox after [`handshake`](crate::QpControl::handshake), before the peer learns of it, or call
    /// [`fill`](Inbox::fill) then. A datagram that finds no receive is lost.
    pub fn inbox(&self, pool: &BufferPool, depth: usize) -> Inbox<S> {
        let is_ready = self.state() != QpState::RESET;
        Inbox::new(self.queue().clone(), pool, depth, is_ready)
    }
}

impl<S: Locking> AsyncSharedReceiveQueue<S> {
    /// A stream of the messages to come, with up to `depth` receives (at least one) posted ahead into buffers
    /// of `pool`; a quarter of them may be missing [while messages are there](Inbox).
    ///
    /// A server of many clients keeps receives for all of them together, and answers by the queue pair that the
    /// message came to:
    ///
    /// ```no_run
    /// # use uverbs::{ProtectionDomain, QpType, aio::AsyncCompletionQueue, owned::BufferPool};
    /// # async fn f(cq: &AsyncCompletionQueue, pd: &ProtectionDomain, pool: &BufferPool)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// let srq = cq.adopt_srq(pd.srq_builder(256).build()?)?;
    /// let mut clients = Vec::new();
    /// for _ in 0..16 {
    ///     let qp = pd.qp_builder(cq, cq, QpType::RC).max_send_wr(16).srq(&srq).build()?;
    ///     clients.push(cq.adopt_on(qp, &srq)?);
    /// }
    /// // … `endpoint` and `handshake` of each …
    /// let mut inbox = srq.inbox(pool, 128);
    /// loop {
    ///     let message = inbox.next().await?;
    ///     if let Some(client) = clients.iter().find(|qp| qp.qpn() == message.outcome.qpn) {
    ///         client.send(message.memory).await?;
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// The first receives are posted before this returns.
    pub fn inbox(&self, pool: &BufferPool, depth: usize) -> Inbox<S> {
        Inbox::new(self.queue().clone(), pool, depth, true)
    }
}

impl<S: Locking> Inbox<S> {
    /// Posts the first receives, if the queue `is_ready` for them.
    fn new(queue: Arc<Queue<S>>, pool: &BufferPool, depth: usize, is_ready: bool) -> Self {
        let (pool, depth, waker) = (pool.clone(), depth.max(1), Waker::noop().clone());
        let (posted, batch) = (Posted::default(), depth.div_ceil(4).min(BATCH));
        let (ticket, ended, arrived) = (None, None, None);
        let mut inbox = Inbox { queue, posted, ticket, pool, depth, batch, waker, ended, arrived };
        if is_ready {
            // A receive that waits for room is posted, and its task woken, by the first `poll_next`.
            inbox.fill();
        }
        inbox
    }

    /// Posts as many receives as there are buffers for, and returns how many are posted, those included that have a
    /// message.
    ///
    /// [`poll_next`](Self::poll_next) does this, too, and so did the call that made the inbox, unless the queue pair
    /// was in state [`RESET`](crate::QpState::RESET), which it must have left. Then call it before the peer may send,
    /// so that its first message finds a receive; [`aio::cm`](crate::aio::cm#receives-for-the-first-message) shows
    /// where.
    ///
    /// No task is needed. The messages wake the task that polled the inbox last.
    pub fn fill(&mut self) -> usize {
        let (waker, before) = (self.waker.clone(), self.posted.wr_ids().count());
        // Tried again: the queue pair may have left RESET.
        let was_refused = self.is_refused() && self.posted.take_refused().is_some();
        self.post(&waker);
        // The task may wait since it polled, when these were not there, and no other end would wake it.
        let (is_new, is_first) = (self.is_refused() && !was_refused, self.posted.first().is_none());
        if self.watch_from(before, &waker) || is_new && (is_first || self.is_of_srq()) {
            waker.wake_by_ref();
        }
        self.posted.wr_ids().count()
    }

    /// Lets the message of the first receive wake the task, or of a shared receive queue that of any from `from` on.
    /// Returns whether such a receive is over, which wakes nobody, from `from` on.
    fn watch_from(&self, from: usize, waker: &Waker) -> bool {
        let places = if self.is_of_srq() { from..usize::MAX } else { 0..1 };
        let mut over = false;
        for (at, wr_id) in self.posted.wr_ids().enumerate().take(places.end).skip(places.start) {
            over |= !self.queue.inflight.watch(wr_id, waker) && at >= from;
        }
        over
    }

    /// Whether the receives are those of a shared receive queue.
    #[inline]
    fn is_of_srq(&self) -> bool {
        matches!(self.queue.posting, Posting::Srq(_))
    }

    /// Whether a receive was refused, and `poll_next` has still to return why. No other is posted until then.
    fn is_refused(&self) -> bool {
        self.posted.last().is_none() && !self.posted.is_empty()
    }

    fn missing(&self) -> usize {
        self.depth.saturating_sub(self.posted.len())
    }

    /// Posts the receives that are missing, or as many as there are buffers and room for; then the next one waits for
    /// room. If one could not be posted, `poll_next` returns its error.
    fn post(&mut self, waker: &Waker) {
        let mut waits = false;
        while self.ended.is_none() && self.missing() > 0 && !self.is_refused() {
            let inflight = &self.queue.inflight;
            if self.ticket.is_some() || inflight.is_busy(Side::Recv) {
                match inflight.admit(Side::Recv, &mut self.ticket, waker) {
                    Admission::Granted => {}
                    Admission::Wait => return,
                    Admission::Broken(broken) => {
                        self.posted.refuse(None, broken.into());
                        break;
                    }
                }
            }
            match self.refill() {
                Refill::Done | Refill::Refused => break,
                Refill::Full if waits => return,
                Refill::Full => {
                    let inflight = &self.queue.inflight;
                    waits = inflight.make_or_await_room(Side::Recv, &mut self.ticket, waker);
                }
            }
        }
        self.queue.inflight.leave(Side::Recv, self.ticket.take());
    }

    /// Posts the receives that are missing, also while other requests wait for room.
    fn refill(&mut self) -> Refill {
        let missing = self.missing();
        self.queue.post_from_pool(&self.pool, missing, &mut self.posted)
    }

    /// Whether so many receives are missing, or no other message is there, that they are to be posted: each doorbell,
    /// and each lock, is for all of them.
    #[inline]
    fn has_to_post(&self) -> bool {
        // One that is the first to wait for room keeps others from it.
        self.ticket.is_some() || self.missing() >= self.batch || !self.is_next_here()
    }

    /// Whether the next message is in its slot.
    #[inline]
    fn is_next_here(&self) -> bool {
        let is_settled = |wr_id| self.queue.inflight.is_settled(wr_id);
        self.posted.first().is_some_and(is_settled) || self.is_of_srq() && self.is_any_here()
    }

    #[cold]
    fn is_any_here(&self) -> bool {
        self.posted.wr_ids().any(|wr_id| self.queue.inflight.is_settled(wr_id))
    }

    /// Whether no more messages come, and `poll_next` has returned why.
    #[cfg(feature = "stream")]
    pub(super) fn is_over(&self) -> bool {
        self.ended.is_some() && self.arrived.is_none()
    }

    /// Polls for the next message.
    ///
    /// The first message of several inboxes, with the number of its inbox:
    ///
    /// ```no_run
    /// # use uverbs::{aio::{Inbox, OpError}, owned::{Buffer, Finished}};
    /// # async fn f(mut inboxes: Vec<Inbox>) -> Result<(usize, Finished<Buffer>), OpError<Buffer>> {
    /// use std::future::poll_fn;
    /// use std::task::Poll;
    ///
    /// let first = poll_fn(|cx| {
    ///     for (number, inbox) in inboxes.iter_mut().enumerate() {
    ///         if let Poll::Ready(message) = inbox.poll_next(cx) {
    ///             return Poll::Ready(message.map(|message| (number, message)));
    ///         }
    ///     }
    ///     Poll::Pending
    /// });
    /// first.await
    /// # }
    /// ```
    pub fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Finished<Buffer>, OpError<Buffer>>> {
        self.waker.clone_from(cx.waker());
        match self.take_first() {
            Some(message) => self.return_message(message, cx.waker()),
            None => self.poll_slowly(cx.waker()),
        }
    }

    /// The message of the first receive of a queue pair, if it is in its slot.
    #[inline(always)]
    fn take_first(&mut self) -> Option<Finished<Buffer>> {
        if self.is_of_srq() || self.arrived.is_some() {
            return None;
        }
        let first = self.posted.first()?;
        let (memory, outcome) = self.queue.take_received(first)?;
        self.posted.pop_first(first);
        Some(Finished { memory, tag: (), outcome })
    }

    /// Returns a message, with receives posted in place of those of earlier ones.
    #[inline(always)]
    fn return_message(
        &mut self,
        message: Finished<Buffer>,
        waker: &Waker,
    ) -> Poll<OpResult<Buffer>> {
        // No code of the program runs unless there is no room, or others wait.
        let is_done = !self.has_to_post()
            || self.ticket.is_none()
                && !self.queue.inflight.is_busy(Side::Recv)
                && !self.is_refused()
                && !matches!(self.refill(), Refill::Full);
        if is_done {
            return Poll::Ready(Ok(message));
        }
        self.arrived = Some(Ok(message));
        self.return_arrived(waker)
    }

    /// The same for any end, which [`arrived`](Self::arrived) keeps meanwhile: a waker that panics costs none.
    #[cold]
    #[inline(never)]
    fn return_arrived(&mut self, waker: &Waker) -> Poll<OpResult<Buffer>> {
        if matches!(self.arrived, Some(Ok(_))) && self.has_to_post() {
            self.post(waker);
        }
        self.arrived.take().map_or(Poll::Pending, Poll::Ready)
    }

    /// As [`poll_next`](Self::poll_next), for any message or none.
    #[inline(never)]
    fn poll_slowly(&mut self, waker: &Waker) -> Poll<OpResult<Buffer>> {
        if self.arrived.is_some() {
            return self.return_arrived(waker);
        }
        if let Some(kind) = self.ended {
            return Poll::Ready(Err(OpError { memory: None, kind }));
        }
        if !self.is_next_here() {
            self.post(waker);
        }
        let Some(end) = ready!(self.poll_end(waker)) else { return Poll::Pending };
        let broken = end.as_ref().err().map(|failed| failed.kind);
        self.arrived = Some(end);
        if let Some(kind) = broken {
            self.end_if_broken(kind);
        }
        self.return_arrived(waker)
    }

    /// The end of the next receive that was posted or refused. While it is pending, it wakes the task.
    fn poll_end(&mut self, waker: &Waker) -> Poll<Option<OpResult<Buffer>>> {
        let inflight = &self.queue.inflight;
        // Receives of a queue pair complete in the order in which they were posted, those of a shared receive queue in
        // any.
        let next = match self.is_of_srq() {
            false => self.posted.first(),
            true => loop {
                match inflight.first_over(self.posted.wr_ids()) {
                    None if self.posted.last().is_none() => break None,
                    None if !self.watch_from(0, waker) => return Poll::Pending,
                    None => {}
                    over => break over,
                }
            },
        };
        let Some(wr_id) = next else { return Poll::Ready(self.posted.take_refused().map(Err)) };
        let end = self.queue.poll_end(wr_id, waker);
        if end.is_ready() {
            self.posted.remove(wr_id);
        }
        end.map(Some)
    }

    /// Ends the stream if the connection is broken: no message can complete a receive that is still posted.
    fn end_if_broken(&mut self, kind: OpErrorKind) {
        self.ended = match (kind, self.is_of_srq()) {
            // A driver that ended cannot be started again, and a forked child has none.
            (OpErrorKind::DriverGone | OpErrorKind::Post(PostError::Forked), _) => Some(kind),
            (OpErrorKind::Status(status) | OpErrorKind::Earlier(status), false) => {
                Some(OpErrorKind::Earlier(status))
            }
            _ => return,
        };
        self.give_up();
    }

    /// Waits for the next message. No message is lost if the future is dropped.
    ///
    /// While the pool is empty and no receive is posted, no message arrives, and the task is not woken when
    /// a buffer comes back or the connection breaks. Give the pool as many buffers as `depth` and the messages
    /// that the program holds at once.
    ///
    /// # Errors
    ///
    /// [`OpError`] when the connection is broken. Every later call fails with [`OpErrorKind::Earlier`], which
    /// has the status of the first failure, or with [`OpErrorKind::DriverGone`]. On a shared receive queue a
    /// receive that fails does not end the stream.
    pub async fn next(&mut self) -> Result<Finished<Buffer>, OpError<Buffer>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }
}

impl<S: Locking> Inbox<S> {
    /// The receives are left to the queue.
    fn give_up(&mut self) {
        // Both call wakers of the program.
        let mut calls = FirstPanic::default();
        calls.catch(|| self.queue.inflight.leave(Side::Recv, self.ticket.take()));
        self.posted.give_up(&self.queue.inflight, &mut calls);
        calls.resume();
    }
}

impl<S: Locking> Drop for Inbox<S> {
    fn drop(&mut self) {
        self.give_up();
    }
}

impl<S: Locking> fmt::Debug for Inbox<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox")
            .field("pool", &self.pool)
            .field("depth", &self.depth)
            .field("posted", &self.posted.wr_ids().count())
            .finish_non_exhaustive()
    }
}
