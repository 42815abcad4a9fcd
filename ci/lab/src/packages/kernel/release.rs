//! Kernel releases: the text that `uname -r` prints, and its series, which decides about
//! capabilities.

use anyhow::{Result, bail};
use std::cmp::Ordering;
use std::fmt;

/// A kernel series: major and minor version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Series(pub(crate) u32, pub(crate) u32);

impl Series {
    /// The series of a release: of `6.18.15+deb13-amd64`, 6.18.
    pub(crate) fn of(release: &str) -> Result<Self> {
        let mut parts = release.trim().split('.').map(leading);
        match (parts.next(), parts.next()) {
            (Some((Some(major), "")), Some((Some(minor), _))) => Ok(Self(major, minor)),
            _ => bail!("{release:?} is no kernel release: it has to begin like 6.18"),
        }
    }
}

impl fmt::Display for Series {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{}.{}", self.0, self.1)
    }
}

/// The number that a text begins with, and the rest.
fn leading(text: &str) -> (Option<u32>, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    (text[..end].parse().ok(), &text[end..])
}

/// Whether `wanted` names this release, whole or up to the end of one of its parts: `6.1` names
/// `6.1.0-50`, but not `6.12.9`.
pub(crate) fn names(wanted: &str, release: &str) -> bool {
    release
        .strip_prefix(wanted)
        .is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric()))
}

/// Compares releases by the numbers in them: `6.18.9` is older than `6.18.12`.
pub(crate) fn compare(one: &str, other: &str) -> Ordering {
    let numbers = |text: &str| -> Vec<u64> {
        text.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
    };
    numbers(one).cmp(&numbers(other)).then_with(|| one.cmp(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_tells_its_series() {
        for (release, series) in [
            ("6.1.0-50-amd64", Series(6, 1)),
            ("6.18.15+deb13-amd64", Series(6, 18)),
            ("7.3-amd64", Series(7, 3)),
            ("7.3-rc7", Series(7, 3)),
            ("5.14.0-503.el9.x86_64\n", Series(5, 14)),
            ("6.8.0-45-generic", Series(6, 8)),
        ] {
            assert_eq!(Series::of(release).unwrap(), series, "{release}");
        }
        for bad in ["", "six", "6", "6.", "6x.1", ".1", "v6.1", "99999999999.1"] {
            assert!(Series::of(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn series_compare_as_numbers() {
        assert!(Series(6, 2) < Series(6, 12) && Series(6, 19) < Series(7, 0));
        assert_eq!(Series(6, 18).to_string(), "6.18");
    }

    #[test]
    fn a_name_covers_whole_parts_of_a_release() {
        assert!(names("6.1", "6.1.0-50") && names("6.1.0-50", "6.1.0-50"));
        assert!(names("6.18", "6.18.15+deb13") && names("6.18.15", "6.18.15+deb13"));
        assert!(!names("6.1", "6.12.9+deb13"));
        assert!(!names("6.18.1", "6.18.15+deb13"));
        assert!(!names("6.18.15+deb1", "6.18.15+deb13"));
        assert!(!names("7", "6.7"));
    }

    #[test]
    fn updates_compare_as_numbers() {
        let mut releases = ["6.18.12+deb13", "6.18.9+deb13", "6.1.0-50", "6.18.15+deb13"];
        releases.sort_by(|one, other| compare(one, other));
        assert_eq!(releases, ["6.1.0-50", "6.18.9+deb13", "6.18.12+deb13", "6.18.15+deb13"]);
    }
}
