//! Completion queues. Pairs with `core/uverbs_std_types_cq.c`; the ring is the provider's.

mod numbers;

use crate::channel::{ChannelInner, CompletionChannel};
use crate::completion::Completion;
use crate::context::Context;
use crate::device_attr::above_limits;
use crate::error::{Error, ErrorWith, Result, debug_is_sentence};
use crate::events::keys::{ArmSn, EventKey, EventSourceKind, ObjectKey};
use crate::file::File;
use crate::memory::allocator::Source;
use crate::memory::gate::Gate;
use crate::object::{Class, Object, destroy_sole};
use crate::parent_domain::ParentDomain;
use crate::pd::{PdInner, Sharing};
use crate::provider::poll_gate::QUIET;
use crate::provider::{
    self, CqInitAttr, CqMembers, CqRing, CreateRequest, CreatedCq, Member, ProviderWc,
    QueueResources, ResizeRequest, mlx5,
};
use crate::uverbs::doorbell::Doorbell;
use crate::uverbs::invoke_write::{write, write_ex};
use crate::wc::Wc;
pub(crate) use numbers::{NumberLease, Numbers};
use rustix::io::Errno;
use std::fmt;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use uverbs_uapi::cq as uapi;
use uverbs_uapi::cq::ib_uverbs_ex_create_cq_flags;
use uverbs_uapi::write::{IB_USER_VERBS_CMD_RESIZE_CQ, IB_USER_VERBS_EX_CMD_MODIFY_CQ};
use zerocopy::FromZeros;

/// Bytes of a completion unless others are asked for.
const CQE_SIZE: u32 = 64;

/// The part of a completion queue that its queue pairs keep alive.
#[derive(Debug)]
pub(crate) struct CqInner {
    pub(crate) object: Object<QueueResources>,
    /// Tells the poller which queue pairs are retired: it discards their completions.
    pub(crate) members: Arc<dyn CqMembers>,
    /// Numbers that no new queue pair may have, because completions with them name loans of an earlier one.
    pub(crate) numbers: Arc<Numbers>,
    event_key: EventKey,
    channel: Option<Arc<ChannelInner>>,
    /// The parent domain whose allocator provides its memory.
    domain: Option<Arc<PdInner>>,
    /// Whether its timestamps are of real time, else of ticks.
    pub(crate) real_time: bool,
}

impl CqInner {
    pub(crate) fn file(&self) -> &Arc<File> {
        self.object.file()
    }

    /// Asks the kernel for one event.
    fn notify(&self, verb: &'static str, solicited: bool) -> Result<()> {
        let doorbell = Doorbell::Notify { cq_handle: self.object.handle(), solicited };
        let rung = self.file().kernel.ring(doorbell);
        rung.map_err(|errno| Error::from_kernel(verb, errno))
    }
}

/// A completion queue.
///
/// Polling takes `&mut self`; to poll from several threads put it into a `Mutex`. Everything else is in
/// [`CqControl`]; [`control`](Self::control) returns one that works from any thread. Completions of a
/// queue pair that was dropped are discarded, whether it was dropped before or between polls.
///
/// ```no_run
/// # fn f(context: &uverbs::Context) -> Result<(), Box<dyn std::error::Error>> {
/// let channel = context.create_comp_channel()?;
/// let mut cq = context.cq_builder(256).channel(&channel).build()?;
/// let mut completions = cq.poll()?;
/// while let Some(completion) = completions.next() {
///     println!("request {} is over", completion.ok()?.wr_id());
/// }
/// drop(completions);
/// cq.resize(1024)?;
/// cq.destroy()?;
/// channel.destroy()?;
/// # Ok(()) }
/// ```
#[doc(alias = "ibv_cq")]
pub struct CompletionQueue {
    // Declared first, so dropped first: the kernel's object then holds the last reference to the memory, and gives
    // it to the allocator after DESTROY.
    ring: CqRing,
    /// Whether the poller has to catch up with the control path; shut in a forked child.
    gate: Gate,
    control: CqControl,
    /// Whether this process arms the queue by a store, and needs no command: the queue has a channel, and its device is
    /// not in this process.
    arms_directly: bool,
    /// The events that its channel announced.
    arm_sn: ArmSn,
}

