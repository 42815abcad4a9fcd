//! One ioctl as the kernel reads it: a header, and attributes that carry or name their values.
//!
//! Pairs with the kernel's `rdma_user_ioctl_cmds.h` and the checks of `core/uverbs_ioctl.c`. A [`Command`] is
//! built in place: each method writes one attribute of 16 bytes and returns the same command.
//! [`fd`](super::fd) passes its message to the kernel.
//!
//! A value of up to eight bytes is in the attribute itself. A longer one, and each output, is at the address
//! in the attribute. Addresses are taken from slices which the command borrows, shared where the kernel
//! reads and exclusively where it writes, so a command cannot make the kernel write anywhere else. `fd`
//! relies on this: the fields are private, and each address goes through [`pointer`].

use crate::memory::pointer;
use rustix::io::Errno;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};
use uverbs_uapi::ioctl::{UVERBS_ATTR_F_MANDATORY, ib_uverbs_attr, ib_uverbs_ioctl_hdr};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// The most attributes that any method of this library passes.
pub(crate) const MAX_ATTRS: usize = 24;

/// Header and attributes as one block, as the kernel reads them. The header's length ends it.
#[derive(Debug, FromZeros)]
#[repr(C)]
pub(crate) struct Message {
    header: ib_uverbs_ioctl_hdr,
    attrs: [ib_uverbs_attr; MAX_ATTRS],
}

/// An ioctl, which borrows the memory of its inputs and outputs.
#[derive(Debug)]
pub(crate) struct Command<'a> {
    message: Message,
    /// The reason why the command must not be issued: an attribute of it is missing.
    unfit: Option<Errno>,
    #[cfg(test)]
    played: Played,
    memory: PhantomData<&'a mut [u8]>,
}

impl<'a> Command<'a> {
    #[inline]
    pub(crate) fn new(object: u16, method: u16) -> Self {
        let mut message = Message::new_zeroed();
        message.header.object_id = object;
        message.header.method_id = method;
        Command {
            message,
            unfit: None,
            #[cfg(test)]
            played: Played::default(),
            memory: PhantomData,
        }
    }

    /// Adds an attribute. Without the mandatory flag an older kernel ignores one that it does not know.
    fn push(&mut self, id: u16, flags: u16, length: usize, data: u64) -> &mut Self {
        let Message { header, attrs } = &mut self.message;
        match (attrs.get_mut(usize::from(header.num_attrs)), u16::try_from(length)) {
            (Some(attr), Ok(len)) => {
                *attr = ib_uverbs_attr { attr_id: id, len, flags, data, ..*attr };
                header.num_attrs += 1;
            }
            (None, _) => self.unfit = Some(Errno::TOOBIG),
            (_, Err(_)) => self.unfit = Some(Errno::INVAL),
        }
        self
    }

    /// Up to eight bytes travel in the attribute itself, copied as bytes and not as an integer.
    #[inline]
    fn push_input(&mut self, id: u16, bytes: &'a [u8]) -> &mut Self {
        let data = inline(bytes).unwrap_or_else(|| pointer::input(bytes));
        self.push(id, UVERBS_ATTR_F_MANDATORY, bytes.len(), data)
    }

    #[inline]
    fn push_output(&mut self, id: u16, flags: u16, bytes: &'a mut [u8]) -> &mut Self {
        #[cfg(test)]
        {
            self.played.outputs |= 1 << self.message.header.num_attrs;
        }
        self.push(id, flags, bytes.len(), pointer::output(bytes))
    }

