//! DEVX: firmware commands and objects issued by a process.
//!
//! `rdma/mlx5_user_ioctl_cmds.h`, `rdma/mlx5_user_ioctl_verbs.h`.

use crate::enumeration::{flag_sets, ids};
use crate::layout::layouts;

ids! {
    const IDS = "rdma/mlx5_user_ioctl_cmds.h";

    enum mlx5_ib_devx_methods: u16 {
        MLX5_IB_METHOD_DEVX_OTHER = 0x1000,
        MLX5_IB_METHOD_DEVX_QUERY_UAR = 0x1001,
        MLX5_IB_METHOD_DEVX_QUERY_EQN = 0x1002,
        MLX5_IB_METHOD_DEVX_SUBSCRIBE_EVENT = 0x1003,
    }

    enum mlx5_ib_devx_other_attrs: u16 {
        MLX5_IB_ATTR_DEVX_OTHER_CMD_IN = 0x1000,
        MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT = 0x1001,
    }

    enum mlx5_ib_devx_query_uar_attrs: u16 {
        MLX5_IB_ATTR_DEVX_QUERY_UAR_USER_IDX = 0x1000,
        MLX5_IB_ATTR_DEVX_QUERY_UAR_DEV_IDX = 0x1001,
    }

    enum mlx5_ib_devx_query_eqn_attrs: u16 {
        MLX5_IB_ATTR_DEVX_QUERY_EQN_USER_VEC = 0x1000,
        MLX5_IB_ATTR_DEVX_QUERY_EQN_DEV_EQN = 0x1001,
    }

    enum mlx5_ib_devx_subscribe_event_attrs: u16 {
        MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_FD_HANDLE = 0x1000,
        MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_OBJ_HANDLE = 0x1001,
        MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_TYPE_NUM_LIST = 0x1002,
        MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_FD_NUM = 0x1003,
        MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_COOKIE = 0x1004,
    }

    enum mlx5_ib_devx_obj_methods: u16 {
        MLX5_IB_METHOD_DEVX_OBJ_CREATE = 0x1000,
        MLX5_IB_METHOD_DEVX_OBJ_DESTROY = 0x1001,
        MLX5_IB_METHOD_DEVX_OBJ_MODIFY = 0x1002,
        MLX5_IB_METHOD_DEVX_OBJ_QUERY = 0x1003,
        MLX5_IB_METHOD_DEVX_OBJ_ASYNC_QUERY = 0x1004,
    }

    enum mlx5_ib_devx_obj_create_attrs: u16 {
        MLX5_IB_ATTR_DEVX_OBJ_CREATE_HANDLE = 0x1000,
        MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_IN = 0x1001,
        MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT = 0x1002,
    }

    enum mlx5_ib_devx_obj_destroy_attrs: u16 {
        MLX5_IB_ATTR_DEVX_OBJ_DESTROY_HANDLE = 0x1000,
    }

    enum mlx5_ib_devx_obj_modify_attrs: u16 {
        MLX5_IB_ATTR_DEVX_OBJ_MODIFY_HANDLE = 0x1000,
        MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_IN = 0x1001,
        MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_OUT = 0x1002,
    }

    enum mlx5_ib_devx_obj_query_attrs: u16 {
        MLX5_IB_ATTR_DEVX_OBJ_QUERY_HANDLE = 0x1000,
        MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_IN = 0x1001,
        MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_OUT = 0x1002,
    }

    enum mlx5_ib_devx_obj_query_async_attrs: u16 {
        MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_HANDLE = 0x1000,
        MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_CMD_IN = 0x1001,
        MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_FD = 0x1002,
        MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_WR_ID = 0x1003,
        MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_OUT_LEN = 0x1004,
    }

    enum mlx5_ib_devx_umem_methods: u16 {
        MLX5_IB_METHOD_DEVX_UMEM_REG = 0x1000,
        MLX5_IB_METHOD_DEVX_UMEM_DEREG = 0x1001,
    }

    enum mlx5_ib_devx_umem_reg_attrs: u16 {
        MLX5_IB_ATTR_DEVX_UMEM_REG_HANDLE = 0x1000,
        MLX5_IB_ATTR_DEVX_UMEM_REG_ADDR = 0x1001,
        MLX5_IB_ATTR_DEVX_UMEM_REG_LEN = 0x1002,
        MLX5_IB_ATTR_DEVX_UMEM_REG_ACCESS = 0x1003,
        MLX5_IB_ATTR_DEVX_UMEM_REG_OUT_ID = 0x1004,
        MLX5_IB_ATTR_DEVX_UMEM_REG_PGSZ_BITMAP = 0x1005,
        MLX5_IB_ATTR_DEVX_UMEM_REG_DMABUF_FD = 0x1006,
    }

    enum mlx5_ib_devx_umem_dereg_attrs: u16 {
        MLX5_IB_ATTR_DEVX_UMEM_DEREG_HANDLE = 0x1000,
    }

    enum mlx5_ib_devx_async_cmd_fd_methods: u16 {
        MLX5_IB_METHOD_DEVX_ASYNC_CMD_FD_ALLOC = 0x1000,
    }

    enum mlx5_ib_devx_async_cmd_fd_alloc_attrs: u16 {
        MLX5_IB_ATTR_DEVX_ASYNC_CMD_FD_ALLOC_HANDLE = 0x1000,
    }

    enum mlx5_ib_devx_async_event_fd_methods: u16 {
        MLX5_IB_METHOD_DEVX_ASYNC_EVENT_FD_ALLOC = 0x1000,
    }

    enum mlx5_ib_devx_async_event_fd_alloc_attrs: u16 {
        MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_HANDLE = 0x1000,
        MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_FLAGS = 0x1001,
    }
}

layouts! {
    const LAYOUTS = "rdma/mlx5_user_ioctl_verbs.h";

    /// Header of each record in the file of finished commands; the command output follows.
    struct mlx5_ib_uapi_devx_async_cmd_hdr[8] {
        wr_id: u64 = 0,
    }

    /// Header of each record in the file of events; the event follows.
    struct mlx5_ib_uapi_devx_async_event_hdr[8] {
        cookie: u64 = 0,
    }
}

flag_sets! {
    const FLAGS = "rdma/mlx5_user_ioctl_verbs.h";

    /// Flags of an event channel.
    enum mlx5_ib_uapi_devx_create_event_channel_flags: u32 {
        MLX5_IB_UAPI_DEVX_CR_EV_CH_FLAGS_OMIT_DATA = 1 << 0,
    }
}
