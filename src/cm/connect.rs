//! Connections from the connect request to the disconnect. Pairs with `ucma_connect`, `ucma_accept` and
//! `ucma_disconnect` in `core/ucma.c`.

use super::channel::Channel;
use super::event::{ConnectError, Event};
use super::id::{IdInner, given_up, local_addr, peer_addr};
use super::qp::{ConnectedQp, Negotiated};
use super::step::{Progress, Step, wait, wait_for_end};
use super::ucma::UcmaCommand;
use crate::error::{Error, Result};
use crate::number::Qpn;
use crate::qp::Ece;
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use uverbs_uapi::async_event::ib_event_type;
use uverbs_uapi::rdma_user_cm as uapi;
use uverbs_uapi::rdma_user_cm::rdma_cm_event_type as Type;

/// A queue pair that an id brought, or is bringing, to `RTS`.
///
/// Dropping it first brings the queue pair to `ERR` and then destroys the id; the kernel then tells
/// the peer.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) id: Arc<IdInner>,
    pub(super) qp: ConnectedQp,
    peer_qpn: Qpn,
    private_data: Vec<u8>,
    ece: Option<Ece>,
    /// The kind of the first event that ended the connection, or [`OPEN`](Self::OPEN).
    ended: AtomicU32,
}

impl Link {
    /// The number of no event.
    const OPEN: u32 = u32::MAX;

    pub(super) fn new(
        id: Arc<IdInner>,
        qp: ConnectedQp,
        peer_qpn: Qpn,
        private_data: Vec<u8>,
        ece: Option<Ece>,
    ) -> Link {
        Link { id, qp, peer_qpn, private_data, ece, ended: AtomicU32::new(Link::OPEN) }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // An error leaves the queue pair as it is: the device is gone, or this is a forked child, where
        // the queue pair is the parent's.
        let _ = self.qp.stop();
    }
}

/// An id that sent a connect request and waits for the peer's answer.
///
/// Dropping it cancels the request; the queue pair stays in `INIT`.
#[derive(Debug)]
pub struct Connecting {
    id: Arc<IdInner>,
    qp: ConnectedQp,
    /// The options that the request offered.
    offered: Option<Ece>,
    min_rnr_timer: u8,
}

impl Connecting {
    pub(super) fn new(
        id: Arc<IdInner>,
        qp: ConnectedQp,
        offered: Option<Ece>,
        min_rnr_timer: u8,
    ) -> Self {
        Connecting { id, qp, offered, min_rnr_timer }
    }

    /// Waits for the peer's answer, for at most `timeout`, or without a limit for `None`; a timeout of zero polls once.
    /// When the peer accepts, this brings the queue pair to `RTS` and confirms the connection to the peer.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `ECONNREFUSED` with the peer's
    /// [`rejection`](ConnectError::rejection); `ETIMEDOUT` if the peer's host did not answer, which the
    /// kernel reports after 16 requests and about a minute; `ECONNABORTED` if the peer gave up before the handshake was
    /// over; `EINVAL` if the program dropped the queue pair meanwhile; `EPROTO` for an answer with another vendor's
    /// [options](crate::cm::ConnectParam::ece); the errors of [`modify`](crate::QpControl::modify).
    pub fn wait(
        self,
        timeout: Option<Duration>,
    ) -> std::result::Result<Progress<Self, Connection>, ConnectError> {
        wait(self, timeout)
    }
}

impl Step for Connecting {
    type Next = Connection;
    type Error = ConnectError;
    const VERB: &'static str = "connect";

    fn id(&self) -> &IdInner {
        &self.id
    }

    fn advance(self, event: Event) -> std::result::Result<Connection, ConnectError> {
        const VERB: &str = Connecting::VERB;
        if event.kind != Type::RDMA_CM_EVENT_CONNECT_RESPONSE {
            return Err(self.id.failure(VERB, &event));
        }
        let Connecting { id, qp, offered, min_rnr_timer } = self;
        check_answer(VERB, offered, event.ece)?;
        let peer_qpn = Qpn(event.conn.qp_num);
        // A queue pair that is refused here belongs to another handshake: it is not stopped.
        let rights = qp.rights_of_peer(VERB, &id)?;
        let options = qp.ece_in_common(VERB, event.ece)?;
        let link = Link::new(id, qp, peer_qpn, event.private_data().into(), event.ece);
        let agreed =
            Negotiated { peer_rights: rights, depths: None, min_rnr_timer, ece_options: options };
        link.qp.ready(VERB, &link.id, &agreed)?;
        // An accept without parameters is the last message of the handshake.
        let request = uapi::rdma_ucm_accept { id: link.id.number(), ..Default::default() };
        link.id.accept(VERB, &request)?;
        Ok(Connection { link })
    }
}

