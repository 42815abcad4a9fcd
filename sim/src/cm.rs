//! The connection manager of the kernel: ids, their events, and the messages between ports.
//!
//! Pairs with `core/cma.c`; [`ucma`] takes the program's commands, [`connections`] are the connections by number, and
//! [`connection`] is the state machine of one. Messages travel between ports of the fabric in order. A message is lost
//! if a port is gone or has no link, or if a test or the seed loses it. One to an address outside of the fabric leaves
//! as a MAD, if the device has a way out: [`wire`].

mod address;
pub(crate) mod connection;
mod connections;
mod id;
pub(crate) mod message;
mod path;
#[cfg(test)]
mod tests;
mod ucma;
pub(crate) mod wire;

use crate::call::is_capable;
use crate::driver::Driver;
use crate::interface::Interface;
use crate::kernel::guid;
use address::Address;
use connection::{Connection, REJ_CONSUMER_DEFINED, Report};
use connections::{Connections, SIDR_REJECT};
use id::{Event, Id, IdState, Param, Role};
use message::{Body, Gid, Message, Service, Side};
use path::Path;
use rustix::io::Errno;
use rustix::thread::CapabilitySet;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// `RDMA_UDP_QKEY`.
const UDP_QKEY: u32 = 0x0123_4567;
/// `RDMA_PS_UDP`, the port space of datagrams.
const SPACE_UDP: u16 = 0x0111;
/// Reason of a rejection: no id listens.
const REJ_INVALID_SERVICE_ID: u32 = 8;
/// `IB_SIDR_UNSUPPORTED`: no id listens.
const SIDR_UNSUPPORTED: u32 = 1;

/// The ports of the manager's choice.
const FIRST_PORT: u16 = 32_768;
const LAST_PORT: u16 = 60_999;

/// An open file of the connection manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CmFileId(pub(crate) u64);

/// The connection manager.
#[derive(Debug, Default)]
pub(crate) struct Manager {
    ids: BTreeMap<u32, Id>,
    next_id: u32,
    next_port: u16,
    files: BTreeMap<CmFileId, ucma::OpenCmFile>,
    next_file: u64,
    connections: Connections,
    /// The id of each connection and query.
    owners: BTreeMap<u32, u32>,
    /// Messages to addresses outside of the fabric.
    outgoing: Vec<wire::Outgoing>,
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
                    let is_it = |address: &IpAddr| Address::new(*address, 0).gid() == *gid;
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

    /// Whether packets get from a device to an address: one of a device in its network, or one outside of the fabric.
    fn reaches(&self, own: usize, to: &Address) -> bool {
        match self.find(&to.gid()) {
            Some((peer, _)) => self.share_network(own, peer),
            None => self.leads_out(own) && !to.is_any() && self.source_for(own, to).is_some(),
        }
    }

    /// Whether a device reaches addresses outside of the fabric.
    fn leads_out(&self, device: usize) -> bool {
        self.0.get(device).is_some_and(|driver| driver.is_plugged() && driver.is_exposed())
    }

    /// The address from which a device reaches a peer.
    fn source_for(&self, device: usize, to: &Address) -> Option<Address> {
        let (interface, _) = self.get(device).ok()?;
        let same = |address: &&IpAddr| address.is_ipv4() == to.ip.is_ipv4();
        let link_local = |address: &IpAddr| Address::new(*address, 0).is_link_local();
        let fits = |address: &&IpAddr| link_local(address) == to.is_link_local();
        let found = interface.addresses.iter().filter(same).find(fits);
        Some(Address::new(*found.or_else(|| interface.addresses.iter().find(same))?, 0))
    }
}

impl Manager {
    /// Draws numbers of connections, first PSNs and the first port, which peers outside of the process may not guess.
    pub(crate) fn be_random(&mut self, random: fn() -> u64) {
        self.connections.random = Some(random);
        self.next_port = FIRST_PORT + random() as u16 % (LAST_PORT - FIRST_PORT);
    }

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

    /// Gives an id its connection or query.
    fn give(&mut self, number: u32, connection: u32) {
        if let Some(id) = self.ids.get_mut(&number) {
            id.role = Role::Connected(connection);
            self.owners.insert(connection, number);
        }
    }

