//! `uverbs cm cmtime`: the time of each step of many connections. rdma-core's program of releases 52 to 58 has the same
//! name and the same exchange; later releases agree on a mesh of peers first.
//!
//! Beside the connections a TCP connection keeps both sides in step. There are three rounds: a connection to warm up,
//! the measured ones, and as many again, for which rdma-core's program invents its queue pairs.

use super::{cannot_connect, cannot_listen, listening_address, resolve, unfinished};
use crate::args::CmtimeArgs;
use crate::failure::{self, Failure, Result};
use crate::output::outln;
use serde::Serialize;
use std::fmt;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};
use uverbs::cm::{ConnectParam, EventChannel, ListeningId, PortSpace};
use uverbs::{CompletionQueue, Context, ProtectionDomain, QpType, QueuePair};

/// The numbers of steps after which both sides wait for each other.
const BEGIN: u8 = 0;
const CONNECTED: u8 = 12;
const DISCONNECTED: u8 = 14;

pub(super) fn run(args: &CmtimeArgs) -> Result<()> {
    let report = match &args.server {
        Some(server) => client(args, server)?,
        None => server(args)?,
    };
    if args.json {
        failure::print(&report);
    } else {
        outln!("{report}");
    }
    Ok(())
}

fn param() -> ConnectParam {
    ConnectParam::new().responder_resources(1).initiator_depth(1).retry_count(0).rnr_retry(0)
}

/// The connection that keeps both sides in step.
struct Pace(TcpStream);

impl Pace {
    fn new(stream: TcpStream, timeout: Duration) -> Result<Pace> {
        let set = stream.set_nodelay(true).and_then(|()| stream.set_read_timeout(Some(timeout)));
        set.map_err(|error| Failure::run(format!("the TCP connection: {error}")))?;
        Ok(Pace(stream))
    }

    fn say(&mut self, step: u8) -> Result<()> {
        self.0.write_all(&[step]).map_err(|error| lost(&error))
    }

    fn hear(&mut self, step: u8) -> Result<()> {
        let mut heard = [0];
        self.0.read_exact(&mut heard).map_err(|error| lost(&error))?;
        if heard != [step] {
            let [heard] = heard;
            return Err(Failure::peer(format!(
                "the peer is at step {heard}, and this side at {step}: is it cmtime of rdma-core 52 to 58?"
            )));
        }
        Ok(())
    }
}

fn lost(error: &std::io::Error) -> Failure {
    Failure::peer(format!("the peer left, or was silent for too long: {error}"))
        .advice("give both sides the same -c, or allow more time with --timeout")
}

/// The objects that all queue pairs share. No message is sent.
struct Verbs {
    context: Context,
    pd: ProtectionDomain,
    cq: CompletionQueue,
}

impl Verbs {
    fn new(context: Context) -> uverbs::Result<Verbs> {
        let (pd, cq) = (context.alloc_pd()?, context.cq_builder(1).build()?);
        Ok(Verbs { context, pd, cq })
    }

    fn qp(&self) -> uverbs::Result<QueuePair> {
        let qp = self.pd.qp_builder(&self.cq, &self.cq, QpType::RC);
        qp.max_send_wr(1).max_recv_wr(1).build()
    }
}

/// Makes them on the device of the first connection, which all connections share.
fn verbs(
    verbs: &mut Option<Verbs>,
    context: impl FnOnce() -> uverbs::Result<Context>,
) -> uverbs::Result<&Verbs> {
    let known = match verbs.take() {
        Some(known) => known,
        None => Verbs::new(context()?)?,
    };
    Ok(verbs.insert(known))
}

/// Takes the time of the steps of a round.
struct Clock {
    steps: Vec<Step>,
    last: Instant,
    connections: u32,
}

impl Clock {
    fn new(connections: u32) -> Clock {
        Clock { steps: Vec::new(), last: Instant::now(), connections }
    }

    /// Ends a step, which began at the end of the step before.
    fn end(&mut self, step: &'static str) {
        let usec = self.last.elapsed().as_secs_f64() * 1e6;
        let usec_per_connection = usec / f64::from(self.connections.max(1));
        self.steps.push(Step { step, usec, usec_per_connection });
        self.last = Instant::now();
    }

    /// Begins the next step: the time since the last step was the peer's.
    fn begin(&mut self) {
        self.last = Instant::now();
    }
}

