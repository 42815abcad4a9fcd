//! The uverbs part of the kernel: open files, their objects, and the methods that make and use them.
//!
//! Pairs with `drivers/infiniband/core`: a file for each noun, as `uverbs_std_types_*.c` has. The driver's part
//! of a method stands beside it, since there is one driver.

mod ah;
mod context;
mod cq;
mod devx;
mod dm;
mod flow;
mod limits;
mod mcast;
mod mmap;
mod mr;
mod pd;
mod port;
mod qp;
mod raw;
mod srq;
mod states;
#[cfg(test)]
#[allow(unsafe_code, reason = "commands name memory of the test, by address")]
mod tests;
mod uar;
mod var;
mod xrcd;

pub(crate) use context::guid;
pub(crate) use devx::Subscription;
pub(crate) use flow::Flows;
pub(crate) use limits::Limits;
pub(crate) use mcast::Membership;
pub(crate) use mmap::{ClockPages, Lease, Leaving, Shown};
pub(crate) use qp::Kind;
pub(crate) use raw::RawQp;
pub(crate) use xrcd::Xrcd;

use dm::DeviceMemory;
use flow::Rule;
use mr::Region;

use crate::call::{Call, Result};
use crate::cm::{CmFileId, Manager, Ports};
use crate::driver::{
    Driver, IB_EVENT_DEVICE_FATAL, IB_EVENT_PORT_ACTIVE, IB_EVENT_PORT_ERR, OpenerId, Reports,
    report, set_uid,
};
use crate::events::{Delivery, EventFile, Inode, inode, is_hung_up};
use crate::faults::{Rates, Verb};
use crate::history::{self, History};
use crate::memory::{DmaBuf, Lent, Pinned, User};
use crate::seeds::Prints;
use crate::udp::{Datagram, Transmitter, UdpCounters};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use uverbs_connectx::decisions::Decisions;
use uverbs_connectx::fabric::Fabric as Switch;
use uverbs_connectx::function::Function;
use uverbs_connectx::network::Traffic;
use uverbs_uapi::device::{
    UVERBS_ATTR_CORE_IN, UVERBS_ATTR_CORE_OUT, UVERBS_ATTR_WRITE_CMD, UVERBS_METHOD_INVOKE_WRITE,
};
use uverbs_uapi::mlx5::object::{
    MLX5_IB_OBJECT_DEVX, MLX5_IB_OBJECT_DEVX_OBJ, MLX5_IB_OBJECT_DEVX_UMEM, MLX5_IB_OBJECT_UAR,
    MLX5_IB_OBJECT_VAR,
};
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::object::{
    UVERBS_ATTR_UHW_IN, UVERBS_ATTR_UHW_OUT, UVERBS_OBJECT_AH, UVERBS_OBJECT_CQ,
    UVERBS_OBJECT_DEVICE, UVERBS_OBJECT_DM, UVERBS_OBJECT_FLOW, UVERBS_OBJECT_MR, UVERBS_OBJECT_MW,
    UVERBS_OBJECT_PD, UVERBS_OBJECT_QP, UVERBS_OBJECT_SRQ, UVERBS_OBJECT_XRCD,
};

/// An open file, by a number that is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FileId(pub(crate) u64);

