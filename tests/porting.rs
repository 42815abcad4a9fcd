//! The tables from C verbs to this library's functions name each C function that is an alias in the documentation, and
//! no other one.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The documents that have the tables.
const TABLES: [&str; 2] = ["src/porting.rs", "src/cm.rs"];

fn is_function_of_c(name: &str) -> bool {
    ["ibv_", "mlx5dv_", "rdma_"].iter().any(|prefix| name.starts_with(prefix))
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// The functions and structs of C in the first column of the tables.
fn in_tables(text: &str) -> BTreeSet<String> {
    let rows = text.lines().filter_map(|line| line.strip_prefix("//! | "));
    let cells = rows.filter_map(|row| row.split(" | ").next());
    let words = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    let names = words.map(|word| word.rsplit(' ').next().unwrap_or(word));
    names.filter(|name| is_function_of_c(name)).map(str::to_owned).collect()
}

/// The C functions that are aliases: those of functions, and all of them.
fn aliases(text: &str) -> [BTreeSet<String>; 2] {
    let [mut of_functions, mut all] = [BTreeSet::new(), BTreeSet::new()];
    let (mut pending, mut open) = (Vec::new(), false);
    for line in text.lines().map(str::trim_start) {
        if open || line.starts_with("#[doc(alias") {
            let names = line.split('"').skip(1).step_by(2).filter(|name| is_function_of_c(name));
            pending.extend(names.map(str::to_owned));
            open = !line.ends_with(']');
        } else if line.starts_with("pub ") || line.contains("fn ") && !line.starts_with('/') {
            // The documentation's search has no aliases of private items.
            if !line.starts_with("pub ") {
                pending.clear();
                continue;
            }
            let is_function = line.contains("fn ");
            for name in pending.drain(..) {
                if is_function {
                    of_functions.insert(name.clone());
                }
                all.insert(name);
            }
        }
    }
    [of_functions, all]
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("the sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { sources(&path, found) } else { found.push(path) }
    }
}

#[test]
fn tables_and_aliases_are_read() {
    let text = "//! | `ibv_one`, `ibv_two` | `ibv_not` |\n//! | `IBV_NO` of `struct ibv_s` | |\nibv_text\n";
    assert_eq!(in_tables(text).into_iter().collect::<Vec<_>>(), ["ibv_one", "ibv_s", "ibv_two"]);
    let text = "#[doc(alias = \"ibv_one\")]\n/// text\npub fn f() {\n#[doc(alias(\n\"rdma_s\",\n\"RDMA_S\"\n))]\n\
                #[derive(Debug)]\npub struct S {\n#[doc(alias = \"ibv_private\")]\nfn g() {\n";
    let [of_functions, all] = aliases(text).map(|names| names.into_iter().collect::<Vec<_>>());
    assert_eq!(
        (of_functions, all),
        (vec!["ibv_one".into()], vec!["ibv_one".into(), "rdma_s".into()])
    );
}

#[test]
fn every_verb_of_c_has_a_row_and_an_alias() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &Path| fs::read_to_string(path).expect("a source file");
    let tables: BTreeSet<String> =
        TABLES.iter().flat_map(|table| in_tables(&read(&root.join(table)))).collect();
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    let [mut of_functions, mut all] = [BTreeSet::new(), BTreeSet::new()];
    for file in &files {
        let [more_of_functions, more] = aliases(&read(file));
        of_functions.extend(more_of_functions);
        all.extend(more);
    }
    assert!(of_functions.len() > 150, "{}", of_functions.len());
    let no_row: Vec<_> = of_functions.difference(&tables).collect();
    assert!(no_row.is_empty(), "aliases without a row in {TABLES:?}: {no_row:?}");
    let no_alias: Vec<_> = tables.difference(&all).collect();
    assert!(no_alias.is_empty(), "rows without an alias in src: {no_alias:?}");
}

/// Every function of libmlx5 has a row, or stands among those that are not here, by itself or by a pattern with a star.
#[test]
fn every_function_of_libmlx5_is_here_or_has_a_reason() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| fs::read_to_string(root.join(path)).expect("a file of the repository");
    let porting = read("src/porting.rs");
    let rows = in_tables(&porting);
    let (_, rest) = porting.split_once("//! ## Not here").expect("the section");
    let (rest, _) = rest.split_once("//! # ").expect("the next one");
    let patterns: Vec<&str> = rest.split('`').skip(1).step_by(2).collect();
    let is_there = |name: &str| {
        rows.contains(name)
            || patterns.iter().any(|pattern| match pattern.split_once('*') {
                Some((start, end)) => {
                    name.len() >= start.len() + end.len()
                        && name.starts_with(start)
                        && name.ends_with(end)
                }
                None => *pattern == name,
            })
    };
    let list = read("tests/golden/mlx5dv.txt");
    let functions: Vec<&str> = list.lines().filter(|line| !line.starts_with('#')).collect();
    assert!(functions.len() > 150 && functions.iter().all(|name| is_function_of_c(name)));
    let missing: Vec<&str> = functions.into_iter().filter(|name| !is_there(name)).collect();
    assert!(missing.is_empty(), "src/porting.rs says nothing of {missing:?}");
}
