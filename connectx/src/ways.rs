//! The ways of packets between functions, where they are not ideal: queues, delays, faults.
//!
//! Pairs with [`crate::network`], which describes a way, and with [`crate::fabric`], whose packets go this way after
//! they have left the [`crate::link`] of their port and before they arrive. A way is from one function to another; a
//! function's packets to itself do not leave it. Bandwidth and queues are those of ports: the ways from one function
//! share a queue, and so do those to one.

use std::collections::{BTreeMap, VecDeque};

use uverbs_roce::frame::{Route, decapsulate, encapsulate};

use crate::decisions::Decisions;
use crate::link::Flight;
use crate::network::{Change, FRAMING, Network, PacketFault, Traffic};
use crate::recording::PacketFate;

/// The byte of the BTH with FECN and BECN, and FECN.
const CONGESTION: (usize, u8) = (4, 0x80);

/// The queue of a port of the switch, in one direction.
#[derive(Default)]
struct Queue {
    /// The packets that wait or are being sent: when each has left, and its bytes.
    packets: VecDeque<(u64, u64)>,
    /// The sum of these bytes.
    waiting: u64,
    /// When the last one has left.
    idle_from: u64,
}

impl Queue {
    /// Queues a packet whose last byte is there now and whose first one came at `begin`. Returns when it has left, and
    /// the bytes that waited before it; `None` if it is dropped.
    fn enqueue(
        &mut self,
        now: u64,
        begin: u64,
        bytes: u64,
        network: &Network,
    ) -> Option<(u64, u64)> {
        while let Some((_, sent)) = self.packets.front().copied().filter(|(left, _)| *left <= now) {
            self.packets.pop_front();
            self.waiting -= sent;
        }
        let before = self.waiting;
        let (most_bytes, most_packets) = network.queue;
        let full = self.packets.len() >= most_packets || before.saturating_add(bytes) > most_bytes;
        // An idle port takes each packet.
        if full && before > 0 {
            return None;
        }
        let left = self.idle_from.max(begin).saturating_add(network.sending(bytes));
        if left > now {
            self.packets.push_back((left, bytes));
            self.waiting += bytes;
        }
        self.idle_from = left;
        Some((left, before))
    }

    /// Queues a packet again that would have left at `due`, and leaves then at the latest. Returns when it does.
    fn enqueue_again(&mut self, now: u64, due: u64, bytes: u64, network: &Network) -> u64 {
        let left = self.idle_from.max(now).saturating_add(network.sending(bytes)).min(due);
        if left > now {
            self.packets.push_back((left, bytes));
            self.waiting += bytes;
        }
        self.idle_from = left;
        left
    }
}

/// The way from one function to another.
struct Way {
    network: Network,
    /// Whether nothing arrives.
    cut: bool,
    /// When the last packet arrives that others do not overtake.
    last_arrival: u64,
    /// The number of packets that have not arrived.
    under_way: usize,
    /// Faults by script.
    faults: Vec<PacketFault>,
    traffic: Traffic,
}

impl Way {
    fn new(network: Network) -> Way {
        Way {
            network,
            cut: false,
            last_arrival: 0,
            under_way: 0,
            faults: Vec::new(),
            traffic: Traffic::default(),
        }
    }

    /// When a packet arrives that leaves the last port.
    fn arrival(&mut self, left: u64, delay: u64, overtaken: bool) -> u64 {
        let due = left.saturating_add(delay);
        if overtaken {
            return due;
        }
        self.last_arrival = due.max(self.last_arrival);
        self.last_arrival
    }

    /// Marks a packet if many bytes wait before it.
    fn queue_mark(&mut self, flight: &mut Flight, before: u64) {
        let Some(threshold) = self.network.marks_above else { return };
        if flight.ecn == 0 {
            flight.ecn = ECT_0;
        }
        if before > threshold {
            self.mark(flight);
        }
    }

    fn mark(&mut self, flight: &mut Flight) {
        if flight.ecn != CE {
            self.traffic.marked += 1;
            flight.ecn = CE;
            let (at, fecn) = CONGESTION;
            flight.packet.get_mut(at).into_iter().for_each(|byte| *byte |= fecn);
        }
    }

