//! Soft-RoCE (rxe): its queues in shared memory, their elements, and the driver's part of commands.
//!
//! `rdma/rdma_user_rxe.h`, which the kernel's `drivers/infiniband/sw/rxe` includes. Completions are
//! [`ib_uverbs_wc`](crate::wc::ib_uverbs_wc).

use crate::endian::Be64;
use crate::enumeration::{ids, open_enums};
use crate::layout::layouts;

ids! {
    const DEFINES = "drivers/infiniband/sw/rxe/rxe.h";

    enum "#define": u32 {
        /// Version of the driver's ABI, as sysfs and netlink report it.
        RXE_UVERBS_ABI_VERSION = 2,
    }
}

open_enums! {
    const NETWORK_TYPES = "rdma/rdma_user_rxe.h";

    /// The kind of address in an [`rxe_av`].
    enum rxe_network_type: u8 {
        RXE_NETWORK_TYPE_IPV4 = 1,
        RXE_NETWORK_TYPE_IPV6 = 2,
    }
}

ids! {
    const WQE_STATES = "drivers/infiniband/sw/rxe/rxe_verbs.h";

    enum wqe_state: u32 {
        /// The initial state of a posted send request; the driver owns the field from then on.
        wqe_state_posted = 0,
        wqe_state_processing = 1,
        wqe_state_pending = 2,
        wqe_state_done = 3,
        wqe_state_error = 4,
    }
}

