//! Connections by address over UDP sockets: between two fabrics of this process, and between processes, of which one
//! may be killed at any step.
//!
//! Each test has addresses of its own in 127.0.0.0/8. A second process is this program again, with its orders in the
//! environment; it reports its steps over TCP.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};
use uverbs::cm::{
    ConnectParam, Connection, Connector, EventChannel, Listener, PortSpace, Progress, RejectReason,
};
use uverbs::device::devices_on;
use uverbs::{
    Access, CompletionQueue, Context, Destination, Errno, MemoryRegion, ProtectionDomain, QpType,
    QueuePair, RecvWr, SendWr, WcStatus,
};
use uverbs_sim::{Fabric, Network};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Not that of RoCE, which soft-RoCE may have.
const PORT: u16 = 14_792;
/// How long anything may take on a machine that is busy.
const LIMIT: Duration = Duration::from_secs(30);
/// How long this process waits for one that does not answer: the connection manager itself would for more than a
/// minute.
const SHORT: Duration = Duration::from_millis(500);
/// Connections between two processes at once.
const MANY: usize = 100;
const RECEIVED: u64 = 1;
const SENT: u64 = 2;
const ORDERS: &str = "UVERBS_UDP_CONNECT_ORDERS";

/// An address that no other test has.
fn address() -> SocketAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let at = Ipv4Addr::new(127, 128 | high & 63, low, NEXT.fetch_add(1, Ordering::Relaxed));
    SocketAddr::new(at.into(), PORT)
}

/// A device over UDP, and a channel of its connection manager. Fields are dropped in this order.
struct Node {
    channel: EventChannel,
    context: Context,
    fabric: Fabric,
    at: SocketAddr,
}

impl Node {
    fn new(at: SocketAddr) -> Result<Node> {
        Node::on(Fabric::builder().udp(at).build()?, at)
    }

    fn on(fabric: Fabric, at: SocketAddr) -> Result<Node> {
        let system = fabric.system();
        let [device] = &devices_on(&system)[..] else { return Err("one device".into()) };
        let context = Context::open(device)?;
        let channel = EventChannel::open_on(&system)?;
        channel.use_context(&context)?;
        Ok(Node { channel, context, fabric, at })
    }

    fn listen(&self) -> Result<Listener> {
        let at = SocketAddr::new(self.at.ip(), 0);
        Ok(Listener::builder(at)?.backlog(128).channel(&self.channel).build()?)
    }

    fn connector(&self, to: SocketAddr, data: &[u8]) -> Result<Connector> {
        let param = ConnectParam::new().private_data(data);
        Ok(Connector::new(to)?.channel(&self.channel).timeout(LIMIT).param(param))
    }

    /// The connections and ids that the kernel still has.
    fn ids(&self) -> Result<u64> {
        let resources = self.fabric.system().resources(0)?;
        Ok(resources.iter().find(|(kind, _)| kind == "cm_id").map_or(0, |(_, count)| *count))
    }
}

/// A queue pair with its queue and memory. Fields are dropped in this order.
struct Side {
    qp: QueuePair,
    memory: MemoryRegion<u8>,
    cq: CompletionQueue,
    pd: ProtectionDomain,
}

impl Side {
    fn new(context: &Context, kind: QpType) -> uverbs::Result<Side> {
        let pd = context.alloc_pd()?;
        let cq = context.cq_builder(8).build()?;
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
        let qp = pd.qp_builder(&cq, &cq, kind).max_send_wr(4).max_recv_wr(4).build()?;
        Ok(Side { qp, memory, cq, pd })
    }

    fn recv(&mut self) -> Result<()> {
        let sges = [self.memory.sge(2048..4096)?];
        let mut batch = self.qp.recv_batch()?;
        batch.push(RecvWr::new(&sges).id(RECEIVED))?;
        // SAFETY: the memory is dropped after the queue pair, and read after the completion.
        unsafe { batch.ring()? };
        Ok(())
    }

    fn post(&mut self, wr: SendWr<'_>) -> Result<()> {
        let mut batch = self.qp.send_batch()?;
        batch.push(wr.id(SENT).signaled())?;
        // SAFETY: the memory is dropped after the queue pair, and not written before the completion.
        unsafe { batch.ring()? };
        Ok(())
    }

