//! From a completion to what was lent: by the number of the queue pair, and then by the ticket.

use super::buffer::Buffer;
use super::memory::Memory;
use crate::mem::masked::Masked;
use crate::mem::slots::{Lender, MARK, Parcel, Settling, Slots};
use crate::number::Qpn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What is lent to one request: a buffer with what the request was posted with, or else the rest.
pub(super) type Entry<T> = Parcel<(Buffer, T), Rest<T>>;

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
    match memory {
        Memory::Buffer(buffer) => Parcel::Small((buffer, tag)),
        other => Parcel::Large(Rest::Owned(other, tag)),
    }
}

/// The memory of a request and its tag, unless it is a scope's.
#[inline(always)]
pub(super) fn parts<T>(entry: Entry<T>) -> Option<(Memory, T)> {
    match entry {
        Parcel::Small((buffer, tag)) => Some((Memory::Buffer(buffer), tag)),
        Parcel::Large(Rest::Owned(memory, tag)) => Some((memory, tag)),
        Parcel::Large(Rest::Scoped) => None,
    }
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
#[repr(align(128))]
pub(super) struct Known<T> {
    qpn: Qpn,
    send: Lent<T>,
    recv: Lent<T>,
    route: Option<Arc<Route<T>>>,
}

/// No queue pair's number: those have 24 bits.
const NOBODY: Qpn = Qpn(u32::MAX);

impl<T> Known<T> {
    fn new(route: Arc<Route<T>>) -> Self {
        let (send, recv) = (route.send.clone(), route.recv.clone());
        Known { qpn: route.qpn, send, recv, route: Some(route) }
    }

    fn nobody() -> Self {
        let lent = Lender::new(0, SEND).slots().clone();
        Known { qpn: NOBODY, send: lent.clone(), recv: lent, route: None }
    }

    #[inline(always)]
    pub(super) fn settle(&self, wr_id: u64) -> Option<Settling<'_, Entry<T>>> {
        if wr_id & RECV == 0 { self.send.settle(wr_id) } else { self.recv.settle(wr_id) }
    }
}

/// All queue pairs of a completion queue, by number.
#[derive(Debug)]
pub(super) struct Routes<T> {
    /// A hash table with open addressing, at most half full and of a power of two; kernels number
    /// queue pairs one after the other, so that the number itself is as good as a hash.
    table: Masked<Known<T>>,
}

impl<T> Routes<T> {
    pub(super) fn new() -> Self {
        Routes { table: Masked::of(1, |_| Known::nobody()) }
    }

    #[inline(always)]
    pub(super) fn find(&self, qpn: Qpn) -> Option<&Known<T>> {
        let mut at = qpn.0;
        loop {
            let known = self.table.at(at);
            if known.qpn == qpn {
                return Some(known);
            }
            if known.qpn == NOBODY {
                return None;
            }
            at = at.wrapping_add(1);
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
        let stay = self.all().filter(|old| !without.contains(&old.qpn)).cloned();
        let all: Vec<Arc<Route<T>>> = stay.chain(with).collect();
        // At least one place stays free, where a search ends.
        let mut table: Vec<Option<Arc<Route<T>>>> = vec![None; (2 * all.len()).next_power_of_two()];
        let mask = table.len() - 1;
        for route in all {
            let mut at = route.qpn.0 as usize & mask;
            while table.get(at).is_some_and(Option::is_some) {
                at = (at + 1) & mask;
            }
            if let Some(place) = table.get_mut(at) {
                *place = Some(route);
            }
        }
        let count = table.len() as u32;
        let mut routes =
            table.into_iter().map(|route| route.map_or_else(Known::nobody, Known::new));
        self.table = Masked::of(count, |_| routes.next().unwrap_or_else(Known::nobody));
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Route<T>>> {
        let known = (0..self.table.len()).map(|at| self.table.at(at));
        known.filter_map(|known| known.route.as_ref())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Route<T>> {
        self.all().map(|route| &**route)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

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
        assert_eq!((routes.dead(), routes.iter().count()), (vec![Qpn(5)], 2), "it still counts");
        routes.forget(&[Qpn(5)]);
        assert!(routes.find(Qpn(5)).is_none() && routes.find(Qpn(6)).is_some());
        routes.add(old.clone());
        let new = route(5);
        routes.add(new.clone());
        assert_eq!(routes.iter().count(), 2);
        assert!(Arc::ptr_eq(routes.find(Qpn(5)).unwrap().route.as_ref().unwrap(), &new));
        assert_eq!(Arc::strong_count(&old), 1);
    }
}
