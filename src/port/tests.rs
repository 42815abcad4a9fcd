use super::query::{choose_gid, parse_pkey};
use super::*;
use crate::number::Gid;
use std::net::{Ipv4Addr, Ipv6Addr};
use zerocopy::FromBytes;

fn entry(index: u32, gid_type: GidType, gid: impl Into<Gid>) -> GidEntry {
    GidEntry { gid: gid.into(), index, port: 1, gid_type, ifindex: 2 }
}

fn chosen(link_layer: LinkLayer, entries: &[GidEntry]) -> Option<u32> {
    choose_gid(link_layer, entries.iter().copied()).map(|entry| entry.index)
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
    assert_eq!(Mtu::MTU_4096.name(), Some("4096"));
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
