//! Send queues and their batches. A send goes from here through the provider's ring to the doorbell.

use super::{QpInner, QpState, QpType};
use crate::identity::Identity;
use crate::memory::fork::Epoch;
use crate::number::Rkey;
use crate::pd::{Exclusive, Shared, Sharing};
use crate::provider::{Cursor, SendRing};
use crate::td::ThreadDomain;
use crate::uverbs::doorbell::Doorbell;
use crate::wr::{Payload, PostError, Remote, RingError, SendOp, SendWr, Sge};
use std::marker::PhantomData;
use std::sync::Arc;

/// The send queue of a queue pair.
///
/// Moves between threads, and takes `&mut self` for posting.
#[derive(Debug)]
pub struct SendQueue<S: Sharing = Shared> {
    pub(super) qp: Arc<QpInner>,
    ring: SendRing,
    epoch: Epoch,
    /// What exists here and needs no look at anything but the request.
    usual: FastPathOps,
    /// The same for now: nothing while requests may have to wait for a change of keys.
    plain: FastPathOps,
    /// Which domain that is, to the kernel.
    domain: Identity,
    /// The thread domain that it was created under.
    thread: Identity,
    sharing: PhantomData<fn() -> S>,
}

/// Sets of operations.
#[derive(Clone, Copy, Debug, Default)]
struct FastPathOps {
    /// If the request has one piece of memory or as many as are allowed.
    pieces: u32,
    /// With their data inside.
    inline: u32,
    /// With a destination of the queue pair's own domain, whatever they carry.
    addressed: u32,
}

impl<S: Sharing> SendQueue<S> {
    pub(super) fn new(qp: Arc<QpInner>, ring: SendRing) -> Self {
        let (epoch, all) = (qp.file().epoch, plain(qp.qp_type));
        let datagrams = SendOp::Send.bit() | SendOp::SendImm(0).bit();
        // A piece is one too many for a queue that takes none, which is looked at here and not again.
        let takes = |ops| if ring.takes_pieces() { ops } else { 0 };
        let addressed = if qp.qp_type == QpType::UD { takes(datagrams) } else { 0 };
        let usual = FastPathOps { pieces: takes(all), inline: all & SendOp::INLINE, addressed };
        let pd = qp.pd();
        let domain = pd.map(|pd| pd.identity()).unwrap_or_default();
        let thread = pd.and_then(|pd| pd.td.as_ref()).map(Identity::of).unwrap_or_default();
        let (plain, sharing) = (FastPathOps::default(), PhantomData);
        let mut queue = SendQueue { qp, ring, epoch, usual, plain, domain, thread, sharing };
        queue.open();
        queue
    }

    /// Opens the short way for what is usual, or shuts it while requests may have to wait for a change of
    /// keys.
    fn open(&mut self) {
        self.plain = if self.ring.may_wait() { FastPathOps::default() } else { self.usual };
    }

    pub(super) fn into_ring(self) -> SendRing {
        self.ring
    }

    /// Begins anew after the kernel reset the queue pair.
    pub(super) fn reset(&mut self) {
        self.ring.reset();
        self.open();
    }

    /// Starts a batch. What is pushed to it reaches the device when it is rung, all at once; a
    /// batch that is dropped or forgotten leaves no trace, but that requests after it may be fenced in
    /// vain if it changed keys.
    ///
    /// # Errors
    ///
    /// [`PostError::State`] before the queue pair is ready to send, [`PostError::Forked`] in a
    /// child of the process that created it.
    #[doc(alias = "ibv_wr_start")]
    #[inline(always)]
    pub fn batch(&mut self) -> Result<SendBatch<'_, S>, PostError> {
        let cursor = match self.ring.enter(QpState::RTS.opening()) {
            Some(cursor) => cursor,
            None => self.admit()?,
        };
        // Said here, where both ways meet, so that it is known when it is compiled.
        Ok(SendBatch { queue: self, cursor: Cursor { count: 0, ..cursor } })
    }

    /// As a gate would, or says why not: asked where none opens.
    #[inline(never)]
    fn admit(&self) -> Result<Cursor, PostError> {
        if self.epoch.is_over() {
            return Err(PostError::Forked);
        }
        let state = self.qp.state();
        if state.takes_sends() { Ok(self.ring.cursor()) } else { Err(PostError::State(state)) }
    }

    /// Writes a request that has to be looked at first.
    #[cold]
    #[inline(never)]
    fn push_checked(&mut self, cursor: &mut Cursor, wr: SendWr<'_>) -> Result<(), PostError> {
        check(&self.qp, &wr)?;
        if self.qp.qp_type == QpType::RAW_PACKET {
            self.ring.push_packet(cursor, &wr)?;
        } else {
            self.ring.push(cursor, &wr)?;
            self.open();
        }
        Ok(())
    }

    /// Shows what was pushed to the device, and makes the device look.
    #[inline(always)]
    fn ring(&mut self, cursor: Cursor, single: bool) -> Result<(), RingError> {
        if self.ring.try_publish(cursor, single) {
            return Ok(());
        }
        self.ring_otherwise(cursor.at)
    }

    #[cold]
    #[inline(never)]
    fn ring_otherwise(&mut self, at: u32) -> Result<(), RingError> {
        if self.epoch.is_over() {
            return Err(RingError::Forked);
        }
        let qp = &self.qp;
        self.ring
            .publish(at, || qp.file().kernel.ring(Doorbell::Send { qp_handle: qp.object.handle() }))
    }
}

