//! Event channels: open files of the connection manager, and the ids that their events are for.
//!
//! Pairs with `ucma_get_event` in `core/ucma.c`. Any thread may read events, and moves each to the queue
//! of its id. Of several threads that wait, one waits for the file, and wakes the others when it has
//! read an event.
//!
//! [`model`](super::model) has loom run tasks that share a channel: a dispatcher that finds another thread reading, and
//! ids that are polled while events come. Waiting threads are not modelled: a thread that misses a wake-up looks again
//! after [`LONGEST_SLEEP`]. Locks guard the lists of ids and of known devices; the counters need no order.

use super::event::Event;
use super::id::IdInner;
use super::id::events::Waiting;
use super::infiniband::NO_ADMINISTRATOR;
use super::param::Depths;
use super::port_space::PortSpace;
use super::rdma_cm_fd::RdmaCmFd;
use super::ucma::{UcmaCommand, UcmaFile};
use super::unbound::Id;
use crate::context::Context;
use crate::device::{Device, Guid, devices, devices_on, open_rdma_cm};
use crate::error::{Error, Result};
use crate::events::file::set_nonblocking;
use crate::file::random;
use crate::first_panic::FirstPanic;
use crate::platform::Platform;
use crate::qp::QpType;
use crate::sync::AtomicBool;
use crate::sync::fork::Epoch;
use crate::sync::lock::Lock;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::thread::{self, Thread};
use std::time::{Duration, Instant};
use uverbs_host::HostSystem;
use uverbs_uapi::rdma_user_cm::{
    RDMA_USER_CM_CMD_CREATE_ID, rdma_cm_event_type, rdma_ucm_event_resp, rdma_ucm_get_event,
};
use zerocopy::{Immutable, IntoBytes};

/// The longest sleep of a thread before it checks whether another thread still reads the file. The reading thread wakes
/// it when it stops; the limit only bounds the harm of a lost wake-up.
pub(super) const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// An open file of the connection manager, through which the kernel reports events of ids.
///
/// One channel may serve any number of ids, and each of them keeps it open. Clones are handles of the
/// same channel, and several threads may use them. An id that waits reads the channel by itself. A
/// program with an event loop registers the file ([`as_fd`](AsFd::as_fd), level-triggered), calls
/// [`dispatch`](Self::dispatch) when it is readable, and then polls its ids.
///
/// A channel belongs to the process that opened it, and to the credentials of that moment: the kernel
/// takes no commands after a change of user, group or capabilities (`EACCES`), nor does this library
/// in a forked child, where the ids stay the parent's.
#[doc(alias("rdma_event_channel", "rdma_destroy_event_channel"))]
#[derive(Clone, Debug)]
pub struct EventChannel {
    pub(super) inner: Arc<Channel>,
}

#[derive(Debug)]
pub(super) struct Channel {
    kernel: Box<dyn UcmaFile>,
    /// The system that the file belongs to: its clock, its devices.
    pub(super) platform: Platform,
    epoch: Epoch,
    ids: Lock<HashMap<u64, Weak<IdInner>>>,
    next_key: AtomicU64,
    /// Contexts and limits of the devices that ids are on.
    known: Lock<Vec<Known>>,
    /// Whether a thread reads the file or waits for it.
    reading: AtomicBool,
    /// Whether a read without a pending event returns at once. Only the reading thread changes it.
    nonblocking: AtomicBool,
    /// The threads that the reading thread is to wake.
    waiting: Lock<Vec<Thread>>,
    /// Whether [`dispatch_or_wake`](EventChannel::dispatch_or_wake) found another thread reading.
    dispatcher_waits: AtomicBool,
    /// The task that dispatches, to be woken when that thread stops.
    dispatcher: Lock<Option<Waker>>,
    leaked: AtomicU64,
}

/// A device that an id is on.
#[derive(Debug)]
struct Known {
    device: Device,
    context: Option<Context>,
    limits: Option<Depths>,
}

