//! The responder: executes messages at their destination.
//!
//! Pairs with the requester. It checks everything that a message names: queue pair, state,
//! connection, PSN, and the access rights of queue pair and mkey.

use uverbs_roce::Psn;
use uverbs_uapi::mlx5::prm::qpc::{ads, qpc};

use super::message::{Action, Answer, Message, Response};
use crate::device::Device;
use crate::fault::Side;
use crate::format::event;
use crate::format::syndrome::Syndrome;
use crate::object::mkey::{Access, AccessRight};
use crate::object::qp::{QpState, Service};
use crate::object::receive_queue::ReceiveWqe;
use crate::object::table::KERNEL;
use crate::options::PortType;
use crate::port::share_partition;
use crate::recording::RqType;
use crate::scratch::Scratch;

/// Bytes in front of the data of a datagram.
const GRH: usize = 40;

impl Device {
    /// Executes a message; the data that it reads goes to `answer`.
    pub(crate) fn respond(&mut self, message: &Message<'_>, answer: &mut Answer) -> Response {
        let response = self.respond_checked(message, answer);
        if response != Response::Lost {
            let (multicast, payload) = (message.is_multicast(), message.payload.len());
            self.rdma_received.add_message(multicast, message.packets, payload);
        }
        response
    }

    /// The queue pair of a destination QPN: QPNs 0 and 1 are the ones of subnet management and
    /// general services.
    pub(crate) fn local_qpn(&self, qpn: u32) -> Option<u32> {
        let service = match qpn {
            0 => Service::Smi,
            1 => Service::Gsi,
            _ => return Some(qpn),
        };
        self.objects.qps.iter().find(|(_, qp)| qp.service == service).map(|(number, _)| number)
    }

    fn respond_checked(&mut self, message: &Message<'_>, answer: &mut Answer) -> Response {
        let Some(qpn) = self.local_qpn(message.qpn) else { return Response::Lost };
        let Ok(qp) = self.objects.qps.get(qpn) else { return Response::Lost };
        let receiving =
            matches!(qp.state, QpState::ReadyToReceive | QpState::ReadyToSend | QpState::SendError);
        if !receiving || qp.service.datagram() != message.datagram.is_some() {
            return Response::Lost;
        }
        // General services are there for all partitions of the port.
        if qp.service != Service::Gsi && !share_partition(self.pkey(qpn), message.pkey) {
            return Response::Lost;
        }
        if let Some(datagram) = &message.datagram {
            if datagram.qkey != qp.context.get32(qpc::q_key) {
                self.port.count_qkey_violation();
                return Response::Lost;
            }
            return self.consume_receive(qpn, message, answer).unwrap_or(Response::Ack);
        }
        // The same QPN exists on every port.
        let path = qp.context.sub(qpc::primary_address_path);
        let from_peer = match self.options.port_type {
            PortType::InfiniBand => path.get(ads::rlid) == u64::from(message.source_lid),
            PortType::Ethernet => path.span(ads::rgid_rip) == message.source_gid,
        };
        if !from_peer
            || qp.context.get32(qpc::remote_qpn) != message.source_qpn
            || (qp.service == Service::Xrc) != message.srqn.is_some()
        {
            return Response::Lost;
        }
        let xrcd = qp.context.get32(qpc::xrcd);
        if message.srqn.is_some_and(|srqn| !self.objects.xrc_srq_matches(srqn, xrcd)) {
            return self.invalid_request(qpn);
        }
        let expected = Psn::new(qp.context.get32(qpc::next_rcv_psn));
        let psn = Psn::new(message.psn);
        if qp.service.reliable() && psn != expected {
            if !psn.is_before(expected) {
                self.objects.count_for_qp(qpn, |counter| {
                    counter.out_of_sequence = counter.out_of_sequence.wrapping_add(1)
                });
                // An earlier message is missing; the requester will retry it.
                return Response::Lost;
            }
            return self.respond_to_duplicate(qpn, message, answer);
        }
        let response = self.execute_message(qpn, message, answer);
        let counts = !matches!(response, Response::RnrNak(_) | Response::Lost);
        if let Some(qp) = self.objects.qps.get_mut(qpn).ok().filter(|_| counts) {
            let next = psn.plus(message.packets).get();
            qp.context.set(qpc::next_rcv_psn, next.into());
        }
        response
    }

