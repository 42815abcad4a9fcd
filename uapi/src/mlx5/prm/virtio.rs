//! Virtio network queues that hardware serves, which are general objects.
//!
//! Pairs with `mlx5_ifc_vdpa.h` and with `mlx5_vdpa`.

use super::object::{general_obj_in_cmd_hdr, general_obj_out_cmd_hdr};

/// The `obj_type` of a virtio network queue, and its bit in `general_obj_types`:
/// `MLX5_OBJ_TYPE_VIRTIO_NET_Q`.
pub const OBJ_TYPE_VIRTIO_NET_Q: u16 = 0xd;
/// The number of the group of capabilities of virtio emulation in QUERY_HCA_CAP: `MLX5_CAP_VDPA_EMULATION`.
pub const CAP_VDPA_EMULATION: u16 = 0x13;
/// The value of `event_mode` for queues without interrupts: `MLX5_VIRTIO_Q_EVENT_MODE_NO_MSIX_MODE`.
pub const EVENT_MODE_NO_MSIX: u64 = 0;
/// The bit of `modify_field_select` that changes the state: `MLX5_VIRTQ_MODIFY_MASK_STATE`.
pub const MODIFY_STATE: u64 = 1;
/// The value of `list_q_type` of an RQ table of virtio network queues:
/// `MLX5_RQTC_LIST_Q_TYPE_VIRTIO_NET_Q`.
pub const LIST_Q_TYPE_VIRTIO_NET_Q: u64 = 1;

/// States of a virtio network queue: `MLX5_VIRTIO_NET_Q_OBJECT_STATE_*`.
#[allow(missing_docs, reason = "the name is the whole meaning")]
pub mod state {
    pub const INIT: u64 = 0;
    pub const RDY: u64 = 1;
    pub const SUSPEND: u64 = 2;
    pub const ERR: u64 = 3;
}

super::layouts! {
    virtio_q[0x400] {
        virtio_q_type: 0x0, 0x8;
        event_mode: 0xd, 0x3;
        queue_index: 0x10, 0x10;
        full_emulation: 0x20, 0x1;
        virtio_version_1_0: 0x21, 0x1;
        offload_type: 0x24, 0x4;
        event_qpn_or_msix: 0x28, 0x18;
        doorbell_stride_index: 0x40, 0x10;
        queue_size: 0x50, 0x10;
        desc_addr: 0x80, 0x40;
        used_addr: 0xc0, 0x40;
        available_addr: 0x100, 0x40;
        virtio_q_mkey: 0x140, 0x20;
        error_type: 0x178, 0x8;
        umem_1_id: 0x180, 0x20;
        umem_1_size: 0x1a0, 0x20;
        umem_1_offset: 0x1c0, 0x40;
        umem_2_id: 0x200, 0x20;
        umem_2_size: 0x220, 0x20;
        umem_2_offset: 0x240, 0x40;
        umem_3_id: 0x280, 0x20;
        umem_3_size: 0x2a0, 0x20;
        umem_3_offset: 0x2c0, 0x40;
        counter_set_id: 0x300, 0x20;
        pd: 0x328, 0x18;
    }
    virtio_net_q_object[0x600] {
        modify_field_select: 0x0, 0x40;
        queue_feature_bit_mask_12_3: 0x80, 0xa;
        dirty_bitmap_dump_enable: 0x8a, 0x1;
        state: 0x9c, 0x4;
        queue_feature_bit_mask_2_0: 0xa5, 0x3;
        tisn_or_qpn: 0xa8, 0x18;
        hw_available_index: 0x140, 0x10;
        hw_used_index: 0x150, 0x10;
        virtio_q_context: 0x200, 0x400 of virtio_q;
    }
    create_virtio_net_q_in[0x680] {
        general_obj_in_cmd_hdr: 0x0, 0x80 of general_obj_in_cmd_hdr;
        obj_context: 0x80, 0x600 of virtio_net_q_object;
    }
    modify_virtio_net_q_in[0x680] {
        general_obj_in_cmd_hdr: 0x0, 0x80 of general_obj_in_cmd_hdr;
        obj_context: 0x80, 0x600 of virtio_net_q_object;
    }
    query_virtio_net_q_out[0x680] {
        general_obj_out_cmd_hdr: 0x0, 0x80 of general_obj_out_cmd_hdr;
        obj_context: 0x80, 0x600 of virtio_net_q_object;
    }
}
