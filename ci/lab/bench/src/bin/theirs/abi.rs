//! The parts of rdma-core's binary interface that the measured operations touch, as libibverbs 1.14
//! lays them out on 64-bit machines. Pairs with `infiniband/verbs.h`.
//!
//! Much of that header is code that a C compiler copies into the program: it finds functions
//! through an object's context. [`super::verbs`] does the same.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// Something whose inside is the library's.
#[repr(C)]
pub(crate) struct Opaque {
    _inside: [u8; 0],
}

/// A function that the measured operations do not call.
type Unused = *const c_void;

/// A lock as glibc keeps it: on 64-bit Arm it has a word more than on x86.
type Mutex = [u64; if cfg!(target_arch = "aarch64") { 6 } else { 5 }];

/// A lock and a condition variable as glibc keeps them.
#[repr(C)]
struct Waiting {
    mutex: Mutex,
    condition: [u64; 6],
}

/// The functions that a context holds: `struct ibv_context_ops`.
#[repr(C)]
pub(crate) struct ContextOps {
    unused_before_poll: [Unused; 11],
    pub(crate) poll_cq: unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int,
    pub(crate) req_notify_cq: unsafe extern "C" fn(*mut Cq, c_int) -> c_int,
    unused_before_srq: [Unused; 7],
    pub(crate) post_srq_recv:
        unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int,
    unused_before_send: [Unused; 4],
    pub(crate) post_send: unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int,
    pub(crate) post_recv: unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int,
    unused_after: [Unused; 5],
}

/// An open device: `struct ibv_context`.
#[repr(C)]
pub(crate) struct Context {
    pub(crate) device: *mut Opaque,
    pub(crate) ops: ContextOps,
    pub(crate) cmd_fd: c_int,
    pub(crate) async_fd: c_int,
    pub(crate) num_comp_vectors: c_int,
    mutex: Mutex,
    /// `__VERBS_ABI_IS_EXTENDED`, all bits set, if an [`ExtendedContext`] ends with this one.
    pub(crate) abi_compat: usize,
}

/// The end of `struct verbs_context`, which grows upwards: newer functions stand before older ones.
#[repr(C)]
pub(crate) struct ExtendedContext {
    pub(crate) alloc_parent_domain:
        Option<unsafe extern "C" fn(*mut Context, *mut ParentDomainAttr) -> *mut Pd>,
    pub(crate) dealloc_td: Option<unsafe extern "C" fn(*mut Opaque) -> c_int>,
    pub(crate) alloc_td: Option<unsafe extern "C" fn(*mut Context, *mut TdAttr) -> *mut Opaque>,
    unused_before_cq: [Unused; 8],
    pub(crate) create_cq_ex: Option<unsafe extern "C" fn(*mut Context, *mut CqAttrEx) -> *mut CqEx>,
    unused_before_qp: [Unused; 7],
    pub(crate) create_qp_ex:
        Option<unsafe extern "C" fn(*mut Context, *mut QpInitAttrEx) -> *mut Qp>,
    pub(crate) get_srq_num: Option<unsafe extern "C" fn(*mut Srq, *mut u32) -> c_int>,
    pub(crate) create_srq_ex:
        Option<unsafe extern "C" fn(*mut Context, *mut SrqInitAttrEx) -> *mut Srq>,
    pub(crate) open_xrcd: Option<unsafe extern "C" fn(*mut Context, *mut XrcdAttr) -> *mut Opaque>,
    pub(crate) close_xrcd: Option<unsafe extern "C" fn(*mut Opaque) -> c_int>,
    _abi_placeholder3: u64,
    /// Bytes of all of it.
    pub(crate) size: usize,
    pub(crate) context: Context,
}

/// A protection domain: `struct ibv_pd`.
#[repr(C)]
pub(crate) struct Pd {
    pub(crate) context: *mut Context,
    handle: u32,
}

