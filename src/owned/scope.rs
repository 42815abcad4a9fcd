//! Requests on borrowed memory: they are over when their scope ends.

use super::buffer::{Buffer, SharedBuffer};
use super::completion::Outcome;
use super::cq::OwnedCompletionQueue;
use super::lending::{HasSge, OtherLoan, RegionSge, sge_of};
use super::qp::{OwnedQueuePair, Unposted, append};
use crate::abort::{AbortOnUnwind, abort};
use crate::cq::PollError;
use crate::error::{Error, ErrorWith, MemoryError, Result, debug_is_sentence};
use crate::file::File;
use crate::first_panic::FirstPanic;
use crate::lending::compact_enum::{CompactEnum, Content};
use crate::memory::region::{Pledged, Pledges};
use crate::mr::{HostMemory, MemoryRegion};
use crate::pd::{Exclusive, PdInner, ProtectionDomain, Shared, Sharing};
use crate::qp::{QpAttr, QpControl, QpState};
use crate::td::ThreadDomain;
use crate::wr::{PostError, RingError, SendWr, Sge};
use rustix::io::Errno;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, RangeBounds};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// How long a scope waits for its requests when it ends, unless the program sets another time.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// How long it waits for the flush of a queue pair in an error state, and for a kernel that refuses to
/// reset the queue pair, or to deregister memory.
const FLUSH_TIMEOUT: Duration =
    Duration::from_millis(if cfg!(all(test, not(miri))) { 200 } else { 2000 });

/// Posts requests on borrowed memory; see [`OwnedQueuePair::scope`].
///
/// `'s` is the time of the scope. The caller cannot name it, so nothing with this lifetime leaves the body.
/// Memory that requests borrow lives for `'env`, which is longer.
///
/// Memory of the program's own is registered for the time of the scope:
///
/// ```no_run
/// # use uverbs::{ProtectionDomain, SendWr, owned::{Scope, OwnedCompletionQueue, OwnedQueuePair}};
/// # use std::time::Duration;
/// # fn f(pd: &ProtectionDomain, qp: &mut OwnedQueuePair<u32>, cq: &mut OwnedCompletionQueue<u32>,
/// #     table: &mut [u64], inbox: &mut [u8]) -> Result<(), Box<dyn std::error::Error>> {
/// qp.scope(cq, |scope: &mut Scope<'_, '_, u32, _>| {
///     scope.drain_timeout(Duration::from_millis(500));
///     let (table, inbox) = (scope.register(pd, table)?, scope.register(pd, inbox)?);
///     let received = scope.recv(inbox)?;
///     let sent = scope.post(SendWr::send(&[]), table)?;
///     scope.wait(sent)?;
///     match scope.wait_for(received, Duration::from_secs(1))? {
///         Ok((_inbox, outcome)) => println!("{} bytes came", outcome.byte_len),
///         Err(_pending) => println!("no reply yet; the scope cancels the receive"),
///     }
///     Ok::<_, Box<dyn std::error::Error>>(())
/// })??;
/// # Ok(()) }
/// ```
///
/// # Memory of a request that was not posted
///
/// [`post`](Self::post) and [`recv`](Self::recv) take the memory by value, and an error does not give it back. A
/// [`RegionRef`] and a shared reference are `Copy`, and can be lent again. A `&mut Buffer` and a [`ScopedRegion`] cannot
/// be lent again in this scope; what they borrow is the program's again when the scope ends. So that a full queue does
/// not cost memory, ask [`send_room`](OwnedQueuePair::send_room) and [`recv_room`](OwnedQueuePair::recv_room) before the
/// scope, and post no more requests than that: each [`wait`](Self::wait) that returns makes room for one more.
pub struct Scope<'s, 'env, T, S: Sharing = Shared> {
    qp: &'s mut OwnedQueuePair<T, S>,
    cq: &'s mut OwnedCompletionQueue<T>,
    /// Requests in flight, by `wr_id`.
    in_flight: Vec<u64>,
    /// Requests that are over, and that the program did not wait for yet.
    over: Vec<(u64, Outcome)>,
    drain_timeout: Duration,
    ending: &'s mut Ending,
    left: &'s mut Left<T>,
    /// Regions of [`register`](Self::register).
    regions: Vec<MemoryRegion<u8, Pledged>>,
    pledges: &'s mut Pledges<'env>,
}