/// A handle of a completion queue: everything but polling. A [`CompletionQueue`] dereferences to it.
///
/// It names the queue where queue pairs are made while another thread owns the queue and polls it. Clones
/// are handles of the same queue, and may be used from any thread. The queue is destroyed when the
/// [`CompletionQueue`], all handles and all queue pairs and shared receive queues that complete to it are
/// gone; nobody polls completions that arrive after the [`CompletionQueue`] was dropped.
///
/// ```no_run
/// # use uverbs::{CompletionQueue, ProtectionDomain, QpType};
/// # fn f(pd: &ProtectionDomain, mut cq: CompletionQueue) -> Result<(), Box<dyn std::error::Error>> {
/// let handle = cq.control();
/// std::thread::spawn(move || {
///     while let Ok(mut completions) = cq.poll() {
///         while let Some(completion) = completions.next() {
///             println!("{}: {}", completion.wr_id(), completion.status());
///         }
///     }
/// });
/// let qp = pd.qp_builder(&handle, &handle, QpType::RC).build()?;
/// # drop(qp); Ok(()) }
/// ```
#[derive(Clone)]
pub struct CqControl {
    pub(crate) inner: Arc<CqInner>,
}

pub(crate) mod sealed {
    pub trait Sealed {
        fn control(&self) -> &super::CqControl;

        /// Before one more queue pair is created: compacts the updates for the poller, if nobody polls meanwhile.
        fn compact_updates(&self) {}
    }
}

#[diagnostic::on_unimplemented(
    message = "`{Self}` is no completion queue",
    label = "a queue pair completes to a `CompletionQueue` or a handle of one",
    note = "of a guard or a smart pointer pass the queue inside: `&*guard`"
)]
/// A place that a queue pair can complete to: a [`CompletionQueue`], a [`CqControl`] of one, an
/// [`OwnedCompletionQueue`](crate::owned::OwnedCompletionQueue), an
/// [`AsyncCompletionQueue`](crate::aio::AsyncCompletionQueue), or a guard of a lock around one of these.
///
/// ```no_run
/// # use std::sync::Mutex;
/// # use uverbs::{CompletionQueue, ProtectionDomain, QpType};
/// # fn f(pd: &ProtectionDomain, shared: &Mutex<CompletionQueue>) -> Result<(), Box<dyn std::error::Error>> {
/// let guard = shared.lock().unwrap();
/// let qp = pd.qp_builder(&guard, &guard, QpType::RC).build()?;
/// # drop(qp); Ok(()) }
/// ```
pub trait CqRef: sealed::Sealed {}

impl CqRef for CompletionQueue {}
impl CqRef for CqControl {}
impl<T: CqRef + ?Sized> CqRef for &T {}
impl<T: CqRef + ?Sized> CqRef for &mut T {}

/// Implements [`CqRef`] for pointers and guards that lead to one.
macro_rules! leads_to_cq {
    ($($pointer:ty),*) => {$(
        impl<T: CqRef + ?Sized> CqRef for $pointer {}

        impl<T: CqRef + ?Sized> sealed::Sealed for $pointer {
            fn control(&self) -> &CqControl {
                (**self).control()
            }

            fn compact_updates(&self) {
                (**self).compact_updates();
            }
        }
    )*};
}

leads_to_cq!(
    Box<T>,
    Arc<T>,
    Rc<T>,
    std::cell::Ref<'_, T>,
    std::cell::RefMut<'_, T>,
    std::sync::MutexGuard<'_, T>,
    std::sync::RwLockReadGuard<'_, T>,
    std::sync::RwLockWriteGuard<'_, T>
);

impl sealed::Sealed for CompletionQueue {
    fn control(&self) -> &CqControl {
        &self.control
    }

    fn compact_updates(&self) {
        self.ring.compact_updates();
    }
}

impl sealed::Sealed for CqControl {
    fn control(&self) -> &CqControl {
        self
    }
}

impl<T: CqRef + ?Sized> sealed::Sealed for &T {
    fn control(&self) -> &CqControl {
        (**self).control()
    }

    fn compact_updates(&self) {
        (**self).compact_updates();
    }
}

impl<T: CqRef + ?Sized> sealed::Sealed for &mut T {
    fn control(&self) -> &CqControl {
        (**self).control()
    }

    fn compact_updates(&self) {
        (**self).compact_updates();
    }
}

/// The completions that an armed queue announces; see [`CompletionQueue::req_notify`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// The next one.
    Next,
    /// The next that its sender marked as solicited, or that failed; rxe does not count flushed requests as failed.
    Solicited,
}

