//! Messages of the connection manager as they travel: datagrams of 256 bytes between the queue pairs 1 of two ports.
//!
//! A management datagram (MAD) is a header and 232 bytes that its attribute ID names. The positions are those of
//! chapter 12 of the InfiniBand specification, as the kernel's `include/rdma/ibta_vol1_c12.h` has them;
//! [`IpAddressing`], at the start of the private data of REQ and SIDR_REQ, is `struct cma_hdr` of `core/cma.c`. All
//! fields are big-endian.
//!
//! ```text
//! MAD    0        1        2        3
//!      ┌────────┬────────┬────────┬────────┐
//!    0 │  base  │ class  │ class  │ method │  1, 7, 2, 3 (send)
//!      │version │        │version │        │
//!      ├────────┴────────┼────────┴────────┤
//!    4 │     status      │ class specific  │
//!      ├─────────────────┴─────────────────┤
//!    8 │          transaction ID           │
//!   12 │                                   │
//!      ├─────────────────┬─────────────────┤
//!   16 │  attribute ID   │    reserved     │  0x10 REQ … 0x18 SIDR_REP
//!      ├─────────────────┴─────────────────┤
//!   20 │        attribute modifier         │  options of ECE
//!      ├───────────────────────────────────┤
//!   24 │      232 bytes of the message     │
//! ```
//!
//! The messages, with offsets from there. Words have 32 bits and are drawn from bit 31 to bit 0; a number in brackets
//! is the width of a field.
//!
//! ```text
//! REQ  0 local ID                          REP  0 local ID
//!      4 0 [8], vendor [24]                     4 remote ID
//!      8 service ID [64]                        8 Q_Key
//!     16 CA GUID [64]                          12 QPN [24], vendor bits 23–16
//!     24 0                                     16 EE context [24], vendor bits 15–8
//!     28 Q_Key                                 20 starting PSN [24], vendor bits 7–0
//!     32 QPN [24], responder resources [8]     24 responder resources [8], initiator depth [8],
//!     36 EE context [24], initiator depth [8]     ACK delay [5], failover [2], flow control [1],
//!     40 remote EE context [24], remote           RNR retries [3], SRQ [1], 0 [4]
//!        response timeout [5], transport [2],  28 CA GUID [64]
//!        flow control [1]                      36 private data, 196 bytes
//!     44 starting PSN [24], local response
//!        timeout [5], retries [3]         MRA   0 local ID
//!     48 P_Key [16], MTU [4], RDC [1],          4 remote ID
//!        RNR retries [3], CM retries [4],       8 message [2], 0 [6], timeout [5], 0 [3]
//!        SRQ [1], extended transport [3]       10 private data, 222 bytes
//!     52 primary path, 44 bytes
//!     96 alternate path, 44 bytes         REJ   0 local ID
//!    140 private data, 92 bytes                 4 remote ID
//!                                               8 message [2], 0 [6], length of info [7], 0 [1], reason [16]
//! path 0 local LID [16], remote LID [16]       12 info, 72 bytes
//!      4 local GID [128]                       84 private data, 148 bytes
//!     20 remote GID [128]
//!     36 flow label [20], 0 [6], rate [6] RTU, DREP
//!     40 traffic class [8], hop limit [8],      0 local ID
//!        SL [4], subnet local [1], 0 [3],       4 remote ID
//!        ACK timeout [5], 0 [3]                 8 private data, 224 bytes
//!
//! SIDR_REQ                                DREQ  0 local ID
//!      0 request ID                             4 remote ID
//!      4 P_Key [16], 0 [16]                     8 remote QPN [24], 0 [8]
//!      8 service ID [64]                       12 private data, 220 bytes
//!     16 private data, 216 bytes
//!                                         SIDR_REP
//! IP addressing                                 0 request ID
//!      0 version [8] is 0, IP version [4],      4 status [8], length of info [8], vendor bits 23–8
//!        0 [4], source port [16]                8 QPN [24], vendor bits 7–0
//!      4 source address [128]                  12 service ID [64]
//!     20 destination address [128]             20 Q_Key
//!        IPv4 in the last 4 bytes              24 info, 72 bytes
//!                                              96 private data, 136 bytes
//! ```
//!
//! LAP and APR, which move a connection to its alternate path, are not decoded: the kernel ignores them on RoCE, too.
//! The alternate path of a REQ is not read, and zeros are written.

mod layout;

