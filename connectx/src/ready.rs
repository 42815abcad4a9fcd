//! The queues that have work, in the order in which they are served.
//!
//! Pairs with the scheduler of [`crate::fabric`].

use std::collections::VecDeque;

/// Queues with work, each once.
#[derive(Default)]
pub(crate) struct ReadyQueues {
    order: VecDeque<u32>,
    /// A bit for each number: whether the queue is in `order`.
    waits: Vec<u64>,
}

impl ReadyQueues {
    /// Appends a queue, unless it is there.
    pub(crate) fn push(&mut self, number: u32) {
        let (word, bit) = place(number);
        if word >= self.waits.len() {
            self.waits.resize(word + 1, 0);
        }
        if self.waits[word] & bit == 0 {
            self.waits[word] |= bit;
            self.order.push_back(number);
        }
    }

    /// Takes the queue with `before` others in front.
    pub(crate) fn take(&mut self, before: usize) -> Option<u32> {
        let number = match before {
            0 => self.order.pop_front(),
            _ => self.order.remove(before),
        }?;
        let (word, bit) = place(number);
        self.waits[word] &= !bit;
        Some(number)
    }

    /// The number of queues.
    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    /// Takes all.
    pub(crate) fn clear(&mut self) {
        self.order.clear();
        self.waits.fill(0);
    }
}

/// The word and the bit of a number.
fn place(number: u32) -> (usize, u64) {
    ((number / 64) as usize, 1 << (number % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_waits_once_and_the_others_keep_their_order() {
        let mut ready = ReadyQueues::default();
        [7, 0x1_ffff, 7, 64, 63].into_iter().for_each(|number| ready.push(number));
        assert_eq!(ready.len(), 4);
        assert_eq!((ready.take(2), ready.take(3)), (Some(64), None));
        ready.push(64);
        ready.push(63);
        let rest: Vec<_> = std::iter::from_fn(|| ready.take(0)).collect();
        assert_eq!(rest, [7, 0x1_ffff, 63, 64]);
        ready.push(7);
        ready.clear();
        assert_eq!(ready.len(), 0);
        ready.push(7);
        assert_eq!(ready.take(0), Some(7));
    }
}
