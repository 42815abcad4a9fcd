//! The switch that connects functions.
//!
//! Pairs with the transport of `data`. Functions send packets to their links, and the switch takes them to their
//! destinations: in [`Fabric::run`] at once, in [`Fabric::run_ready`] when the caller chooses them.

mod delivery;
mod outside;

use std::io::{self, Write};

use crate::capture::Capture;
use crate::data::raw::NextFrames;
use crate::data::transport::Turn;
use crate::device::Device;
use crate::function::Function;
use crate::network::{Network, PacketFault, Traffic};
use crate::options::Options;
use crate::outside::Outside;
use crate::ways::Ways;

/// WQEs that one queue may execute before the next queue has its turn.
const WQES_PER_TURN: usize = 32;
/// Packets of one queue pair that arrive before the next ones have their turn.
const PACKETS_PER_TURN: usize = 32;
/// The most that one poll may cost, in steps of about ten nanoseconds. After that the caller serves its
/// clients before it polls again.
const COST_PER_POLL: u64 = 1 << 20;
/// The cost of each WQE and of each packet, in steps.
const WQE_COST: u64 = 64;

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
    /// The ways of packets; `None` if all are ideal.
    ways: Option<Box<Ways>>,
    /// The way out of the process.
    outside: Option<Outside>,
    /// The seed of their faults.
    seed: u64,
    holds_timers: bool,
}

/// Something that can be done now. It is valid until the fabric changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadyThing {
    function: usize,
    ready: Ready,
}

impl ReadyThing {
    /// The number of its function.
    pub fn function(&self) -> usize {
        self.function
    }
}

/// A thing that a function can do, by the number of others of this type in front.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ready {
    /// A queue has WQEs to fetch or to flush.
    Queue(usize),
    /// A queue pair may send.
    Sender(usize),
    /// A packet may arrive.
    Packet(usize),
    /// Data may reach memory.
    Write(usize),
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

