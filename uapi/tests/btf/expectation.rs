//! Expectations of a kernel's BTF: items that it does not have, and its least numbers of items.

use uverbs_uapi::drift::Version;

const EVER: Version = (u32::MAX, u32::MAX);

/// Items that a kernel's BTF does not have although the header does.
///
/// BTF describes the types of compiled code. A struct without a variable, of which the code uses
/// only the size, and an enum without a variable leave no trace.
pub(crate) struct Unknown {
    /// The reason.
    pub(crate) reason: &'static str,
    /// The newest kernel that it holds for.
    pub(crate) until: Version,
    pub(crate) items: &'static [&'static str],
}

pub(crate) const UNKNOWN: &[Unknown] = &[
    Unknown {
        reason: "Only its size is used, so no variable of the type exists.",
        until: EVER,
        items: &[
            "ib_uverbs_sge",
            "mlx5_ib_alloc_ucontext_req",
            "mlx5_wqe_atomic_seg",
            "mlx5_wqe_masked_atomic_seg",
        ],
    },
    Unknown {
        reason: "Not in the kernel's union of specifications; read through their common header.",
        until: EVER,
        items: &[
            "ib_uverbs_flow_gre_filter",
            "ib_uverbs_flow_mpls_filter",
            "ib_uverbs_flow_spec_gre",
            "ib_uverbs_flow_spec_mpls",
            "ib_uverbs_flow_spec_tunnel",
            "ib_uverbs_flow_tunnel_filter",
        ],
    },
    Unknown {
        reason: "Left in the header; the drivers no longer implement IPsec flow actions.",
        until: EVER,
        items: &[
            "UVERBS_ATTR_MODIFY_FLOW_ACTION_ESP_HANDLE",
            "IB_UVERBS_FLOW_ACTION_ESP_FLAGS_DECRYPT",
            "IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ENCRYPT",
            "IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ESN_NEW_WINDOW",
            "IB_UVERBS_FLOW_ACTION_ESP_FLAGS_FULL_OFFLOAD",
            "IB_UVERBS_FLOW_ACTION_ESP_FLAGS_INLINE_CRYPTO",
            "IB_UVERBS_FLOW_ACTION_ESP_FLAGS_TRANSPORT",
            "IB_UVERBS_FLOW_ACTION_ESP_FLAGS_TUNNEL",
            "IB_UVERBS_FLOW_ACTION_ESP_KEYMAT_AES_GCM",
            "IB_UVERBS_FLOW_ACTION_IV_ALGO_SEQ",
            "IB_UVERBS_FLOW_ACTION_ESP_REPLAY_BMP",
            "IB_UVERBS_FLOW_ACTION_ESP_REPLAY_NONE",
            "ib_uverbs_flow_action_esp",
            "ib_uverbs_flow_action_esp_encap",
            "ib_uverbs_flow_action_esp_keymat_aes_gcm",
            "ib_uverbs_flow_action_esp_replay_bmp",
            "MLX5_USER_ALLOC_UCONTEXT_FLOW_ACTION_FLAGS_ESP_AES_GCM",
            "MLX5_USER_ALLOC_UCONTEXT_FLOW_ACTION_FLAGS_ESP_AES_GCM_FULL_OFFLOAD",
            "MLX5_USER_ALLOC_UCONTEXT_FLOW_ACTION_FLAGS_ESP_AES_GCM_REQ_METADATA",
            "MLX5_USER_ALLOC_UCONTEXT_FLOW_ACTION_FLAGS_ESP_AES_GCM_SPI_STEERING",
            "MLX5_USER_ALLOC_UCONTEXT_FLOW_ACTION_FLAGS_ESP_AES_GCM_TX_IV_IS_ESN",
            "MLX5_IB_ATTR_CREATE_FLOW_ACTION_FLAGS",
            "MLX5_IB_UAPI_FLOW_ACTION_FLAGS_REQUIRE_METADATA",
        ],
    },
    Unknown {
        reason: "The kernel's own code does not use it.",
        until: EVER,
        items: &[
            "mlx5_cqe128",
            "MLX5_USER_INLINE_MODE_IP",
            "MLX5_USER_INLINE_MODE_L2",
            "MLX5_USER_INLINE_MODE_NA",
            "MLX5_USER_INLINE_MODE_NONE",
            "MLX5_USER_INLINE_MODE_TCP_UDP",
            "MLX5_IB_ATTR_DESTROY_FLOW_HANDLE",
        ],
    },
    Unknown {
        reason: "Answered as a bare number until the kernel filled in the struct.",
        until: (7, 1),
        items: &["mlx5_ib_create_cq_resp"],
    },
];

