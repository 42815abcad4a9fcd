//! Queue pairs whose requests take their memory.

use super::completion::{Finished, Outcome};
use super::cq::OwnedCompletionQueue;
use super::lending::{Append, BatchLender, Lend, LendMut, Lent, Loans, OtherLoan, PushError};
use super::lending::{QueueLender, RequestSlot, memory_and_tag, sge_of};
use super::qp_map::AdoptedQp;
use crate::cq::PollError;
use crate::first_panic::FirstPanic;
use crate::lending::compact_enum::{CompactEnum, Content};
use crate::lending::loan_table::WrIds;
use crate::pd::{Exclusive, Shared, Sharing};
use crate::qp::{QpControl, QueuePair, RecvBatch, SendBatch};
use crate::td::ThreadDomain;
use crate::wc::WcOpcode;
use crate::wr::{Payload, PostError, RingError, SendFlags, SendOp, SendWr, Sge};
use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// A queue pair whose requests take their memory, and whose completions give it back with a tag of
/// type `T`.
///
/// Made by [`OwnedCompletionQueue::adopt`](super::OwnedCompletionQueue::adopt). Posting takes `&mut self`;
/// the completion queue is polled on this thread or [another](super#one-thread-polls-others-post). Everything
/// that is not posting is behind [`Deref`], as a [`QpControl`].
///
/// Dropping the queue pair resets it, and frees what it was lent as soon as the kernel has confirmed that. If the kernel
/// refuses the reset, it is freed when the queue pair is destroyed; what the kernel confirms neither way is leaked and
/// [counted](crate::Context::leaked). A queue pair on a
/// shared receive queue should be [closed](Self::close) instead.
///
/// See [`owned`](super#) for an example.
///
/// ```no_run
/// # use uverbs::owned::{BufferPool, OwnedCompletionQueue, OwnedQueuePair};
/// # fn f(mut qp: OwnedQueuePair<u32>, cq: &mut OwnedCompletionQueue<u32>, pool: &BufferPool)
/// # -> Result<(), Box<dyn std::error::Error>> {
/// // As many receives as the queue takes and the pool has.
/// let room = qp.recv_room();
/// let mut receives = qp.recv_batch()?;
/// for buffer in std::iter::from_fn(|| pool.take().ok()).take(room) {
///     receives.push(buffer, 0)?;
/// }
/// receives.ring()?;
/// // All that was lent comes back as flushed, and the queue pair can be connected again.
/// qp.reset(cq)?;
/// assert_eq!(qp.send_room(), 16);
/// # Ok(()) }
/// ```
pub struct OwnedQueuePair<T, S: Sharing = Shared> {
    pub(super) qp: QueuePair<S>,
    pub(super) adopted: Arc<AdoptedQp<T>>,
    sends: QueueLender<T>,
    /// It has no slots when receives come from a shared receive queue.
    recvs: QueueLender<T>,
}

impl<T, S: Sharing> OwnedQueuePair<T, S> {
    /// Whether each send needs checks that [`OwnedSendBatch::try_push`] does not make, as on rxe.
    pub(crate) fn checks_all_sends(&self) -> bool {
        self.qp.send.checks_all()
    }

    pub(super) fn new(
        qp: QueuePair<S>,
        adopted: Arc<AdoptedQp<T>>,
        sends: QueueLender<T>,
        recvs: QueueLender<T>,
    ) -> Self {
        OwnedQueuePair { qp, adopted, sends, recvs }
    }

