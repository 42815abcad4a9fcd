//! Requests as futures.

use super::inflight::{Admission, Broken, Side, Ticket};
use super::locking::Locking;
use super::queue::{PostFailure, Queue, Tried, Turn, end_of_sent};
use crate::error::{Error, debug_is_sentence};
use crate::first_panic::FirstPanic;
use crate::owned::{Buffer, Finished, Lend, Outcome};
use crate::pd::Shared;
use crate::wc::WcStatus;
use crate::wr::{PostError, Remote, SendWr};
use rustix::io::Errno;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// A request that needs nothing but its memory, and for a write or a read the peer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// A message for the peer's next receive.
    Send,
    /// A write to the peer.
    Write(Remote),
    /// A read of as many bytes as the memory has.
    Read(Remote),
    /// A receive.
    Recv,
}

/// A request that an [`Op`] posts: a [`Transfer`], or any [`SendWr`]. Implemented by these two.
pub trait Request: sealed::Request {}

impl Request for Transfer {}
impl Request for SendWr<'_> {}

mod sealed {
    use super::{SendWr, Transfer};

    pub trait Request: Copy {
        fn kind(&self) -> Kind<'_>;
    }

    /// Either kind of request.
    #[derive(Clone, Copy, Debug)]
    pub enum Kind<'a> {
        /// Each of these is posted by a function of its own: 179 instructions less than by that of `Any`.
        Transfer(Transfer),
        Any(&'a SendWr<'a>),
    }

    impl Request for Transfer {
        #[inline(always)]
        fn kind(&self) -> Kind<'_> {
            Kind::Transfer(*self)
        }
    }

    impl Request for SendWr<'_> {
        #[inline(always)]
        fn kind(&self) -> Kind<'_> {
            Kind::Any(self)
        }
    }
}

pub(super) use sealed::Kind;

impl Kind<'_> {
    #[inline(always)]
    pub(super) fn side(&self) -> Side {
        match self {
            Kind::Transfer(Transfer::Recv) => Side::Recv,
            _ => Side::Send,
        }
    }
}

/// A request: a future that returns how the request ended, and the memory that it worked on.
///
/// The request is posted when the future is first polled. If the queue is full it waits, and requests are
/// posted in the order in which their futures were first polled. Dropping the future before the request is
/// posted takes the request back and drops the memory. Dropping it afterwards leaves the request in flight,
/// and the queue keeps the memory until the request is over; to end it earlier,
/// [abort](super::AsyncQueuePair::abort) the connection.
///
/// Sends, writes, reads and receives have one type, `Op<L>`, whatever queue they are of. That of
/// [`post`](super::AsyncQueuePair::post) holds the whole [`SendWr`], and is larger.
///
/// A future that waits for room in the queue has to be polled when it is woken, or dropped. If a program does
/// neither, the futures behind it keep waiting, as with tokio's semaphore: a `select!` may set it aside, and
/// `mem::forget` loses its turn for good. The queue pair can still be [aborted](super::AsyncQueuePair::abort), which
/// fails them all.
///
/// If code of the program panics in a poll, a waker or a [`RegisteredBuffer`](crate::owned::RegisteredBuffer), the
/// future is as it was before or one step further, and may be polled again or dropped.
///
/// ```no_run
/// # use uverbs::aio::{OpError, AsyncQueuePair};
/// # use uverbs::owned::{Buffer, BufferPool};
/// # async fn f(qp: &AsyncQueuePair, pool: &BufferPool) -> Result<(), OpError<Buffer>> {
/// let buffer = pool.copy(b"hello, peer").expect("a buffer");
/// let finished = qp.send(buffer).await?;
/// let _again: Buffer = finished.memory;
/// # Ok(()) }
/// ```
///
/// A request is posted when its future is first polled, and not before:
///
/// ```no_run
/// # use uverbs::aio::AsyncQueuePair;
/// # use uverbs::owned::Buffer;
/// # use uverbs::Remote;
/// # async fn f(qp: &AsyncQueuePair, counter: Remote, buffer: Buffer, other: Buffer)
/// # -> Result<(), Box<dyn std::error::Error>> {
/// let op = qp.send(buffer);
/// println!("posted: {}, {} in flight", op.is_posted(), qp.in_flight());
/// let before = qp.compare_swap(counter, 0, 1, other).await?;
/// # drop((op, before)); Ok(()) }
/// ```
#[must_use = "a request is posted when its future is polled"]
pub struct Op<L, S: Locking = Shared, R: Request = Transfer> {
    queue: Arc<Queue<S>>,
    stage: Stage<R>,
    /// None from when it is lent until the future has ended.
    memory: Option<L>,
}

