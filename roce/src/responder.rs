//! The responder: executes the peer's requests in the order of their PSNs, and answers. `docs/TRANSPORT.md` draws its
//! states.
//!
//! From the kernel's `rxe_resp.c`; each rule names the function that it was read in. Rules that differ from rxe's say
//! so.

mod answers;
mod execution;

use crate::headers::{Feth, Packet, Syndrome, XrcEth};
use crate::host::{Counter, Event, Host, Refusal, Target};
use crate::mistake::Mistake;
use crate::opcodes::{Kind, Position, Transport};
use crate::psn::Psn;
use crate::queue_pair::{Attributes, Mtu, QueuePair, State};
use alloc::collections::VecDeque;
use uverbs_uapi::mr::ib_uverbs_access_flags as Access;
use uverbs_uapi::wc::ib_wc_status;

/// A message of which the last packet has not come.
#[derive(Clone, Copy, Debug)]
struct Message {
    kind: Kind,
    /// Bytes so far.
    length: u32,
    /// Where a write goes.
    target: Target,
}

/// A request that may have to be answered again: a responder resource, `struct resp_res` of rxe.
#[derive(Clone, Copy, Debug)]
struct Resource {
    first: Psn,
    psns: u32,
    answer: Answer,
    /// How many bytes of a read the response reaches: fewer than all if a shorter piece is asked for again.
    until: u32,
    /// The packet of the response that is sent next, if not all were.
    pending: Option<u32>,
    /// Whether all were sent once. Then the requester may have them, and more of its requests may come.
    answered: bool,
    /// [`Responder::streamed`] in front of it.
    streamed: Option<Psn>,
}

impl Resource {
    /// The request as if it ended where its response does.
    fn cut(self, mtu: Mtu) -> Resource {
        match self.answer {
            Answer::Read(target) if self.until < target.length => {
                let answer = Answer::Read(target.part(0, self.until));
                Resource { psns: mtu.packets(self.until), answer, ..self }
            }
            _ => self,
        }
    }
}

/// How a request is answered.
#[derive(Clone, Copy, Debug)]
enum Answer {
    /// With memory, which is read when the packet is sent.
    Read(Target),
    /// With the value that was in memory before. This is kept: the request must not be executed again.
    Atomic(u64),
    /// With a response without data: a flush or an atomic write.
    Empty,
}

/// Why a packet is not executed.
enum Failure {
    /// The peer is told to try again later.
    NotReady,
    /// The request is refused.
    Refused(Refusal),
    /// The receive failed with a status, and the peer gets this NAK.
    Receive(ib_wc_status, Refusal),
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Failure {
        Failure::Refused(refusal)
    }
}

const INVALID: Failure = Failure::Refused(Refusal::InvalidRequest);

/// The responder of a queue pair.
#[derive(Debug)]
pub(crate) struct Responder {
    expected: Psn,
    /// How many messages were executed.
    msn: u32,
    message: Option<Message>,
    /// The receive of the message, or on UC of one that was given up.
    receive: Option<u64>,
    /// Whether the peer knows by a NAK which packet is expected: `sent_psn_nak`.
    nak_sent: bool,
    /// The last packet of sends and writes that was executed: what an ACK names. One that named a read or an atomic would
    /// have rxe (`check_ack`) complete that without its data.
    streamed: Option<Psn>,
    /// The furthest packet that was dropped as early while a NAK waits in `reply`.
    ahead: Option<Psn>,
    /// The peer's last requests of reads, atomics, flushes and atomic writes, the oldest one first.
    resources: VecDeque<Resource>,
    /// The ACK or NAK to send when all responses are sent. Later ones take its place, so that one answers several
    /// packets that came together.
    reply: Option<(Psn, Syndrome)>,
    /// Whether the next packet is one of a request, if there is one: a response of several packets has sent one.
    yields: bool,
    /// Whether the device knows that the peer is there.
    established: bool,
    /// Why the queue pair moves to error when `reply` is sent.
    failing: Option<Event>,
}

impl Responder {
    pub(crate) fn new<P>(attributes: &Attributes<P>) -> Responder {
        Responder {
            expected: attributes.receive_psn,
            msn: 0,
            message: None,
            receive: None,
            nak_sent: false,
            streamed: None,
            ahead: None,
            resources: VecDeque::with_capacity(attributes.max_dest_rd_atomic.into()),
            reply: None,
            yields: false,
            established: false,
            failing: None,
        }
    }

    #[cfg(test)]
    pub(crate) fn capacity(&self) -> usize {
        self.resources.capacity() * size_of::<Resource>()
    }

