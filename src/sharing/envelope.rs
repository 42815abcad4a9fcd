//! What a process tells another of an object that both can reach: a number, and enough beside it
//! to notice that the number does not mean what the other believes.
//!
//! Pairs with nothing in the kernel, which knows handles only. [`imported`](super::imported) opens what
//! is sealed here.

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
/// Where netlink does not number the devices.
const NO_INDEX: u32 = u32::MAX;

/// What an importer compares with what the kernel says of the object: four numbers that mean
/// something else for each kind.
pub(crate) type Proof = [u64; 4];

/// The bytes of version 1.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Wire {
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
    proof: [U64; 4],
    reserved_too: U32,
    check: U32,
}

const _: () = assert!(size_of::<Wire>() == Envelope::SIZE);

/// The exported form of an object: what another process needs to import it.
///
/// It names the kind of object, the device, the kernel file that the object belongs to (as far as
/// the importer knows its own), the handle, and what the kernel says of the object. It is of use
/// only to a process that has the same kernel file: one that [imported](crate::Context::import) what
/// [`Context::share`](crate::Context::share) gave, or that inherited it over `fork`. Whoever has the
/// file can reach all of its objects without an envelope, too; what an envelope adds is that
/// mistakes are noticed. It is no secret and it is not signed.
///
/// It travels as [bytes](Self::to_bytes), or with the feature `serde` in any format. Bytes that were
/// damaged are refused when they are read, and reading them asks the kernel nothing. Somebody who
/// makes them up with care is not noticed then: what they say of the object is compared with what the
/// kernel says when it is imported. Where the kernel says too little, as of
/// [VARs](crate::mlx5::Var::import), importing is `unsafe`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Envelope {
    kind: ObjectKind,
    handle: u32,
    identity: Identity,
    origin: u64,
    proof: Proof,
}

/// What tells devices of one machine apart. The number of the node is the device's as long as
/// anybody has it open, so it is enough among those who share a file; the rest notices what was
/// kept from before the device was replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Identity {
    driver: u32,
    major: u32,
    minor: u32,
    index: Option<u32>,
    guid: u64,
}

impl Identity {
    fn of(device: &Device) -> Identity {
        let number = device.device_number();
        Identity {
            driver: device.driver().map_or(0, |driver| driver.get()),
            major: number.map_or(0, |number| number.major),
            minor: number.map_or(0, |number| number.minor),
            index: device.index().filter(|index| *index != NO_INDEX),
            guid: device.node_guid().get(),
        }
    }

    /// Whether nothing tells the two apart. An index or a GUID that one side does not know does
    /// not: network namespaces hide the former.
    fn matches(&self, other: &Identity) -> bool {
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
    /// Bytes of an envelope; those of `mlx5dv_get_export_sizes` are fewer and checked by nobody.
    #[doc(alias = "mlx5dv_get_export_sizes")]
    pub const SIZE: usize = 88;

    /// Seals the handle of an object of `file`.
    pub(crate) fn seal(file: &File, kind: ObjectKind, handle: u32, proof: Proof) -> Envelope {
        let identity = Identity::of(&file.device);
        Envelope { kind, handle, identity, origin: file.origin, proof }
    }

    /// Opens it on behalf of `verb`, for an importer that has `file` and expects this kind: answers
    /// the handle, which the kernel was not asked about, and what to compare with its answers.
    ///
    /// # Errors
    ///
    /// `EINVAL` for another kind, `EXDEV` for another device or another file of it.
    pub(crate) fn open(
        &self,
        verb: &'static str,
        file: &File,
        kind: ObjectKind,
    ) -> Result<(u32, Proof)> {
        self.check(verb, &file.device, kind)?;
        // 0 stands for a file of which nobody said where it comes from.
        if self.origin != 0 && file.origin != 0 && self.origin != file.origin {
            return Err(Error::new(verb, Errno::XDEV).detail(format!(
                "the envelope belongs to another context of {} than the one that it is opened in",
                file.device.name()
            )));
        }
        Ok((self.handle, self.proof))
    }

    /// The part of [`open`](Self::open) that takes no file: that it is of this kind and device.
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
        if !self.identity.matches(&Identity::of(device)) {
            let Identity { major, minor, index, guid, .. } = self.identity;
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

    /// Which of all kernel files it belongs to; 0 if its maker did not know.
    pub(crate) fn origin(&self) -> u64 {
        self.origin
    }

    /// What to compare with what the kernel says, unlike [`open`](Self::open) on trust that it was
    /// meant for whoever asks.
    pub(crate) fn proof(&self) -> Proof {
        self.proof
    }

    /// The bytes to send.
    pub fn to_bytes(&self) -> [u8; Envelope::SIZE] {
        let mut wire = Wire {
            magic: MAGIC,
            version: VERSION.into(),
            kind: self.kind.0.into(),
            reserved: 0.into(),
            driver: self.identity.driver.into(),
            major: self.identity.major.into(),
            minor: self.identity.minor.into(),
            index: self.identity.index.unwrap_or(NO_INDEX).into(),
            handle: self.handle.into(),
            guid: self.identity.guid.into(),
            origin: self.origin.into(),
            proof: self.proof.map(U64::new),
            reserved_too: 0.into(),
            check: 0.into(),
        };
        wire.check = crc32(wire.as_bytes()).into();
        zerocopy::transmute!(wire)
    }

    /// From bytes that were received. Looks at nothing else.
    ///
    /// # Errors
    ///
    /// `EINVAL` for bytes that are no envelope, whatever is wrong with them; `EOPNOTSUPP` for one of
    /// a later version of this library.
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
        let Ok(mut wire) = Wire::read_from_bytes(bytes) else {
            let length = bytes.len();
            return refuse(format!("an envelope of {length} bytes in place of {}", Self::SIZE));
        };
        let check = wire.check.get();
        wire.check = 0.into();
        if crc32(wire.as_bytes()) != check {
            return refuse("an envelope whose check value is wrong: it was damaged".into());
        }
        if wire.reserved != 0 || wire.reserved_too != 0 {
            return refuse("an envelope with something where nothing belongs".into());
        }
        Ok(Envelope {
            kind: ObjectKind(wire.kind.get()),
            handle: wire.handle.get(),
            identity: Identity {
                driver: wire.driver.get(),
                major: wire.major.get(),
                minor: wire.minor.get(),
                index: Some(wire.index.get()).filter(|index| *index != NO_INDEX),
                guid: wire.guid.get(),
            },
            origin: wire.origin.get(),
            proof: wire.proof.map(U64::get),
        })
    }
}

impl fmt::Debug for Envelope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Envelope")
            .field("kind", &self.kind)
            .field("handle", &self.handle)
            .field("device", &self.identity)
            .finish_non_exhaustive()
    }
}

/// The CRC of IEEE 802.3, which no damage of up to 32 bits in a row escapes.
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
    //! Digits for formats that people read, bytes for the others.

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
