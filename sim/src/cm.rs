//! The connection manager of the kernel: ids, their events, and the messages between ports.
//!
//! Pairs with `core/cma.c`; [`ucma`] takes the program's commands, [`connection`] is the state machine of a
//! connection. Messages travel between ports of the fabric in order. A message is lost if a port is gone or has
//! no link, or if a test or the seed loses it.

mod address;
pub(crate) mod connection;
mod id;
pub(crate) mod message;
mod path;
mod ucma;

use crate::call::is_capable;
use crate::driver::Driver;
use crate::interface::Interface;
use crate::kernel::guid;
use address::Address;
use connection::{Connection, Output, REJ_CONSUMER_DEFINED, RESPONSE_TIMEOUT, RETRIES, Report};
use id::{Event, Id, IdState, Param, Role};
use message::{Body, Gid, Message, Service, Side, Transport};
use path::Path;
use rustix::io::Errno;
use rustix::thread::CapabilitySet;
use std::collections::{BTreeMap, VecDeque};

/// `RDMA_UDP_QKEY`.
const UDP_QKEY: u32 = 0x0123_4567;
/// `RDMA_PS_UDP`, the port space of datagrams.
const SPACE_UDP: u16 = 0x0111;
/// Reason of a rejection: no id listens.
const REJ_INVALID_SERVICE_ID: u32 = 8;
/// `IB_SIDR_UNSUPPORTED`: no id listens.
const SIDR_UNSUPPORTED: u32 = 1;
/// `IB_SIDR_REJECT`.
const SIDR_REJECT: u32 = 2;

/// An open file of the connection manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CmFileId(pub(crate) u64);

/// The connection manager.
#[derive(Debug, Default)]
pub(crate) struct Manager {
    ids: BTreeMap<u32, Id>,
    next_id: u32,
    next_connection: u32,
    next_port: u16,
    files: BTreeMap<CmFileId, ucma::OpenCmFile>,
    next_file: u64,
    /// Messages on their way.
    in_flight: VecDeque<Message>,
    /// Connections whose ids are gone, until their last message is answered and their TIMEWAIT is over.
    orphans: Vec<Connection>,
    /// When the next timer is due, of all ids and orphans.
    due: Option<u64>,
    /// The number of messages of each device that a test has asked to lose.
    pub(crate) to_lose: BTreeMap<usize, u32>,
}

/// `ENOTSUPP`: the kernel's internal number of an operation that is not supported, which no header for programs has.
const ENOTSUPP: i32 = 524;

/// The ports of the fabric, as the manager sees them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ports<'k>(pub(crate) &'k [Driver]);

impl Ports<'_> {
    /// The interface of a device, and its node GUID.
    fn get(&self, device: usize) -> Result<(&Interface, u64), Errno> {
        let driver = self.0.get(device).ok_or(Errno::NODEV)?;
        Ok((&driver.interface, guid(device)))
    }

    /// The device that has an address, and the index of its GID: of RoCE v2, or of the InfiniBand port.
    pub(crate) fn find(&self, gid: &Gid) -> Option<(usize, usize)> {
        let mut plugged = self.0.iter().enumerate().filter(|(_, driver)| driver.is_plugged());
        plugged.find_map(|(device, driver)| {
            let Interface { addresses, gids, .. } = &driver.interface;
            let index = match driver.infiniband {
                None => gids.iter().rposition(|entry| entry.gid == *gid)?,
                Some(_) => {
                    let is_it =
                        |address: &std::net::IpAddr| Address::new(*address, 0).gid() == *gid;
                    addresses.iter().any(is_it).then_some(0)?
                }
            };
            Some((device, index))
        })
    }

    /// The name of the device that has an address.
    pub(crate) fn name_of(&self, gid: &Gid) -> &str {
        self.find(gid).map_or("nobody", |(device, _)| &self.0[device].name)
    }

    /// Whether messages between two addresses arrive: addresses of one port, or of two ports with a link.
    fn are_joined(&self, from: &Gid, to: &Gid) -> bool {
        match (self.find(from), self.find(to)) {
            (Some((from, _)), Some((to, _))) => {
                let linked = from == to || self.0[from].has_link() && self.0[to].has_link();
                linked && self.share_network(from, to)
            }
            _ => false,
        }
    }

    /// The address from which a device reaches a peer.
    fn source_for(&self, device: usize, to: &Address) -> Option<Address> {
        let (interface, _) = self.get(device).ok()?;
        let same = |address: &&std::net::IpAddr| address.is_ipv4() == to.ip.is_ipv4();
        let link_local = |address: &std::net::IpAddr| Address::new(*address, 0).is_link_local();
        let fits = |address: &&std::net::IpAddr| link_local(address) == to.is_link_local();
        let found = interface.addresses.iter().filter(same).find(fits);
        Some(Address::new(*found.or_else(|| interface.addresses.iter().find(same))?, 0))
    }
}