/// How much a function can do now: queues to serve, queue pairs that may send, packets that may arrive, data that may
/// reach memory.
#[inline]
fn ready(device: &Device) -> [usize; 4] {
    let (queues, senders) = match device.bus_master {
        true => (device.ready_queues.len(), device.senders()),
        false => (0, 0),
    };
    [queues, senders, device.link.len(), device.bus.len()]
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

    /// Sets the seed of the faults of the network from now on.
    pub fn set_seed(&mut self, seed: u64) {
        self.seed = seed;
        self.ways.iter_mut().for_each(|ways| ways.set_seed(seed));
    }

    fn ways(&mut self) -> &mut Ways {
        let seed = self.seed;
        self.ways.get_or_insert_with(|| Box::new(Ways::new(Network::ideal(), seed)))
    }

    /// Nanoseconds since the start.
    fn now(&self) -> u64 {
        self.functions.first().map_or(0, |function| function.device().now)
    }

    /// Changes the network between all functions, as [`Fabric::set_way`] does between two.
    pub fn set_network(&mut self, network: Network) {
        let now = self.now();
        self.ways().set_all(now, network);
    }

    /// Changes the network from one function to another. A packet that is under way arrives when it would have, or when
    /// it would if it were sent now, whichever is sooner: later ones do not overtake it.
    pub fn set_way(&mut self, from: usize, to: usize, network: Network) {
        let now = self.now();
        self.ways().set(now, from, to, network);
    }

    /// Lets a fault happen to packets from one function to another.
    pub fn fault_packets(&mut self, from: usize, to: usize, fault: PacketFault) {
        self.ways().fault_packets(from, to, fault);
    }

    /// Lets no packet of one function arrive at another any more, also of those that are under way, or ends that.
    pub fn cut_off(&mut self, from: usize, to: usize, cut: bool) {
        self.ways().cut(from, to, cut);
    }

    /// Whether packets of one function do not arrive at another, because it is cut off.
    pub fn is_cut_off(&self, from: usize, to: usize) -> bool {
        self.ways.as_ref().is_some_and(|ways| ways.is_cut(from, to))
    }

    /// The packets that went from one function to another since there is a network. Those of a function to itself do
    /// not leave it.
    pub fn traffic(&self, from: usize, to: usize) -> Traffic {
        self.ways.as_ref().map_or_else(Traffic::default, |ways| ways.traffic(from, to))
    }

    /// The number of decisions that the network has drawn from its seed.
    pub fn decisions(&self) -> u64 {
        self.ways.as_ref().map_or(0, |ways| ways.decisions())
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
        worked |= self.arrive();
        worked |= self.budget > 0 && self.run_functions();
        worked |= self.run_timers();
        while self.budget > 0 && self.arrive() | (self.ready() > 0 && self.run_functions()) {
            worked = true;
        }
        for function in &mut self.functions {
            function.device_mut().settle_payloads();
        }
        let more = self.budget == 0 || self.ready() > 0;
        Progress { worked, more, deadline: self.deadline() }
    }

    /// Sets the time, lets the packets of the network arrive that are due, and makes the queues ready whose timers are.
    /// Returns whether there was anything.
    /// With [`Fabric::ready`] and [`Fabric::run_ready`], a caller decides the order in which things are done.
    pub fn start_turn(&mut self, now: u64) -> bool {
        self.set_time(now);
        self.budget = COST_PER_POLL;
        self.arrive() | self.run_timers()
    }

    /// The number of things that can be done now: queues that have WQEs, queue pairs that may send, packets that may
    /// arrive, data that may reach memory.
    pub fn ready(&self) -> usize {
        let all = |function: &Function| {
            let [queues, senders, packets, writes] = ready(function.device());
            queues + senders + packets + writes
        };
        self.functions.iter().map(all).sum()
    }

    /// The thing with `before` others in front: those of lower functions come first.
    pub fn find_ready(&self, before: usize) -> Option<ReadyThing> {
        self.choose_ready(|ready| if before < ready { before } else { ready })
    }

    /// The thing with as many others in front as `choose` says, which gets the number of all; `None` if there is none.
    pub fn choose_ready(&self, choose: impl FnOnce(usize) -> usize) -> Option<ReadyThing> {
        let all = self.ready();
        let mut before = if all > 0 { choose(all) } else { return None };
        for (function, at) in self.functions.iter().enumerate() {
            let [queues, senders, packets, writes] = ready(at.device());
            let ready = if before < queues {
                Ready::Queue(before)
            } else if before < queues + senders {
                Ready::Sender(before - queues)
            } else if before < queues + senders + packets {
                Ready::Packet(before - queues - senders)
            } else if before < queues + senders + packets + writes {
                Ready::Write(before - queues - senders - packets)
            } else {
                before -= queues + senders + packets + writes;
                continue;
            };
            return Some(ReadyThing { function, ready });
        }
        None
    }

    /// Does the thing with `before` others in front for one message: see [`Fabric::run_thing`]. Returns whether there is
    /// one that did anything.
    pub fn run_ready(&mut self, before: usize) -> bool {
        self.find_ready(before).is_some_and(|thing| self.run_thing(thing, 1))
    }

    /// Does a thing that can be done now for at most so many messages, but for one at least: fetches WQEs of a queue,
    /// sends packets of a queue pair up to the end of a request, lets packets of one arrive up to the end of a message.
    /// At most 32 packets leave or arrive, also of responses, which end no message. Data that may reach memory is one
    /// write. Returns whether it did anything.
    pub fn run_thing(&mut self, thing: ReadyThing, messages: usize) -> bool {
        let ReadyThing { function: number, ready } = thing;
        if number >= self.functions.len() {
            return false;
        }
        self.budget = COST_PER_POLL;
        let messages = messages.max(1);
        let worked = match ready {
            Ready::Queue(before) => {
                let queue = self.functions[number].device_mut().ready_queues.take(before);
                queue.is_some_and(|queue| self.serve(number, queue, messages))
            }
            Ready::Sender(before) => {
                self.functions[number].device_mut().send_packets(before, Turn::Requests(messages))
            }
            Ready::Packet(before) => self.deliver_messages(number, before, messages),
            Ready::Write(before) => {
                let device = self.functions[number].device();
                let write = device.bus.take(before);
                write.iter().for_each(|write| device.end_bus_write(write));
                write.is_some()
            }
        };
        self.charge();
        worked
    }

    /// Lets no timer end in [`Fabric::run`] until they are let again: packets have come that it does not know yet.
    pub fn hold_timers(&mut self, held: bool) {
        self.holds_timers = held;
    }

    /// Runs the timers that are due; returns whether one was.
    fn run_timers(&mut self) -> bool {
        if self.holds_timers {
            return false;
        }
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

    /// Delivers what a function has sent, serves each of its queues once that has WQEs, and gives each queue pair a
    /// turn that may send. The packets of a turn arrive before the next turn, or if the budget is used up first thing
    /// in the next poll: so a link never has more packets than those of one turn and those that were held back. Returns
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
        let [_, senders, ..] = ready(self.functions[number].device());
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

    /// Delivers packets of the queue pair that sent the packet with `before` others in front, up to the end of so many
    /// messages. Returns whether there were any.
    fn deliver_messages(&mut self, number: usize, before: usize, messages: usize) -> bool {
        let link = &mut self.functions[number].device_mut().link;
        let Some(queue) = link.queue(before) else { return false };
        let (mut packets, mut ended) = (0, 0);
        while packets < PACKETS_PER_TURN && ended < messages {
            let link = &mut self.functions[number].device_mut().link;
            let Some(flight) = link.take_of(queue) else { break };
            packets += flight.packets as usize;
            ended += usize::from(self.deliver(number, flight));
            if !self.charge() {
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

    /// When the next timer is due or the next packet arrives, in nanoseconds since the start.
    pub fn deadline(&self) -> Option<u64> {
        let arrival = self.ways.as_ref().and_then(|ways| ways.deadline());
        let timers = self.functions.iter().filter_map(|function| function.device().deadline());
        timers.chain(arrival).min()
    }

    /// Executes WQEs of a queue, and makes it ready again if it may have more. Returns whether it did anything.
    fn serve(&mut self, number: usize, queue: u32, wqes: usize) -> bool {
        if self.functions[number].device().sends_frames(queue) {
            return self.serve_frames(number, queue, wqes);
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

    fn serve_frames(&mut self, number: usize, queue: u32, wqes: usize) -> bool {
        let mut worked = false;
        for _ in 0..wqes {
            if !self.charge() {
                break;
            }
            match self.functions[number].device_mut().run_next_frames(queue) {
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
            if self.can_reach(from, to) && !self.is_cut_off(from, to) {
                let own = (from == to).then_some(domain);
                self.functions[to].device_mut().receive_frame(frame, own);
            }
        }
    }
}
