//! Faults of a fabric: scripted ones at a device, and random ones.
//!
//! Scripted faults are calls of a [`Device`], at a moment that the test chooses. Random faults have [`Rates`], and the
//! seed of a stepped fabric decides when each happens.

use crate::call::Call;
use crate::fabric::Fabric;
use crate::kernel::Kernel;
use crate::world::World;
use rustix::fd::AsFd;
use rustix::io::Errno;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use uverbs_connectx::decisions::Decisions;
pub use uverbs_connectx::fault::Side;
use uverbs_connectx::fault::{Delay, InjectedFaults, MessageFate};
pub use uverbs_connectx::format::syndrome::{CqeError, Syndrome};
use uverbs_uapi::ah::UVERBS_METHOD_AH_DESTROY;
use uverbs_uapi::cq::{UVERBS_METHOD_CQ_CREATE, UVERBS_METHOD_CQ_DESTROY};
use uverbs_uapi::device::{UVERBS_ATTR_WRITE_CMD, UVERBS_METHOD_INVOKE_WRITE};
use uverbs_uapi::dm::{UVERBS_METHOD_DM_ALLOC, UVERBS_METHOD_DM_FREE};
use uverbs_uapi::flow::UVERBS_METHOD_FLOW_DESTROY;
use uverbs_uapi::mlx5::object::{MLX5_IB_OBJECT_UAR, MLX5_IB_OBJECT_VAR};
use uverbs_uapi::mlx5::uar::MLX5_IB_METHOD_UAR_OBJ_DESTROY;
use uverbs_uapi::mlx5::var::MLX5_IB_METHOD_VAR_OBJ_DESTROY;
use uverbs_uapi::mr::{
    UVERBS_METHOD_DM_MR_REG, UVERBS_METHOD_MR_DESTROY, UVERBS_METHOD_REG_DMABUF_MR,
};
use uverbs_uapi::mw::UVERBS_METHOD_MW_DESTROY;
use uverbs_uapi::object::{
    UVERBS_OBJECT_AH, UVERBS_OBJECT_CQ, UVERBS_OBJECT_DEVICE, UVERBS_OBJECT_DM, UVERBS_OBJECT_FLOW,
    UVERBS_OBJECT_MR, UVERBS_OBJECT_MW, UVERBS_OBJECT_PD, UVERBS_OBJECT_QP, UVERBS_OBJECT_SRQ,
    UVERBS_OBJECT_XRCD,
};
use uverbs_uapi::pd::UVERBS_METHOD_PD_DESTROY;
use uverbs_uapi::qp::{UVERBS_METHOD_QP_CREATE, UVERBS_METHOD_QP_DESTROY};
use uverbs_uapi::srq::{UVERBS_METHOD_SRQ_CREATE, UVERBS_METHOD_SRQ_DESTROY};
use uverbs_uapi::write::{
    IB_USER_VERBS_CMD_ALLOC_MW, IB_USER_VERBS_CMD_ALLOC_PD, IB_USER_VERBS_CMD_ATTACH_MCAST,
    IB_USER_VERBS_CMD_CREATE_AH, IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL,
    IB_USER_VERBS_CMD_FLAG_EXTENDED, IB_USER_VERBS_CMD_MODIFY_QP, IB_USER_VERBS_CMD_OPEN_XRCD,
    IB_USER_VERBS_CMD_QUERY_QP, IB_USER_VERBS_CMD_REG_MR, IB_USER_VERBS_CMD_RESIZE_CQ,
    IB_USER_VERBS_EX_CMD_CREATE_FLOW, IB_USER_VERBS_EX_CMD_MODIFY_QP,
};
use uverbs_uapi::xrcd::UVERBS_METHOD_XRCD_DESTROY;

/// A verb that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Verb {
    /// Opening a device.
    OpenDevice,
    /// Allocating a protection domain.
    AllocPd,
    /// Registering memory of any kind.
    RegMr,
    /// Allocating a memory window.
    AllocMw,
    /// Creating a completion channel.
    CreateCompChannel,
    /// Creating a completion queue.
    CreateCq,
    /// Changing the size of a completion queue.
    ResizeCq,
    /// Creating a queue pair.
    CreateQp,
    /// Moving a queue pair to another state, or changing its attributes.
    ModifyQp,
    /// Querying a queue pair's attributes.
    QueryQp,
    /// Creating a shared receive queue.
    CreateSrq,
    /// Creating an address handle.
    CreateAh,
    /// Opening an XRC domain.
    OpenXrcd,
    /// Allocating device memory.
    AllocDm,
    /// Joining a multicast group.
    AttachMcast,
    /// Creating a flow rule.
    CreateFlow,
    /// Destroying an object of any kind.
    Destroy,
}