/// Sends that the device does not know of yet.
///
/// # What the caller of `ring` promises
///
/// - **Memory.** All memory that the requests name by local keys stays valid until they complete, or
///   until the queue pair is destroyed; what the device writes is not borrowed meanwhile. To drop a queue
///   pair does not destroy it while a [memory window](crate::MemoryWindow) holds it. If the memory's region is destroyed before, no other is registered in the protection domain meanwhile: a
///   device may give it the same key, as mlx5's driver does, and the requests would name its memory.
/// - **Windows.** A [binding](crate::WindowBinding) is posted at most once, and to the queue pair that it
///   was prepared for. Until that request completes, or the queue pair is destroyed, the window is not
///   told that the binding is [settled](crate::MemoryWindow::settle), nor reallocated, destroyed or
///   dropped; nor is a binding posted of which the window has seen any of these. The request names
///   window and region by key: it would open whatever region has the key by then.
/// - **`wr_id`s.** The caller knows which request a completion is of. The device carries the number and
///   checks nothing: of two requests with the same number the first completion tells only that one of
///   them is over. A successful completion stands for the unsignaled requests that were posted to the
///   same queue before it, and for no later ones.
#[doc(alias = "ibv_wr_abort")]
#[derive(Debug)]
pub struct SendBatch<'q, S: Sharing = Shared> {
    queue: &'q mut SendQueue<S>,
    cursor: Cursor,
}

