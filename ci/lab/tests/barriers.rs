//! The table of barriers in `docs/ARCHITECTURE.md` names functions, litmus tests and tests that exist, and each use of
//! a device's barrier has its row.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The document, and the heading below which its table is.
const DOCUMENT: &str = "docs/ARCHITECTURE.md";
const HEADING: &str = "## Order";
/// The file that has the device's barriers, below `src`.
const BARRIERS: &str = "memory/barrier.rs";
/// The words of an access that orders.
const ORDERS: [&str; 3] = ["Acquire", "Release", "AcqRel"];

/// A function of the library or of its unit tests.
#[derive(Clone, Debug)]
struct Function {
    /// Below `src`.
    file: String,
    name: String,
    /// The type of the `impl` around it.
    owner: Option<String>,
    is_test: bool,
    /// Whether only tests, loom's among them, compile it.
    for_tests: bool,
    /// The words of its body.
    words: BTreeSet<String>,
}

/// The surroundings of a function.
#[derive(Clone, Default)]
struct Around {
    owner: Option<String>,
    for_tests: bool,
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn words(stream: TokenStream, into: &mut BTreeSet<String>) {
    for token in stream {
        match token {
            TokenTree::Ident(word) => drop(into.insert(word.to_string())),
            TokenTree::Group(group) => words(group.stream(), into),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

/// The functions of the files of a folder; `below` is its path.
fn functions_below(folder: &Path, below: &str, found: &mut Vec<Function>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = format!("{below}{}", path.file_name().unwrap().to_str().unwrap());
        if path.is_dir() {
            functions_below(&path, &format!("{name}/"), found);
        } else if name.ends_with(".rs") {
            functions_of(&name, &fs::read_to_string(&path).unwrap(), found);
        }
    }
}

fn functions_of(file: &str, text: &str, found: &mut Vec<Function>) {
    let for_tests = file.ends_with("/tests.rs") || file.contains("tests/");
    functions(file, text.parse().unwrap(), &Around { for_tests, ..Around::default() }, found);
}

/// The functions of a file, or of the braces of an `impl`, a `trait` or a `mod`.
fn functions(file: &str, stream: TokenStream, around: &Around, found: &mut Vec<Function>) {
    let is_brace = |group: &proc_macro2::Group| group.delimiter() == Delimiter::Brace;
    let tokens: Vec<TokenTree> = stream.into_iter().collect();
    let (mut is_test, mut for_tests) = (false, around.for_tests);
    let mut at = 0;
    while at < tokens.len() {
        let mut item = None;
        match &tokens[at] {
            TokenTree::Ident(word) => {
                item = ["fn", "impl", "mod", "trait"].into_iter().find(|known| word == known);
            }
            TokenTree::Group(group) if group.delimiter() == Delimiter::Bracket => {
                let text: String = group.stream().to_string().split_whitespace().collect();
                is_test |= text == "test";
                let of_tests = |word| text.contains(word) && !text.contains(&format!("not({word}"));
                for_tests |= text.starts_with("cfg(") && (of_tests("test") || of_tests("loom"));
            }
            TokenTree::Group(group) if is_brace(group) => {
                (is_test, for_tests) = (false, around.for_tests)
            }
            TokenTree::Punct(sign) if sign.as_char() == ';' => {
                (is_test, for_tests) = (false, around.for_tests)
            }
            _ => {}
        }
        at += 1;
        let Some(item) = item else { continue };
        let is_end = |token: &TokenTree| match token {
            TokenTree::Group(group) => is_brace(group),
            token => token.to_string() == ";",
        };
        let Some(length) = tokens[at..].iter().position(is_end) else { break };
        let (head, end) = (&tokens[at..at + length], &tokens[at + length]);
        at += length;
        let TokenTree::Group(body) = end else { continue };
        let inner = Around { for_tests, ..Around::default() };
        match item {
            "fn" => {
                let mut inside = BTreeSet::new();
                words(body.stream(), &mut inside);
                found.push(Function {
                    file: file.to_owned(),
                    name: head[0].to_string(),
                    owner: around.owner.clone(),
                    is_test,
                    for_tests,
                    words: inside,
                });
            }
            "impl" => {
                let around = Around { owner: owner(head), ..inner };
                functions(file, body.stream(), &around, found);
            }
            _ => functions(file, body.stream(), &inner, found),
        }
    }
}

/// The type that an `impl` is of, from the text between that word and the braces.
fn owner(head: &[TokenTree]) -> Option<String> {
    let texts: Vec<String> = head.iter().map(ToString::to_string).collect();
    let (mut depth, mut name) = (0, None);
    for (at, text) in texts.iter().enumerate() {
        match (text.as_str(), &head[at]) {
            ("<", _) => depth += 1,
            (">", _) => depth -= 1,
            ("where", _) => break,
            ("for", _) if depth == 0 => name = None,
            (_, TokenTree::Ident(_)) if depth == 0 => name = Some(text.clone()),
            _ => {}
        }
    }
    name
}

/// A row of the table.
#[derive(Clone, Debug)]
struct Row {
    line: usize,
    barrier: String,
    places: Vec<Place>,
    litmus: Vec<String>,
    tests: Vec<String>,
}

/// A function as the table names it.
#[derive(Clone, Debug)]
struct Place {
    /// A file, or a folder, below `src`.
    path: String,
    owner: Option<String>,
    name: String,
}

impl Place {
    fn is(&self, function: &Function) -> bool {
        let below = |rest: &str| rest.is_empty() || rest.starts_with('/') || rest == ".rs";
        let in_file = function.file.strip_prefix(&self.path).is_some_and(below);
        let of_owner = self.owner.is_none() || self.owner == function.owner;
        in_file && of_owner && self.name == function.name && !function.for_tests
    }

    fn spelled(&self) -> String {
        let owner = self.owner.as_ref().map(|owner| format!("{owner}::")).unwrap_or_default();
        format!("{}: {owner}{}", self.path, self.name)
    }
}

/// The texts of a cell in code style, each with the text before it.
fn code(cell: &str) -> Vec<(&str, &str)> {
    let parts: Vec<&str> = cell.split('`').collect();
    parts.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()
}

fn places(cell: &str) -> Vec<Place> {
    let (mut found, mut path) = (Vec::new(), "");
    for (before, text) in code(cell) {
        if text.contains('/') {
            path = text;
            continue;
        }
        let (owner, name) = match text.split_once("::") {
            Some((owner, name)) => (Some(owner), name),
            None if before.ends_with("drop of ") => (Some(text), "drop"),
            None => (None, text),
        };
        let (path, name) = (path.to_owned(), name.to_owned());
        found.push(Place { path, owner: owner.map(str::to_owned), name });
    }
    found
}

/// The rows of the table. A row without a barrier has that of the row above.
fn rows(text: &str) -> Vec<Row> {
    let lines = text.lines().enumerate().skip_while(|(_, line)| *line != HEADING).skip(1);
    let own = lines.take_while(|(_, line)| !line.starts_with("## "));
    let mut rows: Vec<Row> = Vec::new();
    for (at, line) in own.filter(|(_, line)| line.starts_with('|')).skip(2) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let &[barrier, functions, _, litmus, tests] = &cells[..] else {
            panic!("{DOCUMENT}:{}: {} cells", at + 1, cells.len());
        };
        let barrier = match (barrier, rows.last()) {
            ("", Some(above)) => above.barrier.clone(),
            _ => barrier.to_owned(),
        };
        let of = |cell| code(cell).into_iter().map(|(_, text)| text.to_owned()).collect();
        let tests = if tests.starts_with("none: ") { Vec::new() } else { of(tests) };
        rows.push(Row {
            line: at + 1,
            barrier,
            places: places(functions),
            litmus: of(litmus),
            tests,
        });
    }
    rows
}

/// The faults of the table, a line each.
fn faults(text: &str, functions: &[Function], litmus: &BTreeSet<String>) -> Vec<String> {
    let (rows, mut found) = (rows(text), Vec::new());
    let is_barrier = |name: &str| {
        functions
            .iter()
            .any(|known| known.file == BARRIERS && known.name == name && !known.for_tests)
    };
    for row in &rows {
        let named = row.barrier.trim_matches('`');
        let orders = |function: &&Function| match is_barrier(named) {
            true => function.words.contains(named),
            false => ORDERS.iter().any(|order| function.words.contains(*order)),
        };
        let mut say = |text: String| found.push(format!("{DOCUMENT}:{}: {text}", row.line));
        if row.places.is_empty() {
            say("no function".into());
        }
        for place in &row.places {
            let mut there = functions.iter().filter(|function| place.is(function)).peekable();
            if there.peek().is_none() {
                say(format!("{}: no such function", place.spelled()));
            } else if there.find(orders).is_none() {
                say(format!("{} has no {}", place.spelled(), row.barrier));
            }
        }
        for name in row.litmus.iter().filter(|name| !litmus.contains(*name)) {
            say(format!("{name}: no such litmus test"));
        }
        let is_test =
            |name: &&String| functions.iter().any(|known| known.is_test && known.name == **name);
        for name in row.tests.iter().filter(|name| !is_test(name)) {
            say(format!("{name}: no such test"));
        }
    }
    for function in
        functions.iter().filter(|function| function.file != BARRIERS && !function.for_tests)
    {
        for barrier in function.words.iter().filter(|word| is_barrier(word)) {
            let is_row = |row: &&Row| {
                row.barrier.trim_matches('`') == barrier
                    && row.places.iter().any(|place| place.is(function))
            };
            if rows.iter().find(is_row).is_none() {
                found.push(format!(
                    "{}: {} uses {barrier}, and no row says so",
                    function.file, function.name
                ));
            }
        }
    }
    found
}

#[test]
fn the_table_of_barriers_names_what_exists_and_misses_no_use() {
    let mut functions = Vec::new();
    functions_below(&workspace().join("src"), "", &mut functions);
    let folder = fs::read_dir(workspace().join("tests/litmus/aarch64")).unwrap();
    let litmus =
        folder.map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned());
    let text = fs::read_to_string(workspace().join(DOCUMENT)).unwrap();
    assert!(rows(&text).len() > 20, "this is not the table");
    let found = faults(&text, &functions, &litmus.collect());
    assert!(found.is_empty(), "{} rows or uses are wrong:\n{}", found.len(), found.join("\n"));
}

#[test]
fn a_row_that_names_nothing_and_a_use_without_a_row_are_faults() {
    let mut functions = Vec::new();
    functions_of(BARRIERS, "fn to_device() {} fn flush() {}", &mut functions);
    let source = "impl<T> Ring<T> { fn ring(&self) { to_device(); flush() } fn other(&self) {} }
        impl<T> Drop for Ring<T> { fn drop(&mut self) { self.word.store(0, Ordering::Release) } }
        #[cfg(test)] mod tests { #[test] fn known() { flush() } fn helper() {} }";
    functions_of("queue/sq/ring.rs", source, &mut functions);
    let text = "# Order\n| a | table | of | another | heading |\n## Order\n| barrier | f | p | litmus | test |\n\
                |---|---|---|---|---|\n| `to_device` | `queue/sq/ring.rs`: `Ring::ring` | p | `post` | `known` (loom) |\n\
                | | `queue/sq`: `other`, `Rung::ring` | p | `pots` | `helper` |\n\
                | Release of `word` | `queue/sq/ring.rs`: drop of `Ring` | p | `post` | none: a reason of `it` |\n\
                | Release of `room` | `queue/sq/ring`: `other` | p | `post` | `known` |\n## More\n";
    let found = faults(text, &functions, &BTreeSet::from(["post".to_owned()]));
    let expected = [
        "docs/ARCHITECTURE.md:7: queue/sq: other has no `to_device`",
        "docs/ARCHITECTURE.md:7: queue/sq: Rung::ring: no such function",
        "docs/ARCHITECTURE.md:7: pots: no such litmus test",
        "docs/ARCHITECTURE.md:7: helper: no such test",
        "docs/ARCHITECTURE.md:9: queue/sq/ring: other has no Release of `room`",
        "queue/sq/ring.rs: ring uses flush, and no row says so",
    ];
    assert_eq!(found, expected);
}
