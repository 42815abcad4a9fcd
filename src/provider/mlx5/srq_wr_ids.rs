//! The state that the poster and the pollers of a shared receive queue share: the work request ids, and the free
//! WQEs. Any number of pollers push WQEs to a list, the row, and the one poster takes the whole row.

use crate::sync::ring_array::RingArray;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// The entry of a WQE, which the poster and the pollers share.
#[derive(Debug, Default)]
pub(super) struct SrqWrId {
    /// The work request id.
    pub(super) wr_id: AtomicU64,
    /// The next free WQE, while this one is free.
    pub(super) next: AtomicU32,
}

/// WQEs that came back, linked in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) first: u16,
    last: u16,
    pub(super) count: u32,
}

impl Row {
    #[inline]
    fn of(word: u64) -> Row {
        Row { first: word as u16, last: (word >> 16) as u16, count: (word >> 32) as u32 }
    }

    #[inline]
    fn word(self) -> u64 {
        u64::from(self.count) << 32 | u64::from(self.last) << 16 | u64::from(self.first)
    }
}

/// The work request ids of a shared receive queue, and the WQEs that come back.
#[derive(Debug)]
pub(crate) struct SrqWrIds {
    entries: RingArray<SrqWrId>,
    /// The WQEs that came back, as a [`Row`]: the latest is its first.
    back: AtomicU64,
}

impl SrqWrIds {
    pub(super) fn new(entries: u32) -> SrqWrIds {
        SrqWrIds { entries: RingArray::new(entries), back: AtomicU64::new(0) }
    }

    /// The entries, by the index of their WQE.
    pub(super) fn entries(&self) -> &RingArray<SrqWrId> {
        &self.entries
    }

    /// Gives the WQE back that a completion names, and returns its work request id. Any number of threads
    /// may do so at once.
    #[inline]
    pub(crate) fn complete(&self, at: u32) -> u64 {
        let at = at & (self.entries.len() - 1);
        let entry = self.entries.at(at);
        let wr_id = entry.wr_id.load(Ordering::Relaxed);
        let mut word = self.back.load(Ordering::Relaxed);
        loop {
            let back = Row::of(word);
            // The poster sets the link behind the last WQE of a row.
            entry.next.store(back.first.into(), Ordering::Relaxed);
            let first = at as u16;
            let last = if back.count == 0 { first } else { back.last };
            let row = Row { first, last, count: back.count.wrapping_add(1) };
            // Release: the id is read, and the next WQE is set, before the poster finds this one. The row
            // is only ever taken whole, so that no WQE is compared after it was used again.
            match self.back.compare_exchange_weak(
                word,
                row.word(),
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return wr_id,
                Err(seen) => word = seen,
            }
        }
    }

    /// Makes every WQE free, linked to the one behind it, and with its index as its id: none is outstanding.
    pub(super) fn resume(&self) {
        self.back.store(0, Ordering::Relaxed);
        for at in 0..self.entries.len() {
            let entry = self.entries.at(at);
            entry.wr_id.store(at.into(), Ordering::Relaxed);
            entry.next.store((at + 1) & (self.entries.len() - 1), Ordering::Relaxed);
        }
    }

    /// Takes all WQEs that came back, and links the last to the WQE `behind`.
    #[inline]
    pub(super) fn take(&self, behind: u32) -> Option<Row> {
        if self.back.load(Ordering::Relaxed) == 0 {
            return None;
        }
        // Acquire pairs with the Release of `complete`.
        let row = Row::of(self.back.swap(0, Ordering::Acquire));
        self.entries.at(row.last.into()).next.store(behind, Ordering::Relaxed);
        Some(row)
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::sync::{AccessProbe, bounded_model};
    use loom::sync::Arc;
    use loom::thread;

    /// Two pollers give entries back while the poster takes: each entry comes back once, after its
    /// number was read. Loom does not report an atomic that is read too late, so `held` is accessed
    /// along with each number.
    #[test]
    fn two_give_back_while_one_takes() {
        // Each further preemption takes two to five times as long: 0.2 s of a processor with three, 6 s with six.
        bounded_model(3, 6, || {
            let wr_ids = Arc::new(SrqWrIds::new(2));
            let held = Arc::new([AccessProbe::new(), AccessProbe::new()]);
            wr_ids.entries.at(0).wr_id.store(10, Ordering::Relaxed);
            wr_ids.entries.at(1).wr_id.store(11, Ordering::Relaxed);
            let pollers: Vec<_> = (0..2u32)
                .map(|at| {
                    let (wr_ids, held) = (wr_ids.clone(), held.clone());
                    thread::spawn(move || {
                        held[at as usize].read();
                        assert_eq!(wr_ids.complete(at), u64::from(at) + 10);
                    })
                })
                .collect();
            // All WQEs of a row, and the link behind the last.
            let take = |wr_ids: &SrqWrIds| {
                let mut seen = Vec::new();
                let Some(row) = wr_ids.take(7) else { return seen };
                let mut at = u32::from(row.first);
                for _ in 0..row.count {
                    seen.push(at);
                    at = wr_ids.entries.at(at).next.load(Ordering::Relaxed);
                }
                assert_eq!((seen.last(), at), (Some(&row.last.into()), 7));
                seen
            };
            let poster = {
                let wr_ids = wr_ids.clone();
                thread::spawn(move || {
                    let seen = take(&wr_ids);
                    for at in &seen {
                        // The test posts the entry again at once.
                        held[*at as usize].write();
                        wr_ids.entries.at(*at).wr_id.store(99, Ordering::Relaxed);
                    }
                    seen
                })
            };
            for poller in pollers {
                poller.join().unwrap();
            }
            let mut seen = poster.join().unwrap();
            seen.extend(take(&wr_ids));
            seen.sort_unstable();
            assert_eq!(seen, [0, 1]);
        });
    }
}
