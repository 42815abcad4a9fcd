//! The part `litmus` of the soak: the litmus tests of `tests/litmus` by herd, the simulator of memory models, and
//! their sequences beside the library as compiled.
//!
//! A test is in herd's notation, and herd takes it as it is. Four things in it are for this file:
//!
//! - The condition is an outcome that must not happen. The test passes if the model forbids it.
//! - A comment behind an instruction names a barrier; a cell that is nothing but such a comment is a barrier of the
//!   compiler alone.
//! - `(* Without: NAME => allowed *)` says that the model allows the outcome if this barrier is taken out. An ordered load or
//!   store becomes a plain one, and at a barrier of the compiler the accesses around it change places.
//!   `(* Without: NAME => forbidden: REASON *)` says why a barrier stays that the model can do without.
//! - `(* Code: P0 NAME, NAME... *)` names the functions of `src/litmus.rs` that the thread's column is the sequence of; the
//!   column may end before the last one if three dots follow. Accesses whose comment no line `Without` mentions are
//!   made elsewhere.
//!
//! | file | subject |
//! |---|---|
//! | `notation` | a test, with and without each barrier |
//! | `herd` | where herd comes from, and its verdicts |
//! | `code` | assembly, as far as it loads, stores and orders |
//! | `compiled` | the comparison of a test with assembly |

mod code;
mod compiled;
mod herd;
mod notation;

use crate::run::outcome::{Report, TestOutcome};
use crate::run::summary::Section;
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use herd::Herd;
use notation::{Notation, Test};
use std::fs;
use std::path::Path;
use std::time::Instant;

/// Where the tests are, in a folder for each architecture.
const TESTS: &str = "tests/litmus";

/// Judges all tests.
pub(crate) fn sections(workspace: &Workspace) -> Result<Vec<Section>> {
    let mut sections = Vec::new();
    let herd = Herd::get()?;
    for notation in Notation::ALL {
        let tests = read(&workspace.root().join(TESTS), notation)?;
        sections.push(verdicts(workspace, &herd, notation, &tests)?);
        sections.push(compiled::section(workspace, notation, &tests)?);
    }
    Ok(sections)
}

/// The tests of an architecture, by name.
fn read(folder: &Path, notation: Notation) -> Result<Vec<Test>> {
    let folder = folder.join(notation.folder());
    let mut tests = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "litmus") {
            continue;
        }
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let test = Test::parse(&text).with_context(|| format!("read {}", path.display()))?;
        if test.name != name || test.notation != notation {
            bail!("{} says that it is {} {}", path.display(), test.notation.name(), test.name);
        }
        tests.push(test);
    }
    tests.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(tests)
}

/// The verdict that a model must give on a test, whole or without some barriers.
struct Expectation<'t> {
    /// As reports name it.
    name: String,
    text: String,
    is_allowed: bool,
    test: &'t Test,
}

/// The test, and each of its variants.
fn expectations(test: &Test) -> Result<Vec<Expectation<'_>>> {
    let whole = test.text(&test.name, &[])?;
    let mut all =
        vec![Expectation { name: test.name.clone(), text: whole, is_allowed: false, test }];
    for (at, without) in test.withouts.iter().enumerate() {
        let text = test.text(&format!("{}.{at}", test.name), &without.names)?;
        let name = format!("{} without {}", test.name, without.names.join(" and "));
        all.push(Expectation { name, text, is_allowed: without.is_allowed, test });
    }
    Ok(all)
}

fn verdicts(
    workspace: &Workspace,
    herd: &Herd,
    notation: Notation,
    tests: &[Test],
) -> Result<Section> {
    let start = Instant::now();
    let mut all = Vec::new();
    for test in tests {
        all.extend(expectations(test)?);
    }
    let scratch = workspace.lab_directory()?.join("litmus").join(notation.folder());
    let texts: Vec<&str> = all.iter().map(|one| one.text.as_str()).collect();
    let verdicts = herd.judge(&scratch, &texts)?;
    let reports = all.iter().zip(verdicts).map(|(expectation, verdict)| {
        let outcome = match verdict {
            Ok(is_allowed) if is_allowed == expectation.is_allowed => TestOutcome::Passed,
            Ok(is_allowed) => TestOutcome::Failed(format!(
                "herd {} the outcome that the file says is {}: {}",
                if is_allowed { "allows" } else { "forbids" },
                if expectation.is_allowed { "allowed" } else { "forbidden" },
                expectation.test.title
            )),
            Err(problem) => TestOutcome::Failed(problem),
        };
        Report { name: expectation.name.clone(), outcome }
    });
    let reports = reports.collect();
    let note = format!("{}, {} s", herd.version(), start.elapsed().as_secs());
    Ok(Section { name: format!("herd {}", notation.folder()), reports, note })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Test> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(TESTS);
        Notation::ALL.into_iter().flat_map(|notation| read(&folder, notation).unwrap()).collect()
    }

    #[test]
    fn every_barrier_of_a_test_has_a_verdict_without_it() {
        for test in all() {
            assert!(!test.withouts.is_empty(), "{}: no line Without", test.name);
            for barrier in test.barriers() {
                let verdict = test.withouts.iter().any(|one| one.names == [barrier.clone()]);
                assert!(
                    verdict,
                    "{} {}: no line Without: {barrier}",
                    test.notation.name(),
                    test.name
                );
            }
            for without in &test.withouts {
                assert_eq!(without.reason.is_empty(), without.is_allowed, "{}", test.name);
            }
            expectations(&test).unwrap();
        }
    }

    #[test]
    fn architecture_md_names_every_test() {
        let text = include_str!("../../../../docs/ARCHITECTURE.md");
        for test in all() {
            assert!(text.contains(&format!("`{}`", test.name)), "{}", test.name);
        }
    }

    #[test]
    fn every_function_of_src_litmus_is_compared() {
        let text = include_str!("../../../../src/litmus.rs");
        let named = |line: &str| {
            let rest = line.strip_prefix("pub fn ")?;
            Some(rest.split(['(', '<']).next()?.to_owned())
        };
        let functions: Vec<String> = text.lines().filter_map(named).collect();
        let tests = all();
        let codes = || tests.iter().flat_map(|test| &test.codes);
        let used: Vec<&String> = codes().flat_map(|code| &code.functions).collect();
        assert!(functions.iter().all(|name| used.contains(&name)), "{functions:?} {used:?}");
        assert!(used.iter().all(|name| functions.contains(name)), "{used:?} {functions:?}");
    }
}
