//! Receive queues and their batches. A receive costs no system call.

use super::{QpHandle, QpState, QpType};
use crate::memory::gate::Gate;
use crate::provider::mlx5::rq::Mlx5Rq;
use crate::provider::{RecvCursor, RecvRing, RecvRingMut};
use crate::wr::{PostError, RecvWr, RingError, Sge};
use std::num::NonZeroU8;

/// The receive queue of a queue pair.
///
/// Moves between threads, and takes `&mut self` for posting.
///
/// The thread that polls keeps the receive queue full, while another one sends:
///
/// ```no_run
/// use uverbs::{CompletionQueue, MemoryRegion, RecvQueue, RecvWr};
///
/// /// Receives of 4096 bytes each; `wr_id` is the number of a slot of `inbox`.
/// fn serve(
///     mut queue: RecvQueue,
///     mut cq: CompletionQueue,
///     inbox: &MemoryRegion,
/// ) -> Result<(), Box<dyn std::error::Error>> {
///     loop {
///         let mut completions = cq.poll()?;
///         while let Some(completion) = completions.next() {
///             let slot = completion.ok()?.wr_id() as usize;
///             println!("{} bytes in slot {slot}", completion.byte_len());
///             // The slot takes the next message.
///             let mut batch = queue.batch()?;
///             batch.push(RecvWr::new(&[inbox.sge(slot * 4096..(slot + 1) * 4096)?]).id(slot as u64))?;
///             // SAFETY: `inbox` outlives the queue pair, and a slot is read only when a message came.
///             unsafe { batch.ring()? };
///         }
///     }
/// }
/// ```
#[derive(Debug)]
pub struct RecvQueue {
    pub(super) qp: QpHandle,
    ring: RecvRing,
    /// The queue pair's state; shut in a forked child.
    gate: Gate,
    /// The level of the gate in the first state in which receives may be posted.
    least_level: NonZeroU8,
}

impl RecvQueue {
    pub(super) fn new(qp: QpHandle, ring: RecvRing, gate: Gate) -> Self {
        let least_level = first_state(qp.qp_type).gate_level();
        RecvQueue { qp, ring, gate, least_level }
    }

    /// The queue of an mlx5 device.
    pub(super) fn mlx5(&self) -> Option<&Mlx5Rq> {
        if let RecvRing::Mlx5(ring) = &self.ring { Some(ring) } else { None }
    }

    /// As [`mlx5`](Self::mlx5), to change.
    pub(super) fn mlx5_mut(&mut self) -> Option<&mut Mlx5Rq> {
        if let RecvRing::Mlx5(ring) = &mut self.ring { Some(ring) } else { None }
    }

    pub(super) fn into_ring(self) -> (RecvRing, Gate) {
        (self.ring, self.gate)
    }

    /// Resets the ring after the kernel reset the queue pair.
    pub(super) fn reset(&mut self) {
        self.ring.reset();
    }

    /// Starts a batch. Its receives are posted once the batch is rung; a batch that is dropped or forgotten posts none.
    ///
    /// On rxe a receive that is posted in state [`ERR`](crate::QpState::ERR) is flushed only when
    /// something else makes the kernel process the queue pair.
    ///
    /// # Errors
    ///
    /// [`PostError::State`] in state [`RESET`](crate::QpState::RESET), and for raw packets in
    /// [`INIT`](crate::QpState::INIT), in which a device would receive already;
    /// [`PostError::Forked`] in a child of the process that created the queue pair.
    #[doc(alias = "ibv_post_recv")]
    #[inline(always)]
    pub fn batch(&mut self) -> Result<RecvBatch<'_>, PostError> {
        if !self.gate.is_at(self.least_level) {
            return Err(self.refusal());
        }
        let (ring, cursor) = self.ring.begin();
        Ok(RecvBatch::new(ring, cursor))
    }

    /// The reason why no batch may begin.
    #[cold]
    fn refusal(&self) -> PostError {
        if self.gate.is_shut() { PostError::Forked } else { PostError::State(self.qp.state()) }
    }
}

/// The first state in which receives may be posted: INIT, but RTR for raw packets, because their
/// device receives from INIT on.
fn first_state(qp_type: QpType) -> QpState {
    if qp_type == QpType::RAW_PACKET { QpState::RTR } else { QpState::INIT }
}

