//! Tells doorbells from BlueFlame copies in the registers of send queues.
//!
//! The first eight bytes of a WQE, written to such a register, are a doorbell; a whole WQE, written
//! there in ascending order, is a BlueFlame copy. The two look alike until the second write. So the
//! device gathers writes until the WQE is complete, another write comes to the same register, or no
//! write comes for a while. Each processor writes to registers of its own, so each register is
//! gathered apart.

use std::collections::BTreeMap;

/// Bytes of one of the two buffers of a register.
pub(crate) const BUFFER: u64 = 0x100;
/// Bytes of a register: two buffers, used in turn.
pub(crate) const REGISTER: u64 = 0x200;
/// The most registers gathered at once.
const MAX_GATHERED: usize = 64;

/// A register: its UAR page, and its number in the page.
type RegisterId = (u32, u64);

/// Counts of doorbell errors. A correct driver causes none; [`late`](Self::late) counts delays of the host.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct DoorbellErrors {
    /// Parts of BlueFlame copies that stayed incomplete: another write to the register came
    /// between.
    pub torn: u64,
    /// Doorbells whose doorbell record does not cover their WQE, or does not hold their arm word.
    pub record_behind: u64,
    /// BlueFlame copies, or first eight bytes in a doorbell, that differ from the WQE in memory.
    pub differs: u64,
    /// Writes of a BlueFlame copy that came too late, so that the copy counted as a doorbell. The
    /// host causes this, not the driver.
    pub late: u64,
    /// Doorbells of queues that do not exist or are on another UAR page, and writes to UAR pages that are no
    /// doorbell.
    pub stray: u64,
}

/// The rest that a BlueFlame copy still misses after its first eight bytes were treated as a doorbell.
struct LateCopy {
    start: u64,
    next: u64,
    end: u64,
}

struct GatheredWrites {
    uar: u32,
    start: u64,
    bytes: Vec<u8>,
}

/// Writes to the registers of send queues that are not complete yet.
pub struct Doorbells {
    write_combining: bool,
    gathered: BTreeMap<RegisterId, GatheredWrites>,
    /// The rest of each copy that was treated as a doorbell.
    late_copies: BTreeMap<RegisterId, LateCopy>,
    pub(crate) errors: DoorbellErrors,
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
    /// Accepts BlueFlame copies, or only doorbells.
    pub fn new(write_combining: bool) -> Self {
        Self {
            write_combining,
            gathered: BTreeMap::new(),
            late_copies: BTreeMap::new(),
            errors: DoorbellErrors::default(),
        }
    }

    /// Drops the gathered writes, and keeps the counts.
    pub(crate) fn clear(&mut self) {
        self.gathered.clear();
        self.late_copies.clear();
    }

    /// Whether a write may still be continued.
    pub(crate) fn gathering(&self) -> bool {
        !self.gathered.is_empty()
    }

    /// Takes a write to a register of a send queue, `offset` bytes into its UAR page. Returns the
    /// doorbells that are complete.
    pub(crate) fn write(&mut self, uar: u32, offset: u64, from: &[u8]) -> Vec<Doorbell> {
        let mut complete = Vec::new();
        if !self.write_combining {
            // Later words of a BlueFlame copy are ignored.
            let doorbell = from.try_into().ok().filter(|_| offset % BUFFER == 0);
            complete.extend(doorbell.map(|first| Doorbell {
                uar,
                words: words(first),
                copy: None,
            }));
            return complete;
        }
        let register = (uar, offset / REGISTER);
        let end = offset + from.len() as u64;
        if let Some(copy) = self.late_copies.remove(&register) {
            if copy.next == offset {
                self.errors.late += 1;
                if end < copy.end {
                    self.late_copies.insert(register, LateCopy { next: end, ..copy });
                }
                return complete;
            }
            // A single word was a doorbell after all.
            self.errors.torn += u64::from(copy.next != copy.start + 8);
        }
        match self.gathered.get_mut(&register) {
            Some(writes)
                if writes.start + writes.bytes.len() as u64 == offset
                    && writes.bytes.len() + from.len() <= BUFFER as usize =>
            {
                writes.bytes.extend(from);
            }
            cut => {
                if let Some(writes) = cut {
                    self.errors.torn += u64::from(writes.bytes.len() > 8);
                    complete.extend(self.finish(register));
                    self.late_copies.remove(&register);
                }
                if self.gathered.len() >= MAX_GATHERED {
                    complete.extend(self.flush_gathered_writes());
                }
                let writes = GatheredWrites { uar, start: offset, bytes: from.to_vec() };
                self.gathered.insert(register, writes);
            }
        }
        if self.gathered.get(&register).is_some_and(GatheredWrites::whole) {
            complete.extend(self.finish(register));
        }
        complete
    }

