//! CQEs of queue pairs.
//!
//! Pairs with `struct mlx5_cqe64`.

use uverbs_roce::Received;
use uverbs_uapi::mlx5::prm::qpc::qpc;

use super::datagram::GRH;
use crate::device::Device;
use crate::format::cqe::{
    Cqe, REQUEST, REQUEST_ERROR, RESPONSE_ERROR, RESPONSE_SEND, RESPONSE_SEND_IMM,
    RESPONSE_SEND_INV, RESPONSE_WRITE_IMM, SOLICITED, VLAN_PRESENT,
};
use crate::format::event::{self, QueueType};
use crate::format::syndrome::{CqeError, Syndrome};
use crate::object::qp::{QpState, Service};
use crate::object::srq::SrqType;
use crate::object::timestamp::TimestampFormat;
use crate::path::Path;

/// `user_index` of an object that has none of its own.
const NO_INDEX: u32 = 0xff_ffff;

impl Device {
    /// Reports a send that succeeded. `data` is scattered to the CQE.
    pub(crate) fn complete_send(
        &mut self,
        qpn: u32,
        opcode: u8,
        index: u16,
        len: u32,
        data: &[u8],
    ) {
        self.compare_requests(qpn, index);
        let Ok(qp) = self.objects.qps.get(qpn) else { return };
        let mut cqe = Cqe::new(REQUEST);
        cqe.put(32, qp.context.get32(qpc::user_index));
        cqe.put(44, len);
        cqe.put(56, u32::from(opcode) << 24 | qpn);
        cqe.put16(60, index);
        let cqn = qp.send_cq();
        let first_half = cqe.put_inline(data, self.cqe_data_room(cqn));
        let format = qp.timestamps();
        let written = self.write_cqe_with_data(cqn, cqe.bytes(), first_half, format, false);
        self.stop_qp_unless_written(qpn, written);
    }

    /// Reports a send that failed.
    pub(crate) fn fail_send(&mut self, qpn: u32, opcode: u8, index: u16, cause: CqeError) {
        self.compare_requests(qpn, index);
        let Ok(qp) = self.objects.qps.get(qpn) else { return };
        log::debug!("send of QP {qpn:#x} at WQEBB {index:#x}, opcode {opcode:#x}: {cause:x?}");
        let mut cqe = Cqe::new(REQUEST_ERROR);
        cqe.put(32, qp.context.get32(qpc::user_index));
        cqe.put8(54, cause.vendor);
        cqe.put8(55, cause.syndrome);
        cqe.put(56, u32::from(opcode) << 24 | qpn);
        cqe.put16(60, index);
        let cqn = qp.send_cq();
        if let Some(counter) = self.objects.q_counter_of(qpn) {
            counter.count_send_error(cause.syndrome);
        }
        // Errors count as solicited, on either side.
        let written = self.write_cqe(cqn, cqe.bytes(), TimestampFormat::FreeRunning, true);
        self.stop_qp_unless_written(qpn, written);
    }

    /// Moves a queue pair to error if its CQE could not be written. Returns whether it was.
    fn stop_qp_unless_written(&mut self, qpn: u32, written: bool) -> bool {
        if !written {
            self.move_qp_to_error(qpn, Some(event::WQ_CATASTROPHIC));
        }
        written
    }

    /// The CQ and the user index of CQEs for receives.
    fn receive_cq_and_index(&self, qpn: u32, srqn: Option<u32>) -> Option<(u32, u32)> {
        let srq = srqn.and_then(|srqn| Some((srqn, self.objects.srqs.get(srqn).ok()?)));
        if let Some((srqn, SrqType::Xrc { cqn, user_index, .. })) =
            srq.map(|(srqn, srq)| (srqn, &srq.srq_type))
        {
            return Some((*cqn, if *user_index == NO_INDEX { srqn } else { *user_index }));
        }
        let qp = self.objects.qps.get(qpn).ok()?;
        Some((qp.receive_cq(), qp.context.get32(qpc::user_index)))
    }

