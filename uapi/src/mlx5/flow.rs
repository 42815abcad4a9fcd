//! Steering rules in the driver's own form.
//!
//! `rdma/mlx5_user_ioctl_cmds.h`, `rdma/mlx5_user_ioctl_verbs.h`.

use crate::enumeration::{flag_sets, ids, open_enums};
use crate::layout::layouts;

ids! {
    const IDS = "rdma/mlx5_user_ioctl_cmds.h";

    enum mlx5_ib_flow_methods: u16 {
        MLX5_IB_METHOD_CREATE_FLOW = 0x1000,
        MLX5_IB_METHOD_DESTROY_FLOW = 0x1001,
    }

    enum mlx5_ib_create_flow_attrs: u16 {
        MLX5_IB_ATTR_CREATE_FLOW_HANDLE = 0x1000,
        MLX5_IB_ATTR_CREATE_FLOW_MATCH_VALUE = 0x1001,
        MLX5_IB_ATTR_CREATE_FLOW_DEST_QP = 0x1002,
        MLX5_IB_ATTR_CREATE_FLOW_DEST_DEVX = 0x1003,
        MLX5_IB_ATTR_CREATE_FLOW_MATCHER = 0x1004,
        MLX5_IB_ATTR_CREATE_FLOW_ARR_FLOW_ACTIONS = 0x1005,
        MLX5_IB_ATTR_CREATE_FLOW_TAG = 0x1006,
        MLX5_IB_ATTR_CREATE_FLOW_ARR_COUNTERS_DEVX = 0x1007,
        MLX5_IB_ATTR_CREATE_FLOW_ARR_COUNTERS_DEVX_OFFSET = 0x1008,
        MLX5_IB_ATTR_CREATE_FLOW_FLAGS = 0x1009,
    }

    enum mlx5_ib_destroy_flow_attrs: u16 {
        MLX5_IB_ATTR_DESTROY_FLOW_HANDLE = 0x1000,
    }

    enum mlx5_ib_flow_matcher_methods: u16 {
        MLX5_IB_METHOD_FLOW_MATCHER_CREATE = 0x1000,
        MLX5_IB_METHOD_FLOW_MATCHER_DESTROY = 0x1001,
    }

    enum mlx5_ib_flow_matcher_create_attrs: u16 {
        MLX5_IB_ATTR_FLOW_MATCHER_CREATE_HANDLE = 0x1000,
        MLX5_IB_ATTR_FLOW_MATCHER_MATCH_MASK = 0x1001,
        MLX5_IB_ATTR_FLOW_MATCHER_FLOW_TYPE = 0x1002,
        MLX5_IB_ATTR_FLOW_MATCHER_MATCH_CRITERIA = 0x1003,
        MLX5_IB_ATTR_FLOW_MATCHER_FLOW_FLAGS = 0x1004,
        MLX5_IB_ATTR_FLOW_MATCHER_FT_TYPE = 0x1005,
        MLX5_IB_ATTR_FLOW_MATCHER_IB_PORT = 0x1006,
    }

    enum mlx5_ib_flow_matcher_destroy_attrs: u16 {
        MLX5_IB_ATTR_FLOW_MATCHER_DESTROY_HANDLE = 0x1000,
    }

    enum mlx5_ib_steering_anchor_methods: u16 {
        MLX5_IB_METHOD_STEERING_ANCHOR_CREATE = 0x1000,
        MLX5_IB_METHOD_STEERING_ANCHOR_DESTROY = 0x1001,
    }

    enum mlx5_ib_flow_steering_anchor_create_attrs: u16 {
        MLX5_IB_ATTR_STEERING_ANCHOR_CREATE_HANDLE = 0x1000,
        MLX5_IB_ATTR_STEERING_ANCHOR_FT_TYPE = 0x1001,
        MLX5_IB_ATTR_STEERING_ANCHOR_PRIORITY = 0x1002,
        MLX5_IB_ATTR_STEERING_ANCHOR_FT_ID = 0x1003,
    }

    enum mlx5_ib_flow_steering_anchor_destroy_attrs: u16 {
        MLX5_IB_ATTR_STEERING_ANCHOR_DESTROY_HANDLE = 0x1000,
    }

    enum mlx5_ib_create_flow_action_attrs: u16 {
        MLX5_IB_ATTR_CREATE_FLOW_ACTION_FLAGS = 0x1000,
    }

    enum mlx5_ib_flow_action_methods: u16 {
        MLX5_IB_METHOD_FLOW_ACTION_CREATE_MODIFY_HEADER = 0x1000,
        MLX5_IB_METHOD_FLOW_ACTION_CREATE_PACKET_REFORMAT = 0x1001,
    }

    enum mlx5_ib_create_flow_action_create_modify_header_attrs: u16 {
        MLX5_IB_ATTR_CREATE_MODIFY_HEADER_HANDLE = 0x1000,
        MLX5_IB_ATTR_CREATE_MODIFY_HEADER_ACTIONS_PRM = 0x1001,
        MLX5_IB_ATTR_CREATE_MODIFY_HEADER_FT_TYPE = 0x1002,
    }

    enum mlx5_ib_create_flow_action_create_packet_reformat_attrs: u16 {
        MLX5_IB_ATTR_CREATE_PACKET_REFORMAT_HANDLE = 0x1000,
        MLX5_IB_ATTR_CREATE_PACKET_REFORMAT_TYPE = 0x1001,
        MLX5_IB_ATTR_CREATE_PACKET_REFORMAT_FT_TYPE = 0x1002,
        MLX5_IB_ATTR_CREATE_PACKET_REFORMAT_DATA_BUF = 0x1003,
    }
}

