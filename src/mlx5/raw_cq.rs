//! A completion queue that foreign code polls. Pairs with `mlx5dv_init_obj` for `MLX5DV_OBJ_CQ`.

use super::raw_qp::foreign;
use crate::cq::{CompletionQueue, CqBuilder, CqControl, CqRef, Notify, sealed};
use crate::error::{Error, ErrorWith, Result};
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
    ignores_overrun: bool,
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
                Ok(RawCompletionQueue { cq, layout, ignores_overrun: false })
            }
            None => Err(foreign(VERB).with(cq)),
        }
    }

    /// Creates a queue whose overruns the device ignores: it writes over completions that nobody has consumed, in place of
    /// putting the queue and its queue pairs into error. So code that counts completions, or looks at the newest alone,
    /// need not store a consumer index.
    ///
    /// ```no_run
    /// # fn f(context: &uverbs::Context) -> uverbs::Result<()> {
    /// use uverbs::mlx5::RawCompletionQueue;
    ///
    /// let cq = RawCompletionQueue::ignoring_overrun(context.cq_builder(15))?;
    /// println!("{} CQEs", cq.layout().cqe_count);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`CqBuilder::build`] and of [`take`](Self::take).
    #[doc(alias = "IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN")]
    pub fn ignoring_overrun(builder: CqBuilder) -> Result<Self> {
        builder.context().file.provider.mlx5("create_cq")?;
        let mut raw = Self::take(builder.ignore_overrun().build()?)?;
        raw.ignores_overrun = true;
        Ok(raw)
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
    /// The foreign code has stopped, and has consumed all CQEs before this one and no other. No CQE behind them is of a
    /// queue pair that is destroyed, or that was [reset](super::RawQueuePair::reset_among) after it. Events of the queue
    /// were read by the library's channel, if it has one.
    ///
    /// # Errors
    ///
    /// [`is_forked`](crate::Error::is_forked) in a child of the process that created it; `EINVAL` for a queue that
    /// [ignores overruns](Self::ignoring_overrun). This comes back with the error.
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn give_back(
        mut self,
        consumer: u32,
    ) -> std::result::Result<CompletionQueue, ErrorWith<RawCompletionQueue>> {
        if let Err(error) = self.cq.inner.file().check_fork("give_back_cq") {
            return Err(error.with(self));
        }
        if self.ignores_overrun {
            let detail = "the device ignores overruns of the queue: the library would read completions that change";
            return Err(Error::invalid("give_back_cq", detail).with(self));
        }
        if let Some(cq) = self.cq.mlx5_mut() {
            cq.resume(consumer);
        }
        Ok(self.cq)
    }

    /// Destroys the queue; dropping it does the same silently, as soon as nothing uses it any more.
    ///
    /// ```no_run
    /// # fn f(raw: uverbs::mlx5::RawCompletionQueue) -> Result<(), Box<dyn std::error::Error>> {
    /// raw.destroy()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`CompletionQueue::destroy`]; this comes back with the error.
    pub fn destroy(self) -> std::result::Result<(), ErrorWith<RawCompletionQueue>> {
        let RawCompletionQueue { cq, layout, ignores_overrun } = self;
        cq.destroy()
            .map_err(|failed| failed.map(|cq| RawCompletionQueue { cq, layout, ignores_overrun }))
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
