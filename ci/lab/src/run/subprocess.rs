//! Runs a command of the host to its end, keeps its output and limits its time.
//!
//! `cargo_test.rs` and `check` run cargo with it, `suite.rs` the tests on a real device.

use crate::run::jobs;
use crate::run::stages;
use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use rustix::process::{Pid, setpriority_process};
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The nice value of a command beside guests, whose processors have 10.
const NICE: i32 = 15;

/// The result of a command.
#[derive(Debug, Default)]
pub(crate) struct CommandOutput {
    /// Its status; `None` if it was given up.
    pub(crate) status: Option<ExitStatus>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    /// When each line of standard output was complete, counted from the start of the command.
    pub(crate) arrivals: Vec<Duration>,
}

/// Runs a command without input and waits for it to end, but no longer than `patience`.
pub(crate) fn run(command: Command, patience: Duration) -> Result<CommandOutput> {
    run_showing(command, patience, |_| {})
}

/// The same, and shows each line of standard output as it comes.
pub(crate) fn run_showing(
    command: Command,
    patience: Duration,
    mut show: impl FnMut(&str) + Send + 'static,
) -> Result<CommandOutput> {
    run_until(command, patience, move |line| {
        show(line);
        false
    })
}

/// The same, but gives it up as soon as a line of standard output is enough.
pub(crate) fn run_until(
    mut command: Command,
    patience: Duration,
    mut is_enough: impl FnMut(&str) -> bool + Send + 'static,
) -> Result<CommandOutput> {
    let start = Instant::now();
    let enough = Arc::new(AtomicBool::new(false));
    let theirs = enough.clone();
    let show = move |line: &str| {
        if is_enough(line) {
            theirs.store(true, Ordering::Relaxed);
        }
    };
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {command:?}"))?;
    stages::alive(child.id());
    if jobs::beside_others() {
        // Compilers can wait; tests in a guest have deadlines. Where the host does not allow that,
        // tests are slower.
        let _as_before =
            Pid::from_raw(child.id() as i32).map(|child| setpriority_process(Some(child), NICE));
    }
    let stdout = child.stdout.take().map(|stream| thread::spawn(move || read(stream, start, show)));
    let stderr =
        child.stderr.take().map(|stream| thread::spawn(move || read(stream, start, |_| {})));
    let deadline = Instant::now() + patience;
    let status = loop {
        if stages::has_ended(child.id()) {
            stages::ended(child.id());
            break Some(child.wait()?);
        }
        if Instant::now() >= deadline || enough.load(Ordering::Relaxed) {
            end_family(child.id() as i32);
            stages::wait_and_count(child.id());
            child.wait()?;
            break None;
        }
        thread::sleep(Duration::from_millis(50));
    };
    let printed = |reader: Option<thread::JoinHandle<std::io::Result<Printed>>>| {
        let Some(reader) = reader else { return Ok(Printed::default()) };
        let printed = reader.join().map_err(|_| anyhow::anyhow!("the reader panicked"))?;
        printed.with_context(|| format!("read the output of {command:?}"))
    };
    let (stdout, stderr) = (printed(stdout)?, printed(stderr)?);
    Ok(CommandOutput {
        status,
        stdout: String::from_utf8_lossy(&stdout.bytes).into_owned(),
        stderr: String::from_utf8_lossy(&stderr.bytes).into_owned(),
        arrivals: stdout.arrivals,
    })
}

/// All that a stream carried, and when each of its lines was complete.
#[derive(Default)]
struct Printed {
    bytes: Vec<u8>,
    arrivals: Vec<Duration>,
}

