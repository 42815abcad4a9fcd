//! A capture of the packets that arrive: a pcap file of RoCE v2, which Wireshark reads.
//!
//! Pairs with [`crate::fabric`], which delivers them. Packets of RoCE v1 are written as those of v2. Packets between
//! InfiniBand ports are left out, those of operations whose opcodes are private, and those from a GID of one family of
//! addresses to one of another. A path has no traffic class and no hop limit of a connection; they are 0 and 64. A
//! packet to or from outside of the process has the device's own MAC at both ends.

use std::io::{self, Write};
use std::net::IpAddr;

use uverbs_roce::frame::{self, Route};

use crate::link::Flight;
use crate::outside::{address, is_private};
use crate::path::{Destination, Path};

/// The file's header: times in nanoseconds, version 2.4, UTC, packets of up to 64 KiB, Ethernet.
const HEADER: [u32; 6] = [0xa1b2_3c4d, 0x0004_0002, 0, 0, 0xffff, 1];
const NANOSECONDS: u64 = 1_000_000_000;
/// A file that packets are written to.
pub(crate) struct Capture {
    to: Box<dyn Write + Send>,
    packet: Vec<u8>,
    frame: Vec<u8>,
    /// A packet's header and its frame.
    record: Vec<u8>,
}

/// The addresses of a packet's frame.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Macs {
    pub(crate) source: [u8; 6],
    /// Of the port; `None` for a multicast group.
    pub(crate) destination: Option<[u8; 6]>,
}

impl Capture {
    /// Writes the header.
    pub(crate) fn new(mut to: Box<dyn Write + Send>) -> io::Result<Self> {
        to.write_all(&words(HEADER))?;
        Ok(Self { to, packet: Vec::new(), frame: Vec::new(), record: Vec::new() })
    }

    /// Adds a packet; `payload` appends the bytes of it that stay in place.
    pub(crate) fn add(
        &mut self,
        now: u64,
        macs: Macs,
        flight: &Flight,
        payload: impl FnOnce(&mut Vec<u8>),
    ) -> io::Result<()> {
        let head = &flight.packet[..];
        let (Some(mut route), false) = (route(macs, &flight.path), is_private(head)) else {
            return Ok(());
        };
        if flight.ecn != 0 {
            route.traffic_class = route.traffic_class & !0b11 | flight.ecn;
        }
        self.packet.clear();
        self.packet.extend_from_slice(head);
        payload(&mut self.packet);
        if !frame::encapsulate(&route, &self.packet, &mut self.frame) {
            return Ok(());
        }
        let len = self.frame.len() as u32;
        let (seconds, rest) = ((now / NANOSECONDS) as u32, (now % NANOSECONDS) as u32);
        self.record.clear();
        self.record.extend_from_slice(&words([seconds, rest, len, len]));
        self.record.extend_from_slice(&self.frame);
        self.to.write_all(&self.record)?;
        self.to.flush()
    }
}

/// Numbers in little endian.
fn words<const N: usize>(words: [u32; N]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The way of a packet; `None` on InfiniBand.
fn route(macs: Macs, path: &Path) -> Option<Route> {
    let gid = match path.destination {
        Destination::Lid(_) => return None,
        Destination::Gid(gid) => path.route.map_or(gid, |route| route.gid),
        Destination::Group(gid) => gid,
    };
    let (source, destination) = (address(path.source.gid), address(gid));
    // As `rdma_get_mcast_mac` of the kernel; a group of IPv4 is a mapped address, too.
    let [.., a, b, c, d] = gid;
    let group = match destination {
        IpAddr::V4(_) => [0x01, 0x00, 0x5e, b & 0x7f, c, d],
        IpAddr::V6(_) => [0x33, 0x33, a, b, c, d],
    };
    Some(Route {
        source_mac: macs.source,
        destination_mac: macs.destination.unwrap_or(group),
        vlan: path.vlan_tag(),
        source,
        destination,
        source_port: path.source_port,
        traffic_class: path.route.map_or(0, |route| route.tclass),
        hop_limit: path.route.map_or(64, |route| route.hop_limit),
    })
}
