//! Connecting and accepting in one call each.

use super::channel::EventChannel;
use super::connect::{Connecting, Connection};
use super::datagram::{ConnectingDatagrams, DatagramPeer};
use super::event::ConnectError;
use super::infiniband::{IbAddress, IbPath};
use super::listen::{ConnectRequest, ListeningId};
use super::param::ConnectParam;
use super::port_space::PortSpace;
use super::resolve_addr::{AddrResolved, ResolvingAddr};
use super::resolve_route::{ResolvingRoute, RouteResolved};
use super::step::Step;
use super::step::{timed_out, wait_until};
use super::unbound::Id;
use crate::error::{Error, Result};
use crate::qp::{QpControl, QpType};
use rustix::io::Errno;
use std::net::{SocketAddr, ToSocketAddrs};
use std::ops::Deref;
use std::time::{Duration, Instant};

/// The steps of a connect that a deadline ends.
pub(crate) const NO_ADDRESS: &str =
    "the address was not resolved in time; `Connector::timeout` sets the limit";
pub(crate) const NO_ROUTE: &str =
    "the route was not resolved in time; `Connector::timeout` sets the limit";
pub(crate) const NO_ANSWER: &str =
    "the listener did not answer in time; `Connector::timeout` sets the limit";

/// The default limit for a whole connect. The kernel's own limit for a host that does not answer is about a minute.
const CONNECT: Duration = Duration::from_secs(10);

/// The limit for the peer's confirmation after a request was accepted.
const ESTABLISH: Duration = Duration::from_secs(10);

/// The verb in errors of a listener's address.
const BIND: &str = "bind_addr";

/// The default backlog.
const BACKLOG: u32 = 128;

/// The detail of an error when a peer did not answer the request, or did not confirm the answer.
const UNCONFIRMED: &str = "the peer did not complete the handshake in time";

/// Connects queue pairs to a listener: a [`QueuePair`](crate::QueuePair), one of [`owned`](crate::owned), or any other
/// type that dereferences to [`QpControl`].
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::QpType;
/// use uverbs::cm::Connector;
/// let (qp, connection) = Connector::new("10.0.0.2:7471")?.connect(|route| {
///     let context = route.context()?;
///     let cq = context.cq_builder(16).build()?;
///     context.alloc_pd()?.qp_builder(&cq, &cq, QpType::RC).max_recv_wr(8).build()
/// })?;
/// println!("{} to {}", qp.qpn(), connection.peer_addr()?);
/// # Ok(()) }
/// ```
///
/// Another type of queue pair, and options of the network:
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use uverbs::QpType;
/// use uverbs::cm::{ConnectError, ConnectParam, Connector};
///
/// let connector = Connector::new("10.0.0.2:7471")?
///     .qp_type(QpType::XRC_INI)
///     .type_of_service(106)
///     // The timeout of an acknowledgement, 4.096 µs · 2¹⁸.
///     .ack_timeout(18)
///     .param(ConnectParam::new().private_data(b"hello").flow_control(true))
///     .timeout(Duration::from_secs(2));
/// let connected = connector.connect(|route| {
///     let context = route.context()?;
///     let cq = context.cq_builder(16).build()?;
///     context.alloc_pd()?.qp_builder(&cq, &cq, QpType::XRC_INI).build()
/// });
/// if let Err(error) = connected {
///     let error: ConnectError = error;
///     match error.rejection() {
///         Some(no) => println!("{:?} or {:?}: {:?}", no.reason(), no.errno(), no.private_data()),
///         None => println!("{} ({})", error.error(), error.errno()),
///     }
/// }
/// # Ok(()) }
/// ```
#[doc(alias("rdma_create_ep", "rdma_getaddrinfo"))]
#[derive(Clone, Debug)]
#[must_use]
pub struct Connector {
    targets: Vec<Target>,
    source: Option<Target>,
    /// The path to a GID. Without it the subnet administrator is asked.
    path: Option<IbPath>,
    channel: Option<EventChannel>,
    param: ConnectParam,
    timeout: Duration,
    tos: Option<u8>,
    ack_timeout: Option<u8>,
    qp_type: QpType,
}

/// Where a connector connects to, or from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    Ip(SocketAddr),
    Ib(IbAddress),
}

