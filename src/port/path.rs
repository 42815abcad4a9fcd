//! The reason why the kernel takes no path, as far as the port's tables tell. Pairs with
//! `rdma_addr_find_l2_eth_by_grh` in `core/addr.c`, which finds the peer's hardware address.

use super::{GidEntry, LinkLayer};
use crate::address_vector::{AddressVector, GlobalRoute};
use crate::context::Context;
use rustix::io::Errno;
use std::net::IpAddr;

impl Context {
    /// The reason why the kernel refused a path with this errno; `None` if the errno alone tells.
    pub(crate) fn explain_path(&self, errno: Errno, path: &AddressVector) -> Option<String> {
        let port = path.port;
        if self.query_port(port).ok()?.link_layer != LinkLayer::ETHERNET {
            return None;
        }
        let Some(global) = path.global else {
            return (errno == Errno::INVAL).then(|| {
                format!("port {port} is Ethernet, where a path needs a global part: AddressVector::global")
            });
        };
        let entry = match self.query_gid(port, global.sgid_index) {
            Ok(entry) if entry.gid.is_zero() => {
                return Some(format!("GID index {} of port {port} is empty", global.sgid_index));
            }
            Ok(entry) => entry,
            Err(error) => return Some(error.message().to_owned()).filter(|text| !text.is_empty()),
        };
        explain(errno, &entry, &global)
    }
}

fn explain(errno: Errno, entry: &GidEntry, global: &GlobalRoute) -> Option<String> {
    let (own, peer) = (entry.gid.ip(), global.dgid.ip());
    let from = format!("GID index {} of port {} ({own})", entry.index, entry.port);
    // A group's hardware address follows from its GID.
    if peer.is_multicast() {
        return None;
    }
    if peer.is_unspecified() {
        return Some("the peer's GID is zero".into());
    }
    if peer.is_loopback() && !own.is_loopback() {
        return Some(format!(
            "{peer} is an address of the loopback interface, to which {from} does not lead: name an address \
             of the peer's port, also on this machine"
        ));
    }
    if own.is_ipv4() != peer.is_ipv4() {
        let version = |address: &IpAddr| if address.is_ipv4() { "IPv4" } else { "IPv6" };
        return Some(format!(
            "{from} is of {}, and the peer's GID {peer} of {}: both have to be of one version",
            version(&own),
            version(&peer)
        ));
    }
    match errno {
        Errno::TIMEDOUT => Some(format!(
            "no way to the peer: {peer} does not answer the question for its hardware address, by {} from {from}; \
             the host may be down, have another address, or be in another network",
            if peer.is_ipv4() { "ARP" } else { "neighbour discovery" }
        )),
        Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::NODEV | Errno::ADDRNOTAVAIL => {
            Some(format!(
                "no way to the peer: no route leads to {peer} from {from} over its interface \
             (`ip route get {peer} from {own}`); Context::choose_gid chooses a GID by the route"
            ))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::number::Gid;
    use crate::port::GidType;
    use std::net::{Ipv4Addr, Ipv6Addr};

    #[test]
    fn the_reason_names_both_ends() {
        let own = GidEntry {
            gid: Ipv4Addr::new(10, 0, 1, 3).into(),
            index: 3,
            port: 1,
            gid_type: GidType::ROCE_V2,
            ifindex: 2,
        };
        let why = |errno, dgid: Gid| {
            explain(errno, &own, &AddressVector::global(1, 3, dgid).global.unwrap())
        };
        let peer = || Gid::from(Ipv4Addr::new(10, 0, 1, 9));
        let silent = why(Errno::TIMEDOUT, peer()).unwrap();
        assert!(silent.contains("to the peer: 10.0.1.9 does not answer"), "{silent}");
        assert!(silent.contains("by ARP from GID index 3 of port 1 (10.0.1.3)"), "{silent}");
        for errno in [Errno::HOSTUNREACH, Errno::NETUNREACH] {
            let unreached = why(errno, peer()).unwrap();
            assert!(
                unreached.contains("no route leads to 10.0.1.9 from GID index 3"),
                "{unreached}"
            );
        }
        for errno in [Errno::INVAL, Errno::TIMEDOUT, Errno::NETUNREACH] {
            let other = why(errno, "2001:db8::9".parse::<Ipv6Addr>().unwrap().into()).unwrap();
            assert!(
                other.contains("(10.0.1.3) is of IPv4, and the peer's GID 2001:db8::9 of IPv6")
            );
            for loopback in [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()] {
                let loopback = why(errno, loopback).unwrap();
                assert!(loopback.contains("is an address of the loopback interface"), "{loopback}");
            }
            assert_eq!(why(errno, Gid::default()).as_deref(), Some("the peer's GID is zero"));
            let group: Ipv6Addr = "ff0e::ffff:e000:1".parse().unwrap();
            assert_eq!(why(errno, group.into()), None);
        }
        assert_eq!(why(Errno::INVAL, peer()), None);
    }
}