open_enums! {
    const FLOW_TYPES = "rdma/mlx5_user_ioctl_cmds.h";

    /// The kind of a matcher: the packets that it takes.
    enum mlx5_ib_flow_type: u32 {
        MLX5_IB_FLOW_TYPE_NORMAL = 0,
        MLX5_IB_FLOW_TYPE_SNIFFER = 1,
        MLX5_IB_FLOW_TYPE_ALL_DEFAULT = 2,
        MLX5_IB_FLOW_TYPE_MC_DEFAULT = 3,
    }
}

flag_sets! {
    const CREATE_FLAGS = "rdma/mlx5_user_ioctl_cmds.h";

    /// Flags of a rule.
    enum mlx5_ib_create_flow_flags: u32 {
        MLX5_IB_ATTR_CREATE_FLOW_FLAGS_DEFAULT_MISS = 1 << 0,
        MLX5_IB_ATTR_CREATE_FLOW_FLAGS_DROP = 1 << 1,
    }
}

open_enums! {
    const TABLE_TYPES = "rdma/mlx5_user_ioctl_verbs.h";

    /// The namespace of a flow table.
    enum mlx5_ib_uapi_flow_table_type: u32 {
        MLX5_IB_UAPI_FLOW_TABLE_TYPE_NIC_RX = 0,
        MLX5_IB_UAPI_FLOW_TABLE_TYPE_NIC_TX = 1,
        MLX5_IB_UAPI_FLOW_TABLE_TYPE_FDB = 2,
        MLX5_IB_UAPI_FLOW_TABLE_TYPE_RDMA_RX = 3,
        MLX5_IB_UAPI_FLOW_TABLE_TYPE_RDMA_TX = 4,
        MLX5_IB_UAPI_FLOW_TABLE_TYPE_RDMA_TRANSPORT_RX = 5,
        MLX5_IB_UAPI_FLOW_TABLE_TYPE_RDMA_TRANSPORT_TX = 6,
    }
}

open_enums! {
    const REFORMATS = "rdma/mlx5_user_ioctl_verbs.h";

    /// The kind of a packet reformat action.
    enum mlx5_ib_uapi_flow_action_packet_reformat_type: u32 {
        MLX5_IB_UAPI_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TUNNEL_TO_L2 = 0,
        MLX5_IB_UAPI_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TO_L2_TUNNEL = 1,
        MLX5_IB_UAPI_FLOW_ACTION_PACKET_REFORMAT_TYPE_L3_TUNNEL_TO_L2 = 2,
        MLX5_IB_UAPI_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TO_L3_TUNNEL = 3,
    }
}

flag_sets! {
    const ACTION_FLAGS = "rdma/mlx5_user_ioctl_verbs.h";

    /// Flags of a flow action.
    enum mlx5_ib_uapi_flow_action_flags: u32 {
        MLX5_IB_UAPI_FLOW_ACTION_FLAGS_REQUIRE_METADATA = 1 << 0,
    }
}

layouts! {
    const LAYOUTS = "rdma/mlx5_user_ioctl_cmds.h";

    /// Mask or value of a match: a `fte_match_param` of the device, big-endian.
    struct mlx5_ib_match_params[640] {
        match_params: [u32; 160] = 0,
    }
}
