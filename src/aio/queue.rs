//! Queue pairs and shared receive queues whose requests are futures.

use super::driver::DriverHandle;
use super::inflight::{Inflight, OpTag};
use super::op::{AtomicOp, Op, OpRequest, PostQueue};
use crate::error::Error;
use crate::memory::lock::{Guard, Lock};
use crate::owned::{
    Buffer, Lend, LendMut, Memory, OwnedQueuePair, OwnedSendBatch, OwnedSharedReceiveQueue,
    PushError,
};
use crate::pd::{Exclusive, ProtectionDomain, Shared, Sharing};
use crate::qp::{QpAttr, QpControl, QpState};
use crate::td::ThreadDomain;
use crate::wr::{PostError, Remote, RingError, SendWr};
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, PoisonError};

/// What ringing a queue pair's batches takes: nothing for a [`Shared`] one, its thread domain for an
/// [`Exclusive`] one. Implemented by these two.
pub trait RingToken: Sharing + Sized {
    /// `()`, or the thread domain that the queue pair was created under. The queue pairs of one worker share
    /// one.
    type Token: Send;

    #[doc(hidden)]
    type Held<'t>;

    /// The token, locked while a request is posted.
    #[doc(hidden)]
    fn hold(token: &mut Self::Token) -> Self::Held<'_>;

    /// Whether it is the token of queue pairs of `pd`.
    #[doc(hidden)]
    fn rings(held: &Self::Held<'_>, pd: &ProtectionDomain<Self>) -> bool;

    #[doc(hidden)]
    fn ring<T>(
        batch: OwnedSendBatch<'_, T, Self>,
        held: &mut Self::Held<'_>,
    ) -> Result<(), RingError>;
}

impl RingToken for Shared {
    type Token = ();

    #[doc(hidden)]
    type Held<'t> = ();

    #[doc(hidden)]
    fn hold((): &mut ()) {}

    #[doc(hidden)]
    fn rings((): &(), _: &ProtectionDomain) -> bool {
        true
    }

    #[doc(hidden)]
    fn ring<T>(batch: OwnedSendBatch<'_, T, Self>, (): &mut ()) -> Result<(), RingError> {
        batch.ring()
    }
}

impl RingToken for Exclusive {
    type Token = Arc<std::sync::Mutex<ThreadDomain>>;

    #[doc(hidden)]
    type Held<'t> = std::sync::MutexGuard<'t, ThreadDomain>;

    #[doc(hidden)]
    fn hold(token: &mut Self::Token) -> Self::Held<'_> {
        token.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[doc(hidden)]
    fn rings(td: &Self::Held<'_>, pd: &ProtectionDomain<Exclusive>) -> bool {
        pd.inner.td.as_ref().is_some_and(|own| Arc::ptr_eq(own, &td.inner))
    }

    #[doc(hidden)]
    fn ring<T>(
        batch: OwnedSendBatch<'_, T, Self>,
        td: &mut Self::Held<'_>,
    ) -> Result<(), RingError> {
        batch.ring(td)
    }
}

/// What posting needs, one request at a time.
struct Posting<S: RingToken> {
    qp: OwnedQueuePair<OpTag, S>,
    token: S::Token,
    /// The queue pair's protection domain.
    pd: ProtectionDomain<S>,
}

struct Inner<S: RingToken> {
    /// Dropped first: `posting` then holds the last reference to the queue pair.
    control: QpControl,
    posting: Lock<Posting<S>>,
    inflight: Arc<Inflight>,
    /// Keeps the driver running.
    driver: Arc<DriverHandle>,
}

impl<S: RingToken> Drop for Inner<S> {
    fn drop(&mut self) {
        let Some(posting) = self.posting.get_mut() else { return };
        if posting.qp.shares_receives() {
            // Without a reset, the completions of its receives would be lost, and their places in the shared
            // queue with them.
            self.driver.close(&mut posting.qp);
        }
    }
}

impl<S: RingToken> PostQueue for Inner<S> {
    fn inflight(&self) -> &Arc<Inflight> {
        &self.inflight
    }

