//! Requests as futures.

use super::inflight::{Admission, Broken, Progress, Side, Table, Tag};
use crate::owned::{Buffer, Lend, Memory, Outcome};
use crate::wc::WcStatus;
use crate::wr::{PostError, SendWr};
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// What is to be posted.
#[derive(Clone, Copy, Debug)]
pub(super) enum Request<'a> {
    Send(SendWr<'a>),
    Recv,
}

impl Request<'_> {
    fn side(&self) -> Side {
        match self {
            Request::Send(_) => Side::Send,
            Request::Recv => Side::Recv,
        }
    }
}

/// A queue that requests can be posted to.
pub(super) trait Queue: Send + Sync {
    /// Who is to hear of requests that are over.
    fn table(&self) -> &Arc<Table>;

    /// Posts one request; what was to be lent comes back with the error, unless it is lost.
    fn post(
        &self,
        request: &Request<'_>,
        memory: Memory,
        tag: Tag,
    ) -> Result<(), (Option<Memory>, PostError)>;
}

/// A request: a future of its end, and of the memory that it works on.
///
/// It is posted when it is first polled, and waits if the queue is full: in line, so that requests
/// are posted in the order in which they were first polled. If it is dropped before it was posted,
/// it is not, and its memory is dropped with it. If it is dropped afterwards, the request goes on
/// and the queue keeps the memory until it is over: to call a request off,
/// [abort](super::QueuePair::abort) the connection.
///
/// Who stands in line has to be polled or dropped: a future that is neither, such as one that a
/// `select!` put aside, keeps those behind it waiting, as it does with tokio's semaphore. It could
/// only be overtaken by guessing how long a task may take to answer its waker, and what was first
/// polled first would no longer be posted first.
#[must_use = "a request is posted when its future is polled"]
pub struct Op<'a, L> {
    queue: Arc<dyn Queue>,
    request: Request<'a>,
    stage: Stage,
    memory: PhantomData<fn() -> L>,
}

#[derive(Debug)]
enum Stage {
    /// Not posted; with its number in line, if it stands there.
    New(Memory, Option<u64>),
    Posted(u32),
    /// It could not be posted, which nobody heard of yet.
    Failed(Option<Memory>, OpErrorKind),
    Over,
}

/// A request that succeeded.
#[derive(Debug)]
pub struct Finished<L> {
    /// What it worked on. After a receive a [`Buffer`] is as long as the message that arrived in it.
    pub memory: L,
    /// How it ended.
    pub outcome: Outcome,
}

/// A request that did not.
#[derive(Debug)]
pub struct OpError<L> {
    /// What it was to work on; `None` if the device may still do so. After a receive that was posted a
    /// [`Buffer`] is empty, and [`reset`](Buffer::reset) makes it whole.
    pub memory: Option<L>,
    /// What was wrong.
    pub cause: OpErrorKind,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpErrorKind {
    /// It could not be posted.
    Post(PostError),
    /// It was posted, and ended like this. After any such end the queue pair is in an error state.
    Status(WcStatus),
    /// An earlier request ended like this, so that this one was not posted.
    Earlier(WcStatus),
    /// The driver of the completion queue was dropped, or failed, as when the device went away.
    Undriven,
    /// The future was polled again after it had ended.
    Over,
}

impl fmt::Display for OpErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpErrorKind::Post(error) => error.fmt(f),
            OpErrorKind::Status(status) => write!(f, "the request failed: {status}"),
            OpErrorKind::Earlier(status) => write!(f, "an earlier request failed: {status}"),
            OpErrorKind::Undriven => f.write_str("the driver of the completion queue is gone"),
            OpErrorKind::Over => f.write_str("the request is over, and its end was told"),
        }
    }
}

impl<L> fmt::Display for OpError<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cause.fmt(f)
    }
}

impl<L: fmt::Debug> std::error::Error for OpError<L> {}

impl From<Broken> for OpErrorKind {
    fn from(broken: Broken) -> OpErrorKind {
        match broken {
            Broken::Failed(status) => OpErrorKind::Earlier(status),
            Broken::Undriven => OpErrorKind::Undriven,
            Broken::Forked => OpErrorKind::Post(PostError::Forked),
        }
    }
}

/// What a request comes to.
type End<L> = Result<Finished<L>, OpError<L>>;

impl<'a, L: Lend> Op<'a, L> {
    pub(super) fn new(queue: Arc<dyn Queue>, request: Request<'a>, memory: L) -> Self {
        let stage = Stage::New(memory.into_memory(), None);
        Op { queue, request, stage, memory: PhantomData }
    }

