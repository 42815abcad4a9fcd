//! One ioctl, taken apart: an object, a method and its attributes.
//!
//! Pairs with `core/uverbs_ioctl.c`.

use crate::kernel::FileId;
use crate::memory::User;
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities};
use std::os::fd::{IntoRawFd, OwnedFd};
use uverbs_uapi::device::{UVERBS_ATTR_CORE_IN, UVERBS_ATTR_CORE_OUT};
use uverbs_uapi::ioctl::{
    UVERBS_ATTR_F_MANDATORY, UVERBS_ATTR_F_VALID_OUTPUT, ib_uverbs_attr, ib_uverbs_ioctl_hdr,
};
use uverbs_uapi::object::{UVERBS_ATTR_UHW_IN, UVERBS_ATTR_UHW_OUT};
use zerocopy::{FromBytes, Immutable, IntoBytes};

pub(crate) type Result<T> = std::result::Result<T, Errno>;

/// Whether the calling thread has a capability.
pub(crate) fn is_capable(capability: CapabilitySet) -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(capability))
}

/// Attributes beyond this number are refused: no method has as many.
const MAX_ATTRS: usize = 256;

/// A command that runs.
pub(crate) struct Call<'c> {
    /// The file that it was issued on.
    pub(crate) file: FileId,
    pub(crate) header: ib_uverbs_ioctl_hdr,
    pub(crate) user: User<'c>,
    attrs: Vec<ib_uverbs_attr>,
    /// The address of the first attribute.
    address: u64,
}

