//! Connecting two queue pairs: the data that each needs of the other, and the transitions from `RESET` to `RTS`.
//!
//! The program sends endpoints from peer to peer: by a TCP connection, a file, a channel.

use super::attr::QpAttr;
use super::control::QpControl;
use super::state::{QpState, QpType};
use crate::access::Access;
use crate::address_vector::{AddressVector, GlobalRoute};
use crate::device_attr::AtomicCap;
use crate::error::{Error, Result, narrow};
use crate::number::{Gid, Psn, Qkey, Qpn};
use crate::port::{GidEntry, LinkLayer, Mtu, PortAttr};
use crate::provider::RdAtomic;

/// Reads and atomics that a queue pair answers at once, unless its device can do less. Most hardware can do
/// as many.
const RD_ATOMIC: u32 = 16;

/// The key of datagram queue pairs unless another is chosen.
const QKEY: Qkey = Qkey(0x1111_1111);

/// The data of a queue pair that a peer needs to connect to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Endpoint {
    /// The queue pair's number.
    pub qpn: Qpn,
    /// The number of the first packet that it sends.
    pub psn: Psn,
    /// Global identifier of its port.
    pub gid: Gid,
    /// Local identifier of its port; 0 on Ethernet.
    pub lid: u16,
    /// The MTU of its port; the smaller one of both ends' is used.
    pub mtu: Mtu,
    /// The number of reads and atomics that the queue pair answers at once: the peer keeps no more under way.
    pub rd_atomic: u8,
    /// The key that datagrams to it must carry.
    pub qkey: Qkey,
}

impl Endpoint {
    /// The length of [`to_bytes`](Self::to_bytes).
    pub const BYTES: usize = 40;

    /// Encodes the endpoint for peers that agree on no other format. The bytes are the same on every machine.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let Endpoint { qpn, psn, gid, lid, mtu, rd_atomic, qkey } = self;
        let mut bytes = [0; Self::BYTES];
        let fields: [&[u8]; 8] = [
            &MAGIC,
            &qpn.0.to_be_bytes(),
            &psn.0.to_be_bytes(),
            &gid.0,
            &lid.to_be_bytes(),
            &[mtu.0],
            &[*rd_atomic],
            &qkey.0.to_be_bytes(),
        ];
        // Four bytes are reserved for later fields.
        for (place, byte) in bytes.iter_mut().zip(fields.into_iter().flatten()) {
            *place = *byte;
        }
        bytes
    }

    /// Decodes the bytes of [`to_bytes`](Self::to_bytes); `None` for any other bytes.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Endpoint> {
        fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
            let (field, behind) = rest.split_first_chunk()?;
            *rest = behind;
            Some(*field)
        }
        let mut rest = bytes.as_slice();
        if take(&mut rest)? != MAGIC {
            return None;
        }
        let endpoint = Endpoint {
            qpn: Qpn(u32::from_be_bytes(take(&mut rest)?)),
            psn: Psn(u32::from_be_bytes(take(&mut rest)?)),
            gid: Gid(take(&mut rest)?),
            lid: u16::from_be_bytes(take(&mut rest)?),
            mtu: Mtu(u8::from_be_bytes(take(&mut rest)?)),
            rd_atomic: u8::from_be_bytes(take(&mut rest)?),
            qkey: Qkey(u32::from_be_bytes(take(&mut rest)?)),
        };
        (endpoint.qpn.0 >> 24 == 0 && endpoint.psn.0 >> 24 == 0).then_some(endpoint)
    }
}

/// The first bytes of an encoded endpoint.
const MAGIC: [u8; 4] = *b"uvb1";

/// The queue pair's own record of the endpoint that it gave out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Local {
    endpoint: Endpoint,
    port: u32,
    gid_index: u32,
    /// Whether packets to every destination need a global route header.
    global: bool,
    /// Reads and atomics that may be under way from here.
    max_rd_atomic: u8,
    /// Whether the device has atomics.
    atomics: bool,
}

