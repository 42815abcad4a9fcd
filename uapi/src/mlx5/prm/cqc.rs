//! Completion queues: their context and commands.
//!
//! Pairs with mlx5_core's `cq.c` and mlx5_ib's `cq.c`.

use super::Field;

super::layouts! {
    cqc[0x200] {
        status: 0x0, 0x4;
        dbr_umem_valid: 0x6, 0x1;
        cqe_sz: 0x8, 0x3;
        oi: 0xe, 0x1;
        cq_period_mode: 0xf, 0x2;
        cqe_comp_en: 0x11, 0x1;
        page_offset: 0x54, 0x6;
        log_cq_size: 0x63, 0x5;
        uar_page: 0x68, 0x18;
        cq_period: 0x84, 0xc;
        cq_max_count: 0x90, 0x10;
        c_eqn_or_apu_element: 0xa0, 0x20;
        log_page_size: 0xc3, 0x5;
        last_notified_index: 0x108, 0x18;
        last_solicit_index: 0x128, 0x18;
        producer_counter: 0x168, 0x18;
        dbr_addr: 0x1c0, 0x40;
    }
    create_cq_in[0x880] {
        cq_context: 0x80, 0x200 of cqc;
        cq_umem_valid: 0x2e0, 0x1;
        pas: 0x880, 0x0 tail;
    }
    create_cq_out[0x80] {
        cqn: 0x48, 0x18;
    }
    destroy_cq_in[0x80] {
        cqn: 0x48, 0x18;
    }
    modify_cq_in[0x880] {
        op_mod: 0x30, 0x10;
        cqn: 0x48, 0x18;
        modify_field_select_resize_field_select: 0x60, 0x20;
        cq_context: 0x80, 0x200 of cqc;
        pas: 0x880, 0x0 tail;
    }
    query_cq_in[0x80] {
        cqn: 0x48, 0x18;
    }
    query_cq_out[0x880] {
        cq_context: 0x80, 0x200 of cqc;
    }
}

/// The umem of the queue. The kernel's description leaves these fields out, because only user contexts use them.
#[allow(missing_docs, non_upper_case_globals, reason = "the names of the device's manual")]
impl create_cq_in {
    pub const cq_umem_offset: Field<Self> = Field::new(0x280, 0x40);
    pub const cq_umem_id: Field<Self> = Field::new(0x2c0, 0x20);
}

/// The umem of the doorbell record.
#[allow(missing_docs, non_upper_case_globals, reason = "the names of the device's manual")]
impl cqc {
    pub const dbr_umem_id: Field<Self> = Field::new(0x20, 0x20);
}
