//! The table by which a poller finds the queue pair of a completion.
//!
//! Queue pairs are created and destroyed while another thread polls. The control path leaves updates
//! with [`QpRegistry`], and the poller keeps a [`QpTable`] of its own: user index to queue pair, without a
//! lock. A completion whose user index is not in the table is discarded.
//!
//! The user index of a destroyed queue pair stays in use until no completion in the queue has it. The
//! kernel confirmed the destruction before the update was written, so that all its completions are in the
//! queue when the update is read. They are consumed once the queue was found empty, or the poller has
//! gone once around the ring.
//!
//! Updates pile up for a completion queue that is never polled, such as the receive queue's in a program that
//! only sends. Creating a queue pair compacts them.

use super::cqe::{COUNTER, is_receive, opcode_of, uidx_of};
use super::srq_wr_ids::SrqWrIds;
use super::uidx::Uidx;
use super::wr_ids::SharedQp;
use crate::memory::barrier::udma_from_device;
use crate::memory::cq_buffer::CqReader;
use crate::provider::poll_gate::PollGate;
use crate::provider::{CqMembers, Member};
use crate::sync::lock::Lock;
use crate::sync::update_list::UpdateList;
use crate::sync::{AtomicU32, Ordering};
use std::collections::HashMap;
use std::sync::{Arc, Weak};

#[derive(Debug)]
enum QpUpdate {
    /// A weak reference: an update that is never read keeps no queue pair alive.
    Attached {
        uidx: u32,
        qp: Weak<SharedQp>,
    },
    Gone {
        uidx: Arc<Uidx>,
        srq_wr_ids: Option<Arc<SrqWrIds>>,
    },
    /// There are older updates, which were compacted.
    Older,
}

/// The least number of updates that is worth compacting.
const FEW: usize = 64;

/// The table and the reader that a dropped poller left behind.
#[derive(Debug)]
pub(crate) struct Leftover {
    /// `None` if foreign code consumed completions: those that are left are unknown.
    pub(crate) reader: Option<CqReader>,
    pub(crate) table: QpTable,
}

/// The control path's end: updates of the queue pairs that complete to a queue.
///
/// The poller may be dropped long before the kernel's queue, which stays as long as a queue pair completes to it. When
/// both are gone, WQEs of shared receive queues that unread completions name are freed.
#[derive(Debug)]
pub(crate) struct QpRegistry {
    updates: UpdateList<QpUpdate>,
    /// Tells the poller to read updates.
    pub(crate) poll_gate: PollGate,
    /// Updates since they were last taken.
    fresh: AtomicU32,
    /// Compacted updates, oldest first; `QpUpdate::Older` in the list says that there are some.
    older: Lock<Vec<QpUpdate>>,
    leftover: Lock<Option<Leftover>>,
}

impl Drop for QpRegistry {
    fn drop(&mut self) {
        let leftover = self.leftover.get_mut().and_then(Option::take);
        let Some(Leftover { reader: Some(reader), mut table }) = leftover else { return };
        // A forked child has no completions, and must not free the parent's WQEs.
        if reader.cqes().epoch().is_over() {
            return;
        }
        table.apply_updates(self, reader.consumer(), reader.cqes().count());
        for (_, cqe) in reader.written() {
            udma_from_device();
            if is_receive(opcode_of(cqe.op_own())) {
                table.give_back(uidx_of(cqe), cqe.be16::<COUNTER>().into());
            }
        }
    }
}

impl QpRegistry {
    pub(crate) fn new(poll_gate: PollGate) -> Arc<QpRegistry> {
        let older = Lock::default();
        Arc::new(QpRegistry {
            updates: UpdateList::new(),
            poll_gate,
            fresh: AtomicU32::new(0),
            older,
            leftover: Lock::default(),
        })
    }

    fn put(&self, update: QpUpdate) {
        self.fresh.fetch_add(1, Ordering::Relaxed);
        self.updates.put(update);
        self.poll_gate.mark_dirty();
    }

