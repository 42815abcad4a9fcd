//! The driver's part of creating a context and of querying a device's capabilities; its clock page.
//!
//! `rdma/mlx5-abi.h`, `rdma/mlx5_user_ioctl_verbs.h`.

use crate::enumeration::{flag_sets, ids, open_enums};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/mlx5-abi.h";

    /// The request of the first version of the ABI with `UVERBS_METHOD_GET_CONTEXT`.
    struct mlx5_ib_alloc_ucontext_req[8] {
        total_num_bfregs: u32 = 0,
        num_low_latency_bfregs: u32 = 4,
    }

    /// Sent with `UVERBS_METHOD_GET_CONTEXT`.
    struct mlx5_ib_alloc_ucontext_req_v2[32] {
        total_num_bfregs: u32 = 0,
        num_low_latency_bfregs: u32 = 4,
        flags: u32 = 8,
        comp_mask: u32 = 12,
        max_cqe_version: u8 = 16,
        reserved0: u8 = 17,
        reserved1: u16 = 18,
        reserved2: u32 = 20,
        lib_caps: u64 = 24,
    }

    /// Answer to `UVERBS_METHOD_GET_CONTEXT` and `UVERBS_METHOD_QUERY_CONTEXT`. `tot_bfregs` is 0
    /// when UARs are allocated as objects; `log_uar_size` is in bytes, `hca_core_clock_offset` an
    /// offset into the page of the clock.
    struct mlx5_ib_alloc_ucontext_resp[72] {
        qp_tab_size: u32 = 0,
        bf_reg_size: u32 = 4,
        tot_bfregs: u32 = 8,
        cache_line_size: u32 = 12,
        max_sq_desc_sz: u16 = 16,
        max_rq_desc_sz: u16 = 18,
        max_send_wqebb: u32 = 20,
        max_recv_wr: u32 = 24,
        max_srq_recv_wr: u32 = 28,
        num_ports: u16 = 32,
        flow_action_flags: u16 = 34,
        comp_mask: u32 = 36,
        response_length: u32 = 40,
        cqe_version: u8 = 44,
        cmds_supp_uhw: u8 = 45,
        eth_min_inline: u8 = 46,
        clock_info_versions: u8 = 47,
        hca_core_clock_offset: u64 = 48,
        log_uar_size: u32 = 56,
        num_uars_per_page: u32 = 60,
        num_dyn_bfregs: u32 = 64,
        dump_fill_mkey: u32 = 68,
    }

    /// Limits of TCP segmentation; `max_tso` is in bytes.
    struct mlx5_ib_tso_caps[8] {
        max_tso: u32 = 0,
        supported_qpts: u32 = 4,
    }

    /// Capabilities of receive-side scaling.
    struct mlx5_ib_rss_caps[16] {
        rx_hash_fields_mask: u64 = 0,
        rx_hash_function: u8 = 8,
        reserved: [u8; 7] = 9,
    }

    /// Capabilities of completion compression.
    struct mlx5_ib_cqe_comp_caps[8] {
        max_num: u32 = 0,
        supported_format: u32 = 4,
    }

    /// Limits of packet pacing, in kbit/s.
    struct mlx5_packet_pacing_caps[16] {
        qp_rate_limit_min: u32 = 0,
        qp_rate_limit_max: u32 = 4,
        supported_qpts: u32 = 8,
        cap_flags: u8 = 12,
        reserved: [u8; 3] = 13,
    }

    /// Capabilities of header parsing by software.
    struct mlx5_ib_sw_parsing_caps[8] {
        sw_parsing_offloads: u32 = 0,
        supported_qpts: u32 = 4,
    }

    /// Limits of striding receive queues.
    struct mlx5_ib_striding_rq_caps[24] {
        min_single_stride_log_num_of_bytes: u32 = 0,
        max_single_stride_log_num_of_bytes: u32 = 4,
        min_single_wqe_log_num_of_strides: u32 = 8,
        max_single_wqe_log_num_of_strides: u32 = 12,
        supported_qpts: u32 = 16,
        reserved: u32 = 20,
    }

    /// Limits of streams of a DC initiator (the kernel misspells `concurrent`).
    struct mlx5_ib_dci_streams_caps[2] {
        max_log_num_concurent: u8 = 0,
        max_log_num_errored: u8 = 1,
    }

    /// Answer with `IB_USER_VERBS_EX_CMD_QUERY_DEVICE`.
    struct mlx5_ib_query_device_resp[112] {
        comp_mask: u32 = 0,
        response_length: u32 = 4,
        tso_caps: mlx5_ib_tso_caps = 8,
        rss_caps: mlx5_ib_rss_caps = 16,
        cqe_comp_caps: mlx5_ib_cqe_comp_caps = 32,
        packet_pacing_caps: mlx5_packet_pacing_caps = 40,
        mlx5_ib_support_multi_pkt_send_wqes: u32 = 56,
        flags: u32 = 60,
        sw_parsing_caps: mlx5_ib_sw_parsing_caps = 64,
        striding_rq_caps: mlx5_ib_striding_rq_caps = 72,
        tunnel_offloads_caps: u32 = 96,
        dci_streams_caps: mlx5_ib_dci_streams_caps = 100,
        reserved: u16 = 102,
        reg_c0: mlx5_ib_uapi_reg = 104,
    }

    /// The page that turns device time into nanoseconds. While `sign` is odd, the kernel is writing the page.
    struct mlx5_ib_clock_info[56] {
        sign: u32 = 0,
        resv: u32 = 4,
        nsec: u64 = 8,
        cycles: u64 = 16,
        frac: u64 = 24,
        mult: u32 = 32,
        shift: u32 = 36,
        mask: u64 = 40,
        overflow_period: u64 = 48,
    }
}