    /// Reports a receive that succeeded. Returns whether the CQE was written.
    pub(crate) fn complete_receive(
        &mut self,
        qpn: u32,
        srqn: Option<u32>,
        index: u16,
        received: &Received<'_, Path>,
    ) -> bool {
        let Some((cqn, user_index)) = self.receive_cq_and_index(qpn, srqn) else { return false };
        let Some(qp) = self.objects.qps.find(qpn) else { return false };
        let datagram = qp.service.datagram();
        let Received { write, immediate, invalidated, solicited, from, .. } = *received;
        let opcode = match (invalidated, immediate) {
            (Some(_), _) => RESPONSE_SEND_INV,
            (None, None) => RESPONSE_SEND,
            (None, Some(_)) if write => RESPONSE_WRITE_IMM,
            (None, Some(_)) => RESPONSE_SEND_IMM,
        };
        let mut cqe = Cqe::new(opcode);
        let mut flags = u32::from(from.sl & 0xf) << 24 | received.source;
        if datagram && from.route.is_some() {
            flags |= 1 << 28;
            // On Ethernet these bits hold the type of the L3 header instead of the service level.
            if from.source.lid == 0 {
                flags = flags & !(0xf << 24) | (from.source.l3 as u32) << 24;
            }
        }
        // The kernel finds the interface that a datagram is for by its VLAN.
        if let Some(tag) = from.vlan_tag().filter(|_| datagram) {
            cqe.put8(29, VLAN_PRESENT).put16(30, tag);
        }
        cqe.put16(22, from.source.lid);
        cqe.put(24, flags);
        cqe.put(32, user_index);
        // A datagram without immediate data has its P_Key there.
        let pkey = if datagram { received.pkey.into() } else { 0 };
        cqe.put(36, invalidated.or(immediate).unwrap_or(pkey));
        cqe.put(44, received.length + if datagram { GRH as u32 } else { 0 });
        cqe.put(56, qpn);
        cqe.put16(60, index);
        if solicited {
            cqe.put8(63, opcode << 4 | SOLICITED);
        }
        let data = qp.receiving.data;
        let data = &data[..if write { 0 } else { qp.receiving.data_len }];
        let first_half = cqe.put_inline(data, self.cqe_data_room(cqn));
        let format = qp.timestamps();
        let written = self.write_cqe_with_data(cqn, cqe.bytes(), first_half, format, solicited);
        self.stop_qp_unless_written(qpn, written)
    }

    /// Reports a receive that failed.
    pub(crate) fn fail_receive(
        &mut self,
        qpn: u32,
        srqn: Option<u32>,
        index: u16,
        cause: CqeError,
    ) {
        let Some((cqn, user_index)) = self.receive_cq_and_index(qpn, srqn) else { return };
        if let Some(counter) = self.objects.q_counter_of(qpn) {
            counter.count_receive_error(cause.syndrome);
        }
        let mut cqe = Cqe::new(RESPONSE_ERROR);
        cqe.put(32, user_index);
        cqe.put8(54, cause.vendor);
        cqe.put8(55, cause.syndrome);
        cqe.put(56, qpn);
        cqe.put16(60, index);
        let written = self.write_cqe(cqn, cqe.bytes(), TimestampFormat::FreeRunning, true);
        self.stop_qp_unless_written(qpn, written);
    }

    /// Moves a queue pair to the error state and schedules it, so that its WQEs are flushed.
    pub(crate) fn move_qp_to_error(&mut self, qpn: u32, kind: Option<u8>) {
        let Ok(qp) = self.objects.qps.get_mut(qpn) else { return };
        if qp.state == QpState::Error {
            return;
        }
        qp.state = QpState::Error;
        // Nothing that arrives later is executed, and what follows are flushes and events.
        self.settle(Some(qpn));
        self.schedule(qpn);
        if let Some(kind) = kind {
            self.qp_event(qpn, kind);
        }
    }

    pub(crate) fn qp_event(&mut self, qpn: u32, kind: u8) {
        self.queue_event(QueueType::Pair, qpn, kind);
    }

    /// Flushes the receives of a queue pair in error state.
    pub(crate) fn flush_receives(&mut self, qpn: u32) {
        let Ok(qp) = self.objects.qps.get_mut(qpn) else { return };
        if qp.srqn.is_some() || qp.service == Service::Xrc {
            // Receives of an SRQ stay. One event tells the owner that this queue pair takes no more
            // of them. An XRC initiator never took any, although the driver gives it an SRQ.
            let sends_only = qp.service == Service::Xrc && qp.sq.is_some();
            if !std::mem::replace(&mut qp.last_wqe_reported, true) && !sends_only {
                self.qp_event(qpn, event::LAST_WQE_REACHED);
            }
            return;
        }
        // At most as many as a queue holds: the doorbell record may keep changing.
        for _ in 0..1 << 15 {
            let Ok(qp) = self.objects.qps.get_mut(qpn) else { return };
            let Some(queue) = qp.rq.as_mut() else { return };
            let Ok(Some(receive)) = queue.peek(&self.memory) else { return };
            queue.take(&receive);
            self.fail_receive(qpn, None, receive.index, Syndrome::Flushed.into());
        }
    }
}
