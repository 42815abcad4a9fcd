//! The kernel's id, in any state, and its commands. Pairs with `core/ucma.c`.

pub(super) mod events;

use super::address::decode;
use super::address_error::no_device;
use super::channel::{Channel, DeviceName};
use super::event::{ConnectError, Event};
use super::port_space::PortSpace;
use super::ucma::{UcmaCommand, migration};
use crate::device::Guid;
use crate::error::{Error, Result};
use crate::qp::{QpState, QpType};
use crate::sync::lock::Lock;
use events::EventQueue;
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use uverbs_uapi::qp::ib_uverbs_qp_attr;
use uverbs_uapi::rdma_user_cm as uapi;

/// An id of the kernel in any state. Dropping it destroys the id: the kernel then rejects a request, closes a
/// connection or ends a listener.
#[derive(Debug)]
pub(crate) struct IdInner {
    pub(super) channel: Arc<Channel>,
    number: AtomicU32,
    /// For a membership in a multicast group: the id that joined.
    parent: Option<Arc<IdInner>>,
    pub(super) space: PortSpace,
    /// The type of the queue pairs that the id connects.
    pub(super) qp_type: QpType,
    /// The number by which events name the id.
    pub(super) key: u64,
    queue: Lock<EventQueue>,
    /// Whether another handle destroys the kernel's id.
    moved: AtomicBool,
}

impl IdInner {
    pub(super) fn create(
        channel: &Arc<Channel>,
        space: PortSpace,
        qp_type: QpType,
    ) -> Result<Arc<IdInner>> {
        const VERB: &str = "create_id";
        let known = [QpType::RC, QpType::UC, QpType::UD, QpType::XRC_INI, QpType::XRC_TGT];
        if !known.contains(&qp_type) {
            let detail =
                format!("the connection manager connects no queue pairs of type {qp_type}");
            return Err(Error::invalid(VERB, detail));
        }
        if let Some(only) = space.qp_type().filter(|only| *only != qp_type) {
            let detail = format!(
                "ids in the port space {space} are for queue pairs of type {only}; those of type {qp_type} are \
                 connected in the port space {}",
                PortSpace::of(qp_type)
            );
            return Err(Error::invalid(VERB, detail));
        }
        let key = channel.key();
        // The kernel reads the type in the port space IB only; in other spaces the type follows from the space.
        let request = uapi::rdma_ucm_create_id {
            uid: key,
            ps: space.0,
            qp_type: qp_type.0 as u8,
            ..Default::default()
        };
        let mut answer = uapi::rdma_ucm_create_id_resp::default();
        channel.execute(VERB, UcmaCommand::create_id(&request, &mut answer))?;
        let id = IdInner::with_key(channel, answer.id, key, space, qp_type);
        channel.register(VERB, &id)?;
        Ok(id)
    }

    /// The id that the kernel made for a connect request. The kernel reports no events of it before the
    /// request is accepted.
    pub(super) fn adopt(
        channel: &Arc<Channel>,
        number: u32,
        space: PortSpace,
        qp_type: QpType,
    ) -> Arc<IdInner> {
        IdInner::with_key(channel, number, channel.key(), space, qp_type)
    }

    fn with_key(
        channel: &Arc<Channel>,
        number: u32,
        key: u64,
        space: PortSpace,
        qp_type: QpType,
    ) -> Arc<IdInner> {
        Arc::new(IdInner {
            channel: channel.clone(),
            number: AtomicU32::new(number),
            parent: None,
            space,
            qp_type,
            key,
            queue: Lock::default(),
            moved: AtomicBool::new(false),
        })
    }

    /// A membership in a multicast group, which has events and a number of its own. Its events may arrive before the
    /// join command returns, so that it is registered before [`joined`](Self::joined) sets its number.
    pub(super) fn member(self: &Arc<Self>, verb: &'static str) -> Result<Arc<IdInner>> {
        let member = Arc::new(IdInner {
            channel: self.channel.clone(),
            number: AtomicU32::new(0),
            parent: Some(self.clone()),
            space: self.space,
            qp_type: self.qp_type,
            key: self.channel.key(),
            queue: Lock::default(),
            moved: AtomicBool::new(true),
        });
        self.channel.register(verb, &member)?;
        Ok(member)
    }

