//! Completion queues.
//!
//! Pairs with CREATE_CQ, the CQ doorbell of a UAR, and the queue's doorbell record.

use uverbs_uapi::mlx5::prm::cqc::{
    cqc, create_cq_in, create_cq_out, destroy_cq_in, modify_cq_in, query_cq_in, query_cq_out,
};
use uverbs_uapi::mlx5::prm::{Bits, Field, Layout};

use super::eq::event;
use super::umem::{QueueMemory, Request};
use crate::buffer::Buffer;
use crate::cmd::refusal::{Refused, refuse};
use crate::device::Device;
use crate::record::{Counter, Entry};

/// A completion queue.
pub struct Cq {
    pub(crate) context: Bits<cqc, Vec<u8>>,
    buffer: Buffer,
    /// Guest address of the doorbell record.
    record: u64,
    umems: Vec<u32>,
    log_size: u32,
    /// 64, or 128 with the entry proper in the second half.
    entry: u64,
    /// Completions written so far; the producer index is the lower 24 bits.
    written: u64,
    /// How many of them, up to and with the last solicited one.
    solicited: u64,
    /// How many of them, up to and with the last one that an event has told of.
    notified: u64,
    armed: Arm,
    /// Completions that the next event will report, and when the last one was raised.
    unreported: u32,
    reported: u64,
    /// When the next event is due, if it waits for the clock.
    due: Option<u64>,
    uar: u32,
    eqn: u32,
    failed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Arm {
    No,
    Any,
    Solicited,
}

/// Where in CREATE_CQ the memory of the queue and of its record are named, which the kernel's
/// description leaves out: only user contexts use it.
const CQ_UMEM_OFFSET: Field<create_cq_in> = Field::new(0x280, 0x40);
const CQ_UMEM: Field<create_cq_in> = Field::new(0x2c0, 0x20);
const RECORD_UMEM: Field<cqc> = Field::new(0x20, 0x20);

/// `modify_field_select` bits of MODIFY_CQ.
const MODIFY_PERIOD: u64 = 1;
const MODIFY_COUNT: u64 = 2;

/// Modifier of MODIFY_CQ that gives the queue another buffer.
const RESIZE: u64 = 1;
/// Opcode of the completion that ends the old buffer.
const RESIZED: u8 = 0x5;

/// `cqe_sz` of completions that are padded to 128 bytes.
const PADDED: u64 = 2;

const OVERRUN: u8 = 1;
const WRITE_FAULT: u8 = 2;

const PRODUCER_MASK: u32 = 0xff_ffff;

impl Cq {
    fn producer(&self) -> u32 {
        self.written as u32 & PRODUCER_MASK
    }

    /// Completions that call for an event from a driver that arms the queue having seen what comes
    /// before `consumer`. One that an event has told of does not call for another: drivers arm
    /// before they poll, and then wait for what is new.
    fn unseen(&self, consumer: u32, solicited_only: bool) -> u32 {
        let newest = if solicited_only { self.solicited } else { self.written };
        let seen = (newest as u32).wrapping_sub(consumer) & PRODUCER_MASK;
        // Less than none: the driver has seen later ones.
        let seen = if seen < PRODUCER_MASK / 2 { seen } else { 0 };
        let told = newest.saturating_sub(self.notified);
        seen.min(u32::try_from(told).unwrap_or(u32::MAX))
    }
}

impl Device {
    pub(crate) fn create_cq(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<create_cq_in, _>::new(input);
        let context = Bits::<cqc, _>::new(input.sub(create_cq_in::cq_context).bytes().to_vec());
        if context.is_set(cqc::cqe_comp_en) {
            return refuse!(BadParam, "CQE compression is not modelled");
        }
        let log_size = context.get32(cqc::log_cq_size);
        if log_size > 22 {
            return refuse!(BadParam, "log_cq_size {log_size} is above 22");
        }
        let entry = match context.get(cqc::cqe_sz) {
            0 => 64,
            1 | PADDED => 128,
            other => return refuse!(BadParam, "cqe_sz {other}"),
        };
        let eqn = context.get32(cqc::c_eqn_or_apu_element) & 0xff;
        let uar = context.get32(cqc::uar_page);
        self.objects.cqs.room()?;
        self.objects.eqs.get(eqn)?;
        self.objects.uars.allow(uid, uar)?;
        let QueueMemory { buffer, record, umems } = self.queue_memory(
            uid,
            &Request {
                queue: input
                    .is_set(create_cq_in::cq_umem_valid)
                    .then(|| (input.get32(CQ_UMEM), input.get(CQ_UMEM_OFFSET))),
                record: context.is_set(cqc::dbr_umem_valid).then(|| context.get32(RECORD_UMEM)),
                record_address: context.get(cqc::dbr_addr),
                log_page_size: context.get(cqc::log_page_size),
                page_offset: context.get(cqc::page_offset),
                len: entry << log_size,
                pages: input.tail(create_cq_in::pas),
            },
        )?;
        self.objects.uars.hold(uar)?;
        self.objects.eqs.hold(eqn)?;
        let number = self.objects.cqs.insert_owned(
            uid,
            Cq {
                context,
                buffer,
                record,
                umems,
                log_size,
                entry,
                written: 0,
                solicited: 0,
                notified: 0,
                armed: Arm::No,
                unreported: 0,
                reported: 0,
                due: None,
                uar,
                eqn,
                failed: false,
            },
        )?;
        let mut out = Bits::<create_cq_out, _>::new(vec![0; create_cq_out::SIZE]);
        out.set(create_cq_out::cqn, number.into());
        Ok(out.into_inner())
    }

