//! Raw receive and send queues, and the objects that steer packets to and from them.
//!
//! Pairs with mlx5_core's `transobj.c` and mlx5e.

use super::srqc::wq;

super::layouts! {
    rqc[0x780] {
        scatter_fcs: 0x2, 0x1;
        vsd: 0x3, 0x1;
        mem_rq_type: 0x4, 0x4;
        state: 0x8, 0x4;
        hairpin: 0xe, 0x1;
        user_index: 0x28, 0x18;
        cqn: 0x48, 0x18;
        counter_set_id: 0x60, 0x8;
        wq: 0x180, 0x600 of wq;
    }
    sqc[0x780] {
        state: 0x8, 0x4;
        hairpin: 0xe, 0x1;
        user_index: 0x28, 0x18;
        cqn: 0x48, 0x18;
        tis_lst_sz: 0x100, 0x10;
        tis_num_0: 0x168, 0x18;
        wq: 0x180, 0x600 of wq;
    }
    tisc[0x500] {
        tls_en: 0x1, 0x1;
        lag_tx_port_affinity: 0x4, 0x4;
        transport_domain: 0x128, 0x18;
    }
    tirc[0x780] {
        disp_type: 0x20, 0x4;
        tls_en: 0x24, 0x1;
        packet_merge_mask: 0x94, 0x4;
        inline_rqn: 0xe8, 0x18;
        rx_hash_symmetric: 0x100, 0x1;
        indirect_table: 0x108, 0x18;
        rx_hash_fn: 0x120, 0x4;
        self_lb_block: 0x126, 0x2;
        transport_domain: 0x128, 0x18;
        rx_hash_toeplitz_key: 0x140, 0x140 bytes;
        rx_hash_field_selector_outer: 0x280, 0x20 of rx_hash_field_select;
    }
    rqtc[0x780] {
        list_q_type: 0xa5, 0x3;
        rqt_actual_size: 0xd0, 0x10;
    }
    create_rq_in[0x880] {
        ctx: 0x100, 0x780 of rqc;
    }
    create_rq_out[0x80] {
        rqn: 0x48, 0x18;
    }
    modify_rq_in[0x880] {
        rq_state: 0x40, 0x4;
        rqn: 0x48, 0x18;
        modify_bitmask: 0x80, 0x40;
        ctx: 0x100, 0x780 of rqc;
    }
    query_rq_in[0x80] {
        rqn: 0x48, 0x18;
    }
    query_rq_out[0x880] {
        rq_context: 0x100, 0x780 of rqc;
    }
    create_sq_in[0x880] {
        ctx: 0x100, 0x780 of sqc;
    }
    create_sq_out[0x80] {
        sqn: 0x48, 0x18;
    }
    modify_sq_in[0x880] {
        sq_state: 0x40, 0x4;
        sqn: 0x48, 0x18;
        modify_bitmask: 0x80, 0x40;
        ctx: 0x100, 0x780 of sqc;
    }
    query_sq_in[0x80] {
        sqn: 0x48, 0x18;
    }
    query_sq_out[0x880] {
        sq_context: 0x100, 0x780 of sqc;
    }
    create_tis_in[0x600] {
        ctx: 0x100, 0x500 of tisc;
    }
    create_tis_out[0x80] {
        tisn: 0x48, 0x18;
    }
    modify_tis_in[0x600] {
        tisn: 0x48, 0x18;
        bitmask: 0x80, 0x40;
        ctx: 0x100, 0x500 of tisc;
    }
    query_tis_in[0x80] {
        tisn: 0x48, 0x18;
    }
    query_tis_out[0x580] {
        tis_context: 0x80, 0x500 of tisc;
    }
    query_tir_in[0x80] {
        tirn: 0x48, 0x18;
    }
    query_tir_out[0x880] {
        tir_context: 0x100, 0x780 of tirc;
    }
    query_rqt_in[0x80] {
        rqtn: 0x48, 0x18;
    }
    query_rqt_out[0x880] {
        rqt_context: 0x100, 0x780 of rqtc;
    }
    create_tir_in[0x880] {
        ctx: 0x100, 0x780 of tirc;
    }
    create_tir_out[0x80] {
        tirn: 0x48, 0x18;
    }
    modify_tir_in[0x880] {
        tirn: 0x48, 0x18;
        bitmask: 0x80, 0x40;
        ctx: 0x100, 0x780 of tirc;
    }
    create_rqt_in[0x880] {
        rqt_context: 0x100, 0x780 of rqtc;
    }
    create_rqt_out[0x80] {
        rqtn: 0x48, 0x18;
    }
    modify_rqt_in[0x880] {
        rqtn: 0x48, 0x18;
        ctx: 0x100, 0x780 of rqtc;
    }
    rx_hash_field_select[0x20] {
        selected_fields: 0x2, 0x1e;
    }
    destroy_rq_in[0x80] {
        rqn: 0x48, 0x18;
    }
    destroy_sq_in[0x80] {
        sqn: 0x48, 0x18;
    }
    destroy_tis_in[0x80] {
        tisn: 0x48, 0x18;
    }
    destroy_tir_in[0x80] {
        tirn: 0x48, 0x18;
    }
    destroy_rqt_in[0x80] {
        rqtn: 0x48, 0x18;
    }
}