/// A queue pair with other objects that belong to it, for the `create` of [`Connector::connect`], [`Listener::accept`]
/// and the futures of [`aio::cm`](crate::aio::cm), which hand out both when the queue pair is connected.
///
/// ```no_run
/// # use uverbs::{Context, QpType, Result, cm::Connector, owned::*};
/// # fn f(connector: &Connector, context: &Context) -> Result<()> {
/// use uverbs::cm::QpWith;
///
/// let (QpWith(qp, (mut cq, pool)), connection) = connector.connect(|_route| {
///     let (pd, cq) = (context.alloc_pd()?, context.cq_builder(16).build()?);
///     let mut cq = OwnedCompletionQueue::<u32>::new(cq);
///     let qp = pd.qp_builder(cq.queue(), cq.queue(), QpType::RC).max_recv_wr(8).build()?;
///     Ok(QpWith(cq.adopt(qp)?, (cq, pd.buffer_pool_builder(4096).build()?)))
/// })?;
/// # drop((qp, cq.poll(), pool, connection)); Ok(()) }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct QpWith<Q, T>(pub Q, pub T);

impl<Q: Deref<Target = QpControl>, T> Deref for QpWith<Q, T> {
    type Target = QpControl;

    fn deref(&self) -> &QpControl {
        &self.0
    }
}

impl Connector {
    /// Connects to an address, or to the addresses of a host name in turn until one accepts.
    ///
    /// An address of the loopback interface (127.0.0.1, `::1`, `localhost`), and an unspecified one, lead through no
    /// RDMA device: for a server on this host, name the address of one of its RDMA devices.
    ///
    /// # Errors
    ///
    /// `EADDRNOTAVAIL` if the name has no address, or the resolver's error.
    pub fn new(to: impl ToSocketAddrs) -> Result<Connector> {
        Ok(Connector::to(resolve("connect", to)?.into_iter().map(Target::Ip).collect()))
    }

    /// Connects to the GID of a port and a service there, on InfiniBand. Ids are in the port space
    /// [`IB`](PortSpace::IB), which also has the services of the other spaces. The kernel asks the subnet administrator
    /// for the path, unless the program sets [it](Self::ib_path).
    ///
    /// ```no_run
    /// # fn f(own: uverbs::Gid, peer: uverbs::Gid, path: uverbs::cm::IbPath) -> Result<(), Box<dyn std::error::Error>> {
    /// use uverbs::QpType;
    /// use uverbs::cm::{Connector, IbAddress, Listener, PortSpace};
    ///
    /// let service = IbAddress::new(own, PortSpace::IB, 7471);
    /// let listener = Listener::builder_ib(service).build()?;
    /// println!("on {:?}; {} requests found no room", listener.local_ib_addr()?, listener.overflows());
    ///
    /// let connector = Connector::to_ib(IbAddress::new(peer, PortSpace::IB, 7471))
    ///     .source_ib(IbAddress::new(own, PortSpace::IB, 0))
    ///     .ib_path(path);
    /// let (qp, connection) = connector.connect(|route| {
    ///     let context = route.context()?;
    ///     let cq = context.cq_builder(16).build()?;
    ///     context.alloc_pd()?.qp_builder(&cq, &cq, QpType::RC).max_recv_wr(8).build()
    /// })?;
    /// # drop((qp, connection)); Ok(()) }
    /// ```
    #[doc(alias = "AF_IB")]
    pub fn to_ib(to: IbAddress) -> Connector {
        Connector::to(vec![Target::Ib(to)])
    }

    fn to(targets: Vec<Target>) -> Connector {
        Connector {
            targets,
            source: None,
            path: None,
            channel: None,
            param: ConnectParam::new(),
            timeout: CONNECT,
            tos: None,
            ack_timeout: None,
            qp_type: QpType::RC,
        }
    }

    /// The local address of connections; unless set, the routing table decides.
    #[doc(alias = "rdma_bind_addr")]
    pub fn source(mut self, address: SocketAddr) -> Self {
        self.source = Some(Target::Ip(address));
        self
    }

    /// As [`source`](Self::source), the GID of a local port, for connections to a [GID](Self::to_ib). Unless set, the
    /// kernel takes a port in the same subnet and partition.
    pub fn source_ib(mut self, address: IbAddress) -> Self {
        self.source = Some(Target::Ib(address));
        self
    }

