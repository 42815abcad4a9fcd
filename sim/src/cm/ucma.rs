//! The commands of the program: `write(2)` on the file of the connection manager.
//!
//! Pairs with `core/ucma.c`. A command is a header and a struct; an answer goes to the address in it.

use super::address::Address;
use super::id::{self, Event, Id, IdState, Param, Role};
use super::message::{Ece, Side};
use super::path::Path;
use super::{CmFileId, Manager, Ports, UDP_QKEY};
use crate::events::{Inode, inode, is_hung_up};
use crate::memory::User;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use uverbs_uapi::qp::{ib_qp_attr_mask as Mask, ib_uverbs_qp_attr};
use uverbs_uapi::rdma_user_cm::*;
use zerocopy::{FromBytes, Immutable, IntoBytes};

type Result<T> = std::result::Result<T, Errno>;

/// The flags of a path that serves both directions, general management and data.
const PATH_FLAGS: u32 = IB_PATH_GMP | IB_PATH_PRIMARY | IB_PATH_BIDIRECTIONAL;

/// An event that waits to be read: its id, the program's number for the id, and the event.
type Queued = (u32, u64, Event);

/// An open file: `struct ucma_file`.
#[derive(Debug)]
pub(crate) struct OpenCmFile {
    events: VecDeque<Queued>,
    /// The kernel's end of a pair of sockets. The other end, the file's descriptor, has a byte for each event.
    ours: UnixStream,
    /// A duplicate of the other end, while there is a handle.
    theirs: Option<OwnedFd>,
    /// The last events, which have no byte: the sockets have room for some hundreds.
    without_byte: usize,
    inode: Inode,
    /// Whether its program was killed.
    is_dead: bool,
}

impl OpenCmFile {
    /// Queues an event.
    pub(super) fn queue(&mut self, id: u32, uid: u64, event: Event) {
        self.events.push_back((id, uid, event));
        self.signal();
    }

    fn signal(&mut self) {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = self.without_byte == 0 && rustix::net::send(&self.ours, &[1], flags).is_ok();
        self.without_byte += usize::from(!sent);
    }

    /// Takes the byte of an event, by the program's end, unless one without a byte is left for it.
    fn unsignal(&mut self, theirs: Option<&OwnedFd>) {
        if self.without_byte > 0 {
            self.without_byte -= 1;
        } else if let Some(theirs) = theirs.or(self.theirs.as_ref()) {
            let mut byte = [0; 1];
            let _ = rustix::net::recv(theirs, &mut byte[..], RecvFlags::DONTWAIT);
        }
    }

    /// Forgets the events of an id.
    pub(super) fn forget(&mut self, id: u32) {
        let before = self.events.len();
        self.events.retain(|(other, _, event)| *other != id && event.new_id != Some(id));
        for _ in self.events.len()..before {
            self.unsignal(None);
        }
    }
}

/// A command, whose struct is `bytes` and whose answer has `room`.
struct Request<'c> {
    user: User<'c>,
    bytes: &'c [u8],
    room: usize,
}

impl Request<'_> {
    fn read<T: FromBytes + IntoBytes>(&self) -> Result<T> {
        let mut value = T::new_zeroed();
        let room = value.as_mut_bytes();
        let fits = self.bytes.len().min(room.len());
        room[..fits].copy_from_slice(&self.bytes[..fits]);
        Ok(value)
    }

    /// Writes an answer, as much of it as there is room for.
    fn answer<T: IntoBytes + Immutable + ?Sized>(&self, address: u64, value: &T) {
        let bytes = value.as_bytes();
        self.user.write(address, &bytes[..bytes.len().min(self.room)]);
    }
}

impl Manager {
    /// Opens a file; returns the descriptor of its handle as well.
    pub(crate) fn open(&mut self) -> Result<(CmFileId, OwnedFd)> {
        let (ours, theirs) = UnixStream::pair().map_err(|_| Errno::MFILE)?;
        let theirs = OwnedFd::from(theirs);
        let fd = rustix::io::fcntl_dupfd_cloexec(&theirs, 3)?;
        let file = OpenCmFile {
            events: VecDeque::new(),
            ours,
            inode: inode(&theirs)?,
            theirs: Some(theirs),
            without_byte: 0,
            is_dead: false,
        };
        self.next_file += 1;
        let id = CmFileId(self.next_file);
        self.files.insert(id, file);
        Ok((id, fd))
    }

