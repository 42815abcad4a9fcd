//! Messages to and from addresses outside of the fabric: MADs between the queue pairs 1 of two ports.
//!
//! Pairs with `cm_format_req` and the like of `core/cm.c`, and with `cma_format_hdr` and `cma_save_ip_info` of
//! `core/cma.c`. `uverbs_roce::cm` has the bytes; this file says what each field is for.

use super::Ports;
use super::address::Address;
use super::connection::{ACK_TIMEOUT, REJ_INVALID_GID, REJ_INVALID_MTU, REJ_TIMEOUT};
use super::connections::{SIDR_REJECT, refusal, sidr_answer};
use super::message::{About, Body, Ece, Gid, Message, Service, Side, Terms, Transport};
use std::fmt;
use std::net::IpAddr;
use uverbs_roce::cm::{self as mad, BadMad, IP_ADDRESSING, IpAddressing, MAD};

/// The LID of a port that has none.
const PERMISSIVE_LID: u16 = 0xffff;
/// `IB_RATE_40_GBPS`, the highest rate that `cma_resolve_iboe_route` knows.
const RATE: u8 = 7;
const HOP_LIMIT: u8 = 64;

/// A MAD for an address outside of the fabric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outgoing {
    pub(crate) to: IpAddr,
    pub(crate) mad: [u8; MAD],
}

/// The reason why a MAD from outside is not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// It is no message.
    Mad(BadMad),
    /// It came to an address that no port has, or from one that a port of the fabric has.
    Address,
    /// Its request names addresses that it did not come from or to, or an MTU above the port's. This is the answer.
    Request(Box<Message>),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::Mad(bad) => bad.fmt(f),
            Refused::Address => f.write_str("the MAD has a foreign destination, or our own source"),
            Refused::Request(_) => f.write_str("the request does not fit its addresses or the MTU"),
        }
    }
}

impl Ports<'_> {
    /// The GUID of a device for peers outside: of its node and its address, as each process numbers its devices alike.
    fn guid_outside(&self, device: usize, at: &Gid) -> u64 {
        let of_address = u128::from_be_bytes(*at);
        let of_address = (of_address >> 64) as u64 ^ of_address as u64;
        crate::kernel::guid(device) ^ of_address.rotate_left(24)
    }

    /// Encodes a message to an address outside of the fabric; `None` if the device has no way out.
    pub(super) fn encode(&self, message: &Message) -> Option<Outgoing> {
        let (device, _) = self.find(&message.from)?;
        let driver = self.0.get(device).filter(|driver| driver.is_exposed())?;
        if !driver.has_link() {
            return None;
        }
        let guid = self.guid_outside(device, &message.from);
        let encoded = encode(message, guid, driver.pkey());
        let mad = mad::encode(message.transaction, &encoded);
        Some(Outgoing { to: ip(message.to), mad })
    }

    /// Decodes a MAD that came from one address to another.
    pub(super) fn decode(&self, (from, to): (Gid, Gid), bytes: &[u8]) -> Result<Message, Refused> {
        let (transaction, decoded) = mad::decode(bytes).map_err(Refused::Mad)?;
        let (device, _) = self.find(&to).ok_or(Refused::Address)?;
        if self.find(&from).is_some() || !self.0[device].has_link() {
            return Err(Refused::Address);
        }
        let (local, remote, body, fits) = decode(&decoded, (from, to));
        let message = Message { from, to, local, remote, transaction, body };
        let reason = match &message.body {
            _ if !fits => REJ_INVALID_GID,
            Body::Req { terms, .. } if terms.mtu > self.0[device].interface.mtu => REJ_INVALID_MTU,
            _ => return Ok(message),
        };
        let answer = match &message.body {
            Body::SidrReq { .. } => {
                sidr_answer(&message, SIDR_REJECT, (0, 0, Ece::default()), Vec::new())
            }
            _ => refusal(&message, About::Req, reason),
        };
        Err(Refused::Request(Box::new(answer)))
    }
}

/// The IP address of a GID.
fn ip(gid: Gid) -> IpAddr {
    Address::of_gid(&gid, 0).ip
}

/// Private data in its room, from a byte on; the rest is zero.
fn fill<const N: usize>(data: &[u8], from: usize) -> [u8; N] {
    let mut room = [0; N];
    room[from..].iter_mut().zip(data).for_each(|(to, from)| *to = *from);
    room
}

