//! `cargo ci mutants`: whether the library's host tests notice when one line of it is changed.
//!
//! cargo-mutants lists the changes that it can make, and makes them one at a time in a copy of the
//! workspace. A seeded sample of them is judged by the unit tests of the library alone: no machine, no
//! device. A mutant that the tests let live needs a test, or an entry in `host_mutants/accepted.txt`
//! with the reason why it may live.
//!
//! `cases/mutants.rs` has other mistakes: they are made by hand, and the emulated device detects
//! them.

mod accepted;
mod sample;

use crate::cache::Cache;
use crate::outcome::{Outcome, Report};
use crate::progress;
use crate::summary::Section;
use crate::watch;
use crate::workspace::{self, Workspace};
use accepted::{Accepted, MARK};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use sample::Seed;
use serde::Deserialize;
use std::fmt::{self, Write as _};
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

/// The version whose list of changes the entries of `accepted.txt` are written for. None of the crates in
/// its lock file compiles C.
const VERSION: &str = "27.1.0";
const TOOL: &str = "cargo-mutants";
/// The data path, which is sampled unless paths are given.
const DATA_PATH: [&str; 5] = ["src/provider", "src/memory", "src/owned", "src/aio", "src/qp"];
/// How the unit tests are built and run.
const JUDGES: [&str; 5] = ["test", "--package", "uverbs", "--all-features", "--lib"];

/// How long any other command than the tests of a mutant may take.
const PATIENCE: Duration = Duration::from_secs(30 * 60);
/// How many mutants are made unless the command line says otherwise.
const SAMPLE: usize = 200;
/// The run fails if one of so many testable mutants lives.
const ONE_IN: usize = 20;
/// A mutant may allocate without end; in KiB of address space, of which rustc needs the most.
const MEMORY: u64 = 12 << 20;

/// `cargo ci mutants`
#[derive(Args, Clone, Debug)]
pub(crate) struct MutantsArguments {
    /// How many mutants to make
    #[arg(long, value_name = "N", default_value_t = SAMPLE)]
    sample: usize,
    /// The seed that chooses them, in hexadecimal digits [default: the hash of the commit]
    #[arg(long, value_name = "HEX")]
    seed: Option<Seed>,
    /// How many are judged at a time, each in a copy of the workspace [default: one for each processor]
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// Files and directories to change, from the top of the workspace [default: the data path]
    paths: Vec<PathBuf>,
}

/// A change that cargo-mutants can make.
#[derive(Clone, Debug, Deserialize)]
struct Mutant {
    /// File, line, column and what is changed.
    name: String,
    file: String,
    span: Span,
    /// Where it stands among all that are listed.
    #[serde(skip)]
    index: usize,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Span {
    start: Position,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum Fate {
    #[serde(rename = "CaughtMutant")]
    Caught,
    /// The tests did not end in time, as those of a loop without end.
    Timeout,
    /// It does not compile, and no test is needed.
    Unviable,
    #[serde(rename = "MissedMutant")]
    Lived,
    /// It may live, and was not tested.
    #[serde(skip)]
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
        seed: None,
        jobs: None,
        paths: Vec::new(),
    })?;
    let outcome = if success { Outcome::Passed } else { Outcome::Failed(note.clone()) };
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
    let jobs = arguments.jobs.map_or_else(thread::available_parallelism, Ok)?;
    let places = (0..jobs.get())
        .map(|job| Place::prepare(&workspace, job, &tool, &scope))
        .collect::<Result<Vec<_>>>()?;
    let place = &places[0];
    let all = place.list()?;
    let stale = accepted.stale(&all, |mutant| place.line(mutant))?;
    let chosen = sample::choose(&seed, place.compiled(all.clone())?, arguments.sample);
    ensure!(!chosen.is_empty(), "cargo-mutants finds nothing to change there");
    println!("{} mutants with seed {seed}", chosen.len());
    let rest = Mutex::new(chosen.iter());
    let judged = thread::scope(|scope| {
        let (rest, accepted, count) = (&rest, &accepted, all.len());
        let judge = |place| scope.spawn(move || judge_all(place, rest, accepted, count));
        let threads: Vec<_> = places.iter().map(judge).collect();
        let results = threads.into_iter().map(|thread| thread.join().expect("no panic to judge"));
        results.collect::<Result<Vec<_>>>()
    })?;
    let judged: Vec<(&Mutant, Fate)> = judged.into_iter().flatten().collect();
    let verdict = Verdict { fates: judged.iter().map(|(_, fate)| *fate).collect() };
    println!("\nseed {seed}: {verdict}");
    for (mutant, _) in judged.iter().filter(|(_, fate)| *fate == Fate::Lived) {
        println!("LIVED: {}\n    {}", mutant.name, place.line(mutant)?);
    }
    for entry in &stale {
        println!("STALE: nothing is changed like this any more: {entry}");
    }
    let success = !verdict.failed() && stale.is_empty();
    Ok((verdict.to_string(), success))
}