    /// Takes a doorbell or a BlueFlame copy that came whole, `offset` bytes into its UAR page.
    pub(crate) fn whole(&mut self, uar: u32, offset: u64, from: &[u8]) -> Option<Doorbell> {
        let Some(first) = from.first_chunk::<8>().filter(|_| offset % BUFFER == 0) else {
            self.errors.stray += 1;
            return None;
        };
        let whole = is_whole(from);
        self.errors.torn += u64::from(self.write_combining && from.len() > 8 && !whole);
        let copy = (self.write_combining && whole).then(|| from.to_vec());
        Some(Doorbell { uar, words: words(first), copy })
    }

    /// Treats the gathered writes as complete: no continuation has come.
    pub(crate) fn flush_gathered_writes(&mut self) -> Vec<Doorbell> {
        let mut complete = Vec::new();
        while let Some((register, _)) = self.gathered.first_key_value() {
            let register = *register;
            complete.extend(self.finish(register));
        }
        complete
    }

    /// Treats the gathered writes that may be whole doorbells as complete.
    pub(crate) fn flush_single_writes(&mut self) -> Vec<Doorbell> {
        let single: Vec<_> = self
            .gathered
            .iter()
            .filter(|(_, writes)| writes.bytes.len() == 8)
            .map(|(register, _)| *register)
            .collect();
        single.into_iter().filter_map(|register| self.finish(register)).collect()
    }

    fn finish(&mut self, register: RegisterId) -> Option<Doorbell> {
        let writes = self.gathered.remove(&register)?;
        let first = writes.bytes.first_chunk::<8>().map(words);
        let Some(words) = first.filter(|_| writes.start % BUFFER == 0) else {
            log::debug!(
                "{} bytes to {:#x} of UAR {}",
                writes.bytes.len(),
                writes.start,
                writes.uar
            );
            // Writes that do not begin at a buffer are the rest of a copy that another one
            // interrupted.
            match writes.start % BUFFER == 0 {
                true => self.errors.stray += 1,
                false => self.errors.torn += 1,
            }
            return None;
        };
        let whole = writes.whole();
        if !whole {
            let next = writes.start + writes.bytes.len() as u64;
            let end = writes.start + wanted(&writes.bytes) as u64;
            let copy = LateCopy { start: writes.start, next, end };
            self.late_copies.insert(register, copy);
        }
        Some(Doorbell { uar: writes.uar, words, copy: whole.then_some(writes.bytes) })
    }
}

fn words(bytes: &[u8; 8]) -> [u32; 2] {
    let value = u64::from_be_bytes(*bytes);
    [(value >> 32) as u32, value as u32]
}

impl GatheredWrites {
    /// Whether this is a whole WQE.
    fn whole(&self) -> bool {
        is_whole(&self.bytes)
    }
}

/// Bytes of the WQE that begins with `bytes`, in whole WQEBBs.
fn wanted(bytes: &[u8]) -> usize {
    (usize::from(bytes.get(7).copied().unwrap_or(0) & 0x3f) * 16).next_multiple_of(64)
}

/// Whether `bytes` are a whole WQE.
fn is_whole(bytes: &[u8]) -> bool {
    bytes.len() > 8 && bytes.len() >= wanted(bytes)
}
