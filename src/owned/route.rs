//! From a completion to what was lent: by the number of the queue pair, and then by the ticket.

use super::memory::Memory;
use crate::mem::slots::{MARK, Slots};
use crate::number::Qpn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What is lent to one request.
#[derive(Debug)]
pub(super) enum Entry<T> {
    /// Memory, and what the request was posted with.
    Owned(Memory, T),
    /// Memory that a scope borrows.
    Scoped,
}

pub(super) type Lent<T> = Slots<Entry<T>>;

/// What marks the number of a receive: its queue has a table of its own.
pub(super) const RECV: u64 = MARK;
/// And what does not mark that of a send.
pub(super) const SEND: u64 = 0;

/// What is lent to a queue pair.
#[derive(Debug)]
pub(super) struct Route<T> {
    pub(super) qpn: Qpn,
    pub(super) send: Lent<T>,
    /// The queue pair's own, or that of the shared receive queue.
    pub(super) recv: Lent<T>,
    /// Completions that it may have in the completion queue at once.
    pub(super) depth: u64,
    /// The queue pair completes nothing any more.
    pub(super) dead: AtomicBool,
}

impl<T> Route<T> {
    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    pub(super) fn close(&self) {
        self.dead.store(true, Ordering::Release);
    }
}

/// A queue pair of a completion queue, with the way to its tables at hand.
#[derive(Debug)]
pub(super) struct Known<T> {
    qpn: Qpn,
    send: Lent<T>,
    recv: Lent<T>,
    route: Arc<Route<T>>,
}

impl<T> Known<T> {
    fn new(route: Arc<Route<T>>) -> Self {
        Known { qpn: route.qpn, send: route.send.clone(), recv: route.recv.clone(), route }
    }

    #[inline(always)]
    pub(super) fn settle(&self, wr_id: u64) -> Option<Entry<T>> {
        if wr_id & RECV == 0 { self.send.settle(wr_id) } else { self.recv.settle(wr_id) }
    }
}

/// All queue pairs of a completion queue, by number.
#[derive(Debug)]
pub(super) struct Routes<T> {
    /// A hash table with open addressing, at most half full and of a power of two; kernels number
    /// queue pairs one after the other, so that the number itself is as good as a hash.
    table: Vec<Option<Known<T>>>,
}

impl<T> Routes<T> {
    pub(super) fn new() -> Self {
        Routes { table: vec![None] }
    }

    #[inline(always)]
    pub(super) fn find(&self, qpn: Qpn) -> Option<&Known<T>> {
        let mask = self.table.len().wrapping_sub(1);
        let mut at = qpn.0 as usize & mask;
        loop {
            let known = self.table.get(at)?.as_ref()?;
            if known.qpn == qpn {
                return Some(known);
            }
            at = (at + 1) & mask;
        }
    }

    /// Adds a queue pair, and forgets those that are dead.
    pub(super) fn add(&mut self, route: Arc<Route<T>>) {
        let mut all: Vec<Known<T>> = std::mem::take(&mut self.table)
            .into_iter()
            .flatten()
            .filter(|old| !old.route.is_dead() && old.qpn != route.qpn)
            .collect();
        all.push(Known::new(route));
        self.table.resize_with((2 * all.len()).next_power_of_two(), || None);
        let mask = self.table.len() - 1;
        for known in all {
            let mut at = known.qpn.0 as usize & mask;
            while self.table.get(at).is_some_and(Option::is_some) {
                at = (at + 1) & mask;
            }
            if let Some(place) = self.table.get_mut(at) {
                *place = Some(known);
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Route<T>> {
        let routes = self.table.iter().flatten().map(|known| &*known.route);
        routes.filter(|route| !route.is_dead())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::mem::slots::Lender;

    fn route(qpn: u32) -> Arc<Route<u32>> {
        let slots = || Lender::new(1, SEND).slots().clone();
        let (send, recv) = (slots(), slots());
        Arc::new(Route { qpn: Qpn(qpn), send, recv, depth: 2, dead: AtomicBool::new(false) })
    }

    #[test]
    fn queue_pairs_are_found_by_number() {
        let mut routes = Routes::new();
        assert!(routes.find(Qpn(7)).is_none());
        // Numbers that meet in a small table.
        let numbers = [16, 32, 48, 64, 17, 0, 0xff_ffff];
        for number in numbers {
            routes.add(route(number));
        }
        for number in numbers {
            assert_eq!(routes.find(Qpn(number)).map(|route| route.qpn), Some(Qpn(number)));
        }
        for number in [1, 80, 0xff_fffe] {
            assert!(routes.find(Qpn(number)).is_none());
        }
    }

    #[test]
    fn the_dead_are_forgotten_and_numbers_used_again() {
        let mut routes = Routes::new();
        let old = route(5);
        routes.add(old.clone());
        routes.add(route(6));
        old.close();
        assert_eq!(routes.iter().count(), 1);
        let new = route(5);
        routes.add(new.clone());
        assert_eq!(routes.iter().count(), 2);
        assert!(Arc::ptr_eq(&routes.find(Qpn(5)).unwrap().route, &new));
        assert_eq!(Arc::strong_count(&old), 1);
    }
}
