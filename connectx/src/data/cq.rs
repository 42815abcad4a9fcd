//! CQEs: how they are written, and when an event reports them.
//!
//! Pairs with the CQ doorbell of a UAR page, and with the doorbell record of the completion queue.

use uverbs_uapi::mlx5::prm::cqc::cqc;

use crate::device::Device;
use crate::fault::Side;
use crate::format::event;
use crate::object::cq::{ArmState, INDEX_MASK, PADDED, arm_word_lags};
use crate::object::timestamp::TimestampFormat;
use crate::recording::{DoorbellCounter, Entry};

const OVERRUN: u8 = 1;
const WRITE_FAULT: u8 = 2;

impl Device {
    /// How many bytes of data fit a CQE of this queue: 32 in place of fields that only datagrams
    /// use, or 64 in the first half of a 128-byte CQE.
    pub(crate) fn cqe_data_room(&self, number: u32) -> usize {
        self.objects.cqs.get(number).map_or(0, |cq| if cq.cqe_size == 64 { 32 } else { 64 })
    }

    /// Writes a CQE; see [`Device::write_cqe_with_data`].
    pub(crate) fn write_cqe(
        &mut self,
        number: u32,
        cqe: [u8; 64],
        format: TimestampFormat,
        solicited: bool,
    ) -> bool {
        self.write_cqe_with_data(number, cqe, &[], format, solicited)
    }

    /// Writes a CQE. `data` goes to the first half of a 128-byte CQE; owner bit and timestamp are
    /// filled in here. Returns false if the queue has failed, now or before.
    pub(crate) fn write_cqe_with_data(
        &mut self,
        number: u32,
        mut cqe: [u8; 64],
        data: &[u8],
        format: TimestampFormat,
        solicited: bool,
    ) -> bool {
        // The data that a queue pair has received is there before a CQE of it.
        let [.., a, b, c, _, _, _, _] = cqe;
        self.settle(Some(u32::from_be_bytes([0, a, b, c])));
        let now = self.now;
        let Ok(cq) = self.objects.cqs.get_mut(number) else { return false };
        if cq.failed {
            return false;
        }
        let record = self.memory.read_be32(cq.doorbell_record);
        let consumer = match record {
            Ok(word) => word & INDEX_MASK,
            Err(_) => return self.move_cq_to_error(number, WRITE_FAULT),
        };
        self.recorder.doorbell_record(now, DoorbellCounter::CqConsumer, number, consumer);
        let waiting = cq.producer().wrapping_sub(consumer) & INDEX_MASK;
        if waiting >= 1 << cq.log_size && !cq.context.is_set(cqc::oi) {
            return self.move_cq_to_error(number, OVERRUN);
        }
        // An error CQE has its syndrome where others have the timestamp.
        if !matches!(cqe[63] >> 4, 0xd | 0xe) {
            cqe[48..56].copy_from_slice(&format.stamp(now, &self.options).to_be_bytes());
        }
        cqe[63] = cqe[63] & 0xfe | (cq.producer() >> cq.log_size) as u8 & 1;
        let index = u64::from(cq.producer() & ((1 << cq.log_size) - 1));
        let at = index * cq.cqe_size;
        // With padding the driver wants full cache lines written, so that no line is read first.
        let mut first = [0; 64];
        let padded = cq.context.get(cqc::cqe_sz) == PADDED;
        let len = if padded { first.len() } else { data.len().min(first.len()) };
        first[..data.len().min(64)].copy_from_slice(&data[..data.len().min(64)]);
        let written = match cq.cqe_size {
            64 => Ok(()),
            _ => cq.buffer.write(&self.memory, at, &first[..len]),
        };
        let written =
            written.and_then(|()| cq.buffer.write(&self.memory, at + (cq.cqe_size - 64), &cqe));
        if written.is_err() {
            return self.move_cq_to_error(number, WRITE_FAULT);
        }
        let index = cq.producer();
        if self.recorder.on() {
            let whole = [if len > 0 { &first[..] } else { &[] }, &cqe].concat();
            self.recorder.add(now, &Entry::Cqe { number, index, bytes: &whole });
        }
        cq.written += 1;
        if solicited {
            cq.solicited = cq.written;
        }
        if cq.armed == ArmState::Any || cq.armed == ArmState::Solicited && solicited {
            self.moderate_event(number, 1);
        }
        true
    }