impl Known {
    /// The entry of a device, which begins empty.
    fn entry<'k>(known: &'k mut Vec<Known>, device: &Device) -> &'k mut Known {
        let at = known.iter().position(|it| it.device == *device).unwrap_or_else(|| {
            known.push(Known { device: device.clone(), context: None, limits: None });
            known.len() - 1
        });
        &mut known[at]
    }
}

/// The kernel's name of an id's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceName {
    /// `None` from kernels that do not report it.
    pub(super) index: Option<u32>,
    pub(super) guid: Guid,
}

impl DeviceName {
    fn is(self, device: &Device) -> bool {
        match (self.index, device.index()) {
            (Some(index), Some(other)) => index == other,
            _ => self.guid == device.node_guid(),
        }
    }
}

impl EventChannel {
    /// Opens the connection manager.
    ///
    /// # Errors
    ///
    /// `ENODEV` if the kernel has none (`modprobe rdma_ucm`), `ENOENT` if its node in `/dev` is missing,
    /// `EACCES` without permission for the node (the message names it), `EOPNOTSUPP` for another
    /// version of the ABI.
    #[doc(alias = "rdma_create_event_channel")]
    pub fn open() -> Result<EventChannel> {
        EventChannel::open_of(&Platform::current())
    }

    /// As [`open`](Self::open), of a hosted kernel, which stands for Linux in this process.
    ///
    /// **Unstable**, as `uverbs-host` is.
    ///
    /// ```
    /// # #[cfg(feature = "sim")] {
    /// use uverbs::cm::EventChannel;
    /// use uverbs::sim::{Fabric, Mode};
    ///
    /// let fabric = Fabric::new(2, Mode::Trapped);
    /// let channel = EventChannel::open_on(&fabric.system())?;
    /// assert_eq!(channel.leaked(), 0);
    /// # }
    /// # Ok::<(), uverbs::Error>(())
    /// ```
    pub fn open_on(system: &Arc<dyn HostSystem>) -> Result<EventChannel> {
        EventChannel::open_of(&Platform::from(system.clone()))
    }

    fn open_of(platform: &Platform) -> Result<EventChannel> {
        let file = open_rdma_cm("create_event_channel", platform)?;
        EventChannel::on(Box::new(RdmaCmFd::new(file)))
    }

    /// A channel on an open file that is in blocking mode.
    pub(super) fn on(kernel: Box<dyn UcmaFile>) -> Result<EventChannel> {
        let epoch = Epoch::of_verb("create_event_channel")?;
        let [first] = random();
        let inner = Channel {
            platform: kernel.platform(),
            kernel,
            epoch,
            ids: Lock::default(),
            // Ids keep their keys when they move between channels, so that no two channels may share a key.
            next_key: AtomicU64::new(first),
            known: Lock::default(),
            reading: AtomicBool::new(false),
            nonblocking: AtomicBool::new(false),
            waiting: Lock::default(),
            dispatcher_waits: AtomicBool::new(false),
            dispatcher: Lock::default(),
            leaked: AtomicU64::new(0),
        };
        Ok(EventChannel { inner: Arc::new(inner) })
    }

    /// Creates an id in a port space, for queue pairs of a type: RC in [`TCP`](PortSpace::TCP), UD in
    /// [`UDP`](PortSpace::UDP) and [`IPOIB`](PortSpace::IPOIB), and in [`IB`](PortSpace::IB) any of `RC`, `UC`, `UD`,
    /// `XRC_INI` to connect, and `XRC_TGT` to listen. Both sides are in the same port space.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a space that the kernel does not know, or a type that the space does not have; `ENOMEM`; `EACCES`
    /// after a change of credentials.
    #[doc(alias = "rdma_create_id")]
    pub fn create_id(&self, space: PortSpace, qp_type: QpType) -> Result<Id> {
        Ok(Id::new(IdInner::create(&self.inner, space, qp_type)?))
    }

