//! The world of a fabric: its kernel behind one lock, its clock, and the threads that run the device.
//!
//! *Trapped*: a doorbell runs the device in the thread that rings it, and a thread of the world sleeps until the next
//! timer. *Stepped*: the device runs only in polls, waits and steps, and time is virtual.

use crate::call::Result;
use crate::driver::Driver;
use crate::file::{CmFile, UverbsFile};
use crate::history::History;
use crate::kernel::{Kernel, Object, guid};
use crate::memory::Birthplace;
use crate::strict::Findings;
use crate::udp::Wire;
use crate::udp::service::Service;
use rustix::event::PollFd;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::cell::Cell;
use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uverbs_host::{HostDevice, HostFile, HostInterface, HostSystem, poll_until};
use uverbs_uapi::device::rdma_driver_id;

/// The threads that run the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Mode {
    /// The thread that rings, and for timers a thread that sleeps meanwhile. Time is real.
    #[default]
    Trapped,
    /// The thread that polls, waits or steps. Time is virtual: it moves to the next timer when nothing else happens.
    /// The seed decides which queue is served, sends or gets its packets next, and how long a step takes, and with a
    /// [`Network`](crate::Network) the fate of each packet. With several threads, each has to step or call the fabric
    /// once before another one waits: a wait leaves time only to threads that the fabric knows. Runs of several threads
    /// do not repeat.
    Stepped {
        /// The same seed makes the same decisions.
        seed: u64,
    },
}

/// Real time that a wait leaves to the program's other threads before it moves to the next timer.
const COURTESY: Duration = Duration::from_millis(20);
/// The same before it moves to its deadline, if no timer is due earlier.
const PATIENCE: Duration = Duration::from_secs(1);
/// The same before a wait without a deadline returns `EDEADLK`, as nothing can end it.
const LAST_PATIENCE: Duration = Duration::from_secs(5);
/// The sleep between two looks of such a wait.
const NAP: Duration = Duration::from_micros(100);

/// Nanoseconds that the thread of timers sleeps at least.
pub(crate) const BREATH: u64 = 1_000;
/// Nanoseconds after which the kernel tries an event file again that was full.
pub(crate) const CROWDED: u64 = 1_000_000;

thread_local! {
    /// Polls of this thread with nothing to do.
    static IDLE_POLLS: Cell<u8> = const { Cell::new(0) };
}
/// Idle polls after which a thread that is not alone yields the processor.
const POLLS_PER_YIELD: u8 = 8;

/// The time of no timer.
pub(crate) const NEVER: u64 = u64::MAX;

/// The part of a world that its thread keeps, if that receives from a socket: so the world can be dropped meanwhile,
/// and then waits for the thread.
pub(crate) struct Core {
    /// The process that made it.
    birthplace: Birthplace,
    kernel: Mutex<Kernel>,
    started: Instant,
    /// When the thread runs the world again, in nanoseconds since the start, or [`NEVER`]. Changed under the kernel's
    /// lock.
    armed: AtomicU64,
    /// The service of the socket to peers outside of the process.
    service: Option<Service>,
    /// Whether the socket is waited for until it has room. Changed under the kernel's lock.
    waits_for_room: AtomicBool,
    /// Whether the world is gone.
    is_over: AtomicBool,
}

