//! The header and the offloads of a raw packet.

/// The header of a raw packet, and the checksums that the device fills in; for
/// [`SendWr::packet`](crate::SendWr::packet).
///
/// ```
/// # use uverbs::{Lkey, Packet, SendWr, Sge};
/// # let (to, from) = ([0; 6], [0; 6]);
/// # let sges = [Sge { addr: 0x1000, length: 64, lkey: Lkey(7) }];
/// let mut ethernet = [0; 14];
/// ethernet[..6].copy_from_slice(&to);
/// ethernet[6..12].copy_from_slice(&from);
/// ethernet[12..].copy_from_slice(&[0x08, 0x00]);
/// let wr = SendWr::packet(Packet::new().header(&ethernet).ip_checksum(), &sges);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Packet {
    header: [u8; Packet::MAX_HEADER],
    /// Bytes of the header. A header longer than `MAX_HEADER` is refused when the request is pushed.
    length: u8,
    pub(crate) checksums: bool,
}

impl Packet {
    /// The longest header that a request takes: that of Ethernet with a VLAN tag.
    pub const MAX_HEADER: usize = 18;

    /// A packet without header and offloads.
    pub fn new() -> Self {
        Packet::default()
    }

    /// The first bytes of the packet, [`MAX_HEADER`](Self::MAX_HEADER) at most, copied now; the
    /// data of the request follows them.
    ///
    /// Some devices, ConnectX-4 for one, require the first 18 bytes of every packet in the request
    /// itself: there, packets whose data is in registered memory need a header of this length.
    #[inline]
    pub fn header(mut self, bytes: &[u8]) -> Self {
        self.length = bytes.len().min(u8::MAX.into()) as u8;
        self.header = [0; Packet::MAX_HEADER];
        for (place, byte) in self.header.iter_mut().zip(bytes) {
            *place = *byte;
        }
        self
    }

    /// Lets the device fill in the checksums of the IPv4 header and of the TCP or UDP header,
    /// where [`RawPacketCaps::IP_CSUM`](crate::RawPacketCaps::IP_CSUM) says that it can.
    #[doc(alias = "IBV_SEND_IP_CSUM")]
    #[inline]
    pub fn ip_checksum(mut self) -> Self {
        self.checksums = true;
        self
    }

    /// The header; `None` if it is too long.
    pub(crate) fn head(&self) -> Option<&[u8]> {
        self.header.get(..self.length.into())
    }
}
