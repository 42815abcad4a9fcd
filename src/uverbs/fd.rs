//! The real kernel: `ioctl(2)` and `mmap(2)` on a uverbs file.
//!
//! Pairs with `core/uverbs_ioctl.c`. Only here a slice of a command becomes a pointer.
#![allow(unsafe_code)]

use super::command::{AttrValue, Command, MAX_ATTRS};
use super::doorbell::{Doorbell, Response};
use super::invoke_write::write;
use super::kernel::Kernel;
use crate::memory::fork::Epoch;
use crate::memory::mapping::{Mapper, Mapping};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use uverbs_uapi::comp_channel::{
    ib_uverbs_create_comp_channel, ib_uverbs_create_comp_channel_resp,
};
use uverbs_uapi::ioctl::{
    RDMA_VERBS_IOCTL, UVERBS_ATTR_F_MANDATORY, ib_uverbs_attr, ib_uverbs_ioctl_hdr,
};
use uverbs_uapi::object::UVERBS_OBJECT_DEVICE;
use uverbs_uapi::write::IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL;
use zerocopy::{FromZeros, IntoBytes};

/// A uverbs file, bound to the driver whose ABI it speaks.
#[derive(Debug)]
pub(crate) struct UverbsFd {
    fd: OwnedFd,
    driver: u32,
    epoch: Epoch,
    /// The kernel takes no more commands by `write(2)`, see [`Kernel::ring`].
    unwritable: AtomicBool,
}

impl UverbsFd {
    pub(crate) fn new(fd: OwnedFd, driver: u32, epoch: Epoch) -> Self {
        UverbsFd { fd, driver, epoch, unwritable: AtomicBool::new(false) }
    }
}

/// Header and attributes as one block, the way the kernel reads them.
#[repr(C)]
struct IoctlMessage {
    header: ib_uverbs_ioctl_hdr,
    attrs: [ib_uverbs_attr; MAX_ATTRS],
}

struct Invoke<'m>(&'m mut IoctlMessage);

// SAFETY: the opcode is the one uverbs ioctl, whose argument is a message as `IoctlMessage` lays it
// out; `execute` sets its length to the attributes that are filled in.
unsafe impl Ioctl for Invoke<'_> {
    type Output = ();
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        RDMA_VERBS_IOCTL as Opcode
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::from_mut(self.0).cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

