//! Connections: asked for, answered, established, closed. Pairs with `ucma_connect`, `ucma_accept` and
//! `ucma_disconnect` in `core/ucma.c`.

use super::event::ConnectError;
use super::id::{IdInner, Progress, local_addr, peer_addr};
use super::kernel::Command;
use super::qp::HeldQp;
use crate::error::{Error, Result};
use crate::number::Qpn;
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uverbs_uapi::async_event::ib_event_type;
use uverbs_uapi::rdma_user_cm as uapi;
use uverbs_uapi::rdma_user_cm::rdma_cm_event_type as Type;

/// An id that asked for a connection and waits for the answer.
#[derive(Debug)]
pub struct Connecting {
    id: Arc<IdInner>,
    qp: HeldQp,
    min_rnr_timer: Option<u8>,
}

impl Connecting {
    pub(super) fn new(id: Arc<IdInner>, qp: HeldQp, min_rnr_timer: Option<u8>) -> Self {
        Connecting { id, qp, min_rnr_timer }
    }

    /// Waits for the peer's answer, at most for `timeout`, for ever without one; with a timeout of
    /// zero this only looks. When the peer accepts, this brings the queue pair to `RTS` and tells
    /// the peer so.
    ///
    /// # Errors
    ///
    /// With any error the id is destroyed. `ECONNREFUSED` with the peer's
    /// [`rejection`](ConnectError::rejection); `ETIMEDOUT` if the peer's host did not answer, after
    /// the kernel asked 16 times, which takes about a minute; what
    /// [`modify`](crate::QpControl::modify) answers.
    pub fn wait(
        self,
        timeout: Option<Duration>,
    ) -> std::result::Result<Progress<Self, Connection>, ConnectError> {
        const VERB: &str = "connect";
        let Some(event) = self.id.wait(VERB, timeout)? else {
            return Ok(Progress::Pending(self));
        };
        if event.kind != Type::RDMA_CM_EVENT_CONNECT_RESPONSE {
            return Err(event.failure(VERB));
        }
        let established = self
            .qp
            .init(VERB, &self.id)
            .and_then(|()| self.qp.ready(VERB, &self.id, None, self.min_rnr_timer))
            .and_then(|()| self.confirm(VERB));
        if let Err(error) = established {
            // The peer learns of it when the id is dropped.
            let _ = self.qp.stop();
            return Err(error.into());
        }
        Ok(Progress::Done(Connection {
            id: self.id,
            qp: self.qp,
            peer_qpn: Qpn(event.conn.qp_num),
            private_data: event.private_data().into(),
        }))
    }

    /// Tells the peer that this side is ready.
    fn confirm(&self, verb: &'static str) -> Result<()> {
        // Without valid parameters: the kernel takes it for the last message of the handshake.
        let request = uapi::rdma_ucm_accept { id: self.id.number(), ..Default::default() };
        self.id.execute(verb, Command::new(uapi::RDMA_USER_CM_CMD_ACCEPT, &request))
    }
}

/// An id that accepted a connection and waits for the peer to be ready.
#[derive(Debug)]
pub struct Accepting {
    id: Arc<IdInner>,
    qp: HeldQp,
    peer_qpn: Qpn,
    private_data: Vec<u8>,
}

impl Accepting {
    pub(super) fn new(id: Arc<IdInner>, qp: HeldQp, peer_qpn: Qpn, private_data: Vec<u8>) -> Self {
        Accepting { id, qp, peer_qpn, private_data }
    }

    /// Waits until the peer is ready, at most for `timeout`, for ever without one; with a timeout of
    /// zero this only looks.
    ///
    /// # Errors
    ///
    /// With any error the id is destroyed. `ETIMEDOUT` if the peer was not heard of any more;
    /// `ECONNREFUSED` if it rejected the answer; `ECONNRESET` if it closed the connection.
    pub fn wait(
        self,
        timeout: Option<Duration>,
    ) -> std::result::Result<Progress<Self, Connection>, ConnectError> {
        const VERB: &str = "accept";
        let Some(event) = self.id.wait(VERB, timeout)? else {
            return Ok(Progress::Pending(self));
        };
        if event.kind != Type::RDMA_CM_EVENT_ESTABLISHED {
            let _ = self.qp.stop();
            return Err(event.failure(VERB));
        }
        Ok(Progress::Done(Connection {
            id: self.id,
            qp: self.qp,
            peer_qpn: self.peer_qpn,
            private_data: self.private_data,
        }))
    }

