//! The control path: its operations, and how each is measured.
//!
//! Programs do each thing a few times before it is timed, so that the work of the first time is not.

use crate::Failure;
use crate::sample::Sample;
use nix::sys::ptrace;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{Signal, kill, raise};
use nix::sys::time::TimeValLike;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use rustix::time::{ClockId, clock_gettime};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicU64;
use std::time::Instant;

/// The command that lists the devices and ends.
pub const LIST: &str = "list";
/// The command that connects by address once.
pub const FIRST_BY_ADDRESS: &str = "first-by-address";
/// The command of a program that is stepped through one thing.
pub const STOP: &str = "stop";

/// Something to do and undo, again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thing {
    /// A program starts, lists the devices and ends.
    Start,
    /// A device is opened, and a queue pair of it connected to itself. Closing is not timed.
    Connect,
    /// So many bytes are registered.
    Region(usize),
    /// A protection domain.
    Domain,
    /// A thread domain.
    ThreadDomain,
    /// A parent domain, with a thread domain that is there.
    ParentDomain,
    /// An XRC domain.
    XrcDomain,
    /// A doorbell page of mlx5.
    Var,
    /// An address handle.
    AddressHandle,
    /// A queue pair of the first device is connected by address to one of the second, and both are
    /// disconnected and destroyed.
    ByAddress,
}

/// The address that connections by address come from, which the first device has.
pub const FROM: &str = "10.0.0.1:0";
/// The address that they lead to, which the second device has.
pub const TO: &str = "10.0.0.2:7471";

impl Thing {
    /// All of them with their names, and how often each is done in a run.
    pub const ALL: &[(&str, Thing, u32)] = &[
        ("start, list devices, end", Thing::Start, 4),
        ("open, create, connect", Thing::Connect, 3),
        ("register 4 KiB and back", Thing::Region(4 << 10), 100),
        ("register 2 MiB and back", Thing::Region(2 << 20), 20),
        ("register 1 GiB and back", Thing::Region(1 << 30), 1),
        ("protection domain and back", Thing::Domain, 100),
        ("thread domain and back", Thing::ThreadDomain, 50),
        ("parent domain and back", Thing::ParentDomain, 50),
        ("XRC domain and back", Thing::XrcDomain, 50),
        ("VAR and back", Thing::Var, 50),
        ("address handle and back", Thing::AddressHandle, 50),
    ];

    /// Those of the connection manager, likewise.
    pub const MANAGED: &[(&str, Thing, u32)] =
        &[("connect by address and back", Thing::ByAddress, 20)];
}

/// One side, with a device open.
pub trait Control: Sized {
    /// The parts of a connection.
    type Connected;

    /// Lists the devices and returns how many there are.
    fn list() -> Result<usize, Failure>;

    /// Opens a device and allocates a protection domain: the first verb.
    fn first(device: &str) -> Result<(), Failure>;

    /// Connects two queue pairs by address and leaves them connected: the work of a program until its first
    /// connection. Both sides are in this process.
    fn first_by_address() -> Result<(), Failure>;

    /// Lists the devices, opens one, asks for its port and identifier, and brings a queue pair of
    /// it, with a completion queue, to the state in which it sends.
    fn connect(&self, device: &str) -> Result<Self::Connected, Failure>;

    /// Takes a connection down.
    fn close(connected: Self::Connected) -> Result<(), Failure>;

    /// Opens a device, with a protection domain, and the objects that `thing` needs.
    fn open(device: &str) -> Result<Self, Failure>;

    /// Registers memory for all access, and takes that back.
    fn region(&mut self, memory: &[AtomicU64]) -> Result<(), Failure>;

    /// Allocates another thing and frees it.
    fn thing(&mut self, thing: Thing) -> Result<(), Failure>;
}

/// The cost of one thing.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    /// Microseconds that pass.
    passed: f64,
    /// Nanoseconds that the program works, in the kernel as well: instructions where the clock
    /// counts those. Waiting for a device is not among them.
    worked: f64,
}

/// Nanoseconds that this process has worked.
pub(crate) fn worked() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    1e9 * time.tv_sec as f64 + time.tv_nsec as f64
}

