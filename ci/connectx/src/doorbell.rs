//! Writes to the registers of send queues in UAR pages: which are doorbells, and which BlueFlame copies.
//!
//! The first eight bytes of a WQE, written to such a register, are a doorbell; a whole WQE, written there
//! in ascending order, is a BlueFlame copy. The two look alike until the second write. So writes are
//! gathered until the WQE is complete, another write comes to the same register, or no write comes for
//! a while. Processors write to registers of their own at the same time, so each register is gathered
//! by itself.

use std::collections::BTreeMap;

/// Bytes of one of the two buffers of a register.
pub(crate) const BUFFER: u64 = 0x100;
/// Bytes of a register: two buffers, used in turn.
pub(crate) const REGISTER: u64 = 0x200;
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

/// A doorbell, alone or with a copy of the WQE.
pub(crate) struct Doorbell {
    pub(crate) uar: u32,
    /// The first eight bytes of the WQE.
    pub(crate) words: [u32; 2],
    /// The whole WQE, if it was copied.
    pub(crate) copy: Option<Vec<u8>>,
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

    /// Drops what is being gathered. What was counted stays.
    pub(crate) fn forget(&mut self) {
        self.bursts.clear();
        self.given_up.clear();
    }

    /// Whether a write is being gathered.
    pub(crate) fn gathering(&self) -> bool {
        !self.bursts.is_empty()
    }

    /// Takes a write to a register of a send queue, `offset` bytes into its UAR page. Answers the
    /// doorbells that are complete with it.
    pub(crate) fn write(&mut self, uar: u32, offset: u64, from: &[u8]) -> Vec<Doorbell> {
        let mut complete = Vec::new();
        if !self.write_combining {
            // The rest of a copy that nobody takes.
            if offset.is_multiple_of(BUFFER)
                && let Some(first) = from.first_chunk::<8>().filter(|_| from.len() == 8)
            {
                complete.push(Doorbell { uar, words: words(first), copy: None });
            }
            return complete;
        }
        let place = (uar, offset / REGISTER);
        let end = offset + from.len() as u64;
        if let Some(rest) = self.given_up.remove(&place) {
            if rest.next == offset {
                self.faults.late += 1;
                if end < rest.end {
                    self.given_up.insert(place, Rest { next: end, ..rest });
                }
                return complete;
            }
            // One word alone was a doorbell after all.
            self.faults.torn += u64::from(rest.next != rest.start + 8);
        }
        match self.bursts.get_mut(&place) {
            Some(burst)
                if burst.start + burst.bytes.len() as u64 == offset
                    && burst.bytes.len() + from.len() <= BUFFER as usize =>
            {
                burst.bytes.extend(from);
            }
            cut => {
                if let Some(burst) = cut {
                    self.faults.torn += u64::from(burst.bytes.len() > 8);
                    complete.extend(self.decide(place));
                    self.given_up.remove(&place);
                }
                if self.bursts.len() >= MAX_BURSTS {
                    complete.extend(self.settle());
                }
                let burst = Burst { uar, start: offset, bytes: from.to_vec() };
                self.bursts.insert(place, burst);
            }
        }
        if self.bursts.get(&place).is_some_and(Burst::whole) {
            complete.extend(self.decide(place));
        }
        complete
    }

    /// Decides what the gathered writes are: there is no continuation for now.
    pub(crate) fn settle(&mut self) -> Vec<Doorbell> {
        let mut complete = Vec::new();
        while let Some((place, _)) = self.bursts.first_key_value() {
            let place = *place;
            complete.extend(self.decide(place));
        }
        complete
    }

    fn decide(&mut self, place: Place) -> Option<Doorbell> {
        let burst = self.bursts.remove(&place)?;
        let first = burst.bytes.first_chunk::<8>().map(words);
        let Some(words) = first.filter(|_| burst.start.is_multiple_of(BUFFER)) else {
            log::debug!("{} bytes to {:#x} of UAR {}", burst.bytes.len(), burst.start, burst.uar);
            // What does not begin with a buffer is the rest of a copy that another one cut.
            match burst.start.is_multiple_of(BUFFER) {
                true => self.faults.stray += 1,
                false => self.faults.torn += 1,
            }
            return None;
        };
        let whole = burst.whole();
        if !whole {
            let next = burst.start + burst.bytes.len() as u64;
            let rest = Rest { start: burst.start, next, end: burst.start + burst.wanted() as u64 };
            self.given_up.insert(place, rest);
        }
        Some(Doorbell { uar: burst.uar, words, copy: whole.then_some(burst.bytes) })
    }
}

fn words(bytes: &[u8; 8]) -> [u32; 2] {
    let value = u64::from_be_bytes(*bytes);
    [(value >> 32) as u32, value as u32]
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
}