impl Kernel for UverbsFd {
    fn execute(&self, command: &mut Command<'_>) -> Result<(), Errno> {
        let mut message =
            IoctlMessage { header: FromZeros::new_zeroed(), attrs: FromZeros::new_zeroed() };
        let mut count = 0u16;
        for (attr, raw) in command.attrs_to_run()?.zip(&mut message.attrs) {
            encode(attr.id, attr.mandatory, &mut attr.value, raw)?;
            count += 1;
        }
        message.header.length = (size_of::<ib_uverbs_ioctl_hdr>()
            + usize::from(count) * size_of::<ib_uverbs_attr>())
            as u16;
        message.header.object_id = command.object;
        message.header.method_id = command.method;
        message.header.num_attrs = count;
        message.header.driver_id = self.driver;
        // SAFETY: every pointer in the message comes from a slice that `command` borrows, shared
        // where the kernel reads and exclusively where it writes, with the slice's own length.
        unsafe { rustix::ioctl::ioctl(&self.fd, Invoke(&mut message)) }?;
        for (attr, raw) in command.attrs_to_run()?.zip(&message.attrs) {
            match &mut attr.value {
                AttrValue::New(handle) => *handle = raw.data as u32,
                AttrValue::NewFd(fd) => {
                    let new = i32::try_from(raw.data).map_err(|_| Errno::PROTO)?;
                    // SAFETY: on success the kernel put a new descriptor here that is ours alone.
                    *fd = Some(unsafe { OwnedFd::from_raw_fd(new) });
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn ring(&self, doorbell: Doorbell) -> Result<(), Errno> {
        if !self.unwritable.load(Ordering::Relaxed) {
            let mut response = Response::default();
            // The kernel writes to `response`, which outlives the call.
            let address = std::ptr::from_mut(&mut response).expose_provenance() as u64;
            match doorbell.by_write(address, |bytes| rustix::io::write(&self.fd, bytes)) {
                Ok(_) => return Ok(()),
                // The process's credentials differ from those of the open: it gave up privileges since,
                // or inherited or received the file. The kernel accepts ioctls then.
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
        self.fd.as_fd()
    }

    fn reopen(&self) -> Result<Box<dyn Kernel>, Errno> {
        let fd = rustix::io::fcntl_dupfd_cloexec(&self.fd, 0)?;
        Ok(Box::new(UverbsFd::new(fd, self.driver, Epoch::current()?)))
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
        let mut message =
            IoctlMessage { header: FromZeros::new_zeroed(), attrs: FromZeros::new_zeroed() };
        message.header.length = size_of::<ib_uverbs_ioctl_hdr>() as u16;
        message.header.object_id = UVERBS_OBJECT_DEVICE;
        message.header.method_id = NO_SUCH_METHOD;
        message.header.driver_id = driver;
        // SAFETY: the message has no attributes, so that the kernel reads its header alone.
        match unsafe { rustix::ioctl::ioctl(fd, Invoke(&mut message)) } {
            Err(Errno::PROTONOSUPPORT) => return Ok(Some(driver)),
            Ok(()) | Err(Errno::INVAL) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(None)
}

/// Makes a completion event file. It is in this file because this older command returns a bare descriptor,
/// of which an `OwnedFd` has to be made.
pub(crate) fn create_comp_channel(kernel: &dyn Kernel) -> Result<OwnedFd, Errno> {
    // Not a descriptor until the kernel wrote one: 0 may be standard input.
    let mut resp = ib_uverbs_create_comp_channel_resp { fd: u32::MAX };
    let request = ib_uverbs_create_comp_channel::default();
    kernel
        .execute(&mut write(IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL, &request).response(&mut resp))?;
    let fd = i32::try_from(resp.fd).map_err(|_| Errno::PROTO)?;
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

impl Mapper for UverbsFd {
    fn map(&self, offset: u64, length: usize) -> Result<Mapping, Errno> {
        Mapping::of_fd(self.fd.as_fd(), offset, length, self.epoch)
    }

    fn map_read_only(&self, offset: u64, length: usize) -> Result<Mapping, Errno> {
        Mapping::read_only(self.fd.as_fd(), offset, length, self.epoch)
    }
}

fn encode(
    id: u16,
    mandatory: bool,
    value: &mut AttrValue<'_>,
    raw: &mut ib_uverbs_attr,
) -> Result<(), Errno> {
    raw.attr_id = id;
    raw.flags = if mandatory { UVERBS_ATTR_F_MANDATORY } else { 0 };
    match value {
        AttrValue::In(bytes) => set_input(raw, bytes)?,
        AttrValue::Int { value, size } => {
            raw.len = *size;
            raw.data = if *size == 4 { inline(&(*value as u32).to_ne_bytes()) } else { *value };
        }
        AttrValue::Out(bytes) => {
            raw.len = length(bytes)?;
            raw.data = bytes.as_mut_ptr().expose_provenance() as u64;
        }
        AttrValue::Handle(handle) | AttrValue::Destroy(handle) => raw.data = u64::from(*handle),
        AttrValue::New(_) => {}
        AttrValue::Fd(fd, _) => raw.data = i64::from(*fd) as u64,
        AttrValue::NewFd(_) => {}
    }
    Ok(())
}

/// Up to eight bytes travel in the attribute itself, copied as bytes and not as an integer.
fn set_input(raw: &mut ib_uverbs_attr, bytes: &[u8]) -> Result<(), Errno> {
    raw.len = length(bytes)?;
    raw.data =
        if bytes.len() <= 8 { inline(bytes) } else { bytes.as_ptr().expose_provenance() as u64 };
    Ok(())
}

fn inline(bytes: &[u8]) -> u64 {
    let mut data = 0u64;
    for (to, from) in data.as_mut_bytes().iter_mut().zip(bytes) {
        *to = *from;
    }
    data
}

fn length(bytes: &[u8]) -> Result<u16, Errno> {
    u16::try_from(bytes.len()).map_err(|_| Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(value: &mut AttrValue<'_>) -> ib_uverbs_attr {
        let mut raw = ib_uverbs_attr::new_zeroed();
        encode(7, true, value, &mut raw).unwrap();
        assert_eq!((raw.attr_id, raw.flags), (7, UVERBS_ATTR_F_MANDATORY));
        raw
    }

    #[test]
    fn short_inputs_travel_in_the_attribute() {
        let raw = encoded(&mut AttrValue::In(&[1, 2, 3]));
        assert_eq!(raw.len, 3);
        assert_eq!(raw.data.to_ne_bytes(), [1, 2, 3, 0, 0, 0, 0, 0]);
        let raw = encoded(&mut AttrValue::Int { value: 5, size: 4 });
        assert_eq!(
            (raw.len, raw.data.to_ne_bytes()[..4].to_vec()),
            (4, 5u32.to_ne_bytes().to_vec())
        );
    }

    #[test]
    fn long_inputs_travel_by_address() {
        let bytes = [9u8; 9];
        let raw = encoded(&mut AttrValue::In(&bytes));
        assert_eq!((raw.len, raw.data), (9, bytes.as_ptr() as u64));
    }

    #[test]
    fn a_missing_fd_is_sign_extended() {
        let raw = encoded(&mut AttrValue::Fd(-1, std::marker::PhantomData));
        assert_eq!((raw.len, raw.data), (0, u64::MAX));
    }

    /// The file is no uverbs file: the command ends before the kernel sees it.
    #[test]
    #[cfg_attr(miri, ignore = "it asks a pipe for what it cannot do")]
    fn attributes_beyond_the_message_are_refused() {
        let (file, _) = rustix::pipe::pipe().unwrap();
        let kernel = UverbsFd::new(file, 0, Epoch::current().unwrap());
        let run = |count: usize| {
            let command = Command::new(1, 2);
            let mut command = (0..count).fold(command, |command, id| command.u32(id as u16, 7));
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

    #[test]
    fn inputs_beyond_the_length_field_are_refused() {
        let bytes = vec![0u8; 65536];
        let mut raw = ib_uverbs_attr::new_zeroed();
        assert_eq!(encode(0, true, &mut AttrValue::In(&bytes), &mut raw), Err(Errno::INVAL));
    }
}
