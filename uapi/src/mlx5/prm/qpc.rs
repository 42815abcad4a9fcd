//! Queue pairs: their context, address path and state commands.
//!
//! Pairs with mlx5_ib's `qp.c` and `qpc.c`.

use super::Field;

super::layouts! {
    qpc[0x740] {
        state: 0x0, 0x4;
        lag_tx_port_affinity: 0x4, 0x4;
        st: 0x8, 0x8;
        pm_state: 0x13, 0x2;
        wq_signature: 0x20, 0x1;
        block_lb_mc: 0x21, 0x1;
        dp_ordering_force: 0x27, 0x1;
        pd: 0x28, 0x18;
        mtu: 0x40, 0x3;
        log_msg_max: 0x43, 0x5;
        log_rq_size: 0x49, 0x4;
        log_rq_stride: 0x4d, 0x3;
        no_sq: 0x50, 0x1;
        log_sq_size: 0x51, 0x4;
        ts_format: 0x58, 0x2;
        counter_set_id: 0x60, 0x8;
        uar_page: 0x68, 0x18;
        user_index: 0x88, 0x18;
        log_page_size: 0xa3, 0x5;
        remote_qpn: 0xa8, 0x18;
        primary_address_path: 0xc0, 0x160 of ads;
        log_ack_req_freq: 0x380, 0x4;
        log_sra_max: 0x388, 0x3;
        retry_count: 0x38d, 0x3;
        rnr_retry: 0x390, 0x3;
        fre: 0x394, 0x1;
        next_send_psn: 0x3c8, 0x18;
        cqn_snd: 0x3e8, 0x18;
        deth_sqpn: 0x408, 0x18;
        log_rra_max: 0x488, 0x3;
        atomic_mode: 0x48c, 0x4;
        rre: 0x490, 0x1;
        rwe: 0x491, 0x1;
        rae: 0x492, 0x1;
        page_offset: 0x494, 0x6;
        dp_ordering_1: 0x49c, 0x1;
        min_rnr_nak: 0x4a3, 0x5;
        next_rcv_psn: 0x4a8, 0x18;
        xrcd: 0x4c8, 0x18;
        cqn_rcv: 0x4e8, 0x18;
        dbr_addr: 0x500, 0x40;
        q_key: 0x540, 0x20;
        rq_type: 0x565, 0x3;
        srqn_rmpn_xrqn: 0x568, 0x18;
        hw_sq_wqebb_counter: 0x5a0, 0x10;
        cs_req: 0x630, 0x8;
        cs_res: 0x638, 0x8;
        dbr_umem_valid: 0x683, 0x1;
    }
    ads[0x160] {
        pkey_index: 0x10, 0x10;
        rlid: 0x30, 0x10;
        ack_timeout: 0x40, 0x5;
        src_addr_index: 0x48, 0x8;
        hop_limit: 0x58, 0x8;
        rgid_rip: 0x80, 0x80 bytes;
        udp_sport: 0x110, 0x10;
        eth_prio: 0x121, 0x3;
        sl: 0x124, 0x4;
        vhca_port_num: 0x128, 0x8;
        rmac_47_32: 0x130, 0x10;
        rmac_31_0: 0x140, 0x20;
    }
    create_qp_in[0x880] {
        ece: 0xa0, 0x20;
        qpc: 0xc0, 0x740 of qpc;
        wq_umem_offset: 0x800, 0x40;
        wq_umem_id: 0x840, 0x20;
        wq_umem_valid: 0x860, 0x1;
        pas: 0x880, 0x0 tail;
    }
    create_qp_out[0x80] {
        qpn: 0x48, 0x18;
        ece: 0x60, 0x20;
    }
    destroy_qp_in[0x80] {
        qpn: 0x48, 0x18;
    }
    rst2init_qp_in[0x880] {
        qpn: 0x48, 0x18;
        opt_param_mask: 0x80, 0x20;
        ece: 0xa0, 0x20;
        qpc: 0xc0, 0x740 of qpc;
    }
    rst2init_qp_out[0x80] {
        ece: 0x60, 0x20;
    }
    query_qp_in[0x80] {
        qpn: 0x48, 0x18;
    }
    query_qp_out[0xe80] {
        ece: 0xa0, 0x20;
        qpc: 0xc0, 0x740 of qpc;
    }
    attach_to_mcg_in[0x100] {
        qpn: 0x48, 0x18;
        multicast_gid: 0x80, 0x80 bytes;
    }
}

/// The second part of the mask of optional parameters, in RTS2RTS_QP and others. The kernel does not use it.
#[allow(missing_docs, non_upper_case_globals, reason = "the names of the device's manual")]
impl rst2init_qp_in {
    pub const opt_param_mask_95_32: Field<Self> = Field::new(0x840, 0x40);
}

/// The umem of the doorbell record. The kernel's description leaves the field out, because only user contexts use it.
#[allow(missing_docs, non_upper_case_globals, reason = "the names of the device's manual")]
impl qpc {
    pub const dbr_umem_id: Field<Self> = Field::new(0x720, 0x20);
}
