//! The requester: sends requests as packets, and handles what comes back. `docs/TRANSPORT.md` draws its states.
//!
//! From the kernel's `rxe_req.c` and `rxe_comp.c`; each rule names the function that it was read in. Rules that differ
//! from rxe's say so.
//!
//! PSNs of a requester, in the order in which packets carry them:
//!
//! ```text
//!          oldest                    cursor                  limit
//! ───────────┼──────────────────────────┼──────────────────────┼───────────
//!  complete  │ sent, and sent again     │ sent, to be repeated │ never sent
//! ```
//!
//! The cursor is behind the limit only while packets are repeated. The request at index `next` and the number of its
//! packets before the cursor, `sent`, are the cursor's other name.

mod congestion;
mod responses;

use crate::headers::{Bth, PAYLOAD_WORD, PacketBuffer};
use crate::host::{Event, Host, Source};
use crate::mistake::Mistake;
use crate::opcodes::{Opcode, Position};
use crate::psn::Psn;
use crate::queue_pair::{QueuePair, State, Step};
use crate::request::{Request, Work};
use crate::timers::{Nanoseconds, ack_timeout};
use alloc::collections::VecDeque;
use congestion::Congestion;
use core::fmt;
use uverbs_uapi::wc::ib_wc_status;

/// The most packets of sends and writes without acknowledgement: `RXE_MAX_UNACKED_PSNS`. Reads are bounded by
/// `max_rd_atomic`; `rxe_requester` counts their PSNs, too, and stops when there are more than 128 of all.
const WINDOW: u32 = 128;
/// Packets after which one asks for an acknowledgement in the middle of a message: `RXE_MAX_PKT_PER_ACK`.
const PACKETS_PER_ACK: u32 = 64;
/// The value of `rnr_retry` that never runs out.
const FOREVER: u8 = 7;

/// Why a request was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotPosted {
    /// There is no such queue pair.
    NoQueuePair,
    /// The queue pair does not send in its state.
    State(State),
    /// It holds as many requests as it can.
    Full,
}

impl fmt::Display for NotPosted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotPosted::NoQueuePair => write!(f, "no queue pair has the number"),
            NotPosted::State(state) => {
                write!(f, "a queue pair in state {state:?} sends nothing: move it to Rts")
            }
            NotPosted::Full => {
                write!(f, "the queue pair holds as many requests as it can: wait for a completion")
            }
        }
    }
}

impl core::error::Error for NotPosted {}

/// A request that was posted.
#[derive(Debug)]
struct Posted<P> {
    request: Request<P>,
    /// PSN of the first packet, once it has begun.
    first: Psn,
    /// PSNs that it takes: those of its packets, or of the responses to a read.
    psns: u32,
    /// Whether it has begun: its PSNs are given away, or it was executed.
    begun: bool,
    /// The status with which it fails, when all before it are complete.
    failed: Option<ib_wc_status>,
}

impl<P> Posted<P> {
    fn end(&self) -> Psn {
        self.first.plus(self.psns)
    }

    fn is_local(&self) -> bool {
        self.request.work == Work::Local
    }
}

/// The requester of a queue pair.
#[derive(Debug)]
pub(crate) struct Requester<P> {
    queue: VecDeque<Posted<P>>,
    depth: usize,
    /// Index of the request that the cursor is in.
    next: usize,
    /// Packets of it in front of the cursor.
    sent: u32,
    pub(crate) oldest: Psn,
    pub(crate) limit: Psn,
    /// PSNs between `oldest` and `limit` of responses to reads, which the window does not count.
    responses: u32,
    /// Requests that have begun and wait for a response of their own.
    answered: u8,
    /// Packets since one asked for an acknowledgement.
    unasked: u32,
    /// The window that losses make smaller, if the network may be congested.
    congestion: Option<Congestion>,
    retries: u8,
    rnr_retries: u8,
    /// Whether the packet at the cursor is the first one that is sent of its request, or sent again.
    begins: bool,
    /// Whether a NAK has already made it repeat what follows `oldest`: further ones tell nothing new.
    repeating: bool,
    /// Whether it waits after an RNR NAK.
    waits_for_receiver: bool,
    /// Whether the device knows that the queue is drained.
    pub(crate) drained: bool,
    /// When it stops to wait for a response, or for a receiver that was not ready.
    pub(crate) timer: Option<Nanoseconds>,
}

