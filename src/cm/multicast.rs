//! Members of multicast groups. Pairs with `ucma_process_join` and `ucma_leave_multicast` in `core/ucma.c`, and with
//! `rdma_join_multicast` in `core/cma.c`.

use super::address::encode;
use super::event::Event;
use super::id::IdInner;
use super::qp::{ConnectedQp, check_type, path};
use super::step::{Progress, Step, wait, wait_for_end};
use super::ucma::UcmaCommand;
use crate::address_vector::AddressVector;
use crate::error::{Error, Result};
use crate::number::{Gid, Qkey, Qpn};
use crate::qp::McastMembership;
use crate::qp::QpControl;
use rustix::io::Errno;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use uverbs_uapi::rdma_user_cm as uapi;
use uverbs_uapi::rdma_user_cm::rdma_cm_event_type as Type;

/// The kernel's `ENOTSUPP`, for which user space has no name.
const ENOTSUPP: i32 = 524;

/// The role of a member of a multicast group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MulticastRole {
    /// The queue pair receives the group's datagrams, and may send to the group.
    #[default]
    #[doc(alias = "RDMA_MC_JOIN_FLAG_FULLMEMBER")]
    Full,
    /// The queue pair sends to the group only. The host does not ask the network for the group's datagrams.
    #[doc(alias = "RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER")]
    SendOnly,
}

/// An id that asked to join a multicast group. Dropping it leaves the group.
///
/// ```no_run
/// # fn f(id: uverbs::cm::BoundId, qp: &uverbs::QpControl) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::cm::MulticastRole;
///
/// let group = "239.1.2.3".parse()?;
/// let member = id.join_multicast(qp, group, MulticastRole::Full)?.wait(None)?.done()?;
/// println!("datagrams go to {} with {:?}", member.gid(), member.qkey());
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct JoiningMulticast {
    member: Arc<IdInner>,
    qp: ConnectedQp,
    role: MulticastRole,
}

impl JoiningMulticast {
    /// Asks the kernel to join, with an id that is on a device.
    pub(super) fn begin(
        id: &Arc<IdInner>,
        qp: &QpControl,
        group: IpAddr,
        role: MulticastRole,
    ) -> Result<JoiningMulticast> {
        const VERB: &str = JoiningMulticast::VERB;
        if !group.is_multicast() {
            let detail = format!(
                "{group} is no multicast address: those are 224.0.0.0 to 239.255.255.255, and ff00::/8"
            );
            return Err(Error::invalid(VERB, detail));
        }
        check_type(VERB, id, qp)?;
        let connected = ConnectedQp::of(qp);
        connected.ready_datagrams(VERB, id)?;
        let (addr, addr_size) = encode(&SocketAddr::new(group, 0));
        let join_flags = match role {
            MulticastRole::Full => uapi::RDMA_MC_JOIN_FLAG_FULLMEMBER,
            MulticastRole::SendOnly => uapi::RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER,
        };
        let member = id.member(VERB)?;
        let request = uapi::rdma_ucm_join_mcast {
            uid: member.key,
            id: id.number(),
            addr_size,
            join_flags,
            addr,
            ..Default::default()
        };
        let mut answer = uapi::rdma_ucm_create_id_resp::default();
        id.execute(VERB, UcmaCommand::join_mcast(&request, &mut answer))
            .map_err(|error| explain(error, group))?;
        member.joined(answer.id);
        Ok(JoiningMulticast { member, qp: connected, role })
    }

    /// Waits until the host is a member, for at most `timeout`, or without a limit for `None`; a timeout of zero polls
    /// once. With [`MulticastRole::Full`] the queue pair then receives the group's datagrams.
    ///
    /// # Errors
    ///
    /// Any error leaves the group. `ETIMEDOUT` if the subnet manager did not answer; `EINVAL` if the program
    /// dropped the queue pair meanwhile; the errors of [`attach_mcast`](QpControl::attach_mcast).
    pub fn wait(self, timeout: Option<Duration>) -> Result<Progress<Self, MulticastMember>> {
        wait(self, timeout)
    }
}

impl Step for JoiningMulticast {
    type Next = MulticastMember;
    type Error = Error;
    const VERB: &'static str = "join_multicast";

    fn id(&self) -> &IdInner {
        &self.member
    }

