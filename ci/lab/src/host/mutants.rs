//! `cargo ci mutants`: whether the library's host tests notice when one line of it is changed.
//!
//! cargo-mutants lists the changes that can be made. A seeded sample of them is made in copies of the
//! workspace, one at a time in each, and judged by the unit tests of the library alone: no machine, no
//! device. A mutant that the tests let live needs a test, or an entry in `mutants/accepted.txt`
//! with the reason why it may live.
//!
//! `cases/mutants.rs` has other mistakes: they are made by hand, and the emulated device detects
//! them.

mod accepted;
mod edit;
mod place;
mod sample;

use crate::output::outln;
use crate::packages::cache::Cache;
use crate::run::outcome::{Report, TestOutcome};
use crate::run::progress;
use crate::run::subprocess;
use crate::run::summary::Section;
use crate::workspace::{self, Workspace};
use accepted::Accepted;
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use place::Place;
use sample::Seed;
use serde::Deserialize;
use std::fmt;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// The version whose list of changes the entries of `accepted.txt` are written for. None of the crates in
/// its lock file compiles C.
const VERSION: &str = "27.1.0";
const TOOL: &str = "cargo-mutants";
/// The data path, which is sampled unless paths are given.
const DATA_PATH: [&str; 7] =
    ["src/provider", "src/memory", "src/sync", "src/lending", "src/owned", "src/aio", "src/qp"];
/// How long any other command than the tests of a mutant may take.
const PATIENCE: Duration = Duration::from_secs(30 * 60);
/// How many mutants are made unless the command line says otherwise.
const SAMPLE: usize = 200;
/// The run fails if one of so many testable mutants lives.
const ONE_IN: usize = 20;

/// `cargo ci mutants`
#[derive(Args, Clone, Debug)]
pub(crate) struct MutantsArguments {
    /// Number of mutants in the sample
    #[arg(long, value_name = "N", default_value_t = SAMPLE)]
    sample: usize,
    /// Number of the first mutant to make, to continue a sample
    #[arg(long, value_name = "K", default_value = "1")]
    from: NonZeroUsize,
    /// Seed of the sample, in hexadecimal digits [default: the hash of the commit]
    #[arg(long, value_name = "HEX")]
    seed: Option<Seed>,
    /// Number of mutants judged at a time, each in a copy of the workspace [default: one for each processor]
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// Files and directories to change, from the top of the workspace [default: the data path]
    paths: Vec<PathBuf>,
}

/// A change that cargo-mutants can make.
#[derive(Clone, Debug, Deserialize)]
struct Mutant {
    /// File, line, column and the change.
    name: String,
    file: String,
    span: Span,
    /// The text that replaces the span.
    replacement: String,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Span {
    start: Position,
    /// Behind the last character.
    end: Position,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Position {
    line: usize,
    column: usize,
}

impl Mutant {
    /// The change, without its place.
    fn change(&self) -> &str {
        let place = |rest: &str| rest.chars().all(|digit| digit.is_ascii_digit() || digit == ':');
        let rest = self.name.strip_prefix(&self.file).unwrap_or(&self.name);
        match rest.split_once(": ") {
            Some((at, change)) if place(at) => change,
            _ => rest,
        }
    }
}

/// The fate of a mutant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Caught,
    /// The tests did not end in time, as those of a loop without end.
    Timeout,
    /// It does not compile, and no test is needed.
    Unviable,
    Lived,
    /// It may live, and was not tested.
    Accepted,
}

impl fmt::Display for Fate {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.pad(match self {
            Fate::Caught => "caught",
            Fate::Timeout => "caught by the time limit",
            Fate::Unviable => "does not compile",
            Fate::Lived => "LIVED",
            Fate::Accepted => "accepted",
        })
    }
}

/// How a mutant was judged.
#[derive(Clone, Debug)]
struct Judged {
    fate: Fate,
    /// The test that failed, or another remark.
    by: String,
    building: Duration,
    testing: Duration,
}

impl Judged {
    fn untested(fate: Fate) -> Judged {
        let (building, testing) = (Duration::ZERO, Duration::ZERO);
        Judged { fate, by: String::new(), building, testing }
    }
}

