//! Queue pairs and shared receive queues whose requests are futures.

use super::driver::DriverHandle;
use super::inflight::{Fate, Inflight, InflightKey, OpTag};
use super::locking::Locking;
use super::op::{AtomicOp, Op, OpQueue, OpRequest, Posted, Refused};
use crate::error::Error;
use crate::first_panic::FirstPanic;
use crate::number::SrqNumber;
use crate::owned::{
    AskedMemory, Buffer, Lend, LendMut, Memory, NamedBytes, OwnedQueuePair, OwnedRecvBatch,
    OwnedSendBatch, OwnedSharedReceiveQueue, PushError,
};
use crate::pd::Shared;
use crate::qp::{QpAttr, QpControl, QpState};
use crate::srq::{self, SrqInner, SrqRef};
use crate::sync::lock::AnyLock;
use crate::wr::{PostError, Remote, RingError, SendWr};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::task::Waker;

struct Inner<S: Locking> {
    /// Dropped first: `posting` then holds the last reference to the queue pair.
    control: QpControl,
    posting: S::Lock<OwnedQueuePair<OpTag, S>>,
    inflight: Arc<Inflight<S>>,
    key: InflightKey,
    /// Keeps the driver running.
    driver: Arc<DriverHandle<S>>,
}

impl<S: Locking> Drop for Inner<S> {
    fn drop(&mut self) {
        // Both call wakers, or drop memory, of the program.
        let mut calls = FirstPanic::default();
        if let Some(qp) = self.posting.get_mut() {
            if qp.shares_receives() {
                // Without a reset, the completions of its receives would be lost, and their places in the
                // shared queue with them.
                calls.catch(|| self.driver.close(qp));
            }
        }
        calls.catch(|| self.driver.unregister(self.key));
        calls.resume();
    }
}

impl<S: Locking> Inner<S> {
    #[inline(always)]
    fn post(
        &self,
        request: &OpRequest<'_>,
        memory: &mut Memory,
        named: Option<&NamedBytes>,
        waker: Waker,
    ) -> Result<Posted, Refused> {
        match (request, named) {
            (OpRequest::Write(to), None) => self.write(*to, memory, waker),
            (OpRequest::Read(from), None) => self.read(*from, memory, waker),
            (OpRequest::Send, None) => self.send(memory, waker),
            (OpRequest::Recv, named) => self.recv(memory, named, waker),
            (request, named) => self.post_any(request, memory, named, waker),
        }
    }

    #[inline(always)]
    fn tag(&self, waker: Waker) -> OpTag {
        OpTag { queue: self.key, fate: Fate::Pending(waker) }
    }

    #[inline(never)]
    fn write(&self, to: Remote, memory: &mut Memory, waker: Waker) -> Result<Posted, Refused> {
        self.post_buffer(SendWr::write(to, &[]), memory, waker)
    }

    #[inline(never)]
    fn read(&self, from: Remote, memory: &mut Memory, waker: Waker) -> Result<Posted, Refused> {
        self.post_buffer(SendWr::read(from, &[]), memory, waker)
    }

    #[inline(never)]
    fn send(&self, memory: &mut Memory, waker: Waker) -> Result<Posted, Refused> {
        self.post_buffer(SendWr::send(&[]), memory, waker)
    }

    #[inline(never)]
    fn recv(
        &self,
        memory: &mut Memory,
        named: Option<&NamedBytes>,
        waker: Waker,
    ) -> Result<Posted, Refused> {
        let mut qp = self.posting.lock().ok_or(PostError::Forked)?;
        let batch = qp.recv_batch()?;
        post_recv(batch, memory, named, self.tag(waker))
    }

    /// Posts a send that works on a buffer of a pool. `waker` is a parameter: an error drops it after the lock is
    /// released.
    #[inline(always)]
    fn post_buffer(
        &self,
        wr: SendWr<'_>,
        memory: &mut Memory,
        waker: Waker,
    ) -> Result<Posted, Refused> {
        let mut qp = self.posting.lock().ok_or(PostError::Forked)?;
        let mut batch = qp.send_batch()?;
        if let Memory::Buffer(buffer) = memory.take() {
            batch.push(wr, buffer, self.tag(waker)).map_err(|refused| put_back(refused, memory))?;
        }
        self.ring(batch)
    }