    /// Reads all pending events, moves each to its id, and returns their number. An event loop calls
    /// this when the file is readable, and then polls the ids. While another thread waits on an id of
    /// the channel, that thread reads the events, and this returns 0.
    ///
    /// # Errors
    ///
    /// `EACCES` after a change of credentials.
    #[doc(alias("rdma_get_cm_event", "rdma_ack_cm_event"))]
    pub fn dispatch(&self) -> Result<usize> {
        const VERB: &str = "get_cm_event";
        self.inner.check_fork(VERB)?;
        match Reading::begin(&self.inner) {
            Some(reading) => reading.dispatch(VERB, &self.inner),
            None => Ok(0),
        }
    }

    /// As [`dispatch`](Self::dispatch), for a task: `None` while another thread reads, and the task is woken when that
    /// thread stops.
    pub(crate) fn dispatch_or_wake(
        &self,
        cx: &mut std::task::Context<'_>,
    ) -> Result<Option<usize>> {
        const VERB: &str = "get_cm_event";
        self.inner.check_fork(VERB)?;
        if let Some(reading) = Reading::begin(&self.inner) {
            return reading.dispatch(VERB, &self.inner).map(Some);
        }
        // The clone and the drop of the older waker, which are code of the program, happen without the lock.
        let waker = cx.waker().clone();
        let old = self.inner.dispatcher.lock().and_then(|mut it| it.replace(waker));
        drop(old);
        // A thread that stops reading swaps this flag after it has stopped. This task swaps it first, and then looks
        // again whether a thread reads. The later of the two swaps sees all that came before the other one.
        self.inner.dispatcher_waits.swap(true, Ordering::AcqRel);
        Reading::begin(&self.inner).map(|reading| reading.dispatch(VERB, &self.inner)).transpose()
    }

    /// Whether a thread is reading the channel.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn is_being_read(&self) -> bool {
        self.inner.reading.load(Ordering::SeqCst)
    }

    /// Wakes the tasks of all ids.
    pub(crate) fn wake_all(&self) {
        let ids = self.inner.ids.lock().map(|ids| ids.values().cloned().collect::<Vec<_>>());
        let mut waiting = Waiting::default();
        for id in ids.into_iter().flatten().filter_map(|id| id.upgrade()) {
            id.add_waiting(&mut waiting);
        }
        waiting.wake();
    }

    /// Makes this the context of ids on its device: from now on [`context`](super::RouteResolved::context) of an id
    /// returns it. Without this call, the first id that asks opens a context of the device, and the channel keeps it
    /// for all others.
    ///
    /// ```no_run
    /// # fn f(channel: &uverbs::cm::EventChannel) -> uverbs::Result<()> {
    /// let context = uverbs::Context::open_first()?;
    /// channel.use_context(&context)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Any call in a forked child fails.
    pub fn use_context(&self, context: &Context) -> Result<()> {
        const VERB: &str = "use_context";
        let device = context.device();
        let mut known = self.inner.known(VERB)?;
        let former = Known::entry(&mut known, device).context.replace(context.clone());
        // Unlocked before the former context drops: it may be the last of its file, which the kernel closes slowly.
        drop(known);
        drop(former);
        Ok(())
    }

    /// The number of ids that the kernel refused to destroy when they were dropped. Closing the channel destroys them.
    pub fn leaked(&self) -> u64 {
        self.inner.leaked.load(Ordering::Relaxed)
    }
}

impl AsFd for EventChannel {
    /// The file is readable while an event is pending.
    ///
    /// The command that reads an event blocks until the first call that polls, or waits with a deadline: that call sets
    /// `O_NONBLOCK`, which stays. The program may set it, too.
    ///
    /// A program sends commands to the connection manager by `write(2)` on this file, which Rust takes for safe. A
    /// command holds an address of this process, to which the kernel writes its response, and the library cannot guard
    /// against commands that the program writes itself. So pass the file only to code that just waits for it, and that
    /// is trusted with all memory of the process, as with [`Context::share`]. A process that has a duplicate can use
    /// and destroy every id of the channel.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.kernel.fd()
    }
}

