//! The responses that a requester gets: ACKs, NAKs and data, and what it repeats because of them or of a timeout.

use super::FOREVER;
use super::congestion::Congestion;
use crate::headers::{AtomicAckEth, Packet, Syndrome};
use crate::host::{Counter, Host};
use crate::mistake::Mistake;
use crate::opcodes::Operation;
use crate::psn::Psn;
use crate::queue_pair::QueuePair;
use crate::request::Work;
use crate::timers::{Nanoseconds, ack_timeout, rnr_timer};
use uverbs_uapi::wc::ib_wc_status;

impl<P: Clone> QueuePair<P> {
    /// Handles a response. Returns false for a unit that cannot be taken whole: nothing is counted or completed.
    ///
    /// From `rxe_completer`, `check_psn` and `check_ack`.
    pub(crate) fn handle_response<H: Host<Path = P>>(
        &mut self,
        now: Nanoseconds,
        host: &mut H,
        packet: &Packet<'_>,
    ) -> bool {
        if packet.packets > 1 {
            return self.handle_unit(now, host, packet);
        }
        self.handle_packet(now, host, packet);
        true
    }

    /// Takes packets from the middle of the response to the oldest request, as far as it was asked for. Data that
    /// cannot be written is left to the packet that fails.
    fn handle_unit<H: Host<Path = P>>(
        &mut self,
        now: Nanoseconds,
        host: &mut H,
        packet: &Packet<'_>,
    ) -> bool {
        let (mtu, psn) = (self.attributes.mtu.bytes(), packet.bth.psn());
        let requester = &self.requester;
        let Some(head) = requester.queue.front().filter(|head| head.begun) else { return false };
        let reads = matches!(head.request.work, Work::Read { .. })
            && packet.opcode.operation == Operation::ReadResponseMiddle
            && psn == requester.oldest
            && packet.packets <= requester.limit.since(psn)
            && psn.since(head.first) + packet.packets < head.psns
            && packet.payload.len() as u32 == mtu * packet.packets;
        let offset = psn.since(head.first).saturating_mul(mtu);
        if !reads || host.write_local(self.number, head.request.id, offset, packet.payload).is_err()
        {
            return false;
        }
        self.answer(now, host, psn.plus(packet.packets - 1), false, true);
        true
    }

    fn handle_packet<H: Host<Path = P>>(
        &mut self,
        now: Nanoseconds,
        host: &mut H,
        packet: &Packet<'_>,
    ) {
        let psn = packet.bth.psn();
        let requester = &self.requester;
        let in_flight = requester.limit.since(requester.oldest);
        if !psn.is_within(requester.oldest, in_flight) {
            // A duplicate, or the answer to nothing.
            if Mistake::AckTwice.is_planted() && psn == requester.oldest.before() && in_flight > 0 {
                self.acknowledge(now, host, psn.plus(2));
            }
            return;
        }
        let syndrome = packet.aeth.map(|aeth| aeth.syndrome());
        match (packet.opcode.operation, syndrome) {
            (Operation::Acknowledge, Some(Some(Syndrome::Ack))) => {
                let behind = if Mistake::AckOneTooFar.is_planted() { 2 } else { 1 };
                if !self.acknowledge(now, host, psn.plus(behind)) {
                    self.imply_nak(now, host);
                }
            }
            (Operation::Acknowledge, Some(Some(nak))) => {
                // A NAK acknowledges everything before it.
                if !self.acknowledge(now, host, psn) {
                    return self.imply_nak(now, host);
                }
                self.handle_nak(now, host, nak);
            }
            (Operation::ReadResponseMiddle, None) => self.handle_read_response(now, host, packet),
            (
                Operation::ReadResponseFirst
                | Operation::ReadResponseLast
                | Operation::ReadResponseOnly,
                Some(Some(Syndrome::Ack)),
            ) => self.handle_read_response(now, host, packet),
            (Operation::AtomicAcknowledge, Some(Some(Syndrome::Ack))) => {
                self.handle_atomic_response(now, host, packet)
            }
            // A reserved syndrome, or a NAK where there can be none.
            _ => self.fail_oldest_with_bad_response(host),
        }
    }

    fn fail_oldest_with_bad_response<H: Host<Path = P>>(&mut self, host: &mut H) {
        self.fail_oldest(host, ib_wc_status::IB_WC_BAD_RESP_ERR);
    }

