//! Reads the output of test binaries (libtest and libtest-mimic) into outcomes.
//!
//! `suite.rs` and `cargo_test.rs` run the binaries, `summary.rs` counts.

use std::time::Duration;

/// The outcome of one test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TestOutcome {
    /// It passed.
    Passed,
    /// It failed, with the message of the binary if there is one.
    Failed(String),
    /// It did not run, for this reason.
    Skipped(String),
}

/// A test's name and outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) name: String,
    pub(crate) outcome: TestOutcome,
}

/// Reads a whole run's output. Messages of failures come after all results and are joined to them.
pub(crate) fn parse(output: &str) -> Vec<Report> {
    let mut reports = Vec::new();
    let mut begun: Option<String> = None;
    for line in output.lines() {
        if let Some((name, result)) = result_line(line) {
            match outcome(result) {
                Some(outcome) => reports.push(Report { name, outcome }),
                // Output of the test itself stands between its name and its result.
                None => begun = Some(name),
            }
        } else if let Some(outcome) = outcome(line) {
            reports.extend(begun.take().map(|name| Report { name, outcome }));
        }
    }
    for (name, message) in messages(output) {
        for report in &mut reports {
            if bare(&report.name) == name
                && let TestOutcome::Failed(text) = &mut report.outcome
            {
                text.clone_from(&message);
            }
        }
    }
    reports
}

/// Whether a line has the result of a test, or of all tests.
pub(crate) fn is_result(line: &str) -> bool {
    result_line(line).is_some() || line.starts_with("test result: ")
}

/// The name in a line `test NAME ... RESULT`.
pub(crate) fn named(line: &str) -> Option<&str> {
    Some(line.strip_prefix("test ")?.split_once(" ... ")?.0.trim_end())
}

/// A name as in the sections of failures: without the kind before it and the remark after it.
fn bare(name: &str) -> &str {
    let name = match name.strip_prefix('[').and_then(|rest| rest.split_once("] ")) {
        Some((_, name)) => name.trim_start(),
        None => name,
    };
    [" - compile", " - compile fail"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name)
}

/// Name and rest of a line `test NAME ... REST`.
fn result_line(line: &str) -> Option<(String, &str)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let name = name.trim_end();
    Some((name.strip_suffix(" - should panic").unwrap_or(name).to_owned(), rest))
}

/// `ok`, `FAILED`, `ignored`, `ignored, why` or `ignored (why)`.
fn outcome(result: &str) -> Option<TestOutcome> {
    let result = result.trim();
    if result == "ok" {
        return Some(TestOutcome::Passed);
    }
    if result == "FAILED" {
        return Some(TestOutcome::Failed(String::new()));
    }
    let why = result.strip_prefix("ignored")?;
    let bracketed = why.strip_prefix(" (").and_then(|why| why.strip_suffix(')'));
    let why = why.strip_prefix(", ").or(bracketed).or(why.is_empty().then_some(""))?;
    Some(TestOutcome::Skipped(why.to_owned()))
}

/// The name in a line that began a test and has not ended it, for a run that broke off.
pub(crate) fn unfinished(output: &str) -> Option<String> {
    let mut begun = None;
    for line in output.lines() {
        if let Some((name, result)) = result_line(line) {
            begun = outcome(result).is_none().then_some(name);
        } else if outcome(line).is_some() {
            begun = None;
        }
    }
    begun
}

/// The sections `---- NAME ----` (libtest: `---- NAME stdout ----`) with their text.
fn messages(output: &str) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
    let mut inside = false;
    for line in output.lines() {
        let header = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" ----"));
        if let Some(name) = header {
            let name = name.strip_suffix(" stdout").unwrap_or(name);
            found.push((name.to_owned(), String::new()));
            inside = true;
        } else if line == "failures:" || line.starts_with("test result:") {
            inside = false;
        } else if inside
            && let Some((_, text)) = found.last_mut()
            && !(text.is_empty() && line.is_empty())
        {
            text.push_str(line);
            text.push('\n');
        }
    }
    for (_, text) in &mut found {
        text.truncate(text.trim_end().len());
    }
    found
}

/// How long each test of a libtest run took, in the order in which the tests ended.
///
/// The stable libtest prints no times, but it starts tests in the order of their names, and the next
/// one as soon as one of `threads` is free. The times at which the result lines came therefore say
/// when each test started.
pub(crate) fn times(
    output: &str,
    arrivals: &[Duration],
    threads: usize,
) -> Vec<(String, Duration)> {
    let mut times = Vec::new();
    let mut binary = Binary::default();
    for (line, arrival) in output.lines().zip(arrivals) {
        if is_header(line) {
            times.extend(std::mem::replace(&mut binary, Binary::started(*arrival)).times(threads));
        } else if let Some((name, _)) = result_line(line) {
            binary.ended.push((name, *arrival));
        }
    }
    times.extend(binary.times(threads));
    times
}