/// A method of an object: `DECLARE_UVERBS_NAMED_METHOD`.
struct Method {
    object: u16,
    method: u16,
    /// The attributes that it knows.
    attrs: &'static [u16],
    run: fn(&mut Kernel, &mut Call<'_>) -> Result<()>,
}

/// The method that destroys an object: the handle is its first attribute, a response with counts of events its
/// second.
const fn destroying(object: u16, method: u16) -> Method {
    Method { object, method, attrs: &[0, 1], run: destroy }
}

fn destroy(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let handle = call.handle(0)?;
    let file = kernel.file_mut(call.file)?;
    if file.is_disassociated {
        // The object went with the device, and its handle goes now: `uobj_get_destroy`.
        if !file.handles_left.remove(&handle) {
            return Err(Errno::NOENT);
        }
        call.put_bytes(1, &[]);
        return Ok(());
    }
    if kernel.object(call.file, handle)?.kind() != call.header.object_id {
        return Err(Errno::INVAL);
    }
    kernel.destroy(call.file, handle)?;
    call.put_bytes(1, &[]);
    Ok(())
}

/// An older command: `DECLARE_UVERBS_WRITE` and `DECLARE_UVERBS_WRITE_EX`.
struct Write {
    command: u32,
    run: fn(&mut Kernel, &mut Call<'_>) -> Result<()>,
}

/// All methods but `INVOKE_WRITE`.
const METHODS: &[&[Method]] = &[
    context::METHODS,
    port::METHODS,
    pd::METHODS,
    mr::METHODS,
    cq::METHODS,
    qp::METHODS,
    srq::METHODS,
    ah::METHODS,
    xrcd::METHODS,
    dm::METHODS,
    flow::METHODS,
    uar::METHODS,
    var::METHODS,
    devx::METHODS,
];

/// All older commands.
const WRITES: &[&[Write]] = &[
    context::WRITES,
    pd::WRITES,
    mr::WRITES,
    cq::WRITES,
    qp::WRITES,
    srq::WRITES,
    ah::WRITES,
    xrcd::WRITES,
    mcast::WRITES,
    flow::WRITES,
];

/// The least bytes of a command's request and response. The structs of extended commands may grow.
fn sizes(command: u32) -> (usize, usize) {
    use uverbs_uapi::write::*;
    use uverbs_uapi::{ah, mr, mw, pd, qp, srq};
    const fn of<I, O>() -> (usize, usize) {
        (size_of::<I>(), size_of::<O>())
    }
    match command {
        IB_USER_VERBS_CMD_ALLOC_PD => of::<pd::ib_uverbs_alloc_pd, pd::ib_uverbs_alloc_pd_resp>(),
        IB_USER_VERBS_CMD_CREATE_AH => {
            of::<ah::ib_uverbs_create_ah, ah::ib_uverbs_create_ah_resp>()
        }
        IB_USER_VERBS_CMD_REG_MR => of::<mr::ib_uverbs_reg_mr, mr::ib_uverbs_reg_mr_resp>(),
        IB_USER_VERBS_CMD_REREG_MR => of::<mr::ib_uverbs_rereg_mr, mr::ib_uverbs_rereg_mr_resp>(),
        IB_USER_VERBS_CMD_ALLOC_MW => of::<mw::ib_uverbs_alloc_mw, mw::ib_uverbs_alloc_mw_resp>(),
        IB_USER_VERBS_CMD_QUERY_QP => of::<qp::ib_uverbs_query_qp, qp::ib_uverbs_query_qp_resp>(),
        IB_USER_VERBS_CMD_MODIFY_QP => of::<qp::ib_uverbs_modify_qp, ()>(),
        IB_USER_VERBS_CMD_OPEN_QP => of::<qp::ib_uverbs_open_qp, qp::ib_uverbs_create_qp_resp>(),
        IB_USER_VERBS_CMD_QUERY_SRQ => {
            of::<srq::ib_uverbs_query_srq, srq::ib_uverbs_query_srq_resp>()
        }
        IB_USER_VERBS_CMD_MODIFY_SRQ => of::<srq::ib_uverbs_modify_srq, ()>(),
        _ => (0, 0),
    }
}

const INVOKE_WRITE_ATTRS: [u16; 5] = [
    UVERBS_ATTR_CORE_IN,
    UVERBS_ATTR_CORE_OUT,
    UVERBS_ATTR_WRITE_CMD,
    UVERBS_ATTR_UHW_IN,
    UVERBS_ATTR_UHW_OUT,
];

/// An object of a file: `struct ib_uobject`.
#[derive(Clone, Debug)]
pub(crate) enum Object {
    Pd {
        number: u32,
    },
    Mr(Region),
    Mw {
        key: u32,
    },
    Cq {
        number: u32,
    },
    Qp {
        number: u32,
        opener: OpenerId,
    },
    Srq {
        number: u32,
    },
    Ah,
    Xrcd {
        number: u32,
    },
    Dm(DeviceMemory),
    Flow(Rule),
    Uar {
        number: u32,
        page: u64,
    },
    Var {
        page: u64,
    },
    /// An object that a command made, and the command that destroys it.
    Devx {
        identity: devx::Identity,
        destroy: u16,
    },
    Umem {
        number: u32,
    },
}

impl Object {
    /// The kind, as commands number it.
    fn kind(&self) -> u16 {
        match self {
            Object::Pd { .. } => UVERBS_OBJECT_PD,
            Object::Mr(_) => UVERBS_OBJECT_MR,
            Object::Mw { .. } => UVERBS_OBJECT_MW,
            Object::Cq { .. } => UVERBS_OBJECT_CQ,
            Object::Qp { .. } => UVERBS_OBJECT_QP,
            Object::Srq { .. } => UVERBS_OBJECT_SRQ,
            Object::Ah => UVERBS_OBJECT_AH,
            Object::Xrcd { .. } => UVERBS_OBJECT_XRCD,
            Object::Dm(_) => UVERBS_OBJECT_DM,
            Object::Flow(_) => UVERBS_OBJECT_FLOW,
            Object::Uar { .. } => MLX5_IB_OBJECT_UAR,
            Object::Var { .. } => MLX5_IB_OBJECT_VAR,
            Object::Devx { .. } => MLX5_IB_OBJECT_DEVX_OBJ,
            Object::Umem { .. } => MLX5_IB_OBJECT_DEVX_UMEM,
        }
    }

    /// Whether a library keeps such objects as long as a context: doorbell pages.
    fn is_librarys(&self) -> bool {
        matches!(self, Object::Uar { .. })
    }
}

impl std::fmt::Display for Object {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Object::Pd { number } => write!(f, "pd {number:#x}"),
            Object::Mr(Region { key, length, .. }) => write!(f, "mr {key:#x} of {length} bytes"),
            Object::Mw { key } => write!(f, "mw {key:#x}"),
            Object::Cq { number } => write!(f, "cq {number:#x}"),
            Object::Qp { number, .. } => write!(f, "qp {number:#x}"),
            Object::Srq { number } => write!(f, "srq {number:#x}"),
            Object::Ah => f.write_str("ah"),
            Object::Xrcd { number } => write!(f, "xrcd {number:#x}"),
            Object::Dm(_) => f.write_str("dm"),
            Object::Flow(_) => f.write_str("flow"),
            Object::Uar { number, .. } => write!(f, "uar {number:#x}"),
            Object::Var { .. } => f.write_str("var"),
            Object::Devx { identity, .. } => write!(f, "devx object {:#x}", identity.number),
            Object::Umem { number } => write!(f, "umem {number:#x}"),
        }
    }
}

/// An object, the objects that it uses, and the number of those that use it.
#[derive(Debug)]
struct Entry {
    object: Object,
    uses: Vec<u32>,
    users: u32,
    /// Its place in the order of creation.
    age: u64,
    /// The ranges that it lends to the device.
    lent: Lent,
}

/// An open file: `struct ib_uverbs_file`.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) device: usize,
    pub(crate) has_context: bool,
    /// Whether its objects are gone with the device, or with the program that a test killed.
    is_disassociated: bool,
    /// The handles of those objects, which were not destroyed yet.
    handles_left: BTreeSet<u32>,
    objects: BTreeMap<u32, Entry>,
    next_age: u64,
    pub(crate) events: Vec<EventFile>,
    /// The event file of objects that name none, and its descriptor.
    pub(crate) default_events: Option<(EventFile, i32)>,
    /// The pages that the program maps, by page number or by index.
    mapped: BTreeMap<u64, mmap::Entry>,
    /// Pages that are still mapped although their object is gone: their offsets stay taken meanwhile.
    unmapped: Vec<u64>,
    /// The transport domain of raw packets.
    transport_domain: Option<u32>,
    /// The user context of firmware that owns the file's objects; 0 without DEVX.
    uid: u16,
    /// The kernel's end of a pair of sockets; the program has the other one as the file's descriptor.
    ours: UnixStream,
    inode: Inode,
    /// The number of handles.
    handles: usize,
}

impl OpenFile {
    /// The number of objects for which `is` is true.
    pub(crate) fn count(&self, is: fn(&Object) -> bool) -> usize {
        self.objects.values().filter(|entry| is(&entry.object)).count()
    }
}

