//! UARs: pages of doorbell registers.
//!
//! `rdma/mlx5_user_ioctl_cmds.h`, `rdma/mlx5_user_ioctl_verbs.h`.

use crate::enumeration::{ids, open_enums};

ids! {
    const IDS = "rdma/mlx5_user_ioctl_cmds.h";

    enum mlx5_ib_uar_obj_methods: u16 {
        MLX5_IB_METHOD_UAR_OBJ_ALLOC = 0x1000,
        MLX5_IB_METHOD_UAR_OBJ_DESTROY = 0x1001,
    }

    enum mlx5_ib_uar_alloc_attrs: u16 {
        MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE = 0x1000,
        MLX5_IB_ATTR_UAR_OBJ_ALLOC_TYPE = 0x1001,
        MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_OFFSET = 0x1002,
        MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_LENGTH = 0x1003,
        MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID = 0x1004,
    }

    enum mlx5_ib_uar_obj_destroy_attrs: u16 {
        MLX5_IB_ATTR_UAR_OBJ_DESTROY_HANDLE = 0x1000,
    }
}

open_enums! {
    const TYPES = "rdma/mlx5_user_ioctl_verbs.h";

    /// The mapping of a UAR: write combining (BlueFlame) or uncached.
    enum mlx5_ib_uapi_uar_alloc_type: u32 {
        MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF = 0,
        MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC = 1,
    }
}
