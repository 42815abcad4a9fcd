//! The link of a port: the packets that it has sent and that have not arrived.
//!
//! Pairs with [`crate::fabric`], which delivers them. Packets of one queue pair arrive in order; those of different
//! ones in any order. A test can hold a request's packets back: then the later requests of its queue pair wait behind
//! them, and its responses to the peer do not. After a timeout the queue pair sends them again, and these overtake
//! those that are held back, as if the network had found another way: a late message alone uses up no connection's
//! retries.
//!
//! The payload of a long packet stays in place, in memory of the sender, until the packet arrives, so that it is copied
//! once: from memory to memory. [`Link::copy_payloads`] copies it into the packet before the memory may change or be
//! somebody else's:
//!
//! - before the CQE of its request, with success or an error: the program then has its memory back
//!   (`Device::complete_request`);
//! - before a key changes or is invalidated, by a WQE, by the peer or by a command (`Device::settle_payloads`), and before
//!   memory is mapped or unmapped;
//! - before [`Fabric::run`](crate::fabric::Fabric::run) returns: the program comes next.
//!
//! Such packets from the middle of a message are one flight: a unit. One that cannot be taken whole, is captured or
//! goes over a network is taken apart when it leaves the link (`Fabric::deliver`).
//!
//! A packet that is held back gets its payload at once, and so does a response of
//! [`Fabric::run_ready`](crate::fabric::Fabric::run_ready): the program has that memory meanwhile. That of a request is
//! the device's until it completes.

use std::collections::VecDeque;

use uverbs_roce::headers::{Bth, Packet};

use crate::fault::{Delay, MAX_DELAY};
use crate::guest::GuestMemory;
use crate::path::Path;

/// Bytes of buffers that are kept for packets to come: four times as many as a queue pair sends without an
/// acknowledgement.
const SPARE: usize = 2 << 20;

/// The most packets that a link holds back. The datagrams of a late queue pair complete meanwhile, so that a guest
/// could send any number of them.
const MOST_HELD: usize = 1024;

/// The shortest payload that stays in place; shorter ones are copied sooner than found.
pub(crate) const SHORTEST: usize = 512;

/// A payload in memory of the sender: in one or two ranges, each with its address and its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InPlace {
    pub(crate) ranges: [(u64, usize); 2],
}

impl InPlace {
    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.ranges[0].1 + self.ranges[1].1
    }

    /// Appends it to a packet.
    pub(crate) fn append(self, memory: &GuestMemory, packet: &mut Vec<u8>) {
        for (address, len) in self.ranges {
            let at = packet.len();
            packet.reserve_exact(len);
            packet.resize(at + len, 0);
            // It was readable when it was found, and `Device::settle_payloads` or `Device::memory_mut` comes before any
            // change.
            let read = memory.read(address, &mut packet[at..]);
            debug_assert!(read.is_ok(), "a payload in place at {address:#x} is gone");
        }
    }

    /// The first `at` bytes, and the others.
    pub(crate) fn split_at(self, at: usize) -> (InPlace, InPlace) {
        let [(one, first), (two, second)] = self.ranges;
        let (left, right) = (at.min(first), at.saturating_sub(first).min(second));
        let ranges = [(one, left), (two, right)];
        let rest = [(one + left as u64, first - left), (two + right as u64, second - right)];
        (InPlace { ranges }, InPlace { ranges: rest })
    }
}

/// The payload of a packet that is put together, if it stays in place.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Departing {
    /// Where it is, and of how many packets it is.
    pub(crate) in_place: Option<(InPlace, u32)>,
    /// The request whose memory it is; `None` for the responder's.
    pub(crate) request: Option<u64>,
}

