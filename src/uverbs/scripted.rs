//! A script between the library and a kernel, for behaviour that no kernel shows on demand. It fails a chosen step,
//! hides a method, shortens or forges an answer, refuses to destroy an object, or lets the device vanish. It logs
//! every command.
//!
//! | device | kernel behind the script | file |
//! |---|---|---|
//! | mlx5, [`Script::mlx5`] | that of a fabric (`uverbs-sim`) | `hosted.rs` |
//! | rxe, [`Script::new`] | the object model in memory, with rings that a test reads and fills | `state.rs`, `write.rs`, `ring.rs` |
//!
//! ```ignore
//! let script = Script::mlx5();
//! let context = script.open("mlx5_0");
//! script.fail_step(1, Errno::NOMEM);
//! assert!(context.alloc_pd().is_err());
//! assert_eq!(script.count(UVERBS_OBJECT_PD), 0);
//! ```

mod attrs;
mod hosted;
mod port;
mod ring;
mod socket;
mod state;
mod write;

use super::command::Command;
use super::fd::UverbsFd;
use super::kernel::Kernel;
use crate::context::Context;
use crate::device::{Device, DriverId};
use crate::error::Result;
use crate::memory::mapping::{Mapper, Mapping};
use crate::platform::Platform;
use crate::provider;
use crate::sharing::envelope::Envelope;
use crate::sync::fork::Epoch;
use hosted::Hosted;
pub(crate) use port::ScriptedPort;
use ring::KernelRing;
use rustix::io::Errno;
use state::State;
pub(crate) use state::{Role, ScriptedObject};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use uverbs_sim::Profile;
use uverbs_uapi::async_event::{UVERBS_METHOD_ASYNC_EVENT_ALLOC, ib_uverbs_async_event_desc};
use uverbs_uapi::comp_channel::ib_uverbs_comp_event_desc;
use uverbs_uapi::device::{
    UVERBS_ATTR_CORE_OUT, UVERBS_ATTR_WRITE_CMD, UVERBS_METHOD_GET_CONTEXT,
    UVERBS_METHOD_INVOKE_WRITE, ib_uverbs_ex_query_device_resp,
};
use uverbs_uapi::mlx5::abi::mlx5_ib_modify_qp;
use uverbs_uapi::mlx5::object::MLX5_IB_OBJECT_UAR;
use uverbs_uapi::mlx5::uar::MLX5_IB_METHOD_UAR_OBJ_ALLOC;
use uverbs_uapi::object as objects;
use uverbs_uapi::wc::ib_uverbs_wc;
use uverbs_uapi::write as commands;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The identity of a command: a method of an object, or an older command by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Method { object: u16, method: u16 },
    Write(u32),
}

