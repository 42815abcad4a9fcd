//! Asynchronous events. `rdma/ib_user_verbs.h`, `rdma/ib_user_ioctl_cmds.h`.

use crate::enumeration::{ids, open_enums};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// A record of an event file: `element` is the `user_handle` of an object, or a port
    /// number.
    struct ib_uverbs_async_event_desc[16] {
        element: u64 = 0,
        event_type: u32 = 8,
        reserved: u32 = 12,
    }
}

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_method_async_event: u16 {
        UVERBS_METHOD_ASYNC_EVENT_ALLOC = 0,
    }

    enum uverbs_attrs_async_event_create: u16 {
        UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE = 0,
    }
}

open_enums! {
    const EVENTS = "rdma/ib_verbs.h";

    /// The kind of event (`event_type`).
    enum ib_event_type: u32 {
        IB_EVENT_CQ_ERR = 0,
        IB_EVENT_QP_FATAL = 1,
        IB_EVENT_QP_REQ_ERR = 2,
        IB_EVENT_QP_ACCESS_ERR = 3,
        IB_EVENT_COMM_EST = 4,
        IB_EVENT_SQ_DRAINED = 5,
        IB_EVENT_PATH_MIG = 6,
        IB_EVENT_PATH_MIG_ERR = 7,
        IB_EVENT_DEVICE_FATAL = 8,
        IB_EVENT_PORT_ACTIVE = 9,
        IB_EVENT_PORT_ERR = 10,
        IB_EVENT_LID_CHANGE = 11,
        IB_EVENT_PKEY_CHANGE = 12,
        IB_EVENT_SM_CHANGE = 13,
        IB_EVENT_SRQ_ERR = 14,
        IB_EVENT_SRQ_LIMIT_REACHED = 15,
        IB_EVENT_QP_LAST_WQE_REACHED = 16,
        IB_EVENT_CLIENT_REREGISTER = 17,
        IB_EVENT_GID_CHANGE = 18,
        IB_EVENT_WQ_FATAL = 19,
        IB_EVENT_DEVICE_SPEED_CHANGE = 20,
    }
}