/// Builds a [`CompletionQueue`]; started by [`Context::cq_builder`].
#[derive(Debug)]
pub struct CqBuilder {
    file: Arc<File>,
    cqe: u32,
    vector: u32,
    channel: Option<Arc<ChannelInner>>,
    domain: Option<Arc<PdInner>>,
    cqe_size: u32,
    pad: bool,
    real_time: bool,
    ignores_overrun: bool,
}

impl Context {
    /// Starts to build a completion queue with room for at least `cqe` completions, 1 to the device's
    /// [`max_cqe`](crate::DeviceAttr::max_cqe). A queue overflows, and its queue pairs go into an error state, if more
    /// requests complete than it holds: give it as many entries as the queues that complete to it hold requests.
    /// Devices round queues up, and [`caps`](crate::QpControl::caps) tells how far: twice the requests that were asked
    /// for in all, and 4 more for each queue pair, is enough on every device, also for
    /// [`adopt`](crate::owned::OwnedCompletionQueue::adopt), which refuses a queue pair that might overflow the queue.
    ///
    /// ```no_run
    /// # fn f(context: &uverbs::Context) -> uverbs::Result<()> {
    /// let channel = context.create_comp_channel()?;
    /// let cq = context.cq_builder(256).channel(&channel).vector(1).build()?;
    /// # drop(cq); Ok(()) }
    /// ```
    #[doc(alias = "ibv_create_cq")]
    #[doc(alias = "ibv_create_cq_ex")]
    #[doc(alias = "mlx5dv_create_cq")]
    pub fn cq_builder(&self, cqe: u32) -> CqBuilder {
        CqBuilder {
            file: self.file.clone(),
            cqe,
            vector: 0,
            channel: None,
            domain: None,
            cqe_size: CQE_SIZE,
            pad: false,
            real_time: false,
            ignores_overrun: false,
        }
    }
}

impl CqBuilder {
    /// Announces completions at `channel` when the queue is armed.
    #[must_use]
    pub fn channel(mut self, channel: &CompletionChannel) -> Self {
        self.channel = Some(channel.inner.clone());
        self
    }

    /// Lets the device write over completions that nobody has consumed. The library never polls such a queue.
    pub(crate) fn ignore_overrun(mut self) -> Self {
        self.ignores_overrun = true;
        self
    }

    /// A context on the builder's file.
    pub(crate) fn context(&self) -> Context {
        Context { file: self.file.clone() }
    }

    /// Raises interrupt `vector`, below [`Context::completion_vectors`]; 0 unless set.
    #[must_use]
    pub fn vector(mut self, vector: u32) -> Self {
        self.vector = vector;
        self
    }

    /// Takes the queue's memory from the allocator of `domain`, which the queue keeps alive.
    #[doc(alias = "IBV_CQ_INIT_ATTR_MASK_PD")]
    #[must_use]
    pub fn parent_domain<S: Sharing>(mut self, domain: &ParentDomain<S>) -> Self {
        self.domain = Some(domain.inner.clone());
        self
    }

    /// Bytes of a completion on mlx5, 64 or 128; 64 unless set. On other devices the size is the
    /// driver's.
    #[doc(alias = "MLX5DV_CQ_INIT_ATTR_MASK_CQE_SIZE")]
    #[must_use]
    pub fn cqe_size(mut self, bytes: u32) -> Self {
        self.cqe_size = bytes;
        self
    }

    /// Lets the device fill completions of 128 bytes up with zeros: it then writes whole cache lines and
    /// need not fetch them before. On mlx5, where
    /// [`pads_completions`](crate::mlx5::ContextAttr::pads_completions) says so.
    #[doc(alias = "MLX5DV_CQ_INIT_ATTR_FLAGS_CQE_PAD")]
    #[must_use]
    pub fn pad(mut self) -> Self {
        self.pad = true;
        self
    }

    /// Has [timestamps](crate::Completion::timestamp) of the device's clock of real time in place of ticks, which
    /// [`mlx5::real_time`](crate::mlx5::real_time) converts without a mapping of the clock. Both completion queues of a
    /// queue pair have one clock, but for raw packets; completions of an XRC shared receive queue have ticks. On mlx5,
    /// where
    /// [`real_time_timestamps`](crate::mlx5::ContextAttr::real_time_timestamps) says so.
    #[doc(alias = "IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK")]
    #[must_use]
    pub fn real_time_timestamps(mut self) -> Self {
        self.real_time = true;
        self
    }

