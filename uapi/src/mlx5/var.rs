//! VARs: doorbell pages of a virtio device in hardware.
//!
//! `rdma/mlx5_user_ioctl_cmds.h`, `rdma/mlx5_user_ioctl_verbs.h`.

use crate::enumeration::{flag_sets, ids};

ids! {
    const IDS = "rdma/mlx5_user_ioctl_cmds.h";

    enum mlx5_ib_var_obj_methods: u16 {
        MLX5_IB_METHOD_VAR_OBJ_ALLOC = 0x1000,
        MLX5_IB_METHOD_VAR_OBJ_DESTROY = 0x1001,
    }

    enum mlx5_ib_var_alloc_attrs: u16 {
        MLX5_IB_ATTR_VAR_OBJ_ALLOC_HANDLE = 0x1000,
        MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_OFFSET = 0x1001,
        MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_LENGTH = 0x1002,
        MLX5_IB_ATTR_VAR_OBJ_ALLOC_PAGE_ID = 0x1003,
        MLX5_IB_ATTR_VAR_OBJ_ALLOC_FLAGS = 0x1004,
    }

    enum mlx5_ib_var_obj_destroy_attrs: u16 {
        MLX5_IB_ATTR_VAR_OBJ_DESTROY_HANDLE = 0x1000,
    }
}

flag_sets! {
    const FLAGS = "rdma/mlx5_user_ioctl_verbs.h";

    /// Flags of a VAR (Linux 7.1).
    enum mlx5_ib_uapi_var_alloc_flags: u32 {
        MLX5_IB_UAPI_VAR_ALLOC_FLAG_TLP = 1 << 0,
    }
}
