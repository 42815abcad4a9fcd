//! The requester: fetches the WQEs of a queue pair, and does for the transport what their requests need.
//!
//! Pairs with the responder. A WQE is *fetched* when its request is posted to the transport, and *completed* when the
//! transport says so; in between the request is in flight.

use uverbs_roce::opcodes::{Kind, Opcode};
use uverbs_roce::{MAX_MESSAGE, Request, Source, State, Work};
use uverbs_uapi::mlx5::prm::qpc::qpc;
use uverbs_uapi::wc::ib_wc_status;

use super::dma::{Accessor, Payload};
use super::transport::{Turn, path_mtu};
use crate::device::Device;
use crate::fault::{Delay, MAX_DELAY, MessageFate, Side};
use crate::format::event;
use crate::format::syndrome::{CqeError, Syndrome};
use crate::format::wqe::{CtrlSegment, DataSegment, Truncated, WqeSegments, op};
use crate::link::{Departing, InPlace, SHORTEST};
use crate::object::in_flight::SendRequest;
use crate::object::mkey::AccessRight;
use crate::object::qp::{Qp, QpState, Service};
use crate::object::send_queue::SendQueue;
use crate::object::table::KERNEL;
use crate::path::Path;
use crate::recording::{DoorbellCounter, Entry, Refusal};

impl Device {
    /// Serves a queue pair: fetches its next WQE, or flushes its WQEs in an error state. Returns whether there may be
    /// more to fetch now.
    pub(crate) fn serve_queue_pair(&mut self, qpn: u32) -> bool {
        match self.objects.qps.find(qpn).map(|qp| qp.state) {
            Some(QpState::ReadyToSend) => self.fetch_wqe(qpn),
            Some(QpState::SendError) => {
                self.flush_sends(qpn);
                false
            }
            Some(QpState::Error) => {
                // Requests in flight were posted first, so they are flushed first.
                self.transport(|endpoint, host| {
                    if endpoint.state(qpn).is_some_and(|state| state != State::Error) {
                        endpoint.move_to(host, qpn, State::Error);
                    }
                });
                self.flush_sends(qpn);
                self.flush_receives(qpn);
                self.check_for_late_receives(qpn);
                false
            }
            _ => false,
        }
    }

    /// Takes the next WQE out of a send queue, and posts its request. Returns whether there was one.
    fn fetch_wqe(&mut self, qpn: u32) -> bool {
        let room = self.endpoint.as_ref().map_or(0, |endpoint| endpoint.room(qpn));
        let Some(qp) = self.objects.qps.find_mut(qpn) else { return false };
        // The completion of a request in flight schedules the queue pair again.
        let Some(sq) = qp.sq.as_mut().filter(|_| room > 0) else { return false };
        let mut wqe = qp.in_flight.take_memory();
        let read = sq.read_doorbell_record(&self.memory).and_then(|()| {
            self.recorder.doorbell_record(
                self.now,
                DoorbellCounter::Sq,
                qpn,
                sq.producer_index().into(),
            );
            match sq.has_pending() {
                true => sq.read_next_wqe(&self.memory, &mut wqe).map(Some),
                false => Ok(None),
            }
        });
        let control = match read {
            Ok(Some(control)) => control,
            Ok(None) => {
                qp.in_flight.recycle(wqe);
                return false;
            }
            Err(why) => {
                log::warn!("QP {qpn:#x}: {why}");
                self.move_qp_to_error(qpn, Some(event::WQ_CATASTROPHIC));
                return false;
            }
        };
        let index = sq.fetched_index();
        let entry = Entry::Wqe {
            service: qp.context.get(qpc::st) as u8,
            blue_flame: sq.has_blue_flame_wqe(),
            index,
            number: qpn,
            bytes: &wqe[..],
        };
        self.recorder.add(self.now, &entry);
        sq.fetch(control.wqebbs());
        let id = qp.in_flight.next();
        let user = self.objects.qps.owner(qpn) != KERNEL;
        let parsed = match self.faults.wqe_fault(qpn, user, Side::Send) {
            Some(cause) => Err(cause),
            None => self.parse_wqe(qpn, index, &control, &wqe).map_err(CqeError::from),
        };
        let (request, head, fault) = match parsed {
            Ok((request, head)) => (Request { id, ..request }, head, None),
            // It fails in its turn.
            Err(cause) => (local_request(id, false), wqe.len(), Some(cause)),
        };
        let Some(qp) = self.objects.qps.find_mut(qpn) else { return false };
        qp.in_flight.push(SendRequest {
            index,
            control,
            wqe,
            head,
            len: request.length,
            fault,
            response: [0; 64],
            response_len: 0,
        });
        let posted = self.transport(|endpoint, _| endpoint.post(qpn, request));
        if let Some(Err(why)) = posted {
            log::error!("QP {qpn:#x}: {why}");
        }
        true
    }

