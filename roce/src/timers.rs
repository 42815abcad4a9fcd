//! Times: the code of each timer in nanoseconds, and the queue pairs whose timers run.
//!
//! The table of RNR timers is `rnrnak_usec` of the kernel's `rxe_comp.c`, but for code 25: rxe waits 61.41 ms, where
//! the name of the code, `IB_RNR_TIMER_061_44` of `ib_verbs.h`, says 61.44 ms.

use alloc::vec::Vec;

/// A time, or a span of time, in nanoseconds. Times count from a moment that the caller chooses.
pub type Nanoseconds = u64;

/// How long a requester waits after an RNR NAK with this code; only the lower five bits count.
pub const fn rnr_timer(code: u8) -> Nanoseconds {
    // In units of 10 microseconds.
    const UNITS: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    UNITS[(code & 31) as usize] * 10_000
}

/// How long a requester waits for a response: 4.096 microseconds times 2 to the power of the code; `None` for ever, if
/// the code is 0. Only the lower five bits count. From `IB_QP_TIMEOUT` in `rxe_qp_from_attr` of `rxe_qp.c`.
pub const fn ack_timeout(code: u8) -> Option<Nanoseconds> {
    match code & 31 {
        0 => None,
        code => Some(4096 << code),
    }
}

/// The times at which queue pairs want to run: a heap that knows the place of each, so that a timer moves without
/// an allocation.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    heap: Vec<(Nanoseconds, u32)>,
    /// The place of each slot in the heap, or [`NOWHERE`].
    places: Vec<u32>,
}

const NOWHERE: u32 = u32::MAX;

impl Timers {
    /// Makes room for a slot.
    pub(crate) fn add_slot(&mut self, slot: u32) {
        let slots = slot as usize + 1;
        if self.places.len() < slots {
            self.places.resize(slots, NOWHERE);
            self.heap.reserve(slots - self.heap.len());
        }
    }

    #[cfg(test)]
    pub(crate) fn capacity(&self) -> usize {
        self.heap.capacity() + self.places.capacity()
    }

    /// Sets, moves or stops the timer of a slot.
    pub(crate) fn set(&mut self, slot: u32, due: Option<Nanoseconds>) {
        let Some(&place) = self.places.get(slot as usize) else { return };
        match (due, place) {
            (None, NOWHERE) => {}
            (None, place) => self.remove(place as usize),
            (Some(due), NOWHERE) => {
                self.heap.push((due, slot));
                self.places[slot as usize] = self.heap.len() as u32 - 1;
                self.up(self.heap.len() - 1);
            }
            (Some(due), place) => {
                let place = place as usize;
                if self.heap[place].0 != due {
                    self.heap[place].0 = due;
                    self.up(place);
                    self.down(place);
                }
            }
        }
    }

    /// The first timer.
    pub(crate) fn first(&self) -> Option<Nanoseconds> {
        self.heap.first().map(|(due, _)| *due)
    }

    /// Stops a timer that is due, and returns its slot.
    pub(crate) fn pop_due(&mut self, now: Nanoseconds) -> Option<u32> {
        let (_, slot) = *self.heap.first().filter(|(due, _)| *due <= now)?;
        self.remove(0);
        Some(slot)
    }

    fn remove(&mut self, place: usize) {
        let (_, slot) = self.heap.swap_remove(place);
        self.places[slot as usize] = NOWHERE;
        if place < self.heap.len() {
            self.places[self.heap[place].1 as usize] = place as u32;
            self.up(place);
            self.down(place);
        }
    }

    fn up(&mut self, mut place: usize) {
        while place > 0 && self.heap[place] < self.heap[(place - 1) / 2] {
            self.swap(place, (place - 1) / 2);
            place = (place - 1) / 2;
        }
    }

    fn down(&mut self, mut place: usize) {
        loop {
            let children = [2 * place + 1, 2 * place + 2];
            let first = children.into_iter().filter(|at| *at < self.heap.len());
            let Some(child) = first.min_by_key(|at| self.heap[*at]) else { return };
            if self.heap[place] <= self.heap[child] {
                return;
            }
            self.swap(place, child);
            place = child;
        }
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.heap.swap(a, b);
        self.places[self.heap[a].1 as usize] = a as u32;
        self.places[self.heap[b].1 as usize] = b as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_the_times_that_the_manuals_print() {
        assert_eq!(rnr_timer(0), 655_360_000);
        assert_eq!(rnr_timer(1), 10_000);
        assert_eq!(rnr_timer(12), 640_000);
        assert_eq!(rnr_timer(31), 491_520_000);
        assert_eq!(ack_timeout(0), None);
        assert_eq!(ack_timeout(14), Some(67_108_864));
        assert_eq!(ack_timeout(31), Some(4096 << 31));
    }

    #[test]
    fn timers_end_in_the_order_of_their_times_however_they_move() {
        let mut timers = Timers::default();
        (0..64).for_each(|slot| timers.add_slot(slot));
        let mut model = [None; 64];
        let mut word = 1u64;
        for _ in 0..5_000 {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let slot = (word >> 40) as u32 % 64;
            let due = (word >> 20 & 3 != 0).then_some(word >> 50);
            timers.set(slot, due);
            model[slot as usize] = due;
            assert_eq!(timers.first(), model.iter().flatten().min().copied());
        }
        let mut last = 0;
        while let Some(slot) = timers.pop_due(u64::MAX) {
            let due = model[slot as usize].take().unwrap();
            assert!(due >= last);
            last = due;
        }
        assert!(model.iter().all(Option::is_none));
    }
}
