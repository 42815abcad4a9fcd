//! A stream of received messages.

use super::locking::Locking;
use super::op::{Finished, OpError, OpErrorKind, OpResult, Transfer};
use super::post_all::PostAll;
use super::qp::AsyncQueuePair;
use super::queue::Queue;
use super::srq::AsyncSharedReceiveQueue;
use crate::owned::{Buffer, BufferPool, Outcome};
use crate::pd::Shared;
use crate::qp::QpState;
use crate::wr::PostError;
use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

/// The most receives that are posted with one doorbell, and the most buffers that are taken from the pool before they are
/// posted. A list of 32 has most of the saving: a receive takes 66 instructions there, and 90 alone.
const BATCH: usize = 32;

/// A message that was received.
#[derive(Debug)]
pub struct Message {
    /// The message, at its length; empty after a write with immediate data, whose bytes the peer wrote
    /// elsewhere. On a UD queue pair the first 40 bytes are the global route header, or zeros if there was none.
    /// When the buffer is dropped it goes back to its pool.
    pub buffer: Buffer,
    /// How the receive ended.
    pub outcome: Outcome,
}

/// A stream of received messages, in the order in which they arrive. The inbox keeps receives posted, into
/// buffers of a pool.
///
/// Receives for returned messages are posted in batches: [`poll_next`](Self::poll_next) leaves as many posted as the depth
/// says when no other message is there. While others are, up to a quarter of the depth, or 31, may be missing. A peer that
/// counts on receives gets credit for that many fewer, or the program calls [`fill`](Self::fill) before it grants credit.
///
/// Made by [`AsyncQueuePair::inbox`] and [`AsyncSharedReceiveQueue::inbox`], which post the first receives at once,
/// unless the queue pair is in state [`RESET`](crate::QpState::RESET). A queue pair has one inbox, and no other receives
/// beside it; a shared receive queue may have several.
///
/// ```no_run
/// # use uverbs::aio::{OpError, AsyncQueuePair};
/// # use uverbs::owned::{Buffer, BufferPool};
/// # async fn f(qp: &AsyncQueuePair, pool: &BufferPool) -> Result<(), OpError<Buffer>> {
/// let mut inbox = qp.inbox(pool, 16);
/// loop {
///     let message = inbox.next().await?;
///     println!("{} bytes", message.buffer.len());
/// }
/// # }
/// ```
pub struct Inbox<S: Locking = Shared> {
    /// The receives. At most one waits for room in the queue, and at most one was refused.
    list: PostAll<Buffer, S>,
    pool: BufferPool,
    depth: usize,
    /// That of the task that polled last.
    waker: Waker,
    /// Why no more messages come; `None` while they may.
    ended: Option<OpErrorKind>,
    /// The end of a receive that `poll_next` has still to return, should code of the program panic meanwhile.
    arrived: Option<Result<Message, OpError<Buffer>>>,
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
    ///         client.send(message.buffer).await?;
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
        let (pool, depth) = (pool.clone(), depth.max(1));
        let (list, waker) = (PostAll::new(queue, []), Waker::noop().clone());
        let mut inbox = Inbox { list, pool, depth, waker, ended: None, arrived: None };
        if is_ready {
            // A receive that waits for room is posted, and its task woken, by the first `poll_next`.
            inbox.fill();
        }
        inbox
    }

    /// Posts as many receives as there are buffers for, and returns how many are posted, those included that have a message.
    ///
    /// [`poll_next`](Self::poll_next) does this, too, and so did the call that made the inbox, unless the queue pair was
    /// in state [`RESET`](crate::QpState::RESET), which it must have left. Then call it before the peer may send,
    /// so that its first message finds a receive; [`aio::cm`](crate::aio::cm#receives-for-the-first-message) shows
    /// where.
    ///
    /// No task is needed. The messages wake the task that polled the inbox last.
    pub fn fill(&mut self) -> usize {
        let (waker, before) = (self.waker.clone(), self.list.len() - self.list.waiting());
        self.post(&waker);
        // The task may wait since it polled, when these were not there, and no other end would wake it.
        if self.list.watch_from(before, &waker) {
            waker.wake_by_ref();
        }
        self.list.posted()
    }

    /// Posts the receives that are missing. If one could not be posted, `poll_next` returns its error.
    fn post(&mut self, waker: &Waker) {
        if self.ended.is_some() {
            return;
        }
        let mut most = BATCH;
        if self.list.waiting() != 0 {
            self.list.post(waker);
            self.list.keep_one();
            // The queue may be full again: other buffers stay in the pool.
            most = 1;
        }
        while self.list.waiting() == 0 && self.list.len() < self.depth {
            let wanted = self.depth.min(self.list.len() + most);
            while self.list.len() < wanted {
                let Ok(buffer) = self.pool.take() else { break };
                self.list.push(Transfer::Recv, buffer);
            }
            let taken = self.list.len();
            self.list.post(waker);
            self.list.keep_one();
            // The pool is empty, or receives were given up.
            if taken < wanted || self.list.len() < taken {
                break;
            }
        }
    }

    /// Posts the receives that are missing if they are many, or no other message is there: each doorbell, and each lock, is
    /// for all of them.
    fn post_batch(&mut self, waker: &Waker) {
        let missing = self.depth.saturating_sub(self.list.len());
        if missing >= self.depth.div_ceil(4).min(BATCH) || !self.list.next_is_settled() {
            self.post(waker);
        }
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
    /// # use uverbs::{aio::{Inbox, Message, OpError}, owned::Buffer};
    /// # async fn f(mut inboxes: Vec<Inbox>) -> Result<(usize, Message), OpError<Buffer>> {
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
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Message, OpError<Buffer>>> {
        self.waker.clone_from(cx.waker());
        if self.arrived.is_none() {
            if let Some(kind) = self.ended {
                return Poll::Ready(Err(OpError { memory: None, kind }));
            }
            let end = match self.take_next(cx.waker()) {
                Some(end) => end,
                None => {
                    self.post(cx.waker());
                    match ready!(self.poll_end(cx.waker())) {
                        Some(end) => end,
                        None => return Poll::Pending,
                    }
                }
            };
            let broken = end.as_ref().err().map(|failed| failed.kind);
            // The message is here while receives are posted: a waker that panics costs none.
            self.arrived =
                Some(end.map(|Finished { memory: buffer, outcome }| Message { buffer, outcome }));
            if let Some(kind) = broken {
                self.end_if_broken(kind);
            }
        }
        self.post_batch(cx.waker());
        match self.arrived.take() {
            Some(end) => Poll::Ready(end),
            None => Poll::Pending,
        }
    }

    /// The end of the next receive, if it is over.
    #[inline(always)]
    fn take_next(&mut self, waker: &Waker) -> Option<OpResult<Buffer>> {
        // Receives of a queue pair complete in the order in which they were posted, those of a shared receive queue in any.
        match self.list.is_of_srq() {
            false => self.list.take_first(),
            true => self.list.take_earliest(waker),
        }
    }

    /// The end of the next receive that was posted or refused. While it is pending, it wakes the task.
    fn poll_end(&mut self, waker: &Waker) -> Poll<Option<OpResult<Buffer>>> {
        match self.list.is_of_srq() {
            false => self.list.poll_first(waker),
            true => self.list.poll_earliest(waker),
        }
    }

    /// Ends the stream if the connection is broken: no message can complete a receive that is still posted.
    fn end_if_broken(&mut self, kind: OpErrorKind) {
        self.ended = match (kind, self.list.is_of_srq()) {
            // A driver that ended cannot be started again, and a forked child has none.
            (OpErrorKind::DriverGone | OpErrorKind::Post(PostError::Forked), _) => Some(kind),
            (OpErrorKind::Status(status) | OpErrorKind::Earlier(status), false) => {
                Some(OpErrorKind::Earlier(status))
            }
            _ => return,
        };
        self.list.clear();
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
    pub async fn next(&mut self) -> Result<Message, OpError<Buffer>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }
}

impl<S: Locking> fmt::Debug for Inbox<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox")
            .field("pool", &self.pool)
            .field("depth", &self.depth)
            .field("posted", &self.list.posted())
            .finish_non_exhaustive()
    }
}