/// A packet on its way, or a [unit](uverbs_roce::headers::Packet::packets) of them.
#[derive(Clone)]
pub(crate) struct Flight {
    /// The queue pair that sent it.
    pub(crate) queue: u32,
    pub(crate) path: Path,
    /// From BTH to padding, but for a payload that stays in place.
    pub(crate) packet: Vec<u8>,
    /// 1, or the number of packets of the unit.
    pub(crate) packets: u32,
    pub(crate) in_place: Option<InPlace>,
    /// The request of its queue pair whose memory that is; `None` for the responder's.
    pub(crate) request: Option<u64>,
    /// Octets of all its packets with their frames, which *PortXmitData* counts in fours.
    pub(crate) octets: usize,
    /// The bits of ECN that the network gives it; 0 for none.
    pub(crate) ecn: u8,
}

impl Flight {
    /// Bytes of its memory.
    fn bytes(&self) -> usize {
        size_of::<Flight>() + self.packet.capacity()
    }

    /// Leaves its payload in place: that of so many packets.
    pub(crate) fn leave_in_place(&mut self, in_place: InPlace, packets: u32) {
        (self.in_place, self.packets) = (Some(in_place), packets);
        self.octets = self.octets * packets as usize + in_place.len();
    }

    /// Copies a payload that stays in place into the packet.
    pub(crate) fn copy_payload(&mut self, memory: &GuestMemory) {
        if let Some(in_place) = self.in_place.take() {
            in_place.append(memory, &mut self.packet);
        }
    }
}

/// A packet that is held back.
struct Held {
    flight: Box<Flight>,
    /// When it goes on, if it is the first one of its queue pair.
    due: u64,
    /// The number of other messages that it still waits for, at most until it is due.
    passes: Option<u32>,
    /// 0, or the number of the timeout after which its queue pair sent it again: later packets do not wait behind it.
    overtaken: u64,
}

/// The packets that a port has sent.
#[derive(Default)]
pub(crate) struct Link {
    flights: VecDeque<Box<Flight>>,
    /// How many of them have a payload in place.
    in_place: usize,
    held: VecDeque<Held>,
    /// Timeouts of queue pairs with packets that were held back.
    timeouts: u64,
    /// Packets that have arrived, whose memory is for those to come. They move by their address.
    #[allow(clippy::vec_box, reason = "the boxes are used again")]
    spare: Vec<Box<Flight>>,
    /// Their bytes.
    spare_bytes: usize,
}

impl Link {
    /// A packet with these bytes. Its memory is that of one that has arrived.
    pub(crate) fn flight(&mut self, queue: u32, path: Path, bytes: &[u8]) -> Box<Flight> {
        let octets = bytes.len() + path.framing();
        let Some(mut flight) = self.spare.pop() else {
            return Box::new(Flight {
                queue,
                path,
                packet: bytes.to_vec(),
                packets: 1,
                in_place: None,
                request: None,
                octets,
                ecn: 0,
            });
        };
        self.spare_bytes -= flight.bytes();
        flight.packet.clear();
        flight.packet.extend_from_slice(bytes);
        (flight.queue, flight.path, flight.octets, flight.packets) = (queue, path, octets, 1);
        (flight.in_place, flight.request, flight.ecn) = (None, None, 0);
        flight
    }

    /// The packet at this place of a unit.
    pub(crate) fn packet_of(&mut self, unit: &Flight, at: u32) -> Option<Box<Flight>> {
        let payload = Packet::parse(&unit.packet).ok()?.payload;
        let (headers, _) = unit.packet.split_at(unit.packet.len() - payload.len());
        let mut flight = self.flight(unit.queue, unit.path, headers);
        Bth::skip(&mut flight.packet, at);
        flight.request = unit.request;
        flight.in_place = unit.in_place.map(|in_place| {
            let len = in_place.len() / unit.packets as usize;
            in_place.split_at(len * at as usize).1.split_at(len).0
        });
        let len = payload.len() / unit.packets as usize;
        flight.packet.extend_from_slice(&payload[len * at as usize..][..len]);
        flight.octets = unit.octets / unit.packets as usize;
        Some(flight)
    }

