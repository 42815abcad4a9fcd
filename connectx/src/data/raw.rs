//! Ethernet frames, from raw send queues to raw receive queues.
//!
//! Pairs with mlx5e and raw packet queue pairs; [`crate::format::frame`] parses frames.

use uverbs_uapi::mlx5::prm::rqc::{rqc, rx_hash_field_select, sqc, tirc};

use super::dma::{Accessor, Payload};
use crate::device::Device;
use crate::format::cqe::{
    Cqe, REQUEST, REQUEST_ERROR, RESPONSE_ERROR, RESPONSE_SEND, VLAN_PRESENT,
};
use crate::format::event::{self, QueueType};
use crate::format::frame::{self, FrameHeaders};
use crate::format::syndrome::{CqeError, Syndrome};
use crate::format::wqe::{CtrlSegment, WqeSegments, op};
use crate::object::flow_table::{NIC_RECEIVE, NIC_TRANSMIT};
use crate::object::mkey::{Access, AccessRight};
use crate::object::rq::WqState;
use crate::object::timestamp::TimestampFormat;
use crate::object::tir::{DIRECT, hash};
use crate::object::tis::Tis;
use crate::recording::{self, Entry, RqType};

/// The longest frame, and the most data of one LSO WQE.
const MAX_DATA: u64 = 1 << 18;
/// The most frames of one LSO WQE.
const MAX_FRAMES: u64 = 1 << 13;
/// Flags of the Ethernet segment: checksums that the device fills in.
const NETWORK_CHECKSUM: u8 = 1 << 6;
const TRANSPORT_CHECKSUM: u8 = 1 << 7;
/// In place of the length of inline headers: the segment holds a VLAN tag.
const INSERT_VLAN: u16 = 1 << 15;

/// Flags of a CQE: headers whose checks passed.
const L2_OK: u8 = 1 << 0;
const L3_OK: u8 = 1 << 1;
const L4_OK: u8 = 1 << 2;

/// The outcome of executing a raw send queue's next WQE.
pub(crate) enum NextFrames {
    /// The queue has no WQE to execute now.
    Idle,
    /// The WQE is done and sends nothing.
    Done,
    /// Frames, and the transport domain of the sender.
    Frames(Vec<Vec<u8>>, u32),
}

impl Device {
    /// Whether a number is that of a queue of frames: a raw send queue or a virtqueue.
    pub(crate) fn sends_frames(&self, number: u32) -> bool {
        self.objects.sqs.find(number).is_some() || self.objects.virtqs.find(number).is_some()
    }

    /// Executes the next WQE of a raw send queue, or takes the next chain of a virtqueue.
    pub(crate) fn run_next_frames(&mut self, number: u32) -> NextFrames {
        match self.objects.virtqs.find(number) {
            Some(_) => self.run_next_chain(number),
            None => self.run_next_raw_wqe(number),
        }
    }

    /// Frames that leave by a TIS after flow tables have seen them.
    pub(crate) fn let_out(&mut self, mut frames: Vec<Vec<u8>>, tisn: u32) -> NextFrames {
        if self.objects.flow_roots.tables.contains_key(&NIC_TRANSMIT) {
            frames.retain(|frame| {
                let headers = FrameHeaders::find(frame).as_match(frame);
                !self.steer(NIC_TRANSMIT, &headers, frame.len()).dropped
            });
        }
        for frame in &frames {
            self.port.sent.add_frame(frame);
        }
        let domain = self.objects.tises.get(tisn).map_or(0, Tis::transport_domain);
        NextFrames::Frames(frames, domain)
    }