    /// Tells the kernel that the first message arrived, which it does when the peer's last message of
    /// the handshake was lost; it then takes the connection for established. To be called upon
    /// [`COMM_EST`](crate::EventType::COMM_EST) of the queue pair.
    ///
    /// # Errors
    ///
    /// `EISCONN` if the connection is established by now.
    #[doc(alias = "rdma_notify")]
    pub fn notify_communication_established(&self) -> Result<()> {
        let event = ib_event_type::IB_EVENT_COMM_EST.0;
        let request = uapi::rdma_ucm_notify { id: self.id.number(), event };
        self.id.execute("notify", Command::new(uapi::RDMA_USER_CM_CMD_NOTIFY, &request))
    }
}

/// What happens to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectionEvent {
    /// The peer closed the connection, or confirmed that this side did.
    Disconnected,
    /// The queue pair's number can be used again: no packet of the connection is under way any more.
    TimewaitExit,
    /// The kernel is removing the device. What was made on it is of no use any more; the removal waits
    /// until the id is dropped.
    DeviceRemoval,
    /// The address of the id moved to another network interface, as with bonding. The connection goes
    /// on by the old one.
    AddressChange,
    /// Another event of the kernel's, by its number.
    Other(u32),
}

/// An established connection of a queue pair.
///
/// Dropping it closes it: the queue pair goes to `ERR`, and the peer is told. The connection keeps the
/// queue pair, the queue pair keeps its context, and both keep the event channel open; neither needs
/// to be dropped first. [`QueuePair::destroy`](crate::QueuePair::destroy) answers `EBUSY` while there
/// is the connection.
#[derive(Debug)]
pub struct Connection {
    id: Arc<IdInner>,
    qp: HeldQp,
    peer_qpn: Qpn,
    private_data: Vec<u8>,
}

impl Connection {
    /// The private data of the peer's last message, an accept or a request: the whole field of that
    /// message, with zeros behind what the peer filled.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The peer's queue pair.
    pub fn peer_qpn(&self) -> Qpn {
        self.peer_qpn
    }

    /// The address of this end.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    #[doc(alias = "rdma_get_local_addr")]
    pub fn local_addr(&self) -> Result<SocketAddr> {
        local_addr(&self.id)
    }

    /// The address of the other end.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    #[doc(alias = "rdma_get_peer_addr")]
    pub fn peer_addr(&self) -> Result<SocketAddr> {
        peer_addr(&self.id)
    }

    /// Closes the connection, or confirms that the peer did: the queue pair goes to `ERR`, and the
    /// peer is told. [`Disconnected`](ConnectionEvent::Disconnected) follows when the peer confirms it
    /// or is not heard of.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    #[doc(alias = "rdma_disconnect")]
    pub fn disconnect(&self) -> Result<()> {
        const VERB: &str = "disconnect";
        self.qp.stop().map_err(|error| error.in_verb(VERB))?;
        let request = uapi::rdma_ucm_disconnect { id: self.id.number() };
        self.id.execute(VERB, Command::new(uapi::RDMA_USER_CM_CMD_DISCONNECT, &request))
    }

    /// Waits for something to happen, at most for `timeout`, for ever without one; with a timeout of
    /// zero this only looks. `None` after the timeout.
    ///
    /// # Errors
    ///
    /// `EACCES` after a change of credentials.
    pub fn next_event(&self, timeout: Option<Duration>) -> Result<Option<ConnectionEvent>> {
        let event = self.id.wait("get_cm_event", timeout)?;
        Ok(event.map(|event| match event.kind {
            Type::RDMA_CM_EVENT_DISCONNECTED => ConnectionEvent::Disconnected,
            Type::RDMA_CM_EVENT_TIMEWAIT_EXIT => ConnectionEvent::TimewaitExit,
            Type::RDMA_CM_EVENT_DEVICE_REMOVAL => ConnectionEvent::DeviceRemoval,
            Type::RDMA_CM_EVENT_ADDR_CHANGE => ConnectionEvent::AddressChange,
            Type(other) => ConnectionEvent::Other(other),
        }))
    }

    /// Waits until the connection is closed, by either side or with the device, at most for
    /// `timeout`.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT` if it is not by then; `EACCES` after a change of credentials.
    pub fn wait_disconnected(&self, timeout: Option<Duration>) -> Result<()> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            match self.next_event(left)? {
                None => {
                    return Err(Error::new("wait_disconnected", Errno::TIMEDOUT)
                        .detail("the connection was not closed in time"));
                }
                Some(
                    ConnectionEvent::Disconnected
                    | ConnectionEvent::TimewaitExit
                    | ConnectionEvent::DeviceRemoval,
                ) => return Ok(()),
                Some(_) => {}
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // In a child the queue pair is the parent's, and refuses.
        let _ = self.qp.stop();
    }
}