    /// Posts any send.
    #[inline(never)]
    fn post_any(
        &self,
        request: &OpRequest<'_>,
        memory: &mut Memory,
        named: Option<&NamedBytes>,
        waker: Waker,
    ) -> Result<Posted, Refused> {
        let wr = match request {
            OpRequest::Write(to) => SendWr::write(*to, &[]),
            OpRequest::Read(from) => SendWr::read(*from, &[]),
            OpRequest::Any(wr) => *wr,
            OpRequest::Send | OpRequest::Recv => SendWr::send(&[]),
        };
        let Some(named) = named else { return self.post_buffer(wr, memory, waker) };
        let mut qp = self.posting.lock().ok_or(PostError::Forked)?;
        let mut batch = qp.send_batch()?;
        let asked = AskedMemory { memory: memory.take(), named: *named };
        batch.push(wr, asked, self.tag(waker)).map_err(|refused| put_back(refused, memory))?;
        self.ring(batch)
    }

    #[inline(always)]
    fn ring(&self, batch: OwnedSendBatch<'_, OpTag, S>) -> Result<Posted, Refused> {
        let wr_id = batch.last();
        match S::ring(batch, self.driver.token()) {
            Ok(()) => Ok(Posted::InFlight(wr_id)),
            Err(error) => Ok(self.not_rung(wr_id, error)),
        }
    }

    #[cold]
    fn not_rung(&self, wr_id: u64, error: RingError) -> Posted {
        let RingError::StillQueued(_) = error else { return Posted::Dropped(error) };
        // The request stays in the queue, where the device does not look: flush it.
        let flush = self.control.modify(&QpAttr::new().state(QpState::ERR));
        // If that fails, the device is gone, and completes nothing.
        if flush.is_err() { Posted::Lost(wr_id) } else { Posted::InFlight(wr_id) }
    }
}

/// Gives back what a request was refused with.
#[cold]
fn put_back<L: Lend>(refused: PushError<L, OpTag>, memory: &mut Memory) -> Refused {
    *memory = refused.memory.into_memory();
    Refused { error: refused.error, tag: Some(refused.tag) }
}

#[inline]
fn post_recv(
    mut batch: OwnedRecvBatch<'_, OpTag>,
    memory: &mut Memory,
    named: Option<&NamedBytes>,
    tag: OpTag,
) -> Result<Posted, Refused> {
    match (memory.take(), named) {
        (Memory::Buffer(buffer), _) => {
            batch.push(buffer, tag).map_err(|refused| put_back(refused, memory))?;
        }
        (taken, Some(named)) => {
            let asked = AskedMemory { memory: taken, named: *named };
            batch.push_any(asked, tag).map_err(|refused| put_back(refused, memory))?;
        }
        // Other memory was asked.
        (_, None) => {}
    }
    let wr_id = batch.last();
    match batch.ring() {
        Err(error) if !error.stays_queued() => Ok(Posted::Dropped(error)),
        _ => Ok(Posted::InFlight(wr_id)),
    }
}

/// A queue pair whose requests are futures.
///
/// Made by [`AsyncCompletionQueue::adopt`](super::AsyncCompletionQueue::adopt). Clones are handles of the same
/// queue pair, for any number of tasks and threads. The queue pair lives as long as its last handle or
/// future. Requests are posted in the order in which their futures are first polled. Everything that is not
/// posting is behind [`Deref`], as a [`QpControl`].
///
/// A queue pair under a [`ThreadDomain`](crate::ThreadDomain) is adopted by the `AsyncCompletionQueue<Exclusive>` of
/// a [`Worker`](super::Worker), and stays with its futures on one thread.
pub struct AsyncQueuePair<S: Locking = Shared> {
    inner: Arc<Inner<S>>,
}

impl<S: Locking> Clone for AsyncQueuePair<S> {
    #[inline]
    fn clone(&self) -> Self {
        AsyncQueuePair { inner: self.inner.clone() }
    }
}

impl<S: Locking> AsyncQueuePair<S> {
    pub(super) fn new(
        qp: OwnedQueuePair<OpTag, S>,
        inflight: Arc<Inflight<S>>,
        key: InflightKey,
        driver: Arc<DriverHandle<S>>,
    ) -> Self {
        let control = QpControl { qp: (*qp).qp.clone() };
        let posting = S::Lock::new(qp);
        AsyncQueuePair { inner: Arc::new(Inner { posting, inflight, key, control, driver }) }
    }

