//! The state that the poster and the poller of a queue pair share: the work request ids.
//!
//! A CQE names its WQE by the index in the queue; the user's id is here. The poller moves the tail, which
//! makes room for the poster. The two may be different threads, and a poller keeps a [`SharedQp`] for as
//! long as completions may name it.

use super::srq_wr_ids::SrqWrIds;
use super::uidx::Uidx;
use crate::provider::Member;
use crate::sync::ring_array::RingArray;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::wc::WcOpcode;
use std::sync::Arc;

/// The source of a queue pair's receives.
#[derive(Debug)]
pub(crate) enum Receives {
    None,
    /// A queue of its own, of so many entries.
    Own(u32),
    Shared(Arc<SrqWrIds>),
}

/// A queue pair, as its poster and its pollers know it.
#[derive(Debug)]
pub(crate) struct SharedQp {
    qpn: u32,
    uidx: Arc<Uidx>,
    pub(crate) sends: SqWrIds,
    pub(crate) receives: RecvWrIds,
}

/// The work request ids of [`Receives`].
#[derive(Debug)]
pub(crate) struct RecvWrIds {
    /// The ids of a receive queue of its own.
    pub(crate) own: RqWrIds,
    /// The ids of the shared receive queue, if there is one.
    shared: Option<Arc<SrqWrIds>>,
}

impl RecvWrIds {
    /// The work request id of the receive at `at`, which has completed.
    #[inline(always)]
    pub(crate) fn complete(&self, at: u32) -> u64 {
        match &self.shared {
            None => self.own.complete(at),
            Some(srq_wr_ids) => srq_wr_ids.complete(at),
        }
    }
}

/// The values that a CQE's `wqe_counter` of 16 bits can have: no queue has more entries.
pub(crate) const WQE_INDICES: u32 = 1 << 16;

impl SharedQp {
    /// `wqebbs` is the size of the send queue. There are at most [`WQE_INDICES`] entries.
    pub(crate) fn new(
        qpn: u32,
        uidx: Arc<Uidx>,
        wqebbs: Option<u32>,
        receives: Receives,
    ) -> Arc<SharedQp> {
        let (entries, shared) = match receives {
            Receives::None => (0, None),
            Receives::Own(entries) => (entries, None),
            Receives::Shared(srq_wr_ids) => (0, Some(srq_wr_ids)),
        };
        let receives = RecvWrIds { own: RqWrIds::new(entries), shared };
        Arc::new(SharedQp { qpn, uidx, sends: SqWrIds::new(wqebbs.unwrap_or(0)), receives })
    }

    /// The queue pair, for its completion queues.
    pub(crate) fn member(self: Arc<Self>) -> Member {
        Member { number: Some(self.uidx.get()), shared: Some(self) }
    }

    pub(crate) fn qpn(&self) -> u32 {
        self.qpn
    }

    pub(crate) fn uidx(&self) -> &Arc<Uidx> {
        &self.uidx
    }

    /// The shared receive queue, if receives come from one.
    pub(crate) fn srq_wr_ids(&self) -> Option<&Arc<SrqWrIds>> {
        self.receives.shared.as_ref()
    }
}

/// The entry of a send, at the index of its first WQEBB.
#[derive(Debug, Default)]
pub(crate) struct SqWrId {
    wr_id: AtomicU64,
    /// The number of the next WQE.
    next: AtomicU32,
    /// The opcode of its completion.
    kind: AtomicU32,
}

// `WqebbOffset` assumes this size: one offset then finds a WQEBB and its entry. Loom's atomics are longer.
#[cfg(not(loom))]
const _: () = assert!(size_of::<SqWrId>() == 16);

impl SqWrId {
    /// Sets the entry of a WQE that begins here, before the doorbell for the WQE.
    #[inline(always)]
    pub(crate) fn set(&self, wr_id: u64, next: u32, kind: u32) {
        // The completion of the WQE orders these stores before the poller's loads; the Acquire of `tail`
        // ordered the poller's earlier loads before them.
        self.wr_id.store(wr_id, Ordering::Relaxed);
        self.next.store(next, Ordering::Relaxed);
        self.kind.store(kind, Ordering::Relaxed);
    }
}

/// The sends of a queue pair.
#[derive(Debug)]
pub(crate) struct SqWrIds {
    posted: RingArray<SqWrId>,
    /// The number of the first WQE that has not completed.
    tail: AtomicU32,
}

/// A send that completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CompletedSend {
    pub(crate) wr_id: u64,
    pub(crate) kind: u32,
}

impl SqWrIds {
    fn new(wqebbs: u32) -> SqWrIds {
        SqWrIds { posted: RingArray::new(wqebbs.min(WQE_INDICES)), tail: AtomicU32::new(0) }
    }

    /// Resets the ids, as the device resets its queues.
    pub(crate) fn reset(&self) {
        self.tail.store(0, Ordering::Release);
    }

    /// Gives each WQE the index of its WQEBB as its id, for WQEs that foreign code posts.
    pub(crate) fn number_wqes(&self) {
        for at in 0..self.posted.len() {
            self.posted.at(at).set(at.into(), 0, WcOpcode::SEND.0);
        }
    }

    /// The entries, for the poster.
    pub(crate) fn entries(&self) -> RingArray<SqWrId> {
        self.posted.clone()
    }

    /// The number of the first WQE that has not completed.
    #[inline(always)]
    pub(crate) fn tail(&self) -> u32 {
        // Pairs with the Release of `complete`.
        self.tail.load(Ordering::Acquire)
    }