    /// Whether the queue pair may have a WQE whose doorbell has come. A further doorbell and a change of
    /// its state schedule it by themselves.
    pub(crate) fn has_rung_sends(&self, qpn: u32) -> bool {
        let queue = self.objects.qps.find(qpn).and_then(|qp| qp.sq.as_ref());
        queue.is_some_and(SendQueue::has_rung)
    }

    /// The request of a WQE, and the bytes in front of its data segments.
    fn parse_wqe(
        &self,
        qpn: u32,
        index: u16,
        control: &CtrlSegment,
        wqe: &[u8],
    ) -> Result<(Request<Path>, usize), Syndrome> {
        let qp = self.objects.qps.find(qpn).ok_or(Syndrome::LocalQpOperation)?;
        if control.wqe_index != index || control.qpn != qpn || control.ds == 0 {
            log::warn!("QP {qpn:#x}: WQE {control:?} at WQEBB {index:#x}");
            return Err(Syndrome::LocalQpOperation);
        }
        if matches!(control.opcode, op::NOP | op::UMR | op::LOCAL_INVAL) {
            return Ok((local_request(0, control.fence()), wqe.len()));
        }
        let short = |_: Truncated| Syndrome::LocalQpOperation;
        let mut segments = WqeSegments::new(control, wqe);
        let srq = match qp.service {
            Service::Xrc => segments.xrc().map_err(short)?,
            Service::Umr => return Err(Syndrome::LocalQpOperation),
            _ => 0,
        };
        let vector = match qp.service.datagram() {
            true => Some(segments.address_vector().map_err(short)?),
            false => None,
        };
        // Only devices of one fabric know the packets of masked atomics.
        let private = matches!(control.opcode, op::ATOMIC_MASKED_CS | op::ATOMIC_MASKED_FA);
        if private && self.options.exposed.is_some() {
            return Err(Syndrome::LocalQpOperation);
        }
        let work = parse_operation(control, qp, &mut segments)?;
        let data = segments.data_segments().map_err(short)?;
        let head = usize::from(control.ds) * 16 - data.rest().len();
        let len = data.bytes();
        let limit = if vector.is_some() { path_mtu(qp).bytes() } else { MAX_MESSAGE };
        let word = matches!(work, Work::Atomic { .. }).then(|| control.atomic_len()).flatten();
        if len > limit.into() || word.is_some_and(|word| word != len) {
            return Err(Syndrome::LocalLength);
        }
        let takes_response = matches!(work, Work::Atomic { .. } | Work::Read { .. });
        let mut data = data;
        if takes_response && data.any(|segment| matches!(segment, DataSegment::Inline(_))) {
            return Err(Syndrome::LocalQpOperation);
        }
        let datagram = vector.map(|vector| self.datagram(qpn, qp, &vector)).transpose()?;
        let request = Request {
            id: 0,
            work,
            length: len as u32,
            fence: control.fence(),
            solicited: control.solicited(),
            srq,
            datagram,
        };
        Ok((request, head))
    }