    /// Raises the event that reports CQEs, now or when moderation allows it: after a number of CQEs
    /// or after a period, whichever comes first. A limit of zero does not count.
    fn moderate_event(&mut self, number: u32, more: u32) {
        const MICROSECOND: u64 = 1000;
        let now = self.now;
        let Ok(cq) = self.objects.cqs.get_mut(number) else { return };
        let count = cq.context.get32(cqc::cq_max_count);
        let period = cq.context.get(cqc::cq_period) * MICROSECOND;
        cq.unreported = cq.unreported.saturating_add(more);
        let enough = count != 0 && cq.unreported >= count;
        // The period begins at the last CQE or at the last event, by `cq_period_mode`.
        let since = if cq.context.is_set(cqc::cq_period_mode) { now } else { cq.last_event };
        let due = since.saturating_add(period);
        if enough || count == 0 && period == 0 || period != 0 && due <= now {
            return self.raise_completion_event(number);
        }
        if period != 0 {
            let old = cq.due.replace(due);
            if let Some(old) = old {
                self.cq_timers.remove(&(old, number));
            }
            self.cq_timers.insert((due, number));
        }
    }

    /// Raises the events that are due.
    pub(crate) fn run_cq_timers(&mut self) {
        while self.cq_timers.first().is_some_and(|(due, _)| *due <= self.now) {
            let Some((due, number)) = self.cq_timers.pop_first() else { break };
            if self.objects.cqs.get(number).is_ok_and(|cq| cq.due == Some(due)) {
                self.raise_completion_event(number);
            }
        }
    }

    fn raise_completion_event(&mut self, number: u32) {
        let now = self.now;
        let Ok(cq) = self.objects.cqs.get_mut(number) else { return };
        cq.armed = ArmState::Disarmed;
        cq.unreported = 0;
        cq.notified = cq.written;
        cq.last_event = now;
        if let Some(due) = cq.due.take() {
            self.cq_timers.remove(&(due, number));
        }
        let eqn = cq.eqn;
        let mut data = [0; 28];
        data[24..].copy_from_slice(&number.to_be_bytes());
        self.write_eqe(eqn, event::COMPLETION, 0, &data);
    }

    /// Overflows the CQ of one side of a queue pair, for tests; returns whether there is such a CQ.
    pub fn overflow_cq(&mut self, qpn: u32, side: Side) -> bool {
        let Ok(qp) = self.objects.qps.get(qpn) else { return false };
        let number = match side {
            Side::Send => qp.send_cq(),
            Side::Receive => qp.receive_cq(),
        };
        let exists = self.objects.cqs.get(number).is_ok_and(|cq| !cq.failed);
        if exists {
            self.move_cq_to_error(number, OVERRUN);
        }
        exists
    }

    fn move_cq_to_error(&mut self, number: u32, syndrome: u8) -> bool {
        log::warn!("CQ {number:#x} failed, syndrome {syndrome}");
        if let Ok(cq) = self.objects.cqs.get_mut(number) {
            cq.failed = true;
        }
        let mut data = [0; 28];
        data[..4].copy_from_slice(&number.to_be_bytes());
        data[11] = syndrome;
        self.raise_async_event(event::CQ_ERROR, 0, &data);
        false
    }

    /// The CQ doorbell: command and consumer index, then the number of the CQ.
    pub(crate) fn cq_doorbell(&mut self, uar: u32, command: u32, number: u32) {
        let number = number & 0xff_ffff;
        let Ok(cq) = self.objects.cqs.get_mut(number) else {
            log::debug!("doorbell of CQ {number:#x} which does not exist");
            self.doorbells.errors.stray += 1;
            return;
        };
        if cq.uar != uar {
            log::warn!("doorbell of CQ {number:#x} on UAR {uar}, not {}", cq.uar);
            self.doorbells.errors.stray += 1;
            return;
        }
        let words = [0, 4].map(|at| self.memory.read_be32(cq.doorbell_record.wrapping_add(at)));
        if let [Ok(seen), Ok(armed)] = words {
            self.recorder.doorbell_record(
                self.now,
                DoorbellCounter::CqConsumer,
                number,
                seen & INDEX_MASK,
            );
            self.recorder.doorbell_record(self.now, DoorbellCounter::CqArm, number, armed);
            if arm_word_lags(armed, command) {
                log::warn!("arm word of CQ {number:#x} is {armed:#x}, its doorbell {command:#x}");
                self.doorbells.errors.record_behind += 1;
            }
        }
        cq.arm_word = command;
        let consumer = command & INDEX_MASK;
        let solicited_only = command >> 24 & 1 != 0;
        cq.armed = if solicited_only { ArmState::Solicited } else { ArmState::Any };
        // Arming starts the moderation again, with the CQEs that the driver has not seen.
        cq.unreported = 0;
        let waited = cq.due.take();
        let unseen = cq.cqes_to_report(consumer, solicited_only);
        if let Some(due) = waited {
            self.cq_timers.remove(&(due, number));
        }
        if unseen != 0 {
            self.moderate_event(number, unseen);
        }
    }
}
