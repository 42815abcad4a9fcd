//! Registers of port and function, behind ACCESS_REGISTER.
//!
//! Pairs with mlx5_core's `port.c`.

super::layouts! {
    ptys_reg[0x200] {
        proto_mask: 0x1d, 0x3;
        eth_proto_capability: 0x60, 0x20;
        ib_link_width_capability: 0x80, 0x10;
        ib_proto_capability: 0x90, 0x10;
        eth_proto_admin: 0xc0, 0x20;
        ib_link_width_admin: 0xe0, 0x10;
        ib_proto_admin: 0xf0, 0x10;
        eth_proto_oper: 0x120, 0x20;
        ib_link_width_oper: 0x140, 0x10;
        ib_proto_oper: 0x150, 0x10;
    }
    pmtu_reg[0x80] {
        max_mtu: 0x20, 0x10;
        admin_mtu: 0x40, 0x10;
        oper_mtu: 0x60, 0x10;
    }
    paos_reg[0x80] {
        admin_status: 0x14, 0x4;
        oper_status: 0x1c, 0x4;
        ase: 0x20, 0x1;
    }
    pvlc_reg[0x80] {
        vl_hw_cap: 0x3c, 0x4;
        vl_admin: 0x5c, 0x4;
        vl_operational: 0x7c, 0x4;
    }
    pcap_reg[0xa0] {
        port_capability_mask: 0x20, 0x80 bytes;
    }
    ppcnt_reg[0x800] {
        grp: 0x1a, 0x6;
        counter_set: 0x40, 0x7c0 bytes;
    }
    eth_802_3_cntrs_grp_data_layout[0x7c0] {
        a_frames_transmitted_ok_high: 0x0, 0x20;
        a_frames_transmitted_ok_low: 0x20, 0x20;
        a_frames_received_ok_high: 0x40, 0x20;
        a_frames_received_ok_low: 0x60, 0x20;
        a_octets_transmitted_ok_high: 0x100, 0x20;
        a_octets_transmitted_ok_low: 0x120, 0x20;
        a_octets_received_ok_high: 0x140, 0x20;
        a_octets_received_ok_low: 0x160, 0x20;
        a_multicast_frames_xmitted_ok_high: 0x180, 0x20;
        a_multicast_frames_xmitted_ok_low: 0x1a0, 0x20;
        a_broadcast_frames_xmitted_ok_high: 0x1c0, 0x20;
        a_broadcast_frames_xmitted_ok_low: 0x1e0, 0x20;
        a_multicast_frames_received_ok_high: 0x200, 0x20;
        a_multicast_frames_received_ok_low: 0x220, 0x20;
        a_broadcast_frames_received_ok_high: 0x240, 0x20;
        a_broadcast_frames_received_ok_low: 0x260, 0x20;
    }
    eth_2863_cntrs_grp_data_layout[0x7c0] {
        if_in_octets_high: 0x0, 0x20;
        if_in_octets_low: 0x20, 0x20;
        if_in_ucast_pkts_high: 0x40, 0x20;
        if_in_ucast_pkts_low: 0x60, 0x20;
        if_out_octets_high: 0x140, 0x20;
        if_out_octets_low: 0x160, 0x20;
        if_out_ucast_pkts_high: 0x180, 0x20;
        if_out_ucast_pkts_low: 0x1a0, 0x20;
        if_in_multicast_pkts_high: 0x240, 0x20;
        if_in_multicast_pkts_low: 0x260, 0x20;
        if_in_broadcast_pkts_high: 0x280, 0x20;
        if_in_broadcast_pkts_low: 0x2a0, 0x20;
        if_out_multicast_pkts_high: 0x2c0, 0x20;
        if_out_multicast_pkts_low: 0x2e0, 0x20;
        if_out_broadcast_pkts_high: 0x300, 0x20;
        if_out_broadcast_pkts_low: 0x320, 0x20;
    }
    eth_2819_cntrs_grp_data_layout[0x7c0] {
        ether_stats_octets_high: 0x40, 0x20;
        ether_stats_octets_low: 0x60, 0x20;
        ether_stats_pkts_high: 0x80, 0x20;
        ether_stats_pkts_low: 0xa0, 0x20;
        ether_stats_broadcast_pkts_high: 0xc0, 0x20;
        ether_stats_broadcast_pkts_low: 0xe0, 0x20;
        ether_stats_multicast_pkts_high: 0x100, 0x20;
        ether_stats_multicast_pkts_low: 0x120, 0x20;
    }
    ib_ext_port_cntrs_grp_data_layout[0x7c0] {
        port_xmit_data_high: 0x300, 0x20;
        port_xmit_data_low: 0x320, 0x20;
        port_rcv_data_high: 0x340, 0x20;
        port_rcv_data_low: 0x360, 0x20;
        port_xmit_pkts_high: 0x380, 0x20;
        port_xmit_pkts_low: 0x3a0, 0x20;
        port_rcv_pkts_high: 0x3c0, 0x20;
        port_rcv_pkts_low: 0x3e0, 0x20;
        port_unicast_xmit_pkts_high: 0x480, 0x20;
        port_unicast_xmit_pkts_low: 0x4a0, 0x20;
        port_multicast_xmit_pkts_high: 0x4c0, 0x20;
        port_multicast_xmit_pkts_low: 0x4e0, 0x20;
        port_unicast_rcv_pkts_high: 0x500, 0x20;
        port_unicast_rcv_pkts_low: 0x520, 0x20;
        port_multicast_rcv_pkts_high: 0x540, 0x20;
        port_multicast_rcv_pkts_low: 0x560, 0x20;
    }
}
