//! The requester: executes the WQEs of a send queue.
//!
//! Pairs with the responder. A queue pair has one message in flight, and gets its response at once
//! or never. So a fence never has to wait.

use uverbs_roce::timers::{ack_timeout, rnr_timer};
use uverbs_roce::{MAX_MESSAGE, Mtu, Psn};
use uverbs_uapi::mlx5::prm::qpc::{ads, qpc};
use uverbs_uapi::mlx5::prm::vport::roce_addr_layout;

use super::message::{Action, Datagram, Message, Request, Response};
use crate::device::Device;
use crate::fault::Side;
use crate::format::syndrome::{CqeError, Syndrome};
use crate::format::wqe::{
    AddressVector, CtrlSegment, DataSegment, DataSegments, Truncated, WqeSegments, op,
};
use crate::format::{event, frame};
use crate::object::mkey::{Access, AccessRight};
use crate::object::qp::{QpState, RetryTimer, Service};
use crate::object::send_queue::SendQueue;
use crate::object::table::KERNEL;
use crate::options::PortType;
use crate::recording::{DoorbellCounter, Entry};
use crate::scratch::Scratch;

/// `rnr_retry` value that never runs out.
const FOREVER: u8 = 7;

/// A WQE whose message is in flight.
#[derive(Clone, Copy)]
pub(crate) struct InflightWqe<'r> {
    pub(crate) control: CtrlSegment,
    /// The segments that take response data.
    segments: DataSegments<'r>,
    len: u64,
}

/// Destination of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Destination {
    /// The port with this LID.
    Lid(u16),
    /// The port with this GID.
    Gid([u8; 16]),
    /// Every port with members of this multicast group.
    Group([u8; 16]),
}

/// A message with its WQE and its destination.
pub(crate) type Sending<'r> = (InflightWqe<'r>, Message<'r>, Destination);

/// The outcome of executing a queue's next WQE.
#[expect(clippy::large_enum_variant, reason = "a box would be an allocation for each message")]
pub(crate) enum NextWqe<'r> {
    /// The queue has no WQE to execute now.
    Idle,
    /// The WQE is done.
    Done,
    /// The WQE needs a message to another queue pair.
    Send(Sending<'r>),
}

