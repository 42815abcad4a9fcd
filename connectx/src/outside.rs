//! The network outside of the process: packets that leave the fabric there, packets that come from there, and why some
//! are dropped.
//!
//! Pairs with `fabric/outside.rs`. The caller, which has the socket, takes packets by [`Fabric::take_outgoing`] and gives
//! packets to [`Fabric::receive_from_outside`] and [`Fabric::receive_for_group`], without IP, UDP and ICRC.
//!
//! [`Fabric::take_outgoing`]: crate::fabric::Fabric::take_outgoing
//! [`Fabric::receive_from_outside`]: crate::fabric::Fabric::receive_from_outside
//! [`Fabric::receive_for_group`]: crate::fabric::Fabric::receive_for_group

use std::collections::VecDeque;
use std::fmt;
use std::net::IpAddr;

use uverbs_roce::cm::MAD;
use uverbs_roce::headers::{Packet, Syndrome};
use uverbs_roce::opcodes::Operation;

use crate::link::Flight;

/// Packets that wait for the socket at most. Connections keep few in flight; datagrams may be any number.
pub const MOST_OUTGOING: usize = 1024;
/// Packets after which the fabric's run ends, so that they leave before there are more.
pub const OUTGOING_BATCH: usize = 64;
/// Management datagrams that wait for the connection manager at most.
pub const MOST_MADS: usize = 256;

/// The queue pair number of packets for a multicast group.
pub(crate) const MULTICAST_QPN: u32 = 0xff_ffff;

/// The opcodes of masked atomics, without the transport.
const PRIVATE: [u8; 2] = [Operation::MaskedCompareSwap as u8, Operation::MaskedFetchAdd as u8];

/// Whether the opcode of a packet is private to devices of one fabric.
pub(crate) fn is_private(packet: &[u8]) -> bool {
    packet.first().is_none_or(|opcode| PRIVATE.contains(&(opcode & 0x1f)))
}

/// The IP address that a GID of RoCE v2 stands for.
pub(crate) fn address(gid: [u8; 16]) -> IpAddr {
    IpAddr::from(gid).to_canonical()
}

/// The GID of an IP address: an IPv4 address is IPv4-mapped.
pub(crate) fn gid(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// A packet that leaves the process.
pub struct Outgoing {
    /// The address that it goes to: that of a port, or of a multicast group.
    pub to: IpAddr,
    pub(crate) flight: Box<Flight>,
}

impl Outgoing {
    /// The packet, from BTH to padding.
    pub fn packet(&self) -> &[u8] {
        &self.flight.packet
    }

    /// Whether it acknowledges, and does nothing else.
    pub(crate) fn is_ack(&self) -> bool {
        Packet::parse(self.packet()).is_ok_and(|packet| {
            packet.opcode.operation == Operation::Acknowledge
                && packet.aeth.is_some_and(|aeth| aeth.syndrome() == Some(Syndrome::Ack))
        })
    }
}

impl fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outgoing").field("to", &self.to).field("packet", &self.packet()).finish()
    }
}

/// A management datagram for general services (QP1) that came from outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mad {
    /// The address that it came from.
    pub from: IpAddr,
    /// Source QPN: 1 of general services, else that of a queue pair to which these were redirected.
    pub source_qpn: u32,
    /// P_Key of the packet.
    pub pkey: u16,
    /// The datagram.
    pub bytes: [u8; MAD],
}

/// Why a packet from outside is dropped before it changes anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unwelcome {
    /// It is no packet.
    Malformed,
    /// It came for a multicast group, and has the number of a queue pair.
    NoMulticast,
    /// Its opcode is private to devices of one fabric.
    Private,
    /// The port has no link.
    NoLink,
    /// No queue pair has the number.
    NoQueuePair,
    /// The queue pair has another transport.
    Transport,
    /// The queue pair takes no such packet in its state.
    State,
    /// It does not come from the address of the queue pair's peer.
    Source,
    /// Its P_Key is of another partition.
    Partition,
    /// Its Q_Key is not that of the queue pair.
    Qkey,
    /// It is a response to nothing, or one that came before.
    Psn,
    /// It is for general services and no management datagram.
    NoMad,
    /// It is a management datagram, and [`MOST_MADS`] wait.
    TooManyMads,
}

impl fmt::Display for Unwelcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unwelcome::Malformed => "it is no packet",
            Unwelcome::NoMulticast => {
                "it is for a multicast group and has the number of a queue pair"
            }
            Unwelcome::Private => "its opcode is private to devices of one fabric",
            Unwelcome::NoLink => "the port has no link",
            Unwelcome::NoQueuePair => "no queue pair has the number",
            Unwelcome::Transport => "the queue pair has another transport",
            Unwelcome::State => "the queue pair takes no such packet in its state",
            Unwelcome::Source => "it is not from the address of the queue pair's peer",
            Unwelcome::Partition => "its P_Key is of another partition",
            Unwelcome::Qkey => "its Q_Key is not that of the queue pair",
            Unwelcome::Psn => "no request with its PSN waits for a response",
            Unwelcome::NoMad => "it is for general services and no management datagram",
            Unwelcome::TooManyMads => "too many management datagrams wait",
        })
    }
}

impl std::error::Error for Unwelcome {}

/// The way out of the fabric.
#[derive(Debug, Default)]
pub(crate) struct Outside {
    /// The function whose port leads there.
    pub(crate) function: usize,
    pub(crate) outgoing: VecDeque<Outgoing>,
    pub(crate) mads: VecDeque<Mad>,
    /// Packets that did not leave, because [`MOST_OUTGOING`] waited.
    pub(crate) crowded: u64,
    /// PSN of the next management datagram.
    pub(crate) psn: u32,
}
