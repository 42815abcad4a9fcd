//! Suite `rxe`: how this workspace's ping-pong does beside rdma-core's, and perftest's measures
//! beside the same of this workspace's library, in the same machine.
//!
//! The two run in turns, so that whatever slows the machine down slows both; a pair of neighbours
//! gives a ratio, and the median of the ratios counts.

use super::pingpong::{self, Program};
use super::repeats::Repeats;
use super::score::{Score, ScoreRow, Target};
use super::{BenchArguments, perftest};
use crate::machine::device::DeviceName;
use crate::machine::session::{Machine, Session};
use crate::machine::vm::{GuestEvent, Vm};
use crate::output::errln;
use crate::run::progress;
use crate::workspace::{Profile, Workspace};
use anyhow::{Result, bail};
use lab_guest::order::Order;
use std::path::PathBuf;
use std::time::Duration;

/// How long one ping-pong may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long a run that is timed should take, in microseconds: many short ones tell more than few
/// long ones where the machine has other things to do.
const RUN: f64 = 400_000.0;
/// Iterations of the runs whose system calls are counted; calls at the start cancel. A program that stops
/// at each call is slow.
const COUNTED: [u64; 2] = [LISTS, 3 * LISTS];
/// A common multiple of the lengths of all lists of requests.
const LISTS: u64 = 128;

/// An operation that our program and theirs both run.
#[derive(Clone, Debug)]
pub(super) enum Contest {
    /// Messages there and back.
    PingPong(pingpong::PingPongOperation),
    /// A measure of perftest.
    Perftest(perftest::PerftestOperation),
}

impl Contest {
    fn name(&self) -> String {
        match self {
            Contest::PingPong(operation) => operation.name(),
            Contest::Perftest(operation) => operation.name(),
        }
    }

    /// Messages for which one time stands.
    fn together(&self) -> u32 {
        match self {
            Contest::PingPong(_) => 2,
            Contest::Perftest(_) => 1,
        }
    }

    /// Messages of so many iterations of both sides.
    fn messages(&self, iterations: u64) -> f64 {
        let back = match self {
            Contest::PingPong(_) => true,
            Contest::Perftest(operation) => operation.is_answered(),
        };
        if back { 2.0 * iterations as f64 } else { iterations as f64 }
    }

    fn script(&self, program: Program, iterations: u64, counted: bool) -> Vec<String> {
        match self {
            Contest::PingPong(operation) => program.script(operation, iterations, counted),
            Contest::Perftest(operation) => operation.script(program, iterations, counted),
        }
    }

    fn microseconds(&self, program: Program, output: &str) -> Result<f64> {
        match self {
            Contest::PingPong(_) => program.microseconds(output),
            Contest::Perftest(operation) => operation.microseconds(program, output),
        }
    }

    /// The aim for an operation.
    fn target(&self, ours: Program) -> Target {
        match self {
            // The transport is in the process, and its socket's cost comes with each packet.
            _ if ours == Program::Udp => Target { time: 2.0, calls: false },
            // An event loop costs one system call more.
            Contest::PingPong(operation) if ours == Program::Futures && !operation.blocking => {
                Target { time: 1.1, calls: false }
            }
            // A rate of 0.98.
            Contest::Perftest(operation) if operation.list.is_some() => {
                Target { time: 1.0 / 0.98, calls: true }
            }
            _ => Target { time: 1.05, calls: false },
        }
    }
}

/// Measures all operations.
pub(super) fn run(arguments: &BenchArguments) -> Result<Score> {
    let pings = pingpong::PingPongOperation::all()
        .into_iter()
        .filter(|operation| operation.events || !arguments.count_instructions)
        .map(Contest::PingPong);
    // These poll.
    let tests =
        perftest::PerftestOperation::all().into_iter().filter(|_| !arguments.count_instructions);
    let contests = pings.chain(tests.map(Contest::Perftest));
    measure(arguments, contests, Program::Ours, |workspace| {
        let program = workspace.static_program("uverbs-cli", "uverbs", Profile::Release)?;
        let traffic = workspace.static_program("lab-bench", "bench-traffic", Profile::Release)?;
        Ok(vec![("uverbs".to_owned(), program), ("bench-traffic".to_owned(), traffic)])
    })
}

