//! Receive queues, of a queue pair or shared: this process produces, and the kernel consumes.

use super::{Rxe, map_ring, unmapped};
use crate::error::{Error, Result};
use crate::memory::gate::Gate;
use crate::memory::mapping::Mapper;
use crate::memory::pointer::OutPointer;
use crate::memory::rxe_queue::RxeQueue;
use crate::provider::{
    self, CreateRequest, CreatedSrq, Execute, Member, RecvCursor, SharedReceives, SrqInitAttr,
};
use crate::uverbs::command::Command;
use crate::wr::{PostError, RecvWr, RingError};
use rustix::io::Errno;
use std::sync::atomic::Ordering;
use uverbs_uapi::object::{UVERBS_ATTR_UHW_OUT, UVERBS_OBJECT_SRQ};
use uverbs_uapi::rxe::{
    mminfo, rxe_create_srq_resp, rxe_dma_info, rxe_modify_srq_cmd, rxe_recv_wqe, rxe_sge,
};
use uverbs_uapi::srq::{
    UVERBS_ATTR_CREATE_SRQ_MAX_SGE, UVERBS_ATTR_CREATE_SRQ_MAX_WR,
    UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE, UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR,
    UVERBS_METHOD_SRQ_CREATE,
};
use zerocopy::{FromZeros, IntoBytes};

/// Creates a shared receive queue. Pairs with `rxe_srq_from_init` in `rxe_srq.c`, which makes its
/// memory.
pub(super) fn create_srq(
    rxe: &Rxe,
    attr: SrqInitAttr,
    verb: &'static str,
    mapper: &dyn Mapper,
    execute: Execute<'_>,
) -> Result<CreatedSrq> {
    let gate = rxe.gate(verb)?;
    // A shared receive queue has no states to wait for.
    gate.level().store(1, Ordering::Relaxed);
    let mut response = rxe_create_srq_resp::default();
    let (mut max_wr, mut max_sge) = (0u32, 0u32);
    let mut command = Command::new(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_CREATE);
    command
        .u32(UVERBS_ATTR_CREATE_SRQ_MAX_WR, attr.max_wr)
        .u32(UVERBS_ATTR_CREATE_SRQ_MAX_SGE, attr.max_sge)
        .output(UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR, &mut max_wr)
        .output(UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE, &mut max_sge)
        .output(UVERBS_ATTR_UHW_OUT, &mut response);
    execute(CreateRequest { command, pinned: 0, resources: None })?;
    let ring = RxeRq::map(response.mi, max_sge, gate.clone(), mapper);
    let ring = ring.map_err(|errno| unmapped(verb, errno))?;
    // This sizes the tables of receives, so it must not exceed the mapped ring.
    let max_wr = max_wr.min(ring.capacity());
    let ring = provider::SrqRing::Rxe(ring);
    let shared_receives = SharedReceives { wr_ids: None };
    let member = Member::default();
    Ok(CreatedSrq { ring, gate, shared_receives, member, number: 0, max_wr, max_sge })
}

/// The poster's side of a receive queue.
#[derive(Debug)]
pub(crate) struct RxeRq {
    queue: RxeQueue,
    /// Producer index.
    producer: u32,
    max_sge: u32,
    /// Whether the kernel has left this ring for another, so that nothing more fits.
    closed: bool,
    /// Whether nothing was ever posted, here or before the queue was resized.
    fresh: bool,
    gate: Gate,
}

impl RxeRq {
    pub(crate) fn map(
        mi: mminfo,
        max_sge: u32,
        gate: Gate,
        mapper: &dyn Mapper,
    ) -> std::result::Result<RxeRq, Errno> {
        let queue = map_queue(mi, max_sge, mapper)?;
        let producer = queue.producer();
        Ok(RxeRq { queue, producer, max_sge, closed: false, fresh: true, gate })
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.queue.capacity()
    }

    /// The cursor at which a batch begins.
    #[inline]
    pub(crate) fn begin(&self) -> RecvCursor {
        let used = self.queue.distance(self.queue.consumer(), self.producer);
        let room = if self.closed { 0 } else { self.queue.capacity() - used };
        RecvCursor { at: self.producer, room, ..RecvCursor::default() }
    }

    /// Whether nothing was ever posted.
    pub(crate) fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// Moves a shared receive queue to a ring of another size, into which the kernel copies its
    /// receives. Pairs with `rxe_srq_from_attr`, which returns the mmap offset of the new ring.
    pub(crate) fn resize(
        &mut self,
        verb: &'static str,
        mapper: &dyn Mapper,
        execute: impl FnOnce(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut mi = mminfo::new_zeroed();
        let pointer = OutPointer::new(&mut mi);
        let driver = rxe_modify_srq_cmd { mmap_info_addr: pointer.address() };
        let resized = execute(driver.as_bytes());
        let mi = pointer.read();
        resized?;
        // The kernel has left the old ring, even if the new one cannot be mapped.
        self.closed = true;
        self.queue = map_queue(mi, self.max_sge, mapper)
            .map_err(|errno| Error::new(verb, errno).detail("the new queue could not be mapped"))?;
        self.producer = self.queue.producer();
        self.closed = false;
        Ok(())
    }

    /// Hands the WQEs up to a cursor to the kernel; nothing in a forked child.
    pub(crate) fn ring(&mut self, cursor: RecvCursor) -> std::result::Result<(), RingError> {
        if self.gate.is_shut() {
            return Err(RingError::Forked);
        }
        self.fresh = false;
        self.producer = cursor.at;
        self.queue.publish_producer(cursor.at);
        Ok(())
    }

    /// Checks a request, writes its WQE at the cursor, and advances the cursor; after an error it has not moved.
    #[inline]
    pub(crate) fn push(
        &self,
        cursor: &mut RecvCursor,
        recv: &RecvWr<'_>,
    ) -> std::result::Result<(), PostError> {
        self.write(*cursor, recv)?;
        cursor.at = self.queue.next(cursor.at);
        cursor.room -= 1;
        Ok(())
    }

    /// Checks a request, and writes its WQE at the cursor.
    fn write(&self, cursor: RecvCursor, recv: &RecvWr<'_>) -> std::result::Result<(), PostError> {
        // A batch may be older than a fork.
        if self.gate.is_shut() {
            return Err(PostError::Forked);
        }
        if cursor.room == 0 {
            return Err(PostError::Full);
        }
        let num_sge = recv.sges.len() as u32;
        if num_sge > self.max_sge {
            return Err(PostError::TooManySge { max: self.max_sge });
        }
        let mut length = 0u32;
        for sge in recv.sges {
            length = length.checked_add(sge.length).ok_or(PostError::TooLong)?;
        }
        let wqe = rxe_recv_wqe {
            wr_id: recv.wr_id,
            dma: rxe_dma_info { length, resid: length, num_sge, ..Default::default() },
            ..Default::default()
        };
        if !(self.queue.write(cursor.at, 0, &wqe)
            && super::sq::write_sges(&self.queue, cursor.at, size_of::<rxe_recv_wqe>(), recv.sges))
        {
            return Err(PostError::TooManySge { max: self.max_sge });
        }
        Ok(())
    }
}

fn map_queue(
    mi: mminfo,
    max_sge: u32,
    mapper: &dyn Mapper,
) -> std::result::Result<RxeQueue, Errno> {
    let sges = (max_sge as usize).saturating_mul(size_of::<rxe_sge>());
    map_ring(mi, sges.saturating_add(size_of::<rxe_recv_wqe>()), mapper)
}
