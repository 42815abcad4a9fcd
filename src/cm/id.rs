//! Ids of the connection manager from an unbound id to a resolved route; the type of an id says which steps
//! may follow. Pairs with `ucma_create_id`, `ucma_bind`, `ucma_resolve_addr` and
//! `ucma_resolve_route` in `core/ucma.c`.

use super::address::{Encoded, STORAGE, decode, encode};
use super::channel::{Channel, DeviceName, EventChannel};
use super::connect::Connecting;
use super::datagram::ConnectingDatagrams;
use super::event::{ConnectError, Event};
use super::kernel::{Command, migration};
use super::listen::ListeningId;
use super::multicast::{JoiningMulticast, MulticastRole};
use super::param::{CmMessage, ConnectParam, to_raw_ece};
use super::qp::{ConnectedQp, check_type, has_srq};
use super::step::{Step, wait};
use crate::context::Context;
use crate::device::Guid;
use crate::error::{Error, Result};
use crate::first_panic::FirstPanic;
use crate::number::open_enum;
use crate::platform::Platform;
use crate::qp::{QpControl, QpState, QpType};
use crate::sync::lock::Lock;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fs;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};
use uverbs_uapi::qp::ib_uverbs_qp_attr;
use uverbs_uapi::rdma_user_cm as uapi;
use uverbs_uapi::rdma_user_cm::{rdma_cm_event_type as Type, rdma_ucm_port_space};
use zerocopy::IntoBytes;

/// An id of the kernel in any state. Dropping it destroys the id, by which the kernel rejects a request,
/// closes a connection or ends a listener.
#[derive(Debug)]
pub(crate) struct IdInner {
    pub(super) channel: Arc<Channel>,
    number: AtomicU32,
    /// The id whose membership in a multicast group this is.
    parent: Option<Arc<IdInner>>,
    pub(super) space: PortSpace,
    /// The type of the queue pairs that the id connects.
    pub(super) qp_type: QpType,
    /// The number by which events name the id.
    pub(super) key: u64,
    queue: Lock<EventQueue>,
    /// Whether another handle destroys the kernel's id.
    moved: AtomicBool,
}

open_enum! {
    /// The port space of an id. The same port may be in use in each space, and both sides are in the same one. The
    /// space decides the type of the queue pair: RC in `TCP`, UD in `UDP` and `IPOIB`; in `IB` the id has a type of
    /// its own.
    ///
    /// Example: [`aio::cm`](crate::aio::cm::AsyncEventChannel::connect_datagrams).
    #[doc(alias = "rdma_port_space")]
    pub struct PortSpace(u16) {
        /// Reliable connections.
        #[doc(alias = "RDMA_PS_TCP")]
        TCP = rdma_ucm_port_space::RDMA_PS_TCP.0, "TCP";
        /// Datagrams.
        #[doc(alias = "RDMA_PS_UDP")]
        UDP = rdma_ucm_port_space::RDMA_PS_UDP.0, "UDP";
        /// Queue pairs of any type, UC and XRC among them:
        /// [`create_id_for`](super::EventChannel::create_id_for).
        #[doc(alias = "RDMA_PS_IB")]
        IB = rdma_ucm_port_space::RDMA_PS_IB.0, "IB";
        /// Datagrams to the multicast groups of IPoIB, with its Q_Key; on InfiniBand only.
        #[doc(alias = "RDMA_PS_IPOIB")]
        IPOIB = rdma_ucm_port_space::RDMA_PS_IPOIB.0, "IPOIB";
    }
}

impl PortSpace {
    /// The space where both sides of a queue pair of this type usually are.
    pub(crate) fn of(qp_type: QpType) -> PortSpace {
        match qp_type {
            QpType::RC => PortSpace::TCP,
            QpType::UD => PortSpace::UDP,
            _ => PortSpace::IB,
        }
    }

    /// The type of queue pair in the space, if it has only one.
    fn qp_type(self) -> Option<QpType> {
        match self {
            PortSpace::TCP => Some(QpType::RC),
            PortSpace::UDP | PortSpace::IPOIB => Some(QpType::UD),
            _ => None,
        }
    }

    /// The type of queue pair of an id for which the program names none.
    pub(super) fn default_qp_type(self) -> QpType {
        self.qp_type().unwrap_or(QpType::RC)
    }
}

/// The events of an id that nobody took yet. Behind a lock, and [modelled](super::model) with the tasks that poll.
///
/// The network decides how many come. So connect requests wait up to the listener's backlog, and of the other events
/// that may come again and again one of each kind; what is left comes once in the life of an id, or is written by the
/// program.
#[derive(Debug, Default)]
struct EventQueue {
    events: VecDeque<Event>,
    /// How many connect requests may wait; 0 for ids that do not listen.
    backlog: usize,
    /// How many connect requests wait.
    requests: usize,
    /// How many connect requests were refused because `backlog` others waited.
    overflows: u64,
    /// The tasks that wait for one, by the numbers of their waits.
    wakers: Vec<(u64, Waker)>,
    /// How many waits were numbered.
    waits: u64,
}

/// The waits of an id that a task keeps up by polling, with no future that would end them: only the task that polled
/// last is woken. Waits of futures have numbers above.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Polled {
    Event,
    End,
}

impl Polled {
    const COUNT: u64 = 2;

    pub(crate) fn number(self) -> Option<u64> {
        Some(self as u64)
    }
}

impl EventQueue {
    /// Adds an event, or returns one that finds no room.
    fn put(&mut self, event: Event) -> std::result::Result<(), Event> {
        if event.request.is_some() {
            if self.requests >= self.backlog {
                self.overflows += 1;
                return Err(event);
            }
            self.requests += 1;
        } else if self.events.iter().any(|waiting| event.repeats(waiting)) {
            return Err(event);
        }
        self.events.push_back(event);
        Ok(())
    }

    /// The next event. That its device goes is the last event of a listener, and stays for all that wait there.
    fn take(&mut self) -> Option<Event> {
        let next = self.events.front()?;
        if self.backlog > 0 && next.kind == Type::RDMA_CM_EVENT_DEVICE_REMOVAL {
            return Some(next.clone());
        }
        self.requests -= usize::from(next.request.is_some());
        self.events.pop_front()
    }

    fn move_wakers(&mut self, to: &mut Waiting) {
        to.0.extend(self.wakers.drain(..).map(|(_, waker)| waker));
    }
}

/// Tasks to be woken. A waker is code of the program, so that none is called under a lock.
#[derive(Debug, Default)]
pub(super) struct Waiting(Vec<Waker>);

impl Waiting {
    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Wakes all of them, also those that come after a waker that panics.
    pub(super) fn wake(self) {
        let mut calls = FirstPanic::default();
        for waker in self.0 {
            calls.catch(|| waker.wake());
        }
        calls.resume();
    }
}

/// A task's wait for events of an id, which ends when this is dropped.
pub(crate) struct EventWait<'a> {
    id: &'a IdInner,
    /// See [`IdInner::poll_event`].
    pub(crate) number: Option<u64>,
}

impl<'a> EventWait<'a> {
    pub(crate) fn new(id: &'a IdInner) -> EventWait<'a> {
        EventWait { id, number: None }
    }
}

impl Drop for EventWait<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.id.end_wait(number);
        }
    }
}

