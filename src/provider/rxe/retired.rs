//! Queue pairs that are destroyed while completions of theirs are still in a queue. rxe's completions
//! name them by QPN, which the kernel may give to the next queue pair.
//!
//! A queue pair may be destroyed while another thread polls. The control path leaves an update that says
//! up to which position completions may be of the destroyed queue pair, and the poller discards those.
//! The position is exact: completions of the next queue pair with the same QPN follow in the same ring
//! and must arrive.

use crate::memory::rxe_queue::ProducerWatch;
use crate::provider::poll_gate::PollGate;
use crate::provider::{CqMembers, Member};
use crate::sync::lock::Lock;
use crate::sync::update_list::UpdateList;
use crate::sync::{AtomicU64, Ordering};

/// Reads the device's producer index, for a thread that does not poll.
pub(crate) trait Watch {
    /// The index after the newest entry.
    fn producer(&self) -> u32;

    /// One less than the slots of the ring, which are a power of two.
    fn mask(&self) -> u32;
}

impl Watch for ProducerWatch {
    fn producer(&self) -> u32 {
        ProducerWatch::producer(self)
    }

    fn mask(&self) -> u32 {
        ProducerWatch::mask(self)
    }
}

/// A watched ring. Positions count all entries of a queue's life, across resizes; the slot of a
/// position is `position + origin`, masked.
#[derive(Debug)]
struct WatchedRing<W> {
    watch: W,
    origin: u32,
}

#[derive(Clone, Copy, Debug)]
struct RetiredQp {
    qpn: u32,
    /// The position after the last entry that may belong to it.
    until: u64,
}

/// The state that the control path shares with the poller of a completion queue.
#[derive(Debug)]
pub(crate) struct Retirements<W> {
    updates: UpdateList<RetiredQp>,
    poll_gate: PollGate,
    /// The position up to which the poller gave completions back.
    released: AtomicU64,
    /// Locked by the control path alone.
    place: Lock<WatchedRing<W>>,
}

impl<W: Watch> Retirements<W> {
    /// The state for a ring whose next entry to consume is in slot `consumer`.
    pub(crate) fn new(watch: W, consumer: u32, poll_gate: PollGate) -> Self {
        Retirements {
            updates: UpdateList::new(),
            poll_gate,
            released: AtomicU64::new(0),
            place: Lock::new(WatchedRing { watch, origin: consumer }),
        }
    }

    /// Tells the poller that `qpn`, which is destroyed, will complete nothing more.
    pub(crate) fn retire(&self, qpn: u32) {
        // In a forked child nothing is destroyed.
        let Some(place) = self.place.lock() else { return };
        // The device is never a whole ring ahead of the released position. So its index tells its position, if nothing
        // was released between the two loads. Acquire pairs with the Release of `release`.
        let mut released = self.released.load(Ordering::Acquire);
        let producer = loop {
            let producer = place.watch.producer();
            let again = self.released.load(Ordering::Acquire);
            if again == released {
                break producer;
            }
            released = again;
        };
        let slot = (released as u32).wrapping_add(place.origin);
        let left = producer.wrapping_sub(slot) & place.watch.mask();
        if left > 0 {
            self.put(RetiredQp { qpn, until: released + u64::from(left) });
        }
    }

    /// As [`retire`](Self::retire) for a queue pair that could not be destroyed, and may complete
    /// something for ever.
    pub(crate) fn retire_for_good(&self, qpn: u32) {
        self.put(RetiredQp { qpn, until: u64::MAX });
    }

    fn put(&self, update: RetiredQp) {
        self.updates.put(update);
        self.poll_gate.mark_dirty();
    }

    /// Tells the poller to read updates.
    pub(crate) fn poll_gate(&self) -> &PollGate {
        &self.poll_gate
    }

    /// Completions before `position` are consumed. Called by the poller, before it publishes the consumer index.
    #[inline]
    pub(crate) fn release(&self, position: u64) {
        self.released.store(position, Ordering::Release);
    }

    /// Lets `exchange` replace the ring while no other thread reads the old or the new one. It
    /// returns the watch of the new ring, and the slot there of the entry at `position`.
    pub(crate) fn exchange<E>(
        &self,
        position: u64,
        exchange: impl FnOnce() -> Result<(W, u32), E>,
    ) -> Result<(), E> {
        let place = self.place.lock();
        let (watch, consumer) = exchange()?;
        if let Some(mut place) = place {
            *place = WatchedRing { watch, origin: consumer.wrapping_sub(position as u32) };
        }
        Ok(())
    }
}