/// Receives that the device does not know of yet, for a queue pair or a shared receive queue.
///
/// ```no_run
/// # fn f(qp: &mut uverbs::QueuePair, sges: &[uverbs::Sge]) -> uverbs::Result<()> {
/// use uverbs::{RecvBatch, RecvWr};
///
/// let mut batch: RecvBatch<'_> = qp.recv_batch()?;
/// for (id, sge) in sges.iter().enumerate().take(batch.room() as usize) {
///     batch.push(RecvWr::new(&[*sge]).id(id as u64))?;
/// }
/// if !batch.is_empty() {
///     println!("{} receives", batch.len());
///     // SAFETY: the memory that the receives name is the device's until they are over.
///     unsafe { batch.ring()? };
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct RecvBatch<'q> {
    ring: RecvRingMut<'q>,
    cursor: RecvCursor,
    count: u32,
}

impl<'q> RecvBatch<'q> {
    #[inline(always)]
    pub(crate) fn new(ring: RecvRingMut<'q>, cursor: RecvCursor) -> Self {
        RecvBatch { ring, cursor, count: 0 }
    }

    /// Appends a request.
    ///
    /// # Errors
    ///
    /// A [`PostError`] that names the fault; the batch is unchanged.
    #[inline(always)]
    pub fn push(&mut self, recv: RecvWr<'_>) -> Result<(), PostError> {
        match &self.ring {
            RecvRingMut::Rxe(rq) => {
                // Copied, so that the request of mlx5 stays in registers: 4 instructions of 39 with 32 to a doorbell.
                let recv = { recv };
                rq.push(&mut self.cursor, &recv)?;
            }
            RecvRingMut::Mlx5(rq) => rq.push(&mut self.cursor, &recv)?,
            RecvRingMut::Mlx5Srq(srq) => srq.push(&mut self.cursor, &recv)?,
        }
        self.count += 1;
        Ok(())
    }

    /// As [`push`](Self::push), with at most one SGE.
    #[inline(always)]
    pub(crate) fn push_lent(&mut self, wr_id: u64, sge: Option<Sge>) -> Result<(), PostError> {
        let recv = RecvWr { wr_id, sges: sge.as_slice() };
        let pushed = match &self.ring {
            RecvRingMut::Rxe(_) => false,
            RecvRingMut::Mlx5(rq) => rq.try_push(&mut self.cursor, &recv),
            RecvRingMut::Mlx5Srq(srq) => srq.try_push(&mut self.cursor, &recv),
        };
        if !pushed {
            // Copied, as in `push`: 5 instructions.
            let sge = { sge };
            let recv = RecvWr { wr_id, sges: sge.as_slice() };
            match &self.ring {
                RecvRingMut::Rxe(rq) => rq.push(&mut self.cursor, &recv)?,
                RecvRingMut::Mlx5(rq) => rq.push_checked(&mut self.cursor, &recv)?,
                RecvRingMut::Mlx5Srq(srq) => srq.push_checked(&mut self.cursor, &recv)?,
            }
        }
        self.count += 1;
        Ok(())
    }

    /// Requests pushed so far.
    pub fn len(&self) -> u32 {
        self.count
    }

    /// Whether nothing was pushed yet.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Requests that still fit.
    pub fn room(&self) -> u32 {
        self.cursor.room
    }

    /// Hands the batch to the device.
    ///
    /// # Safety
    ///
    /// All memory that the requests name must stay valid, and must not be borrowed, until they are over:
    /// the device writes it. A request is over when it has completed, when
    /// [`QueuePair::reset`](crate::QueuePair::reset) returned `Ok`, or when the queue was destroyed or
    /// [dropped](crate::QueuePair::destroy). Those of a shared receive queue end with that queue; a reset
    /// leaves them posted. If a queue was leaked (see [`Context::leaked`](crate::Context::leaked)), they
    /// are never over. If the memory's region is destroyed before, no other may be registered in the
    /// protection domain meanwhile: a device may give it the same key. The caller knows by `wr_id` to
    /// which request a completion belongs.
    ///
    /// # Errors
    ///
    /// [`RingError::Forked`] in a child of the process that created the queue: nothing is received.
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    #[inline(always)]
    pub unsafe fn ring(self) -> Result<(), RingError> {
        if self.count == 0 {
            return Ok(());
        }
        self.ring_lent()
    }

    /// As [`ring`](Self::ring), for requests that name only memory which was lent to them; see
    /// [`owned`](crate::owned). The caller has pushed some.
    ///
    /// The only error of today's drivers is [`RingError::Forked`].
    #[inline(always)]
    pub(crate) fn ring_lent(self) -> Result<(), RingError> {
        match self.ring {
            RecvRingMut::Rxe(rq) => rq.ring(self.cursor),
            RecvRingMut::Mlx5(rq) => rq.ring(self.cursor),
            RecvRingMut::Mlx5Srq(srq) => srq.ring(self.cursor, self.count),
        }
    }
}