impl IdInner {
    pub(super) fn create(
        channel: &Arc<Channel>,
        space: PortSpace,
        qp_type: QpType,
    ) -> Result<Arc<IdInner>> {
        const VERB: &str = "create_id";
        let known = [QpType::RC, QpType::UC, QpType::UD, QpType::XRC_INI, QpType::XRC_TGT];
        if !known.contains(&qp_type) {
            let detail =
                format!("the connection manager connects no queue pairs of type {qp_type}");
            return Err(Error::invalid(VERB, detail));
        }
        if let Some(only) = space.qp_type().filter(|only| *only != qp_type) {
            let detail = format!(
                "ids in the port space {space} are for queue pairs of type {only}; those of type {qp_type} are \
                 connected in the port space {}",
                PortSpace::of(qp_type)
            );
            return Err(Error::invalid(VERB, detail));
        }
        let key = channel.key();
        // The kernel looks at the type in the port space IB alone; in others it follows from the space.
        let request = uapi::rdma_ucm_create_id {
            uid: key,
            ps: space.0,
            qp_type: qp_type.0 as u8,
            ..Default::default()
        };
        let mut answer = uapi::rdma_ucm_create_id_resp::default();
        channel.execute(VERB, Command::create_id(&request, &mut answer))?;
        let id = IdInner::with_key(channel, answer.id, key, space, qp_type);
        channel.register(VERB, &id)?;
        Ok(id)
    }

    /// The id that the kernel made for a connect request. The kernel reports no events of it before the
    /// request is accepted.
    pub(super) fn adopt(
        channel: &Arc<Channel>,
        number: u32,
        space: PortSpace,
        qp_type: QpType,
    ) -> Arc<IdInner> {
        IdInner::with_key(channel, number, channel.key(), space, qp_type)
    }

    fn with_key(
        channel: &Arc<Channel>,
        number: u32,
        key: u64,
        space: PortSpace,
        qp_type: QpType,
    ) -> Arc<IdInner> {
        Arc::new(IdInner {
            channel: channel.clone(),
            number: AtomicU32::new(number),
            parent: None,
            space,
            qp_type,
            key,
            queue: Lock::default(),
            moved: AtomicBool::new(false),
        })
    }

    /// A membership in a multicast group, which has events and a number of its own. Its events may be read before
    /// the command returns, so that it is registered before it has [`joined`](Self::joined).
    pub(super) fn member(self: &Arc<Self>, verb: &'static str) -> Result<Arc<IdInner>> {
        let member = Arc::new(IdInner {
            channel: self.channel.clone(),
            number: AtomicU32::new(0),
            parent: Some(self.clone()),
            space: self.space,
            qp_type: self.qp_type,
            key: self.channel.key(),
            queue: Lock::default(),
            moved: AtomicBool::new(true),
        });
        self.channel.register(verb, &member)?;
        Ok(member)
    }

    /// Whether this is a membership of the id with this key.
    pub(super) fn is_member_of(&self, key: u64) -> bool {
        self.parent.as_ref().is_some_and(|parent| parent.key == key)
    }

    /// Makes the membership the one with this number of the kernel, which dropping it ends.
    pub(super) fn joined(&self, number: u32) {
        self.number.store(number, Ordering::Relaxed);
        self.moved.store(false, Ordering::Relaxed);
    }

    /// Whether the id exchanges datagrams, and connects nothing.
    pub(super) fn is_datagram(&self) -> bool {
        self.qp_type == QpType::UD
    }

    /// Refuses an id for connections where one for datagrams is needed, and the other way round.
    pub(super) fn check_datagram(&self, verb: &'static str, datagrams: bool) -> Result<()> {
        if self.is_datagram() == datagrams {
            return Ok(());
        }
        let (space, qp_type) = (self.space, self.qp_type);
        let detail = match datagrams {
            true => format!(
                "datagrams need an id for queue pairs of type UD, as those of the port space UDP are; this one, in the \
                 port space {space}, is for type {qp_type}"
            ),
            false => format!(
                "this id, in the port space {space}, is for queue pairs of type UD, which exchange datagrams: see \
                 `connect_datagrams`"
            ),
        };
        Err(Error::invalid(verb, detail))
    }

    /// Has the kernel move the id to another file. Events in the queue would be lost, so this is for ids
    /// in states without events.
    pub(super) fn migrate(&self, to: &Arc<Channel>) -> Result<Arc<IdInner>> {
        const VERB: &str = "migrate_id";
        let id = IdInner::with_key(to, self.number(), self.key, self.space, self.qp_type);
        // An error leaves the kernel's id where it is.
        id.moved.store(true, Ordering::Relaxed);
        let request = migration(self.number(), self.channel.fd());
        let mut answer = uapi::rdma_ucm_migrate_resp::default();
        to.execute(VERB, Command::migrate_id(&request, &mut answer))?;
        self.moved.store(true, Ordering::Relaxed);
        id.moved.store(false, Ordering::Relaxed);
        Ok(id)
    }

    /// The kernel's number of the id.
    pub(super) fn number(&self) -> u32 {
        self.number.load(Ordering::Relaxed)
    }

    /// Queues an event. The tasks that wait for one are added to `waiting`, for the caller to wake. An event that finds
    /// no room comes back: dropping it, which takes another lock, rejects a connect request.
    pub(super) fn receive(&self, event: Event, waiting: &mut Waiting) -> Option<Event> {
        let mut queue = self.queue.lock()?;
        match queue.put(event) {
            Ok(()) => {
                queue.move_wakers(waiting);
                None
            }
            refused => refused.err(),
        }
    }

    /// Lets so many connect requests wait to be taken.
    pub(super) fn set_backlog(&self, backlog: usize) {
        if let Some(mut queue) = self.queue.lock() {
            queue.backlog = backlog;
        }
    }

    /// How many connect requests were refused because the backlog was full.
    pub(super) fn overflows(&self) -> u64 {
        self.queue.lock().map_or(0, |queue| queue.overflows)
    }

    /// Adds the tasks that wait for an event of this id to `waiting`.
    pub(super) fn add_waiting(&self, waiting: &mut Waiting) {
        if let Some(mut queue) = self.queue.lock() {
            queue.move_wakers(waiting);
        }
    }

    /// Wakes the tasks that wait for an event of this id.
    pub(crate) fn wake(&self) {
        let mut waiting = Waiting::default();
        self.add_waiting(&mut waiting);
        waiting.wake();
    }

    pub(super) fn next_event(&self) -> Option<Event> {
        self.queue.lock()?.take()
    }

    /// The next event; if there is none, the task is woken when one arrives. `wait` is the number of the task's
    /// wait, which the first poll chooses.
    pub(crate) fn poll_event(
        &self,
        verb: &'static str,
        wait: &mut Option<u64>,
        cx: &mut std::task::Context<'_>,
    ) -> Poll<Result<Event>> {
        loop {
            if let Some(event) = self.next_event() {
                return Poll::Ready(Ok(event));
            }
            // Wakers are cloned and dropped without the lock, and while no event is held: both may panic.
            let waker = cx.waker().clone();
            let _old;
            let Some(mut queue) = self.queue.lock() else {
                return Poll::Ready(Err(self.channel.forked(verb)));
            };
            if !queue.events.is_empty() {
                continue;
            }
            let number = *wait.get_or_insert_with(|| {
                queue.waits += 1;
                Polled::COUNT + queue.waits
            });
            match queue.wakers.iter_mut().find(|(known, _)| *known == number) {
                Some((_, known)) => _old = std::mem::replace(known, waker),
                None => queue.wakers.push((number, waker)),
            }
            return Poll::Pending;
        }
    }