    /// A struct for the kernel to read.
    #[inline]
    pub(crate) fn input<T>(&mut self, id: u16, value: &'a T) -> &mut Self
    where
        T: IntoBytes + Immutable + ?Sized,
    {
        self.push_input(id, value.as_bytes())
    }

    /// A struct for the kernel to read, where there is one.
    pub(crate) fn input_if<T: IntoBytes + Immutable>(
        &mut self,
        id: u16,
        value: Option<&'a T>,
    ) -> &mut Self {
        match value {
            Some(value) => self.input(id, value),
            None => self,
        }
    }

    /// Bytes for the kernel to read, left out where there are none.
    #[inline]
    pub(crate) fn input_if_any(&mut self, id: u16, bytes: &'a [u8]) -> &mut Self {
        if bytes.is_empty() { self } else { self.push_input(id, bytes) }
    }

    #[inline]
    pub(crate) fn u32(&mut self, id: u16, value: u32) -> &mut Self {
        let mut data = 0u64;
        data.as_mut_bytes()[..4].copy_from_slice(&value.to_ne_bytes());
        self.push(id, UVERBS_ATTR_F_MANDATORY, size_of::<u32>(), data)
    }

    /// An eight-byte integer, a constant or a 64-bit set of flags.
    #[inline]
    pub(crate) fn u64(&mut self, id: u16, value: u64) -> &mut Self {
        self.push(id, UVERBS_ATTR_F_MANDATORY, size_of::<u64>(), value)
    }

    /// Flags, left out where there are none: an attribute that is not sent cannot be unknown.
    pub(crate) fn flags(&mut self, id: u16, value: u32) -> &mut Self {
        if value == 0 { self } else { self.u32(id, value) }
    }

    /// A struct for the kernel to write.
    #[inline]
    pub(crate) fn output<T>(&mut self, id: u16, value: &'a mut T) -> &mut Self
    where
        T: FromBytes + IntoBytes + KnownLayout + ?Sized,
    {
        self.push_output(id, UVERBS_ATTR_F_MANDATORY, value.as_mut_bytes())
    }

    /// An output that an older kernel may not know: it keeps its value then.
    pub(crate) fn optional_output<T>(&mut self, id: u16, value: &'a mut T) -> &mut Self
    where
        T: FromBytes + IntoBytes + KnownLayout + ?Sized,
    {
        self.push_output(id, 0, value.as_mut_bytes())
    }

    /// Bytes for the kernel to write, left out where there is no room for any.
    #[inline]
    pub(crate) fn output_if_any(&mut self, id: u16, bytes: &'a mut [u8]) -> &mut Self {
        if bytes.is_empty() { self } else { self.push_output(id, UVERBS_ATTR_F_MANDATORY, bytes) }
    }

    /// An existing object to use.
    #[inline]
    pub(crate) fn handle(&mut self, id: u16, handle: u32) -> &mut Self {
        self.push(id, UVERBS_ATTR_F_MANDATORY, 0, handle.into())
    }

    pub(crate) fn handle_if(&mut self, id: u16, handle: Option<u32>) -> &mut Self {
        match handle {
            Some(handle) => self.handle(id, handle),
            None => self,
        }
    }

    /// An existing object to destroy.
    #[inline]
    pub(crate) fn destroy(&mut self, id: u16, handle: u32) -> &mut Self {
        #[cfg(test)]
        {
            self.played.destroyed = Some(handle);
        }
        self.handle(id, handle)
    }

    /// A new object, whose handle [`made`](Self::made) returns.
    #[inline]
    pub(crate) fn new_handle(&mut self, id: u16) -> &mut Self {
        self.push(id, UVERBS_ATTR_F_MANDATORY, 0, 0)
    }

    /// An open file, of uverbs or any other.
    pub(crate) fn fd(&mut self, id: u16, fd: BorrowedFd<'a>) -> &mut Self {
        self.push(id, UVERBS_ATTR_F_MANDATORY, 0, i64::from(fd.as_raw_fd()) as u64)
    }

    pub(crate) fn fd_if(&mut self, id: u16, fd: Option<BorrowedFd<'a>>) -> &mut Self {
        match fd {
            Some(fd) => self.fd(id, fd),
            None => self,
        }
    }

    /// A new file, whose descriptor [`made`](Self::made) returns: -1 before the kernel made one.
    pub(super) fn new_fd(&mut self, id: u16) -> &mut Self {
        self.push(id, UVERBS_ATTR_F_MANDATORY, 0, u64::MAX)
    }

    /// The message, for the driver of the file that it goes to. The kernel writes the numbers of new objects into
    /// it, and marks the outputs that it wrote.
    ///
    /// # Errors
    ///
    /// `E2BIG` for more than [`MAX_ATTRS`] attributes and `EINVAL` for one of more than 65,535 bytes: a
    /// command without that attribute must not be issued.
    #[inline]
    pub(crate) fn message(&mut self, driver: u32) -> Result<&mut Message, Errno> {
        if let Some(errno) = self.unfit {
            return Err(errno);
        }
        let header = &mut self.message.header;
        let attrs = header.num_attrs * size_of::<ib_uverbs_attr>() as u16;
        header.length = size_of::<ib_uverbs_ioctl_hdr>() as u16 + attrs;
        header.driver_id = driver;
        Ok(&mut self.message)
    }

    fn attrs(&self) -> &[ib_uverbs_attr] {
        let Message { header, attrs } = &self.message;
        attrs.get(..header.num_attrs.into()).unwrap_or(attrs)
    }

    /// The handle of the object, or the descriptor of the file, that the command made. 0 is a valid handle, so
    /// there is no default.
    pub(crate) fn made(&self, id: u16) -> Result<u32, Errno> {
        let attr = self.attrs().iter().find(|attr| attr.attr_id == id && attr.len == 0);
        attr.map(|attr| attr.data as u32).ok_or(Errno::BADMSG)
    }
}

/// Bytes that fit into an attribute, as they lie there.
#[inline]
fn inline(bytes: &[u8]) -> Option<u64> {
    let mut data = 0u64;
    data.as_mut_bytes().get_mut(..bytes.len())?.copy_from_slice(bytes);
    Some(data)
}

/// The output attributes of a command, which a real kernel knows from the method.
#[cfg(test)]
#[derive(Debug, Default)]
struct Played {
    /// The attributes that hold the address of an output, a bit for each.
    outputs: u32,
    destroyed: Option<u32>,
}

/// A command as the kernel sees it, for tests that play one.
#[cfg(test)]
impl Command<'_> {
    pub(super) fn object(&self) -> u16 {
        self.message.header.object_id
    }

    pub(super) fn method(&self) -> u16 {
        self.message.header.method_id
    }

    /// The object to destroy.
    pub(super) fn destroyed(&self) -> Option<u32> {
        self.played.destroyed
    }

    fn place(&self, id: u16) -> Option<usize> {
        self.attrs().iter().position(|attr| attr.attr_id == id)
    }

    pub(super) fn has(&self, id: u16) -> bool {
        self.place(id).is_some()
    }

    fn is_output(&self, place: usize) -> bool {
        self.played.outputs >> place & 1 != 0
    }

    /// Bytes that the kernel reads.
    pub(super) fn bytes(&self, id: u16) -> Option<&[u8]> {
        let place = self.place(id).filter(|place| !self.is_output(*place))?;
        let attr = &self.message.attrs[place];
        let length = usize::from(attr.len);
        Some(match attr.data.as_bytes().get(..length) {
            Some(inline) => inline,
            None => pointer::play_reader(attr.data, length),
        })
    }

    /// Bytes of an output.
    pub(super) fn room(&self, id: u16) -> usize {
        let place = self.place(id).filter(|place| self.is_output(*place));
        place.map_or(0, |place| self.message.attrs[place].len.into())
    }

    /// Bytes that the kernel writes.
    pub(super) fn output_room(&mut self, id: u16) -> Option<&mut [u8]> {
        let place = self.place(id).filter(|place| self.is_output(*place))?;
        let attr = &self.message.attrs[place];
        Some(pointer::play_writer(attr.data, attr.len.into()))
    }

    /// Calls `change` with the bytes of each output.
    pub(super) fn each_output(&mut self, change: &mut dyn FnMut(&mut [u8])) {
        for place in (0..self.attrs().len()).filter(|place| self.is_output(*place)) {
            let attr = &self.message.attrs[place];
            change(pointer::play_writer(attr.data, attr.len.into()));
        }
    }

    /// The attributes that the kernel reads, with their bytes.
    pub(super) fn inputs(&self) -> Vec<(u16, Vec<u8>)> {
        let ids = self.attrs().iter().filter(|attr| attr.len > 0).map(|attr| attr.attr_id);
        ids.filter_map(|id| Some((id, self.bytes(id)?.to_vec()))).collect()
    }

    /// The bytes of each output.
    pub(super) fn outputs(&mut self) -> Vec<Vec<u8>> {
        let mut outputs = Vec::new();
        self.each_output(&mut |output| outputs.push(output.to_vec()));
        outputs
    }

    fn number_at(&self, id: u16) -> Option<usize> {
        let place = self.place(id)?;
        (self.attrs()[place].len == 0).then_some(place)
    }

    /// A handle or a descriptor.
    pub(super) fn number(&self, id: u16) -> Option<u64> {
        self.number_at(id).map(|place| self.attrs()[place].data)
    }

    /// Returns the handle or the descriptor of the object that the kernel made.
    pub(super) fn make(&mut self, id: u16, number: u64) -> Result<(), Errno> {
        let place = self.number_at(id).ok_or(Errno::INVAL)?;
        self.message.attrs[place].data = number;
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    /// The attributes of a command that is fit to be issued.
    fn attrs(command: &mut Command<'_>) -> Result<Vec<ib_uverbs_attr>, Errno> {
        command.message(7)?;
        Ok(command.attrs().to_vec())
    }

    fn only(command: &mut Command<'_>) -> (u16, u64) {
        let [attr] = attrs(command).unwrap()[..] else { panic!("{command:?}") };
        assert_eq!((attr.attr_id, attr.flags), (3, UVERBS_ATTR_F_MANDATORY));
        (attr.len, attr.data)
    }

    #[test]
    fn header_counts_the_attributes() {
        let mut command = Command::new(1, 2);
        let message = command.u32(3, 4).u64(5, 6).message(7).unwrap();
        let ib_uverbs_ioctl_hdr { length, object_id, method_id, num_attrs, driver_id, .. } =
            message.header;
        assert_eq!((length, object_id, method_id, num_attrs, driver_id), (24 + 32, 1, 2, 2, 7));
    }

    #[test]
    fn attributes_beyond_the_message_are_refused() {
        let with = |count: usize| {
            let mut command = Command::new(1, 2);
            for id in 0..count {
                command.u32(id as u16, 7);
            }
            attrs(&mut command).map(|attrs| attrs.len())
        };
        assert_eq!(with(MAX_ATTRS), Ok(MAX_ATTRS));
        assert_eq!(with(MAX_ATTRS + 1), Err(Errno::TOOBIG));
    }

    #[test]
    fn values_beyond_the_length_field_are_refused() {
        let mut bytes = vec![0u8; 65536];
        let longest = &bytes[1..];
        assert_eq!(only(Command::new(1, 2).input(3, longest)).0, 65535);
        assert_eq!(attrs(Command::new(1, 2).input(3, &bytes[..])).unwrap_err(), Errno::INVAL);
        let output = attrs(Command::new(1, 2).output(3, &mut bytes[..]).u32(4, 5));
        assert_eq!(output.unwrap_err(), Errno::INVAL);
    }

    #[test]
    fn short_inputs_travel_in_the_attribute() {
        let (length, data) = only(Command::new(1, 2).input(3, &[1u8, 2, 3]));
        assert_eq!((length, data.to_ne_bytes()), (3, [1, 2, 3, 0, 0, 0, 0, 0]));
        let (length, data) = only(Command::new(1, 2).input(3, &[9u8; 8]));
        assert_eq!((length, data.to_ne_bytes()), (8, [9; 8]));
        let (length, data) = only(Command::new(1, 2).u32(3, 5));
        assert_eq!((length, &data.to_ne_bytes()[..4]), (4, &5u32.to_ne_bytes()[..]));
    }

    #[test]
    fn long_inputs_and_all_outputs_travel_by_address() {
        let bytes = [9u8; 9];
        let address = bytes.as_ptr() as u64;
        assert_eq!(only(Command::new(1, 2).input(3, &bytes)), (9, address));
        let mut short = 5u16;
        let address = std::ptr::from_mut(&mut short) as u64;
        assert_eq!(only(Command::new(1, 2).output(3, &mut short)), (2, address));
    }

    #[test]
    fn absent_values_are_not_sent() {
        let mut command = Command::new(1, 2);
        command.input_if::<u32>(3, None).input_if_any(4, &[]).output_if_any(5, &mut []);
        command.flags(6, 0).handle_if(7, None).fd_if(8, None);
        assert_eq!(attrs(&mut command).unwrap().len(), 0);
    }

    #[test]
    fn new_objects_have_a_handle_and_values_none() {
        let mut command = Command::new(1, 2);
        let stdin = std::io::stdin();
        command.u32(3, 9).new_handle(4).new_fd(5).fd(6, stdin.as_fd());
        assert_eq!(command.made(3), Err(Errno::BADMSG));
        assert_eq!(command.made(4), Ok(0));
        // Not a descriptor until the kernel wrote one: 0 may be standard input.
        assert_eq!(command.made(5), Ok(u32::MAX));
        assert_eq!(command.made(7), Err(Errno::BADMSG));
    }
}
