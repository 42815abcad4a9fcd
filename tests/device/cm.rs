//! Connections by address: the kernel's connection manager, with both sides in this process. The passive
//! side is on the second device if there is one.

mod crowd;
pub(crate) mod datagrams;
#[cfg(feature = "tokio")]
mod futures;
mod infiniband;
mod ipv6;
mod killed;
mod multicast;
mod paths;
mod peers;
mod queue_pairs;
mod types;

use crate::capability::Capability;
use crate::env;
use crate::fork::in_child;
use crate::pair::{PATIENCE, SILENCE};
use crate::testbed::link_of;
use crate::verdict::{Stop, Verdict, require, supported, trials};
use libtest_mimic::Trial;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};
use uverbs::cm::{
    ACCEPT_PRIVATE_DATA, Accepting, ConnectError, ConnectParam, ConnectRequest, Connecting,
    Connection, ConnectionEvent, Connector, Ece, EventChannel, Id, Listener, ListeningId,
    PortSpace, Progress, REJECT_PRIVATE_DATA, REQUEST_PRIVATE_DATA, RejectReason, RouteResolved,
};
use uverbs::{
    Access, CompletionQueue, Context, Device, Errno, MemoryRegion, ProtectionDomain, QpState,
    QpType, QueuePair, RecvWr, SendWr, WcStatus,
};

/// The tests of connections by address.
pub(crate) fn all() -> Vec<Trial> {
    let parts = [
        trials(),
        crowd::trials(),
        datagrams::trials(),
        #[cfg(feature = "tokio")]
        futures::trials(),
        infiniband::trials(),
        ipv6::trials(),
        killed::trials(),
        multicast::trials(),
        paths::trials(),
        peers::trials(),
        queue_pairs::trials(),
        types::trials(),
    ];
    parts.into_iter().flatten().collect()
}

trials![
    connected_queue_pairs_exchange_messages_and_read,
    private_data_arrives_up_to_its_limit,
    rejection_brings_reason_and_data,
    dropped_request_is_rejected,
    connect_to_a_port_without_a_listener_is_refused,
    request_waits_until_it_is_accepted,
    either_side_disconnects,
    dropping_a_connection_closes_it,
    queue_pair_may_be_dropped_before_its_connection,
    dropping_the_listener_rejects_waiting_requests_and_keeps_connections,
    port_in_use_and_ports_of_the_kernels_choice,
    addresses_of_no_rdma_device,
    loopback_is_listened_on_and_not_connected_to,
    receive_may_be_posted_long_after_the_message,
    privileged_port_needs_a_capability,
    both_sides_connect_at_once,
    queue_pair_of_another_device_is_refused,
    parameters_beyond_the_device_are_refused,
    depths_are_agreed_on,
    options_of_the_vendor_travel_both_ways,
    peer_whose_options_were_refused_connects_without_any,
    devices_agree_on_their_options,
    written_events_wake_the_waiting_thread,
    hundred_connections_and_nothing_is_left,
    events_of_dropped_ids_are_discarded,
    threads_share_a_channel,
    thread_without_a_deadline_reads_for_others,
    request_moves_to_another_channel,
    connector_and_listener_do_it_in_one_call,
    connector_gives_up_in_time,
    child_neither_uses_nor_destroys_ids,
];

/// The channel of a test, or a skip where the kernel has no connection manager.
pub(crate) fn channel() -> Verdict<EventChannel> {
    match EventChannel::open() {
        Ok(channel) => Ok(channel),
        Err(error) if error.errno() == Errno::NODEV => {
            Err(Stop::Skip(Capability::Cm, error.to_string()))
        }
        Err(error) => Err(error.into()),
    }
}

/// The IP address of a device's port.
pub(crate) fn address(device: &Device) -> Verdict<IpAddr> {
    let context = Context::open(device)?;
    let gid = context.default_gid(link_of(&context)?.port)?.gid;
    require(!gid.is_link_local(), Capability::Cm, "the port has no IP address")?;
    Ok(gid.ip())
}

/// The device that listens.
pub(crate) fn passive() -> Verdict<Device> {
    match env::second() {
        Ok(device) => Ok(device),
        Err(Stop::Skip(..)) => Ok(env::device()),
        Err(stop) => Err(stop),
    }
}

/// A listener on a channel with a context of its own.
pub(crate) struct Service {
    pub(crate) id: ListeningId,
    channel: EventChannel,
    pub(crate) at: SocketAddr,
    context: Context,
}

impl Service {
    /// Listens on the IP address of the passive device, with a port that the kernel chooses.
    pub(crate) fn start(backlog: u32) -> Verdict<Service> {
        let device = passive()?;
        Service::with_backlog(&device, (address(&device)?, 0).into(), backlog)
    }

    pub(crate) fn at(device: &Device, address: SocketAddr) -> Verdict<Service> {
        Service::with_backlog(device, address, 4)
    }

    fn with_backlog(device: &Device, address: SocketAddr, backlog: u32) -> Verdict<Service> {
        let channel = channel()?;
        Service::by(
            channel.create_id(PortSpace::TCP, QpType::RC)?,
            channel,
            device,
            address,
            backlog,
        )
    }

