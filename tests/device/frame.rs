//! Ethernet frames for raw packets, made by hand.

use std::net::{IpAddr, SocketAddr};

/// The EtherType reserved for local experiments.
pub(crate) const EXPERIMENT: u16 = 0x88b5;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const VLAN: u16 = 0x8100;

pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;

/// Bytes of an Ethernet header without a tag.
pub(crate) const ETHERNET: usize = 14;

pub(crate) type Mac = [u8; 6];

/// A frame under construction.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    to: Mac,
    from: Mac,
    tag: Option<u16>,
    ether_type: u16,
    packet: Vec<u8>,
}

impl Frame {
    /// One with data of its own.
    pub(crate) fn new(to: Mac, from: Mac, data: &[u8]) -> Frame {
        Frame { to, from, tag: None, ether_type: EXPERIMENT, packet: data.to_vec() }
    }

    pub(crate) fn to(mut self, mac: Mac) -> Frame {
        self.to = mac;
        self
    }

    pub(crate) fn from(mut self, mac: Mac) -> Frame {
        self.from = mac;
        self
    }

    pub(crate) fn tag(mut self, tag: u16) -> Frame {
        self.tag = Some(tag);
        self
    }

    /// The same frame around an IP packet of `protocol`, whose checksums are left out.
    pub(crate) fn ip(mut self, protocol: u8, from: SocketAddr, to: SocketAddr, class: u8) -> Frame {
        let mut segment = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
        let data = std::mem::take(&mut self.packet);
        if protocol == TCP {
            segment.extend([0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x10, 0x10, 0, 0, 0, 0, 0]);
        } else {
            segment.extend(((8 + data.len()) as u16).to_be_bytes());
            segment.extend([0, 0]);
        }
        segment.extend(data);
        self.packet = match (from.ip(), to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                self.ether_type = IPV4;
                let [high, low] = ((20 + segment.len()) as u16).to_be_bytes();
                let head = [0x45, class, high, low, 0, 1, 0, 0, 64, protocol, 0, 0];
                [head.as_slice(), &from.octets(), &to.octets(), &segment].concat()
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                self.ether_type = IPV6;
                let [high, low] = (segment.len() as u16).to_be_bytes();
                let head = [0x60 | class >> 4, class << 4, 0, 0, high, low, protocol, 64];
                [head.as_slice(), &from.octets(), &to.octets(), &segment].concat()
            }
            _ => panic!("one family"),
        };
        self
    }

    /// The same IPv6 packet in a flow, of 20 bits.
    pub(crate) fn label(mut self, label: u32) -> Frame {
        assert_eq!((self.ether_type, label >> 20), (IPV6, 0));
        let [_, high, middle, low] = label.to_be_bytes();
        self.packet[1] = self.packet[1] & 0xf0 | high;
        self.packet[2..4].copy_from_slice(&[middle, low]);
        self
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = [self.to, self.from].concat();
        if let Some(tag) = self.tag {
            bytes.extend(VLAN.to_be_bytes());
            bytes.extend(tag.to_be_bytes());
        }
        bytes.extend(self.ether_type.to_be_bytes());
        bytes.extend(&self.packet);
        bytes
    }

    /// The bytes with both checksums of an IPv4 packet filled in.
    pub(crate) fn summed(&self) -> Vec<u8> {
        const NETWORK: usize = ETHERNET;
        const TRANSPORT: usize = NETWORK + 20;
        let mut bytes = self.bytes();
        assert_eq!((self.ether_type, self.tag), (IPV4, None));
        let sum = checksum(&bytes[NETWORK..TRANSPORT], 0);
        bytes[NETWORK + 10..NETWORK + 12].copy_from_slice(&sum.to_be_bytes());
        let protocol = bytes[NETWORK + 9];
        let length = bytes.len() - TRANSPORT;
        let pseudo = u32::from(!checksum(&bytes[NETWORK + 12..TRANSPORT], 0));
        let sum = checksum(&bytes[TRANSPORT..], pseudo + u32::from(protocol) + length as u32);
        let place = TRANSPORT + if protocol == TCP { 16 } else { 6 };
        bytes[place..place + 2].copy_from_slice(&sum.to_be_bytes());
        bytes
    }
}

/// The Internet checksum (RFC 1071).
fn checksum(bytes: &[u8], start: u32) -> u16 {
    let halves = bytes
        .chunks(2)
        .map(|half| u32::from(u16::from_be_bytes([half[0], half.get(1).copied().unwrap_or(0)])));
    let mut sum = halves.fold(start, |sum, half| sum + half);
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
