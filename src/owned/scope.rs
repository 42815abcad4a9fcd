//! Requests on borrowed memory: what is posted within a scope is over when the scope ends.

use super::buffer::{Buffer, SharedBuffer};
use super::completion::Outcome;
use super::cq::OwnedCompletionQueue;
use super::lending::named;
use super::memory::{Name, Named};
use super::queue::{OwnedQueuePair, append};
use crate::access::Access;
use crate::cq::PollError;
use crate::error::Result;
use crate::file::File;
use crate::identity::Identity;
use crate::memory::region::{Pledged, Pledges};
use crate::mr::{HostMemory, MemoryRegion, RegionError};
use crate::pd::{Exclusive, KernelPd, ProtectionDomain, Shared, Sharing};
use crate::qp::{QpAttr, QpControl, QpState};
use crate::td::ThreadDomain;
use crate::wr::{PostError, SendWr, Sge};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, RangeBounds};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// How long a scope waits for its requests when it ends, unless told otherwise.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long it waits for them to be flushed once the queue pair is in an error state, and for a kernel
/// that will not reset the queue pair, or not let go of memory.
const FLUSH: Duration = Duration::from_millis(if cfg!(test) { 200 } else { 2000 });

/// Where requests on borrowed memory are posted; see [`OwnedQueuePair::scope`].
///
/// `'s` is the time of the scope, which its caller cannot name, so that nothing of it leaves the body;
/// what it borrows lasts for `'env`, which is longer.
pub struct Scope<'s, 'env, T, S: Sharing = Shared> {
    qp: &'s mut OwnedQueuePair<T, S>,
    cq: &'s mut OwnedCompletionQueue<T>,
    /// Numbers of the requests that are not over.
    open: Vec<u64>,
    /// Those that are over, and whose end nobody asked for yet.
    over: Vec<(u64, Outcome)>,
    patience: Duration,
    ending: &'s mut Ending,
    /// Registered for the scope.
    regions: Vec<MemoryRegion<u8, Pledged>>,
    pledges: &'s mut Pledges<'env>,
}

/// How a scope made sure that its requests are over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// They completed.
    Drained,
    /// Some did not in time; the queue pair was moved to state [`ERR`](QpState::ERR), which
    /// flushed them, and all others of the queue pair.
    Flushed,
    /// Some were not even flushed; the queue pair was reset.
    Reset,
}

/// Why a scope is not what it should have been.
#[derive(Debug)]
#[non_exhaustive]
pub enum ScopeError<R> {
    /// The completion queue is not the one that adopted the queue pair. The body did not run.
    ForeignQueue,
    /// Requests had to be called off.
    CalledOff {
        /// What the scope's body answered.
        value: R,
        /// What had to be done.
        ending: Ending,
    },
}

impl<R> fmt::Display for ScopeError<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ScopeError::ForeignQueue => "the completion queue is another one than the queue pair's",
            ScopeError::CalledOff { ending: Ending::Reset, .. } => {
                "the queue pair was reset: requests of the scope were not even flushed"
            }
            ScopeError::CalledOff { .. } => {
                "requests of the scope were flushed: they did not complete in time"
            }
        })
    }
}

impl<R: fmt::Debug> std::error::Error for ScopeError<R> {}

/// A request of a scope, with the memory that it works on.
#[derive(Debug)]
#[must_use = "the memory is lent until the request is waited for, or the scope ends"]
pub struct Pending<M> {
    memory: M,
    number: u64,
    /// Which queue pair's: scopes of several may be open at once.
    route: usize,
}

/// Memory that a scope can lend to a request: what was borrowed for `'env`, or registered for the time
/// `'s` of the scope.
///
/// Of a pool: `&mut Buffer`, and to be read by the device only `&Buffer` and `&SharedBuffer`;
/// [`Part`] of a region; [`Local`] for anything else.
pub trait Held<'s, 'env>: Named {
    /// Whether the device may write it.
    fn is_writable(&self) -> bool;
}

impl Named for &Buffer {
    fn name(&self) -> Option<Name> {
        (**self).name()
    }
}

impl Named for &mut Buffer {
    fn name(&self) -> Option<Name> {
        (**self).name()
    }
}

impl Named for &SharedBuffer {
    fn name(&self) -> Option<Name> {
        (**self).name()
    }
}

impl<'env> Held<'_, 'env> for &'env Buffer {
    fn is_writable(&self) -> bool {
        false
    }
}

impl<'env> Held<'_, 'env> for &'env mut Buffer {
    fn is_writable(&self) -> bool {
        true
    }
}

