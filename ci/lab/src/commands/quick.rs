//! `cargo ci quick`: tests the change that is being edited, in about a minute.
//!
//! One call of cargo builds the host's unit tests and the device suite, without optimising. The
//! unit tests run first, because most mistakes fail there within seconds. Then two guests,
//! soft-RoCE and mlx5 on the newest kernel, run the smoke tests and the tests of the changed files
//! in parallel.
//!
//! `measure.rs` measures its time and the defects that it catches.

pub(crate) mod measure;

use crate::arch::Arch;
use crate::host::cargo_test;
use crate::machine::device::{DeviceName, Emulation};
use crate::machine::session::{self, Session};
use crate::output::outln;
use crate::packages::fetch::Needs;
use crate::packages::kernel::KernelName;
use crate::run::jobs::{self, Job};
use crate::run::outcome::{Report, TestOutcome};
use crate::run::stages;
use crate::run::subprocess;
use crate::run::summary::{Section, Summary};
use crate::suites::capability::RunOptions;
use crate::suites::setup;
use crate::suites::suite::{self, NamePrefixes, TestScope};
use crate::workspace::{RUNNER, Workspace};
use anyhow::{Context, Result, bail};
use clap::Args;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// How long the host's tests may take, and a suite in a guest.
const PATIENCE: Duration = Duration::from_secs(5 * 60);
/// How long a guest may be silent.
const SILENCE: Duration = Duration::from_secs(90);

/// Tests that run on both devices whatever changed: connect, send, write, read, event, owned
/// buffers, futures.
const SMOKE: &[&str] = &[
    "handshake::rc_pairs_connect",
    "rc::messages_in_both_directions",
    "rc::inline_data_arrives",
    "rc::writes_reach_the_peers_memory",
    "rc::reads_fetch_the_peers_memory",
    "events::armed_queue_raises_an_event_on_completion",
    "owned::buffers_carry_messages",
    "async::echo_comes_back",
];

/// A changed file whose path begins with the first text runs the device tests whose names begin
/// with the others. All matching rows count. Long tests are left to `cargo ci test`.
const DEVICE_TESTS: &[(&str, &[&str])] = &[
    ("src/provider", &["rc::gather", "rc::immediate", "rc::rings", "rc::full_", "rc::batches"]),
    ("src/provider", &["cq::", "srq::", "ud::"]),
    ("src/provider/mlx5", &["mlx5::cq", "mlx5::td", "mlx5::scatter", "mw::", "xrc::"]),
    ("src/memory", &["rc::rings", "rc::full_", "mr::", "owned::", "scope::", "mlx5::td"]),
    ("src/sync", &["rc::rings", "fork::", "owned::", "cq::"]),
    ("src/lending", &["owned::", "scope::", "unsignaled::", "program_buffers::"]),
    ("src/qp", &["qp::", "modify::", "ece::", "handshake::", "reset::", "rc::batches", "xrc::"]),
    ("src/owned", &["owned::", "scope::", "unsignaled::", "program_buffers::"]),
    (
        "src/aio",
        &["async::echo_comes_back", "async::events", "async::one_sided", "epoll::", "stream::"],
    ),
    ("src/aio", &["cancel::", "endings::"]),
    ("src/events", &["events::", "cq::"]),
    ("src/cq", &["cq::", "events::"]),
    ("src/channel.rs", &["events::", "cq::"]),
    ("src/srq.rs", &["srq::"]),
    ("src/mr", &["mr::"]),
    ("src/mw.rs", &["mw::"]),
    ("src/cm", &["cm::"]),
    ("src/sharing", &["sharing::", "share::", "mlx5::var_sharing"]),
    ("src/ah", &["ud::", "mcast::"]),
    ("src/qp/mcast.rs", &["mcast::"]),
    ("src/access.rs", &["mr::"]),
    ("src/address_vector.rs", &["ud::"]),
    ("src/pd", &["pd::"]),
    ("src/parent_domain.rs", &["pd::"]),
    ("src/td.rs", &["pd::", "mlx5::td"]),
    ("src/dm.rs", &["mlx5::dm"]),
    ("src/xrcd.rs", &["xrc::"]),
    ("src/flow", &["root::flow"]),
    ("src/mlx5", &["mlx5::"]),
    ("src/device", &["device::", "port::", "context::"]),
    ("src/port", &["port::"]),
    ("src/context.rs", &["context::", "device::"]),
    ("src/platform.rs", &["context::", "cq::", "cm::"]),
    ("src/uverbs", &["context::", "errors::", "fork::", "pd::"]),
    ("src/wr", &["rc::", "ud::"]),
    ("src/completion.rs", &["rc::", "cq::"]),
    ("src/wc.rs", &["rc::", "cq::"]),
    ("uapi/src/mlx5", &["mlx5::"]),
    ("uapi/src/", &["context::", "device::", "qp::", "cq::", "srq::", "mr::", "ud::", "pd::"]),
    ("connectx/", &["rc::", "cq::", "srq::", "mlx5::"]),
    ("ci/connectx/", &["rc::", "cq::", "srq::", "mlx5::"]),
];

