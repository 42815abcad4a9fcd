//! The headers of commands about general objects; small objects: UAR pages, domains, user contexts and their memory, device memory.
//!
//! Pairs with mlx5_core's `uar.c` and mlx5_ib's `cmd.c` and `devx.c`.

super::layouts! {
    general_obj_in_cmd_hdr[0x80] {
        opcode: 0x0, 0x10;
        uid: 0x10, 0x10;
        obj_type: 0x30, 0x10;
        obj_id: 0x40, 0x20;
    }
    general_obj_out_cmd_hdr[0x80] {
        obj_id: 0x40, 0x20;
    }
    alloc_uar_out[0x80] {
        uar: 0x48, 0x18;
    }
    dealloc_uar_in[0x80] {
        uar: 0x48, 0x18;
    }
    alloc_pd_out[0x80] {
        pd: 0x48, 0x18;
    }
    dealloc_pd_in[0x80] {
        pd: 0x48, 0x18;
    }
    alloc_xrcd_out[0x80] {
        xrcd: 0x48, 0x18;
    }
    dealloc_xrcd_in[0x80] {
        xrcd: 0x48, 0x18;
    }
    alloc_transport_domain_out[0x80] {
        transport_domain: 0x48, 0x18;
    }
    dealloc_transport_domain_in[0x80] {
        transport_domain: 0x48, 0x18;
    }
    create_uctx_in[0x200] {
        uctx: 0x80, 0x180 of uctx;
    }
    create_uctx_out[0x80] {
        uid: 0x50, 0x10;
    }
    destroy_uctx_in[0x80] {
        uid: 0x50, 0x10;
    }
    uctx[0x180] {
        cap: 0x0, 0x20;
    }
    create_umem_in[0x180] {
        umem: 0x80, 0x100 of umem;
    }
    create_umem_out[0x80] {
        umem_id: 0x48, 0x18;
    }
    destroy_umem_in[0x80] {
        umem_id: 0x48, 0x18;
    }
    alloc_memic_in[0x100] {
        log_memic_addr_alignment: 0x78, 0x8;
        range_start_addr: 0x80, 0x40;
        range_size: 0xc0, 0x20;
        memic_size: 0xe0, 0x20;
    }
    alloc_memic_out[0x80] {
        memic_start_addr: 0x40, 0x40;
    }
    dealloc_memic_in[0x100] {
        memic_start_addr: 0x80, 0x40;
        memic_size: 0xc0, 0x20;
    }
    umem[0x100] {
        log_page_size: 0x9b, 0x5;
        page_offset: 0xa0, 0x20;
        num_of_mtt: 0xc0, 0x40;
    }
}