    /// Forgets the waker of a wait.
    fn end_wait(&self, number: u64) {
        let forgotten = self.queue.lock().and_then(|mut queue| {
            let at = queue.wakers.iter().position(|(known, _)| *known == number)?;
            Some(queue.wakers.swap_remove(at))
        });
        drop(forgotten);
    }

    /// How many tasks wait for an event.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn tasks(&self) -> usize {
        self.queue.lock().map_or(0, |queue| queue.wakers.len())
    }

    pub(super) fn has_event(&self) -> bool {
        self.queue.lock().is_some_and(|queue| !queue.events.is_empty())
    }

    /// Waits for an event of this id until a deadline, without one for ever.
    pub(super) fn wait_until(
        &self,
        verb: &'static str,
        deadline: Option<Instant>,
    ) -> Result<Option<Event>> {
        self.channel.wait(verb, self, deadline)
    }

    pub(super) fn execute(&self, verb: &'static str, command: Command<'_>) -> Result<()> {
        self.channel.execute(verb, command)
    }

    /// Queries the addresses and the device of the id.
    pub(super) fn query(&self, verb: &'static str) -> Result<Path> {
        /// A kernel that does not know the field leaves this in it.
        const NO_INDEX: u32 = u32::MAX;
        let option = uapi::RDMA_USER_CM_QUERY_ADDR;
        let request = uapi::rdma_ucm_query { id: self.number(), option, ..Default::default() };
        let mut answer =
            uapi::rdma_ucm_query_addr_resp { ibdev_index: NO_INDEX, ..Default::default() };
        self.execute(verb, Command::query(&request, &mut answer))?;
        let device = (answer.port_num != 0).then(|| DeviceName {
            index: Some(answer.ibdev_index).filter(|index| *index != NO_INDEX),
            guid: Guid::from_bytes(answer.node_guid.to_ne_bytes()),
        });
        Ok(Path {
            device,
            port: answer.port_num.into(),
            local: decode(&answer.src_addr),
            peer: decode(&answer.dst_addr),
        })
    }

    /// The attributes that bring a queue pair to a state.
    pub(super) fn qp_attr(&self, verb: &'static str, state: QpState) -> Result<ib_uverbs_qp_attr> {
        let request = uapi::rdma_ucm_init_qp_attr {
            id: self.number(),
            qp_state: state.0.into(),
            ..Default::default()
        };
        let mut answer = ib_uverbs_qp_attr::default();
        let command = Command::init_qp_attr(&request, &mut answer);
        self.execute(verb, command).map_err(|error| match error.errno() {
            // The kernel's handshake is over (`ib_cm_init_qp_attr`), of which it told nobody before an accept.
            Errno::INVAL => given_up(error),
            _ => error.context(|| {
                format!("the kernel has no attributes for state {state} of the queue pair")
            }),
        })?;
        Ok(answer)
    }

    /// Sends an accept. The kernel answers `EINVAL` both if the peer gave up and for parameters that it does not take,
    /// and has attributes for a queue pair only if the peer is there.
    pub(super) fn accept(&self, verb: &'static str, request: &uapi::rdma_ucm_accept) -> Result<()> {
        let command = Command::new(uapi::RDMA_USER_CM_CMD_ACCEPT, request);
        self.execute(verb, command).map_err(|error| match error.errno() {
            Errno::INVAL => match self.qp_attr(verb, QpState::RTS) {
                Err(gone) if gone.errno() == Errno::CONNABORTED => given_up(error),
                _ => error.detail("the kernel does not take the parameters of the accept"),
            },
            _ => error.context(|| "the answer to the peer was not sent".to_owned()),
        })
    }

    pub(super) fn set_option(
        &self,
        verb: &'static str,
        level: u32,
        name: u32,
        value: &[u8],
    ) -> Result<()> {
        let request = uapi::rdma_ucm_set_option {
            id: self.number(),
            level,
            optname: name,
            optlen: value.len() as u32,
            ..Default::default()
        };
        self.execute(verb, Command::set_option(&request, value))
    }

    fn bind(&self, address: &SocketAddr) -> Result<()> {
        const VERB: &str = "bind_addr";
        self.bind_raw(VERB, encode(address)).map_err(|error| match error.errno() {
            Errno::INVAL if self.space == PortSpace::IPOIB => error.detail(format!(
                "the port space IPOIB is on InfiniBand only, and {address} is not"
            )),
            _ => explain_bind(error, address, &self.channel.platform),
        })
    }

    pub(super) fn bind_raw(&self, verb: &'static str, address: Encoded) -> Result<()> {
        let (addr, addr_size) = address;
        let request =
            uapi::rdma_ucm_bind { id: self.number(), addr_size, addr, ..Default::default() };
        self.execute(verb, Command::new(uapi::RDMA_USER_CM_CMD_BIND, &request))
    }

    pub(super) fn resolve_raw(
        &self,
        verb: &'static str,
        (src_addr, src_size): Encoded,
        (dst_addr, dst_size): Encoded,
        timeout: Duration,
    ) -> Result<()> {
        let request = uapi::rdma_ucm_resolve_addr {
            id: self.number(),
            timeout_ms: milliseconds(timeout),
            src_size,
            dst_size,
            reserved: 0,
            src_addr,
            dst_addr,
        };
        self.execute(verb, Command::new(uapi::RDMA_USER_CM_CMD_RESOLVE_ADDR, &request))
    }

    fn resolve_addr(
        &self,
        from: Option<&SocketAddr>,
        to: &SocketAddr,
        timeout: Duration,
    ) -> Result<()> {
        const VERB: &str = "resolve_addr";
        if let Some(from) = from.filter(|from| from.is_ipv4() != to.is_ipv4()) {
            let detail = format!("{from} and {to} are addresses of different families");
            return Err(Error::invalid(VERB, detail));
        }
        let source = from.map_or(([0; STORAGE], 0), encode);
        self.resolve_raw(VERB, source, encode(to), timeout).map_err(|error| {
            match (error.errno(), from) {
                (
                    Errno::ADDRINUSE | Errno::ADDRNOTAVAIL | Errno::NODEV | Errno::ACCESS,
                    Some(from),
                ) => explain_bind(error, from, &self.channel.platform),
                (Errno::NODEV, None) => error.detail(no_device(to)),
                (Errno::NETUNREACH | Errno::HOSTUNREACH, _) => {
                    error.detail(format!("the IP routing table has no route to {to}"))
                }
                (_, Some(from)) => {
                    error.context(|| format!("the kernel does not resolve {to} from {from}"))
                }
                (_, None) => error.context(|| format!("the kernel does not resolve {to}")),
            }
        })
    }

    pub(super) fn resolve_route(&self, timeout: Duration) -> Result<()> {
        let request =
            uapi::rdma_ucm_resolve_route { id: self.number(), timeout_ms: milliseconds(timeout) };
        let command = Command::new(uapi::RDMA_USER_CM_CMD_RESOLVE_ROUTE, &request);
        self.execute("resolve_route", command).map_err(|error| match error.errno() {
            Errno::NODEV => match self.query("resolve_route").ok().and_then(|path| path.peer) {
                Some(peer) => error.detail(no_device(&peer)),
                None => error.detail("the path leads through no RDMA device"),
            },
            _ => error.context(|| match self.query("resolve_route").ok() {
                Some(Path { peer: Some(peer), .. }) => format!("no route to {peer} was found"),
                _ => "no route was found".to_owned(),
            }),
        })
    }

    /// The error of a step that waited for another event, with the peer's address if the id has one.
    pub(super) fn failure(&self, verb: &'static str, event: &Event) -> ConnectError {
        let error = event.failure(verb);
        match self.query(verb).ok().and_then(|path| path.peer) {
            Some(peer) if error.errno() == Errno::NODEV && event.is_about_the_way() => {
                error.replace_detail(no_device(&peer))
            }
            Some(peer) => error.to(&peer),
            None => error,
        }
    }

    fn listen(&self, backlog: u32) -> Result<()> {
        const VERB: &str = "listen";
        if self.qp_type == QpType::XRC_INI {
            let detail = "an id for XRC initiators connects; one for XRC targets listens";
            return Err(Error::invalid(VERB, detail));
        }
        // Requests may come before the command returns.
        let most = max_backlog(&self.channel.platform, MAX_BACKLOG);
        self.set_backlog(kept(backlog, most));
        let request = uapi::rdma_ucm_listen { id: self.number(), backlog };
        let command = Command::new(uapi::RDMA_USER_CM_CMD_LISTEN, &request);
        self.execute(VERB, command).map_err(|error| match error.errno() {
            Errno::ADDRINUSE => match local_addr(self) {
                Ok(at) => {
                    error.detail(format!("another listener has port {} of {}", at.port(), at.ip()))
                }
                Err(_) => error.detail("another listener has the port"),
            },
            _ => error.context(|| match local_addr(self) {
                Ok(at) => format!("no listener was made at {at}"),
                Err(_) => "no listener was made".to_owned(),
            }),
        })
    }

    pub(super) fn is_forked(&self) -> bool {
        self.channel.is_forked()
    }
}

