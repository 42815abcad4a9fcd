//! The answers of the responder: responses, ACKs and NAKs, and duplicates of requests that were answered before.

use super::{Answer, Resource};
use crate::headers::{Aeth, AtomicAckEth, Bth, PAYLOAD_WORD, Packet, PacketBuffer, Syndrome};
use crate::host::{Counter, Event, Host, Refusal, Source};
use crate::mistake::Mistake;
use crate::opcodes::{Kind, Opcode, Operation, Position};
use crate::psn::Psn;
use crate::queue_pair::{Attributes, Mtu, QueuePair, Step};
use crate::timers::Nanoseconds;

impl<P: Clone> QueuePair<P> {
    /// Answers a request again. From `duplicate_request`.
    pub(super) fn handle_duplicate<H: Host<Path = P>>(
        &mut self,
        host: &mut H,
        packet: &Packet<'_>,
    ) {
        host.count(self.number, Counter::Duplicates);
        let psn = packet.bth.psn();
        let mtu = self.attributes.mtu.bytes();
        let responder = &mut self.responder;
        if matches!(packet.opcode.operation.kind(), Kind::Send | Kind::Write) {
            // As `ack_psn` of rxe, which reads and atomics do not move.
            return responder
                .last_streamed()
                .into_iter()
                .for_each(|psn| responder.acknowledge(psn));
        }
        // The newest one that fits: after all PSNs an old one has the same.
        let mut kept = responder.resources.iter_mut().rev();
        let found = kept.find(|kept| psn.is_within(kept.first, kept.psns));
        let Some(kept) = found else { return };
        let at = psn.since(kept.first);
        match (kept.answer, packet.opcode.operation, packet.reth) {
            (Answer::Read(target), Operation::ReadRequest, Some(reth)) => {
                let offset = at * mtu;
                let rest = target.part(offset, target.length - offset);
                let length = reth.length.get();
                // A peer may ask for less again than at first.
                let is_part = length == rest.length || (1..rest.length).contains(&length);
                let same = rest.address == reth.address.get() && rest.key == reth.key.get();
                if !same || !is_part {
                    return;
                }
                // A response that is under way ends where it was to.
                let under_way = kept.pending.map_or(0, |_| kept.until);
                kept.until = under_way.max(offset + length);
            }
            (Answer::Atomic(_), operation, _) if operation.kind() == Kind::Atomic => {}
            (Answer::Empty, Operation::Flush | Operation::AtomicWrite, _) => {}
            _ => return,
        }
        kept.pending = Some(at);
    }

    /// Sends the next packet of a response, or at most `room` of them as a unit, or an ACK or NAK. Returns whether
    /// there was one.
    ///
    /// Responses go in the order of their requests: the peer takes a later one for a sign that the earlier one is lost.
    /// Between the packets of a long one requests are sent, as rxe's two tasks take turns: they are not to wait for the
    /// end of what a peer reads.
    pub(crate) fn send_response<H: Host<Path = P>>(
        &mut self,
        now: Nanoseconds,
        host: &mut H,
        buffer: &mut PacketBuffer,
        room: u32,
    ) -> Step {
        let responder = &mut self.responder;
        let pending = responder.resources.iter_mut().find_map(|kept| Some((kept.pending?, kept)));
        let Some((at, whole)) = pending else { return self.send_reply(host, buffer) };
        if core::mem::take(&mut responder.yields) {
            // An invalidation would take the key of the rest of the response.
            let request = match self.state.sends() && !self.requester.is_local_next() {
                true => self.send_request(now, host, buffer, room),
                false => Step::Idle,
            };
            return match request {
                Step::Idle => self.send_response(now, host, buffer, room),
                request => request,
            };
        }
        let kept = whole.cut(self.attributes.mtu);
        let left = leave_answer_in_place(self.number, self.attributes.mtu, host, &kept, at, room);
        whole.pending = Some(at + left.max(1)).filter(|next| *next < kept.psns);
        whole.answered |= whole.pending.is_none();
        responder.yields = whole.pending.is_some();
        let psn = kept.first.plus(at);
        // It acknowledges everything before it.
        if responder
            .reply
            .is_some_and(|(to, syndrome)| syndrome == Syndrome::Ack && to.is_before(psn))
        {
            responder.reply = None;
        }
        self.send_answer(host, buffer, kept, at, left).unwrap_or_else(|refusal| {
            self.responder.resources.clear();
            self.refuse(psn, refusal, Event::Refused(refusal));
            Step::Done(1)
        })
    }

