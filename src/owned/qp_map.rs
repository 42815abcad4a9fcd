//! From a completion to its loan: the queue pair's number leads to the loan tables, the `wr_id` to the loan.

use super::lending::{Lent, Loans};
use crate::cq::NumberLease;
use crate::lending::loan_table::lender::Lender;
use crate::lending::loan_table::{RECV, ReturnedLoan, SETTLES_ALONE, SentLoan, has_flags};
use crate::provider::Member;
use crate::sync::lock::Lock;
use crate::sync::ring_array::RingArray;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A queue pair that a completion queue adopted, or a shared receive queue of an XRC domain.
#[derive(Debug)]
pub(super) struct AdoptedQp<T> {
    /// The number by which completions name the queue pair: its user index on mlx5, its QPN on rxe.
    number: u32,
    /// On mlx5 the user index is not assigned again while this is in the map.
    _member: Member,
    /// On rxe no other queue pair of the completion queue takes the number meanwhile.
    _lease: Option<NumberLease>,
    send: Loans<T>,
    /// The queue pair's own table, or that of its shared receive queue.
    recv: Loans<T>,
    /// The most completions that its sends may have in the completion queue at once.
    depth: u32,
    closing: Arc<Closing>,
}

/// Whether a queue pair is reset or destroyed, and completes nothing more.
#[derive(Debug)]
struct Closing {
    number: u32,
    closed: AtomicBool,
    /// The map's list of queue pairs that were closed.
    closed_numbers: Arc<Lock<Vec<u32>>>,
}

impl Closing {
    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        if let Some(mut numbers) = self.closed_numbers.lock() {
            numbers.push(self.number);
        }
    }
}

/// Closes a queue pair when it is dropped.
#[derive(Debug)]
pub(super) struct CloseWhenDropped(Arc<Closing>);

impl Drop for CloseWhenDropped {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl<T> AdoptedQp<T> {
    fn is_closed(&self) -> bool {
        self.closing.closed.load(Ordering::Acquire)
    }

    /// The queue pair completes nothing more.
    pub(super) fn close(&self) {
        self.closing.close();
    }

    /// For a queue pair that completes nothing more once the value is dropped.
    pub(super) fn close_when_dropped(&self) -> CloseWhenDropped {
        CloseWhenDropped(self.closing.clone())
    }
}

/// An entry of the map. It holds the loan tables, so that a completion reads no other memory to find them.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct QpEntry<T> {
    number: u32,
    /// The tables of sends and of receives.
    loans: [Loans<T>; 2],
    qp: Option<Arc<AdoptedQp<T>>>,
}

/// The number of an empty entry; numbers of queue pairs have 24 bits.
const NO_QP: u32 = u32::MAX;

impl<T> QpEntry<T> {
    fn new(qp: Arc<AdoptedQp<T>>) -> Self {
        let loans = [qp.send.clone(), qp.recv.clone()];
        QpEntry { number: qp.number, loans, qp: Some(qp) }
    }

    /// An empty entry, with a table that lends nothing.
    fn empty(no_loans: &Loans<T>) -> Self {
        QpEntry { number: NO_QP, loans: [no_loans.clone(), no_loans.clone()], qp: None }
    }

    /// The table of sends or of receives, as `wr_id` says.
    #[inline(always)]
    pub(super) fn loans(&self, wr_id: u64) -> &Loans<T> {
        let [send, recv] = &self.loans;
        if wr_id & RECV == 0 { send } else { recv }
    }

    /// The loan `wr_id` of a send that succeeded, as [`LoanTable::take_back_sent`].
    #[inline(always)]
    pub(super) fn take_back_sent(&self, wr_id: u64) -> Option<SentLoan<'_, Lent<T>>> {
        let [send, _] = &self.loans;
        send.take_back_sent(wr_id)
    }

    /// Takes the loan `wr_id` back; `None` if it is scoped, unsignaled or covers unsignaled ones, too.
    #[inline(always)]
    pub(super) fn take_back_common(&self, wr_id: u64) -> Option<ReturnedLoan<'_, Lent<T>>> {
        let [send, recv] = &self.loans;
        // A common send has no flags: one test finds it.
        match has_flags(wr_id) {
            false => send.take_back(wr_id),
            true if has_flags(wr_id & !SETTLES_ALONE) => recv.take_back_common(wr_id),
            true => send.take_back_either(wr_id),
        }
    }
}

