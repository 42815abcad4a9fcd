//! The specifications of a flow rule: masked values of a packet's headers, and actions.
//!
//! Pairs with `kern_spec_to_ib_spec` in `core/uverbs_cmd.c`. mlx5 refuses a value with a bit that is not in
//! the mask, so such bits are cleared here.

use std::net::{Ipv4Addr, Ipv6Addr};
use uverbs_uapi::endian::{Be16, Be32};
use uverbs_uapi::flow as uapi;
use uverbs_uapi::flow::ib_flow_spec_type as kind;
use zerocopy::IntoBytes;

/// A match of one header, or an action.
#[doc(alias = "ibv_flow_spec")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FlowSpec {
    /// An Ethernet header.
    #[doc(alias = "IBV_FLOW_SPEC_ETH")]
    Eth(FlowEth),
    /// An IPv4 header.
    #[doc(alias = "IBV_FLOW_SPEC_IPV4")]
    Ipv4(FlowIpv4),
    /// An IPv6 header.
    #[doc(alias = "IBV_FLOW_SPEC_IPV6")]
    Ipv6(FlowIpv6),
    /// A TCP header.
    #[doc(alias = "IBV_FLOW_SPEC_TCP")]
    Tcp(FlowPorts),
    /// A UDP header.
    #[doc(alias = "IBV_FLOW_SPEC_UDP")]
    Udp(FlowPorts),
    /// Marks completions with a number of 24 bits.
    #[doc(alias = "IBV_FLOW_SPEC_ACTION_TAG")]
    Tag(u32),
    /// Drops the packets.
    #[doc(alias = "IBV_FLOW_SPEC_ACTION_DROP")]
    Drop,
}

impl FlowSpec {
    /// The header or the action, in a word.
    pub(super) fn name(&self) -> &'static str {
        match self {
            FlowSpec::Eth(_) => "Ethernet",
            FlowSpec::Ipv4(_) => "IPv4",
            FlowSpec::Ipv6(_) => "IPv6",
            FlowSpec::Tcp(_) => "TCP",
            FlowSpec::Udp(_) => "UDP",
            FlowSpec::Tag(_) => "tag",
            FlowSpec::Drop => "drop",
        }
    }
}

impl From<FlowEth> for FlowSpec {
    fn from(spec: FlowEth) -> FlowSpec {
        FlowSpec::Eth(spec)
    }
}

impl From<FlowIpv4> for FlowSpec {
    fn from(spec: FlowIpv4) -> FlowSpec {
        FlowSpec::Ipv4(spec)
    }
}

impl From<FlowIpv6> for FlowSpec {
    fn from(spec: FlowIpv6) -> FlowSpec {
        FlowSpec::Ipv6(spec)
    }
}

/// A field's value and the bits of it that matter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Masked<T> {
    value: T,
    mask: T,
}

impl<const N: usize> Masked<[u8; N]> {
    fn bytes(value: [u8; N], mask: [u8; N]) -> Self {
        Masked { value: std::array::from_fn(|at| value[at] & mask[at]), mask }
    }
}

impl Masked<u16> {
    fn half(value: u16, mask: u16) -> Self {
        Masked { value: value & mask, mask }
    }
}

impl Masked<u32> {
    fn word(value: u32, mask: u32) -> Self {
        Masked { value: value & mask, mask }
    }
}

macro_rules! exactly {
    ($value:expr, $type:ty) => {
        Masked { value: $value, mask: <$type>::MAX }
    };
}

/// An Ethernet header; see [`FlowSpec::Eth`].
#[doc(alias = "ibv_flow_spec_eth")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct FlowEth {
    dst_mac: Masked<[u8; 6]>,
    src_mac: Masked<[u8; 6]>,
    ether_type: Masked<u16>,
    vlan_tag: Masked<u16>,
}

impl FlowEth {
    /// A specification that matches every packet with this header.
    pub fn new() -> Self {
        FlowEth::default()
    }

    /// Matches this destination address.
    pub fn dst_mac(self, mac: [u8; 6]) -> Self {
        self.dst_mac_masked(mac, [0xff; 6])
    }

    /// Matches destination addresses that have these bits under the mask.
    pub fn dst_mac_masked(mut self, value: [u8; 6], mask: [u8; 6]) -> Self {
        self.dst_mac = Masked::bytes(value, mask);
        self
    }

    /// Matches this source address.
    pub fn src_mac(self, mac: [u8; 6]) -> Self {
        self.src_mac_masked(mac, [0xff; 6])
    }

    /// Matches source addresses that have these bits under the mask.
    pub fn src_mac_masked(mut self, value: [u8; 6], mask: [u8; 6]) -> Self {
        self.src_mac = Masked::bytes(value, mask);
        self
    }

    /// Matches this EtherType, the one behind a VLAN tag if there is one: 0x0800 is IPv4, 0x86dd IPv6.
    pub fn ether_type(mut self, ether_type: u16) -> Self {
        self.ether_type = exactly!(ether_type, u16);
        self
    }