impl Drop for IdInner {
    fn drop(&mut self) {
        // In a forked child the id is the parent's.
        if self.is_forked() {
            return;
        }
        self.channel.retire(self.key);
        if *self.moved.get_mut() {
            return;
        }
        let request = uapi::rdma_ucm_destroy_id { id: self.number(), ..Default::default() };
        let mut answer = uapi::rdma_ucm_destroy_id_resp::default();
        let command = match self.parent {
            Some(_) => Command::leave_mcast(&request, &mut answer),
            None => Command::destroy_id(&request, &mut answer),
        };
        match self.channel.run(command) {
            // `ENXIO`: the device of the membership's id is gone, and the membership ends with the id.
            Ok(()) | Err(Errno::NOENT | Errno::NXIO) => {}
            Err(_) => self.channel.count_leak(),
        }
    }
}

/// The setting of [`max_backlog`].
const MAX_BACKLOG: &str = "/proc/sys/net/rdma_ucm/max_backlog";

/// The most connect requests that may wait to be read from a channel, for each listener. Outside of the first network
/// namespace the setting is not to be seen, and holds there, too.
fn max_backlog(platform: &Platform, setting: &str) -> u32 {
    /// The kernel's default, and the constant of a hosted kernel.
    const DEFAULT: u32 = 1024;
    if platform.hosted().is_some() {
        return DEFAULT;
    }
    let text = fs::read_to_string(setting).ok();
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(DEFAULT)
}

/// How many requests a listener keeps: as many as the kernel keeps beside it (`ucma_listen`), and at least one.
fn kept(backlog: u32, most: u32) -> usize {
    let kept = if backlog == 0 { most } else { backlog.min(most) };
    kept.max(1) as usize
}

/// A timeout as the kernel takes it: milliseconds, of which 0 would mean no wait at all.
fn milliseconds(timeout: Duration) -> u32 {
    // The kernel keeps the number in an int.
    let longest = i32::MAX as u32;
    u32::try_from(timeout.as_millis()).unwrap_or(longest).clamp(1, longest)
}

fn explain_bind(error: Error, address: &SocketAddr, platform: &Platform) -> Error {
    let (ip, port) = (address.ip(), address.port());
    match error.errno() {
        // The kernel says so, too, if one of two ids on a port is bound to any address (`cma_check_port`).
        Errno::ADDRNOTAVAIL if !ip.is_unspecified() && !is_of_this_host(address, platform) => {
            error.detail(format!("this host does not have the address {ip}"))
        }
        Errno::ADDRINUSE | Errno::ADDRNOTAVAIL if port == 0 => error
            .meaning(Errno::ADDRINUSE)
            .detail(format!("no port that the kernel may choose is left on {ip}")),
        Errno::ADDRINUSE | Errno::ADDRNOTAVAIL => error.meaning(Errno::ADDRINUSE).detail(format!(
            "port {port} is in use on {ip}; choose another one, or 0 to have the kernel choose"
        )),
        Errno::INVAL if is_unscoped(address) => error.detail(format!(
            "{ip} is of one link only: name its interface, as in SocketAddrV6::set_scope_id. The GID of an \
             InfiniBand port is no IP address; bind_ib takes it"
        )),
        Errno::NODEV => error.detail(format!(
            "the network interface with {ip} belongs to no RDMA device (`rdma link` lists those that \
             do)"
        )),
        _ => explain_privileged(error, port)
            .context(|| format!("the kernel binds no id to {address}")),
    }
}

/// Whether the kernel binds a socket to the address: it does so for those of this host. Asked when an error is to be
/// explained.
fn is_of_this_host(address: &SocketAddr, platform: &Platform) -> bool {
    if let Some(system) = platform.hosted() {
        return system.interfaces().iter().any(|found| found.addresses.contains(&address.ip()));
    }
    let mut any_port = *address;
    any_port.set_port(0);
    // Miri has no network.
    !cfg!(miri) && UdpSocket::bind(any_port).is_ok()
}

/// Why there is no RDMA device on the way to an address.
fn no_device(to: &SocketAddr) -> String {
    let ip = to.ip().to_canonical();
    if ip.is_loopback() || ip.is_unspecified() {
        return format!(
            "{} leads through the loopback interface, which belongs to no RDMA device; connect to the address of an \
             RDMA device of this host (`rdma link` lists them with their network interfaces)",
            to.ip()
        );
    }
    format!(
        "the network interface that leads to {to} belongs to no RDMA device (`rdma link` lists those that do)"
    )
}

/// The error of a step for which the peer is not there any more.
pub(super) fn given_up(error: Error) -> Error {
    error.meaning(Errno::CONNABORTED).detail("the peer gave up or closed the connection meanwhile")
}

/// Whether the address is valid on one link only, and names no interface, which would say which link.
fn is_unscoped(address: &SocketAddr) -> bool {
    matches!(address, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0)
}