    /// Sends a packet.
    pub(crate) fn send(&mut self, flight: Box<Flight>) {
        self.in_place += usize::from(flight.in_place.is_some());
        self.flights.push_back(flight);
    }

    /// Whether packets are held back.
    pub(crate) fn holds_any(&self) -> bool {
        !self.held.is_empty()
    }

    /// Whether a request of a queue pair is held back, and was not sent again.
    pub(crate) fn holds(&self, queue: u32) -> bool {
        self.holds_any() && self.held.iter().any(|held| held.line() == (queue, 0))
    }

    /// Lets the packets to come of a queue pair, which sends again after a timeout, overtake those that are held back.
    pub(crate) fn overtake(&mut self, queue: u32) {
        self.timeouts += 1;
        for held in self.held.iter_mut().filter(|held| held.line() == (queue, 0)) {
            held.overtaken = self.timeouts;
        }
    }

    /// Holds a packet back: until the end of `delay`, and until those before it go on. It is lost if the link holds
    /// [`MOST_HELD`] back.
    pub(crate) fn hold(&mut self, now: u64, flight: Box<Flight>, delay: Option<Delay>) {
        let (due, passes) = match delay {
            None => (now, None),
            Some(Delay::Time(wait)) => (now.saturating_add(wait), None),
            Some(Delay::Messages(passes)) => (now.saturating_add(MAX_DELAY), Some(passes)),
        };
        if self.held.len() < MOST_HELD {
            self.held.push_back(Held { flight, due, passes, overtaken: 0 });
        }
    }

    /// Counts a message of a queue pair that was sent: it passes those of other queue pairs that are held back.
    pub(crate) fn pass(&mut self, queue: u32) {
        for held in self.held.iter_mut().filter(|held| held.flight.queue != queue) {
            held.passes = held.passes.map(|passes| passes.saturating_sub(1));
        }
    }

    /// The first packet of each line that is held back.
    fn first_held(&self) -> impl Iterator<Item = &Held> {
        self.held.iter().enumerate().filter_map(|(at, held)| {
            let first = !self.held.range(..at).any(|before| before.line() == held.line());
            first.then_some(held)
        })
    }

    /// Lets the packets go on that are due.
    pub(crate) fn release(&mut self, now: u64) {
        if !self.first_held().any(|held| held.is_due(now)) {
            return;
        }
        let mut waiting = Vec::new();
        for held in std::mem::take(&mut self.held) {
            let line = held.line();
            if waiting.contains(&line) || !held.is_due(now) {
                waiting.push(line);
                self.held.push_back(held);
            } else {
                self.flights.push_back(held.flight);
            }
        }
    }

    /// Copies payloads that stay in place into their packets: those of a request, named by its queue pair and its
    /// number, or all.
    pub(crate) fn copy_payloads(&mut self, memory: &GuestMemory, of: Option<(u32, u64)>) {
        if self.in_place == 0 {
            return;
        }
        for flight in self.flights.iter_mut().filter(|flight| flight.in_place.is_some()) {
            if of.is_none_or(|(queue, id)| flight.queue == queue && flight.request == Some(id)) {
                flight.copy_payload(memory);
                self.in_place -= 1;
            }
        }
    }

    /// Loses the packets of a queue pair that are held back: the next one with its number is another one.
    pub(crate) fn lose_held(&mut self, queue: u32) {
        self.held.retain(|held| held.flight.queue != queue);
    }

    /// When the next packet goes on that is held back.
    pub(crate) fn deadline(&self) -> Option<u64> {
        self.first_held().map(|held| if held.passes == Some(0) { 0 } else { held.due }).min()
    }

    /// The number of packets that may arrive now.
    pub(crate) fn len(&self) -> usize {
        self.flights.len()
    }

    /// The queue pair that sent the packet with `before` others in front.
    pub(crate) fn queue(&self, before: usize) -> Option<u32> {
        self.flights.get(before).map(|flight| flight.queue)
    }