    /// Starts a batch of sends. The device sees them when the batch is rung. A batch that is dropped
    /// before drops the memory of its requests.
    ///
    /// # Errors
    ///
    /// Those of [`SendQueue::batch`](crate::SendQueue::batch).
    #[inline(always)]
    pub fn send_batch(&mut self) -> Result<OwnedSendBatch<'_, T, S>, PostError> {
        Ok(OwnedSendBatch { lender: self.sends.begin(), batch: self.qp.send.batch()? })
    }

    /// Starts a batch of receives. The device sees them when the batch is rung.
    ///
    /// # Errors
    ///
    /// Those of [`RecvQueue::batch`](crate::RecvQueue::batch), and [`PostError::SharedReceives`] for a queue
    /// pair on a shared receive queue.
    #[inline(always)]
    pub fn recv_batch(&mut self) -> Result<OwnedRecvBatch<'_, T>, PostError> {
        Ok(OwnedRecvBatch::new(self.recvs.begin(), self.qp.recv_batch()?))
    }

    /// Sends that can be posted before one completes. Looks at each place of the queue.
    pub fn send_room(&mut self) -> usize {
        self.sends.room()
    }

    /// Receives that can be posted before one completes; 0 for a queue pair on a shared receive queue.
    /// Looks at each place of the queue.
    pub fn recv_room(&mut self) -> usize {
        self.recvs.room()
    }

    /// Moves the queue pair to state [`RESET`](crate::QpState::RESET). The next poll of `cq` finds the
    /// requests that had not completed, as [flushed](crate::WcStatus::WR_FLUSH_ERR): sends in their order, and then receives
    /// in theirs. Memory and tags of forgotten batches
    /// are dropped at the end; a panic in one of them goes on when all are.
    ///
    /// # Errors
    ///
    /// Those of [`QueuePair::reset`](crate::QueuePair::reset). After an error the queue pair may be in state
    /// `RESET` all the same if it is on a shared receive queue; then call `reset` again.
    pub fn reset(&mut self, cq: &mut OwnedCompletionQueue<T>) -> crate::Result<()> {
        self.reset_keeping(cq, OwnedCompletionQueue::poll_into_backlog).map(drop)
    }

    /// As [`reset`](Self::reset), and runs no code of the program: returns what was lent to forgotten batches, for the
    /// caller to drop when no lock is held and no memory has to be proven back. `poll` polls until there is nothing
    /// more, before and after the reset.
    pub(crate) fn reset_keeping(
        &mut self,
        cq: &mut OwnedCompletionQueue<T>,
        mut poll: impl FnMut(&mut OwnedCompletionQueue<T>) -> Result<(), PollError>,
    ) -> crate::Result<Unposted<T>> {
        self.qp.check_cqs("reset_qp", &[&mut cq.cq], &[])?;
        if self.shares_receives() {
            // Stop the device first: the reset would discard what arrives after the poll, and with it places
            // of the shared receive queue. If this fails, the reset below fails as well.
            let _ = self.qp.qp.revoke();
        }
        // Requests that completed are given back with their completions, which the reset would discard.
        let _ = poll(cq);
        self.qp.reset(&mut [&mut cq.cq])?;
        // Discarded completions take room in the completion queue until it is polled, and the next requests
        // need the room.
        let _ = poll(cq);
        let mut unposted = Unposted(Vec::new());
        // The device was not told of requests in a forgotten batch: they are not flushed.
        self.sends.take_unposted(&mut unposted.0);
        self.recvs.take_unposted(&mut unposted.0);
        let qpn = self.qp.qpn();
        Loans::reclaim(self.loan_tables(), |lent| {
            if let Some((memory, tag)) = memory_and_tag(lent) {
                cq.keep(Finished { memory, tag, outcome: Outcome::flushed(qpn) });
            }
        });
        Ok(unposted)
    }

    /// [Resets](Self::reset) the queue pair and drops it. The next poll of `cq` finds what was received, and
    /// what was not sent.
    ///
    /// Dropping the queue pair discards the completions that were not polled. Memory lent to its own queues
    /// is freed then. Receives of a shared queue whose completions are discarded stay lent, and their places
    /// unused, until the shared queue and all its queue pairs are destroyed. So does, also after `close`,
    /// a receive that a message had begun to fill.
    ///
    /// # Errors
    ///
    /// Those of [`reset`](Self::reset); the queue pair is dropped all the same.
    pub fn close(mut self, cq: &mut OwnedCompletionQueue<T>) -> crate::Result<()> {
        self.reset(cq)
    }

    /// Whether its receives come from a shared receive queue.
    pub(crate) fn shares_receives(&self) -> bool {
        self.qp.qp.srq().is_some()
    }

    /// The loan tables of its own sends and receives.
    pub(crate) fn loans(&self) -> [Loans<T>; 2] {
        [self.sends.loans().clone(), self.recvs.loans().clone()]
    }

    /// The loan tables of the queue pair's own queues.
    pub(super) fn loan_tables(&self) -> impl Iterator<Item = &Loans<T>> {
        [self.sends.loans(), self.recvs.loans()].into_iter()
    }
}

