//! The addresses and network interfaces of this process's network namespace, and the way to a peer.
//!
//! Pairs with `RTM_GETADDR` and `RTM_GETLINK` of `linux/rtnetlink.h`. A GID names its interface by an index
//! that counts in the interface's own namespace, so that an index alone does not say where it is.

use super::netlink::{Attributes, Messages, NetlinkSocket, NetlinkTransport, Request};
use netlink_packet_core::{NLM_F_DUMP, NLMSG_DONE, NLMSG_ERROR};
use rustix::io::Errno;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};

const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
/// `struct ifinfomsg` and `struct ifaddrmsg`; in both the index is at byte 4.
const LINK_HEADER: usize = 16;
const ADDR_HEADER: usize = 8;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// Any port does: nothing is sent.
const DISCARD: u16 = 9;

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Interface {
    index: u32,
    name: String,
    hardware: Vec<u8>,
}

/// What this network namespace has.
#[derive(Clone, Debug, Default)]
pub(crate) struct Addresses {
    /// `None` without netlink. Sockets are asked then, which know addresses and no interfaces.
    known: Option<Known>,
}

/// Interfaces, and their addresses by interface index.
type Known = (Vec<Interface>, Vec<(u32, IpAddr)>);

impl Addresses {
    /// The calling thread's.
    pub(crate) fn here() -> Addresses {
        let read = || -> rustix::io::Result<_> {
            let mut socket = NetlinkSocket::open_route()?;
            let links = dump(&mut socket, RTM_GETLINK, RTM_NEWLINK, LINK_HEADER, interface)?;
            let addresses = dump(&mut socket, RTM_GETADDR, RTM_NEWADDR, ADDR_HEADER, address)?;
            Ok((links, addresses))
        };
        Addresses { known: read().ok() }
    }

    /// Whether interface `index` is here and has this address. An index of 0 is any interface.
    pub(crate) fn has(&self, index: u32, address: IpAddr) -> bool {
        let Some((links, addresses)) = &self.known else { return binds(index, address) };
        let is_it = |of: u32| index == 0 || of == index;
        addresses.iter().any(|(of, found)| is_it(*of) && *found == address)
            // A device has a GID of the hardware address, whether or not the interface has that address.
            || links.iter().any(|link| {
                is_it(link.index) && link_local(&link.hardware).map(IpAddr::V6) == Some(address)
            })
    }

    /// The name of an interface that is here.
    pub(crate) fn name(&self, index: u32) -> Option<&str> {
        let (links, _) = self.known.as_ref()?;
        Some(&links.iter().find(|link| link.index == index)?.name)
    }
}

/// The address from which the kernel sends to `peer`. `interface` is where a link-local peer is.
pub(crate) fn source_for(peer: IpAddr, interface: u32) -> rustix::io::Result<IpAddr> {
    let asked = || -> io::Result<IpAddr> {
        let any: IpAddr = match peer {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = UdpSocket::bind((any, 0))?;
        // This looks the route up and sends nothing.
        socket.connect(socket_address(interface, peer, DISCARD))?;
        Ok(socket.local_addr()?.ip())
    };
    asked().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

fn socket_address(interface: u32, address: IpAddr, port: u16) -> SocketAddr {
    match address {
        IpAddr::V4(_) => (address, port).into(),
        IpAddr::V6(v6) => SocketAddrV6::new(v6, port, 0, interface).into(),
    }
}

/// Whether a socket takes the address for its own.
fn binds(interface: u32, address: IpAddr) -> bool {
    /// The discard service's; no packet is sent.
    const PORT: u16 = 9;
    // In a network namespace without any address the kernel binds every one of IPv4, but has no route to it.
    UdpSocket::bind(socket_address(interface, address, 0))
        .and_then(|socket| socket.connect(socket_address(interface, address, PORT)))
        .is_ok()
}

/// The link-local address of an Ethernet address, `addrconf_ifid_eui48`.
fn link_local(hardware: &[u8]) -> Option<Ipv6Addr> {
    let [a, b, c, d, e, f] = *hardware else { return None };
    let bytes = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f];
    Some(Ipv6Addr::from(bytes))
}

/// Reads a list of `answer`s, each a header and attributes.
fn dump<T>(
    transport: &mut impl NetlinkTransport,
    request: u16,
    answer: u16,
    header: usize,
    read: fn(u32, Attributes<'_>) -> Option<T>,
) -> rustix::io::Result<Vec<T>> {
    let request = Request::with_header(request, vec![0; header]);
    transport.send(&request.datagram(NLM_F_DUMP, u32::from(answer)))?;
    let (mut found, mut datagram) = (Vec::new(), Vec::new());
    loop {
        transport.receive(&mut datagram)?;
        for message in Messages(&datagram) {
            let message = message.map_err(|_| Errno::BADMSG)?;
            match message.kind {
                NLMSG_DONE => return Ok(found),
                NLMSG_ERROR => return Err(Errno::OPNOTSUPP),
                kind if kind == answer => {
                    let index = message.payload.get(4..8).and_then(|bytes| bytes.try_into().ok());
                    let index = u32::from_ne_bytes(index.ok_or(Errno::BADMSG)?);
                    let attributes = message.payload.get(header..).ok_or(Errno::BADMSG)?;
                    found.extend(read(index, Attributes(attributes)));
                }
                _ => {}
            }
        }
    }
}

fn interface(index: u32, attributes: Attributes<'_>) -> Option<Interface> {
    let mut interface = Interface { index, ..Interface::default() };
    for (kind, value) in attributes.iter().map_while(Result::ok) {
        match kind {
            IFLA_ADDRESS => interface.hardware = value.bytes().to_vec(),
            IFLA_IFNAME => interface.name = value.string(),
            _ => {}
        }
    }
    Some(interface)
}

/// The address of the interface itself, which on a point-to-point link is not `IFA_ADDRESS`.
fn address(index: u32, attributes: Attributes<'_>) -> Option<(u32, IpAddr)> {
    let (mut own, mut other) = (None, None);
    for (kind, value) in attributes.iter().map_while(Result::ok) {
        match kind {
            IFA_LOCAL => own = ip(value.bytes()),
            IFA_ADDRESS => other = ip(value.bytes()),
            _ => {}
        }
    }
    Some((index, own.or(other)?))
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        return Some(Ipv4Addr::from(v4).into());
    }
    Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into())
}

