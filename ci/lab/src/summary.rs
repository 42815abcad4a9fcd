//! The end of `cargo ci test`: how many passed, failed and skipped, where, and why.

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
}

impl fmt::Display for Summary {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        for place in &self.places {
            let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
            for report in &place.reports {
                match &report.outcome {
                    Outcome::Passed => {}
                    Outcome::Failed(message) => {
                        writeln!(to, "FAILED {}: {}", place.name, report.name)?;
                        for line in message.lines() {
                            writeln!(to, "    {line}")?;
                        }
                    }
                    Outcome::Skipped(reason) => {
                        reasons.entry(reason).or_default().push(&report.name);
                    }
                }
            }
            for (reason, names) in reasons {
                let reason = if reason.is_empty() { "(no reason given)" } else { reason };
                writeln!(to, "skipped {}: {reason}: {}", place.name, names.join(", "))?;
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

    #[test]
    fn nothing_at_all_is_a_failure() {
        assert!(Summary::default().failed());
        let passed = Place { reports: vec![report("a", Outcome::Passed)], ..Place::default() };
        assert!(!Summary { places: vec![passed] }.failed());
    }
}
