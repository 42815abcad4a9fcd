//! Commands and responses as they travel in messages: 64 and 16 bytes, little-endian.
//!
//! From NVM Express Base 2.0, "Fabrics Message Capsules" and "Submission Queue Entry". Commands of every kind
//! have the same layout; the meaning of dwords 10 to 15 depends on the opcode.

use crate::Result;
use uverbs::Remote;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Opcode of all Fabrics commands.
const FABRICS: u8 = 0x7f;
/// The data pointer is an SGL descriptor, and so is the pointer to metadata, which is not used.
const FLAGS_SGL: u8 = 0x40;
/// Keyed SGL data block descriptor, subtype address.
const SGL_KEYED: u8 = 0x40;

/// A range of this program's memory and its rkey, for the target's RDMA.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct KeyedSgl {
    address: U64,
    length: [u8; 3],
    key: U32,
    kind: u8,
}

impl KeyedSgl {
    /// The largest length that the descriptor can carry.
    pub(crate) const MAX_LENGTH: usize = (1 << 24) - 1;

    /// The descriptor of a command without data.
    pub(crate) const EMPTY: KeyedSgl =
        KeyedSgl { address: U64::ZERO, length: [0; 3], key: U32::ZERO, kind: SGL_KEYED };

    /// Describes `length` bytes, at most [`MAX_LENGTH`](Self::MAX_LENGTH).
    pub(crate) fn new(remote: Remote, length: usize) -> KeyedSgl {
        let [low, middle, high, ..] = length.to_le_bytes();
        KeyedSgl {
            address: remote.addr.into(),
            length: [low, middle, high],
            key: remote.rkey.0.into(),
            kind: SGL_KEYED,
        }
    }
}

/// A command capsule.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Command {
    opcode: u8,
    flags: u8,
    /// The command identifier, set when the command is sent; the response repeats it.
    pub(crate) id: U16,
    /// The namespace; in a Fabrics command the first byte is its type.
    namespace: U32,
    dwords_2_3: [U32; 2],
    metadata: U64,
    data: KeyedSgl,
    dwords_10_15: [U32; 6],
}

const _: () = assert!(size_of::<KeyedSgl>() == 16);
const _: () = assert!(size_of::<Command>() == 64);

/// The type of a Fabrics command.
#[derive(Clone, Copy)]
enum FabricsType {
    PropertySet = 0,
    Connect = 1,
    PropertyGet = 4,
}

/// A register of the controller that Property Get and Property Set reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Property {
    pub(crate) name: &'static str,
    offset: u32,
    bytes: u8,
}

impl Property {
    /// Controller Capabilities.
    pub(crate) const CAP: Property = Property { name: "CAP", offset: 0, bytes: 8 };
    /// Controller Configuration.
    pub(crate) const CC: Property = Property { name: "CC", offset: 0x14, bytes: 4 };
    /// Controller Status.
    pub(crate) const CSTS: Property = Property { name: "CSTS", offset: 0x1c, bytes: 4 };

    /// The size field: 0 for 4 bytes, 1 for 8.
    fn size(self) -> u32 {
        u32::from(self.bytes == 8)
    }
}

/// The structure that Identify asks for.
#[derive(Clone, Copy)]
pub(crate) enum Identify {
    Namespace(u32),
    Controller,
}

impl Command {
    fn new(opcode: u8, namespace: u32, data: KeyedSgl, dwords: [u32; 6]) -> Command {
        Command {
            opcode,
            flags: FLAGS_SGL,
            id: U16::ZERO,
            namespace: namespace.into(),
            dwords_2_3: [U32::ZERO; 2],
            metadata: U64::ZERO,
            data,
            dwords_10_15: dwords.map(U32::new),
        }
    }

    fn fabrics(kind: FabricsType, data: KeyedSgl, dwords: [u32; 6]) -> Command {
        Command::new(FABRICS, kind as u32, data, dwords)
    }

    /// Makes this connection queue `qid`, with `entries` entries; `data` is [`ConnectData`]. Without a keep-alive time
    /// the target notices the end of the host by the end of the connection.
    ///
    /// [`ConnectData`]: crate::controller::ConnectData
    pub(crate) fn connect(qid: u16, entries: u16, data: KeyedSgl) -> Command {
        let format = 0;
        let last = u32::from(entries.saturating_sub(1));
        Command::fabrics(
            FabricsType::Connect,
            data,
            [format | u32::from(qid) << 16, last, 0, 0, 0, 0],
        )
    }

