//! Events of an id, and the errors of connections that failed.

use super::id::IdInner;
use super::param::from_raw_ece;
use crate::error::Error;
use crate::number::open_enum;
use crate::qp::Ece;
use rustix::io::Errno;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use uverbs_uapi::rdma_user_cm::{
    ib_cm_rej_reason as rej, rdma_cm_event_type as Type, rdma_ucm_conn_param, rdma_ucm_event_resp,
    rdma_ucm_ud_param,
};
use zerocopy::FromBytes;

/// An event on its way from the kernel to its id.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(super) kind: Type,
    /// 0, a negative error number, or the reason code of a rejection.
    pub(super) status: i32,
    /// Parameters of an event of a connection.
    pub(super) conn: rdma_ucm_conn_param,
    /// Parameters of an event of an id for datagrams.
    pub(super) ud: rdma_ucm_ud_param,
    /// The peer's ECE options.
    pub(super) ece: Option<Ece>,
    /// The value of an event that a program wrote.
    pub(super) value: u64,
    /// The new id of a connect request. Dropping the event destroys it, which rejects the request.
    pub(super) request: Option<Arc<IdInner>>,
}

impl Event {
    pub(super) fn new(raw: &rdma_ucm_event_resp) -> Event {
        // `param` is as long as the longer struct, so that these reads never fail.
        let conn = rdma_ucm_conn_param::read_from_prefix(&raw.param);
        let ud = rdma_ucm_ud_param::read_from_prefix(&raw.param);
        Event {
            kind: Type(raw.event),
            status: raw.status as i32,
            conn: conn.map(|(conn, _)| conn).unwrap_or_default(),
            ud: ud.map(|(ud, _)| ud).unwrap_or_default(),
            ece: from_raw_ece(raw.ece),
            value: u64::from_ne_bytes(raw.param.first_chunk().copied().unwrap_or_default()),
            request: None,
        }
    }

    /// Whether this event adds nothing to one of its kind that waits to be taken. The network decides how often such
    /// events come: a peer changes its MAC address, a bond fails over, a subnet manager restarts.
    pub(super) fn repeats(&self, waiting: &Event) -> bool {
        self.kind == waiting.kind
            && matches!(
                self.kind,
                Type::RDMA_CM_EVENT_UNREACHABLE
                    | Type::RDMA_CM_EVENT_ADDR_CHANGE
                    | Type::RDMA_CM_EVENT_MULTICAST_ERROR
            )
    }

    /// The private data of the message: the whole field, with zeros behind the peer's bytes.
    pub(super) fn private_data(&self) -> &[u8] {
        let length = usize::from(self.conn.private_data_len);
        self.conn.private_data.get(..length).unwrap_or(&self.conn.private_data)
    }

    /// Whether the address or the route was not found.
    pub(super) fn is_about_the_way(&self) -> bool {
        matches!(self.kind, Type::RDMA_CM_EVENT_ADDR_ERROR | Type::RDMA_CM_EVENT_ROUTE_ERROR)
    }

    /// The error of a call that this event ends instead of the expected one.
    pub(super) fn failure(&self, verb: &'static str) -> ConnectError {
        let kind = match self.kind {
            Type::RDMA_CM_EVENT_REJECTED => return self.rejected(verb),
            Type::RDMA_CM_EVENT_DEVICE_REMOVAL => {
                return Error::new(verb, Errno::NODEV)
                    .detail("the device of the connection is being removed")
                    .into();
            }
            Type::RDMA_CM_EVENT_DISCONNECTED => {
                return Error::new(verb, Errno::CONNRESET)
                    .detail("the peer closed the connection before it was established")
                    .into();
            }
            Type::RDMA_CM_EVENT_ADDR_ERROR => "the address could not be resolved",
            Type::RDMA_CM_EVENT_ROUTE_ERROR => "there is no route to the address",
            Type::RDMA_CM_EVENT_UNREACHABLE => "the peer did not answer",
            Type::RDMA_CM_EVENT_MULTICAST_ERROR => "the multicast group could not be joined",
            Type::RDMA_CM_EVENT_ADDRINFO_ERROR => "the service was not found",
            Type::RDMA_CM_EVENT_CONNECT_ERROR => "the connection could not be set up",
            kind => {
                return Error::new(verb, Errno::PROTO)
                    .detail(format!("the kernel reported {kind:?}, which does not belong here"))
                    .into();
            }
        };
        let error = match errno_of(self.status) {
            Some(errno) => Error::from_kernel(verb, errno)
                .detail(format!("{kind}{}", advice(self.kind, errno))),
            // A status that is no error number.
            None => Error::new(verb, Errno::PROTO)
                .detail(format!("{kind}: the kernel reported status {}", self.status)),
        };
        error.into()
    }

