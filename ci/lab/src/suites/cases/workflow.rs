//! The workflow files of `docs/runner`, read strictly: a key that GitHub or GitLab does not document where it
//! stands is an error.

use anyhow::{Context, Result, bail, ensure};
use yaml_rust2::{Yaml, YamlLoader};

/// The files, from the tree.
pub(crate) const GITHUB: &str = include_str!("../../../../../docs/runner/github.yml");
pub(crate) const GITLAB: &str = include_str!("../../../../../docs/runner/gitlab.yml");

/// A job, as far as a runner's shell is concerned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WorkflowJob {
    pub(crate) name: String,
    /// Jobs that end before this one begins.
    pub(crate) needs: Vec<String>,
    pub(crate) environment: Vec<(String, String)>,
    /// The text of each shell script.
    pub(crate) scripts: Vec<String>,
    /// Files that the system keeps when the job has ended.
    pub(crate) kept: Vec<String>,
    /// Whether a file that a later job gets has lost its executable bit.
    pub(crate) loses_modes: bool,
}

/// <https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-syntax>
const GITHUB_WORKFLOW: &[&str] =
    &["name", "run-name", "on", "permissions", "env", "defaults", "concurrency", "jobs"];
const GITHUB_EVENTS: &[&str] =
    &["push", "pull_request", "schedule", "workflow_dispatch", "workflow_call", "release"];
const GITHUB_JOB: &[&str] = &[
    "name",
    "permissions",
    "needs",
    "if",
    "runs-on",
    "environment",
    "concurrency",
    "outputs",
    "env",
    "defaults",
    "steps",
    "timeout-minutes",
    "strategy",
    "continue-on-error",
    "container",
    "services",
    "uses",
    "with",
    "secrets",
];
const GITHUB_STEP: &[&str] = &[
    "id",
    "if",
    "name",
    "uses",
    "run",
    "working-directory",
    "shell",
    "with",
    "env",
    "continue-on-error",
    "timeout-minutes",
];
/// Actions with their inputs, from each one's `action.yml`.
const GITHUB_ACTIONS: &[(&str, &[&str])] = &[
    ("actions/checkout@v4", &["repository", "ref", "path", "fetch-depth", "submodules"]),
    (
        "actions/upload-artifact@v4",
        &[
            "name",
            "path",
            "if-no-files-found",
            "retention-days",
            "compression-level",
            "overwrite",
            "include-hidden-files",
        ],
    ),
    (
        "actions/download-artifact@v4",
        &["name", "path", "pattern", "merge-multiple", "repository", "run-id"],
    ),
];

/// <https://docs.gitlab.com/ci/yaml/>
const GITLAB_GLOBAL: &[&str] = &["default", "include", "stages", "variables", "workflow", "spec"];
const GITLAB_JOB: &[&str] = &[
    "after_script",
    "allow_failure",
    "artifacts",
    "before_script",
    "cache",
    "coverage",
    "dependencies",
    "environment",
    "extends",
    "id_tokens",
    "image",
    "inherit",
    "interruptible",
    "needs",
    "parallel",
    "resource_group",
    "retry",
    "rules",
    "script",
    "secrets",
    "services",
    "stage",
    "tags",
    "timeout",
    "variables",
    "when",
];
const GITLAB_ARTIFACTS: &[&str] = &[
    "access",
    "exclude",
    "expire_in",
    "expose_as",
    "name",
    "paths",
    "public",
    "reports",
    "untracked",
    "when",
];

/// The jobs of a workflow of GitHub Actions.
pub(crate) fn github(text: &str) -> Result<Vec<WorkflowJob>> {
    let workflow = document(text)?;
    known_keys(&workflow, GITHUB_WORKFLOW)?;
    for event in strings(&workflow["on"]).context("on")? {
        ensure!(GITHUB_EVENTS.contains(&event.as_str()), "on: there is no event {event}");
    }
    let mut jobs = Vec::new();
    for (name, job) in entries(&workflow["jobs"]).context("jobs")? {
        jobs.push(github_job(name, job).with_context(|| format!("job {name}"))?);
    }
    needs_exist(&jobs)?;
    Ok(jobs)
}