impl<P> Requester<P> {
    pub(crate) fn new(depth: usize, psn: Psn) -> Self {
        Requester {
            queue: VecDeque::with_capacity(depth),
            depth,
            next: 0,
            sent: 0,
            oldest: psn,
            limit: psn,
            responses: 0,
            answered: 0,
            unasked: 0,
            congestion: None,
            retries: 0,
            rnr_retries: 0,
            begins: true,
            repeating: false,
            waits_for_receiver: false,
            drained: false,
            timer: None,
        }
    }

    #[cfg(test)]
    pub(crate) fn capacity(&self) -> usize {
        self.queue.capacity() * size_of::<Posted<P>>()
    }

    /// Makes this the PSN of the first packet.
    pub(crate) fn start_at(&mut self, psn: Psn) {
        (self.oldest, self.limit) = (psn, psn);
    }

    /// Keeps a window that losses make smaller.
    pub(crate) fn limit_congestion(&mut self) {
        self.congestion = Some(Congestion::new());
    }

    /// The PSNs in flight: from the oldest one to the cursor, with those of responses to reads.
    fn in_flight(&self) -> u32 {
        match self.queue.get(self.next).filter(|posted| posted.begun && !posted.is_local()) {
            Some(posted) => posted.first.plus(self.sent).since(self.oldest),
            None => self.limit.since(self.oldest),
        }
    }

    /// How many more PSNs may be in flight; all, where congestion is no matter. A long read is asked for in parts: the
    /// next one when all before it has come, so that the peer has one part of each read to answer.
    fn congestion_room(&self) -> u32 {
        let Some(congestion) = &self.congestion else { return u32::MAX };
        let in_flight = self.in_flight();
        let posted = self.queue.get(self.next);
        let reads = posted.is_some_and(|posted| matches!(posted.request.work, Work::Read { .. }));
        if reads && self.sent > 0 && in_flight > 0 {
            return 0;
        }
        congestion.window().saturating_sub(in_flight)
    }

    /// After how many packets one asks for an acknowledgement: often enough that a full window has one that does.
    fn packets_per_ack(&self) -> u32 {
        let half = self.congestion.as_ref().map(|congestion| congestion.window() / 2);
        half.map_or(PACKETS_PER_ACK, |half| half.clamp(1, PACKETS_PER_ACK))
    }

    /// The PSN of the next packet that was never sent.
    pub(crate) fn next_psn(&self) -> Psn {
        self.limit
    }

    /// How many requests may be posted.
    pub(crate) fn room(&self) -> usize {
        self.depth - self.queue.len()
    }

    /// Whether there is a packet to send, now or later.
    pub(crate) fn may_send(&self) -> bool {
        self.next < self.queue.len()
    }

    /// Whether the next request to be executed needs no packet.
    pub(crate) fn is_local_next(&self) -> bool {
        let mut rest = self.queue.iter().skip(self.next);
        let next = rest.find(|posted| !(posted.begun && posted.is_local()));
        next.is_some_and(Posted::is_local)
    }

    /// How many requests are not complete.
    pub(crate) fn pending(&self) -> usize {
        self.queue.len()
    }

    /// Starts over with the first packet that is not acknowledged.
    fn go_back(&mut self) {
        self.next = 0;
        self.begins = true;
        self.sent = match self.queue.front() {
            Some(head) if head.begun && !head.is_local() => self.oldest.since(head.first),
            _ => 0,
        };
    }

    /// Gives PSNs to the request at the cursor, if it begins.
    fn begin(&mut self) {
        let Some(posted) = self.queue.get_mut(self.next).filter(|posted| !posted.begun) else {
            return;
        };
        posted.begun = true;
        posted.first = self.limit;
        if posted.request.work.is_answered() {
            self.answered += 1;
        }
    }