impl Manager {
    /// Creates an id, of a file.
    fn create(&mut self, file: CmFileId, uid: u64, space: u16, kind: u8) -> u32 {
        let number = self.next_id;
        self.next_id += 1;
        self.ids.insert(number, Id::new(file, uid, space, kind));
        number
    }

    /// The id of a file with a number.
    fn id(&mut self, file: CmFileId, number: u32) -> Result<&mut Id, Errno> {
        match self.ids.get_mut(&number) {
            // As `ucma_get_ctx`.
            Some(id) if id.file == file && id.is_removed => Err(Errno::NXIO),
            Some(id) if id.file == file => Ok(id),
            Some(_) => Err(Errno::INVAL),
            None => Err(Errno::NOENT),
        }
    }

    /// Queues an event at the file of an id. Those of a new connection, which the program has not accepted yet,
    /// are dropped, as `ucma_event_handler` does.
    fn report(&mut self, number: u32, event: Event) {
        let Some(id) = self.ids.get(&number) else { return };
        if id.uid == 0 {
            return;
        }
        let (file, uid) = (id.file, id.uid);
        if let Some(file) = self.files.get_mut(&file) {
            file.queue(number, uid, event);
        }
    }

    /// Sends the messages of a connection, and reports its events at its id.
    fn put_out(&mut self, number: u32, output: Output) {
        self.in_flight.extend(output.messages);
        for report in output.reports {
            self.report_connection(number, report);
        }
    }

    fn report_connection(&mut self, number: u32, report: Report) {
        const TIMED_OUT: i32 = -(Errno::TIMEDOUT.raw_os_error());
        let Some(id) = self.ids.get_mut(&number) else { return };
        let event = match report {
            Report::Response(side) => {
                let ece = side.ece;
                Event { ece, ..Event::new(id::CONNECT_RESPONSE, 0, Param::Conn(side, REP_DATA)) }
            }
            Report::Rejected { reason, private_data } => {
                id.state = IdState::Disconnected;
                let side = Side { private_data, ..Side::default() };
                Event::new(id::REJECTED, reason as i32, Param::Conn(side, REJ_DATA))
            }
            Report::Unreachable => {
                id.state = IdState::Disconnected;
                Event::new(id::UNREACHABLE, TIMED_OUT, Param::None)
            }
            Report::Established => {
                id.state = IdState::Connected;
                Event::new(id::ESTABLISHED, 0, Param::None)
            }
            Report::Disconnected => {
                id.state = IdState::Disconnected;
                Event::new(id::DISCONNECTED, 0, Param::None)
            }
            Report::TimeWaitExit => Event::new(id::TIMEWAIT_EXIT, 0, Param::None),
        };
        self.report(number, event);
    }