    /// Makes this the PSN of the next packet: as if all others had been executed in between.
    #[cfg(test)]
    pub(crate) fn expect(&mut self, psn: Psn) {
        self.expected = psn;
    }

    /// The PSN of the next packet that is executed.
    pub(crate) fn next_psn(&self) -> Psn {
        self.expected
    }

    /// Whether there is a response to send.
    pub(crate) fn may_send(&self) -> bool {
        self.reply.is_some()
            || !self.resources.is_empty()
                && self.resources.iter().any(|kept| kept.pending.is_some())
    }

    /// Whether a NAK has yet to be sent that lets the peer go on.
    fn has_unsent_nak(&self) -> bool {
        matches!(self.reply, Some((_, Syndrome::SequenceError | Syndrome::RnrNak(_))))
    }

    /// Notes an early packet. If the NAK is never sent, because the packet that it names comes first, nothing else
    /// tells the peer to send this one again.
    fn drop_early(&mut self, psn: Psn) {
        if self.has_unsent_nak() && self.ahead.is_none_or(|furthest| furthest.is_before(psn)) {
            self.ahead = Some(psn);
        }
    }

    /// Replaces a NAK that was not sent, when the packet that it names was executed after all. The NAK may have taken
    /// the place of an ACK, and packets behind it may have been dropped. rxe sends every NAK at once.
    fn withdraw_nak(&mut self) {
        let missing = self.ahead.take().filter(|furthest| !furthest.is_before(self.expected));
        self.nak_sent = missing.is_some();
        self.reply = match missing {
            Some(_) => Some((self.expected, Syndrome::SequenceError)),
            None => self.last_streamed().map(|psn| (psn, Syndrome::Ack)),
        };
        self.ahead = missing;
        if Mistake::NakForgotten.is_planted() {
            (self.nak_sent, self.reply) = (false, None);
        }
    }

    /// The packet that an ACK of all that was executed names.
    fn last_streamed(&self) -> Option<Psn> {
        self.streamed.filter(|psn| psn.is_before(self.expected))
    }

    /// Asks for an ACK. A NAK that has not been sent tells more.
    fn acknowledge(&mut self, psn: Psn) {
        if matches!(self.reply, None | Some((_, Syndrome::Ack))) {
            self.reply = Some((psn, Syndrome::Ack));
        }
    }
}

impl<P: Clone> QueuePair<P> {
    /// Handles a request. Returns false for a unit that cannot be taken whole: nothing is counted, answered or
    /// completed.
    pub(crate) fn handle_request<H: Host<Path = P>>(
        &mut self,
        host: &mut H,
        from: &P,
        packet: &Packet<'_>,
    ) -> bool {
        if self.responder.failing.is_some() {
            return true;
        }
        let expected = self.transport.is_reliable() && packet.bth.psn() == self.responder.expected;
        if packet.packets > 1 && !expected {
            return false;
        }
        if self.state == State::Rtr && !self.responder.established {
            self.responder.established = true;
            host.event(self.number, Event::CommunicationEstablished);
        }
        match self.transport {
            Transport::Rc | Transport::Xrc => return self.handle_reliable(host, from, packet),
            Transport::Uc => self.handle_unreliable(host, from, packet),
            Transport::Ud => {
                let executed = self.execute(host, from, packet);
                self.give_up(host, executed);
            }
        }
        true
    }

    /// From `check_psn`.
    fn handle_reliable<H: Host<Path = P>>(
        &mut self,
        host: &mut H,
        from: &P,
        packet: &Packet<'_>,
    ) -> bool {
        let psn = packet.bth.psn();
        let responder = &mut self.responder;
        let behind = match Mistake::PsnWithoutWrap.is_planted() {
            true => psn.get() < responder.expected.get(),
            false => psn.is_before(responder.expected),
        };
        if behind {
            let again = match packet.opcode.operation.kind() {
                Kind::Send => Mistake::SendTwice.is_planted(),
                Kind::Atomic => Mistake::AtomicTwice.is_planted(),
                _ => false,
            };
            if again {
                let _ = self.execute(host, from, packet);
            }
            self.handle_duplicate(host, packet);
            return true;
        }
        if psn != responder.expected {
            host.count(self.number, Counter::OutOfSequence);
            // One NAK: further packets tell nothing new until the expected one comes.
            if !responder.nak_sent {
                responder.nak_sent = true;
                responder.reply = Some((responder.expected, Syndrome::SequenceError));
            }
            responder.drop_early(psn);
            return true;
        }
        match self.execute(host, from, packet) {
            Ok(psns) => {
                let responder = &mut self.responder;
                responder.expected = psn.plus(psns);
                if packet.opcode.operation.position().ends() {
                    responder.msn = responder.msn.wrapping_add(1);
                }
                let streams = matches!(packet.opcode.operation.kind(), Kind::Send | Kind::Write);
                if streams {
                    responder.streamed = Some(responder.expected.before());
                }
                if responder.nak_sent {
                    responder.nak_sent = false;
                    if responder.has_unsent_nak() {
                        responder.withdraw_nak();
                    }
                }
                if streams && packet.bth.requests_ack() {
                    responder.acknowledge(psn);
                }
            }
            // The packet that fails is one of these. Those before it write the same data again.
            Err(_) if packet.packets > 1 => return false,
            Err(Failure::NotReady) => {
                host.count(self.number, Counter::OutOfBuffer);
                let timer = self.attributes.min_rnr_timer;
                let responder = &mut self.responder;
                responder.reply = Some((psn, Syndrome::RnrNak(timer)));
                // Packets in flight behind it are early, and have to be sent again anyway.
                responder.nak_sent = true;
            }
            Err(Failure::Refused(refusal)) => self.refuse(psn, refusal, Event::Refused(refusal)),
            Err(Failure::Receive(status, refusal)) => {
                self.fail_receive(host, status);
                self.refuse(psn, refusal, Event::ReceiveFailed);
            }
        }
        true
    }

