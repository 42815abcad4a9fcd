//! The layers of each package: a file imports only from its own layer and from those below. And the one style of
//! modules.
//!
//! Every `crate::` and `super::` path of the source counts, wherever it stands, and every call of a method
//! that one file adds to another file's type. Tests may look anywhere.

mod connectx;
mod packages;
mod roce;
mod source;

use source::Source;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// A layer: its name, and the modules that it consists of, each with its file and its folder. The longest entry
/// that fits a file decides.
type Layer = (&'static str, &'static [&'static str]);

/// From the bottom to the top; `docs/ARCHITECTURE.md` says what each is for.
const UVERBS: &[Layer] = &[
    ("base", &["abort", "error", "first_panic", "number", "identity", "platform", "sim"]),
    ("sync", &["sync"]),
    ("memory", &["memory"]),
    ("lending", &["lending"]),
    (
        "values",
        &[
            "access",
            "address_vector",
            "device/guid",
            "device_attr",
            "flow/spec",
            "port",
            "qp/attr",
            "qp/ece",
            "qp/state",
            "wc",
            "wr",
        ],
    ),
    ("kernel", &["device", "events/file", "uverbs"]),
    ("provider", &["provider"]),
    (
        "objects and sharing",
        &[
            "ah",
            "channel",
            "completion",
            "context",
            "cq",
            "dm",
            "events",
            "file",
            "flow",
            "handles",
            "mr",
            "mw",
            "object",
            "parent_domain",
            "pd",
            "port/choose",
            "port/path",
            "port/query",
            "port/reply",
            "qp",
            "sharing",
            "srq",
            "td",
            "xrcd",
        ],
    ),
    (
        "mlx5, cm and owned",
        &["bench", "cm", "litmus", "mlx5", "owned", "sharing/devx", "sharing/var"],
    ),
    ("aio", &["aio"]),
    ("the crate", &["lib", "porting"]),
];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The layer of a file, as its place in the list.
fn layer_of(layers: &[Layer], file: &str) -> Option<usize> {
    let fits = |entry: &str| {
        file.strip_prefix(entry).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
    };
    let of = |(at, layer): (usize, &Layer)| {
        layer.1.iter().filter(|entry| fits(entry)).map(|entry| (entry.len(), at)).max()
    };
    layers.iter().enumerate().filter_map(of).max().map(|(_, at)| at)
}

/// The imports that break the layers, one per line.
fn breaches(layers: &[Layer], source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    for arrow in source.arrows().into_iter().chain(source.method_arrows()) {
        match (layer_of(layers, &arrow.from), layer_of(layers, &arrow.to)) {
            (Some(from), Some(to)) if to <= from => {}
            (Some(from), Some(to)) => found.push(format!(
                "{}:{} ({}) imports {} from {} ({})",
                arrow.from, arrow.line, layers[from].0, arrow.name, arrow.to, layers[to].0
            )),
            (None, _) => found.push(format!("{} is in no layer", arrow.from)),
            (_, None) => found.push(format!("{} is in no layer", arrow.to)),
        }
    }
    found.sort();
    found.dedup();
    found
}

/// The files below `root` that are named `mod.rs`: a module `x` is `x.rs`, and its own modules are in `x/`.
fn named_mod(root: &Path) -> io::Result<Vec<PathBuf>> {
    let (mut found, mut folders) = (Vec::new(), vec![root.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                folders.push(path);
            } else if name == "mod.rs" && !is_shared_by_tests(&path) {
                found.push(path);
            }
        }
    }
    Ok(found)
}

/// Whether test programs of a package share this `mod.rs`: Cargo makes a program of each file in `tests`.
fn is_shared_by_tests(file: &Path) -> bool {
    file.ancestors().nth(2).is_some_and(|tests| {
        tests.ends_with("tests") && tests.with_file_name("Cargo.toml").is_file()
    })
}

/// The entries that are no module below `root`.
fn missing(layers: &[Layer], root: &Path) -> Vec<&'static str> {
    let entries = layers.iter().flat_map(|(_, entries)| *entries).copied();
    entries.filter(|entry| !root.join(entry).with_extension("rs").exists()).collect()
}

