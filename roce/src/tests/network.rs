//! The network between two endpoints, and the loop that moves packets and time.

use super::device::Device;
use crate::headers::{Bth, Packet, Syndrome};
use crate::icrc::{IpHeader, icrc};
use crate::opcodes::{Kind, Operation, Transport};
use crate::timers::Nanoseconds;
use crate::{Attributes, Dropped, Endpoint, Mtu, Psn, State};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::format;
use std::string::String;
use std::vec::Vec;
use uverbs_uapi::mr::ib_uverbs_access_flags;

/// Decisions of a seed: SplitMix64.
#[derive(Clone, Debug)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    /// A number below `bound`.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Whether something that happens in so many of 1000 cases happens now.
    pub(super) fn happens(&mut self, of_thousand: u64) -> bool {
        self.below(1000) < of_thousand
    }
}

/// Faults of the network, of 1000 packets each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Faults {
    pub(super) lost: u64,
    pub(super) late: u64,
    pub(super) doubled: u64,
    pub(super) damaged: u64,
}

impl Faults {
    pub(super) const NONE: Faults = Faults { lost: 0, late: 0, doubled: 0, damaged: 0 };
    /// Those that the transport has to bear.
    pub(super) const MANY: Faults = Faults { lost: 100, late: 100, doubled: 50, damaged: 10 };
    /// Few enough that a message of many packets comes to its end.
    pub(super) const FEW: Faults = Faults { lost: 8, late: 8, doubled: 5, damaged: 1 };
    /// Those after which nobody needs a timer.
    pub(super) const HARMLESS: Faults = Faults { lost: 0, late: 150, doubled: 50, damaged: 0 };
}

/// QPN of each side.
pub(super) const QPNS: [u32; 2] = [0x11, 0x22];

/// A PSN of a request that has no ACK and no response yet.
#[derive(Clone, Copy, Debug)]
struct Unacknowledged {
    psn: Psn,
    /// Whether it waits for a response of its own.
    answered: bool,
    /// Whether the window counts it.
    counts: bool,
}

/// The most packets that may be under way without an ACK, as `docs/TRANSPORT.md` has it.
const WINDOW: usize = 128;

/// An arrival of a packet or a posting of receives, at a time to come.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    /// A packet, or a unit of so many, comes to a side.
    Packet(usize, Vec<u8>, u32),
    /// A side posts this many receives.
    Receives(usize, u64),
}

pub(super) struct Network {
    pub(super) now: Nanoseconds,
    pub(super) random: Random,
    pub(super) endpoints: [Endpoint<u8>; 2],
    pub(super) devices: [Device; 2],
    pub(super) faults: Faults,
    pub(super) budget: usize,
    mtu: Mtu,
    /// How often each PSN of a request was sent or asked for, by side, and how many faults there were before.
    pub(super) sendings: [BTreeMap<u32, (u32, u32)>; 2],
    /// The PSNs of each side's requests that are sent and not acknowledged, by the rules of a requester.
    unacknowledged: [VecDeque<Unacknowledged>; 2],
    /// Whether only packets that are sent for the first time are late, and no responses. Then a NAK or a response
    /// always tells what is missing, and a timeout of zero is enough.
    pub(super) repeats_in_order: bool,
    /// Of 1000 packets, those with which the next one comes together: before the endpoints run.
    pub(super) together: u64,
    /// How many packets were lost, damaged or late.
    pub(super) faulted: u32,
    /// All packets that were sent: the side, and the bytes.
    pub(super) trace: Vec<(usize, Vec<u8>)>,
    pub(super) keeps_trace: bool,
    /// Units of 1000 that are taken apart when they are sent.
    pub(super) apart: u64,
    /// Units that were taken whole, and those that were not.
    pub(super) whole_units: u64,
    pub(super) refused_units: u64,
    /// PSNs of packets that each side loses, once.
    pub(super) loses: BTreeSet<(usize, u32)>,
    happenings: BTreeSet<(Nanoseconds, u64, Happening)>,
    number: u64,
}

