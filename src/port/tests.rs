use super::choose::{ChosenGid, Facts, GidFilter, Refusal, choose_gid};
use super::query::parse_pkey;
use super::*;
use crate::device::addresses::{Addresses, Route};
use crate::number::Gid;
use rustix::io::Errno;
use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use zerocopy::FromBytes;

fn entry(index: u32, gid_type: GidType, gid: impl Into<Gid>) -> GidEntry {
    GidEntry { gid: gid.into(), index, port: 1, gid_type, ifindex: 2 }
}

fn on(ifindex: u32, entry: GidEntry) -> GidEntry {
    GidEntry { ifindex, ..entry }
}

fn chosen(link_layer: LinkLayer, entries: &[GidEntry]) -> Option<u32> {
    let here: Vec<_> = entries.iter().map(|entry| (2, "eth0", entry.gid.ip())).collect();
    let facts = Facts {
        ethernet: link_layer == LinkLayer::ETHERNET,
        netdev: None,
        addresses: &Addresses::planted(&here),
        route: &unrouted,
    };
    let chosen = choose_gid(&facts, entries, &GidFilter::new());
    chosen.ok().map(|chosen| chosen.entry.index)
}

/// A kernel without routes.
fn unrouted(_: IpAddr, _: u32, _: bool) -> rustix::io::Result<Route> {
    Err(Errno::NETUNREACH)
}

/// The reason why there is no GID.
fn no_gid(chosen: std::result::Result<ChosenGid, Refusal>) -> String {
    match chosen {
        Err(Refusal::NoGid(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_gid_whose_interface_is_elsewhere_is_not_chosen() {
    let (near, far) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2));
    let v2 = GidType::ROCE_V2;
    // Interface 2 of another namespace has the first address; 2 here has the second.
    let table = [entry(0, v2, far), entry(1, GidType::ROCE_V1, near), entry(2, v2, near)];
    let here = Addresses::planted(&[(2, "eth0", near.into()), (3, "eth1", far.into())]);
    let facts = |addresses| Facts { ethernet: true, netdev: None, addresses, route: &unrouted };
    let choose = |filter| choose_gid(&facts(&here), &table, &filter);
    let chosen = choose(GidFilter::new()).unwrap();
    assert_eq!(chosen.entry.index, 2);
    assert!(chosen.reason.contains("RoCE v2, an IPv4 address of eth0"), "{}", chosen.reason);
    assert!(chosen.reason.contains("index 0 (10.0.0.2, RoCE v2)"), "{}", chosen.reason);
    let v1 = choose(GidFilter::new().gid_type(GidType::ROCE_V1)).unwrap();
    assert_eq!(v1.entry.index, 1);
    let error = no_gid(choose(GidFilter::new().interface(3)));
    assert!(error.contains("has no GID of eth1; there are index 2"), "{error}");
    let error = no_gid(choose(GidFilter::new().interface(9).gid_type(GidType::IB)));
    assert!(error.contains("has no GID of type IB of interface 9; there"), "{error}");
    let empty = Addresses::planted(&[]);
    let error = no_gid(choose_gid(&facts(&empty), &table, &GidFilter::new()));
    assert!(error.contains("no GID of this network namespace"), "{error}");
    let error = no_gid(choose_gid(&facts(&here), &[], &GidFilter::new()));
    assert!(error.contains("has no GID: its network interface is down"), "{error}");
}

#[test]
fn a_gid_is_chosen_by_the_way_to_the_peer() {
    let (one, other) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 1, 1));
    let table = [entry(0, GidType::ROCE_V2, one), entry(1, GidType::ROCE_V2, other)];
    let here = Addresses::planted(&[(2, "eth0", one.into()), (2, "eth0", other.into())]);
    let peer: IpAddr = Ipv4Addr::new(10, 0, 1, 9).into();
    let filter = GidFilter::new().peer(peer);
    let choose = |source: Ipv4Addr| {
        let route = move |_, interface, _| match interface {
            0 => Ok(Route { interface: 2, source: source.into(), local: false }),
            _ => Err(Errno::HOSTUNREACH),
        };
        let facts = Facts { ethernet: true, netdev: None, addresses: &here, route: &route };
        choose_gid(&facts, &table, &filter)
    };
    let chosen = choose(other).unwrap();
    assert_eq!(chosen.entry.index, 1);
    assert!(chosen.reason.contains("10.0.1.9 is reached from 10.0.1.1 of eth0"), "{chosen:?}");
    let error = no_gid(choose(Ipv4Addr::new(192, 0, 2, 1)));
    assert!(error.contains("of address 192.0.2.1 of eth0, from which 10.0.1.9 is"), "{error}");
    let facts = Facts { ethernet: true, netdev: None, addresses: &here, route: &unrouted };
    let error = choose_gid(&facts, &table, &filter).unwrap_err();
    assert!(matches!(&error, Refusal::NoRoute(Errno::NETUNREACH, why) if why.contains("10.0.1.9")));
    let link_local = GidFilter::new().peer("fe80::1".parse().unwrap());
    let error = choose_gid(&facts, &table, &link_local).unwrap_err();
    let names = |why: &str| why.contains("name the interface");
    assert!(matches!(&error, Refusal::NoRoute(Errno::INVAL, why) if names(why)), "{error:?}");
}