/// Options of a connection, with defaults that fit most networks.
///
/// ```no_run
/// # fn f(qp: &uverbs::QueuePair, remote: &uverbs::Endpoint) -> uverbs::Result<()> {
/// use uverbs::Handshake;
/// qp.handshake(remote, &Handshake::new().timeout(18).rnr_retry(3))?;
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Handshake {
    access: Option<Access>,
    pkey_index: u16,
    timeout: u8,
    retry_count: u8,
    rnr_retry: u8,
    min_rnr_timer: u8,
    max_rd_atomic: u8,
    service_level: u8,
    traffic_class: u8,
    flow_label: u32,
    hop_limit: u8,
}

impl Default for Handshake {
    fn default() -> Self {
        Handshake {
            access: None,
            pkey_index: 0,
            timeout: 14,
            retry_count: 6,
            rnr_retry: 7,
            min_rnr_timer: 12,
            max_rd_atomic: u8::MAX,
            service_level: 0,
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 64,
        }
    }
}

impl Handshake {
    /// The defaults.
    pub fn new() -> Self {
        Handshake::default()
    }

    /// The rights of the peer through the queue pair, within those of memory regions and windows. Unless set, writes,
    /// reads and, if the device has them, atomics.
    pub fn access(mut self, access: Access) -> Self {
        self.access = Some(access);
        self
    }

    /// Index of the partition key; 0 unless set.
    pub fn pkey_index(mut self, index: u16) -> Self {
        self.pkey_index = index;
        self
    }

    /// Wait for an acknowledgement, 4.096 µs · 2ⁿ; see [`QpAttr::timeout`]. 14 (67 ms) unless set.
    pub fn timeout(mut self, n: u8) -> Self {
        self.timeout = n;
        self
    }

    /// Retries before giving up, 0 to 7; 6 unless set, because soft-RoCE retries without end if it
    /// is 7, and a request to a peer that is gone would never be over.
    pub fn retry_count(mut self, count: u8) -> Self {
        self.retry_count = count;
        self
    }

    /// Retries to a peer without receives, 0 to 7; 7, without end, unless set.
    pub fn rnr_retry(mut self, count: u8) -> Self {
        self.rnr_retry = count;
        self
    }

    /// Code of the wait asked of a peer that finds no receive; see [`QpAttr::min_rnr_timer`]. 12
    /// (640 µs) unless set.
    pub fn min_rnr_timer(mut self, code: u8) -> Self {
        self.min_rnr_timer = code;
        self
    }

    /// Reads and atomics under way from here at most. Unless set, as many as the device can have
    /// and the peer answers, which are the limits in any case.
    pub fn max_rd_atomic(mut self, count: u8) -> Self {
        self.max_rd_atomic = count;
        self
    }

    /// Service level, 0 to 15; 0 unless set.
    pub fn service_level(mut self, level: u8) -> Self {
        self.service_level = level;
        self
    }

    /// Traffic class; on RoCE v2 the type of service. 0 unless set.
    pub fn traffic_class(mut self, class: u8) -> Self {
        self.traffic_class = class;
        self
    }

    /// Flow label, 20 bits; on RoCE v2 the UDP source port is derived from it. 0 unless set.
    pub fn flow_label(mut self, label: u32) -> Self {
        self.flow_label = label;
        self
    }

    /// Routers that a packet may pass; 64 unless set.
    pub fn hop_limit(mut self, limit: u8) -> Self {
        self.hop_limit = limit;
        self
    }

    /// The path from `local` to `remote`: by local identifiers within an InfiniBand subnet, else
    /// by global ones.
    fn path(&self, local: &Local, remote: &Endpoint) -> AddressVector {
        let other_subnet = local.endpoint.gid.0[..8] != remote.gid.0[..8];
        let global = GlobalRoute {
            dgid: remote.gid,
            sgid_index: local.gid_index,
            flow_label: self.flow_label,
            hop_limit: self.hop_limit,
            traffic_class: self.traffic_class,
        };
        AddressVector {
            port: local.port,
            dlid: remote.lid,
            global: (local.global || other_subnet).then_some(global),
            service_level: self.service_level,
            src_path_bits: 0,
            static_rate: 0,
        }
    }

    fn to_init(self, qp_type: QpType, local: &Local) -> QpAttr {
        let attr = QpAttr::new().state(QpState::INIT).port(local.port).pkey_index(self.pkey_index);
        match qp_type {
            QpType::UD => attr.qkey(local.endpoint.qkey),
            _ => attr.access(self.access.unwrap_or(match local.atomics {
                true => Access::ALL_REMOTE,
                // The driver of a device without atomics refuses to allow them.
                false => Access::ALL_REMOTE - Access::REMOTE_ATOMIC,
            })),
        }
    }

