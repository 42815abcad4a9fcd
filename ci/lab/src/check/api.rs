//! The public API of the published packages, compared with the one that `ci/api` records.
//!
//! rustdoc describes a package as JSON, and `public-api` makes a line of each item. This file shortens
//! the lines: all traits of a type share one, and methods of a trait are left out. The compiler is the
//! oldest one that the packages support, so a newer compiler on the machine changes nothing.

use super::row::{self, CheckRow};
use crate::packages::toolchain::Toolchain;
use crate::run::outcome::TestOutcome;
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use public_api::{Builder, PublicItem};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

/// Formats of rustdoc's JSON that `public-api` was seen to read whole.
const FORMATS: [u32; 2] = [36, 37];
/// Lines of each kind of difference that a report shows.
const SHOWN: usize = 40;
/// Traits that say nothing that a user relies on.
const NEEDLESS: [&str; 5] =
    ["Freeze", "RefUnwindSafe", "StructuralPartialEq", "UnwindSafe", "UseCloned"];

/// Compares a package's public API with the recorded one, or records it.
pub(super) fn check(
    workspace: &Workspace,
    toolchain: &Toolchain,
    package: &str,
    bless: bool,
) -> CheckRow {
    row::timed(&format!("API of {package}"), || {
        let Some(now) = (match describe(workspace, toolchain, package)? {
            Ok(json) => render(&json)?,
            Err(message) => return Ok(TestOutcome::Failed(message)),
        }) else {
            return Ok(TestOutcome::Skipped(format!(
                "[rustdoc] the JSON of {toolchain} has another format than {FORMATS:?}, which the \
                 lab reads"
            )));
        };
        let path = recorded(workspace, package);
        if bless {
            fs::write(&path, now).with_context(|| format!("write {}", path.display()))?;
            return Ok(TestOutcome::Passed);
        }
        let Ok(before) = fs::read_to_string(&path) else {
            return Ok(TestOutcome::Failed(format!(
                "ci/api/{package}.txt cannot be read: `cargo ci check --bless` writes it"
            )));
        };
        Ok(match Difference::between(&before, &now) {
            Some(difference) => TestOutcome::Failed(difference.told(package)),
            None => TestOutcome::Passed,
        })
    })
}

/// The file that records a package's API.
fn recorded(workspace: &Workspace, package: &str) -> PathBuf {
    workspace.root().join("ci/api").join(format!("{package}.txt"))
}

/// The file in which rustdoc describes a package, or the message with which rustdoc fails.
fn describe(
    workspace: &Workspace,
    toolchain: &Toolchain,
    package: &str,
) -> Result<std::result::Result<PathBuf, String>> {
    let mut command = toolchain.cargo(workspace.root(), &workspace.lab_directory()?)?;
    command.args(["rustdoc", "--quiet", "--locked", "--lib", "--all-features"]);
    command.args(["--package", package, "--", "-Z", "unstable-options", "--output-format", "json"]);
    // `docs` judges the text.
    command.args(["--cap-lints", "allow"]);
    if let TestOutcome::Failed(message) = row::succeeds(command)? {
        return Ok(Err(message));
    }
    let name = format!("doc/{}.json", package.replace('-', "_"));
    Ok(Ok(toolchain.target_directory(&workspace.lab_directory()?)?.join(name)))
}

