//! The poller of one of rxe's completion queues: the ring, and what it knows of queue pairs that
//! are gone.

use super::cq::CqRing;
use super::retired::{Retired, Retirements};
use crate::memory::rxe_queue::ProducerWatch;
use std::sync::Arc;
use uverbs_uapi::wc::ib_uverbs_wc;

#[derive(Debug)]
pub(crate) struct Poller {
    ring: CqRing,
    /// Entries consumed in all, in whichever ring.
    consumed: u64,
    retired: Retired,
    retirements: Arc<Retirements<ProducerWatch>>,
    /// The entry consumed last, as lent.
    current: ib_uverbs_wc,
}

impl Poller {
    pub(crate) fn new(ring: CqRing) -> Poller {
        let (watch, consumer) = ring.watch();
        let retirements = Arc::new(Retirements::new(watch, consumer));
        Poller {
            ring,
            consumed: 0,
            retired: Retired::default(),
            retirements,
            current: ib_uverbs_wc::default(),
        }
    }

    pub(crate) fn retirements(&self) -> &Arc<Retirements<ProducerWatch>> {
        &self.retirements
    }

    /// Entries consumed in all.
    pub(crate) fn position(&self) -> u64 {
        self.consumed
    }

    /// How others see what the device completed, and the slot of the next entry to consume.
    pub(crate) fn watch(&self) -> (ProducerWatch, u32) {
        self.ring.watch()
    }

    /// Goes on with another ring, in which the kernel put what was not consumed.
    pub(crate) fn replace(&mut self, ring: CqRing) {
        self.ring = ring;
    }

    /// The next completion of a queue pair that is alive, consumed. With `fresh` it is asked first who
    /// is gone.
    #[inline(never)]
    pub(crate) fn next(&mut self, fresh: bool) -> Option<&ib_uverbs_wc> {
        if fresh {
            self.retired.learn(&self.retirements, self.consumed);
        }
        loop {
            self.current = self.ring.next()?;
            let position = self.consumed;
            self.consumed += 1;
            if !self.retired.covers(self.current.qp_num, position) {
                break;
            }
            // If nothing else comes, nobody else gives it back.
            self.release();
        }
        Some(&self.current)
    }

    #[inline]
    pub(crate) fn release(&mut self) {
        self.retirements.release(self.consumed);
        self.ring.release();
    }

    /// Discards what the ring holds of a queue pair that cannot complete anything more.
    pub(crate) fn purge(&mut self, qpn: u32) {
        let pending = u64::from(self.ring.pending());
        if pending > 0 {
            self.retired.add(qpn, self.consumed + pending);
        }
    }

    pub(crate) fn pending(&self) -> u32 {
        self.ring.pending()
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.ring.capacity()
    }
}