/// Why the kernel refuses a port number: the same error means other credentials for other commands.
pub(super) fn explain_privileged(error: Error, port: u16) -> Error {
    match error.errno() {
        Errno::ACCESS if (1..1024).contains(&port) => error
            .detail(format!("port number {port} is below 1024, which needs CAP_NET_BIND_SERVICE")),
        _ => error,
    }
}

/// The device and the addresses of an id.
#[derive(Clone, Copy, Debug)]
pub(super) struct Path {
    /// `None` while the id is on no device.
    pub(super) device: Option<DeviceName>,
    pub(super) port: u32,
    pub(super) local: Option<SocketAddr>,
    pub(super) peer: Option<SocketAddr>,
}

impl Path {
    pub(super) fn device(&self, verb: &'static str) -> Result<DeviceName> {
        self.device.ok_or_else(|| Error::new(verb, Errno::NODEV).detail("the id is on no device"))
    }
}

/// The result of a wait: the id as it was, or in its next state.
///
/// Example: [`Connector`](crate::cm::Connector).
#[derive(Debug)]
#[must_use]
pub enum Progress<P, D> {
    /// No event came in time; the id still waits.
    Pending(P),
    /// The event came, and the id is in its next state.
    Done(D),
}

impl<P, D> Progress<P, D> {
    /// The id in its next state. Drops an id that still waits, which destroys it.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT` if it still waits.
    pub fn done(self) -> Result<D> {
        match self {
            Progress::Done(done) => Ok(done),
            Progress::Pending(_) => {
                Err(Error::new("wait", Errno::TIMEDOUT).detail("no event came in time"))
            }
        }
    }
}

/// An id that is not bound to any address.
///
/// The steps of a connect, one by one. Each wait returns when its step has ended:
///
/// ```no_run
/// # fn f(qp: &uverbs::QueuePair) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use uverbs::cm::{
///     AddrResolved, ConnectParam, Connecting, EventChannel, Id, ResolvingAddr, ResolvingRoute,
///     RouteResolved,
/// };
///
/// let (channel, limit) = (EventChannel::open()?, Duration::from_secs(2));
/// let id: Id = channel.create_id()?;
/// id.set_type_of_service(106)?;
/// id.set_ack_timeout(18)?;
/// let resolving: ResolvingAddr = id.resolve_addr(None, "10.0.0.2:7471".parse()?, limit)?;
/// let resolved: AddrResolved = resolving.wait(None)?.done()?;
/// println!("from {:?} by port {}", resolved.local_addr(), resolved.port());
/// let resolving: ResolvingRoute = resolved.resolve_route(limit)?;
/// let route: RouteResolved = resolving.wait(None)?.done()?;
/// println!("{:?} to {:?} by port {}", route.local_addr(), route.peer_addr(), route.port());
/// route.init_qp(qp)?;
/// let connecting: Connecting = route.connect(qp, &ConnectParam::new())?;
/// let connection = connecting.wait(None)?.done()?;
/// # drop(connection); Ok(()) }
/// ```
///
/// Example: [`Connector`](crate::cm::Connector).
#[doc(alias("rdma_cm_id", "rdma_destroy_id"))]
#[derive(Debug)]
pub struct Id {
    pub(super) id: Arc<IdInner>,
}

impl Id {
    pub(super) fn new(id: Arc<IdInner>) -> Id {
        Id { id }
    }

    /// Sets the type of service; on RoCE v2 this is the field of that name in the IP header.
    ///
    /// # Errors
    ///
    /// None is known.
    #[doc(alias("rdma_set_option", "RDMA_OPTION_ID_TOS"))]
    pub fn set_type_of_service(&self, tos: u8) -> Result<()> {
        self.set("set_type_of_service", uapi::RDMA_OPTION_ID_TOS, &[tos])
    }

    /// Whether other ids that set this, too, may bind the same port. Only one of them can listen.
    ///
    /// # Errors
    ///
    /// None is known.
    #[doc(alias("rdma_set_option", "RDMA_OPTION_ID_REUSEADDR"))]
    pub fn set_reuse_address(&self, reuse: bool) -> Result<()> {
        let value = i32::from(reuse);
        self.set("set_reuse_address", uapi::RDMA_OPTION_ID_REUSEADDR, value.as_bytes())
    }

    /// Whether a listener on `[::]` takes requests by IPv6 only, and not by IPv4.
    ///
    /// # Errors
    ///
    /// None is known.
    #[doc(alias("rdma_set_option", "RDMA_OPTION_ID_AFONLY"))]
    pub fn set_af_only(&self, only: bool) -> Result<()> {
        self.set("set_af_only", uapi::RDMA_OPTION_ID_AFONLY, i32::from(only).as_bytes())
    }

    /// Sets how long the queue pair waits for an acknowledgement: 4.096 µs · 2ⁿ. Unless set, the kernel
    /// derives it from the path.
    ///
    /// # Errors
    ///
    /// `EINVAL` if n is above 31, or the id is for queue pairs that wait for none: UC and UD.
    #[doc(alias("rdma_set_option", "RDMA_OPTION_ID_ACK_TIMEOUT"))]
    pub fn set_ack_timeout(&self, n: u8) -> Result<()> {
        const VERB: &str = "set_ack_timeout";
        if n > 31 {
            let detail = format!("an ack timeout of {n}; it has 5 bits, so that 31 is the maximum");
            return Err(Error::invalid(VERB, detail));
        }
        let waits = [QpType::RC, QpType::XRC_INI];
        if !waits.contains(&self.id.qp_type) {
            let detail =
                format!("queue pairs of type {} wait for no acknowledgement", self.id.qp_type);
            return Err(Error::invalid(VERB, detail));
        }
        self.set(VERB, uapi::RDMA_OPTION_ID_ACK_TIMEOUT, &[n])
    }

    fn set(&self, verb: &'static str, name: u32, value: &[u8]) -> Result<()> {
        self.id.set_option(verb, uapi::RDMA_OPTION_ID, name, value)
    }

    /// Binds the id to an address of this host; with port 0 the kernel chooses one. An unspecified
    /// address (`0.0.0.0`, `[::]`) stands for those of all devices.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `EADDRINUSE` if another id has the port, on this address or on all, `EADDRNOTAVAIL` if
    /// this host does not have the address, `ENODEV` if no RDMA device has it, `EACCES` for a port below 1024 without `CAP_NET_BIND_SERVICE`.
    #[doc(alias = "rdma_bind_addr")]
    pub fn bind(self, address: SocketAddr) -> Result<BoundId> {
        self.id.bind(&address)?;
        Ok(BoundId { id: self.id })
    }

    /// Starts to resolve an address to a device and a neighbour; `from` is the address of this host that
    /// the connection is to come from. `timeout` limits how long the kernel tries.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `EINVAL` for addresses of two families, `ENETUNREACH`
    /// without an IP route, `ENODEV` if the route leads through no RDMA device. The route to 127.0.0.1, `::1`, `0.0.0.0`
    /// and whatever name stands for them leads through none, which the kernel may say only when the
    /// [route](AddrResolved::resolve_route) is resolved.
    #[doc(alias = "rdma_resolve_addr")]
    pub fn resolve_addr(
        self,
        from: Option<SocketAddr>,
        to: SocketAddr,
        timeout: Duration,
    ) -> Result<ResolvingAddr> {
        self.id.resolve_addr(from.as_ref(), &to, timeout)?;
        Ok(ResolvingAddr { id: self.id })
    }