fn github_job(name: &str, job: &Yaml) -> Result<WorkflowJob> {
    known_keys(job, GITHUB_JOB)?;
    ensure!(!strings(&job["runs-on"]).context("runs-on")?.is_empty(), "runs-on names no runner");
    let minutes = &job["timeout-minutes"];
    ensure!(minutes.is_badvalue() || minutes.as_i64().is_some(), "timeout-minutes is a number");
    let mut read = WorkflowJob {
        name: name.to_owned(),
        needs: optional_strings(&job["needs"])?,
        environment: variables(&job["env"])?,
        loses_modes: true,
        ..WorkflowJob::default()
    };
    let steps = job["steps"].as_vec().context("no steps")?;
    for step in steps {
        known_keys(step, GITHUB_STEP)?;
        match (step["run"].as_str(), step["uses"].as_str()) {
            (Some(script), None) => read.scripts.push(match step["shell"].as_str() {
                // As the runner begins them: with a shell that is named it says `pipefail`, too.
                None => format!("set -e\n{script}"),
                Some("bash") => format!("set -eo pipefail\n{script}"),
                Some(other) => bail!("shell {other}"),
            }),
            (None, Some(action)) => {
                let inputs = GITHUB_ACTIONS.iter().find(|(known, _)| *known == action);
                let (_, inputs) = inputs.with_context(|| format!("unknown action {action}"))?;
                if !step["with"].is_badvalue() {
                    known_keys(&step["with"], inputs).with_context(|| action.to_owned())?;
                }
                if action.starts_with("actions/upload-artifact@") {
                    let paths = step["with"]["path"].as_str().context("no path to keep")?;
                    read.kept.extend(paths.lines().map(|line| line.trim().to_owned()));
                }
            }
            _ => bail!("a step has either `run` or `uses`"),
        }
    }
    Ok(read)
}

/// The jobs of a pipeline of GitLab.
pub(crate) fn gitlab(text: &str) -> Result<Vec<WorkflowJob>> {
    let pipeline = document(text)?;
    let mut jobs = Vec::new();
    for (name, job) in entries(&pipeline)? {
        if !GITLAB_GLOBAL.contains(&name) {
            jobs.push(gitlab_job(name, job).with_context(|| format!("job {name}"))?);
        }
    }
    needs_exist(&jobs)?;
    Ok(jobs)
}

fn gitlab_job(name: &str, job: &Yaml) -> Result<WorkflowJob> {
    known_keys(job, GITLAB_JOB)?;
    let artifacts = &job["artifacts"];
    let mut kept = Vec::new();
    if !artifacts.is_badvalue() {
        known_keys(artifacts, GITLAB_ARTIFACTS).context("artifacts")?;
        kept = optional_strings(&artifacts["paths"])?;
        if !artifacts["reports"].is_badvalue() {
            known_keys(&artifacts["reports"], &["junit"]).context("reports")?;
            let junit = artifacts["reports"]["junit"].as_str().context("junit names a file")?;
            ensure!(kept.iter().any(|path| path == junit), "{junit} is not among the paths");
        }
        let when = artifacts["when"].as_str().unwrap_or("on_success");
        ensure!(["on_success", "on_failure", "always"].contains(&when), "artifacts: when {when}");
    }
    let lines = strings(&job["script"]).context("script")?;
    // As the runner begins the script that it makes of the lines.
    let script = format!("set -eo pipefail\n{}\n", lines.join("\n"));
    Ok(WorkflowJob {
        name: name.to_owned(),
        needs: optional_strings(&job["needs"])?,
        environment: variables(&job["variables"])?,
        scripts: vec![script],
        kept,
        loses_modes: false,
    })
}

fn document(text: &str) -> Result<Yaml> {
    let mut documents = YamlLoader::load_from_str(text)?;
    ensure!(documents.len() == 1, "{} documents", documents.len());
    Ok(documents.remove(0))
}

fn entries(yaml: &Yaml) -> Result<Vec<(&str, &Yaml)>> {
    let map = yaml.as_hash().context("no mapping")?;
    map.iter()
        .map(|(key, value)| Ok((key.as_str().context("a key is no string")?, value)))
        .collect()
}

fn known_keys(yaml: &Yaml, known: &[&str]) -> Result<()> {
    for (key, _) in entries(yaml)? {
        ensure!(known.contains(&key), "there is no key {key} here");
    }
    Ok(())
}

/// A string, or a sequence of strings.
fn strings(yaml: &Yaml) -> Result<Vec<String>> {
    if let Some(one) = yaml.as_str() {
        return Ok(vec![one.to_owned()]);
    }
    let several = yaml.as_vec().context("neither a string nor a sequence")?;
    let string = |yaml: &Yaml| yaml.as_str().map(str::to_owned).context("no string");
    several.iter().map(string).collect()
}

