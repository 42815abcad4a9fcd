//! Messages of vfio-user: parses a byte stream with file descriptors into requests.
//!
//! Pairs with [`super::session`], which answers them. Integers are in host order.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Length of a message header.
pub const HEADER: usize = 16;
/// The longest message accepted; QEMU sends at most 1 MiB of data in one.
pub const MAX_MESSAGE: usize = (1 << 20) + 4096;
/// The most file descriptors accepted with one message.
const MAX_FDS: usize = 64;

const REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// Commands of the protocol that the session answers.
#[allow(missing_docs, reason = "the protocol's own names")]
pub mod command {
    pub const VERSION: u16 = 1;
    pub const DMA_MAP: u16 = 2;
    pub const DMA_UNMAP: u16 = 3;
    pub const DEVICE_GET_INFO: u16 = 4;
    pub const DEVICE_GET_REGION_INFO: u16 = 5;
    pub const DEVICE_GET_IRQ_INFO: u16 = 7;
    pub const DEVICE_SET_IRQS: u16 = 8;
    pub const REGION_READ: u16 = 9;
    pub const REGION_WRITE: u16 = 10;
    pub const DEVICE_RESET: u16 = 13;
    pub const REGION_WRITE_MULTI: u16 = 15;
}

/// A request.
#[derive(Debug)]
pub struct VfioRequest {
    /// Chosen by the client and repeated in the reply.
    pub id: u16,
    /// One of [`command`].
    pub command: u16,
    /// Whether the client waits for a reply.
    pub wants_reply: bool,
    /// The bytes behind the header.
    pub body: Vec<u8>,
    /// File descriptors of the message.
    pub files: Vec<File>,
}

impl VfioRequest {
    /// A 32-bit number of the body; `None` if the body is too short.
    pub fn u32(&self, offset: usize) -> Option<u32> {
        let bytes = self.body.get(offset..offset.checked_add(4)?)?;
        Some(u32::from_ne_bytes(bytes.try_into().ok()?))
    }

    /// A 64-bit number of the body; `None` if the body is too short.
    pub fn u64(&self, offset: usize) -> Option<u64> {
        let bytes = self.body.get(offset..offset.checked_add(8)?)?;
        Some(u64::from_ne_bytes(bytes.try_into().ok()?))
    }
}

/// Free bytes in the buffer before each read.
const READ_SIZE: usize = 1 << 16;

/// The reason why a connection ends.
#[derive(Debug)]
pub enum StreamError {
    /// The client closed it.
    Closed,
    /// The socket failed.
    Io(io::Error),
    /// A message has this length, which is out of range.
    Length(usize),
}

/// One end of a connection.
pub struct Connection {
    stream: UnixStream,
    /// Received bytes. The buffer is kept between reads, since most messages have only a few bytes.
    buffer: Vec<u8>,
    /// End of the received bytes.
    filled: usize,
    /// End of the parsed bytes.
    start: usize,
    /// Position in the stream of `buffer[0]`.
    base: u64,
    /// File descriptors, each list with the stream position of the last byte received with it. A
    /// receive stops at the end of the write that carried descriptors, so that byte belongs to
    /// their message.
    files: VecDeque<(u64, Vec<File>)>,
}