    /// Matches this VLAN, of 12 bits, with any priority.
    pub fn vlan(self, id: u16) -> Self {
        self.vlan_tag_masked(id, 0xfff)
    }

    /// Matches VLAN tags that have these bits under the mask: priority in bits 13 to 15, identifier in bits
    /// 0 to 11.
    pub fn vlan_tag_masked(mut self, value: u16, mask: u16) -> Self {
        self.vlan_tag = Masked::half(value, mask);
        self
    }

    fn filter(&self, pick: Pick) -> uapi::ib_uverbs_flow_eth_filter {
        uapi::ib_uverbs_flow_eth_filter {
            dst_mac: pick.of(self.dst_mac),
            src_mac: pick.of(self.src_mac),
            ether_type: Be16::new(pick.of(self.ether_type)),
            vlan_tag: Be16::new(pick.of(self.vlan_tag)),
        }
    }
}

/// An IPv4 header; see [`FlowSpec::Ipv4`].
#[doc(alias = "ibv_flow_spec_ipv4")]
#[doc(alias = "ibv_flow_spec_ipv4_ext")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct FlowIpv4 {
    src: Masked<u32>,
    dst: Masked<u32>,
    proto: Masked<u8>,
    tos: Masked<u8>,
    ttl: Masked<u8>,
}

impl FlowIpv4 {
    /// A specification that matches every packet with this header.
    pub fn new() -> Self {
        FlowIpv4::default()
    }

    /// Matches this source address.
    pub fn src(self, ip: Ipv4Addr) -> Self {
        self.src_masked(ip, Ipv4Addr::BROADCAST)
    }

    /// Matches source addresses that have these bits under the mask.
    pub fn src_masked(mut self, value: Ipv4Addr, mask: Ipv4Addr) -> Self {
        self.src = Masked::word(value.to_bits(), mask.to_bits());
        self
    }

    /// Matches this destination address.
    pub fn dst(self, ip: Ipv4Addr) -> Self {
        self.dst_masked(ip, Ipv4Addr::BROADCAST)
    }

    /// Matches destination addresses that have these bits under the mask.
    pub fn dst_masked(mut self, value: Ipv4Addr, mask: Ipv4Addr) -> Self {
        self.dst = Masked::word(value.to_bits(), mask.to_bits());
        self
    }

    /// Matches this protocol: 6 is TCP, 17 UDP.
    pub fn proto(mut self, proto: u8) -> Self {
        self.proto = exactly!(proto, u8);
        self
    }

    /// Matches this type of service.
    pub fn tos(mut self, tos: u8) -> Self {
        self.tos = exactly!(tos, u8);
        self
    }

    /// Matches this time to live; mlx5 cannot.
    pub fn ttl(mut self, ttl: u8) -> Self {
        self.ttl = exactly!(ttl, u8);
        self
    }

    fn filter(&self, pick: Pick) -> uapi::ib_uverbs_flow_ipv4_filter {
        uapi::ib_uverbs_flow_ipv4_filter {
            src_ip: Be32::new(pick.of(self.src)),
            dst_ip: Be32::new(pick.of(self.dst)),
            proto: pick.of(self.proto),
            tos: pick.of(self.tos),
            ttl: pick.of(self.ttl),
            flags: 0,
        }
    }
}

/// An IPv6 header; see [`FlowSpec::Ipv6`].
#[doc(alias = "ibv_flow_spec_ipv6")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct FlowIpv6 {
    src: Masked<[u8; 16]>,
    dst: Masked<[u8; 16]>,
    flow_label: Masked<u32>,
    next_hdr: Masked<u8>,
    traffic_class: Masked<u8>,
    hop_limit: Masked<u8>,
}

impl FlowIpv6 {
    /// A specification that matches every packet with this header.
    pub fn new() -> Self {
        FlowIpv6::default()
    }

    /// Matches this source address.
    pub fn src(self, ip: Ipv6Addr) -> Self {
        self.src_masked(ip, Ipv6Addr::from_bits(u128::MAX))
    }

    /// Matches source addresses that have these bits under the mask.
    pub fn src_masked(mut self, value: Ipv6Addr, mask: Ipv6Addr) -> Self {
        self.src = Masked::bytes(value.octets(), mask.octets());
        self
    }

    /// Matches this destination address.
    pub fn dst(self, ip: Ipv6Addr) -> Self {
        self.dst_masked(ip, Ipv6Addr::from_bits(u128::MAX))
    }

    /// Matches destination addresses that have these bits under the mask.
    pub fn dst_masked(mut self, value: Ipv6Addr, mask: Ipv6Addr) -> Self {
        self.dst = Masked::bytes(value.octets(), mask.octets());
        self
    }

    /// Matches this flow label, of 20 bits.
    pub fn flow_label(mut self, label: u32) -> Self {
        self.flow_label = Masked::word(label, 0xf_ffff);
        self
    }

