//! The switch that connects functions.
//!
//! Pairs with the transport of `data`. Functions send packets to their links, and the switch takes them to their
//! destinations: in [`Fabric::run`] at once, in [`Fabric::run_ready`] when the caller chooses them.

use std::io::{self, Write};

use uverbs_roce::headers::Packet;
use uverbs_roce::opcodes::Kind;
use uverbs_uapi::mlx5::prm::qpc::qpc;

use crate::capture::{Capture, Macs};
use crate::data::dma::Payload;
use crate::data::raw::NextFrames;
use crate::data::transport::Turn;
use crate::device::Device;
use crate::function::Function;
use crate::link::Flight;
use crate::options::{Options, PortType};
use crate::path::Destination;

/// WQEs that one queue may execute before the next queue has its turn.
const WQES_PER_TURN: usize = 32;
/// Packets of one queue pair that arrive before the next ones have their turn.
const PACKETS_PER_TURN: usize = 32;
/// The most that one poll may cost, in steps of about ten nanoseconds. After that the caller serves its
/// clients before it polls again.
const COST_PER_POLL: u64 = 1 << 20;
/// The cost of each WQE and of each packet, in steps.
const WQE_COST: u64 = 64;

/// Zeros in place of a payload in memory of the sender: only their number counts.
static PLACEHOLDER: [u8; 4096] = [0; 4096];

/// Functions behind one switch.
#[derive(Default)]
pub struct Fabric {
    functions: Vec<Function>,
    /// The function whose queues come first. It changes when a poll ends early, so that no queue
    /// waits for ever.
    first: usize,
    /// The cost that the current poll has left, in steps.
    budget: u64,
    capture: Option<Capture>,
}

/// Something that can be done now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ready {
    /// A queue has WQEs to fetch or to flush.
    Queue(usize),
    /// A queue pair may send.
    Sender(usize),
    /// A packet may arrive.
    Packet(usize),
}

/// The result of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Whether anything was done: a WQE executed, a timer run.
    pub worked: bool,
    /// Whether there is more to do now: run again.
    pub more: bool,
    /// When the next timer is due, in nanoseconds since the start; none if only doorbells and commands
    /// bring new work.
    pub deadline: Option<u64>,
}

/// How much a function can do now: queues to serve, queue pairs that may send, packets that may arrive.
fn ready(device: &Device) -> [usize; 3] {
    let (queues, senders) = match device.bus_master {
        true => (device.ready_queues.len(), device.senders()),
        false => (0, 0),
    };
    [queues, senders, device.link.len()]
}

impl Fabric {
    /// Adds a function and returns its number.
    pub fn add(&mut self, mut options: Options) -> usize {
        let number = self.functions.len();
        options.number = number as u32;
        self.functions.push(Function::new(options));
        number
    }

    /// Writes the packets between Ethernet ports to a file in the format of pcap, as RoCE v2, when they arrive. Their
    /// times are those of [`Fabric::run`]. Each packet is written when it arrives, in one call of `write`, which the
    /// device waits for.
    ///
    /// # Errors
    /// If the header cannot be written. If a packet cannot, the capture ends.
    pub fn capture(&mut self, to: impl Write + Send + 'static) -> io::Result<()> {
        self.capture = Some(Capture::new(Box::new(to))?);
        Ok(())
    }

    /// Adds a packet to the capture, if there is one.
    fn capture_packet(&mut self, from: usize, to: Option<usize>, flight: &Flight) {
        let Some(mut capture) = self.capture.take() else { return };
        let device = |number: usize| self.functions[number].device();
        let sender = device(from);
        let macs = Macs {
            source: sender.port.permanent_mac(),
            destination: to.map(|to| device(to).port.permanent_mac()),
        };
        let added = capture.add(sender.now, macs, &flight.path, &flight.packet, |packet| {
            if let Some(in_place) = flight.in_place {
                in_place.append(&sender.memory, packet);
            }
        });
        match added {
            Ok(()) => self.capture = Some(capture),
            Err(why) => log::warn!("the capture ends: {why}"),
        }
    }