/// A port with interface 2, a VLAN on it (3) whose GIDs come first, and a macvlan (4) behind it.
#[test]
fn the_ports_own_interface_comes_before_those_that_stand_on_it() {
    let v2 = GidType::ROCE_V2;
    let (own, vlan) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 5, 1));
    let own_v6: Ipv6Addr = "2001:db8::1".parse().unwrap();
    let link_local: Ipv6Addr = "fe80::1".parse().unwrap();
    let addresses: [(u32, &str, IpAddr); 7] = [
        (2, "eth0", own.into()),
        (2, "eth0", own_v6.into()),
        (2, "eth0", link_local.into()),
        (3, "eth0.5", vlan.into()),
        (3, "eth0.5", own.into()),
        (4, "macvlan0", vlan.into()),
        (4, "macvlan0", own.into()),
    ];
    let here = Addresses::planted(&addresses).stacked(3, 2).stacked(4, 2);
    let choose = |netdev, table: &[GidEntry], filter| {
        let facts = Facts { ethernet: true, netdev, addresses: &here, route: &unrouted };
        choose_gid(&facts, table, &filter).unwrap()
    };
    let any = GidFilter::new();
    for netdev in [Some("eth0"), None] {
        for (upper, address) in [(3, vlan), (4, vlan), (3, own), (4, own)] {
            let table = [on(upper, entry(0, v2, address)), entry(1, v2, own)];
            let chosen = choose(netdev, &table, any);
            assert_eq!(chosen.entry.index, 1, "{upper} {address}: {}", chosen.reason);
            assert!(chosen.reason.contains("of eth0"), "{}", chosen.reason);
            let named = choose(netdev, &table, any.interface(upper));
            assert_eq!(named.entry.index, 0, "{upper} {address}: {}", named.reason);
        }
        // A routed address of the own interface is better than any of a VLAN, and a link-local one is not.
        let table = [on(3, entry(0, v2, vlan)), entry(1, v2, link_local)];
        assert_eq!(choose(netdev, &table, any).entry.index, 0);
        let table = [on(3, entry(0, v2, vlan)), entry(1, v2, link_local), entry(2, v2, own_v6)];
        assert_eq!(choose(netdev, &table, any).entry.index, 2);
    }
    // A virtual machine or container that got only the macvlan has no other GID.
    assert_eq!(choose(Some("eth0"), &[on(4, entry(0, v2, vlan))], any).entry.index, 0);
}

#[test]
fn of_two_gids_with_one_address_that_of_the_routes_interface_is_chosen() {
    let v2 = GidType::ROCE_V2;
    let address = Ipv4Addr::new(10, 0, 0, 1);
    let here = Addresses::planted(&[(2, "eth0", address.into()), (3, "eth0.5", address.into())]);
    let here = here.stacked(3, 2);
    let table = [on(3, entry(0, v2, address)), entry(1, v2, address)];
    let filter = GidFilter::new().peer(Ipv4Addr::new(10, 0, 0, 9).into());
    let choose = |filter: &GidFilter, preferred| {
        let route = move |_, interface, _| {
            let interface = if interface == 0 { preferred } else { interface };
            Ok(Route { interface, source: address.into(), local: interface == 1 })
        };
        let facts = Facts { ethernet: true, netdev: None, addresses: &here, route: &route };
        choose_gid(&facts, &table, filter).unwrap()
    };
    let (own, vlan) = (choose(&filter, 2), choose(&filter, 3));
    assert_eq!((own.entry.index, vlan.entry.index), (1, 0));
    assert_eq!(own.reason, "RoCE v2, 10.0.0.9 is reached from 10.0.0.1 of eth0");
    assert_eq!(vlan.reason, "RoCE v2, 10.0.0.9 is reached from 10.0.0.1 of eth0.5");
    let named = choose(&filter.interface(3), 2);
    assert_eq!((named.entry.index, named.reason), (0, vlan.reason));
    // Without netlink no interface is known, and to this machine itself (1, the loopback) none counts.
    for unknown in [0, 1] {
        let chosen = choose(&filter, unknown);
        assert_eq!(chosen.entry.index, 1);
        assert_eq!(chosen.reason, "RoCE v2, 10.0.0.9 is reached from 10.0.0.1");
    }
}

