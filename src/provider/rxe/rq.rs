//! rxe's receive queues, of a queue pair or shared: we produce, the kernel consumes.

use super::map_ring;
use crate::memory::mapping::Mapper;
use crate::memory::rxe_queue::RxeQueue;
use crate::provider::RecvCursor;
use crate::wr::{PostError, RecvWr};
use rustix::io::Errno;
use uverbs_uapi::rxe::{mminfo, rxe_dma_info, rxe_recv_wqe, rxe_sge};

#[derive(Debug)]
pub(crate) struct RecvRing {
    ring: RxeQueue,
    producer: u32,
    max_sge: u32,
    closed: bool,
    /// Whether nothing was ever posted, here or before the queue was resized.
    fresh: bool,
}

impl RecvRing {
    pub(crate) fn map(mi: mminfo, max_sge: u32, mapper: &dyn Mapper) -> Result<RecvRing, Errno> {
        let element = size_of::<rxe_recv_wqe>() + max_sge as usize * size_of::<rxe_sge>();
        let ring = map_ring(mi, element, mapper)?;
        let producer = ring.producer();
        Ok(RecvRing { ring, producer, max_sge, closed: false, fresh: true })
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.ring.capacity()
    }

    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    #[inline]
    pub(crate) fn cursor(&self) -> RecvCursor {
        let used = self.ring.distance(self.ring.consumer(), self.producer);
        let room = if self.closed { 0 } else { self.ring.capacity() - used };
        RecvCursor { at: self.producer, room, ..RecvCursor::default() }
    }

    /// Whether nothing was ever posted.
    pub(crate) fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// As `fresh` says of the ring that this one takes the place of.
    pub(crate) fn after(self, fresh: bool) -> RecvRing {
        RecvRing { fresh, ..self }
    }

    #[inline]
    pub(crate) fn publish(&mut self, position: u32) {
        self.fresh = false;
        self.producer = position;
        self.ring.publish_producer(position);
    }

    #[inline]
    pub(crate) fn push(&self, cursor: &mut RecvCursor, recv: &RecvWr<'_>) -> Result<(), PostError> {
        // A batch may be older than the fork.
        if self.ring.is_inherited() {
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
        if !(self.ring.write(cursor.at, 0, &wqe)
            && super::sq::write_sges(&self.ring, cursor.at, size_of::<rxe_recv_wqe>(), recv.sges))
        {
            return Err(PostError::TooManySge { max: self.max_sge });
        }
        cursor.at = self.ring.next(cursor.at);
        cursor.room -= 1;
        Ok(())
    }
}
