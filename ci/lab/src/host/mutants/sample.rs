//! Which mutants are made: the same ones for the same seed, on every machine.

use super::Mutant;
use anyhow::{Error, ensure};
use std::fmt;
use std::str::FromStr;

/// The seed of a sample: hexadecimal digits, for example a commit's hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seed(String);

impl FromStr for Seed {
    type Err = Error;

    fn from_str(text: &str) -> Result<Seed, Error> {
        let digits = (1..=64).contains(&text.len()) && text.chars().all(|c| c.is_ascii_hexdigit());
        ensure!(digits, "`{text}` is no seed: give 1 to 64 hexadecimal digits");
        Ok(Seed(text.to_ascii_lowercase()))
    }
}

impl fmt::Display for Seed {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.0)
    }
}

impl Seed {
    /// The number by which a mutant's name is ordered. It depends on every digit of the seed and every letter of the
    /// name: FNV-1a, mixed as in SplitMix64.
    fn rank(&self, name: &str) -> u64 {
        let bytes = self.0.bytes().chain([b'\n']).chain(name.bytes());
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let hash = (hash ^ hash >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let hash = (hash ^ hash >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        hash ^ hash >> 31
    }
}

/// The first `count` by rank. A larger sample of the same seed begins with a smaller one.
pub(super) fn choose(seed: &Seed, mut mutants: Vec<Mutant>, count: usize) -> Vec<Mutant> {
    mutants.sort_by_cached_key(|mutant| (seed.rank(&mutant.name), mutant.name.clone()));
    mutants.truncate(count);
    mutants
}

/// Whether a file holds nothing but tests or models.
pub(super) fn is_test_file(file: &str) -> bool {
    file.split('/').any(|part| matches!(part, "tests" | "tests.rs" | "model.rs"))
}

/// For each line of a formatted file, whether it is in an item that only tests, loom or Miri compile.
pub(super) fn test_lines(text: &str) -> Vec<bool> {
    let lines: Vec<&str> = text.lines().collect();
    let mut hidden = vec![false; lines.len()];
    for (at, line) in lines.iter().enumerate() {
        let indent = &line[..line.len() - line.trim_start().len()];
        if !is_test_attribute(line.trim()) {
            continue;
        }
        let attributes = lines[at..].iter().take_while(|line| line.trim().starts_with("#["));
        let item = at + attributes.count();
        let alone = lines.get(item).is_none_or(|line| line.ends_with([';', ',']));
        // Formatted code closes an item where the item is indented.
        let closes = |line: &&str| line.strip_prefix(indent).is_some_and(|l| l.starts_with('}'));
        let body = if alone { 0 } else { lines[item..].iter().take_while(|l| !closes(l)).count() };
        let end = (item + body + 1).min(lines.len());
        hidden[at..end].fill(true);
    }
    hidden
}

/// Whether an attribute asks for tests, loom or Miri.
fn is_test_attribute(line: &str) -> bool {
    let Some(mut condition) = line.strip_prefix("#[cfg(").map(str::to_owned) else { return false };
    // A negated condition enables nothing.
    while let Some(at) = condition.find("not(") {
        let end = condition[at..].find(')').map_or(condition.len(), |end| at + end + 1);
        condition.replace_range(at..end, "");
    }
    let mut words = condition.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.any(|word| matches!(word, "test" | "loom" | "miri"))
}
