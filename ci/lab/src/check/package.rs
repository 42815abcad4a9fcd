//! Packaging of the published packages: as `cargo publish` would make the packages, without the registry.

use super::row::{self, CheckRow};
use crate::run::outcome::TestOutcome;
use crate::run::subprocess;
use crate::workspace::{self, Workspace};
use anyhow::Result;
use std::process::Command;
use std::time::Duration;

/// How long the packaging may take, which compiles nothing.
const PATIENCE: Duration = Duration::from_secs(10 * 60);

/// From this release of 1 on, Cargo packages members that depend on each other together.
const TOGETHER: u32 = 90;

/// The one warning that is left: the address of the repository is the owner's to fill in.
const NO_REPOSITORY: &str = "warning: manifest has no documentation, homepage or repository";

/// Whether the published packages are packaged together without a warning but [`NO_REPOSITORY`].
pub(super) fn packaging(workspace: &Workspace) -> CheckRow {
    row::timed("packaging", || {
        let version = Command::new(workspace::cargo()).arg("--version").output()?.stdout;
        let version = String::from_utf8_lossy(&version).trim().to_owned();
        if minor(&version).is_some_and(|minor| minor < TOGETHER) {
            let reason = format!("[cargo-1.{TOGETHER}] {version} packages them one by one only");
            return Ok(TestOutcome::Skipped(reason));
        }
        let mut command = Command::new(workspace::cargo());
        command.args(["package", "--no-verify", "--allow-dirty", "--offline", "--color", "never"]);
        for package in workspace.published() {
            command.args(["--package", &package.name]);
        }
        command.current_dir(workspace.root());
        judge(command)
    })
}

fn judge(command: Command) -> Result<TestOutcome> {
    let run = subprocess::run(command, PATIENCE)?;
    let warnings = warnings(&run.stderr);
    Ok(match run.status {
        Some(status) if status.success() && warnings.is_empty() => TestOutcome::Passed,
        Some(status) if status.success() => TestOutcome::Failed(warnings.join("\n")),
        _ => TestOutcome::Failed(run.stderr),
    })
}

/// The number in the middle of `cargo 1.90.0 (…)`.
fn minor(version: &str) -> Option<u32> {
    version.strip_prefix("cargo 1.")?.split('.').next()?.parse().ok()
}

/// The warnings but [`NO_REPOSITORY`].
fn warnings(output: &str) -> Vec<&str> {
    let all = output.lines().filter(|line| line.starts_with("warning: "));
    all.filter(|line| !line.starts_with(NO_REPOSITORY)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_warning_counts_but_that_of_the_repository() {
        let none = "warning: manifest has no documentation, homepage or repository\n  |\n  = note: see\n   \
                    Packaging uverbs v0.1.0\n";
        assert_eq!(warnings(none), [""; 0]);
        let ignored = "warning: ignoring test `device` as `tests/device/main.rs` is not included\n";
        assert_eq!(warnings(&(none.to_owned() + ignored)), [ignored.trim_end()]);
        assert_eq!(minor("cargo 1.90.0 (840b83a10 2025-07-30)"), Some(90));
        assert_eq!(minor("cargo 1.88.0-nightly (…)"), Some(88));
        assert_eq!(minor("none"), None);
    }
}