/// Judges mutants in one copy of the workspace until none is left. Other threads take of the same ones.
fn judge_all<'m>(
    place: &Place,
    rest: &Mutex<impl Iterator<Item = &'m Mutant>>,
    accepted: &Accepted,
    count: usize,
) -> Result<Vec<(&'m Mutant, Fate)>> {
    let limit = place.baseline()?;
    let mut fates = Vec::new();
    loop {
        let next = rest.lock().expect("no thread panics with the lock").next();
        let Some(mutant) = next else { return Ok(fates) };
        let start = Instant::now();
        let may_live = accepted.covers(mutant, &place.line(mutant)?);
        let fate = if may_live { Fate::Accepted } else { place.judge(mutant, count, limit)? };
        println!("{fate}: {} ({} s)", mutant.name, start.elapsed().as_secs());
        fates.push((mutant, fate));
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
    let run = watch::run(command, PATIENCE)?;
    spinner.finish_and_clear();
    match run.status {
        Some(status) if status.success() => Ok(run.stdout),
        Some(status) => bail!("{what}: {status}\n{}{}", run.stdout, run.stderr),
        None => bail!("{what}: given up after {} s\n{}", PATIENCE.as_secs(), run.stderr),
    }
}

/// The copy of the workspace in which mutants are made, with a target directory of its own.
struct Place {
    tool: PathBuf,
    scope: Vec<String>,
    tree: PathBuf,
    target: PathBuf,
    answers: PathBuf,
}

impl Place {
    fn prepare(workspace: &Workspace, job: usize, tool: &Path, scope: &[String]) -> Result<Place> {
        let directory = workspace.lab_directory()?.join("host-mutants").join(job.to_string());
        let tree = directory.join("tree");
        if tree.exists() {
            fs::remove_dir_all(&tree)?;
        }
        workspace::copy_tree(workspace.root(), &tree)?;
        let (target, answers) = (directory.join("target"), directory.join("answers"));
        Ok(Place { tool: tool.into(), scope: scope.into(), tree, target, answers })
    }

    /// A command in the copy that leaves the processor to others, with an end to its memory.
    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("sh");
        let limited = format!("ulimit -v {MEMORY} && exec nice -n 15 \"$0\" \"$@\"");
        command.args(["-c", &limited]).arg(program).current_dir(&self.tree);
        command.env("CARGO_TARGET_DIR", &self.target).env("CARGO_BUILD_JOBS", "1");
        // A panic names its line without it, and each mutant is linked anew.
        command.env("CARGO_PROFILE_DEV_DEBUG", "false");
        command
    }

    fn cargo_mutants(&self) -> Command {
        let mut command = self.command(&self.tool);
        command.args(["mutants", "--no-config", "--package", "uverbs"]);
        command.args(self.scope.iter().flat_map(|glob| ["--file", glob]));
        command
    }

    /// Everything that can be changed, in the order that `--shard` counts in.
    fn list(&self) -> Result<Vec<Mutant>> {
        let mut command = self.cargo_mutants();
        command.args(["--list", "--json"]);
        let mut all: Vec<Mutant> = serde_json::from_str(&run(command, "listing mutants")?)?;
        all.iter_mut().enumerate().for_each(|(index, mutant)| mutant.index = index);
        Ok(all)
    }

    /// The mutants in code that the unit tests compile and users run: no tests, and no models for
    /// loom.
    fn compiled(&self, all: Vec<Mutant>) -> Result<Vec<Mutant>> {
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
    fn line(&self, mutant: &Mutant) -> Result<String> {
        let Position { line, column } = mutant.span.start;
        let text = self.text(&mutant.file)?;
        Ok(marked(text.lines().nth(line - 1).unwrap_or_default(), column))
    }

    /// Runs the unit tests on the unchanged copy, and returns the time limit for mutants.
    fn baseline(&self) -> Result<Duration> {
        let mut build = self.command(workspace::cargo());
        build.args(JUDGES).arg("--no-run");
        run(build, "building the host tests")?;
        let start = Instant::now();
        let mut judges = self.command(workspace::cargo());
        judges.args(JUDGES);
        run(judges, "host tests without a mutant")?;
        // Much longer than they take, because a busy machine must not be taken for an endless loop.
        Ok(Duration::from_secs(30) + start.elapsed() * 5)
    }

    /// Makes one mutant of `count`, and lets the tests judge it.
    fn judge(&self, mutant: &Mutant, count: usize, limit: Duration) -> Result<Fate> {
        if self.answers.exists() {
            fs::remove_dir_all(&self.answers)?;
        }
        fs::create_dir_all(&self.answers)?;
        let mut command = self.cargo_mutants();
        // Its filters by name let some kinds of mutants pass; a slice of one has no other.
        command.arg("--shard").arg(format!("{}/{count}", mutant.index));
        command.args(["--in-place", "--all-features", "--cargo-arg=--lib", "--baseline", "skip"]);
        command.args(["--timeout", &limit.as_secs().to_string()]);
        command.args(["--build-timeout", &PATIENCE.as_secs().to_string(), "--annotations", "none"]);
        command.arg("--output").arg(&self.answers);
        let run = watch::run(command, 2 * PATIENCE)?;
        let answer = self.answers.join("mutants.out/outcomes.json");
        let fate = fs::read_to_string(&answer)
            .map_err(anyhow::Error::from)
            .and_then(|text| fate(&text, &mutant.name));
        fate.with_context(|| {
            let mut said = format!("cargo-mutants did not judge {}\n", mutant.name);
            let _always = write!(said, "{}{}", run.stdout, run.stderr);
            said
        })
    }
}

/// A line without its indentation, and with the mark before a column, from 1.
fn marked(line: &str, column: usize) -> String {
    let at = line.char_indices().nth(column - 1).map_or(line.len(), |(at, _)| at);
    let (before, behind) = line.split_at(at);
    format!("{}{MARK}{}", before.trim_start(), behind.trim_end())
}

/// The result that cargo-mutants wrote for the mutant of this name.
fn fate(outcomes: &str, name: &str) -> Result<Fate> {
    #[derive(Deserialize)]
    struct Outcomes {
        outcomes: Vec<Outcome>,
    }
    #[derive(Deserialize)]
    struct Outcome {
        scenario: Scenario,
        summary: Fate,
    }
    #[derive(Deserialize)]
    enum Scenario {
        Mutant { name: String },
    }
    let outcomes: Outcomes = serde_json::from_str(outcomes)?;
    match &outcomes.outcomes[..] {
        [Outcome { scenario: Scenario::Mutant { name: made }, summary }] if made == name => {
            Ok(*summary)
        }
        _ => bail!("it made another mutant, or several"),
    }
}

#[cfg(test)]
mod tests;
