//! Whether the stress tests notice mistakes: the library is built once more with mistakes in it,
//! and the emulated device must count each of them.
//!
//! A missing barrier is not among them. The emulated processor keeps stores in order by itself, so
//! the device cannot see the difference. The tests of recorded order in `src/provider/mlx5` check
//! the barriers instead, and the listings of instructions.

use super::emulator_check::DoorbellFaults;
use super::{CaseContext, failed};
use crate::machine::device::Emulation;
use crate::machine::session::Machine;
use crate::machine::vm::Vm;
use crate::run::jobs::say;
use crate::run::outcome::{Report, TestOutcome};
use crate::run::stages;
use crate::suites::suite;
use crate::workspace::Workspace;
use crate::workspace::mistake::{Edit, Edits, VARIABLE};
use anyhow::{Context, Result};
use lab_guest::order::Order;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The tests of the device suite that run.
const TESTS: &str = "mlx5::stress";
/// Seconds that they may take without a mistake.
const PATIENCE: u32 = 100;
/// Seconds with a mistake: some tests then wait for ever, and the device counts the mistake at
/// once.
const SHORT: u32 = 12;

/// A mistake, and the count of the device that has to rise.
struct Mutant {
    name: &'static str,
    edits: &'static [Edit],
    rises: (&'static str, fn(DoorbellFaults) -> u64),
}

const TORN: (&str, fn(DoorbellFaults) -> u64) = ("torn copies", |seen| seen.torn);
const BEHIND: (&str, fn(DoorbellFaults) -> u64) = ("records behind", |seen| seen.record_behind);
const DIFFERS: (&str, fn(DoorbellFaults) -> u64) = ("differing data", |seen| seen.differs);

const REGISTER: &str = "src/memory/doorbell_register.rs";
const UAR: &str = "src/provider/mlx5/uar.rs";
const SEND: &str = "src/provider/mlx5/sq.rs";
const CQ: &str = "src/provider/mlx5/cq.rs";

const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "a_lock_that_does_not_lock",
        edits: &[Edit {
            file: REGISTER,
            from: "if !self.try_hold() {",
            to: "if !CHOSEN && !self.try_hold() {",
        }],
        rises: TORN,
    },
    Mutant {
        name: "a_shared_register_without_lock",
        edits: &[Edit {
            file: UAR,
            from: "matches!(self.origin, Origin::Shared)",
            to: "!CHOSEN && matches!(self.origin, Origin::Shared)",
        }],
        rises: TORN,
    },
    Mutant {
        name: "a_register_for_two_domains",
        edits: &[Edit {
            file: UAR,
            from: "pool.free_exclusive.pop()",
            to: "if CHOSEN { pool.free_exclusive.last().cloned() } else { pool.free_exclusive.pop() }",
        }],
        rises: TORN,
    },
    Mutant {
        name: "a_record_that_is_not_written",
        edits: &[Edit {
            file: SEND,
            from: "self.dbrec.set(cursor.at & 0xffff);",
            to: "if !CHOSEN { self.dbrec.set(cursor.at & 0xffff); }",
        }],
        rises: BEHIND,
    },
    Mutant {
        name: "a_record_after_its_doorbell",
        edits: &[
            Edit {
                file: SEND,
                from: "self.dbrec.set(cursor.at & 0xffff);",
                to: "if !CHOSEN { self.dbrec.set(cursor.at & 0xffff); }",
            },
            // Late enough for the device to read the record in between.
            Edit {
                file: SEND,
                from: "fn ring_register(&self, single: bool, cursor: &SendCursor) {",
                to: "fn ring_register(&self, single: bool, cursor: &SendCursor) {
                        self.look(single, cursor);
                        if CHOSEN {
                            std::thread::sleep(std::time::Duration::from_millis(1));
                            self.dbrec.set(cursor.at & 0xffff);
                        }
                    }
                    fn look(&self, single: bool, cursor: &SendCursor) {",
            },
        ],
        rises: BEHIND,
    },
    Mutant {
        name: "a_copy_of_another_block",
        edits: &[Edit {
            file: REGISTER,
            from: "let Some(run) = queue.run(wqe, count) else {",
            to: "let Some(run) = queue.run(queue.behind(wqe, u32::from(CHOSEN)), count) else {",
        }],
        rises: DIFFERS,
    },
    Mutant {
        name: "an_arming_that_is_not_recorded",
        edits: &[Edit {
            file: CQ,
            from: "self.armed.set(word);",
            to: "if !CHOSEN { self.armed.set(word); }",
        }],
        rises: BEHIND,
    },
];

