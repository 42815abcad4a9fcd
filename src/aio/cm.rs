//! Connections by address as futures, in any event loop.
//!
//! An [`AsyncEventChannel`] comes with a [`ChannelDriver`], a future that is spawned on an event loop which implements
//! [`Readiness`]; with tokio, `AsyncEventChannel::spawn` does both. [`crate::cm`] has the steps
//! and the parameters.
//!
//! ```no_run
//! # #[cfg(feature = "tokio")]
//! # async fn f(context: &uverbs::Context) -> Result<(), Box<dyn std::error::Error>> {
//! use uverbs::QpType;
//! use uverbs::aio::cm::{AsyncConnection, AsyncEventChannel, AsyncListener};
//! use uverbs::cm::{ConnectParam, Connector, Listener};
//!
//! let (channel, _driver) = AsyncEventChannel::spawn()?;
//! channel.use_context(context)?;
//! let (cq, _driver) = context.cq_builder(64).spawn()?;
//! let pd = context.alloc_pd()?;
//!
//! // A server:
//! let listener: AsyncListener = channel.listen(&Listener::builder("0.0.0.0:7471")?)?;
//! let request = listener.next_request().await?;
//! let (qp, connection) = channel
//!     .accept(request, &ConnectParam::new(), |_| {
//!         let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(16).max_recv_wr(16).build()?;
//!         Ok(cq.adopt(qp)?)
//!     })
//!     .await?;
//! connection.disconnected().await?;
//!
//! // A client:
//! let connector = Connector::new("10.0.0.2:7471")?;
//! let (qp, connection) = channel
//!     .connect(&connector, |_route| {
//!         let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(16).max_recv_wr(16).build()?;
//!         Ok(cq.adopt(qp)?)
//!     })
//!     .await?;
//! let connection: AsyncConnection = connection;
//! println!("connected to {}", connection.peer_addr()?);
//! # drop((qp, connection)); Ok(()) }
//! ```
//!
//! - **Dropped futures** destroy their id in the kernel: a connect request is cancelled, an accepted one
//!   rejected, a multicast group left. No event of a listener or of a connection is lost.
//! - **Datagrams**: [`connect_datagrams`](AsyncEventChannel::connect_datagrams) asks a listener where to send them,
//!   and [`join_multicast`](AsyncEventChannel::join_multicast) joins a group. What needs no answer of the network is
//!   no future: [`accept_datagrams`](ConnectRequest::accept_datagrams), and leaving a group, which is dropping the
//!   [`AsyncMulticastMember`].
//! - **Deadlines**: [`Connector::timeout`] limits the whole of a connect to one address. A server's
//!   [`accept`](AsyncEventChannel::accept) waits about a minute, until the kernel gives up, for a client that gave up,
//!   if the word of that is lost or overtakes the request, as it does where many clients come at once: put it into the
//!   event loop's timeout (`tokio::time::timeout`), which drops the future when the time is over.
//! - **The end**: that a connection was dropped is told to the peer once. [`disconnect`](Connection::disconnect), and
//!   then [`disconnected`](AsyncConnection::disconnected), has the kernel repeat it until the peer has confirmed it.
//! - **Streams**: with the feature `stream`, an [`AsyncListener`] is a stream of requests and an [`AsyncConnection`]
//!   one of its events. The `poll_…` of both are for futures that a program writes itself.
//! - **Commands** go to the kernel in the task that polls the future; each takes some microseconds. Host names are
//!   resolved by the calling thread, which may take seconds: a task passes a [`SocketAddr`].
//! - **Receives** that are posted after the connection is established may come too late: see
//!   [below](#receives-for-the-first-message).
//! - **The last message**: a peer disconnects as soon as it has what it waits for, and its device may then leave the
//!   last message without an acknowledgement; the send fails after all its repetitions. The sender
//!   awaits [`disconnected`](AsyncConnection::disconnected) at the same time.
//! - **Workers**: a worker with a channel, a context and a thread domain of its own
//!   [accepts](AsyncEventChannel::accept) requests that a listener of another channel received.
//!
//! # Receives for the first message
//!
//! The peer may send as soon as the connection is established, which may be before the future of `connect` or `accept`
//! returns the queue pair. A message that finds no receive is sent again after the time that
//! [`min_rnr_timer`](ConnectParam::min_rnr_timer) asks for, 0.64 milliseconds unless it is set. A program that posts
//! its first receives afterwards relies on that.
//!
//! A program that does not want to wait posts receives in state [`INIT`](crate::QpState::INIT), before the request or
//! its answer leaves: `init_qp` of the route and of the request brings the queue pair there, and
//! [`Inbox::fill`](super::Inbox::fill) posts them. [`QpWith`](crate::cm::QpWith) hands the inbox out with the queue
//! pair.
//!
//! ```no_run
//! # async fn f(
//! #     channel: uverbs::aio::cm::AsyncEventChannel,
//! #     listener: uverbs::aio::cm::AsyncListener,
//! #     cq: uverbs::aio::AsyncCompletionQueue,
//! #     pd: uverbs::ProtectionDomain,
//! #     pool: uverbs::owned::BufferPool,
//! # ) -> Result<(), Box<dyn std::error::Error>> {
//! use uverbs::QpType;
//! use uverbs::cm::{ConnectParam, Connector, QpWith};
//!
//! let build = || pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(16).max_recv_wr(16).build();
//!
//! // A client:
//! let connector = Connector::new("10.0.0.2:7471")?;
//! let connected = channel.connect(&connector, |route| {
//!     let qp = cq.adopt(build()?)?;
//!     route.init_qp(&qp)?;
//!     let mut inbox = qp.inbox(&pool, 16);
//!     println!("{} receives are posted", inbox.fill());
//!     Ok(QpWith(qp, inbox))
//! });
//! let (QpWith(qp, mut inbox), connection) = connected.await?;
//! let first = inbox.next().await?;
//! # drop((qp, connection, first));
//!
//! // A server:
//! let (request, param) = (listener.next_request().await?, ConnectParam::new());
//! let accepted = channel.accept(request, &param, |request| {
//!     let qp = cq.adopt(build()?)?;
//!     request.init_qp(&qp)?;
//!     let mut inbox = qp.inbox(&pool, 16);
//!     inbox.fill();
//!     Ok(QpWith(qp, inbox))
//! });
//! let (QpWith(qp, mut inbox), connection) = accepted.await?;
//! let first = inbox.next().await?;
//! # drop((qp, connection, first)); Ok(()) }
//! ```
//!
//! The receives of a [shared receive queue](super::AsyncSharedReceiveQueue) can be posted before there is any
//! connection.

