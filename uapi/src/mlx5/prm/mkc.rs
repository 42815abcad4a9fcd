//! Memory keys.
//!
//! Pairs with mlx5_core's `mr.c` and mlx5_ib's `mr.c` and `umr.c`.

use super::Field;

super::layouts! {
    mkc[0x200] {
        free: 0x1, 0x1;
        access_mode_4_2: 0x3, 0x3;
        relaxed_ordering_write: 0xd, 0x1;
        small_fence_on_rdma_read_response: 0xf, 0x1;
        umr_en: 0x10, 0x1;
        a: 0x11, 0x1;
        rw: 0x12, 0x1;
        rr: 0x13, 0x1;
        lw: 0x14, 0x1;
        lr: 0x15, 0x1;
        access_mode_1_0: 0x16, 0x2;
        qpn: 0x20, 0x18;
        mkey_7_0: 0x38, 0x8;
        length64: 0x60, 0x1;
        bsf_en: 0x61, 0x1;
        en_rinval: 0x67, 0x1;
        pd: 0x68, 0x18;
        start_addr: 0x80, 0x40;
        len: 0xc0, 0x40;
        crossing_target_vhca_id: 0x180, 0x10;
        translations_octword_size: 0x1a0, 0x20;
        relaxed_ordering_read: 0x1d9, 0x1;
        log_page_size: 0x1da, 0x6;
    }
    create_mkey_in[0x880] {
        pg_access: 0x60, 0x1;
        mkey_umem_valid: 0x61, 0x1;
        data_direct: 0x62, 0x1;
        memory_key_mkey_entry: 0x80, 0x200 of mkc;
        translations_octword_actual_size: 0x300, 0x20;
        klm_pas_mtt: 0x880, 0x0 tail;
    }
    create_mkey_out[0x80] {
        mkey_index: 0x48, 0x18;
    }
    destroy_mkey_in[0x80] {
        mkey_index: 0x48, 0x18;
    }
    query_mkey_in[0x80] {
        mkey_index: 0x48, 0x18;
    }
    query_mkey_out[0x980] {
        memory_key_mkey_entry: 0x80, 0x200 of mkc;
    }
}

/// The umem whose memory the mkey is over, and the byte there of its first address. The kernel's description leaves the
/// fields out, because only user contexts use them.
#[allow(missing_docs, non_upper_case_globals, reason = "the names of the device's manual")]
impl create_mkey_in {
    pub const mkey_umem_id: Field<Self> = Field::new(0x320, 0x20);
    pub const mkey_umem_offset: Field<Self> = Field::new(0x340, 0x40);
}
