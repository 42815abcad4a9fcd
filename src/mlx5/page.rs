//! A mapped page of doorbells, of a [`Uar`](super::Uar) or a [`Var`](super::Var).

use crate::error::MemoryError;
use crate::memory::mmio_page::{MmioPage, Word};

/// A mapped page of doorbells.
///
/// A store rings a doorbell; the meaning of its value depends on the queue. Each store is one access of its
/// width, and is neither merged nor left out; stores of other threads come before or after it. Writes to
/// memory before the store are visible to the device before the store is.
///
/// The page stays mapped as long as this exists, even if its UAR or VAR is gone: the kernel gives the page
/// to no other object before it is unmapped. After the device was removed, stores have no effect.
#[derive(Debug)]
pub struct DoorbellPage {
    page: MmioPage,
}

impl DoorbellPage {
    pub(super) fn new(page: MmioPage) -> Self {
        DoorbellPage { page }
    }

    /// The length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "a page is never empty")]
    pub fn len(&self) -> usize {
        self.page.len()
    }

    /// The first byte of the page, for code that rings without this library. It stays mapped as long as this exists, and
    /// takes no stores where the device is in this process.
    #[doc(alias = "reg_addr")]
    #[doc(alias = "base_addr")]
    pub fn as_ptr(&self) -> *mut u8 {
        self.page.as_ptr()
    }

    /// Stores 16 bits, the least significant byte first. A virtio doorbell is the number of the queue that has
    /// work.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfRange`], [`MemoryError::Unaligned`] unless `offset` is a multiple of the
    /// store's width, [`MemoryError::Forked`] in a child of the process that mapped the page. Nothing
    /// is stored then.
    pub fn ring_u16(&self, offset: usize, value: u16) -> Result<(), MemoryError> {
        self.ring(offset, value.to_le())
    }

    /// As [`ring_u16`](Self::ring_u16), with 32 bits.
    pub fn ring_u32(&self, offset: usize, value: u32) -> Result<(), MemoryError> {
        self.ring(offset, value.to_le())
    }

    /// As [`ring_u16`](Self::ring_u16), with 64 bits.
    pub fn ring_u64(&self, offset: usize, value: u64) -> Result<(), MemoryError> {
        self.ring(offset, value.to_le())
    }

    /// Stores 64 bits, the most significant byte first: the doorbell of the device's own queues.
    pub fn ring_be64(&self, offset: usize, value: u64) -> Result<(), MemoryError> {
        self.ring(offset, value.to_be())
    }

    /// Loads 32 bits, the least significant byte first. For most doorbells the value has no meaning.
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
