//! Ids whose route is being resolved, or was, and the connect request. Pairs with `ucma_resolve_route` and
//! `ucma_connect` in `core/ucma.c`.

use super::address_error::no_device;
use super::connect::Connecting;
use super::datagram::ConnectingDatagrams;
use super::event::Event;
use super::id::{IdInner, Path};
use super::param::{CmMessage, ConnectParam, to_raw_ece};
use super::qp::{ConnectedQp, check_type, has_srq};
use super::resolve_addr::milliseconds;
use super::step::{Progress, Step, wait};
use super::ucma::UcmaCommand;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::qp::{QpControl, QpType};
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use uverbs_uapi::rdma_user_cm as uapi;
use uverbs_uapi::rdma_user_cm::rdma_cm_event_type as Type;

/// An id whose route is being resolved.
#[derive(Debug)]
pub struct ResolvingRoute {
    pub(super) id: Arc<IdInner>,
    pub(super) path: Path,
}

impl ResolvingRoute {
    /// Waits until the route is resolved, for at most `timeout`, or without a limit for `None`; a timeout of zero polls
    /// once.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `ETIMEDOUT` if the subnet administrator did not answer.
    pub fn wait(self, timeout: Option<Duration>) -> Result<Progress<Self, RouteResolved>> {
        wait(self, timeout)
    }
}

impl Step for ResolvingRoute {
    type Next = RouteResolved;
    type Error = Error;
    const VERB: &'static str = "resolve_route";

    fn id(&self) -> &IdInner {
        &self.id
    }

    fn advance(self, event: Event) -> Result<RouteResolved> {
        if event.kind != Type::RDMA_CM_EVENT_ROUTE_RESOLVED {
            return Err(self.id.failure(Self::VERB, &event).into());
        }
        Ok(RouteResolved { id: self.id, path: self.path })
    }
}

/// An id whose route is resolved: it can connect.
#[derive(Debug)]
pub struct RouteResolved {
    pub(super) id: Arc<IdInner>,
    path: Path,
}

impl RouteResolved {
    /// The context of the id's device: create the queue pair there. See
    /// [`EventChannel::use_context`](super::EventChannel::use_context).
    ///
    /// # Errors
    ///
    /// As [`Context::open`](crate::Context::open).
    #[doc(alias = "rdma_create_qp")]
    pub fn context(&self) -> Result<Context> {
        self.id.channel.context("connect", self.path.device("connect")?)
    }

    /// The port of the device, counted from 1.
    pub fn port(&self) -> u32 {
        self.path.port
    }

