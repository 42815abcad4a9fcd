//! The network outside of the process: RoCE v2 over a UDP socket.
//!
//! Pairs with `rxe_net.c`. The device has one GID, the IP address of the socket; a GID of a peer is its IP address, and
//! every peer has the same UDP port.
//!
//! ```text
//! thread that rings ─▶ Kernel::run ─▶ switch ─▶ Transmitter ─▶ trains ─▶ sendmsg, sendmmsg ─┐
//!                                                                                         socket
//! thread uverbs-sim,                                                                        │
//! or one that waits ◀─ poll: socket, alarm, timer; Receiver ◀─ segments ◀─ recvmmsg ◀───────┘
//!        └─▶ ends, length, ICRC ─▶ Kernel::receive ─▶ switch: headers, queue pair, P_Key, source
//! ```
//!
//! `udp/service.rs` says which thread receives.
//!
//! Datagrams for multicast groups come to sockets of their own (`udp/groups.rs`).
//!
//! The socket is not connected and sets *don't fragment*: then Linux sends IPv4 with identification 0, which the ICRC
//! covers, and counts from there in the datagrams of a [train].

mod train;

pub(crate) mod groups;
pub(crate) mod service;

use crate::fabric::FabricError;
use groups::Groups;
use nix::sys::socket::sockopt::{UdpGroSegment, UdpGsoSegment};
use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, MultiHeaders, SockaddrStorage, getsockopt, recvmmsg, setsockopt,
};
use nix::{cmsg_space, libc};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt::{
    Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover,
    set_ipv6_v6only, set_socket_recv_buffer_size, set_socket_recv_buffer_size_force,
    set_socket_send_buffer_size,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::io::IoSliceMut;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use train::{Refusal, Train};
use uverbs_connectx::fabric::Fabric as Switch;
use uverbs_connectx::outside::{OUTGOING_BATCH, Outgoing, Unwelcome};
use uverbs_roce::Mtu;
use uverbs_roce::datagram::{Ends, MAX_DATAGRAM, open};
use uverbs_roce::frame::NoPacket;
use uverbs_uapi::port::ib_mtu;

/// The UDP port of RoCE v2.
pub const ROCE_PORT: u16 = 4791;

/// Bytes that the socket's buffers are asked to have. Without `CAP_NET_ADMIN` the receive buffer has at most
/// `net.core.rmem_max`.
const BUFFER: usize = 8 << 20;
/// Addresses on whose way the system does not cut messages, at most; for more it cuts none.
const MOST_UNCUT: usize = 1024;
/// Messages that are received at once.
const BATCH: usize = 8;
/// Bytes of a message: one datagram, or those that the system has put together.
const MESSAGE: usize = 1 << 16;
/// Bytes of the longest packet beside IP and its payload: UDP, BTH, XRCETH, RETH, immediate data, ICRC.
const HEADERS: u32 = 8 + 12 + 4 + 16 + 4 + 4;

/// Counters of a fabric over UDP, since it was made.
///
/// A datagram that is dropped has changed nothing: it is in one of the counters from `length` on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UdpCounters {
    /// Datagrams that were sent.
    pub sent: u64,
    /// Packets that were not: the system refused them, or more waited than there is room for.
    pub unsent: u64,
    /// Those of `sent` that left as one message, which the system cuts.
    pub segmented: u64,
    /// Datagrams that queue pairs took, or the connection manager.
    pub received: u64,
    /// Datagrams, dropped ones as well, that came several in a message.
    pub coalesced: u64,
    /// Shorter or longer than any packet.
    pub length: u64,
    /// From an address that no peer has: this device's, one of a group, or port 0. What this device sends to a group
    /// that it is in comes back so, too; its members have got it by then.
    pub address: u64,
    /// With a wrong ICRC.
    pub icrc: u64,
    /// With headers that are none, with an opcode that is not for the wire, or to a group and for one queue pair.
    pub malformed: u64,
    /// For a queue pair that is not there.
    pub queue_pair: u64,
    /// For a queue pair of another transport, or whose state takes no such packet.
    pub state: u64,
    /// From another address than that of the queue pair's peer.
    pub source: u64,
    /// With a P_Key of another partition.
    pub partition: u64,
    /// With a wrong Q_Key.
    pub qkey: u64,
    /// Responses to nothing, or that came before.
    pub psn: u64,
    /// For general services (QP1) and no message that the connection manager takes, or one too many.
    pub management: u64,
    /// While the port had no link.
    pub link: u64,
}

