//! `uverbs cm udaddy`: the client asks by address for the server's queue pair and sends datagrams there; the server
//! answers with as many. rdma-core's program has the same name.

use super::burst::{Burst, check_datagram};
use super::report::ExchangeReport;
use super::{cannot_connect, cannot_listen, listening_address, resolve, unfinished};
use crate::args::UdaddyArgs;
use crate::failure::{Failure, Result};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};
use uverbs::cm::{ConnectParam, DATAGRAM_QKEY, DatagramPeer, EventChannel, PortSpace};
use uverbs::{
    AddressHandle, AddressVector, Context, Destination, Gid, GidType, LinkLayer, QpType, Qpn,
};

pub(super) fn run(args: &UdaddyArgs) -> Result<()> {
    let start = Instant::now();
    let report = match &args.options.server {
        Some(server) => client(args, server)?,
        None => server(args)?,
    };
    report.print(start.elapsed(), args.options.json);
    Ok(())
}

/// The check of a connection, which datagrams do not have: it always succeeds.
fn always() -> Result<()> {
    Ok(())
}

fn client(args: &UdaddyArgs, server: &str) -> Result<ExchangeReport> {
    let options = &args.options;
    let at = resolve(server, args.port)?;
    let from = options.bind.as_ref().map(|host| resolve(host, 0)).transpose()?;
    let timeout = options.timeout();
    let failed = |error: uverbs::Error| cannot_connect(&error.into(), at);
    let channel = EventChannel::open()?;
    let mut asking = Vec::new();
    let mut local = None;
    for _ in 0..options.connections {
        let id = channel.create_id(PortSpace::UDP, QpType::UD)?;
        if let Some(tos) = options.tos {
            id.set_type_of_service(tos)?;
        }
        let id = id.resolve_addr(from, at, timeout).map_err(failed)?;
        let id = id.wait(Some(timeout)).and_then(|progress| progress.done()).map_err(failed)?;
        let id = id.resolve_route(timeout).map_err(failed)?;
        let id = id.wait(Some(timeout)).and_then(|progress| progress.done()).map_err(failed)?;
        let context = id.context()?;
        check_datagram(&context, id.port(), options.size)?;
        local = id.local_addr();
        let burst = Burst::new(&context, QpType::UD, options.shape(), timeout)?;
        let asked = id.connect_datagrams(&burst, &ConnectParam::new()).map_err(failed)?;
        asking.push((burst, asked));
    }
    let mut peers: Vec<(Burst, DatagramPeer, AddressHandle)> = Vec::new();
    for (mut burst, id) in asking {
        let peer = id.wait(Some(timeout)).map_err(|error| cannot_connect(&error, at))?;
        let peer = peer.done().map_err(|error| unfinished(error, at))?;
        // The answer brought the queue pair to RTS. The server sends nothing before the first datagram of this side.
        burst.post_receives()?;
        let handle = burst.pd.create_ah(peer.address())?;
        peers.push((burst, peer, handle));
    }
    for (burst, peer, handle) in &mut peers {
        burst.send_all(Some(Destination::new(handle, peer.qpn(), peer.qkey())))?;
    }
    for (burst, ..) in &mut peers {
        burst.wait_received(always)?;
    }
    let Some((burst, ..)) = peers.first() else { return Err(Failure::usage("-c 0 asks nothing")) };
    Ok(report("client", args, local, at, &burst.pd.context()))
}

fn server(args: &UdaddyArgs) -> Result<ExchangeReport> {
    let options = &args.options;
    let at = listening_address(options.bind.as_deref(), args.port)?;
    let timeout = options.timeout();
    let channel = EventChannel::open()?;
    let listener =
        channel.create_id(PortSpace::UDP, QpType::UD)?.bind(at).and_then(|id| id.listen(0));
    let listener = listener.map_err(|error| cannot_listen(error, at.ip()))?;
    let mut bursts = Vec::new();
    let mut wait = Duration::from_secs(options.wait);
    for _ in 0..options.connections {
        let Some(request) = listener.next_request(Some(wait))? else {
            let (came, all) = (bursts.len(), options.connections);
            return Err(Failure::peer(format!("{came} of {all} requests came within {wait:?}"))
                .advice("give both sides the same -c, or allow more time with --wait"));
        };
        wait = wait.min(timeout);
        let (local, peer) = (request.local_addr()?, request.peer_addr()?);
        let context = request.context()?;
        let vector = path(&context, local.ip(), peer.ip())?;
        check_datagram(&context, vector.port, options.size)?;
        let mut burst = Burst::new(&context, QpType::UD, options.shape(), timeout)?;
        request.init_qp(&burst)?;
        burst.post_receives()?;
        burst.ready()?;
        request.accept_datagrams(&burst, &ConnectParam::new())?;
        let handle = burst.pd.create_ah(&vector)?;
        bursts.push((burst, handle, local, peer));
    }
    for (burst, ..) in &mut bursts {
        burst.wait_received(always)?;
    }
    for (burst, handle, ..) in &mut bursts {
        // Its messages carry the number of the client's queue pair.
        if let Some(qpn) = burst.sender {
            burst.send_all(Some(Destination::new(handle, Qpn(qpn), DATAGRAM_QKEY)))?;
        } else if options.count > 0 {
            return Err(Failure::peer(
                "the client's messages do not say where to answer: is it an udaddy?",
            ));
        }
    }
    for (burst, ..) in &mut bursts {
        burst.wait_sent(always)?;
    }
    let Some((burst, _, local, peer)) = bursts.first() else {
        return Err(Failure::usage("-c 0 answers nothing"));
    };
    Ok(report("server", args, Some(*local), *peer, &burst.pd.context()))
}

/// The path back to a client, from the local GID that its request came to.
fn path(context: &Context, local: IpAddr, peer: IpAddr) -> Result<AddressVector> {
    let entries = context.gid_table()?;
    let entry = entries.iter().filter(|entry| entry.gid.ip() == local).max_by_key(|entry| {
        // The connection manager prefers RoCE v2.
        entry.gid_type == GidType::ROCE_V2
    });
    let Some(entry) = entry else {
        return Err(Failure::device(format!("no GID of {} is {local}", context.device().name())));
    };
    if context.query_port(entry.port)?.link_layer != LinkLayer::ETHERNET {
        return Err(Failure::device("datagrams are answered over Ethernet only"));
    }
    let peer = match peer {
        IpAddr::V4(peer) => Gid::from(peer),
        IpAddr::V6(peer) => Gid::from(peer),
    };
    Ok(AddressVector::global(entry.port, entry.index, peer))
}

fn report(
    role: &'static str,
    args: &UdaddyArgs,
    local: Option<SocketAddr>,
    peer: SocketAddr,
    context: &Context,
) -> ExchangeReport {
    ExchangeReport {
        program: "udaddy",
        role,
        local: local.map(|local| local.to_string()).unwrap_or_default(),
        peer: peer.to_string(),
        device: context.device().name().to_owned(),
        connections: args.options.connections,
        messages: args.options.count,
        size: args.options.size,
        seconds: 0.0,
    }
}
