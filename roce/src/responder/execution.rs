//! The execution of a request's packet: what each operation does at the device, and the answers that are kept.

use super::{Answer, Failure, INVALID, Message, Resource};
use crate::headers::{Deth, Ieth, ImmDt, Packet, Reth};
use crate::host::{Atomic, Host, Received, Refusal, Right, Target};
use crate::opcodes::{Kind, Operation};
use crate::psn::Psn;
use crate::queue_pair::{MAX_MESSAGE, QueuePair};
use uverbs_uapi::wc::ib_wc_status;

impl<P: Clone> QueuePair<P> {
    /// From `send_data_in`.
    pub(super) fn receive_send<H: Host<Path = P>>(
        &mut self,
        host: &mut H,
        packet: &Packet<'_>,
    ) -> Result<(), Failure> {
        let target = Target { srq: None, address: 0, key: 0, length: 0 };
        let begun =
            self.responder.message.unwrap_or(Message { kind: Kind::Send, length: 0, target });
        let length = begun.length + packet.payload.len() as u32;
        if length > MAX_MESSAGE {
            return Err(INVALID);
        }
        self.write_receive(host, begun.length, packet.payload)?;
        self.responder.message = Some(Message { length, ..begun });
        Ok(())
    }

    fn write_receive<H: Host<Path = P>>(
        &self,
        host: &mut H,
        offset: u32,
        data: &[u8],
    ) -> Result<(), Failure> {
        let Some(receive) = self.responder.receive else { return Err(INVALID) };
        host.write_receive(self.number, receive, offset, data).map_err(|status| {
            let refusal = match status {
                ib_wc_status::IB_WC_LOC_LEN_ERR => Refusal::InvalidRequest,
                _ => Refusal::Operational,
            };
            Failure::Receive(status, refusal)
        })
    }

    /// The message that a packet of a write is part of: its memory is checked when it begins. From `check_rkey`; rxe
    /// takes the receive of a write with immediate data before, so that a write that is refused uses one up.
    pub(super) fn write_message<H: Host<Path = P>>(
        &mut self,
        host: &mut H,
        packet: &Packet<'_>,
        srq: Option<u32>,
    ) -> Result<Message, Failure> {
        if let Some(message) = self.responder.message {
            return Ok(message);
        }
        let target = target(packet.reth.ok_or(INVALID)?, srq)?;
        host.check_remote(self.number, Right::Write, target)?;
        Ok(Message { kind: Kind::Write, length: 0, target })
    }

    /// From `write_data_in`.
    pub(super) fn receive_write<H: Host<Path = P>>(
        &mut self,
        host: &mut H,
        packet: &Packet<'_>,
        begun: Message,
    ) -> Result<(), Failure> {
        let left = begun.target.length - begun.length;
        let payload = packet.payload.len() as u32;
        let fits = match packet.opcode.operation.position().ends() {
            true => payload == left,
            false => payload < left,
        };
        if !fits {
            return Err(INVALID);
        }
        if payload > 0 {
            let part = begun.target.part(begun.length, payload);
            host.write_remote(self.number, part, packet.payload)?;
        }
        self.responder.message = Some(Message { length: begun.length + payload, ..begun });
        Ok(())
    }

    /// Makes the response to a new request the next one. The oldest resource goes, which was answered: it is the
    /// requester's duty not to need it (`check_resource`).
    fn keep(&mut self, first: Psn, psns: u32, answer: Answer) {
        let resources = &mut self.responder.resources;
        if resources.len() == usize::from(self.attributes.max_dest_rd_atomic) {
            resources.pop_front();
        }
        let until = match answer {
            Answer::Read(target) => target.length,
            Answer::Atomic(_) | Answer::Empty => 0,
        };
        let (pending, answered) = (Some(0), false);
        let streamed = self.responder.streamed;
        let kept = Resource { first, psns, answer, until, pending, answered, streamed };
        self.responder.resources.push_back(kept);
    }

    /// From `check_rkey` and `rxe_prepare_res`. The memory is read when the response is sent.
    pub(super) fn begin_read<H: Host<Path = P>>(
        &mut self,
        host: &mut H,
        packet: &Packet<'_>,
        srq: Option<u32>,
    ) -> Result<u32, Failure> {
        let target = target(packet.reth.ok_or(INVALID)?, srq)?;
        if !packet.payload.is_empty() {
            return Err(INVALID);
        }
        host.check_remote(self.number, Right::Read, target)?;
        let psns = self.attributes.mtu.packets(target.length);
        self.keep(packet.bth.psn(), psns, Answer::Read(target));
        Ok(psns)
    }

    /// From `atomic_reply`.
    pub(super) fn execute_atomic<H: Host<Path = P>>(
        &mut self,
        host: &mut H,
        packet: &Packet<'_>,
        srq: Option<u32>,
    ) -> Result<(), Failure> {
        let (target, change) = atomic(packet, srq)?;
        let aligned = target.address % u64::from(target.length) == 0;
        if !aligned || !packet.payload.is_empty() {
            return Err(INVALID);
        }
        host.check_remote(self.number, Right::Atomic, target)?;
        let old = host.atomic(self.number, target, change)?;
        self.keep(packet.bth.psn(), 1, Answer::Atomic(old));
        Ok(())
    }