/// The kernel of a fabric.
pub(crate) struct Kernel {
    pub(crate) switch: Switch,
    pub(crate) drivers: Vec<Driver>,
    pub(crate) cm: Manager,
    decisions: Decisions,
    /// Random numbers for the library, which change no decision.
    pub(crate) random: Decisions,
    pub(crate) history: Option<History>,
    /// The findings, if the fabric is strict.
    pub(crate) findings: Option<Vec<String>>,
    rates: Rates,
    files: BTreeMap<FileId, OpenFile>,
    next_file: u64,
    /// Bits of an address in a page of this machine: a division in each doorbell would take as long as 40 instructions.
    page_bits: u32,
    pinned: Pinned,
    pub(crate) delivery: Arc<Delivery>,
    /// The socket to peers outside of the process.
    pub(crate) transmitter: Option<Transmitter>,
    /// Whether the last run over UDP has left something to do.
    is_unfinished: bool,
}

impl Kernel {
    pub(crate) fn new(seed: u64, rates: Rates) -> Kernel {
        let mut switch = Switch::default();
        switch.set_seed(!seed);
        Kernel {
            switch,
            drivers: Vec::new(),
            cm: Manager::default(),
            decisions: Decisions::new(seed),
            random: Decisions::new(seed ^ (1 << 63)),
            history: None,
            findings: None,
            rates,
            files: BTreeMap::new(),
            next_file: 1,
            page_bits: rustix::param::page_size().trailing_zeros(),
            pinned: Pinned::default(),
            delivery: Arc::default(),
            transmitter: None,
            is_unfinished: false,
        }
    }

    /// Opens the node of a device; returns the descriptor of the first handle as well.
    pub(crate) fn open(&mut self, device: usize, now: u64) -> Result<(FileId, OwnedFd)> {
        let driver = self.drivers.get_mut(device).filter(|driver| driver.is_plugged());
        driver.ok_or(Errno::NODEV)?.failing.check(Some(Verb::OpenDevice))?;
        self.close_orphans(now);
        let id = FileId(self.next_file);
        self.next_file += 1;
        let (ours, theirs) = UnixStream::pair().map_err(|_| Errno::MFILE)?;
        let theirs = OwnedFd::from(theirs);
        let file = OpenFile {
            inode: inode(&theirs)?,
            ours,
            handles: 1,
            device,
            has_context: false,
            is_disassociated: false,
            handles_left: BTreeSet::new(),
            objects: BTreeMap::new(),
            next_age: 0,
            events: Vec::new(),
            default_events: None,
            mapped: BTreeMap::new(),
            unmapped: Vec::new(),
            transport_domain: None,
            uid: 0,
        };
        self.files.insert(id, file);
        Ok((id, theirs))
    }

    /// The function of a device.
    pub(crate) fn function(&mut self, device: usize) -> &mut Function {
        self.switch.function(self.drivers[device].function())
    }

    /// Brings a device to internal error.
    pub(crate) fn fail_device(&mut self, device: usize) {
        if self.drivers[device].stop(&mut self.switch, false) {
            self.report_to_all(device, IB_EVENT_DEVICE_FATAL, 0);
        }
    }

    /// Takes a device out: `ib_uverbs_free_hw_resources`, and `cma_remove_one`.
    pub(crate) fn unplug(&mut self, device: usize) {
        self.drivers[device].stop(&mut self.switch, true);
        self.report_to_all(device, IB_EVENT_DEVICE_FATAL, 0);
        let of_device = self.files.iter().filter(|(_, file)| file.device == device);
        let files: Vec<FileId> = of_device.map(|(id, _)| *id).collect();
        files.into_iter().for_each(|file| self.disassociate(file));
        self.cm.remove_device(device);
    }

    /// Closes the file behind a descriptor as if its program had died; returns whether there is one.
    pub(crate) fn kill(&mut self, fd: BorrowedFd<'_>, now: u64) -> bool {
        if let Some(file) = self.file_behind(fd) {
            if let Ok(device) = self.file(file).map(|file| file.device) {
                self.note_fault(now, device, format_args!("context {} is killed", file.0));
            }
            self.disassociate(file);
            // A program that is dead reads no event; one that goes on in this process learns here that it is.
            self.files.get(&file).iter().flat_map(|file| &file.events).for_each(EventFile::end);
            return true;
        }
        self.cm.kill(now, fd)
    }

    /// Destroys the objects of a file, which can create no new ones then, and ends its completion channels.
    fn disassociate(&mut self, id: FileId) {
        let Some(file) = self.files.get(&id).filter(|file| !file.is_disassociated) else { return };
        let left = file.objects.keys().copied().collect();
        self.destroy_all(id);
        let Some(file) = self.files.get_mut(&id) else { return };
        (file.is_disassociated, file.handles_left) = (true, left);
        // Files of asynchronous events stay.
        file.events.iter().filter(|events| !events.is_async()).for_each(EventFile::end);
    }

    /// Queues an asynchronous event about a device or its port in all its files.
    fn report_to_all(&self, device: usize, event: u32, element: u64) {
        for file in self.files.values().filter(|file| file.device == device) {
            for to in file.events.iter().filter(|events| events.is_async()).cloned() {
                report(Some(&Reports { to, user_handle: element }), event);
            }
        }
    }

    /// Closes a file: destroys its objects, the newest first, as `uverbs_destroy_ufile_hw`.
    pub(crate) fn close(&mut self, id: FileId) {
        self.destroy_all(id);
        let Some(file) = self.files.remove(&id) else { return };
        let driver = &mut self.drivers[file.device];
        driver.subscriptions.retain(|subscription| !subscription.is_of(id, None));
        if file.uid != 0 {
            driver.destroy_uctx(&mut self.switch, file.uid);
        }
    }

