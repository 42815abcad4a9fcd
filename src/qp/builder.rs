//! Creation of queue pairs.

use super::ece::EceState;
use super::mcast::Groups;
use super::ordering;
use super::state::Tracked;
use super::{Base, QpCaps, QpControl, QpHandle, QpInner, QpType, QueuePair, RecvQueue, SendQueue};
use crate::cq::{CqInner, CqRef};
use crate::device_attr::above_limits;
use crate::error::{Error, Result};
use crate::events::keys::EventSourceKind;
use crate::file::File;
use crate::memory::allocator::Source;
use crate::number::Qpn;
use crate::object::{Class, Object};
use crate::pd::{PdInner, ProtectionDomain, Shared, Sharing};
use crate::provider::{self, CreateRequest, CreatedQp, QpInitAttr, Scatter};
use crate::srq::{SrqInner, SrqRef};
use crate::sync::lock::Lock;
use rustix::io::Errno;
use std::marker::PhantomData;
use std::os::fd::AsFd;
use std::sync::Arc;
use uapi::ib_uverbs_qp_create_flags as Flags;
use uverbs_uapi::qp as uapi;

impl<S: Sharing> ProtectionDomain<S> {
    /// Starts to build a queue pair whose sends complete to `send` and whose receives complete to `recv`,
    /// which may be one queue.
    ///
    /// Both queues are kept alive by the queue pair. If another thread owns and polls a queue, pass
    /// its [handle](crate::CqControl).
    ///
    /// ```no_run
    /// # fn f(pd: &uverbs::ProtectionDomain, cq: &uverbs::CompletionQueue) -> uverbs::Result<()> {
    /// let qp = pd
    ///     .qp_builder(cq, cq, uverbs::QpType::RC)
    ///     .max_send_wr(64)
    ///     .max_recv_wr(64)
    ///     .build()?;
    /// # drop(qp); Ok(()) }
    /// ```
    #[doc(alias = "ibv_create_qp")]
    #[doc(alias = "ibv_create_qp_ex")]
    #[doc(alias = "mlx5dv_create_qp")]
    pub fn qp_builder(
        &self,
        send: &impl CqRef,
        recv: &impl CqRef,
        qp_type: QpType,
    ) -> QpBuilder<S> {
        QpBuilder::new(self.inner.clone(), send, recv, qp_type)
    }
}

/// Builds a [`QueuePair`]; started by [`qp_builder`](crate::ProtectionDomain::qp_builder), which has an
/// example.
///
/// The setters of capacities ask for at least their value; [`caps`](super::QpControl::caps) returns the
/// granted capacities, and [`DeviceAttr`](crate::DeviceAttr) has the device's limits.
///
/// ```no_run
/// # fn f(pd: &uverbs::ProtectionDomain, cq: &uverbs::CompletionQueue, srq: &uverbs::SharedReceiveQueue)
/// # -> uverbs::Result<()> {
/// use uverbs::QpType;
///
/// let qp = pd
///     .qp_builder(cq, cq, QpType::RC)
///     .max_send_wr(128)
///     .max_send_sge(4)
///     .max_inline_data(64)
///     .max_recv_wr(128)
///     .max_recv_sge(2)
///     // Every send completes, also those that are not `signaled`.
///     .signal_all()
///     .build()?;
/// println!("granted: {:?}", qp.caps());
///
/// let shared = pd.qp_builder(cq, cq, QpType::RC).srq(srq).build()?;
/// // mlx5: short data comes in completions, and raw packets without their VLAN tag.
/// let short = pd.qp_builder(cq, cq, QpType::RC).scatter_to_cqe().build()?;
/// let raw = pd.qp_builder(cq, cq, QpType::RAW_PACKET).cvlan_stripping().build()?;
/// # drop((shared, short, raw)); Ok(()) }
/// ```
#[derive(Debug)]
pub struct QpBuilder<S: Sharing = Shared> {
    pd: Arc<PdInner>,
    send_cq: Arc<CqInner>,
    recv_cq: Arc<CqInner>,
    srq: Option<Arc<SrqInner>>,
    qp_type: QpType,
    cap: uapi::ib_uverbs_qp_cap,
    signal_all: bool,
    cvlan_stripping: bool,
    scatter: Scatter,
    out_of_order: bool,
    sharing: PhantomData<fn() -> S>,
}