// A task holds the future of the request that it waits for.
const _: () = assert!(size_of::<Op<Buffer>>() <= 64);
const _: () = assert!(size_of::<Op<Buffer, Shared, SendWr<'static>>>() <= 192);

/// No part of it is pinned.
impl<L, S: Locking, R: Request> Unpin for Op<L, S, R> {}

/// The compiler's own way to tell the variants apart, by an unused value in `R`, takes 15 instructions more for each
/// request.
#[derive(Debug)]
#[repr(u32)]
enum Stage<R> {
    /// Not posted, as the program made it.
    New(R),
    /// Not posted at once, with its ticket if it waits for room.
    Waiting(R, Option<Ticket>),
    /// A send, a write, or another request that returns nothing, which is posted, with the `wr_id` of its loan.
    Posted(u64),
    /// Any other request that is posted, whose end [`Queue::take_sent`] would leave where it is.
    PostedOther(u64),
    /// Not posted because of an error, which the next poll returns, with the memory if that is still there.
    Failed(OpErrorKind),
    /// The future has returned how the request ended.
    Over,
}

impl<R> Stage<R> {
    /// The stage of a request that was posted.
    fn posted(request: Kind<'_>, wr_id: u64) -> Stage<R> {
        match request {
            Kind::Transfer(Transfer::Send | Transfer::Write(_)) => Stage::Posted(wr_id),
            Kind::Any(wr) if !wr.op.writes_here() => Stage::Posted(wr_id),
            _ => Stage::PostedOther(wr_id),
        }
    }
}

/// A request that failed.
pub struct OpError<L> {
    /// The memory of the request; `None` if the device may still work on it. The [`Buffer`] of a receive that was
    /// posted is empty; [`reset`](Buffer::reset) makes it as long as it was.
    pub memory: Option<L>,
    /// Why the request failed.
    pub kind: OpErrorKind,
}

/// Why a request failed.
///
/// The next step of the program:
///
/// ```no_run
/// # use uverbs::aio::{AsyncQueuePair, OpErrorKind};
/// # use uverbs::owned::Buffer;
/// # async fn f(qp: &AsyncQueuePair, message: Buffer) {
/// use uverbs::{PostError, WcStatus};
///
/// if let Err(failed) = qp.send(message).await {
///     match failed.kind {
///         // Nothing was posted, and the queue pair goes on: correct the request.
///         OpErrorKind::Post(PostError::State(state)) => println!("not connected, but in {state}"),
///         OpErrorKind::Post(error) => println!("the request itself: {error}"),
///         // The connection is over: connect another queue pair.
///         OpErrorKind::Status(WcStatus::WR_FLUSH_ERR) => println!("another request failed first"),
///         OpErrorKind::Status(status) => println!("{status}: this request ended the connection"),
///         OpErrorKind::Earlier(status) => println!("the connection ended before: {status}"),
///         // What the driver's task returned says why: create another completion queue, if the device is there.
///         OpErrorKind::DriverGone => println!("nobody polls the completion queue any more"),
///         OpErrorKind::AlreadyFinished => unreachable!("`await` does not poll again"),
///         other => println!("{other}"),
///     }
/// }
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpErrorKind {
    /// It could not be posted.
    Post(PostError),
    /// It was posted, and completed with this status. The queue pair is in an error state now, and stays in
    /// it: create and [adopt](super::AsyncCompletionQueue::adopt) another one, and connect that.
    Status(WcStatus),
    /// It was not posted, because an earlier request completed with this status, or the program
    /// [aborted](super::AsyncQueuePair::abort). The remedy is that of [`Status`](Self::Status).
    Earlier(WcStatus),
    /// The driver of the completion queue was dropped, or ended with an error, for example because the
    /// device went away. The completion queue and its queue pairs are of no use any more.
    DriverGone,
    /// The future was polled again after it had ended.
    AlreadyFinished,
}

impl fmt::Display for OpErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpErrorKind::Post(error) => error.fmt(f),
            OpErrorKind::Status(status) => write!(f, "the request failed: {status}"),
            OpErrorKind::Earlier(status) => write!(f, "an earlier request failed: {status}"),
            OpErrorKind::DriverGone => f.write_str("the driver of the completion queue is gone"),
            OpErrorKind::AlreadyFinished => {
                f.write_str("the future has ended, and must not be polled again")
            }
        }
    }
}

