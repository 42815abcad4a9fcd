//! Reports the length of the data path: counts the instructions of the functions of
//! `examples/listing.rs` in the compiler's own listing.
//!
//! A listing is the same each time for one compiler, needs no counter of the processor, which
//! virtual machines and containers seldom have, no emulator and no device, and takes seconds. Two
//! things are counted: all instructions of a function, with its rare ways and those of the other driver, and
//! those of mlx5's usual way through it, in a loop once around. `cargo ci bench mlx5-path` counts the
//! instructions of a run. A slow data path shows in all of them: a call that is not inlined any more, a
//! lock, a copy.
//!
//! `known.txt` has the lengths, and the compiler that made them. By that compiler they may differ by a
//! sixteenth, which leaves the loops as they are, by others by a quarter.

#![cfg(target_arch = "x86_64")]

mod function;

use function::{Function, Length};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// The prefix of the functions' names.
const PREFIX: &str = "listing_";
/// The share of a length that may come or go: by the compiler of the known lengths, and by others.
const SLACK: [u32; 2] = [16, 4];

/// The lengths of functions, and the compiler that made them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Lengths {
    compiler: String,
    functions: BTreeMap<String, Length>,
}

impl Lengths {
    /// Those of a listing.
    fn of(listing: &str) -> Lengths {
        let words = listing.lines().find_map(|line| line.trim().strip_prefix(".ident"));
        let compiler = words.unwrap_or_default().trim().trim_matches('"').to_owned();
        let functions = Function::all(listing, PREFIX).into_iter();
        Lengths { compiler, functions: functions.map(|(name, it)| (name, it.length())).collect() }
    }

    /// Reads the output of [`table`](Self::table).
    fn read(table: &str) -> Lengths {
        let (compiler, rest) = table.split_once('\n').expect("a line for the compiler");
        // Without the line that names the columns.
        let functions = rest.lines().skip(1).map(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            let [name, instructions, calls, locked, usual] = words[..] else {
                panic!("no length: {line}")
            };
            let number = |word: &str| word.parse().expect("a number");
            let length = Length {
                instructions: number(instructions),
                calls: number(calls),
                locked: number(locked),
                usual: usual.parse().ok(),
            };
            (name.to_owned(), length)
        });
        Lengths { compiler: compiler.to_owned(), functions: functions.collect() }
    }

    /// The same, to be kept.
    fn table(&self) -> String {
        let line = |[name, instructions, calls, locked, usual]: [&str; 5]| {
            format!("{name:<30} {instructions:>12} {calls:>5} {locked:>6} {usual:>5}\n")
        };
        let mut table = format!("{}\n", self.compiler);
        table += &line(["", "instructions", "calls", "locked", "usual"]);
        for (name, length) in &self.functions {
            let [instructions, calls, locked] =
                [length.instructions, length.calls, length.locked].map(|count| count.to_string());
            let usual = length.usual.map_or("-".to_owned(), |count| count.to_string());
            table += &line([name, &instructions, &calls, &locked, &usual]);
        }
        table
    }

    /// The differences from `known`, function by function.
    fn moved(&self, known: &Lengths) -> Vec<String> {
        let slack = SLACK[usize::from(self.compiler != known.compiler)];
        let mut moved = Vec::new();
        for (name, before) in &known.functions {
            let beyond = match self.functions.get(name) {
                Some(now) => beyond(now, before, slack),
                None => vec!["not there any more".to_owned()],
            };
            if !beyond.is_empty() {
                moved.push(format!("{name}: {}", beyond.join(", ")));
            }
        }
        let new = self.functions.keys().filter(|name| !known.functions.contains_key(*name));
        moved.extend(new.map(|name| format!("{name}: new")));
        moved
    }
}

/// The differences of more than one in `slack`. Less is suspicious, too: an inlined function may be one of
/// its own now.
fn beyond(now: &Length, known: &Length, slack: u32) -> Vec<String> {
    let counts = [
        ("instructions", now.instructions, known.instructions, known.instructions / slack),
        ("calls", now.calls, known.calls, known.calls / slack),
        ("locked instructions", now.locked, known.locked, 0),
    ];
    let beyond = counts.into_iter().filter(|(_, now, known, slack)| now.abs_diff(*known) > *slack);
    let mut beyond: Vec<_> =
        beyond.map(|(what, now, known, _)| format!("{now} {what} in place of {known}")).collect();
    match (now.usual, known.usual) {
        (Some(now), Some(known)) if now.abs_diff(known) > known / slack => {
            beyond.push(format!("{now} on the usual way in place of {known}"));
        }
        (None, Some(known)) => {
            beyond.push(format!("no usual way without a call, where there was one of {known}"));
        }
        _ => {}
    }
    beyond
}

fn compile() -> String {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let listing = Path::new(env!("CARGO_TARGET_TMPDIR")).join("listing.s");
    let output = Command::new(env!("CARGO"))
        .args(["rustc", "--quiet", "--release", "--example", "listing", "--"])
        .arg(format!("--emit=asm={}", listing.display()))
        .args(["-Ccodegen-units=1", "-Cdebuginfo=0"])
        // As the compiler does by itself, whatever this test was built with.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .current_dir(package)
        .output()
        .expect("run cargo");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::read_to_string(&listing).expect("the listing")
}