    /// Creates the queue.
    ///
    /// # Errors
    ///
    /// `EINVAL` for 0 entries, for more than the device has (`max_cqe`), for a vector that does
    /// not exist, for a channel or domain of another context, for completions of another size than 64
    /// and 128 bytes, for [padding](Self::pad) of less than 128; `EOPNOTSUPP` for padding or
    /// [timestamps of real time](Self::real_time_timestamps) by a device without; `ENOMEM`; `EAGAIN` at a cgroup's
    /// limit.
    pub fn build(self) -> Result<CompletionQueue> {
        const VERB: &str = "create_cq";
        let CqBuilder { file, cqe, vector, channel, domain, cqe_size, pad, real_time, .. } = self;
        let ignores_overrun = self.ignores_overrun;
        if cqe == 0 {
            return Err(Error::invalid(VERB, "a queue of 0 entries; the minimum is 1"));
        }
        file.check_vector(VERB, vector)?;
        if let Some(channel) = &channel {
            file.check_same(VERB, "completion channel", &channel.file)?;
        }
        if let Some(domain) = &domain {
            file.check_same(VERB, "parent domain", domain.file())?;
        }
        let event_key = file.register(VERB, EventSourceKind::Cq)?;
        let source =
            Source { verb: VERB, allocator: domain.as_ref().and_then(|pd| pd.allocator.as_ref()) };
        let attr = CqInitAttr { cqe, cqe_size, pad, real_time };
        let execute = |request: CreateRequest<'_>| {
            let CreateRequest { mut command, pinned, resources } = request;
            let mut granted = 0u32;
            command
                .new_handle(uapi::UVERBS_ATTR_CREATE_CQ_HANDLE)
                .u64(uapi::UVERBS_ATTR_CREATE_CQ_USER_HANDLE, event_key.key().0)
                .u32(uapi::UVERBS_ATTR_CREATE_CQ_COMP_VECTOR, vector)
                .fd_if(
                    uapi::UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL,
                    channel.as_ref().map(|channel| channel.fd.as_fd()),
                )
                .fd(uapi::UVERBS_ATTR_CREATE_CQ_EVENT_FD, file.events.as_fd())
                .output(uapi::UVERBS_ATTR_CREATE_CQ_RESP_CQE, &mut granted);
            if ignores_overrun {
                let flags = ib_uverbs_ex_create_cq_flags::IB_UVERBS_CQ_FLAGS_IGNORE_OVERRUN;
                command.flags(uapi::UVERBS_ATTR_CREATE_CQ_FLAGS, flags.bits());
            }
            let made = file.execute(VERB, &mut command);
            let handle = command.made(uapi::UVERBS_ATTR_CREATE_CQ_HANDLE);
            made.map_err(|error| match error.errno() {
                Errno::INVAL => error.detail(above_max_cqe(&file, cqe).unwrap_or_else(|| {
                    let device = file.device.name();
                    format!("{device} refuses {cqe} entries of {cqe_size} bytes on vector {vector}")
                })),
                Errno::OPNOTSUPP if pad => {
                    error.detail(format!("{} pads no completions", file.device.name()))
                }
                Errno::NOMEM => error.pinning(pinned),
                _ => error
                    .context(|| format!("{cqe} entries of {cqe_size} bytes on vector {vector}")),
            })?;
            let handle = handle.map_err(|errno| Error::new(VERB, errno))?;
            Ok(Object::new(file.clone(), Class::CQ, handle, resources))
        };
        let (object, created) = provider::create(VERB, execute, |execute| {
            file.provider.create_cq(attr, source, &*file.kernel, execute)
        })?;
        let CreatedCq { ring, members } = created;
        let gate = members.poll_gate().gate().clone();
        let arms_directly = channel.is_some() && !file.kernel.is_hosted();
        let arm_sn = event_key.arm_sn().clone();
        let numbers = Arc::default();
        let inner = CqInner { object, members, numbers, event_key, channel, domain, real_time };
        let control = CqControl { inner: Arc::new(inner) };
        Ok(CompletionQueue { ring, gate, control, arms_directly, arm_sn })
    }
}