    /// Moves the id to another channel, as for a thread with a channel of its own. Moving it to the channel that
    /// it is on does nothing.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `EACCES` after a change of credentials.
    #[doc(alias = "rdma_migrate_id")]
    pub fn migrate(self, to: &EventChannel) -> Result<Id> {
        if Arc::ptr_eq(&self.id.channel, &to.inner) {
            return Ok(self);
        }
        let id = self.id.migrate(&to.inner)?;
        to.inner.register("migrate_id", &id)?;
        Ok(Id { id })
    }
}

/// An id that has an address of this host.
///
/// An address of this host first, to listen there or to connect from there:
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use uverbs::QpType;
/// use uverbs::cm::{BoundId, EventChannel, Id, PortSpace};
///
/// let channel = EventChannel::open()?;
/// let id = channel.create_id_for(PortSpace::TCP, QpType::RC)?;
/// // Before it is bound: an address that was used lately, and no IPv4 by an IPv6 wildcard.
/// id.set_reuse_address(true)?;
/// id.set_af_only(true)?;
/// // Another channel takes its events.
/// let id: Id = id.migrate(&EventChannel::open()?)?;
/// let bound: BoundId = id.bind("[::]:7471".parse()?)?;
/// println!("bound to {}", bound.local_addr()?);
/// let listening = bound.listen(64)?;
/// while let Some(request) = listening.next_request(Some(Duration::from_secs(1)))? {
///     request.reject(&[])?;
/// }
///
/// let from: BoundId = channel.create_id()?.bind("10.0.0.1:0".parse()?)?;
/// let resolving = from.resolve_addr("10.0.0.2:7471".parse()?, Duration::from_secs(2))?;
/// # drop(resolving); Ok(()) }
/// ```
///
/// Example: [`Connector`](crate::cm::Connector).
#[derive(Debug)]
pub struct BoundId {
    pub(super) id: Arc<IdInner>,
}

impl BoundId {
    /// The address, with the port that the kernel chose if 0 was asked for.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    #[doc(alias = "rdma_get_local_addr")]
    pub fn local_addr(&self) -> Result<SocketAddr> {
        local_addr(&self.id)
    }

    /// Starts to listen. 0, and numbers above the sysctl `net.rdma_ucm.max_backlog`, mean that maximum, usually 1024.
    ///
    /// At most `backlog` connect requests wait to be read from the channel; the kernel drops others, and the peer's
    /// kernel sends them again for a while. A thread that reads the channel, for whatever id, moves the requests to the
    /// listener, where again at most `backlog` of them wait to be taken: further ones are rejected, as by a program
    /// that drops a [`ConnectRequest`], and [counted](ListeningId::overflows). A request whose peer gave up waits,
    /// too, until it is taken.
    ///
    /// An address of the loopback interface, such as 127.0.0.1, can be listened on, but not be connected to: no RDMA
    /// device is there. Listen on the address of an RDMA device, or on `0.0.0.0` or `[::]` for those of all.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `EADDRINUSE` if another id listens on the port; both set
    /// [`set_reuse_address`](Id::set_reuse_address).
    ///
    /// [`ConnectRequest`]: super::ConnectRequest
    #[doc(alias = "rdma_listen")]
    pub fn listen(self, backlog: u32) -> Result<ListeningId> {
        self.id.listen(backlog)?;
        Ok(ListeningId::new(self.id))
    }

    /// The context of the device that has the address; see
    /// [`EventChannel::use_context`](super::EventChannel::use_context).
    ///
    /// # Errors
    ///
    /// `ENODEV` for an unspecified address, which belongs to no device; as [`Context::open`](crate::Context::open).
    pub fn context(&self) -> Result<Context> {
        const VERB: &str = "bind_addr";
        self.id.channel.context(VERB, self.id.query(VERB)?.device(VERB)?)
    }

    /// Starts to join a multicast group by the device that has the id's address, for a queue pair of type UD. A queue
    /// pair in `RESET` or `INIT` is brought to `RTS`, from `RESET` with [`DATAGRAM_QKEY`](super::DATAGRAM_QKEY); past
    /// `INIT` it stays as it is. The id may join any number of groups.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an address that is no multicast address, an id for queue pairs of another type than UD, or a queue
    /// pair of another type than UD, on another device or in `ERR`; `ENODEV` if the
    /// id is bound to an unspecified address; error number 524 for an IPv6 group on RoCE v2, which the kernel does
    /// not join.
    #[doc(alias("rdma_join_multicast", "rdma_join_multicast_ex"))]
    pub fn join_multicast(
        &self,
        qp: &QpControl,
        group: IpAddr,
        role: MulticastRole,
    ) -> Result<JoiningMulticast> {
        const VERB: &str = JoiningMulticast::VERB;
        self.id.check_datagram(VERB, true)?;
        self.id.query(VERB)?.device(VERB)?.check(VERB, qp.context().device())?;
        JoiningMulticast::begin(&self.id, qp, group, role)
    }

    /// As [`Id::resolve_addr`], from the address that the id is bound to.
    ///
    /// # Errors
    ///
    /// As [`Id::resolve_addr`]; `EINVAL` for an id that is bound to an address of another family.
    pub fn resolve_addr(self, to: SocketAddr, timeout: Duration) -> Result<ResolvingAddr> {
        self.id.resolve_addr(None, &to, timeout).map_err(|error| match error.errno() {
            Errno::INVAL => error.detail(format!(
                "the id is bound to an address of another family than that of {to}"
            )),
            // `resolve_addr` has said what it knows.
            _ => error,
        })?;
        Ok(ResolvingAddr { id: self.id })
    }
}

pub(super) fn local_addr(id: &IdInner) -> Result<SocketAddr> {
    const VERB: &str = "get_local_addr";
    id.query(VERB)?.local.ok_or_else(|| no_address(VERB))
}

pub(super) fn peer_addr(id: &IdInner) -> Result<SocketAddr> {
    const VERB: &str = "get_peer_addr";
    id.query(VERB)?.peer.ok_or_else(|| no_address(VERB))
}

pub(super) fn no_address(verb: &'static str) -> Error {
    Error::new(verb, Errno::AFNOSUPPORT)
        .detail("the id has no IP address; `ib_addrs` or `local_ib_addr` tells its GIDs")
}

/// An id whose address is being resolved.
///
/// Example: [`Connector`](crate::cm::Connector).
#[derive(Debug)]
pub struct ResolvingAddr {
    pub(super) id: Arc<IdInner>,
}

impl ResolvingAddr {
    /// Waits until the address is resolved, at most for `timeout`, without one for ever; a timeout of
    /// zero looks once and returns.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `ETIMEDOUT` if no neighbour answered, `ENODEV` if the
    /// address leads through no RDMA device, `EHOSTUNREACH`.
    pub fn wait(self, timeout: Option<Duration>) -> Result<Progress<Self, AddrResolved>> {
        wait(self, timeout)
    }
}