/// Reports the functions that have become longer or shorter; the author of the change judges them.
#[test]
fn longer_and_shorter_functions_are_reported() {
    let known = Lengths::read(include_str!("known.txt"));
    let now = Lengths::of(&compile());
    let moved = now.moved(&known);
    println!("{}", now.table());
    if !moved.is_empty() {
        let written = Path::new(env!("CARGO_TARGET_TMPDIR")).join("known.txt");
        std::fs::write(&written, now.table()).expect("write the lengths");
        println!(
            "the data path is not as long as it was:\n{}\n\
             Known from {}, compiled by {}. `cargo ci bench mlx5-path` shows what it costs; to record it:\n\
             cp {} {}",
            moved.join("\n"),
            known.compiler,
            now.compiler,
            written.display(),
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/listing/known.txt").display(),
        );
    }
    // A listing without the functions would say nothing at all.
    assert_eq!(now.functions.len(), known.functions.len());
}

#[test]
fn moved_counts_are_reported() {
    let known = Length { instructions: 100, calls: 4, locked: 1, usual: Some(42) };
    assert_eq!(beyond(&Length { instructions: 102, ..known }, &known, 50), [""; 0]);
    let longer = Length { instructions: 103, calls: 5, usual: Some(43), ..known };
    assert_eq!(
        beyond(&longer, &known, 50),
        [
            "103 instructions in place of 100",
            "5 calls in place of 4",
            "43 on the usual way in place of 42"
        ]
    );
    assert_eq!(beyond(&longer, &known, 4), [""; 0]);
    let outlined = Length { instructions: 74, locked: 0, usual: None, ..known };
    assert_eq!(
        beyond(&outlined, &known, 4),
        [
            "74 instructions in place of 100",
            "0 locked instructions in place of 1",
            "no usual way without a call, where there was one of 42"
        ]
    );
}

#[test]
fn only_the_compiler_that_they_are_known_from_has_to_make_the_same() {
    let lengths = |compiler: &str, instructions| {
        let length = Length { instructions, ..Length::default() };
        let functions = BTreeMap::from([("listing_a".to_owned(), length)]);
        Lengths { compiler: compiler.to_owned(), functions }
    };
    let known = lengths("1.95", 100);
    assert_eq!(lengths("1.96", 110).moved(&known), [""; 0]);
    assert_eq!(lengths("1.95", 110).moved(&known), ["listing_a: 110 instructions in place of 100"]);
    let nothing = Lengths { compiler: "1.95".to_owned(), ..Lengths::default() };
    assert_eq!(nothing.moved(&known), ["listing_a: not there any more"]);
    assert_eq!(known.moved(&nothing), ["listing_a: new"]);
    assert_eq!(Lengths::read(&known.table()), known);
}

#[test]
fn listings_are_read() {
    let listing = "\t.globl\tlisting_a\nlisting_a:\n\t.cfi_startproc\n\tmovq\t%rdi, %rax\n.LBB0_1:\n\
                   \tlock\t\tcmpxchgl\t%ecx, (%rdi)\n\tcallq\t*8(%rax)\n\tretq\n.Lfunc_end0:\n\
                   other:\n\tnop\n.Lfunc_end1:\n\t.ident\t\"rustc version 1.2.3\"\n";
    let length = Length { instructions: 4, calls: 1, locked: 1, usual: None };
    let functions = BTreeMap::from([("listing_a".to_owned(), length)]);
    assert_eq!(Lengths::of(listing), Lengths { compiler: "rustc version 1.2.3".into(), functions });
}

/// The usual way of a function that has this between its name and its end.
fn usual(body: &str) -> Option<u32> {
    let listing = format!("listing_a:\n{body}.Lfunc_end0:\n");
    Function::all(&listing, PREFIX)["listing_a"].length().usual
}

#[test]
fn the_usual_way_is_the_one_that_calls_nothing_and_swaps_bytes() {
    // Past one that does not swap, and one that calls.
    let body = "\ttestl\t%eax, %eax\n\tje\t.LBB0_1\n\tjs\t.LBB0_2\n\tnop\n\tbswapl\t%eax\n\tretq\n\
                .LBB0_1:\n\tretq\n.LBB0_2:\n\tbswapl\t%eax\n\tcallq\tother\n\tretq\n";
    assert_eq!(usual(body), Some(6));
    // A way that leaves behind the swap and rings for nobody is not it.
    let body = "\tbswapl\t%eax\n\tjne\t.LBB0_1\n\tsfence\n\tnop\n.LBB0_1:\n\tretq\n";
    assert_eq!(usual(body), Some(5));
    assert_eq!(usual("\tbswapl\t%eax\n\tjmp\tother\n"), None);
    assert_eq!(usual(""), None);
}

#[test]
fn the_usual_way_of_a_loop_is_once_around() {
    // The shorter of two branches, without the code before it or a loop that swaps nothing.
    let body = "\tnop\n\tnop\n.LBB0_1:\n\tjs\t.LBB0_2\n\tnop\n\tnop\n.LBB0_2:\n\tbswapl\t%eax\n\tdecl\t%ecx\n\
                \tjne\t.LBB0_1\n.LBB0_3:\n\tdecl\t%edx\n\tjne\t.LBB0_3\n\tretq\n";
    assert_eq!(usual(body), Some(4));
}
