//! The real kernel: `ioctl(2)` and `mmap(2)` on a uverbs file.
//!
//! Pairs with `core/uverbs_ioctl.c`. This is the only file from which a command reaches the kernel.
#![allow(unsafe_code)]

use super::command::{Command, Message};
use super::doorbell::{Doorbell, Response};
use super::invoke_write::write;
use super::kernel::Kernel;
use super::open_file::{OpenFile, linux_ioctl};
use crate::memory::mapping::{Mapper, Mapping};
use crate::platform::Platform;
use crate::sync::fork::Epoch;
use rustix::io::Errno;
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use uverbs_uapi::async_event::{
    UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE, UVERBS_METHOD_ASYNC_EVENT_ALLOC,
};
use uverbs_uapi::comp_channel::{
    ib_uverbs_create_comp_channel, ib_uverbs_create_comp_channel_resp,
};
use uverbs_uapi::dmabuf::{
    UVERBS_ATTR_ALLOC_DMABUF_HANDLE, UVERBS_ATTR_ALLOC_DMABUF_PGOFF, UVERBS_METHOD_DMABUF_ALLOC,
};
use uverbs_uapi::ioctl::RDMA_VERBS_IOCTL;
use uverbs_uapi::mlx5::devx::{
    MLX5_IB_ATTR_DEVX_ASYNC_CMD_FD_ALLOC_HANDLE, MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_FLAGS,
    MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_HANDLE, MLX5_IB_METHOD_DEVX_ASYNC_CMD_FD_ALLOC,
    MLX5_IB_METHOD_DEVX_ASYNC_EVENT_FD_ALLOC,
};
use uverbs_uapi::mlx5::object::{
    MLX5_IB_OBJECT_DEVX_ASYNC_CMD_FD, MLX5_IB_OBJECT_DEVX_ASYNC_EVENT_FD,
};
use uverbs_uapi::object::{UVERBS_OBJECT_ASYNC_EVENT, UVERBS_OBJECT_DEVICE, UVERBS_OBJECT_DMABUF};
use uverbs_uapi::write::IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL;

/// A uverbs file, bound to the driver whose ABI it speaks.
#[derive(Debug)]
pub(crate) struct UverbsFd {
    file: OpenFile,
    driver: u32,
    epoch: Epoch,
    /// Set when the kernel has refused a command by `write(2)`; see [`Kernel::ring`].
    unwritable: AtomicBool,
}

impl UverbsFd {
    pub(crate) fn new(file: impl Into<OpenFile>, driver: u32, epoch: Epoch) -> Self {
        UverbsFd { file: file.into(), driver, epoch, unwritable: AtomicBool::new(false) }
    }
}

/// A message as the ioctl takes it.
fn address_of(message: &mut Message) -> *mut c_void {
    std::ptr::from_mut(message).cast()
}

impl Kernel for UverbsFd {
    fn execute(&self, command: &mut Command<'_>) -> Result<(), Errno> {
        let message = command.message(self.driver)?;
        // SAFETY: `Command` took every address in the message from a slice that it borrows, shared where the
        // kernel reads and exclusively where it writes, with the slice's own length.
        unsafe { self.file.ioctl(RDMA_VERBS_IOCTL, address_of(message)) }
    }

    fn ring(&self, doorbell: Doorbell) -> Result<(), Errno> {
        if !self.unwritable.load(Ordering::Relaxed) {
            let mut response = Response::default();
            // The kernel writes to `response`, which outlives the call.
            let address = std::ptr::from_mut(&mut response).expose_provenance() as u64;
            match doorbell.by_write(address, |bytes| self.file.write(bytes)) {
                Ok(_) => return Ok(()),
                // The process's credentials differ from those at the open: it gave up privileges since,
                // or inherited or received the file. The kernel still accepts ioctls.
                Err(Errno::ACCESS) => self.unwritable.store(true, Ordering::Relaxed),
                Err(errno) => return Err(errno),
            }
        }
        doorbell.by_ioctl(|command| self.execute(command))
    }