    pub(super) fn inflight(&self) -> &Inflight<S> {
        &self.inner.inflight
    }

    #[inline(always)]
    pub(super) fn post_one(
        &self,
        request: &OpRequest<'_>,
        memory: &mut Memory,
        named: Option<&NamedBytes>,
        waker: Waker,
    ) -> Result<Posted, Refused> {
        self.inner.post(request, memory, named, waker)
    }

    #[inline]
    fn op<'a, L: Lend>(&self, request: OpRequest<'a>, memory: L) -> Op<'a, L, S> {
        Op::new(OpQueue::Qp(self.clone()), request, memory)
    }

    /// Posts any request on `memory`. `wr` itself names no memory, and its `wr_id` is not used.
    pub fn post<'a, L: Lend>(&self, wr: SendWr<'a>, memory: L) -> Op<'a, L, S> {
        self.op(OpRequest::Any(wr), memory)
    }

    /// Sends a message, which the peer's next receive takes.
    #[doc(alias = "IBV_WR_SEND")]
    #[inline]
    pub fn send<L: Lend>(&self, memory: L) -> Op<'static, L, S> {
        self.op(OpRequest::Send, memory)
    }

    /// Sends a short message, which is copied when it is posted; at most
    /// [`max_inline_data`](crate::QpCaps::max_inline_data) bytes.
    #[doc(alias = "IBV_SEND_INLINE")]
    pub fn send_inline<'a>(&self, bytes: &'a [u8]) -> Op<'a, (), S> {
        self.post(SendWr::send(&[]).inline(bytes), ())
    }

    /// Receives a message. A [`Buffer`] comes back as long as the message; of other memory,
    /// [`Outcome::filled`](crate::owned::Outcome::filled) tells how many bytes were written.
    ///
    /// On rxe a receive that is posted in state [`ERR`](crate::QpState::ERR) may stay pending until the queue
    /// pair is reset or dropped.
    #[doc(alias = "ibv_post_recv")]
    #[inline]
    pub fn recv<L: LendMut>(&self, memory: L) -> Op<'static, L, S> {
        self.op(OpRequest::Recv, memory)
    }

    /// Reads from the peer as many bytes as `memory` has.
    #[doc(alias = "IBV_WR_RDMA_READ")]
    #[inline]
    pub fn read<L: LendMut>(&self, remote: Remote, memory: L) -> Op<'static, L, S> {
        self.op(OpRequest::Read(remote), memory)
    }

    /// Writes `memory` to the peer.
    ///
    /// ```no_run
    /// # use uverbs::{Remote, aio::{AsyncQueuePair, OpError}, owned::Buffer};
    /// # async fn f(qp: &AsyncQueuePair, remote: Remote, page: Buffer) -> Result<(), OpError<Buffer>> {
    /// let page = qp.write(remote, page).await?.memory;
    /// # drop(page); Ok(()) }
    /// ```
    #[doc(alias = "IBV_WR_RDMA_WRITE")]
    #[inline]
    pub fn write<L: Lend>(&self, remote: Remote, memory: L) -> Op<'static, L, S> {
        self.op(OpRequest::Write(remote), memory)
    }

    /// Adds `add` to eight bytes of the peer, whose address is a multiple of eight. `buffer` gets the old
    /// value; it has at least eight bytes.
    #[doc(alias = "IBV_WR_ATOMIC_FETCH_AND_ADD")]
    pub fn fetch_add(&self, remote: Remote, add: u64, mut buffer: Buffer) -> AtomicOp<'static, S> {
        buffer.set_len(8);
        AtomicOp(self.post(SendWr::fetch_add(remote, add, &[]), buffer))
    }

    /// Replaces eight bytes of the peer, whose address is a multiple of eight, by `swap` if they equal
    /// `compare`. `buffer` gets the old value; it has at least eight bytes.
    #[doc(alias = "IBV_WR_ATOMIC_CMP_AND_SWP")]
    pub fn compare_swap(
        &self,
        remote: Remote,
        compare: u64,
        swap: u64,
        mut buffer: Buffer,
    ) -> AtomicOp<'static, S> {
        buffer.set_len(8);
        AtomicOp(self.post(SendWr::compare_swap(remote, compare, swap, &[]), buffer))
    }

    /// Moves the queue pair to state [`ERR`](QpState::ERR) for good. Requests in flight end with
    /// [`WR_FLUSH_ERR`](crate::WcStatus::WR_FLUSH_ERR) and give their memory back; all others fail with
    /// [`OpErrorKind::Earlier`](super::OpErrorKind::Earlier). To connect anew, create and
    /// [adopt](super::AsyncCompletionQueue::adopt) another queue pair.
    ///
    /// # Errors
    ///
    /// Those of [`QpControl::modify`]. Even then nothing can be posted afterwards.
    pub fn abort(&self) -> crate::Result<()> {
        self.inner.inflight.abort()
    }

    /// How many requests are in flight, including those whose futures were dropped.
    pub fn in_flight(&self) -> usize {
        self.inner.inflight.in_flight()
    }
}

