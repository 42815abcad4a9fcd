//! The objects of one kind, by number.
//!
//! Pairs with the create and destroy commands. An object that another one uses is held, and cannot
//! be destroyed.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::command_error::{CommandError, refuse};

/// The objects of one kind.
pub struct ObjectTable<T> {
    kind: &'static str,
    numbers: RangeInclusive<u32>,
    next: u32,
    rows: BTreeMap<u32, Row<T>>,
    /// The source of numbers that nobody guesses, and the most objects; `None` if numbers follow each other.
    random: Option<(fn() -> u64, usize)>,
    /// How often an object may have changed.
    changes: u64,
}

struct Row<T> {
    value: T,
    users: u32,
    owner: u32,
}

/// The uid of the kernel's own objects.
pub const KERNEL: u32 = 0;
/// The uid of objects that every user context may use.
pub const SHARED: u32 = 0xffff;

impl<T> ObjectTable<T> {
    /// An empty table that gives its objects these numbers.
    pub fn new(kind: &'static str, numbers: RangeInclusive<u32>) -> Self {
        Self {
            kind,
            next: *numbers.start(),
            numbers,
            rows: BTreeMap::new(),
            random: None,
            changes: 0,
        }
    }

    /// An empty table of at most `most` objects, whose numbers are drawn from a source of random numbers.
    pub fn drawn(
        kind: &'static str,
        numbers: RangeInclusive<u32>,
        most: usize,
        random: fn() -> u64,
    ) -> Self {
        Self { random: Some((random, most)), ..Self::new(kind, numbers) }
    }

    /// Checks that one more object fits, for commands that would otherwise have to undo something.
    ///
    /// # Errors
    /// If all numbers are in use.
    pub fn check_room(&self) -> Result<(), CommandError> {
        self.free_number().map(|_| ())
    }

    /// The number of the next object. Numbers are reused as late as possible, so that a stale
    /// number does not soon name another object.
    fn free_number(&self) -> Result<u32, CommandError> {
        let (first, last) = (*self.numbers.start(), *self.numbers.end());
        let begin = match self.random {
            None => self.next,
            Some((_, most)) if self.rows.len() >= most => {
                return refuse!(NoResources, "all {most} {}s are in use", self.kind);
            }
            Some((random, _)) => first + (random() % u64::from(last - first + 1)) as u32,
        };
        let candidates = (begin..=last).chain(first..begin);
        for number in candidates {
            if !self.rows.contains_key(&number) {
                return Ok(number);
            }
        }
        refuse!(NoResources, "all {} {}s are in use", self.rows.len(), self.kind)
    }

    /// Adds an object of the kernel under the next free number.
    ///
    /// # Errors
    /// If all numbers are in use.
    pub fn insert(&mut self, value: T) -> Result<u32, CommandError> {
        self.insert_owned(KERNEL, value)
    }

    /// Adds an object of a user context under the next free number.
    ///
    /// # Errors
    /// If all numbers are in use.
    pub fn insert_owned(&mut self, owner: u32, value: T) -> Result<u32, CommandError> {
        self.changes += 1;
        let number = self.free_number()?;
        self.next = if number < *self.numbers.end() { number + 1 } else { *self.numbers.start() };
        self.rows.insert(number, Row { value, users: 0, owner });
        Ok(number)
    }

    /// Adds `count` objects of a user context under consecutive free numbers; returns the first, which is
    /// a multiple of `count`.
    ///
    /// # Errors
    /// If there are not as many such numbers.
    pub fn insert_run(
        &mut self,
        owner: u32,
        count: u32,
        value: impl Fn() -> T,
    ) -> Result<u32, CommandError> {
        let (start, end) = (*self.numbers.start(), *self.numbers.end());
        let fits = |first: &u32| {
            first.checked_add(count - 1).is_some_and(|last| last <= end)
                && self.rows.range(*first..=first + (count - 1)).next().is_none()
        };
        let aligned = |range: RangeInclusive<u32>| range.filter(|number| number % count == 0);
        let mut candidates = aligned(self.next..=end).chain(aligned(start..=self.next));
        let Some(first) = candidates.find(fits) else {
            return refuse!(NoResources, "{} {}s are in use", self.rows.len(), self.kind);
        };
        for number in first..first + count {
            self.rows.insert(number, Row { value: value(), users: 0, owner });
        }
        let next = first + count;
        self.next = if next <= end { next } else { start };
        Ok(first)
    }