    /// Moves the updates of the list behind the older ones.
    fn gather(&self, older: &mut Vec<QpUpdate>) {
        self.fresh.store(0, Ordering::Relaxed);
        let before = older.len();
        self.updates.take(|update| match update {
            QpUpdate::Older => {}
            update => older.push(update),
        });
        // The list is newest first, and a user index may be returned and assigned again within it.
        older[before..].reverse();
    }

    /// Drops the updates of queue pairs that were created and destroyed since the last poll, if there are
    /// many. The caller borrows the poller's end exclusively, so nobody polls; `is_empty` says whether the
    /// queue holds no completion.
    pub(crate) fn compact_updates(&self, is_empty: impl FnOnce() -> bool) {
        let Some(mut older) = self.older.lock() else { return };
        // Waits for as many new updates as were left the last time, so that compacting has a
        // constant cost for each update.
        if (self.fresh.load(Ordering::Relaxed) as usize) < FEW + older.len() {
            return;
        }
        self.gather(&mut older);
        // Asked after the updates were taken: a queue pair that was gone by then completes nothing more.
        if is_empty() {
            let mut attached = HashMap::new();
            let mut needless = vec![false; older.len()];
            for (at, update) in older.iter().enumerate() {
                match update {
                    QpUpdate::Attached { uidx, .. } => drop(attached.insert(*uidx, at)),
                    // If its `Attached` is not in the list, the poller has read that update.
                    QpUpdate::Gone { uidx, .. } => {
                        if let Some(first) = attached.remove(&uidx.get()) {
                            (needless[first], needless[at]) = (true, true);
                        }
                    }
                    QpUpdate::Older => {}
                }
            }
            let mut needless = needless.into_iter();
            older.retain(|_| needless.next() != Some(true));
        }
        if !older.is_empty() {
            self.updates.put(QpUpdate::Older);
        }
    }

    /// Takes over from a poller that is dropped.
    pub(crate) fn inherit(&self, leftover: Leftover) {
        match self.leftover.lock() {
            Some(mut left) => *left = Some(leftover),
            None => std::mem::forget(leftover),
        }
    }

    /// Adds a queue pair, before anything is posted to it.
    pub(crate) fn attach(&self, qp: &Arc<SharedQp>) {
        let uidx = qp.uidx().get();
        self.put(QpUpdate::Attached { uidx, qp: Arc::downgrade(qp) });
    }

    /// Tells that a queue pair is destroyed, and completes nothing more.
    pub(crate) fn retire(&self, qp: &SharedQp) {
        let (uidx, srq_wr_ids) = (qp.uidx().clone(), qp.srq_wr_ids().cloned());
        self.put(QpUpdate::Gone { uidx, srq_wr_ids });
    }

    /// As [`retire`](Self::retire) for a queue pair that could not be destroyed, and may complete
    /// something for ever: its index is never assigned again.
    pub(crate) fn retire_for_good(&self, qp: &SharedQp) {
        std::mem::forget(qp.uidx().clone());
        self.retire(qp);
    }

    /// Whether there are no updates.
    pub(crate) fn is_empty(&self) -> bool {
        self.updates.is_empty()
    }
}

impl CqMembers for QpRegistry {
    fn poll_gate(&self) -> &PollGate {
        &self.poll_gate
    }

    fn attach(&self, member: &Member) {
        if let Some(qp) = &member.shared {
            self.attach(qp);
        }
    }

    fn retire(&self, member: &Member) {
        if let Some(qp) = &member.shared {
            self.retire(qp);
        }
    }

    fn retire_for_good(&self, member: &Member) {
        if let Some(qp) = &member.shared {
            self.retire_for_good(qp);
        }
    }
}

/// A queue pair that is gone.
#[derive(Debug)]
struct Dead {
    uidx: Arc<Uidx>,
    /// Takes back the WQEs that its completions consumed.
    srq_wr_ids: Option<Arc<SrqWrIds>>,
    /// The consumer index from which on no CQE can be of this queue pair.
    until: u32,
}

/// The poller's end: user index to queue pair.
#[derive(Debug, Default)]
pub(crate) struct QpTable {
    /// The queue pairs from the user index `first` on. Those of one completion queue are mostly created
    /// together, so the table is dense.
    qps: Vec<Option<Arc<SharedQp>>>,
    first: u32,
    dead: Vec<Dead>,
}

