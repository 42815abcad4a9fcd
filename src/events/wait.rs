//! Reading event files: one record at a time, with or without waiting.

use crate::error::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};
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
    loop {
        return match rustix::io::read(fd, record.as_mut_bytes()) {
            Ok(length) if length == size_of::<T>() => Ok(Read::Record),
            Ok(length) => Err(Error::new(verb, Errno::PROTO).detail(format!(
                "the kernel answered {length} bytes in place of an event of {}",
                size_of::<T>()
            ))),
            Err(Errno::AGAIN) => Ok(Read::Empty),
            Err(Errno::INTR) => continue,
            Err(errno) => Err(Error::from_kernel(verb, errno)),
        };
    }
}

/// Waits until `next` finds something, at most for `timeout`.
pub(crate) fn wait_readable<T>(
    verb: &'static str,
    fd: BorrowedFd<'_>,
    timeout: Option<Duration>,
    mut next: impl FnMut() -> Result<Option<T>>,
) -> Result<Option<T>> {
    // A timeout that the clock cannot represent is as long as none.
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        if let Some(found) = next()? {
            return Ok(Some(found));
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Ok(None);
        }
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        match rustix::event::poll(&mut fds, left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::new(verb, errno)),
        }
    }
}