    /// Binds an id to an address, with a port of the kernel's choice for port 0.
    fn bind(&mut self, number: u32, at: Address, ports: Ports<'_>) -> Result<(), Errno> {
        let Some(id) = self.ids.get(&number) else { return Err(Errno::NOENT) };
        if id.state != IdState::Idle {
            return Err(Errno::INVAL);
        }
        let device = match at.is_any() || at.is_loopback() {
            true => None,
            false => Some(ports.find(&at.gid()).ok_or(Errno::ADDRNOTAVAIL)?.0),
        };
        if at.port != 0 && at.port < 1024 && !may_bind_privileged() {
            return Err(Errno::ACCESS);
        }
        let (space, reuse) = (id.space, id.reuse);
        // As `cma_check_port`.
        let check = |port: u16| {
            for other in self.ids.values() {
                let bound = other.state != IdState::Idle && other.space == space;
                let local = other.local.filter(|local| local.port == port && bound);
                match local {
                    Some(_) if reuse && other.reuse => {}
                    Some(local) if local.is_any() || at.is_any() => {
                        return Err(Errno::ADDRNOTAVAIL);
                    }
                    Some(local) if local.ip == at.ip => return Err(Errno::ADDRINUSE),
                    _ => {}
                }
            }
            Ok(port)
        };
        let port = match at.port {
            0 => {
                let first = self.next_port.max(32_768);
                let free = (first..=60_999).chain(32_768..first).find(|port| check(*port).is_ok());
                free.ok_or(Errno::ADDRNOTAVAIL)?
            }
            port => check(port)?,
        };
        if at.port == 0 {
            self.next_port = port + 1;
        }
        if let Some(id) = self.ids.get_mut(&number) {
            id.local = Some(Address { port, ..at });
            id.device = device;
            id.state = IdState::Bound;
        }
        Ok(())
    }

    /// Resolves a peer's address: finds the device and the address that it is reached from.
    fn resolve_addr(
        &mut self,
        number: u32,
        from: Option<Address>,
        to: Address,
        ports: Ports<'_>,
    ) -> Result<(), Errno> {
        let Some(id) = self.ids.get(&number) else { return Err(Errno::NOENT) };
        if !matches!(id.state, IdState::Idle | IdState::Bound) {
            return Err(Errno::INVAL);
        }
        if let (IdState::Idle, Some(from)) = (id.state, from) {
            self.bind(number, from, ports)?;
        }
        let Some(id) = self.ids.get(&number) else { return Err(Errno::NOENT) };
        let bound = id.device;
        let over = match to.ip.is_multicast() {
            // The route to a group leads over the device of the id, or else over the first device.
            true => Some(bound.unwrap_or(0)),
            false => ports.find(&to.gid()).and_then(|(peer, _)| match (bound, id.local) {
                (Some(own), _) => ports.share_network(own, peer).then_some(own),
                // On all addresses: the first device that reaches the peer.
                (None, Some(_)) => (0..ports.0.len()).find(|&own| ports.share_network(own, peer)),
                (None, None) => Some(peer),
            }),
        };
        let event = match over {
            None if to.is_any() || to.is_loopback() => return Err(Errno::NODEV),
            None => Event::new(id::ADDR_ERROR, -(Errno::HOSTUNREACH.raw_os_error()), Param::None),
            Some(device) => {
                let source = id.local.filter(|local| !local.is_any() && !local.is_loopback());
                let source = source.or_else(|| {
                    let port = id.local.map_or(0, |local| local.port);
                    Some(Address { port, ..ports.source_for(device, &to)? })
                });
                match source {
                    Some(source) => {
                        if id.state == IdState::Idle || source.port == 0 {
                            if let Some(id) = self.ids.get_mut(&number) {
                                id.state = IdState::Idle;
                            }
                            self.bind(number, source, ports)?;
                        } else if let Some(id) = self.ids.get_mut(&number) {
                            id.local = Some(source);
                        }
                        if let Some(id) = self.ids.get_mut(&number) {
                            id.device = Some(device);
                            id.peer = Some(to);
                            id.state = IdState::AddrResolved;
                        }
                        Event::new(id::ADDR_RESOLVED, 0, Param::None)
                    }
                    None => {
                        Event::new(id::ADDR_ERROR, -(Errno::NETUNREACH.raw_os_error()), Param::None)
                    }
                }
            }
        };
        self.report(number, event);
        Ok(())
    }

    /// Finds the path to the resolved address. On InfiniBand the subnet administrator answers, over the link.
    fn resolve_route(&mut self, number: u32, ports: Ports<'_>) -> Result<(), Errno> {
        let id = self.ids.get_mut(&number).ok_or(Errno::NOENT)?;
        if id.state != IdState::AddrResolved {
            return Err(Errno::INVAL);
        }
        let (from, to) = Self::gids_of(id).ok_or(Errno::INVAL)?;
        if ports.infiniband_of(&from).is_some() && !ports.are_joined(&from, &to) {
            let status = -(Errno::TIMEDOUT.raw_os_error());
            self.report(number, Event::new(id::ROUTE_ERROR, status, Param::None));
            return Ok(());
        }
        let path = ports.path(&from, &to, id.tos);
        self.set_path(number, path);
        Ok(())
    }