/// Enumerators that this crate leaves out: a second name of a value, those without a meaning, and
/// counts of the others.
pub(crate) const OMITTED: &[&str] = &[
    "RDMA_DRIVER_I40IW",
    "MPW_RESERVED",
    "RDMA_NLDEV_CMD_UNSPEC",
    "RDMA_NLDEV_NUM_OPS",
    "RDMA_NLDEV_ATTR_UNSPEC",
    "RDMA_NLDEV_ATTR_MAX",
];

/// Items that only one driver's BTF has although they belong to a header that all share. Without
/// that driver's module nothing can be said about them.
pub(crate) struct Elsewhere {
    pub(crate) module: &'static str,
    /// The newest kernel that it holds for.
    pub(crate) until: Version,
    pub(crate) items: &'static [&'static str],
}

pub(crate) const ELSEWHERE: &[Elsewhere] = &[Elsewhere {
    module: "mlx5_ib",
    until: (6, 12),
    items: &[
        "IB_UVERBS_ODP_SUPPORT",
        "IB_UVERBS_ODP_SUPPORT_IMPLICIT",
        "IB_UVERBS_ODP_SUPPORT_SEND",
        "IB_UVERBS_ODP_SUPPORT_RECV",
        "IB_UVERBS_ODP_SUPPORT_WRITE",
        "IB_UVERBS_ODP_SUPPORT_READ",
        "IB_UVERBS_ODP_SUPPORT_ATOMIC",
        "IB_UVERBS_ODP_SUPPORT_SRQ_RECV",
    ],
}];

/// Structs that kernels have under another name since some version: that version, the name in the
/// header, the other.
pub(crate) const RENAMED: &[(Version, &str, &str)] =
    &[((7, 3), "mlx5_ib_clock_info", "ib_uverbs_clock_info")];

/// How many structs and numbers of a header were found in the BTF of a kernel series.
pub(crate) struct Pinned {
    pub(crate) series: Version,
    /// Header, structs, numbers.
    pub(crate) counts: &'static [(&'static str, usize, usize)],
}

