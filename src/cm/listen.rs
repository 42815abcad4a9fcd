//! The passive side: listeners and connect requests. Pairs with `ucma_listen` and
//! `ucma_connect_event_handler` in `core/ucma.c`.

use super::channel::EventChannel;
use super::connect::{Accepting, Link};
use super::event::Event;
use super::id::{IdInner, Path, given_up, local_addr, no_address};
use super::param::{CmMessage, ConnectParam, Depths, check_private_data, to_field, to_raw_ece};
use super::port_space::PortSpace;
use super::qp::{ConnectedQp, Negotiated, check_type, has_srq};
use super::step::{Progress, Step, wait};
use super::ucma::UcmaCommand;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::number::Qpn;
use crate::platform::Platform;
use crate::qp::{Ece, QpControl, QpType};
use crate::sync::lock::Lock;
use rustix::io::Errno;
use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use uverbs_uapi::rdma_user_cm as uapi;
use uverbs_uapi::rdma_user_cm::rdma_cm_event_type as Type;

/// An id that listens.
///
/// Dropping it ends the listener. The kernel rejects the requests that the program did not take; accepted connections
/// stay.
#[derive(Debug)]
pub struct ListeningId {
    pub(super) id: Arc<IdInner>,
}

impl ListeningId {
    pub(super) fn new(id: Arc<IdInner>) -> Self {
        ListeningId { id }
    }

    /// The address that the id listens on.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    #[doc(alias = "rdma_get_local_addr")]
    pub fn local_addr(&self) -> Result<SocketAddr> {
        local_addr(&self.id)
    }

    /// The number of connect requests that were rejected because the [backlog](super::BoundId::listen) was full.
    pub fn overflows(&self) -> u64 {
        self.id.overflows()
    }

    /// Waits for a connect request, for at most `timeout`, or without a limit for `None`; a timeout of zero polls once.
    /// `None` after the timeout. Several threads may wait; each request goes to one of them.
    ///
    /// # Errors
    ///
    /// `ENODEV` if the kernel is removing the device of the address, in this and every later call; `EACCES` after a
    /// change of credentials.
    #[doc(alias = "rdma_get_request")]
    pub fn next_request(&self, timeout: Option<Duration>) -> Result<Option<ConnectRequest>> {
        wait(self, timeout).map(Progress::into_option)
    }
}

impl Step for &ListeningId {
    type Next = ConnectRequest;
    type Error = Error;
    const VERB: &'static str = "get_request";

    fn id(&self) -> &IdInner {
        &self.id
    }

    fn advance(self, event: Event) -> Result<ConnectRequest> {
        match event {
            Event {
                kind: Type::RDMA_CM_EVENT_CONNECT_REQUEST,
                request: Some(id),
                conn,
                ud,
                ece,
                ..
            } => Ok(ConnectRequest::new(id, conn, &ud, ece)),
            event => Err(event.failure(Self::VERB).into()),
        }
    }
}

/// A peer's connect request. Dropping it rejects the request.
///
/// The program may read a request before it accepts or rejects it:
///
/// ```no_run
/// # fn f(request: uverbs::cm::ConnectRequest, qp: &uverbs::QueuePair, busy: bool,
/// #     worker: &uverbs::cm::EventChannel) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::cm::ConnectParam;
///
/// println!("{} asks for {} of {:?}", request.peer_addr()?, request.qp_type(), request.port_space());
/// println!("its queue pair is {}, and it says {:?}", request.peer_qpn(), request.private_data());
/// println!("options of its device: {:?}", request.ece());
/// if busy {
///     return Ok(request.reject(b"come again later")?);
/// }
/// // The request moves to another channel, for that channel's thread to accept it.
/// let request = request.migrate(worker)?;
/// let param = ConnectParam::new()
///     .responder_resources(request.responder_resources())
///     .initiator_depth(request.initiator_depth());
/// // The queue pair is in state INIT now, and takes receives.
/// request.init_qp(qp)?;
/// let connection = request.accept(qp, &param)?.wait(None)?.done()?;
/// # drop(connection); Ok(()) }
/// ```
#[derive(Debug)]
pub struct ConnectRequest {
    pub(super) id: Arc<IdInner>,
    conn: uapi::rdma_ucm_conn_param,
    ece: Option<Ece>,
    /// The device that the request came to, and the addresses, once a method has queried them.
    path: Lock<Option<Path>>,
}

impl ConnectRequest {
    fn new(
        id: Arc<IdInner>,
        conn: uapi::rdma_ucm_conn_param,
        ud: &uapi::rdma_ucm_ud_param,
        ece: Option<Ece>,
    ) -> Self {
        let conn = match id.is_datagram() {
            true => uapi::rdma_ucm_conn_param {
                private_data: ud.private_data,
                private_data_len: ud.private_data_len,
                ..Default::default()
            },
            false => conn,
        };
        ConnectRequest { id, conn, ece, path: Lock::new(None) }
    }

