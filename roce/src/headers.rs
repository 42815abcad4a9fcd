//! Headers of the transport: the BTH and the extended headers behind it. `docs/TRANSPORT.md` draws them.
//!
//! From the kernel's `rxe_hdr.h` (`struct rxe_bth` to `struct rxe_ieth`, and their masks); the order of FETH and RETH
//! from the entry of `IB_OPCODE_RC_FLUSH` in `rxe_opcode.c`, the XRCETH from the XRC patches for rxe.

use crate::mistake::Mistake;
use crate::opcodes::{Headers, Opcode};
use crate::psn::Psn;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

macro_rules! headers {
    ($(
        $(#[$doc:meta])*
        struct $name:ident[$size:literal] { $( $(#[$field_doc:meta])* $field:ident: $type:ty, )* }
    )*) => {
        $(
            $(#[$doc])*
            #[derive(
                FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy, Debug, PartialEq, Eq, Default,
            )]
            #[repr(C)]
            pub struct $name { $( $(#[$field_doc])* pub $field: $type, )* }

            const _: () = assert!(size_of::<$name>() == $size);
        )*
    };
}

headers! {
    /// BTH, the base transport header of each packet.
    struct Bth[12] {
        /// Transport and operation: [`Opcode`].
        opcode: u8,
        /// Solicited event, migration state, bytes of padding, version of the transport.
        flags: u8,
        /// Partition key.
        pkey: U16,
        /// FECN, BECN, 6 reserved bits, destination QPN.
        destination: U32,
        /// AckReq, 7 reserved bits, PSN.
        sequence: U32,
    }

    /// XRCETH: the SRQ of an XRC request.
    struct XrcEth[4] {
        /// 8 reserved bits, SRQN.
        srq: U32,
    }

    /// DETH, the datagram header.
    struct Deth[8] {
        /// Q_Key.
        qkey: U32,
        /// 8 reserved bits, source QPN.
        source: U32,
    }

    /// FETH, the header of a flush.
    struct Feth[4] {
        /// 26 reserved bits, selectivity level (2), placement type (4).
        bits: U32,
    }

    /// RETH, the header of RDMA.
    struct Reth[16] {
        /// Remote address.
        address: U64,
        /// Remote key.
        key: U32,
        /// Bytes of the whole message.
        length: U32,
    }

    /// AtomicETH, the header of an atomic.
    struct AtomicEth[28] {
        /// Remote address.
        address: U64,
        /// Remote key.
        key: U32,
        /// Operand: the value to swap in, or to add.
        swap_or_add: U64,
        /// Operand: the value to compare with.
        compare: U64,
    }

    /// MaskedETH, the header of an atomic with masks or of another size than eight bytes.
    ///
    /// This header and its opcodes are private: no document says how a ConnectX sends masked atomics. They are for
    /// devices of one fabric, and must not reach foreign ones.
    struct MaskedEth[48] {
        /// Remote address.
        address: U64,
        /// Remote key.
        key: U32,
        /// Bytes.
        length: U32,
        /// Operand: the value to swap in, or to add.
        swap_or_add: U64,
        /// Operand: the bits to swap, or the last bits of fields that are added by themselves.
        swap_mask: U64,
        /// Operand: the value to compare with.
        compare: U64,
        /// Operand: the bits to compare.
        compare_mask: U64,
    }

    /// AETH, the header of an acknowledgement.
    struct Aeth[4] {
        /// Syndrome (8), MSN (24).
        bits: U32,
    }

    /// AtomicAckETH: the response to an atomic.
    struct AtomicAckEth[8] {
        /// The value that was in memory before.
        old: U64,
    }

    /// ImmDt: immediate data.
    struct ImmDt[4] {
        /// The data.
        data: U32,
    }

    /// IETH: the key that a send invalidates.
    struct Ieth[4] {
        /// The key.
        key: U32,
    }
}

const SOLICITED: u8 = 0x80;
const MIGRATED: u8 = 0x40;
const PAD_SHIFT: u8 = 4;
/// Payloads are padded to a multiple of it.
pub(crate) const PAYLOAD_WORD: u32 = 4;
const VERSION: u8 = 0x0f;
const ACK_REQUEST: u32 = 1 << 31;
const QPN: u32 = 0xff_ffff;

impl Bth {
    /// The header of a packet without padding, which [`PacketBuffer::finish`] adds.
    pub fn new(opcode: Opcode, pkey: u16, destination: u32, psn: Psn) -> Bth {
        Bth {
            opcode: opcode.to_byte(),
            // Migration is not modelled: a queue pair has one path, which is the migrated state.
            flags: MIGRATED,
            pkey: pkey.into(),
            destination: (destination & QPN).into(),
            sequence: psn.get().into(),
        }
    }

    /// Destination QPN.
    pub fn destination(&self) -> u32 {
        self.destination.get() & QPN
    }

    /// PSN.
    pub fn psn(&self) -> Psn {
        Psn::new(self.sequence.get())
    }

    /// Gives a packet the PSN of the one that is so many behind it in its [unit](Packet::packets).
    pub fn skip(packet: &mut [u8], packets: u32) {
        if let Ok((bth, _)) = Bth::mut_from_prefix(packet) {
            let flags = bth.sequence.get() & !Psn::MASK;
            bth.sequence = (flags | bth.psn().plus(packets).get()).into();
        }
    }

    /// Whether the requester asks for an acknowledgement of this packet.
    pub fn requests_ack(&self) -> bool {
        self.sequence.get() & ACK_REQUEST != 0
    }

    /// Asks for an acknowledgement.
    pub fn request_ack(&mut self) {
        self.sequence = (self.sequence.get() | ACK_REQUEST).into();
    }

    /// Whether the receiver's completion is solicited.
    pub fn is_solicited(&self) -> bool {
        self.flags & SOLICITED != 0
    }

    /// Asks for a solicited completion.
    pub fn solicit(&mut self) {
        self.flags |= SOLICITED;
    }

    /// Bytes behind the payload that fill the last four.
    pub fn padding(&self) -> usize {
        usize::from(self.flags >> PAD_SHIFT & 3)
    }

    fn pad(&mut self, bytes: usize) {
        self.flags = self.flags & !(3 << PAD_SHIFT) | (bytes as u8 & 3) << PAD_SHIFT;
    }
}

impl XrcEth {
    /// The header with an SRQN.
    pub fn new(srq: u32) -> XrcEth {
        XrcEth { srq: (srq & QPN).into() }
    }

    /// The SRQN.
    pub fn srq(&self) -> u32 {
        self.srq.get() & QPN
    }
}

impl Deth {
    /// The header with a Q_Key and a source QPN.
    pub fn new(qkey: u32, source: u32) -> Deth {
        Deth { qkey: qkey.into(), source: (source & QPN).into() }
    }

    /// Source QPN.
    pub fn source(&self) -> u32 {
        self.source.get() & QPN
    }
}

/// Syndrome of an [`Aeth`]: the upper three bits choose, the lower five tell more.
///
/// From `enum aeth_syndrome` of `rxe_hdr.h`. Credits are not modelled: an ACK tells that there is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syndrome {
    /// ACK: everything up to this packet was received.
    Ack,
    /// No receive was posted: the request may be repeated after this code of an RNR timer.
    RnrNak(u8),
    /// NAK: a packet is missing, and the PSN is that of the packet expected.
    SequenceError,
    /// NAK: invalid request.
    InvalidRequest,
    /// NAK: remote access error.
    AccessError,
    /// NAK: remote operational error.
    OperationalError,
    /// NAK: invalid RD request. Only the transport RD, which nobody has, sends it.
    InvalidRd,
}

impl Syndrome {
    const NO_CREDIT_LIMIT: u8 = 0x1f;
    const RNR: u8 = 0x20;
    const NAK: u8 = 0x60;

    /// Takes a syndrome apart; `None` if it is reserved.
    pub fn from_byte(byte: u8) -> Option<Syndrome> {
        Some(match byte & 0xe0 {
            0 => Syndrome::Ack,
            Self::RNR => Syndrome::RnrNak(byte & 0x1f),
            Self::NAK => match byte & 0x1f {
                0 => Syndrome::SequenceError,
                1 => Syndrome::InvalidRequest,
                2 => Syndrome::AccessError,
                3 => Syndrome::OperationalError,
                4 => Syndrome::InvalidRd,
                _ => return None,
            },
            _ => return None,
        })
    }

    /// The byte in the AETH.
    pub fn to_byte(self) -> u8 {
        match self {
            Syndrome::Ack => Self::NO_CREDIT_LIMIT,
            Syndrome::RnrNak(timer) => Self::RNR | timer & 0x1f,
            Syndrome::SequenceError => Self::NAK,
            Syndrome::InvalidRequest => Self::NAK | 1,
            Syndrome::AccessError => Self::NAK | 2,
            Syndrome::OperationalError => Self::NAK | 3,
            Syndrome::InvalidRd => Self::NAK | 4,
        }
    }
}

impl Aeth {
    /// The header with a syndrome and a message sequence number.
    pub fn new(syndrome: Syndrome, msn: u32) -> Aeth {
        Aeth { bits: (u32::from(syndrome.to_byte()) << 24 | msn & Psn::MASK).into() }
    }

    /// The syndrome; `None` if it is reserved.
    pub fn syndrome(&self) -> Option<Syndrome> {
        Syndrome::from_byte((self.bits.get() >> 24) as u8)
    }

    /// The message sequence number: how many messages the responder has completed.
    pub fn msn(&self) -> u32 {
        self.bits.get() & Psn::MASK
    }
}

impl Feth {
    /// The header of a flush of this type at this level.
    pub fn new(kind: u8, level: u8) -> Feth {
        Feth { bits: (u32::from(level & 3) << 4 | u32::from(kind & 0xf)).into() }
    }

    /// Placement type: bit 0 global visibility, bit 1 persistence.
    pub fn kind(&self) -> u8 {
        (self.bits.get() & 0xf) as u8
    }

    /// Selectivity level: 0 a range, 1 a memory region.
    pub fn level(&self) -> u8 {
        (self.bits.get() >> 4 & 3) as u8
    }
}

/// A packet from its BTH to its last byte of padding, without ICRC, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// The opcode of the BTH.
    pub opcode: Opcode,
    /// BTH.
    pub bth: &'a Bth,
    /// XRCETH.
    pub xrceth: Option<&'a XrcEth>,
    /// DETH.
    pub deth: Option<&'a Deth>,
    /// FETH.
    pub feth: Option<&'a Feth>,
    /// RETH.
    pub reth: Option<&'a Reth>,
    /// AtomicETH.
    pub atomiceth: Option<&'a AtomicEth>,
    /// MaskedETH.
    pub maskedeth: Option<&'a MaskedEth>,
    /// AETH.
    pub aeth: Option<&'a Aeth>,
    /// AtomicAckETH.
    pub atomicacketh: Option<&'a AtomicAckEth>,
    /// ImmDt.
    pub immdt: Option<&'a ImmDt>,
    /// IETH.
    pub ieth: Option<&'a Ieth>,
    /// The data, without padding.
    pub payload: &'a [u8],
    /// 1, or the number of middle packets of a message that this stands for: a *unit*. Its headers are those of the
    /// first one, and its payload is that of all.
    pub packets: u32,
}

/// Why bytes are no packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Malformed {
    /// There are too few bytes for the headers or the padding.
    Truncated,
    /// The version of the transport is not 0.
    Version(u8),
    /// No packet of these transports has the opcode.
    Opcode(u8),
    /// The packet does not end after a multiple of four bytes.
    Unpadded(usize),
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Malformed::Truncated => write!(f, "the packet is shorter than its headers"),
            Malformed::Version(version) => write!(f, "the transport has version {version}, not 0"),
            Malformed::Opcode(opcode) => {
                write!(f, "no packet of RC, UC, UD or XRC has opcode {opcode:#x}")
            }
            Malformed::Unpadded(bytes) => {
                write!(f, "the packet has {bytes} bytes, which is no multiple of 4")
            }
        }
    }
}

impl core::error::Error for Malformed {}

impl<'a> Packet<'a> {
    /// Takes a packet apart.
    ///
    /// # Errors
    ///
    /// The bytes are none. The checks are those of `rxe_rcv` and `hdr_check` in `rxe_recv.c`.
    pub fn parse(bytes: &'a [u8]) -> Result<Packet<'a>, Malformed> {
        let mut rest = bytes;
        let bth: &Bth = take(&mut rest, true)?.ok_or(Malformed::Truncated)?;
        if bth.flags & VERSION != 0 {
            return Err(Malformed::Version(bth.flags & VERSION));
        }
        let (opcode, headers) =
            Opcode::with_headers(bth.opcode).ok_or(Malformed::Opcode(bth.opcode))?;
        let mut packet = Packet {
            opcode,
            bth,
            xrceth: take(&mut rest, headers.contains(Headers::XRCETH))?,
            deth: take(&mut rest, headers.contains(Headers::DETH))?,
            feth: take(&mut rest, headers.contains(Headers::FETH))?,
            reth: take(&mut rest, headers.contains(Headers::RETH))?,
            atomiceth: take(&mut rest, headers.contains(Headers::ATOMICETH))?,
            maskedeth: take(&mut rest, headers.contains(Headers::MASKEDETH))?,
            aeth: take(&mut rest, headers.contains(Headers::AETH))?,
            atomicacketh: take(&mut rest, headers.contains(Headers::ATOMICACKETH))?,
            immdt: take(&mut rest, headers.contains(Headers::IMMDT))?,
            ieth: take(&mut rest, headers.contains(Headers::IETH))?,
            payload: &[],
            packets: 1,
        };
        if rest.len() % PAYLOAD_WORD as usize != 0 {
            return Err(Malformed::Unpadded(bytes.len()));
        }
        let padding = if Mistake::Padding.is_planted() { 0 } else { bth.padding() };
        let payload = rest.len().checked_sub(padding).ok_or(Malformed::Truncated)?;
        packet.payload = &rest[..payload];
        Ok(packet)
    }
}

/// Takes a header off the front, if the packet has it.
fn take<'a, T: FromBytes + KnownLayout + Immutable + Unaligned>(
    rest: &mut &'a [u8],
    there: bool,
) -> Result<Option<&'a T>, Malformed> {
    if !there {
        return Ok(None);
    }
    let (header, behind) = T::ref_from_prefix(rest).map_err(|_| Malformed::Truncated)?;
    *rest = behind;
    Ok(Some(header))
}

