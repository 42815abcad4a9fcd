//! Messages of the connection manager, as values.
//!
//! Pairs with chapter 12 of the InfiniBand specification and `core/cm_msgs.h`. A message travels between the ports of a
//! fabric as a value; [`wire`](super::wire) encodes one that leaves the process.

use std::fmt;
use std::net::Ipv6Addr;
pub(crate) use uverbs_roce::cm::About;

/// The address of an end: its IP address as a GID, as RoCE has it. On InfiniBand it is not the port's GID.
pub(crate) type Gid = [u8; 16];

/// Private data of a message.
pub(crate) type PrivateData = Vec<u8>;

/// Options that a vendor's devices agree on (ECE).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ece {
    pub(crate) vendor: u32,
    pub(crate) options: u32,
}

/// The parameters of one side, in a request and in a reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Side {
    pub(crate) qpn: u32,
    pub(crate) starting_psn: u32,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) flow_control: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) srq: u8,
    pub(crate) ece: Ece,
    pub(crate) private_data: PrivateData,
}

impl Side {
    /// The parameters as the other side sees them: responder resources and initiator depth change places.
    pub(crate) fn mirrored(&self) -> Side {
        Side {
            responder_resources: self.initiator_depth,
            initiator_depth: self.responder_resources,
            ..self.clone()
        }
    }
}

/// A message about a connection or a datagram service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    /// Asks for a connection with a service.
    Req { service: Service, kind: Transport, side: Side, terms: Terms },
    /// The answer to a message takes the program up to 4.096 µs · 2ⁿ.
    Mra { about: About, timeout: u8 },
    /// Answers a request.
    Rep { kind: Transport, side: Side },
    /// Confirms the reply.
    Rtu,
    /// Refuses a request or a reply.
    Rej { about: About, reason: u32, private_data: PrivateData },
    /// Ends a connection of the receiver's queue pair.
    Dreq { qpn: u32 },
    /// Confirms the end of a connection.
    Drep,
    /// Asks a datagram service for its queue pair.
    SidrReq { service: Service, private_data: PrivateData },
    /// Answers with a queue pair, or with a status that is not 0.
    SidrRep {
        service: Service,
        status: u32,
        qpn: u32,
        qkey: u32,
        ece: Ece,
        private_data: PrivateData,
    },
}

/// The path of a request, and its times and retries of messages of the connection manager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Terms {
    /// `enum ib_mtu` of the path.
    pub(crate) mtu: u8,
    pub(crate) traffic_class: u8,
    /// Time in which either side answers: 4.096 µs · 2ⁿ.
    pub(crate) response_timeout: u8,
    /// How often a message is sent again.
    pub(crate) retries: u8,
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let to = Ipv6Addr::from(self.to).to_canonical();
        write!(f, "cm {:#x} ", self.local)?;
        match &self.body {
            Body::Req { service, side, .. } => {
                write!(f, "REQ of port {} from qp {:#x}", service.port, side.qpn)
            }
            Body::Mra { about, .. } => write!(f, "MRA of {about:?}"),
            Body::Rep { side, .. } => write!(f, "REP from qp {:#x}", side.qpn),
            Body::Rtu => f.write_str("RTU"),
            Body::Rej { reason, .. } => write!(f, "REJ, reason {reason}"),
            Body::Dreq { .. } => f.write_str("DREQ"),
            Body::Drep => f.write_str("DREP"),
            Body::SidrReq { service, .. } => write!(f, "SIDR_REQ of port {}", service.port),
            Body::SidrRep { status, qpn, .. } => {
                write!(f, "SIDR_REP with status {status}, qp {qpn:#x}")
            }
        }?;
        write!(f, " to {to}")
    }
}

/// The type of the queue pairs of a connection.
pub(crate) use uverbs_roce::cm::Service as Transport;

/// The service that a request is for: a port space, a port, and both addresses as `rdma_cm` puts them into
/// private data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Service {
    pub(crate) space: u16,
    pub(crate) port: u16,
    pub(crate) source_port: u16,
}

/// A message with the numbers by which both ends know the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) from: Gid,
    pub(crate) to: Gid,
    /// The sender's number of the connection.
    pub(crate) local: u32,
    /// The receiver's number; 0 in a request.
    pub(crate) remote: u32,
    /// The transaction ID, which an answer has of what it answers.
    pub(crate) transaction: u64,
    pub(crate) body: Body,
}

impl Message {
    /// A message back to the sender.
    pub(crate) fn reply(&self, body: Body) -> Message {
        let (from, to) = (self.to, self.from);
        Message { from, to, local: self.remote, remote: self.local, body, ..*self }
    }
}
