//! The packages around the library: each depends only on those below it, and has `unsafe` only in its rooms.

use super::source::Source;
use super::workspace;
use serde_json::Value;
use std::collections::BTreeMap;
use std::process::Command;

/// Each package with the packages of the workspace that it depends on, in tests as well.
const DEPENDENCIES: &[(&str, &[&str])] = &[
    ("uverbs-uapi", &[]),
    ("uverbs-host", &[]),
    ("uverbs-roce", &["uverbs-uapi"]),
    ("uverbs-connectx", &["uverbs-roce", "uverbs-uapi"]),
    ("uverbs-sim", &["uverbs-connectx", "uverbs-host", "uverbs-roce", "uverbs-uapi"]),
    ("uverbs", &["uverbs-host", "uverbs-sim", "uverbs-uapi"]),
    ("uverbs-cli", &["uverbs"]),
    ("compile-tests", &["uverbs"]),
    ("connectx-vfio", &["uverbs-connectx", "uverbs-uapi"]),
    ("lab-guest", &["uverbs-uapi"]),
    ("lab-bench", &["uverbs"]),
    ("lab", &["connectx-vfio", "lab-bench", "lab-guest", "uverbs-connectx"]),
];

/// The only files of each folder that may have `unsafe`.
const UNSAFE: &[(&str, &[&str])] = &[
    ("uapi/src", &[]),
    // The seam: the library relies on the promises of its traits.
    ("host/src", &["lib.rs"]),
    ("roce/src", &[]),
    // The guest's memory.
    ("connectx/src", &["guest.rs"]),
    // The seam, and memory of the process by address.
    ("sim/src", &["file.rs", "memory.rs"]),
    // The library's `unsafe fn`s that ring for memory named by key.
    ("cli/src", &["pingpong/queues.rs", "pingpong/xsrq.rs", "share/path.rs"]),
    ("src/provider", &[]),
];

#[test]
fn a_package_depends_only_on_those_below_it() {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(workspace())
        .output()
        .unwrap();
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let name = |value: &Value| value["name"].as_str().unwrap().to_owned();
    let packages = metadata["packages"].as_array().unwrap();
    let members: Vec<String> = packages.iter().map(name).collect();
    let mut found = BTreeMap::new();
    for package in packages {
        let dependencies = package["dependencies"].as_array().unwrap();
        let mut names: Vec<String> = dependencies.iter().map(name).collect();
        names.retain(|name| members.contains(name));
        names.sort();
        names.dedup();
        found.insert(name(package), names);
        for dependency in dependencies.iter().filter(|dependency| dependency["kind"].is_null()) {
            let optional = dependency["optional"].as_bool().unwrap();
            assert!(
                name(dependency) != "uverbs-sim" || optional,
                "sim is an option of the library"
            );
        }
    }
    let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let expected: BTreeMap<String, Vec<String>> =
        DEPENDENCIES.iter().map(|(package, names)| ((*package).to_owned(), owned(names))).collect();
    assert_eq!(found, expected);
}

#[test]
fn unsafe_stands_only_in_its_rooms() {
    for (folder, rooms) in UNSAFE {
        let source = Source::read(&workspace().join(folder)).unwrap();
        let mut found = source.files_with("unsafe");
        found.dedup_by_key(|(file, _)| *file);
        let files: Vec<&str> = found.iter().map(|(file, _)| *file).collect();
        assert_eq!(files, *rooms, "{folder}: {found:?}");
    }
}

#[test]
fn a_word_counts_wherever_it_stands_but_in_tests() {
    let files = [
        ("lib.rs", "mod low;\n#[cfg(test)]\nmod t { fn f() { unsafe {} } }\n/// unsafe\nfn g() {}"),
        ("low.rs", "fn f() {\n    g(|| unsafe { h() });\n}"),
        ("tests.rs", "unsafe fn f() {}"),
    ];
    assert_eq!(Source::of(&files).files_with("unsafe"), [("low.rs", 2)]);
}