    fn send(&mut self, text: &[u8]) -> Result<()> {
        self.memory.copy_from(0, text)?;
        let sges = [self.memory.sge(..text.len())?];
        self.post(SendWr::send(&sges))
    }

    fn completion(&mut self) -> Result<(u64, WcStatus)> {
        let end = Instant::now() + LIMIT;
        while Instant::now() < end {
            if let Some(completion) = self.cq.poll()?.next() {
                return Ok((completion.wr_id(), completion.status()));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Err("nothing completes".into())
    }

    fn done(&mut self, id: u64) -> Result<()> {
        assert_eq!(self.completion()?, (id, WcStatus::SUCCESS));
        Ok(())
    }

    fn received(&self, at: usize, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.memory.copy_to(2048 + at, &mut bytes)?;
        Ok(bytes)
    }
}

fn done<P, D>(progress: Progress<P, D>) -> Result<D> {
    match progress {
        Progress::Done(done) => Ok(done),
        Progress::Pending(_) => Err("nothing happened in time".into()),
    }
}

/// Takes the next request with a queue pair that has a receive posted.
fn accept(node: &Node, listener: &Listener, data: &[u8]) -> Result<(Side, Connection)> {
    let request = listener.next_request(Some(LIMIT))?.ok_or("no request came")?;
    let mut side = Side::new(&node.context, QpType::RC)?;
    request.init_qp(&side.qp)?;
    side.recv()?;
    let accepting = request.accept(&side.qp, &ConnectParam::new().private_data(data))?;
    let connection = done(accepting.wait(Some(LIMIT))?)?;
    Ok((side, connection))
}

/// The connecting queue pair, handed to the connector by value.
struct Connecting(Side);

impl std::ops::Deref for Connecting {
    type Target = uverbs::QpControl;

    fn deref(&self) -> &uverbs::QpControl {
        &self.0.qp
    }
}

fn connect(node: &Node, to: SocketAddr, data: &[u8]) -> Result<(Side, Connection)> {
    let connected = node
        .connector(to, data)?
        .connect(|route| Side::new(&route.context()?, QpType::RC).map(Connecting));
    let (Connecting(side), connection) = connected?;
    Ok((side, connection))
}

/// Two devices, whose queue pairs are connected.
fn pair(a: &Node, b: &Node, listener: &Listener) -> Result<[(Side, Connection); 2]> {
    let to = listener.local_addr()?;
    std::thread::scope(|scope| {
        let passive = scope.spawn(|| accept(b, listener, b"welcome"));
        let active = connect(a, to, b"hello");
        let passive = passive.join().map_err(|_| "a panic")?;
        Ok([active?, passive?])
    })
}

fn exchange([(a, _), (b, _)]: &mut [(Side, Connection); 2]) -> Result<()> {
    a.send(b"over the wire")?;
    a.done(SENT)?;
    b.done(RECEIVED)?;
    assert_eq!(b.received(0, 13)?, b"over the wire");
    Ok(())
}

#[test]
fn two_devices_connect_by_address_and_disconnect() -> Result<()> {
    let (a, b) = (Node::new(address())?, Node::new(address())?);
    let listener = b.listen()?;
    for round in 0..3 {
        let mut pair = pair(&a, &b, &listener)?;
        exchange(&mut pair)?;
        let [(side, active), (other, passive)] = &pair;
        assert!(active.private_data().starts_with(b"welcome\0"));
        assert!(passive.private_data().starts_with(b"hello\0"));
        assert_eq!((active.private_data().len(), passive.private_data().len()), (196, 56));
        assert_eq!((active.peer_qpn(), passive.peer_qpn()), (other.qp.qpn(), side.qp.qpn()));
        assert_eq!(active.peer_addr()?, passive.local_addr()?);
        assert_eq!(passive.peer_addr()?, active.local_addr()?);
        assert_eq!(passive.peer_addr()?.ip(), a.at.ip());
        let [ends, hears] = if round % 2 == 0 { [active, passive] } else { [passive, active] };
        ends.disconnect()?;
        hears.wait_disconnected(Some(LIMIT))?;
        ends.wait_disconnected(Some(LIMIT))?;
        drop(pair);
        assert_eq!((a.ids()?, b.ids()?), (0, 1));
    }
    drop(listener);
    assert_eq!((a.ids()?, b.ids()?), (0, 0));
    let counters = [&a, &b].map(|node| node.fabric.udp_counters().expect("it is over UDP"));
    assert_eq!(counters.map(|counters| counters.management), [0, 0]);
    Ok(())
}

#[test]
fn a_device_with_an_ipv6_address_connects_to_itself() -> Result<()> {
    let at = SocketAddr::new(std::net::Ipv6Addr::LOCALHOST.into(), PORT);
    // A machine may have no IPv6.
    if let Err(why) = std::net::UdpSocket::bind((at.ip(), 0)) {
        writeln!(std::io::stderr(), "not judged: a device with an IPv6 address: {why}")?;
        return Ok(());
    }
    let node = Node::on(Fabric::builder().udp(at).build()?, at)?;
    let listener = node.listen()?;
    // Packets of a device to itself stay in the process: the messages, too.
    let mut pair = pair(&node, &node, &listener)?;
    exchange(&mut pair)
}

#[test]
fn a_refused_connection_says_why_and_brings_data() -> Result<()> {
    let (a, b) = (Node::new(address())?, Node::new(address())?);
    let listener = b.listen()?;
    let to = listener.local_addr()?;
    std::thread::scope(|scope| {
        let refuses = scope.spawn(|| -> Result<()> {
            let request = listener.next_request(Some(LIMIT))?.ok_or("no request came")?;
            assert_eq!(request.private_data()[..5], *b"hello");
            Ok(request.reject(&[7; 148])?)
        });
        let refused = connect(&a, to, b"hello").map(drop).unwrap_err();
        let error: &uverbs::cm::ConnectError = refused.downcast_ref().ok_or("another error")?;
        assert_eq!(error.errno(), Errno::CONNREFUSED, "{error}");
        let rejection = error.rejection().ok_or("no rejection")?;
        assert_eq!(rejection.reason(), Some(RejectReason::CONSUMER_DEFINED));
        assert_eq!(rejection.private_data(), [7; 148]);
        refuses.join().map_err(|_| "a panic")?
    })?;
    drop(listener);
    let error = connect(&a, to, b"").map(drop).unwrap_err();
    let error: &uverbs::cm::ConnectError = error.downcast_ref().ok_or("another error")?;
    let rejection = error.rejection().ok_or("no rejection")?;
    assert_eq!(rejection.reason(), Some(RejectReason::INVALID_SERVICE_ID));
    Ok(())
}

#[test]
fn a_network_that_loses_every_tenth_packet_delays_a_connection_and_no_more() -> Result<()> {
    // A message that is lost goes again after four seconds.
    let lossy = || Network::ideal().loss(0.1).duplication(0.2);
    let node = |at| Node::on(Fabric::builder().udp(at).network(lossy()).build()?, at);
    let (a, b) = (node(address())?, node(address())?);
    let listener = b.listen()?;
    for _ in 0..3 {
        let mut pair = pair(&a, &b, &listener)?;
        exchange(&mut pair)?;
    }
    Ok(())
}

#[test]
fn a_datagram_service_tells_its_queue_pair() -> Result<()> {
    const GRH: usize = 40;
    let (a, b) = (Node::new(address())?, Node::new(address())?);
    let at = SocketAddr::new(b.at.ip(), 0);
    let service = b.channel.create_id(PortSpace::UDP, QpType::UD)?.bind(at)?.listen(4)?;
    let to = service.local_addr()?;
    let id = a.channel.create_id(PortSpace::UDP, QpType::UD)?;
    let resolved = done(id.resolve_addr(None, to, LIMIT)?.wait(Some(LIMIT))?)?;
    let route = done(resolved.resolve_route(LIMIT)?.wait(Some(LIMIT))?)?;
    let (mut from, mut here) =
        (Side::new(&a.context, QpType::UD)?, Side::new(&b.context, QpType::UD)?);
    let asks = ConnectParam::new().private_data(&[3; 180]);
    let connecting = route.connect_datagrams(&from.qp, &asks)?;
    let request = service.next_request(Some(LIMIT))?.ok_or("no request came")?;
    assert_eq!((request.private_data(), request.peer_addr()?.ip()), (&[3; 180][..], a.at.ip()));
    request.accept_datagrams(&here.qp, &ConnectParam::new().private_data(&[4; 136]))?;
    let peer = done(connecting.wait(Some(LIMIT))?)?;
    assert_eq!((peer.qpn(), peer.private_data()), (here.qp.qpn(), &[4; 136][..]));
    here.recv()?;
    let ah = from.pd.create_ah(peer.address())?;
    from.memory.copy_from(0, b"datagram")?;
    let sges = [from.memory.sge(..8)?];
    from.post(SendWr::send(&sges).to(Destination::new(&ah, peer.qpn(), peer.qkey())))?;
    from.done(SENT)?;
    here.done(RECEIVED)?;
    assert_eq!(here.received(GRH, 8)?, b"datagram");
    Ok(())
}

/// Bytes of which none is 0, so that the zeros behind them tell their end.
fn data(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 % 255) as u8 + 1).collect()
}

