//! The comparison of a test's columns with the library as compiled.

use super::TESTS;
use super::code::{Function, Step, list, step};
use super::notation::{Code, Notation, Test};
use crate::arch::Arch;
use crate::packages::cache::Cache;
use crate::packages::cross::{Cross, Linking};
use crate::packages::fetch;
use crate::run::outcome::{Report, TestOutcome};
use crate::run::progress;
use crate::run::subprocess;
use crate::run::summary::Section;
use crate::workspace::{self, Workspace};
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long the library may be compiled.
const PATIENCE: Duration = Duration::from_secs(20 * 60);
/// The ordering instructions on every path through the functions, one file for each architecture.
const RECORD: &str = "compiled.txt";

pub(super) fn section(
    workspace: &Workspace,
    notation: Notation,
    tests: &[Test],
) -> Result<Section> {
    let start = Instant::now();
    let name = format!("compiled {}", notation.folder());
    let assembly = assembly(workspace, notation.arch())?;
    let mut reports = Vec::new();
    for test in tests {
        for code in &test.codes {
            let outcome = match compare(&assembly, test, code) {
                Ok(()) => TestOutcome::Passed,
                Err(problem) => TestOutcome::Failed(format!("{problem:#}")),
            };
            let name = format!("{} P{} as compiled", test.name, code.thread);
            reports.push(Report { name, outcome });
        }
    }
    reports.push(record(workspace, notation, tests, &assembly)?);
    let note = format!("{} s", start.elapsed().as_secs());
    Ok(Section { name, reports, note })
}

/// The library's assembly.
fn assembly(workspace: &Workspace, arch: Arch) -> Result<String> {
    let directory = workspace.lab_directory()?.join("litmus");
    fs::create_dir_all(&directory)?;
    let path = directory.join(format!("{}.s", arch.label()));
    let mut command = Command::new(workspace::cargo());
    command.current_dir(workspace.root());
    command.args(["rustc", "--quiet", "--package", "uverbs", "--lib", "--release"]);
    // Other flags rebuild everything, so these builds have a target directory of their own.
    command.arg("--target-dir").arg(directory.join("target").join(arch.label()));
    command.args(["--target", arch.target()]);
    command.args(["--", "--cfg", "litmus", "-Cdebuginfo=0", "-Ccodegen-units=1"]);
    command.arg(format!("--emit=asm={}", path.display()));
    if !arch.is_host() {
        let cache = Cache::open()?;
        fetch::compilers(&cache, arch)?;
        let cross = Cross::find(arch, &cache)?;
        cross.configure(&mut command, &directory.join("cross"), Linking::Static)?;
    }
    let spinner = progress::spinner(format!("assembly for {}", arch.label()));
    let run = subprocess::run(command, PATIENCE)?;
    spinner.finish_and_clear();
    if !run.status.is_some_and(|status| status.success()) {
        bail!("the library was not compiled for {}:\n{}", arch.label(), run.stderr);
    }
    fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
}

/// Fails unless the functions make the steps of a column.
fn compare(assembly: &str, test: &Test, code: &Code) -> Result<()> {
    let steps: Vec<Step> = test
        .compared(code.thread)
        .filter_map(|instruction| step(test.notation, instruction))
        .collect();
    let mut positions = BTreeSet::from([0]);
    for (at, name) in code.functions.iter().enumerate() {
        let function = Function::find(test.notation, assembly, name)?;
        let is_open = code.is_open && at + 1 == code.functions.len();
        positions = function.follow(&steps, &positions, is_open)?;
    }
    if positions.contains(&steps.len()) {
        return Ok(());
    }
    let most = positions.last().copied().unwrap_or(0);
    bail!(
        "no path through {} makes: {}. The path that comes farthest ends before step {}",
        code.functions.join(" and "),
        list(&steps),
        most + 1
    )
}

/// Compares the ordering instructions on all paths with the record.
fn record(
    workspace: &Workspace,
    notation: Notation,
    tests: &[Test],
    assembly: &str,
) -> Result<Report> {
    let names = tests.iter().flat_map(|test| &test.codes).flat_map(|code| &code.functions);
    let names: BTreeSet<&String> = names.collect();
    let mut text = String::new();
    for name in names {
        text += &format!("{name}\n");
        for path in Function::find(notation, assembly, name)?.orders()? {
            let path = if path.is_empty() { "nothing".into() } else { list(&path) };
            text += &format!("    {path}\n");
        }
    }
    let record = Path::new(TESTS).join(notation.folder()).join(RECORD);
    let before = fs::read_to_string(workspace.root().join(&record)).unwrap_or_default();
    let outcome = if before == text {
        TestOutcome::Passed
    } else {
        let found = workspace.lab_directory()?.join("litmus").join(notation.folder()).join(RECORD);
        fs::create_dir_all(found.parent().context("a path without folder")?)?;
        fs::write(&found, text)?;
        TestOutcome::Failed(format!(
            "what orders on the paths is no longer what {} says: compare it with {}, and copy that if each \
             difference is right",
            record.display(),
            found.display()
        ))
    };
    Ok(Report { name: format!("{} as recorded", notation.folder()), outcome })
}