use super::driver::Readiness;
use crate::cm::{
    BoundId, ConnectError, ConnectParam, ConnectRequest, Connecting, ConnectingDatagrams,
    Connection, ConnectionEvent, Connector, DatagramPeer, Event, EventChannel, EventWait,
    IbAddress, ListenerBuilder, ListeningId, MulticastMember, MulticastRole, NO_ADDRESS, NO_ANSWER,
    NO_ROUTE, Polled, PortSpace, RouteResolved, Step, Target, no_address, timed_out,
};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::first_panic::FirstPanic;
use crate::qp::{QpControl, QpType};
use crate::sync::AtomicBool;
use crate::sync::fork::{Epoch, OwnedHere};
use crate::sync::lock::Lock;
use rustix::io::Errno;
use std::fmt;
use std::future::{Future, poll_fn};
use std::net::{IpAddr, SocketAddr};
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::{self, Poll, Waker, ready};
use std::time::Duration;
use uverbs_host::HostSystem;

/// How often in a row the file may be reported as readable without an event.
const MAX_FALSE_ALARMS: u32 = 1000;

/// A channel, as its handles and its driver share it.
struct ChannelState {
    channel: EventChannel,
    /// Whether the driver has ended.
    is_over: AtomicBool,
    /// The driver's task, to be woken when the last handle is dropped.
    driver: Lock<Option<Waker>>,
}

impl ChannelState {
    /// The event that a step waits for.
    fn poll_event<S: Step>(
        &self,
        step: &S,
        wait: &mut Option<u64>,
        cx: &mut task::Context<'_>,
    ) -> Poll<Result<Event>> {
        let event = loop {
            match step.id().poll_event(S::VERB, wait, cx) {
                Poll::Ready(Ok(event)) if step.ignores(&event) => {}
                event => break event,
            }
        };
        // The driver sets the flag before it wakes the tasks, and this task looks after it is listed.
        if event.is_pending() && self.is_over.load(Ordering::SeqCst) {
            let detail = "the driver of the event channel has ended";
            return Poll::Ready(Err(Error::new(S::VERB, Errno::CANCELED).detail(detail)));
        }
        event
    }

    /// Waits for the event of a step, and takes the step.
    async fn step<S: Step>(&self, step: S) -> std::result::Result<S::Next, S::Error> {
        let event = {
            let mut wait = EventWait::new(step.id());
            poll_fn(|cx| self.poll_event(&step, &mut wait.number, cx)).await?
        };
        step.advance(event)
    }

    /// Polls for the event of a step, and takes the step. Of several tasks that poll, the last one is woken.
    fn poll_step<S: Step<Error = Error>>(
        &self,
        step: S,
        cx: &mut task::Context<'_>,
    ) -> Poll<Result<S::Next>> {
        let event = ready!(self.poll_event(&step, &mut Polled::Event.number(), cx));
        Poll::Ready(event.and_then(|event| step.advance(event)))
    }

