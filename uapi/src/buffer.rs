//! Memory given to an object as its queue (Linux 7.2). `rdma/ib_user_ioctl_verbs.h`.

use crate::enumeration::open_enums;
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_ioctl_verbs.h";

    /// A buffer: a range of addresses, or of a dma-buf. Unknown `flags` are an error, unknown
    /// `optional_flags` are ignored.
    struct ib_uverbs_buffer_desc[32] {
        r#type: u32 = 0,
        fd: i32 = 4,
        flags: u32 = 8,
        optional_flags: u32 = 12,
        addr: u64 = 16,
        length: u64 = 24,
    }
}

open_enums! {
    const TYPES = "rdma/ib_user_ioctl_verbs.h";

    /// The kind of memory that a buffer descriptor names.
    enum ib_uverbs_buffer_type: u32 {
        IB_UVERBS_BUFFER_TYPE_DMABUF = 0,
        IB_UVERBS_BUFFER_TYPE_VA = 1,
    }
}