/// Private data behind the addresses of both ends.
fn address<const N: usize>(message: &Message, service: &Service, data: &[u8]) -> [u8; N] {
    let source_port = service.source_port;
    let addressing =
        IpAddressing { source_port, source: ip(message.from), destination: ip(message.to) };
    let mut room = fill(data, IP_ADDRESSING);
    room[..IP_ADDRESSING].copy_from_slice(&addressing.encode());
    room
}

impl From<Ece> for mad::Ece {
    fn from(Ece { vendor, options }: Ece) -> mad::Ece {
        mad::Ece { vendor, options }
    }
}

impl From<mad::Ece> for Ece {
    fn from(mad::Ece { vendor, options }: mad::Ece) -> Ece {
        Ece { vendor, options }
    }
}

/// The MAD of a message.
pub(super) fn encode(message: &Message, guid: u64, pkey: u16) -> mad::Message {
    let (local_id, remote_id) = (message.local, message.remote);
    match &message.body {
        Body::Req { service, kind, side, terms } => mad::Message::Req(mad::Req {
            local_id,
            ece: side.ece.into(),
            service_id: mad::service_id(service.space, service.port),
            ca_guid: guid,
            qkey: 0,
            qpn: side.qpn,
            responder_resources: side.responder_resources,
            initiator_depth: side.initiator_depth,
            remote_response_timeout: terms.response_timeout,
            service: *kind,
            flow_control: side.flow_control != 0,
            starting_psn: side.starting_psn,
            local_response_timeout: terms.response_timeout,
            retries: side.retry_count,
            pkey,
            mtu: terms.mtu,
            rnr_retries: side.rnr_retry_count,
            cm_retries: terms.retries,
            srq: side.srq != 0,
            path: mad::Path {
                local_lid: PERMISSIVE_LID,
                remote_lid: PERMISSIVE_LID,
                local_gid: message.from,
                remote_gid: message.to,
                rate: RATE,
                traffic_class: terms.traffic_class,
                hop_limit: HOP_LIMIT,
                ack_timeout: ACK_TIMEOUT,
                ..mad::Path::default()
            },
            private_data: address(message, service, &side.private_data),
        }),
        Body::Mra { about, timeout } => mad::Message::Mra(mad::Mra {
            local_id,
            remote_id,
            about: *about,
            service_timeout: *timeout,
            private_data: [0; 222],
        }),
        Body::Rep { kind, side } => {
            // As `cm_format_rep`, and `cm_rep_get_qpn`.
            let is_xrc = *kind == Transport::Xrc;
            let (qpn, ee_context) = if is_xrc { (0, side.qpn) } else { (side.qpn, 0) };
            mad::Message::Rep(mad::Rep {
                local_id,
                remote_id,
                ece: side.ece.into(),
                qkey: 0,
                qpn,
                ee_context,
                starting_psn: side.starting_psn,
                responder_resources: side.responder_resources,
                initiator_depth: side.initiator_depth,
                ack_delay: 0,
                failover: 0,
                flow_control: side.flow_control != 0,
                rnr_retries: side.rnr_retry_count,
                srq: is_xrc || side.srq != 0,
                ca_guid: guid,
                private_data: fill(&side.private_data, 0),
            })
        }
        Body::Rtu => {
            mad::Message::Rtu(mad::Confirmation { local_id, remote_id, private_data: [0; 224] })
        }
        Body::Rej { about, reason, private_data } => {
            // A requester that gives up names itself.
            let info = if *reason == REJ_TIMEOUT { &guid.to_be_bytes()[..] } else { &[] };
            mad::Message::Rej(mad::Rej {
                local_id,
                remote_id,
                about: *about,
                reason: *reason as u16,
                info_length: info.len() as u8,
                info: fill(info, 0),
                private_data: fill(private_data, 0),
            })
        }
        Body::Dreq { qpn } => mad::Message::Dreq(mad::Dreq {
            local_id,
            remote_id,
            remote_qpn: *qpn,
            private_data: [0; 220],
        }),
        Body::Drep => {
            mad::Message::Drep(mad::Confirmation { local_id, remote_id, private_data: [0; 224] })
        }
        Body::SidrReq { service, private_data } => mad::Message::SidrReq(mad::SidrReq {
            request_id: local_id,
            pkey,
            service_id: mad::service_id(service.space, service.port),
            private_data: address(message, service, private_data),
        }),
        Body::SidrRep { service, status, qpn, qkey, ece, private_data } => {
            mad::Message::SidrRep(mad::SidrRep {
                request_id: remote_id,
                status: *status as u8,
                ece: (*ece).into(),
                qpn: *qpn,
                service_id: mad::service_id(service.space, service.port),
                qkey: *qkey,
                info_length: 0,
                info: [0; 72],
                private_data: fill(private_data, 0),
            })
        }
    }
}