    /// A duplicate: the requester did not get the response.
    fn respond_to_duplicate(
        &mut self,
        qpn: u32,
        message: &Message<'_>,
        answer: &mut Answer,
    ) -> Response {
        self.objects.count_for_qp(qpn, |counter| {
            counter.duplicate_request = counter.duplicate_request.wrapping_add(1)
        });
        match message.action {
            Action::Read { .. } => self.execute_message(qpn, message, answer),
            Action::Atomic { .. } => {
                let last = self.objects.qps.get(qpn).ok().and_then(|qp| qp.last_atomic);
                match last {
                    Some((psn, old)) if psn == message.psn => Response::AtomicResult(old),
                    _ => Response::Lost,
                }
            }
            _ => Response::Ack,
        }
    }

    fn execute_message(
        &mut self,
        qpn: u32,
        message: &Message<'_>,
        answer: &mut Answer,
    ) -> Response {
        let Ok(qp) = self.objects.qps.get(qpn) else { return Response::Lost };
        let (pd, context) = (qp.pd, &qp.context);
        // An XRC request accesses memory of the SRQ's PD.
        let pd = match message.srqn.map(|srqn| self.objects.srqs.get(srqn)) {
            Some(Ok(srq)) => srq.pd,
            _ => pd,
        };
        let (writes, reads, atomics) =
            (context.is_set(qpc::rwe), context.is_set(qpc::rre), context.is_set(qpc::rae));
        let access = |right, key, address, len| Access { key, pd, qpn, right, address, len };
        match message.action {
            Action::Send { .. } => {
                self.consume_receive(qpn, message, answer).unwrap_or(Response::Ack)
            }
            Action::Write { address, key } => {
                if !writes {
                    return self.invalid_request(qpn);
                }
                let len = message.payload.len() as u64;
                let target = access(AccessRight::RemoteWrite, key, address, len);
                if len > 0 && self.dma_write(target, message.payload).is_err() {
                    return self.access_error(qpn);
                }
                self.objects.count_for_qp(qpn, |counter| {
                    counter.rx_write_requests = counter.rx_write_requests.wrapping_add(1)
                });
                if message.immediate.is_some() {
                    return self.consume_receive(qpn, message, answer).unwrap_or(Response::Ack);
                }
                Response::Ack
            }
            Action::Read { address, key, len } => {
                if !reads {
                    return self.invalid_request(qpn);
                }
                answer.data.clear();
                // Without data neither key is checked.
                if len == 0 {
                    return Response::ReadData;
                }
                let target = access(AccessRight::RemoteRead, key, address, len);
                match self.dma_read(target, &mut answer.data) {
                    Ok(()) => {
                        self.objects.count_for_qp(qpn, |counter| {
                            counter.rx_read_requests = counter.rx_read_requests.wrapping_add(1)
                        });
                        Response::ReadData
                    }
                    Err(_) => self.access_error(qpn),
                }
            }
            Action::Atomic { address, key, len, change } => {
                if !atomics || address % len != 0 {
                    return self.invalid_request(qpn);
                }
                let target = access(AccessRight::RemoteAtomic, key, address, len);
                let Ok(old) = self.dma_atomic(target, |old| change.apply(old)) else {
                    return self.access_error(qpn);
                };
                self.objects.count_for_qp(qpn, |counter| {
                    counter.rx_atomic_requests = counter.rx_atomic_requests.wrapping_add(1)
                });
                if let Ok(qp) = self.objects.qps.get_mut(qpn) {
                    qp.last_atomic = Some((message.psn, old));
                }
                Response::AtomicResult(old)
            }
        }
    }

    fn invalid_request(&mut self, qpn: u32) -> Response {
        self.move_qp_to_error(qpn, Some(event::WQ_INVALID_REQUEST));
        Response::InvalidRequest
    }

    fn access_error(&mut self, qpn: u32) -> Response {
        self.objects.count_for_qp(qpn, |counter| {
            counter.resp_remote_access_errors = counter.resp_remote_access_errors.wrapping_add(1)
        });
        self.move_qp_to_error(qpn, Some(event::WQ_ACCESS_ERROR));
        Response::AccessError
    }

