//! Suite `mlx5-owned`: instructions of requests that take their memory beside those that name it by
//! number, on an emulated ConnectX. Both are this workspace's: `theirs` is the library without that
//! layer.

use super::BenchArguments;
use super::rounds;
use super::table::{Table, TableRow, TableTarget, Value};
use crate::machine::device::DeviceName;
use crate::machine::session::{Machine, Session};
use crate::run::progress;
use crate::workspace::Profile;
use anyhow::{Result, anyhow};
use lab_bench::sample::{Sample, samples};

/// Measures requests that take their memory.
pub(super) fn run(arguments: &BenchArguments) -> Result<Table> {
    let title = "Requests that take their memory, beside requests that name it";
    measure(arguments, "bench-owned", title)
}

/// Suite `mlx5-futures`: instructions of a request as a future, beside the same request of an owned queue.
pub(super) fn run_futures(arguments: &BenchArguments) -> Result<Table> {
    measure(arguments, "bench-futures", "Requests as futures, beside those of an owned queue")
}

fn measure(arguments: &BenchArguments, program_name: &'static str, title: &str) -> Result<Table> {
    let mut session = Session::open(&arguments.needs(), arguments.console)?;
    session.count_instructions();
    let program = session.workspace.static_program("lab-bench", program_name, Profile::Release)?;
    let mut vm = session.boot(&Machine {
        programs: &[(program_name.to_owned(), program)],
        ..Machine::new(arguments.kernel, DeviceName::Mlx5)
    })?;
    let device = vm.greeting.devices.first().cloned().unwrap_or_default();
    let spinner = progress::spinner(program_name);
    let runs = arguments.runs_to_the_lowest();
    let output = rounds::output(&mut vm, &[program_name, &device, &runs.to_string()])?;
    spinner.finish_and_clear();
    let found = samples(&output).map_err(|failure| anyhow!("{program_name}: {failure}"))?;
    let table = Table {
        title: title.into(),
        unit: "instructions per request or completion".into(),
        kernel: vm.greeting.release.clone(),
        accelerator: session.accelerator().label().to_owned(),
        runs,
        rows: rows(&found),
        notes: Vec::new(),
    };
    vm.power_off()?;
    Ok(table)
}

/// A row for each operation that was measured.
fn rows(found: &[Sample]) -> Vec<TableRow> {
    found.chunk_by(|one, other| one.operation == other.operation).filter_map(row).collect()
}

/// One operation by number and owned, the second beside the first; or only owned.
fn row(samples: &[Sample]) -> Option<TableRow> {
    let (by_number, owned) = match samples {
        [by_number, owned] => (Some(by_number), owned),
        [owned] => (None, owned),
        _ => return None,
    };
    let ours = Value::lowest(&owned.runs)?;
    let theirs =
        by_number.and_then(|sample| Some((Value::lowest(&sample.runs)?, sample.way.clone())));
    Some(TableRow::new(&owned.operation, "BlueFlame", Some(ours), theirs, TableTarget::default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_both_ways_of_an_operation() {
        let sample = |operation: &str, way: &str, runs: &[f64]| Sample {
            operation: operation.into(),
            way: way.into(),
            runs: runs.to_vec(),
        };
        let found = [
            sample("write", "by number", &[101.0, 100.0]),
            sample("write", "owned", &[130.0]),
            sample("poll", "by number", &[70.0]),
            sample("poll", "owned", &[105.0]),
            sample("pool", "owned", &[50.0]),
        ];
        let rows = rows(&found);
        let ratios: Vec<_> = rows.iter().map(|row| (row.operation.as_str(), row.ratio)).collect();
        assert_eq!(ratios, [("write", Some(1.3)), ("poll", Some(1.5)), ("pool", None)]);
    }
}