impl fmt::Display for Verb {
    /// As C spells it, without its prefix.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verb::OpenDevice => "open_device",
            Verb::AllocPd => "alloc_pd",
            Verb::RegMr => "reg_mr",
            Verb::AllocMw => "alloc_mw",
            Verb::CreateCompChannel => "create_comp_channel",
            Verb::CreateCq => "create_cq",
            Verb::ResizeCq => "resize_cq",
            Verb::CreateQp => "create_qp",
            Verb::ModifyQp => "modify_qp",
            Verb::QueryQp => "query_qp",
            Verb::CreateSrq => "create_srq",
            Verb::CreateAh => "create_ah",
            Verb::OpenXrcd => "open_xrcd",
            Verb::AllocDm => "alloc_dm",
            Verb::AttachMcast => "attach_mcast",
            Verb::CreateFlow => "create_flow",
            Verb::Destroy => "destroy",
        })
    }
}

impl Verb {
    /// Whether it makes an object, and so needs memory.
    fn creates(self) -> bool {
        !matches!(self, Verb::ModifyQp | Verb::QueryQp | Verb::ResizeCq | Verb::Destroy)
    }

    /// The verb of an ioctl.
    pub(crate) fn of_call(call: &Call<'_>) -> Option<Verb> {
        match (call.header.object_id, call.header.method_id) {
            (UVERBS_OBJECT_DEVICE, UVERBS_METHOD_INVOKE_WRITE) => {
                Verb::of_write(call.u64_if(UVERBS_ATTR_WRITE_CMD)? as u32)
            }
            (object, method) => Verb::of_method(object, method),
        }
    }

    /// The verb of an ioctl method.
    pub(crate) fn of_method(object: u16, method: u16) -> Option<Verb> {
        Some(match (object, method) {
            (UVERBS_OBJECT_MR, UVERBS_METHOD_DM_MR_REG | UVERBS_METHOD_REG_DMABUF_MR) => {
                Verb::RegMr
            }
            (UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_CREATE) => Verb::CreateCq,
            (UVERBS_OBJECT_QP, UVERBS_METHOD_QP_CREATE) => Verb::CreateQp,
            (UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_CREATE) => Verb::CreateSrq,
            (UVERBS_OBJECT_DM, UVERBS_METHOD_DM_ALLOC) => Verb::AllocDm,
            (UVERBS_OBJECT_PD, UVERBS_METHOD_PD_DESTROY)
            | (UVERBS_OBJECT_MR, UVERBS_METHOD_MR_DESTROY)
            | (UVERBS_OBJECT_MW, UVERBS_METHOD_MW_DESTROY)
            | (UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_DESTROY)
            | (UVERBS_OBJECT_QP, UVERBS_METHOD_QP_DESTROY)
            | (UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_DESTROY)
            | (UVERBS_OBJECT_AH, UVERBS_METHOD_AH_DESTROY)
            | (UVERBS_OBJECT_XRCD, UVERBS_METHOD_XRCD_DESTROY)
            | (UVERBS_OBJECT_DM, UVERBS_METHOD_DM_FREE)
            | (UVERBS_OBJECT_FLOW, UVERBS_METHOD_FLOW_DESTROY)
            | (MLX5_IB_OBJECT_UAR, MLX5_IB_METHOD_UAR_OBJ_DESTROY)
            | (MLX5_IB_OBJECT_VAR, MLX5_IB_METHOD_VAR_OBJ_DESTROY) => Verb::Destroy,
            _ => return None,
        })
    }

    /// The verb of an older command.
    pub(crate) fn of_write(command: u32) -> Option<Verb> {
        const EX_MODIFY_QP: u32 = IB_USER_VERBS_EX_CMD_MODIFY_QP | IB_USER_VERBS_CMD_FLAG_EXTENDED;
        const EX_CREATE_FLOW: u32 =
            IB_USER_VERBS_EX_CMD_CREATE_FLOW | IB_USER_VERBS_CMD_FLAG_EXTENDED;
        Some(match command {
            IB_USER_VERBS_CMD_ALLOC_PD => Verb::AllocPd,
            IB_USER_VERBS_CMD_REG_MR => Verb::RegMr,
            IB_USER_VERBS_CMD_ALLOC_MW => Verb::AllocMw,
            IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL => Verb::CreateCompChannel,
            IB_USER_VERBS_CMD_RESIZE_CQ => Verb::ResizeCq,
            IB_USER_VERBS_CMD_MODIFY_QP | EX_MODIFY_QP => Verb::ModifyQp,
            IB_USER_VERBS_CMD_QUERY_QP => Verb::QueryQp,
            IB_USER_VERBS_CMD_CREATE_AH => Verb::CreateAh,
            IB_USER_VERBS_CMD_OPEN_XRCD => Verb::OpenXrcd,
            IB_USER_VERBS_CMD_ATTACH_MCAST => Verb::AttachMcast,
            EX_CREATE_FLOW => Verb::CreateFlow,
            _ => return None,
        })
    }
}

