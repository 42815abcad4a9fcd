//! Completion queue elements. `linux/mlx5/device.h`, `linux/mlx5/cq.h`.
//!
//! The device writes them, so numbers are big-endian. The last byte has the opcode in bits 4 to 7 and the owner bit in
//! bit 0.

use crate::endian::{Be16, Be32};
use crate::enumeration::{flag_sets, ids, open_enums};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "linux/mlx5/device.h";

    /// A completion.
    ///
    /// `flags_rqpn` has the global-route bits in 28 and 29, the service level in 24 to 27 and the
    /// remote queue pair below; `sop_drop_qpn` the opcode of the request in bits 24 to 31 and the
    /// queue pair below. `srqn` is a user index where the context asked for it. `immediate` is also
    /// an invalidated rkey or a pkey. `lro` and the fields after it are only written for raw packets.
    struct mlx5_cqe64[64] {
        tls_outer_l3_tunneled: u8 = 0,
        rsvd0: u8 = 1,
        wqe_id: Be16 = 2,
        lro: [u8; 8] = 4,
        rss_hash_result: Be32 = 12,
        rss_hash_type: u8 = 16,
        ml_path: u8 = 17,
        rsvd20: [u8; 2] = 18,
        check_sum: Be16 = 20,
        slid: Be16 = 22,
        flags_rqpn: Be32 = 24,
        hds_ip_ext: u8 = 28,
        l4_l3_hdr_type: u8 = 29,
        vlan_info: Be16 = 30,
        srqn: Be32 = 32,
        immediate: Be32 = 36,
        rsvd40: [u8; 4] = 40,
        byte_cnt: Be32 = 44,
        timestamp_h: Be32 = 48,
        timestamp_l: Be32 = 52,
        sop_drop_qpn: Be32 = 56,
        wqe_counter: Be16 = 60,
        signature: u8 = 62,
        op_own: u8 = 63,
    }

    /// A completion with an error: `syndrome` is an [`mlx5_cqe_syndrome`].
    struct mlx5_err_cqe[64] {
        rsvd0: [u8; 32] = 0,
        srqn: Be32 = 32,
        rsvd1: [u8; 18] = 36,
        vendor_err_synd: u8 = 54,
        syndrome: u8 = 55,
        s_wqe_opcode_qpn: Be32 = 56,
        wqe_counter: Be16 = 60,
        signature: u8 = 62,
        op_own: u8 = 63,
    }

    /// A completion in an element of 128 bytes; `inl_grh` is data scattered into it, or a global
    /// route.
    struct mlx5_cqe128[128] {
        inl_grh: [u8; 64] = 0,
        cqe64: mlx5_cqe64 = 64,
    }

    /// A completion in a compressed element, which holds eight of them.
    struct mlx5_mini_cqe8[8] {
        rx_hash_result: Be32 = 0,
        byte_cnt: Be32 = 4,
    }
}

open_enums! {
    const OPCODES = "linux/mlx5/cq.h";

    /// The kind of CQE (`op_own >> 4`). The kernel leaves the enum unnamed.
    enum mlx5_cqe_opcode: u8 {
        MLX5_CQE_REQ = 0,
        MLX5_CQE_RESP_WR_IMM = 1,
        MLX5_CQE_RESP_SEND = 2,
        MLX5_CQE_RESP_SEND_IMM = 3,
        MLX5_CQE_RESP_SEND_INV = 4,
        MLX5_CQE_RESIZE_CQ = 5,
        MLX5_CQE_SIG_ERR = 12,
        MLX5_CQE_REQ_ERR = 13,
        MLX5_CQE_RESP_ERR = 14,
        MLX5_CQE_INVALID = 15,
    }

    /// The syndrome of a failed request. The kernel leaves the enum unnamed.
    enum mlx5_cqe_syndrome: u8 {
        MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR = 0x01,
        MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR = 0x02,
        MLX5_CQE_SYNDROME_LOCAL_PROT_ERR = 0x04,
        MLX5_CQE_SYNDROME_WR_FLUSH_ERR = 0x05,
        MLX5_CQE_SYNDROME_MW_BIND_ERR = 0x06,
        MLX5_CQE_SYNDROME_BAD_RESP_ERR = 0x10,
        MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR = 0x11,
        MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR = 0x12,
        MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR = 0x13,
        MLX5_CQE_SYNDROME_REMOTE_OP_ERR = 0x14,
        MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR = 0x15,
        MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR = 0x16,
        MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR = 0x22,
    }
}

flag_sets! {
    const CHECKED = "linux/mlx5/device.h";

    /// Headers of a raw packet that the device found right (`hds_ip_ext`). The kernel leaves the
    /// enum unnamed.
    enum mlx5_cqe_checked: u8 {
        CQE_L2_OK = 1 << 0,
        CQE_L3_OK = 1 << 1,
        CQE_L4_OK = 1 << 2,
    }
}

ids! {
    const MARKS = "linux/mlx5/cq.h";

    enum _: u8 {
        /// The owner bit of the last byte; software owns an element when the bit equals the parity
        /// of its pass over the ring.
        MLX5_CQE_OWNER_MASK = 1,
    }

    enum _: u32 {
        /// Arms a queue for any completion.
        MLX5_CQ_DB_REQ_NOT = 0 << 24,
        /// Arms a queue for solicited completions and errors.
        MLX5_CQ_DB_REQ_NOT_SOL = 1 << 24,
    }
}