/// The packets of a unit.
fn take_apart(unit: &[u8], packets: u32) -> Vec<Vec<u8>> {
    let payload = Packet::parse(unit).map_or(&[][..], |packet| packet.payload);
    let headers = &unit[..unit.len() - payload.len()];
    let parts = payload.chunks_exact(payload.len() / packets as usize);
    let packet = |(at, part): (u32, &[u8])| {
        let mut packet = [headers, part].concat();
        Bth::skip(&mut packet, at);
        packet
    };
    (0..).zip(parts).map(packet).collect()
}

/// Attributes with which a test begins.
pub(super) fn attributes(side: usize) -> Attributes<u8> {
    Attributes {
        path: 1 - side as u8,
        destination: QPNS[1 - side],
        source: QPNS[side],
        pkey: 0xffff,
        mtu: Mtu::Mtu256,
        send_psn: Psn::new(100),
        receive_psn: Psn::new(100),
        timeout: 5,
        retry_count: 7,
        rnr_retry: 7,
        min_rnr_timer: 1,
        max_rd_atomic: 4,
        max_dest_rd_atomic: 4,
        access: ib_uverbs_access_flags::all(),
    }
}

impl Network {
    pub(super) fn new(
        seed: u64,
        transport: Transport,
        attributes: [Attributes<u8>; 2],
        depth: usize,
    ) -> Network {
        Network::with(seed, transport, attributes, depth, false)
    }

    /// As [`new`](Network::new), perhaps with a congestion window.
    pub(super) fn with(
        seed: u64,
        transport: Transport,
        attributes: [Attributes<u8>; 2],
        depth: usize,
        congestion: bool,
    ) -> Network {
        let mut network = Network {
            now: 0,
            random: Random(seed),
            endpoints: [Endpoint::new(), Endpoint::new()],
            devices: [Device::default(), Device::default()],
            faults: Faults::NONE,
            budget: usize::MAX,
            mtu: attributes[0].mtu,
            sendings: [BTreeMap::new(), BTreeMap::new()],
            unacknowledged: Default::default(),
            repeats_in_order: false,
            together: 0,
            faulted: 0,
            trace: Vec::new(),
            keeps_trace: false,
            apart: 0,
            whole_units: 0,
            refused_units: 0,
            loses: BTreeSet::new(),
            happenings: BTreeSet::new(),
            number: 0,
        };
        if congestion {
            network.endpoints.iter_mut().for_each(Endpoint::limit_congestion);
        }
        for (side, attributes) in attributes.into_iter().enumerate() {
            network.devices[side].srq = (transport == Transport::Xrc).then_some(9);
            network.endpoints[side].create(QPNS[side], transport, depth, attributes);
            for state in [State::Rtr, State::Rts] {
                network.endpoints[side].move_to(&mut network.devices[side], QPNS[side], state);
            }
        }
        network
    }

    fn happen(&mut self, at: Nanoseconds, what: Happening) {
        self.number += 1;
        self.happenings.insert((at, self.number, what));
    }

    /// Has a side post receives later.
    pub(super) fn post_receives(&mut self, side: usize, at: Nanoseconds, count: u64) {
        self.happen(at, Happening::Receives(side, count));
    }

    /// Lets a side send what it has to, into the network.
    pub(super) fn run(&mut self, side: usize) -> Result<(), String> {
        for _ in 0..10_000 {
            let progress = self.endpoints[side].run(self.now, &mut self.devices[side], self.budget);
            for (to, packet, packets) in std::mem::take(&mut self.devices[side].sent) {
                self.transmit(side, to.into(), packet, packets)?;
            }
            if !progress.more {
                return Ok(());
            }
        }
        Err(format!("side {side} sends for ever"))
    }

