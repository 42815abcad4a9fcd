//! Receive and send flow tables.
//!
//! Pairs with mlx5_core's `fs_cmd.c`.

super::layouts! {
    flow_table_context[0x140] {
        table_miss_action: 0x4, 0x4;
        log_size: 0x18, 0x8;
        table_miss_id: 0x28, 0x18;
    }
    flow_context[0x1800] {
        flow_tag: 0x48, 0x18;
        action: 0x70, 0x10;
        destination_list_size: 0x88, 0x18;
        flow_counter_list_size: 0xa8, 0x18;
        match_value: 0x200, 0x1000 of fte_match_param;
    }
    dest_format[0x40] {
        destination_type: 0x0, 0x8;
        destination_id: 0x8, 0x18;
    }
    fte_match_param[0x1000] {
        outer_headers: 0x0, 0x200 of fte_match_set_lyr_2_4;
    }
    fte_match_set_lyr_2_4[0x200] {
        smac_47_16: 0x0, 0x20;
        smac_15_0: 0x20, 0x10;
        ethertype: 0x30, 0x10;
        dmac_47_16: 0x40, 0x20;
        dmac_15_0: 0x60, 0x10;
        first_prio: 0x70, 0x3;
        first_cfi: 0x73, 0x1;
        first_vid: 0x74, 0xc;
        ip_protocol: 0x80, 0x8;
        ip_dscp: 0x88, 0x6;
        ip_ecn: 0x8e, 0x2;
        cvlan_tag: 0x90, 0x1;
        svlan_tag: 0x91, 0x1;
        frag: 0x92, 0x1;
        ip_version: 0x93, 0x4;
        tcp_flags: 0x97, 0x9;
        tcp_sport: 0xa0, 0x10;
        tcp_dport: 0xb0, 0x10;
        ttl_hoplimit: 0xd8, 0x8;
        udp_sport: 0xe0, 0x10;
        udp_dport: 0xf0, 0x10;
        src_ipv4_src_ipv6: 0x100, 0x80 bytes;
        dst_ipv4_dst_ipv6: 0x180, 0x80 bytes;
    }
    create_flow_table_in[0x200] {
        table_type: 0x80, 0x8;
        flow_table_context: 0xc0, 0x140 of flow_table_context;
    }
    create_flow_table_out[0x80] {
        table_id: 0x48, 0x18;
    }
    destroy_flow_table_in[0x200] {
        table_type: 0x80, 0x8;
        table_id: 0xa8, 0x18;
    }
    modify_flow_table_in[0x200] {
        modify_field_select: 0x70, 0x10;
        table_type: 0x80, 0x8;
        table_id: 0xa8, 0x18;
        flow_table_context: 0xc0, 0x140 of flow_table_context;
    }
    set_flow_table_root_in[0x200] {
        op_mod: 0x30, 0x10;
        table_type: 0x80, 0x8;
        table_id: 0xa8, 0x18;
    }
    create_flow_group_in[0x2000] {
        table_type: 0x80, 0x8;
        table_id: 0xa8, 0x18;
        start_flow_index: 0xe0, 0x20;
        end_flow_index: 0x120, 0x20;
        match_criteria: 0x200, 0x1000 of fte_match_param;
    }
    create_flow_group_out[0x80] {
        group_id: 0x48, 0x18;
    }
    destroy_flow_group_in[0x200] {
        table_type: 0x80, 0x8;
        table_id: 0xa8, 0x18;
        group_id: 0xc0, 0x20;
    }
    set_fte_in[0x1a00] {
        table_type: 0x80, 0x8;
        table_id: 0xa8, 0x18;
        flow_index: 0x100, 0x20;
        flow_context: 0x200, 0x1800 of flow_context;
    }
    delete_fte_in[0x200] {
        table_type: 0x80, 0x8;
        table_id: 0xa8, 0x18;
        flow_index: 0x100, 0x20;
    }
    alloc_flow_counter_in[0x80] {
        flow_counter_bulk: 0x78, 0x8;
    }
    alloc_flow_counter_out[0x80] {
        flow_counter_id: 0x40, 0x20;
    }
    dealloc_flow_counter_in[0x80] {
        flow_counter_id: 0x40, 0x20;
    }
    query_flow_counter_in[0x100] {
        clear: 0xc0, 0x1;
        num_of_counters: 0xd0, 0x10;
        flow_counter_id: 0xe0, 0x20;
    }
    query_flow_counter_out[0x80] {

    }
}
