//! Every lock of the library is one of `src/sync/lock.rs`, for which a forked child does not wait.

use std::fs;
use std::path::{Path, PathBuf};

/// Primitives that wait for another thread, and the files that may name them.
const ALLOWED: &[(&str, &[&str])] = &[
    ("Mutex", &["sync/lock.rs", "sync.rs"]),
    ("RwLock", &[]),
    ("Condvar", &[]),
    ("Barrier", &[]),
    ("LazyLock", &[]),
    // The thread that makes the queue fills it, before another thread has the queue.
    ("OnceLock", &["srq.rs"]),
    // The poster holds a register for a few stores. A forked child is refused before it posts.
    ("swap(true, Ordering::Acquire)", &["memory/doorbell_register.rs"]),
];

/// The source of the library without its tests.
fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("the sources") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_test = name.starts_with("tests") || name.starts_with("model");
        let is_other = ["bin", "bench", "scripted", "scripted.rs"].contains(&name);
        match (is_test || is_other, path.is_dir()) {
            (true, _) => {}
            (false, true) => sources(&path, found),
            (false, false) => found.push(path),
        }
    }
}

/// The numbered lines of a file, except those of items that are compiled for tests only.
fn without_tests(text: &str) -> Vec<(usize, &str)> {
    let mut lines = text.lines().enumerate();
    let mut kept = Vec::new();
    while let Some((at, line)) = lines.next() {
        let is_test =
            ["#[cfg(test)]", "#[cfg(all(test"].iter().any(|cfg| line.trim_start().starts_with(cfg));
        if !is_test {
            kept.push((at, line));
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        // More attributes may follow; then the item ends with its line, or with its closing brace.
        let mut item = lines.next();
        while item.is_some_and(|(_, line)| line.trim_start().starts_with("#[")) {
            item = lines.next();
        }
        if item.is_some_and(|(_, line)| line.trim_end().ends_with('{')) {
            let closing = format!("{}}}", " ".repeat(indent));
            let _ = lines.find(|(_, line)| line.starts_with(&closing));
        }
    }
    kept
}

#[test]
fn only_the_items_of_tests_are_left_out() {
    let text = "#[cfg(test)]\nmod tests;\na\n#[cfg(all(test, loom))]\n#[allow(dead_code)]\nmod model {\n    x\n}\nb\n\
                impl T {\n    #[cfg(test)]\n    fn f() {\n        y\n    }\n    c\n}\n";
    let kept: Vec<_> = without_tests(text).into_iter().map(|(_, line)| line.trim()).collect();
    assert_eq!(kept, ["a", "b", "impl T {", "c", "}"]);
}

#[test]
fn every_lock_is_one_that_a_child_does_not_wait_for() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut files, mut wrong) = (Vec::new(), Vec::new());
    sources(&root, &mut files);
    assert!(files.iter().any(|file| file.ends_with("sync/lock.rs")), "{files:?}");
    for file in files {
        let text = fs::read_to_string(&file).expect("a source file");
        for (at, line) in without_tests(&text) {
            let line = line.trim_start();
            // A guard does not wait: the program already holds its lock.
            let line = ["MutexGuard", "RwLockReadGuard", "RwLockWriteGuard"]
                .iter()
                .fold(line.to_owned(), |line, guard| line.replace(guard, ""));
            for (word, allowed) in ALLOWED {
                let may = allowed.iter().any(|name| file.ends_with(name));
                if line.contains(word) && !line.starts_with("//") && !may {
                    wrong.push(format!("{}:{}: {line}", file.display(), at + 1));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "use sync::lock::{{Lock, TryLock}}:\n{}", wrong.join("\n"));
}