impl Op {
    pub(crate) const GET_CONTEXT: Op =
        Op::Method { object: objects::UVERBS_OBJECT_DEVICE, method: UVERBS_METHOD_GET_CONTEXT };
    pub(crate) const ALLOC_EVENTS: Op = Op::Method {
        object: objects::UVERBS_OBJECT_ASYNC_EVENT,
        method: UVERBS_METHOD_ASYNC_EVENT_ALLOC,
    };
    pub(crate) const CREATE_CQ: Op = Op::Method { object: objects::UVERBS_OBJECT_CQ, method: 0 };
    pub(crate) const CREATE_QP: Op = Op::Method { object: objects::UVERBS_OBJECT_QP, method: 0 };
    pub(crate) const CREATE_SRQ: Op = Op::Method { object: objects::UVERBS_OBJECT_SRQ, method: 0 };
    pub(crate) const ALLOC_PD: Op = Op::Write(commands::IB_USER_VERBS_CMD_ALLOC_PD);
    pub(crate) const CREATE_AH: Op = Op::Write(commands::IB_USER_VERBS_CMD_CREATE_AH);
    pub(crate) const REG_MR: Op = Op::Write(commands::IB_USER_VERBS_CMD_REG_MR);
    pub(crate) const CREATE_COMP_CHANNEL: Op =
        Op::Write(commands::IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL);
    pub(crate) const OPEN_XRCD: Op = Op::Write(commands::IB_USER_VERBS_CMD_OPEN_XRCD);
    pub(crate) const OPEN_QP: Op = Op::Write(commands::IB_USER_VERBS_CMD_OPEN_QP);
    pub(crate) const POST_SEND: Op = Op::Write(commands::IB_USER_VERBS_CMD_POST_SEND);
    pub(crate) const RESIZE_CQ: Op = Op::Write(commands::IB_USER_VERBS_CMD_RESIZE_CQ);
    pub(crate) const REQ_NOTIFY_CQ: Op = Op::Write(commands::IB_USER_VERBS_CMD_REQ_NOTIFY_CQ);
    pub(crate) const EX_MODIFY_QP: Op = Op::Write(
        commands::IB_USER_VERBS_EX_CMD_MODIFY_QP | commands::IB_USER_VERBS_CMD_FLAG_EXTENDED,
    );
    pub(crate) const QUERY_DEVICE: Op = Op::Write(
        commands::IB_USER_VERBS_EX_CMD_QUERY_DEVICE | commands::IB_USER_VERBS_CMD_FLAG_EXTENDED,
    );
    pub(crate) const ALLOC_UAR: Op =
        Op::Method { object: MLX5_IB_OBJECT_UAR, method: MLX5_IB_METHOD_UAR_OBJ_ALLOC };
    pub(crate) const MODIFY_QP: Op = Op::Write(commands::IB_USER_VERBS_CMD_MODIFY_QP);

    /// The DESTROY method of an object.
    pub(crate) const fn destroy(object: u16) -> Op {
        let method = match object {
            objects::UVERBS_OBJECT_CQ
            | objects::UVERBS_OBJECT_QP
            | objects::UVERBS_OBJECT_SRQ
            | objects::UVERBS_OBJECT_MR
            | objects::UVERBS_OBJECT_DM => 1,
            uverbs_uapi::mlx5::object::MLX5_IB_OBJECT_UAR => {
                uverbs_uapi::mlx5::uar::MLX5_IB_METHOD_UAR_OBJ_DESTROY
            }
            uverbs_uapi::mlx5::object::MLX5_IB_OBJECT_VAR => {
                uverbs_uapi::mlx5::var::MLX5_IB_METHOD_VAR_OBJ_DESTROY
            }
            _ => 0,
        };
        Op::Method { object, method }
    }

    fn of(command: &Command<'_>) -> Op {
        match (command.object(), command.method()) {
            (objects::UVERBS_OBJECT_DEVICE, UVERBS_METHOD_INVOKE_WRITE) => {
                Op::Write(attrs::int(command, UVERBS_ATTR_WRITE_CMD).unwrap_or(u64::MAX) as u32)
            }
            (object, method) => Op::Method { object, method },
        }
    }
}

/// The deviations of the scripted kernel from a healthy one.
#[derive(Debug, Default)]
struct Deviations {
    /// Steps (commands and mappings) until one fails.
    countdown: Option<(u64, Errno)>,
    refused: Vec<(Op, Errno)>,
    /// Commands that are carried out by doing nothing.
    granted: Vec<Op>,
    /// Outputs that end after so many bytes.
    short: Vec<(Op, usize)>,
    undestroyable: Vec<(u32, Errno)>,
    vanished: bool,
    /// The kernel has begun to remove the device.
    leaving: bool,
    /// REREG exchanges the memory of a region, which rxe refuses.
    translates: bool,
    /// The rate of every port in units of 100 Mbit/s, if the driver tells it.
    port_speed: Option<u64>,
    /// The elements of queue pairs' rings have no room for SGEs.
    bare_elements: bool,
    /// Contexts of mlx5 have DEVX.
    grants_devx: bool,
}