    /// Waits for the end that an event brings. Any number of tasks may wait.
    async fn end_of<S: Step<Error = Error> + Copy>(
        &self,
        step: S,
        ended: impl Fn() -> bool,
    ) -> Result<()> {
        let mut wait = EventWait::new(step.id());
        poll_fn(|cx| self.poll_end(step, &ended, &mut wait.number, cx)).await
    }

    /// Polls for the end that an event brings. Other events are discarded. The task that takes the event makes `ended`
    /// true, and wakes the others.
    fn poll_end<S: Step<Error = Error> + Copy>(
        &self,
        step: S,
        ended: &impl Fn() -> bool,
        wait: &mut Option<u64>,
        cx: &mut task::Context<'_>,
    ) -> Poll<Result<()>> {
        while !ended() {
            match self.poll_event(&step, wait, cx) {
                Poll::Ready(event) => _ = step.advance(event?)?,
                // Another task took the event before this one was listed.
                Poll::Pending if ended() => break,
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Fails the futures of the channel, now and later.
    fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.channel.wake_all();
    }
}

/// A timer of the event loop.
type Timer = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The timer of a connect. A forked child leaves it to the parent's event loop.
type Limit = OwnedHere<Timer>;

/// Ends the driver when the last handle is dropped.
struct Handle {
    shared: Arc<ChannelState>,
    /// Starts a timer.
    sleep: AssertUnwindSafe<Box<dyn Fn(Duration) -> Timer + Send + Sync>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let driver = self.shared.driver.lock().and_then(|mut driver| driver.take());
        FirstPanic::of_one(|| driver.into_iter().for_each(Waker::wake));
    }
}

/// An event channel whose ids are futures. Clones, listeners and connections are handles of the same channel.
#[derive(Clone)]
pub struct AsyncEventChannel {
    handle: Arc<Handle>,
}

impl AsyncEventChannel {
    /// Opens the connection manager, in an event loop that watches files and has timers. `readiness` gets the file of
    /// the channel, and registers it with the event loop; the file
    /// [takes commands](EventChannel#impl-AsFd-for-EventChannel). `sleep` makes a future that is over after a time,
    /// which each connect begins with, for [`Connector::timeout`].
    ///
    /// In an event loop other than tokio's, which watches the file and runs the driver as a task:
    ///
    /// ```no_run
    /// # use std::{os::fd::BorrowedFd, time::Duration};
    /// # use uverbs::{aio::{Readiness, cm::{ChannelDriver, AsyncEventChannel}}, cm::Listener};
    /// # async fn f<R: Readiness + Unpin, Sleep: Future<Output = ()> + Send + 'static>(
    /// #     watch: impl FnOnce(BorrowedFd<'_>) -> uverbs::Result<R>,
    /// #     sleep: impl Fn(Duration) -> Sleep + Send + Sync + 'static,
    /// #     spawn: impl Fn(ChannelDriver<R>),
    /// # ) -> uverbs::Result<()> {
    /// let (channel, driver) = AsyncEventChannel::new(watch, sleep)?;
    /// spawn(driver);
    /// let listener = channel.listen(&Listener::builder("0.0.0.0:7471")?)?;
    /// let request = listener.next_request().await?;
    /// # drop(request); Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`EventChannel::open`], and what `readiness` returns.
    pub fn new<W: Readiness, F: Future<Output = ()> + Send + 'static>(
        readiness: impl FnOnce(BorrowedFd<'_>) -> Result<W>,
        sleep: impl Fn(Duration) -> F + Send + Sync + 'static,
    ) -> Result<(AsyncEventChannel, ChannelDriver<W>)> {
        AsyncEventChannel::on(EventChannel::open()?, readiness, sleep)
    }

    /// As [`new`](Self::new), of a hosted kernel, which stands for Linux in this process; see
    /// [`EventChannel::open_on`].
    ///
    /// **Unstable**, as `uverbs-host` is.
    ///
    /// ```
    /// # #[cfg(all(feature = "sim", feature = "tokio"))] {
    /// use uverbs::aio::cm::AsyncEventChannel;
    /// use uverbs::aio::tokio::Registered;
    /// use uverbs::sim::{Fabric, Mode};
    ///
    /// let fabric = Fabric::new(2, Mode::Trapped);
    /// let event_loop = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    /// let _in_its_context = event_loop.enter();
    /// let (channel, driver) = AsyncEventChannel::new_on(&fabric.system(), Registered::new, tokio::time::sleep)?;
    /// # drop((channel, driver)); }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`EventChannel::open_on`], and what `readiness` returns.
    pub fn new_on<W: Readiness, F: Future<Output = ()> + Send + 'static>(
        system: &Arc<dyn HostSystem>,
        readiness: impl FnOnce(BorrowedFd<'_>) -> Result<W>,
        sleep: impl Fn(Duration) -> F + Send + Sync + 'static,
    ) -> Result<(AsyncEventChannel, ChannelDriver<W>)> {
        AsyncEventChannel::on(EventChannel::open_on(system)?, readiness, sleep)
    }