impl CqMembers for Retirements<ProducerWatch> {
    fn poll_gate(&self) -> &PollGate {
        &self.poll_gate
    }

    fn attach(&self, _: &Member) {
        // Nothing to attach: a completion carries everything that its poller needs.
    }

    fn retire(&self, member: &Member) {
        if let Some(qpn) = member.number {
            self.retire(qpn);
        }
    }

    fn retire_for_good(&self, member: &Member) {
        if let Some(qpn) = member.number {
            self.retire_for_good(qpn);
        }
    }
}

/// The poller's list of retired queue pairs, whose completions it discards.
#[derive(Debug, Default)]
pub(crate) struct RetiredQps {
    known: Vec<RetiredQp>,
}

impl RetiredQps {
    /// Reads new updates, if there are any. Without updates this is one load.
    #[inline]
    pub(crate) fn apply_updates<W>(&mut self, from: &Retirements<W>, position: u64) {
        if !from.updates.is_empty() {
            self.read(from, position);
        }
    }

    #[cold]
    fn read<W>(&mut self, from: &Retirements<W>, position: u64) {
        self.known.retain(|update| update.until > position);
        from.updates.take(|update| {
            if update.until > position {
                self.known.push(update);
            }
        });
    }

    /// Adds a queue pair whose last completion is before `until`.
    pub(crate) fn add(&mut self, qpn: u32, until: u64) {
        self.known.push(RetiredQp { qpn, until });
    }

    /// Whether the entry at `position` is to be discarded. Positions must not decrease from call
    /// to call.
    #[inline]
    pub(crate) fn covers(&mut self, qpn: u32, position: u64) -> bool {
        !self.known.is_empty() && self.look(qpn, position)
    }