/// Everything that is not posting.
impl<S: Locking> Deref for AsyncQueuePair<S> {
    type Target = QpControl;

    fn deref(&self) -> &QpControl {
        &self.inner.control
    }
}

impl<S: Locking> fmt::Debug for AsyncQueuePair<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.control.fmt(f)
    }
}

type Srq = OwnedSharedReceiveQueue<OpTag>;

type SrqGuard<'l, S> = <<S as Locking>::Lock<Srq> as AnyLock<Srq>>::Guard<'l>;

struct SharedInner<S: Locking> {
    /// Dropped first: `srq` then holds the last reference to the shared receive queue.
    kernel: Arc<SrqInner>,
    srq: S::Lock<Srq>,
    inflight: Arc<Inflight<S>>,
    key: InflightKey,
    driver: Arc<DriverHandle<S>>,
}

impl<S: Locking> Drop for SharedInner<S> {
    fn drop(&mut self) {
        self.driver.unregister(self.key);
    }
}

/// A shared receive queue whose receives are futures.
///
/// Made by [`AsyncCompletionQueue::adopt_srq`](super::AsyncCompletionQueue::adopt_srq). Clones are handles of the same
/// queue, for any number of tasks, and for any number of threads unless it is [`Exclusive`](crate::Exclusive).
/// [`Outcome::qpn`](crate::owned::Outcome::qpn) tells which queue pair took a receive.
pub struct AsyncSharedReceiveQueue<S: Locking = Shared> {
    inner: Arc<SharedInner<S>>,
}

impl<S: Locking> Clone for AsyncSharedReceiveQueue<S> {
    fn clone(&self) -> Self {
        AsyncSharedReceiveQueue { inner: self.inner.clone() }
    }
}

impl<S: Locking> AsyncSharedReceiveQueue<S> {
    pub(super) fn new(
        srq: Srq,
        inflight: Arc<Inflight<S>>,
        key: InflightKey,
        driver: Arc<DriverHandle<S>>,
    ) -> Self {
        let kernel = srq.queue().inner.clone();
        let srq = S::Lock::new(srq);
        AsyncSharedReceiveQueue {
            inner: Arc::new(SharedInner { kernel, srq, inflight, key, driver }),
        }
    }

    /// Whether this driver completes the receives.
    pub(super) fn is_of(&self, driver: &Arc<DriverHandle<S>>) -> bool {
        Arc::ptr_eq(&self.inner.driver, driver)
    }

    /// Receives a message that arrives at any of its queue pairs.
    ///
    /// ```no_run
    /// # use uverbs::{aio::AsyncSharedReceiveQueue, owned::BufferPool};
    /// # async fn f(srq: &AsyncSharedReceiveQueue, pool: &BufferPool) -> Result<(), Box<dyn std::error::Error>> {
    /// let received = srq.recv(pool.take()?).await?;
    /// println!("{}: {:?}", received.outcome.qpn, &*received.memory);
    /// # Ok(()) }
    /// ```
    #[inline]
    pub fn recv<L: LendMut>(&self, memory: L) -> Op<'static, L, S> {
        Op::new(OpQueue::Srq(self.clone()), OpRequest::Recv, memory)
    }

    /// The number by which senders name the queue, if it is of an XRC domain. `None` in a forked child.
    pub fn number(&self) -> Option<SrqNumber> {
        self.inner.srq.lock()?.queue().number()
    }

    /// The queue itself.
    pub(super) fn owned(&self, verb: &'static str) -> crate::Result<SrqGuard<'_, S>> {
        self.inner.srq.lock().ok_or_else(|| Error::forked(verb))
    }

    pub(super) fn inflight(&self) -> &Inflight<S> {
        &self.inner.inflight
    }

    pub(super) fn post_one(
        &self,
        memory: &mut Memory,
        named: Option<&NamedBytes>,
        waker: Waker,
    ) -> Result<Posted, Refused> {
        let mut srq = self.inner.srq.lock().ok_or(PostError::Forked)?;
        let batch = srq.batch()?;
        post_recv(batch, memory, named, OpTag { queue: self.inner.key, fate: Fate::Pending(waker) })
    }
}