    fn by(
        id: Id,
        channel: EventChannel,
        device: &Device,
        address: SocketAddr,
        backlog: u32,
    ) -> Verdict<Service> {
        let context = Context::open(device)?;
        channel.use_context(&context)?;
        let id = id.bind(address)?.listen(backlog)?;
        let at = id.local_addr()?;
        Ok(Service { id, channel, at, context })
    }

    pub(crate) fn request(&self) -> Verdict<ConnectRequest> {
        let request = self.id.next_request(Some(PATIENCE))?;
        request.ok_or_else(|| Stop::fail("no request came"))
    }
}

/// The number of each receive of a [`Side`]; that of a send is 0.
const RECEIVE: u64 = 1;

/// The resources of one side.
pub(crate) struct Side {
    pub(crate) qp: QueuePair,
    cq: CompletionQueue,
    memory: MemoryRegion<u64>,
    pd: ProtectionDomain,
}

impl Side {
    pub(crate) fn of(context: &Context) -> uverbs::Result<Side> {
        Side::with(context, QpType::RC)
    }

    pub(crate) fn with(context: &Context, qp_type: QpType) -> uverbs::Result<Side> {
        let pd = context.alloc_pd()?;
        let cq = context.cq_builder(16).build()?;
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(64)?;
        let qp = pd.qp_builder(&cq, &cq, qp_type).max_send_wr(8).max_recv_wr(8).build()?;
        Ok(Side { qp, cq, memory, pd })
    }

    pub(crate) fn receive(&mut self) -> Verdict {
        self.receive_at(0, self.memory.byte_len())
    }

    #[allow(unsafe_code, reason = "ringing a batch is unsafe")]
    fn receive_at(&mut self, offset: usize, length: usize) -> Verdict {
        let sges = [self.memory.sge(offset..offset + length)?];
        let mut batch = self.qp.recv_batch()?;
        batch.push(RecvWr::new(&sges).id(RECEIVE))?;
        // SAFETY: the region lives as long as the queue pair, and is read only after completion.
        unsafe { batch.ring()? };
        Ok(())
    }

    #[allow(unsafe_code, reason = "ringing a batch is unsafe")]
    fn post(&mut self, wr: SendWr<'_>) -> Verdict {
        let mut batch = self.qp.send_batch()?;
        batch.push(wr.signaled())?;
        // SAFETY: the region lives as long as the queue pair, and is written only after completion.
        unsafe { batch.ring() }?;
        Ok(())
    }

    fn complete(&mut self) -> Verdict<WcStatus> {
        Ok(self.completion()?.1)
    }

    /// Sends the message that [`received`](Self::received) expects.
    pub(crate) fn send(&mut self) -> Verdict {
        self.memory.write_at(3, 0x0123_4567_89ab_cdef)?;
        let sges = [self.memory.sge(..)?];
        self.post(SendWr::send(&sges))?;
        assert_eq!(self.complete()?, WcStatus::SUCCESS);
        Ok(())
    }

    /// Waits for the message.
    pub(crate) fn received(&mut self) -> Verdict {
        assert_eq!(self.complete()?, WcStatus::SUCCESS);
        assert_eq!(self.memory.read_at(3), Some(0x0123_4567_89ab_cdef));
        Ok(())
    }

    /// The number and status of the next request that completes.
    fn completion(&mut self) -> Verdict<(u64, WcStatus)> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(completion) = self.cq.poll()?.next() {
                return Ok((completion.wr_id(), completion.status()));
            }
            std::thread::yield_now();
        }
        Err(Stop::fail("no completion"))
    }
}

/// Sends one message.
pub(crate) fn send(from: &mut Side, to: &mut Side) -> Verdict {
    to.memory.write_at(3, 0)?;
    to.receive()?;
    from.send()?;
    to.received()
}

/// Reads memory of the other side.
fn read(reader: &mut Side, other: &mut Side) -> Verdict {
    other.memory.write_at(5, 77)?;
    reader.memory.write_at(5, 0)?;
    let remote = other.memory.remote(0)?;
    let sges = [reader.memory.sge(..)?];
    reader.post(SendWr::read(remote, &sges))?;
    assert_eq!(reader.complete()?, WcStatus::SUCCESS);
    assert_eq!(reader.memory.read_at(5), Some(77));
    Ok(())
}

pub(crate) fn done<P, D>(progress: Progress<P, D>) -> Verdict<D> {
    match progress {
        Progress::Done(done) => Ok(done),
        Progress::Pending(_) => Err(Stop::fail("nothing happened in time")),
    }
}

/// Resolves an address, from the device under test.
fn route(channel: &EventChannel, to: SocketAddr) -> Verdict<RouteResolved> {
    route_from(channel, SocketAddr::new(address(&env::device())?, 0), to)
}

pub(crate) fn route_from(
    channel: &EventChannel,
    from: SocketAddr,
    to: SocketAddr,
) -> Verdict<RouteResolved> {
    route_of(channel.create_id(PortSpace::TCP, QpType::RC)?, from, to)
}

