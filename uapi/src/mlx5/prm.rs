//! Layouts of mlx5 commands and contexts: big-endian bit fields, by the kernel's names.
//!
//! The kernel describes them as `struct mlx5_ifc_<name>_bits`, in which a byte of C stands for one
//! bit of the device. Here a layout is a type with one constant for each field, and [`Bits`] reads
//! and writes fields of a byte buffer:
//!
//! ```
//! use uverbs_uapi::mlx5::prm::{Bits, cqc::cqc};
//!
//! let mut cq = Bits::<cqc, _>::new([0u8; 64]);
//! cq.set(cqc::log_cq_size, 7);
//! assert_eq!(cq.get(cqc::log_cq_size), 7);
//! assert_eq!(cq.bytes()[12], 7);
//! ```
//!
//! The layouts have only the fields that this project uses. [`LAYOUTS`] lists every field with its
//! place, so that a test can compare all of them with the driver's own type information.

use core::marker::PhantomData;

pub mod cmd;
pub mod cqc;
pub mod eqc;
pub mod flow;
pub mod hca_cap;
pub mod mkc;
pub mod object;
pub mod opcode;
pub mod qpc;
pub mod register;
pub mod rqc;
pub mod srqc;
pub mod virtio;
pub mod vport;

/// A described command or context.
pub trait Layout {
    /// Name and fields, for comparison with the kernel's description.
    const INFO: Info;
    /// Size in bytes, without a trailing list.
    const SIZE: usize = Self::INFO.bits / 8;
}

/// One layout, as data.
#[derive(Debug, Clone, Copy)]
pub struct Info {
    /// The kernel's name without `mlx5_ifc_` and `_bits`.
    pub name: &'static str,
    /// Size in bits, without a trailing list.
    pub bits: usize,
    /// Every described field.
    pub fields: &'static [FieldInfo],
}

/// One field of a layout, as data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FieldInfo {
    /// The kernel's name.
    pub name: &'static str,
    /// Offset in bits; bit 0 is the most significant bit of the first byte.
    pub bit: usize,
    /// Width in bits; 0 is a list that runs to the end of the command.
    pub width: usize,
    /// Name of the nested layout, if the field is one.
    pub layout: Option<&'static str>,
}

/// A number of at most 64 bits in layout `L`.
pub struct Field<L> {
    bit: usize,
    width: usize,
    layout: PhantomData<fn(L)>,
}

/// A run of whole bytes in layout `L`.
pub struct Span<L> {
    byte: usize,
    len: usize,
    layout: PhantomData<fn(L)>,
}

/// A layout `M` inside layout `L`.
pub struct Sub<L, M> {
    byte: usize,
    len: usize,
    layouts: PhantomData<fn(L, M)>,
}

/// The list at the end of layout `L`.
pub struct Tail<L> {
    byte: usize,
    layout: PhantomData<fn(L)>,
}