/// Values that outlive a scope until its memory is proven back. Dropping them runs code of the program, which may
/// panic.
struct Left<T> {
    /// Loans of forgotten batches of a queue pair that was reset.
    unposted: Option<Unposted<T>>,
    /// Domains of the scope's regions. A parent domain has an allocator of the program.
    domains: Vec<Arc<PdInner>>,
}

impl<T> Drop for Left<T> {
    fn drop(&mut self) {
        let mut calls = FirstPanic::default();
        calls.catch(|| drop(self.unposted.take()));
        self.domains.drain(..).for_each(|domain| calls.catch(|| drop(domain)));
        calls.resume();
    }
}

/// How a scope made sure that its requests were over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All completed.
    Drained,
    /// Some did not complete in time. The scope moved the queue pair to state [`ERR`](QpState::ERR), which
    /// flushed all requests of the queue pair.
    Flushed,
    /// Some were not flushed in time. The scope reset the queue pair.
    Reset,
}

/// Why a scope failed.
///
/// ```no_run
/// # use uverbs::{SendWr, owned::{Buffer, OwnedCompletionQueue, OwnedQueuePair}};
/// # fn f(qp: &mut OwnedQueuePair<u32>, cq: &mut OwnedCompletionQueue<u32>, message: Buffer)
/// # -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::owned::{Ending, ScopeError};
///
/// let scoped = qp.scope(cq, |scope| scope.post(SendWr::send(&[]), &message).map(drop));
/// match scoped {
///     // All requests of the scope completed; how, `wait` would have told.
///     Ok(posted) => posted?,
///     // The memory is the program's again, and the connection is over: reset the queue pair, and connect it anew.
///     Err(ScopeError::Cancelled { value, ending }) => {
///         match ending {
///             Ending::Flushed => println!("the peer did not answer in time"),
///             Ending::Reset => println!("the device did not flush the queue pair either"),
///             Ending::Drained => unreachable!("a scope that is drained does not fail"),
///         }
///         qp.reset(cq)?;
///         value?;
///     }
///     Err(ScopeError::ForeignQueue) => panic!("pass the completion queue that adopted `qp`"),
///     Err(other) => return Err(other.into()),
/// }
/// # Ok(()) }
/// ```
#[non_exhaustive]
pub enum ScopeError<R> {
    /// The completion queue is not the one that adopted the queue pair. The body did not run.
    ForeignQueue,
    /// Requests did not complete in time, and were cancelled.
    Cancelled {
        /// The value that the scope's body returned.
        value: R,
        /// How they were cancelled.
        ending: Ending,
    },
}

impl<R> fmt::Display for ScopeError<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ScopeError::ForeignQueue => "the queue pair was adopted by another completion queue",
            ScopeError::Cancelled { ending: Ending::Reset, .. } => {
                "the queue pair was reset: requests of the scope were not flushed in time"
            }
            ScopeError::Cancelled { .. } => {
                "requests of the scope were flushed: they did not complete in time"
            }
        })
    }
}

impl<R> std::error::Error for ScopeError<R> {}

debug_is_sentence!(ScopeError<R>);

/// For functions that return [`Error`]: `ETIMEDOUT` for requests that were cancelled, and what the body returned
/// is dropped.
impl<R> From<ScopeError<R>> for Error {
    fn from(error: ScopeError<R>) -> Error {
        let errno = match error {
            ScopeError::ForeignQueue => Errno::INVAL,
            ScopeError::Cancelled { .. } => Errno::TIMEDOUT,
        };
        Error::new("scope", errno).detail(error.to_string())
    }
}

/// A request of a scope, with the memory that it works on; see [`Scope::wait`].
#[derive(Debug)]
#[must_use = "the memory is lent until the request is waited for, or the scope ends"]
pub struct Pending<M> {
    memory: M,
    wr_id: u64,
    /// Identifies the queue pair, because scopes of several may be open at once.
    qp: usize,
}

