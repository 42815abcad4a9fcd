//! The files of a scripted kernel: each is one end of a socket pair whose other end the test has.

use std::io;
#[cfg(not(miri))]
pub(super) use std::os::unix::net::UnixDatagram as Socket;

#[cfg(not(miri))]
pub(super) fn pair() -> io::Result<(Socket, Socket)> {
    Socket::pair()
}

/// Miri has no datagram sockets. A stream will do: readers ask for exactly one event.
#[cfg(miri)]
#[derive(Debug)]
pub(super) struct Socket(std::os::unix::net::UnixStream);

#[cfg(miri)]
pub(super) fn pair() -> io::Result<(Socket, Socket)> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    Ok((Socket(ours), Socket(theirs)))
}

#[cfg(miri)]
impl Socket {
    pub(super) fn send(&self, event: &[u8]) -> io::Result<()> {
        // The standard library would call `send`, which Miri does not support on a socket pair.
        let sent = rustix::io::write(&self.0, event)?;
        assert_eq!(sent, event.len());
        Ok(())
    }
}

#[cfg(miri)]
impl std::os::fd::AsRawFd for Socket {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(miri)]
impl std::os::fd::AsFd for Socket {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(miri)]
impl From<Socket> for std::os::fd::OwnedFd {
    fn from(socket: Socket) -> Self {
        socket.0.into()
    }
}
