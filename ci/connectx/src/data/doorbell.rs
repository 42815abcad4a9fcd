//! Doorbells: what is written to UAR pages.
//!
//! Pairs with the registers of a UAR: completion queues at 0x20, event queues at 0x40 and 0x48, and
//! from 0x800 the registers of send queues. The first eight bytes of a work request, written to
//! such a register, say that there is work; a whole work request, written there in ascending order
//! (BlueFlame), is the work itself. The two look alike until the second write, so writes are
//! gathered until the request is complete, another write comes to the same register, or the stream of
//! writes pauses. Processors write to their own registers at the same time, so each is gathered by
//! itself.

use std::collections::BTreeMap;

use crate::device::Device;
use crate::record::Counter;

const CQ: u64 = 0x20;
const EQ_ARM: u64 = 0x40;
const EQ_UPDATE: u64 = 0x48;
const SEND: u64 = 0x800;
/// Bytes of one of the two buffers of a register.
const BUFFER: u64 = 0x100;
/// Bytes of a register: two buffers, used in turn.
const REGISTER: u64 = 0x200;
/// The most registers that are gathered at once.
const MAX_BURSTS: usize = 64;

/// A register: page, and number within.
type Place = (u32, u64);

/// What was seen that a correct driver does not do.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Faults {
    /// Pieces of BlueFlame copies that never came to their end: another write to the register cut
    /// in.
    pub torn: u64,
    /// Doorbells whose doorbell record does not cover the request they name, or was not armed as
    /// they say.
    pub record_behind: u64,
    /// BlueFlame data, or the eight bytes of a doorbell, that are not what the ring holds.
    pub differs: u64,
    /// Writes of a copy that came after a pause too long to wait for, so that it counted as a
    /// doorbell. This is the host's doing, not the driver's.
    pub late: u64,
    /// Doorbells of queues that do not exist, or not on this page.
    pub stray: u64,
}

/// What is still to come of a copy, if it is one.
struct Rest {
    start: u64,
    next: u64,
    end: u64,
}

struct Burst {
    uar: u32,
    start: u64,
    bytes: Vec<u8>,
}

/// The gathering of writes.
pub struct Doorbells {
    write_combining: bool,
    bursts: BTreeMap<Place, Burst>,
    /// Where the rest of a copy would go on that was taken for a doorbell.
    given_up: BTreeMap<Place, Rest>,
    pub(crate) faults: Faults,
}

impl Doorbells {
    /// Takes data by BlueFlame, or only doorbells.
    pub fn new(write_combining: bool) -> Self {
        Self {
            write_combining,
            bursts: BTreeMap::new(),
            given_up: BTreeMap::new(),
            faults: Faults::default(),
        }
    }
}

impl Doorbells {
    /// Drops what is being gathered. What was counted stays.
    pub(crate) fn forget(&mut self) {
        self.bursts.clear();
        self.given_up.clear();
    }
}

impl Burst {
    /// Bytes that the work request has, whole blocks.
    fn wanted(&self) -> usize {
        (usize::from(self.bytes.get(7).copied().unwrap_or(0) & 0x3f) * 16).next_multiple_of(64)
    }

    /// Whether it is a whole work request.
    fn whole(&self) -> bool {
        self.bytes.len() > 8 && self.bytes.len() >= self.wanted()
    }

    fn word(&self, at: usize) -> u32 {
        self.bytes.get(at..at + 4).map_or(0, |b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]))
    }
}

impl Device {
    /// What was seen that a correct driver does not do.
    pub fn doorbell_faults(&self) -> Faults {
        self.doorbells.faults
    }

