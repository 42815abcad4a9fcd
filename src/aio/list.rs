//! The requests of a list or an inbox, after they were posted.

use super::inflight::Inflight;
use super::locking::Locking;
use super::op::{OpError, OpErrorKind};
use crate::first_panic::FirstPanic;
use crate::lending::loan_table::WrIds;
use std::collections::VecDeque;
use std::iter;

/// Requests whose ends were not returned, in the order in which they were posted or refused. Those of a batch follow
/// each other in the loan table: 32 writes are one run of `wr_id`s.
pub(super) struct Posted<L> {
    /// The first ones; empty if there are none, or the first one was refused.
    run: WrIds,
    behind: VecDeque<Entry<L>>,
    len: usize,
}

enum Entry<L> {
    /// Never empty.
    Posted(WrIds),
    Refused(Box<OpError<L>>),
}

impl<L> Default for Posted<L> {
    fn default() -> Self {
        Posted { run: WrIds::default(), behind: VecDeque::new(), len: 0 }
    }
}

impl<L> Posted<L> {
    /// How many requests there are.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends a request that was posted.
    pub(super) fn push(&mut self, wr_id: u64) {
        self.append(WrIds::one(wr_id));
    }

    /// Appends requests that were posted.
    pub(super) fn append(&mut self, more: WrIds) {
        if more.is_empty() {
            return;
        }
        self.len += more.len();
        let merged = match self.behind.back_mut() {
            None => self.run.append(&more),
            Some(Entry::Posted(run)) => run.append(&more),
            Some(Entry::Refused(_)) => false,
        };
        if !merged {
            self.behind.push_back(Entry::Posted(more));
        }
    }

    /// Appends a request that was refused.
    #[cold]
    pub(super) fn refuse(&mut self, memory: Option<L>, kind: OpErrorKind) {
        self.len += 1;
        self.behind.push_back(Entry::Refused(Box::new(OpError { memory, kind })));
    }

    /// The loan of the first request; `None` if it was refused, or there is none.
    #[inline(always)]
    pub(super) fn first(&self) -> Option<u64> {
        self.run.first()
    }

    /// The loan of the last request; `None` if it was refused, or there is none.
    pub(super) fn last(&self) -> Option<u64> {
        match self.behind.back() {
            None => self.run.newest(),
            Some(Entry::Posted(run)) => run.newest(),
            Some(Entry::Refused(_)) => None,
        }
    }

    /// Removes the [first](Self::first) request, whose loan this is.
    #[inline(always)]
    pub(super) fn pop_first(&mut self, wr_id: u64) {
        self.len -= 1;
        self.run.remove_first(wr_id);
        if self.run.is_empty() {
            self.next_run();
        }
    }

    /// Removes the first requests, of one run, for which `is_over` says so. Returns whether the next one is of another
    /// run.
    #[inline(always)]
    pub(super) fn pop_while(&mut self, mut is_over: impl FnMut(u64) -> bool) -> bool {
        let mut run = self.run.clone();
        while run.first().is_some_and(&mut is_over) {
            run.next();
        }
        self.len -= self.run.len() - run.len();
        self.run = run;
        self.run.is_empty() && self.next_run()
    }

    /// The first run has ended. Returns whether there is another one.
    fn next_run(&mut self) -> bool {
        if let Some(Entry::Posted(_)) = self.behind.front() {
            if let Some(Entry::Posted(run)) = self.behind.pop_front() {
                self.run = run;
            }
        }
        !self.run.is_empty()
    }

    /// Changes the list as a whole.
    fn change<V>(&mut self, act: impl FnOnce(&mut VecDeque<Entry<L>>) -> V) -> V {
        let first = std::mem::take(&mut self.run);
        if !first.is_empty() {
            self.behind.push_front(Entry::Posted(first));
        }
        let value = act(&mut self.behind);
        self.next_run();
        value
    }

