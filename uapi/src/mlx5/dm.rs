//! Device memory of the driver.
//!
//! `rdma/mlx5_user_ioctl_cmds.h`, `rdma/mlx5_user_ioctl_verbs.h`.

use crate::enumeration::{ids, open_enums};

ids! {
    const IDS = "rdma/mlx5_user_ioctl_cmds.h";

    enum mlx5_ib_dm_methods: u16 {
        MLX5_IB_METHOD_DM_MAP_OP_ADDR = 0x1000,
        MLX5_IB_METHOD_DM_QUERY = 0x1001,
    }

    enum mlx5_ib_dm_map_op_addr_attrs: u16 {
        MLX5_IB_ATTR_DM_MAP_OP_ADDR_REQ_HANDLE = 0x1000,
        MLX5_IB_ATTR_DM_MAP_OP_ADDR_REQ_OP = 0x1001,
        MLX5_IB_ATTR_DM_MAP_OP_ADDR_RESP_START_OFFSET = 0x1002,
        MLX5_IB_ATTR_DM_MAP_OP_ADDR_RESP_PAGE_INDEX = 0x1003,
    }

    enum mlx5_ib_query_dm_attrs: u16 {
        MLX5_IB_ATTR_QUERY_DM_REQ_HANDLE = 0x1000,
        MLX5_IB_ATTR_QUERY_DM_RESP_START_OFFSET = 0x1001,
        MLX5_IB_ATTR_QUERY_DM_RESP_PAGE_INDEX = 0x1002,
        MLX5_IB_ATTR_QUERY_DM_RESP_LENGTH = 0x1003,
    }

    enum mlx5_ib_alloc_dm_attrs: u16 {
        MLX5_IB_ATTR_ALLOC_DM_RESP_START_OFFSET = 0x1000,
        MLX5_IB_ATTR_ALLOC_DM_RESP_PAGE_INDEX = 0x1001,
        MLX5_IB_ATTR_ALLOC_DM_REQ_TYPE = 0x1002,
    }
}

open_enums! {
    const TYPES = "rdma/mlx5_user_ioctl_verbs.h";

    /// Kinds of device memory.
    enum mlx5_ib_uapi_dm_type: u32 {
        MLX5_IB_UAPI_DM_TYPE_MEMIC = 0,
        MLX5_IB_UAPI_DM_TYPE_STEERING_SW_ICM = 1,
        MLX5_IB_UAPI_DM_TYPE_HEADER_MODIFY_SW_ICM = 2,
        MLX5_IB_UAPI_DM_TYPE_HEADER_MODIFY_PATTERN_SW_ICM = 3,
        MLX5_IB_UAPI_DM_TYPE_ENCAP_SW_ICM = 4,
    }
}
