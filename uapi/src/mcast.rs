//! Multicast membership of datagram queue pairs. `rdma/ib_user_verbs.h`.

use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// Command `IB_USER_VERBS_CMD_ATTACH_MCAST`; `gid` is in network order.
    struct ib_uverbs_attach_mcast[24] {
        gid: [u8; 16] = 0,
        qp_handle: u32 = 16,
        mlid: u16 = 20,
        reserved: u16 = 22,
    }

    /// Command `IB_USER_VERBS_CMD_DETACH_MCAST`; `gid` is in network order.
    struct ib_uverbs_detach_mcast[24] {
        gid: [u8; 16] = 0,
        qp_handle: u32 = 16,
        mlid: u16 = 20,
        reserved: u16 = 22,
    }
}
