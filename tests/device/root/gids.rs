//! The choice of a GID if a port's interface has a VLAN or a macvlan, and if two ports are in one subnet; and paths
//! from a GID to an address without a host.

use super::cable::until;
use super::{Interface, Link, PORT, ip, links};
use crate::capability::Capability;
use crate::env;
use crate::testbed::link_of;
use crate::verdict::{Stop, Verdict, trials};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use uverbs::{AddressVector, Context, Device, Errno, Gid, GidEntry, GidFilter, GidType, LinkLayer};

trials![
    own_interface_comes_before_a_vlan_and_a_macvlan,
    one_address_on_two_interfaces_is_chosen_by_the_route,
    peer_is_reached_from_both_ports_in_one_subnet,
    errors_of_paths_without_a_peer_name_the_reason,
];

/// An address of an interface for the duration of a test.
struct Address(String);

impl Address {
    fn add(address: &str, interface: &str) -> Verdict<Address> {
        let words = format!("{address} dev {interface}");
        ip(&format!("addr add {words}"))?;
        Ok(Address(words))
    }
}

impl Drop for Address {
    fn drop(&mut self) {
        let _ = ip(&format!("addr del {}", self.0));
    }
}

/// A port and its own network interface.
struct Port {
    context: Context,
    number: u32,
    interface: String,
}

impl Port {
    fn of(device: &Device) -> Verdict<Port> {
        let context = Context::open(device)?;
        let number = link_of(&context)?.port;
        let ethernet = context.query_port(number)?.link_layer == LinkLayer::ETHERNET;
        match device.netdev(number)?.filter(|_| ethernet) {
            Some(interface) => Ok(Port { context, number, interface }),
            None => {
                let why = format!("port {number} of {device} has no interface of Ethernet");
                Err(Stop::Skip(Capability::Cm, why))
            }
        }
    }

    /// The GID of an address of an interface, once it is in the table.
    fn gid(&self, interface: &str, address: &str) -> Verdict<GidEntry> {
        let (interface, address) = (index_of(interface)?, address.parse::<IpAddr>()?);
        let is_it = |entry: &GidEntry| {
            let of_interface = (entry.ifindex, entry.gid.ip()) == (interface, address);
            of_interface && entry.gid_type == GidType::ROCE_V2 && entry.port == self.number
        };
        until("the address is in the table of GIDs", || {
            Ok(self.context.gid_table()?.into_iter().find(is_it))
        })
    }

    fn choose(&self, filter: GidFilter) -> Verdict<GidEntry> {
        Ok(self.context.choose_gid(self.number, &filter)?.entry)
    }
}

fn index_of(interface: &str) -> Verdict<u32> {
    Ok(fs::read_to_string(format!("/sys/class/net/{interface}/ifindex"))?.trim().parse()?)
}

/// An interface that stands on `lower` and has an address.
fn upper(lower: &str, name: &'static str, kind: &str, address: &str) -> Verdict<Interface> {
    ip(&format!("link add link {lower} name {name} type {kind}"))?;
    let interface = Interface(name);
    ip(&format!("addr add {address} dev {name}"))?;
    ip(&format!("link set {name} up"))?;
    Ok(interface)
}

fn own_interface_comes_before_a_vlan_and_a_macvlan() -> Verdict {
    const OWN: &str = "uvt14";
    const UPPER: &str = "uvt15";
    links()?;
    for kind in ["vlan id 78", "macvlan"] {
        for own in ["10.77.14.1", "10.77.15.1"] {
            ip(&format!("link add {OWN} type dummy"))?;
            let _interface = Interface(OWN);
            ip(&format!("link set {OWN} up"))?;
            let _link = Link::add("uvt_rxe", OWN)?;
            let context = Context::open(&Device::by_name("uvt_rxe")?)?;
            let port = Port { context, number: PORT, interface: OWN.into() };
            let _upper = upper(OWN, UPPER, kind, "10.77.15.1/24")?;
            let above = port.gid(UPPER, "10.77.15.1")?;
            // If a port's own interface has only a link-local address, the VLAN's GID is chosen.
            assert_eq!(port.context.default_gid(PORT)?, above, "{kind}");
            ip(&format!("addr add {own}/24 dev {OWN}"))?;
            let below = port.gid(OWN, own)?;
            assert!(above.index < below.index, "{above:?}, {below:?}");
            assert_eq!(port.context.default_gid(PORT)?, below, "{kind}");
            for entry in [above, below] {
                let named = GidFilter::new().interface(entry.ifindex).gid_type(GidType::ROCE_V2);
                assert_eq!(port.choose(named)?.ifindex, entry.ifindex, "{kind}");
            }
        }
    }
    Ok(())
}

