//! Work requests as the post commands carry them. `rdma/ib_user_verbs.h`.
//!
//! Rings of devices have formats of their own: [`rxe`](crate::rxe), [`mlx5`](crate::mlx5).

use crate::enumeration::{flag_sets, open_enums};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_verbs.h";

    /// A piece of registered memory.
    struct ib_uverbs_sge[16] {
        addr: u64 = 0,
        length: u32 = 8,
        lkey: u32 = 12,
    }

    /// A send request. `ex` holds the immediate in network order or the rkey to invalidate; `wr`
    /// holds one of [`ib_uverbs_send_wr_rdma`], [`ib_uverbs_send_wr_atomic`] and
    /// [`ib_uverbs_send_wr_ud`].
    struct ib_uverbs_send_wr[56] {
        wr_id: u64 = 0,
        num_sge: u32 = 8,
        opcode: u32 = 12,
        send_flags: u32 = 16,
        ex: u32 = 20,
        wr: [u8; 32] = 24,
    }

    /// The part of a send request that RDMA reads and writes use.
    struct ib_uverbs_send_wr_rdma[16] of "ib_uverbs_send_wr.wr.rdma" {
        remote_addr: u64 = 0,
        rkey: u32 = 8,
        reserved: u32 = 12,
    }

    /// The part of a send request that atomics use.
    struct ib_uverbs_send_wr_atomic[32] of "ib_uverbs_send_wr.wr.atomic" {
        remote_addr: u64 = 0,
        compare_add: u64 = 8,
        swap: u64 = 16,
        rkey: u32 = 24,
        reserved: u32 = 28,
    }

    /// The part of a send request that datagrams use.
    struct ib_uverbs_send_wr_ud[16] of "ib_uverbs_send_wr.wr.ud" {
        ah: u32 = 0,
        remote_qpn: u32 = 4,
        remote_qkey: u32 = 8,
        reserved: u32 = 12,
    }

    /// A receive request.
    struct ib_uverbs_recv_wr[16] {
        wr_id: u64 = 0,
        num_sge: u32 = 8,
        reserved: u32 = 12,
    }

    /// Command `IB_USER_VERBS_CMD_POST_SEND`. Without requests it makes rxe process its queue; `wqe_size` must still be
    /// that of [`ib_uverbs_send_wr`].
    struct ib_uverbs_post_send[24] {
        response: u64 = 0,
        qp_handle: u32 = 8,
        wr_count: u32 = 12,
        sge_count: u32 = 16,
        wqe_size: u32 = 20,
    }

    /// Answer of `IB_USER_VERBS_CMD_POST_SEND`: how many requests were taken, counted from the
    /// failed one.
    struct ib_uverbs_post_send_resp[4] {
        bad_wr: u32 = 0,
    }

    /// Command `IB_USER_VERBS_CMD_POST_RECV`.
    struct ib_uverbs_post_recv[24] {
        response: u64 = 0,
        qp_handle: u32 = 8,
        wr_count: u32 = 12,
        sge_count: u32 = 16,
        wqe_size: u32 = 20,
    }

    /// Answer of `IB_USER_VERBS_CMD_POST_RECV`.
    struct ib_uverbs_post_recv_resp[4] {
        bad_wr: u32 = 0,
    }

    /// Command `IB_USER_VERBS_CMD_POST_SRQ_RECV`.
    struct ib_uverbs_post_srq_recv[24] {
        response: u64 = 0,
        srq_handle: u32 = 8,
        wr_count: u32 = 12,
        sge_count: u32 = 16,
        wqe_size: u32 = 20,
    }

    /// Answer of `IB_USER_VERBS_CMD_POST_SRQ_RECV`.
    struct ib_uverbs_post_srq_recv_resp[4] {
        bad_wr: u32 = 0,
    }
}

open_enums! {
    const OPCODES = "rdma/ib_user_verbs.h";

    /// The operation of a send request.
    enum ib_uverbs_wr_opcode: u32 {
        IB_UVERBS_WR_RDMA_WRITE = 0,
        IB_UVERBS_WR_RDMA_WRITE_WITH_IMM = 1,
        IB_UVERBS_WR_SEND = 2,
        IB_UVERBS_WR_SEND_WITH_IMM = 3,
        IB_UVERBS_WR_RDMA_READ = 4,
        IB_UVERBS_WR_ATOMIC_CMP_AND_SWP = 5,
        IB_UVERBS_WR_ATOMIC_FETCH_AND_ADD = 6,
        IB_UVERBS_WR_LOCAL_INV = 7,
        IB_UVERBS_WR_BIND_MW = 8,
        IB_UVERBS_WR_SEND_WITH_INV = 9,
        IB_UVERBS_WR_TSO = 10,
        IB_UVERBS_WR_RDMA_READ_WITH_INV = 11,
        IB_UVERBS_WR_MASKED_ATOMIC_CMP_AND_SWP = 12,
        IB_UVERBS_WR_MASKED_ATOMIC_FETCH_AND_ADD = 13,
        IB_UVERBS_WR_FLUSH = 14,
        IB_UVERBS_WR_ATOMIC_WRITE = 15,
    }
}

flag_sets! {
    const FLUSH = "rdma/ib_user_verbs.h";

    /// The placement of data that a flush guarantees: globally visible, or persistent.
    enum ib_placement_type: u32 {
        IB_FLUSH_GLOBAL = 1 << 0,
        IB_FLUSH_PERSISTENT = 1 << 1,
    }
}

open_enums! {
    const SELECTIVITY = "rdma/ib_user_verbs.h";

    /// The memory that a flush covers.
    enum ib_selectivity_level: u32 {
        IB_FLUSH_RANGE = 0,
        IB_FLUSH_MR = 1,
    }
}

flag_sets! {
    const SEND_FLAGS = "rdma/ib_verbs.h";

    /// Flags of a send request.
    enum ib_send_flags: u32 {
        IB_SEND_FENCE = 1 << 0,
        IB_SEND_SIGNALED = 1 << 1,
        IB_SEND_SOLICITED = 1 << 2,
        IB_SEND_INLINE = 1 << 3,
        IB_SEND_IP_CSUM = 1 << 4,
    }
}
