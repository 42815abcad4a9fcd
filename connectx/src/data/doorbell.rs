//! Writes to UAR pages.
//!
//! Pairs with the registers of a UAR page: CQs at 0x20, EQs at 0x40 and 0x48, and from 0x800 the
//! registers of send queues, whose writes [`crate::doorbell`] gathers.

use crate::device::Device;
use crate::doorbell::{Doorbell, DoorbellErrors};
use crate::object::Objects;
use crate::object::qp::QpState;
use crate::object::rq::WqState;
use crate::object::send_queue::{SendQueue, WQEBB};
use crate::recording::DoorbellCounter;

const CQ: u64 = 0x20;
const EQ_ARM: u64 = 0x40;
const EQ_UPDATE: u64 = 0x48;
const SEND: u64 = 0x800;

impl Device {
    /// The counts of doorbell errors.
    pub fn doorbell_errors(&self) -> DoorbellErrors {
        self.doorbells.errors
    }

    /// A write to a UAR page.
    pub(crate) fn uar_write(&mut self, uar: u32, offset: u64, from: &[u8]) {
        let word = |at: usize| {
            from.get(at..at + 4).map_or(0, |b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]))
        };
        match (offset, from.len()) {
            (SEND.., _) => {
                let complete = self.doorbells.write(uar, offset, from);
                complete.into_iter().for_each(|doorbell| self.ring_send_queue(doorbell));
            }
            (CQ, 8) => self.cq_doorbell(uar, word(0), word(4)),
            (EQ_ARM, 4) => self.eq_doorbell(uar, word(0), true),
            (EQ_UPDATE, 4) => self.eq_doorbell(uar, word(0), false),
            _ => {
                log::debug!("{} bytes to {offset:#x} of UAR {uar}", from.len());
                self.doorbells.errors.stray += 1;
            }
        }
    }

    /// Whether a write may still be continued.
    pub fn gathering(&self) -> bool {
        self.doorbells.gathering()
    }

    /// Treats the gathered writes as complete: no continuation has come.
    pub fn flush_gathered_writes(&mut self) {
        self.doorbells
            .flush_gathered_writes()
            .into_iter()
            .for_each(|doorbell| self.ring_send_queue(doorbell));
    }

    /// Treats the gathered writes that may be whole doorbells as complete: a command that comes later
    /// on the bus must find them rung.
    pub(crate) fn flush_single_writes(&mut self) {
        let complete = self.doorbells.flush_single_writes();
        complete.into_iter().for_each(|doorbell| self.ring_send_queue(doorbell));
    }

    /// Handles a doorbell or a BlueFlame copy that came whole.
    pub(crate) fn ring_register(&mut self, uar: u32, offset: u64, from: &[u8]) {
        match offset {
            SEND.. => {
                let doorbell = self.doorbells.whole(uar, offset, from);
                doorbell.into_iter().for_each(|doorbell| self.ring_send_queue(doorbell));
            }
            _ => self.uar_write(uar, offset, from),
        }
    }

    /// Rings a send queue up to the producer index in its doorbell record; returns whether that is ahead of the last
    /// doorbell.
    pub(crate) fn ring_to_record(&mut self, number: u32) -> bool {
        let Some(Rung { queue, works, .. }) = rung(&mut self.objects, number) else { return false };
        let before = (queue.producer_index(), queue.rung_index());
        let record = queue.read_doorbell_record(&self.memory);
        if record.is_err() && works {
            // The device reports a record that it cannot read, or that is out of range, when it runs
            // the queue.
            self.schedule(number);
            return true;
        }
        queue.ring(queue.producer_index());
        let producer = queue.producer_index();
        if before == (producer, queue.rung_index()) {
            return false;
        }
        self.recorder.doorbell_record(self.now, DoorbellCounter::Sq, number, producer.into());
        self.schedule(number);
        self.hash_requests(number);
        true
    }

    /// Rings the doorbell of a CQ if the arm word of its doorbell record has changed.
    pub(crate) fn arm_from_record(&mut self, number: u32) -> bool {
        let Ok(cq) = self.objects.cqs.get_mut(number) else { return false };
        let word = self.memory.read_be32(cq.doorbell_record.wrapping_add(4));
        let Some(word) = word.ok().filter(|word| *word != cq.arm_word) else { return false };
        let uar = cq.uar;
        self.cq_doorbell(uar, word, number);
        true
    }

    /// Rings a send queue, up to and including the WQE of the doorbell.
    fn ring_send_queue(&mut self, doorbell: Doorbell) {
        let Doorbell { uar, words: [first, second], copy: data } = doorbell;
        let number = second >> 8;
        let wqebbs = ((second & 0x3f) * 16).div_ceil(64) as u16;
        let index = (first >> 8) as u16;
        let found = rung(&mut self.objects, number);
        let own = found.as_ref().map(|rung| rung.uar);
        let Some(Rung { queue, .. }) = found.filter(|rung| rung.uar == uar) else {
            log::debug!("doorbell of send queue {number:#x} on UAR {uar}, its own is {own:?}");
            self.doorbells.errors.stray += 1;
            return;
        };
        let end = index.wrapping_add(wqebbs);
        // If the record cannot be read or is out of range, the device reports that when it runs the
        // queue.
        let refreshed = queue.read_doorbell_record(&self.memory);
        self.recorder.doorbell_record(
            self.now,
            DoorbellCounter::Sq,
            number,
            queue.producer_index().into(),
        );
        if refreshed.is_ok() && queue.record_lags(end) {
            log::warn!(
                "doorbell record of send queue {number:#x} holds {:#x}, its doorbell {end:#x}",
                queue.producer_index()
            );
            self.doorbells.errors.record_behind += 1;
        }
        // A WQE of no segments is executed, too: it completes with an error.
        queue.ring(index.wrapping_add(wqebbs.max(1)));
        // Compare only a WQE that is posted and not executed: one that the doorbell record does not cover may be
        // unwritten (counted above), and the driver may have overwritten an executed one.
        if queue.is_pending(index) {
            let words = (u64::from(first) << 32 | u64::from(second)).to_be_bytes();
            let copy = data.as_deref().unwrap_or(&words);
            // A WQE of no segments has no WQEBB to compare with.
            let copy = &copy[..copy.len().min(usize::from(wqebbs) * WQEBB)];
            if !queue.holds(&self.memory, index, copy).is_ok_and(|same| same) {
                self.doorbells.errors.differs += 1;
            }
            if let Some(data) = data {
                queue.add_blue_flame_wqe(index, data);
            }
        }
        self.schedule(number);
        self.hash_requests(number);
    }
}