    fn post(
        &self,
        request: &OpRequest<'_>,
        memory: Memory,
        tag: OpTag,
    ) -> Result<(), (Option<Memory>, PostError)> {
        let Some(mut posting) = self.posting.lock() else {
            return Err((Some(memory), PostError::Forked));
        };
        let Posting { qp, token, pd } = &mut *posting;
        match request {
            OpRequest::Send(wr) => {
                let mut held = S::hold(token);
                if !S::rings(&held, pd) {
                    // The program replaced the thread domain behind the mutex. This is checked before anything
                    // is lent: a batch that fails drops memory, and so runs code of the program under the lock.
                    return Err((Some(memory), RingError::ForeignThreadDomain.into()));
                }
                let mut batch = match qp.send_batch() {
                    Ok(batch) => batch,
                    Err(error) => return Err((Some(memory), error)),
                };
                batch.push(*wr, memory, tag).map_err(refused)?;
                let rung = S::ring(batch, &mut held);
                drop(held);
                match rung {
                    Ok(()) => Ok(()),
                    Err(RingError::StillQueued(_)) => {
                        // The request stays in the queue, where the device does not look: flush it.
                        let flush = self.control.modify(&QpAttr::new().state(QpState::ERR));
                        drop(posting);
                        if flush.is_err() {
                            // The device is gone, and completes nothing.
                            self.inflight.fail_all();
                        }
                        Ok(())
                    }
                    Err(error) => Err((None, error.into())),
                }
            }
            OpRequest::Recv => {
                let mut batch = match qp.recv_batch() {
                    Ok(batch) => batch,
                    Err(error) => return Err((Some(memory), error)),
                };
                batch.push_any(memory, tag).map_err(refused)?;
                batch.ring();
                Ok(())
            }
        }
    }
}

fn refused(refused: PushError<Memory, OpTag>) -> (Option<Memory>, PostError) {
    (Some(refused.memory), refused.error)
}

/// A queue pair whose requests are futures.
///
/// Made by [`CompletionQueue::create_qp`](super::CompletionQueue::create_qp). Clones are handles of the same
/// queue pair, for any number of tasks and threads. The queue pair lives as long as its last handle or
/// future. Requests are posted in the order in which their futures are first polled. Everything that is not
/// posting is behind [`Deref`], as a [`QpControl`].
pub struct QueuePair<S: RingToken = Shared> {
    inner: Arc<Inner<S>>,
}

impl<S: RingToken> Clone for QueuePair<S> {
    fn clone(&self) -> Self {
        QueuePair { inner: self.inner.clone() }
    }
}

impl<S: RingToken> QueuePair<S> {
    pub(super) fn new(
        qp: OwnedQueuePair<OpTag, S>,
        token: S::Token,
        pd: ProtectionDomain<S>,
        inflight: Arc<Inflight>,
        driver: Arc<DriverHandle>,
    ) -> Self {
        let control = QpControl { qp: (*qp).qp.clone() };
        let posting = Lock::new(Posting { qp, token, pd });
        QueuePair { inner: Arc::new(Inner { posting, inflight, control, driver }) }
    }

    /// Posts any request on `memory`. `wr` itself names no memory, and its `wr_id` is not used.
    pub fn post<'a, L: Lend>(&self, wr: SendWr<'a>, memory: L) -> Op<'a, L> {
        Op::new(self.inner.clone(), OpRequest::Send(wr), memory)
    }

    /// Sends a message, which the peer's next receive takes.
    #[doc(alias = "IBV_WR_SEND")]
    pub fn send<L: Lend>(&self, memory: L) -> Op<'static, L> {
        self.post(SendWr::send(&[]), memory)
    }

    /// Sends a short message, which is copied when it is posted; at most
    /// [`max_inline_data`](crate::QpCaps::max_inline_data) bytes.
    #[doc(alias = "IBV_SEND_INLINE")]
    pub fn send_inline<'a>(&self, bytes: &'a [u8]) -> Op<'a, ()> {
        self.post(SendWr::send(&[]).inline(bytes), ())
    }

    /// Receives a message. A [`Buffer`] comes back as long as the message; of other memory,
    /// [`Outcome::filled`](crate::owned::Outcome::filled) tells how many bytes were written.
    ///
    /// On rxe a receive that is posted in state [`ERR`](crate::QpState::ERR) may stay pending until the queue
    /// pair is reset or dropped.
    #[doc(alias = "ibv_post_recv")]
    pub fn recv<L: LendMut>(&self, memory: L) -> Op<'static, L> {
        Op::new(self.inner.clone(), OpRequest::Recv, memory)
    }

    /// Reads from the peer as many bytes as `memory` has.
    #[doc(alias = "IBV_WR_RDMA_READ")]
    pub fn read<L: LendMut>(&self, remote: Remote, memory: L) -> Op<'static, L> {
        self.post(SendWr::read(remote, &[]), memory)
    }

    /// Writes `memory` to the peer.
    #[doc(alias = "IBV_WR_RDMA_WRITE")]
    pub fn write<L: Lend>(&self, remote: Remote, memory: L) -> Op<'static, L> {
        self.post(SendWr::write(remote, &[]), memory)
    }

    /// Adds `add` to eight bytes of the peer, whose address is a multiple of eight. `buffer` gets the old
    /// value; it has at least eight bytes.
    #[doc(alias = "IBV_WR_ATOMIC_FETCH_AND_ADD")]
    pub fn fetch_add(&self, remote: Remote, add: u64, mut buffer: Buffer) -> AtomicOp<'static> {
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
    ) -> AtomicOp<'static> {
        buffer.set_len(8);
        AtomicOp(self.post(SendWr::compare_swap(remote, compare, swap, &[]), buffer))
    }

    /// Moves the queue pair to state [`ERR`](QpState::ERR). Requests in flight end with
    /// [`WR_FLUSH_ERR`](crate::WcStatus::WR_FLUSH_ERR) and give their memory back; all others fail with
    /// [`OpErrorKind::Earlier`](super::OpErrorKind::Earlier).
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
impl<S: RingToken> Deref for QueuePair<S> {
    type Target = QpControl;

