//! A mapping that the kernel or a device writes as well, and that outlives no one by accident.
//!
//! Pairs with the `mmap` of a uverbs file: queue buffers of rxe, doorbell pages of mlx5.

use super::fork::Epoch;
use memmap2::{MmapOptions, MmapRaw};
use rustix::io::Errno;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Where providers get mappings from: the file that the kernel's offsets belong to.
pub(crate) trait Mapper {
    /// Maps queue or doorbell memory at an offset that the kernel returned.
    fn map(&self, offset: u64, length: usize) -> Result<Mapping, Errno>;

    /// Maps what may be looked at only.
    fn map_read_only(&self, offset: u64, length: usize) -> Result<Mapping, Errno>;
}

#[cfg(not(miri))]
type Raw = MmapRaw;
#[cfg(miri)]
type Raw = Shown;

/// Miri maps no files: there a mapping is one of several holders of a test's memory.
#[cfg(miri)]
#[derive(Debug)]
pub(super) struct Shown {
    pub(super) pages: std::sync::Arc<MmapRaw>,
    pub(super) length: usize,
}

#[cfg(miri)]
impl Shown {
    fn as_mut_ptr(&self) -> *mut u8 {
        self.pages.as_mut_ptr()
    }

    fn len(&self) -> usize {
        self.length
    }
}

/// A shared mapping. It stays mapped in a forked child, whose parent still uses it.
#[derive(Debug)]
pub(crate) struct Mapping {
    raw: ManuallyDrop<Raw>,
    epoch: Epoch,
}

impl Mapping {
    /// Maps `length` bytes of `fd` at `offset`, readable, writable and shared.
    pub(crate) fn of_fd(
        fd: BorrowedFd<'_>,
        offset: u64,
        length: usize,
        epoch: Epoch,
    ) -> Result<Mapping, Errno> {
        let raw = MmapOptions::new().offset(offset).len(length).map_raw(fd.as_raw_fd());
        Mapping::of_raw(raw, epoch)
    }

    /// As [`of_fd`](Self::of_fd), without the right to write.
    pub(crate) fn read_only(
        fd: BorrowedFd<'_>,
        offset: u64,
        length: usize,
        epoch: Epoch,
    ) -> Result<Mapping, Errno> {
        let raw = MmapOptions::new().offset(offset).len(length).map_raw_read_only(fd.as_raw_fd());
        Mapping::of_raw(raw, epoch)
    }

    /// Takes over a mapping that was just made, of this process's own memory for one.
    pub(crate) fn of_raw(raw: std::io::Result<MmapRaw>, epoch: Epoch) -> Result<Mapping, Errno> {
        let raw = raw.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOMEM))?;
        #[cfg(miri)]
        let raw = Shown { length: raw.len(), pages: raw.into() };
        Ok(Mapping { raw: ManuallyDrop::new(raw), epoch })
    }

    /// What stands for a mapping of a test's file.
    #[cfg(all(test, miri))]
    pub(super) fn of_shared(raw: Shown, epoch: Epoch) -> Mapping {
        Mapping { raw: ManuallyDrop::new(raw), epoch }
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.raw.as_mut_ptr()
    }

    /// Whether the caller runs in a child of the process that made the mapping. What it writes
    /// there, the parent's device reads.
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        self.epoch.is_over()
    }

    pub(crate) fn len(&self) -> usize {
        self.raw.len()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.is_inherited() {
            return;
        }
        // SAFETY: dropped once, here, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.raw) };
    }
}
