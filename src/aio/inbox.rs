//! A stream of messages.

use super::op::{Finished, Op, OpError, OpErrorKind};
use super::queue::{QueuePair, RingToken, SharedReceiveQueue};
use crate::owned::{Buffer, BufferPool, Outcome};
use crate::pd::Shared;
use crate::wr::PostError;
use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};

/// A message that was received.
#[derive(Debug)]
pub struct Message {
    /// What arrived in it, and no more: empty after a write with immediate data, whose bytes went
    /// elsewhere. A datagram stands behind 40 bytes: a global route header, or zeros. Dropped, the
    /// buffer goes back to its pool.
    pub buffer: Buffer,
    /// How it was received.
    pub outcome: Outcome,
}

/// Messages in the order in which they arrive, received into buffers of a pool that are posted
/// ahead of them.
///
/// A queue pair's messages are the inbox's alone; the receives of a shared receive queue may have
/// several inboxes.
pub struct Inbox<S: RingToken = Shared> {
    source: Source<S>,
    pool: BufferPool,
    depth: usize,
    posted: VecDeque<Op<'static, Buffer>>,
    /// Why no message comes any more.
    ended: Option<OpErrorKind>,
}

enum Source<S: RingToken> {
    Own(QueuePair<S>),
    Shared(SharedReceiveQueue),
}

impl<S: RingToken> QueuePair<S> {
    /// A stream of the messages to come, with up to `depth` receives posted ahead.
    pub fn inbox(&self, pool: &BufferPool, depth: usize) -> Inbox<S> {
        let (source, pool) = (Source::Own(self.clone()), pool.clone());
        Inbox { source, pool, depth: depth.max(1), posted: VecDeque::new(), ended: None }
    }
}

impl SharedReceiveQueue {
    /// A stream of the messages to come, with up to `depth` receives posted ahead.
    pub fn inbox(&self, pool: &BufferPool, depth: usize) -> Inbox {
        let (source, pool) = (Source::Shared(self.clone()), pool.clone());
        Inbox { source, pool, depth: depth.max(1), posted: VecDeque::new(), ended: None }
    }
}

impl<S: RingToken> Inbox<S> {
    /// Posts receives as far as there are buffers, and answers how many are posted.
    ///
    /// [`poll_next`](Self::poll_next) does that, too; call this before the peer may send, so that
    /// its first message finds a receive. The queue pair must be past state
    /// [`RESET`](crate::QpState::RESET).
    pub fn refill(&mut self, cx: &mut Context<'_>) -> usize {
        self.post(cx);
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
            let Some(buffer) = self.pool.take() else { break };
            self.posted.push_back(match &self.source {
                Source::Own(qp) => qp.recv(buffer),
                Source::Shared(srq) => srq.recv(buffer),
            });
            // What is over at once failed, and is found by the next look.
            let posted = self.posted.back_mut().is_some_and(|op| {
                let _ = op.poll_post(cx);
                op.is_posted()
            });
            if !posted {
                break;
            }
        }
    }

    /// Whether no message comes any more, which was told.
    #[cfg(feature = "stream")]
    pub(super) fn is_over(&self) -> bool {
        self.ended.is_some()
    }

    /// Whether some stand in line for room: they are the last.
    fn has_waiting(&self) -> bool {
        self.posted.back().is_some_and(Op::is_new)
    }

    /// Nobody else polls those who stand in line before it is their turn to end.
    #[cold]
    fn post_waiting(&mut self, cx: &mut Context<'_>) {
        let waiting = self.posted.partition_point(|op| !op.is_new());
        for op in self.posted.iter_mut().skip(waiting) {
            if op.poll_post(cx).is_pending() {
                break;
            }
        }
    }

    /// The next message, when there is one.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Message, OpError<Buffer>>> {
        if let Some(cause) = self.ended {
            return Poll::Ready(Err(OpError { memory: None, cause }));
        }
        self.post(cx);
        let ended = match &self.source {
            // In the order in which they were posted.
            Source::Own(_) => match self.posted.front_mut() {
                Some(op) => Pin::new(op).poll(cx).map(|end| (0, end)),
                None => Poll::Pending,
            },
            // A queue pair that takes long to receive does not keep others waiting.
            Source::Shared(_) => {
                let ended =
                    self.posted.iter_mut().enumerate().find_map(|(at, op)| {
                        match Pin::new(op).poll(cx) {
                            Poll::Ready(end) => Some((at, end)),
                            Poll::Pending => None,
                        }
                    });
                ended.map_or(Poll::Pending, Poll::Ready)
            }
        };
        let Poll::Ready((at, end)) = ended else { return Poll::Pending };
        match at {
            0 => drop(self.posted.pop_front()),
            _ => drop(self.posted.remove(at)),
        }
        if let Err(OpError { cause, .. }) = &end {
            self.note(*cause);
        }
        self.post(cx);
        Poll::Ready(end.map(|Finished { memory: buffer, outcome }| Message { buffer, outcome }))
    }

    /// Whether the connection is broken; then what is posted is only flushed, and of no interest.
    fn note(&mut self, cause: OpErrorKind) {
        self.ended = match (cause, &self.source) {
            // Neither driver nor connection come back, and a child of `fork` has neither.
            (OpErrorKind::Undriven | OpErrorKind::Post(PostError::Forked), _) => Some(cause),
            (OpErrorKind::Status(status) | OpErrorKind::Earlier(status), Source::Own(_)) => {
                Some(OpErrorKind::Earlier(status))
            }
            _ => return,
        };
        self.posted.clear();
    }

    /// The next message. Nothing is lost if the future is dropped.
    ///
    /// While no receive is posted because the pool is empty, nothing arrives, and nobody notices
    /// that there are buffers again, or that the connection broke: give a pool as many as are posted
    /// and held at once.
    ///
    /// # Errors
    ///
    /// [`OpError`] when the connection is broken, and from then on the same again:
    /// [`OpErrorKind::Earlier`] with the status of the first that failed, or [`OpErrorKind::Undriven`]. Receives of a
    /// shared queue fail one by one, and others go on.
    pub async fn next(&mut self) -> Result<Message, OpError<Buffer>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }
}

impl<S: RingToken> fmt::Debug for Inbox<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox")
            .field("pool", &self.pool)
            .field("depth", &self.depth)
            .field("posted", &self.posted.len())
            .finish_non_exhaustive()
    }
}