    /// Destroys all objects of a file.
    fn destroy_all(&mut self, id: FileId) {
        // Before the regions are gone that its requests name.
        self.write_history();
        let Some(file) = self.files.get(&id) else { return };
        let mut handles: Vec<_> =
            file.objects.iter().map(|(handle, entry)| (entry.age, *handle)).collect();
        handles.sort_unstable();
        for (_, handle) in &handles {
            if let Ok(number) = self.qp(id, *handle) {
                self.leave_groups(id, number);
            }
        }
        while !handles.is_empty() {
            let before = handles.len();
            for at in (0..handles.len()).rev() {
                if self.destroy(id, handles[at].1).is_ok() {
                    handles.remove(at);
                }
            }
            if handles.len() == before {
                break;
            }
        }
        let domain = self.files.get_mut(&id).and_then(|file| file.transport_domain.take());
        if let Some(number) = domain {
            if let Ok((driver, switch)) = self.driver(id) {
                let _ = driver.execute_on(switch, opcode::DEALLOC_TRANSPORT_DOMAIN, number);
            }
        }
    }

    /// Opens the connection manager; returns the descriptor of its handle as well.
    pub(crate) fn open_cm(&mut self, now: u64) -> Result<(CmFileId, OwnedFd)> {
        self.close_orphans(now);
        self.cm.open()
    }

    /// One more handle, of the file behind a descriptor.
    pub(crate) fn hold_behind(&mut self, fd: BorrowedFd<'_>) -> Option<FileId> {
        let id = self.file_behind(fd)?;
        self.files.entry(id).and_modify(|file| file.handles += 1);
        Some(id)
    }

    /// Drops a handle. The last one closes the file, unless the program has descriptors of it, from which it can make a
    /// handle again.
    pub(crate) fn release(&mut self, id: FileId, now: u64) {
        if let Some(file) = self.files.get_mut(&id) {
            file.handles -= 1;
        }
        self.close_orphans(now);
    }

    /// Closes files without a handle and without a descriptor, also those of the connection manager.
    pub(crate) fn close_orphans(&mut self, now: u64) {
        self.cm.close_orphans(now);
        let is_closed = |file: &OpenFile| file.handles == 0 && is_hung_up(&file.ours);
        let closed = self.files.iter().filter(|(_, file)| is_closed(file));
        let closed: Vec<FileId> = closed.map(|(id, _)| *id).collect();
        closed.into_iter().for_each(|id| self.close(id));
    }

    /// The file behind a descriptor.
    pub(crate) fn file_behind(&self, fd: BorrowedFd<'_>) -> Option<FileId> {
        let inode = inode(&fd).ok()?;
        self.files.iter().find(|(_, file)| file.inode == inode).map(|(id, _)| *id)
    }

    /// The number of decisions that the seed has made.
    pub(crate) fn decisions(&self) -> u64 {
        self.decisions.drawn() + self.switch.decisions()
    }

    /// Lets nothing of one device arrive at another, or ends that.
    pub(crate) fn cut_off(&mut self, from: usize, to: usize, cut: bool) {
        let [from, to] = [from, to].map(|at| self.drivers[at].function());
        if cut != self.switch.is_cut_off(from, to) {
            self.switch.cut_off(from, to, cut);
        }
    }

    /// The packets that went from one device to another.
    pub(crate) fn traffic(&self, from: usize, to: usize) -> Traffic {
        let [from, to] = [from, to].map(|at| self.drivers[at].function());
        self.switch.traffic(from, to)
    }

    pub(crate) fn file(&self, id: FileId) -> Result<&OpenFile> {
        self.files.get(&id).ok_or(Errno::BADF)
    }

    pub(crate) fn file_mut(&mut self, id: FileId) -> Result<&mut OpenFile> {
        self.files.get_mut(&id).ok_or(Errno::BADF)
    }

    /// Open files, and their devices.
    pub(crate) fn files(&self) -> impl Iterator<Item = &OpenFile> {
        self.files.values()
    }

    /// Forgets the files of events that the program closed, with the subscriptions that report to them.
    fn forget_closed_events(&mut self, file: FileId) -> Result<()> {
        let events = &mut self.file_mut(file)?.events;
        let before = events.len();
        events.retain(|events| !events.is_closed());
        if events.len() < before {
            self.driver(file)?.0.subscriptions.retain(|subscription| !subscription.is_over());
        }
        Ok(())
    }

    /// Runs the ioctl whose message is at `address`.
    pub(crate) fn ioctl(&mut self, file: FileId, user: User<'_>, address: u64) -> Result<()> {
        self.reap();
        self.forget_closed_events(file)?;
        let mut call = Call::read(file, user, address)?;
        if self.history.is_none() {
            return self.run_call(file, &mut call);
        }
        let verb = Verb::of_call(&call);
        let destroyed = call.handle(0).ok().filter(|_| verb == Some(Verb::Destroy));
        let destroyed =
            destroyed.and_then(|handle| Some(self.object(file, handle).ok()?.to_string()));
        let before = self.file(file)?.next_age;
        let answer = self.run_call(file, &mut call);
        let Some(verb) = verb else { return answer };
        let made = self.file(file)?.objects.values().find(|entry| entry.age == before);
        let object = made.map(|entry| entry.object.to_string()).or(destroyed);
        let object = object.or_else(|| qp::changed(self, &call, verb));
        let object = object.map_or_else(String::new, |object| format!(" {object}"));
        self.note(file, format_args!("{verb}{object}"), answer);
        answer
    }

    fn run_call(&mut self, file: FileId, call: &mut Call<'_>) -> Result<()> {
        let (object, method) = (call.header.object_id, call.header.method_id);
        if call.header.driver_id != uverbs_uapi::device::rdma_driver_id::RDMA_DRIVER_MLX5.0 {
            return Err(Errno::INVAL);
        }
        if (object, method) == (UVERBS_OBJECT_DEVICE, UVERBS_METHOD_INVOKE_WRITE) {
            call.check_known(&INVOKE_WRITE_ATTRS)?;
            self.check_associated(file)?;
            self.check_context(file)?;
            if call.room(UVERBS_ATTR_WRITE_CMD) != size_of::<u64>() {
                return Err(Errno::INVAL);
            }
            let number = call.u64_if(UVERBS_ATTR_WRITE_CMD).ok_or(Errno::INVAL)? as u32;
            let write = WRITES.iter().copied().flatten().find(|write| write.command == number);
            let write = write.ok_or(Errno::OPNOTSUPP)?;
            let (request, response) = sizes(number);
            call.check_sizes(request, response)?;
            self.check_fault(file, Verb::of_write(number))?;
            return (write.run)(self, call);
        }
        let all = METHODS.iter().copied().flatten();
        let found = all.clone().find(|known| (known.object, known.method) == (object, method));
        let found = found.ok_or(Errno::PROTONOSUPPORT)?;
        call.check_known(found.attrs)?;
        // Objects that are gone can still be destroyed, except those of a driver: `uverbs_disassociate_api`.
        let verb = Verb::of_method(object, method);
        let of_driver = object >= MLX5_IB_OBJECT_DEVX;
        if verb != Some(Verb::Destroy) || of_driver {
            self.check_associated(file)?;
        }
        if !context::makes_context(object, method) {
            self.check_context(file)?;
        }
        self.check_fault(file, verb)?;
        (found.run)(self, call)
    }

