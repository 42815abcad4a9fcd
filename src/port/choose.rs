//! The choice of a port's GID, the source address of packets, by the interfaces of this network namespace
//! and the route to the peer.

use super::{GidEntry, GidType, LinkLayer};
use crate::context::Context;
use crate::device::addresses::{Addresses, Route, route_to};
use crate::error::{Error, Result};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Conditions that a GID must satisfy to be chosen by [`Context::choose_gid`].
///
/// ```no_run
/// # fn f(context: &uverbs::Context) -> uverbs::Result<()> {
/// use uverbs::{GidFilter, GidType};
///
/// let filter = GidFilter::new().gid_type(GidType::ROCE_V2).interface(3);
/// let chosen = context.choose_gid(1, &filter)?;
/// println!("index {}, since {}", chosen.entry.index, chosen.reason);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GidFilter {
    interface: Option<u32>,
    peer: Option<IpAddr>,
    gid_type: Option<GidType>,
}

impl GidFilter {
    /// A filter that every GID satisfies.
    pub fn new() -> Self {
        GidFilter::default()
    }

    /// A GID of the network interface with this index in this network namespace (`ip link` shows it), and no other.
    /// A [`peer`](Self::peer) is then reached over this interface, even if the kernel prefers another route.
    pub fn interface(self, index: u32) -> Self {
        GidFilter { interface: Some(index), ..self }
    }

    /// A GID of the interface and the address from which the kernel sends to `peer` (`ip route get` shows both). If
    /// it prefers an interface that is not the port's, as with several ports in one subnet, the port's interfaces
    /// with a route to the peer are tried. A link-local peer needs [`interface`](Self::interface), too.
    pub fn peer(self, peer: IpAddr) -> Self {
        GidFilter { peer: Some(peer.to_canonical()), ..self }
    }

    /// A GID of this protocol.
    pub fn gid_type(self, gid_type: GidType) -> Self {
        GidFilter { gid_type: Some(gid_type), ..self }
    }
}

/// The GID that [`Context::choose_gid`] chose, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChosenGid {
    /// The entry of the port's table.
    pub entry: GidEntry,
    /// The reason of the preference, and the GIDs that were passed over because their interface is in another
    /// namespace.
    pub reason: String,
}

impl Context {
    /// Chooses an entry of a port's GID table. On InfiniBand it is the first. On Ethernet it is the first in this
    /// order: RoCE v2 before v1; an address that is routed before a link-local one; the port's own interface, or
    /// the bond or bridge that it is part of, before the VLANs and macvlans on it; IPv4 before IPv6; the lower
    /// index. A GID whose interface is in another network namespace is never chosen.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a port that the device does not have, `ENODATA` if its table has no GID of this
    /// namespace: the network interface is down, has no address, or is elsewhere.
    pub fn default_gid(&self, port: u32) -> Result<GidEntry> {
        Ok(self.choose("default_gid", port, &GidFilter::new())?.entry)
    }

    /// Chooses an entry of a port's GID table that satisfies `filter`, in the order of
    /// [`default_gid`](Self::default_gid), and says why. The namespace is the calling thread's.
    ///
    /// ```no_run
    /// # fn main() -> uverbs::Result<()> {
    /// use uverbs::GidFilter;
    /// let context = uverbs::Context::open_first()?;
    /// let peer = std::net::Ipv4Addr::new(192, 0, 2, 7).into();
    /// let chosen = context.choose_gid(1, &GidFilter::new().peer(peer))?;
    /// println!("GID index {}: {}", chosen.entry.index, chosen.reason);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`default_gid`](Self::default_gid); `ENODATA` if no GID satisfies the filter, with the GIDs
    /// that there are; `ENETUNREACH` or another of the kernel's if there is no route to the peer; `EINVAL` for a
    /// link-local peer without its interface.
    pub fn choose_gid(&self, port: u32, filter: &GidFilter) -> Result<ChosenGid> {
        self.choose("choose_gid", port, filter)
    }

