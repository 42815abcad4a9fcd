//! Work completions as rxe's rings and the poll command carry them. `rdma/ib_user_verbs.h`.

use crate::enumeration::{flag_sets, open_enums};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// A completion. `ex` holds the immediate in network order or, as a number, the invalidated
    /// rkey.
    struct ib_uverbs_wc[48] {
        wr_id: u64 = 0,
        status: u32 = 8,
        opcode: u32 = 12,
        vendor_err: u32 = 16,
        byte_len: u32 = 20,
        ex: u32 = 24,
        qp_num: u32 = 28,
        src_qp: u32 = 32,
        wc_flags: u32 = 36,
        pkey_index: u16 = 40,
        slid: u16 = 42,
        sl: u8 = 44,
        dlid_path_bits: u8 = 45,
        port_num: u8 = 46,
        reserved: u8 = 47,
    }
}

open_enums! {
    const OPCODES = "rdma/ib_user_verbs.h";

    /// The operation of a completed send request.
    enum ib_uverbs_wc_opcode: u32 {
        IB_UVERBS_WC_SEND = 0,
        IB_UVERBS_WC_RDMA_WRITE = 1,
        IB_UVERBS_WC_RDMA_READ = 2,
        IB_UVERBS_WC_COMP_SWAP = 3,
        IB_UVERBS_WC_FETCH_ADD = 4,
        IB_UVERBS_WC_BIND_MW = 5,
        IB_UVERBS_WC_LOCAL_INV = 6,
        IB_UVERBS_WC_TSO = 7,
        IB_UVERBS_WC_FLUSH = 8,
        IB_UVERBS_WC_ATOMIC_WRITE = 9,
    }
}

open_enums! {
    const STATUSES = "rdma/ib_verbs.h";

    /// The status of a completed request.
    enum ib_wc_status: u32 {
        IB_WC_SUCCESS = 0,
        IB_WC_LOC_LEN_ERR = 1,
        IB_WC_LOC_QP_OP_ERR = 2,
        IB_WC_LOC_EEC_OP_ERR = 3,
        IB_WC_LOC_PROT_ERR = 4,
        IB_WC_WR_FLUSH_ERR = 5,
        IB_WC_MW_BIND_ERR = 6,
        IB_WC_BAD_RESP_ERR = 7,
        IB_WC_LOC_ACCESS_ERR = 8,
        IB_WC_REM_INV_REQ_ERR = 9,
        IB_WC_REM_ACCESS_ERR = 10,
        IB_WC_REM_OP_ERR = 11,
        IB_WC_RETRY_EXC_ERR = 12,
        IB_WC_RNR_RETRY_EXC_ERR = 13,
        IB_WC_LOC_RDD_VIOL_ERR = 14,
        IB_WC_REM_INV_RD_REQ_ERR = 15,
        IB_WC_REM_ABORT_ERR = 16,
        IB_WC_INV_EECN_ERR = 17,
        IB_WC_INV_EEC_STATE_ERR = 18,
        IB_WC_FATAL_ERR = 19,
        IB_WC_RESP_TIMEOUT_ERR = 20,
        IB_WC_GENERAL_ERR = 21,
    }
}

open_enums! {
    const KERNEL_OPCODES = "rdma/ib_verbs.h";

    /// The operation of a completed request, receives included. The values of [`ib_uverbs_wc_opcode`] are the
    /// same.
    enum ib_wc_opcode: u32 {
        IB_WC_SEND = 0,
        IB_WC_RDMA_WRITE = 1,
        IB_WC_RDMA_READ = 2,
        IB_WC_COMP_SWAP = 3,
        IB_WC_FETCH_ADD = 4,
        IB_WC_BIND_MW = 5,
        IB_WC_LOCAL_INV = 6,
        IB_WC_LSO = 7,
        IB_WC_ATOMIC_WRITE = 9,
        IB_WC_FLUSH = 8,
        IB_WC_RECV = 128,
        IB_WC_RECV_RDMA_WITH_IMM = 129,
    }
}

flag_sets! {
    const FLAGS = "rdma/ib_verbs.h";

    /// Flags of a completion.
    enum ib_wc_flags: u32 {
        IB_WC_GRH = 1 << 0,
        IB_WC_WITH_IMM = 1 << 1,
        IB_WC_WITH_INVALIDATE = 1 << 2,
        IB_WC_IP_CSUM_OK = 1 << 3,
        IB_WC_WITH_SMAC = 1 << 4,
        IB_WC_WITH_VLAN = 1 << 5,
        IB_WC_WITH_NETWORK_HDR_TYPE = 1 << 6,
    }
}