/// Two ports in one subnet; the kernel prefers the other port's interface.
#[test]
fn a_peer_is_reached_from_the_port_that_the_kernel_does_not_prefer() {
    let (eth0, eth1) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2));
    let here = Addresses::planted(&[(2, "eth0", eth0.into()), (3, "eth1", eth1.into())]);
    let table = [on(3, entry(0, GidType::ROCE_V2, eth1))];
    let near = IpAddr::from(Ipv4Addr::new(10, 0, 0, 9));
    let route = |peer: IpAddr, interface: u32, confirmed: bool| {
        let (interface, source) = match interface {
            0 | 2 => (2, eth0),
            // On a named interface the kernel treats every peer as a neighbour.
            3 if confirmed && peer != near => return Err(Errno::HOSTUNREACH),
            _ => (interface, eth1),
        };
        Ok(Route { interface, source: source.into(), local: false })
    };
    let facts = Facts { ethernet: true, netdev: Some("eth1"), addresses: &here, route: &route };
    let filter = GidFilter::new().peer(near);
    let chosen = choose_gid(&facts, &table, &filter).unwrap();
    assert_eq!(chosen.entry.index, 0);
    let prefers =
        "from 10.0.0.2 of eth1; the kernel prefers 10.0.0.1 of eth0, which is not the port's";
    assert!(chosen.reason.ends_with(prefers), "{}", chosen.reason);
    let named = choose_gid(&facts, &table, &filter.interface(3)).unwrap();
    assert_eq!(named.reason, "RoCE v2, 10.0.0.9 is reached from 10.0.0.2 of eth1");
    // The port of a peer that only the other port reaches is not chosen, unless its interface is named.
    let filter = GidFilter::new().peer(Ipv4Addr::new(192, 0, 2, 9).into());
    let error = no_gid(choose_gid(&facts, &table, &filter));
    assert!(error.contains("of address 10.0.0.1 of eth0, from which 192.0.2.9"), "{error}");
    choose_gid(&facts, &table, &filter.interface(3)).unwrap();
    let error = no_gid(choose_gid(&facts, &table, &filter.interface(2)));
    assert!(error.contains("has no GID of eth0; there are index 0"), "{error}");
}

#[test]
fn the_default_gid_is_roce_v2_and_ipv4_where_there_is_one() {
    let link_local: Ipv6Addr = "fe80::1".parse().unwrap();
    let global: Ipv6Addr = "2001:db8::1".parse().unwrap();
    let v4 = Ipv4Addr::new(10, 0, 0, 1);
    let (v1, v2) = (GidType::ROCE_V1, GidType::ROCE_V2);
    let mut table = vec![
        entry(0, v1, link_local),
        entry(1, v2, link_local),
        entry(2, v1, v4),
        entry(3, v1, global),
    ];
    // RoCE v2 with a link-local address comes before v1 with a better one.
    assert_eq!(chosen(LinkLayer::ETHERNET, &table), Some(1));
    table.push(entry(4, v2, global));
    assert_eq!(chosen(LinkLayer::ETHERNET, &table), Some(4));
    table.push(entry(6, v2, v4));
    table.push(entry(5, v2, v4));
    assert_eq!(chosen(LinkLayer::ETHERNET, &table), Some(5));
    // Without RoCE v2 the default is a GID of v1.
    assert_eq!(chosen(LinkLayer::ETHERNET, &[table[0], table[3], table[2]]), Some(2));
    assert_eq!(chosen(LinkLayer::ETHERNET, &[]), None);
    assert_eq!(chosen(LinkLayer::ETHERNET, &[entry(0, v2, Gid::default())]), None);
}

#[test]
fn on_infiniband_the_first_gid_is_the_default() {
    let table = [
        entry(1, GidType::IB, Gid([2; 16])),
        entry(0, GidType::IB, Gid([0xfe; 16])),
        entry(2, GidType::IB, Ipv4Addr::new(10, 0, 0, 1)),
    ];
    assert_eq!(chosen(LinkLayer::INFINIBAND, &table), Some(0));
}