    fn choose(&self, verb: &'static str, port: u32, filter: &GidFilter) -> Result<ChosenGid> {
        let attr = self.query_port(port).map_err(|error| error.in_verb(verb))?;
        let table = self.gid_table().map_err(|error| error.in_verb(verb))?;
        let table: Vec<_> = table.into_iter().filter(|entry| entry.port == port).collect();
        // The GIDs of InfiniBand are the port's and not an interface's.
        let ethernet = attr.link_layer == LinkLayer::ETHERNET;
        let platform = self.device().platform();
        let addresses = if ethernet { Addresses::of(platform) } else { Addresses::default() };
        let netdev = if ethernet { self.device().netdev(port).ok().flatten() } else { None };
        let route = |peer, interface, confirmed| route_to(platform, peer, interface, confirmed);
        let facts =
            Facts { ethernet, netdev: netdev.as_deref(), addresses: &addresses, route: &route };
        choose_gid(&facts, &table, filter).map_err(|refusal| match refusal {
            Refusal::NoGid(why) => {
                let device = self.device().name();
                Error::new(verb, Errno::NODATA).detail(format!("port {port} of {device} {why}"))
            }
            Refusal::NoRoute(errno, why) => Error::from_kernel(verb, errno).detail(why),
        })
    }
}

/// A question for the route to a peer over an interface, as [`route_to`] asks it.
type AskRoute<'a> = &'a dyn Fn(IpAddr, u32, bool) -> rustix::io::Result<Route>;

/// The facts beside the table of GIDs by which one is chosen.
pub(super) struct Facts<'a> {
    /// The port's link layer is Ethernet.
    pub(super) ethernet: bool,
    /// The name of the port's own network interface, if it is known.
    pub(super) netdev: Option<&'a str>,
    /// The interfaces and addresses of this network namespace.
    pub(super) addresses: &'a Addresses,
    /// The kernel's routes.
    pub(super) route: AskRoute<'a>,
}

/// The reason why no GID was chosen.
#[derive(Debug)]
pub(super) enum Refusal {
    /// The port has or lacks something, which the text says.
    NoGid(String),
    /// The kernel does not reach the peer.
    NoRoute(Errno, String),
}

impl Facts<'_> {
    /// The order of preference; the least is chosen.
    fn rank(&self, entry: &GidEntry) -> (bool, bool, bool, bool, u32) {
        if !self.ethernet {
            return (false, false, false, false, entry.index);
        }
        let older = entry.gid_type != GidType::ROCE_V2;
        let upper = !self.addresses.is_own(entry.ifindex, self.netdev);
        (older, entry.gid.is_link_local(), upper, entry.gid.ip().is_ipv6(), entry.index)
    }

    /// The name of an interface, or its index.
    fn name(&self, interface: u32) -> String {
        match self.addresses.name(interface) {
            Some(name) => name.to_owned(),
            None => format!("interface {interface}"),
        }
    }

    /// The address of a route with the interface, if that is known and matters.
    fn describe_route(&self, route: &Route) -> String {
        match route.interface {
            0 => route.source.to_string(),
            _ if route.local => route.source.to_string(),
            interface => format!("{} of {}", route.source, self.name(interface)),
        }
    }

    /// The route to a peer that begins at one of `entries`, which are in the order of preference, and the route
    /// that the kernel prefers if that is another.
    fn way(
        &self,
        peer: IpAddr,
        filter: &GidFilter,
        entries: &[&GidEntry],
    ) -> std::result::Result<(Route, Option<Route>), Refusal> {
        let no_route = |errno| Refusal::NoRoute(errno, format!("no route to {peer}"));
        if let Some(interface) = filter.interface {
            let over = |errno| {
                let name = self.name(interface);
                Refusal::NoRoute(errno, format!("no route to {peer} over {name}"))
            };
            return Ok(((self.route)(peer, interface, false).map_err(over)?, None));
        }
        if matches!(peer, IpAddr::V6(v6) if v6.is_unicast_link_local()) {
            let why = format!("{peer} is link-local; name the interface that leads to it, too");
            return Err(Refusal::NoRoute(Errno::INVAL, why));
        }
        let preferred = (self.route)(peer, 0, true);
        match preferred {
            Ok(route) if entries.iter().any(|entry| begins_at(&route, entry)) => {
                return Ok((route, None));
            }
            _ => {}
        }
        // Several GIDs are of one interface.
        let mut asked = BTreeMap::new();
        for entry in entries.iter().filter(|entry| entry.ifindex != 0) {
            let ask = || (self.route)(peer, entry.ifindex, true).ok();
            match *asked.entry(entry.ifindex).or_insert_with(ask) {
                Some(route) if begins_at(&route, entry) => return Ok((route, preferred.ok())),
                _ => {}
            }
        }
        Ok((preferred.map_err(no_route)?, None))
    }
}

