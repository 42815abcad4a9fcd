//! From a completion to what was lent: by the number of the queue pair, and then by the ticket.

use super::buffer::{Buffer, Extent, Whole};
use super::memory::Memory;
use crate::cq::Lease;
use crate::memory::compact_enum::{CompactEnum, Content};
use crate::memory::loan_table::lender::Lender;
use crate::memory::loan_table::{LoanTable, MARK, Settling};
use crate::memory::lock::Lock;
use crate::memory::ring_array::RingArray;
use crate::provider::Member;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What is lent to one request: a buffer with what the request was posted with, or else the rest.
pub(super) type Entry<T> = CompactEnum<Whole, (Extent, T), Rest<T>>;

/// What is lent to a request, if it is no buffer.
#[derive(Debug)]
pub(super) enum Rest<T> {
    /// Memory, and what the request was posted with.
    Owned(Memory, T),
    /// Memory that a scope borrows.
    Scoped,
}

/// What is lent to a request with a tag.
#[inline(always)]
pub(super) fn entry<T>(memory: Memory, tag: T) -> Entry<T> {
    CompactEnum::new(match memory {
        Memory::Buffer(buffer) => {
            let (piece, extent) = buffer.into_parts();
            Content::Small(piece, (extent, tag))
        }
        other => Content::Large(Rest::Owned(other, tag)),
    })
}

/// The memory of a request and its tag, unless it is a scope's.
#[inline(always)]
pub(super) fn parts<T>(entry: Entry<T>) -> Option<(Memory, T)> {
    match entry.open() {
        Content::Small(piece, (extent, tag)) => {
            Some((Memory::Buffer(Buffer::of(piece, extent)), tag))
        }
        Content::Large(Rest::Owned(memory, tag)) => Some((memory, tag)),
        Content::Large(Rest::Scoped) => None,
    }
}

pub(super) type Lent<T> = LoanTable<Entry<T>>;

/// What marks the number of a receive: its queue has a table of its own.
pub(super) const RECV: u64 = MARK;
/// And what does not mark that of a send.
pub(super) const SEND: u64 = 0;

/// What is lent to a queue pair.
#[derive(Debug)]
pub(super) struct Route<T> {
    /// By which completions say whose they are.
    number: u32,
    /// Keeps the number from being dealt again while it leads here, where it is this library's to deal.
    _member: Member,
    /// Keeps it from other queue pairs of the completion queue, where the kernel deals it.
    _lease: Option<Lease>,
    send: Lent<T>,
    /// The queue pair's own, or that of the shared receive queue.
    recv: Lent<T>,
    /// Completions that its sends may have in the completion queue at once.
    depth: u32,
    /// The queue pair completes nothing any more.
    dead: AtomicBool,
    /// Where the completion queue hears of that.
    obituary: Arc<Lock<Vec<u32>>>,
}

impl<T> Route<T> {
    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    pub(super) fn close(&self) {
        self.dead.store(true, Ordering::Release);
        if let Some(mut obituary) = self.obituary.lock() {
            obituary.push(self.number);
        }
    }
}

/// A queue pair of a completion queue, with the way to its tables at hand.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Known<T> {
    number: u32,
    /// To sends and to receives.
    lent: [Lent<T>; 2],
    route: Option<Arc<Route<T>>>,
}

/// No queue pair's number: those have 24 bits.
const NOBODY: u32 = u32::MAX;

impl<T> Known<T> {
    fn new(route: Arc<Route<T>>) -> Self {
        let lent = [route.send.clone(), route.recv.clone()];
        Known { number: route.number, lent, route: Some(route) }
    }

    /// With a table where nothing is lent.
    fn nobody(empty: &Lent<T>) -> Self {
        Known { number: NOBODY, lent: [empty.clone(), empty.clone()], route: None }
    }