impl CompletionQueue {
    /// Looks for completions.
    ///
    /// [`Completions::next`] consumes them one by one; their entries are given back to the device when
    /// [`Completions`] is dropped:
    ///
    /// ```no_run
    /// # fn f(cq: &mut uverbs::CompletionQueue) -> Result<(), uverbs::PollError> {
    /// let mut completions = cq.poll()?;
    /// while let Some(completion) = completions.next() {
    ///     println!("{}: {}", completion.wr_id(), completion.status());
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`PollError::Forked`] in a child of the process that created the queue.
    #[doc(alias = "ibv_poll_cq")]
    #[doc(alias = "ibv_start_poll")]
    #[doc(alias = "ibv_end_poll")]
    #[inline]
    pub fn poll(&mut self) -> std::result::Result<Completions<'_>, PollError> {
        if !self.gate.is_at(QUIET) {
            self.catch_up()?;
        }
        Ok(Completions { gate: &self.gate, ring: &mut self.ring, consumed: false })
    }

    /// Reads the list of queue pairs that the control path attached and retired.
    #[cold]
    #[inline(never)]
    fn catch_up(&mut self) -> std::result::Result<(), PollError> {
        if self.gate.is_shut() {
            return Err(PollError::Forked);
        }
        // A device that runs only when it is polled has to be told of each poll.
        let tell_again = self.control.inner.file().kernel.polled();
        self.ring.catch_up();
        if tell_again {
            self.control.inner.members.poll_gate().mark_dirty();
        }
        Ok(())
    }

    /// Takes up to `wcs.len()` completions out of the queue, in order, and returns how many it wrote to
    /// the beginning of `wcs`. The queue is not borrowed afterwards, so that the code that handles the
    /// completions may poll it, or borrow the struct that owns it:
    ///
    /// ```no_run
    /// # use uverbs::{CompletionQueue, PollError, QueuePair, Wc, WcError};
    /// struct Server {
    ///     cq: CompletionQueue,
    ///     served: u64,
    /// }
    ///
    /// impl Server {
    ///     fn turn(&mut self) -> Result<(), Box<dyn std::error::Error>> {
    ///         let mut wcs = [Wc::default(); 16];
    ///         let found = self.cq.poll_into(&mut wcs)?;
    ///         for wc in &wcs[..found] {
    ///             self.serve(wc)?;
    ///         }
    ///         Ok(())
    ///     }
    ///
    ///     fn serve(&mut self, wc: &Wc) -> Result<(), WcError> {
    ///         wc.ok()?;
    ///         self.served += 1;
    ///         Ok(())
    ///     }
    /// }
    /// ```
    ///
    /// [`poll`](Self::poll) costs less if the program reads only a few fields of each completion.
    ///
    /// # Errors
    ///
    /// [`PollError::Forked`] in a child of the process that created the queue.
    #[doc(alias = "ibv_poll_cq")]
    pub fn poll_into(&mut self, wcs: &mut [Wc]) -> std::result::Result<usize, PollError> {
        let mut completions = self.poll()?;
        let mut found = 0;
        for wc in wcs {
            let Some(completion) = completions.next() else { break };
            *wc = completion.into();
            found += 1;
        }
        Ok(found)
    }

    /// Events of the queue that were read from its channel, modulo 4.
    pub(crate) fn events_read(&self) -> u32 {
        self.arm_sn.count()
    }

    /// The queue of an mlx5 device.
    pub(crate) fn mlx5_mut(&mut self) -> Option<&mut mlx5::cq::Mlx5Cq> {
        if let CqRing::Mlx5(ring) = &mut self.ring { Some(ring) } else { None }
    }

    /// Whether [`poll_direct`](Self::poll_direct) returns `Some`.
    pub(crate) fn is_direct(&self) -> bool {
        matches!(self.ring, CqRing::Mlx5(_))
    }

    /// A fake device that writes completions; only for a queue that has had none.
    #[cfg(test)]
    pub(crate) fn fake_device(&self) -> crate::provider::mlx5::fake_device::FakeCq {
        match &self.ring {
            CqRing::Mlx5(cq) => cq.device(),
            CqRing::Rxe(_) => panic!("a queue of rxe"),
        }
    }

    /// As [`poll`](Self::poll), of mlx5 alone, so that a loop over the completions has no arm for rxe; `None` on rxe.
    #[inline]
    pub(crate) fn poll_direct(&mut self) -> std::result::Result<Option<Direct<'_>>, PollError> {
        if !self.gate.is_at(QUIET) {
            self.catch_up()?;
        }
        match &mut self.ring {
            CqRing::Mlx5(ring) => {
                Ok(Some(Direct { gate: &self.gate, released: ring.consumer(), ring }))
            }
            CqRing::Rxe(_) => Ok(None),
        }
    }

    /// Returns to the device the CQEs consumed by polls whose [`Completions`] were leaked (`mem::forget`).
    #[cold]
    pub(crate) fn give_back(&mut self) {
        if !self.gate.is_shut() {
            self.ring.release();
        }
    }

    /// Discards the completions in the ring of a queue pair that is reset or destroyed.
    pub(crate) fn purge(&mut self, member: &Member) {
        self.ring.purge(member);
    }

    /// Asks for one event at the channel when a completion arrives.
    ///
    /// A completion that arrived before may not be announced: arm, poll once more, and only then
    /// sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a queue without a channel.
    #[doc(alias = "ibv_req_notify_cq")]
    #[inline]
    pub fn req_notify(&mut self, notify: Notify) -> Result<()> {
        const VERB: &str = "req_notify_cq";
        let solicited = notify == Notify::Solicited;
        match &self.ring {
            CqRing::Mlx5(cq) if self.arms_directly && !self.gate.is_shut() => {
                cq.arm(solicited, self.arm_sn.shifted());
                Ok(())
            }
            _ => self.req_notify_checked(VERB, solicited),
        }
    }

    /// As [`req_notify`](Self::req_notify), with all checks: for a queue that the kernel arms, whose device is in this
    /// process, or that cannot be armed.
    #[cold]
    #[inline(never)]
    fn req_notify_checked(&self, verb: &'static str, solicited: bool) -> Result<()> {
        if self.control.inner.channel.is_none() {
            return Err(Error::invalid(verb, "the queue was created without a channel"));
        }
        if self.gate.is_shut() {
            return Err(Error::forked(verb));
        }
        match &self.ring {
            CqRing::Rxe(_) => self.inner.notify(verb, solicited),
            CqRing::Mlx5(cq) => {
                cq.arm_hosted(solicited, self.arm_sn.shifted());
                Ok(())
            }
        }
    }

    /// Makes room for at least `cqe` completions; those in the queue stay.
    ///
    /// # Errors
    ///
    /// `EINVAL` for fewer than are in the queue or more than the device has, `EOPNOTSUPP` if the device does
    /// not resize queues, `ENOMEM` if memory cannot be pinned. After these the queue is as it was.
    ///
    /// On rxe `ENOMEM`, and `EAGAIN` for locked memory, can also mean that the resized queue could not be
    /// mapped: then no completion arrives any more. After `EIO` and `ETIMEDOUT` it is unknown whether the device
    /// writes to the old memory or to the new. Destroy the queue after these; memory that the device may write
    /// stays until then.
    #[doc(alias = "ibv_resize_cq")]
    pub fn resize(&mut self, cqe: u32) -> Result<()> {
        const VERB: &str = "resize_cq";
        let file = self.inner.file().clone();
        if cqe == 0 {
            return Err(Error::invalid(VERB, "a queue of 0 entries; the minimum is 1"));
        }
        file.check_fork(VERB)?;
        // The kernel copies the CQEs that are not consumed according to the consumer index.
        self.ring.release();
        let inner = &self.control.inner;
        let allocator = inner.domain.as_ref().and_then(|pd| pd.allocator.as_ref());
        let source = Source { verb: VERB, allocator };
        let execute = |request: ResizeRequest<'_>| {
            let ResizeRequest { cqe: requested, pending, pinned, input, output } = request;
            let core = uapi::ib_uverbs_resize_cq {
                cq_handle: inner.object.handle(),
                cqe: requested,
                ..Default::default()
            };
            let mut resp = uapi::ib_uverbs_resize_cq_resp::new_zeroed();
            let resized = file.execute(
                VERB,
                write(IB_USER_VERBS_CMD_RESIZE_CQ, &core).response(&mut resp).driver(input, output),
            );
            resized.map_err(|error| match error.errno() {
                Errno::INVAL if cqe < pending => error
                    .detail(format!("cqe {cqe} is below the {pending} completions in the queue")),
                Errno::INVAL => error
                    .detail(above_max_cqe(&file, cqe).unwrap_or_else(|| {
                        format!("{} refuses {cqe} entries", file.device.name())
                    })),
                Errno::NOMEM => error.pinning(pinned),
                Errno::OPNOTSUPP => {
                    error.detail(format!("{} resizes no completion queues", file.device.name()))
                }
                _ => error.context(|| format!("to {cqe} entries")),
            })
        };
        match &mut self.ring {
            CqRing::Mlx5(cq) => cq.resize(cqe, source, execute),
            CqRing::Rxe(cq) => cq.resize(cqe, VERB, file.kernel.mapper(), execute),
        }
    }

    /// The number of completions that the queue is sure to hold before it overflows: the requested
    /// number or more, as rdma-core's `cqe` counts them.
    pub fn capacity(&self) -> u32 {
        self.ring.capacity()
    }

    /// A handle that names the queue where queue pairs are made, and works while another thread polls.
    pub fn control(&self) -> CqControl {
        self.control.clone()
    }

    /// Destroys the queue, and returns an error if that fails; dropping it does the same silently,
    /// as soon as nothing uses it any more.
    ///
    /// # Errors
    ///
    /// `EBUSY` while a queue pair, or a shared receive queue of an XRC domain, uses it, while an
    /// [object of DEVX](crate::mlx5::devx::DevxObject) keeps it, or while there is a [handle](CqControl) of it; the queue
    /// comes back with the error.
    #[doc(alias = "ibv_destroy_cq")]
    pub fn destroy(self) -> std::result::Result<(), ErrorWith<Self>> {
        const HELD: &str = "a queue pair, a shared receive queue of an XRC domain, an object of DEVX, or a \
                            CqControl still uses the completion queue";
        let CompletionQueue { ring, control: CqControl { inner }, gate, arms_directly, arm_sn } =
            self;
        destroy_sole(inner, "destroy_cq", HELD, |inner| inner.object.destroy()).map_err(|failed| {
            failed.map(|inner| CompletionQueue {
                ring,
                control: CqControl { inner },
                gate,
                arms_directly,
                arm_sn,
            })
        })
    }
}