    /// The path to a [GID](Self::to_ib), in place of the subnet administrator's; see [`AddrResolved::set_ib_path`].
    pub fn ib_path(mut self, path: IbPath) -> Self {
        self.path = Some(path);
        self
    }

    /// The event channel; unless set, each connection opens its own.
    pub fn channel(mut self, channel: &EventChannel) -> Self {
        self.channel = Some(channel.clone());
        self
    }

    /// Private data and other parameters of the connect request.
    pub fn param(mut self, param: ConnectParam) -> Self {
        self.param = param;
        self
    }

    /// The limit for connecting to one address; 10 seconds unless set. A connect that takes longer ends with
    /// `ETIMEDOUT` in any of its steps, in a thread as in a future of
    /// [`aio::cm`](crate::aio::cm::AsyncEventChannel::connect).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The type of service; 0 unless set.
    pub fn type_of_service(mut self, tos: u8) -> Self {
        self.tos = Some(tos);
        self
    }

    /// How long a reliable queue pair waits for an acknowledgement before it sends again: 4.096 µs · 2ⁿ. Unless set,
    /// the kernel derives it from the path; see [`Id::set_ack_timeout`](super::Id::set_ack_timeout).
    pub fn ack_timeout(mut self, n: u8) -> Self {
        self.ack_timeout = Some(n);
        self
    }

    /// The type of the queue pairs; `RC` unless set. `UC` and `XRC_INI` are connected in the port space
    /// [`IB`](super::PortSpace::IB), where the peer [listens](ListenerBuilder::qp_type) for `UC` or `XRC_TGT`.
    pub fn qp_type(mut self, qp_type: QpType) -> Self {
        self.qp_type = qp_type;
        self
    }

    /// Connects. Once the device is known, `create` makes the queue pair on
    /// [`RouteResolved::context`]; it is called again for each further address. After
    /// [`RouteResolved::init_qp`] it may post receives, so that the peer finds some when it begins to
    /// send:
    ///
    /// ```no_run
    /// # use uverbs::{Context, QpType, Result, cm::Connector, owned::*};
    /// # fn f(connector: &Connector, context: &Context) -> Result<()> {
    /// let pd = context.alloc_pd()?;
    /// let pool = pd.buffer_pool_builder(4096).count(8).build()?;
    /// let mut cq = OwnedCompletionQueue::new(context.cq_builder(16).build()?);
    /// let (qp, connection) = connector.connect(|route| {
    ///     let qp = pd.qp_builder(cq.queue(), cq.queue(), QpType::RC).max_recv_wr(8).build()?;
    ///     let mut qp: OwnedQueuePair<u32> = cq.adopt(qp)?;
    ///     route.init_qp(&qp)?;
    ///     let mut receives = qp.recv_batch()?;
    ///     while let Ok(buffer) = pool.take() {
    ///         receives.push(buffer, 0)?;
    ///     }
    ///     receives.ring()?;
    ///     Ok(qp)
    /// })?;
    /// # drop((qp, connection)); Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// The error of the last address: `ETIMEDOUT`, `ENODEV`, `ENETUNREACH`, or `ECONNREFUSED` with
    /// the peer's [`rejection`](ConnectError::rejection); those of `create`.
    pub fn connect<Q: Deref<Target = QpControl>>(
        &self,
        mut create: impl FnMut(&RouteResolved) -> Result<Q>,
    ) -> std::result::Result<(Q, Connection), ConnectError> {
        self.each_address(Connecting::VERB, |channel, address| {
            let deadline = channel.inner.platform.deadline(Some(self.timeout));
            let route = self.route(Connecting::VERB, channel, address, self.qp_type, deadline)?;
            let qp = create(&route)?;
            let connecting = route.connect(&qp, &self.param)?;
            let waited = wait_until(connecting, deadline)?;
            Ok((qp, waited.done_in_time(Connecting::VERB, NO_ANSWER)?))
        })
    }