fn one_address_on_two_interfaces_is_chosen_by_the_route() -> Verdict {
    const UPPER: &str = "uvt16";
    env::lab()?;
    let port = Port::of(&env::device())?;
    let peer: IpAddr = "10.77.16.9".parse()?;
    let _upper = upper(&port.interface, UPPER, "vlan id 79", "10.77.16.1/32")?;
    let above = port.gid(UPPER, "10.77.16.1")?;
    let _address = Address::add("10.77.16.1/24", &port.interface)?;
    let below = port.gid(&port.interface, "10.77.16.1")?;
    assert!(above.index < below.index, "{above:?}, {below:?}");
    let to_peer = GidFilter::new().peer(peer);
    let chosen = port.context.choose_gid(port.number, &to_peer)?;
    assert_eq!(chosen.entry, below, "{}", chosen.reason);
    let reason = format!("{peer} is reached from 10.77.16.1 of {}", port.interface);
    assert!(chosen.reason.ends_with(&reason), "{}", chosen.reason);
    assert_eq!(port.choose(to_peer.interface(above.ifindex))?, above);
    // The library follows the kernel's route over the VLAN.
    ip(&format!("route add {peer}/32 dev {UPPER} src 10.77.16.1"))?;
    let chosen = port.context.choose_gid(port.number, &to_peer)?;
    assert_eq!(chosen.entry, above, "{}", chosen.reason);
    assert_eq!(port.choose(to_peer.interface(below.ifindex))?, below);
    // For this machine's own address either interface is right.
    let own = GidFilter::new().peer("10.77.16.1".parse()?);
    assert_eq!(port.choose(own)?, below);
    Ok(())
}

fn peer_is_reached_from_both_ports_in_one_subnet() -> Verdict {
    const ADDRESSES: [&str; 2] = ["10.77.17.1", "10.77.17.2"];
    env::lab()?;
    let ports = [Port::of(&env::device())?, Port::of(&env::second()?)?];
    let mut rails = Vec::new();
    for (port, address) in ports.iter().zip(ADDRESSES) {
        rails.push(Address::add(&format!("{address}/24"), &port.interface)?);
    }
    let near = GidFilter::new().peer("10.77.17.9".parse()?);
    for (port, address) in ports.iter().zip(ADDRESSES) {
        let own = port.gid(&port.interface, address)?;
        for filter in [near, near.interface(own.ifindex)] {
            let chosen = port.context.choose_gid(port.number, &filter)?;
            assert_eq!(chosen.entry, own, "{}", chosen.reason);
        }
    }
    // A peer to which only the first port has a route.
    ip(&format!("route add 10.77.18.0/24 dev {} src {}", ports[0].interface, ADDRESSES[0]))?;
    let far = GidFilter::new().peer("10.77.18.9".parse()?);
    let index = index_of(&ports[1].interface)?;
    assert_eq!(ports[0].choose(far)?.gid.ip(), ADDRESSES[0].parse::<IpAddr>()?);
    let error = ports[1].context.choose_gid(ports[1].number, &far).unwrap_err();
    assert_eq!(error.errno(), Errno::NODATA, "{error}");
    assert!(error.message().contains(&ports[0].interface), "{error}");
    // If the program names an interface, the kernel takes the peer for a neighbour there.
    let named = ports[1].choose(far.interface(index))?;
    assert_eq!(named.ifindex, index);
    Ok(())
}

/// The kernel asks for the hardware address of a peer on the link, and waits for the answer.
fn errors_of_paths_without_a_peer_name_the_reason() -> Verdict {
    env::lab()?;
    let port = Port::of(&env::device())?;
    let pd = port.context.alloc_pd()?;
    let _address = Address::add("10.77.19.1/24", &port.interface)?;
    let own = port.gid(&port.interface, "10.77.19.1")?;
    let v6: Ipv6Addr = "2001:db8::9".parse()?;
    let peers: [(Gid, &str); 4] = [
        (v6.into(), "(10.77.19.1) is of IPv4, and the peer's GID 2001:db8::9 of IPv6"),
        (Ipv4Addr::LOCALHOST.into(), "127.0.0.1 is an address of the loopback interface"),
        (Ipv4Addr::new(10, 77, 19, 9).into(), "10.77.19.9 does not answer"),
        // The kernel takes the peer for a neighbour, or has no route.
        (Ipv4Addr::new(198, 51, 100, 9).into(), "no way to the peer: "),
    ];
    for (peer, text) in peers {
        let error = pd.create_ah(&AddressVector::global(port.number, own.index, peer)).unwrap_err();
        assert!(error.message().contains(text), "{error}");
        assert!(error.message().contains(&peer.ip().to_string()), "{error}");
    }
    Ok(())
}
