//! The device object: limits, capabilities, and the methods of the device as a whole.
//!
//! `rdma/ib_user_verbs.h`, `rdma/ib_user_ioctl_cmds.h`, `rdma/ib_user_ioctl_verbs.h`.

use crate::endian::Be64;
use crate::enumeration::{flag_sets, ids, open_enums};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// Command `IB_USER_VERBS_CMD_QUERY_DEVICE`.
    struct ib_uverbs_query_device[8] {
        response: u64 = 0,
    }

    /// Limits and capabilities: the response of `IB_USER_VERBS_CMD_QUERY_DEVICE` and the first part
    /// of the extended one.
    struct ib_uverbs_query_device_resp[176] {
        fw_ver: u64 = 0,
        node_guid: Be64 = 8,
        sys_image_guid: Be64 = 16,
        max_mr_size: u64 = 24,
        page_size_cap: u64 = 32,
        vendor_id: u32 = 40,
        vendor_part_id: u32 = 44,
        hw_ver: u32 = 48,
        max_qp: u32 = 52,
        max_qp_wr: u32 = 56,
        device_cap_flags: u32 = 60,
        max_sge: u32 = 64,
        max_sge_rd: u32 = 68,
        max_cq: u32 = 72,
        max_cqe: u32 = 76,
        max_mr: u32 = 80,
        max_pd: u32 = 84,
        max_qp_rd_atom: u32 = 88,
        max_ee_rd_atom: u32 = 92,
        max_res_rd_atom: u32 = 96,
        max_qp_init_rd_atom: u32 = 100,
        max_ee_init_rd_atom: u32 = 104,
        atomic_cap: u32 = 108,
        max_ee: u32 = 112,
        max_rdd: u32 = 116,
        max_mw: u32 = 120,
        max_raw_ipv6_qp: u32 = 124,
        max_raw_ethy_qp: u32 = 128,
        max_mcast_grp: u32 = 132,
        max_mcast_qp_attach: u32 = 136,
        max_total_mcast_qp_attach: u32 = 140,
        max_ah: u32 = 144,
        max_fmr: u32 = 148,
        max_map_per_fmr: u32 = 152,
        max_srq: u32 = 156,
        max_srq_wr: u32 = 160,
        max_srq_sge: u32 = 164,
        max_pkeys: u16 = 168,
        local_ca_ack_delay: u8 = 170,
        phys_port_cnt: u8 = 171,
        reserved: [u8; 4] = 172,
    }

    /// Command `IB_USER_VERBS_EX_CMD_QUERY_DEVICE`.
    struct ib_uverbs_ex_query_device[8] {
        comp_mask: u32 = 0,
        reserved: u32 = 4,
    }

    /// The operations that may hit on-demand memory, per transport: bits of [`ib_uverbs_odp_transport_cap_bits`].
    struct ib_uverbs_odp_caps_per_transport[12] of "ib_uverbs_odp_caps.per_transport_caps" {
        rc_odp_caps: u32 = 0,
        uc_odp_caps: u32 = 4,
        ud_odp_caps: u32 = 8,
    }

    /// On-demand paging: `general_caps` are [`ib_uverbs_odp_general_cap_bits`].
    struct ib_uverbs_odp_caps[24] {
        general_caps: u64 = 0,
        per_transport_caps: ib_uverbs_odp_caps_per_transport = 8,
        reserved: u32 = 20,
    }

    /// Limits of receive-side scaling.
    struct ib_uverbs_rss_caps[16] {
        supported_qpts: u32 = 0,
        max_rwq_indirection_tables: u32 = 4,
        max_rwq_indirection_table_size: u32 = 8,
        reserved: u32 = 12,
    }

    /// Limits of tag matching.
    struct ib_uverbs_tm_caps[24] {
        max_rndv_hdr_size: u32 = 0,
        max_num_tags: u32 = 4,
        flags: u32 = 8,
        max_ops: u32 = 12,
        max_sge: u32 = 16,
        reserved: u32 = 20,
    }

    /// Limits of completion moderation; the period is in microseconds.
    struct ib_uverbs_cq_moderation_caps[8] {
        max_cq_moderation_count: u16 = 0,
        max_cq_moderation_period: u16 = 2,
        reserved: u32 = 4,
    }

    /// Answer of `IB_USER_VERBS_EX_CMD_QUERY_DEVICE`. `response_length` is the number of bytes that the kernel wrote;
    /// `hca_core_clock` is in kHz.
    struct ib_uverbs_ex_query_device_resp[304] {
        base: ib_uverbs_query_device_resp = 0,
        comp_mask: u32 = 176,
        response_length: u32 = 180,
        odp_caps: ib_uverbs_odp_caps = 184,
        timestamp_mask: u64 = 208,
        hca_core_clock: u64 = 216,
        device_cap_flags_ex: u64 = 224,
        rss_caps: ib_uverbs_rss_caps = 232,
        max_wq_type_rq: u32 = 248,
        raw_packet_caps: u32 = 252,
        tm_caps: ib_uverbs_tm_caps = 256,
        cq_moderation_caps: ib_uverbs_cq_moderation_caps = 280,
        max_dm_size: u64 = 288,
        xrc_odp_caps: u32 = 296,
        reserved: u32 = 300,
    }
}

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_methods_device: u16 {
        UVERBS_METHOD_INVOKE_WRITE = 0,
        UVERBS_METHOD_INFO_HANDLES = 1,
        UVERBS_METHOD_QUERY_PORT = 2,
        UVERBS_METHOD_GET_CONTEXT = 3,
        UVERBS_METHOD_QUERY_CONTEXT = 4,
        UVERBS_METHOD_QUERY_GID_TABLE = 5,
        UVERBS_METHOD_QUERY_GID_ENTRY = 6,
        UVERBS_METHOD_QUERY_PORT_SPEED = 7,
        UVERBS_METHOD_QUERY_COMP_CNTR_CAPS = 8,
    }

    enum uverbs_attrs_invoke_write_cmd_attr_ids: u16 {
        UVERBS_ATTR_CORE_IN = 0,
        UVERBS_ATTR_CORE_OUT = 1,
        UVERBS_ATTR_WRITE_CMD = 2,
    }

    enum uverbs_attrs_info_handles_id: u16 {
        UVERBS_ATTR_INFO_OBJECT_ID = 0,
        UVERBS_ATTR_INFO_TOTAL_HANDLES = 1,
        UVERBS_ATTR_INFO_HANDLES_LIST = 2,
    }
}

