//! Memory regions: registration, access rights, advice.
//!
//! `rdma/ib_user_verbs.h`, `rdma/ib_user_ioctl_cmds.h`, `rdma/ib_user_ioctl_verbs.h`.

use crate::enumeration::{flag_sets, ids, open_enums};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// Command `IB_USER_VERBS_CMD_REG_MR`. `start` and `hca_va` must agree in their low page bits.
    struct ib_uverbs_reg_mr[40] {
        response: u64 = 0,
        start: u64 = 8,
        length: u64 = 16,
        hca_va: u64 = 24,
        pd_handle: u32 = 32,
        access_flags: u32 = 36,
    }

    /// Answer of `IB_USER_VERBS_CMD_REG_MR`.
    struct ib_uverbs_reg_mr_resp[12] {
        mr_handle: u32 = 0,
        lkey: u32 = 4,
        rkey: u32 = 8,
    }

    /// Command `IB_USER_VERBS_CMD_REREG_MR`.
    struct ib_uverbs_rereg_mr[48] {
        response: u64 = 0,
        mr_handle: u32 = 8,
        flags: u32 = 12,
        start: u64 = 16,
        length: u64 = 24,
        hca_va: u64 = 32,
        pd_handle: u32 = 40,
        access_flags: u32 = 44,
    }

    /// Answer of `IB_USER_VERBS_CMD_REREG_MR`.
    struct ib_uverbs_rereg_mr_resp[8] {
        lkey: u32 = 0,
        rkey: u32 = 4,
    }

    /// Command `IB_USER_VERBS_CMD_DEREG_MR`.
    struct ib_uverbs_dereg_mr[4] {
        mr_handle: u32 = 0,
    }
}

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_methods_mr: u16 {
        UVERBS_METHOD_DM_MR_REG = 0,
        UVERBS_METHOD_MR_DESTROY = 1,
        UVERBS_METHOD_ADVISE_MR = 2,
        UVERBS_METHOD_QUERY_MR = 3,
        UVERBS_METHOD_REG_DMABUF_MR = 4,
        UVERBS_METHOD_REG_MR = 5,
    }

    enum uverbs_attrs_reg_dm_mr_cmd_attr_ids: u16 {
        UVERBS_ATTR_REG_DM_MR_HANDLE = 0,
        UVERBS_ATTR_REG_DM_MR_OFFSET = 1,
        UVERBS_ATTR_REG_DM_MR_LENGTH = 2,
        UVERBS_ATTR_REG_DM_MR_PD_HANDLE = 3,
        UVERBS_ATTR_REG_DM_MR_ACCESS_FLAGS = 4,
        UVERBS_ATTR_REG_DM_MR_DM_HANDLE = 5,
        UVERBS_ATTR_REG_DM_MR_RESP_LKEY = 6,
        UVERBS_ATTR_REG_DM_MR_RESP_RKEY = 7,
    }

    enum uverbs_attrs_mr_destroy_ids: u16 {
        UVERBS_ATTR_DESTROY_MR_HANDLE = 0,
    }

    enum uverbs_attrs_advise_mr_cmd_attr_ids: u16 {
        UVERBS_ATTR_ADVISE_MR_PD_HANDLE = 0,
        UVERBS_ATTR_ADVISE_MR_ADVICE = 1,
        UVERBS_ATTR_ADVISE_MR_FLAGS = 2,
        UVERBS_ATTR_ADVISE_MR_SGE_LIST = 3,
    }

    enum uverbs_attrs_query_mr_cmd_attr_ids: u16 {
        UVERBS_ATTR_QUERY_MR_HANDLE = 0,
        UVERBS_ATTR_QUERY_MR_RESP_LKEY = 1,
        UVERBS_ATTR_QUERY_MR_RESP_RKEY = 2,
        UVERBS_ATTR_QUERY_MR_RESP_LENGTH = 3,
        UVERBS_ATTR_QUERY_MR_RESP_IOVA = 4,
    }

    enum uverbs_attrs_reg_dmabuf_mr_cmd_attr_ids: u16 {
        UVERBS_ATTR_REG_DMABUF_MR_HANDLE = 0,
        UVERBS_ATTR_REG_DMABUF_MR_PD_HANDLE = 1,
        UVERBS_ATTR_REG_DMABUF_MR_OFFSET = 2,
        UVERBS_ATTR_REG_DMABUF_MR_LENGTH = 3,
        UVERBS_ATTR_REG_DMABUF_MR_IOVA = 4,
        UVERBS_ATTR_REG_DMABUF_MR_FD = 5,
        UVERBS_ATTR_REG_DMABUF_MR_ACCESS_FLAGS = 6,
        UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY = 7,
        UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY = 8,
    }

    enum uverbs_attrs_reg_mr_cmd_attr_ids: u16 {
        UVERBS_ATTR_REG_MR_HANDLE = 0,
        UVERBS_ATTR_REG_MR_PD_HANDLE = 1,
        UVERBS_ATTR_REG_MR_DMA_HANDLE = 2,
        UVERBS_ATTR_REG_MR_IOVA = 3,
        UVERBS_ATTR_REG_MR_ADDR = 4,
        UVERBS_ATTR_REG_MR_LENGTH = 5,
        UVERBS_ATTR_REG_MR_ACCESS_FLAGS = 6,
        UVERBS_ATTR_REG_MR_FD = 7,
        UVERBS_ATTR_REG_MR_FD_OFFSET = 8,
        UVERBS_ATTR_REG_MR_RESP_LKEY = 9,
        UVERBS_ATTR_REG_MR_RESP_RKEY = 10,
    }
}

