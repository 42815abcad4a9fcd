//! A shared receive queue that foreign code fills. Pairs with `mlx5dv_init_obj` for `MLX5DV_OBJ_SRQ`.

use super::devx::{DevxRef, kept};
use super::raw_qp::foreign;
use crate::context::Context;
use crate::error::{Error, ErrorWith};
use crate::memory::queue_layout::SrqLayout;
use crate::srq::{SharedReceiveQueue, SrqInner, SrqRef, sealed};
use rustix::io::Errno;
use std::any::Any;
use std::sync::Arc;

/// A shared receive queue that other code than this library fills.
///
/// Queue pairs are made on it as on a [`SharedReceiveQueue`]. Completions that reach a completion queue of this library
/// have the index of their WQE as `wr_id`. Its methods may be called from any thread.
///
/// ```no_run
/// # fn f(srq: uverbs::SharedReceiveQueue) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::mlx5::RawSharedReceiveQueue;
///
/// let raw = RawSharedReceiveQueue::take(srq)?;
/// let layout = raw.layout();
/// println!("the next of {} WQEs is {}", layout.wq.wqe_count, layout.head);
/// // SAFETY: nothing was posted.
/// let srq = unsafe { raw.give_back(layout.head, layout.posted)? };
/// # drop(srq); Ok(()) }
/// ```
#[doc(alias = "mlx5dv_init_obj")]
#[doc(alias = "MLX5DV_OBJ_SRQ")]
#[derive(Debug)]
pub struct RawSharedReceiveQueue {
    srq: SharedReceiveQueue,
    layout: SrqLayout,
}

impl RawSharedReceiveQueue {
    /// Takes a queue none of whose receives is outstanding, and links each WQE to the one behind it.
    ///
    /// # Errors
    ///
    /// `EBUSY` while receives are outstanding, `EOPNOTSUPP` on a device of another driver, [`Error::is_forked`] in a child
    /// of the process that created it; the queue comes back with the error.
    pub fn take(mut srq: SharedReceiveQueue) -> Result<Self, ErrorWith<SharedReceiveQueue>> {
        const VERB: &str = "take_srq";
        if let Err(error) = srq.inner.file().check_fork(VERB) {
            return Err(error.with(srq));
        }
        let Some(ring) = srq.mlx5_mut() else { return Err(foreign(VERB).with(srq)) };
        let posted = ring.outstanding();
        if posted != 0 {
            let detail = format!(
                "{posted} posted receives have no completion that was polled: poll for those, or destroy the queue and \
                 create another, as no reset takes receives back"
            );
            return Err(Error::new(VERB, Errno::BUSY).detail(detail).with(srq));
        }
        let layout = ring.layout();
        ring.resume(layout.head, layout.posted);
        Ok(RawSharedReceiveQueue { srq, layout })
    }

    /// The queue as addresses and numbers, which are valid as long as this exists, in the process that created it. The
    /// indices are where the library stopped.
    pub fn layout(&self) -> SrqLayout {
        self.layout
    }

    /// Everything but posting, such as a query.
    pub fn queue(&self) -> &SharedReceiveQueue {
        &self.srq
    }

    /// Raises an event once when few receives are left; see [`SharedReceiveQueue::set_limit`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn set_limit(&mut self, limit: u32) -> crate::Result<()> {
        self.srq.set_limit(limit)
    }

    /// Gives the queue back to the library, which goes on with the WQE `head`, behind `posted` receives.
    ///
    /// # Safety
    ///
    /// The foreign code has stopped. All receives have completed, and the completions were taken out of the completion
    /// queues. The device takes the WQE `head` next, and `posted` is the count that the doorbell record has.
    ///
    /// # Errors
    ///
    /// [`Error::is_forked`] in a child of the process that created it; this comes back with the error.
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn give_back(
        mut self,
        head: u16,
        posted: u16,
    ) -> Result<SharedReceiveQueue, ErrorWith<RawSharedReceiveQueue>> {
        if let Err(error) = self.srq.inner.file().check_fork("give_back_srq") {
            return Err(error.with(self));
        }
        if let Some(ring) = self.srq.mlx5_mut() {
            ring.resume(head, posted);
        }
        Ok(self.srq)
    }

    /// Destroys the queue; dropping it does the same silently, as soon as no queue pair uses it any more.
    ///
    /// ```no_run
    /// # fn f(mut raw: uverbs::mlx5::RawSharedReceiveQueue) -> Result<(), Box<dyn std::error::Error>> {
    /// raw.set_limit(4)?;
    /// raw.destroy()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`SharedReceiveQueue::destroy`]; this comes back with the error.
    pub fn destroy(self) -> Result<(), ErrorWith<RawSharedReceiveQueue>> {
        let RawSharedReceiveQueue { srq, layout } = self;
        srq.destroy().map_err(|failed| failed.map(|srq| RawSharedReceiveQueue { srq, layout }))
    }
}

impl SrqRef for RawSharedReceiveQueue {}
impl DevxRef for RawSharedReceiveQueue {}

impl kept::Sealed for RawSharedReceiveQueue {
    fn context(&self) -> Context {
        kept::Sealed::context(&self.srq)
    }

    fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        self.srq.keep()
    }
}

impl sealed::Sealed for RawSharedReceiveQueue {
    fn inner(&self) -> &Arc<SrqInner> {
        &self.srq.inner
    }
}