impl UdpCounters {
    /// All datagrams that were dropped.
    pub fn dropped(&self) -> u64 {
        let UdpCounters { length, address, icrc, malformed, queue_pair, .. } = self;
        let UdpCounters { state, source, partition, qkey, psn, management, link, .. } = self;
        length
            + address
            + icrc
            + malformed
            + queue_pair
            + state
            + source
            + partition
            + qkey
            + psn
            + management
            + link
    }

    fn add(&mut self, taken: Result<(), Unwelcome>) {
        let counter = match taken {
            Ok(()) => &mut self.received,
            Err(Unwelcome::Malformed | Unwelcome::Private | Unwelcome::NoMulticast) => {
                &mut self.malformed
            }
            Err(Unwelcome::NoQueuePair) => &mut self.queue_pair,
            Err(Unwelcome::Transport | Unwelcome::State) => &mut self.state,
            Err(Unwelcome::Source) => &mut self.source,
            Err(Unwelcome::Partition) => &mut self.partition,
            Err(Unwelcome::Qkey) => &mut self.qkey,
            Err(Unwelcome::Psn) => &mut self.psn,
            Err(Unwelcome::NoMad | Unwelcome::TooManyMads) => &mut self.management,
            Err(_) => &mut self.link,
        };
        *counter += 1;
    }
}

/// The socket, and an alarm for the thread that waits for it.
pub(crate) struct Wire {
    socket: OwnedFd,
    at: SocketAddr,
    alarm: OwnedFd,
    groups: Groups,
    /// Whether the kernel knows segmentation.
    segments: bool,
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").field("at", &self.at).finish_non_exhaustive()
    }
}

impl Wire {
    /// Binds a socket.
    ///
    /// # Errors
    ///
    /// The address is none of one port, or the system refuses.
    pub(crate) fn bind(at: SocketAddr) -> Result<Wire, FabricError> {
        let refused = |errno| FabricError::UdpSocket(at, errno);
        if !is_of_one_port(at.ip()) || at.port() == 0 {
            return Err(FabricError::UdpAddress(at));
        }
        let family = if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(family, SocketType::DGRAM, flags, None).map_err(refused)?;
        // No fragments; and nobody shrinks the MTU of the path by a forged ICMP message.
        match at {
            SocketAddr::V4(_) => set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::PROBE),
            SocketAddr::V6(_) => set_ipv6_v6only(&socket, true)
                .and_then(|()| set_ipv6_mtu_discover(&socket, Ipv6PathMtuDiscovery::PROBE)),
        }
        .map_err(refused)?;
        if at.is_ipv6() {
            take_without_checksum(&socket);
        }
        // Both are wishes.
        if set_socket_recv_buffer_size_force(&socket, BUFFER).is_err() {
            let _ = set_socket_recv_buffer_size(&socket, BUFFER);
        }
        let _ = set_socket_send_buffer_size(&socket, BUFFER);
        // Datagrams come one by one where the kernel cannot give several.
        let _ = setsockopt(&socket, UdpGroSegment, &true);
        let segments = getsockopt(&socket, UdpGsoSegment).is_ok();
        bind(&socket, &at).map_err(refused)?;
        let alarm = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(refused)?;
        let groups = Groups::new(at, &socket).map_err(refused)?;
        Ok(Wire { socket, at, alarm, groups, segments })
    }

    /// The address of the socket.
    pub(crate) fn address(&self) -> SocketAddr {
        self.at
    }

    /// The multicast groups of the device.
    pub(crate) fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Wakes the thread that waits.
    pub(crate) fn wake(&self) {
        // A counter that is full wakes it, too.
        let _ = rustix::io::write(&self.alarm, &1u64.to_ne_bytes());
    }

    /// Waits for a datagram, for the alarm, for room to send if that is `blocked`, for one of `others`, or for the end of
    /// a while. A signal ends the wait early.
    ///
    /// # Errors
    ///
    /// The system's.
    pub(crate) fn wait(
        &self,
        others: &[PollFd<'_>],
        blocked: bool,
        timeout: Option<Duration>,
    ) -> Result<Readiness, Errno> {
        let wanted = if blocked { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let groups = self.groups.readable();
        let mut fds = Vec::with_capacity(3 + others.len());
        fds.push(PollFd::new(&self.alarm, PollFlags::IN));
        fds.push(PollFd::new(&self.socket, wanted));
        fds.push(PollFd::new(&groups, PollFlags::IN));
        fds.extend_from_slice(others);
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        // Of the descriptors that the program names it is told by a call of its own.
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => {
                return Ok(Readiness { is_interrupted: true, ..Readiness::default() });
            }
            Err(errno) => return Err(errno),
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let socket = fds[1..3].iter().any(is_ready);
        Ok(Readiness { alarm: is_ready(&fds[0]), socket, is_interrupted: false })
    }

    /// Takes the alarm back.
    pub(crate) fn calm(&self) {
        let _ = rustix::io::read(&self.alarm, &mut [0; 8]);
    }
}

/// The end of a wait, beside the program's descriptors and time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Readiness {
    pub(crate) alarm: bool,
    /// Datagrams, or room.
    pub(crate) socket: bool,
    /// By a signal.
    pub(crate) is_interrupted: bool,
}

