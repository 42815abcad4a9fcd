//! Which thread serves the socket of a fabric: that of the world, or one of the program that waits for an event.
//!
//! A datagram that wakes the world's thread, which then wakes the program's, costs two changes of threads. So a thread of
//! the program serves the socket while it waits in [`HostSystem::wait`](uverbs_host::HostSystem::wait): it finds the event
//! of a message that it has received itself. Meanwhile, and as long as such waits follow one another, the world's thread
//! stands by:
//!
//! ```text
//!             a wait serves, or has since              LOOKS times the same wait
//!   serving ────────────────────────────▶ standing by ───────────────────────────▶ asleep
//!      ▲                                     │    ▲                                  │
//!      └─────────────────────────────────────┘    └──────────────────────────────────┘
//!        no wait since the last look, alarm,             the wait ends, or alarm
//!        or a wait that does not serve
//! ```
//!
//! Programs that wait by the descriptors of their channels (an event loop) are served by the world's thread, and so are
//! several threads that wait at a time.

use super::groups::GroupReceiver;
use super::{Readiness, Receiver, Wire};
use crate::call::Result;
use crate::events::Delivery;
use crate::kernel::Kernel;
use crate::world::{BREATH, CROWDED, Core, NEVER};
use rustix::event::PollFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};
use std::thread::Thread;
use std::time::{Duration, Instant};
use uverbs_host::poll_until;

/// Full batches of datagrams after which timers run although more are there.
const MOST_BATCHES: u32 = 64;
/// Nanoseconds that the ACK of a message waits for the program's answer, beside the slack of the system's timers, which
/// is 50 µs.
const LINGER: u64 = 10_000;
/// Between two looks of a thread that stands by. Datagrams of a program that waits no more wait for two of them at most.
const LOOK: Duration = Duration::from_millis(2);
/// Looks at the same wait after which the thread sleeps until it ends.
const LOOKS: u32 = 4;
/// The most nanoseconds that datagrams may wait between two waits of the program, and an ACK for the program's answer.
/// After more the device's thread serves, or ACKs leave at once, for a while.
const SOON: u64 = 1_000_000;

/// The service of a socket.
pub(crate) struct Service {
    wire: Arc<Wire>,
    server: Mutex<Server>,
    /// Whether a wait of the program serves. Changed with the server.
    is_wait: AtomicBool,
    /// Waits that have served, and have ended.
    waits: AtomicU64,
    /// Waits that do not serve.
    others: AtomicU32,
    /// Records that wait for room in event files.
    delivery: Arc<Delivery>,
    /// The thread of the world.
    thread: OnceLock<Thread>,
    /// Whether it stands by.
    stands_by: AtomicBool,
    /// Whether it sleeps until the wait ends.
    is_asleep: AtomicBool,
    /// Whether it has to look at once.
    is_alarmed: AtomicBool,
}

/// The receiving side of the socket, and its turns.
struct Server {
    receiver: Receiver,
    of_groups: GroupReceiver,
    /// Full batches of datagrams one after the other.
    batches: u32,
    late_acks: LateAcks,
    /// Whether waits may serve.
    waits: Attempts,
    /// When the last one that served has ended, or the device's thread has looked.
    left: u64,
}

/// The end of a turn of the server.
#[derive(Clone, Copy)]
struct Turn {
    /// Whether there may be more datagrams.
    more: bool,
    /// Whether datagrams had come.
    found: bool,
    /// When the next one is due, in nanoseconds since the world's start, or [`NEVER`].
    due: u64,
}

