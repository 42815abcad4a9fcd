//! The driver's part of the commands on protection domains, queues, windows and address handles.
//!
//! `rdma/mlx5-abi.h`. The driver's part of a context is in [`context`](super::context).

use crate::enumeration::flag_sets;
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/mlx5-abi.h";

    /// Answer to allocating a protection domain: its number in hardware.
    struct mlx5_ib_alloc_pd_resp[4] {
        pdn: u32 = 0,
    }

    /// Sent with creating a completion queue. `cqe_size` is 64 or 128 bytes.
    struct mlx5_ib_create_cq[32] {
        buf_addr: u64 = 0,
        db_addr: u64 = 8,
        cqe_size: u32 = 16,
        cqe_comp_en: u8 = 20,
        cqe_comp_res_format: u8 = 21,
        flags: u16 = 22,
        uar_page_index: u16 = 24,
        reserved0: u16 = 26,
        reserved1: u32 = 28,
    }

    /// Answer to creating a completion queue.
    struct mlx5_ib_create_cq_resp[8] {
        cqn: u32 = 0,
        reserved: u32 = 4,
    }

    /// Sent with resizing a completion queue.
    struct mlx5_ib_resize_cq[16] {
        buf_addr: u64 = 0,
        cqe_size: u16 = 8,
        reserved0: u16 = 10,
        reserved1: u32 = 12,
    }

    /// Sent with creating a shared receive queue.
    struct mlx5_ib_create_srq[32] {
        buf_addr: u64 = 0,
        db_addr: u64 = 8,
        flags: u32 = 16,
        reserved0: u32 = 20,
        uidx: u32 = 24,
        reserved1: u32 = 28,
    }

    /// Answer to creating a shared receive queue.
    struct mlx5_ib_create_srq_resp[8] {
        srqn: u32 = 0,
        reserved: u32 = 4,
    }

    /// Streams of a DC initiator (the kernel misspells `concurrent`).
    struct mlx5_ib_create_qp_dci_streams[2] {
        log_num_concurent: u8 = 0,
        log_num_errored: u8 = 1,
    }

    /// Sent with creating a queue pair. For a DC target, `sq_buf_addr` is the access key.
    struct mlx5_ib_create_qp[56] {
        buf_addr: u64 = 0,
        db_addr: u64 = 8,
        sq_wqe_count: u32 = 16,
        rq_wqe_count: u32 = 20,
        rq_wqe_shift: u32 = 24,
        flags: u32 = 28,
        uidx: u32 = 32,
        bfreg_index: u32 = 36,
        sq_buf_addr: u64 = 40,
        ece_options: u32 = 48,
        dci_streams: mlx5_ib_create_qp_dci_streams = 52,
        reserved: u16 = 54,
    }

    /// Sent with creating a queue pair that spreads packets over an indirection table.
    struct mlx5_ib_create_qp_rss[152] {
        rx_hash_fields_mask: u64 = 0,
        rx_hash_function: u8 = 8,
        rx_key_len: u8 = 9,
        reserved: [u8; 6] = 10,
        rx_hash_key: [u8; 128] = 16,
        comp_mask: u32 = 144,
        flags: u32 = 148,
    }

    /// Answer to creating a queue pair.
    struct mlx5_ib_create_qp_resp[40] {
        bfreg_index: u32 = 0,
        ece_options: u32 = 4,
        comp_mask: u32 = 8,
        tirn: u32 = 12,
        tisn: u32 = 16,
        rqn: u32 = 20,
        sqn: u32 = 24,
        reserved1: u32 = 28,
        tir_icm_addr: u64 = 32,
    }

    /// Bursts of a paced queue; sizes are in bytes.
    struct mlx5_ib_burst_info[8] {
        max_burst_sz: u32 = 0,
        typical_pkt_sz: u16 = 4,
        reserved: u16 = 6,
    }

    /// Sent with modifying a queue pair.
    struct mlx5_ib_modify_qp[16] {
        comp_mask: u32 = 0,
        burst_info: mlx5_ib_burst_info = 4,
        ece_options: u32 = 12,
    }

    /// Answer to modifying a queue pair.
    struct mlx5_ib_modify_qp_resp[16] {
        response_length: u32 = 0,
        dctn: u32 = 4,
        ece_options: u32 = 8,
        reserved: u32 = 12,
    }

    /// Sent with allocating a memory window.
    struct mlx5_ib_alloc_mw[8] {
        comp_mask: u32 = 0,
        num_klms: u8 = 4,
        reserved1: u8 = 5,
        reserved2: u16 = 6,
    }

    /// Sent with creating a work queue.
    struct mlx5_ib_create_wq[48] {
        buf_addr: u64 = 0,
        db_addr: u64 = 8,
        rq_wqe_count: u32 = 16,
        rq_wqe_shift: u32 = 20,
        user_index: u32 = 24,
        flags: u32 = 28,
        comp_mask: u32 = 32,
        single_stride_log_num_of_bytes: u32 = 36,
        single_wqe_log_num_of_strides: u32 = 40,
        two_byte_shift_en: u32 = 44,
    }

    /// Answer to creating a work queue.
    struct mlx5_ib_create_wq_resp[8] {
        response_length: u32 = 0,
        reserved: u32 = 4,
    }

    /// Sent with modifying a work queue.
    struct mlx5_ib_modify_wq[8] {
        comp_mask: u32 = 0,
        reserved: u32 = 4,
    }

    /// Answer to creating an indirection table.
    struct mlx5_ib_create_rwq_ind_tbl_resp[8] {
        response_length: u32 = 0,
        reserved: u32 = 4,
    }

    /// Answer to creating an address handle: on RoCE, the destination MAC the kernel resolved.
    struct mlx5_ib_create_ah_resp[16] {
        response_length: u32 = 0,
        dmac: [u8; 6] = 4,
        reserved: [u8; 6] = 10,
    }

    /// A counter of a flow: the counted value, and its index in the counters object.
    struct mlx5_ib_flow_counters_desc[8] {
        description: u32 = 0,
        index: u32 = 4,
    }

    /// A list of counter descriptions at an address of this process.
    struct mlx5_ib_flow_counters_data[16] {
        counters_data: u64 = 0,
        ncounters: u32 = 8,
        reserved: u32 = 12,
    }

    /// Sent with creating a flow, before [`mlx5_ib_flow_counters_data`].
    struct mlx5_ib_create_flow[8] {
        ncounters_data: u32 = 0,
        reserved: u32 = 4,
    }
}

