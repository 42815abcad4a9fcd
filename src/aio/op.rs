//! Requests as futures.

use super::inflight::{Admission, Broken, Inflight, InflightKey, OpProgress, OpTag, Side};
use super::locking::Locking;
use super::queue::{AsyncQueuePair, AsyncSharedReceiveQueue};
use crate::error::{Error, debug_is_sentence};
use crate::first_panic::FirstPanic;
use crate::owned::{Buffer, Lend, Memory, NamedBytes, Outcome};
use crate::pd::Shared;
use crate::wc::WcStatus;
use crate::wr::{PostError, RingError, SendWr};
use rustix::io::Errno;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// What an [`Op`] posts.
#[derive(Clone, Copy, Debug)]
pub(super) enum OpRequest<'a> {
    Send(SendWr<'a>),
    Recv,
}

impl OpRequest<'_> {
    fn side(&self) -> Side {
        match self {
            OpRequest::Send(_) => Side::Send,
            OpRequest::Recv => Side::Recv,
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

    #[inline]
    fn key(&self) -> InflightKey {
        match self {
            OpQueue::Qp(qp) => qp.key(),
            OpQueue::Srq(srq) => srq.key(),
        }
    }

    /// Posts one request, which takes `memory`; an error leaves it. Runs no code of the program.
    fn post(
        &self,
        request: &OpRequest<'_>,
        memory: &mut Memory,
        named: NamedBytes,
        tag: OpTag,
    ) -> Result<Posted, PostError> {
        match self {
            OpQueue::Qp(qp) => qp.post_one(request, memory, named, tag),
            OpQueue::Srq(srq) => srq.post_one(memory, named, tag),
        }
    }
}

/// The fate of a request that was posted.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Posted {
    /// It completes.
    InFlight,
    /// The device is gone: it is lent, and nothing of the queue pair completes any more.
    Lost,
    /// The queue was not rung, and the batch was dropped with the memory.
    Dropped(RingError),
}

/// The slot of a request that was admitted. It is freed unless the request is posted, also by a panic.
struct GrantedSlot<'i, S: Locking> {
    inflight: &'i Inflight<S>,
    index: u32,
}

impl<S: Locking> GrantedSlot<'_, S> {
    /// The request was posted.
    fn keep(self) {
        std::mem::forget(self);
    }
}

impl<S: Locking> Drop for GrantedSlot<'_, S> {
    fn drop(&mut self) {
        // It drops the waker that was cloned for the slot.
        FirstPanic::of_one(|| self.inflight.release(self.index));
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
    memory: PhantomData<fn() -> L>,
}

#[derive(Debug)]
enum Stage {
    /// Not posted, with its ticket if it waits for room.
    New(Memory, Option<u64>),
    /// Posted, with its slot in [`Inflight`].
    Posted(u32),
    /// Not posted because of an error, which the next poll returns.
    Failed(Option<Memory>, OpErrorKind),
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
    pub(super) fn new(queue: OpQueue<S>, request: OpRequest<'a>, memory: L) -> Self {
        let stage = Stage::New(memory.into_memory(), None);
        Op { queue, request, stage, memory: PhantomData }
    }

    /// Whether the request was posted. From then on the device works on it, even if the future is dropped.
    pub fn is_posted(&self) -> bool {
        self.slot().is_some()
    }

    /// Whether the request is still to be posted.
    pub(super) fn is_new(&self) -> bool {
        matches!(self.stage, Stage::New(..))
    }

    /// Posts the request if there is room. A later poll returns how it ended, even if posting failed.
    pub(super) fn poll_post(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if matches!(self.stage, Stage::Posted(_) | Stage::Failed(..)) {
            return Poll::Ready(());
        }
        if let Poll::Ready(Err(OpError { memory, kind })) = Pin::new(&mut *self).poll(cx) {
            self.stage = Stage::Failed(memory.map(L::into_memory), kind);
            cx.waker().wake_by_ref();
            return Poll::Ready(());
        }
        if self.is_posted() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// The slot of a request that was posted.
    pub(super) fn slot(&self) -> Option<u32> {
        match self.stage {
            Stage::Posted(index) => Some(index),
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
            Stage::Failed(memory, kind) => Self::fail(memory, kind),
            _ => Self::fail(None, OpErrorKind::AlreadyFinished),
        }
    }

    /// Tries to post a [new](Stage::New) request.
    ///
    /// Wakers and memory of the program may panic here. So whatever they do, the stage says what is true: nothing is
    /// taken out of it while code of the program runs.
    fn start(&mut self, waker: &Waker) -> Poll<OpResult<L>> {
        let Op { queue, request, stage, .. } = self;
        let Stage::New(memory, ticket) = stage else { return self.end_failed() };
        let (side, inflight) = (request.side(), queue.inflight());
        let slot = match inflight.admit(side, ticket, waker) {
            Admission::Granted(index) => GrantedSlot { inflight, index },
            Admission::Wait => return Poll::Pending,
            Admission::Broken(broken) => {
                *stage = Stage::Failed(Some(memory.take()), broken.into());
                return self.end_failed();
            }
        };
        // Asked without a lock.
        let named = memory.named_bytes();
        let index = slot.index;
        let tag = OpTag { queue: queue.key(), index, side };
        let mut posted = queue.post(request, memory, named, tag);
        if let Err(PostError::Full) = posted {
            inflight.wait(side, ticket, waker);
            // Once more: a completion that came before `wait` made room and woke nobody.
            posted = queue.post(request, memory, named, tag);
        }
        let (memory, error) = match posted {
            Ok(posted @ (Posted::InFlight | Posted::Lost)) => {
                slot.keep();
                let mut ticket = ticket.take();
                *stage = Stage::Posted(index);
                if side == Side::Recv {
                    inflight.recv_posted();
                }
                if posted == Posted::Lost {
                    inflight.fail_all();
                }
                inflight.leave(side, &mut ticket);
                return Poll::Pending;
            }
            Err(PostError::Full) => {
                drop(slot);
                return Poll::Pending;
            }
            Ok(Posted::Dropped(error)) => (None, error.into()),
            Err(error) => (Some(memory.take()), error),
        };
        let mut ticket = ticket.take();
        *stage = Stage::Failed(memory, OpErrorKind::Post(error));
        let mut calls = FirstPanic::default();
        calls.catch(|| drop(slot));
        calls.catch(|| inflight.leave(side, &mut ticket));
        calls.resume();
        self.end_failed()
    }

    /// How a [posted](Stage::Posted) request ended.
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
            Stage::Posted(index) => match this.queue.inflight().progress(*index, cx.waker()) {
                OpProgress::Pending => Poll::Pending,
                OpProgress::Over(memory, outcome) => this.end(memory, outcome),
                OpProgress::Lost(broken) => {
                    this.stage = Stage::Over;
                    Self::fail(None, broken.into())
                }
            },
            Stage::Failed(..) | Stage::Over => this.end_failed(),
        }
    }
}

impl<L, S: Locking> Drop for Op<'_, L, S> {
    fn drop(&mut self) {
        match &mut self.stage {
            Stage::New(_, ticket) => self.queue.inflight().leave(self.request.side(), ticket),
            Stage::Posted(index) => self.queue.inflight().abandon(*index),
            Stage::Failed(..) | Stage::Over => {}
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
