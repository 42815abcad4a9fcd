//! rdma-core's Python tests, and the table of those that cannot pass on the emulated device.
//!
//! `pyverbs/runner.py` runs them in the guest. The table `pyverbs/table.txt` is compared with the
//! results both ways: a case that fails or skips and is not in it fails the run, and so does one
//! that is in it and passes.

use super::{CaseContext, failed};
use crate::machine::device::Emulation;
use crate::machine::session::Machine;
use crate::packages::kernel::release::Series;
use crate::packages::python;
use crate::run::jobs::say;
use crate::run::outcome::{self, Report, TestOutcome};
use crate::suites::suite::{self, TestScope};
use anyhow::{Context, Result, bail};
use lab_guest::order::Order;
use std::time::Duration;

const RUNNER: &str = include_str!("pyverbs/runner.py");
const TABLE: &str = include_str!("pyverbs/table.txt");

/// The prefix of the cases' names.
const GROUP: &str = "pyverbs";

/// The runner's message on a case that fails as the table says begins with this. Such a case has no
/// line with FAILED, so that the log of a passing run has none.
const KNOWN: &str = "known to fail: ";

/// At least so many cases of the whole suite must pass, and at most so many may fail: 188 of 321 pass on the newest
/// kernel, and the table knows one that fails there, and one more up to 6.1.
const LEAST_PASSED: usize = 185;
const MOST_FAILED: usize = 2;

/// Limits for the whole suite, and for silence: more than the runner gives a test.
const PATIENCE: Duration = Duration::from_secs(60 * 60);
const SILENCE: Duration = Duration::from_secs(5 * 60);

/// Unpacks the tests and reserves huge pages, which three of them need.
const PREPARE: &str = "mkdir /dev/hugepages; echo 64 > /proc/sys/vm/nr_hugepages
    cp -r \"$0\" /tmp/tests && gunzip /tmp/tests/*.gz";

/// The outcome of a case that does not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Skips,
    Fails,
}

/// The kernels that a line is about, by version as in the capability table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernels {
    All,
    /// This series and later ones.
    Since(Series),
    /// This series and earlier ones.
    Until(Series),
}

impl Kernels {
    /// Reads `all`, `since 6.2` or `until 6.1`.
    fn parse(text: &str) -> Result<Self> {
        Ok(match text.split_once(' ') {
            None if text == "all" => Self::All,
            Some(("since", series)) => Self::Since(Series::of(series)?),
            Some(("until", series)) => Self::Until(Series::of(series)?),
            _ => bail!("kernels {text:?}: write all, since 6.2 or until 6.1"),
        })
    }

    fn include(self, series: Series) -> bool {
        match self {
            Self::All => true,
            Self::Since(first) => series >= first,
            Self::Until(last) => series <= last,
        }
    }
}

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line<'a> {
    verdict: Verdict,
    kernels: Kernels,
    /// A name, or a prefix of names.
    case: &'a str,
    is_prefix: bool,
    /// A part of the suite's message.
    says: &'a str,
    /// Why that is so.
    reason: &'a str,
}

impl Line<'_> {
    fn covers(&self, name: &str, kernel: Series) -> bool {
        let named = if self.is_prefix { name.starts_with(self.case) } else { name == self.case };
        named && self.kernels.include(kernel)
    }
}

/// Reads the table: `skips|fails ; kernels ; case ; part of the suite's message ; why`.
fn table(text: &str) -> Result<Vec<Line<'_>>> {
    text.lines()
        .filter(|line| !line.trim().is_empty() && !line.starts_with('#'))
        .map(|line| {
            let parts: Vec<&str> = line.split(';').map(str::trim).collect();
            let [verdict, kernels, case, says, reason] = parts[..] else {
                bail!("five parts wanted: {line}");
            };
            let verdict = match verdict {
                "skips" => Verdict::Skips,
                "fails" => Verdict::Fails,
                other => bail!("{other}: skips or fails wanted"),
            };
            let kernels = Kernels::parse(kernels).with_context(|| line.to_owned())?;
            if reason.is_empty() {
                bail!("no reason: {line}");
            }
            let start = case.strip_suffix('*');
            if verdict == Verdict::Fails && start.is_some() {
                bail!("`fails` takes the name of one case, without *: {line}");
            }
            Ok(Line {
                verdict,
                kernels,
                case: start.unwrap_or(case),
                is_prefix: start.is_some(),
                says,
                reason,
            })
        })
        .collect()
}

