//! Object ids and the namespaces of ids. `rdma/ib_user_ioctl_cmds.h`.
//!
//! Objects, methods and attributes are numbered below 0x1000 by the core and from there by drivers.

use crate::enumeration::ids;

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_default_objects: u16 {
        UVERBS_OBJECT_DEVICE = 0,
        UVERBS_OBJECT_PD = 1,
        UVERBS_OBJECT_COMP_CHANNEL = 2,
        UVERBS_OBJECT_CQ = 3,
        UVERBS_OBJECT_QP = 4,
        UVERBS_OBJECT_SRQ = 5,
        UVERBS_OBJECT_AH = 6,
        UVERBS_OBJECT_MR = 7,
        UVERBS_OBJECT_MW = 8,
        UVERBS_OBJECT_FLOW = 9,
        UVERBS_OBJECT_XRCD = 10,
        UVERBS_OBJECT_RWQ_IND_TBL = 11,
        UVERBS_OBJECT_WQ = 12,
        UVERBS_OBJECT_FLOW_ACTION = 13,
        UVERBS_OBJECT_DM = 14,
        UVERBS_OBJECT_COUNTERS = 15,
        UVERBS_OBJECT_ASYNC_EVENT = 16,
        UVERBS_OBJECT_DMAH = 17,
        UVERBS_OBJECT_DMABUF = 18,
        UVERBS_OBJECT_COMP_CNTR = 19,
    }

    enum _: u16 {
        UVERBS_ID_DRIVER_NS = 0x1000,
        UVERBS_ATTR_UHW_IN = 0x1000,
        UVERBS_ATTR_UHW_OUT = 0x1001,
        UVERBS_ID_DRIVER_NS_WITH_UHW = 0x1002,
    }
}