layouts! {
    const LAYOUTS = "rdma/rdma_user_rxe.h";

    /// The location of a queue: `mmap` of `size` bytes at `offset` of the device file, once.
    struct mminfo[16] {
        offset: u64 = 0,
        size: u32 = 8,
        pad: u32 = 12,
    }

    /// The driver's response to creating an address handle.
    struct rxe_create_ah_resp[8] {
        ah_num: u32 = 0,
        reserved: u32 = 4,
    }

    /// The driver's response to creating a completion queue.
    struct rxe_create_cq_resp[16] {
        mi: mminfo = 0,
    }

    /// The driver's response to resizing a completion queue.
    struct rxe_resize_cq_resp[16] {
        mi: mminfo = 0,
    }

    /// The driver's response to creating a queue pair. With a shared receive queue `rq_mi` is unused.
    struct rxe_create_qp_resp[32] {
        rq_mi: mminfo = 0,
        sq_mi: mminfo = 16,
    }

    /// The driver's response to creating a shared receive queue.
    struct rxe_create_srq_resp[24] {
        mi: mminfo = 0,
        srq_num: u32 = 16,
        reserved: u32 = 20,
    }

    /// The driver's part of resizing a shared receive queue: the address in this process at which the driver writes the
    /// new [`mminfo`].
    struct rxe_modify_srq_cmd[8] {
        mmap_info_addr: u64 = 0,
    }

    /// The head of every queue; the elements follow it, each `1 << log2_elem_size` bytes.
    ///
    /// `producer_index` and `consumer_index` are kept masked by `index_mask`. Each is written by
    /// one side only, and lies in a cache line of its own.
    struct rxe_queue_buf[384] {
        log2_elem_size: u32 = 0,
        index_mask: u32 = 4,
        pad_1: [u32; 30] = 8,
        producer_index: u32 = 128,
        pad_2: [u32; 31] = 132,
        consumer_index: u32 = 256,
        pad_3: [u32; 31] = 260,
    }

    /// A GID as two halves; `rxe_gid` in the kernel is a union with 16 raw bytes.
    struct rxe_gid[16] of "rxe_gid.global" {
        subnet_prefix: Be64 = 0,
        interface_id: Be64 = 8,
    }

    /// The global part of an [`rxe_av`].
    struct rxe_global_route[24] {
        dgid: [u8; 16] = 0,
        flow_label: u32 = 16,
        sgid_index: u8 = 20,
        hop_limit: u8 = 21,
        traffic_class: u8 = 22,
        padding: u8 = 23,
    }

    /// The address in a datagram's request, for kernels that do not know `ah_num`.
    ///
    /// `sgid_addr` and `dgid_addr` hold a `sockaddr_in` or a `sockaddr_in6`.
    struct rxe_av[88] {
        port_num: u8 = 0,
        network_type: u8 = 1,
        dmac: [u8; 6] = 2,
        grh: rxe_global_route = 8,
        sgid_addr: [u8; 28] = 32,
        dgid_addr: [u8; 28] = 60,
    }

    /// A send request. `ex` holds the immediate in network order or the rkey to invalidate; `wr`
    /// holds one of the `rxe_send_wr_…` structs, from its first byte.
    struct rxe_send_wr[144] {
        wr_id: u64 = 0,
        reserved: u32 = 8,
        opcode: u32 = 12,
        send_flags: u32 = 16,
        ex: u32 = 20,
        wr: [u8; 120] = 24,
    }

    /// The part of a request that RDMA reads and writes, also atomic writes, use.
    struct rxe_send_wr_rdma[16] of "rxe_send_wr.wr.rdma" {
        remote_addr: u64 = 0,
        rkey: u32 = 8,
        reserved: u32 = 12,
    }

    /// The part of a request that flushes use (Linux 6.3).
    struct rxe_send_wr_flush[24] of "rxe_send_wr.wr.flush" {
        remote_addr: u64 = 0,
        length: u32 = 8,
        rkey: u32 = 12,
        r#type: u8 = 16,
        level: u8 = 17,
        padding: [u8; 6] = 18,
    }

    /// The part of a request that atomics use.
    struct rxe_send_wr_atomic[32] of "rxe_send_wr.wr.atomic" {
        remote_addr: u64 = 0,
        compare_add: u64 = 8,
        swap: u64 = 16,
        rkey: u32 = 24,
        reserved: u32 = 28,
    }

    /// The part of a request that datagrams use. With an `ah_num` the driver ignores `av`.
    struct rxe_send_wr_ud[120] of "rxe_send_wr.wr.ud" {
        remote_qpn: u32 = 0,
        remote_qkey: u32 = 4,
        pkey_index: u16 = 8,
        reserved: u16 = 10,
        ah_num: u32 = 12,
        pad: [u32; 4] = 16,
        av: rxe_av = 32,
    }

    /// The part of a request that binding a memory window uses.
    struct rxe_send_wr_mw[32] of "rxe_send_wr.wr.mw" {
        addr: u64 = 0,
        length: u64 = 8,
        mr_lkey: u32 = 16,
        mw_rkey: u32 = 20,
        rkey: u32 = 24,
        access: u32 = 28,
    }

    /// A piece of registered memory.
    struct rxe_sge[16] {
        addr: u64 = 0,
        length: u32 = 8,
        lkey: u32 = 12,
    }

    /// Progress over the payload. Behind it lie `num_sge` times [`rxe_sge`], or inline bytes, or
    /// the 8 bytes of an atomic write.
    struct rxe_dma_info[24] {
        length: u32 = 0,
        resid: u32 = 4,
        cur_sge: u32 = 8,
        num_sge: u32 = 12,
        sge_offset: u32 = 16,
        reserved: u32 = 20,
    }

    /// An element of a send queue, before its payload.
    struct rxe_send_wqe[208] {
        wr: rxe_send_wr = 0,
        status: u32 = 144,
        state: u32 = 148,
        iova: u64 = 152,
        mask: u32 = 160,
        first_psn: u32 = 164,
        last_psn: u32 = 168,
        ack_length: u32 = 172,
        ssn: u32 = 176,
        has_rd_atomic: u32 = 180,
        dma: rxe_dma_info = 184,
    }

    /// An element of a receive queue, before its list of [`rxe_sge`].
    struct rxe_recv_wqe[40] {
        wr_id: u64 = 0,
        reserved: u32 = 8,
        padding: u32 = 12,
        dma: rxe_dma_info = 16,
    }
}
