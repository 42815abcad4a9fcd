//! The objects of a scripted kernel file, and the commands on them.

use super::attrs::{self, Responses};
use super::ring::KernelRing;
use super::socket::{self, Socket};
use super::{Deviations, Op};
use crate::uverbs::command::Command;
use rustix::io::Errno;
use rustix::param::page_size;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use uverbs_uapi::async_event::UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE;
use uverbs_uapi::context as context_ids;
use uverbs_uapi::device as device_ids;
use uverbs_uapi::object::*;
use uverbs_uapi::rxe::{
    mminfo, rxe_create_cq_resp, rxe_create_qp_resp, rxe_create_srq_resp, rxe_recv_wqe,
    rxe_send_wqe, rxe_sge,
};
use uverbs_uapi::wc::ib_uverbs_wc;
use uverbs_uapi::{cq, mr, qp, srq};

pub(super) type Result<T> = std::result::Result<T, Errno>;

pub(super) const MAX_CQE: u32 = 32767;
pub(super) const MAX_WR: u32 = 1 << 14;
pub(super) const MAX_SGE: u32 = 32;

/// A queue of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    Cq,
    Send,
    /// Of a queue pair or a shared receive queue.
    Recv,
}

/// A kernel object.
#[derive(Clone, Debug, Default)]
pub(crate) struct ScriptedObject {
    pub(crate) object: u16,
    pub(crate) user_handle: u64,
    /// Handles of the objects that it depends on, which must be destroyed after it.
    pub(crate) stands_on: Vec<u32>,
    /// Of a queue pair: number and state. Of an address handle: its number. Of a region: its key.
    pub(crate) number: u32,
    pub(crate) state: u8,
    /// Of a queue pair: its port, from INIT on.
    pub(crate) port: u8,
    /// Entries, of a shared receive queue, and its limit.
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) limit: u32,
    /// Of a queue: the descriptor that its events go to.
    pub(crate) events: Option<i32>,
    /// Of a completion queue: the descriptor of its channel.
    pub(crate) channel: Option<i32>,
    /// Of a memory region: where it starts, here and for peers, its length and access.
    pub(crate) start: u64,
    pub(crate) iova: u64,
    pub(crate) length: u64,
    pub(crate) access: u32,
}

/// Attributes of a command, with their bytes.
type Inputs = Vec<(u16, Vec<u8>)>;

#[derive(Debug)]
pub(super) struct State {
    tag: Arc<str>,
    pub(super) deviations: Deviations,
    pub(super) ports: Vec<super::ScriptedPort>,
    pub(super) log: Vec<Op>,
    /// The attributes that each command passed.
    pub(super) asked: Vec<(Op, Inputs)>,
    /// The driver's parts of the commands that made the queues of mlx5, by their handles.
    pub(super) told: BTreeMap<u32, Vec<u8>>,
    pub(super) complaints: Vec<String>,
    pub(super) objects: BTreeMap<u32, ScriptedObject>,
    pub(super) next_qpn: u32,
    pub(super) open_files: u32,
    pub(super) left_at_close: Option<Vec<(u16, u32)>>,
    has_context: bool,
    next_handle: u32,
    next_offset: u64,
    dead: BTreeSet<u32>,
    stolen: BTreeSet<u32>,
    rings: BTreeMap<(u32, Role), Arc<KernelRing>>,
    /// The queues that are not mapped yet. Each can be mapped once.
    unclaimed: BTreeMap<u64, Arc<KernelRing>>,
    pub(super) events_closed: bool,
    /// The kernel's end of the event file.
    events: Option<Socket>,
    /// The kernel's ends of the channels, by the descriptor of the other end.
    pub(super) channels: BTreeMap<i32, Socket>,
}

