//! Event queues and the events in them.
//!
//! Pairs with mlx5_core's `eq.c`.

super::layouts! {
    eqc[0x200] {
        page_offset: 0x54, 0x6;
        log_eq_size: 0x63, 0x5;
        uar_page: 0x68, 0x18;
        intr: 0xb4, 0xc;
        log_page_size: 0xc3, 0x5;
        consumer_counter: 0x148, 0x18;
        producer_counter: 0x168, 0x18;
    }
    create_eq_in[0x880] {
        eq_context_entry: 0x80, 0x200 of eqc;
        event_bitmask: 0x2c0, 0x100 bytes;
        pas: 0x880, 0x0 tail;
    }
    create_eq_out[0x80] {
        eq_number: 0x58, 0x8;
    }
    destroy_eq_in[0x80] {
        eq_number: 0x58, 0x8;
    }
    query_eq_in[0x80] {
        eq_number: 0x58, 0x8;
    }
    query_eq_out[0x880] {
        eq_context_entry: 0x80, 0x200 of eqc;
    }
}
