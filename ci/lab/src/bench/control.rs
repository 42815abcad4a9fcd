//! Suite `control`: the control path, in time, in system calls and in instructions.
//!
//! Time is taken in turns in one machine, and the median of the runs counts. System calls are those
//! of a long run less those of a short one. Instructions are those of the process, in the kernel
//! as well, in a second machine whose clock counts them; the lowest of the runs counts. Instructions of the
//! program alone are steps of a debugger (`ptrace(2)`).

use super::BenchArguments;
use super::cmtime;
use super::rounds::{self, Found, Library};
use super::table::{Table, TableRow, TableTarget, Value};
use crate::machine::session::Session;
use crate::machine::vm::Vm;
use crate::run::progress;
use crate::workspace::Profile;
use anyhow::{Result, bail};
use lab_bench::control::{FIRST_BY_ADDRESS, LIST, PASSED, STEPPED, Thing, WORKED};

/// Runs of each thing within one round.
const IN_A_ROW: u32 = 3;
/// How often a thing is done while system calls are counted.
const COUNTED: [u32; 2] = [2, 6];

/// Aims: the ratio of times, that of system calls, and that of instructions.
fn target(thing: Thing) -> [Option<f64>; 3] {
    match thing {
        Thing::Start => [Some(0.5), Some(0.5), None],
        Thing::Connect => [Some(1.0), Some(0.7), None],
        Thing::Region(_) => [Some(1.05), None, None],
        Thing::Domain | Thing::XrcDomain | Thing::Var | Thing::AddressHandle => {
            [None, None, Some(1.02)]
        }
        Thing::ByAddress => [None, Some(1.0), Some(1.0)],
        _ => [None; 3],
    }
}

