//! `cargo ci soak`: the tests that take hours. Each part records in `ci/lab/SOAK.md` when it last
//! ran, on which commit, and with which result.

use crate::arch::Arch;
use crate::check;
use crate::commands::quick::measure;
use crate::host::cargo_test;
use crate::host::litmus;
use crate::host::miri;
use crate::host::mutants;
use crate::host::seeds;
use crate::machine::device::{DeviceName, Emulation};
use crate::output::outln;
use crate::packages::fetch::Needs;
use crate::packages::kernel::KernelName;
use crate::run::jobs;
use crate::run::outcome::{Report, TestOutcome};
use crate::run::stages;
use crate::run::subprocess;
use crate::run::summary::{Section, Summary};
use crate::suites::capability::RunOptions;
use crate::suites::cases;
use crate::suites::setup::{self, LazySetup, SetupRequest};
use crate::suites::suite::TestScope;
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use clap::Args;
use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The file of results, in the tree.
const RECORD: &str = "ci/lab/SOAK.md";
/// The result of a part that could not run begins with this.
const DID_NOT_RUN: &str = "did not run";
/// How long a suite may take, and a guest may be silent.
const PATIENCE: Duration = Duration::from_secs(2 * 60 * 60);
const SILENCE: Duration = Duration::from_secs(20 * 60);

/// A part, by its name on the command line.
struct Part {
    name: &'static str,
    /// The difference from a full run.
    shows: &'static str,
    run: fn(&Workspace, &Path) -> Result<Vec<Section>>,
}

