//! The bus: data of packets that has left the device and is not in memory yet.
//!
//! Usually a write is in memory at once. A test can have the bus [take its time](Bus::be_slow), so that memory is
//! written in any order that a device may write in:
//!
//! - the bytes of a message in any order: the specification warns programs not to depend on one;
//! - messages of one queue pair in order, unless the mkey has *relaxed ordering*: then a write overtakes those before
//!   it, but none to the same bytes: `IBV_ACCESS_RELAXED_ORDERING` permits that;
//! - data of two queue pairs in any order.
//!
//! [`Device::settle`](crate::device::Device::settle) has everything of a queue pair in memory before it is promised:
//! before a CQE of it (`write_cqe_with_data`), before a request of it completes without one (`complete_request`),
//! before it is in error (`move_qp_to_error`), before an ACK or a response of it leaves (`send_packet`), before the
//! peer reads or executes an atomic by it; and everything of all before a key changes, before a command, and at the end
//! of [`Fabric::run`](crate::fabric::Fabric::run).
//! In [`Fabric::run_ready`](crate::fabric::Fabric::run_ready) the caller chooses which write ends next.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// The most pieces that a packet's payload has, each a number of words of eight bytes.
const PIECES: usize = 8;
const WORD: usize = 8;

/// The most pieces of a queue pair that wait: the next packet has them all end.
const MOST_PIECES: usize = 1024;

/// A write on the bus.
pub(crate) struct BusWrite {
    qpn: u32,
    /// The number of its message: later ones of a queue pair have higher ones.
    message: u64,
    /// Whether it may overtake others.
    relaxed: bool,
    pub(crate) address: u64,
    pub(crate) bytes: Vec<u8>,
}

impl BusWrite {
    /// Whether a later write of its queue pair, of another message, writes the same bytes.
    fn is_below(&self, later: &BusWrite) -> bool {
        let end = |write: &BusWrite| write.address.saturating_add(write.bytes.len() as u64);
        self.qpn == later.qpn
            && self.message != later.message
            && self.address < end(later)
            && later.address < end(self)
    }
}

/// Writes that are not in memory yet, in order of arrival.
#[derive(Default)]
pub(crate) struct Bus {
    slow: bool,
    writes: RefCell<Vec<BusWrite>>,
    /// The message of the packet that arrives now.
    message: Cell<u64>,
    /// The number of the last message.
    last: Cell<u64>,
}

impl Bus {
    /// Lets writes wait from now on.
    pub(crate) fn be_slow(&mut self) {
        self.slow = true;
    }

    /// The same bus without a write on it.
    pub(crate) fn emptied(&self) -> Bus {
        Bus { slow: self.slow, ..Bus::default() }
    }

    pub(crate) fn is_slow(&self) -> bool {
        self.slow
    }

    /// A packet of a queue pair arrives, which begins a message or not.
    pub(crate) fn begin(&self, qpn: u32, begins: bool) {
        let writes = self.writes.borrow();
        let current = writes.iter().rfind(|write| write.qpn == qpn).map(|write| write.message);
        self.message.set(current.filter(|_| !begins).unwrap_or_else(|| {
            self.last.set(self.last.get() + 1);
            self.last.get()
        }));
    }

    /// Posts a write of the packet that arrives, in pieces.
    pub(crate) fn post(&self, qpn: u32, relaxed: bool, address: u64, mut bytes: &[u8]) {
        let message = self.message.get();
        let piece = bytes.len().div_ceil(PIECES).next_multiple_of(WORD);
        let mut address = address;
        while !bytes.is_empty() {
            // Pieces end where words end.
            let len = (piece - address as usize % WORD).min(bytes.len());
            let (head, rest) = bytes.split_at(len);
            let write = BusWrite { qpn, message, relaxed, address, bytes: head.to_vec() };
            self.writes.borrow_mut().push(write);
            (address, bytes) = (address + len as u64, rest);
        }
    }

    /// Whether a queue pair has as many pieces here as may wait.
    pub(crate) fn is_full(&self, qpn: u32) -> bool {
        self.writes.borrow().iter().filter(|write| write.qpn == qpn).count() >= MOST_PIECES
    }

    /// The places in the list of the writes that may end next.
    fn next(writes: &[BusWrite]) -> impl Iterator<Item = usize> {
        let mut first = BTreeMap::new();
        writes.iter().enumerate().filter_map(move |(at, write)| {
            let message = *first.entry(write.qpn).or_insert(write.message);
            let overtakes = || !writes[..at].iter().any(|earlier| earlier.is_below(write));
            (write.message == message || write.relaxed && overtakes()).then_some(at)
        })
    }

    /// The number of writes that may end next.
    pub(crate) fn len(&self) -> usize {
        if self.slow { self.count() } else { 0 }
    }

