//! The documents of the repository name only files and headings that exist.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The beginnings by which a path in code style is known as one of this repository.
const FOLDERS: &[&str] = &["ci/", "cli/", "docs/", "examples/", "src/", "tests/", "uapi/"];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The Markdown files below a folder, without those that a build wrote.
fn documents(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            documents(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

/// The lines outside of code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        (!code && !fence).then_some((at + 1, line))
    })
}

/// The targets of a line's links.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target)
}

/// The texts of a line in code style.
fn code(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// The fragment by which a heading is linked to: lower case, spaces as `-`, punctuation left out.
fn fragment(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    text.chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn headings(text: &str) -> HashSet<String> {
    prose(text).filter(|(_, line)| line.starts_with('#')).map(|(_, line)| fragment(line)).collect()
}

/// The fault of a link of the document at `path`; `None` if it leads somewhere, or out of the repository.
fn missing(path: &Path, text: &str, target: &str) -> Option<&'static str> {
    if target.contains("://") {
        return None;
    }
    let (file, heading) = target.split_once('#').unwrap_or((target, ""));
    let to = path.parent().unwrap().join(file);
    if !file.is_empty() && !to.exists() {
        return Some("no such file");
    }
    if heading.is_empty() {
        return None;
    }
    let there = if file.is_empty() { text.into() } else { fs::read_to_string(to).unwrap() };
    (!headings(&there).contains(heading)).then_some("no such heading")
}

/// Whether a text in code style is a path of this repository that does not exist. It may be named from
/// the root or from the document's own folder.
fn is_stale(path: &Path, text: &str) -> bool {
    let is_path = FOLDERS.iter().any(|folder| text.starts_with(folder))
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
    is_path && !workspace().join(text).exists() && !path.parent().unwrap().join(text).exists()
}

/// The faults of a document, a line each.
fn faults(path: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if line.starts_with("<<<<<<< ") || line.starts_with(">>>>>>> ") {
            found.push(format!("{}:{}: two versions of a merge", path.display(), at + 1));
        }
    }
    for (at, line) in prose(text) {
        for target in links(line) {
            if let Some(why) = missing(path, text, target) {
                found.push(format!("{}:{at}: {target}: {why}", path.display()));
            }
        }
        for text in code(line).filter(|text| is_stale(path, text)) {
            found.push(format!("{}:{at}: {text}: no such file", path.display()));
        }
    }
    found
}

#[test]
fn every_link_and_path_of_a_document_leads_somewhere() {
    let mut paths = Vec::new();
    documents(&workspace(), &mut paths);
    assert!(paths.len() > 8, "these are not the documents: {paths:?}");
    let of = |path: &PathBuf| faults(path, &fs::read_to_string(path).unwrap());
    let found: Vec<String> = paths.iter().flat_map(of).collect();
    assert!(found.is_empty(), "{} lead nowhere:\n{}", found.len(), found.join("\n"));
}

#[test]
fn a_link_or_a_path_that_leads_nowhere_is_named_with_its_line() {
    let path = workspace().join("docs/imagined.md");
    let text = "# The lab, `here`\n[a](../README.md) [b](missing.md) [c](https://example.org/x)\n\
                [d](#the-lab-here) [e](#elsewhere) [f](../README.md#safety) [g](../README.md#no)\n\
                ```\n[h](missing.md)\n```\n`src/lib.rs` `src/missing.rs` `ci/<noun>.rs` `hw/cq.c`\n\
                <<<<<<< ours\n";
    let at = |line: &str| format!("{}:{line}", path.display());
    let expected = [
        at("8: two versions of a merge"),
        at("2: missing.md: no such file"),
        at("3: #elsewhere: no such heading"),
        at("3: ../README.md#no: no such heading"),
        at("7: src/missing.rs: no such file"),
    ];
    assert_eq!(faults(&path, text), expected);
}