impl State {
    pub(super) fn new(tag: Arc<str>) -> State {
        State {
            tag,
            deviations: Deviations::default(),
            asked: Vec::new(),
            told: BTreeMap::new(),
            ports: vec![super::ScriptedPort::ETHERNET],
            log: Vec::new(),
            complaints: Vec::new(),
            objects: BTreeMap::new(),
            next_qpn: 16,
            open_files: 0,
            left_at_close: None,
            has_context: false,
            next_handle: 0,
            next_offset: 0,
            dead: BTreeSet::new(),
            stolen: BTreeSet::new(),
            rings: BTreeMap::new(),
            unclaimed: BTreeMap::new(),
            events_closed: false,
            events: None,
            channels: BTreeMap::new(),
        }
    }

    /// Closes a descriptor of the file, which has these objects.
    pub(super) fn close(&mut self, live: Vec<(u16, u32)>) {
        self.open_files -= 1;
        if self.open_files == 0 {
            self.left_at_close = Some(live);
            self.objects.clear();
        }
    }

    pub(super) fn vanish(&mut self) {
        self.deviations.vanished = true;
        self.dead.extend(self.objects.keys());
        self.objects.clear();
    }

    /// Destroys an object without the library's knowledge.
    pub(super) fn steal(&mut self, handle: u32) {
        self.objects.remove(&handle).expect("a live object");
        self.stolen.insert(handle);
    }

