//! How a poller finds the queue pair of a completion.
//!
//! Who makes and destroys queue pairs is not who polls, and must not touch what the poller works
//! with. So the control path leaves letters with [`Members`], and the poller keeps a [`Book`] of
//! its own: user index to record, without a lock. A completion of nobody in the book is discarded.
//!
//! A queue pair that is gone leaves its index behind until the poller knows that nothing in the
//! queue bears it: the kernel confirmed the end before the letter was written, so all there will
//! ever be is in the queue when the letter is read, and has been consumed when the queue was found
//! empty or went round once.

use super::cqe::{COUNTER, is_receive, number_of, opcode_of};
use super::index::Index;
use super::record::Record;
use super::srq::Slots;
use crate::mem::barrier::udma_from_device;
use crate::mem::inbox::Inbox;
use crate::mem::queue::Reader;
use std::sync::{Arc, Mutex, PoisonError, Weak};

#[derive(Debug)]
enum Letter {
    /// Weak, or the letter would keep what nobody polls for.
    Attached {
        number: u32,
        record: Weak<Record>,
    },
    Gone {
        index: Arc<Index>,
        slots: Option<Arc<Slots>>,
    },
}

/// What a poller that is gone left unread.
#[derive(Debug)]
pub(crate) struct Estate {
    pub(crate) reader: Reader,
    pub(crate) book: Book,
}

/// The control path's end: which queue pairs complete to a queue.
///
/// Who polls may go long before the queue does, which stays as long as a queue pair completes to it.
/// What it left is settled when the last of both is gone: entries of shared receive queues that
/// completions name which nobody will ever read go back.
#[derive(Debug)]
pub(crate) struct Members {
    letters: Inbox<Letter>,
    estate: Mutex<Option<Estate>>,
}

impl Drop for Members {
    fn drop(&mut self) {
        let estate = self.estate.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Estate { reader, mut book }) = estate else { return };
        // A child of a fork has no completions, and its parent's entries are not its to give back.
        if reader.elements().epoch().is_over() {
            return;
        }
        book.learn(self, reader.consumer(), reader.elements().count());
        for (_, element) in reader.ours() {
            udma_from_device();
            if is_receive(opcode_of(element.owner())) {
                book.give_back(number_of(element), element.be16::<COUNTER>().into());
            }
        }
    }
}

impl Members {
    pub(crate) fn new() -> Arc<Members> {
        Arc::new(Members { letters: Inbox::new(), estate: Mutex::default() })
    }

    /// Leaves what nobody polls any more.
    pub(crate) fn inherit(&self, estate: Estate) {
        *self.estate.lock().unwrap_or_else(PoisonError::into_inner) = Some(estate);
    }

    /// Tells of a queue pair, before anything is posted to it.
    pub(crate) fn attach(&self, record: &Arc<Record>) {
        let number = record.index().number();
        self.letters.put(Letter::Attached { number, record: Arc::downgrade(record) });
    }

    /// Tells that a queue pair is destroyed, and completes nothing more.
    pub(crate) fn retire(&self, record: &Record) {
        let (index, slots) = (record.index().clone(), record.slots().cloned());
        self.letters.put(Letter::Gone { index, slots });
    }

    /// As [`retire`](Self::retire) for a queue pair that could not be destroyed, and may complete
    /// something for ever: its index is never dealt again.
    pub(crate) fn retire_for_good(&self, record: &Record) {
        std::mem::forget(record.index().clone());
        self.retire(record);
    }

    /// Whether there is nothing to learn: one load.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.letters.is_empty()
    }
}

/// A queue pair that is gone.
#[derive(Debug)]
struct Dead {
    index: Arc<Index>,
    /// Takes back what the completions consumed.
    slots: Option<Arc<Slots>>,
    /// Where in the queue nothing of it can be any more.
    until: u32,
}

/// The poller's end.
#[derive(Debug, Default)]
pub(crate) struct Book {
    /// From the index `first` on; those who complete to one queue mostly were made together.
    records: Vec<Option<Arc<Record>>>,
    first: u32,
    dead: Vec<Dead>,
}

impl Book {
    /// The queue pair with an index.
    #[inline(always)]
    pub(crate) fn get(&self, number: u32) -> Option<&Record> {
        self.records.get(number.wrapping_sub(self.first) as usize)?.as_deref()
    }

    fn insert(&mut self, number: u32, record: Arc<Record>) {
        if self.records.is_empty() {
            self.first = number;
        }
        if number < self.first {
            let before = (self.first - number) as usize;
            self.records.splice(0..0, (0..before).map(|_| None));
            self.first = number;
        }
        let at = (number - self.first) as usize;
        if self.records.len() <= at {
            self.records.resize_with(at + 1, || None);
        }
        self.records[at] = Some(record);
    }

    fn remove(&mut self, number: u32) {
        if let Some(record) = self.records.get_mut(number.wrapping_sub(self.first) as usize) {
            *record = None;
        }
        while let Some(None) = self.records.last() {
            self.records.pop();
        }
    }

