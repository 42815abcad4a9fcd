//! Changes between kernels: items of this crate that older kernels do not have, or have under
//! another name.
//!
//! Everything that is not listed here is the same on all kernels since 6.1. The comparison with a kernel's type
//! information checks the table in both directions: an item that a kernel has too early is as wrong as one that is
//! missing.

/// A kernel version: major, minor.
pub type Version = (u32, u32);

/// The newest kernel that this crate was compared with.
pub const NEWEST: Version = (7, 3);

/// Items that came between two kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The newest kernel known not to have them.
    pub absent_in: Version,
    /// The oldest kernel known to have them.
    pub present_in: Version,
    /// Structs, fields (`struct.field`) and enumerators. An older kernel has no such struct or enumerator; in place of
    /// such a field it has nothing, or reserved bytes.
    pub items: &'static [&'static str],
}

/// An item that older kernels have under another name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rename {
    /// The newest kernel known to have the old name.
    pub old_in: Version,
    /// The oldest kernel known to have the new name.
    pub new_in: Version,
    /// New and old name: of a struct's field (`struct.field`, `old_field`) or of an enumerator.
    pub names: &'static [(&'static str, &'static str)],
}

/// Items that came after 6.1.
pub const CHANGES: &[Change] = &[
    Change {
        // Updates of 6.1 brought them in the middle of the series.
        absent_in: (6, 0),
        present_in: (6, 12),
        items: &[
            "RDMA_NLDEV_SYS_ATTR_PRIVILEGED_QKEY_MODE",
            "RDMA_NLDEV_ATTR_DRIVER_DETAILS",
            "RDMA_NLDEV_ATTR_RES_SUBTYPE",
        ],
    },
    Change {
        absent_in: (6, 1),
        present_in: (6, 12),
        items: &[
            "MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE",
            "UVERBS_ID_DRIVER_NS",
            "UVERBS_ID_DRIVER_NS_WITH_UHW",
            "IB_UVERBS_ACCESS_FLUSH_GLOBAL",
            "IB_UVERBS_ACCESS_FLUSH_PERSISTENT",
            "RDMA_DRIVER_MANA",
            "IB_FLUSH_GLOBAL",
            "IB_FLUSH_PERSISTENT",
            "IB_FLUSH_MR",
            "IB_FLUSH_RANGE",
            "IB_UVERBS_DEVICE_ATOMIC_WRITE",
            "IB_UVERBS_DEVICE_FLUSH_GLOBAL",
            "IB_UVERBS_DEVICE_FLUSH_PERSISTENT",
            "IB_UVERBS_WC_ATOMIC_WRITE",
            "IB_UVERBS_WC_FLUSH",
            "IB_UVERBS_WR_ATOMIC_WRITE",
            "IB_UVERBS_WR_FLUSH",
            "IB_SPEED_XDR",
            "IB_RATE_800_GBPS",
            "IB_WC_ATOMIC_WRITE",
            "IB_WC_FLUSH",
            "MLX5_IB_ATTR_CREATE_CQ_UAR_INDEX",
            "MLX5_IB_METHOD_GET_DATA_DIRECT_SYSFS_PATH",
            "MLX5_IB_ATTR_GET_DATA_DIRECT_SYSFS_PATH",
            "MLX5_IB_ATTR_REG_DMABUF_MR_ACCESS_FLAGS",
            "MLX5_IB_UAPI_DM_TYPE_ENCAP_SW_ICM",
            "MLX5_IB_UAPI_REG_DMABUF_ACCESS_DATA_DIRECT",
            "rxe_send_wr_flush",
            "RDMA_NL_GROUP_NOTIFY",
            "RDMA_NLDEV_CMD_RES_SRQ_GET_RAW",
            "RDMA_NLDEV_CMD_NEWDEV",
            "RDMA_NLDEV_CMD_DELDEV",
            "RDMA_NLDEV_CMD_MONITOR",
            "RDMA_NLDEV_ATTR_DEV_TYPE",
            "RDMA_NLDEV_ATTR_PARENT_NAME",
            "RDMA_NLDEV_ATTR_NAME_ASSIGN_TYPE",
            "RDMA_NLDEV_ATTR_EVENT_TYPE",
            "RDMA_NLDEV_SYS_ATTR_MONITOR_MODE",
            "RDMA_DEVICE_TYPE_SMI",
            "RDMA_REGISTER_EVENT",
            "RDMA_UNREGISTER_EVENT",
            "RDMA_NETDEV_ATTACH_EVENT",
            "RDMA_NETDEV_DETACH_EVENT",
            "mlx5_ib_query_device_resp.reg_c0",
            "ib_uverbs_query_port_resp_ex.reserved",
            "ib_uverbs_query_port_resp_ex.active_speed_ex",
        ],
    },
    Change {
        absent_in: (6, 12),
        present_in: (6, 16),
        items: &[
            "UVERBS_ATTR_GET_CONTEXT_FD_ARR",
            "IB_UVERBS_ODP_SUPPORT_ATOMIC_WRITE",
            "IB_UVERBS_ODP_SUPPORT_FLUSH",
            "MLX5_IB_MODIFY_QP_OOO_DP",
            "MLX5_IB_QUERY_DEV_RESP_FLAGS_OOO_DP",
            "MLX5_IB_ATTR_FLOW_MATCHER_IB_PORT",
            "MLX5_IB_UAPI_FLOW_TABLE_TYPE_RDMA_TRANSPORT_RX",
            "MLX5_IB_UAPI_FLOW_TABLE_TYPE_RDMA_TRANSPORT_TX",
            "RDMA_NLDEV_ATTR_STAT_OPCOUNTER_ENABLED",
            "RDMA_RENAME_EVENT",
            "RDMA_NETDEV_RENAME_EVENT",
        ],
    },
    Change {
        absent_in: (6, 16),
        present_in: (6, 17),
        items: &[
            "UVERBS_ATTR_ALLOC_DMAH_CPU_ID",
            "UVERBS_ATTR_ALLOC_DMAH_HANDLE",
            "UVERBS_ATTR_ALLOC_DMAH_PH",
            "UVERBS_ATTR_ALLOC_DMAH_TPH_MEM_TYPE",
            "UVERBS_ATTR_CREATE_CQ_BUFFER_FD",
            "UVERBS_ATTR_CREATE_CQ_BUFFER_LENGTH",
            "UVERBS_ATTR_CREATE_CQ_BUFFER_OFFSET",
            "UVERBS_ATTR_CREATE_CQ_BUFFER_VA",
            "UVERBS_ATTR_FREE_DMA_HANDLE",
            "UVERBS_ATTR_REG_MR_ACCESS_FLAGS",
            "UVERBS_ATTR_REG_MR_ADDR",
            "UVERBS_ATTR_REG_MR_DMA_HANDLE",
            "UVERBS_ATTR_REG_MR_FD",
            "UVERBS_ATTR_REG_MR_FD_OFFSET",
            "UVERBS_ATTR_REG_MR_HANDLE",
            "UVERBS_ATTR_REG_MR_IOVA",
            "UVERBS_ATTR_REG_MR_LENGTH",
            "UVERBS_ATTR_REG_MR_PD_HANDLE",
            "UVERBS_ATTR_REG_MR_RESP_LKEY",
            "UVERBS_ATTR_REG_MR_RESP_RKEY",
            "UVERBS_OBJECT_DMAH",
            "UVERBS_METHOD_DMAH_ALLOC",
            "UVERBS_METHOD_DMAH_FREE",
            "UVERBS_METHOD_REG_MR",
        ],
    },
    Change { absent_in: (6, 17), present_in: (6, 18), items: &["RDMA_DRIVER_IONIC"] },
    Change {
        absent_in: (6, 16),
        present_in: (6, 18),
        items: &[
            "RDMA_USER_CM_CMD_RESOLVE_IB_SERVICE",
            "RDMA_USER_CM_CMD_WRITE_CM_EVENT",
            "RDMA_USER_CM_QUERY_IB_SERVICE",
            "RDMA_USER_CM_IB_SERVICE_FLAG_ID",
            "RDMA_USER_CM_IB_SERVICE_FLAG_NAME",
            "RDMA_CM_EVENT_ADDRINFO_RESOLVED",
            "RDMA_CM_EVENT_ADDRINFO_ERROR",
            "RDMA_CM_EVENT_USER",
            "RDMA_CM_EVENT_INTERNAL",
            "ib_user_service_rec",
            "rdma_ucm_query_ib_service_resp",
            "rdma_ucm_ib_service",
            "rdma_ucm_resolve_ib_service",
            "rdma_ucm_write_cm_event",
        ],
    },
    Change { absent_in: (6, 18), present_in: (6, 19), items: &["IB_RATE_1600_GBPS"] },
    Change {
        absent_in: (6, 19),
        present_in: (7, 0),
        items: &[
            "UVERBS_ATTR_ALLOC_DMABUF_HANDLE",
            "UVERBS_ATTR_ALLOC_DMABUF_PGOFF",
            "UVERBS_ATTR_QUERY_PORT_SPEED_PORT_NUM",
            "UVERBS_ATTR_QUERY_PORT_SPEED_RESP",
            "UVERBS_OBJECT_DMABUF",
            "UVERBS_METHOD_QUERY_PORT_SPEED",
            "UVERBS_METHOD_DMABUF_ALLOC",
            "IB_EVENT_DEVICE_SPEED_CHANGE",
        ],
    },
    Change {
        absent_in: (7, 0),
        present_in: (7, 1),
        items: &[
            "IB_UVERBS_CORE_SUPPORT_ROBUST_UDATA",
            "MLX5_IB_ATTR_VAR_OBJ_ALLOC_FLAGS",
            "MLX5_IB_UAPI_VAR_ALLOC_FLAG_TLP",
            "RDMA_NLDEV_CMD_FRMR_POOLS_GET",
            "RDMA_NLDEV_CMD_FRMR_POOLS_SET",
            "RDMA_NLDEV_ATTR_FRMR_POOLS",
            "RDMA_NLDEV_ATTR_FRMR_POOL_ENTRY",
            "RDMA_NLDEV_ATTR_FRMR_POOL_KEY",
            "RDMA_NLDEV_ATTR_FRMR_POOL_KEY_ATS",
            "RDMA_NLDEV_ATTR_FRMR_POOL_KEY_ACCESS_FLAGS",
            "RDMA_NLDEV_ATTR_FRMR_POOL_KEY_VENDOR_KEY",
            "RDMA_NLDEV_ATTR_FRMR_POOL_KEY_NUM_DMA_BLOCKS",
            "RDMA_NLDEV_ATTR_FRMR_POOL_QUEUE_HANDLES",
            "RDMA_NLDEV_ATTR_FRMR_POOL_MAX_IN_USE",
            "RDMA_NLDEV_ATTR_FRMR_POOL_IN_USE",
            "RDMA_NLDEV_ATTR_FRMR_POOLS_AGING_PERIOD",
            "RDMA_NLDEV_ATTR_FRMR_POOL_PINNED_HANDLES",
            "RDMA_NLDEV_ATTR_FRMR_POOL_KEY_KERNEL_VENDOR_KEY",
        ],
    },
    Change {
        absent_in: (7, 1),
        present_in: (7, 2),
        items: &[
            "UVERBS_ATTR_CREATE_CQ_BUF_UMEM",
            "UVERBS_ATTR_CREATE_QP_BUF_UMEM",
            "UVERBS_ATTR_CREATE_QP_RQ_BUF_UMEM",
            "UVERBS_ATTR_CREATE_QP_SQ_BUF_UMEM",
            "IB_UVERBS_BUFFER_TYPE_DMABUF",
            "IB_UVERBS_BUFFER_TYPE_VA",
            "ib_uverbs_buffer_desc",
            "IB_UVERBS_DEVICE_CC_DMA_BOUNCE",
            "MLX5_IB_ATTR_CREATE_CQ_DBR_BUF_UMEM",
            "MLX5_IB_ATTR_CREATE_QP_DBR_BUF_UMEM",
        ],
    },
    Change {
        absent_in: (7, 2),
        present_in: (7, 3),
        items: &[
            "UVERBS_ATTR_CREATE_SRQ_BUF_UMEM",
            "UVERBS_OBJECT_COMP_CNTR",
            "UVERBS_METHOD_QUERY_COMP_CNTR_CAPS",
            "UVERBS_METHOD_QP_ATTACH_COMP_CNTR",
            "RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_MAX",
        ],
    },
];

