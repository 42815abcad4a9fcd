//! A completion queue that foreign code polls. Pairs with `mlx5dv_init_obj` for `MLX5DV_OBJ_CQ`.

use super::raw_qp::foreign;
use crate::cq::{CompletionQueue, CqControl, Notify};
use crate::error::{ErrorWith, Result};
use crate::memory::queue_layout::CqLayout;
use crate::provider::mlx5::cq::Mlx5Cq;

/// A completion queue that other code than this library polls.
///
/// Queue pairs are made on its [handle](Self::control). It is destroyed when it, its handles and its queue pairs are
/// gone.
///
/// ```no_run
/// # fn f(cq: uverbs::CompletionQueue) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::mlx5::RawCompletionQueue;
///
/// let mut raw = RawCompletionQueue::take(cq)?;
/// let layout = raw.layout();
/// // The first completion raises an event.
/// raw.arm(layout.consumer, 0, uverbs::Notify::Next)?;
/// // SAFETY: the last byte of the first CQE is inside the queue; the device may write it at any time.
/// let op_own = unsafe { layout.buf.add(layout.cqe_size as usize - 1).read_volatile() };
/// println!("the first CQE has opcode {:#x}", op_own >> 4);
/// // SAFETY: the other code has consumed none, and has stopped.
/// let cq = unsafe { raw.give_back(layout.consumer)? };
/// # drop(cq); Ok(()) }
/// ```
#[doc(alias = "mlx5dv_init_obj")]
#[doc(alias = "MLX5DV_OBJ_CQ")]
pub struct RawCompletionQueue {
    cq: CompletionQueue,
    layout: CqLayout,
}

impl RawCompletionQueue {
    /// Takes a queue.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` on a device of another driver, [`is_forked`](crate::Error::is_forked) in a child of the process that
    /// created it; the queue comes back with the error.
    pub fn take(cq: CompletionQueue) -> std::result::Result<Self, ErrorWith<CompletionQueue>> {
        const VERB: &str = "take_cq";
        if let Err(error) = cq.inner.file().check_fork(VERB) {
            return Err(error.with(cq));
        }
        match cq.mlx5().map(Mlx5Cq::layout) {
            Some(layout) => Ok(RawCompletionQueue { cq, layout }),
            None => Err(foreign(VERB).with(cq)),
        }
    }

    /// The queue as addresses and numbers, which are valid as long as this exists, in the process that created it. The
    /// consumer index is where the library stopped.
    pub fn layout(&self) -> CqLayout {
        self.layout
    }

    /// Everything but polling.
    pub fn control(&self) -> CqControl {
        self.cq.control()
    }

    /// Arms the queue as foreign code does by doorbell record and register: the next completion behind `consumer`, of 24
    /// bits, raises an event at its channel. `events` is the number of its events that were read from there. A device
    /// in this process sees no store to the register, and is told here.
    ///
    /// # Errors
    ///
    /// [`is_forked`](crate::Error::is_forked) in a child of the process that created the queue.
    pub fn arm(&mut self, consumer: u32, events: u32, notify: Notify) -> Result<()> {
        /// Bits of the count of events in the word that arms, and where they are.
        const COUNT: (u32, u32) = (3, 28);
        self.cq.inner.file().check_fork("req_notify_cq")?;
        if let Some(cq) = self.cq.mlx5_mut() {
            cq.resume(consumer);
            cq.arm_hosted(notify == Notify::Solicited, (events & COUNT.0) << COUNT.1);
        }
        Ok(())
    }

    /// Gives the queue back to the library, which goes on with the CQE `consumer`, of 24 bits.
    ///
    /// # Safety
    ///
    /// The foreign code has stopped, and has consumed all CQEs before this one and no other.
    ///
    /// # Errors
    ///
    /// [`is_forked`](crate::Error::is_forked) in a child of the process that created it; this comes back with the error.
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn give_back(
        mut self,
        consumer: u32,
    ) -> std::result::Result<CompletionQueue, ErrorWith<RawCompletionQueue>> {
        if let Err(error) = self.cq.inner.file().check_fork("give_back_cq") {
            return Err(error.with(self));
        }
        if let Some(cq) = self.cq.mlx5_mut() {
            cq.resume(consumer);
        }
        Ok(self.cq)
    }
}

impl std::fmt::Debug for RawCompletionQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RawCompletionQueue").field("layout", &self.layout).finish()
    }
}
