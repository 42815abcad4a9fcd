//! Shared receive queues whose receives take their memory.

use super::lending::Desk;
use super::queue::OwnedRecvBatch;
use super::qp_map::{Lent, RECV};
use crate::error::{Error, Result};
use crate::srq::SharedReceiveQueue;
use crate::wr::PostError;
use std::fmt;
use std::sync::Arc;

/// A shared receive queue whose receives take their memory.
///
/// Queue pairs that are [adopted](super::OwnedCompletionQueue::adopt_on) with it give the memory
/// back through their completion queue, which may be many. Posting takes `&mut self`.
pub struct OwnedSharedReceiveQueue<T> {
    srq: SharedReceiveQueue,
    desk: Desk<T>,
}

impl<T: Send + 'static> OwnedSharedReceiveQueue<T> {
    /// Takes over `srq`. What is lent to its receives is freed when it and all its queue pairs are
    /// gone and the kernel confirmed that.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a queue of an XRC domain, whose completions are those of targets, and for one that
    /// something was posted to before: the number of such a receive may be that of one which lends
    /// memory. And those of [`query`](SharedReceiveQueue::query).
    pub fn new(srq: SharedReceiveQueue) -> Result<Self> {
        const VERB: &str = "adopt_srq";
        if srq.number().is_some() {
            return Err(Error::invalid(VERB, format!("{srq:?} is of an XRC domain")));
        }
        if !srq.is_fresh() {
            let detail = format!("{srq:?} was posted to before it was taken over: make another");
            return Err(Error::invalid(VERB, detail));
        }
        let depth = srq.query()?.max_wr;
        let desk = Desk::shared(depth, RECV, srq.domain());
        // It cannot be set: queues are taken over once.
        let _ = srq.inner.lent.set(Arc::new(desk.lent().clone()));
        Ok(OwnedSharedReceiveQueue { srq, desk })
    }
}

impl<T> OwnedSharedReceiveQueue<T> {
    /// The queue itself, to make queue pairs with.
    pub fn queue(&self) -> &SharedReceiveQueue {
        &self.srq
    }

    pub(super) fn lent(&self) -> &Lent<T> {
        self.desk.lent()
    }

    /// Starts a batch of receives.
    ///
    /// # Errors
    ///
    /// Those of [`SharedReceiveQueue::batch`].
    #[inline(always)]
    pub fn batch(&mut self) -> std::result::Result<OwnedRecvBatch<'_, T>, PostError> {
        Ok(OwnedRecvBatch::new(self.desk.draft(), self.srq.batch()?))
    }

    /// Receives that can be posted before one completes.
    pub fn room(&mut self) -> usize {
        self.desk.room()
    }

    /// Receives that it holds.
    pub fn depth(&self) -> usize {
        self.desk.lent().len()
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

impl<T> fmt::Debug for OwnedSharedReceiveQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnedSharedReceiveQueue").field(&self.srq).finish()
    }
}