    /// Adds a call of a file to the history.
    fn note(&mut self, file: FileId, call: fmt::Arguments<'_>, answer: Result<()>) {
        self.write_history();
        let Some(OpenFile { device, .. }) = self.files.get(&file) else { return };
        let (device, FileId(number)) = (*device, file);
        let now = self.function(device).device().now();
        if let Some(history) = &mut self.history {
            let name = &self.drivers[device].name;
            history.add_call(now, name, format_args!("context {number} {call}"), answer);
        }
    }

    /// Moves the entries that the devices recorded to the history.
    pub(crate) fn write_history(&mut self) {
        let Some(mut history) = self.history.take() else { return };
        let offset_of = |device: Option<usize>, key: u32, address: u64| {
            let files = self.files.values();
            let mut objects = files
                .filter(|file| device.is_none_or(|device| file.device == device))
                .flat_map(|file| file.objects.values());
            objects.find_map(|entry| match &entry.object {
                Object::Mr(region) if region.key == key => {
                    let offset = address.checked_sub(region.iova);
                    offset.filter(|offset| *offset < region.length)
                }
                _ => None,
            })
        };
        for (device, (time, entry)) in history.take_entries() {
            if let Some(line) = history::describe(device, &entry, &offset_of) {
                history.add(time, &self.drivers[device].name, format_args!("{line}"));
            }
        }
        self.history = Some(history);
    }

    /// The objects that the program has not destroyed.
    pub(crate) fn objects_left(&self) -> Vec<String> {
        let files = self.files.iter();
        let left = files.flat_map(|(FileId(number), file)| {
            let name = &self.drivers[file.device].name;
            let objects = file.objects.values().filter(|entry| !entry.object.is_librarys());
            objects.map(move |entry| {
                format!("{name}: {} of context {number} was not destroyed", entry.object)
            })
        });
        left.collect()
    }

    /// Adds a line about a fault of the script at a device.
    pub(crate) fn note_fault(&mut self, now: u64, device: usize, fault: fmt::Arguments<'_>) {
        self.write_history();
        if let Some(history) = &mut self.history {
            history.add(now, &self.drivers[device].name, format_args!("fault: {fault}"));
        }
    }

    fn check_associated(&self, file: FileId) -> Result<()> {
        if self.file(file)?.is_disassociated { Err(Errno::IO) } else { Ok(()) }
    }

    /// Fails a call that a test or the seed makes fail.
    fn check_fault(&mut self, file: FileId, verb: Option<Verb>) -> Result<()> {
        let device = self.file(file)?.device;
        self.drivers[device].failing.check(verb)?;
        match verb.is_some_and(|verb| self.rates.fails(verb, &mut self.decisions)) {
            true => Err(Errno::NOMEM),
            false => Ok(()),
        }
    }

    fn check_context(&self, file: FileId) -> Result<()> {
        if self.file(file)?.has_context { Ok(()) } else { Err(Errno::INVAL) }
    }

    /// The driver of a file's device, and the switch.
    pub(crate) fn driver(&mut self, file: FileId) -> Result<(&mut Driver, &mut Switch)> {
        let device = self.file(file)?.device;
        Ok((&mut self.drivers[device], &mut self.switch))
    }

    /// The limits of a file's device.
    fn limits(&self, file: FileId) -> Result<Limits> {
        Ok(self.drivers[self.file(file)?.device].limits)
    }

    /// Adds an object that uses these others.
    pub(crate) fn add(&mut self, file: FileId, object: Object, uses: &[u32]) -> Result<u32> {
        self.add_lending(file, object, uses, Lent::default())
    }

    /// Adds an object that lends ranges to the device until it is destroyed.
    fn add_lending(
        &mut self,
        file: FileId,
        object: Object,
        uses: &[u32],
        lent: Lent,
    ) -> Result<u32> {
        let file = self.file_mut(file)?;
        // The lowest free number, as `xa_alloc`.
        let handle = first_free(&file.objects, 0);
        for used in uses {
            if let Some(entry) = file.objects.get_mut(used) {
                entry.users += 1;
            }
        }
        let entry = Entry { object, uses: uses.to_vec(), users: 0, age: file.next_age, lent };
        file.next_age += 1;
        file.objects.insert(handle, entry);
        Ok(handle)
    }

    /// The object with a handle.
    pub(crate) fn object(&self, file: FileId, handle: u32) -> Result<&Object> {
        Ok(&self.file(file)?.objects.get(&handle).ok_or(Errno::NOENT)?.object)
    }

    /// Replaces the ranges that an object lends, and takes the old ones from the device.
    fn lend_anew(&mut self, id: FileId, handle: u32, lent: Lent) -> Result<()> {
        let entry = self.file_mut(id)?.objects.get_mut(&handle).ok_or(Errno::NOENT)?;
        let old = std::mem::replace(&mut entry.lent, lent);
        self.give_back(id, old)
    }

    /// Takes the ranges that an object lends from the device, and returns them.
    fn unlend(&mut self, id: FileId, handle: u32) -> Result<Vec<(u64, u64, bool)>> {
        let entry = self.file_mut(id)?.objects.get_mut(&handle).ok_or(Errno::NOENT)?;
        let lent = std::mem::take(&mut entry.lent);
        let ranges = lent.ranges().to_vec();
        self.give_back(id, lent)?;
        Ok(ranges)
    }

