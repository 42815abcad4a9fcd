//! Licences as packages name them: expressions of SPDX, with the older `A/B` for a choice.

use anyhow::{Context, Result};
use spdx::{Expression, ParseMode};

/// Whether the allowed licences suffice to use a package under this expression. An exception is part of a
/// licence's name here: it is allowed or not as such.
pub(super) fn suffices(expression: &str, allowed: &dyn Fn(&str) -> bool) -> Result<bool> {
    let mode =
        ParseMode { allow_slash_as_or_operator: true, allow_deprecated: true, ..ParseMode::STRICT };
    let parsed = Expression::parse_mode(expression, mode)
        .with_context(|| format!("{expression:?} is no licence expression of SPDX"))?;
    Ok(parsed.evaluate(|licence| allowed(&licence.to_string())))
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
        let apache = "Apache-2.0 WITH LLVM-exception";
        assert!(suffices(apache, &|licence| licence == apache).unwrap());
    }

    #[test]
    fn a_malformed_expression_is_refused() {
        for text in ["", "MIT OR", "(MIT", "MIT)", "AND MIT", "MIT Zlib", "MIT WITH"] {
            assert!(suffices(text, &|_| true).is_err(), "{text}");
        }
    }
}