/// Whether packets on this route come from the GID.
fn begins_at(route: &Route, entry: &GidEntry) -> bool {
    let any = route.local || route.interface == 0 || entry.ifindex == 0;
    entry.gid.ip() == route.source && (any || entry.ifindex == route.interface)
}

/// The entry of a port's table to use.
pub(super) fn choose_gid(
    facts: &Facts<'_>,
    table: &[GidEntry],
    filter: &GidFilter,
) -> std::result::Result<ChosenGid, Refusal> {
    let Facts { ethernet, addresses, .. } = *facts;
    let table: Vec<&GidEntry> = table.iter().filter(|entry| !entry.gid.is_zero()).collect();
    if table.is_empty() {
        let why = "has no GID: its network interface is down or has no address";
        return Err(Refusal::NoGid(why.into()));
    }
    let is_here = |entry: &&GidEntry| !ethernet || addresses.has(entry.ifindex, entry.gid.ip());
    let (mut here, elsewhere): (Vec<&GidEntry>, Vec<&GidEntry>) =
        table.into_iter().partition(is_here);
    let elsewhere: Vec<String> = elsewhere.iter().map(|entry| describe(entry)).collect();
    if here.is_empty() {
        return Err(Refusal::NoGid(format!(
            "has no GID of this network namespace: {} belong to interfaces elsewhere; move the \
             interface here, or run where it is",
            elsewhere.join(", ")
        )));
    }
    here.sort_by_key(|entry| facts.rank(entry));
    let none_of = |wanted: String| {
        let there_are: Vec<String> = here.iter().map(|entry| describe(entry)).collect();
        Refusal::NoGid(format!("has no GID {wanted}; there are {}", there_are.join(", ")))
    };
    let satisfies = |entry: &&GidEntry| {
        filter.interface.is_none_or(|index| index == entry.ifindex)
            && filter.gid_type.is_none_or(|gid_type| gid_type == entry.gid_type)
    };
    let entries: Vec<&GidEntry> = here.iter().copied().filter(satisfies).collect();
    let Some(first) = entries.first() else {
        let of_type = filter.gid_type.map(|gid_type| format!("of type {gid_type}"));
        let of_interface = filter.interface.map(|index| format!("of {}", facts.name(index)));
        let wanted: Vec<String> = of_type.into_iter().chain(of_interface).collect();
        return Err(none_of(wanted.join(" ")));
    };
    let (chosen, mut reason) = match filter.peer {
        Some(peer) => {
            let (route, preferred) = facts.way(peer, filter, &entries)?;
            let from = facts.describe_route(&route);
            let chosen = entries.iter().find(|entry| begins_at(&route, entry));
            let Some(chosen) = chosen else {
                return Err(none_of(format!("of address {from}, from which {peer} is reached")));
            };
            let rather = preferred.map(|route| {
                format!(
                    "; the kernel prefers {}, which is not the port's",
                    facts.describe_route(&route)
                )
            });
            (chosen, format!("{peer} is reached from {from}{}", rather.unwrap_or_default()))
        }
        None if !ethernet => (first, "the first of the port".into()),
        None => {
            let kind = match first.gid.ip() {
                IpAddr::V4(_) => "an IPv4 address",
                IpAddr::V6(_) if !first.gid.is_link_local() => "a global IPv6 address",
                IpAddr::V6(_) => "a link-local address; there is no other of this type",
            };
            let name = addresses.name(first.ifindex).map(|name| format!(" of {name}"));
            (first, format!("{kind}{}", name.unwrap_or_default()))
        }
    };
    if ethernet {
        reason = format!("{}, {reason}", chosen.gid_type);
    }
    if !elsewhere.is_empty() {
        reason += &format!("; in other network namespaces: {}", elsewhere.join(", "));
    }
    Ok(ChosenGid { entry: **chosen, reason })
}

fn describe(entry: &GidEntry) -> String {
    format!("index {} ({}, {})", entry.index, entry.gid.ip(), entry.gid_type)
}
