//! Mapped device pages exported as a dma-buf (Linux 7.0). `rdma/ib_user_ioctl_cmds.h`.

use crate::enumeration::ids;

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_methods_dmabuf: u16 {
        UVERBS_METHOD_DMABUF_ALLOC = 0,
    }

    enum uverbs_attrs_alloc_dmabuf_cmd_attr_ids: u16 {
        UVERBS_ATTR_ALLOC_DMABUF_HANDLE = 0,
        UVERBS_ATTR_ALLOC_DMABUF_PGOFF = 1,
    }
}