    /// Completes the WQE at the WQEBB `at`, and all WQEs before it. `at` is taken modulo the ring.
    #[inline(always)]
    pub(crate) fn complete(&self, at: u32) -> CompletedSend {
        let posted = self.posted.at(at);
        let wr_id = posted.wr_id.load(Ordering::Relaxed);
        let kind = posted.kind.load(Ordering::Relaxed);
        let next = posted.next.load(Ordering::Relaxed);
        // Release: the loads come before the poster may use the entry again.
        self.tail.store(next, Ordering::Release);
        CompletedSend { wr_id, kind }
    }
}

/// The receives of a queue pair that has its own.
#[derive(Debug)]
pub(crate) struct RqWrIds {
    wr_ids: RingArray<AtomicU64>,
    /// The number of receives that have completed.
    tail: AtomicU32,
}

impl RqWrIds {
    fn new(entries: u32) -> RqWrIds {
        RqWrIds { wr_ids: RingArray::new(entries.min(WQE_INDICES)), tail: AtomicU32::new(0) }
    }

    /// Resets the ids, as the device resets its queues.
    pub(crate) fn reset(&self) {
        self.resume(0);
    }

    /// Goes on behind `completed` receives, none of which is outstanding.
    pub(crate) fn resume(&self, completed: u32) {
        self.tail.store(completed, Ordering::Release);
    }

    /// Gives each WQE its index as its id, for WQEs that foreign code posts.
    pub(crate) fn number_wqes(&self) {
        for at in 0..self.wr_ids.len() {
            self.wr_ids.at(at).store(at.into(), Ordering::Relaxed);
        }
    }

    /// The work request ids, which the poster sets before the doorbell for the WQEs.
    pub(crate) fn entries(&self) -> RingArray<AtomicU64> {
        self.wr_ids.clone()
    }

    /// The number of receives that have completed.
    #[inline(always)]
    pub(crate) fn tail(&self) -> u32 {
        // Pairs with the Release of `complete`.
        self.tail.load(Ordering::Acquire)
    }

    /// The work request id of the receive at `at`, which has completed. `at` is taken modulo the ring.
    #[inline(always)]
    pub(crate) fn complete(&self, at: u32) -> u64 {
        let wr_id = self.wr_ids.at(at).load(Ordering::Relaxed);
        // Only the poller writes the tail.
        let tail = self.tail.load(Ordering::Relaxed).wrapping_add(1);
        self.tail.store(tail, Ordering::Release);
        wr_id
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_completion_also_completes_earlier_sends() {
        let sends = SqWrIds::new(8);
        for number in 0..3 {
            sends.posted.at(2 * number).set(u64::from(number) + 10, number + 1, 7);
        }
        assert_eq!(sends.complete(4), CompletedSend { wr_id: 12, kind: 7 });
        assert_eq!(sends.tail(), 3);
    }

    /// The device counts WQEBBs in 16 bits, and requests are counted in 32.
    #[test]
    fn counts_wrap() {
        let sends = SqWrIds::new(4);
        sends.posted.at(0x1_0002).set(u64::MAX, 0, 0);
        assert_eq!(sends.complete(0x0002).wr_id, u64::MAX);
        assert_eq!(sends.tail(), 0);
        let receives = RqWrIds::new(4);
        receives.tail.store(u32::MAX, Ordering::Relaxed);
        receives.wr_ids.at(0x1_0003).store(5, Ordering::Relaxed);
        assert_eq!((receives.complete(0x0003), receives.tail()), (5, 0));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::sync::AccessProbe;
    use loom::sync::Arc;
    use loom::thread;

    /// An entry is reused only after it was read. The counter `rung` plays the device. Loom does not report an
    /// atomic that is read too late, so `held` is accessed along with each.
    #[test]
    fn an_entry_is_free_when_it_was_read() {
        loom::model(|| {
            let sends = Arc::new(SqWrIds::new(1));
            let held = Arc::new(AccessProbe::new());
            // The requests that the doorbell announced, and those that the device completed: its doorbells are
            // barriers.
            let rung = Arc::new(AtomicU32::new(1));
            sends.posted.at(0).set(100, 1, 0);
            let poster = {
                let (sends, rung, held) = (sends.clone(), rung.clone(), held.clone());
                thread::spawn(move || {
                    if sends.tail() == 1 {
                        held.write();
                        sends.posted.at(1).set(101, 2, 0);
                        rung.store(2, Ordering::Release);
                    }
                })
            };
            let poller = {
                let (sends, rung, held) = (sends.clone(), rung.clone(), held.clone());
                thread::spawn(move || {
                    held.read();
                    assert_eq!(sends.complete(0).wr_id, 100);
                    if rung.load(Ordering::Acquire) == 2 {
                        held.read();
                        assert_eq!(sends.complete(1).wr_id, 101);
                        assert_eq!(sends.tail(), 2);
                    }
                })
            };
            poster.join().unwrap();
            poller.join().unwrap();
        });
    }

    #[test]
    fn a_receive_is_free_when_it_was_read() {
        loom::model(|| {
            let receives = Arc::new(RqWrIds::new(1));
            let rung = Arc::new(AtomicU32::new(0));
            receives.wr_ids.at(0).store(100, Ordering::Relaxed);
            rung.store(1, Ordering::Release);
            let poster = {
                let (receives, rung) = (receives.clone(), rung.clone());
                thread::spawn(move || {
                    if receives.tail() == 1 {
                        receives.wr_ids.at(1).store(101, Ordering::Relaxed);
                        rung.store(2, Ordering::Release);
                    }
                })
            };
            assert_eq!(rung.load(Ordering::Acquire), 1);
            assert_eq!(receives.complete(0), 100);
            poster.join().unwrap();
            if rung.load(Ordering::Acquire) == 2 {
                assert_eq!(receives.complete(1), 101);
            }
        });
    }
}
