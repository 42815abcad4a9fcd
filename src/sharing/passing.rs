//! Files between processes, over a Unix socket. Pairs with `SCM_RIGHTS` of `unix(7)`.

use crate::error::{Error, Result};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::{Errno, IoSlice, IoSliceMut, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::mem::MaybeUninit;

/// The most files of one message.
pub const MAX_FILES: usize = 16;

const ROOM: usize = rustix::cmsg_space!(ScmRights(MAX_FILES));

/// The result of [`receive_files`].
#[derive(Debug)]
#[non_exhaustive]
pub struct ReceivedFiles {
    /// The number of bytes that arrived; 0 when the other end is closed.
    pub length: usize,
    /// The files, closed on exec.
    pub files: Vec<OwnedFd>,
}

/// Sends bytes and with them files over a Unix socket, so that another process gets duplicates of the
/// files: the file of [`Context::share`](crate::Context::share) and the envelopes that go with it, or the
/// node of a device that the other process cannot open. Returns how many of the bytes were sent; a stream
/// may take a part, and the files go with the first of them.
///
/// # Errors
///
/// `EINVAL` for no bytes, because a stream drops files without any, or for more than [`MAX_FILES`] files;
/// `EPIPE` when the other end is closed; `EAGAIN` when the socket's time limit is over, or it does not block
/// and is full.
pub fn send_files(socket: impl AsFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> Result<usize> {
    const VERB: &str = "send_files";
    if bytes.is_empty() {
        return Err(Error::invalid(VERB, "no bytes; files travel with at least one"));
    }
    let mut room = [MaybeUninit::uninit(); ROOM];
    let mut ancillary = SendAncillaryBuffer::new(&mut room);
    if files.len() > MAX_FILES
        || !files.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(files))
    {
        let detail = format!("{} files; a message takes up to {MAX_FILES}", files.len());
        return Err(Error::invalid(VERB, detail));
    }
    let slices = [IoSlice::new(bytes)];
    retry_on_intr(|| sendmsg(&socket, &slices, &mut ancillary, SendFlags::NOSIGNAL))
        .map_err(|errno| socket_failed(VERB, errno))
}

/// Receives bytes and the files that came with them from a Unix socket.
///
/// # Errors
///
/// `EMFILE` if files were lost, because this process may open no more (`RLIMIT_NOFILE`) or more than
/// [`MAX_FILES`] came; those that arrived are closed. `EAGAIN` when the socket's time limit is over, or it does
/// not block and nothing is there.
pub fn receive_files(socket: impl AsFd, bytes: &mut [u8]) -> Result<ReceivedFiles> {
    const VERB: &str = "receive_files";
    let mut room = [MaybeUninit::uninit(); ROOM];
    let mut ancillary = RecvAncillaryBuffer::new(&mut room);
    let mut slices = [IoSliceMut::new(bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = retry_on_intr(|| recvmsg(&socket, &mut slices, &mut ancillary, flags))
        .map_err(|errno| socket_failed(VERB, errno))?;
    let mut files = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            files.extend(more);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Error::new(VERB, Errno::MFILE).detail(format!(
            "files were lost: this process may open no more (RLIMIT_NOFILE), or more than {MAX_FILES} came"
        )));
    }
    Ok(ReceivedFiles { length: received.bytes, files })
}

fn socket_failed(verb: &'static str, errno: Errno) -> Error {
    Error::from_kernel(verb, errno).detail(match errno {
        Errno::AGAIN => "the socket's time limit is over, or it does not block",
        Errno::PIPE | Errno::CONNRESET => "the other end is closed",
        _ => "the socket failed",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    #[cfg_attr(miri, ignore = "it passes files")]
    fn files_arrive_with_the_bytes_and_are_closed_on_exec() {
        let (here, there) = UnixStream::pair().unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let mut reader = std::fs::File::from(reader);
        assert_eq!(send_files(&here, b"two", &[writer.as_fd(), writer.as_fd()]).unwrap(), 3);
        drop(writer);
        let mut bytes = [0; 8];
        let received = receive_files(&there, &mut bytes).unwrap();
        assert_eq!((received.length, received.files.len()), (3, 2));
        assert_eq!(&bytes[..3], b"two");
        for file in received.files {
            let flags = rustix::io::fcntl_getfd(&file).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
            std::fs::File::from(file).write_all(b"x").unwrap();
        }
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "xx");
        drop(here);
        assert_eq!(receive_files(&there, &mut bytes).unwrap().length, 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn messages_that_cannot_be_sent_are_refused() {
        let (here, there) = UnixStream::pair().unwrap();
        let many = vec![there.as_fd(); MAX_FILES + 1];
        assert!(send_files(&here, b"x", &many).unwrap_err().message().contains("17 files"));
        assert_eq!(send_files(&here, b"", &[]).unwrap_err().errno(), Errno::INVAL);
        drop(there);
        assert_eq!(send_files(&here, b"x", &[]).unwrap_err().errno(), Errno::PIPE);
    }
}
