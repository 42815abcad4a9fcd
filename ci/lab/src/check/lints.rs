//! Formatting, lints and documentation, where a warning is an error.
//!
//! Clippy sees all targets twice: with all features of the workspace, and with none. All features
//! together hide a feature that another one needs and does not name, so clippy sees each feature of
//! `uverbs` alone as well. Features only add, so one feature changes only the library, the targets that
//! require the feature, and the targets whose source asks for it: clippy sees these.

use super::row::{self, CheckRow};
use crate::run::outcome::TestOutcome;
use crate::workspace::{self, CargoTarget, Workspace};
use anyhow::Result;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The package whose features are linted one by one.
const PACKAGE: &str = "uverbs";

fn cargo(workspace: &Workspace, arguments: &[&str]) -> Command {
    let mut command = Command::new(workspace::cargo());
    command.args(arguments).current_dir(workspace.root());
    command
}

/// Whether all sources are as rustfmt would write them.
pub(super) fn formatting(workspace: &Workspace) -> CheckRow {
    row::timed("formatting", || {
        match row::missing("rustfmt", cargo(workspace, &["fmt", "--version"])) {
            Some(skipped) => Ok(skipped),
            None => row::succeeds(cargo(
                workspace,
                &["fmt", "--all", "--check", "--", "--color", "never"],
            )),
        }
    })
}

/// All lints: of the whole workspace, of the library without features, and with each alone.
pub(super) fn lints(workspace: &Workspace) -> Vec<CheckRow> {
    let every = ["--all-targets"].map(str::to_owned);
    let mut rows = vec![lint(workspace, "lints", &["--workspace", "--all-features"], &[&every])];
    let alone = ["--package", PACKAGE, "--no-default-features"];
    rows.push(lint(workspace, "lints without features", &alone, &[&every]));
    let features: Vec<String> =
        workspace.features(PACKAGE).map(str::to_owned).filter(|name| name != "default").collect();
    for feature in features {
        let chosen = concerned(workspace, &feature);
        let targets: Vec<String> = chosen.iter().flat_map(|target| target.option()).collect();
        // The profile compiles the unit tests of the library and of programs.
        let mut tests = targets.clone();
        tests.extend(["--profile", "test"].map(str::to_owned));
        let arguments = [&alone[..], &["--features", &feature]].concat();
        let name = format!("lints with {feature} alone");
        rows.push(lint(workspace, &name, &arguments, &[&targets, &tests]));
    }
    rows
}

/// Clippy on each choice of targets.
fn lint(workspace: &Workspace, name: &str, arguments: &[&str], choices: &[&[String]]) -> CheckRow {
    row::timed(name, || {
        if let Some(skipped) = row::missing("clippy", cargo(workspace, &["clippy", "--version"])) {
            return Ok(skipped);
        }
        row::all(choices.iter().map(|targets| {
            let mut command = cargo(workspace, &["clippy", "--quiet"]);
            command.args(arguments).args(*targets).args(["--", "-D", "warnings"]);
            command
        }))
    })
}

/// The targets that a feature alone can change: the library, those that require it, those that ask for it. Those that
/// require another one beside it are left to the run with all features.
fn concerned<'w>(workspace: &'w Workspace, feature: &str) -> Vec<&'w CargoTarget> {
    workspace
        .targets(PACKAGE)
        .filter(|target| target.builds_with(feature))
        .filter(|target| target.is_library() || !target.builds_plain() || names(target, feature))
        .collect()
}

/// Whether the source of a target asks whether a feature is on.
fn names(target: &CargoTarget, feature: &str) -> bool {
    let asks = format!("feature = \"{feature}\"");
    sources(&target.src_path)
        .iter()
        .any(|path| fs::read_to_string(path).is_ok_and(|text| text.contains(&asks)))
}

/// The files of a target: all in the directory of a `main.rs`, else the one that it begins with.
fn sources(begin: &Path) -> Vec<PathBuf> {
    fn below(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                below(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    match begin.parent().filter(|_| begin.ends_with("main.rs")) {
        Some(directory) => below(directory, &mut found),
        None => found.push(begin.to_owned()),
    }
    found
}

/// Documentation of the workspace, and of each published package without the others: with all features,
/// and with the default ones, as docs.rs shows it.
pub(super) fn documentation(workspace: &Workspace) -> Vec<CheckRow> {
    let published: Vec<String> =
        workspace.published().map(|package| package.name.to_owned()).collect();
    let mut rows =
        vec![document(workspace, "documentation", &[&["--workspace", "--all-features"]])];
    for package in &published {
        let sets: [&[&str]; 2] =
            [&["--package", package, "--all-features"], &["--package", package]];
        rows.push(document(workspace, &format!("documentation of {package} alone"), &sets));
    }
    rows
}

fn document(workspace: &Workspace, name: &str, sets: &[&[&str]]) -> CheckRow {
    row::timed(name, || {
        row::all(sets.iter().map(|arguments| {
            let mut command = cargo(workspace, &["doc", "--quiet", "--no-deps"]);
            command.args(*arguments).env("RUSTDOCFLAGS", "-D warnings");
            command
        }))
    })
}

/// Builds a published package with the release that it names as its oldest.
pub(super) fn oldest(
    workspace: &Workspace,
    toolchain: &crate::packages::toolchain::Toolchain,
    package: &str,
) -> CheckRow {
    row::timed(&format!("{package} with {toolchain}"), || -> Result<_> {
        let mut command = toolchain.cargo(workspace.root(), &workspace.lab_directory()?)?;
        command.args(["check", "--quiet", "--locked", "--all-features", "--package", package]);
        row::succeeds(command)
    })
}

/// Compiles a published library for a processor of 32 bits, without linking.
pub(super) fn narrow(
    workspace: &Workspace,
    toolchain: &crate::packages::toolchain::Toolchain,
    package: &str,
    target: &str,
) -> CheckRow {
    row::timed(&format!("{package} for {target}"), || -> Result<_> {
        let mut command = toolchain.cargo(workspace.root(), &workspace.lab_directory()?)?;
        command.args(["check", "--quiet", "--locked", "--lib", "--package", package]);
        if let Err(error) = toolchain.aim(&mut command, target) {
            return Ok(TestOutcome::Skipped(format!("[{target}] {error:#}")));
        }
        row::succeeds(command)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_feature_is_linted_with_the_code_that_it_enables() {
        let workspace = Workspace::of_lab().unwrap();
        let chosen = |feature: &str| -> Vec<String> {
            concerned(&workspace, feature).iter().map(|target| target.option().join(" ")).collect()
        };
        let of_tokio = chosen("tokio");
        for option in ["--lib", "--test device", "--example echo", "--example pingpong"] {
            assert!(of_tokio.iter().any(|known| known == option), "{option}: {of_tokio:?}");
        }
        assert_eq!(chosen("serde"), ["--lib", "--test traits"]);
        let both = "--example hello";
        for of_one in [of_tokio, chosen("sim")] {
            assert!(!of_one.iter().any(|known| known == both), "{both} requires both: {of_one:?}");
        }
    }
}