/// Resolves an address with an id.
fn route_of(id: Id, from: SocketAddr, to: SocketAddr) -> Verdict<RouteResolved> {
    let resolved = done(id.resolve_addr(Some(from), to, PATIENCE)?.wait(Some(PATIENCE))?)?;
    done(resolved.resolve_route(PATIENCE)?.wait(Some(PATIENCE))?)
}

/// Sends a connect request.
pub(crate) fn ask(
    channel: &EventChannel,
    to: SocketAddr,
    param: &ConnectParam,
) -> Verdict<(Side, Connecting)> {
    ask_by(route(channel, to)?, param)
}

/// Sends a connect request by a route.
pub(crate) fn ask_by(route: RouteResolved, param: &ConnectParam) -> Verdict<(Side, Connecting)> {
    let side = Side::of(&route.context()?)?;
    route.init_qp(&side.qp)?;
    let connecting = route.connect(&side.qp, param)?;
    Ok((side, connecting))
}

/// Both sides of a connection.
pub(crate) struct Pair {
    pub(crate) active: (Side, Connection),
    pub(crate) passive: (Side, Connection),
}

pub(crate) fn connect(channel: &EventChannel, service: &Service) -> Verdict<Pair> {
    connect_with(channel, service, &ConnectParam::new(), &ConnectParam::new())
}

fn connect_with(
    channel: &EventChannel,
    service: &Service,
    asked: &ConnectParam,
    answered: &ConnectParam,
) -> Verdict<Pair> {
    accepted(ask(channel, service.at, asked)?, service.request()?, answered)
}

/// Accepts a request, and waits until both sides are connected.
pub(crate) fn accepted(
    (active, connecting): (Side, Connecting),
    request: ConnectRequest,
    param: &ConnectParam,
) -> Verdict<Pair> {
    let passive = Side::of(&request.context()?)?;
    let accepting = request.accept(&passive.qp, param)?;
    let (connecting, accepting) = established(connecting, accepting)?;
    Ok(Pair { active: (active, connecting), passive: (passive, accepting) })
}

pub(crate) fn established(
    connecting: Connecting,
    accepting: Accepting,
) -> Verdict<(Connection, Connection)> {
    let active = done(connecting.wait(Some(PATIENCE))?)?;
    Ok((active, done(accepting.wait(Some(PATIENCE))?)?))
}

/// The error of a connection that failed.
pub(crate) fn refused(connecting: Connecting) -> Verdict<ConnectError> {
    match connecting.wait(Some(PATIENCE)) {
        Err(error) => Ok(error),
        Ok(progress) => Err(Stop::fail(format!("not refused: {progress:?}"))),
    }
}

fn is_disconnected(connection: &Connection) -> Verdict {
    assert_eq!(connection.next_event(Some(PATIENCE))?, Some(ConnectionEvent::Disconnected));
    Ok(())
}

fn connected_queue_pairs_exchange_messages_and_read() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let Pair { active: (mut a, at_a), passive: (mut b, at_b) } = connect(&channel, &service)?;
    assert_eq!((a.qp.state(), a.qp.query()?.state), (QpState::RTS, QpState::RTS));
    assert_eq!((at_a.peer_qpn(), at_b.peer_qpn()), (b.qp.qpn(), a.qp.qpn()));
    assert_eq!((at_a.peer_addr()?, at_b.local_addr()?), (service.at, service.at));
    assert_eq!(at_a.local_addr()?.ip(), at_b.peer_addr()?.ip());
    send(&mut a, &mut b)?;
    send(&mut b, &mut a)?;
    // The kernel's attributes grant each side's reads to the other.
    read(&mut a, &mut b)?;
    read(&mut b, &mut a)
}

fn private_data_arrives_up_to_its_limit() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    for (asked, answered) in [(0, 0), (1, 2), (REQUEST_PRIVATE_DATA, ACCEPT_PRIVATE_DATA)] {
        let (request, answer) = (vec![0xa5; asked], vec![0x5a; answered]);
        let asked = ConnectParam::new().private_data(&request);
        let answered = ConnectParam::new().private_data(&answer);
        let pair = connect_with(&channel, &service, &asked, &answered)?;
        for (connection, sent) in [(&pair.passive.1, &request), (&pair.active.1, &answer)] {
            let heard = connection.private_data();
            assert!(heard.starts_with(sent), "{heard:?}");
            assert!(heard[sent.len()..].iter().all(|byte| *byte == 0), "{heard:?}");
        }
    }
    let route = route(&channel, service.at)?;
    let side = Side::of(&route.context()?)?;
    let much = ConnectParam::new().private_data(&[1; REQUEST_PRIVATE_DATA + 1]);
    let error = route.connect(&side.qp, &much).unwrap_err();
    assert!(error.message().contains("at most 56"), "{error}");
    let (_side, connecting) = ask(&channel, service.at, &ConnectParam::new())?;
    let request = service.request()?;
    let other = Side::of(&request.context()?)?;
    let much = ConnectParam::new().private_data(&[1; ACCEPT_PRIVATE_DATA + 1]);
    let error = request.accept(&other.qp, &much).unwrap_err();
    assert!(error.message().contains("at most 196"), "{error}");
    assert!(refused(connecting)?.rejection().is_some());
    Ok(())
}

