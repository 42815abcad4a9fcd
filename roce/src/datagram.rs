//! Datagrams of RoCE v2 as a UDP socket sees them: the packet and its ICRC, without the IP header in front.
//!
//! The ICRC covers fields of the IP header that the sender's socket does not write and the receiver's does not show.
//! All but one follow from the addresses and the length:
//!
//! | field | where it is from |
//! |---|---|
//! | version, lengths, protocol, addresses, ports | known to both sides |
//! | IPv4 flags | *don't fragment*, which both RoCE and path MTU discovery ask for |
//! | IPv4 identification | a sender has to send 0, as Linux does from a socket that is not connected, and counts from there in datagrams that it cuts from a longer one; unknown to a receiver |
//! | type of service, flow label, TTL, checksums | not covered: routers change them |
//!
//! [`open`] takes each identification for which the ICRC is right. So over IPv4 a damaged packet passes once in 65,536
//! cases, where over IPv6 it does once in 2³².

use crate::frame::NoPacket;
use crate::headers::MAX_PACKET;
use crate::icrc::{IpHeader, icrc, identification_between};
use core::net::{IpAddr, SocketAddr};

/// The most bytes of a datagram.
pub const MAX_DATAGRAM: usize = MAX_PACKET + ICRC;

/// Bytes of the ICRC.
const ICRC: usize = 4;
/// Bytes of the shortest packet: a BTH.
const SHORTEST: usize = 12;
const UDP: u8 = 17;

/// The two ends of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// Address and port of the sender.
    pub source: SocketAddr,
    /// Address and port of the receiver.
    pub destination: SocketAddr,
}

/// The ICRC of a packet, which goes from BTH to padding: the four bytes that follow it in the datagram. Over IPv4 it is
/// sent with this identification. `None` if the addresses are of two families or the packet is longer than
/// [`MAX_PACKET`].
pub fn seal(ends: &Ends, identification: u16, packet: &[u8]) -> Option<[u8; 4]> {
    if packet.len() > MAX_PACKET {
        return None;
    }
    let udp_length = (8 + packet.len() + ICRC) as u16;
    let mut udp = [0; 8];
    udp[..2].copy_from_slice(&ends.source.port().to_be_bytes());
    udp[2..4].copy_from_slice(&ends.destination.port().to_be_bytes());
    udp[4..6].copy_from_slice(&udp_length.to_be_bytes());
    match (ends.source.ip(), ends.destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let mut ip = [0; 20];
            ip[0] = 0x45;
            ip[2..4].copy_from_slice(&(20 + udp_length).to_be_bytes());
            ip[4..6].copy_from_slice(&identification.to_be_bytes());
            // Don't fragment.
            ip[6] = 0x40;
            ip[9] = UDP;
            ip[12..16].copy_from_slice(&source.octets());
            ip[16..].copy_from_slice(&destination.octets());
            Some(icrc(IpHeader::V4(&ip), &udp, packet))
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let mut ip = [0; 40];
            ip[0] = 0x60;
            ip[4..6].copy_from_slice(&udp_length.to_be_bytes());
            ip[6] = UDP;
            ip[8..24].copy_from_slice(&source.octets());
            ip[24..].copy_from_slice(&destination.octets());
            Some(icrc(IpHeader::V6(&ip), &udp, packet))
        }
        _ => None,
    }
}