impl Deref for CompletionQueue {
    type Target = CqControl;

    fn deref(&self) -> &CqControl {
        &self.control
    }
}

impl CqControl {
    /// Lets an armed queue raise an event only when `count` completions are there, or `period_us`
    /// microseconds after the last event, whichever is sooner. 0 leaves a condition out; without any,
    /// each completion raises its event at once, as it does in a new queue.
    ///
    /// An event then stands for several completions. With a count and no period, the last completions may
    /// raise no event.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` where driver or device do not moderate, rxe for one; `EINVAL` for more than they
    /// can ([`moderation_caps`](crate::DeviceAttr::moderation_caps)).
    #[doc(alias = "ibv_modify_cq")]
    #[doc(alias = "IBV_CQ_ATTR_MODERATE")]
    pub fn moderate(&self, count: u16, period_us: u16) -> Result<()> {
        const VERB: &str = "modify_cq";
        let file = self.inner.file();
        let request = uapi::ib_uverbs_ex_modify_cq {
            cq_handle: self.inner.object.handle(),
            attr_mask: uapi::ib_cq_attr_mask::IB_CQ_MODERATE.bits(),
            attr: uapi::ib_uverbs_cq_moderation { cq_count: count, cq_period: period_us },
            reserved: 0,
        };
        let mut command = write_ex(IB_USER_VERBS_EX_CMD_MODIFY_CQ, &request);
        file.execute(VERB, &mut command).map_err(|error| {
            let name = file.device.name();
            let caps = file.limits().and_then(|limits| limits.moderation_caps);
            match (error.errno(), caps) {
                (Errno::OPNOTSUPP, _) => {
                    error.detail(format!("{name} does not moderate completion events"))
                }
                (Errno::INVAL, Some(caps)) => error.detail(format!(
                    "{count} completions or {period_us} microseconds; {name} waits for at most {} \
                     and {}",
                    caps.max_count, caps.max_period_us
                )),
                _ => error.context(|| {
                    format!("{name} is to wait for {count} completions or {period_us} microseconds")
                }),
            }
        })
    }