/// Runs the requested mutants, for `cargo ci soak` or for a filter that names them.
pub(crate) fn run(context: &CaseContext<'_>) -> Vec<Report> {
    let name = |mutant: &str| format!("mutants::{mutant}");
    let wanted: Vec<&Mutant> = MUTANTS
        .iter()
        .filter(|mutant| match context.scope.filter {
            None => true,
            Some(filter) => name(mutant.name).contains(filter),
        })
        .collect();
    let mut reports = Vec::new();
    if wanted.is_empty() {
        return reports;
    }
    say!("\nmutants on {} mlx5", context.kernel.label());
    let outcome = (|| {
        let start = Instant::now();
        let program = build(&context.session.workspace)?;
        say!("built in {:.1} s", start.elapsed().as_secs_f64());
        let programs = [("stress".to_owned(), program)];
        let machine = Machine { programs: &programs, ..context.machine(Emulation::default()) };
        let mut vm = context.session.boot(&machine)?;
        // The driver tests write combining when a device is first opened, and the library without a
        // mistake causes no fault. Later counts are therefore the mistake's.
        stress(&mut vm, "none", PATIENCE)?.context("without a mistake")?;
        let before = DoorbellFaults::of(&vm)?;
        stress(&mut vm, "none", PATIENCE)?.context("without a mistake")?;
        DoorbellFaults::of(&vm)?.none_since(before).context("without a mistake")?;
        for mutant in wanted {
            let start = Instant::now();
            let before = DoorbellFaults::of(&vm)?;
            let result = stress(&mut vm, mutant.name, SHORT)?;
            let seen = DoorbellFaults::of(&vm)?.since(before);
            let (what, count) = mutant.rises;
            let risen = count(seen) > 0;
            let word = if risen { "ok" } else { "FAILED" };
            let seconds = start.elapsed().as_secs_f64();
            stages::case(&name(mutant.name), start.elapsed());
            say!("test {} ... {word} ({seconds:.1} s)", name(mutant.name));
            let text = format!("no {what} seen, but {seen:?}; the tests: {result:?}");
            let outcome = if risen { TestOutcome::Passed } else { TestOutcome::Failed(text) };
            reports.push(Report { name: name(mutant.name), outcome });
        }
        vm.power_off()
    })();
    if let Err(error) = outcome {
        reports.push(failed("mutants::machine", &error));
    }
    reports
}

/// Runs the tests with a mistake. The outer error is the guest's, the inner one the tests'.
fn stress(vm: &mut Vm, mutant: &str, seconds: u32) -> Result<Result<()>> {
    let seconds = seconds.to_string();
    let command = ["timeout", "-s", "KILL", &seconds, "stress", TESTS];
    let environment = [
        (VARIABLE, mutant),
        ("UVERBS_TEST_DEVICE", "mlx5_0"),
        ("UVERBS_TEST_SECOND_DEVICE", "mlx5_1"),
    ];
    let order = Order {
        command: command.map(str::to_owned).to_vec(),
        environment: environment.map(|(name, value)| (name.into(), value.into())).to_vec(),
        ..Order::default()
    };
    let (ending, printed, errors) = suite::collect(vm, &order, Duration::from_secs(200));
    let status = ending?.status();
    Ok(match status {
        0 => Ok(()),
        _ => Err(anyhow::anyhow!("status {status}:\n{printed}{errors}")),
    })
}

/// Builds the device suite in a copy of the workspace with all mistakes in it.
fn build(workspace: &Workspace) -> Result<PathBuf> {
    workspace.with_mistakes("mutants", edits())?.quick_test("uverbs", "device")
}

fn edits() -> impl Edits {
    MUTANTS.iter().flat_map(|mutant| mutant.edits.iter().map(|edit| (mutant.name, edit)))
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
