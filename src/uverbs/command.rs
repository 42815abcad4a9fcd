//! One ioctl as data: an object, a method, and attributes that own or borrow their values.
//!
//! Pairs with the kernel's `rdma_user_ioctl_cmds.h` and the checks of `core/uverbs_ioctl.c`. No
//! address appears here: buffers are slices until [`fd`](super::fd) turns them into pointers, so a command
//! cannot make the kernel write anywhere else.

use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The most attributes that any method of this library passes.
pub(crate) const MAX_ATTRS: usize = 24;

/// The value of an attribute, by the kernel's kinds.
#[derive(Debug)]
pub(crate) enum AttrValue<'a> {
    /// Bytes for the kernel to read.
    In(&'a [u8]),
    /// An integer for the kernel to read, of 4 or 8 bytes.
    Int { value: u64, size: u16 },
    /// Bytes for the kernel to write.
    Out(&'a mut [u8]),
    /// An existing object to use.
    Handle(u32),
    /// An existing object to destroy.
    Destroy(u32),
    /// A new object; holds its handle afterwards.
    New(u32),
    /// An open file, of uverbs or any other.
    Fd(i32, std::marker::PhantomData<BorrowedFd<'a>>),
    /// A new file; holds it afterwards.
    NewFd(Option<OwnedFd>),
}

/// An attribute of a command.
#[derive(Debug)]
pub(crate) struct Attr<'a> {
    pub(crate) id: u16,
    /// The mandatory flag: without it an older kernel ignores an attribute that it does not know.
    pub(crate) mandatory: bool,
    pub(crate) value: AttrValue<'a>,
}

/// An ioctl that was not issued yet.
#[derive(Debug)]
pub(crate) struct Command<'a> {
    pub(crate) object: u16,
    pub(crate) method: u16,
    attrs: [Option<Attr<'a>>; MAX_ATTRS],
    /// How many attributes were pushed; with more than `MAX_ATTRS` the command is not run.
    count: usize,
}

impl<'a> Command<'a> {
    pub(crate) fn new(object: u16, method: u16) -> Self {
        Command { object, method, attrs: [const { None }; MAX_ATTRS], count: 0 }
    }

    fn push(mut self, id: u16, mandatory: bool, value: AttrValue<'a>) -> Self {
        if let Some(slot) = self.attrs.get_mut(self.count) {
            *slot = Some(Attr { id, mandatory, value });
        }
        self.count += 1;
        self
    }

    /// A struct for the kernel to read.
    pub(crate) fn input<T: IntoBytes + Immutable + ?Sized>(self, id: u16, value: &'a T) -> Self {
        self.push(id, true, AttrValue::In(value.as_bytes()))
    }

    /// A struct for the kernel to read, where there is one.
    pub(crate) fn input_if<T: IntoBytes + Immutable>(self, id: u16, value: Option<&'a T>) -> Self {
        match value {
            Some(value) => self.input(id, value),
            None => self,
        }
    }

    /// Bytes for the kernel to read, left out where there are none.
    pub(crate) fn input_if_any(self, id: u16, bytes: &'a [u8]) -> Self {
        if bytes.is_empty() { self } else { self.push(id, true, AttrValue::In(bytes)) }
    }

    pub(crate) fn u32(self, id: u16, value: u32) -> Self {
        self.push(id, true, AttrValue::Int { value: value.into(), size: 4 })
    }

    /// An eight-byte integer, a constant or a 64-bit set of flags.
    pub(crate) fn u64(self, id: u16, value: u64) -> Self {
        self.push(id, true, AttrValue::Int { value, size: 8 })
    }

    /// Flags, left out where there are none: an attribute that is not sent cannot be unknown.
    pub(crate) fn flags(self, id: u16, value: u32) -> Self {
        if value == 0 { self } else { self.u32(id, value) }
    }

    /// A struct for the kernel to write.
    pub(crate) fn output<T>(self, id: u16, value: &'a mut T) -> Self
    where
        T: FromBytes + IntoBytes + KnownLayout + ?Sized,
    {
        self.push(id, true, AttrValue::Out(value.as_mut_bytes()))
    }

    /// An output that an older kernel may not know: it keeps its value then.
    pub(crate) fn optional_output<T>(self, id: u16, value: &'a mut T) -> Self
    where
        T: FromBytes + IntoBytes + KnownLayout + ?Sized,
    {
        self.push(id, false, AttrValue::Out(value.as_mut_bytes()))
    }

    /// Bytes for the kernel to write, left out where there is no room for any.
    pub(crate) fn output_if_any(self, id: u16, bytes: &'a mut [u8]) -> Self {
        if bytes.is_empty() { self } else { self.push(id, true, AttrValue::Out(bytes)) }
    }

    pub(crate) fn handle(self, id: u16, handle: u32) -> Self {
        self.push(id, true, AttrValue::Handle(handle))
    }

    pub(crate) fn handle_if(self, id: u16, handle: Option<u32>) -> Self {
        match handle {
            Some(handle) => self.handle(id, handle),
            None => self,
        }
    }

    pub(crate) fn destroy(self, id: u16, handle: u32) -> Self {
        self.push(id, true, AttrValue::Destroy(handle))
    }

    pub(crate) fn new_handle(self, id: u16) -> Self {
        self.push(id, true, AttrValue::New(0))
    }

    pub(crate) fn fd(self, id: u16, fd: BorrowedFd<'a>) -> Self {
        self.push(id, true, AttrValue::Fd(fd.as_raw_fd(), std::marker::PhantomData))
    }

    pub(crate) fn fd_if(self, id: u16, fd: Option<BorrowedFd<'a>>) -> Self {
        match fd {
            Some(fd) => self.fd(id, fd),
            None => self,
        }
    }

    pub(crate) fn new_fd(self, id: u16) -> Self {
        self.push(id, true, AttrValue::NewFd(None))
    }

    pub(crate) fn attrs(&self) -> impl Iterator<Item = &Attr<'a>> {
        self.attrs.iter().flatten()
    }

    /// All attributes, for the kernel that runs the command.
    ///
    /// # Errors
    ///
    /// `E2BIG` if more than [`MAX_ATTRS`] were pushed: a command without the others must not be issued.
    pub(crate) fn attrs_to_run(
        &mut self,
    ) -> Result<impl Iterator<Item = &mut Attr<'a>> + use<'_, 'a>, Errno> {
        if self.count > MAX_ATTRS {
            Err(Errno::TOOBIG)
        } else {
            Ok(self.attrs.iter_mut().flatten())
        }
    }

    fn attr(&self, id: u16) -> Option<&Attr<'a>> {
        self.attrs().find(|attr| attr.id == id)
    }

    /// The handle of the object that the command made. 0 is a valid handle, so there is no default.
    pub(crate) fn made(&self, id: u16) -> Result<u32, Errno> {
        match self.attr(id).map(|attr| &attr.value) {
            Some(AttrValue::New(handle)) => Ok(*handle),
            _ => Err(Errno::BADMSG),
        }
    }

    /// The file that the command made.
    pub(crate) fn take_fd(&mut self, id: u16) -> Option<OwnedFd> {
        match &mut self.attrs.iter_mut().flatten().find(|attr| attr.id == id)?.value {
            AttrValue::NewFd(fd) => fd.take(),
            _ => None,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn with(count: usize) -> Command<'static> {
        (0..count).fold(Command::new(1, 2), |command, id| command.u32(id as u16, 7))
    }

    #[test]
    fn a_command_with_too_many_attributes_is_not_run() {
        let mut full = with(MAX_ATTRS);
        assert_eq!(full.attrs_to_run().map(Iterator::count), Ok(MAX_ATTRS));
        let mut beyond = with(MAX_ATTRS + 1);
        assert_eq!(beyond.attrs_to_run().map(Iterator::count), Err(Errno::TOOBIG));
    }
}