    fn deref(&self) -> &QpControl {
        &self.inner.control
    }
}

impl<S: RingToken> fmt::Debug for QueuePair<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.control.fmt(f)
    }
}

struct SharedInner {
    srq: Lock<OwnedSharedReceiveQueue<OpTag>>,
    inflight: Arc<Inflight>,
    _hub: Arc<DriverHandle>,
}

impl PostQueue for SharedInner {
    fn inflight(&self) -> &Arc<Inflight> {
        &self.inflight
    }

    fn post(
        &self,
        _: &OpRequest<'_>,
        memory: Memory,
        tag: OpTag,
    ) -> Result<(), (Option<Memory>, PostError)> {
        let Some(mut srq) = self.srq.lock() else {
            return Err((Some(memory), PostError::Forked));
        };
        let mut batch = match srq.batch() {
            Ok(batch) => batch,
            Err(error) => return Err((Some(memory), error)),
        };
        batch.push_any(memory, tag).map_err(refused)?;
        batch.ring();
        Ok(())
    }
}

/// A shared receive queue whose receives are futures.
///
/// Made by [`CompletionQueue::create_srq`](super::CompletionQueue::create_srq). Clones are handles of the same
/// queue, for any number of tasks and threads. [`Outcome::qpn`](crate::owned::Outcome::qpn) tells which
/// queue pair took a receive.
#[derive(Clone)]
pub struct SharedReceiveQueue {
    inner: Arc<SharedInner>,
}

impl SharedReceiveQueue {
    pub(super) fn new(srq: OwnedSharedReceiveQueue<OpTag>, driver: Arc<DriverHandle>) -> Self {
        let (srq, inflight) = (Lock::new(srq), Inflight::new(None));
        SharedReceiveQueue { inner: Arc::new(SharedInner { srq, inflight, _hub: driver }) }
    }

    /// Receives a message that arrives at any of its queue pairs.
    pub fn recv<L: LendMut>(&self, memory: L) -> Op<'static, L> {
        Op::new(self.inner.clone(), OpRequest::Recv, memory)
    }

    pub(super) fn lock(
        &self,
        verb: &'static str,
    ) -> crate::Result<Guard<'_, OwnedSharedReceiveQueue<OpTag>>> {
        self.inner.srq.lock().ok_or_else(|| Error::forked(verb))
    }

    pub(super) fn inflight(&self) -> &Arc<Inflight> {
        &self.inner.inflight
    }
}

impl fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.inner.srq.lock() {
            Some(srq) => srq.fmt(f),
            None => f.write_str("SharedReceiveQueue(forked)"),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::QpType;
    use crate::memory::lock::in_child_while_held;
    use crate::tests::futures::{Futures, cx};
    use std::future::Future;
    use std::pin::Pin;
    use std::task::Poll;

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_cannot_post_while_a_thread_of_its_parent_holds_a_lock() {
        let futures = Futures::new();
        let Futures { bench, cq, qp, pool, .. } = &futures;
        let srq = cq.create_srq(&bench.pd, 4, |srq| srq).unwrap();
        let child = || {
            let sent = Pin::new(&mut qp.send(pool.take().unwrap())).poll(&mut cx());
            assert!(matches!(sent, Poll::Ready(Err(error)) if error.memory.is_some()));
            let received = Pin::new(&mut srq.recv(pool.take().unwrap())).poll(&mut cx());
            assert!(matches!(received, Poll::Ready(Err(error)) if error.memory.is_some()));
            let made = cq.create_qp_on(&bench.pd, QpType::RC, &srq, |qp| qp);
            assert!(made.unwrap_err().is_forked());
            assert!(format!("{srq:?}").contains("forked"));
        };
        in_child_while_held(|| qp.inner.posting.lock(), child);
        in_child_while_held(|| srq.inner.srq.lock(), child);
    }
}
