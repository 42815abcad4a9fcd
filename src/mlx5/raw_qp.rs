//! A queue pair that foreign code drives. Pairs with `mlx5dv_init_obj` for `MLX5DV_OBJ_QP`.

use super::RawCompletionQueue;
use super::devx::{DevxRef, kept};
use crate::context::Context;
use crate::cq::{CompletionQueue, CqControl, sealed};
use crate::error::{Error, ErrorWith};
use crate::memory::queue_layout::{QpIndices, QpLayout};
use crate::pd::{Shared, Sharing};
use crate::provider::mlx5::rq::Mlx5Rq;
use crate::qp::{QpControl, QueuePair};
use crate::wr::RingError;
use rustix::io::Errno;
use std::any::Any;
use std::sync::Arc;

/// A queue pair whose queues are driven by other code than this library: a GPU, an engine, a thread that writes WQEs
/// itself.
///
/// The library neither posts to it nor looks into its queues. Its state is changed as always, by
/// [`control`](Self::control). It is destroyed when it is dropped, and the memory of its queues stays as long as it. Its
/// methods may be called from any thread.
///
/// Completions that reach a completion queue of this library have the index of their WQE as `wr_id`: of a send the
/// WQEBB where the WQE begins, both modulo the length of the ring. The opcode of each send reads as
/// [`SEND`](crate::WcOpcode::SEND).
///
/// ```no_run
/// # fn f(qp: uverbs::QueuePair, wqe: [u8; 64]) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::mlx5::{QpIndices, RawQueuePair};
///
/// let mut raw = RawQueuePair::take(qp)?;
/// let layout = raw.layout();
/// println!("{} WQEBBs of queue pair {:#x}", layout.sq.wqe_count, layout.qpn);
/// // SAFETY: the send queue has no other writer, and its first WQEBB is free.
/// unsafe { layout.sq.buf.cast::<[u8; 64]>().write(wqe) };
/// // SAFETY: the WQE names memory that stays registered until it has completed.
/// unsafe { raw.ring(1, *wqe.first_chunk().expect("64 bytes"))? };
/// // ... when it has completed:
/// // SAFETY: one WQEBB was posted in all, and nothing is outstanding.
/// let qp = unsafe { raw.give_back(QpIndices { wqebbs: 1, receives: 0 })? };
/// # drop(qp); Ok(()) }
/// ```
///
/// A reset gives it back whatever is outstanding:
///
/// ```no_run
/// # fn f(raw: uverbs::mlx5::RawQueuePair, cq: &mut uverbs::CompletionQueue) -> uverbs::Result<()> {
/// println!("in state {}", raw.control().state());
/// let qp = raw.reset(&mut [cq])?;
/// # drop(qp); Ok(()) }
/// ```
#[doc(alias = "mlx5dv_init_obj")]
#[doc(alias = "MLX5DV_OBJ_QP")]
#[derive(Debug)]
pub struct RawQueuePair<S: Sharing = Shared> {
    qp: QueuePair<S>,
    layout: QpLayout,
}

impl<S: Sharing> RawQueuePair<S> {
    /// Takes a queue pair to which nothing is posted, or whose requests have all completed, which the library knows when
    /// the completion of the last one was polled.
    ///
    /// # Errors
    ///
    /// `EBUSY` while requests are outstanding, and for one that shares its doorbell register with others: a thread
    /// domain has a register of its own, and a context has some more, for its first queue pairs. `EOPNOTSUPP` on a device
    /// of another driver, [`Error::is_forked`] in a child of the process that created it; the queue pair comes back
    /// with the error.
    pub fn take(qp: QueuePair<S>) -> Result<Self, ErrorWith<QueuePair<S>>> {
        const VERB: &str = "take_qp";
        if let Err(error) = qp.qp.file().check_fork(VERB) {
            return Err(error.with(qp));
        }
        let Some((sq, rq)) = qp.mlx5() else { return Err(foreign(VERB).with(qp)) };
        let (sends, receives) = (sq.outstanding(), rq.map_or(0, Mlx5Rq::outstanding));
        if sends != 0 || receives != 0 {
            let detail = format!(
                "{sends} sends and {receives} receives are outstanding: poll the completions of the last ones, or reset \
                 the queue pair"
            );
            return Err(Error::new(VERB, Errno::BUSY).detail(detail).with(qp));
        }
        if !sq.owns_register() {
            let detail = "other queue pairs of the context ring its doorbell register, too: create it in a parent domain \
                          with a thread domain, which has a register of its own";
            return Err(Error::new(VERB, Errno::BUSY).detail(detail).with(qp));
        }
        sq.number_wqes();
        rq.into_iter().for_each(Mlx5Rq::number_wqes);
        let (dbrec, (send, register)) = (sq.dbrec().as_ptr(), sq.layout());
        let posted = QpIndices { wqebbs: sq.posted(), receives: rq.map_or(0, Mlx5Rq::posted) };
        let rq = rq.map(Mlx5Rq::layout);
        let raw_packet = sq.raw_packet_numbers();
        let qpn = qp.qpn().0;
        let layout = QpLayout { qpn, sq: send, rq, dbrec, register, posted, raw_packet };
        Ok(RawQueuePair { qp, layout })
    }

