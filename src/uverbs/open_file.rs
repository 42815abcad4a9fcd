//! An open file of the kernel: Linux's, behind a descriptor, or a hosted kernel's, in this process.
//!
//! Both speak the same ABI, so that everything above encodes commands once.
#![allow(unsafe_code)]

use crate::memory::mapping::Mapping;
use crate::platform::Platform;
use crate::sync::fork::{Epoch, OwnedHere};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use uverbs_host::HostFile;

/// An open uverbs file, or an open file of the connection manager.
#[derive(Debug)]
pub(crate) enum OpenFile {
    Linux(OwnedFd),
    Hosted(OwnedHere<Arc<dyn HostFile>>),
}

impl From<OwnedFd> for OpenFile {
    fn from(fd: OwnedFd) -> OpenFile {
        OpenFile::Linux(fd)
    }
}

/// An ioctl that reads and writes its argument.
struct Request {
    opcode: Opcode,
    argument: *mut c_void,
}

// SAFETY: the caller of `OpenFile::ioctl` promises that the argument fits the request.
unsafe impl Ioctl for Request {
    type Output = ();
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.opcode
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.argument
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

/// `ioctl(2)` on a file of Linux.
///
/// # Safety
///
/// As [`OpenFile::ioctl`].
#[inline]
pub(crate) unsafe fn linux_ioctl(
    fd: BorrowedFd<'_>,
    request: u32,
    argument: *mut c_void,
) -> Result<(), Errno> {
    let request = Request { opcode: request as Opcode, argument };
    // SAFETY: the caller's promise.
    unsafe { rustix::ioctl::ioctl(fd, request) }
}

impl OpenFile {
    /// A file of a hosted kernel, which a forked child neither uses nor closes.
    pub(crate) fn hosted(file: Arc<dyn HostFile>, epoch: Epoch) -> OpenFile {
        OpenFile::Hosted(OwnedHere::of(file, epoch))
    }

    /// The file behind a descriptor: of a hosted kernel if it is one of those, or else of Linux.
    pub(crate) fn of_fd(fd: OwnedFd, epoch: Epoch) -> OpenFile {
        match uverbs_host::adopt(fd) {
            Ok(file) => OpenFile::hosted(file, epoch),
            Err(fd) => OpenFile::Linux(fd),
        }
    }

    /// `ioctl(2)`.
    ///
    /// # Safety
    ///
    /// The argument is a message of the request, readable and writable, and so are the ranges that it names,
    /// as the command demands.
    #[inline]
    pub(crate) unsafe fn ioctl(&self, request: u32, argument: *mut c_void) -> Result<(), Errno> {
        match self {
            OpenFile::Linux(fd) => {
                // SAFETY: the caller's promise.
                unsafe { linux_ioctl(fd.as_fd(), request, argument) }
            }
            // SAFETY: the caller's promise.
            OpenFile::Hosted(file) => unsafe { file.ioctl(request, argument) },
        }
    }

    /// `write(2)` of a command. As with `write(2)` of a device's file, the caller ensures that the kernel may
    /// read or write the memory at the addresses in it: Rust considers the call safe.
    #[inline]
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<usize, Errno> {
        match self {
            OpenFile::Linux(fd) => rustix::io::write(fd, bytes),
            // SAFETY: the callers' commands name memory that they borrow as the command demands.
            OpenFile::Hosted(file) => unsafe { file.write(bytes) },
        }
    }

    /// `mmap(2)`, shared.
    pub(crate) fn map(
        &self,
        offset: u64,
        length: usize,
        read_only: bool,
        epoch: Epoch,
    ) -> Result<Mapping, Errno> {
        match (self, read_only) {
            (OpenFile::Linux(fd), false) => Mapping::of_fd(fd.as_fd(), offset, length, epoch),
            (OpenFile::Linux(fd), true) => Mapping::read_only(fd.as_fd(), offset, length, epoch),
            (OpenFile::Hosted(file), _) => Mapping::of_host(file, offset, length, read_only, epoch),
        }
    }

    /// The same file once more, for a forked child, which has no part in a hosted kernel.
    pub(crate) fn reopen(&self) -> Result<OpenFile, Errno> {
        match self {
            OpenFile::Linux(fd) => Ok(rustix::io::fcntl_dupfd_cloexec(fd, 0)?.into()),
            OpenFile::Hosted(_) => Err(Errno::OPNOTSUPP),
        }
    }

    /// The system that the file belongs to.
    pub(crate) fn platform(&self) -> Platform {
        match self {
            OpenFile::Linux(_) => Platform::LINUX,
            OpenFile::Hosted(file) => Platform::from(file.system()),
        }
    }

    /// Runs a device that runs only when it is polled. Returns whether the next poll has to call this again.
    #[cold]
    pub(crate) fn polled(&self) -> bool {
        let OpenFile::Hosted(file) = self else { return false };
        file.polled();
        file.polls()
    }

    /// Whether the device is in this process.
    pub(crate) fn is_hosted(&self) -> bool {
        matches!(self, OpenFile::Hosted(_))
    }
}

impl AsFd for OpenFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            OpenFile::Linux(fd) => fd.as_fd(),
            OpenFile::Hosted(file) => file.fd(),
        }
    }
}
