//! Ports of a device.
//!
//! `rdma/ib_user_verbs.h`, `rdma/ib_user_ioctl_cmds.h`, `rdma/ib_user_ioctl_verbs.h`.

use crate::enumeration::{flag_sets, ids, open_enums};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// Command `IB_USER_VERBS_CMD_QUERY_PORT`.
    struct ib_uverbs_query_port[16] {
        response: u64 = 0,
        port_num: u8 = 8,
        reserved: [u8; 7] = 9,
    }

    /// State and limits of a port.
    struct ib_uverbs_query_port_resp[40] {
        port_cap_flags: u32 = 0,
        max_msg_sz: u32 = 4,
        bad_pkey_cntr: u32 = 8,
        qkey_viol_cntr: u32 = 12,
        gid_tbl_len: u32 = 16,
        pkey_tbl_len: u16 = 20,
        lid: u16 = 22,
        sm_lid: u16 = 24,
        state: u8 = 26,
        max_mtu: u8 = 27,
        active_mtu: u8 = 28,
        lmc: u8 = 29,
        max_vl_num: u8 = 30,
        sm_sl: u8 = 31,
        subnet_timeout: u8 = 32,
        init_type_reply: u8 = 33,
        active_width: u8 = 34,
        active_speed: u8 = 35,
        phys_state: u8 = 36,
        link_layer: u8 = 37,
        flags: u8 = 38,
        reserved: u8 = 39,
    }
}

layouts! {
    const LAYOUTS_EX = "rdma/ib_user_ioctl_verbs.h";

    /// Answer of `UVERBS_METHOD_QUERY_PORT`. `active_speed_ex` is zero before Linux 6.7.
    struct ib_uverbs_query_port_resp_ex[48] {
        legacy_resp: ib_uverbs_query_port_resp = 0,
        port_cap_flags2: u16 = 40,
        reserved: [u8; 2] = 42,
        active_speed_ex: u32 = 44,
    }
}

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_attrs_query_port_cmd_attr_ids: u16 {
        UVERBS_ATTR_QUERY_PORT_PORT_NUM = 0,
        UVERBS_ATTR_QUERY_PORT_RESP = 1,
    }

    enum uverbs_attrs_query_port_speed_cmd_attr_ids: u16 {
        UVERBS_ATTR_QUERY_PORT_SPEED_PORT_NUM = 0,
        UVERBS_ATTR_QUERY_PORT_SPEED_RESP = 1,
    }
}

flag_sets! {
    const CAPS = "rdma/ib_user_ioctl_verbs.h";

    /// Capabilities of a port (`port_cap_flags`).
    enum ib_uverbs_query_port_cap_flags: u32 {
        IB_UVERBS_PCF_SM = 1 << 1,
        IB_UVERBS_PCF_NOTICE_SUP = 1 << 2,
        IB_UVERBS_PCF_TRAP_SUP = 1 << 3,
        IB_UVERBS_PCF_OPT_IPD_SUP = 1 << 4,
        IB_UVERBS_PCF_AUTO_MIGR_SUP = 1 << 5,
        IB_UVERBS_PCF_SL_MAP_SUP = 1 << 6,
        IB_UVERBS_PCF_MKEY_NVRAM = 1 << 7,
        IB_UVERBS_PCF_PKEY_NVRAM = 1 << 8,
        IB_UVERBS_PCF_LED_INFO_SUP = 1 << 9,
        IB_UVERBS_PCF_SM_DISABLED = 1 << 10,
        IB_UVERBS_PCF_SYS_IMAGE_GUID_SUP = 1 << 11,
        IB_UVERBS_PCF_PKEY_SW_EXT_PORT_TRAP_SUP = 1 << 12,
        IB_UVERBS_PCF_EXTENDED_SPEEDS_SUP = 1 << 14,
        IB_UVERBS_PCF_CM_SUP = 1 << 16,
        IB_UVERBS_PCF_SNMP_TUNNEL_SUP = 1 << 17,
        IB_UVERBS_PCF_REINIT_SUP = 1 << 18,
        IB_UVERBS_PCF_DEVICE_MGMT_SUP = 1 << 19,
        IB_UVERBS_PCF_VENDOR_CLASS_SUP = 1 << 20,
        IB_UVERBS_PCF_DR_NOTICE_SUP = 1 << 21,
        IB_UVERBS_PCF_CAP_MASK_NOTICE_SUP = 1 << 22,
        IB_UVERBS_PCF_BOOT_MGMT_SUP = 1 << 23,
        IB_UVERBS_PCF_LINK_LATENCY_SUP = 1 << 24,
        IB_UVERBS_PCF_CLIENT_REG_SUP = 1 << 25,
        IB_UVERBS_PCF_LINK_SPEED_WIDTH_TABLE_SUP = 1 << 27,
        IB_UVERBS_PCF_VENDOR_SPECIFIC_MADS_TABLE_SUP = 1 << 28,
        IB_UVERBS_PCF_MCAST_PKEY_TRAP_SUPPRESSION_SUP = 1 << 29,
        IB_UVERBS_PCF_MCAST_FDB_TOP_SUP = 1 << 30,
        IB_UVERBS_PCF_HIERARCHY_INFO_SUP = 1 << 31,
        IB_UVERBS_PCF_IP_BASED_GIDS = 1 << 26,
    }
}