fn read(
    mut stream: impl Read,
    start: Instant,
    mut show: impl FnMut(&str),
) -> std::io::Result<Printed> {
    let mut shown = 0;
    let mut printed = Printed::default();
    let mut buffer = [0; 8192];
    loop {
        let length = match stream.read(&mut buffer) {
            Ok(0) => return Ok(printed),
            Ok(length) => length,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let lines = buffer[..length].iter().filter(|byte| **byte == b'\n').count();
        printed.arrivals.extend(std::iter::repeat_n(start.elapsed(), lines));
        printed.bytes.extend_from_slice(&buffer[..length]);
        while let Some(length) = printed.bytes[shown..].iter().position(|byte| *byte == b'\n') {
            show(&String::from_utf8_lossy(&printed.bytes[shown..shown + length]));
            shown += length + 1;
        }
    }
}

/// Kills all processes that this process started, with their descendants.
pub(crate) fn end_children() {
    let own = std::process::id() as i32;
    end_of(own, |member| member != own);
}

/// Kills a process with its descendants: killing cargo alone would leave its tests running.
fn end_family(eldest: i32) {
    end_of(eldest, |_| true);
}

fn end_of(eldest: i32, wanted: impl Fn(i32) -> bool) {
    let parents: BTreeMap<i32, i32> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
            parent_in(&stat).map(|parent| (pid, parent))
        })
        .collect();
    for &pid in parents.keys() {
        let mut at = Some(pid);
        // The chain ends at a process without a listed parent.
        while let Some(member) = at {
            if member == eldest {
                if !wanted(pid) {
                    break;
                }
                let _ended = kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL);
                break;
            }
            at = parents.get(&member).copied();
        }
    }
}

/// The parent in a line of `/proc/PID/stat`, whose second field may hold anything in parentheses.
fn parent_in(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// The trimmed output of a command, if it succeeds.
pub(crate) fn output(root: &Path, command: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(command)
        .args(arguments)
        .current_dir(root)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, patience: Duration) -> CommandOutput {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run(command, patience).unwrap()
    }

    #[test]
    fn the_parent_is_found_behind_any_name() {
        assert_eq!(parent_in("12 (a) b (c)) S 7 12 12 0"), Some(7));
        assert_eq!(parent_in("nothing"), None);
    }

    #[test]
    fn a_command_that_takes_too_long_ends_with_its_children() {
        let start = Instant::now();
        let watched = shell("echo begun; sleep 60 & sleep 60", Duration::from_millis(300));
        assert!(watched.status.is_none());
        assert_eq!(watched.stdout, "begun\n");
        // The reader waits for all processes that hold the stream, so none is left.
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn each_line_has_the_time_at_which_it_came() {
        let watched = shell("echo a; sleep 0.3; echo b; printf c", Duration::from_secs(20));
        let [a, b] = watched.arrivals[..] else { panic!("{:?}", watched.arrivals) };
        assert!(b >= a + Duration::from_millis(250), "{a:?} {b:?}");
    }

    #[test]
    fn whole_lines_are_shown_as_they_come() {
        let (sender, lines) = std::sync::mpsc::channel();
        let mut command = Command::new("sh");
        command.args(["-c", "printf 'a\\nb'; echo c; printf d"]);
        run_showing(command, Duration::from_secs(20), move |line| {
            let _gone = sender.send(line.to_owned());
        })
        .unwrap();
        assert_eq!(lines.iter().collect::<Vec<_>>(), ["a", "bc"]);
    }

    #[test]
    fn a_command_that_has_said_enough_ends() {
        let start = Instant::now();
        let mut command = Command::new("sh");
        command.args(["-c", "echo a; echo b; sleep 60 & sleep 60"]);
        let run = run_until(command, Duration::from_secs(50), |line| line == "b").unwrap();
        assert_eq!((run.status, run.stdout.as_str()), (None, "a\nb\n"));
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn output_and_status_are_returned() {
        let watched = shell("echo out; echo err >&2; exit 3", Duration::from_secs(20));
        assert_eq!(watched.status.and_then(|status| status.code()), Some(3));
        assert_eq!((watched.stdout.as_str(), watched.stderr.as_str()), ("out\n", "err\n"));
    }
}
