//! Completion queues whose requests are futures.

use super::deferred::Deferred;
use super::driver::{CqShared, Driver, DriverHandle, Readiness};
use super::inflight::Inflight;
use super::locking::Locking;
use super::qp::AsyncQueuePair;
use super::srq::AsyncSharedReceiveQueue;
use crate::channel::CompletionChannel;
use crate::cq::{self, CompletionQueue, CqBuilder, CqControl, CqRef};
use crate::error::{Error, ErrorWith, Result};
use crate::lending::loan_table::lender::Lender;
use crate::owned::OwnedSharedReceiveQueue;
use crate::pd::{ProtectionDomain, Shared};
use crate::qp::QueuePair;
use crate::srq::SharedReceiveQueue;
use crate::sync::lock::AnyLock;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

const VERB: &str = "adopt";

/// A completion queue whose requests are futures. Clones are handles of the same queue, and move between
/// threads.
///
/// [`CqBuilder::build_async`] makes it with a [`Driver`], which is to be spawned on an event loop; with tokio,
/// `CqBuilder::spawn` does both. See [`aio`](super#) for an example. Queue pairs are built with it.
/// [Adopt](Self::adopt) each of them: the completions of one that is not adopted are not counted on, and the
/// queue may overflow.
///
/// The queue of a [`Worker`](super::Worker) is an `AsyncCompletionQueue<Exclusive>`: it stays on the worker's thread
/// with its driver, queue pairs and futures, none of which takes a mutex.
pub struct AsyncCompletionQueue<S: Locking = Shared> {
    pub(super) driver: Arc<DriverHandle<S>>,
}

impl<S: Locking> Clone for AsyncCompletionQueue<S> {
    fn clone(&self) -> Self {
        AsyncCompletionQueue { driver: self.driver.clone() }
    }
}

impl CqBuilder {
    /// Creates the queue as one whose requests are futures, and its driver. The queue gets a completion channel
    /// of its own, in place of one that the builder was given. `readiness` gets the channel's file, and registers
    /// it with the event loop.
    ///
    /// ```no_run
    /// # fn f(context: &uverbs::Context, domain: &uverbs::ParentDomain) -> uverbs::Result<()> {
    /// # #[cfg(feature = "tokio")] {
    /// use uverbs::aio::tokio::Registered;
    /// let builder = context.cq_builder(1024).vector(3).cqe_size(128).parent_domain(domain);
    /// let (cq, driver) = builder.build_async(Registered::new)?;
    /// // An event for 16 completions, or 20 microseconds after the first.
    /// cq.control().moderate(16, 20)?;
    /// # drop(driver); }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`build`](Self::build) and [`create_comp_channel`](crate::Context::create_comp_channel), and
    /// what `readiness` returns.
    pub fn build_async<W: Readiness>(
        self,
        readiness: impl FnOnce(BorrowedFd<'_>) -> Result<W>,
    ) -> Result<(AsyncCompletionQueue, Driver<W>)> {
        let (cq, channel) = self.build_with_channel()?;
        AsyncCompletionQueue::start(cq, channel, (), readiness)
    }

    /// The queue with a completion channel of its own.
    pub(super) fn build_with_channel(self) -> Result<(CompletionQueue, CompletionChannel)> {
        let channel = self.context().create_comp_channel()?;
        Ok((self.channel(&channel).build()?, channel))
    }
}

impl<S: Locking> AsyncCompletionQueue<S> {
    /// How many queues have futures that this queue's driver completes.
    #[cfg(test)]
    pub(crate) fn registered(&self) -> usize {
        let polled = self.driver.shared.polled.lock().expect("no fork");
        polled.queues.iter().flat_map(|queues| queues.iter()).count()
    }

