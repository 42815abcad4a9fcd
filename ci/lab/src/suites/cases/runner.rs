//! The workflow files of `docs/runner` without a runner: the scripts of their jobs as they stand, job by job, with
//! the files that one job keeps handed to the next.
//!
//! The bundle is built on this machine. The device's job then runs twice: here, where there is no device, and
//! by a user of a guest that has one, with a few of the tests. The rest of a runner's work is not shown: taking
//! the file, finding a machine, keeping and showing the job's artifacts.

use super::case::{Case, quoted};
use super::{CaseContext, failed, native};
use crate::machine::device::Emulation;
use crate::run::jobs::say;
use crate::run::outcome::{Report, TestOutcome};
use crate::run::subprocess;
use crate::suites::cases::workflow::{self, WorkflowJob};
use anyhow::{Context, Result, bail, ensure};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// How long a script may take here; it compiles.
const PATIENCE: Duration = Duration::from_secs(30 * 60);
/// The file that one job hands to the other.
const BUNDLE: &str = "uverbs-device-tests";

pub(super) fn run(context: &CaseContext<'_>) -> Vec<Report> {
    let (mut reports, mut cases) = (Vec::new(), Vec::new());
    let read = [
        ("github", workflow::github(workflow::GITHUB)),
        ("gitlab", workflow::gitlab(workflow::GITLAB)),
    ];
    for (system, jobs) in read {
        let name = format!("runner::{system}");
        let jobs = match jobs {
            Ok(jobs) => jobs,
            Err(error) => {
                reports.push(failed(&name, &error));
                continue;
            }
        };
        let Some([bundle, device]) = jobs.first_chunk() else {
            reports.push(failed(&name, &anyhow::anyhow!("{} jobs in place of two", jobs.len())));
            continue;
        };
        let here = format!("{name}_without_a_device");
        if context.wanted(&here) {
            let outcome = match without_device(context, system, bundle, device) {
                Ok(outcome) => outcome,
                Err(error) => TestOutcome::Failed(format!("{error:#}")),
            };
            say!(
                "test {here} ... {}",
                if outcome == TestOutcome::Passed { "ok" } else { "not passed" }
            );
            reports.push(Report { name: here, outcome });
        }
        cases.push(in_a_guest(system, device));
    }
    reports.extend(context.group("runner", Emulation::default(), cases));
    reports
}

/// Bundles, and runs the device's job on this machine: it fails, and its results say why.
fn without_device(
    context: &CaseContext<'_>,
    system: &str,
    bundle: &WorkflowJob,
    device: &WorkflowJob,
) -> Result<TestOutcome> {
    let directory = checkout(context.session.workspace.root(), system)?;
    for script in &bundle.scripts {
        let run = in_bash(script, bundle, &directory)?;
        ensure!(run.0 == Some(0), "the bundle's job ended with {:?}: {}", run.0, run.1);
    }
    ensure!(bundle.kept == [BUNDLE], "the bundle's job keeps {:?}", bundle.kept);
    let mode = fs::metadata(directory.join(BUNDLE)).context(BUNDLE)?.permissions().mode();
    ensure!(mode & 0o111 == 0o111, "the bundle has mode {mode:o}");
    if device.loses_modes {
        fs::set_permissions(directory.join(BUNDLE), Permissions::from_mode(0o644))?;
    }
    // Where there are devices, this would be a run on one of them.
    if fs::read_dir("/sys/class/infiniband").is_ok_and(|devices| devices.count() > 0) {
        return Ok(TestOutcome::Skipped("[alone] this machine has RDMA devices".into()));
    }
    let [script] = &device.scripts[..] else { bail!("{} scripts", device.scripts.len()) };
    let (status, printed) = in_bash(script, device, &directory)?;
    ensure!(status == Some(1), "without a device the job ends with {status:?}: {printed}");
    for kept in &device.kept {
        fs::metadata(directory.join(kept)).with_context(|| format!("the job keeps {kept}"))?;
    }
    let results = fs::read_to_string(directory.join("results.txt"))?;
    let first = results.lines().next().unwrap_or_default();
    let said = first.starts_with("device tests not run: ") && first.contains("mlx5_0");
    ensure!(said, "the first line is {first:?}");
    let junit = fs::read_to_string(directory.join("results.xml"))?;
    ensure!(junit.contains("failures=\"1\"") && junit.contains("mlx5_0"), "JUnit has {junit}");
    // A name that no test has is the first fault that is found.
    let named = format!("export UVERBS_TEST_NAMES=rc::no_such_test\n{script}");
    let (status, printed) = in_bash(&named, device, &directory)?;
    ensure!(status == Some(1), "with an unknown name the job ends with {status:?}: {printed}");
    ensure!(printed.contains("rc::no_such_test"), "the name is not in {printed:?}");
    Ok(TestOutcome::Passed)
}