    fn advance(self, event: Event) -> Result<MulticastMember> {
        if event.kind != Type::RDMA_CM_EVENT_MULTICAST_JOIN || event.status != 0 {
            return Err(event.failure(Self::VERB).into());
        }
        let gid = Gid(event.ud.ah_attr.grh.dgid);
        let attachment = match self.role {
            MulticastRole::Full => Some(self.qp.attach(Self::VERB, gid, event.ud.ah_attr.dlid)?),
            MulticastRole::SendOnly => None,
        };
        Ok(MulticastMember {
            attachment,
            member: self.member,
            lost: AtomicBool::new(false),
            address: path(&event.ud.ah_attr),
            gid,
            qpn: Qpn(event.ud.qp_num),
            qkey: Qkey(event.ud.qkey),
        })
    }
}

/// A membership in a multicast group. Dropping it leaves the group.
///
/// An [`AddressHandle`](crate::AddressHandle) of [`address`](Self::address), the number and the Q_Key make a
/// [`Destination`](crate::Destination), to which every member's queue pair listens, the sender's too.
///
/// The membership keeps its id. With [`MulticastRole::Full`] it also keeps the queue pair, as a
/// [`McastMembership`] does.
///
/// ```no_run
/// # fn f(pd: &uverbs::ProtectionDomain, member: &uverbs::cm::MulticastMember) -> uverbs::Result<()> {
/// use uverbs::Destination;
///
/// let ah = pd.create_ah(member.address())?;
/// // Datagrams for it reach every member.
/// let all = Destination::new(&ah, member.qpn(), member.qkey());
/// # let _ = all;
/// // Returns when the subnet manager, or the removal of the device, has ended the membership.
/// member.wait_lost(None)?;
/// # Ok(()) }
/// ```
#[doc(alias = "rdma_leave_multicast")]
#[derive(Debug)]
#[must_use = "dropping the membership leaves the group"]
pub struct MulticastMember {
    /// The queue pair leaves before the host does.
    attachment: Option<McastMembership>,
    member: Arc<IdInner>,
    /// Whether an event reported the loss of the membership.
    lost: AtomicBool,
    address: AddressVector,
    gid: Gid,
    qpn: Qpn,
    qkey: Qkey,
}

impl MulticastMember {
    /// The path to the group, for [`create_ah`](crate::ProtectionDomain::create_ah).
    pub fn address(&self) -> &AddressVector {
        &self.address
    }

    /// The group's GID.
    pub fn gid(&self) -> Gid {
        self.gid
    }

    /// The queue pair number for datagrams to the group: `0xffffff`.
    pub fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// The group's Q_Key, which the queue pairs of its members have.
    pub fn qkey(&self) -> Qkey {
        self.qkey
    }

    /// Whether the queue pair receives the group's datagrams.
    pub fn receives(&self) -> bool {
        self.attachment.is_some()
    }

    /// Whether an event reported the loss of the membership, or the removal of the device.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Waits until the membership is lost, for at most `timeout`, or without a limit for `None`; a timeout of zero
    /// polls once. The removal of the device ends a membership, and on InfiniBand a restart of the subnet manager,
    /// which forgets its groups: the host has to join again. Several threads may wait.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT` after the timeout; `EACCES` after a change of credentials.
    #[doc(alias = "RDMA_CM_EVENT_MULTICAST_ERROR")]
    pub fn wait_lost(&self, timeout: Option<Duration>) -> Result<()> {
        match wait_for_end(self, || self.is_lost(), timeout)? {
            true => Ok(()),
            false => {
                let verb = <&MulticastMember as Step>::VERB;
                Err(Error::new(verb, Errno::TIMEDOUT).detail("the host is still a member"))
            }
        }
    }
}

impl Step for &MulticastMember {
    type Next = ();
    type Error = Error;
    const VERB: &'static str = "wait_lost";

    fn id(&self) -> &IdInner {
        &self.member
    }

    /// The kernel reports a join once, and other events to the id that joined.
    fn ignores(&self, event: &Event) -> bool {
        !matches!(
            event.kind,
            Type::RDMA_CM_EVENT_MULTICAST_ERROR | Type::RDMA_CM_EVENT_DEVICE_REMOVAL
        )
    }

    fn advance(self, _event: Event) -> Result<()> {
        self.lost.store(true, Ordering::Relaxed);
        // Other tasks may wait for the loss, too.
        self.member.wake();
        Ok(())
    }
}

/// Explains the kernel's refusal of a group.
fn explain(error: Error, group: IpAddr) -> Error {
    match error.errno() {
        errno if errno.raw_os_error() == ENOTSUPP => error.detail(format!(
            "the kernel joins IPv4 groups only on RoCE v2, and {group} is none; `attach_mcast` and a socket that \
             joins the group do without the connection manager"
        )),
        Errno::OPNOTSUPP => error.detail(
            "the subnet manager has no members that only send; join with `MulticastRole::Full`",
        ),
        _ => error.context(|| format!("the kernel does not join {group}")),
    }
}
