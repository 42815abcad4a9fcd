//! Queue memory that other processes can map.

use super::lent::{LentMappings, room};
use super::{Allocation, DmaBufPart, DomainView, QueueAllocator, ResourceType};
use crate::error::{Error, Result};
use crate::memory::mapping::Mapping;
use crate::memory::udmabuf;
use crate::sync::fork::Epoch;
use crate::sync::lock::Lock;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::param::page_size;
use std::alloc::Layout;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

/// Gives each buffer a file in memory (`memfd`), which another process can be sent and map: to
/// look at a program's queues while it runs or after it died.
///
/// The memory is shared with forked children, too, and does not move because of them. The file is
/// sealed once it is mapped here: a process that gets it can read it and map it for reading, and can neither
/// write nor shorten it (`F_SEAL_FUTURE_WRITE`, Linux 5.1). Kernels before 6.13, unless they have its fix,
/// make a writable dma-buf of such a file for a process that may open `/dev/udmabuf`: do not give the file to
/// such a process there.
#[derive(Debug, Default)]
pub struct SharedMemory {
    lent: LentMappings,
    files: Lock<Vec<Lending>>,
    /// `/dev/udmabuf`, where the buffers are to be dma-bufs.
    maker: Option<File>,
}

#[derive(Debug)]
struct Lending {
    address: usize,
    resource: ResourceType,
    length: usize,
    fd: OwnedFd,
    dmabuf: Option<OwnedFd>,
}

/// The file that a buffer of a [`SharedMemory`] is in.
#[derive(Debug)]
pub struct QueueFile {
    /// The purpose of the buffer.
    pub resource: ResourceType,
    /// Bytes, whole pages.
    pub length: usize,
    /// The file: to be read, mapped for reading, or sent to another process.
    pub file: OwnedFd,
}

impl SharedMemory {
    /// An allocator that has lent nothing yet.
    pub fn new() -> Self {
        SharedMemory::default()
    }

    /// An allocator whose buffers are dma-bufs, too, and are passed to the kernel as such (Linux 7.2), so that
    /// a program can be tried without hardware that needs them. `/dev/udmabuf` makes them: the user must
    /// be allowed to open it.
    ///
    /// # Errors
    ///
    /// `ENOENT` where the kernel has no such device, `EACCES` without the right.
    pub fn dmabufs() -> Result<Self> {
        SharedMemory::dmabufs_by("/dev/udmabuf")
    }

    fn dmabufs_by(maker: &str) -> Result<Self> {
        let file = File::options().read(true).write(true).open(maker).map_err(|error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            Error::new("open_udmabuf", errno).detail(format!("{maker} makes dma-bufs of memory"))
        })?;
        Ok(SharedMemory { maker: Some(file), ..SharedMemory::default() })
    }

    /// The buffers that are in use, oldest first, with a descriptor of each.
    ///
    /// # Errors
    ///
    /// `EMFILE` if the process has no descriptor left; [`Error::is_forked`] in a child of the process
    /// that made the allocator.
    pub fn buffers(&self) -> Result<Vec<QueueFile>> {
        const VERB: &str = "list_buffers";
        let files = self.files.lock().ok_or_else(|| Error::forked(VERB))?;
        let duplicate = |file: &Lending| {
            let fd = rustix::io::fcntl_dupfd_cloexec(file.fd.as_fd(), 0)
                .map_err(|errno| Error::new(VERB, errno))?;
            Ok(QueueFile { resource: file.resource, length: file.length, file: fd })
        };
        files.iter().map(duplicate).collect()
    }

    fn make(&self, size: usize, align: usize) -> std::result::Result<SealedFile, Errno> {
        let length = room(size, align, page_size()).ok_or(Errno::NOMEM)?;
        let fd = memfd_create("uverbs-queue", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, length as u64)?;
        let dmabuf = match &self.maker {
            Some(maker) => {
                fcntl_add_seals(&fd, SealFlags::SHRINK)?;
                Some(udmabuf::of_memfd(maker, fd.as_fd(), length)?)
            }
            None => None,
        };
        let mapping = Mapping::of_fd(fd.as_fd(), 0, length, Epoch::current()?)?;
        // Sealed against writing, because a WQE that another process writes makes the device do anything, and
        // against shrinking, because an access to a page that is gone is a SIGBUS.
        let sizes = SealFlags::SHRINK | SealFlags::GROW;
        fcntl_add_seals(&fd, sizes | SealFlags::FUTURE_WRITE | SealFlags::SEAL)?;
        Ok(SealedFile { mapping, fd, dmabuf })
    }
}

