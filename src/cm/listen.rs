//! The passive side: listeners and the requests that come to them. Pairs with `ucma_listen` and
//! `ucma_connect_event_handler` in `core/ucma.c`.

use super::channel::EventChannel;
use super::connect::Accepting;
use super::event::Event;
use super::id::{IdInner, Path, Progress, local_addr};
use super::kernel::Command;
use super::param::{ConnectParam, Depths, Message, check_private_data, to_field};
use super::qp::HeldQp;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::number::Qpn;
use crate::qp::QpControl;
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use uverbs_uapi::rdma_user_cm as uapi;
use uverbs_uapi::rdma_user_cm::rdma_cm_event_type as Type;

/// An id that listens.
///
/// Dropping it ends that; requests that were not taken are rejected, and connections that came by it
/// stay.
#[derive(Debug)]
pub struct ListeningId {
    id: Arc<IdInner>,
}

impl ListeningId {
    pub(super) fn new(id: Arc<IdInner>) -> Self {
        ListeningId { id }
    }

    /// The address that it listens on.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    #[doc(alias = "rdma_get_local_addr")]
    pub fn local_addr(&self) -> Result<SocketAddr> {
        local_addr(&self.id)
    }

    /// Waits for a connect request, at most for `timeout`, for ever without one; with a timeout of
    /// zero this only looks. `None` after the timeout.
    ///
    /// # Errors
    ///
    /// `ENODEV` if the device that it is bound to is being removed; `EACCES` after a change of
    /// credentials.
    #[doc(alias = "rdma_get_request")]
    pub fn next_request(&self, timeout: Option<Duration>) -> Result<Option<ConnectRequest>> {
        const VERB: &str = "get_request";
        match self.id.wait(VERB, timeout)? {
            None => Ok(None),
            Some(Event {
                kind: Type::RDMA_CM_EVENT_CONNECT_REQUEST,
                request: Some(id),
                conn,
                ..
            }) => Ok(Some(ConnectRequest::new(id, conn))),
            Some(event) => Err(event.failure(VERB).into()),
        }
    }
}

/// A peer that wants to connect. Dropping it rejects the request.
#[derive(Debug)]
pub struct ConnectRequest {
    id: Arc<IdInner>,
    conn: uapi::rdma_ucm_conn_param,
}

impl ConnectRequest {
    fn new(id: Arc<IdInner>, conn: uapi::rdma_ucm_conn_param) -> Self {
        ConnectRequest { id, conn }
    }

    /// What the peer sent along: the whole field of the message, with zeros behind what the peer
    /// filled.
    pub fn private_data(&self) -> &[u8] {
        let length = usize::from(self.conn.private_data_len);
        self.conn.private_data.get(..length).unwrap_or(&self.conn.private_data)
    }

    /// The peer's queue pair.
    pub fn peer_qpn(&self) -> Qpn {
        Qpn(self.conn.qp_num)
    }

    /// How many reads and atomics the peer wants to have under way: the most that is of use as
    /// [`responder_resources`](ConnectParam::responder_resources).
    pub fn responder_resources(&self) -> u8 {
        self.conn.responder_resources
    }

    /// How many reads and atomics the peer answers at once: the most that is of use as
    /// [`initiator_depth`](ConnectParam::initiator_depth).
    pub fn initiator_depth(&self) -> u8 {
        self.conn.initiator_depth
    }

    /// The peer's address.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    #[doc(alias = "rdma_get_peer_addr")]
    pub fn peer_addr(&self) -> Result<SocketAddr> {
        super::id::peer_addr(&self.id)
    }

    /// The address that the request came to.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    #[doc(alias = "rdma_get_local_addr")]
    pub fn local_addr(&self) -> Result<SocketAddr> {
        local_addr(&self.id)
    }

    /// The context of the device that the request came to: what the queue pair is to be made from. See
    /// [`EventChannel::use_context`].
    ///
    /// # Errors
    ///
    /// As [`Context::open`](crate::Context::open).
    pub fn context(&self) -> Result<Context> {
        const VERB: &str = "accept";
        self.id.channel.context(VERB, self.path(VERB)?.device(VERB)?)
    }

    fn path(&self, verb: &'static str) -> Result<Path> {
        self.id.query(verb)
    }