    /// The port space of the listener: a request in [`UDP`](PortSpace::UDP) is for
    /// [`accept_datagrams`](Self::accept_datagrams), one in [`TCP`](PortSpace::TCP) for [`accept`](Self::accept).
    pub fn port_space(&self) -> PortSpace {
        self.id.space
    }

    /// The type of queue pair that the request is for.
    pub fn qp_type(&self) -> QpType {
        self.id.qp_type
    }

    /// The private data of the request: the whole field of the message, with zeros after the peer's bytes.
    pub fn private_data(&self) -> &[u8] {
        let length = usize::from(self.conn.private_data_len);
        self.conn.private_data.get(..length).unwrap_or(&self.conn.private_data)
    }

    /// The number of the peer's queue pair. It is 0 in the port space [`UDP`](PortSpace::UDP), where the completion of
    /// the peer's first datagram has the number.
    pub fn peer_qpn(&self) -> Qpn {
        Qpn(self.conn.qp_num)
    }

    /// The peer's ECE options, if the request carries any.
    #[doc(alias = "rdma_get_remote_ece")]
    pub fn ece(&self) -> Option<Ece> {
        self.ece
    }

    /// The number of reads and atomics that the peer wants outstanding; a larger
    /// [`responder_resources`](ConnectParam::responder_resources) is of no use.
    pub fn responder_resources(&self) -> u8 {
        self.conn.responder_resources
    }

    /// The number of outstanding reads and atomics that the peer can answer; a larger
    /// [`initiator_depth`](ConnectParam::initiator_depth) is of no use.
    pub fn initiator_depth(&self) -> u8 {
        self.conn.initiator_depth
    }

    /// The peer's address.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone and no method of the request asked for an address before.
    #[doc(alias = "rdma_get_peer_addr")]
    pub fn peer_addr(&self) -> Result<SocketAddr> {
        const VERB: &str = "get_peer_addr";
        self.path(VERB)?.peer.ok_or_else(|| no_address(VERB))
    }

    /// The address that the request came to.
    ///
    /// # Errors
    ///
    /// As [`peer_addr`](Self::peer_addr).
    #[doc(alias = "rdma_get_local_addr")]
    pub fn local_addr(&self) -> Result<SocketAddr> {
        const VERB: &str = "get_local_addr";
        self.path(VERB)?.local.ok_or_else(|| no_address(VERB))
    }

    /// The context of the device that the request came to: create the queue pair there. See
    /// [`EventChannel::use_context`].
    ///
    /// # Errors
    ///
    /// As [`Context::open`](crate::Context::open).
    #[doc(alias = "rdma_create_qp")]
    pub fn context(&self) -> Result<Context> {
        const VERB: &str = "accept";
        self.id.channel.context(VERB, self.path(VERB)?.device(VERB)?)
    }

    /// The device and the addresses of a request never change, so that one query is enough.
    fn path(&self, verb: &'static str) -> Result<Path> {
        let known = self.path.lock().and_then(|path| *path);
        if let Some(path) = known {
            return Ok(path);
        }
        let path = self.id.query(verb)?;
        if let Some(mut known) = self.path.lock() {
            *known = Some(path);
        }
        Ok(path)
    }

    /// Moves the request, and the connection that follows, to another channel, for example that of another thread.
    /// Moving it to its own channel does nothing.
    ///
    /// # Errors
    ///
    /// Any error rejects the request. `EACCES` after a change of credentials.
    #[doc(alias = "rdma_migrate_id")]
    pub fn migrate(self, to: &EventChannel) -> Result<ConnectRequest> {
        if Arc::ptr_eq(&self.id.channel, &to.inner) {
            return Ok(self);
        }
        let id = self.id.migrate(&to.inner)?;
        Ok(ConnectRequest { id, ..self })
    }

    /// Brings a queue pair to `INIT`, so that receives can be posted. Without this call, [`accept`](Self::accept) does
    /// it.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the queue pair is on another device, or past `INIT`; `ECONNABORTED` if the peer gave up.
    pub fn init_qp(&self, qp: &QpControl) -> Result<()> {
        const VERB: &str = "init_qp";
        self.path(VERB)?.device(VERB)?.check(VERB, qp.context().device())?;
        ConnectedQp::of(qp).init(VERB, &self.id)
    }

