//! Steering rules: a flow is a list of specifications behind [`ib_uverbs_flow_attr`].
//!
//! `rdma/ib_user_verbs.h`, `rdma/ib_user_ioctl_cmds.h`.

use crate::endian::{Be16, Be32};
use crate::enumeration::{flag_sets, ids, open_enums};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// The header of every specification; `size` is that of the whole specification.
    struct ib_uverbs_flow_spec_hdr[8] {
        r#type: u32 = 0,
        size: u16 = 4,
        reserved: u16 = 6,
    }

    /// Values or mask of an Ethernet header.
    struct ib_uverbs_flow_eth_filter[16] {
        dst_mac: [u8; 6] = 0,
        src_mac: [u8; 6] = 6,
        ether_type: Be16 = 12,
        vlan_tag: Be16 = 14,
    }

    /// Matches an Ethernet header.
    struct ib_uverbs_flow_spec_eth[40] {
        r#type: u32 = 0,
        size: u16 = 4,
        reserved: u16 = 6,
        val: ib_uverbs_flow_eth_filter = 8,
        mask: ib_uverbs_flow_eth_filter = 24,
    }

    /// Values or mask of an IPv4 header.
    struct ib_uverbs_flow_ipv4_filter[12] {
        src_ip: Be32 = 0,
        dst_ip: Be32 = 4,
        proto: u8 = 8,
        tos: u8 = 9,
        ttl: u8 = 10,
        flags: u8 = 11,
    }

    /// Matches an IPv4 header.
    struct ib_uverbs_flow_spec_ipv4[32] {
        r#type: u32 = 0,
        size: u16 = 4,
        reserved: u16 = 6,
        val: ib_uverbs_flow_ipv4_filter = 8,
        mask: ib_uverbs_flow_ipv4_filter = 20,
    }

    /// Values or mask of an IPv6 header.
    struct ib_uverbs_flow_ipv6_filter[40] {
        src_ip: [u8; 16] = 0,
        dst_ip: [u8; 16] = 16,
        flow_label: Be32 = 32,
        next_hdr: u8 = 36,
        traffic_class: u8 = 37,
        hop_limit: u8 = 38,
        reserved: u8 = 39,
    }

    /// Matches an IPv6 header.
    struct ib_uverbs_flow_spec_ipv6[88] {
        r#type: u32 = 0,
        size: u16 = 4,
        reserved: u16 = 6,
        val: ib_uverbs_flow_ipv6_filter = 8,
        mask: ib_uverbs_flow_ipv6_filter = 48,
    }

    /// Values or mask of TCP or UDP ports.
    struct ib_uverbs_flow_tcp_udp_filter[4] {
        dst_port: Be16 = 0,
        src_port: Be16 = 2,
    }

    /// Matches TCP or UDP ports.
    struct ib_uverbs_flow_spec_tcp_udp[16] {
        r#type: u32 = 0,
        size: u16 = 4,
        reserved: u16 = 6,
        val: ib_uverbs_flow_tcp_udp_filter = 8,
        mask: ib_uverbs_flow_tcp_udp_filter = 12,
    }

    /// Value or mask of a VXLAN tunnel id.
    struct ib_uverbs_flow_tunnel_filter[4] {
        tunnel_id: Be32 = 0,
    }

    /// Matches a VXLAN tunnel.
    struct ib_uverbs_flow_spec_tunnel[16] {
        r#type: u32 = 0,
        size: u16 = 4,
        reserved: u16 = 6,
        val: ib_uverbs_flow_tunnel_filter = 8,
        mask: ib_uverbs_flow_tunnel_filter = 12,
    }

    /// Values or mask of an ESP header.
    struct ib_uverbs_flow_spec_esp_filter[8] {
        spi: u32 = 0,
        seq: u32 = 4,
    }

    /// Matches an ESP header.
    struct ib_uverbs_flow_spec_esp[24] {
        r#type: u32 = 0,
        size: u16 = 4,
        reserved: u16 = 6,
        val: ib_uverbs_flow_spec_esp_filter = 8,
        mask: ib_uverbs_flow_spec_esp_filter = 16,
    }

    /// Values or mask of a GRE header.
    struct ib_uverbs_flow_gre_filter[8] {
        c_ks_res0_ver: Be16 = 0,
        protocol: Be16 = 2,
        key: Be32 = 4,
    }

    /// Matches a GRE header.
    struct ib_uverbs_flow_spec_gre[24] {
        r#type: u32 = 0,
        size: u16 = 4,
        reserved: u16 = 6,
        val: ib_uverbs_flow_gre_filter = 8,
        mask: ib_uverbs_flow_gre_filter = 16,
    }

    /// Value or mask of an MPLS label.
    struct ib_uverbs_flow_mpls_filter[4] {
        label: Be32 = 0,
    }

    /// Matches an MPLS label.
    struct ib_uverbs_flow_spec_mpls[16] {
        r#type: u32 = 0,
        size: u16 = 4,
        reserved: u16 = 6,
        val: ib_uverbs_flow_mpls_filter = 8,
        mask: ib_uverbs_flow_mpls_filter = 12,
    }

    /// Marks the completion with a tag.
    struct ib_uverbs_flow_spec_action_tag[16] {
        r#type: u32 = 0,
        size: u16 = 4,
        reserved: u16 = 6,
        tag_id: u32 = 8,
        reserved1: u32 = 12,
    }

    /// Drops the packet.
    struct ib_uverbs_flow_spec_action_drop[8] {
        r#type: u32 = 0,
        size: u16 = 4,
        reserved: u16 = 6,
    }

    /// Applies a flow action object.
    struct ib_uverbs_flow_spec_action_handle[16] {
        r#type: u32 = 0,
        size: u16 = 4,
        reserved: u16 = 6,
        handle: u32 = 8,
        reserved1: u32 = 12,
    }

    /// Counts into a counters object.
    struct ib_uverbs_flow_spec_action_count[16] {
        r#type: u32 = 0,
        size: u16 = 4,
        reserved: u16 = 6,
        handle: u32 = 8,
        reserved1: u32 = 12,
    }

    /// A rule, before its specifications.
    struct ib_uverbs_flow_attr[16] {
        r#type: u32 = 0,
        size: u16 = 4,
        priority: u16 = 6,
        num_of_specs: u8 = 8,
        reserved: [u8; 2] = 9,
        port: u8 = 11,
        flags: u32 = 12,
    }

    /// Command `IB_USER_VERBS_EX_CMD_CREATE_FLOW`, before the specifications.
    struct ib_uverbs_create_flow[24] {
        comp_mask: u32 = 0,
        qp_handle: u32 = 4,
        flow_attr: ib_uverbs_flow_attr = 8,
    }

    /// Answer of `IB_USER_VERBS_EX_CMD_CREATE_FLOW`.
    struct ib_uverbs_create_flow_resp[8] {
        comp_mask: u32 = 0,
        flow_handle: u32 = 4,
    }

    /// Command `IB_USER_VERBS_EX_CMD_DESTROY_FLOW`.
    struct ib_uverbs_destroy_flow[8] {
        comp_mask: u32 = 0,
        flow_handle: u32 = 4,
    }
}

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_methods_flow: u16 {
        UVERBS_METHOD_FLOW_DESTROY = 0,
    }

    enum uverbs_attrs_flow_destroy_ids: u16 {
        UVERBS_ATTR_DESTROY_FLOW_HANDLE = 0,
    }
}