/// Memory and tags of requests that were never posted. Dropping them runs code of the program.
#[must_use]
pub(crate) struct Unposted<T>(Vec<Lent<T>>);

impl<T> Drop for Unposted<T> {
    fn drop(&mut self) {
        FirstPanic::drop_each(self.0.drain(..));
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
        // In a forked child nobody lets a slot go that another thread of the parent has held. What is lent there goes
        // with the tables.
        if self.qp.qp.file().check_fork("reset_qp").is_err() {
            return;
        }
        if self.qp.qp.revoke() {
            // First, because dropping the program's memory and tags may panic.
            self.adopted.close();
            Loans::reclaim(self.loan_tables(), drop);
            return;
        }
        // The device may still work on what is lent. It comes back when the queue pair is destroyed, which is tried
        // when its last handle is dropped; if the kernel refuses that, too, it is leaked with the queue pair.
        let mut kept: Vec<Box<dyn Any + Send>> = vec![Box::new(self.adopted.close_when_dropped())];
        let mut calls = FirstPanic::default();
        calls.catch(|| {
            Loans::reclaim(self.loan_tables(), |lent| {
                if let Some((memory, tag)) = memory_and_tag(lent) {
                    kept.push(Box::new(memory));
                    drop(tag);
                }
            });
        });
        self.qp.qp.keep(kept);
        calls.resume();
    }
}

impl<T, S: Sharing> fmt::Debug for OwnedQueuePair<T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnedQueuePair").field(&self.qp).finish()
    }
}

/// Sends that the device was not told of yet, with the memory that they work on.
///
/// From [`OwnedQueuePair::send_batch`].
///
/// As much of a program's own queue as has room:
///
/// ```no_run
/// # use std::collections::VecDeque;
/// # use uverbs::{PostError, Remote, SendWr, owned::{Buffer, OwnedQueuePair, OwnedSendBatch}};
/// # fn f(qp: &mut OwnedQueuePair<u32>, waiting: &mut VecDeque<(Remote, Buffer)>)
/// # -> Result<u32, Box<dyn std::error::Error>> {
/// let mut batch: OwnedSendBatch<'_, u32> = qp.send_batch()?;
/// while let Some((to, buffer)) = waiting.pop_front() {
///     if let Err(refused) = batch.push(SendWr::write(to, &[]), buffer, batch.len()) {
///         waiting.push_front((to, refused.memory));
///         if refused.error != PostError::Full {
///             return Err(refused.error.into());
///         }
///         break;
///     }
/// }
/// let written = batch.len();
/// if !batch.is_empty() {
///     batch.ring()?;
/// }
/// # Ok(written) }
/// ```
pub struct OwnedSendBatch<'q, T, S: Sharing = Shared> {
    /// Dropped first: it takes everything back.
    pub(super) lender: BatchLender<'q, T>,
    pub(super) batch: SendBatch<'q, S>,
}