/// The lines of an API; `None` if the format of the JSON is unknown.
fn render(json: &Path) -> Result<Option<String>> {
    #[derive(Deserialize)]
    struct Head {
        format_version: u32,
    }
    let text = fs::read_to_string(json).with_context(|| format!("read {}", json.display()))?;
    let head: Head = serde_json::from_str(&text)?;
    if !FORMATS.contains(&head.format_version) {
        return Ok(None);
    }
    let api = Builder::from_rustdoc_json(json)
        .omit_blanket_impls(true)
        .build()
        .with_context(|| format!("understand {}", json.display()))?;
    let items: Vec<&PublicItem> = api.items().collect();
    // The trait lists its methods; the implementation chooses only types.
    let of_traits: BTreeSet<u32> = items
        .iter()
        .filter(|item| Implementation::parse(&item.to_string()).is_some())
        .map(|item| item.id().0)
        .collect();
    let lines = items
        .iter()
        .map(|item| {
            (item.to_string(), item.parent_id().is_some_and(|id| of_traits.contains(&id.0)))
        })
        .filter(|(line, in_trait)| {
            !in_trait || (line.starts_with("pub type ") && !line.contains("::PointerMetadata ="))
        })
        .map(|(line, _)| short(&line));
    let lines = joined(lines);
    if lines.is_empty() {
        bail!("{} describes nothing public", json.display());
    }
    Ok(Some(lines.iter().fold(String::new(), |text, line| text + line + "\n")))
}

/// The head of an implementation of a trait, in its parts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Implementation<'l> {
    /// The parameters behind `impl`.
    generics: &'l str,
    /// One trait, or some with plus signs between them.
    traits: &'l str,
    /// The type, with the conditions behind it.
    subject: &'l str,
}

impl<'l> Implementation<'l> {
    fn parse(line: &'l str) -> Option<Self> {
        let rest = line.strip_prefix("impl")?;
        let (generics, rest) = match rest.strip_prefix('<') {
            Some(_) => rest.split_at(split_outside(rest, "> ")? + 1),
            None => ("", rest),
        };
        let at = split_outside(rest, " for ")?;
        let (traits, subject) = (rest[..at].trim(), rest[at + " for ".len()..].trim());
        // A condition without parameters always holds: derives of `zerocopy` write such ones.
        let subject = match generics {
            "" => subject.split_once(" where ").map_or(subject, |(subject, _)| subject),
            _ => subject,
        };
        Some(Self { generics, traits, subject })
    }

    /// Each trait by itself.
    fn each(self) -> impl Iterator<Item = String> {
        let mut rest = Some(self.traits);
        std::iter::from_fn(move || {
            let text = rest?;
            let (one, others) = match split_outside(text, " + ") {
                Some(at) => (&text[..at], Some(&text[at + " + ".len()..])),
                None => (text, None),
            };
            rest = others;
            Some(format!("impl{} {one} for {}", self.generics, self.subject))
        })
    }
}

/// Where `pattern` first stands in `text` outside of all brackets; one that begins with `>` closes
/// the first bracket.
fn split_outside(text: &str, pattern: &str) -> Option<usize> {
    let mut depth = 0;
    let mut before = ' ';
    for (at, character) in text.char_indices() {
        match character {
            '<' | '(' | '[' => depth += 1,
            '>' if before == '-' => {}
            '>' | ')' | ']' => depth -= 1,
            _ => {}
        }
        if depth == 0 && text[at..].starts_with(pattern) {
            return Some(at);
        }
        before = character;
    }
    None
}

/// A line with names of the standard library as programs write them, without their modules.
fn short(line: &str) -> String {
    let part_of_name = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let mut text = String::new();
    let mut rest = line;
    while !rest.is_empty() {
        let end = rest.find(|c| !part_of_name(c)).unwrap_or(rest.len());
        let (name, others) = rest.split_at(end);
        let standard = ["core::", "alloc::", "std::"].iter().any(|krate| name.starts_with(krate));
        match name.rsplit_once("::") {
            Some((_, last)) if standard && !last.is_empty() => text.push_str(last),
            _ => text.push_str(name),
        }
        let between = others.find(part_of_name).unwrap_or(others.len());
        text.push_str(&others[..between]);
        rest = &others[between..];
    }
    text
}

