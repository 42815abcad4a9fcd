//! Work queue elements (WQEs): the 16-byte segments of a request.
//!
//! `linux/mlx5/qp.h` and `linux/mlx5/device.h`. The device reads them, so numbers are big-endian; the opcode in the
//! [`mlx5_wqe_ctrl_seg`] decides which segments follow. Completions are in [`cqe`](super::cqe).

use crate::endian::{Be16, Be32, Be64};
use crate::enumeration::{flag_sets, ids, open_enums};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "linux/mlx5/qp.h";

    /// The control segment of a send WQE.
    ///
    /// `opmod_idx_opcode` is the modifier in bits 24 to 31, the WQE index in bits 8 to 23 and the
    /// [opcode](mlx5_wqe_opcode); `qpn_ds` the queue pair's number in bits 8 to 31 and the size of
    /// the WQE in units of 16 bytes. `imm` is an immediate, an rkey to invalidate or the mkey of a
    /// UMR.
    struct mlx5_wqe_ctrl_seg[16] {
        opmod_idx_opcode: Be32 = 0,
        qpn_ds: Be32 = 4,
        signature: u8 = 8,
        rsvd: [u8; 2] = 9,
        fm_ce_se: u8 = 11,
        imm: Be32 = 12,
    }

    /// The remote address of an RDMA operation or an atomic.
    struct mlx5_wqe_raddr_seg[16] {
        raddr: Be64 = 0,
        rkey: Be32 = 8,
        reserved: u32 = 12,
    }

    /// Operands of an atomic; `compare` is 0 for a fetch and add.
    struct mlx5_wqe_atomic_seg[16] {
        swap_add: Be64 = 0,
        compare: Be64 = 8,
    }

    /// Operands of a masked atomic.
    struct mlx5_wqe_masked_atomic_seg[32] {
        swap_add: Be64 = 0,
        compare: Be64 = 8,
        swap_add_mask: Be64 = 16,
        compare_mask: Be64 = 24,
    }

    /// A piece of registered memory.
    struct mlx5_wqe_data_seg[16] {
        byte_count: Be32 = 0,
        lkey: Be32 = 4,
        addr: Be64 = 8,
    }

    /// The head of inline data: its length with [`MLX5_INLINE_SEG`] set. The bytes follow, and the
    /// whole is padded to 16 bytes.
    struct mlx5_wqe_inline_seg[4] {
        byte_count: Be32 = 0,
    }

    /// The shared receive queue of an XRC request.
    struct mlx5_wqe_xrc_seg[16] {
        xrc_srqn: Be32 = 0,
        rsvd: [u8; 12] = 4,
    }

    /// An address vector.
    ///
    /// `key` is a qkey in its upper half, or a DC access key; `dqp_dct` the destination's number
    /// with [`MLX5_EXTENDED_UD_AV`] set. `rlid` is a UDP source port on RoCE. `grh_gid_fl` has bit
    /// 30 set when there is a global route, the GID index in bits 20 to 27 and the flow label
    /// below.
    struct mlx5_av[48] {
        key: Be64 = 0,
        dqp_dct: Be32 = 8,
        stat_rate_sl: u8 = 12,
        fl_mlid: u8 = 13,
        rlid: Be16 = 14,
        reserved0: [u8; 4] = 16,
        rmac: [u8; 6] = 20,
        tclass: u8 = 26,
        hop_limit: u8 = 27,
        grh_gid_fl: Be32 = 28,
        rgid: [u8; 16] = 32,
    }

    /// The destination of a datagram.
    struct mlx5_wqe_datagram_seg[48] {
        av: mlx5_av = 0,
    }

    /// Offloads and inlined headers of a raw packet. `inline_hdr` holds
    /// [`mlx5_wqe_eth_seg_inline_hdr`], whose bytes go on behind this struct.
    struct mlx5_wqe_eth_seg[16] {
        swp_outer_l4_offset: u8 = 0,
        swp_outer_l3_offset: u8 = 1,
        swp_inner_l4_offset: u8 = 2,
        swp_inner_l3_offset: u8 = 3,
        cs_flags: u8 = 4,
        swp_flags: u8 = 5,
        mss: Be16 = 6,
        flow_table_metadata: Be32 = 8,
        inline_hdr: [u8; 4] = 12,
    }

    /// Length and first bytes of the headers inlined in an Ethernet segment.
    struct mlx5_wqe_eth_seg_inline_hdr[4] of "mlx5_wqe_eth_seg.inline_hdr" {
        sz: Be16 = 0,
        start: [u8; 2] = 2,
    }

    /// The change of an mkey by a UMR. `xlt_offset` is `bsf_octowords` in some uses.
    struct mlx5_wqe_umr_ctrl_seg[48] {
        flags: u8 = 0,
        rsvd0: [u8; 3] = 1,
        xlt_octowords: Be16 = 4,
        xlt_offset: Be16 = 6,
        mkey_mask: Be64 = 8,
        xlt_offset_47_16: Be32 = 16,
        rsvd1: [u8; 28] = 20,
    }
}

