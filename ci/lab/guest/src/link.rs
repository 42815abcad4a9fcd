//! Network interfaces and the soft-RoCE devices on them.
//!
//! Two soft-RoCE devices, `rxe0` on `h0` and `rxe1` on `h1`, at the two ends of one virtual cable,
//! or the ports of two devices that the machine has. Both live in the first network namespace,
//! because until 7.x soft-RoCE works in no other. By default the kernel would deliver packets from
//! 10.0.0.1 to 10.0.0.2 inside the loopback interface, where no RDMA device receives them; policy
//! rules send packets that are bound to one interface out through it.

use crate::Failure;
use crate::netlink::{CREATE, Netlink, Request};
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::SockProtocol;
use std::fs;
use std::net::Ipv4Addr;

const NEW_LINK: u16 = 16;
const NEW_ADDRESS: u16 = 20;
const NEW_ROUTE: u16 = 24;
const NEW_NEIGHBOUR: u16 = 28;
const NEW_RULE: u16 = 32;
const DELETE_RULE: u16 = 33;

const LINK_ADDRESS: u16 = 1;
const LINK_NAME: u16 = 3;
const LINK_INFO: u16 = 18;
const LINK_INFO_KIND: u16 = 1;
const LINK_INFO_DATA: u16 = 2;
const VETH_PEER: u16 = 1;
const UP: u32 = 1;

const INET: u8 = 2;
const LOCAL_TABLE: u8 = 255;

/// RDMA_NL_NLDEV, RDMA_NLDEV_CMD_NEWLINK.
const NEW_RDMA_LINK: u16 = (5 << 10) | 3;
const RDMA_DEVICE_NAME: u16 = 2;
const RDMA_NETDEV_NAME: u16 = 51;
const RDMA_LINK_TYPE: u16 = 65;

/// One of two interfaces that reach each other.
struct End {
    interface: String,
    hardware: [u8; 6],
    address: Ipv4Addr,
    /// Routing table for packets that leave through this end.
    table: u8,
}

impl End {
    fn new(number: u8, interface: &str, hardware: [u8; 6]) -> Self {
        let address = Ipv4Addr::new(10, 0, 0, number + 1);
        Self { interface: interface.to_owned(), hardware, address, table: 101 + number }
    }
}

/// `struct ifinfomsg`.
fn link_header(index: u32, flags: u32, change: u32) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    bytes.extend_from_slice(&index.to_ne_bytes());
    bytes.extend_from_slice(&flags.to_ne_bytes());
    bytes.extend_from_slice(&change.to_ne_bytes());
    bytes
}

fn up(route: &Netlink, interface: &str) -> Result<(), Failure> {
    let index = if_nametoindex(interface)?;
    route
        .call(Request::new(NEW_LINK, 0, &link_header(index, UP, UP)))
        .map_err(|error| format!("bring {interface} up: {error}").into())
}

/// Brings `lo` up, over which programs exchange addresses.
pub(crate) fn bring_up_loopback() -> Result<(), Failure> {
    up(&Netlink::open(SockProtocol::NetlinkRoute)?, "lo")
}

/// Makes the cable and a soft-RoCE device at either end.
pub(crate) fn make_soft_roce_pair() -> Result<(), Failure> {
    let ends =
        [End::new(0, "h0", [0x02, 0, 0, 0, 0, 0x01]), End::new(1, "h1", [0x02, 0, 0, 0, 0, 0x02])];
    let route = Netlink::open(SockProtocol::NetlinkRoute)?;
    make_cable(&route, &ends).map_err(|error| format!("make the veth pair: {error}"))?;
    connect(&route, &ends)?;
    let rdma = Netlink::open(SockProtocol::NetlinkRDMA)?;
    for (end, device) in ends.iter().zip(["rxe0", "rxe1"]) {
        rdma.call(
            Request::new(NEW_RDMA_LINK, 0, &[])
                .text(RDMA_DEVICE_NAME, device)
                .text(RDMA_NETDEV_NAME, &end.interface)
                .text(RDMA_LINK_TYPE, "rxe"),
        )
        .map_err(|error| format!("make {device} on {}: {error}", end.interface))?;
    }
    Ok(())
}

/// Gives the first two devices' Ethernet ports addresses, where they have such ports.
pub(crate) fn connect_ports(devices: &[String]) -> Result<(), Failure> {
    let mut ends = Vec::new();
    for (number, device) in (0..2).zip(devices) {
        let directory = format!("/sys/class/infiniband/{device}/device/net");
        // An InfiniBand port has no network interface, and needs none.
        let Ok(mut entries) = fs::read_dir(&directory) else { return Ok(()) };
        let Some(entry) = entries.next() else { return Ok(()) };
        let interface = entry?.file_name().to_string_lossy().into_owned();
        let path = format!("/sys/class/net/{interface}/address");
        let text = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        let hardware =
            hardware_address(&text).ok_or_else(|| format!("{path} holds {:?}", text.trim()))?;
        ends.push(End::new(number, &interface, hardware));
    }
    let route = Netlink::open(SockProtocol::NetlinkRoute)?;
    match <[End; 2]>::try_from(ends) {
        Ok(ends) => connect(&route, &ends),
        Err(ends) => ends.iter().try_for_each(|end| start(&route, end)),
    }
}

/// Six numbers in hexadecimal between colons.
fn hardware_address(text: &str) -> Option<[u8; 6]> {
    let bytes: Option<Vec<u8>> =
        text.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    bytes?.try_into().ok()
}