/// The send queue that a doorbell names.
struct Rung<'a> {
    queue: &'a mut SendQueue,
    /// The UAR page of its doorbells.
    uar: u32,
    /// Whether its QP or SQ is in a state in which it sends.
    works: bool,
}

/// The send queue with this number, of a QP or a raw one.
fn rung(objects: &mut Objects, number: u32) -> Option<Rung<'_>> {
    if let Ok(qp) = objects.qps.get_mut(number) {
        let works = qp.state == QpState::ReadyToSend;
        return Some(Rung { queue: qp.sq.as_mut()?, uar: qp.uar, works });
    }
    let sq = objects.sqs.get_mut(number).ok()?;
    Some(Rung { queue: &mut sq.queue, uar: sq.uar, works: sq.state == WqState::Ready })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doorbell::{BUFFER, REGISTER};
    use crate::options::Options;

    fn write_words(device: &mut Device, words: std::ops::Range<u64>, pause_after: Option<u64>) {
        for word in words {
            let mut bytes = [0; 8];
            if word == 0 {
                // Two segments: 32 bytes, one WQEBB.
                bytes = [0, 0, 0, 0x0a, 0, 0, 0x40, 2];
            }
            device.uar_write(20, SEND + word * 8, &bytes);
            if pause_after == Some(word) {
                device.flush_gathered_writes();
            }
        }
    }

    /// No queue has this number, so each recognized doorbell counts as stray.
    #[test]
    fn a_blueflame_copy_counts_as_one_doorbell_even_after_a_pause() {
        let mut device = Device::new(Options::default(), 1);
        write_words(&mut device, 0..8, None);
        assert!(!device.gathering());
        assert_eq!(
            device.doorbell_errors(),
            DoorbellErrors { stray: 1, ..DoorbellErrors::default() }
        );
        write_words(&mut device, 0..8, Some(0));
        assert_eq!(
            device.doorbell_errors(),
            DoorbellErrors { stray: 2, late: 7, ..DoorbellErrors::default() }
        );
    }

    #[test]
    fn an_incomplete_blueflame_copy_is_torn() {
        for pause in [None, Some(2)] {
            let mut device = Device::new(Options::default(), 1);
            write_words(&mut device, 0..3, pause);
            write_words(&mut device, 0..1, None);
            device.flush_gathered_writes();
            let want = DoorbellErrors { stray: 2, torn: 1, ..DoorbellErrors::default() };
            assert_eq!(device.doorbell_errors(), want);
        }
    }

    /// Two processors that write to one register without a lock: the words of two copies
    /// interleave, in the same buffer or in both.
    #[test]
    fn interleaved_copies_to_one_register_are_torn() {
        for other in [0, BUFFER] {
            let mut device = Device::new(Options::default(), 1);
            for word in 0..8 {
                let bytes = if word == 0 { [0, 0, 0, 0x0a, 0, 0, 0x40, 2] } else { [0; 8] };
                device.uar_write(20, SEND + word * 8, &bytes);
                device.uar_write(20, SEND + other + word * 8, &bytes);
            }
            device.flush_gathered_writes();
            assert!(device.doorbell_errors().torn > 0, "{:?}", device.doorbell_errors());
        }
    }

    #[test]
    fn interleaved_copies_to_different_registers_are_whole() {
        let mut device = Device::new(Options::default(), 1);
        for word in 0..8 {
            let bytes = if word == 0 { [0, 0, 0, 0x0a, 0, 0, 0x40, 2] } else { [0; 8] };
            device.uar_write(20, SEND + word * 8, &bytes);
            device.uar_write(21, SEND + word * 8, &bytes);
            device.uar_write(20, SEND + REGISTER + word * 8, &bytes);
        }
        assert!(!device.gathering());
        assert_eq!(
            device.doorbell_errors(),
            DoorbellErrors { stray: 3, ..DoorbellErrors::default() }
        );
    }

    #[test]
    fn without_write_combining_only_the_first_eight_bytes_are_a_doorbell() {
        let options = Options { write_combining: false, ..Options::default() };
        let mut device = Device::new(options, 1);
        write_words(&mut device, 0..8, None);
        assert!(!device.gathering());
        assert_eq!(
            device.doorbell_errors(),
            DoorbellErrors { stray: 1, ..DoorbellErrors::default() }
        );
    }
}
