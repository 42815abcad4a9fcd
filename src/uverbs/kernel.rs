//! The trait behind which the library issues its ioctls: the real kernel, or the scripted one of tests.

use super::command::Command;
use super::doorbell::Doorbell;
use crate::memory::mapping::Mapper;
use crate::platform::Platform;
use rustix::io::Errno;
use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::panic::{RefUnwindSafe, UnwindSafe};

/// An open uverbs file. Dispatch is dynamic because every call enters the kernel anyway.
pub(crate) trait Kernel: Mapper + Debug + Send + Sync + UnwindSafe + RefUnwindSafe {
    /// Runs a command; its outputs are filled in on success.
    fn execute(&self, command: &mut Command<'_>) -> Result<(), Errno>;

    /// Rings a doorbell that is in the kernel. Allocates nothing: this is part of a data path.
    fn ring(&self, doorbell: Doorbell) -> Result<(), Errno> {
        doorbell.by_ioctl(|command| self.execute(command))
    }

    /// The system that the file belongs to.
    fn platform(&self) -> Platform {
        Platform::LINUX
    }

    /// Whether the device is in this process, and sees no store by itself.
    fn is_hosted(&self) -> bool {
        false
    }

    /// Runs a device that runs only when it is polled. Returns whether the next poll has to call this again.
    fn polled(&self) -> bool {
        false
    }

    /// Maps pages of the file, for providers.
    fn mapper(&self) -> &dyn Mapper;

    /// The file itself.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Opens the same kernel file once more, for a forked child.
    fn reopen(&self) -> Result<Box<dyn Kernel>, Errno>;
}
