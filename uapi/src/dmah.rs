//! DMA handles: hints for the placement of a device's writes (Linux 6.17). `rdma/ib_user_ioctl_cmds.h`.

use crate::enumeration::ids;

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_methods_dmah: u16 {
        UVERBS_METHOD_DMAH_ALLOC = 0,
        UVERBS_METHOD_DMAH_FREE = 1,
    }

    enum uverbs_attrs_alloc_dmah_cmd_attr_ids: u16 {
        UVERBS_ATTR_ALLOC_DMAH_HANDLE = 0,
        UVERBS_ATTR_ALLOC_DMAH_CPU_ID = 1,
        UVERBS_ATTR_ALLOC_DMAH_TPH_MEM_TYPE = 2,
        UVERBS_ATTR_ALLOC_DMAH_PH = 3,
    }

    enum uverbs_attrs_free_dmah_cmd_attr_ids: u16 {
        UVERBS_ATTR_FREE_DMA_HANDLE = 0,
    }
}
