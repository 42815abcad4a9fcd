//! Frames of RoCE v2: a packet behind Ethernet, IP and UDP, with its ICRC. For captures and for networks outside of the
//! process.
//!
//! From `prepare_udp_hdr`, `prepare_ipv4_hdr`, `prepare_ipv6_hdr` and `rxe_udp_encap_recv` of the kernel's `rxe_net.c`:
//! port 4791, no UDP checksum, IPv4 with don't-fragment. The IPv4 identification, which the ICRC covers, is 0.

use crate::headers::MAX_PACKET;
use crate::icrc::{IpHeader, icrc};
use alloc::vec::Vec;
use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The UDP port of RoCE v2.
const PORT: u16 = 4791;

const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const ETHERTYPE_VLAN: [u8; 2] = [0x81, 0x00];
const UDP: u8 = 17;
/// Bytes of the ICRC.
const ICRC: usize = 4;

/// The way of a packet. Both addresses are of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// MAC of the sender.
    pub source_mac: [u8; 6],
    /// MAC of the receiver.
    pub destination_mac: [u8; 6],
    /// VLAN tag: priority in bits 13 to 15, VLAN in bits 0 to 11.
    pub vlan: Option<u16>,
    /// Address of the sender.
    pub source: IpAddr,
    /// Address of the receiver.
    pub destination: IpAddr,
    /// UDP port of the sender: any, and the same for all packets of a queue pair, which then take one way.
    pub source_port: u16,
    /// Type of service, or traffic class: DSCP and ECN.
    pub traffic_class: u8,
    /// Time to live, or hop limit.
    pub hop_limit: u8,
}

/// Why a frame has no packet for a receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoPacket {
    /// It is not one of RoCE v2: another protocol, IP with options or in fragments, or another port.
    Other,
    /// It is shorter than its headers say.
    Truncated,
    /// The ICRC is wrong.
    Icrc,
}

impl fmt::Display for NoPacket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NoPacket::Other => "the frame is not one of RoCE v2",
            NoPacket::Truncated => "the frame is shorter than its headers say",
            NoPacket::Icrc => "the ICRC of the packet is wrong",
        })
    }
}

impl core::error::Error for NoPacket {}

/// Writes the frame of a packet, which goes from BTH to padding, in place of what is in `to`. Returns false, and writes
/// nothing, if the addresses are of two families or the packet is longer than [`MAX_PACKET`].
pub fn encapsulate(route: &Route, packet: &[u8], to: &mut Vec<u8>) -> bool {
    to.clear();
    if packet.len() > MAX_PACKET {
        return false;
    }
    let udp_length = (8 + packet.len() + ICRC) as u16;
    let mut udp = [0; 8];
    udp[..2].copy_from_slice(&route.source_port.to_be_bytes());
    udp[2..4].copy_from_slice(&PORT.to_be_bytes());
    udp[4..6].copy_from_slice(&udp_length.to_be_bytes());
    match (route.source, route.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            put_ethernet(route, ETHERTYPE_IPV4, to);
            let ip = ipv4(route, source, destination, udp_length);
            to.extend_from_slice(&ip);
            put_packet(IpHeader::V4(&ip), &udp, packet, to);
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            put_ethernet(route, ETHERTYPE_IPV6, to);
            let ip = ipv6(route, source, destination, udp_length);
            to.extend_from_slice(&ip);
            put_packet(IpHeader::V6(&ip), &udp, packet, to);
        }
        _ => return false,
    }
    true
}

fn put_ethernet(route: &Route, ethertype: [u8; 2], to: &mut Vec<u8>) {
    to.extend_from_slice(&route.destination_mac);
    to.extend_from_slice(&route.source_mac);
    if let Some(tag) = route.vlan {
        to.extend_from_slice(&ETHERTYPE_VLAN);
        to.extend_from_slice(&tag.to_be_bytes());
    }
    to.extend_from_slice(&ethertype);
}

fn put_packet(ip: IpHeader<'_>, udp: &[u8; 8], packet: &[u8], to: &mut Vec<u8>) {
    to.extend_from_slice(udp);
    to.extend_from_slice(packet);
    to.extend_from_slice(&icrc(ip, udp, packet));
}

