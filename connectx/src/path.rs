//! Paths of packets between queue pairs: addresses, service level, VLAN.
//!
//! Pairs with the address path of a queue pair and with the address vector of a datagram. The transport hands a path
//! through as it is: the sender's device completes it when a packet leaves, and the receiver's device reads it.

/// No queue pair's number. The BTH has no source QPN, and only devices of one fabric tell each other.
pub(crate) const UNKNOWN_QPN: u32 = u32::MAX;

/// Destination of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Destination {
    /// The port with this LID.
    Lid(u16),
    /// The port with this GID.
    Gid([u8; 16]),
    /// Every port with members of this multicast group.
    Group([u8; 16]),
}

/// Type of the header in the 40 bytes in front of a datagram, as the CQE tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub(crate) enum L3 {
    /// GRH: InfiniBand, and RoCE version 1.
    #[default]
    Grh = 0,
    /// IPv6.
    V6 = 1,
    /// IPv4.
    V4 = 2,
}

/// The global route of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Route {
    /// Destination GID.
    pub(crate) gid: [u8; 16],
    /// Traffic class.
    pub(crate) tclass: u8,
    /// Hop limit.
    pub(crate) hop_limit: u8,
    /// Flow label.
    pub(crate) flow_label: u32,
}

/// Where a packet goes, and where it comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Path {
    pub(crate) destination: Destination,
    /// Index of the source address in the table of the sender's port.
    pub(crate) source_index: u8,
    /// Source QPN; [`UNKNOWN_QPN`] of a connection's packet from outside of the process.
    pub(crate) source_qpn: u32,
    /// Service level.
    pub(crate) sl: u8,
    /// UDP source port of RoCE v2.
    pub(crate) source_port: u16,
    /// Priority of a packet with a VLAN tag.
    pub(crate) priority: u8,
    /// The global route of a datagram.
    pub(crate) route: Option<Route>,
    /// The source address, once the packet has left.
    pub(crate) source: Source,
}

/// The source address of a packet, as the tables of the port have it when the packet leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Source {
    /// Source GID.
    pub(crate) gid: [u8; 16],
    /// Source LID on InfiniBand.
    pub(crate) lid: u16,
    /// The VLAN on Ethernet; none if the packet has no tag.
    pub(crate) vlan: Option<u16>,
    /// Type of the header of a datagram.
    pub(crate) l3: L3,
}

impl Path {
    /// Octets of a packet beside those from BTH to padding: all between the start of the packet and the VCRC, which
    /// *PortXmitData* counts, or between the start and the FCS of an Ethernet frame.
    pub(crate) fn framing(&self) -> usize {
        const ETHERNET: usize = 14;
        const TAG: usize = 4;
        const LRH: usize = 8;
        const V4: usize = 20;
        /// Of a GRH, too.
        const V6: usize = 40;
        const UDP: usize = 8;
        const ICRC: usize = 4;
        // A port of Ethernet has no LID.
        if self.source.lid != 0 {
            return LRH + if self.route.is_some() { V6 } else { 0 } + ICRC;
        }
        let tag = if self.source.vlan.is_some() { TAG } else { 0 };
        let network = match self.source.l3 {
            L3::Grh => V6,
            L3::V6 => V6 + UDP,
            L3::V4 => V4 + UDP,
        };
        ETHERNET + tag + network + ICRC
    }

    /// Whether it leads to a multicast group.
    pub(crate) fn is_multicast(&self) -> bool {
        matches!(self.destination, Destination::Group(_))
    }

    /// The VLAN tag: priority in bits 13 to 15, VLAN in bits 0 to 11.
    pub(crate) fn vlan_tag(&self) -> Option<u16> {
        self.source.vlan.map(|vlan| u16::from(self.priority) << 13 | vlan)
    }
}