impl<L> fmt::Display for OpError<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)
    }
}

impl<L> std::error::Error for OpError<L> {}

debug_is_sentence!(OpError<L>);

/// For functions that return [`Error`]: `EIO` for a request that completed with an error or came after one,
/// `EPIPE` without a driver, `EINVAL` for a future that was polled after its end, and what a [`PostError`]
/// converts into. The verb is `poll_cq` for a status, and that of the `PostError`, or `post`, otherwise. The
/// memory is dropped.
impl<L> From<OpError<L>> for Error {
    fn from(failed: OpError<L>) -> Error {
        let (verb, errno) = match failed.kind {
            OpErrorKind::Post(error) => return error.into(),
            OpErrorKind::Status(_) => ("poll_cq", Errno::IO),
            OpErrorKind::Earlier(_) => ("post", Errno::IO),
            OpErrorKind::DriverGone => ("post", Errno::PIPE),
            OpErrorKind::AlreadyFinished => ("post", Errno::INVAL),
        };
        Error::new(verb, errno).detail(failed.kind.to_string())
    }
}

impl From<Broken> for OpErrorKind {
    fn from(broken: Broken) -> OpErrorKind {
        match broken {
            Broken::Failed(status) => OpErrorKind::Earlier(status),
            Broken::DriverGone => OpErrorKind::DriverGone,
            Broken::Forked => OpErrorKind::Post(PostError::Forked),
        }
    }
}

/// The output of a request's future.
pub(super) type OpResult<L> = Result<Finished<L>, OpError<L>>;

impl<L: Lend, S: Locking, R: Request> Op<L, S, R> {
    #[inline(always)]
    pub(super) fn new(queue: Arc<Queue<S>>, request: R, memory: L) -> Self {
        Op { queue, stage: Stage::New(request), memory: Some(memory) }
    }

    /// Whether the request was posted. From then on the device works on it, even if the future is dropped.
    pub fn is_posted(&self) -> bool {
        self.wr_id().is_some()
    }

    /// The `wr_id` of a request that was posted.
    fn wr_id(&self) -> Option<u64> {
        match self.stage {
            Stage::Posted(wr_id) | Stage::PostedOther(wr_id) => Some(wr_id),
            _ => None,
        }
    }