    fn on<W: Readiness, F: Future<Output = ()> + Send + 'static>(
        channel: EventChannel,
        readiness: impl FnOnce(BorrowedFd<'_>) -> Result<W>,
        sleep: impl Fn(Duration) -> F + Send + Sync + 'static,
    ) -> Result<(AsyncEventChannel, ChannelDriver<W>)> {
        let readiness = readiness(channel.as_fd())?;
        let is_over = AtomicBool::new(false);
        let shared = Arc::new(ChannelState { channel, is_over, driver: Lock::default() });
        let sleep = Box::new(move |time| -> Timer { Box::pin(sleep(time)) });
        // A panic of `sleep` leaves a channel as it was.
        let sleep = AssertUnwindSafe(sleep as Box<_>);
        let handle = Arc::new(Handle { shared: shared.clone(), sleep });
        let driver =
            ChannelDriver { shared, handle: Arc::downgrade(&handle), readiness, false_alarms: 0 };
        Ok((AsyncEventChannel { handle }, driver))
    }

    fn shared(&self) -> &ChannelState {
        &self.handle.shared
    }

    /// The channel itself, to [migrate](ConnectRequest::migrate) a request to. A thread that blocks on one of
    /// its ids keeps no task waiting.
    ///
    /// ```no_run
    /// # use uverbs::{Result, aio::cm::AsyncEventChannel, cm::ConnectRequest};
    /// # fn f(worker: &AsyncEventChannel, request: ConnectRequest) -> Result<()> {
    /// let request = request.migrate(worker.channel())?;
    /// # drop(request); Ok(()) }
    /// ```
    pub fn channel(&self) -> &EventChannel {
        &self.shared().channel
    }

    /// Makes this the context of ids on its device; see [`EventChannel::use_context`].
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn use_context(&self, context: &Context) -> Result<()> {
        self.shared().channel.use_context(context)
    }

    /// Listens; see [`ListenerBuilder`]. The driver reads requests as they come; the listener keeps as many as the
    /// [backlog](ListenerBuilder::backlog), and rejects others. The builder's channel is not used.
    ///
    /// A service that tells all its peers the same queue pair for datagrams:
    ///
    /// ```no_run
    /// # use uverbs::aio::{AsyncQueuePair, cm::AsyncEventChannel};
    /// # async fn f(channel: AsyncEventChannel, qp: AsyncQueuePair) -> uverbs::Result<()> {
    /// use uverbs::QpType;
    /// use uverbs::cm::{ConnectParam, Listener};
    ///
    /// let listener = channel.listen(&Listener::builder("0.0.0.0:7471")?.qp_type(QpType::UD))?;
    /// loop {
    ///     let request = listener.next_request().await?;
    ///     request.accept_datagrams(&qp, &ConnectParam::new())?;
    /// }
    /// # }
    /// ```
    ///
    /// On InfiniBand, on the GID of a port and a service there; [`Connector::to_ib`] is the other side:
    ///
    /// ```no_run
    /// # use uverbs::{Result, aio::cm::AsyncEventChannel, cm::IbAddress};
    /// # async fn f(channel: &AsyncEventChannel, service: IbAddress) -> Result<()> {
    /// use uverbs::aio::cm::AsyncListener;
    /// use uverbs::cm::Listener;
    ///
    /// let listener: AsyncListener = channel.listen(&Listener::builder_ib(service))?;
    /// println!("on {:?}; {} requests found no room", listener.local_ib_addr()?, listener.overflows());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`ListenerBuilder::build`].
    pub fn listen(&self, listener: &ListenerBuilder) -> Result<AsyncListener> {
        Ok(self.listener(listener.listen(self.channel())?))
    }

    fn connection(&self, connection: Connection) -> AsyncConnection {
        AsyncConnection {
            connection,
            channel: self.clone(),
            #[cfg(feature = "stream")]
            is_over: false,
        }
    }

    fn listener(&self, id: ListeningId) -> AsyncListener {
        AsyncListener {
            id,
            channel: self.clone(),
            #[cfg(feature = "stream")]
            is_over: false,
        }
    }