/// A scripted kernel file as the test sees it. Clones see the same one.
#[derive(Clone)]
pub(crate) struct Script {
    state: Arc<Mutex<State>>,
    tag: Arc<str>,
    hooks: Arc<Mutex<Vec<Hook>>>,
    forgeries: Arc<Mutex<Vec<Forgery>>>,
    tamper: Arc<Mutex<Option<Tamper>>>,
    /// The fabric whose kernel executes the commands, if the device is one of mlx5.
    hosted: Option<Arc<Hosted>>,
}

/// A function of the test that may change each output of each command.
type Tamper = Box<dyn FnMut(&mut [u8]) + Send>;

/// A function of the test that changes an output of a command.
type Forgery = (Op, u16, Arc<dyn Fn(&mut [u8]) + Send + Sync>);

/// A function of the test that runs before a command is executed.
type Hook = (Op, Arc<dyn Fn() + Send + Sync>);

impl std::fmt::Debug for Script {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Script").field(&self.tag).finish()
    }
}

impl Script {
    pub(crate) fn new() -> Script {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let tag: Arc<str> = format!("scripted-{}-", NEXT.fetch_add(1, Ordering::Relaxed)).into();
        let state = Arc::new(Mutex::new(State::new(tag.clone())));
        let (hooks, forgeries, tamper) = Default::default();
        Script { state, tag, hooks, forgeries, tamper, hosted: None }
    }

    /// Opens a context on the scripted file, of an rxe device of this name.
    pub(crate) fn open(&self, device: &str) -> Context {
        self.try_open(device).expect("opening a scripted device")
    }

    pub(crate) fn try_open(&self, device: &str) -> Result<Context> {
        let epoch = Epoch::current().expect("an epoch");
        let device = self.plant(device);
        let opening = provider::open(&device)?;
        let kernel = Box::new(self.kernel(&device, opening.driver(), epoch));
        Context::on(kernel, device, opening, epoch)
    }

    fn kernel(&self, device: &Device, driver: u32, epoch: Epoch) -> ScriptedKernel {
        let hosted = self.hosted.as_ref().map(|hosted| hosted.kernel(device, driver, epoch));
        ScriptedKernel::new(self.clone(), hosted, driver, epoch)
    }

    /// The file of an mlx5 device of a fabric.
    pub(crate) fn mlx5() -> Script {
        Script::with(Profile::new())
    }

    /// The file of an mlx5 device with this profile.
    pub(crate) fn with(profile: Profile) -> Script {
        Script { hosted: Some(Arc::new(Hosted::new(profile))), ..Script::new() }
    }

    /// The device of [`mlx5`](Self::mlx5), to disturb it.
    pub(crate) fn device(&self) -> uverbs_sim::Device {
        self.hosted().fabric.device(hosted::NAME).expect("a device")
    }

    /// Runs the device of [`mlx5`](Self::mlx5) until it is idle.
    pub(crate) fn settle(&self) {
        while self.hosted().fabric.step() {}
    }

    fn hosted(&self) -> &Hosted {
        self.hosted.as_deref().expect("a device of a fabric")
    }

