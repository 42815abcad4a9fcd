//! Objects of one kind, by number.
//!
//! Pairs with the create and destroy commands. An object that another one uses is held, and cannot
//! be destroyed.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::cmd::refusal::{Refused, refuse};

/// The objects of one kind.
pub struct Table<T> {
    kind: &'static str,
    numbers: RangeInclusive<u32>,
    next: u32,
    rows: BTreeMap<u32, Row<T>>,
}

struct Row<T> {
    value: T,
    holders: u32,
}

impl<T> Table<T> {
    /// An empty table whose objects get these numbers.
    pub fn new(kind: &'static str, numbers: RangeInclusive<u32>) -> Self {
        Self { kind, next: *numbers.start(), numbers, rows: BTreeMap::new() }
    }

    /// The number that the next object gets. Numbers are reused as late as possible, so that a
    /// stale one does not soon mean something else.
    ///
    /// # Errors
    /// If all numbers are taken.
    pub fn free_number(&self, taken: impl Fn(u32) -> bool) -> Result<u32, Refused> {
        let candidates = (self.next..=*self.numbers.end()).chain(*self.numbers.start()..self.next);
        for number in candidates {
            if !self.rows.contains_key(&number) && !taken(number) {
                return Ok(number);
            }
        }
        refuse!(NoResources, "all {} {}s are in use", self.rows.len(), self.kind)
    }

    /// Adds an object under the next free number.
    ///
    /// # Errors
    /// If all numbers are taken.
    pub fn insert(&mut self, value: T) -> Result<u32, Refused> {
        let number = self.free_number(|_| false)?;
        self.insert_at(number, value);
        Ok(number)
    }

    /// Adds an object under a number from [`Table::free_number`].
    pub fn insert_at(&mut self, number: u32, value: T) {
        self.next = if number < *self.numbers.end() { number + 1 } else { *self.numbers.start() };
        self.rows.insert(number, Row { value, holders: 0 });
    }

    /// The object with this number.
    ///
    /// # Errors
    /// If there is none.
    pub fn get(&self, number: u32) -> Result<&T, Refused> {
        match self.rows.get(&number) {
            Some(row) => Ok(&row.value),
            None => refuse!(BadResource, "{} {number:#x} does not exist", self.kind),
        }
    }

    /// The object with this number, to change.
    ///
    /// # Errors
    /// If there is none.
    pub fn get_mut(&mut self, number: u32) -> Result<&mut T, Refused> {
        match self.rows.get_mut(&number) {
            Some(row) => Ok(&mut row.value),
            None => refuse!(BadResource, "{} {number:#x} does not exist", self.kind),
        }
    }

    /// Notes one more user of an object.
    ///
    /// # Errors
    /// If it does not exist.
    pub fn hold(&mut self, number: u32) -> Result<(), Refused> {
        match self.rows.get_mut(&number) {
            Some(row) => {
                row.holders += 1;
                Ok(())
            }
            None => refuse!(BadResource, "{} {number:#x} does not exist", self.kind),
        }
    }

    /// Notes one user less.
    pub fn release(&mut self, number: u32) {
        if let Some(row) = self.rows.get_mut(&number) {
            row.holders = row.holders.saturating_sub(1);
        }
    }

    /// Removes an object that nobody holds.
    ///
    /// # Errors
    /// If it does not exist, or is held.
    pub fn remove(&mut self, number: u32) -> Result<T, Refused> {
        match self.rows.get(&number) {
            None => refuse!(BadResource, "{} {number:#x} does not exist", self.kind),
            Some(row) if row.holders > 0 => {
                refuse!(ResourceBusy, "{} {number:#x} has {} users", self.kind, row.holders)
            }
            Some(_) => match self.rows.remove(&number) {
                Some(row) => Ok(row.value),
                None => refuse!(BadResource, "{} {number:#x} does not exist", self.kind),
            },
        }
    }

    /// What this table counts.
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// How many there are.
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
        self.rows.iter_mut().map(|(number, row)| (*number, &mut row.value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::refusal::Status;

    #[test]
    fn numbers_are_reused_late_and_run_out() {
        let mut table = Table::new("pd", 1..=3);
        assert_eq!(table.insert(()).unwrap(), 1);
        assert_eq!(table.insert(()).unwrap(), 2);
        table.remove(1).unwrap();
        assert_eq!(table.insert(()).unwrap(), 3);
        assert_eq!(table.insert(()).unwrap(), 1);
        assert_eq!(table.insert(()).unwrap_err().status, Status::NoResources);
    }

    #[test]
    fn what_is_held_stays() {
        let mut table = Table::new("pd", 1..=3);
        table.insert(()).unwrap();
        table.hold(1).unwrap();
        assert_eq!(table.remove(1).unwrap_err().status, Status::ResourceBusy);
        table.release(1);
        table.remove(1).unwrap();
        assert_eq!(table.remove(1).unwrap_err().status, Status::BadResource);
        assert_eq!(table.hold(1).unwrap_err().status, Status::BadResource);
    }
}