    /// Whether it was posted: from then on the device works on it, whatever becomes of the future.
    pub fn is_posted(&self) -> bool {
        matches!(self.stage, Stage::Posted(_))
    }

    /// Whether it waits to be posted.
    pub(super) fn is_new(&self) -> bool {
        matches!(self.stage, Stage::New(..))
    }

    /// Posts the request if there is room; what it comes to is left for later.
    pub(super) fn poll_post(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if matches!(self.stage, Stage::Posted(_) | Stage::Failed(..)) {
            return Poll::Ready(());
        }
        if let Poll::Ready(Err(OpError { memory, cause })) = Pin::new(&mut *self).poll(cx) {
            self.stage = Stage::Failed(memory.map(L::into_memory), cause);
            cx.waker().wake_by_ref();
            return Poll::Ready(());
        }
        if self.is_posted() { Poll::Ready(()) } else { Poll::Pending }
    }

    fn fail(memory: Option<Memory>, cause: OpErrorKind) -> Poll<End<L>> {
        Poll::Ready(Err(OpError { memory: memory.and_then(L::back), cause }))
    }

    /// Tries to post the request. It is over unless the stage says otherwise.
    fn start(&mut self, memory: Memory, mut number: Option<u64>, waker: &Waker) -> Poll<End<L>> {
        let side = self.request.side();
        let table = self.queue.table();
        let cell = match table.admit(side, &mut number, waker) {
            Admission::Open(cell) => cell,
            Admission::Wait => {
                self.stage = Stage::New(memory, number);
                return Poll::Pending;
            }
            Admission::Broken(broken) => return Self::fail(Some(memory), broken.into()),
        };
        let tag = || Tag { table: table.clone(), cell, side };
        let mut posted = self.queue.post(&self.request, memory, tag());
        if let Err((memory, PostError::Full)) = &mut posted {
            table.wait(side, &mut number, waker);
            // What completed before woke nobody.
            if let Some(memory) = memory.take() {
                posted = self.queue.post(&self.request, memory, tag());
            }
        }
        match posted {
            Ok(()) => {
                table.leave(side, &mut number);
                self.stage = Stage::Posted(cell);
                if side == Side::Recv {
                    table.posted();
                }
                Poll::Pending
            }
            Err((Some(memory), PostError::Full)) => {
                table.dismiss(cell);
                self.stage = Stage::New(memory, number);
                Poll::Pending
            }
            Err((memory, error)) => {
                table.dismiss(cell);
                table.leave(side, &mut number);
                Self::fail(memory, OpErrorKind::Post(error))
            }
        }
    }
}

impl<L: Lend> Future for Op<'_, L> {
    type Output = End<L>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<End<L>> {
        let this = &mut *self;
        match std::mem::replace(&mut this.stage, Stage::Over) {
            Stage::New(memory, number) => this.start(memory, number, cx.waker()),
            Stage::Posted(cell) => match this.queue.table().progress(cell, cx.waker()) {
                Progress::UnderWay => {
                    this.stage = Stage::Posted(cell);
                    Poll::Pending
                }
                Progress::Over(mut memory, outcome) => {
                    if let Request::Recv = this.request {
                        // Behind what arrived is what an earlier holder left, perhaps for another peer.
                        memory.truncate(outcome.filled());
                    }
                    if !outcome.is_success() {
                        return Self::fail(Some(memory), OpErrorKind::Status(outcome.status));
                    }
                    match L::back(memory) {
                        Some(memory) => Poll::Ready(Ok(Finished { memory, outcome })),
                        None => Self::fail(None, OpErrorKind::Undriven),
                    }
                }
                Progress::Lost(broken) => Self::fail(None, broken.into()),
            },
            Stage::Failed(memory, cause) => Self::fail(memory, cause),
            Stage::Over => Self::fail(None, OpErrorKind::Over),
        }
    }
}

impl<L> Drop for Op<'_, L> {
    fn drop(&mut self) {
        match &mut self.stage {
            Stage::New(_, number) => self.queue.table().leave(self.request.side(), number),
            Stage::Posted(cell) => self.queue.table().abandon(*cell),
            Stage::Failed(..) | Stage::Over => {}
        }
    }
}

impl<L> fmt::Debug for Op<'_, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Op").field("request", &self.request).field("stage", &self.stage).finish()
    }
}

/// An atomic request: a future of what the peer's eight bytes were before, and of the buffer that
/// they came back in.
#[derive(Debug)]
#[must_use = "a request is posted when its future is polled"]
pub struct AtomicOp<'a>(pub(super) Op<'a, Buffer>);

impl Future for AtomicOp<'_> {
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
