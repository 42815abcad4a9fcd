//! The device as the transport sees it: [`Host`].
//!
//! Pairs with `uverbs_roce`. The requester's part is in [`super::requester`], the responder's in [`super::responder`].

use uverbs_roce::headers::Packet;
use uverbs_roce::{Atomic, Counter, Event, Host, Received, Refusal, Right, Source, Target};
use uverbs_uapi::wc::ib_wc_status;

use super::dma::Payload;
use super::transport::Turn;
use crate::device::Device;
use crate::format::event;
use crate::format::syndrome::Syndrome;
use crate::object::qp::QpState;
use crate::path::Path;
use crate::recording::{self, Entry};

/// The device, while the transport calls it.
pub(crate) struct DeviceHost<'d> {
    pub(crate) device: &'d mut Device,
    /// The payload of the packet that arrives, if it is not in the packet, and the number of packets that it is of.
    pub(crate) in_place: Option<(Payload<'d>, u32)>,
    pub(crate) turn: Turn,
}

impl<'d> DeviceHost<'d> {
    /// The payload of the packet that arrives, or of each one of a unit, with its offset. The memory of one may be that
    /// which the one before was written to.
    fn payloads<'a>(&self, data: &'a [u8]) -> impl Iterator<Item = (u32, Payload<'a>)> + use<'a, 'd>
    where
        'd: 'a,
    {
        let (mut rest, packets) = self.in_place.unwrap_or((Payload::Bytes(data), 1));
        debug_assert_eq!(rest.len(), data.len());
        let len = rest.len() / packets as usize;
        (0..packets).map(move |at| {
            let (payload, behind) = rest.split_at(len);
            rest = behind;
            (at * len as u32, payload)
        })
    }
}