    /// Stores the path of the route, and reports it.
    fn set_path(&mut self, number: u32, path: Option<Path>) {
        if let Some(id) = self.ids.get_mut(&number) {
            (id.path, id.state) = (path, IdState::RouteResolved);
        }
        self.report(number, Event::new(id::ROUTE_RESOLVED, 0, Param::None));
    }

    fn listen(&mut self, number: u32, backlog: u32) -> Result<(), Errno> {
        let id = self.ids.get_mut(&number).ok_or(Errno::NOENT)?;
        match id.state {
            // As `rdma_listen`, which binds to any address.
            IdState::Idle => {
                let any = Address::new(std::net::Ipv4Addr::UNSPECIFIED.into(), 0);
                self.bind(number, any, Ports(&[]))?;
            }
            IdState::Bound => {}
            _ => return Err(Errno::INVAL),
        }
        let id = self.ids.get_mut(&number).ok_or(Errno::NOENT)?;
        const MAX_BACKLOG: u32 = 1024;
        let backlog = if backlog == 0 || backlog > MAX_BACKLOG { MAX_BACKLOG } else { backlog };
        id.role = Role::Listener { room: backlog };
        id.state = IdState::Listening;
        Ok(())
    }

    fn gids_of(id: &Id) -> Option<(Gid, Gid)> {
        Some((id.local?.gid(), id.peer?.gid()))
    }

    fn connect(&mut self, now: u64, number: u32, side: Side) -> Result<(), Errno> {
        let connection = self.new_connection();
        let id = self.ids.get_mut(&number).ok_or(Errno::NOENT)?;
        if id.state != IdState::RouteResolved {
            return Err(Errno::INVAL);
        }
        let (from, to) = Self::gids_of(id).ok_or(Errno::INVAL)?;
        let (local, peer) = (id.local.ok_or(Errno::INVAL)?, id.peer.ok_or(Errno::INVAL)?);
        let service = Service { space: id.space, port: peer.port, source_port: local.port };
        id.state = IdState::Connecting;
        if id.is_datagram() {
            let private_data = side.private_data;
            let body = Body::SidrReq { service, private_data };
            let message = Message { from, to, local: connection, remote: 0, body };
            let due = now + RESPONSE_TIMEOUT;
            id.role = Role::Asking { message: message.clone(), left: RETRIES, due };
            self.in_flight.push_back(message);
            return Ok(());
        }
        let mut active = Connection::new(connection, from, to, id.transport());
        let output = active.connect(now, service, side);
        id.role = Role::Connected(active);
        self.put_out(number, output);
        Ok(())
    }

    fn new_connection(&mut self) -> u32 {
        self.next_connection += 1;
        self.next_connection
    }

    /// Accepts a request, with `side`; without it confirms a reply.
    fn accept(
        &mut self,
        now: u64,
        number: u32,
        uid: u64,
        side: Option<(Side, u32)>,
    ) -> Result<(), Errno> {
        let id = self.ids.get_mut(&number).ok_or(Errno::NOENT)?;
        let output = match (&mut id.role, side) {
            (Role::Connected(connection), Some((side, _))) => {
                let output = connection.accept(now, side).ok_or(Errno::INVAL)?;
                id.uid = uid;
                output
            }
            (Role::Connected(connection), None) => {
                let output = connection.confirm().ok_or(Errno::INVAL)?;
                id.state = IdState::Connected;
                output
            }
            (Role::Asked { request }, Some((side, qkey))) => {
                let qkey = if qkey == 0 { UDP_QKEY } else { qkey };
                let message = request.reply(Body::SidrRep {
                    status: 0,
                    qpn: side.qpn,
                    qkey,
                    ece: side.ece,
                    private_data: side.private_data,
                });
                id.uid = uid;
                id.state = IdState::Connected;
                Output { messages: vec![message], ..Output::default() }
            }
            _ => return Err(Errno::INVAL),
        };
        self.put_out(number, output);
        Ok(())
    }