    /// The key of this queue in events.
    pub fn key(&self) -> ObjectKey {
        self.inner.event_key.key()
    }

    /// The number by which the kernel knows the queue within its file.
    pub fn handle(&self) -> u32 {
        self.inner.object.handle()
    }

    /// A context on the same file.
    pub fn context(&self) -> Context {
        Context { file: self.inner.file().clone() }
    }
}

impl fmt::Debug for CqControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CqControl")
            .field("device", &self.inner.file().device.name())
            .field("handle", &self.handle())
            .finish()
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("device", &self.inner.file().device.name())
            .field("handle", &self.handle())
            .field("capacity", &self.capacity())
            .finish()
    }
}

/// The completions of one poll; see [`CompletionQueue::poll`].
///
/// Do not use it in a child that was forked while it was held: [`next`](Self::next) does not check for that,
/// because the check would cost half as much as a completion. The parent is not disturbed. The child finds no
/// completion; if the queue is in memory of a [`QueueAllocator`](crate::QueueAllocator), the child finds the
/// parent's completions if it shares that memory, and dies of a signal if it does not have it. Dropping is
/// harmless.
#[derive(Debug)]
pub struct Completions<'q> {
    gate: &'q Gate,
    ring: &'q mut CqRing,
    consumed: bool,
}