/// Joins all traits of a type to one line, and leaves out the traits that say nothing.
fn joined(lines: impl Iterator<Item = String>) -> Vec<String> {
    let mut traits: BTreeMap<(String, String), (usize, BTreeSet<String>)> = BTreeMap::new();
    let mut all: Vec<Option<String>> = Vec::new();
    for line in lines {
        if let Some(parts) = Implementation::parse(&line) {
            if !NEEDLESS.contains(&parts.traits.trim_start_matches('!')) {
                let key = (parts.generics.to_owned(), parts.subject.to_owned());
                let (_, names) = traits.entry(key).or_insert_with(|| {
                    all.push(None);
                    (all.len() - 1, BTreeSet::new())
                });
                names.insert(parts.traits.to_owned());
            }
        } else if !line.starts_with("impl ") {
            // The head of an implementation is of interest only where it has parameters.
            all.push(Some(line));
        }
    }
    for ((generics, subject), (at, names)) in traits {
        let names: Vec<String> = names.into_iter().collect();
        all[at] = Some(format!("impl{generics} {} for {subject}", names.join(" + ")));
    }
    let mut seen = BTreeSet::new();
    all.into_iter().flatten().filter(|line| seen.insert(line.clone())).collect()
}

/// The difference between two versions of an API.
#[derive(Debug, Default, PartialEq, Eq)]
struct Difference {
    removed: Vec<String>,
    changed: Vec<(String, String)>,
    added: Vec<String>,
}

impl Difference {
    /// `None` if both are the same.
    fn between(before: &str, now: &str) -> Option<Self> {
        let (before, now) = (facts(before), facts(now));
        let mut added: BTreeMap<&str, Vec<&String>> = BTreeMap::new();
        for fact in now.difference(&before) {
            added.entry(path(fact)).or_default().push(fact);
        }
        let mut difference = Self::default();
        for fact in before.difference(&now) {
            match added.get_mut(path(fact)).and_then(Vec::pop) {
                Some(successor) => difference.changed.push((fact.clone(), successor.clone())),
                None => difference.removed.push(fact.clone()),
            }
        }
        difference.added = added.into_values().flatten().cloned().collect();
        (difference != Self::default()).then_some(difference)
    }

    /// Whether a program that uses the API may no longer compile.
    fn breaks(&self) -> bool {
        !self.removed.is_empty() || !self.changed.is_empty()
    }

    fn told(&self, package: &str) -> String {
        let Self { removed, changed, added } = self;
        let counts =
            format!("{} removed, {} changed, {} added", removed.len(), changed.len(), added.len());
        let meaning = if self.breaks() {
            "what is removed or changed breaks programs: the next version raises its second number \
             (its first from 1.0 on), and CHANGELOG.md says what to write instead"
        } else {
            "nothing that was there is gone: the next version may be a patch"
        };
        let changed: Vec<String> =
            changed.iter().map(|(before, now)| format!("{before}\n    now {now}")).collect();
        let mut text = format!(
            "the public API of {package} is another than ci/api/{package}.txt says: {counts}\n\
             {meaning}\n"
        );
        for (sign, lines) in [("-", removed), ("~", &changed), ("+", added)] {
            for line in lines.iter().take(SHOWN) {
                let _infallible = writeln!(text, "  {sign} {line}");
            }
            if lines.len() > SHOWN {
                let _infallible = writeln!(text, "  {sign} and {} more", lines.len() - SHOWN);
            }
        }
        text + "if that is meant, `cargo ci check --bless` records it, and the commit contains \
                the file"
    }
}

/// The lines of a recorded API, with each trait of a type by itself.
fn facts(text: &str) -> BTreeSet<String> {
    text.lines()
        .flat_map(|line| match Implementation::parse(line) {
            Some(parts) => parts.each().collect(),
            None => vec![line.to_owned()],
        })
        .collect()
}

