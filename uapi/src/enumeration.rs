//! Declarations of the kernel's numbers: ids as constants, enums as open newtypes, flag sets as bitflags, and each of
//! them as a description of itself.
//!
//! As with [`layout`](crate::layout) for structs, a test compares the declarations by name with the type information of
//! a running kernel.

/// One enumerator of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Enumerator {
    /// Its name in the kernel header.
    pub name: &'static str,
    /// Its value.
    pub value: u64,
}

/// An enum of the kernel, or a group of macros of one header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Enumeration {
    /// The kernel header that declares it, below `include/` or `include/uapi/`.
    pub header: &'static str,
    /// The enum's name, `_` for an anonymous one, [`DEFINE`] for preprocessor macros.
    pub name: &'static str,
    /// Its enumerators, as far as this crate has them.
    pub enumerators: &'static [Enumerator],
}

/// The [`Enumeration::name`] of numbers that the header gives as preprocessor macros.
pub const DEFINE: &str = "#define";

/// Declares enumerators as plain constants of one integer type.
///
/// `enum name: u16 { A = 0, B = 1, }`, `_` for an anonymous enum, `"#define"` for macros.
macro_rules! ids {
    (
        const $list:ident = $header:literal;
        $(
            enum $name:tt : $type:ty {
                $( $(#[$meta:meta])* $id:ident = $value:expr, )*
            }
        )*
    ) => {
        $( $(
            $(#[$meta])*
            #[doc = $crate::enumeration::ids!(@doc $name $header)]
            pub const $id: $type = $value;
        )* )*

        pub(crate) const $list: &[$crate::enumeration::Enumeration] = &[
            $( $crate::enumeration::Enumeration {
                header: $header,
                name: $crate::enumeration::ids!(@name $name),
                enumerators: &[
                    $( $crate::enumeration::Enumerator {
                        name: stringify!($id),
                        value: $id as u64,
                    }, )*
                ],
            }, )*
        ];
    };
    (@name $name:literal) => { $name };
    (@name $name:tt) => { stringify!($name) };
    (@doc $name:literal $header:literal) => { concat!("A macro of `", $header, "`.") };
    (@doc _ $header:literal) => { concat!("Of an anonymous enum in `", $header, "`.") };
    (@doc $name:tt $header:literal) => {
        concat!("Of `enum ", stringify!($name), "` in `", $header, "`.")
    };
}
pub(crate) use ids;

/// Declares kernel enums as newtypes: a value that this crate does not know is a value like any
/// other. `Debug` prints the enumerator's name, or the number.
macro_rules! open_enums {
    (
        const $list:ident = $header:literal;
        $(
            $(#[$meta:meta])*
            enum $name:ident : $type:ty {
                $( $(#[$id_meta:meta])* $id:ident = $value:expr, )*
            }
        )*
    ) => {
        $(
            $(#[$meta])*
            #[doc = ""]
            #[doc = concat!("`enum ", stringify!($name), "` in `", $header, "`.")]
            #[derive(
                ::zerocopy::FromBytes,
                ::zerocopy::IntoBytes,
                ::zerocopy::KnownLayout,
                ::zerocopy::Immutable,
                Clone,
                Copy,
                PartialEq,
                Eq,
                PartialOrd,
                Ord,
                Hash,
                Default,
            )]
            #[repr(transparent)]
            pub struct $name(pub $type);

            impl $name {
                $(
                    $(#[$id_meta])*
                    #[doc = concat!("`", stringify!($id), "`")]
                    pub const $id: Self = Self($value);
                )*

                /// The kernel's name of this value, if this crate knows it.
                pub const fn name(self) -> Option<&'static str> {
                    match self {
                        $( Self::$id => Some(stringify!($id)), )*
                        _ => None,
                    }
                }
            }

            impl ::core::fmt::Debug for $name {
                fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                    match self.name() {
                        Some(name) => f.write_str(name),
                        None => write!(f, concat!(stringify!($name), "({})"), self.0),
                    }
                }
            }
        )*

        pub(crate) const $list: &[$crate::enumeration::Enumeration] = &[
            $( $crate::enumeration::Enumeration {
                header: $header,
                name: stringify!($name),
                enumerators: &[
                    $( $crate::enumeration::Enumerator {
                        name: stringify!($id),
                        value: $name::$id.0 as u64,
                    }, )*
                ],
            }, )*
        ];
    };
}
pub(crate) use open_enums;

/// Declares kernel flag sets as bitflags that keep bits this crate does not know.
macro_rules! flag_sets {
    (
        const $list:ident = $header:literal;
        $(
            $(#[$meta:meta])*
            enum $name:ident : $type:ty {
                $( $(#[$id_meta:meta])* $id:ident = $value:expr, )*
            }
        )*
    ) => {
        $(
            $(#[$meta])*
            #[doc = ""]
            #[doc = concat!("`", stringify!($name), "` in `", $header, "`.")]
            #[derive(
                ::zerocopy::FromBytes,
                ::zerocopy::IntoBytes,
                ::zerocopy::KnownLayout,
                ::zerocopy::Immutable,
                Clone,
                Copy,
                PartialEq,
                Eq,
                PartialOrd,
                Ord,
                Hash,
                Default,
            )]
            #[repr(transparent)]
            pub struct $name($type);

            ::bitflags::bitflags! {
                impl $name: $type {
                    $(
                        $(#[$id_meta])*
                        #[doc = concat!("`", stringify!($id), "`")]
                        const $id = $value;
                    )*
                    // A newer kernel may set bits that have no name here yet.
                    const _ = !0;
                }
            }

            impl ::core::fmt::Debug for $name {
                fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                    if self.is_empty() {
                        return f.write_str("0");
                    }
                    ::bitflags::parser::to_writer(self, f)
                }
            }
        )*

        pub(crate) const $list: &[$crate::enumeration::Enumeration] = &[
            $( $crate::enumeration::Enumeration {
                header: $header,
                name: stringify!($name),
                enumerators: &[
                    $( $crate::enumeration::Enumerator {
                        name: stringify!($id),
                        value: $name::$id.bits() as u64,
                    }, )*
                ],
            }, )*
        ];
    };
}
pub(crate) use flag_sets;

#[cfg(test)]
mod tests {
    extern crate std;

    use std::format;

    use zerocopy::{FromBytes, IntoBytes};

    use crate::mr::ib_uverbs_access_flags;
    use crate::qp::ib_qp_state;
    use crate::reflection::enumerations;

    #[test]
    fn an_unknown_value_of_an_enum_is_kept() {
        let state = ib_qp_state::read_from_bytes(&[9]).unwrap();
        assert_eq!(state, ib_qp_state(9));
        assert_eq!(state.name(), None);
        assert_eq!(format!("{state:?}"), "ib_qp_state(9)");
        assert_eq!(format!("{:?}", ib_qp_state(3)), "IB_QPS_RTS");
    }

    #[test]
    fn unknown_flags_are_kept() {
        let flags =
            ib_uverbs_access_flags::read_from_bytes(&0x1000_0003_u32.to_ne_bytes()).unwrap();
        assert!(flags.contains(ib_uverbs_access_flags::IB_UVERBS_ACCESS_REMOTE_WRITE));
        assert_eq!(ib_uverbs_access_flags::from_bits(0x1000_0003), Some(flags));
        assert_eq!(flags.as_bytes(), 0x1000_0003_u32.to_ne_bytes());
        assert_eq!(
            format!("{flags:?}"),
            "IB_UVERBS_ACCESS_LOCAL_WRITE | IB_UVERBS_ACCESS_REMOTE_WRITE | 0x10000000"
        );
        assert_eq!(format!("{:?}", ib_uverbs_access_flags::default()), "0");
    }

    #[test]
    fn a_description_has_names_and_values() {
        let states = enumerations().find(|e| e.name == "ib_qp_state").unwrap();
        assert_eq!(states.header, "rdma/ib_verbs.h");
        let rts = states.enumerators.iter().find(|e| e.name == "IB_QPS_RTS").unwrap();
        assert_eq!(rts.value, 3);
    }
}