/// Checks that a message brought these bytes, with zeros up to its limit.
fn brought(heard: &[u8], sent: &[u8], limit: usize) {
    let mut whole = sent.to_vec();
    whole.resize(limit, 0);
    assert_eq!(heard, whole);
}

/// The lengths to try of a message with this limit.
fn lengths(limit: usize) -> [usize; 4] {
    [0, 1, limit - 1, limit]
}

/// An error that says the limit.
fn says(error: &uverbs::Error, limit: usize) {
    assert_eq!(error.errno(), Errno::INVAL, "{error}");
    assert!(error.message().contains(&format!("at most {limit}")), "{error}");
}

/// Asks for a connection, and returns the asker's queue pair with the request that came.
fn asked(
    (a, to): (&Node, SocketAddr),
    listener: &Listener,
    param: &ConnectParam,
) -> Result<(Side, uverbs::cm::Connecting, uverbs::cm::ConnectRequest)> {
    let route = route(a, to, PortSpace::TCP, QpType::RC)?;
    let side = Side::new(&a.context, QpType::RC)?;
    route.init_qp(&side.qp)?;
    let connecting = route.connect(&side.qp, param)?;
    let request = listener.next_request(Some(LIMIT))?.ok_or("no request came")?;
    Ok((side, connecting, request))
}

