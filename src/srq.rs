//! Shared receive queues. Pairs with `core/uverbs_std_types_srq.c`.

use crate::cq::{CqInner, CqRef};
use crate::device_attr::above_limits;
use crate::error::{Error, ErrorWith, Result};
use crate::events::keys::{EventKey, EventSourceKind, ObjectKey};
use crate::file::File;
use crate::lending::loan_table::Reclaim;
use crate::memory::allocator::Source;
use crate::memory::gate::Gate;
use crate::number::SrqNumber;
use crate::object::{Class, Object, destroy_sole};
use crate::pd::{KernelPd, PdInner, ProtectionDomain, Sharing};
use crate::provider::mlx5::srq::Mlx5Srq;
use crate::provider::{
    self, CreateRequest, CreatedSrq, Member, QueueResources, SharedReceives, SrqInitAttr, SrqRing,
};
use crate::qp::RecvBatch;
use crate::uverbs::invoke_write::write;
use crate::wr::PostError;
use crate::xrcd::{XrcDomain, XrcdInner};
use rustix::io::Errno;
use std::fmt;
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};
use uverbs_uapi::srq as uapi;
use uverbs_uapi::write::{IB_USER_VERBS_CMD_MODIFY_SRQ, IB_USER_VERBS_CMD_QUERY_SRQ};
use zerocopy::FromZeros;

const MASK_MAX_WR: u32 = 1;
const MASK_LIMIT: u32 = 1 << 1;

/// The part of a shared receive queue that its queue pairs keep alive. The sealed part of [`SrqRef`] names it, so it is
/// `pub`; nothing exports it.
#[derive(Debug)]
pub struct SrqInner {
    pub(crate) object: Object<QueueResources>,
    /// The part that queue pairs with receives from it use.
    pub(crate) shared_receives: SharedReceives,
    event_key: EventKey,
    pd: Arc<PdInner>,
    /// Set for a queue in an XRC domain.
    xrc: Option<Xrc>,
    /// The loans of its receives; see [`owned`](crate::owned).
    pub(crate) lent: OnceLock<Arc<dyn Reclaim>>,
}

/// The additional parts of a shared receive queue of an XRC domain: its own number, and its completion queue.
#[derive(Debug)]
struct Xrc {
    number: SrqNumber,
    cq: Arc<CqInner>,
    /// The number by which the completion queue identifies it.
    member: Member,
    _xrcd: Arc<XrcdInner>,
}

impl SrqInner {
    pub(crate) fn file(&self) -> &Arc<File> {
        self.object.file()
    }

    /// Whether it takes messages to XRC targets.
    pub(crate) fn is_xrc(&self) -> bool {
        self.xrc.is_some()
    }

    /// Destroys the kernel's queue, and makes the completion queue discard the completions of it that it still holds.
    fn destroy(&mut self) -> Result<()> {
        if self.object.is_gone() {
            return Ok(());
        }
        self.object.destroy()?;
        if let Some(xrc) = &self.xrc {
            xrc.cq.members.retire(&xrc.member);
        }
        Ok(())
    }
}

impl Drop for SrqInner {
    fn drop(&mut self) {
        let lent = self.lent.take();
        if self.destroy().is_ok() {
            if let Some(lent) = lent {
                lent.reclaim_all();
            }
            return;
        }
        // The device may still write the lent memory.
        std::mem::forget(lent);
        if self.file().epoch.is_over() {
            return;
        }
        self.object.abandon();
        if let Some(xrc) = &self.xrc {
            xrc.cq.members.retire_for_good(&xrc.member);
        }
    }
}