/// Refuses an answer with ECE options of another vendor than the request's.
fn check_answer(verb: &'static str, offered: Option<Ece>, answer: Option<Ece>) -> Result<()> {
    match (offered, answer) {
        (Some(offered), Some(answer)) if offered.vendor_id != answer.vendor_id => {
            Err(Error::new(verb, Errno::PROTO).detail(format!(
                "the peer answered with options of vendor {:#x} (ECE) to a request with those of vendor {:#x}",
                answer.vendor_id, offered.vendor_id
            )))
        }
        _ => Ok(()),
    }
}

/// An id that accepted a connect request and waits for the peer's confirmation.
///
/// Dropping it brings the queue pair to `ERR` and ends the handshake.
///
/// ```no_run
/// # fn f(request: uverbs::cm::ConnectRequest, qp: &uverbs::QueuePair, context: &uverbs::Context)
/// # -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::cm::{Accepting, ConnectParam};
/// use uverbs::{Errno, EventSource, EventType};
///
/// let accepting: Accepting = request.accept(qp, &ConnectParam::new())?;
/// while let Some(event) = context.try_next_event()? {
///     // The peer's first message is here: the confirmation may be lost, and is not needed.
///     if event.kind == EventType::COMM_EST && event.source == EventSource::Qp(qp.key()) {
///         match accepting.notify_communication_established() {
///             // The confirmation came, too.
///             Err(error) if error.errno() == Errno::ISCONN => {}
///             answer => answer?,
///         }
///     }
/// }
/// let connection = accepting.wait(None)?.done()?;
/// # drop(connection); Ok(()) }
/// ```
#[derive(Debug)]
pub struct Accepting {
    link: Link,
}

impl Accepting {
    pub(super) fn new(link: Link) -> Self {
        Accepting { link }
    }

    /// Waits for the peer's confirmation, for at most `timeout`, or without a limit for `None`; a timeout of zero polls
    /// once.
    ///
    /// # Errors
    ///
    /// Any error destroys the id and brings the queue pair to `ERR`. `ETIMEDOUT` if the confirmation
    /// did not come, `ECONNREFUSED` if the peer rejected the answer, `ECONNRESET` if it closed the
    /// connection.
    pub fn wait(
        self,
        timeout: Option<Duration>,
    ) -> std::result::Result<Progress<Self, Connection>, ConnectError> {
        wait(self, timeout)
    }

    /// Reports that the queue pair received a message before the confirmation, which may have been lost;
    /// the kernel then takes the connection for established. Call it upon
    /// [`COMM_EST`](crate::EventType::COMM_EST) of the queue pair.
    ///
    /// # Errors
    ///
    /// `EISCONN` if the connection is established already; `ECONNABORTED` if the peer gave up.
    #[doc(alias = "rdma_notify")]
    pub fn notify_communication_established(&self) -> Result<()> {
        let event = ib_event_type::IB_EVENT_COMM_EST.0;
        let request = uapi::rdma_ucm_notify { id: self.link.id.number(), event };
        let command = UcmaCommand::new(uapi::RDMA_USER_CM_CMD_NOTIFY, &request);
        self.link.id.execute("notify", command).map_err(|error| match error.errno() {
            Errno::ISCONN => error.detail("the peer's confirmation came"),
            Errno::INVAL => given_up(error),
            _ => error,
        })
    }
}

impl Step for Accepting {
    type Next = Connection;
    type Error = ConnectError;
    const VERB: &'static str = "accept";

    fn id(&self) -> &IdInner {
        &self.link.id
    }

    fn advance(self, event: Event) -> std::result::Result<Connection, ConnectError> {
        if event.kind != Type::RDMA_CM_EVENT_ESTABLISHED {
            return Err(self.link.id.failure(Self::VERB, &event));
        }
        Ok(Connection { link: self.link })
    }
}

