//! Queue pairs whose requests take their memory.

use super::completion::{Done, Outcome};
use super::cq::OwnedCompletionQueue;
use super::lending::{Desk, Draft, Refused};
use super::memory::{Lend, LendMut, Post};
use super::qp_map::{Lent, Route, parts};
use crate::pd::{Exclusive, Shared, Sharing};
use crate::qp::{QpControl, QueuePair, RecvBatch, SendBatch};
use crate::td::ThreadDomain;
use crate::wr::{Payload, PostError, SendOp, SendWr, Sge};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// A queue pair whose requests take their memory, and whose completions give it back with a tag of
/// type `T`.
///
/// Made by [`OwnedCompletionQueue::adopt`](super::OwnedCompletionQueue::adopt). Posting takes
/// `&mut self`; polling is the completion queue's, on this thread or another. Every request
/// completes, as if it were signaled. Dropping the queue pair resets it and frees what was lent
/// once the kernel confirmed that; what it does not confirm is leaked and
/// [counted](crate::Context::leaked). One on a shared receive queue is better
/// [closed](Self::close).
pub struct OwnedQueuePair<T, S: Sharing = Shared> {
    pub(super) qp: QueuePair<S>,
    pub(super) route: Arc<Route<T>>,
    sends: Desk<T>,
    /// `None` when receives come from a shared receive queue.
    recvs: Option<Desk<T>>,
}

impl<T, S: Sharing> OwnedQueuePair<T, S> {
    pub(super) fn new(
        qp: QueuePair<S>,
        route: Arc<Route<T>>,
        sends: Desk<T>,
        recvs: Option<Desk<T>>,
    ) -> Self {
        OwnedQueuePair { qp, route, sends, recvs }
    }

    /// Starts a batch of sends. What is pushed to it reaches the device when it is rung; what a
    /// batch holds that is dropped before is dropped with it.
    ///
    /// # Errors
    ///
    /// Those of [`SendQueue::batch`](crate::SendQueue::batch).
    #[inline(always)]
    pub fn send_batch(&mut self) -> Result<OwnedSendBatch<'_, T, S>, PostError> {
        Ok(OwnedSendBatch { draft: self.sends.draft(), batch: self.qp.send_batch()? })
    }

    /// Starts a batch of receives.
    ///
    /// # Errors
    ///
    /// Those of [`RecvQueue::batch`](crate::RecvQueue::batch), and [`PostError::SharedReceives`].
    #[inline(always)]
    pub fn recv_batch(&mut self) -> Result<OwnedRecvBatch<'_, T>, PostError> {
        match &mut self.recvs {
            Some(recvs) => Ok(OwnedRecvBatch::new(recvs.draft(), self.qp.recv_batch()?)),
            None => Err(PostError::SharedReceives),
        }
    }

    /// Sends that can be posted before one completes.
    pub fn send_room(&mut self) -> usize {
        self.sends.room()
    }

    /// Receives that can be posted before one completes; none to a shared receive queue.
    pub fn recv_room(&mut self) -> usize {
        self.recvs.as_mut().map_or(0, Desk::room)
    }

    /// Brings the queue pair back to state [`RESET`](crate::QpState::RESET). Requests that have not
    /// completed are found by the next poll of `cq`, as if they had been flushed.
    ///
    /// # Errors
    ///
    /// Those of [`QueuePair::reset`](crate::QueuePair::reset). What the kernel refused may be done
    /// by half: a queue pair on a shared receive queue may be in state `RESET` then, where nothing
    /// but another `reset` helps.
    pub fn reset(&mut self, cq: &mut OwnedCompletionQueue<T>) -> crate::Result<()> {
        self.qp.check_cqs("reset_qp", &[&mut cq.cq])?;
        // Nobody posted what was only pushed to a batch, and then forgotten.
        self.sends.tidy();
        self.recvs.iter_mut().for_each(Desk::tidy);
        if self.recvs.is_none() {
            // Now, or what arrives between looking and resetting would be discarded, and with it the
            // place in the shared receive queue. Should it fail, so does what follows.
            let _ = self.qp.revoke();
        }
        // What completed is given back as such, and the rest is discarded by the reset.
        let _ = cq.gather();
        self.qp.reset(&mut [&mut cq.cq])?;
        // What was discarded lies in the completion queue until somebody looks, and the room is
        // counted on by what is posted next.
        let _ = cq.gather();
        let qpn = self.qp.qpn();
        Lent::reclaim(self.tables(), |entry| {
            if let Some((memory, tag)) = parts(entry) {
                cq.keep(Done { memory, tag, outcome: Outcome::flushed(qpn) });
            }
        });
        Ok(())
    }

    /// Resets the queue pair and drops it: what was received and what was not even sent are found by
    /// the next poll of `cq`.
    ///
    /// A queue pair that is merely dropped takes along what it received and nobody polled. The memory
    /// of its own queues is free then, but receives of a shared queue belong to that: their memory
    /// stays lent, and their places are not used again, until the shared queue and all its queue
    /// pairs are gone. What a message had only begun to fill stays so in any case.
    ///
    /// # Errors
    ///
    /// Those of [`reset`](Self::reset); the queue pair is dropped all the same.
    pub fn close(mut self, cq: &mut OwnedCompletionQueue<T>) -> crate::Result<()> {
        self.reset(cq)
    }

    /// Whether it takes its receives from a shared receive queue.
    pub(crate) fn shares_receives(&self) -> bool {
        self.recvs.is_none()
    }

    /// Everything lent to queues of this queue pair alone.
    pub(super) fn tables(&self) -> impl Iterator<Item = &Lent<T>> {
        std::iter::once(self.sends.lent()).chain(self.recvs.as_ref().map(Desk::lent))
    }
}