    /// The object with this number, for a user context that may change it: its owner or the kernel.
    ///
    /// # Errors
    /// If there is none, or another context owns it.
    pub fn owned_mut(&mut self, uid: u32, number: u32) -> Result<&mut T, CommandError> {
        self.changes += 1;
        match self.rows.get_mut(&number) {
            Some(row) if row.owner == uid || matches!(uid, KERNEL | SHARED) => Ok(&mut row.value),
            Some(row) => refuse!(
                BadResource,
                "{} {number:#x} belongs to context {}, not {uid}",
                self.kind,
                row.owner
            ),
            None => refuse!(BadResource, "{} {number:#x} does not exist", self.kind),
        }
    }

    /// The uid of the owner; the kernel's if there is no such object.
    pub fn owner(&self, number: u32) -> u32 {
        self.rows.get(&number).map_or(KERNEL, |row| row.owner)
    }

    /// Checks that a context may use an object: it owns the object, or the object is shared.
    ///
    /// # Errors
    /// If there is none, or the context may not use it.
    pub fn check_use(&mut self, uid: u32, number: u32) -> Result<(), CommandError> {
        if self.rows.get(&number).is_some_and(|row| row.owner == SHARED) {
            return Ok(());
        }
        self.owned_mut(uid, number).map(|_| ())
    }

    /// Like [`ObjectTable::check_use`], but also allows objects of the kernel, which lends some to
    /// all contexts.
    ///
    /// # Errors
    /// If there is none, or another context owns it.
    pub fn check_use_or_kernels(&mut self, uid: u32, number: u32) -> Result<(), CommandError> {
        if self.rows.get(&number).is_some_and(|row| row.owner == KERNEL) {
            return Ok(());
        }
        self.check_use(uid, number)
    }

    /// Whether a context owns an object.
    pub fn owned_by(&self, uid: u32) -> bool {
        self.rows.values().any(|row| row.owner == uid)
    }

    /// Removes the objects of a context that no other object uses; returns how many.
    pub fn remove_owned_by(&mut self, uid: u32) -> usize {
        self.changes += 1;
        let before = self.rows.len();
        self.rows.retain(|_, row| row.owner != uid || row.users > 0);
        before - self.rows.len()
    }

    /// A number that is another one after an object was lent to be changed, or removed.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// The object with this number, if there is one: for the data path, which needs no reason.
    pub fn find(&self, number: u32) -> Option<&T> {
        self.rows.get(&number).map(|row| &row.value)
    }

    /// The object with this number, to change, if there is one.
    pub fn find_mut(&mut self, number: u32) -> Option<&mut T> {
        self.changes += 1;
        self.rows.get_mut(&number).map(|row| &mut row.value)
    }

    /// The object with this number.
    ///
    /// # Errors
    /// If there is none.
    pub fn get(&self, number: u32) -> Result<&T, CommandError> {
        match self.rows.get(&number) {
            Some(row) => Ok(&row.value),
            None => refuse!(BadResource, "{} {number:#x} does not exist", self.kind),
        }
    }

    /// The object with this number, to change.
    ///
    /// # Errors
    /// If there is none.
    pub fn get_mut(&mut self, number: u32) -> Result<&mut T, CommandError> {
        self.changes += 1;
        match self.rows.get_mut(&number) {
            Some(row) => Ok(&mut row.value),
            None => refuse!(BadResource, "{} {number:#x} does not exist", self.kind),
        }
    }

    /// Counts one more user of an object.
    ///
    /// # Errors
    /// If it does not exist.
    pub fn hold(&mut self, number: u32) -> Result<(), CommandError> {
        match self.rows.get_mut(&number) {
            Some(row) => {
                row.users += 1;
                Ok(())
            }
            None => refuse!(BadResource, "{} {number:#x} does not exist", self.kind),
        }
    }

    /// Counts one user less.
    pub fn release(&mut self, number: u32) {
        if let Some(row) = self.rows.get_mut(&number) {
            row.users = row.users.saturating_sub(1);
        }
    }

    /// Removes an object without users.
    ///
    /// # Errors
    /// If it does not exist, or has users.
    pub fn remove(&mut self, number: u32) -> Result<T, CommandError> {
        self.changes += 1;
        match self.rows.get(&number) {
            None => refuse!(BadResource, "{} {number:#x} does not exist", self.kind),
            Some(row) if row.users > 0 => {
                refuse!(ResourceBusy, "{} {number:#x} has {} users", self.kind, row.users)
            }
            Some(_) => match self.rows.remove(&number) {
                Some(row) => Ok(row.value),
                None => refuse!(BadResource, "{} {number:#x} does not exist", self.kind),
            },
        }
    }