    #[cold]
    fn look(&mut self, qpn: u32, position: u64) -> bool {
        self.known.retain(|update| update.until > position);
        self.known.iter().any(|update| update.qpn == qpn)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memory::doorbell_record::DoorbellPages;
    use crate::memory::gate::Gate;

    /// A ring of eight entries, six of which the device has filled.
    struct FilledRing;

    impl Watch for FilledRing {
        fn producer(&self) -> u32 {
            6
        }

        fn mask(&self) -> u32 {
            7
        }
    }

    #[test]
    fn completions_of_a_queue_pair_stay_discarded_when_another_goes() {
        let gate = Gate::alone(&DoorbellPages::new().unwrap()).unwrap();
        let retirements = Retirements::new(FilledRing, 0, PollGate::new(gate));
        let mut retired = RetiredQps::default();
        for qpn in [7, 8] {
            retirements.retire(qpn);
            retired.apply_updates(&retirements, 0);
        }
        for position in [0, 5] {
            assert!([7, 8].iter().all(|qpn| retired.covers(*qpn, position)), "at {position}");
        }
        assert!(![7, 8].iter().any(|qpn| retired.covers(*qpn, 6)), "a new one has the number");
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::memory::doorbell_record::DoorbellPages;
    use crate::memory::gate::Gate;
    use crate::sync::AtomicU32;
    use loom::sync::Arc;
    use loom::thread;

    const SLOTS: u32 = 4;
    const QPN: u32 = 7;

    /// A ring of entries that say whether the old or the new queue pair of one number made them.
    #[derive(Clone, Debug)]
    struct FakeRing(Arc<(AtomicU32, [AtomicU32; SLOTS as usize])>);

    impl FakeRing {
        fn new() -> FakeRing {
            FakeRing(Arc::new((AtomicU32::new(0), std::array::from_fn(|_| AtomicU32::new(0)))))
        }

        fn put(&self, entry: u32) {
            let at = self.0.0.load(Ordering::Relaxed);
            self.0.1[(at % SLOTS) as usize].store(entry, Ordering::Relaxed);
            self.0.0.store((at + 1) % SLOTS, Ordering::Release);
        }
    }

    impl Watch for FakeRing {
        fn producer(&self) -> u32 {
            self.0.0.load(Ordering::Acquire)
        }

        fn mask(&self) -> u32 {
            SLOTS - 1
        }
    }

    fn poll_gate() -> PollGate {
        PollGate::new(Gate::alone(&DoorbellPages::new().unwrap()).unwrap())
    }

    struct Poller {
        ring: FakeRing,
        retirements: Arc<Retirements<FakeRing>>,
        retired: RetiredQps,
        position: u64,
    }

    impl Poller {
        fn new(ring: &FakeRing) -> Poller {
            let retirements = Arc::new(Retirements::new(ring.clone(), 0, poll_gate()));
            let ring = ring.clone();
            Poller { ring, retirements, retired: RetiredQps::default(), position: 0 }
        }

        fn poll(&mut self, seen: &mut Vec<u32>) {
            self.poll_some(usize::MAX, seen);
        }

        fn poll_some(&mut self, most: usize, seen: &mut Vec<u32>) {
            self.retired.apply_updates(&self.retirements, self.position);
            for _ in 0..most {
                if self.ring.producer() == self.position as u32 % SLOTS {
                    break;
                }
                let entry =
                    self.ring.0.1[self.position as usize % SLOTS as usize].load(Ordering::Relaxed);
                let qpn = if entry == OTHER { QPN + 1 } else { QPN };
                if !self.retired.covers(qpn, self.position) {
                    seen.push(entry);
                }
                self.position += 1;
            }
            self.retirements.release(self.position);
        }
    }

    const OLD: u32 = 1;
    const NEW: u32 = 2;
    const OTHER: u32 = 3;

    /// A queue pair completes, is destroyed, and another gets its number, while another thread polls: completions of
    /// the new one arrive, and those of the old one do not, once the poller can know of its end.
    #[test]
    fn poll_while_a_number_changes_hands() {
        loom::model(|| {
            let ring = FakeRing::new();
            let mut poller = Poller::new(&ring);
            let retirements = poller.retirements.clone();
            let owner = thread::spawn(move || {
                ring.put(OLD);
                retirements.retire(QPN);
                ring.put(NEW);
            });
            let mut seen = Vec::new();
            poller.poll(&mut seen);
            owner.join().unwrap();
            let before = seen.len();
            poller.poll(&mut seen);
            assert_eq!(seen.iter().filter(|entry| **entry == NEW).count(), 1, "{seen:?}");
            assert!(!seen[before..].contains(&OLD), "{seen:?}");
            assert!(seen.iter().filter(|entry| **entry == OLD).count() <= 1, "{seen:?}");
        });
    }

    /// Two queue pairs of one completion queue are destroyed at once.
    #[test]
    fn poll_while_two_are_destroyed() {
        loom::model(|| {
            let ring = FakeRing::new();
            ring.put(OLD);
            ring.put(OLD);
            let mut poller = Poller::new(&ring);
            let retirements = poller.retirements.clone();
            let other = retirements.clone();
            let owners = [
                thread::spawn(move || retirements.retire(QPN)),
                thread::spawn(move || other.retire(QPN + 1)),
            ];
            let mut seen = Vec::new();
            poller.poll(&mut seen);
            for owner in owners {
                owner.join().unwrap();
            }
            ring.put(NEW);
            poller.poll(&mut seen);
            assert_eq!(seen.last(), Some(&NEW));
            assert_eq!(seen.iter().filter(|entry| **entry == NEW).count(), 1);
        });
    }

    /// The ring wraps around while a thread reads where the entries of the destroyed queue pair end.
    #[test]
    fn poll_while_the_ring_wraps() {
        loom::model(|| {
            let ring = FakeRing::new();
            for entry in [OTHER, OTHER, OLD] {
                ring.put(entry);
            }
            let mut poller = Poller::new(&ring);
            let retirements = poller.retirements.clone();
            let owner = thread::spawn(move || retirements.retire(QPN));
            let mut seen = Vec::new();
            poller.poll_some(2, &mut seen);
            ring.put(OTHER);
            ring.put(OTHER);
            owner.join().unwrap();
            poller.poll(&mut seen);
            assert_eq!(seen, [OTHER; 4]);
        });
    }

    /// A thread that reads both indices never sees the consumer's ahead of the producer's. Otherwise an empty
    /// ring would seem full of completions of a retired queue pair, and completions of the next queue pair with
    /// its number would be discarded.
    #[test]
    fn poll_while_the_destroyed_queue_pair_has_no_completions() {
        loom::model(|| {
            let ring = FakeRing::new();
            let mut poller = Poller::new(&ring);
            let retirements = poller.retirements.clone();
            let owner = thread::spawn(move || retirements.retire(QPN));
            let device = ring.clone();
            let polling = thread::spawn(move || {
                let mut seen = Vec::new();
                device.put(OTHER);
                poller.poll(&mut seen);
                (poller, seen)
            });
            let (mut poller, mut seen) = polling.join().unwrap();
            owner.join().unwrap();
            ring.put(NEW);
            poller.poll(&mut seen);
            assert_eq!(seen, [OTHER, NEW]);
        });
    }
}
