//! A scripted connection manager: it numbers ids, logs every command, reports the events that the test
//! queues, and fails the commands that the test chooses.

use super::address::encode;
use super::channel::EventChannel;
use super::infiniband::{AF_IB, IbAddress};
use super::port_space::PortSpace;
use super::ucma::{CommandMemory, UcmaCommand, UcmaFile};
use crate::device::Guid;
use crate::number::Gid;
use crate::qp::QpType;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use uverbs_uapi::qp::{ib_qp_attr_mask as Mask, ib_uverbs_qp_attr};
use uverbs_uapi::rdma_user_cm::*;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// The address that every id has.
pub(crate) const LOCAL: &str = "10.0.0.1:5000";
/// The address that every id leads to.
pub(crate) const PEER: &str = "10.0.0.2:7471";

#[derive(Debug, Default)]
struct State {
    next: u32,
    live: BTreeSet<u32>,
    /// The type of the queue pairs of each id, if it is not RC.
    types: BTreeMap<u32, QpType>,
    /// The key that names each id in its events.
    keys: Vec<(u32, u64)>,
    events: VecDeque<rdma_ucm_event_resp>,
    log: Vec<u32>,
    refused: Vec<(u32, Errno)>,
    creates: Vec<rdma_ucm_create_id>,
    accepts: Vec<rdma_ucm_accept>,
    connects: Vec<rdma_ucm_connect>,
    joins: Vec<rdma_ucm_join_mcast>,
    options: Vec<(u32, Vec<u8>)>,
    binds: Vec<rdma_ucm_bind>,
    resolves: Vec<rdma_ucm_resolve_addr>,
    /// The path that the program set for each id.
    paths: BTreeMap<u32, Vec<u8>>,
    services: Vec<ib_user_service_rec>,
    wanted: Vec<rdma_ucm_resolve_ib_service>,
    countdown: Option<(u32, Errno)>,
    /// The port that all ids are on.
    port: u8,
    /// The GUID of the device that all ids are on, as the kernel writes it, and the peer's GID.
    guid: u64,
    peer: [u8; 16],
}

/// The scripted file as the test sees it.
#[derive(Clone, Debug)]
pub(crate) struct CmScript(Arc<Inner>);

/// An action that runs once, before the n-th command of its kind.
struct Hook {
    command: u32,
    left: u32,
    act: Box<dyn FnOnce() + Send>,
}

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hook({}, {})", self.command, self.left)
    }
}

struct Inner {
    hook: Mutex<Option<Hook>>,
    state: Mutex<State>,
    /// A pipe that contains one byte for each pending event.
    readable: OwnedFd,
    writable: OwnedFd,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CmScript").finish_non_exhaustive()
    }
}

impl CmScript {
    pub(crate) fn new() -> CmScript {
        let (readable, writable) = rustix::pipe::pipe().expect("a pipe");
        let state = Mutex::new(State { next: 1, port: 1, ..State::default() });
        CmScript(Arc::new(Inner { hook: Mutex::default(), state, readable, writable }))
    }

