//! A completion queue that foreign code polls. Pairs with `mlx5dv_init_obj` for `MLX5DV_OBJ_CQ`.

use super::raw_qp::foreign;
use crate::cq::{CompletionQueue, CqControl, CqRef, Notify, sealed};
use crate::error::{ErrorWith, Result};
use crate::memory::queue_layout::CqLayout;

/// A completion queue that other code than this library polls.
///
/// Queue pairs are made on it as on a [`CompletionQueue`]. It is destroyed when it, its handles and its queue pairs are
/// gone. Its methods may be called from any thread. A shared receive queue of the library whose receives complete
/// here is given none of them back, and ends full: take that as well.
///
/// ```no_run
/// # fn f(cq: uverbs::CompletionQueue) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::mlx5::RawCompletionQueue;
///
/// let mut raw = RawCompletionQueue::take(cq)?;
/// let layout = raw.layout();
/// // If the queue has a channel, the first completion raises an event.
/// raw.arm(layout.consumer, uverbs::Notify::Next)?;
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
    /// Takes a queue, with the completions that are in it.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` on a device of another driver, [`is_forked`](crate::Error::is_forked) in a child of the process that
    /// created it; the queue comes back with the error.
    pub fn take(mut cq: CompletionQueue) -> std::result::Result<Self, ErrorWith<CompletionQueue>> {
        const VERB: &str = "take_cq";
        if let Err(error) = cq.inner.file().check_fork(VERB) {
            return Err(error.with(cq));
        }
        let events = cq.events_read();
        match cq.mlx5_mut() {
            Some(ring) => {
                let layout = ring.lend(events);
                Ok(RawCompletionQueue { cq, layout })
            }
            None => Err(foreign(VERB).with(cq)),
        }
    }

    /// The queue as addresses and numbers, which are valid as long as this exists, in the process that created it.
    pub fn layout(&self) -> CqLayout {
        self.layout
    }

    /// Everything but polling.
    pub fn control(&self) -> CqControl {
        self.cq.control()
    }

    /// Arms the queue as foreign code does by doorbell record and register: the next completion behind `consumer`, of 24
    /// bits, raises an event at its channel, whose events the library reads and counts. A device in this process sees no
    /// store to the register, and is told here.
    ///
    /// # Errors
    ///
    /// Those of [`CompletionQueue::req_notify`].
    pub fn arm(&mut self, consumer: u32, notify: Notify) -> Result<()> {
        if let Some(cq) = self.cq.mlx5_mut() {
            cq.move_to(consumer);
        }
        self.cq.req_notify(notify)
    }

    /// Gives the queue back to the library, which goes on with the CQE `consumer`, of 24 bits.
    ///
    /// # Safety
    ///
    /// The foreign code has stopped, and has consumed all CQEs before this one and no other. No CQE behind them is of a queue
    /// pair that is destroyed. Events of the queue were read by the library's channel, if it has one.
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

    /// Destroys the queue; dropping it does the same silently, as soon as nothing uses it any more.
    ///
    /// # Errors
    ///
    /// Those of [`CompletionQueue::destroy`]; this comes back with the error.
    pub fn destroy(self) -> std::result::Result<(), ErrorWith<RawCompletionQueue>> {
        let RawCompletionQueue { cq, layout } = self;
        cq.destroy().map_err(|failed| failed.map(|cq| RawCompletionQueue { cq, layout }))
    }
}

impl CqRef for RawCompletionQueue {}

impl sealed::Sealed for RawCompletionQueue {
    fn control(&self) -> &CqControl {
        &self.cq
    }

    fn compact_updates(&self) {
        sealed::Sealed::compact_updates(&self.cq);
    }
}

impl std::fmt::Debug for RawCompletionQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RawCompletionQueue").field("layout", &self.layout).finish()
    }
}