    fn reject(&mut self, number: u32, reason: u32, data: Vec<u8>) -> Result<(), Errno> {
        let id = self.ids.get_mut(&number).ok_or(Errno::NOENT)?;
        let output = match &mut id.role {
            Role::Connected(connection) => connection.reject(reason, data).ok_or(Errno::INVAL)?,
            Role::Asked { request } => sidr_refusal(request, data),
            _ => return Err(Errno::INVAL),
        };
        id.state = IdState::Disconnected;
        self.put_out(number, output);
        Ok(())
    }

    fn disconnect(&mut self, now: u64, number: u32) -> Result<(), Errno> {
        let id = self.ids.get_mut(&number).ok_or(Errno::NOENT)?;
        let output = match &mut id.role {
            Role::Connected(connection) => connection.disconnect(now).ok_or(Errno::INVAL)?,
            _ => return Err(Errno::INVAL),
        };
        self.put_out(number, output);
        Ok(())
    }

    /// Destroys an id: closes its connection, and rejects the requests that wait at it. Returns how many of its events
    /// the program has read.
    fn destroy(&mut self, now: u64, number: u32) -> u32 {
        let Some(id) = self.ids.remove(&number) else { return 0 };
        if let Some(file) = self.files.get_mut(&id.file) {
            file.forget(number);
        }
        match id.role {
            Role::Connected(mut connection) => {
                let output = connection.destroy(now);
                self.in_flight.extend(output.messages);
                if connection.deadline().is_some() {
                    self.orphans.push(connection);
                }
            }
            Role::Asked { request } if id.state != IdState::Connected => {
                self.in_flight.extend(sidr_refusal(&request, Vec::new()).messages);
            }
            Role::Listener { .. } => {
                // Requests that the program did not see.
                for waiting in self.children_of(number) {
                    self.destroy(now, waiting);
                }
            }
            _ => {}
        }
        id.read
    }

    /// Tells the ids of a device that it is gone, and ends their connections: `cma_remove_one`.
    pub(crate) fn remove_device(&mut self, device: usize) {
        let of = |id: &Id| id.device == Some(device);
        let ids = self.ids.iter().filter(|(_, id)| of(id)).map(|(number, _)| *number);
        for number in ids.collect::<Vec<u32>>() {
            if let Some(id) = self.ids.get_mut(&number) {
                id.state = IdState::Disconnected;
                id.role = Role::None;
                id.is_removed = true;
            }
            self.report(number, Event::new(id::DEVICE_REMOVAL, 0, Param::None));
        }
        self.find_due();
    }

    /// The ids of requests whose events the program has not read.
    fn children_of(&self, listener: u32) -> Vec<u32> {
        let waits = |id: &Id| id.parent == Some(listener) && id.unseen;
        self.ids.iter().filter(|(_, id)| waits(id)).map(|(number, _)| *number).collect()
    }

    /// Whether [`run`](Self::run) would do anything.
    pub(crate) fn has_work(&self, now: u64) -> bool {
        !self.in_flight.is_empty() || self.due.is_some_and(|due| due <= now)
    }

    /// Delivers messages and runs timers; returns whether there were any. `loses` decides whether a message is lost;
    /// its second argument tells whether a test has asked for that.
    pub(crate) fn run(
        &mut self,
        now: u64,
        ports: Ports<'_>,
        mut loses: impl FnMut(&Message, bool) -> bool,
    ) -> bool {
        let mut worked = false;
        for number in self.due(now) {
            worked = true;
            self.run_timer(now, number);
        }
        let mut orphans = std::mem::take(&mut self.orphans);
        for orphan in &mut orphans {
            self.in_flight.extend(orphan.timeout(now).messages);
        }
        orphans.retain(|orphan| orphan.deadline().is_some());
        self.orphans = orphans;
        while let Some(message) = self.in_flight.pop_front() {
            worked = true;
            let lost = loses(&message, self.is_to_lose(&message.from, ports));
            if !lost && ports.are_joined(&message.from, &message.to) {
                self.deliver(now, &message, ports);
            }
        }
        self.find_due();
        worked
    }