    /// Takes the first packet.
    pub(crate) fn take(&mut self) -> Option<Box<Flight>> {
        let flight = self.flights.pop_front();
        self.note_taken(flight.as_deref());
        flight
    }

    /// Takes the first packet of a queue pair.
    pub(crate) fn take_of(&mut self, queue: u32) -> Option<Box<Flight>> {
        let flight = match self.flights.front()?.queue == queue {
            true => self.flights.pop_front(),
            false => {
                let at = self.flights.iter().position(|flight| flight.queue == queue)?;
                self.flights.remove(at)
            }
        };
        self.note_taken(flight.as_deref());
        flight
    }

    fn note_taken(&mut self, flight: Option<&Flight>) {
        self.in_place -= usize::from(flight.is_some_and(|flight| flight.in_place.is_some()));
    }

    /// Takes back the memory of a packet that has arrived.
    pub(crate) fn recycle(&mut self, flight: Box<Flight>) {
        if self.spare_bytes + flight.bytes() <= SPARE {
            self.spare_bytes += flight.bytes();
            self.spare.push(flight);
        }
    }
}

impl Held {
    /// The line that it waits in: packets of a queue pair between two timeouts go on in order.
    fn line(&self) -> (u32, u64) {
        (self.flight.queue, self.overtaken)
    }