    fn mapper(&self) -> &dyn Mapper {
        self
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn reopen(&self) -> Result<Box<dyn Kernel>, Errno> {
        let file = self.file.reopen()?;
        Ok(Box::new(UverbsFd::new(file, self.driver, Epoch::current()?)))
    }

    fn platform(&self) -> Platform {
        self.file.platform()
    }

    fn polled(&self) -> bool {
        self.file.polled()
    }

    fn is_hosted(&self) -> bool {
        self.file.is_hosted()
    }
}

/// A method that no kernel has: the kernel compares the driver's id before it looks the method up.
const NO_SUCH_METHOD: u16 = 0xfff;

/// The first of `drivers` that is the driver of an open uverbs file, which may have no context yet. It
/// changes nothing: the kernel answers `EINVAL` to a command for another driver, and `EPROTONOSUPPORT` to
/// one for its own without such a method.
///
/// # Errors
///
/// `ENOTTY` for a file of something else.
pub(crate) fn driver_among(
    fd: BorrowedFd<'_>,
    drivers: impl Iterator<Item = u32>,
) -> Result<Option<u32>, Errno> {
    for driver in drivers {
        let mut command = Command::new(UVERBS_OBJECT_DEVICE, NO_SUCH_METHOD);
        let message = command.message(driver)?;
        // SAFETY: the message has no attributes, so that the kernel reads its header alone.
        match unsafe { linux_ioctl(fd, RDMA_VERBS_IOCTL, address_of(message)) } {
            Err(Errno::PROTONOSUPPORT) => return Ok(Some(driver)),
            Ok(()) | Err(Errno::INVAL) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(None)
}

/// Makes a completion event file. It is in this file because the kernel answers with a bare descriptor, and
/// making an `OwnedFd` of it is `unsafe`.
pub(crate) fn create_comp_channel(kernel: &dyn Kernel) -> Result<OwnedFd, Errno> {
    // Not a descriptor until the kernel wrote one: 0 may be standard input.
    let mut resp = ib_uverbs_create_comp_channel_resp { fd: u32::MAX };
    let request = ib_uverbs_create_comp_channel::default();
    kernel.execute(write(IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL, &request).response(&mut resp))?;
    let fd = i32::try_from(resp.fd).map_err(|_| Errno::PROTO)?;
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Runs a command that makes a file, which its attribute `id` names. It is here for the same reason.
fn create_file(kernel: &dyn Kernel, command: &mut Command<'_>, id: u16) -> Result<OwnedFd, Errno> {
    kernel.execute(command)?;
    let fd = i32::try_from(command.made(id)?).map_err(|_| Errno::PROTO)?;
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes the file of a context's asynchronous events.
pub(crate) fn create_async_event_file(kernel: &dyn Kernel) -> Result<OwnedFd, Errno> {
    const FD: u16 = UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE;
    let mut command = Command::new(UVERBS_OBJECT_ASYNC_EVENT, UVERBS_METHOD_ASYNC_EVENT_ALLOC);
    create_file(kernel, command.new_fd(FD), FD)
}

/// Makes a file of DEVX events.
pub(crate) fn create_devx_event_file(kernel: &dyn Kernel, flags: u32) -> Result<OwnedFd, Errno> {
    const FD: u16 = MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_HANDLE;
    let mut command =
        Command::new(MLX5_IB_OBJECT_DEVX_ASYNC_EVENT_FD, MLX5_IB_METHOD_DEVX_ASYNC_EVENT_FD_ALLOC);
    command.new_fd(FD).u32(MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_FLAGS, flags);
    create_file(kernel, &mut command, FD)
}

/// Makes the file of answers to DEVX queries.
pub(crate) fn create_devx_command_file(kernel: &dyn Kernel) -> Result<OwnedFd, Errno> {
    const FD: u16 = MLX5_IB_ATTR_DEVX_ASYNC_CMD_FD_ALLOC_HANDLE;
    let mut command =
        Command::new(MLX5_IB_OBJECT_DEVX_ASYNC_CMD_FD, MLX5_IB_METHOD_DEVX_ASYNC_CMD_FD_ALLOC);
    create_file(kernel, command.new_fd(FD), FD)
}

/// Makes a dma-buf of the pages of the device that a file maps at this offset.
pub(crate) fn export_dma_buf(kernel: &dyn Kernel, mmap_offset: u64) -> Result<OwnedFd, Errno> {
    const FD: u16 = UVERBS_ATTR_ALLOC_DMABUF_HANDLE;
    let mut command = Command::new(UVERBS_OBJECT_DMABUF, UVERBS_METHOD_DMABUF_ALLOC);
    // In bytes, in spite of its name: `mlx5_ib_pgoff_to_mmap_entry` divides by the size of a page.
    create_file(kernel, command.new_fd(FD).u64(UVERBS_ATTR_ALLOC_DMABUF_PGOFF, mmap_offset), FD)
}

impl Mapper for UverbsFd {
    fn map(&self, offset: u64, length: usize) -> Result<Mapping, Errno> {
        self.file.map(offset, length, false, self.epoch)
    }

    fn map_read_only(&self, offset: u64, length: usize) -> Result<Mapping, Errno> {
        self.file.map(offset, length, true, self.epoch)
    }
}

#[cfg(test)]
mod tests {
    use super::super::command::MAX_ATTRS;
    use super::*;

    /// The file is no uverbs file: the command ends before the kernel sees it.
    #[test]
    #[cfg_attr(miri, ignore = "it asks a pipe for what it cannot do")]
    fn attributes_beyond_the_message_are_refused() {
        let (file, _) = rustix::pipe::pipe().unwrap();
        let kernel = UverbsFd::new(file, 0, Epoch::current().unwrap());
        let run = |count: usize| {
            let mut command = Command::new(1, 2);
            for id in 0..count {
                command.u32(id as u16, 7);
            }
            kernel.execute(&mut command)
        };
        assert_eq!(run(MAX_ATTRS), Err(Errno::NOTTY));
        assert_eq!(run(MAX_ATTRS + 1), Err(Errno::TOOBIG));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it asks a pipe for what it cannot do")]
    fn a_file_of_something_else_has_no_driver() {
        let (file, _) = rustix::pipe::pipe().unwrap();
        assert_eq!(driver_among(file.as_fd(), 1..4), Err(Errno::NOTTY));
    }
}