    /// Executes the next WQE of a raw send queue.
    fn run_next_raw_wqe(&mut self, sqn: u32) -> NextFrames {
        let Ok(sq) = self.objects.sqs.get_mut(sqn) else { return NextFrames::Idle };
        match sq.state {
            WqState::Ready => {}
            WqState::Error => {
                self.flush_raw_sends(sqn);
                return NextFrames::Idle;
            }
            WqState::Reset => return NextFrames::Idle,
        }
        let mut bytes = Vec::new();
        let control = match sq.queue.read_doorbell_record(&self.memory) {
            Ok(()) if !sq.queue.has_pending() => return NextFrames::Idle,
            Ok(()) => sq.queue.read_next_wqe(&self.memory, &mut bytes),
            Err(why) => Err(why),
        };
        let control = match control {
            Ok(control) => control,
            Err(why) => {
                log::warn!("SQ {sqn:#x}: {why}");
                self.move_wq_to_error(QueueType::Send, sqn);
                return NextFrames::Idle;
            }
        };
        let index = sq.queue.consumer_index();
        let entry = Entry::Wqe {
            service: recording::SERVICE_RAW_SQ,
            blue_flame: sq.queue.has_blue_flame_wqe(),
            index,
            number: sqn,
            bytes: &bytes[..],
        };
        self.recorder.add(self.now, &entry);
        let pd = sq.pd;
        let tisn = sq.context.get32(sqc::tis_num_0);
        let wrong = control.wqe_index != index || control.qpn != sqn;
        let operation = |why| Err((Syndrome::LocalQpOperation, why));
        let frames = match control.opcode {
            _ if wrong => operation(format!("WQE {control:?} at WQEBB {index:#x}")),
            op::NOP => Ok(vec![]),
            op::SEND | op::LSO => self.build_frames(sqn, pd, &control, &bytes),
            opcode => operation(format!("opcode {opcode:#x}")),
        };
        let Ok(sq) = self.objects.sqs.get_mut(sqn) else { return NextFrames::Idle };
        sq.queue.advance(control.wqebbs());
        let cause = frames.as_ref().err().map(|(syndrome, _)| *syndrome);
        if cause.is_some() {
            sq.state = WqState::Error;
            self.schedule(sqn);
        }
        if control.signaled() || cause.is_some() {
            self.complete_raw_send(sqn, control.opcode, index, cause);
        }
        match frames {
            Ok(frames) if frames.is_empty() => NextFrames::Done,
            Ok(frames) => self.let_out(frames, tisn),
            Err((_, why)) => {
                log::warn!("SQ {sqn:#x}: {why}");
                NextFrames::Idle
            }
        }
    }

    /// Reports a WQE of a raw send queue.
    fn complete_raw_send(&mut self, sqn: u32, opcode: u8, index: u16, cause: Option<Syndrome>) {
        let Ok(sq) = self.objects.sqs.get(sqn) else { return };
        let mut cqe = Cqe::new(if cause.is_some() { REQUEST_ERROR } else { REQUEST });
        cqe.put(32, sq.context.get32(sqc::user_index));
        cqe.put(56, u32::from(opcode) << 24 | sqn);
        cqe.put16(60, index);
        if let Some(cause) = cause.map(CqeError::from) {
            cqe.put8(54, cause.vendor).put8(55, cause.syndrome);
        }
        let cqn = sq.context.get32(sqc::cqn);
        let format = TimestampFormat::of(sq.context.get(sqc::ts_format));
        if !self.write_cqe(cqn, cqe.bytes(), format, cause.is_some()) {
            self.move_wq_to_error(QueueType::Send, sqn);
        }
    }

    /// Flushes a raw send queue in error state.
    fn flush_raw_sends(&mut self, sqn: u32) {
        let mut wqe = Vec::new();
        for _ in 0..1 << 16 {
            let Ok(sq) = self.objects.sqs.get_mut(sqn) else { return };
            if sq.queue.read_doorbell_record(&self.memory).is_err() || !sq.queue.has_pending() {
                return;
            }
            let index = sq.queue.consumer_index();
            let opcode = match sq.queue.read_next_wqe(&self.memory, &mut wqe) {
                Ok(control) => {
                    sq.queue.advance(control.wqebbs());
                    control.opcode
                }
                // The WQE cannot be read, so the next one cannot be found: drop the rest.
                Err(_) => {
                    sq.queue.discard_pending();
                    0
                }
            };
            self.complete_raw_send(sqn, opcode, index, Some(Syndrome::Flushed));
        }
    }

    /// Moves a raw queue to error and raises an event.
    fn move_wq_to_error(&mut self, queue: QueueType, number: u32) {
        let state = match queue {
            QueueType::Send => self.objects.sqs.get_mut(number).ok().map(|sq| &mut sq.state),
            _ => self.objects.rqs.get_mut(number).ok().map(|rq| &mut rq.state),
        };
        let Some(state) = state.filter(|state| **state != WqState::Error) else { return };
        *state = WqState::Error;
        self.queue_event(queue, number, event::WQ_CATASTROPHIC);
        match queue {
            QueueType::Send => self.schedule(number),
            _ => self.flush_raw_receives(number),
        }
    }