    /// The handles that an object uses.
    fn uses(&self, file: FileId, handle: u32) -> Result<&[u32]> {
        Ok(&self.file(file)?.objects.get(&handle).ok_or(Errno::NOENT)?.uses)
    }

    /// Replaces an object, and the objects that it uses, under its handle.
    fn replace(&mut self, file: FileId, handle: u32, object: Object, uses: &[u32]) -> Result<()> {
        let objects = &mut self.file_mut(file)?.objects;
        let entry = objects.get_mut(&handle).ok_or(Errno::NOENT)?;
        entry.object = object;
        let old = std::mem::replace(&mut entry.uses, uses.to_vec());
        for used in uses {
            objects.entry(*used).and_modify(|entry| entry.users += 1);
        }
        for used in old {
            objects.entry(used).and_modify(|entry| entry.users -= 1);
        }
        Ok(())
    }

    /// Takes ranges from the device.
    fn give_back(&mut self, file: FileId, lent: Lent) -> Result<()> {
        let device = self.file(file)?.device;
        lent.give_back(self.drivers[device].memory(&mut self.switch), &mut self.pinned);
        Ok(())
    }

    /// The handles of a file's objects for which `is` is true, the oldest first.
    pub(crate) fn handles(&self, file: FileId, is: impl Fn(&Object) -> bool) -> Result<Vec<u32>> {
        let objects = &self.file(file)?.objects;
        let mut found: Vec<_> = objects.iter().filter(|(_, entry)| is(&entry.object)).collect();
        found.sort_by_key(|(_, entry)| entry.age);
        Ok(found.into_iter().map(|(handle, _)| *handle).collect())
    }

    /// Destroys an object that nothing uses.
    pub(crate) fn destroy(&mut self, id: FileId, handle: u32) -> Result<()> {
        let file = self.file(id)?;
        let entry = file.objects.get(&handle).ok_or(Errno::NOENT)?;
        if entry.users > 0 {
            return Err(Errno::BUSY);
        }
        match entry.object.clone() {
            Object::Pd { number } => pd::dealloc(self, id, number)?,
            Object::Mr(region) => mr::destroy(self, id, handle, region)?,
            Object::Mw { key } => mr::destroy_key(self, id, key)?,
            Object::Cq { number } => cq::destroy(self, id, number)?,
            Object::Qp { number, opener } => qp::destroy(self, id, number, opener)?,
            Object::Srq { number } => srq::destroy(self, id, number)?,
            Object::Ah => {}
            Object::Xrcd { number } => xrcd::close(self, id, number)?,
            Object::Dm(memory) => dm::free(self, id, memory)?,
            Object::Flow(rule) => flow::destroy(self, id, &rule)?,
            Object::Uar { number, page } => uar::free(self, id, number, page)?,
            Object::Var { page } => var::free(self, id, page)?,
            Object::Devx { identity, destroy } => devx::destroy(self, id, identity, destroy)?,
            Object::Umem { number } => devx::dereg_umem(self, id, number)?,
        }
        let (driver, _) = self.driver(id)?;
        driver.subscriptions.retain(|subscription| !subscription.is_of(id, Some(handle)));
        let file = self.file_mut(id)?;
        let Some(entry) = file.objects.remove(&handle) else { return Ok(()) };
        for used in entry.uses {
            if let Some(entry) = file.objects.get_mut(&used) {
                entry.users -= 1;
            }
        }
        self.give_back(id, entry.lent)
    }

    /// Creates an object of the device by a command, after these ranges were lent to it; returns its number.
    fn create_with(
        &mut self,
        call: &Call<'_>,
        command: &[u8],
        ranges: &[(u64, u64, bool)],
    ) -> Result<(u32, Lent)> {
        let lent = self.lend(call, ranges)?;
        let command = self.of_context(call.file, command)?;
        let (answer, lent) = self.execute_with(call, &command, lent)?;
        Ok((Driver::created(&answer), lent))
    }

    /// A command whose object the file's user context owns.
    fn of_context(&self, file: FileId, command: &[u8]) -> Result<Vec<u8>> {
        let mut command = command.to_vec();
        set_uid(&mut command, self.file(file)?.uid);
        Ok(command)
    }

    /// Executes a command about ranges that are lent to the device; takes them back if it fails.
    fn execute_with(
        &mut self,
        call: &Call<'_>,
        command: &[u8],
        lent: Lent,
    ) -> Result<(Vec<u8>, Lent)> {
        let (driver, switch) = self.driver(call.file)?;
        match driver.execute(switch, command) {
            Ok(answer) => Ok((answer, lent)),
            Err(errno) => {
                self.give_back(call.file, lent)?;
                Err(errno)
            }
        }
    }

    /// Lends a part of a dma-buf to the device; returns its address there.
    fn lend_dmabuf(
        &mut self,
        call: &Call<'_>,
        buffer: DmaBuf,
        offset: u64,
        length: u64,
    ) -> Result<(u64, Lent)> {
        let device = self.file(call.file)?.device;
        buffer.lend(self.drivers[device].memory(&mut self.switch), offset, length)
    }

    /// Unbinds the data-direct function of a device: `mlx5_ib_data_direct_unbind`. Regions that were registered through
    /// it reach nothing any more. The driver's PD and key of all memory stay, as those of Linux do until the device goes
    /// (`mlx5_ib_free_data_direct_resources`).
    pub(crate) fn unbind_data_direct(&mut self, device: usize) {
        self.drivers[device].data_direct = None;
        let files = self.files.values().filter(|file| file.device == device);
        let objects = files.flat_map(|file| file.objects.values());
        let crossed = objects.filter_map(|entry| match entry.object {
            Object::Mr(Region { crossed, .. }) => crossed,
            _ => None,
        });
        for key in crossed.collect::<Vec<_>>() {
            self.function(device).device_mut().invalidate_key(key);
        }
    }

    /// Lends ranges to the device. Those of no bytes are left out.
    fn lend(&mut self, call: &Call<'_>, ranges: &[(u64, u64, bool)]) -> Result<Lent> {
        let device = self.file(call.file)?.device;
        let memory = self.drivers[device].memory(&mut self.switch);
        let mut lent = Lent::default();
        let mut some = ranges.iter().filter(|(_, length, _)| *length > 0);
        match some.try_for_each(|range| call.user.lend(memory, &mut self.pinned, &mut lent, *range))
        {
            Ok(()) => Ok(lent),
            Err(errno) => {
                lent.give_back(memory, &mut self.pinned);
                Err(errno)
            }
        }
    }

