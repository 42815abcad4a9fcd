//! Rules as they are sent to the kernel, byte for byte.

use super::*;
use std::net::{Ipv4Addr, Ipv6Addr};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The kernel's request for a rule of a queue pair.
fn request(rule: &FlowAttr, qp_handle: u32) -> Vec<u8> {
    rule.to_bytes("create_flow", qp_handle).unwrap()
}

/// The specification of a rule that has one.
fn spec(spec: impl Into<FlowSpec>) -> String {
    hex(&request(&FlowAttr::new(1).spec(spec), 0)[24..])
}

#[test]
fn a_request_has_the_count_and_the_length_of_its_specifications() {
    let rule = FlowAttr::new(2).priority(0x0304);
    assert_eq!(
        hex(&request(&rule, 0x0102_0304)),
        "000000000403020100000000000004030000000200000000"
    );
    let rule = rule.flow_type(FlowType::SNIFFER).dont_trap().egress();
    let bytes = request(&rule, 1);
    let (flow_type, flags) = (bytes[8], bytes[20]);
    assert_eq!((flow_type, flags), (3, 6));
    let rule = FlowAttr::new(1)
        .spec(FlowEth::new())
        .spec(FlowIpv4::new())
        .spec(FlowSpec::Tcp(FlowPorts::new()))
        .tag(5);
    let bytes = request(&rule, 1);
    let (length, count) = (bytes[12], bytes[16]);
    assert_eq!((length, count), (40 + 32 + 16 + 16, 4));
    assert_eq!(bytes.len(), 24 + 104);
}

#[test]
fn each_kind_of_specification_is_encoded_as_the_header_lays_it_out() {
    let eth = FlowEth::new()
        .dst_mac([1, 2, 3, 4, 5, 6])
        .src_mac_masked([7, 8, 9, 10, 11, 12], [0xff, 0, 0, 0, 0, 1])
        .ether_type(0x0800)
        .vlan(0x0abc);
    assert_eq!(
        spec(eth),
        "2000000028000000\
         01020304050607000000000008000abc\
         ffffffffffffff0000000001ffff0fff"
    );
    let ip = FlowIpv4::new()
        .src(Ipv4Addr::new(192, 0, 2, 1))
        .dst_masked(Ipv4Addr::new(198, 51, 100, 7), Ipv4Addr::new(255, 255, 255, 0))
        .proto(17)
        .tos(0x28)
        .ttl(64);
    assert_eq!(spec(ip), "3000000020000000c0000201c633640011284000ffffffffffffff00ffffff00");
    let to: Ipv6Addr = "2001:db8::1".parse().unwrap();
    let ip = FlowIpv6::new()
        .dst(to)
        .src_masked("fe80::1".parse().unwrap(), "ffc0::".parse().unwrap())
        .flow_label(0xff01_2345)
        .next_hdr(6)
        .traffic_class(0xb8)
        .hop_limit(1);
    assert_eq!(
        spec(ip),
        "3100000058000000\
         fe80000000000000000000000000000020010db800000000000000000000000100012345\
         06b80100\
         ffc00000000000000000000000000000ffffffffffffffffffffffffffffffff000fffff\
         ffffff00"
    );
    let ports = FlowPorts::new().dst_port(4791).src_port_masked(0xc001, 0xc000);
    assert_eq!(spec(FlowSpec::Udp(ports)), "410000001000000012b7c000ffffc000");
    assert_eq!(spec(FlowSpec::Tcp(ports)), "400000001000000012b7c000ffffc000");
    assert_eq!(spec(FlowSpec::Tag(0x01_0203)), "00100000100000000302010000000000");
    assert_eq!(spec(FlowSpec::Drop), "0110000008000000");
}

#[test]
fn rules_that_no_kernel_accepts_are_refused_with_the_reason() {
    let refusal = |rule: FlowAttr| rule.check("create_flow").unwrap_err().to_string();
    let rule = FlowAttr::new(1);
    let many = (0..11).fold(rule.clone(), |rule, _| rule.spec(FlowEth::new()));
    assert!(refusal(many).contains("11 specifications; the maximum is 10"));
    assert!(refusal(rule.clone().tag(1 << 24)).contains("tag 0x1000000; tags have 24 bits"));
    let all = rule.clone().flow_type(FlowType::ALL_DEFAULT).tag(1);
    assert!(refusal(all).contains("a rule of type all default takes no specifications"));
    assert!(rule.tag((1 << 24) - 1).check("create_flow").is_ok());
}
