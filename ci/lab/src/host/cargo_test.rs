//! The tests that need no guest: those that `cargo test` runs, and loom's models.

use crate::run::jobs;
use crate::run::outcome::{self, Report, TestOutcome};
use crate::run::progress;
use crate::run::stages;
use crate::run::subprocess::{self, CommandOutput};
use crate::run::summary::Section;
use crate::workspace::{RUNNER, Workspace};
use anyhow::Result;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long one run may take.
const PATIENCE: Duration = Duration::from_secs(20 * 60);
/// The same for models with the bounds of the soak.
const SOAK: Duration = Duration::from_secs(2 * 60 * 60);
/// Hostile inputs of a cheap decoder (`src/tests/hostile.rs`) in a full run.
const HOSTILE_INPUTS: &str = "200000";
/// Lines of output that a failed run shows.
const TAIL: usize = 60;

/// Runs the host's tests; with a filter, those whose names contain it. A full run gives decoders more hostile inputs.
pub(crate) fn tests(workspace: &Workspace, filter: Option<&str>, full: bool) -> Result<Section> {
    let start = Instant::now();
    let mut command = cargo(workspace);
    command.args(["test", "--quiet", "--workspace", "--all-features", "--no-fail-fast"]);
    if full {
        command.env("UVERBS_HOSTILE_INPUTS", HOSTILE_INPUTS);
    }
    let reports = run("host tests", command, filter, filter.is_none(), PATIENCE)?;
    Ok(section(reports, start))
}

/// How far the models go that have more interleavings than can be explored (`bounded_model`). All others are
/// explored whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bounds {
    /// As far as is worth it in every full run.
    Usual,
    /// As far as they end.
    Soak,
}

/// Runs loom's models.
pub(crate) fn loom(workspace: &Workspace, bounds: Bounds) -> Result<Section> {
    let start = Instant::now();
    let mut command = cargo(workspace);
    command.args(["test", "--quiet", "--package", "uverbs", "--lib"]);
    // Other flags rebuild everything, so these builds have a target directory of their own.
    command.arg("--target-dir").arg(workspace.lab_directory()?.join("loom"));
    command.env("RUSTFLAGS", "--cfg loom -D warnings").env("CARGO_PROFILE_DEV_OPT_LEVEL", "2");
    command.env_remove("LOOM_MAX_PREEMPTIONS").env_remove("UVERBS_LOOM_SOAK");
    let patience = match bounds {
        Bounds::Usual => PATIENCE,
        Bounds::Soak => {
            command.env("UVERBS_LOOM_SOAK", "1");
            SOAK
        }
    };
    let reports = run("loom models", command, Some("model"), true, patience)?;
    Ok(section(reports, start))
}

/// Runs the tests of the device suite whose names end in `_nothing` on the fabric, with the rounds of a soak.
pub(crate) fn leaks(workspace: &Workspace) -> Result<Section> {
    const PATIENCE: Duration = Duration::from_secs(90 * 60);
    let start = Instant::now();
    let mut command = cargo(workspace);
    command.args(["test", "--quiet", "--release", "--package", "uverbs", "--all-features"]);
    command.args(["--test", "device"]).env("UVERBS_SOAK", "1");
    command.arg("--target-dir").arg(workspace.target_directory());
    let reports = run("leaks", command, Some("_nothing"), true, PATIENCE)?;
    Ok(Section { name: "leaks".into(), ..section(reports, start) })
}

fn cargo(workspace: &Workspace) -> Command {
    let mut command = Command::new(crate::workspace::cargo());
    command.current_dir(workspace.root()).env_remove(RUNNER);
    command
}

fn section(reports: Vec<Report>, start: Instant) -> Section {
    let note = format!("{} s", start.elapsed().as_secs());
    Section { name: "host".into(), reports, note }
}

/// How many tests a test binary runs at once.
fn threads() -> usize {
    let asked = std::env::var("RUST_TEST_THREADS").ok().and_then(|text| text.parse().ok());
    asked.filter(|threads| *threads > 0).unwrap_or_else(jobs::processors)
}

/// The arguments of a test binary. It prints a line for each test, although cargo itself gets
/// `--quiet`, and runs as many tests at once as [`outcome::times`] assumes.
pub(crate) fn libtest_arguments() -> [String; 6] {
    let threads = threads().to_string();
    ["--format", "pretty", "--color", "never", "--test-threads", &threads].map(str::to_owned)
}

/// Runs tests; with a filter, those whose names contain it. With `some`, a run without any test is
/// a failure.
fn run(
    name: &str,
    mut command: Command,
    filter: Option<&str>,
    some: bool,
    patience: Duration,
) -> Result<Vec<Report>> {
    command.arg("--");
    command.args(libtest_arguments()).args(filter);
    let _stage = stages::stage(name);
    let spinner = progress::spinner(name);
    let run = subprocess::run(command, patience)?;
    spinner.finish_and_clear();
    Ok(judge(name, &run, some))
}

/// The reports of a run, with a failure if it ended badly. The stage clock gets the time of each
/// test.
pub(crate) fn judge(name: &str, run: &CommandOutput, some: bool) -> Vec<Report> {
    for (test, time) in outcome::times(&run.stdout, &run.arrivals, threads()) {
        stages::case(&test, time);
    }
    let mut reports = outcome::parse(&run.stdout);
    let failed = reports.iter().any(|report| matches!(report.outcome, TestOutcome::Failed(_)));
    let problem = match run.status {
        None => Some(format!("given up, because it took too long\n{}", tail(run))),
        Some(status) if !status.success() && !failed => {
            Some(format!("{status} without a failed test\n{}", tail(run)))
        }
        Some(_) if reports.is_empty() && some => Some("no test ran".into()),
        Some(_) => None,
    };
    if let Some(problem) = problem {
        reports.push(Report { name: name.into(), outcome: TestOutcome::Failed(problem) });
    }
    reports
}

fn tail(run: &CommandOutput) -> String {
    let lines: Vec<&str> = run.stdout.lines().chain(run.stderr.lines()).collect();
    lines[lines.len().saturating_sub(TAIL)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    fn judged(status: Option<i32>, stdout: &str) -> Vec<Report> {
        let status = status.map(|code| ExitStatus::from_raw(code << 8));
        let stderr = "a linker said no".into();
        let run = CommandOutput { status, stdout: stdout.into(), stderr, arrivals: Vec::new() };
        judge("host tests", &run, true)
    }

    #[test]
    fn a_run_without_tests_or_with_a_bad_status_fails() {
        assert!(
            matches!(&judged(Some(0), "")[0].outcome, TestOutcome::Failed(text) if text == "no test ran")
        );
        let built = judged(Some(101), "");
        assert!(
            matches!(&built[0].outcome, TestOutcome::Failed(text) if text.contains("a linker said no"))
        );
        assert!(matches!(judged(None, "test a ... ok\n")[1].outcome, TestOutcome::Failed(_)));
        assert_eq!(judged(Some(0), "test a ... ok\n").len(), 1);
        assert_eq!(judged(Some(101), "test a ... FAILED\n").len(), 1, "the test says it all");
    }
}
