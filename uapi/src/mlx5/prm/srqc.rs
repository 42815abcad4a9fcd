//! Shared receive queues: basic, XRC, and receive memory pools.
//!
//! Pairs with mlx5_ib's `srq_cmd.c`.

super::layouts! {
    srqc[0x200] {

    }
    xrc_srqc[0x200] {
        log_xrc_srq_size: 0x4, 0x4;
        log_rq_stride: 0x25, 0x3;
        xrcd: 0x28, 0x18;
        page_offset: 0x40, 0x6;
        cqn: 0x48, 0x18;
        log_page_size: 0x82, 0x6;
        user_index: 0x88, 0x18;
        pd: 0xc8, 0x18;
        lwm: 0xe0, 0x10;
        db_record_addr_h: 0x140, 0x20;
        db_record_addr_l: 0x160, 0x1e;
    }
    rmpc[0x780] {
        state: 0x8, 0x4;
        wq: 0x180, 0x600 of wq;
    }
    wq[0x600] {
        wq_type: 0x0, 0x4;
        page_offset: 0x2b, 0x5;
        lwm: 0x30, 0x10;
        pd: 0x48, 0x18;
        uar_page: 0x68, 0x18;
        dbr_addr: 0x80, 0x40;
        log_wq_stride: 0x10c, 0x4;
        log_wq_pg_sz: 0x113, 0x5;
        log_wq_sz: 0x11b, 0x5;
        dbr_umem_valid: 0x120, 0x1;
        wq_umem_valid: 0x121, 0x1;
    }
    create_xrc_srq_in[0x880] {
        xrc_srq_context_entry: 0x80, 0x200 of xrc_srqc;
        xrc_srq_umem_valid: 0x2e0, 0x1;
        pas: 0x880, 0x0 tail;
    }
    create_xrc_srq_out[0x80] {
        xrc_srqn: 0x48, 0x18;
    }
    destroy_xrc_srq_in[0x80] {
        xrc_srqn: 0x48, 0x18;
    }
    query_xrc_srq_in[0x80] {
        xrc_srqn: 0x48, 0x18;
    }
    query_xrc_srq_out[0x880] {
        xrc_srq_context_entry: 0x80, 0x200 of xrc_srqc;
    }
    arm_xrc_srq_in[0x80] {
        xrc_srqn: 0x48, 0x18;
        lwm: 0x70, 0x10;
    }
    create_rmp_in[0x880] {
        ctx: 0x100, 0x780 of rmpc;
    }
    create_rmp_out[0x80] {
        rmpn: 0x48, 0x18;
    }
    destroy_rmp_in[0x80] {
        rmpn: 0x48, 0x18;
    }
    modify_rmp_in[0x880] {
        rmpn: 0x48, 0x18;
        bitmask: 0x80, 0x40 of rmp_bitmask;
        ctx: 0x100, 0x780 of rmpc;
    }
    query_rmp_in[0x80] {
        rmpn: 0x48, 0x18;
    }
    query_rmp_out[0x880] {
        rmp_context: 0x100, 0x780 of rmpc;
    }
    rmp_bitmask[0x40] {
        lwm: 0x3f, 0x1;
    }
}
