//! The README is short, and its program is an example. `cargo test --doc` compiles and runs it.

/// A reader decides in three minutes whether to use the library.
#[test]
fn the_readme_has_at_most_900_words() {
    let words = include_str!("../README.md").split_whitespace().count();
    assert!(words <= 900, "{words} words");
}

#[test]
fn the_program_is_the_example_hello_and_has_at_most_40_lines() {
    let readme = include_str!("../README.md");
    let (_, rest) = readme.split_once("```rust\n").expect("a program");
    let (shown, rest) = rest.split_once("```").expect("its end");
    assert!(!rest.contains("```rust"), "a second program");
    let (_, program) = include_str!("../examples/hello.rs").split_once("\n\n").expect("a program");
    assert_eq!(shown, program);
    let lines = shown.lines().count();
    assert!(lines <= 40, "{lines} lines");
}
