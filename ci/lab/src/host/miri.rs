//! `cargo ci miri`: runs the tests that need neither a kernel nor a device in Miri, an interpreter
//! that detects undefined behaviour.
//!
//! Miri is in nightly toolchains only, so nothing else of the lab asks for it.

use crate::output::outln;
use crate::run::outcome::{self, Report, TestOutcome};
use crate::run::progress;
use crate::run::subprocess::{self, CommandOutput};
use crate::run::summary::{Section, Summary};
use crate::workspace::Workspace;
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// How long one package may take under one set of rules.
const PATIENCE: Duration = Duration::from_secs(90 * 60);
/// Lines of Miri's message that are shown.
const SHOWN: usize = 40;
const ABI: Target = ("uverbs-uapi", &["--package", "uverbs-uapi", "--lib"]);
const LIBRARY: Target = ("uverbs", &["--package", "uverbs", "--lib", "--features", "tokio"]);
/// The library against the emulated device, with the kernel in the process.
const FABRIC: Target =
    ("fabric", &["--package", "uverbs", "--test", "fabric", "--features", "sim"]);

/// A run: its name, and Cargo's arguments.
type Target = (&'static str, &'static [&'static str]);

/// The model of aliasing that Miri checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Rules {
    /// Stacked borrows, the stricter ones
    Stacked,
    /// Tree borrows
    Tree,
}

impl Rules {
    const ALL: [Rules; 2] = [Rules::Stacked, Rules::Tree];

    fn name(self) -> &'static str {
        match self {
            Rules::Stacked => "stacked borrows",
            Rules::Tree => "tree borrows",
        }
    }

    fn flags(self) -> &'static str {
        // Addresses go to the scripted kernel as integers, which it turns back into pointers.
        match self {
            // The library leaks on purpose the memory of objects whose destruction the kernel does
            // not confirm, and tests that.
            Rules::Stacked => "-Zmiri-permissive-provenance -Zmiri-ignore-leaks",
            Rules::Tree => "-Zmiri-permissive-provenance -Zmiri-ignore-leaks -Zmiri-tree-borrows",
        }
    }
}

/// `cargo ci miri`
#[derive(Args, Clone, Debug)]
pub(crate) struct MiriArguments {
    /// Rules of aliasing [default: both]
    #[arg(long, value_enum)]
    rules: Option<Rules>,
    /// The toolchain that has Miri
    #[arg(long, default_value = "nightly")]
    toolchain: String,
    /// Run only tests whose names contain one of these
    filters: Vec<String>,
}