    fn to_rtr(self, qp_type: QpType, local: &Local, remote: &Endpoint) -> QpAttr {
        let attr = QpAttr::new().state(QpState::RTR);
        if qp_type == QpType::UD {
            return attr;
        }
        let attr = attr
            .path(self.path(local, remote))
            .path_mtu(local.endpoint.mtu.min(remote.mtu))
            .dest_qpn(remote.qpn)
            .rq_psn(remote.psn);
        match qp_type {
            QpType::RC | QpType::XRC_TGT => {
                attr.max_dest_rd_atomic(local.endpoint.rd_atomic).min_rnr_timer(self.min_rnr_timer)
            }
            _ => attr,
        }
    }

    fn to_rts(self, qp_type: QpType, local: &Local, remote: &Endpoint) -> QpAttr {
        let attr = QpAttr::new().state(QpState::RTS).sq_psn(local.endpoint.psn);
        match qp_type {
            QpType::XRC_TGT => attr.timeout(self.timeout),
            QpType::RC | QpType::XRC_INI => attr
                .timeout(self.timeout)
                .retry_count(self.retry_count)
                .rnr_retry(self.rnr_retry)
                .max_rd_atomic(self.max_rd_atomic.min(local.max_rd_atomic).min(remote.rd_atomic)),
            _ => attr,
        }
    }
}

impl QpControl {
    /// The facts that a peer needs to connect to this queue pair, over the port of an entry of its table of global
    /// identifiers; [`default_gid`](crate::Context::default_gid) chooses a good one.
    ///
    /// The queue pair remembers it for [`handshake`](Self::handshake); a second call replaces it,
    /// with another random sequence number.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a port that the device does not have, or an entry that is empty now, holds another identifier, is
    /// beyond the table, or has an index above 255, which is what paths can carry.
    pub fn endpoint(&self, gid: &GidEntry) -> Result<Endpoint> {
        const VERB: &str = "endpoint";
        let (port, gid_index) = (gid.port, gid.index);
        let context = self.context();
        let in_verb = |error: Error| error.in_verb(VERB);
        let attr = context.query_port(port).map_err(in_verb)?;
        let entry = context.query_gid(port, gid_index).map_err(in_verb)?;
        if entry.gid.is_zero() {
            let detail = format!("index {gid_index} of port {port} holds no global identifier");
            return Err(Error::invalid(VERB, detail));
        }
        if (entry.gid, entry.gid_type) != (gid.gid, gid.gid_type) {
            return Err(Error::invalid(
                VERB,
                format!(
                    "index {gid_index} of port {port} holds {} ({}), and not {} ({}): take an entry of this device's \
                     table as it is now",
                    entry.gid, entry.gid_type, gid.gid, gid.gid_type
                ),
            ));
        }
        narrow(VERB, "gid_index", gid_index)?;
        let limits = match context.file.provider.rd_atomic() {
            Some(limits) => limits,
            None => {
                let device = context.query_device().map_err(in_verb)?;
                RdAtomic {
                    answered: device.max_qp_rd_atom,
                    sent: device.max_qp_init_rd_atom,
                    atomics: device.atomic_cap != AtomicCap::NONE,
                }
            }
        };
        let endpoint = Endpoint {
            qpn: self.qpn(),
            // Random, so that packets of an earlier connection between the same numbers are not taken for
            // the new one's.
            psn: Psn::new(context.device().platform().random() as u32),
            gid: entry.gid,
            lid: attr.lid,
            mtu: attr.active_mtu,
            rd_atomic: limits.answered.min(RD_ATOMIC) as u8,
            qkey: QKEY,
        };
        let local = Local {
            endpoint,
            port,
            gid_index,
            global: needs_global(&attr),
            max_rd_atomic: limits.sent.min(u8::MAX.into()) as u8,
            atomics: limits.atomics,
        };
        *self.qp.local.lock().ok_or_else(|| Error::forked(VERB))? = Some(local);
        Ok(endpoint)
    }

