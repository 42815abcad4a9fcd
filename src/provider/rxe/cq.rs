//! rxe's completion queue: the kernel produces, we consume.

use super::map_ring;
use crate::memory::mapping::Mapper;
use crate::memory::rxe_queue::{ProducerWatch, RxeQueue};
use rustix::io::Errno;
use uverbs_uapi::rxe::mminfo;
use uverbs_uapi::wc::ib_uverbs_wc;

#[derive(Debug)]
pub(crate) struct CqRing {
    ring: RxeQueue,
    consumer: u32,
    /// The producer as last seen: looked at again only when everything up to it is consumed.
    producer: u32,
}

impl CqRing {
    pub(crate) fn map(mi: mminfo, mapper: &dyn Mapper) -> Result<CqRing, Errno> {
        let ring = map_ring(mi, size_of::<ib_uverbs_wc>(), mapper)?;
        let consumer = ring.consumer();
        Ok(CqRing { ring, consumer, producer: consumer })
    }

    #[inline]
    pub(crate) fn next(&mut self) -> Option<ib_uverbs_wc> {
        if self.consumer == self.producer {
            self.producer = self.ring.producer();
            if self.consumer == self.producer {
                return None;
            }
        }
        let wc = self.ring.read(self.consumer)?;
        self.consumer = self.ring.next(self.consumer);
        Some(wc)
    }

    #[inline]
    pub(crate) fn release(&mut self) {
        self.ring.publish_consumer(self.consumer);
    }

    /// How others see what the device completed, and the slot of the next entry to consume.
    pub(crate) fn watch(&self) -> (ProducerWatch, u32) {
        (self.ring.watch(), self.consumer)
    }

    pub(crate) fn pending(&self) -> u32 {
        self.ring.distance(self.consumer, self.ring.producer())
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.ring.capacity()
    }
}
