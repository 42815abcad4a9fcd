//! The fabric's kernel and device against real kernels: random sequences of verbs, valid and invalid, have to give the
//! results, errnos, completions and memory that a kernel gave.
//!
//! A seed is a sequence. Each step is a line of a transcript: the verb, its arguments, the answer, the completions that
//! followed, and a digest of the memory. No line has an address, a key, a handle or a number of an object in it, so
//! that lines of two runs are equal if the device and its kernel did the same. The order of completions counts within a
//! queue. `lib` behind an errno means that this library refused before it called the kernel.
//!
//! [`RECORDS`] are the transcripts of real kernels in the lab. On a kernel the test checks the record, and on the
//! fabric the fabric. A difference that stays is a row of [`KNOWN`], with its reason. A change of the steps needs new
//! records, and so does a verb that answers otherwise: `UVERBS_TEST_RECORD=1` in the environment of the test prints
//! the transcript as lines that begin with `record: `. In the lab they are in the run's log, whose path the run prints:
//!
//! ```console
//! $ UVERBS_TEST_RECORD=1 cargo ci test --no-host --kernel newest --device mlx5 differential
//! $ sed -n 's/^record: //p' LOG >tests/device/differential/mlx5.txt
//! ```

mod commands;
mod objects;
mod random;
mod traffic;
mod words;
mod world;

use crate::capability::Capability;
use crate::env::{self, kernel_is_since};
use crate::testbed::link;
use crate::verdict::{Stop, Verdict, require, trials};
use crate::watchdog::progress;
use std::time::Duration;
use uverbs::LinkLayer;
use uverbs::device::DriverId;
use world::{STEPS, Theme, World};

trials![random_verbs_are_answered_as_kernels_do];

/// The number of sequences. The last ones are commands to mlx5's driver.
const SEEDS: u64 = 32;
/// The number of sequences for soft-RoCE. In the next one, a send with a key that the peer does not have stops the
/// responder, and the requester waits without end.
const OF_RXE: u64 = 10;
/// The silence that ends a step if no record has its completions.
const QUIET: Duration = Duration::from_millis(60);
/// The variable that asks for a transcript.
const RECORD: &str = "UVERBS_TEST_RECORD";

/// The record of a driver's answers.
struct Record {
    driver: DriverId,
    /// Linux from this release on.
    since: (u32, u32),
    /// Linux before this release, if there is a later one that answers otherwise.
    before: Option<(u32, u32)>,
    lines: &'static str,
    /// Lines that differ on an older kernel, by seed and place.
    changes: &'static str,
}

/// The records of each driver, the newest first.
const RECORDS: [Record; 3] = [
    Record {
        driver: DriverId::MLX5,
        since: (7, 0),
        before: None,
        lines: include_str!("differential/mlx5.txt"),
        changes: "",
    },
    Record {
        driver: DriverId::MLX5,
        since: (6, 1),
        before: Some((6, 2)),
        lines: include_str!("differential/mlx5.txt"),
        changes: include_str!("differential/mlx5-6.1.txt"),
    },
    Record {
        driver: DriverId::RXE,
        since: (7, 0),
        before: None,
        lines: include_str!("differential/rxe.txt"),
        changes: "",
    },
];

/// A known difference, which stays.
struct Known {
    /// Whether the fabric differs, and not a kernel.
    is_of_the_fabric: bool,
    /// Part of the recorded line, and of the line that is found in its place.
    recorded: &'static str,
    found: &'static str,
    /// The reason, which is printed.
    why: &'static str,
}

/// Differences that stay, each with its reason.
const KNOWN: [Known; 1] = [Known {
    is_of_the_fabric: false,
    recorded: "s26 WR_FLUSH_ERR; s27 WR_FLUSH_ERR; s28 WR_FLUSH_ERR; r25 SUCCESS RECV 0 imm 8000001a",
    found: "s26 SUCCESS SEND imm 0; s27 RNR_RETRY_EXC_ERR; s28 WR_FLUSH_ERR; r25 SUCCESS RECV 0 imm 8000001a",
    why: "s28 reaches beyond its region: the requester then flushes the sends before it as well, unless it has seen \
          their responses, which is a matter of time",
}];

impl Known {
    fn is_it(&self, recorded: &str, found: &str) -> bool {
        self.is_of_the_fabric == env::on_fabric()
            && recorded.contains(self.recorded)
            && found.contains(self.found)
    }
}

