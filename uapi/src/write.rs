//! The commands of the older write interface: numbers and headers.
//!
//! The library sends them through the ioctl method `UVERBS_METHOD_INVOKE_WRITE`, which takes the
//! number and the command struct but no header. `rdma/ib_user_verbs.h`.

use crate::enumeration::ids;
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// Header of a command given to `write(2)`; word counts are in units of 4 bytes.
    struct ib_uverbs_cmd_hdr[8] {
        command: u32 = 0,
        in_words: u16 = 4,
        out_words: u16 = 6,
    }

    /// Second header of an extended command; its word counts are in units of 8 bytes.
    struct ib_uverbs_ex_cmd_hdr[16] {
        response: u64 = 0,
        provider_in_words: u16 = 8,
        provider_out_words: u16 = 10,
        cmd_hdr_reserved: u32 = 12,
    }
}

ids! {
    const COMMANDS = "rdma/ib_user_verbs.h";

    enum ib_uverbs_write_cmds: u32 {
        IB_USER_VERBS_CMD_GET_CONTEXT = 0,
        IB_USER_VERBS_CMD_QUERY_DEVICE = 1,
        IB_USER_VERBS_CMD_QUERY_PORT = 2,
        IB_USER_VERBS_CMD_ALLOC_PD = 3,
        IB_USER_VERBS_CMD_DEALLOC_PD = 4,
        IB_USER_VERBS_CMD_CREATE_AH = 5,
        IB_USER_VERBS_CMD_MODIFY_AH = 6,
        IB_USER_VERBS_CMD_QUERY_AH = 7,
        IB_USER_VERBS_CMD_DESTROY_AH = 8,
        IB_USER_VERBS_CMD_REG_MR = 9,
        IB_USER_VERBS_CMD_REG_SMR = 10,
        IB_USER_VERBS_CMD_REREG_MR = 11,
        IB_USER_VERBS_CMD_QUERY_MR = 12,
        IB_USER_VERBS_CMD_DEREG_MR = 13,
        IB_USER_VERBS_CMD_ALLOC_MW = 14,
        IB_USER_VERBS_CMD_BIND_MW = 15,
        IB_USER_VERBS_CMD_DEALLOC_MW = 16,
        IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL = 17,
        IB_USER_VERBS_CMD_CREATE_CQ = 18,
        IB_USER_VERBS_CMD_RESIZE_CQ = 19,
        IB_USER_VERBS_CMD_DESTROY_CQ = 20,
        IB_USER_VERBS_CMD_POLL_CQ = 21,
        IB_USER_VERBS_CMD_PEEK_CQ = 22,
        IB_USER_VERBS_CMD_REQ_NOTIFY_CQ = 23,
        IB_USER_VERBS_CMD_CREATE_QP = 24,
        IB_USER_VERBS_CMD_QUERY_QP = 25,
        IB_USER_VERBS_CMD_MODIFY_QP = 26,
        IB_USER_VERBS_CMD_DESTROY_QP = 27,
        IB_USER_VERBS_CMD_POST_SEND = 28,
        IB_USER_VERBS_CMD_POST_RECV = 29,
        IB_USER_VERBS_CMD_ATTACH_MCAST = 30,
        IB_USER_VERBS_CMD_DETACH_MCAST = 31,
        IB_USER_VERBS_CMD_CREATE_SRQ = 32,
        IB_USER_VERBS_CMD_MODIFY_SRQ = 33,
        IB_USER_VERBS_CMD_QUERY_SRQ = 34,
        IB_USER_VERBS_CMD_DESTROY_SRQ = 35,
        IB_USER_VERBS_CMD_POST_SRQ_RECV = 36,
        IB_USER_VERBS_CMD_OPEN_XRCD = 37,
        IB_USER_VERBS_CMD_CLOSE_XRCD = 38,
        IB_USER_VERBS_CMD_CREATE_XSRQ = 39,
        IB_USER_VERBS_CMD_OPEN_QP = 40,
    }

    enum _: u32 {
        IB_USER_VERBS_EX_CMD_QUERY_DEVICE = 1,
        IB_USER_VERBS_EX_CMD_CREATE_CQ = 18,
        IB_USER_VERBS_EX_CMD_CREATE_QP = 24,
        IB_USER_VERBS_EX_CMD_MODIFY_QP = 26,
        IB_USER_VERBS_EX_CMD_CREATE_FLOW = 50,
        IB_USER_VERBS_EX_CMD_DESTROY_FLOW = 51,
        IB_USER_VERBS_EX_CMD_CREATE_WQ = 52,
        IB_USER_VERBS_EX_CMD_MODIFY_WQ = 53,
        IB_USER_VERBS_EX_CMD_DESTROY_WQ = 54,
        IB_USER_VERBS_EX_CMD_CREATE_RWQ_IND_TBL = 55,
        IB_USER_VERBS_EX_CMD_DESTROY_RWQ_IND_TBL = 56,
        IB_USER_VERBS_EX_CMD_MODIFY_CQ = 57,
    }
}

ids! {
    const DEFINES = "rdma/ib_user_verbs.h";

    enum "#define": u32 {
        /// The commands of the plain table.
        IB_USER_VERBS_CMD_COMMAND_MASK = 0xff,
        /// Set in a command number to mean the table of extended commands.
        IB_USER_VERBS_CMD_FLAG_EXTENDED = 0x8000_0000,
    }
}