fn route(
    node: &Node,
    to: SocketAddr,
    space: PortSpace,
    kind: QpType,
) -> Result<uverbs::cm::RouteResolved> {
    let id = node.channel.create_id(space, kind)?;
    let resolved = done(id.resolve_addr(None, to, LIMIT)?.wait(Some(LIMIT))?)?;
    done(resolved.resolve_route(LIMIT)?.wait(Some(LIMIT))?)
}

#[test]
fn a_request_brings_up_to_56_bytes() -> Result<()> {
    let (a, b) = (Node::new(address())?, Node::new(address())?);
    let listener = b.listen()?;
    let to = listener.local_addr()?;
    for len in lengths(56) {
        let param = ConnectParam::new().private_data(&data(len));
        let (_side, _connecting, request) = asked((&a, to), &listener, &param)?;
        brought(request.private_data(), &data(len), 56);
    }
    let much = ConnectParam::new().private_data(&data(57));
    let route = route(&a, to, PortSpace::TCP, QpType::RC)?;
    let side = Side::new(&a.context, QpType::RC)?;
    says(&route.connect(&side.qp, &much).unwrap_err(), 56);
    Ok(())
}

#[test]
fn a_reply_brings_up_to_196_bytes() -> Result<()> {
    let (a, b) = (Node::new(address())?, Node::new(address())?);
    let listener = b.listen()?;
    let to = listener.local_addr()?;
    for len in lengths(196) {
        let (_side, connecting, request) = asked((&a, to), &listener, &ConnectParam::new())?;
        let side = Side::new(&b.context, QpType::RC)?;
        let param = ConnectParam::new().private_data(&data(len));
        let accepting = request.accept(&side.qp, &param)?;
        let connection = done(connecting.wait(Some(LIMIT))?)?;
        brought(connection.private_data(), &data(len), 196);
        done(accepting.wait(Some(LIMIT))?)?;
    }
    let (_side, connecting, request) = asked((&a, to), &listener, &ConnectParam::new())?;
    let side = Side::new(&b.context, QpType::RC)?;
    let much = ConnectParam::new().private_data(&data(197));
    says(&request.accept(&side.qp, &much).unwrap_err(), 196);
    // The request is gone, and its sender is told.
    let error = connecting.wait(Some(LIMIT)).unwrap_err();
    let reason = error.rejection().and_then(|rejection| rejection.reason());
    assert_eq!(reason, Some(RejectReason::CONSUMER_DEFINED), "{error}");
    Ok(())
}