/// Memory that a scope can lend to a request: borrowed for `'env`, or registered for the time `'s` of the
/// scope.
///
/// `&mut Buffer`; `&Buffer` and `&SharedBuffer`, which the device only reads; a [`RegionRef`]; a
/// [`ScopedRegion`] of any other memory; and `()` for a request without data or with inline data.
pub trait LendScoped<'s, 'env>: HasSge + sealed::Sealed {
    /// Whether the device may write the memory.
    ///
    /// A function that keeps this side's memory and the peer's the same: what this side may change follows the
    /// peer, and the peer follows the rest.
    ///
    /// ```no_run
    /// # use uverbs::{PostError, Remote, SendWr};
    /// use uverbs::owned::{LendScoped, Pending, Scope};
    ///
    /// fn mirror<'s, 'env, M: LendScoped<'s, 'env>>(
    ///     scope: &mut Scope<'s, 'env, u32>,
    ///     memory: M,
    ///     peer: Remote,
    /// ) -> Result<Pending<M>, PostError> {
    ///     match memory.is_writable() {
    ///         true => scope.post(SendWr::read(peer, &[]), memory),
    ///         false => scope.post(SendWr::write(peer, &[]), memory),
    ///     }
    /// }
    /// ```
    fn is_writable(&self) -> bool;
}

/// A program could implement the trait for a [`RegisteredBuffer`](super::RegisteredBuffer) otherwise, and drop
/// it while the scope's request is in flight.
mod sealed {
    pub trait Sealed {}
}

impl sealed::Sealed for &Buffer {}
impl sealed::Sealed for &mut Buffer {}
impl sealed::Sealed for &SharedBuffer {}
impl sealed::Sealed for RegionRef<'_> {}
impl sealed::Sealed for ScopedRegion<'_> {}
impl sealed::Sealed for () {}

impl HasSge for &Buffer {
    fn region_sge(&self) -> Option<RegionSge> {
        HasSge::region_sge(&**self)
    }
}

impl HasSge for &mut Buffer {
    fn region_sge(&self) -> Option<RegionSge> {
        HasSge::region_sge(&**self)
    }

    fn clear_grh(&mut self) {
        HasSge::clear_grh(&mut **self);
    }
}

impl HasSge for &SharedBuffer {
    fn region_sge(&self) -> Option<RegionSge> {
        HasSge::region_sge(&**self)
    }
}

impl<'env> LendScoped<'_, 'env> for &'env Buffer {
    fn is_writable(&self) -> bool {
        false
    }
}

impl<'env> LendScoped<'_, 'env> for &'env mut Buffer {
    fn is_writable(&self) -> bool {
        true
    }
}

impl<'env> LendScoped<'_, 'env> for &'env SharedBuffer {
    fn is_writable(&self) -> bool {
        false
    }
}

impl LendScoped<'_, '_> for () {
    fn is_writable(&self) -> bool {
        true
    }
}

/// A borrowed part of a region. Registered memory is not a slice, so the part can be copied, lent to several
/// requests at once, and read by the region's methods meanwhile.
///
/// ```no_run
/// # use uverbs::{ProtectionDomain, Remote, SendWr, owned::{OwnedCompletionQueue, OwnedQueuePair}};
/// # fn f(pd: &ProtectionDomain, qp: &mut OwnedQueuePair<u32>, cq: &mut OwnedCompletionQueue<u32>,
/// #     [header, body]: [Remote; 2]) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::owned::RegionRef;
///
/// let table = pd.mr_builder().register(vec![0u64; 8192])?;
/// qp.scope(cq, |scope| {
///     let first = scope.post(SendWr::read(header, &[]), RegionRef::new(&table, ..64)?)?;
///     let rest = scope.post(SendWr::read(body, &[]), RegionRef::new(&table, 64..)?)?;
///     let (_, outcome) = scope.wait(first)?;
///     println!("{}: {:?} entries are on their way", outcome.status, table.read_at(0));
///     scope.wait(rest)?;
///     Ok::<_, Box<dyn std::error::Error>>(())
/// })??;
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct RegionRef<'env> {
    sge: RegionSge,
    /// Borrows the region.
    region: PhantomData<&'env ()>,
}

impl<'env> RegionRef<'env> {
    /// The bytes `range` of `region`, counted from its beginning.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfRange`], also for more than 2^32 - 1 bytes; [`MemoryError::Dead`].
    pub fn new<T, M: HostMemory>(
        region: &'env MemoryRegion<T, M>,
        range: impl RangeBounds<usize>,
    ) -> std::result::Result<RegionRef<'env>, MemoryError> {
        Ok(RegionRef { sge: RegionSge::new(region, range)?, region: PhantomData })
    }
}

