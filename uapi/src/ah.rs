//! Address handles and the address of a path. `rdma/ib_user_verbs.h`, `rdma/ib_user_ioctl_cmds.h`.

use crate::enumeration::{ids, open_enums};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// The global part of an address; `dgid` is in network order.
    struct ib_uverbs_global_route[24] {
        dgid: [u8; 16] = 0,
        flow_label: u32 = 16,
        sgid_index: u8 = 20,
        hop_limit: u8 = 21,
        traffic_class: u8 = 22,
        reserved: u8 = 23,
    }

    /// An address. Its fields are in another order than those of
    /// [`ib_uverbs_qp_dest`](crate::qp::ib_uverbs_qp_dest).
    struct ib_uverbs_ah_attr[32] {
        grh: ib_uverbs_global_route = 0,
        dlid: u16 = 24,
        sl: u8 = 26,
        src_path_bits: u8 = 27,
        static_rate: u8 = 28,
        is_global: u8 = 29,
        port_num: u8 = 30,
        reserved: u8 = 31,
    }

    /// Command `IB_USER_VERBS_CMD_CREATE_AH`.
    struct ib_uverbs_create_ah[56] {
        response: u64 = 0,
        user_handle: u64 = 8,
        pd_handle: u32 = 16,
        reserved: u32 = 20,
        attr: ib_uverbs_ah_attr = 24,
    }

    /// Answer of `IB_USER_VERBS_CMD_CREATE_AH`.
    struct ib_uverbs_create_ah_resp[4] {
        ah_handle: u32 = 0,
    }

    /// Command `IB_USER_VERBS_CMD_DESTROY_AH`.
    struct ib_uverbs_destroy_ah[4] {
        ah_handle: u32 = 0,
    }
}

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_methods_ah: u16 {
        UVERBS_METHOD_AH_DESTROY = 0,
    }

    enum uverbs_attrs_ah_destroy_ids: u16 {
        UVERBS_ATTR_DESTROY_AH_HANDLE = 0,
    }
}

open_enums! {
    const RATES = "rdma/ib_verbs.h";

    /// Static rate limit of a path.
    enum ib_rate: u8 {
        IB_RATE_PORT_CURRENT = 0,
        IB_RATE_2_5_GBPS = 2,
        IB_RATE_5_GBPS = 5,
        IB_RATE_10_GBPS = 3,
        IB_RATE_20_GBPS = 6,
        IB_RATE_30_GBPS = 4,
        IB_RATE_40_GBPS = 7,
        IB_RATE_60_GBPS = 8,
        IB_RATE_80_GBPS = 9,
        IB_RATE_120_GBPS = 10,
        IB_RATE_14_GBPS = 11,
        IB_RATE_56_GBPS = 12,
        IB_RATE_112_GBPS = 13,
        IB_RATE_168_GBPS = 14,
        IB_RATE_25_GBPS = 15,
        IB_RATE_100_GBPS = 16,
        IB_RATE_200_GBPS = 17,
        IB_RATE_300_GBPS = 18,
        IB_RATE_28_GBPS = 19,
        IB_RATE_50_GBPS = 20,
        IB_RATE_400_GBPS = 21,
        IB_RATE_600_GBPS = 22,
        IB_RATE_800_GBPS = 23,
        IB_RATE_1600_GBPS = 25,
    }
}
