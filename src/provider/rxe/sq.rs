//! rxe's send queue: this process produces, and the kernel consumes when the doorbell rings.

use super::ah::NamedAddresses;
use super::map_ring;
use crate::memory::gate::Gate;
use crate::memory::mapping::Mapper;
use crate::memory::rxe_queue::RxeQueue;
use crate::provider::{SendCursor, SendLimits};
use crate::qp::state::QpType;
use crate::wr::{
    Address, Payload, PostError, QpTransport, RingError, SendOp, SendWr, Sge, inline_bytes,
};
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_uapi::rxe::{
    mminfo, rxe_dma_info, rxe_send_wqe, rxe_send_wr, rxe_send_wr_atomic, rxe_send_wr_flush,
    rxe_send_wr_mw, rxe_send_wr_rdma, rxe_send_wr_ud, rxe_sge,
};
use uverbs_uapi::wr::ib_uverbs_wr_opcode as opcode;
use zerocopy::{Immutable, IntoBytes};

const HEADER: usize = size_of::<rxe_send_wqe>();

#[derive(Debug)]
pub(crate) struct RxeSq {
    queue: RxeQueue,
    /// Producer index.
    producer: u32,
    limits: SendLimits,
    transport: QpTransport,
    /// The address handles that the WQEs of a UD queue pair name.
    named: Option<Arc<NamedAddresses>>,
    gate: Gate,
}

impl RxeSq {
    pub(crate) fn map(
        mi: mminfo,
        limits: SendLimits,
        transport: QpTransport,
        gate: Gate,
        mapper: &dyn Mapper,
    ) -> Result<RxeSq, Errno> {
        let sges = (limits.max_sge as usize).saturating_mul(size_of::<rxe_sge>());
        let payload = sges.max(limits.max_inline as usize);
        let queue = map_ring(mi, payload.saturating_add(HEADER), mapper)?;
        let producer = queue.producer();
        let named = (transport.qp_type == QpType::UD)
            .then(|| Arc::new(NamedAddresses::new(&queue, producer)));
        Ok(RxeSq { queue, producer, limits, transport, named, gate })
    }

    /// The address handles that its WQEs name, if it is of a UD queue pair.
    pub(crate) fn named(&self) -> Option<&Arc<NamedAddresses>> {
        self.named.as_ref()
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.queue.capacity()
    }

    /// The cursor at which a batch begins. WQEs that an earlier batch wrote and did not ring are dropped.
    pub(crate) fn begin(&self) -> SendCursor {
        if let Some(named) = &self.named {
            named.begin(self.producer);
        }
        let used = self.queue.distance(self.queue.consumer(), self.producer);
        let room = self.queue.capacity() - used;
        SendCursor { at: self.producer, room, ..SendCursor::default() }
    }

    /// WQEs up to a cursor that are not published.
    pub(crate) fn pushed(&self, cursor: &SendCursor) -> u32 {
        self.queue.distance(self.producer, cursor.at)
    }

    /// Publishes the WQEs up to a producer index to the kernel, which reads them when the doorbell rings.
    pub(crate) fn ring(&mut self, producer: u32) -> Result<(), RingError> {
        if self.gate.is_shut() {
            return Err(RingError::Forked);
        }
        self.producer = producer;
        self.queue.publish_producer(producer);
        Ok(())
    }

