//! Lists of requests that are posted together.

use super::inflight::{Admission, Side, Ticket};
use super::list::Posted;
use super::locking::Locking;
use super::op::{OpErrorKind, OpResult, Request, Transfer, from_memory};
use super::queue::{Queue, end_of_sent};
use crate::first_panic::FirstPanic;
use crate::lending::waiting::Waiting;
use crate::owned::Lend;
use crate::owned::NamedBytes;
use crate::pd::Shared;
use crate::wr::PostError;
use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// Requests that are posted with as few doorbells as there is room for: a future of all their ends, in the order of
/// the list, or a [stream](Self::next) of them, with the feature `stream` as the trait.
///
/// Made by [`AsyncQueuePair::post_all`](super::AsyncQueuePair::post_all) and
/// [`AsyncSharedReceiveQueue::recv_all`](super::AsyncSharedReceiveQueue::recv_all). A single future rings the doorbell
/// for its own request; of a list, as many requests as there is room for take one doorbell, one lock and one waker.
///
/// The requests are posted when the list is first polled, in their order. Those that find the queue full wait together:
/// they are posted before the requests of futures that were first polled later, and those that [extend](Extend) the
/// list meanwhile come behind those futures. A request that is refused ends with its error, and those behind it are
/// posted nevertheless. Dropping the list takes back what is not posted; what is posted goes on, and the queue keeps
/// its memory until it is over.
///
/// ```no_run
/// # use uverbs::aio::{AsyncQueuePair, OpError, Transfer};
/// # use uverbs::{Remote, owned::Buffer};
/// # async fn f(qp: &AsyncQueuePair, pages: Vec<(Remote, Buffer)>) -> Result<Vec<Buffer>, OpError<Buffer>> {
/// let writes = pages.into_iter().map(|(to, page)| (Transfer::Write(to), page));
/// let mut free = Vec::new();
/// for end in qp.post_all(writes).await {
///     free.push(end?.memory);
/// }
/// # Ok(free) }
/// ```
///
/// Each page as soon as it is written:
///
/// ```no_run
/// # use uverbs::aio::{AsyncQueuePair, OpError, Transfer};
/// # use uverbs::{Remote, owned::Buffer};
/// # async fn f(qp: &AsyncQueuePair, to: Remote, pages: [Buffer; 3]) -> Result<(), OpError<Buffer>> {
/// let mut writes = qp.post_all(pages.map(|page| (Transfer::Write(to), page)));
/// while let Some(end) = writes.next().await {
///     println!("{} bytes are written", end?.memory.len());
/// }
/// # Ok(()) }
/// ```
#[must_use = "requests are posted when the list is polled"]
pub struct PostAll<L, S: Locking = Shared, R: Request = Transfer> {
    queue: Arc<Queue<S>>,
    waiting: Waiting<R, L>,
    /// The ticket of the first of them, while it waits for room on this side.
    ticket: Option<Ticket>,
    /// How many of them the ticket stands for: the list may have been extended since.
    turn: usize,
    side: Side,
    posted: Posted<L>,
    /// Ends that the future has found.
    ends: Vec<OpResult<L>>,
    /// The bytes of memory that was asked for them, while it is posted. It is here to be allocated once.
    answers: VecDeque<Option<NamedBytes>>,
}

/// No part of it is pinned.
impl<L, S: Locking, R: Request> Unpin for PostAll<L, S, R> {}

impl<L: Lend, S: Locking, R: Request> PostAll<L, S, R> {
    pub(super) fn new(
        queue: Arc<Queue<S>>,
        requests: impl IntoIterator<Item = (R, L)>,
    ) -> PostAll<L, S, R> {
        let (waiting, posted, ends) = (Waiting::new(requests), Posted::default(), Vec::new());
        let (side, answers) = (Side::Send, VecDeque::new());
        PostAll { queue, waiting, ticket: None, turn: 0, side, posted, ends, answers }
    }