/// Whether a line says how many tests a test binary is going to run.
fn is_header(line: &str) -> bool {
    let rest = line.strip_prefix("running ");
    rest.is_some_and(|rest| rest.ends_with(" tests") || rest.ends_with(" test"))
}

/// When a test binary started, and when each of its tests ended.
#[derive(Default)]
struct Binary {
    start: Duration,
    ended: Vec<(String, Duration)>,
}

impl Binary {
    fn started(start: Duration) -> Self {
        Self { start, ended: Vec::new() }
    }

    fn times(self, threads: usize) -> Vec<(String, Duration)> {
        let mut names: Vec<&str> = self.ended.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        let started = |name: &str| {
            let order = names.binary_search(&name).unwrap_or_default();
            match order.checked_sub(threads.max(1)) {
                None => self.start,
                Some(before) => self.ended[before].1,
            }
        };
        let times =
            self.ended.iter().map(|(name, end)| (name.clone(), end.saturating_sub(started(name))));
        times.collect()
    }
}

/// Names that `--list` printed.
pub(crate) fn listed(output: &str) -> Vec<String> {
    output
        .lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .map(|name| name.trim().to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIMIC: &str = "\nrunning 4 tests\n\
        test pd::allocates                ... ok\n\
        test mr::odp                      ... ignored ([odp] not advertised)\n\
        test [btf] 6.1.0 rdma/ib_user_verbs.h   ... FAILED\n\
        test bare                         ... ignored\n\
        \nfailures:\n\n---- 6.1.0 rdma/ib_user_verbs.h ----\nsize 8,\nnot 12\n\n\n\
        failures:\n    6.1.0 rdma/ib_user_verbs.h\n\n\
        test result: FAILED. 1 passed; 1 failed; 2 ignored; 0 measured\n";

    #[test]
    fn results_of_libtest_mimic_are_read() {
        let reports = parse(MIMIC);
        let outcome =
            |name: &str| &reports.iter().find(|report| report.name == name).expect(name).outcome;
        assert_eq!(reports.len(), 4);
        assert_eq!(*outcome("pd::allocates"), TestOutcome::Passed);
        assert_eq!(*outcome("mr::odp"), TestOutcome::Skipped("[odp] not advertised".into()));
        assert_eq!(
            *outcome("[btf] 6.1.0 rdma/ib_user_verbs.h"),
            TestOutcome::Failed("size 8,\nnot 12".into())
        );
        assert_eq!(*outcome("bare"), TestOutcome::Skipped(String::new()));
    }

    #[test]
    fn results_of_libtest_are_read() {
        let text = "test a::b ... ok\ntest c - should panic ... ok\n\
                    test d ... ignored, needs a device\ntest e ... FAILED\n\n\
                    failures:\n\n---- e stdout ----\nthread 'e' panicked\n\nfailures:\n    e\n";
        let reports = parse(text);
        assert_eq!(reports[1].name, "c");
        assert_eq!(reports[2].outcome, TestOutcome::Skipped("needs a device".into()));
        assert_eq!(reports[3].outcome, TestOutcome::Failed("thread 'e' panicked".into()));
    }

    #[test]
    fn the_test_that_hangs_is_named() {
        assert_eq!(unfinished("test a ... ok\ntest hangs   ... "), Some("hangs".into()));
        assert_eq!(unfinished("test a ... ok\n"), None);
        assert_eq!(unfinished(""), None);
    }

    #[test]
    fn output_of_a_test_does_not_hide_its_result() {
        let text = "test a ... noise\nmore noise\nok\ntest b ... ok\nok\n";
        let reports = parse(text);
        assert_eq!(reports.len(), 2);
        assert_eq!(reports[0], Report { name: "a".into(), outcome: TestOutcome::Passed });
    }

    #[test]
    fn test_times_start_when_a_thread_is_free() {
        let lines = [
            (1, "running 4 tests"),
            (3, "test b ... ok"),
            (6, "test a ... ok"),
            (7, "test d ... ok"),
            (9, "test c ... FAILED"),
            (9, "test result: FAILED. 3 passed; 1 failed"),
            (20, "running 1 test"),
            (24, "test a ... ok"),
        ];
        let (arrivals, lines): (Vec<Duration>, Vec<&str>) =
            lines.map(|(second, line)| (Duration::from_secs(second), line)).into_iter().unzip();
        let times = times(&lines.join("\n"), &arrivals, 2);
        let seconds: Vec<(&str, u64)> =
            times.iter().map(|(name, time)| (name.as_str(), time.as_secs())).collect();
        assert_eq!(seconds, [("b", 2), ("a", 5), ("d", 1), ("c", 6), ("a", 4)]);
    }

    #[test]
    fn lists_are_read() {
        assert_eq!(listed("pd::a: test\nroot::b: test\nc: bench\n"), ["pd::a", "root::b"]);
    }
}