    /// The change of a packet by script: of the scripts that are due, the first one.
    fn scripted(&mut self, packet: &[u8]) -> Option<Change> {
        let mut change = None;
        for fault in &mut self.faults {
            if fault.is_due(packet) && change.is_none() {
                change = Some(fault.happen());
            }
        }
        self.faults.retain(|fault| !fault.is_over());
        change
    }
}

/// When a packet has left the port of its sender, and the bytes that waited before it; `None` inside if it is dropped
/// there.
#[derive(Default)]
pub(crate) struct Departure(Option<Option<(u64, u64)>>);

/// A packet under way.
pub(crate) struct UnderWay {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) flight: Box<Flight>,
    /// The nanoseconds that it takes behind the queue of the receiver's port; `None` once it has passed that.
    rest: Option<u64>,
    /// Whether others may overtake it.
    overtaken: bool,
}

/// The ways between functions.
pub(crate) struct Ways {
    decisions: Decisions,
    /// The network of ways that have none of their own.
    usual: Network,
    ways: BTreeMap<(usize, usize), Way>,
    /// The queue of packets from each function, and that of packets to each one.
    from: BTreeMap<usize, Queue>,
    to: BTreeMap<usize, Queue>,
    /// By the time of arrival, at the receiver's port or at the receiver, and in order of sending.
    under_way: BTreeMap<(u64, u64), UnderWay>,
    /// The number of the last packet.
    last: u64,
    /// A frame that is damaged.
    frame: Vec<u8>,
}

impl Ways {
    /// Ways of this network, with faults by a seed.
    pub(crate) fn new(usual: Network, seed: u64) -> Ways {
        Ways {
            decisions: Decisions::new(seed),
            usual,
            ways: BTreeMap::new(),
            from: BTreeMap::new(),
            to: BTreeMap::new(),
            under_way: BTreeMap::new(),
            last: 0,
            frame: Vec::new(),
        }
    }

    /// Changes the seed.
    pub(crate) fn set_seed(&mut self, seed: u64) {
        self.decisions = Decisions::new(seed);
    }

    fn way(&mut self, from: usize, to: usize) -> &mut Way {
        let usual = &self.usual;
        self.ways.entry((from, to)).or_insert_with(|| Way::new(usual.clone()))
    }

    /// Changes all ways, as [`Ways::set`] changes one.
    pub(crate) fn set_all(&mut self, now: u64, network: Network) {
        self.ways.values_mut().for_each(|way| way.network = network.clone());
        self.usual = network;
        self.hurry(now, |_| true);
    }

    /// Changes one way. A packet that is under way arrives when it would have, or when it would if it had begun its way
    /// now, whichever is sooner: so those to come do not overtake it, and wait for it no longer than for each other.
    pub(crate) fn set(&mut self, now: u64, from: usize, to: usize, network: Network) {
        self.way(from, to).network = network;
        self.hurry(now, |way| way == (from, to));
    }

    /// Moves the packets under way whose ways have changed. What waits at the ports of their senders is queued again,
    /// also packets to others: they may have waited behind them. Each port of a receiver forgets what it still has to
    /// pass on, which arrives when it would have.
    fn hurry(&mut self, now: u64, changed: impl Fn((usize, usize)) -> bool) {
        let mut senders = BTreeMap::new();
        for (&(from, to), way) in self.ways.iter_mut().filter(|(way, _)| changed(**way)) {
            way.last_arrival = 0;
            self.from.remove(&from);
            self.to.remove(&to);
            senders.insert(from, None);
        }
        for ((due, number), mut packet) in std::mem::take(&mut self.under_way) {
            let ends = (packet.from, packet.to);
            let Some(way) = self.ways.get_mut(&ends) else { continue };
            let moves = changed(ends) && !packet.overtaken;
            let mut at = due;
            if let Some(delay) = &mut packet.rest {
                if moves {
                    *delay = way.network.latency.min(*delay);
                }
                if way.network.bandwidth.is_none() {
                    at = due.min(now);
                } else if let Some(last) = senders.get_mut(&packet.from) {
                    // Copies of a packet have left together.
                    at = match *last {
                        Some((before, left)) if before == due => left,
                        _ => {
                            let queue = self.from.entry(packet.from).or_default();
                            queue.enqueue_again(now, due, bytes(&packet.flight), &way.network)
                        }
                    };
                    *last = Some((due, at));
                }
            } else if moves {
                at = due.min(now.saturating_add(way.network.latency));
                way.last_arrival = way.last_arrival.max(at);
            }
            self.under_way.insert((at, number), packet);
        }
    }