    /// Asks a listener of the port space [`UDP`](super::PortSpace::UDP) for the destination of datagrams, and brings
    /// the queue pair that `create` makes to `RTS`; see [`RouteResolved::connect_datagrams`]. The type is always UD;
    /// [`qp_type`](Self::qp_type) is ignored.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub fn connect_datagrams<Q: Deref<Target = QpControl>>(
        &self,
        mut create: impl FnMut(&RouteResolved) -> Result<Q>,
    ) -> std::result::Result<(Q, DatagramPeer), ConnectError> {
        const VERB: &str = ConnectingDatagrams::VERB;
        self.each_address(VERB, |channel, address| {
            let deadline = channel.inner.platform.deadline(Some(self.timeout));
            let route = self.route(VERB, channel, address, QpType::UD, deadline)?;
            let qp = create(&route)?;
            let connecting = route.connect_datagrams(&qp, &self.param)?;
            let waited = wait_until(connecting, deadline)?;
            Ok((qp, waited.done_in_time(VERB, NO_ANSWER)?))
        })
    }

    /// Tries the addresses in turn until one succeeds.
    fn each_address<T>(
        &self,
        verb: &'static str,
        mut connect: impl FnMut(&EventChannel, Target) -> std::result::Result<T, ConnectError>,
    ) -> std::result::Result<T, ConnectError> {
        let channel = self.channel.clone().map_or_else(EventChannel::open, Ok)?;
        let mut last = None;
        for target in &self.targets {
            match connect(&channel, *target) {
                Ok(connected) => return Ok(connected),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| no_address(verb).into()))
    }

    fn route(
        &self,
        verb: &'static str,
        channel: &EventChannel,
        target: Target,
        qp_type: QpType,
        deadline: Option<Instant>,
    ) -> Result<RouteResolved> {
        let platform = &channel.inner.platform;
        let left = || platform.left(deadline).unwrap_or(Duration::MAX);
        let resolving = self.begin(channel, target, qp_type, left())?;
        let waited = wait_until(resolving, deadline)?;
        let resolved = waited.done_in_time(verb, NO_ADDRESS)?;
        let resolving = self.begin_route(resolved, left())?;
        let waited = wait_until(resolving, deadline)?;
        waited.done_in_time(verb, NO_ROUTE)
    }
}

impl Connector {
    pub(crate) fn targets(&self) -> &[Target] {
        &self.targets
    }

    pub(crate) fn parameters(&self) -> &ConnectParam {
        &self.param
    }

    pub(crate) fn time_limit(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn type_of_qp(&self) -> QpType {
        self.qp_type
    }

    /// Starts to resolve an address, for a queue pair of a type.
    pub(crate) fn begin(
        &self,
        channel: &EventChannel,
        target: Target,
        qp_type: QpType,
        timeout: Duration,
    ) -> Result<ResolvingAddr> {
        match target {
            Target::Ip(to) => {
                let from = self.own_ip_for(to)?;
                let id = self.id(channel, PortSpace::of(qp_type), qp_type)?;
                id.resolve_addr(from, to, timeout)
            }
            Target::Ib(to) => {
                let from = self.own_gid_for(to)?;
                self.id(channel, PortSpace::IB, qp_type)?.resolve_ib_addr(from, to, timeout)
            }
        }
    }

    /// The local IP address of a connection to `to`, if the program named it.
    fn own_ip_for(&self, to: SocketAddr) -> Result<Option<SocketAddr>> {
        match self.source {
            None => Ok(None),
            Some(Target::Ip(from)) => Ok(Some(from)),
            Some(Target::Ib(from)) => {
                let detail = format!(
                    "{to} is an IP address, and the connection is to come from the GID {}",
                    from.gid
                );
                Err(Error::invalid(ResolvingAddr::VERB, detail))
            }
        }
    }

    /// The local GID of a connection to `to`, if the program named it.
    fn own_gid_for(&self, to: IbAddress) -> Result<Option<IbAddress>> {
        match self.source {
            None => Ok(None),
            Some(Target::Ib(from)) => Ok(Some(from)),
            Some(Target::Ip(from)) => {
                let detail = format!(
                    "{} is a GID, and the connection is to come from the IP address {from}",
                    to.gid
                );
                Err(Error::invalid(ResolvingAddr::VERB, detail))
            }
        }
    }

    /// An id with the options of the connector.
    fn id(&self, channel: &EventChannel, space: PortSpace, qp_type: QpType) -> Result<Id> {
        let id = channel.create_id(space, qp_type)?;
        if let Some(tos) = self.tos {
            id.set_type_of_service(tos)?;
        }
        if let Some(n) = self.ack_timeout {
            id.set_ack_timeout(n)?;
        }
        Ok(id)
    }

    /// Starts to resolve the route, or takes the program's.
    pub(crate) fn begin_route(
        &self,
        resolved: AddrResolved,
        timeout: Duration,
    ) -> Result<ResolvingRoute> {
        match &self.path {
            Some(path) => resolved.set_ib_path(path),
            None => resolved.resolve_route(timeout),
        }
    }
}

/// Builds a [`Listener`], or an [`AsyncListener`](crate::aio::cm::AsyncEventChannel::listen).
#[derive(Clone, Debug)]
#[must_use]
pub struct ListenerBuilder {
    addresses: Vec<Target>,
    channel: Option<EventChannel>,
    qp_type: QpType,
    backlog: u32,
}

impl ListenerBuilder {
    fn on(addresses: Vec<Target>) -> ListenerBuilder {
        ListenerBuilder { addresses, channel: None, qp_type: QpType::RC, backlog: BACKLOG }
    }

