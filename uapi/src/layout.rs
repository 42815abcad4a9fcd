//! Declarations of the ABI's structs: each one once, as a Rust type and as a description of itself.
//!
//! The macro `layouts!` writes the type with its derives, asserts size and offsets at compile time,
//! and leaves a [`Layout`] behind. A test compares these descriptions with the type information of a running kernel, so
//! the assertions pin the kernel's layout and not our reading of it.

/// One field of a struct of the ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// The member's name in the kernel header (a Rust raw identifier keeps its `r#`).
    pub name: &'static str,
    /// Offset in the struct, in bytes.
    pub offset: usize,
    /// Size in bytes.
    pub size: usize,
}

/// A struct of the ABI as this crate declares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The kernel header that declares it, below `include/` or `include/uapi/`.
    pub header: &'static str,
    /// The name of the Rust type.
    pub name: &'static str,
    /// The kernel's struct, followed by the members that lead to this type's part of it.
    ///
    /// Equal to `name`, except for an arm of a union: `rxe_send_wr.wr.rdma`.
    pub kernel: &'static str,
    /// Size in bytes.
    pub size: usize,
    /// The fields in order, padding included.
    pub fields: &'static [Field],
}

/// Declares structs of one kernel header, each field with its offset, and collects their
/// [`Layout`]s in a constant.
///
/// `struct name[size] { field: type = offset, }`; an arm of a kernel union is declared as
/// `struct name[size] of "kernel_struct.member.arm" { … }`.
macro_rules! layouts {
    (
        const $list:ident = $header:literal;
        $(
            $(#[$meta:meta])*
            struct $name:ident [$size:literal] $(of $kernel:literal)? {
                $( $(#[$field_meta:meta])* $field:ident : $type:ty = $offset:literal, )*
            }
        )*
    ) => {
        $(
            $(#[$meta])*
            #[doc = ""]
            #[doc = concat!($size, " bytes, in `", $header, "`.")]
            #[derive(
                ::zerocopy::FromBytes,
                ::zerocopy::IntoBytes,
                ::zerocopy::KnownLayout,
                ::zerocopy::Immutable,
                Clone,
                Copy,
                Debug,
            )]
            #[repr(C)]
            pub struct $name {
                $(
                    $(#[$field_meta])*
                    #[doc = concat!("At byte ", $offset, ".")]
                    pub $field: $type,
                )*
            }

            impl Default for $name {
                /// All bytes zero.
                fn default() -> Self {
                    ::zerocopy::FromZeros::new_zeroed()
                }
            }

            const _: () = {
                assert!(
                    size_of::<$name>() == $size,
                    concat!("size of ", stringify!($name))
                );
                $(
                    assert!(
                        ::core::mem::offset_of!($name, $field) == $offset,
                        concat!("offset of ", stringify!($name), ".", stringify!($field))
                    );
                )*
            };
        )*

        pub(crate) const $list: &[$crate::layout::Layout] = &[
            $( $crate::layout::Layout {
                header: $header,
                name: stringify!($name),
                kernel: $crate::layout::layouts!(@kernel $name $($kernel)?),
                size: size_of::<$name>(),
                fields: &[
                    $( $crate::layout::Field {
                        name: stringify!($field),
                        offset: ::core::mem::offset_of!($name, $field),
                        size: size_of::<$type>(),
                    }, )*
                ],
            }, )*
        ];
    };
    (@kernel $name:ident) => { stringify!($name) };
    (@kernel $name:ident $kernel:literal) => { $kernel };
}
pub(crate) use layouts;

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use crate::reflection::layouts;
    use crate::rxe::rxe_send_wr;

    #[test]
    fn a_description_has_the_fields_in_order_without_gaps() {
        for layout in layouts() {
            let end = layout.fields.iter().fold(0, |end, field| {
                assert_eq!(field.offset, end, "{}.{}", layout.name, field.name);
                end + field.size
            });
            assert_eq!(end, layout.size, "{}", layout.name);
        }
    }

    #[test]
    fn the_default_is_all_zero() {
        assert!(rxe_send_wr::default().as_bytes().iter().all(|&byte| byte == 0));
    }
}
