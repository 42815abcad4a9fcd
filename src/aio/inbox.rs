//! A stream of received messages.

use super::locking::Locking;
use super::op::{Finished, OpError, OpErrorKind, OpResult, Transfer};
use super::post_all::PostAll;
use super::qp::AsyncQueuePair;
use super::queue::{Posting, Queue};
use super::srq::AsyncSharedReceiveQueue;
use crate::owned::{Buffer, BufferPool, Outcome};
use crate::pd::Shared;
use crate::qp::QpState;
use crate::wr::PostError;
use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

/// The most receives that are missing before new ones are posted while messages are there.
const MOST_MISSING: usize = 32;

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
/// buffers of a pool. Those of messages that were returned are posted anew together: when a quarter of the inbox's depth, or 32,
/// are missing, and whenever no message is there.
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
    /// The receives, of which those that wait for room in the queue are not posted.
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
    /// of `pool`.
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
    /// of `pool`.
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

    /// Posts as many receives as there are buffers for, and returns how many are posted.
    ///
    /// [`poll_next`](Self::poll_next) does this, too, and so did the call that made the inbox, unless the queue pair was
    /// in state [`RESET`](crate::QpState::RESET), which it must have left. Then call it before the peer may send,
    /// so that its first message finds a receive; [`aio::cm`](crate::aio::cm#receives-for-the-first-message) shows
    /// where.
    ///
    /// No task is needed. The messages wake the task that polled the inbox last.
    pub fn fill(&mut self) -> usize {
        let waker = self.waker.clone();
        self.post(&waker);
        // The first one was perhaps not there when the task polled.
        if self.list.next_is_over(&waker) {
            waker.wake_by_ref();
        }
        self.list.posted()
    }

    /// Posts the receives that are missing. If one could not be posted, `poll_next` returns its error.
    fn post(&mut self, waker: &Waker) {
        if self.ended.is_some() {
            return;
        }
        // While some wait for room in the queue, the pool keeps its buffers.
        if self.list.waiting() == 0 {
            while self.list.len() < self.depth {
                let Ok(buffer) = self.pool.take() else { break };
                self.list.push(Transfer::Recv, buffer);
            }
        }
        self.list.post(waker);
        self.list.keep_one();
    }

    /// Posts the receives that are missing if they are many: each doorbell, and each lock, is for all of them.
    fn post_batch(&mut self, waker: &Waker) {
        if self.misses_many() {
            self.post(waker);
        }
    }

    fn misses_many(&self) -> bool {
        let missing = self.depth.saturating_sub(self.list.len());
        missing >= self.depth.div_ceil(4).min(MOST_MISSING)
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
            self.post_batch(cx.waker());
            let end = match self.take_over() {
                Some(end) => end,
                None => {
                    self.post(cx.waker());
                    match ready!(self.poll_first(cx.waker())) {
                        Some(end) => end,
                        None => return Poll::Pending,
                    }
                }
            };
            let end = match end {
                Ok(Finished { memory: buffer, outcome }) => Ok(Message { buffer, outcome }),
                Err(failed) => Err(failed),
            };
            let broken = end.as_ref().err().map(|failed| failed.kind);
            if broken.is_none() && !self.misses_many() {
                return Poll::Ready(end);
            }
            // The message is in `arrived` meanwhile: a waker that panics costs none.
            self.arrived = Some(end);
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

    /// The end of the first receive, if it is over and in its slot. Receives of a queue pair complete in the order in which
    /// they were posted.
    #[inline(always)]
    fn take_over(&mut self) -> Option<OpResult<Buffer>> {
        match self.list.queue().posting {
            Posting::Qp(_) => self.list.take_over(),
            Posting::Srq(_) => None,
        }
    }

    /// The end of the first receive that is over. While none is, this task is woken by the first.
    fn poll_first(&mut self, waker: &Waker) -> Poll<Option<OpResult<Buffer>>> {
        match self.list.queue().posting {
            Posting::Qp(_) => self.list.poll_first(waker),
            // Receives of a shared receive queue complete in any order.
            Posting::Srq(_) => self.list.poll_any(waker),
        }
    }

    /// Ends the stream if the connection is broken: no message can complete a receive that is still posted.
    fn end_if_broken(&mut self, kind: OpErrorKind) {
        self.ended = match (kind, &self.list.queue().posting) {
            // A driver that ended cannot be started again, and a forked child has none.
            (OpErrorKind::DriverGone | OpErrorKind::Post(PostError::Forked), _) => Some(kind),
            (OpErrorKind::Status(status) | OpErrorKind::Earlier(status), Posting::Qp(_)) => {
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
