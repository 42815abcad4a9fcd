//! Multicast groups of a device over UDP.
//!
//! Pairs with `rxe_mcast.c`: there an interface takes frames for the MAC of a group, here a socket is in the IP group.
//! A socket that is bound to the address of a port gets no datagrams of groups, so that each group has a socket of its
//! own, which is bound to the group's address. Several processes bind it, each for its own device.
//!
//! ```text
//! attach_mcast ─▶ Groups::join ─▶ socket, bound to GROUP:PORT, in the group at the device's interface
//!                                   │
//!             Service ◀─ poll ◀─ epoll of these sockets
//! ```

use super::Datagram;
use nix::libc;
use nix::sys::socket::SetSockOpt;
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt::{set_ipv6_multicast_if, set_ipv6_v6only, set_socket_reuseaddr};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use uverbs_roce::datagram::MAX_DATAGRAM;

/// Groups that a device is in at most, each with a socket.
pub(crate) const MOST_GROUPS: usize = 64;
/// Datagrams that are received at once.
const BATCH: usize = 32;

/// Whether a socket gets the datagrams of groups that it is not in itself, but another socket of the machine, at any
/// interface.
#[derive(Clone)]
struct AllGroups;
nix::setsockopt_impl!(
    AllGroups,
    libc::IPPROTO_IP,
    libc::IP_MULTICAST_ALL,
    bool,
    nix::sys::socket::sockopt::SetBool
);

/// The same for IPv6: `linux/in6.h`.
#[derive(Clone)]
struct AllGroupsV6;
const IPV6_MULTICAST_ALL: libc::c_int = 29;
nix::setsockopt_impl!(
    AllGroupsV6,
    libc::IPPROTO_IPV6,
    IPV6_MULTICAST_ALL,
    bool,
    nix::sys::socket::sockopt::SetBool
);

/// A group, and how many memberships of queue pairs it has.
struct Group {
    /// Its number in the epoll.
    number: u64,
    socket: Arc<UdpSocket>,
    memberships: usize,
}

/// The groups of a device.
pub(crate) struct Groups {
    at: SocketAddr,
    /// The index of the interface that has the address; 0 if there is none that can be found.
    interface: u32,
    epoll: OwnedFd,
    joined: Mutex<BTreeMap<IpAddr, Group>>,
    /// The number of the next group.
    next: AtomicU64,
    /// How many there are.
    count: AtomicUsize,
}

impl Groups {
    /// None yet, of the device whose socket has this address. That socket sends to groups over the interface that has
    /// it, which Linux chooses by the address for IPv4.
    pub(crate) fn new(at: SocketAddr, socket: &OwnedFd) -> Result<Groups, Errno> {
        let name = super::interface_name(at.ip());
        let index = name.and_then(|name| nix::net::if_::if_nametoindex(&name[..]).ok());
        let interface = index.unwrap_or(0);
        if at.is_ipv6() && interface != 0 {
            set_ipv6_multicast_if(socket, interface)?;
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let (joined, next, count) = (Mutex::default(), AtomicU64::new(0), AtomicUsize::new(0));
        Ok(Groups { at, interface, epoll, joined, next, count })
    }

    /// Readable when a socket of a group is.
    pub(super) fn readable(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn joined(&self) -> MutexGuard<'_, BTreeMap<IpAddr, Group>> {
        self.joined.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether peers can be in a group, as far as this device can tell.
    fn is_reachable(&self, group: IpAddr) -> bool {
        group.is_multicast() && group.is_ipv4() == self.at.is_ipv4()
    }

    /// Counts a membership, and joins the group with the first. A group of the other IP version has members in this
    /// process only.
    ///
    /// # Errors
    ///
    /// `ENOMEM` for more than [`MOST_GROUPS`]; those of the system.
    pub(crate) fn join(&self, group: IpAddr) -> Result<(), Errno> {
        if !self.is_reachable(group) {
            return Ok(());
        }
        let mut joined = self.joined();
        if let Some(known) = joined.get_mut(&group) {
            known.memberships += 1;
            return Ok(());
        }
        if joined.len() >= MOST_GROUPS {
            return Err(Errno::NOMEM);
        }
        let socket = Arc::new(self.open(group)?);
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let data = epoll::EventData::new_u64(number);
        epoll::add(&self.epoll, &socket, data, epoll::EventFlags::IN)?;
        joined.insert(group, Group { number, socket, memberships: 1 });
        self.count.store(joined.len(), Ordering::Relaxed);
        Ok(())
    }

    /// The groups with datagrams, and their sockets.
    fn ready(&self) -> Vec<(IpAddr, Arc<UdpSocket>)> {
        let mut events = Vec::with_capacity(MOST_GROUPS);
        let at_once = Timespec::default();
        // An error is an interruption: the wait that follows ends at once.
        if epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&at_once)).is_err() {
            return Vec::new();
        }
        if events.is_empty() {
            return Vec::new();
        }
        let is_ready = |known: &Group| events.iter().any(|event| event.data.u64() == known.number);
        let joined = self.joined();
        let ready = joined.iter().filter(|(_, known)| is_ready(known));
        ready.map(|(group, known)| (*group, known.socket.clone())).collect()
    }