    /// Accepts the request with a queue pair in `RESET` or `INIT`, and brings it to `RTS`. Send only when the peer has
    /// confirmed the connection: see [`Accepting::wait`]. Receives may complete before.
    ///
    /// # Errors
    ///
    /// Any error rejects the request. `EINVAL` for a queue pair of another type than the request's, on another device
    /// or past `INIT`, too much private data, or a parameter above the device's limit. `ECONNABORTED` if the peer gave
    /// up while its request waited, as a client with a short timeout does: nothing is wrong on this side.
    #[doc(alias = "rdma_accept")]
    pub fn accept(self, qp: &QpControl, param: &ConnectParam) -> Result<Accepting> {
        const VERB: &str = "accept";
        let context = qp.context();
        self.id.check_datagram(VERB, false)?;
        check_type(VERB, &self.id, qp)?;
        self.path(VERB)?.device(VERB)?.check(VERB, context.device())?;
        let limits = self.id.channel.limits(VERB, &context)?;
        param.check(VERB, CmMessage::Accept, limits)?;
        let asked = Depths {
            responder_resources: self.conn.responder_resources,
            initiator_depth: self.conn.initiator_depth,
        };
        let depths = param.depths(limits.min(asked));
        let connected = ConnectedQp::of(qp);
        connected.init_if_reset(VERB, &self.id)?;
        let (peer_qpn, private_data) = (self.peer_qpn(), self.private_data().into());
        // A program that sets the answer's options has set the device's by itself.
        let options = match param.ece {
            Some(_) => None,
            None => connected.ece_in_common(VERB, self.ece)?,
        };
        let link = Link::new(self.id, connected, peer_qpn, private_data, self.ece);
        let agreed = Negotiated {
            peer_rights: None,
            depths: Some(depths),
            min_rnr_timer: param.min_rnr_timer,
            ece_options: options,
        };
        link.qp.ready(VERB, &link.id, &agreed)?;
        // The answer carries the vendor of the request even if this device has none of its options.
        let taken = link.qp.ece(VERB)?.map_or(0, |ece| ece.options);
        let chosen = param.ece.or(self.ece.map(|asked| Ece { options: taken, ..asked }));
        // From the accept on, the kernel reports events of the id.
        link.id.channel.register(VERB, &link.id)?;
        let request = uapi::rdma_ucm_accept {
            uid: link.id.key,
            conn_param: param.to_raw(qp.qpn(), has_srq(qp), depths),
            id: link.id.number(),
            ece: to_raw_ece(chosen),
            ..Default::default()
        };
        link.id.accept(VERB, &request)?;
        Ok(Accepting::new(link))
    }

    /// Tells the peer the number of a queue pair, in the port space [`UDP`](PortSpace::UDP), and brings the queue
    /// pair from `RESET` or `INIT` to `RTS`, from `RESET` with [`DATAGRAM_QKEY`](super::DATAGRAM_QKEY). Past `INIT` it
    /// stays as it is, so that one queue pair may have many peers. The exchange is then over: there is no connection.
    ///
    /// # Errors
    ///
    /// Any error rejects the request. `EINVAL` for a queue pair of another type than UD, on another device or in
    /// `ERR`, too much private data, or an id of another port space.
    #[doc(alias = "rdma_accept")]
    pub fn accept_datagrams(self, qp: &QpControl, param: &ConnectParam) -> Result<()> {
        const VERB: &str = "accept_datagrams";
        self.id.check_datagram(VERB, true)?;
        check_type(VERB, &self.id, qp)?;
        self.path(VERB)?.device(VERB)?.check(VERB, qp.context().device())?;
        param.check_datagram(VERB, CmMessage::DatagramReply)?;
        ConnectedQp::of(qp).ready_datagrams(VERB, &self.id)?;
        let request = uapi::rdma_ucm_accept {
            uid: self.id.key,
            conn_param: param.to_raw_datagram(qp.qpn()),
            id: self.id.number(),
            ..Default::default()
        };
        let command = UcmaCommand::new(uapi::RDMA_USER_CM_CMD_ACCEPT, &request);
        self.id.execute(VERB, command).map_err(|error| {
            error.context(|| "the kernel does not take the answer to the request".to_owned())
        })
    }

    /// Rejects the request, with at most [`REJECT_PRIVATE_DATA`](super::REJECT_PRIVATE_DATA) bytes for the
    /// peer's program, or [`DATAGRAM_REPLY_PRIVATE_DATA`](super::DATAGRAM_REPLY_PRIVATE_DATA) in the port space
    /// [`UDP`](PortSpace::UDP).
    ///
    /// # Errors
    ///
    /// `EINVAL` for more bytes; the request is then rejected without any. `ECONNABORTED` if the peer gave up; nothing
    /// is sent.
    #[doc(alias = "rdma_reject")]
    pub fn reject(self, private_data: &[u8]) -> Result<()> {
        self.reject_for(0, private_data)
    }