impl<S: Sharing> QpBuilder<S> {
    pub(crate) fn new(
        pd: Arc<PdInner>,
        send: &impl CqRef,
        recv: &impl CqRef,
        qp_type: QpType,
    ) -> Self {
        send.compact_updates();
        recv.compact_updates();
        QpBuilder {
            pd,
            send_cq: send.control().inner.clone(),
            recv_cq: recv.control().inner.clone(),
            srq: None,
            qp_type,
            cap: uapi::ib_uverbs_qp_cap {
                max_send_wr: 1,
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            signal_all: false,
            cvlan_stripping: false,
            scatter: Scatter::None,
            out_of_order: false,
            sharing: PhantomData,
        }
    }

    /// Requests that the send queue shall hold; 1 unless set. 0 is no send queue: it takes no memory and has no
    /// completions, and every push answers [`PostError::NoQueue`](crate::PostError::NoQueue).
    #[must_use]
    pub fn max_send_wr(mut self, requests: u32) -> Self {
        self.cap.max_send_wr = requests;
        self
    }

    /// Requests that the receive queue shall hold; 1 unless set, ignored with a shared receive
    /// queue. 0 is no receive queue, for a queue pair that only sends, or whose peer only reads and writes memory.
    #[must_use]
    pub fn max_recv_wr(mut self, requests: u32) -> Self {
        self.cap.max_recv_wr = requests;
        self
    }

    /// Scatter/gather entries of a send; 1 unless set.
    #[must_use]
    pub fn max_send_sge(mut self, entries: u32) -> Self {
        self.cap.max_send_sge = entries;
        self
    }

    /// Scatter/gather entries of a receive; 1 unless set, ignored with a shared receive queue.
    #[must_use]
    pub fn max_recv_sge(mut self, entries: u32) -> Self {
        self.cap.max_recv_sge = entries;
        self
    }

    /// Bytes of inline data that a send shall take; 0 unless set.
    #[must_use]
    pub fn max_inline_data(mut self, bytes: u32) -> Self {
        self.cap.max_inline_data = bytes;
        self
    }

    /// Raises a completion for every send, signaled or not.
    #[doc(alias = "sq_sig_all")]
    #[must_use]
    pub fn signal_all(mut self) -> Self {
        self.signal_all = true;
        self
    }

    /// Lets the device move the VLAN tag of received packets to their
    /// [completions](crate::Completion::vlan). For raw packets, on devices with
    /// [`RawPacketCaps::CVLAN_STRIPPING`](crate::RawPacketCaps::CVLAN_STRIPPING).
    #[doc(alias = "IBV_QP_CREATE_CVLAN_STRIPPING")]
    #[must_use]
    pub fn cvlan_stripping(mut self) -> Self {
        self.cvlan_stripping = true;
        self
    }

    /// Lets the device put short data into completions instead of memory, which saves it a write: received data, and
    /// the results of signaled reads and atomics. For type RC, and for receives of type UC, on mlx5.
    ///
    /// Short is up to 32 bytes where completions have 64 bytes, and up to 64 where they have 128; see
    /// [`cqe_size`](crate::CqBuilder::cqe_size). The memory that such a request names is *not* written: look
    /// for the data at [`Completion::scattered`](crate::Completion::scattered) of every completion. Longer
    /// messages go to memory, and so does everything on a device that cannot do this; the driver does not say
    /// whether it can. A request needs memory in either case.
    ///
    /// The layers [`owned`](crate::owned) and `aio`, which give the data back in that memory, refuse such a
    /// queue pair.
    #[doc(alias = "MLX5DV_QP_CREATE_ALLOW_SCATTER_TO_CQE")]
    #[doc(alias = "MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE")]
    #[must_use]
    pub fn scatter_to_cqe(mut self) -> Self {
        self.scatter = Scatter::All;
        self
    }

    /// As [`scatter_to_cqe`](Self::scatter_to_cqe), for received data alone: results of reads and atomics go to memory.
    /// A queue pair that [signals all](Self::signal_all) gets results as well, as the driver decides.
    #[doc(alias = "MLX5DV_QP_CREATE_ALLOW_SCATTER_TO_CQE")]
    #[must_use]
    pub fn scatter_received_to_cqe(mut self) -> Self {
        self.scatter = Scatter::Received;
        self
    }

    /// Lets the device place data of sends and writes, and take receives, in another order than they were sent, so that
    /// packets may take several ways through the network (adaptive routing). Completions stay in order, and a peer's
    /// reads and atomics are executed in order. A program must not look for the last byte of a write: bytes before it
    /// may be missing. Both sides of a connection set it, or neither, as the manual of libmlx5 demands: nothing checks that.
    /// For types RC, UC, UD and XRC initiators on mlx5. The receive queue takes twice the memory.
    /// [`mlx5::query_out_of_order`](crate::mlx5::query_out_of_order) tells where it exists: a device may have it for some
    /// types only, and [`build`](Self::build) is `EOPNOTSUPP` for the others.
    #[doc(alias = "MLX5DV_QP_CREATE_OOO_DP")]
    #[must_use]
    pub fn out_of_order_placement(mut self) -> Self {
        self.out_of_order = true;
        self
    }

    /// Takes receives from `srq`, which the queue pair keeps alive. It must not be of an XRC domain,
    /// and raw packets have no shared receive queues.
    #[must_use]
    pub fn srq(mut self, srq: &impl SrqRef) -> Self {
        self.srq = Some(srq.inner().clone());
        self
    }

    /// Creates the queue pair, in state [`RESET`](crate::QpState::RESET).
    ///
    /// # Errors
    ///
    /// `EINVAL` for capacities above the limits of [`query_device`](crate::Context::query_device), for queues
    /// of another context, for completion queues with timestamps of different clocks, for options that the type does
    /// not have, and for [`QpType::XRC_TGT`], which
    /// [`XrcDomain::create_target`](crate::XrcDomain::create_target) creates; `EOPNOTSUPP` for a type that the
    /// device does not have, and on rxe for options that only mlx5 has; `ENOMEM`; `EAGAIN` at a cgroup's
    /// limit; `EPERM` for raw packets without `CAP_NET_RAW`.
    pub fn build(mut self) -> Result<QueuePair<S>> {
        const VERB: &str = "create_qp";
        let file = self.pd.file().clone();
        file.check_same(VERB, "send completion queue", self.send_cq.file())?;
        file.check_same(VERB, "receive completion queue", self.recv_cq.file())?;
        if let Some(srq) = &self.srq {
            file.check_same(VERB, "shared receive queue", srq.file())?;
        }
        self.check_xrc(VERB)?;
        self.check_packets(VERB)?;
        self.check_scatter(VERB)?;
        if self.out_of_order {
            ordering::check(VERB, &file, self.qp_type)?;
        }
        self.check_clocks(VERB)?;
        let initiator = self.qp_type == QpType::XRC_INI;
        if initiator || self.srq.is_some() {
            self.cap.max_recv_wr = 0;
            self.cap.max_recv_sge = 0;
        }
        let mut refused = Vec::new();
        loop {
            let qp = self.create(VERB, &file)?;
            let leased = |cq: &CqInner| {
                let by_kernel = file.provider.traits().kernel_numbers_members;
                let number = qp.qp.member.number.filter(|_| by_kernel);
                number.is_some_and(|number| cq.numbers.is_leased(number))
            };
            if !leased(&self.send_cq) && !leased(&self.recv_cq) {
                return Ok(qp);
            }
            // Kept until the next one is created, so that the kernel assigns another number.
            refused.push(qp);
        }
    }

    /// Creates a queue pair. Its number may still be leased; see [`Numbers`](crate::cq::Numbers).
    fn create(&self, verb: &'static str, file: &Arc<File>) -> Result<QueuePair<S>> {
        let initiator = self.qp_type == QpType::XRC_INI;
        let event_key = file.register(verb, EventSourceKind::Qp)?;
        let mut flags = Flags::empty();
        flags.set(Flags::IB_UVERBS_QP_CREATE_SQ_SIG_ALL, self.signal_all);
        flags.set(Flags::IB_UVERBS_QP_CREATE_CVLAN_STRIPPING, self.cvlan_stripping);
        let attr = QpInitAttr {
            qp_type: self.qp_type,
            domain: self.pd.identity(),
            cap: self.cap,
            signal_all: self.signal_all,
            scatter: self.scatter,
            out_of_order: self.out_of_order,
            srq: self.srq.as_ref().map(|srq| &srq.shared_receives),
            register: self.pd.td.as_ref().and_then(|td| td.register.as_ref()),
        };
        let source = Source { verb, allocator: self.pd.allocator.as_ref() };
        let execute = |request: CreateRequest<'_>| {
            let CreateRequest { mut command, pinned, resources } = request;
            command
                .new_handle(uapi::UVERBS_ATTR_CREATE_QP_HANDLE)
                .handle(uapi::UVERBS_ATTR_CREATE_QP_PD_HANDLE, self.pd.handle())
                .handle(uapi::UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE, self.send_cq.object.handle())
                .handle_if(
                    uapi::UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE,
                    (!initiator).then(|| self.recv_cq.object.handle()),
                )
                .handle_if(
                    uapi::UVERBS_ATTR_CREATE_QP_SRQ_HANDLE,
                    self.srq.as_ref().map(|srq| srq.object.handle()),
                )
                .u64(uapi::UVERBS_ATTR_CREATE_QP_USER_HANDLE, event_key.key().0)
                .u64(uapi::UVERBS_ATTR_CREATE_QP_TYPE, self.qp_type.0.into())
                .flags(uapi::UVERBS_ATTR_CREATE_QP_FLAGS, flags.bits())
                .fd(uapi::UVERBS_ATTR_CREATE_QP_EVENT_FD, file.events.as_fd());
            let made = file.execute(verb, &mut command);
            let handle = command.made(uapi::UVERBS_ATTR_CREATE_QP_HANDLE);
            made.map_err(|error| self.explain(error, pinned))?;
            let handle = handle.map_err(|errno| Error::new(verb, errno))?;
            Ok(Object::new(file.clone(), Class::QP, handle, resources))
        };
        let (object, created) = provider::create(verb, execute, |execute| {
            file.provider.create_qp(attr, source, &*file.kernel, execute)
        })?;
        let CreatedQp { send, recv, qpn, cap, member, gate, named, ece } = created;
        let qp = Arc::new(QpInner {
            object,
            qpn: Qpn(qpn),
            qp_type: self.qp_type,
            caps: QpCaps::new(&cap),
            state: Tracked::new(Some(gate.clone())),
            moving: Lock::default(),
            scatters: self.scatter != Scatter::None,
            out_of_order: self.out_of_order,
            local: Lock::default(),
            groups: Groups::default(),
            event_key,
            base: Base::Domain {
                send_cq: self.send_cq.clone(),
                recv_cq: self.recv_cq.clone(),
                srq: self.srq.clone(),
                pd: self.pd.clone(),
            },
            member,
            ece: ece.map(EceState::new),
            named,
            retired: false,
            kept: Lock::default(),
        });
        // Attached before anything can be posted: the poller must know the queue pair of each completion.
        qp.each_cq(|cq| cq.members.attach(&qp.member));
        if let (Some(named), Some(pd)) = (&qp.named, qp.pd()) {
            pd.kernel.retired.attach(named);
        }
        let qp = QpHandle::new(qp);
        Ok(QueuePair {
            send: SendQueue::new(qp.clone(), send, gate.clone()),
            recv: recv.map(|ring| RecvQueue::new(qp.clone(), ring, gate)),
            control: QpControl { qp },
        })
    }