    /// Moves the cursor past a packet that was sent. Returns whether it was sent for the first time. From
    /// `update_wqe_psn` and `update_state`.
    fn pass(&mut self, packet: Outgoing) -> bool {
        let Some(posted) = self.queue.get(self.next) else { return false };
        let end = packet.psn.plus(packet.psns);
        let new = end.since(self.oldest) > self.limit.since(self.oldest);
        if new {
            if matches!(posted.request.work, Work::Read { .. }) {
                self.responses += end.since(self.limit);
            }
            self.limit = end;
        }
        self.sent += packet.psns;
        if self.sent >= posted.psns {
            self.next += 1;
            self.sent = 0;
            self.begins = true;
        }
        new
    }

    /// Takes the oldest request away.
    fn pop(&mut self) -> Option<Posted<P>> {
        let head = self.queue.pop_front()?;
        match self.next {
            0 => (self.sent, self.begins) = (0, true),
            _ => self.next -= 1,
        }
        if head.begun && head.request.work.is_answered() {
            self.answered -= 1;
        }
        Some(head)
    }
}

/// A packet that is sent.
struct Outgoing {
    psn: Psn,
    /// PSNs that it takes: those of the responses to a read.
    psns: u32,
    /// Where its data begins in that of the request.
    offset: u32,
    /// Bytes of its data.
    payload: u32,
    /// How many packets can leave with it as a unit.
    unit: u32,
}

impl<P: Clone> QueuePair<P> {
    /// Posts a request.
    pub(crate) fn post(&mut self, request: Request<P>) -> Result<(), NotPosted> {
        if !self.state.sends() {
            return Err(NotPosted::State(self.state));
        }
        let requester = &mut self.requester;
        if requester.room() == 0 {
            return Err(NotPosted::Full);
        }
        let psns = match request.work {
            Work::Local => 0,
            Work::Send { .. }
            | Work::SendInvalidate { .. }
            | Work::Write { .. }
            | Work::Read { .. } => self.attributes.mtu.packets(request.length),
            _ => 1,
        };
        let failed = request.check(self.transport, psns, self.attributes.max_rd_atomic).err();
        requester.queue.push_back(Posted {
            request,
            first: Psn::default(),
            psns,
            begun: false,
            failed,
        });
        Ok(())
    }

    /// Sends the next packet of a request, or at most `room` of them as a unit. From `rxe_requester`.
    pub(crate) fn send_request<H: Host<Path = P>>(
        &mut self,
        now: Nanoseconds,
        host: &mut H,
        buffer: &mut PacketBuffer,
        room: u32,
    ) -> Step {
        if self.requester.waits_for_receiver {
            return Step::Idle;
        }
        // A local request is executed once, whatever is repeated around it.
        while self
            .requester
            .queue
            .get(self.requester.next)
            .is_some_and(|at| at.begun && at.is_local())
        {
            self.requester.next += 1;
            self.requester.sent = 0;
        }
        let Some(posted) = self.requester.queue.get(self.requester.next) else { return Step::Idle };
        if posted.failed.is_some() {
            // It waits until it is the oldest one: requests complete in order.
            let settled = self.requester.next == 0 && self.settle(host);
            return if settled { Step::Done(1) } else { Step::Idle };
        }
        if !posted.begun {
            if !self.may_begin() {
                return Step::Idle;
            }
            if posted.is_local() {
                self.run_local(host);
                return Step::Last(1);
            }
        }
        let requester = &self.requester;
        let repeats = posted.begun && posted.first.plus(requester.sent) != requester.limit;
        let unacknowledged =
            requester.limit.since(requester.oldest).saturating_sub(requester.responses);
        let window = WINDOW + u32::from(Mistake::WindowOneTooFar.is_planted());
        if self.transport.is_reliable() && !repeats && unacknowledged >= window {
            return Step::Idle;
        }
        let congestion = match self.transport.is_reliable() {
            true => requester.congestion_room(),
            false => u32::MAX,
        };
        if congestion == 0 {
            return Step::Idle;
        }
        // Packets of a unit are sent for the first time.
        let room = if repeats { 1 } else { room.min(WINDOW.saturating_sub(unacknowledged)) };
        self.send_packet(now, host, buffer, room.min(congestion))
    }

