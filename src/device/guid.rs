//! Global unique identifiers of devices. Pairs with the GUID attributes of netlink (a number in
//! host order) and of sysfs (four groups of hexadecimal digits).

use std::fmt;

/// A 64-bit global unique identifier.
///
/// Displays as sysfs writes it, `0002:c903:0000:1234`. Zero stands for a device that has none.
///
/// ```
/// use uverbs::device::Guid;
///
/// let guid = Guid::new(0x0002_c903_00ab_cdef);
/// assert_eq!(guid, Guid::from_bytes(guid.to_bytes()));
/// assert_eq!(guid.get() >> 40, 0x0002_c9, "the vendor");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Guid(u64);

impl Guid {
    /// From the number whose most significant byte comes first on the wire.
    pub const fn new(value: u64) -> Self {
        Guid(value)
    }

    /// The number whose most significant byte comes first on the wire.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The eight bytes in wire order.
    pub const fn to_bytes(self) -> [u8; 8] {
        self.0.to_be_bytes()
    }

    /// From eight bytes in wire order.
    pub const fn from_bytes(bytes: [u8; 8]) -> Self {
        Guid(u64::from_be_bytes(bytes))
    }

    /// From sysfs's spelling; anything else is `None`.
    pub(crate) fn from_sysfs(text: &str) -> Option<Self> {
        let mut value = 0;
        let mut groups = 0;
        for group in text.split(':') {
            if group.len() != 4 || !group.bytes().all(|b| b.is_ascii_hexdigit()) {
                return None;
            }
            value = value << 16 | u64::from_str_radix(group, 16).ok()?;
            groups += 1;
        }
        (groups == 4).then_some(Guid(value))
    }
}

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let v = self.0;
        write!(
            f,
            "{:04x}:{:04x}:{:04x}:{:04x}",
            v >> 48,
            v >> 32 & 0xffff,
            v >> 16 & 0xffff,
            v & 0xffff
        )
    }
}

impl fmt::Debug for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Guid({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sysfs_spelling_round_trips() {
        let guid = Guid::new(0x0002_c903_00ab_1234);
        assert_eq!(guid.to_string(), "0002:c903:00ab:1234");
        assert_eq!(Guid::from_sysfs(&guid.to_string()), Some(guid));
        assert_eq!(Guid::from_bytes(guid.to_bytes()), guid);
        assert_eq!(guid.to_bytes()[..2], [0x00, 0x02]);
    }

    #[test]
    fn other_spellings_are_refused() {
        for text in ["", "1:2:3:4", "0002:c903:00ab", "0002:c903:00ab:1234:0000", "000g:0:0:0"] {
            assert_eq!(Guid::from_sysfs(text), None, "{text:?}");
        }
        assert_eq!(Guid::from_sysfs("+002:c903:00ab:1234"), None);
    }
}
