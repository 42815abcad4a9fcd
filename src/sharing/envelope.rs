//! The exported form of an object: its handle, and facts by which the import notices that the
//! handle now names another object.
//!
//! Pairs with nothing in the kernel, which knows handles only.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::file::File;
use crate::handles::ObjectKind;
use rustix::io::Errno;
use std::fmt;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const VERB: &str = "open_envelope";
const MAGIC: [u8; 6] = *b"uverbs";
const VERSION: u16 = 1;
/// The index of a device that was listed without netlink.
const NO_INDEX: u32 = u32::MAX;

/// Four numbers about an object that the kernel knows, too. Exporter and importer ask the kernel for them;
/// the object is another one if they differ. Each kind of object has its own.
pub(crate) type Fingerprint = [u64; 4];

/// The bytes of version 1.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct EnvelopeBytes {
    magic: [u8; 6],
    version: U16,
    kind: U16,
    reserved: U16,
    driver: U32,
    major: U32,
    minor: U32,
    index: U32,
    handle: U32,
    guid: U64,
    origin: U64,
    fingerprint: [U64; 4],
    reserved_too: U32,
    check: U32,
}

const _: () = assert!(size_of::<EnvelopeBytes>() == Envelope::SIZE);

/// The exported form of an object, with which another process imports it.
///
/// It has the kind of object, the device, the kernel file that the object belongs to, the handle, and some
/// facts about the object that the kernel knows, too. It is of use only to a process that has the same
/// kernel file: one that [imported](crate::Context::import) the file that
/// [`Context::share`](crate::Context::share) gave, or that inherited it over `fork`. Such a process can
/// reach all objects of the file without an envelope as well; with an envelope, mistakes are noticed. An
/// envelope is no secret and it is not signed.
///
/// It travels as [bytes](Self::to_bytes), or with the feature `serde` in any format. Damaged bytes are
/// refused when they are read, without asking the kernel. Bytes that were forged with a right checksum are
/// accepted then; the import compares their facts with those of the kernel. Where the kernel has too few,
/// as for [VARs](crate::mlx5::Var::import), importing is `unsafe`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Envelope {
    kind: ObjectKind,
    handle: u32,
    device: DeviceIdentity,
    origin: u64,
    fingerprint: Fingerprint,
}

/// Tells devices of one machine apart. While a process has a device open, no other device gets the number
/// of its node. So that number suffices among processes that share a file. The other fields notice an
/// envelope that is older than the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct DeviceIdentity {
    driver: u32,
    major: u32,
    minor: u32,
    index: Option<u32>,
    guid: u64,
}

impl DeviceIdentity {
    fn of(device: &Device) -> DeviceIdentity {
        let number = device.device_number();
        DeviceIdentity {
            driver: device.driver().map_or(0, |driver| driver.get()),
            major: number.map_or(0, |number| number.major),
            minor: number.map_or(0, |number| number.minor),
            index: device.index().filter(|index| *index != NO_INDEX),
            guid: device.node_guid().get(),
        }
    }

    /// Whether no field that both sides know differs. Network namespaces hide the index.
    fn matches(&self, other: &DeviceIdentity) -> bool {
        let indices = match (self.index, other.index) {
            (Some(one), Some(two)) => one == two,
            _ => true,
        };
        let guids = self.guid == other.guid || self.guid == 0 || other.guid == 0;
        indices
            && guids
            && (self.driver, self.major, self.minor) == (other.driver, other.major, other.minor)
    }
}

impl Envelope {
    /// Bytes of an envelope. rdma-core's exported VARs (`mlx5dv_get_export_sizes`) are shorter, and
    /// contain nothing to check.
    #[doc(alias = "mlx5dv_get_export_sizes")]
    pub const SIZE: usize = 88;

    /// Seals the handle of an object of `file`.
    pub(crate) fn seal(
        file: &File,
        kind: ObjectKind,
        handle: u32,
        fingerprint: Fingerprint,
    ) -> Envelope {
        let device = DeviceIdentity::of(&file.device);
        Envelope { kind, handle, device, origin: file.origin, fingerprint }
    }

    /// Opens it on behalf of `verb`, for an importer that has `file` and expects this kind. Returns the
    /// handle, about which the kernel was not asked yet, and the fingerprint to compare with its response.
    ///
    /// # Errors
    ///
    /// `EINVAL` for another kind, `EXDEV` for another device or another file of it.
    pub(crate) fn open(
        &self,
        verb: &'static str,
        file: &File,
        kind: ObjectKind,
    ) -> Result<(u32, Fingerprint)> {
        self.check(verb, &file.device, kind)?;
        // 0: the file was imported without an envelope.
        if self.origin != 0 && file.origin != 0 && self.origin != file.origin {
            return Err(Error::new(verb, Errno::XDEV).detail(format!(
                "the envelope belongs to another context of {} than the one that it is opened in",
                file.device.name()
            )));
        }
        Ok((self.handle, self.fingerprint))
    }

    /// Checks kind and device: the part of [`open`](Self::open) that needs no file.
    pub(crate) fn check(
        &self,
        verb: &'static str,
        device: &Device,
        kind: ObjectKind,
    ) -> Result<()> {
        if self.kind != kind {
            let detail = format!("the envelope holds a {}, not a {kind}", self.kind);
            return Err(Error::invalid(verb, detail));
        }
        if !self.device.matches(&DeviceIdentity::of(device)) {
            let DeviceIdentity { major, minor, index, guid, .. } = self.device;
            let index = index.map_or("none".into(), |index| index.to_string());
            return Err(Error::new(verb, Errno::XDEV).detail(format!(
                "the envelope is of a device with node {major}:{minor}, index {index} and GUID \
                 {guid:016x}, which {device} is not"
            )));
        }
        Ok(())
    }