    /// Counts one step down to the failure that the test asked for.
    pub(super) fn step(&mut self) -> Result<()> {
        match &mut self.deviations.countdown {
            Some((1, errno)) => {
                let errno = *errno;
                self.deviations.countdown = None;
                Err(errno)
            }
            Some((steps, _)) => {
                *steps -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    pub(super) fn claim(&mut self, offset: u64, length: usize) -> Result<Arc<KernelRing>> {
        self.step()?;
        if self.deviations.vanished {
            return Err(Errno::IO);
        }
        match self.unclaimed.get(&offset) {
            Some(ring) if length <= ring.size() as usize => {}
            _ => return Err(Errno::INVAL),
        }
        self.unclaimed.remove(&offset).ok_or(Errno::INVAL)
    }

    pub(super) fn ring(&self, handle: u32, role: Role) -> Arc<KernelRing> {
        self.rings.get(&(handle, role)).cloned().expect("a queue of a live object")
    }

    #[cfg(feature = "tokio")]
    pub(super) fn break_events(&self) {
        // Shutting down one end leaves an error at the other.
        let events = self.events.as_ref().expect("an event file");
        rustix::net::connect_unspec(events).expect("nobody");
    }

    pub(super) fn raise(&self, event: &[u8]) {
        self.events.as_ref().expect("an event file").send(event).expect("room for an event");
    }

    pub(super) fn notify(&self, cq: u32, event: &[u8]) {
        let channel = self.objects.get(&cq).and_then(|cq| cq.channel).expect("a channel");
        self.channels.get(&channel).expect("its other end").send(event).expect("room");
    }

    /// Counts and logs a command. Returns the number of bytes after which its outputs end.
    ///
    /// # Errors
    ///
    /// The test's, for a command that it refuses.
    pub(super) fn admit(&mut self, op: Op, command: &Command<'_>) -> Result<usize> {
        self.log.push(op);
        self.asked.push((op, command.inputs()));
        self.step()?;
        if let Some((_, errno)) = self.deviations.refused.iter().find(|(other, _)| *other == op) {
            return Err(*errno);
        }
        let destroyed = command.destroyed();
        if self.deviations.leaving && destroyed.is_none() {
            return Err(Errno::IO);
        }
        let undestroyable = &self.deviations.undestroyable;
        let kept = undestroyable.iter().find(|(handle, _)| Some(*handle) == destroyed);
        if let Some((_, errno)) = kept.filter(|_| !self.deviations.vanished) {
            return Err(*errno);
        }
        let short = self.deviations.short.iter().find(|(other, _)| *other == op);
        Ok(short.map_or(usize::MAX, |(_, limit)| *limit))
    }

    pub(super) fn run(&mut self, op: Op, command: &mut Command<'_>) -> Result<()> {
        let limit = self.admit(op, command)?;
        if self.deviations.vanished {
            // The kernel still destroys the objects of the file.
            let held = command.destroyed().is_some_and(|handle| self.dead.remove(&handle));
            return if held { Ok(()) } else { Err(Errno::IO) };
        }
        if self.deviations.granted.contains(&op) {
            return Ok(());
        }
        if op != Op::GET_CONTEXT && !self.has_context {
            return Err(Errno::INVAL);
        }
        if let Some(handle) = command.destroyed() {
            return self.destroy(handle, command, limit);
        }
        let responses = Responses { command, limit };
        match op {
            Op::Method { object, method } => self.run_method(object, method, responses),
            Op::Write(number) => self.run_write(number, responses),
        }
    }

    fn run_method(&mut self, object: u16, method: u16, mut to: Responses<'_, '_>) -> Result<()> {
        match (object, method) {
            (UVERBS_OBJECT_DEVICE, device_ids::UVERBS_METHOD_GET_CONTEXT) => {
                if self.has_context {
                    return Err(Errno::INVAL);
                }
                self.has_context = true;
                to.put(context_ids::UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS, &2u32);
                to.put(context_ids::UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT, &1u64);
                Ok(())
            }
            (UVERBS_OBJECT_DEVICE, device_ids::UVERBS_METHOD_INFO_HANDLES) => {
                let asked = attrs::u32(to.command, device_ids::UVERBS_ATTR_INFO_OBJECT_ID)?;
                let of_kind = |(handle, object): (&u32, &ScriptedObject)| {
                    (u32::from(object.object) == asked).then_some(*handle)
                };
                let handles: Vec<u32> = self.objects.iter().filter_map(of_kind).collect();
                let room = attrs::room(to.command, device_ids::UVERBS_ATTR_INFO_HANDLES_LIST) / 4;
                let listed = &handles[..handles.len().min(room)];
                let bytes: Vec<u8> =
                    listed.iter().flat_map(|handle| handle.to_ne_bytes()).collect();
                to.put(device_ids::UVERBS_ATTR_INFO_TOTAL_HANDLES, &(listed.len() as u32));
                to.put_bytes(device_ids::UVERBS_ATTR_INFO_HANDLES_LIST, &bytes);
                Ok(())
            }
            (UVERBS_OBJECT_DEVICE, device_ids::UVERBS_METHOD_QUERY_PORT) => {
                self.query_port(&mut to)
            }
            (UVERBS_OBJECT_DEVICE, device_ids::UVERBS_METHOD_QUERY_PORT_SPEED) => {
                self.query_port_speed(&mut to)
            }
            (UVERBS_OBJECT_DEVICE, device_ids::UVERBS_METHOD_QUERY_GID_ENTRY) => {
                self.query_gid_entry(&mut to)
            }
            (UVERBS_OBJECT_DEVICE, device_ids::UVERBS_METHOD_QUERY_GID_TABLE) => {
                self.query_gid_table(&mut to)
            }
            (UVERBS_OBJECT_ASYNC_EVENT, 0) if self.events_closed => {
                // A read of `/proc/self/mem` at address 0 answers EIO.
                let memory = std::fs::File::open("/proc/self/mem").map_err(|_| Errno::MFILE)?;
                to.made_fd(UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE, OwnedFd::from(memory))
            }
            (UVERBS_OBJECT_ASYNC_EVENT, 0) => {
                let (ours, theirs) = socket::pair().map_err(|_| Errno::MFILE)?;
                self.events = Some(ours);
                to.made_fd(UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE, OwnedFd::from(theirs))
            }
            (UVERBS_OBJECT_MR, mr::UVERBS_METHOD_QUERY_MR) => {
                let handle = attrs::handle(to.command, mr::UVERBS_ATTR_QUERY_MR_HANDLE);
                // An importer may ask for any handle.
                let region = handle.and_then(|handle| self.objects.get(&handle));
                let Some(region) = region.filter(|region| region.object == UVERBS_OBJECT_MR) else {
                    return Err(Errno::NOENT);
                };
                let (key, length, iova) = (region.number, region.length, region.iova);
                to.put(mr::UVERBS_ATTR_QUERY_MR_RESP_LKEY, &key);
                to.put(mr::UVERBS_ATTR_QUERY_MR_RESP_RKEY, &key);
                to.put(mr::UVERBS_ATTR_QUERY_MR_RESP_LENGTH, &length);
                to.put(mr::UVERBS_ATTR_QUERY_MR_RESP_IOVA, &iova);
                Ok(())
            }
            (UVERBS_OBJECT_CQ, cq::UVERBS_METHOD_CQ_CREATE) => self.create_cq(to),
            (UVERBS_OBJECT_QP, qp::UVERBS_METHOD_QP_CREATE) => self.create_qp(to),
            (UVERBS_OBJECT_SRQ, srq::UVERBS_METHOD_SRQ_CREATE) => self.create_srq(to),
            _ => Err(Errno::PROTONOSUPPORT),
        }
    }

    fn create_cq(&mut self, mut to: Responses<'_, '_>) -> Result<()> {
        let cqe = attrs::u32(to.command, cq::UVERBS_ATTR_CREATE_CQ_CQE)?;
        let vector = attrs::u32(to.command, cq::UVERBS_ATTR_CREATE_CQ_COMP_VECTOR)?;
        if cqe == 0 || cqe > MAX_CQE || vector >= 2 {
            return Err(Errno::INVAL);
        }
        let room = attrs::room(to.command, UVERBS_ATTR_UHW_OUT);
        if room < size_of::<rxe_create_cq_resp>() {
            return Err(Errno::INVAL);
        }
        let user_handle = attrs::int(to.command, cq::UVERBS_ATTR_CREATE_CQ_USER_HANDLE);
        let channel = attrs::fd(to.command, cq::UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL);
        let events = attrs::fd(to.command, cq::UVERBS_ATTR_CREATE_CQ_EVENT_FD);
        let handle = self.add(ScriptedObject {
            object: UVERBS_OBJECT_CQ,
            user_handle: user_handle.unwrap_or(0),
            events,
            channel,
            ..Default::default()
        });
        let ring = self.add_ring(handle, Role::Cq, "cq", cqe, cq_element());
        to.made(cq::UVERBS_ATTR_CREATE_CQ_HANDLE, handle)?;
        to.put(cq::UVERBS_ATTR_CREATE_CQ_RESP_CQE, &ring.0.capacity());
        to.put(UVERBS_ATTR_UHW_OUT, &rxe_create_cq_resp { mi: ring.1 });
        Ok(())
    }

    fn create_qp(&mut self, mut to: Responses<'_, '_>) -> Result<()> {
        let mut cap: qp::ib_uverbs_qp_cap =
            attrs::input(to.command, qp::UVERBS_ATTR_CREATE_QP_CAP)?;
        let qp_type = attrs::u32(to.command, qp::UVERBS_ATTR_CREATE_QP_TYPE)?;
        if !(2..=4).contains(&qp_type) {
            return Err(Errno::OPNOTSUPP);
        }
        if attrs::has(to.command, UVERBS_ATTR_UHW_IN)
            || attrs::room(to.command, UVERBS_ATTR_UHW_OUT) < size_of::<rxe_create_qp_resp>()
            || cap.max_send_wr.max(cap.max_recv_wr) > MAX_WR
            || cap.max_send_sge.max(cap.max_recv_sge) > MAX_SGE
            || cap.max_inline_data > MAX_SGE * 16
        {
            return Err(Errno::INVAL);
        }
        let stands_on = self.parents_of_qp(to.command)?;
        let user_handle = attrs::int(to.command, qp::UVERBS_ATTR_CREATE_QP_USER_HANDLE);
        let events = attrs::fd(to.command, qp::UVERBS_ATTR_CREATE_QP_EVENT_FD);
        let number = self.next_qpn;
        self.next_qpn += 1;
        let handle = self.add(ScriptedObject {
            object: UVERBS_OBJECT_QP,
            user_handle: user_handle.unwrap_or(0),
            stands_on,
            number,
            events,
            ..Default::default()
        });
        // rxe gives requests one payload area, which either kind may fill.
        let payload = (cap.max_send_sge * 16).max(cap.max_inline_data);
        cap.max_send_sge = payload / 16;
        cap.max_inline_data = payload;
        let bare = self.deviations.bare_elements;
        let element = size_of::<rxe_send_wqe>() + if bare { 0 } else { payload as usize };
        let (send, sq_mi) = self.add_ring(handle, Role::Send, "sq", cap.max_send_wr, element);
        cap.max_send_wr = send.capacity();
        let mut rq_mi = mminfo::default();
        if !attrs::has(to.command, qp::UVERBS_ATTR_CREATE_QP_SRQ_HANDLE) {
            let element = recv_element(if bare { 0 } else { cap.max_recv_sge });
            let (recv, mi) = self.add_ring(handle, Role::Recv, "rq", cap.max_recv_wr, element);
            cap.max_recv_wr = recv.capacity();
            rq_mi = mi;
        }
        to.made(qp::UVERBS_ATTR_CREATE_QP_HANDLE, handle)?;
        to.put(qp::UVERBS_ATTR_CREATE_QP_RESP_CAP, &cap);
        to.put(qp::UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, &number);
        to.put(UVERBS_ATTR_UHW_OUT, &rxe_create_qp_resp { rq_mi, sq_mi });
        Ok(())
    }

    /// The objects that a queue pair depends on. All must exist.
    fn parents_of_qp(&mut self, command: &Command<'_>) -> Result<Vec<u32>> {
        let mut parents = Vec::new();
        for (id, object) in [
            (qp::UVERBS_ATTR_CREATE_QP_PD_HANDLE, UVERBS_OBJECT_PD),
            (qp::UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE, UVERBS_OBJECT_CQ),
            (qp::UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE, UVERBS_OBJECT_CQ),
        ] {
            let handle = attrs::handle(command, id).ok_or(Errno::NOENT)?;
            parents.push(self.expect("create_qp", handle, object)?);
        }
        if let Some(srq) = attrs::handle(command, qp::UVERBS_ATTR_CREATE_QP_SRQ_HANDLE) {
            parents.push(self.expect("create_qp", srq, UVERBS_OBJECT_SRQ)?);
        }
        Ok(parents)
    }

    fn create_srq(&mut self, mut to: Responses<'_, '_>) -> Result<()> {
        let max_wr = attrs::u32(to.command, srq::UVERBS_ATTR_CREATE_SRQ_MAX_WR)?;
        let max_sge = attrs::u32(to.command, srq::UVERBS_ATTR_CREATE_SRQ_MAX_SGE)?;
        let limit = attrs::u32(to.command, srq::UVERBS_ATTR_CREATE_SRQ_LIMIT)?;
        if max_wr == 0 || max_wr > MAX_WR || max_sge > MAX_SGE || limit > max_wr {
            return Err(Errno::INVAL);
        }
        let pd =
            attrs::handle(to.command, srq::UVERBS_ATTR_CREATE_SRQ_PD_HANDLE).ok_or(Errno::NOENT)?;
        let pd = self.expect("create_srq", pd, UVERBS_OBJECT_PD)?;
        let user_handle = attrs::int(to.command, srq::UVERBS_ATTR_CREATE_SRQ_USER_HANDLE);
        let events = attrs::fd(to.command, srq::UVERBS_ATTR_CREATE_SRQ_EVENT_FD);
        let handle = self.add(ScriptedObject {
            object: UVERBS_OBJECT_SRQ,
            user_handle: user_handle.unwrap_or(0),
            stands_on: vec![pd],
            max_sge,
            limit,
            events,
            ..Default::default()
        });
        let (ring, mi) = self.add_ring(handle, Role::Recv, "srq", max_wr, recv_element(max_sge));
        self.object(handle).max_wr = ring.capacity();
        to.made(srq::UVERBS_ATTR_CREATE_SRQ_HANDLE, handle)?;
        to.put(srq::UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR, &ring.capacity());
        to.put(srq::UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE, &max_sge);
        to.put(
            UVERBS_ATTR_UHW_OUT,
            &rxe_create_srq_resp { mi, srq_num: handle + 0x2_0001, reserved: 0 },
        );
        Ok(())
    }

    fn destroy(&mut self, handle: u32, command: &mut Command<'_>, limit: usize) -> Result<()> {
        if self.stolen.remove(&handle) {
            return Err(Errno::NOENT);
        }
        let Some(object) = self.objects.get(&handle).map(|object| object.object) else {
            let twice = if self.dead.contains(&handle) { "again" } else { "without making it" };
            self.complaints.push(format!("destroying handle {handle} {twice}"));
            return Err(Errno::NOENT);
        };
        if Op::of(command) != Op::destroy(object) {
            self.complaints.push(format!("handle {handle} is an object of kind {object}"));
            return Err(Errno::INVAL);
        }
        if self.objects.values().any(|object| object.stands_on.contains(&handle)) {
            self.complaints.push(format!("handle {handle} is destroyed before its dependants"));
            return Err(Errno::BUSY);
        }
        self.objects.remove(&handle);
        self.dead.insert(handle);
        self.rings.retain(|(owner, _), _| *owner != handle);
        let mut to = Responses { command, limit };
        to.put_bytes(1, &[0; 8]);
        Ok(())
    }

    pub(super) fn add(&mut self, object: ScriptedObject) -> u32 {
        let handle = self.next_handle;
        self.next_handle += 1;
        self.objects.insert(handle, object);
        handle
    }

    pub(super) fn add_on(&mut self, pd: u32, object: u16) -> u32 {
        self.add(ScriptedObject { object, stands_on: vec![pd], ..Default::default() })
    }

    pub(super) fn object(&mut self, handle: u32) -> &mut ScriptedObject {
        self.objects.get_mut(&handle).expect("the caller checked the handle")
    }

    pub(super) fn add_ring(
        &mut self,
        handle: u32,
        role: Role,
        name: &str,
        entries: u32,
        element: usize,
    ) -> (Arc<KernelRing>, mminfo) {
        let name = format!("{}{name}", self.tag);
        let ring = Arc::new(KernelRing::new(&name, entries, element));
        let offset = self.next_offset;
        self.next_offset += u64::from(ring.size()).next_multiple_of(page_size() as u64);
        self.rings.insert((handle, role), ring.clone());
        self.unclaimed.insert(offset, ring.clone());
        (ring.clone(), mminfo { offset, size: ring.size(), pad: 0 })
    }

    /// A handle that a command names must exist and be of the right kind.
    pub(super) fn expect(&mut self, verb: &str, handle: u32, object: u16) -> Result<u32> {
        match self.objects.get(&handle) {
            Some(found) if found.object == object => Ok(handle),
            _ => {
                self.complaints.push(format!("{verb} names handle {handle}, no such {object}"));
                Err(Errno::NOENT)
            }
        }
    }
}

/// rxe's own form of a completion is longer, in the same slot.
pub(super) fn cq_element() -> usize {
    size_of::<ib_uverbs_wc>() + 24
}

pub(super) fn recv_element(max_sge: u32) -> usize {
    size_of::<rxe_recv_wqe>() + max_sge as usize * size_of::<rxe_sge>()
}
