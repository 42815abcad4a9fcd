//! A copy of the workspace: mutants are made in it, compiled, and judged by the unit tests.

use super::accepted::MARK;
use super::edit::mutated;
use super::{Fate, Judged, Mutant, PATIENCE, Position, run, sample};
use crate::run::outcome::{self, TestOutcome};
use crate::run::subprocess::{self, CommandOutput};
use crate::workspace::{self, Built, CargoMessage, Workspace};
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// How the unit tests are built.
const BUILD: [&str; 7] = [
    "test",
    "--no-run",
    "--package=uverbs",
    "--all-features",
    "--lib",
    "--quiet",
    "--message-format=json-render-diagnostics",
];
/// Limit of the address space in KiB, because a mutant may allocate without end; rustc needs the most.
const MEMORY: u64 = 12 << 20;

/// How long the tests of a mutant may run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    /// The time of a processor, which other work on the machine does not change.
    processor: Duration,
    /// The time of a clock, for tests that wait without end.
    clock: Duration,
}

/// The copy of the workspace in which mutants are made, with a target directory of its own.
pub(super) struct Place {
    tree: PathBuf,
    target: PathBuf,
}

impl Place {
    /// Copies the sources in `from`; earlier builds of this job stay.
    pub(super) fn prepare(workspace: &Workspace, job: usize, from: &Path) -> Result<Place> {
        let directory = workspace.lab_directory()?.join("host-mutants").join(job.to_string());
        let tree = directory.join("tree");
        if tree.exists() {
            fs::remove_dir_all(&tree)?;
        }
        workspace::copy_tree(from, &tree)?;
        Ok(Place { tree, target: directory.join("target") })
    }

    /// The directory of the sources.
    pub(super) fn tree(&self) -> &Path {
        &self.tree
    }

    /// A command in the copy that leaves the processor to others, with an end to its memory.
    fn command(&self, program: impl AsRef<std::ffi::OsStr>, limits: &str) -> Command {
        let mut command = Command::new("sh");
        let limited = format!("ulimit -v {MEMORY} {limits} && exec nice -n 15 \"$0\" \"$@\"");
        command.args(["-c", &limited]).arg(program).current_dir(&self.tree);
        command.env("CARGO_TARGET_DIR", &self.target).env("CARGO_BUILD_JOBS", "1");
        // A panic names its line without it, and each mutant is linked anew.
        command.env("CARGO_PROFILE_DEV_DEBUG", "false").env("CARGO_INCREMENTAL", "1");
        command
    }

    /// Everything that can be changed.
    pub(super) fn list(&self, tool: &Path, scope: &[String]) -> Result<Vec<Mutant>> {
        let mut command = self.command(tool, "");
        command.args(["mutants", "--no-config", "--package", "uverbs", "--list", "--json"]);
        command.args(scope.iter().flat_map(|glob| ["--file", glob]));
        Ok(serde_json::from_str(&run(command, "listing mutants")?)?)
    }

    /// The mutants in code that the unit tests compile and users run: no tests, and no models for
    /// loom.
    pub(super) fn compiled(&self, all: Vec<Mutant>) -> Result<Vec<Mutant>> {
        let mut compiled = Vec::new();
        let mut seen: Option<(String, Vec<bool>)> = None;
        for mutant in all {
            if sample::is_test_file(&mutant.file) {
                continue;
            }
            let lines = match &seen {
                Some((file, lines)) if *file == mutant.file => lines,
                _ => {
                    let lines = sample::test_lines(&self.text(&mutant.file)?);
                    &seen.insert((mutant.file.clone(), lines)).1
                }
            };
            if lines.get(mutant.span.start.line - 1) != Some(&true) {
                compiled.push(mutant);
            }
        }
        Ok(compiled)
    }

    fn text(&self, file: &str) -> Result<String> {
        let path = self.tree.join(file);
        fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
    }

    /// The line that is changed, or the first of them, with a mark where the change begins.
    pub(super) fn line(&self, mutant: &Mutant) -> Result<String> {
        let Position { line, column } = mutant.span.start;
        let text = self.text(&mutant.file)?;
        Ok(marked(text.lines().nth(line - 1).unwrap_or_default(), column))
    }

    /// Builds the unit tests; `None` if they do not compile.
    fn build(&self) -> Result<Option<Built>> {
        let mut command = self.command(workspace::cargo(), "");
        command.args(BUILD);
        let run = subprocess::run(command, PATIENCE)?;
        if !run.status.is_some_and(|status| status.success()) {
            let compiler = run.stderr.contains("could not compile `uverbs`");
            // One that ran out of memory or was killed has not judged anything.
            ensure!(
                compiler && !run.stderr.contains("signal:") && !run.stderr.contains("panicked at"),
                "building the unit tests: {:?}\n{}{}",
                run.status,
                run.stdout,
                run.stderr
            );
            return Ok(None);
        }
        let messages = run.stdout.lines().filter_map(|line| serde_json::from_str(line).ok());
        let mut programs = messages.filter_map(CargoMessage::program);
        match (programs.next(), programs.next()) {
            (Some(built), None) => Ok(Some(built)),
            _ => bail!("cargo built no single program of unit tests:\n{}", run.stdout),
        }
    }