    pub(crate) fn destroy_cq(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let number = Bits::<destroy_cq_in, _>::new(input).get32(destroy_cq_in::cqn);
        self.objects.cqs.own(uid, number)?;
        let cq = self.objects.cqs.remove(number)?;
        if let Some(due) = cq.due {
            self.cq_timers.remove(&(due, number));
        }
        self.objects.uars.release(cq.uar);
        self.objects.eqs.release(cq.eqn);
        self.release_umems(&cq.umems);
        Ok(vec![])
    }

    pub(crate) fn query_cq(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let number = Bits::<query_cq_in, _>::new(input).get32(query_cq_in::cqn);
        let cq = self.objects.cqs.own(uid, number)?;
        let mut out = Bits::<query_cq_out, _>::new(vec![0; query_cq_out::SIZE]);
        out.set_sub(query_cq_out::cq_context, cq.context.bytes());
        let mut context = out.sub_mut(query_cq_out::cq_context);
        context.set(cqc::producer_counter, cq.producer().into());
        let index = |count: u64| count & u64::from(PRODUCER_MASK);
        context.set(cqc::last_notified_index, index(cq.notified));
        context.set(cqc::last_solicit_index, index(cq.solicited));
        context.set(cqc::status, if cq.failed { 0xa } else { 0 });
        Ok(out.into_inner())
    }

    pub(crate) fn modify_cq(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<modify_cq_in, _>::new(input);
        let number = input.get32(modify_cq_in::cqn);
        self.objects.cqs.own(uid, number)?;
        match input.get(modify_cq_in::op_mod) {
            0 => {}
            RESIZE => return self.resize_cq(number, &input),
            other => return refuse!(BadParam, "MODIFY_CQ with modifier {other:#x}"),
        }
        let select = input.get(modify_cq_in::modify_field_select_resize_field_select);
        if select & !(MODIFY_PERIOD | MODIFY_COUNT) != 0 {
            return refuse!(BadParam, "MODIFY_CQ of fields {select:#x} is not modelled");
        }
        let new = input.sub(modify_cq_in::cq_context);
        let cq = self.objects.cqs.get_mut(number)?;
        if select & MODIFY_PERIOD != 0 {
            cq.context.set(cqc::cq_period, new.get(cqc::cq_period));
        }
        if select & MODIFY_COUNT != 0 {
            cq.context.set(cqc::cq_max_count, new.get(cqc::cq_max_count));
        }
        Ok(vec![])
    }

    /// Ends the old buffer with a marker and goes on in the new one, at the index after the
    /// marker's: there the driver copies what it has not seen yet.
    fn resize_cq(
        &mut self,
        number: u32,
        input: &Bits<modify_cq_in, &[u8]>,
    ) -> Result<Vec<u8>, Refused> {
        let new = input.sub(modify_cq_in::cq_context);
        let log_size = new.get32(cqc::log_cq_size);
        let cq = self.objects.cqs.get(number)?;
        if log_size > 22 || cq.failed {
            return refuse!(BadParam, "CQ {number:#x} cannot get 2^{log_size} entries");
        }
        if (new.get(cqc::cqe_sz) == 0) != (cq.entry == 64) {
            return refuse!(BadParam, "the entries of CQ {number:#x} have {} bytes", cq.entry);
        }
        let buffer = Buffer::new(
            &self.objects.listed,
            new.get(cqc::log_page_size),
            new.get(cqc::page_offset),
            cq.entry << log_size,
            input.tail(modify_cq_in::pas),
        )?;
        let consumer = self.memory.read_be32(cq.record);
        let waiting = consumer.map(|consumer| cq.producer().wrapping_sub(consumer) & PRODUCER_MASK);
        // The marker comes after what waits, and both have to fit the new buffer.
        let least = log_size.min(cq.log_size);
        if waiting.is_ok_and(|waiting| waiting >= 1 << least) {
            return refuse!(BadParam, "more completions wait than 2^{least} entries hold");
        }
        let mut marker = [0; 64];
        marker[63] = RESIZED << 4;
        if !self.complete(number, marker, false) {
            return refuse!(BadResourceState, "CQ {number:#x} has no room for the marker");
        }
        let cq = self.objects.cqs.get_mut(number)?;
        cq.buffer = buffer;
        cq.log_size = log_size;
        for field in [cqc::log_cq_size, cqc::log_page_size, cqc::page_offset] {
            cq.context.set(field, new.get(field));
        }
        Ok(vec![])
    }