    /// Checks a request, writes its WQE at the cursor, and advances the cursor; after an error it has not moved.
    pub(crate) fn push(&self, cursor: &mut SendCursor, wr: &SendWr<'_>) -> Result<(), PostError> {
        // A batch may be older than a fork.
        if self.gate.is_shut() {
            return Err(PostError::Forked);
        }
        self.transport.check(wr)?;
        if cursor.room == 0 {
            return Err(PostError::no_room(self.queue.capacity() as usize));
        }
        let mut wqe = rxe_send_wqe {
            wr: rxe_send_wr { wr_id: wr.wr_id, send_flags: wr.flags.bits(), ..Default::default() },
            ..Default::default()
        };
        describe(wr, &mut wqe)?;
        match wr.payload {
            Payload::Sges(sges) => {
                let num_sge = sges.len() as u32;
                if num_sge > self.limits.max_sge {
                    return Err(PostError::TooManySge { max: self.limits.max_sge });
                }
                let mut length = 0u32;
                for sge in sges {
                    length = length.checked_add(sge.length).ok_or(PostError::TooLong)?;
                }
                check_atomic(&wr.op, length)?;
                // An atomic write carries its eight bytes in the request.
                if !matches!(wr.op, SendOp::AtomicWrite { .. }) {
                    wqe.dma = dma(length, num_sge);
                }
                if !write_sges(&self.queue, cursor.at, HEADER, sges) {
                    return Err(PostError::TooManySge { max: self.limits.max_sge });
                }
            }
            Payload::Inline(bytes) => {
                if bytes.len() > self.limits.max_inline as usize {
                    return Err(PostError::InlineTooLong { max: self.limits.max_inline });
                }
                wqe.dma = dma(bytes.len() as u32, 0);
                if !self.queue.write(cursor.at, HEADER, bytes) {
                    return Err(PostError::InlineTooLong { max: self.limits.max_inline });
                }
            }
            Payload::InlineList(parts) => {
                let too_long = PostError::InlineTooLong { max: self.limits.max_inline };
                let length = inline_bytes(parts);
                if length > self.limits.max_inline as usize {
                    return Err(too_long);
                }
                wqe.dma = dma(length as u32, 0);
                let mut at = HEADER;
                for part in parts {
                    if !self.queue.write(cursor.at, at, *part) {
                        return Err(too_long);
                    }
                    at += part.len();
                }
            }
        }
        if let SendOp::AtomicWrite { value, .. } = &wr.op {
            if !self.queue.write(cursor.at, HEADER, value) {
                return Err(PostError::InlineTooLong { max: self.limits.max_inline });
            }
        }
        // The whole header is written: a slot still holds fields from its last use, which the kernel changed.
        if !self.queue.write(cursor.at, 0, &wqe) {
            return Err(PostError::TooManySge { max: self.limits.max_sge });
        }
        if let (Some(named), Some(to)) = (&self.named, &wr.destination) {
            if let Address::Rxe { ah_num } = *to.address {
                named.set(cursor.at, ah_num);
            }
        }
        cursor.at = self.queue.next(cursor.at);
        cursor.room -= 1;
        Ok(())
    }
}

fn dma(length: u32, num_sge: u32) -> rxe_dma_info {
    rxe_dma_info { length, resid: length, num_sge, ..Default::default() }
}

/// An atomic returns eight bytes, so it needs room for them.
#[inline]
fn check_atomic(op: &SendOp<'_>, length: u32) -> Result<(), PostError> {
    match op {
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } if length < 8 => {
            Err(PostError::AtomicTooShort)
        }
        _ => Ok(()),
    }
}

/// Writes one arm of the operation union.
#[inline]
fn arm<T: IntoBytes + Immutable>(wqe: &mut rxe_send_wqe, value: &T) {
    if let Some(room) = wqe.wr.wr.get_mut(..size_of::<T>()) {
        room.copy_from_slice(value.as_bytes());
    }
}

#[inline]
fn rdma(wqe: &mut rxe_send_wqe, remote_addr: u64, rkey: u32) {
    wqe.iova = remote_addr;
    arm(wqe, &rxe_send_wr_rdma { remote_addr, rkey, ..Default::default() });
}