const PARTS: &[Part] = &[
    Part {
        name: "rounds-rxe",
        shows: "the device suite with 10,000 rounds in place of 500, soft-RoCE, newest kernel",
        run: |workspace, logs| rounds(workspace, logs, DeviceName::Rxe),
    },
    Part {
        name: "rounds-mlx5",
        shows: "the same on mlx5, where threads that share doorbells take 2,000 rounds in place of 125",
        run: |workspace, logs| rounds(workspace, logs, DeviceName::Mlx5),
    },
    Part {
        name: "leaks",
        shows: "objects of each kind leave nothing after 10,000 rounds on the fabric in place of 100: neither in the \
                kernel's lists nor among the device's own objects nor open files (`_nothing`)",
        run: |workspace, _| Ok(vec![cargo_test::leaks(workspace)?]),
    },
    Part {
        name: "reloads",
        shows: "`soak::` with 1,000 clients in place of 150, 50 reloads of the drivers in place of 5, and \
                an unbinding more",
        run: |_, logs| group("soak", &[KernelName::Newest], logs),
    },
    Part {
        name: "connections",
        shows: "1,000 connections by address leave nothing in place of 100, on both devices and every \
                kernel",
        run: |_, logs| connections(logs),
    },
    Part {
        name: "foreign",
        shows: "the whole device suite as an ordinary user with nothing but its binary, beside a busy neighbour, \
                on soft-RoCE, Ethernet and InfiniBand with other defaults, in place of 15 tests",
        run: |_, logs| group("foreign", &[KernelName::V6_1, KernelName::Newest], logs),
    },
    Part {
        name: "infiniband",
        shows: "the device suite and the examples on InfiniBand links and every kernel, in place of parts of the \
                suite on the newest",
        run: |_, logs| over_infiniband(logs),
    },
    Part {
        name: "mutants",
        shows: "the emulated device sees each of the mistakes planted in the library (`mutants::`)",
        run: |_, logs| group("mutants", &[KernelName::Newest], logs),
    },
    Part {
        name: "host-mutants",
        shows: "the host tests notice 19 in 20 of 200 changes to lines of the data path",
        run: |_, _| Ok(vec![mutants::section()?]),
    },
    Part {
        name: "seeds",
        shows: "an echo, a request and a key-value program with faults of 10,000 seeds on the fabric in place of 300, \
                each seed twice with the same history and memory",
        run: |workspace, _| Ok(vec![seeds::soak(workspace)?]),
    },
    Part {
        name: "transport-seeds",
        shows: "requester and responder of each transport on a network with faults of 100,000 seeds in place of 1,000",
        run: |workspace, _| Ok(vec![seeds::transports(workspace)?]),
    },
    Part {
        name: "seed-mistakes",
        shows: "some of 700 seeds find each of four mistakes planted in `owned` and `aio`, and others do not",
        run: |workspace, _| Ok(vec![seeds::mistakes(workspace)?]),
    },
    Part {
        name: "pyverbs",
        shows: "rdma-core's Python tests on every kernel in place of the newest",
        run: |_, logs| group("pyverbs", &KernelName::ALL, logs),
    },
    Part {
        name: "wire",
        shows: "soft-RoCE of every kernel at the other end of a device over UDP (`wire::`), in place of the newest's",
        run: |_, logs| group("wire", &KernelName::ALL, logs),
    },
    Part {
        name: "loom",
        shows: "loom's models, three with a bound: six preemptions in place of three (shared receive \
                queue) and three in place of two (poll loop); the others are whole here as in a full run",
        run: |workspace, _| Ok(vec![cargo_test::loom(workspace, cargo_test::Bounds::Soak)?]),
    },
    Part {
        name: "miri",
        shows: "the tests that need no kernel under Miri, by stacked and by tree borrows",
        run: |workspace, _| miri::sections(workspace),
    },
    Part {
        name: "miri-fabric",
        shows: "the library against the emulated device and its kernel in the process, under Miri",
        run: |workspace, _| miri::fabric(workspace),
    },
    Part {
        name: "litmus",
        shows: "the litmus tests of every hand-off between threads, kernel and device by herd, and their \
                sequences in the library as compiled",
        run: |workspace, _| litmus::sections(workspace),
    },
    Part {
        name: "oldest",
        shows: "the device suite on both devices and Linux 5.10, the oldest kernel that the library opens devices on",
        run: |_, logs| on_the_oldest(logs),
    },
    Part {
        name: "aarch64",
        shows: "the ABI's comparison, unit tests, device suites and rdma-core's programs on emulated aarch64 with \
                pages of 4 KiB (6.12)",
        run: |_, logs| on_aarch64(KernelName::V6_12, logs),
    },
    Part {
        name: "aarch64-16k",
        shows: "the same with pages of 16 KiB (newest)",
        run: |_, logs| on_aarch64(KernelName::Newest, logs),
    },
    Part {
        name: "narrow",
        shows: "the libraries compile for processors of 32 bits, i686 and armv7",
        run: |workspace, _| Ok(vec![check::narrow(workspace)?]),
    },
    Part {
        name: "musl",
        shows: "the device suite, linked with musl, on both devices and the newest kernel",
        run: |_, logs| with_musl(logs),
    },
    Part {
        name: "quick",
        shows: "`cargo ci quick` catches at least eight of ten planted defects",
        run: |_, _| planted(),
    },
];

/// `cargo ci soak`
#[derive(Args, Clone, Debug)]
pub(crate) struct SoakArguments {
    /// Parts to run [default: all of them]
    parts: Vec<String>,
    /// List the parts with their purposes, and run none
    #[arg(long)]
    list: bool,
}

