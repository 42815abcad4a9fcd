//! Queue pairs whose requests are futures.

use super::driver::DriverHandle;
use super::inflight::{Inflight, InflightKey, OpTag};
use super::locking::Locking;
use super::op::{AtomicOp, Op, Request, Transfer};
use super::post_all::PostAll;
use super::queue::{Posting, Queue};
use crate::owned::{Buffer, Lend, LendMut, OwnedQueuePair};
use crate::pd::Shared;
use crate::qp::QpControl;
use crate::sync::lock::AnyLock;
use crate::wr::{Remote, SendWr};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

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
    /// Dropped first: `queue` then holds the last reference to the queue pair.
    control: QpControl,
    queue: Arc<Queue<S>>,
}

impl<S: Locking> Clone for AsyncQueuePair<S> {
    #[inline]
    fn clone(&self) -> Self {
        let control = QpControl { qp: self.control.qp.clone() };
        AsyncQueuePair { control, queue: self.queue.clone() }
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
        let posting = match qp.checks_all_sends() {
            false => Posting::Qp(S::Lock::new(qp)),
            true => Posting::CheckedQp(S::Lock::new(qp)),
        };
        AsyncQueuePair { control, queue: Queue::new(posting, inflight, key, driver) }
    }

    /// The queue that its requests are posted to.
    pub(super) fn queue(&self) -> &Arc<Queue<S>> {
        &self.queue
    }

    #[inline(always)]
    fn op<L: Lend>(&self, request: Transfer, memory: L) -> Op<L, S> {
        Op::new(self.queue.clone(), request, memory)
    }

    /// Posts any request on `memory`. `wr` itself names no memory, and its `wr_id` is not used.
    pub fn post<'a, L: Lend>(&self, wr: SendWr<'a>, memory: L) -> Op<L, S, SendWr<'a>> {
        Op::new(self.queue.clone(), wr, memory)
    }

    /// Sends a message, which the peer's next receive takes.
    #[doc(alias = "IBV_WR_SEND")]
    #[inline]
    pub fn send<L: Lend>(&self, memory: L) -> Op<L, S> {
        self.op(Transfer::Send, memory)
    }

    /// Sends a short message, which is copied when it is posted; at most
    /// [`max_inline_data`](crate::QpCaps::max_inline_data) bytes.
    #[doc(alias = "IBV_SEND_INLINE")]
    pub fn send_inline<'a>(&self, bytes: &'a [u8]) -> Op<(), S, SendWr<'a>> {
        self.post(SendWr::send(&[]).inline(bytes), ())
    }

    /// Receives a message. A [`Buffer`] comes back as long as the message; of other memory,
    /// [`Outcome::filled`](crate::owned::Outcome::filled) tells how many bytes were written.
    ///
    /// On rxe a receive that is posted in state [`ERR`](crate::QpState::ERR) may stay pending until the queue
    /// pair is reset or dropped.
    #[doc(alias = "ibv_post_recv")]
    #[inline]
    pub fn recv<L: LendMut>(&self, memory: L) -> Op<L, S> {
        self.op(Transfer::Recv, memory)
    }

    /// Reads from the peer as many bytes as `memory` has.
    #[doc(alias = "IBV_WR_RDMA_READ")]
    #[inline]
    pub fn read<L: LendMut>(&self, remote: Remote, memory: L) -> Op<L, S> {
        self.op(Transfer::Read(remote), memory)
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
    pub fn write<L: Lend>(&self, remote: Remote, memory: L) -> Op<L, S> {
        self.op(Transfer::Write(remote), memory)
    }

    /// Posts many requests with as few doorbells as there is room for: pairs of a [`Transfer`], or of a [`SendWr`] that
    /// names no memory, and the memory that it works on.
    pub fn post_all<L: Lend, R: Request>(
        &self,
        requests: impl IntoIterator<Item = (R, L)>,
    ) -> PostAll<L, S, R> {
        PostAll::new(self.queue.clone(), requests)
    }

    /// Adds `add` to eight bytes of the peer, whose address is a multiple of eight. `buffer` gets the old
    /// value; it has at least eight bytes.
    #[doc(alias = "IBV_WR_ATOMIC_FETCH_AND_ADD")]
    pub fn fetch_add(&self, remote: Remote, add: u64, mut buffer: Buffer) -> AtomicOp<S> {
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
    ) -> AtomicOp<S> {
        buffer.set_len(8);
        AtomicOp(self.post(SendWr::compare_swap(remote, compare, swap, &[]), buffer))
    }

    /// Moves the queue pair to state [`ERR`](crate::QpState::ERR) for good. Requests in flight end with
    /// [`WR_FLUSH_ERR`](crate::WcStatus::WR_FLUSH_ERR) and give their memory back; all others fail with
    /// [`OpErrorKind::Earlier`](super::OpErrorKind::Earlier). To connect anew, create and
    /// [adopt](super::AsyncCompletionQueue::adopt) another queue pair.
    ///
    /// # Errors
    ///
    /// Those of [`QpControl::modify`]. Even then nothing can be posted afterwards.
    pub fn abort(&self) -> crate::Result<()> {
        self.queue.inflight.abort()
    }

    /// How many requests are in flight, including those whose futures were dropped.
    pub fn in_flight(&self) -> usize {
        self.queue.inflight.in_flight()
    }
}

/// Everything that is not posting.
impl<S: Locking> Deref for AsyncQueuePair<S> {
    type Target = QpControl;

    fn deref(&self) -> &QpControl {
        &self.control
    }
}

impl<S: Locking> fmt::Debug for AsyncQueuePair<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.control.fmt(f)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::aio::OpErrorKind;
    use crate::aio::queue::Posting;
    use crate::sync::fork::in_child;
    use crate::sync::lock::in_child_while_held;
    use crate::tests::futures::{Futures, Kind, cx};
    use crate::{Access, Exclusive, PostError, QpType, Shared};
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
        let (Posting::Qp(of_qp) | Posting::CheckedQp(of_qp), Posting::Srq(of_srq)) =
            (&qp.queue().posting, &srq.queue().posting)
        else {
            panic!("a queue pair, and a shared receive queue")
        };
        in_child_while_held(|| of_qp.lock(), child);
        in_child_while_held(|| of_srq.lock(), child);
    }

    /// On mlx5, where a send in the parent needs no check and no system call.
    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_writes_nothing_on_mlx5() {
        fn refused<S: Kind>() {
            let futures = Futures::<S>::connected();
            let region = futures.bench.pd.mr_builder().access(Access::ALL_REMOTE);
            let region = region.allocate::<u64>(1).unwrap();
            let to = region.remote(0).unwrap();
            let write = || {
                let mut write = futures.qp.write(to, futures.pool.copy(&[7; 8]).unwrap());
                let end = Pin::new(&mut write).poll(&mut cx());
                (end, write)
            };
            in_child(|| {
                let (Poll::Ready(Err(error)), _) = write() else { panic!("it was posted") };
                assert_eq!(error.kind, OpErrorKind::Post(PostError::Forked));
                assert!(error.memory.is_some());
            });
            let (Poll::Pending, write) = write() else { panic!("it was not posted") };
            futures.bench.script.settle();
            assert!(write.is_posted() && region.read_at(0) == Some(u64::from_ne_bytes([7; 8])));
        }
        refused::<Shared>();
        refused::<Exclusive>();
    }
}