/// Fails unless the source below `root` has more than `least` files, and each imports only from its layer and below.
fn assert_layers(layers: &[Layer], root: &Path, least: usize) {
    let source = Source::read(root).unwrap();
    assert!(source.files().count() > least, "{} is not the whole source", root.display());
    let found = breaches(layers, &source);
    assert!(found.is_empty(), "{} imports break the layers:\n{}", found.len(), found.join("\n"));
}

/// Fails unless every entry is a module below `root`.
fn assert_entries(layers: &[Layer], root: &Path) {
    let missing = missing(layers, root);
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn no_module_is_in_a_file_named_mod() {
    let found = named_mod(&workspace()).unwrap();
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn a_file_of_the_library_imports_only_from_its_layer_and_below() {
    assert_layers(UVERBS, &workspace().join("src"), 100);
}

#[test]
fn every_entry_of_the_layers_is_a_module() {
    assert_entries(UVERBS, &workspace().join("src"));
}

#[test]
fn a_call_of_a_method_that_an_upper_file_adds_points_up() {
    let layers: &[Layer] = &[("low", &["low"]), ("high", &["high"]), ("top", &["lib"])];
    let low = "pub struct Thing<T>(T);
        struct Own;
        impl Own { fn both(&self) { self.both() } }
        impl Thing<u8> { fn f(&self) { self.added(); self.f(); self.both() } }
        fn g(own: Own, thing: Thing<u8>) { thing.added(); own.both(); own.of_trait() }
        #[cfg(test)]
        fn test(thing: Thing<u8>) { thing.added() }";
    let high = "use crate::low::Thing;
        impl<T> Thing<T> { fn added(&self) {} fn both(&self) {} }
        impl Trait for Thing { fn of_trait(&self) {} }
        struct Other;
        impl Other { fn f(&self) { self.f() } }";
    let files = [("lib.rs", "mod low;\nmod high;\n"), ("low.rs", low), ("high.rs", high)];
    let found = breaches(layers, &Source::of(&files));
    let names = [(4, "added"), (4, "both"), (5, "added")];
    let named = |(line, name)| format!("low.rs:{line} (low) imports {name} from high.rs (high)");
    assert_eq!(found, names.map(named));
}

#[test]
fn an_arrow_that_points_up_is_named_with_its_line() {
    let layers: &[Layer] = &[("low", &["low"]), ("high", &["high"])];
    let files = [
        ("lib.rs", "mod low;\nmod high;\npub use high::inner::Thing;\n"),
        ("low.rs", "//! crate::high::Thing\n\nfn f() -> crate::high::inner::Thing {}\n"),
        ("high.rs", "pub mod inner;\nuse crate::low::f;\n"),
        ("high/inner.rs", "pub struct Thing;\nfn g() { super::super::low::f() }\n"),
    ];
    let found = breaches(layers, &Source::of(&files));
    assert_eq!(found, ["low.rs:3 (low) imports Thing from high/inner.rs (high)"]);
}

#[test]
fn a_name_that_the_crate_re_exports_counts_as_where_it_is_defined() {
    let layers: &[Layer] = &[("low", &["low"]), ("high", &["high"]), ("top", &["lib"])];
    let files = [
        ("lib.rs", "mod low;\nmod high;\npub use high::{Thing, Other};\n"),
        ("low.rs", "use crate::Thing;\n"),
        ("high.rs", "pub struct Thing;\n"),
    ];
    let found = breaches(layers, &Source::of(&files));
    assert_eq!(found, ["low.rs:1 (low) imports Thing from high.rs (high)"]);
}

#[test]
fn lists_are_taken_apart_and_tests_may_look_anywhere() {
    let layers: &[Layer] = &[("low", &["low"]), ("high", &["high"]), ("top", &["lib"])];
    let files = [
        ("lib.rs", "mod low;\nmod high;\n"),
        (
            "low.rs",
            "use crate::{\n    high::{A, b::C as D},\n    low::E,\n};\n#[cfg(test)]\nmod tests { use crate::high::F; }\n\
             #[cfg(test)]\nuse crate::high::G;\nmacro_rules! m { () => { $crate::high::H } }\n",
        ),
        ("high.rs", ""),
    ];
    let found = breaches(layers, &Source::of(&files));
    assert_eq!(
        found,
        [
            "low.rs:2 (low) imports A from high.rs (high)",
            "low.rs:2 (low) imports b::C from high.rs (high)",
            "low.rs:9 (low) imports H from high.rs (high)",
        ]
    );
}
