//! Work queues and the tables that spread received packets over them.
//!
//! `rdma/ib_user_verbs.h`, `rdma/ib_user_ioctl_cmds.h`, `rdma/ib_user_ioctl_verbs.h`.

use crate::enumeration::{flag_sets, ids, open_enums};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// Command `IB_USER_VERBS_EX_CMD_CREATE_WQ`.
    struct ib_uverbs_ex_create_wq[40] {
        comp_mask: u32 = 0,
        wq_type: u32 = 4,
        user_handle: u64 = 8,
        pd_handle: u32 = 16,
        cq_handle: u32 = 20,
        max_wr: u32 = 24,
        max_sge: u32 = 28,
        create_flags: u32 = 32,
        reserved: u32 = 36,
    }

    /// Answer of `IB_USER_VERBS_EX_CMD_CREATE_WQ`.
    struct ib_uverbs_ex_create_wq_resp[24] {
        comp_mask: u32 = 0,
        response_length: u32 = 4,
        wq_handle: u32 = 8,
        max_wr: u32 = 12,
        max_sge: u32 = 16,
        wqn: u32 = 20,
    }

    /// Command `IB_USER_VERBS_EX_CMD_MODIFY_WQ`.
    struct ib_uverbs_ex_modify_wq[24] {
        attr_mask: u32 = 0,
        wq_handle: u32 = 4,
        wq_state: u32 = 8,
        curr_wq_state: u32 = 12,
        flags: u32 = 16,
        flags_mask: u32 = 20,
    }

    /// Command `IB_USER_VERBS_EX_CMD_DESTROY_WQ`.
    struct ib_uverbs_ex_destroy_wq[8] {
        comp_mask: u32 = 0,
        wq_handle: u32 = 4,
    }

    /// Answer of `IB_USER_VERBS_EX_CMD_DESTROY_WQ`.
    struct ib_uverbs_ex_destroy_wq_resp[16] {
        comp_mask: u32 = 0,
        response_length: u32 = 4,
        events_reported: u32 = 8,
        reserved: u32 = 12,
    }

    /// Command `IB_USER_VERBS_EX_CMD_CREATE_RWQ_IND_TBL`, before `1 << log_ind_tbl_size` handles of
    /// 32 bits.
    struct ib_uverbs_ex_create_rwq_ind_table[8] {
        comp_mask: u32 = 0,
        log_ind_tbl_size: u32 = 4,
    }

    /// Answer of `IB_USER_VERBS_EX_CMD_CREATE_RWQ_IND_TBL`.
    struct ib_uverbs_ex_create_rwq_ind_table_resp[16] {
        comp_mask: u32 = 0,
        response_length: u32 = 4,
        ind_tbl_handle: u32 = 8,
        ind_tbl_num: u32 = 12,
    }

    /// Command `IB_USER_VERBS_EX_CMD_DESTROY_RWQ_IND_TBL`.
    struct ib_uverbs_ex_destroy_rwq_ind_table[8] {
        comp_mask: u32 = 0,
        ind_tbl_handle: u32 = 4,
    }
}

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_methods_wq: u16 {
        UVERBS_METHOD_WQ_CREATE = 0,
        UVERBS_METHOD_WQ_DESTROY = 1,
    }

    enum uverbs_attrs_create_wq_cmd_attr_ids: u16 {
        UVERBS_ATTR_CREATE_WQ_HANDLE = 0,
        UVERBS_ATTR_CREATE_WQ_PD_HANDLE = 1,
        UVERBS_ATTR_CREATE_WQ_CQ_HANDLE = 2,
        UVERBS_ATTR_CREATE_WQ_USER_HANDLE = 3,
        UVERBS_ATTR_CREATE_WQ_TYPE = 4,
        UVERBS_ATTR_CREATE_WQ_EVENT_FD = 5,
        UVERBS_ATTR_CREATE_WQ_MAX_WR = 6,
        UVERBS_ATTR_CREATE_WQ_MAX_SGE = 7,
        UVERBS_ATTR_CREATE_WQ_FLAGS = 8,
        UVERBS_ATTR_CREATE_WQ_RESP_MAX_WR = 9,
        UVERBS_ATTR_CREATE_WQ_RESP_MAX_SGE = 10,
        UVERBS_ATTR_CREATE_WQ_RESP_WQ_NUM = 11,
    }

    enum uverbs_attrs_destroy_wq_cmd_attr_ids: u16 {
        UVERBS_ATTR_DESTROY_WQ_HANDLE = 0,
        UVERBS_ATTR_DESTROY_WQ_RESP = 1,
    }

    enum uverbs_methods_rwq_ind_tbl: u16 {
        UVERBS_METHOD_RWQ_IND_TBL_DESTROY = 0,
    }

    enum uverbs_attrs_rwq_ind_tbl_destroy_ids: u16 {
        UVERBS_ATTR_DESTROY_RWQ_IND_TBL_HANDLE = 0,
    }
}

open_enums! {
    const TYPES = "rdma/ib_user_ioctl_verbs.h";

    /// Kinds of work queues.
    enum ib_uverbs_wq_type: u32 {
        IB_UVERBS_WQT_RQ = 0,
    }
}

flag_sets! {
    const FLAGS = "rdma/ib_user_ioctl_verbs.h";

    /// Flags of a work queue.
    enum ib_uverbs_wq_flags: u32 {
        IB_UVERBS_WQ_FLAGS_CVLAN_STRIPPING = 1 << 0,
        IB_UVERBS_WQ_FLAGS_SCATTER_FCS = 1 << 1,
        IB_UVERBS_WQ_FLAGS_DELAY_DROP = 1 << 2,
        IB_UVERBS_WQ_FLAGS_PCI_WRITE_END_PADDING = 1 << 3,
    }
}

open_enums! {
    const STATES = "rdma/ib_verbs.h";

    /// State of a work queue.
    enum ib_wq_state: u32 {
        IB_WQS_RESET = 0,
        IB_WQS_RDY = 1,
        IB_WQS_ERR = 2,
    }
}

flag_sets! {
    const MASKS = "rdma/ib_verbs.h";

    /// Attributes that `IB_USER_VERBS_EX_CMD_MODIFY_WQ` changes.
    enum ib_wq_attr_mask: u32 {
        IB_WQ_STATE = 1 << 0,
        IB_WQ_CUR_STATE = 1 << 1,
        IB_WQ_FLAGS = 1 << 2,
    }
}
