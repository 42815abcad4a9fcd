//! Flow counters. `rdma/ib_user_ioctl_cmds.h`, `rdma/ib_user_ioctl_verbs.h`.

use crate::enumeration::{flag_sets, ids};

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_methods_actions_counters_ops: u16 {
        UVERBS_METHOD_COUNTERS_CREATE = 0,
        UVERBS_METHOD_COUNTERS_DESTROY = 1,
        UVERBS_METHOD_COUNTERS_READ = 2,
    }

    enum uverbs_attrs_create_counters_cmd_attr_ids: u16 {
        UVERBS_ATTR_CREATE_COUNTERS_HANDLE = 0,
    }

    enum uverbs_attrs_destroy_counters_cmd_attr_ids: u16 {
        UVERBS_ATTR_DESTROY_COUNTERS_HANDLE = 0,
    }

    enum uverbs_attrs_read_counters_cmd_attr_ids: u16 {
        UVERBS_ATTR_READ_COUNTERS_HANDLE = 0,
        UVERBS_ATTR_READ_COUNTERS_BUFF = 1,
        UVERBS_ATTR_READ_COUNTERS_FLAGS = 2,
    }
}

flag_sets! {
    const FLAGS = "rdma/ib_user_ioctl_verbs.h";

    /// Flags of reading counters.
    enum ib_uverbs_read_counters_flags: u32 {
        IB_UVERBS_READ_COUNTERS_PREFER_CACHED = 1 << 0,
    }
}