/// Whether a socket of IPv6 gets datagrams without a UDP checksum (`linux/udp.h`). So soft-RoCE and hardware send them.
#[derive(Clone)]
struct WithoutChecksum;
const UDP_NO_CHECK6_RX: libc::c_int = 102;
nix::setsockopt_impl!(
    WithoutChecksum,
    libc::IPPROTO_UDP,
    UDP_NO_CHECK6_RX,
    bool,
    nix::sys::socket::sockopt::SetBool
);

/// Lets datagrams without a UDP checksum in. Their ICRC covers what a checksum would.
fn take_without_checksum(socket: &OwnedFd) {
    // Before Linux 3.16 there is no such option: then they are dropped.
    let _ = setsockopt(socket, WithoutChecksum, &true);
}

/// Whether an address is that of one port: not of a group or of all ports, and not of one link, which has no GID that
/// tells the link.
fn is_of_one_port(address: IpAddr) -> bool {
    let other = match address {
        IpAddr::V4(address) => address.is_broadcast(),
        IpAddr::V6(address) => {
            address.is_unicast_link_local() || address.to_ipv4_mapped().is_some()
        }
    };
    !(other || address.is_unspecified() || address.is_multicast())
}

/// The MTU of a port (`enum ib_mtu`) whose interface has the address: the largest whose packets need no fragments.
///
/// # Errors
///
/// The MTU of the interface is too small for any.
pub(crate) fn port_mtu(at: SocketAddr) -> Result<u8, FabricError> {
    // An interface that cannot be found, because there is no sysfs, is one of Ethernet.
    const ETHERNET: u32 = 1500;
    let mtu = interface_mtu(at.ip()).unwrap_or(ETHERNET);
    let ip = if at.is_ipv4() { 20 } else { 40 };
    let fits = |code: &u8| {
        Mtu::from_code(*code).is_some_and(|payload| ip + HEADERS + payload.bytes() <= mtu)
    };
    let codes = ib_mtu::IB_MTU_256.0..=ib_mtu::IB_MTU_4096.0;
    codes.rev().find(fits).ok_or(FabricError::UdpMtu(at, mtu))
}

/// The MTU of the interface that has an address.
fn interface_mtu(address: IpAddr) -> Option<u32> {
    let name = interface_name(address)?;
    let mtu = std::fs::read_to_string(format!("/sys/class/net/{name}/mtu")).ok()?;
    mtu.trim().parse().ok()
}