/// An event of a [`Connection`].
///
/// ```no_run
/// # fn f(connection: &uverbs::cm::Connection) -> uverbs::Result<()> {
/// use uverbs::cm::ConnectionEvent;
///
/// while let Some(event) = connection.next_event(None)? {
///     match event {
///         // Nothing can be sent any more: drop the connection, and drop or reset the queue pair.
///         ConnectionEvent::Disconnected | ConnectionEvent::TimewaitExit => break,
///         // The peer has moved, or gave up the handshake: the same.
///         ConnectionEvent::Unreachable | ConnectionEvent::Rejected => break,
///         // Drop all objects on the device: the kernel waits for that.
///         ConnectionEvent::DeviceRemoval => break,
///         // Connect again to use the new interface.
///         ConnectionEvent::AddressChange => println!("the address moved to another interface"),
///         ConnectionEvent::Written(value) => println!("{value} of another thread of this program"),
///         ConnectionEvent::Other(number) => println!("event {number}, which asks for nothing"),
///         _ => {}
///     }
/// }
/// # Ok(()) }
/// ```
#[doc(alias = "rdma_cm_event_type")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectionEvent {
    /// The peer closed the connection, or confirmed that this side did.
    Disconnected,
    /// The queue pair's number can be used again: no packet of the connection is in the network any
    /// more.
    TimewaitExit,
    /// The peer's IP address has moved to another MAC address than the connection's packets go to, for example after a
    /// failover: the packets do not arrive any more, and the queue pair has no other path. The kernel reports it to the
    /// side that connected, not to the side that accepted, on RoCE since Linux 6.0. Drop the connection, and connect
    /// again.
    Unreachable,
    /// The peer gave up the handshake after this side took it for complete: the confirmation was lost.
    Rejected,
    /// The kernel is removing the device, and waits until the program drops the id. Objects on the device are of no use
    /// any more.
    DeviceRemoval,
    /// The address of the id moved to another network interface, as with bonding. The connection stays
    /// on the old one.
    AddressChange,
    /// An event that [`Connection::write_event`] wrote, with its value.
    Written(u64),
    /// Another event, by its number in `enum rdma_cm_event_type`.
    Other(u32),
}

impl ConnectionEvent {
    /// An event of the kernel, with the value that a program wrote.
    fn of(kind: Type, value: u64) -> ConnectionEvent {
        match kind {
            Type::RDMA_CM_EVENT_DISCONNECTED => ConnectionEvent::Disconnected,
            Type::RDMA_CM_EVENT_TIMEWAIT_EXIT => ConnectionEvent::TimewaitExit,
            Type::RDMA_CM_EVENT_UNREACHABLE => ConnectionEvent::Unreachable,
            Type::RDMA_CM_EVENT_REJECTED => ConnectionEvent::Rejected,
            Type::RDMA_CM_EVENT_DEVICE_REMOVAL => ConnectionEvent::DeviceRemoval,
            Type::RDMA_CM_EVENT_USER => ConnectionEvent::Written(value),
            Type::RDMA_CM_EVENT_ADDR_CHANGE => ConnectionEvent::AddressChange,
            Type(other) => ConnectionEvent::Other(other),
        }
    }

    /// Whether the event ends the connection.
    fn is_end(self) -> bool {
        matches!(
            self,
            ConnectionEvent::Disconnected
                | ConnectionEvent::TimewaitExit
                | ConnectionEvent::Unreachable
                | ConnectionEvent::Rejected
                | ConnectionEvent::DeviceRemoval
        )
    }
}

/// An established connection of a queue pair.
///
/// Dropping it closes the connection: the queue pair goes to `ERR`, and the kernel tells the peer.
///
/// The connection keeps its event channel open, but not its queue pair: a queue pair that the program
/// drops first is destroyed, and its peer gets no answer until the connection is dropped, too.
#[derive(Debug)]
pub struct Connection {
    link: Link,
}

impl Connection {
    pub(super) fn id(&self) -> &IdInner {
        &self.link.id
    }

    /// The private data of the peer's last message, an accept or a connect request: the whole field of that message,
    /// with zeros after the peer's bytes.
    pub fn private_data(&self) -> &[u8] {
        &self.link.private_data
    }

    /// The number of the peer's queue pair.
    pub fn peer_qpn(&self) -> Qpn {
        self.link.peer_qpn
    }

    /// The ECE options in the peer's last message: on the active side those that the peer chose.
    #[doc(alias = "rdma_get_remote_ece")]
    pub fn ece(&self) -> Option<Ece> {
        self.link.ece
    }