    /// The number of functions.
    pub fn len(&self) -> usize {
        self.functions.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    /// The function with this number.
    ///
    /// # Panics
    /// If there is none.
    pub fn function(&mut self, number: usize) -> &mut Function {
        &mut self.functions[number]
    }

    /// Sets the time in nanoseconds since the start, which guests read from the device's clock.
    pub fn set_time(&mut self, now: u64) {
        for function in &mut self.functions {
            function.device_mut().now = now;
        }
    }

    /// Sets the time in nanoseconds since the start, and does the work that is due. Returns whether
    /// there is more work now.
    pub fn poll(&mut self, now: u64) -> bool {
        self.run(now).more
    }

    /// Sets the time in nanoseconds since the start, and does work that is due, until it has done all
    /// or as much as one call may.
    pub fn run(&mut self, now: u64) -> Progress {
        self.set_time(now);
        self.budget = COST_PER_POLL;
        // ACKs that were on their way when the last poll ended count before the timeouts of now.
        let mut worked = false;
        for number in 0..self.functions.len() {
            worked |= self.deliver_all(number);
        }
        worked |= self.budget > 0 && self.run_functions();
        worked |= self.run_timers();
        while self.budget > 0 && self.run_functions() {
            worked = true;
        }
        for function in &mut self.functions {
            function.device_mut().copy_payloads();
        }
        let more = self.budget == 0 || self.ready() > 0;
        Progress { worked, more, deadline: self.deadline() }
    }

    /// Sets the time, and makes the queues whose timers are due ready. Returns whether a timer was due.
    /// With [`Fabric::ready`] and [`Fabric::run_ready`], a caller decides the order in which things are done.
    pub fn start_turn(&mut self, now: u64) -> bool {
        self.set_time(now);
        self.run_timers()
    }

    /// The number of things that can be done now: queues that have WQEs, queue pairs that may send, packets that may
    /// arrive.
    pub fn ready(&self) -> usize {
        self.functions.iter().flat_map(|function| ready(function.device())).sum()
    }

    /// The function of the thing with `before` others in front: those of lower functions come first.
    pub fn function_of_ready(&self, before: usize) -> Option<usize> {
        self.find_ready(before).map(|(number, _)| number)
    }

    /// As [`Fabric::function_of_ready`], with the thing.
    fn find_ready(&self, mut before: usize) -> Option<(usize, Ready)> {
        for (number, function) in self.functions.iter().enumerate() {
            let kinds = [Ready::Queue, Ready::Sender, Ready::Packet];
            for (kind, count) in kinds.into_iter().zip(ready(function.device())) {
                match before.checked_sub(count) {
                    Some(left) => before = left,
                    None => return Some((number, kind(before))),
                }
            }
        }
        None
    }

    /// Does the thing with `before` others in front: fetches one WQE, sends packets of a queue pair up to the end of a
    /// request, or lets as many arrive. Of responses, 32 packets leave or arrive at once. Returns whether it did anything.
    pub fn run_ready(&mut self, before: usize) -> bool {
        let Some((number, ready)) = self.find_ready(before) else { return false };
        self.budget = COST_PER_POLL;
        let worked = match ready {
            Ready::Queue(before) => {
                let device = self.functions[number].device_mut();
                device.ready_queues.take(before).is_some_and(|queue| self.serve(number, queue, 1))
            }
            Ready::Sender(before) => {
                self.functions[number].device_mut().send_packets(before, Turn::Request)
            }
            Ready::Packet(before) => self.deliver_message(number, before),
        };
        self.charge();
        worked
    }

    /// Runs the timers that are due; returns whether one was.
    fn run_timers(&mut self) -> bool {
        let devices = self.functions.iter_mut().map(Function::device_mut);
        devices.fold(false, |due, device| device.run_timers() | due)
    }

    /// Does what each function can do now, while the budget lasts. Returns whether there was anything.
    fn run_functions(&mut self) -> bool {
        let mut worked = false;
        let (first, count) = (self.first, self.functions.len());
        for number in (first..count).chain(0..first) {
            worked |= self.run_function(number);
            if self.budget == 0 {
                self.first = (number + 1) % count;
                break;
            }
        }
        worked
    }

    /// Delivers what a function has sent, serves each of its queues once that has WQEs, and gives each queue pair a turn
    /// that may send. The packets of a turn arrive before the next turn, or if the budget is used up first thing in
    /// the next poll: so a link never has more packets than those of one turn and those that were held back. Returns
    /// whether it did anything.
    fn run_function(&mut self, number: usize) -> bool {
        let mut worked = self.deliver_all(number);
        if self.budget == 0 {
            return worked;
        }
        let [queues, ..] = ready(self.functions[number].device());
        for _ in 0..queues {
            let Some(queue) = self.functions[number].device_mut().ready_queues.take(0) else {
                break;
            };
            worked |= self.serve(number, queue, WQES_PER_TURN);
            if self.budget == 0 {
                return worked;
            }
        }
        let [_, senders, _] = ready(self.functions[number].device());
        for _ in 0..senders {
            worked |= self.functions[number].device_mut().send_packets(0, Turn::Packets);
            self.charge();
            worked |= self.deliver_all(number);
            if self.budget == 0 {
                return worked;
            }
        }
        worked
    }

    /// Delivers what a function has sent, while the budget lasts. Returns whether there was anything.
    fn deliver_all(&mut self, number: usize) -> bool {
        let mut worked = false;
        while self.budget > 0 {
            let Some(flight) = self.functions[number].device_mut().link.take() else { break };
            self.deliver(number, flight);
            self.charge();
            worked = true;
        }
        worked
    }

    /// Delivers packets of the queue pair that sent the packet with `before` others in front, up to the end of a
    /// message. Returns whether there were any.
    fn deliver_message(&mut self, number: usize, before: usize) -> bool {
        let link = &mut self.functions[number].device_mut().link;
        let Some(queue) = link.queue(before) else { return false };
        for _ in 0..PACKETS_PER_TURN {
            let link = &mut self.functions[number].device_mut().link;
            let Some(flight) = link.take_of(queue) else { break };
            if self.deliver(number, flight) || !self.charge() {
                break;
            }
        }
        true
    }

    /// Charges work to the poll; returns false if the poll ends with it.
    fn charge(&mut self) -> bool {
        let cost: u64 = self.functions.iter().map(|function| function.device().take_cost()).sum();
        self.budget = self.budget.saturating_sub(cost.saturating_add(WQE_COST));
        self.budget > 0
    }

    /// When the next timer is due, in nanoseconds since the start.
    pub fn deadline(&self) -> Option<u64> {
        self.functions.iter().filter_map(|function| function.device().deadline()).min()
    }

    /// Executes WQEs of a queue, and makes it ready again if it may have more. Returns whether it did anything.
    fn serve(&mut self, number: usize, queue: u32, wqes: usize) -> bool {
        if self.functions[number].device().is_raw(queue) {
            return self.serve_raw_sq(number, queue, wqes);
        }
        let mut worked = false;
        for _ in 0..wqes {
            if !self.charge() {
                break;
            }
            if !self.functions[number].device_mut().serve_queue_pair(queue) {
                return worked;
            }
            worked = true;
            if !self.functions[number].device().has_rung_sends(queue) {
                return worked;
            }
        }
        self.functions[number].device_mut().schedule(queue);
        worked
    }

    fn serve_raw_sq(&mut self, number: usize, queue: u32, wqes: usize) -> bool {
        let mut worked = false;
        for _ in 0..wqes {
            if !self.charge() {
                break;
            }
            match self.functions[number].device_mut().run_next_raw_wqe(queue) {
                NextFrames::Idle => return worked,
                NextFrames::Done => {}
                NextFrames::Frames(frames, domain) => {
                    for frame in frames {
                        self.broadcast(number, &frame, domain);
                    }
                }
            }
            worked = true;
        }
        self.functions[number].device_mut().schedule(queue);
        worked
    }

    /// Sends a frame to every port; each port takes frames that are for it.
    fn broadcast(&mut self, from: usize, frame: &[u8], domain: u32) {
        for to in 0..self.functions.len() {
            if self.can_reach(from, to) {
                let own = (from == to).then_some(domain);
                self.functions[to].device_mut().receive_frame(frame, own);
            }
        }
    }

    /// Delivers a packet to its destination. Returns whether it ends a message.
    fn deliver(&mut self, from: usize, flight: Flight) -> bool {
        let mut ends = true;
        if let Ok(packet) = Packet::parse(&flight.packet) {
            let operation = packet.opcode.operation;
            ends = operation.kind() != Kind::Response && operation.position().ends();
            match flight.path.destination {
                Destination::Group(group) => {
                    self.capture_packet(from, None, &flight);
                    self.deliver_to_group(from, &group, &flight, &packet);
                }
                destination => {
                    if let Some(to) = self.find_port(from, destination, flight.path.source.vlan) {
                        self.capture_packet(from, Some(to), &flight);
                        self.deliver_to(from, to, &flight, packet);
                    }
                }
            }
        }
        self.functions[from].device_mut().link.recycle(flight);
        ends
    }

    fn deliver_to(&mut self, from: usize, to: usize, flight: &Flight, mut packet: Packet<'_>) {
        let qpn = packet.bth.destination();
        let Some(in_place) = flight.in_place else {
            let device = self.functions[to].device_mut();
            return device.receive_packet(qpn, &flight.path, &packet, None);
        };
        packet.payload = &PLACEHOLDER[..in_place.len().min(PLACEHOLDER.len())];
        if from == to {
            let payload = Some(Payload::InPlace(in_place, None));
            let device = self.functions[to].device_mut();
            return device.receive_packet(qpn, &flight.path, &packet, payload);
        }
        let (left, right) = self.functions.split_at_mut(from.max(to));
        let (sender, receiver) = match from < to {
            true => (&mut left[from], &mut right[0]),
            false => (&mut right[0], &mut left[to]),
        };
        let payload = Some(Payload::InPlace(in_place, Some(&sender.device().memory)));
        receiver.device_mut().receive_packet(qpn, &flight.path, &packet, payload);
    }

    fn deliver_to_group(
        &mut self,
        from: usize,
        group: &[u8; 16],
        flight: &Flight,
        packet: &Packet<'_>,
    ) {
        let sender = self.functions[from].device().objects.qps.find(flight.queue);
        let no_loopback = sender.is_some_and(|qp| qp.context.is_set(qpc::block_lb_mc));
        for number in 0..self.functions.len() {
            if !self.can_reach(from, number) {
                continue;
            }
            let device = self.functions[number].device_mut();
            for qpn in device.objects.multicast_groups.members(group) {
                // A sender that is a member of the group receives its own message, unless
                // `block_lb_mc` is set.
                if !(no_loopback && number == from && qpn == flight.queue) {
                    device.receive_packet(qpn, &flight.path, packet, None);
                }
            }
        }
    }

    /// The function at whose port a packet arrives.
    fn find_port(&self, from: usize, destination: Destination, vlan: Option<u16>) -> Option<usize> {
        let is_destination = |number: &usize| {
            let port = &self.functions[*number].device().port;
            self.can_reach(from, *number)
                && match destination {
                    Destination::Lid(lid) => port.lid() == lid,
                    Destination::Gid(gid) => port.has_roce_address(gid, vlan),
                    Destination::Group(_) => false,
                }
        };
        // A function finds its own address first, even if another function has the same.
        std::iter::once(from).chain(0..self.functions.len()).find(is_destination)
    }

    /// Whether a message from one port can reach another: both links are up and of one type, or it
    /// is the same port, and the destination may access memory.
    fn can_reach(&self, from: usize, to: usize) -> bool {
        let (a, b) = (self.functions[from].device(), self.functions[to].device());
        let port_type = |device: &Device| -> PortType { device.options.port_type };
        b.bus_master
            && (from == to || a.port.active() && b.port.active() && port_type(a) == port_type(b))
    }
}