    /// Lets a fault happen to packets to come.
    pub(crate) fn fault_packets(&mut self, from: usize, to: usize, fault: PacketFault) {
        self.way(from, to).faults.push(fault);
    }

    /// Lets nothing arrive any more, also of what is under way, or ends that.
    pub(crate) fn cut(&mut self, from: usize, to: usize, cut: bool) {
        self.way(from, to).cut = cut;
    }

    /// Whether nothing arrives.
    pub(crate) fn is_cut(&self, from: usize, to: usize) -> bool {
        self.ways.get(&(from, to)).is_some_and(|way| way.cut)
    }

    /// The packets that went this way.
    pub(crate) fn traffic(&self, from: usize, to: usize) -> Traffic {
        self.ways.get(&(from, to)).map_or_else(Traffic::default, |way| way.traffic)
    }

    /// The number of decisions so far.
    pub(crate) fn decisions(&self) -> u64 {
        self.decisions.drawn()
    }

    /// Sends a packet, whose payload is in it, on its way, and notes each change of it. The copies of a datagram to a
    /// group have one `departure`: the switch makes them behind the queue of their sender's port.
    pub(crate) fn send(
        &mut self,
        now: u64,
        (from, to): (usize, usize),
        departure: &mut Departure,
        mut flight: Box<Flight>,
        mut note: impl FnMut(&Flight, PacketFate),
    ) {
        let Ways { decisions, usual, ways, from: queues, under_way, last, frame, .. } = self;
        let way = ways.entry((from, to)).or_insert_with(|| Way::new(usual.clone()));
        let Network { latency, jitter, latest, bandwidth, .. } = way.network;
        way.traffic.sent += 1;
        let queued = match bandwidth {
            _ if way.under_way >= Network::MOST_PACKETS => None,
            None => Some((now, 0)),
            Some(_) => *departure.0.get_or_insert_with(|| {
                queues.entry(from).or_default().enqueue(now, now, bytes(&flight), &way.network)
            }),
        };
        let Some((left, before)) = queued else {
            way.traffic.dropped += 1;
            return note(&flight, PacketFate::Dropped);
        };
        way.queue_mark(&mut flight, before);
        let scripted = way.scripted(&flight.packet);
        if let Some(Change::Marked) = scripted {
            way.mark(&mut flight);
            note(&flight, PacketFate::Marked);
        }
        if matches!(scripted, Some(Change::Lost)) || decisions.happens(way.network.loss) {
            way.traffic.lost += 1;
            return note(&flight, PacketFate::Lost);
        }
        let doubled =
            matches!(scripted, Some(Change::Doubled)) || decisions.happens(way.network.duplication);
        if doubled {
            way.traffic.doubled += 1;
            note(&flight, PacketFate::Doubled);
        }
        for flight in doubled.then(|| flight.clone()).into_iter().chain([flight]) {
            let mut flight = flight;
            let script = matches!(scripted, Some(Change::Damaged)).then_some(PSN_BIT);
            let chance = || {
                let bits = (flight.packet.len() + ICRC) as u64 * 8;
                let happens = decisions.happens(way.network.corruption);
                happens.then(|| decisions.below(bits) as usize)
            };
            if let Some(bit) = script.or_else(chance) {
                way.traffic.damaged += 1;
                note(&flight, PacketFate::Damaged);
                if !damage(bit, frame, &mut flight.packet) {
                    continue;
                }
            }
            let shaken = if jitter > 0 { decisions.below(jitter + 1) } else { 0 };
            let late = match scripted {
                Some(Change::Late(time)) => Some(time),
                _ if decisions.happens(way.network.reordering) => Some(decisions.below(latest + 1)),
                _ => None,
            };
            if late.is_some() {
                way.traffic.late += 1;
                note(&flight, PacketFate::Late);
            }
            let (delay, overtaken) = (latency + shaken + late.unwrap_or(0), late.is_some());
            let (due, rest) = match bandwidth {
                None => (way.arrival(left, delay, overtaken), None),
                Some(_) => (left, Some(delay)),
            };
            (*last, way.under_way) = (*last + 1, way.under_way + 1);
            under_way.insert((due, *last), UnderWay { from, to, flight, rest, overtaken });
        }
    }