impl QpTable {
    /// The queue pair with a user index.
    #[inline(always)]
    pub(crate) fn get(&self, uidx: u32) -> Option<&SharedQp> {
        self.qps.get(uidx.wrapping_sub(self.first) as usize)?.as_deref()
    }

    fn insert(&mut self, uidx: u32, qp: Arc<SharedQp>) {
        if self.qps.is_empty() {
            self.first = uidx;
        }
        let before = self.first.saturating_sub(uidx);
        self.qps.splice(0..0, (0..before).map(|_| None));
        self.first -= before;
        let at = (uidx - self.first) as usize;
        if self.qps.len() <= at {
            self.qps.resize_with(at + 1, || None);
        }
        self.qps[at] = Some(qp);
    }

    fn remove(&mut self, uidx: u32) {
        if let Some(qp) = self.qps.get_mut(uidx.wrapping_sub(self.first) as usize) {
            *qp = None;
        }
        while let Some(None) = self.qps.last() {
            self.qps.pop();
        }
    }

    /// Applies the updates of the control path. `consumer` is the index of the next CQE, and `entries` the size of
    /// the queue. Call [`forget`](Self::forget) afterwards, which drops the queue pairs that no completion can
    /// name any more.
    #[cold]
    pub(crate) fn apply_updates(&mut self, registry: &QpRegistry, consumer: u32, entries: u32) {
        // Never contended: compacting borrows the poller's end.
        let Some(mut updates) = registry.older.lock() else { return };
        registry.gather(&mut updates);
        for update in updates.drain(..) {
            match update {
                QpUpdate::Attached { uidx, qp } => {
                    if let Some(qp) = qp.upgrade() {
                        self.insert(uidx, qp);
                    }
                }
                QpUpdate::Gone { uidx, srq_wr_ids } => {
                    self.remove(uidx.get());
                    let until = consumer.wrapping_add(entries);
                    self.dead.push(Dead { uidx, srq_wr_ids, until });
                }
                QpUpdate::Older => {}
            }
        }
    }

    /// The index of all completions in the queue grew by one.
    pub(crate) fn moved(&mut self) {
        for dead in &mut self.dead {
            dead.until = dead.until.wrapping_add(1);
        }
    }

    /// Whether there are user indices to return.
    pub(crate) fn has_retired(&self) -> bool {
        !self.dead.is_empty()
    }

    /// Returns the user indices that no completion in the queue has: all of them if it is `empty`, else
    /// those whose last completion is behind `consumer`.
    #[cold]
    pub(crate) fn forget(&mut self, consumer: u32, empty: bool) {
        /// Completions are counted in 24 bits.
        const UNUSED: u32 = 8;
        let ahead = |until: u32| (until.wrapping_sub(consumer) << UNUSED) as i32 > 0;
        self.dead.retain(|dead| !empty && ahead(dead.until));
    }

    /// Gives back the WQE `at` of a shared receive queue whose completion nobody will read.
    fn give_back(&self, uidx: u32, at: u32) {
        match self.get(uidx) {
            Some(qp) => {
                if let Some(srq_wr_ids) = qp.srq_wr_ids() {
                    srq_wr_ids.complete(at);
                }
            }
            None => self.discard(uidx, at),
        }
    }