    /// Whether a test has asked to lose the next message of the device with an address.
    fn is_to_lose(&mut self, from: &Gid, ports: Ports<'_>) -> bool {
        let device = ports.find(from).map(|(device, _)| device);
        let left = device.and_then(|device| self.to_lose.get_mut(&device));
        let Some(left) = left.filter(|left| **left > 0) else { return false };
        *left -= 1;
        true
    }

    fn due(&self, now: u64) -> Vec<u32> {
        let is_due = |id: &Id| id.deadline().is_some_and(|due| due <= now);
        self.ids.iter().filter(|(_, id)| is_due(id)).map(|(number, _)| *number).collect()
    }

    fn run_timer(&mut self, now: u64, number: u32) {
        let Some(id) = self.ids.get_mut(&number) else { return };
        match &mut id.role {
            Role::Connected(connection) => {
                let output = connection.timeout(now);
                self.put_out(number, output);
            }
            Role::Asking { message, left, due } if *left > 0 => {
                (*left, *due) = (*left - 1, now + RESPONSE_TIMEOUT);
                self.in_flight.push_back(message.clone());
            }
            Role::Asking { .. } => {
                id.role = Role::None;
                self.report_connection(number, Report::Unreachable);
            }
            _ => {}
        }
    }

    /// When the next timer is due.
    pub(crate) fn deadline(&self) -> Option<u64> {
        self.due
    }

    /// Stores when the next timer is due, after a command or a run: doorbells read it much more often.
    fn find_due(&mut self) {
        let ids = self.ids.values().filter_map(Id::deadline);
        self.due = ids.chain(self.orphans.iter().filter_map(Connection::deadline)).min();
    }

    fn deliver(&mut self, now: u64, message: &Message, ports: Ports<'_>) {
        match &message.body {
            Body::Req { service, kind, side } => {
                self.request(message, *service, *kind, side, ports);
            }
            Body::SidrReq { service, private_data } => {
                self.sidr_request(message, *service, private_data, ports);
            }
            Body::SidrRep { .. } => self.sidr_reply(message, ports),
            _ => self.deliver_to_connection(now, message),
        }
    }

    fn deliver_to_connection(&mut self, now: u64, message: &Message) {
        // A requester that gives up does not know the peer's number, as `cm_acquire_rejected_id` says.
        let gives_up = matches!(message.body, Body::Rej { .. }) && message.remote == 0;
        let of = |connection: &Connection| match gives_up {
            true => connection.remote == message.local && connection.to == message.from,
            false => connection.local == message.remote && connection.from == message.to,
        };
        let found = self.ids.iter().find(|(_, id)| id.connection().is_some_and(of));
        if let Some(number) = found.map(|(number, _)| *number) {
            let connection = self.ids.get_mut(&number).and_then(Id::connection_mut);
            if let Some(output) = connection.map(|connection| connection.handle(now, message)) {
                self.put_out(number, output);
            }
            return;
        }
        if let Some(orphan) = self.orphans.iter_mut().find(|orphan| of(orphan)) {
            self.in_flight.extend(orphan.handle(now, message).messages);
            return;
        }
        // As `cm_issue_drep`: an unknown connection has ended.
        if message.body == Body::Dreq {
            self.in_flight.push_back(message.reply(Body::Drep));
        }
    }

    /// The listener for a service at an address.
    fn listener(&self, service: Service, at: &Gid) -> Option<u32> {
        let hears = |id: &Id| {
            let local = id.local.filter(|_| id.state == IdState::Listening);
            id.space == service.space
                && local.is_some_and(|local| {
                    local.port == service.port
                        && (local.hears_all(at, id.family_alone) || local.gid() == *at)
                })
        };
        self.ids.iter().find(|(_, id)| hears(id)).map(|(number, _)| *number)
    }

    /// Whether an id listens for a service on a device, at any address: `ib_cm` knows devices, and `rdma_cm` addresses.
    fn is_heard(&self, service: Service, at: Option<(usize, usize)>) -> bool {
        let device = at.map(|(device, _)| device);
        self.ids.values().any(|id| {
            id.state == IdState::Listening
                && id.space == service.space
                && id.local.is_some_and(|local| local.port == service.port)
                && (id.device.is_none() || id.device == device)
        })
    }

