//! Queue pairs. Their work requests are in [`wr`](crate::wr).
//!
//! `rdma/ib_user_verbs.h`, `rdma/ib_user_ioctl_cmds.h`, `rdma/ib_user_ioctl_verbs.h`.

use crate::ah::ib_uverbs_ah_attr;
use crate::enumeration::{flag_sets, ids, open_enums};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// The address of a path as modify and query carry it; `dgid` is in network order.
    struct ib_uverbs_qp_dest[32] {
        dgid: [u8; 16] = 0,
        flow_label: u32 = 16,
        dlid: u16 = 20,
        reserved: u16 = 22,
        sgid_index: u8 = 24,
        hop_limit: u8 = 25,
        traffic_class: u8 = 26,
        sl: u8 = 27,
        src_path_bits: u8 = 28,
        static_rate: u8 = 29,
        is_global: u8 = 30,
        port_num: u8 = 31,
    }

    /// Command `IB_USER_VERBS_CMD_CREATE_QP`.
    struct ib_uverbs_create_qp[56] {
        response: u64 = 0,
        user_handle: u64 = 8,
        pd_handle: u32 = 16,
        send_cq_handle: u32 = 20,
        recv_cq_handle: u32 = 24,
        srq_handle: u32 = 28,
        max_send_wr: u32 = 32,
        max_recv_wr: u32 = 36,
        max_send_sge: u32 = 40,
        max_recv_sge: u32 = 44,
        max_inline_data: u32 = 48,
        sq_sig_all: u8 = 52,
        qp_type: u8 = 53,
        is_srq: u8 = 54,
        reserved: u8 = 55,
    }

    /// Answer of `IB_USER_VERBS_CMD_CREATE_QP` and of `IB_USER_VERBS_CMD_OPEN_QP`.
    struct ib_uverbs_create_qp_resp[32] {
        qp_handle: u32 = 0,
        qpn: u32 = 4,
        max_send_wr: u32 = 8,
        max_recv_wr: u32 = 12,
        max_send_sge: u32 = 16,
        max_recv_sge: u32 = 20,
        max_inline_data: u32 = 24,
        reserved: u32 = 28,
    }

    /// Command `IB_USER_VERBS_EX_CMD_CREATE_QP`.
    struct ib_uverbs_ex_create_qp[64] {
        user_handle: u64 = 0,
        pd_handle: u32 = 8,
        send_cq_handle: u32 = 12,
        recv_cq_handle: u32 = 16,
        srq_handle: u32 = 20,
        max_send_wr: u32 = 24,
        max_recv_wr: u32 = 28,
        max_send_sge: u32 = 32,
        max_recv_sge: u32 = 36,
        max_inline_data: u32 = 40,
        sq_sig_all: u8 = 44,
        qp_type: u8 = 45,
        is_srq: u8 = 46,
        reserved: u8 = 47,
        comp_mask: u32 = 48,
        create_flags: u32 = 52,
        rwq_ind_tbl_handle: u32 = 56,
        source_qpn: u32 = 60,
    }

    /// Answer of `IB_USER_VERBS_EX_CMD_CREATE_QP`.
    struct ib_uverbs_ex_create_qp_resp[40] {
        base: ib_uverbs_create_qp_resp = 0,
        comp_mask: u32 = 32,
        response_length: u32 = 36,
    }

    /// Command `IB_USER_VERBS_CMD_OPEN_QP`. `pd_handle` is the handle of the XRC domain.
    struct ib_uverbs_open_qp[32] {
        response: u64 = 0,
        user_handle: u64 = 8,
        pd_handle: u32 = 16,
        qpn: u32 = 20,
        qp_type: u8 = 24,
        reserved: [u8; 7] = 25,
    }

    /// Command `IB_USER_VERBS_CMD_QUERY_QP`.
    struct ib_uverbs_query_qp[16] {
        response: u64 = 0,
        qp_handle: u32 = 8,
        attr_mask: u32 = 12,
    }

    /// Answer of `IB_USER_VERBS_CMD_QUERY_QP`.
    struct ib_uverbs_query_qp_resp[128] {
        dest: ib_uverbs_qp_dest = 0,
        alt_dest: ib_uverbs_qp_dest = 32,
        max_send_wr: u32 = 64,
        max_recv_wr: u32 = 68,
        max_send_sge: u32 = 72,
        max_recv_sge: u32 = 76,
        max_inline_data: u32 = 80,
        qkey: u32 = 84,
        rq_psn: u32 = 88,
        sq_psn: u32 = 92,
        dest_qp_num: u32 = 96,
        qp_access_flags: u32 = 100,
        pkey_index: u16 = 104,
        alt_pkey_index: u16 = 106,
        qp_state: u8 = 108,
        cur_qp_state: u8 = 109,
        path_mtu: u8 = 110,
        path_mig_state: u8 = 111,
        sq_draining: u8 = 112,
        max_rd_atomic: u8 = 113,
        max_dest_rd_atomic: u8 = 114,
        min_rnr_timer: u8 = 115,
        port_num: u8 = 116,
        timeout: u8 = 117,
        retry_cnt: u8 = 118,
        rnr_retry: u8 = 119,
        alt_port_num: u8 = 120,
        alt_timeout: u8 = 121,
        sq_sig_all: u8 = 122,
        reserved: [u8; 5] = 123,
    }

    /// Command `IB_USER_VERBS_CMD_MODIFY_QP`; it has no response.
    struct ib_uverbs_modify_qp[112] {
        dest: ib_uverbs_qp_dest = 0,
        alt_dest: ib_uverbs_qp_dest = 32,
        qp_handle: u32 = 64,
        attr_mask: u32 = 68,
        qkey: u32 = 72,
        rq_psn: u32 = 76,
        sq_psn: u32 = 80,
        dest_qp_num: u32 = 84,
        qp_access_flags: u32 = 88,
        pkey_index: u16 = 92,
        alt_pkey_index: u16 = 94,
        qp_state: u8 = 96,
        cur_qp_state: u8 = 97,
        path_mtu: u8 = 98,
        path_mig_state: u8 = 99,
        en_sqd_async_notify: u8 = 100,
        max_rd_atomic: u8 = 101,
        max_dest_rd_atomic: u8 = 102,
        min_rnr_timer: u8 = 103,
        port_num: u8 = 104,
        timeout: u8 = 105,
        retry_cnt: u8 = 106,
        rnr_retry: u8 = 107,
        alt_port_num: u8 = 108,
        alt_timeout: u8 = 109,
        reserved: [u8; 2] = 110,
    }

    /// Command `IB_USER_VERBS_EX_CMD_MODIFY_QP`. `rate_limit` is in kbit/s.
    struct ib_uverbs_ex_modify_qp[120] {
        base: ib_uverbs_modify_qp = 0,
        rate_limit: u32 = 112,
        reserved: u32 = 116,
    }

    /// Answer of `IB_USER_VERBS_EX_CMD_MODIFY_QP`.
    struct ib_uverbs_ex_modify_qp_resp[8] {
        comp_mask: u32 = 0,
        response_length: u32 = 4,
    }

    /// All attributes of a queue pair, as the connection managers pass them.
    struct ib_uverbs_qp_attr[144] {
        qp_attr_mask: u32 = 0,
        qp_state: u32 = 4,
        cur_qp_state: u32 = 8,
        path_mtu: u32 = 12,
        path_mig_state: u32 = 16,
        qkey: u32 = 20,
        rq_psn: u32 = 24,
        sq_psn: u32 = 28,
        dest_qp_num: u32 = 32,
        qp_access_flags: u32 = 36,
        ah_attr: ib_uverbs_ah_attr = 40,
        alt_ah_attr: ib_uverbs_ah_attr = 72,
        max_send_wr: u32 = 104,
        max_recv_wr: u32 = 108,
        max_send_sge: u32 = 112,
        max_recv_sge: u32 = 116,
        max_inline_data: u32 = 120,
        pkey_index: u16 = 124,
        alt_pkey_index: u16 = 126,
        en_sqd_async_notify: u8 = 128,
        sq_draining: u8 = 129,
        max_rd_atomic: u8 = 130,
        max_dest_rd_atomic: u8 = 131,
        min_rnr_timer: u8 = 132,
        port_num: u8 = 133,
        timeout: u8 = 134,
        retry_cnt: u8 = 135,
        rnr_retry: u8 = 136,
        alt_port_num: u8 = 137,
        alt_timeout: u8 = 138,
        reserved: [u8; 5] = 139,
    }

    /// Command `IB_USER_VERBS_CMD_DESTROY_QP`.
    struct ib_uverbs_destroy_qp[16] {
        response: u64 = 0,
        qp_handle: u32 = 8,
        reserved: u32 = 12,
    }

    /// Answer of `IB_USER_VERBS_CMD_DESTROY_QP`.
    struct ib_uverbs_destroy_qp_resp[4] {
        events_reported: u32 = 0,
    }
}