open_enums! {
    const DRIVERS = "rdma/ib_user_ioctl_verbs.h";

    /// The driver behind a device; every ioctl header carries it.
    enum rdma_driver_id: u32 {
        RDMA_DRIVER_UNKNOWN = 0,
        RDMA_DRIVER_MLX5 = 1,
        RDMA_DRIVER_MLX4 = 2,
        RDMA_DRIVER_CXGB3 = 3,
        RDMA_DRIVER_CXGB4 = 4,
        RDMA_DRIVER_MTHCA = 5,
        RDMA_DRIVER_BNXT_RE = 6,
        RDMA_DRIVER_OCRDMA = 7,
        RDMA_DRIVER_NES = 8,
        RDMA_DRIVER_IRDMA = 9,
        RDMA_DRIVER_VMW_PVRDMA = 10,
        RDMA_DRIVER_QEDR = 11,
        RDMA_DRIVER_HNS = 12,
        RDMA_DRIVER_USNIC = 13,
        RDMA_DRIVER_RXE = 14,
        RDMA_DRIVER_HFI1 = 15,
        RDMA_DRIVER_QIB = 16,
        RDMA_DRIVER_EFA = 17,
        RDMA_DRIVER_SIW = 18,
        RDMA_DRIVER_ERDMA = 19,
        RDMA_DRIVER_MANA = 20,
        RDMA_DRIVER_IONIC = 21,
    }
}