    /// Makes the id of a request; `None` if the listener takes no more.
    fn make_child(
        &mut self,
        listener: u32,
        message: &Message,
        service: Service,
        ports: Ports<'_>,
        role: Role,
    ) -> Option<u32> {
        let parent = self.ids.get_mut(&listener)?;
        let Role::Listener { room } = &mut parent.role else { return None };
        *room = room.checked_sub(1)?;
        let (file, space, kind) = (parent.file, parent.space, parent.kind);
        let number = self.create(file, 0, space, kind);
        let child = self.ids.get_mut(&number)?;
        child.local = Some(Address::of_gid(&message.to, service.port));
        child.peer = Some(Address::of_gid(&message.from, service.source_port));
        child.device = ports.find(&message.to).map(|(device, _)| device);
        // As `cma_ib_new_conn_id`; a request for a datagram service has no path.
        if matches!(role, Role::Connected(_)) {
            child.path = ports.path(&message.to, &message.from, 0);
        }
        child.state = IdState::Connecting;
        (child.parent, child.unseen) = (Some(listener), true);
        child.role = role;
        Some(number)
    }

    /// Reports a request at its listener.
    fn tell_listener(&mut self, listener: u32, child: u32, mut event: Event) {
        event.new_id = Some(child);
        self.report(listener, event);
    }

    fn request(
        &mut self,
        message: &Message,
        service: Service,
        kind: Transport,
        side: &Side,
        ports: Ports<'_>,
    ) {
        let again = |id: &Id| {
            let of = |connection: &Connection| {
                connection.remote == message.local && connection.to == message.from
            };
            id.connection().is_some_and(of)
        };
        if self.ids.values().any(again) {
            // A duplicate; the answer to the first is on its way.
            return;
        }
        let refuse = |reason: u32| message.reply(Body::Rej { reason, private_data: Vec::new() });
        let Some(listener) = self.listener(service, &message.to) else {
            let reason = match self.is_heard(service, ports.find(&message.to)) {
                true => REJ_CONSUMER_DEFINED,
                false => REJ_INVALID_SERVICE_ID,
            };
            return self.in_flight.push_back(refuse(reason));
        };
        // As `cma_ib_check_req_qp_type`.
        if self.ids.get(&listener).is_some_and(|listener| listener.transport() != kind) {
            return self.in_flight.push_back(refuse(REJ_CONSUMER_DEFINED));
        }
        let local = self.new_connection();
        let passive = Connection::requested(local, message, kind, side);
        let role = Role::Connected(passive);
        match self.make_child(listener, message, service, ports, role) {
            Some(child) => {
                let param = Param::Conn(side.mirrored(), REQ_DATA);
                let event = Event::new(id::CONNECT_REQUEST, 0, param);
                self.tell_listener(listener, child, Event { ece: side.ece, ..event });
            }
            None => self.in_flight.push_back(refuse(REJ_CONSUMER_DEFINED)),
        }
    }

    fn sidr_request(&mut self, message: &Message, service: Service, data: &[u8], ports: Ports<'_>) {
        let again = |id: &Id| match &id.role {
            Role::Asked { request } => {
                request.local == message.local && request.from == message.from
            }
            _ => false,
        };
        if self.ids.values().any(again) {
            return;
        }
        let Some(listener) = self.listener(service, &message.to) else {
            let refusal = sidr_answer(message, SIDR_UNSUPPORTED, Vec::new());
            return self.in_flight.push_back(refusal);
        };
        let role = Role::Asked { request: message.clone() };
        match self.make_child(listener, message, service, ports, role) {
            Some(child) => {
                let param = Param::Ud {
                    vector: None,
                    qpn: 0,
                    qkey: 0,
                    data: data.to_vec(),
                    room: SIDR_REQ_DATA,
                };
                let event = Event::new(id::CONNECT_REQUEST, 0, param);
                self.tell_listener(listener, child, event);
            }
            None => self.in_flight.push_back(sidr_answer(message, SIDR_REJECT, Vec::new())),
        }
    }