    /// Whether the request at the cursor may begin.
    fn may_begin(&self) -> bool {
        let requester = &self.requester;
        let Some(posted) = requester.queue.get(requester.next) else { return false };
        if self.state != State::Rts {
            return false;
        }
        // A fence waits for reads and atomics only, as RDMAmojo's page on fences has it; `req_next_wqe` of rxe waits
        // for everything.
        if posted.request.fence && requester.answered > 0 && !Mistake::NoFence.is_planted() {
            return false;
        }
        // `check_init_depth`.
        let depth =
            self.attributes.max_rd_atomic + u8::from(Mistake::ReadDepthOneTooFar.is_planted());
        if posted.request.work.is_answered() && requester.answered >= depth {
            return false;
        }
        // Half of all PSNs: then the responder could not tell a duplicate from a new packet.
        requester.limit.since(requester.oldest) + posted.psns < Psn::HALF
    }

    /// Executes the request at the cursor, which needs no packet. From `rxe_do_local_ops`.
    fn run_local<H: Host<Path = P>>(&mut self, host: &mut H) {
        let requester = &mut self.requester;
        let Some(posted) = requester.queue.get_mut(requester.next) else { return };
        match host.run_local(self.number, posted.request.id) {
            Ok(()) => {
                posted.begun = true;
                requester.next += 1;
                requester.sent = 0;
            }
            Err(status) => posted.failed = Some(status),
        }
        self.settle(host);
    }

    /// Sends the packet at the cursor, or at most `room` as a unit. From `init_req_packet` and `finish_packet`.
    fn send_packet<H: Host<Path = P>>(
        &mut self,
        now: Nanoseconds,
        host: &mut H,
        buffer: &mut PacketBuffer,
        room: u32,
    ) -> Step {
        self.requester.begin();
        let Some(mut packet) = self.put_headers(buffer) else { return Step::Idle };
        let begins = core::mem::take(&mut self.requester.begins);
        let Some(posted) = self.requester.queue.get_mut(self.requester.next) else {
            return Step::Idle;
        };
        if begins {
            host.begin(self.number, posted.request.id);
        }
        let mut sent = 1;
        if packet.payload > 0 {
            let (id, offset) = (posted.request.id, packet.offset);
            let source = Source::Request { id, offset };
            let unit = packet.unit.min(room).max(1);
            let left = match packet.payload % PAYLOAD_WORD {
                0 => host.leave_in_place(self.number, source, packet.payload, unit).min(unit),
                _ => 0,
            };
            if left > 1 {
                (sent, packet.psns) = (left, left);
                self.requester.unasked += left - 1;
            } else if left == 0 {
                let to = buffer.payload(packet.payload as usize);
                if let Err(status) = host.read_local(self.number, id, offset, to) {
                    posted.failed = Some(status);
                    self.settle(host);
                    return Step::Done(1);
                }
            }
        }
        let datagram = posted.request.datagram.as_ref();
        let path = datagram.map_or(&self.attributes.path, |datagram| &datagram.path);
        let more = host.send(self.number, path, buffer.finish());
        let new = self.requester.pass(packet);
        if self.transport.is_reliable() {
            let timeout = ack_timeout(self.attributes.timeout);
            let requester = &mut self.requester;
            if requester.timer.is_none() && (new || !Mistake::TimeoutNotRestarted.is_planted()) {
                requester.timer = timeout.map(|timeout| now.saturating_add(timeout));
            }
        } else {
            self.requester.oldest = self.requester.limit;
            self.settle(host);
        }
        Step::sent(sent, more)
    }

