//! Device memory. `rdma/ib_user_ioctl_cmds.h`.

use crate::enumeration::ids;

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_methods_dm: u16 {
        UVERBS_METHOD_DM_ALLOC = 0,
        UVERBS_METHOD_DM_FREE = 1,
    }

    enum uverbs_attrs_alloc_dm_cmd_attr_ids: u16 {
        UVERBS_ATTR_ALLOC_DM_HANDLE = 0,
        UVERBS_ATTR_ALLOC_DM_LENGTH = 1,
        UVERBS_ATTR_ALLOC_DM_ALIGNMENT = 2,
    }

    enum uverbs_attrs_free_dm_cmd_attr_ids: u16 {
        UVERBS_ATTR_FREE_DM_HANDLE = 0,
    }
}