/// Measures those of `contests` that were asked for, of the programs that `build` makes and names
/// and of theirs, in one machine.
pub(super) fn measure(
    arguments: &BenchArguments,
    contests: impl Iterator<Item = Contest>,
    ours: Program,
    build: impl FnOnce(&Workspace) -> Result<Vec<(String, PathBuf)>>,
) -> Result<Score> {
    let contests: Vec<Contest> =
        contests.filter(|contest| arguments.wants(&contest.name())).collect();
    if contests.is_empty() {
        let text = arguments.only.as_deref().unwrap_or_default();
        bail!("no operation to measure has {text:?} in its name");
    }
    let mut session = Session::open(&arguments.needs(), arguments.console)?;
    if arguments.count_instructions {
        session.count_instructions();
    }
    let mut vm = session.boot(&Machine {
        programs: &build(&session.workspace)?,
        peers: true,
        ..Machine::new(arguments.kernel, DeviceName::Rxe)
    })?;
    let (mut rows, mut failure) = (Vec::new(), None);
    for contest in &contests {
        match compare(&mut vm, contest, ours, arguments.runs) {
            Ok(row) => {
                errln!("{row}");
                rows.push(row);
            }
            // The rows before are worth keeping.
            Err(error) => {
                failure = Some(format!("{}: {error:#}", contest.name()));
                break;
            }
        }
    }
    let score = Score {
        kernel: vm.greeting.release.clone(),
        device: DeviceName::Rxe.label().to_owned(),
        accelerator: session.accelerator().label().to_owned(),
        runs: arguments.runs,
        rows,
        failure,
    };
    if score.failure.is_none() {
        vm.power_off()?;
    }
    Ok(score)
}

/// One operation, of `ours` and of theirs.
fn compare(vm: &mut Vm, contest: &Contest, ours: Program, runs: u32) -> Result<ScoreRow> {
    let spinner = progress::spinner(contest.name());
    let time = |vm: &mut Vm, program: Program, iterations| -> Result<f64> {
        contest.microseconds(program, &exchange(vm, program, contest, iterations, false)?)
    };
    // The first run warms up the caches of both, and tells how many iterations make a run.
    let mut repeats = Repeats::default();
    let first = repeats.again(|| time(vm, Program::Theirs, COUNTED[0]))?;
    let iterations = ((RUN / first) as u64).clamp(COUNTED[0], 10_000).next_multiple_of(LISTS);
    let mut pairs = Vec::new();
    for _ in 0..runs {
        let pair = repeats
            .again(|| Ok([time(vm, ours, iterations)?, time(vm, Program::Theirs, iterations)?]))?;
        pairs.push(pair);
    }
    let mut calls = [0.0; 2];
    for (calls, program) in calls.iter_mut().zip([ours, Program::Theirs]) {
        let mut totals = [0.0; 2];
        for (total, iterations) in totals.iter_mut().zip(COUNTED) {
            *total = repeats.again(|| {
                pingpong::system_calls(&exchange(vm, program, contest, iterations, true)?)
            })?;
        }
        *calls = (totals[1] - totals[0]) / contest.messages(COUNTED[1] - COUNTED[0]);
    }
    spinner.finish_and_clear();
    let in_flight = match contest {
        Contest::PingPong(operation) => operation.queue_pairs,
        Contest::Perftest(operation) => operation.list.map_or(1, |_| perftest::DEPTH),
    };
    let target = contest.target(ours);
    let row =
        ScoreRow::new(&contest.name(), [in_flight, contest.together()], &pairs, calls, target);
    Ok(row.repeated(repeats.into_reasons()))
}

/// Runs both sides to their end and returns their output.
fn exchange(
    vm: &mut Vm,
    program: Program,
    contest: &Contest,
    iterations: u64,
    counted: bool,
) -> Result<String> {
    let command = contest.script(program, iterations, counted);
    let mut output = Vec::new();
    let root = program == Program::Udp;
    let ending =
        vm.run(&Order { command, root, ..Order::default() }, PATIENCE, |event| match event {
            GuestEvent::Stdout(_, bytes) | GuestEvent::Stderr(_, bytes) => {
                output.extend_from_slice(bytes)
            }
            GuestEvent::Exit(..) => {}
        })?;
    let output = String::from_utf8_lossy(&output).into_owned();
    if ending.status() != 0 {
        let name = contest.name();
        bail!("{name} of {program:?} ended with status {}:\n{output}", ending.status());
    }
    Ok(output)
}