    /// Decides the fate of a request that is sent, or sent again.
    pub(crate) fn decide_fate(&mut self, qpn: u32) {
        let fate = self.faults.message_fate();
        let Some(qp) = self.objects.qps.find_mut(qpn) else { return };
        qp.fate = fate;
        let late = match fate {
            MessageFate::Delivered => return,
            MessageFate::Lost => None,
            MessageFate::Delayed(Delay::Time(wait)) => Some(wait),
            MessageFate::Delayed(_) => Some(MAX_DELAY),
        };
        self.recorder.add(self.now, &Entry::Fate { number: qpn, late });
    }

    /// Sends a packet; returns whether the queue pair may send more in its turn.
    pub(crate) fn send_packet(
        &mut self,
        qpn: u32,
        to: &Path,
        packet: &[u8],
        turn: &mut Turn,
    ) -> bool {
        let Departing { in_place, request: owner } = std::mem::take(&mut self.departing);
        let Some(opcode) = packet.first().and_then(|byte| Opcode::from_byte(*byte)) else {
            return false;
        };
        let source = self.source(to);
        let request = opcode.operation.kind() != Kind::Response;
        if !request {
            self.settle(Some(qpn));
        }
        let Some(qp) = self.objects.qps.find_mut(qpn) else { return false };
        let ends = request && opcode.operation.position().ends();
        // The ACK or NAK that it owes leaves in error state, too.
        let lost = request && (qp.fate == MessageFate::Lost || qp.state == QpState::Error);
        let mut delay = None;
        if request {
            if let MessageFate::Delayed(by) = qp.fate {
                (delay, qp.fate) = (Some(by), MessageFate::Delivered);
            }
        }
        if !lost {
            let path = Path { source, ..*to };
            let mut flight = self.link.flight(qpn, path, packet);
            if let Some((in_place, packets)) = in_place {
                flight.leave_in_place(in_place, packets);
                flight.request = owner;
            }
            self.rdma_sent.add_packets(&flight.path, flight.packets, flight.octets);
            let holds = delay.is_some() || request && self.link.holds(qpn);
            if holds || !request && *turn != Turn::Packets {
                flight.copy_payload(&self.memory);
            }
            if holds {
                self.link.hold(self.now, flight, delay);
            } else {
                self.link.send(flight);
            }
            if ends {
                self.link.pass(qpn);
            }
        }
        !(ends && turn.end_request() || self.objects.cost.ends_turn())
    }

    /// Leaves data of at most `packets` packets in place, `len` bytes each. Returns of how many.
    pub(crate) fn leave_in_place(
        &mut self,
        qpn: u32,
        source: Source,
        len: usize,
        packets: u32,
    ) -> u32 {
        if len < SHORTEST {
            return 0;
        }
        let (located, request) = match source {
            Source::Request { id, offset } => {
                (self.locate_request_data(qpn, id, offset, len, packets), Some(id))
            }
            Source::Read(target) => {
                self.settle(Some(qpn));
                let access = self.target_access(qpn, AccessRight::RemoteRead, target);
                (access.ok().and_then(|access| self.locate(access, len)), None)
            }
        };
        let Some(in_place) = located else { return 0 };
        let packets = (in_place.len() / len) as u32;
        self.departing = Departing { in_place: Some((in_place, packets)), request };
        packets
    }

    fn locate_request_data(
        &self,
        qpn: u32,
        id: u64,
        offset: u32,
        len: usize,
        packets: u32,
    ) -> Option<InPlace> {
        let qp = self.objects.qps.find(qpn)?;
        // An unreliable request is complete when its last packet has left.
        if !qp.service.reliable() {
            return None;
        }
        // Packets with a fate of their own leave one by one.
        let packets =
            if qp.fate == MessageFate::Delivered && !self.link.holds(qpn) { packets } else { 1 };
        let (request, by) = self.request(qpn, id).ok()?;
        self.locate_segment(by, request.data(), offset.into(), len, packets)
    }

    /// Reads data of a request from `offset` on.
    pub(crate) fn read_request_data(
        &mut self,
        qpn: u32,
        id: u64,
        offset: u32,
        to: &mut [u8],
    ) -> Result<(), Syndrome> {
        let (request, by) = self.request(qpn, id)?;
        self.gather(by, request.data(), offset.into(), to)
    }