    /// Whether this is a membership of the id with this key.
    pub(super) fn is_member_of(&self, key: u64) -> bool {
        self.parent.as_ref().is_some_and(|parent| parent.key == key)
    }

    /// Sets the kernel's number of the membership, which dropping it then ends.
    pub(super) fn joined(&self, number: u32) {
        self.number.store(number, Ordering::Relaxed);
        self.moved.store(false, Ordering::Relaxed);
    }

    /// Whether the id exchanges datagrams, and connects nothing.
    pub(super) fn is_datagram(&self) -> bool {
        self.qp_type == QpType::UD
    }

    /// Refuses an id for connections where one for datagrams is needed, and the other way round.
    pub(super) fn check_datagram(&self, verb: &'static str, datagrams: bool) -> Result<()> {
        if self.is_datagram() == datagrams {
            return Ok(());
        }
        let (space, qp_type) = (self.space, self.qp_type);
        let detail = match datagrams {
            true => format!(
                "datagrams need an id for queue pairs of type UD, as those of the port space UDP are; this one, in the \
                 port space {space}, is for type {qp_type}"
            ),
            false => format!(
                "this id, in the port space {space}, is for queue pairs of type UD, which exchange datagrams: see \
                 `connect_datagrams`"
            ),
        };
        Err(Error::invalid(verb, detail))
    }

    /// Has the kernel move the id to another file. Events in the queue would be lost, so this is for ids
    /// in states without events.
    pub(super) fn migrate(&self, to: &Arc<Channel>) -> Result<Arc<IdInner>> {
        const VERB: &str = "migrate_id";
        let id = IdInner::with_key(to, self.number(), self.key, self.space, self.qp_type);
        // An error leaves the kernel's id where it is.
        id.moved.store(true, Ordering::Relaxed);
        let request = migration(self.number(), self.channel.fd());
        let mut answer = uapi::rdma_ucm_migrate_resp::default();
        to.execute(VERB, UcmaCommand::migrate_id(&request, &mut answer))?;
        self.moved.store(true, Ordering::Relaxed);
        id.moved.store(false, Ordering::Relaxed);
        Ok(id)
    }

    /// The kernel's number of the id.
    pub(super) fn number(&self) -> u32 {
        self.number.load(Ordering::Relaxed)
    }

    pub(super) fn execute(&self, verb: &'static str, command: UcmaCommand<'_>) -> Result<()> {
        self.channel.execute(verb, command)
    }

    /// Queries the addresses and the device of the id.
    pub(super) fn query(&self, verb: &'static str) -> Result<Path> {
        /// A kernel that does not know the field leaves this in it.
        const NO_INDEX: u32 = u32::MAX;
        let option = uapi::RDMA_USER_CM_QUERY_ADDR;
        let request = uapi::rdma_ucm_query { id: self.number(), option, ..Default::default() };
        let mut answer =
            uapi::rdma_ucm_query_addr_resp { ibdev_index: NO_INDEX, ..Default::default() };
        self.execute(verb, UcmaCommand::query(&request, &mut answer))?;
        let device = (answer.port_num != 0).then(|| DeviceName {
            index: Some(answer.ibdev_index).filter(|index| *index != NO_INDEX),
            guid: Guid::from_bytes(answer.node_guid.to_ne_bytes()),
        });
        Ok(Path {
            device,
            port: answer.port_num.into(),
            local: decode(&answer.src_addr),
            peer: decode(&answer.dst_addr),
        })
    }

    /// The attributes that bring a queue pair to a state.
    pub(super) fn qp_attr(&self, verb: &'static str, state: QpState) -> Result<ib_uverbs_qp_attr> {
        let request = uapi::rdma_ucm_init_qp_attr {
            id: self.number(),
            qp_state: state.0.into(),
            ..Default::default()
        };
        let mut answer = ib_uverbs_qp_attr::default();
        let command = UcmaCommand::init_qp_attr(&request, &mut answer);
        self.execute(verb, command).map_err(|error| match error.errno() {
            // The kernel's handshake has ended (`ib_cm_init_qp_attr`). Before an accept the kernel reports no such
            // event.
            Errno::INVAL => given_up(error),
            _ => error.context(|| {
                format!("the kernel has no attributes for state {state} of the queue pair")
            }),
        })?;
        Ok(answer)
    }