use core::fmt;
use core::net::{IpAddr, Ipv6Addr};
use layout::{RawIp, RawMad};
use zerocopy::FromBytes;

/// Bytes of a MAD.
pub const MAD: usize = 256;
/// The queue pair of general services, from which and to which the messages go.
pub const QPN: u32 = 1;
/// The Q_Key of that queue pair: `IB_QP1_QKEY`.
pub const QKEY: u32 = 0x8001_0000;
/// Bytes of [`IpAddressing`].
pub const IP_ADDRESSING: usize = 36;

const BASE_VERSION: u8 = 1;
const CLASS: u8 = 7;
const CLASS_VERSION: u8 = 2;
/// The method of each message: `IB_MGMT_METHOD_SEND`.
const SEND: u8 = 3;

/// Options that a vendor's devices agree on (ECE).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ece {
    /// The vendor's ID, 24 bits.
    pub vendor: u32,
    /// The vendor's options.
    pub options: u32,
}

/// The type of the queue pairs of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Service {
    /// Reliable connection: transport 0.
    #[default]
    Rc,
    /// Unreliable connection: transport 1.
    Uc,
    /// Extended reliable connection: transport 3, extended transport 1.
    Xrc,
}

/// The message that an MRA or a REJ is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum About {
    /// A REQ.
    #[default]
    Req,
    /// A REP.
    Rep,
    /// Another one.
    Other,
}

/// A path of a connection, from the sender of the REQ to its receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Path {
    /// LID of the sender's port; 0xffff on RoCE.
    pub local_lid: u16,
    /// LID of the receiver's port; 0xffff on RoCE.
    pub remote_lid: u16,
    /// GID of the sender's port.
    pub local_gid: [u8; 16],
    /// GID of the receiver's port.
    pub remote_gid: [u8; 16],
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// `enum ib_rate`, 6 bits.
    pub rate: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Service level, 4 bits.
    pub service_level: u8,
    /// Whether both ports are in one subnet.
    pub subnet_local: bool,
    /// Acknowledgement timeout of the receiver's queue pair: 4.096 µs · 2ⁿ, 5 bits.
    pub ack_timeout: u8,
}

/// REQ: asks for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Req {
    /// The sender's number of the connection.
    pub local_id: u32,
    /// Options.
    pub ece: Ece,
    /// The service: [`service_id`].
    pub service_id: u64,
    /// GUID of the sender's device.
    pub ca_guid: u64,
    /// Q_Key, of RD.
    pub qkey: u32,
    /// The sender's queue pair, 24 bits.
    pub qpn: u32,
    /// Reads and atomics that the sender answers at once.
    pub responder_resources: u8,
    /// Reads and atomics that the sender has in flight.
    pub initiator_depth: u8,
    /// Time in which the receiver is to answer: 4.096 µs · 2ⁿ, 5 bits.
    pub remote_response_timeout: u8,
    /// Type of the queue pairs.
    pub service: Service,
    /// Whether the sender has end-to-end flow control.
    pub flow_control: bool,
    /// First PSN that the sender expects, 24 bits.
    pub starting_psn: u32,
    /// Time in which the sender answers: 4.096 µs · 2ⁿ, 5 bits.
    pub local_response_timeout: u8,
    /// `retry_cnt` of both queue pairs, 3 bits.
    pub retries: u8,
    /// Partition key.
    pub pkey: u16,
    /// `enum ib_mtu` of the path: 1 to 5.
    pub mtu: u8,
    /// `rnr_retry` of the receiver's queue pair, 3 bits.
    pub rnr_retries: u8,
    /// How often a message of the connection manager is sent again, 4 bits.
    pub cm_retries: u8,
    /// Whether the sender's queue pair has a shared receive queue.
    pub srq: bool,
    /// The path.
    pub path: Path,
    /// Private data; [`IpAddressing`] and 56 bytes if the service is one of rdma_cm's.
    pub private_data: [u8; 92],
}

/// MRA: the answer to a message takes time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mra {
    /// The sender's number of the connection.
    pub local_id: u32,
    /// The receiver's number of the connection.
    pub remote_id: u32,
    /// The message.
    pub about: About,
    /// The time that it takes: 4.096 µs · 2ⁿ, 5 bits.
    pub service_timeout: u8,
    /// Private data.
    pub private_data: [u8; 222],
}