/// The most bytes of a packet without ICRC: BTH, XRCETH, MaskedETH or a shorter header, and 4096 of payload.
pub const MAX_PACKET: usize = 12 + 4 + 48 + 4096;

/// A packet that is put together: BTH, extended headers in the order of [`Headers`], payload.
#[derive(Debug)]
pub struct PacketBuffer {
    bytes: Vec<u8>,
    length: usize,
    payload: usize,
}

impl Default for PacketBuffer {
    fn default() -> PacketBuffer {
        PacketBuffer { bytes: vec![0; MAX_PACKET], length: 0, payload: 0 }
    }
}

impl PacketBuffer {
    /// Begins a packet in place of the last one.
    pub fn begin(&mut self, bth: &Bth) {
        self.length = 0;
        self.payload = 0;
        self.header(bth);
    }

    /// Adds a header.
    pub fn header(&mut self, header: &(impl IntoBytes + Immutable)) {
        let end = self.length + size_of_val(header);
        if let Some(place) = self.bytes.get_mut(self.length..end) {
            place.copy_from_slice(header.as_bytes());
            self.length = end;
        }
    }

    /// Makes room for so many bytes of payload, which are to be written. There is room for 4096.
    pub fn payload(&mut self, bytes: usize) -> &mut [u8] {
        let begin = self.length;
        self.payload = bytes.min(self.bytes.len() - begin);
        self.length = begin + self.payload;
        &mut self.bytes[begin..self.length]
    }

    /// Adds the padding, and ends the packet.
    pub fn finish(&mut self) -> &[u8] {
        let padding = self.payload.next_multiple_of(PAYLOAD_WORD as usize) - self.payload;
        let end = (self.length + padding).min(self.bytes.len());
        self.bytes[self.length..end].fill(0);
        if let Ok((bth, _)) = Bth::mut_from_prefix(&mut self.bytes) {
            bth.pad(padding);
        }
        self.length = end;
        &self.bytes[..end]
    }
}