/// The service of a request; its addresses have to be those that the MAD came from and to. One that is not of rdma_cm
/// has port space 0, where nobody listens.
fn service(id: u64, private_data: &[u8], (from, to): (Gid, Gid)) -> (Service, bool) {
    let Some((space, port)) = mad::port_of(id) else { return (Service::default(), true) };
    match IpAddressing::decode(private_data) {
        Ok(IpAddressing { source_port, source, destination }) => {
            let fits = (source.to_canonical(), destination.to_canonical()) == (ip(from), ip(to));
            (Service { space, port, source_port }, fits)
        }
        Err(_) => (Service { space, port, source_port: 0 }, false),
    }
}

/// The numbers of sender and receiver, the message, and whether a request names the addresses that it came from and to.
pub(super) fn decode(message: &mad::Message, ends: (Gid, Gid)) -> (u32, u32, Body, bool) {
    match message {
        mad::Message::Req(req) => {
            let (service, fits) = service(req.service_id, &req.private_data, ends);
            let fits = fits && (req.path.local_gid, req.path.remote_gid) == ends;
            let side = Side {
                qpn: req.qpn,
                starting_psn: req.starting_psn,
                responder_resources: req.responder_resources,
                initiator_depth: req.initiator_depth,
                flow_control: req.flow_control.into(),
                retry_count: req.retries,
                rnr_retry_count: req.rnr_retries,
                srq: req.srq.into(),
                ece: req.ece.into(),
                private_data: req.private_data[IP_ADDRESSING..].to_vec(),
            };
            let terms = Terms {
                mtu: req.mtu,
                traffic_class: req.path.traffic_class,
                response_timeout: req.local_response_timeout,
                retries: req.cm_retries,
            };
            (req.local_id, 0, Body::Req { service, kind: req.service, side, terms }, fits)
        }
        mad::Message::Mra(mra) => {
            let (about, timeout) = (mra.about, mra.service_timeout);
            (mra.local_id, mra.remote_id, Body::Mra { about, timeout }, true)
        }
        mad::Message::Rej(rej) => {
            let (about, reason) = (rej.about, rej.reason.into());
            let private_data = rej.private_data.to_vec();
            (rej.local_id, rej.remote_id, Body::Rej { about, reason, private_data }, true)
        }
        mad::Message::Rep(rep) => {
            let is_xrc = rep.qpn == 0 && rep.ee_context != 0;
            let kind = if is_xrc { Transport::Xrc } else { Transport::Rc };
            let side = Side {
                qpn: if is_xrc { rep.ee_context } else { rep.qpn },
                starting_psn: rep.starting_psn,
                responder_resources: rep.responder_resources,
                initiator_depth: rep.initiator_depth,
                flow_control: rep.flow_control.into(),
                retry_count: 0,
                rnr_retry_count: rep.rnr_retries,
                srq: rep.srq.into(),
                ece: rep.ece.into(),
                private_data: rep.private_data.to_vec(),
            };
            (rep.local_id, rep.remote_id, Body::Rep { kind, side }, true)
        }
        mad::Message::Rtu(rtu) => (rtu.local_id, rtu.remote_id, Body::Rtu, true),
        mad::Message::Dreq(dreq) => {
            (dreq.local_id, dreq.remote_id, Body::Dreq { qpn: dreq.remote_qpn }, true)
        }
        mad::Message::Drep(drep) => (drep.local_id, drep.remote_id, Body::Drep, true),
        mad::Message::SidrReq(req) => {
            let (service, fits) = service(req.service_id, &req.private_data, ends);
            let private_data = req.private_data[IP_ADDRESSING..].to_vec();
            (req.request_id, 0, Body::SidrReq { service, private_data }, fits)
        }
        mad::Message::SidrRep(rep) => {
            let (space, port) = mad::port_of(rep.service_id).unwrap_or_default();
            let body = Body::SidrRep {
                service: Service { space, port, source_port: 0 },
                status: rep.status.into(),
                qpn: rep.qpn,
                qkey: rep.qkey,
                ece: rep.ece.into(),
                private_data: rep.private_data.to_vec(),
            };
            (0, rep.request_id, body, true)
        }
    }
}