/// Runs the tests under Miri and prints the summary. It returns success only if nothing failed.
pub(crate) fn miri(arguments: &MiriArguments) -> Result<ExitCode> {
    let workspace = Workspace::find()?;
    let toolchain = &arguments.toolchain;
    if let Some(missing) = missing(toolchain) {
        bail!("nothing ran under Miri: {missing}");
    }
    let summary = Summary { sections: run(&workspace, &[ABI, LIBRARY, FABRIC], arguments)? };
    outln!("\n{summary}");
    Ok(if summary.failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs the unit tests under Miri. Without Miri the one report is a skip that names the missing part.
pub(crate) fn sections(workspace: &Workspace) -> Result<Vec<Section>> {
    sections_of(workspace, &[ABI, LIBRARY])
}

/// As [`sections`], for the tests of the fabric.
pub(crate) fn fabric(workspace: &Workspace) -> Result<Vec<Section>> {
    sections_of(workspace, &[FABRIC])
}

fn sections_of(workspace: &Workspace, targets: &[Target]) -> Result<Vec<Section>> {
    let toolchain = "nightly";
    let Some(missing) = missing(toolchain) else {
        let arguments =
            MiriArguments { rules: None, toolchain: toolchain.into(), filters: Vec::new() };
        return run(workspace, targets, &arguments);
    };
    let outcome = TestOutcome::Skipped(format!("[miri] {missing}"));
    let reports = vec![Report { name: "miri".into(), outcome }];
    Ok(vec![Section { name: "miri".into(), reports, ..Section::default() }])
}

fn run(
    workspace: &Workspace,
    targets: &[Target],
    arguments: &MiriArguments,
) -> Result<Vec<Section>> {
    let mut sections = Vec::new();
    for rules in Rules::ALL {
        if arguments.rules.is_some_and(|only| only != rules) {
            continue;
        }
        for &(target, words) in targets {
            let mut command = cargo(workspace, &arguments.toolchain);
            command.args(["test", "--quiet"]).args(words);
            // Its flags differ from other builds, which would be built anew.
            command.arg("--target-dir").arg(workspace.lab_directory()?.join("miri"));
            command.env("MIRIFLAGS", rules.flags()).env("RUST_BACKTRACE", "0");
            command.args(["--", "--format", "pretty", "--color", "never"]);
            command.args(&arguments.filters);
            let name = format!("{target}, {}", rules.name());
            let start = Instant::now();
            let spinner = progress::spinner(&name);
            let run = subprocess::run(command, PATIENCE)?;
            spinner.finish_and_clear();
            let note = format!("{} s", start.elapsed().as_secs());
            sections.push(Section { name, reports: reports(&run), note });
        }
    }
    Ok(sections)
}

fn cargo(workspace: &Workspace, toolchain: &str) -> Command {
    // The `cargo` that runs the lab is of one toolchain; rustup's own knows the others.
    let mut command = Command::new("cargo");
    command.arg(format!("+{toolchain}")).arg("miri").current_dir(workspace.root());
    // Cargo's variables would select the toolchain that built the lab.
    for name in ["CARGO", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    command
}

/// Components of a toolchain that Miri needs: itself, and the standard library that it interprets.
const COMPONENTS: [&str; 2] = ["miri", "rust-src"];

/// The missing parts of a toolchain that is to run Miri, with the command that installs them; `None` if nothing is missing.
fn missing(toolchain: &str) -> Option<String> {
    let listed = Command::new("rustup")
        .args(["component", "list", "--installed", "--toolchain", toolchain])
        .env_remove("RUSTUP_TOOLCHAIN")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    let Ok(listed) = listed else {
        return Some(format!(
            "rustup is not installed, and Miri comes with its toolchain {toolchain} only"
        ));
    };
    let text = String::from_utf8_lossy(&listed.stdout);
    missing_in(toolchain, listed.status.success().then_some(&*text))
}

/// The same for the list of installed components, or `None` without such a toolchain.
fn missing_in(toolchain: &str, listed: Option<&str>) -> Option<String> {
    let Some(listed) = listed else {
        let components = COMPONENTS.join(",");
        return Some(format!(
            "the toolchain {toolchain} is not installed: \
             rustup toolchain install {toolchain} --component {components}"
        ));
    };
    // rustup names a component that depends on the target `miri-x86_64-unknown-linux-gnu`.
    let has = |component: &str| {
        let mut rest = listed.lines().filter_map(|line| line.trim().strip_prefix(component));
        rest.any(|rest| rest.is_empty() || rest.starts_with('-'))
    };
    let missing: Vec<&str> = COMPONENTS.into_iter().filter(|component| !has(component)).collect();
    (!missing.is_empty()).then(|| {
        format!(
            "the toolchain {toolchain} lacks {}: rustup component add --toolchain {toolchain} {}",
            missing.join(" and "),
            missing.join(" ")
        )
    })
}

/// The reports of a run. Miri ends at the first error, in the middle of a test.
fn reports(run: &CommandOutput) -> Vec<Report> {
    let mut reports = outcome::parse(&run.stdout);
    let failed = reports.iter().any(|report| matches!(report.outcome, TestOutcome::Failed(_)));
    let unfinished = outcome::unfinished(&run.stdout);
    let problem = match run.status {
        None => Some(format!("given up after {} s", PATIENCE.as_secs())),
        Some(status) if !status.success() && !failed => Some(finding(&run.stderr)),
        Some(_) => None,
    };
    if let Some(problem) = problem {
        let name = unfinished.unwrap_or_else(|| "miri".into());
        reports.push(Report { name, outcome: TestOutcome::Failed(problem) });
    }
    reports
}

/// The first error in Miri's output, or the end of the output.
fn finding(stderr: &str) -> String {
    let lines: Vec<&str> = stderr.lines().collect();
    let first = lines.iter().position(|line| line.starts_with("error"));
    let from = first.unwrap_or(lines.len().saturating_sub(SHOWN));
    lines[from..].iter().take(SHOWN).copied().collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    #[test]
    fn the_test_in_which_miri_stopped_fails_with_its_message() {
        let run = CommandOutput {
            arrivals: Vec::new(),
            status: Some(ExitStatus::from_raw(1 << 8)),
            stdout: "test a ... ok\ntest b ... ignored, it forks\ntest c ... ".into(),
            stderr: "warning: x\nerror: Undefined Behavior: boom\n  --> src/a.rs\n".into(),
        };
        let reports = reports(&run);
        assert_eq!(reports.len(), 3);
        assert_eq!(reports[1].outcome, TestOutcome::Skipped("it forks".into()));
        assert_eq!(reports[2].name, "c");
        let TestOutcome::Failed(message) = &reports[2].outcome else { panic!("{reports:?}") };
        assert!(message.starts_with("error: Undefined Behavior: boom\n"), "{message}");
    }

    #[test]
    fn the_missing_toolchain_or_component_is_named_with_its_remedy() {
        let missing = |listed| missing_in("nightly", listed);
        let none = missing(None).unwrap();
        assert!(none.ends_with("rustup toolchain install nightly --component miri,rust-src"));
        let both = missing(Some("cargo-x86_64-unknown-linux-gnu\nrust-std\n")).unwrap();
        assert!(both.contains("lacks miri and rust-src") && both.ends_with(" miri rust-src"));
        let source = missing(Some("miri-x86_64-unknown-linux-gnu\n")).unwrap();
        assert!(source.contains("lacks rust-src:"), "{source}");
        assert_eq!(missing(Some("miri-x86_64-unknown-linux-gnu\nrust-src\n")), None);
    }

    #[test]
    fn a_successful_run_reports_its_tests() {
        let stdout = "test a ... ok\n".into();
        let run = CommandOutput {
            status: Some(ExitStatus::from_raw(0)),
            stdout,
            ..CommandOutput::default()
        };
        let passed = Report { name: "a".into(), outcome: TestOutcome::Passed };
        assert_eq!(reports(&run), [passed]);
    }
}