fn rejection_brings_reason_and_data() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    for length in [0, 1, REJECT_PRIVATE_DATA] {
        let (side, connecting) = ask(&channel, service.at, &ConnectParam::new())?;
        service.request()?.reject(&vec![7; length])?;
        let error = refused(connecting)?;
        assert_eq!(error.errno(), Errno::CONNREFUSED);
        let rejection = error.rejection().ok_or_else(|| Stop::fail("no rejection"))?;
        assert_eq!(rejection.reason(), Some(RejectReason::CONSUMER_DEFINED));
        assert!(rejection.private_data().starts_with(&vec![7; length]));
        assert_eq!(side.qp.state(), QpState::INIT);
    }
    let (_side, connecting) = ask(&channel, service.at, &ConnectParam::new())?;
    let error = service.request()?.reject(&[7; REJECT_PRIVATE_DATA + 1]).unwrap_err();
    assert!(error.message().contains("at most 148"), "{error}");
    assert_eq!(refused(connecting)?.errno(), Errno::CONNREFUSED);
    Ok(())
}

fn dropped_request_is_rejected() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let (_side, connecting) = ask(&channel, service.at, &ConnectParam::new())?;
    drop(service.request()?);
    let error = refused(connecting)?;
    let reason = error.rejection().and_then(|rejection| rejection.reason());
    assert_eq!(reason, Some(RejectReason::CONSUMER_DEFINED), "{error}");
    Ok(())
}

fn connect_to_a_port_without_a_listener_is_refused() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let at = service.at;
    drop(service);
    let (_side, connecting) = ask(&channel, at, &ConnectParam::new())?;
    let error = refused(connecting)?;
    let reason = error.rejection().and_then(|rejection| rejection.reason());
    assert_eq!(reason, Some(RejectReason::INVALID_SERVICE_ID), "{error}");
    assert!(error.to_string().contains("nobody listens"), "{error}");
    Ok(())
}

fn request_waits_until_it_is_accepted() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    assert!(service.id.next_request(Some(Duration::ZERO))?.is_none());
    let (_a, connecting) = ask(&channel, service.at, &ConnectParam::new())?;
    let Progress::Pending(connecting) = connecting.wait(Some(SILENCE))? else {
        return Err(Stop::fail("connected without an accept"));
    };
    let request = service.request()?;
    let b = Side::of(&request.context()?)?;
    let accepting = request.accept(&b.qp, &ConnectParam::new())?;
    established(connecting, accepting)?;
    Ok(())
}

fn either_side_disconnects() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    for active_first in [true, false] {
        let Pair { active, passive } = connect(&channel, &service)?;
        let (mut first, second) = if active_first { (active, passive) } else { (passive, active) };
        first.0.receive()?;
        first.1.disconnect()?;
        assert_eq!(first.0.qp.query()?.state, QpState::ERR);
        assert_eq!(first.0.complete()?, WcStatus::WR_FLUSH_ERR);
        is_disconnected(&second.1)?;
        second.1.disconnect()?;
        is_disconnected(&first.1)?;
        first.1.disconnect()?;
    }
    Ok(())
}

fn dropping_a_connection_closes_it() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let Pair { active, passive } = connect(&channel, &service)?;
    let (side, connection) = active;
    drop(connection);
    assert_eq!(side.qp.query()?.state, QpState::ERR);
    side.qp.destroy()?;
    passive.1.wait_disconnected(Some(PATIENCE))?;
    Ok(())
}

fn queue_pair_may_be_dropped_before_its_connection() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let Pair { active, passive } = connect(&channel, &service)?;
    // The connection keeps the channel.
    drop(channel);
    active.0.qp.destroy()?;
    // The kernel's connection does not learn of it.
    assert!(passive.1.next_event(Some(SILENCE))?.is_none());
    drop(active.1);
    passive.1.wait_disconnected(Some(PATIENCE))?;
    Ok(())
}

fn dropping_the_listener_rejects_waiting_requests_and_keeps_connections() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let mut pair = connect(&channel, &service)?;
    let (_unread, one) = ask(&channel, service.at, &ConnectParam::new())?;
    let (_read, other) = ask(&channel, service.at, &ConnectParam::new())?;
    // At least one request is in the listener's queue; the other may still be in the kernel.
    while service.channel.dispatch()? == 0 {
        std::thread::yield_now();
    }
    drop(service);
    for connecting in [one, other] {
        let error = refused(connecting)?;
        assert!(error.rejection().is_some(), "{error}");
    }
    send(&mut pair.active.0, &mut pair.passive.0)
}