    /// Moves the request, and the connection that comes of it, to another channel: for one thread per
    /// channel.
    ///
    /// # Errors
    ///
    /// With any error the request is rejected. `EACCES` after a change of credentials.
    #[doc(alias = "rdma_migrate_id")]
    pub fn migrate(self, to: &EventChannel) -> Result<ConnectRequest> {
        let id = self.id.migrate(&to.inner)?;
        Ok(ConnectRequest { id, conn: self.conn })
    }

    /// Brings a queue pair to `INIT`, where it takes receives. [`accept`](Self::accept) does it for one
    /// that is still in `RESET`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the queue pair is on another device, or past `INIT`.
    pub fn init_qp(&self, qp: &QpControl) -> Result<()> {
        const VERB: &str = "init_qp";
        self.path(VERB)?.device(VERB)?.check(VERB, qp.context().device())?;
        HeldQp::of(qp).init(VERB, &self.id)
    }

    /// Accepts the request with a queue pair, which the connection keeps alive and which this brings
    /// to `RTS`. It may send when the peer is ready: see [`Accepting::wait`]. Receives may complete
    /// before.
    ///
    /// # Errors
    ///
    /// With any error the request is rejected. `EINVAL` for a queue pair on another device or past
    /// `INIT`, for too much private data, or a parameter beyond the device's limits.
    #[doc(alias = "rdma_accept")]
    pub fn accept(self, qp: &QpControl, param: &ConnectParam) -> Result<Accepting> {
        const VERB: &str = "accept";
        let context = qp.context();
        self.path(VERB)?.device(VERB)?.check(VERB, context.device())?;
        let limits = self.id.channel.limits(VERB, &context)?;
        param.check(VERB, Message::Accept, limits)?;
        let asked = Depths {
            responder_resources: self.conn.responder_resources,
            initiator_depth: self.conn.initiator_depth,
        };
        let depths = param.depths(limits.min(asked));
        let held = HeldQp::of(qp);
        held.init_if_reset(VERB, &self.id)?;
        let answered = held
            .ready(VERB, &self.id, Some(depths), param.min_rnr_timer)
            .and_then(|()| self.answer(VERB, qp, &held, param, depths));
        if let Err(error) = answered {
            let _ = held.stop();
            return Err(error);
        }
        let (peer_qpn, private_data) = (self.peer_qpn(), self.private_data().into());
        Ok(Accepting::new(self.id, held, peer_qpn, private_data))
    }

    fn answer(
        &self,
        verb: &'static str,
        qp: &QpControl,
        held: &HeldQp,
        param: &ConnectParam,
        depths: Depths,
    ) -> Result<()> {
        // From here on events name the id.
        self.id.channel.register(verb, &self.id)?;
        let request = uapi::rdma_ucm_accept {
            uid: self.id.key,
            conn_param: param.to_raw(qp.qpn(), held.has_srq(), depths),
            id: self.id.number(),
            ..Default::default()
        };
        self.id.execute(verb, Command::new(uapi::RDMA_USER_CM_CMD_ACCEPT, &request)).map_err(
            |error| match error.errno() {
                Errno::INVAL => {
                    error.detail("the peer gave up, or closed the connection, meanwhile")
                }
                _ => error,
            },
        )
    }

    /// Rejects the request and tells the peer's program why, with at most
    /// [`REJECT_PRIVATE_DATA`](super::REJECT_PRIVATE_DATA) bytes.
    ///
    /// # Errors
    ///
    /// `EINVAL` for more bytes, where the peer sees the request rejected without any.
    #[doc(alias = "rdma_reject")]
    pub fn reject(self, private_data: &[u8]) -> Result<()> {
        const VERB: &str = "reject";
        check_private_data(VERB, Message::Reject, private_data)?;
        let (field, private_data_len) = to_field(private_data);
        let request = uapi::rdma_ucm_reject {
            id: self.id.number(),
            private_data_len,
            private_data: field,
            ..Default::default()
        };
        self.id.execute(VERB, Command::new(uapi::RDMA_USER_CM_CMD_REJECT, &request))
    }
}

/// An error of a wait that ended without an event.
pub(super) fn timed_out(verb: &'static str, what: &'static str) -> Error {
    Error::new(verb, Errno::TIMEDOUT).detail(what)
}

impl<P> Progress<P, super::Connection> {
    /// The connection, or `ETIMEDOUT` in the name of the call that waited for it.
    pub(super) fn connected(self, verb: &'static str) -> Result<super::Connection> {
        match self {
            Progress::Done(connection) => Ok(connection),
            Progress::Pending(_) => Err(timed_out(verb, "the handshake was not over in time")),
        }
    }
}