    /// Queues a packet at the port of its receiver; `delay` is the time from there to the receiver, in nanoseconds.
    /// Returns it if it is dropped.
    fn enter_port(
        &mut self,
        (now, number): (u64, u64),
        mut packet: UnderWay,
        delay: u64,
    ) -> Option<UnderWay> {
        let (from, to) = (packet.from, packet.to);
        let way = self.ways.entry((from, to)).or_insert_with(|| Way::new(self.usual.clone()));
        let mut left = now;
        // A network without bandwidth may have taken the place of one with it.
        if way.network.bandwidth.is_some() {
            let bytes = bytes(&packet.flight);
            // Its bytes go on as they come: the port adds no time of its own to one that does not wait.
            let begin = now.saturating_sub(way.network.sending(bytes));
            let queue = self.to.entry(to).or_default();
            let Some((end, before)) = queue.enqueue(now, begin, bytes, &way.network) else {
                way.traffic.dropped += 1;
                way.under_way -= 1;
                return Some(packet);
            };
            way.queue_mark(&mut packet.flight, before);
            left = end;
        }
        let due = way.arrival(left, delay, packet.overtaken);
        self.under_way.insert((due, number), packet);
        None
    }

    /// When the next packet arrives.
    pub(crate) fn deadline(&self) -> Option<u64> {
        self.under_way.first_key_value().map(|((due, _), _)| *due)
    }

    /// Takes a packet that arrives by now, and notes each one that does not, because its way is cut off or the queue of
    /// its receiver's port is full.
    pub(crate) fn arrive(
        &mut self,
        now: u64,
        mut note: impl FnMut(usize, &Flight, PacketFate),
    ) -> Option<UnderWay> {
        while self.deadline().is_some_and(|due| due <= now) {
            let (at, mut arrived) = self.under_way.pop_first()?;
            // A packet of a way that is cut off takes no room at its receiver's port either.
            let cut = self.is_cut(arrived.from, arrived.to);
            if let Some(rest) = arrived.rest.take().filter(|_| !cut) {
                if let Some(dropped) = self.enter_port(at, arrived, rest) {
                    note(dropped.from, &dropped.flight, PacketFate::Dropped);
                }
                continue;
            }
            let way = self.way(arrived.from, arrived.to);
            way.under_way -= 1;
            if !cut {
                way.traffic.arrived += 1;
                return Some(arrived);
            }
            way.traffic.lost += 1;
            note(arrived.from, &arrived.flight, PacketFate::Lost);
        }
        None
    }
}

/// Bytes of a packet with its frame.
fn bytes(flight: &Flight) -> u64 {
    flight.packet.len() as u64 + FRAMING
}

/// The bits of IP for a packet that can be marked, and for one that is.
const ECT_0: u8 = 0b10;
const CE: u8 = 0b11;

/// Bytes of the ICRC.
const ICRC: usize = 4;
/// A bit of a packet's PSN.
const PSN_BIT: usize = 11 * 8;