/// A receive queue that several queue pairs take their receives from.
///
/// Posting takes `&mut self`; to post from several threads put it into a `Mutex`.
///
/// ```no_run
/// # use uverbs::{CompletionQueue, ProtectionDomain, QpType, RecvWr};
/// # fn f(pd: &ProtectionDomain, cq: &CompletionQueue) -> Result<(), Box<dyn std::error::Error>> {
/// let memory = pd.mr_builder().allocate::<u8>(4096)?;
/// let mut srq = pd.srq_builder(128).build()?;
/// let qp = pd.qp_builder(cq, cq, QpType::RC).srq(&srq).build()?;
/// let sges = [memory.sge(..)?];
/// let mut batch = srq.batch()?;
/// batch.push(RecvWr::new(&sges).id(1))?;
/// // SAFETY: `memory` outlives the queue, and nobody reads it before the completion.
/// unsafe { batch.ring()? };
/// # drop(qp); Ok(()) }
/// ```
///
/// An event at the limit tells when to post again:
///
/// ```no_run
/// # fn f(context: &uverbs::Context, pd: &uverbs::ProtectionDomain) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use uverbs::{EventSource, EventType};
///
/// let mut srq = pd.srq_builder(256).max_sge(2).build()?;
/// // ... and after 256 receives were posted:
/// srq.set_limit(32)?;
/// if let Some(event) = context.next_event(Some(Duration::from_secs(1)))? {
///     if event.kind == EventType::SRQ_LIMIT_REACHED && event.source == EventSource::Srq(srq.key()) {
///         println!("fewer than 32 receives are left");
///     }
/// }
/// srq.resize(512)?;
/// assert!(srq.query()?.max_wr >= 512);
/// srq.destroy()?;
/// # Ok(()) }
/// ```
#[doc(alias = "ibv_srq")]
pub struct SharedReceiveQueue {
    pub(crate) inner: Arc<SrqInner>,
    ring: SrqRing,
    /// Shut in a forked child.
    gate: Gate,
    max_wr: u32,
    max_sge: u32,
}

pub(crate) mod sealed {
    use super::SrqInner;
    use std::sync::Arc;

    pub trait Sealed {
        fn inner(&self) -> &Arc<SrqInner>;
    }
}

/// A source of a queue pair's receives: a [`SharedReceiveQueue`], or one of
/// [`owned`](crate::owned::OwnedSharedReceiveQueue) or [`aio`](crate::aio::AsyncSharedReceiveQueue).
pub trait SrqRef: sealed::Sealed {}

impl SrqRef for SharedReceiveQueue {}
impl<T: SrqRef + ?Sized> SrqRef for &T {}
impl<T: SrqRef + ?Sized> SrqRef for &mut T {}

impl sealed::Sealed for SharedReceiveQueue {
    fn inner(&self) -> &Arc<SrqInner> {
        &self.inner
    }
}

impl<T: SrqRef + ?Sized> sealed::Sealed for &T {
    fn inner(&self) -> &Arc<SrqInner> {
        (**self).inner()
    }
}

impl<T: SrqRef + ?Sized> sealed::Sealed for &mut T {
    fn inner(&self) -> &Arc<SrqInner> {
        (**self).inner()
    }
}

/// The attributes of a shared receive queue; see [`SharedReceiveQueue::query`].
#[doc(alias = "ibv_srq_attr")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SrqAttr {
    /// Receives that it holds.
    pub max_wr: u32,
    /// Scatter/gather entries of a receive.
    pub max_sge: u32,
    /// The queue raises its event when it has fewer receives than this; 0 if it is not armed.
    pub limit: u32,
}

impl SrqAttr {
    /// Asks the kernel about a queue, which another process may have created.
    pub(crate) fn query(file: &File, verb: &'static str, handle: u32) -> Result<SrqAttr> {
        let mut resp = uapi::ib_uverbs_query_srq_resp::new_zeroed();
        let request = uapi::ib_uverbs_query_srq { srq_handle: handle, ..Default::default() };
        file.execute(verb, write(IB_USER_VERBS_CMD_QUERY_SRQ, &request).response(&mut resp))?;
        Ok(SrqAttr { max_wr: resp.max_wr, max_sge: resp.max_sge, limit: resp.srq_limit })
    }
}

/// Builds a [`SharedReceiveQueue`]; started by [`srq_builder`](ProtectionDomain::srq_builder).
#[derive(Debug)]
pub struct SrqBuilder {
    pd: Arc<PdInner>,
    max_wr: u32,
    max_sge: u32,
    xrc: Option<(Arc<XrcdInner>, Arc<CqInner>)>,
}

