//! Network interfaces of the fabric: addresses, and the table of GIDs that follows from them.
//!
//! Pairs with `core/roce_gid_mgmt.c`: each address has an entry for RoCE v1 and one for v2.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use uverbs_uapi::port::ib_mtu;

/// An entry of a GID table.
#[derive(Clone, Debug)]
pub(crate) struct GidEntry {
    pub(crate) gid: [u8; 16],
    /// As `enum ib_gid_type` numbers it: 0 for InfiniBand, 1 for RoCE v1, 2 for v2.
    pub(crate) kind: u32,
}

impl GidEntry {
    /// That of an InfiniBand port.
    pub(crate) fn infiniband(gid: [u8; 16]) -> GidEntry {
        GidEntry { gid, kind: INFINIBAND }
    }

    /// Whether its packets have an IPv6 header.
    pub(crate) fn is_ipv6_packet(&self) -> bool {
        self.kind == ROCE_V2 && Ipv6Addr::from(self.gid).to_ipv4_mapped().is_none()
    }

    /// The version as firmware numbers it.
    pub(crate) fn firmware_version(&self) -> u64 {
        match self.kind {
            ROCE_V1 => 0,
            _ => 2,
        }
    }
}

const INFINIBAND: u32 = 0;
const ROCE_V1: u32 = 1;
const ROCE_V2: u32 = 2;

/// The network interface of a port.
#[derive(Clone, Debug)]
pub(crate) struct Interface {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) mac: [u8; 6],
    /// The hardware address: the MAC, or 20 bytes of IP over InfiniBand, which end with the port's GID.
    pub(crate) hardware: Vec<u8>,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) gids: Vec<GidEntry>,
    /// The port's MTU, `enum ib_mtu`.
    pub(crate) mtu: u8,
}

impl Interface {
    /// The interface of the device with this number: with a link-local address, and these or one of 10.0.0.0/8.
    pub(crate) fn numbered(number: usize, addresses: &[IpAddr]) -> Interface {
        // Locally administered; below 2^16 devices.
        let [high, low] = (number as u16).to_be_bytes();
        let mac = [0x02, 0x75, 0x76, 0x00, high, low];
        let [a, b, c, d, e, f] = mac;
        let link_local =
            Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f]);
        let [high, low] = (number as u16 + 1).to_be_bytes();
        let usual = [Ipv4Addr::new(10, 0, high, low).into()];
        let others = if addresses.is_empty() { &usual } else { addresses };
        let addresses: Vec<IpAddr> =
            std::iter::once(link_local.into()).chain(others.iter().copied()).collect();
        let entry = |address: &IpAddr, kind| GidEntry {
            gid: match address {
                IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
                IpAddr::V6(address) => address.octets(),
            },
            kind,
        };
        let gids = addresses
            .iter()
            .flat_map(|address| [ROCE_V1, ROCE_V2].map(|kind| entry(address, kind)))
            .collect();
        Interface {
            index: number as u32 + 2,
            name: format!("sim{number}"),
            mac,
            hardware: mac.into(),
            addresses,
            gids,
            mtu: ib_mtu::IB_MTU_1024.0,
        }
    }

    /// The interface of a device whose port has one address outside of the process, and that MTU: its only GID is of
    /// RoCE v2.
    pub(crate) fn outside(address: IpAddr, mtu: u8) -> Interface {
        let mut interface = Interface::numbered(0, &[address]);
        let is_its = |gid: &IpAddr| *gid == address;
        interface.addresses.retain(is_its);
        let of_gid = |entry: &GidEntry| IpAddr::from(entry.gid).to_canonical();
        interface.gids.retain(|entry| entry.kind == ROCE_V2 && is_its(&of_gid(entry)));
        interface.mtu = mtu;
        interface
    }

    /// Makes it that of IP over InfiniBand (IPoIB) of the port with this GID. Its IP addresses and GIDs are independent
    /// of each other.
    pub(crate) fn be_over_infiniband(&mut self, gid: [u8; 16]) {
        /// Flags and the queue pair of IPoIB. None is there: packets of IP are not modelled.
        const QUEUE_PAIR: [u8; 4] = [0; 4];
        self.hardware = [&QUEUE_PAIR[..], &gid].concat();
        // As `addrconf_ifid_infiniband`.
        let mut link_local = gid;
        link_local[..8].copy_from_slice(&[0xfe, 0x80, 0, 0, 0, 0, 0, 0]);
        link_local[8] |= 2;
        if let Some(first) = self.addresses.first_mut() {
            *first = IpAddr::from(link_local);
        }
        self.gids = vec![GidEntry::infiniband(gid)];
    }
}