impl Core {
    /// The kernel; `ENODEV` in a child of `fork`. A thread that panicked while it had the lock left it as it was.
    pub(crate) fn kernel(&self) -> Result<MutexGuard<'_, Kernel>> {
        if !self.birthplace.is_here() {
            return Err(Errno::NODEV);
        }
        Ok(self.kernel.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Nanoseconds of real time since the start.
    pub(crate) fn elapsed(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// When a trapped world has to run again.
    fn due(&self, kernel: &Kernel, now: u64) -> u64 {
        let look_again = kernel.is_crowded().then(|| now + CROWDED);
        kernel.deadline().into_iter().chain(look_again).min().unwrap_or(NEVER)
    }

    /// Notes what the thread waits for, and chooses when it runs again: not later than it did before, although each ACK
    /// moves the timer of its queue pair back, so that the next request need not wake the thread for an earlier one.
    pub(crate) fn arm(&self, kernel: &Kernel) {
        let now = self.elapsed();
        let before = self.armed.load(Ordering::Relaxed);
        let due = self.due(kernel, now);
        let due = if before > now { due.min(before) } else { due };
        self.armed.store(due, Ordering::Relaxed);
        self.waits_for_room.store(kernel.is_blocked(), Ordering::Relaxed);
    }

    /// When it was chosen to run again, or [`NEVER`].
    pub(crate) fn armed(&self) -> u64 {
        self.armed.load(Ordering::Relaxed)
    }

    /// Whether packets wait until the socket has room.
    pub(crate) fn waits_for_room(&self) -> bool {
        self.waits_for_room.load(Ordering::Relaxed)
    }

    /// Whether the world is gone.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }
}

pub(crate) struct World {
    this: Weak<World>,
    core: Arc<Core>,
    mode: Mode,
    /// Nanoseconds of virtual time since the start.
    virtual_now: AtomicU64,
    /// Whether a stepped world has nothing to do until the next call or a later time. Set under the kernel's lock.
    idle: AtomicBool,
    /// The thread that runs timers, and receives from the socket if there is one.
    timer: OnceLock<JoinHandle<()>>,
    /// The thread that used the fabric first.
    first_user: AtomicUsize,
    /// Whether another thread used it, too.
    shared: AtomicBool,
    /// Tasks that step the fabric, and are woken when the program gave it something to do.
    drivers: Mutex<Vec<Waker>>,
    /// Whether there are such tasks. Changed under their lock.
    has_drivers: AtomicBool,
    /// How often the program gave a stepped world something to do.
    calls: AtomicU64,
    /// The clock of the event loop that steps the fabric, in nanoseconds.
    clock: Mutex<Option<DrivingClock>>,
    /// Whether there is one.
    has_clock: AtomicBool,
}

/// Tells the time of the fabric that an event loop steps.
pub(crate) type DrivingClock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Makes the clock of an event loop that of the fabric, until the guard is dropped.
pub(crate) struct ClockGuard<'w>(&'w World);

impl Drop for ClockGuard<'_> {
    fn drop(&mut self) {
        self.0.set_clock(None);
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("mode", &self.mode).finish_non_exhaustive()
    }
}

impl std::panic::UnwindSafe for World {}
impl std::panic::RefUnwindSafe for World {}

impl World {
    /// # Errors
    ///
    /// That of the thread which is to receive from the socket. Without another one, only timers are late.
    pub(crate) fn new(kernel: Kernel, mode: Mode, wire: Option<Arc<Wire>>) -> Result<Arc<World>> {
        let core = Arc::new(Core {
            birthplace: Birthplace::new(),
            service: wire.map(|wire| Service::new(wire, kernel.delivery.clone())),
            kernel: Mutex::new(kernel),
            started: Instant::now(),
            armed: AtomicU64::new(NEVER),
            waits_for_room: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
        });
        let world = Arc::new_cyclic(|this| World {
            this: this.clone(),
            core: core.clone(),
            mode,
            virtual_now: AtomicU64::new(0),
            idle: AtomicBool::new(false),
            timer: OnceLock::new(),
            first_user: AtomicUsize::new(0),
            shared: AtomicBool::new(false),
            drivers: Mutex::default(),
            has_drivers: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            clock: Mutex::default(),
            has_clock: AtomicBool::new(false),
        });
        match (mode, &core.service) {
            (Mode::Trapped, None) => _ = world.start(World::timers(world.this.clone())),
            (Mode::Trapped, Some(_)) => {
                world.start(move || core.service.iter().for_each(|service| service.run(&core)))?;
            }
            (Mode::Stepped { .. }, _) => {}
        }
        Ok(world)
    }

    /// Whether this process made the world. A child of `fork` has copies of its locks, and the thread that held one
    /// at the fork is not there to release it.
    fn is_here(&self) -> bool {
        self.core.birthplace.is_here()
    }

