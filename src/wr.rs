//! Work requests: what a queue is asked to do.

use crate::access::Access;
use crate::ah::AddressHandle;
use crate::identity::Identity;
use crate::number::{Lkey, Qkey, Qpn, Rkey, SrqNumber, open_enum};
use crate::provider::Address;
use crate::qp::QpState;
use rustix::io::Errno;
use std::fmt;
use uverbs_uapi::wr::{ib_placement_type, ib_selectivity_level};

/// A piece of registered memory: where data comes from or goes to.
///
/// It names memory by number. Nothing keeps the memory alive or its owner away from it, which is
/// why ringing a batch is `unsafe`.
#[doc(alias = "ibv_sge")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

bitflags::bitflags! {
    /// How far a flush pushes data.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Placement: u8 {
        /// Visible to all of the peer's processors and devices.
        const GLOBAL = ib_placement_type::IB_FLUSH_GLOBAL.bits() as u8;
        /// In persistent memory.
        const PERSISTENT = ib_placement_type::IB_FLUSH_PERSISTENT.bits() as u8;
    }
}

open_enum! {
    /// What a flush covers.
    pub struct FlushLevel(u8) {
        /// The range that is named.
        RANGE = ib_selectivity_level::IB_FLUSH_RANGE.0, "range";
        /// The whole memory region.
        REGION = ib_selectivity_level::IB_FLUSH_MR.0, "region";
    }
}

/// How a memory window is bound; see [`MemoryWindow`](crate::MemoryWindow), which makes one.
#[derive(Clone, Copy, Debug)]
pub struct WindowBinding {
    /// The queue pair that it was prepared for, where it matters.
    pub(crate) qpn: Option<Qpn>,
    pub(crate) addr: u64,
    pub(crate) length: u64,
    pub(crate) mr_lkey: Lkey,
    pub(crate) old_rkey: Rkey,
    pub(crate) new_rkey: Rkey,
    pub(crate) access: Access,
}

/// Where a datagram goes.
#[doc(alias = "ibv_ah")]
#[derive(Clone, Copy, Debug)]
pub struct Destination<'a> {
    pub(crate) address: &'a Address,
    pub(crate) qpn: Qpn,
    pub(crate) qkey: Qkey,
    /// The domain of the address handle, which stays at least as long as the handle.
    pub(crate) domain: Identity,
}

impl<'a> Destination<'a> {
    /// The queue pair `qpn` with the key `qkey` at the port that `ah` leads to. The address handle
    /// must stay until the request completes, or it fails.
    #[inline]
    pub fn new(ah: &'a AddressHandle, qpn: Qpn, qkey: Qkey) -> Self {
        Destination { address: ah.address(), qpn, qkey, domain: ah.pd().identity() }
    }
}

/// What a [masked compare and swap](SendWr::masked_compare_swap) compares and stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct MaskedSwap {
    /// What the bits of `compare_mask` must be.
    pub compare: u64,
    /// Bits that are compared. Without any, the swap always happens.
    pub compare_mask: u64,
    /// What the bits of `swap_mask` become.
    pub swap: u64,
    /// Bits that are replaced.
    pub swap_mask: u64,
}

/// Requests are moved about, so what makes them long is borrowed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SendOp<'a> {
    Send,
    SendImm(u32),
    SendInv(Rkey),
    Write(Remote),
    WriteImm(Remote, u32),
    Read(Remote),
    CompareSwap { remote: Remote, compare: u64, swap: u64 },
    FetchAdd { remote: Remote, add: u64 },
    MaskedCompareSwap { remote: Remote, operands: &'a MaskedSwap },
    MaskedFetchAdd { remote: Remote, add: u64, boundary: u64 },
    LocalInv(Rkey),
    BindMw(WindowBinding),
    Flush { remote: Remote, length: u32, placement: Placement, level: FlushLevel },
    AtomicWrite { remote: Remote, value: [u8; 8] },
    Packet(Packet),
}