    fn rejected(&self, verb: &'static str) -> ConnectError {
        let rejection = Rejection { status: self.status, private_data: self.private_data().into() };
        let error = Error::new(verb, Errno::CONNREFUSED)
            .detail(format!("the connection was rejected: {rejection}"));
        ConnectError { error, rejection: Some(Box::new(rejection)) }
    }
}

/// The error number of a status; `None` for any other status.
fn errno_of(status: i32) -> Option<Errno> {
    // The error numbers of a system call.
    (-4095..0).contains(&status).then(|| Errno::from_raw_os_error(-status))
}

/// The remedy for an event with this error number.
fn advice(kind: Type, errno: Errno) -> &'static str {
    match errno {
        Errno::TIMEDOUT if kind == Type::RDMA_CM_EVENT_ROUTE_ERROR => {
            ": the subnet manager did not answer; without one, `set_ib_path` takes a path that the program \
             knows"
        }
        Errno::TIMEDOUT if kind == Type::RDMA_CM_EVENT_ADDR_ERROR => {
            ": no neighbour answered; check that the address is up, and on this network"
        }
        Errno::TIMEDOUT
            if matches!(
                kind,
                Type::RDMA_CM_EVENT_MULTICAST_ERROR | Type::RDMA_CM_EVENT_ADDRINFO_ERROR
            ) =>
        {
            ": the subnet administrator did not answer"
        }
        Errno::NOENT if kind == Type::RDMA_CM_EVENT_ADDRINFO_ERROR => {
            ": the subnet administrator knows no service of this id or name"
        }
        Errno::TIMEDOUT => {
            ": check that the host runs RDMA and, on RoCE, that no firewall drops UDP port 4791"
        }
        Errno::NODEV => {
            ": the network interface that leads to it belongs to no RDMA device (`rdma link` lists \
             those that do)"
        }
        Errno::HOSTUNREACH | Errno::NETUNREACH => ": the IP routing table has no way there",
        _ => "",
    }
}