/// The adopted queue pairs of a completion queue, by number.
#[derive(Debug)]
pub(super) struct QpMap<T> {
    /// A hash table with open addressing, of a power of two and at most half full. The hash is the number
    /// itself, because kernels number queue pairs one after the other.
    entries: RingArray<QpEntry<T>>,
    /// An entry for numbers that are not in the map.
    missing: QpEntry<T>,
    no_loans: Loans<T>,
    count: u32,
    /// The most completions that all queue pairs may have in the completion queue at once.
    needed: u64,
    /// How many queue pairs use each receive table, by the table's key.
    receivers: HashMap<usize, u32>,
    closed_numbers: Arc<Lock<Vec<u32>>>,
    /// How often an entry was written.
    #[cfg(test)]
    puts: usize,
}

impl<T> QpMap<T> {
    pub(super) fn new() -> Self {
        let no_loans = Lender::new(0, 0).table().clone();
        QpMap {
            entries: RingArray::of(1, |_| QpEntry::empty(&no_loans)),
            missing: QpEntry::empty(&no_loans),
            no_loans,
            count: 0,
            needed: 0,
            receivers: HashMap::new(),
            closed_numbers: Arc::default(),
            #[cfg(test)]
            puts: 0,
        }
    }

    /// An entry that takes nothing back.
    pub(super) fn missing(&self) -> &QpEntry<T> {
        &self.missing
    }

    /// A table for what sends nothing.
    pub(super) fn no_loans(&self) -> Loans<T> {
        self.no_loans.clone()
    }

    #[inline(always)]
    pub(super) fn find(&self, number: u32) -> Option<&QpEntry<T>> {
        let first = self.entries.at(number);
        if first.number == number { Some(first) } else { self.search(number) }
    }

    /// As [`find`](Self::find), if another number has the first entry.
    #[cold]
    #[inline(never)]
    fn search(&self, number: u32) -> Option<&QpEntry<T>> {
        let mut at = number;
        loop {
            let entry = self.entries.at(at);
            if entry.number == number {
                return Some(entry);
            }
            if entry.number == NO_QP {
                return None;
            }
            at = at.wrapping_add(1);
        }
    }

    /// A queue pair of this map, which is still to be [added](Self::add).
    pub(super) fn new_qp(
        &self,
        (number, member, lease): (u32, Member, Option<NumberLease>),
        send: Loans<T>,
        recv: Loans<T>,
        depth: u32,
    ) -> Arc<AdoptedQp<T>> {
        let (closed, closed_numbers) = (AtomicBool::new(false), self.closed_numbers.clone());
        let closing = Arc::new(Closing { number, closed, closed_numbers });
        Arc::new(AdoptedQp { number, _member: member, _lease: lease, send, recv, depth, closing })
    }

    /// The most completions that all queue pairs may have in the completion queue at once. Receives of a
    /// shared receive queue count once.
    pub(super) fn needed(&self) -> u64 {
        self.needed
    }

    /// How many completions the receives of a queue pair add to [`needed`](Self::needed).
    pub(super) fn needed_for(&self, recv: &Loans<T>) -> u64 {
        if self.receivers.contains_key(&recv.key()) { 0 } else { recv.len() as u64 }
    }

    /// The numbers of the queue pairs that were closed since the last call.
    pub(super) fn take_closed(&mut self) -> Vec<u32> {
        self.closed_numbers
            .lock()
            .map(|mut numbers| std::mem::take(&mut *numbers))
            .unwrap_or_default()
    }