/// The path of the item that a line describes; the whole line of an implementation.
fn path(line: &str) -> &str {
    if line.starts_with("impl") {
        return line;
    }
    let start = line.find("::").map_or(0, |at| line[..at].rfind(' ').map_or(0, |space| space + 1));
    let rest = &line[start..];
    let end = ["(", ": ", " "].iter().filter_map(|end| rest.find(end)).min();
    &rest[..end.unwrap_or(rest.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "pub struct a::Key(_)\n\
                          impl<'a> Clone + From<a::X<u8, ()>> + !Send for a::Key<'a>\n\
                          pub fn a::Key::get(&self) -> u8\n\
                          pub fn a::Key::old(&self)\n";

    #[test]
    fn an_api_that_stays_is_no_difference() {
        assert_eq!(Difference::between(BEFORE, BEFORE), None);
    }

    #[test]
    fn removed_changed_and_added_items_are_told_apart() {
        let now = BEFORE
            .replace("get(&self) -> u8", "get(&mut self) -> u16")
            .replace("pub fn a::Key::old(&self)\n", "pub fn a::Key::new() -> Self\n");
        let difference = Difference::between(BEFORE, &now).unwrap();
        assert_eq!(difference.removed, ["pub fn a::Key::old(&self)"]);
        assert_eq!(difference.added, ["pub fn a::Key::new() -> Self"]);
        let [(before, after)] = &difference.changed[..] else { panic!("{difference:?}") };
        assert_eq!(before, "pub fn a::Key::get(&self) -> u8");
        assert_eq!(after, "pub fn a::Key::get(&mut self) -> u16");
        let told = difference.told("a");
        assert!(told.contains("1 removed, 1 changed, 1 added"), "{told}");
        assert!(told.contains("raises its second number"), "{told}");
        assert!(told.contains("\n  - pub fn a::Key::old(&self)\n"), "{told}");
        assert!(told.contains("cargo ci check --bless"), "{told}");
    }

    #[test]
    fn a_trait_that_is_lost_is_named_by_itself() {
        let now = BEFORE.replace("Clone + ", "").replace("!Send", "Send");
        let difference = Difference::between(BEFORE, &now).unwrap();
        let lost = ["impl<'a> !Send for a::Key<'a>", "impl<'a> Clone for a::Key<'a>"];
        assert_eq!(difference.removed, lost);
        assert_eq!(difference.added, ["impl<'a> Send for a::Key<'a>"]);
        assert!(difference.breaks());
    }

    #[test]
    fn an_addition_breaks_nothing() {
        let now = format!("{BEFORE}pub const a::MORE: u8\n");
        let difference = Difference::between(BEFORE, &now).unwrap();
        assert!(!difference.breaks());
        assert!(difference.told("a").contains("may be a patch"));
    }

    #[test]
    fn traits_of_a_type_are_one_line() {
        let lines = [
            "pub struct a::Key(_)",
            "impl a::Key",
            "pub fn a::Key::get(&self)",
            "impl Copy for a::Key",
            "impl Clone for a::Key where u8: Clone",
            "impl Freeze for a::Key",
            "impl !UnwindSafe for a::Key",
            "impl<T> Sync for a::Box<T> where T: Send",
            "impl<T: Copy> a::Box<T>",
        ];
        assert_eq!(
            joined(lines.iter().map(|&line| line.to_owned())),
            [
                "pub struct a::Key(_)",
                "pub fn a::Key::get(&self)",
                "impl Clone + Copy for a::Key",
                "impl<T> Sync for a::Box<T> where T: Send",
                "impl<T: Copy> a::Box<T>",
            ]
        );
    }

    #[test]
    fn names_of_the_standard_library_are_short() {
        assert_eq!(
            short("pub fn a::core::f(x: core::option::Option<&std::io::Error>) -> a::Result<()>"),
            "pub fn a::core::f(x: Option<&Error>) -> a::Result<()>"
        );
    }

    #[test]
    fn arrows_and_bounds_of_lifetimes_do_not_end_a_head() {
        let line = "impl<F: for<'a> Fn(&'a u8) -> u8> a::Run<dyn Fn() -> u8> for a::X<F>";
        let parts = Implementation::parse(line).unwrap();
        assert_eq!(parts.generics, "<F: for<'a> Fn(&'a u8) -> u8>");
        assert_eq!((parts.traits, parts.subject), ("a::Run<dyn Fn() -> u8>", "a::X<F>"));
        assert_eq!(Implementation::parse("impl<T> a::X<T>"), None);
    }
}