    /// Connects to `remote`: `INIT`, `RTR`, `RTS`, with options whose defaults fit most networks.
    ///
    /// Both sides do the same; over XRC one is an initiator and the other a target. A datagram queue
    /// pair has no peer and is made ready with its own endpoint.
    ///
    /// The call exchanges nothing with the peer, and returns whether or not the peer is ready. A peer
    /// whose queue pair is not yet in `RTR` drops arriving packets: over UC the message is lost, and
    /// over RC the sender repeats it [`retry_count`](Handshake::retry_count) times, each time after the
    /// [`timeout`](Handshake::timeout). With the defaults, a first send can fail in this way with
    /// [`RETRY_EXC_ERR`](crate::WcStatus::RETRY_EXC_ERR) if the peer is half a second later. Two
    /// programs therefore tell each other when their `handshake` has returned, and each sends only after
    /// the other's message, as `aio::tokio::handshake` does:
    ///
    /// ```no_run
    /// use std::io::{Error, Read, Result, Write};
    /// use std::net::TcpStream;
    /// use uverbs::{Endpoint, GidEntry, Handshake, QpControl};
    ///
    /// /// Connects `qp` to the queue pair of the program at the other end, which calls the same.
    /// fn connect(qp: &QpControl, mut stream: TcpStream, gid: &GidEntry) -> Result<()> {
    ///     stream.write_all(&qp.endpoint(gid)?.to_bytes())?;
    ///     let mut bytes = [0; Endpoint::BYTES];
    ///     stream.read_exact(&mut bytes)?;
    ///     let peer = Endpoint::from_bytes(&bytes).ok_or_else(|| Error::other("no endpoint"))?;
    ///     qp.handshake(&peer, &Handshake::new())?;
    ///     // This side can receive now. The peer's byte says that it can, too.
    ///     stream.write_all(b"R")?;
    ///     stream.read_exact(&mut [0; 1])
    /// }
    /// ```
    ///
    /// A receive can be posted from `INIT` on. Over RC a message that finds none waits; over UC
    /// and UD it is lost, so bring the queue pair to `INIT` with [`modify`](Self::modify), post,
    /// and shake hands then.
    ///
    /// If an [`OwnedCompletionQueue`](crate::owned::OwnedCompletionQueue::adopt) or a queue of
    /// [`aio`](crate::aio) shall take the queue pair over, adopt it first and connect it then.
    ///
    /// # Errors
    ///
    /// `EINVAL` if [`endpoint`](Self::endpoint) was not called before, for a transport that is
    /// not connected like this (raw packets) and in states other than `RESET` and `INIT`;
    /// else as [`modify`](Self::modify).
    pub fn handshake(&self, remote: &Endpoint, options: &Handshake) -> Result<()> {
        const VERB: &str = "handshake";
        let qp_type = self.qp_type();
        if qp_type == QpType::RAW_PACKET {
            let detail = format!("a queue pair of type {qp_type}; RC, UC, UD and XRC can be");
            return Err(Error::invalid(VERB, detail));
        }
        let local = self.local(VERB)?;
        if remote.mtu.bytes().is_none() {
            let detail = format!("the peer's MTU has the unknown code {}", remote.mtu.0);
            return Err(Error::invalid(VERB, detail));
        }
        let in_verb = |error: Error| error.in_verb(VERB);
        self.modify(&options.to_init(qp_type, &local)).map_err(in_verb)?;
        self.modify(&options.to_rtr(qp_type, &local, remote)).map_err(in_verb)?;
        self.modify(&options.to_rts(qp_type, &local, remote)).map_err(in_verb)
    }

    /// The path to a peer, for an address handle, from the port and the global identifier given to
    /// [`endpoint`](Self::endpoint).
    ///
    /// # Errors
    ///
    /// `EINVAL` if [`endpoint`](Self::endpoint) was not called before.
    pub fn path_to(&self, remote: &Endpoint) -> Result<AddressVector> {
        Ok(Handshake::new().path(&self.local("path_to")?, remote))
    }

    fn local(&self, verb: &'static str) -> Result<Local> {
        let local = *self.qp.local.lock().ok_or_else(|| Error::forked(verb))?;
        local.ok_or_else(|| {
            Error::invalid(verb, "port and identifier are unknown: call QpControl::endpoint before")
        })
    }
}

fn needs_global(port: &PortAttr) -> bool {
    port.grh_required || port.link_layer == LinkLayer::ETHERNET
}

#[cfg(test)]
mod tests;
