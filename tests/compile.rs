//! What must not compile, and why it is for that reason that it does not: each program has a twin
//! that differs from it by one token and compiles.
//!
//! `TRYBUILD=overwrite cargo test --test compile` writes the expected messages anew.

use std::fs;
use std::path::{Path, PathBuf};

fn programs(ending: &str) -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compile");
    let mut found: Vec<PathBuf> = fs::read_dir(directory)
        .expect("the programs")
        .map(|entry| entry.expect("a program").path())
        .filter(|path| path.to_string_lossy().ends_with(ending))
        .collect();
    found.sort();
    found
}

/// Words and single signs; layout does not matter.
fn tokens(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    let mut tokens: Vec<String> = Vec::new();
    let mut in_word = false;
    for sign in text.chars() {
        let word = sign.is_alphanumeric() || sign == '_';
        match tokens.last_mut() {
            Some(last) if word && in_word => last.push(sign),
            _ if sign.is_whitespace() => {}
            _ => tokens.push(sign.into()),
        }
        in_word = word;
    }
    tokens
}

#[test]
fn twins_differ_by_one_token() {
    let programs = programs(".fail.rs");
    assert!(programs.len() >= 13, "{programs:?}");
    for program in programs {
        let twin = PathBuf::from(program.to_string_lossy().replace(".fail.rs", ".pass.rs"));
        let (fails, passes) = (tokens(&program), tokens(&twin));
        let alike = fails.iter().zip(&passes).take_while(|(a, b)| a == b).count();
        let (fails, passes) = (&fails[alike..], &passes[alike..]);
        let behind = fails.iter().rev().zip(passes.iter().rev()).take_while(|(a, b)| a == b);
        let behind = behind.count().min(fails.len()).min(passes.len());
        let (fails, passes) = (fails.len() - behind, passes.len() - behind);
        assert!(fails <= 1 && passes <= 1 && fails + passes > 0, "{program:?}: {fails}, {passes}");
    }
}

#[test]
fn what_must_not_compile_does_not() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/compile/*.fail.rs");
    cases.pass("tests/compile/*.pass.rs");
}
