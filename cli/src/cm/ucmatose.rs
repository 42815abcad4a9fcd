//! `uverbs cm ucmatose`: connections over which the server sends messages, the client answers with as many, and the
//! server disconnects. rdma-core's program is `ucmatose`, from `cmatose.c`.

use super::burst::{Burst, Shape};
use super::report::ExchangeReport;
use super::{cannot_connect, cannot_listen, check_alive, listening_address, resolve, unfinished};
use crate::args::UcmatoseArgs;
use crate::failure::{Failure, Result};
use std::time::{Duration, Instant};
use uverbs::QpType;
use uverbs::cm::{ConnectParam, Connection, EventChannel, PortSpace};

pub(super) fn run(args: &UcmatoseArgs) -> Result<()> {
    let start = Instant::now();
    let report = match &args.options.server {
        Some(server) => client(args, server)?,
        None => server(args)?,
    };
    report.print(start.elapsed(), args.options.json);
    Ok(())
}

fn param() -> ConnectParam {
    ConnectParam::new().responder_resources(1).initiator_depth(1).retry_count(5)
}

/// The channel of one connection with `--migrate`; `None` if all connections share one.
fn own_channel(args: &UcmatoseArgs) -> Result<Option<EventChannel>> {
    Ok(if args.migrate { Some(EventChannel::open()?) } else { None })
}

fn client(args: &UcmatoseArgs, server: &str) -> Result<ExchangeReport> {
    let options = &args.options;
    let at = resolve(server, args.port)?;
    let from = options.bind.as_ref().map(|host| resolve(host, 0)).transpose()?;
    let timeout = options.timeout();
    let failed = |error: uverbs::Error| cannot_connect(&error.into(), at);
    let channel = EventChannel::open()?;
    let mut resolving = Vec::new();
    for _ in 0..options.connections {
        let mut id = channel.create_id(PortSpace::TCP, QpType::RC)?;
        if let Some(other) = own_channel(args)? {
            id = id.migrate(&other)?;
        }
        if let Some(tos) = options.tos {
            id.set_type_of_service(tos)?;
        }
        if let Some(ack_timeout) = args.ack_timeout {
            id.set_ack_timeout(ack_timeout)?;
        }
        resolving.push(id.resolve_addr(from, at, timeout).map_err(failed)?);
    }
    let mut connecting = Vec::new();
    for id in resolving {
        let id = id.wait(Some(timeout)).and_then(|progress| progress.done()).map_err(failed)?;
        let id = id.resolve_route(timeout).map_err(failed)?;
        let id = id.wait(Some(timeout)).and_then(|progress| progress.done()).map_err(failed)?;
        let mut burst = Burst::new(&id.context()?, QpType::RC, options.shape(), timeout)?;
        id.init_qp(&burst)?;
        burst.post_receives()?;
        let connection = id.connect(&burst, &param()).map_err(failed)?;
        connecting.push((burst, connection));
    }
    let mut connected = Vec::new();
    for (burst, id) in connecting {
        let connection = id.wait(Some(timeout)).map_err(|error| cannot_connect(&error, at))?;
        connected.push((burst, connection.done().map_err(|error| unfinished(error, at))?));
    }
    for (burst, connection) in &mut connected {
        burst.wait_received(|| check_alive(connection))?;
    }
    for (burst, _) in &mut connected {
        burst.send_all(None)?;
    }
    for (burst, connection) in &mut connected {
        burst.wait_sent(|| check_alive(connection))?;
    }
    let report = report("client", args.options.shape(), &connected)?;
    for (_, connection) in &connected {
        // The server disconnects.
        connection.wait_disconnected(Some(timeout))?;
        connection.disconnect()?;
    }
    Ok(report)
}

fn server(args: &UcmatoseArgs) -> Result<ExchangeReport> {
    let options = &args.options;
    let at = listening_address(options.bind.as_deref(), args.port)?;
    let timeout = options.timeout();
    let channel = EventChannel::open()?;
    let listener =
        channel.create_id(PortSpace::TCP, QpType::RC)?.bind(at).and_then(|id| id.listen(0));
    let listener = listener.map_err(|error| cannot_listen(error, at.ip()))?;
    let mut accepting = Vec::new();
    let mut wait = Duration::from_secs(options.wait);
    for _ in 0..options.connections {
        let Some(mut request) = listener.next_request(Some(wait))? else {
            let (came, all) = (accepting.len(), options.connections);
            return Err(Failure::peer(format!("{came} of {all} connections came within {wait:?}"))
                .advice("give both sides the same -c, or allow more time with --wait"));
        };
        // Once the client has begun, connections come in quick succession.
        wait = wait.min(timeout);
        if let Some(other) = own_channel(args)? {
            request = request.migrate(&other)?;
        }
        let mut burst = Burst::new(&request.context()?, QpType::RC, options.shape(), timeout)?;
        request.init_qp(&burst)?;
        burst.post_receives()?;
        let peer = request.peer_addr()?;
        let accepted = request.accept(&burst, &param())?;
        accepting.push((burst, accepted, peer));
    }
    let mut connected = Vec::new();
    for (burst, id, peer) in accepting {
        let connection = id.wait(Some(timeout)).map_err(|error| cannot_connect(&error, peer))?;
        connected.push((burst, connection.done().map_err(|error| unfinished(error, peer))?));
    }
    for (burst, _) in &mut connected {
        burst.send_all(None)?;
    }
    for (burst, connection) in &mut connected {
        burst.wait_sent(|| check_alive(connection))?;
        burst.wait_received(|| check_alive(connection))?;
    }
    let report = report("server", args.options.shape(), &connected)?;
    for (_, connection) in &connected {
        connection.disconnect()?;
    }
    for (_, connection) in &connected {
        connection.wait_disconnected(Some(timeout))?;
    }
    Ok(report)
}

fn report(
    role: &'static str,
    shape: Shape,
    connected: &[(Burst, Connection)],
) -> Result<ExchangeReport> {
    let Some((burst, connection)) = connected.first() else {
        return Err(Failure::usage("-c 0 connects nothing"));
    };
    Ok(ExchangeReport {
        program: "ucmatose",
        role,
        local: connection.local_addr()?.to_string(),
        peer: connection.peer_addr()?.to_string(),
        device: burst.pd.context().device().name().to_owned(),
        connections: connected.len() as u32,
        messages: shape.count,
        size: shape.size,
        seconds: 0.0,
    })
}