impl Step for ResolvingAddr {
    type Next = AddrResolved;
    type Error = Error;
    const VERB: &'static str = "resolve_addr";

    fn id(&self) -> &IdInner {
        &self.id
    }

    fn advance(self, event: Event) -> Result<AddrResolved> {
        if event.kind != Type::RDMA_CM_EVENT_ADDR_RESOLVED {
            return Err(self.id.failure(Self::VERB, &event).into());
        }
        let path = self.id.query(Self::VERB)?;
        Ok(AddrResolved { id: self.id, path })
    }
}

/// An id whose address is resolved: its device is known.
///
/// Example: [`Connector`](crate::cm::Connector).
#[derive(Debug)]
pub struct AddrResolved {
    pub(super) id: Arc<IdInner>,
    pub(super) path: Path,
}

impl AddrResolved {
    /// The context of the id's device; see
    /// [`EventChannel::use_context`](super::EventChannel::use_context).
    ///
    /// # Errors
    ///
    /// As [`Context::open`](crate::Context::open).
    pub fn context(&self) -> Result<Context> {
        self.id.channel.context("resolve_addr", self.path.device("resolve_addr")?)
    }

    /// The port of the device, counted from 1.
    pub fn port(&self) -> u32 {
        self.path.port
    }

    /// The address of this end.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.path.local
    }

    /// Starts to join a multicast group, as [`BoundId::join_multicast`]. Resolving the group's own address chooses the
    /// device by the IP route to the group.
    ///
    /// ```no_run
    /// # fn f(channel: &uverbs::cm::EventChannel) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::net::{IpAddr, SocketAddr};
    /// use std::time::Duration;
    /// use uverbs::cm::{AddrResolved, MulticastRole, PortSpace};
    /// use uverbs::{Destination, QpType, SendWr};
    ///
    /// let group: IpAddr = "239.1.2.3".parse()?;
    /// let id = channel.create_id_in(PortSpace::UDP)?;
    /// let resolving = id.resolve_addr(None, SocketAddr::new(group, 0), Duration::from_secs(2))?;
    /// let resolved: AddrResolved = resolving.wait(None)?.done()?;
    /// let context = resolved.context()?;
    /// let (pd, cq) = (context.alloc_pd()?, context.cq_builder(16).build()?);
    /// let mut qp = pd.qp_builder(&cq, &cq, QpType::UD).max_inline_data(16).build()?;
    /// let joining = resolved.join_multicast(&qp, group, MulticastRole::SendOnly)?;
    /// let member = joining.wait(None)?.done()?;
    ///
    /// let ah = pd.create_ah(member.address())?;
    /// let to = Destination::new(&ah, member.qpn(), member.qkey());
    /// let mut batch = qp.send_batch()?;
    /// batch.push(SendWr::send(&[]).inline(b"hello, all").to(to))?;
    /// // SAFETY: an inline request names no memory.
    /// unsafe { batch.ring()? };
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`BoundId::join_multicast`].
    #[doc(alias("rdma_join_multicast", "rdma_join_multicast_ex"))]
    pub fn join_multicast(
        &self,
        qp: &QpControl,
        group: IpAddr,
        role: MulticastRole,
    ) -> Result<JoiningMulticast> {
        const VERB: &str = JoiningMulticast::VERB;
        self.id.check_datagram(VERB, true)?;
        self.path.device(VERB)?.check(VERB, qp.context().device())?;
        JoiningMulticast::begin(&self.id, qp, group, role)
    }

    /// Starts to resolve the route, for which the kernel asks the subnet administrator on InfiniBand.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `ENXIO` if the device is gone; `ENODEV` for an address of the loopback interface, which
    /// belongs to no RDMA device; `EAGAIN` on InfiniBand without a subnet manager.
    #[doc(alias = "rdma_resolve_route")]
    pub fn resolve_route(self, timeout: Duration) -> Result<ResolvingRoute> {
        self.id.resolve_route(timeout)?;
        Ok(ResolvingRoute { id: self.id, path: self.path })
    }
}

/// An id whose route is being resolved.
///
/// Example: [`Connector`](crate::cm::Connector).
#[derive(Debug)]
pub struct ResolvingRoute {
    pub(super) id: Arc<IdInner>,
    pub(super) path: Path,
}

impl ResolvingRoute {
    /// Waits until the route is resolved, at most for `timeout`, without one for ever; a timeout of zero
    /// looks once and returns.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `ETIMEDOUT` if the subnet administrator did not answer.
    pub fn wait(self, timeout: Option<Duration>) -> Result<Progress<Self, RouteResolved>> {
        wait(self, timeout)
    }
}

impl Step for ResolvingRoute {
    type Next = RouteResolved;
    type Error = Error;
    const VERB: &'static str = "resolve_route";

    fn id(&self) -> &IdInner {
        &self.id
    }

    fn advance(self, event: Event) -> Result<RouteResolved> {
        if event.kind != Type::RDMA_CM_EVENT_ROUTE_RESOLVED {
            return Err(self.id.failure(Self::VERB, &event).into());
        }
        Ok(RouteResolved { id: self.id, path: self.path })
    }
}

/// An id whose route is resolved: it can connect.
///
/// Example: [`Connector`](crate::cm::Connector).
#[derive(Debug)]
pub struct RouteResolved {
    pub(super) id: Arc<IdInner>,
    path: Path,
}

impl RouteResolved {
    /// The context of the id's device, which the queue pair is to be created on. See
    /// [`EventChannel::use_context`](super::EventChannel::use_context).
    ///
    /// # Errors
    ///
    /// As [`Context::open`](crate::Context::open).
    #[doc(alias = "rdma_create_qp")]
    pub fn context(&self) -> Result<Context> {
        self.id.channel.context("connect", self.path.device("connect")?)
    }

    /// The port of the device, counted from 1.
    pub fn port(&self) -> u32 {
        self.path.port
    }