/// Packages of the workspace beside the library, whose own tests run if something in them changed.
const PACKAGES: &[(&str, &str)] = &[
    ("uapi/", "uverbs-uapi"),
    ("host/", "uverbs-host"),
    ("roce/", "uverbs-roce"),
    ("sim/", "uverbs-sim"),
    ("ci/compile/", "compile-tests"),
    ("connectx/", "uverbs-connectx"),
    ("ci/connectx/", "connectx-vfio"),
    ("ci/lab/guest/", "lab-guest"),
    ("ci/lab/src/", "lab"),
    ("ci/lab/times.txt", "lab"),
];

/// `cargo ci quick`
#[derive(Args, Clone, Debug)]
pub(crate) struct QuickArguments {
    /// Test the difference from this commit [default: HEAD, or if nothing differs, where this
    /// branch left main]
    #[arg(long, value_name = "COMMIT")]
    base: Option<String>,
    /// Take these files as the changed ones, and do not ask git
    #[arg(long, value_name = "PATH", conflicts_with = "base")]
    changed: Vec<String>,
    /// The processors of the machines; the unit tests run on this machine's only
    #[arg(long, value_enum, default_value = "x86_64", conflicts_with_all = ["edits", "defects"])]
    arch: Arch,
    /// Measure: five harmless edits, one after the other, and the median of their times
    #[arg(long)]
    edits: bool,
    /// Plant each of the ten listed defects, and show which of them are caught
    #[arg(long, conflicts_with = "edits")]
    defects: bool,
    /// Only the edits or defects whose names contain this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Write the time of each stage into ci/lab/times.txt, for later runs to be compared with
    #[arg(long)]
    record_times: bool,
}