/// Items that were renamed after 6.1.
pub const RENAMES: &[Rename] = &[Rename {
    old_in: (6, 12),
    new_in: (6, 16),
    names: &[
        ("IB_UVERBS_ODP_SUPPORT", "IB_ODP_SUPPORT"),
        ("IB_UVERBS_ODP_SUPPORT_ATOMIC", "IB_ODP_SUPPORT_ATOMIC"),
        ("IB_UVERBS_ODP_SUPPORT_IMPLICIT", "IB_ODP_SUPPORT_IMPLICIT"),
        ("IB_UVERBS_ODP_SUPPORT_READ", "IB_ODP_SUPPORT_READ"),
        ("IB_UVERBS_ODP_SUPPORT_RECV", "IB_ODP_SUPPORT_RECV"),
        ("IB_UVERBS_ODP_SUPPORT_SEND", "IB_ODP_SUPPORT_SEND"),
        ("IB_UVERBS_ODP_SUPPORT_SRQ_RECV", "IB_ODP_SUPPORT_SRQ_RECV"),
        ("IB_UVERBS_ODP_SUPPORT_WRITE", "IB_ODP_SUPPORT_WRITE"),
    ],
}];

/// The state of an item of this crate in a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// As it is declared here.
    Present,
    /// Not at all.
    Absent,
    /// Under this name.
    Named(&'static str),
}