struct SealedFile {
    mapping: Mapping,
    fd: OwnedFd,
    dmabuf: Option<OwnedFd>,
}

// SAFETY: each mapping is lent once, has the size and alignment asked for, and stays until it is
// given back; it is shared with children, so that a fork copies nothing.
unsafe impl QueueAllocator for SharedMemory {
    fn alloc(&self, _: &DomainView<'_>, layout: Layout, resource: ResourceType) -> Allocation {
        // The kernel pins a dma-buf from its first byte, whatever address this process maps it at: a larger alignment
        // than a page's would only skip bytes of it.
        let align = match &self.maker {
            Some(_) => layout.align().min(page_size()),
            None => layout.align(),
        };
        let made = self.make(layout.size(), align);
        let Ok(SealedFile { mapping, fd, dmabuf }) = made else { return Allocation::Failed };
        let length = mapping.len();
        let allocation = self.lent.lend(Ok(mapping), align);
        if let Allocation::Memory(memory) = allocation {
            let file = Lending { address: memory.as_ptr().addr(), resource, length, fd, dmabuf };
            if let Some(mut files) = self.files.lock() {
                files.push(file);
            }
        }
        allocation
    }

    unsafe fn free(&self, _: &DomainView<'_>, memory: NonNull<u8>, _: Layout, _: ResourceType) {
        let address = memory.as_ptr().addr();
        if let Some(mut files) = self.files.lock() {
            files.retain(|file| file.address != address);
        }
        self.lent.take_back(memory);
    }

    unsafe fn dmabuf(&self, memory: NonNull<u8>) -> Option<DmaBufPart> {
        let address = memory.as_ptr().addr();
        let files = self.files.lock()?;
        let file = files.iter().find(|file| file.address == address)?.dmabuf.as_ref()?;
        // Without a descriptor left the memory has an address still.
        let file = rustix::io::fcntl_dupfd_cloexec(file.as_fd(), 0).ok()?;
        Some(DmaBufPart { file, offset: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::Bench;
    use rustix::io::pwrite;

    /// A machine with encrypted memory could not use such a buffer.
    #[test]
    #[cfg_attr(miri, ignore = "it opens a device")]
    fn a_buffer_that_cannot_become_a_dma_buf_is_not_lent() {
        let bench = Bench::new();
        let domain = DomainView { domain: &*bench.pd.inner.kernel, pd_context: 0 };
        let layout = Layout::from_size_align(64, 64).unwrap();
        let ask = |of: &SharedMemory| of.alloc(&domain, layout, ResourceType::MLX5_CQ);
        // It makes no dma-bufs.
        let memory = SharedMemory::dmabufs_by("/dev/null").unwrap();
        assert_eq!(ask(&memory), Allocation::Failed);
        assert!(memory.buffers().unwrap().is_empty());
        let error = SharedMemory::dmabufs_by("/dev/none").unwrap_err();
        assert!(error.errno() == Errno::NOENT && error.message().contains("/dev/none"), "{error}");
        // Not every machine has the device, and not every user may open it.
        match SharedMemory::dmabufs() {
            Ok(memory) => assert!(memory.maker.is_some()),
            Err(error) => assert!(error.message().contains("/dev/udmabuf"), "{error}"),
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps a file")]
    fn another_holder_of_the_file_can_read_and_not_write() {
        let SealedFile { mapping, fd, .. } = SharedMemory::new().make(5000, 8).unwrap();
        // The mapping stays writable here.
        // SAFETY: the mapping is this test's alone.
        unsafe { mapping.as_ptr().write(7) };
        let mut seen = [0; 1];
        assert_eq!(rustix::io::pread(&fd, &mut seen, 0), Ok(1));
        assert_eq!(seen, [7]);
        assert_eq!(pwrite(&fd, &[1], 0), Err(Errno::PERM));
        assert_eq!(ftruncate(&fd, 0), Err(Errno::PERM));
        assert_eq!(ftruncate(&fd, 1 << 20), Err(Errno::PERM));
        let again = Mapping::of_fd(fd.as_fd(), 0, 4096, Epoch::current().unwrap());
        assert_eq!(again.err(), Some(Errno::PERM));
        Mapping::read_only(fd.as_fd(), 0, 4096, Epoch::current().unwrap()).unwrap();
    }
}