    /// Gives back the WQE `at` of a shared receive queue that a destroyed queue pair consumed.
    #[cold]
    pub(crate) fn discard(&self, uidx: u32, at: u32) {
        let dead = self.dead.iter().rev().find(|dead| dead.uidx.get() == uidx);
        if let Some(Dead { srq_wr_ids: Some(srq_wr_ids), .. }) = dead {
            srq_wr_ids.complete(at);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::uidx::UidxAllocator;
    use super::super::wr_ids::Receives;
    use super::*;
    use crate::memory::doorbell_record::DoorbellPages;
    use crate::memory::gate::Gate;

    fn registry() -> Arc<QpRegistry> {
        let line = Arc::new(DoorbellPages::new().unwrap().alloc().unwrap());
        QpRegistry::new(PollGate::new(Gate::beside(&line).unwrap()))
    }

    fn shared_qp(indices: &Arc<UidxAllocator>) -> Arc<SharedQp> {
        let uidx = indices.take().unwrap();
        SharedQp::new(uidx.get() + 100, uidx, Some(4), Receives::None)
    }

    #[test]
    fn queue_pairs_are_found_from_attach_to_retire() {
        let (indices, registry, mut table) = (UidxAllocator::new(), registry(), QpTable::default());
        let all: Vec<_> = (0..200).map(|_| shared_qp(&indices)).collect();
        for qp in &all {
            registry.attach(qp);
        }
        assert!(table.get(1).is_none());
        assert!(!registry.is_empty());
        table.apply_updates(&registry, 0, 8);
        assert!(registry.is_empty());
        for qp in &all {
            let found = table.get(qp.uidx().get()).unwrap();
            assert_eq!(found.qpn(), qp.qpn());
        }
        registry.retire(&all[7]);
        table.apply_updates(&registry, 0, 8);
        assert!(table.get(8).is_none());
        assert!([0, 201, 0xff_ffff].iter().all(|uidx| table.get(*uidx).is_none()));
        assert_eq!(table.get(9).unwrap().qpn(), 109);
    }

    /// User indices below the table's first: a later queue pair gets an index that was free again.
    #[test]
    fn queue_pairs_are_found_in_any_order_of_their_indices() {
        let (indices, registry, mut table) = (UidxAllocator::new(), registry(), QpTable::default());
        let all: Vec<_> = (0..40).map(|_| shared_qp(&indices)).collect();
        let mut attached = Vec::new();
        for at in [20, 17, 25, 8, 0, 39, 1] {
            registry.attach(&all[at]);
            table.apply_updates(&registry, 0, 8);
            attached.push(at);
            for (at, qp) in all.iter().enumerate() {
                let found = table.get(qp.uidx().get()).map(SharedQp::qpn);
                assert_eq!(found, attached.contains(&at).then_some(qp.qpn()), "{at} {attached:?}");
            }
        }
    }

    #[test]
    fn an_index_comes_back_when_the_ring_wrapped_or_was_empty() {
        for empty in [true, false] {
            let (indices, registry, mut table) =
                (UidxAllocator::new(), registry(), QpTable::default());
            let dead = shared_qp(&indices);
            registry.attach(&dead);
            table.apply_updates(&registry, 0, 8);
            registry.retire(&dead);
            drop(dead);
            let start = u32::MAX - 3;
            table.apply_updates(&registry, start, 8);
            table.forget(start, false);
            table.forget(start.wrapping_add(7), false);
            let other = indices.take().unwrap();
            assert_eq!(other.get(), 2, "in use");
            match empty {
                true => table.forget(start, true),
                false => table.forget(start.wrapping_add(8), false),
            }
            assert_eq!(indices.take().unwrap().get(), 1, "free");
        }
    }

    #[test]
    fn a_queue_pair_attached_and_retired_between_two_polls_leaves_nothing() {
        let (indices, registry, mut table) = (UidxAllocator::new(), registry(), QpTable::default());
        let short = shared_qp(&indices);
        registry.attach(&short);
        registry.retire(&short);
        let weak = Arc::downgrade(&short);
        drop(short);
        assert!(weak.upgrade().is_none(), "the update keeps the qp");
        let next = shared_qp(&indices);
        assert_eq!(next.uidx().get(), 2);
        table.apply_updates(&registry, 0, 8);
        table.forget(0, true);
        assert!(table.get(1).is_none());
        let again = shared_qp(&indices);
        assert_eq!(again.uidx().get(), 1);
        registry.attach(&again);
        table.apply_updates(&registry, 0, 8);
        assert_eq!(table.get(1).unwrap().qpn(), 101);
    }

    /// A queue that nobody polls, or that never completes anything.
    #[test]
    fn updates_of_short_lived_queue_pairs_do_not_pile_up() {
        let (indices, registry, mut table) = (UidxAllocator::new(), registry(), QpTable::default());
        let known = shared_qp(&indices);
        registry.attach(&known);
        table.apply_updates(&registry, 0, 8);
        let staying = shared_qp(&indices);
        registry.attach(&staying);
        let mut most = 0;
        const ROUNDS: u32 = if cfg!(miri) { 50 } else { 1000 };
        for _ in 0..ROUNDS {
            let short = shared_qp(&indices);
            registry.attach(&short);
            registry.retire(&short);
            most = most.max(short.uidx().get() as usize);
            registry.compact_updates(|| true);
        }
        assert!(most <= FEW, "indices come back: {most}");
        registry.retire(&known);
        for _ in 0..FEW {
            let short = shared_qp(&indices);
            registry.attach(&short);
            registry.retire(&short);
        }
        registry.compact_updates(|| true);
        let older = registry.older.lock().unwrap().len();
        assert!(older <= 2, "{older}");
        // The poller still learns of the queue pair that is left.
        assert!(!registry.is_empty());
        table.apply_updates(&registry, 0, 8);
        assert!(table.get(known.uidx().get()).is_none());
        assert!(table.get(staying.uidx().get()).is_some());
        assert!(registry.is_empty());
    }

    #[test]
    fn any_number_of_queue_pairs_may_live_before_the_first_poll() {
        let (indices, registry, mut table) = (UidxAllocator::new(), registry(), QpTable::default());
        let all: Vec<_> = (0..5 * FEW).map(|_| shared_qp(&indices)).collect();
        for qp in &all {
            registry.attach(qp);
            registry.compact_updates(|| true);
        }
        table.apply_updates(&registry, 0, 8);
        assert!(all.iter().all(|qp| table.get(qp.uidx().get()).is_some()));
    }

    /// A CQE in the queue may name a queue pair that is gone, so that queue pair's user index stays in use.
    #[test]
    fn updates_stay_while_the_queue_holds_completions() {
        let (indices, registry, mut table) = (UidxAllocator::new(), registry(), QpTable::default());
        for _ in 0..FEW {
            let short = shared_qp(&indices);
            registry.attach(&short);
            registry.retire(&short);
        }
        registry.compact_updates(|| false);
        assert_eq!(registry.older.lock().unwrap().len(), 2 * FEW);
        let next = shared_qp(&indices);
        assert_eq!(next.uidx().get() as usize, FEW + 1);
        registry.attach(&next);
        table.apply_updates(&registry, 0, 8);
        assert!(table.get(next.uidx().get()).is_some());
        table.forget(0, true);
        assert!((indices.take().unwrap().get() as usize) <= FEW);
    }

    #[test]
    fn an_index_that_may_complete_for_ever_is_never_assigned_again() {
        let (indices, registry, mut table) = (UidxAllocator::new(), registry(), QpTable::default());
        let stuck = shared_qp(&indices);
        registry.attach(&stuck);
        registry.retire_for_good(&stuck);
        drop(stuck);
        table.apply_updates(&registry, 0, 8);
        table.forget(0, true);
        drop((table, registry));
        assert_eq!(indices.take().unwrap().get(), 2);
    }
}

/// Loom does not preempt a model's first thread as it does others, so at least one of the two threads is spawned.
#[cfg(all(test, loom))]
mod model {
    use super::super::uidx::UidxAllocator;
    use super::super::wr_ids::Receives;
    use super::*;
    use crate::memory::doorbell_record::DoorbellPages;
    use crate::memory::gate::Gate;
    use loom::thread;

    fn registry() -> Arc<QpRegistry> {
        let line = Arc::new(DoorbellPages::new().unwrap().alloc().unwrap());
        QpRegistry::new(PollGate::new(Gate::beside(&line).unwrap()))
    }

    fn shared_qp(indices: &Arc<UidxAllocator>) -> Arc<SharedQp> {
        let uidx = indices.take().unwrap();
        SharedQp::new(uidx.get() + 100, uidx, Some(1), Receives::None)
    }

    /// A queue pair is attached before it completes anything: a poller that finds a completion finds its
    /// queue pair.
    #[test]
    fn a_completion_has_its_queue_pair() {
        loom::model(|| {
            let (indices, registry) = (UidxAllocator::new(), registry());
            // The device: the user index of the queue pair that it completed a request of.
            let completed = loom::sync::Arc::new(AtomicU32::new(0));
            let poller = {
                let (registry, completed) = (registry.clone(), completed.clone());
                thread::spawn(move || {
                    let mut table = QpTable::default();
                    let uidx = completed.load(Ordering::Acquire);
                    if !registry.is_empty() {
                        table.apply_updates(&registry, 0, 2);
                    }
                    assert!(uidx == 0 || table.get(uidx).is_some());
                })
            };
            let qp = shared_qp(&indices);
            registry.attach(&qp);
            completed.store(qp.uidx().get(), Ordering::Release);
            poller.join().unwrap();
        });
    }

    /// Destroying, or a reset that gives the index back, while the poller polls: the index is
    /// assigned again only when the completion with it was consumed.
    #[test]
    fn an_index_is_not_assigned_while_a_completion_has_it() {
        loom::model(|| {
            let (indices, registry) = (UidxAllocator::new(), registry());
            let mut table = QpTable::default();
            let dead = shared_qp(&indices);
            let uidx = dead.uidx().get();
            registry.attach(&dead);
            table.apply_updates(&registry, 0, 2);
            let pending = loom::sync::Arc::new(AtomicU32::new(1));
            let poller = {
                let (registry, pending) = (registry.clone(), pending.clone());
                thread::spawn(move || {
                    if !registry.is_empty() {
                        table.apply_updates(&registry, 0, 2);
                        table.forget(0, false);
                    }
                    // Found or discarded, it is consumed.
                    pending.store(0, Ordering::Release);
                    table.forget(1, true);
                    table
                })
            };
            registry.retire(&dead);
            drop(dead);
            let next = shared_qp(&indices);
            if next.uidx().get() == uidx {
                assert_eq!(pending.load(Ordering::Acquire), 0, "still in the queue");
            }
            registry.attach(&next);
            let mut table = poller.join().unwrap();
            table.apply_updates(&registry, 1, 2);
            table.forget(1, true);
            assert_eq!(table.get(next.uidx().get()).map(SharedQp::qpn), Some(next.qpn()));
        });
    }

    /// One thread adds an update while another compacts: none is lost, and none comes out of order.
    #[test]
    fn updates_put_during_compaction_are_kept_in_order() {
        loom::model(|| {
            let (indices, registry) = (UidxAllocator::new(), registry());
            let (staying, short) = (shared_qp(&indices), shared_qp(&indices));
            registry.attach(&staying);
            registry.attach(&short);
            // As many updates as are worth compacting.
            registry.fresh.store(FEW as u32, Ordering::Relaxed);
            let tidier = {
                let registry = registry.clone();
                thread::spawn(move || registry.compact_updates(|| true))
            };
            registry.retire(&short);
            let gone = short.uidx().get();
            drop(short);
            tidier.join().unwrap();
            let mut table = QpTable::default();
            assert!(!registry.is_empty());
            table.apply_updates(&registry, 0, 2);
            table.forget(0, true);
            assert!(table.get(staying.uidx().get()).is_some());
            assert!(table.get(gone).is_none());
            assert_eq!(indices.take().unwrap().get(), gone);
        });
    }

    /// A poller whose gate is quiet need not read updates: a later one makes the gate dirty again.
    #[test]
    fn no_update_is_missed() {
        loom::model(|| {
            let (indices, registry) = (UidxAllocator::new(), registry());
            let poll = |table: &mut QpTable, registry: &QpRegistry| {
                if !registry.poll_gate.is_quiet() {
                    registry.poll_gate.clear();
                    table.apply_updates(registry, 0, 2);
                }
            };
            let poller = {
                let registry = registry.clone();
                thread::spawn(move || {
                    let mut table = QpTable::default();
                    poll(&mut table, &registry);
                    poll(&mut table, &registry);
                    table
                })
            };
            let qp = shared_qp(&indices);
            registry.attach(&qp);
            let mut table = poller.join().unwrap();
            poll(&mut table, &registry);
            assert!(table.get(qp.uidx().get()).is_some());
        });
    }
}
