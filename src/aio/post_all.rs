//! Lists of requests that are posted together.

use super::inflight::{Admission, Side, Ticket};
use super::locking::Locking;
use super::op::{OpError, OpErrorKind, OpResult, Request, Transfer};
use super::queue::{Posting, Queue};
use crate::first_panic::FirstPanic;
use crate::owned::Lend;
use crate::pd::Shared;
use crate::wr::PostError;
use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// Requests that are posted with as few doorbells as there is room for: a future of all their ends, in the order of
/// the list, or a [stream](Self::next) of them.
///
/// Made by [`AsyncQueuePair::post_all`](super::AsyncQueuePair::post_all) and
/// [`AsyncSharedReceiveQueue::recv_all`](super::AsyncSharedReceiveQueue::recv_all). A single future rings the doorbell for its
/// own request; of a list, as many requests as there is room for take one doorbell, one lock and one waker.
///
/// The requests are posted when the list is first polled, in their order. Those that find the queue full wait together:
/// they are posted before the requests of futures that were first polled later. A request that is refused ends with its
/// error, and those behind it are posted nevertheless. Dropping the list takes back what is not posted; what is posted goes
/// on, and the queue keeps its memory until it is over.
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
    /// Requests that are not posted.
    waiting: VecDeque<(R, L)>,
    /// The ticket of the first of them, while it waits for room on this side.
    ticket: Option<Ticket>,
    side: Side,
    /// Requests whose ends were not returned: the `wr_id` of a loan, or the reason why it was not posted.
    posted: VecDeque<Result<u64, Box<OpError<L>>>>,
    /// Ends that the future has found.
    ends: Vec<OpResult<L>>,
}

/// No part of it is pinned.
impl<L, S: Locking, R: Request> Unpin for PostAll<L, S, R> {}

impl<L: Lend, S: Locking, R: Request> PostAll<L, S, R> {
    pub(super) fn new(
        queue: Arc<Queue<S>>,
        requests: impl IntoIterator<Item = (R, L)>,
    ) -> PostAll<L, S, R> {
        let (waiting, posted) = (requests.into_iter().collect(), VecDeque::new());
        PostAll { queue, waiting, ticket: None, side: Side::Send, posted, ends: Vec::new() }
    }

    /// How many requests are not posted yet.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The end of the next request; `None` after the last one. If the future is dropped, no end is lost.
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
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<OpResult<L>>> {
        if self.posted.is_empty() {
            self.post(cx.waker());
        }
        if let Some(end) = self.take_first() {
            return Poll::Ready(Some(end));
        }
        // All that was over has been returned: there is room again.
        self.post(cx.waker());
        match self.poll_first(cx.waker()) {
            Poll::Ready(None) if !self.waiting.is_empty() => Poll::Pending,
            end => end,
        }
    }

    /// The end of the first request, if it was refused, or is over and in its slot.
    #[inline(always)]
    pub(super) fn take_first(&mut self) -> Option<OpResult<L>> {
        match self.posted.front()? {
            Ok(wr_id) => {
                let (wr_id, queue) = (*wr_id, &self.queue);
                let loan = queue.inflight.take_settled(wr_id)?;
                self.posted.pop_front();
                match queue.end_of_settled(wr_id, loan) {
                    Poll::Ready(end) => Some(end),
                    // It never is.
                    Poll::Pending => None,
                }
            }
            Err(_) => refused(self.posted.pop_front()?),
        }
    }

    /// The end of the first request. While it is pending, it wakes the task.
    #[cold]
    pub(super) fn poll_first(&mut self, waker: &Waker) -> Poll<Option<OpResult<L>>> {
        let Some(Ok(wr_id)) = self.posted.front() else { return Poll::Ready(self.take_first()) };
        let end = self.queue.poll_end(*wr_id, waker);
        if end.is_ready() {
            self.posted.pop_front();
        }
        end.map(Some)
    }

    /// Posts what there is room for. Otherwise the first request that is left waits for room.
    ///
    /// Memory and wakers of the program may panic here, and find the list as it is.
    pub(super) fn post(&mut self, waker: &Waker) {
        let mut may_move = true;
        let mut waits = false;
        while let Some((request, _)) = self.waiting.front() {
            let side = request.kind().side();
            if side != self.side {
                self.leave();
                self.side = side;
            }
            let inflight = &self.queue.inflight;
            if self.ticket.is_some() || inflight.is_busy(side) {
                match inflight.admit(side, &mut self.ticket, waker) {
                    Admission::Granted => {}
                    Admission::Wait => return,
                    Admission::Broken(broken) => return self.refuse_all(broken.into()),
                }
            }
            // First as a single request is: 32 writes take 201 instructions each, and what is left takes more.
            self.queue.try_post_list(side, &mut self.waiting, &mut self.posted);
            if self.waiting.is_empty() {
                break;
            }
            match self.queue.post_list(side, &mut self.waiting, &mut self.posted) {
                Ok(()) => continue,
                Err(PostError::Full) if waits => return,
                Err(PostError::Full) => {
                    // As a single request: ends that nobody fetched make room, and a completion that came before `wait`
                    // made room and woke nobody.
                    if !(std::mem::take(&mut may_move) && inflight.move_ends(side)) {
                        inflight.wait(side, &mut self.ticket, waker);
                        waits = true;
                    }
                }
                Err(error) => {
                    if let Some((_, memory)) = self.waiting.pop_front() {
                        self.refuse(memory, OpErrorKind::Post(error));
                    }
                }
            }
        }
        self.leave();
    }

