//! Requests: their operations, and the headers of their packets.
//!
//! From `init_req_packet` and `next_opcode_rc` of the kernel's `rxe_req.c`.

use crate::headers::{AtomicEth, Deth, Feth, Ieth, ImmDt, MaskedEth, PacketBuffer, Reth, XrcEth};
use crate::host::Atomic;
use crate::opcodes::{Opcode, Operation, Position, Transport};
use crate::queue_pair::MAX_MESSAGE;
use uverbs_uapi::wc::ib_wc_status;

/// A request, as a send WQE describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request<P> {
    /// The device's name of it.
    pub id: u64,
    /// Its operation.
    pub work: Work,
    /// Bytes of its local data.
    pub length: u32,
    /// Whether it begins only when all reads and atomics before it are complete.
    pub fence: bool,
    /// Whether the receiver's completion is solicited.
    pub solicited: bool,
    /// The SRQN on XRC.
    pub srq: u32,
    /// Where it goes, on UD.
    pub datagram: Option<Datagram<P>>,
}

/// Destination of a datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram<P> {
    /// Where to.
    pub path: P,
    /// Destination QPN.
    pub destination: u32,
    /// Q_Key.
    pub qkey: u32,
}

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Send.
    Send {
        /// Immediate data.
        immediate: Option<u32>,
    },
    /// Send that invalidates a key of the responder.
    SendInvalidate {
        /// The key.
        key: u32,
    },
    /// RDMA write.
    Write {
        /// Remote address.
        address: u64,
        /// Remote key.
        key: u32,
        /// Immediate data.
        immediate: Option<u32>,
    },
    /// RDMA read.
    Read {
        /// Remote address.
        address: u64,
        /// Remote key.
        key: u32,
    },
    /// Atomic. `length` of the request is 8, or 4 if it reaches a device of the same fabric.
    Atomic {
        /// Remote address.
        address: u64,
        /// Remote key.
        key: u32,
        /// The change.
        change: Atomic,
    },
    /// Flush. `length` of the request is that of the remote range.
    Flush {
        /// Remote address.
        address: u64,
        /// Remote key.
        key: u32,
        /// Placement type: see [`Feth::kind`].
        kind: u8,
        /// Selectivity level: see [`Feth::level`].
        level: u8,
    },
    /// Atomic write of eight bytes.
    AtomicWrite {
        /// Remote address.
        address: u64,
        /// Remote key.
        key: u32,
    },
    /// No packet: the device executes it, with [`Host::run_local`](crate::Host::run_local).
    Local,
}

impl Work {
    /// Whether the responder answers it with data or with a packet of its own, and no ACK of a later request stands
    /// for that. Fences wait for these, and `max_rd_atomic` bounds them.
    pub const fn is_answered(self) -> bool {
        matches!(
            self,
            Work::Read { .. } | Work::Atomic { .. } | Work::Flush { .. } | Work::AtomicWrite { .. }
        )
    }

    /// Whether its packets carry data, as many as it needs.
    pub(crate) const fn streams(self) -> bool {
        matches!(self, Work::Send { .. } | Work::SendInvalidate { .. } | Work::Write { .. })
    }
}

impl<P> Request<P> {
    /// The operation of a packet at a place in the message.
    pub(crate) fn operation(&self, position: Position) -> Option<Operation> {
        use Operation as O;
        Some(match (self.work, position) {
            (Work::Send { .. } | Work::SendInvalidate { .. }, Position::First) => O::SendFirst,
            (Work::Send { .. } | Work::SendInvalidate { .. }, Position::Middle) => O::SendMiddle,
            (Work::Send { immediate: None }, Position::Last) => O::SendLast,
            (Work::Send { immediate: None }, Position::Only) => O::SendOnly,
            (Work::Send { immediate: Some(_) }, Position::Last) => O::SendLastImmediate,
            (Work::Send { immediate: Some(_) }, Position::Only) => O::SendOnlyImmediate,
            (Work::SendInvalidate { .. }, Position::Last) => O::SendLastInvalidate,
            (Work::SendInvalidate { .. }, Position::Only) => O::SendOnlyInvalidate,
            (Work::Write { .. }, Position::First) => O::WriteFirst,
            (Work::Write { .. }, Position::Middle) => O::WriteMiddle,
            (Work::Write { immediate: None, .. }, Position::Last) => O::WriteLast,
            (Work::Write { immediate: None, .. }, Position::Only) => O::WriteOnly,
            (Work::Write { immediate: Some(_), .. }, Position::Last) => O::WriteLastImmediate,
            (Work::Write { immediate: Some(_), .. }, Position::Only) => O::WriteOnlyImmediate,
            (Work::Read { .. }, _) => O::ReadRequest,
            (Work::Atomic { change, .. }, _) => match change {
                Atomic::CompareSwap { .. } if self.length == 8 => O::CompareSwap,
                Atomic::FetchAdd { .. } if self.length == 8 => O::FetchAdd,
                Atomic::CompareSwap { .. } | Atomic::MaskedCompareSwap { .. } => {
                    O::MaskedCompareSwap
                }
                Atomic::FetchAdd { .. } | Atomic::MaskedFetchAdd { .. } => O::MaskedFetchAdd,
            },
            (Work::Flush { .. }, _) => O::Flush,
            (Work::AtomicWrite { .. }, _) => O::AtomicWrite,
            (Work::Local, _) => return None,
        })
    }