impl<S: Sharing> SendBatch<'_, S> {
    /// Appends a request. Inline data is copied now; the entries of `wr` may be reused afterwards.
    ///
    /// # Errors
    ///
    /// A [`PostError`] that says what was wrong. The batch is as it was and may be rung without
    /// the request.
    #[inline(always)]
    pub fn push(&mut self, wr: SendWr<'_>) -> Result<(), PostError> {
        if self.try_push(&wr) { Ok(()) } else { self.push_otherwise(wr) }
    }

    /// As [`try_push`](Self::try_push), of a batch that who calls counts, and of a request that has its data
    /// inline, or works on a piece of memory, which is no slice anywhere but here.
    #[inline(always)]
    pub(crate) fn try_push_lent(&mut self, wr: &SendWr<'_>, memory: Option<Sge>) -> bool {
        match wr.payload {
            Payload::Inline(_) => self.try_push(wr),
            Payload::Sges([]) => {
                self.try_push(&SendWr { payload: Payload::Sges(memory.as_slice()), ..*wr })
            }
            Payload::Sges(_) => false,
        }
    }

    /// Writes a usual request that nothing is wrong with; `false`, and nothing done, for all others.
    #[inline(always)]
    fn try_push(&mut self, wr: &SendWr<'_>) -> bool {
        // First of all, lest what these say is kept for behind something else.
        if !self.cursor.suits(wr) {
            return false;
        }
        let inline = matches!(wr.payload, Payload::Inline(_));
        let known = if inline { self.queue.plain.inline } else { self.queue.plain.pieces };
        let known = match &wr.destination {
            None => known,
            // A foreign address is refused below.
            Some(to) if to.domain == self.queue.domain => self.queue.plain.addressed,
            Some(_) => 0,
        };
        wr.op.bit() & known != 0 && self.queue.ring.try_push(&mut self.cursor, wr)
    }

    /// Writes a request that has to be looked at first.
    #[inline(always)]
    fn push_otherwise(&mut self, wr: SendWr<'_>) -> Result<(), PostError> {
        // Copies, lest all others are kept in memory for this.
        let mut cursor = self.cursor;
        self.queue.push_checked(&mut cursor, wr)?;
        self.cursor = cursor;
        Ok(())
    }

    /// The same, of a batch that who calls counts, and rings as one that was [lent](Self::ring_lent) memory.
    #[inline(always)]
    pub(crate) fn push_lent_otherwise(&mut self, wr: SendWr<'_>) -> Result<(), PostError> {
        // Nobody asks how many there are, and so that need not be kept.
        self.cursor.count = 0;
        self.push_otherwise(wr)
    }

    /// Requests pushed so far.
    pub fn len(&self) -> u32 {
        self.queue.ring.pushed(&self.cursor)
    }

    /// Whether nothing was pushed yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Requests that still fit.
    pub fn room(&self) -> u32 {
        self.cursor.room
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
    /// not free the memory. mlx5 never answers it. [`RingError::Forked`].
    #[doc(alias = "ibv_wr_complete")]
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    #[inline(always)]
    pub unsafe fn ring(self) -> Result<(), RingError> {
        let count = self.cursor.count.into();
        self.ring_lent(count)
    }

    /// As [`ring`](Self::ring), for requests that name only memory which was lent to them; see
    /// [`owned`](crate::owned). Who calls has counted them: none, one, or whatever is more.
    #[inline(always)]
    pub(crate) fn ring_lent(self, count: u64) -> Result<(), RingError> {
        if count == 0 {
            return Ok(());
        }
        self.queue.ring(self.cursor, count == 1)
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
    /// not free the memory. mlx5 never answers it. [`RingError::Forked`].
    #[doc(alias = "ibv_wr_complete")]
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    #[inline(always)]
    pub unsafe fn ring(self, td: &mut ThreadDomain) -> Result<(), RingError> {
        let count = self.cursor.count.into();
        self.ring_lent(td, count)
    }

    /// As [`ring`](Self::ring), for requests that name only memory which was lent to them; see
    /// [`owned`](crate::owned). Who calls has counted them: none, one, or whatever is more.
    #[inline(always)]
    pub(crate) fn ring_lent(self, td: &mut ThreadDomain, count: u64) -> Result<(), RingError> {
        if self.queue.thread != Identity::of(&td.inner) {
            return Err(RingError::ForeignThreadDomain);
        }
        if count == 0 {
            return Ok(());
        }
        self.queue.ring(self.cursor, count == 1)
    }
}

/// The operations of a transport that need no look at anything but the request.
fn plain(qp_type: QpType) -> u32 {
    let remote = Remote { addr: 0, rkey: Rkey(0) };
    let reliable = [
        SendOp::Read(remote),
        SendOp::CompareSwap { remote, compare: 0, swap: 0 },
        SendOp::FetchAdd { remote, add: 0 },
    ];
    let connected = [
        SendOp::Send,
        SendOp::SendImm(0),
        SendOp::SendInv(remote.rkey),
        SendOp::Write(remote),
        SendOp::WriteImm(remote, 0),
    ];
    let set = |ops: &[SendOp<'_>]| ops.iter().fold(0, |set, op| set | op.bit());
    match qp_type {
        QpType::RC => set(&reliable) | set(&connected),
        // All of theirs name where they go, or are no messages.
        QpType::UD | QpType::XRC_INI | QpType::RAW_PACKET => 0,
        _ => set(&connected),
    }
}

/// What no device could do with a request, told apart before it reaches one.
#[inline]
fn check(qp: &QpInner, wr: &SendWr<'_>) -> Result<(), PostError> {
    let qp_type = qp.qp_type;
    let datagram = qp_type == QpType::UD;
    match &wr.destination {
        Some(_) if !datagram => return Err(PostError::Destination),
        None if datagram => return Err(PostError::Destination),
        Some(to) if qp.pd().is_none_or(|pd| pd.identity() != to.domain) => {
            return Err(PostError::ForeignAddress);
        }
        _ => {}
    }
    let local = matches!(wr.op, SendOp::LocalInv(_) | SendOp::BindMw(_));
    if wr.srq.is_some() != (qp_type == QpType::XRC_INI && !local) {
        return Err(PostError::SrqNumber);
    }
    // The kernel notes the queue pair that a binding came through, and our hold is on the one that
    // it was prepared for.
    if let SendOp::BindMw(binding) = &wr.op {
        if binding.qpn.is_some_and(|qpn| qpn != qp.qpn) {
            return Err(PostError::ForeignBinding);
        }
    }
    if qp_type == QpType::RAW_PACKET {
        return match wr.op {
            SendOp::Send | SendOp::Packet(_) => Ok(()),
            _ => Err(PostError::Unsupported),
        };
    }
    let reliable = matches!(qp_type, QpType::RC | QpType::XRC_INI);
    let (supported, inline) = match wr.op {
        SendOp::Packet(_) => (false, false),
        SendOp::Send | SendOp::SendImm(_) => (true, true),
        SendOp::SendInv(_) => (!datagram, true),
        SendOp::Write(_) | SendOp::WriteImm(..) => (!datagram, true),
        SendOp::LocalInv(_) | SendOp::BindMw(_) => (!datagram, false),
        SendOp::Read(_)
        | SendOp::CompareSwap { .. }
        | SendOp::FetchAdd { .. }
        | SendOp::MaskedCompareSwap { .. }
        | SendOp::MaskedFetchAdd { .. }
        | SendOp::Flush { .. }
        | SendOp::AtomicWrite { .. } => (reliable, false),
    };
    if !supported {
        return Err(PostError::Unsupported);
    }
    if !inline && matches!(wr.payload, Payload::Inline(_)) {
        return Err(PostError::NoInline);
    }
    Ok(())
}
