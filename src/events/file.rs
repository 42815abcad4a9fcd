//! A context's event file.

use rustix::io::Result;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// The file of a context's asynchronous events. Commands that create a queue name it to the kernel. Many
/// programs never read it, so it is made non-blocking only before the first read.
#[derive(Debug)]
pub(crate) struct EventFile {
    fd: OwnedFd,
    nonblocking: AtomicBool,
}

impl EventFile {
    pub(crate) fn new(fd: OwnedFd) -> EventFile {
        EventFile { fd, nonblocking: AtomicBool::new(false) }
    }

    /// The file for reading, non-blocking.
    pub(crate) fn reader(&self) -> Result<BorrowedFd<'_>> {
        // Acquire pairs with the Release below: a thread that sees the flag finds the file non-blocking.
        // If two threads both set it, nothing is lost.
        if !self.nonblocking.load(Ordering::Acquire) {
            set_nonblocking(self.fd.as_fd(), true)?;
            self.nonblocking.store(true, Ordering::Release);
        }
        Ok(self.fd.as_fd())
    }
}

/// Sets whether reads of a file return at once or wait.
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>, nonblocking: bool) -> Result<()> {
    #[cfg(miri)]
    {
        // Miri has no FIONBIO.
        use rustix::fs::OFlags;
        let mut flags = rustix::fs::fcntl_getfl(fd)?;
        flags.set(OFlags::NONBLOCK, nonblocking);
        rustix::fs::fcntl_setfl(fd, flags & OFlags::NONBLOCK)
    }
    #[cfg(not(miri))]
    rustix::io::ioctl_fionbio(fd, nonblocking)
}

impl AsFd for EventFile {
    /// The file for commands, which do not read it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