/// How a raw packet begins, and what the device adds to it; for [`SendWr::packet`].
///
/// ```
/// # use uverbs::{Lkey, Packet, SendWr, Sge};
/// # let (to, from) = ([0; 6], [0; 6]);
/// # let sges = [Sge { addr: 0x1000, length: 64, lkey: Lkey(7) }];
/// let mut ethernet = [0; 14];
/// ethernet[..6].copy_from_slice(&to);
/// ethernet[6..12].copy_from_slice(&from);
/// ethernet[12..].copy_from_slice(&[0x08, 0x00]);
/// let wr = SendWr::packet(Packet::new().header(&ethernet).ip_checksum(), &sges);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Packet {
    header: [u8; Packet::MAX_HEADER],
    /// More than there is room for is noticed when the request is pushed.
    length: u8,
    pub(crate) checksums: bool,
}

impl Packet {
    /// The longest header that a request takes: that of Ethernet with a VLAN tag.
    pub const MAX_HEADER: usize = 18;

    /// Nothing before the data, and nothing added.
    pub fn new() -> Self {
        Packet::default()
    }

    /// The first bytes of the packet, [`MAX_HEADER`](Self::MAX_HEADER) at most, copied now; the
    /// data of the request follows them.
    ///
    /// Some devices, ConnectX-4 for one, want the first 18 bytes of every packet in the request
    /// itself: there, packets whose data is in registered memory need a header of this length.
    #[inline]
    pub fn header(mut self, bytes: &[u8]) -> Self {
        self.length = bytes.len().min(u8::MAX.into()) as u8;
        self.header = [0; Packet::MAX_HEADER];
        for (place, byte) in self.header.iter_mut().zip(bytes) {
            *place = *byte;
        }
        self
    }

    /// Lets the device fill in the checksums of the IPv4 header and of the TCP or UDP header,
    /// where [`RawPacketCaps::IP_CSUM`](crate::RawPacketCaps::IP_CSUM) says that it can.
    #[doc(alias = "IBV_SEND_IP_CSUM")]
    #[inline]
    pub fn ip_checksum(mut self) -> Self {
        self.checksums = true;
        self
    }

    /// The header; `None` if it is too long.
    pub(crate) fn head(&self) -> Option<&[u8]> {
        self.header.get(..self.length.into())
    }
}