    /// The queues as addresses and numbers, which are valid as long as this exists, in the process that created the
    /// queue pair.
    pub fn layout(&self) -> QpLayout {
        self.layout
    }

    /// Everything but the queues.
    pub fn control(&self) -> &QpControl {
        &self.qp
    }

    /// Hands WQEs to the device, up to the WQEBB `wqebbs`, counted from the reset of the queue pair on: stores the count in
    /// the doorbell record, and the first eight bytes of the newest WQE in the register. Code that does both itself, with
    /// the barriers that the processor needs, has no need of this; a device in this process sees no store, and is told
    /// here.
    ///
    /// # Safety
    ///
    /// All memory that the WQEs name by key is valid until they have completed, and memory that the device writes is not
    /// borrowed. Nobody rings another queue pair of its thread domain meanwhile.
    ///
    /// # Errors
    ///
    /// [`RingError::Forked`] in a child of the process that created the queue pair: nothing is sent.
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn ring(&mut self, wqebbs: u16, head: [u8; 8]) -> Result<(), RingError> {
        match self.qp.mlx5_mut() {
            Some((sq, _)) => sq.ring_foreign(wqebbs, u64::from_ne_bytes(head)),
            None => Ok(()),
        }
    }

    /// Gives the queue pair back to the library, which goes on behind the WQEs that were posted.
    ///
    /// # Safety
    ///
    /// The foreign code has stopped. The indices are those that it stored last in the doorbell record, or 0. All WQEs have
    /// completed, and the completions were taken out of the completion queues.
    ///
    /// # Errors
    ///
    /// [`Error::is_forked`] in a child of the process that created it; this comes back with the error.
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn give_back(
        mut self,
        indices: QpIndices,
    ) -> Result<QueuePair<S>, ErrorWith<RawQueuePair<S>>> {
        if let Err(error) = self.qp.qp.file().check_fork("give_back_qp") {
            return Err(error.with(self));
        }
        if let Some((sq, rq)) = self.qp.mlx5_mut() {
            sq.resume(indices.wqebbs);
            rq.into_iter().for_each(|rq| rq.resume(indices.receives));
        }
        Ok(self.qp)
    }

    /// Brings the queue pair to state [`RESET`](crate::QpState::RESET), where the device has none of its WQEs any more,
    /// and gives it back. See [`QueuePair::reset`]. Its completion queues are the library's; one that completes to a
    /// [`RawCompletionQueue`] has [`reset_among`](Self::reset_among).
    ///
    /// # Errors
    ///
    /// As there; this comes back with the error.
    pub fn reset(
        mut self,
        cqs: &mut [&mut CompletionQueue],
    ) -> Result<QueuePair<S>, ErrorWith<RawQueuePair<S>>> {
        match self.qp.reset(cqs) {
            Ok(()) => Ok(self.qp),
            Err(error) => Err(error.with(self)),
        }
    }

    /// As [`reset`](Self::reset), while foreign code has completion queues of it, `raw`; `cqs` are those that the library
    /// polls, if any. Completions from before stay in the raw ones, where they name the same queue pair as later ones: the
    /// foreign code consumes them before anything is posted again.
    ///
    /// ```no_run
    /// # fn f(raw: uverbs::mlx5::RawQueuePair, cq: &uverbs::mlx5::RawCompletionQueue) -> uverbs::Result<()> {
    /// // One completion queue for both.
    /// let qp = raw.reset_among(&[cq], &mut [])?;
    /// # drop(qp); Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// `EINVAL` if these are not exactly the queues that the queue pair completes to; this comes back with the error.
    pub fn reset_among(
        mut self,
        raw: &[&RawCompletionQueue],
        cqs: &mut [&mut CompletionQueue],
    ) -> Result<QueuePair<S>, ErrorWith<RawQueuePair<S>>> {
        let foreign: Vec<&CqControl> = raw.iter().map(|cq| sealed::Sealed::control(*cq)).collect();
        match self.qp.reset_among(cqs, &foreign) {
            Ok(()) => Ok(self.qp),
            Err(error) => Err(error.with(self)),
        }
    }

    /// Destroys the queue pair; dropping it does the same silently.
    ///
    /// ```no_run
    /// # fn f(raw: uverbs::mlx5::RawQueuePair) -> Result<(), Box<dyn std::error::Error>> {
    /// raw.destroy()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`QueuePair::destroy`]; this comes back with the error.
    pub fn destroy(self) -> Result<(), ErrorWith<RawQueuePair<S>>> {
        let RawQueuePair { qp, layout } = self;
        qp.destroy().map_err(|failed| failed.map(|qp| RawQueuePair { qp, layout }))
    }
}

impl<S: Sharing> DevxRef for RawQueuePair<S> {}

impl<S: Sharing> kept::Sealed for RawQueuePair<S> {
    fn context(&self) -> Context {
        self.control().context()
    }

    fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        self.control().keep()
    }
}

/// The error for a queue of another driver.
pub(super) fn foreign(verb: &'static str) -> Error {
    Error::new(verb, Errno::OPNOTSUPP).detail("the queue is not one of an mlx5 device")
}