impl Completions<'_> {
    /// The next completion. It is consumed, and lent until the next call.
    #[doc(alias = "ibv_next_poll")]
    #[allow(clippy::should_implement_trait, reason = "the completion borrows the queue")]
    #[inline]
    pub fn next(&mut self) -> Option<Completion<'_>> {
        let wc = self.ring.next()?;
        self.consumed = true;
        Some(Completion::new(wc))
    }

    /// Returns the CQEs consumed so far to the device, before the poll ends.
    #[inline]
    pub(crate) fn give_back(&mut self) {
        if self.consumed && !self.gate.is_shut() {
            self.ring.release();
        }
    }
}

impl Drop for Completions<'_> {
    #[inline]
    fn drop(&mut self) {
        self.give_back();
    }
}

/// As [`Completions`]; see [`CompletionQueue::poll_direct`].
#[derive(Debug)]
pub(crate) struct Direct<'q> {
    gate: &'q Gate,
    ring: &'q mut mlx5::cq::Mlx5Cq,
    /// The consumer index that was last given to the device.
    released: u32,
}

impl Direct<'_> {
    /// The next completion. It is consumed, and lent until the next call.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<Completion<'_>> {
        self.ring.next().map(|wc| Completion::new(ProviderWc::Mlx5(wc)))
    }

    /// As [`next`](Self::next) if the next completion is a success; otherwise the caller calls [`next`](Self::next).
    #[inline]
    pub(crate) fn next_success(&mut self) -> Option<Completion<'_>> {
        self.ring.next_success().map(|wc| Completion::new(ProviderWc::Mlx5(wc)))
    }

    /// Returns the CQEs consumed so far to the device, before the poll ends.
    #[inline]
    pub(crate) fn give_back(&mut self) {
        let consumer = self.ring.consumer();
        if self.released != consumer {
            self.released = consumer;
            if !self.gate.is_shut() {
                self.ring.release();
            }
        }
    }
}

impl Drop for Direct<'_> {
    #[inline]
    fn drop(&mut self) {
        self.give_back();
    }
}

/// Says that `cqe` is above the device's limit, if it is.
fn above_max_cqe(file: &File, cqe: u32) -> Option<String> {
    let limits = file.limits()?;
    above_limits(file.device.name(), &[("cqe", cqe, limits.max_cqe)])
}

/// The reason why a completion queue could not be polled, or a [scope](crate::owned::Scope) could not
/// wait for a request.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PollError {
    /// This process is a fork of the one that created the queue.
    Forked,
    /// [`Scope::wait`](crate::owned::Scope::wait) was given a request of another scope; `poll` never returns this.
    ForeignRequest,
}

impl fmt::Display for PollError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PollError::Forked => {
                f.write_str("this process is a fork of the one that created the completion queue")
            }
            PollError::ForeignRequest => f.write_str("the request belongs to another scope"),
        }
    }
}

impl std::error::Error for PollError {}

debug_is_sentence!(PollError);

/// For functions that return [`Error`].
impl From<PollError> for Error {
    fn from(error: PollError) -> Error {
        match error {
            PollError::Forked => Error::forked("poll_cq"),
            PollError::ForeignRequest => Error::invalid("scope", error.to_string()),
        }
    }
}
