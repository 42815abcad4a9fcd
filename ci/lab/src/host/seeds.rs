//! The programs of `tests/seeds`: with 10,000 seeds, and with mistakes planted in the library. Some
//! seeds have to find each mistake, and not all: a mistake that every seed finds needs no seeds.

use crate::host::cargo_test;
use crate::run::jobs::say;
use crate::run::outcome::{Report, TestOutcome};
use crate::run::subprocess;
use crate::run::summary::Section;
use crate::workspace::mistake::{Edit, Edits, VARIABLE};
use crate::workspace::{self, CargoMessage, Workspace};
use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Seeds of the soak, of all programs together.
const SEEDS: u32 = 10_000;
/// Seeds of the soak for each transport.
const TRANSPORT_SEEDS: u32 = 100_000;
/// Seeds that each mistake is tried with.
const TRIED: u64 = 700;
const BUILDING: Duration = Duration::from_secs(30 * 60);
const SOAKING: Duration = Duration::from_secs(2 * 60 * 60);
/// How long one seed may take in real time. Time is virtual, so that a program that waits for ever ends at once.
const ONE_SEED: Duration = Duration::from_secs(60);

const ECHO: &str = "an_echo_equals_its_message";
const VALUES: &str = "a_value_is_one_that_was_written";

/// A mistake, and the program whose seeds find it.
struct Mistake {
    name: &'static str,
    edit: Edit,
    test: &'static str,
}

const MISTAKES: &[Mistake] = &[
    Mistake {
        name: "a_future_that_moves_to_another_task_wakes_the_first_one",
        edit: Edit {
            file: "src/aio/inflight.rs",
            from: "if matches!(fate, Fate::Pending(old) if old.will_wake(waker)) {",
            to: "if matches!(fate, Fate::Pending(old) if CHOSEN || old.will_wake(waker)) {",
        },
        test: ECHO,
    },
    Mistake {
        name: "the_memory_of_a_dropped_future_stays_in_its_slot",
        edit: Edit {
            file: "src/aio/inflight.rs",
            from: "Fate::Abandoned => discard(loan, deferred),",
            to: "Fate::Abandoned if CHOSEN => loan.settle(),
        Fate::Abandoned => discard(loan, deferred),",
        },
        test: ECHO,
    },
    Mistake {
        name: "a_waiter_that_is_dropped_after_it_was_woken_wakes_no_other",
        edit: Edit {
            file: "src/aio/inflight.rs",
            from: "[left, if at == Some(0) { self.take_first_waker() } else { None }]",
            to: "[left, if at == Some(0) && !CHOSEN { self.take_first_waker() } else { None }]",
        },
        test: ECHO,
    },
    Mistake {
        name: "memory_comes_back_one_request_early",
        edit: Edit {
            file: "src/owned/cq.rs",
            from: "if let Some(loan) = entry.loans(*last).take_back_covered(next, *last) {",
            to: "let end = if CHOSEN { last.wrapping_add(2 << 6) } else { *last };
            if let Some(loan) = entry.loans(*last).take_back_covered(next, end) {",
        },
        test: VALUES,
    },
];

/// Runs the programs with the seeds of a soak.
pub(crate) fn soak(workspace: &Workspace) -> Result<Section> {
    let mut command = Command::new(build(workspace, &PROGRAMS)?);
    command.env("UVERBS_SIM_SEEDS", SEEDS.to_string());
    play(workspace, command, "seeds", SEEDS)
}

/// Runs the seeds of each transport of `uverbs-roce`.
pub(crate) fn transports(workspace: &Workspace) -> Result<Section> {
    let tests = ["--release", "--package", "uverbs-roce", "--lib"];
    let mut command = Command::new(build(workspace, &tests)?);
    command.arg("tests::seeds").env("UVERBS_ROCE_SEEDS", TRANSPORT_SEEDS.to_string());
    play(workspace, command, "transport-seeds", TRANSPORT_SEEDS)
}

/// Runs tests with so many seeds.
fn play(workspace: &Workspace, mut command: Command, name: &str, seeds: u32) -> Result<Section> {
    command.current_dir(workspace.root());
    command.args(cargo_test::libtest_arguments());
    let start = Instant::now();
    let run = subprocess::run(command, SOAKING)?;
    let reports = cargo_test::judge(name, &run, true);
    let note = format!("{seeds} seeds in {} s", start.elapsed().as_secs());
    Ok(Section { name: name.into(), reports, note })
}

/// Makes the mistakes, and counts the seeds that find each.
pub(crate) fn mistakes(workspace: &Workspace) -> Result<Section> {
    let program = build(&workspace.with_mistakes("seeds", edits())?, &PROGRAMS)?;
    for test in [ECHO, VALUES] {
        let found = found(&program, "none", test)?;
        ensure!(found == 0, "{test}: {found} of {TRIED} seeds fail without a mistake");
    }
    let mut reports = Vec::new();
    for Mistake { name, test, .. } in MISTAKES {
        let found = found(&program, name, test)?;
        let outcome = match found {
            0 => TestOutcome::Failed(format!("none of {TRIED} seeds finds it")),
            TRIED => TestOutcome::Failed("each seed finds it, so that it needs none".into()),
            _ => TestOutcome::Passed,
        };
        say!("{name}: {found} of {TRIED} seeds find it");
        reports.push(Report { name: format!("seeds::{name}"), outcome });
    }
    Ok(Section { name: "seed-mistakes".into(), reports, note: format!("{TRIED} seeds each") })
}

/// How many seeds a test fails with.
fn found(program: &Path, mistake: &str, test: &str) -> Result<u64> {
    let mut found = 0;
    for seed in 0..TRIED {
        let mut command = Command::new(program);
        command.args(["--exact", test]).env(VARIABLE, mistake).env("RUST_BACKTRACE", "0");
        command.env("UVERBS_SIM_SEED", seed.to_string());
        let run = subprocess::run(command, ONE_SEED)?;
        found += u64::from(!run.status.is_some_and(|status| status.success()));
    }
    Ok(found)
}

/// The tests of `tests/seeds`, as Cargo's arguments.
const PROGRAMS: [&str; 5] = ["--package", "uverbs", "--all-features", "--test", "seeds"];

/// Builds the tests that Cargo's arguments name.
fn build(workspace: &Workspace, tests: &[&str]) -> Result<PathBuf> {
    let mut command = Command::new(workspace::cargo());
    command.current_dir(workspace.root());
    command.args(["test", "--no-run"]).args(tests);
    command.arg("--target-dir").arg(workspace.target_directory());
    command.arg("--message-format=json-render-diagnostics");
    let run = subprocess::run(command, BUILDING)?;
    if !run.status.is_some_and(|status| status.success()) {
        bail!("building the tests with seeds: {:?}\n{}", run.status, run.stderr);
    }
    let messages = run.stdout.lines().filter_map(|line| serde_json::from_str(line).ok());
    let mut programs = messages.filter_map(CargoMessage::program);
    Ok(programs.next().context("cargo built no tests with seeds")?.path)
}

fn edits() -> impl Edits {
    MISTAKES.iter().map(|mistake| (mistake.name, &mistake.edit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::mistake::assert_all_fit;

    #[test]
    fn every_mistake_can_be_made() {
        assert_all_fit(edits());
    }
}