/// A memory region: `struct ibv_mr`.
#[repr(C)]
pub(crate) struct Mr {
    context: *mut Context,
    pd: *mut Pd,
    pub(crate) addr: *mut c_void,
    pub(crate) length: usize,
    handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

/// A shared receive queue: `struct ibv_srq`.
#[repr(C)]
pub(crate) struct Srq {
    pub(crate) context: *mut Context,
    // The rest is not touched.
}

/// A completion queue: `struct ibv_cq`.
#[repr(C)]
pub(crate) struct Cq {
    pub(crate) context: *mut Context,
    channel: *mut Opaque,
    cq_context: *mut c_void,
    handle: u32,
    pub(crate) cqe: c_int,
    waiting: Waiting,
    completion_events: u32,
    asynchronous_events: u32,
}

/// A completion queue with a cursor: `struct ibv_cq_ex`.
#[repr(C)]
pub(crate) struct CqEx {
    pub(crate) cq: Cq,
    comp_mask: u32,
    pub(crate) status: c_uint,
    pub(crate) wr_id: u64,
    pub(crate) start_poll: unsafe extern "C" fn(*mut CqEx, *mut PollAttr) -> c_int,
    pub(crate) next_poll: unsafe extern "C" fn(*mut CqEx) -> c_int,
    pub(crate) end_poll: unsafe extern "C" fn(*mut CqEx),
    pub(crate) read_opcode: unsafe extern "C" fn(*mut CqEx) -> c_uint,
}

/// A queue pair: `struct ibv_qp`.
#[repr(C)]
pub(crate) struct Qp {
    pub(crate) context: *mut Context,
    qp_context: *mut c_void,
    pd: *mut Pd,
    send_cq: *mut Cq,
    recv_cq: *mut Cq,
    srq: *mut Srq,
    handle: u32,
    pub(crate) qp_num: u32,
    state: c_uint,
    qp_type: c_uint,
    waiting: Waiting,
    events_completed: u32,
}

/// A queue pair whose requests are built by calls: `struct ibv_qp_ex`.
#[repr(C)]
pub(crate) struct QpEx {
    pub(crate) qp: Qp,
    comp_mask: u64,
    pub(crate) wr_id: u64,
    pub(crate) wr_flags: c_uint,
    unused_compare: Unused,
    pub(crate) wr_atomic_fetch_add: unsafe extern "C" fn(*mut QpEx, u32, u64, u64),
    unused_bind: [Unused; 2],
    pub(crate) wr_rdma_read: unsafe extern "C" fn(*mut QpEx, u32, u64),
    pub(crate) wr_rdma_write: unsafe extern "C" fn(*mut QpEx, u32, u64),
    unused_write_imm: Unused,
    pub(crate) wr_send: unsafe extern "C" fn(*mut QpEx),
    unused_sends: [Unused; 3],
    pub(crate) wr_set_ud_addr: unsafe extern "C" fn(*mut QpEx, *mut Opaque, u32, u32),
    pub(crate) wr_set_xrc_srqn: unsafe extern "C" fn(*mut QpEx, u32),
    pub(crate) wr_set_inline_data: unsafe extern "C" fn(*mut QpEx, *mut c_void, usize),
    pub(crate) wr_set_inline_data_list: unsafe extern "C" fn(*mut QpEx, usize, *const DataBuf),
    pub(crate) wr_set_sge: unsafe extern "C" fn(*mut QpEx, u32, u64, u32),
    pub(crate) wr_set_sge_list: unsafe extern "C" fn(*mut QpEx, usize, *const Sge),
    pub(crate) wr_start: unsafe extern "C" fn(*mut QpEx),
    pub(crate) wr_complete: unsafe extern "C" fn(*mut QpEx) -> c_int,
    pub(crate) wr_abort: unsafe extern "C" fn(*mut QpEx),
}

/// A slice of inline data: `struct ibv_data_buf`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct DataBuf {
    pub(crate) addr: *mut c_void,
    pub(crate) length: usize,
}

/// A piece of registered memory: `struct ibv_sge`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Sge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

/// A request for a send queue: `struct ibv_send_wr`. The opcode decides about `wr`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct SendWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut SendWr,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: c_uint,
    pub(crate) send_flags: c_uint,
    pub(crate) imm_data: u32,
    /// RDMA: address, key. Atomics: address, operand, operand, key. Datagrams: address handle,
    /// number and key of the queue pair.
    pub(crate) wr: [u64; 4],
    pub(crate) remote_srqn: u32,
    /// `bind_mw` or `tso`.
    pub(crate) other: [u64; 6],
}

