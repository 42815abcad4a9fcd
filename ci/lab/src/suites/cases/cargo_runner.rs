//! `cargo ci runner` as Cargo starts it: `cargo test` in a package that is no part of this workspace.
//!
//! The package has two programs, so two guests boot. The first has a test that passes and one that fails, the second is
//! killed by a signal; the tests themselves look for the devices, the files and the environment.

use super::{CaseContext, failed};
use crate::run::jobs::say;
use crate::run::outcome::{Report, TestOutcome};
use crate::run::subprocess;
use crate::workspace::RUNNER;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// How long the two guests may take, and the compiler.
const PATIENCE: Duration = Duration::from_secs(5 * 60);

/// The files of the package.
const PACKAGE: [(&str, &str); 4] = [
    (
        "Cargo.toml",
        "[package]\nname = \"elsewhere\"\nversion = \"1.2.3\"\nedition = \"2021\"\n\n[workspace]\n",
    ),
    ("fixture.txt", "of the package"),
    ("tests/devices.rs", include_str!("cargo_runner/devices.rs")),
    ("tests/killed.rs", include_str!("cargo_runner/killed.rs")),
];

pub(super) fn run(context: &CaseContext<'_>) -> Vec<Report> {
    let name = "cargo_runner::tests_of_a_package_elsewhere";
    if !context.wanted(name) {
        return Vec::new();
    }
    let directory = std::env::temp_dir().join(format!("lab-elsewhere-{}", std::process::id()));
    let ran = tests_elsewhere(context, &directory);
    // The system removes a temporary directory that is left.
    let _left = fs::remove_dir_all(&directory);
    say!("test {name} ... {}", if ran.is_ok() { "ok" } else { "not passed" });
    vec![match ran {
        Ok(()) => Report { name: name.to_owned(), outcome: TestOutcome::Passed },
        Err(error) => failed(name, &error),
    }]
}

fn tests_elsewhere(context: &CaseContext<'_>, directory: &Path) -> Result<()> {
    fs::create_dir_all(directory.join("tests"))?;
    for (path, text) in PACKAGE {
        fs::write(directory.join(path), text).with_context(|| format!("write {path}"))?;
    }
    let target = directory.join("target");
    // Not the lab's path: the host's tests run cargo, which may replace the file there.
    let lab = PathBuf::from(format!("/proc/{}/exe", std::process::id()));
    let kernel = context.kernel.label();
    let mut command = Command::new(crate::workspace::cargo());
    command
        .args(["test", "--offline", "--no-fail-fast", "--target-dir"])
        .arg(&target)
        .current_dir(directory)
        .env(RUNNER, format!("{} runner --device rxe --kernel {kernel}", lab.display()))
        .env("ELSEWHERE", "given to cargo")
        .env("RUST_BACKTRACE", "0")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("CARGO_BUILD_TARGET");
    let run = subprocess::run(command, PATIENCE)?;
    let (stdout, stderr) = (&run.stdout, &run.stderr);
    context.keep("cargo_runner", &format!("{stdout}\n{stderr}"))?;
    let status = run.status.and_then(|status| status.code());
    let said = || format!("it ended with {status:?}, and printed:\n{stdout}\n{stderr}");
    ensure!(status == Some(101), "cargo's status is not that of failed tests: {}", said());
    for line in ["test finds_everything ... ok", "test fails ... FAILED"] {
        ensure!(stdout.lines().any(|known| known == line), "{line:?} is missing: {}", said());
    }
    // Cargo shows every status but that of failed tests.
    ensure!(!stderr.contains("exit status"), "a status was not passed on: {}", said());
    ensure!(stderr.contains("signal: 6"), "a signal was not passed on: {}", said());
    ensure!(stdout.lines().all(is_of_libtest), "the lab printed, too: {}", said());
    let written = fs::read_to_string(target.join("tmp/written"));
    ensure!(written.is_ok_and(|text| text == "by a test"), "a file is missing: {}", said());
    Ok(())
}

/// Whether a line is one of the test programs', and not the lab's.
fn is_of_libtest(line: &str) -> bool {
    let begins = ["running ", "test ", "failures:", "---- ", "    fails", "thread ", "note: "];
    line.is_empty() || line == "meant to" || begins.iter().any(|begin| line.starts_with(begin))
}
