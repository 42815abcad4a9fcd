//! Big-endian integers with the alignment of the native ones.
//!
//! Device memory is read and written one whole word at a time. A big-endian type over a byte array
//! has alignment 1, and the compiler then may split a volatile access into byte accesses, which a
//! device can observe. These newtypes keep the native alignment, so one access stays one access.

use core::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! big_endian {
    ($(#[$doc:meta])* $name:ident, $native:ident) => {
        $(#[$doc])*
        #[derive(
            FromBytes, IntoBytes, KnownLayout, Immutable, Clone, Copy, PartialEq, Eq, Hash, Default,
        )]
        #[repr(transparent)]
        pub struct $name($native);

        impl $name {
            /// The value zero, the same in either byte order.
            pub const ZERO: Self = Self(0);

            /// Stores a number of the CPU in big-endian order.
            #[inline]
            pub const fn new(value: $native) -> Self {
                Self(value.to_be())
            }

            /// The number in the CPU's order.
            #[inline]
            pub const fn get(self) -> $native {
                $native::from_be(self.0)
            }

            /// The word as it lies in memory, for a single load or store.
            #[inline]
            pub const fn to_bits(self) -> $native {
                self.0
            }

            /// Takes a word from a single load of memory, without swapping it.
            #[inline]
            pub const fn from_bits(bits: $native) -> Self {
                Self(bits)
            }
        }

        impl From<$native> for $name {
            #[inline]
            fn from(value: $native) -> Self {
                Self::new(value)
            }
        }

        impl From<$name> for $native {
            #[inline]
            fn from(value: $name) -> Self {
                value.get()
            }
        }

        impl PartialOrd for $name {
            fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
                Some(self.cmp(other))
            }
        }

        impl Ord for $name {
            fn cmp(&self, other: &Self) -> core::cmp::Ordering {
                self.get().cmp(&other.get())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.get(), f)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.get(), f)
            }
        }

        impl fmt::LowerHex for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::LowerHex::fmt(&self.get(), f)
            }
        }
    };
}

big_endian! {
    /// A `__be16`: 16 bits, big-endian, aligned to 2 bytes.
    Be16, u16
}
big_endian! {
    /// A `__be32`: 32 bits, big-endian, aligned to 4 bytes.
    Be32, u32
}
big_endian! {
    /// A `__be64`: 64 bits, big-endian, aligned to 8 bytes.
    Be64, u64
}

const _: () = assert!(align_of::<Be16>() == align_of::<u16>() && size_of::<Be16>() == 2);
const _: () = assert!(align_of::<Be32>() == align_of::<u32>() && size_of::<Be32>() == 4);
const _: () = assert!(align_of::<Be64>() == align_of::<u64>() && size_of::<Be64>() == 8);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_holds_the_most_significant_byte_first() {
        assert_eq!(Be16::new(0x0102).as_bytes(), [1, 2]);
        assert_eq!(Be32::new(0x0102_0304).as_bytes(), [1, 2, 3, 4]);
        assert_eq!(Be64::new(0x0102_0304_0506_0708).as_bytes(), [1, 2, 3, 4, 5, 6, 7, 8]);
    }

    #[test]
    fn bits_are_the_word_in_memory() {
        let word = u32::from_ne_bytes([0xde, 0xad, 0xbe, 0xef]);
        assert_eq!(Be32::from_bits(word).get(), 0xdead_beef);
        assert_eq!(Be32::new(0xdead_beef).to_bits(), word);
    }

    #[test]
    fn order_is_that_of_the_numbers() {
        assert!(Be32::new(0x0000_0100) > Be32::new(0x0000_00ff));
    }
}