fn client(args: &CmtimeArgs, server: &str) -> Result<CmtimeReport> {
    let at = resolve(server, args.port)?;
    let from = args.bind.as_ref().map(|host| resolve(host, 0)).transpose()?;
    let stream = TcpStream::connect_timeout(&at, args.patience())
        .map_err(|error| Failure::peer(format!("{at}, over TCP: {error}")))
        .map_err(|failure| failure.advice("start the server first, with the same --port"))?;
    let mut pace = Pace::new(stream, args.patience())?;
    let (channel, mut shared) = (EventChannel::open()?, None);
    let mut round =
        |count: u32| client_round(args, &channel, &mut shared, &mut pace, at, from, count);
    round(1)?;
    let clock = round(args.connections)?;
    round(args.connections)?;
    Ok(CmtimeReport::new("client", at, shared.as_ref(), args, clock.steps))
}

fn client_round(
    args: &CmtimeArgs,
    channel: &EventChannel,
    shared: &mut Option<Verbs>,
    pace: &mut Pace,
    at: SocketAddr,
    from: Option<SocketAddr>,
    count: u32,
) -> Result<Clock> {
    let failed = |error: uverbs::Error| cannot_connect(&error.into(), at);
    let (resolve, patience) = (Duration::from_millis(args.resolve_timeout), Some(args.patience()));
    pace.say(BEGIN)?;
    pace.hear(BEGIN)?;
    let begin = Instant::now();
    let mut clock = Clock::new(count);
    let ids: uverbs::Result<Vec<_>> =
        (0..count).map(|_| channel.create_id(PortSpace::TCP, QpType::RC)).collect();
    clock.end("create id");
    let resolving: uverbs::Result<Vec<_>> =
        ids?.into_iter().map(|id| id.resolve_addr(from, at, resolve)).collect();
    let resolved: uverbs::Result<Vec<_>> =
        resolving.map_err(failed)?.into_iter().map(|id| id.wait(patience)?.done()).collect();
    clock.end("resolve addr");
    let resolving: uverbs::Result<Vec<_>> =
        resolved.map_err(failed)?.into_iter().map(|id| id.resolve_route(resolve)).collect();
    let routes: uverbs::Result<Vec<_>> =
        resolving.map_err(failed)?.into_iter().map(|id| id.wait(patience)?.done()).collect();
    let routes = routes.map_err(failed)?;
    clock.end("resolve route");
    let mut qps = Vec::new();
    for id in &routes {
        qps.push(verbs(shared, || id.context())?.qp()?);
    }
    clock.end("create qp");
    for (id, qp) in routes.iter().zip(&qps) {
        id.init_qp(qp)?;
    }
    clock.end("init qp");
    let mut connecting = Vec::new();
    for (id, qp) in routes.into_iter().zip(&qps) {
        connecting.push(id.connect(qp, &param()).map_err(failed)?);
    }
    let mut connections = Vec::new();
    for id in connecting {
        let connection = id.wait(patience).map_err(|error| cannot_connect(&error, at))?;
        connections.push(connection.done().map_err(|error| unfinished(error, at))?);
    }
    clock.end("connect");
    let whole = begin.elapsed();
    pace.say(CONNECTED)?;
    pace.hear(CONNECTED)?;
    clock.begin();
    for connection in &connections {
        connection.disconnect()?;
    }
    clock.end("disconnect");
    pace.say(DISCONNECTED)?;
    pace.hear(DISCONNECTED)?;
    clock.begin();
    drop(qps);
    clock.end("destroy qp");
    drop(connections);
    clock.end("destroy id");
    let usec = whole.as_secs_f64() * 1e6;
    let usec_per_connection = usec / f64::from(count);
    clock.steps.insert(0, Step { step: "full connect", usec, usec_per_connection });
    Ok(clock)
}

fn server(args: &CmtimeArgs) -> Result<CmtimeReport> {
    let at = listening_address(args.bind.as_deref(), args.port)?;
    let channel = EventChannel::open()?;
    // Listens before it takes the TCP connection, which tells the client that the server listens.
    let listener =
        channel.create_id(PortSpace::TCP, QpType::RC)?.bind(at).and_then(|id| id.listen(0));
    let listener = listener.map_err(|error| cannot_listen(error, at.ip()))?;
    let (stream, peer) = accept(at, Duration::from_secs(args.wait))?;
    let mut pace = Pace::new(stream, args.patience())?;
    let mut shared = None;
    let mut round = |count: u32| server_round(args, &listener, &mut shared, &mut pace, count);
    round(1)?;
    let clock = round(args.connections)?;
    round(args.connections)?;
    Ok(CmtimeReport::new("server", peer, shared.as_ref(), args, clock.steps))
}