    /// Sends an accept. The kernel answers `EINVAL` both if the peer gave up and for parameters that it refuses. A
    /// query of queue pair attributes, which succeeds only while the peer is there, tells the two cases apart.
    pub(super) fn accept(&self, verb: &'static str, request: &uapi::rdma_ucm_accept) -> Result<()> {
        let command = UcmaCommand::new(uapi::RDMA_USER_CM_CMD_ACCEPT, request);
        self.execute(verb, command).map_err(|error| match error.errno() {
            Errno::INVAL => match self.qp_attr(verb, QpState::RTS) {
                Err(gone) if gone.errno() == Errno::CONNABORTED => given_up(error),
                _ => error.detail("the kernel does not take the parameters of the accept"),
            },
            _ => error.context(|| "the answer to the peer was not sent".to_owned()),
        })
    }

    pub(super) fn set_option(
        &self,
        verb: &'static str,
        level: u32,
        name: u32,
        value: &[u8],
    ) -> Result<()> {
        let request = uapi::rdma_ucm_set_option {
            id: self.number(),
            level,
            optname: name,
            optlen: value.len() as u32,
            ..Default::default()
        };
        self.execute(verb, UcmaCommand::set_option(&request, value))
    }

    /// The error of a step that waited for another event, with the peer's address if the id has one.
    pub(super) fn failure(&self, verb: &'static str, event: &Event) -> ConnectError {
        let error = event.failure(verb);
        match self.query(verb).ok().and_then(|path| path.peer) {
            Some(peer) if error.errno() == Errno::NODEV && event.is_about_the_way() => {
                error.replace_detail(no_device(&peer))
            }
            Some(peer) => error.to(&peer),
            None => error,
        }
    }

    pub(super) fn is_forked(&self) -> bool {
        self.channel.is_forked()
    }
}

impl Drop for IdInner {
    fn drop(&mut self) {
        // In a forked child the id is the parent's.
        if self.is_forked() {
            return;
        }
        self.channel.retire(self.key);
        if *self.moved.get_mut() {
            return;
        }
        let request = uapi::rdma_ucm_destroy_id { id: self.number(), ..Default::default() };
        let mut answer = uapi::rdma_ucm_destroy_id_resp::default();
        let command = match self.parent {
            Some(_) => UcmaCommand::leave_mcast(&request, &mut answer),
            None => UcmaCommand::destroy_id(&request, &mut answer),
        };
        match self.channel.run(command) {
            // `ENXIO`: the device of the membership's id is gone, and the membership ends with the id.
            Ok(()) | Err(Errno::NOENT | Errno::NXIO) => {}
            Err(_) => self.channel.count_leak(),
        }
    }
}

/// The error of a step whose peer has gone.
pub(super) fn given_up(error: Error) -> Error {
    error.meaning(Errno::CONNABORTED).detail("the peer gave up or closed the connection meanwhile")
}

/// The device and the addresses of an id.
#[derive(Clone, Copy, Debug)]
pub(super) struct Path {
    /// `None` while the id is on no device.
    pub(super) device: Option<DeviceName>,
    pub(super) port: u32,
    pub(super) local: Option<SocketAddr>,
    pub(super) peer: Option<SocketAddr>,
}

impl Path {
    pub(super) fn device(&self, verb: &'static str) -> Result<DeviceName> {
        self.device.ok_or_else(|| Error::new(verb, Errno::NODEV).detail("the id is on no device"))
    }
}

pub(super) fn local_addr(id: &IdInner) -> Result<SocketAddr> {
    const VERB: &str = "get_local_addr";
    id.query(VERB)?.local.ok_or_else(|| no_address(VERB))
}

pub(super) fn peer_addr(id: &IdInner) -> Result<SocketAddr> {
    const VERB: &str = "get_peer_addr";
    id.query(VERB)?.peer.ok_or_else(|| no_address(VERB))
}

pub(super) fn no_address(verb: &'static str) -> Error {
    Error::new(verb, Errno::AFNOSUPPORT)
        .detail("the id has no IP address; `ib_addrs` or `local_ib_addr` tells its GIDs")
}