impl Channel {
    pub(super) fn check_fork(&self, verb: &'static str) -> Result<()> {
        if self.epoch.is_over() { Err(self.forked(verb)) } else { Ok(()) }
    }

    /// The error of a call in a forked child.
    pub(super) fn forked(&self, verb: &'static str) -> Error {
        Error::new(verb, Errno::OWNERDEAD).detail(
            "this process is a fork of the one that opened the event channel; open another one in \
             the child",
        )
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.kernel.fd()
    }

    pub(super) fn is_forked(&self) -> bool {
        self.epoch.is_over()
    }

    pub(super) fn count_leak(&self) {
        self.leaked.fetch_add(1, Ordering::Relaxed);
    }

    /// Runs a command without checking for a fork.
    pub(super) fn run(&self, command: UcmaCommand<'_>) -> std::result::Result<(), Errno> {
        self.kernel.execute(command)
    }

    /// Runs a command on behalf of `verb`; refuses in a forked child.
    pub(super) fn execute(&self, verb: &'static str, command: UcmaCommand<'_>) -> Result<()> {
        self.check_fork(verb)?;
        let number = command.number;
        self.run(command).map_err(|errno| explain(verb, number, errno))
    }

    /// A number that the kernel gives no id.
    pub(super) const NO_ID: u32 = u32::MAX;

    /// Runs a command that older kernels lack. Those answer `EINVAL`; newer ones do so, too, if the request does not
    /// suit the id. A kernel that has the command looks for the id first: its answer to `probe`, the same request for
    /// [`NO_ID`](Self::NO_ID), is another error.
    pub(super) fn execute_new<T: IntoBytes + Immutable>(
        &self,
        verb: &'static str,
        number: u32,
        request: &T,
        probe: &T,
        since: &'static str,
    ) -> Result<()> {
        self.execute(verb, UcmaCommand::new(number, request)).map_err(|error| match error.errno() {
            Errno::INVAL if self.run(UcmaCommand::new(number, probe)) != Err(Errno::NOENT) => {
                Error::new(verb, Errno::OPNOTSUPP).detail(format!(
                    "this kernel's connection manager does not have the command; Linux {since} and later do"
                ))
            }
            _ => error,
        })
    }

    /// A number by which events name an id, unique within this channel.
    pub(super) fn key(&self) -> u64 {
        loop {
            let key = self.next_key.fetch_add(1, Ordering::Relaxed);
            // The kernel reports no events of an id with key 0.
            if key != 0 {
                return key;
            }
        }
    }

    /// Directs events with the key of an id to it.
    pub(super) fn register(&self, verb: &'static str, id: &Arc<IdInner>) -> Result<()> {
        let mut ids = self.ids.lock().ok_or_else(|| Error::forked(verb))?;
        ids.insert(id.key, Arc::downgrade(id));
        Ok(())
    }

    pub(super) fn retire(&self, key: u64) {
        if let Some(mut ids) = self.ids.lock() {
            ids.remove(&key);
        }
    }

