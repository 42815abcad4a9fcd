//! The line of those who wait for room in a queue.
//!
//! Wakers are cloned and dropped by the program's code, which may use the same queue: so nothing here
//! clones one, and whatever is taken out is given to the caller, who lets go of the lock first.

use std::collections::VecDeque;
use std::task::Waker;

/// Those who wait for room, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    /// By increasing number.
    line: VecDeque<(u64, Waker)>,
    next: u64,
}

impl Waiters {
    /// Whether it is the turn of `number`, or of somebody who just came.
    pub(super) fn is_turn(&self, number: Option<u64>) -> bool {
        match (self.line.front(), number) {
            (None, _) => true,
            (Some((first, _)), Some(number)) => *first == number,
            (Some(_), None) => false,
        }
    }

    /// Stands in line, at the end if for the first time; the waker that stood there before.
    pub(super) fn stand(&mut self, number: &mut Option<u64>, waker: Waker) -> Option<Waker> {
        if let Some(number) = *number {
            if let Ok(at) = self.line.binary_search_by_key(&number, |(other, _)| *other) {
                return self.line.get_mut(at).map(|(_, old)| std::mem::replace(old, waker));
            }
        }
        *number = Some(self.next);
        self.line.push_back((self.next, waker));
        self.next += 1;
        None
    }

    /// Leaves the line: the waker that stood there, and who is first now, if that changed.
    pub(super) fn leave(&mut self, number: u64) -> [Option<Waker>; 2] {
        let at = self.line.binary_search_by_key(&number, |(other, _)| *other).ok();
        let left = at.and_then(|at| self.line.remove(at)).map(|(_, waker)| waker);
        [left, if at == Some(0) { self.first() } else { None }]
    }

    /// Everybody leaves.
    pub(super) fn dismiss(&mut self) -> impl Iterator<Item = Waker> + '_ {
        self.line.drain(..).map(|(_, waker)| waker)
    }

    /// Who is first, to be woken. They look for room when they are, and leave another waker if there
    /// is none.
    pub(super) fn first(&mut self) -> Option<Waker> {
        self.line.front_mut().map(|(_, waker)| take(waker))
    }
}

/// A waker that is to be woken once, without a clone of it.
pub(super) fn take(waker: &mut Waker) -> Waker {
    std::mem::replace(waker, Waker::noop().clone())
}