    /// Removes objects with consecutive numbers, if none of them has users.
    ///
    /// # Errors
    /// If one does not exist, or has users.
    pub fn remove_run(&mut self, first: u32, count: u32) -> Result<(), CommandError> {
        self.changes += 1;
        for number in first..first + count {
            match self.rows.get(&number) {
                None => return refuse!(BadResource, "{} {number:#x} does not exist", self.kind),
                Some(row) if row.users > 0 => {
                    let users = row.users;
                    return refuse!(ResourceBusy, "{} {number:#x} has {users} users", self.kind);
                }
                Some(_) => {}
            }
        }
        for number in first..first + count {
            self.rows.remove(&number);
        }
        Ok(())
    }

    /// The name of this kind of object.
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// The number of objects.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// All of them, in order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.rows.iter().map(|(number, row)| (*number, &row.value))
    }

    /// All of them, in order of their numbers, to change.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        self.changes += 1;
        self.rows.iter_mut().map(|(number, row)| (*number, &mut row.value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_error::CommandStatus;

    #[test]
    fn numbers_are_reused_late_and_an_exhausted_table_refuses() {
        let mut table = ObjectTable::new("pd", 1..=3);
        assert_eq!(table.insert(()).unwrap(), 1);
        assert_eq!(table.insert(()).unwrap(), 2);
        table.remove(1).unwrap();
        assert_eq!(table.insert(()).unwrap(), 3);
        assert_eq!(table.insert(()).unwrap(), 1);
        assert_eq!(table.insert(()).unwrap_err().status, CommandStatus::NoResources);
    }

    #[test]
    fn numbers_that_are_drawn_are_free_ones_up_to_the_limit() {
        fn random() -> u64 {
            7
        }
        let mut table = ObjectTable::drawn("qp", 0x10..=0x19, 4, random);
        let numbers: Vec<u32> = (0..4).map(|_| table.insert(()).unwrap()).collect();
        assert_eq!(numbers, [0x17, 0x18, 0x19, 0x10]);
        assert_eq!(table.insert(()).unwrap_err().status, CommandStatus::NoResources);
        table.remove(0x18).unwrap();
        assert_eq!(table.insert(()).unwrap(), 0x18);
    }

    #[test]
    fn a_run_begins_at_a_multiple_of_its_length_and_goes_as_a_whole() {
        let mut table = ObjectTable::new("uar", 2..=15);
        assert_eq!(table.insert_run(KERNEL, 1, || ()).unwrap(), 2);
        assert_eq!(table.insert_run(7, 4, || ()).unwrap(), 4);
        assert_eq!(table.insert_run(7, 4, || ()).unwrap(), 8);
        assert_eq!(table.insert_run(7, 4, || ()).unwrap(), 12);
        assert_eq!(table.insert_run(7, 4, || ()).unwrap_err().status, CommandStatus::NoResources);
        table.hold(10).unwrap();
        assert_eq!(table.remove_run(8, 4).unwrap_err().status, CommandStatus::ResourceBusy);
        assert_eq!(table.len(), 13, "none of them is gone");
        table.release(10);
        table.remove_run(8, 4).unwrap();
        assert_eq!(table.remove_run(8, 4).unwrap_err().status, CommandStatus::BadResource);
        assert_eq!(table.insert_run(7, 4, || ()).unwrap(), 8);
    }

    #[test]
    fn a_context_uses_only_its_own_shared_and_lent_objects() {
        let mut table = ObjectTable::new("pd", 1..=9);
        let kernels = table.insert(()).unwrap();
        let shared = table.insert_owned(SHARED, ()).unwrap();
        let own = table.insert_owned(5, ()).unwrap();
        for (uid, number, owns, may, lent) in [
            (5, own, true, true, true),
            (6, own, false, false, false),
            (KERNEL, own, true, true, true),
            (5, shared, false, true, true),
            (5, kernels, false, false, true),
            (5, 9, false, false, false),
        ] {
            assert_eq!(table.owned_mut(uid, number).is_ok(), owns, "{uid} {number}");
            assert_eq!(table.check_use(uid, number).is_ok(), may, "{uid} {number}");
            assert_eq!(table.check_use_or_kernels(uid, number).is_ok(), lent, "{uid} {number}");
        }
        table.hold(own).unwrap();
        assert_eq!(table.remove_owned_by(5), 0);
        table.release(own);
        assert_eq!((table.remove_owned_by(5), table.len()), (1, 2));
    }

    #[test]
    fn an_object_in_use_cannot_be_removed() {
        let mut table = ObjectTable::new("pd", 1..=3);
        table.insert(()).unwrap();
        table.hold(1).unwrap();
        assert_eq!(table.remove(1).unwrap_err().status, CommandStatus::ResourceBusy);
        table.release(1);
        table.remove(1).unwrap();
        assert_eq!(table.remove(1).unwrap_err().status, CommandStatus::BadResource);
        assert_eq!(table.hold(1).unwrap_err().status, CommandStatus::BadResource);
    }
}