    /// Adds the headers behind the BTH; `offset` is that of the packet's data, and `asked` are the bytes of a read from
    /// there on.
    pub(crate) fn put_headers(
        &self,
        buffer: &mut PacketBuffer,
        opcode: Opcode,
        source: u32,
        offset: u32,
        asked: u32,
    ) {
        let position = opcode.operation.position();
        if opcode.transport == Transport::Xrc {
            buffer.header(&XrcEth::new(self.srq));
        }
        if let Some(datagram) = &self.datagram {
            buffer.header(&Deth::new(datagram.qkey, source));
        }
        match self.work {
            // A read that is repeated asks only for the missing part: `req_retry`.
            Work::Read { address, key } => {
                buffer.header(&reth(address.wrapping_add(offset.into()), key, asked));
            }
            Work::Write { address, key, .. } | Work::AtomicWrite { address, key }
                if position.begins() =>
            {
                let address = address.wrapping_add(offset.into());
                buffer.header(&reth(address, key, self.length - offset));
            }
            Work::Flush { address, key, kind, level } => {
                buffer.header(&Feth::new(kind, level));
                buffer.header(&reth(address, key, self.length));
            }
            Work::Atomic { address, key, change } => {
                put_atomic(buffer, opcode.operation, address, key, self.length, change);
            }
            _ => {}
        }
        match self.work {
            Work::Send { immediate } | Work::Write { immediate, .. } if position.ends() => {
                if let Some(data) = immediate {
                    buffer.header(&ImmDt { data: data.into() });
                }
            }
            Work::SendInvalidate { key } if position.ends() => {
                buffer.header(&Ieth { key: key.into() });
            }
            _ => {}
        }
    }

    /// Whether a queue pair of this transport can send it.
    ///
    /// # Errors
    ///
    /// The status with which it fails.
    pub(crate) fn check(
        &self,
        transport: Transport,
        psns: u32,
        max_rd_atomic: u8,
    ) -> Result<(), ib_wc_status> {
        // Each transport has local requests.
        if self.work == Work::Local {
            return Ok(());
        }
        let operation = self.operation(Position::Only);
        let known = operation.is_some_and(|operation| Opcode { transport, operation }.exists());
        let datagram = transport == Transport::Ud;
        let too_many = self.work.is_answered() && max_rd_atomic == 0;
        if !known || self.datagram.is_some() != datagram || too_many {
            return Err(ib_wc_status::IB_WC_LOC_QP_OP_ERR);
        }
        let fits = match self.work {
            Work::Atomic { .. } => matches!(self.length, 4 | 8),
            Work::AtomicWrite { .. } => self.length == 8,
            Work::Flush { .. } => true,
            // rxe drops a datagram that is too long, and tells that it was sent.
            _ => self.length <= MAX_MESSAGE && (!datagram || psns == 1),
        };
        if fits { Ok(()) } else { Err(ib_wc_status::IB_WC_LOC_LEN_ERR) }
    }
}

fn reth(address: u64, key: u32, length: u32) -> Reth {
    Reth { address: address.into(), key: key.into(), length: length.into() }
}

/// Adds the header of an atomic: AtomicETH, or MaskedETH if the operation is private.
fn put_atomic(
    buffer: &mut PacketBuffer,
    operation: Operation,
    address: u64,
    key: u32,
    length: u32,
    change: Atomic,
) {
    let bits = u64::MAX >> (64 - 8 * length.clamp(1, 8));
    let (swap_or_add, swap_mask, compare, compare_mask) = match change {
        Atomic::CompareSwap { compare, swap } => (swap, bits, compare, bits),
        Atomic::FetchAdd { add } => (add, 0, 0, 0),
        Atomic::MaskedCompareSwap { compare, compare_mask, swap, swap_mask } => {
            (swap, swap_mask, compare, compare_mask)
        }
        Atomic::MaskedFetchAdd { add, boundary } => (add, boundary, 0, 0),
    };
    let (address, key) = (address.into(), key.into());
    let (swap_or_add, compare) = (swap_or_add.into(), compare.into());
    match operation {
        Operation::CompareSwap | Operation::FetchAdd => {
            buffer.header(&AtomicEth { address, key, swap_or_add, compare });
        }
        _ => buffer.header(&MaskedEth {
            address,
            key,
            length: length.into(),
            swap_or_add,
            swap_mask: swap_mask.into(),
            compare,
            compare_mask: compare_mask.into(),
        }),
    }
}
