//! Suite `sim`: time and allocations of the device in the process, in each mode, on this machine and without a VM. A
//! pipe and a word between two threads and a copy of memory tell how busy the machine is.

use super::BenchArguments;
use super::table::{Table, TableRow, TableTarget, Value};
use crate::run::progress;
use crate::workspace::Workspace;
use anyhow::{Context, Result, anyhow, bail};
use lab_bench::sample::{Sample, samples};
use lab_bench::sim::{ALL, Measure};
use std::process::{Command, Stdio};

/// Measures the device in the process.
pub(super) fn run(arguments: &BenchArguments) -> Result<Table> {
    let text = arguments.only.as_deref().unwrap_or_default();
    if !ALL.iter().any(|measure| arguments.wants(&measure.name())) {
        bail!("nothing to measure has {text:?} in its name");
    }
    let program = Workspace::find()?.program_here("lab-bench", "bench-sim", "sim")?;
    let spinner = progress::spinner("bench-sim");
    let runs = arguments.runs_to_the_lowest();
    let output = Command::new(&program)
        .args([&runs.to_string(), text])
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("run {}", program.display()))?;
    spinner.finish_and_clear();
    if !output.status.success() {
        bail!("bench-sim: {}", output.status);
    }
    let output = String::from_utf8(output.stdout).context("read the output of bench-sim")?;
    let found = samples(&output).map_err(|failure| anyhow!("bench-sim: {failure}"))?;
    Ok(Table {
        title: "The device in the process, on this machine".into(),
        unit: "the unit that each row names, best of its runs".into(),
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        accelerator: String::new(),
        runs,
        rows: ALL.iter().filter_map(|measure| row(measure, &found)).collect(),
        notes: Vec::new(),
    })
}

/// The row of a measure; `None` if it was not measured.
fn row(measure: &Measure, found: &[Sample]) -> Option<TableRow> {
    let (name, unit) = (measure.name(), measure.unit);
    let of_measure = |sample: &&Sample| sample.operation == name && sample.way == unit.name();
    let runs = &found.iter().find(of_measure)?.runs;
    // Other work of the machine only makes it slower.
    let (best, target) = match unit.is_rate() {
        true => {
            (Value::highest(runs), TableTarget { least: measure.aim, ..TableTarget::default() })
        }
        false => (Value::lowest(runs), TableTarget { ours: measure.aim, ..TableTarget::default() }),
    };
    Some(TableRow::new(&name, unit.name(), Some(best?), None, target))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lab_bench::sim::{COPY, MEMCPY, ROUND_TRIP, STEPPED, Unit, WRITE};

    fn sample(operation: &str, unit: Unit, runs: &[f64]) -> Sample {
        Sample { operation: operation.into(), way: unit.name().into(), runs: runs.to_vec() }
    }

    #[test]
    fn times_and_counts_are_the_lowest_and_rates_the_highest() {
        let trip = format!("{ROUND_TRIP}: {STEPPED}");
        let found = [
            sample(&trip, Unit::Microseconds, &[9.0, 4.0, 5.0]),
            sample(&trip, Unit::Allocations, &[1.0, 2.0]),
            sample(&format!("{WRITE}: {STEPPED}"), Unit::Gigabytes, &[0.5, 2.3, 1.0]),
            sample(&format!("{COPY}: {MEMCPY}"), Unit::Gigabytes, &[10.0]),
        ];
        let rows: Vec<_> = ALL.iter().filter_map(|measure| row(measure, &found)).collect();
        let values: Vec<_> = rows
            .iter()
            .map(|row| (row.setting.as_str(), row.ours.map(|ours| ours.value), row.met))
            .collect();
        assert_eq!(
            values,
            [
                ("µs", Some(4.0), Some(true)),
                ("allocations", Some(1.0), Some(false)),
                ("GB/s", Some(2.3), Some(true)),
                ("GB/s", Some(10.0), None),
            ]
        );
    }
}