flag_sets! {
    const ACCESS = "rdma/ib_user_ioctl_verbs.h";

    /// Access rights of regions, windows and queue pairs. The optional range (bits 20 to 29) may be
    /// dropped by a kernel or device that does not know a bit of it.
    enum ib_uverbs_access_flags: u32 {
        IB_UVERBS_ACCESS_LOCAL_WRITE = 1 << 0,
        IB_UVERBS_ACCESS_REMOTE_WRITE = 1 << 1,
        IB_UVERBS_ACCESS_REMOTE_READ = 1 << 2,
        IB_UVERBS_ACCESS_REMOTE_ATOMIC = 1 << 3,
        IB_UVERBS_ACCESS_MW_BIND = 1 << 4,
        IB_UVERBS_ACCESS_ZERO_BASED = 1 << 5,
        IB_UVERBS_ACCESS_ON_DEMAND = 1 << 6,
        IB_UVERBS_ACCESS_HUGETLB = 1 << 7,
        IB_UVERBS_ACCESS_FLUSH_GLOBAL = 1 << 8,
        IB_UVERBS_ACCESS_FLUSH_PERSISTENT = 1 << 9,
        IB_UVERBS_ACCESS_RELAXED_ORDERING = 1 << 20,
    }
}

flag_sets! {
    const ADVICE_FLAGS = "rdma/ib_user_ioctl_verbs.h";

    /// Flags of advice.
    enum ib_uverbs_advise_mr_flag: u32 {
        IB_UVERBS_ADVISE_MR_FLAG_FLUSH = 1 << 0,
    }
}

open_enums! {
    const ADVICE = "rdma/ib_user_ioctl_verbs.h";

    /// Advice on pages that are about to be used.
    enum ib_uverbs_advise_mr_advice: u32 {
        IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH = 0,
        IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE = 1,
        IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT = 2,
    }
}

flag_sets! {
    const REREG_FLAGS = "rdma/ib_verbs.h";

    /// Attributes that `IB_USER_VERBS_CMD_REREG_MR` changes.
    enum ib_mr_rereg_flags: u32 {
        IB_MR_REREG_TRANS = 1 << 0,
        IB_MR_REREG_PD = 1 << 1,
        IB_MR_REREG_ACCESS = 1 << 2,
    }
}

ids! {
    const OPTIONAL_ACCESS = "rdma/ib_user_ioctl_verbs.h";

    enum ib_uverbs_access_flags: u32 {
        /// The access rights that a kernel or device may ignore: bits 20 to 29.
        IB_UVERBS_ACCESS_OPTIONAL_RANGE = 0x3ff0_0000,
    }
}