    /// Removes a request that was posted, wherever it is.
    pub(super) fn remove(&mut self, wr_id: u64) {
        if self.first() == Some(wr_id) {
            return self.pop_first(wr_id);
        }
        self.len -= usize::from(self.change(|entries| {
            for at in 0..entries.len() {
                let Some(Entry::Posted(before)) = entries.get_mut(at) else { continue };
                let Some(behind) = before.split_off(wr_id) else { continue };
                if before.is_empty() {
                    entries.remove(at);
                    if !behind.is_empty() {
                        entries.insert(at, Entry::Posted(behind));
                    }
                } else if !behind.is_empty() {
                    entries.insert(at + 1, Entry::Posted(behind));
                }
                return true;
            }
            false
        }));
    }

    /// Removes the first request, if it was refused.
    pub(super) fn pop_refused(&mut self) -> Option<OpError<L>> {
        if self.run.is_empty() { self.take_refused() } else { None }
    }

    /// Removes the first request that was refused.
    #[cold]
    pub(super) fn take_refused(&mut self) -> Option<OpError<L>> {
        let at = self.behind.iter().position(|entry| matches!(entry, Entry::Refused(_)))?;
        let Some(Entry::Refused(refused)) = self.behind.remove(at) else { return None };
        self.len -= 1;
        if self.run.is_empty() {
            self.next_run();
        }
        Some(*refused)
    }

    /// The loans of the requests that were posted.
    pub(super) fn wr_ids(&self) -> impl Iterator<Item = u64> + Clone + '_ {
        let behind = self.behind.iter().filter_map(|entry| match entry {
            Entry::Posted(run) => Some(run),
            Entry::Refused(_) => None,
        });
        iter::once(&self.run).chain(behind).flat_map(WrIds::clone)
    }

    /// Nobody waits for the requests any more. Wakers and memory of the program are dropped here, and their panics
    /// kept.
    pub(super) fn give_up<S: Locking>(&mut self, inflight: &Inflight<S>, calls: &mut FirstPanic) {
        self.len = 0;
        let first = std::mem::take(&mut self.run);
        for entry in iter::once(Entry::Posted(first)).chain(self.behind.drain(..)) {
            match entry {
                Entry::Posted(run) => {
                    run.for_each(|wr_id| calls.catch(|| inflight.abandon(wr_id)));
                }
                Entry::Refused(refused) => calls.catch(|| drop(refused)),
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::wr::PostError;

    const KIND: OpErrorKind = OpErrorKind::Post(PostError::Forked);

    /// The `wr_id`s of a table, by place.
    fn at(n: u64) -> u64 {
        n << 6
    }

    fn places(posted: &Posted<u8>) -> Vec<u64> {
        posted.wr_ids().map(|wr_id| wr_id >> 6).collect()
    }

    #[test]
    fn requests_leave_a_list_from_anywhere() {
        let mut posted = Posted::<u8>::default();
        [0, 1, 2, 5, 6].into_iter().for_each(|n| posted.push(at(n)));
        posted.refuse(Some(7), KIND);
        (8..11).for_each(|n| posted.push(at(n)));
        assert_eq!((posted.len(), posted.first(), posted.last()), (9, Some(at(0)), Some(at(10))));
        for (wr_id, left) in [
            (1, &[0, 2, 5, 6, 8, 9, 10][..]),
            (0, &[2, 5, 6, 8, 9, 10]),
            (10, &[2, 5, 6, 8, 9]),
            (5, &[2, 6, 8, 9]),
            (77, &[2, 6, 8, 9]),
        ] {
            posted.remove(at(wr_id));
            assert_eq!((places(&posted), posted.len()), (left.to_vec(), left.len() + 1));
        }
        assert!(posted.pop_refused().is_none(), "it is not the first");
        assert!(posted.pop_while(|wr_id| wr_id == at(2)), "another run comes next");
        assert!(
            !posted.pop_while(|_| true) && posted.first().is_none(),
            "a refused one comes next"
        );
        assert_eq!(posted.pop_refused().and_then(|refused| refused.memory), Some(7));
        assert!(!posted.pop_while(|wr_id| wr_id == at(8)));
        assert_eq!((places(&posted), posted.len()), (vec![9], 1));
        posted.pop_first(at(9));
        assert!(posted.is_empty() && posted.first().is_none() && posted.last().is_none());
    }
}