/// A request for a receive queue: `struct ibv_recv_wr`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RecvWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut RecvWr,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
}

/// A completion: `struct ibv_wc`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: c_uint,
    pub(crate) opcode: c_uint,
    vendor_err: u32,
    byte_len: u32,
    imm_data: u32,
    qp_num: u32,
    src_qp: u32,
    wc_flags: c_uint,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
}

/// How a poll begins: `struct ibv_poll_cq_attr`.
#[repr(C)]
pub(crate) struct PollAttr {
    pub(crate) comp_mask: u32,
}

/// `struct ibv_port_attr`, which nobody here reads: as many bytes as the library writes, and some.
#[derive(Default)]
#[repr(C)]
pub(crate) struct PortAttr {
    words: [u64; 16],
}

/// How a thread domain is made: `struct ibv_td_init_attr`.
#[repr(C)]
pub(crate) struct TdAttr {
    pub(crate) comp_mask: u32,
}

/// How an XRC domain is opened: `struct ibv_xrcd_init_attr`.
#[repr(C)]
pub(crate) struct XrcdAttr {
    pub(crate) comp_mask: u32,
    pub(crate) fd: c_int,
    pub(crate) oflags: c_int,
}

/// How a parent domain is made: `struct ibv_parent_domain_init_attr`.
#[repr(C)]
pub(crate) struct ParentDomainAttr {
    pub(crate) pd: *mut Pd,
    pub(crate) td: *mut Opaque,
    pub(crate) comp_mask: u32,
    pub(crate) allocators: [Unused; 2],
    pub(crate) pd_context: *mut c_void,
}

/// How a completion queue is made: `struct ibv_cq_init_attr_ex`.
#[repr(C)]
pub(crate) struct CqAttrEx {
    pub(crate) cqe: u32,
    pub(crate) cq_context: *mut c_void,
    pub(crate) channel: *mut Opaque,
    pub(crate) comp_vector: u32,
    pub(crate) wc_flags: u64,
    pub(crate) comp_mask: u32,
    pub(crate) flags: u32,
    pub(crate) parent_domain: *mut Pd,
}

/// Capacities of a queue pair: `struct ibv_qp_cap`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct QpCap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

/// How a queue pair is made: `struct ibv_qp_init_attr_ex`.
#[repr(C)]
pub(crate) struct QpInitAttrEx {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut Cq,
    pub(crate) recv_cq: *mut Cq,
    pub(crate) srq: *mut Srq,
    pub(crate) cap: QpCap,
    pub(crate) qp_type: c_uint,
    pub(crate) sq_sig_all: c_int,
    pub(crate) comp_mask: u32,
    pub(crate) pd: *mut Pd,
    pub(crate) xrcd: *mut Opaque,
    pub(crate) create_flags: u32,
    pub(crate) max_tso_header: u16,
    pub(crate) rwq_ind_tbl: *mut Opaque,
    pub(crate) rx_hash_conf: [u64; 3],
    pub(crate) source_qpn: u32,
    pub(crate) send_ops_flags: u64,
}

/// How a shared receive queue is made: `struct ibv_srq_init_attr`.
#[repr(C)]
pub(crate) struct SrqInitAttr {
    pub(crate) srq_context: *mut c_void,
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) srq_limit: u32,
}

/// How a shared receive queue of another type is made: `struct ibv_srq_init_attr_ex`.
#[repr(C)]
pub(crate) struct SrqInitAttrEx {
    pub(crate) srq_context: *mut c_void,
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) srq_limit: u32,
    pub(crate) comp_mask: u32,
    pub(crate) srq_type: c_uint,
    pub(crate) pd: *mut Pd,
    pub(crate) xrcd: *mut Opaque,
    pub(crate) cq: *mut Cq,
    pub(crate) tag_matching: [u32; 2],
}

/// A path to a peer: `struct ibv_ah_attr`.
#[derive(Clone, Copy, Default)]
#[repr(C, align(8))]
pub(crate) struct AhAttr {
    pub(crate) dgid: [u8; 16],
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) unused: u8,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

