//! The end of `cargo ci test`: the counts of passed, failed and skipped tests, with the reasons.
//!
//! Skips are printed before failures, so that the end of a log shows failures.

use crate::run::outcome::{Report, TestOutcome};
use std::collections::BTreeMap;
use std::fmt;

/// A section of the summary: the host, or a kernel with a device.
#[derive(Clone, Debug, Default)]
pub(crate) struct Section {
    pub(crate) name: String,
    pub(crate) reports: Vec<Report>,
    /// A remark beside the counts, for example the time.
    pub(crate) note: String,
}

/// The results of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Summary {
    pub(crate) sections: Vec<Section>,
}

/// Counts of a set of reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl Counts {
    fn of<'a>(reports: impl Iterator<Item = &'a Report>) -> Self {
        let mut counts = Self::default();
        for report in reports {
            match report.outcome {
                TestOutcome::Passed => counts.passed += 1,
                TestOutcome::Failed(_) => counts.failed += 1,
                TestOutcome::Skipped(_) => counts.skipped += 1,
            }
        }
        counts
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

impl Summary {
    /// Whether anything failed, or nothing ran.
    pub(crate) fn failed(&self) -> bool {
        let counts = self.counts();
        counts.failed > 0 || counts.passed == 0
    }

    /// The counts of everything.
    pub(crate) fn counts(&self) -> Counts {
        Counts::of(self.sections.iter().flat_map(|section| &section.reports))
    }

    /// Each failure's line, and its message.
    fn failures(&self) -> impl Iterator<Item = (String, &str)> {
        self.sections.iter().flat_map(|section| {
            section.reports.iter().filter_map(move |report| match &report.outcome {
                TestOutcome::Failed(message) => {
                    Some((format!("FAILED {}: {}", section.name, report.name), message.as_str()))
                }
                _ => None,
            })
        })
    }

    /// The skipped tests by reason, with the sections that skipped exactly these.
    fn skips(&self) -> Skips<'_> {
        let mut skips = Skips::new();
        for section in &self.sections {
            let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
            for report in &section.reports {
                if let TestOutcome::Skipped(reason) = &report.outcome {
                    reasons.entry(reason).or_default().push(&report.name);
                }
            }
            for (reason, mut names) in reasons {
                // The order in which tests end differs between sections.
                names.sort_unstable();
                skips.entry((reason, names)).or_default().push(&section.name);
            }
        }
        skips
    }
}

/// Sections by a reason and the names of the tests that were skipped for it.
type Skips<'s> = BTreeMap<(&'s str, Vec<&'s str>), Vec<&'s str>>;

/// Skips, failures and counts; with `{:#}` only the names of what failed and the count of everything.
impl fmt::Display for Summary {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        if to.alternate() {
            for (line, _) in self.failures() {
                writeln!(to, "{line}")?;
            }
            return write!(to, "{}", self.counts());
        }
        for ((reason, names), sections) in self.skips() {
            let reason = if reason.is_empty() { "(no reason given)" } else { reason };
            writeln!(to, "skipped {}: {reason}: {}", sections.join(", "), names.join(", "))?;
        }
        for (line, message) in self.failures() {
            writeln!(to, "{line}")?;
            for line in message.lines() {
                writeln!(to, "    {line}")?;
            }
        }
        writeln!(to)?;
        let width = self.sections.iter().map(|section| section.name.len()).max().unwrap_or(0);
        for section in &self.sections {
            let counts = Counts::of(section.reports.iter());
            let note = if section.note.is_empty() {
                String::new()
            } else {
                format!("  ({})", section.note)
            };
            writeln!(to, "{:width$}  {counts}{note}", section.name)?;
        }
        write!(to, "{}", self.counts())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(name: &str, outcome: TestOutcome) -> Report {
        Report { name: name.into(), outcome }
    }

    #[test]
    fn the_last_line_counts_everything() {
        let summary = Summary {
            sections: vec![
                Section {
                    name: "host".into(),
                    reports: vec![report("fmt", TestOutcome::Passed)],
                    ..Section::default()
                },
                Section {
                    name: "6.1 rxe".into(),
                    reports: vec![
                        report("a", TestOutcome::Passed),
                        report("b", TestOutcome::Skipped("[odp] none".into())),
                        report("c", TestOutcome::Failed("boom".into())),
                    ],
                    ..Section::default()
                },
            ],
        };
        let text = summary.to_string();
        assert_eq!(text.lines().last(), Some("2 passed, 1 failed, 1 skipped"));
        assert!(text.contains("skipped 6.1 rxe: [odp] none: b\n"));
        assert!(text.contains("FAILED 6.1 rxe: c\n    boom\n"));
        assert_eq!(format!("{summary:#}"), "FAILED 6.1 rxe: c\n2 passed, 1 failed, 1 skipped");
        assert!(summary.failed());
    }

    /// Skips, failures, counts; sections that skip the same for the same reason are on one line.
    #[test]
    fn failures_follow_skips_joined_by_reason() {
        let section = |name: &str, reports: &[(&str, TestOutcome)]| Section {
            name: name.into(),
            reports: reports.iter().map(|(name, outcome)| report(name, outcome.clone())).collect(),
            ..Section::default()
        };
        let failed = |message: &str| TestOutcome::Failed(message.into());
        let odp = || TestOutcome::Skipped("[odp] none".into());
        let old = || TestOutcome::Skipped("[dmabuf] old".into());
        let sections = vec![
            section("6.1 mlx5", &[("a", odp()), ("c", failed("boom")), ("b", odp()), ("d", old())]),
            section("6.12 mlx5", &[("b", odp()), ("a", odp()), ("d", failed("one\ntwo"))]),
            section("7.3 mlx5", &[("a", odp()), ("b", TestOutcome::Passed), ("d", odp())]),
        ];
        let text = Summary { sections }.to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "skipped 6.1 mlx5: [dmabuf] old: d",
                "skipped 6.1 mlx5, 6.12 mlx5: [odp] none: a, b",
                "skipped 7.3 mlx5: [odp] none: a, d",
                "FAILED 6.1 mlx5: c",
                "    boom",
                "FAILED 6.12 mlx5: d",
                "    one",
                "    two",
                "",
                "6.1 mlx5   0 passed, 1 failed, 3 skipped",
                "6.12 mlx5  0 passed, 1 failed, 2 skipped",
                "7.3 mlx5   1 passed, 0 failed, 2 skipped",
                "1 passed, 2 failed, 7 skipped",
            ]
        );
    }

    #[test]
    fn a_run_without_tests_fails() {
        assert!(Summary::default().failed());
        let passed =
            Section { reports: vec![report("a", TestOutcome::Passed)], ..Section::default() };
        assert!(!Summary { sections: vec![passed] }.failed());
    }
}