/// Nanoseconds that programs have worked which this process started, and which are over.
fn others_worked() -> f64 {
    getrusage(UsageWho::RUSAGE_CHILDREN).map_or(0.0, |usage| {
        1e3 * (usage.user_time() + usage.system_time()).num_microseconds() as f64
    })
}

/// Does one thing, and returns the objects to destroy afterwards.
fn once<C: Control>(
    side: &mut C,
    device: &str,
    memory: &[AtomicU64],
    thing: Thing,
) -> Result<Option<C::Connected>, Failure> {
    match thing {
        Thing::Start => {
            let own = std::env::current_exe()?;
            let status = Command::new(own).arg(LIST).stdout(Stdio::null()).status()?;
            if !status.success() {
                return Err(format!("{LIST} ended with {status}").into());
            }
        }
        Thing::Connect => return side.connect(device).map(Some),
        Thing::Region(length) => side.region(&memory[..length / size_of::<AtomicU64>()])?,
        other => side.thing(other)?,
    }
    Ok(None)
}

/// Does one thing so often.
fn repeat<C: Control>(
    side: &mut C,
    device: &str,
    memory: &[AtomicU64],
    thing: Thing,
    count: u32,
) -> Result<Cost, Failure> {
    // A program that is started is a process of its own.
    let worked = if thing == Thing::Start { others_worked } else { worked };
    let mut cost = Cost::default();
    for _ in 0..count {
        let (start, before) = (Instant::now(), worked());
        let connected = once(side, device, memory, thing)?;
        cost.worked += worked() - before;
        cost.passed += start.elapsed().as_secs_f64();
        connected.map_or(Ok(()), C::close)?;
    }
    let count = f64::from(count);
    Ok(Cost { passed: 1e6 * cost.passed / count, worked: cost.worked / count })
}

/// Zeroed memory for the largest region.
fn memory(thing: Thing) -> Vec<AtomicU64> {
    let length = if let Thing::Region(length) = thing { length } else { 0 };
    (0..length / size_of::<AtomicU64>()).map(|_| AtomicU64::new(0)).collect()
}

/// The way of a sample that is microseconds that pass.
pub const PASSED: &str = "µs";
/// The way of a sample that is nanoseconds of work.
pub const WORKED: &str = "instructions";
/// The way of a sample that is instructions of the program, without the kernel's.
pub const STEPPED: &str = "user instructions";

/// Measures these things, and prints both costs.
pub fn measure<C: Control>(
    things: &[(&str, Thing, u32)],
    device: &str,
    runs: u32,
    only: &str,
) -> Result<(), Failure> {
    let mut side = C::open(device)?;
    for &(name, thing, count) in things.iter().filter(|(name, ..)| name.contains(only)) {
        let memory = memory(thing);
        let (mut passed, mut worked) = (Vec::new(), Vec::new());
        // The first run is not timed.
        for run in 0..=runs {
            match repeat(&mut side, device, &memory, thing, count) {
                Ok(cost) if run > 0 => {
                    passed.push(cost.passed);
                    worked.push(cost.worked);
                }
                Ok(_) => {}
                Err(failure) => {
                    crate::complain(format_args!("{name}: {failure}"));
                    break;
                }
            }
        }
        for (way, runs) in [(PASSED, passed), (WORKED, worked)] {
            if !runs.is_empty() {
                crate::say(Sample { operation: name.into(), way: way.into(), runs });
            }
        }
    }
    Ok(())
}

/// Does one thing so often and prints nothing, for a count of system calls: reading the time that a
/// process works is one.
pub fn perform<C: Control>(device: &str, name: &str, count: u32) -> Result<(), Failure> {
    let (_, thing, _) = Thing::ALL
        .iter()
        .chain(Thing::MANAGED)
        .find(|(known, ..)| *known == name)
        .ok_or_else(|| format!("nothing is called {name:?}"))?;
    let (mut side, memory) = (C::open(device)?, memory(*thing));
    for _ in 0..count {
        once(&mut side, device, &memory, *thing)?.map_or(Ok(()), C::close)?;
    }
    Ok(())
}