impl<'env> Held<'_, 'env> for &'env SharedBuffer {
    fn is_writable(&self) -> bool {
        false
    }
}

/// Nothing, for a request without data or with inline data.
impl Held<'_, '_> for () {
    fn is_writable(&self) -> bool {
        true
    }
}

/// A part of a region, which is no slice: it may be lent many times and read meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Part<'env> {
    sge: Sge,
    domain: &'env Arc<KernelPd>,
}

impl<'env> Part<'env> {
    /// The bytes `range` of `region`.
    ///
    /// # Errors
    ///
    /// [`RegionError::OutOfRange`], also for more than 2^32 - 1 bytes; [`RegionError::Dead`].
    pub fn new<T, M: HostMemory>(
        region: &'env MemoryRegion<T, M>,
        range: impl RangeBounds<usize>,
    ) -> std::result::Result<Part<'env>, RegionError> {
        Ok(Part { sge: region.sge(range)?, domain: &region.inner.pd.kernel })
    }
}

impl Named for Part<'_> {
    fn name(&self) -> Option<Name> {
        Some(Name { sge: self.sge, domain: Identity::of(self.domain) })
    }
}

impl<'env> Held<'_, 'env> for Part<'env> {
    fn is_writable(&self) -> bool {
        true
    }
}

/// Borrowed memory that a scope registered; see [`Scope::register`]. It stays within the scope, which
/// deregisters the memory when it ends: the key may be another region's then.
#[derive(Debug)]
pub struct Local<'s> {
    sge: Sge,
    domain: Arc<KernelPd>,
    memory: PhantomData<&'s mut [u8]>,
}

impl<'s> Local<'s> {
    /// Parts it before the byte `at`, or at its end.
    #[must_use]
    pub fn split_at(self, at: usize) -> (Local<'s>, Local<'s>) {
        let Local { sge, domain, memory } = self;
        let at = u32::try_from(at).unwrap_or(u32::MAX).min(sge.length);
        let front = Local { sge: Sge { length: at, ..sge }, domain: domain.clone(), memory };
        let sge = Sge { addr: sge.addr + u64::from(at), length: sge.length - at, ..sge };
        (front, Local { sge, domain, memory })
    }
}

impl Named for Local<'_> {
    fn name(&self) -> Option<Name> {
        Some(Name { sge: self.sge, domain: Identity::of(&self.domain) })
    }
}

impl<'s, 'a: 's> Held<'s, '_> for Local<'a> {
    fn is_writable(&self) -> bool {
        true
    }
}

impl<T, S: Sharing> OwnedQueuePair<T, S> {
    /// Runs `body`, which may post requests on memory that it borrows, and makes sure that they
    /// are over before it answers or, if `body` panics, before the panic goes on.
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
    /// // Whatever became of it, `header` and `body` are nobody else's any more.
    /// # Ok(()) }
    /// ```
    ///
    /// When it ends, the scope waits for its requests as long as its
    /// [patience](Scope::patience) lasts. If the peer is gone or sends nothing, it moves the queue
    /// pair to state [`ERR`](QpState::ERR) and waits for the flush; if not even that comes, it
    /// resets the queue pair, after which the kernel vouches that the device is done with it. While
    /// the kernel takes the device away it says nothing of the kind, and the scope waits until it has.
    /// Should the kernel refuse for 2 s while the device is there, **the process is aborted**:
    /// returning would let the device write into memory in other use, and waiting has no end.
    ///
    /// Completions of other requests that a scope finds are there for the next
    /// [poll](OwnedCompletionQueue::poll).
    ///
    /// # Errors
    ///
    /// [`ScopeError::CalledOff`], with what `body` answered, if requests had to be called off;
    /// [`ScopeError::ForeignQueue`].
    pub fn scope<'env, R>(
        &mut self,
        cq: &mut OwnedCompletionQueue<T>,
        body: impl FnOnce(&mut Scope<'_, 'env, T, S>) -> R,
    ) -> std::result::Result<R, ScopeError<R>> {
        if !self.qp.qp.sends_to(&cq.cq.inner) {
            return Err(ScopeError::ForeignQueue);
        }
        let mut ending = Ending::Drained;
        let epoch = self.qp.qp.file().epoch;
        let value = Pledges::during(epoch, |pledges| {
            let mut scope = Scope {
                qp: self,
                cq,
                open: Vec::new(),
                over: Vec::new(),
                patience: PATIENCE,
                ending: &mut ending,
                regions: Vec::new(),
                pledges,
            };
            body(&mut scope)
        });
        match ending {
            Ending::Drained => Ok(value),
            ending => Err(ScopeError::CalledOff { value, ending }),
        }
    }
}

