//! Queues as addresses and numbers, for code that drives them without this library.
//!
//! Pairs with `struct mlx5dv_qp`, `mlx5dv_cq` and `mlx5dv_srq` of rdma-core.

/// A ring of WQEs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WqLayout {
    /// The first WQE.
    pub buf: *mut u8,
    /// The number of WQEs, a power of two; of a send queue the number of WQEBBs, and 0 without one.
    pub wqe_count: u32,
    /// Bytes from a WQE to the next, a power of two; 64 in a send queue, whose WQEs may take several WQEBBs.
    pub stride: u32,
}

/// A doorbell register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegisterLayout {
    /// The register, which takes the first eight bytes of the newest WQE in one store. Queue pairs of the same thread domain
    /// ring it, too, and must not do so meanwhile. Without write combining, where `blueflame_bytes` is 0, those of the whole
    /// context may: each doorbell is then one store of 64 bits, which needs no lock.
    pub reg: *mut u64,
    /// Bytes of each of the register's two BlueFlame buffers, which lie side by side and are written in turn; 0 if it
    /// takes doorbells only: without write combining.
    pub blueflame_bytes: u32,
    /// The offset at which the context's file maps the page of the register.
    #[doc(alias = "uar_mmap_offset")]
    pub mmap_offset: u64,
}

/// The device's numbers of the objects that the kernel made for a queue pair of raw packets; those of queues that it does
/// not have are `None`, and all of them in a context without DEVX.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the device's manual are the whole meaning")]
pub struct RawPacketNumbers {
    pub tirn: Option<u32>,
    pub tisn: Option<u32>,
    pub rqn: Option<u32>,
    pub sqn: Option<u32>,
}

/// A queue pair.
#[doc(alias = "mlx5dv_qp")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QpLayout {
    /// The queue pair's number, as control segments name it.
    pub qpn: u32,
    /// The send queue.
    pub sq: WqLayout,
    /// The receive queue; `None` where receives come from a shared queue, and where there are none. With
    /// [placement out of order](crate::QpBuilder::out_of_order_placement) the ring is twice as long as what it holds: at
    /// most half of `wqe_count` may be outstanding.
    pub rq: Option<WqLayout>,
    /// The doorbell record: the number of receives posted, and that of WQEBBs posted, both big-endian and of 16 bits.
    pub dbrec: *mut u32,
    /// The register that sends ring.
    pub register: RegisterLayout,
    /// The indices where the library stopped.
    pub posted: QpIndices,
    /// The objects behind a queue pair of raw packets, which control segments and commands name.
    pub raw_packet: RawPacketNumbers,
}

/// A completion queue.
#[doc(alias = "mlx5dv_cq")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CqLayout {
    /// The queue's number, as the words that arm it name it.
    pub cqn: u32,
    /// The first CQE.
    pub buf: *mut u8,
    /// The number of CQEs, a power of two.
    pub cqe_count: u32,
    /// Bytes of a CQE, 64 or 128.
    pub cqe_size: u32,
    /// The doorbell record: the consumer index, and the word that arms the queue, both big-endian.
    pub dbrec: *mut u32,
    /// The register that arms the queue. A device in this process does not see the store.
    pub arm: *mut u64,
    /// The consumer index where the library stopped, of 24 bits.
    pub consumer: u32,
    /// Events of the queue that were read from its channel until then, modulo 4, which the word that arms it counts.
    pub events: u32,
}

/// A shared receive queue: WQEs that are linked to the next by `next_wqe_index` in their first segment.
#[doc(alias = "mlx5dv_srq")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SrqLayout {
    /// The queue's number.
    pub srqn: u32,
    /// The WQEs. Each is linked to the one behind it, and the last to the first. One has to stay free, so that the queue
    /// holds `wqe_count - 1` receives.
    pub wq: WqLayout,
    /// The WQE that the device takes next, and that is to be filled next.
    pub head: u16,
    /// The doorbell record: the number of receives posted, big-endian and of 16 bits.
    pub dbrec: *mut u32,
    /// The number of receives posted.
    pub posted: u16,
}

/// The indices of a queue pair, as the device counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpIndices {
    /// WQEBBs posted to the send queue, modulo 2^16.
    pub wqebbs: u16,
    /// Receives posted, modulo 2^16.
    pub receives: u16,
}

macro_rules! addresses {
    ($($name:ident),*) => {$(
        // SAFETY: addresses and numbers. To dereference one is unsafe, and the caller's obligation on every thread.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )*};
}
addresses!(WqLayout, RegisterLayout, QpLayout, CqLayout, SrqLayout);