fn ipv4(route: &Route, source: Ipv4Addr, destination: Ipv4Addr, udp: u16) -> [u8; 20] {
    let mut ip = [0; 20];
    ip[..2].copy_from_slice(&[0x45, route.traffic_class]);
    ip[2..4].copy_from_slice(&(udp + 20).to_be_bytes());
    // Don't fragment.
    ip[6] = 0x40;
    ip[8..10].copy_from_slice(&[route.hop_limit, UDP]);
    ip[12..16].copy_from_slice(&source.octets());
    ip[16..].copy_from_slice(&destination.octets());
    let sum: u32 =
        ip.chunks_exact(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    ip
}

fn ipv6(route: &Route, source: Ipv6Addr, destination: Ipv6Addr, udp: u16) -> [u8; 40] {
    let mut ip = [0; 40];
    ip[..2].copy_from_slice(&[0x60 | route.traffic_class >> 4, route.traffic_class << 4]);
    ip[4..6].copy_from_slice(&udp.to_be_bytes());
    ip[6..8].copy_from_slice(&[UDP, route.hop_limit]);
    ip[8..24].copy_from_slice(&source.octets());
    ip[24..].copy_from_slice(&destination.octets());
    ip
}

/// The packet of a frame, from BTH to padding, and its way. Bytes behind the packet, with which Ethernet fills short
/// frames, do not count.
///
/// # Errors
///
/// The frame has none for a receiver.
pub fn decapsulate(frame: &[u8]) -> Result<(Route, &[u8]), NoPacket> {
    let (macs, rest) = frame.split_first_chunk::<12>().ok_or(NoPacket::Truncated)?;
    let (mut ethertype, mut rest) = rest.split_first_chunk::<2>().ok_or(NoPacket::Truncated)?;
    let mut vlan = None;
    if *ethertype == ETHERTYPE_VLAN {
        let (tag, behind) = rest.split_first_chunk::<2>().ok_or(NoPacket::Truncated)?;
        vlan = Some(u16::from_be_bytes(*tag));
        (ethertype, rest) = behind.split_first_chunk::<2>().ok_or(NoPacket::Truncated)?;
    }
    let (source, destination, traffic_class, hop_limit, ip, rest) = match *ethertype {
        ETHERTYPE_IPV4 => {
            let (ip, rest) = rest.split_first_chunk::<20>().ok_or(NoPacket::Truncated)?;
            let whole = ip[6] & 0x3f == 0 && ip[7] == 0;
            if ip[0] != 0x45 || ip[9] != UDP || !whole {
                return Err(NoPacket::Other);
            }
            let address = |at: usize| IpAddr::V4([0, 1, 2, 3].map(|byte| ip[at + byte]).into());
            (address(12), address(16), ip[1], ip[8], IpHeader::V4(ip), rest)
        }
        ETHERTYPE_IPV6 => {
            let (ip, rest) = rest.split_first_chunk::<40>().ok_or(NoPacket::Truncated)?;
            if ip[0] >> 4 != 6 || ip[6] != UDP {
                return Err(NoPacket::Other);
            }
            let address = |at: usize| {
                let octets: [u8; 16] = core::array::from_fn(|byte| ip[at + byte]);
                IpAddr::V6(octets.into())
            };
            let class = ip[0] << 4 | ip[1] >> 4;
            (address(8), address(24), class, ip[7], IpHeader::V6(ip), rest)
        }
        _ => return Err(NoPacket::Other),
    };
    let (udp, rest) = rest.split_first_chunk::<8>().ok_or(NoPacket::Truncated)?;
    if udp[2..4] != PORT.to_be_bytes() {
        return Err(NoPacket::Other);
    }
    let length = usize::from(u16::from_be_bytes([udp[4], udp[5]]));
    let packet = length.checked_sub(8 + ICRC).ok_or(NoPacket::Truncated)?;
    let whole = rest.get(..packet + ICRC).ok_or(NoPacket::Truncated)?;
    let (packet, sum) = whole.split_at(packet);
    if icrc(ip, udp, packet) != sum {
        return Err(NoPacket::Icrc);
    }
    let [a, b, c, d, e, f, g, h, i, j, k, l] = *macs;
    let route = Route {
        destination_mac: [a, b, c, d, e, f],
        source_mac: [g, h, i, j, k, l],
        vlan,
        source,
        destination,
        source_port: u16::from_be_bytes([udp[0], udp[1]]),
        traffic_class,
        hop_limit,
    };
    Ok((route, packet))
}
