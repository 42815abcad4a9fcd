//! Opcodes of packets: the transport in the upper three bits, the operation in the lower five.
//!
//! From the enumerators `IB_OPCODE_*` of the kernel's `include/rdma/ib_pack.h`, and for the headers of each opcode
//! from the table `rxe_opcode` of `rxe_opcode.c`. The transport XRC is not in that header; its value 0xa0 and its
//! header XRCETH are from the XRC patches for rxe (linux-rdma, 2022), where each request has an XRCETH behind the BTH
//! and responses have none.

use bitflags::bitflags;

/// A transport service, as the opcode tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Extended reliable connection: RC whose requests name the SRQ.
    Xrc,
}

impl Transport {
    /// The upper three bits of the opcode.
    pub const fn bits(self) -> u8 {
        match self {
            Transport::Rc => 0x00,
            Transport::Uc => 0x20,
            Transport::Ud => 0x60,
            Transport::Xrc => 0xa0,
        }
    }

    /// Whether packets are acknowledged.
    pub const fn is_reliable(self) -> bool {
        matches!(self, Transport::Rc | Transport::Xrc)
    }
}

macro_rules! operations {
    ($( $(#[$doc:meta])* $name:ident = $bits:literal, )*) => {
        /// The operation of a packet: the lower five bits of its opcode.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Operation {
            $( $(#[$doc])* $name = $bits, )*
        }

        impl Operation {
            const fn from_bits(bits: u8) -> Option<Operation> {
                match bits {
                    $( $bits => Some(Operation::$name), )*
                    _ => None,
                }
            }
        }
    };
}

operations! {
    /// First packet of a send.
    SendFirst = 0x00,
    /// Packet of a send between the first and the last one.
    SendMiddle = 0x01,
    /// Last packet of a send.
    SendLast = 0x02,
    /// Last packet of a send with immediate data.
    SendLastImmediate = 0x03,
    /// The packet of a send that fits in one.
    SendOnly = 0x04,
    /// The packet of a send with immediate data that fits in one.
    SendOnlyImmediate = 0x05,
    /// First packet of an RDMA write.
    WriteFirst = 0x06,
    /// Packet of an RDMA write between the first and the last one.
    WriteMiddle = 0x07,
    /// Last packet of an RDMA write.
    WriteLast = 0x08,
    /// Last packet of an RDMA write with immediate data.
    WriteLastImmediate = 0x09,
    /// The packet of an RDMA write that fits in one.
    WriteOnly = 0x0a,
    /// The packet of an RDMA write with immediate data that fits in one.
    WriteOnlyImmediate = 0x0b,
    /// Request of an RDMA read.
    ReadRequest = 0x0c,
    /// First packet of the response to an RDMA read.
    ReadResponseFirst = 0x0d,
    /// Packet of the response to an RDMA read between the first and the last one.
    ReadResponseMiddle = 0x0e,
    /// Last packet of the response to an RDMA read.
    ReadResponseLast = 0x0f,
    /// Response to an RDMA read that fits in one packet; without data also to a flush and an atomic write.
    ReadResponseOnly = 0x10,
    /// ACK or NAK.
    Acknowledge = 0x11,
    /// Response to an atomic.
    AtomicAcknowledge = 0x12,
    /// Request of a compare and swap.
    CompareSwap = 0x13,
    /// Request of a fetch and add.
    FetchAdd = 0x14,
    /// Last packet of a send that invalidates a key.
    SendLastInvalidate = 0x16,
    /// The packet of a send that invalidates a key and fits in one.
    SendOnlyInvalidate = 0x17,
    /// Request of a masked compare and swap. Private: see [`MaskedEth`](crate::headers::MaskedEth).
    MaskedCompareSwap = 0x18,
    /// Request of a masked fetch and add. Private as well.
    MaskedFetchAdd = 0x19,
    /// Request of a flush.
    Flush = 0x1c,
    /// Request of an atomic write.
    AtomicWrite = 0x1d,
}

bitflags! {
    /// The extended transport headers of a packet. They stand behind the BTH in the order of these bits.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Headers: u16 {
        /// XRCETH: the SRQ.
        const XRCETH = 1 << 0;
        /// DETH: Q_Key and source QPN.
        const DETH = 1 << 1;
        /// FETH: type and level of a flush.
        const FETH = 1 << 2;
        /// RETH: remote address, key and length.
        const RETH = 1 << 3;
        /// AtomicETH: remote address, key and operands.
        const ATOMICETH = 1 << 4;
        /// AETH: syndrome and MSN.
        const AETH = 1 << 5;
        /// AtomicAckETH: the old value.
        const ATOMICACKETH = 1 << 6;
        /// ImmDt: immediate data.
        const IMMDT = 1 << 7;
        /// IETH: the key to invalidate.
        const IETH = 1 << 8;
        /// MaskedETH, which is private: remote address, key, and the operands of a masked atomic.
        const MASKEDETH = 1 << 9;
    }
}

#[cfg(test)]
impl Headers {
    /// The bytes of the headers in this set.
    pub(crate) const fn bytes(self) -> usize {
        const BYTES: [usize; 10] = [4, 8, 4, 16, 28, 4, 8, 4, 4, 48];
        let (mut at, mut sum) = (0, 0);
        while at < BYTES.len() {
            if self.bits() & 1 << at != 0 {
                sum += BYTES[at];
            }
            at += 1;
        }
        sum
    }
}

/// The place of a packet in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// The first of several.
    First,
    /// Neither the first nor the last.
    Middle,
    /// The last of several.
    Last,
    /// The only one.
    Only,
}

impl Position {
    /// The place of a packet before and behind which there may be others.
    pub const fn of(begins: bool, ends: bool) -> Position {
        match (begins, ends) {
            (true, true) => Position::Only,
            (true, false) => Position::First,
            (false, true) => Position::Last,
            (false, false) => Position::Middle,
        }
    }

    /// Whether the message begins here.
    pub const fn begins(self) -> bool {
        matches!(self, Position::First | Position::Only)
    }

    /// Whether the message ends here.
    pub const fn ends(self) -> bool {
        matches!(self, Position::Last | Position::Only)
    }
}

/// The type of a message: all its packets have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A send.
    Send,
    /// An RDMA write.
    Write,
    /// The request of an RDMA read.
    Read,
    /// The request of an atomic.
    Atomic,
    /// The request of a flush.
    Flush,
    /// The request of an atomic write.
    AtomicWrite,
    /// A response.
    Response,
}