    fn transmit(
        &mut self,
        from: usize,
        to: usize,
        packet: Vec<u8>,
        packets: u32,
    ) -> Result<(), String> {
        let parsed =
            Packet::parse(&packet).map_err(|why| format!("side {from} sent no packet: {why}"))?;
        let psn = parsed.bth.psn();
        let lost = |at: &u32| self.loses.contains(&(from, psn.plus(*at).get()));
        let loses = (0..packets).any(|at| lost(&at));
        if packets > 1 && (loses || self.random.happens(self.apart)) {
            for one in take_apart(&packet, packets) {
                self.transmit(from, to, one, 1)?;
            }
            return Ok(());
        }
        let kind = parsed.opcode.operation.kind();
        let mut again = kind == Kind::Response;
        if kind != Kind::Response {
            let psns = match parsed.opcode.operation {
                Operation::ReadRequest => {
                    parsed.reth.map_or(1, |reth| self.mtu.packets(reth.length.get()))
                }
                _ => packets,
            };
            for at in 0..psns {
                let psn = parsed.bth.psn().plus(at).get();
                let (times, _) = self.sendings[from].entry(psn).or_insert((0, self.faulted));
                *times += 1;
                again |= *times > 1;
                if *times == 1 && parsed.opcode.transport.is_reliable() {
                    let answered = !matches!(kind, Kind::Send | Kind::Write);
                    let (psn, counts) = (Psn::new(psn), kind != Kind::Read);
                    let one = Unacknowledged { psn, answered, counts };
                    self.unacknowledged[from].push_back(one);
                }
            }
            let waiting = &self.unacknowledged[from];
            // Fewer PSNs than the window need no count without those of reads.
            let counted = match waiting.len() {
                0..=WINDOW => 0,
                _ => waiting.iter().filter(|one| one.counts).count(),
            };
            if counted > WINDOW {
                return Err(format!("side {from} has sent {counted} packets without an ACK"));
            }
        }
        if self.keeps_trace {
            self.trace.push((from, packet.clone()));
        }
        if loses {
            self.loses.remove(&(from, psn.get()));
            return Ok(());
        }
        let copies = if self.random.happens(self.faults.doubled) { 2 } else { 1 };
        for _ in 0..copies {
            if self.random.happens(self.faults.lost) {
                self.faulted += 1;
                continue;
            }
            if self.random.happens(self.faults.damaged) {
                self.faulted += 1;
                self.damage(&packet)?;
                continue;
            }
            let may_be_late = !(self.repeats_in_order && again);
            let late = self.random.happens(self.faults.late) && may_be_late;
            self.faulted += u32::from(late);
            let delay = 1_000 + if late { self.random.below(40_000) } else { 0 };
            self.happen(self.now + delay, Happening::Packet(to, packet.clone(), packets));
        }
        Ok(())
    }

    /// Damages a packet and its ICRC as the network would, and looks whether the receiver drops it.
    fn damage(&mut self, packet: &[u8]) -> Result<(), String> {
        let mut ip = [0; 20];
        ip[0] = 0x45;
        let udp = [0xc0, 0, 0x12, 0xb7, 0, 0, 0, 0];
        let mut whole = packet.to_vec();
        whole.extend(icrc(IpHeader::V4(&ip), &udp, packet));
        let bit = self.random.below(whole.len() as u64 * 8) as usize;
        whole[bit / 8] ^= 1 << (bit % 8);
        let (damaged, sum) = whole.split_at(packet.len());
        // The byte with FECN and BECN is the network's.
        let ignored = bit / 8 == 4;
        if (icrc(IpHeader::V4(&ip), &udp, damaged) == sum) != ignored {
            return Err(format!(
                "the ICRC does not tell that bit {bit} of {packet:x?} has changed"
            ));
        }
        Ok(())
    }