/// REJ: refuses a connection, or ends a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rej {
    /// The sender's number of the connection, or 0 if it has none.
    pub local_id: u32,
    /// The receiver's number of the connection, or 0 if the sender does not know it.
    pub remote_id: u32,
    /// The message that is refused.
    pub about: About,
    /// The reason: `enum ib_cm_rej_reason`.
    pub reason: u16,
    /// Bytes of `info` that count: at most 72.
    pub info_length: u8,
    /// Additional information on the reason: on a timeout the GUID of the sender's device.
    pub info: [u8; 72],
    /// Private data.
    pub private_data: [u8; 148],
}

/// REP: accepts a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rep {
    /// The sender's number of the connection.
    pub local_id: u32,
    /// The receiver's number of the connection.
    pub remote_id: u32,
    /// Options.
    pub ece: Ece,
    /// Q_Key, of RD.
    pub qkey: u32,
    /// The sender's queue pair, 24 bits; 0 with XRC.
    pub qpn: u32,
    /// The sender's end-to-end context, 24 bits; with XRC its queue pair.
    pub ee_context: u32,
    /// First PSN that the sender expects, 24 bits.
    pub starting_psn: u32,
    /// Reads and atomics that the sender answers at once.
    pub responder_resources: u8,
    /// Reads and atomics that the sender has in flight.
    pub initiator_depth: u8,
    /// Time until the sender's device acknowledges: 4.096 µs · 2ⁿ, 5 bits.
    pub ack_delay: u8,
    /// Whether the sender takes the alternate path: 0 for yes, 2 bits.
    pub failover: u8,
    /// Whether the sender has end-to-end flow control.
    pub flow_control: bool,
    /// `rnr_retry` of the receiver's queue pair, 3 bits.
    pub rnr_retries: u8,
    /// Whether the sender's queue pair has a shared receive queue.
    pub srq: bool,
    /// GUID of the sender's device.
    pub ca_guid: u64,
    /// Private data.
    pub private_data: [u8; 196],
}

/// RTU and DREP: confirm a REP, or the end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confirmation {
    /// The sender's number of the connection.
    pub local_id: u32,
    /// The receiver's number of the connection.
    pub remote_id: u32,
    /// Private data.
    pub private_data: [u8; 224],
}

/// DREQ: ends a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dreq {
    /// The sender's number of the connection.
    pub local_id: u32,
    /// The receiver's number of the connection.
    pub remote_id: u32,
    /// The receiver's queue pair, 24 bits.
    pub remote_qpn: u32,
    /// Private data.
    pub private_data: [u8; 220],
}

/// SIDR_REQ: asks a datagram service for its queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrReq {
    /// The sender's number of the request.
    pub request_id: u32,
    /// Partition key.
    pub pkey: u16,
    /// The service: [`service_id`].
    pub service_id: u64,
    /// Private data; [`IpAddressing`] and 180 bytes if the service is one of rdma_cm's.
    pub private_data: [u8; 216],
}

/// SIDR_REP: answers with a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrRep {
    /// The number of the request.
    pub request_id: u32,
    /// 0, or why there is no queue pair: `enum ib_cm_sidr_status`.
    pub status: u8,
    /// Options. The kernel writes bits 0 to 15 of the vendor alone.
    pub ece: Ece,
    /// The queue pair, 24 bits.
    pub qpn: u32,
    /// The service.
    pub service_id: u64,
    /// The queue pair's Q_Key.
    pub qkey: u32,
    /// Bytes of `info` that count: at most 72.
    pub info_length: u8,
    /// Additional information on the status.
    pub info: [u8; 72],
    /// Private data.
    pub private_data: [u8; 136],
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// Asks for a connection.
    Req(Req),
    /// The answer takes time.
    Mra(Mra),
    /// Refuses a connection.
    Rej(Rej),
    /// Accepts a connection.
    Rep(Rep),
    /// Confirms a REP.
    Rtu(Confirmation),
    /// Ends a connection.
    Dreq(Dreq),
    /// Confirms the end of a connection.
    Drep(Confirmation),
    /// Asks a datagram service for its queue pair.
    SidrReq(SidrReq),
    /// Answers with a queue pair.
    SidrRep(SidrRep),
}

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BadMad {
    /// Another number of bytes than 256.
    Length(usize),
    /// A field of the header has another value than a message of the connection manager has.
    Header(&'static str, u16),
    /// The attribute ID of no message, or of one that is not built: LAP and APR.
    Attribute(u16),
    /// A field of the message has a value that means nothing.
    Field(&'static str, u16),
}

impl fmt::Display for BadMad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BadMad::Length(length) => write!(f, "a MAD has {MAD} bytes, not {length}"),
            BadMad::Header(field, value) => write!(f, "a MAD of another kind: {field} {value}"),
            BadMad::Attribute(value) => write!(f, "no message has the attribute ID {value:#x}"),
            BadMad::Field(field, value) => write!(f, "{value} is no {field}"),
        }
    }
}