    /// Matches this next header: 6 is TCP, 17 UDP.
    pub fn next_hdr(mut self, next: u8) -> Self {
        self.next_hdr = exactly!(next, u8);
        self
    }

    /// Matches this traffic class.
    pub fn traffic_class(mut self, class: u8) -> Self {
        self.traffic_class = exactly!(class, u8);
        self
    }

    /// Matches this hop limit; mlx5 cannot.
    pub fn hop_limit(mut self, limit: u8) -> Self {
        self.hop_limit = exactly!(limit, u8);
        self
    }

    fn filter(&self, pick: Pick) -> uapi::ib_uverbs_flow_ipv6_filter {
        uapi::ib_uverbs_flow_ipv6_filter {
            src_ip: pick.of(self.src),
            dst_ip: pick.of(self.dst),
            flow_label: Be32::new(pick.of(self.flow_label)),
            next_hdr: pick.of(self.next_hdr),
            traffic_class: pick.of(self.traffic_class),
            hop_limit: pick.of(self.hop_limit),
            reserved: 0,
        }
    }
}

/// Ports of TCP or UDP; see [`FlowSpec::Tcp`] and [`FlowSpec::Udp`].
#[doc(alias = "ibv_flow_spec_tcp_udp")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct FlowPorts {
    dst: Masked<u16>,
    src: Masked<u16>,
}

impl FlowPorts {
    /// A specification that matches every packet with this header.
    pub fn new() -> Self {
        FlowPorts::default()
    }

    /// Matches this destination port.
    pub fn dst_port(self, port: u16) -> Self {
        self.dst_port_masked(port, u16::MAX)
    }

    /// Matches destination ports that have these bits under the mask.
    pub fn dst_port_masked(mut self, value: u16, mask: u16) -> Self {
        self.dst = Masked::half(value, mask);
        self
    }

    /// Matches this source port.
    pub fn src_port(self, port: u16) -> Self {
        self.src_port_masked(port, u16::MAX)
    }

    /// Matches source ports that have these bits under the mask.
    pub fn src_port_masked(mut self, value: u16, mask: u16) -> Self {
        self.src = Masked::half(value, mask);
        self
    }

    fn filter(&self, pick: Pick) -> uapi::ib_uverbs_flow_tcp_udp_filter {
        uapi::ib_uverbs_flow_tcp_udp_filter {
            dst_port: Be16::new(pick.of(self.dst)),
            src_port: Be16::new(pick.of(self.src)),
        }
    }
}

/// A half of a field.
#[derive(Clone, Copy)]
enum Pick {
    Value,
    Mask,
}

impl Pick {
    fn of<T>(self, field: Masked<T>) -> T {
        match self {
            Pick::Value => field.value,
            Pick::Mask => field.mask,
        }
    }
}

/// A specification of the kernel's layout: a header, the values, the masks.
macro_rules! matching {
    ($spec:ident, $kind:expr, $filters:expr) => {
        uapi::$spec {
            r#type: $kind.0,
            size: size_of::<uapi::$spec>() as u16,
            reserved: 0,
            val: $filters.filter(Pick::Value),
            mask: $filters.filter(Pick::Mask),
        }
        .as_bytes()
        .to_vec()
    };
}

impl FlowSpec {
    pub(super) fn encode(&self) -> Vec<u8> {
        match self {
            FlowSpec::Eth(eth) => matching!(ib_uverbs_flow_spec_eth, kind::IB_FLOW_SPEC_ETH, eth),
            FlowSpec::Ipv4(ip) => matching!(ib_uverbs_flow_spec_ipv4, kind::IB_FLOW_SPEC_IPV4, ip),
            FlowSpec::Ipv6(ip) => matching!(ib_uverbs_flow_spec_ipv6, kind::IB_FLOW_SPEC_IPV6, ip),
            FlowSpec::Tcp(ports) => {
                matching!(ib_uverbs_flow_spec_tcp_udp, kind::IB_FLOW_SPEC_TCP, ports)
            }
            FlowSpec::Udp(ports) => {
                matching!(ib_uverbs_flow_spec_tcp_udp, kind::IB_FLOW_SPEC_UDP, ports)
            }
            FlowSpec::Tag(tag_id) => uapi::ib_uverbs_flow_spec_action_tag {
                r#type: kind::IB_FLOW_SPEC_ACTION_TAG.0,
                size: size_of::<uapi::ib_uverbs_flow_spec_action_tag>() as u16,
                reserved: 0,
                tag_id: *tag_id,
                reserved1: 0,
            }
            .as_bytes()
            .to_vec(),
            FlowSpec::Drop => uapi::ib_uverbs_flow_spec_action_drop {
                r#type: kind::IB_FLOW_SPEC_ACTION_DROP.0,
                size: size_of::<uapi::ib_uverbs_flow_spec_action_drop>() as u16,
                reserved: 0,
            }
            .as_bytes()
            .to_vec(),
        }
    }
}