    pub(crate) fn open(&self) -> EventChannel {
        EventChannel::on(Box::new(self.clone())).expect("a channel")
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues an event of the id, with the key of the id.
    pub(crate) fn tell(&self, id: u32, kind: rdma_cm_event_type, status: i32) {
        self.tell_with(id, kind, status, rdma_ucm_conn_param::default());
    }

    pub(crate) fn tell_with(
        &self,
        id: u32,
        kind: rdma_cm_event_type,
        status: i32,
        conn: rdma_ucm_conn_param,
    ) {
        let uid = self.key(id);
        self.tell_raw(uid, id, kind, status, conn);
    }

    /// Queues a connect request for the listener and returns its id.
    pub(crate) fn request(&self, listener: u32, conn: rdma_ucm_conn_param) -> u32 {
        let uid = self.key(listener);
        let id = self.make();
        self.set_type(id, self.qp_type(listener));
        let kind = rdma_cm_event_type::RDMA_CM_EVENT_CONNECT_REQUEST;
        self.tell_raw(uid, id, kind, 0, conn);
        id
    }

    /// Queues an event of the id with the options of the peer's vendor.
    pub(crate) fn tell_ece(&self, id: u32, kind: rdma_cm_event_type, ece: rdma_ucm_ece) {
        self.tell(id, kind, 0);
        if let Some(event) = self.state().events.back_mut() {
            event.ece = ece;
        }
    }

    /// As [`request`](Self::request), with the options of the peer's vendor.
    pub(crate) fn request_ece(&self, listener: u32, ece: rdma_ucm_ece) -> u32 {
        let id = self.request(listener, rdma_ucm_conn_param::default());
        if let Some(event) = self.state().events.back_mut() {
            event.ece = ece;
        }
        id
    }

    /// Queues an event of an id of the port space UDP.
    pub(crate) fn tell_datagram(
        &self,
        id: u32,
        kind: rdma_cm_event_type,
        status: i32,
        ud: rdma_ucm_ud_param,
    ) {
        let uid = self.key(id);
        self.tell_param(uid, id, kind, status, ud.as_bytes());
    }

    /// Queues a request for a listener of the port space UDP.
    pub(crate) fn request_datagrams(&self, listener: u32, ud: rdma_ucm_ud_param) {
        let (uid, id) = (self.key(listener), self.make());
        self.set_type(id, QpType::UD);
        let kind = rdma_cm_event_type::RDMA_CM_EVENT_CONNECT_REQUEST;
        self.tell_param(uid, id, kind, 0, ud.as_bytes());
    }

    pub(crate) fn tell_raw(
        &self,
        uid: u64,
        id: u32,
        kind: rdma_cm_event_type,
        status: i32,
        conn: rdma_ucm_conn_param,
    ) {
        self.tell_param(uid, id, kind, status, conn.as_bytes());
    }

    fn tell_param(&self, uid: u64, id: u32, kind: rdma_cm_event_type, status: i32, bytes: &[u8]) {
        let mut event = rdma_ucm_event_resp {
            uid,
            id,
            event: kind.0,
            status: status as u32,
            ..Default::default()
        };
        event.param[..bytes.len()].copy_from_slice(bytes);
        self.state().events.push_back(event);
        rustix::io::write(&self.0.writable, &[1]).expect("a byte for the pipe");
    }

    pub(crate) fn key(&self, id: u32) -> u64 {
        let state = self.state();
        state.keys.iter().rev().find(|(other, _)| *other == id).map_or(0, |(_, key)| *key)
    }

    fn qp_type(&self, id: u32) -> QpType {
        self.state().types.get(&id).copied().unwrap_or(QpType::RC)
    }

    fn set_type(&self, id: u32, qp_type: QpType) {
        self.state().types.insert(id, qp_type);
    }

    fn make(&self) -> u32 {
        let mut state = self.state();
        let id = state.next;
        state.next += 1;
        state.live.insert(id);
        id
    }

    /// Fails every such command until [`allow`](Self::allow).
    pub(crate) fn refuse(&self, command: u32, errno: Errno) {
        self.state().refused.push((command, errno));
    }

    /// Calls `act` before the n-th such command from now, counted from 1, is carried out.
    pub(crate) fn before(&self, command: u32, n: u32, act: impl FnOnce() + Send + 'static) {
        let hook = Hook { command, left: n, act: Box::new(act) };
        *self.0.hook.lock().expect("no panic") = Some(hook);
    }

    /// The hook to run before the command.
    fn due(&self, command: u32) -> Option<Hook> {
        let mut hook = self.0.hook.lock().expect("no panic");
        let waiting = hook.as_mut().filter(|hook| hook.command == command)?;
        waiting.left -= 1;
        if waiting.left == 0 { hook.take() } else { None }
    }

    pub(crate) fn allow(&self, command: u32) {
        self.state().refused.retain(|(refused, _)| *refused != command);
    }

    /// Fails the `n`-th command from now, counted from 1, except those that destroy ids or get events.
    pub(crate) fn fail_step(&self, n: u32, errno: Errno) {
        self.state().countdown = Some((n, errno));
    }

    /// Cancels a [`fail_step`](Self::fail_step); `true` if its command had not come yet.
    pub(crate) fn cancel_failure(&self) -> bool {
        self.state().countdown.take().is_some()
    }

    /// The ids that were not destroyed.
    pub(crate) fn live(&self) -> Vec<u32> {
        self.state().live.iter().copied().collect()
    }

    /// The commands since the last call, except those that get events.
    pub(crate) fn log(&self) -> Vec<u32> {
        let log = std::mem::take(&mut self.state().log);
        log.into_iter().filter(|number| *number != RDMA_USER_CM_CMD_GET_EVENT).collect()
    }

    pub(crate) fn connects(&self) -> Vec<rdma_ucm_connect> {
        self.state().connects.clone()
    }

    pub(crate) fn joins(&self) -> Vec<rdma_ucm_join_mcast> {
        self.state().joins.clone()
    }

    pub(crate) fn creates(&self) -> Vec<rdma_ucm_create_id> {
        self.state().creates.clone()
    }

    pub(crate) fn accepts(&self) -> Vec<rdma_ucm_accept> {
        self.state().accepts.clone()
    }

    pub(crate) fn binds(&self) -> Vec<rdma_ucm_bind> {
        self.state().binds.clone()
    }

    pub(crate) fn resolves(&self) -> Vec<rdma_ucm_resolve_addr> {
        self.state().resolves.clone()
    }

    /// Puts all ids on a port other than the first.
    pub(crate) fn set_port(&self, port: u8) {
        self.state().port = port;
    }

    /// Puts all ids on a device with this GUID, with a peer that has this GID.
    pub(crate) fn set_device(&self, guid: Guid, peer: Gid) {
        let mut state = self.state();
        (state.guid, state.peer) = (u64::from_ne_bytes(guid.to_bytes()), peer.0);
    }

    /// Sets the subnet administrator's answer to every query of services.
    pub(crate) fn set_services(&self, services: Vec<ib_user_service_rec>) {
        self.state().services = services;
    }

    /// The services that queries named.
    pub(crate) fn wanted(&self) -> Vec<rdma_ucm_resolve_ib_service> {
        self.state().wanted.clone()
    }

    pub(crate) fn options(&self) -> Vec<(u32, Vec<u8>)> {
        self.state().options.clone()
    }
}

impl State {
    /// The answer to a query, of at most `room` bytes.
    fn told(&self, request: &rdma_ucm_query, room: usize) -> Vec<u8> {
        let list = |count: usize, item: usize, bytes: Vec<u8>| {
            let told = count.min((room - 8) / item) * item;
            [&(count as u32).to_ne_bytes()[..], &[0; 4], &bytes[..told]].concat()
        };
        // The GIDs of two ports, and a service.
        let ib = |last: u8| {
            let gid = Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
            IbAddress::new(gid, PortSpace::IB, 7).encode()
        };
        let ip = |text: &str| encode(&text.parse().expect("an address"));
        let ((src_addr, src_size), (dst_addr, dst_size)) = match request.option {
            RDMA_USER_CM_QUERY_PATH => {
                let path = self.paths.get(&request.id).cloned().unwrap_or_default();
                // The kernel demands more room than the last path needs.
                let fits = path.len() < room - 8;
                return list(path.len() / 72, 72, if fits { path } else { Vec::new() });
            }
            RDMA_USER_CM_QUERY_IB_SERVICE => {
                let size = size_of::<ib_user_service_rec>();
                return list(self.services.len(), size, self.services.as_bytes().to_vec());
            }
            RDMA_USER_CM_QUERY_GID => (ib(1), ib(2)),
            _ => {
                let mut asked = self.resolves.iter().rev();
                let asked = asked.find(|asked| asked.id == request.id);
                match asked.is_some_and(|asked| asked.dst_addr[..2] == AF_IB.to_ne_bytes()) {
                    true => (ib(1), ib(2)),
                    false => (ip(LOCAL), ip(PEER)),
                }
            }
        };
        let told = rdma_ucm_query_addr_resp {
            port_num: self.port,
            node_guid: self.guid,
            src_size,
            dst_size,
            src_addr,
            dst_addr,
            // As from a kernel without the field.
            ibdev_index: u32::MAX,
            ..Default::default()
        };
        told.as_bytes().to_vec()
    }
}

fn read<T: FromBytes>(bytes: &[u8]) -> T {
    T::read_from_bytes(bytes)
        .unwrap_or_else(|_| panic!("{} bytes do not fit the command's struct", bytes.len()))
}

impl UcmaFile for CmScript {
    fn execute(&self, command: UcmaCommand<'_>) -> Result<(), Errno> {
        if let Some(hook) = self.due(command.number) {
            (hook.act)();
        }
        {
            let mut state = self.state();
            state.log.push(command.number);
            let uncounted = [
                RDMA_USER_CM_CMD_GET_EVENT,
                RDMA_USER_CM_CMD_DESTROY_ID,
                RDMA_USER_CM_CMD_LEAVE_MCAST,
            ];
            let counted = !uncounted.contains(&command.number);
            if let Some((left, errno)) = state.countdown.filter(|_| counted) {
                state.countdown = (left > 1).then_some((left - 1, errno));
                if left == 1 {
                    return Err(errno);
                }
            }
            let refused = state.refused.iter().find(|(refused, _)| *refused == command.number);
            if let Some((_, errno)) = refused {
                return Err(*errno);
            }
        }
        let answer = |buffer: CommandMemory<'_>, bytes: &[u8]| match buffer {
            CommandMemory::Out(out) => out.copy_from_slice(bytes),
            other => panic!("no room for an answer: {other:?}"),
        };
        let alive =
            |id: u32| if self.state().live.contains(&id) { Ok(()) } else { Err(Errno::NOENT) };
        match command.number {
            RDMA_USER_CM_CMD_CREATE_ID => {
                let request: rdma_ucm_create_id = read(command.request);
                let id = self.make();
                let qp_type = match rdma_ucm_port_space(request.ps) {
                    rdma_ucm_port_space::RDMA_PS_TCP => QpType::RC,
                    rdma_ucm_port_space::RDMA_PS_IB => QpType(request.qp_type.into()),
                    _ => QpType::UD,
                };
                self.set_type(id, qp_type);
                let mut state = self.state();
                state.keys.push((id, request.uid));
                state.creates.push(request);
                answer(command.buffer, rdma_ucm_create_id_resp { id }.as_bytes());
            }
            RDMA_USER_CM_CMD_JOIN_MCAST => {
                let request: rdma_ucm_join_mcast = read(command.request);
                alive(request.id)?;
                let id = self.make();
                let mut state = self.state();
                state.keys.push((id, request.uid));
                state.joins.push(request);
                answer(command.buffer, rdma_ucm_create_id_resp { id }.as_bytes());
            }
            RDMA_USER_CM_CMD_DESTROY_ID | RDMA_USER_CM_CMD_LEAVE_MCAST => {
                let request: rdma_ucm_destroy_id = read(command.request);
                alive(request.id)?;
                let mut state = self.state();
                state.live.remove(&request.id);
                answer(command.buffer, rdma_ucm_destroy_id_resp::default().as_bytes());
            }
            RDMA_USER_CM_CMD_GET_EVENT => {
                // In blocking mode this waits.
                rustix::io::read(&self.0.readable, &mut [0])?;
                let event = self.state().events.pop_front().ok_or(Errno::AGAIN)?;
                answer(command.buffer, event.as_bytes());
            }
            RDMA_USER_CM_CMD_BIND => self.state().binds.push(read(command.request)),
            RDMA_USER_CM_CMD_RESOLVE_ADDR => self.state().resolves.push(read(command.request)),
            RDMA_USER_CM_CMD_RESOLVE_IB_SERVICE => {
                let request: rdma_ucm_resolve_ib_service = read(command.request);
                alive(request.id)?;
                self.state().wanted.push(request);
            }
            RDMA_USER_CM_CMD_QUERY => {
                let request: rdma_ucm_query = read(command.request);
                alive(request.id)?;
                let CommandMemory::Out(out) = command.buffer else {
                    panic!("no room for an answer")
                };
                let bytes = self.state().told(&request, out.len());
                out.get_mut(..bytes.len()).expect("room").copy_from_slice(&bytes);
            }
            RDMA_USER_CM_CMD_INIT_QP_ATTR => {
                let request: rdma_ucm_init_qp_attr = read(command.request);
                alive(request.id)?;
                let qp_type = self.qp_type(request.id);
                let mut attr = qp_attr(request.qp_state, qp_type);
                let state = self.state();
                (attr.port_num, attr.ah_attr.port_num) = (state.port, state.port);
                attr.ah_attr.grh.dgid = state.peer;
                answer(command.buffer, attr.as_bytes());
            }
            RDMA_USER_CM_CMD_SET_OPTION => {
                let request: rdma_ucm_set_option = read(command.request);
                let CommandMemory::In(value) = command.buffer else {
                    panic!("an option without value")
                };
                assert_eq!(value.len(), request.optlen as usize);
                self.state().options.push((request.optname, value.to_vec()));
                if (request.level, request.optname) == (RDMA_OPTION_IB, RDMA_OPTION_IB_PATH) {
                    self.state().paths.insert(request.id, value.to_vec());
                    self.tell(request.id, rdma_cm_event_type::RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
                }
            }
            RDMA_USER_CM_CMD_CONNECT => {
                let request: rdma_ucm_connect = read(command.request);
                alive(request.id)?;
                self.state().connects.push(request);
            }
            RDMA_USER_CM_CMD_REJECT => {
                let request: rdma_ucm_reject = read(command.request);
                alive(request.id)?;
            }
            RDMA_USER_CM_CMD_WRITE_CM_EVENT => {
                let request: rdma_ucm_write_cm_event = read(command.request);
                alive(request.id)?;
                let (uid, kind) = (self.key(request.id), rdma_cm_event_type(request.event));
                self.tell_param(uid, request.id, kind, 0, &request.param);
            }
            RDMA_USER_CM_CMD_ACCEPT => {
                let request: rdma_ucm_accept = read(command.request);
                alive(request.id)?;
                let mut state = self.state();
                if request.conn_param.valid != 0 {
                    state.keys.push((request.id, request.uid));
                }
                state.accepts.push(request);
            }
            _ => {}
        }
        Ok(())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.readable.as_fd()
    }
}

/// The attributes that the kernel returns on RoCE for a change to a state: of UD queue pairs the same for each
/// (`cma_ib_init_qp_attr`), of others those that the change needs (`ib_cm_init_qp_attr`).
fn qp_attr(state: u32, qp_type: QpType) -> ib_uverbs_qp_attr {
    let mut attr = ib_uverbs_qp_attr::new_zeroed();
    attr.qp_state = state;
    attr.path_mtu = 3;
    attr.dest_qp_num = 0x77;
    attr.ah_attr.is_global = 1;
    attr.timeout = 14;
    attr.retry_cnt = 6;
    attr.rnr_retry = 7;
    attr.max_rd_atomic = 1;
    attr.max_dest_rd_atomic = 1;
    attr.qkey = 0x0123_4567;
    let mask = match state {
        _ if qp_type == QpType::UD => Mask::IB_QP_QKEY | Mask::IB_QP_PKEY_INDEX | Mask::IB_QP_PORT,
        1 => Mask::IB_QP_ACCESS_FLAGS | Mask::IB_QP_PKEY_INDEX | Mask::IB_QP_PORT,
        2 => {
            let all =
                Mask::IB_QP_AV | Mask::IB_QP_PATH_MTU | Mask::IB_QP_DEST_QPN | Mask::IB_QP_RQ_PSN;
            match qp_type {
                QpType::RC | QpType::XRC_TGT => {
                    all | Mask::IB_QP_MAX_DEST_RD_ATOMIC | Mask::IB_QP_MIN_RNR_TIMER
                }
                _ => all,
            }
        }
        _ => match qp_type {
            QpType::RC | QpType::XRC_INI => {
                Mask::IB_QP_SQ_PSN
                    | Mask::IB_QP_TIMEOUT
                    | Mask::IB_QP_RETRY_CNT
                    | Mask::IB_QP_RNR_RETRY
                    | Mask::IB_QP_MAX_QP_RD_ATOMIC
            }
            QpType::XRC_TGT => Mask::IB_QP_SQ_PSN | Mask::IB_QP_TIMEOUT,
            _ => Mask::IB_QP_SQ_PSN,
        },
    };
    attr.qp_attr_mask = (mask | Mask::IB_QP_STATE).bits();
    attr
}
