//! Work requests for send and receive queues.

mod error;
mod operation;
mod packet;
mod transport;

use crate::identity::Identity;
use crate::number::{Lkey, Qkey, Qpn, Rkey, SrqNumber};
use uverbs_uapi::mlx5::wqe::mlx5_av;

pub use error::{PostError, RingError};
pub(crate) use operation::SendOp;
pub use operation::{FlushLevel, MaskedSwap, Placement, WindowBinding};
pub use packet::Packet;
pub(crate) use transport::{QpTransport, SendOps};

/// A scatter/gather entry: a range of registered memory that a request reads or writes.
///
/// It names memory by number. It neither keeps the memory alive nor borrows it, therefore ringing a batch is `unsafe`.
#[doc(alias = "ibv_sge")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    /// Virtual address, or offset in a zero-based region.
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// Key of the region.
    pub lkey: Lkey,
}

/// Memory of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Remote {
    /// Virtual address at the peer, or offset in a zero-based region.
    pub addr: u64,
    /// Key of the peer's region or window.
    pub rkey: Rkey,
}

bitflags::bitflags! {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct SendFlags: u32 {
        const FENCE = 1;
        const SIGNALED = 1 << 1;
        const SOLICITED = 1 << 2;
        const INLINE = 1 << 3;
    }
}

/// The destination of a datagram.
#[doc(alias = "ibv_ah")]
#[derive(Clone, Copy, Debug)]
pub struct Destination<'a> {
    pub(crate) address: &'a Address,
    pub(crate) qpn: Qpn,
    pub(crate) qkey: Qkey,
    /// The domain of the address handle, which stays at least as long as the handle.
    pub(crate) domain: Identity,
}

/// An address handle as work requests carry it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Address {
    Rxe { ah_num: u32 },
    Mlx5(mlx5_av),
}

