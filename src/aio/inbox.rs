//! A stream of received messages.

use super::inflight::Inflight;
use super::locking::Locking;
use super::op::{Finished, Op, OpError, OpErrorKind, Transfer};
use super::qp::AsyncQueuePair;
use super::queue::{Posting, Queue};
use super::srq::AsyncSharedReceiveQueue;
use crate::owned::{Buffer, BufferPool, Outcome};
use crate::pd::Shared;
use crate::qp::QpState;
use crate::wr::PostError;
use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

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
    /// The queue that the receives are posted to.
    queue: Arc<Queue<S>>,
    pool: BufferPool,
    depth: usize,
    posted: VecDeque<Op<Buffer, S>>,
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
        let posted = VecDeque::new();
        let waker = Waker::noop().clone();
        let mut inbox = Inbox { queue, pool, depth, posted, waker, ended: None, arrived: None };
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
        self.post(&mut Context::from_waker(&waker));
        self.posted.iter().filter(|op| op.is_posted()).count()
    }

    fn post(&mut self, cx: &mut Context<'_>) {
        if self.ended.is_some() {
            return;
        }
        if self.has_waiting() {
            self.post_waiting(cx);
        }
        while self.posted.len() < self.depth && !self.has_waiting() {
            let Ok(buffer) = self.pool.take() else { break };
            self.posted.push_back(Op::new(self.queue.clone(), Transfer::Recv, buffer));
            // If the receive could not be posted, `poll_next` returns its error.
            let posted = self.posted.back_mut().is_some_and(|op| {
                let _ = op.poll_post(cx);
                op.is_posted()
            });
            if !posted {
                break;
            }
        }
    }

    /// Whether no more messages come, and `poll_next` has returned why.
    #[cfg(feature = "stream")]
    pub(super) fn is_over(&self) -> bool {
        self.ended.is_some() && self.arrived.is_none()
    }

    /// Whether some receives wait for room in the queue; they are the last in `posted`.
    fn has_waiting(&self) -> bool {
        self.posted.back().is_some_and(Op::is_new)
    }

    /// Tries again to post the receives that wait for room, which `poll_next` does not poll.
    #[cold]
    fn post_waiting(&mut self, cx: &mut Context<'_>) {
        let waiting = self.posted.partition_point(|op| !op.is_new());
        for op in self.posted.iter_mut().skip(waiting) {
            if op.poll_post(cx).is_pending() {
                break;
            }
        }
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
            self.post(cx);
            ready!(self.poll_posted(cx));
        }
        // The message is in `arrived` meanwhile: a waker that panics costs none.
        self.post(cx);
        match self.arrived.take() {
            Some(end) => Poll::Ready(end),
            None => Poll::Pending,
        }
    }

    /// Polls the receives that are posted, and moves the first that is over to `arrived`.
    fn poll_posted(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let completed = match &self.queue.posting {
            // Receives of a queue pair complete in the order in which they were posted.
            Posting::Qp(_) => match self.posted.front_mut() {
                Some(op) => Pin::new(op).poll(cx).map(|end| (0, end)),
                None => Poll::Pending,
            },
            // Receives of a shared receive queue complete in any order.
            Posting::Srq(_) => {
                // While none is over, the first one may have failed to be posted.
                let at = first_over(&self.queue.inflight, &self.posted, cx).unwrap_or(0);
                match self.posted.get_mut(at) {
                    Some(op) => Pin::new(op).poll(cx).map(|end| (at, end)),
                    None => Poll::Pending,
                }
            }
        };
        let (at, end) = ready!(completed);
        let broken = end.as_ref().err().map(|failed| failed.kind);
        self.arrived =
            Some(end.map(|Finished { memory: buffer, outcome }| Message { buffer, outcome }));
        match at {
            0 => drop(self.posted.pop_front()),
            _ => drop(self.posted.remove(at)),
        }
        if let Some(kind) = broken {
            self.end_if_broken(kind);
        }
        Poll::Ready(())
    }

    /// Ends the stream if the connection is broken: no message can complete a receive that is still posted.
    fn end_if_broken(&mut self, kind: OpErrorKind) {
        self.ended = match (kind, &self.queue.posting) {
            // A driver that ended cannot be started again, and a forked child has none.
            (OpErrorKind::DriverGone | OpErrorKind::Post(PostError::Forked), _) => Some(kind),
            (OpErrorKind::Status(status) | OpErrorKind::Earlier(status), Posting::Qp(_)) => {
                Some(OpErrorKind::Earlier(status))
            }
            _ => return,
        };
        self.posted.clear();
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

/// The place of the receive that was over before the others. While there is none, this task is woken when one
/// is over.
///
fn first_over<S: Locking>(
    inflight: &Inflight<S>,
    posted: &VecDeque<Op<Buffer, S>>,
    cx: &Context<'_>,
) -> Option<usize> {
    // Those that wait for room are the last.
    let wr_ids = || posted.iter().map_while(Op::wr_id);
    loop {
        if let Some(at) = inflight.first_over(wr_ids()) {
            return Some(at);
        }
        let pending = wr_ids().all(|wr_id| inflight.watch(wr_id, cx.waker()));
        if pending {
            return None;
        }
    }
}

impl<S: Locking> fmt::Debug for Inbox<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox")
            .field("pool", &self.pool)
            .field("depth", &self.depth)
            .field("posted", &self.posted.len())
            .finish_non_exhaustive()
    }
}