impl HasSge for RegionRef<'_> {
    fn region_sge(&self) -> Option<RegionSge> {
        Some(self.sge)
    }
}

impl<'env> LendScoped<'_, 'env> for RegionRef<'env> {
    fn is_writable(&self) -> bool {
        true
    }
}

/// Borrowed memory that a scope registered; see [`Scope::register`]. It cannot leave the scope, which
/// deregisters the memory when it ends: the key may be another region's afterwards.
#[derive(Debug)]
pub struct ScopedRegion<'s> {
    /// The scope holds the region, and this cannot leave the scope.
    sge: RegionSge,
    memory: PhantomData<&'s mut [u8]>,
}

impl<'s> ScopedRegion<'s> {
    /// Splits it before byte `at`, or at its end if it is shorter.
    #[must_use]
    pub fn split_at(self, at: usize) -> (ScopedRegion<'s>, ScopedRegion<'s>) {
        let RegionSge { sge, domain } = self.sge;
        let at = u32::try_from(at).unwrap_or(u32::MAX).min(sge.length);
        let front = Sge { length: at, ..sge };
        let addr = sge.addr.wrapping_add(at.into());
        let back = Sge { addr, length: sge.length.saturating_sub(at), ..sge };
        let part = |sge| ScopedRegion { sge: RegionSge { sge, domain }, memory: PhantomData };
        (part(front), part(back))
    }
}

impl HasSge for ScopedRegion<'_> {
    fn region_sge(&self) -> Option<RegionSge> {
        Some(self.sge)
    }
}

impl<'s, 'a: 's> LendScoped<'s, '_> for ScopedRegion<'a> {
    fn is_writable(&self) -> bool {
        true
    }
}

impl<T, S: Sharing> OwnedQueuePair<T, S> {
    /// Runs `body`, which may post requests on memory that it borrows. The scope makes sure that they are
    /// over before it returns or, if `body` panics, before the panic goes on.
    ///
    /// ```no_run
    /// # use uverbs::{Remote, SendWr, owned::*};
    /// # fn f(qp: &mut OwnedQueuePair<u32>, cq: &mut OwnedCompletionQueue<u32>,
    /// #      pool: &BufferPool, remote: Remote) -> Result<(), Box<dyn std::error::Error>> {
    /// let (mut header, body) = (pool.take().unwrap(), pool.take().unwrap());
    /// qp.scope(cq, |scope| {
    ///     let read = scope.post(SendWr::read(remote, &[]), &mut header)?;
    ///     scope.post(SendWr::write(remote, &[]), &body)?;
    ///     let (header, outcome) = scope.wait(read)?;
    ///     println!("{}: {:?}", outcome.status, &header[..4]);
    ///     Ok::<_, Box<dyn std::error::Error>>(())
    /// })??;
    /// // The device is done with `header` and `body`, whatever became of the requests.
    /// # Ok(()) }
    /// ```
    ///
    /// When the body ends, the scope waits for its requests, for its
    /// [drain timeout](Scope::drain_timeout). If the peer is gone or silent, the scope then moves the queue
    /// pair to state [`ERR`](QpState::ERR) and waits 2 s for the flush. If the flush does not come either, it
    /// resets the queue pair, after which the kernel guarantees that the device is done. While the kernel
    /// removes the device, it guarantees nothing, and the scope waits for the end of that. If the kernel
    /// refuses for 2 s while the device is there, **the process is aborted**: if the scope returned, the
    /// device could write into memory that is in other use.
    ///
    /// Completions of other requests that the scope finds are kept for the next
    /// [poll](OwnedCompletionQueue::poll). The tags of forgotten batches are dropped last: a panic in one of them goes
    /// on when the memory is the program's again.
    ///
    /// # Errors
    ///
    /// [`ScopeError::Cancelled`], with what `body` returned, if requests did not complete in time;
    /// [`ScopeError::ForeignQueue`] if another completion queue adopted the queue pair.
    pub fn scope<'env, R>(
        &mut self,
        cq: &mut OwnedCompletionQueue<T>,
        body: impl FnOnce(&mut Scope<'_, 'env, T, S>) -> R,
    ) -> std::result::Result<R, ScopeError<R>> {
        if !self.qp.qp.sends_to(&cq.cq.inner) {
            return Err(ScopeError::ForeignQueue);
        }
        let mut ending = Ending::Drained;
        // Declared first, and so dropped last, also by a panic: when the pledges were kept.
        let mut left = Left { unposted: None, domains: Vec::new() };
        let epoch = self.qp.qp.file().epoch;
        let value = Pledges::during(epoch, |pledges| {
            let mut scope = Scope {
                qp: self,
                cq,
                in_flight: Vec::new(),
                over: Vec::new(),
                drain_timeout: DRAIN_TIMEOUT,
                ending: &mut ending,
                left: &mut left,
                regions: Vec::new(),
                pledges,
            };
            body(&mut scope)
        });
        match ending {
            Ending::Drained => Ok(value),
            ending => Err(ScopeError::Cancelled { value, ending }),
        }
    }
}