impl Host for DeviceHost<'_> {
    type Path = Path;

    fn admit(&mut self, qpn: u32, from: &Path, packet: &Packet<'_>) -> bool {
        self.device.admit_packet(qpn, from, packet)
    }

    fn begin(&mut self, qpn: u32, _: u64) {
        self.device.decide_fate(qpn);
    }

    fn leave_in_place(&mut self, qpn: u32, source: Source, length: u32, packets: u32) -> u32 {
        self.device.leave_in_place(qpn, source, length as usize, packets)
    }

    fn send(&mut self, qpn: u32, to: &Path, packet: &[u8]) -> bool {
        self.device.send_packet(qpn, to, packet, &mut self.turn)
    }

    fn read_local(
        &mut self,
        qpn: u32,
        request: u64,
        offset: u32,
        to: &mut [u8],
    ) -> Result<(), ib_wc_status> {
        self.device.read_request_data(qpn, request, offset, to).map_err(Syndrome::status)
    }

    fn write_local(
        &mut self,
        qpn: u32,
        request: u64,
        offset: u32,
        data: &[u8],
    ) -> Result<(), ib_wc_status> {
        self.payloads(data).try_for_each(|(at, data)| {
            let written = self.device.write_response_data(qpn, request, offset + at, data);
            written.map_err(Syndrome::status)
        })
    }

    fn write_old(&mut self, qpn: u32, request: u64, old: u64) -> Result<(), ib_wc_status> {
        self.device.write_old_value(qpn, request, old).map_err(Syndrome::status)
    }

    fn run_local(&mut self, qpn: u32, request: u64) -> Result<(), ib_wc_status> {
        self.device.run_local_request(qpn, request).map_err(Syndrome::status)
    }

    fn complete(&mut self, qpn: u32, request: u64, status: ib_wc_status) {
        self.device.complete_request(qpn, request, status);
    }

    fn check_remote(&mut self, qpn: u32, right: Right, target: Target) -> Result<(), Refusal> {
        self.device.check_target(qpn, right, target)
    }

    fn read_remote(&mut self, qpn: u32, target: Target, to: &mut [u8]) -> Result<(), Refusal> {
        self.device.read_target(qpn, target, to)
    }

    fn write_remote(&mut self, qpn: u32, target: Target, data: &[u8]) -> Result<(), Refusal> {
        self.payloads(data).try_for_each(|(at, data)| {
            let address = target.address.wrapping_add(at.into());
            let target = Target { address, length: data.len() as u32, ..target };
            self.device.write_target(qpn, target, data)
        })
    }

    fn atomic(&mut self, qpn: u32, target: Target, change: Atomic) -> Result<u64, Refusal> {
        self.device.change_target(qpn, target, change)
    }

    /// The capabilities do not announce it, and no WQE asks for it.
    fn atomic_write(&mut self, _: u32, _: Target, _: [u8; 8]) -> Result<(), Refusal> {
        Err(Refusal::InvalidRequest)
    }

    /// As [`Host::atomic_write`].
    fn flush(&mut self, _: u32, _: Target, _: u8, _: u8) -> Result<(), Refusal> {
        Err(Refusal::InvalidRequest)
    }

    fn invalidate(&mut self, qpn: u32, _: Option<u32>, key: u32) -> Result<(), Refusal> {
        self.device.invalidate_for_peer(qpn, key)
    }

    fn take_receive(&mut self, qpn: u32, srq: Option<u32>) -> Result<Option<u64>, Refusal> {
        self.device.take_next_receive(qpn, srq)
    }

    fn write_receive(
        &mut self,
        qpn: u32,
        _: u64,
        offset: u32,
        data: &[u8],
    ) -> Result<(), ib_wc_status> {
        self.payloads(data).try_for_each(|(at, data)| {
            self.device.fill_receive(qpn, offset + at, data).map_err(Syndrome::status)
        })
    }

    fn complete_receive(
        &mut self,
        qpn: u32,
        _: u64,
        received: Result<Received<'_, Path>, ib_wc_status>,
    ) -> Result<(), Refusal> {
        let reported = self.device.end_receive(qpn, received.map_err(Syndrome::of_status));
        if reported { Ok(()) } else { Err(Refusal::Operational) }
    }

    fn event(&mut self, qpn: u32, event: Event) {
        match event {
            // The kernel's driver learns of a first packet by its completion, and knows no state SQD.
            Event::CommunicationEstablished | Event::SendQueueDrained => {}
            Event::SendFailed => self.device.stop_sending(qpn),
            Event::Refused(Refusal::InvalidRequest) => {
                self.device.move_qp_to_error(qpn, None);
                self.device.qp_event(qpn, event::WQ_INVALID_REQUEST);
            }
            Event::Refused(Refusal::Access) => {
                let objects = &mut self.device.objects;
                objects.count_for_qp(qpn, |counter| &mut counter.resp_remote_access_errors);
                self.device.move_qp_to_error(qpn, None);
                self.device.qp_event(qpn, event::WQ_ACCESS_ERROR);
            }
            Event::Refused(Refusal::Operational) | Event::ReceiveFailed => {
                self.device.move_qp_to_error(qpn, None);
            }
        }
    }

    fn count(&mut self, qpn: u32, counter: Counter) {
        if counter == Counter::Timeouts {
            self.device.link.overtake(qpn);
        }
        let why = match counter {
            Counter::Timeouts => Some(recording::Refusal::Lost),
            Counter::RnrNaks => Some(recording::Refusal::RnrNak),
            _ => None,
        };
        if let Some(why) = why {
            self.device.recorder.add(self.device.now, &Entry::Refusal { number: qpn, why });
        }
        self.device.objects.count_for_qp(qpn, |set| match counter {
            Counter::Timeouts => &mut set.local_ack_timeout_err,
            Counter::RnrNaks => &mut set.rnr_nak_retry_err,
            Counter::Duplicates => &mut set.duplicate_request,
            Counter::OutOfSequence => &mut set.out_of_sequence,
            Counter::OutOfBuffer => &mut set.out_of_buffer,
            Counter::SequenceNaks => &mut set.packet_seq_err,
            Counter::ImpliedNaks => &mut set.implied_nak_seq_err,
        });
    }
}

impl Device {
    /// Moves a queue pair to the state in which the transport is after a request has failed, and schedules it, so that
    /// the other WQEs are flushed.
    fn stop_sending(&mut self, qpn: u32) {
        let Ok(qp) = self.objects.qps.get_mut(qpn) else { return };
        // UC and datagrams only stop sending.
        if qp.service.transport().is_reliable() {
            return self.move_qp_to_error(qpn, None);
        }
        if qp.state == QpState::ReadyToSend {
            qp.state = QpState::SendError;
        }
        self.schedule(qpn);
    }
}