    /// Ends the future, and returns the error of [`Stage::Failed`].
    #[cold]
    #[inline(never)]
    fn end_failed(&mut self) -> Poll<OpResult<L>> {
        Poll::Ready(Err(match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Failed(kind) => OpError { memory: self.memory.take(), kind },
            _ => OpError { memory: None, kind: OpErrorKind::AlreadyFinished },
        }))
    }

    #[inline(never)]
    fn start_send(&mut self, waker: &Waker) -> Poll<OpResult<L>> {
        self.start_transfer(SendWr::send(&[]), Stage::Posted, waker)
    }

    #[inline(never)]
    fn start_write(&mut self, to: Remote, waker: &Waker) -> Poll<OpResult<L>> {
        self.start_transfer(SendWr::write(to, &[]), Stage::Posted, waker)
    }

    #[inline(never)]
    fn start_read(&mut self, from: Remote, waker: &Waker) -> Poll<OpResult<L>> {
        self.start_transfer(SendWr::read(from, &[]), Stage::PostedOther, waker)
    }

    /// Tries to post a [new](Stage::New) request as most are posted.
    #[inline(always)]
    fn start_transfer(
        &mut self,
        wr: SendWr<'_>,
        posted: fn(u64) -> Stage<R>,
        waker: &Waker,
    ) -> Poll<OpResult<L>> {
        let Op { queue, memory, .. } = self;
        if memory.as_ref().is_some_and(L::must_be_asked) {
            return self.start_any(waker);
        }
        match queue.try_post(wr, memory, waker) {
            Tried::Posted(wr_id) => {
                self.stage = posted(wr_id);
                Poll::Pending
            }
            Tried::Late(wr_id) => self.start_slowly(Some(PostFailure::Late(wr_id)), waker),
            Tried::NeedsMore => self.start_any(waker),
        }
    }

    #[inline(never)]
    fn start_recv(&mut self, waker: &Waker) -> Poll<OpResult<L>> {
        self.start_as(Kind::Transfer(Transfer::Recv), waker)
    }

    /// Tries to post a [new](Stage::New) request, whatever it needs.
    #[inline(never)]
    fn start_any(&mut self, waker: &Waker) -> Poll<OpResult<L>> {
        let Stage::New(request) = self.stage else { return self.end_failed() };
        self.start_as(request.kind(), waker)
    }

    /// Tries to post a [new](Stage::New) request.
    ///
    /// Wakers and memory of the program may panic here. So whatever they do, the stage says what is true: nothing is
    /// taken out of it while code of the program runs.
    #[inline(always)]
    fn start_as(&mut self, request: Kind<'_>, waker: &Waker) -> Poll<OpResult<L>> {
        let Op { queue, memory, .. } = self;
        let mut failed = None;
        match queue.post(request, memory, Turn::IfIdle, waker, &mut failed) {
            Some(wr_id) => {
                self.stage = Stage::posted(request, wr_id);
                Poll::Pending
            }
            None => self.start_slowly(failed, waker),
        }
    }

    /// The same for a request that waits for room, or was not posted.
    #[cold]
    #[inline(never)]
    fn start_slowly(&mut self, failed: Option<PostFailure>, waker: &Waker) -> Poll<OpResult<L>> {
        let Op { queue, stage, memory } = self;
        if let Stage::New(request) = *stage {
            *stage = Stage::Waiting(request, None);
        }
        let Stage::Waiting(request, ticket) = stage else { return self.end_failed() };
        let request = request.kind();
        let (side, inflight) = (request.side(), &queue.inflight);
        let mut posted = match failed {
            Some(failed) => Err(failed),
            None => match inflight.admit(side, ticket, waker) {
                Admission::Granted => queue.post_admitted(request, memory, waker),
                Admission::Wait => return Poll::Pending,
                Admission::Broken(broken) => {
                    *stage = Stage::Failed(broken.into());
                    return self.end_failed();
                }
            },
        };
        if posted.as_ref().is_err_and(PostFailure::is_full) {
            // The tag's waker is dropped before the request may be posted: it may panic.
            drop(std::mem::replace(&mut posted, Err(PostError::Full.into())));
            posted = queue.post_or_wait(request, memory, ticket, waker);
        }
        let (error, tag) = match posted {
            Ok(wr_id) | Err(PostFailure::Late(wr_id) | PostFailure::Lost(wr_id)) => {
                let (ticket, next) = (ticket.take(), Stage::posted(request, wr_id));
                *stage = next;
                if matches!(posted, Err(PostFailure::Lost(_))) {
                    inflight.fail_all();
                }
                inflight.leave(side, ticket);
                return match posted {
                    Err(PostFailure::Late(_)) => self.poll_in_flight(wr_id, waker),
                    _ => Poll::Pending,
                };
            }
            Err(PostFailure::Refused { error: PostError::Full, .. }) => return Poll::Pending,
            Err(PostFailure::Refused { error, tag }) => (error, tag),
        };
        let ticket = ticket.take();
        *stage = Stage::Failed(OpErrorKind::Post(error));
        let mut calls = FirstPanic::default();
        calls.catch(|| inflight.leave(side, ticket));
        calls.catch(|| drop(tag));
        calls.resume();
        self.end_failed()
    }

    /// Posts a [new](Stage::New) request that is no send or write. Beside those it would make a table of jumps, 4
    /// instructions.
    #[inline(never)]
    fn start_uncommon(&mut self, waker: &Waker) -> Poll<OpResult<L>> {
        let Stage::New(request) = &self.stage else { return self.end_failed() };
        match request.kind() {
            Kind::Transfer(Transfer::Read(from)) => self.start_read(from, waker),
            Kind::Transfer(_) => self.start_recv(waker),
            Kind::Any(_) => self.start_any(waker),
        }
    }

    /// A poll of a request that is not new, whose end [`Queue::take_sent`] did not find.
    #[inline(never)]
    fn poll_slowly(&mut self, waker: &Waker) -> Poll<OpResult<L>> {
        match self.stage {
            Stage::Posted(wr_id) | Stage::PostedOther(wr_id) => self.poll_posted(wr_id, waker),
            Stage::Waiting(..) => self.start_slowly(None, waker),
            _ => self.end_failed(),
        }
    }

    /// How far a [posted](Stage::Posted) request is.
    #[inline(always)]
    fn poll_posted(&mut self, wr_id: u64, waker: &Waker) -> Poll<OpResult<L>> {
        let Op { queue, stage, .. } = self;
        let Some(loan) = queue.inflight.take_settled(wr_id) else {
            return self.poll_in_flight(wr_id, waker);
        };
        *stage = Stage::Over;
        queue.end_of_settled(wr_id, loan)
    }

    /// The same, of a request whose end is not in its slot.
    #[cold]
    #[inline(never)]
    fn poll_in_flight(&mut self, wr_id: u64, waker: &Waker) -> Poll<OpResult<L>> {
        let end = self.queue.poll_end(wr_id, waker);
        if end.is_ready() {
            self.stage = Stage::Over;
        }
        end
    }
}

