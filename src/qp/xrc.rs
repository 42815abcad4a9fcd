//! XRC targets: receiving halves of connections, which have no queues of their own. Pairs with
//! `create_xrc_qp_user` in `core/verbs.c`, and with `ib_uverbs_open_qp` in `core/uverbs_cmd.c`.

use super::ece::{Ece, EceState};
use super::mcast::Groups;
use super::state::Tracked;
use super::{Base, QpCaps, QpControl, QpHandle, QpInner, QpState, QpType};
use crate::error::{Error, ErrorWith, Result};
use crate::events::keys::{EventKey, EventSourceKind};
use crate::number::Qpn;
use crate::object::{Class, Object};
use crate::provider::{self, CreateRequest, CreatedTarget, Execute, Member};
use crate::sync::lock::Lock;
use crate::uverbs::invoke_write::write;
use crate::xrcd::XrcDomain;
use rustix::io::Errno;
use std::fmt;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::sync::Arc;
use uverbs_uapi::qp as uapi;
use uverbs_uapi::write::IB_USER_VERBS_CMD_OPEN_QP;
use zerocopy::FromZeros;

/// The receiving half of an XRC connection.
///
/// A message that arrives goes to the [shared receive queue](crate::SrqBuilder::xrc) of the target's
/// [domain](XrcDomain) that its sender named, and completes there. A target has no queue to post to
/// or to poll. It dereferences to [`QpControl`], which is all that is left.
///
/// A target belongs to its domain rather than to the process that made it. Other processes that have
/// the domain open may [open](XrcDomain::open_target) it, and it lives until the last of them drops
/// it.
#[doc(alias = "IBV_QPT_XRC_RECV")]
pub struct XrcTarget {
    control: QpControl,
}