    pub(super) fn settle(&self, wr_id: u64) -> Option<Settling<'_, Entry<T>>> {
        let [send, recv] = &self.lent;
        if wr_id & RECV == 0 { send.settle(wr_id) } else { recv.settle(wr_id) }
    }

    /// The same, but nothing of a scope's.
    #[inline(always)]
    pub(super) fn settle_usual(&self, wr_id: u64) -> Option<Settling<'_, Entry<T>>> {
        let [send, recv] = &self.lent;
        if wr_id & RECV == 0 { send.settle_usual(wr_id) } else { recv.settle_usual(wr_id) }
    }
}

/// All queue pairs of a completion queue, by number.
#[derive(Debug)]
pub(super) struct Routes<T> {
    /// A hash table with open addressing, at most half full and of a power of two; kernels number
    /// queue pairs one after the other, so that the number itself is as good as a hash.
    table: RingArray<Known<T>>,
    /// Who settles nothing, and what nobody lends in.
    nobody: Known<T>,
    empty: Lent<T>,
    count: u32,
    /// Completions that all of them may have in the queue at once.
    needed: u64,
    /// How many queue pairs receive by a table.
    receivers: HashMap<usize, u32>,
    obituary: Arc<Lock<Vec<u32>>>,
    /// How often something was put into the table.
    #[cfg(test)]
    puts: usize,
}

impl<T> Routes<T> {
    pub(super) fn new() -> Self {
        let empty = Lender::new(0, SEND).slots().clone();
        Routes {
            table: RingArray::of(1, |_| Known::nobody(&empty)),
            nobody: Known::nobody(&empty),
            empty,
            count: 0,
            needed: 0,
            receivers: HashMap::new(),
            obituary: Arc::default(),
            #[cfg(test)]
            puts: 0,
        }
    }

    /// Who settles nothing.
    pub(super) fn nobody(&self) -> &Known<T> {
        &self.nobody
    }

    #[inline(always)]
    pub(super) fn find(&self, number: u32) -> Option<&Known<T>> {
        let first = self.table.at(number);
        if first.number == number { Some(first) } else { self.search(number) }
    }

    /// As [`find`](Self::find), where another is in the first place.
    #[cold]
    #[inline(never)]
    fn search(&self, number: u32) -> Option<&Known<T>> {
        let mut at = number;
        loop {
            let known = self.table.at(at);
            if known.number == number {
                return Some(known);
            }
            if known.number == NOBODY {
                return None;
            }
            at = at.wrapping_add(1);
        }
    }

    /// Of a queue pair that is to be [added](Self::add).
    pub(super) fn route(
        &self,
        (number, member, lease): (u32, Member, Option<Lease>),
        send: Lent<T>,
        recv: Lent<T>,
        depth: u32,
    ) -> Arc<Route<T>> {
        let (dead, obituary) = (AtomicBool::new(false), self.obituary.clone());
        Arc::new(Route {
            number,
            _member: member,
            _lease: lease,
            send,
            recv,
            depth,
            dead,
            obituary,
        })
    }

    /// Completions that all queue pairs may have in the queue at once. Receives of a shared queue
    /// count once, whoever takes them.
    pub(super) fn needed(&self) -> u64 {
        self.needed
    }

    /// How many more those are with a queue pair that receives by `recv`.
    pub(super) fn more(&self, recv: &Lent<T>) -> u64 {
        if self.receivers.contains_key(&recv.key()) { 0 } else { recv.len() as u64 }
    }

    /// The numbers of those that died since this was last asked.
    pub(super) fn dead(&mut self) -> Vec<u32> {
        self.obituary.lock().map(|mut dead| std::mem::take(&mut *dead)).unwrap_or_default()
    }