impl Device {
    /// Executes the next WQE of a queue pair, and reads the WQE and the data to send into `request`.
    pub(crate) fn run_next_wqe<'r>(&mut self, qpn: u32, request: &'r mut Request) -> NextWqe<'r> {
        request.payload.clear();
        let Ok(qp) = self.objects.qps.get_mut(qpn) else { return NextWqe::Idle };
        match qp.state {
            QpState::ReadyToSend => match qp.retry_timer {
                Some(RetryTimer::At(due)) if due <= self.now => qp.retry_timer = None,
                Some(_) => return NextWqe::Idle,
                None => {}
            },
            QpState::SendError => {
                self.flush_sends(qpn);
                return NextWqe::Idle;
            }
            QpState::Error => {
                self.flush_sends(qpn);
                self.flush_receives(qpn);
                self.check_for_late_receives(qpn);
                return NextWqe::Idle;
            }
            _ => return NextWqe::Idle,
        }
        let Some(sq) = qp.sq.as_mut() else { return NextWqe::Idle };
        if let Err(why) = sq.read_doorbell_record(&self.memory) {
            log::warn!("QP {qpn:#x}: {why}");
            self.move_qp_to_error(qpn, Some(event::WQ_CATASTROPHIC));
            return NextWqe::Idle;
        }
        self.recorder.doorbell_record(
            self.now,
            DoorbellCounter::Sq,
            qpn,
            sq.producer_index().into(),
        );
        if !sq.has_pending() {
            return NextWqe::Idle;
        }
        let control = match sq.read_next_wqe(&self.memory, &mut request.wqe) {
            Ok(control) => control,
            Err(why) => {
                log::warn!("QP {qpn:#x}: {why}");
                self.move_qp_to_error(qpn, Some(event::WQ_CATASTROPHIC));
                return NextWqe::Idle;
            }
        };
        let entry = Entry::Wqe {
            service: qp.context.get(qpc::st) as u8,
            blue_flame: sq.has_blue_flame_wqe(),
            index: sq.consumer_index(),
            number: qpn,
            bytes: &request.wqe[..],
        };
        self.recorder.add(self.now, &entry);
        let user = self.objects.qps.owner(qpn) != KERNEL;
        if let Some(cause) = self.faults.wqe_fault(qpn, user, Side::Send) {
            self.fail_wqe(qpn, &control, cause);
            return NextWqe::Done;
        }
        match self.execute_wqe(qpn, control, request) {
            Ok(None) => {
                self.complete_wqe(qpn, &control, 0, &[]);
                NextWqe::Done
            }
            Ok(Some(send)) => NextWqe::Send(send),
            Err(syndrome) => {
                self.fail_wqe(qpn, &control, syndrome.into());
                NextWqe::Done
            }
        }
    }

    /// Whether the queue pair may have a WQE whose doorbell has come. A further doorbell, a timer and a change of
    /// its state schedule it by themselves.
    pub(crate) fn has_rung_sends(&self, qpn: u32) -> bool {
        let queue = self.objects.qps.find(qpn).and_then(|qp| qp.sq.as_ref());
        queue.is_some_and(SendQueue::has_rung)
    }

    /// Whether the queue pair gets responses.
    pub(crate) fn is_reliable(&self, qpn: u32) -> bool {
        self.objects.qps.get(qpn).is_ok_and(|qp| qp.service.reliable())
    }

    /// Checks later whether the driver has posted a receive to a queue pair in error state, since
    /// receives have no doorbell register. A program that drains a queue posts a receive and waits
    /// for its flush error. The interval doubles each time, for four seconds in all.
    fn check_for_late_receives(&mut self, qpn: u32) {
        const FIRST: u64 = 1_000_000;
        const MOST: u8 = 12;
        let Ok(qp) = self.objects.qps.get_mut(qpn) else { return };
        let has_timer = matches!(qp.retry_timer, Some(RetryTimer::At(due)) if due > self.now);
        if qp.rq.is_none() || has_timer || qp.late_receive_checks == MOST {
            return;
        }
        let wait = FIRST << qp.late_receive_checks;
        qp.late_receive_checks += 1;
        self.start_retry_timer(qpn, wait);
    }

    /// Advances past the WQE and reports it if it is signaled.
    fn complete_wqe(&mut self, qpn: u32, control: &CtrlSegment, len: u32, data: &[u8]) {
        let Ok(qp) = self.objects.qps.get_mut(qpn) else { return };
        qp.retries = 0;
        qp.rnr_retries = 0;
        let index = qp.sq.as_mut().map_or(0, |sq| {
            let index = sq.consumer_index();
            sq.advance(control.wqebbs());
            index
        });
        if control.signaled() {
            self.complete_send(qpn, control.opcode, index, len, data);
        }
    }

    /// Reports a WQE as failed and stops the queue pair.
    fn fail_wqe(&mut self, qpn: u32, control: &CtrlSegment, cause: CqeError) {
        let Ok(qp) = self.objects.qps.get_mut(qpn) else { return };
        let fails_whole_qp = qp.service.reliable() || qp.service == Service::Umr;
        let index = qp.sq.as_mut().map_or(0, |sq| {
            let index = sq.consumer_index();
            sq.advance(control.wqebbs());
            index
        });
        self.fail_send(qpn, control.opcode, index, cause);
        if fails_whole_qp {
            return self.move_qp_to_error(qpn, None);
        }
        // UC and datagrams only stop sending (state SQE).
        if let Ok(qp) = self.objects.qps.get_mut(qpn) {
            qp.state = QpState::SendError;
        }
        self.schedule(qpn);
    }

    fn flush_sends(&mut self, qpn: u32) {
        let mut wqe = Vec::new();
        for _ in 0..1 << 16 {
            let Ok(qp) = self.objects.qps.get_mut(qpn) else { return };
            let Some(sq) = qp.sq.as_mut() else { return };
            if sq.read_doorbell_record(&self.memory).is_err() || !sq.has_pending() {
                return;
            }
            let index = sq.consumer_index();
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

    /// Parses a WQE and executes its local part.
    fn execute_wqe<'r>(
        &mut self,
        qpn: u32,
        control: CtrlSegment,
        request: &'r mut Request,
    ) -> Result<Option<Sending<'r>>, Syndrome> {
        let Request { wqe, payload } = request;
        let Ok(qp) = self.objects.qps.get(qpn) else { return Err(Syndrome::LocalQpOperation) };
        let Some(sq) = &qp.sq else { return Err(Syndrome::LocalQpOperation) };
        if control.wqe_index != sq.consumer_index() || control.qpn != qpn || control.ds == 0 {
            log::warn!("QP {qpn:#x}: WQE {control:?} at WQEBB {:#x}", sq.consumer_index());
            return Err(Syndrome::LocalQpOperation);
        }
        let (service, pd) = (qp.service, qp.pd);
        let mut segments = WqeSegments::new(&control, wqe);
        match control.opcode {
            op::NOP => return Ok(None),
            op::UMR => {
                let issuer = self.umr_issuer(qpn, qp);
                return self.umr(issuer, control.immediate, segments).map(|()| None);
            }
            op::LOCAL_INVAL => {
                let issuer = self.umr_issuer(qpn, qp);
                return self.local_invalidate(issuer, control.immediate).map(|()| None);
            }
            _ => {}
        }
        let short = |_: Truncated| Syndrome::LocalQpOperation;
        let srqn = match service {
            Service::Xrc => Some(segments.xrc().map_err(short)?),
            Service::Umr => return Err(Syndrome::LocalQpOperation),
            _ => None,
        };
        let vector = match service.datagram() {
            true => Some(segments.address_vector().map_err(short)?),
            false => None,
        };
        let reliable = service.reliable();
        let (remote, sends) = match control.opcode {
            op::SEND | op::SEND_IMM => (None, true),
            op::SEND_INVAL if reliable => (None, true),
            op::RDMA_WRITE | op::RDMA_WRITE_IMM if vector.is_none() => {
                (Some(segments.remote().map_err(short)?), true)
            }
            op::RDMA_READ
            | op::ATOMIC_CS
            | op::ATOMIC_FA
            | op::ATOMIC_MASKED_CS
            | op::ATOMIC_MASKED_FA
                if reliable =>
            {
                (Some(segments.remote().map_err(short)?), false)
            }
            _ => return Err(Syndrome::LocalQpOperation),
        };
        let atomic = !sends && control.opcode != op::RDMA_READ;
        let word = control.atomic_len();
        let change = match (atomic, word) {
            (true, Some(word)) => Some(segments.atomic(control.opcode, word).map_err(short)?),
            (true, None) => return Err(Syndrome::LocalQpOperation),
            (false, _) => None,
        };
        let data = segments.data_segments().map_err(short)?;
        let len = data.bytes();
        let mtu = self.path_mtu(qpn);
        let limit = if vector.is_some() { mtu.bytes() } else { MAX_MESSAGE };
        if len > limit.into() || atomic && Some(len) != word {
            return Err(Syndrome::LocalLength);
        }
        if sends {
            self.gather_data(qpn, pd, data, payload)?;
        }
        let payload = &payload[..];
        let action = match (control.opcode, remote, change) {
            (op::SEND_INVAL, ..) => Action::Send { invalidate: Some(control.immediate) },
            (_, None, _) => Action::Send { invalidate: None },
            (op::RDMA_READ, Some(remote), _) => {
                Action::Read { address: remote.address, key: remote.key, len }
            }
            (_, Some(remote), Some(change)) => {
                Action::Atomic { address: remote.address, key: remote.key, len, change }
            }
            (_, Some(remote), None) => Action::Write { address: remote.address, key: remote.key },
        };
        let immediate = matches!(control.opcode, op::SEND_IMM | op::RDMA_WRITE_IMM)
            .then_some(control.immediate);
        let Ok(qp) = self.objects.qps.get(qpn) else { return Err(Syndrome::LocalQpOperation) };
        let infiniband = self.options.port_type == PortType::InfiniBand;
        let path = qp.context.sub(qpc::primary_address_path);
        let (destination, datagram) = match &vector {
            Some(vector) => {
                // The immediate, and the data with its padding.
                let body = immediate.map_or(0, |_| 4) + payload.len().next_multiple_of(4);
                let (destination, datagram) = self.datagram(qpn, vector, body)?;
                (destination, Some(datagram))
            }
            None if infiniband => (Destination::Lid(path.get(ads::rlid) as u16), None),
            None => {
                let gid = path.span(ads::rgid_rip).try_into();
                (Destination::Gid(gid.map_err(|_| Syndrome::LocalQpOperation)?), None)
            }
        };
        let source_qpn = match service {
            Service::Smi => 0,
            Service::Gsi => 1,
            _ if qp.context.get(qpc::deth_sqpn) == 1 => 1,
            _ => qpn,
        };
        // In an address vector the priority is in the upper bits of the service level.
        let (source, priority) = match &vector {
            Some(vector) => (usize::from(vector.source), u16::from(vector.sl >> 1)),
            None => (path.get(ads::src_addr_index) as usize, path.get(ads::eth_prio) as u16),
        };
        let (source_gid, vlan) = match infiniband {
            true => ([0; 16], None),
            false => (self.port.roce_gid(source).unwrap_or_default(), self.port.roce_vlan(source)),
        };
        let packets = mtu.packets(len as u32);
        let message = Message {
            source_gid,
            vlan_tag: vlan.map(|vlan| priority << 13 | vlan),
            source_qpn,
            qpn: vector.map_or(qp.context.get32(qpc::remote_qpn), |vector| vector.qpn),
            source_lid: if infiniband { self.port.lid() } else { 0 },
            sl: vector.map_or(path.get(ads::sl) as u8, |vector| vector.sl),
            pkey: self.pkey(qpn),
            psn: qp.context.get32(qpc::next_send_psn),
            packets,
            action,
            payload,
            immediate,
            solicited: control.solicited(),
            srqn,
            datagram,
        };
        Ok(Some((InflightWqe { control, segments: data, len }, message, destination)))
    }

    /// The P_Key of a queue pair; 0, which is invalid, if its index is outside the table.
    pub(crate) fn pkey(&self, qpn: u32) -> u16 {
        let path = self.objects.qps.get(qpn).map(|qp| qp.context.sub(qpc::primary_address_path));
        let index = path.map_or(0, |path| path.get(ads::pkey_index));
        self.options.pkeys.get(index as usize).copied().unwrap_or(0)
    }

    /// The path MTU of a queue pair.
    fn path_mtu(&self, qpn: u32) -> Mtu {
        let code = self.objects.qps.get(qpn).map_or(0, |qp| qp.context.get32(qpc::mtu));
        // INIT2RTR demands a valid code of connected queue pairs only.
        Mtu::from_code(code as u8).unwrap_or(Mtu::Mtu4096)
    }

    /// `body` is the bytes of the packet between the DETH and the ICRC.
    fn datagram(
        &self,
        qpn: u32,
        vector: &AddressVector,
        body: usize,
    ) -> Result<(Destination, Datagram), Syndrome> {
        /// In the address vector's Q_Key: use that of the queue pair.
        const USE_QP_QKEY: u32 = 1 << 31;
        const MULTICAST_QPN: u32 = 0xff_ffff;
        const IPV4: u8 = 2;
        const IPV6: u8 = 1;
        let infiniband = self.options.port_type == PortType::InfiniBand;
        let Ok(qp) = self.objects.qps.get(qpn) else { return Err(Syndrome::LocalQpOperation) };
        let qkey = match vector.qkey & USE_QP_QKEY {
            0 => vector.qkey,
            _ => qp.context.get32(qpc::q_key),
        };
        let global = vector.global || !infiniband;
        let (source, l3) = if infiniband {
            (self.port.ib_gid(), 0)
        } else {
            let index = usize::from(vector.source);
            let Some(gid) = self.port.roce_gid(index) else {
                return Err(Syndrome::LocalQpOperation);
            };
            let entry = &self.port.gids[index];
            let v2 = entry.get(roce_addr_layout::roce_version) != 0;
            let v6 = entry.get(roce_addr_layout::roce_l3_type) != 0;
            (
                gid,
                if !v2 {
                    0
                } else if v6 {
                    IPV6
                } else {
                    IPV4
                },
            )
        };
        let grh = global.then(|| {
            let mut grh = [0; 40];
            // BTH 12, DETH 8, ICRC 4.
            let packet = (body + 24) as u16;
            if l3 == IPV4 {
                grh[20..24].copy_from_slice(&[0x45, vector.tclass, 0, 0]);
                // IPv4 20, UDP 8.
                grh[22..24].copy_from_slice(&(packet + 28).to_be_bytes());
                grh[28..30].copy_from_slice(&[vector.hop_limit, 17]);
                grh[32..36].copy_from_slice(&source[12..]);
                grh[36..40].copy_from_slice(&vector.gid[12..]);
                let sum = frame::checksum(&grh[20..40], 0);
                grh[30..32].copy_from_slice(&sum.to_be_bytes());
            } else {
                let first = 6 << 28 | u32::from(vector.tclass) << 20 | vector.flow_label;
                grh[..4].copy_from_slice(&first.to_be_bytes());
                // UDP 8.
                let payload = packet + if l3 == IPV6 { 8 } else { 0 };
                grh[4..6].copy_from_slice(&payload.to_be_bytes());
                grh[6] = if l3 == IPV6 { 17 } else { 0x1b };
                grh[7] = vector.hop_limit;
                grh[8..24].copy_from_slice(&source);
                grh[24..40].copy_from_slice(&vector.gid);
            }
            grh
        });
        let group = (vector.qpn == MULTICAST_QPN && global).then_some(vector.gid);
        let destination = match group {
            Some(group) => Destination::Group(group),
            None if infiniband => Destination::Lid(vector.lid),
            None => Destination::Gid(vector.gid),
        };
        Ok((destination, Datagram { qkey, grh, l3, group }))
    }

    /// Appends the data of segments of a WQE to `to`.
    pub(crate) fn gather_data<'w>(
        &self,
        qpn: u32,
        pd: u32,
        list: impl IntoIterator<Item = DataSegment<'w>>,
        to: &mut Scratch,
    ) -> Result<(), Syndrome> {
        for segment in list {
            match segment {
                DataSegment::Inline(bytes) => to.extend(bytes),
                DataSegment::Memory(sge) => {
                    let access = Access {
                        key: sge.key,
                        pd,
                        qpn,
                        right: AccessRight::LocalRead,
                        address: sge.address,
                        len: sge.len.into(),
                    };
                    self.dma_read(access, to).map_err(|why| {
                        log::debug!("send of QP {qpn:#x}: {why}");
                        Syndrome::LocalProtection
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Stores response data in memory, or returns it to be scattered to the CQE.
    fn store_response<'d>(
        &self,
        qpn: u32,
        wqe: &InflightWqe<'_>,
        data: &'d [u8],
    ) -> Result<&'d [u8], Syndrome> {
        let Ok(qp) = self.objects.qps.get(qpn) else { return Err(Syndrome::LocalQpOperation) };
        let room = qp.send_scatter_to_cqe().min(self.cqe_data_room(qp.send_cq()));
        let inline = wqe.control.signaled() && (1..=room).contains(&data.len());
        self.scatter(qpn, wqe.segments, data, !inline)?;
        Ok(if inline { data } else { &[] })
    }

    /// Writes response data to the SGEs of a WQE, or only checks that their mkeys allow it.
    fn scatter(
        &self,
        qpn: u32,
        list: DataSegments<'_>,
        mut data: &[u8],
        write: bool,
    ) -> Result<(), Syndrome> {
        let Ok(qp) = self.objects.qps.get(qpn) else { return Err(Syndrome::LocalQpOperation) };
        for segment in list {
            let DataSegment::Memory(sge) = segment else { return Err(Syndrome::LocalQpOperation) };
            let (part, rest) = data.split_at(data.len().min(sge.len as usize));
            data = rest;
            let access = Access {
                key: sge.key,
                pd: qp.pd,
                qpn,
                right: AccessRight::LocalWrite,
                address: sge.address,
                len: part.len() as u64,
            };
            let done = match write {
                true => self.dma_write(access, part),
                false => self.objects.check(access),
            };
            done.map_err(|_| Syndrome::LocalProtection)?;
        }
        Ok(())
    }

    fn count_sent(&mut self, message: &Message<'_>) {
        let (multicast, payload) = (message.is_multicast(), message.payload.len());
        self.rdma_sent.add_message(multicast, message.packets, payload);
    }

    /// Handles the response to a message; `read` is the data of a read.
    pub(crate) fn handle_response(
        &mut self,
        qpn: u32,
        wqe: &InflightWqe<'_>,
        message: &Message<'_>,
        response: Response,
        read: &[u8],
    ) {
        let Ok(qp) = self.objects.qps.get_mut(qpn) else { return };
        let control = &wqe.control;
        let service = qp.service;
        let path = qp.context.sub(qpc::primary_address_path);
        let timeout = ack_timeout(path.get(ads::ack_timeout) as u8);
        let retries = qp.context.get(qpc::retry_count) as u8;
        let rnr_retries = qp.context.get(qpc::rnr_retry) as u8;
        if !service.reliable() {
            // An unreliable service gets no response.
            self.count_sent(message);
            return self.complete_wqe(qpn, control, wqe.len as u32, &[]);
        }
        let word;
        let outcome = match response {
            Response::RnrNak(code) => {
                let exceeded = rnr_retries != FOREVER && qp.rnr_retries >= rnr_retries;
                qp.rnr_retries = qp.rnr_retries.saturating_add(1);
                self.objects.count_for_qp(qpn, |counter| {
                    counter.rnr_nak_retry_err = counter.rnr_nak_retry_err.wrapping_add(1)
                });
                if !exceeded {
                    return self.start_retry_timer(qpn, rnr_timer(code));
                }
                Err(Syndrome::ReceiverNotReady)
            }
            Response::Lost => {
                let Some(timeout) = timeout else {
                    qp.retry_timer = Some(RetryTimer::Never);
                    return;
                };
                let exceeded = qp.retries >= retries;
                qp.retries = qp.retries.saturating_add(1);
                self.objects.count_for_qp(qpn, |counter| {
                    counter.local_ack_timeout_err = counter.local_ack_timeout_err.wrapping_add(1)
                });
                if !exceeded {
                    return self.start_retry_timer(qpn, timeout);
                }
                Err(Syndrome::RetriesExceeded)
            }
            Response::InvalidRequest => Err(Syndrome::RemoteInvalidRequest),
            Response::AccessError => Err(Syndrome::RemoteAccess),
            Response::OperationError => Err(Syndrome::RemoteOperation),
            Response::Ack => Ok(&[][..]),
            Response::ReadData => self.store_response(qpn, wqe, read),
            // The device returns the old value of an 8-byte atomic in big endian, unless the driver
            // asked for host order.
            Response::AtomicResult(old) if wqe.len == 8 && !self.caps.host_order_atomics() => {
                word = old.to_be_bytes();
                self.store_response(qpn, wqe, &word)
            }
            Response::AtomicResult(old) => {
                word = old.to_le_bytes();
                self.store_response(qpn, wqe, &word[..wqe.len.min(8) as usize])
            }
        };
        match outcome {
            Ok(inline) => {
                self.count_sent(message);
                if let Ok(qp) = self.objects.qps.get_mut(qpn) {
                    let next = Psn::new(message.psn).plus(message.packets).get();
                    qp.context.set(qpc::next_send_psn, next.into());
                }
                self.complete_wqe(qpn, control, wqe.len as u32, inline);
            }
            Err(syndrome) => self.fail_wqe(qpn, control, syndrome.into()),
        }
    }
}
