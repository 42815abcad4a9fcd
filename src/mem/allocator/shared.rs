//! Queue memory that other processes can map.

use super::lent::{Lent, room};
use super::{Allocation, DomainView, QueueAllocator, ResourceType};
use crate::error::{Error, Result};
use crate::mem::fork::Epoch;
use crate::mem::mapping::Mapping;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::param::page_size;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// Gives each buffer a file in memory (`memfd`), which another process can be sent and map: to
/// look at a program's queues while it runs or after it died, or to take them along.
///
/// The memory is shared with forked children, too, and does not move because of them. Whoever
/// writes there disturbs the device.
#[derive(Debug, Default)]
pub struct SharedMemory {
    lent: Lent,
    files: Mutex<Vec<File>>,
}

#[derive(Debug)]
struct File {
    address: usize,
    resource: ResourceType,
    length: usize,
    fd: OwnedFd,
}

/// A buffer of a [`SharedMemory`].
#[derive(Debug)]
pub struct SharedBuffer {
    /// What it is for.
    pub resource: ResourceType,
    /// Bytes, whole pages.
    pub length: usize,
    /// The file: to be mapped, or sent to another process.
    pub file: OwnedFd,
}

impl SharedMemory {
    /// An allocator that has lent nothing yet.
    pub fn new() -> Self {
        SharedMemory::default()
    }

    /// The buffers that are in use, oldest first, with a descriptor of each.
    ///
    /// # Errors
    ///
    /// `EMFILE` if the process has no descriptor left.
    pub fn buffers(&self) -> Result<Vec<SharedBuffer>> {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let duplicate = |file: &File| {
            let fd = rustix::io::fcntl_dupfd_cloexec(file.fd.as_fd(), 0)
                .map_err(|errno| Error::new("list_buffers", errno))?;
            Ok(SharedBuffer { resource: file.resource, length: file.length, file: fd })
        };
        files.iter().map(duplicate).collect()
    }

    fn make(size: usize, align: usize) -> std::result::Result<(Mapping, OwnedFd), Errno> {
        let length = room(size, align, page_size()).ok_or(Errno::NOMEM)?;
        let fd = memfd_create("uverbs-queue", MemfdFlags::CLOEXEC)?;
        ftruncate(&fd, length as u64)?;
        let mapping = Mapping::of_fd(fd.as_fd(), 0, length, Epoch::current()?)?;
        Ok((mapping, fd))
    }
}

// SAFETY: each mapping is lent once, has the size and alignment asked for, and stays until it is
// given back; it is shared with children, so that a fork copies nothing.
unsafe impl QueueAllocator for SharedMemory {
    fn alloc(
        &self,
        _: &DomainView<'_>,
        size: usize,
        align: usize,
        resource: ResourceType,
    ) -> Allocation {
        let Ok((mapping, fd)) = SharedMemory::make(size, align) else { return Allocation::Failed };
        let length = mapping.len();
        let answer = self.lent.lend(Ok(mapping), align);
        if let Allocation::Memory(memory) = answer {
            let file = File { address: memory.as_ptr().addr(), resource, length, fd };
            self.files.lock().unwrap_or_else(PoisonError::into_inner).push(file);
        }
        answer
    }

    unsafe fn free(&self, _: &DomainView<'_>, memory: NonNull<u8>, _: ResourceType) {
        let address = memory.as_ptr().addr();
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|file| file.address != address);
        drop(files);
        self.lent.take_back(memory);
    }
}
