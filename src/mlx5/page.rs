//! A page of doorbells, mapped: what [`Uar`](super::Uar) and [`Var`](super::Var) are rung through.

use crate::memory::mmio_page::{MmioPage, Word};
use std::fmt;

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
    /// [`PageError::OutOfBounds`], [`PageError::Unaligned`] unless `offset` is a multiple of the
    /// store's width, [`PageError::Forked`] in a child of the process that mapped the page. Nothing
    /// is stored then.
    pub fn ring_u16(&self, offset: usize, value: u16) -> Result<(), PageError> {
        self.ring(offset, value.to_le())
    }

    /// As [`ring_u16`](Self::ring_u16), by 32 bits.
    pub fn ring_u32(&self, offset: usize, value: u32) -> Result<(), PageError> {
        self.ring(offset, value.to_le())
    }

    /// As [`ring_u16`](Self::ring_u16), by 64 bits.
    pub fn ring_u64(&self, offset: usize, value: u64) -> Result<(), PageError> {
        self.ring(offset, value.to_le())
    }

    /// Rings by 64 bits, the most significant byte first: as the device's own queues are rung.
    pub fn ring_be64(&self, offset: usize, value: u64) -> Result<(), PageError> {
        self.ring(offset, value.to_be())
    }

    /// What the device answers to a load of 32 bits, taken as the least significant byte first. Most
    /// doorbells answer nothing that means anything.
    ///
    /// # Errors
    ///
    /// As [`ring_u16`](Self::ring_u16).
    pub fn peek_u32(&self, offset: usize) -> Result<u32, PageError> {
        if self.page.is_inherited() {
            return Err(PageError::Forked);
        }
        let loaded = self.page.load(offset).map(u32::from_le);
        loaded.ok_or_else(|| self.refusal(offset, size_of::<u32>()))
    }

    fn ring<T: Word>(&self, offset: usize, value: T) -> Result<(), PageError> {
        if self.page.is_inherited() {
            return Err(PageError::Forked);
        }
        let stored = self.page.store(offset, value);
        stored.ok_or_else(|| self.refusal(offset, size_of::<T>()))
    }

    #[cold]
    fn refusal(&self, offset: usize, width: usize) -> PageError {
        if offset % width != 0 {
            return PageError::Unaligned { offset, width };
        }
        PageError::OutOfBounds { offset, width, size: self.len() }
    }
}

/// Why a doorbell was not rung.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PageError {
    /// The doorbell is not in the page.
    OutOfBounds {
        /// Where it would be, in bytes.
        offset: usize,
        /// How wide it would be, in bytes.
        width: usize,
        /// The page's bytes.
        size: usize,
    },
    /// The offset is no multiple of the doorbell's width.
    Unaligned {
        /// Where it would be, in bytes.
        offset: usize,
        /// How wide it would be, in bytes.
        width: usize,
    },
    /// This process is a fork of the one that mapped the page.
    Forked,
}

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PageError::OutOfBounds { offset, width, size } => {
                write!(f, "a doorbell of {width} bytes at {offset} is not in a page of {size}")
            }
            PageError::Unaligned { offset, width } => {
                write!(
                    f,
                    "a doorbell of {width} bytes at {offset}, which is no multiple of its width"
                )
            }
            PageError::Forked => {
                f.write_str("this process is a fork of the one that mapped the page")
            }
        }
    }
}

impl std::error::Error for PageError {}