fn port_in_use_and_ports_of_the_kernels_choice() -> Verdict {
    let service = Service::start(4)?;
    assert_ne!(service.at.port(), 0);
    let error =
        service.channel.create_id(PortSpace::TCP, QpType::RC)?.bind(service.at).unwrap_err();
    assert_eq!(error.errno(), Errno::ADDRINUSE);
    let told = format!("port {} is in use", service.at.port());
    assert!(error.message().contains(&told), "{error}");
    // The kernel has another error number if one of the two is bound to all addresses.
    let any = SocketAddr::new("0.0.0.0".parse()?, service.at.port());
    let error = service.channel.create_id(PortSpace::TCP, QpType::RC)?.bind(any).unwrap_err();
    assert_eq!(
        (error.errno(), error.kernel_errno()),
        (Errno::ADDRINUSE, Some(Errno::ADDRNOTAVAIL))
    );
    assert!(error.message().contains(&told), "{error}");
    let everywhere =
        service.channel.create_id(PortSpace::TCP, QpType::RC)?.bind("0.0.0.0:0".parse()?)?;
    let taken = SocketAddr::new(service.at.ip(), everywhere.local_addr()?.port());
    let error = service.channel.create_id(PortSpace::TCP, QpType::RC)?.bind(taken).unwrap_err();
    assert_eq!(
        (error.errno(), error.kernel_errno()),
        (Errno::ADDRINUSE, Some(Errno::ADDRNOTAVAIL))
    );
    assert!(error.message().contains(&format!("port {} is in use", taken.port())), "{error}");
    // The kernel chooses the port for the unspecified address, too.
    assert!(everywhere.local_addr()?.ip().is_unspecified());
    assert_ne!(everywhere.local_addr()?.port(), 0);
    Ok(())
}

fn addresses_of_no_rdma_device() -> Verdict {
    let channel = channel()?;
    let bind = |text: &str| -> Verdict<uverbs::Error> {
        match channel.create_id(PortSpace::TCP, QpType::RC)?.bind(text.parse()?) {
            Err(error) => Ok(error),
            Ok(bound) => Err(Stop::fail(format!("{text} was bound: {bound:?}"))),
        }
    };
    let error = bind("203.0.113.77:7000")?;
    assert_eq!(error.errno(), Errno::ADDRNOTAVAIL);
    assert!(error.message().contains("does not have the address 203.0.113.77"), "{error}");
    let from = "[fe80::1]:0".parse()?;
    let to = "10.0.0.1:7000".parse()?;
    let error = channel
        .create_id(PortSpace::TCP, QpType::RC)?
        .resolve_addr(Some(from), to, PATIENCE)
        .unwrap_err();
    assert!(error.message().contains("different families"), "{error}");
    Ok(())
}

/// The loopback interface belongs to no RDMA device. Some kernels report that when the route is resolved.
fn loopback_is_listened_on_and_not_connected_to() -> Verdict {
    let channel = channel()?;
    let listening =
        channel.create_id(PortSpace::TCP, QpType::RC)?.bind("127.0.0.1:0".parse()?)?.listen(4)?;
    let port = listening.local_addr()?.port();
    for ip in ["127.0.0.1", "::1", "0.0.0.0", "::"] {
        let to = SocketAddr::new(ip.parse()?, port);
        let connector = Connector::new(to)?.channel(&channel);
        let connected = connector.connect(|route| {
            let context = route.context()?;
            let cq = context.cq_builder(4).build()?;
            context.alloc_pd()?.qp_builder(&cq, &cq, QpType::RC).build()
        });
        let error = connected.map(drop).unwrap_err();
        assert_eq!(error.errno(), Errno::NODEV, "{ip}: {error}");
        let told = format!("{ip} leads through the loopback interface");
        assert!(error.to_string().contains(&told), "{ip}: {error}");
    }
    Ok(())
}

/// The status of a message that finds no receive for two seconds, where one retry is allowed. `param` is the
/// receiver's; the sender's acknowledgement timeout is 4.096 µs · 2ⁿ.
fn late_receive(param: &ConnectParam, ack_timeout: u8) -> Verdict<WcStatus> {
    let (channel, service) = (channel()?, Service::start(4)?);
    let (id, from) = (
        channel.create_id(PortSpace::TCP, QpType::RC)?,
        SocketAddr::new(address(&env::device())?, 0),
    );
    id.set_ack_timeout(ack_timeout)?;
    let asked = ask_by(route_of(id, from, service.at)?, &ConnectParam::new().retry_count(1))?;
    let mut pair = accepted(asked, service.request()?, param)?;
    let (from, to) = (&mut pair.active.0, &mut pair.passive.0);
    assert_eq!(from.qp.query()?.timeout, ack_timeout);
    let sges = [from.memory.sge(..)?];
    from.post(SendWr::send(&sges))?;
    std::thread::sleep(Duration::from_secs(2));
    to.receive()?;
    from.complete()
}

/// The sender waits for 0.64 milliseconds, again and again, without a limit. Longer waits are no retries either, if the
/// acknowledgement timeout is longer still: code 0 is 655 milliseconds, and 4.096 µs · 2²⁰ are 4.3 seconds. Code 17 is
/// half a second, which the whole wait exceeds.
fn receive_may_be_posted_long_after_the_message() -> Verdict {
    env::rnr_wait()?;
    let (usual, longest) = (ConnectParam::new(), ConnectParam::new().min_rnr_timer(0));
    let mut pairs = vec![(&usual, 20), (&longest, 20)];
    if env::short_waits_are_no_retries() {
        pairs.push((&usual, 17));
    }
    for (param, ack_timeout) in pairs {
        assert_eq!(
            late_receive(param, ack_timeout)?,
            WcStatus::SUCCESS,
            "{param:?}, {ack_timeout}"
        );
    }
    Ok(())
}