/// Fills in the operation's fields.
#[inline]
fn describe(wr: &SendWr<'_>, wqe: &mut rxe_send_wqe) -> Result<(), PostError> {
    let code = match wr.op {
        SendOp::Send => opcode::IB_UVERBS_WR_SEND,
        SendOp::SendImm(imm) => {
            wqe.wr.ex = imm.to_be();
            opcode::IB_UVERBS_WR_SEND_WITH_IMM
        }
        SendOp::SendInv(rkey) => {
            wqe.wr.ex = rkey.0;
            opcode::IB_UVERBS_WR_SEND_WITH_INV
        }
        SendOp::Write(remote) => {
            rdma(wqe, remote.addr, remote.rkey.0);
            opcode::IB_UVERBS_WR_RDMA_WRITE
        }
        SendOp::WriteImm(remote, imm) => {
            rdma(wqe, remote.addr, remote.rkey.0);
            wqe.wr.ex = imm.to_be();
            opcode::IB_UVERBS_WR_RDMA_WRITE_WITH_IMM
        }
        SendOp::Read(remote) => {
            rdma(wqe, remote.addr, remote.rkey.0);
            opcode::IB_UVERBS_WR_RDMA_READ
        }
        SendOp::CompareSwap { remote, compare, swap } => {
            atomic(wqe, remote.addr, remote.rkey.0, compare, swap)?;
            opcode::IB_UVERBS_WR_ATOMIC_CMP_AND_SWP
        }
        SendOp::FetchAdd { remote, add } => {
            atomic(wqe, remote.addr, remote.rkey.0, add, 0)?;
            opcode::IB_UVERBS_WR_ATOMIC_FETCH_AND_ADD
        }
        SendOp::MaskedCompareSwap { .. } | SendOp::MaskedFetchAdd { .. } => {
            return Err(PostError::Unsupported);
        }
        SendOp::LocalInv(rkey) => {
            wqe.wr.ex = rkey.0;
            opcode::IB_UVERBS_WR_LOCAL_INV
        }
        SendOp::BindMw(bind) => {
            arm(
                wqe,
                &rxe_send_wr_mw {
                    addr: bind.addr,
                    length: bind.length,
                    mr_lkey: bind.mr_lkey.0,
                    mw_rkey: bind.old_rkey.0,
                    rkey: bind.new_rkey.0,
                    access: bind.access.bits(),
                },
            );
            opcode::IB_UVERBS_WR_BIND_MW
        }
        SendOp::Flush { remote, length, placement, level } => {
            wqe.iova = remote.addr;
            arm(
                wqe,
                &rxe_send_wr_flush {
                    remote_addr: remote.addr,
                    length,
                    rkey: remote.rkey.0,
                    r#type: placement.bits(),
                    level: level.0,
                    ..Default::default()
                },
            );
            opcode::IB_UVERBS_WR_FLUSH
        }
        SendOp::AtomicWrite { remote, .. } => {
            if remote.addr % 8 != 0 {
                return Err(PostError::Unaligned);
            }
            rdma(wqe, remote.addr, remote.rkey.0);
            wqe.dma = dma(8, 0);
            opcode::IB_UVERBS_WR_ATOMIC_WRITE
        }
        SendOp::Packet(_) => return Err(PostError::Unsupported),
    };
    wqe.wr.opcode = code.0;
    if let Some(to) = &wr.destination {
        let Address::Rxe { ah_num } = *to.address else { return Err(PostError::Destination) };
        arm(
            wqe,
            &rxe_send_wr_ud {
                remote_qpn: to.qpn.0,
                remote_qkey: to.qkey.0,
                ah_num,
                ..Default::default()
            },
        );
    }
    Ok(())
}

#[inline]
fn atomic(
    wqe: &mut rxe_send_wqe,
    remote_addr: u64,
    rkey: u32,
    compare_add: u64,
    swap: u64,
) -> Result<(), PostError> {
    if remote_addr % 8 != 0 {
        return Err(PostError::Unaligned);
    }
    wqe.iova = remote_addr;
    arm(wqe, &rxe_send_wr_atomic { remote_addr, compare_add, swap, rkey, ..Default::default() });
    Ok(())
}

/// Writes scatter/gather entries behind a request's header.
#[inline]
pub(super) fn write_sges(ring: &RxeQueue, index: u32, header: usize, sges: &[Sge]) -> bool {
    sges.iter().enumerate().all(|(n, sge)| {
        let raw = rxe_sge { addr: sge.addr, length: sge.length, lkey: sge.lkey.0 };
        ring.write(index, header + n * size_of::<rxe_sge>(), &raw)
    })
}
