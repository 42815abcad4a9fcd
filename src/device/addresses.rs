//! The addresses and network interfaces of this process's network namespace, and the way to a peer.
//!
//! Pairs with `RTM_GETADDR`, `RTM_GETLINK` and `RTM_GETROUTE` of `linux/rtnetlink.h`. A GID names its interface
//! by an index that counts in the interface's own namespace, so that an index alone does not say where it is.

use super::netlink::{
    Attributes, Messages, NetlinkMessage, NetlinkSocket, NetlinkTransport, Request,
};
use crate::platform::Platform;
use netlink_packet_core::{NLM_F_DUMP, NLMSG_DONE, NLMSG_ERROR};
use rustix::io::Errno;
use rustix::net::AddressFamily;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};

const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
/// `struct ifinfomsg` and `struct ifaddrmsg`; in both the index is at byte 4.
const LINK_HEADER: usize = 16;
const ADDR_HEADER: usize = 8;
/// `struct rtmsg`.
const ROUTE_HEADER: usize = 12;
/// The route is to an address of this machine: `rtm_type`, at byte 7.
const RTN_LOCAL: u8 = 2;
/// Answer with the route of the table, and fail if the kernel has none and only assumes that the peer is on
/// the link.
const RTM_F_FIB_MATCH: u32 = 0x2000;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_PREFSRC: u16 = 7;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINK: u16 = 5;
const IFLA_MASTER: u16 = 10;
const IFLA_LINK_NETNSID: u16 = 37;
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
    /// The interface in this namespace that it is stacked on, as a VLAN or macvlan is; 0 without one.
    lower: u32,
    /// The bond or bridge that it is part of; 0 without one.
    master: u32,
}

/// The kernel's route to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// The interface; 0 where no netlink socket could be opened to ask for it.
    pub(crate) interface: u32,
    /// The address that packets come from.
    pub(crate) source: IpAddr,
    /// The peer is this machine itself, on any of its interfaces.
    pub(crate) local: bool,
}

/// The network interfaces of this network namespace, and their addresses.
#[derive(Clone, Debug, Default)]
pub(crate) struct Addresses {
    /// `None` without netlink. Sockets are asked then, which know addresses and no interfaces.
    known: Option<Known>,
}

/// Interfaces, and their addresses by interface index.
type Known = (Vec<Interface>, Vec<(u32, IpAddr)>);

impl Addresses {
    /// The addresses in the calling thread's network namespace.
    pub(crate) fn here() -> Addresses {
        let read = || -> rustix::io::Result<_> {
            let mut socket = NetlinkSocket::open_route()?;
            let links = dump(&mut socket, RTM_GETLINK, RTM_NEWLINK, LINK_HEADER, interface)?;
            let addresses = dump(&mut socket, RTM_GETADDR, RTM_NEWADDR, ADDR_HEADER, address)?;
            Ok((links, addresses))
        };
        Addresses { known: read().ok() }
    }

