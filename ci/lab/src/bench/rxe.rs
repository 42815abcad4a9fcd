//! Suite `rxe`: how this workspace's ping-pong does beside rdma-core's, in the same machine.
//!
//! The two run in turns, so that whatever slows the machine down slows both; a pair of neighbours
//! gives a ratio, and the median of the ratios is what counts.

use super::BenchArguments;
use super::pingpong::{self, Operation, Program};
use super::score::{Row, Score};
use crate::device::DeviceName;
use crate::progress;
use crate::session::{Machine, Session};
use crate::vm::{Event, Vm};
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
/// Iterations of the runs whose system calls are counted; what happens once cancels. A program
/// that stops at each call is slow.
const COUNTED: [u64; 2] = [100, 300];

/// Measures all operations.
pub(super) fn run(arguments: &BenchArguments) -> Result<Score> {
    let operations = Operation::all()
        .into_iter()
        .filter(|operation| operation.events || !arguments.count_instructions);
    measure(arguments, operations, Program::Ours, |workspace| {
        let program = workspace.static_program("uverbs", "uverbs", Profile::Release)?;
        Ok(("uverbs".to_owned(), program))
    })
}

/// Measures those of `operations` that were asked for, of the program that `build` makes and names
/// and of theirs, in one machine.
pub(super) fn measure(
    arguments: &BenchArguments,
    operations: impl Iterator<Item = Operation>,
    ours: Program,
    build: impl FnOnce(&Workspace) -> Result<(String, PathBuf)>,
) -> Result<Score> {
    let operations: Vec<Operation> =
        operations.filter(|operation| arguments.wants(&operation.name())).collect();
    if operations.is_empty() {
        let text = arguments.only.as_deref().unwrap_or_default();
        bail!("no operation to measure has {text:?} in its name");
    }
    let mut session = Session::open(&arguments.needs(), arguments.console)?;
    if arguments.count_instructions {
        session.count_instructions();
    }
    let mut vm = session.boot(&Machine {
        programs: &[build(&session.workspace)?],
        peers: true,
        ..Machine::new(arguments.kernel, DeviceName::Rxe)
    })?;
    let mut rows = Vec::new();
    for operation in &operations {
        rows.push(compare(&mut vm, operation, ours, arguments.runs)?);
    }
    let score = Score {
        kernel: vm.greeting.release.clone(),
        device: DeviceName::Rxe.label().to_owned(),
        accelerator: session.accelerator().label().to_owned(),
        runs: arguments.runs,
        rows,
    };
    vm.power_off()?;
    Ok(score)
}

/// One operation, of `ours` and of theirs.
fn compare(vm: &mut Vm, operation: &Operation, ours: Program, runs: u32) -> Result<Row> {
    let spinner = progress::spinner(operation.name());
    let time = |vm: &mut Vm, program: Program, iterations| -> Result<f64> {
        program.microseconds(&exchange(vm, program, operation, iterations, false)?)
    };
    // The first run warms up what both use, and tells how many iterations make a run.
    let first = time(vm, Program::Theirs, COUNTED[0])?;
    let iterations = ((RUN / first) as u64).clamp(COUNTED[0], 10_000);
    let mut pairs = Vec::new();
    for _ in 0..runs {
        pairs.push([time(vm, ours, iterations)?, time(vm, Program::Theirs, iterations)?]);
    }
    let mut calls = [0.0; 2];
    for (calls, program) in calls.iter_mut().zip([ours, Program::Theirs]) {
        let mut totals = [0.0; 2];
        for (total, iterations) in totals.iter_mut().zip(COUNTED) {
            *total = pingpong::system_calls(&exchange(vm, program, operation, iterations, true)?)?;
        }
        // Each of the two sides sent one message per iteration.
        *calls = (totals[1] - totals[0]) / (2.0 * (COUNTED[1] - COUNTED[0]) as f64);
    }
    spinner.finish_and_clear();
    Ok(Row::new(operation, &pairs, calls))
}

/// Runs both sides to their end and answers what they printed.
fn exchange(
    vm: &mut Vm,
    program: Program,
    operation: &Operation,
    iterations: u64,
    counted: bool,
) -> Result<String> {
    let command = program.script(operation, iterations, counted);
    let mut output = Vec::new();
    let ending = vm.run(&Order { command, ..Order::default() }, PATIENCE, |event| match event {
        Event::Stdout(_, bytes) | Event::Stderr(_, bytes) => output.extend_from_slice(bytes),
        Event::Exit(..) => {}
    })?;
    let output = String::from_utf8_lossy(&output).into_owned();
    if ending.status() != 0 {
        let name = operation.name();
        bail!("{name} of {program:?} ended with status {}:\n{output}", ending.status());
    }
    Ok(output)
}