    /// From `process_flush`.
    pub(super) fn execute_flush<H: Host<Path = P>>(
        &mut self,
        host: &mut H,
        packet: &Packet<'_>,
        srq: Option<u32>,
    ) -> Result<(), Failure> {
        let header = packet.feth.ok_or(INVALID)?;
        let target = target(packet.reth.ok_or(INVALID)?, srq)?;
        let (kind, level) = (header.kind(), header.level());
        if level > 1 || !packet.payload.is_empty() {
            return Err(INVALID);
        }
        host.check_remote(self.number, Right::Flush(kind, level), target)?;
        host.flush(self.number, target, kind, level)?;
        self.keep(packet.bth.psn(), 1, Answer::Empty);
        Ok(())
    }

    /// From `atomic_write_reply`.
    pub(super) fn execute_atomic_write<H: Host<Path = P>>(
        &mut self,
        host: &mut H,
        packet: &Packet<'_>,
        srq: Option<u32>,
    ) -> Result<(), Failure> {
        let target = target(packet.reth.ok_or(INVALID)?, srq)?;
        let data: [u8; 8] = packet.payload.try_into().map_err(|_| INVALID)?;
        if target.length != 8 || target.address % 8 != 0 {
            return Err(INVALID);
        }
        host.check_remote(self.number, Right::Write, target)?;
        host.atomic_write(self.number, target, data)?;
        self.keep(packet.bth.psn(), 1, Answer::Empty);
        Ok(())
    }

    /// Completes the receive of a message, if it has one. From `do_complete`.
    ///
    /// An invalidation that is refused is answered with a NAK, and its receive fails with `IB_WC_LOC_ACCESS_ERR`; rxe
    /// sends no NAK, and has `IB_WC_REM_INV_REQ_ERR` (`RESPST_ERR_INVALIDATE_RKEY`, class J). Nor does it send one if
    /// the completion finds no place in its CQ (`RESPST_ERR_CQ_OVERFLOW`, class G): here the peer is told, too.
    pub(super) fn end_message<H: Host<Path = P>>(
        &mut self,
        host: &mut H,
        from: &P,
        packet: &Packet<'_>,
        srq: Option<u32>,
    ) -> Result<(), Failure> {
        let message = self.responder.message.take();
        let (Some(message), true) = (message, packet.opcode.operation.completes_receive()) else {
            return Ok(());
        };
        let invalidated = packet.ieth.map(|Ieth { key }| key.get());
        if let Some(key) = invalidated {
            host.invalidate(self.number, srq, key)
                .map_err(|refusal| Failure::Receive(ib_wc_status::IB_WC_LOC_ACCESS_ERR, refusal))?;
        }
        let Some(receive) = self.responder.receive.take() else { return Ok(()) };
        let received = Received {
            length: message.length,
            write: message.kind == Kind::Write,
            immediate: packet.immdt.map(|ImmDt { data }| data.get()),
            invalidated,
            solicited: packet.bth.is_solicited(),
            source: packet.deth.map_or(self.attributes.destination, Deth::source),
            pkey: packet.bth.pkey.get(),
            from,
        };
        Ok(host.complete_receive(self.number, receive, Ok(received))?)
    }
}

/// The memory that an atomic names, and the change.
fn atomic(packet: &Packet<'_>, srq: Option<u32>) -> Result<(Target, Atomic), Failure> {
    if let Some(header) = packet.atomiceth {
        let (swap_or_add, compare) = (header.swap_or_add.get(), header.compare.get());
        let change = match packet.opcode.operation {
            Operation::CompareSwap => Atomic::CompareSwap { compare, swap: swap_or_add },
            _ => Atomic::FetchAdd { add: swap_or_add },
        };
        let (address, key) = (header.address.get(), header.key.get());
        return Ok((Target { srq, address, key, length: 8 }, change));
    }
    let header = packet.maskedeth.ok_or(INVALID)?;
    let (swap_or_add, swap_mask) = (header.swap_or_add.get(), header.swap_mask.get());
    let change = match packet.opcode.operation {
        Operation::MaskedCompareSwap => Atomic::MaskedCompareSwap {
            compare: header.compare.get(),
            compare_mask: header.compare_mask.get(),
            swap: swap_or_add,
            swap_mask,
        },
        _ => Atomic::MaskedFetchAdd { add: swap_or_add, boundary: swap_mask },
    };
    let (address, key, length) = (header.address.get(), header.key.get(), header.length.get());
    if !matches!(length, 4 | 8) {
        return Err(INVALID);
    }
    Ok((Target { srq, address, key, length }, change))
}

/// The memory that a RETH names.
fn target(reth: &Reth, srq: Option<u32>) -> Result<Target, Failure> {
    let (address, key, length) = (reth.address.get(), reth.key.get(), reth.length.get());
    if length > MAX_MESSAGE { Err(INVALID) } else { Ok(Target { srq, address, key, length }) }
}