/// The name of the interface that has an address.
fn interface_name(address: IpAddr) -> Option<String> {
    use nix::net::if_::InterfaceFlags;
    let interfaces = nix::ifaddrs::getifaddrs().ok()?;
    let has_it = |interface: &nix::ifaddrs::InterfaceAddress| {
        // All of 127.0.0.0/8 is that of one interface.
        let loopback =
            address.is_loopback() && interface.flags.contains(InterfaceFlags::IFF_LOOPBACK);
        loopback
            || interface
                .address
                .as_ref()
                .and_then(socket_address)
                .is_some_and(|at| at.ip() == address)
    };
    interfaces.into_iter().find(has_it).map(|interface| interface.interface_name)
}

fn socket_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
        (Some(v4), _) => Some(SocketAddr::new(v4.ip().into(), v4.port())),
        (_, Some(v6)) => Some(SocketAddr::new(v6.ip().into(), v6.port())),
        _ => None,
    }
}

/// The sending side of a socket, which the kernel's lock protects.
#[derive(Debug)]
pub(crate) struct Transmitter {
    wire: Arc<Wire>,
    /// Packets that the socket had no room for.
    waiting: VecDeque<Train>,
    /// Whether the system cuts messages into packets.
    segments: bool,
    /// Addresses on whose way it does not.
    uncut: BTreeSet<IpAddr>,
    counters: UdpCounters,
}

impl Transmitter {
    pub(crate) fn new(wire: Arc<Wire>) -> Transmitter {
        let segments = wire.segments;
        let (waiting, uncut) = (VecDeque::new(), BTreeSet::new());
        Transmitter { wire, waiting, segments, uncut, counters: UdpCounters::default() }
    }

    /// The counters of both directions.
    pub(crate) fn counters(&self, switch: &Switch) -> UdpCounters {
        let mut counters = self.counters;
        counters.unsent += switch.crowded_out();
        counters
    }