open_enum! {
    /// The reason of a rejection, by the peer's program or by a connection manager on the way.
    #[doc(alias = "ib_cm_rej_reason")]
    pub struct RejectReason(u32) {
        NO_QP = rej::IB_CM_REJ_NO_QP.0, "no queue pair is left";
        NO_EEC = rej::IB_CM_REJ_NO_EEC.0, "no end-to-end context is left";
        NO_RESOURCES = rej::IB_CM_REJ_NO_RESOURCES.0, "no resources are left";
        TIMEOUT = rej::IB_CM_REJ_TIMEOUT.0, "the handshake took too long";
        UNSUPPORTED = rej::IB_CM_REJ_UNSUPPORTED.0, "the request is not supported";
        INVALID_COMM_ID = rej::IB_CM_REJ_INVALID_COMM_ID.0, "an invalid communication id";
        INVALID_COMM_INSTANCE = rej::IB_CM_REJ_INVALID_COMM_INSTANCE.0,
            "an invalid communication instance";
        /// No listener has the port.
        INVALID_SERVICE_ID = rej::IB_CM_REJ_INVALID_SERVICE_ID.0, "nobody listens on the port";
        INVALID_TRANSPORT_TYPE = rej::IB_CM_REJ_INVALID_TRANSPORT_TYPE.0,
            "an invalid transport type";
        STALE_CONN = rej::IB_CM_REJ_STALE_CONN.0, "the peer knows the queue pair from an older connection";
        RDC_NOT_EXIST = rej::IB_CM_REJ_RDC_NOT_EXIST.0, "the reliable datagram channel does not exist";
        INVALID_GID = rej::IB_CM_REJ_INVALID_GID.0, "an invalid GID";
        INVALID_LID = rej::IB_CM_REJ_INVALID_LID.0, "an invalid LID";
        INVALID_SL = rej::IB_CM_REJ_INVALID_SL.0, "an invalid service level";
        INVALID_TRAFFIC_CLASS = rej::IB_CM_REJ_INVALID_TRAFFIC_CLASS.0, "an invalid traffic class";
        INVALID_HOP_LIMIT = rej::IB_CM_REJ_INVALID_HOP_LIMIT.0, "an invalid hop limit";
        INVALID_PACKET_RATE = rej::IB_CM_REJ_INVALID_PACKET_RATE.0, "an invalid packet rate";
        INVALID_ALT_GID = rej::IB_CM_REJ_INVALID_ALT_GID.0, "an invalid alternate GID";
        INVALID_ALT_LID = rej::IB_CM_REJ_INVALID_ALT_LID.0, "an invalid alternate LID";
        INVALID_ALT_SL = rej::IB_CM_REJ_INVALID_ALT_SL.0, "an invalid alternate service level";
        INVALID_ALT_TRAFFIC_CLASS = rej::IB_CM_REJ_INVALID_ALT_TRAFFIC_CLASS.0,
            "an invalid alternate traffic class";
        INVALID_ALT_HOP_LIMIT = rej::IB_CM_REJ_INVALID_ALT_HOP_LIMIT.0,
            "an invalid alternate hop limit";
        INVALID_ALT_PACKET_RATE = rej::IB_CM_REJ_INVALID_ALT_PACKET_RATE.0,
            "an invalid alternate packet rate";
        PORT_CM_REDIRECT = rej::IB_CM_REJ_PORT_CM_REDIRECT.0,
            "the peer's connection manager is at another port";
        PORT_REDIRECT = rej::IB_CM_REJ_PORT_REDIRECT.0, "the service is at another port";
        INVALID_MTU = rej::IB_CM_REJ_INVALID_MTU.0, "an invalid path MTU";
        INSUFFICIENT_RESP_RESOURCES = rej::IB_CM_REJ_INSUFFICIENT_RESP_RESOURCES.0,
            "too few responder resources";
        /// The peer's program rejected the request, or dropped it unanswered.
        CONSUMER_DEFINED = rej::IB_CM_REJ_CONSUMER_DEFINED.0, "the peer's program refused";
        INVALID_RNR_RETRY = rej::IB_CM_REJ_INVALID_RNR_RETRY.0, "an invalid RNR retry count";
        DUPLICATE_LOCAL_COMM_ID = rej::IB_CM_REJ_DUPLICATE_LOCAL_COMM_ID.0,
            "the communication id is in use";
        INVALID_CLASS_VERSION = rej::IB_CM_REJ_INVALID_CLASS_VERSION.0,
            "another version of the connection protocol";
        INVALID_FLOW_LABEL = rej::IB_CM_REJ_INVALID_FLOW_LABEL.0, "an invalid flow label";
        INVALID_ALT_FLOW_LABEL = rej::IB_CM_REJ_INVALID_ALT_FLOW_LABEL.0,
            "an invalid alternate flow label";
        VENDOR_OPTION_NOT_SUPPORTED = rej::IB_CM_REJ_VENDOR_OPTION_NOT_SUPPORTED.0,
            "the vendor's options are not supported";
    }
}

/// A peer's rejection of a connect request.
#[derive(Clone, PartialEq, Eq)]
pub struct Rejection {
    status: i32,
    private_data: Vec<u8>,
}

impl Rejection {
    /// The reason on InfiniBand and RoCE; `None` on iWARP, which has an [`errno`](Self::errno) instead.
    pub fn reason(&self) -> Option<RejectReason> {
        u32::try_from(self.status).ok().map(RejectReason)
    }

    /// The error number on iWARP, in place of a reason. `None`, as the reason, if the kernel's status is no error
    /// number.
    pub fn errno(&self) -> Option<Errno> {
        errno_of(self.status)
    }

    /// The private data of the rejection. On InfiniBand and RoCE this is the whole field of
    /// [`REJECT_PRIVATE_DATA`](super::REJECT_PRIVATE_DATA) bytes, with zeros after the peer's bytes.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }
}