/// Attributes of a queue pair: `struct ibv_qp_attr`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct QpAttr {
    pub(crate) qp_state: c_uint,
    pub(crate) cur_qp_state: c_uint,
    pub(crate) path_mtu: c_uint,
    pub(crate) path_mig_state: c_uint,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: c_uint,
    pub(crate) cap: QpCap,
    pub(crate) ah_attr: AhAttr,
    pub(crate) alt_ah_attr: AhAttr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) rate_limit: u32,
}

/// Functions that the library names.
pub(crate) mod function {
    use super::*;

    pub(crate) type GetDeviceList = unsafe extern "C" fn(*mut c_int) -> *mut *mut Opaque;
    pub(crate) type FreeDeviceList = unsafe extern "C" fn(*mut *mut Opaque);
    pub(crate) type GetDeviceName = unsafe extern "C" fn(*mut Opaque) -> *const c_char;
    pub(crate) type OpenDevice = unsafe extern "C" fn(*mut Opaque) -> *mut Context;
    pub(crate) type CloseDevice = unsafe extern "C" fn(*mut Context) -> c_int;
    pub(crate) type QueryGid =
        unsafe extern "C" fn(*mut Context, u8, c_int, *mut [u8; 16]) -> c_int;
    pub(crate) type QueryPort = unsafe extern "C" fn(*mut Context, u8, *mut PortAttr) -> c_int;
    pub(crate) type AllocPd = unsafe extern "C" fn(*mut Context) -> *mut Pd;
    pub(crate) type DeallocPd = unsafe extern "C" fn(*mut Pd) -> c_int;
    pub(crate) type RegMr = unsafe extern "C" fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
    pub(crate) type DeregMr = unsafe extern "C" fn(*mut Mr) -> c_int;
    pub(crate) type CreateChannel = unsafe extern "C" fn(*mut Context) -> *mut Opaque;
    pub(crate) type CreateCq =
        unsafe extern "C" fn(*mut Context, c_int, *mut c_void, *mut Opaque, c_int) -> *mut Cq;
    pub(crate) type DestroyCq = unsafe extern "C" fn(*mut Cq) -> c_int;
    pub(crate) type CreateSrq = unsafe extern "C" fn(*mut Pd, *mut SrqInitAttr) -> *mut Srq;
    pub(crate) type CreateQp = unsafe extern "C" fn(*mut Pd, *mut QpInitAttrEx) -> *mut Qp;
    pub(crate) type ModifyQp = unsafe extern "C" fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    pub(crate) type DestroyQp = unsafe extern "C" fn(*mut Qp) -> c_int;
    pub(crate) type QpToQpEx = unsafe extern "C" fn(*mut Qp) -> *mut QpEx;
    pub(crate) type CreateAh = unsafe extern "C" fn(*mut Pd, *mut AhAttr) -> *mut Opaque;
    pub(crate) type DestroyAh = unsafe extern "C" fn(*mut Opaque) -> c_int;
    pub(crate) type AllocVar = unsafe extern "C" fn(*mut Context, u32) -> *mut Opaque;
    pub(crate) type FreeVar = unsafe extern "C" fn(*mut Opaque);
}

/// Numbers that the header names.
pub(crate) mod number {
    pub(crate) const QPT_RC: u32 = 2;
    pub(crate) const QPT_UD: u32 = 4;
    pub(crate) const QPT_XRC_SEND: u32 = 9;
    pub(crate) const QPT_XRC_RECV: u32 = 10;

    pub(crate) const WR_RDMA_WRITE: u32 = 0;
    pub(crate) const WR_SEND: u32 = 2;
    pub(crate) const WR_RDMA_READ: u32 = 4;
    pub(crate) const WR_ATOMIC_FETCH_AND_ADD: u32 = 6;

    pub(crate) const SEND_SIGNALED: u32 = 1 << 1;
    pub(crate) const SEND_INLINE: u32 = 1 << 3;

    /// The requests that the extended interface shall build: RDMA write, send, RDMA read, fetch and
    /// add.
    pub(crate) const SEND_OPS_RELIABLE: u64 = 1 | 1 << 2 | 1 << 4 | 1 << 6;
    /// Of a datagram queue pair: send.
    pub(crate) const SEND_OPS_DATAGRAM: u64 = 1 << 2;