    /// Destroys an object of the device by a command.
    fn destroy_by(&mut self, file: FileId, op: u16, number: u32) -> Result<()> {
        let (driver, switch) = self.driver(file)?;
        driver.execute_on(switch, op, number)?;
        self.take_events_of(file)
    }

    /// Reports the events of a file's device before the object of some of them is forgotten.
    fn take_events_of(&mut self, file: FileId) -> Result<()> {
        let device = self.file(file)?.device;
        let now = self.function(device).device().now();
        self.take_events(device, now);
        Ok(())
    }

    /// Reports the events of a device that are neither lost nor late; returns whether there were any.
    fn take_events(&mut self, device: usize, now: u64) -> bool {
        let (rates, decisions) = (self.rates, &mut self.decisions);
        self.drivers[device].take_events(&mut self.switch, now, rates, decisions)
    }

    /// The event file behind a descriptor that a command names, with the program's number for the object. Nothing
    /// reports there before [`Place::attach`].
    fn reports(&self, call: &Call<'_>, fd: u16, user_handle: u64) -> Result<Option<Place>> {
        let Some(fd) = call.fd_if(fd).filter(|fd| *fd >= 0) else { return Ok(None) };
        let inode = call.user.inode(fd).ok_or(Errno::BADF)?;
        let theirs = call.user.duplicate(fd).ok_or(Errno::BADF)?;
        let files = &self.file(call.file)?.events;
        let to = files.iter().find(|file| file.is_behind(inode)).ok_or(Errno::INVAL)?.clone();
        Ok(Some(Place { reports: Reports { to, user_handle }, theirs: Some(theirs) }))
    }

    /// The event file of an object: the one that the command names, or else the first that was made.
    fn reports_events(&self, call: &Call<'_>, fd: u16, user_handle: u64) -> Result<Option<Place>> {
        if let Some(place) = self.reports(call, fd, user_handle)? {
            return Ok(Some(place));
        }
        let Some((to, fd)) = self.file(call.file)?.default_events.clone() else { return Ok(None) };
        let is_its = call.user.inode(fd).is_some_and(|inode| to.is_behind(inode));
        let theirs = call.user.duplicate(fd).filter(|_| is_its);
        Ok(Some(Place { reports: Reports { to, user_handle }, theirs }))
    }

    /// Adds an event file with records of `width` bytes, or of any length if it is 0.
    pub(crate) fn add_events(&mut self, file: FileId, width: usize) -> Result<OwnedFd> {
        let delivery = self.delivery.clone();
        let file = self.file_mut(file)?;
        let (ours, theirs) = match width {
            0 => EventFile::of_any_width(delivery)?,
            _ => EventFile::new(width, delivery)?,
        };
        file.events.push(ours);
        Ok(theirs)
    }

    /// Starts the recordings of the devices, for the history.
    pub(crate) fn record_history(&mut self, prints: Prints) {
        let history = History::new(prints);
        for device in 0..self.drivers.len() {
            *self.function(device).device_mut().recorder_mut() = history.recorder(device);
        }
        self.history = Some(history);
    }

    /// Does everything that is due; returns whether there was anything.
    pub(crate) fn run(&mut self, now: u64) -> bool {
        self.run_all(now, true)
    }

    /// The same; leaves the packets of the last turn to [`transmit`](Self::transmit) unless it `sends_last`.
    fn run_all(&mut self, now: u64, sends_last: bool) -> bool {
        /// The most rounds of a device over UDP, which sends 64 packets in each. A peer may read 2 GiB with one packet:
        /// datagrams, events and the program's calls do not wait for all of that.
        const MOST_ROUNDS: u32 = 16;
        self.audit();
        let (mut worked, mut rounds) = (false, 0);
        loop {
            let progress = self.switch.run(now);
            if progress.more || sends_last {
                self.transmit();
            }
            worked |= progress.worked;
            rounds += u32::from(self.transmitter.is_some());
            // Else the thread goes on when the socket has room.
            let goes_on = progress.more && !(self.is_blocked() && self.switch.is_outside_crowded());
            if goes_on && rounds < MOST_ROUNDS {
                continue;
            }
            self.is_unfinished = goes_on;
            let passed = self.pass_on(now);
            if goes_on || !passed {
                return worked | passed;
            }
            worked = true;
        }
    }

    /// Does everything that is due, and holds the events. If there are some and it `may_linger`, the ACKs of messages
    /// that the program is told of wait for the next run, unless there is something else to send. Returns whether they do.
    pub(crate) fn run_holding(&mut self, now: u64, may_linger: bool) -> bool {
        self.delivery.hold(true);
        self.run_all(now, !may_linger);
        self.delivery.hold(false);
        let lingers = may_linger && self.delivery.has_held() && self.owes_acks();
        if !lingers {
            self.transmit();
        }
        lingers
    }

    /// Whether ACKs wait for [`transmit`](Self::transmit).
    pub(crate) fn owes_acks(&self) -> bool {
        self.switch.has_outgoing_acks()
    }

    /// Sends the packets that leave the process.
    pub(crate) fn transmit(&mut self) {
        if let Some(transmitter) = &mut self.transmitter {
            transmitter.send(&mut self.switch);
        }
    }

    /// Handles a datagram that came from outside.
    pub(crate) fn receive(&mut self, now: u64, datagram: &Datagram<'_>) {
        if let Some(transmitter) = &mut self.transmitter {
            transmitter.take_in(&mut self.switch, now, datagram);
        }
    }

    /// Whether packets wait until the socket has room.
    pub(crate) fn is_blocked(&self) -> bool {
        self.transmitter.as_ref().is_some_and(Transmitter::is_blocked)
    }

    /// The counters of a fabric over UDP.
    pub(crate) fn udp_counters(&self) -> Option<UdpCounters> {
        Some(self.transmitter.as_ref()?.counters(&self.switch))
    }

