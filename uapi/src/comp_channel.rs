//! Completion channels. `rdma/ib_user_verbs.h`.

use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// Command `IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL`.
    struct ib_uverbs_create_comp_channel[8] {
        response: u64 = 0,
    }

    /// Answer of `IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL`.
    struct ib_uverbs_create_comp_channel_resp[4] {
        fd: u32 = 0,
    }

    /// A record of a completion channel: the `user_handle` of a completion queue.
    struct ib_uverbs_comp_event_desc[8] {
        cq_handle: u64 = 0,
    }
}
