//! Futures of one thread.

use super::cq::AsyncCompletionQueue;
use super::driver::{Driver, Readiness};
use crate::channel::CompletionChannel;
use crate::cq::{CompletionQueue, CqBuilder};
use crate::error::{ErrorWith, Result};
use crate::pd::Exclusive;
use crate::td::ThreadDomain;
use std::os::fd::BorrowedFd;

/// A completion queue with the token of a thread domain, on its way to the thread that owns both: the seat of
/// futures that take no mutex.
///
/// A worker moves to its thread together with the queue pairs that were made for it, as one value. There
/// [`start`](Self::start) makes an `AsyncCompletionQueue<Exclusive>` and a driver of it. From then on they, their queue
/// pairs and all futures are tied to the thread, as the compiler checks: they are neither `Send` nor `Sync`.
///
/// ```no_run
/// # #[cfg(feature = "tokio")]
/// # fn f(context: &uverbs::Context) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::QpType;
///
/// let td = context.alloc_td()?;
/// let pd = context.alloc_pd()?;
/// let domain = pd.parent_domain_builder().thread_domain(&td).build()?;
/// let worker = context.cq_builder(64).build_worker(td)?;
/// let qp = domain.qp_builder(worker.queue(), worker.queue(), QpType::RC).max_send_wr(16).build()?;
/// let mine = (worker, domain, qp);
/// std::thread::spawn(move || {
///     let (worker, domain, qp) = mine;
///     let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
///     tokio::task::LocalSet::new().block_on(&runtime, async {
///         let (cq, _driver) = worker.spawn_local()?;
///         let qp = cq.adopt(qp)?;
///         let another = domain.qp_builder(&cq, &cq, QpType::RC).max_send_wr(16).build()?;
///         let another = cq.adopt(another)?;
/// #       drop((qp, another));
///         Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
///     })
/// });
/// # Ok(()) }
/// ```
///
/// `examples/per_core.rs` is a whole program.
#[derive(Debug)]
pub struct Worker {
    cq: CompletionQueue,
    channel: CompletionChannel,
    td: ThreadDomain,
}

impl CqBuilder {
    /// Creates the queue for one thread, with a completion channel of its own, and joins it with the token of the
    /// thread domain `td`.
    ///
    /// # Errors
    ///
    /// Those of [`build`](Self::build) and [`create_comp_channel`](crate::Context::create_comp_channel). The token
    /// comes back with the error.
    pub fn build_worker(
        self,
        td: ThreadDomain,
    ) -> std::result::Result<Worker, ErrorWith<ThreadDomain>> {
        match self.build_with_channel() {
            Ok((cq, channel)) => Ok(Worker { cq, channel, td }),
            Err(error) => Err(error.with(td)),
        }
    }
}

impl Worker {
    /// The completion queue, to create queue pairs with that the worker will
    /// [adopt](AsyncCompletionQueue::adopt).
    pub fn queue(&self) -> &CompletionQueue {
        &self.cq
    }

    /// Starts on this thread: makes the queue whose requests are futures, and its driver. `readiness` gets the
    /// channel's file, and registers it with the event loop of this thread.
    ///
    /// # Errors
    ///
    /// The error of `readiness`.
    pub fn start<W: Readiness>(
        self,
        readiness: impl FnOnce(BorrowedFd<'_>) -> Result<W>,
    ) -> Result<(AsyncCompletionQueue<Exclusive>, Driver<W, Exclusive>)> {
        let Worker { cq, channel, td } = self;
        AsyncCompletionQueue::start(cq, channel, td, readiness)
    }
}