impl SendOp<'_> {
    /// The operation as a member of a set of operations.
    #[inline(always)]
    pub(crate) fn bit(&self) -> u32 {
        match self {
            SendOp::Send => 1,
            SendOp::SendImm(_) => 1 << 1,
            SendOp::SendInv(_) => 1 << 2,
            SendOp::Write(_) => 1 << 3,
            SendOp::WriteImm(..) => 1 << 4,
            SendOp::Read(_) => 1 << 5,
            SendOp::CompareSwap { .. } => 1 << 6,
            SendOp::FetchAdd { .. } => 1 << 7,
            SendOp::LocalInv(_) => 1 << 8,
            SendOp::BindMw(_) => 1 << 9,
            SendOp::Flush { .. } => 1 << 10,
            SendOp::AtomicWrite { .. } => 1 << 11,
            SendOp::MaskedCompareSwap { .. } => 1 << 12,
            SendOp::MaskedFetchAdd { .. } => 1 << 13,
            SendOp::Packet(_) => 1 << 14,
        }
    }

    /// The operations that take data from the request itself.
    pub(crate) const INLINE: u32 = 0b1_1111;

    /// Whether requests behind it may use a key that it changes.
    #[inline]
    pub(crate) fn changes_keys(&self) -> bool {
        matches!(self, SendOp::LocalInv(_) | SendOp::BindMw(_))
    }

    /// Whether the device writes memory of this side.
    #[inline]
    pub(crate) fn writes_here(&self) -> bool {
        matches!(
            self,
            SendOp::Read(_)
                | SendOp::CompareSwap { .. }
                | SendOp::FetchAdd { .. }
                | SendOp::MaskedCompareSwap { .. }
                | SendOp::MaskedFetchAdd { .. }
        )
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Payload<'a> {
    Sges(&'a [Sge]),
    Inline(&'a [u8]),
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

impl SendWr<'_> {
    /// Whether nothing about its memory need be looked at, and nobody but its queue pair takes it. A lone
    /// piece of no bytes, or too many, would be all that keeps the size of a request from being known when
    /// it is compiled.
    #[inline(always)]
    pub(crate) fn is_usual(&self) -> bool {
        let good = match self.payload {
            Payload::Sges([sge]) => sge.length as i32 > 0,
            Payload::Sges(_) | Payload::Inline(_) => true,
        };
        good && self.srq.is_none()
    }
}

impl<'a> SendWr<'a> {
    #[inline]
    fn new(op: SendOp<'a>, payload: Payload<'a>) -> Self {
        SendWr { wr_id: 0, op, flags: SendFlags::empty(), payload, destination: None, srq: None }
    }

    /// A message for the peer's next receive.
    #[doc(alias = "IBV_WR_SEND")]
    #[inline]
    pub fn send(sges: &'a [Sge]) -> Self {
        Self::new(SendOp::Send, Payload::Sges(sges))
    }

    /// A message with 32 bits on the side; they arrive as the number that they are here.
    #[doc(alias = "IBV_WR_SEND_WITH_IMM")]
    #[inline]
    pub fn send_imm(sges: &'a [Sge], imm: u32) -> Self {
        Self::new(SendOp::SendImm(imm), Payload::Sges(sges))
    }

    /// A message that invalidates a key at the peer.
    #[doc(alias = "IBV_WR_SEND_WITH_INV")]
    #[inline]
    pub fn send_inv(sges: &'a [Sge], rkey: Rkey) -> Self {
        Self::new(SendOp::SendInv(rkey), Payload::Sges(sges))
    }

    /// Writes to memory of the peer.
    #[doc(alias = "IBV_WR_RDMA_WRITE")]
    #[inline]
    pub fn write(remote: Remote, sges: &'a [Sge]) -> Self {
        Self::new(SendOp::Write(remote), Payload::Sges(sges))
    }

    /// Writes to memory of the peer and consumes one of its receives for `imm`.
    #[doc(alias = "IBV_WR_RDMA_WRITE_WITH_IMM")]
    #[inline]
    pub fn write_imm(remote: Remote, sges: &'a [Sge], imm: u32) -> Self {
        Self::new(SendOp::WriteImm(remote, imm), Payload::Sges(sges))
    }

    /// Reads from memory of the peer.
    #[doc(alias = "IBV_WR_RDMA_READ")]
    #[inline]
    pub fn read(remote: Remote, sges: &'a [Sge]) -> Self {
        Self::new(SendOp::Read(remote), Payload::Sges(sges))
    }

    /// Replaces eight bytes of the peer, at a multiple of eight, by `swap` if they equal
    /// `compare`; what was there comes back into `sges` in host byte order.
    #[doc(alias = "IBV_WR_ATOMIC_CMP_AND_SWP")]
    #[inline]
    pub fn compare_swap(remote: Remote, compare: u64, swap: u64, sges: &'a [Sge]) -> Self {
        Self::new(SendOp::CompareSwap { remote, compare, swap }, Payload::Sges(sges))
    }

    /// Adds to eight bytes of the peer, at a multiple of eight; what was there comes back into
    /// `sges` in host byte order.
    #[doc(alias = "IBV_WR_ATOMIC_FETCH_AND_ADD")]
    #[inline]
    pub fn fetch_add(remote: Remote, add: u64, sges: &'a [Sge]) -> Self {
        Self::new(SendOp::FetchAdd { remote, add }, Payload::Sges(sges))
    }

    /// Replaces some bits of eight bytes of the peer, at a multiple of eight, if some bits of them
    /// are as expected; all that was there comes back into `sges` in host byte order. The completion
    /// says [`COMPARE_SWAP`](crate::WcOpcode::COMPARE_SWAP).
    ///
    /// On mlx5, over reliable connections; others refuse it when it is pushed. The kernel does not
    /// tell whether a device can do it: one that cannot fails the request.
    #[doc(alias = "IB_WR_MASKED_ATOMIC_CMP_AND_SWP")]
    #[inline]
    pub fn masked_compare_swap(remote: Remote, operands: &'a MaskedSwap, sges: &'a [Sge]) -> Self {
        Self::new(SendOp::MaskedCompareSwap { remote, operands }, Payload::Sges(sges))
    }

    /// Adds to fields of eight bytes of the peer, at a multiple of eight; what was there comes back
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
    #[inline]
    pub fn local_inv(rkey: Rkey) -> Self {
        Self::new(SendOp::LocalInv(rkey), Payload::Sges(&[]))
    }

    /// Binds a memory window, or unbinds it.
    #[doc(alias = "IBV_WR_BIND_MW")]
    #[inline]
    pub fn bind_mw(binding: WindowBinding) -> Self {
        Self::new(SendOp::BindMw(binding), Payload::Sges(&[]))
    }

    /// Makes earlier writes to memory of the peer visible or persistent before it completes.
    #[doc(alias = "IBV_WR_FLUSH")]
    #[inline]
    pub fn flush(remote: Remote, length: u32, placement: Placement, level: FlushLevel) -> Self {
        Self::new(SendOp::Flush { remote, length, placement, level }, Payload::Sges(&[]))
    }

    /// Writes eight bytes of the peer, at a multiple of eight, in one piece.
    #[doc(alias = "IBV_WR_ATOMIC_WRITE")]
    #[inline]
    pub fn atomic_write(remote: Remote, value: [u8; 8]) -> Self {
        Self::new(SendOp::AtomicWrite { remote, value }, Payload::Sges(&[]))
    }

    /// A packet of a raw packet queue pair, with more to say of it than
    /// [`send`](Self::send), which sends one as well.
    #[inline]
    pub fn packet(packet: Packet, sges: &'a [Sge]) -> Self {
        Self::new(SendOp::Packet(packet), Payload::Sges(sges))
    }

    /// The number that the completion will carry.
    #[inline]
    #[must_use]
    pub fn id(mut self, wr_id: u64) -> Self {
        self.wr_id = wr_id;
        self
    }

    /// Asks for a completion when the request succeeds; a failing one always completes.
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
    #[inline]
    #[must_use]
    pub fn inline(mut self, bytes: &'a [u8]) -> Self {
        self.flags |= SendFlags::INLINE;
        self.payload = Payload::Inline(bytes);
        self
    }

    /// Where a datagram goes; every request of a datagram queue needs it, and no other.
    #[inline]
    #[must_use]
    pub fn to(mut self, destination: Destination<'a>) -> Self {
        self.destination = Some(destination);
        self
    }

    /// The shared receive queue that a message of an XRC initiator goes to; every request of one
    /// needs it but those that stay here, and no other. A read, a write or an atomic consumes no
    /// receive and still names a queue of the target's XRC domain.
    #[doc(alias = "remote_srqn")]
    #[inline]
    #[must_use]
    pub fn to_srq(mut self, number: SrqNumber) -> Self {
        self.srq = Some(number);
        self
    }
}

/// A request for a receive queue.
#[doc(alias = "ibv_recv_wr")]
#[derive(Clone, Copy, Debug)]
pub struct Recv<'a> {
    /// The number that the completion will carry.
    pub wr_id: u64,
    /// Where the message goes. A datagram is preceded by 40 bytes for a global route header,
    /// which are written only if there was one.
    pub sges: &'a [Sge],
}

/// Why a request could not be posted. Nothing of a request that failed reaches the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PostError {
    /// The queue holds as many requests as it can; completions make room.
    Full,
    /// More scatter/gather entries than the queue was created for.
    TooManySge {
        /// The most that it takes.
        max: u32,
    },
    /// More inline data than the queue was created for.
    InlineTooLong {
        /// The most that it takes, in bytes.
        max: u32,
    },
    /// More than 2^32 - 1 bytes in one message; the limit of mlx5 is 2^31 - 1.
    TooLong,
    /// The remote address of an atomic is no multiple of eight.
    Unaligned,
    /// An atomic has less than eight bytes of room for what it returns.
    AtomicTooShort,
    /// The operation does not exist on a queue pair of this type.
    Unsupported,
    /// A window of type 2 is bound through another queue pair than the one that
    /// [`bind`](crate::MemoryWindow::bind) named.
    ForeignBinding,
    /// The queue pair takes its receives from a shared receive queue: post there.
    SharedReceives,
    /// Inline data with an operation that takes none from this side.
    NoInline,
    /// A request of an XRC initiator that names no shared receive queue, or another that names one.
    SrqNumber,
    /// A datagram without a destination, or a destination without datagrams.
    Destination,
    /// The address handle belongs to another protection domain than the queue pair.
    ForeignAddress,
    /// The queue pair takes no requests in this state.
    State(QpState),
    /// The thread domain is not the one that the queue was created under.
    ForeignThreadDomain,
    /// The memory belongs to another protection domain than the queue.
    ForeignMemory,
    /// The request names memory by number, where the memory itself is to be given.
    NamesMemory,
    /// The device would write memory that others are reading.
    ReadOnly,
    /// This process is a fork of the one that created the queue.
    Forked,
    /// The header of a raw packet is longer than a request takes.
    HeaderTooLong {
        /// The most that it takes, in bytes.
        max: u32,
    },
    /// The device wants the beginning of a raw packet in the request, as its header or inline.
    HeaderTooShort {
        /// The least that it wants, in bytes.
        min: u32,
    },
    /// The device fills in no checksums of raw packets.
    NoChecksums,
    /// The kernel refused to look at the queue; what was posted stays in it.
    Kernel(Errno),
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PostError::Full => f.write_str("the queue is full"),
            PostError::TooManySge { max } => {
                write!(f, "more scatter/gather entries than the queue's maximum of {max}")
            }
            PostError::InlineTooLong { max } => {
                write!(f, "more inline data than the queue's maximum of {max} bytes")
            }
            PostError::TooLong => {
                f.write_str("the message is longer than 2^32 - 1 bytes, or on mlx5 than 2^31 - 1")
            }
            PostError::Unaligned => {
                f.write_str("the remote address of an atomic is not a multiple of 8")
            }
            PostError::AtomicTooShort => {
                f.write_str("an atomic needs 8 bytes of room for what it returns")
            }
            PostError::Unsupported => {
                f.write_str("the operation does not exist on this type of queue pair")
            }
            PostError::ForeignBinding => {
                f.write_str("the binding was prepared for another queue pair")
            }
            PostError::SharedReceives => {
                f.write_str("receives come from the shared receive queue: post them there")
            }
            PostError::NoInline => f.write_str("the operation takes no inline data"),
            PostError::SrqNumber => f.write_str(
                "a request of an XRC initiator needs the number of a shared receive queue, others \
                 take none",
            ),
            PostError::Destination => f.write_str(
                "a datagram needs a destination, and requests of other queue pairs have none",
            ),
            PostError::ForeignAddress => f.write_str(
                "the address handle belongs to another protection domain than the queue pair",
            ),
            PostError::State(state) => {
                write!(f, "the queue pair takes no such request in state {state}")
            }
            PostError::ForeignThreadDomain => {
                f.write_str("the queue was created under another thread domain")
            }
            PostError::ForeignMemory => {
                f.write_str("the memory belongs to another protection domain than the queue")
            }
            PostError::NamesMemory => {
                f.write_str("the request names memory by number, where the memory is to be given")
            }
            PostError::ReadOnly => {
                f.write_str("the device would write memory that others are reading")
            }
            PostError::Forked => {
                f.write_str("this process is a fork of the one that created the queue")
            }
            PostError::HeaderTooLong { max } => {
                write!(f, "the header is longer than {max} bytes; the rest is data")
            }
            PostError::HeaderTooShort { min } => {
                write!(f, "the device wants {min} bytes of the packet as its header or inline")
            }
            PostError::NoChecksums => {
                f.write_str("the device fills in no checksums of raw packets")
            }
            PostError::Kernel(errno) => write!(f, "the kernel refused to send: {errno}"),
        }
    }
}

impl std::error::Error for PostError {}