    /// How many requests are not posted yet.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The end of the next request; `None` after the last one. If the future is dropped, no end is lost.
    ///
    /// A list that is longer than its queue keeps its place in the line while it waits for room: a request that is
    /// awaited between two ends comes behind all of the list, so await none before the last end.
    ///
    /// # Errors
    ///
    /// Those of an [`Op`](super::Op), of this request alone.
    pub async fn next(&mut self) -> Option<OpResult<L>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// As [`next`](Self::next), for code that polls.
    ///
    /// ```no_run
    /// # use std::future::poll_fn;
    /// # use uverbs::{aio::{AsyncQueuePair, OpError, Transfer}, owned::Buffer};
    /// # async fn f(qp: &AsyncQueuePair, pages: [Buffer; 3]) -> Result<(), OpError<Buffer>> {
    /// let mut sends = qp.post_all(pages.map(|page| (Transfer::Send, page)));
    /// while let Some(end) = poll_fn(|cx| sends.poll_next(cx)).await {
    ///     println!("{} bytes are sent", end?.memory.len());
    /// }
    /// # Ok(()) }
    /// ```
    #[inline(always)]
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<OpResult<L>>> {
        // Else the list posts first: others may wait behind it for the room that there is now.
        let first = if self.waiting.is_empty() { self.posted.first() } else { None };
        if let Some(wr_id) = first {
            if let Some((buffer, outcome)) = self.queue.take_sent(wr_id) {
                self.posted.pop_first(wr_id);
                return Poll::Ready(Some(end_of_sent(buffer, outcome)));
            }
        }
        match self.poll_next_slowly(cx.waker()) {
            Poll::Ready(Some(end)) => Poll::Ready(Some(from_memory(end))),
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    }

    /// As [`poll_next`](Self::poll_next), where the first end is not one that [`Queue::take_sent`] finds, or the list
    /// waits for room.
    #[inline(never)]
    fn poll_next_slowly(&mut self, waker: &Waker) -> Poll<Option<OpResult<L>>> {
        self.post(waker);
        match self.poll_first(waker) {
            Poll::Ready(None) if !self.waiting.is_empty() => Poll::Pending,
            end => end,
        }
    }

    /// Takes the ends of the first requests that are over and in their slots.
    #[inline(always)]
    fn take_ends(&mut self) {
        let PostAll { queue, posted, .. } = self;
        // Here, so that its length is in a register.
        let mut ends = std::mem::take(&mut self.ends);
        while let Some(loans) = posted.first().and_then(|first| queue.inflight.loans_here(first)) {
            let others = posted.pop_while(|wr_id| {
                let Some(loan) = loans.take_settled(wr_id) else { return false };
                queue.push_end(wr_id, loan, &mut ends);
                true
            });
            if !others {
                break;
            }
        }
        self.ends = ends;
    }

    /// The end of the first request. While it is pending, it wakes the task.
    #[cold]
    fn poll_first(&mut self, waker: &Waker) -> Poll<Option<OpResult<L>>> {
        let Some(wr_id) = self.posted.first() else {
            return Poll::Ready(self.posted.pop_refused().map(Err));
        };
        let end = self.queue.poll_end(wr_id, waker);
        if end.is_ready() {
            self.posted.pop_first(wr_id);
        }
        end.map(Some)
    }

    /// Posts what there is room for. Otherwise the first request that is left waits for room.
    ///
    /// Memory and wakers of the program may panic here, and find the list as it is.
    fn post(&mut self, waker: &Waker) {
        let mut waits = false;
        while let Some(request) = self.waiting.first() {
            let side = request.kind().side();
            if side != self.side {
                self.leave();
                self.side = side;
            }
            let inflight = &self.queue.inflight;
            if self.ticket.is_some() || inflight.is_busy(side) {
                match inflight.admit(side, &mut self.ticket, waker) {
                    Admission::Granted => {}
                    Admission::Wait => return self.begin_turn(),
                    Admission::Broken(broken) => return self.refuse_all(broken.into()),
                }
            }
            // First as a single request is, and to settle alone: the driver's part of a completion takes 64
            // instructions in place of 85.
            let left = self.waiting.len();
            if side == Side::Send {
                self.queue.try_post_list(&mut self.waiting, &mut self.posted);
            }
            if self.waiting.is_empty() {
                break;
            }
            let PostAll { queue, waiting, posted, answers, .. } = self;
            let posted = queue.post_list(side, waiting, posted, answers);
            waits &= !self.take_turn(left - self.waiting.len());
            match posted {
                Ok(()) => continue,
                Err(PostError::Full) if waits => return,
                Err(PostError::Full) => {
                    waits = self.queue.inflight.make_or_await_room(side, &mut self.ticket, waker);
                    self.begin_turn();
                }
                Err(error) => self.refuse_next(OpErrorKind::Post(error)),
            }
        }
        self.leave();
    }

    /// If there is a new ticket, it stands for all requests that wait.
    fn begin_turn(&mut self) {
        if self.turn == 0 && self.ticket.is_some() {
            self.turn = self.waiting.len();
        }
    }

    /// So many requests were posted. Returns whether that ends the turn: those behind the ticket's last one have
    /// another one, behind others that wait.
    fn take_turn(&mut self, posted: usize) -> bool {
        let ends = self.ticket.is_some() && posted >= self.turn;
        if ends {
            self.leave();
        }
        self.turn = self.turn.saturating_sub(posted);
        ends
    }

    #[cold]
    fn refuse_next(&mut self, kind: OpErrorKind) {
        let memory = self.waiting.pop();
        self.posted.refuse(memory, kind);
    }

    /// The queue takes no more requests.
    #[cold]
    fn refuse_all(&mut self, kind: OpErrorKind) {
        while !self.waiting.is_empty() {
            self.refuse_next(kind);
        }
        self.leave();
    }
}

/// Appends requests, which are posted when the list is polled next, before an end is returned. The list may have ended
/// before.
///
/// A list that is kept and extended allocates nothing once it is as long as it gets:
///
/// ```no_run
/// # use uverbs::aio::{AsyncQueuePair, OpError, Transfer};
/// # use uverbs::owned::{Buffer, BufferPool};
/// # async fn f(qp: &AsyncQueuePair, pool: &BufferPool) -> Result<(), OpError<Buffer>> {
/// let mut sends = qp.post_all([]);
/// for _ in 0..1000 {
///     sends.extend(std::iter::from_fn(|| pool.take().ok()).map(|page| (Transfer::Send, page)));
///     while let Some(end) = sends.next().await {
///         println!("{} bytes are sent", end?.memory.len());
///     }
/// }
/// # Ok(()) }
/// ```
impl<L: Lend, S: Locking, R: Request> Extend<(R, L)> for PostAll<L, S, R> {
    #[inline]
    fn extend<I: IntoIterator<Item = (R, L)>>(&mut self, requests: I) {
        self.waiting.extend(requests);
    }
}

impl<L, S: Locking, R: Request> PostAll<L, S, R> {
    /// Stops waiting for room.
    #[inline]
    fn leave(&mut self) {
        if self.ticket.is_some() {
            self.turn = 0;
            self.queue.inflight.leave(self.side, self.ticket.take());
        }
    }
}

/// The ends of all requests that [`next`](PostAll::next) did not return, in the order of the list.
impl<L: Lend, S: Locking, R: Request> Future for PostAll<L, S, R> {
    type Output = Vec<OpResult<L>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Vec<OpResult<L>>> {
        let this = &mut *self;
        this.ends.reserve(this.posted.len() + this.waiting());
        loop {
            this.take_ends();
            this.post(cx.waker());
            // Most end in their order: the last one wakes the task, once for all of them.
            if this.posted.last().is_some_and(|last| this.queue.inflight.watch(last, cx.waker())) {
                return Poll::Pending;
            }
            match this.poll_first(cx.waker()) {
                Poll::Ready(Some(end)) => this.ends.push(end),
                Poll::Ready(None) if this.waiting.is_empty() => {
                    return Poll::Ready(std::mem::take(&mut this.ends));
                }
                Poll::Ready(None) | Poll::Pending => return Poll::Pending,
            }
        }
    }
}

impl<L, S: Locking, R: Request> Drop for PostAll<L, S, R> {
    fn drop(&mut self) {
        if self.ticket.is_none() && self.posted.is_empty() {
            return;
        }
        // All of it calls wakers, or drops memory, of the program.
        let mut calls = FirstPanic::default();
        calls.catch(|| self.leave());
        self.posted.give_up(&self.queue.inflight, &mut calls);
        calls.resume();
    }
}

impl<L, S: Locking, R: Request> fmt::Debug for PostAll<L, S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostAll")
            .field("waiting", &self.waiting.len())
            .field("posted", &self.posted.len())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