#[test]
fn mtu_codes_have_sizes_in_bytes() {
    let sizes: Vec<_> = (0..=6).map(|code| Mtu(code).bytes()).collect();
    let expected = [None, Some(256), Some(512), Some(1024), Some(2048), Some(4096), None];
    assert_eq!(sizes, expected);
    assert_eq!(Mtu::MTU_4096.description(), Some("4096"));
}

/// Each byte of the response is its offset in `ib_uverbs_query_port_resp_ex` plus one.
#[test]
#[cfg(target_endian = "little")]
fn each_port_attribute_is_read_from_its_field() {
    let bytes: [u8; 48] = std::array::from_fn(|n| n as u8 + 1);
    let raw = uapi::ib_uverbs_query_port_resp_ex::read_from_bytes(&bytes).unwrap();
    let attr = PortAttr::new(&raw);
    let expected = PortAttr {
        state: PortState(27),
        phys_state: PhysState(37),
        link_layer: LinkLayer(38),
        max_mtu: Mtu(28),
        active_mtu: Mtu(29),
        gid_table_len: 0x1413_1211,
        pkey_table_len: 0x1615,
        caps: PortCaps::from_bits_retain(0x0403_0201),
        caps2: 0x2a29,
        max_msg_size: 0x0807_0605,
        bad_pkey_count: 0x0c0b_0a09,
        qkey_violation_count: 0x100f_0e0d,
        lid: 0x1817,
        sm_lid: 0x1a19,
        sm_sl: 32,
        lmc: 30,
        max_vl_num: 31,
        subnet_timeout: 33,
        init_type_reply: 34,
        active_width: LinkWidth(35),
        active_speed: LinkSpeed(0x302f_2e2d),
        grh_required: true,
    };
    assert_eq!(attr, expected);
    // An older kernel leaves the wide speed 0.
    let mut older = raw;
    older.active_speed_ex = 0;
    assert_eq!(PortAttr::new(&older).active_speed, LinkSpeed(36));
    older.legacy_resp.flags = 0xfe;
    assert!(!PortAttr::new(&older).grh_required);
}

#[test]
fn partition_keys_are_hexadecimal() {
    assert_eq!(parse_pkey("0xffff\n"), Some(0xffff));
    assert_eq!(parse_pkey("0x8001"), Some(0x8001));
    for text in ["", "ffff\n", "0x", "0x10000\n", "0xzz"] {
        assert_eq!(parse_pkey(text), None, "{text:?}");
    }
}

#[test]
fn link_rate_is_the_lanes_times_the_rate_of_one() {
    let link =
        |active_width, active_speed| PortAttr { active_width, active_speed, ..PortAttr::default() };
    assert_eq!(link(LinkWidth::X4, LinkSpeed::EDR).link_rate_mbps(), Some(100_000));
    assert_eq!(link(LinkWidth::X2, LinkSpeed::SDR).link_rate_mbps(), Some(5_000));
    assert_eq!(link(LinkWidth::X12, LinkSpeed::XDR).link_rate_mbps(), Some(2_400_000));
    assert_eq!(link(LinkWidth(3), LinkSpeed::EDR).link_rate_mbps(), None);
    assert_eq!(link(LinkWidth::X1, LinkSpeed(3)).link_rate_mbps(), None);
}

#[test]
fn the_route_over_an_interface_is_asked_for_once_however_many_gids_it_has() {
    let addresses = [1, 2, 3].map(|last| Ipv4Addr::new(10, 0, 0, last));
    let here = addresses.map(|address| (3, "eth1", IpAddr::from(address)));
    let here = Addresses::planted(&here);
    let of = |index: u32| on(3, entry(index, GidType::ROCE_V2, addresses[index as usize]));
    let (table, asked) = ([0, 1, 2].map(of), Cell::new(0));
    let route = |_, interface, _| {
        asked.set(asked.get() + 1);
        // The kernel prefers another port's address, and on this interface the last one.
        let (interface, last) = if interface == 0 { (2, 9) } else { (interface, 3) };
        let source = Ipv4Addr::new(10, 0, 0, last).into();
        Ok(Route { interface, source, local: false })
    };
    let facts = Facts { ethernet: true, netdev: None, addresses: &here, route: &route };
    let filter = GidFilter::new().peer(Ipv4Addr::new(10, 0, 0, 77).into());
    assert_eq!(choose_gid(&facts, &table, &filter).unwrap().entry.index, 2);
    assert_eq!(asked.get(), 2, "once for any interface, and once for this one");
}