fn privileged_port_needs_a_capability() -> Verdict {
    if rustix::process::geteuid().is_root() {
        return Err(Stop::Skip(Capability::Lab, "root may bind any port".into()));
    }
    let at = SocketAddr::new(address(&passive()?)?, 80);
    let error = channel()?.create_id(PortSpace::TCP, QpType::RC)?.bind(at).unwrap_err();
    assert_eq!(error.errno(), Errno::ACCESS);
    assert!(error.message().contains("CAP_NET_BIND_SERVICE"), "{error}");
    Ok(())
}

/// Two requests that cross each other make two connections.
fn both_sides_connect_at_once() -> Verdict {
    let param = ConnectParam::new();
    let there = Service::start(4)?;
    let device = env::device();
    let here = Service::at(&device, (address(&device)?, 0).into())?;
    // Each side asks and answers on one channel, and no side answers before both have asked.
    let towards = ask(&here.channel, there.at, &param)?;
    let from = SocketAddr::new(there.at.ip(), 0);
    let back = ask_by(route_from(&there.channel, from, here.at)?, &param)?;
    let (at_there, at_here) = (there.request()?, here.request()?);
    let mut pairs = [accepted(towards, at_there, &param)?, accepted(back, at_here, &param)?];
    for Pair { active, passive } in &mut pairs {
        send(&mut active.0, &mut passive.0)?;
        send(&mut passive.0, &mut active.0)?;
    }
    // The end of one is not the end of the other.
    let [first, mut second] = pairs;
    drop(first.active);
    first.passive.1.wait_disconnected(Some(PATIENCE))?;
    send(&mut second.active.0, &mut second.passive.0)
}

fn queue_pair_of_another_device_is_refused() -> Verdict {
    env::second()?;
    let (channel, service) = (channel()?, Service::start(4)?);
    let route = route(&channel, service.at)?;
    let wrong = Side::of(&service.context)?;
    let error = route.init_qp(&wrong.qp).unwrap_err();
    assert!(error.message().contains(service.context.device().name()), "{error}");
    assert_eq!(route.connect(&wrong.qp, &ConnectParam::new()).unwrap_err().errno(), Errno::INVAL);
    Ok(())
}

fn parameters_beyond_the_device_are_refused() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let route = route(&channel, service.at)?;
    let context = route.context()?;
    let limit = context.query_device()?.max_qp_init_rd_atom;
    let Some(beyond) = u8::try_from(limit).ok().and_then(|limit| limit.checked_add(1)) else {
        return Ok(());
    };
    let side = Side::of(&context)?;
    let param = ConnectParam::new().initiator_depth(beyond);
    let error = route.connect(&side.qp, &param).unwrap_err();
    assert!(error.message().contains(&format!("maximum of {limit}")), "{error}");
    Ok(())
}

fn depths_are_agreed_on() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    // Powers of two, to which soft-RoCE rounds up.
    let asked = ConnectParam::new().initiator_depth(4).responder_resources(2);
    let pair = connect_with(&channel, &service, &asked, &ConnectParam::new().min_rnr_timer(9))?;
    let (a, b) = (pair.active.0.qp.query()?, pair.passive.0.qp.query()?);
    assert_eq!((a.max_rd_atomic, b.max_dest_rd_atomic), (4, 4));
    assert_eq!((a.max_dest_rd_atomic, b.max_rd_atomic), (2, 2));
    // The default is that of `Handshake`, not the kernel's.
    assert_eq!((a.min_rnr_timer, b.min_rnr_timer), (12, 9));
    // 0 is a time of its own, the longest.
    let longest = ConnectParam::new().min_rnr_timer(0);
    let pair = connect_with(&channel, &service, &longest, &ConnectParam::new())?;
    let (a, b) = (pair.active.0.qp.query()?, pair.passive.0.qp.query()?);
    assert_eq!((a.min_rnr_timer, b.min_rnr_timer), (0, 12));
    Ok(())
}

fn options_of_the_vendor_travel_both_ways() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let (offered, chosen) = (
        Ece { vendor_id: 0x15b3, options: 0x1234_5678 },
        Ece { vendor_id: 0x15b3, options: 0x5678 },
    );
    let param = ConnectParam::new();
    let (_side, connecting) = ask(&channel, service.at, &param.clone().ece(offered))?;
    let request = service.request()?;
    assert_eq!(request.ece(), Some(offered));
    let passive = Side::of(&request.context()?)?;
    let accepting = request.accept(&passive.qp, &param.clone().ece(chosen))?;
    let (active, passive) = established(connecting, accepting)?;
    assert_eq!((active.ece(), passive.ece()), (Some(chosen), Some(offered)));
    let (_side, connecting) = ask(&channel, service.at, &param.ece(offered))?;
    service.request()?.reject_ece(b"none")?;
    let error = refused(connecting)?;
    let reason = error.rejection().and_then(|rejection| rejection.reason());
    assert_eq!(reason, Some(RejectReason::VENDOR_OPTION_NOT_SUPPORTED));
    Ok(())
}