/// Tests a change, or measures how well that works.
pub(crate) fn quick(arguments: &QuickArguments) -> Result<ExitCode> {
    let only = arguments.only.as_deref().unwrap_or_default();
    let good = if arguments.edits {
        measure::edits(only)?
    } else if arguments.defects {
        measure::defects(only)?.1
    } else {
        return judge(arguments);
    };
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The tests that a set of changed files needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Selection {
    tests: NamePrefixes,
    packages: Vec<&'static str>,
    /// Files that no row names: only the host's unit tests and the smoke tests check them.
    others: Vec<String>,
}

/// The tests that run whatever changed.
pub(crate) fn smoke() -> NamePrefixes {
    NamePrefixes(SMOKE.iter().map(|name| (*name).into()).collect())
}

impl Selection {
    fn by(changed: &[String]) -> Self {
        let mut selection = Selection { tests: smoke(), ..Self::default() };
        for path in changed {
            let mut known = false;
            for (_, tests) in
                DEVICE_TESTS.iter().filter(|(beginning, _)| path.starts_with(beginning))
            {
                selection.tests.0.extend(tests.iter().map(|name| (*name).to_owned()));
                known = true;
            }
            for (_, package) in PACKAGES.iter().filter(|(beginning, _)| path.starts_with(beginning))
            {
                if !selection.packages.contains(package) {
                    selection.packages.push(package);
                }
                known = true;
            }
            // A file of the device suite is a module of that name.
            if let Some(module) =
                path.strip_prefix("tests/device/").and_then(|rest| rest.strip_suffix(".rs"))
            {
                let module = module.replace('/', "::");
                selection.tests.0.insert(format!("{module}::"));
                known = true;
            }
            if !known {
                selection.others.push(path.clone());
            }
        }
        selection
    }

    /// Whether the kernel's type information has to be compared again.
    fn abi(&self) -> bool {
        self.packages.contains(&"uverbs-uapi")
    }
}

fn judge(arguments: &QuickArguments) -> Result<ExitCode> {
    let workspace = Workspace::find()?;
    let logs = workspace.log_directory()?;
    stages::start(&logs).with_context(|| format!("write into {}", logs.display()))?;
    let changed = match arguments.changed.as_slice() {
        [] => changed(workspace.root(), arguments.base.as_deref())?,
        paths => paths.to_vec(),
    };
    let selection = Selection::by(&changed);
    outln!("changed: {}", if changed.is_empty() { "nothing".into() } else { changed.join(", ") });
    if !selection.others.is_empty() {
        outln!("only unit and smoke tests look at: {}", selection.others.join(", "));
    }
    let mut accelerator = "no machine";
    let mut sections = Vec::new();
    let stage = stages::stage("build: unit tests and device suite");
    let built = workspace.edited();
    drop(stage);
    match built {
        Err(error) => sections.push(Section {
            name: "build".into(),
            reports: vec![Report {
                name: "build".into(),
                outcome: TestOutcome::Failed(format!("{error:#}")),
            }],
            ..Section::default()
        }),
        Ok(built) => {
            sections.push(on_host(&workspace, &built.host, &selection)?);
            // A failed unit test saves the time of booting.
            if !(Summary { sections: sections.clone() }).failed() {
                let session = Session::open(&needs(arguments.arch), false)?;
                accelerator = session.accelerator().label();
                let stage = stages::stage("build: guest and emulator");
                session::programs()?;
                drop(stage);
                let suites = match arguments.arch.is_host() {
                    true => suite::edited(&built.suites, selection.abi()),
                    false => {
                        let _stage = stages::stage(arguments.arch.stage("build: device suite"));
                        suite::build_edited(&session.workspace, selection.abi())?
                    }
                };
                sections.extend(in_machines(&session, suites, &selection, &logs));
            }
        }
    }
    let summary = Summary { sections };
    outln!("\n{summary}");
    let class = stages::machine_class(accelerator);
    let table = stages::finish(workspace.root(), &logs, "quick", &class, arguments.record_times);
    outln!("\n{}", table.context("the table of stages")?);
    outln!("{summary:#}");
    Ok(if summary.failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn needs(arch: Arch) -> Needs {
    Needs::kernels(arch, &[KernelName::Newest])
}

/// The unit tests of the library, and of the packages that changed.
fn on_host(
    workspace: &Workspace,
    programs: &[std::path::PathBuf],
    selection: &Selection,
) -> Result<Section> {
    let start = Instant::now();
    let _stage = stages::stage("unit tests");
    let mut reports = Vec::new();
    for program in programs {
        let mut command = Command::new(program);
        command.args(cargo_test::libtest_arguments()).current_dir(workspace.root());
        reports.extend(cargo_test::judge("unit tests", &subprocess::run(command, PATIENCE)?, true));
    }
    for package in selection.packages.iter().filter(|package| **package != "uverbs-uapi") {
        let mut command = Command::new(crate::workspace::cargo());
        command.args(["test", "--quiet", "--package", package, "--all-features"]);
        command.arg("--").args(cargo_test::libtest_arguments()).current_dir(workspace.root());
        command.env_remove(RUNNER);
        reports.extend(cargo_test::judge(package, &subprocess::run(command, 4 * PATIENCE)?, true));
    }
    let note = format!("{} s", start.elapsed().as_secs());
    Ok(Section { name: "host".into(), reports, note })
}

/// The suites on both devices, in parallel.
fn in_machines(
    session: &Session,
    suites: Vec<suite::Suite>,
    selection: &Selection,
    logs: &Path,
) -> Vec<Section> {
    let scope = TestScope {
        filter: None,
        choice: Some(&selection.tests),
        options: RunOptions { peers: false, soak: false },
        emulation: Emulation::default(),
        rounds: 1,
        patience: PATIENCE,
        silence: SILENCE,
    };
    let (scope, suites) = (&scope, suites.as_slice());
    let jobs = [DeviceName::Mlx5, DeviceName::Rxe].map(|device| {
        let work =
            move || setup::suites_in(session, suites, KernelName::Newest, device, scope, logs);
        Job::new(device.label(), work)
    });
    jobs::run(jobs::slots(), jobs.into())
}

/// The changed files according to git: against a commit, else against HEAD, else against main.
fn changed(root: &Path, base: Option<&str>) -> Result<Vec<String>> {
    let git = |arguments: &[&str]| subprocess::output(root, "git", arguments);
    let lines = |text: String| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let against = |commit: &str| git(&["diff", "--name-only", commit]).map(lines);
    let new = || git(&["ls-files", "--others", "--exclude-standard"]).map(lines);
    let (Some(mut paths), Some(new)) = (against(base.unwrap_or("HEAD")), new()) else {
        match base {
            Some(base) => bail!("git knows no commit {base} here: name the files with --changed"),
            None => bail!("git does not list the changed files here: name them with --changed"),
        }
    };
    paths.extend(new);
    if paths.is_empty() && base.is_none() {
        let fork = ["origin/main", "main", "origin/master", "master"]
            .iter()
            .find_map(|main| git(&["merge-base", "HEAD", main]));
        paths = fork.and_then(|fork| against(fork.trim())).unwrap_or_default();
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::fs;

    fn selection(paths: &[&str]) -> Selection {
        Selection::by(&paths.iter().map(|path| (*path).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn smoke_tests_run_whatever_changed() {
        for paths in [&[][..], &["README.md"], &["src/aio/op.rs"]] {
            let selection = selection(paths);
            assert!(SMOKE.iter().all(|name| selection.tests.has(name)), "{paths:?}");
        }
        assert_eq!(selection(&["README.md"]).others, ["README.md"]);
    }

    #[test]
    fn a_changed_file_selects_the_tests_of_its_subject() {
        let selection = selection(&["src/aio/op.rs", "uapi/src/qp.rs", "tests/device/mlx5/td.rs"]);
        for test in ["cancel::a", "async::echo_comes_back_on_many_threads", "qp::b", "mlx5::td::c"]
        {
            assert!(selection.tests.has(test), "{test}");
        }
        assert!(!selection.tests.has("owned::rounds") && selection.others.is_empty());
        assert_eq!(selection.packages, ["uverbs-uapi"]);
        assert!(selection.abi());
    }

    /// A renamed path must not lose its tests silently, nor a renamed test its row.
    #[test]
    fn every_row_names_something_that_exists() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for beginning in
            DEVICE_TESTS.iter().map(|row| row.0).chain(PACKAGES.iter().map(|row| row.0))
        {
            let (directory, rest) = beginning.rsplit_once('/').unwrap();
            let there = fs::read_dir(root.join(directory))
                .unwrap_or_else(|error| panic!("{beginning}: {error}"));
            let found =
                there.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with(rest));
            assert!(found || beginning == "ci/lab/times.txt", "{beginning}");
        }
        let tests = names(&root.join("tests/device"), "");
        for beginning in DEVICE_TESTS.iter().flat_map(|row| row.1).chain(SMOKE) {
            assert!(
                tests.iter().any(|name| name.starts_with(beginning)),
                "no test begins with {beginning}"
            );
        }
    }

    /// Names of the tests in a directory of modules, from their `trials![…]`.
    fn names(directory: &Path, outer: &str) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        for entry in fs::read_dir(directory).unwrap().flatten() {
            let stem = entry.path().file_stem().unwrap().to_str().unwrap().to_owned();
            if entry.path().is_dir() {
                found.extend(names(&entry.path(), &format!("{outer}{stem}::")));
            } else if let Ok(text) = fs::read_to_string(entry.path()) {
                let list = text.split_once("\ntrials![").and_then(|(_, rest)| rest.split_once(']'));
                for name in list.map(|(list, _)| list).unwrap_or_default().split(',') {
                    if !name.trim().is_empty() {
                        found.insert(format!("{outer}{stem}::{}", name.trim()));
                    }
                }
            }
        }
        found
    }
}