/// Runs the parts one after the other. It returns success only if nothing failed.
pub(crate) fn soak(arguments: &SoakArguments) -> Result<ExitCode> {
    if arguments.list {
        for part in PARTS {
            outln!("{:12} {}", part.name, part.shows);
        }
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(name) =
        arguments.parts.iter().find(|name| PARTS.iter().all(|part| part.name != **name))
    {
        let names: Vec<&str> = PARTS.iter().map(|part| part.name).collect();
        bail!("there is no part {name}: {} are there", names.join(", "));
    }
    let workspace = Workspace::find()?;
    let logs = workspace.log_directory()?;
    stages::start(&logs).with_context(|| format!("write into {}", logs.display()))?;
    let commit = commit(workspace.root());
    let mut summary = Summary::default();
    let mut skipped = Vec::new();
    let wanted = |part: &&Part| {
        arguments.parts.is_empty() || arguments.parts.iter().any(|name| name == part.name)
    };
    for part in PARTS.iter().filter(wanted) {
        let start = Instant::now();
        let stage = stages::stage(format!("soak: {}", part.name));
        let sections = (part.run)(&workspace, &logs);
        drop(stage);
        let sections =
            sections.unwrap_or_else(|error| vec![setup::section_of(part.name, Err(error))]);
        let row = SoakRow {
            when: today(),
            commit: commit.clone(),
            result: result(&sections),
            minutes: start.elapsed().as_secs().div_ceil(60),
        };
        write_row(&workspace.root().join(RECORD), part.name, &row)?;
        skipped.extend(skip_of(&sections).map(|why| format!("{}: {why}", part.name)));
        summary.sections.extend(sections);
    }
    outln!("\n{summary}");
    let class = stages::machine_class("soak");
    let table = stages::finish(workspace.root(), &logs, "soak", &class, false);
    outln!("\n{}", table.context("the table of stages")?);
    outln!("{summary:#}; {RECORD} says when each part last ran");
    if let Some(problem) = unmet(&arguments.parts, &skipped) {
        bail!(problem);
    }
    Ok(if summary.failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The error if a part that was requested by name could not run; in a whole soak that is a skip.
fn unmet(requested: &[String], skipped: &[String]) -> Option<String> {
    let named = !requested.is_empty() && !skipped.is_empty();
    named.then(|| format!("requested by name, but did not run: {}", skipped.join("; ")))
}

/// Why a part did not run: the reason of its first skip, if it has nothing but skips.
fn skip_of(sections: &[Section]) -> Option<&str> {
    let reports = sections.iter().flat_map(|section| &section.reports);
    let reasons = reports.map(|report| match &report.outcome {
        TestOutcome::Skipped(why) => Some(why.as_str()),
        TestOutcome::Passed | TestOutcome::Failed(_) => None,
    });
    reasons.collect::<Option<Vec<&str>>>()?.first().copied()
}

fn scope() -> TestScope<'static> {
    TestScope {
        filter: None,
        choice: None,
        options: RunOptions { peers: true, soak: true },
        emulation: Emulation::default(),
        rounds: 1,
        patience: PATIENCE,
        silence: SILENCE,
    }
}

fn ready(kernels: &[KernelName], suites: Vec<DeviceName>) -> Result<LazySetup> {
    let needs = Needs { peers: true, python: true, ..Needs::kernels(Arch::X86_64, kernels) };
    let setup = LazySetup::default();
    setup.prepare(&SetupRequest { needs, console: false, suites, musl: false, examples: false });
    setup.ready()?;
    Ok(setup)
}

fn rounds(_: &Workspace, logs: &Path, device: DeviceName) -> Result<Vec<Section>> {
    let setup = ready(&[KernelName::Newest], vec![device])?;
    Ok(vec![setup::suites_on(&setup, KernelName::Newest, device, &scope(), logs)?])
}

fn connections(logs: &Path) -> Result<Vec<Section>> {
    let setup = ready(&KernelName::ALL, DeviceName::ALL.to_vec())?;
    let scope = TestScope { filter: Some("cm::hundred_connections"), ..scope() };
    let mut sections = Vec::new();
    for kernel in KernelName::ALL {
        for device in DeviceName::ALL {
            sections.push(setup::suites_on(&setup, kernel, device, &scope, logs)?);
        }
    }
    Ok(sections)
}

fn over_infiniband(logs: &Path) -> Result<Vec<Section>> {
    let setup = ready(&KernelName::ALL, vec![DeviceName::Mlx5])?;
    let scope = TestScope {
        options: RunOptions { peers: true, soak: false },
        emulation: Emulation { infiniband: true, ..Emulation::default() },
        ..scope()
    };
    let mut sections = Vec::new();
    for kernel in KernelName::ALL {
        sections.push(setup::suites_on(&setup, kernel, DeviceName::Mlx5, &scope, logs)?);
        sections.push(setup::examples_on(&setup, kernel, DeviceName::Mlx5, &scope, logs)?);
    }
    Ok(sections)
}

fn on_the_oldest(logs: &Path) -> Result<Vec<Section>> {
    const OLDEST: KernelName = KernelName::Release("5.10");
    let setup = ready(&[OLDEST], DeviceName::ALL.to_vec())?;
    on_both_devices(&setup, OLDEST, logs)
}

fn with_musl(logs: &Path) -> Result<Vec<Section>> {
    let setup = LazySetup::default();
    setup.prepare(&SetupRequest {
        needs: Needs { peers: true, ..Needs::kernels(Arch::X86_64, &[KernelName::Newest]) },
        console: false,
        suites: DeviceName::ALL.to_vec(),
        musl: true,
        examples: false,
    });
    setup.ready()?;
    on_both_devices(&setup, KernelName::Newest, logs)
}

/// The suites as in an ordinary run, beside rdma-core's programs.
fn on_both_devices(setup: &LazySetup, kernel: KernelName, logs: &Path) -> Result<Vec<Section>> {
    let scope = TestScope { options: RunOptions { peers: true, soak: false }, ..scope() };
    DeviceName::ALL
        .into_iter()
        .map(|device| setup::suites_on(setup, kernel, device, &scope, logs))
        .collect()
}

fn on_aarch64(kernel: KernelName, logs: &Path) -> Result<Vec<Section>> {
    let suites = DeviceName::ALL.to_vec();
    let needs = Needs { peers: true, python: true, ..Needs::kernels(Arch::Aarch64, &[kernel]) };
    let setup = LazySetup::default();
    setup.prepare(&SetupRequest { needs, console: false, suites, musl: false, examples: false });
    setup.ready()?;
    let scope = TestScope { options: RunOptions { peers: true, soak: false }, ..scope() };
    let mut sections = on_both_devices(&setup, kernel, logs)?;
    for group in ["programs", "rxe_programs"].into_iter().filter_map(cases::group) {
        sections.push(setup::group_on(group, &setup, kernel, &scope, logs)?);
    }
    Ok(sections)
}

/// A group of cases on these kernels, in parallel.
fn group(name: &str, kernels: &[KernelName], logs: &Path) -> Result<Vec<Section>> {
    let group = cases::group(name).with_context(|| format!("no group {name}"))?;
    let setup = ready(kernels, Vec::new())?;
    let (setup, scope) = (&setup, &scope());
    let jobs = kernels
        .iter()
        .map(|&kernel| {
            let name = format!("{} mlx5 {}", kernel.label(), group.name);
            let section = name.clone();
            let run = move || {
                setup::section_of(&section, setup::group_on(group, setup, kernel, scope, logs))
            };
            jobs::Job::new(name, run).on(group.slots)
        })
        .collect();
    Ok(jobs::run(jobs::slots(), jobs))
}

fn planted() -> Result<Vec<Section>> {
    let (text, enough) = measure::defects("")?;
    let outcome = if enough { TestOutcome::Passed } else { TestOutcome::Failed(text.clone()) };
    let report = Report { name: "quick::catches_planted_defects".into(), outcome };
    Ok(vec![Section { name: "quick".into(), reports: vec![report], note: text }])
}

/// A result in one cell of the table.
fn result(sections: &[Section]) -> String {
    let counts = Summary { sections: sections.to_vec() }.counts();
    let mut reports = sections.iter().flat_map(|section| &section.reports);
    let first = reports.find(|report| matches!(report.outcome, TestOutcome::Failed(_)));
    match (first, skip_of(sections)) {
        (Some(report), _) => format!("**failed**: {counts}; first {}", report.name),
        (None, Some(why)) => format!("{DID_NOT_RUN}: {why}"),
        (None, None) => format!("passed: {counts}"),
    }
}

/// When a part ran, and its result.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SoakRow {
    when: String,
    commit: String,
    result: String,
    minutes: u64,
}

/// Writes a part's row; those of the others stay.
fn write_row(path: &Path, part: &str, row: &SoakRow) -> Result<()> {
    let text = fs::read_to_string(path).unwrap_or_default();
    fs::write(path, with_row(&text, part, row)).with_context(|| format!("write {}", path.display()))
}

/// The file with a part's new row. A part that could not run keeps the result of its last run, and
/// rows of removed parts are dropped.
fn with_row(text: &str, part: &str, row: &SoakRow) -> String {
    let mut lines = vec![
        "# When the soak last ran".to_owned(),
        String::new(),
        "`cargo ci soak [PART…]` writes this file. A full run shows the same things with fewer rounds, on".into(),
        "fewer kernels, or not at all; each row names the addition.".into(),
        String::new(),
        "| part | addition | when | commit | result | minutes |".into(),
        "|---|---|---|---|---|---|".into(),
    ];
    for known in PARTS {
        let start = format!("| {} |", known.name);
        let before = text.lines().find(|line| line.starts_with(&start)).map(str::to_owned);
        let has_run = |line: &String| !line.contains("| never |") && !line.contains(DID_NOT_RUN);
        let keeps = row.result.starts_with(DID_NOT_RUN) && before.as_ref().is_some_and(has_run);
        let line = if known.name == part && !keeps {
            Some(format!(
                "{start} {} | {} | {} | {} | {} |",
                known.shows,
                row.when,
                row.commit,
                row.result.replace('|', "/").replace('\n', " "),
                row.minutes
            ))
        } else {
            before
        };
        lines.push(line.unwrap_or_else(|| format!("{start} {} | never | | | |", known.shows)));
    }
    lines.join("\n") + "\n"
}

/// The commit, and whether any other file differs from it.
fn commit(root: &Path) -> String {
    let Some(commit) = subprocess::output(root, "git", &["rev-parse", "--short=10", "HEAD"]) else {
        return "unknown".into();
    };
    let exclude = format!(":!{RECORD}");
    match subprocess::output(root, "git", &["status", "--porcelain", "--", ".", &exclude]) {
        Some(changes) if changes.is_empty() => commit,
        _ => format!("{commit} with changes"),
    }
}

fn today() -> String {
    subprocess::output(Path::new("/"), "date", &["-u", "+%Y-%m-%d"])
        .unwrap_or_else(|| "unknown".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(result: &str) -> SoakRow {
        SoakRow {
            when: "2026-11-23".into(),
            commit: "abc".into(),
            result: result.into(),
            minutes: 7,
        }
    }

    #[test]
    fn a_row_is_replaced_and_the_others_stay() {
        let text = with_row("", "mutants", &row("passed: 7"));
        assert_eq!(text.matches("| never |").count(), PARTS.len() - 1);
        let text = with_row(&text, "reloads", &row("**failed**: a | b"));
        assert!(text.contains("| 2026-11-23 | abc | passed: 7 | 7 |"), "{text}");
        assert!(text.contains("**failed**: a / b"));
        let text = with_row(&text, "reloads", &row("passed: 6"));
        assert!(!text.contains("failed") && text.contains("passed: 7"));
    }

    #[test]
    fn a_part_that_could_not_run_leaves_the_result_of_its_last_run() {
        let skipped = row("did not run: [miri] missing");
        let text = with_row("", "miri", &skipped);
        assert!(text.contains("[miri] missing"), "{text}");
        let text = with_row(&text, "miri", &row("passed: 9"));
        assert!(!text.contains("[miri] missing") && text.contains("passed: 9"));
        assert_eq!(with_row(&text, "miri", &skipped), text);
    }

    #[test]
    fn a_part_that_could_not_run_is_an_error_only_if_it_was_requested_by_name() {
        let (miri, skipped) = (["miri".to_owned()], ["miri: [miri] missing".to_owned()]);
        assert_eq!(unmet(&[], &skipped), None);
        assert_eq!(unmet(&miri, &[]), None);
        assert!(unmet(&miri, &skipped).unwrap().ends_with("did not run: miri: [miri] missing"));
    }

    #[test]
    fn a_part_that_could_not_run_has_not_passed() {
        let section = |outcome| {
            let reports = vec![Report { name: "a".into(), outcome }];
            vec![Section { reports, ..Section::default() }]
        };
        assert!(result(&section(TestOutcome::Passed)).starts_with("passed"));
        assert!(result(&section(TestOutcome::Failed("x".into()))).contains("failed"));
        let why = "[miri] not installed";
        assert_eq!(
            result(&section(TestOutcome::Skipped(why.into()))),
            format!("did not run: {why}")
        );
    }

    #[test]
    fn every_part_has_a_row_in_the_tree() {
        let text = include_str!("../../SOAK.md");
        for part in PARTS {
            assert!(text.contains(&format!("| {} | {} |", part.name, part.shows)), "{}", part.name);
        }
    }
}