/// The packet of a datagram, from BTH to padding. `identification` is the likely one of IPv4: others take longer.
///
/// # Errors
///
/// It has none for a receiver.
pub fn open<'a>(
    ends: &Ends,
    identification: u16,
    datagram: &'a [u8],
) -> Result<&'a [u8], NoPacket> {
    let (packet, found) = datagram.split_last_chunk::<ICRC>().ok_or(NoPacket::Truncated)?;
    if packet.len() < SHORTEST {
        return Err(NoPacket::Truncated);
    }
    let computed = seal(ends, identification, packet).ok_or(NoPacket::Other)?;
    // The difference of two identifications is that of their ICRCs.
    let is_right = computed == *found
        || ends.source.is_ipv4()
            && identification_between(computed, *found, packet.len()).is_some();
    if is_right { Ok(packet) } else { Err(NoPacket::Icrc) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Route, encapsulate};
    use alloc::vec::Vec;

    fn ends(source: &str, destination: &str) -> Ends {
        Ends { source: source.parse().unwrap(), destination: destination.parse().unwrap() }
    }

    /// A packet of so many bytes with its ICRC.
    fn datagram(ends: &Ends, len: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..len).map(|at| (at * 7 + 4) as u8).collect();
        let sum = seal(ends, 0, &bytes).unwrap();
        bytes.extend_from_slice(&sum);
        bytes
    }

    #[test]
    fn a_datagram_is_the_end_of_its_frame() {
        for (source, destination) in
            [("10.0.0.1:49152", "10.0.0.2:4791"), ("[fd00::1]:49153", "[fd00::2]:4791")]
        {
            let ends = ends(source, destination);
            let route = Route {
                source_mac: [1; 6],
                destination_mac: [2; 6],
                vlan: None,
                source: ends.source.ip(),
                destination: ends.destination.ip(),
                source_port: ends.source.port(),
                traffic_class: 0x1c,
                hop_limit: 3,
            };
            let bytes = datagram(&ends, 1052);
            let mut frame = Vec::new();
            assert!(encapsulate(&route, &bytes[..1052], &mut frame));
            assert!(frame.ends_with(&bytes));
        }
    }

    #[test]
    fn a_packet_of_a_connectx_with_an_identification_is_taken() {
        // The send of `icrc.rs`, whose IPv4 identification is 0x0478.
        let ends = ends("192.168.0.7:49152", "192.168.0.7:4791");
        let bytes = [
            0x24, 0x60, 0xff, 0xff, 0, 0, 0, 211, 0, 0xcf, 0x17, 0x10, 0x46, 0x30, 0x81, 0x8b,
            0xe2, 0x89, 0x35, 0xd9, 0x0e, 0x9a, 0x95, 0x50, 0x54, 0x01, 0xbe, 0x88, 0x5e, 0x50, 0,
            0, 0x78, 0xf3, 0x53, 0xf3,
        ];
        for expected in [0, 0x0478, 0xffff] {
            assert_eq!(open(&ends, expected, &bytes), Ok(&bytes[..32]));
        }
        assert_eq!(seal(&ends, 0x0478, &bytes[..32]).as_ref(), bytes.last_chunk());
    }

    #[test]
    fn a_changed_bit_another_address_or_another_port_is_noticed() {
        for (source, destination) in
            [("10.0.0.1:4791", "10.0.0.2:4791"), ("[fd00::1]:4791", "[fd00::2]:4791")]
        {
            let right = ends(source, destination);
            let bytes = datagram(&right, 60);
            assert_eq!(open(&right, 0, &bytes), Ok(&bytes[..60]));
            for bit in (0..bytes.len() * 8).filter(|bit| bit / 8 != 4) {
                let mut bytes = bytes.clone();
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(open(&right, 0, &bytes), Err(NoPacket::Icrc), "bit {bit}");
            }
            let mut other = right;
            other.source.set_port(4790);
            assert_eq!(open(&other, 0, &bytes), Err(NoPacket::Icrc));
            let mut other = right;
            other.destination.set_port(4790);
            assert_eq!(open(&other, 0, &bytes), Err(NoPacket::Icrc));
            let swapped = Ends { source: right.destination, destination: right.source };
            // A CRC tells the order of words, where UDP's checksum does not.
            assert_eq!(open(&swapped, 0, &bytes), Err(NoPacket::Icrc));
            for len in 0..16 {
                assert_eq!(open(&right, 0, &bytes[..len]), Err(NoPacket::Truncated));
            }
        }
        let mixed = ends("10.0.0.1:4791", "[fd00::2]:4791");
        assert_eq!(open(&mixed, 0, &[0; 64]), Err(NoPacket::Other));
    }
}