    #[inline(never)]
    fn count(&self) -> usize {
        Bus::next(&self.writes.borrow()).count()
    }

    /// Takes the one with `before` others in front.
    pub(crate) fn take(&self, before: usize) -> Option<BusWrite> {
        let mut writes = self.writes.borrow_mut();
        let at = Bus::next(&writes).nth(before)?;
        Some(writes.remove(at))
    }

    /// Takes all of a queue pair, or of all: messages in order, and the last piece of each first.
    pub(crate) fn take_all(&self, qpn: Option<u32>) -> Vec<BusWrite> {
        let of = |write: &BusWrite| qpn.is_none_or(|qpn| write.qpn == qpn);
        let mut writes = self.writes.borrow_mut();
        let (mut taken, left) = std::mem::take(&mut *writes).into_iter().rev().partition(of);
        *writes = left;
        writes.reverse();
        taken.sort_by_key(|write: &BusWrite| write.message);
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bus() -> Bus {
        let mut bus = Bus::default();
        bus.be_slow();
        bus
    }

    fn post(bus: &Bus, qpn: u32, begins: bool, relaxed: bool, address: u64, len: usize) {
        bus.begin(qpn, begins);
        bus.post(qpn, relaxed, address, &vec![1; len]);
    }

    fn addresses(writes: &[BusWrite]) -> Vec<u64> {
        writes.iter().map(|write| write.address).collect()
    }

    #[test]
    fn pieces_end_where_words_end_and_are_few() {
        let bus = bus();
        post(&bus, 1, true, false, 4, 20);
        let lens = |bus: &Bus| {
            let writes = bus.writes.borrow();
            writes.iter().map(|write| (write.address, write.bytes.len())).collect::<Vec<_>>()
        };
        assert_eq!(lens(&bus), [(4, 4), (8, 8), (16, 8)]);
        bus.take_all(None);
        post(&bus, 1, true, false, 0, 1024);
        assert_eq!(lens(&bus), (0..8).map(|at| (at * 128, 128)).collect::<Vec<_>>());
        bus.take_all(None);
        post(&bus, 1, true, false, 0, 0);
        assert_eq!(bus.len(), 0);
    }

    #[test]
    fn bytes_of_a_message_have_no_order_and_messages_have_one() {
        let bus = bus();
        post(&bus, 1, true, false, 0, 8);
        post(&bus, 1, false, false, 100, 4);
        post(&bus, 1, true, false, 200, 8);
        assert_eq!(bus.len(), 2);
        assert_eq!(bus.take(1).map(|write| write.address), Some(100));
        assert!(bus.take(1).is_none());
        assert_eq!(bus.take(0).map(|write| write.address), Some(0));
        assert_eq!(bus.take(0).map(|write| write.address), Some(200));
    }

    #[test]
    fn queue_pairs_and_relaxed_keys_have_no_order() {
        let bus = bus();
        post(&bus, 1, true, false, 0, 8);
        post(&bus, 2, true, false, 8, 8);
        post(&bus, 1, true, true, 16, 8);
        post(&bus, 1, true, false, 24, 8);
        assert_eq!(bus.len(), 3);
        assert_eq!(bus.take(2).map(|write| write.address), Some(16));
        assert_eq!(bus.len(), 2);
        // A middle packet of queue pair 2 is of its message, and the next one is not.
        post(&bus, 2, false, false, 32, 8);
        post(&bus, 2, true, false, 40, 8);
        assert_eq!(bus.len(), 3);
    }

    /// A receive that a given-up message of UC began is used again: the next message is what stays there.
    #[test]
    fn a_relaxed_write_overtakes_none_to_the_same_bytes() {
        let bus = bus();
        post(&bus, 1, true, true, 0, 8);
        post(&bus, 1, true, true, 4, 8);
        post(&bus, 1, true, true, 12, 4);
        assert_eq!(bus.len(), 3 - 1 + 1);
        assert_eq!(bus.take(1).map(|write| write.address), Some(8));
    }

    #[test]
    fn a_queue_pair_has_a_bounded_number_of_pieces() {
        let bus = bus();
        for _ in 0..MOST_PIECES {
            assert!(!bus.is_full(1));
            post(&bus, 1, true, false, 0, 8);
        }
        assert!(bus.is_full(1) && !bus.is_full(2));
    }

    #[test]
    fn what_settles_is_that_of_its_queue_pair_messages_in_order() {
        let bus = bus();
        post(&bus, 1, true, false, 0, 16);
        post(&bus, 2, true, false, 50, 6);
        post(&bus, 1, true, false, 100, 4);
        assert_eq!(addresses(&bus.take_all(Some(1))), [8, 0, 100]);
        assert_eq!(addresses(&bus.take_all(None)), [50]);
        assert!(bus.take_all(None).is_empty());
    }
}