    /// Connects to the address of `connector`, or to its addresses in turn until one accepts. `create` makes
    /// the queue pair as for [`Connector::connect`]. The connector's channel is not used.
    ///
    /// [`Connector::timeout`] is the limit for all of the connect to one address, by a timer of the event loop.
    /// Dropping the future is safe at any time: the request is cancelled, and a queue pair that the program has another
    /// handle of stays in `RESET` or `INIT`, from where it can be connected again.
    ///
    /// # Errors
    ///
    /// As [`Connector::connect`]; `ECANCELED` if the driver has ended.
    pub async fn connect<Q: Deref<Target = QpControl>>(
        &self,
        connector: &Connector,
        mut create: impl FnMut(&RouteResolved) -> Result<Q>,
    ) -> std::result::Result<(Q, AsyncConnection), ConnectError> {
        let mut last = None;
        for target in connector.targets() {
            match self.connect_to(connector, *target, &mut create).await {
                Ok(connected) => return Ok(connected),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| no_address("connect").into()))
    }

    async fn connect_to<Q: Deref<Target = QpControl>>(
        &self,
        connector: &Connector,
        target: Target,
        create: &mut impl FnMut(&RouteResolved) -> Result<Q>,
    ) -> std::result::Result<(Q, AsyncConnection), ConnectError> {
        let mut limit = self.limit(connector)?;
        let qp_type = connector.type_of_qp();
        let route = self.route(Connecting::VERB, connector, target, qp_type, &mut limit).await?;
        let qp = create(&route)?;
        let connecting = route.connect(&qp, connector.parameters())?;
        let connection =
            self.step_within(Connecting::VERB, &mut limit, connecting, NO_ANSWER).await?;
        Ok((qp, self.connection(connection)))
    }

    async fn route(
        &self,
        verb: &'static str,
        connector: &Connector,
        target: Target,
        qp_type: QpType,
        limit: &mut Limit,
    ) -> Result<RouteResolved> {
        let timeout = connector.time_limit();
        let resolving = connector.begin(self.channel(), target, qp_type, timeout)?;
        let resolved = self.step_within(verb, limit, resolving, NO_ADDRESS).await?;
        let resolving = connector.begin_route(resolved, timeout)?;
        self.step_within(verb, limit, resolving, NO_ROUTE).await
    }

    /// Starts the timer of a connect to one address.
    fn limit(&self, connector: &Connector) -> Result<Limit> {
        let epoch = Epoch::of_verb("connect")?;
        Ok(OwnedHere::of((self.handle.sleep)(connector.time_limit()), epoch))
    }

    /// Waits for the event of a step until the timer of the connect has ended, and takes the step.
    async fn step_within<S: Step>(
        &self,
        verb: &'static str,
        limit: &mut Limit,
        step: S,
        late: &'static str,
    ) -> std::result::Result<S::Next, S::Error> {
        let mut next = pin!(self.shared().step(step));
        poll_fn(|cx| match next.as_mut().poll(cx) {
            Poll::Pending => limit.as_mut().poll(cx).map(|()| Err(timed_out(verb, late).into())),
            done => done,
        })
        .await
    }

    /// Asks a listener of the port space [`UDP`](PortSpace::UDP) where to send datagrams, at the address of
    /// `connector`, or at its addresses in turn until one answers, and brings the queue pair that `create` makes to
    /// `RTS`; see
    /// [`RouteResolved::connect_datagrams`]. For the time that this may take see [`connect`](Self::connect).
    ///
    /// ```no_run
    /// # use uverbs::aio::{AsyncQueuePair, cm::AsyncEventChannel};
    /// # use uverbs::owned::Buffer;
    /// # async fn f(channel: AsyncEventChannel, qp: AsyncQueuePair, pd: uverbs::ProtectionDomain, buffer: Buffer)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// use uverbs::{Destination, SendWr, cm::Connector};
    /// let connector = Connector::new("10.0.0.2:7471")?;
    /// let (qp, peer) = channel.connect_datagrams(&connector, |_route| Ok(qp.clone())).await?;
    /// let ah = pd.create_ah(peer.address())?;
    /// let to = Destination::new(&ah, peer.qpn(), peer.qkey());
    /// qp.post(SendWr::send(&[]).to(to), buffer).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub async fn connect_datagrams<Q: Deref<Target = QpControl>>(
        &self,
        connector: &Connector,
        mut create: impl FnMut(&RouteResolved) -> Result<Q>,
    ) -> std::result::Result<(Q, DatagramPeer), ConnectError> {
        let mut last = None;
        for target in connector.targets() {
            match self.connect_datagrams_to(connector, *target, &mut create).await {
                Ok(connected) => return Ok(connected),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| no_address("connect_datagrams").into()))
    }

    async fn connect_datagrams_to<Q: Deref<Target = QpControl>>(
        &self,
        connector: &Connector,
        target: Target,
        create: &mut impl FnMut(&RouteResolved) -> Result<Q>,
    ) -> std::result::Result<(Q, DatagramPeer), ConnectError> {
        let mut limit = self.limit(connector)?;
        const VERB: &str = ConnectingDatagrams::VERB;
        let route = self.route(VERB, connector, target, QpType::UD, &mut limit).await?;
        let qp = create(&route)?;
        let connecting = route.connect_datagrams(&qp, connector.parameters())?;
        let peer = self.step_within(VERB, &mut limit, connecting, NO_ANSWER).await?;
        Ok((qp, peer))
    }