/// An empty directory for the jobs, in which cargo finds the workspace as in a checkout. The target directory may be a
/// link that leads out of the workspace.
fn checkout(root: &Path, system: &str) -> Result<PathBuf> {
    let directory = root.join(".ci/runner").join(system);
    if directory.exists() {
        fs::remove_dir_all(&directory)?;
    }
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    Ok(directory)
}

/// Runs a script of a job, and returns its status and output.
fn in_bash(script: &str, job: &WorkflowJob, directory: &Path) -> Result<(Option<i32>, String)> {
    let mut command = Command::new("bash");
    command.args(["--noprofile", "--norc", "-c", script]).current_dir(directory);
    command.envs(job.environment.iter().map(|(name, value)| (name, value)));
    let run = subprocess::run(command, PATIENCE)?;
    Ok((run.status.and_then(|status| status.code()), format!("{}{}", run.stdout, run.stderr)))
}

/// The device's job in a guest: its environment and its script, and of the tests a few.
fn in_a_guest(system: &str, device: &WorkflowJob) -> Case {
    let variables: Vec<String> = device
        .environment
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .chain([format!("UVERBS_TEST_NAMES={}", native::FEW)])
        .map(|variable| quoted(&variable))
        .collect();
    let mode = if device.loses_modes { "644" } else { "755" };
    let kept: String = device
        .kept
        .iter()
        .map(|path| format!("[ -s {path} ] || fail 'the job leaves no {path}'\n"))
        .collect();
    let script = format!(
        "directory=$(mktemp -d) && cd $directory || exit 1\n\
         cp $(command -v {BUNDLE}) {BUNDLE} && chmod {mode} {BUNDLE} || fail 'no bundle'\n\
         env -i PATH=$PATH {} sh -c {}; status=$?\n\
         [ $status = 0 ] || fail \"the job ended with $status\"\n{kept}\
         grep -q '^test result: ok' results.txt || fail 'results.txt has no result'\n\
         grep -q 'failures=\"0\"' results.xml || fail 'results.xml has failures'\n\
         [ $(grep -c '<testcase' results.xml) = {} ] || fail 'not every test is in results.xml'\n",
        variables.join(" "),
        quoted(&device.scripts.join("\n")),
        native::FEW.split(',').count(),
    );
    Case::new(format!("ours::native::{system}_job_on_a_device"), script)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn jobs_run_in_the_workspace_wherever_the_target_directory_is() {
        let folder = std::env::temp_dir().join(format!("lab-runner-{}", std::process::id()));
        let (root, elsewhere) = (folder.join("workspace"), folder.join("elsewhere"));
        fs::create_dir_all(&root).unwrap();
        fs::create_dir_all(&elsewhere).unwrap();
        symlink(&elsewhere, root.join("target")).unwrap();
        let directory = checkout(&root, "github").unwrap();
        fs::write(directory.join("earlier"), "").unwrap();
        let directory = checkout(&root, "github").unwrap();
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
        // Cargo asks the kernel where it is, which knows no links.
        let real = directory.canonicalize().unwrap();
        assert!(real.starts_with(root.canonicalize().unwrap()), "{}", real.display());
        fs::remove_dir_all(&folder).unwrap();
    }
}
