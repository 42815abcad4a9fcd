//! Datagrams: the active side of the port space UDP. Pairs with `cma_resolve_ib_udp` and `cma_sidr_rep_handler` in
//! `core/cma.c`, which exchange one request and one answer (SIDR) without a connection.

use super::event::{ConnectError, Event};
use super::id::IdInner;
use super::qp::{ConnectedQp, path};
use super::step::{Progress, Step, wait};
use crate::address_vector::AddressVector;
use crate::error::Error;
use crate::number::{Qkey, Qpn};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;
use uverbs_uapi::rdma_user_cm::{ib_cm_sidr_status as Sidr, rdma_cm_event_type as Type};

/// An id that asked a listener for its queue pair and waits for the answer. Dropping it cancels the request.
///
/// ```no_run
/// # fn f(route: uverbs::cm::RouteResolved, qp: &uverbs::QueuePair) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::cm::{ConnectParam, ConnectingDatagrams, DatagramPeer};
///
/// let asking: ConnectingDatagrams = route.connect_datagrams(qp, &ConnectParam::new())?;
/// let peer: DatagramPeer = asking.wait(None)?.done()?;
/// println!("{} with {:?} says {:?}", peer.qpn(), peer.qkey(), peer.private_data());
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct ConnectingDatagrams {
    id: Arc<IdInner>,
    qp: ConnectedQp,
}

impl ConnectingDatagrams {
    pub(super) fn new(id: Arc<IdInner>, qp: ConnectedQp) -> Self {
        ConnectingDatagrams { id, qp }
    }

    /// Waits for the listener's answer, for at most `timeout`, or without a limit for `None`; a timeout of zero polls
    /// once.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `ECONNREFUSED` if the listener rejected the request or no listener has the port;
    /// `ETIMEDOUT` if the peer's host did not answer, which the kernel reports after 16 requests and about a
    /// minute; `EINVAL` if the program dropped the queue pair meanwhile.
    pub fn wait(
        self,
        timeout: Option<Duration>,
    ) -> std::result::Result<Progress<Self, DatagramPeer>, ConnectError> {
        wait(self, timeout)
    }
}

impl Step for ConnectingDatagrams {
    type Next = DatagramPeer;
    type Error = ConnectError;
    const VERB: &'static str = "connect_datagrams";

    fn id(&self) -> &IdInner {
        &self.id
    }

    fn advance(self, event: Event) -> std::result::Result<DatagramPeer, ConnectError> {
        if event.kind != Type::RDMA_CM_EVENT_ESTABLISHED {
            return Err(failure(&self.id, &event));
        }
        self.qp.ready_datagrams(Self::VERB, &self.id)?;
        let length = usize::from(event.ud.private_data_len);
        let field = &event.ud.private_data;
        Ok(DatagramPeer {
            address: path(&event.ud.ah_attr),
            qpn: Qpn(event.ud.qp_num),
            qkey: Qkey(event.ud.qkey),
            private_data: field.get(..length).unwrap_or(field).into(),
        })
    }
}

/// The error of a request that was not accepted.
fn failure(id: &IdInner, event: &Event) -> ConnectError {
    const VERB: &str = ConnectingDatagrams::VERB;
    let status = match (event.kind, u32::try_from(event.status)) {
        (Type::RDMA_CM_EVENT_UNREACHABLE, Ok(status)) if status > 0 => Sidr(status),
        _ => return id.failure(VERB, event),
    };
    let what = match status {
        Sidr::IB_SIDR_UNSUPPORTED => "nobody listens on the port in the port space UDP",
        Sidr::IB_SIDR_REJECT => "the peer's program refused",
        Sidr::IB_SIDR_NO_QP => "the peer has no queue pair left",
        Sidr::IB_SIDR_REDIRECT => "the service is at another port",
        Sidr::IB_SIDR_UNSUPPORTED_VERSION => "another version of the connection protocol",
        _ => "for a reason that this library does not know",
    };
    let detail = format!("the request was rejected: {what} (status {})", status.0);
    Error::new(VERB, Errno::CONNREFUSED).detail(detail).into()
}

/// The destination of datagrams to a listener.
///
/// An [`AddressHandle`](crate::AddressHandle) of [`address`](Self::address), the number and the Q_Key make a
/// [`Destination`](crate::Destination). No event reports that the peer is gone.
#[derive(Clone, Debug)]
pub struct DatagramPeer {
    address: AddressVector,
    qpn: Qpn,
    qkey: Qkey,
    private_data: Vec<u8>,
}

impl DatagramPeer {
    /// The path to the peer, for [`create_ah`](crate::ProtectionDomain::create_ah).
    pub fn address(&self) -> &AddressVector {
        &self.address
    }

    /// The number of the peer's queue pair.
    pub fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// The Q_Key of the peer's queue pair.
    pub fn qkey(&self) -> Qkey {
        self.qkey
    }

    /// The private data of the peer's answer: the whole field of
    /// [`DATAGRAM_REPLY_PRIVATE_DATA`](super::DATAGRAM_REPLY_PRIVATE_DATA) bytes, with zeros after the peer's bytes.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }
}
