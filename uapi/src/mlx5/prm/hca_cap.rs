//! Capabilities of a function, as QUERY_HCA_CAP returns them.
//!
//! Pairs with `MLX5_CAP_*` of mlx5_core and mlx5_ib.

use super::Field;

super::layouts! {
    cmd_hca_cap[0x800] {
        hca_cap_2: 0x20, 0x1;
        log_max_srq_sz: 0x80, 0x8;
        log_max_qp_sz: 0x88, 0x8;
        log_max_qp: 0x9b, 0x5;
        ece_support: 0xa3, 0x1;
        log_max_srq: 0xab, 0x5;
        max_sgl_for_optimized_performance: 0xc0, 0x8;
        log_max_cq_sz: 0xc8, 0x8;
        log_max_cq: 0xdb, 0x5;
        log_max_eq_sz: 0xe0, 0x8;
        log_max_mkey: 0xea, 0x6;
        dump_fill_mkey: 0xf8, 0x1;
        log_max_eq: 0xfc, 0x4;
        max_indirection: 0x100, 0x8;
        fixed_buffer_size: 0x108, 0x1;
        log_max_mrw_sz: 0x109, 0x7;
        umr_extended_translation_offset: 0x118, 0x1;
        log_max_klm_list_size: 0x11a, 0x6;
        log_max_ra_req_qp: 0x14a, 0x6;
        log_max_ra_res_qp: 0x15a, 0x6;
        gid_table_size: 0x170, 0x10;
        out_of_seq_cnt: 0x180, 0x1;
        vport_counters: 0x181, 0x1;
        retransmission_q_counters: 0x182, 0x1;
        modify_rq_counter_set_id: 0x184, 0x1;
        max_qp_cnt: 0x186, 0xa;
        pkey_table_size: 0x190, 0x10;
        ib_virt: 0x1a2, 0x1;
        nic_flow_table: 0x1a6, 0x1;
        device_memory: 0x1a8, 0x1;
        local_ca_ack_delay: 0x1ab, 0x5;
        enhanced_error_q_counters: 0x1b1, 0x1;
        port_type: 0x1b6, 0x2;
        num_ports: 0x1b8, 0x8;
        log_max_msg: 0x1c3, 0x5;
        max_tc: 0x1cc, 0x4;
        stat_rate_support: 0x1e0, 0x10;
        cqe_version: 0x1fc, 0x4;
        umr_modify_entity_size_disabled: 0x207, 0x1;
        sctr_data_cqe: 0x215, 0x1;
        eth_net_offloads: 0x21c, 0x1;
        roce: 0x21d, 0x1;
        atomic: 0x21e, 0x1;
        cq_oi: 0x220, 0x1;
        cq_resize: 0x221, 0x1;
        cq_moderation: 0x222, 0x1;
        block_lb_mc: 0x228, 0x1;
        imaicl: 0x231, 0x1;
        qkv: 0x236, 0x1;
        pkv: 0x237, 0x1;
        set_deth_sqpn: 0x238, 0x1;
        xrc: 0x23c, 0x1;
        ud: 0x23d, 0x1;
        uc: 0x23e, 0x1;
        rc: 0x23f, 0x1;
        uar_4k: 0x240, 0x1;
        uar_sz: 0x24a, 0x6;
        log_pg_sz: 0x258, 0x8;
        bf: 0x260, 0x1;
        log_bf_reg_size: 0x26b, 0x5;
        lag_tx_port_affinity: 0x278, 0x1;
        num_lag_ports: 0x27c, 0x4;
        max_wqe_sz_sq: 0x290, 0x10;
        max_wqe_sz_rq: 0x2b0, 0x10;
        max_flow_counter_31_16: 0x2c0, 0x10;
        max_qp_mcg: 0x2e7, 0x19;
        log_max_mcg: 0x318, 0x8;
        log_max_transport_domain: 0x323, 0x5;
        log_max_pd: 0x32b, 0x5;
        dp_ordering_ooo_all_ud: 0x330, 0x1;
        dp_ordering_ooo_all_uc: 0x331, 0x1;
        dp_ordering_ooo_all_xrc: 0x332, 0x1;
        dp_ordering_ooo_all_rc: 0x334, 0x1;
        log_max_xrcd: 0x33b, 0x5;
        max_flow_counter_15_0: 0x350, 0x10;
        log_max_rq: 0x363, 0x5;
        log_max_sq: 0x36b, 0x5;
        log_max_tir: 0x373, 0x5;
        log_max_tis: 0x37b, 0x5;
        basic_cyclic_rcv_wqe: 0x380, 0x1;
        log_max_rmp: 0x383, 0x5;
        log_max_rqt: 0x38b, 0x5;
        log_max_rqt_size: 0x393, 0x5;
        tlp_device_emulation_manager: 0x398, 0x1;
        log_max_tis_per_sq: 0x39b, 0x5;
        log_max_stride_sz_rq: 0x3a3, 0x5;
        log_min_stride_sz_rq: 0x3ab, 0x5;
        log_max_stride_sz_sq: 0x3b3, 0x5;
        log_min_stride_sz_sq: 0x3bb, 0x5;
        log_max_wq_sz: 0x3db, 0x5;
        log_max_vlan_list: 0x3eb, 0x5;
        log_max_current_mc_list: 0x3f3, 0x5;
        log_max_current_uc_list: 0x3fb, 0x5;
        general_obj_types: 0x400, 0x40;
        sq_ts_format: 0x440, 0x2;
        rq_ts_format: 0x442, 0x2;
        log_max_uctx: 0x463, 0x5;
        log_max_umem: 0x46b, 0x5;
        max_num_eqs: 0x470, 0x10;
        log_max_l2_table: 0x483, 0x5;
        log_uar_page_sz: 0x490, 0x10;
        device_frequency_mhz: 0x4c0, 0x20;
        device_frequency_khz: 0x4e0, 0x20;
        num_of_uars_per_page: 0x520, 0x20;
        crossing_vhca_mkey: 0x5b2, 0x1;
        cqe_128_always: 0x5bd, 0x1;
        data_direct: 0x752, 0x1;
    }
    cmd_hca_cap_2[0x800] {
        dp_ordering_force: 0x88, 0x1;
        query_vuid: 0x92, 0x1;
    }
    atomic_caps[0x800] {
        atomic_req_8B_endianness_mode: 0x40, 0x2;
        supported_atomic_req_8B_endianness_mode_1: 0x46, 0x1;
        atomic_operations: 0x90, 0x10;
        atomic_size_qp: 0xb0, 0x10;
        atomic_size_dc: 0xd0, 0x10;
    }
    roce_cap[0x800] {
        qp_ts_format: 0x1e, 0x2;
        l3_type: 0x8c, 0x4;
        roce_version: 0x98, 0x8;
        r_roce_dest_udp_port: 0xb0, 0x10;
        r_roce_max_src_udp_port: 0xc0, 0x10;
        r_roce_min_src_udp_port: 0xd0, 0x10;
        roce_address_table_size: 0xf0, 0x10;
    }
    per_protocol_networking_offload_caps[0x800] {
        csum_cap: 0x0, 0x1;
        vlan_cap: 0x1, 0x1;
        self_lb_en_modifiable: 0x8, 0x1;
        max_lso_cap: 0xb, 0x5;
        wqe_inline_mode: 0x12, 0x2;
        rss_ind_tbl_cap: 0x14, 0x4;
    }
    flow_table_nic_cap[0x8000] {
        flow_table_properties_nic_receive: 0x200, 0x200 of flow_table_prop_layout;
        flow_table_properties_nic_receive_rdma: 0x400, 0x200 of flow_table_prop_layout;
        flow_table_properties_nic_transmit: 0x800, 0x200 of flow_table_prop_layout;
        flow_table_properties_nic_transmit_rdma: 0xa00, 0x200 of flow_table_prop_layout;
    }
    flow_table_prop_layout[0x200] {
        ft_support: 0x0, 0x1;
        flow_counter: 0x2, 0x1;
        flow_modify_en: 0x3, 0x1;
        modify_root: 0x4, 0x1;
        identified_miss_table_mode: 0x5, 0x1;
        flow_table_modify: 0x6, 0x1;
        log_max_ft_size: 0x22, 0x6;
        max_ft_level: 0x38, 0x8;
        log_max_ft_num: 0x78, 0x8;
        log_max_flow_counter: 0x90, 0x8;
        log_max_destination: 0x98, 0x8;
        log_max_flow: 0xb8, 0x8;
    }
    device_mem_cap[0x800] {
        memic: 0x0, 0x1;
        log_min_memic_alloc_size: 0x2b, 0x5;
        log_max_memic_addr_alignment: 0x38, 0x8;
        memic_bar_start_addr: 0x40, 0x40;
        memic_bar_size: 0x80, 0x20;
        max_memic_size: 0xa0, 0x20;
    }
    virtio_emulation_cap[0x800] {
        eth_frame_offload_type: 0x1, 0x1;
        virtio_version_1_0: 0x2, 0x1;
        event_mode: 0x10, 0x8;
        virtio_queue_type: 0x18, 0x8;
        log_doorbell_stride: 0x33, 0x5;
        log_doorbell_bar_size: 0x3b, 0x5;
        doorbell_bar_offset: 0x40, 0x40;
        max_num_virtio_queues: 0x88, 0x18;
        umem_1_buffer_param_a: 0x100, 0x20;
        umem_1_buffer_param_b: 0x120, 0x20;
        umem_2_buffer_param_a: 0x140, 0x20;
        umem_2_buffer_param_b: 0x160, 0x20;
        umem_3_buffer_param_a: 0x180, 0x20;
        umem_3_buffer_param_b: 0x1a0, 0x20;
    }
    tlp_dev_emu_capabilities[0x800] {
        tlp_rsp_gw_num_pages: 0x10c, 0x4;
        tlp_rsp_gw_pages_bar_offset: 0x1c0, 0x40;
    }
}

/// Capabilities of commands that only user contexts send. The kernel's description leaves them out.
#[allow(missing_docs, non_upper_case_globals, reason = "the names of the device's manual")]
impl cmd_hca_cap {
    pub const rts2rts_qp_udp_sport: Field<Self> = Field::new(0x151, 0x1);
    pub const rts2rts_lag_tx_port_affinity: Field<Self> = Field::new(0x152, 0x1);
}