impl<'s, 'env, T, S: Sharing> Scope<'s, 'env, T, S> {
    /// Sets how long the scope waits for its requests when it ends; 10 s unless set.
    pub fn drain_timeout(&mut self, timeout: Duration) {
        self.drain_timeout = timeout;
    }

    /// Registers borrowed memory in `pd` for the time of the scope. This is a system call and pins the
    /// memory, so it suits memory that is used once.
    ///
    /// # Errors
    ///
    /// Those of [`MrBuilder::register`](crate::MrBuilder::register), and `EINVAL` for more
    /// than 2^32 - 1 bytes.
    pub fn register<P: Sharing, I: FromBytes + IntoBytes>(
        &mut self,
        pd: &ProtectionDomain<P>,
        memory: &'env mut [I],
    ) -> Result<ScopedRegion<'s>> {
        let region = pd.mr_builder().register_pledged(memory, self.pledges)?;
        let sge = RegionSge::new(&region, ..)?;
        self.regions.push(region);
        Ok(ScopedRegion { sge, memory: PhantomData })
    }

    /// Posts a receive into `memory`, which [`wait`](Self::wait) gives back.
    ///
    /// # Errors
    ///
    /// Those of [`OwnedRecvBatch::push`](super::OwnedRecvBatch::push) and of
    /// [`recv_batch`](OwnedQueuePair::recv_batch). The memory does not come back with the error: see
    /// [`Scope`](Scope#memory-of-a-request-that-was-not-posted).
    pub fn recv<M: LendScoped<'s, 'env>>(
        &mut self,
        mut memory: M,
    ) -> std::result::Result<Pending<M>, PostError> {
        if !memory.is_writable() {
            return Err(PostError::ReadOnly);
        }
        let mut batch = self.qp.recv_batch()?;
        if !batch.lender.prepare_recv(&mut memory) {
            return Err(PostError::ForeignMemory);
        }
        let slot = batch.lender.free_slot()?.scoped();
        let wr_id = slot.wr_id();
        batch.batch.push_lent(wr_id, sge_of(&memory))?;
        slot.lend(CompactEnum::new(Content::Large(OtherLoan::Scoped)));
        // Before the device may write.
        self.in_flight.push(wr_id);
        let rung = batch.ring();
        self.check_posted(rung)?;
        Ok(Pending { memory, wr_id, qp: self.identity() })
    }

    /// Waits for the end of a request, however long it takes. If the peer is silent, it may take for ever.
    ///
    /// # Errors
    ///
    /// [`PollError::Forked`], and [`PollError::ForeignRequest`] for a request of another scope.
    pub fn wait<M>(&mut self, pending: Pending<M>) -> std::result::Result<(M, Outcome), PollError> {
        let mut backoff = Backoff::new();
        loop {
            if let Some(outcome) = self.end_of(&pending)? {
                return Ok((pending.memory, outcome));
            }
            backoff.pause();
        }
    }

    /// Waits for the end of a request for at most `timeout`; returns the request if it does not end by then.
    ///
    /// # Errors
    ///
    /// [`PollError::Forked`], and [`PollError::ForeignRequest`] for a request of another scope.
    pub fn wait_for<M>(
        &mut self,
        pending: Pending<M>,
        timeout: Duration,
    ) -> std::result::Result<std::result::Result<(M, Outcome), Pending<M>>, PollError> {
        let started = Instant::now();
        let mut backoff = Backoff::new();
        loop {
            if let Some(outcome) = self.end_of(&pending)? {
                return Ok(Ok((pending.memory, outcome)));
            }
            if started.elapsed() >= timeout {
                return Ok(Err(pending));
            }
            backoff.pause();
        }
    }

    /// Distinguishes the scope's queue pair from others that are alive.
    fn identity(&self) -> usize {
        Arc::as_ptr(&self.qp.adopted).addr()
    }

    fn end_of<M>(
        &mut self,
        pending: &Pending<M>,
    ) -> std::result::Result<Option<Outcome>, PollError> {
        let found = |over: &mut Vec<(u64, Outcome)>| {
            let at = over.iter().position(|(wr_id, _)| *wr_id == pending.wr_id)?;
            Some(over.swap_remove(at).1)
        };
        if pending.qp != self.identity() {
            return Err(PollError::ForeignRequest);
        }
        if let Some(outcome) = found(&mut self.over) {
            return Ok(Some(outcome));
        }
        if !self.in_flight.contains(&pending.wr_id) {
            return Err(PollError::ForeignRequest);
        }
        self.poll()?;
        Ok(found(&mut self.over))
    }

    /// Polls, and moves the requests that are over from `in_flight` to `over`.
    fn poll(&mut self) -> std::result::Result<(), PollError> {
        let polled = self.cq.poll_into_backlog();
        for (wr_id, outcome) in self.cq.backlog.scoped.drain(..) {
            self.in_flight.retain(|other| *other != wr_id);
            self.over.push((wr_id, outcome));
        }
        polled
    }

    /// Forgets the last request if it is not in the queue.
    fn check_posted(
        &mut self,
        rung: std::result::Result<(), RingError>,
    ) -> std::result::Result<(), PostError> {
        if rung.is_err_and(|error| !error.stays_queued()) {
            self.in_flight.pop();
        }
        rung.map_err(PostError::from)
    }

    /// Waits until no request is in flight. Returns `false` after `timeout`.
    fn drain(&mut self, timeout: Duration) -> bool {
        let started = Instant::now();
        let mut backoff = Backoff::new();
        loop {
            // In a child of a fork no request is in flight: they are the parent's.
            if self.poll() == Err(PollError::Forked) || self.in_flight.is_empty() {
                return true;
            }
            if started.elapsed() >= timeout {
                return false;
            }
            backoff.pause();
        }
    }

    /// Posts a send; `ring` rings the batch, with a token or without.
    fn post_send<M: LendScoped<'s, 'env>>(
        &mut self,
        wr: SendWr<'_>,
        memory: M,
        ring: impl FnOnce(super::OwnedSendBatch<'_, T, S>) -> std::result::Result<(), RingError>,
    ) -> std::result::Result<Pending<M>, PostError> {
        if wr.op.writes_here() && !memory.is_writable() {
            return Err(PostError::ReadOnly);
        }
        let mut batch = self.qp.send_batch()?;
        if !batch.lender.knows(&memory) {
            return Err(PostError::ForeignMemory);
        }
        let slot = batch.lender.free_slot()?.scoped();
        let wr_id = slot.wr_id();
        append(&mut batch.batch, wr.id(wr_id).signaled(), sge_of(&memory))?;
        slot.lend(CompactEnum::new(Content::Large(OtherLoan::Scoped)));
        // Before the device may read or write.
        self.in_flight.push(wr_id);
        let rung = ring(batch);
        self.check_posted(rung)?;
        Ok(Pending { memory, wr_id, qp: self.identity() })
    }
}

