//! The requests of a list or an inbox that are posted.

use super::inflight::Inflight;
use super::locking::Locking;
use super::op::{OpError, OpErrorKind};
use crate::first_panic::FirstPanic;
use crate::lending::loan_table::WrIds;
use std::collections::VecDeque;

/// Requests whose ends were not returned, in the order in which they were posted or refused. Those of a batch follow each
/// other in the loan table: 32 writes take one entry.
pub(super) struct Posted<L> {
    entries: VecDeque<Entry<L>>,
    len: usize,
}

enum Entry<L> {
    /// Loans; never empty.
    Posted(WrIds),
    Refused(Box<OpError<L>>),
}

impl<L> Default for Posted<L> {
    fn default() -> Self {
        Posted { entries: VecDeque::new(), len: 0 }
    }
}

impl<L> Posted<L> {
    /// How many requests there are.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Appends a request that was posted.
    #[inline(always)]
    pub(super) fn push(&mut self, wr_id: u64) {
        self.len += 1;
        if let Some(Entry::Posted(wr_ids)) = self.entries.back_mut() {
            if wr_ids.append(wr_id) {
                return;
            }
        }
        self.push_run(WrIds::one(wr_id));
    }

    #[inline(never)]
    fn push_run(&mut self, wr_ids: WrIds) {
        self.entries.push_back(Entry::Posted(wr_ids));
    }

    /// Appends a request that was refused.
    #[cold]
    pub(super) fn refuse(&mut self, memory: Option<L>, kind: OpErrorKind) {
        self.len += 1;
        self.entries.push_back(Entry::Refused(Box::new(OpError { memory, kind })));
    }

    /// The last `lost` requests that were posted never will be executed, and their memory is gone.
    #[cold]
    pub(super) fn lose(&mut self, mut lost: usize, kind: OpErrorKind) {
        let mut behind = VecDeque::new();
        while lost > 0 {
            match self.entries.pop_back() {
                Some(Entry::Posted(mut wr_ids)) => {
                    while lost > 0 && wr_ids.pop_last().is_some() {
                        behind.push_front(Entry::Refused(Box::new(OpError { memory: None, kind })));
                        lost -= 1;
                    }
                    if !wr_ids.is_empty() {
                        self.entries.push_back(Entry::Posted(wr_ids));
                    }
                }
                Some(refused) => behind.push_front(refused),
                None => break,
            }
        }
        self.entries.append(&mut behind);
    }

    /// The loan of the first request; `None` if it was refused, or there is none.
    #[inline(always)]
    pub(super) fn first(&self) -> Option<u64> {
        match self.entries.front()? {
            Entry::Posted(wr_ids) => wr_ids.first(),
            Entry::Refused(_) => None,
        }
    }

    /// The loan of the last request; `None` if it was refused, or there is none.
    pub(super) fn last(&self) -> Option<u64> {
        match self.entries.back()? {
            Entry::Posted(wr_ids) => wr_ids.last(),
            Entry::Refused(_) => None,
        }
    }

    /// Removes the first request, which was posted.
    #[inline(always)]
    pub(super) fn pop_first(&mut self) {
        let Some(Entry::Posted(wr_ids)) = self.entries.front_mut() else { return };
        self.len -= usize::from(wr_ids.next().is_some());
        if wr_ids.is_empty() {
            self.entries.pop_front();
        }
    }

    /// Removes a request that was posted, wherever it is.
    #[cold]
    pub(super) fn remove(&mut self, wr_id: u64) {
        for at in 0..self.entries.len() {
            let Some(Entry::Posted(before)) = self.entries.get_mut(at) else { continue };
            let Some(behind) = before.split_off(wr_id) else { continue };
            if !behind.is_empty() {
                let before = std::mem::replace(before, behind);
                self.entries.insert(at, Entry::Posted(before));
            }
            if matches!(self.entries.get(at), Some(Entry::Posted(before)) if before.is_empty()) {
                self.entries.remove(at);
            }
            self.len -= 1;
            return;
        }
    }

    /// Removes the first request, if it was refused.
    pub(super) fn pop_refused(&mut self) -> Option<OpError<L>> {
        match self.entries.front()? {
            Entry::Refused(_) => self.take_refused(),
            Entry::Posted(_) => None,
        }
    }

    /// Removes the first request that was refused.
    #[cold]
    pub(super) fn take_refused(&mut self) -> Option<OpError<L>> {
        let at = self.entries.iter().position(|entry| matches!(entry, Entry::Refused(_)))?;
        let Some(Entry::Refused(refused)) = self.entries.remove(at) else { return None };
        self.len -= 1;
        Some(*refused)
    }

    /// The loans of the requests that were posted.
    pub(super) fn wr_ids(&self) -> impl Iterator<Item = u64> + Clone + '_ {
        self.entries.iter().flat_map(|entry| match entry {
            Entry::Posted(wr_ids) => Some(wr_ids.clone()).into_iter().flatten(),
            Entry::Refused(_) => None.into_iter().flatten(),
        })
    }

    /// Nobody waits for the requests any more. Wakers and memory of the program are dropped here, and their panics kept.
    pub(super) fn give_up<S: Locking>(&mut self, inflight: &Inflight<S>, calls: &mut FirstPanic) {
        self.len = 0;
        for entry in self.entries.drain(..) {
            match entry {
                Entry::Posted(wr_ids) => {
                    wr_ids.for_each(|wr_id| calls.catch(|| inflight.abandon(wr_id)));
                }
                Entry::Refused(refused) => calls.catch(|| drop(refused)),
            }
        }
    }
}