    /// Sends the packet `at` of a response, with `left` others in place, or none. From `read_reply`, `send_atomic_ack`
    /// and `send_read_response_ack`.
    fn send_answer<H: Host<Path = P>>(
        &mut self,
        host: &mut H,
        buffer: &mut PacketBuffer,
        kept: Resource,
        at: u32,
        left: u32,
    ) -> Result<Step, Refusal> {
        let position = Position::of(at == 0, at + 1 == kept.psns);
        let operation = match (kept.answer, position) {
            (Answer::Atomic(_), _) => Operation::AtomicAcknowledge,
            (Answer::Empty, _) | (_, Position::Only) => Operation::ReadResponseOnly,
            (_, Position::First) => Operation::ReadResponseFirst,
            (_, Position::Middle) => Operation::ReadResponseMiddle,
            (_, Position::Last) => Operation::ReadResponseLast,
        };
        self.begin_response(buffer, operation, kept.first.plus(at));
        if operation != Operation::ReadResponseMiddle {
            buffer.header(&Aeth::new(Syndrome::Ack, self.responder.msn));
        }
        match kept.answer {
            Answer::Read(target) => {
                let mtu = self.attributes.mtu;
                let again = Mistake::ReadFromBegin.is_planted() && at > 0;
                let offset = if again { 0 } else { at * mtu.bytes() };
                let bytes = mtu.payload(target.length, at);
                if bytes > 0 && left == 0 {
                    let part = target.part(offset, bytes);
                    host.read_remote(self.number, part, buffer.payload(bytes as usize))?;
                }
            }
            Answer::Atomic(old) => buffer.header(&AtomicAckEth { old: old.into() }),
            Answer::Empty => {}
        }
        Ok(Step::sent(left.max(1), host.send(self.number, &self.attributes.path, buffer.finish())))
    }

    fn send_reply<H: Host<Path = P>>(&mut self, host: &mut H, buffer: &mut PacketBuffer) -> Step {
        let Some((psn, syndrome)) = self.responder.reply.take() else { return Step::Idle };
        if syndrome != Syndrome::Ack {
            self.responder.ahead = None;
        }
        self.begin_response(buffer, Operation::Acknowledge, psn);
        buffer.header(&Aeth::new(syndrome, self.responder.msn));
        let more = host.send(self.number, &self.attributes.path, buffer.finish());
        if let Some(event) = self.responder.failing.take() {
            self.fail(host, event);
        }
        Step::sent(1, more)
    }

    fn begin_response(&self, buffer: &mut PacketBuffer, operation: Operation, psn: Psn) {
        let opcode = Opcode { transport: self.transport, operation };
        let Attributes { pkey, destination, .. } = self.attributes;
        buffer.begin(&Bth::new(opcode, pkey, destination, psn));
    }
}

/// Leaves the payload of packet `at` of a response in place, and that of at most `room` if these are middle ones.
/// Returns how many.
fn leave_answer_in_place<H: Host>(
    number: u32,
    mtu: Mtu,
    host: &mut H,
    kept: &Resource,
    at: u32,
    room: u32,
) -> u32 {
    let Answer::Read(target) = kept.answer else { return 0 };
    let bytes = mtu.payload(target.length, at);
    if bytes == 0 || bytes % PAYLOAD_WORD != 0 || Mistake::ReadFromBegin.is_planted() {
        return 0;
    }
    let middle = at > 0 && at + 1 < kept.psns;
    let packets = if middle { room.min(kept.psns - 1 - at) } else { 1 };
    let part = target.part(at * mtu.bytes(), bytes * packets);
    host.leave_in_place(number, Source::Read(part), bytes, packets).min(packets)
}