impl<'c> Call<'c> {
    /// Reads the message at `address`.
    pub(crate) fn read(file: FileId, user: User<'c>, address: u64) -> Result<Call<'c>> {
        let header: ib_uverbs_ioctl_hdr = user.load(address);
        let (head, each) = (size_of::<ib_uverbs_ioctl_hdr>(), size_of::<ib_uverbs_attr>());
        let count = usize::from(header.num_attrs);
        if usize::from(header.length) != head + count * each || header.reserved1 != 0 {
            return Err(Errno::INVAL);
        }
        if count > MAX_ATTRS {
            return Err(Errno::TOOBIG);
        }
        let address = address + head as u64;
        let attrs = (0..count).map(|nth| user.load(address + (nth * each) as u64)).collect();
        Ok(Call { file, header, user, attrs, address })
    }

    /// Refuses a mandatory attribute that the method does not know, and one that comes twice.
    pub(crate) fn check_known(&self, known: &[u16]) -> Result<()> {
        let unknown = |attr: &ib_uverbs_attr| {
            attr.flags & UVERBS_ATTR_F_MANDATORY != 0 && !known.contains(&attr.attr_id)
        };
        if self.attrs.iter().any(unknown) {
            return Err(Errno::PROTONOSUPPORT);
        }
        let count = |id: &u16| self.attrs.iter().filter(|attr| attr.attr_id == *id).count();
        if known.iter().any(|id| count(id) > 1) { Err(Errno::INVAL) } else { Ok(()) }
    }

    /// Refuses an older command whose request is shorter than this, or that has less room for its response.
    pub(crate) fn check_sizes(&self, request: usize, response: usize) -> Result<()> {
        let is_short = self.room(UVERBS_ATTR_CORE_IN) < request;
        if is_short || self.room(UVERBS_ATTR_CORE_OUT) < response {
            return Err(Errno::NOSPC);
        }
        Ok(())
    }

    fn attr(&self, id: u16) -> Option<&ib_uverbs_attr> {
        self.attrs.iter().find(|attr| attr.attr_id == id)
    }

    /// Whether the attribute was passed.
    pub(crate) fn has(&self, id: u16) -> bool {
        self.attr(id).is_some()
    }

    /// The bytes of an input; empty without the attribute.
    pub(crate) fn bytes(&self, id: u16) -> Vec<u8> {
        let Some(attr) = self.attr(id) else { return Vec::new() };
        let length = usize::from(attr.len);
        let mut bytes = vec![0; length];
        match length {
            0..=8 => bytes.copy_from_slice(&attr.data.to_ne_bytes()[..length]),
            _ => self.user.read(attr.data, &mut bytes),
        }
        bytes
    }

    /// A struct that the caller passed. Zeros complete the shorter one of an older program; the excess of a longer one
    /// must be zero.
    pub(crate) fn input<T: FromBytes + IntoBytes>(&self, id: u16) -> Result<T> {
        self.input_if(id)?.ok_or(Errno::INVAL)
    }

    /// As [`input`](Self::input), if it was passed.
    pub(crate) fn input_if<T: FromBytes + IntoBytes>(&self, id: u16) -> Result<Option<T>> {
        if !self.has(id) {
            return Ok(None);
        }
        let bytes = self.bytes(id);
        let mut value = T::new_zeroed();
        let room = value.as_mut_bytes();
        let (fits, rest) = bytes.split_at(bytes.len().min(room.len()));
        if rest.iter().any(|byte| *byte != 0) {
            return Err(Errno::TOOBIG);
        }
        room[..fits.len()].copy_from_slice(fits);
        Ok(Some(value))
    }

    /// An integer of 4 bytes.
    pub(crate) fn u32(&self, id: u16) -> Result<u32> {
        self.u32_if(id).ok_or(Errno::INVAL)
    }

    /// An integer of 4 bytes, if it was passed.
    pub(crate) fn u32_if(&self, id: u16) -> Option<u32> {
        let bytes = self.attr(id)?.data.to_ne_bytes();
        Some(u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    /// An integer of 8 bytes, or of 4.
    pub(crate) fn u64_if(&self, id: u16) -> Option<u64> {
        match self.attr(id)?.len {
            4 => self.u32_if(id).map(u64::from),
            _ => Some(self.attr(id)?.data),
        }
    }

    /// The handle of an object, if it was passed.
    pub(crate) fn handle_if(&self, id: u16) -> Option<u32> {
        Some(self.attr(id)?.data as u32)
    }

    /// The handle of an object.
    pub(crate) fn handle(&self, id: u16) -> Result<u32> {
        self.handle_if(id).ok_or(Errno::INVAL)
    }

    /// The number of a descriptor, if one was passed.
    pub(crate) fn fd_if(&self, id: u16) -> Option<i32> {
        Some(self.attr(id)?.data as i64 as i32)
    }

    /// Bytes of room for an output; 0 without the attribute.
    pub(crate) fn room(&self, id: u16) -> usize {
        self.attr(id).map_or(0, |attr| attr.len.into())
    }

    fn mark_written(&mut self, id: u16) {
        self.update(id, |attr| attr.flags |= UVERBS_ATTR_F_VALID_OUTPUT);
    }

    fn update(&mut self, id: u16, change: impl FnOnce(&mut ib_uverbs_attr)) {
        if let Some(nth) = self.attrs.iter().position(|attr| attr.attr_id == id) {
            change(&mut self.attrs[nth]);
            let address = self.address + (nth * size_of::<ib_uverbs_attr>()) as u64;
            self.user.store(address, &self.attrs[nth]);
        }
    }

    /// Writes as much of an output as there is room for; nothing without the attribute.
    pub(crate) fn put_bytes(&mut self, id: u16, bytes: &[u8]) {
        let Some(attr) = self.attr(id) else { return };
        let room = usize::from(attr.len);
        let address = attr.data;
        self.user.write(address, &bytes[..bytes.len().min(room)]);
        // As `uverbs_copy_to_struct_or_zero`.
        if bytes.len() < room {
            self.user.write(address + bytes.len() as u64, &vec![0; room - bytes.len()]);
        }
        self.mark_written(id);
    }

    /// Writes a struct to an output.
    pub(crate) fn put<T: IntoBytes + Immutable>(&mut self, id: u16, value: &T) {
        self.put_bytes(id, value.as_bytes());
    }

    /// Returns the handle of a new object to the program.
    pub(crate) fn made(&mut self, id: u16, handle: u32) {
        self.update(id, |attr| {
            attr.data = handle.into();
            attr.flags |= UVERBS_ATTR_F_VALID_OUTPUT;
        });
    }

    /// Gives a new descriptor to the program.
    pub(crate) fn made_fd(&mut self, id: u16, fd: OwnedFd) {
        let fd = fd.into_raw_fd();
        self.update(id, |attr| attr.data = fd as u32 as u64);
    }

    /// The request of an older command.
    pub(crate) fn core<T: FromBytes + IntoBytes>(&self) -> Result<T> {
        self.input(UVERBS_ATTR_CORE_IN)
    }

    /// The response of an older command.
    pub(crate) fn respond<T: IntoBytes + Immutable>(&mut self, value: &T) {
        self.put(UVERBS_ATTR_CORE_OUT, value);
    }

    /// The driver's part of the request.
    pub(crate) fn driver<T: FromBytes + IntoBytes>(&self) -> Result<T> {
        self.input(UVERBS_ATTR_UHW_IN)
    }

    /// The driver's part of the response.
    pub(crate) fn respond_driver<T: IntoBytes + Immutable>(&mut self, value: &T) {
        self.put(UVERBS_ATTR_UHW_OUT, value);
    }
}
