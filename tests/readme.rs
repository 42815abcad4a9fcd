//! The README is short, and its first program is an example, so that it is compiled, and run by the lab.

/// The first block of Rust, without the attribute that keeps it from being compiled twice.
fn first_program(text: &str) -> &str {
    let (_, rest) = text.split_once("```rust,ignore\n").expect("a program");
    rest.split_once("```").expect("its end").0
}

/// Someone who decides whether to use the library reads it in three minutes.
#[test]
fn the_readme_has_at_most_150_lines() {
    let lines = include_str!("../README.md").lines().count();
    assert!(lines <= 150, "{lines} lines");
}

#[test]
fn the_first_program_is_the_example() {
    let readme = include_str!("../README.md");
    let at = readme.find("```rust").expect("a program");
    assert!(readme[at..].starts_with("```rust,ignore\n"), "the first one is not compiled here");
    let example = include_str!("../examples/echo.rs");
    let (_, program) = example.split_once("\n\n").expect("what it is, and then the program");
    assert_eq!(first_program(readme), program);
}