    /// The handle of a file was dropped. The file stays while the program has descriptors of it.
    pub(crate) fn release(&mut self, id: CmFileId) {
        self.files.entry(id).and_modify(|file| file.theirs = None);
    }

    /// Closes files without a handle and without a descriptor.
    pub(crate) fn close_orphans(&mut self, now: u64) {
        let is_closed = |file: &OpenCmFile| file.theirs.is_none() && is_hung_up(&file.ours);
        let closed = self.files.iter().filter(|(_, file)| is_closed(file));
        let closed: Vec<CmFileId> = closed.map(|(id, _)| *id).collect();
        closed.into_iter().for_each(|id| self.close(now, id));
    }

    /// Closes a file.
    fn close(&mut self, now: u64, id: CmFileId) {
        self.destroy_all(now, id);
        self.files.remove(&id);
    }

    /// Destroys the ids of a file, the newest first.
    fn destroy_all(&mut self, now: u64, id: CmFileId) {
        let of = |id_: &Id| id_.file == id;
        let ids: Vec<u32> =
            self.ids.iter().filter(|(_, id)| of(id)).map(|(number, _)| *number).collect();
        for number in ids.into_iter().rev() {
            self.destroy(now, number);
        }
    }

    /// Ends a file as if its program had died; returns whether the descriptor leads to one.
    pub(crate) fn kill(&mut self, now: u64, fd: BorrowedFd<'_>) -> bool {
        let Some(id) = self.file_behind(fd) else { return false };
        self.destroy_all(now, id);
        if let Some(file) = self.files.get_mut(&id) {
            file.events.clear();
            file.is_dead = true;
            let _ = file.ours.shutdown(std::net::Shutdown::Both);
        }
        true
    }

    /// The file behind a descriptor.
    pub(crate) fn file_behind(&self, fd: BorrowedFd<'_>) -> Option<CmFileId> {
        let inode = inode(&fd).ok()?;
        self.files.iter().find(|(_, file)| file.inode == inode).map(|(id, _)| *id)
    }

