//! Shared receive queues whose receives take their memory.

use super::cq::name_of_srq;
use super::lending::{Loans, QueueLender};
use super::qp::OwnedRecvBatch;
use super::qp_map::AdoptedQp;
use crate::error::{Error, ErrorWith, Result};
use crate::lending::loan_table::{RECV, Reclaim};
use crate::srq::{self, SharedReceiveQueue, SrqInner, SrqRef};
use crate::wr::PostError;
use std::fmt;
use std::sync::Arc;

/// A shared receive queue whose receives take their memory.
///
/// Queue pairs that are [adopted](super::OwnedCompletionQueue::adopt_on) with it give the memory back
/// through their completion queues, of which there may be several. Posting takes `&mut self`; the value
/// moves between threads.
///
/// ```no_run
/// # use uverbs::{Context, ProtectionDomain, QpType, owned::*};
/// # fn f(context: &Context, pd: &ProtectionDomain, pool: &BufferPool)
/// # -> Result<(), Box<dyn std::error::Error>> {
/// let mut cq = OwnedCompletionQueue::new(context.cq_builder(256).build()?);
/// let mut srq = OwnedSharedReceiveQueue::new(pd.srq_builder(64).build()?)?;
/// let qp = pd.qp_builder(cq.queue(), cq.queue(), QpType::RC).srq(&srq).build()?;
/// let qp = cq.adopt_on(qp, &srq)?;
/// let mut batch = srq.batch()?;
/// batch.push(pool.take()?, 1)?;
/// batch.ring()?;
/// # let _ = qp; Ok(()) }
/// ```
///
/// A queue of an [XRC domain](crate::XrcDomain) completes by itself, and is taken over by its
/// [completion queue](super::OwnedCompletionQueue::adopt_srq).
///
/// ```no_run
/// # use uverbs::owned::{BufferPool, OwnedSharedReceiveQueue};
/// # fn f(srq: &mut OwnedSharedReceiveQueue<u32>, pool: &BufferPool) -> uverbs::Result<()> {
/// println!("room for {} of {}; {} buffers are idle", srq.room(), srq.depth(), pool.idle());
/// // An event when fewer than 16 receives are left.
/// srq.set_limit(16)?;
/// # Ok(()) }
/// ```
pub struct OwnedSharedReceiveQueue<T> {
    srq: SharedReceiveQueue,
    lender: QueueLender<T>,
}

/// The loans of a queue of an XRC domain, and its entry in the map of its completion queue. Dropped when the kernel's queue
/// is destroyed, which an object of DEVX may keep: until then messages complete its receives.
struct Adopted<T> {
    loans: Loans<T>,
    entry: Arc<AdoptedQp<T>>,
}

impl<T: Send + 'static> Reclaim for Adopted<T> {
    fn reclaim_all(&self) {
        self.loans.reclaim_all();
    }
}

impl<T> fmt::Debug for Adopted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Adopted").field(&self.loans).finish()
    }
}

impl<T> Drop for Adopted<T> {
    fn drop(&mut self) {
        self.entry.close();
    }
}

const VERB: &str = "adopt_srq";

impl<T: Send + 'static> OwnedSharedReceiveQueue<T> {
    /// Takes over `srq`. Memory that is lent to its receives is freed when the queue and all its queue
    /// pairs are destroyed and the kernel has confirmed that.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a queue of an XRC domain, which its completion queue
    /// [adopts](super::OwnedCompletionQueue::adopt_srq), and for a queue that was posted to: the `wr_id` of such
    /// a receive may equal that of a later one which lends memory. And the errors of
    /// [`query`](SharedReceiveQueue::query). The queue comes back with the error.
    pub fn new(
        srq: SharedReceiveQueue,
    ) -> std::result::Result<Self, ErrorWith<SharedReceiveQueue>> {
        if srq.number().is_some() {
            let detail = format!(
                "{} is of an XRC domain: its completion queue adopts it",
                name_of_srq(&srq)
            );
            return Err(Error::invalid(VERB, detail).with(srq));
        }
        match OwnedSharedReceiveQueue::lender(&srq) {
            Ok(lender) => {
                let loans = Arc::new(lender.loans().clone());
                Ok(OwnedSharedReceiveQueue::lending(srq, lender, loans))
            }
            Err(error) => Err(error.with(srq)),
        }
    }

    /// A queue of an XRC domain, whose completion queue knows it as what `adopt` makes of its loan table.
    pub(super) fn of_xrc(
        srq: SharedReceiveQueue,
        adopt: impl FnOnce(&Loans<T>) -> Result<Arc<AdoptedQp<T>>>,
    ) -> std::result::Result<Self, ErrorWith<SharedReceiveQueue>> {
        let adopted = OwnedSharedReceiveQueue::lender(&srq).and_then(|lender| {
            // Messages to XRC targets have no global route header.
            let lender = lender.with_datagrams(false);
            let loans = lender.loans().clone();
            Ok((Adopted { entry: adopt(&loans)?, loans }, lender))
        });
        match adopted {
            Ok((adopted, lender)) => {
                Ok(OwnedSharedReceiveQueue::lending(srq, lender, Arc::new(adopted)))
            }
            Err(error) => Err(error.with(srq)),
        }
    }

    fn lending(srq: SharedReceiveQueue, lender: QueueLender<T>, lent: Arc<dyn Reclaim>) -> Self {
        // It was never set: a queue is taken over once.
        let _ = srq.inner.lent.set(lent);
        OwnedSharedReceiveQueue { srq, lender }
    }

    fn lender(srq: &SharedReceiveQueue) -> Result<QueueLender<T>> {
        if !srq.is_fresh() {
            let detail = format!(
                "{} was posted to before it was taken over: make another",
                name_of_srq(srq)
            );
            return Err(Error::invalid(VERB, detail));
        }
        let depth = srq.query()?.max_wr;
        Ok(QueueLender::shared(depth, RECV, srq.domain()))
    }
}

impl<T> OwnedSharedReceiveQueue<T> {
    /// The queue itself. A queue pair's builder also takes `self`; see [`QpBuilder::srq`](crate::QpBuilder::srq).
    pub fn queue(&self) -> &SharedReceiveQueue {
        &self.srq
    }

    pub(crate) fn loans(&self) -> &Loans<T> {
        self.lender.loans()
    }

    /// Starts a batch of receives.
    ///
    /// # Errors
    ///
    /// Those of [`SharedReceiveQueue::batch`].
    #[inline(always)]
    pub fn batch(&mut self) -> std::result::Result<OwnedRecvBatch<'_, T>, PostError> {
        Ok(OwnedRecvBatch::new(self.lender.begin(), self.srq.batch()?))
    }

    /// Receives that can be posted before one completes.
    pub fn room(&mut self) -> usize {
        self.lender.room()
    }

    /// The most receives that it holds.
    pub fn depth(&self) -> usize {
        self.lender.loans().len()
    }

    /// Raises an event when fewer than `limit` receives are left; see
    /// [`SharedReceiveQueue::set_limit`].
    ///
    /// # Errors
    ///
    /// Those of [`SharedReceiveQueue::set_limit`].
    pub fn set_limit(&mut self, limit: u32) -> Result<()> {
        self.srq.set_limit(limit)
    }
}

impl<T> SrqRef for OwnedSharedReceiveQueue<T> {}

impl<T> srq::sealed::Sealed for OwnedSharedReceiveQueue<T> {
    fn inner(&self) -> &Arc<SrqInner> {
        &self.srq.inner
    }
}

impl<T> fmt::Debug for OwnedSharedReceiveQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnedSharedReceiveQueue").field(&self.srq).finish()
    }
}
