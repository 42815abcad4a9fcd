//! The line of those who wait for room in a queue.

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
    pub(super) fn stand(&mut self, number: &mut Option<u64>, waker: &Waker) -> Option<Waker> {
        if let Some(number) = *number {
            if let Ok(at) = self.line.binary_search_by_key(&number, |(other, _)| *other) {
                return self.line.get_mut(at).and_then(|(_, old)| replace(old, waker));
            }
        }
        *number = Some(self.next);
        self.line.push_back((self.next, waker.clone()));
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

    pub(super) fn first(&self) -> Option<Waker> {
        self.line.front().map(|(_, waker)| waker.clone())
    }
}

/// Puts a waker in another one's place, unless both wake the same. Whoever gets the old one drops it
/// after releasing the lock: it may be the last that holds a task, and with it futures of the same
/// table.
pub(super) fn replace(old: &mut Waker, new: &Waker) -> Option<Waker> {
    if old.will_wake(new) {
        return None;
    }
    Some(std::mem::replace(old, new.clone()))
}