    /// Joins a multicast group by the device that has the address `local`, with the queue pair of type UD that `create`
    /// makes; see [`BoundId::join_multicast`]. A queue pair that is in other groups already stays in them. Dropping the
    /// member leaves the group, as does dropping the future.
    ///
    /// # Errors
    ///
    /// As [`BoundId::join_multicast`] and [`JoiningMulticast::wait`](crate::cm::JoiningMulticast::wait), and those of
    /// [`Id::bind`](crate::cm::Id::bind) and `create`; `ECANCELED` if the driver has ended.
    pub async fn join_multicast<Q: Deref<Target = QpControl>>(
        &self,
        local: IpAddr,
        group: IpAddr,
        role: MulticastRole,
        create: impl FnOnce(&BoundId) -> Result<Q>,
    ) -> Result<(Q, AsyncMulticastMember)> {
        let shared = self.shared();
        let id = shared.channel.create_id(PortSpace::UDP, QpType::UD)?;
        let bound = id.bind(SocketAddr::new(local, 0))?;
        let qp = create(&bound)?;
        let joining = bound.join_multicast(&qp, group, role)?;
        let member = shared.step(joining).await?;
        Ok((qp, AsyncMulticastMember { member, channel: self.clone() }))
    }

    /// Accepts a request and waits for the peer's confirmation, which a client that gave up may not send: the kernel
    /// gives up after about a minute. A shorter limit is the event loop's timeout around this future:
    ///
    /// ```no_run
    /// # #[cfg(feature = "tokio")]
    /// # async fn f(channel: uverbs::aio::cm::AsyncEventChannel, request: uverbs::cm::ConnectRequest, qp: uverbs::QueuePair)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// use uverbs::cm::ConnectParam;
    ///
    /// let param = ConnectParam::new();
    /// let accepting = channel.accept(request, &param, |_| Ok(qp));
    /// let (qp, connection) = tokio::time::timeout(Duration::from_secs(10), accepting).await??;
    /// # drop((qp, connection)); Ok(()) }
    /// ```
    ///
    /// `create` makes the queue pair as for [`Listener::accept`](crate::cm::Listener::accept). A request of another
    /// channel is first
    /// [moved](ConnectRequest::migrate) to this one, and its queue pair is created on this channel's context.
    ///
    /// # Errors
    ///
    /// As [`ConnectRequest::accept`] and [`Accepting::wait`](crate::cm::Accepting::wait), and those of `create`;
    /// `ETIMEDOUT` when the kernel gives up; `ECANCELED` if the driver has ended.
    pub async fn accept<Q: Deref<Target = QpControl>>(
        &self,
        request: ConnectRequest,
        param: &ConnectParam,
        create: impl FnOnce(&ConnectRequest) -> Result<Q>,
    ) -> std::result::Result<(Q, AsyncConnection), ConnectError> {
        let request = request.migrate(self.channel())?;
        let qp = create(&request)?;
        let accepting = request.accept(&qp, param)?;
        let connection = self.shared().step(accepting).await?;
        Ok((qp, self.connection(connection)))
    }
}

impl fmt::Debug for AsyncEventChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncEventChannel").field("channel", self.channel()).finish_non_exhaustive()
    }
}

/// Reads the events of a channel, and wakes the futures that wait for them. It is a future itself, which ends
/// when the last handle of the channel is dropped, or with an error.
///
/// When it ends or is dropped, all futures of the channel fail with `ECANCELED`.
#[must_use = "nothing happens unless it is polled"]
pub struct ChannelDriver<W> {
    shared: Arc<ChannelState>,
    handle: Weak<Handle>,
    readiness: W,
    /// How often in a row the file was reported as readable without an event.
    false_alarms: u32,
}

impl<W: Readiness + Unpin> Future for ChannelDriver<W> {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut task::Context<'_>) -> Poll<Result<()>> {
        let end = self.drive(cx);
        if end.is_ready() {
            self.shared.end();
        }
        end
    }
}