    /// Begins the packet at the cursor: all but its payload.
    fn put_headers(&mut self, buffer: &mut PacketBuffer) -> Option<Outgoing> {
        let mtu = self.attributes.mtu;
        let requester = &mut self.requester;
        let posted = requester.queue.get(requester.next)?;
        let request = &posted.request;
        let position = match request.work.streams() {
            true => Position::of(requester.sent == 0, requester.sent + 1 == posted.psns),
            false => Position::Only,
        };
        let operation = request.operation(position)?;
        let psn = posted.first.plus(requester.sent);
        let opcode = Opcode { transport: self.transport, operation };
        let datagram = request.datagram.as_ref();
        let destination = datagram.map_or(self.attributes.destination, |to| to.destination);
        let mut bth = Bth::new(opcode, self.attributes.pkey, destination, psn);
        let (room, per_ack) = (requester.congestion_room(), requester.packets_per_ack());
        requester.unasked += 1;
        let asks = position.ends() || requester.unasked >= per_ack;
        if self.transport.is_reliable() && asks {
            bth.request_ack();
            requester.unasked = 0;
        }
        if request.solicited && operation.completes_receive() {
            bth.solicit();
        }
        buffer.begin(&bth);
        let mut offset = requester.sent * mtu.bytes();
        if Mistake::RepeatedData.is_planted() && psn.plus(1).is_before(requester.limit) {
            offset = 0;
        }
        // A read asks for all that is missing, or for as much as the window has room for.
        // One that is repeated ends where it ended before: the peer keeps it as one request.
        let part = if psn == requester.limit { room } else { requester.limit.since(psn) };
        let psns = match position {
            Position::Only => (posted.psns - requester.sent).min(part),
            _ => 1,
        };
        let asked = match psns == posted.psns - requester.sent {
            true => request.length - offset,
            false => psns * mtu.bytes(),
        };
        request.put_headers(buffer, opcode, self.attributes.source, offset, asked);
        let payload = match request.work {
            Work::AtomicWrite { .. } => request.length,
            work if work.streams() => mtu.payload(request.length, requester.sent),
            _ => 0,
        };
        // All packets up to the last one, or up to the next one that asks for an acknowledgement.
        let unit = match position == Position::Middle && !asks {
            true => (posted.psns - 1 - requester.sent).min(per_ack - requester.unasked),
            false => 1,
        };
        Some(Outgoing { psn, psns, offset, payload, unit })
    }

    /// Completes the oldest requests that need no response, and fails one that has failed if it is the oldest.
    /// Returns whether it did anything.
    fn settle<H: Host<Path = P>>(&mut self, host: &mut H) -> bool {
        let mut settled = false;
        while let Some(head) = self.requester.queue.front() {
            if let Some(status) = head.failed {
                self.fail_oldest(host, status);
                return true;
            }
            let done = head.is_local() || !self.transport.is_reliable() && self.requester.next > 0;
            if !(head.begun && done) {
                break;
            }
            self.complete_oldest(host);
            settled = true;
        }
        if settled {
            self.check_drained(host);
        }
        settled
    }

    fn complete_oldest<H: Host<Path = P>>(&mut self, host: &mut H) {
        if let Some(head) = self.requester.pop() {
            host.complete(self.number, head.request.id, ib_wc_status::IB_WC_SUCCESS);
        }
    }

    /// Fails the oldest request and flushes the others. From `COMPST_ERROR` in `rxe_completer`; unreliable queue pairs
    /// only stop to send.
    fn fail_oldest<H: Host<Path = P>>(&mut self, host: &mut H, status: ib_wc_status) {
        // A response to a request that was flushed in the meantime fails nothing.
        let Some(head) = self.requester.pop() else { return };
        host.complete(self.number, head.request.id, status);
        let state = if self.transport.is_reliable() { State::Error } else { State::Sqe };
        self.move_to(state, host);
        host.event(self.number, Event::SendFailed);
    }

    /// Completes all requests as flushed, in order. From `rxe_drain_resp_pkts`.
    pub(crate) fn flush_requests<H: Host<Path = P>>(&mut self, host: &mut H) {
        while let Some(head) = self.requester.pop() {
            host.complete(self.number, head.request.id, ib_wc_status::IB_WC_WR_FLUSH_ERR);
        }
        let requester = &mut self.requester;
        requester.oldest = requester.limit;
        requester.responses = 0;
        requester.timer = None;
        requester.waits_for_receiver = false;
        requester.repeating = false;
    }

    /// Tells that the send queue is drained, if it is. From `complete_ack`.
    pub(crate) fn check_drained<H: Host<Path = P>>(&mut self, host: &mut H) {
        let begun = self.requester.queue.front().is_some_and(|head| head.begun);
        if self.state == State::Sqd && !begun && !self.requester.drained {
            self.requester.drained = true;
            host.event(self.number, Event::SendQueueDrained);
        }
    }
}