/// A thing with its name, and how often it is done in a run.
pub(super) type Known = (&'static str, Thing, u32);

/// The things whose names the arguments pick.
pub(super) fn wanted(
    arguments: &BenchArguments,
    things: &[Known],
) -> Result<Vec<(&'static str, Thing)>> {
    let things = things.iter().filter(|(name, ..)| arguments.wants(name));
    let things: Vec<_> = things.map(|(name, thing, _)| (*name, *thing)).collect();
    if things.is_empty() {
        let text = arguments.only.as_deref().unwrap_or_default();
        bail!("nothing to measure has {text:?} in its name");
    }
    Ok(things)
}

/// Measures the control path.
pub(super) fn run(arguments: &BenchArguments) -> Result<Table> {
    let title = format!("The control path on {}", arguments.device.label());
    measure(arguments, "control", Thing::ALL, title)
}

/// Measures connections by address: the start of a program up to the first one, and each further one.
pub(super) fn by_address(arguments: &BenchArguments) -> Result<Table> {
    let title = format!("Connections by address on {}", arguments.device.label());
    measure(arguments, "cm", Thing::MANAGED, title)
}

/// Measures these things, which are a command of both programs.
fn measure(
    arguments: &BenchArguments,
    command: &str,
    things: &[Known],
    title: String,
) -> Result<Table> {
    let things = wanted(arguments, things)?;
    let mut session = Session::open(&arguments.needs(), arguments.console)?;
    let mut programs = rounds::programs(&session.workspace)?;
    let by_address = things.iter().any(|(_, thing)| *thing == Thing::ByAddress);
    if by_address {
        let program = session.workspace.static_program("uverbs-cli", "uverbs", Profile::Release)?;
        programs.push(("uverbs".to_owned(), program));
    }
    let (mut vm, device) = rounds::boot(&session, arguments, &programs)?;
    let rounds = arguments.runs.div_ceil(IN_A_ROW);
    let spinner = progress::spinner(&title);
    let runs = IN_A_ROW.to_string();
    let mut words = [command, &device, &runs].map(str::to_owned).to_vec();
    words.extend(arguments.only.clone());
    let found = rounds::play(&mut vm, &words, rounds)?;
    let stepped = match by_address {
        true => Default::default(),
        false => {
            words[0] = "step".into();
            rounds::play(&mut vm, &words, 1)?
        }
    };
    words[0] = command.to_owned();
    let mut rows = Vec::new();
    let mut notes = rounds::failures(&found);
    notes.extend(rounds::failures(&stepped));
    let kernel = vm.greeting.release.clone();
    let accelerator = session.accelerator().label().to_owned();
    for &(name, thing) in &things {
        let [ours, theirs] = values(&found, name, PASSED, Value::median);
        let [time, calls, _] = target(thing);
        let row = |unit, ours, theirs, ratio| named(name, unit, ours, theirs, ratio);
        rows.push(row("µs", ours, theirs, time));
        if ours.is_none() && theirs.is_none() {
            continue;
        }
        let mut counts = [None; 2];
        for (library, count) in Library::BOTH.into_iter().zip(&mut counts) {
            let there = if library == Library::Ours { ours } else { theirs };
            if there.is_some() {
                match system_calls(&mut vm, library, &device, name, thing) {
                    Ok(calls) => *count = Value::median(&[calls]),
                    Err(error) => notes.push(format!("{name}, {}: {error}", library.program())),
                }
            }
        }
        rows.push(row("system calls", counts[0], counts[1], calls));
    }
    let (mut first, mut together) = (Vec::new(), None);
    if by_address {
        first = first_connection(&mut vm)?;
        match cmtime::compare(&mut vm, arguments.runs) {
            Ok((row, repeated)) => {
                together = Some(row);
                let note = |reason| format!("{}: repeated after: {reason}", cmtime::NAME);
                notes.extend(repeated.into_iter().map(note));
            }
            Err(error) => notes.push(format!("{}: {error:#}", cmtime::NAME)),
        }
    }
    vm.power_off()?;
    session.count_instructions();
    let (mut vm, _) = rounds::boot(&session, arguments, &programs)?;
    let found = rounds::play(&mut vm, &words, rounds)?;
    vm.power_off()?;
    for &(name, thing) in &things {
        let [ours, theirs] = values(&found, name, WORKED, Value::lowest);
        if ours.or(theirs).is_some() {
            let [.., instructions] = target(thing);
            rows.push(named(name, WORKED, ours, theirs, instructions));
        }
        let [ours, theirs] = values(&stepped, name, STEPPED, Value::lowest);
        if ours.or(theirs).is_some() {
            rows.push(named(name, STEPPED, ours, theirs, None));
        }
    }
    rows.sort_by_key(|row| things.iter().position(|(name, ..)| *name == row.operation));
    rows.splice(0..0, first);
    rows.extend(together);
    spinner.finish_and_clear();
    Ok(Table {
        title,
        unit: "the unit that each row names".into(),
        kernel,
        accelerator,
        runs: rounds * IN_A_ROW,
        rows,
        notes,
    })
}

/// System calls and opened files from the start of a program to its first connection by address.
fn first_connection(vm: &mut Vm) -> Result<Vec<TableRow>> {
    let mut counts = [[None; 2]; 2];
    for (library, counts) in Library::BOTH.into_iter().zip(&mut counts) {
        let [calls, opened, _] = rounds::counts(vm, &[library.program(), FIRST_BY_ADDRESS])?;
        *counts = [calls, opened].map(|count| Value::median(&[count]));
    }
    let [ours, theirs] = counts;
    let row = |unit, place: usize, target| {
        named("start to the first connection by address", unit, ours[place], theirs[place], target)
    };
    Ok(vec![row("system calls", 0, Some(0.7)), row("files opened", 1, None)])
}

/// The samples of both sides for a thing.
fn values(
    found: &[Found; 2],
    name: &str,
    way: &str,
    choose: fn(&[f64]) -> Option<Value>,
) -> [Option<Value>; 2] {
    found.each_ref().map(|found| {
        let sample = found.of(name).find(|sample| sample.way == way)?;
        choose(&sample.runs)
    })
}

fn named(
    name: &str,
    unit: &str,
    ours: Option<Value>,
    theirs: Option<Value>,
    ratio: Option<f64>,
) -> TableRow {
    let theirs = theirs.map(|theirs| (theirs, String::new()));
    TableRow::new(name, unit, ours, theirs, TableTarget { ratio, ..TableTarget::default() })
}

/// System calls that a thing takes.
fn system_calls(
    vm: &mut Vm,
    library: Library,
    device: &str,
    name: &str,
    thing: Thing,
) -> Result<f64> {
    if thing == Thing::Start {
        return Ok(rounds::counts(vm, &[library.program(), LIST])?[0]);
    }
    let mut totals = [0.0; 2];
    for (total, count) in totals.iter_mut().zip(COUNTED) {
        let command = [library.program(), "perform", device, name, &count.to_string()];
        *total = rounds::counts(vm, &command)?[0];
    }
    Ok((totals[1] - totals[0]) / f64::from(COUNTED[1] - COUNTED[0]))
}