    /// Reads one event and moves it to its id; `false` if there was none. In blocking mode this waits for an event. The
    /// tasks that wait for the event are added to `waiting`, for the caller to wake when it reads no more: a waker is
    /// code of the program, and may wait for an id of this channel.
    fn read(self: &Arc<Self>, verb: &'static str, waiting: &mut Waiting) -> Result<bool> {
        let mut raw = rdma_ucm_event_resp::default();
        let request = rdma_ucm_get_event::default();
        match self.run(UcmaCommand::get_event(&request, &mut raw)) {
            Ok(()) => {}
            Err(Errno::AGAIN) => return Ok(false),
            Err(errno) => return Err(explain(verb, u32::MAX, errno)),
        }
        let mut event = Event::new(&raw);
        let removal = event.kind == rdma_cm_event_type::RDMA_CM_EVENT_DEVICE_REMOVAL;
        // No id is upgraded under the lock. Its last other reference may go meanwhile; the id would then be dropped
        // here, and the drop takes the lock.
        let (id, others): (_, Vec<Weak<IdInner>>) = {
            let ids = self.ids.lock().ok_or_else(|| Error::forked(verb))?;
            let others = if removal { ids.values().cloned().collect() } else { Vec::new() };
            (ids.get(&raw.uid).cloned(), others)
        };
        let id = id.and_then(|id| id.upgrade());
        // The kernel reports a device's removal to the id, not to the memberships that the id keeps.
        for other in others.iter().filter_map(Weak::upgrade) {
            if other.is_member_of(raw.uid) {
                drop(other.receive(Event::new(&raw), waiting));
            }
        }
        if event.kind == rdma_cm_event_type::RDMA_CM_EVENT_CONNECT_REQUEST {
            // If the listener is gone, dropping the event destroys the new id.
            let (space, qp_type) = id.as_ref().map_or((PortSpace::TCP, QpType::RC), |listener| {
                (listener.space, listener.qp_type)
            });
            event.request = Some(IdInner::adopt(self, raw.id, space, qp_type));
        }
        if let Some(id) = id {
            // An event that finds no room is dropped here, and its new id with it.
            match id.receive(event, waiting) {
                None => self.wake(),
                refused => drop(refused),
            }
        }
        Ok(true)
    }

    /// Wakes the threads that wait for the reading thread.
    fn wake(&self) {
        let waiting = self.waiting.lock().map(|mut waiting| std::mem::take(&mut *waiting));
        for thread in waiting.into_iter().flatten() {
            thread.unpark();
        }
    }

    /// The next event of an id; `None` if there is none by the deadline.
    pub(super) fn wait(
        self: &Arc<Self>,
        verb: &'static str,
        id: &IdInner,
        deadline: Option<Instant>,
    ) -> Result<Option<Event>> {
        loop {
            self.check_fork(verb)?;
            if let Some(event) = id.next_event() {
                return Ok(Some(event));
            }
            if let Some(reading) = Reading::begin(self) {
                let mut waiting = Waiting::default();
                let is_over = self.wait_reading(verb, id, deadline, &mut waiting);
                drop(reading);
                waiting.wake();
                if is_over? {
                    return Ok(id.next_event());
                }
                continue;
            }
            let left = self.platform.left(deadline);
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            if let Some(mut waiting) = self.waiting.lock() {
                let current = thread::current();
                if waiting.iter().all(|thread| thread.id() != current.id()) {
                    waiting.push(current);
                }
            }
            // A thread that stopped reading before this one was listed did not wake it.
            if self.reading.load(Ordering::Acquire) && !id.has_event() {
                thread::park_timeout(left.unwrap_or(LONGEST_SLEEP).min(LONGEST_SLEEP));
            }
        }
    }

