//! A run that is cut off names its stage, and leaves no process running.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A lab whose cargo compiles nothing and never ends.
struct Run {
    lab: Child,
    directory: PathBuf,
}

impl Run {
    /// In the stage that runs loom's models.
    fn begin(name: &str) -> Run {
        let mut run = Run::of(name, &["soak", "loom"]);
        let lines = BufReader::new(run.lab.stdout.take().unwrap()).lines();
        let begun = lines.map_while(Result::ok).any(|line| line.contains("stage: loom models"));
        assert!(begun, "the stage is announced when it begins");
        run.eventually("cargo runs", || run.cargo().is_some());
        run
    }

    /// With this command.
    fn of(name: &str, command: &[&str]) -> Run {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _absent = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).unwrap();
        let cargo = directory.join("cargo");
        let real = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
        let script = format!(
            "#!/bin/sh\n\
             if [ \"$1\" = metadata ]; then\n\
             '{real}' \"$@\" | sed 's#\"target_directory\":\"[^\"]*\"#\"target_directory\":\"{0}\"#'\n\
             else echo $$ >'{0}/pid'; exec sleep 600; fi\n",
            directory.display()
        );
        fs::write(&cargo, script).unwrap();
        fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
        let lab = Command::new(env!("CARGO_BIN_EXE_lab"))
            .args(command)
            .env("CARGO", &cargo)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Run { lab, directory }
    }

    /// The number of the process that stands for cargo.
    fn cargo(&self) -> Option<i32> {
        fs::read_to_string(self.directory.join("pid")).ok()?.trim().parse().ok()
    }

    fn eventually(&self, what: &str, holds: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(30);
        while !holds() {
            assert!(Instant::now() < end, "{what}: not within 30 s");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn end(&mut self, signal: Signal) -> (std::process::ExitStatus, String) {
        kill(Pid::from_raw(self.lab.id() as i32), signal).unwrap();
        let status = self.lab.wait().unwrap();
        let mut said = String::new();
        if signal != Signal::SIGKILL {
            self.lab.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        }
        (status, said)
    }
}

#[test]
fn a_run_that_is_terminated_names_its_stage_and_ends_what_it_started() {
    let mut run = Run::begin("terminated");
    let cargo = run.cargo().unwrap();
    let (status, said) = run.end(Signal::SIGTERM);
    assert_eq!(status.code(), Some(128 + Signal::SIGTERM as i32), "{said}");
    assert!(said.contains("cut off by SIGTERM in stage: soak: loom"), "{said}");
    assert!(said.contains("loom models (since "), "{said}");
    run.eventually("cargo has ended", || kill(Pid::from_raw(cargo), None).is_err());
}

/// No run of tests: it announces no stages, and keeps no logs.
#[test]
fn a_demonstration_that_is_cut_off_names_its_stage_as_well() {
    let mut run = Run::of("demo", &["demo", "--native", "no-such-device"]);
    run.eventually("cargo runs", || run.cargo().is_some());
    let (status, said) = run.end(Signal::SIGINT);
    assert_eq!(status.code(), Some(128 + Signal::SIGINT as i32), "{said}");
    assert!(said.contains("cut off by SIGINT in stage: build: command line (since "), "{said}");
    assert!(!said.contains("logs in"), "{said}");
}

#[test]
fn a_build_says_something_where_no_terminal_is() {
    let mut run = Run::of("silent", &["demo", "--native", "no-such-device"]);
    let lines = BufReader::new(run.lab.stderr.take().unwrap()).lines();
    let line = lines.map_while(Result::ok).find(|line| line.starts_with("building uverbs-cli …"));
    assert!(line.is_some(), "the build is silent");
    kill(Pid::from_raw(run.lab.id() as i32), Signal::SIGTERM).unwrap();
    run.lab.wait().unwrap();
}

#[test]
fn a_run_that_is_killed_leaves_its_stage_in_the_log() {
    let mut run = Run::begin("killed");
    let cargo = run.cargo().unwrap();
    let (status, _) = run.end(Signal::SIGKILL);
    assert_eq!(status.signal(), Some(9));
    let log = fs::read_to_string(run.directory.join("lab/log/stages.log")).unwrap();
    assert!(log.lines().next_back().unwrap().ends_with("stage: loom models"), "{log}");
    // No other process ends it.
    kill(Pid::from_raw(cargo), Signal::SIGKILL).unwrap();
}
