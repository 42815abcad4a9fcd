//! The endpoint: the queue pairs of a device.

use crate::headers::{Malformed, Packet, PacketBuffer};
use crate::host::Host;
use crate::opcodes::{Kind, Transport};
use crate::psn::Psn;
use crate::queue_pair::{Attributes, QueuePair, State, Step};
use crate::request::Request;
use crate::requester::NotPosted;
use crate::timers::{Nanoseconds, Timers};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::fmt;

/// Packets that a queue pair may send before the next one has its turn.
const PACKETS_PER_TURN: usize = MAX_UNIT as usize;

/// The most packets of a [unit](Packet::packets).
pub const MAX_UNIT: u32 = 32;

/// The queue pairs of a device: a state machine without a socket, a clock or a thread.
///
/// The methods are of three kinds:
///
/// - Commands: [`create`](Endpoint::create), [`move_to`](Endpoint::move_to), [`destroy`](Endpoint::destroy).
/// - Input: [`post`](Endpoint::post) and [`packet`](Endpoint::packet). They complete requests and receives, and note
///   that there is something to send.
/// - [`run`](Endpoint::run) sends. It is to be called after each of the others, until it says that there is no more,
///   and at the [`deadline`](Endpoint::deadline).
///
/// Memory grows only with `create`: by the depth of the send queue and `max_dest_rd_atomic`.
#[derive(Debug)]
pub struct Endpoint<P> {
    slots: Vec<Option<QueuePair<P>>>,
    /// The slot of each QPN.
    numbers: BTreeMap<u32, u32>,
    free: Vec<u32>,
    /// Slots of queue pairs that may have something to send.
    ready: VecDeque<u32>,
    timers: Timers,
    buffer: PacketBuffer,
    /// Whether the network may be congested.
    congestion: bool,
}

impl<P> Default for Endpoint<P> {
    fn default() -> Self {
        Endpoint {
            slots: Vec::new(),
            numbers: BTreeMap::new(),
            free: Vec::new(),
            ready: VecDeque::new(),
            timers: Timers::default(),
            buffer: PacketBuffer::default(),
            congestion: false,
        }
    }
}

/// The result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// How many packets were sent, or requests executed.
    pub done: usize,
    /// Whether there is more to do now: the budget was used up.
    pub more: bool,
}

/// Why a packet was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Dropped {
    /// It is none.
    Malformed(Malformed),
    /// No queue pair has the number.
    NoQueuePair(u32),
    /// The queue pair has another transport.
    Transport(Transport),
    /// The queue pair takes no packet of this kind in its state.
    State(State),
    /// The device did not admit it.
    NotAdmitted,
    /// It is a response to nothing, or one that came before.
    Psn(Psn),
    /// It is a [unit](Packet::packets) that cannot be taken whole. Nothing is counted, answered or completed: its
    /// packets are to be given one by one.
    Unit,
}

impl fmt::Display for Dropped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dropped::Malformed(why) => write!(f, "{why}"),
            Dropped::NoQueuePair(number) => write!(f, "no queue pair has the number {number:#x}"),
            Dropped::Transport(transport) => {
                write!(f, "the packet is one of {transport:?}, and the queue pair is not")
            }
            Dropped::State(state) => {
                write!(f, "a queue pair in state {state:?} does not take the packet")
            }
            Dropped::NotAdmitted => write!(f, "the device does not admit the packet"),
            Dropped::Psn(psn) => {
                write!(f, "no request with PSN {psn:?} waits for a response")
            }
            Dropped::Unit => write!(f, "the packets of the unit have to come one by one"),
        }
    }
}

impl core::error::Error for Dropped {}

impl<P: Clone> Endpoint<P> {
    /// An endpoint without queue pairs.
    pub fn new() -> Self {
        Endpoint::default()
    }

    /// Has the reliable queue pairs that are created from now on keep few packets in flight where packets are lost: at
    /// first 16, one more for each that is acknowledged, and after a loss half as many, growing by one at a time up to
    /// 128. A long read is asked for in parts of as many packets.
    ///
    /// For networks that drop packets when their queues are full. A switch in the process has none.
    pub fn limit_congestion(&mut self) {
        self.congestion = true;
    }