impl Server {
    /// Handles what has come, and runs the world. `None` in a child of `fork`.
    fn turn(&mut self, core: &Core, service: &Service) -> Option<Turn> {
        let (wire, delivery) = (&service.wire, &service.delivery);
        let more = self.receiver.receive() | self.of_groups.receive(wire.groups());
        self.batches = if more { self.batches + 1 } else { 0 };
        // ACKs that are there count before timeouts, unless there is no end of them.
        let holds_timers = more && self.batches % MOST_BATCHES != 0;
        // Their ICRCs are checked before others have to wait.
        let datagrams: Vec<_> =
            self.receiver.datagrams().chain(self.of_groups.datagrams(wire.groups())).collect();
        {
            let mut kernel = core.kernel().ok()?;
            let now = core.elapsed();
            let late = self.late_acks.end(&kernel, now);
            datagrams.iter().for_each(|datagram| kernel.receive(now, datagram));
            kernel.switch.hold_timers(holds_timers);
            let may_linger = !late && !more && self.late_acks.attempts.may();
            let lingers = kernel.run_holding(core.elapsed(), may_linger);
            self.late_acks.since = lingers.then(|| core.elapsed());
            core.arm(&kernel);
        }
        // A program that wakes earlier finds the lock taken.
        delivery.release();
        let lingers = self.late_acks.since.map(|since| since + LINGER);
        let due = lingers.into_iter().fold(due(core, delivery), u64::min);
        Some(Turn { more, found: !datagrams.is_empty(), due })
    }
}

/// ACKs that wait for the program's answer, with which they can leave: then the peer wakes once in place of twice.
#[derive(Default)]
struct LateAcks {
    /// Since when some wait, in nanoseconds since the world's start.
    since: Option<u64>,
    attempts: Attempts,
}

impl LateAcks {
    /// None waits any more. Returns whether no answer has taken them along, so that they are to be sent.
    fn end(&mut self, kernel: &Kernel, now: u64) -> bool {
        let Some(since) = self.since.take() else { return false };
        let owed = kernel.owes_acks();
        self.attempts.ended(owed || now > since + SOON);
        owed
    }
}

/// When the world has to run, or [`NEVER`].
fn due(core: &Core, delivery: &Delivery) -> u64 {
    let crowded = delivery.is_crowded().then(|| core.elapsed() + CROWDED);
    crowded.into_iter().fold(core.armed(), u64::min)
}

/// The time until a turn is due; `None` for no such time. Leaves the program time for calls between two turns, however
/// late the timer is.
fn left(core: &Core, due: u64) -> Option<Duration> {
    let left = due.saturating_sub(core.elapsed()).max(BREATH);
    (due != NEVER).then(|| Duration::from_nanos(left))
}

/// A wait of the program that serves.
struct Shift<'s> {
    service: &'s Service,
    core: &'s Core,
    server: MutexGuard<'s, Server>,
    /// Whether datagrams had waited for it.
    is_late: bool,
}

impl Drop for Shift<'_> {
    fn drop(&mut self) {
        let service = self.service;
        self.server.left = self.core.elapsed();
        service.waits.fetch_add(1, Ordering::SeqCst);
        service.is_wait.store(false, Ordering::SeqCst);
        if service.others.load(Ordering::SeqCst) > 0 {
            // Of several threads that wait, none serves the others well.
            self.server.waits.ended(true);
            service.wake();
        } else if !self.is_late {
            self.server.waits.paid();
        }
        if service.is_asleep.swap(false, Ordering::SeqCst) {
            service.unpark();
        }
    }
}

impl Service {
    pub(crate) fn new(wire: Arc<Wire>, delivery: Arc<Delivery>) -> Service {
        let server = Server {
            receiver: Receiver::new(wire.clone()),
            of_groups: GroupReceiver::default(),
            batches: 0,
            late_acks: LateAcks::default(),
            waits: Attempts::default(),
            left: 0,
        };
        Service {
            wire,
            server: Mutex::new(server),
            is_wait: AtomicBool::new(false),
            waits: AtomicU64::new(0),
            others: AtomicU32::new(0),
            delivery,
            thread: OnceLock::new(),
            stands_by: AtomicBool::new(false),
            is_asleep: AtomicBool::new(false),
            is_alarmed: AtomicBool::new(false),
        }
    }

    pub(crate) fn wire(&self) -> &Wire {
        &self.wire
    }

    /// Lets the thread that serves choose anew what it waits for.
    pub(crate) fn wake(&self) {
        self.wire.wake();
        self.is_alarmed.store(true, Ordering::SeqCst);
        self.unpark();
    }

    fn unpark(&self) {
        self.thread.get().into_iter().for_each(Thread::unpark);
    }