impl<T, S: Sharing> OwnedSendBatch<'_, T, S> {
    /// Appends a request that works on `memory`: it sends the memory, writes it to the peer, or reads the
    /// peer's into it. `wr` itself names no memory; its `wr_id` and whether it is signaled do not count.
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
    /// Those of [`SendBatch::push`]; [`PostError::NamesMemory`] if `wr` names memory by key, which a request
    /// that [binds](SendWr::bind_mw) a window does; [`PostError::ForeignMemory`] for memory of another
    /// protection domain; [`PostError::ReadOnly`] for memory that the device would write and must not, a
    /// [`SharedBuffer`](super::SharedBuffer) for one. Memory and tag come back with the error.
    #[inline(always)]
    pub fn push<L: Lend>(
        &mut self,
        wr: SendWr<'_>,
        memory: L,
        tag: T,
    ) -> Result<(), PushError<L, T>> {
        self.push_as::<L, false, false>(wr, memory, tag)
    }

    /// As [`push`](Self::push), for a request that needs no further check. Of an error only memory and tag count: it may need
    /// a check, or find no room next to the last one. Nothing is out of line: where `push` and `ring` follow each other, the batch stays in
    /// registers.
    #[inline(always)]
    pub(crate) fn try_push<L: Lend>(
        &mut self,
        wr: SendWr<'_>,
        memory: L,
        tag: T,
    ) -> Result<(), PushError<L, T>> {
        self.push_as::<L, true, false>(wr, memory, tag)
    }

    /// As [`try_push`](Self::try_push), for a send or a write whose success is settled in its slot, which nobody is told of.
    #[inline(always)]
    pub(crate) fn try_push_settling_alone<L: Lend>(
        &mut self,
        wr: SendWr<'_>,
        memory: L,
        tag: T,
    ) -> Result<(), PushError<L, T>> {
        self.push_as::<L, true, true>(wr, memory, tag)
    }

    #[inline(always)]
    fn push_as<L: Lend, const COMMON: bool, const ALONE: bool>(
        &mut self,
        wr: SendWr<'_>,
        memory: L,
        tag: T,
    ) -> Result<(), PushError<L, T>> {
        let OwnedSendBatch { lender, batch } = self;
        if let Err(error) = check(lender, &wr, &memory) {
            return Err(PushError { memory, tag, error });
        }
        let slot = match if COMMON { lender.next_slot() } else { lender.free_slot() } {
            Ok(slot) => RequestSlot(if ALONE { slot.settling_alone() } else { slot }),
            Err(error) => return Err(PushError { memory, tag, error }),
        };
        memory.lend_in_slot(slot, tag, AppendSend::<_, COMMON> { batch, wr: wr.signaled() })
    }

    /// As [`push`](Self::push), for a request that raises no completion of its own if it succeeds: its memory
    /// comes back with the completion of a later signaled request of the same queue, or when the queue pair
    /// is reset or dropped.
    ///
    /// Polling gives each request back by itself, in the order of the queue:
    ///
    /// ```no_run
    /// # use uverbs::{Remote, SendWr, owned::*};
    /// # fn f(qp: &mut OwnedQueuePair<u32>, buffers: [Buffer; 3], to: Remote)
    /// # -> uverbs::Result<()> {
    /// let [first, second, last] = buffers;
    /// let mut batch = qp.send_batch()?;
    /// batch.push_unsignaled(SendWr::write(to, &[]), first, 1)?;
    /// batch.push_unsignaled(SendWr::write(to, &[]), second, 2)?;
    /// batch.push(SendWr::write_imm(to, &[], 3), last, 3)?;
    /// batch.ring()?;
    /// // One completion of the device; `poll` returns the requests 1, 2 and 3.
    /// # Ok(()) }
    /// ```
    ///
    /// The outcome of a request without a completion is made up: if the later completion is a success,
    /// [`SUCCESS`](crate::WcStatus::SUCCESS) with the request's opcode and, for reads and atomics, its
    /// length. If it is a failure, [`WR_FLUSH_ERR`](crate::WcStatus::WR_FLUSH_ERR): the request may have
    /// been executed or not.
    ///
    /// At least one request in half a queue is signaled whatever the program asks for, or a queue full of
    /// unsignaled requests would never have room again. Of a queue of one or two requests all are.
    ///
    /// # Errors
    ///
    /// Those of [`push`](Self::push).
    pub fn push_unsignaled<L: Lend>(
        &mut self,
        wr: SendWr<'_>,
        memory: L,
        tag: T,
    ) -> Result<(), PushError<L, T>> {
        let OwnedSendBatch { lender, batch } = self;
        if let Err(error) = check(lender, &wr, &memory) {
            return Err(PushError { memory, tag, error });
        }
        let slot = match lender.free_slot() {
            Ok(slot) => slot,
            Err(error) => return Err(PushError { memory, tag, error }),
        };
        let slot = match slot.unsignaled() {
            Ok(slot) => slot,
            Err(slot) => {
                return memory.lend_in_slot(
                    RequestSlot(slot),
                    tag,
                    AppendSend::<_, false> { batch, wr: wr.signaled() },
                );
            }
        };
        let (sge, wr) = (sge_of(&memory), SendWr { flags: wr.flags - SendFlags::SIGNALED, ..wr });
        if let Err(error) = (AppendSend::<_, false> { batch, wr }).append(slot.wr_id(), sge) {
            return Err(PushError { memory, tag, error });
        }
        let (opcode, byte_len) = (opcode(&wr.op), returned_bytes(&wr.op, sge));
        let memory = memory.into_memory();
        let other = OtherLoan::Unsignaled { memory, tag, opcode, byte_len };
        slot.lend(CompactEnum::new(Content::Large(other)));
        Ok(())
    }

    /// The `wr_id` of the only request that was pushed.
    #[inline(always)]
    pub(crate) fn only_wr_id(&self) -> u64 {
        self.lender.loans.only()
    }

    /// The `wr_id`s of the requests, all of which were [tried](Self::try_push) only.
    #[inline(always)]
    pub(crate) fn wr_ids(&self) -> WrIds {
        self.lender.loans.wr_ids()
    }

    /// The `wr_id` of the last request that was pushed.
    #[inline(always)]
    pub(crate) fn last(&self) -> u64 {
        self.lender.loans.last()
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
    /// After [`RingError::StillQueued`] the requests stay in the queue with their memory, and are sent with
    /// the next batch. [`RingError::Forked`] in a child of the process that created the queue pair.
    #[inline(always)]
    pub fn ring(self) -> Result<(), RingError> {
        let OwnedSendBatch { lender, batch } = self;
        let count = lender.loans.count();
        commit_if_posted(lender, batch.ring_lent(count))
    }

    /// As [`ring`](Self::ring), of a batch of one.
    #[inline(always)]
    pub(crate) fn ring_one(self) -> Result<(), RingError> {
        let OwnedSendBatch { lender, batch } = self;
        commit_one_if_posted(lender, batch.ring_lent(1))
    }
}

