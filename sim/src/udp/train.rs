//! Trains: packets that leave in one message, which the system cuts (UDP segmentation offload, `UDP_SEGMENT`).
//!
//! ```text
//! message  │ packet, ICRC │ packet, ICRC │ packet, ICRC │ shorter, ICRC │
//!          ├── segment ───┼── segment ───┼── segment ───┼── or as long ─┤
//! IPv4 id  │      0       │      1       │      2       │       3       │
//! ```
//!
//! A train crosses the network stack once, and a receiver in the same system that asks for it (`UDP_GRO`) gets it
//! whole. `inet_gso_segment` and devices count the IPv4 identification, which the ICRC covers.

use nix::sys::socket::{ControlMessage, MsgFlags, SockaddrStorage, sendmsg};
use rustix::fd::{AsFd, AsRawFd};
use rustix::io::Errno;
use rustix::net::{MMsgHdr, SendAncillaryBuffer, SendFlags, SocketAddrAny, sendmmsg};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use uverbs_connectx::outside::Outgoing;
use uverbs_roce::datagram::{Ends, seal};

/// The most packets of a train: `UDP_MAX_SEGMENTS` of kernels before 6.9.
const PACKETS: usize = 64;
/// The most bytes of a train: a datagram of IPv4.
const BYTES: usize = 65_535 - 20 - 8;

type Icrc = [u8; 4];

/// Packets with their ICRCs, to one address.
#[derive(Debug)]
pub(super) struct Train {
    to: IpAddr,
    packets: Vec<(Outgoing, Icrc)>,
    /// Bytes of the first packet and its ICRC.
    segment: u16,
    bytes: usize,
}

/// Bytes of a packet and its ICRC.
fn length(outgoing: &Outgoing) -> usize {
    outgoing.packet().len() + size_of::<Icrc>()
}

impl Train {
    /// A train of one packet; the packet, if there is no way to its address or it is too long.
    pub(super) fn new(source: SocketAddr, outgoing: Outgoing) -> Result<Train, Outgoing> {
        let (to, bytes) = (outgoing.to, length(&outgoing));
        let Ok(segment) = u16::try_from(bytes) else { return Err(outgoing) };
        let mut train = Train { to, packets: Vec::new(), segment, bytes: 0 };
        train.add(source, outgoing).map_or(Ok(train), Err)
    }

    /// Whether a packet can follow: no packet is longer than the first one, and all but the last are as long. Members of
    /// a group get each by itself, and do not know its place.
    pub(super) fn takes(&self, outgoing: &Outgoing) -> bool {
        let (segment, length) = (usize::from(self.segment), length(outgoing));
        outgoing.to == self.to
            && !self.to.is_multicast()
            && self.packets.len() < PACKETS
            && self.bytes == self.packets.len() * segment
            && length <= segment
            && self.bytes + length <= BYTES
    }

    /// Adds a packet; returns it if it has no ICRC.
    pub(super) fn add(&mut self, source: SocketAddr, outgoing: Outgoing) -> Option<Outgoing> {
        let destination = SocketAddr::new(self.to, source.port());
        let ends = Ends { source, destination };
        match seal(&ends, self.packets.len() as u16, outgoing.packet()) {
            Some(sum) => {
                self.bytes += length(&outgoing);
                self.packets.push((outgoing, sum));
                None
            }
            None => Some(outgoing),
        }
    }

    pub(super) fn to(&self) -> IpAddr {
        self.to
    }

    /// The number of packets.
    pub(super) fn len(&self) -> usize {
        self.packets.len()
    }

    /// The number of packets that the system cuts from a message.
    pub(super) fn segmented(&self) -> usize {
        if self.len() > 1 { self.len() } else { 0 }
    }

    pub(super) fn into_packets(self) -> impl Iterator<Item = Outgoing> {
        self.packets.into_iter().map(|(outgoing, _)| outgoing)
    }

    fn parts(&self) -> Vec<IoSlice<'_>> {
        self.packets
            .iter()
            .flat_map(|(outgoing, sum)| [IoSlice::new(outgoing.packet()), IoSlice::new(sum)])
            .collect()
    }
}

/// Where the system does not cut trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// On the way to an address: its MTU is smaller than the packets (`EMSGSIZE`, and before Linux 6.14 `EINVAL`), its
    /// interface computes no checksums, or it is encrypted (`EIO`).
    Way,
    /// Nowhere.
    System,
}

/// The refusal that an error of a train stands for; `None` for another error.
pub(super) fn refusal(why: Errno) -> Option<Refusal> {
    match why {
        Errno::IO | Errno::MSGSIZE | Errno::INVAL => Some(Refusal::Way),
        Errno::NOPROTOOPT | Errno::OPNOTSUPP => Some(Refusal::System),
        _ => None,
    }
}

/// Sends the first train, or the trains of one packet at the begin; returns how many.
///
/// # Errors
///
/// That of the first one.
pub(super) fn send(
    socket: &impl AsFd,
    port: u16,
    trains: &VecDeque<Train>,
) -> Result<usize, Errno> {
    match trains.front() {
        Some(first) if first.len() > 1 || trains.len() == 1 => {
            let to = SockaddrStorage::from(SocketAddr::new(first.to, port));
            let segment = [ControlMessage::UdpGsoSegments(&first.segment)];
            let control = if first.len() > 1 { &segment[..] } else { &[] };
            let flags = MsgFlags::MSG_NOSIGNAL;
            sendmsg(socket.as_fd().as_raw_fd(), &first.parts(), control, flags, Some(&to))
                .map(|_| 1)
                .map_err(|errno| Errno::from_raw_os_error(errno as i32))
        }
        _ => send_singles(socket, port, trains),
    }
}

fn send_singles(socket: &impl AsFd, port: u16, trains: &VecDeque<Train>) -> Result<usize, Errno> {
    let singles = || trains.iter().take_while(|train| train.len() == 1);
    let addresses: Vec<SocketAddrAny> =
        singles().map(|train| SocketAddr::new(train.to, port).into()).collect();
    let parts: Vec<Vec<IoSlice<'_>>> = singles().map(Train::parts).collect();
    let mut controls: Vec<SendAncillaryBuffer<'_, '_, '_>> =
        singles().map(|_| SendAncillaryBuffer::default()).collect();
    let mut messages: Vec<MMsgHdr<'_>> = (addresses.iter().zip(&parts).zip(&mut controls))
        .map(|((address, parts), control)| MMsgHdr::new_with_addr(address, parts, control))
        .collect();
    sendmmsg(socket, &mut messages, SendFlags::NOSIGNAL)
}