    /// The kind of object.
    pub fn kind(&self) -> ObjectKind {
        self.kind
    }

    /// The number by which the kernel knows the object within its file.
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// The [`origin`](File::origin) of the kernel file; 0 if the exporter did not know it.
    pub(crate) fn origin(&self) -> u64 {
        self.origin
    }

    /// The fingerprint, without the checks of [`open`](Self::open).
    pub(crate) fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// The bytes to send.
    pub fn to_bytes(&self) -> [u8; Envelope::SIZE] {
        let mut raw = EnvelopeBytes {
            magic: MAGIC,
            version: VERSION.into(),
            kind: self.kind.0.into(),
            reserved: 0.into(),
            driver: self.device.driver.into(),
            major: self.device.major.into(),
            minor: self.device.minor.into(),
            index: self.device.index.unwrap_or(NO_INDEX).into(),
            handle: self.handle.into(),
            guid: self.device.guid.into(),
            origin: self.origin.into(),
            fingerprint: self.fingerprint.map(U64::new),
            reserved_too: 0.into(),
            check: 0.into(),
        };
        raw.check = crc32(raw.as_bytes()).into();
        zerocopy::transmute!(raw)
    }

    /// Reads bytes that were received. Asks the kernel nothing.
    ///
    /// # Errors
    ///
    /// `EINVAL` for bytes that are no envelope or were damaged; `EOPNOTSUPP` for an envelope of a later
    /// version of this library.
    pub fn from_bytes(bytes: &[u8]) -> Result<Envelope> {
        let refuse = |detail: String| Err(Error::invalid(VERB, detail));
        let Ok((MAGIC, rest)) = <[u8; 6]>::read_from_prefix(bytes) else {
            return refuse(format!("{} bytes that do not begin as an envelope does", bytes.len()));
        };
        match U16::read_from_prefix(rest) {
            Ok((version, _)) if version == VERSION => {}
            Ok((version, _)) => {
                return Err(Error::new(VERB, Errno::OPNOTSUPP).detail(format!(
                    "an envelope of version {version}; this library knows version {VERSION}"
                )));
            }
            Err(_) => return refuse(format!("an envelope that ends after {} bytes", bytes.len())),
        }
        let Ok(mut raw) = EnvelopeBytes::read_from_bytes(bytes) else {
            let length = bytes.len();
            return refuse(format!("an envelope of {length} bytes in place of {}", Self::SIZE));
        };
        let check = raw.check.get();
        raw.check = 0.into();
        if crc32(raw.as_bytes()) != check {
            return refuse("an envelope whose CRC is wrong: it was damaged".into());
        }
        if raw.reserved != 0 || raw.reserved_too != 0 {
            return refuse("an envelope whose reserved bytes are not zero".into());
        }
        Ok(Envelope {
            kind: ObjectKind(raw.kind.get()),
            handle: raw.handle.get(),
            device: DeviceIdentity {
                driver: raw.driver.get(),
                major: raw.major.get(),
                minor: raw.minor.get(),
                index: Some(raw.index.get()).filter(|index| *index != NO_INDEX),
                guid: raw.guid.get(),
            },
            origin: raw.origin.get(),
            fingerprint: raw.fingerprint.map(U64::get),
        })
    }
}

impl fmt::Debug for Envelope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Envelope")
            .field("kind", &self.kind)
            .field("handle", &self.handle)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

/// The CRC-32 of IEEE 802.3, which detects any damage of up to 32 bits in a row.
fn crc32(bytes: &[u8]) -> u32 {
    let mut rest = u32::MAX;
    for byte in bytes {
        rest ^= u32::from(*byte);
        for _ in 0..8 {
            let carry = rest & 1 != 0;
            rest >>= 1;
            if carry {
                rest ^= 0xedb8_8320;
            }
        }
    }
    !rest
}

#[cfg(feature = "serde")]
mod format {
    //! Hexadecimal digits in formats that people read, bytes in the others.

    use super::Envelope;
    use serde::de::{Error, SeqAccess, Visitor};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::fmt;

    impl Serialize for Envelope {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let bytes = self.to_bytes();
            if serializer.is_human_readable() {
                let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                serializer.serialize_str(&digits)
            } else {
                serializer.serialize_bytes(&bytes)
            }
        }
    }

    struct Opener;

    impl<'de> Visitor<'de> for Opener {
        type Value = Envelope;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "an envelope of {} bytes", Envelope::SIZE)
        }

        fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Envelope, E> {
            Envelope::from_bytes(bytes).map_err(E::custom)
        }

        fn visit_str<E: Error>(self, digits: &str) -> Result<Envelope, E> {
            let mut bytes = [0; Envelope::SIZE];
            let wrong = || E::custom("an envelope's digits");
            if digits.len() != 2 * bytes.len() || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(wrong());
            }
            for (byte, at) in bytes.iter_mut().zip((0..digits.len()).step_by(2)) {
                let pair = digits.get(at..at + 2).ok_or_else(wrong)?;
                *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong())?;
            }
            self.visit_bytes(&bytes)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Envelope, A::Error> {
            let mut bytes = [0; Envelope::SIZE];
            for (at, byte) in bytes.iter_mut().enumerate() {
                *byte = seq.next_element()?.ok_or_else(|| A::Error::invalid_length(at, &self))?;
            }
            self.visit_bytes(&bytes)
        }
    }

    impl<'de> Deserialize<'de> for Envelope {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Envelope, D::Error> {
            if deserializer.is_human_readable() {
                deserializer.deserialize_str(Opener)
            } else {
                deserializer.deserialize_bytes(Opener)
            }
        }
    }
}

#[cfg(test)]
mod tests;