    /// Runs a command.
    pub(crate) fn command(
        &mut self,
        file: CmFileId,
        user: User<'_>,
        bytes: &[u8],
        now: u64,
        ports: Ports<'_>,
    ) -> Result<()> {
        if self.files.get(&file).is_none_or(|file| file.is_dead) {
            return Err(Errno::IO);
        }
        let (header, rest) = rdma_ucm_cmd_hdr::read_from_prefix(bytes).map_err(|_| Errno::INVAL)?;
        let bytes = rest.get(..usize::from(header.r#in)).ok_or(Errno::INVAL)?;
        let request = Request { user, bytes, room: header.out.into() };
        self.run_command(header.cmd, file, &request, now, ports)
    }

    fn run_command(
        &mut self,
        command: u32,
        file: CmFileId,
        request: &Request<'_>,
        now: u64,
        ports: Ports<'_>,
    ) -> Result<()> {
        match command {
            RDMA_USER_CM_CMD_CREATE_ID => self.create_id(file, request),
            RDMA_USER_CM_CMD_DESTROY_ID => self.destroy_id(file, now, request),
            RDMA_USER_CM_CMD_BIND => self.bind_id(file, request, ports),
            RDMA_USER_CM_CMD_RESOLVE_ADDR => self.resolve(file, request, ports),
            RDMA_USER_CM_CMD_RESOLVE_ROUTE => {
                let asked: rdma_ucm_resolve_route = request.read()?;
                self.id(file, asked.id)?;
                self.resolve_route(asked.id, ports)
            }
            RDMA_USER_CM_CMD_CONNECT => {
                let asked: rdma_ucm_connect = request.read()?;
                self.id(file, asked.id)?;
                let side = side_of(&asked.conn_param, asked.ece)?;
                self.connect(now, asked.id, side)
            }
            RDMA_USER_CM_CMD_LISTEN => {
                let asked: rdma_ucm_listen = request.read()?;
                self.id(file, asked.id)?;
                self.listen(asked.id, asked.backlog)
            }
            RDMA_USER_CM_CMD_ACCEPT => {
                let asked: rdma_ucm_accept = request.read()?;
                self.id(file, asked.id)?;
                let side = match asked.conn_param.valid {
                    0 => None,
                    _ => Some((side_of(&asked.conn_param, asked.ece)?, asked.conn_param.qkey)),
                };
                self.accept(now, asked.id, asked.uid, side)
            }
            RDMA_USER_CM_CMD_REJECT => {
                let asked: rdma_ucm_reject = request.read()?;
                self.id(file, asked.id)?;
                let data = &asked.private_data[..usize::from(asked.private_data_len)];
                let reason = match asked.reason {
                    0 => super::REJ_CONSUMER_DEFINED,
                    reason => reason.into(),
                };
                self.reject(asked.id, reason, data.to_vec())
            }
            RDMA_USER_CM_CMD_DISCONNECT => {
                let asked: rdma_ucm_disconnect = request.read()?;
                self.id(file, asked.id)?;
                self.disconnect(now, asked.id)
            }
            RDMA_USER_CM_CMD_INIT_QP_ATTR => self.init_qp_attr(file, request, ports),
            RDMA_USER_CM_CMD_GET_EVENT => self.get_event(file, request),
            RDMA_USER_CM_CMD_SET_OPTION => self.set_option(file, request),
            RDMA_USER_CM_CMD_NOTIFY => {
                let asked: rdma_ucm_notify = request.read()?;
                self.id(file, asked.id).map(drop)
            }
            RDMA_USER_CM_CMD_JOIN_MCAST => {
                let asked: rdma_ucm_join_mcast = request.read()?;
                self.id(file, asked.id)?;
                let group = Address::decode(&asked.addr).ok_or(Errno::INVAL)?;
                if asked.join_flags >= RDMA_MC_JOIN_FLAG_RESERVED {
                    return Err(Errno::INVAL);
                }
                let id = self.join(asked.id, file, asked.uid, group, ports)?;
                request.answer(asked.response, &rdma_ucm_create_id_resp { id });
                Ok(())
            }
            RDMA_USER_CM_CMD_LEAVE_MCAST => {
                let asked: rdma_ucm_destroy_id = request.read()?;
                if !matches!(self.id(file, asked.id)?.role, Role::Member { .. }) {
                    return Err(Errno::INVAL);
                }
                let events_reported = self.destroy(now, asked.id);
                request.answer(asked.response, &rdma_ucm_destroy_id_resp { events_reported });
                Ok(())
            }
            RDMA_USER_CM_CMD_MIGRATE_ID => self.migrate(file, request),
            RDMA_USER_CM_CMD_QUERY => self.query(file, request, ports),
            RDMA_USER_CM_CMD_WRITE_CM_EVENT => self.write_event(file, request),
            RDMA_USER_CM_CMD_GET_OPTION => Err(Errno::NOSYS),
            _ => Err(Errno::OPNOTSUPP),
        }
    }

    fn create_id(&mut self, file: CmFileId, request: &Request<'_>) -> Result<()> {
        let asked: rdma_ucm_create_id = request.read()?;
        let kind = match rdma_ucm_port_space(asked.ps) {
            rdma_ucm_port_space::RDMA_PS_TCP => id::RC,
            rdma_ucm_port_space::RDMA_PS_UDP | rdma_ucm_port_space::RDMA_PS_IPOIB => id::UD,
            rdma_ucm_port_space::RDMA_PS_IB => asked.qp_type,
            _ => return Err(Errno::INVAL),
        };
        let id = self.create(file, asked.uid, asked.ps, kind);
        request.answer(asked.response, &rdma_ucm_create_id_resp { id });
        Ok(())
    }

    fn destroy_id(&mut self, file: CmFileId, now: u64, request: &Request<'_>) -> Result<()> {
        let asked: rdma_ucm_destroy_id = request.read()?;
        match self.id(file, asked.id) {
            Ok(_) | Err(Errno::NXIO) => {}
            Err(errno) => return Err(errno),
        }
        let of = |id: &Id| matches!(id.role, Role::Member { of } if of == asked.id);
        let members: Vec<u32> =
            self.ids.iter().filter(|(_, id)| of(id)).map(|(number, _)| *number).collect();
        for member in members {
            self.destroy(now, member);
        }
        let events_reported = self.destroy(now, asked.id);
        request.answer(asked.response, &rdma_ucm_destroy_id_resp { events_reported });
        Ok(())
    }

    fn bind_id(&mut self, file: CmFileId, request: &Request<'_>, ports: Ports<'_>) -> Result<()> {
        let asked: rdma_ucm_bind = request.read()?;
        self.id(file, asked.id)?;
        // An id is reached by IP address, on InfiniBand, too.
        if Address::is_infiniband(&asked.addr) {
            return Err(Errno::NODEV);
        }
        let at = Address::decode(&asked.addr).ok_or(Errno::INVAL)?;
        self.bind(asked.id, at, ports)
    }

    fn resolve(&mut self, file: CmFileId, request: &Request<'_>, ports: Ports<'_>) -> Result<()> {
        let asked: rdma_ucm_resolve_addr = request.read()?;
        self.id(file, asked.id)?;
        let from = match asked.src_size {
            0 => None,
            _ => Some(Address::decode(&asked.src_addr).ok_or(Errno::INVAL)?),
        };
        let to = Address::decode(&asked.dst_addr).ok_or(Errno::INVAL)?;
        self.resolve_addr(asked.id, from, to, ports)
    }

    fn set_option(&mut self, file: CmFileId, request: &Request<'_>) -> Result<()> {
        let asked: rdma_ucm_set_option = request.read()?;
        let id = self.id(file, asked.id)?;
        let length = asked.optlen as usize;
        if length > 4096 {
            return Err(Errno::INVAL);
        }
        let mut value = vec![0; length];
        request.user.read(asked.optval, &mut value);
        match (asked.level, asked.optname, &value[..]) {
            (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, [tos]) => id.tos = *tos,
            (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, [a, b, c, d]) => {
                let reuse = [a, b, c, d].iter().any(|byte| **byte != 0);
                if id.state != IdState::Idle && reuse {
                    return Err(Errno::INVAL);
                }
                id.reuse = reuse;
            }
            (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, [a, b, c, d]) => {
                id.family_alone = [a, b, c, d].iter().any(|byte| **byte != 0);
            }
            (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, [timeout]) => {
                // As `rdma_set_ack_timeout`.
                if id.is_datagram() {
                    return Err(Errno::INVAL);
                }
                id.ack_timeout = Some(*timeout);
            }
            (RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, value) => {
                return self.set_ib_path(asked.id, value);
            }
            (RDMA_OPTION_ID | RDMA_OPTION_IB, ..) => return Err(Errno::INVAL),
            _ => return Err(Errno::NOSYS),
        }
        Ok(())
    }

    /// As `ucma_set_ib_path`: takes the first path with [`PATH_FLAGS`].
    fn set_ib_path(&mut self, number: u32, value: &[u8]) -> Result<()> {
        let mut paths = value.chunks_exact(size_of::<ib_path_rec_data>());
        let path = paths.find(|path| path[..4] == PATH_FLAGS.to_ne_bytes());
        let record =
            path.filter(|_| paths.remainder().is_empty()).and_then(|path| path.last_chunk());
        let id = self.ids.get(&number).ok_or(Errno::NOENT)?;
        match record {
            Some(record) if id.state == IdState::AddrResolved => {
                self.set_path(number, Some(Path(*record)));
                Ok(())
            }
            _ => Err(Errno::INVAL),
        }
    }

    fn migrate(&mut self, file: CmFileId, request: &Request<'_>) -> Result<()> {
        let asked: rdma_ucm_migrate_id = request.read()?;
        let theirs = request.user.duplicate(asked.fd as i32).ok_or(Errno::NOENT)?;
        let from = self.file_behind(theirs.as_fd()).ok_or(Errno::INVAL)?;
        let id = self.id(from, asked.id)?;
        id.file = file;
        let events_reported = id.read;
        let moved: Vec<Queued> = match self.files.get_mut(&from) {
            Some(old) if from != file => {
                let (moved, kept) = std::mem::take(&mut old.events)
                    .into_iter()
                    .partition(|(id, ..)| *id == asked.id);
                old.events = kept;
                let moved: VecDeque<Queued> = moved;
                moved.iter().for_each(|_| old.unsignal(Some(&theirs)));
                moved.into()
            }
            _ => Vec::new(),
        };
        for (id, uid, event) in moved {
            if let Some(new) = self.files.get_mut(&file) {
                new.queue(id, uid, event);
            }
        }
        request.answer(asked.response, &rdma_ucm_migrate_resp { events_reported });
        Ok(())
    }

    fn write_event(&mut self, file: CmFileId, request: &Request<'_>) -> Result<()> {
        let asked: rdma_ucm_write_cm_event = request.read()?;
        let id = self.id(file, asked.id)?;
        if id.uid == 0 {
            return Err(Errno::INVAL);
        }
        let kind = rdma_cm_event_type(asked.event);
        let known =
            [rdma_cm_event_type::RDMA_CM_EVENT_USER, rdma_cm_event_type::RDMA_CM_EVENT_INTERNAL];
        if !known.contains(&kind) {
            return Err(Errno::INVAL);
        }
        let word = |at: usize| {
            let bytes: [u8; 8] = asked.param[at..at + 8].try_into().unwrap_or_default();
            u64::from_ne_bytes(bytes)
        };
        let event = Event::new(asked.event, asked.status as i32, Param::Words([word(0), word(8)]));
        self.report(asked.id, event);
        Ok(())
    }

    /// The next event; `EAGAIN` without one.
    fn get_event(&mut self, file: CmFileId, request: &Request<'_>) -> Result<()> {
        let asked: rdma_ucm_get_event = request.read()?;
        let open = self.files.get_mut(&file).ok_or(Errno::BADF)?;
        let (number, uid, event) = open.events.pop_front().ok_or(Errno::AGAIN)?;
        open.unsignal(None);
        self.ids.entry(number).and_modify(|id| id.read += 1);
        let mut response = rdma_ucm_event_resp {
            uid,
            id: event.new_id.unwrap_or(number),
            event: event.kind,
            status: event.status as u32,
            ece: rdma_ucm_ece { vendor_id: event.ece.vendor, attr_mod: event.ece.options },
            ..Default::default()
        };
        fill(&mut response, &event.param);
        request.answer(asked.response, &response);
        if let Some(child) = event.new_id {
            if let Some(child) = self.ids.get_mut(&child) {
                child.unseen = false;
            }
            if let Some(Id { role: Role::Listener { room }, .. }) = self.ids.get_mut(&number) {
                *room += 1;
            }
        }
        Ok(())
    }

    fn init_qp_attr(
        &mut self,
        file: CmFileId,
        request: &Request<'_>,
        ports: Ports<'_>,
    ) -> Result<()> {
        const INIT: u32 = 1;
        const RTR: u32 = 2;
        const RTS: u32 = 3;
        let asked: rdma_ucm_init_qp_attr = request.read()?;
        self.id(file, asked.id)?;
        let id = self.ids.get(&asked.id).ok_or(Errno::NOENT)?;
        let device = id.device.ok_or(Errno::INVAL)?;
        let path = id.path.or_else(|| {
            let (from, to) = Manager::gids_of(id)?;
            ports.path(&from, &to, id.tos)
        });
        let mut attr = ib_uverbs_qp_attr { qp_state: asked.qp_state, ..Default::default() };
        if let Some(path) = path {
            attr.pkey_index = ports.pkey_index(device, path.pkey()).ok_or(Errno::INVAL)?;
        }
        let mut mask = Mask::IB_QP_STATE;
        match (asked.qp_state, self.connection_of(id)) {
            (INIT, _) if id.is_datagram() => {
                mask |= Mask::IB_QP_PKEY_INDEX | Mask::IB_QP_PORT | Mask::IB_QP_QKEY;
                (attr.port_num, attr.qkey) = (1, UDP_QKEY);
            }
            (INIT, Some(connection)) if !connection.is_alive() => return Err(Errno::INVAL),
            (INIT, connection) => {
                const REMOTE_WRITE: u32 = 1 << 1;
                const REMOTE_READ: u32 = 1 << 2;
                const REMOTE_ATOMIC: u32 = 1 << 3;
                mask |= Mask::IB_QP_PKEY_INDEX | Mask::IB_QP_PORT | Mask::IB_QP_ACCESS_FLAGS;
                attr.port_num = 1;
                // As `cm_init_qp_init_attr`, once there is a connection.
                if let Some(connection) = connection {
                    attr.qp_access_flags = REMOTE_WRITE;
                    if responder_resources(connection) > 0 {
                        attr.qp_access_flags |= REMOTE_READ | REMOTE_ATOMIC;
                    }
                }
            }
            (RTR, Some(connection)) => {
                mask |= Mask::IB_QP_AV
                    | Mask::IB_QP_PATH_MTU
                    | Mask::IB_QP_DEST_QPN
                    | Mask::IB_QP_RQ_PSN;
                let (_, index) = ports.find(&connection.from).ok_or(Errno::NODEV)?;
                let path = path.ok_or(Errno::NODEV)?;
                attr.ah_attr = ports.vector_to(&connection.to, index, id.tos);
                if attr.ah_attr.is_global == 0 {
                    (attr.ah_attr.dlid, attr.ah_attr.sl) = (path.dlid(), path.service_level());
                }
                attr.path_mtu = path.mtu().into();
                attr.dest_qp_num = connection.peer.qpn;
                attr.rq_psn = connection.own.starting_psn;
                if matches!(id.kind, id::RC | id::XRC_TGT) {
                    mask |= Mask::IB_QP_MAX_DEST_RD_ATOMIC | Mask::IB_QP_MIN_RNR_TIMER;
                    attr.max_dest_rd_atomic = responder_resources(connection);
                }
            }
            (RTS, Some(connection)) => {
                mask |= Mask::IB_QP_SQ_PSN;
                attr.sq_psn = connection.peer.starting_psn;
                // As `cm_init_qp_rts_attr`.
                if matches!(id.kind, id::RC | id::XRC_INI | id::XRC_TGT) {
                    mask |= Mask::IB_QP_TIMEOUT;
                    // There and back.
                    let timeout =
                        path.map_or(0, |path| path.packet_life_time().saturating_add(1).min(31));
                    attr.timeout = id.ack_timeout.unwrap_or(timeout);
                }
                if matches!(id.kind, id::RC | id::XRC_INI) {
                    mask |= Mask::IB_QP_RETRY_CNT
                        | Mask::IB_QP_RNR_RETRY
                        | Mask::IB_QP_MAX_QP_RD_ATOMIC;
                    attr.retry_cnt = retries(connection);
                    attr.rnr_retry = connection.peer.rnr_retry_count;
                    attr.max_rd_atomic = initiator_depth(connection);
                }
            }
            _ => return Err(Errno::INVAL),
        }
        attr.qp_attr_mask = mask.bits();
        request.answer(asked.response, &attr);
        Ok(())
    }

    fn query(&mut self, file: CmFileId, request: &Request<'_>, ports: Ports<'_>) -> Result<()> {
        let asked: rdma_ucm_query = request.read()?;
        let id = self.id(file, asked.id)?;
        if asked.option == RDMA_USER_CM_QUERY_PATH {
            let header = rdma_ucm_query_path_resp {
                num_paths: id.path.is_some().into(),
                ..Default::default()
            };
            let mut response = header.as_bytes().to_vec();
            // As `ucma_query_path`, which leaves the last place empty.
            let room = request.room.saturating_sub(response.len());
            if let Some(Path(record)) = id.path.filter(|_| room > size_of::<ib_path_rec_data>()) {
                response.extend(PATH_FLAGS.to_ne_bytes());
                response.extend([0; 4]);
                response.extend(record);
            }
            request.answer(asked.response, &response[..]);
            return Ok(());
        }
        if !matches!(asked.option, RDMA_USER_CM_QUERY_ADDR | RDMA_USER_CM_QUERY_GID) {
            return Err(Errno::INVAL);
        }
        let mut response = rdma_ucm_query_addr_resp { ibdev_index: u32::MAX, ..Default::default() };
        let (mut scope, mut pkey) = (0, u16::MAX);
        if let Some(device) = id.device {
            let (interface, guid) = ports.get(device)?;
            scope = interface.index;
            response.node_guid = guid.to_be();
            response.port_num = 1;
            pkey = ports.0[device].pkey();
            response.pkey = pkey.to_be();
            response.ibdev_index = device as u32;
        }
        let encode = |address: Address, to: &mut [u8; 128]| match asked.option {
            RDMA_USER_CM_QUERY_GID => {
                address.encode_ib(ports.port_gid(&address.gid()), pkey, id.space, to)
            }
            _ => address.encode(scope, to),
        };
        // As `ucma_query_gid`: an end without an address has the GID of zeros.
        let none = || (asked.option == RDMA_USER_CM_QUERY_GID).then(Address::unspecified);
        if let Some(local) = id.local.or_else(none) {
            response.src_size = encode(local, &mut response.src_addr);
        }
        if let Some(peer) = id.peer.or_else(none) {
            response.dst_size = encode(peer, &mut response.dst_addr);
        }
        request.answer(asked.response, &response);
        Ok(())
    }
}

/// The parameters of one side, as a command has them.
fn side_of(param: &rdma_ucm_conn_param, ece: rdma_ucm_ece) -> Result<Side> {
    let length = usize::from(param.private_data_len);
    Ok(Side {
        qpn: param.qp_num & 0xff_ffff,
        starting_psn: 0,
        responder_resources: param.responder_resources,
        initiator_depth: param.initiator_depth,
        flow_control: param.flow_control,
        retry_count: param.retry_count.min(7),
        rnr_retry_count: param.rnr_retry_count.min(7),
        srq: param.srq,
        ece: Ece { vendor: ece.vendor_id, options: ece.attr_mod },
        private_data: param.private_data.get(..length).ok_or(Errno::INVAL)?.to_vec(),
    })
}

/// Fills in the parameters of an event.
fn fill(response: &mut rdma_ucm_event_resp, param: &Param) {
    match param {
        Param::None => {}
        Param::Conn(side, room) => {
            let mut conn = rdma_ucm_conn_param {
                qp_num: side.qpn,
                private_data_len: *room as u8,
                srq: side.srq,
                responder_resources: side.responder_resources,
                initiator_depth: side.initiator_depth,
                flow_control: side.flow_control,
                retry_count: side.retry_count,
                rnr_retry_count: side.rnr_retry_count,
                ..Default::default()
            };
            copy_to(&mut conn.private_data, &side.private_data, *room);
            response.param[..size_of_val(&conn)].copy_from_slice(conn.as_bytes());
        }
        Param::Ud { vector, qpn, qkey, data, room } => {
            let mut ud = rdma_ucm_ud_param {
                qp_num: *qpn,
                qkey: *qkey,
                private_data_len: *room as u8,
                ..Default::default()
            };
            if let Some(vector) = vector {
                ud.ah_attr = *vector;
            }
            copy_to(&mut ud.private_data, data, *room);
            response.param[..size_of_val(&ud)].copy_from_slice(ud.as_bytes());
        }
        Param::Words(words) => {
            response.param[..16].copy_from_slice(words.as_bytes());
        }
    }
}

/// Private data always fills its room in a message.
fn copy_to(to: &mut [u8; 256], from: &[u8], room: usize) {
    let length = from.len().min(room);
    to[..length].copy_from_slice(&from[..length]);
}

/// Reads and atomics of the peer that this side answers at once.
fn responder_resources(connection: &super::Connection) -> u8 {
    connection.own.responder_resources
}

/// Reads and atomics that this side may have in flight.
fn initiator_depth(connection: &super::Connection) -> u8 {
    connection.own.initiator_depth
}

/// Retries of a request: the connect request sets them for both sides.
fn retries(connection: &super::Connection) -> u8 {
    connection.own.retry_count.max(connection.peer.retry_count)
}
