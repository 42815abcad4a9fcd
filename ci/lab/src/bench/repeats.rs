//! A measurement that fails is repeated once: on a machine that has other things to do a program runs into
//! its time limit now and then, which is no reason to lose an hour of rows.

use anyhow::{Context, Result};

/// The failures of measurements that were repeated, for the table.
#[derive(Clone, Debug, Default)]
pub(super) struct Repeats(Vec<String>);

impl Repeats {
    /// Tries; once more if that fails. A second failure is returned, and names the first.
    pub(super) fn again<T>(&mut self, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
        let first = match attempt() {
            Ok(value) => return Ok(value),
            Err(error) => format!("{error:#}"),
        };
        let value = attempt().with_context(|| format!("once more, after: {first}"))?;
        self.0.push(first);
        Ok(value)
    }

    /// Why each of them failed the first time.
    pub(super) fn into_reasons(self) -> Vec<String> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    #[test]
    fn one_failure_is_repeated_and_told() {
        let mut repeats = Repeats::default();
        let mut tries = 0;
        let value = repeats.again(|| {
            tries += 1;
            if tries == 1 { bail!("address 185 of 256") } else { Ok(tries) }
        });
        assert_eq!(value.unwrap(), 2);
        assert_eq!(repeats.again(|| Ok(7)).unwrap(), 7);
        assert_eq!(repeats.into_reasons(), ["address 185 of 256"]);
    }

    #[test]
    fn a_second_failure_ends_it_with_both_reasons() {
        let mut repeats = Repeats::default();
        let mut tries = 0;
        let answer: Result<()> = repeats.again(|| {
            tries += 1;
            bail!("reason {tries}")
        });
        let error = format!("{:#}", answer.unwrap_err());
        assert!(error.contains("reason 1") && error.contains("reason 2"), "{error}");
        assert_eq!(tries, 2);
        assert!(repeats.into_reasons().is_empty());
    }
}