    pub(crate) fn property_get(property: Property) -> Command {
        let dwords = [property.size(), property.offset, 0, 0, 0, 0];
        Command::fabrics(FabricsType::PropertyGet, KeyedSgl::EMPTY, dwords)
    }

    /// Sets a property of 4 bytes.
    pub(crate) fn property_set(property: Property, value: u32) -> Command {
        let dwords = [property.size(), property.offset, value, 0, 0, 0];
        Command::fabrics(FabricsType::PropertySet, KeyedSgl::EMPTY, dwords)
    }

    pub(crate) fn identify(what: Identify, data: KeyedSgl) -> Command {
        let (namespace, structure) = match what {
            Identify::Namespace(number) => (number, 0),
            Identify::Controller => (0, 1),
        };
        Command::new(0x06, namespace, data, [structure, 0, 0, 0, 0, 0])
    }

    /// Set Features, Number of Queues: asks for one I/O queue.
    pub(crate) fn one_io_queue() -> Command {
        const NUMBER_OF_QUEUES: u32 = 7;
        Command::new(0x09, 0, KeyedSgl::EMPTY, [NUMBER_OF_QUEUES, 0, 0, 0, 0, 0])
    }

    pub(crate) fn read(namespace: u32, first: u64, blocks: u16, data: KeyedSgl) -> Command {
        Command::blocks(0x02, namespace, first, blocks, data)
    }

    pub(crate) fn write(namespace: u32, first: u64, blocks: u16, data: KeyedSgl) -> Command {
        Command::blocks(0x01, namespace, first, blocks, data)
    }

    /// A read or a write. `blocks` counts from 1, the field from 0.
    fn blocks(opcode: u8, namespace: u32, first: u64, blocks: u16, data: KeyedSgl) -> Command {
        let last = u32::from(blocks.saturating_sub(1));
        let (low, high) = (first as u32, (first >> 32) as u32);
        Command::new(opcode, namespace, data, [low, high, last, 0, 0, 0])
    }

    /// Makes all completed writes durable.
    pub(crate) fn flush(namespace: u32) -> Command {
        Command::new(0x00, namespace, KeyedSgl::EMPTY, [0; 6])
    }
}

/// A response capsule.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Response {
    /// The result of the command besides data.
    pub(crate) result: U64,
    sq_head: U16,
    sq_id: U16,
    /// The [`Command::id`] that it answers.
    pub(crate) id: U16,
    status: U16,
}

const _: () = assert!(size_of::<Response>() == 16);

impl Response {
    /// The response in a received message.
    pub(crate) fn parse(message: &[u8]) -> Result<Response> {
        let parsed = Response::read_from_bytes(message);
        parsed.map_err(|_| {
            format!("the target sent {} bytes; a response has 16", message.len()).into()
        })
    }

    /// The status without the phase tag, which Fabrics does not use.
    pub(crate) fn status(&self) -> Status {
        Status(self.status.get() >> 1)
    }
}

/// The status of a command: the code in the lowest 8 bits, then 3 bits for its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(u16);

impl Status {
    /// The Do Not Retry bit.
    const DNR: u16 = 1 << 14;

    pub(crate) fn is_success(self) -> bool {
        self.code() == 0
    }

    /// Type and code, without the bits beside them.
    pub(crate) fn code(self) -> u16 {
        self.0 & 0x7ff
    }