impl<S: Sharing> ProtectionDomain<S> {
    /// Starts to build a shared receive queue with room for at least `max_wr` receives, 1 to the device's
    /// [`max_srq_wr`](crate::DeviceAttr::max_srq_wr); see [`SharedReceiveQueue`] for an example.
    #[doc(alias = "ibv_create_srq")]
    #[doc(alias = "ibv_create_srq_ex")]
    pub fn srq_builder(&self, max_wr: u32) -> SrqBuilder {
        SrqBuilder { pd: self.inner.clone(), max_wr, max_sge: 1, xrc: None }
    }
}

impl SrqBuilder {
    /// Scatter/gather entries of a receive; 1 unless set.
    #[must_use]
    pub fn max_sge(mut self, entries: u32) -> Self {
        self.max_sge = entries;
        self
    }

    /// Puts the queue into an XRC domain: it takes messages to any target there whose sender names
    /// its [number](SharedReceiveQueue::number), and its receives complete to `cq`. The queue keeps both
    /// alive.
    #[doc(alias = "IBV_SRQT_XRC")]
    #[must_use]
    pub fn xrc(mut self, domain: &XrcDomain, cq: &impl CqRef) -> Self {
        cq.compact_updates();
        self.xrc = Some((domain.inner.clone(), cq.control().inner.clone()));
        self
    }

    /// Creates the queue.
    ///
    /// # Errors
    ///
    /// `EINVAL` for 0 receives or more than the device has (`max_srq_wr`, `max_srq_sge`);
    /// and for an XRC domain or a completion queue of another context; `EOPNOTSUPP` on a device without
    /// shared receive queues, or without XRC; `ENOMEM`; `EAGAIN` at a cgroup's limit.
    pub fn build(self) -> Result<SharedReceiveQueue> {
        const VERB: &str = "create_srq";
        let SrqBuilder { pd, max_wr, max_sge, xrc } = self;
        let file = pd.file().clone();
        if max_wr == 0 {
            return Err(Error::invalid(VERB, "a queue of 0 receives; the minimum is 1"));
        }
        if let Some((xrcd, cq)) = &xrc {
            file.check_same(VERB, "XRC domain", xrcd.file())?;
            file.check_same(VERB, "completion queue", cq.file())?;
        }
        let srq_type = match xrc {
            Some(_) => uapi::ib_uverbs_srq_type::IB_UVERBS_SRQT_XRC,
            None => uapi::ib_uverbs_srq_type::IB_UVERBS_SRQT_BASIC,
        };
        let event_key = file.register(VERB, EventSourceKind::Srq)?;
        let source = Source { verb: VERB, allocator: pd.allocator.as_ref() };
        let attr = SrqInitAttr { max_wr, max_sge, xrc: xrc.is_some() };
        let execute = |request: CreateRequest<'_>| {
            let CreateRequest { mut command, pinned, resources } = request;
            command
                .new_handle(uapi::UVERBS_ATTR_CREATE_SRQ_HANDLE)
                .handle(uapi::UVERBS_ATTR_CREATE_SRQ_PD_HANDLE, pd.handle())
                .u64(uapi::UVERBS_ATTR_CREATE_SRQ_USER_HANDLE, event_key.key().0)
                .u32(uapi::UVERBS_ATTR_CREATE_SRQ_LIMIT, 0)
                .handle_if(
                    uapi::UVERBS_ATTR_CREATE_SRQ_XRCD_HANDLE,
                    xrc.as_ref().map(|(xrcd, _)| xrcd.handle()),
                )
                .handle_if(
                    uapi::UVERBS_ATTR_CREATE_SRQ_CQ_HANDLE,
                    xrc.as_ref().map(|(_, cq)| cq.object.handle()),
                )
                .u64(uapi::UVERBS_ATTR_CREATE_SRQ_TYPE, srq_type.0.into())
                .fd(uapi::UVERBS_ATTR_CREATE_SRQ_EVENT_FD, file.events.as_fd());
            let made = file.execute(VERB, &mut command);
            let handle = command.made(uapi::UVERBS_ATTR_CREATE_SRQ_HANDLE);
            made.map_err(|error| match error.errno() {
                Errno::INVAL => {
                    let above = file.limits().and_then(|limits| {
                        let values = [
                            ("max_wr", max_wr, limits.max_srq_wr),
                            ("max_sge", max_sge, limits.max_srq_sge),
                        ];
                        above_limits(file.device.name(), &values)
                    });
                    error.detail(above.unwrap_or_else(|| {
                        let device = file.device.name();
                        format!("{device} refuses max_wr {max_wr} and max_sge {max_sge}")
                    }))
                }
                Errno::NOMEM => error.pinning(pinned),
                Errno::OPNOTSUPP => error.detail(format!(
                    "{} has no shared receive queues{}",
                    file.device.name(),
                    if xrc.is_some() { " of XRC domains" } else { "" }
                )),
                _ => error.context(|| format!("max_wr {max_wr} and max_sge {max_sge}")),
            })?;
            let handle = handle.map_err(|errno| Error::new(VERB, errno))?;
            Ok(Object::new(file.clone(), Class::SRQ, handle, resources))
        };
        let (object, created) = provider::create(VERB, execute, |execute| {
            file.provider.create_srq(attr, source, &*file.kernel, execute)
        })?;
        let CreatedSrq { ring, gate, shared_receives, member, number, max_wr, max_sge } = created;
        let xrc = xrc.map(|(xrcd, cq)| {
            // Attached before anything can be posted: the poller must know the queue of each completion.
            cq.members.attach(&member);
            Xrc { number: SrqNumber(number), cq, member, _xrcd: xrcd }
        });
        Ok(SharedReceiveQueue {
            inner: Arc::new(SrqInner {
                object,
                shared_receives,
                event_key,
                pd,
                xrc,
                lent: OnceLock::new(),
            }),
            ring,
            gate,
            max_wr,
            max_sge,
        })
    }
}