    /// The kernel; `ENODEV` in a child of `fork`.
    pub(crate) fn kernel(&self) -> Result<MutexGuard<'_, Kernel>> {
        self.core.kernel()
    }

    /// The socket to peers outside of the process.
    #[cfg(test)]
    pub(crate) fn wire(&self) -> Option<&Wire> {
        self.core.service.as_ref().map(Service::wire)
    }

    /// Another handle of the world, for a file that keeps it.
    fn keep(&self) -> Result<Arc<World>> {
        self.this.upgrade().ok_or(Errno::NODEV)
    }

    /// Nanoseconds since the start.
    pub(crate) fn nanoseconds(&self) -> u64 {
        match self.mode {
            Mode::Trapped => self.core.elapsed(),
            Mode::Stepped { .. } => {
                // The program may call long after the last step.
                if self.has_clock.load(Ordering::Relaxed) {
                    let clock = self.lock_clock().clone();
                    clock.into_iter().for_each(|clock| self.set_time(clock()));
                }
                self.virtual_now.load(Ordering::SeqCst)
            }
        }
    }

    fn lock_clock(&self) -> MutexGuard<'_, Option<DrivingClock>> {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_clock(&self, clock: Option<DrivingClock>) {
        self.has_clock.store(clock.is_some(), Ordering::Relaxed);
        *self.lock_clock() = clock;
    }

    /// Takes the time from the clock of an event loop, while the guard lives.
    pub(crate) fn follow(&self, clock: DrivingClock) -> ClockGuard<'_> {
        if self.is_here() {
            self.set_clock(Some(clock));
        }
        ClockGuard(self)
    }

    /// Whether the program has to step it.
    pub(crate) fn is_stepped(&self) -> bool {
        matches!(self.mode, Mode::Stepped { .. })
    }

    /// Notes that this thread uses the fabric.
    fn note_user(&self) {
        if self.shared.load(Ordering::Relaxed) {
            return;
        }
        // The address of a thread-local variable identifies the thread.
        let here = IDLE_POLLS.with(|here| std::ptr::from_ref(here).addr());
        match self.first_user.compare_exchange(0, here, Ordering::Relaxed, Ordering::Relaxed) {
            Err(first) if first != here => self.shared.store(true, Ordering::Relaxed),
            _ => {}
        }
    }

    /// Runs a call of the program against the kernel; `ENODEV` in a child of `fork`.
    pub(crate) fn enter<T>(&self, call: impl FnOnce(&mut Kernel) -> Result<T>) -> Result<T> {
        let mut kernel = self.kernel()?;
        self.note_user();
        let now = self.nanoseconds();
        kernel.switch.set_time(now);
        kernel.audit();
        let answer = call(&mut kernel);
        if self.mode == Mode::Trapped {
            self.run_trapped(&mut kernel, now);
        } else {
            if self.idle.load(Ordering::SeqCst) {
                self.idle.store(false, Ordering::SeqCst);
            }
            self.calls.fetch_add(1, Ordering::SeqCst);
            drop(kernel);
            self.wake_drivers();
        }
        answer
    }

    /// The events so far, as text.
    pub(crate) fn history(&self) -> String {
        let Ok(mut kernel) = self.kernel() else { return String::new() };
        kernel.write_history();
        kernel.history.as_ref().map_or_else(String::new, History::text)
    }

    /// The mistakes of the program.
    pub(crate) fn check(&self) -> std::result::Result<(), Findings> {
        let Ok(mut kernel) = self.kernel() else { return Ok(()) };
        kernel.close_orphans(self.nanoseconds());
        kernel.check()
    }

    /// Prints the history, if it is to be printed now, and clears it.
    pub(crate) fn print_history(&self) {
        let Ok(mut kernel) = self.kernel() else { return };
        kernel.write_history();
        let history = kernel.history.take();
        drop(kernel);
        history.iter().for_each(History::print);
    }

    /// Changes the fabric for a test; does nothing in a child of `fork`.
    pub(crate) fn disturb<T: Default>(&self, change: impl FnOnce(&mut Kernel) -> T) -> T {
        self.enter(|kernel| Ok(change(kernel))).unwrap_or_default()
    }

    /// Wakes the tasks that step the fabric.
    fn wake_drivers(&self) {
        // A task that comes later finds that `calls` has changed.
        if self.has_drivers.load(Ordering::SeqCst) {
            let wakers = {
                let mut drivers = self.lock_drivers();
                self.has_drivers.store(false, Ordering::SeqCst);
                std::mem::take(&mut *drivers)
            };
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    fn lock_drivers(&self) -> MutexGuard<'_, Vec<Waker>> {
        self.drivers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How often the program gave the fabric something to do. A task reads it before a step, and again after
    /// [`wake_when_called`](Self::wake_when_called).
    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    /// Wakes a task when the program gives the fabric something to do.
    pub(crate) fn wake_when_called(&self, waker: &Waker) {
        if !self.is_here() {
            return;
        }
        // A clone is code of the program, so that none is made or dropped under the lock.
        let mut new = Some(waker.clone());
        {
            let mut drivers = self.lock_drivers();
            if !drivers.iter().any(|driver| driver.will_wake(waker)) {
                drivers.extend(new.take());
            }
            self.has_drivers.store(true, Ordering::SeqCst);
        }
        drop(new);
    }

    /// When the next timer is due, in nanoseconds since the start.
    pub(crate) fn deadline(&self) -> Option<u64> {
        self.kernel().ok()?.deadline()
    }

    /// Moves virtual time on to `now`, unless it is later.
    pub(crate) fn set_time(&self, now: u64) {
        if self.virtual_now.fetch_max(now, Ordering::SeqCst) < now {
            self.idle.store(false, Ordering::SeqCst);
        }
    }

    /// Does everything that is due, and lets the timer's thread wake when the next timer is due. Returns whether there
    /// was anything to do.
    fn run_trapped(&self, kernel: &mut Kernel, now: u64) -> bool {
        // Over UDP the thread runs them, which knows whether ACKs have come.
        kernel.switch.hold_timers(self.core.service.is_some());
        let worked = kernel.run(now);
        let due = self.core.due(kernel, self.nanoseconds());
        // The thread has to wait for room at the socket, too.
        let blocked =
            kernel.is_blocked() && !self.core.waits_for_room.swap(true, Ordering::Relaxed);
        if due < self.core.armed.load(Ordering::Relaxed) || blocked {
            self.core.armed.store(due, Ordering::Relaxed);
            self.wake_timer();
        }
        worked
    }

    fn wake_timer(&self) {
        match &self.core.service {
            Some(service) => service.wake(),
            None => self.timer.get().into_iter().for_each(|timer| timer.thread().unpark()),
        }
    }

    /// Starts the thread of the world.
    fn start(&self, body: impl FnOnce() + Send + 'static) -> Result<()> {
        let spawned = std::thread::Builder::new().name("uverbs-sim".into()).spawn(body);
        let thread =
            spawned.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))?;
        let _ = self.timer.set(thread);
        Ok(())
    }

    /// Runs the world when it is due.
    fn timers(this: Weak<World>) -> impl FnOnce() + Send {
        move || {
            while let Some(world) = this.upgrade() {
                let due = {
                    let Ok(mut kernel) = world.kernel() else { return };
                    kernel.run(world.nanoseconds());
                    let due = world.core.due(&kernel, world.nanoseconds());
                    world.core.armed.store(due, Ordering::Relaxed);
                    due
                };
                // Leaves the program time for calls between two runs, however late the timer is.
                let left = due.saturating_sub(world.nanoseconds()).max(BREATH);
                drop(world);
                match due {
                    NEVER => std::thread::park(),
                    _ => std::thread::park_timeout(Duration::from_nanos(left)),
                }
            }
        }
    }

    /// Does some things that are due, or everything in a trapped world; returns whether there was any.
    pub(crate) fn step(&self) -> bool {
        let Ok(mut kernel) = self.kernel() else { return false };
        self.note_user();
        match self.mode {
            Mode::Trapped => self.run_trapped(&mut kernel, self.nanoseconds()),
            Mode::Stepped { .. } => self.step_locked(&mut kernel),
        }
    }

    fn step_locked(&self, kernel: &mut Kernel) -> bool {
        let now = self.nanoseconds();
        let took = kernel.step(now);
        if let Some(took) = took {
            self.virtual_now.fetch_add(took, Ordering::SeqCst);
        }
        let busy = took.is_some() || kernel.is_crowded();
        if self.idle.load(Ordering::SeqCst) == busy {
            self.idle.store(!busy, Ordering::SeqCst);
        }
        // A thread that has moved the time on since then has cleared it too early.
        if !busy && self.virtual_now.load(Ordering::SeqCst) != now {
            self.idle.store(false, Ordering::SeqCst);
        }
        took.is_some()
    }

    /// Called when the program polls a queue: takes a step of a stepped world, unless another thread does so right now.
    pub(crate) fn polled(&self) {
        if !self.is_here() {
            return;
        }
        self.note_user();
        if self.is_stepped() && !self.idle.load(Ordering::SeqCst) {
            match self.core.kernel.try_lock() {
                Ok(mut kernel) => drop(self.step_locked(&mut kernel)),
                Err(TryLockError::Poisoned(kernel)) => {
                    self.step_locked(&mut kernel.into_inner());
                }
                Err(TryLockError::WouldBlock) => {}
            }
        } else if self.shared.load(Ordering::Relaxed) {
            // Another thread has to go on, and may wait milliseconds for this processor.
            let polls = IDLE_POLLS.get().wrapping_add(1);
            IDLE_POLLS.set(polls);
            if polls % POLLS_PER_YIELD == 0 {
                std::thread::yield_now();
            }
        }
    }

    /// Moves virtual time to the next timer of the device; `false` if there is none before `limit`.
    pub(crate) fn advance_to_timer(&self, limit: Option<u64>) -> bool {
        let in_time = |due: &u64| limit.is_none_or(|limit| *due <= limit);
        let Some(due) = self.deadline().filter(in_time) else { return false };
        self.set_time(due);
        true
    }

    fn since_start(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.core.started).as_nanos() as u64
    }

    /// Waits in a stepped world: runs it until a descriptor is ready or virtual time has reached the deadline.
    fn wait_stepped(&self, fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> Result<usize> {
        if !self.is_here() {
            return Err(Errno::NODEV);
        }
        let limit = deadline.map(|deadline| self.since_start(deadline));
        let mut idle_since = None;
        loop {
            let ready = poll_until(fds, Some(self.core.started))?;
            let over = limit.is_some_and(|limit| self.nanoseconds() >= limit);
            if ready > 0 || over {
                return Ok(ready);
            }
            if self.step() {
                idle_since = None;
                continue;
            }
            // There is nothing to do now, but another thread of the program may be about to do something. Without
            // another thread, the next timer happens next, or else the deadline; without both the wait cannot end.
            let idle = idle_since.get_or_insert_with(Instant::now).elapsed();
            let alone = !self.shared.load(Ordering::Relaxed);
            if (alone || idle >= COURTESY) && self.advance_to_timer(limit) {
                idle_since = None;
                continue;
            }
            if alone || idle >= PATIENCE {
                match limit {
                    Some(limit) => self.set_time(limit),
                    None if idle >= LAST_PATIENCE => return Err(Errno::DEADLK),
                    None => {}
                }
            }
            std::thread::sleep(NAP);
        }
    }

    fn device(&self, kernel: &Kernel, number: usize) -> HostDevice {
        let interface = &kernel.drivers[number].interface;
        let mut device = HostDevice::default();
        device.name = kernel.drivers[number].name.clone();
        device.index = number as u32;
        device.node = format!("uverbs{number}");
        device.number = (231, 192 + number as u32);
        device.abi = 1;
        device.driver = rdma_driver_id::RDMA_DRIVER_MLX5.0;
        device.node_type = 1;
        device.node_guid = guid(number);
        device.sys_image_guid = guid(number);
        device.firmware = "16.35.1000".into();
        match &kernel.drivers[number].infiniband {
            Some((_, pkeys)) => {
                device.protocol = "ib".into();
                device.pkeys = vec![pkeys.clone()];
                device.interfaces = vec![None];
            }
            None => {
                device.protocol = "roce".into();
                device.pkeys = vec![vec![0xffff]];
                device.interfaces = vec![Some(interface.name.clone())];
            }
        }
        device
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let here = self.is_here();
        self.core.is_over.store(true, Ordering::SeqCst);
        if here {
            self.wake_timer();
        }
        self.print_history();
        let Some(timer) = self.timer.take().filter(|_| self.core.service.is_some() && here) else {
            return;
        };
        // The thread has no handle of the world, so that another one drops it. The socket is closed when this returns.
        let _ = timer.join();
    }
}

