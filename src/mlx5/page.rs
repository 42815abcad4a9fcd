//! A page of doorbells, mapped: what [`Uar`](super::Uar) and [`Var`](super::Var) are rung through.

use crate::error::MemoryError;
use crate::memory::mmio_page::{MmioPage, Word};

/// A mapped page of doorbells.
///
/// A store is a doorbell, and what it means is between the program and the device's user of the
/// page. Stores are single accesses of their width, and never merged or left out; those of other
/// threads come before or after, never in between. Earlier writes to memory are visible to the
/// device before the store is.
///
/// The page stays mapped as long as this exists, even if the object that it was mapped from is
/// gone: the kernel gives the page to nobody else before it is unmapped. After the device was
/// removed, stores go nowhere.
#[derive(Debug)]
pub struct DoorbellPage {
    page: MmioPage,
}

impl DoorbellPage {
    pub(super) fn new(page: MmioPage) -> Self {
        DoorbellPage { page }
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty, reason = "a page is never empty")]
    pub fn len(&self) -> usize {
        self.page.len()
    }

    /// Rings by 16 bits, the least significant byte first: as virtio devices are told which queue
    /// has something.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfRange`], [`MemoryError::Unaligned`] unless `offset` is a multiple of the
    /// store's width, [`MemoryError::Forked`] in a child of the process that mapped the page. Nothing
    /// is stored then.
    pub fn ring_u16(&self, offset: usize, value: u16) -> Result<(), MemoryError> {
        self.ring(offset, value.to_le())
    }

    /// As [`ring_u16`](Self::ring_u16), by 32 bits.
    pub fn ring_u32(&self, offset: usize, value: u32) -> Result<(), MemoryError> {
        self.ring(offset, value.to_le())
    }

    /// As [`ring_u16`](Self::ring_u16), by 64 bits.
    pub fn ring_u64(&self, offset: usize, value: u64) -> Result<(), MemoryError> {
        self.ring(offset, value.to_le())
    }

    /// Rings by 64 bits, the most significant byte first: as the device's own queues are rung.
    pub fn ring_be64(&self, offset: usize, value: u64) -> Result<(), MemoryError> {
        self.ring(offset, value.to_be())
    }

    /// What the device answers to a load of 32 bits, taken as the least significant byte first. Most
    /// doorbells answer nothing that means anything.
    ///
    /// # Errors
    ///
    /// As [`ring_u16`](Self::ring_u16).
    pub fn peek_u32(&self, offset: usize) -> Result<u32, MemoryError> {
        if self.page.is_inherited() {
            return Err(MemoryError::Forked);
        }
        let loaded = self.page.load(offset).map(u32::from_le);
        loaded.ok_or_else(|| self.refusal(offset, size_of::<u32>()))
    }

    fn ring<T: Word>(&self, offset: usize, value: T) -> Result<(), MemoryError> {
        if self.page.is_inherited() {
            return Err(MemoryError::Forked);
        }
        let stored = self.page.store(offset, value);
        stored.ok_or_else(|| self.refusal(offset, size_of::<T>()))
    }

    #[cold]
    fn refusal(&self, offset: usize, width: usize) -> MemoryError {
        if offset % width != 0 {
            return MemoryError::Unaligned { offset, length: width, word: width };
        }
        MemoryError::OutOfRange { offset, length: width, size: self.len() }
    }
}