    /// Writes data of a response from `offset` on, or keeps it for the CQE.
    pub(crate) fn write_response_data(
        &mut self,
        qpn: u32,
        id: u64,
        offset: u32,
        data: Payload<'_>,
    ) -> Result<(), Syndrome> {
        let (request, by) = self.request(qpn, id)?;
        let qp = self.objects.qps.find(qpn).ok_or(Syndrome::LocalQpOperation)?;
        let room = qp.send_scatter_to_cqe().min(self.cqe_data_room(qp.send_cq()));
        let inline = request.control.signaled() && (1..=room).contains(&(request.len as usize));
        let sges = request.data().filter_map(|segment| match segment {
            DataSegment::Memory(sge) => Some(sge),
            DataSegment::Inline(_) => None,
        });
        self.scatter(by, sges, offset.into(), data, !inline)?;
        if let (Payload::Bytes(data), true) = (data, inline) {
            let Some(qp) = self.objects.qps.find_mut(qpn) else { return Ok(()) };
            let Some(request) = qp.in_flight.get_mut(id) else { return Ok(()) };
            request.response[..data.len()].copy_from_slice(data);
            request.response_len = data.len();
        }
        Ok(())
    }

    /// Writes the old value that an atomic returns: an 8-byte one in big endian, unless the driver asked for host
    /// order.
    pub(crate) fn write_old_value(&mut self, qpn: u32, id: u64, old: u64) -> Result<(), Syndrome> {
        let len = self.request(qpn, id)?.0.len;
        match len == 8 && !self.caps.host_order_atomics() {
            true => self.write_response_data(qpn, id, 0, Payload::Bytes(&old.to_be_bytes())),
            false => {
                let word = old.to_le_bytes();
                let word = Payload::Bytes(&word[..len.min(8) as usize]);
                self.write_response_data(qpn, id, 0, word)
            }
        }
    }

    /// Executes a request that needs no packet.
    pub(crate) fn run_local_request(&mut self, qpn: u32, id: u64) -> Result<(), Syndrome> {
        let Some(qp) = self.objects.qps.find_mut(qpn) else {
            return Err(Syndrome::LocalQpOperation);
        };
        let Some(request) = qp.in_flight.get_mut(id) else {
            return Err(Syndrome::LocalQpOperation);
        };
        if request.fault.is_some() {
            return Err(Syndrome::LocalQpOperation);
        }
        let (control, wqe) = (request.control, std::mem::take(&mut request.wqe));
        if matches!(control.opcode, op::UMR | op::LOCAL_INVAL) {
            self.settle_payloads();
        }
        let issuer = self.objects.qps.find(qpn).map(|qp| self.umr_issuer(qpn, qp));
        let done = match (issuer, control.opcode) {
            (Some(issuer), op::UMR) => {
                self.umr(issuer, control.immediate, WqeSegments::new(&control, &wqe))
            }
            (Some(issuer), op::LOCAL_INVAL) => self.local_invalidate(issuer, control.immediate),
            _ => Ok(()),
        };
        if let Some(request) =
            self.objects.qps.find_mut(qpn).and_then(|qp| qp.in_flight.get_mut(id))
        {
            request.wqe = wqe;
        }
        done
    }

    /// A request in flight, and the accessor of its memory.
    fn request(&self, qpn: u32, id: u64) -> Result<(&SendRequest, Accessor), Syndrome> {
        let qp = self.objects.qps.find(qpn).ok_or(Syndrome::LocalQpOperation)?;
        let request = qp.in_flight.get(id).ok_or(Syndrome::LocalQpOperation)?;
        Ok((request, Accessor { qpn, pd: qp.pd }))
    }