    /// Answers with a NAK, after the responses to all earlier requests. Then the queue pair moves to error. From
    /// `do_class_ac_error`.
    fn refuse(&mut self, psn: Psn, refusal: Refusal, event: Event) {
        let syndrome = match refusal {
            Refusal::InvalidRequest => Syndrome::InvalidRequest,
            Refusal::Access => Syndrome::AccessError,
            Refusal::Operational => Syndrome::OperationalError,
        };
        self.responder.reply = Some((psn, syndrome));
        self.responder.failing = Some(event);
    }

    fn fail_receive<H: Host<Path = P>>(&mut self, host: &mut H, status: ib_wc_status) {
        if let Some(receive) = self.responder.receive.take() {
            // The peer gets the NAK of this status, whether or not it is reported here.
            let _ = host.complete_receive(self.number, receive, Err(status));
        }
    }

    /// Flushes the receive of a message that is not complete. The ACK or NAK that the peer is owed is still sent: the
    /// receives that it acknowledges are complete. Responses are not sent, so that an ACK names a send or a write in
    /// front of the first of them.
    pub(crate) fn drop_message<H: Host<Path = P>>(&mut self, host: &mut H) {
        self.fail_receive(host, ib_wc_status::IB_WC_WR_FLUSH_ERR);
        let responder = &mut self.responder;
        responder.message = None;
        if let Some(kept) = responder.resources.iter().find(|kept| kept.pending.is_some()) {
            let streamed = kept.streamed.filter(|psn| psn.is_before(kept.first));
            responder.reply = streamed.map(|psn| (psn, Syndrome::Ack));
        }
        responder.resources.clear();
    }

    /// From `check_psn`. A packet behind the expected one is dropped, where rxe would take it if a message begins
    /// with it: a network that doubles packets would deliver that message twice.
    fn handle_unreliable<H: Host<Path = P>>(
        &mut self,
        host: &mut H,
        from: &P,
        packet: &Packet<'_>,
    ) {
        let psn = packet.bth.psn();
        let begins = packet.opcode.operation.position().begins();
        let responder = &mut self.responder;
        if psn.is_before(responder.expected) && !(Mistake::UcTwice.is_planted() && begins) {
            host.count(self.number, Counter::Duplicates);
            return;
        }
        let gap = psn != responder.expected && (begins || !Mistake::UcGap.is_planted());
        if gap {
            host.count(self.number, Counter::OutOfSequence);
        }
        let responder = &mut self.responder;
        if gap || begins {
            // The message before this one has lost its end. Its receive is for the next one, and packets are refused
            // until that begins.
            responder.message = None;
        }
        responder.expected = psn.plus(1);
        if responder.message.is_none() && !begins {
            return;
        }
        let executed = self.execute(host, from, packet);
        self.give_up(host, executed);
    }

    /// An unreliable request that fails is dropped. On UC a refused one moves the queue pair to error, where rxe only
    /// drops it: no NAK tells of it. A receive that failed is reported, and moves the queue pair to error unless a
    /// datagram was too long for it. From `RESPST_ERR_LENGTH` and its neighbours in `rxe_responder`.
    fn give_up<H: Host<Path = P>>(&mut self, host: &mut H, executed: Result<u32, Failure>) {
        let Err(failure) = executed else { return };
        self.responder.message = None;
        match failure {
            Failure::NotReady => host.count(self.number, Counter::OutOfBuffer),
            Failure::Refused(refusal) if self.transport == Transport::Uc => {
                self.fail(host, Event::Refused(refusal));
            }
            Failure::Refused(_) => {}
            Failure::Receive(status, _) => {
                self.fail_receive(host, status);
                if self.transport != Transport::Ud || status != ib_wc_status::IB_WC_LOC_LEN_ERR {
                    self.fail(host, Event::ReceiveFailed);
                }
            }
        }
    }

