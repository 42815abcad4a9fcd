//! Requests as futures.

use super::inflight::{Admission, Broken, Inflight, OpProgress, OpTag, Side, Ticket};
use super::locking::Locking;
use super::queue::{AsyncQueuePair, AsyncSharedReceiveQueue};
use crate::error::{Error, debug_is_sentence};
use crate::first_panic::FirstPanic;
use crate::owned::{Buffer, Lend, Memory, NamedBytes, Outcome};
use crate::pd::Shared;
use crate::wc::WcStatus;
use crate::wr::{PostError, Remote, RingError, SendWr};
use rustix::io::Errno;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// What an [`Op`] posts.
#[derive(Clone, Copy, Debug)]
pub(super) enum OpRequest<'a> {
    /// Most requests are one of these three, each of which is posted by a function of its own: 179 instructions less
    /// than as `Any`.
    Send,
    Write(Remote),
    Read(Remote),
    Any(SendWr<'a>),
    Recv,
}

impl OpRequest<'_> {
    #[inline]
    fn side(&self) -> Side {
        match self {
            OpRequest::Recv => Side::Recv,
            _ => Side::Send,
        }
    }
}

/// A queue pair or shared receive queue, to which an [`Op`] is posted.
pub(super) enum OpQueue<S: Locking> {
    Qp(AsyncQueuePair<S>),
    Srq(AsyncSharedReceiveQueue<S>),
}

impl<S: Locking> OpQueue<S> {
    /// Its requests in flight.
    #[inline]
    pub(super) fn inflight(&self) -> &Inflight<S> {
        match self {
            OpQueue::Qp(qp) => qp.inflight(),
            OpQueue::Srq(srq) => srq.inflight(),
        }
    }

    /// Posts one request, which takes `memory`; an error leaves it. Runs no code of the program. `named` is what the
    /// memory said, unless it is a [`Buffer`].
    #[inline(always)]
    fn post(
        &self,
        request: &OpRequest<'_>,
        memory: &mut Memory,
        named: Option<&NamedBytes>,
        waker: Waker,
    ) -> Result<Posted, Refused> {
        match self {
            OpQueue::Qp(qp) => qp.post_one(request, memory, named, waker),
            OpQueue::Srq(srq) => srq.post_one(memory, named, waker),
        }
    }

    /// Posts a request that found the queue full, or lets it wait for room.
    #[cold]
    fn post_or_wait(
        &self,
        request: &OpRequest<'_>,
        memory: &mut Memory,
        named: Option<&NamedBytes>,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
    ) -> Result<Posted, Refused> {
        let (inflight, side) = (self.inflight(), request.side());
        if inflight.move_ends(side) {
            match self.post(request, memory, named, waker.clone()) {
                Err(Refused { error: PostError::Full, .. }) => {}
                posted => return posted,
            }
        }
        inflight.wait(side, ticket, waker);
        // Once more: a completion that came before `wait` made room and woke nobody.
        self.post(request, memory, named, waker.clone())
    }
}

/// Why a request was not posted.
pub(super) struct Refused {
    pub(super) error: PostError,
    /// Its tag, which has the waker: the caller drops it when no lock is held.
    pub(super) tag: Option<OpTag>,
}

impl From<PostError> for Refused {
    fn from(error: PostError) -> Refused {
        Refused { error, tag: None }
    }
}

/// The fate of a request that was posted.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Posted {
    /// It completes, and its loan has this `wr_id`.
    InFlight(u64),
    /// The same, but the device is gone, and nothing of the queue pair completes any more.
    Lost(u64),
    /// The queue was not rung, and the batch was dropped with the memory.
    Dropped(RingError),
}

/// A request: a future that returns how the request ended, and the memory that it worked on.
///
/// The request is posted when the future is first polled. If the queue is full it waits, and requests are
/// posted in the order in which their futures were first polled. Dropping the future before the request is
/// posted takes the request back and drops the memory. Dropping it afterwards leaves the request in flight,
/// and the queue keeps the memory until the request is over; to end it earlier,
/// [abort](super::AsyncQueuePair::abort) the connection.
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
pub struct Op<'a, L, S: Locking = Shared> {
    queue: OpQueue<S>,
    request: OpRequest<'a>,
    stage: Stage,
    /// None from when it is lent until the future has ended.
    memory: Memory,
    _memory: PhantomData<fn() -> L>,
}