impl Connection {
    /// Takes over a connected stream.
    pub fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            buffer: vec![0; READ_SIZE],
            filled: 0,
            start: 0,
            base: 0,
            files: VecDeque::new(),
        }
    }

    /// The socket, to wait on.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Reads the bytes that have arrived, without waiting; returns false if nothing had.
    ///
    /// # Errors
    /// [`StreamError`] if the connection is over.
    pub fn receive(&mut self) -> Result<bool, StreamError> {
        self.buffer.copy_within(self.start..self.filled, 0);
        self.base += self.start as u64;
        self.filled -= self.start;
        self.start = 0;
        if self.buffer.len() < self.filled + READ_SIZE {
            self.buffer.resize(self.filled + READ_SIZE, 0);
        }
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let result = recvmsg(
            &self.stream,
            &mut [IoSliceMut::new(&mut self.buffer[self.filled..])],
            &mut control,
            RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
        );
        let count = match &result {
            Ok(message) => message.bytes,
            Err(_) => 0,
        };
        self.filled += count;
        match result {
            Ok(_) if count == 0 => Err(StreamError::Closed),
            Ok(_) => {
                let mut files = Vec::new();
                for message in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(fds) = message {
                        files.extend(fds.map(|fd: OwnedFd| File::from(fd)));
                    }
                }
                if !files.is_empty() {
                    self.files.push_back((self.base + self.filled as u64 - 1, files));
                }
                Ok(true)
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(StreamError::Io(error.into())),
        }
    }

    /// The next whole request, if one has arrived.
    ///
    /// # Errors
    /// [`StreamError::Length`] for a length out of range.
    pub fn request(&mut self) -> Result<Option<VfioRequest>, StreamError> {
        let bytes = &self.buffer[self.start..self.filled];
        let Some(header) = bytes.first_chunk::<HEADER>() else { return Ok(None) };
        let half = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
        let word = |at: usize| {
            u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let size = word(4) as usize;
        if !(HEADER..=MAX_MESSAGE).contains(&size) {
            return Err(StreamError::Length(size));
        }
        let Some(message) = bytes.get(..size) else { return Ok(None) };
        let body = message[HEADER..].to_vec();
        let (id, command, flags) = (half(0), half(2), word(8));
        self.start += size;
        let end = self.base + self.start as u64;
        let mut files = Vec::new();
        while let Some((at, _)) = self.files.front()
            && *at < end
        {
            files.extend(self.files.pop_front().into_iter().flat_map(|(_, files)| files));
        }
        Ok(Some(VfioRequest { id, command, wants_reply: flags & NO_REPLY == 0, body, files }))
    }

    /// Sends a reply; `Err` carries an errno.
    ///
    /// # Errors
    /// The error of the socket.
    pub fn reply(
        &mut self,
        request: &VfioRequest,
        result: Result<&[u8], u32>,
        fd: Option<&File>,
    ) -> io::Result<()> {
        let (body, errno) = match result {
            Ok(body) => (body, 0),
            Err(errno) => (&[][..], errno),
        };
        let mut message = Vec::with_capacity(HEADER + body.len());
        message.extend(request.id.to_ne_bytes());
        message.extend(request.command.to_ne_bytes());
        message.extend(((HEADER + body.len()) as u32).to_ne_bytes());
        message.extend((REPLY | if errno == 0 { 0 } else { ERROR }).to_ne_bytes());
        message.extend(errno.to_ne_bytes());
        message.extend(body);
        let mut sent = 0;
        while sent < message.len() {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds: Vec<_> = fd.iter().map(std::os::fd::AsFd::as_fd).collect();
            if sent == 0 && !fds.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(&fds));
            }
            let part = [IoSlice::new(&message[sent..])];
            sent += sendmsg(&self.stream, &part, &mut control, SendFlags::NOSIGNAL)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn message(id: u16, flags: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(id.to_ne_bytes());
        bytes.extend(command::REGION_WRITE.to_ne_bytes());
        bytes.extend(((HEADER + body.len()) as u32).to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend(0u32.to_ne_bytes());
        bytes.extend(body);
        bytes
    }

    #[test]
    fn requests_are_parsed_from_any_split_of_the_stream() {
        let (mut client, server) = UnixStream::pair().unwrap();
        let mut connection = Connection::new(server);
        let mut bytes = message(1, 0, b"abc");
        bytes.extend(message(2, NO_REPLY, b""));
        let mut seen = Vec::new();
        for byte in &bytes {
            client.write_all(&[*byte]).unwrap();
            assert!(connection.receive().unwrap());
            while let Some(request) = connection.request().unwrap() {
                seen.push((request.id, request.wants_reply, request.body));
            }
        }
        assert_eq!(seen, [(1, true, b"abc".to_vec()), (2, false, vec![])]);
        assert!(!connection.receive().unwrap());
        drop(client);
        assert!(matches!(connection.receive(), Err(StreamError::Closed)));
    }

    #[test]
    fn file_descriptors_stay_with_their_message() {
        let (client, server) = UnixStream::pair().unwrap();
        let mut sender = Connection::new(client);
        let mut connection = Connection::new(server);
        let file = File::open("/dev/null").unwrap();
        let as_request = |id| VfioRequest {
            id,
            command: command::DMA_MAP,
            wants_reply: true,
            body: vec![],
            files: vec![],
        };
        for id in 0..4 {
            let fd = (id % 2 == 1).then_some(&file);
            sender.reply(&as_request(id), Ok(&[0; 5]), fd).unwrap();
        }
        while connection.receive().unwrap() {}
        for id in 0..4 {
            let request = connection.request().unwrap().unwrap();
            assert_eq!((request.id, request.files.len()), (id, usize::from(id % 2)));
        }
    }

    #[test]
    fn a_message_length_out_of_range_ends_the_connection() {
        for size in [0u32, 15, MAX_MESSAGE as u32 + 1, u32::MAX] {
            let (mut client, server) = UnixStream::pair().unwrap();
            let mut connection = Connection::new(server);
            let mut bytes = message(1, 0, b"");
            bytes[4..8].copy_from_slice(&size.to_ne_bytes());
            client.write_all(&bytes).unwrap();
            connection.receive().unwrap();
            assert!(matches!(connection.request(), Err(StreamError::Length(_))));
        }
    }
}