    /// How much data an entry of a queue can hold besides the completion: 32 bytes in place of what
    /// only datagrams need, 64 where entries are longer.
    pub(crate) fn inline_room(&self, number: u32) -> usize {
        self.objects.cqs.get(number).map_or(0, |cq| if cq.entry == 64 { 32 } else { 64 })
    }

    /// Writes a completion; see [`Device::complete_with`].
    pub(crate) fn complete(&mut self, number: u32, cqe: [u8; 64], solicited: bool) -> bool {
        self.complete_with(number, cqe, &[], solicited)
    }

    /// Writes a completion. `data` is for the first half of a 128-byte entry; ownership and
    /// timestamp are filled in here. False if the queue has failed, now or before.
    pub(crate) fn complete_with(
        &mut self,
        number: u32,
        mut cqe: [u8; 64],
        data: &[u8],
        solicited: bool,
    ) -> bool {
        let now = self.now;
        let Ok(cq) = self.objects.cqs.get_mut(number) else { return false };
        if cq.failed {
            return false;
        }
        let record = self.memory.read_be32(cq.record);
        let consumer = match record {
            Ok(word) => word & PRODUCER_MASK,
            Err(_) => return self.fail_cq(number, WRITE_FAULT),
        };
        self.recorder.saw(now, Counter::Consumer, number, consumer);
        let waiting = cq.producer().wrapping_sub(consumer) & PRODUCER_MASK;
        if waiting >= 1 << cq.log_size && !cq.context.is_set(cqc::oi) {
            return self.fail_cq(number, OVERRUN);
        }
        // An error has its syndrome where others have the time.
        if !matches!(cqe[63] >> 4, 0xd | 0xe) {
            cqe[48..56].copy_from_slice(&(now / crate::segment::NS_PER_TICK).to_be_bytes());
        }
        cqe[63] = cqe[63] & 0xfe | (cq.producer() >> cq.log_size) as u8 & 1;
        let index = u64::from(cq.producer() & ((1 << cq.log_size) - 1));
        let at = index * cq.entry;
        // Whoever asked for padding has whole entries written, so that none is read back first.
        let mut first = [0; 64];
        let padded = cq.context.get(cqc::cqe_sz) == PADDED;
        let len = if padded { first.len() } else { data.len().min(first.len()) };
        first[..data.len().min(64)].copy_from_slice(&data[..data.len().min(64)]);
        let written = match cq.entry {
            64 => Ok(()),
            _ => cq.buffer.write(&self.memory, at, &first[..len]),
        };
        let written =
            written.and_then(|()| cq.buffer.write(&self.memory, at + (cq.entry - 64), &cqe));
        if written.is_err() {
            return self.fail_cq(number, WRITE_FAULT);
        }
        let index = cq.producer();
        if self.recorder.on() {
            let whole = [if len > 0 { &first[..] } else { &[] }, &cqe].concat();
            self.recorder.add(now, &Entry::Completion { number, index, bytes: &whole });
        }
        cq.written += 1;
        if solicited {
            cq.solicited = cq.written;
        }
        if cq.armed == Arm::Any || cq.armed == Arm::Solicited && solicited {
            self.moderate(number, 1);
        }
        true
    }

    /// Raises the event that reports completions, now or when moderation says so: at a number of
    /// them, or a time after the first, whichever is sooner. A condition of zero is none.
    fn moderate(&mut self, number: u32, more: u32) {
        const MICROSECOND: u64 = 1000;
        let now = self.now;
        let Ok(cq) = self.objects.cqs.get_mut(number) else { return };
        let count = cq.context.get32(cqc::cq_max_count);
        let period = cq.context.get(cqc::cq_period) * MICROSECOND;
        cq.unreported = cq.unreported.saturating_add(more);
        let enough = count != 0 && cq.unreported >= count;
        // The clock runs since the last completion, or since the last event.
        let since = if cq.context.is_set(cqc::cq_period_mode) { now } else { cq.reported };
        let due = since.saturating_add(period);
        if enough || count == 0 && period == 0 || period != 0 && due <= now {
            return self.notify(number);
        }
        if period != 0 {
            let old = cq.due.replace(due);
            if let Some(old) = old {
                self.cq_timers.remove(&(old, number));
            }
            self.cq_timers.insert((due, number));
        }
    }