    /// Writes an event into the channel. [`next_event`](Self::next_event) returns it as
    /// [`Written`](ConnectionEvent::Written) after the events that came before: it wakes a thread, or a task, that
    /// waits there.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` before Linux 6.18.
    ///
    /// ```no_run
    /// # fn f(connection: uverbs::cm::Connection) -> uverbs::Result<()> {
    /// std::thread::scope(|scope| {
    ///     scope.spawn(|| println!("{:?}", connection.next_event(None)));
    ///     connection.write_event(7)
    /// })
    /// # }
    /// ```
    #[doc(alias = "rdma_write_cm_event")]
    pub fn write_event(&self, value: u64) -> Result<()> {
        const WRITE: u32 = uapi::RDMA_USER_CM_CMD_WRITE_CM_EVENT;
        let mut request = uapi::rdma_ucm_write_cm_event {
            id: self.link.id.number(),
            event: Type::RDMA_CM_EVENT_USER.0,
            ..Default::default()
        };
        if let Some(field) = request.param.first_chunk_mut() {
            *field = value.to_ne_bytes();
        }
        let probe = uapi::rdma_ucm_write_cm_event { id: Channel::NO_ID, ..request };
        self.link.id.channel.execute_new("write_event", WRITE, &request, &probe, "6.18")
    }

    /// The address of this end.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    #[doc(alias = "rdma_get_local_addr")]
    pub fn local_addr(&self) -> Result<SocketAddr> {
        local_addr(&self.link.id)
    }

    /// The address of the other end.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    #[doc(alias = "rdma_get_peer_addr")]
    pub fn peer_addr(&self) -> Result<SocketAddr> {
        peer_addr(&self.link.id)
    }

    /// Closes the connection, or confirms that the peer did: the queue pair goes to `ERR`, and the
    /// kernel tells the peer. [`Disconnected`](ConnectionEvent::Disconnected) follows when the peer has
    /// confirmed it, or does not answer.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    #[doc(alias = "rdma_disconnect")]
    pub fn disconnect(&self) -> Result<()> {
        const VERB: &str = "disconnect";
        self.link.qp.stop().map_err(|error| error.in_verb(VERB))?;
        let request = uapi::rdma_ucm_disconnect { id: self.link.id.number() };
        self.link.id.execute(VERB, UcmaCommand::new(uapi::RDMA_USER_CM_CMD_DISCONNECT, &request))
    }

    /// Waits for the next event, for at most `timeout`, or without a limit for `None`; a timeout of zero polls once.
    /// `None` after the timeout. Several threads may wait; each event goes to one of them.
    ///
    /// # Errors
    ///
    /// `EACCES` after a change of credentials.
    #[doc(alias = "rdma_get_cm_event")]
    pub fn next_event(&self, timeout: Option<Duration>) -> Result<Option<ConnectionEvent>> {
        wait(self, timeout).map(Progress::into_option)
    }

    /// Whether an event ended the connection: see [`closed_by`](Self::closed_by).
    pub fn is_closed(&self) -> bool {
        self.closed_by().is_some()
    }

    /// The first event that ended the connection: [`Disconnected`](ConnectionEvent::Disconnected),
    /// [`Unreachable`](ConnectionEvent::Unreachable), [`Rejected`](ConnectionEvent::Rejected),
    /// [`TimewaitExit`](ConnectionEvent::TimewaitExit) or [`DeviceRemoval`](ConnectionEvent::DeviceRemoval). `None`
    /// until the program has taken one of them.
    pub fn closed_by(&self) -> Option<ConnectionEvent> {
        let ended = self.link.ended.load(Ordering::Relaxed);
        (ended != Link::OPEN).then(|| ConnectionEvent::of(Type(ended), 0))
    }

    /// Waits until either side has closed the connection, the peer is unreachable, or the kernel is removing the
    /// device, for at most `timeout`, or without a limit for `None`. Other events are discarded. Several threads may
    /// wait. [`closed_by`](Self::closed_by) then tells the reason.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT` after the timeout; `EACCES` after a change of credentials.
    pub fn wait_disconnected(&self, timeout: Option<Duration>) -> Result<()> {
        match wait_for_end(self, || self.is_closed(), timeout)? {
            true => Ok(()),
            false => Err(Error::new("wait_disconnected", Errno::TIMEDOUT)
                .detail("neither side closed the connection in time")),
        }
    }
}

impl Step for &Connection {
    type Next = ConnectionEvent;
    type Error = Error;
    const VERB: &'static str = "get_cm_event";

    fn id(&self) -> &IdInner {
        &self.link.id
    }

    fn ignores(&self, _event: &Event) -> bool {
        false
    }

    fn advance(self, event: Event) -> Result<ConnectionEvent> {
        let told = ConnectionEvent::of(event.kind, event.value);
        if told.is_end() {
            // A later event, for example `TimewaitExit` after `Disconnected`, does not replace the reason.
            let _ = self.link.ended.compare_exchange(
                Link::OPEN,
                event.kind.0,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            // Other tasks may wait for the end of the connection, too.
            self.link.id.wake();
        }
        Ok(told)
    }
}