/// Waits for the client's TCP connection.
fn accept(at: SocketAddr, wait: Duration) -> Result<(TcpStream, SocketAddr)> {
    let failed = |error: std::io::Error| Failure::device(format!("{at}, over TCP: {error}"));
    let listener = TcpListener::bind(at).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let deadline = Instant::now() + wait;
    loop {
        match listener.accept() {
            Ok((stream, peer)) => {
                stream.set_nonblocking(false).map_err(failed)?;
                return Ok((stream, peer));
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(failed(error)),
        }
        if Instant::now() > deadline {
            return Err(Failure::peer(format!("no client came within {wait:?}"))
                .advice("allow more time with --wait"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn server_round(
    args: &CmtimeArgs,
    listener: &ListeningId,
    shared: &mut Option<Verbs>,
    pace: &mut Pace,
    count: u32,
) -> Result<Clock> {
    let patience = Some(args.patience());
    pace.hear(BEGIN)?;
    pace.say(BEGIN)?;
    let mut clock = Clock::new(count);
    let (mut qps, mut accepting) = (Vec::new(), Vec::new());
    for came in 0..count {
        let Some(request) = listener.next_request(patience)? else {
            return Err(Failure::peer(format!("{came} of {count} connections came"))
                .advice("give both sides the same -c"));
        };
        if came == 0 {
            clock.begin();
        }
        let peer = request.peer_addr()?;
        let qp = verbs(shared, || request.context())?.qp()?;
        accepting.push((request.accept(&qp, &param())?, peer));
        qps.push(qp);
    }
    let mut connections = Vec::new();
    for (id, peer) in accepting {
        let connection = id.wait(patience).map_err(|error| cannot_connect(&error, peer))?;
        connections.push(connection.done().map_err(|error| unfinished(error, peer))?);
    }
    clock.end("connect");
    pace.hear(CONNECTED)?;
    pace.say(CONNECTED)?;
    for (number, connection) in connections.iter().enumerate() {
        connection.wait_disconnected(patience)?;
        if number == 0 {
            clock.begin();
        }
        connection.disconnect()?;
    }
    clock.end("disconnect");
    pace.hear(DISCONNECTED)?;
    pace.say(DISCONNECTED)?;
    clock.begin();
    drop(qps);
    clock.end("destroy qp");
    drop(connections);
    clock.end("destroy id");
    Ok(clock)
}

/// The time of a step for all connections.
#[derive(Clone, Debug, Serialize)]
struct Step {
    step: &'static str,
    usec: f64,
    usec_per_connection: f64,
}

/// A run that went well. The fields keep their names, types and units; new ones may be added.
#[derive(Clone, Debug, Serialize)]
struct CmtimeReport {
    program: &'static str,
    role: &'static str,
    peer: String,
    device: String,
    connections: u32,
    steps: Vec<Step>,
}

impl CmtimeReport {
    fn new(
        role: &'static str,
        peer: SocketAddr,
        verbs: Option<&Verbs>,
        args: &CmtimeArgs,
        steps: Vec<Step>,
    ) -> CmtimeReport {
        let device = verbs.map(|verbs| verbs.context.device().name().to_owned());
        CmtimeReport {
            program: "cmtime",
            role,
            peer: peer.to_string(),
            device: device.unwrap_or_default(),
            connections: args.connections,
            steps,
        }
    }
}

impl fmt::Display for CmtimeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CmtimeReport { role, peer, device, connections, steps, .. } = self;
        writeln!(f, "{connections} connections of {device} with {peer}, the {role}'s side")?;
        write!(f, "{:<14} {:>12} {:>12}", "step", "total µs", "µs each")?;
        for Step { step, usec, usec_per_connection } in steps {
            write!(f, "\n{step:<14} {usec:>12.0} {usec_per_connection:>12.1}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_at_another_step_is_no_cmtime() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let mut pace = Pace::new(stream, Duration::from_secs(10)).unwrap();
        peer.write_all(&[BEGIN, CONNECTED, BEGIN]).unwrap();
        pace.hear(BEGIN).unwrap();
        pace.hear(CONNECTED).unwrap();
        let failure = pace.hear(DISCONNECTED).unwrap_err();
        assert!(failure.to_string().contains("at step 0, and this side at 14"), "{failure}");
        pace.say(DISCONNECTED).unwrap();
        let mut heard = [0];
        peer.read_exact(&mut heard).unwrap();
        assert_eq!(heard, [DISCONNECTED]);
        drop(peer);
        assert!(pace.hear(BEGIN).unwrap_err().to_string().contains("the same -c"));
    }
}