    /// Sets `O_NONBLOCK`. The reading thread calls this before it polls, or waits with a deadline: an event that
    /// poll(2) reported may be gone with its id when the thread asks for it.
    fn return_at_once(&self, verb: &'static str) -> Result<()> {
        if !self.nonblocking.load(Ordering::Acquire) {
            set_nonblocking(self.kernel.fd(), true).map_err(|errno| Error::new(verb, errno))?;
            self.nonblocking.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// As [`wait`](Self::wait), for the reading thread: reads until the id has an event, or tasks are to be woken;
    /// `true` if there is no event by the deadline.
    fn wait_reading(
        self: &Arc<Self>,
        verb: &'static str,
        id: &IdInner,
        deadline: Option<Instant>,
        waiting: &mut Waiting,
    ) -> Result<bool> {
        loop {
            if id.has_event() || !waiting.is_empty() {
                return Ok(false);
            }
            let left = self.platform.left(deadline);
            let is_over = left == Some(Duration::ZERO);
            // Without a deadline a blocking read is one system call in place of two.
            if deadline.is_some() || self.nonblocking.load(Ordering::Acquire) {
                self.return_at_once(verb)?;
                let mut fds = [PollFd::from_borrowed_fd(self.kernel.fd(), PollFlags::IN)];
                // Most events take a while: a read before poll(2) would usually be a wasted call.
                if !is_over {
                    let polled = self.platform.wait(&mut fds, deadline);
                    polled.map_err(|errno| Error::new(verb, errno))?;
                }
            }
            if !self.read(verb, waiting)? {
                if is_over {
                    return Ok(true);
                }
                // The program set `O_NONBLOCK`: from now on poll(2) waits.
                self.nonblocking.store(true, Ordering::Release);
            }
        }
    }

    fn known(&self, verb: &'static str) -> Result<crate::sync::lock::Guard<'_, Vec<Known>>> {
        self.known.lock().ok_or_else(|| Error::forked(verb))
    }

    /// The context for ids on a device.
    pub(super) fn context(&self, verb: &'static str, name: DeviceName) -> Result<Context> {
        let find = |known: &[Known]| {
            known.iter().find(|it| name.is(&it.device)).and_then(|it| it.context.clone())
        };
        if let Some(context) = find(&self.known(verb)?) {
            return Ok(context);
        }
        // Without the lock, as this system call is slow.
        let devices = match self.platform.hosted() {
            Some(system) => devices_on(system),
            None => devices()?,
        };
        let found = devices.into_iter().find(|device| name.is(device));
        let device = found.ok_or_else(|| {
            Error::new(verb, Errno::NODEV).detail(format!(
                "the id is on the device with GUID {}, which this process does not see: is the device \
                 in another network namespace?",
                name.guid
            ))
        })?;
        let context = Context::open(&device).map_err(|error| error.in_verb(verb))?;
        let mut known = self.known(verb)?;
        if let Some(other) = find(&known) {
            // Another thread was faster; all ids share its context.
            drop(known);
            return Ok(other);
        }
        Known::entry(&mut known, &device).context = Some(context.clone());
        Ok(context)
    }

    /// The limits of a device, which are queried once.
    pub(super) fn limits(&self, verb: &'static str, context: &Context) -> Result<Depths> {
        let device = context.device();
        let find = |known: &[Known]| known.iter().find(|it| it.device == *device)?.limits;
        if let Some(limits) = find(&self.known(verb)?) {
            return Ok(limits);
        }
        // Without the lock, as this system call is slow.
        let limits = Depths::of(&context.query_device().map_err(|error| error.in_verb(verb))?);
        Known::entry(&mut *self.known(verb)?, device).limits = Some(limits);
        Ok(limits)
    }
}

impl DeviceName {
    /// Refuses a queue pair on another device than the id's.
    pub(super) fn check(self, verb: &'static str, device: &Device) -> Result<()> {
        if self.is(device) {
            return Ok(());
        }
        Err(Error::invalid(
            verb,
            format!(
                "the queue pair is on {}, but the address leads through the device with GUID {}; \
                 make it from the context of the id",
                device.name(),
                self.guid
            ),
        ))
    }
}

/// A guard: its thread is the one that reads a channel. Dropping it lets another thread read.
struct Reading<'c>(&'c Channel);

impl<'c> Reading<'c> {
    fn begin(channel: &'c Channel) -> Option<Reading<'c>> {
        let free =
            channel.reading.compare_exchange(false, true, Ordering::AcqRel, Ordering::Acquire);
        // `then`, not `then_some`, which would make and drop a guard and so clear the other thread's flag.
        free.is_ok().then(|| Reading(channel))
    }
}

impl Reading<'_> {
    /// Reads all pending events, moves each to its id, and returns their number.
    fn dispatch(self, verb: &'static str, channel: &Arc<Channel>) -> Result<usize> {
        let mut waiting = Waiting::default();
        let mut read_all = || -> Result<usize> {
            channel.return_at_once(verb)?;
            let mut count = 0;
            while channel.read(verb, &mut waiting)? {
                count += 1;
            }
            Ok(count)
        };
        let count = read_all();
        drop(self);
        waiting.wake();
        count
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let channel = self.0;
        channel.reading.store(false, Ordering::Release);
        channel.wake();
        if channel.dispatcher_waits.swap(false, Ordering::AcqRel) {
            let dispatcher = channel.dispatcher.lock().and_then(|mut it| it.take());
            // A panic of another waker may drop this guard.
            FirstPanic::of_one(|| dispatcher.into_iter().for_each(Waker::wake));
        }
    }
}

/// Explains the error numbers that have one meaning for all commands.
fn explain(verb: &'static str, number: u32, errno: Errno) -> Error {
    let error = Error::from_kernel(verb, errno);
    match errno {
        // Only the bind of a privileged port fails with it for another reason; see `explain_privileged`.
        Errno::ACCESS => error.detail(
            "the kernel takes no commands from this process on a channel that it opened with other \
             credentials; open another channel",
        ),
        Errno::INVAL if number == RDMA_USER_CM_CMD_CREATE_ID => {
            error.detail("the kernel does not know the port space")
        }
        Errno::NXIO => error.detail("the device of the id is gone"),
        // Only queries of the subnet administrator fail with it.
        Errno::AGAIN => error.detail(NO_ADMINISTRATOR),
        // The callers add the subject of the command.
        _ => error,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cm::scripted::{CmScript, LOCAL};
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::AtomicUsize;
    use std::task::{Context as TaskContext, Wake};

    /// Counts that it is woken, and panics.
    #[derive(Debug, Default)]
    struct Panics(AtomicUsize);

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
            panic!("the dispatcher's waker");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it polls a file")]
    fn a_poll_makes_the_file_nonblocking() {
        let script = CmScript::new();
        let answers_at_once = |channel: &EventChannel| {
            let flags = rustix::fs::fcntl_getfl(channel.as_fd()).unwrap();
            flags.contains(rustix::fs::OFlags::NONBLOCK)
        };
        let channel = script.open();
        let bound = channel
            .create_id(PortSpace::TCP, QpType::RC)
            .unwrap()
            .bind(LOCAL.parse().unwrap())
            .unwrap();
        let listener = bound.listen(4).unwrap();
        script.request(1, Default::default());
        assert!(listener.next_request(None).unwrap().is_some());
        assert!(!answers_at_once(&channel), "the kernel waits");
        assert!(listener.next_request(Some(Duration::ZERO)).unwrap().is_none());
        assert!(answers_at_once(&channel));
        script.request(1, Default::default());
        assert!(listener.next_request(None).unwrap().is_some());
        let other = CmScript::new().open();
        assert_eq!((other.dispatch().unwrap(), answers_at_once(&other)), (0, true));
    }

    #[test]
    fn dispatcher_is_woken_when_a_thread_stops_reading_even_by_a_panic() {
        let channel = CmScript::new().open();
        let dispatcher = Arc::<Panics>::default();
        let waker = Waker::from(dispatcher.clone());
        let stops = |stop: &dyn Fn(Reading<'_>)| {
            let reading = Reading::begin(&channel.inner).unwrap();
            let mut cx = TaskContext::from_waker(&waker);
            assert_eq!(channel.dispatch_or_wake(&mut cx).unwrap(), None);
            let panic = catch_unwind(AssertUnwindSafe(|| stop(reading))).unwrap_err();
            assert!(!channel.is_being_read());
            *panic.downcast::<&str>().unwrap()
        };
        assert_eq!(stops(&|reading| drop(reading)), "the dispatcher's waker");
        let unwinds = |_reading: Reading<'_>| panic!("the thread");
        assert_eq!(stops(&unwinds), "the thread");
        assert_eq!(dispatcher.0.load(Ordering::Relaxed), 2);
    }

    /// Calls a closure when it is woken.
    struct Acts<F>(F);

    impl<F: Fn() + Send + Sync + 'static> Wake for Acts<F> {
        fn wake(self: Arc<Self>) {
            (self.0)();
        }
    }

    /// Fails if `test` hangs.
    fn in_time(test: impl FnOnce() + Send + 'static) {
        let (told, heard) = std::sync::mpsc::channel();
        thread::spawn(move || {
            test();
            told.send(()).unwrap();
        });
        let ended = heard.recv_timeout(Duration::from_secs(20));
        assert_eq!(ended, Ok(()), "a call of the program waits for itself");
    }

    /// The waker blocks on another id of the channel that its caller, the reading thread, reads.
    #[test]
    #[cfg_attr(miri, ignore = "it polls a file")]
    fn a_waker_may_wait_for_an_id_of_the_channel_that_woke_it() {
        for dispatches in [false, true] {
            in_time(move || {
                let script = CmScript::new();
                let channel = script.open();
                let listen = |address: &str| {
                    let bound = channel
                        .create_id(PortSpace::TCP, QpType::RC)
                        .unwrap()
                        .bind(address.parse().unwrap());
                    bound.unwrap().listen(4).unwrap()
                };
                let (task, thread) = (listen(LOCAL), listen("192.0.2.1:7472"));
                let other = Arc::new(listen("192.0.2.1:7473"));
                let seen = Arc::<AtomicUsize>::default();
                let act = {
                    let (script, other, seen) = (script.clone(), other.clone(), seen.clone());
                    move || {
                        script.request(3, Default::default());
                        let request = other.next_request(None).unwrap();
                        seen.fetch_add(usize::from(request.is_some()), Ordering::Relaxed);
                    }
                };
                let waker = Waker::from(Arc::new(Acts(act)));
                let mut cx = TaskContext::from_waker(&waker);
                assert!(task.id.poll_event("wait", &mut None, &mut cx).is_pending());
                script.request(1, Default::default());
                if dispatches {
                    assert_eq!(channel.dispatch().unwrap(), 1);
                } else {
                    script.request(2, Default::default());
                    assert!(thread.next_request(None).unwrap().is_some());
                }
                assert_eq!(seen.load(Ordering::Relaxed), 1);
                assert!(task.next_request(Some(Duration::ZERO)).unwrap().is_some());
            });
        }
    }

    /// The query of a device is slow, and other threads go on meanwhile.
    #[test]
    fn devices_are_asked_without_the_lock_of_the_known_contexts() {
        use crate::tests::Bench;
        use crate::uverbs::scripted::Op;
        use uverbs_uapi::write::{
            IB_USER_VERBS_CMD_FLAG_EXTENDED, IB_USER_VERBS_EX_CMD_QUERY_DEVICE,
        };
        const QUERY: Op =
            Op::Write(IB_USER_VERBS_EX_CMD_QUERY_DEVICE | IB_USER_VERBS_CMD_FLAG_EXTENDED);
        in_time(|| {
            let (bench, channel) = (Bench::new(), CmScript::new().open());
            let (context, other) = (bench.context.clone(), channel.clone());
            let asked = Arc::<AtomicUsize>::default();
            let count = asked.clone();
            bench.script.before(QUERY, move || {
                count.fetch_add(1, Ordering::Relaxed);
                other.use_context(&context).unwrap();
            });
            for _ in 0..2 {
                channel.inner.limits("connect", &bench.context).unwrap();
            }
            assert_eq!(asked.load(Ordering::Relaxed), 1, "they are asked once");
            let known = channel.inner.known("connect").unwrap();
            assert!(known.len() == 1 && known.iter().all(|it| it.context.is_some()));
        });
    }

    #[test]
    fn one_thread_at_a_time_reads_the_channel() {
        let channel = CmScript::new().open();
        let reading = Reading::begin(&channel.inner);
        assert!(reading.is_some());
        for _ in 0..2 {
            assert!(Reading::begin(&channel.inner).is_none());
        }
        drop(reading);
        assert!(Reading::begin(&channel.inner).is_some());
    }
}