layouts! {
    const DEVICE_LAYOUTS = "linux/mlx5/device.h";

    /// The first segment of a receive WQE in a shared receive queue, which links the free ones.
    struct mlx5_wqe_srq_next_seg[16] {
        rsvd0: [u8; 2] = 0,
        next_wqe_index: Be16 = 2,
        signature: u8 = 4,
        rsvd1: [u8; 11] = 5,
    }

    /// The new fields of an mkey in a UMR.
    struct mlx5_mkey_seg[64] {
        status: u8 = 0,
        pcie_control: u8 = 1,
        flags: u8 = 2,
        version: u8 = 3,
        qpn_mkey7_0: Be32 = 4,
        rsvd1: [u8; 4] = 8,
        flags_pd: Be32 = 12,
        start_addr: Be64 = 16,
        len: Be64 = 24,
        bsfs_octo_size: Be32 = 32,
        rsvd2: [u8; 16] = 36,
        xlt_oct_size: Be32 = 52,
        rsvd3: [u8; 3] = 56,
        log2_page_size: u8 = 59,
        rsvd4: [u8; 4] = 60,
    }

    /// A piece of memory in an mkey's translation list.
    struct mlx5_klm[16] {
        bcount: Be32 = 0,
        key: Be32 = 4,
        va: Be64 = 8,
    }
}

open_enums! {
    const OPCODES = "linux/mlx5/device.h";

    /// The opcode of a send WQE. The kernel leaves the enum unnamed.
    enum mlx5_wqe_opcode: u8 {
        MLX5_OPCODE_NOP = 0x00,
        MLX5_OPCODE_SEND_INVAL = 0x01,
        MLX5_OPCODE_RDMA_WRITE = 0x08,
        MLX5_OPCODE_RDMA_WRITE_IMM = 0x09,
        MLX5_OPCODE_SEND = 0x0a,
        MLX5_OPCODE_SEND_IMM = 0x0b,
        MLX5_OPCODE_LSO = 0x0e,
        MLX5_OPCODE_RDMA_READ = 0x10,
        MLX5_OPCODE_ATOMIC_CS = 0x11,
        MLX5_OPCODE_ATOMIC_FA = 0x12,
        MLX5_OPCODE_ATOMIC_MASKED_CS = 0x14,
        MLX5_OPCODE_ATOMIC_MASKED_FA = 0x15,
        MLX5_OPCODE_BIND_MW = 0x18,
        MLX5_OPCODE_UMR = 0x25,
        MLX5_OPCODE_ENHANCED_MPSW = 0x29,
    }
}

flag_sets! {
    const CTRL_FLAGS = "linux/mlx5/qp.h";

    /// Flags of a send request (`fm_ce_se`): fences are in bits 5 to 7, see
    /// [`MLX5_FENCE_MODE_FENCE`]. The kernel leaves the enum unnamed.
    enum mlx5_wqe_ctrl_flags: u8 {
        MLX5_WQE_CTRL_SOLICITED = 1 << 1,
        MLX5_WQE_CTRL_CQ_UPDATE = 2 << 2,
        MLX5_WQE_CTRL_CQ_UPDATE_AND_EQE = 3 << 2,
        MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE = 1 << 5,
    }
}

flag_sets! {
    const ETH_FLAGS = "linux/mlx5/qp.h";

    /// Fields of a raw packet that the device fills in (`cs_flags`). The kernel leaves the enum unnamed.
    enum mlx5_wqe_eth_flags: u8 {
        MLX5_ETH_WQE_L3_INNER_CSUM = 1 << 4,
        MLX5_ETH_WQE_L4_INNER_CSUM = 1 << 5,
        MLX5_ETH_WQE_L3_CSUM = 1 << 6,
        MLX5_ETH_WQE_L4_CSUM = 1 << 7,
    }
}

ids! {
    const FENCES = "linux/mlx5/qp.h";

    enum _: u8 {
        MLX5_FENCE_MODE_NONE = 0 << 5,
        MLX5_FENCE_MODE_INITIATOR_SMALL = 1 << 5,
        MLX5_FENCE_MODE_FENCE = 2 << 5,
        MLX5_FENCE_MODE_STRONG_ORDERING = 3 << 5,
        MLX5_FENCE_MODE_SMALL_AND_FENCE = 4 << 5,
    }
}

ids! {
    const SIZES = "linux/mlx5/qp.h";

    enum _: usize {
        /// The unit of a WQE's size, in bytes.
        MLX5_SEND_WQE_DS = 16,
        /// The unit of a send queue, in bytes.
        MLX5_SEND_WQE_BB = 64,
    }

    enum _: usize {
        /// The largest WQE, in units of [`MLX5_SEND_WQE_BB`].
        MLX5_SEND_WQE_MAX_WQEBBS = 16,
    }

    enum _: usize {
        /// The word of a doorbell record that counts receive requests.
        MLX5_RCV_DBR = 0,
        /// The word of a doorbell record that counts send requests.
        MLX5_SND_DBR = 1,
    }
}

ids! {
    const MARKS = "linux/mlx5/device.h";

    enum _: u32 {
        /// Set in the length of inline data.
        MLX5_INLINE_SEG = 0x8000_0000,
    }

    enum _: u32 {
        /// Set in the destination of a datagram: the address vector has 48 bytes.
        MLX5_EXTENDED_UD_AV = 0x8000_0000,
    }

    enum _: u8 {
        MLX5_UMR_TRANSLATION_OFFSET_EN = 1 << 4,
        MLX5_UMR_CHECK_NOT_FREE = 1 << 5,
        MLX5_UMR_CHECK_FREE = 2 << 5,
        MLX5_UMR_INLINE = 1 << 7,
    }
}

ids! {
    const DEFINES = "linux/mlx5/qp.h";

    enum "#define": u32 {
        /// The key that ends the list of SGEs in a receive WQE.
        MLX5_TERMINATE_SCATTER_LIST_LKEY = 0x100,
    }
}