    /// Adds a queue pair, in place of one that had the same number before.
    pub(super) fn add(&mut self, route: Arc<Route<T>>) {
        self.remove(route.number);
        // At least one place stays free, where a search ends.
        let (count, len) = (self.count + 1, self.table.len());
        if 2 * count > len {
            let empty = &self.empty;
            let small = RingArray::of(2 * len, |_| Known::nobody(empty));
            let small = std::mem::replace(&mut self.table, small);
            for at in 0..len {
                if let Some(route) = &small.at(at).route {
                    self.place(route.clone());
                }
            }
        }
        self.count = count;
        self.needed += u64::from(route.depth) + self.more(&route.recv);
        *self.receivers.entry(route.recv.key()).or_default() += 1;
        self.place(route);
    }

    /// Forgets queue pairs that are dead, and of which nothing is left in the completion queue.
    pub(super) fn forget(&mut self, gone: Vec<u32>) {
        for number in gone {
            // Another may have got the number since.
            let route = self.find(number).and_then(|known| known.route.as_ref());
            if route.is_some_and(|route| route.is_dead()) {
                self.remove(number);
            }
        }
    }

    fn place(&mut self, route: Arc<Route<T>>) {
        let mut at = route.number;
        while self.table.at(at).number != NOBODY {
            at = at.wrapping_add(1);
        }
        self.put(at, Known::new(route));
    }

    fn put(&mut self, at: u32, known: Known<T>) {
        // Nobody else has the table.
        let _ = self.table.put(at, known);
        #[cfg(test)]
        (self.puts += 1);
    }