impl HostSystem for World {
    fn devices(&self) -> Vec<HostDevice> {
        let Ok(kernel) = self.kernel() else { return Vec::new() };
        let plugged = |number: &usize| kernel.drivers[*number].is_plugged();
        let numbers = (0..kernel.drivers.len()).filter(plugged);
        numbers.map(|number| self.device(&kernel, number)).collect()
    }

    fn open(&self, index: u32) -> Result<Arc<dyn HostFile>> {
        let (world, now) = (self.keep()?, self.nanoseconds());
        let (id, fd) = self.enter(|kernel| kernel.open(index as usize, now))?;
        Ok(Arc::new(UverbsFile::new(world, id, fd)))
    }

    fn open_rdma_cm(&self) -> Result<Arc<dyn HostFile>> {
        let (world, now) = (self.keep()?, self.nanoseconds());
        let (id, fd) = self.enter(|kernel| kernel.open_cm(now))?;
        Ok(Arc::new(CmFile::new(world, id, fd)))
    }

    fn adopt(&self, fd: OwnedFd) -> std::result::Result<Arc<dyn HostFile>, OwnedFd> {
        let held = || {
            let world = self.keep().ok()?;
            let id = self.kernel().ok()?.hold_behind(fd.as_fd())?;
            Some((world, id))
        };
        match held() {
            Some((world, id)) => Ok(Arc::new(UverbsFile::new(world, id, fd))),
            None => Err(fd),
        }
    }