    /// Whether packets wait for room.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Sends the packets that have left the switch, as many as there is room for.
    pub(crate) fn send(&mut self, switch: &mut Switch) {
        loop {
            let mut packets: usize = self.waiting.iter().map(Train::len).sum();
            while packets < OUTGOING_BATCH {
                let Some(outgoing) = switch.take_outgoing() else { break };
                packets += 1;
                self.queue(switch, outgoing);
            }
            if self.waiting.is_empty() {
                return;
            }
            let done = match train::send(&self.wire.socket, self.wire.at.port(), &self.waiting) {
                Ok(trains) => {
                    for train in self.waiting.iter().take(trains) {
                        self.counters.sent += train.len() as u64;
                        self.counters.segmented += train.segmented() as u64;
                    }
                    trains
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => 0,
                Err(why) if self.is_uncut(why) => {
                    let trains = std::mem::take(&mut self.waiting);
                    for outgoing in trains.into_iter().flat_map(Train::into_packets) {
                        self.queue(switch, outgoing);
                    }
                    0
                }
                // The first one was refused: there is no route, it is too long for the path, or no memory is left.
                Err(_) => {
                    self.counters.unsent += self.waiting.front().map_or(0, Train::len) as u64;
                    1
                }
            };
            for outgoing in self.waiting.drain(..done).flat_map(Train::into_packets) {
                switch.recycle_outgoing(outgoing);
            }
        }
    }

    /// Whether an error says that the system does not cut the first train, and from now on no other to its address, or
    /// none at all.
    fn is_uncut(&mut self, why: Errno) -> bool {
        let Some(train) = self.waiting.front().filter(|train| train.len() > 1) else {
            return false;
        };
        match train::refusal(why) {
            Some(Refusal::Way) if self.uncut.len() < MOST_UNCUT => {
                _ = self.uncut.insert(train.to())
            }
            Some(_) => self.segments = false,
            None => return false,
        }
        true
    }

    /// Adds a packet to those that wait.
    fn queue(&mut self, switch: &mut Switch, outgoing: Outgoing) {
        let source = self.wire.at;
        let refused = match self.waiting.back_mut() {
            _ if !is_of_one_port(outgoing.to) && !outgoing.to.is_multicast() => Some(outgoing),
            Some(last)
                if self.segments && last.takes(&outgoing) && !self.uncut.contains(&outgoing.to) =>
            {
                last.add(source, outgoing)
            }
            _ => match Train::new(source, outgoing) {
                Ok(train) => {
                    self.waiting.push_back(train);
                    None
                }
                Err(outgoing) => Some(outgoing),
            },
        };
        if let Some(outgoing) = refused {
            self.counters.unsent += 1;
            switch.recycle_outgoing(outgoing);
        }
    }

    /// Counts a membership of a queue pair in a multicast group.
    ///
    /// # Errors
    ///
    /// Those of [`Groups::join`].
    pub(crate) fn join(&self, gid: [u8; 16]) -> Result<(), Errno> {
        self.wire.groups().join(IpAddr::from(gid).to_canonical())
    }

    /// Counts the end of one.
    pub(crate) fn leave(&self, gid: [u8; 16]) {
        self.wire.groups().leave(IpAddr::from(gid).to_canonical());
    }

    /// Counts a management datagram that the connection manager does not take.
    pub(crate) fn refuse_mad(&mut self) {
        self.counters.received = self.counters.received.saturating_sub(1);
        self.counters.management += 1;
    }

    /// Counts a datagram, and lets the switch handle its packet if there was one.
    pub(crate) fn take_in(&mut self, switch: &mut Switch, now: u64, datagram: &Datagram<'_>) {
        self.counters.coalesced += u64::from(datagram.is_coalesced);
        match datagram.packet {
            Ok(packet) => {
                let (from, port) = (datagram.from.ip(), datagram.from.port());
                self.counters.add(match datagram.group {
                    None => switch.receive_from_outside(now, from, port, packet),
                    Some(group) => switch.receive_for_group(now, from, port, group, packet),
                });
            }
            Err(NoDatagram::Length) => self.counters.length += 1,
            Err(NoDatagram::Address) => self.counters.address += 1,
            Err(NoDatagram::Icrc) => self.counters.icrc += 1,
        }
    }
}

/// Why a datagram has no packet for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NoDatagram {
    Length,
    Address,
    Icrc,
}

/// A datagram that was received.
pub(crate) struct Datagram<'b> {
    from: SocketAddr,
    /// The multicast group that it came for.
    group: Option<IpAddr>,
    packet: Result<&'b [u8], NoDatagram>,
    is_coalesced: bool,
}

impl<'b> Datagram<'b> {
    /// Checks a datagram, before anybody has to know what is in it. `place` is that in its message.
    fn new(
        own: SocketAddr,
        group: Option<IpAddr>,
        from: Option<SocketAddr>,
        place: usize,
        is_coalesced: bool,
        bytes: &'b [u8],
    ) -> Datagram<'b> {
        let nobody = SocketAddr::new(IpAddr::from([0; 4]), 0);
        let from = from.unwrap_or(nobody);
        // Packets of this device to itself do not leave it.
        let is_peer = is_of_one_port(from.ip()) && from.port() != 0 && from.ip() != own.ip();
        let packet = match bytes.len() <= MAX_DATAGRAM {
            false => Err(NoDatagram::Length),
            true if !is_peer => Err(NoDatagram::Address),
            true => {
                let destination = SocketAddr::new(group.unwrap_or(own.ip()), own.port());
                let ends = Ends { source: from, destination };
                // The sender's system has counted them.
                open(&ends, place as u16, bytes).map_err(|why| match why {
                    NoPacket::Truncated => NoDatagram::Length,
                    NoPacket::Icrc => NoDatagram::Icrc,
                    _ => NoDatagram::Address,
                })
            }
        };
        Datagram { from, group, packet, is_coalesced }
    }
}

/// A message that was received.
struct Message {
    from: Option<SocketAddr>,
    bytes: usize,
    /// Bytes of each of its datagrams but the last, as the system has it.
    segment: i32,
}

