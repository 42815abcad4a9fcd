//! `cargo ci check` judges the sources without running them.
//!
//! | file | subject |
//! |---|---|
//! | `lints` | formatting, lints of each set of features, documentation, the oldest supported compiler |
//! | `dependencies`, `licence` | licences, packages in two versions, packages that compile C |
//! | `api` | the public API, beside the one that `ci/api` records |
//! | `package` | the packages as they are published |

mod api;
mod dependencies;
mod licence;
mod lints;
mod package;
mod row;

use crate::output::outln;
use crate::packages::cache::Cache;
use crate::packages::toolchain::{self, Toolchain};
use crate::run::outcome::{Report, TestOutcome};
use crate::run::progress;
use crate::run::summary::{Section, Summary};
use crate::workspace::Workspace;
use anyhow::{Result, bail};
use clap::Args;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use row::CheckRow;
use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

/// `cargo ci check`
#[derive(Args, Clone, Debug)]
pub(crate) struct CheckArguments {
    /// Record the public API as it is now
    #[arg(long)]
    bless: bool,
    /// Run only the group with this name
    #[arg(value_enum)]
    group: Option<Group>,
}

/// Checks that share a build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Group {
    /// rustfmt on everything
    Format,
    /// Licences, packages in two versions, packages that compile C
    Dependencies,
    /// Clippy on each set of features
    Lints,
    /// rustdoc on everything
    Docs,
    /// The published packages as `cargo publish` would make them
    Package,
    /// The published packages by the oldest compiler that they support
    Msrv,
    /// The public API of the published packages, beside `ci/api`
    Api,
    /// The published libraries for processors of 32 bits; only if it is named, and in the soak
    Narrow,
}

/// `cargo ci check`: runs the checks, prints the summary, and returns success only if none failed.
pub(crate) fn check(arguments: &CheckArguments) -> Result<ExitCode> {
    let workspace = Workspace::find()?;
    let group = match (arguments.bless, arguments.group) {
        (true, None | Some(Group::Api)) => Some(Group::Api),
        (true, Some(_)) => {
            bail!("--bless records the public API; leave the group out, or name api")
        }
        (false, group) => group,
    };
    let before = processor_seconds()?;
    let mut section = section(&workspace, group, arguments.bless)?;
    section.note += &format!(", {:.0} s of processors", processor_seconds()? - before);
    let summary = Summary { sections: vec![section] };
    outln!("\n{summary}");
    Ok(if summary.failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs all checks.
pub(crate) fn run(workspace: &Workspace) -> Result<Section> {
    section(workspace, None, false)
}

/// Compiles the libraries for processors of 32 bits.
pub(crate) fn narrow(workspace: &Workspace) -> Result<Section> {
    section(workspace, Some(Group::Narrow), false)
}

/// Fetches the compilers that the checks need beside the machine's own Rust.
pub(crate) fn fetch(cache: &Cache, refresh: bool) -> Result<()> {
    let workspace = Workspace::find()?;
    for release in releases(&workspace) {
        if refresh {
            toolchain::fetch(cache, &release, true)?;
        } else {
            Toolchain::of(&release)?;
        }
    }
    Ok(())
}

/// The oldest releases of Rust that published packages support.
fn releases(workspace: &Workspace) -> BTreeSet<String> {
    workspace.published().filter_map(|package| package.rust_version.clone()).collect()
}

fn section(workspace: &Workspace, group: Option<Group>, bless: bool) -> Result<Section> {
    let start = Instant::now();
    let wanted = |one: Group| group.map_or(one != Group::Narrow, |group| group == one);
    // The oldest compiler has a target directory of its own, so it works beside the others.
    let rows: Vec<CheckRow> = thread::scope(|scope| {
        let second = scope.spawn(|| {
            progress::be_quiet();
            by_oldest(workspace, &wanted, bless)
        });
        let mut rows = Vec::new();
        if wanted(Group::Format) {
            rows.push(lints::formatting(workspace));
        }
        if wanted(Group::Dependencies) {
            rows.extend(dependencies::checks(workspace));
        }
        if wanted(Group::Lints) {
            rows.extend(lints::lints(workspace));
        }
        if wanted(Group::Docs) {
            rows.extend(lints::documentation(workspace));
        }
        if wanted(Group::Package) {
            rows.push(package::packaging(workspace));
        }
        match second.join() {
            Ok(others) => rows.extend(others),
            Err(panic) => std::panic::resume_unwind(panic),
        }
        rows
    });
    outln!("\n{}", table(&rows));
    let note = format!("{} s", start.elapsed().as_secs());
    let reports = rows.into_iter().map(|row| row.report).collect();
    Ok(Section { name: "check".into(), reports, note })
}

/// The checks that the oldest supported compiler makes.
fn by_oldest(workspace: &Workspace, wanted: &dyn Fn(Group) -> bool, bless: bool) -> Vec<CheckRow> {
    let mut rows = Vec::new();
    if ![Group::Msrv, Group::Api, Group::Narrow].into_iter().any(wanted) {
        return rows;
    }
    // One that cannot be fetched is not tried again for the next package.
    let toolchains: BTreeMap<String, Result<Toolchain>> = releases(workspace)
        .into_iter()
        .map(|release| (release.clone(), Toolchain::of(&release)))
        .collect();
    for package in workspace.published() {
        let skipped = |reason: String| CheckRow {
            report: Report {
                name: format!("{} with its oldest compiler, and its API", package.name),
                outcome: TestOutcome::Skipped(reason),
            },
            time: std::time::Duration::ZERO,
        };
        match package.rust_version.as_ref().and_then(|release| toolchains.get_key_value(release)) {
            None => rows.push(skipped("[rust-version] Cargo.toml names none".into())),
            Some((release, Err(error))) => {
                rows.push(skipped(format!("[rust-{release}] {error:#}")))
            }
            Some((_, Ok(toolchain))) => {
                if wanted(Group::Msrv) {
                    rows.push(lints::oldest(workspace, toolchain, &package.name));
                }
                let library = package.name.replace('-', "_");
                // A program has no API, and nobody links it into one for another processor.
                if !workspace.has(&package.name, "lib", &library) {
                    continue;
                }
                if wanted(Group::Narrow) {
                    rows.extend(toolchain::NARROW.iter().map(|(target, _)| {
                        lints::narrow(workspace, toolchain, &package.name, target)
                    }));
                }
                if wanted(Group::Api) {
                    rows.push(api::check(workspace, toolchain, &package.name, bless));
                }
            }
        }
    }
    rows
}

/// Processor time of all commands that have ended, in seconds.
fn processor_seconds() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let microseconds = (usage.user_time() + usage.system_time()).num_microseconds();
    Ok(microseconds as f64 / 1e6)
}

/// A line for each check: how it ended, how long it took.
fn table(rows: &[CheckRow]) -> String {
    let width = rows.iter().map(|row| row.report.name.chars().count()).max().unwrap_or(0);
    rows.iter().fold(String::new(), |text, row| {
        let outcome = match row.report.outcome {
            TestOutcome::Passed => "ok",
            TestOutcome::Failed(_) => "FAILED",
            TestOutcome::Skipped(_) => "skipped",
        };
        text + &format!("{:width$}  {:6.1} s  {outcome}\n", row.report.name, row.time.as_secs_f64())
    })
}