impl Record {
    /// The record for the device under test.
    fn find() -> Option<&'static Record> {
        let driver = env::device().driver();
        let is_it = |record: &&Record| {
            let (major, minor) = record.since;
            let is_later =
                record.before.is_some_and(|(major, minor)| kernel_is_since(major, minor));
            let is_of = env::on_fabric() || kernel_is_since(major, minor) && !is_later;
            driver == Some(record.driver) && is_of
        };
        RECORDS.iter().find(is_it)
    }

    /// The number of sequences for the driver.
    fn seeds(&self) -> u64 {
        if self.driver == DriverId::MLX5 { SEEDS } else { OF_RXE }
    }

    /// The recorded line of a sequence, if there is one.
    fn line(&self, seed: u64, nth: usize) -> Option<&'static str> {
        let place = format!("{seed}.{nth} ");
        if let Some(changed) = self.changes.lines().find_map(|line| line.strip_prefix(&place)) {
            return Some(changed);
        }
        let mut lines = self.lines.lines().skip_while(|line| *line != format!("seed {seed}"));
        lines.nth(nth + 1).filter(|line| !line.starts_with("seed "))
    }
}

/// Plays a sequence and passes each line on, with its place, until the callee returns false.
fn play(
    seed: u64,
    record: Option<&Record>,
    mut each: impl FnMut(usize, String) -> bool,
) -> Verdict {
    let theme = Theme::of(seed);
    let mut world = World::new(seed)?;
    let first = world.begin(theme)?;
    let mut steps = 0..;
    for line in first {
        if !each(steps.next().unwrap_or(0), line) {
            return Ok(());
        }
    }
    for nth in steps.by_ref().take(STEPS) {
        progress();
        let expected = record.and_then(|record| record.line(seed, nth));
        let line = world.step(theme, |line| expected.map(|expected| expected == line))?;
        if !each(nth, line) {
            return Ok(());
        }
    }
    each(steps.next().unwrap_or(0), format!("end {:08x}", world.digest()));
    Ok(())
}

fn random_verbs_are_answered_as_kernels_do() -> Verdict {
    let is_ethernet = link().layer == LinkLayer::ETHERNET;
    let in_lab = env::on_fabric() || std::env::var("UVERBS_LAB").is_ok();
    let record = Record::find().filter(|_| is_ethernet && in_lab);
    let why = "the records are of the lab's Ethernet devices: mlx5 on Linux 6.1 and since 7.0, soft-RoCE since 7.0";
    require(record.is_some(), Capability::Recorded, why)?;
    let Some(record) = record else { return Ok(()) };
    if std::env::var(RECORD).is_ok() {
        return print(record);
    }
    let mut differences = Vec::new();
    for seed in 0..record.seeds() {
        play(seed, Some(record), |nth, found| {
            let recorded = record.line(seed, nth).unwrap_or("(no line)");
            if found == recorded {
                return true;
            }
            if let Some(known) = KNOWN.iter().find(|known| known.is_it(recorded, &found)) {
                println!("seed {seed}, step {nth}: known to differ: {}", known.why);
                return true;
            }
            differences.push(format!(
                "seed {seed}, step {nth}:\n  recorded: {recorded}\n  found:    {found}"
            ));
            // Later steps would have other objects.
            false
        })?;
    }
    if differences.is_empty() {
        return Ok(());
    }
    let again = match env::on_fabric() {
        true => "cargo test --test device differential".into(),
        false => format!(
            "cargo ci test --no-host --device {} differential",
            if record.driver == DriverId::RXE { "rxe" } else { "mlx5" }
        ),
    };
    Err(Stop::fail(format!(
        "{} of {} sequences differ from the record of a kernel; again: {again}\n{}",
        differences.len(),
        record.seeds(),
        differences.join("\n")
    )))
}

/// Prints the transcript: the whole for a driver's first record, and for others the lines that differ from it.
fn print(record: &Record) -> Verdict {
    let first = RECORDS.iter().find(|first| first.driver == record.driver);
    let first = first.filter(|first| first.since != record.since);
    for seed in 0..record.seeds() {
        if first.is_none() {
            println!("record: seed {seed}");
        }
        play(seed, None, |nth, line| {
            match first {
                None => println!("record: {line}"),
                Some(first) if first.line(seed, nth) == Some(&line) => {}
                Some(_) => println!("record: {seed}.{nth} {line}"),
            }
            true
        })?;
    }
    Ok(())
}
