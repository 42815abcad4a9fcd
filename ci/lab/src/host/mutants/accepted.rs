//! Mutants that may live, and why.

use super::Mutant;
use anyhow::{Context, Result, bail, ensure};
use std::fmt;

/// The table of the tree.
const TABLE: &str = include_str!("accepted.txt");
/// Stands in an entry for any text.
const ANY: char = '…';

/// Marks the changed place in a line.
pub(super) const MARK: char = '»';

/// An entry: a change that the host tests need not notice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AcceptedMutant {
    /// The file.
    pub(super) file: String,
    /// The change, in the words of cargo-mutants.
    change: String,
    /// The line that is changed; `None` for any line of the file. It contains the mark if the entry is about one place
    /// of the line.
    pub(super) line: Option<String>,
    reason: String,
}

impl fmt::Display for AcceptedMutant {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{}: {}", self.file, self.change)?;
        self.line.as_ref().map_or(Ok(()), |line| write!(to, " at `{line}`"))
    }
}

impl AcceptedMutant {
    fn covers(&self, mutant: &Mutant, line: &str) -> bool {
        fits(&self.file, &mutant.file)
            && fits(&self.change, mutant.change())
            && self.line.as_ref().is_none_or(|wanted| match wanted.contains(MARK) {
                true => wanted == line,
                false => *wanted == unmarked(line),
            })
    }
}

/// The table.
#[derive(Debug)]
pub(super) struct Accepted {
    pub(super) entries: Vec<AcceptedMutant>,
}

impl Accepted {
    /// The table of the tree.
    pub(super) fn of_tree() -> Result<Accepted> {
        Accepted::parse(TABLE).context("ci/lab/src/host/mutants/accepted.txt")
    }

    /// Entries stand apart by empty lines: the file and the change, perhaps the line, the reason.
    pub(super) fn parse(text: &str) -> Result<Accepted> {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let text: Vec<&str> = lines.collect();
        let entries = text.split(|line| line.trim().is_empty()).filter(|entry| !entry.is_empty());
        Ok(Accepted { entries: entries.map(entry).collect::<Result<_>>()? })
    }

    /// Whether a mutant with this marked line may live.
    pub(super) fn covers(&self, mutant: &Mutant, line: &str) -> bool {
        self.entries.iter().any(|entry| entry.covers(mutant, line))
    }

    /// Entries that match no mutant of a listed file: the code has changed.
    pub(super) fn stale(
        &self,
        all: &[Mutant],
        line: impl Fn(&Mutant) -> Result<String>,
    ) -> Result<Vec<&AcceptedMutant>> {
        let mut stale = Vec::new();
        for entry in &self.entries {
            // Of an entry for many files only some may be listed.
            let mut of_file = all.iter().filter(|mutant| entry.file == mutant.file).peekable();
            if of_file.peek().is_none() {
                continue;
            }
            let mut found = false;
            for mutant in of_file.filter(|mutant| fits(&entry.change, mutant.change())) {
                found |= entry.covers(mutant, &line(mutant)?);
            }
            if !found {
                stale.push(entry);
            }
        }
        Ok(stale)
    }
}

fn entry(lines: &[&str]) -> Result<AcceptedMutant> {
    let [head, rest @ ..] = lines else { bail!("an entry without lines") };
    let (file, change) = head
        .split_once(": ")
        .with_context(|| format!("`{head}` is no file with a change: write `FILE: CHANGE`"))?;
    let (line, rest) = match rest {
        [first, rest @ ..] if first.starts_with("  at ") => {
            (Some(first["  at ".len()..].trim().to_owned()), rest)
        }
        _ => (None, rest),
    };
    let reason: Vec<&str> = rest.iter().map(|line| line.trim()).collect();
    ensure!(
        rest.iter().all(|line| line.starts_with("  ")) && !reason.is_empty(),
        "`{head}` has no reason: write it below, indented by two spaces"
    );
    Ok(AcceptedMutant { file: file.into(), change: change.into(), line, reason: reason.join(" ") })
}

/// A line without the mark.
pub(super) fn unmarked(line: &str) -> String {
    line.chars().filter(|c| *c != MARK).collect()
}

/// Whether a text is as a pattern says, in which `…` stands for anything.
fn fits(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split(ANY);
    let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else {
        return false;
    };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ellipsis_stands_for_anything() {
        for (pattern, text) in
            [("a", "a"), ("a…", "a"), ("a…c", "abc"), ("…b…", "abc"), ("a…b…c", "abxc"), ("…", "")]
        {
            assert!(fits(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in [("a", "ab"), ("a…c", "ab"), ("a…b…c", "acb"), ("ab…b", "ab")]
        {
            assert!(!fits(pattern, text), "{pattern} {text}");
        }
    }

    #[test]
    fn an_entry_without_a_reason_is_refused() {
        for text in ["src/a.rs: x", "src/a.rs: x\n  at line", "src/a.rs: x\nno indent", "x\n  why"]
        {
            assert!(Accepted::parse(text).is_err(), "{text}");
        }
        let table = Accepted::parse("# why\nsrc/a.rs: x\n  at l\n  a\n  b\n\nsrc/b.rs: y\n  c\n");
        let [one, two] = &table.unwrap().entries[..] else { panic!("two entries") };
        assert_eq!((one.line.as_deref(), one.reason.as_str()), (Some("l"), "a b"));
        assert_eq!((two.line.as_deref(), two.change.as_str()), (None, "y"));
    }
}