/// Calls that are to fail.
#[derive(Debug, Default)]
pub(crate) struct FailingCalls(Vec<Failing>);

#[derive(Debug)]
struct Failing {
    verb: Verb,
    /// The number of calls that succeed before.
    after: u32,
    errno: Errno,
}

impl FailingCalls {
    /// Fails a call if a failure of its verb is due.
    pub(crate) fn check(&mut self, verb: Option<Verb>) -> Result<(), Errno> {
        let Some(verb) = verb else { return Ok(()) };
        let Some(at) = self.0.iter().position(|failing| failing.verb == verb) else {
            return Ok(());
        };
        if self.0[at].after > 0 {
            self.0[at].after -= 1;
            return Ok(());
        }
        Err(self.0.remove(at).errno)
    }
}

/// Rates of random faults: each a share, from 0 for never to 1 for always, of the messages, events or calls that its
/// method names.
///
/// The seed of a stepped fabric decides about each message, event and call once. A fabric in real time has no such
/// faults.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[must_use]
pub struct Rates {
    loss: f64,
    delay: f64,
    longest: Duration,
    events: f64,
    calls: f64,
}

impl Rates {
    /// Without faults.
    pub fn none() -> Rates {
        Rates::default()
    }

    /// The share of messages that are lost, of queue pairs and of the connection manager. A message is a request of a
    /// queue pair, with all its packets, whatever its length; responses and frames of raw packets are not among them. A
    /// reliable connection and the connection manager send it again, and that is another message.
    pub fn loss(mut self, share: f64) -> Rates {
        self.loss = share;
        self
    }

    /// The share of queue pairs' messages that are late, and not lost, by any time up to `longest`; the queue pair's
    /// later messages wait for them.
    pub fn delay(mut self, share: f64, longest: Duration) -> Rates {
        (self.delay, self.longest) = (share, longest);
        self
    }

    /// The share of events, of completions and asynchronous ones, that are late, by any time up to a millisecond.
    pub fn late_events(mut self, share: f64) -> Rates {
        self.events = share;
        self
    }

    /// The share of calls that fail with `ENOMEM`, of all that create or register an object of a context.
    pub fn failed_calls(mut self, share: f64) -> Rates {
        self.calls = share;
        self
    }

    /// A share that is not between 0 and 1, with its name.
    pub(crate) fn out_of_range(&self) -> Option<(&'static str, f64)> {
        let shares = [
            ("loss", self.loss),
            ("delay", self.delay),
            ("late_events", self.events),
            ("failed_calls", self.calls),
        ];
        shares.into_iter().find(|(_, share)| !(0.0..=1.0).contains(share))
    }

    /// Whether messages of queue pairs may be lost or late.
    pub(crate) fn decide_fates(&self) -> bool {
        self.loss > 0.0 || self.delay > 0.0
    }

    /// Decides about a message of a queue pair.
    pub(crate) fn fate(&self, decisions: &mut Decisions) -> MessageFate {
        if decisions.happens(self.loss) {
            return MessageFate::Lost;
        }
        // The share is of all messages, and this is one of those that are left.
        if decisions.happens(self.delay / (1.0 - self.loss)) {
            let longest = u64::try_from(self.longest.as_nanos()).unwrap_or(u64::MAX).max(1);
            return MessageFate::Delayed(Delay::Time(decisions.below(longest)));
        }
        MessageFate::Delivered
    }

    /// Whether a call fails.
    pub(crate) fn fails(&self, verb: Verb, decisions: &mut Decisions) -> bool {
        verb.creates() && decisions.happens(self.calls)
    }

    /// Whether the next message of the connection manager is lost.
    pub(crate) fn loses(&self, decisions: &mut Decisions) -> bool {
        decisions.happens(self.loss)
    }