/// Everything that is not posting.
impl<T, S: Sharing> Deref for OwnedQueuePair<T, S> {
    type Target = QpControl;

    fn deref(&self) -> &QpControl {
        &self.qp
    }
}

impl<T, S: Sharing> Drop for OwnedQueuePair<T, S> {
    fn drop(&mut self) {
        if self.qp.revoke() {
            // First, for what is dropped is the program's, and may panic.
            self.route.close();
            Lent::reclaim(self.tables(), drop);
        } else {
            // Nobody knows what the device still does, nor what it may complete.
            self.tables().for_each(|lent| std::mem::forget(lent.clone()));
            self.qp.qp.file().count_leak();
        }
    }
}

impl<T, S: Sharing> fmt::Debug for OwnedQueuePair<T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnedQueuePair").field(&self.qp).finish()
    }
}

/// Sends that the device does not know of yet, with the memory that they work on.
pub struct OwnedSendBatch<'q, T, S: Sharing = Shared> {
    /// First: should the batch be dropped, this takes everything back.
    pub(super) draft: Draft<'q, T>,
    pub(super) batch: SendBatch<'q, S>,
}

impl<T, S: Sharing> OwnedSendBatch<'_, T, S> {
    /// Appends a request that works on `memory`: what it sends or writes to the peer, or where
    /// what it reads goes. The request itself names none, and its number is not used:
    ///
    /// ```no_run
    /// # use uverbs::{Remote, SendWr, owned::*};
    /// # fn f(qp: &mut OwnedQueuePair<u32>, buffer: Buffer, remote: Remote) {
    /// let mut batch = qp.send_batch().unwrap();
    /// batch.push(SendWr::read(remote, &[]), buffer, 7).unwrap();
    /// batch.push(SendWr::send(&[]).inline(b"short"), (), 8).unwrap();
    /// batch.ring().unwrap();
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`SendBatch::push`]; [`PostError::NamesMemory`] if the request names memory by
    /// number, as that which [binds](SendWr::bind_mw) a window does;
    /// [`PostError::ForeignMemory`]; [`PostError::ReadOnly`] for a
    /// [`SharedBuffer`](super::SharedBuffer) that the device would write. The memory comes back
    /// with the error.
    #[inline(always)]
    pub fn push<L: Lend>(
        &mut self,
        wr: SendWr<'_>,
        memory: L,
        tag: T,
    ) -> Result<(), Refused<L, T>> {
        // Without closures, which are not always compiled in place.
        let OwnedSendBatch { draft, batch } = self;
        if let Err(error) = check(draft, &wr, &memory) {
            return Err(Refused { memory, tag, error });
        }
        let place = match draft.place() {
            Ok(place) => place,
            Err(error) => return Err(Refused { memory, tag, error }),
        };
        memory.deposit(place, tag, Appended { batch, wr })
    }

    /// Requests pushed so far.
    pub fn len(&self) -> u32 {
        self.batch.len()
    }

    /// Whether nothing was pushed yet.
    pub fn is_empty(&self) -> bool {
        self.batch.is_empty()
    }
}

impl<T> OwnedSendBatch<'_, T, Shared> {
    /// Hands the batch to the device.
    ///
    /// # Errors
    ///
    /// [`PostError::Kernel`] if the kernel refused to look at the queue: the requests stay in it,
    /// with what was lent to them, and are sent with the next batch. [`PostError::Forked`].
    #[inline(always)]
    pub fn ring(self) -> Result<(), PostError> {
        let OwnedSendBatch { draft, batch } = self;
        let count = draft.count();
        told(draft, batch.ring_lent(count))
    }
}

impl<T> OwnedSendBatch<'_, T, Exclusive> {
    /// Hands the batch to the device; see [`SendBatch::ring`].
    ///
    /// # Errors
    ///
    /// [`PostError::ForeignThreadDomain`] if the queue was created under another one, and then
    /// what was pushed is dropped; [`PostError::Kernel`] if the kernel refused to look at the
    /// queue: the requests stay in it, with what was lent to them, and are sent with the next
    /// batch. [`PostError::Forked`].
    #[inline(always)]
    pub fn ring(self, td: &mut ThreadDomain) -> Result<(), PostError> {
        let OwnedSendBatch { draft, batch } = self;
        let count = draft.count();
        told(draft, batch.ring_lent(td, count))
    }
}

