//! Path records: the paths between two ports.
//!
//! Pairs with `path_rec_table` in `core/sa_query.c`, with `cma_resolve_iboe_route`, and with the subnet administrator
//! of an InfiniBand subnet, whose part the fabric plays.

use super::Ports;
use super::message::Gid;
use crate::driver::Driver;
use uverbs_uapi::ah::{ib_uverbs_ah_attr, ib_uverbs_global_route};

/// A path record as it travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Path(pub(super) [u8; 64]);

/// The selector of an exact value.
const EXACTLY: u8 = 2 << 6;

impl Path {
    pub(super) fn dlid(&self) -> u16 {
        u16::from_be_bytes([self.0[40], self.0[41]])
    }

    pub(super) fn pkey(&self) -> u16 {
        u16::from_be_bytes([self.0[50], self.0[51]])
    }

    pub(super) fn service_level(&self) -> u8 {
        self.0[53] & 0xf
    }

    /// `enum ib_mtu`.
    pub(super) fn mtu(&self) -> u8 {
        self.0[54] & 0x3f
    }

    /// The same path with another MTU.
    pub(super) fn with_mtu(mut self, mtu: u8) -> Path {
        self.0[54] = EXACTLY | mtu & 0x3f;
        self
    }

    /// The longest time that a packet is under way: 4.096 µs · 2ⁿ.
    pub(super) fn packet_life_time(&self) -> u8 {
        self.0[56] & 0x3f
    }
}

impl Ports<'_> {
    /// The path from one address to another; `None` if no port has one of them, and the other one is not outside of the
    /// fabric.
    pub(super) fn path(&self, from: &Gid, to: &Gid, tos: u8) -> Option<Path> {
        let (own, own_index) = self.find(from)?;
        let leads_out = self.leads_out(own);
        let own = &self.0[own];
        let (peer, peer_gid) = match self.find(to) {
            Some((peer, index)) => {
                let peer = &self.0[peer];
                (peer, peer.interface.gids.get(index)?.gid)
            }
            // Nothing is known of it: the sender's MTU and rate count, as on RoCE.
            None if leads_out => (own, *to),
            None => return None,
        };
        // On RoCE as `cma_resolve_iboe_route`: 40 Gbit/s is the highest rate that it knows. On InfiniBand 100 Gbit/s.
        let (dlid, slid, rate, life, hops) = match (&own.infiniband, &peer.infiniband) {
            (Some((slid, _)), Some((dlid, _))) => (*dlid, *slid, 16, 18, 0),
            _ => (0, 0, 7, 16, 64),
        };
        let mtu = own.interface.mtu.min(peer.interface.mtu);
        let mut record = [0; 64];
        record[8..24].copy_from_slice(&peer_gid);
        record[24..40].copy_from_slice(&own.interface.gids.get(own_index)?.gid);
        record[40..42].copy_from_slice(&dlid.to_be_bytes());
        record[42..44].copy_from_slice(&slid.to_be_bytes());
        record[47] = hops;
        record[48] = tos;
        // Reversible, and one path.
        record[49] = 1 << 7 | 1;
        record[50..52].copy_from_slice(&own.pkey().to_be_bytes());
        record[54..57].copy_from_slice(&[EXACTLY | mtu, EXACTLY | rate, EXACTLY | life]);
        Some(Path(record))
    }

    /// The address vector of the peer at address `to`, from the GID at `sgid_index`.
    pub(super) fn vector_to(&self, to: &Gid, sgid_index: usize, tos: u8) -> ib_uverbs_ah_attr {
        let vector = ib_uverbs_ah_attr { port_num: 1, ..Default::default() };
        // Without a GRH within the subnet.
        if let Some((dlid, _)) = self.infiniband_of(to) {
            return ib_uverbs_ah_attr { dlid: *dlid, ..vector };
        }
        let grh = ib_uverbs_global_route {
            dgid: *to,
            sgid_index: sgid_index as u8,
            hop_limit: 64,
            traffic_class: tos,
            ..Default::default()
        };
        ib_uverbs_ah_attr { grh, is_global: 1, ..vector }
    }

    /// The GID of the port that has an address.
    pub(super) fn port_gid(&self, at: &Gid) -> Gid {
        let found = self.find(at);
        let entry = found.and_then(|(device, index)| self.0[device].interface.gids.get(index));
        entry.map_or(*at, |entry| entry.gid)
    }

    /// The LID and the partition keys of the InfiniBand port that has an address.
    pub(super) fn infiniband_of(&self, at: &Gid) -> Option<&(u16, Vec<u16>)> {
        self.0[self.find(at)?.0].infiniband.as_ref()
    }

    /// The index of a partition key at a port.
    pub(super) fn pkey_index(&self, device: usize, pkey: u16) -> Option<u16> {
        let Some((_, table)) = &self.0.get(device)?.infiniband else { return Some(0) };
        table.iter().position(|entry| entry & 0x7fff == pkey & 0x7fff).map(|index| index as u16)
    }

    /// Whether packets of IP get from one device to another: over Ethernet, or over InfiniBand within a partition.
    pub(super) fn share_network(&self, one: usize, other: usize) -> bool {
        let (Some(one), Some(other)) = (self.0.get(one), self.0.get(other)) else { return false };
        one.infiniband.is_some() == other.infiniband.is_some()
            && uverbs_connectx::port::share_partition(one.pkey(), other.pkey())
    }
}

impl Driver {
    /// The partition key of the network interface: on InfiniBand that at index 0.
    pub(super) fn pkey(&self) -> u16 {
        let table = self.infiniband.as_ref().map(|(_, pkeys)| pkeys);
        table.map_or(u16::MAX, |pkeys| pkeys.first().copied().unwrap_or(u16::MAX))
    }
}
