//! Suite `mlx5-path`: instructions of each operation of the data path, on an emulated ConnectX.
//!
//! The machine's clock counts instructions, on one processor; the device's work in the meantime
//! costs the guest none. Each operation counts with the lowest of its runs, since interrupts only
//! add, and theirs with the faster of its two interfaces.

use super::BenchArguments;
use super::rounds::{self, Found};
use super::table::{Table, TableRow, TableTarget, Value};
use crate::machine::device::{DeviceName, Emulation};
use crate::machine::session::{Machine, Session};
use crate::run::progress;
use anyhow::{Result, bail};
use lab_bench::path::Operation;

/// Runs of an operation within one round.
const IN_A_ROW: u32 = 3;

/// Whether requests are copied into the register, or only their first word is written there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ringing {
    Doorbell,
    BlueFlame,
}

/// Measures everything.
pub(super) fn run(arguments: &BenchArguments) -> Result<Table> {
    let operations: Vec<_> =
        Operation::ALL.iter().filter(|(name, _)| arguments.wants(name)).collect();
    if operations.is_empty() {
        let text = arguments.only.as_deref().unwrap_or_default();
        bail!("no operation to measure has {text:?} in its name");
    }
    let mut session = Session::open(&arguments.needs(), arguments.console)?;
    session.count_instructions();
    let programs = rounds::programs(&session.workspace)?;
    let rounds = arguments.runs_to_the_lowest().div_ceil(IN_A_ROW);
    let mut table = Table {
        title: match arguments.arch.is_host() {
            true => "The data path of mlx5".into(),
            false => format!("The data path of mlx5 on {}", arguments.arch.label()),
        },
        unit: "instructions per request or completion".into(),
        kernel: String::new(),
        accelerator: session.accelerator().label().to_owned(),
        runs: rounds * IN_A_ROW,
        rows: Vec::new(),
        notes: Vec::new(),
    };
    for ringing in [Ringing::Doorbell, Ringing::BlueFlame] {
        let mut vm = session.boot(&Machine {
            programs: &programs,
            peers: true,
            emulation: Emulation { no_wc: ringing == Ringing::Doorbell, ..Emulation::default() },
            ..Machine::new(arguments.kernel, DeviceName::Mlx5)
        })?;
        table.kernel.clone_from(&vm.greeting.release);
        let device = vm.greeting.devices.first().cloned().unwrap_or_default();
        for (word, sharing) in [("shared", ""), ("alone", ", thread domain")] {
            let setting = match ringing {
                Ringing::Doorbell => format!("doorbell{sharing}"),
                Ringing::BlueFlame => format!("BlueFlame{sharing}"),
            };
            let spinner = progress::spinner(setting.clone());
            let runs = IN_A_ROW.to_string();
            let mut words = ["path", &device, word, &runs, "counting"].map(str::to_owned).to_vec();
            words.extend(arguments.only.clone());
            let found = rounds::play(&mut vm, &words, rounds)?;
            spinner.finish_and_clear();
            let failures = rounds::failures(&found);
            table.notes.extend(failures.iter().map(|failure| format!("{setting}, {failure}")));
            for (name, operation) in &operations {
                table.rows.extend(row(name, *operation, ringing, &setting, sharing, &found));
            }
        }
        vm.power_off()?;
    }
    let ratios: Vec<f64> = table.rows.iter().filter_map(|row| row.ratio).collect();
    if !ratios.is_empty() {
        let mean = ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64;
        table.notes.push(format!("The geometric mean of the ratios is {:.3}.", mean.exp()));
    }
    Ok(table)
}

fn row(
    name: &str,
    operation: Operation,
    ringing: Ringing,
    setting: &str,
    sharing: &str,
    [ours, theirs]: &[Found; 2],
) -> Option<TableRow> {
    // Only operations that write to the register differ.
    let rings = matches!(operation, Operation::Post(..));
    if !rings && ringing == Ringing::BlueFlame {
        return None;
    }
    let best = |found: &Found| {
        found
            .of(name)
            .filter_map(|sample| Some((Value::lowest(&sample.runs)?, sample.way.clone())))
            .min_by(|(one, _), (other, _)| one.value.total_cmp(&other.value))
    };
    let ours = best(ours).map(|(value, _)| value);
    let setting = match rings {
        true => setting.to_owned(),
        false => format!("doorbell or BlueFlame{sharing}"),
    };
    Some(TableRow::new(name, &setting, ours, best(theirs), TableTarget::default()))
}