flag_sets! {
    const CAPS = "rdma/ib_user_verbs.h";

    /// Capabilities of a device. The low 32 bits stand in `device_cap_flags`, all of them in
    /// `device_cap_flags_ex`.
    enum ib_uverbs_device_cap_flags: u64 {
        IB_UVERBS_DEVICE_RESIZE_MAX_WR = 1 << 0,
        IB_UVERBS_DEVICE_BAD_PKEY_CNTR = 1 << 1,
        IB_UVERBS_DEVICE_BAD_QKEY_CNTR = 1 << 2,
        IB_UVERBS_DEVICE_RAW_MULTI = 1 << 3,
        IB_UVERBS_DEVICE_AUTO_PATH_MIG = 1 << 4,
        IB_UVERBS_DEVICE_CHANGE_PHY_PORT = 1 << 5,
        IB_UVERBS_DEVICE_UD_AV_PORT_ENFORCE = 1 << 6,
        IB_UVERBS_DEVICE_CURR_QP_STATE_MOD = 1 << 7,
        IB_UVERBS_DEVICE_SHUTDOWN_PORT = 1 << 8,
        IB_UVERBS_DEVICE_PORT_ACTIVE_EVENT = 1 << 10,
        IB_UVERBS_DEVICE_SYS_IMAGE_GUID = 1 << 11,
        IB_UVERBS_DEVICE_RC_RNR_NAK_GEN = 1 << 12,
        IB_UVERBS_DEVICE_SRQ_RESIZE = 1 << 13,
        IB_UVERBS_DEVICE_N_NOTIFY_CQ = 1 << 14,
        IB_UVERBS_DEVICE_MEM_WINDOW = 1 << 17,
        IB_UVERBS_DEVICE_UD_IP_CSUM = 1 << 18,
        IB_UVERBS_DEVICE_XRC = 1 << 20,
        IB_UVERBS_DEVICE_MEM_MGT_EXTENSIONS = 1 << 21,
        IB_UVERBS_DEVICE_MEM_WINDOW_TYPE_2A = 1 << 23,
        IB_UVERBS_DEVICE_MEM_WINDOW_TYPE_2B = 1 << 24,
        IB_UVERBS_DEVICE_RC_IP_CSUM = 1 << 25,
        IB_UVERBS_DEVICE_RAW_IP_CSUM = 1 << 26,
        IB_UVERBS_DEVICE_MANAGED_FLOW_STEERING = 1 << 29,
        IB_UVERBS_DEVICE_RAW_SCATTER_FCS = 1 << 34,
        IB_UVERBS_DEVICE_PCI_WRITE_END_PADDING = 1 << 36,
        IB_UVERBS_DEVICE_FLUSH_GLOBAL = 1 << 38,
        IB_UVERBS_DEVICE_FLUSH_PERSISTENT = 1 << 39,
        IB_UVERBS_DEVICE_ATOMIC_WRITE = 1 << 40,
        IB_UVERBS_DEVICE_CC_DMA_BOUNCE = 1 << 41,
    }
}

flag_sets! {
    const CAPS32 = "rdma/ib_user_verbs.h";

    /// Capabilities of raw packet queue pairs.
    enum ib_uverbs_raw_packet_caps: u32 {
        IB_UVERBS_RAW_PACKET_CAP_CVLAN_STRIPPING = 1 << 0,
        IB_UVERBS_RAW_PACKET_CAP_SCATTER_FCS = 1 << 1,
        IB_UVERBS_RAW_PACKET_CAP_IP_CSUM = 1 << 2,
        IB_UVERBS_RAW_PACKET_CAP_DELAY_DROP = 1 << 3,
    }

    /// Operations that may hit on-demand memory.
    enum ib_uverbs_odp_transport_cap_bits: u32 {
        IB_UVERBS_ODP_SUPPORT_SEND = 1 << 0,
        IB_UVERBS_ODP_SUPPORT_RECV = 1 << 1,
        IB_UVERBS_ODP_SUPPORT_WRITE = 1 << 2,
        IB_UVERBS_ODP_SUPPORT_READ = 1 << 3,
        IB_UVERBS_ODP_SUPPORT_ATOMIC = 1 << 4,
        IB_UVERBS_ODP_SUPPORT_SRQ_RECV = 1 << 5,
        IB_UVERBS_ODP_SUPPORT_FLUSH = 1 << 6,
        IB_UVERBS_ODP_SUPPORT_ATOMIC_WRITE = 1 << 7,
    }
}

flag_sets! {
    const CAPS_ODP = "rdma/ib_user_verbs.h";

    /// The kinds of on-demand paging that a device has.
    enum ib_uverbs_odp_general_cap_bits: u64 {
        IB_UVERBS_ODP_SUPPORT = 1 << 0,
        IB_UVERBS_ODP_SUPPORT_IMPLICIT = 1 << 1,
    }
}

open_enums! {
    const ATOMICS = "rdma/ib_verbs.h";

    /// The scope in which atomics of a device are atomic.
    enum ib_atomic_cap: u32 {
        IB_ATOMIC_NONE = 0,
        IB_ATOMIC_HCA = 1,
        IB_ATOMIC_GLOB = 2,
    }
}