/// Changes one bit of a packet or its ICRC. Returns whether the packet's receiver does not notice.
fn damage(bit: usize, frame: &mut Vec<u8>, packet: &mut Vec<u8>) -> bool {
    /// Bytes in front of the packet: Ethernet, IPv4, UDP.
    const FRONT: usize = 14 + 20 + 8;
    // Addresses do not matter: the ICRC has its say about each bit behind them.
    let address = std::net::Ipv4Addr::LOCALHOST.into();
    let route = Route {
        source_mac: [0; 6],
        destination_mac: [0; 6],
        vlan: None,
        source: address,
        destination: address,
        source_port: 0xc000,
        traffic_class: 0,
        hop_limit: 64,
    };
    if !encapsulate(&route, packet, frame) {
        return false;
    }
    frame[FRONT + bit / 8] ^= 1 << (bit % 8);
    let Ok((_, damaged)) = decapsulate(frame) else { return false };
    packet.clear();
    packet.extend_from_slice(damaged);
    true
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::link::Link;
    use crate::path::{Destination, Path, Source};

    /// A packet with its number in the last byte.
    fn flight(number: usize, len: usize) -> Box<Flight> {
        let path = Path {
            destination: Destination::Lid(1),
            source_index: 0,
            source_qpn: 1,
            sl: 0,
            source_port: 0xc000,
            priority: 0,
            route: None,
            source: Source::default(),
        };
        let mut bytes = vec![0; len];
        bytes[len - 1] = number as u8;
        Link::default().flight(1, path, &bytes)
    }

    /// Bytes of a packet that has 1000 with its frame.
    const LEN: usize = 1000 - FRAMING as usize;

    fn send(ways: &mut Ways, now: u64, packets: usize) {
        send_on(ways, now, (0, 1), packets);
    }

    fn send_on(ways: &mut Ways, now: u64, way: (usize, usize), packets: usize) {
        (0..packets).for_each(|number| {
            ways.send(now, way, &mut Departure::default(), flight(number, LEN), |_, _| {})
        });
    }

    /// The packets that arrive, with their times.
    fn arrivals(ways: &mut Ways) -> Vec<(u64, Box<Flight>)> {
        let mut arrived = Vec::new();
        while let Some(now) = ways.deadline() {
            assert!(now == 0 || ways.arrive(now - 1, |_, _, _| {}).is_none());
            arrived.extend(ways.arrive(now, |_, _, _| {}).map(|packet| (now, packet.flight)));
        }
        arrived
    }

    fn numbers(arrived: &[(u64, Box<Flight>)]) -> Vec<u8> {
        arrived.iter().map(|(_, flight)| flight.packet[LEN - 1]).collect()
    }

    #[test]
    fn packets_are_spaced_by_their_length_and_take_the_latency() {
        let network = Network::ideal().bandwidth(8_000_000_000).latency(Duration::from_micros(5));
        let mut ways = Ways::new(network, 1);
        send(&mut ways, 100, 3);
        let times: Vec<_> = arrivals(&mut ways).iter().map(|(at, _)| *at).collect();
        assert_eq!(times, [6100, 7100, 8100]);
        // The queue was idle meanwhile, and nothing is saved up.
        send(&mut ways, 20_000, 1);
        assert_eq!(arrivals(&mut ways)[0].0, 26_000);
    }

    #[test]
    fn copies_to_a_group_pass_the_port_of_their_sender_once() {
        let network = Network::ideal().bandwidth(8_000_000_000).queue_packets(1);
        let mut ways = Ways::new(network, 1);
        let mut departure = Departure::default();
        for to in 1..4 {
            ways.send(0, (0, to), &mut departure, flight(to, LEN), |_, _| {});
        }
        let times: Vec<_> = arrivals(&mut ways).iter().map(|(at, _)| *at).collect();
        assert_eq!(times, [1000; 3]);
    }

    #[test]
    fn packets_of_a_changed_way_wait_for_none_of_before() {
        let mut ways = Ways::new(Network::ideal(), 1);
        ways.set(0, 0, 1, Network::ideal().bandwidth(1));
        send(&mut ways, 0, 1);
        ways.set(500, 0, 1, Network::ideal().bandwidth(8_000_000_000));
        send(&mut ways, 500, 1);
        let times: Vec<_> = arrivals(&mut ways).iter().map(|(at, _)| *at).collect();
        assert_eq!(times, [1500, 2500]);
    }

    /// The packets to others wait at the same port, and those of others at that of the receiver.
    #[test]
    fn a_change_of_the_network_reorders_no_packets_of_one_way() {
        for seed in 0..500 {
            let mut decisions = Decisions::new(seed);
            let mut ways = Ways::new(Network::ideal(), seed);
            let (mut now, mut sent, mut seen) = (0, [0; 6], [0; 6]);
            let place = |(from, to): (usize, usize)| from * 2 + (to + 2 - from) % 3;
            for turn in 0..60 {
                let (from, by) = (decisions.below(3) as usize, decisions.below(2) as usize);
                let way = (from, (from + 1 + by) % 3);
                let random = |decisions: &mut Decisions| {
                    let mut network = Network::ideal()
                        .latency(Duration::from_nanos(decisions.below(2) * decisions.below(9000)))
                        .jitter(Duration::from_nanos(decisions.below(2) * decisions.below(3000)));
                    if decisions.below(2) == 0 {
                        network = network.bandwidth(1_000_000_000 << decisions.below(6));
                    }
                    network
                };
                match decisions.below(8) {
                    0 => ways.set_all(now, random(&mut decisions)),
                    1 | 2 => ways.set(now, way.0, way.1, random(&mut decisions)),
                    _ => {
                        let mut packet = flight(0, LEN);
                        packet.queue = sent[place(way)];
                        sent[place(way)] += 1;
                        ways.send(now, way, &mut Departure::default(), packet, |_, _| {});
                    }
                }
                now += decisions.below(2) * decisions.below(4000);
                if turn == 59 {
                    now += 1_000_000_000;
                }
                while let Some(packet) = ways.arrive(now, |_, _, _| {}) {
                    let way = place((packet.from, packet.to));
                    assert_eq!(packet.flight.queue, seen[way], "seed {seed}, way {way}");
                    seen[way] += 1;
                }
            }
            assert_eq!(seen, sent);
        }
    }

    #[test]
    fn a_change_of_the_network_delays_no_packet_that_is_under_way() {
        let slow = Network::ideal().bandwidth(1_000_000).latency(Duration::from_secs(1));
        for before in [Network::ideal().latency(Duration::from_nanos(50)), Network::ideal()] {
            let mut ways = Ways::new(before.bandwidth(8_000_000_000), 1);
            send(&mut ways, 0, 3);
            let mut changed = ways.under_way.keys().map(|(due, _)| *due).collect::<Vec<_>>();
            ways.set(0, 0, 1, slow.clone());
            changed.iter_mut().zip(ways.under_way.keys()).for_each(|(due, (now, _))| *due -= now);
            assert_eq!(changed, [0; 3]);
        }
    }

    #[test]
    fn packets_that_are_cut_off_take_no_room_at_their_receiver_s_port() {
        let mut ways = Ways::new(Network::ideal().bandwidth(8_000_000_000), 1);
        ways.cut(0, 2, true);
        send_on(&mut ways, 0, (0, 2), 5);
        send_on(&mut ways, 0, (1, 2), 2);
        let times: Vec<_> = arrivals(&mut ways).iter().map(|(at, _)| *at).collect();
        assert_eq!(times, [1000, 2000]);
        assert_eq!(ways.traffic(0, 2).lost, 5);
    }

    #[test]
    fn each_script_counts_each_packet() {
        let doubled = |scripts: [PacketFault; 2]| {
            let mut ways = Ways::new(Network::ideal(), 1);
            scripts.into_iter().for_each(|script| ways.fault_packets(0, 1, script));
            send(&mut ways, 0, 5);
            numbers(&arrivals(&mut ways))
        };
        let (lose, double) = (PacketFault::lose, || PacketFault::double().after(2));
        assert_eq!(doubled([lose(), double()]), [1, 2, 2, 3, 4]);
        assert_eq!(doubled([double(), lose()]), [1, 2, 2, 3, 4]);
        // One fault at a time: the second one happens to the next packet.
        assert_eq!(doubled([lose().count(3), double()]), [3, 3, 4]);
    }

    #[test]
    fn packets_to_two_receivers_share_the_sender_s_bandwidth() {
        let mut ways = Ways::new(Network::ideal().bandwidth(8_000_000_000), 1);
        for _ in 0..3 {
            send_on(&mut ways, 0, (0, 1), 1);
            send_on(&mut ways, 0, (0, 2), 1);
        }
        send_on(&mut ways, 0, (3, 2), 1);
        let times: Vec<_> = arrivals(&mut ways).iter().map(|(at, _)| *at).collect();
        // The one of another sender has its turn between those that come to its receiver.
        assert_eq!(times, [1000, 1000, 2000, 3000, 4000, 5000, 6000]);
    }

    #[test]
    fn packets_of_two_senders_queue_at_the_receiver_s_port() {
        // Each sends as fast as the receiver's port takes packets.
        let run = |senders: &[usize], network: Network| {
            let mut ways = Ways::new(network.bandwidth(8_000_000_000), 1);
            let mut arrived = 0;
            for now in (0..10_000).step_by(1000) {
                senders.iter().for_each(|sender| send_on(&mut ways, now, (*sender, 1), 1));
                arrived += std::iter::from_fn(|| ways.arrive(now, |_, _, _| {})).count();
            }
            let times = arrivals(&mut ways);
            let all = senders.iter().map(|sender| ways.traffic(*sender, 1));
            let sum = all.fold([0; 3], |[marked, dropped, arrived], traffic| {
                [marked + traffic.marked, dropped + traffic.dropped, arrived + traffic.arrived]
            });
            assert_eq!(arrived + times.len(), sum[2] as usize);
            (times.last().map(|(at, _)| *at), sum)
        };
        let alone = Network::ideal().marks_above(0).queue_packets(1);
        assert_eq!(run(&[0], alone), (Some(10_000), [0, 0, 10]));
        assert_eq!(run(&[0, 2], Network::ideal()), (Some(20_000), [0, 0, 20]));
        // One more waits each microsecond, one packet behind the other.
        let marks = Network::ideal().marks_above(4500);
        assert_eq!(run(&[0, 2], marks), (Some(20_000), [9, 0, 20]));
        let short = Network::ideal().queue_packets(5);
        assert_eq!(run(&[0, 2], short), (Some(15_000), [0, 5, 15]));
    }

    #[test]
    fn a_full_queue_drops_and_empties_with_time() {
        for network in [Network::ideal().queue_bytes(2500), Network::ideal().queue_packets(2)] {
            let mut ways = Ways::new(network.bandwidth(8_000_000_000), 1);
            send(&mut ways, 0, 5);
            send(&mut ways, 1000, 5);
            assert_eq!(numbers(&arrivals(&mut ways)), [0, 1, 0]);
            let Traffic { sent, dropped, arrived, .. } = ways.traffic(0, 1);
            assert_eq!((sent, dropped, arrived), (10, 7, 3));
        }
    }

    #[test]
    fn packets_behind_a_long_queue_are_marked() {
        let network = Network::ideal().bandwidth(8_000_000_000).marks_above(1500);
        let mut ways = Ways::new(network, 1);
        send(&mut ways, 0, 4);
        let arrived = arrivals(&mut ways);
        let marks: Vec<_> =
            arrived.iter().map(|(_, flight)| (flight.ecn, flight.packet[4])).collect();
        assert_eq!(marks, [(0b10, 0), (0b10, 0), (0b11, 0x80), (0b11, 0x80)]);
        assert_eq!(ways.traffic(0, 1).marked, 2);
    }

    #[test]
    fn jitter_keeps_the_order_and_reordering_does_not() {
        let jitter = Network::ideal().jitter(Duration::from_nanos(50));
        let mut ways = Ways::new(jitter, 1);
        send(&mut ways, 0, 100);
        let arrived = arrivals(&mut ways);
        assert!(numbers(&arrived).is_sorted());
        assert!(arrived.last().is_some_and(|(at, _)| (40..=50).contains(at)));
        let late = Network::ideal().latency(Duration::from_nanos(10));
        let mut ways = Ways::new(late.reordering(0.3, Duration::from_nanos(50)), 1);
        for number in 0..100 {
            ways.send(
                number as u64,
                (0, 1),
                &mut Departure::default(),
                flight(number, LEN),
                |_, _| {},
            );
        }
        let arrived = arrivals(&mut ways);
        assert!(!numbers(&arrived).is_sorted());
        let late =
            |(at, flight): &&(u64, Box<Flight>)| *at != u64::from(flight.packet[LEN - 1]) + 10;
        let overtaken = arrived.iter().filter(late).count();
        let counted = ways.traffic(0, 1).late as usize;
        assert!((15..45).contains(&counted) && overtaken <= counted, "{overtaken} of {counted}");
    }

    #[test]
    fn faults_happen_at_their_shares_and_are_counted() {
        let network = Network::ideal().loss(0.1).duplication(0.2).corruption(0.1);
        let mut ways = Ways::new(network, 7);
        send(&mut ways, 0, 2000);
        let arrived = arrivals(&mut ways);
        let traffic = ways.traffic(0, 1);
        assert!((150..250).contains(&traffic.lost), "{traffic:?}");
        assert!((300..420).contains(&traffic.doubled), "{traffic:?}");
        assert!((170..270).contains(&traffic.damaged), "{traffic:?}");
        assert_eq!(arrived.len() as u64, traffic.arrived);
        let left = 2000 - traffic.lost + traffic.doubled;
        assert!((left - traffic.damaged..left - traffic.damaged + 20).contains(&traffic.arrived));
        // Damage to the byte that routers may change is all that passes.
        let zeros = |(at, byte): (usize, &u8)| at == 4 || *byte == 0;
        let whole = |flight: &Flight| flight.packet[..LEN - 1].iter().enumerate().all(zeros);
        assert!(arrived.iter().all(|(_, flight)| whole(flight)));
    }

    #[test]
    fn a_seed_repeats() {
        let run = |seed| {
            let mut ways = Ways::new(Network::of_seed(1), 0);
            ways.set_seed(seed);
            send(&mut ways, 0, 200);
            let arrived = arrivals(&mut ways);
            (numbers(&arrived), ways.decisions())
        };
        assert_eq!(run(5), run(5));
        assert_ne!(run(5), run(6));
    }

    #[test]
    fn what_is_cut_off_gets_nothing_in_one_direction() {
        let mut ways = Ways::new(Network::ideal().latency(Duration::from_nanos(10)), 1);
        send(&mut ways, 0, 2);
        ways.cut(0, 1, true);
        ways.send(0, (1, 0), &mut Departure::default(), flight(0, LEN), |_, _| {});
        assert_eq!(arrivals(&mut ways).len(), 1);
        assert_eq!((ways.traffic(0, 1).lost, ways.traffic(1, 0).arrived), (2, 1));
        ways.cut(0, 1, false);
        send(&mut ways, 20, 1);
        assert_eq!(arrivals(&mut ways).len(), 1);
    }

    #[test]
    fn packets_of_a_restored_network_wait_for_none_of_before() {
        let before = Network::ideal().bandwidth(1).latency(Duration::from_secs(10));
        for all in [true, false] {
            let mut ways = Ways::new(before.clone(), 1);
            send(&mut ways, 0, 3);
            match all {
                true => ways.set_all(5, Network::ideal()),
                false => ways.set(5, 0, 1, Network::ideal()),
            }
            let times =
                |ways: &mut Ways| arrivals(ways).iter().map(|(at, _)| *at).collect::<Vec<_>>();
            assert_eq!(times(&mut ways), [5; 3]);
            send(&mut ways, 7, 1);
            assert_eq!(times(&mut ways), [7]);
        }
    }

    #[test]
    fn a_way_has_a_bounded_number_of_packets() {
        let mut ways = Ways::new(Network::ideal().latency(Duration::from_secs(1)), 1);
        for _ in 0..Network::MOST_PACKETS + 5 {
            ways.send(0, (0, 1), &mut Departure::default(), flight(0, 12), |_, _| {});
        }
        assert_eq!(ways.traffic(0, 1).dropped, 5);
    }
}