impl Address {
    /// The number by which requests name the handle, where they do not carry the address itself.
    pub(crate) fn number(&self) -> Option<u32> {
        match self {
            Address::Rxe { ah_num } => Some(*ah_num),
            Address::Mlx5(_) => None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Payload<'a> {
    Sges(&'a [Sge]),
    Inline(&'a [u8]),
    InlineList(&'a [&'a [u8]]),
}

impl<'a> Payload<'a> {
    /// The slices of inline data; none if the data is in SGEs.
    pub(crate) fn inline_parts(&self) -> &[&'a [u8]] {
        match self {
            Payload::Sges(_) => &[],
            Payload::Inline(bytes) => std::slice::from_ref(bytes),
            Payload::InlineList(parts) => parts,
        }
    }
}

/// The bytes of all slices. Each has at most `isize::MAX`, and one may stand in the list more than once.
pub(crate) fn inline_bytes(parts: &[&[u8]]) -> usize {
    parts.iter().fold(0, |sum, part| sum.saturating_add(part.len()))
}

/// A request for a send queue.
///
/// Made by the constructor of its operation and refined from there:
///
/// ```
/// # use uverbs::{Lkey, Remote, Rkey, SendWr, Sge};
/// let sges = [Sge { addr: 0x1000, length: 64, lkey: Lkey(7) }];
/// let remote = Remote { addr: 0x2000, rkey: Rkey(9) };
/// let wr = SendWr::write(remote, &sges).id(42).signaled();
/// ```
///
/// Every operation, pushed to a batch:
///
/// ```no_run
/// # use uverbs::*;
/// # fn f(batch: &mut SendBatch<'_>, sges: &[Sge], remote: Remote, key: Rkey, binding: WindowBinding)
/// # -> std::result::Result<(), PostError> {
/// batch.push(SendWr::send(sges).solicited())?;
/// batch.push(SendWr::send_imm(sges, 7))?;
/// batch.push(SendWr::write(remote, sges))?;
/// batch.push(SendWr::write_imm(remote, sges, 7))?;
/// batch.push(SendWr::read(remote, sges).signaled())?;
/// // Waits until the reads and atomics before it have completed.
/// batch.push(SendWr::send(sges).fence())?;
/// batch.push(SendWr::fetch_add(remote, 1, sges))?;
/// batch.push(SendWr::compare_swap(remote, 0, 1, sges))?;
/// // mlx5: two counters of 32 bits in a word, and the low half of a word.
/// batch.push(SendWr::masked_fetch_add(remote, 1, 1 << 31, sges))?;
/// let low = u64::from(u32::MAX);
/// let half = MaskedSwap { compare: 0, compare_mask: low, swap: 1, swap_mask: low };
/// batch.push(SendWr::masked_compare_swap(remote, &half, sges))?;
/// // rxe: eight bytes at once, and a flush that makes earlier writes visible.
/// batch.push(SendWr::atomic_write(remote, 5_u64.to_ne_bytes()))?;
/// batch.push(SendWr::flush(remote, 64, Placement::GLOBAL, FlushLevel::RANGE))?;
/// // Keys: a window's bound, a peer's invalidated, and one of this side.
/// batch.push(SendWr::bind_mw(binding))?;
/// batch.push(SendWr::send_inv(sges, key))?;
/// batch.push(SendWr::local_inv(key))?;
/// # Ok(()) }
/// ```
#[doc(alias = "ibv_send_wr")]
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a> {
    pub(crate) wr_id: u64,
    pub(crate) op: SendOp<'a>,
    pub(crate) flags: SendFlags,
    pub(crate) payload: Payload<'a>,
    pub(crate) destination: Option<Destination<'a>>,
    pub(crate) srq: Option<SrqNumber>,
}

impl<'a> SendWr<'a> {
    #[inline]
    fn new(op: SendOp<'a>, payload: Payload<'a>) -> Self {
        SendWr { wr_id: 0, op, flags: SendFlags::empty(), payload, destination: None, srq: None }
    }

    /// A message for the peer's next receive.
    #[doc(alias = "IBV_WR_SEND")]
    #[doc(alias = "ibv_wr_send")]
    #[inline]
    pub fn send(sges: &'a [Sge]) -> Self {
        Self::new(SendOp::Send, Payload::Sges(sges))
    }

    /// A message with 32 bits of immediate data, a number in host byte order at both ends.
    #[doc(alias = "IBV_WR_SEND_WITH_IMM")]
    #[doc(alias = "ibv_wr_send_imm")]
    #[inline]
    pub fn send_imm(sges: &'a [Sge], imm: u32) -> Self {
        Self::new(SendOp::SendImm(imm), Payload::Sges(sges))
    }

    /// A message that invalidates a key at the peer.
    #[doc(alias = "IBV_WR_SEND_WITH_INV")]
    #[doc(alias = "ibv_wr_send_inv")]
    #[inline]
    pub fn send_inv(sges: &'a [Sge], rkey: Rkey) -> Self {
        Self::new(SendOp::SendInv(rkey), Payload::Sges(sges))
    }

    /// Writes to memory of the peer.
    #[doc(alias = "IBV_WR_RDMA_WRITE")]
    #[doc(alias = "ibv_wr_rdma_write")]
    #[inline]
    pub fn write(remote: Remote, sges: &'a [Sge]) -> Self {
        Self::new(SendOp::Write(remote), Payload::Sges(sges))
    }

    /// Writes to memory of the peer and consumes one of its receives for `imm`, a number in host byte
    /// order.
    #[doc(alias = "IBV_WR_RDMA_WRITE_WITH_IMM")]
    #[doc(alias = "ibv_wr_rdma_write_imm")]
    #[inline]
    pub fn write_imm(remote: Remote, sges: &'a [Sge], imm: u32) -> Self {
        Self::new(SendOp::WriteImm(remote, imm), Payload::Sges(sges))
    }

    /// Reads from memory of the peer.
    #[doc(alias = "IBV_WR_RDMA_READ")]
    #[doc(alias = "ibv_wr_rdma_read")]
    #[inline]
    pub fn read(remote: Remote, sges: &'a [Sge]) -> Self {
        Self::new(SendOp::Read(remote), Payload::Sges(sges))
    }

    /// Replaces eight bytes of the peer, at a multiple of eight, by `swap` if they equal `compare`;
    /// the old value comes back into `sges` in host byte order.
    #[doc(alias = "IBV_WR_ATOMIC_CMP_AND_SWP")]
    #[doc(alias = "ibv_wr_atomic_cmp_swp")]
    #[inline]
    pub fn compare_swap(remote: Remote, compare: u64, swap: u64, sges: &'a [Sge]) -> Self {
        Self::new(SendOp::CompareSwap { remote, compare, swap }, Payload::Sges(sges))
    }

    /// Adds to eight bytes of the peer, at a multiple of eight; the old value comes back into
    /// `sges` in host byte order.
    #[doc(alias = "IBV_WR_ATOMIC_FETCH_AND_ADD")]
    #[doc(alias = "ibv_wr_atomic_fetch_add")]
    #[inline]
    pub fn fetch_add(remote: Remote, add: u64, sges: &'a [Sge]) -> Self {
        Self::new(SendOp::FetchAdd { remote, add }, Payload::Sges(sges))
    }

    /// Replaces some bits of eight bytes of the peer, at a multiple of eight, if some bits of them
    /// are as expected; the whole old value comes back into `sges` in host byte order. The
    /// completion says [`COMPARE_SWAP`](crate::WcOpcode::COMPARE_SWAP).
    ///
    /// On mlx5, over reliable connections; others refuse it when it is pushed. The kernel does not
    /// tell whether a device can do it: one that cannot fails the request.
    #[doc(alias = "IB_WR_MASKED_ATOMIC_CMP_AND_SWP")]
    #[inline]
    pub fn masked_compare_swap(remote: Remote, operands: &'a MaskedSwap, sges: &'a [Sge]) -> Self {
        Self::new(SendOp::MaskedCompareSwap { remote, operands }, Payload::Sges(sges))
    }

    /// Adds to fields of eight bytes of the peer, at a multiple of eight; the old value comes back
    /// into `sges` in host byte order. Each bit of `boundary` is the uppermost of a field, and no
    /// field's carry goes to the next: with 0 there is one field of 64 bits, with `1 << 31` there are
    /// two of 32. The completion says [`FETCH_ADD`](crate::WcOpcode::FETCH_ADD).
    ///
    /// On the devices of [`masked_compare_swap`](Self::masked_compare_swap).
    #[doc(alias = "IB_WR_MASKED_ATOMIC_FETCH_AND_ADD")]
    #[inline]
    pub fn masked_fetch_add(remote: Remote, add: u64, boundary: u64, sges: &'a [Sge]) -> Self {
        Self::new(SendOp::MaskedFetchAdd { remote, add, boundary }, Payload::Sges(sges))
    }

    /// Invalidates a key of this side.
    #[doc(alias = "IBV_WR_LOCAL_INV")]
    #[doc(alias = "ibv_wr_local_inv")]
    #[inline]
    pub fn local_inv(rkey: Rkey) -> Self {
        Self::new(SendOp::LocalInv(rkey), Payload::Sges(&[]))
    }

    /// Binds a memory window, or unbinds it.
    #[doc(alias = "IBV_WR_BIND_MW")]
    #[doc(alias = "ibv_wr_bind_mw")]
    #[inline]
    pub fn bind_mw(binding: WindowBinding) -> Self {
        Self::new(SendOp::BindMw(binding), Payload::Sges(&[]))
    }

    /// Makes earlier writes to memory of the peer visible or persistent before it completes.
    #[doc(alias = "IBV_WR_FLUSH")]
    #[doc(alias = "ibv_wr_flush")]
    #[inline]
    pub fn flush(remote: Remote, length: u32, placement: Placement, level: FlushLevel) -> Self {
        Self::new(SendOp::Flush { remote, length, placement, level }, Payload::Sges(&[]))
    }

    /// Writes eight bytes of the peer, at a multiple of eight, atomically.
    #[doc(alias = "IBV_WR_ATOMIC_WRITE")]
    #[doc(alias = "ibv_wr_atomic_write")]
    #[inline]
    pub fn atomic_write(remote: Remote, value: [u8; 8]) -> Self {
        Self::new(SendOp::AtomicWrite { remote, value }, Payload::Sges(&[]))
    }

    /// A packet of a raw packet queue pair, with a header and offloads. [`send`](Self::send) sends
    /// a packet without them.
    #[inline]
    pub fn packet(packet: Packet, sges: &'a [Sge]) -> Self {
        Self::new(SendOp::Packet(packet), Payload::Sges(sges))
    }

    /// The number that the completion will carry; 0 unless set.
    #[inline]
    #[must_use]
    pub fn id(mut self, wr_id: u64) -> Self {
        self.wr_id = wr_id;
        self
    }

    /// Asks for a completion when the request succeeds; a failing one always completes.
    ///
    /// A request that is not signaled keeps its place in the queue until a later, signaled one of the same queue has
    /// completed and was polled. Signal at least the last of as many requests as the queue holds, or it is
    /// [full](crate::PostError::Full) for ever.
    #[doc(alias = "IBV_SEND_SIGNALED")]
    #[inline]
    #[must_use]
    pub fn signaled(mut self) -> Self {
        self.flags |= SendFlags::SIGNALED;
        self
    }

    /// Wakes a peer that waits for solicited completions only.
    #[doc(alias = "IBV_SEND_SOLICITED")]
    #[inline]
    #[must_use]
    pub fn solicited(mut self) -> Self {
        self.flags |= SendFlags::SOLICITED;
        self
    }

    /// Starts after all earlier reads and atomics of this queue have completed.
    #[doc(alias = "IBV_SEND_FENCE")]
    #[inline]
    #[must_use]
    pub fn fence(mut self) -> Self {
        self.flags |= SendFlags::FENCE;
        self
    }

    /// Takes the data from `bytes`, copied when the request is pushed, in place of registered
    /// memory. For sends and writes.
    #[doc(alias = "IBV_SEND_INLINE")]
    #[doc(alias = "ibv_wr_set_inline_data")]
    #[inline]
    #[must_use]
    pub fn inline(mut self, bytes: &'a [u8]) -> Self {
        self.flags |= SendFlags::INLINE;
        self.payload = Payload::Inline(bytes);
        self
    }

    /// As [`inline`](Self::inline), from several slices, one behind the other; they count as their sum.
    ///
    /// ```
    /// # use uverbs::SendWr;
    /// # fn f(header: &[u8; 16], body: &[u8]) {
    /// let parts = [header, body];
    /// let wr = SendWr::send(&[]).inline_list(&parts);
    /// # }
    /// ```
    #[doc(alias = "ibv_wr_set_inline_data_list")]
    #[inline]
    #[must_use]
    pub fn inline_list(mut self, parts: &'a [&'a [u8]]) -> Self {
        self.flags |= SendFlags::INLINE;
        self.payload = Payload::InlineList(parts);
        self
    }

    /// The destination of a datagram; every request of a datagram queue needs it, and no other.
    #[doc(alias = "ibv_wr_set_ud_addr")]
    #[inline]
    #[must_use]
    pub fn to(mut self, destination: Destination<'a>) -> Self {
        self.destination = Some(destination);
        self
    }

    /// The shared receive queue that a message of an XRC initiator goes to; every request of one
    /// needs it, except local invalidations and bindings, and no other request may have it. A read,
    /// a write or an atomic consumes no receive and still names a queue of the target's XRC domain.
    #[doc(alias = "remote_srqn")]
    #[doc(alias = "ibv_wr_set_xrc_srqn")]
    #[inline]
    #[must_use]
    pub fn to_srq(mut self, number: SrqNumber) -> Self {
        self.srq = Some(number);
        self
    }
}

/// A request for a receive queue.
///
/// ```
/// # use uverbs::{Lkey, RecvWr, Sge};
/// let sges = [Sge { addr: 0x1000, length: 64, lkey: Lkey(7) }];
/// let wr = RecvWr::new(&sges).id(42);
/// ```
#[doc(alias = "ibv_recv_wr")]
#[derive(Clone, Copy, Debug)]
pub struct RecvWr<'a> {
    pub(crate) wr_id: u64,
    pub(crate) sges: &'a [Sge],
}

impl<'a> RecvWr<'a> {
    /// Receives a message into `sges`, in order. A datagram is preceded by 40 bytes for a global route
    /// header, which are written only if there was one.
    #[inline]
    pub fn new(sges: &'a [Sge]) -> Self {
        RecvWr { wr_id: 0, sges }
    }

    /// The number that the completion will carry; 0 unless set.
    #[inline]
    #[must_use]
    pub fn id(mut self, wr_id: u64) -> Self {
        self.wr_id = wr_id;
        self
    }
}