    /// The server, if no other thread has it.
    fn server(&self) -> Option<MutexGuard<'_, Server>> {
        match self.server.try_lock() {
            Ok(server) => Some(server),
            Err(TryLockError::Poisoned(server)) => Some(server.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The body of the world's thread: serves while no wait of the program does, until the world is over.
    pub(crate) fn run(&self, core: &Core) {
        let _ = self.thread.set(std::thread::current());
        let (mut takes_over, mut alarm) = (false, false);
        while !core.is_over() {
            let waits = self.waits.load(Ordering::SeqCst);
            let turn = self.server().map(|mut server| {
                // A thread that serves takes the alarm back before it looks what it waits for, and no other does.
                if std::mem::take(&mut alarm) {
                    self.is_alarmed.store(false, Ordering::SeqCst);
                    self.wire.calm();
                    // The alarm may have been that of the end.
                    if core.is_over() {
                        return None;
                    }
                }
                let turn = server.turn(core, self)?;
                if std::mem::take(&mut takes_over) {
                    server.waits.ended(turn.found);
                }
                server.left = core.elapsed();
                Some(turn)
            });
            match turn {
                Some(None) => break,
                // A caller that waits for the kernel's lock gets it, or a wait that begins or ends goes on.
                Some(Some(Turn { more: true, .. })) | None => std::thread::yield_now(),
                Some(Some(turn)) => {
                    let timeout = left(core, turn.due);
                    alarm = self
                        .wire
                        .wait(&[], core.waits_for_room(), timeout)
                        .is_ok_and(|readiness| readiness.alarm);
                }
            }
            if self.is_wait.load(Ordering::SeqCst) || self.waits.load(Ordering::SeqCst) != waits {
                takes_over = self.stand_by(core);
                alarm = true;
            }
        }
        // The peer is owed the ACKs of messages that the program was told of.
        if let Ok(mut kernel) = core.kernel() {
            kernel.transmit();
        }
    }

    /// Waits until the program's waits serve no more, or there is an alarm or a wait that nobody serves: `false`.
    fn stand_by(&self, core: &Core) -> bool {
        self.stands_by.store(true, Ordering::SeqCst);
        let takes_over = self.look(core);
        self.stands_by.store(false, Ordering::SeqCst);
        takes_over
    }

    /// The looks of a thread that [stands by](Self::stand_by).
    fn look(&self, core: &Core) -> bool {
        let (mut waits, mut looks) = (self.waits.load(Ordering::SeqCst), 0);
        while !core.is_over()
            && !self.is_alarmed.swap(false, Ordering::SeqCst)
            && self.others.load(Ordering::SeqCst) == 0
        {
            std::thread::park_timeout(LOOK);
            let is_wait = self.is_wait.load(Ordering::SeqCst);
            let before = std::mem::replace(&mut waits, self.waits.load(Ordering::SeqCst));
            match (is_wait, before == waits) {
                (false, true) => return true,
                (true, true) => looks += 1,
                (_, false) => looks = 0,
            }
            if looks == LOOKS {
                looks = 0;
                self.is_asleep.store(true, Ordering::SeqCst);
                if self.is_wait.load(Ordering::SeqCst)
                    && !self.is_alarmed.load(Ordering::SeqCst)
                    && !core.is_over()
                {
                    std::thread::park();
                }
                self.is_asleep.store(false, Ordering::SeqCst);
            }
        }
        false
    }

    /// A wait that serves from now on; `None` if another one does, or this one had better not.
    fn shift<'s>(&'s self, core: &'s Core) -> Option<Shift<'s>> {
        if self.others.load(Ordering::SeqCst) > 0 {
            return None;
        }
        let mut server = self.server()?;
        if !server.waits.may() {
            return None;
        }
        self.is_wait.store(true, Ordering::SeqCst);
        // A wait that began meanwhile has found neither this one nor a thread that stands by.
        if self.others.load(Ordering::SeqCst) > 0 {
            self.is_wait.store(false, Ordering::SeqCst);
            return None;
        }
        let mut kernel = core.kernel().ok();
        if let Some(kernel) = &mut kernel {
            let now = core.elapsed();
            if server.late_acks.end(kernel, now) {
                kernel.transmit();
                core.arm(kernel);
            }
        }
        drop(kernel);
        Some(Shift { service: self, core, server, is_late: false })
    }

    /// [`poll_until`], which serves the socket meanwhile.
    pub(crate) fn wait(
        &self,
        core: &Core,
        fds: &mut [PollFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<usize> {
        if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return poll_until(fds, deadline);
        }
        let served = self.shift(core).and_then(|shift| self.serve(core, shift, fds, deadline));
        served.unwrap_or_else(|| {
            self.others.fetch_add(1, Ordering::SeqCst);
            // Nobody serves this wait, or another wait had better not.
            if self.is_wait.load(Ordering::SeqCst) || self.stands_by.load(Ordering::SeqCst) {
                self.wake();
            }
            let answer = poll_until(fds, deadline);
            self.others.fetch_sub(1, Ordering::SeqCst);
            answer
        })
    }

    /// A wait in a shift; `None` if it has given that up, because another thread waits as well.
    fn serve(
        &self,
        core: &Core,
        mut shift: Shift<'_>,
        fds: &mut [PollFd<'_>],
        deadline: Option<Instant>,
    ) -> Option<Result<usize>> {
        let is_over = || deadline.is_some_and(|deadline| deadline <= Instant::now());
        let ready = |fds: &mut [PollFd<'_>]| poll_until(fds, Some(Instant::now()));
        if core.elapsed() > shift.server.left + SOON {
            // Datagrams that have come since then have waited for too long.
            let at_once = Some(Duration::ZERO);
            if self.wire.wait(&[], false, at_once).is_ok_and(|readiness| readiness.socket) {
                shift.is_late = true;
                shift.server.waits.ended(true);
            }
        }
        let mut due = due(core, &self.delivery);
        loop {
            let until = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let timeout = until.into_iter().chain(left(core, due)).min();
            let Readiness { alarm, socket, is_interrupted } =
                match self.wire.wait(fds, core.waits_for_room(), timeout) {
                    Ok(readiness) => readiness,
                    Err(errno) => return Some(Err(errno)),
                };
            if alarm {
                self.wire.calm();
                if self.others.load(Ordering::SeqCst) > 0 {
                    return None;
                }
            }
            if alarm || socket || core.elapsed() >= due {
                let Some(turn) = shift.server.turn(core, self) else {
                    return Some(ready(fds));
                };
                due = turn.due;
                if turn.more {
                    std::thread::yield_now();
                }
            }
            match ready(fds) {
                Ok(0) if !is_interrupted && !is_over() => {}
                answer => return Some(answer),
            }
        }
    }
}

/// The choice whether to try something that pays only if the program does its part: not for a while after it did not.
#[derive(Debug, Default)]
struct Attempts {
    /// Times that it is not tried before the next attempt.
    skips: u32,
    /// The times that were skipped last, less a sixteenth for each attempt that has paid since.
    penalty: u32,
}

impl Attempts {
    /// The fewest and the most times between two attempts. A program that is late once, as any is on a busy machine,
    /// skips few.
    const LEAST: u32 = 4;
    const MOST: u32 = 1024;

    fn may(&mut self) -> bool {
        let may = self.skips == 0;
        self.skips = self.skips.saturating_sub(1);
        may
    }

    fn ended(&mut self, has_failed: bool) {
        self.penalty = match has_failed {
            true => (2 * self.penalty).clamp(Attempts::LEAST, Attempts::MOST),
            false => 0,
        };
        self.skips = self.penalty;
    }

    /// An attempt has paid so far: a later one that does not weighs less.
    fn paid(&mut self) {
        self.penalty -= self.penalty.div_ceil(16);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_go_on_while_they_pay_and_are_seldom_when_they_do_not() {
        let mut attempts = Attempts::default();
        for _ in 0..100 {
            assert!(attempts.may());
            attempts.ended(false);
        }
        let mut tries = 0;
        for _ in 0..10_000 {
            if attempts.may() {
                tries += 1;
                attempts.ended(true);
            }
        }
        assert!((5..=20).contains(&tries), "{tries} of 10,000");
        while !attempts.may() {}
        attempts.ended(false);
        assert!(attempts.may());
    }

    #[test]
    fn an_attempt_that_seldom_fails_is_made_nearly_always() {
        let mut attempts = Attempts::default();
        let tried = (0..10_000).filter(|time| {
            let may = attempts.may();
            if may {
                match time % 100 {
                    0 => attempts.ended(true),
                    _ => attempts.paid(),
                }
            }
            may
        });
        assert!(tried.count() > 9_500);
    }
}