    /// Executes a packet with the expected PSN. Returns how many PSNs the request takes with it.
    ///
    /// The order of checks is that of `check_op_seq`, `check_op_valid`, `check_resource`, `rxe_resp_check_length` and
    /// `check_rkey`; then `execute`.
    fn execute<H: Host<Path = P>>(
        &mut self,
        host: &mut H,
        from: &P,
        packet: &Packet<'_>,
    ) -> Result<u32, Failure> {
        let operation = packet.opcode.operation;
        let (kind, position) = (operation.kind(), operation.position());
        match &self.responder.message {
            Some(message) if position.begins() || message.kind != kind => return Err(INVALID),
            None if !position.begins() => return Err(INVALID),
            _ => {}
        }
        self.check_access(kind, packet.feth)?;
        let srq = packet.xrceth.map(XrcEth::srq);
        let write = match kind {
            Kind::Write => Some(self.write_message(host, packet, srq)?),
            _ => None,
        };
        let takes = match kind {
            Kind::Send => position.begins(),
            _ => operation.completes_receive(),
        };
        if takes && self.responder.receive.is_none() {
            let taken = host.take_receive(self.number, srq)?;
            self.responder.receive = Some(taken.ok_or(Failure::NotReady)?);
        }
        self.check_length(position, packet)?;
        match kind {
            Kind::Send => self.receive_send(host, packet)?,
            Kind::Write => self.receive_write(host, packet, write.ok_or(INVALID)?)?,
            Kind::Read => return self.begin_read(host, packet, srq),
            Kind::Atomic => self.execute_atomic(host, packet, srq)?,
            Kind::Flush => self.execute_flush(host, packet, srq)?,
            Kind::AtomicWrite => self.execute_atomic_write(host, packet, srq)?,
            Kind::Response => return Err(INVALID),
        }
        if position.ends() {
            self.end_message(host, from, packet, srq)?;
        }
        Ok(packet.packets)
    }

    /// Whether the queue pair allows the operation: `check_qp_attr_access`.
    fn check_access(&self, kind: Kind, feth: Option<&Feth>) -> Result<(), Failure> {
        let need = match kind {
            Kind::Send => Access::empty(),
            Kind::Write | Kind::AtomicWrite => Access::IB_UVERBS_ACCESS_REMOTE_WRITE,
            Kind::Read => Access::IB_UVERBS_ACCESS_REMOTE_READ,
            Kind::Atomic => Access::IB_UVERBS_ACCESS_REMOTE_ATOMIC,
            Kind::Flush => match feth.map_or(0, Feth::kind) {
                1 => Access::IB_UVERBS_ACCESS_FLUSH_GLOBAL,
                2 => Access::IB_UVERBS_ACCESS_FLUSH_PERSISTENT,
                3 => Access::IB_UVERBS_ACCESS_FLUSH_GLOBAL
                    .union(Access::IB_UVERBS_ACCESS_FLUSH_PERSISTENT),
                _ => return Err(INVALID),
            },
            Kind::Response => return Err(INVALID),
        };
        // More requests than are kept, as the oldest one was never answered: the peer's `max_rd_atomic` is too high.
        // rxe forgets the oldest one, and the peer's request fails after all its retries.
        let resources = &self.responder.resources;
        let full = resources.len() == usize::from(self.attributes.max_dest_rd_atomic)
            && resources.front().is_none_or(|oldest| !oldest.answered);
        let answered = !matches!(kind, Kind::Send | Kind::Write);
        let too_many = answered && full;
        if too_many || !self.attributes.access.contains(need) { Err(INVALID) } else { Ok(()) }
    }

    /// Whether the payload is as long as at this place of a message: `rxe_resp_check_length`.
    fn check_length(&self, position: Position, packet: &Packet<'_>) -> Result<(), Failure> {
        let (mtu, payload) = (self.attributes.mtu.bytes() as usize, packet.payload.len());
        let fits = match position {
            Position::Middle => payload == mtu * packet.packets as usize,
            Position::First => payload == mtu,
            Position::Last => (1..=mtu).contains(&payload),
            Position::Only => payload <= mtu,
        };
        if fits { Ok(()) } else { Err(INVALID) }
    }
}