    /// Completes the oldest request of a queue pair, and reports it if it is signaled or has failed.
    pub(crate) fn complete_request(&mut self, qpn: u32, id: u64, status: ib_wc_status) {
        self.settle(Some(qpn));
        self.link.copy_payloads(&self.memory, Some((qpn, id)));
        let Some(qp) = self.objects.qps.find_mut(qpn) else { return };
        let Some(request) = qp.in_flight.pop() else { return };
        let SendRequest { index, control, len, fault, response, response_len, .. } = request;
        let mut more = false;
        if let Some(sq) = &mut qp.sq {
            sq.complete(control.wqebbs());
            more = sq.has_rung();
        }
        qp.in_flight.recycle(request.wqe);
        if status == ib_wc_status::IB_WC_SUCCESS {
            if control.signaled() {
                self.complete_send(qpn, control.opcode, index, len, &response[..response_len]);
            }
        } else {
            let syndrome = Syndrome::of_status(status);
            if let Some(why) = refusal(syndrome) {
                self.recorder.add(self.now, &Entry::Refusal { number: qpn, why });
            }
            // A request that is flushed was not executed, so its fault is not the reason.
            let fault = fault.filter(|_| syndrome != Syndrome::Flushed);
            self.fail_send(qpn, control.opcode, index, fault.unwrap_or(syndrome.into()));
        }
        if more {
            self.schedule(qpn);
        }
    }

    /// Flushes the WQEs of a send queue that were not fetched.
    fn flush_sends(&mut self, qpn: u32) {
        let mut wqe = Vec::new();
        for _ in 0..1 << 16 {
            let Ok(qp) = self.objects.qps.get_mut(qpn) else { return };
            let Some(sq) = qp.sq.as_mut() else { return };
            if sq.read_doorbell_record(&self.memory).is_err() || !sq.has_pending() {
                return;
            }
            let index = sq.fetched_index();
            let opcode = match sq.read_next_wqe(&self.memory, &mut wqe) {
                Ok(control) => {
                    sq.advance(control.wqebbs());
                    control.opcode
                }
                // The WQE cannot be read, so the next one cannot be found: drop the rest.
                Err(_) => {
                    sq.discard_pending();
                    0
                }
            };
            self.fail_send(qpn, opcode, index, Syndrome::Flushed.into());
        }
    }
}

/// A request that needs no packet.
fn local_request(id: u64, fence: bool) -> Request<Path> {
    let (work, solicited, srq, datagram) = (Work::Local, false, 0, None);
    Request { id, work, length: 0, fence, solicited, srq, datagram }
}

/// The operation of a WQE, up to its data segments.
fn parse_operation(
    control: &CtrlSegment,
    qp: &Qp,
    segments: &mut WqeSegments<'_>,
) -> Result<Work, Syndrome> {
    let short = |_: Truncated| Syndrome::LocalQpOperation;
    let (reliable, datagram) = (qp.service.reliable(), qp.service.datagram());
    let immediate =
        matches!(control.opcode, op::SEND_IMM | op::RDMA_WRITE_IMM).then_some(control.immediate);
    match control.opcode {
        op::SEND | op::SEND_IMM => return Ok(Work::Send { immediate }),
        op::SEND_INVAL if reliable => return Ok(Work::SendInvalidate { key: control.immediate }),
        op::RDMA_WRITE | op::RDMA_WRITE_IMM if !datagram => {}
        op::RDMA_READ
        | op::ATOMIC_CS
        | op::ATOMIC_FA
        | op::ATOMIC_MASKED_CS
        | op::ATOMIC_MASKED_FA
            if reliable => {}
        _ => return Err(Syndrome::LocalQpOperation),
    }
    let remote = segments.remote().map_err(short)?;
    let (address, key) = (remote.address, remote.key);
    Ok(match control.opcode {
        op::RDMA_WRITE | op::RDMA_WRITE_IMM => Work::Write { address, key, immediate },
        op::RDMA_READ => Work::Read { address, key },
        opcode => {
            let word = control.atomic_len().ok_or(Syndrome::LocalQpOperation)?;
            let change = segments.atomic(opcode, word).map_err(short)?;
            Work::Atomic { address, key, change }
        }
    })
}

/// The NAK that failed a request.
fn refusal(syndrome: Syndrome) -> Option<Refusal> {
    Some(match syndrome {
        Syndrome::RemoteInvalidRequest => Refusal::InvalidRequest,
        Syndrome::RemoteAccess => Refusal::AccessError,
        Syndrome::RemoteOperation => Refusal::OperationError,
        _ => return None,
    })
}