open_enums! {
    const SPEC_TYPES = "rdma/ib_verbs.h";

    /// The kind of a specification, a match or an action; `IB_FLOW_SPEC_INNER` is added for the inner headers of
    /// a tunnel.
    enum ib_flow_spec_type: u32 {
        IB_FLOW_SPEC_ETH = 32,
        IB_FLOW_SPEC_IB = 34,
        IB_FLOW_SPEC_IPV4 = 48,
        IB_FLOW_SPEC_IPV6 = 49,
        IB_FLOW_SPEC_ESP = 52,
        IB_FLOW_SPEC_TCP = 64,
        IB_FLOW_SPEC_UDP = 65,
        IB_FLOW_SPEC_VXLAN_TUNNEL = 80,
        IB_FLOW_SPEC_GRE = 81,
        IB_FLOW_SPEC_MPLS = 96,
        IB_FLOW_SPEC_INNER = 256,
        IB_FLOW_SPEC_ACTION_TAG = 0x1000,
        IB_FLOW_SPEC_ACTION_DROP = 0x1001,
        IB_FLOW_SPEC_ACTION_HANDLE = 0x1002,
        IB_FLOW_SPEC_ACTION_COUNT = 0x1003,
    }
}

open_enums! {
    const ATTR_TYPES = "rdma/ib_verbs.h";

    /// The kind of a rule: the packets that it takes.
    enum ib_flow_attr_type: u32 {
        IB_FLOW_ATTR_NORMAL = 0,
        IB_FLOW_ATTR_ALL_DEFAULT = 1,
        IB_FLOW_ATTR_MC_DEFAULT = 2,
        IB_FLOW_ATTR_SNIFFER = 3,
    }
}

flag_sets! {
    const FLAGS = "rdma/ib_verbs.h";

    /// Flags of a rule.
    enum ib_flow_flags: u32 {
        IB_FLOW_ATTR_FLAGS_DONT_TRAP = 1 << 1,
        IB_FLOW_ATTR_FLAGS_EGRESS = 1 << 2,
    }
}
