//! Send queues and their batches. A send goes from here through the provider's ring to the doorbell.

use super::{QpHandle, QpState};
use crate::identity::Identity;
use crate::memory::gate::Gate;
use crate::pd::{Exclusive, Shared, Sharing};
use crate::provider::mlx5::sq::Mlx5Sq;
use crate::provider::{SendCursor, SendRing, SendRingMut};
use crate::td::ThreadDomain;
use crate::uverbs::doorbell::Doorbell;
use crate::wr::{Payload, PostError, RingError, SendWr, Sge};
use std::marker::PhantomData;

/// The send queue of a queue pair.
///
/// Moves between threads, and takes `&mut self` for posting.
///
/// A thread that sends the messages of another one:
///
/// ```no_run
/// # fn f(qp: uverbs::QueuePair, messages: std::sync::mpsc::Receiver<(u64, uverbs::Sge)>) {
/// use uverbs::{QpParts, SendQueue, SendWr, Sge};
///
/// fn send(queue: &mut SendQueue, id: u64, message: Sge) -> Result<(), Box<dyn std::error::Error>> {
///     let mut batch = queue.batch()?;
///     batch.push(SendWr::send(&[message]).id(id).signaled())?;
///     // SAFETY: the thread that polls frees the message's memory when `id` has completed.
///     Ok(unsafe { batch.ring()? })
/// }
///
/// let QpParts { send: mut queue, recv, control } = qp.split();
/// let sender = std::thread::spawn(move || {
///     for (id, message) in messages {
///         if let Err(error) = send(&mut queue, id, message) {
///             // After `StillQueued` the message is still in the queue: its memory must stay.
///             println!("message {id}: {error}");
///         }
///     }
/// });
/// # drop((recv, control, sender)); }
/// ```
#[derive(Debug)]
pub struct SendQueue<S: Sharing = Shared> {
    pub(super) context: SendContext,
    ring: SendRing,
    sharing: PhantomData<fn() -> S>,
}

/// The parts of a send queue beside its ring.
#[derive(Debug)]
pub(super) struct SendContext {
    pub(super) qp: QpHandle,
    /// The queue pair's state; shut in a forked child.
    gate: Gate,
    /// The thread domain that the queue pair was created under.
    thread: Identity,
}

impl<S: Sharing> SendQueue<S> {
    pub(super) fn new(qp: QpHandle, ring: SendRing, gate: Gate) -> Self {
        let pd = qp.pd();
        let thread = pd.and_then(|pd| pd.td.as_ref()).map(Identity::of).unwrap_or_default();
        let context = SendContext { qp, gate, thread };
        SendQueue { context, ring, sharing: PhantomData }
    }

    /// Whether no other queue pair rings the register of this queue, which is mlx5's.
    #[cfg(test)]
    pub(crate) fn owns_register(&self) -> bool {
        matches!(&self.ring, SendRing::Mlx5(ring) if ring.owns_register())
    }

    /// Whether [`SendBatch::try_push_lent`] pushes nothing.
    pub(crate) fn checks_all(&self) -> bool {
        matches!(self.ring, SendRing::Rxe(_))
    }

    /// The queue of an mlx5 device.
    pub(super) fn mlx5(&self) -> Option<&Mlx5Sq> {
        if let SendRing::Mlx5(ring) = &self.ring { Some(ring) } else { None }
    }

    /// As [`mlx5`](Self::mlx5), to change.
    pub(super) fn mlx5_mut(&mut self) -> Option<&mut Mlx5Sq> {
        if let SendRing::Mlx5(ring) = &mut self.ring { Some(ring) } else { None }
    }

    pub(super) fn into_ring(self) -> (SendRing, Gate) {
        (self.ring, self.context.gate)
    }

    /// Resets the ring after the kernel reset the queue pair.
    pub(super) fn reset(&mut self) {
        self.ring.reset();
    }

    /// Starts a batch. All its requests reach the device when it is rung. A batch that is dropped or forgotten sends
    /// nothing. If it contained a bind or an invalidate, later requests may get a fence that they do not need.
    ///
    /// # Errors
    ///
    /// [`PostError::State`] before the queue pair is ready to send, [`PostError::Forked`] in a
    /// child of the process that created it.
    #[doc(alias = "ibv_wr_start")]
    #[inline(always)]
    pub fn batch(&mut self) -> Result<SendBatch<'_, S>, PostError> {
        let context = &self.context;
        if !context.gate.is_at(QpState::RTS.gate_level()) {
            return Err(context.refusal());
        }
        let (ring, cursor) = self.ring.begin();
        Ok(SendBatch { context, ring, cursor, count: 0, sharing: PhantomData })
    }
}

