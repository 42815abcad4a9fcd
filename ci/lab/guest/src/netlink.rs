//! Netlink requests of the two families that make links: routing and RDMA.
//!
//! A request is a fixed header and nested attributes, and the kernel answers each with an
//! acknowledgement. `link.rs` builds the requests.

use crate::Failure;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
    socket,
};
use std::os::fd::{AsRawFd, OwnedFd};

const HEADER: usize = 16;
const REQUEST_AND_ACK: u16 = 0x1 | 0x4;
/// Make the object that the request describes, and fail if it exists.
pub(crate) const CREATE: u16 = 0x400 | 0x200;
const ERROR: u16 = 2;
const NESTED: u16 = 0x8000;

/// A request under construction.
pub(crate) struct Request {
    bytes: Vec<u8>,
}

impl Request {
    /// A request of this type, whose family's own header is `fixed`.
    pub(crate) fn new(kind: u16, flags: u16, fixed: &[u8]) -> Self {
        let mut bytes = vec![0; HEADER];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(flags | REQUEST_AND_ACK).to_ne_bytes());
        bytes.extend_from_slice(fixed);
        let mut request = Self { bytes };
        request.pad();
        request
    }

    /// Adds an attribute.
    pub(crate) fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        let length = (4 + value.len()) as u16;
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.pad();
        self
    }

    /// Adds a text attribute with the terminating zero that the kernel expects.
    pub(crate) fn text(self, kind: u16, value: &str) -> Self {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.attribute(kind, &bytes)
    }

    /// Adds a number of 32 bits.
    pub(crate) fn number(self, kind: u16, value: u32) -> Self {
        self.attribute(kind, &value.to_ne_bytes())
    }

    /// Adds an attribute whose content `fill` adds.
    pub(crate) fn nested(mut self, kind: u16, fill: impl FnOnce(Self) -> Self) -> Self {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 4]);
        let mut filled = fill(self);
        let length = (filled.bytes.len() - start) as u16;
        filled.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        filled.bytes[start + 2..start + 4].copy_from_slice(&(kind | NESTED).to_ne_bytes());
        filled
    }

    /// Adds bytes that are no attribute: the header that some nested attributes begin with.
    pub(crate) fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self.pad();
        self
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        let length = self.bytes.len() as u32;
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes
    }
}

/// A socket of one netlink family.
pub(crate) struct Netlink {
    socket: OwnedFd,
}

impl Netlink {
    /// Opens the family's socket.
    pub(crate) fn open(family: SockProtocol) -> Result<Self, Failure> {
        let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, family)?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        Ok(Self { socket })
    }

    /// Sends a request and waits for its acknowledgement.
    pub(crate) fn call(&self, request: Request) -> Result<(), Errno> {
        send(self.socket.as_raw_fd(), &request.finish(), MsgFlags::empty())?;
        let mut answer = vec![0; 16 << 10];
        loop {
            let length = recv(self.socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
            if let Some(result) = acknowledgement(&answer[..length]) {
                return result;
            }
        }
    }
}

/// The result in an acknowledgement; `None` for a message that is none.
fn acknowledgement(message: &[u8]) -> Option<Result<(), Errno>> {
    let kind = u16::from_ne_bytes(message.get(4..6)?.try_into().ok()?);
    if kind != ERROR {
        return None;
    }
    let code = i32::from_ne_bytes(message.get(HEADER..HEADER + 4)?.try_into().ok()?);
    Some(if code == 0 { Ok(()) } else { Err(Errno::from_raw(-code)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_cover_nested_attributes_and_padding() {
        let bytes = Request::new(16, CREATE, &[0; 16])
            .text(3, "h0")
            .nested(18, |inner| inner.text(1, "veth"))
            .finish();
        assert_eq!(bytes.len(), 16 + 16 + 8 + 4 + 12);
        assert_eq!(bytes[..4], 56_u32.to_ne_bytes());
        assert_eq!(bytes[32..34], 7_u16.to_ne_bytes());
        assert_eq!(&bytes[36..40], b"h0\0\0");
        assert_eq!(bytes[40..42], 16_u16.to_ne_bytes());
        assert_eq!(bytes[42..44], (18 | NESTED).to_ne_bytes());
    }

    #[test]
    fn acknowledgements_carry_the_error() {
        let mut message = [0; 36];
        message[4] = ERROR as u8;
        assert_eq!(acknowledgement(&message), Some(Ok(())));
        message[16..20].copy_from_slice(&(-17_i32).to_ne_bytes());
        assert_eq!(acknowledgement(&message), Some(Err(Errno::EEXIST)));
        message[4] = 3;
        assert_eq!(acknowledgement(&message), None);
    }
}