    /// Adds a queue pair, in place of an earlier one with the same number.
    pub(super) fn add(&mut self, qp: Arc<AdoptedQp<T>>) {
        self.remove(qp.number);
        // At least half the entries stay empty, so that searches are short and end at an empty one.
        let (count, len) = (self.count + 1, self.entries.len());
        if 2 * count > len {
            let no_loans = &self.no_loans;
            let larger = RingArray::of(2 * len, |_| QpEntry::empty(no_loans));
            let smaller = std::mem::replace(&mut self.entries, larger);
            for at in 0..len {
                if let Some(qp) = &smaller.at(at).qp {
                    self.insert(qp.clone());
                }
            }
        }
        self.count = count;
        self.needed += u64::from(qp.depth) + self.needed_for(&qp.recv);
        *self.receivers.entry(qp.recv.key()).or_default() += 1;
        self.insert(qp);
    }

    /// Removes queue pairs that were closed. The caller has polled all completions that they left in the
    /// completion queue.
    pub(super) fn remove_closed(&mut self, numbers: Vec<u32>) {
        for number in numbers {
            // A live queue pair may have the number by now.
            let qp = self.find(number).and_then(|entry| entry.qp.as_ref());
            if qp.is_some_and(|qp| qp.is_closed()) {
                self.remove(number);
            }
        }
    }

    fn insert(&mut self, qp: Arc<AdoptedQp<T>>) {
        let mut at = qp.number;
        while self.entries.at(at).number != NO_QP {
            at = at.wrapping_add(1);
        }
        self.put(at, QpEntry::new(qp));
    }

    fn put(&mut self, at: u32, entry: QpEntry<T>) {
        // It cannot fail: nobody else holds the array.
        let _ = self.entries.put(at, entry);
        #[cfg(test)]
        (self.puts += 1);
    }