#[test]
fn a_rejection_brings_up_to_148_bytes() -> Result<()> {
    let (a, b) = (Node::new(address())?, Node::new(address())?);
    let listener = b.listen()?;
    let to = listener.local_addr()?;
    for len in lengths(148) {
        let (_side, connecting, request) = asked((&a, to), &listener, &ConnectParam::new())?;
        request.reject(&data(len))?;
        let error = connecting.wait(Some(LIMIT)).unwrap_err();
        let rejection = error.rejection().ok_or("no rejection")?;
        brought(rejection.private_data(), &data(len), 148);
    }
    let (_side, connecting, request) = asked((&a, to), &listener, &ConnectParam::new())?;
    says(&request.reject(&data(149)).unwrap_err(), 148);
    let error = connecting.wait(Some(LIMIT)).unwrap_err();
    assert_eq!(error.errno(), Errno::CONNREFUSED, "{error}");
    Ok(())
}

/// SIDR_REQ and SIDR_REP.
#[test]
fn a_query_of_a_datagram_service_brings_up_to_180_bytes_and_its_answer_136() -> Result<()> {
    let (a, b) = (Node::new(address())?, Node::new(address())?);
    let at = SocketAddr::new(b.at.ip(), 0);
    let service = b.channel.create_id(PortSpace::UDP, QpType::UD)?.bind(at)?.listen(4)?;
    let to = service.local_addr()?;
    let (side, here) = (Side::new(&a.context, QpType::UD)?, Side::new(&b.context, QpType::UD)?);
    let with = |len: usize| ConnectParam::new().private_data(&data(len));
    let route = || route(&a, to, PortSpace::UDP, QpType::UD);
    let asked = |len: usize| -> Result<_> {
        let side = Side::new(&a.context, QpType::UD)?;
        let connecting = route()?.connect_datagrams(&side.qp, &with(len))?;
        let request = service.next_request(Some(LIMIT))?.ok_or("no request came")?;
        Ok((side, connecting, request))
    };
    for (query, answer) in lengths(180).into_iter().zip(lengths(136)) {
        let (_side, connecting, request) = asked(query)?;
        brought(request.private_data(), &data(query), 180);
        request.accept_datagrams(&here.qp, &with(answer))?;
        let peer = done(connecting.wait(Some(LIMIT))?)?;
        brought(peer.private_data(), &data(answer), 136);
    }
    says(&route()?.connect_datagrams(&side.qp, &with(181)).unwrap_err(), 180);
    for accepts in [true, false] {
        let (_side, connecting, request) = asked(0)?;
        let refused = match accepts {
            true => request.accept_datagrams(&here.qp, &with(137)),
            false => request.reject(&data(137)),
        };
        says(&refused.unwrap_err(), 136);
        let error = connecting.wait(Some(LIMIT)).unwrap_err();
        assert_eq!(error.errno(), Errno::CONNREFUSED, "{error}");
    }
    Ok(())
}

#[cfg(feature = "tokio")]
#[test]
fn futures_connect_over_the_socket() -> Result<()> {
    use uverbs::aio::cm::AsyncEventChannel;
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(2).enable_all().build()?;
    let (a, b) = (Node::new(address())?, Node::new(address())?);
    runtime.block_on(async {
        let (server, _driver) = AsyncEventChannel::spawn_on(&b.fabric.system())?;
        let (client, _driver) = AsyncEventChannel::spawn_on(&a.fabric.system())?;
        let at = SocketAddr::new(b.at.ip(), 0);
        let listener = server.listen(&Listener::builder(at)?.backlog(16))?;
        let connector = Connector::new(listener.local_addr()?)?.timeout(LIMIT);
        let serves = tokio::spawn(async move {
            let mut accepted = Vec::new();
            for _ in 0..8 {
                let request = listener.next_request().await?;
                let side = Connecting(Side::new(&request.context()?, QpType::RC)?);
                let param = ConnectParam::new();
                let done = server.accept(request, &param, |_| Ok(side)).await;
                accepted.push(done.map_err(|error| error.to_string())?);
            }
            for (_, connection) in &accepted {
                connection.disconnected().await?;
            }
            Result::Ok(())
        });
        let mut connected = Vec::new();
        for _ in 0..8 {
            let done = client.connect(&connector, |route| {
                Side::new(&route.context()?, QpType::RC).map(Connecting)
            });
            connected.push(done.await.map_err(|error| error.to_string())?);
        }
        drop(connected);
        tokio::time::timeout(LIMIT, serves).await??
    })
}

