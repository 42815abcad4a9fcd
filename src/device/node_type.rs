//! The node type of a device, and the transport that follows from it. Pairs with
//! `RDMA_NODE_…` of `uverbs_uapi::nldev` and the `node_type` file of sysfs.

use std::fmt;
use uverbs_uapi::nldev;

/// The node type of a device. A value unknown to this library stays a value.
///
/// ```
/// use uverbs::device::{DriverId, NodeType, Transport};
///
/// // The numbers are the kernel's; one that this library does not know is kept.
/// let adapter = NodeType::new(1);
/// assert_eq!((adapter.get(), adapter.transport()), (1, Transport::InfiniBand));
/// assert_eq!(DriverId::new(17).get(), 17);
/// ```
#[doc(alias = "ibv_node_type")]
#[doc(alias = "ibv_node_type_str")]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeType(u8);

impl NodeType {
    /// A channel adapter: InfiniBand or RoCE.
    pub const CA: NodeType = NodeType(nldev::RDMA_NODE_IB_CA);
    /// An InfiniBand switch.
    pub const SWITCH: NodeType = NodeType(nldev::RDMA_NODE_IB_SWITCH);
    /// An InfiniBand router.
    pub const ROUTER: NodeType = NodeType(nldev::RDMA_NODE_IB_ROUTER);
    /// An iWARP interface.
    pub const RNIC: NodeType = NodeType(nldev::RDMA_NODE_RNIC);
    /// A usNIC interface.
    pub const USNIC: NodeType = NodeType(nldev::RDMA_NODE_USNIC);
    /// A usNIC interface that speaks UDP.
    pub const USNIC_UDP: NodeType = NodeType(nldev::RDMA_NODE_USNIC_UDP);
    /// A device with a transport of its own.
    pub const UNSPECIFIED: NodeType = NodeType(nldev::RDMA_NODE_UNSPECIFIED);

    /// From the kernel's number.
    pub const fn new(raw: u8) -> Self {
        NodeType(raw)
    }

    /// The kernel's number.
    pub const fn get(self) -> u8 {
        self.0
    }

    /// The transport that such a node speaks.
    pub const fn transport(self) -> Transport {
        match self {
            NodeType::CA | NodeType::SWITCH | NodeType::ROUTER => Transport::InfiniBand,
            NodeType::RNIC => Transport::Iwarp,
            NodeType::USNIC => Transport::Usnic,
            NodeType::USNIC_UDP => Transport::UsnicUdp,
            NodeType::UNSPECIFIED => Transport::Unspecified,
            _ => Transport::Unknown,
        }
    }
}

impl fmt::Display for NodeType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            NodeType::CA => "channel adapter",
            NodeType::SWITCH => "switch",
            NodeType::ROUTER => "router",
            NodeType::RNIC => "RNIC",
            NodeType::USNIC => "usNIC",
            NodeType::USNIC_UDP => "usNIC UDP",
            NodeType::UNSPECIFIED => "unspecified",
            NodeType(raw) => return write!(f, "node type {raw}"),
        })
    }
}

impl fmt::Debug for NodeType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeType({}: {self})", self.0)
    }
}

/// The transport that a device speaks, as `struct ibv_device` has it. RoCE counts as InfiniBand;
/// [`Protocol`](super::Protocol) tells them apart.
#[doc(alias = "ibv_transport_type")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Transport {
    /// InfiniBand transport, over InfiniBand or Ethernet links.
    InfiniBand,
    /// iWARP.
    Iwarp,
    /// usNIC.
    Usnic,
    /// usNIC over UDP.
    UsnicUdp,
    /// One of the device's own.
    Unspecified,
    /// The node type is not known to this library.
    Unknown,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::InfiniBand => "InfiniBand",
            Transport::Iwarp => "iWARP",
            Transport::Usnic => "usNIC",
            Transport::UsnicUdp => "usNIC UDP",
            Transport::Unspecified => "unspecified",
            Transport::Unknown => "unknown",
        })
    }
}