impl<T> OwnedSendBatch<'_, T, Exclusive> {
    /// Hands the batch to the device; see [`SendBatch::ring`].
    ///
    /// # Errors
    ///
    /// [`RingError::ForeignThreadDomain`] if the queue was created under another thread domain: the requests
    /// are dropped with their memory. After [`RingError::StillQueued`] the requests stay in the queue with
    /// their memory, and are sent with the next batch. [`RingError::Forked`] in a child of the process that
    /// created the queue pair.
    #[inline(always)]
    pub fn ring(self, td: &mut ThreadDomain) -> Result<(), RingError> {
        let OwnedSendBatch { lender, batch } = self;
        let count = lender.loans.count();
        commit_if_posted(lender, batch.ring_lent(td, count))
    }

    /// As [`ring`](Self::ring), for a caller that [keeps the token](SendBatch::ring_held) on its own thread.
    #[inline(always)]
    pub(crate) fn ring_held(self) -> Result<(), RingError> {
        let OwnedSendBatch { lender, batch } = self;
        let count = lender.loans.count();
        commit_if_posted(lender, batch.ring_held(count))
    }

    /// The same of a batch of one.
    #[inline(always)]
    pub(crate) fn ring_one_held(self) -> Result<(), RingError> {
        let OwnedSendBatch { lender, batch } = self;
        commit_one_if_posted(lender, batch.ring_held(1))
    }
}

impl<T, S: Sharing> fmt::Debug for OwnedSendBatch<'_, T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedSendBatch").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for OwnedRecvBatch<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedRecvBatch").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// Keeps what was lent if the requests are in the queue.
#[inline(always)]
fn commit_if_posted<T>(
    lender: BatchLender<'_, T>,
    rung: Result<(), RingError>,
) -> Result<(), RingError> {
    match rung {
        // Success has an arm of its own: one test for both costs each request six instructions more.
        Ok(()) => {
            lender.loans.commit();
            Ok(())
        }
        Err(error) => {
            if error.stays_queued() {
                lender.loans.commit();
            }
            Err(error)
        }
    }
}

