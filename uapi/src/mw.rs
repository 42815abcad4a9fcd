//! Memory windows. `rdma/ib_user_verbs.h`, `rdma/ib_user_ioctl_cmds.h`.

use crate::enumeration::{ids, open_enums};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// Command `IB_USER_VERBS_CMD_ALLOC_MW`.
    struct ib_uverbs_alloc_mw[16] {
        response: u64 = 0,
        pd_handle: u32 = 8,
        mw_type: u8 = 12,
        reserved: [u8; 3] = 13,
    }

    /// Answer of `IB_USER_VERBS_CMD_ALLOC_MW`.
    struct ib_uverbs_alloc_mw_resp[8] {
        mw_handle: u32 = 0,
        rkey: u32 = 4,
    }

    /// Command `IB_USER_VERBS_CMD_DEALLOC_MW`.
    struct ib_uverbs_dealloc_mw[4] {
        mw_handle: u32 = 0,
    }
}

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_methods_mw: u16 {
        UVERBS_METHOD_MW_DESTROY = 0,
    }

    enum uverbs_attrs_mw_destroy_ids: u16 {
        UVERBS_ATTR_DESTROY_MW_HANDLE = 0,
    }
}

open_enums! {
    const TYPES = "rdma/ib_verbs.h";

    /// Kinds of memory windows.
    enum ib_mw_type: u8 {
        IB_MW_TYPE_1 = 1,
        IB_MW_TYPE_2 = 2,
    }
}
