//! A netlink socket of the RDMA protocol: messages, dumps, acknowledgements and attributes. `nldev.rs` has
//! the requests.
//!
//! Every received byte is checked: a malformed answer is an error
//! (`EBADMSG`), never a panic.

use crate::error::{Error, Result};
use netlink_packet_core::{
    DefaultNla, DoneBuffer, Emitable, ErrorBuffer, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR,
    NLM_F_MULTIPART, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NLMSG_NOOP, NLMSG_OVERRUN,
    NetlinkBuffer, NetlinkHeader, NlasIterator,
};
use rustix::fd::OwnedFd;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, recvfrom, sendto,
    socket_with,
};
use uverbs_uapi::nldev::{RDMA_NL_GET_CLIENT, RDMA_NL_GET_TYPE, RDMA_NL_NLDEV};

/// Bytes of the longest datagram: the kernel fills a reader's buffer, but never more than these.
const LONGEST: usize = 32 << 10;

/// The number of attempts at a dump that the kernel calls inconsistent, or whose answers did not fit the socket.
const DUMP_ATTEMPTS: u32 = 8;

/// Requests in one datagram: their answers, of a page or two each, have to fit the socket.
const TOGETHER: usize = 16;

/// Carries datagrams to the kernel and back.
pub(super) trait NetlinkTransport {
    /// Sends one datagram.
    fn send(&mut self, datagram: &[u8]) -> rustix::io::Result<()>;
    /// Replaces `datagram` by the next one that the kernel sent.
    fn receive(&mut self, datagram: &mut Vec<u8>) -> rustix::io::Result<()>;
}

/// The netlink socket of the running kernel.
pub(super) struct NetlinkSocket(OwnedFd);

impl NetlinkSocket {
    /// Opens a socket. `EPROTONOSUPPORT` where the kernel has no RDMA.
    pub(super) fn open() -> rustix::io::Result<Self> {
        NetlinkSocket::of(Some(netlink::RDMA))
    }

    /// Opens a socket for addresses and network interfaces.
    pub(super) fn open_route() -> rustix::io::Result<Self> {
        NetlinkSocket::of(None)
    }

    /// `None` is the protocol 0, `NETLINK_ROUTE`.
    fn of(protocol: Option<Protocol>) -> rustix::io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let fd = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?;
        Ok(NetlinkSocket(fd))
    }
}

impl NetlinkTransport for NetlinkSocket {
    fn send(&mut self, datagram: &[u8]) -> rustix::io::Result<()> {
        let kernel = SocketAddrNetlink::new(0, 0);
        retry_on_intr(|| sendto(&self.0, datagram, SendFlags::empty(), &kernel))?;
        Ok(())
    }

    fn receive(&mut self, datagram: &mut Vec<u8>) -> rustix::io::Result<()> {
        loop {
            datagram.resize(LONGEST, 0);
            // The kernel answers within the send call, module loading included, and goes on with a
            // list when a part of it is read. If the answer is not there, the kernel dropped it
            // without an error, for example because its handler was interrupted.
            let flags = RecvFlags::TRUNC | RecvFlags::DONTWAIT;
            let (_, received, sender) =
                retry_on_intr(|| recvfrom(&self.0, &mut datagram[..], flags))?;
            if received > datagram.len() {
                return Err(Errno::MSGSIZE);
            }
            datagram.truncate(received);
            // Any process may send to this socket's address if it is privileged enough.
            let from_kernel = sender
                .and_then(|address| SocketAddrNetlink::try_from(address).ok())
                .is_some_and(|address| address.pid() == 0);
            if from_kernel {
                return Ok(());
            }
        }
    }
}

/// A request under construction: a command and its attributes.
pub(super) struct Request {
    kind: u16,
    attributes: Vec<u8>,
}