    /// Completes the sends and writes before a PSN. Returns false if a response is missing among them: then a later
    /// one was not to be believed (`COMPST_ERROR_RETRY` in `check_psn`).
    fn acknowledge<H: Host<Path = P>>(&mut self, now: Nanoseconds, host: &mut H, end: Psn) -> bool {
        let before = self.requester.oldest;
        let mut whole = true;
        while let Some(head) = self.requester.queue.front() {
            if !head.begun {
                break;
            }
            if head.is_local() {
                self.complete_oldest(host);
                continue;
            }
            let reach = end.since(self.requester.oldest);
            if reach == 0 || reach >= Psn::HALF {
                break;
            }
            let left = head.end().since(self.requester.oldest);
            if head.request.work.is_answered() && !Mistake::AckCompletesRead.is_planted() {
                whole = false;
                break;
            }
            if reach < left {
                self.requester.oldest = end;
                break;
            }
            self.requester.oldest = head.end();
            self.complete_oldest(host);
        }
        self.settle(host);
        if self.requester.oldest != before {
            self.progress(now, self.requester.oldest.since(before));
        }
        self.check_drained(host);
        whole
    }

    /// Retries count anew after the progress of so many PSNs, and the timer starts again: `reset_retry_counters`.
    fn progress(&mut self, now: Nanoseconds, psns: u32) {
        let timeout = ack_timeout(self.attributes.timeout);
        let requester = &mut self.requester;
        requester.congestion.iter_mut().for_each(|congestion| congestion.grow(psns));
        if !Mistake::RetriesNotReset.is_planted() {
            requester.retries = 0;
        }
        requester.rnr_retries = 0;
        requester.repeating = false;
        // A receiver that was not ready has answered in the meantime.
        requester.waits_for_receiver = false;
        requester.timer = match requester.oldest == requester.limit {
            true => None,
            false => timeout.map(|timeout| now.saturating_add(timeout)),
        };
        // The cursor may not be behind what is complete.
        if requester.next == 0 {
            if let Some(head) =
                requester.queue.front().filter(|head| head.begun && !head.is_local())
            {
                requester.sent = requester.sent.max(requester.oldest.since(head.first));
            }
        }
    }

    /// Handles a NAK for the oldest packet; everything before it is complete. From `check_ack`.
    fn handle_nak<H: Host<Path = P>>(&mut self, now: Nanoseconds, host: &mut H, nak: Syndrome) {
        let status = match nak {
            Syndrome::Ack => return,
            Syndrome::RnrNak(code) => return self.wait_for_receiver(now, host, code),
            Syndrome::SequenceError => {
                host.count(self.number, Counter::SequenceNaks);
                return self.repeat_once(now, host);
            }
            Syndrome::InvalidRequest => ib_wc_status::IB_WC_REM_INV_REQ_ERR,
            Syndrome::AccessError => ib_wc_status::IB_WC_REM_ACCESS_ERR,
            Syndrome::OperationalError => ib_wc_status::IB_WC_REM_OP_ERR,
            Syndrome::InvalidRd => ib_wc_status::IB_WC_REM_INV_RD_REQ_ERR,
        };
        self.fail_oldest(host, status);
    }

    /// Waits as an RNR NAK asks for. From `COMPST_RNR_RETRY`.
    fn wait_for_receiver<H: Host<Path = P>>(&mut self, now: Nanoseconds, host: &mut H, code: u8) {
        let requester = &mut self.requester;
        if requester.waits_for_receiver {
            return;
        }
        host.count(self.number, Counter::RnrNaks);
        let again = requester.rnr_retries > 0;
        let rnr_retry = self.attributes.rnr_retry;
        if rnr_retry != FOREVER && requester.rnr_retries >= rnr_retry {
            return self.fail_oldest(host, ib_wc_status::IB_WC_RNR_RETRY_EXC_ERR);
        }
        requester.rnr_retries = requester.rnr_retries.saturating_add(1);
        // The peer answers: NAKs that come late for packets behind this one are not retries of the transport. This rule
        // is our own: `COMPST_RNR_RETRY` of rxe leaves the other counter as it is.
        requester.retries = 0;
        requester.congestion.iter_mut().for_each(Congestion::start_over);
        requester.waits_for_receiver = true;
        requester.timer = Some(now.saturating_add(rnr_timer(code)));
        if Mistake::RnrTimerNotRestarted.is_planted() && again {
            requester.timer = None;
        }
        requester.go_back();
    }

    /// A later response shows that one is missing.
    fn imply_nak<H: Host<Path = P>>(&mut self, now: Nanoseconds, host: &mut H) {
        host.count(self.number, Counter::ImpliedNaks);
        self.repeat_once(now, host);
    }

    /// Repeats what follows the oldest packet because of a NAK, once until there is progress or a timeout:
    /// `started_retry`.
    fn repeat_once<H: Host<Path = P>>(&mut self, now: Nanoseconds, host: &mut H) {
        if !self.requester.repeating && !self.requester.waits_for_receiver {
            self.repeat(now, host);
        }
    }