layouts! {
    const LAYOUTS_IOCTL = "rdma/mlx5_user_ioctl_verbs.h";

    /// A metadata register: a value under a mask.
    struct mlx5_ib_uapi_reg[8] {
        value: u32 = 0,
        mask: u32 = 4,
    }
}

flag_sets! {
    const LIB_CAPS = "rdma/mlx5-abi.h";

    /// Features of the user-space library (`lib_caps`).
    enum mlx5_lib_caps: u64 {
        MLX5_LIB_CAP_4K_UAR = 1 << 0,
        MLX5_LIB_CAP_DYN_UAR = 1 << 1,
    }
}

flag_sets! {
    const FLAGS = "rdma/mlx5-abi.h";

    /// Flags of a context.
    enum mlx5_ib_alloc_uctx_v2_flags: u32 {
        MLX5_IB_ALLOC_UCTX_DEVX = 1 << 0,
    }

    /// Fields of the response that are valid, and capabilities (`comp_mask`).
    enum mlx5_ib_alloc_ucontext_resp_mask: u32 {
        MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_CORE_CLOCK_OFFSET = 1 << 0,
        MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_DUMP_FILL_MKEY = 1 << 1,
        MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_ECE = 1 << 2,
        MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_SQD2RTS = 1 << 3,
        MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_REAL_TIME_TS = 1 << 4,
        MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_MKEY_UPDATE_TAG = 1 << 5,
    }

    /// Capabilities of sending several packets in one request.
    enum mlx5_ib_mpw_caps: u32 {
        MLX5_IB_ALLOW_MPW = 1 << 1,
        MLX5_IB_SUPPORT_EMPW = 1 << 2,
    }

    /// Capabilities of header parsing by software.
    enum mlx5_ib_sw_parsing_offloads: u32 {
        MLX5_IB_SW_PARSING = 1 << 0,
        MLX5_IB_SW_PARSING_CSUM = 1 << 1,
        MLX5_IB_SW_PARSING_LSO = 1 << 2,
    }

    /// Capabilities of a device (`flags`).
    enum mlx5_ib_query_dev_resp_flags: u32 {
        MLX5_IB_QUERY_DEV_RESP_FLAGS_CQE_128B_COMP = 1 << 0,
        MLX5_IB_QUERY_DEV_RESP_FLAGS_CQE_128B_PAD = 1 << 1,
        MLX5_IB_QUERY_DEV_RESP_PACKET_BASED_CREDIT_MODE = 1 << 2,
        MLX5_IB_QUERY_DEV_RESP_FLAGS_SCAT2CQE_DCT = 1 << 3,
        MLX5_IB_QUERY_DEV_RESP_FLAGS_OOO_DP = 1 << 4,
    }

    /// Tunnels whose inner headers a device can parse.
    enum mlx5_ib_tunnel_offloads: u32 {
        MLX5_IB_TUNNELED_OFFLOADS_VXLAN = 1 << 0,
        MLX5_IB_TUNNELED_OFFLOADS_GRE = 1 << 1,
        MLX5_IB_TUNNELED_OFFLOADS_GENEVE = 1 << 2,
        MLX5_IB_TUNNELED_OFFLOADS_MPLS_GRE = 1 << 3,
        MLX5_IB_TUNNELED_OFFLOADS_MPLS_UDP = 1 << 4,
    }

    /// Header fields that are hashed.
    enum mlx5_rx_hash_fields: u32 {
        MLX5_RX_HASH_SRC_IPV4 = 1 << 0,
        MLX5_RX_HASH_DST_IPV4 = 1 << 1,
        MLX5_RX_HASH_SRC_IPV6 = 1 << 2,
        MLX5_RX_HASH_DST_IPV6 = 1 << 3,
        MLX5_RX_HASH_SRC_PORT_TCP = 1 << 4,
        MLX5_RX_HASH_DST_PORT_TCP = 1 << 5,
        MLX5_RX_HASH_SRC_PORT_UDP = 1 << 6,
        MLX5_RX_HASH_DST_PORT_UDP = 1 << 7,
        MLX5_RX_HASH_IPSEC_SPI = 1 << 8,
        MLX5_RX_HASH_INNER = 1 << 31,
    }
}

