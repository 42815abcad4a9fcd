//! The wire protocol of a device's ports. Pairs with `RDMA_NLDEV_ATTR_DEV_PROTOCOL`.

use std::fmt;

/// The wire protocol of a device, judged by its first port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Protocol {
    /// InfiniBand.
    InfiniBand,
    /// RDMA over converged Ethernet, either version.
    Roce,
    /// iWARP.
    Iwarp,
    /// Omni-Path.
    OmniPath,
    /// usNIC.
    Usnic,
    /// One that this library has no name for, in the kernel's spelling.
    Other(Box<str>),
}

impl Protocol {
    /// From the kernel's spelling.
    pub(super) fn from_kernel(text: &str) -> Self {
        match text {
            "ib" => Protocol::InfiniBand,
            "roce" => Protocol::Roce,
            "iw" => Protocol::Iwarp,
            "opa" => Protocol::OmniPath,
            "usnic" => Protocol::Usnic,
            other => Protocol::Other(other.into()),
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Protocol::InfiniBand => "InfiniBand",
            Protocol::Roce => "RoCE",
            Protocol::Iwarp => "iWARP",
            Protocol::OmniPath => "Omni-Path",
            Protocol::Usnic => "usNIC",
            Protocol::Other(text) => text,
        })
    }
}
