//! One check: its commands, its outcome, its time.

use crate::run::outcome::{Report, TestOutcome};
use crate::run::progress;
use crate::run::subprocess::{self, CommandOutput};
use anyhow::Result;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long one check may take.
const PATIENCE: Duration = Duration::from_secs(20 * 60);
/// Lines of output that a failed check shows.
const TAIL: usize = 60;

/// A check that is over.
#[derive(Clone, Debug)]
pub(super) struct CheckRow {
    pub(super) report: Report,
    pub(super) time: Duration,
}

/// Runs a check; one that cannot be made has failed.
pub(super) fn timed(name: &str, check: impl FnOnce() -> Result<TestOutcome>) -> CheckRow {
    let start = Instant::now();
    let spinner = progress::spinner(name);
    let outcome = check().unwrap_or_else(|error| TestOutcome::Failed(format!("{error:#}")));
    spinner.finish_and_clear();
    CheckRow { report: Report { name: name.to_owned(), outcome }, time: start.elapsed() }
}

/// Passed if a command ends with success, else failed with the last lines that it printed.
pub(super) fn succeeds(command: Command) -> Result<TestOutcome> {
    let run = subprocess::run(command, PATIENCE)?;
    Ok(match run.status {
        Some(status) if status.success() => TestOutcome::Passed,
        Some(status) => TestOutcome::Failed(format!("{status}\n{}", tail(&run))),
        None => {
            TestOutcome::Failed(format!("given up after {} s\n{}", PATIENCE.as_secs(), tail(&run)))
        }
    })
}

/// Passed if all commands end with success. The first that fails is the last that runs.
pub(super) fn all(commands: impl Iterator<Item = Command>) -> Result<TestOutcome> {
    for command in commands {
        let outcome = succeeds(command)?;
        if outcome != TestOutcome::Passed {
            return Ok(outcome);
        }
    }
    Ok(TestOutcome::Passed)
}

/// `None` if a component of the toolchain answers, else a skip that says how to install it.
pub(super) fn missing(component: &str, mut version: Command) -> Option<TestOutcome> {
    let installed = version
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    let reason = || format!("[{component}] not installed: rustup component add {component}");
    (!installed).then(|| TestOutcome::Skipped(reason()))
}

fn tail(run: &CommandOutput) -> String {
    let lines: Vec<&str> = run.stdout.lines().chain(run.stderr.lines()).collect();
    lines[lines.len().saturating_sub(TAIL)..].join("\n")
}
