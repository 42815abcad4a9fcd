//! The one ioctl: its number, its header, its attributes. `rdma/rdma_user_ioctl_cmds.h`.
//!
//! A call is an [`ib_uverbs_ioctl_hdr`] followed directly by `num_attrs` times [`ib_uverbs_attr`].

use crate::enumeration::ids;
use crate::layout::layouts;

/// `_IOWR(RDMA_IOCTL_MAGIC, 1, struct ib_uverbs_ioctl_hdr)`: the size encoded in it is that of the
/// header alone.
pub const RDMA_VERBS_IOCTL: u32 = {
    const READ_WRITE: u32 = 3;
    (READ_WRITE << 30)
        | ((size_of::<ib_uverbs_ioctl_hdr>() as u32) << 16)
        | (RDMA_IOCTL_MAGIC << 8)
        | 1
};

const _: () = assert!(RDMA_VERBS_IOCTL == 0xc018_1b01);

ids! {
    const DEFINES = "rdma/rdma_user_ioctl_cmds.h";

    enum "#define": u32 {
        RDMA_IOCTL_MAGIC = 0x1b,
    }
}

ids! {
    const FLAGS = "rdma/rdma_user_ioctl_cmds.h";

    enum _: u16 {
        /// The kernel must know this attribute: an unknown one is then `EPROTONOSUPPORT` instead of being ignored.
        UVERBS_ATTR_F_MANDATORY = 1 << 0,
        /// Set by the kernel in the caller's array on an output that it wrote.
        UVERBS_ATTR_F_VALID_OUTPUT = 1 << 1,
    }
}

layouts! {
    const LAYOUTS = "rdma/rdma_user_ioctl_cmds.h";

    /// The head of a call. `length` counts bytes and includes the attributes.
    struct ib_uverbs_ioctl_hdr[24] {
        length: u16 = 0,
        object_id: u16 = 2,
        method_id: u16 = 4,
        num_attrs: u16 = 6,
        reserved1: u64 = 8,
        driver_id: u32 = 16,
        reserved2: u32 = 20,
    }

    /// One attribute.
    ///
    /// `data` is a value of up to 8 bytes as it lies in memory, a handle, a file descriptor
    /// (sign-extended), or an address, depending on the attribute. The low byte of `attr_data` in
    /// memory is the selector of an enum attribute.
    struct ib_uverbs_attr[16] {
        attr_id: u16 = 0,
        len: u16 = 2,
        flags: u16 = 4,
        attr_data: u16 = 6,
        data: u64 = 8,
    }
}
