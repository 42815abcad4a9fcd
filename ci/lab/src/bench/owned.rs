//! Suite `mlx5-owned`: what requests that take their memory cost beside those that name it by
//! number, in instructions, on an emulated ConnectX. Both are this workspace's: `theirs` is what the
//! library does without that layer.

use super::BenchArguments;
use super::rounds;
use super::table::{Row, Table, Target, Value};
use crate::device::DeviceName;
use crate::progress;
use crate::session::{Machine, Session};
use crate::workspace::Profile;
use anyhow::{Result, anyhow};
use lab_bench::sample::{Sample, samples};

/// Measures everything.
pub(super) fn run(arguments: &BenchArguments) -> Result<Table> {
    const PROGRAM: &str = "bench-owned";
    let mut session = Session::open(&arguments.needs(), arguments.console)?;
    session.count_instructions();
    let program = session.workspace.static_program("lab-bench", PROGRAM, Profile::Release)?;
    let mut vm = session.boot(&Machine {
        programs: &[(PROGRAM.to_owned(), program)],
        ..Machine::new(arguments.kernel, DeviceName::Mlx5)
    })?;
    let device = vm.greeting.devices.first().cloned().unwrap_or_default();
    let spinner = progress::spinner("owned buffers");
    let runs = arguments.runs_to_the_lowest();
    let output = rounds::output(&mut vm, &[PROGRAM, &device, &runs.to_string()])?;
    spinner.finish_and_clear();
    let found = samples(&output).map_err(|failure| anyhow!("{PROGRAM}: {failure}"))?;
    let table = Table {
        title: "Requests that take their memory, beside requests that name it".into(),
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

/// What was found, an operation to a row.
fn rows(found: &[Sample]) -> Vec<Row> {
    found.chunk_by(|one, other| one.operation == other.operation).filter_map(row).collect()
}

/// One operation, by number and owned, or only that.
fn row(samples: &[Sample]) -> Option<Row> {
    let (by_number, owned) = match samples {
        [by_number, owned] => (Some(by_number), owned),
        [owned] => (None, owned),
        _ => return None,
    };
    let ours = Value::lowest(&owned.runs)?;
    let theirs =
        by_number.and_then(|sample| Some((Value::lowest(&sample.runs)?, sample.way.clone())));
    Some(Row::new(&owned.operation, "BlueFlame", Some(ours), theirs, Target::default()))
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
