//! Completion queues. Their completions are in [`wc`](crate::wc).
//!
//! `rdma/ib_user_verbs.h`, `rdma/ib_user_ioctl_cmds.h`.

use crate::enumeration::{flag_sets, ids};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// Command `IB_USER_VERBS_CMD_CREATE_CQ`. `comp_channel` is -1 for none.
    struct ib_uverbs_create_cq[32] {
        response: u64 = 0,
        user_handle: u64 = 8,
        cqe: u32 = 16,
        comp_vector: u32 = 20,
        comp_channel: i32 = 24,
        reserved: u32 = 28,
    }

    /// Answer of `IB_USER_VERBS_CMD_CREATE_CQ`.
    struct ib_uverbs_create_cq_resp[8] {
        cq_handle: u32 = 0,
        cqe: u32 = 4,
    }

    /// Command `IB_USER_VERBS_EX_CMD_CREATE_CQ`.
    struct ib_uverbs_ex_create_cq[32] {
        user_handle: u64 = 0,
        cqe: u32 = 8,
        comp_vector: u32 = 12,
        comp_channel: i32 = 16,
        comp_mask: u32 = 20,
        flags: u32 = 24,
        reserved: u32 = 28,
    }

    /// Answer of `IB_USER_VERBS_EX_CMD_CREATE_CQ`.
    struct ib_uverbs_ex_create_cq_resp[16] {
        base: ib_uverbs_create_cq_resp = 0,
        comp_mask: u32 = 8,
        response_length: u32 = 12,
    }

    /// Command `IB_USER_VERBS_CMD_RESIZE_CQ`.
    struct ib_uverbs_resize_cq[16] {
        response: u64 = 0,
        cq_handle: u32 = 8,
        cqe: u32 = 12,
    }

    /// Answer of `IB_USER_VERBS_CMD_RESIZE_CQ`.
    struct ib_uverbs_resize_cq_resp[8] {
        cqe: u32 = 0,
        reserved: u32 = 4,
    }

    /// Command `IB_USER_VERBS_CMD_POLL_CQ`.
    struct ib_uverbs_poll_cq[16] {
        response: u64 = 0,
        cq_handle: u32 = 8,
        ne: u32 = 12,
    }

    /// Answer of `IB_USER_VERBS_CMD_POLL_CQ`, before `count` entries of
    /// [`ib_uverbs_wc`](crate::wc::ib_uverbs_wc).
    struct ib_uverbs_poll_cq_resp[8] {
        count: u32 = 0,
        reserved: u32 = 4,
    }

    /// Command `IB_USER_VERBS_CMD_REQ_NOTIFY_CQ`; it has no response.
    struct ib_uverbs_req_notify_cq[8] {
        cq_handle: u32 = 0,
        solicited_only: u32 = 4,
    }

    /// The moderation of a completion queue: it raises an event after `cq_count` completions or `cq_period`
    /// microseconds.
    struct ib_uverbs_cq_moderation[4] {
        cq_count: u16 = 0,
        cq_period: u16 = 2,
    }

    /// Command `IB_USER_VERBS_EX_CMD_MODIFY_CQ`.
    struct ib_uverbs_ex_modify_cq[16] {
        cq_handle: u32 = 0,
        attr_mask: u32 = 4,
        attr: ib_uverbs_cq_moderation = 8,
        reserved: u32 = 12,
    }

    /// Command `IB_USER_VERBS_CMD_DESTROY_CQ`.
    struct ib_uverbs_destroy_cq[16] {
        response: u64 = 0,
        cq_handle: u32 = 8,
        reserved: u32 = 12,
    }

    /// Answer of `UVERBS_METHOD_CQ_DESTROY` and of `IB_USER_VERBS_CMD_DESTROY_CQ`.
    struct ib_uverbs_destroy_cq_resp[8] {
        comp_events_reported: u32 = 0,
        async_events_reported: u32 = 4,
    }
}

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_methods_cq: u16 {
        UVERBS_METHOD_CQ_CREATE = 0,
        UVERBS_METHOD_CQ_DESTROY = 1,
    }

    enum uverbs_attrs_create_cq_cmd_attr_ids: u16 {
        UVERBS_ATTR_CREATE_CQ_HANDLE = 0,
        UVERBS_ATTR_CREATE_CQ_CQE = 1,
        UVERBS_ATTR_CREATE_CQ_USER_HANDLE = 2,
        UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL = 3,
        UVERBS_ATTR_CREATE_CQ_COMP_VECTOR = 4,
        UVERBS_ATTR_CREATE_CQ_FLAGS = 5,
        UVERBS_ATTR_CREATE_CQ_RESP_CQE = 6,
        UVERBS_ATTR_CREATE_CQ_EVENT_FD = 7,
        UVERBS_ATTR_CREATE_CQ_BUFFER_VA = 8,
        UVERBS_ATTR_CREATE_CQ_BUFFER_LENGTH = 9,
        UVERBS_ATTR_CREATE_CQ_BUFFER_FD = 10,
        UVERBS_ATTR_CREATE_CQ_BUFFER_OFFSET = 11,
        UVERBS_ATTR_CREATE_CQ_BUF_UMEM = 12,
    }

    enum uverbs_attrs_destroy_cq_cmd_attr_ids: u16 {
        UVERBS_ATTR_DESTROY_CQ_HANDLE = 0,
        UVERBS_ATTR_DESTROY_CQ_RESP = 1,
    }
}

flag_sets! {
    const FLAGS = "rdma/ib_user_verbs.h";

    /// Flags at creation.
    enum ib_uverbs_ex_create_cq_flags: u32 {
        IB_UVERBS_CQ_FLAGS_TIMESTAMP_COMPLETION = 1 << 0,
        IB_UVERBS_CQ_FLAGS_IGNORE_OVERRUN = 1 << 1,
    }
}

flag_sets! {
    const MASKS = "rdma/ib_verbs.h";

    /// Attributes that `IB_USER_VERBS_EX_CMD_MODIFY_CQ` changes.
    enum ib_cq_attr_mask: u32 {
        IB_CQ_MODERATE = 1 << 0,
    }
}