    fn sidr_reply(&mut self, message: &Message, ports: Ports<'_>) {
        let Body::SidrRep { status, qpn, qkey, ece, private_data } = &message.body else { return };
        let of = |id: &Id| match &id.role {
            Role::Asking { message: asked, .. } => {
                asked.local == message.remote && asked.from == message.to
            }
            _ => false,
        };
        let found = self.ids.iter().find(|(_, id)| of(id)).map(|(number, _)| *number);
        let Some(number) = found else { return };
        let Some(id) = self.ids.get_mut(&number) else { return };
        id.role = Role::None;
        if *status != 0 {
            id.state = IdState::Disconnected;
            let event = Event::new(id::UNREACHABLE, *status as i32, Param::None);
            return self.report(number, event);
        }
        id.state = IdState::Connected;
        let source = ports.find(&message.to).map(|(_, index)| index);
        let param = Param::Ud {
            vector: source.map(|index| ports.vector_to(&message.from, index, 0)),
            qpn: *qpn,
            qkey: *qkey,
            data: private_data.clone(),
            room: SIDR_REP_DATA,
        };
        self.report(number, Event { ece: *ece, ..Event::new(id::ESTABLISHED, 0, param) });
    }

    /// Joins a multicast group: on RoCE without a subnet administrator.
    fn join(
        &mut self,
        number: u32,
        file: CmFileId,
        uid: u64,
        group: Address,
        ports: Ports<'_>,
    ) -> Result<u32, Errno> {
        let id = self.ids.get(&number).ok_or(Errno::NOENT)?;
        let device = id.device.ok_or(Errno::INVAL)?;
        if id.kind != id::UD {
            return Err(Errno::INVAL);
        }
        let space = id.space;
        // As `cma_iboe_join_multicast`: over RoCE v2 an IPv6 group is not supported.
        if group.ip.is_ipv6() {
            return Err(Errno::from_raw_os_error(ENOTSUPP));
        }
        let (interface, _) = ports.get(device)?;
        let event = match &ports.0[device].infiniband {
            // The subnet administrator of the fabric keeps no groups.
            Some(_) => {
                let status = -(Errno::TIMEDOUT.raw_os_error());
                Event::new(id::MULTICAST_ERROR, status, Param::None)
            }
            None => {
                let same = |gid: &Gid| Address::of_gid(gid, 0).ip.is_ipv4() == group.ip.is_ipv4();
                let index = interface.gids.iter().rposition(|entry| same(&entry.gid));
                let index = index.ok_or(Errno::NODEV)?;
                let param = Param::Ud {
                    vector: Some(ports.vector_to(&group.gid(), index, 0)),
                    qpn: 0xff_ffff,
                    qkey: if space == SPACE_UDP { UDP_QKEY } else { 0 },
                    data: Vec::new(),
                    room: 0,
                };
                Event::new(id::MULTICAST_JOIN, 0, param)
            }
        };
        let member = self.create(file, uid, space, id::UD);
        self.ids.entry(member).and_modify(|id| id.role = Role::Member { of: number });
        self.report(member, event);
        Ok(member)
    }

    /// The number of ids on a device.
    pub(crate) fn count_on(&self, device: usize) -> usize {
        self.ids.values().filter(|id| id.device == Some(device)).count()
    }
}

/// Bytes of private data that each message has room for, beside the addresses.
const REQ_DATA: usize = 56;
const REP_DATA: usize = 196;
const REJ_DATA: usize = 148;
const SIDR_REQ_DATA: usize = 180;
const SIDR_REP_DATA: usize = 136;

fn sidr_answer(request: &Message, status: u32, private_data: Vec<u8>) -> Message {
    let ece = message::Ece::default();
    request.reply(Body::SidrRep { status, qpn: 0, qkey: 0, ece, private_data })
}

fn sidr_refusal(request: &Message, private_data: Vec<u8>) -> Output {
    let message = sidr_answer(request, SIDR_REJECT, private_data);
    Output { messages: vec![message], ..Output::default() }
}

/// Whether the process may bind ports below 1024.
fn may_bind_privileged() -> bool {
    is_capable(CapabilitySet::NET_BIND_SERVICE)
}