pub(crate) const PINNED: &[Pinned] = &[
    Pinned {
        series: (6, 1),
        counts: &[
            ("drivers/infiniband/sw/rxe/rxe_verbs.h", 0, 5),
            ("linux/in.h", 1, 0),
            ("linux/in6.h", 1, 0),
            ("linux/mlx5/cq.h", 0, 26),
            ("linux/mlx5/device.h", 6, 21),
            ("linux/mlx5/qp.h", 10, 13),
            ("rdma/ib.h", 1, 0),
            ("rdma/ib_cm.h", 0, 40),
            ("rdma/ib_user_ioctl_cmds.h", 0, 181),
            ("rdma/ib_user_ioctl_verbs.h", 3, 89),
            ("rdma/ib_user_sa.h", 2, 7),
            ("rdma/ib_user_verbs.h", 114, 115),
            ("rdma/ib_verbs.h", 0, 190),
            ("rdma/mlx5-abi.h", 32, 73),
            ("rdma/mlx5_user_ioctl_cmds.h", 1, 145),
            ("rdma/mlx5_user_ioctl_verbs.h", 4, 23),
            ("rdma/rdma_cm.h", 0, 16),
            ("rdma/rdma_netlink.h", 0, 134),
            ("rdma/rdma_user_cm.h", 31, 40),
            ("rdma/rdma_user_ioctl_cmds.h", 2, 2),
            ("rdma/rdma_user_rxe.h", 20, 2),
        ],
    },
    Pinned {
        series: (6, 12),
        counts: &[
            ("drivers/infiniband/sw/rxe/rxe_verbs.h", 0, 5),
            ("linux/in.h", 1, 0),
            ("linux/in6.h", 1, 0),
            ("linux/mlx5/cq.h", 0, 26),
            ("linux/mlx5/device.h", 6, 21),
            ("linux/mlx5/qp.h", 10, 14),
            ("rdma/ib.h", 1, 0),
            ("rdma/ib_cm.h", 0, 40),
            ("rdma/ib_user_ioctl_cmds.h", 0, 183),
            ("rdma/ib_user_ioctl_verbs.h", 3, 92),
            ("rdma/ib_user_sa.h", 2, 7),
            ("rdma/ib_user_verbs.h", 114, 126),
            ("rdma/ib_verbs.h", 0, 194),
            ("rdma/mlx5-abi.h", 32, 73),
            ("rdma/mlx5_user_ioctl_cmds.h", 1, 149),
            ("rdma/mlx5_user_ioctl_verbs.h", 4, 25),
            ("rdma/rdma_cm.h", 0, 16),
            ("rdma/rdma_netlink.h", 0, 152),
            ("rdma/rdma_user_cm.h", 31, 40),
            ("rdma/rdma_user_ioctl_cmds.h", 2, 2),
            ("rdma/rdma_user_rxe.h", 21, 2),
        ],
    },
    Pinned {
        series: (6, 16),
        counts: &[
            ("drivers/infiniband/sw/rxe/rxe_verbs.h", 0, 5),
            ("linux/in.h", 1, 0),
            ("linux/in6.h", 1, 0),
            ("linux/mlx5/cq.h", 0, 26),
            ("linux/mlx5/device.h", 6, 24),
            ("linux/mlx5/qp.h", 10, 18),
            ("rdma/ib.h", 1, 0),
            ("rdma/ib_cm.h", 0, 40),
            ("rdma/ib_user_ioctl_cmds.h", 0, 184),
            ("rdma/ib_user_ioctl_verbs.h", 3, 92),
            ("rdma/ib_user_sa.h", 2, 7),
            ("rdma/ib_user_verbs.h", 114, 128),
            ("rdma/ib_verbs.h", 0, 194),
            ("rdma/mlx5-abi.h", 32, 75),
            ("rdma/mlx5_user_ioctl_cmds.h", 1, 150),
            ("rdma/mlx5_user_ioctl_verbs.h", 4, 27),
            ("rdma/rdma_cm.h", 0, 16),
            ("rdma/rdma_netlink.h", 0, 155),
            ("rdma/rdma_user_cm.h", 31, 40),
            ("rdma/rdma_user_ioctl_cmds.h", 2, 2),
            ("rdma/rdma_user_rxe.h", 21, 2),
        ],
    },
    Pinned {
        series: (6, 18),
        counts: &[
            ("drivers/infiniband/sw/rxe/rxe_verbs.h", 0, 5),
            ("linux/in.h", 1, 0),
            ("linux/in6.h", 1, 0),
            ("linux/mlx5/cq.h", 0, 26),
            ("linux/mlx5/device.h", 6, 24),
            ("linux/mlx5/qp.h", 10, 18),
            ("rdma/ib.h", 1, 0),
            ("rdma/ib_cm.h", 0, 40),
            ("rdma/ib_user_ioctl_cmds.h", 0, 208),
            ("rdma/ib_user_ioctl_verbs.h", 3, 93),
            ("rdma/ib_user_sa.h", 3, 7),
            ("rdma/ib_user_verbs.h", 114, 128),
            ("rdma/ib_verbs.h", 0, 194),
            ("rdma/mlx5-abi.h", 32, 75),
            ("rdma/mlx5_user_ioctl_cmds.h", 1, 150),
            ("rdma/mlx5_user_ioctl_verbs.h", 4, 27),
            ("rdma/rdma_cm.h", 0, 20),
            ("rdma/rdma_netlink.h", 0, 155),
            ("rdma/rdma_user_cm.h", 35, 45),
            ("rdma/rdma_user_ioctl_cmds.h", 2, 2),
            ("rdma/rdma_user_rxe.h", 21, 2),
        ],
    },
    Pinned {
        series: (7, 0),
        counts: &[
            ("drivers/infiniband/sw/rxe/rxe_verbs.h", 0, 5),
            ("linux/in.h", 1, 0),
            ("linux/in6.h", 1, 0),
            ("linux/mlx5/cq.h", 0, 26),
            ("linux/mlx5/device.h", 6, 24),
            ("linux/mlx5/qp.h", 10, 18),
            ("rdma/ib.h", 1, 0),
            ("rdma/ib_cm.h", 0, 40),
            ("rdma/ib_user_ioctl_cmds.h", 0, 215),
            ("rdma/ib_user_ioctl_verbs.h", 3, 93),
            ("rdma/ib_user_sa.h", 3, 7),
            ("rdma/ib_user_verbs.h", 114, 128),
            ("rdma/ib_verbs.h", 0, 196),
            ("rdma/mlx5-abi.h", 32, 75),
            ("rdma/mlx5_user_ioctl_cmds.h", 1, 150),
            ("rdma/mlx5_user_ioctl_verbs.h", 4, 27),
            ("rdma/rdma_cm.h", 0, 20),
            ("rdma/rdma_netlink.h", 0, 155),
            ("rdma/rdma_user_cm.h", 35, 45),
            ("rdma/rdma_user_ioctl_cmds.h", 2, 2),
            ("rdma/rdma_user_rxe.h", 21, 2),
        ],
    },
    Pinned {
        series: (7, 2),
        counts: &[
            ("drivers/infiniband/sw/rxe/rxe_verbs.h", 0, 5),
            ("linux/in.h", 1, 0),
            ("linux/in6.h", 1, 0),
            ("linux/mlx5/cq.h", 0, 26),
            ("linux/mlx5/device.h", 6, 21),
            ("linux/mlx5/qp.h", 10, 14),
            ("rdma/ib.h", 1, 0),
            ("rdma/ib_cm.h", 0, 40),
            ("rdma/ib_user_ioctl_cmds.h", 0, 219),
            ("rdma/ib_user_ioctl_verbs.h", 4, 96),
            ("rdma/ib_user_sa.h", 3, 7),
            ("rdma/ib_user_verbs.h", 114, 129),
            ("rdma/ib_verbs.h", 0, 196),
            ("rdma/mlx5-abi.h", 33, 75),
            ("rdma/mlx5_user_ioctl_cmds.h", 1, 153),
            ("rdma/mlx5_user_ioctl_verbs.h", 4, 28),
            ("rdma/rdma_cm.h", 0, 20),
            ("rdma/rdma_netlink.h", 0, 170),
            ("rdma/rdma_user_cm.h", 35, 45),
            ("rdma/rdma_user_ioctl_cmds.h", 2, 2),
            ("rdma/rdma_user_rxe.h", 21, 2),
        ],
    },
    Pinned {
        series: (7, 3),
        counts: &[
            ("drivers/infiniband/sw/rxe/rxe_verbs.h", 0, 5),
            ("linux/in.h", 1, 0),
            ("linux/in6.h", 1, 0),
            ("linux/mlx5/cq.h", 0, 26),
            ("linux/mlx5/device.h", 6, 21),
            ("linux/mlx5/qp.h", 10, 14),
            ("rdma/ib.h", 1, 0),
            ("rdma/ib_cm.h", 0, 40),
            ("rdma/ib_user_ioctl_cmds.h", 0, 223),
            ("rdma/ib_user_ioctl_verbs.h", 4, 96),
            ("rdma/ib_user_sa.h", 3, 7),
            ("rdma/ib_user_verbs.h", 114, 129),
            ("rdma/ib_verbs.h", 0, 196),
            ("rdma/mlx5-abi.h", 33, 75),
            ("rdma/mlx5_user_ioctl_cmds.h", 1, 153),
            ("rdma/mlx5_user_ioctl_verbs.h", 4, 28),
            ("rdma/rdma_cm.h", 0, 20),
            ("rdma/rdma_netlink.h", 0, 171),
            ("rdma/rdma_user_cm.h", 35, 45),
            ("rdma/rdma_user_ioctl_cmds.h", 2, 2),
            ("rdma/rdma_user_rxe.h", 21, 2),
        ],
    },
];