#[cfg(test)]
impl Addresses {
    /// A namespace with an interface for each of these addresses.
    pub(crate) fn planted(addresses: &[(u32, &str, IpAddr)]) -> Addresses {
        let interface = |(index, name, _): &(u32, &str, IpAddr)| Interface {
            index: *index,
            name: (*name).into(),
            hardware: vec![0x50, 0x54, 0, 0, 0, *index as u8],
        };
        let links = addresses.iter().map(interface).collect();
        let addresses = addresses.iter().map(|(index, _, address)| (*index, *address)).collect();
        Addresses { known: Some((links, addresses)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::netlink::tests::{Script, attribute, message};

    const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn loopback_is_here_with_netlink_and_without() {
        let here = Addresses::here();
        for addresses in [&here, &Addresses::default()] {
            assert!(addresses.has(0, LOCALHOST));
            assert!(!addresses.has(0, Ipv4Addr::new(192, 0, 2, 77).into()));
        }
        assert_eq!(source_for(LOCALHOST, 0), Ok(LOCALHOST));
    }

    #[test]
    fn an_address_of_another_interface_is_not_here() {
        let address = Ipv4Addr::new(10, 0, 0, 1).into();
        let here = Addresses::planted(&[(2, "eth0", address)]);
        assert!(here.has(2, address) && here.has(0, address));
        assert!(!here.has(3, address));
        let by_hardware: Ipv6Addr = "fe80::5254:ff:fe00:2".parse().unwrap();
        assert!(here.has(2, by_hardware.into()) && !here.has(3, by_hardware.into()));
        assert_eq!((here.name(2), here.name(3)), (Some("eth0"), None));
    }

    #[test]
    fn any_datagram_is_a_list_or_an_error() {
        let link = [
            [0; LINK_HEADER].to_vec(),
            attribute(IFLA_ADDRESS, &[0x50, 0x54, 0, 0, 0, 1]),
            attribute(IFLA_IFNAME, b"eth0\0"),
        ];
        let v4 = [[0; ADDR_HEADER].to_vec(), attribute(IFA_LOCAL, &[10, 0, 0, 1])];
        let v6 = [[0; ADDR_HEADER].to_vec(), attribute(IFA_ADDRESS, &[1; 16])];
        let end = message(NLMSG_DONE, 2, 1, &[0; 4]);
        let known = [
            [message(RTM_NEWLINK, 2, 1, &link.concat()), end.clone()].concat(),
            [message(RTM_NEWADDR, 2, 1, &v4.concat()), end.clone()].concat(),
            [message(RTM_NEWADDR, 2, 1, &v6.concat()), end].concat(),
        ];
        let tally = crate::tests::hostile::explore("addresses", 1, &known, |datagram| {
            let mut script = Script::default().reply(datagram);
            let links = dump(&mut &mut script, RTM_GETLINK, RTM_NEWLINK, LINK_HEADER, interface);
            let mut script = Script::default().reply(datagram);
            let found = dump(&mut &mut script, RTM_GETADDR, RTM_NEWADDR, ADDR_HEADER, address);
            let known = links.ok().zip(found.ok());
            let taken = known.as_ref().is_some_and(|(links, found)| links.len() + found.len() > 0);
            let addresses = Addresses { known };
            let _ = addresses.name(1);
            taken
        });
        assert!(tally.taken > 0 && tally.refused > 0, "{tally:?}");
    }

    #[test]
    fn the_own_end_of_a_point_to_point_link_counts() {
        let header = [2, 32, 0, 0].into_iter().chain(7u32.to_ne_bytes());
        let attributes =
            [attribute(IFA_ADDRESS, &[10, 0, 0, 2]), attribute(IFA_LOCAL, &[10, 0, 0, 1])];
        let payload: Vec<u8> = header.chain(attributes.concat()).collect();
        let mut datagram = message(RTM_NEWADDR, 2, 1, &payload);
        datagram.extend(message(NLMSG_DONE, 2, 1, &[0; 4]));
        let mut script = Script::default().reply(datagram);
        let found = dump(&mut &mut script, RTM_GETADDR, RTM_NEWADDR, ADDR_HEADER, address);
        assert_eq!(found.unwrap(), [(7, Ipv4Addr::new(10, 0, 0, 1).into())]);
    }
}