    /// The addresses of the system that a device belongs to.
    pub(crate) fn of(platform: &Platform) -> Addresses {
        let Some(system) = platform.hosted() else { return Addresses::here() };
        let (mut links, mut addresses) = Known::default();
        for interface in system.interfaces() {
            let index = interface.index;
            addresses.extend(interface.addresses.iter().map(|address| (index, *address)));
            let (name, hardware) = (interface.name, interface.hardware);
            links.push(Interface { index, name, hardware, ..Interface::default() });
        }
        Addresses { known: Some((links, addresses)) }
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

    /// Whether interface `index` is a port's own: `netdev`, the interface of this name behind the port, or the bond
    /// or bridge that it is part of. All others are stacked on it, as VLANs and macvlans are. Where `netdev` is not
    /// known, an interface that is not stacked on another of this namespace counts as the port's own.
    pub(crate) fn is_own(&self, index: u32, netdev: Option<&str>) -> bool {
        let Some((links, _)) = &self.known else { return true };
        let at = |index: u32| links.iter().find(|link| link.index == index);
        let Some(own) = netdev.and_then(|name| links.iter().find(|link| link.name == name)) else {
            return at(index).is_none_or(|link| link.lower == 0);
        };
        let mut part = Some(own);
        // The kernel nests no more than 8 interfaces (`MAX_NEST_DEV`).
        for _ in 0..=8 {
            match part {
                Some(link) if link.index == index => return true,
                Some(link) => part = at(link.master),
                None => return false,
            }
        }
        false
    }
}

/// The kernel's route to `peer`; only over `interface`, unless that is 0. With an interface, the kernel treats an
/// IPv4 peer without a route as a neighbour; `confirmed` refuses that with `EHOSTUNREACH`.
pub(crate) fn route_to(
    platform: &Platform,
    peer: IpAddr,
    interface: u32,
    confirmed: bool,
) -> rustix::io::Result<Route> {
    if let Some(system) = platform.hosted() {
        let source = system.source_for(peer, interface)?;
        return Ok(Route { interface: 0, source, local: false });
    }
    match NetlinkSocket::open_route() {
        Ok(mut socket) => ask_route(&mut socket, peer, interface, confirmed),
        // A sandbox may permit sockets of the internet and no others.
        Err(_) => Ok(Route { interface: 0, source: source_for(peer, interface)?, local: false }),
    }
}

fn ask_route(
    transport: &mut impl NetlinkTransport,
    peer: IpAddr,
    interface: u32,
    confirmed: bool,
) -> rustix::io::Result<Route> {
    // For IPv6 an interface excludes all routes over others already.
    if confirmed && interface != 0 && peer.is_ipv4() {
        one_route(transport, peer, interface, RTM_F_FIB_MATCH)?;
    }
    let route = one_route(transport, peer, interface, 0)?;
    let source = route.source.or(route.local.then_some(peer)).ok_or(Errno::ADDRNOTAVAIL)?;
    Ok(Route { interface: route.interface, source, local: route.local })
}

/// The fields of an answer.
#[derive(Default)]
struct RouteAnswer {
    interface: u32,
    source: Option<IpAddr>,
    local: bool,
}

fn one_route(
    transport: &mut impl NetlinkTransport,
    peer: IpAddr,
    interface: u32,
    flags: u32,
) -> rustix::io::Result<RouteAnswer> {
    const SEQUENCE: u32 = 1;
    let (family, address) = match peer {
        IpAddr::V4(v4) => (AddressFamily::INET, v4.octets().to_vec()),
        IpAddr::V6(v6) => (AddressFamily::INET6, v6.octets().to_vec()),
    };
    let mut header = vec![0; ROUTE_HEADER];
    header[0] = family.as_raw() as u8;
    header[1] = 8 * address.len() as u8;
    header[8..].copy_from_slice(&flags.to_ne_bytes());
    let mut request = Request::with_header(RTM_GETROUTE, header).bytes(RTA_DST, address);
    if interface != 0 {
        request = request.number(RTA_OIF, interface);
    }
    transport.send(&request.datagram(0, SEQUENCE))?;
    read_until(transport, |message| {
        if let Some(errno) = message.failure().map_err(|_| Errno::BADMSG)? {
            return Err(errno);
        }
        (message.kind == RTM_NEWROUTE).then(|| route_answer(message.payload)).transpose()
    })
}

/// Reads messages until one of them ends the answer.
fn read_until<T>(
    transport: &mut impl NetlinkTransport,
    mut end: impl FnMut(&NetlinkMessage<'_>) -> rustix::io::Result<Option<T>>,
) -> rustix::io::Result<T> {
    let mut datagram = Vec::new();
    loop {
        transport.receive(&mut datagram)?;
        for message in Messages(&datagram) {
            if let Some(answer) = end(&message.map_err(|_| Errno::BADMSG)?)? {
                return Ok(answer);
            }
        }
    }
}

fn route_answer(payload: &[u8]) -> rustix::io::Result<RouteAnswer> {
    let attributes = payload.get(ROUTE_HEADER..).ok_or(Errno::BADMSG)?;
    let mut route = RouteAnswer { local: payload[7] == RTN_LOCAL, ..RouteAnswer::default() };
    for attribute in Attributes(attributes).iter() {
        match attribute.map_err(|_| Errno::BADMSG)? {
            (RTA_OIF, value) => route.interface = value.narrow().map_err(|_| Errno::BADMSG)?,
            (RTA_PREFSRC, value) => route.source = ip(value.bytes()),
            _ => {}
        }
    }
    Ok(route)
}

/// The address from which a socket sends to `peer`. `interface` is where a link-local peer is.
fn source_for(peer: IpAddr, interface: u32) -> rustix::io::Result<IpAddr> {
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
    /// The port of the discard service; no packet is sent.
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
    let mut found = Vec::new();
    read_until(transport, |message| {
        match message.kind {
            NLMSG_DONE => return Ok(Some(())),
            NLMSG_ERROR => return Err(Errno::OPNOTSUPP),
            kind if kind == answer => {
                let index = message.payload.get(4..8).and_then(|bytes| bytes.try_into().ok());
                let index = u32::from_ne_bytes(index.ok_or(Errno::BADMSG)?);
                let attributes = message.payload.get(header..).ok_or(Errno::BADMSG)?;
                found.extend(read(index, Attributes(attributes)));
            }
            _ => {}
        }
        Ok(None)
    })?;
    Ok(found)
}

fn interface(index: u32, attributes: Attributes<'_>) -> Option<Interface> {
    let mut interface = Interface { index, ..Interface::default() };
    let mut lower_is_elsewhere = false;
    for (kind, value) in attributes.iter().map_while(Result::ok) {
        match kind {
            IFLA_ADDRESS => interface.hardware = value.bytes().to_vec(),
            IFLA_IFNAME => interface.name = value.string(),
            IFLA_LINK => interface.lower = value.narrow().unwrap_or(0),
            IFLA_MASTER => interface.master = value.narrow().unwrap_or(0),
            IFLA_LINK_NETNSID => lower_is_elsewhere = true,
            _ => {}
        }
    }
    if lower_is_elsewhere || interface.lower == index {
        interface.lower = 0;
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
            ..Interface::default()
        };
        let links = addresses.iter().map(interface).collect();
        let addresses = addresses.iter().map(|(index, _, address)| (*index, *address)).collect();
        Addresses { known: Some((links, addresses)) }
    }

    /// The same, with interface `upper` stacked on `lower`.
    pub(crate) fn stacked(mut self, upper: u32, lower: u32) -> Addresses {
        self.link(upper).lower = lower;
        self
    }

    /// The same, with interface `part` being part of the bond or bridge `master`.
    pub(crate) fn enslaved(mut self, part: u32, master: u32) -> Addresses {
        self.link(part).master = master;
        self
    }

    fn link(&mut self, index: u32) -> &mut Interface {
        let (links, _) = self.known.as_mut().unwrap();
        links.iter_mut().find(|link| link.index == index).unwrap()
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
        let route = route_to(&Platform::LINUX, LOCALHOST, 0, true).unwrap();
        assert_eq!((route.source, route.local), (LOCALHOST, true));
    }

    #[test]
    fn a_route_is_asked_for_with_its_interface() {
        let answer = |kind: u8, attributes: &[Vec<u8>]| {
            let mut payload = vec![2, 32, 0, 0, 254, 0, 0, kind, 0, 0, 0, 0];
            payload.extend(attributes.concat());
            message(RTM_NEWROUTE, 0, 1, &payload)
        };
        let over = |index: u32| attribute(RTA_OIF, &index.to_ne_bytes());
        let from = attribute(RTA_PREFSRC, &[10, 0, 0, 1]);
        let peer = Ipv4Addr::new(10, 0, 0, 9).into();
        let source = Ipv4Addr::new(10, 0, 0, 1).into();
        // A confirmed route is looked up in the table first, whose answer has no source.
        let mut script = Script::default()
            .reply(answer(1, &[over(3)]))
            .reply(answer(1, &[over(3), from.clone()]));
        let route = ask_route(&mut &mut script, peer, 3, true).unwrap();
        assert_eq!(route, Route { interface: 3, source, local: false });
        let flags = |sent: &[u8]| u32::from_ne_bytes(sent[24..28].try_into().unwrap());
        assert_eq!(script.sent.iter().map(|sent| flags(sent)).collect::<Vec<_>>(), [0x2000, 0]);
        let expected = [attribute(RTA_DST, &[10, 0, 0, 9]), over(3)].concat();
        assert!(script.sent.iter().all(|sent| sent[28..] == expected[..]), "{:?}", script.sent);
        assert_eq!(script.sent[0][16..18], [2, 32]);
        // Without an interface there is one question.
        let mut script = Script::default().reply(answer(2, &[over(1), from]));
        let route = ask_route(&mut &mut script, peer, 0, true).unwrap();
        assert_eq!(route, Route { interface: 1, source, local: true });
        assert_eq!((script.sent.len(), script.sent[0].len()), (1, 36));
    }

    #[test]
    fn a_missing_route_is_the_errno_of_the_kernel() {
        let peer = Ipv4Addr::new(10, 0, 0, 9).into();
        let refused = |errno: Errno| {
            let payload = [(-errno.raw_os_error()).to_ne_bytes().to_vec(), vec![0; 16]].concat();
            message(NLMSG_ERROR, 0, 1, &payload)
        };
        for errno in [Errno::NETUNREACH, Errno::HOSTUNREACH] {
            let mut script = Script::default().reply(refused(errno));
            assert_eq!(ask_route(&mut &mut script, peer, 0, true), Err(errno));
        }
        let mut script = Script::default().reply(message(RTM_NEWROUTE, 0, 1, &[0; 11]));
        assert_eq!(ask_route(&mut &mut script, peer, 0, true), Err(Errno::BADMSG));
        let mut script = Script::default().reply(message(RTM_NEWROUTE, 0, 1, &[0; 12]));
        assert_eq!(ask_route(&mut &mut script, peer, 0, true), Err(Errno::ADDRNOTAVAIL));
    }

    #[test]
    fn the_ports_interface_and_its_bond_count_as_the_ports_own() {
        let address = Ipv4Addr::new(10, 0, 0, 1).into();
        let links = [(2, "eth0"), (3, "eth0.5"), (4, "bond0"), (5, "bond0.5")];
        let here = Addresses::planted(&links.map(|(index, name)| (index, name, address)));
        let here = here.stacked(3, 2).stacked(5, 4).enslaved(2, 4);
        let own = |netdev| [2, 3, 4, 5].map(|index| here.is_own(index, netdev));
        assert_eq!(own(Some("eth0")), [true, false, true, false]);
        // Without the port's interface, the interfaces that are not stacked on another.
        assert_eq!(own(None), [true, false, true, false]);
        assert_eq!(own(Some("bond0.5")), [false, false, false, true]);
        // A ring, which the kernel does not permit, ends.
        assert!(!here.enslaved(4, 2).is_own(3, Some("eth0")));
        assert!(Addresses::default().is_own(3, Some("eth0")));
    }

    #[test]
    fn the_lower_interface_counts_only_in_its_own_namespace() {
        let read = |attributes: &[Vec<u8>]| {
            let attributes = attributes.concat();
            let found = interface(7, Attributes(&attributes)).unwrap();
            (found.lower, found.master)
        };
        let number = |kind, value: u32| attribute(kind, &value.to_ne_bytes());
        assert_eq!(read(&[number(IFLA_LINK, 2), number(IFLA_MASTER, 4)]), (2, 4));
        assert_eq!(read(&[number(IFLA_LINK, 2), number(IFLA_LINK_NETNSID, 0)]), (0, 0));
        // A hardware interface may name itself as its lower interface.
        assert_eq!(read(&[number(IFLA_LINK, 7)]), (0, 0));
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
