//! The end of `cargo ci test`: how many passed, failed and skipped, where, and why.
//!
//! Whoever looks at the end of a log sees what failed: what was skipped stands before.

use crate::outcome::{Outcome, Report};
use std::collections::BTreeMap;
use std::fmt;

/// Results of one place: the host, or a kernel with a device.
#[derive(Clone, Debug, Default)]
pub(crate) struct Place {
    pub(crate) name: String,
    pub(crate) reports: Vec<Report>,
    /// What to know beside the counts, such as how long it took.
    pub(crate) note: String,
}

/// Results of all places.
#[derive(Clone, Debug, Default)]
pub(crate) struct Summary {
    pub(crate) places: Vec<Place>,
}

/// Counts of a set of reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl Counts {
    fn of<'a>(reports: impl Iterator<Item = &'a Report>) -> Self {
        let mut counts = Self::default();
        for report in reports {
            match report.outcome {
                Outcome::Passed => counts.passed += 1,
                Outcome::Failed(_) => counts.failed += 1,
                Outcome::Skipped(_) => counts.skipped += 1,
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

    fn counts(&self) -> Counts {
        Counts::of(self.places.iter().flat_map(|place| &place.reports))
    }

    /// What was skipped, with its reason, and the places where just that was.
    fn skips(&self) -> Skips<'_> {
        let mut skips = Skips::new();
        for place in &self.places {
            let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
            for report in &place.reports {
                if let Outcome::Skipped(reason) = &report.outcome {
                    reasons.entry(reason).or_default().push(&report.name);
                }
            }
            for (reason, mut names) in reasons {
                // Tests end in another order in each place.
                names.sort_unstable();
                skips.entry((reason, names)).or_default().push(&place.name);
            }
        }
        skips
    }
}

/// Places by a reason and the names of the tests that were skipped for it.
type Skips<'s> = BTreeMap<(&'s str, Vec<&'s str>), Vec<&'s str>>;

/// Skips, failures and counts; with `{:#}` only the count of everything.
impl fmt::Display for Summary {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        if to.alternate() {
            return write!(to, "{}", self.counts());
        }
        for ((reason, names), places) in self.skips() {
            let reason = if reason.is_empty() { "(no reason given)" } else { reason };
            writeln!(to, "skipped {}: {reason}: {}", places.join(", "), names.join(", "))?;
        }
        for place in &self.places {
            for report in &place.reports {
                if let Outcome::Failed(message) = &report.outcome {
                    writeln!(to, "FAILED {}: {}", place.name, report.name)?;
                    for line in message.lines() {
                        writeln!(to, "    {line}")?;
                    }
                }
            }
        }
        writeln!(to)?;
        let width = self.places.iter().map(|place| place.name.len()).max().unwrap_or(0);
        for place in &self.places {
            let counts = Counts::of(place.reports.iter());
            let note =
                if place.note.is_empty() { String::new() } else { format!("  ({})", place.note) };
            writeln!(to, "{:width$}  {counts}{note}", place.name)?;
        }
        write!(to, "{}", self.counts())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(name: &str, outcome: Outcome) -> Report {
        Report { name: name.into(), outcome }
    }

    #[test]
    fn the_last_line_counts_everything() {
        let summary = Summary {
            places: vec![
                Place {
                    name: "host".into(),
                    reports: vec![report("fmt", Outcome::Passed)],
                    ..Place::default()
                },
                Place {
                    name: "6.1 rxe".into(),
                    reports: vec![
                        report("a", Outcome::Passed),
                        report("b", Outcome::Skipped("[odp] none".into())),
                        report("c", Outcome::Failed("boom".into())),
                    ],
                    ..Place::default()
                },
            ],
        };
        let text = summary.to_string();
        assert_eq!(text.lines().last(), Some("2 passed, 1 failed, 1 skipped"));
        assert!(text.contains("skipped 6.1 rxe: [odp] none: b\n"));
        assert!(text.contains("FAILED 6.1 rxe: c\n    boom\n"));
        assert!(summary.failed());
    }

    /// Skips, failures, counts; places that skip the same for the same reason are on one line.
    #[test]
    fn failures_are_behind_skips_that_are_joined() {
        let place = |name: &str, reports: &[(&str, Outcome)]| Place {
            name: name.into(),
            reports: reports.iter().map(|(name, outcome)| report(name, outcome.clone())).collect(),
            ..Place::default()
        };
        let failed = |message: &str| Outcome::Failed(message.into());
        let odp = || Outcome::Skipped("[odp] none".into());
        let old = || Outcome::Skipped("[dmabuf] old".into());
        let places = vec![
            place("6.1 mlx5", &[("a", odp()), ("c", failed("boom")), ("b", odp()), ("d", old())]),
            place("6.12 mlx5", &[("b", odp()), ("a", odp()), ("d", failed("one\ntwo"))]),
            place("7.3 mlx5", &[("a", odp()), ("b", Outcome::Passed), ("d", odp())]),
        ];
        let text = Summary { places }.to_string();
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
    fn nothing_at_all_is_a_failure() {
        assert!(Summary::default().failed());
        let passed = Place { reports: vec![report("a", Outcome::Passed)], ..Place::default() };
        assert!(!Summary { places: vec![passed] }.failed());
    }
}