    fn name(self) -> Option<&'static str> {
        Some(match self.code() {
            0x000 => "success",
            0x001 => "invalid command opcode",
            0x002 => "invalid field in command",
            0x003 => "command id conflict",
            0x004 => "data transfer error",
            0x005 => "aborted, power is lost",
            0x006 => "internal error",
            0x007 => "abort requested",
            0x008 => "aborted, the queue was deleted",
            0x00b => "invalid namespace or format",
            0x00c => "command sequence error",
            0x00d => "invalid SGL segment descriptor",
            0x00f => "data SGL length invalid",
            0x011 => "SGL descriptor type invalid",
            0x016 => "SGL offset invalid",
            0x018 => "host identifier inconsistent format",
            0x020 => "namespace is write protected",
            0x021 => "command interrupted",
            0x080 => "LBA out of range",
            0x081 => "capacity exceeded",
            0x082 => "namespace not ready",
            0x100 => "completion queue invalid",
            0x101 => "invalid queue identifier",
            0x102 => "invalid queue size",
            0x180 => "connect: incompatible format",
            0x181 => "connect: controller busy",
            0x182 => "connect: invalid parameters",
            0x183 => "connect: restart discovery",
            0x184 => "connect: the target's list of hosts does not have this one",
            0x190 => "discover restart",
            0x191 => "authentication required",
            0x280 => "write fault",
            0x281 => "unrecovered read error",
            0x282 => "end-to-end guard check error",
            0x285 => "compare failure",
            0x286 => "access denied",
            0x287 => "deallocated or unwritten logical block",
            _ => return None,
        })
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (kind, code) = (self.code() >> 8, self.code() & 0xff);
        let again = if self.0 & Status::DNR != 0 { ", do not retry" } else { "" };
        let name = self.name().unwrap_or("unknown status");
        write!(f, "{name} (type {kind:#x}, code {code:#04x}{again})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uverbs::Rkey;

    const SGL: [u8; 16] = [8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 1, 0xdd, 0xcc, 0xbb, 0xaa, 0x40];

    fn sgl() -> KeyedSgl {
        KeyedSgl::new(Remote { addr: 0x0102_0304_0506_0708, rkey: Rkey(0xaabb_ccdd) }, 0x1_0000)
    }

    /// Checks the bytes that are not 0, by their offsets.
    fn check(command: Command, data: [u8; 16], others: &[(usize, u8)]) {
        let mut expected = [0; 64];
        expected[1] = 0x40;
        expected[24..40].copy_from_slice(&data);
        for (offset, byte) in others {
            expected[*offset] = *byte;
        }
        assert_eq!(command.as_bytes(), expected);
    }

    #[test]
    fn fields_lie_where_the_specification_puts_them() {
        let mut empty = [0; 16];
        empty[15] = 0x40;
        check(
            Command::connect(0x0102, 32, sgl()),
            SGL,
            &[(0, 0x7f), (4, 1), (42, 2), (43, 1), (44, 31)],
        );
        check(Command::property_get(Property::CAP), empty, &[(0, 0x7f), (4, 4), (40, 1)]);
        check(Command::property_get(Property::CSTS), empty, &[(0, 0x7f), (4, 4), (44, 0x1c)]);
        let set = Command::property_set(Property::CC, 0x0046_0001);
        check(set, empty, &[(0, 0x7f), (44, 0x14), (48, 1), (50, 0x46)]);
        check(Command::identify(Identify::Controller, sgl()), SGL, &[(0, 6), (40, 1)]);
        check(Command::identify(Identify::Namespace(3), sgl()), SGL, &[(0, 6), (4, 3)]);
        check(Command::one_io_queue(), empty, &[(0, 9), (40, 7)]);
        check(Command::flush(1), empty, &[(4, 1)]);
        let far = 0x0807_0605_0403_0201;
        let first = [1, 2, 3, 4, 5, 6, 7, 8];
        for (command, opcode) in
            [(Command::read(1, far, 128, sgl()), 2), (Command::write(1, far, 128, sgl()), 1)]
        {
            let mut others = vec![(0, opcode), (4, 1), (48, 127)];
            others.extend(first.iter().enumerate().map(|(at, byte)| (40 + at, *byte)));
            check(command, SGL, &others);
        }
    }

    #[test]
    fn descriptor_carries_24_bits_of_length() {
        let most = KeyedSgl::new(Remote { addr: 0, rkey: Rkey(0) }, KeyedSgl::MAX_LENGTH);
        assert_eq!(most.as_bytes()[8..12], [0xff, 0xff, 0xff, 0]);
    }

    #[test]
    fn response_is_read_and_its_status_named() {
        let mut bytes = [0; 16];
        bytes[0] = 9;
        bytes[12] = 5;
        bytes[14..].copy_from_slice(&((0x4182_u16) << 1 | 1).to_le_bytes());
        let response = Response::parse(&bytes).unwrap();
        assert_eq!((response.result.get(), response.id.get()), (9, 5));
        assert!(!response.status().is_success());
        let told = response.status().to_string();
        assert_eq!(told, "connect: invalid parameters (type 0x1, code 0x82, do not retry)");
        assert!(Response::parse(&[0; 16]).unwrap().status().is_success());
        assert!(Status(0x7ff).to_string().contains("unknown status (type 0x7, code 0xff)"));
    }

    #[test]
    fn message_of_another_length_is_no_response() {
        for length in [0, 15, 17, 64] {
            let error = Response::parse(&vec![0; length]).unwrap_err().to_string();
            assert!(error.contains(&format!("sent {length} bytes")), "{error}");
        }
    }
}
