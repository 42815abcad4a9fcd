//! Paths to peers, for address handles and for the INIT to RTR transition of connected queue pairs.

use crate::error::{Result, narrow};
use crate::number::Gid;
use std::net::Ipv4Addr;
use uverbs_uapi::ah::{ib_uverbs_ah_attr, ib_uverbs_global_route};
use uverbs_uapi::qp::ib_uverbs_qp_dest;

/// The global part of a path: mandatory on Ethernet, and between subnets.
#[doc(alias = "ibv_global_route")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalRoute {
    /// The peer's port.
    pub dgid: Gid,
    /// Index of the local port's own identifier in its table: on Ethernet it chooses address,
    /// VLAN and RoCE version.
    pub sgid_index: u32,
    /// 20 bits; on RoCE v2 the UDP source port is derived from it.
    pub flow_label: u32,
    /// Number of routers that a packet may pass; on RoCE v2 the time to live.
    pub hop_limit: u8,
    /// On RoCE v2 the type of service.
    pub traffic_class: u8,
}

/// A path from a local port to a peer's.
#[doc(alias = "ibv_ah_attr")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressVector {
    /// The local port, from 1.
    pub port: u32,
    /// The peer's local identifier; 0 on Ethernet.
    pub dlid: u16,
    /// The global part.
    pub global: Option<GlobalRoute>,
    /// Service level, 0 to 15.
    pub service_level: u8,
    /// Low bits of the local identifier to send from; 0 on Ethernet.
    pub src_path_bits: u8,
    /// Rate limit as an enumerator of the specification; 0 is the port's rate.
    pub static_rate: u8,
}

/// The header in front of a datagram: which port sent it, and to which.
///
/// A receive on a UD queue pair begins with [40 bytes](Self::BYTES) for it. An InfiniBand or IPv6 header fills them; an
/// IPv4 header fills the last 20, and the 20 bytes before it are undefined. The way back to the sender:
/// [`Context::reply_path`](crate::Context::reply_path).
///
/// ```no_run
/// # use uverbs::{Completion, MemoryRegion};
/// # fn f(inbox: &MemoryRegion, done: &Completion<'_>) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::Grh;
///
/// let mut header = [0; Grh::BYTES];
/// inbox.copy_to(0, &mut header)?;
/// if let Some(grh) = Grh::parse(&header).filter(|_| done.has_grh()) {
///     println!("from {}, to {}", grh.source.ip(), grh.destination.ip());
/// }
/// # Ok(()) }
/// ```
#[doc(alias = "ibv_grh")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grh {
    /// The sender's GID; its [`ip`](Gid::ip) on RoCE v2 is the address that the packet came from.
    pub source: Gid,
    /// The GID that it was sent to: this port's, or a group's.
    pub destination: Gid,
    /// Traffic class; on RoCE v2 the type of service.
    pub traffic_class: u8,
    /// Number of routers that the packet could still have passed.
    pub hop_limit: u8,
    /// The flow label of an IPv6 or InfiniBand header; 0 of an IPv4 header.
    pub flow_label: u32,
    /// Whether it is the header of a RoCE v2 packet, in UDP; otherwise of RoCE v1 or InfiniBand.
    pub is_roce_v2: bool,
}

impl Grh {
    /// Bytes in front of each datagram.
    pub const BYTES: usize = 40;

    /// Reads the header from the first 40 bytes of a received datagram. `None` if there are fewer, or neither
    /// version of the header is there, as in a datagram without one.
    pub fn parse(datagram: &[u8]) -> Option<Grh> {
        let (header, _) = datagram.split_first_chunk::<{ Grh::BYTES }>()?;
        let (_, v4) = header.split_last_chunk::<20>()?;
        // The bytes in front of an IPv4 header may look like version 6, and an IPv6 address like an IPv4 header: the
        // checksum tells, as in the kernel's `ib_get_rdma_header_version`.
        match (header[0] >> 4, v4[0]) {
            (6, 0x45) if !checksum_is_right(v4) => Some(Grh::v6(header)),
            (_, 0x45) => Some(Grh::v4(v4)),
            (6, _) => Some(Grh::v6(header)),
            _ => None,
        }
    }