flag_sets! {
    const FLAGS = "rdma/ib_user_ioctl_verbs.h";

    /// Flags of a port (`flags`).
    enum ib_uverbs_query_port_flags: u8 {
        IB_UVERBS_QPF_GRH_REQUIRED = 1 << 0,
    }
}

open_enums! {
    const STATES = "rdma/ib_verbs.h";

    /// Logical state of a port.
    enum ib_port_state: u8 {
        IB_PORT_NOP = 0,
        IB_PORT_DOWN = 1,
        IB_PORT_INIT = 2,
        IB_PORT_ARMED = 3,
        IB_PORT_ACTIVE = 4,
        IB_PORT_ACTIVE_DEFER = 5,
    }
}

open_enums! {
    const PHYS_STATES = "rdma/ib_verbs.h";

    /// Physical state of a port.
    enum ib_port_phys_state: u8 {
        IB_PORT_PHYS_STATE_SLEEP = 1,
        IB_PORT_PHYS_STATE_POLLING = 2,
        IB_PORT_PHYS_STATE_DISABLED = 3,
        IB_PORT_PHYS_STATE_PORT_CONFIGURATION_TRAINING = 4,
        IB_PORT_PHYS_STATE_LINK_UP = 5,
        IB_PORT_PHYS_STATE_LINK_ERROR_RECOVERY = 6,
        IB_PORT_PHYS_STATE_PHY_TEST = 7,
    }
}

open_enums! {
    const WIDTHS = "rdma/ib_verbs.h";

    /// Lanes of a link: the value is a code, not a count.
    enum ib_port_width: u8 {
        IB_WIDTH_1X = 1,
        IB_WIDTH_2X = 16,
        IB_WIDTH_4X = 2,
        IB_WIDTH_8X = 4,
        IB_WIDTH_12X = 8,
    }
}

open_enums! {
    const SPEEDS = "rdma/ib_verbs.h";

    /// Signalling rate per lane.
    enum ib_port_speed: u32 {
        IB_SPEED_SDR = 1,
        IB_SPEED_DDR = 2,
        IB_SPEED_QDR = 4,
        IB_SPEED_FDR10 = 8,
        IB_SPEED_FDR = 16,
        IB_SPEED_EDR = 32,
        IB_SPEED_HDR = 64,
        IB_SPEED_NDR = 128,
        IB_SPEED_XDR = 256,
    }
}

open_enums! {
    const MTUS = "rdma/ib_verbs.h";

    /// Path MTU: the value is a code, not a size.
    enum ib_mtu: u8 {
        IB_MTU_256 = 1,
        IB_MTU_512 = 2,
        IB_MTU_1024 = 3,
        IB_MTU_2048 = 4,
        IB_MTU_4096 = 5,
    }
}

open_enums! {
    const LINK_LAYERS = "rdma/ib_verbs.h";

    /// The link layer of a port.
    enum rdma_link_layer: u8 {
        IB_LINK_LAYER_UNSPECIFIED = 0,
        IB_LINK_LAYER_INFINIBAND = 1,
        IB_LINK_LAYER_ETHERNET = 2,
    }
}