    /// Refuses options that do not go together with XRC; the kernel would refuse them by an errno alone.
    fn check_xrc(&self, verb: &'static str) -> Result<()> {
        let of_domain = self.srq.as_ref().is_some_and(|srq| srq.is_xrc());
        let detail = match self.qp_type {
            QpType::XRC_TGT => "XRC targets are made in an XRC domain: XrcDomain::create_target",
            QpType::XRC_INI if self.srq.is_some() => "an XRC initiator receives nothing",
            _ if of_domain => {
                "the shared receive queue belongs to an XRC domain, and takes messages to its targets"
            }
            _ => return Ok(()),
        };
        Err(Error::invalid(verb, detail))
    }

    /// Refuses raw packets, and options of them, that a kernel would ignore.
    fn check_packets(&self, verb: &'static str) -> Result<()> {
        match self.qp_type {
            QpType::RAW_PACKET if self.srq.is_some() => {
                Err(Error::invalid(verb, "raw packets are received by queues of their own only"))
            }
            QpType::RAW_PACKET if !self.pd.file().provider.traits().raw_packets => {
                Err(self.explain(Error::new(verb, Errno::OPNOTSUPP), 0))
            }
            QpType::RAW_PACKET => Ok(()),
            other if self.cvlan_stripping => {
                let detail = format!("type {other} has no VLAN tags to strip; raw packets do");
                Err(Error::invalid(verb, detail))
            }
            _ => Ok(()),
        }
    }