    fn device_of(&self, fd: BorrowedFd<'_>) -> Result<Option<u32>> {
        // A child of `fork` has no files of this kernel.
        let Ok(kernel) = self.kernel() else { return Ok(None) };
        if kernel.cm.file_behind(fd).is_some() {
            return Err(Errno::NOTTY);
        }
        let device = kernel.file_behind(fd).map(|id| kernel.file(id).map(|file| file.device));
        Ok(device.transpose()?.map(|device| device as u32))
    }

    fn resources(&self, index: u32) -> Result<Vec<(String, u64)>> {
        let now = self.nanoseconds();
        self.enter(|kernel| {
            kernel.close_orphans(now);
            let driver = kernel.drivers.get(index as usize).filter(|driver| driver.is_plugged());
            driver.ok_or(Errno::NODEV)?;
            let files = || kernel.files().filter(|file| file.device == index as usize);
            let count =
                |is: fn(&Object) -> bool| files().map(|file| file.count(is)).sum::<usize>() as u64;
            Ok([
                ("pd", count(|object| matches!(object, Object::Pd { .. }))),
                ("cq", count(|object| matches!(object, Object::Cq { .. }))),
                ("qp", count(|object| matches!(object, Object::Qp { .. }))),
                ("cm_id", kernel.cm.count_on(index as usize) as u64),
                ("mr", count(|object| matches!(object, Object::Mr(_)))),
                ("ctx", files().filter(|file| file.has_context).count() as u64),
                ("srq", count(|object| matches!(object, Object::Srq { .. }))),
            ]
            .map(|(kind, count)| (kind.to_owned(), count))
            .into())
        })
    }