    /// A socket in a group.
    fn open(&self, group: IpAddr) -> Result<UdpSocket, Errno> {
        let family = if group.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(family, SocketType::DGRAM, flags, None)?;
        set_socket_reuseaddr(&socket, true)?;
        let refused = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        let of_nix = |errno: nix::errno::Errno| Errno::from_raw_os_error(errno as i32);
        match (group, self.at.ip()) {
            (IpAddr::V4(group), IpAddr::V4(own)) => {
                AllGroups.set(&socket, &false).map_err(of_nix)?;
                bind(&socket, &SocketAddr::new(group.into(), self.at.port()))?;
                let socket = UdpSocket::from(socket);
                socket.join_multicast_v4(&group, &own).map_err(refused)?;
                Ok(socket)
            }
            (IpAddr::V6(group), _) => {
                set_ipv6_v6only(&socket, true)?;
                super::take_without_checksum(&socket);
                // Before Linux 4.20 there is no such option: then datagrams come for a group at other interfaces, too.
                let _ = AllGroupsV6.set(&socket, &false);
                bind(&socket, &SocketAddrV6::new(group, self.at.port(), 0, self.interface))?;
                let socket = UdpSocket::from(socket);
                socket.join_multicast_v6(&group, self.interface).map_err(refused)?;
                Ok(socket)
            }
            _ => Err(Errno::AFNOSUPPORT),
        }
    }

    /// Ends a membership, and leaves the group with the last.
    pub(crate) fn leave(&self, group: IpAddr) {
        let mut joined = self.joined();
        let Some(known) = joined.get_mut(&group) else { return };
        known.memberships -= 1;
        if known.memberships == 0 {
            // The thread that receives may have the socket for a moment: it leaves the group when it is closed.
            let _ = epoll::delete(&self.epoll, &known.socket);
            joined.remove(&group);
            self.count.store(joined.len(), Ordering::Relaxed);
        }
    }
}

/// The receiving side of the sockets of groups, which one thread has at a time.
#[derive(Default)]
pub(crate) struct GroupReceiver {
    /// The group of each datagram, its sender, its bytes.
    received: Vec<(IpAddr, SocketAddr, Vec<u8>)>,
}

impl GroupReceiver {
    /// Takes the datagrams that are there, at most [`BATCH`] of each group; returns whether there may be more.
    pub(crate) fn receive(&mut self, groups: &Groups) -> bool {
        self.received.clear();
        if groups.count.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let sockets = groups.ready();
        let mut more = false;
        // One byte more than a datagram may have: so a longer one is known.
        let mut buffer = [0; MAX_DATAGRAM + 1];
        for (group, socket) in sockets {
            let before = self.received.len();
            for _ in 0..BATCH {
                // An error is that there is none, or an interruption.
                let Ok((length, from)) = socket.recv_from(&mut buffer) else { break };
                self.received.push((group, from, buffer[..length].to_vec()));
            }
            more |= self.received.len() == before + BATCH;
        }
        more
    }

    /// The datagrams that were taken last, with their ICRCs checked.
    pub(crate) fn datagrams(&self, groups: &Groups) -> impl Iterator<Item = Datagram<'_>> {
        let own = groups.at;
        self.received.iter().map(move |(group, from, bytes)| {
            Datagram::new(own, Some(*group), Some(*from), 0, false, bytes)
        })
    }
}