impl Request {
    /// A request for command `op` of the device client.
    pub(super) fn new(op: u16) -> Self {
        Request { kind: RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, op), attributes: Vec::new() }
    }

    /// A request of another protocol, with its header.
    pub(super) fn with_header(kind: u16, header: Vec<u8>) -> Self {
        Request { kind, attributes: header }
    }

    /// Adds a number.
    pub(super) fn number(self, kind: u16, value: u32) -> Self {
        self.attribute(kind, value.to_ne_bytes().to_vec())
    }

    /// Adds a string, which the kernel wants terminated.
    pub(super) fn string(self, kind: u16, value: &str) -> Self {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.attribute(kind, bytes)
    }

    /// Adds bytes, an address for example.
    pub(super) fn bytes(self, kind: u16, value: Vec<u8>) -> Self {
        self.attribute(kind, value)
    }

    fn attribute(mut self, kind: u16, value: Vec<u8>) -> Self {
        let attribute = DefaultNla::new(kind, value);
        let start = self.attributes.len();
        self.attributes.resize(start + attribute.buffer_len(), 0);
        attribute.emit(&mut self.attributes[start..]);
        self
    }

    pub(super) fn datagram(&self, flags: u16, sequence: u32) -> Vec<u8> {
        let mut header = NetlinkHeader::default();
        let length = header.buffer_len() + self.attributes.len();
        header.length = length as u32;
        header.message_type = self.kind;
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = sequence;
        let mut datagram = vec![0; header.buffer_len()];
        header.emit(&mut datagram);
        datagram.extend_from_slice(&self.attributes);
        datagram
    }
}

/// Asks the kernel and reads its answers. One question at a time.
pub(super) struct Client<W> {
    transport: W,
    verb: &'static str,
    sequence: u32,
    datagram: Vec<u8>,
}

impl Client<NetlinkSocket> {
    /// A client of the running kernel, on behalf of `verb`, which its errors will name.
    pub(super) fn open(verb: &'static str) -> Result<Self> {
        let socket = NetlinkSocket::open().map_err(|errno| {
            Error::from_kernel(verb, errno)
                .context(|| "no RDMA netlink socket can be opened".into())
        })?;
        Ok(Client::new(socket, verb))
    }
}

impl<W: NetlinkTransport> Client<W> {
    /// A client on `transport`, on behalf of `verb`.
    pub(super) fn new(transport: W, verb: &'static str) -> Self {
        Client { transport, verb, sequence: 0, datagram: Vec::new() }
    }