/// A step that the second process reports, and at which it may be killed.
const READY: u8 = 1;
const ASKED: u8 = 2;
const CONNECTED: u8 = 3;
const ENDED: u8 = 4;

/// The second process.
struct Other {
    process: Child,
    reports: TcpStream,
}

impl Other {
    /// Starts it at an address, with a role and the peer's address, if that is known.
    fn start(at: SocketAddr, role: &str, peer: Option<SocketAddr>) -> Result<Other> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let peer = peer.map_or_else(|| "none".into(), |peer| peer.to_string());
        let process = Command::new(std::env::current_exe()?)
            .args(["the_second_process", "--exact", "--nocapture"])
            .env(ORDERS, format!("{at} {role} {peer} {port}"))
            .stdout(Stdio::null())
            .spawn()?;
        let (reports, _) = listener.accept()?;
        reports.set_read_timeout(Some(LIMIT))?;
        Ok(Other { process, reports })
    }

    /// Waits until it has come to a step.
    fn reported(&mut self, step: u8) -> Result<()> {
        let mut byte = [0];
        self.reports.read_exact(&mut byte)?;
        assert_eq!(byte, [step]);
        Ok(())
    }

    /// The address at which it listens.
    fn listens_at(&mut self) -> Result<SocketAddr> {
        self.reported(READY)?;
        let mut bytes = [0; 2];
        self.reports.read_exact(&mut bytes)?;
        Ok(SocketAddr::new([0; 4].into(), u16::from_be_bytes(bytes)))
    }

    fn kill(mut self) -> Result<()> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }

    fn ends(mut self) -> Result<()> {
        self.reported(ENDED)?;
        assert!(self.process.wait()?.success());
        Ok(())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The second process by its orders; without them it does nothing.
#[test]
fn the_second_process() -> Result<()> {
    let Ok(orders) = std::env::var(ORDERS) else { return Ok(()) };
    let words: Vec<&str> = orders.split(' ').collect();
    let [at, role, peer, port] = words[..] else { return Err("no orders".into()) };
    let node = Node::new(at.parse()?)?;
    let mut reports = TcpStream::connect((Ipv4Addr::LOCALHOST, port.parse()?))?;
    let mut report = |step: u8| reports.write_all(&[step]);
    match role {
        // Accepts many, and waits until all have ended.
        "server" | "mute" => {
            let listener = node.listen()?;
            report(READY)?;
            reports.write_all(&listener.local_addr()?.port().to_be_bytes())?;
            let mut report = |step: u8| reports.write_all(&[step]);
            if role == "mute" {
                let request = listener.next_request(Some(LIMIT))?.ok_or("no request came")?;
                report(ASKED)?;
                std::thread::sleep(LIMIT);
                drop(request);
                return Ok(());
            }
            let accepted: Result<Vec<_>> =
                (0..MANY).map(|_| accept(&node, &listener, b"welcome")).collect();
            report(CONNECTED)?;
            let mut accepted = accepted?;
            for (side, connection) in &mut accepted {
                side.done(RECEIVED)?;
                connection.wait_disconnected(Some(LIMIT))?;
            }
            drop((accepted, listener));
            assert_eq!(node.ids()?, 0);
            report(ENDED)?;
        }
        // Accepts one, and waits to be killed.
        "doomed" => {
            let listener = node.listen()?;
            report(READY)?;
            reports.write_all(&listener.local_addr()?.port().to_be_bytes())?;
            let accepted = accept(&node, &listener, b"welcome")?;
            reports.write_all(&[CONNECTED])?;
            std::thread::sleep(LIMIT);
            drop(accepted);
        }
        // Asks, and waits to be killed.
        "asks" => {
            let id = node.channel.create_id(PortSpace::TCP, QpType::RC)?;
            let resolved = done(id.resolve_addr(None, peer.parse()?, LIMIT)?.wait(Some(LIMIT))?)?;
            let route = done(resolved.resolve_route(LIMIT)?.wait(Some(LIMIT))?)?;
            let side = Side::new(&route.context()?, QpType::RC)?;
            route.init_qp(&side.qp)?;
            let connecting = route.connect(&side.qp, &ConnectParam::new())?;
            report(ASKED)?;
            std::thread::sleep(LIMIT);
            drop(connecting);
        }
        // Connects, and waits to be killed.
        "connects" => {
            let connected = connect(&node, peer.parse()?, b"hello")?;
            report(CONNECTED)?;
            std::thread::sleep(LIMIT);
            drop(connected);
        }
        // Connects, asks for the end, and waits to be killed before that is confirmed.
        "leaves" => {
            let (side, connection) = connect(&node, peer.parse()?, b"hello")?;
            connection.disconnect()?;
            report(ASKED)?;
            std::thread::sleep(LIMIT);
            drop((side, connection));
        }
        // Asks a datagram service for its queue pair, and waits to be killed.
        "queries" => {
            let route = route(&node, peer.parse()?, PortSpace::UDP, QpType::UD)?;
            let side = Side::new(&node.context, QpType::UD)?;
            let connecting = route.connect_datagrams(&side.qp, &ConnectParam::new())?;
            report(ASKED)?;
            std::thread::sleep(LIMIT);
            drop(connecting);
        }
        // Is asked, and waits to be killed before it answers.
        "service" => {
            let at = SocketAddr::new(node.at.ip(), 0);
            let service =
                node.channel.create_id(PortSpace::UDP, QpType::UD)?.bind(at)?.listen(4)?;
            report(READY)?;
            reports.write_all(&service.local_addr()?.port().to_be_bytes())?;
            let request = service.next_request(Some(LIMIT))?.ok_or("no request came")?;
            reports.write_all(&[ASKED])?;
            std::thread::sleep(LIMIT);
            drop(request);
        }
        other => return Err(other.into()),
    }
    Ok(())
}

#[test]
fn a_hundred_connections_to_another_process_and_nothing_is_left() -> Result<()> {
    let there = address();
    let mut other = Other::start(there, "server", None)?;
    let to = SocketAddr::new(there.ip(), other.listens_at()?.port());
    let node = Node::new(address())?;
    let mut connected = Vec::new();
    for number in 0..MANY {
        let (mut side, connection) = connect(&node, to, &[number as u8; 56])?;
        side.send(&[number as u8; 100])?;
        side.done(SENT)?;
        connected.push((side, connection));
    }
    other.reported(CONNECTED)?;
    assert_eq!(node.ids()?, MANY as u64);
    for (number, (_, connection)) in connected.iter().enumerate() {
        assert!(connection.private_data().starts_with(b"welcome\0"), "{number}");
    }
    drop(connected);
    other.ends()?;
    assert_eq!((node.ids()?, node.context.leaked()), (0, 0));
    Ok(())
}

/// Connects two devices of this process, which have nothing to do with the one that was killed, and the same device.
fn goes_on(node: &Node) -> Result<()> {
    let (peer, listener) = (Node::new(address())?, node.listen()?);
    let mut pair = pair(&peer, node, &listener)?;
    exchange(&mut pair)
}

#[test]
fn a_server_that_is_killed_before_it_answers_leaves_a_client_with_a_deadline() -> Result<()> {
    let (there, node) = (address(), Node::new(address())?);
    let mut other = Other::start(there, "mute", None)?;
    let to = SocketAddr::new(there.ip(), other.listens_at()?.port());
    let connector = node.connector(to, b"")?.timeout(SHORT);
    std::thread::scope(|scope| {
        let connects = scope.spawn(|| {
            let begun = Instant::now();
            let connected =
                connector.connect(|route| Side::new(&route.context()?, QpType::RC).map(Connecting));
            (connected.map(drop), begun.elapsed())
        });
        other.reported(ASKED)?;
        other.kill()?;
        let (connected, took) = connects.join().map_err(|_| "a panic")?;
        let error = connected.unwrap_err();
        assert_eq!(error.errno(), Errno::TIMEDOUT, "{error}");
        assert!(took < LIMIT / 2, "{took:?}");
        Result::Ok(())
    })?;
    assert_eq!(node.ids()?, 0);
    goes_on(&node)
}

#[test]
fn a_server_that_is_killed_when_connected_fails_the_next_request() -> Result<()> {
    let (there, node) = (address(), Node::new(address())?);
    let mut other = Other::start(there, "doomed", None)?;
    let to = SocketAddr::new(there.ip(), other.listens_at()?.port());
    let (mut side, connection) = connect(&node, to, b"hello")?;
    other.reported(CONNECTED)?;
    other.kill()?;
    side.send(b"is anybody there")?;
    let (id, status) = side.completion()?;
    assert_eq!((id, status), (SENT, WcStatus::RETRY_EXC_ERR));
    // A new process at the address knows nothing of the connection: its end is confirmed at once.
    let again = Other::start(there, "doomed", None)?;
    connection.disconnect()?;
    connection.wait_disconnected(Some(LIMIT))?;
    drop((connection, side));
    assert_eq!(node.ids()?, 0);
    again.kill()?;
    goes_on(&node)
}

#[test]
fn a_client_that_is_killed_before_or_after_the_answer_leaves_a_request() -> Result<()> {
    for accepts in [false, true] {
        let node = Node::new(address())?;
        let listener = node.listen()?;
        let mut other = Other::start(address(), "asks", Some(listener.local_addr()?))?;
        other.reported(ASKED)?;
        let request = listener.next_request(Some(LIMIT))?.ok_or("no request came")?;
        let side = Side::new(&node.context, QpType::RC)?;
        if accepts {
            let accepting = request.accept(&side.qp, &ConnectParam::new())?;
            other.kill()?;
            let Progress::Pending(accepting) = accepting.wait(Some(SHORT))? else {
                return Err("connected to nobody".into());
            };
            drop(accepting);
        } else {
            other.kill()?;
            request.reject(b"too late")?;
        }
        drop(listener);
        assert_eq!(node.ids()?, 0);
        goes_on(&node)?;
    }
    Ok(())
}

#[test]
fn a_client_that_is_killed_when_connected_leaves_a_connection_that_ends() -> Result<()> {
    let node = Node::new(address())?;
    let listener = node.listen()?;
    let there = address();
    let mut other = Other::start(there, "connects", Some(listener.local_addr()?))?;
    let (mut side, connection) = accept(&node, &listener, b"welcome")?;
    other.reported(CONNECTED)?;
    other.kill()?;
    side.send(b"is anybody there")?;
    assert_eq!(side.completion()?.1, WcStatus::RETRY_EXC_ERR);
    // It has no peer that could confirm the end, and the program does not wait for that.
    connection.disconnect()?;
    drop((connection, side, listener));
    assert_eq!(node.ids()?, 0);
    goes_on(&node)
}

#[test]
fn a_client_that_is_killed_amid_the_end_of_a_connection_leaves_none() -> Result<()> {
    let node = Node::new(address())?;
    let listener = node.listen()?;
    let mut other = Other::start(address(), "leaves", Some(listener.local_addr()?))?;
    let (side, connection) = accept(&node, &listener, b"welcome")?;
    other.reported(ASKED)?;
    other.kill()?;
    connection.wait_disconnected(Some(LIMIT))?;
    // Nobody takes the confirmation.
    connection.disconnect()?;
    drop((connection, side, listener));
    assert_eq!(node.ids()?, 0);
    goes_on(&node)
}

#[test]
fn either_side_of_a_query_of_a_datagram_service_may_be_killed() -> Result<()> {
    let node = Node::new(address())?;
    let at = SocketAddr::new(node.at.ip(), 0);
    let service = node.channel.create_id(PortSpace::UDP, QpType::UD)?.bind(at)?.listen(4)?;
    let mut other = Other::start(address(), "queries", Some(service.local_addr()?))?;
    other.reported(ASKED)?;
    let request = service.next_request(Some(LIMIT))?.ok_or("no request came")?;
    other.kill()?;
    let side = Side::new(&node.context, QpType::UD)?;
    request.accept_datagrams(&side.qp, &ConnectParam::new())?;
    drop((side, service));
    assert_eq!(node.ids()?, 0);

    let there = address();
    let mut other = Other::start(there, "service", None)?;
    let to = SocketAddr::new(there.ip(), other.listens_at()?.port());
    let side = Side::new(&node.context, QpType::UD)?;
    let connecting = route(&node, to, PortSpace::UDP, QpType::UD)?
        .connect_datagrams(&side.qp, &ConnectParam::new())?;
    other.reported(ASKED)?;
    other.kill()?;
    // The answer does not come, and the program need not wait for the last retry.
    let Progress::Pending(connecting) = connecting.wait(Some(SHORT))? else {
        return Err("a killed service answers".into());
    };
    drop((connecting, side));
    assert_eq!(node.ids()?, 0);
    goes_on(&node)
}