    pub(crate) const QP_INIT_ATTR_PD: u32 = 1 << 0;
    /// Of `SrqInitAttrEx`: type, domain, XRC domain and completion queue are given.
    pub(crate) const SRQ_INIT_ATTR_XRC: u32 = 0xf;
    pub(crate) const SRQT_XRC: u32 = 1;
    pub(crate) const QP_INIT_ATTR_XRCD: u32 = 1 << 1;
    pub(crate) const QP_INIT_ATTR_SEND_OPS_FLAGS: u32 = 1 << 6;

    pub(crate) const CQ_INIT_ATTR_FLAGS: u32 = 1 << 0;
    pub(crate) const CQ_SINGLE_THREADED: u32 = 1 << 0;

    /// Local write, remote write, remote read, remote atomic.
    pub(crate) const ACCESS_ALL: u32 = 0b1111;

    pub(crate) const QPS_INIT: u32 = 1;
    pub(crate) const QPS_RTR: u32 = 2;
    pub(crate) const QPS_RTS: u32 = 3;

    pub(crate) const MTU_1024: u32 = 3;

    pub(crate) const ATTR_STATE: i32 = 1 << 0;
    pub(crate) const ATTR_ACCESS: i32 = 1 << 3;
    pub(crate) const ATTR_PKEY_INDEX: i32 = 1 << 4;
    pub(crate) const ATTR_PORT: i32 = 1 << 5;
    pub(crate) const ATTR_QKEY: i32 = 1 << 6;
    pub(crate) const ATTR_AV: i32 = 1 << 7;
    pub(crate) const ATTR_PATH_MTU: i32 = 1 << 8;
    pub(crate) const ATTR_TIMEOUT: i32 = 1 << 9;
    pub(crate) const ATTR_RETRY_CNT: i32 = 1 << 10;
    pub(crate) const ATTR_RNR_RETRY: i32 = 1 << 11;
    pub(crate) const ATTR_RQ_PSN: i32 = 1 << 12;
    pub(crate) const ATTR_MAX_RD_ATOMIC: i32 = 1 << 13;
    pub(crate) const ATTR_MIN_RNR_TIMER: i32 = 1 << 15;
    pub(crate) const ATTR_SQ_PSN: i32 = 1 << 16;
    pub(crate) const ATTR_MAX_DEST_RD_ATOMIC: i32 = 1 << 17;
    pub(crate) const ATTR_DEST_QPN: i32 = 1 << 20;
}

/// Asserts the C compiler's offsets of the fields that the operations touch.
const _: () = {
    use std::mem::offset_of;
    // How much longer a lock is than on x86.
    const LOCK: usize = size_of::<Mutex>() - 40;
    assert!(offset_of!(ContextOps, poll_cq) == 11 * 8);
    assert!(offset_of!(ContextOps, post_srq_recv) == 20 * 8);
    assert!(offset_of!(ContextOps, post_send) == 25 * 8);
    assert!(size_of::<ContextOps>() == 32 * 8);
    assert!(offset_of!(Context, abi_compat) == 320 + LOCK);
    assert!(offset_of!(ExtendedContext, context) == 26 * 8);
    assert!(offset_of!(ExtendedContext, create_cq_ex) == 11 * 8);
    assert!(offset_of!(ExtendedContext, create_qp_ex) == 19 * 8);
    assert!(offset_of!(ExtendedContext, open_xrcd) == 22 * 8);
    assert!(size_of::<Cq>() == 128 + LOCK);
    assert!(offset_of!(CqEx, wr_id) == 136 + LOCK);
    assert!(offset_of!(QpEx, wr_id) == 168 + LOCK);
    assert!(offset_of!(QpEx, wr_start) == 320 + LOCK);
    assert!(size_of::<SendWr>() == 128);
    assert!(offset_of!(QpInitAttrEx, send_ops_flags) == 128);
    assert!(offset_of!(SrqInitAttrEx, comp_mask) == 20);
    assert!(offset_of!(SrqInitAttrEx, tag_matching) == 56);
    assert!(size_of::<AhAttr>() == 32);
    assert!(size_of::<QpAttr>() == 144);
    assert!(size_of::<Wc>() == 48);
};