impl<'s, 'env, T, S: Sharing> Scope<'s, 'env, T, S> {
    /// How long the scope waits for its requests when it ends; 10 s unless set.
    pub fn patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Registers borrowed memory in `pd` for the time of the scope. That is a system call and pins
    /// the memory: for what is used once.
    ///
    /// # Errors
    ///
    /// Those of [`RegionBuilder::register`](crate::RegionBuilder::register), and `EINVAL` for more
    /// than 2^32 - 1 bytes.
    pub fn register<P: Sharing, I: FromBytes + IntoBytes>(
        &mut self,
        pd: &ProtectionDomain<P>,
        memory: &'env mut [I],
    ) -> Result<Local<'s>> {
        let builder = pd.registration().access(Access::LOCAL_WRITE);
        let region = builder.register_pledged(memory, self.pledges)?;
        let sge = region.sge(..)?;
        let domain = region.inner.pd.kernel.clone();
        self.regions.push(region);
        Ok(Local { sge, domain, memory: PhantomData })
    }

    /// Posts a receive.
    ///
    /// # Errors
    ///
    /// Those of [`OwnedRecvBatch::push`](super::OwnedRecvBatch::push) and of
    /// [`recv_batch`](OwnedQueuePair::recv_batch).
    pub fn recv<M: Held<'s, 'env>>(
        &mut self,
        memory: M,
    ) -> std::result::Result<Pending<M>, PostError> {
        if !memory.is_writable() {
            return Err(PostError::ReadOnly);
        }
        let mut batch = self.qp.recv_batch()?;
        if !batch.draft.knows(&memory) {
            return Err(PostError::ForeignMemory);
        }
        let place = batch.draft.place_apart()?;
        let number = place.ticket();
        batch.batch.push_lent(number, named(&memory))?;
        place.lend_scoped();
        self.open.push(number);
        batch.ring();
        Ok(Pending { memory, number, route: self.route() })
    }

    /// The end of a request, waiting for it for as long as it takes: a request of a queue pair
    /// whose peer is silent may take for ever.
    ///
    /// # Errors
    ///
    /// [`PollError::Forked`], and [`PollError::ForeignRequest`] for a request of another scope.
    pub fn wait<M>(&mut self, pending: Pending<M>) -> std::result::Result<(M, Outcome), PollError> {
        let mut pace = Pace::new();
        loop {
            if let Some(outcome) = self.end_of(&pending)? {
                return Ok((pending.memory, outcome));
            }
            pace.pause();
        }
    }

    /// The end of a request if it came within `timeout`, or else the request.
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
        let mut pace = Pace::new();
        loop {
            if let Some(outcome) = self.end_of(&pending)? {
                return Ok(Ok((pending.memory, outcome)));
            }
            if started.elapsed() >= timeout {
                return Ok(Err(pending));
            }
            pace.pause();
        }
    }

    /// What tells the queue pair of this scope from others that are alive.
    fn route(&self) -> usize {
        Arc::as_ptr(&self.qp.route).addr()
    }

    fn end_of<M>(
        &mut self,
        pending: &Pending<M>,
    ) -> std::result::Result<Option<Outcome>, PollError> {
        let found = |over: &mut Vec<(u64, Outcome)>| {
            let at = over.iter().position(|(number, _)| *number == pending.number)?;
            Some(over.swap_remove(at).1)
        };
        if pending.route != self.route() {
            return Err(PollError::ForeignRequest);
        }
        if let Some(outcome) = found(&mut self.over) {
            return Ok(Some(outcome));
        }
        if !self.open.contains(&pending.number) {
            return Err(PollError::ForeignRequest);
        }
        self.gather()?;
        Ok(found(&mut self.over))
    }

    /// Notes which requests are over.
    fn gather(&mut self) -> std::result::Result<(), PollError> {
        let polled = self.cq.gather();
        for (number, outcome) in self.cq.scoped.drain(..) {
            self.open.retain(|open| *open != number);
            self.over.push((number, outcome));
        }
        polled
    }

    /// Waits until no request is open; whether that is so.
    fn drain(&mut self, patience: Duration) -> bool {
        let started = Instant::now();
        let mut pace = Pace::new();
        loop {
            // A child of a fork finds nothing, and has nothing to wait for.
            if self.gather() == Err(PollError::Forked) || self.open.is_empty() {
                return true;
            }
            if started.elapsed() >= patience {
                return false;
            }
            pace.pause();
        }
    }

    /// Appends and rings; `ring` is what differs between kinds of queues.
    fn start<M: Held<'s, 'env>>(
        &mut self,
        wr: SendWr<'_>,
        memory: M,
        ring: impl FnOnce(super::OwnedSendBatch<'_, T, S>) -> std::result::Result<(), PostError>,
    ) -> std::result::Result<Pending<M>, PostError> {
        if wr.op.writes_here() && !memory.is_writable() {
            return Err(PostError::ReadOnly);
        }
        let mut batch = self.qp.send_batch()?;
        if !batch.draft.knows(&memory) {
            return Err(PostError::ForeignMemory);
        }
        let place = batch.draft.place_apart()?;
        let number = place.ticket();
        append(&mut batch.batch, wr.id(number).signaled(), named(&memory))?;
        place.lend_scoped();
        let rung = ring(batch);
        if matches!(rung, Ok(()) | Err(PostError::Kernel(_))) {
            self.open.push(number);
        }
        rung.map(|()| Pending { memory, number, route: self.route() })
    }
}