    /// Creates a queue pair in state Init, in place of one with the same number. It holds at most `depth` requests.
    ///
    /// The attributes of a datagram queue pair that only connections have do not matter.
    pub fn create(
        &mut self,
        number: u32,
        transport: Transport,
        depth: usize,
        attributes: Attributes<P>,
    ) {
        self.destroy(number);
        let mut queue_pair = QueuePair::new(number, transport, depth, attributes);
        if self.congestion {
            queue_pair.requester.limit_congestion();
        }
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(queue_pair);
                slot
            }
            None => {
                self.slots.push(Some(queue_pair));
                self.slots.len() as u32 - 1
            }
        };
        self.numbers.insert(number, slot);
        self.timers.add_slot(slot);
        // A queue pair is in the list once.
        self.ready.reserve(self.slots.len() - self.ready.len());
        self.free.reserve(self.slots.len() - self.free.len());
    }

    /// Destroys a queue pair: its requests end without a completion. To reset one is to create it again.
    pub fn destroy(&mut self, number: u32) {
        if let Some(slot) = self.numbers.remove(&number) {
            self.slots[slot as usize] = None;
            self.timers.set(slot, None);
            self.ready.retain(|ready| *ready != slot);
            self.free.push(slot);
        }
    }

    fn find(&self, number: u32) -> Option<&QueuePair<P>> {
        self.slots.get(*self.numbers.get(&number)? as usize)?.as_ref()
    }

    fn find_mut(&mut self, number: u32) -> Option<(u32, &mut QueuePair<P>)> {
        let slot = *self.numbers.get(&number)?;
        Some((slot, self.slots.get_mut(slot as usize)?.as_mut()?))
    }

    /// The state of a queue pair.
    pub fn state(&self, number: u32) -> Option<State> {
        self.find(number).map(|qp| qp.state)
    }

    /// The PSN of the next packet that a queue pair sends for the first time, and of the next one that it expects.
    pub fn psns(&self, number: u32) -> Option<(Psn, Psn)> {
        self.find(number).map(|qp| (qp.requester.next_psn(), qp.responder.next_psn()))
    }

    /// How many requests can be posted to a queue pair.
    pub fn room(&self, number: u32) -> usize {
        self.find(number).map_or(0, |qp| qp.requester.room())
    }

    /// How many requests of a queue pair are not complete.
    pub fn pending(&self, number: u32) -> usize {
        self.find(number).map_or(0, |qp| qp.requester.pending())
    }

    /// Moves a queue pair to another state. In error its requests complete as flushed, in order, and so does a receive
    /// of which only a part was written; in Sqe only the requests. Returns whether there is such a queue pair.
    pub fn move_to<H: Host<Path = P>>(&mut self, host: &mut H, number: u32, state: State) -> bool {
        let Some((slot, qp)) = self.find_mut(number) else { return false };
        qp.move_to(state, host);
        self.schedule(slot);
        true
    }

    /// Changes attributes of a queue pair that may be changed while it is connected: all but the MTU, the PSNs and
    /// `max_dest_rd_atomic`, which stay as they are. The PSN of the first packet that is sent may be changed before
    /// the queue pair sends: in Init and Rtr. Returns whether there is such a queue pair.
    pub fn modify(&mut self, number: u32, change: impl FnOnce(&mut Attributes<P>)) -> bool {
        let Some((slot, qp)) = self.find_mut(number) else { return false };
        let Attributes { mtu, max_dest_rd_atomic, .. } = qp.attributes;
        change(&mut qp.attributes);
        // The PSNs of requests count packets of this size, and there is room for so many resources.
        (qp.attributes.mtu, qp.attributes.max_dest_rd_atomic) = (mtu, max_dest_rd_atomic);
        if matches!(qp.state, State::Init | State::Rtr) {
            qp.requester.start_at(qp.attributes.send_psn);
        }
        self.schedule(slot);
        true
    }

    /// Posts a request. A request that cannot be sent fails when all before it are complete.
    ///
    /// # Errors
    ///
    /// There is no such queue pair, it does not send in its state, or it is full.
    pub fn post(&mut self, number: u32, request: Request<P>) -> Result<(), NotPosted> {
        let (slot, qp) = self.find_mut(number).ok_or(NotPosted::NoQueuePair)?;
        qp.post(request)?;
        self.schedule(slot);
        Ok(())
    }

    /// Handles a packet: the bytes from BTH to padding, without ICRC; the check of that is
    /// [`decapsulate`](crate::frame::decapsulate)'s.
    ///
    /// # Errors
    ///
    /// The packet was dropped.
    pub fn packet<H: Host<Path = P>>(
        &mut self,
        now: Nanoseconds,
        host: &mut H,
        from: &P,
        bytes: &[u8],
    ) -> Result<(), Dropped> {
        let packet = Packet::parse(bytes).map_err(Dropped::Malformed)?;
        self.packet_for(now, host, packet.bth.destination(), from, &packet)
    }

    /// Handles a packet for a queue pair whose number need not be the one in the packet: a member of a multicast
    /// group, or the queue pair of general services.
    ///
    /// # Errors
    ///
    /// The packet was dropped.
    pub fn packet_for<H: Host<Path = P>>(
        &mut self,
        now: Nanoseconds,
        host: &mut H,
        number: u32,
        from: &P,
        packet: &Packet<'_>,
    ) -> Result<(), Dropped> {
        let (slot, qp) = self.find_mut(number).ok_or(Dropped::NoQueuePair(number))?;
        // `check_type_state` of `rxe_recv.c`.
        if packet.opcode.transport != qp.transport {
            return Err(Dropped::Transport(packet.opcode.transport));
        }
        let response = packet.opcode.operation.kind() == Kind::Response;
        if !(if response { qp.state.sends() } else { qp.state.receives() }) {
            return Err(Dropped::State(qp.state));
        }
        if !host.admit(number, from, packet) {
            return Err(Dropped::NotAdmitted);
        }
        if !qp.has_place_for(packet) {
            return Err(Dropped::Psn(packet.bth.psn()));
        }
        let taken = match response {
            true => qp.handle_response(now, host, packet),
            false => qp.handle_request(host, from, packet),
        };
        self.schedule(slot);
        if taken { Ok(()) } else { Err(Dropped::Unit) }
    }

    /// Lets timers end that are due, and sends what there is to send, at most `budget` packets. Queue pairs take turns.
    pub fn run<H: Host<Path = P>>(
        &mut self,
        now: Nanoseconds,
        host: &mut H,
        budget: usize,
    ) -> Progress {
        self.expire(now, host);
        let mut done = 0;
        while done < budget {
            let Some(slot) = self.ready.pop_front() else { break };
            done += self.turn(now, host, slot, PACKETS_PER_TURN.min(budget - done));
        }
        Progress { done, more: !self.ready.is_empty() }
    }

    /// Lets timers end that are due.
    pub fn expire<H: Host<Path = P>>(&mut self, now: Nanoseconds, host: &mut H) {
        while let Some(slot) = self.timers.pop_due(now) {
            if let Some(Some(qp)) = self.slots.get_mut(slot as usize) {
                qp.expire(now, host);
                self.schedule(slot);
            }
        }
    }

    /// How many queue pairs may have something to send.
    pub fn ready(&self) -> usize {
        self.ready.len()
    }

    /// Gives a turn to the queue pair with `before` others in front of it: the part of [`run`](Endpoint::run) for a
    /// device that chooses their order. Returns how many packets it sent, or requests it executed.
    pub fn run_ready<H: Host<Path = P>>(
        &mut self,
        now: Nanoseconds,
        host: &mut H,
        before: usize,
    ) -> usize {
        let next = if before == 0 { self.ready.pop_front() } else { self.ready.remove(before) };
        let Some(slot) = next else { return 0 };
        self.turn(now, host, slot, PACKETS_PER_TURN)
    }

    /// Gives a turn to a queue pair that is not in the list, which it joins again if it may have more to send.
    fn turn<H: Host<Path = P>>(
        &mut self,
        now: Nanoseconds,
        host: &mut H,
        slot: u32,
        packets: usize,
    ) -> usize {
        let Some(Some(qp)) = self.slots.get_mut(slot as usize) else { return 0 };
        qp.scheduled = false;
        let mut done = 0;
        while done < packets && qp.may_send() {
            match qp.step(now, host, &mut self.buffer, (packets - done) as u32) {
                Step::Idle => {
                    self.timers.set(slot, qp.requester.timer);
                    return done;
                }
                Step::Done(sent) => done += sent as usize,
                Step::Last(sent) => {
                    done += sent as usize;
                    break;
                }
            }
        }
        self.schedule(slot);
        done
    }

    /// When to run although nothing has happened.
    pub fn deadline(&self) -> Option<Nanoseconds> {
        self.timers.first()
    }

    /// Bytes that lists have room for: what could grow.
    #[cfg(test)]
    pub(crate) fn capacity(&self) -> usize {
        let lists = self.slots.iter().flatten().map(QueuePair::capacity).sum::<usize>();
        lists
            + self.ready.capacity()
            + self.free.capacity()
            + self.timers.capacity()
            + self.slots.capacity()
    }

    /// Makes this the PSN of the next packet that a queue pair executes.
    #[cfg(test)]
    pub(crate) fn expect(&mut self, number: u32, psn: Psn) {
        if let Some((_, qp)) = self.find_mut(number) {
            qp.responder.expect(psn);
        }
    }

    /// Sets the timer of a queue pair, and notes whether it may have something to send.
    fn schedule(&mut self, slot: u32) {
        if let Some(Some(qp)) = self.slots.get_mut(slot as usize) {
            self.timers.set(slot, qp.requester.timer);
            if qp.may_send() && !core::mem::replace(&mut qp.scheduled, true) {
                self.ready.push_back(slot);
            }
        }
    }
}
