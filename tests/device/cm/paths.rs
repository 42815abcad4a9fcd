//! Paths of InfiniBand, which the kernel also makes of IP addresses on Ethernet.

use super::{PATIENCE, Service, accepted, address, ask_by, channel, done, route, send};
use crate::env;
use crate::verdict::{Stop, Verdict, trials};
use std::net::SocketAddr;
use uverbs::cm::{ConnectParam, PortSpace};

trials![path_of_one_id_connects_another];

/// The kernel makes a path of the IP addresses on Ethernet, and takes one that it made.
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
    let resolving = channel.create_id()?.resolve_addr(Some(from), service.at, PATIENCE)?;
    let resolved = done(resolving.wait(Some(PATIENCE))?)?;
    let route = done(resolved.set_ib_path(&path)?.wait(Some(PATIENCE))?)?;
    assert_eq!(route.ib_paths()?, [path]);
    let param = ConnectParam::new();
    let mut pair = accepted(ask_by(route, &param)?, service.request()?, &param)?;
    send(&mut pair.active.0, &mut pair.passive.0)
}
