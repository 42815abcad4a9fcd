//! Reading event files: one record at a time, with or without waiting.

use crate::error::{Error, Result};
use crate::platform::Platform;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// The outcome of a read of an event file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    Record,
    Empty,
}

/// Reads one record from a non-blocking event file.
pub(crate) fn read_record<T: FromBytes + IntoBytes>(
    verb: &'static str,
    fd: BorrowedFd<'_>,
    record: &mut T,
) -> Result<Read> {
    match read_some(verb, fd, record.as_mut_bytes())? {
        None => Ok(Read::Empty),
        Some(length) if length == size_of::<T>() => Ok(Read::Record),
        Some(length) => Err(Error::new(verb, Errno::PROTO).detail(format!(
            "the kernel answered {length} bytes in place of an event of {}",
            size_of::<T>()
        ))),
    }
}

/// As [`read_record`], for records of different lengths: the length of this one; `None` if there is none.
pub(crate) fn read_some(
    verb: &'static str,
    fd: BorrowedFd<'_>,
    to: &mut [u8],
) -> Result<Option<usize>> {
    loop {
        return match rustix::io::read(fd, &mut *to) {
            // A hosted kernel closed its end, where Linux answers `EIO` itself.
            Ok(0) => Err(Error::from_kernel(verb, Errno::IO)),
            Ok(length) => Ok(Some(length)),
            Err(Errno::AGAIN) => Ok(None),
            Err(Errno::INTR) => continue,
            Err(errno) => Err(Error::from_kernel(verb, errno)),
        };
    }
}

/// Waits until `next` finds something, at most for `timeout`.
pub(crate) fn wait_readable<T>(
    verb: &'static str,
    platform: &Platform,
    fd: BorrowedFd<'_>,
    timeout: Option<Duration>,
    mut next: impl FnMut() -> Result<Option<T>>,
) -> Result<Option<T>> {
    // A timeout that the clock cannot represent is as long as none.
    let deadline = platform.deadline(timeout);
    loop {
        if let Some(found) = next()? {
            return Ok(Some(found));
        }
        if deadline.is_some_and(|deadline| platform.now() >= deadline) {
            return Ok(None);
        }
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        platform.wait(&mut fds, deadline).map_err(|errno| Error::new(verb, errno))?;
    }
}