/// The opcode of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opcode {
    /// The transport.
    pub transport: Transport,
    /// The operation.
    pub operation: Operation,
}

impl Opcode {
    /// Takes an opcode apart; `None` if no packet of these transports has it.
    pub fn from_byte(byte: u8) -> Option<Opcode> {
        OPCODES[usize::from(byte)].map(|(opcode, _)| opcode)
    }

    /// As [`Opcode::from_byte`], with the headers behind the BTH.
    pub(crate) fn with_headers(byte: u8) -> Option<(Opcode, Headers)> {
        OPCODES[usize::from(byte)]
    }

    const fn decode(byte: u8) -> Option<Opcode> {
        let transport = match byte & 0xe0 {
            0x00 => Transport::Rc,
            0x20 => Transport::Uc,
            0x60 => Transport::Ud,
            0xa0 => Transport::Xrc,
            _ => return None,
        };
        let Some(operation) = Operation::from_bits(byte & 0x1f) else { return None };
        let opcode = Opcode { transport, operation };
        if opcode.exists() { Some(opcode) } else { None }
    }

    /// The byte in the BTH.
    pub const fn to_byte(self) -> u8 {
        self.transport.bits() | self.operation as u8
    }

    /// Whether the transport has the operation.
    pub const fn exists(self) -> bool {
        use Operation as O;
        match self.transport {
            Transport::Rc | Transport::Xrc => true,
            Transport::Uc => {
                matches!(self.operation.kind(), Kind::Send | Kind::Write)
                    && !matches!(self.operation, O::SendLastInvalidate | O::SendOnlyInvalidate)
            }
            Transport::Ud => matches!(self.operation, O::SendOnly | O::SendOnlyImmediate),
        }
    }

    /// The headers behind the BTH.
    pub const fn headers(self) -> Headers {
        use Operation as O;
        let of_operation = match self.operation {
            O::SendFirst | O::SendMiddle | O::SendLast | O::SendOnly => Headers::empty(),
            O::WriteMiddle | O::WriteLast | O::ReadResponseMiddle => Headers::empty(),
            O::SendLastImmediate | O::SendOnlyImmediate | O::WriteLastImmediate => Headers::IMMDT,
            O::SendLastInvalidate | O::SendOnlyInvalidate => Headers::IETH,
            O::WriteFirst | O::WriteOnly | O::ReadRequest | O::AtomicWrite => Headers::RETH,
            O::WriteOnlyImmediate => Headers::RETH.union(Headers::IMMDT),
            O::ReadResponseFirst | O::ReadResponseLast | O::ReadResponseOnly => Headers::AETH,
            O::Acknowledge => Headers::AETH,
            O::AtomicAcknowledge => Headers::AETH.union(Headers::ATOMICACKETH),
            O::CompareSwap | O::FetchAdd => Headers::ATOMICETH,
            O::MaskedCompareSwap | O::MaskedFetchAdd => Headers::MASKEDETH,
            O::Flush => Headers::FETH.union(Headers::RETH),
        };
        match self.transport {
            Transport::Ud => of_operation.union(Headers::DETH),
            Transport::Xrc if !matches!(self.operation.kind(), Kind::Response) => {
                of_operation.union(Headers::XRCETH)
            }
            _ => of_operation,
        }
    }
}