    /// The delay of an event in nanoseconds; 0 for none.
    pub(crate) fn lateness(&self, decisions: &mut Decisions) -> u64 {
        const LONGEST: u64 = 1_000_000;
        match self.events > 0.0 && decisions.happens(self.events) {
            true => decisions.below(LONGEST),
            false => 0,
        }
    }
}

impl Fabric {
    /// The device with a name, to disturb it; `None` if there is none or it was unplugged.
    pub fn device(&self, name: &str) -> Option<Device> {
        let kernel = self.world.kernel().ok()?;
        let number = kernel.drivers.iter().position(|driver| driver.name == name)?;
        kernel.drivers[number].is_plugged().then(|| Device { world: self.world.clone(), number })
    }

    /// Kills the process behind a context or an event channel, as far as the kernel sees it: closes the file, which
    /// destroys all its objects, in use or not. Peers see the same as when a program dies. Every later call on the file
    /// fails with `EIO`, except that the destruction of an object that is gone succeeds. Returns whether the descriptor
    /// belongs to this fabric.
    pub fn kill(&self, file: impl AsFd) -> bool {
        let now = self.world.nanoseconds();
        self.world.disturb(|kernel| kernel.kill(file.as_fd(), now))
    }
}

/// A device of a fabric, as its operator has it: its slot, its cable, its firmware. [`Fabric::device`] finds it.
#[derive(Clone, Debug)]
pub struct Device {
    pub(crate) world: Arc<World>,
    pub(crate) number: usize,
}

impl Device {
    fn faults<T: Default>(
        &self,
        fault: impl fmt::Display,
        change: impl FnOnce(&mut InjectedFaults) -> T,
    ) -> T {
        self.disturb(fault, |kernel| change(kernel.function(self.number).device_mut().faults_mut()))
    }

    /// Changes the fabric, and adds the fault to the history.
    pub(crate) fn disturb<T: Default>(
        &self,
        fault: impl fmt::Display,
        change: impl FnOnce(&mut Kernel) -> T,
    ) -> T {
        let now = self.world.nanoseconds();
        self.world.disturb(|kernel| {
            kernel.note_fault(now, self.number, format_args!("{fault}"));
            change(kernel)
        })
    }

    /// Loses the next `count` messages that the device sends. A reliable connection sends them again after its
    /// timeout.
    pub fn lose_messages(&self, count: u32) {
        self.faults(format!("the next {count} messages are lost"), |faults| {
            faults.lose_messages(count);
        });
    }

    /// Loses the next `count` messages of the connection manager that the device sends: requests, replies and so on,
    /// which it sends again after seconds.
    pub fn lose_cm_messages(&self, count: u32) {
        let fault = format!("the next {count} messages of the connection manager are lost");
        self.disturb(fault, |kernel| kernel.cm.to_lose.insert(self.number, count));
    }