/// The datagrams of a message. One that was not put together, or whose segments have a length that cannot be, is one.
fn segments(message: &[u8], segment: i32) -> impl ExactSizeIterator<Item = &[u8]> {
    let len = message.len();
    let segment = usize::try_from(segment).ok().filter(|segment| (1..len).contains(segment));
    let segment = segment.unwrap_or(len.max(1));
    // An empty datagram is one, too.
    (0..len.max(1)).step_by(segment).map(move |at| &message[at..len.min(at + segment)])
}

/// The receiving side of a socket, which one thread has at a time.
pub(crate) struct Receiver {
    wire: Arc<Wire>,
    buffers: Vec<u8>,
    received: Vec<Message>,
}

impl Receiver {
    pub(crate) fn new(wire: Arc<Wire>) -> Receiver {
        // Pages that no message reaches stay untouched.
        Receiver { wire, buffers: vec![0; BATCH * MESSAGE], received: Vec::with_capacity(BATCH) }
    }

    /// Takes the messages that are there, at most [`BATCH`]; returns whether there may be more.
    pub(crate) fn receive(&mut self) -> bool {
        self.received.clear();
        // Their room for control messages is what the call before has left of it, so that they are made anew.
        let mut headers = MultiHeaders::preallocate(BATCH, Some(cmsg_space!(i32)));
        let mut parts: Vec<[IoSliceMut<'_>; 1]> =
            self.buffers.chunks_mut(MESSAGE).map(|buffer| [IoSliceMut::new(buffer)]).collect();
        let (fd, flags) = (self.wire.socket.as_fd().as_raw_fd(), MsgFlags::MSG_DONTWAIT);
        // An error is that there is none, an interruption, or that of a packet that was sent.
        let Ok(messages) = recvmmsg(fd, &mut headers, parts.iter_mut(), flags, None) else {
            return false;
        };
        self.received.extend(messages.map(|message| {
            let segment =
                message.cmsgs().ok().into_iter().flatten().find_map(|found| match found {
                    ControlMessageOwned::UdpGroSegments(bytes) => Some(bytes),
                    _ => None,
                });
            Message {
                from: message.address.as_ref().and_then(|at: &SockaddrStorage| socket_address(at)),
                bytes: message.bytes.min(MESSAGE),
                segment: segment.unwrap_or(0),
            }
        }));
        self.received.len() == BATCH
    }

    /// The datagrams that were taken last, with their ICRCs checked.
    pub(crate) fn datagrams(&self) -> impl Iterator<Item = Datagram<'_>> {
        let own = self.wire.at;
        self.received.iter().zip(self.buffers.chunks(MESSAGE)).flat_map(move |(message, buffer)| {
            let segments = segments(&buffer[..message.bytes], message.segment);
            let is_coalesced = segments.len() > 1;
            segments.enumerate().map(move |(place, bytes)| {
                Datagram::new(own, None, message.from, place, is_coalesced, bytes)
            })
        })
    }
}