    fn remove(&mut self, number: u32) {
        let Some(route) = self.find(number).and_then(|known| known.route.clone()) else { return };
        let mut hole = number;
        while self.table.at(hole).number != number {
            hole = hole.wrapping_add(1);
        }
        // Those behind move up, unless they would come to stand before their place.
        let mask = self.table.len() - 1;
        let mut at = hole;
        loop {
            at = at.wrapping_add(1);
            let Some(next) = &self.table.at(at).route else { break };
            let (way, gap) = (at.wrapping_sub(next.number) & mask, at.wrapping_sub(hole) & mask);
            if way >= gap {
                let next = next.clone();
                self.put(hole, Known::new(next));
                hole = at;
            }
        }
        self.put(hole, Known::nobody(&self.empty));
        self.count -= 1;
        self.needed -= u64::from(route.depth);
        let receivers = self.receivers.entry(route.recv.key()).or_default();
        *receivers -= 1;
        if *receivers == 0 {
            self.receivers.remove(&route.recv.key());
            self.needed -= route.recv.len() as u64;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn lent() -> Lent<u32> {
        Lender::new(3, SEND).slots().clone()
    }

    fn add(routes: &mut Routes<u32>, number: u32) -> Arc<Route<u32>> {
        let route = routes.route((number, Member::None, None), lent(), lent(), 2);
        routes.add(route.clone());
        route
    }

    /// Whoever got it next could name what is lent by a shared table.
    #[test]
    fn a_number_is_not_dealt_while_it_leads_somewhere() {
        use crate::provider::mlx5::uidx::UidxAllocator;
        use crate::provider::mlx5::wr_ids::{Receives, SharedQp};
        let (indices, mut routes) = (UidxAllocator::new(), Routes::new());
        let index = indices.take().unwrap();
        let number = index.number();
        let member = Member::Mlx5(SharedQp::new(7, index, Some(4), Receives::None));
        let route = routes.route((number, member, None), lent(), lent(), 2);
        routes.add(route.clone());
        route.close();
        drop(route);
        assert_ne!(indices.take().unwrap().number(), number);
        let dead = routes.dead();
        routes.forget(dead);
        assert_eq!(indices.take().unwrap().number(), number);
    }

    #[test]
    fn queue_pairs_are_found_by_number() {
        let mut routes = Routes::new();
        assert!(routes.find(7).is_none());
        // Numbers that meet in a small table.
        let mut numbers = vec![16, 32, 48, 64, 17, 0, 0xff_ffff];
        let mut all: Vec<_> = numbers.iter().map(|number| add(&mut routes, *number)).collect();
        while let Some(route) = all.pop() {
            for number in &numbers {
                assert_eq!(
                    routes.find(*number).map(|known| known.number),
                    Some(*number),
                    "with {numbers:?}"
                );
            }
            for number in [1, 80, 0xff_fffe] {
                assert!(routes.find(number).is_none());
            }
            assert_eq!(routes.needed(), 5 * numbers.len() as u64);
            numbers.pop();
            route.close();
            let dead = routes.dead();
            routes.forget(dead);
            assert!(routes.find(route.number).is_none());
            // In another order.
            numbers.reverse();
            all.reverse();
        }
        assert_eq!((routes.needed(), routes.count, routes.receivers.len()), (0, 0, 0));
    }

    #[test]
    fn the_dead_are_forgotten_and_numbers_used_again() {
        let mut routes = Routes::new();
        let old = add(&mut routes, 5);
        add(&mut routes, 6);
        old.close();
        assert_eq!(routes.needed(), 10, "it still counts");
        assert_eq!((routes.dead(), routes.dead()), (vec![5], vec![]));
        routes.forget(vec![5]);
        assert!(routes.find(5).is_none() && routes.find(6).is_some());
        let older = add(&mut routes, 5);
        let new = add(&mut routes, 5);
        assert_eq!(routes.needed(), 10);
        assert!(Arc::ptr_eq(routes.find(5).unwrap().route.as_ref().unwrap(), &new));
        assert_eq!((Arc::strong_count(&old), Arc::strong_count(&older)), (1, 1));
        // Who dies after another got the number takes nobody along.
        older.close();
        let dead = routes.dead();
        routes.forget(dead);
        assert!(routes.find(5).is_some());
    }

    #[test]
    fn shared_receives_count_once() {
        let mut routes = Routes::new();
        let shared = lent();
        let all: Vec<_> = (0..3)
            .map(|n| routes.route((n, Member::None, None), lent(), shared.clone(), 2))
            .collect();
        assert_eq!(routes.more(&shared), 3);
        all.iter().for_each(|route| routes.add(route.clone()));
        assert_eq!((routes.needed(), routes.more(&shared)), (9, 0));
        for (left, route) in [7, 5, 0].into_iter().zip(all) {
            route.close();
            let dead = routes.dead();
            routes.forget(dead);
            assert_eq!(routes.needed(), left);
        }
    }

    /// One queue pair more, or less, costs no more among many than among few; and those places of the
    /// table that are nobody's have one table of slots together.
    #[test]
    fn many_queue_pairs_come_and_go_at_a_constant_cost() {
        const COUNT: u32 = if cfg!(miri) { 60 } else { 2000 };
        let mut routes = Routes::new();
        let mut all: Vec<_> = (0..COUNT).map(|number| add(&mut routes, 17 + number)).collect();
        assert!(routes.puts < 3 * COUNT as usize, "{} to add {COUNT}", routes.puts);
        let places = (0..routes.table.len()).map(|at| routes.table.at(at));
        let free: Vec<_> = places.filter(|known| known.number == NOBODY).collect();
        assert!(free.len() >= COUNT as usize);
        assert!(free.iter().all(|known| known.lent[0].key() == routes.empty.key()));
        routes.puts = 0;
        // Numbers come around, as the kernel gives them.
        for round in 0..COUNT {
            all[round as usize].close();
            let dead = routes.dead();
            routes.forget(dead);
            all[round as usize] = add(&mut routes, 17 + COUNT + round);
        }
        assert!(routes.puts < 4 * COUNT as usize, "{} to exchange {COUNT}", routes.puts);
    }

    /// A child that adopts a queue pair asks who died before it is told that it may not.
    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_waits_for_no_obituary() {
        let mut routes = Routes::new();
        let route = add(&mut routes, 5);
        let obituary = routes.obituary.clone();
        let child = || {
            route.close();
            assert_eq!(routes.dead(), []);
        };
        crate::memory::lock::in_child_while_held(|| obituary.lock(), child);
    }
}