    /// As [`reject`](Self::reject), because of the request's ECE options: the peer reads
    /// [`RejectReason::VENDOR_OPTION_NOT_SUPPORTED`](super::RejectReason::VENDOR_OPTION_NOT_SUPPORTED), and may send
    /// another request without options.
    ///
    /// ```no_run
    /// # use uverbs::{Ece, QpControl, QueuePair, cm::*};
    /// # fn f(request: ConnectRequest, connector: Connector, create: impl Fn(&RouteResolved) -> uverbs::Result<QueuePair>)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// // A service that takes no vendor's options:
    /// if request.ece().is_some() {
    ///     request.reject_ece(b"without options, please")?;
    /// }
    ///
    /// // Its peer, which asks again:
    /// let plain = ConnectParam::new().ece(Ece { vendor_id: 0, options: 0 });
    /// let connected = match connector.connect(&create) {
    ///     Err(refused)
    ///         if refused.rejection().and_then(Rejection::reason)
    ///             == Some(RejectReason::VENDOR_OPTION_NOT_SUPPORTED) =>
    ///     {
    ///         connector.param(plain).connect(&create)?
    ///     }
    ///     other => other?,
    /// };
    /// # drop(connected); Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`reject`](Self::reject).
    #[doc(alias = "rdma_reject_ece")]
    pub fn reject_ece(self, private_data: &[u8]) -> Result<()> {
        let reason = uapi::ib_cm_rej_reason::IB_CM_REJ_VENDOR_OPTION_NOT_SUPPORTED;
        self.reject_for(reason.0 as u8, private_data)
    }

    /// Reason 0 means consumer-defined.
    fn reject_for(self, reason: u8, private_data: &[u8]) -> Result<()> {
        const VERB: &str = "reject";
        let message = match self.id.is_datagram() {
            true => CmMessage::DatagramReply,
            false => CmMessage::Reject,
        };
        check_private_data(VERB, message, private_data)?;
        let (field, private_data_len) = to_field(private_data);
        let request = uapi::rdma_ucm_reject {
            id: self.id.number(),
            private_data_len,
            reason,
            private_data: field,
            ..Default::default()
        };
        let command = UcmaCommand::new(uapi::RDMA_USER_CM_CMD_REJECT, &request);
        self.id.execute(VERB, command).map_err(|error| match error.errno() {
            Errno::INVAL => given_up(error),
            _ => error,
        })
    }
}

impl IdInner {
    pub(super) fn listen(&self, backlog: u32) -> Result<()> {
        const VERB: &str = "listen";
        if self.qp_type == QpType::XRC_INI {
            let detail = "an id for XRC initiators connects; one for XRC targets listens";
            return Err(Error::invalid(VERB, detail));
        }
        // Requests may arrive before the command returns.
        let most = max_backlog(&self.channel.platform, MAX_BACKLOG);
        self.set_backlog(kept(backlog, most));
        let request = uapi::rdma_ucm_listen { id: self.number(), backlog };
        let command = UcmaCommand::new(uapi::RDMA_USER_CM_CMD_LISTEN, &request);
        self.execute(VERB, command).map_err(|error| match error.errno() {
            Errno::ADDRINUSE => match local_addr(self) {
                Ok(at) => {
                    error.detail(format!("another listener has port {} of {}", at.port(), at.ip()))
                }
                Err(_) => error.detail("another listener has the port"),
            },
            _ => error.context(|| match local_addr(self) {
                Ok(at) => format!("no listener was made at {at}"),
                Err(_) => "no listener was made".to_owned(),
            }),
        })
    }
}

/// The setting of [`max_backlog`].
const MAX_BACKLOG: &str = "/proc/sys/net/rdma_ucm/max_backlog";

/// The limit of the connect requests that wait to be read from a channel, for each listener. The setting is visible in
/// the first network namespace only, and holds in all.
fn max_backlog(platform: &Platform, setting: &str) -> u32 {
    /// The kernel's default, and the constant of a hosted kernel.
    const DEFAULT: u32 = 1024;
    if platform.hosted().is_some() {
        return DEFAULT;
    }
    let text = fs::read_to_string(setting).ok();
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(DEFAULT)
}

/// The number of requests that a listener keeps: as many as the kernel (`ucma_listen`), and at least one.
fn kept(backlog: u32, most: u32) -> usize {
    let kept = if backlog == 0 { most } else { backlog.min(most) };
    kept.max(1) as usize
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "it makes a file")]
    fn the_setting_of_the_machine_is_not_that_of_a_hosted_kernel() {
        use crate::sim::{Fabric, Mode};
        let setting = std::env::temp_dir().join(format!("max_backlog.{}", std::process::id()));
        fs::write(&setting, "77\n").unwrap();
        let hosted = Platform::from(Fabric::new(1, Mode::Trapped).system());
        let read = [&Platform::LINUX, &hosted].map(|on| max_backlog(on, setting.to_str().unwrap()));
        fs::remove_file(&setting).unwrap();
        assert_eq!(read, [77, 1024]);
        assert_eq!(max_backlog(&Platform::LINUX, setting.to_str().unwrap()), 1024);
    }
}
