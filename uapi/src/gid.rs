//! The table of global identifiers (GIDs) of a port.
//!
//! `rdma/ib_user_ioctl_cmds.h`, `rdma/ib_user_ioctl_verbs.h`.

use crate::enumeration::{ids, open_enums};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_ioctl_verbs.h";

    /// One entry. `gid` holds the 16 bytes in network order; `netdev_ifindex` is 0 without a
    /// netdev.
    struct ib_uverbs_gid_entry[32] {
        gid: [u64; 2] = 0,
        gid_index: u32 = 16,
        port_num: u32 = 20,
        gid_type: u32 = 24,
        netdev_ifindex: u32 = 28,
    }
}

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_attrs_query_gid_table_cmd_attr_ids: u16 {
        UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE = 0,
        UVERBS_ATTR_QUERY_GID_TABLE_FLAGS = 1,
        UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES = 2,
        UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES = 3,
    }

    enum uverbs_attrs_query_gid_entry_cmd_attr_ids: u16 {
        UVERBS_ATTR_QUERY_GID_ENTRY_PORT = 0,
        UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX = 1,
        UVERBS_ATTR_QUERY_GID_ENTRY_FLAGS = 2,
        UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY = 3,
    }
}

open_enums! {
    const TYPES = "rdma/ib_user_ioctl_verbs.h";

    /// The protocol on the wire of packets with a GID.
    enum ib_uverbs_gid_type: u32 {
        IB_UVERBS_GID_TYPE_IB = 0,
        IB_UVERBS_GID_TYPE_ROCE_V1 = 1,
        IB_UVERBS_GID_TYPE_ROCE_V2 = 2,
    }
}