    /// Sends a request that has exactly one answer and reads it.
    pub(super) fn ask<T>(
        &mut self,
        request: &Request,
        mut read: impl FnMut(Attributes<'_>) -> std::result::Result<T, Malformed>,
    ) -> Result<T> {
        let mut answer = None;
        self.exchange(request, 0, &mut |attributes| {
            answer = Some(read(attributes)?);
            Ok(())
        })?;
        answer.ok_or_else(|| self.malformed(Malformed("an answer without content")))
    }

    /// Sends requests that have exactly one answer each, many in one datagram, and reads each request's answer.
    pub(super) fn ask_each<T>(
        &mut self,
        requests: &[Request],
        mut read: impl FnMut(Attributes<'_>) -> std::result::Result<T, Malformed>,
    ) -> Result<Vec<Result<T>>> {
        let mut answers = Vec::with_capacity(requests.len());
        for together in requests.chunks(TOGETHER) {
            self.ask_together(together, &mut read, &mut answers)?;
        }
        Ok(answers)
    }

    fn ask_together<T>(
        &mut self,
        requests: &[Request],
        read: &mut impl FnMut(Attributes<'_>) -> std::result::Result<T, Malformed>,
        answers: &mut Vec<Result<T>>,
    ) -> Result<()> {
        let verb = self.verb;
        let kernel = |errno| Error::from_kernel(verb, errno);
        let first = self.sequence.wrapping_add(1);
        let mut datagram = Vec::new();
        for request in requests {
            self.sequence = self.sequence.wrapping_add(1);
            // Attributes are padded, so that the next header is where it should be.
            datagram.extend(request.datagram(0, self.sequence));
        }
        self.transport.send(&datagram).map_err(kernel)?;
        let mut found: Vec<Option<Result<T>>> = requests.iter().map(|_| None).collect();
        while found.iter().any(Option::is_none) {
            match self.transport.receive(&mut datagram) {
                Ok(()) => {}
                Err(Errno::AGAIN) => return Err(silent(verb)),
                Err(errno) => return Err(kernel(errno)),
            }
            for message in Messages(&datagram) {
                let message = message.map_err(|what| self.malformed(what))?;
                let place = message.sequence.wrapping_sub(first) as usize;
                let Some(place @ None) = found.get_mut(place) else { continue };
                match message.body().map_err(|what| self.malformed(what))? {
                    MessageBody::Failure(errno) => *place = Some(Err(kernel(errno))),
                    MessageBody::Data(attributes) => {
                        let answer = read(attributes).map_err(|what| self.malformed(what))?;
                        *place = Some(Ok(answer));
                    }
                    MessageBody::Nothing
                    | MessageBody::Acknowledgement
                    | MessageBody::Lost
                    | MessageBody::End => {}
                }
            }
        }
        answers.extend(found.into_iter().flatten());
        Ok(())
    }

    /// Sends a request that has no answer but success or failure.
    pub(super) fn command(&mut self, request: &Request) -> Result<()> {
        self.exchange(request, NLM_F_ACK, &mut |_| Ok(()))?;
        Ok(())
    }

    /// Sends a request that any number of messages answer, and reads them all.
    pub(super) fn dump<T>(
        &mut self,
        request: &Request,
        mut read: impl FnMut(Attributes<'_>) -> std::result::Result<T, Malformed>,
    ) -> Result<Vec<T>> {
        for _ in 0..DUMP_ATTEMPTS {
            let mut answers = Vec::new();
            let consistent = self.exchange(request, NLM_F_DUMP, &mut |attributes| {
                answers.push(read(attributes)?);
                Ok(())
            })?;
            if consistent {
                return Ok(answers);
            }
        }
        Err(Error::new(self.verb, Errno::AGAIN)
            .detail(format!("the list changed during each of {DUMP_ATTEMPTS} readings")))
    }

    fn malformed(&self, what: Malformed) -> Error {
        Error::new(self.verb, Errno::BADMSG).detail(format!("RDMA netlink sent {}", what.0))
    }

    /// Sends a request and reads until its answer is complete. `false` if the kernel lost a part
    /// of the answer or says that the parts contradict each other.
    fn exchange(
        &mut self,
        request: &Request,
        flags: u16,
        read: &mut dyn FnMut(Attributes<'_>) -> std::result::Result<(), Malformed>,
    ) -> Result<bool> {
        // A fresh sequence number, so that messages left in the socket by an abandoned exchange are
        // not taken for an answer.
        self.sequence = self.sequence.wrapping_add(1);
        let verb = self.verb;
        let kernel = |errno| Error::from_kernel(verb, errno);
        self.transport.send(&request.datagram(flags, self.sequence)).map_err(kernel)?;

        let mut consistent = true;
        loop {
            let mut datagram = std::mem::take(&mut self.datagram);
            match self.transport.receive(&mut datagram) {
                Ok(()) => {}
                Err(Errno::NOBUFS) => {
                    consistent = false;
                    continue;
                }
                Err(Errno::AGAIN) => return Err(silent(verb)),
                Err(errno) => return Err(kernel(errno)),
            }
            for message in Messages(&datagram) {
                let message = message.map_err(|what| self.malformed(what))?;
                if message.sequence != self.sequence {
                    continue;
                }
                consistent &= message.flags & NLM_F_DUMP_INTR == 0;
                let finished = match message.body().map_err(|what| self.malformed(what))? {
                    MessageBody::Failure(errno) => return Err(kernel(errno)),
                    MessageBody::Nothing => false,
                    MessageBody::Lost => {
                        consistent = false;
                        false
                    }
                    MessageBody::Acknowledgement | MessageBody::End => true,
                    MessageBody::Data(attributes) => {
                        read(attributes).map_err(|what| self.malformed(what))?;
                        // An acknowledgement or an end is still to come where one was promised.
                        flags & NLM_F_ACK == 0 && message.flags & NLM_F_MULTIPART == 0
                    }
                };
                if finished {
                    return Ok(consistent);
                }
            }
            self.datagram = datagram;
        }
    }
}

fn silent(verb: &'static str) -> Error {
    Error::new(verb, Errno::TIMEDOUT).detail("RDMA netlink did not answer")
}

/// The fault of an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Malformed(pub(super) &'static str);

/// One message of a datagram.
pub(super) struct NetlinkMessage<'a> {
    pub(super) kind: u16,
    flags: u16,
    sequence: u32,
    pub(super) payload: &'a [u8],
}

enum MessageBody<'a> {
    Nothing,
    Acknowledgement,
    End,
    Lost,
    Failure(Errno),
    Data(Attributes<'a>),
}

impl<'a> NetlinkMessage<'a> {
    /// The error number, if the message says that the request failed.
    pub(super) fn failure(&self) -> std::result::Result<Option<Errno>, Malformed> {
        match self.body()? {
            MessageBody::Failure(errno) => Ok(Some(errno)),
            _ => Ok(None),
        }
    }

    fn body(&self) -> std::result::Result<MessageBody<'a>, Malformed> {
        Ok(match self.kind {
            NLMSG_NOOP => MessageBody::Nothing,
            NLMSG_OVERRUN => MessageBody::Lost,
            NLMSG_ERROR => {
                let error = ErrorBuffer::new_checked(self.payload)
                    .map_err(|_| Malformed("an error message without a number"))?;
                match error.code() {
                    None => MessageBody::Acknowledgement,
                    Some(code) => MessageBody::Failure(errno(code.get())?),
                }
            }
            // Old kernels end a dump without a status.
            NLMSG_DONE if self.payload.is_empty() => MessageBody::End,
            NLMSG_DONE => {
                let done = DoneBuffer::new_checked(self.payload)
                    .map_err(|_| Malformed("an end message without a number"))?;
                // A dump may end with the byte count of its last part, which is no failure.
                if done.code() < 0 {
                    MessageBody::Failure(errno(done.code())?)
                } else {
                    MessageBody::End
                }
            }
            kind if RDMA_NL_GET_CLIENT(kind) == RDMA_NL_NLDEV => {
                MessageBody::Data(Attributes(self.payload))
            }
            _ => MessageBody::Nothing,
        })
    }
}

/// The error that a negative status stands for.
fn errno(status: i32) -> std::result::Result<Errno, Malformed> {
    match status {
        -4095..=-1 => Ok(Errno::from_raw_os_error(-status)),
        _ => Err(Malformed("a status that is no error number")),
    }
}

/// The messages of a datagram, up to the first that does not fit.
pub(super) struct Messages<'a>(pub(super) &'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = std::result::Result<NetlinkMessage<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        let datagram = std::mem::take(&mut self.0);
        if datagram.is_empty() {
            return None;
        }
        let Ok(message) = NetlinkBuffer::new_checked(datagram) else {
            return Some(Err(Malformed("a message that is cut off")));
        };
        let length = message.length() as usize;
        // The last message of a datagram need not be padded.
        self.0 = datagram.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some(Ok(NetlinkMessage {
            kind: message.message_type(),
            flags: message.flags(),
            sequence: message.sequence_number(),
            payload: datagram.get(NetlinkHeader::default().buffer_len()..length).unwrap_or(&[]),
        }))
    }
}

/// A run of attributes: the content of a message or of a nest.
#[derive(Clone, Copy)]
pub(super) struct Attributes<'a>(pub(super) &'a [u8]);

