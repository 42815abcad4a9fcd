//! Raw numbers of the verbs world as types of their own, so that an `lkey` cannot stand where an
//! `rkey` belongs, nor a queue pair number where a sequence number does.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

macro_rules! number {
    ($(#[$meta:meta])* $name:ident) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        pub struct $name(pub u32);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#08x}", self.0)
            }
        }
    };
}

number! {
    /// The key by which the local device reaches a memory region; named in scatter/gather entries.
    Lkey
}
number! {
    /// The key by which a remote peer reaches a memory region or window.
    Rkey
}
number! {
    /// A queue pair number, 24 bits, unique on its device.
    Qpn
}
number! {
    /// The number of a shared receive queue of an XRC domain, 24 bits, unique on its device.
    /// Requests of an XRC initiator name it.
    SrqNumber
}
number! {
    /// A packet sequence number, 24 bits.
    Psn
}
number! {
    /// The key of a datagram queue pair. With bit 31 set it is a privileged one.
    Qkey
}

impl Psn {
    /// The number with everything above its 24 bits cut off.
    pub const fn new(psn: u32) -> Psn {
        Psn(psn & 0xff_ffff)
    }
}

/// A global identifier of a port: an IPv6 address in form, in network byte order.
///
/// On RoCE v2 it *is* the address that packets carry; an IPv4 address appears mapped
/// (`::ffff:10.0.0.1`).
///
/// ```
/// use uverbs::{Gid, Psn};
///
/// let gid = Gid::from(std::net::Ipv4Addr::new(10, 0, 0, 1));
/// assert!(!gid.is_link_local() && !gid.is_zero());
/// assert_eq!((gid.to_string(), gid.ip().to_string()), ("::ffff:10.0.0.1".into(), "10.0.0.1".into()));
/// // Numbers of packets have 24 bits.
/// assert_eq!(Psn::new(0x0100_0003), Psn(3));
/// ```
#[doc(alias = "ibv_gid")]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Whether the table slot that it came from is empty.
    pub fn is_zero(&self) -> bool {
        self.0 == [0; 16]
    }

    /// Whether it is of the form `fe80::/64`.
    pub fn is_link_local(&self) -> bool {
        self.0.starts_with(&[0xfe, 0x80, 0, 0, 0, 0, 0, 0])
    }

    /// The address that it stands for, an IPv4 one where it is mapped.
    pub fn ip(&self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.0);
        v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
    }
}

impl From<Ipv6Addr> for Gid {
    fn from(address: Ipv6Addr) -> Gid {
        Gid(address.octets())
    }
}

impl From<Ipv4Addr> for Gid {
    fn from(address: Ipv4Addr) -> Gid {
        Gid(address.to_ipv6_mapped().octets())
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

/// A size or an offset, as errors show it: bytes up to nine digits, and larger ones in the largest unit.
#[derive(Clone, Copy)]
pub(crate) struct ByteCount(pub(crate) u64);

impl ByteCount {
    pub(crate) fn of(bytes: usize) -> Self {
        ByteCount(bytes as u64)
    }
}

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let ByteCount(bytes) = *self;
        if bytes < 1_000_000 {
            return write!(f, "{bytes} bytes");
        }
        let power = bytes.ilog2() / 10;
        let whole = (1..=power).rev().find(|power| bytes.trailing_zeros() >= 10 * power);
        match whole.map(|power| (bytes >> (10 * power), UNITS[power as usize - 1])) {
            Some((count, unit)) if count < 1_000_000 => write!(f, "{count} {unit}"),
            _ if bytes < 1_000_000_000 => write!(f, "{bytes} bytes"),
            _ => {
                let count = bytes as f64 / (1u64 << (10 * power)) as f64;
                write!(f, "{count:.1} {}", UNITS[power as usize - 1])
            }
        }
    }
}

/// A place in memory, counted in bytes, as errors show it: digits, and where they are many the unit.
#[derive(Clone, Copy)]
pub(crate) struct Offset(pub(crate) u64);

impl fmt::Display for Offset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Offset(bytes) = *self;
        if bytes < 1_000_000_000 { write!(f, "{bytes}") } else { ByteCount(bytes).fmt(f) }
    }
}

/// Declares a kernel enum as a newtype: an unknown value is a value, not a panic.
macro_rules! open_enum {
    (
        $(#[$meta:meta])*
        pub struct $name:ident($type:ty) {
            $( $(#[$id_meta:meta])* $id:ident = $value:expr, $text:literal; )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        pub struct $name(pub $type);

        #[allow(missing_docs)]
        impl $name {
            $( $(#[$id_meta])* pub const $id: $name = $name($value as $type); )*

            /// A description of the value, or `None` if this library does not know it.
            pub fn description(self) -> Option<&'static str> {
                match self {
                    $( Self::$id => Some($text), )*
                    _ => None,
                }
            }
        }

        /// The name of the constant, `WR_FLUSH_ERR` for one.
        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match *self {
                    $( Self::$id => f.write_str(stringify!($id)), )*
                    _ => write!(f, concat!(stringify!($name), "({})"), self.0),
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self.description() {
                    Some(description) => f.pad(description),
                    None => write!(f, "{}", self.0),
                }
            }
        }
    };
}
pub(crate) use open_enum;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapped_gid_reads_as_ipv4() {
        let gid = Gid::from(Ipv4Addr::new(10, 0, 0, 1));
        assert_eq!(gid.ip(), IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)));
        assert!(!gid.is_link_local() && !gid.is_zero());
        assert_eq!(gid.to_string(), "::ffff:10.0.0.1");
    }

    #[test]
    fn sizes_are_exact_in_a_unit_or_rounded_where_they_are_long() {
        let text = |bytes| ByteCount(bytes).to_string();
        assert_eq!(text(4097), "4097 bytes");
        assert_eq!(
            (text(16 << 20), text((16 << 20) + 1)),
            ("16 MiB".into(), "16777217 bytes".into())
        );
        assert_eq!((text(1 << 63), text(u64::MAX)), ("8 EiB".into(), "16.0 EiB".into()));
        assert_eq!(text((1 << 40) + 4096), "1.0 TiB");
        assert_eq!(text(1 << 20 | 1 << 10), "1025 KiB");
        assert_eq!(
            (Offset(16 << 20).to_string(), Offset(1 << 63).to_string()),
            ("16777216".into(), "8 EiB".into())
        );
        for shift in 0..64 {
            let longest = text(u64::MAX >> shift).split(' ').next().unwrap().len();
            assert!(longest <= 9, "{}", text(u64::MAX >> shift));
        }
    }

    #[test]
    fn sequence_numbers_have_24_bits() {
        assert_eq!(Psn::new(0xff00_0001), Psn(1));
    }
}
