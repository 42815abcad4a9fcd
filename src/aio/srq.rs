//! Shared receive queues whose receives are futures.

use super::driver::DriverHandle;
use super::inflight::{Inflight, InflightKey, OpTag};
use super::locking::Locking;
use super::op::{Op, Transfer};
use super::post_all::PostAll;
use super::queue::{Posting, Queue};
use crate::error::Error;
use crate::number::SrqNumber;
use crate::owned::{LendMut, OwnedSharedReceiveQueue};
use crate::pd::Shared;
use crate::srq::{self, SrqInner, SrqRef};
use crate::sync::lock::AnyLock;
use std::fmt;
use std::sync::Arc;

type Srq = OwnedSharedReceiveQueue<OpTag>;

type SrqGuard<'l, S> = <<S as Locking>::Lock<Srq> as AnyLock<Srq>>::Guard<'l>;

/// A shared receive queue whose receives are futures.
///
/// Made by [`AsyncCompletionQueue::adopt_srq`](super::AsyncCompletionQueue::adopt_srq). Clones are handles of the same
/// queue, for any number of tasks, and for any number of threads unless it is [`Exclusive`](crate::Exclusive).
/// [`Outcome::qpn`](crate::owned::Outcome::qpn) tells which queue pair took a receive.
pub struct AsyncSharedReceiveQueue<S: Locking = Shared> {
    /// Dropped first: `queue` then holds the last reference to the shared receive queue.
    kernel: Arc<SrqInner>,
    queue: Arc<Queue<S>>,
}

impl<S: Locking> Clone for AsyncSharedReceiveQueue<S> {
    fn clone(&self) -> Self {
        AsyncSharedReceiveQueue { kernel: self.kernel.clone(), queue: self.queue.clone() }
    }
}

impl<S: Locking> AsyncSharedReceiveQueue<S> {
    pub(super) fn new(
        srq: OwnedSharedReceiveQueue<OpTag>,
        inflight: Arc<Inflight<S>>,
        key: InflightKey,
        driver: Arc<DriverHandle<S>>,
    ) -> Self {
        let kernel = srq.queue().inner.clone();
        let posting = Posting::Srq(S::Lock::new(srq));
        AsyncSharedReceiveQueue { kernel, queue: Queue::new(posting, inflight, key, driver) }
    }

    /// Whether this driver completes the receives.
    pub(super) fn is_of(&self, driver: &Arc<DriverHandle<S>>) -> bool {
        Arc::ptr_eq(&self.queue.driver, driver)
    }

    /// The queue that its receives are posted to.
    pub(super) fn queue(&self) -> &Arc<Queue<S>> {
        &self.queue
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
    pub fn recv<L: LendMut>(&self, memory: L) -> Op<L, S> {
        Op::new(self.queue.clone(), Transfer::Recv, memory)
    }

    /// Posts many receives at once.
    ///
    /// ```no_run
    /// # use uverbs::{aio::AsyncSharedReceiveQueue, owned::Buffer};
    /// # async fn f(srq: &AsyncSharedReceiveQueue, buffers: Vec<Buffer>) {
    /// let mut messages = srq.recv_all(buffers);
    /// while let Some(message) = messages.next().await {
    ///     println!("{message:?}");
    /// }
    /// # }
    /// ```
    pub fn recv_all<L: LendMut>(&self, memory: impl IntoIterator<Item = L>) -> PostAll<L, S> {
        PostAll::new(self.queue.clone(), memory.into_iter().map(|memory| (Transfer::Recv, memory)))
    }

    /// The number by which senders name the queue, if it is of an XRC domain. `None` in a forked child.
    pub fn number(&self) -> Option<SrqNumber> {
        self.lock()?.queue().number()
    }

    /// The queue itself.
    pub(super) fn owned(&self, verb: &'static str) -> crate::Result<SrqGuard<'_, S>> {
        self.lock().ok_or_else(|| Error::forked(verb))
    }

    fn lock(&self) -> Option<SrqGuard<'_, S>> {
        match &self.queue.posting {
            Posting::Srq(srq) => srq.lock(),
            Posting::Qp(_) | Posting::CheckedQp(_) => None,
        }
    }
}

impl<S: Locking> SrqRef for AsyncSharedReceiveQueue<S> {}

impl<S: Locking> srq::sealed::Sealed for AsyncSharedReceiveQueue<S> {
    fn inner(&self) -> &Arc<SrqInner> {
        &self.kernel
    }
}

impl<S: Locking> fmt::Debug for AsyncSharedReceiveQueue<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The writer is the program's: no lock is held while it runs.
        let depth = self.lock().map(|srq| srq.depth());
        let Some(depth) = depth else { return f.write_str("AsyncSharedReceiveQueue(forked)") };
        f.debug_struct("AsyncSharedReceiveQueue")
            .field("device", &self.kernel.file().device.name())
            .field("handle", &self.kernel.object.handle())
            .field("max_wr", &depth)
            .finish()
    }
}
