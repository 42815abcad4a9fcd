//! What a device or a machine may lack. A skip names one of these, and the lab's table decides
//! whether the device under test may lack it.

use std::fmt;
use uverbs::QpType;

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
    /// Address handles.
    Ah = "ah";
    /// Fetch and add, compare and swap.
    Atomic = "atomic";
    /// Writing eight bytes in one piece.
    AtomicWrite = "atomic_write";
    /// Making a completion queue larger or smaller.
    CqResize = "cq_resize";
    /// Listing the objects of a file.
    InfoHandles = "info_handles";
    /// Links, namespaces and modules may be changed, and this process is root.
    Lab = "lab";
    /// Multicast groups.
    Multicast = "multicast";
    /// Reliable connections.
    Rc = "rc";
    /// Shared receive queues.
    Srq = "srq";
    /// An event when few receives are left.
    SrqLimit = "srq_limit";
    /// A second device, joined to the first by a cable.
    TwoDevices = "two_devices";
    /// Unreliable connections.
    Uc = "uc";
    /// Datagrams.
    Ud = "ud";
}

impl Capability {
    /// What a device has that can make queue pairs of this type.
    pub(crate) fn of(qp_type: QpType) -> Capability {
        match qp_type {
            QpType::UC => Capability::Uc,
            QpType::UD => Capability::Ud,
            _ => Capability::Rc,
        }
    }
}