    /// Refuses scatter to CQE for types on which the kernel would ignore it.
    fn check_scatter(&self, verb: &'static str) -> Result<()> {
        match self.qp_type {
            QpType::RC | QpType::UC => Ok(()),
            _ if self.scatter == Scatter::None => Ok(()),
            other => {
                let detail = format!("type {other} has no scatter to CQE; RC and UC have it");
                Err(Error::invalid(verb, detail))
            }
        }
    }

    /// A queue pair has one format of timestamps, but for the two queues of raw packets: `get_qp_ts_format`.
    fn check_clocks(&self, verb: &'static str) -> Result<()> {
        let has_two = matches!(self.qp_type, QpType::RAW_PACKET | QpType::XRC_INI);
        if has_two || self.send_cq.real_time == self.recv_cq.real_time {
            return Ok(());
        }
        let with = |real_time| if real_time { "real time" } else { "ticks" };
        let detail = format!(
            "the send completion queue has timestamps of {}, the receive completion queue of {}; create both with \
             real_time_timestamps, or neither",
            with(self.send_cq.real_time),
            with(self.recv_cq.real_time)
        );
        Err(Error::invalid(verb, detail))
    }

    /// The requested queue pair, in words.
    fn asked(&self) -> String {
        let cap = &self.cap;
        format!(
            "type {} with max_send_wr {}, max_send_sge {}, max_inline_data {}, max_recv_wr {} and \
             max_recv_sge {}",
            self.qp_type,
            cap.max_send_wr,
            cap.max_send_sge,
            cap.max_inline_data,
            cap.max_recv_wr,
            cap.max_recv_sge,
        )
    }