impl SendContext {
    /// The reason why the gate refuses a batch.
    #[cold]
    fn refusal(&self) -> PostError {
        if self.gate.is_shut() { PostError::Forked } else { PostError::State(self.qp.state()) }
    }

    /// Makes the kernel read the queue: on rxe a system call takes the place of a doorbell.
    fn post_send_db(&self) -> Result<(), RingError> {
        let doorbell = Doorbell::Send { qp_handle: self.qp.object.handle() };
        self.qp.file().kernel.ring(doorbell).map_err(RingError::StillQueued)
    }
}

/// Sends that are written and not handed to the device yet.
///
/// # What the caller of `ring` promises
///
/// A request is *over* when it has completed, when [`QueuePair::reset`](crate::QueuePair::reset) returned
/// `Ok`, or when the queue pair was [destroyed or dropped](crate::QueuePair::destroy). If the queue pair was
/// leaked (see [`Context::leaked`](crate::Context::leaked)), the request is never over.
///
/// - **Memory.** All memory that the requests name by local keys stays valid until they are over; memory
///   that the device writes is not borrowed meanwhile. If the memory's region is destroyed before, no
///   other is registered in the protection domain meanwhile: a device may give it the same key, as mlx5's
///   driver does, and the requests would name its memory.
/// - **Windows.** A [binding](crate::WindowBinding) is posted at most once, and to the queue pair that it was
///   prepared for. Until that request is over, the binding is not [settled](crate::MemoryWindow::settle), and
///   the window is not reallocated, destroyed or dropped. After any of these the binding is not posted any
///   more. The request names window and region by key: it would open another region that has got the key by
///   then.
/// - **`wr_id`s.** The caller knows to which request a completion belongs. The device carries the number and
///   checks nothing: if two requests have the same number, the first completion only says that one of
///   them is over. A successful completion also completes the unsignaled requests that were posted to the
///   same queue before its own, and no later ones.
///
/// # Example
///
/// ```no_run
/// # fn f(qp: &mut uverbs::QueuePair, wrs: &[uverbs::SendWr<'_>]) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::SendBatch;
///
/// let mut batch: SendBatch<'_> = qp.send_batch()?;
/// for wr in wrs.iter().take(batch.room() as usize) {
///     batch.push(*wr)?;
/// }
/// if !batch.is_empty() {
///     println!("{} requests, and room for {} more", batch.len(), batch.room());
///     // SAFETY: the memory that the requests name is the device's until they are over.
///     unsafe { batch.ring()? };
/// }
/// # Ok(()) }
/// ```
#[doc(alias = "ibv_wr_abort")]
#[derive(Debug)]
pub struct SendBatch<'q, S: Sharing = Shared> {
    context: &'q SendContext,
    ring: SendRingMut<'q>,
    cursor: SendCursor,
    count: u32,
    sharing: PhantomData<fn() -> S>,
}

