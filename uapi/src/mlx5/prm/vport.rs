//! The function's virtual port: addresses, state and counters.
//!
//! Pairs with mlx5_core's `vport.c`.

super::layouts! {
    nic_vport_context[0x800] {
        min_wqe_inline_mode: 0x5, 0x3;
        disable_mc_local_lb: 0x1d, 0x1;
        disable_uc_local_lb: 0x1e, 0x1;
        roce_en: 0x1f, 0x1;
        arm_change_event: 0x20, 0x1;
        event_on_mtu: 0x3b, 0x1;
        event_on_promisc_change: 0x3c, 0x1;
        event_on_vlan_change: 0x3d, 0x1;
        event_on_mc_address_change: 0x3e, 0x1;
        event_on_uc_address_change: 0x3f, 0x1;
        mtu: 0x130, 0x10;
        system_image_guid: 0x140, 0x40;
        port_guid: 0x180, 0x40;
        node_guid: 0x1c0, 0x40;
        qkey_violation_counter: 0x340, 0x10;
        promisc_uc: 0x780, 0x1;
        promisc_mc: 0x781, 0x1;
        promisc_all: 0x782, 0x1;
        allowed_list_type: 0x785, 0x3;
        allowed_list_size: 0x790, 0x10;
        permanent_address: 0x7a0, 0x40;
    }
    query_nic_vport_context_in[0x80] {
        vport_number: 0x50, 0x10;
        allowed_list_type: 0x65, 0x3;
    }
    query_nic_vport_context_out[0x880] {
        nic_vport_context: 0x80, 0x800 of nic_vport_context;
    }
    modify_nic_vport_context_in[0x1000] {
        vport_number: 0x50, 0x10;
        field_select: 0x60, 0x20 of modify_nic_vport_field_select;
        nic_vport_context: 0x800, 0x800 of nic_vport_context;
    }
    modify_nic_vport_field_select[0x20] {
        affiliation: 0x12, 0x1;
        disable_uc_local_lb: 0x14, 0x1;
        disable_mc_local_lb: 0x15, 0x1;
        node_guid: 0x16, 0x1;
        port_guid: 0x17, 0x1;
        min_inline: 0x18, 0x1;
        mtu: 0x19, 0x1;
        change_event: 0x1a, 0x1;
        promisc: 0x1b, 0x1;
        permanent_address: 0x1c, 0x1;
        addresses_list: 0x1d, 0x1;
        roce_en: 0x1e, 0x1;
    }
    hca_vport_context[0x1000] {
        port_physical_state: 0x110, 0x4;
        port_state: 0x118, 0x4;
        vport_state: 0x11c, 0x4;
        system_image_guid: 0x140, 0x40;
        port_guid: 0x180, 0x40;
        node_guid: 0x1c0, 0x40;
        cap_mask1: 0x200, 0x20;
        cap_mask1_field_select: 0x220, 0x20;
        lid: 0x300, 0x10;
        subnet_timeout: 0x31b, 0x5;
        sm_lid: 0x320, 0x10;
        qkey_violation_counter: 0x340, 0x10;
    }
    query_hca_vport_context_out[0x1080] {
        hca_vport_context: 0x80, 0x1000 of hca_vport_context;
    }
    modify_hca_vport_context_in[0x1080] {
        hca_vport_context: 0x80, 0x1000 of hca_vport_context;
    }
    query_hca_vport_gid_in[0x80] {
        gid_index: 0x70, 0x10;
    }
    query_hca_vport_gid_out[0x80] {
        gids_num: 0x60, 0x10;
    }
    query_hca_vport_pkey_in[0x80] {
        pkey_index: 0x70, 0x10;
    }
    query_vport_state_in[0x80] {
        vport_number: 0x50, 0x10;
    }
    query_vport_state_out[0x80] {
        max_tx_speed: 0x60, 0x10;
        admin_state: 0x78, 0x4;
        state: 0x7c, 0x4;
    }
    query_vport_counter_in[0x100] {
        vport_number: 0x50, 0x10;
    }
    query_vport_counter_out[0x1080] {
        received_ib_unicast: 0x180, 0x80 of traffic_counter;
        transmitted_ib_unicast: 0x200, 0x80 of traffic_counter;
        received_ib_multicast: 0x280, 0x80 of traffic_counter;
        transmitted_ib_multicast: 0x300, 0x80 of traffic_counter;
        received_eth_broadcast: 0x380, 0x80 of traffic_counter;
        transmitted_eth_broadcast: 0x400, 0x80 of traffic_counter;
        received_eth_unicast: 0x480, 0x80 of traffic_counter;
        transmitted_eth_unicast: 0x500, 0x80 of traffic_counter;
        received_eth_multicast: 0x580, 0x80 of traffic_counter;
        transmitted_eth_multicast: 0x600, 0x80 of traffic_counter;
    }
    traffic_counter[0x80] {
        packets: 0x0, 0x40;
        octets: 0x40, 0x40;
    }
    alloc_q_counter_out[0x80] {
        counter_set_id: 0x58, 0x8;
    }
    dealloc_q_counter_in[0x80] {
        counter_set_id: 0x58, 0x8;
    }
    query_q_counter_in[0x100] {
        clear: 0xc0, 0x1;
        counter_set_id: 0xf8, 0x8;
    }
    query_q_counter_out[0x800] {
        rx_write_requests: 0x80, 0x20;
        rx_read_requests: 0xc0, 0x20;
        rx_atomic_requests: 0x100, 0x20;
        out_of_buffer: 0x180, 0x20;
        out_of_sequence: 0x1c0, 0x20;
        duplicate_request: 0x200, 0x20;
        rnr_nak_retry_err: 0x240, 0x20;
        packet_seq_err: 0x280, 0x20;
        implied_nak_seq_err: 0x2c0, 0x20;
        local_ack_timeout_err: 0x300, 0x20;
        req_rnr_retries_exceeded: 0x380, 0x20;
        resp_local_length_error: 0x3c0, 0x20;
        resp_cqe_error: 0x480, 0x20;
        req_cqe_error: 0x4a0, 0x20;
        req_remote_invalid_request: 0x500, 0x20;
        req_remote_access_errors: 0x540, 0x20;
        resp_remote_access_errors: 0x560, 0x20;
        req_transport_retries_exceeded: 0x5a0, 0x20;
        resp_cqe_flush_error: 0x5e0, 0x20;
        req_cqe_flush_error: 0x600, 0x20;
    }
    roce_addr_layout[0x100] {
        source_l3_address: 0x0, 0x80 bytes;
        vlan_valid: 0x83, 0x1;
        vlan_id: 0x84, 0xc;
        roce_l3_type: 0xd4, 0x4;
        roce_version: 0xd8, 0x8;
    }
    set_roce_address_in[0x180] {
        roce_address_index: 0x40, 0x10;
        roce_address: 0x80, 0x100 of roce_addr_layout;
    }
    query_roce_address_in[0x80] {
        roce_address_index: 0x40, 0x10;
    }
    query_roce_address_out[0x180] {
        roce_address: 0x80, 0x100 of roce_addr_layout;
    }
    set_l2_table_entry_in[0x200] {
        table_index: 0xa8, 0x18;
        mac_address: 0x100, 0x40;
    }
}
