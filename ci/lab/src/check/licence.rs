//! Licences as packages name them: expressions of SPDX, with the older `A/B` for a choice.

use anyhow::{Result, bail};

/// Whether the allowed licences suffice to use a package under this expression.
pub(super) fn suffices(expression: &str, allowed: &dyn Fn(&str) -> bool) -> Result<bool> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = &words[..];
    let suffices = either(&mut rest, allowed);
    match (suffices, rest) {
        (Some(suffices), []) => Ok(suffices),
        _ => bail!("{expression:?} is no licence expression of SPDX"),
    }
}

fn either(words: &mut &[&str], allowed: &dyn Fn(&str) -> bool) -> Option<bool> {
    let mut suffices = both(words, allowed)?;
    while let Some(("OR", rest)) = split(words) {
        *words = rest;
        suffices |= both(words, allowed)?;
    }
    Some(suffices)
}

/// `AND` binds closer than `OR`.
fn both(words: &mut &[&str], allowed: &dyn Fn(&str) -> bool) -> Option<bool> {
    let mut suffices = one(words, allowed)?;
    while let Some(("AND", rest)) = split(words) {
        *words = rest;
        suffices &= one(words, allowed)?;
    }
    Some(suffices)
}

fn one(words: &mut &[&str], allowed: &dyn Fn(&str) -> bool) -> Option<bool> {
    let (word, rest) = split(words)?;
    *words = rest;
    match word {
        "(" => {
            let suffices = either(words, allowed)?;
            let (")", rest) = split(words)? else { return None };
            *words = rest;
            Some(suffices)
        }
        ")" | "OR" | "AND" | "WITH" => None,
        licence => match split(words) {
            // An exception is part of a licence's name here: it is allowed or not as such.
            Some(("WITH", rest)) => {
                let (exception, rest) = split(rest)?;
                *words = rest;
                Some(allowed(&format!("{licence} WITH {exception}")))
            }
            _ => Some(allowed(licence)),
        },
    }
}

fn split<'w, 's>(words: &'w [&'s str]) -> Option<(&'s str, &'w [&'s str])> {
    words.split_first().map(|(first, rest)| (*first, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_mit(expression: &str) -> bool {
        suffices(expression, &|licence| licence == "MIT" || licence == "Zlib").unwrap()
    }

    #[test]
    fn one_of_a_choice_suffices() {
        assert!(with_mit("MIT"));
        assert!(with_mit("GPL-3.0-only OR MIT"));
        assert!(with_mit("Apache-2.0/MIT"));
        assert!(with_mit("Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT"));
        assert!(!with_mit("GPL-3.0-only"));
        assert!(!with_mit("GPL-2.0 OR Apache-2.0"));
    }

    #[test]
    fn all_of_a_sum_are_needed() {
        assert!(with_mit("MIT AND Zlib"));
        assert!(!with_mit("MIT AND GPL-3.0-only"));
        assert!(!with_mit("(MIT OR Apache-2.0) AND Unicode-3.0"));
        assert!(with_mit("MIT OR Apache-2.0 AND Unicode-3.0"));
        assert!(!with_mit("(MIT OR GPL-2.0) AND (GPL-3.0-only OR Apache-2.0)"));
    }

    #[test]
    fn an_exception_makes_another_licence() {
        assert!(!with_mit("MIT WITH Classpath-exception-2.0"));
        assert!(suffices("A WITH B", &|licence| licence == "A WITH B").unwrap());
    }

    #[test]
    fn a_malformed_expression_is_refused() {
        for text in ["", "MIT OR", "(MIT", "MIT)", "AND MIT", "MIT Zlib", "MIT WITH"] {
            assert!(suffices(text, &|_| true).is_err(), "{text}");
        }
    }
}