impl<S: Sharing> SendBatch<'_, S> {
    /// Appends a request. Inline data is copied now; the entries of `wr` may be reused afterwards.
    ///
    /// # Errors
    ///
    /// A [`PostError`] that names the fault. The batch is unchanged and may be rung without the request.
    #[inline(always)]
    pub fn push(&mut self, wr: SendWr<'_>) -> Result<(), PostError> {
        match &mut self.ring {
            SendRingMut::Rxe(sq) => {
                // Copied, so that mlx5's cursor and request stay in registers: 45 instructions of a send.
                let (mut cursor, wr) = (self.cursor, { wr });
                sq.push(&mut cursor, &wr)?;
                self.cursor = cursor;
            }
            SendRingMut::Mlx5(sq) => sq.push(&mut self.cursor, &wr)?,
        }
        self.count += 1;
        Ok(())
    }

    /// As [`push`](Self::push), for a caller that counts the batch's requests itself. The request has inline
    /// data, or no SGE but `sge`. Returns `false` and pushes nothing if the request needs the checks of
    /// [`push_lent_checked`](Self::push_lent_checked).
    #[inline(always)]
    pub(crate) fn try_push_lent(&mut self, wr: &SendWr<'_>, sge: Option<Sge>) -> bool {
        let SendRingMut::Mlx5(sq) = &self.ring else { return false };
        match wr.payload {
            Payload::Inline(_) | Payload::InlineList(_) => sq.try_push(&mut self.cursor, wr),
            Payload::Sges([]) => {
                let wr = SendWr { payload: Payload::Sges(sge.as_slice()), ..*wr };
                sq.try_push(&mut self.cursor, &wr)
            }
            Payload::Sges(_) => false,
        }
    }

    /// As [`push`](Self::push), with all checks, for a caller that counts the batch's requests itself.
    #[inline(always)]
    pub(crate) fn push_lent_checked(&mut self, wr: SendWr<'_>) -> Result<(), PostError> {
        // Copied, as in `push`: 24 instructions of an owned write, 5 with 32 to a doorbell.
        let (mut cursor, wr) = (self.cursor, { wr });
        match &mut self.ring {
            SendRingMut::Rxe(sq) => sq.push(&mut cursor, &wr)?,
            SendRingMut::Mlx5(sq) => sq.push_checked(&mut cursor, &wr)?,
        }
        self.cursor = cursor;
        Ok(())
    }

    /// Requests pushed so far.
    pub fn len(&self) -> u32 {
        match &self.ring {
            SendRingMut::Rxe(sq) => sq.pushed(&self.cursor),
            SendRingMut::Mlx5(sq) => sq.pushed(&self.cursor),
        }
    }

    /// Whether nothing was pushed yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Requests that still fit.
    pub fn room(&self) -> u32 {
        self.cursor.room
    }

    /// Hands the batch to the device and rings the doorbell; `single` if the batch is one request.
    #[inline(always)]
    fn ring_cursor(self, single: bool) -> Result<(), RingError> {
        match self.ring {
            SendRingMut::Rxe(sq) => {
                sq.ring(self.cursor.at)?;
                self.context.post_send_db()
            }
            SendRingMut::Mlx5(sq) => sq.ring(&self.cursor, single),
        }
    }
}

impl SendBatch<'_, Shared> {
    /// Hands the batch to the device.
    ///
    /// # Safety
    ///
    /// The caller keeps the promises of
    /// [`SendBatch`](SendBatch#what-the-caller-of-ring-promises): on memory, on memory windows, and on
    /// `wr_id`s.
    ///
    /// # Errors
    ///
    /// After [`RingError::StillQueued`] the requests stay in the queue and are sent with the next batch: do
    /// not free the memory. mlx5 never returns it. [`RingError::Forked`].
    #[doc(alias = "ibv_wr_complete")]
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    #[inline(always)]
    pub unsafe fn ring(self) -> Result<(), RingError> {
        let count = self.count.into();
        self.ring_lent(count)
    }

    /// As [`ring`](Self::ring), for requests that name only memory which was lent to them; see
    /// [`owned`](crate::owned). `count` is their number if it is 0 or 1, otherwise anything greater.
    #[inline(always)]
    pub(crate) fn ring_lent(self, count: u64) -> Result<(), RingError> {
        if count == 0 {
            return Ok(());
        }
        self.ring_cursor(count == 1)
    }
}

impl SendBatch<'_, Exclusive> {
    /// Hands the batch to the device. Holding the token proves that nobody else rings the same
    /// doorbell.
    ///
    /// # Safety
    ///
    /// The caller keeps the promises of
    /// [`SendBatch`](SendBatch#what-the-caller-of-ring-promises): on memory, on memory windows, and on
    /// `wr_id`s.
    ///
    /// # Errors
    ///
    /// [`RingError::ForeignThreadDomain`] if the queue was created under another one: nothing is sent.
    /// After [`RingError::StillQueued`] the requests stay in the queue and are sent with the next batch: do
    /// not free the memory. mlx5 never returns it. [`RingError::Forked`].
    #[doc(alias = "ibv_wr_complete")]
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    #[inline(always)]
    pub unsafe fn ring(self, td: &mut ThreadDomain) -> Result<(), RingError> {
        let count = self.count.into();
        self.ring_lent(td, count)
    }

    /// As [`ring`](Self::ring), for requests that name only memory which was lent to them; see
    /// [`owned`](crate::owned). `count` is their number if it is 0 or 1, otherwise anything greater.
    #[inline(always)]
    pub(crate) fn ring_lent(self, td: &mut ThreadDomain, count: u64) -> Result<(), RingError> {
        if self.context.thread != Identity::of(&td.inner) {
            return Err(RingError::ForeignThreadDomain);
        }
        self.ring_held(count)
    }

    /// As [`ring_lent`](Self::ring_lent), for a caller that keeps the token of the queue's thread domain on its own
    /// thread, and compared it when it took the queue over.
    #[inline(always)]
    pub(crate) fn ring_held(self, count: u64) -> Result<(), RingError> {
        if count == 0 {
            return Ok(());
        }
        self.ring_cursor(count == 1)
    }
}