/// Compares a case with the table.
fn judge(report: Report, table: &[Line<'_>], kernel: Series) -> Report {
    let line = table.iter().find(|line| line.covers(&report.name, kernel));
    let outcome = match (report.outcome, line) {
        (TestOutcome::Passed, None) => TestOutcome::Passed,
        (TestOutcome::Passed, Some(line)) => TestOutcome::Failed(format!(
            "it passed, but the table says that it {} ({}): take it out",
            match line.verdict {
                Verdict::Skips => "skips",
                Verdict::Fails => "fails",
            },
            line.reason
        )),
        (TestOutcome::Skipped(said), Some(line))
            if line.verdict == Verdict::Fails && said.strip_prefix(KNOWN) == Some(line.says) =>
        {
            TestOutcome::Skipped(format!("fails, as the table says: {}", line.reason))
        }
        (TestOutcome::Skipped(said), Some(line))
            if line.verdict == Verdict::Skips && said.contains(line.says) =>
        {
            TestOutcome::Skipped(line.reason.to_owned())
        }
        (TestOutcome::Failed(text), _) => TestOutcome::Failed(text),
        (TestOutcome::Skipped(said), _) => {
            TestOutcome::Failed(format!("skipped for \"{said}\", which the table does not say"))
        }
    };
    Report { name: report.name, outcome }
}

/// The number of passed and of failed cases, regardless of the table.
fn counts(reports: &[Report]) -> (usize, usize) {
    let count = |wanted: fn(&TestOutcome) -> bool| {
        reports.iter().filter(|report| wanted(&report.outcome)).count()
    };
    let failed = count(|outcome| match outcome {
        TestOutcome::Failed(_) => true,
        TestOutcome::Skipped(said) => said.starts_with(KNOWN),
        TestOutcome::Passed => false,
    });
    (count(|outcome| *outcome == TestOutcome::Passed), failed)
}

/// The cases that fail on a kernel with their messages, as JSON for the runner.
fn known_to_fail(table: &[Line<'_>], kernel: Series) -> String {
    let cases: serde_json::Map<String, serde_json::Value> = table
        .iter()
        .filter(|line| line.verdict == Verdict::Fails && line.covers(line.case, kernel))
        .map(|line| (line.case.to_owned(), line.says.into()))
        .collect();
    serde_json::Value::Object(cases).to_string()
}

/// Runs the suite: the whole of it, or the cases that a filter names.
pub(crate) fn run(context: &CaseContext<'_>) -> Vec<Report> {
    let pattern = match context.scope.filter {
        None => "",
        Some(filter) if filter.starts_with(GROUP) => filter[GROUP.len()..].trim_start_matches(':'),
        _ => return Vec::new(),
    };
    run_matching(context, pattern).unwrap_or_else(|error| vec![failed(GROUP, &error)])
}

fn run_matching(context: &CaseContext<'_>, pattern: &str) -> Result<Vec<Report>> {
    let table = table(TABLE).context("the table of rdma-core's Python tests")?;
    say!("\n{GROUP} on {} mlx5", context.kernel.label());
    let machine = Machine { python: true, ..context.machine(Emulation::default()) };
    let mut vm = context.session.boot(&machine)?;
    let order = |words: &[&str]| Order {
        command: words.iter().map(|word| (*word).to_owned()).collect(),
        root: true,
        ..Order::default()
    };
    let prepare = order(&["sh", "-c", PREPARE, python::TESTS]);
    let (ending, _, errors) = suite::collect(&mut vm, &prepare, Duration::from_secs(60));
    if ending?.status() != 0 {
        bail!("the tests cannot be unpacked: {errors}");
    }
    let kernel = Series::of(&vm.greeting.release)?;
    let known = known_to_fail(&table, kernel);
    let words = ["python3", "-c", RUNNER, "/tmp/tests", pattern, &known];
    let device = ["--dev", "mlx5_0", "--port", "1", "--gid", "3"];
    let order = order(&[&words[..], &device[..]].concat());
    // Three hundred tests take long on a busy machine; the runner ends one that hangs.
    let scope = TestScope { patience: PATIENCE, silence: SILENCE, ..context.scope.clone() };
    let (ending, results, noise) = suite::follow(&mut vm, &order, &scope);
    context.keep(GROUP, &format!("{results}\n--- printed by tests ---\n{noise}"))?;
    let status = ending?.status();
    vm.power_off()?;
    let found = outcome::parse(&results);
    if status != 0 || found.is_empty() {
        bail!("the runner ended with {status} after {} cases\n{noise}", found.len());
    }
    let (passed, failed) = counts(&found);
    let ran = found.len();
    let mut reports: Vec<Report> = found
        .into_iter()
        .map(|report| judge(report, &table, kernel))
        .map(|report| Report { name: format!("{GROUP}::{}", report.name), ..report })
        .collect();
    say!("{ran} cases: {passed} passed, {failed} failed, {} skipped", ran - passed - failed);
    if pattern.is_empty() {
        let outcome = if passed >= LEAST_PASSED && failed <= MOST_FAILED {
            TestOutcome::Passed
        } else {
            TestOutcome::Failed(format!(
                "{passed} passed and {failed} failed; at least {LEAST_PASSED} and at most \
                 {MOST_FAILED} are asked for"
            ))
        };
        reports.push(Report { name: format!("{GROUP}::counts"), outcome });
    }
    Ok(reports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_parses_without_duplicates() {
        let table = table(TABLE).unwrap();
        for (index, line) in table.iter().enumerate() {
            let same = |other: &Line<'_>| other.case == line.case && other.kernels == line.kernels;
            assert!(!table[..index].iter().any(same), "{} twice", line.case);
        }
    }

    #[test]
    fn a_line_covers_the_kernels_of_its_range_whatever_their_names() {
        let covered = |kernels: &str, major, minor| {
            Kernels::parse(kernels).unwrap().include(Series(major, minor))
        };
        assert!(covered("all", 6, 1) && covered("since 6.2", 6, 2) && covered("since 6.2", 7, 0));
        assert!(!covered("since 6.2", 6, 1));
        assert!(covered("until 6.1", 6, 1) && !covered("until 6.1", 6, 2));
    }

    #[test]
    fn a_result_that_the_table_does_not_list_fails() {
        let text = "skips ; all ; a.* ; no caps ; it has none\n\
                    fails ; until 6.12 ; b ; Errno: 5 ; it is broken\n";
        let table = table(text).unwrap();
        let judged = |name: &str, outcome| {
            judge(Report { name: name.into(), outcome }, &table, Series(6, 1)).outcome
        };
        let skip = |why: &str| TestOutcome::Skipped(why.into());
        let fail = |why: &str| TestOutcome::Failed(why.into());
        assert_eq!(judged("c", TestOutcome::Passed), TestOutcome::Passed);
        assert_eq!(judged("a.x", skip("no caps here")), skip("it has none"));
        let known = |says: &str| skip(&format!("{KNOWN}{says}"));
        assert!(matches!(judged("b", known("Errno: 5")), TestOutcome::Skipped(_)));
        for wrong in [
            judged("c", skip("no caps")),
            judged("c", fail("x")),
            judged("a.x", TestOutcome::Passed),
            judged("a.x", skip("something else")),
            judged("a.x", fail("no caps")),
            judged("b", fail("Errno: 5")),
            judged("b", known("Errno: 6")),
            judged("b", skip("Errno: 5")),
            judged("b", TestOutcome::Passed),
        ] {
            assert!(matches!(wrong, TestOutcome::Failed(_)), "{wrong:?}");
        }
        let report = Report { name: "b".into(), outcome: known("Errno: 5") };
        assert!(matches!(
            judge(report.clone(), &table, Series(6, 13)).outcome,
            TestOutcome::Failed(_)
        ));
        assert_eq!(counts(&[report]), (0, 1));
        assert_eq!(known_to_fail(&table, Series(6, 12)), r#"{"b":"Errno: 5"}"#);
        assert_eq!(known_to_fail(&table, Series(6, 13)), "{}");
    }

    #[test]
    fn wrong_lines_are_refused() {
        for wrong in [
            "skips ; all ; a ; b",
            "may ; all ; a ; b ; c",
            "fails ; 6.1 ; a ; b ; c",
            "fails ; since newest ; a ; b ; c",
            "fails ; all ; a* ; b ; c",
        ] {
            assert!(super::table(wrong).is_err(), "{wrong}");
        }
    }
}
