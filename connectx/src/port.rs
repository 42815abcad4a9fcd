//! The port of a function: link, addresses, counters.
//!
//! Pairs with the vport commands and with the registers behind ACCESS_REG.

use uverbs_uapi::mlx5::prm::vport::{nic_vport_context, roce_addr_layout};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::path::{L3, Path, Source};

/// Entries of the RoCE address table, and of the GID table of an InfiniBand port.
pub const GIDS: usize = 16;

/// The bit of a partition key that a full member has.
const FULL_MEMBER: u16 = 0x8000;

/// Whether two ports with these keys may exchange packets: both are of one partition, and not both are limited
/// members.
pub fn share_partition(one: u16, other: u16) -> bool {
    let (partition, members) = (one & !FULL_MEMBER, (one | other) & FULL_MEMBER);
    partition != 0 && partition == other & !FULL_MEMBER && members != 0
}

/// Largest MTU, which is also the default.
pub const MAX_MTU: u16 = 9978;

const ADDRESS_LIST_UC: u64 = 0;

/// Packets and bytes in one direction.
#[derive(Debug, Default, Clone, Copy)]
pub struct Traffic {
    pub(crate) packets: u64,
    pub(crate) octets: u64,
}

impl Traffic {
    pub(crate) fn add(&mut self, packets: u64, octets: usize) {
        self.packets += packets;
        self.octets += octets as u64;
    }
}

/// Traffic in one direction, by type of destination.
#[derive(Debug, Default, Clone, Copy)]
pub struct TrafficByCast {
    pub(crate) unicast: Traffic,
    pub(crate) multicast: Traffic,
    pub(crate) broadcast: Traffic,
}

impl TrafficByCast {
    /// Counts an Ethernet frame.
    pub(crate) fn add_frame(&mut self, frame: &[u8]) {
        let cast = match frame.first_chunk::<6>() {
            Some([0xff, 0xff, 0xff, 0xff, 0xff, 0xff]) => &mut self.broadcast,
            Some([first, ..]) if first & 1 != 0 => &mut self.multicast,
            _ => &mut self.unicast,
        };
        cast.add(1, frame.len());
    }

    /// Counts packets between queue pairs, ACKs and NAKs as well: *PortXmitPkts* and *PortXmitData* of the InfiniBand
    /// specification (PortCountersExtended) leave out link packets only.
    pub(crate) fn add_packets(&mut self, path: &Path, packets: u32, octets: usize) {
        let cast = if path.is_multicast() { &mut self.multicast } else { &mut self.unicast };
        cast.add(packets.into(), octets);
    }

    /// The sum.
    pub(crate) fn total(&self) -> Traffic {
        let all = [self.unicast, self.multicast, self.broadcast];
        Traffic {
            packets: all.iter().map(|cast| cast.packets).sum(),
            octets: all.iter().map(|cast| cast.octets).sum(),
        }
    }
}

/// The most ports of a LAG.
const LAG_PORTS: usize = 2;

/// The port.
pub struct Port {
    /// Number of the function; the addresses derive from it.
    pub(crate) number: u32,
    pub(crate) context: Bits<nic_vport_context, Vec<u8>>,
    /// Lists of unicast addresses, multicast addresses and VLANs, as the driver wrote them.
    pub(crate) address_lists: [Vec<u8>; 3],
    pub(crate) gids: Vec<Bits<roce_addr_layout, Vec<u8>>>,
    /// The addresses of that table, which each packet needs.
    addresses: [Option<Source>; GIDS],
    /// GID and VLAN of each, to compare with those of a packet at once; zeros for none.
    keys: [(u128, u32); GIDS],
    /// The [`last_byte`]s of all of them.
    last_bytes: u64,
    /// The entry behind the last one that is set.
    addresses_end: usize,
    pub(crate) link_up: bool,
    /// Whether each port of the LAG behind the function is up. Its own link is that of the LAG.
    pub(crate) lag_up: [bool; LAG_PORTS],
    pub(crate) admin_up: bool,
    pub(crate) mtu: u16,
    /// Capabilities of an InfiniBand port that software announces: connection management and the like.
    pub(crate) managed: u32,
    pub(crate) sent: TrafficByCast,
    pub(crate) received: TrafficByCast,
}

impl Port {
    /// The port of function `number`, with the link up.
    pub fn new(number: u32) -> Self {
        let mut context = Bits::<nic_vport_context, _>::new(vec![0; nic_vport_context::SIZE]);
        let guid = 0x0c42_a103_0000_0000 | u64::from(number);
        context.set(nic_vport_context::node_guid, guid);
        context.set(nic_vport_context::port_guid, guid);
        context.set(nic_vport_context::system_image_guid, guid);
        context.set(nic_vport_context::permanent_address, 0x0c42_a100_0000 | u64::from(number));
        context.set(nic_vport_context::mtu, 1500);
        Self {
            number,
            context,
            address_lists: [vec![], vec![], vec![]],
            gids: (0..GIDS).map(|_| Bits::new(vec![0; roce_addr_layout::SIZE])).collect(),
            addresses: [None; GIDS],
            keys: [(0, 0); GIDS],
            last_bytes: 0,
            addresses_end: 0,
            link_up: true,
            lag_up: [true; LAG_PORTS],
            admin_up: true,
            mtu: MAX_MTU,
            managed: 0,
            sent: TrafficByCast::default(),
            received: TrafficByCast::default(),
        }
    }