    /// The connection of an id.
    fn connection_of(&self, id: &Id) -> Option<&Connection> {
        self.connections.get(id.number()?)
    }

    /// The id of a file, and the number of its connection or query.
    fn numbered(&mut self, number: u32) -> Result<(&mut Id, u32), Errno> {
        let id = self.ids.get_mut(&number).ok_or(Errno::NOENT)?;
        let connection = id.number().ok_or(Errno::INVAL)?;
        Ok((id, connection))
    }

    /// Passes events of connections on to their ids, and requests of peers to their listeners.
    fn dispatch(&mut self, ports: Ports<'_>) {
        while let Some((connection, report)) = self.connections.next_report() {
            match (report, self.owners.get(&connection).copied()) {
                (Report::Requested(message), _) => self.requested(connection, &message, ports),
                (Report::Answered(message), Some(id)) => self.answered(id, &message, ports),
                (report, Some(id)) => self.report_connection(id, report),
                (_, None) => {}
            }
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
            Report::Requested(_) | Report::Answered(_) => return,
        };
        self.report(number, event);
    }

    /// Binds an id to an address, with a port of the kernel's choice for port 0.
    fn bind(&mut self, number: u32, at: Address, ports: Ports<'_>) -> Result<(), Errno> {
        let Some(id) = self.ids.get(&number) else { return Err(Errno::NOENT) };
        if id.state != IdState::Idle {
            return Err(Errno::INVAL);
        }
        let device = match ports.find(&at.gid()) {
            Some((device, _)) => Some(device),
            None if at.is_any() || at.is_loopback() => None,
            None => return Err(Errno::ADDRNOTAVAIL),
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
                let first = self.next_port.max(FIRST_PORT);
                let mut ports = (first..=LAST_PORT).chain(FIRST_PORT..first);
                let free = ports.find(|port| check(*port).is_ok());
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
            false => match (bound, id.local, ports.find(&to.gid())) {
                (Some(own), ..) => ports.reaches(own, &to).then_some(own),
                (None, None, Some((peer, _))) => Some(peer),
                // On all addresses, or to one outside: the first device that reaches the peer.
                (None, ..) => (0..ports.0.len()).find(|&own| ports.reaches(own, &to)),
            },
        };
        let event = match over {
            None if to.is_any() || to.is_loopback() => return Err(Errno::NODEV),
            None => Event::new(id::ADDR_ERROR, -(Errno::HOSTUNREACH.raw_os_error()), Param::None),
            Some(device) => {
                let is_address = |local: &Address| match local.is_loopback() {
                    true => ports.find(&local.gid()).is_some(),
                    false => !local.is_any(),
                };
                let source = id.local.filter(is_address);
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
        let id = self.ids.get_mut(&number).ok_or(Errno::NOENT)?;
        if id.state != IdState::RouteResolved {
            return Err(Errno::INVAL);
        }
        let ends = Self::gids_of(id).ok_or(Errno::INVAL)?;
        let (local, peer) = (id.local.ok_or(Errno::INVAL)?, id.peer.ok_or(Errno::INVAL)?);
        let service = Service { space: id.space, port: peer.port, source_port: local.port };
        let most = if id.is_datagram() { SIDR_REQ_DATA } else { REQ_DATA };
        check_fits(&side.private_data, most)?;
        id.state = IdState::Connecting;
        let connection = match id.is_datagram() {
            true => self.connections.query(now, ends, service, side.private_data),
            false => {
                let path = (id.path.map_or(0, |path| path.mtu()), id.tos);
                self.connections.connect(now, ends, id.transport(), service, side, path)
            }
        };
        self.give(number, connection);
        Ok(())
    }

    /// Accepts a request, with `side`; without it confirms a reply.
    fn accept(
        &mut self,
        now: u64,
        number: u32,
        uid: u64,
        side: Option<(Side, u32)>,
    ) -> Result<(), Errno> {
        let (id, connection) = self.numbered(number)?;
        let is_datagram = id.is_datagram();
        let is_request = side.is_some();
        if let Some((side, _)) = &side {
            let most = if is_datagram { SIDR_REP_DATA } else { REP_DATA };
            if let Err(errno) = check_fits(&side.private_data, most) {
                // As `rdma_accept` does when the reply cannot be sent.
                self.reject(number, REJ_CONSUMER_DEFINED, Vec::new())?;
                return Err(errno);
            }
        }
        let done = match side {
            None => self.connections.confirm(connection),
            Some((mut side, qkey)) if is_datagram => {
                let qkey = if qkey == 0 { UDP_QKEY } else { qkey };
                let data = std::mem::take(&mut side.private_data);
                self.connections.answer(connection, 0, side, qkey, data)
            }
            Some((side, _)) => self.connections.accept(now, connection, side),
        };
        done.ok_or(Errno::INVAL)?;
        let (id, _) = self.numbered(number)?;
        if is_request {
            id.uid = uid;
        }
        if is_datagram || !is_request {
            id.state = IdState::Connected;
        }
        Ok(())
    }

    fn reject(&mut self, number: u32, reason: u32, data: Vec<u8>) -> Result<(), Errno> {
        let (id, connection) = self.numbered(number)?;
        check_fits(&data, if id.is_datagram() { SIDR_REP_DATA } else { REJ_DATA })?;
        self.connections.reject(connection, reason, data).ok_or(Errno::INVAL)?;
        self.numbered(number)?.0.state = IdState::Disconnected;
        Ok(())
    }

    fn disconnect(&mut self, now: u64, number: u32) -> Result<(), Errno> {
        let (_, connection) = self.numbered(number)?;
        self.connections.disconnect(now, connection).ok_or(Errno::INVAL)
    }

    /// Destroys an id: closes its connection, and rejects the requests that wait at it. Returns how many of its events
    /// the program has read.
    fn destroy(&mut self, now: u64, number: u32) -> u32 {
        let Some(id) = self.ids.remove(&number) else { return 0 };
        if let Some(file) = self.files.get_mut(&id.file) {
            file.forget(number);
        }
        match id.role {
            Role::Connected(connection) => {
                self.owners.remove(&connection);
                self.connections.destroy(now, connection);
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
                if let Some(connection) = id.number() {
                    self.owners.remove(&connection);
                    self.connections.forget(connection);
                }
                id.state = IdState::Disconnected;
                id.role = Role::None;
                id.is_removed = true;
            }
            self.report(number, Event::new(id::DEVICE_REMOVAL, 0, Param::None));
        }
    }

    /// The ids of requests whose events the program has not read.
    fn children_of(&self, listener: u32) -> Vec<u32> {
        let waits = |id: &Id| id.parent == Some(listener) && id.unseen;
        self.ids.iter().filter(|(_, id)| waits(id)).map(|(number, _)| *number).collect()
    }

    /// Whether [`run`](Self::run) would do anything.
    pub(crate) fn has_work(&self, now: u64) -> bool {
        self.connections.has_work(now)
    }

    /// Delivers messages and runs timers; returns whether there were any. `loses` decides whether a message is lost;
    /// its second argument tells whether a test has asked for that.
    pub(crate) fn run(
        &mut self,
        now: u64,
        ports: Ports<'_>,
        mut loses: impl FnMut(&Message, bool) -> bool,
    ) -> bool {
        let mut worked = self.connections.run_timers(now);
        self.dispatch(ports);
        while let Some(message) = self.connections.next_message() {
            worked = true;
            let lost = loses(&message, self.is_to_lose(&message.from, ports));
            if lost {
                continue;
            }
            match ports.find(&message.to) {
                Some(_) if ports.are_joined(&message.from, &message.to) => {
                    self.connections.receive(now, &message);
                    self.dispatch(ports);
                }
                Some(_) => {}
                None => self.outgoing.extend(ports.encode(&message)),
            }
        }
        worked
    }

    /// Takes a MAD from outside of the fabric, which came from an address to a port.
    pub(crate) fn receive(
        &mut self,
        now: u64,
        (from, to): (IpAddr, Gid),
        mad: &[u8],
        ports: Ports<'_>,
    ) -> Result<(), wire::Refused> {
        let from = Address::new(from, 0).gid();
        let message = ports.decode((from, to), mad).inspect_err(|refused| {
            if let wire::Refused::Request(answer) = refused {
                self.connections.send((**answer).clone());
            }
        })?;
        self.connections.receive(now, &message);
        self.dispatch(ports);
        Ok(())
    }

    /// The messages to addresses outside of the fabric since the last call.
    pub(crate) fn take_outgoing(&mut self) -> Vec<wire::Outgoing> {
        std::mem::take(&mut self.outgoing)
    }

    /// Whether a test has asked to lose the next message of the device with an address.
    fn is_to_lose(&mut self, from: &Gid, ports: Ports<'_>) -> bool {
        let device = ports.find(from).map(|(device, _)| device);
        let left = device.and_then(|device| self.to_lose.get_mut(&device));
        let Some(left) = left.filter(|left| **left > 0) else { return false };
        *left -= 1;
        true
    }

    /// When the next timer is due.
    pub(crate) fn deadline(&self) -> Option<u64> {
        self.connections.deadline()
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
        connection: u32,
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
        if let Some(connection) = self.connections.get(connection) {
            let path = ports.path(&message.to, &message.from, 0);
            child.path = path.map(|path| path.with_mtu(connection.mtu));
        }
        child.state = IdState::Connecting;
        (child.parent, child.unseen) = (Some(listener), true);
        self.give(number, connection);
        Some(number)
    }

    /// Reports a request at its listener.
    fn tell_listener(&mut self, listener: u32, child: u32, mut event: Event) {
        event.new_id = Some(child);
        self.report(listener, event);
    }

    /// Takes a request of a peer, which has this number.
    fn requested(&mut self, connection: u32, message: &Message, ports: Ports<'_>) {
        let (service, refusal, param, ece) = match &message.body {
            Body::Req { service, side, .. } => {
                let reason = match self.is_heard(*service, ports.find(&message.to)) {
                    true => REJ_CONSUMER_DEFINED,
                    false => REJ_INVALID_SERVICE_ID,
                };
                (*service, reason, Param::Conn(side.mirrored(), REQ_DATA), side.ece)
            }
            Body::SidrReq { service, private_data } => {
                let (vector, qpn, qkey, room) = (None, 0, 0, SIDR_REQ_DATA);
                let param = Param::Ud { vector, qpn, qkey, data: private_data.clone(), room };
                (*service, SIDR_UNSUPPORTED, param, message::Ece::default())
            }
            _ => return,
        };
        let Some(listener) = self.listener(service, &message.to) else {
            return self.refuse(connection, refusal);
        };
        // As `cma_ib_check_req_qp_type`.
        let fits = |listener: &Id| match &message.body {
            Body::Req { kind, .. } => !listener.is_datagram() && listener.transport() == *kind,
            _ => listener.is_datagram(),
        };
        let is_connection = self.connections.get(connection).is_some();
        let reason = if is_connection { REJ_CONSUMER_DEFINED } else { SIDR_REJECT };
        if !self.ids.get(&listener).is_some_and(fits) {
            return self.refuse(connection, reason);
        }
        match self.make_child(listener, message, service, ports, connection) {
            Some(child) => {
                let event = Event::new(id::CONNECT_REQUEST, 0, param);
                self.tell_listener(listener, child, Event { ece, ..event });
            }
            None => self.refuse(connection, reason),
        }
    }

    /// Refuses a request that no id takes: a connection with a reason, a query with a status.
    fn refuse(&mut self, number: u32, why: u32) {
        match self.connections.get(number) {
            Some(_) => self.connections.reject(number, why, Vec::new()),
            None => self.connections.answer(number, why, Side::default(), 0, Vec::new()),
        };
        self.connections.forget(number);
    }

    /// Takes the answer of a datagram service.
    fn answered(&mut self, number: u32, message: &Message, ports: Ports<'_>) {
        let Body::SidrRep { status, qpn, qkey, ece, private_data, .. } = &message.body else {
            return;
        };
        let Some(id) = self.ids.get_mut(&number) else { return };
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

/// Refuses private data that its message has no room for: `cm_validate_req_param`, `ib_send_cm_rep` and others.
fn check_fits(data: &[u8], most: usize) -> Result<(), Errno> {
    if data.len() <= most { Ok(()) } else { Err(Errno::INVAL) }
}

/// Whether the process may bind ports below 1024.
fn may_bind_privileged() -> bool {
    is_capable(CapabilitySet::NET_BIND_SERVICE)
}
