//! Shared receive queues whose receives take their memory.

use super::desk::Desk;
use super::queue::OwnedRecvBatch;
use super::route::Lent;
use crate::error::{Error, Result};
use crate::srq::SharedReceiveQueue;
use crate::wr::PostError;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Keeps a shared receive queue and what is lent to it until nobody takes receives from it any
/// more: only then the kernel lets it go.
pub(super) struct Keeper<T> {
    pub(super) lent: Arc<Lent<T>>,
    /// The queue, once its owner dropped it.
    left: Mutex<Option<SharedReceiveQueue>>,
}

impl<T> Drop for Keeper<T> {
    fn drop(&mut self) {
        let left = self.left.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let Some(srq) = left else { return };
        let file = srq.inner.file().clone();
        match srq.destroy() {
            Ok(()) => self.lent.reclaim(drop),
            // A queue pair that is not ours may still take from it; the device then writes.
            Err(_) => {
                std::mem::forget(self.lent.clone());
                file.count_leak();
            }
        }
    }
}

/// A shared receive queue whose receives take their memory.
///
/// Queue pairs that are [adopted](super::OwnedCompletionQueue::adopt_on) with it give the memory
/// back through their completion queue, which may be many. Posting takes `&mut self`.
pub struct OwnedSharedReceiveQueue<T> {
    /// `Some` until dropped.
    srq: Option<SharedReceiveQueue>,
    desk: Desk<T>,
    pub(super) keeper: Arc<Keeper<T>>,
}

impl<T> OwnedSharedReceiveQueue<T> {
    /// Takes over `srq`, to which nothing was posted yet.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a queue of an XRC domain, whose completions are those of targets; and those of
    /// [`query`](SharedReceiveQueue::query).
    pub fn new(srq: SharedReceiveQueue) -> Result<Self> {
        if srq.number().is_some() {
            const VERB: &str = "adopt_srq";
            return Err(Error::invalid(VERB, format!("{srq:?} is of an XRC domain")));
        }
        let depth = srq.query()?.max_wr;
        let desk = Desk::new(depth, srq.domain());
        let keeper = Arc::new(Keeper { lent: desk.lent().clone(), left: Mutex::default() });
        Ok(OwnedSharedReceiveQueue { srq: Some(srq), desk, keeper })
    }

    /// The queue itself, to make queue pairs with.
    ///
    /// # Panics
    ///
    /// Never: it is there until this is dropped.
    pub fn queue(&self) -> &SharedReceiveQueue {
        self.srq.as_ref().expect("it is there until this is dropped")
    }

    /// Starts a batch of receives.
    ///
    /// # Errors
    ///
    /// Those of [`SharedReceiveQueue::batch`].
    #[inline]
    pub fn batch(&mut self) -> std::result::Result<OwnedRecvBatch<'_, T>, PostError> {
        match &mut self.srq {
            Some(srq) => Ok(OwnedRecvBatch::new(self.desk.draft(), srq.batch()?)),
            None => Err(PostError::Full),
        }
    }

    /// Receives that can be posted before one completes.
    pub fn room(&mut self) -> usize {
        self.desk.room()
    }

    /// Receives that it holds.
    pub fn depth(&self) -> usize {
        self.keeper.lent.len()
    }

    /// Raises an event when fewer than `limit` receives are left; see
    /// [`SharedReceiveQueue::set_limit`].
    ///
    /// # Errors
    ///
    /// Those of [`SharedReceiveQueue::set_limit`].
    pub fn set_limit(&mut self, limit: u32) -> Result<()> {
        self.srq.as_mut().map_or(Ok(()), |srq| srq.set_limit(limit))
    }
}

impl<T> Drop for OwnedSharedReceiveQueue<T> {
    fn drop(&mut self) {
        *self.keeper.left.lock().unwrap_or_else(PoisonError::into_inner) = self.srq.take();
    }
}

impl<T> fmt::Debug for OwnedSharedReceiveQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnedSharedReceiveQueue").field(&self.srq).finish()
    }
}

impl<T> fmt::Debug for Keeper<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").field("lent", &self.lent).finish_non_exhaustive()
    }
}