layouts! {
    const LAYOUTS_IOCTL = "rdma/ib_user_ioctl_verbs.h";

    /// Capacities, in the request and in the answer of `UVERBS_METHOD_QP_CREATE`.
    struct ib_uverbs_qp_cap[20] {
        max_send_wr: u32 = 0,
        max_recv_wr: u32 = 4,
        max_send_sge: u32 = 8,
        max_recv_sge: u32 = 12,
        max_inline_data: u32 = 16,
    }
}

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_methods_qp: u16 {
        UVERBS_METHOD_QP_CREATE = 0,
        UVERBS_METHOD_QP_DESTROY = 1,
        UVERBS_METHOD_QP_ATTACH_COMP_CNTR = 2,
    }

    enum uverbs_attrs_create_qp_cmd_attr_ids: u16 {
        UVERBS_ATTR_CREATE_QP_HANDLE = 0,
        UVERBS_ATTR_CREATE_QP_XRCD_HANDLE = 1,
        UVERBS_ATTR_CREATE_QP_PD_HANDLE = 2,
        UVERBS_ATTR_CREATE_QP_SRQ_HANDLE = 3,
        UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE = 4,
        UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE = 5,
        UVERBS_ATTR_CREATE_QP_IND_TABLE_HANDLE = 6,
        UVERBS_ATTR_CREATE_QP_USER_HANDLE = 7,
        UVERBS_ATTR_CREATE_QP_CAP = 8,
        UVERBS_ATTR_CREATE_QP_TYPE = 9,
        UVERBS_ATTR_CREATE_QP_FLAGS = 10,
        UVERBS_ATTR_CREATE_QP_SOURCE_QPN = 11,
        UVERBS_ATTR_CREATE_QP_EVENT_FD = 12,
        UVERBS_ATTR_CREATE_QP_RESP_CAP = 13,
        UVERBS_ATTR_CREATE_QP_RESP_QP_NUM = 14,
        UVERBS_ATTR_CREATE_QP_BUF_UMEM = 15,
        UVERBS_ATTR_CREATE_QP_RQ_BUF_UMEM = 16,
        UVERBS_ATTR_CREATE_QP_SQ_BUF_UMEM = 17,
    }

    enum uverbs_attrs_destroy_qp_cmd_attr_ids: u16 {
        UVERBS_ATTR_DESTROY_QP_HANDLE = 0,
        UVERBS_ATTR_DESTROY_QP_RESP = 1,
    }
}