    /// Runs the unit tests on the unchanged copy, and returns the limits for mutants.
    pub(super) fn baseline(&self) -> Result<Limit> {
        let tests = self.build()?.context("without a mutant the library does not compile")?;
        let start = Instant::now();
        run(self.command(&tests.path, ""), "unit tests without a mutant")?;
        // Much longer than they take, because a busy machine must not be taken for an endless loop.
        let processor = Duration::from_secs(30) + start.elapsed() * 5;
        Ok(Limit { processor, clock: processor * 3 })
    }

    /// Makes a mutant and lets the tests judge it. The copy is as before when this returns.
    pub(super) fn judge(&self, mutant: &Mutant, limit: Limit) -> Result<Judged> {
        let path = self.tree.join(&mutant.file);
        let before = self.text(&mutant.file)?;
        let after = mutated(mutant, &before)
            .with_context(|| format!("the text does not fit {}", mutant.name))?;
        fs::write(&path, after)?;
        let judged = self.judge_tree(mutant, limit);
        fs::write(&path, before)?;
        judged
    }

    fn judge_tree(&self, mutant: &Mutant, limit: Limit) -> Result<Judged> {
        let start = Instant::now();
        let built = self.build()?;
        let building = start.elapsed();
        let Some(tests) = built else {
            return Ok(Judged { building, ..Judged::untested(Fate::Unviable) });
        };
        ensure!(!tests.is_fresh, "cargo did not compile the library anew for {}", mutant.name);
        let start = Instant::now();
        let (fate, by) = self.test(&tests.path, limit)?;
        Ok(Judged { fate, by, building, testing: start.elapsed() })
    }

    /// The verdict of the unit tests, and the test that gave it. A test that fails has to fail alone, too, so that
    /// one that the machine disturbed catches nothing.
    fn test(&self, program: &Path, limit: Limit) -> Result<(Fate, String)> {
        let mut disturbed = Vec::new();
        for _ in 0..2 {
            let first = match self.verdict(program, &[], limit)? {
                RunEnd::Passed => break,
                RunEnd::Late => return Ok((Fate::Timeout, String::new())),
                RunEnd::Crashed(how) => return Ok((Fate::Caught, how)),
                RunEnd::Failed(test) => test,
            };
            if self.verdict(program, &["--exact", &first], limit)? != RunEnd::Passed {
                return Ok((Fate::Caught, first));
            }
            disturbed.push(first);
        }
        let by = match &disturbed[..] {
            [] => String::new(),
            tests => format!("failed once, and not alone: {}", tests.join(", ")),
        };
        Ok((Fate::Lived, by))
    }

    /// Runs tests until one fails.
    fn verdict(&self, program: &Path, arguments: &[&str], limit: Limit) -> Result<RunEnd> {
        let seconds = limit.processor.as_secs();
        let limits = format!("&& ulimit -S -t {seconds} && ulimit -H -t {}", seconds + 5);
        let mut command = self.command(program, &limits);
        command.args(arguments);
        let run = subprocess::run_until(command, limit.clock, |line| failed(line).is_some())?;
        Ok(RunEnd::of(&run))
    }
}

/// How a run of unit tests ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum RunEnd {
    Passed,
    /// The first test that failed.
    Failed(String),
    /// The end of the whole program.
    Crashed(String),
    /// The time was over.
    Late,
}

impl RunEnd {
    fn of(run: &CommandOutput) -> RunEnd {
        if let Some(test) = run.stdout.lines().find_map(failed) {
            return RunEnd::Failed(test);
        }
        match run.status {
            None => RunEnd::Late,
            Some(status) if status.success() => RunEnd::Passed,
            // The limit of processor time.
            Some(status) if status.signal() == Some(Signal::SIGXCPU as i32) => RunEnd::Late,
            Some(status) => RunEnd::Crashed(format!("the end of all tests, {status}")),
        }
    }
}

/// The test in a line that says that it failed.
fn failed(line: &str) -> Option<String> {
    let [report] = &outcome::parse(line)[..] else { return None };
    matches!(report.outcome, TestOutcome::Failed(_)).then(|| report.name.clone())
}

/// A line without its indentation, and with the mark before a column, from 1.
pub(super) fn marked(line: &str, column: usize) -> String {
    let at = line.char_indices().nth(column - 1).map_or(line.len(), |(at, _)| at);
    let (before, behind) = line.split_at(at);
    format!("{}{MARK}{}", before.trim_start(), behind.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::ExitStatus;

    fn end(status: Option<i32>, stdout: &str) -> RunEnd {
        let status = status.map(ExitStatus::from_raw);
        RunEnd::of(&CommandOutput { status, stdout: stdout.into(), ..CommandOutput::default() })
    }

    #[test]
    fn a_run_ends_as_its_first_failure_its_status_or_its_time_say() {
        let text = "running 2 tests\ntest a ... ok\ntest b::c ... FAILED\ntest d ... FAILED\n";
        // The lab stops a run at the first failure.
        assert_eq!(end(None, text), RunEnd::Failed("b::c".into()));
        assert_eq!(end(Some(0), "test a ... ok\n"), RunEnd::Passed);
        assert_eq!(end(None, "test a ... ok\n"), RunEnd::Late);
        assert_eq!(end(Some(Signal::SIGXCPU as i32), "test a ... ok\n"), RunEnd::Late);
        let RunEnd::Crashed(how) = end(Some(Signal::SIGSEGV as i32), "test a ... ok\n") else {
            panic!("a crash is no verdict of a test");
        };
        assert!(how.contains("signal: 11"), "{how}");
    }

    #[test]
    fn a_mark_is_set_by_characters() {
        assert_eq!(marked("  é | y", 5), "é »| y");
    }
}