    fn v4(header: &[u8; 20]) -> Grh {
        let address = |at: usize| {
            Gid::from(Ipv4Addr::new(header[at], header[at + 1], header[at + 2], header[at + 3]))
        };
        Grh {
            source: address(12),
            destination: address(16),
            traffic_class: header[1],
            hop_limit: header[8],
            flow_label: 0,
            is_roce_v2: true,
        }
    }

    fn v6(header: &[u8; Grh::BYTES]) -> Grh {
        /// The next header of IPv6.
        const UDP: u8 = 17;
        let mut gids = [Gid::default(); 2];
        for (gid, bytes) in gids.iter_mut().zip(header[8..].chunks_exact(16)) {
            gid.0.copy_from_slice(bytes);
        }
        let [source, destination] = gids;
        let traffic_class = header[0] << 4 | header[1] >> 4;
        let flow_label = u32::from_be_bytes([0, header[1] & 0xf, header[2], header[3]]);
        let is_roce_v2 = header[6] == UDP;
        Grh { source, destination, traffic_class, hop_limit: header[7], flow_label, is_roce_v2 }
    }
}

/// Whether an IPv4 header's words add up, in ones' complement.
fn checksum_is_right(header: &[u8; 20]) -> bool {
    let words = header.chunks_exact(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    let sum: u32 = words.sum();
    (sum & 0xffff) + (sum >> 16) == 0xffff
}

impl AddressVector {
    /// A path by global identifier, as Ethernet needs it; hop limit 64.
    pub fn global(port: u32, sgid_index: u32, dgid: Gid) -> Self {
        AddressVector {
            port,
            dlid: 0,
            global: Some(GlobalRoute {
                dgid,
                sgid_index,
                flow_label: 0,
                hop_limit: 64,
                traffic_class: 0,
            }),
            service_level: 0,
            src_path_bits: 0,
            static_rate: 0,
        }
    }

    /// A path by local identifier, within an InfiniBand subnet.
    pub fn local(port: u32, dlid: u16) -> Self {
        AddressVector {
            port,
            dlid,
            global: None,
            service_level: 0,
            src_path_bits: 0,
            static_rate: 0,
        }
    }

    /// # Errors
    ///
    /// `EINVAL`, on behalf of `verb`, for a port or an index that the kernel's struct has no room for.
    pub(crate) fn to_ah_attr(self, verb: &'static str) -> Result<ib_uverbs_ah_attr> {
        let sgid_index = self.sgid_index(verb)?;
        let grh = self.global.map(|global| ib_uverbs_global_route {
            dgid: global.dgid.0,
            flow_label: global.flow_label,
            sgid_index,
            hop_limit: global.hop_limit,
            traffic_class: global.traffic_class,
            ..Default::default()
        });
        Ok(ib_uverbs_ah_attr {
            grh: grh.unwrap_or_default(),
            dlid: self.dlid,
            sl: self.service_level,
            src_path_bits: self.src_path_bits,
            static_rate: self.static_rate,
            is_global: grh.is_some().into(),
            port_num: narrow(verb, "port", self.port)?,
            ..Default::default()
        })
    }

    /// The same path for modify and query, whose struct has the fields in another order.
    pub(crate) fn to_qp_dest(self, verb: &'static str) -> Result<ib_uverbs_qp_dest> {
        let global = self.global;
        Ok(ib_uverbs_qp_dest {
            dgid: global.map(|global| global.dgid.0).unwrap_or_default(),
            flow_label: global.map(|global| global.flow_label).unwrap_or_default(),
            dlid: self.dlid,
            sgid_index: self.sgid_index(verb)?,
            hop_limit: global.map(|global| global.hop_limit).unwrap_or_default(),
            traffic_class: global.map(|global| global.traffic_class).unwrap_or_default(),
            sl: self.service_level,
            src_path_bits: self.src_path_bits,
            static_rate: self.static_rate,
            is_global: global.is_some().into(),
            port_num: narrow(verb, "port", self.port)?,
            ..Default::default()
        })
    }

    fn sgid_index(self, verb: &'static str) -> Result<u8> {
        narrow(verb, "sgid_index", self.global.map_or(0, |global| global.sgid_index))
    }

    pub(crate) fn of_qp_dest(dest: &ib_uverbs_qp_dest) -> Self {
        AddressVector {
            port: dest.port_num.into(),
            dlid: dest.dlid,
            global: (dest.is_global != 0).then_some(GlobalRoute {
                dgid: Gid(dest.dgid),
                sgid_index: dest.sgid_index.into(),
                flow_label: dest.flow_label,
                hop_limit: dest.hop_limit,
                traffic_class: dest.traffic_class,
            }),
            service_level: dest.sl,
            src_path_bits: dest.src_path_bits,
            static_rate: dest.static_rate,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv6Addr};

    /// A header of IPv4 behind bytes that a device left as they were, with the right checksum.
    fn v4(before: u8) -> [u8; 48] {
        let mut bytes = [before; 48];
        let header = [
            0x45, 0x08, 0, 76, 0, 0, 0x40, 0, 61, 17, 0, 0, // the checksum is the last pair
            10, 0, 1, 3, 10, 0, 1, 9,
        ];
        bytes[20..40].copy_from_slice(&header);
        let sum: u32 =
            header.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
        let folded = (sum & 0xffff) + (sum >> 16);
        bytes[30..32].copy_from_slice(&(!(folded as u16)).to_be_bytes());
        bytes
    }

    #[test]
    fn the_source_of_a_datagram_is_read_by_the_version_of_its_header() {
        // The bytes in front may look like version 6.
        for before in [0, 0xff, 0x60] {
            let grh = Grh::parse(&v4(before)).unwrap();
            assert_eq!(grh.source.ip(), IpAddr::from(Ipv4Addr::new(10, 0, 1, 3)), "{before:#x}");
            assert_eq!(grh.destination.ip(), IpAddr::from(Ipv4Addr::new(10, 0, 1, 9)));
            assert_eq!((grh.traffic_class, grh.hop_limit, grh.is_roce_v2), (8, 61, true));
        }
        let source: Ipv6Addr = "2001:db8::1".parse().unwrap();
        let mut bytes = [0; 40];
        bytes[..8].copy_from_slice(&[0x60, 0x81, 2, 3, 0, 36, 27, 64]);
        bytes[8..24].copy_from_slice(&source.octets());
        // The beginning of the destination is where the address of an IPv4 header would be.
        bytes[24..].copy_from_slice(&"fe80::2".parse::<Ipv6Addr>().unwrap().octets());
        let grh = Grh::parse(&bytes).unwrap();
        assert_eq!((grh.source, grh.destination.is_link_local()), (source.into(), true));
        assert_eq!((grh.traffic_class, grh.hop_limit), (8, 64));
        assert_eq!((grh.flow_label, grh.is_roce_v2), (0x1_0203, false));
        bytes[6] = 17;
        assert!(Grh::parse(&bytes).unwrap().is_roce_v2);
        // A source whose bytes look like an IPv4 header with a wrong checksum.
        bytes[20] = 0x45;
        assert_eq!(Grh::parse(&bytes).unwrap().source.0[12], 0x45);
    }

    #[test]
    fn a_datagram_without_a_header_has_no_source() {
        assert_eq!(Grh::parse(&[0; 40]), None);
        assert_eq!(Grh::parse(&v4(0)[..39]), None);
    }
}
