//! Shared receive queues.
//!
//! `rdma/ib_user_verbs.h`, `rdma/ib_user_ioctl_cmds.h`, `rdma/ib_user_ioctl_verbs.h`.

use crate::enumeration::{flag_sets, ids, open_enums};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// Command `IB_USER_VERBS_CMD_CREATE_SRQ`.
    struct ib_uverbs_create_srq[32] {
        response: u64 = 0,
        user_handle: u64 = 8,
        pd_handle: u32 = 16,
        max_wr: u32 = 20,
        max_sge: u32 = 24,
        srq_limit: u32 = 28,
    }

    /// Command `IB_USER_VERBS_CMD_CREATE_XSRQ`.
    struct ib_uverbs_create_xsrq[48] {
        response: u64 = 0,
        user_handle: u64 = 8,
        srq_type: u32 = 16,
        pd_handle: u32 = 20,
        max_wr: u32 = 24,
        max_sge: u32 = 28,
        srq_limit: u32 = 32,
        max_num_tags: u32 = 36,
        xrcd_handle: u32 = 40,
        cq_handle: u32 = 44,
    }

    /// Answer of `IB_USER_VERBS_CMD_CREATE_SRQ` and `IB_USER_VERBS_CMD_CREATE_XSRQ`.
    struct ib_uverbs_create_srq_resp[16] {
        srq_handle: u32 = 0,
        max_wr: u32 = 4,
        max_sge: u32 = 8,
        srqn: u32 = 12,
    }

    /// Command `IB_USER_VERBS_CMD_MODIFY_SRQ`.
    struct ib_uverbs_modify_srq[16] {
        srq_handle: u32 = 0,
        attr_mask: u32 = 4,
        max_wr: u32 = 8,
        srq_limit: u32 = 12,
    }

    /// Command `IB_USER_VERBS_CMD_QUERY_SRQ`.
    struct ib_uverbs_query_srq[16] {
        response: u64 = 0,
        srq_handle: u32 = 8,
        reserved: u32 = 12,
    }

    /// Answer of `IB_USER_VERBS_CMD_QUERY_SRQ`.
    struct ib_uverbs_query_srq_resp[16] {
        max_wr: u32 = 0,
        max_sge: u32 = 4,
        srq_limit: u32 = 8,
        reserved: u32 = 12,
    }

    /// Command `IB_USER_VERBS_CMD_DESTROY_SRQ`.
    struct ib_uverbs_destroy_srq[16] {
        response: u64 = 0,
        srq_handle: u32 = 8,
        reserved: u32 = 12,
    }

    /// Answer of `IB_USER_VERBS_CMD_DESTROY_SRQ`.
    struct ib_uverbs_destroy_srq_resp[4] {
        events_reported: u32 = 0,
    }
}

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_methods_srq: u16 {
        UVERBS_METHOD_SRQ_CREATE = 0,
        UVERBS_METHOD_SRQ_DESTROY = 1,
    }

    enum uverbs_attrs_create_srq_cmd_attr_ids: u16 {
        UVERBS_ATTR_CREATE_SRQ_HANDLE = 0,
        UVERBS_ATTR_CREATE_SRQ_PD_HANDLE = 1,
        UVERBS_ATTR_CREATE_SRQ_XRCD_HANDLE = 2,
        UVERBS_ATTR_CREATE_SRQ_CQ_HANDLE = 3,
        UVERBS_ATTR_CREATE_SRQ_USER_HANDLE = 4,
        UVERBS_ATTR_CREATE_SRQ_MAX_WR = 5,
        UVERBS_ATTR_CREATE_SRQ_MAX_SGE = 6,
        UVERBS_ATTR_CREATE_SRQ_LIMIT = 7,
        UVERBS_ATTR_CREATE_SRQ_MAX_NUM_TAGS = 8,
        UVERBS_ATTR_CREATE_SRQ_TYPE = 9,
        UVERBS_ATTR_CREATE_SRQ_EVENT_FD = 10,
        UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR = 11,
        UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE = 12,
        UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM = 13,
        UVERBS_ATTR_CREATE_SRQ_BUF_UMEM = 14,
    }

    enum uverbs_attrs_destroy_srq_cmd_attr_ids: u16 {
        UVERBS_ATTR_DESTROY_SRQ_HANDLE = 0,
        UVERBS_ATTR_DESTROY_SRQ_RESP = 1,
    }
}

open_enums! {
    const TYPES = "rdma/ib_user_ioctl_verbs.h";

    /// Kinds of shared receive queues.
    enum ib_uverbs_srq_type: u32 {
        IB_UVERBS_SRQT_BASIC = 0,
        IB_UVERBS_SRQT_XRC = 1,
        IB_UVERBS_SRQT_TM = 2,
    }
}

flag_sets! {
    const MASKS = "rdma/ib_verbs.h";

    /// Attributes that `IB_USER_VERBS_CMD_MODIFY_SRQ` changes.
    enum ib_srq_attr_mask: u32 {
        IB_SRQ_MAX_WR = 1 << 0,
        IB_SRQ_LIMIT = 1 << 1,
    }
}