    /// The address of this end.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.path.local
    }

    /// The address of the other end.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.path.peer
    }

    /// Brings a queue pair to `INIT`, so that receives can be posted. Without this call, [`connect`](Self::connect)
    /// does it.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the queue pair is on another device, or past `INIT`.
    #[doc(alias = "rdma_init_qp_attr")]
    pub fn init_qp(&self, qp: &QpControl) -> Result<()> {
        const VERB: &str = "init_qp";
        self.path.device(VERB)?.check(VERB, qp.context().device())?;
        ConnectedQp::of(qp).init(VERB, &self.id)
    }

    /// Sends a connect request for a queue pair in `RESET` or `INIT`; [`Connecting::wait`] brings it to
    /// `RTS` when the peer accepts. Keep the queue pair until then.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `EINVAL` for a queue pair of another type than the id's, on another device or past
    /// `INIT`, too much private data, or a parameter above the device's limit.
    #[doc(alias = "rdma_connect")]
    pub fn connect(self, qp: &QpControl, param: &ConnectParam) -> Result<Connecting> {
        const VERB: &str = "connect";
        self.id.check_datagram(VERB, false)?;
        check_type(VERB, &self.id, qp)?;
        if self.id.qp_type == QpType::XRC_TGT {
            let detail = "an XRC target is connected by its initiator, whose request it accepts";
            return Err(Error::invalid(VERB, detail));
        }
        self.path.device(VERB)?.check(VERB, qp.context().device())?;
        let limits = self.id.channel.limits(VERB, &qp.context())?;
        let message = CmMessage::request(false, self.path.peer.is_some());
        param.check(VERB, message, limits)?;
        self.check_header(VERB, param)?;
        let connected = ConnectedQp::of(qp);
        connected.init_if_reset(VERB, &self.id)?;
        let offered = param.ece.or(connected.ece(VERB)?);
        let depths = param.depths(limits);
        let request = uapi::rdma_ucm_connect {
            conn_param: param.to_raw(qp.qpn(), has_srq(qp), depths),
            id: self.id.number(),
            ece: to_raw_ece(offered),
            ..Default::default()
        };
        self.send_request(VERB, &request)?;
        Ok(Connecting::new(self.id, connected, offered, param.min_rnr_timer))
    }

    fn send_request(&self, verb: &'static str, request: &uapi::rdma_ucm_connect) -> Result<()> {
        let command = UcmaCommand::new(uapi::RDMA_USER_CM_CMD_CONNECT, request);
        self.id.execute(verb, command).map_err(|error| {
            error.context(|| match self.path.peer {
                Some(peer) => format!("the request to {peer} was not sent"),
                None => "the request was not sent".to_owned(),
            })
        })
    }

    /// For an id without IP addresses: refuses private data that the peer's kernel would take for IP addresses.
    fn check_header(&self, verb: &'static str, param: &ConnectParam) -> Result<()> {
        match self.path.peer {
            Some(_) => Ok(()),
            None => param.check_is_no_header(verb),
        }
    }

    /// Asks the listener for the number and the Q_Key of its queue pair, with an id for queue pairs of type UD. When
    /// the listener answers, [`ConnectingDatagrams::wait`] brings this side's queue pair from `RESET` or `INIT` to
    /// `RTS`, from `RESET` with [`DATAGRAM_QKEY`](super::DATAGRAM_QKEY). A queue pair past `INIT` stays as it is, so
    /// that it may have many peers.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `EINVAL` for a queue pair of another type than UD, on another device or in `ERR`,
    /// too much private data, or an id for queue pairs of another type.
    #[doc(alias = "rdma_connect")]
    pub fn connect_datagrams(
        self,
        qp: &QpControl,
        param: &ConnectParam,
    ) -> Result<ConnectingDatagrams> {
        const VERB: &str = ConnectingDatagrams::VERB;
        self.id.check_datagram(VERB, true)?;
        check_type(VERB, &self.id, qp)?;
        self.path.device(VERB)?.check(VERB, qp.context().device())?;
        let message = CmMessage::request(true, self.path.peer.is_some());
        param.check_datagram(VERB, message)?;
        self.check_header(VERB, param)?;
        let request = uapi::rdma_ucm_connect {
            conn_param: param.to_raw_datagram(qp.qpn()),
            id: self.id.number(),
            ..Default::default()
        };
        self.send_request(VERB, &request)?;
        Ok(ConnectingDatagrams::new(self.id, ConnectedQp::of(qp)))
    }
}

impl IdInner {
    pub(super) fn resolve_route(&self, timeout: Duration) -> Result<()> {
        let request =
            uapi::rdma_ucm_resolve_route { id: self.number(), timeout_ms: milliseconds(timeout) };
        let command = UcmaCommand::new(uapi::RDMA_USER_CM_CMD_RESOLVE_ROUTE, &request);
        self.execute("resolve_route", command).map_err(|error| match error.errno() {
            Errno::NODEV => match self.query("resolve_route").ok().and_then(|path| path.peer) {
                Some(peer) => error.detail(no_device(&peer)),
                None => error.detail("the path leads through no RDMA device"),
            },
            _ => error.context(|| match self.query("resolve_route").ok() {
                Some(Path { peer: Some(peer), .. }) => format!("no route to {peer} was found"),
                _ => "no route was found".to_owned(),
            }),
        })
    }
}
