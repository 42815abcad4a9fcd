//! Paths of InfiniBand, which the kernel also makes of IP addresses on Ethernet.

use super::{PATIENCE, Service, accepted, address, ask_by, channel, done, passive, route, send};
use crate::env;
use crate::verdict::{Stop, Verdict, trials};
use std::net::SocketAddr;
use uverbs::cm::{ConnectParam, PortSpace};
use uverbs::{Gid, QpType};

trials![path_of_one_id_connects_another, listener_on_an_unspecified_address_has_no_gid];

/// A GID belongs to a device, the unspecified address to none; a request has the GID that it came to.
fn listener_on_an_unspecified_address_has_no_gid() -> Verdict {
    let (channel, address) = (channel()?, address(&passive()?)?);
    let unspecified = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let bound = channel.create_id(PortSpace::TCP, QpType::RC)?.bind(unspecified.parse()?)?;
    let port = bound.local_addr()?.port();
    let none = Gid::from(std::net::Ipv6Addr::UNSPECIFIED);
    let told = bound.local_ib_addr()?;
    assert_eq!((told.gid, told.service_id >> 16), (none, u64::from(PortSpace::TCP.0)));
    let listener = bound.listen(4)?;
    let told = listener.local_ib_addr()?;
    assert_eq!((told.gid, told.port()), (none, port));
    let at = SocketAddr::new(address, port);
    let (_side, _connecting) = ask_by(route(&channel, at)?, &ConnectParam::new())?;
    let request = listener.next_request(Some(PATIENCE))?;
    let (local, _) = request.ok_or_else(|| Stop::fail("no request came"))?.ib_addrs()?;
    assert_eq!(local.gid.ip(), address);
    Ok(())
}

/// On Ethernet the kernel makes a path from the IP addresses, and accepts such a path for another id.
fn path_of_one_id_connects_another() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let known = route(&channel, service.at)?;
    let paths = known.ib_paths()?;
    let [path] = paths[..] else { return Err(Stop::fail(format!("{paths:?}"))) };
    let (local, peer) = known.ib_addrs()?;
    assert_eq!((path.sgid, path.dgid), (local.gid, peer.gid));
    assert_eq!((peer.gid.ip(), peer.port()), (service.at.ip(), service.at.port()));
    assert_eq!(peer.service_id >> 16, u64::from(PortSpace::TCP.0));
    let from = SocketAddr::new(address(&env::device())?, 0);
    let resolving = channel.create_id(PortSpace::TCP, QpType::RC)?.resolve_addr(
        Some(from),
        service.at,
        PATIENCE,
    )?;
    let resolved = done(resolving.wait(Some(PATIENCE))?)?;
    let route = done(resolved.set_ib_path(&path)?.wait(Some(PATIENCE))?)?;
    assert_eq!(route.ib_paths()?, [path]);
    let param = ConnectParam::new();
    let mut pair = accepted(ask_by(route, &param)?, service.request()?, &param)?;
    send(&mut pair.active.0, &mut pair.passive.0)
}