/// With vendor 0 a request offers no options, not even those of the queue pair's device.
fn peer_whose_options_were_refused_connects_without_any() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let offered = ConnectParam::new().ece(Ece { vendor_id: 0x15b3, options: 7 });
    let (_side, connecting) = ask(&channel, service.at, &offered)?;
    service.request()?.reject_ece(b"none")?;
    let error = refused(connecting)?;
    let reason = error.rejection().and_then(|rejection| rejection.reason());
    assert_eq!(reason, Some(RejectReason::VENDOR_OPTION_NOT_SUPPORTED));

    let none = ConnectParam::new().ece(Ece { vendor_id: 0, options: 0 });
    let (mut a, connecting) = ask(&channel, service.at, &none)?;
    let request = service.request()?;
    assert_eq!(request.ece(), None);
    let mut b = Side::of(&request.context()?)?;
    let accepting = request.accept(&b.qp, &ConnectParam::new())?;
    let (active, passive) = established(connecting, accepting)?;
    assert_eq!((active.ece(), passive.ece()), (None, None));
    send(&mut a, &mut b)
}

/// The program names no options: each side uses those of its queue pair.
fn devices_agree_on_their_options() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let Pair { active: (mut a, at_a), passive: (mut b, at_b) } = connect(&channel, &service)?;
    let taken = supported(a.qp.query_ece(), Capability::Ece).inspect_err(|_| {
        assert_eq!((at_a.ece(), at_b.ece()), (None, None), "the device has none");
    })?;
    let all = Side::of(&service.context)?.qp.query_ece()?;
    assert_ne!(all.options, 0);
    assert_eq!((at_a.ece(), at_b.ece()), (Some(taken), Some(all)));
    assert_eq!((taken, b.qp.query_ece()?), (all, all));
    send(&mut a, &mut b)?;
    // A peer that has fewer options, and one that answers without any.
    for answered in [all.options & !1, 0] {
        let answered = Ece { options: answered, ..all };
        let answer = ConnectParam::new().ece(answered);
        let pair = connect_with(&channel, &service, &ConnectParam::new(), &answer)?;
        assert_eq!(
            (pair.active.1.ece(), pair.active.0.qp.query_ece()?),
            (Some(answered), answered)
        );
    }
    Ok(())
}

fn written_events_wake_the_waiting_thread() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let Pair { active: (_a, at_a), passive: (_b, at_b) } = connect(&channel, &service)?;
    supported(at_a.write_event(7), Capability::CmEvents)?;
    assert_eq!(at_a.next_event(Some(PATIENCE))?, Some(ConnectionEvent::Written(7)));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| at_b.next_event(Some(PATIENCE)));
        at_b.write_event(u64::MAX)?;
        let event = waiting.join().expect("the thread does not panic")?;
        assert_eq!(event, Some(ConnectionEvent::Written(u64::MAX)));
        Ok(())
    })
}

fn hundred_connections_and_nothing_is_left() -> Verdict {
    let before = env::resources()?;
    {
        let (channel, service) = (channel()?, Service::start(0)?);
        let from = SocketAddr::new(address(&env::device())?, 0);
        let param = ConnectParam::new();
        let mut open = Vec::new();
        // Only a soak has 100 rounds: each connection takes an emulated processor 100 ms.
        let rounds = if env::soak().is_ok() { 100 } else { 10 };
        for _ in 0..rounds {
            for _ in 0..10 {
                let asked = ask_by(route_from(&channel, from, service.at)?, &param)?;
                open.push(accepted(asked, service.request()?, &param)?);
            }
            for pair in open.drain(..) {
                drop(pair.active);
                pair.passive.1.wait_disconnected(Some(PATIENCE))?;
            }
        }
        assert_eq!((channel.leaked(), service.channel.leaked()), (0, 0));
    }
    env::settles(&before)
}

fn events_of_dropped_ids_are_discarded() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let (_side, connecting) = ask(&channel, service.at, &ConnectParam::new())?;
    let request = service.request()?;
    drop(connecting);
    let other = Side::of(&request.context()?)?;
    // The peer's cancellation may arrive before or after the accept; the handshake fails in both cases.
    if let Ok(accepting) = request.accept(&other.qp, &ConnectParam::new()) {
        accepting.wait(Some(PATIENCE)).unwrap_err();
    }
    channel.dispatch()?;
    service.channel.dispatch()?;
    connect(&channel, &service)?;
    Ok(())
}

fn threads_share_a_channel() -> Verdict {
    let service = Service::start(0)?;
    let shared = channel()?;
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| -> Verdict {
                    for _ in 0..4 {
                        let (_side, connecting) = ask(&shared, service.at, &ConnectParam::new())?;
                        let connection = done(connecting.wait(Some(PATIENCE))?)?;
                        connection.wait_disconnected(Some(PATIENCE))?;
                    }
                    Ok(())
                })
            })
            .collect();
        let serve = || -> Verdict {
            for _ in 0..16 {
                let request = service.request()?;
                let side = Side::of(&request.context()?)?;
                done(request.accept(&side.qp, &ConnectParam::new())?.wait(Some(PATIENCE))?)?;
            }
            Ok(())
        };
        let served = serve();
        for client in clients {
            let asked = client.join().map_err(|_| Stop::fail("a client panicked"))?;
            asked.map_err(|stop| {
                Stop::fail(format!("a client: {stop:?}; the server: {served:?}"))
            })?;
        }
        served
    })
}

