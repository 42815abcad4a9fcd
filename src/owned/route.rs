//! From a completion to what was lent: by the number of the queue pair, and then by the ticket.

use super::memory::Memory;
use crate::mem::slots::{Slots, TICKET_BITS};
use crate::number::Qpn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What is lent to one request. Those of a scope have no tag.
#[derive(Debug)]
pub(super) struct Entry<T> {
    pub(super) memory: Memory,
    pub(super) tag: Option<T>,
}

pub(super) type Lent<T> = Slots<Entry<T>>;

/// Set in the number of a receive: its queue has a table of its own.
const RECV: u64 = 1 << TICKET_BITS;

/// The number of a send.
#[inline(always)]
pub(super) fn send_id(ticket: u64) -> u64 {
    ticket
}

/// The number of a receive.
#[inline(always)]
pub(super) fn recv_id(ticket: u64) -> u64 {
    ticket | RECV
}

/// What is lent to a queue pair.
#[derive(Debug)]
pub(super) struct Route<T> {
    pub(super) qpn: Qpn,
    pub(super) send: Arc<Lent<T>>,
    /// The queue pair's own, or that of the shared receive queue.
    pub(super) recv: Arc<Lent<T>>,
    /// Completions that it may have in the completion queue at once.
    pub(super) depth: u64,
    /// The queue pair completes nothing any more.
    pub(super) dead: AtomicBool,
}

impl<T> Route<T> {
    #[inline(always)]
    pub(super) fn settle(&self, wr_id: u64) -> Option<Entry<T>> {
        let ticket = wr_id & !RECV;
        if wr_id & RECV == 0 { self.send.settle(ticket) } else { self.recv.settle(ticket) }
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    pub(super) fn close(&self) {
        self.dead.store(true, Ordering::Release);
    }
}

/// All queue pairs of a completion queue, by number.
#[derive(Debug)]
pub(super) struct Routes<T> {
    /// A hash table with open addressing, at most half full and of a power of two; kernels number
    /// queue pairs one after the other, so that the number itself is as good as a hash.
    table: Vec<Option<Arc<Route<T>>>>,
}

impl<T> Routes<T> {
    pub(super) fn new() -> Self {
        Routes { table: vec![None] }
    }

    #[inline(always)]
    pub(super) fn find(&self, qpn: Qpn) -> Option<&Route<T>> {
        let mask = self.table.len().wrapping_sub(1);
        let mut at = qpn.0 as usize & mask;
        loop {
            let route = self.table.get(at)?.as_deref()?;
            if route.qpn == qpn {
                return Some(route);
            }
            at = (at + 1) & mask;
        }
    }

    /// The numbers of those that are dead.
    pub(super) fn dead(&self) -> Vec<Qpn> {
        self.iter().filter(|route| route.is_dead()).map(|route| route.qpn).collect()
    }

    /// Adds a queue pair.
    pub(super) fn add(&mut self, route: Arc<Route<T>>) {
        let gone = route.qpn;
        self.rebuild(&[gone], Some(route));
    }

    /// Forgets queue pairs, of which nothing is left in the completion queue.
    pub(super) fn forget(&mut self, gone: &[Qpn]) {
        self.rebuild(gone, None);
    }

    fn rebuild(&mut self, without: &[Qpn], with: Option<Arc<Route<T>>>) {
        let all: Vec<Arc<Route<T>>> = std::mem::take(&mut self.table)
            .into_iter()
            .flatten()
            .filter(|route| !without.contains(&route.qpn))
            .chain(with)
            .collect();
        // At least one place stays free, where a search ends.
        self.table = vec![None; (2 * all.len()).next_power_of_two()];
        let mask = self.table.len() - 1;
        for route in all {
            let mut at = route.qpn.0 as usize & mask;
            while self.table.get(at).is_some_and(Option::is_some) {
                at = (at + 1) & mask;
            }
            if let Some(place) = self.table.get_mut(at) {
                *place = Some(route);
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<Route<T>>> {
        self.table.iter().flatten()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::mem::slots::Lender;

    fn route(qpn: u32) -> Arc<Route<u32>> {
        let slots = || Lender::new(1).slots().clone();
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
        assert_eq!((routes.dead(), routes.iter().count()), (vec![Qpn(5)], 2), "it still counts");
        routes.forget(&[Qpn(5)]);
        assert!(routes.find(Qpn(5)).is_none() && routes.find(Qpn(6)).is_some());
        routes.add(old.clone());
        let new = route(5);
        routes.add(new.clone());
        assert_eq!(routes.iter().count(), 2);
        assert!(std::ptr::eq(routes.find(Qpn(5)).unwrap(), &*new));
        assert_eq!(Arc::strong_count(&old), 1);
    }
}
