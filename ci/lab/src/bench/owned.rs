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

/// Instructions that the layer may add to a request.
const ADDED: f64 = 30.0;

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
    let output = rounds::output(&mut vm, &[PROGRAM, &device, &arguments.runs.to_string()])?;
    spinner.finish_and_clear();
    let found = samples(&output).map_err(|failure| anyhow!("{PROGRAM}: {failure}"))?;
    let table = Table {
        title: "Requests that take their memory, beside requests that name it".into(),
        unit: "instructions per request or completion".into(),
        kernel: vm.greeting.release.clone(),
        accelerator: session.accelerator().label().to_owned(),
        runs: arguments.runs,
        rows: found.chunks_exact(2).filter_map(row).collect(),
        notes: Vec::new(),
    };
    vm.power_off()?;
    Ok(table)
}

/// One operation, by number and owned.
fn row(pair: &[Sample]) -> Option<Row> {
    let [by_number, owned] = pair else { return None };
    let (theirs, ours) = (Value::lowest(&by_number.runs)?, Value::lowest(&owned.runs)?);
    // A completion gives something back, which is work that the other does not do at all.
    let posting = owned.operation != "poll";
    let target = Target { ours: posting.then_some(theirs.value + ADDED), ratio: None };
    let way = by_number.way.clone();
    Some(Row::new(&owned.operation, "BlueFlame", Some(ours), Some((theirs, way)), target))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layer_may_add_a_little() {
        let sample = |operation: &str, way: &str, runs: &[f64]| Sample {
            operation: operation.into(),
            way: way.into(),
            runs: runs.to_vec(),
        };
        let met = |operation: &str, owned: f64| {
            let pair = [
                sample(operation, "by number", &[101.0, 100.0]),
                sample(operation, "owned", &[owned]),
            ];
            row(&pair).unwrap().met
        };
        assert_eq!((met("write", 130.0), met("write", 131.0)), (Some(true), Some(false)));
        assert_eq!(met("poll", 500.0), None);
    }
}
