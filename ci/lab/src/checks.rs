//! Checks that need no machine: formatting, lints, documentation and the host's tests.

use crate::outcome::{self, Outcome, Report};
use crate::progress;
use crate::summary::Place;
use crate::workspace::Workspace;
use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Read;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use std::{env, fs};

/// How long one check may take.
const PATIENCE: Duration = Duration::from_secs(20 * 60);
/// Lines of output that a failed check shows.
const TAIL: usize = 60;

fn cargo(workspace: &Workspace, arguments: &[&str]) -> Command {
    let program = env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = Command::new(program);
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
        reports.push(check(
            "clippy",
            "clippy",
            cargo(workspace, &["clippy", "--version"]),
            cargo(
                workspace,
                &[
                    "clippy",
                    "--quiet",
                    "--workspace",
                    "--all-targets",
                    "--all-features",
                    "--",
                    "-D",
                    "warnings",
                ],
            ),
        )?);
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

/// One check that passes or fails as a whole; skipped where its tool is not installed.
fn check(name: &str, component: &str, mut version: Command, command: Command) -> Result<Report> {
    let installed = version
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    let outcome = if installed {
        let (status, output) = watch(name, command)?;
        match status {
            Some(status) if status.success() => Outcome::Passed,
            Some(status) => Outcome::Failed(format!("{status}\n{}", tail(&output))),
            None => Outcome::Failed(gave_up(&output)),
        }
    } else {
        Outcome::Skipped(format!("[{component}] not installed: rustup component add {component}"))
    };
    Ok(Report { name: name.into(), outcome })
}

fn tests(workspace: &Workspace, filter: Option<&str>) -> Result<Vec<Report>> {
    let mut command =
        cargo(workspace, &["test", "--quiet", "--workspace", "--all-features", "--no-fail-fast"]);
    command.arg("--");
    // One line per test: `--quiet` keeps cargo quiet and would make the tests print dots.
    command.args(["--format", "pretty", "--color", "never"]).args(filter);
    let (status, output) = watch("host tests", command)?;
    let mut reports = outcome::parse(&output);
    let failed = reports.iter().any(|report| matches!(report.outcome, Outcome::Failed(_)));
    let problem = match status {
        None => Some(gave_up(&output)),
        Some(status) if !status.success() && !failed => {
            Some(format!("{status} without a failed test\n{}", tail(&output)))
        }
        Some(_) if reports.is_empty() && filter.is_none() => Some("no test ran".into()),
        Some(_) => None,
    };
    if let Some(problem) = problem {
        reports.push(Report { name: "cargo test".into(), outcome: Outcome::Failed(problem) });
    }
    Ok(reports)
}

fn gave_up(output: &str) -> String {
    format!("given up after {} s\n{}", PATIENCE.as_secs(), tail(output))
}

fn tail(output: &str) -> String {
    let lines: Vec<&str> = output.lines().collect();
    lines[lines.len().saturating_sub(TAIL)..].join("\n")
}

/// Runs a command to its end and answers what it wrote; no status where it took too long.
fn watch(name: &str, mut command: Command) -> Result<(Option<ExitStatus>, String)> {
    let spinner = progress::spinner(name);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {command:?}"))?;
    let stdout = child.stdout.take().map(|stream| thread::spawn(move || read(stream)));
    let stderr = child.stderr.take().map(|stream| thread::spawn(move || read(stream)));
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if Instant::now() >= deadline {
            end_descendants();
            child.wait()?;
            break None;
        }
        thread::sleep(Duration::from_millis(50));
    };
    spinner.finish_and_clear();
    // One after the other: a result line must not be cut in two by what came on the other stream.
    let mut output = Vec::new();
    for reading in [stderr, stdout].into_iter().flatten() {
        let bytes = reading.join().map_err(|_| anyhow::anyhow!("the reader panicked"))?;
        output.extend(bytes.with_context(|| format!("read what {name} printed"))?);
    }
    Ok((status, String::from_utf8_lossy(&output).into_owned()))
}

fn read(mut stream: impl Read) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Kills what this process started, directly or not: cargo's own death would leave its tests.
fn end_descendants() {
    let parents: BTreeMap<i32, i32> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
            parent_in(&stat).map(|parent| (pid, parent))
        })
        .collect();
    let own = std::process::id() as i32;
    for (&pid, &parent) in &parents {
        let mut above = Some(parent);
        // The chain ends at a process without a listed parent.
        while let Some(ancestor) = above {
            if ancestor == own {
                let _ended = kill(Pid::from_raw(pid), Signal::SIGKILL);
                break;
            }
            above = parents.get(&ancestor).copied();
        }
    }
}

/// The parent in a line of `/proc/PID/stat`, whose second field may hold anything in parentheses.
fn parent_in(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parent_is_found_behind_any_name() {
        assert_eq!(parent_in("12 (a) b (c)) S 7 12 12 0"), Some(7));
        assert_eq!(parent_in("nothing"), None);
    }

    #[test]
    fn output_and_status_are_both_seen() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo err >&2; exit 3"]);
        let (status, output) = watch("sh", command).unwrap();
        assert_eq!(status.and_then(|status| status.code()), Some(3));
        assert!(output.contains("out") && output.contains("err"));
    }
}