    /// Reports a receive of a raw queue that failed.
    fn fail_raw_receive(&mut self, rqn: u32, index: u16, cause: Syndrome) {
        let Ok(rq) = self.objects.rqs.get(rqn) else { return };
        let cause = CqeError::from(cause);
        let mut cqe = Cqe::new(RESPONSE_ERROR);
        cqe.put(32, rq.context.get32(rqc::user_index));
        cqe.put8(54, cause.vendor).put8(55, cause.syndrome);
        cqe.put(56, rqn);
        cqe.put16(60, index);
        let cqn = rq.context.get32(rqc::cqn);
        if !self.write_cqe(cqn, cqe.bytes(), TimestampFormat::FreeRunning, true) {
            self.move_wq_to_error(QueueType::Receive, rqn);
        }
    }

    /// Flushes a raw receive queue in error state.
    pub(crate) fn flush_raw_receives(&mut self, rqn: u32) {
        // At most as many as a queue holds: the doorbell record may keep changing.
        for _ in 0..1 << 15 {
            let Ok(rq) = self.objects.rqs.get_mut(rqn) else { return };
            let Ok(Some(receive)) = rq.queue.peek(&self.memory) else { return };
            rq.queue.take(&receive);
            self.fail_raw_receive(rqn, receive.index, Syndrome::Flushed);
        }
    }

    /// Builds the frames of a WQE.
    fn build_frames(
        &self,
        sqn: u32,
        pd: u32,
        control: &CtrlSegment,
        bytes: &[u8],
    ) -> Result<Vec<Vec<u8>>, (Syndrome, String)> {
        let operation = |why| (Syndrome::LocalQpOperation, why);
        let mut segments = WqeSegments::new(control, bytes);
        let short = |_| operation("the WQE is too short".to_string());
        let (head, inline) = segments.ethernet().map_err(short)?;
        let data = segments.data_segments().map_err(short)?;
        let len = data.bytes();
        if len > MAX_DATA {
            return Err((
                Syndrome::LocalLength,
                format!("{len} bytes to send, the limit is {MAX_DATA}"),
            ));
        }
        let mut frame = inline.to_vec();
        frame.resize(inline.len() + len as usize, 0);
        self.gather(Accessor { qpn: sqn, pd }, data, 0, &mut frame[inline.len()..])
            .map_err(|syndrome| (syndrome, "the data cannot be read".to_string()))?;
        let headers = FrameHeaders::find(&frame);
        let mut frames = match control.opcode {
            op::LSO => {
                let mss: usize = u16::from_be_bytes([head[6], head[7]]).into();
                if len > MAX_FRAMES * mss as u64 {
                    return Err(operation(format!(
                        "{len} bytes in segments of {mss}, the limit is {MAX_FRAMES}"
                    )));
                }
                let frames = headers.segment(&frame, inline.len(), mss);
                if frames.is_empty() {
                    return Err(operation(format!("the frame cannot be cut every {mss} bytes")));
                }
                frames
            }
            _ => vec![frame],
        };
        let flags = head[4];
        let insert = u16::from_be_bytes([head[12], head[13]]);
        for frame in &mut frames {
            let headers = FrameHeaders::find(frame);
            if flags & TRANSPORT_CHECKSUM != 0 {
                headers.fill_transport_checksum(frame);
            }
            if flags & NETWORK_CHECKSUM != 0 {
                headers.fill_network_checksum(frame);
            }
            if insert & INSERT_VLAN != 0 {
                frame::insert_vlan(frame, u16::from_be_bytes([head[14], head[15]]));
            }
        }
        Ok(frames)
    }

    /// Receives a frame. `from_own` is the transport domain of the sender, if it is this function.
    pub(crate) fn receive_frame(&mut self, frame: &[u8], from_own: Option<u32>) {
        let Some(mac) = frame.first_chunk::<6>() else { return };
        if !self.port.accepts(mac) {
            return;
        }
        let headers = FrameHeaders::find(frame);
        let result = self.steer(NIC_RECEIVE, &headers.as_match(frame), frame.len());
        let mut taken = false;
        for tirn in result.tirs {
            let Ok(tir) = self.objects.tirs.get(tirn) else { continue };
            // A sender does not receive its own frames.
            if from_own == Some(tir.context.get32(tirc::transport_domain)) {
                continue;
            }
            let block = tir.context.get(tirc::self_lb_block);
            if from_own.is_some() && block >> (mac[0] & 1) & 1 != 0 {
                continue;
            }
            if let Some(rqn) = self.choose_rq(tirn, &headers, frame) {
                taken |= self.write_frame(rqn, &headers, frame, result.flow_tag);
            }
        }
        if taken && from_own.is_none() {
            self.port.received.add_frame(frame);
        }
    }

