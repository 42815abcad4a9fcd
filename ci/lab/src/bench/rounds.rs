//! Both programs in one machine, in turns, and what they found.

use crate::vm::{Event, Vm};
use crate::workspace::{Profile, Workspace};
use anyhow::{Result, anyhow};
use lab_bench::sample::{Sample, samples};
use lab_guest::order::Order;
use std::path::PathBuf;
use std::time::Duration;

/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(1200);

/// Whose program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// The one that uses this workspace's library.
    Ours,
    /// The one that loads rdma-core's.
    Theirs,
}

impl Side {
    pub(super) const BOTH: [Side; 2] = [Side::Ours, Side::Theirs];

    pub(super) fn program(self) -> &'static str {
        match self {
            Side::Ours => "bench-ours",
            Side::Theirs => "bench-theirs",
        }
    }
}

/// Builds both programs, for the guest's `/usr/local/bin`.
pub(super) fn programs(workspace: &Workspace) -> Result<Vec<(String, PathBuf)>> {
    const PACKAGE: &str = "lab-bench";
    let [ours, theirs] = Side::BOTH.map(Side::program);
    Ok(vec![
        (ours.to_owned(), workspace.static_program(PACKAGE, ours, Profile::Release)?),
        (theirs.to_owned(), workspace.dynamic_program(PACKAGE, theirs)?),
    ])
}

/// What one program found in all of its rounds, or why it could not go on.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) samples: Vec<Sample>,
    pub(super) failure: Option<String>,
}

impl Found {
    fn add(&mut self, sample: Sample) {
        let known = self
            .samples
            .iter_mut()
            .find(|known| known.operation == sample.operation && known.way == sample.way);
        match known {
            Some(known) => known.runs.extend(sample.runs),
            None => self.samples.push(sample),
        }
    }

    /// The samples of an operation, one for each way.
    pub(super) fn of(&self, operation: &str) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(move |sample| sample.operation == operation)
    }
}

/// Runs both programs with the same arguments, in turns, and as root: what a user may pin is not
/// what is measured.
pub(super) fn play(vm: &mut Vm, arguments: &[String], rounds: u32) -> Result<[Found; 2]> {
    let mut found = Side::BOTH.map(|_| Found::default());
    for _ in 0..rounds {
        for (side, found) in Side::BOTH.into_iter().zip(&mut found) {
            if found.failure.is_some() {
                continue;
            }
            let mut command = vec![side.program().to_owned()];
            command.extend_from_slice(arguments);
            let (mut output, mut errors) = (Vec::new(), Vec::new());
            let order = Order { command, root: true, ..Order::default() };
            let ending = vm.run(&order, PATIENCE, |event| match event {
                Event::Stdout(_, bytes) => output.extend_from_slice(bytes),
                Event::Stderr(_, bytes) => errors.extend_from_slice(bytes),
                Event::Exit(..) => {}
            })?;
            for sample in samples(&String::from_utf8_lossy(&output))
                .map_err(|failure| anyhow!("{}: {failure}", side.program()))?
            {
                found.add(sample);
            }
            if ending.status() != 0 {
                let text = String::from_utf8_lossy(&errors).trim().to_owned();
                found.failure = Some(format!("status {}: {text}", ending.status()));
            }
        }
    }
    Ok(found)
}