    /// The event channel; unless set, the listener opens its own.
    pub fn channel(mut self, channel: &EventChannel) -> Self {
        self.channel = Some(channel.clone());
        self
    }

    /// The type of the queue pairs that requests are for: `RC`, `UC`, `XRC_TGT`, or `UD` for
    /// [`accept_datagrams`](ConnectRequest::accept_datagrams); `RC` unless set. `UC` and `XRC_TGT` are in the port
    /// space [`IB`](PortSpace::IB).
    pub fn qp_type(mut self, qp_type: QpType) -> Self {
        self.qp_type = qp_type;
        self
    }

    /// The limit of waiting connect requests, 128 unless set; see [`BoundId::listen`](super::BoundId::listen).
    pub fn backlog(mut self, backlog: u32) -> Self {
        self.backlog = backlog;
        self
    }

    /// Listens.
    ///
    /// # Errors
    ///
    /// As [`Id::bind`](super::Id::bind) and [`Id::bind_ib`](super::Id::bind_ib); `EINVAL` for another type.
    #[doc(alias("rdma_bind_addr", "rdma_listen"))]
    pub fn build(self) -> Result<Listener> {
        let channel = self.channel.clone().map_or_else(EventChannel::open, Ok)?;
        let id = self.listen(&channel)?;
        Ok(Listener { channel, id })
    }

    /// Listens on the first usable address.
    pub(crate) fn listen(&self, channel: &EventChannel) -> Result<ListeningId> {
        let mut last = None;
        for address in &self.addresses {
            let id = |space| channel.create_id(space, self.qp_type);
            let bound = match *address {
                Target::Ip(address) => id(PortSpace::of(self.qp_type))?.bind(address),
                Target::Ib(address) => id(PortSpace::IB)?.bind_ib(address),
            };
            match bound.and_then(|id| id.listen(self.backlog)) {
                Ok(id) => return Ok(id),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| no_address(BIND)))
    }
}

/// Accepts connections of queue pairs.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::QpType;
/// use uverbs::cm::Listener;
/// let listener = Listener::bind("0.0.0.0:7471")?;
/// let (qp, connection) = listener.accept(None, |request| {
///     let context = request.context()?;
///     let cq = context.cq_builder(16).build()?;
///     context.alloc_pd()?.qp_builder(&cq, &cq, QpType::RC).max_recv_wr(8).build()
/// })?;
/// println!("{} to {}", qp.qpn(), connection.peer_addr()?);
/// # Ok(()) }
/// ```
///
/// Two listeners on one channel, one of them for XRC; see [`ListenerBuilder`]:
///
/// ```no_run
/// # fn main() -> uverbs::Result<()> {
/// use uverbs::QpType;
/// use uverbs::cm::{EventChannel, Listener};
///
/// let channel = EventChannel::open()?;
/// let reliable = Listener::builder("[::]:7471")?.channel(&channel).build()?;
/// let targets =
///     Listener::builder("[::]:7472")?.channel(&channel).qp_type(QpType::XRC_TGT).backlog(8).build()?;
/// println!("{:?} and {:?}", reliable.local_addr()?, targets.local_addr()?);
/// // If no thread waits on an id, a thread of its own may read the events of all.
/// println!("{} events were for ids; {} leaked", channel.dispatch()?, targets.channel().leaked());
/// # Ok(()) }
/// ```
#[doc(alias("rdma_create_ep", "rdma_getaddrinfo"))]
#[derive(Debug)]
pub struct Listener {
    channel: EventChannel,
    id: ListeningId,
}

impl Listener {
    /// Listens on an address of this host, or on the first usable address of a host name, for reliable connections;
    /// [`builder`](Self::builder) has options.
    ///
    /// # Errors
    ///
    /// Those of [`builder`](Self::builder) and [`ListenerBuilder::build`].
    pub fn bind(address: impl ToSocketAddrs) -> Result<Listener> {
        Listener::builder(address)?.build()
    }

