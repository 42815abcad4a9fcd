use super::choose::{GidFilter, choose_gid};
use super::query::parse_pkey;
use super::*;
use crate::device::addresses::Addresses;
use crate::number::Gid;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use zerocopy::FromBytes;

fn entry(index: u32, gid_type: GidType, gid: impl Into<Gid>) -> GidEntry {
    GidEntry { gid: gid.into(), index, port: 1, gid_type, ifindex: 2 }
}

fn chosen(link_layer: LinkLayer, entries: &[GidEntry]) -> Option<u32> {
    let here: Vec<_> = entries.iter().map(|entry| (2, "eth0", entry.gid.ip())).collect();
    let here = Addresses::planted(&here);
    let chosen = choose_gid(link_layer, entries, &GidFilter::new(), None, &here);
    chosen.ok().map(|chosen| chosen.entry.index)
}

#[test]
fn a_gid_whose_interface_is_elsewhere_is_not_chosen() {
    let (near, far) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2));
    let v2 = GidType::ROCE_V2;
    // Interface 2 of another namespace has the first address; 2 here has the second.
    let table = [entry(0, v2, far), entry(1, GidType::ROCE_V1, near), entry(2, v2, near)];
    let here = Addresses::planted(&[(2, "eth0", near.into()), (3, "eth1", far.into())]);
    let choose = |filter, source| choose_gid(LinkLayer::ETHERNET, &table, &filter, source, &here);
    let chosen = choose(GidFilter::new(), None).unwrap();
    assert_eq!(chosen.entry.index, 2);
    assert!(chosen.reason.contains("RoCE v2, an IPv4 address of eth0"), "{}", chosen.reason);
    assert!(chosen.reason.contains("index 0 (10.0.0.2, RoCE v2)"), "{}", chosen.reason);
    let v1 = choose(GidFilter::new().gid_type(GidType::ROCE_V1), None).unwrap();
    assert_eq!(v1.entry.index, 1);
    let error = choose(GidFilter::new().interface(3), None).unwrap_err();
    assert!(error.contains("has no GID of interface 3; there are index 1"), "{error}");
    let empty = Addresses::planted(&[]);
    let error = choose_gid(LinkLayer::ETHERNET, &table, &GidFilter::new(), None, &empty);
    assert!(error.unwrap_err().contains("no GID of this network namespace"));
    let error = choose_gid(LinkLayer::ETHERNET, &[], &GidFilter::new(), None, &here).unwrap_err();
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
        choose_gid(LinkLayer::ETHERNET, &table, &filter, Some(source.into()), &here)
    };
    let chosen = choose(other).unwrap();
    assert_eq!(chosen.entry.index, 1);
    assert!(chosen.reason.contains("10.0.1.9 is reached from 10.0.1.1"), "{}", chosen.reason);
    let error = choose(Ipv4Addr::new(192, 0, 2, 1)).unwrap_err();
    assert!(error.contains("of address 192.0.2.1, from which 10.0.1.9 is reached"), "{error}");
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