/// The argument in place of a thing's name that has nothing done between the two stops.
const NOTHING: &str = "nothing";
/// How often a thing is done before its instructions are counted.
const BEFORE: u32 = 3;

/// Counts the instructions that this program executes for each of its things, without the kernel's, and
/// prints them.
pub fn step<C: Control>(device: &str, runs: u32, only: &str) -> Result<(), Failure> {
    // A thing that starts programs is not done by this one.
    let things = Thing::ALL.iter().filter(|(_, thing, _)| *thing != Thing::Start);
    let nothing = stepped(device, NOTHING)?;
    for &(name, ..) in things.filter(|(name, ..)| name.contains(only)) {
        let counted = |_| Ok((stepped(device, name)? - nothing) as f64);
        match (0..runs).map(counted).collect::<Result<Vec<f64>, Failure>>() {
            Ok(runs) => {
                crate::say(Sample { operation: name.into(), way: STEPPED.into(), runs });
            }
            Err(failure) => crate::complain(format_args!("{name}: {failure}")),
        }
    }
    Ok(())
}

/// Starts this program again to do a thing, and executes it instruction by instruction between its two stops.
/// A system call is one step.
fn stepped(device: &str, name: &str) -> Result<i64, Failure> {
    let mut child = Command::new(std::env::current_exe()?)
        .args([STOP, device, name])
        .stdout(Stdio::null())
        .spawn()?;
    let steps = steps(Pid::from_raw(child.id().try_into()?))
        .map_err(|failure| format!("stepping through {name:?}: {failure}"))?;
    match child.wait()? {
        status if status.success() => Ok(steps),
        status => Err(format!("{name:?} ended with {status}").into()),
    }
}

/// The steps of a child from its first stop to its second, after which it goes on. After an error it has ended.
pub fn steps(child: Pid) -> Result<i64, Failure> {
    let mut steps = -1;
    loop {
        match waitpid(child, None)? {
            WaitStatus::Stopped(_, Signal::SIGSTOP) if steps < 0 => {}
            WaitStatus::Stopped(_, Signal::SIGTRAP) => {}
            WaitStatus::Stopped(_, Signal::SIGSTOP) => {
                ptrace::detach(child, None)?;
                return Ok(steps);
            }
            WaitStatus::Stopped(_, signal) => {
                kill(child, Signal::SIGKILL)?;
                waitpid(child, None)?;
                return Err(format!("{signal} after {steps} steps").into());
            }
            other => return Err(format!("{other:?} after {steps} steps").into()),
        }
        ptrace::step(child, None)?;
        steps += 1;
    }
}

/// Does one thing between two stops of this process, whose parent traces it.
pub fn stop<C: Control>(device: &str, name: &str) -> Result<(), Failure> {
    let thing = Thing::ALL.iter().find(|(known, ..)| *known == name).map(|(_, thing, _)| *thing);
    let memory = thing.map_or_else(Vec::new, memory);
    let mut side = C::open(device)?;
    let mut perform = || match thing {
        Some(thing) => once(&mut side, device, &memory, thing),
        None => Ok(None),
    };
    for _ in 0..BEFORE {
        perform()?.map_or(Ok(()), C::close)?;
    }
    ptrace::traceme()?;
    raise(Signal::SIGSTOP)?;
    let connected = perform();
    raise(Signal::SIGSTOP)?;
    connected?.map_or(Ok(()), C::close)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This program's own work meanwhile is not counted, nor is idle time.
    #[test]
    fn a_program_that_was_started_has_worked() {
        let (before, own) = (others_worked(), worked());
        while worked() - own < 1e6 {}
        assert_eq!(others_worked(), before);
        let text = "i=0; while [ $i -lt 20000 ]; do i=$((i + 1)); done; sleep 0.1";
        let (start, own) = (Instant::now(), worked());
        let status = Command::new("sh").args(["-c", text]).status().unwrap();
        let passed = 1e9 * start.elapsed().as_secs_f64();
        assert!(status.success());
        let theirs = others_worked() - before;
        assert!((1e6..passed - 9e7).contains(&theirs), "{theirs} of {passed}");
        // Tests beside this one work as well, but not for so long.
        assert!(worked() - own < passed);
    }
}
