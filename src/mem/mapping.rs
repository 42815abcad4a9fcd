//! A mapping that the kernel or a device writes as well, and that outlives no one by accident.
//!
//! Pairs with the `mmap` of a uverbs file: queue buffers of rxe, doorbell pages of mlx5.

use super::fork::Epoch;
use memmap2::{MmapOptions, MmapRaw};
use rustix::io::Errno;
use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;

/// Where providers get mappings from: the file that the kernel's offsets belong to.
pub(crate) trait Mapper {
    /// Maps queue or doorbell memory at an offset that the kernel answered.
    fn map(&self, offset: u64, length: usize) -> Result<Mapping, Errno>;
}

/// A shared mapping. It stays mapped in a forked child, whose parent still uses it.
#[derive(Debug)]
pub(crate) struct Mapping {
    raw: ManuallyDrop<MmapRaw>,
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
        use std::os::fd::AsRawFd;
        let raw = MmapOptions::new()
            .offset(offset)
            .len(length)
            .map_raw(fd.as_raw_fd())
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOMEM))?;
        Ok(Mapping { raw: ManuallyDrop::new(raw), epoch })
    }

    /// Anonymous memory in place of a file's, for a kernel that is played by a test.
    #[cfg(test)]
    pub(crate) fn anonymous(length: usize, epoch: Epoch) -> Result<Mapping, Errno> {
        let raw = MmapOptions::new()
            .len(length)
            .map_anon()
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOMEM))?;
        Ok(Mapping { raw: ManuallyDrop::new(raw.into()), epoch })
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.raw.as_mut_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.raw.len()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.epoch.is_over() {
            return;
        }
        // SAFETY: dropped once, here, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.raw) };
    }
}