    /// Consumes a receive for a message. Returns a response only if that failed.
    fn consume_receive(
        &mut self,
        qpn: u32,
        message: &Message<'_>,
        answer: &mut Answer,
    ) -> Option<Response> {
        let Answer { receive, datagram, .. } = answer;
        let Ok(qp) = self.objects.qps.get(qpn) else { return Some(Response::Lost) };
        let rnr = qp.context.get(qpc::min_rnr_nak) as u8;
        let pd = qp.pd;
        let shared = message.srqn.or(qp.srqn);
        let pd = match shared.map(|srqn| self.objects.srqs.get(srqn)) {
            Some(Ok(srq)) => srq.pd,
            _ => pd,
        };
        // This borrow of the queue ends before the memory is written.
        let peeked = match shared {
            Some(srqn) => self.objects.srqs.find(srqn).map(|srq| &srq.queue),
            None => self.objects.qps.find(qpn).and_then(|qp| qp.rq.as_ref()),
        };
        let peeked = peeked.map(|queue| queue.peek_into(&self.memory, receive));
        let refused = self.faults.refuses_receive();
        match peeked {
            Some(Ok(true)) if !refused => {}
            Some(Ok(_)) | None => {
                self.objects.count_for_qp(qpn, |counter| {
                    counter.out_of_buffer = counter.out_of_buffer.wrapping_add(1)
                });
                return Some(Response::RnrNak(rnr));
            }
            Some(Err(why)) => {
                log::warn!("QP {qpn:#x}: {why}");
                self.move_qp_to_error(qpn, Some(event::WQ_CATASTROPHIC));
                return Some(Response::OperationError);
            }
        }
        let (rq_type, number) = shared.map_or((RqType::Qp, qpn), |srqn| (RqType::Srq, srqn));
        receive.record(&mut self.recorder, self.now, rq_type, number);
        if let Some(queue) = self.objects.receive_queue(qpn, message.srqn) {
            queue.take(receive);
        }
        let user = self.objects.qps.owner(qpn) != KERNEL;
        let response = match self.faults.wqe_fault(qpn, user, Side::Receive) {
            Some(cause) => {
                self.fail_receive(qpn, message.srqn, receive.index, cause);
                self.move_qp_to_error(qpn, None);
                Some(Response::OperationError)
            }
            None => self.fill_receive(qpn, pd, message, receive, datagram),
        };
        if let Some(srqn) = shared {
            self.check_limit(srqn);
        }
        response
    }

    fn fill_receive(
        &mut self,
        qpn: u32,
        pd: u32,
        message: &Message<'_>,
        receive: &ReceiveWqe,
        whole: &mut Scratch,
    ) -> Option<Response> {
        let data = match (message.action, &message.datagram) {
            (Action::Send { .. }, Some(datagram)) => {
                whole.clear();
                whole.extend(&datagram.grh.unwrap_or([0; GRH]));
                whole.extend(message.payload);
                &whole[..]
            }
            (Action::Send { .. }, None) => message.payload,
            _ => &[],
        };
        let inline = self.scatters_to_cqe(qpn, message, data.len());
        let failed = if data.len() as u64 > receive.room() {
            Some((Syndrome::LocalLength, Response::InvalidRequest))
        } else {
            let mut rest = data;
            let mut failed = None;
            for sge in receive.sges() {
                let (part, left) = rest.split_at(rest.len().min(sge.len as usize));
                rest = left;
                if part.is_empty() {
                    break;
                }
                let target = Access {
                    key: sge.key,
                    pd,
                    qpn,
                    right: AccessRight::LocalWrite,
                    address: sge.address,
                    len: part.len() as u64,
                };
                // The driver copies data from the CQE to this address; check that the mkey allows
                // it.
                let done =
                    if inline { self.objects.check(target) } else { self.dma_write(target, part) };
                if let Err(why) = done {
                    log::debug!("receive of QP {qpn:#x}: {why}");
                    failed = Some((Syndrome::LocalProtection, Response::OperationError));
                    break;
                }
            }
            failed
        };
        if let Some((syndrome, response)) = failed {
            self.fail_receive(qpn, message.srqn, receive.index, syndrome.into());
            // A datagram that is too long is the sender's error and does not stop the receiver.
            if message.datagram.is_none() || syndrome == Syndrome::LocalProtection {
                self.move_qp_to_error(qpn, None);
            }
            return Some(response);
        }
        let invalidate = match message.action {
            Action::Send { invalidate } => invalidate,
            _ => None,
        };
        if invalidate.is_some_and(|key| !self.invalidate(qpn, key, pd)) {
            self.fail_receive(qpn, message.srqn, receive.index, Syndrome::LocalAccess.into());
            return Some(self.access_error(qpn));
        }
        let len = match message.action {
            Action::Send { .. } => data.len(),
            _ => message.payload.len(),
        };
        let inline = if inline { data } else { &[] };
        self.complete_receive(message, qpn, receive.index, len as u32, inline);
        None
    }

    /// Whether the data of a message is scattered to the CQE.
    fn scatters_to_cqe(&self, qpn: u32, message: &Message<'_>, len: usize) -> bool {
        let Ok(qp) = self.objects.qps.get(qpn) else { return false };
        let room = qp.receive_scatter_to_cqe().min(self.cqe_data_room(qp.receive_cq()));
        matches!(qp.service, Service::Rc | Service::Uc)
            && message.srqn.is_none()
            && (1..=room).contains(&len)
    }
}