open_enums! {
    const TYPES = "rdma/ib_user_ioctl_verbs.h";

    /// Transport of a queue pair.
    enum ib_uverbs_qp_type: u32 {
        IB_UVERBS_QPT_RC = 2,
        IB_UVERBS_QPT_UC = 3,
        IB_UVERBS_QPT_UD = 4,
        IB_UVERBS_QPT_RAW_PACKET = 8,
        IB_UVERBS_QPT_XRC_INI = 9,
        IB_UVERBS_QPT_XRC_TGT = 10,
        IB_UVERBS_QPT_DRIVER = 255,
    }
}

flag_sets! {
    const FLAGS = "rdma/ib_user_ioctl_verbs.h";

    /// Flags at creation.
    enum ib_uverbs_qp_create_flags: u32 {
        IB_UVERBS_QP_CREATE_BLOCK_MULTICAST_LOOPBACK = 1 << 1,
        IB_UVERBS_QP_CREATE_SCATTER_FCS = 1 << 8,
        IB_UVERBS_QP_CREATE_CVLAN_STRIPPING = 1 << 9,
        IB_UVERBS_QP_CREATE_PCI_WRITE_END_PADDING = 1 << 11,
        IB_UVERBS_QP_CREATE_SQ_SIG_ALL = 1 << 12,
    }
}

flag_sets! {
    const MASKS = "rdma/ib_user_verbs.h";

    /// Fields of the extended create command that are in use.
    enum ib_uverbs_create_qp_mask: u32 {
        IB_UVERBS_CREATE_QP_MASK_IND_TABLE = 1 << 0,
    }
}

open_enums! {
    const STATES = "rdma/ib_verbs.h";

    /// State of a queue pair.
    enum ib_qp_state: u8 {
        IB_QPS_RESET = 0,
        IB_QPS_INIT = 1,
        IB_QPS_RTR = 2,
        IB_QPS_RTS = 3,
        IB_QPS_SQD = 4,
        IB_QPS_SQE = 5,
        IB_QPS_ERR = 6,
    }
}

open_enums! {
    const MIG_STATES = "rdma/ib_verbs.h";

    /// State of path migration.
    enum ib_mig_state: u8 {
        IB_MIG_MIGRATED = 0,
        IB_MIG_REARM = 1,
        IB_MIG_ARMED = 2,
    }
}

flag_sets! {
    const ATTR_MASKS = "rdma/ib_verbs.h";

    /// Attributes that modify changes and query asks for. Bits above 20 need the extended command.
    enum ib_qp_attr_mask: u32 {
        IB_QP_STATE = 1 << 0,
        IB_QP_CUR_STATE = 1 << 1,
        IB_QP_EN_SQD_ASYNC_NOTIFY = 1 << 2,
        IB_QP_ACCESS_FLAGS = 1 << 3,
        IB_QP_PKEY_INDEX = 1 << 4,
        IB_QP_PORT = 1 << 5,
        IB_QP_QKEY = 1 << 6,
        IB_QP_AV = 1 << 7,
        IB_QP_PATH_MTU = 1 << 8,
        IB_QP_TIMEOUT = 1 << 9,
        IB_QP_RETRY_CNT = 1 << 10,
        IB_QP_RNR_RETRY = 1 << 11,
        IB_QP_RQ_PSN = 1 << 12,
        IB_QP_MAX_QP_RD_ATOMIC = 1 << 13,
        IB_QP_ALT_PATH = 1 << 14,
        IB_QP_MIN_RNR_TIMER = 1 << 15,
        IB_QP_SQ_PSN = 1 << 16,
        IB_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
        IB_QP_PATH_MIG_STATE = 1 << 18,
        IB_QP_CAP = 1 << 19,
        IB_QP_DEST_QPN = 1 << 20,
        IB_QP_RATE_LIMIT = 1 << 25,
    }
}
