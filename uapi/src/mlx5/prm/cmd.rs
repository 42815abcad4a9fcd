//! Command headers, and the commands that bring a function up, query it and shut it down.
//!
//! Pairs with mlx5_core's `cmd.c`, `fw.c`, `main.c` and `pagealloc.c`.

super::layouts! {
    query_issi_out[0x380] {
        current_issi: 0x50, 0x10;
    }
    set_issi_in[0x80] {
        current_issi: 0x50, 0x10;
    }
    query_pages_in[0x80] {
        op_mod: 0x30, 0x10;
    }
    query_pages_out[0x80] {
        num_pages: 0x60, 0x20;
    }
    manage_pages_in[0x80] {
        op_mod: 0x30, 0x10;
        input_num_entries: 0x60, 0x20;
        pas: 0x80, 0x0 tail;
    }
    manage_pages_out[0x80] {
        output_num_entries: 0x40, 0x20;
    }
    query_hca_cap_out[0x8080] {
        capability: 0x80, 0x8000 bytes;
    }
    set_hca_cap_in[0x8080] {
        capability: 0x80, 0x8000 bytes;
    }
    query_adapter_out[0x880] {
        query_adapter_struct: 0x80, 0x800 of query_adapter_param_block;
    }
    query_adapter_param_block[0x800] {
        ieee_vendor_id: 0xc8, 0x18;
        vsd_vendor_id: 0xf0, 0x10;
        vsd_contd_psid: 0x780, 0x80 bytes;
    }
    access_register_in[0x80] {
        op_mod: 0x30, 0x10;
        register_id: 0x50, 0x10;
        register_data: 0x80, 0x0 tail;
    }
    query_lag_out[0x80] {
        ctx: 0x40, 0x40 of lagc;
    }
    lagc[0x40] {
        lag_state: 0x1d, 0x3;
        tx_remap_affinity_2: 0x34, 0x4;
        tx_remap_affinity_1: 0x3c, 0x4;
    }
    query_vuid_in[0x80] {
        query_vfs_vuid: 0x60, 0x1;
        data_direct: 0x61, 0x1;
        vhca_id: 0x70, 0x10;
    }
    query_vuid_out[0x200] {
        num_of_entries: 0x1f0, 0x10;
        vuid: 0x200, 0x0 tail;
    }
    query_special_contexts_out[0x100] {
        dump_fill_mkey: 0x40, 0x20;
        resd_lkey: 0x60, 0x20;
    }
}