    fn is_due(&self, now: u64) -> bool {
        self.due <= now || self.passes == Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::{Destination, Source};

    /// Sends a packet of one byte, its name.
    fn send(link: &mut Link, now: u64, queue: u32, name: u8, delay: Option<Delay>) {
        let path = Path {
            destination: Destination::Lid(1),
            source_index: 0,
            source_qpn: queue,
            sl: 0,
            source_port: 0xc000,
            priority: 0,
            route: None,
            source: Source::default(),
        };
        let flight = link.flight(queue, path, &[name]);
        match delay.is_some() || link.holds(queue) {
            true => link.hold(now, flight, delay),
            false => link.send(flight),
        }
    }

    fn arrive(link: &mut Link, now: u64) -> Vec<u8> {
        link.release(now);
        std::iter::from_fn(|| link.take()).map(|flight| flight.packet[0]).collect()
    }

    #[test]
    fn later_requests_of_a_queue_pair_wait_behind_a_late_one() {
        let mut link = Link::default();
        send(&mut link, 0, 1, b'a', Some(Delay::Time(100)));
        send(&mut link, 10, 1, b'b', None);
        send(&mut link, 10, 2, b'c', None);
        send(&mut link, 10, 1, b'd', Some(Delay::Time(200)));
        assert_eq!(arrive(&mut link, 50), b"c");
        assert_eq!(link.deadline(), Some(100));
        assert_eq!(arrive(&mut link, 100), b"ab");
        assert_eq!(link.deadline(), Some(210));
        assert_eq!(arrive(&mut link, 210), b"d");
        assert_eq!(link.deadline(), None);
    }

    #[test]
    fn packets_that_are_sent_again_overtake_late_ones() {
        let mut link = Link::default();
        send(&mut link, 0, 1, b'a', Some(Delay::Time(100)));
        send(&mut link, 0, 1, b'b', None);
        link.overtake(1);
        send(&mut link, 20, 1, b'a', Some(Delay::Time(50)));
        send(&mut link, 20, 1, b'b', None);
        link.overtake(2);
        assert_eq!(arrive(&mut link, 20), b"");
        link.overtake(1);
        send(&mut link, 40, 1, b'A', None);
        assert_eq!(arrive(&mut link, 40), b"A");
        assert_eq!(link.deadline(), Some(70));
        assert_eq!(arrive(&mut link, 70), b"ab");
        assert_eq!(arrive(&mut link, 100), b"ab");
    }

    #[test]
    fn packets_that_are_held_back_end_with_their_queue_pair() {
        let mut link = Link::default();
        send(&mut link, 0, 1, b'a', Some(Delay::Time(100)));
        send(&mut link, 0, 2, b'b', Some(Delay::Time(100)));
        link.lose_held(1);
        assert!(!link.holds(1));
        assert_eq!(arrive(&mut link, 100), b"b");
    }

    #[test]
    fn a_message_waits_for_others_at_most_max_delay() {
        let mut link = Link::default();
        send(&mut link, 0, 1, b'a', Some(Delay::Messages(2)));
        link.pass(1);
        link.pass(2);
        assert_eq!(arrive(&mut link, 0), b"");
        assert_eq!(link.deadline(), Some(MAX_DELAY));
        link.pass(3);
        assert_eq!(arrive(&mut link, 0), b"a");
        send(&mut link, 1, 1, b'b', Some(Delay::Messages(2)));
        assert_eq!(arrive(&mut link, 1 + MAX_DELAY), b"b");
    }

    #[test]
    fn a_payload_in_place_is_split_across_its_ranges() {
        let in_place = InPlace { ranges: [(100, 10), (500, 6)] };
        assert_eq!(in_place.split_at(16).1.len(), 0);
        let (head, rest) = in_place.split_at(12);
        assert_eq!(head.ranges, [(100, 10), (500, 2)]);
        assert_eq!((rest.len(), rest.ranges[1]), (4, (502, 4)));
        let (head, rest) = in_place.split_at(4);
        assert_eq!((head.len(), rest.ranges), (4, [(104, 6), (500, 6)]));
    }

    #[test]
    fn the_payloads_of_a_request_are_copied_and_others_stay_in_place() {
        let memory = GuestMemory::plain(0, 4096).unwrap();
        memory.write(8, b"0123").unwrap();
        let mut link = Link::default();
        for (queue, request) in [(1, Some(5)), (2, Some(5)), (1, Some(6)), (1, None)] {
            let mut other = Link::default();
            send(&mut other, 0, queue, b'a', None);
            let flight = other.take().unwrap();
            let in_place = Some(InPlace { ranges: [(8, 3), (11, 1)] });
            link.send(Box::new(Flight { in_place, request, ..*flight }));
        }
        let lens =
            |link: &Link| link.flights.iter().map(|sent| sent.packet.len()).collect::<Vec<_>>();
        for _ in 0..2 {
            link.copy_payloads(&memory, Some((1, 5)));
            assert_eq!((lens(&link), link.in_place), (vec![5, 1, 1, 1], 3));
        }
        assert_eq!(link.flights[0].packet, b"a0123");
        link.take_of(2).unwrap();
        link.copy_payloads(&memory, None);
        assert_eq!((lens(&link), link.in_place), (vec![5; 3], 0));
    }

    #[test]
    fn a_link_holds_a_bounded_number_of_packets_back() {
        let mut link = Link::default();
        send(&mut link, 0, 1, b'a', Some(Delay::Time(100)));
        (0..2 * MOST_HELD).for_each(|_| send(&mut link, 0, 1, b'b', None));
        assert_eq!(arrive(&mut link, 100).len(), MOST_HELD);
    }

    #[test]
    fn packets_of_one_queue_pair_keep_their_order_whichever_is_chosen() {
        let mut link = Link::default();
        for (queue, name) in [(1, b'a'), (1, b'b'), (2, b'c'), (1, b'd')] {
            send(&mut link, 0, queue, name, None);
        }
        assert_eq!((link.queue(2), link.queue(3), link.queue(4)), (Some(2), Some(1), None));
        let of = |link: &mut Link, queue| link.take_of(queue).map(|flight| flight.packet[0]);
        assert_eq!((of(&mut link, 2), of(&mut link, 2)), (Some(b'c'), None));
        assert_eq!((of(&mut link, 1), of(&mut link, 1)), (Some(b'a'), Some(b'b')));
        assert_eq!(link.len(), 1);
    }
}