flag_sets! {
    const FLAGS = "rdma/mlx5-abi.h";

    /// Flags of [`mlx5_ib_create_qp`]; the kernel leaves the enum unnamed.
    enum mlx5_qp_flags: u32 {
        MLX5_QP_FLAG_SIGNATURE = 1 << 0,
        MLX5_QP_FLAG_SCATTER_CQE = 1 << 1,
        MLX5_QP_FLAG_TUNNEL_OFFLOADS = 1 << 2,
        MLX5_QP_FLAG_BFREG_INDEX = 1 << 3,
        MLX5_QP_FLAG_TYPE_DCT = 1 << 4,
        MLX5_QP_FLAG_TYPE_DCI = 1 << 5,
        MLX5_QP_FLAG_TIR_ALLOW_SELF_LB_UC = 1 << 6,
        MLX5_QP_FLAG_TIR_ALLOW_SELF_LB_MC = 1 << 7,
        MLX5_QP_FLAG_ALLOW_SCATTER_CQE = 1 << 8,
        MLX5_QP_FLAG_PACKET_BASED_CREDIT_MODE = 1 << 9,
        MLX5_QP_FLAG_UAR_PAGE_INDEX = 1 << 10,
        MLX5_QP_FLAG_DCI_STREAM = 1 << 11,
    }

    /// Flags of [`mlx5_ib_create_srq`]; the kernel leaves the enum unnamed.
    enum mlx5_srq_flags: u32 {
        MLX5_SRQ_FLAG_SIGNATURE = 1 << 0,
    }

    /// Flags of [`mlx5_ib_create_wq`]; the kernel leaves the enum unnamed.
    enum mlx5_wq_flags: u32 {
        MLX5_WQ_FLAG_SIGNATURE = 1 << 0,
    }

    /// Fields of [`mlx5_ib_create_qp_resp`] that are valid.
    enum mlx5_ib_create_qp_resp_mask: u32 {
        MLX5_IB_CREATE_QP_RESP_MASK_TIRN = 1 << 0,
        MLX5_IB_CREATE_QP_RESP_MASK_TISN = 1 << 1,
        MLX5_IB_CREATE_QP_RESP_MASK_RQN = 1 << 2,
        MLX5_IB_CREATE_QP_RESP_MASK_SQN = 1 << 3,
        MLX5_IB_CREATE_QP_RESP_MASK_TIR_ICM_ADDR = 1 << 4,
    }

    /// Fields of [`mlx5_ib_create_wq`] that are in use.
    enum mlx5_ib_create_wq_mask: u32 {
        MLX5_IB_CREATE_WQ_STRIDING_RQ = 1 << 0,
    }

    /// Fields of [`mlx5_ib_modify_qp`] that are in use.
    enum mlx5_ib_modify_qp_mask: u32 {
        MLX5_IB_MODIFY_QP_OOO_DP = 1 << 0,
    }
}

flag_sets! {
    const FLAGS16 = "rdma/mlx5-abi.h";

    /// Flags of [`mlx5_ib_create_cq`].
    enum mlx5_ib_create_cq_flags: u16 {
        MLX5_IB_CREATE_CQ_FLAGS_CQE_128B_PAD = 1 << 0,
        MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX = 1 << 1,
        MLX5_IB_CREATE_CQ_FLAGS_REAL_TIME_TS = 1 << 2,
    }
}
