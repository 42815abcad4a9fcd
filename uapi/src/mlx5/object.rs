//! Objects, methods and attributes of the driver. `rdma/mlx5_user_ioctl_cmds.h`.
//!
//! Those of [VARs](super::var), [UARs](super::uar), [device memory](super::dm),
//! [DEVX](super::devx) and [steering](super::flow) have modules of their own.

use crate::enumeration::{flag_sets, ids};
use crate::layout::layouts;
use crate::mlx5::context::mlx5_ib_uapi_reg;

ids! {
    const IDS = "rdma/mlx5_user_ioctl_cmds.h";

    enum mlx5_ib_objects: u16 {
        MLX5_IB_OBJECT_DEVX = 0x1000,
        MLX5_IB_OBJECT_DEVX_OBJ = 0x1001,
        MLX5_IB_OBJECT_DEVX_UMEM = 0x1002,
        MLX5_IB_OBJECT_FLOW_MATCHER = 0x1003,
        MLX5_IB_OBJECT_DEVX_ASYNC_CMD_FD = 0x1004,
        MLX5_IB_OBJECT_DEVX_ASYNC_EVENT_FD = 0x1005,
        MLX5_IB_OBJECT_VAR = 0x1006,
        MLX5_IB_OBJECT_PP = 0x1007,
        MLX5_IB_OBJECT_UAR = 0x1008,
        MLX5_IB_OBJECT_STEERING_ANCHOR = 0x1009,
    }

    enum mlx5_ib_device_methods: u16 {
        MLX5_IB_METHOD_QUERY_PORT = 0x1000,
        MLX5_IB_METHOD_GET_DATA_DIRECT_SYSFS_PATH = 0x1001,
    }

    enum mlx5_ib_device_query_context_attrs: u16 {
        MLX5_IB_ATTR_QUERY_CONTEXT_RESP_UCTX = 0x1000,
    }

    enum mlx5_ib_query_port_attrs: u16 {
        MLX5_IB_ATTR_QUERY_PORT_PORT_NUM = 0x1000,
        MLX5_IB_ATTR_QUERY_PORT = 0x1001,
    }

    enum mlx5_ib_get_data_direct_sysfs_path_attrs: u16 {
        MLX5_IB_ATTR_GET_DATA_DIRECT_SYSFS_PATH = 0x1000,
    }

    enum mlx5_ib_pd_methods: u16 {
        MLX5_IB_METHOD_PD_QUERY = 0x1000,
    }

    enum mlx5_ib_query_pd_attrs: u16 {
        MLX5_IB_ATTR_QUERY_PD_HANDLE = 0x1000,
        MLX5_IB_ATTR_QUERY_PD_RESP_PDN = 0x1001,
    }

    enum mlx5_ib_create_cq_attrs: u16 {
        MLX5_IB_ATTR_CREATE_CQ_UAR_INDEX = 0x1002,
        MLX5_IB_ATTR_CREATE_CQ_DBR_BUF_UMEM = 0x1003,
    }

    enum mlx5_ib_create_qp_attrs: u16 {
        MLX5_IB_ATTR_CREATE_QP_DBR_BUF_UMEM = 0x1002,
    }

    enum mlx5_ib_reg_dmabuf_mr_attrs: u16 {
        MLX5_IB_ATTR_REG_DMABUF_MR_ACCESS_FLAGS = 0x1000,
    }

    enum mlx5_ib_pp_obj_methods: u16 {
        MLX5_IB_METHOD_PP_OBJ_ALLOC = 0x1000,
        MLX5_IB_METHOD_PP_OBJ_DESTROY = 0x1001,
    }

    enum mlx5_ib_pp_alloc_attrs: u16 {
        MLX5_IB_ATTR_PP_OBJ_ALLOC_HANDLE = 0x1000,
        MLX5_IB_ATTR_PP_OBJ_ALLOC_CTX = 0x1001,
        MLX5_IB_ATTR_PP_OBJ_ALLOC_FLAGS = 0x1002,
        MLX5_IB_ATTR_PP_OBJ_ALLOC_INDEX = 0x1003,
    }

    enum mlx5_ib_pp_obj_destroy_attrs: u16 {
        MLX5_IB_ATTR_PP_OBJ_DESTROY_HANDLE = 0x1000,
    }
}

layouts! {
    const LAYOUTS = "rdma/mlx5_user_ioctl_verbs.h";

    /// Answer of `MLX5_IB_METHOD_QUERY_PORT`.
    struct mlx5_ib_uapi_query_port[40] {
        flags: u64 = 0,
        vport: u16 = 8,
        vport_vhca_id: u16 = 10,
        esw_owner_vhca_id: u16 = 12,
        rsvd0: u16 = 14,
        vport_steering_icm_rx: u64 = 16,
        vport_steering_icm_tx: u64 = 24,
        reg_c0: mlx5_ib_uapi_reg = 32,
    }
}

flag_sets! {
    const PORT_FLAGS = "rdma/mlx5_user_ioctl_verbs.h";

    /// Fields of [`mlx5_ib_uapi_query_port`] that are valid.
    enum mlx5_ib_uapi_query_port_flags: u64 {
        MLX5_IB_UAPI_QUERY_PORT_VPORT = 1 << 0,
        MLX5_IB_UAPI_QUERY_PORT_VPORT_VHCA_ID = 1 << 1,
        MLX5_IB_UAPI_QUERY_PORT_VPORT_STEERING_ICM_RX = 1 << 2,
        MLX5_IB_UAPI_QUERY_PORT_VPORT_STEERING_ICM_TX = 1 << 3,
        MLX5_IB_UAPI_QUERY_PORT_VPORT_REG_C0 = 1 << 4,
        MLX5_IB_UAPI_QUERY_PORT_ESW_OWNER_VHCA_ID = 1 << 5,
    }
}

flag_sets! {
    const FLAGS = "rdma/mlx5_user_ioctl_verbs.h";

    /// Flags of `MLX5_IB_ATTR_REG_DMABUF_MR_ACCESS_FLAGS`.
    enum mlx5_ib_uapi_reg_dmabuf_flags: u32 {
        MLX5_IB_UAPI_REG_DMABUF_ACCESS_DATA_DIRECT = 1 << 0,
    }

    /// Flags of a packet pacing entry.
    enum mlx5_ib_uapi_pp_alloc_flags: u32 {
        MLX5_IB_UAPI_PP_ALLOC_FLAGS_DEDICATED_INDEX = 1 << 0,
    }
}