impl<L: Lend, S: Locking, R: Request> Future for Op<L, S, R> {
    type Output = OpResult<L>;

    // Inlined where the future is awaited: the end of a send or a write of a buffer stays in registers.
    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<OpResult<L>> {
        let this = &mut *self;
        let other = match &this.stage {
            Stage::New(request) => match request.kind() {
                Kind::Transfer(Transfer::Send) => this.start_send(cx.waker()),
                Kind::Transfer(Transfer::Write(to)) => this.start_write(to, cx.waker()),
                _ => this.start_uncommon(cx.waker()),
            },
            Stage::Posted(wr_id) => match this.queue.take_sent(*wr_id) {
                Some((buffer, outcome)) => {
                    this.stage = Stage::Over;
                    return Poll::Ready(end_of_sent(buffer, outcome));
                }
                None => this.poll_slowly(cx.waker()),
            },
            _ => this.poll_slowly(cx.waker()),
        };
        match other {
            Poll::Pending => Poll::Pending,
            Poll::Ready(end) => Poll::Ready(from_memory(end)),
        }
    }
}

/// An end that a function out of line has written to memory, as values of their own. Otherwise an end that is in
/// registers would be written to the same memory where both meet: 16 instructions.
#[inline(always)]
pub(super) fn from_memory<L>(end: OpResult<L>) -> OpResult<L> {
    match parts(end) {
        (Some(memory), Ok(outcome)) => Ok(Finished { memory, tag: (), outcome }),
        (memory, Err(kind)) => Err(OpError { memory, kind }),
        (None, Ok(_)) => Err(OpError { memory: None, kind: OpErrorKind::DriverGone }),
    }
}

#[inline(never)]
fn parts<L>(end: OpResult<L>) -> (Option<L>, Result<Outcome, OpErrorKind>) {
    match end {
        Ok(Finished { memory, outcome, .. }) => (Some(memory), Ok(outcome)),
        Err(OpError { memory, kind }) => (memory, Err(kind)),
    }
}

impl<L, S: Locking, R: Request> Op<L, S, R> {
    /// The future is dropped before the request is over.
    #[cold]
    #[inline(never)]
    fn give_up(&mut self) {
        match &mut self.stage {
            Stage::Waiting(request, ticket) => {
                self.queue.inflight.leave(request.kind().side(), ticket.take());
            }
            Stage::Posted(wr_id) | Stage::PostedOther(wr_id) => {
                self.queue.inflight.abandon(*wr_id);
            }
            Stage::New(_) | Stage::Failed(_) | Stage::Over => {}
        }
    }
}

impl<L, S: Locking, R: Request> Drop for Op<L, S, R> {
    #[inline]
    fn drop(&mut self) {
        if matches!(self.stage, Stage::Waiting(..) | Stage::Posted(_) | Stage::PostedOther(_)) {
            self.give_up();
        }
    }
}

impl<L, S: Locking, R: Request + fmt::Debug> fmt::Debug for Op<L, S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Op").field("stage", &self.stage).finish_non_exhaustive()
    }
}

/// An atomic request: a future that returns the peer's eight bytes as they were before, and the buffer.
#[derive(Debug)]
#[must_use = "a request is posted when its future is polled"]
pub struct AtomicOp<S: Locking = Shared>(pub(super) Op<Buffer, S, SendWr<'static>>);

impl<S: Locking> Future for AtomicOp<S> {
    type Output = Result<(u64, Buffer), OpError<Buffer>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(cx).map(|end| {
            end.map(|Finished { memory, .. }| {
                let bytes = memory.first_chunk().copied().unwrap_or_default();
                (u64::from_ne_bytes(bytes), memory)
            })
        })
    }
}