/// A random number that nobody guesses.
pub(crate) fn random() -> u64 {
    let mut bytes = [0; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(8) => u64::from_ne_bytes(bytes),
        // The standard library's hasher is seeded from the system's randomness.
        _ => std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::Fabric;
    use std::time::Instant;
    use uverbs_roce::cm::MAD;

    /// An address that no other test has, and a port that is not that of RoCE.
    fn at(host: u8) -> SocketAddr {
        let [_, _, high, low] = std::process::id().to_be_bytes();
        SocketAddr::new([127, 128 | high & 63, low, host].into(), 24_791)
    }

    #[test]
    fn management_datagrams_that_are_no_messages_of_the_connection_manager_are_counted() {
        let [one, other] = [1, 2].map(|host| Fabric::builder().udp(at(host)).build().unwrap());
        one.world.disturb(|kernel| kernel.switch.send_mad(at(2).ip(), &[7; MAD]));
        let end = Instant::now() + Duration::from_secs(20);
        let counters = || other.udp_counters().unwrap();
        while counters().management == 0 {
            assert!(Instant::now() < end, "{:?}", counters());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!((counters().received, counters().dropped()), (0, 1));
    }

    /// Has one fabric send so many management datagrams at once, and waits until the other has counted them.
    fn flood(one: &Fabric, other: &Fabric, count: u64) -> UdpCounters {
        let to = other.world.wire().unwrap().at.ip();
        one.world.disturb(|kernel| (0..count).for_each(|_| kernel.switch.send_mad(to, &[7; MAD])));
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let counters = other.udp_counters().unwrap();
            if counters.management >= count {
                return counters;
            }
            assert!(Instant::now() < end, "{counters:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn packets_of_one_length_leave_in_one_message_and_come_in_one() {
        let [one, other] = [11, 12].map(|host| Fabric::builder().udp(at(host)).build().unwrap());
        let before = flood(&one, &other, 150);
        let sent = one.udp_counters().unwrap();
        assert_eq!((sent.sent, sent.segmented, sent.unsent), (150, 150, 0));
        assert_eq!((before.coalesced, before.dropped()), (150, 150));
    }

    #[test]
    fn a_receiver_without_coalescing_gets_each_packet_with_its_own_icrc() {
        let [one, other] = [13, 14].map(|host| Fabric::builder().udp(at(host)).build().unwrap());
        setsockopt(&other.world.wire().unwrap().socket, UdpGroSegment, &false).unwrap();
        let counters = flood(&one, &other, 150);
        assert_eq!((counters.coalesced, counters.dropped()), (0, 150));
        assert_eq!(one.udp_counters().unwrap().segmented, 150);
    }

    #[test]
    #[allow(
        unsafe_code,
        reason = "without checksums Linux answers EINVAL, and no crate here names that option"
    )]
    fn packets_leave_one_by_one_where_the_system_refuses_to_cut_messages() {
        let [one, other] = [15, 16].map(|host| Fabric::builder().udp(at(host)).build().unwrap());
        let (socket, on) = (&one.world.wire().unwrap().socket, 1i32);
        let size = size_of_val(&on) as nix::libc::socklen_t;
        let level = nix::libc::SOL_SOCKET;
        let option = nix::libc::SO_NO_CHECK;
        // SAFETY: the value outlives the call and has the size that it is given.
        let set = unsafe {
            nix::libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const on).cast(), size)
        };
        assert_eq!(set, 0);
        let counters = flood(&one, &other, 150);
        assert_eq!((counters.coalesced, counters.dropped()), (0, 150));
        let sent = one.udp_counters().unwrap();
        assert_eq!((sent.sent, sent.segmented, sent.unsent), (150, 0, 0));
    }

    #[test]
    fn a_message_has_its_datagrams_whatever_length_the_system_names() {
        let message: Vec<u8> = (0..100).collect();
        let lengths = |segment| segments(&message, segment).map(<[u8]>::len).collect::<Vec<_>>();
        assert_eq!(lengths(40), [40, 40, 20]);
        assert_eq!(lengths(50), [50, 50]);
        assert_eq!(lengths(99), [99, 1]);
        assert_eq!(lengths(1), [1; 100]);
        for odd in [0, -1, 100, 101, 65_536, i32::MIN, i32::MAX] {
            assert_eq!(lengths(odd), [100], "segments of {odd} bytes");
            assert_eq!(segments(&[], odd).collect::<Vec<_>>(), [&[0; 0]]);
        }
        assert_eq!(segments(&message, 40).flatten().copied().collect::<Vec<_>>(), message);
    }

    #[test]
    fn the_port_has_the_largest_mtu_that_the_interface_has_room_for() {
        assert_eq!(port_mtu(at(1)).unwrap(), ib_mtu::IB_MTU_4096.0);
        assert_eq!(interface_mtu([127, 0, 0, 9].into()), Some(65_536));
        assert_eq!(interface_mtu([192, 0, 2, 1].into()), None);
        // As if its interface were one of Ethernet: binding it fails later.
        assert_eq!(port_mtu("192.0.2.1:4791".parse().unwrap()).unwrap(), ib_mtu::IB_MTU_1024.0);
    }
}
