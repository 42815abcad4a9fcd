//! Every public type of the library has an example, or a line that begins with `Example:` and links to one. So have
//! its methods and functions (`methods.rs`).

mod methods;

use std::fs;
use std::path::{Path, PathBuf};

/// Files whose types no program names: their modules are private, or hidden.
const INTERNAL: [&str; 4] = ["sync/lock.rs", "bench", "litmus.rs", "scripted"];

/// Traits that seal others, a type that one of them names, and the names of macros' arguments, which are no names.
const SEALS: [&str; 7] = ["", "Append", "HasSge", "LendInSlot", "Placement", "Sealed", "SrqInner"];

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("the sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { sources(&path, found) } else { found.push(path) }
    }
}

/// The name of the public type that the line declares.
fn declared(line: &str) -> Option<&str> {
    let item = line.trim_start().strip_prefix("pub ")?;
    let item = item.strip_prefix("unsafe ").unwrap_or(item);
    let name =
        ["struct ", "enum ", "trait "].iter().find_map(|keyword| item.strip_prefix(keyword))?;
    name.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

/// The public types without an example among the lines of a file.
fn without_example(text: &str) -> Vec<&str> {
    let (mut found, mut shown) = (Vec::new(), false);
    for line in text.lines() {
        match line.trim_start().strip_prefix("///") {
            Some(text) => {
                let text = text.trim_start();
                shown |= text.starts_with("```") || text.starts_with("Example: [");
                shown |= text.contains("examples/");
            }
            None => match declared(line) {
                Some(name) if !shown => found.push(name),
                // Attributes stand between the documentation and the type.
                None if line.trim_start().starts_with(['#', ')', '"']) => {}
                None if line.contains("reason = ") => {}
                _ => shown = false,
            },
        }
    }
    found
}

#[test]
fn a_type_without_an_example_is_found() {
    let text = "/// A.\n///\n/// ```\n/// a();\n/// ```\n#[derive(Debug)]\npub struct A;\n\n/// B.\npub enum B {\n\
                /// Example: [`A`].\n    C,\n}\n\n/// D.\n///\n/// Example: [`A`].\npub unsafe trait D {\n";
    assert_eq!(without_example(text), ["B"]);
}

#[test]
fn every_public_type_has_an_example_or_a_link_to_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut missing = Vec::new();
    for file in files {
        let name = file.strip_prefix(&root).expect("below src").display().to_string();
        if INTERNAL.iter().any(|internal| name.contains(internal)) || name.contains("tests") {
            continue;
        }
        let text = fs::read_to_string(&file).expect("a source file");
        let kinds = without_example(&text).into_iter().filter(|kind| !SEALS.contains(kind));
        missing.extend(kinds.map(|kind| format!("{name}: {kind}")));
    }
    assert!(missing.is_empty(), "no example, nor a link to one:\n{}", missing.join("\n"));
}