    fn remove(&mut self, number: u32) {
        let Some(qp) = self.find(number).and_then(|entry| entry.qp.clone()) else { return };
        let mut hole = number;
        while self.entries.at(hole).number != number {
            hole = hole.wrapping_add(1);
        }
        // Entries behind the hole move into it, unless the hole is before the entry where their search begins.
        let mask = self.entries.len() - 1;
        let mut at = hole;
        loop {
            at = at.wrapping_add(1);
            let Some(next) = &self.entries.at(at).qp else { break };
            let from_first = at.wrapping_sub(next.number) & mask;
            let from_hole = at.wrapping_sub(hole) & mask;
            if from_first >= from_hole {
                let next = next.clone();
                self.put(hole, QpEntry::new(next));
                hole = at;
            }
        }
        self.put(hole, QpEntry::empty(&self.no_loans));
        self.count -= 1;
        self.needed -= u64::from(qp.depth);
        let receivers = self.receivers.entry(qp.recv.key()).or_default();
        *receivers -= 1;
        if *receivers == 0 {
            self.receivers.remove(&qp.recv.key());
            self.needed -= qp.recv.len() as u64;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn loans() -> Loans<u32> {
        Lender::new(3, 0).table().clone()
    }

    fn add(map: &mut QpMap<u32>, number: u32) -> Arc<AdoptedQp<u32>> {
        let qp = map.new_qp((number, Member::default(), None), loans(), loans(), 2);
        map.add(qp.clone());
        qp
    }

    /// The next queue pair with the number could name what is lent by a shared table.
    #[test]
    fn a_number_is_not_assigned_again_while_it_is_in_the_map() {
        use crate::provider::mlx5::uidx::UidxAllocator;
        use crate::provider::mlx5::wr_ids::{Receives, SharedQp};
        let (indices, mut map) = (UidxAllocator::new(), QpMap::new());
        let uidx = indices.take().unwrap();
        let number = uidx.get();
        let member = SharedQp::new(7, uidx, Some(4), Receives::None).member();
        let qp = map.new_qp((number, member, None), loans(), loans(), 2);
        map.add(qp.clone());
        qp.close();
        drop(qp);
        assert_ne!(indices.take().unwrap().get(), number);
        let closed = map.take_closed();
        map.remove_closed(closed);
        assert_eq!(indices.take().unwrap().get(), number);
    }

    #[test]
    fn queue_pairs_are_found_by_number() {
        let mut map = QpMap::new();
        assert!(map.find(7).is_none());
        // Numbers that collide in a small table.
        let mut numbers = vec![16, 32, 48, 64, 17, 0, 0xff_ffff];
        let mut all: Vec<_> = numbers.iter().map(|number| add(&mut map, *number)).collect();
        while let Some(qp) = all.pop() {
            for number in &numbers {
                assert_eq!(
                    map.find(*number).map(|entry| entry.number),
                    Some(*number),
                    "with {numbers:?}"
                );
            }
            for number in [1, 80, 0xff_fffe] {
                assert!(map.find(number).is_none());
            }
            assert_eq!(map.needed(), 5 * numbers.len() as u64);
            numbers.pop();
            qp.close();
            let closed = map.take_closed();
            map.remove_closed(closed);
            assert!(map.find(qp.number).is_none());
            // In another order.
            numbers.reverse();
            all.reverse();
        }
        assert_eq!((map.needed(), map.count, map.receivers.len()), (0, 0, 0));
    }

    #[test]
    fn closed_queue_pairs_are_removed_and_numbers_used_again() {
        let mut map = QpMap::new();
        let old = add(&mut map, 5);
        add(&mut map, 6);
        old.close();
        assert_eq!(map.needed(), 10, "it still counts");
        assert_eq!((map.take_closed(), map.take_closed()), (vec![5], vec![]));
        map.remove_closed(vec![5]);
        assert!(map.find(5).is_none() && map.find(6).is_some());
        let older = add(&mut map, 5);
        let new = add(&mut map, 5);
        assert_eq!(map.needed(), 10);
        assert!(Arc::ptr_eq(map.find(5).unwrap().qp.as_ref().unwrap(), &new));
        assert_eq!((Arc::strong_count(&old), Arc::strong_count(&older)), (1, 1));
        // A queue pair that is closed late does not remove the next one with its number.
        older.close();
        let closed = map.take_closed();
        map.remove_closed(closed);
        assert!(map.find(5).is_some());
    }

    #[test]
    fn receives_of_a_shared_queue_count_once() {
        let mut map = QpMap::new();
        let shared = loans();
        let all: Vec<_> = (0..3)
            .map(|n| map.new_qp((n, Member::default(), None), loans(), shared.clone(), 2))
            .collect();
        assert_eq!(map.needed_for(&shared), 3);
        all.iter().for_each(|qp| map.add(qp.clone()));
        assert_eq!((map.needed(), map.needed_for(&shared)), (9, 0));
        for (left, qp) in [7, 5, 0].into_iter().zip(all) {
            qp.close();
            let closed = map.take_closed();
            map.remove_closed(closed);
            assert_eq!(map.needed(), left);
        }
    }

    /// All empty entries share one loan table.
    #[test]
    fn adding_and_removing_costs_the_same_among_many_queue_pairs() {
        const COUNT: u32 = if cfg!(miri) { 60 } else { 2000 };
        let mut map = QpMap::new();
        let mut all: Vec<_> = (0..COUNT).map(|number| add(&mut map, 17 + number)).collect();
        let puts = COUNT as usize..3 * COUNT as usize;
        assert!(puts.contains(&map.puts), "{} to add {COUNT}", map.puts);
        let entries = (0..map.entries.len()).map(|at| map.entries.at(at));
        let free: Vec<_> = entries.filter(|entry| entry.number == NO_QP).collect();
        assert!(free.len() >= COUNT as usize);
        assert!(free.iter().all(|entry| entry.loans[0].key() == map.no_loans.key()));
        map.puts = 0;
        // The kernel assigns numbers in a circle.
        for round in 0..COUNT {
            all[round as usize].close();
            let closed = map.take_closed();
            map.remove_closed(closed);
            all[round as usize] = add(&mut map, 17 + COUNT + round);
        }
        assert!(map.puts < 4 * COUNT as usize, "{} to exchange {COUNT}", map.puts);
    }

    /// A child that adopts a queue pair asks for closed ones before it is refused.
    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_does_not_wait_for_a_lock_of_its_parent() {
        let mut map = QpMap::new();
        let qp = add(&mut map, 5);
        let numbers = map.closed_numbers.clone();
        let child = || {
            qp.close();
            assert_eq!(map.take_closed(), []);
        };
        crate::sync::lock::in_child_while_held(|| numbers.lock(), child);
    }
}
