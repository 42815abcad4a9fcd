//! Queue pairs: attributes, state, and what requester and responder share.

use crate::headers::PacketBuffer;
use crate::host::{Event, Host};
use crate::opcodes::Transport;
use crate::psn::Psn;
use crate::requester::Requester;
use crate::responder::Responder;
use crate::timers::Nanoseconds;
use uverbs_uapi::mr::ib_uverbs_access_flags;
use uverbs_uapi::port::ib_mtu;

/// The longest message: it has fewer packets than half of all PSNs, whatever the MTU is.
pub const MAX_MESSAGE: u32 = 1 << 30;

/// State of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It neither sends nor receives.
    Init,
    /// Ready to receive.
    Rtr,
    /// Ready to send.
    Rts,
    /// Send queue drained: requests that have begun complete, and no other one begins.
    Sqd,
    /// Send queue error: it receives.
    Sqe,
    /// Error. Only the ACK or NAK that the peer is owed is sent.
    Error,
}

impl State {
    /// Whether packets that only a responder takes are taken.
    pub(crate) fn receives(self) -> bool {
        matches!(self, State::Rtr | State::Rts | State::Sqd | State::Sqe)
    }

    /// Whether packets that only a requester takes are taken.
    pub(crate) fn sends(self) -> bool {
        matches!(self, State::Rts | State::Sqd)
    }
}

/// Payload of all packets of a message but the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u16)]
pub enum Mtu {
    /// 256 bytes.
    Mtu256 = 256,
    /// 512 bytes.
    Mtu512 = 512,
    /// 1024 bytes.
    Mtu1024 = 1024,
    /// 2048 bytes.
    Mtu2048 = 2048,
    /// 4096 bytes.
    Mtu4096 = 4096,
}

impl Mtu {
    /// The MTU with a code of `enum ib_mtu`: 1 to 5.
    pub const fn from_code(code: u8) -> Option<Mtu> {
        Some(match ib_mtu(code) {
            ib_mtu::IB_MTU_256 => Mtu::Mtu256,
            ib_mtu::IB_MTU_512 => Mtu::Mtu512,
            ib_mtu::IB_MTU_1024 => Mtu::Mtu1024,
            ib_mtu::IB_MTU_2048 => Mtu::Mtu2048,
            ib_mtu::IB_MTU_4096 => Mtu::Mtu4096,
            _ => return None,
        })
    }

    /// Bytes.
    pub const fn bytes(self) -> u32 {
        self as u32
    }

    /// How many packets a message has: one if it is empty.
    pub const fn packets(self, length: u32) -> u32 {
        match length.div_ceil(self.bytes()) {
            0 => 1,
            packets => packets,
        }
    }

    /// Bytes of packet `at` of a message.
    pub(crate) fn payload(self, length: u32, at: u32) -> u32 {
        length.saturating_sub(at.saturating_mul(self.bytes())).min(self.bytes())
    }
}

/// Attributes of a queue pair, as `ibv_modify_qp` sets them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attributes<P> {
    /// Where packets to the peer go. Datagrams have paths of their own.
    pub path: P,
    /// QPN of the peer.
    pub destination: u32,
    /// The QPN that datagrams name as their source: 1 for general services, else usually that of the queue pair.
    pub source: u32,
    /// P_Key of packets.
    pub pkey: u16,
    /// Path MTU.
    pub mtu: Mtu,
    /// PSN of the first packet that is sent.
    pub send_psn: Psn,
    /// PSN of the first packet that is received.
    pub receive_psn: Psn,
    /// Code of the local ACK timeout: [`ack_timeout`](crate::timers::ack_timeout).
    pub timeout: u8,
    /// How often a request is repeated after timeouts and NAKs of sequence, at most 7.
    pub retry_count: u8,
    /// How often a request is repeated after RNR NAKs; 7 is for ever.
    pub rnr_retry: u8,
    /// Code of the timer that this side's RNR NAKs ask for: [`rnr_timer`](crate::timers::rnr_timer).
    pub min_rnr_timer: u8,
    /// Reads, atomics, flushes and atomic writes that may wait for their responses.
    pub max_rd_atomic: u8,
    /// How many of the peer's are kept, in case they have to be answered again.
    pub max_dest_rd_atomic: u8,
    /// Rights of the peer: remote write, read and atomic, and both types of flush.
    pub access: ib_uverbs_access_flags,
}

/// One step of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// There was nothing to do.
    Idle,
    /// So many packets were sent, or a request was executed.
    Done(u32),
    /// As `Done`, and the device takes no more in this turn.
    Last(u32),
}

impl Step {
    /// The step that sent packets; the device says whether it takes `more`.
    pub(crate) fn sent(packets: u32, more: bool) -> Step {
        if more { Step::Done(packets) } else { Step::Last(packets) }
    }
}

/// A queue pair.
#[derive(Debug)]
pub(crate) struct QueuePair<P> {
    pub(crate) number: u32,
    pub(crate) transport: Transport,
    pub(crate) state: State,
    pub(crate) attributes: Attributes<P>,
    pub(crate) requester: Requester<P>,
    pub(crate) responder: Responder,
    /// Whether it is in the endpoint's list of those that may have something to send.
    pub(crate) scheduled: bool,
}

impl<P: Clone> QueuePair<P> {
    pub(crate) fn new(
        number: u32,
        transport: Transport,
        depth: usize,
        attributes: Attributes<P>,
    ) -> Self {
        QueuePair {
            number,
            transport,
            state: State::Init,
            requester: Requester::new(depth, attributes.send_psn),
            responder: Responder::new(&attributes),
            attributes,
            scheduled: false,
        }
    }

    #[cfg(test)]
    pub(crate) fn capacity(&self) -> usize {
        self.requester.capacity() + self.responder.capacity()
    }

    /// Sends the next packet, of a response or of a request, or at most `room` of them as a unit.
    pub(crate) fn step<H: Host<Path = P>>(
        &mut self,
        now: Nanoseconds,
        host: &mut H,
        buffer: &mut PacketBuffer,
        room: u32,
    ) -> Step {
        let response = match self.state.receives() || self.state == State::Error {
            true => self.send_response(now, host, buffer, room),
            false => Step::Idle,
        };
        match response {
            Step::Idle if self.state.sends() => self.send_request(now, host, buffer, room),
            response => response,
        }
    }

    /// Whether there may be something to send.
    pub(crate) fn may_send(&self) -> bool {
        self.responder.may_send() || self.requester.may_send()
    }

    /// Moves to another state.
    pub(crate) fn move_to<H: Host<Path = P>>(&mut self, state: State, host: &mut H) {
        self.state = state;
        match state {
            State::Error => {
                self.flush_requests(host);
                self.drop_message(host);
            }
            State::Sqe => self.flush_requests(host),
            State::Sqd => {
                self.requester.drained = false;
                self.check_drained(host);
            }
            State::Init | State::Rtr | State::Rts => {}
        }
    }

    /// Moves to error, if it is not there, for a reason that the device does not know yet.
    pub(crate) fn fail<H: Host<Path = P>>(&mut self, host: &mut H, event: Event) {
        if self.state != State::Error {
            self.move_to(State::Error, host);
        }
        host.event(self.number, event);
    }
}