    /// Raises the events whose time has come.
    pub(crate) fn run_cq_timers(&mut self) {
        while let Some(&(due, number)) = self.cq_timers.first()
            && due <= self.now
        {
            self.cq_timers.pop_first();
            if self.objects.cqs.get(number).is_ok_and(|cq| cq.due == Some(due)) {
                self.notify(number);
            }
        }
    }

    fn notify(&mut self, number: u32) {
        let now = self.now;
        let Ok(cq) = self.objects.cqs.get_mut(number) else { return };
        cq.armed = Arm::No;
        cq.unreported = 0;
        cq.notified = cq.written;
        cq.reported = now;
        if let Some(due) = cq.due.take() {
            self.cq_timers.remove(&(due, number));
        }
        let eqn = cq.eqn;
        let mut data = [0; 28];
        data[24..].copy_from_slice(&number.to_be_bytes());
        self.post_event(eqn, event::COMPLETION, 0, &data);
    }

    fn fail_cq(&mut self, number: u32, syndrome: u8) -> bool {
        log::warn!("CQ {number:#x} failed, syndrome {syndrome}");
        if let Ok(cq) = self.objects.cqs.get_mut(number) {
            cq.failed = true;
        }
        let mut data = [0; 28];
        data[..4].copy_from_slice(&number.to_be_bytes());
        data[11] = syndrome;
        self.raise_event(event::CQ_ERROR, 0, &data);
        false
    }

    /// The CQ doorbell: command and consumer index, then the CQ's number.
    pub(crate) fn cq_doorbell(&mut self, uar: u32, command: u32, number: u32) {
        let number = number & 0xff_ffff;
        let Ok(cq) = self.objects.cqs.get_mut(number) else {
            log::debug!("doorbell of CQ {number:#x} which does not exist");
            self.doorbells.faults.stray += 1;
            return;
        };
        if cq.uar != uar {
            log::warn!("doorbell of CQ {number:#x} on UAR {uar}, not {}", cq.uar);
            self.doorbells.faults.stray += 1;
            return;
        }
        if let Ok(seen) = self.memory.read_be32(cq.record)
            && let Ok(armed) = self.memory.read_be32(cq.record.wrapping_add(4))
        {
            self.recorder.saw(self.now, Counter::Consumer, number, seen & PRODUCER_MASK);
            self.recorder.saw(self.now, Counter::Arm, number, armed);
            self.doorbells.faults.record_behind += u64::from(is_behind(armed, command));
        }
        let consumer = command & PRODUCER_MASK;
        let solicited_only = command >> 24 & 1 != 0;
        cq.armed = if solicited_only { Arm::Solicited } else { Arm::Any };
        // What waits to be reported is counted anew from what the driver has not seen.
        cq.unreported = 0;
        let waited = cq.due.take();
        let unseen = cq.unseen(consumer, solicited_only);
        if let Some(due) = waited {
            self.cq_timers.remove(&(due, number));
        }
        if unseen != 0 {
            self.moderate(number, unseen);
        }
    }
}

/// Whether the arm word of a record is older than the doorbell that came after it. It may be newer:
/// the next doorbell is on its way then.
fn is_behind(record: u32, doorbell: u32) -> bool {
    // The upper four bits count events, modulo 4.
    let serial = (record >> 28).wrapping_sub(doorbell >> 28) & 3;
    let consumer = record.wrapping_sub(doorbell) & PRODUCER_MASK;
    serial > 1 || serial == 0 && consumer > PRODUCER_MASK / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_arm_word_is_told_from_a_newer_one() {
        assert!(!is_behind(0x1000_0005, 0x1000_0005));
        assert!(!is_behind(0x1000_0006, 0x1000_0005));
        assert!(!is_behind(0x2000_0000, 0x1000_0005));
        assert!(!is_behind(0x0000_0001, 0x30ff_ffff));
        assert!(!is_behind(0x1000_0000, 0x10ff_ffff));
        assert!(is_behind(0x1000_0004, 0x1000_0005));
        assert!(is_behind(0x1000_0005, 0x2000_0005));
        assert!(is_behind(0x3000_0005, 0x0000_0005));
    }
}
