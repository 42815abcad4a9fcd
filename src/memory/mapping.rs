//! Mappings that the kernel or a device writes as well.
//!
//! Pairs with the `mmap` of a uverbs file: queue buffers of rxe, doorbell pages of mlx5.

use crate::sync::fork::{Epoch, OwnedHere};
use memmap2::{MmapOptions, MmapRaw};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use uverbs_host::{HostFile, HostPages};

/// The source of providers' mappings: the file that the kernel's offsets belong to.
pub(crate) trait Mapper {
    /// Maps queue or doorbell memory at an offset that the kernel returned.
    fn map(&self, offset: u64, length: usize) -> Result<Mapping, Errno>;

    /// Maps memory that may only be read.
    fn map_read_only(&self, offset: u64, length: usize) -> Result<Mapping, Errno>;
}

/// Pages, by their owner.
#[derive(Debug)]
enum Raw {
    /// Pages that Linux mapped.
    Mapped(MmapRaw),
    /// Pages of this process that a hosted kernel, or a test, shows.
    Shown(HostPages),
}

/// The pages of a hosted kernel's file, whose device sees no store by itself.
#[derive(Debug)]
struct Hosted {
    file: Arc<dyn HostFile>,
    /// The offset in the file where the pages begin.
    offset: u64,
}

/// The pages of a mapping, and the file that shows them.
#[derive(Debug)]
struct Pages {
    raw: Raw,
    hosted: Option<Hosted>,
}

/// A shared mapping. It stays mapped in a forked child, whose parent still uses it.
#[derive(Debug)]
pub(crate) struct Mapping {
    pages: OwnedHere<Pages>,
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
        Ok(Mapping::new(Raw::Mapped(raw), None, epoch))
    }

    /// Maps pages of a hosted kernel's file.
    pub(crate) fn of_host(
        file: &Arc<dyn HostFile>,
        offset: u64,
        length: usize,
        read_only: bool,
        epoch: Epoch,
    ) -> Result<Mapping, Errno> {
        let pages = file.map(offset, length, read_only)?;
        if pages.len() < length {
            return Err(Errno::INVAL);
        }
        let hosted = Hosted { file: file.clone(), offset };
        Ok(Mapping::new(Raw::Shown(pages), Some(hosted), epoch))
    }

    /// Pages that stand for a mapping of a test's file.
    #[cfg(all(test, miri))]
    pub(super) fn of_pages(pages: HostPages, epoch: Epoch) -> Mapping {
        Mapping::new(Raw::Shown(pages), None, epoch)
    }

    fn new(raw: Raw, hosted: Option<Hosted>, epoch: Epoch) -> Mapping {
        Mapping { pages: OwnedHere::of(Pages { raw, hosted }, epoch) }
    }

    /// Whether the device is in this process, so that [`tell`](Self::tell) must follow each store.
    #[inline]
    pub(crate) fn is_hosted(&self) -> bool {
        self.pages.hosted.is_some()
    }

    /// Tells a device in this process that `bytes` were stored at byte `at`.
    #[cold]
    pub(crate) fn tell(&self, at: usize, bytes: &[u8]) {
        if let Some(hosted) = self.pages.hosted.as_ref().filter(|_| !self.is_inherited()) {
            hosted.file.rung(hosted.offset, at, bytes);
        }
    }

    /// Asks a device in this process to update its registers in memory.
    #[cold]
    pub(crate) fn look(&self) {
        if let Some(hosted) = self.pages.hosted.as_ref().filter(|_| !self.is_inherited()) {
            hosted.file.looked_at(hosted.offset);
        }
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        match &self.pages.raw {
            Raw::Mapped(raw) => raw.as_mut_ptr(),
            Raw::Shown(pages) => pages.as_ptr(),
        }
    }

    /// Whether the caller runs in a child of the process that made the mapping. Such a child must
    /// not write there: the parent's device reads it.
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        self.pages.is_inherited()
    }

    pub(crate) fn len(&self) -> usize {
        match &self.pages.raw {
            Raw::Mapped(raw) => raw.len(),
            Raw::Shown(pages) => pages.len(),
        }
    }
}