    pub(super) fn start<W: Readiness>(
        cq: CompletionQueue,
        channel: CompletionChannel,
        token: S::Token,
        readiness: impl FnOnce(BorrowedFd<'_>) -> Result<W>,
    ) -> Result<(AsyncCompletionQueue<S>, Driver<W, S>)> {
        let readiness = readiness(channel.as_fd())?;
        let (driver, task) = Driver::new(CqShared::new(cq, channel, token), readiness);
        Ok((AsyncCompletionQueue { driver }, task))
    }

    /// The completion queue's handle in the kernel, to [moderate](CqControl::moderate) its events with.
    pub fn control(&self) -> &CqControl {
        &self.driver.shared.control
    }

    /// Takes over a queue pair that was created with this completion queue for its sends and its receives, or with
    /// that of a [`Worker`](super::Worker) before the worker moved to its thread.
    ///
    /// ```no_run
    /// # fn f(cq: &uverbs::aio::AsyncCompletionQueue, pd: &uverbs::ProtectionDomain)
    /// # -> uverbs::Result<()> {
    /// use uverbs::QpType;
    /// let qp = pd.qp_builder(cq, cq, QpType::RC).max_send_wr(16).max_recv_wr(16).build()?;
    /// let qp = cq.adopt(qp)?;
    /// # drop(qp); Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`OwnedCompletionQueue::adopt`](crate::owned::OwnedCompletionQueue::adopt); `EINVAL` for a queue pair
    /// under another thread domain; `EPIPE` if the driver has ended. The queue pair comes back with the error.
    ///
    /// # Panics
    ///
    /// If a waker panics: this polls, and wakes tasks of other requests. The queue pair is dropped then.
    pub fn adopt(
        &self,
        qp: QueuePair<S>,
    ) -> std::result::Result<AsyncQueuePair<S>, ErrorWith<QueuePair<S>>> {
        self.take_over(qp, None)
    }

    /// As [`adopt`](Self::adopt), for a queue pair that takes its receives from `srq`, which is of the same
    /// completion queue.
    ///
    /// ```no_run
    /// # fn f(cq: &uverbs::aio::AsyncCompletionQueue, pd: &uverbs::ProtectionDomain)
    /// # -> uverbs::Result<()> {
    /// use uverbs::QpType;
    /// let srq = cq.adopt_srq(pd.srq_builder(64).build()?)?;
    /// let qp = cq.adopt_on(pd.qp_builder(cq, cq, QpType::RC).srq(&srq).build()?, &srq)?;
    /// # drop(qp); Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`adopt`](Self::adopt), and `EINVAL` for a shared receive queue of another completion queue, or if the
    /// queue pair takes its receives elsewhere.
    pub fn adopt_on(
        &self,
        qp: QueuePair<S>,
        srq: &AsyncSharedReceiveQueue<S>,
    ) -> std::result::Result<AsyncQueuePair<S>, ErrorWith<QueuePair<S>>> {
        // The tag of a receive names its queue among those of one completion queue.
        if !srq.is_of(&self.driver) {
            let detail = "the shared receive queue is of another completion queue";
            return Err(Error::invalid(VERB, detail).with(qp));
        }
        self.take_over(qp, Some(srq))
    }

    fn take_over(
        &self,
        qp: QueuePair<S>,
        srq: Option<&AsyncSharedReceiveQueue<S>>,
    ) -> std::result::Result<AsyncQueuePair<S>, ErrorWith<QueuePair<S>>> {
        let shared = &self.driver.shared;
        let pd = qp.qp.pd().cloned().map(ProtectionDomain::of);
        if !pd.is_some_and(|pd| S::rings(&shared.token, &pd)) {
            let detail = format!(
                "queue pair {} is not under the thread domain of this completion queue",
                qp.qpn()
            );
            return Err(Error::invalid(VERB, detail).with(qp));
        }
        let mut deferred = Deferred::default();
        let adopted = self.adopt_locked(qp, srq, &mut deferred);
        deferred.run();
        adopted
    }

    /// The part of [`adopt`](Self::adopt) under the lock: `deferred` is what is to be done without it.
    fn adopt_locked(
        &self,
        qp: QueuePair<S>,
        srq: Option<&AsyncSharedReceiveQueue<S>>,
        deferred: &mut Deferred,
    ) -> std::result::Result<AsyncQueuePair<S>, ErrorWith<QueuePair<S>>> {
        let mut polled = match self.driver.shared.polled(VERB) {
            Ok(polled) => polled,
            Err(error) => return Err(error.with(qp)),
        };
        let mut running = match polled.running(VERB) {
            Ok(running) => running,
            Err(error) => return Err(error.with(qp)),
        };
        let srq = match srq.map(|srq| srq.owned(VERB)).transpose() {
            Ok(srq) => srq,
            Err(error) => return Err(error.with(qp)),
        };
        let qp = running.take_over(deferred, |cq, poll| cq.take_over(qp, srq.as_deref(), poll))?;
        drop(srq);
        let inflight = Inflight::new(Some(&qp), qp.loans(), running.queues.waiting());
        let key = running.queues.insert(inflight.clone());
        drop(polled);
        Ok(AsyncQueuePair::new(qp, inflight, key, self.driver.clone()))
    }

    /// Takes over a shared receive queue, whose queue pairs complete here.
    ///
    /// A queue of an XRC domain was created with this completion queue. It has no queue pairs: messages to any
    /// [target](crate::XrcTarget) of the domain whose sender names the queue's
    /// [number](AsyncSharedReceiveQueue::number) complete its receives.
    ///
    /// ```no_run
    /// # use uverbs::aio::AsyncCompletionQueue;
    /// # use uverbs::owned::BufferPool;
    /// # use uverbs::{ProtectionDomain, XrcDomain};
    /// # async fn f(cq: &AsyncCompletionQueue, pd: &ProtectionDomain, xrcd: &XrcDomain, pool: &BufferPool)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// let srq = cq.adopt_srq(pd.srq_builder(64).xrc(xrcd, cq).build()?)?;
    /// let target = xrcd.create_target()?;
    /// // … `target.endpoint`, `target.handshake`, and the number goes to the senders …
    /// println!("send to {:?}", srq.number());
    /// let message = srq.inbox(pool, 16).next().await?;
    /// # let _ = (target, message); Ok(()) }
    /// ```
    ///
    /// The sending side is a queue pair of type [`XRC_INI`](crate::QpType::XRC_INI), whose requests name the queue
    /// by [`to_srq`](crate::SendWr::to_srq).
    ///
    /// # Errors
    ///
    /// Those of [`OwnedSharedReceiveQueue::new`], or of
    /// [`OwnedCompletionQueue::adopt_srq`](crate::owned::OwnedCompletionQueue::adopt_srq) for a queue of an XRC domain;
    /// `EPIPE` if the driver has ended. The shared receive queue comes back with the error.
    pub fn adopt_srq(
        &self,
        srq: SharedReceiveQueue,
    ) -> std::result::Result<AsyncSharedReceiveQueue<S>, ErrorWith<SharedReceiveQueue>> {
        let mut deferred = Deferred::default();
        let adopted = self.adopt_srq_locked(srq, &mut deferred);
        deferred.run();
        adopted
    }

    /// As [`adopt_locked`](Self::adopt_locked).
    fn adopt_srq_locked(
        &self,
        srq: SharedReceiveQueue,
        deferred: &mut Deferred,
    ) -> std::result::Result<AsyncSharedReceiveQueue<S>, ErrorWith<SharedReceiveQueue>> {
        const VERB: &str = "adopt_srq";
        let mut polled = match self.driver.shared.polled(VERB) {
            Ok(polled) => polled,
            Err(error) => return Err(error.with(srq)),
        };
        let mut running = match polled.running(VERB) {
            Ok(running) => running,
            Err(error) => return Err(error.with(srq)),
        };
        let srq = match srq.inner.is_xrc() {
            true => running.take_over(deferred, |cq, poll| cq.take_over_srq(srq, poll))?,
            false => OwnedSharedReceiveQueue::new(srq)?,
        };
        let no_sends = Lender::new(0, 0).table().clone();
        let loans = [no_sends, srq.loans().clone()];
        let inflight = Inflight::new(None, loans, running.queues.waiting());
        let key = running.queues.insert(inflight.clone());
        drop(polled);
        Ok(AsyncSharedReceiveQueue::new(srq, inflight, key, self.driver.clone()))
    }

    /// How many completions belonged to no request; see [`unmatched`](crate::owned::OwnedCompletionQueue::unmatched). 0
    /// in a forked child.
    pub fn unmatched(&self) -> u64 {
        self.driver.shared.polled.lock().map_or(0, |polled| polled.cq.unmatched())
    }
}

impl<S: Locking> CqRef for AsyncCompletionQueue<S> {}

impl<S: Locking> cq::sealed::Sealed for AsyncCompletionQueue<S> {
    fn control(&self) -> &CqControl {
        AsyncCompletionQueue::control(self)
    }

    fn compact_updates(&self) {
        if let Some(polled) = self.driver.shared.polled.lock() {
            polled.cq.queue().compact_updates();
        }
    }
}

impl<S: Locking> AsFd for AsyncCompletionQueue<S> {
    /// The completion channel's file, which is readable when the driver has something to do. It takes no commands, as
    /// that of [`CompletionChannel`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.driver.shared.channel.as_fd()
    }
}

impl<S: Locking> fmt::Debug for AsyncCompletionQueue<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The writer is the program's: no lock is held while it runs.
        let capacity = self.driver.shared.polled.lock().map(|polled| polled.cq.queue().capacity());
        let Some(capacity) = capacity else { return f.write_str("AsyncCompletionQueue(forked)") };
        f.debug_struct("AsyncCompletionQueue")
            .field("device", &self.control().context().device().name())
            .field("handle", &self.control().handle())
            .field("capacity", &capacity)
            .finish()
    }
}