/// The thread waits in the kernel, where it delays no command of the channel.
fn thread_without_a_deadline_reads_for_others() -> Verdict {
    let (service, param) = (Service::start(4)?, ConnectParam::new());
    let mut pair = std::thread::scope(|scope| {
        let serving = scope.spawn(|| service.id.next_request(None));
        std::thread::sleep(SILENCE);
        assert_eq!(service.channel.dispatch()?, 0, "the thread reads");
        let asked = ask(&service.channel, service.at, &param)?;
        let request = serving.join().map_err(|_| Stop::fail("the thread panicked"))??;
        let request = request.ok_or_else(|| Stop::fail("no request came"))?;
        accepted(asked, request, &param)
    })?;
    send(&mut pair.active.0, &mut pair.passive.0)?;
    std::thread::scope(|scope| {
        let ending = scope.spawn(|| pair.passive.1.next_event(None));
        std::thread::sleep(SILENCE);
        pair.active.1.disconnect()?;
        let event = ending.join().map_err(|_| Stop::fail("the thread panicked"))??;
        assert_eq!(event, Some(ConnectionEvent::Disconnected));
        Ok(())
    })
}

fn request_moves_to_another_channel() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let (_a, connecting) = ask(&channel, service.at, &ConnectParam::new())?;
    let worker = EventChannel::open()?;
    worker.use_context(&service.context)?;
    let request = service.request()?.migrate(&worker)?;
    // The listener's channel is not needed any more.
    drop(service);
    let side = Side::of(&request.context()?)?;
    let accepting = request.accept(&side.qp, &ConnectParam::new())?;
    let (active, passive) = established(connecting, accepting)?;
    active.disconnect()?;
    is_disconnected(&passive)?;
    // An unbound id moves, too.
    let id = channel.create_id(PortSpace::TCP, QpType::RC)?.migrate(&worker)?;
    drop(channel);
    id.bind("0.0.0.0:0".parse()?)?;
    Ok(())
}

fn connector_and_listener_do_it_in_one_call() -> Verdict {
    drop(channel()?);
    let listener = Listener::bind((address(&passive()?)?, 0))?;
    let at = listener.local_addr()?;
    let from = SocketAddr::new(address(&env::device())?, 0);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| -> Verdict {
            let connector = Connector::new(at)?.source(from).type_of_service(8).ack_timeout(21);
            let (qp, connection) = connector.connect(|route| {
                let context = route.context()?;
                let cq = context.cq_builder(4).build()?;
                context.alloc_pd()?.qp_builder(&cq, &cq, QpType::RC).build()
            })?;
            let info = qp.query()?;
            assert_eq!((info.state, info.timeout), (QpState::RTS, 21));
            connection.wait_disconnected(Some(PATIENCE))?;
            Ok(())
        });
        let (qp, connection) = listener.accept(Some(PATIENCE), |request| {
            let context = request.context()?;
            let cq = context.cq_builder(4).build()?;
            context.alloc_pd()?.qp_builder(&cq, &cq, QpType::RC).build()
        })?;
        assert_eq!(qp.query()?.state, QpState::RTS);
        drop(connection);
        client.join().map_err(|_| Stop::fail("the client panicked"))?
    })
}

fn connector_gives_up_in_time() -> Verdict {
    // This side listens and never answers.
    let service = Service::start(4)?;
    let from = SocketAddr::new(address(&env::device())?, 0);
    let connector = Connector::new(service.at)?.source(from).timeout(Duration::from_millis(500));
    let start = Instant::now();
    let connected = connector.connect(|route| {
        let context = route.context()?;
        let cq = context.cq_builder(4).build()?;
        context.alloc_pd()?.qp_builder(&cq, &cq, QpType::RC).build()
    });
    let error = connected.map(|_| ()).unwrap_err();
    assert_eq!(error.errno(), Errno::TIMEDOUT, "{error}");
    assert!(start.elapsed() < PATIENCE);
    Ok(())
}

fn child_neither_uses_nor_destroys_ids() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let pair = connect(&channel, &service)?;
    let (channel, service, pair) =
        in_child((channel, service, pair), |(channel, service, pair)| {
            assert!(channel.create_id(PortSpace::TCP, QpType::RC).unwrap_err().is_forked());
            assert!(channel.dispatch().unwrap_err().is_forked());
            assert!(service.id.next_request(Some(Duration::ZERO)).unwrap_err().is_forked());
            assert!(pair.active.1.disconnect().unwrap_err().is_forked());
            drop((service, pair, channel));
            // A child opens a channel of its own, unless the connection manager is in the parent's process.
            match EventChannel::open() {
                Err(error) if env::on_fabric() => assert_eq!(error.errno(), Errno::NODEV),
                channel => drop(
                    channel?.create_id(PortSpace::TCP, QpType::RC)?.bind("0.0.0.0:0".parse()?)?,
                ),
            }
            Ok(())
        })?;
    assert!(pair.active.1.next_event(Some(SILENCE))?.is_none());
    connect(&channel, &service)?;
    Ok(())
}