    fn interfaces(&self) -> Vec<HostInterface> {
        let Ok(kernel) = self.kernel() else { return Vec::new() };
        let of = |driver: &Driver| {
            let mut interface = HostInterface::default();
            interface.index = driver.interface.index;
            interface.name = driver.interface.name.clone();
            interface.hardware = driver.interface.hardware.clone();
            interface.addresses = driver.interface.addresses.clone();
            interface
        };
        kernel.drivers.iter().map(of).collect()
    }

    fn source_for(&self, peer: IpAddr, interface: u32) -> Result<IpAddr> {
        // All nodes are in one system, which reaches its own addresses from themselves.
        let is_here = |driver: &Driver| {
            let here = &driver.interface;
            (interface == 0 || here.index == interface) && here.addresses.contains(&peer)
        };
        let kernel = self.kernel()?;
        if kernel.drivers.iter().any(is_here) {
            return Ok(peer);
        }
        // The address of the socket is the only one that peers outside are reached from.
        let own = self.core.service.as_ref().map(|service| service.wire().address().ip());
        let own = own.filter(|own| own.is_ipv4() == peer.is_ipv4());
        own.filter(|_| {
            kernel
                .drivers
                .iter()
                .any(|driver| interface == 0 || driver.interface.index == interface)
        })
        .ok_or(Errno::NETUNREACH)
    }

    fn now(&self) -> Instant {
        match self.mode {
            Mode::Trapped => Instant::now(),
            Mode::Stepped { .. } => self.core.started + Duration::from_nanos(self.nanoseconds()),
        }
    }

    fn random(&self) -> Option<u64> {
        if !self.is_stepped() {
            return None;
        }
        self.kernel().ok().map(|mut kernel| kernel.random.below(u64::MAX))
    }

    fn wait(&self, fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> Result<usize> {
        if self.is_stepped() {
            return self.wait_stepped(fds, deadline);
        }
        match &self.core.service {
            Some(service) if self.is_here() => service.wait(&self.core, fds, deadline),
            _ => poll_until(fds, deadline),
        }
    }
}