impl SharedReceiveQueue {
    /// The queue of an mlx5 device.
    pub(crate) fn mlx5_mut(&mut self) -> Option<&mut Mlx5Srq> {
        if let SrqRing::Mlx5(ring) = &mut self.ring { Some(ring) } else { None }
    }

    /// Starts a batch of receives.
    ///
    /// # Errors
    ///
    /// [`PostError::Forked`] in a child of the process that created the queue.
    #[doc(alias = "ibv_post_srq_recv")]
    #[inline]
    pub fn batch(&mut self) -> std::result::Result<RecvBatch<'_>, PostError> {
        if self.gate.is_shut() {
            return Err(PostError::Forked);
        }
        let (ring, cursor) = self.ring.begin();
        Ok(RecvBatch::new(ring, cursor))
    }

    /// Raises [`SRQ_LIMIT_REACHED`](crate::EventType::SRQ_LIMIT_REACHED) once when fewer than
    /// `limit` receives are left; 0 disarms.
    ///
    /// # Errors
    ///
    /// `EINVAL` for more than the queue holds.
    #[doc(alias = "ibv_modify_srq")]
    #[doc(alias = "IBV_SRQ_LIMIT")]
    pub fn set_limit(&mut self, limit: u32) -> Result<()> {
        const VERB: &str = "modify_srq";
        let request = uapi::ib_uverbs_modify_srq {
            srq_handle: self.inner.object.handle(),
            attr_mask: MASK_LIMIT,
            srq_limit: limit,
            ..Default::default()
        };
        let file = self.inner.file();
        let driver = file.provider.traits().srq_limit_request;
        let modified = file
            .execute(VERB, write(IB_USER_VERBS_CMD_MODIFY_SRQ, &request).driver(driver, &mut []));
        modified.map_err(|error| match error.errno() {
            Errno::INVAL => {
                error.detail(format!("a limit of {limit}, but the queue holds {}", self.max_wr))
            }
            _ => error.context(|| format!("a limit of {limit}")),
        })
    }

    /// Makes room for at least `max_wr` receives; those in the queue stay.
    ///
    /// # Errors
    ///
    /// `EINVAL` for fewer than are in the queue, for less than its limit, or for more than the
    /// device has; `EOPNOTSUPP` where the device cannot, as mlx5. After these the queue is as it was.
    /// If there is no address space left to map the new queue (`ENOMEM`), the queue takes no more
    /// receives.
    #[doc(alias = "ibv_modify_srq")]
    #[doc(alias = "IBV_SRQ_MAX_WR")]
    pub fn resize(&mut self, max_wr: u32) -> Result<()> {
        const VERB: &str = "modify_srq";
        let file = self.inner.file().clone();
        let SrqRing::Rxe(ring) = &mut self.ring else {
            return Err(Error::new(VERB, Errno::OPNOTSUPP)
                .detail(format!("{} does not resize shared receive queues", file.device.name())));
        };
        let request = uapi::ib_uverbs_modify_srq {
            srq_handle: self.inner.object.handle(),
            attr_mask: MASK_MAX_WR,
            max_wr,
            ..Default::default()
        };
        ring.resize(VERB, file.kernel.mapper(), |driver| {
            file.execute(
                VERB,
                write(IB_USER_VERBS_CMD_MODIFY_SRQ, &request).driver(driver, &mut []),
            )
            .map_err(|error| match error.errno() {
                Errno::INVAL => {
                    let above = file.limits().and_then(|limits| {
                        let values = [("max_wr", max_wr, limits.max_srq_wr)];
                        above_limits(file.device.name(), &values)
                    });
                    error.detail(above.unwrap_or_else(|| {
                        format!(
                            "max_wr {max_wr} is below the receives in the queue, or below its limit"
                        )
                    }))
                }
                _ => error.context(|| format!("to max_wr {max_wr}")),
            })
        })?;
        self.max_wr = ring.capacity();
        Ok(())
    }

    /// Asks the kernel for the queue's size and limit.
    ///
    /// # Errors
    ///
    /// `EIO` when the device is gone; [`Error::is_forked`].
    #[doc(alias = "ibv_query_srq")]
    pub fn query(&self) -> Result<SrqAttr> {
        SrqAttr::query(self.inner.file(), "query_srq", self.handle())
    }

    /// Whether nothing was ever posted.
    pub(crate) fn is_fresh(&self) -> bool {
        self.ring.is_fresh()
    }

    /// The domain whose memory its receives go to.
    pub(crate) fn domain(&self) -> &Arc<KernelPd> {
        &self.inner.pd.kernel
    }

    /// The completion queue of its receives, and its identity there, if it is of an XRC domain.
    pub(crate) fn xrc(&self) -> Option<(&Arc<CqInner>, &Member)> {
        self.inner.xrc.as_ref().map(|xrc| (&xrc.cq, &xrc.member))
    }

    /// The number by which senders name the queue, if it is of an XRC domain.
    #[doc(alias = "ibv_get_srq_num")]
    pub fn number(&self) -> Option<SrqNumber> {
        Some(self.inner.xrc.as_ref()?.number)
    }

    /// The key of this queue in events.
    pub fn key(&self) -> ObjectKey {
        self.inner.event_key.key()
    }

    /// The number by which the kernel knows the queue within its file.
    pub fn handle(&self) -> u32 {
        self.inner.object.handle()
    }

    /// Destroys the queue, and returns an error if that fails; dropping it does the same silently,
    /// as soon as no queue pair and no object of DEVX uses it any more.
    ///
    /// # Errors
    ///
    /// `EBUSY` while a queue pair uses it, or an [object of DEVX](crate::mlx5::devx::DevxObject) keeps it; the queue
    /// comes back with the error.
    #[doc(alias = "ibv_destroy_srq")]
    pub fn destroy(self) -> std::result::Result<(), ErrorWith<Self>> {
        const HELD: &str = "a queue pair still takes receives from the shared receive queue, or an object of \
                            DEVX keeps it: destroy that first";
        let SharedReceiveQueue { inner, ring, gate, max_wr, max_sge } = self;
        destroy_sole(inner, "destroy_srq", HELD, SrqInner::destroy).map_err(|failed| {
            failed.map(|inner| SharedReceiveQueue { inner, ring, gate, max_wr, max_sge })
        })
    }
}

impl fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedReceiveQueue")
            .field("device", &self.inner.file().device.name())
            .field("handle", &self.handle())
            .field("max_wr", &self.max_wr)
            .field("pd", &self.inner.pd.handle())
            .finish()
    }
}