impl<'s, 'env, T> Scope<'s, 'env, T, Shared> {
    /// Posts a request that works on `memory`, which [`wait`](Self::wait) gives back.
    ///
    /// # Errors
    ///
    /// Those of [`OwnedSendBatch::push`](super::OwnedSendBatch::push) and
    /// [`ring`](super::OwnedSendBatch::ring). The memory does not come back with the error: see
    /// [`Scope`](Scope#memory-of-a-request-that-was-not-posted).
    pub fn post<M: LendScoped<'s, 'env>>(
        &mut self,
        wr: SendWr<'_>,
        memory: M,
    ) -> std::result::Result<Pending<M>, PostError> {
        self.post_send(wr, memory, |batch| batch.ring())
    }
}

impl<'s, 'env, T> Scope<'s, 'env, T, Exclusive> {
    /// Posts a request that works on `memory`, which [`wait`](Self::wait) gives back.
    ///
    /// # Errors
    ///
    /// Those of [`OwnedSendBatch::push`](super::OwnedSendBatch::push) and
    /// [`ring`](super::OwnedSendBatch::ring). The memory does not come back with the error: see
    /// [`Scope`](Scope#memory-of-a-request-that-was-not-posted).
    pub fn post<M: LendScoped<'s, 'env>>(
        &mut self,
        wr: SendWr<'_>,
        memory: M,
        td: &mut ThreadDomain,
    ) -> std::result::Result<Pending<M>, PostError> {
        self.post_send(wr, memory, |batch| batch.ring(td))
    }
}