    /// Reads what the control path wrote. `consumer` is the index of the next completion, `entries`
    /// how many the queue has. Afterwards [`forget`](Self::forget) what is certain to be over.
    #[cold]
    pub(crate) fn learn(&mut self, members: &Members, consumer: u32, entries: u32) {
        let mut letters = Vec::new();
        members.letters.take(|letter| letters.push(letter));
        // Oldest first: an index may be given back and dealt again in one go.
        for letter in letters.into_iter().rev() {
            match letter {
                Letter::Attached { number, record } => {
                    if let Some(record) = record.upgrade() {
                        self.insert(number, record);
                    }
                }
                Letter::Gone { index, slots } => {
                    self.remove(index.number());
                    let until = consumer.wrapping_add(entries);
                    self.dead.push(Dead { index, slots, until });
                }
            }
        }
    }

    /// Whether there are indices to give up.
    #[inline(always)]
    pub(crate) fn mourns(&self) -> bool {
        !self.dead.is_empty()
    }

    /// Gives up indices of which nothing can be in the queue any more: all of them if it is
    /// `empty`, else those whose last completion is behind `consumer`.
    #[cold]
    pub(crate) fn forget(&mut self, consumer: u32, empty: bool) {
        /// Completions are counted in 24 bits.
        const UNUSED: u32 = 8;
        let ahead = |until: u32| (until.wrapping_sub(consumer) << UNUSED) as i32 > 0;
        self.dead.retain(|dead| !empty && ahead(dead.until));
    }

    /// Takes note of the completion of a receive that nobody will read: if it consumed an entry `at`
    /// of a shared receive queue, that goes back.
    fn give_back(&self, number: u32, at: u32) {
        match self.get(number) {
            Some(record) => {
                if let Some(slots) = record.slots() {
                    slots.complete(at);
                }
            }
            None => self.discard(number, at),
        }
    }

    /// Takes note of the completion of a receive of nobody in the book: if it consumed an entry `at`
    /// of a shared receive queue, that goes back.
    #[cold]
    pub(crate) fn discard(&self, number: u32, at: u32) {
        let dead = self.dead.iter().rev().find(|dead| dead.index.number() == number);
        if let Some(Dead { slots: Some(slots), .. }) = dead {
            slots.complete(at);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::index::Indices;
    use super::super::record::Receives;
    use super::*;

    fn record(indices: &Arc<Indices>) -> Arc<Record> {
        let index = indices.take().unwrap();
        Record::new(index.number() + 100, index, Some(4), Receives::None)
    }

    #[test]
    fn records_are_found_between_their_letters() {
        let (indices, members, mut book) = (Indices::new(), Members::new(), Book::default());
        let all: Vec<_> = (0..200).map(|_| record(&indices)).collect();
        for record in &all {
            members.attach(record);
        }
        assert!(book.get(1).is_none());
        assert!(!members.is_empty());
        book.learn(&members, 0, 8);
        assert!(members.is_empty());
        for record in &all {
            let found = book.get(record.index().number()).unwrap();
            assert_eq!(found.qpn(), record.qpn());
        }
        members.retire(&all[7]);
        book.learn(&members, 0, 8);
        assert!(book.get(8).is_none());
        assert!([0, 201, 0xff_ffff].iter().all(|number| book.get(*number).is_none()));
        assert_eq!(book.get(9).unwrap().qpn(), 109);
    }

    #[test]
    fn an_index_comes_back_when_the_queue_went_round_or_was_empty() {
        for empty in [true, false] {
            let (indices, members, mut book) = (Indices::new(), Members::new(), Book::default());
            let dead = record(&indices);
            members.attach(&dead);
            book.learn(&members, 0, 8);
            members.retire(&dead);
            drop(dead);
            let start = u32::MAX - 3;
            book.learn(&members, start, 8);
            book.forget(start, false);
            book.forget(start.wrapping_add(7), false);
            let other = indices.take().unwrap();
            assert_eq!(other.number(), 2, "in use");
            match empty {
                true => book.forget(start, true),
                false => book.forget(start.wrapping_add(8), false),
            }
            assert_eq!(indices.take().unwrap().number(), 1, "free");
        }
    }

    #[test]
    fn a_life_between_two_looks_leaves_nothing() {
        let (indices, members, mut book) = (Indices::new(), Members::new(), Book::default());
        let short = record(&indices);
        members.attach(&short);
        members.retire(&short);
        let weak = Arc::downgrade(&short);
        drop(short);
        assert!(weak.upgrade().is_none(), "the letter keeps the record");
        let next = record(&indices);
        assert_eq!(next.index().number(), 2);
        book.learn(&members, 0, 8);
        book.forget(0, true);
        assert!(book.get(1).is_none());
        let again = record(&indices);
        assert_eq!(again.index().number(), 1);
        members.attach(&again);
        book.learn(&members, 0, 8);
        assert_eq!(book.get(1).unwrap().qpn(), 101);
    }

    #[test]
    fn an_index_that_may_complete_for_ever_is_never_dealt_again() {
        let (indices, members, mut book) = (Indices::new(), Members::new(), Book::default());
        let stuck = record(&indices);
        members.attach(&stuck);
        members.retire_for_good(&stuck);
        drop(stuck);
        book.learn(&members, 0, 8);
        book.forget(0, true);
        drop((book, members));
        assert_eq!(indices.take().unwrap().number(), 2);
    }
}