impl<'a> Attributes<'a> {
    /// Each attribute's type, without flags, and value.
    pub(super) fn iter(
        self,
    ) -> impl Iterator<Item = std::result::Result<(u16, NetlinkValue<'a>), Malformed>> {
        NlasIterator::new(self.0).map(|attribute| {
            let attribute = attribute.map_err(|_| Malformed("an attribute that is cut off"))?;
            let (kind, length) = (attribute.kind(), usize::from(attribute.length()));
            let value = attribute.into_inner().get(4..length).unwrap_or(&[]);
            Ok((kind, NetlinkValue(value)))
        })
    }
}

/// The value of an attribute.
#[derive(Clone, Copy)]
pub(super) struct NetlinkValue<'a>(&'a [u8]);

impl<'a> NetlinkValue<'a> {
    /// A number of any width.
    pub(super) fn number(self) -> std::result::Result<u64, Malformed> {
        match *self.0 {
            [a] => Ok(u64::from(a)),
            [a, b] => Ok(u64::from(u16::from_ne_bytes([a, b]))),
            [a, b, c, d] => Ok(u64::from(u32::from_ne_bytes([a, b, c, d]))),
            [a, b, c, d, e, f, g, h] => Ok(u64::from_ne_bytes([a, b, c, d, e, f, g, h])),
            _ => Err(Malformed("a number of odd width")),
        }
    }

    /// A number that fits `T`.
    pub(super) fn narrow<T: TryFrom<u64>>(self) -> std::result::Result<T, Malformed> {
        T::try_from(self.number()?).map_err(|_| Malformed("a number out of range"))
    }

    /// A string, up to its terminator.
    pub(super) fn string(self) -> String {
        let text = self.0.split(|&byte| byte == 0).next().unwrap_or(&[]);
        String::from_utf8_lossy(text).into_owned()
    }

    /// The bytes themselves.
    pub(super) fn bytes(self) -> &'a [u8] {
        self.0
    }

    /// A nest.
    pub(super) fn nest(self) -> Attributes<'a> {
        Attributes(self.0)
    }
}

#[cfg(test)]
pub(super) mod tests;