impl XrcDomain {
    /// Creates a target, in state [`RESET`](QpState::RESET).
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` on a device without XRC; `ENOMEM`; `EAGAIN` at a cgroup's limit.
    #[doc(alias = "ibv_create_qp_ex")]
    pub fn create_target(&self) -> Result<XrcTarget> {
        const VERB: &str = "create_qp";
        let file = self.inner.file().clone();
        let event_key = file.register(VERB, EventSourceKind::Qp)?;
        let execute = |request: CreateRequest<'_>| {
            let mut cap = uapi::ib_uverbs_qp_cap::default();
            let none = uapi::ib_uverbs_qp_cap::default();
            let mut command = request.command;
            command
                .new_handle(uapi::UVERBS_ATTR_CREATE_QP_HANDLE)
                .handle(uapi::UVERBS_ATTR_CREATE_QP_XRCD_HANDLE, self.handle())
                .u64(uapi::UVERBS_ATTR_CREATE_QP_USER_HANDLE, event_key.key().0)
                .input(uapi::UVERBS_ATTR_CREATE_QP_CAP, &none)
                .u64(uapi::UVERBS_ATTR_CREATE_QP_TYPE, QpType::XRC_TGT.0.into())
                .fd(uapi::UVERBS_ATTR_CREATE_QP_EVENT_FD, file.events.as_fd())
                .output(uapi::UVERBS_ATTR_CREATE_QP_RESP_CAP, &mut cap);
            let made = file.execute(VERB, &mut command);
            let handle = command.made(uapi::UVERBS_ATTR_CREATE_QP_HANDLE);
            made?;
            handle.map_err(|errno| Error::new(VERB, errno))
        };
        let provide = |execute: Execute<'_>| file.provider.create_target(VERB, execute);
        let created = provider::create(VERB, execute, provide);
        let (handle, created) = created.map_err(|error| match error.errno() {
            Errno::OPNOTSUPP => error.detail(format!("{} has no XRC targets", file.device.name())),
            _ => error.context(|| {
                format!("a target of XRC domain {} on {}", self.handle(), file.device.name())
            }),
        })?;
        let CreatedTarget { qpn, member, ece } = created;
        Ok(self.target(handle, Qpn(qpn), event_key, member, ece))
    }

    /// Opens a target of this domain that this process or another one created. Both handles are of the same
    /// queue pair, and each has to be dropped. Its [state](QpControl::state) is queried from the kernel.
    ///
    /// Events of the target arrive only at the process that created it, while it has the target open: the
    /// kernel gives an opened target no event file.
    ///
    /// # Errors
    ///
    /// `EINVAL` if no target of this domain has the number.
    #[doc(alias = "ibv_open_qp")]
    pub fn open_target(&self, qpn: Qpn) -> Result<XrcTarget> {
        const VERB: &str = "open_qp";
        let file = self.inner.file().clone();
        let event_key = file.register(VERB, EventSourceKind::Qp)?;
        let request = uapi::ib_uverbs_open_qp {
            user_handle: event_key.key().0,
            pd_handle: self.handle(),
            qpn: qpn.0,
            qp_type: QpType::XRC_TGT.0 as u8,
            ..Default::default()
        };
        let mut resp = uapi::ib_uverbs_create_qp_resp::new_zeroed();
        let opened =
            file.execute(VERB, write(IB_USER_VERBS_CMD_OPEN_QP, &request).response(&mut resp));
        opened.map_err(|error| match error.errno() {
            Errno::INVAL => {
                error.detail(format!("no target of this XRC domain has the number {qpn}"))
            }
            _ => error.context(|| format!("the target {qpn} of XRC domain {}", self.handle())),
        })?;
        let target = self.target(resp.qp_handle, Qpn(resp.qpn), event_key, Member::default(), None);
        target.query().map_err(|error| error.in_verb(VERB))?;
        Ok(target)
    }

    fn target(
        &self,
        handle: u32,
        qpn: Qpn,
        event_key: EventKey,
        member: Member,
        ece: Option<Ece>,
    ) -> XrcTarget {
        let object = Object::new(self.inner.file().clone(), Class::QP, handle, None);
        let qp = Arc::new(QpInner {
            object,
            qpn,
            qp_type: QpType::XRC_TGT,
            caps: QpCaps::new(&uapi::ib_uverbs_qp_cap::default()),
            state: Tracked::new(None),
            moving: Lock::default(),
            scatters: false,
            out_of_order: false,
            local: Lock::default(),
            groups: Groups::default(),
            event_key,
            base: Base::Xrc { _xrcd: self.inner.clone() },
            member,
            ece: ece.map(EceState::new),
            named: None,
            retired: false,
            kept: Lock::default(),
        });
        XrcTarget { control: QpControl { qp: QpHandle::new(qp) } }
    }
}

impl XrcTarget {
    /// Brings the target back to state [`RESET`](QpState::RESET), in all processes that have it open.
    ///
    /// # Errors
    ///
    /// Those of the kernel.
    pub fn reset(&mut self) -> Result<()> {
        let attr = super::QpAttr::new().state(QpState::RESET);
        self.qp.apply("reset_qp", &attr)?;
        self.qp.set_state(QpState::RESET);
        Ok(())
    }

    /// Closes the target, and returns an error if that fails; dropping it does the same silently.
    /// The last one to close it destroys it.
    ///
    /// # Errors
    ///
    /// Those of the kernel; the target comes back with the error.
    #[doc(alias = "ibv_destroy_qp")]
    pub fn destroy(self) -> std::result::Result<(), ErrorWith<Self>> {
        const HELD: &str = "something still holds the target";
        self.control
            .qp
            .destroy(HELD)
            .map_err(|failed| failed.map(|qp| XrcTarget { control: QpControl { qp } }))
    }
}

impl Deref for XrcTarget {
    type Target = QpControl;

    fn deref(&self) -> &QpControl {
        &self.control
    }
}

impl fmt::Debug for XrcTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.control.fmt(f)
    }
}