    /// Passes on the events of the devices and the messages of the connection manager; returns whether there were any.
    fn pass_on(&mut self, now: u64) -> bool {
        let mut worked = false;
        for device in 0..self.drivers.len() {
            if !self.drivers[device].has_reports(&mut self.switch) {
                continue;
            }
            worked |= self.take_events(device, now);
            for up in std::mem::take(&mut self.drivers[device].link_changes) {
                let event = if up { IB_EVENT_PORT_ACTIVE } else { IB_EVENT_PORT_ERR };
                self.report_to_all(device, event, 1);
            }
        }
        worked |= self.take_in_mads(now);
        if self.cm.has_work(now) {
            let ports = Ports(&self.drivers);
            let (rates, decisions, history) = (self.rates, &mut self.decisions, &mut self.history);
            let switch = &self.switch;
            let function =
                |gid: &[u8; 16]| ports.find(gid).map(|(at, _)| self.drivers[at].function());
            worked |= self.cm.run(now, ports, |message, is_to_lose| {
                let ends = function(&message.from).zip(function(&message.to));
                let cut = ends.is_some_and(|(from, to)| switch.is_cut_off(from, to));
                let lost = is_to_lose || rates.loses(decisions) || cut;
                if let Some(history) = history {
                    let how = if lost { " is lost" } else { "" };
                    history.add(now, ports.name_of(&message.from), format_args!("{message}{how}"));
                }
                lost
            });
            for outgoing in self.cm.take_outgoing() {
                self.switch.send_mad(outgoing.to, &outgoing.mad);
            }
        }
        if self.is_crowded() {
            self.delivery.clear_crowded();
            self.files.values().flat_map(|file| &file.events).for_each(EventFile::flush);
        }
        worked
    }

    /// Hands the connection manager the datagrams that came for it from outside; returns whether there were any.
    fn take_in_mads(&mut self, now: u64) -> bool {
        let mut worked = false;
        while let Some(mad) = self.switch.take_mad() {
            worked = true;
            // One device has a way out, and one address.
            let to = self.drivers.first().and_then(|driver| driver.interface.gids.first());
            let Some(to) = to.map(|entry| entry.gid) else { continue };
            let taken = self.cm.receive(now, (mad.from, to), &mad.bytes, Ports(&self.drivers));
            if let (Err(_), Some(transmitter)) = (taken, &mut self.transmitter) {
                transmitter.refuse_mad();
            }
        }
        worked
    }

    /// Takes a step: does some things, how many and in which order the seed chooses, and passes messages of the
    /// connection manager on. A thing is that WQEs are fetched, that messages leave or arrive, or that data reaches memory.
    /// Returns how many nanoseconds it took; `None` if there was nothing to do.
    pub(crate) fn step(&mut self, now: u64) -> Option<u64> {
        /// The most nanoseconds that a step takes.
        const LONGEST_STEP: u64 = 2_000;
        /// The most things of a step. A message of a reliable connection has five: its ACK leaves and arrives, too.
        const MOST_THINGS: u64 = 8;
        /// Each thing of a step is done for up to 1, 2, 4 … 32 messages, as many as this. A NIC does things for several
        /// at once, and one at a time makes the most orders.
        const POWERS_OF_TWO: u64 = 6;
        self.audit();
        let mut worked = self.switch.start_turn(now);
        let decisions = &mut self.decisions;
        // A fate is decided for the first message of a thing.
        let apart = self.rates.decide_fates();
        let (mut most, mut messages, mut done) = (None, 1, 0);
        while most.is_none_or(|most| done < most) {
            let thing = self.switch.choose_ready(|ready| {
                most.get_or_insert_with(|| {
                    let drawn = decisions.below(MOST_THINGS * POWERS_OF_TWO);
                    messages = if apart { 1 } else { 1 << (drawn / MOST_THINGS) };
                    1 + drawn % MOST_THINGS
                });
                if ready > 1 { decisions.below(ready as u64) as usize } else { 0 }
            });
            let Some(thing) = thing else { break };
            let faults = self.switch.function(thing.function()).device_mut().faults_mut();
            faults.decide_next(|| self.rates.fate(decisions));
            self.switch.run_thing(thing, messages);
            // A queue that was ready and had nothing to do is not ready any more.
            (worked, done) = (true, done + 1);
        }
        worked |= self.pass_on(now);
        worked.then(|| 1 + self.decisions.below(LONGEST_STEP))
    }

    /// Runs a command of the connection manager.
    pub(crate) fn cm_command(
        &mut self,
        file: CmFileId,
        user: User<'_>,
        bytes: &[u8],
        now: u64,
    ) -> Result<()> {
        self.cm.command(file, user, bytes, now, Ports(&self.drivers))
    }

    /// When the next timer is due, of a device or of the connection manager; 0 if there is more to do now.
    pub(crate) fn deadline(&self) -> Option<u64> {
        if self.is_unfinished {
            return Some(0);
        }
        let late = self.drivers.iter().filter_map(Driver::deadline);
        self.switch.deadline().into_iter().chain(self.cm.deadline()).chain(late).min()
    }

    /// Whether a record waits for room in an event file: the program makes room without a call.
    pub(crate) fn is_crowded(&self) -> bool {
        self.delivery.is_crowded()
    }
}

/// The lowest key from `first` on that is free, as `xa_alloc`.
fn first_free<K: Copy + Ord + Into<u64> + TryFrom<u64>, V>(taken: &BTreeMap<K, V>, first: K) -> K {
    let mut free: u64 = first.into();
    for key in taken.range(first..).map(|(key, _)| (*key).into()) {
        if key != free {
            break;
        }
        free += 1;
    }
    K::try_from(free).unwrap_or(first)
}

/// The event file of an object that is not made yet, with a duplicate of the program's end.
struct Place {
    reports: Reports,
    theirs: Option<OwnedFd>,
}

impl Place {
    /// The object is made, and reports from now on.
    fn attach(self) -> Reports {
        self.reports.to.attach(self.theirs);
        self.reports
    }
}

/// Ends the reports of an object to its event file.
fn end_reports(reports: Option<Reports>) {
    if let Some(Reports { to, user_handle }) = reports {
        // Both kinds of records begin with the number of the object.
        to.detach(|record| record.get(..8) == Some(&user_handle.to_ne_bytes()[..]));
    }
}
