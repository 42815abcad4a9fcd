//! XRC domains. `rdma/ib_user_verbs.h`, `rdma/ib_user_ioctl_cmds.h`.

use crate::enumeration::ids;
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// Command `IB_USER_VERBS_CMD_OPEN_XRCD`. `fd` is a file whose inode names the domain, or all
    /// ones for a private one; of `oflags` the kernel reads `O_CREAT` and `O_EXCL`.
    struct ib_uverbs_open_xrcd[16] {
        response: u64 = 0,
        fd: u32 = 8,
        oflags: u32 = 12,
    }

    /// Answer of `IB_USER_VERBS_CMD_OPEN_XRCD`.
    struct ib_uverbs_open_xrcd_resp[4] {
        xrcd_handle: u32 = 0,
    }

    /// Command `IB_USER_VERBS_CMD_CLOSE_XRCD`.
    struct ib_uverbs_close_xrcd[4] {
        xrcd_handle: u32 = 0,
    }
}

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_methods_xrcd: u16 {
        UVERBS_METHOD_XRCD_DESTROY = 0,
    }

    enum uverbs_attrs_xrcd_destroy_ids: u16 {
        UVERBS_ATTR_DESTROY_XRCD_HANDLE = 0,
    }
}
