//! Open files as the program holds them: of uverbs, and of the connection manager.

use crate::call::Result;
use crate::cm::CmFileId;
use crate::kernel::{FileId, Shown};
use crate::memory::{User, show_memory};
use crate::world::World;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::ffi::c_void;
use std::sync::Arc;
use uverbs_host::{HostFile, HostPages, HostSystem};
use uverbs_uapi::ioctl::RDMA_VERBS_IOCTL;

/// A handle of an open file. The file is closed when no handle and no descriptor is left.
#[derive(Debug)]
pub(crate) struct UverbsFile {
    world: Arc<World>,
    id: FileId,
    fd: Option<OwnedFd>,
}

impl UverbsFile {
    /// A handle that the kernel counts; `fd` leads to the file.
    pub(crate) fn new(world: Arc<World>, id: FileId, fd: OwnedFd) -> UverbsFile {
        UverbsFile { world, id, fd: Some(fd) }
    }
}

impl Drop for UverbsFile {
    fn drop(&mut self) {
        drop(self.fd.take());
        let now = self.world.nanoseconds();
        let _ = self.world.enter(|kernel| {
            kernel.release(self.id, now);
            Ok(())
        });
    }
}

// SAFETY: `Kernel` writes to the ranges that a command names while it runs, and to memory that the file's
// objects lend to the device: regions, queues and doorbell records, until the object is destroyed. Pages that are
// mapped belong to one mapping offset, and the kernel reaches them as atomics.
unsafe impl HostFile for UverbsFile {
    unsafe fn ioctl(&self, request: u32, argument: *mut c_void) -> Result<()> {
        if request != RDMA_VERBS_IOCTL {
            return Err(Errno::NOTTY);
        }
        let address = argument.expose_provenance() as u64;
        // SAFETY: the caller's promise.
        let user = unsafe { User::new() };
        self.world.enter(|kernel| kernel.ioctl(self.id, user, address))
    }

    unsafe fn write(&self, _: &[u8]) -> Result<usize> {
        // The errno of Linux for a process whose credentials have changed: such a process issues ioctls instead.
        Err(Errno::ACCESS)
    }

    fn map(&self, offset: u64, length: usize, read_only: bool) -> Result<HostPages> {
        let now = self.world.nanoseconds();
        let (shown, lease) = self.world.kernel()?.map(self.id, offset, length, read_only, now)?;
        match shown {
            Shown::Pages(pages) => pages.show(length, lease).ok_or(Errno::INVAL),
            Shown::Bar(start) => {
                let owner = (self.world.clone(), lease);
                // SAFETY: the world has the device, whose memory in BAR0 stays until it is dropped, and which
                // reaches it as atomics.
                Ok(unsafe { show_memory(start, length, owner) })
            }
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().map(AsFd::as_fd).expect("a descriptor until the handle is dropped")
    }

    fn system(&self) -> Arc<dyn HostSystem> {
        self.world.clone()
    }

    fn rung(&self, offset: u64, at: usize, bytes: &[u8]) {
        let _ = self.world.enter(|kernel| kernel.rung(self.id, offset, at, bytes));
    }

    fn looked_at(&self, offset: u64) {
        let now = self.world.nanoseconds();
        if let Ok(mut kernel) = self.world.kernel() {
            kernel.looked_at(self.id, offset, now);
        }
    }

    fn polled(&self) {
        self.world.polled();
    }

    fn polls(&self) -> bool {
        true
    }
}

/// A handle of an open file of the connection manager.
#[derive(Debug)]
pub(crate) struct CmFile {
    world: Arc<World>,
    id: CmFileId,
    fd: Option<OwnedFd>,
}

impl CmFile {
    /// The handle of a new file; `fd` leads to it.
    pub(crate) fn new(world: Arc<World>, id: CmFileId, fd: OwnedFd) -> CmFile {
        CmFile { world, id, fd: Some(fd) }
    }

    /// Whether a call that finds nothing waits.
    fn blocks(&self) -> bool {
        let flags = rustix::fs::fcntl_getfl(self.fd());
        flags.is_ok_and(|flags| !flags.contains(rustix::fs::OFlags::NONBLOCK))
    }
}

impl Drop for CmFile {
    fn drop(&mut self) {
        drop(self.fd.take());
        let now = self.world.nanoseconds();
        let _ = self.world.enter(|kernel| {
            kernel.cm.release(self.id);
            kernel.close_orphans(now);
            Ok(())
        });
    }
}

// SAFETY: the manager writes to the address of a command's answer, while the command runs. There is nothing to map.
unsafe impl HostFile for CmFile {
    unsafe fn ioctl(&self, _: u32, _: *mut c_void) -> Result<()> {
        Err(Errno::NOTTY)
    }

    unsafe fn write(&self, bytes: &[u8]) -> Result<usize> {
        loop {
            // SAFETY: the caller's promise.
            let user = unsafe { User::new() };
            let now = self.world.nanoseconds();
            let answer = self.world.enter(|kernel| kernel.cm_command(self.id, user, bytes, now));
            match answer {
                Ok(()) => return Ok(bytes.len()),
                // Only a call for an event returns this.
                Err(Errno::AGAIN) if self.blocks() => {
                    let fd = self.fd();
                    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
                    self.world.wait(&mut fds, None)?;
                }
                Err(errno) => return Err(errno),
            }
        }
    }

    fn map(&self, _: u64, _: usize, _: bool) -> Result<HostPages> {
        Err(Errno::NODEV)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().map(AsFd::as_fd).expect("a descriptor until the handle is dropped")
    }

    fn system(&self) -> Arc<dyn HostSystem> {
        self.world.clone()
    }

    fn rung(&self, _: u64, _: usize, _: &[u8]) {}
}