/// The opcode of each byte, and its headers: a look-up for each packet in place of the decisions.
static OPCODES: [Option<(Opcode, Headers)>; 256] = {
    let mut opcodes = [None; 256];
    let mut byte = 0;
    while byte < opcodes.len() {
        if let Some(opcode) = Opcode::decode(byte as u8) {
            opcodes[byte] = Some((opcode, opcode.headers()));
        }
        byte += 1;
    }
    opcodes
};

impl Operation {
    /// The type of the message.
    pub const fn kind(self) -> Kind {
        use Operation as O;
        match self {
            O::SendFirst | O::SendMiddle | O::SendLast | O::SendLastImmediate => Kind::Send,
            O::SendOnly | O::SendOnlyImmediate => Kind::Send,
            O::SendLastInvalidate | O::SendOnlyInvalidate => Kind::Send,
            O::WriteFirst | O::WriteMiddle | O::WriteLast | O::WriteLastImmediate => Kind::Write,
            O::WriteOnly | O::WriteOnlyImmediate => Kind::Write,
            O::ReadRequest => Kind::Read,
            O::CompareSwap | O::FetchAdd => Kind::Atomic,
            O::MaskedCompareSwap | O::MaskedFetchAdd => Kind::Atomic,
            O::Flush => Kind::Flush,
            O::AtomicWrite => Kind::AtomicWrite,
            O::ReadResponseFirst
            | O::ReadResponseMiddle
            | O::ReadResponseLast
            | O::ReadResponseOnly
            | O::Acknowledge
            | O::AtomicAcknowledge => Kind::Response,
        }
    }

    /// The place of the packet in its message.
    pub const fn position(self) -> Position {
        use Operation as O;
        match self {
            O::SendFirst | O::WriteFirst | O::ReadResponseFirst => Position::First,
            O::SendMiddle | O::WriteMiddle | O::ReadResponseMiddle => Position::Middle,
            O::SendLast | O::SendLastImmediate | O::SendLastInvalidate => Position::Last,
            O::WriteLast | O::WriteLastImmediate | O::ReadResponseLast => Position::Last,
            _ => Position::Only,
        }
    }

    /// Whether a request with this packet consumes a receive when it ends, as sends and writes with immediate data do.
    pub const fn completes_receive(self) -> bool {
        match self.kind() {
            Kind::Send => self.position().ends(),
            Kind::Write => {
                matches!(self, Operation::WriteLastImmediate | Operation::WriteOnlyImmediate)
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_opcode_is_the_byte_that_it_was_read_from() {
        let known = (0..=u8::MAX).filter_map(|byte| Some((byte, Opcode::from_byte(byte)?)));
        for (byte, opcode) in known.clone() {
            assert_eq!(opcode.to_byte(), byte);
        }
        // RC and XRC have 25 operations and two private ones, UC 12, UD 2.
        assert_eq!(known.count(), 27 + 27 + 12 + 2);
    }

    #[test]
    fn headers_are_as_long_as_the_kernel_says() {
        let bytes = |transport, operation| Opcode { transport, operation }.headers().bytes();
        assert_eq!(bytes(Transport::Rc, Operation::WriteOnlyImmediate), 20);
        assert_eq!(bytes(Transport::Rc, Operation::CompareSwap), 28);
        assert_eq!(bytes(Transport::Rc, Operation::AtomicAcknowledge), 12);
        assert_eq!(bytes(Transport::Rc, Operation::Flush), 20);
        assert_eq!(bytes(Transport::Ud, Operation::SendOnlyImmediate), 12);
        assert_eq!(bytes(Transport::Xrc, Operation::FetchAdd), 32);
        assert_eq!(bytes(Transport::Xrc, Operation::Acknowledge), 4);
    }
}