    /// The name of the device, as most tests open it.
    pub(crate) fn name(&self) -> &'static str {
        if self.hosted.is_some() { hosted::NAME } else { "rxe0" }
    }

    /// Imports a context on the scripted file, as another process would.
    pub(crate) fn import(&self, device: &str, envelope: Option<&Envelope>) -> Result<Context> {
        let planted = self.plant(device);
        let make =
            |driver, epoch| -> Box<dyn Kernel> { Box::new(self.kernel(&planted, driver, epoch)) };
        Context::import_on(make, planted.clone(), envelope)
    }

    /// Gives the device these ports in place of one Ethernet port; contexts opened before know the former.
    pub(crate) fn set_ports(&self, ports: &[ScriptedPort]) {
        self.state().ports = ports.into();
    }

    /// Sets the number of reads and atomics that a queue pair of the device answers, and has under way, at once.
    pub(crate) fn set_reads(&self, answered: u32, sent: u32) {
        let change = move |device: &mut ib_uverbs_ex_query_device_resp| {
            device.base.max_qp_rd_atom = answered;
            device.base.max_qp_init_rd_atom = sent;
        };
        self.forge(Op::QUERY_DEVICE, UVERBS_ATTR_CORE_OUT, change);
    }

    fn plant(&self, name: &str) -> Device {
        match &self.hosted {
            Some(hosted) => hosted.device(),
            None => Device::planted(name, DriverId::RXE, self.state().ports.len() as u32),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the `n`-th command or mapping from now fail, counted from 1.
    pub(crate) fn fail_step(&self, n: u64, errno: Errno) {
        self.state().deviations.countdown = Some((n, errno));
    }

    /// Cancels a [`fail_step`](Self::fail_step); `true` if the step was not reached.
    pub(crate) fn cancel_failure(&self) -> bool {
        self.state().deviations.countdown.take().is_some()
    }

    /// Fails every such command until [`allow`](Self::allow).
    pub(crate) fn refuse(&self, op: Op, errno: Errno) {
        self.state().deviations.refused.push((op, errno));
    }

    /// Carries out every such command by doing nothing, also if the kernel does not know it.
    pub(crate) fn grant(&self, op: Op) {
        self.state().deviations.granted.push(op);
    }

    pub(crate) fn allow(&self, op: Op) {
        self.state().deviations.refused.retain(|(refused, _)| *refused != op);
    }

    /// Ends every output of such a command after `length` bytes, until
    /// [`allow_full_response`](Self::allow_full_response).
    pub(crate) fn shorten_response(&self, op: Op, length: usize) {
        self.state().deviations.short.push((op, length));
    }

    pub(crate) fn allow_full_response(&self, op: Op) {
        self.state().deviations.short.retain(|(short, _)| *short != op);
    }

    /// Calls `hook` before every such command.
    pub(crate) fn before(&self, op: Op, hook: impl Fn() + Send + Sync + 'static) {
        self.hooks.lock().unwrap().push((op, Arc::new(hook)));
    }

    /// Calls `tamper` with each output of each command from now on.
    pub(crate) fn tamper(&self, tamper: impl FnMut(&mut [u8]) + Send + 'static) {
        *self.tamper.lock().unwrap() = Some(Box::new(tamper));
    }

    /// Answers as a healthy kernel again.
    pub(crate) fn stop_tampering(&self) {
        *self.tamper.lock().unwrap() = None;
    }

    /// Refuses to destroy an object until [`permit_destroy`](Self::permit_destroy).
    pub(crate) fn refuse_destroy(&self, handle: u32, errno: Errno) {
        self.state().deviations.undestroyable.push((handle, errno));
    }

    pub(crate) fn permit_destroy(&self, handle: u32) {
        self.state().deviations.undestroyable.retain(|(refused, _)| *refused != handle);
    }

    /// Changes an output of every such command from now on, as a kernel that lies.
    pub(crate) fn forge<T: FromBytes + IntoBytes + Immutable>(
        &self,
        op: Op,
        id: u16,
        change: impl Fn(&mut T) + Send + Sync + 'static,
    ) {
        let change = move |output: &mut [u8]| {
            let mut value = T::new_zeroed();
            let length = output.len().min(size_of::<T>());
            value.as_mut_bytes()[..length].copy_from_slice(&output[..length]);
            change(&mut value);
            output[..length].copy_from_slice(&value.as_bytes()[..length]);
        };
        self.forgeries.lock().unwrap().push((op, id, Arc::new(change)));
    }

    /// The driver's part of the command that made a queue of mlx5, or last resized it. Both parts of a completion
    /// queue begin with the address of its memory.
    pub(crate) fn told<T: FromBytes>(&self, handle: u32) -> T {
        let state = self.state();
        let bytes = state.told.get(&handle).expect("a live queue");
        T::read_from_prefix(bytes).expect("as many bytes").0
    }

    /// The driver's part of the last such command, executed or refused.
    pub(crate) fn asked<T: FromBytes>(&self, op: Op) -> T {
        self.attribute(op, objects::UVERBS_ATTR_UHW_IN).expect("a driver's part")
    }

    /// An attribute of the last such command, executed or refused.
    pub(crate) fn attribute<T: FromBytes>(&self, op: Op, id: u16) -> Option<T> {
        let state = self.state();
        let (_, passed) = state.asked.iter().rev().find(|(other, _)| *other == op)?;
        let (_, bytes) = passed.iter().find(|(other, _)| *other == id)?;
        Some(T::read_from_prefix(bytes).expect("as many bytes").0)
    }

    /// The ECE options that the driver last passed to the device; 0 if it passed none.
    pub(crate) fn ece_told(&self) -> u32 {
        let told = self.attribute(Op::EX_MODIFY_QP, objects::UVERBS_ATTR_UHW_IN);
        told.map_or(0, |driver: mlx5_ib_modify_qp| driver.ece_options)
    }

    /// Makes contexts of mlx5 with DEVX, which the script refuses otherwise.
    pub(crate) fn grant_devx(&self) {
        self.state().deviations.grants_devx = true;
    }

    /// Destroys an object, as another process that has the kernel file may.
    pub(crate) fn steal(&self, handle: u32) {
        if let Some(hosted) = &self.hosted {
            let found = self.live().into_iter().find(|(_, live)| *live == handle);
            return hosted.destroy(found.expect("a live object"));
        }
        self.state().steal(handle);
    }

    /// Lets REREG exchange the memory of regions, as some drivers do and rxe's does not.
    pub(crate) fn allow_translation(&self) {
        self.state().deviations.translates = true;
    }

    /// Lets the driver report this rate for every port, in units of 100 Mbit/s.
    pub(crate) fn set_port_speed(&self, speed: u64) {
        self.state().deviations.port_speed = Some(speed);
    }

    /// Gives the rings of rxe's queue pairs elements that are too small for the SGEs that they are to hold.
    pub(crate) fn omit_sges(&self) {
        self.state().deviations.bare_elements = true;
    }

    /// The device is unplugged: its objects are gone, every command but DESTROY fails with `EIO`.
    pub(crate) fn vanish(&self) {
        self.state().vanish();
        if self.hosted.is_some() {
            self.device().unplug();
        }
    }

    /// The kernel begins to remove the device: every command but DESTROY fails with `EIO`, and objects stay until
    /// they are destroyed or [vanish](Self::vanish).
    pub(crate) fn begin_to_vanish(&self) {
        self.state().deviations.leaving = true;
    }

    /// Contexts opened from now on get an event file on which reading fails with `EIO`, as that of a
    /// removed device.
    pub(crate) fn close_events(&self) {
        self.state().events_closed = true;
    }

    /// Puts the event file into an error state, in which it is not readable.
    #[cfg(feature = "tokio")]
    pub(crate) fn break_events(&self) {
        self.state().break_events();
    }

    /// The objects that exist, by kind and handle: oldest first, on mlx5 grouped by kind.
    pub(crate) fn live(&self) -> Vec<(u16, u32)> {
        if let Some(hosted) = &self.hosted {
            return hosted.live();
        }
        self.state().objects.iter().map(|(handle, object)| (object.object, *handle)).collect()
    }

    /// The number of objects of a kind.
    pub(crate) fn count(&self, object: u16) -> usize {
        self.live().iter().filter(|(kind, _)| *kind == object).count()
    }

    /// The objects that existed when the last file descriptor was closed; `None` while one is open.
    pub(crate) fn left_at_close(&self) -> Option<Vec<(u16, u32)>> {
        self.state().left_at_close.clone()
    }

    /// The commands so far, those that failed included.
    pub(crate) fn log(&self) -> Vec<Op> {
        self.state().log.clone()
    }

    /// Wrong commands: with handles that do not exist, or that destroy an object before those that depend on
    /// it.
    pub(crate) fn complaints(&self) -> Vec<String> {
        self.state().complaints.clone()
    }

    /// The number of queues that this process has mapped right now; 0 under Miri, which maps none.
    pub(crate) fn mappings(&self) -> usize {
        if let Some(hosted) = &self.hosted {
            return hosted.holders() - self.state().open_files as usize;
        }
        if cfg!(miri) {
            return 0;
        }
        let maps = std::fs::read_to_string("/proc/self/maps").expect("the list of mappings");
        let name = format!("memfd:{}", self.tag);
        maps.lines().filter(|line| line.contains(&name)).count()
    }

    /// An object of rxe, as it was created.
    pub(crate) fn object(&self, handle: u32) -> ScriptedObject {
        self.state().objects.get(&handle).cloned().expect("a live object")
    }

    /// Puts a completion into a queue as the device would; `false` on overflow.
    pub(crate) fn complete(&self, cq: u32, wc: ib_uverbs_wc) -> bool {
        self.complete_raw(cq, wc.as_bytes())
    }

    pub(crate) fn complete_raw(&self, cq: u32, wc: &[u8]) -> bool {
        self.ring(cq, Role::Cq).put(wc)
    }

    /// Fills all slots of a queue, as earlier requests do.
    pub(crate) fn poison(&self, handle: u32, role: Role) {
        self.ring(handle, role).poison();
    }

    /// Writes any values to both indices of a queue.
    pub(crate) fn scribble(&self, handle: u32, role: Role, producer: u32, consumer: u32) {
        self.ring(handle, role).scribble(producer, consumer);
    }

    /// Entries of a queue that are neither free nor consumed.
    pub(crate) fn pending(&self, handle: u32, role: Role) -> u32 {
        self.ring(handle, role).pending()
    }

    /// The oldest request of a queue; it stays there.
    pub(crate) fn peek(&self, handle: u32, role: Role) -> Option<Vec<u8>> {
        self.ring(handle, role).peek()
    }

    /// Consumes the oldest request of a queue.
    pub(crate) fn take(&self, handle: u32, role: Role) -> Option<Vec<u8>> {
        self.ring(handle, role).take()
    }

    fn ring(&self, handle: u32, role: Role) -> Arc<KernelRing> {
        self.state().ring(handle, role)
    }

    /// Moves a queue pair to a state behind the library's back. Those of mlx5 stay in RESET, where the device carries
    /// out nothing that is posted, and writes no completions beside those of the test.
    pub(crate) fn set_qp_state(&self, qp: u32, state: u8) {
        if self.hosted.is_none() {
            self.state().object(qp).state = state;
        }
    }

    /// Gives an object another number, as if it were another object.
    pub(crate) fn renumber(&self, handle: u32, number: u32) {
        self.state().object(handle).number = number;
    }

    /// Gives a memory region another length and beginning, as if it were another one.
    pub(crate) fn resize(&self, region: u32, length: u64, iova: u64) {
        let mut state = self.state();
        (state.object(region).length, state.object(region).iova) = (length, iova);
    }

    /// The number that the next queue pair gets.
    pub(crate) fn set_next_qpn(&self, qpn: u32) {
        self.state().next_qpn = qpn;
    }

    /// Raises an asynchronous event; `element` as the kernel fills it in.
    pub(crate) fn raise(&self, element: u64, event_type: u32) {
        let event = ib_uverbs_async_event_desc { element, event_type, reserved: 0 };
        self.state().raise(event.as_bytes());
    }

    /// Announces completions of a queue at its channel.
    pub(crate) fn notify(&self, cq: u32) {
        let cq_handle = self.object(cq).user_handle;
        self.state().notify(cq, ib_uverbs_comp_event_desc { cq_handle }.as_bytes());
    }

    /// Writes something that is no announcement to the channel of a queue.
    pub(crate) fn notify_garbage(&self, cq: u32, bytes: &[u8]) {
        self.state().notify(cq, bytes);
    }

    /// Writes something that is no event to the event file.
    pub(crate) fn raise_garbage(&self, bytes: &[u8]) {
        self.state().raise(bytes);
    }
}

#[derive(Debug)]
struct ScriptedKernel {
    script: Script,
    /// The kernel that executes the commands, if it is not the script.
    hosted: Option<UverbsFd>,
    /// A placeholder for the command file, which nobody reads.
    fd: OwnedFd,
    /// The driver that commands are for.
    driver: u32,
    epoch: Epoch,
}

impl ScriptedKernel {
    fn new(script: Script, hosted: Option<UverbsFd>, driver: u32, epoch: Epoch) -> ScriptedKernel {
        script.state().open_files += 1;
        let (fd, _) = socket::pair().expect("a file");
        ScriptedKernel { script, hosted, fd: fd.into(), driver, epoch }
    }

    fn run(&self, op: Op, command: &mut Command<'_>) -> std::result::Result<(), Errno> {
        if let Some(hosted) = &self.hosted {
            return self.script.forward(hosted, op, command);
        }
        command.message(self.driver)?;
        // The kernel refuses commands for another driver than the device's.
        if self.driver != DriverId::RXE.get() {
            return Err(Errno::INVAL);
        }
        self.script.state().run(op, command)
    }
}

impl Drop for ScriptedKernel {
    fn drop(&mut self) {
        let live = self.script.live();
        self.script.state().close(live);
    }
}

impl Kernel for ScriptedKernel {
    fn execute(&self, command: &mut Command<'_>) -> std::result::Result<(), Errno> {
        let op = Op::of(command);
        let hooks = self.script.hooks.lock().unwrap().clone();
        for (_, hook) in hooks.iter().filter(|(hooked, _)| *hooked == op) {
            hook();
        }
        self.run(op, command)?;
        // A test must not change a descriptor: the library cannot check it, and would close another file.
        if op == Op::CREATE_COMP_CHANNEL {
            return Ok(());
        }
        let forgeries = self.script.forgeries.lock().unwrap().clone();
        for (_, id, forgery) in forgeries.iter().filter(|(forged, ..)| *forged == op) {
            if let Some(output) = command.output_room(*id) {
                forgery(output);
            }
        }
        if let Some(tamper) = &mut *self.script.tamper.lock().unwrap() {
            command.each_output(&mut **tamper);
        }
        Ok(())
    }

    fn mapper(&self) -> &dyn Mapper {
        self
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.hosted.as_ref().map_or(self.fd.as_fd(), Kernel::fd)
    }

    fn platform(&self) -> Platform {
        self.hosted.as_ref().map_or(Platform::LINUX, Kernel::platform)
    }

    fn is_hosted(&self) -> bool {
        self.hosted.as_ref().is_some_and(Kernel::is_hosted)
    }

    fn polled(&self) -> bool {
        self.hosted.as_ref().is_some_and(Kernel::polled)
    }

    fn reopen(&self) -> std::result::Result<Box<dyn Kernel>, Errno> {
        if let Some(hosted) = &self.hosted {
            return hosted.reopen();
        }
        let epoch = Epoch::current()?;
        Ok(Box::new(ScriptedKernel::new(self.script.clone(), None, self.driver, epoch)))
    }
}

impl Mapper for ScriptedKernel {
    fn map(&self, offset: u64, length: usize) -> std::result::Result<Mapping, Errno> {
        if let Some(hosted) = &self.hosted {
            self.script.state().step()?;
            return hosted.map(offset, length);
        }
        let ring = self.script.state().claim(offset, length)?;
        ring.file().map(length, self.epoch)
    }

    fn map_read_only(&self, offset: u64, length: usize) -> std::result::Result<Mapping, Errno> {
        if let Some(hosted) = &self.hosted {
            self.script.state().step()?;
            return hosted.map_read_only(offset, length);
        }
        let ring = self.script.state().claim(offset, length)?;
        ring.file().map_read_only(length, self.epoch)
    }
}
