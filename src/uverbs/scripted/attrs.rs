//! Reads the attributes of a command the way the kernel does, and fills in its outputs.

use crate::uverbs::command::{AttrValue, Command};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use zerocopy::{FromBytes, IntoBytes};

type Result<T> = std::result::Result<T, Errno>;

fn value<'c>(command: &'c Command<'_>, id: u16) -> Option<&'c AttrValue<'c>> {
    // Reading the attribute needs only the shorter lifetime.
    command.attrs().find(|attr| attr.id == id).map(|attr| &attr.value)
}

/// An integer, or bytes of that size.
pub(super) fn int(command: &Command<'_>, id: u16) -> Option<u64> {
    match value(command, id)? {
        AttrValue::Int { value, .. } => Some(*value),
        AttrValue::In(bytes) => {
            let mut whole = [0; 8];
            whole.get_mut(..bytes.len())?.copy_from_slice(bytes);
            Some(u64::from_ne_bytes(whole))
        }
        _ => None,
    }
}

pub(super) fn u32(command: &Command<'_>, id: u16) -> Result<u32> {
    int(command, id).and_then(|value| u32::try_from(value).ok()).ok_or(Errno::INVAL)
}

pub(super) fn handle(command: &Command<'_>, id: u16) -> Option<u32> {
    match value(command, id)? {
        AttrValue::Handle(handle) | AttrValue::Destroy(handle) => Some(*handle),
        _ => None,
    }
}

pub(super) fn fd(command: &Command<'_>, id: u16) -> Option<i32> {
    match value(command, id)? {
        AttrValue::Fd(fd, _) => Some(*fd),
        _ => None,
    }
}

/// A struct that the command carries.
pub(super) fn input<T: FromBytes>(command: &Command<'_>, id: u16) -> Result<T> {
    match value(command, id) {
        Some(AttrValue::In(bytes)) => {
            T::read_from_prefix(bytes).map(|(input, _)| input).map_err(|_| Errno::INVAL)
        }
        _ => Err(Errno::INVAL),
    }
}

pub(super) fn has(command: &Command<'_>, id: u16) -> bool {
    value(command, id).is_some()
}

/// Room for an output, in bytes.
pub(super) fn room(command: &Command<'_>, id: u16) -> usize {
    match value(command, id) {
        Some(AttrValue::Out(bytes)) => bytes.len(),
        _ => 0,
    }
}

/// Outputs of a command, cut off after `limit` bytes each.
pub(super) struct Responses<'c, 'a> {
    pub(super) command: &'c mut Command<'a>,
    pub(super) limit: usize,
}

impl<'a> Responses<'_, 'a> {
    fn value(&mut self, id: u16) -> Option<&mut AttrValue<'a>> {
        let mut attrs = self.command.attrs_to_run().ok()?;
        attrs.find(|attr| attr.id == id).map(|attr| &mut attr.value)
    }

    pub(super) fn put<T: IntoBytes + zerocopy::Immutable>(&mut self, id: u16, response: &T) {
        self.put_bytes(id, response.as_bytes());
    }

    pub(super) fn put_bytes(&mut self, id: u16, response: &[u8]) {
        let limit = self.limit;
        let Some(AttrValue::Out(room)) = self.value(id) else { return };
        let length = response.len().min(room.len()).min(limit);
        room[..length].copy_from_slice(&response[..length]);
    }

    pub(super) fn made(&mut self, id: u16, handle: u32) -> Result<()> {
        match self.value(id) {
            Some(AttrValue::New(room)) => {
                *room = handle;
                Ok(())
            }
            _ => Err(Errno::INVAL),
        }
    }

    pub(super) fn made_fd(&mut self, id: u16, fd: OwnedFd) -> Result<()> {
        match self.value(id) {
            Some(AttrValue::NewFd(room)) => {
                *room = Some(fd);
                Ok(())
            }
            _ => Err(Errno::INVAL),
        }
    }
}