/// The state of an item in a kernel of this version. There are two answers for a version between those compared, the
/// older first.
pub fn states(item: &str, version: Version) -> (State, State) {
    let pick = |old_in: Version, new_in: Version, old: State| {
        if version <= old_in {
            (old, old)
        } else if version < new_in {
            (old, State::Present)
        } else {
            (State::Present, State::Present)
        }
    };
    if let Some(change) = CHANGES.iter().find(|change| change.items.contains(&item)) {
        return pick(change.absent_in, change.present_in, State::Absent);
    }
    let renamed = RENAMES.iter().find_map(|rename| {
        let (_, old) = rename.names.iter().find(|(new, _)| *new == item)?;
        Some(pick(rename.old_in, rename.new_in, State::Named(old)))
    });
    renamed.unwrap_or((State::Present, State::Present))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_is_absent_then_uncertain_then_present() {
        let item = "UVERBS_METHOD_REG_MR";
        assert_eq!(states(item, (6, 16)), (State::Absent, State::Absent));
        assert_eq!(states(item, (6, 17)), (State::Present, State::Present));
        let item = "MLX5_IB_MODIFY_QP_OOO_DP";
        assert_eq!(states(item, (6, 12)), (State::Absent, State::Absent));
        assert_eq!(states(item, (6, 14)), (State::Absent, State::Present));
        assert_eq!(states(item, (6, 16)), (State::Present, State::Present));
    }

    #[test]
    fn a_renamed_item_has_its_old_name_before() {
        let item = "IB_UVERBS_ODP_SUPPORT_SEND";
        assert_eq!(states(item, (6, 1)).0, State::Named("IB_ODP_SUPPORT_SEND"));
        assert_eq!(states(item, (7, 2)).0, State::Present);
    }

    #[test]
    fn an_item_without_history_is_present() {
        assert_eq!(states("ib_uverbs_reg_mr", (6, 1)).0, State::Present);
    }
}
