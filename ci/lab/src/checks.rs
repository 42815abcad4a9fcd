//! Checks that need no machine: formatting, lints, documentation and the host's tests.

use crate::outcome::{self, Outcome, Report};
use crate::progress;
use crate::summary::Place;
use crate::watch::{self, Watched};
use crate::workspace::Workspace;
use anyhow::Result;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long one check may take.
const PATIENCE: Duration = Duration::from_secs(20 * 60);
/// Lines of output that a failed check shows.
const TAIL: usize = 60;

fn cargo(workspace: &Workspace, arguments: &[&str]) -> Command {
    let mut command = Command::new(crate::workspace::cargo());
    command.args(arguments).current_dir(workspace.root());
    command
}

/// Runs all checks; with a filter only the tests whose names fit.
pub(crate) fn run(workspace: &Workspace, filter: Option<&str>) -> Result<Place> {
    let start = Instant::now();
    let mut reports = Vec::new();
    if filter.is_none() {
        reports.push(check(
            "formatting",
            "rustfmt",
            cargo(workspace, &["fmt", "--version"]),
            cargo(workspace, &["fmt", "--all", "--check"]),
        )?);
        reports.push(lint(workspace, "clippy", &["--workspace", "--all-features"])?);
        // All features together hide what one of them needs and does not name.
        let mut alone: Vec<_> = workspace.features("uverbs").collect();
        alone.push("");
        for feature in alone {
            let name = match feature {
                "" => "clippy without features".to_owned(),
                _ => format!("clippy with {feature} alone"),
            };
            let arguments = ["--package", "uverbs", "--no-default-features", "--features", feature];
            reports.push(lint(workspace, &name, &arguments)?);
        }
        let mut docs =
            cargo(workspace, &["doc", "--quiet", "--workspace", "--no-deps", "--all-features"]);
        docs.env("RUSTDOCFLAGS", "-D warnings");
        let version = cargo(workspace, &["--version"]);
        reports.push(check("documentation", "rustdoc", version, docs)?);
    }
    reports.extend(tests(workspace, filter)?);
    let note = format!("{} s", start.elapsed().as_secs());
    Ok(Place { name: "host".into(), reports, note })
}

/// Clippy on what the arguments choose, where a warning is an error.
fn lint(workspace: &Workspace, name: &str, arguments: &[&str]) -> Result<Report> {
    let mut command = cargo(workspace, &["clippy", "--quiet", "--all-targets"]);
    command.args(arguments).args(["--", "-D", "warnings"]);
    check(name, "clippy", cargo(workspace, &["clippy", "--version"]), command)
}

/// One check that passes or fails as a whole; skipped where its tool is not installed.
fn check(name: &str, component: &str, mut version: Command, command: Command) -> Result<Report> {
    let installed = version
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    let outcome = if installed {
        let spinner = progress::spinner(name);
        let run = watch::run(command, PATIENCE)?;
        spinner.finish_and_clear();
        match run.status {
            Some(status) if status.success() => Outcome::Passed,
            Some(status) => Outcome::Failed(format!("{status}\n{}", tail(&run))),
            None => Outcome::Failed(gave_up(&run)),
        }
    } else {
        Outcome::Skipped(format!("[{component}] not installed: rustup component add {component}"))
    };
    Ok(Report { name: name.into(), outcome })
}

fn tests(workspace: &Workspace, filter: Option<&str>) -> Result<Vec<Report>> {
    let command =
        cargo(workspace, &["test", "--quiet", "--workspace", "--all-features", "--no-fail-fast"]);
    let mut reports = test("host tests", command, filter, filter.is_none())?;
    if filter.is_none() {
        let mut command = cargo(workspace, &["test", "--quiet", "--package", "uverbs", "--lib"]);
        // Other flags build everything anew, so these builds have a place of their own.
        command.arg("--target-dir").arg(workspace.lab_directory()?.join("loom"));
        command.env("RUSTFLAGS", "--cfg loom -D warnings");
        reports.extend(test("loom models", command, Some("model"), true)?);
    }
    Ok(reports)
}

/// Runs tests; with a filter, those whose names contain it. None at all is a failure where there
/// must be some.
fn test(name: &str, mut command: Command, filter: Option<&str>, some: bool) -> Result<Vec<Report>> {
    command.arg("--");
    // One line per test: `--quiet` keeps cargo quiet and would make the tests print dots.
    command.args(["--format", "pretty", "--color", "never"]).args(filter);
    let spinner = progress::spinner(name);
    let run = watch::run(command, PATIENCE)?;
    spinner.finish_and_clear();
    let mut reports = outcome::parse(&run.stdout);
    let failed = reports.iter().any(|report| matches!(report.outcome, Outcome::Failed(_)));
    let problem = match run.status {
        None => Some(gave_up(&run)),
        Some(status) if !status.success() && !failed => {
            Some(format!("{status} without a failed test\n{}", tail(&run)))
        }
        Some(_) if reports.is_empty() && some => Some("no test ran".into()),
        Some(_) => None,
    };
    if let Some(problem) = problem {
        reports.push(Report { name: name.into(), outcome: Outcome::Failed(problem) });
    }
    Ok(reports)
}

fn gave_up(run: &Watched) -> String {
    format!("given up after {} s\n{}", PATIENCE.as_secs(), tail(run))
}

fn tail(run: &Watched) -> String {
    let lines: Vec<&str> = run.stdout.lines().chain(run.stderr.lines()).collect();
    lines[lines.len().saturating_sub(TAIL)..].join("\n")
}

#[cfg(test)]
mod tests {
    /// In any build or test of the workspace: all of them are in the one lock file.
    #[test]
    fn no_crate_compiles_or_binds_c() {
        let lock = include_str!("../../../Cargo.lock");
        assert!(lock.contains("name = \"uverbs\""));
        for name in ["cc", "cmake", "bindgen", "pkg-config", "ibverbs-sys", "rdma-sys"] {
            assert!(!lock.contains(&format!("name = \"{name}\"\n")), "{name} is in Cargo.lock");
        }
    }
}