impl<'s, 'env, T> Scope<'s, 'env, T, Shared> {
    /// Posts a request that works on `memory`, and rings.
    ///
    /// # Errors
    ///
    /// Those of [`OwnedSendBatch::push`](super::OwnedSendBatch::push) and
    /// [`ring`](super::OwnedSendBatch::ring).
    pub fn post<M: Held<'s, 'env>>(
        &mut self,
        wr: SendWr<'_>,
        memory: M,
    ) -> std::result::Result<Pending<M>, PostError> {
        self.start(wr, memory, |batch| batch.ring())
    }
}

impl<'s, 'env, T> Scope<'s, 'env, T, Exclusive> {
    /// Posts a request that works on `memory`, and rings.
    ///
    /// # Errors
    ///
    /// Those of [`OwnedSendBatch::push`](super::OwnedSendBatch::push) and
    /// [`ring`](super::OwnedSendBatch::ring).
    pub fn post<M: Held<'s, 'env>>(
        &mut self,
        wr: SendWr<'_>,
        memory: M,
        td: &mut ThreadDomain,
    ) -> std::result::Result<Pending<M>, PostError> {
        self.start(wr, memory, |batch| batch.ring(td))
    }
}

impl<T, S: Sharing> Deref for Scope<'_, '_, T, S> {
    type Target = QpControl;

    fn deref(&self) -> &QpControl {
        self.qp
    }
}

impl<T, S: Sharing> Scope<'_, '_, T, S> {
    /// Makes sure that the device works on nothing any more.
    fn end(&mut self) {
        if self.drain(self.patience) {
            return;
        }
        *self.ending = Ending::Flushed;
        let error = QpAttr::new().state(QpState::ERR);
        let started = Instant::now();
        while started.elapsed() < FLUSH {
            // Again and again: rxe flushes receives only when it is told to.
            let _ = self.qp.modify(&error);
            if self.drain(FLUSH / 20) {
                return;
            }
        }
        *self.ending = Ending::Reset;
        let file = self.qp.qp.qp.file().clone();
        if !insist(&file, || self.qp.reset(self.cq).is_ok() || self.qp.revoke()) {
            eprintln!("uverbs: the kernel does not end requests on borrowed memory: aborting");
            std::process::abort();
        }
    }

    /// Deregisters what was registered for the scope. What stays registered is for `pledges` to
    /// answer for.
    fn deregister(&mut self) {
        for region in self.regions.drain(..) {
            let file = region.inner.pd.file().clone();
            let mut left = Some(region);
            insist(&file, || {
                left = left.take().and_then(|region| region.destroy().err().map(|(back, _)| back));
                left.is_none()
            });
        }
    }
}

impl<T, S: Sharing> Drop for Scope<'_, '_, T, S> {
    fn drop(&mut self) {
        self.end();
        self.deregister();
    }
}

/// Attempts something until it is done, for a while; and for as long as it takes while the kernel takes
/// the device away, for that comes to an end by itself. Whether it is done.
fn insist(file: &File, mut attempt: impl FnMut() -> bool) -> bool {
    let started = Instant::now();
    loop {
        if attempt() {
            return true;
        }
        // A child of a fork has nothing to wait for.
        if file.epoch.is_over() || (started.elapsed() >= FLUSH && !file.is_disassociated()) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl<T, S: Sharing> fmt::Debug for Scope<'_, '_, T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("qp", &self.qp).field("open", &self.open.len()).finish()
    }
}

/// How often to look for something that no event announces: at once, then less and less.
struct Pace(u32);

impl Pace {
    fn new() -> Self {
        Pace(0)
    }

    fn pause(&mut self) {
        self.0 += 1;
        match self.0 {
            0..=64 => std::hint::spin_loop(),
            65..=256 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(50)),
        }
    }
}