    /// Whether the requests are receives of a shared receive queue.
    #[inline]
    pub(super) fn is_of_srq(&self) -> bool {
        matches!(self.queue.posting, Posting::Srq(_))
    }

    /// Appends a request.
    pub(super) fn push(&mut self, request: R, memory: L) {
        self.waiting.push_back((request, memory));
    }

    /// How many requests there are whose ends were not returned.
    pub(super) fn len(&self) -> usize {
        self.waiting.len() + self.posted.len()
    }

    /// How many of them were posted, those that are over included.
    pub(super) fn posted(&self) -> usize {
        self.posted.iter().flatten().count()
    }

    /// Drops all requests that wait for room but the first, and all that were refused behind another one.
    pub(super) fn keep_one(&mut self) {
        self.waiting.truncate(1);
        if self.posted.back().is_some_and(Result::is_err) {
            let mut refused = 0;
            self.posted.retain(|posted| {
                refused += u32::from(posted.is_err());
                posted.is_ok() || refused == 1
            });
        }
    }

    /// Drops all requests, as if the list were dropped.
    pub(super) fn clear(&mut self) {
        let mut calls = FirstPanic::default();
        calls.catch(|| self.waiting.clear());
        calls.catch(|| self.give_up());
        calls.resume();
    }

    /// Whether the next end is in its slot: that of the first request, or of any of a shared receive queue.
    #[inline(always)]
    pub(super) fn next_is_settled(&self) -> bool {
        let mut posted = self.posted.iter().flatten();
        let is_settled = |wr_id: &u64| self.queue.inflight.is_settled(*wr_id);
        match self.is_of_srq() {
            false => posted.next().is_some_and(is_settled),
            true => posted.any(is_settled),
        }
    }

    /// Lets the end of the first request wake the task, or of a shared receive queue that of any from place `from` on. Returns
    /// whether such an end is there, which wakes nobody, of a request from place `from` on.
    pub(super) fn watch_from(&self, from: usize, waker: &Waker) -> bool {
        let places = if self.is_of_srq() { from..self.posted.len() } else { 0..1 };
        let mut over = false;
        for (at, posted) in places.clone().zip(self.posted.iter().skip(places.start)) {
            let inflight = &self.queue.inflight;
            let is_pending = posted.as_ref().is_ok_and(|wr_id| inflight.watch(*wr_id, waker));
            over |= at >= from && !is_pending;
        }
        over
    }

    /// The end of the request that was over before the others. The end of one that was refused comes after them.
    pub(super) fn take_earliest(&mut self, waker: &Waker) -> Option<OpResult<L>> {
        let mut places = (0..).zip(&self.posted);
        let over = self.queue.inflight.first_over(self.posted.iter().flatten().copied());
        let at = match over {
            Some(nth) => places.filter(|(_, posted)| posted.is_ok()).nth(nth),
            None => places.find(|(_, posted)| posted.is_err()),
        };
        let (at, _) = at?;
        match self.posted.get(at)? {
            Ok(wr_id) => match self.queue.poll_end(*wr_id, waker) {
                Poll::Ready(end) => {
                    self.posted.remove(at);
                    Some(end)
                }
                Poll::Pending => None,
            },
            Err(_) => refused(self.posted.remove(at)?),
        }
    }

    /// As [`take_earliest`](Self::take_earliest). While no request is over, this task is woken when one is.
    pub(super) fn poll_earliest(&mut self, waker: &Waker) -> Poll<Option<OpResult<L>>> {
        loop {
            if let Some(end) = self.take_earliest(waker) {
                return Poll::Ready(Some(end));
            }
            if !self.watch_from(0, waker) {
                return Poll::Pending;
            }
        }
    }

    fn refuse(&mut self, memory: L, kind: OpErrorKind) {
        self.posted.push_back(Err(Box::new(OpError { memory: Some(memory), kind })));
    }

    /// The queue takes no more requests.
    #[cold]
    fn refuse_all(&mut self, kind: OpErrorKind) {
        while let Some((_, memory)) = self.waiting.pop_front() {
            self.refuse(memory, kind);
        }
        self.leave();
    }
}

impl<L, S: Locking, R: Request> PostAll<L, S, R> {
    /// Stops waiting for room.
    fn leave(&mut self) {
        self.queue.inflight.leave(self.side, self.ticket.take());
    }

    /// Nobody waits for the requests that are posted.
    fn give_up(&mut self) {
        // All of it calls wakers, or drops memory, of the program.
        let mut calls = FirstPanic::default();
        calls.catch(|| self.leave());
        for posted in self.posted.drain(..) {
            match posted {
                Ok(wr_id) => calls.catch(|| self.queue.inflight.abandon(wr_id)),
                Err(refused) => calls.catch(|| drop(refused)),
            }
        }
        calls.resume();
    }
}

/// The end of a request that was refused.
fn refused<L>(posted: Result<u64, Box<OpError<L>>>) -> Option<OpResult<L>> {
    posted.err().map(|refused| Err(*refused))
}

/// The ends of all requests that [`next`](PostAll::next) did not return, in the order of the list.
impl<L: Lend, S: Locking, R: Request> Future for PostAll<L, S, R> {
    type Output = Vec<OpResult<L>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Vec<OpResult<L>>> {
        let this = &mut *self;
        this.ends.reserve(this.posted.len() + this.waiting.len());
        loop {
            while let Some(end) = this.take_first() {
                this.ends.push(end);
            }
            this.post(cx.waker());
            // Most end in their order: the last one wakes the task, once for all of them.
            if let Some(Ok(last)) = this.posted.back() {
                if this.queue.inflight.watch(*last, cx.waker()) {
                    return Poll::Pending;
                }
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
        self.give_up();
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