    /// A write to a UAR page.
    pub(crate) fn uar_write(&mut self, uar: u32, offset: u64, from: &[u8]) {
        let word = |at: usize| {
            from.get(at..at + 4).map_or(0, |b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]))
        };
        if offset < SEND {
            match (offset, from.len()) {
                (CQ, 8) => self.cq_doorbell(uar, word(0), word(4)),
                (EQ_ARM, 4) => self.eq_doorbell(uar, word(0), true),
                (EQ_UPDATE, 4) => self.eq_doorbell(uar, word(0), false),
                _ => {
                    log::debug!("{} bytes to {offset:#x} of UAR {uar}", from.len());
                    self.doorbells.faults.stray += 1;
                }
            }
            return;
        }
        if !self.doorbells.write_combining {
            // The rest of a copy that nobody takes.
            if offset.is_multiple_of(BUFFER) && from.len() == 8 {
                self.ring(uar, word(0), word(4), None);
            }
            return;
        }
        let place = (uar, offset / REGISTER);
        let end = offset + from.len() as u64;
        let bells = &mut self.doorbells;
        if let Some(rest) = bells.given_up.remove(&place) {
            if rest.next == offset {
                bells.faults.late += 1;
                if end < rest.end {
                    bells.given_up.insert(place, Rest { next: end, ..rest });
                }
                return;
            }
            // One word alone was a doorbell after all.
            bells.faults.torn += u64::from(rest.next != rest.start + 8);
        }
        match bells.bursts.get_mut(&place) {
            Some(burst)
                if burst.start + burst.bytes.len() as u64 == offset
                    && burst.bytes.len() + from.len() <= BUFFER as usize =>
            {
                burst.bytes.extend(from);
            }
            cut => {
                if let Some(burst) = cut {
                    bells.faults.torn += u64::from(burst.bytes.len() > 8);
                    self.decide(place);
                    self.doorbells.given_up.remove(&place);
                }
                if self.doorbells.bursts.len() >= MAX_BURSTS {
                    self.settle();
                }
                let burst = Burst { uar, start: offset, bytes: from.to_vec() };
                self.doorbells.bursts.insert(place, burst);
            }
        }
        if self.doorbells.bursts.get(&place).is_some_and(Burst::whole) {
            self.decide(place);
        }
    }

    /// Whether a write is being gathered.
    pub fn gathering(&self) -> bool {
        !self.doorbells.bursts.is_empty()
    }

    /// Decides what the gathered writes are: there is no continuation for now.
    pub fn settle(&mut self) {
        while let Some((place, _)) = self.doorbells.bursts.first_key_value() {
            self.decide(*place);
        }
    }

    fn decide(&mut self, place: Place) {
        let Some(burst) = self.doorbells.bursts.remove(&place) else { return };
        if !burst.start.is_multiple_of(BUFFER) || burst.bytes.len() < 8 {
            log::debug!("{} bytes to {:#x} of UAR {}", burst.bytes.len(), burst.start, burst.uar);
            // What does not begin with a buffer is the rest of a copy that another one cut.
            match burst.start.is_multiple_of(BUFFER) {
                true => self.doorbells.faults.stray += 1,
                false => self.doorbells.faults.torn += 1,
            }
            return;
        }
        let whole = burst.whole();
        if !whole {
            let next = burst.start + burst.bytes.len() as u64;
            let rest = Rest { start: burst.start, next, end: burst.start + burst.wanted() as u64 };
            self.doorbells.given_up.insert(place, rest);
        }
        let (first, second) = (burst.word(0), burst.word(4));
        self.ring(burst.uar, first, second, whole.then_some(burst.bytes));
    }

    /// Tells a send queue of work up to and with the request that the words begin.
    fn ring(&mut self, uar: u32, first: u32, second: u32, data: Option<Vec<u8>>) {
        let number = second >> 8;
        let blocks = ((second & 0x3f) * 16).div_ceil(64) as u16;
        let index = (first >> 8) as u16;
        let (ring, owner) = if let Ok(qp) = self.objects.qps.get_mut(number) {
            (qp.send.as_mut(), qp.uar)
        } else if let Ok(sq) = self.objects.sqs.get_mut(number) {
            (Some(&mut sq.ring), sq.uar)
        } else {
            (None, 0)
        };
        let Some(ring) = ring.filter(|_| owner == uar) else {
            log::debug!("doorbell of send queue {number:#x} on UAR {uar}, its own is {owner}");
            self.doorbells.faults.stray += 1;
            return;
        };
        let end = index.wrapping_add(blocks);
        // A record that cannot be read, or makes no sense, is reported when the queue is run.
        let refreshed = ring.refresh(&self.memory);
        self.recorder.saw(self.now, Counter::Send, number, ring.posted().into());
        if refreshed.is_ok() && ring.behind(end) {
            self.doorbells.faults.record_behind += 1;
        }
        // One that was carried out already, because a record told of it before its doorbell came, may
        // have been overwritten.
        if ring.pending(index) {
            let words = [first.to_be_bytes(), second.to_be_bytes()].concat();
            let copy = data.as_ref().unwrap_or(&words);
            let stored = ring.read(&self.memory, index, usize::from(blocks));
            let same = |stored: Vec<u8>| copy.iter().zip(&stored).all(|(copy, own)| copy == own);
            if !stored.is_ok_and(same) {
                self.doorbells.faults.differs += 1;
            }
            if let Some(data) = data {
                ring.set_data(index, data);
            }
        }
        self.wake(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Options;

    fn burst(device: &mut Device, words: std::ops::Range<u64>, pause_after: Option<u64>) {
        for word in words {
            let mut bytes = [0; 8];
            if word == 0 {
                // Two segments: 32 bytes, one block.
                bytes = [0, 0, 0, 0x0a, 0, 0, 0x40, 2];
            }
            device.uar_write(20, SEND + word * 8, &bytes);
            if pause_after == Some(word) {
                device.settle();
            }
        }
    }

    /// There is no queue behind these doorbells, so each that is understood counts as stray.
    #[test]
    fn a_copy_is_one_doorbell_however_it_arrives() {
        let mut device = Device::new(Options::default(), 1);
        burst(&mut device, 0..8, None);
        assert!(!device.gathering());
        assert_eq!(device.doorbell_faults(), Faults { stray: 1, ..Faults::default() });
        burst(&mut device, 0..8, Some(0));
        assert_eq!(device.doorbell_faults(), Faults { stray: 2, late: 7, ..Faults::default() });
    }

    #[test]
    fn a_copy_that_stops_short_is_torn() {
        for pause in [None, Some(2)] {
            let mut device = Device::new(Options::default(), 1);
            burst(&mut device, 0..3, pause);
            burst(&mut device, 0..1, None);
            device.settle();
            let want = Faults { stray: 2, torn: 1, ..Faults::default() };
            assert_eq!(device.doorbell_faults(), want);
        }
    }

    /// What two processors do to one register that they do not lock: words of one copy among those
    /// of another, in the same buffer or in the other one.
    #[test]
    fn copies_that_cut_into_each_other_are_torn() {
        for other in [0, BUFFER] {
            let mut device = Device::new(Options::default(), 1);
            for word in 0..8 {
                let bytes = if word == 0 { [0, 0, 0, 0x0a, 0, 0, 0x40, 2] } else { [0; 8] };
                device.uar_write(20, SEND + word * 8, &bytes);
                device.uar_write(20, SEND + other + word * 8, &bytes);
            }
            device.settle();
            assert!(device.doorbell_faults().torn > 0, "{:?}", device.doorbell_faults());
        }
    }

    #[test]
    fn processors_do_not_tear_each_others_copies() {
        let mut device = Device::new(Options::default(), 1);
        for word in 0..8 {
            let bytes = if word == 0 { [0, 0, 0, 0x0a, 0, 0, 0x40, 2] } else { [0; 8] };
            device.uar_write(20, SEND + word * 8, &bytes);
            device.uar_write(21, SEND + word * 8, &bytes);
            device.uar_write(20, SEND + REGISTER + word * 8, &bytes);
        }
        assert!(!device.gathering());
        assert_eq!(device.doorbell_faults(), Faults { stray: 3, ..Faults::default() });
    }

    #[test]
    fn without_write_combining_only_the_first_word_counts() {
        let options = Options { write_combining: false, ..Options::default() };
        let mut device = Device::new(options, 1);
        burst(&mut device, 0..8, None);
        assert!(!device.gathering());
        assert_eq!(device.doorbell_faults(), Faults { stray: 1, ..Faults::default() });
    }
}