impl<W: Readiness> ChannelDriver<W> {
    /// Reads events until none is left.
    fn drive(&mut self, cx: &mut task::Context<'_>) -> Poll<Result<()>> {
        let ChannelDriver { shared, handle, readiness, false_alarms } = self;
        // The last handle that is dropped takes the waker, so handles are counted after it is stored.
        let waker = cx.waker().clone();
        drop(shared.driver.lock().and_then(|mut driver| driver.replace(waker)));
        loop {
            if handle.strong_count() == 0 {
                return Poll::Ready(Ok(()));
            }
            // Whether or not the file was reported as readable: a thread that blocked on an id of this channel
            // may have left events behind.
            // It is no false alarm if another thread reads what the file was reported for.
            if shared.channel.dispatch_or_wake(cx)? != Some(0) {
                *false_alarms = 0;
            }
            // Reading comes after the readiness is cleared, so that no event is missed.
            ready!(readiness.poll_read(cx, &mut || Ok(())))?;
            *false_alarms = false_alarms.saturating_add(1);
            if *false_alarms > MAX_FALSE_ALARMS {
                let detail = "the event channel is reported as readable without an event";
                return Poll::Ready(Err(Error::new("get_cm_event", Errno::IO).detail(detail)));
            }
        }
    }
}

impl<W> Drop for ChannelDriver<W> {
    fn drop(&mut self) {
        self.shared.end();
    }
}

impl<W> fmt::Debug for ChannelDriver<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChannelDriver")
            .field("channel", &self.shared.channel)
            .finish_non_exhaustive()
    }
}

/// A listener, whose connect requests are a stream. Dropping it rejects the requests that nobody took.
///
/// Any number of tasks may share it, by reference or in an [`Arc`]; each request goes to one of them. That the device
/// goes is told to all.
///
/// ```no_run
/// # use uverbs::aio::cm::{AsyncEventChannel, AsyncListener};
/// # use uverbs::cm::ConnectRequest;
/// # async fn f(worker: AsyncEventChannel, serve: impl AsyncFn(ConnectRequest), listener: AsyncListener) -> uverbs::Result<()> {
/// let shared = std::sync::Arc::new(listener);
/// // In each of several tasks:
/// let listener = shared.clone();
/// loop {
///     serve(listener.next_request().await?).await;
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncListener {
    id: ListeningId,
    channel: AsyncEventChannel,
    /// The stream returned an error.
    #[cfg(feature = "stream")]
    pub(super) is_over: bool,
}

impl AsyncListener {
    /// The address that the listener listens on.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        self.id.local_addr()
    }

    /// The GID and the service that the listener listens on; see [`ListeningId::local_ib_addr`].
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    pub fn local_ib_addr(&self) -> Result<IbAddress> {
        self.id.local_ib_addr()
    }

    /// How many connect requests were rejected because as many others as the [backlog](BoundId::listen) waited to be
    /// taken.
    pub fn overflows(&self) -> u64 {
        self.id.overflows()
    }

    /// Waits for a connect request, and returns it for [`AsyncEventChannel::accept`]. No request is lost if the
    /// future is dropped.
    ///
    /// # Errors
    ///
    /// As [`ListeningId::next_request`]; `ECANCELED` if the driver has ended.
    pub async fn next_request(&self) -> Result<ConnectRequest> {
        self.channel.shared().step(&self.id).await
    }

    /// Polls for the next connect request. Of several tasks that poll, the last one is woken;
    /// [`next_request`](Self::next_request) wakes all.
    ///
    /// Of two listeners, the one that a request comes to:
    ///
    /// ```no_run
    /// # use uverbs::{Result, aio::cm::AsyncListener, cm::ConnectRequest};
    /// # async fn f(ipv4: &AsyncListener, ipv6: &AsyncListener) -> Result<ConnectRequest> {
    /// use std::future::poll_fn;
    ///
    /// let request = poll_fn(|cx| match ipv4.poll_next(cx) {
    ///     request if request.is_ready() => request,
    ///     _ => ipv6.poll_next(cx),
    /// });
    /// request.await
    /// # }
    /// ```
    pub fn poll_next(&self, cx: &mut task::Context<'_>) -> Poll<Result<ConnectRequest>> {
        self.channel.shared().poll_step(&self.id, cx)
    }
}

/// An established connection; everything that does not wait is behind [`Deref`], as a
/// [`Connection`]. Dropping it closes the connection.
#[derive(Debug)]
pub struct AsyncConnection {
    connection: Connection,
    channel: AsyncEventChannel,
    /// The stream returned an error.
    #[cfg(feature = "stream")]
    pub(super) is_over: bool,
}

impl AsyncConnection {
    /// Waits for the next event. If several tasks wait, each event goes to one of them. No event is lost if the
    /// future is dropped.
    ///
    /// ```no_run
    /// # async fn f(connection: &uverbs::aio::cm::AsyncConnection) -> uverbs::Result<()> {
    /// println!("{:?}", connection.next_event().await?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Connection::next_event`]; `ECANCELED` if the driver has ended.
    pub async fn next_event(&self) -> Result<ConnectionEvent> {
        self.channel.shared().step(&self.connection).await
    }