    /// Moves time to what happens next, and lets it happen. Returns whether there was anything.
    pub(super) fn step(&mut self) -> Result<bool, String> {
        let next = self.happenings.first().map(|(at, ..)| *at);
        let deadline = self.endpoints.iter().filter_map(Endpoint::deadline).min();
        let Some(at) = next.into_iter().chain(deadline).min() else { return Ok(false) };
        self.now = self.now.max(at);
        if next == Some(at) {
            if let Some((_, _, happening)) = self.happenings.pop_first() {
                self.handle(happening);
            }
            while self.together > 0 && self.random.happens(self.together) {
                let Some((at, ..)) = self.happenings.first() else { break };
                if deadline.is_some_and(|deadline| deadline < *at) {
                    break;
                }
                self.now = self.now.max(*at);
                if let Some((_, _, happening)) = self.happenings.pop_first() {
                    self.handle(happening);
                }
            }
        }
        for side in 0..2 {
            self.run(side)?;
            if let Some(problem) = self.devices[side].problem.take() {
                return Err(problem);
            }
        }
        Ok(true)
    }

    /// Notes what a response tells the requester of a side.
    fn acknowledge(&mut self, side: usize, packet: &Packet<'_>) {
        let waiting = &mut self.unacknowledged[side];
        let (psn, operation) = (packet.bth.psn(), packet.opcode.operation);
        let is_known = |first: &Unacknowledged| psn.is_within(first.psn, waiting.len() as u32);
        let sends = self.endpoints[side].state(QPNS[side]) == Some(State::Rts);
        if operation.kind() != Kind::Response || !sends || !waiting.front().is_some_and(is_known) {
            return;
        }
        let is_ack = operation == Operation::Acknowledge;
        let syndrome = packet.aeth.and_then(|aeth| aeth.syndrome());
        let end = if is_ack && syndrome == Some(Syndrome::Ack) { psn.plus(1) } else { psn };
        while waiting.front().is_some_and(|first| first.psn.is_before(end) && !first.answered) {
            waiting.pop_front();
        }
        if !is_ack && waiting.front().is_some_and(|first| first.psn == psn) {
            waiting.drain(..waiting.len().min(packet.packets as usize));
        }
    }

    /// The oldest PSN of a side that is sent and not acknowledged, how often it was sent, and how many faults there
    /// were before.
    pub(super) fn oldest(&self, side: usize) -> Option<(Psn, u32, u32)> {
        let psn = self.unacknowledged[side].front()?.psn;
        let (times, before) = self.sendings[side].get(&psn.get())?;
        Some((psn, *times, *before))
    }

    /// Gives a packet to a side. One for a queue pair in error is dropped, and that is no mistake.
    fn give(&mut self, side: usize, bytes: &[u8]) {
        let Ok(packet) = Packet::parse(bytes) else { return };
        self.acknowledge(side, &packet);
        let (endpoint, device) = (&mut self.endpoints[side], &mut self.devices[side]);
        let from = 1 - side as u8;
        let _ = endpoint.packet_for(self.now, device, QPNS[side], &from, &packet);
    }

    fn handle(&mut self, happening: Happening) {
        match happening {
            Happening::Packet(side, packet, packets) => {
                let from = 1 - side as u8;
                let Ok(unit) = Packet::parse(&packet) else { return };
                let unit = Packet { packets, ..unit };
                if packets == 1 {
                    return self.give(side, &packet);
                }
                let (endpoint, device) = (&mut self.endpoints[side], &mut self.devices[side]);
                let taken = endpoint.packet_for(self.now, device, QPNS[side], &from, &unit);
                if taken == Err(Dropped::Unit) {
                    self.refused_units += 1;
                    for one in take_apart(&packet, packets) {
                        self.give(side, &one);
                    }
                } else {
                    self.whole_units += 1;
                    self.acknowledge(side, &unit);
                }
            }
            Happening::Receives(side, count) => {
                (0..count).for_each(|_| self.devices[side].post_receive())
            }
        }
    }

    /// Steps until nothing happens any more.
    pub(super) fn finish(&mut self) {
        for _ in 0..100_000 {
            if !self.step().unwrap() {
                return;
            }
        }
        panic!("it does not end");
    }
}