/// The same for a batch of one.
#[inline(always)]
fn commit_one_if_posted<T>(
    lender: BatchLender<'_, T>,
    rung: Result<(), RingError>,
) -> Result<(), RingError> {
    match rung {
        Ok(()) => {
            lender.loans.commit_one();
            Ok(())
        }
        Err(error) => {
            if error.stays_queued() {
                lender.loans.commit_one();
            }
            Err(error)
        }
    }
}

#[inline(always)]
fn check<T, L: Lend>(
    lender: &BatchLender<'_, T>,
    wr: &SendWr<'_>,
    memory: &L,
) -> Result<(), PostError> {
    if !lender.knows(memory) {
        return Err(PostError::ForeignMemory);
    }
    if wr.op.writes_here() && !memory.is_writable() {
        return Err(PostError::ReadOnly);
    }
    Ok(())
}

/// The opcode of the completion of such a request.
fn opcode(op: &SendOp<'_>) -> WcOpcode {
    match op {
        SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) | SendOp::Packet(_) => {
            WcOpcode::SEND
        }
        SendOp::Write(_) | SendOp::WriteImm(..) => WcOpcode::WRITE,
        SendOp::Read(_) => WcOpcode::READ,
        SendOp::CompareSwap { .. } | SendOp::MaskedCompareSwap { .. } => WcOpcode::COMPARE_SWAP,
        SendOp::FetchAdd { .. } | SendOp::MaskedFetchAdd { .. } => WcOpcode::FETCH_ADD,
        SendOp::BindMw(_) => WcOpcode::BIND_MW,
        SendOp::LocalInv(_) => WcOpcode::LOCAL_INV,
        SendOp::Flush { .. } => WcOpcode::FLUSH,
        SendOp::AtomicWrite { .. } => WcOpcode::ATOMIC_WRITE,
    }
}

/// How many bytes a request writes to the memory that it names.
fn returned_bytes(op: &SendOp<'_>, sge: Option<Sge>) -> u32 {
    match op {
        SendOp::Read(_) => sge.map_or(0, |sge| sge.length),
        _ if op.writes_here() => 8,
        _ => 0,
    }
}

/// Appends a send by the provider's common way, or unless `COMMON` after a full check.
struct AppendSend<'b, 'q, 'w, S: Sharing, const COMMON: bool> {
    batch: &'b mut SendBatch<'q, S>,
    wr: SendWr<'w>,
}

impl<S: Sharing, const COMMON: bool> Append for AppendSend<'_, '_, '_, S, COMMON> {
    #[inline(always)]
    fn append(self, wr_id: u64, memory: Option<Sge>) -> Result<(), PostError> {
        let wr = self.wr.id(wr_id);
        match self.batch.try_push_lent(&wr, memory) {
            true => Ok(()),
            false if COMMON => Err(PostError::Full),
            false => append(self.batch, wr, memory),
        }
    }
}

/// Appends a receive.
struct AppendRecv<'b, 'q> {
    batch: &'b mut RecvBatch<'q>,
}

impl Append for AppendRecv<'_, '_> {
    #[inline(always)]
    fn append(self, wr_id: u64, memory: Option<Sge>) -> Result<(), PostError> {
        self.batch.push_lent(wr_id, memory)
    }
}

/// Appends a send on the memory `sge` after a full check.
#[inline(always)]
pub(super) fn append<S: Sharing>(
    batch: &mut SendBatch<'_, S>,
    wr: SendWr<'_>,
    sge: Option<Sge>,
) -> Result<(), PostError> {
    if let SendOp::BindMw(_) = wr.op {
        // It names a region by key, which may be another region's by now.
        return Err(PostError::NamesMemory);
    }
    match wr.payload {
        Payload::Inline(_) | Payload::InlineList(_) => batch.push_lent_checked(wr),
        Payload::Sges([]) => {
            // A copy, as what is passed out of line has to be in memory.
            let sge = { sge };
            batch.push_lent_checked(SendWr { payload: Payload::Sges(sge.as_slice()), ..wr })
        }
        Payload::Sges(_) => Err(PostError::NamesMemory),
    }
}