    /// Starts to build a listener on an address of this host, or on the first usable address of a host name.
    ///
    /// # Errors
    ///
    /// `EADDRNOTAVAIL` if the name has no address, or the resolver's error.
    pub fn builder(address: impl ToSocketAddrs) -> Result<ListenerBuilder> {
        let addresses = resolve(BIND, address)?;
        Ok(ListenerBuilder::on(addresses.into_iter().map(Target::Ip).collect()))
    }

    /// Starts to build a listener on the GID of a port and a service there, on InfiniBand. The id is in the port space
    /// [`IB`](PortSpace::IB), which also has the services of the other spaces; with port number 0 the kernel chooses
    /// one.
    #[doc(alias = "AF_IB")]
    pub fn builder_ib(address: IbAddress) -> ListenerBuilder {
        ListenerBuilder::on(vec![Target::Ib(address)])
    }

    /// The channel of the listener and of its connections.
    pub fn channel(&self) -> &EventChannel {
        &self.channel
    }

    /// The address that the listener listens on.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        self.id.local_addr()
    }

    /// The GID and the service that the listener listens on; see
    /// [`ListeningId::local_ib_addr`](super::ListeningId::local_ib_addr).
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    pub fn local_ib_addr(&self) -> Result<IbAddress> {
        self.id.local_ib_addr()
    }

    /// The number of connect requests that were rejected because the backlog was full; see
    /// [`BoundId::listen`](super::BoundId::listen).
    pub fn overflows(&self) -> u64 {
        self.id.overflows()
    }

    /// Waits for a connect request; see [`ListeningId::next_request`].
    ///
    /// # Errors
    ///
    /// As [`ListeningId::next_request`].
    pub fn next_request(&self, timeout: Option<Duration>) -> Result<Option<ConnectRequest>> {
        self.id.next_request(timeout)
    }

    /// Waits for a connect request, for at most `timeout`, or without a limit for `None`, accepts it, and waits for the
    /// peer's confirmation, for at most 10 seconds. `create` makes the queue pair on [`ConnectRequest::context`], and
    /// may post receives after [`ConnectRequest::init_qp`]. For parameters, or to go on with the request in another
    /// thread, use [`next_request`](Self::next_request) and [`ConnectRequest::accept`].
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT` if no request or no confirmation came; otherwise those of [`ConnectRequest::accept`],
    /// [`Accepting::wait`](super::Accepting::wait) and `create`. Any error rejects the request or closes the connection.
    #[doc(alias = "rdma_accept")]
    pub fn accept<Q: Deref<Target = QpControl>>(
        &self,
        timeout: Option<Duration>,
        create: impl FnOnce(&ConnectRequest) -> Result<Q>,
    ) -> std::result::Result<(Q, Connection), ConnectError> {
        const VERB: &str = "accept";
        let request = self.next_request(timeout)?;
        let request = request.ok_or_else(|| timed_out(VERB, "no request came in time"))?;
        let qp = create(&request)?;
        let accepting = request.accept(&qp, &ConnectParam::new())?;
        Ok((qp, accepting.wait(Some(ESTABLISH))?.done_in_time(VERB, UNCONFIRMED)?))
    }
}

fn resolve(verb: &'static str, address: impl ToSocketAddrs) -> Result<Vec<SocketAddr>> {
    let addresses = address.to_socket_addrs().map_err(|error| {
        let errno = Errno::from_io_error(&error).unwrap_or(Errno::ADDRNOTAVAIL);
        Error::new(verb, errno).detail(format!("the host name was not resolved: {error}"))
    })?;
    Ok(addresses.collect())
}

pub(crate) fn no_address(verb: &'static str) -> Error {
    Error::new(verb, Errno::ADDRNOTAVAIL).detail("the host name has no address")
}