    /// The address of this end.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.path.local
    }

    /// The address of the other end.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.path.peer
    }

    /// Brings a queue pair to `INIT`, where receives can be posted. Otherwise
    /// [`connect`](Self::connect) does it.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the queue pair is on another device, or past `INIT`.
    #[doc(alias = "rdma_init_qp_attr")]
    pub fn init_qp(&self, qp: &QpControl) -> Result<()> {
        const VERB: &str = "init_qp";
        self.path.device(VERB)?.check(VERB, qp.context().device())?;
        ConnectedQp::of(qp).init(VERB, &self.id)
    }

    /// Sends a connect request for a queue pair in `RESET` or `INIT`; [`Connecting::wait`] brings it to
    /// `RTS` when the peer accepts. Keep the queue pair until then.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `EINVAL` for a queue pair of another type than the id's, on another device or past
    /// `INIT`, too much private data, or a parameter above the device's limit.
    #[doc(alias = "rdma_connect")]
    pub fn connect(self, qp: &QpControl, param: &ConnectParam) -> Result<Connecting> {
        const VERB: &str = "connect";
        self.id.check_datagram(VERB, false)?;
        check_type(VERB, &self.id, qp)?;
        if self.id.qp_type == QpType::XRC_TGT {
            let detail = "an XRC target is connected by its initiator, whose request it accepts";
            return Err(Error::invalid(VERB, detail));
        }
        self.path.device(VERB)?.check(VERB, qp.context().device())?;
        let limits = self.id.channel.limits(VERB, &qp.context())?;
        let message = CmMessage::request(false, self.path.peer.is_some());
        param.check(VERB, message, limits)?;
        self.check_header(VERB, param)?;
        let connected = ConnectedQp::of(qp);
        connected.init_if_reset(VERB, &self.id)?;
        let offered = param.ece.or(connected.ece(VERB)?);
        let depths = param.depths(limits);
        let request = uapi::rdma_ucm_connect {
            conn_param: param.to_raw(qp.qpn(), has_srq(qp), depths),
            id: self.id.number(),
            ece: to_raw_ece(offered),
            ..Default::default()
        };
        self.send_request(VERB, &request)?;
        Ok(Connecting::new(self.id, connected, offered, param.min_rnr_timer))
    }

    fn send_request(&self, verb: &'static str, request: &uapi::rdma_ucm_connect) -> Result<()> {
        let command = Command::new(uapi::RDMA_USER_CM_CMD_CONNECT, request);
        self.id.execute(verb, command).map_err(|error| {
            error.context(|| match self.path.peer {
                Some(peer) => format!("the request to {peer} was not sent"),
                None => "the request was not sent".to_owned(),
            })
        })
    }

    /// Refuses private data that the peer's kernel would take for IP addresses, if the id has none.
    fn check_header(&self, verb: &'static str, param: &ConnectParam) -> Result<()> {
        match self.path.peer {
            Some(_) => Ok(()),
            None => param.check_is_no_header(verb),
        }
    }

    /// Asks the listener for the number and the Q_Key of its queue pair, with an id for queue pairs of type UD. When
    /// it answers, [`ConnectingDatagrams::wait`] brings the queue pair from
    /// `RESET` or `INIT` to `RTS`, from `RESET` with [`DATAGRAM_QKEY`](super::DATAGRAM_QKEY). Past `INIT` it stays as
    /// it is, so that one queue pair may have many peers.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `EINVAL` for a queue pair of another type than UD, on another device or in `ERR`,
    /// too much private data, or an id for queue pairs of another type.
    #[doc(alias = "rdma_connect")]
    pub fn connect_datagrams(
        self,
        qp: &QpControl,
        param: &ConnectParam,
    ) -> Result<ConnectingDatagrams> {
        const VERB: &str = ConnectingDatagrams::VERB;
        self.id.check_datagram(VERB, true)?;
        check_type(VERB, &self.id, qp)?;
        self.path.device(VERB)?.check(VERB, qp.context().device())?;
        let message = CmMessage::request(true, self.path.peer.is_some());
        param.check_datagram(VERB, message)?;
        self.check_header(VERB, param)?;
        let request = uapi::rdma_ucm_connect {
            conn_param: param.to_raw_datagram(qp.qpn()),
            id: self.id.number(),
            ..Default::default()
        };
        self.send_request(VERB, &request)?;
        Ok(ConnectingDatagrams::new(self.id, ConnectedQp::of(qp)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(feature = "sim")]
    #[cfg_attr(miri, ignore = "it makes a file")]
    fn the_setting_of_the_machine_is_not_that_of_a_hosted_kernel() {
        use crate::sim::{Fabric, Mode};
        let setting = std::env::temp_dir().join(format!("max_backlog.{}", std::process::id()));
        fs::write(&setting, "77\n").unwrap();
        let hosted = Platform::from(Fabric::new(1, Mode::Trapped).system());
        let read = [&Platform::LINUX, &hosted].map(|on| max_backlog(on, setting.to_str().unwrap()));
        fs::remove_file(&setting).unwrap();
        assert_eq!(read, [77, 1024]);
        assert_eq!(max_backlog(&Platform::LINUX, setting.to_str().unwrap()), 1024);
    }

    #[test]
    fn timeouts_fit_into_the_kernels_int() {
        assert_eq!(milliseconds(Duration::ZERO), 1);
        assert_eq!(milliseconds(Duration::from_millis(2000)), 2000);
        assert_eq!(milliseconds(Duration::MAX), i32::MAX as u32);
    }

    #[test]
    fn errors_of_bind_say_what_to_do() {
        // For documentation alone, and no host's.
        let address: SocketAddr = "203.0.113.1:80".parse().unwrap();
        for (errno, advice) in [
            (Errno::ADDRINUSE, "port 80 is in use"),
            (Errno::ADDRNOTAVAIL, "does not have the address 203.0.113.1"),
            (Errno::NODEV, "rdma link"),
            (Errno::ACCESS, "CAP_NET_BIND_SERVICE"),
            (Errno::NOMEM, "no id to 203.0.113.1:80"),
        ] {
            let error =
                explain_bind(Error::from_kernel("bind_addr", errno), &address, &Platform::LINUX);
            assert!(error.message().contains(advice), "{error}");
            assert_eq!(error.errno(), errno);
        }
        let errors = ["[fe80::1]:80", "[fe80::1%2]:80"].map(|address| {
            let error = Error::from_kernel("bind_addr", Errno::INVAL);
            explain_bind(error, &address.parse().unwrap(), &Platform::LINUX).message().to_owned()
        });
        assert!(errors[0].contains("fe80::1 is of one link only"), "{errors:?}");
        assert!(!errors[1].contains("of one link"), "{errors:?}");
        let any: SocketAddr = "[::]:80".parse().unwrap();
        let error = explain_bind(
            Error::from_kernel("bind_addr", Errno::ADDRNOTAVAIL),
            &any,
            &Platform::LINUX,
        );
        assert!(error.message().contains("port 80 is in use on ::"), "{error}");
        assert_eq!(error.errno(), Errno::ADDRINUSE);
    }

    /// The kernel has one number for it and for an address that this host does not have.
    #[test]
    #[cfg_attr(miri, ignore = "it binds sockets")]
    fn a_used_port_is_eaddrinuse_whichever_number_the_kernel_has_for_it() {
        for (address, told) in [
            ("127.0.0.1:80", "port 80 is in use on 127.0.0.1"),
            ("0.0.0.0:80", "port 80 is in use on 0.0.0.0"),
            ("127.0.0.1:0", "no port that the kernel may choose is left"),
        ] {
            let error = Error::from_kernel("bind_addr", Errno::ADDRNOTAVAIL);
            let error = explain_bind(error, &address.parse().unwrap(), &Platform::LINUX);
            assert_eq!(error.errno(), Errno::ADDRINUSE, "{error}");
            assert_eq!(error.kernel_errno(), Some(Errno::ADDRNOTAVAIL));
            assert!(error.to_string().contains(told), "{error}");
        }
    }

    #[test]
    fn loopback_addresses_lead_through_no_device() {
        for address in
            ["127.0.0.1:7", "127.9.9.9:7", "[::1]:7", "0.0.0.0:7", "[::]:7", "[::ffff:127.0.0.1]:7"]
        {
            let told = no_device(&address.parse().unwrap());
            assert!(told.contains("leads through the loopback interface"), "{told}");
        }
        let told = no_device(&"10.0.0.1:7".parse().unwrap());
        assert!(told.contains("interface that leads to 10.0.0.1:7"), "{told}");
    }
}