impl core::error::Error for BadMad {}

/// Encodes a message; `transaction` is the transaction ID, which an answer has of what it answers. Of a field that is
/// wider than its place the low bits are written.
pub fn encode(transaction: u64, message: &Message) -> [u8; MAD] {
    let (attribute, modifier, body) = layout::write(message);
    let mad = RawMad {
        base_version: BASE_VERSION,
        class: CLASS,
        class_version: CLASS_VERSION,
        method: SEND,
        status: 0.into(),
        class_specific: 0.into(),
        transaction: transaction.into(),
        attribute: attribute.into(),
        reserved: 0.into(),
        modifier: modifier.into(),
        body,
    };
    zerocopy::transmute!(mad)
}

/// Decodes a message, and its transaction ID. Reserved bits are not looked at.
///
/// # Errors
///
/// The bytes are no message of the connection manager.
pub fn decode(bytes: &[u8]) -> Result<(u64, Message), BadMad> {
    let mad = RawMad::ref_from_bytes(bytes).map_err(|_| BadMad::Length(bytes.len()))?;
    for (field, value, expected) in [
        ("base version", mad.base_version, BASE_VERSION),
        ("class", mad.class, CLASS),
        ("class version", mad.class_version, CLASS_VERSION),
        ("method", mad.method, SEND),
    ] {
        if value != expected {
            return Err(BadMad::Header(field, value.into()));
        }
    }
    let message = layout::read(mad.attribute.get(), mad.modifier.get(), &mad.body)?;
    Ok((mad.transaction.get(), message))
}

/// The ID of a service of rdma_cm: a port of a port space (`enum rdma_ucm_port_space`).
pub fn service_id(space: u16, port: u16) -> u64 {
    u64::from(space) << 16 | u64::from(port)
}

/// The port space and the port of a service; `None` for one that is not rdma_cm's.
pub fn port_of(service_id: u64) -> Option<(u16, u16)> {
    let space = u16::try_from(service_id >> 16).ok().filter(|space| *space != 0)?;
    Some((space, service_id as u16))
}

/// The addresses of a connection of rdma_cm. Both are of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpAddressing {
    /// Port of the sender.
    pub source_port: u16,
    /// Address of the sender.
    pub source: IpAddr,
    /// Address of the receiver.
    pub destination: IpAddr,
}

impl IpAddressing {
    /// Encodes the addresses. If one is of IPv4 and one of IPv6, both are written as those of IPv6.
    pub fn encode(&self) -> [u8; IP_ADDRESSING] {
        let both = [self.source, self.destination];
        let v4 = both.iter().all(IpAddr::is_ipv4);
        let octets = |address: IpAddr| match address {
            IpAddr::V4(address) if v4 => Ipv6Addr::from(u128::from(u32::from(address))).octets(),
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        };
        let raw = RawIp {
            version: 0,
            ip_version: if v4 { 4 << 4 } else { 6 << 4 },
            source_port: self.source_port.into(),
            source: octets(self.source),
            destination: octets(self.destination),
        };
        zerocopy::transmute!(raw)
    }

    /// Decodes the addresses at the start of private data.
    ///
    /// # Errors
    ///
    /// There are none: another version, another family, or too few bytes.
    pub fn decode(private_data: &[u8]) -> Result<IpAddressing, BadMad> {
        let (raw, _) =
            RawIp::ref_from_prefix(private_data).map_err(|_| BadMad::Length(private_data.len()))?;
        if raw.version != 0 {
            return Err(BadMad::Field("version of IP addressing", raw.version.into()));
        }
        let address = |octets: [u8; 16]| match raw.ip_version >> 4 {
            4 => {
                let [.., a, b, c, d] = octets;
                Ok(IpAddr::from([a, b, c, d]))
            }
            6 => Ok(IpAddr::from(octets)),
            version => Err(BadMad::Field("version of IP", version.into())),
        };
        let (source, destination) = (address(raw.source)?, address(raw.destination)?);
        Ok(IpAddressing { source_port: raw.source_port.get(), source, destination })
    }
}