    /// Holds each of the next `count` messages back for a while. The later messages of its queue pair wait for it. A
    /// reliable connection whose timeout is shorter sends them again, which is another message: late if it is one of
    /// the `count`. At most a year, and 1024 packets of the device; later ones are lost.
    pub fn delay_messages(&self, count: u32, by: Duration) {
        const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);
        let by = by.min(YEAR);
        let fault = format!("the next {count} messages are late by {by:?}");
        let by = Delay::Time(by.as_nanos() as u64);
        self.faults(fault, |faults| faults.delay_messages(count, by));
    }

    /// Holds each of the next `count` messages back until so many other messages have passed it, or a second has.
    pub fn reorder_messages(&self, count: u32, passes: u32) {
        let fault = format!("{passes} others pass each of the next {count} messages");
        self.faults(fault, |faults| faults.delay_messages(count, Delay::Messages(passes)));
    }

    /// Refuses the next `count` messages that need a receive, as if none was posted: a receiver not ready (RNR).
    pub fn refuse_receives(&self, count: u32) {
        let fault = format!("no receive for the next {count} messages");
        self.faults(fault, |faults| faults.refuse_receives(count));
    }

    /// Fails a request with a completion of these syndromes, after `after` requests that succeed: requests of queue
    /// pair `qpn`, or of any. The queue pair goes to state ERR.
    pub fn fail_request(&self, qpn: Option<u32>, side: Side, after: u32, error: CqeError) {
        let fault = format!("a request fails, the one after {after} others");
        self.faults(fault, |faults| faults.fail_wqe(qpn, side, after, error));
    }

    /// Fails a call, after `after` of the same verb that succeed.
    ///
    /// # Panics
    ///
    /// For `ENOENT` of [`Verb::Destroy`] and [`Verb::ModifyQp`], by which a kernel says that the object is gone: the
    /// program would take memory back that the device still reaches.
    pub fn fail_call(&self, verb: Verb, after: u32, errno: Errno) {
        let is_claim = errno == Errno::NOENT && matches!(verb, Verb::Destroy | Verb::ModifyQp);
        assert!(!is_claim, "{verb} cannot fail with ENOENT: the object would not be gone");
        self.disturb(format!("{verb} fails after {after} others"), |kernel| {
            kernel.drivers[self.number].failing.0.push(Failing { verb, after, errno });
        });
    }

    /// Pulls the cable, or plugs it in again. Contexts get `PORT_ERR` and `PORT_ACTIVE`.
    pub fn set_link(&self, up: bool) {
        let fault = format!("the link goes {}", if up { "up" } else { "down" });
        self.disturb(fault, |kernel| {
            // A query of the port's state finds the change, whether or not its event is lost.
            kernel.drivers[self.number].link = up;
            kernel.function(self.number).device_mut().set_link(up);
        });
    }

    /// Takes a port of the LAG behind the device down, or up again, counted from 1. The link stays: queue pairs that are to
    /// send from that port send from the other one. Returns whether the device has a LAG with such a port.
    pub fn set_lag_port_up(&self, port: u32, up: bool) -> bool {
        let fault = format!("port {port} of the LAG goes {}", if up { "up" } else { "down" });
        self.disturb(fault, |kernel| {
            kernel.function(self.number).device_mut().set_lag_port_up(port, up)
        })
    }

    /// Loses the next `count` events, of completions and asynchronous ones.
    pub fn lose_events(&self, count: u32) {
        let fault = format!("the next {count} events are lost");
        self.disturb(fault, |kernel| kernel.drivers[self.number].events_to_lose = count);
    }

    /// Holds each of the next `count` events back for a while.
    pub fn delay_events(&self, count: u32, by: Duration) {
        let fault = format!("the next {count} events are late by {by:?}");
        let by = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
        self.disturb(fault, |kernel| kernel.drivers[self.number].events_to_delay = (count, by));
    }

    /// Makes a memory key invalid, as if its region were gone: accesses by it fail. Returns whether there was such a
    /// key.
    pub fn invalidate_key(&self, key: u32) -> bool {
        let fault = format!("key {key:#x} becomes invalid");
        self.disturb(fault, |kernel| kernel.function(self.number).device_mut().invalidate_key(key))
    }

    /// The number of objects that firmware has, by kind, those of the kernel included. Beside the lists of a context it
    /// shows what a driver, or a program by DEVX, left on the device.
    pub fn firmware_objects(&self) -> Vec<(&'static str, usize)> {
        let counts = |kernel: &mut Kernel| kernel.function(self.number).device().objects().counts();
        self.world.kernel().map_or_else(|_| Vec::new(), |mut kernel| counts(&mut kernel))
    }

    /// Overflows the completion queue of one side of queue pair `qpn`: it takes no more completions, and the kernel
    /// reports `CQ_ERR`. Returns whether there was such a queue.
    pub fn overflow_cq(&self, qpn: u32, side: Side) -> bool {
        let fault = format!("the completion queue of qp {qpn:#x} overflows");
        self.disturb(fault, |kernel| {
            kernel.function(self.number).device_mut().overflow_cq(qpn, side)
        })
    }

    /// Puts the device into internal error: it stops, and contexts get `DEVICE_FATAL`. Commands fail with `ENOLINK`,
    /// except those that destroy an object or move a queue pair to `RESET` or `ERR`.
    pub fn fail(&self) {
        let fault = "the device has an internal error";
        self.disturb(fault, |kernel| kernel.fail_device(self.number));
    }

    /// Unbinds the driver from the data-direct function: regions that were registered through it reach nothing any
    /// more, and none are registered.
    pub fn unbind_data_direct(&self) {
        self.disturb("the data-direct function is unbound", |kernel| {
            kernel.unbind_data_direct(self.number);
        });
    }

    /// Takes the device out of its slot by surprise: its peers get no message. The kernel disassociates the device's
    /// contexts: their objects are gone, every call except their destruction fails with `EIO`, and contexts get
    /// `DEVICE_FATAL`. The device is not listed any more. Ids of the connection manager report `DEVICE_REMOVAL`, and
    /// every call on them except their destruction fails with `ENXIO`.
    pub fn unplug(self) {
        self.disturb("the device is unplugged", |kernel| kernel.unplug(self.number));
    }
}
