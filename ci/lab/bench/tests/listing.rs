//! Guards the length of the data path: counts the instructions of the functions of
//! `examples/listing.rs` in the compiler's own listing.
//!
//! A listing is the same each time for one compiler, needs no counter of the processor, which
//! virtual machines and containers seldom have, no emulator and no device, and takes seconds. It
//! counts what lies in a function, not what one run of it executes; that is what `cargo ci bench
//! mlx5-path` does. What makes a data path slow shows in both: something that is not inlined any
//! more, a lock, a copy.

#![cfg(target_arch = "x86_64")]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// What a function consists of.
#[derive(Debug, Default, PartialEq, Eq)]
struct Length {
    instructions: u32,
    calls: u32,
    locked: u32,
}

/// What each has, with a quarter of slack for other compilers. Both drivers' ways are in each, with those
/// that end in an error. Lower them with what you save.
const KNOWN: &[(&str, Length)] = &[
    ("listing_build_write", Length { instructions: 116, calls: 2, locked: 0 }),
    ("listing_poll_owned", Length { instructions: 348, calls: 11, locked: 3 }),
    ("listing_poll_one", Length { instructions: 151, calls: 7, locked: 1 }),
    ("listing_post_owned_receive", Length { instructions: 191, calls: 14, locked: 0 }),
    ("listing_post_owned_write", Length { instructions: 400, calls: 17, locked: 1 }),
    ("listing_post_receive", Length { instructions: 106, calls: 3, locked: 0 }),
    ("listing_post_shared_receive", Length { instructions: 127, calls: 3, locked: 1 }),
    ("listing_post_write", Length { instructions: 311, calls: 7, locked: 1 }),
    ("listing_post_write_alone", Length { instructions: 321, calls: 7, locked: 1 }),
];

impl Length {
    /// What is not as `known`, beyond what compilers differ by. Less is suspicious, too: what was
    /// inlined may be a function of its own now.
    fn beyond(&self, known: &Length) -> Vec<String> {
        let counts = [
            ("instructions", self.instructions, known.instructions, known.instructions / 4),
            ("calls", self.calls, known.calls, known.calls / 4),
            ("locked instructions", self.locked, known.locked, 0),
        ];
        let beyond =
            counts.into_iter().filter(|(_, now, known, slack)| now.abs_diff(*known) > *slack);
        beyond.map(|(what, now, known, _)| format!("{now} {what} in place of {known}")).collect()
    }
}

/// The functions of a listing whose names begin with `listing_`.
fn functions(listing: &str) -> BTreeMap<String, Length> {
    let mut functions = BTreeMap::new();
    let mut current: Option<(String, Length)> = None;
    for line in listing.lines() {
        if let Some(name) = line.strip_suffix(':').filter(|name| name.starts_with("listing_")) {
            current = Some((name.to_owned(), Length::default()));
        } else if line.starts_with(".Lfunc_end") {
            functions.extend(current.take());
        } else if let Some((_, length)) = &mut current {
            let mut words = line.split_whitespace();
            // Instructions are indented; directives begin with a dot, labels end with a colon.
            let Some(word) = words.next().filter(|_| line.starts_with('\t')) else { continue };
            if word.starts_with(['.', '#']) {
                continue;
            }
            length.instructions += 1;
            length.calls += u32::from(word.starts_with("call"));
            length.locked += u32::from(word == "lock" || word.starts_with("xchg"));
        }
    }
    functions
}

fn compile() -> String {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let listing = Path::new(env!("CARGO_TARGET_TMPDIR")).join("listing.s");
    let output = Command::new(env!("CARGO"))
        .args(["rustc", "--quiet", "--release", "--example", "listing", "--"])
        .arg(format!("--emit=asm={}", listing.display()))
        .args(["-Ccodegen-units=1", "-Cdebuginfo=0"])
        .current_dir(package)
        .output()
        .expect("run cargo");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::read_to_string(&listing).expect("the listing")
}

#[test]
fn the_data_path_is_as_long_as_it_was() {
    let functions = functions(&compile());
    let mut moved = Vec::new();
    for (name, known) in KNOWN {
        let length = functions.get(*name).unwrap_or_else(|| panic!("{name} is not in the listing"));
        println!("{name}: {length:?}");
        let beyond = length.beyond(known);
        if !beyond.is_empty() {
            moved.push(format!("{name}: {}", beyond.join(", ")));
        }
    }
    assert_eq!(functions.len(), KNOWN.len(), "a length for each of {:?}", functions.keys());
    assert!(moved.is_empty(), "{}", moved.join("\n"));
}

#[test]
fn what_moved_is_told() {
    let known = Length { instructions: 100, calls: 2, locked: 1 };
    assert_eq!(Length { instructions: 125, ..known }.beyond(&known), [""; 0]);
    let longer = Length { instructions: 126, calls: 3, ..known };
    assert_eq!(
        longer.beyond(&known),
        ["126 instructions in place of 100", "3 calls in place of 2"]
    );
    let outlined = Length { instructions: 74, locked: 0, ..known };
    assert_eq!(
        outlined.beyond(&known),
        ["74 instructions in place of 100", "0 locked instructions in place of 1"]
    );
}

#[test]
fn listings_are_read() {
    let listing = "\t.globl\tlisting_a\nlisting_a:\n\t.cfi_startproc\n\tmovq\t%rdi, %rax\n.LBB0_1:\n\
                   \tlock\t\tcmpxchgl\t%ecx, (%rdi)\n\tcallq\t*8(%rax)\n\tretq\n.Lfunc_end0:\n\
                   other:\n\tnop\n.Lfunc_end1:\n";
    let functions = functions(listing);
    let length = Length { instructions: 4, calls: 1, locked: 1 };
    assert_eq!(functions.into_iter().collect::<Vec<_>>(), [("listing_a".to_owned(), length)]);
}
