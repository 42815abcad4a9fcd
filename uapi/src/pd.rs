//! Protection domains. `rdma/ib_user_verbs.h`, `rdma/ib_user_ioctl_cmds.h`.

use crate::enumeration::ids;
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// Command `IB_USER_VERBS_CMD_ALLOC_PD`.
    struct ib_uverbs_alloc_pd[8] {
        response: u64 = 0,
    }

    /// Answer of `IB_USER_VERBS_CMD_ALLOC_PD`.
    struct ib_uverbs_alloc_pd_resp[4] {
        pd_handle: u32 = 0,
    }

    /// Command `IB_USER_VERBS_CMD_DEALLOC_PD`.
    struct ib_uverbs_dealloc_pd[4] {
        pd_handle: u32 = 0,
    }
}

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_methods_pd: u16 {
        UVERBS_METHOD_PD_DESTROY = 0,
    }

    enum uverbs_attrs_pd_destroy_ids: u16 {
        UVERBS_ATTR_DESTROY_PD_HANDLE = 0,
    }
}
