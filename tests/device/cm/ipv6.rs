//! IPv6 addresses: link-local ones, and listeners on the unspecified address.

use super::{
    PATIENCE, Pair, Service, Side, address, ask, channel, done, established, passive, refused,
    route_from, send,
};
use crate::capability::Capability;
use crate::env;
use crate::verdict::{Stop, Verdict, trials};
use std::net::{Ipv6Addr, SocketAddr, SocketAddrV6};
use std::time::Duration;
use uverbs::cm::{ConnectParam, PortSpace, RejectReason};
use uverbs::{Context, GidType, QpType};

trials![
    link_local_addresses_connect,
    listener_on_any_address_takes_ipv4_requests,
    listener_on_any_ipv6_address_alone_rejects_ipv4_requests,
];

/// The link-local address of the device under test, with its interface as scope.
fn link_local() -> Verdict<SocketAddrV6> {
    let table = Context::open(&env::device())?.gid_table()?;
    let entry = table.into_iter().find(|entry| {
        entry.port == env::port() && entry.gid_type == GidType::ROCE_V2 && entry.gid.is_link_local()
    });
    match entry {
        Some(entry) => Ok(SocketAddrV6::new(Ipv6Addr::from(entry.gid.0), 0, 0, entry.ifindex)),
        None => Err(Stop::Skip(Capability::Cm, "the port has no link-local address".into())),
    }
}

fn link_local_addresses_connect() -> Verdict {
    let own = SocketAddr::V6(link_local()?);
    let (channel, service) = (channel()?, Service::at(&env::device(), own)?);
    assert_eq!(service.at.ip(), own.ip());
    let route = route_from(&channel, own, service.at)?;
    assert_eq!(route.peer_addr(), Some(service.at));
    let a = Side::of(&route.context()?)?;
    let connecting = route.connect(&a.qp, &ConnectParam::new())?;
    let request = service.request()?;
    assert_eq!(request.peer_addr()?.ip(), own.ip());
    let b = Side::of(&request.context()?)?;
    let accepting = request.accept(&b.qp, &ConnectParam::new())?;
    let (at_a, at_b) = established(connecting, accepting)?;
    let mut pair = Pair { active: (a, at_a), passive: (b, at_b) };
    send(&mut pair.active.0, &mut pair.passive.0)
}

/// Sends a request by IPv4 to a listener on `[::]`.
fn listen_everywhere(af_only: bool) -> Verdict<(Service, SocketAddr)> {
    let channel = channel()?;
    let id = channel.create_id(PortSpace::TCP, QpType::RC)?;
    id.set_af_only(af_only)?;
    let listener = id.bind("[::]:0".parse()?)?.listen(4)?;
    let device = passive()?;
    let at = SocketAddr::new(address(&device)?, listener.local_addr()?.port());
    let context = Context::open(&device)?;
    channel.use_context(&context)?;
    Ok((Service { id: listener, channel, at, context }, at))
}

fn listener_on_any_address_takes_ipv4_requests() -> Verdict {
    let (service, at) = listen_everywhere(false)?;
    let (_a, connecting) = ask(&channel()?, at, &ConnectParam::new())?;
    let request = service.request()?;
    assert_eq!(request.local_addr()?, at);
    let b = Side::of(&request.context()?)?;
    let accepting = request.accept(&b.qp, &ConnectParam::new())?;
    done(connecting.wait(Some(PATIENCE))?)?;
    drop(accepting);
    Ok(())
}

fn listener_on_any_ipv6_address_alone_rejects_ipv4_requests() -> Verdict {
    let (service, at) = listen_everywhere(true)?;
    let (_a, connecting) = ask(&channel()?, at, &ConnectParam::new())?;
    // A listener has the port, so that the kernel's reason is not INVALID_SERVICE_ID.
    let error = refused(connecting)?;
    let reason = error.rejection().and_then(|rejection| rejection.reason());
    assert_eq!(reason, Some(RejectReason::CONSUMER_DEFINED), "{error}");
    assert!(service.id.next_request(Some(Duration::ZERO))?.is_none());
    Ok(())
}
