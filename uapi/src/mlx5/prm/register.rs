//! Registers of port and function, behind ACCESS_REGISTER.
//!
//! Pairs with mlx5_core's `port.c`. The layouts are those of `mlx5_ifc.h`.

super::layouts! {
    ptys_reg[0x200] {
        an_disable_admin: 0x1, 0x1;
        an_disable_cap: 0x2, 0x1;
        local_port: 0x8, 0x8;
        plane_ind: 0x18, 0x4;
        proto_mask: 0x1d, 0x3;
        an_status: 0x20, 0x4;
        data_rate_oper: 0x30, 0x10;
        ext_eth_proto_capability: 0x40, 0x20;
        eth_proto_capability: 0x60, 0x20;
        ib_link_width_capability: 0x80, 0x10;
        ib_proto_capability: 0x90, 0x10;
        ext_eth_proto_admin: 0xa0, 0x20;
        eth_proto_admin: 0xc0, 0x20;
        ib_link_width_admin: 0xe0, 0x10;
        ib_proto_admin: 0xf0, 0x10;
        ext_eth_proto_oper: 0x100, 0x20;
        eth_proto_oper: 0x120, 0x20;
        ib_link_width_oper: 0x140, 0x10;
        ib_proto_oper: 0x150, 0x10;
        lane_rate_oper: 0x168, 0x14;
        connector_type: 0x17c, 0x4;
        eth_proto_lp_advertise: 0x180, 0x20;
    }
    pmtu_reg[0x80] {
        local_port: 0x8, 0x8;
        max_mtu: 0x20, 0x10;
        admin_mtu: 0x40, 0x10;
        oper_mtu: 0x60, 0x10;
    }
    paos_reg[0x80] {
        swid: 0x0, 0x8;
        local_port: 0x8, 0x8;
        admin_status: 0x14, 0x4;
        oper_status: 0x1c, 0x4;
        ase: 0x20, 0x1;
        ee: 0x21, 0x1;
        e: 0x3e, 0x2;
    }
    pvlc_reg[0x80] {
        local_port: 0x8, 0x8;
        vl_hw_cap: 0x3c, 0x4;
        vl_admin: 0x5c, 0x4;
        vl_operational: 0x7c, 0x4;
    }
    pcap_reg[0xa0] {
        local_port: 0x8, 0x8;
        port_capability_mask: 0x20, 0x80 bytes;
    }
    ppcnt_reg[0x800] {
        swid: 0x0, 0x8;
        local_port: 0x8, 0x8;
        pnat: 0x10, 0x2;
        grp: 0x1a, 0x6;
        clr: 0x20, 0x1;
        plane_ind: 0x34, 0x4;
        prio_tc: 0x3b, 0x5;
        counter_set: 0x40, 0x7c0 bytes;
    }
    pplm_reg[0x3c0] {
        local_port: 0x8, 0x8;
        port_profile_mode: 0x40, 0x8;
        static_port_profile: 0x48, 0x8;
        active_port_profile: 0x50, 0x8;
        retransmission_active: 0x60, 0x8;
        fec_mode_active: 0x68, 0x18;
        rs_fec_correction_bypass_cap: 0x80, 0x4;
        fec_override_cap_56g: 0x8c, 0x4;
        fec_override_cap_100g: 0x90, 0x4;
        fec_override_cap_50g: 0x94, 0x4;
        fec_override_cap_25g: 0x98, 0x4;
        fec_override_cap_10g_40g: 0x9c, 0x4;
        rs_fec_correction_bypass_admin: 0xa0, 0x4;
        fec_override_admin_56g: 0xac, 0x4;
        fec_override_admin_100g: 0xb0, 0x4;
        fec_override_admin_50g: 0xb4, 0x4;
        fec_override_admin_25g: 0xb8, 0x4;
        fec_override_admin_10g_40g: 0xbc, 0x4;
        fec_override_cap_400g_8x: 0xc0, 0x10;
        fec_override_cap_200g_4x: 0xd0, 0x10;
        fec_override_cap_100g_2x: 0xe0, 0x10;
        fec_override_cap_50g_1x: 0xf0, 0x10;
        fec_override_admin_400g_8x: 0x100, 0x10;
        fec_override_admin_200g_4x: 0x110, 0x10;
        fec_override_admin_100g_2x: 0x120, 0x10;
        fec_override_admin_50g_1x: 0x130, 0x10;
        fec_override_cap_800g_8x: 0x140, 0x10;
        fec_override_cap_400g_4x: 0x150, 0x10;
        fec_override_cap_200g_2x: 0x160, 0x10;
        fec_override_cap_100g_1x: 0x170, 0x10;
        fec_override_admin_800g_8x: 0x220, 0x10;
        fec_override_admin_400g_4x: 0x230, 0x10;
        fec_override_admin_200g_2x: 0x240, 0x10;
        fec_override_admin_100g_1x: 0x250, 0x10;
        fec_override_cap_1600g_8x: 0x2c0, 0x10;
        fec_override_cap_800g_4x: 0x2d0, 0x10;
        fec_override_cap_400g_2x: 0x2e0, 0x10;
        fec_override_cap_200g_1x: 0x2f0, 0x10;
        fec_override_admin_1600g_8x: 0x300, 0x10;
        fec_override_admin_800g_4x: 0x310, 0x10;
        fec_override_admin_400g_2x: 0x320, 0x10;
        fec_override_admin_200g_1x: 0x330, 0x10;
    }
    pbmc_reg[0x360] {
        local_port: 0x8, 0x8;
        xoff_timer_value: 0x20, 0x10;
        xoff_refresh: 0x30, 0x10;
        fullness_threshold: 0x49, 0x7;
        port_buffer_size: 0x50, 0x10;
        buffer: 0x60, 0x280 bytes;
        shared_headroom_pool: 0x2e0, 0x40;
    }
    qtct_reg[0x40] {
        port_number: 0x8, 0x8;
        prio: 0x1d, 0x3;
        tclass: 0x3d, 0x3;
    }
    qetc_reg[0x280] {
        port_number: 0x8, 0x8;
        tc_configuration: 0x40, 0x200 bytes;
        global_configuration: 0x240, 0x40;
    }
    eth_802_3_cntrs_grp_data_layout[0x7c0] {
        a_frames_transmitted_ok_high: 0x0, 0x20;
        a_frames_transmitted_ok_low: 0x20, 0x20;
        a_frames_received_ok_high: 0x40, 0x20;
        a_frames_received_ok_low: 0x60, 0x20;
        a_frame_check_sequence_errors_high: 0x80, 0x20;
        a_frame_check_sequence_errors_low: 0xa0, 0x20;
        a_alignment_errors_high: 0xc0, 0x20;
        a_alignment_errors_low: 0xe0, 0x20;
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
        a_in_range_length_errors_high: 0x280, 0x20;
        a_in_range_length_errors_low: 0x2a0, 0x20;
        a_out_of_range_length_field_high: 0x2c0, 0x20;
        a_out_of_range_length_field_low: 0x2e0, 0x20;
        a_frame_too_long_errors_high: 0x300, 0x20;
        a_frame_too_long_errors_low: 0x320, 0x20;
        a_symbol_error_during_carrier_high: 0x340, 0x20;
        a_symbol_error_during_carrier_low: 0x360, 0x20;
        a_mac_control_frames_transmitted_high: 0x380, 0x20;
        a_mac_control_frames_transmitted_low: 0x3a0, 0x20;
        a_mac_control_frames_received_high: 0x3c0, 0x20;
        a_mac_control_frames_received_low: 0x3e0, 0x20;
        a_unsupported_opcodes_received_high: 0x400, 0x20;
        a_unsupported_opcodes_received_low: 0x420, 0x20;
        a_pause_mac_ctrl_frames_received_high: 0x440, 0x20;
        a_pause_mac_ctrl_frames_received_low: 0x460, 0x20;
        a_pause_mac_ctrl_frames_transmitted_high: 0x480, 0x20;
        a_pause_mac_ctrl_frames_transmitted_low: 0x4a0, 0x20;
    }
    ib_port_cntrs_grp_data_layout[0x140] {
        symbol_error_counter: 0x0, 0x10;
        link_error_recovery_counter: 0x10, 0x8;
        link_downed_counter: 0x18, 0x8;
        port_rcv_errors: 0x20, 0x10;
        port_rcv_remote_physical_errors: 0x30, 0x10;
        port_rcv_switch_relay_errors: 0x40, 0x10;
        port_xmit_discards: 0x50, 0x10;
        port_xmit_constraint_errors: 0x60, 0x8;
        port_rcv_constraint_errors: 0x68, 0x8;
        link_overrun_errors: 0x78, 0x8;
        vl_15_dropped: 0x90, 0x10;
        port_xmit_wait: 0x120, 0x20;
    }
    pmlp_reg[0x200] {
        rxtx: 0x0, 0x1;
        local_port: 0x8, 0x8;
        width: 0x18, 0x8;
        lane0_module_mapping: 0x20, 0x20;
        lane1_module_mapping: 0x40, 0x20;
        lane2_module_mapping: 0x60, 0x20;
        lane3_module_mapping: 0x80, 0x20;
    }
    mtpps_reg[0x1e0] {
        cap_number_of_pps_pins: 0xc, 0x4;
        cap_max_num_of_pps_in_pins: 0x14, 0x4;
        cap_max_num_of_pps_out_pins: 0x1c, 0x4;
        cap_log_min_npps_period: 0x33, 0x5;
        cap_log_min_out_pulse_duration_ns: 0x3b, 0x5;
        cap_pin_3_mode: 0x44, 0x4;
        cap_pin_2_mode: 0x4c, 0x4;
        cap_pin_1_mode: 0x54, 0x4;
        cap_pin_0_mode: 0x5c, 0x4;
        cap_pin_7_mode: 0x64, 0x4;
        cap_pin_6_mode: 0x6c, 0x4;
        cap_pin_5_mode: 0x74, 0x4;
        cap_pin_4_mode: 0x7c, 0x4;
        field_select: 0x80, 0x20;
        npps_period: 0xc0, 0x40;
        enable: 0x100, 0x1;
        pattern: 0x10c, 0x4;
        pin_mode: 0x114, 0x4;
        pin: 0x118, 0x8;
        out_pulse_duration_ns: 0x122, 0x1e;
        time_stamp: 0x140, 0x40;
        out_pulse_duration: 0x180, 0x10;
        out_periodic_adjustment: 0x190, 0x10;
        enhanced_out_periodic_adjustment: 0x1a0, 0x20;
    }
    mcam_reg[0x240] {
        feature_group: 0x8, 0x8;
        access_reg_group: 0x18, 0x8;
        access_regs: 0x40, 0x80 bytes;
        access_regs1: 0x40, 0x80 bytes;
        access_regs2: 0x40, 0x80 bytes;
        access_regs3: 0x40, 0x80 bytes;
        enhanced_features: 0x140, 0x80 bytes;
    }
    pcam_reg[0x280] {
        feature_group: 0x8, 0x8;
        access_reg_group: 0x18, 0x8;
        regs_5000_to_507f: 0x40, 0x80 bytes;
        enhanced_features: 0x140, 0x80 bytes;
    }
}