    /// The MAC that the port was made with.
    pub(crate) fn permanent_mac(&self) -> [u8; 6] {
        let [_, _, mac @ ..] = self.context.get(nic_vport_context::permanent_address).to_be_bytes();
        mac
    }

    /// Whether the port sends and receives.
    pub fn active(&self) -> bool {
        self.link_up && self.admin_up
    }

    /// LID of an InfiniBand port.
    pub fn lid(&self) -> u16 {
        self.number as u16 + 1
    }

    /// The GID of an InfiniBand port.
    pub fn ib_gid(&self) -> [u8; 16] {
        let guid = self.context.get(nic_vport_context::port_guid);
        (0xfe80_0000_0000_0000u128 << 64 | u128::from(guid)).to_be_bytes()
    }

    /// The GID at `index` of a RoCE port, if one is set there.
    pub fn roce_gid(&self, index: usize) -> Option<[u8; 16]> {
        self.roce_address(index).map(|address| address.gid)
    }

    /// The RoCE address at `index`, if one is set there.
    pub(crate) fn roce_address(&self, index: usize) -> Option<Source> {
        *self.addresses.get(index)?
    }

    /// Whether a RoCE address of the port is this one, in this VLAN.
    pub(crate) fn has_roce_address(&self, gid: [u8; 16], vlan: Option<u16>) -> bool {
        // Each packet asks its sender's port first, which rarely has the address.
        self.last_bytes & last_byte(gid) != 0
            && self.keys[..self.addresses_end].contains(&key(gid, vlan))
            && gid != [0; 16]
    }

    /// Sets an entry of the table of RoCE addresses; returns false if it has no such entry.
    pub(crate) fn set_gid(&mut self, index: usize, entry: Vec<u8>) -> bool {
        let Some(place) = self.gids.get_mut(index) else { return false };
        *place = Bits::new(entry);
        let address = parse_address(place);
        self.addresses[index] = address;
        self.keys[index] = address.map_or((0, 0), |address| key(address.gid, address.vlan));
        let set = self.addresses.iter().flatten();
        self.last_bytes = set.fold(0, |bits, address| bits | last_byte(address.gid));
        self.addresses_end =
            GIDS - self.addresses.iter().rev().take_while(|entry| entry.is_none()).count();
        true
    }

    /// Clears the RoCE addresses.
    pub(crate) fn clear_gids(&mut self) {
        self.gids = (0..GIDS).map(|_| Bits::new(vec![0; roce_addr_layout::SIZE])).collect();
        self.addresses = [None; GIDS];
        self.keys = [(0, 0); GIDS];
        self.last_bytes = 0;
        self.addresses_end = 0;
    }

    /// Counts a datagram with a wrong Q_Key.
    pub(crate) fn count_qkey_violation(&mut self) {
        let counter = nic_vport_context::qkey_violation_counter;
        // The counter saturates.
        let count = self.context.get(counter).saturating_add(1).min(0xffff);
        self.context.set(counter, count);
    }

    /// Whether the port receives frames to this address.
    pub fn accepts(&self, mac: &[u8; 6]) -> bool {
        let own = self.context.get(nic_vport_context::permanent_address).to_be_bytes();
        own[2..] == mac[..]
            || mac[0] & 1 != 0
            || self.context.is_set(nic_vport_context::promisc_all)
            || self.address_lists[ADDRESS_LIST_UC as usize]
                .chunks_exact(8)
                .any(|entry| entry[2..] == mac[..])
    }
}

/// A bit for the last byte of a GID: addresses with different bits differ.
fn last_byte(gid: [u8; 16]) -> u64 {
    1 << (gid[15] % 64)
}

fn key(gid: [u8; 16], vlan: Option<u16>) -> (u128, u32) {
    (u128::from_ne_bytes(gid), vlan.map_or(u32::MAX, u32::from))
}

/// The address in an entry of the table; `None` if none is set.
fn parse_address(entry: &Bits<roce_addr_layout, Vec<u8>>) -> Option<Source> {
    let gid: [u8; 16] = entry.span(roce_addr_layout::source_l3_address).try_into().ok()?;
    if gid == [0; 16] {
        return None;
    }
    let tagged = entry.is_set(roce_addr_layout::vlan_valid);
    let v2 = entry.get(roce_addr_layout::roce_version) != 0;
    let v6 = entry.get(roce_addr_layout::roce_l3_type) != 0;
    let l3 = match (v2, v6) {
        (false, _) => L3::Grh,
        (true, true) => L3::V6,
        (true, false) => L3::V4,
    };
    let vlan = tagged.then(|| entry.get(roce_addr_layout::vlan_id) as u16);
    Some(Source { gid, lid: 0, vlan, l3 })
}

#[cfg(test)]
mod tests {
    use super::share_partition;

    #[test]
    fn limited_members_of_a_partition_do_not_reach_each_other() {
        assert!(share_partition(0xffff, 0xffff) && share_partition(0x8123, 0x0123));
        assert!(!share_partition(0x0123, 0x0123), "both limited");
        assert!(!share_partition(0x8123, 0x8124), "two partitions");
        assert!(!share_partition(0x8000, 0x8000), "no partition");
    }
}
