//! What a device or a machine may lack. A skip names one of these, and the lab's table decides
//! whether the device under test may lack it.

use std::fmt;

macro_rules! capabilities {
    ($( $(#[$doc:meta])* $name:ident = $text:literal; )*) => {
        /// A capability; displayed as the lab's table spells it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Capability { $( $(#[$doc])* $name, )* }

        impl fmt::Display for Capability {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $( Capability::$name => $text, )* })
            }
        }
    };
}

capabilities! {
    /// Listing the objects of a file.
    InfoHandles = "info_handles";
    /// Making a completion queue larger or smaller.
    CqResize = "cq_resize";
    /// Shared receive queues.
    Srq = "srq";
    /// Links, namespaces and modules may be changed, and this process is root.
    Lab = "lab";
}