    /// Polls for the next event. Of several tasks that poll, the last one is woken; [`next_event`](Self::next_event)
    /// wakes all.
    ///
    /// The next message, or the end:
    ///
    /// ```no_run
    /// # use uverbs::aio::{Inbox, cm::AsyncConnection};
    /// # use uverbs::owned::{Buffer, Finished};
    /// # async fn f(inbox: &mut Inbox, connection: &AsyncConnection) -> Result<Option<Finished<Buffer>>, Box<dyn std::error::Error>> {
    /// use std::future::poll_fn;
    /// use std::task::Poll;
    ///
    /// poll_fn(|cx| match inbox.poll_next(cx) {
    ///     Poll::Ready(message) => Poll::Ready(Ok(Some(message?))),
    ///     Poll::Pending => connection.poll_disconnected(cx).map(|ended| Ok(ended.map(|()| None)?)),
    /// })
    /// .await
    /// # }
    /// # fn g(connection: &AsyncConnection, cx: &mut std::task::Context<'_>) {
    /// if let Poll::Ready(event) = connection.poll_event(cx) {
    ///     println!("{event:?}");
    /// }
    /// # use std::task::Poll;
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`next_event`](Self::next_event).
    pub fn poll_event(&self, cx: &mut task::Context<'_>) -> Poll<Result<ConnectionEvent>> {
        self.channel.shared().poll_step(&self.connection, cx)
    }

    /// Waits until either side has closed the connection, the peer is
    /// [unreachable](ConnectionEvent::Unreachable), or the device is being removed;
    /// [`closed_by`](Connection::closed_by) then says which. Any number of tasks may wait for that. Other events are
    /// discarded.
    ///
    /// # Errors
    ///
    /// As [`next_event`](Self::next_event).
    pub async fn disconnected(&self) -> Result<()> {
        self.channel.shared().end_of(&self.connection, || self.is_closed()).await
    }

    /// As [`disconnected`](Self::disconnected), for a task that polls. Of several, the last one is woken.
    ///
    /// # Errors
    ///
    /// As [`next_event`](Self::next_event).
    pub fn poll_disconnected(&self, cx: &mut task::Context<'_>) -> Poll<Result<()>> {
        let (shared, mut wait) = (self.channel.shared(), Polled::End.number());
        shared.poll_end(&self.connection, &|| self.is_closed(), &mut wait, cx)
    }
}

impl Deref for AsyncConnection {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

/// A membership in a multicast group; everything that does not wait is behind [`Deref`], as a
/// [`MulticastMember`]. Dropping it leaves the group.
#[derive(Debug)]
#[must_use = "dropping the membership leaves the group"]
pub struct AsyncMulticastMember {
    member: MulticastMember,
    channel: AsyncEventChannel,
}

impl AsyncMulticastMember {
    /// Waits until the membership is lost, as [`wait_lost`](MulticastMember::wait_lost) does by blocking its
    /// thread. Any number of tasks may wait for that.
    ///
    /// A task that keeps a queue pair in a group:
    ///
    /// ```no_run
    /// # async fn f(channel: uverbs::aio::cm::AsyncEventChannel, qp: uverbs::aio::AsyncQueuePair)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// use uverbs::cm::MulticastRole;
    ///
    /// let (local, group) = ("10.0.0.1".parse()?, "239.1.2.3".parse()?);
    /// loop {
    ///     let joining = channel.join_multicast(local, group, MulticastRole::Full, |_| Ok(qp.clone()));
    ///     let (_qp, member) = joining.await?;
    ///     println!("datagrams to {} arrive", member.gid());
    ///     member.lost().await?;
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// `EACCES` after a change of credentials; `ECANCELED` if the driver has ended.
    pub async fn lost(&self) -> Result<()> {
        self.channel.shared().end_of(&self.member, || self.is_lost()).await
    }

    /// As [`lost`](Self::lost), for a task that polls. Of several, the last one is woken.
    ///
    /// ```no_run
    /// # use uverbs::aio::cm::AsyncMulticastMember;
    /// # async fn f(members: &[AsyncMulticastMember]) -> uverbs::Result<usize> {
    /// use std::future::poll_fn;
    /// use std::task::Poll;
    ///
    /// poll_fn(|cx| {
    ///     let mut all = members.iter().map(|member| member.poll_lost(cx));
    ///     let first = all.position(|lost| lost.is_ready());
    ///     first.map_or(Poll::Pending, |number| Poll::Ready(Ok(number)))
    /// })
    /// .await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`lost`](Self::lost).
    pub fn poll_lost(&self, cx: &mut task::Context<'_>) -> Poll<Result<()>> {
        let (shared, mut wait) = (self.channel.shared(), Polled::End.number());
        shared.poll_end(&self.member, &|| self.is_lost(), &mut wait, cx)
    }
}

impl Deref for AsyncMulticastMember {
    type Target = MulticastMember;

    fn deref(&self) -> &MulticastMember {
        &self.member
    }
}

#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, not(loom)))]
mod tests;