/// Settings for two hosts in one. Interfaces take them over when they appear.
pub(crate) fn relax() -> Result<(), Failure> {
    // No duplicate address detection: it would keep link-local GIDs unusable for a second or two.
    // Addresses of this very host must be accepted from outside, and no filter may drop them.
    for (setting, value) in [
        ("ipv6/conf/all/accept_dad", "0"),
        ("ipv6/conf/default/accept_dad", "0"),
        ("ipv4/conf/all/accept_local", "1"),
        ("ipv4/conf/default/accept_local", "1"),
        ("ipv4/conf/all/rp_filter", "0"),
        ("ipv4/conf/default/rp_filter", "0"),
    ] {
        let path = format!("/proc/sys/net/{setting}");
        fs::write(&path, value).map_err(|error| format!("write {path}: {error}"))?;
    }
    Ok(())
}

/// Brings an end up with its address.
fn start(route: &Netlink, end: &End) -> Result<(), Failure> {
    up(route, &end.interface)?;
    add_address(route, end)
        .map_err(|error| format!("give {} its address: {error}", end.interface).into())
}

/// Starts both ends, and routes packets from one to the other out through the interface.
fn connect(route: &Netlink, ends: &[End; 2]) -> Result<(), Failure> {
    let [first, second] = ends;
    for end in ends {
        start(route, end)?;
    }
    for (end, other) in [(first, second), (second, first)] {
        route_out(route, end, other)
            .map_err(|error| format!("route out of {}: {error}", end.interface))?;
    }
    // The kernel consults the local table first unless its rule moves behind ours.
    rule(route, NEW_RULE, CREATE, 100, LOCAL_TABLE, None)
        .and_then(|()| rule(route, DELETE_RULE, 0, 0, LOCAL_TABLE, None))
        .map_err(|error| format!("move the local table's rule: {error}").into())
}

fn make_cable(route: &Netlink, [near, far]: &[End; 2]) -> Result<(), Errno> {
    route.call(
        Request::new(NEW_LINK, CREATE, &link_header(0, 0, 0))
            .text(LINK_NAME, &near.interface)
            .attribute(LINK_ADDRESS, &near.hardware)
            .nested(LINK_INFO, |info| {
                info.text(LINK_INFO_KIND, "veth").nested(LINK_INFO_DATA, |data| {
                    data.nested(VETH_PEER, |peer| {
                        peer.raw(&link_header(0, 0, 0))
                            .text(LINK_NAME, &far.interface)
                            .attribute(LINK_ADDRESS, &far.hardware)
                    })
                })
            }),
    )
}

fn add_address(route: &Netlink, end: &End) -> Result<(), Errno> {
    let index = if_nametoindex(end.interface.as_str())?;
    // `struct ifaddrmsg`: family, prefix length, flags, scope, index.
    let mut header = vec![INET, 24, 0, 0];
    header.extend_from_slice(&index.to_ne_bytes());
    route.call(
        Request::new(NEW_ADDRESS, CREATE, &header)
            .attribute(1, &end.address.octets())
            .attribute(2, &end.address.octets()),
    )
}

/// Routes packets that are bound to `end` and addressed to `other` out of `end`'s interface.
fn route_out(route: &Netlink, end: &End, other: &End) -> Result<(), Errno> {
    let index = if_nametoindex(end.interface.as_str())?;
    // `struct rtmsg`: family, destination and source length, tos, table, protocol, scope, type.
    let mut header = vec![INET, 32, 0, 0, end.table, 4, 253, 1];
    header.extend_from_slice(&[0; 4]);
    route.call(
        Request::new(NEW_ROUTE, CREATE, &header)
            .attribute(1, &other.address.octets())
            .number(4, index)
            .attribute(7, &end.address.octets()),
    )?;
    // `struct ndmsg`: family, padding, index, state, flags, type. State 0x80 is permanent.
    let mut neighbour = vec![INET, 0, 0, 0];
    neighbour.extend_from_slice(&index.to_ne_bytes());
    neighbour.extend_from_slice(&0x80_u16.to_ne_bytes());
    neighbour.extend_from_slice(&[0, 1]);
    route.call(
        Request::new(NEW_NEIGHBOUR, CREATE, &neighbour)
            .attribute(1, &other.address.octets())
            .attribute(2, &other.hardware),
    )?;
    rule(route, NEW_RULE, CREATE, 10, end.table, Some((&end.interface, other.address)))
}

/// A policy rule that looks `table` up, for packets that leave an interface towards an address, or
/// for all.
fn rule(
    route: &Netlink,
    kind: u16,
    flags: u16,
    priority: u32,
    table: u8,
    only: Option<(&str, Ipv4Addr)>,
) -> Result<(), Errno> {
    // `struct fib_rule_hdr`: family, destination and source length, tos, table, two reserved
    // bytes, action (1: look the table up), flags.
    let destination_length = if only.is_some() { 32 } else { 0 };
    let mut header = vec![INET, destination_length, 0, 0, table, 0, 0, 1];
    header.extend_from_slice(&[0; 4]);
    let mut request = Request::new(kind, flags, &header).number(6, priority);
    if let Some((interface, destination)) = only {
        // `iif lo` matches packets that this host sends; arriving packets must not match.
        request = request.attribute(1, &destination.octets()).text(3, "lo").text(17, interface);
    }
    route.call(request)
}

#[cfg(test)]
mod tests {
    use super::hardware_address;

    #[test]
    fn hardware_addresses_are_read() {
        assert_eq!(hardware_address("02:00:00:00:00:fe\n"), Some([2, 0, 0, 0, 0, 0xfe]));
        assert_eq!(hardware_address("02:00:00:00:00"), None);
        assert_eq!(hardware_address("zz:00:00:00:00:00"), None);
    }
}