/// Keeps what was lent if the device knows of it.
#[inline(always)]
fn told<T>(draft: Draft<'_, T>, answer: Result<(), PostError>) -> Result<(), PostError> {
    if matches!(answer, Ok(()) | Err(PostError::Kernel(_))) {
        draft.rung();
    }
    answer
}

#[inline(always)]
fn check<T, L: Lend>(draft: &Draft<'_, T>, wr: &SendWr<'_>, memory: &L) -> Result<(), PostError> {
    if !draft.knows(memory) {
        return Err(PostError::ForeignMemory);
    }
    if wr.op.writes_here() && !memory.is_writable() {
        return Err(PostError::ReadOnly);
    }
    Ok(())
}

/// Appends a send.
struct Appended<'b, 'q, 'w, S: Sharing> {
    batch: &'b mut SendBatch<'q, S>,
    wr: SendWr<'w>,
}

impl<S: Sharing> Post for Appended<'_, '_, '_, S> {
    #[inline(always)]
    fn post(self, ticket: u64, memory: Option<Sge>) -> Result<(), PostError> {
        let wr = self.wr.id(ticket).signaled();
        if self.batch.try_push_lent(&wr, memory) {
            return Ok(());
        }
        append(self.batch, wr, memory)
    }
}

/// Appends a receive.
struct AppendedRecv<'b, 'q> {
    batch: &'b mut RecvBatch<'q>,
}

impl Post for AppendedRecv<'_, '_> {
    #[inline(always)]
    fn post(self, ticket: u64, memory: Option<Sge>) -> Result<(), PostError> {
        self.batch.push_lent(ticket, memory)
    }
}

/// Appends a send on the memory `sge` that has to be looked at first.
#[inline(always)]
pub(super) fn append<S: Sharing>(
    batch: &mut SendBatch<'_, S>,
    wr: SendWr<'_>,
    sge: Option<Sge>,
) -> Result<(), PostError> {
    if let SendOp::BindMw(_) = wr.op {
        // By a key that may be that of other memory by now.
        return Err(PostError::NamesMemory);
    }
    match wr.payload {
        Payload::Inline(_) => batch.push_lent_otherwise(wr),
        Payload::Sges([]) => {
            // A copy, lest all of them are kept in memory for this.
            let apart = sge;
            batch.push_lent_otherwise(SendWr { payload: Payload::Sges(apart.as_slice()), ..wr })
        }
        Payload::Sges(_) => Err(PostError::NamesMemory),
    }
}

/// Receives that the device does not know of yet, with the memory that they go to.
pub struct OwnedRecvBatch<'q, T> {
    /// First: should the batch be dropped, this takes everything back.
    pub(super) draft: Draft<'q, T>,
    pub(super) batch: RecvBatch<'q>,
}

impl<'q, T> OwnedRecvBatch<'q, T> {
    pub(super) fn new(draft: Draft<'q, T>, batch: RecvBatch<'q>) -> Self {
        OwnedRecvBatch { draft, batch }
    }

    /// Appends a receive into `memory`. A datagram is preceded by 40 bytes for a global route
    /// header; of a [`Buffer`](super::Buffer) they are cleared, for a device may write them in part or
    /// not at all. [`Outcome::filled`](super::Outcome::filled) tells how much the device wrote.
    ///
    /// # Errors
    ///
    /// Those of [`RecvBatch::push`]; [`PostError::ForeignMemory`]; [`PostError::ReadOnly`]. The
    /// memory comes back with the error.
    #[inline(always)]
    pub fn push<L: LendMut>(&mut self, memory: L, tag: T) -> Result<(), Refused<L, T>> {
        self.push_any(memory, tag)
    }

    /// As [`push`](Self::push), for what is known to be writable only when it is looked at.
    #[inline(always)]
    pub(crate) fn push_any<L: Lend>(&mut self, mut memory: L, tag: T) -> Result<(), Refused<L, T>> {
        let OwnedRecvBatch { draft, batch } = self;
        if !draft.knows(&memory) {
            return Err(Refused { memory, tag, error: PostError::ForeignMemory });
        }
        if !memory.is_writable() {
            return Err(Refused { memory, tag, error: PostError::ReadOnly });
        }
        if draft.has_headers() {
            memory.clear_header();
        }
        let place = match draft.place() {
            Ok(place) => place,
            Err(error) => return Err(Refused { memory, tag, error }),
        };
        memory.deposit(place, tag, AppendedRecv { batch })
    }

    /// Requests pushed so far.
    pub fn len(&self) -> u32 {
        self.batch.len()
    }

    /// Whether nothing was pushed yet.
    pub fn is_empty(&self) -> bool {
        self.batch.is_empty()
    }

    /// Hands the batch to the device.
    #[inline(always)]
    pub fn ring(self) {
        let OwnedRecvBatch { draft, batch } = self;
        if draft.count() > 0 {
            batch.ring_lent();
        }
        draft.rung();
    }
}