/// Tests the mutants and prints those that lived. It returns success if fewer than one in twenty
/// did.
pub(crate) fn mutants(arguments: &MutantsArguments) -> Result<ExitCode> {
    let (_, success) = judge_sample(arguments)?;
    Ok(if success { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Tests as many mutants as `cargo ci mutants` does without arguments, for the soak.
pub(crate) fn section() -> Result<Section> {
    let (note, success) = judge_sample(&MutantsArguments {
        sample: SAMPLE,
        from: NonZeroUsize::MIN,
        seed: None,
        jobs: None,
        paths: Vec::new(),
    })?;
    let outcome = if success { TestOutcome::Passed } else { TestOutcome::Failed(note.clone()) };
    let report = Report { name: "host_mutants::few_live".into(), outcome };
    Ok(Section { name: "host-mutants".into(), reports: vec![report], note })
}

/// Tests mutants and prints their fates. Returns a line that counts them, and whether few enough
/// lived.
fn judge_sample(arguments: &MutantsArguments) -> Result<(String, bool)> {
    let workspace = Workspace::find()?;
    let scope = scope(workspace.root(), &arguments.paths)?;
    let seed = match &arguments.seed {
        Some(seed) => seed.clone(),
        None => commit(workspace.root())?,
    };
    let accepted = Accepted::of_tree()?;
    let tool = tool(&Cache::open()?, &workspace)?;
    let first = Place::prepare(&workspace, 0, workspace.root())?;
    let all = first.list(&tool, &scope)?;
    let stale = accepted.stale(&all, |mutant| first.line(mutant))?;
    let chosen = sample::choose(&seed, first.compiled(all.clone())?, arguments.sample);
    ensure!(!chosen.is_empty(), "cargo-mutants finds nothing to change there");
    let rest: Vec<(usize, &Mutant)> = (1..).zip(&chosen).skip(arguments.from.get() - 1).collect();
    ensure!(!rest.is_empty(), "the sample has only {} mutants", chosen.len());
    outln!("{} mutants with seed {seed}, of {}", rest.len(), all.len());
    let jobs = arguments.jobs.map_or_else(thread::available_parallelism, Ok)?.get();
    let mut places = vec![first];
    for job in 1..jobs.min(rest.len()) {
        // Of the first copy, because somebody may edit the workspace meanwhile.
        places.push(Place::prepare(&workspace, job, places[0].tree())?);
    }
    let queue =
        Queue { rest: Mutex::new(rest.into_iter()), count: chosen.len(), accepted: &accepted };
    let mut judged = thread::scope(|scope| {
        let queue = &queue;
        let judge = |place| scope.spawn(move || queue.judge(place));
        let threads: Vec<_> = places.iter().map(judge).collect();
        let results = threads.into_iter().map(|thread| thread.join().expect("no panic to judge"));
        results.collect::<Result<Vec<_>>>()
    })?
    .concat();
    judged.sort_unstable_by_key(|(number, ..)| *number);
    let verdict = Verdict { fates: judged.iter().map(|(.., fate)| *fate).collect() };
    outln!("\nseed {seed}: {verdict}");
    for (number, mutant, _) in judged.iter().filter(|(.., fate)| *fate == Fate::Lived) {
        outln!("LIVED {number}: {}\n    {}", mutant.name, places[0].line(mutant)?);
    }
    for entry in &stale {
        outln!("STALE: nothing is changed like this any more: {entry}");
    }
    let success = !verdict.failed() && stale.is_empty();
    Ok((verdict.to_string(), success))
}

/// The mutants that are still to be judged, with their numbers in the sample.
struct Queue<'m> {
    rest: Mutex<std::vec::IntoIter<(usize, &'m Mutant)>>,
    /// How many there are in the sample.
    count: usize,
    accepted: &'m Accepted,
}

impl<'m> Queue<'m> {
    /// Judges mutants in one copy of the workspace until none is left. Other threads take of the same ones,
    /// and none of them begins with another after an error.
    fn judge(&self, place: &Place) -> Result<Vec<(usize, &'m Mutant, Fate)>> {
        let judged = self.judge_rest(place);
        if judged.is_err() {
            *self.rest() = Vec::new().into_iter();
        }
        judged
    }

    fn judge_rest(&self, place: &Place) -> Result<Vec<(usize, &'m Mutant, Fate)>> {
        let limit = place.baseline()?;
        let mut fates = Vec::new();
        loop {
            let Some((number, mutant)) = self.rest().next() else { return Ok(fates) };
            let judged = match self.accepted.covers(mutant, &place.line(mutant)?) {
                true => Judged::untested(Fate::Accepted),
                false => place.judge(mutant, limit)?,
            };
            let Judged { fate, by, building, testing } = judged;
            let (building, testing) = (building.as_secs(), testing.as_secs());
            outln!(
                "{number}/{} {fate}: {} ({building} + {testing} s) {by}",
                self.count,
                mutant.name
            );
            fates.push((number, mutant, fate));
        }
    }

    fn rest(&self) -> MutexGuard<'_, std::vec::IntoIter<(usize, &'m Mutant)>> {
        // An iterator is whole even after a panic.
        self.rest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The fates of all mutants.
struct Verdict {
    fates: Vec<Fate>,
}

impl Verdict {
    fn count(&self, fate: Fate) -> usize {
        self.fates.iter().filter(|other| **other == fate).count()
    }

    /// Mutants that compile.
    fn judged(&self) -> usize {
        self.fates.len() - self.count(Fate::Unviable)
    }

    fn failed(&self) -> bool {
        let lived = self.count(Fate::Lived);
        lived > 0 && lived * ONE_IN >= self.judged()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = [Fate::Caught, Fate::Timeout, Fate::Accepted, Fate::Lived, Fate::Unviable];
        write!(to, "{} mutants", self.fates.len())?;
        all.into_iter().try_for_each(|fate| write!(to, ", {} {fate}", self.count(fate)))
    }
}

/// The files to change, as cargo-mutants wants them.
fn scope(root: &Path, paths: &[PathBuf]) -> Result<Vec<String>> {
    let default: Vec<PathBuf> = DATA_PATH.iter().map(PathBuf::from).collect();
    let paths = if paths.is_empty() { &default } else { paths };
    let glob = |path: &PathBuf| {
        let text = path.to_str().context("a path that is not UTF-8")?.trim_end_matches('/');
        ensure!(
            text.starts_with("src/") && root.join(path).exists(),
            "{text} is no file or directory of the library: name one from the top of the \
             workspace, such as src/qp"
        );
        let directory = root.join(path).is_dir();
        Ok(if directory { format!("{text}/**") } else { text.to_owned() })
    };
    paths.iter().map(glob).collect()
}

/// The commit that is checked out.
fn commit(root: &Path) -> Result<Seed> {
    let output = Command::new("git")
        .args(["rev-parse", "HEAD"])
        .current_dir(root)
        .output()
        .context("run git, which names the commit that seeds the sample")?;
    let hash = String::from_utf8_lossy(&output.stdout);
    hash.trim().parse().context("git names no commit here: give the sample's --seed")
}

/// cargo-mutants, built into the cache when it is asked for the first time.
fn tool(cache: &Cache, workspace: &Workspace) -> Result<PathBuf> {
    let name = format!("cargo-mutants-{VERSION}");
    if let Some(unit) = cache.unit(&name) {
        return Ok(unit.join(TOOL));
    }
    // Not in the cache, whose lock would be held for minutes.
    let building = workspace.run_directory()?.join("cargo-mutants");
    let mut command = Command::new(workspace::cargo());
    command.args(["install", "cargo-mutants", "--version", VERSION, "--locked", "--root"]);
    command.arg(&building).arg("--target-dir").arg(building.join("target"));
    run(command, &format!("building cargo-mutants {VERSION}"))?;
    let unit = cache.filling()?.add(&name, |unit| {
        fs::copy(building.join("bin").join(TOOL), unit.join(TOOL))?;
        Ok(vec![format!("{TOOL}={VERSION}")])
    })?;
    fs::remove_dir_all(&building)?;
    Ok(unit.join(TOOL))
}

/// Runs a command that has to succeed, and returns its output.
fn run(command: Command, what: &str) -> Result<String> {
    let spinner = progress::spinner(what);
    let run = subprocess::run(command, PATIENCE)?;
    spinner.finish_and_clear();
    match run.status {
        Some(status) if status.success() => Ok(run.stdout),
        Some(status) => bail!("{what}: {status}\n{}{}", run.stdout, run.stderr),
        None => bail!("{what}: given up after {} s\n{}", PATIENCE.as_secs(), run.stderr),
    }
}

#[cfg(test)]
mod tests;
