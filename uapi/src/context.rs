//! Contexts: creating one on an open device file, and querying an inherited one.
//!
//! `rdma/ib_user_verbs.h`, `rdma/ib_user_ioctl_cmds.h`, `rdma/ib_user_ioctl_verbs.h`.

use crate::enumeration::{flag_sets, ids};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// Command `IB_USER_VERBS_CMD_GET_CONTEXT`.
    struct ib_uverbs_get_context[8] {
        response: u64 = 0,
    }

    /// Answer of `IB_USER_VERBS_CMD_GET_CONTEXT`, which creates the event file too.
    struct ib_uverbs_get_context_resp[8] {
        async_fd: u32 = 0,
        num_comp_vectors: u32 = 4,
    }
}

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_attrs_get_context_attr_ids: u16 {
        UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS = 0,
        UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT = 1,
        UVERBS_ATTR_GET_CONTEXT_FD_ARR = 2,
    }

    enum uverbs_attrs_query_context_attr_ids: u16 {
        UVERBS_ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS = 0,
        UVERBS_ATTR_QUERY_CONTEXT_CORE_SUPPORT = 1,
    }
}

flag_sets! {
    const SUPPORT = "rdma/ib_user_ioctl_verbs.h";

    /// Features of this kernel beyond the first ioctl ABI.
    enum ib_uverbs_core_support: u64 {
        IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS = 1 << 0,
        IB_UVERBS_CORE_SUPPORT_ROBUST_UDATA = 1 << 1,
    }
}
