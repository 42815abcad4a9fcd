//! Receive queues and their batches. A receive costs no system call.

use super::{QpInner, QpState, QpType};
use crate::memory::fork::Epoch;
use crate::provider::{RecvCursor, RecvKind, RecvRing};
use crate::wr::{PostError, RecvWr, Sge};
use std::num::NonZeroU8;
use std::sync::Arc;

/// The receive queue of a queue pair.
///
/// Moves between threads, and takes `&mut self` for posting.
#[derive(Debug)]
pub struct RecvQueue {
    pub(super) qp: Arc<QpInner>,
    ring: RecvRing,
    epoch: Epoch,
    /// The first state in which the device may hear of receives.
    from: QpState,
    /// The same as the ring's gate says it.
    opening: NonZeroU8,
}

impl RecvQueue {
    pub(super) fn new(qp: Arc<QpInner>, ring: RecvRing) -> Self {
        let (epoch, from) = (qp.file().epoch, first_state(qp.qp_type));
        RecvQueue { qp, ring, epoch, from, opening: from.opening() }
    }

    pub(super) fn into_ring(self) -> RecvRing {
        self.ring
    }

    /// Begins anew after the kernel reset the queue pair.
    pub(super) fn reset(&mut self) {
        self.ring.reset();
    }

    /// Starts a batch. What is pushed to it is received into once the batch is rung; a batch that
    /// is dropped or forgotten leaves no trace.
    ///
    /// On rxe a receive that is posted in state [`ERR`](crate::QpState::ERR) is flushed only when
    /// something else makes the kernel look at the queue pair.
    ///
    /// # Errors
    ///
    /// [`PostError::State`] in state [`RESET`](crate::QpState::RESET), and for raw packets in
    /// [`INIT`](crate::QpState::INIT), in which a device would receive already;
    /// [`PostError::Forked`] in a child of the process that created the queue pair.
    #[inline(always)]
    pub fn batch(&mut self) -> Result<RecvBatch<'_>, PostError> {
        let cursor = match self.ring.enter(self.opening) {
            Some(cursor) => cursor,
            None => self.admit()?,
        };
        Ok(RecvBatch::new(&mut self.ring, RecvKind::Own, cursor))
    }

    /// As a gate would, or says why not: asked where none opens.
    #[inline(never)]
    fn admit(&mut self) -> Result<RecvCursor, PostError> {
        if self.epoch.is_over() {
            return Err(PostError::Forked);
        }
        let state = self.qp.state();
        if state < self.from { Err(PostError::State(state)) } else { Ok(self.ring.cursor()) }
    }
}

/// Where the queue of a raw packet queue pair works from INIT on, receives have to wait for RTR.
fn first_state(qp_type: QpType) -> QpState {
    if qp_type == QpType::RAW_PACKET { QpState::RTR } else { QpState::INIT }
}

/// Receives that the device does not know of yet, for a queue pair or a shared receive queue.
#[derive(Debug)]
pub struct RecvBatch<'q> {
    ring: &'q mut RecvRing,
    kind: RecvKind,
    cursor: RecvCursor,
    count: u32,
}

impl<'q> RecvBatch<'q> {
    #[inline(always)]
    pub(crate) fn new(ring: &'q mut RecvRing, kind: RecvKind, cursor: RecvCursor) -> Self {
        RecvBatch { ring, kind, cursor, count: 0 }
    }

    /// Appends a request.
    ///
    /// # Errors
    ///
    /// A [`PostError`] that says what was wrong; the batch is as it was.
    #[inline(always)]
    pub fn push(&mut self, recv: RecvWr<'_>) -> Result<(), PostError> {
        if !self.ring.try_push(self.kind, &mut self.cursor, &recv) {
            // Copies, lest all others are kept in memory for this.
            let mut cursor = self.cursor;
            self.ring.push(&mut cursor, &{ recv })?;
            self.cursor = cursor;
        }
        self.count += 1;
        Ok(())
    }

    /// As [`push`](Self::push) with at most one piece of memory, which is no slice anywhere.
    #[inline(always)]
    pub(crate) fn push_lent(&mut self, wr_id: u64, memory: Option<Sge>) -> Result<(), PostError> {
        let here = memory;
        let recv = RecvWr { wr_id, sges: here.as_slice() };
        if !self.ring.try_push(self.kind, &mut self.cursor, &recv) {
            // Copies, lest all others are kept in memory for this.
            let (apart, mut cursor) = (memory, self.cursor);
            self.ring.push(&mut cursor, &RecvWr { wr_id, sges: apart.as_slice() })?;
            self.cursor = cursor;
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
    /// All memory that the requests name must stay valid until they complete, or until the queue is
    /// destroyed, and must not be borrowed meanwhile: the device writes it. If the memory's region is
    /// destroyed before, no other may be registered in the protection domain meanwhile: a device may
    /// give it the same key. The caller knows by `wr_id` which request a completion is of.
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    #[inline(always)]
    pub unsafe fn ring(self) {
        if self.count > 0 {
            self.ring_lent();
        }
    }

    /// As [`ring`](Self::ring), for requests that name only memory which was lent to them; see
    /// [`owned`](crate::owned). Who calls has pushed some.
    #[inline(always)]
    pub(crate) fn ring_lent(self) {
        self.ring.publish(self.kind, self.cursor, self.count);
    }
}
