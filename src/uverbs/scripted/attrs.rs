//! Reads the attributes of a command the way the kernel does, and fills in its outputs.

use crate::uverbs::command::Command;
use rustix::io::Errno;
use std::os::fd::{IntoRawFd, OwnedFd};
use zerocopy::{FromBytes, IntoBytes};

type Result<T> = std::result::Result<T, Errno>;

/// An integer, or bytes of that size.
pub(super) fn int(command: &Command<'_>, id: u16) -> Option<u64> {
    match *command.bytes(id)? {
        [] => None,
        [a, b, c, d] => Some(u32::from_ne_bytes([a, b, c, d]).into()),
        ref bytes => {
            let mut whole = [0; 8];
            whole.get_mut(..bytes.len())?.copy_from_slice(bytes);
            Some(u64::from_ne_bytes(whole))
        }
    }
}

pub(super) fn u32(command: &Command<'_>, id: u16) -> Result<u32> {
    int(command, id).and_then(|value| u32::try_from(value).ok()).ok_or(Errno::INVAL)
}

pub(super) fn handle(command: &Command<'_>, id: u16) -> Option<u32> {
    command.number(id).map(|handle| handle as u32)
}

pub(super) fn fd(command: &Command<'_>, id: u16) -> Option<i32> {
    command.number(id).map(|fd| fd as i32)
}

/// A struct that the command carries.
pub(super) fn input<T: FromBytes>(command: &Command<'_>, id: u16) -> Result<T> {
    let bytes = command.bytes(id).ok_or(Errno::INVAL)?;
    T::read_from_prefix(bytes).map(|(input, _)| input).map_err(|_| Errno::INVAL)
}

pub(super) fn has(command: &Command<'_>, id: u16) -> bool {
    command.has(id)
}

/// Room for an output, in bytes.
pub(super) fn room(command: &Command<'_>, id: u16) -> usize {
    command.room(id)
}

/// Outputs of a command, cut off after `limit` bytes each.
pub(super) struct Responses<'c, 'a> {
    pub(super) command: &'c mut Command<'a>,
    pub(super) limit: usize,
}

impl Responses<'_, '_> {
    pub(super) fn put<T: IntoBytes + zerocopy::Immutable>(&mut self, id: u16, response: &T) {
        self.put_bytes(id, response.as_bytes());
    }

    pub(super) fn put_bytes(&mut self, id: u16, response: &[u8]) {
        let limit = self.limit;
        let Some(room) = self.command.output_room(id) else { return };
        let length = response.len().min(room.len()).min(limit);
        room[..length].copy_from_slice(&response[..length]);
    }

    pub(super) fn made(&mut self, id: u16, handle: u32) -> Result<()> {
        self.command.make(id, handle.into())
    }

    pub(super) fn made_fd(&mut self, id: u16, fd: OwnedFd) -> Result<()> {
        self.command.make(id, fd.into_raw_fd() as u64)
    }
}
