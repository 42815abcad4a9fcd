//! Suite `rxe-futures`: what waiting by futures in tokio's event loop costs beside rdma-core's
//! blocking wait for the same events.

use super::BenchArguments;
use super::pingpong::{Operation, Program};
use super::rxe::measure;
use super::score::Score;
use crate::device::DeviceName;
use crate::session::{Machine, Session};
use crate::workspace::Profile;
use anyhow::{Result, bail};

/// Measures the operations that futures do: reliable connections with events.
pub(super) fn run(arguments: &BenchArguments) -> Result<Score> {
    let operations: Vec<Operation> = Operation::all()
        .into_iter()
        .filter(|operation| operation.kind == "rc" && operation.events)
        .filter(|operation| arguments.wants(&operation.name()))
        .collect();
    if operations.is_empty() {
        let text = arguments.only.as_deref().unwrap_or_default();
        bail!("no operation to measure has {text:?} in its name");
    }
    let mut session = Session::open(&arguments.needs(), arguments.console)?;
    if arguments.count_instructions {
        session.count_instructions();
    }
    let workspace = &session.workspace;
    let program = workspace.static_example("uverbs", "pingpong", "tokio", Profile::Release)?;
    let mut vm = session.boot(&Machine {
        programs: &[("futures-pingpong".to_owned(), program)],
        peers: true,
        ..Machine::new(arguments.kernel, DeviceName::Rxe)
    })?;
    let mut rows = Vec::new();
    for operation in &operations {
        rows.push(measure(&mut vm, operation, Program::Futures, arguments.runs)?);
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