fn optional_strings(yaml: &Yaml) -> Result<Vec<String>> {
    if yaml.is_badvalue() { Ok(Vec::new()) } else { strings(yaml) }
}

fn variables(yaml: &Yaml) -> Result<Vec<(String, String)>> {
    if yaml.is_badvalue() {
        return Ok(Vec::new());
    }
    let value = |(key, value): (&str, &Yaml)| {
        let value = value.as_str().with_context(|| format!("{key} is no string"))?;
        Ok((key.to_owned(), value.to_owned()))
    };
    entries(yaml)?.into_iter().map(value).collect()
}

fn needs_exist(jobs: &[WorkflowJob]) -> Result<()> {
    for job in jobs {
        for need in &job.needs {
            ensure!(jobs.iter().any(|job| job.name == *need), "{} needs {need}", job.name);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::process::Command;

    #[test]
    fn both_files_bundle_and_then_test() {
        for jobs in [github(GITHUB).unwrap(), gitlab(GITLAB).unwrap()] {
            let [bundle, device] = &jobs[..] else { panic!("{jobs:?}") };
            assert_eq!((bundle.name.as_str(), device.name.as_str()), ("bundle", "device"));
            assert_eq!(device.needs, ["bundle"]);
            assert_eq!(bundle.kept, ["uverbs-device-tests"]);
            assert_eq!(device.kept, ["results.txt", "results.xml"]);
            let value = |wanted: &str| {
                device
                    .environment
                    .iter()
                    .find(|(name, _)| name == wanted)
                    .map(|(_, value)| value.as_str())
            };
            assert_eq!(value("UVERBS_TEST_JUNIT"), Some("results.xml"));
            assert_eq!(value("UVERBS_TEST_DEVICE"), Some("mlx5_0"));
        }
    }

    /// A suite that says that it did not run, whatever its status: the job fails all the same.
    #[test]
    fn device_job_fails_unless_the_suite_says_ok() {
        let run = |system: &str, device: &WorkflowJob, printed: &str, status: u8| {
            let name = format!("uverbs-lab-{system}-job-{}", std::process::id());
            let directory = std::env::temp_dir().join(name);
            fs::create_dir_all(&directory).unwrap();
            // Written by the shell: a fork of another test must not inherit a file that is open for writing.
            let suite = format!(
                "printf '%s\\n' '#!/bin/sh' 'echo {printed}' 'exit {status}' >uverbs-device-tests\n\
                 chmod +x uverbs-device-tests\n"
            );
            let mut bash = Command::new("bash");
            bash.args(["--noprofile", "--norc", "-c", &(suite + &device.scripts.join("\n"))]);
            let ended = bash.current_dir(&directory).output().unwrap();
            fs::remove_dir_all(&directory).unwrap();
            ended.status.success()
        };
        for (system, jobs) in [("github", github(GITHUB)), ("gitlab", gitlab(GITLAB))] {
            let [_, device] = &jobs.unwrap()[..] else { panic!("two jobs") };
            let run = |printed: &str, status| run(system, device, printed, status);
            assert!(run("test result: ok. 5 passed", 0), "{system}");
            assert!(!run("test result: ok. 5 passed", 101), "{system}");
            assert!(!run("device tests not run: it has no active port", 0), "{system}");
        }
    }

    #[test]
    fn undocumented_keys_are_refused() {
        let refused = |jobs: Result<Vec<WorkflowJob>>| format!("{:#}", jobs.unwrap_err());
        let edited = |from: &str, to: &str| refused(github(&GITHUB.replace(from, to)));
        assert!(edited("timeout-minutes", "timeout").contains("no key timeout"));
        assert!(edited("runs-on: ubuntu-latest", "name: x").contains("runs-on"));
        assert!(edited("needs: bundle", "needs: bundel").contains("needs bundel"));
        assert!(edited("download-artifact@v4", "fetch-artifact@v4").contains("unknown action"));
        assert!(
            edited("          path: uverbs", "          paths: uverbs").contains("no key paths")
        );
        assert!(edited("on: [push,", "on: [pushed,").contains("no event pushed"));
        let edited = |from: &str, to: &str| refused(gitlab(&GITLAB.replace(from, to)));
        assert!(edited("tags:", "runs-on:").contains("no key runs-on"));
        assert!(edited("junit: results.xml", "junit: other.xml").contains("not among the paths"));
        assert!(edited("when: always", "when: allways").contains("when allways"));
    }
}
