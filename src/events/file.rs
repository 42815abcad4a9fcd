//! A context's event file.

use rustix::io::Result;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Where the kernel writes what happens to a context's objects. Its commands want it for each that is
/// made; many programs never look into it, so it is as the kernel made it until somebody does.
#[derive(Debug)]
pub(crate) struct EventFile {
    fd: OwnedFd,
    nonblocking: AtomicBool,
}

impl EventFile {
    pub(crate) fn new(fd: OwnedFd) -> EventFile {
        EventFile { fd, nonblocking: AtomicBool::new(false) }
    }

    /// The file for reading, which answers at once.
    pub(crate) fn reader(&self) -> Result<BorrowedFd<'_>> {
        // Two threads may both find it as it was: it is the same twice.
        // Acquire and Release: who finds it told finds the file as it is told to be.
        if !self.nonblocking.load(Ordering::Acquire) {
            set_nonblocking(self.fd.as_fd(), true)?;
            self.nonblocking.store(true, Ordering::Release);
        }
        Ok(self.fd.as_fd())
    }
}

/// Whether reading a file answers at once, or waits.
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>, nonblocking: bool) -> Result<()> {
    #[cfg(miri)]
    {
        // Two calls for one, but Miri knows them.
        use rustix::fs::OFlags;
        let mut flags = rustix::fs::fcntl_getfl(fd)?;
        flags.set(OFlags::NONBLOCK, nonblocking);
        rustix::fs::fcntl_setfl(fd, flags & OFlags::NONBLOCK)
    }
    #[cfg(not(miri))]
    rustix::io::ioctl_fionbio(fd, nonblocking)
}

impl AsFd for EventFile {
    /// For commands, which do not read it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