impl<S: Locking> SrqRef for AsyncSharedReceiveQueue<S> {}

impl<S: Locking> srq::sealed::Sealed for AsyncSharedReceiveQueue<S> {
    fn inner(&self) -> &Arc<SrqInner> {
        &self.inner.kernel
    }
}

impl<S: Locking> fmt::Debug for AsyncSharedReceiveQueue<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The writer is the program's: no lock is held while it runs.
        let depth = self.inner.srq.lock().map(|srq| srq.depth());
        let Some(depth) = depth else { return f.write_str("AsyncSharedReceiveQueue(forked)") };
        f.debug_struct("AsyncSharedReceiveQueue")
            .field("device", &self.inner.kernel.file().device.name())
            .field("handle", &self.inner.kernel.object.handle())
            .field("max_wr", &depth)
            .finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::aio::OpErrorKind;
    use crate::owned::{Lend, Memory};
    use crate::sync::lock::{AnyLock, in_child_while_held};
    use crate::tests::futures::{Futures, cx};
    use crate::{Exclusive, PostError, QpType, SendWr};
    use std::cell::Cell;
    use std::future::Future;
    use std::pin::Pin;
    use std::task::Poll;

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_cannot_post_while_a_thread_of_its_parent_holds_a_lock() {
        let futures = Futures::new();
        let Futures { bench, cq, qp, pool, .. } = &futures;
        let srq = cq.adopt_srq(bench.pd.srq_builder(4).build().unwrap()).unwrap();
        let build = || bench.pd.qp_builder(cq, cq, QpType::RC).srq(&srq).build();
        let spare = Cell::new(build().ok());
        let child = || {
            let sent = Pin::new(&mut qp.send(pool.take().unwrap())).poll(&mut cx());
            assert!(matches!(sent, Poll::Ready(Err(error)) if error.memory.is_some()));
            let received = Pin::new(&mut srq.recv(pool.take().unwrap())).poll(&mut cx());
            assert!(matches!(received, Poll::Ready(Err(error)) if error.memory.is_some()));
            assert!(build().unwrap_err().is_forked());
            assert!(cq.adopt_on(spare.take().unwrap(), &srq).unwrap_err().error.is_forked());
            assert!(format!("{srq:?}").contains("forked"));
        };
        in_child_while_held(|| qp.inner.posting.lock(), child);
        in_child_while_held(|| srq.inner.srq.lock(), child);
    }
    /// The memory is dropped with the batch, so that there is none to give back.
    #[test]
    fn a_request_whose_queue_is_not_rung_gives_back_no_memory_of_any_type() {
        fn refused<L: Lend>(futures: &Futures<Exclusive>, memory: L) {
            let mut sent = futures.qp.post(SendWr::send(&[]), memory);
            // Without the token of the thread domain the queue is not rung.
            let held = futures.qp.inner.driver.token().lock();
            let Poll::Ready(Err(error)) = Pin::new(&mut sent).poll(&mut cx()) else {
                panic!("it was rung")
            };
            assert!(held.is_some() && error.memory.is_none());
            assert_eq!(error.kind, OpErrorKind::Post(PostError::Forked));
        }
        let futures = Futures::<Exclusive>::of();
        let idle = futures.pool.idle();
        refused(&futures, futures.pool.take().unwrap());
        refused(&futures, Memory::Buffer(futures.pool.take().unwrap()));
        refused(&futures, ());
        assert_eq!((futures.qp.in_flight(), futures.pool.idle()), (0, idle));
    }
}