    fn explain(&self, error: Error, bytes: usize) -> Error {
        let (cap, file) = (&self.cap, self.pd.file());
        match error.errno() {
            Errno::INVAL => {
                let above = file.limits().and_then(|limits| {
                    let inline = file.provider.max_inline_data(limits.max_sge);
                    let values = [
                        ("max_send_wr", cap.max_send_wr, limits.max_qp_wr),
                        ("max_recv_wr", cap.max_recv_wr, limits.max_qp_wr),
                        ("max_send_sge", cap.max_send_sge, limits.max_sge),
                        ("max_recv_sge", cap.max_recv_sge, limits.max_sge),
                        ("max_inline_data", cap.max_inline_data, inline.unwrap_or(u32::MAX)),
                    ];
                    above_limits(file.device.name(), &values)
                });
                error.detail(
                    above.unwrap_or_else(|| {
                        format!("{} refuses {}", file.device.name(), self.asked())
                    }),
                )
            }
            Errno::OPNOTSUPP if self.cvlan_stripping => error.detail(format!(
                "{} has no queue pairs of type {} that strip VLAN tags",
                file.device.name(),
                self.qp_type
            )),
            Errno::OPNOTSUPP => error.detail(format!(
                "{} has no queue pairs of type {}",
                file.device.name(),
                self.qp_type
            )),
            Errno::NOMEM => error.pinning(bytes),
            Errno::PERM => error.detail(format!("type {} needs CAP_NET_RAW", self.qp_type)),
            _ => error.context(|| self.asked()),
        }
    }
}