impl<T, S: Sharing> Deref for Scope<'_, '_, T, S> {
    type Target = QpControl;

    fn deref(&self) -> &QpControl {
        self.qp
    }
}

impl<T, S: Sharing> Scope<'_, '_, T, S> {
    /// Makes sure that all requests are over.
    fn end(&mut self) {
        if self.drain(self.drain_timeout) {
            return;
        }
        *self.ending = Ending::Flushed;
        let error = QpAttr::new().state(QpState::ERR);
        let started = Instant::now();
        while started.elapsed() < FLUSH_TIMEOUT {
            // Repeated, because rxe flushes receives only when it is told to.
            let _ = self.qp.modify(&error);
            if self.drain(FLUSH_TIMEOUT / 20) {
                return;
            }
        }
        *self.ending = Ending::Reset;
        let file = self.qp.qp.qp.file().clone();
        let is_over = retry(&file, || {
            match self.qp.reset_keeping(self.cq, OwnedCompletionQueue::poll_into_backlog) {
                Ok(unposted) => {
                    self.left.unposted = Some(unposted);
                    true
                }
                Err(_) => (**self.qp).qp.revoke(),
            }
        });
        if !is_over {
            abort("uverbs: the kernel does not end requests on borrowed memory: aborting\n");
        }
    }

    /// Deregisters the scope's regions. [`Pledges`] deals with a region that stays registered.
    fn deregister(&mut self) {
        for region in self.regions.drain(..) {
            self.left.domains.push(region.inner.pd.clone());
            let file = region.inner.pd.file().clone();
            let mut left = Some(region);
            retry(&file, || {
                left = left
                    .take()
                    .and_then(|region| region.destroy().err().map(ErrorWith::into_object));
                left.is_none()
            });
        }
    }
}

impl<T, S: Sharing> Drop for Scope<'_, '_, T, S> {
    fn drop(&mut self) {
        // The kernel comes first. No code of the program runs before it has confirmed that the device is done with
        // what the scope borrowed: `Pledges` and then `Left` are dropped after this.
        let unproven = AbortOnUnwind::new(
            "uverbs: a panic while requests on borrowed memory were ended: aborting\n",
        );
        self.end();
        self.deregister();
        unproven.disarm();
    }
}

/// Repeats an attempt until it succeeds, or for [`FLUSH_TIMEOUT`]. While the kernel removes the device,
/// which comes to an end by itself, it goes on. Returns whether the attempt succeeded.
fn retry(file: &File, mut attempt: impl FnMut() -> bool) -> bool {
    let started = Instant::now();
    loop {
        if attempt() {
            return true;
        }
        // In a child of a fork nothing changes.
        if file.epoch.is_over() || (started.elapsed() >= FLUSH_TIMEOUT && !file.is_disassociated())
        {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl<T, S: Sharing> fmt::Debug for Scope<'_, '_, T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope")
            .field("qp", &self.qp)
            .field("in_flight", &self.in_flight.len())
            .finish()
    }
}

/// The time between two polls: first none, then more and more.
struct Backoff(u32);

impl Backoff {
    fn new() -> Self {
        Backoff(0)
    }

    fn pause(&mut self) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            0..=64 => std::hint::spin_loop(),
            65..=256 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(50)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_of_more_than_2_32_pauses_goes_on() {
        let mut backoff = Backoff(u32::MAX - 1);
        backoff.pause();
        backoff.pause();
        assert_eq!(backoff.0, u32::MAX);
    }
}