macro_rules! copy {
    ($($name:ident<$($arg:ident),+>)*) => {$(
        impl<$($arg),+> Clone for $name<$($arg),+> {
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<$($arg),+> Copy for $name<$($arg),+> {}
    )*};
}
copy!(Field<L> Span<L> Sub<L, M> Tail<L>);

impl<L> Field<L> {
    /// `width` bits from bit `bit`.
    ///
    /// # Panics
    /// If the width is not 1 to 64; layouts are constants, so this is a compile error.
    pub const fn new(bit: usize, width: usize) -> Self {
        assert!(width >= 1 && width <= 64);
        Self { bit, width, layout: PhantomData }
    }

    /// The largest value the field holds.
    pub const fn max(self) -> u64 {
        u64::MAX >> (64 - self.width)
    }
}

impl<L> Span<L> {
    /// `width` bits from bit `bit`, both multiples of 8.
    ///
    /// # Panics
    /// If they are not; layouts are constants, so this is a compile error.
    pub const fn new(bit: usize, width: usize) -> Self {
        assert!(bit % 8 == 0 && width % 8 == 0);
        Self { byte: bit / 8, len: width / 8, layout: PhantomData }
    }
}

impl<L, M> Sub<L, M> {
    /// `width` bits from bit `bit`, both multiples of 8; a width of 0 runs to the end.
    ///
    /// # Panics
    /// If they are not; layouts are constants, so this is a compile error.
    pub const fn new(bit: usize, width: usize) -> Self {
        assert!(bit % 8 == 0 && width % 8 == 0);
        Self { byte: bit / 8, len: width / 8, layouts: PhantomData }
    }
}

impl<L> Tail<L> {
    /// The list from bit `bit`.
    ///
    /// # Panics
    /// If the bit is no multiple of 8; layouts are constants, so this is a compile error.
    pub const fn new(bit: usize) -> Self {
        assert!(bit % 8 == 0);
        Self { byte: bit / 8, layout: PhantomData }
    }
}

/// A command of `N` bytes: its opcode, and zeros behind it.
///
/// ```
/// use uverbs_uapi::mlx5::prm::{Bits, Layout, command, cqc::create_cq_in, opcode};
///
/// assert_eq!(command::<4>(opcode::CREATE_CQ), [0x04, 0, 0, 0]);
/// let mut create = Bits::<create_cq_in, _>::new(command::<{ create_cq_in::SIZE }>(opcode::CREATE_CQ));
/// create.set(create_cq_in::cq_umem_id, 7);
/// ```
pub const fn command<const N: usize>(opcode: u16) -> [u8; N] {
    const { assert!(N >= 2, "a command begins with an opcode of two bytes") }
    let mut bytes = [0; N];
    [bytes[0], bytes[1]] = opcode.to_be_bytes();
    bytes
}

/// A byte buffer seen through a layout.
///
/// A buffer shorter than the layout reads as if it were followed by zeros, because drivers of
/// different age send commands of different length; fields written past its end are dropped.
#[derive(Clone, Copy)]
pub struct Bits<L, B> {
    bytes: B,
    layout: PhantomData<fn(L)>,
}

impl<L, B> Bits<L, B> {
    /// Sees `bytes` as an `L`.
    pub const fn new(bytes: B) -> Self {
        Self { bytes, layout: PhantomData }
    }

    /// The buffer itself.
    pub fn into_inner(self) -> B {
        self.bytes
    }
}

impl<L, B: AsRef<[u8]>> Bits<L, B> {
    /// The value of a field.
    pub fn get(&self, field: Field<L>) -> u64 {
        let bytes = self.bytes.as_ref();
        let end = field.bit + field.width;
        let mut value: u128 = 0;
        for byte in field.bit / 8..end.div_ceil(8) {
            value = value << 8 | u128::from(bytes.get(byte).copied().unwrap_or(0));
        }
        (value >> (end.div_ceil(8) * 8 - end)) as u64 & field.max()
    }

    /// The value of a field of at most 32 bits; of a wider one, its low half.
    pub fn get32(&self, field: Field<L>) -> u32 {
        self.get(field) as u32
    }

    /// Whether a field is not zero.
    pub fn is_set(&self, field: Field<L>) -> bool {
        self.get(field) != 0
    }

    /// The bytes of a span, as many as the buffer holds.
    pub fn span(&self, span: Span<L>) -> &[u8] {
        let bytes = self.bytes.as_ref();
        let end = (span.byte + span.len).min(bytes.len());
        bytes.get(span.byte..end).unwrap_or(&[])
    }

    /// A nested layout.
    pub fn sub<M>(&self, sub: Sub<L, M>) -> Bits<M, &[u8]> {
        let bytes = self.bytes.as_ref();
        let end = if sub.len == 0 { bytes.len() } else { (sub.byte + sub.len).min(bytes.len()) };
        Bits::new(bytes.get(sub.byte..end).unwrap_or(&[]))
    }

    /// The trailing list, as many bytes as the buffer holds.
    pub fn tail(&self, tail: Tail<L>) -> &[u8] {
        self.bytes.as_ref().get(tail.byte..).unwrap_or(&[])
    }

    /// The whole buffer.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

impl<L, B: AsMut<[u8]>> Bits<L, B> {
    /// Sets a field to the low bits of `value`.
    pub fn set(&mut self, field: Field<L>, value: u64) {
        let bytes = self.bytes.as_mut();
        let end = field.bit + field.width;
        let shift = end.div_ceil(8) * 8 - end;
        let mut mask = u128::from(field.max()) << shift;
        let mut value = u128::from(value & field.max()) << shift;
        for byte in (field.bit / 8..end.div_ceil(8)).rev() {
            if let Some(byte) = bytes.get_mut(byte) {
                *byte = *byte & !(mask as u8) | value as u8;
            }
            mask >>= 8;
            value >>= 8;
        }
    }

    /// Copies bytes to the start of a span; bytes that do not fit are dropped.
    pub fn set_span(&mut self, span: Span<L>, from: &[u8]) {
        let bytes = self.bytes.as_mut();
        let end = (span.byte + span.len).min(bytes.len());
        if let Some(to) = bytes.get_mut(span.byte..end) {
            let len = to.len().min(from.len());
            to[..len].copy_from_slice(&from[..len]);
        }
    }

    /// A nested layout, to write to.
    pub fn sub_mut<M>(&mut self, sub: Sub<L, M>) -> Bits<M, &mut [u8]> {
        let bytes = self.bytes.as_mut();
        let end = if sub.len == 0 { bytes.len() } else { (sub.byte + sub.len).min(bytes.len()) };
        Bits::new(bytes.get_mut(sub.byte..end).unwrap_or(&mut []))
    }

    /// Copies bytes to the start of a nested layout; bytes that do not fit are dropped.
    pub fn set_sub<M>(&mut self, sub: Sub<L, M>, from: &[u8]) {
        let to = self.sub_mut(sub).into_inner();
        let len = to.len().min(from.len());
        to[..len].copy_from_slice(&from[..len]);
    }
}

/// Describes layouts: `name[bits] { field: bit, width; span: bit, width bytes;
/// nested: bit, width in layout; list: bit, 0 tail; }`.
macro_rules! layouts {
    ($($name:ident[$bits:literal] { $($field:ident: $bit:literal, $width:literal $($kind:ident)* ;)* })*) => {
        $(
            #[doc = concat!("`struct mlx5_ifc_", stringify!($name), "_bits`")]
            #[allow(non_camel_case_types)]
            #[derive(Debug)]
            pub enum $name {}

            // The kernel names the field, and the device manual defines it: a sentence here would add nothing.
            #[allow(missing_docs, non_upper_case_globals)]
            impl $name {
                $($crate::mlx5::prm::layouts!(@field $field, $bit, $width $($kind)*);)*
            }

            impl $crate::mlx5::prm::Layout for $name {
                const INFO: $crate::mlx5::prm::Info = $crate::mlx5::prm::Info {
                    name: stringify!($name),
                    bits: $bits,
                    fields: &[$($crate::mlx5::prm::FieldInfo {
                        name: stringify!($field),
                        bit: $bit,
                        width: $width,
                        layout: $crate::mlx5::prm::layouts!(@layout $($kind)*),
                    }),*],
                };
            }
        )*

        /// The layouts of this module.
        pub(super) const LAYOUTS: &[$crate::mlx5::prm::Info] =
            &[$(<$name as $crate::mlx5::prm::Layout>::INFO),*];
    };
    (@layout of $sub:ident) => { Some(stringify!($sub)) };
    (@layout $($kind:ident)*) => { None };
    (@field $field:ident, $bit:literal, $width:literal) => {
        pub const $field: $crate::mlx5::prm::Field<Self> =
            $crate::mlx5::prm::Field::new($bit, $width);
    };
    (@field $field:ident, $bit:literal, $width:literal bytes) => {
        pub const $field: $crate::mlx5::prm::Span<Self> =
            $crate::mlx5::prm::Span::new($bit, $width);
    };
    (@field $field:ident, $bit:literal, $width:literal tail) => {
        pub const $field: $crate::mlx5::prm::Tail<Self> = $crate::mlx5::prm::Tail::new($bit);
    };
    (@field $field:ident, $bit:literal, $width:literal of $sub:ident) => {
        pub const $field: $crate::mlx5::prm::Sub<Self, $sub> =
            $crate::mlx5::prm::Sub::new($bit, $width);
    };
}
use layouts;

/// All layouts, by module.
pub const LAYOUTS: &[&[Info]] = &[
    cmd::LAYOUTS,
    cqc::LAYOUTS,
    eqc::LAYOUTS,
    flow::LAYOUTS,
    hca_cap::LAYOUTS,
    mkc::LAYOUTS,
    object::LAYOUTS,
    qpc::LAYOUTS,
    register::LAYOUTS,
    rqc::LAYOUTS,
    srqc::LAYOUTS,
    virtio::LAYOUTS,
    vport::LAYOUTS,
];

#[cfg(test)]
mod tests {
    extern crate std;

    use super::cqc::{cqc, create_cq_in};
    use super::*;
    use std::vec;

    /// Opcode 16 bits, three flags and a number that straddles a byte.
    #[test]
    fn fields_keep_their_neighbours() {
        let mut bits = Bits::<cqc, _>::new([0xffu8; 64]);
        bits.set(cqc::cqe_sz, 0);
        assert_eq!(bits.bytes()[1], 0x1f);
        bits.set(cqc::page_offset, 0b101010);
        assert_eq!(bits.bytes()[10], 0xfa);
        assert_eq!(bits.bytes()[11], 0xbf);
        assert_eq!(bits.get(cqc::page_offset), 0b101010);
        bits.set(cqc::dbr_addr, 0x0123_4567_89ab_cdef);
        assert_eq!(bits.bytes()[0x38..0x40], 0x0123_4567_89ab_cdefu64.to_be_bytes());
    }

    #[test]
    fn a_short_buffer_reads_zero_and_drops_writes() {
        let mut bits = Bits::<cqc, _>::new([0xffu8; 13]);
        assert_eq!(bits.get(cqc::uar_page), 0);
        assert_eq!(bits.get(cqc::log_cq_size), 0x1f);
        assert_eq!(Bits::<cqc, _>::new([0xffu8; 14]).get(cqc::uar_page), 0xff_0000);
        bits.set(cqc::uar_page, 5);
        assert_eq!(bits.get(cqc::dbr_addr), 0);
    }

    #[test]
    fn nested_layouts_and_lists() {
        let mut bits = Bits::<create_cq_in, _>::new(vec![0u8; create_cq_in::SIZE + 16]);
        bits.sub_mut(create_cq_in::cq_context).set(cqc::log_cq_size, 9);
        assert_eq!(bits.bytes()[16 + 12], 9);
        assert_eq!(bits.sub(create_cq_in::cq_context).get(cqc::log_cq_size), 9);
        assert_eq!(bits.tail(create_cq_in::pas).len(), 16);
    }

    #[test]
    fn fields_lie_inside_their_layout_and_names_are_unique() {
        let mut names = vec![];
        for info in LAYOUTS.iter().copied().flatten() {
            names.push(info.name);
            for field in info.fields {
                assert!(field.bit + field.width <= info.bits, "{}.{}", info.name, field.name);
            }
        }
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