// A task holds the future of the request that it waits for.
const _: () = assert!(size_of::<Op<'static, Buffer>>() <= 200);

#[derive(Clone, Copy, Debug)]
enum Stage {
    /// Not posted, with its ticket if it waits for room.
    New(Option<Ticket>),
    /// Posted, with the `wr_id` of its loan.
    Posted(u64),
    /// Not posted because of an error, which the next poll returns, with the memory if that is still there.
    Failed { has_memory: bool, kind: OpErrorKind },
    /// The future has returned how the request ended.
    Over,
}

/// A request that succeeded.
#[derive(Debug)]
pub struct Finished<L> {
    /// What the request worked on. After a receive, a [`Buffer`] is as long as its message.
    pub memory: L,
    /// How the request ended.
    pub outcome: Outcome,
}

/// A request that failed.
pub struct OpError<L> {
    /// The memory of the request; `None` if the device may still work on it, or if it was dropped with a batch that
    /// was not rung. The [`Buffer`] of a receive that
    /// was posted is empty; [`reset`](Buffer::reset) makes it as long as it was.
    pub memory: Option<L>,
    /// Why the request failed.
    pub kind: OpErrorKind,
}

/// Why a request failed.
///
/// What the program does next:
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
type OpResult<L> = Result<Finished<L>, OpError<L>>;

impl<'a, L: Lend, S: Locking> Op<'a, L, S> {
    #[inline]
    pub(super) fn new(queue: OpQueue<S>, request: OpRequest<'a>, memory: L) -> Self {
        let (memory, stage) = (memory.into_memory(), Stage::New(None));
        Op { queue, request, stage, memory, _memory: PhantomData }
    }

    /// Whether the request was posted. From then on the device works on it, even if the future is dropped.
    pub fn is_posted(&self) -> bool {
        self.wr_id().is_some()
    }

    /// Whether the request is still to be posted.
    pub(super) fn is_new(&self) -> bool {
        matches!(self.stage, Stage::New(..))
    }

    /// Posts the request if there is room. A later poll returns how it ended, even if posting failed.
    pub(super) fn poll_post(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if matches!(self.stage, Stage::Posted(_) | Stage::Failed { .. }) {
            return Poll::Ready(());
        }
        if let Poll::Ready(Err(OpError { memory, kind })) = Pin::new(&mut *self).poll(cx) {
            self.stage = Stage::Failed { has_memory: memory.is_some(), kind };
            self.memory = memory.map_or(Memory::None, L::into_memory);
            cx.waker().wake_by_ref();
            return Poll::Ready(());
        }
        if self.is_posted() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// The `wr_id` of a request that was posted.
    pub(super) fn wr_id(&self) -> Option<u64> {
        match self.stage {
            Stage::Posted(wr_id) => Some(wr_id),
            _ => None,
        }
    }

    fn fail(memory: Option<Memory>, kind: OpErrorKind) -> Poll<OpResult<L>> {
        Poll::Ready(Err(OpError { memory: memory.and_then(L::back), kind }))
    }

    /// Ends the future, and returns the error of [`Stage::Failed`].
    #[cold]
    fn end_failed(&mut self) -> Poll<OpResult<L>> {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Failed { has_memory, kind } => {
                let memory = self.memory.take();
                Self::fail(has_memory.then_some(memory), kind)
            }
            _ => Self::fail(None, OpErrorKind::AlreadyFinished),
        }
    }

    /// Tries to post a [new](Stage::New) request.
    ///
    /// Wakers and memory of the program may panic here. So whatever they do, the stage says what is true: nothing is
    /// taken out of it while code of the program runs.
    fn start(&mut self, waker: &Waker) -> Poll<OpResult<L>> {
        let Op { queue, request, stage, memory, .. } = self;
        let Stage::New(ticket) = stage else { return self.end_failed() };
        let (side, inflight) = (request.side(), queue.inflight());
        if ticket.is_some() || inflight.is_busy(side) {
            match inflight.admit(side, ticket, waker) {
                Admission::Granted => {}
                Admission::Wait => return Poll::Pending,
                Admission::Broken(broken) => {
                    *stage = Stage::Failed { has_memory: true, kind: broken.into() };
                    return self.end_failed();
                }
            }
        }
        // Asked without a lock.
        let named = match &*memory {
            Memory::Buffer(_) => None,
            other => Some(other.named_bytes()),
        };
        let named = named.as_ref();
        let mut posted = queue.post(request, memory, named, waker.clone());
        if let Err(Refused { error: PostError::Full, .. }) = posted {
            posted = queue.post_or_wait(request, memory, named, ticket, waker);
        }
        let (has_memory, error, tag) = match posted {
            Ok(Posted::InFlight(wr_id)) => {
                let ticket = ticket.take();
                *stage = Stage::Posted(wr_id);
                let is_late = inflight.is_late(side);
                if ticket.is_some() {
                    inflight.leave(side, ticket);
                }
                return if is_late { self.poll_in_flight(wr_id, waker) } else { Poll::Pending };
            }
            Ok(Posted::Lost(wr_id)) => {
                let ticket = ticket.take();
                *stage = Stage::Posted(wr_id);
                inflight.fail_all();
                inflight.leave(side, ticket);
                return Poll::Pending;
            }
            Err(Refused { error: PostError::Full, .. }) => return Poll::Pending,
            Ok(Posted::Dropped(error)) => (false, error.into(), None),
            Err(Refused { error, tag }) => (true, error, tag),
        };
        let ticket = ticket.take();
        *stage = Stage::Failed { has_memory, kind: OpErrorKind::Post(error) };
        let mut calls = FirstPanic::default();
        calls.catch(|| inflight.leave(side, ticket));
        calls.catch(|| drop(tag));
        calls.resume();
        self.end_failed()
    }

    /// How far a [posted](Stage::Posted) request is.
    #[inline(always)]
    fn poll_posted(&mut self, wr_id: u64, waker: &Waker) -> Poll<OpResult<L>> {
        match self.queue.inflight().take_end(wr_id) {
            Some((memory, outcome)) => self.end(memory, outcome),
            None => self.poll_in_flight(wr_id, waker),
        }
    }

    /// The same, of a request whose end is not in its slot.
    #[cold]
    #[inline(never)]
    fn poll_in_flight(&mut self, wr_id: u64, waker: &Waker) -> Poll<OpResult<L>> {
        match self.queue.inflight().progress(wr_id, waker) {
            OpProgress::Pending => Poll::Pending,
            OpProgress::Over(memory, outcome) => self.end(memory, outcome),
            OpProgress::Lost(broken) => {
                self.stage = Stage::Over;
                Self::fail(None, broken.into())
            }
        }
    }

    /// How a [posted](Stage::Posted) request ended.
    #[inline(always)]
    fn end(&mut self, mut memory: Memory, outcome: Outcome) -> Poll<OpResult<L>> {
        self.stage = Stage::Over;
        if let OpRequest::Recv = self.request {
            // Bytes behind the message are of an earlier use of the buffer.
            memory.truncate(outcome.filled());
        }
        if !outcome.is_success() {
            return Self::fail(Some(memory), OpErrorKind::Status(outcome.status));
        }
        match L::back(memory) {
            Some(memory) => Poll::Ready(Ok(Finished { memory, outcome })),
            None => Self::fail(None, OpErrorKind::DriverGone),
        }
    }
}

impl<L: Lend, S: Locking> Future for Op<'_, L, S> {
    type Output = OpResult<L>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<OpResult<L>> {
        let this = &mut *self;
        match &this.stage {
            Stage::New(..) => this.start(cx.waker()),
            Stage::Posted(wr_id) => {
                let wr_id = *wr_id;
                this.poll_posted(wr_id, cx.waker())
            }
            Stage::Failed { .. } | Stage::Over => this.end_failed(),
        }
    }
}

impl<L, S: Locking> Drop for Op<'_, L, S> {
    #[inline]
    fn drop(&mut self) {
        match &mut self.stage {
            Stage::New(ticket) => {
                self.queue.inflight().leave(self.request.side(), ticket.take());
            }
            Stage::Posted(wr_id) => self.queue.inflight().abandon(*wr_id),
            Stage::Failed { .. } | Stage::Over => {}
        }
    }
}

impl<L, S: Locking> fmt::Debug for Op<'_, L, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Op").field("request", &self.request).field("stage", &self.stage).finish()
    }
}

/// An atomic request: a future that returns the peer's eight bytes as they were before, and the buffer.
#[derive(Debug)]
#[must_use = "a request is posted when its future is polled"]
pub struct AtomicOp<'a, S: Locking = Shared>(pub(super) Op<'a, Buffer, S>);

impl<S: Locking> Future for AtomicOp<'_, S> {
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