/// The text of [`Display`](fmt::Display), and the peer's bytes up to the zeros that pad the field.
impl fmt::Debug for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let length = self.private_data.iter().rposition(|byte| *byte != 0).map_or(0, |at| at + 1);
        let said = self.private_data.get(..length).unwrap_or_default();
        write!(f, "Rejection({self}, private data \"{}\")", said.escape_ascii())
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.reason(), self.errno()) {
            (Some(reason), _) => match reason.description() {
                Some(description) => write!(f, "{description} (reason {})", reason.0),
                None => write!(f, "reason {}", reason.0),
            },
            (None, Some(errno)) => write!(f, "{errno}"),
            (None, None) => write!(f, "status {}", self.status),
        }
    }
}

/// The error of a failed connection.
#[derive(Clone)]
pub struct ConnectError {
    error: Error,
    rejection: Option<Box<Rejection>>,
}

impl ConnectError {
    /// The peer's rejection, if the peer rejected the connection.
    pub fn rejection(&self) -> Option<&Rejection> {
        self.rejection.as_deref()
    }

    /// The error number; `ECONNREFUSED` for a rejection.
    pub fn errno(&self) -> Errno {
        self.error.errno()
    }

    /// Names the peer.
    pub(super) fn to(self, peer: &SocketAddr) -> ConnectError {
        let detail = format!("{peer}: {}", self.error.message());
        self.replace_detail(detail)
    }

    pub(super) fn replace_detail(self, detail: String) -> ConnectError {
        ConnectError { error: self.error.detail(detail), ..self }
    }

    /// The error without the peer's private data.
    pub fn error(&self) -> &Error {
        &self.error
    }
}

impl From<Error> for ConnectError {
    fn from(error: Error) -> Self {
        ConnectError { error, rejection: None }
    }
}

impl From<ConnectError> for Error {
    fn from(error: ConnectError) -> Self {
        error.error
    }
}

impl From<ConnectError> for std::io::Error {
    fn from(error: ConnectError) -> Self {
        error.error.into()
    }
}

