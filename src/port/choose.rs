//! The choice of a port's GID: where packets come from, by what this network namespace has and by the way
//! to the peer.

use super::{GidEntry, GidType, LinkLayer};
use crate::context::Context;
use crate::device::addresses::{Addresses, source_for};
use crate::error::{Error, Result};
use rustix::io::Errno;
use std::net::IpAddr;

/// What a GID has to satisfy to be chosen by [`Context::choose_gid`].
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
///
/// Example: [`Context::choose_gid`](crate::Context::choose_gid).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GidFilter {
    interface: Option<u32>,
    peer: Option<IpAddr>,
    gid_type: Option<GidType>,
}

impl GidFilter {
    /// Anything.
    pub fn new() -> Self {
        GidFilter::default()
    }

    /// A GID of the network interface with this index in this network namespace (`ip link` shows it).
    pub fn interface(self, index: u32) -> Self {
        GidFilter { interface: Some(index), ..self }
    }

    /// A GID of the address from which this machine reaches `peer`, by its routes. A link-local peer needs
    /// [`interface`](Self::interface), too.
    pub fn peer(self, peer: IpAddr) -> Self {
        GidFilter { peer: Some(peer.to_canonical()), ..self }
    }

    /// A GID of this protocol.
    pub fn gid_type(self, gid_type: GidType) -> Self {
        GidFilter { gid_type: Some(gid_type), ..self }
    }
}

/// The GID that [`Context::choose_gid`] chose, and why.
///
/// Example: [`Context::choose_gid`](crate::Context::choose_gid).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChosenGid {
    /// The entry of the port's table.
    pub entry: GidEntry,
    /// Why it was preferred, and what was passed over because its interface is elsewhere.
    pub reason: String,
}

impl Context {
    /// Chooses an entry of a port's GID table: on Ethernet RoCE v2 before v1, and among those an IPv4 address
    /// before a global IPv6 one before a link-local one; on InfiniBand the first. A GID whose interface is in
    /// another network namespace is never chosen.
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
    /// that there are; `ENETUNREACH` or another of the kernel's if there is no route to the peer.
    pub fn choose_gid(&self, port: u32, filter: &GidFilter) -> Result<ChosenGid> {
        self.choose("choose_gid", port, filter)
    }

    fn choose(&self, verb: &'static str, port: u32, filter: &GidFilter) -> Result<ChosenGid> {
        let attr = self.query_port(port).map_err(|error| error.in_verb(verb))?;
        let table = self.gid_table().map_err(|error| error.in_verb(verb))?;
        let table: Vec<_> = table.into_iter().filter(|entry| entry.port == port).collect();
        let source = match filter.peer {
            None => None,
            Some(peer) => {
                let found = source_for(peer, filter.interface.unwrap_or(0));
                Some(found.map_err(|errno| {
                    Error::from_kernel(verb, errno).detail(format!("no route to {peer}"))
                })?)
            }
        };
        // The GIDs of InfiniBand are the port's and not an interface's.
        let ethernet = attr.link_layer == LinkLayer::ETHERNET;
        let addresses = if ethernet { Addresses::here() } else { Addresses::default() };
        choose_gid(attr.link_layer, &table, filter, source, &addresses).map_err(|why| {
            let device = self.device().name();
            Error::new(verb, Errno::NODATA).detail(format!("port {port} of {device} {why}"))
        })
    }
}

/// The entry of a port's table to use; otherwise why there is none, as what the port has or lacks.
pub(super) fn choose_gid(
    link_layer: LinkLayer,
    table: &[GidEntry],
    filter: &GidFilter,
    source: Option<IpAddr>,
    addresses: &Addresses,
) -> std::result::Result<ChosenGid, String> {
    let ethernet = link_layer == LinkLayer::ETHERNET;
    let table: Vec<&GidEntry> = table.iter().filter(|entry| !entry.gid.is_zero()).collect();
    if table.is_empty() {
        return Err("has no GID: its network interface is down or has no address".into());
    }
    let is_here = |entry: &&GidEntry| !ethernet || addresses.has(entry.ifindex, entry.gid.ip());
    let (here, elsewhere): (Vec<&GidEntry>, Vec<&GidEntry>) = table.into_iter().partition(is_here);
    let elsewhere: Vec<String> = elsewhere.iter().map(|entry| describe(entry)).collect();
    if here.is_empty() {
        return Err(format!(
            "has no GID of this network namespace: {} belong to interfaces elsewhere; move the \
             interface here, or run where it is",
            elsewhere.join(", ")
        ));
    }
    let satisfies = |entry: &&&GidEntry| {
        filter.interface.is_none_or(|index| index == entry.ifindex)
            && filter.gid_type.is_none_or(|gid_type| gid_type == entry.gid_type)
            && source.is_none_or(|source| source == entry.gid.ip())
    };
    let rank = |entry: &&&GidEntry| {
        let version = u8::from(entry.gid_type != GidType::ROCE_V2);
        if ethernet { (version, reach(entry), entry.index) } else { (0, 0, entry.index) }
    };
    let Some(chosen) = here.iter().filter(satisfies).min_by_key(rank) else {
        let wanted = match (source, filter.peer, filter.interface) {
            (Some(source), Some(peer), _) => {
                format!("of address {source}, from which {peer} is reached")
            }
            (_, _, Some(index)) => format!("of interface {index}"),
            _ => "of that type".into(),
        };
        let there_are: Vec<String> = here.iter().map(|entry| describe(entry)).collect();
        return Err(format!("has no GID {wanted}; there are {}", there_are.join(", ")));
    };
    let mut reason = match (source, filter.peer) {
        (Some(source), Some(peer)) => format!("{peer} is reached from {source}"),
        _ if !ethernet => "the first of the port".into(),
        _ => ["an IPv4 address", "a global IPv6 address", "a link-local address; it has no other"]
            [usize::from(reach(chosen))]
        .into(),
    };
    if ethernet {
        let name = addresses.name(chosen.ifindex).map(|name| format!(" of {name}"));
        reason = format!("{}, {reason}{}", chosen.gid_type, name.unwrap_or_default());
    }
    if !elsewhere.is_empty() {
        reason += &format!("; in other network namespaces: {}", elsewhere.join(", "));
    }
    Ok(ChosenGid { entry: **chosen, reason })
}

/// How far an address reaches, the farthest first.
fn reach(entry: &GidEntry) -> u8 {
    match entry.gid.ip() {
        IpAddr::V4(_) => 0,
        IpAddr::V6(_) if !entry.gid.is_link_local() => 1,
        IpAddr::V6(_) => 2,
    }
}

fn describe(entry: &GidEntry) -> String {
    format!("index {} ({}, {})", entry.index, entry.gid.ip(), entry.gid_type)
}