/// Receives that the device was not told of yet, with the memory that messages go to.
///
/// From [`OwnedQueuePair::recv_batch`] and
/// [`OwnedSharedReceiveQueue::batch`](super::OwnedSharedReceiveQueue::batch).
///
/// A receive for every buffer of a pool, or for as many as there is room for:
///
/// ```no_run
/// # use uverbs::{PostError, owned::{BufferPool, OwnedQueuePair, OwnedRecvBatch}};
/// # fn f(qp: &mut OwnedQueuePair<u32>, pool: &BufferPool) -> uverbs::Result<u32> {
/// let mut batch: OwnedRecvBatch<'_, u32> = qp.recv_batch()?;
/// while let Ok(buffer) = pool.take() {
///     if let Err(refused) = batch.push(buffer, batch.len()) {
///         if refused.error != PostError::Full {
///             return Err(refused.into());
///         }
///         break;
///     }
/// }
/// let posted = batch.len();
/// if !batch.is_empty() {
///     batch.ring()?;
/// }
/// # Ok(posted) }
/// ```
pub struct OwnedRecvBatch<'q, T> {
    /// Dropped first: it takes everything back.
    pub(super) lender: BatchLender<'q, T>,
    pub(super) batch: RecvBatch<'q>,
}

impl<'q, T> OwnedRecvBatch<'q, T> {
    pub(super) fn new(lender: BatchLender<'q, T>, batch: RecvBatch<'q>) -> Self {
        OwnedRecvBatch { lender, batch }
    }

    /// Appends a receive into `memory`. [`Outcome::filled`](super::Outcome::filled) tells how many bytes a
    /// message wrote. A datagram lies behind 40 bytes for a global route header, which a device may write in
    /// part or not at all; in a [`Buffer`](super::Buffer) these bytes are cleared before.
    ///
    /// # Errors
    ///
    /// Those of [`RecvBatch::push`]; [`PostError::ForeignMemory`] for memory of another protection domain;
    /// [`PostError::ReadOnly`] for memory that a device must not write. Memory and tag come back with the
    /// error.
    #[inline(always)]
    pub fn push<L: LendMut>(&mut self, memory: L, tag: T) -> Result<(), PushError<L, T>> {
        self.push_any(memory, tag)
    }

    /// As [`push`](Self::push), for memory of which only its value tells whether it may be written.
    #[inline(always)]
    pub(crate) fn push_any<L: Lend>(
        &mut self,
        mut memory: L,
        tag: T,
    ) -> Result<(), PushError<L, T>> {
        let OwnedRecvBatch { lender, batch } = self;
        if !lender.prepare_recv(&mut memory) {
            return Err(PushError { memory, tag, error: PostError::ForeignMemory });
        }
        if !memory.is_writable() {
            return Err(PushError { memory, tag, error: PostError::ReadOnly });
        }
        let slot = match lender.free_slot() {
            Ok(slot) => slot,
            Err(error) => return Err(PushError { memory, tag, error }),
        };
        memory.lend_in_slot(RequestSlot(slot), tag, AppendRecv { batch })
    }

    /// The `wr_id` of the last request that was pushed.
    #[inline(always)]
    pub(crate) fn last(&self) -> u64 {
        self.lender.loans.last()
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
    ///
    /// # Errors
    ///
    /// [`RingError::Forked`] in a child of the process that created the queue: nothing is received.
    #[inline(always)]
    pub fn ring(self) -> Result<(), RingError> {
        let OwnedRecvBatch { lender, batch } = self;
        let rung = if lender.loans.count() > 0 { batch.ring_lent() } else { Ok(()) };
        match rung {
            Err(error) if !error.stays_queued() => Err(error),
            rung => {
                lender.loans.commit_recvs();
                rung
            }
        }
    }
}