    /// The receive queue of a TIR for a frame.
    fn choose_rq(&self, tirn: u32, headers: &FrameHeaders, frame: &[u8]) -> Option<u32> {
        let tir = self.objects.tirs.get(tirn).ok()?;
        if tir.context.get(tirc::disp_type) == DIRECT {
            return Some(tir.context.get32(tirc::inline_rqn));
        }
        let queues = &self.objects.rqts.get(tir.context.get32(tirc::indirect_table)).ok()?.queues;
        let fields = tir
            .context
            .sub(tirc::rx_hash_field_selector_outer)
            .get(rx_hash_field_select::selected_fields);
        let key = tir.context.span(tirc::rx_hash_toeplitz_key);
        let symmetric = tir.context.is_set(tirc::rx_hash_symmetric);
        let hash = match tir.context.get(tirc::rx_hash_fn) {
            hash::INVERTED_XOR8 => headers.xor_hash(frame, fields, symmetric),
            _ => headers.toeplitz_hash(frame, fields, key, symmetric),
        };
        queues.get(hash as usize % queues.len().max(1)).copied()
    }

    /// Writes a frame to a receive queue; returns false if it is dropped.
    fn write_frame(
        &mut self,
        rqn: u32,
        headers: &FrameHeaders,
        frame: &[u8],
        flow_tag: u32,
    ) -> bool {
        if self.objects.virtqs.find(rqn).is_some() {
            return self.write_to_virtq(rqn, frame);
        }
        let Ok(rq) = self.objects.rqs.get_mut(rqn) else { return false };
        if rq.state != WqState::Ready {
            return false;
        }
        let receive = match rq.queue.peek(&self.memory) {
            Ok(Some(receive)) => receive,
            Ok(None) => {
                let number = rq.context.get32(rqc::counter_set_id);
                if let Ok(counter) = self.objects.q_counters.get_mut(number) {
                    counter.out_of_buffer = counter.out_of_buffer.wrapping_add(1);
                }
                return false;
            }
            Err(why) => {
                log::warn!("RQ {rqn:#x}: {why}");
                self.move_wq_to_error(QueueType::Receive, rqn);
                return false;
            }
        };
        let (network_ok, transport_ok) = headers.checksums_hold(frame);
        let mut data = frame.to_vec();
        let strip = !rq.context.is_set(rqc::vsd);
        let tag = if strip { headers.strip_vlan(&mut data) } else { None };
        if data.len() as u64 > receive.room() {
            // The frame is longer than the receive: drop the frame, keep the receive.
            return false;
        }
        rq.queue.take(&receive);
        receive.record(&mut self.recorder, self.now, RqType::Rq, rqn);
        let (pd, cqn) = (rq.pd, rq.context.get32(rqc::cqn));
        let format = TimestampFormat::of(rq.context.get(rqc::ts_format));
        let user_index = rq.context.get32(rqc::user_index);
        let mut rest = &data[..];
        for sge in receive.sges() {
            let (part, left) = rest.split_at(rest.len().min(sge.len as usize));
            rest = left;
            let access = Access {
                key: sge.key,
                pd,
                qpn: rqn,
                right: AccessRight::LocalWrite,
                address: sge.address,
                len: part.len() as u64,
            };
            let written =
                if part.is_empty() { Ok(()) } else { self.dma_write(access, Payload::Bytes(part)) };
            if let Err(why) = written {
                log::warn!("receive of RQ {rqn:#x}: {why}");
                if let Ok(rq) = self.objects.rqs.get_mut(rqn) {
                    rq.state = WqState::Error;
                }
                self.fail_raw_receive(rqn, receive.index, Syndrome::LocalProtection);
                self.flush_raw_receives(rqn);
                return false;
            }
        }
        let mut cqe = Cqe::new(RESPONSE_SEND);
        let ok = L2_OK | if network_ok { L3_OK } else { 0 } | if transport_ok { L4_OK } else { 0 };
        cqe.put16(20, headers.sum(frame));
        cqe.put8(28, ok);
        cqe.put8(29, headers.header_types() | if tag.is_some() { VLAN_PRESENT } else { 0 });
        cqe.put16(30, tag.unwrap_or(0));
        cqe.put(32, user_index);
        cqe.put(44, data.len() as u32);
        cqe.put(56, flow_tag);
        cqe.put16(60, receive.index);
        let written = self.write_cqe(cqn, cqe.bytes(), format, true);
        if !written {
            self.move_wq_to_error(QueueType::Receive, rqn);
        }
        written
    }
}