/// The text of [`Display`](fmt::Display), for `fn main() -> Result<…>` and `unwrap`.
impl fmt::Debug for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for ConnectError {}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    fn event(kind: Type, status: i32) -> Event {
        let raw =
            rdma_ucm_event_resp { event: kind.0, status: status as u32, ..Default::default() };
        Event::new(&raw)
    }

    #[test]
    fn rejection_names_its_reason_and_carries_its_data() {
        let mut event = event(Type::RDMA_CM_EVENT_REJECTED, 8);
        event.conn.private_data_len = 3;
        event.conn.private_data[..3].copy_from_slice(b"why");
        let error = event.failure("connect");
        let rejection = error.rejection().unwrap();
        assert_eq!(rejection.reason(), Some(RejectReason::INVALID_SERVICE_ID));
        assert_eq!((rejection.private_data(), rejection.errno()), (&b"why"[..], None));
        assert_eq!(error.errno(), Errno::CONNREFUSED);
        assert!(error.to_string().contains("nobody listens on the port (reason 8)"), "{error}");
    }

    #[test]
    fn iwarp_rejection_is_an_error_number() {
        let error = event(Type::RDMA_CM_EVENT_REJECTED, -111).failure("connect");
        let rejection = error.rejection().unwrap();
        assert_eq!((rejection.reason(), rejection.errno()), (None, Some(Errno::CONNREFUSED)));
    }

    #[test]
    fn any_event_is_read_whole_and_has_a_text() {
        let raw = rdma_ucm_event_resp { event: 8, status: 28, ..Default::default() };
        let known = [raw.as_bytes().to_vec(), [raw.as_bytes(); 2].concat()];
        let tally = crate::tests::hostile::explore("cm events", 1, &known, |bytes| {
            let Ok((raw, _)) = rdma_ucm_event_resp::read_from_prefix(bytes) else { return false };
            let event = Event::new(&raw);
            assert!(event.private_data().len() <= event.conn.private_data.len());
            for kind in 0..=24 {
                let event = Event { kind: Type(kind), ..Event::new(&raw) };
                let failure = event.failure("connect");
                assert!(!failure.to_string().is_empty());
                if let Some(rejection) = failure.rejection() {
                    assert!(rejection.reason().is_none() || rejection.errno().is_none());
                    assert!(!format!("{rejection} {rejection:?}").is_empty());
                }
            }
            true
        });
        assert!(tally.taken > 0, "{tally:?}");
    }

    #[test]
    fn unknown_reason_is_displayed_as_a_number() {
        let error = event(Type::RDMA_CM_EVENT_REJECTED, 99).failure("connect");
        assert!(error.to_string().contains("reason 99"), "{error}");
    }

    #[test]
    fn failures_have_a_remedy() {
        for (kind, status, errno, advice) in [
            (Type::RDMA_CM_EVENT_ADDR_ERROR, -110, Errno::TIMEDOUT, "no neighbour answered"),
            (Type::RDMA_CM_EVENT_ROUTE_ERROR, -110, Errno::TIMEDOUT, "`set_ib_path`"),
            (Type::RDMA_CM_EVENT_ADDR_ERROR, -19, Errno::NODEV, "rdma link"),
            (Type::RDMA_CM_EVENT_ADDR_ERROR, -113, Errno::HOSTUNREACH, "routing table"),
            (Type::RDMA_CM_EVENT_UNREACHABLE, -110, Errno::TIMEDOUT, "4791"),
            (Type::RDMA_CM_EVENT_MULTICAST_ERROR, -110, Errno::TIMEDOUT, "subnet administrator"),
            (Type::RDMA_CM_EVENT_ADDRINFO_ERROR, -110, Errno::TIMEDOUT, "subnet administrator"),
            (Type::RDMA_CM_EVENT_ADDRINFO_ERROR, -2, Errno::NOENT, "knows no service"),
            (Type::RDMA_CM_EVENT_DEVICE_REMOVAL, 0, Errno::NODEV, "being removed"),
            (Type::RDMA_CM_EVENT_DISCONNECTED, 0, Errno::CONNRESET, "before it was established"),
            (Type(77), 0, Errno::PROTO, "rdma_cm_event_type(77)"),
        ] {
            let error = event(kind, status).failure("connect");
            assert_eq!(error.errno(), errno, "{error}");
            assert!(error.to_string().contains(advice), "{error}");
        }
    }

    /// A broken kernel could return any length.
    #[test]
    fn private_data_never_leads_out_of_its_field() {
        let mut event = event(Type::RDMA_CM_EVENT_CONNECT_REQUEST, 0);
        event.conn.private_data_len = 255;
        assert_eq!(event.private_data().len(), 255);
        let extreme = Event { status: i32::MIN, ..event };
        assert!(extreme.failure("connect").to_string().contains("does not belong here"));
    }

    /// A broken kernel could return any status; error numbers of system calls end at 4095.
    #[test]
    fn status_that_is_no_error_number_is_named() {
        let kinds = (0..20).map(Type);
        let statuses = [i32::MIN, -65536, -4096, -4095, -1, 0, 1, 4096, i32::MAX];
        for (kind, status) in kinds.flat_map(|kind| statuses.map(|status| (kind, status))) {
            let error = event(kind, status).failure("connect");
            assert_ne!(error.to_string(), "");
            if let Some(rejection) = error.rejection() {
                assert_eq!(rejection.errno().is_some(), (-4095..0).contains(&status));
                assert!(format!("{rejection:?}").contains(&rejection.to_string()));
            }
        }
        for status in [-4096, i32::MIN, 0, 5] {
            let error = event(Type::RDMA_CM_EVENT_UNREACHABLE, status).failure("connect");
            assert_eq!(error.errno(), Errno::PROTO);
            assert!(error.to_string().contains(&format!("status {status}")), "{error}");
        }
        let error = event(Type::RDMA_CM_EVENT_UNREACHABLE, -4095).failure("connect");
        assert_eq!(error.errno().raw_os_error(), 4095);
    }

    #[test]
    fn debug_of_an_error_is_its_sentence() {
        let mut event = event(Type::RDMA_CM_EVENT_REJECTED, 28);
        event.conn.private_data_len = 148;
        event.conn.private_data[..8].copy_from_slice(b"come\0\xffok");
        let error = event.failure("connect");
        let sentence =
            "connect: the connection was rejected: the peer's program refused (reason 28)";
        assert!(format!("{error:?}").starts_with(sentence), "{error:?}");
        assert_eq!(format!("{error:?}"), error.to_string());
        let rejection = format!("{:?}", error.rejection().unwrap());
        let told =
            r#"Rejection(the peer's program refused (reason 28), private data "come\x00\xffok")"#;
        assert_eq!(rejection, told);
    }
}