    /// Repeats what follows the oldest packet. From `COMPST_ERROR_RETRY`; 7 retries are seven here, and not for ever
    /// as in rxe.
    fn repeat<H: Host<Path = P>>(&mut self, now: Nanoseconds, host: &mut H) {
        let requester = &mut self.requester;
        if requester.oldest == requester.limit {
            return;
        }
        if requester.retries >= self.attributes.retry_count {
            return self.fail_oldest(host, ib_wc_status::IB_WC_RETRY_EXC_ERR);
        }
        requester.repeating = true;
        // As in RFC 5681, once for a packet that is lost again and again.
        if requester.retries == 0 {
            requester.congestion.iter_mut().for_each(Congestion::halve);
        }
        requester.retries += 1;
        requester.timer =
            ack_timeout(self.attributes.timeout).map(|timeout| now.saturating_add(timeout));
        if Mistake::TimeoutNotRestarted.is_planted() {
            requester.timer = None;
        }
        requester.go_back();
    }

    /// The timer has ended. From `retransmit_timer` and `rnr_nak_timer`.
    pub(crate) fn expire<H: Host<Path = P>>(&mut self, now: Nanoseconds, host: &mut H) {
        let requester = &mut self.requester;
        if requester.timer.is_none_or(|due| due > now) {
            return;
        }
        requester.timer = None;
        if requester.waits_for_receiver {
            requester.waits_for_receiver = false;
            requester.repeating = false;
            return;
        }
        if requester.oldest == requester.limit {
            return;
        }
        if requester.in_flight() == 0 {
            // The packets to be repeated have not left: the device had others to serve. That is no retry.
            let timeout = ack_timeout(self.attributes.timeout);
            requester.timer = timeout.map(|timeout| now.saturating_add(timeout));
            return;
        }
        host.count(self.number, Counter::Timeouts);
        self.repeat(now, host);
        self.requester.congestion.iter_mut().for_each(Congestion::start_over);
    }

    /// Takes the next packet of the response to a read. From `do_read`.
    ///
    /// A response counts by its PSN: if a read was repeated from its middle on, the repeated response begins with
    /// another opcode than the one it stands for. So only the length is checked, and where the response ends.
    fn handle_read_response<H: Host<Path = P>>(
        &mut self,
        now: Nanoseconds,
        host: &mut H,
        packet: &Packet<'_>,
    ) {
        let psn = packet.bth.psn();
        if !self.acknowledge(now, host, psn) && !Mistake::ReadGap.is_planted() {
            return self.imply_nak(now, host);
        }
        let mtu = self.attributes.mtu;
        let Some(head) = self.requester.queue.front().filter(|head| head.begun) else { return };
        let (request, at) = (&head.request, psn.since(head.first));
        let ends = at + 1 == head.psns;
        let offset = at * mtu.bytes();
        let is_read = matches!(request.work, Work::Read { .. });
        let expected = match request.work {
            Work::Read { .. } => mtu.payload(request.length, at),
            Work::Flush { .. } | Work::AtomicWrite { .. } => 0,
            _ => return self.fail_oldest_with_bad_response(host),
        };
        let position = packet.opcode.operation.position();
        // A read that was asked for in parts has ends in between, and after a repetition at other places.
        let in_parts = self.requester.congestion.is_some() && is_read && !ends;
        let ends_well = position.ends() == ends || in_parts;
        if packet.payload.len() != expected as usize || !ends_well {
            return self.fail_oldest_with_bad_response(host);
        }
        if expected > 0 {
            if let Err(status) = host.write_local(self.number, request.id, offset, packet.payload) {
                return self.fail_oldest(host, status);
            }
        }
        self.answer(now, host, psn, ends, is_read);
    }

    /// Takes the response to an atomic. From `do_atomic`.
    fn handle_atomic_response<H: Host<Path = P>>(
        &mut self,
        now: Nanoseconds,
        host: &mut H,
        packet: &Packet<'_>,
    ) {
        let psn = packet.bth.psn();
        if !self.acknowledge(now, host, psn) {
            return self.imply_nak(now, host);
        }
        let Some(head) = self.requester.queue.front().filter(|head| head.begun) else { return };
        let old = packet.atomicacketh.map(|AtomicAckEth { old }| old.get());
        let atomic = matches!(head.request.work, Work::Atomic { .. });
        let (Some(old), true) = (old, atomic) else {
            return self.fail_oldest_with_bad_response(host);
        };
        match host.write_old(self.number, head.request.id, old) {
            Ok(()) => self.answer(now, host, psn, true, false),
            Err(status) => self.fail_oldest(host, status),
        }
    }

    /// The response with this PSN is taken; it is the last one of the oldest request if it `ends`.
    fn answer<H: Host<Path = P>>(
        &mut self,
        now: Nanoseconds,
        host: &mut H,
        psn: Psn,
        ends: bool,
        read: bool,
    ) {
        let requester = &mut self.requester;
        let taken = psn.plus(1).since(requester.oldest);
        if read {
            requester.responses = requester.responses.saturating_sub(taken);
        }
        requester.oldest = psn.plus(1);
        if ends {
            self.complete_oldest(host);
        }
        self.settle(host);
        self.progress(now, taken);
        self.check_drained(host);
    }
}