flag_sets! {
    const FLAGS8 = "rdma/mlx5-abi.h";

    /// Commands that take a driver part (`cmds_supp_uhw`).
    enum mlx5_user_cmds_supp_uhw: u8 {
        MLX5_USER_CMDS_SUPP_UHW_QUERY_DEVICE = 1 << 0,
        MLX5_USER_CMDS_SUPP_UHW_CREATE_AH = 1 << 1,
    }

    /// Formats of compressed completions.
    enum mlx5_ib_cqe_comp_res_format: u8 {
        MLX5_IB_CQE_RES_FORMAT_HASH = 1 << 0,
        MLX5_IB_CQE_RES_FORMAT_CSUM = 1 << 1,
        MLX5_IB_CQE_RES_FORMAT_CSUM_STRIDX = 1 << 2,
    }

    /// Capabilities of packet pacing.
    enum mlx5_ib_packet_pacing_cap_flags: u8 {
        MLX5_IB_PP_SUPPORT_BURST = 1 << 0,
    }

    /// Hash functions.
    enum mlx5_rx_hash_function_flags: u8 {
        MLX5_RX_HASH_FUNC_TOEPLITZ = 1 << 0,
    }
}

flag_sets! {
    const FLOW_ACTION_FLAGS = "rdma/mlx5-abi.h";

    /// Features of IPsec actions (`flow_action_flags`); the kernel leaves the enum unnamed.
    enum mlx5_user_alloc_ucontext_flow_action_flags: u16 {
        MLX5_USER_ALLOC_UCONTEXT_FLOW_ACTION_FLAGS_ESP_AES_GCM = 1 << 0,
        MLX5_USER_ALLOC_UCONTEXT_FLOW_ACTION_FLAGS_ESP_AES_GCM_REQ_METADATA = 1 << 1,
        MLX5_USER_ALLOC_UCONTEXT_FLOW_ACTION_FLAGS_ESP_AES_GCM_SPI_STEERING = 1 << 2,
        MLX5_USER_ALLOC_UCONTEXT_FLOW_ACTION_FLAGS_ESP_AES_GCM_FULL_OFFLOAD = 1 << 3,
        MLX5_USER_ALLOC_UCONTEXT_FLOW_ACTION_FLAGS_ESP_AES_GCM_TX_IV_IS_ESN = 1 << 4,
    }
}

open_enums! {
    const INLINE_MODES = "rdma/mlx5-abi.h";

    /// The headers of a raw packet that must be inline (`eth_min_inline`).
    enum mlx5_user_inline_mode: u8 {
        MLX5_USER_INLINE_MODE_NA = 0,
        MLX5_USER_INLINE_MODE_NONE = 1,
        MLX5_USER_INLINE_MODE_L2 = 2,
        MLX5_USER_INLINE_MODE_IP = 3,
        MLX5_USER_INLINE_MODE_TCP_UDP = 4,
    }
}

ids! {
    const IDS = "rdma/mlx5-abi.h";

    enum mlx5_ib_mmap_cmd: u32 {
        MLX5_IB_MMAP_REGULAR_PAGE = 0,
        MLX5_IB_MMAP_GET_CONTIGUOUS_PAGES = 1,
        MLX5_IB_MMAP_WC_PAGE = 2,
        MLX5_IB_MMAP_NC_PAGE = 3,
        MLX5_IB_MMAP_CORE_CLOCK = 5,
        MLX5_IB_MMAP_ALLOC_WC = 6,
        MLX5_IB_MMAP_CLOCK_INFO = 7,
        MLX5_IB_MMAP_DEVICE_MEM = 8,
    }

    enum _: u32 {
        MLX5_IB_CLOCK_INFO_KERNEL_UPDATING = 1,
    }

    enum _: u32 {
        MLX5_IB_CLOCK_INFO_V1 = 0,
    }
}
