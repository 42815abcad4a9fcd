//! An id of the connection manager: `struct rdma_id_private`.

use super::CmFileId;
use super::address::Address;
use super::message::{Ece, Side, Transport};
use super::path::Path;
use uverbs_uapi::ah::ib_uverbs_ah_attr;

// `enum rdma_cm_event_type`.
pub(super) const ADDR_RESOLVED: u32 = 0;
pub(super) const ADDR_ERROR: u32 = 1;
pub(super) const ROUTE_RESOLVED: u32 = 2;
pub(super) const ROUTE_ERROR: u32 = 3;
pub(super) const CONNECT_REQUEST: u32 = 4;
pub(super) const CONNECT_RESPONSE: u32 = 5;
pub(super) const UNREACHABLE: u32 = 7;
pub(super) const REJECTED: u32 = 8;
pub(super) const ESTABLISHED: u32 = 9;
pub(super) const DISCONNECTED: u32 = 10;
pub(super) const DEVICE_REMOVAL: u32 = 11;
pub(super) const MULTICAST_JOIN: u32 = 12;
pub(super) const MULTICAST_ERROR: u32 = 13;
pub(super) const TIMEWAIT_EXIT: u32 = 15;

// `enum ib_qp_type`.
pub(super) const RC: u8 = 2;
pub(super) const UC: u8 = 3;
pub(super) const UD: u8 = 4;
pub(super) const XRC_INI: u8 = 9;
pub(super) const XRC_TGT: u8 = 10;

/// The state of an id: `enum rdma_cm_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdState {
    Idle,
    Bound,
    AddrResolved,
    RouteResolved,
    Connecting,
    Connected,
    Disconnected,
    Listening,
}

/// The role of an id.
#[derive(Debug)]
pub(super) enum Role {
    None,
    /// It listens, and takes `room` more requests before the program reads one.
    Listener {
        room: u32,
    },
    /// It has a connection, or a query of a datagram service, with this number.
    Connected(u32),
    /// It is in a multicast group, for another id.
    Member {
        of: u32,
    },
}

/// The parameters of an event.
#[derive(Clone, Debug)]
pub(super) enum Param {
    None,
    /// Of a connection, with the room for private data in the message that brought it.
    Conn(Side, usize),
    /// Of datagrams: their destination.
    Ud {
        vector: Option<ib_uverbs_ah_attr>,
        qpn: u32,
        qkey: u32,
        data: Vec<u8>,
        room: usize,
    },
    /// Two words that the program wrote.
    Words([u64; 2]),
}

/// An event of an id.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) kind: u32,
    pub(super) status: i32,
    pub(super) param: Param,
    pub(super) ece: Ece,
    /// The id of a request.
    pub(super) new_id: Option<u32>,
}

impl Event {
    pub(super) fn new(kind: u32, status: i32, param: Param) -> Event {
        Event { kind, status, param, ece: Ece::default(), new_id: None }
    }
}

#[derive(Debug)]
pub(super) struct Id {
    pub(super) file: CmFileId,
    /// The number by which events name it to the program; 0 before a request is accepted.
    pub(super) uid: u64,
    pub(super) space: u16,
    /// The type of its queue pairs.
    pub(super) kind: u8,
    pub(super) state: IdState,
    pub(super) local: Option<Address>,
    pub(super) peer: Option<Address>,
    pub(super) device: Option<usize>,
    /// The path of the route.
    pub(super) path: Option<Path>,
    pub(super) role: Role,
    /// The listener whose request it is.
    pub(super) parent: Option<u32>,
    /// Whether the program has not read the event of the request.
    pub(super) unseen: bool,
    /// Whether its device is gone.
    pub(super) is_removed: bool,
    pub(super) reuse: bool,
    /// Whether a listener on all IPv6 addresses hears requests to those only (`RDMA_OPTION_ID_AFONLY`).
    pub(super) family_alone: bool,
    /// The acknowledgement timeout that the program set.
    pub(super) ack_timeout: Option<u8>,
    pub(super) tos: u8,
    /// The number of its events that the program has read.
    pub(super) read: u32,
}

impl Id {
    pub(super) fn new(file: CmFileId, uid: u64, space: u16, kind: u8) -> Id {
        Id {
            file,
            uid,
            space,
            kind,
            state: IdState::Idle,
            local: None,
            peer: None,
            device: None,
            path: None,
            role: Role::None,
            parent: None,
            unseen: false,
            is_removed: false,
            reuse: false,
            family_alone: false,
            ack_timeout: None,
            tos: 0,
            read: 0,
        }
    }

    pub(super) fn is_datagram(&self) -> bool {
        self.kind == UD
    }

    pub(super) fn transport(&self) -> Transport {
        match self.kind {
            UC => Transport::Uc,
            XRC_INI | XRC_TGT => Transport::Xrc,
            _ => Transport::Rc,
        }
    }

    /// The number of its connection or query.
    pub(super) fn number(&self) -> Option<u32> {
        match self.role {
            Role::Connected(number) => Some(number),
            _ => None,
        }
    }
}
