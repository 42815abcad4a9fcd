//! Addresses of the connection manager: an IP address and a port, as `struct sockaddr` has them.

use super::message::Gid;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use uverbs_uapi::rdma_user_cm::{sockaddr_ib, sockaddr_in, sockaddr_in6};
use zerocopy::{FromBytes, IntoBytes};

const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;
const AF_IB: u16 = 27;

/// An IP address and a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) ip: IpAddr,
    pub(crate) port: u16,
}

impl Address {
    pub(crate) fn new(ip: IpAddr, port: u16) -> Address {
        Address { ip, port }
    }

    /// The unspecified address.
    pub(crate) fn unspecified() -> Address {
        Address::new(Ipv6Addr::UNSPECIFIED.into(), 0)
    }

    /// Reads a `struct sockaddr`; `None` for another family, or if it is too short.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Address> {
        let family = u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?);
        match family {
            AF_INET => {
                let (raw, _) = sockaddr_in::read_from_prefix(bytes).ok()?;
                Some(Address::new(Ipv4Addr::from(raw.sin_addr).into(), raw.sin_port.get()))
            }
            AF_INET6 => {
                let (raw, _) = sockaddr_in6::read_from_prefix(bytes).ok()?;
                Some(Address::new(Ipv6Addr::from(raw.sin6_addr).into(), raw.sin6_port.get()))
            }
            _ => None,
        }
    }

    /// Writes a `struct sockaddr_ib` of the port's GID, the partition key, and the service ID of port space and port;
    /// returns its length.
    pub(crate) fn encode_ib(&self, gid: Gid, pkey: u16, space: u16, to: &mut [u8; 128]) -> u16 {
        to.fill(0);
        let ip = if self.is_any() { Ipv6Addr::UNSPECIFIED.octets() } else { gid };
        let raw = sockaddr_ib {
            sib_family: AF_IB,
            sib_pkey: pkey.into(),
            sib_addr: ip,
            sib_sid: (u64::from(space) << 16 | u64::from(self.port)).into(),
            sib_sid_mask: u64::MAX.into(),
            ..Default::default()
        };
        to[..size_of_val(&raw)].copy_from_slice(raw.as_bytes());
        size_of_val(&raw) as u16
    }

    /// Writes a `struct sockaddr`, of `scope` for a link-local address; returns its length.
    pub(crate) fn encode(&self, scope: u32, to: &mut [u8; 128]) -> u16 {
        to.fill(0);
        match self.ip {
            IpAddr::V4(ip) => {
                let raw = sockaddr_in {
                    sin_family: AF_INET,
                    sin_port: self.port.into(),
                    sin_addr: ip.octets(),
                    ..Default::default()
                };
                to[..size_of::<sockaddr_in>()].copy_from_slice(raw.as_bytes());
                size_of::<sockaddr_in>() as u16
            }
            IpAddr::V6(ip) => {
                let raw = sockaddr_in6 {
                    sin6_family: AF_INET6,
                    sin6_port: self.port.into(),
                    sin6_addr: ip.octets(),
                    sin6_scope_id: if self.is_link_local() { scope } else { 0 },
                    ..Default::default()
                };
                to[..size_of::<sockaddr_in6>()].copy_from_slice(raw.as_bytes());
                size_of::<sockaddr_in6>() as u16
            }
        }
    }

    /// The GID of the address: an IPv4 address is IPv4-mapped.
    pub(crate) fn gid(&self) -> Gid {
        match self.ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        }
    }

    /// The address of a GID.
    pub(crate) fn of_gid(gid: &Gid, port: u16) -> Address {
        Address::new(IpAddr::from(*gid).to_canonical(), port)
    }

    /// Whether a `struct sockaddr` is of InfiniBand.
    pub(crate) fn is_infiniband(bytes: &[u8]) -> bool {
        bytes.first_chunk().is_some_and(|family| u16::from_ne_bytes(*family) == AF_IB)
    }

    pub(crate) fn is_any(&self) -> bool {
        self.ip.is_unspecified()
    }

    pub(crate) fn is_loopback(&self) -> bool {
        self.ip.is_loopback()
    }

    pub(crate) fn is_link_local(&self) -> bool {
        matches!(self.ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
    }

    /// Whether a listener at this address hears requests to a GID because the address is unspecified. An unspecified
    /// IPv6 address hears requests to IPv4 addresses, too, unless `family_alone`.
    pub(crate) fn hears_all(&self, at: &Gid, family_alone: bool) -> bool {
        let v4 = Address::of_gid(at, 0).ip.is_ipv4();
        self.is_any() && (v4 == self.ip.is_ipv4() || self.ip.is_ipv6() && !family_alone)
    }
}
