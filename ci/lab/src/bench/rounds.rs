//! Both programs in one machine, in turns, and their samples.

use super::BenchArguments;
use crate::machine::session::{Machine, Session};
use crate::machine::vm::{GuestEvent, Vm};
use crate::output::errln;
use crate::workspace::{Profile, Workspace};
use anyhow::{Context, Result, anyhow, bail};
use lab_bench::sample::{Sample, samples};
use lab_guest::order::Order;
use std::path::PathBuf;
use std::time::Duration;

/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(1200);

/// Whose program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Library {
    /// The one that uses this workspace's library.
    Ours,
    /// The one that loads rdma-core's.
    Theirs,
}

impl Library {
    pub(super) const BOTH: [Library; 2] = [Library::Ours, Library::Theirs];

    pub(super) fn program(self) -> &'static str {
        match self {
            Library::Ours => "bench-ours",
            Library::Theirs => "bench-theirs",
        }
    }
}

/// Builds both programs, for the guest's `/usr/local/bin`.
pub(super) fn programs(workspace: &Workspace) -> Result<Vec<(String, PathBuf)>> {
    const PACKAGE: &str = "lab-bench";
    let [ours, theirs] = Library::BOTH.map(Library::program);
    Ok(vec![
        (ours.to_owned(), workspace.static_program(PACKAGE, ours, Profile::Release)?),
        (theirs.to_owned(), workspace.dynamic_program(PACKAGE, theirs)?),
    ])
}

/// A machine with both programs in it, and the name of its first device.
pub(super) fn boot(
    session: &Session,
    arguments: &BenchArguments,
    programs: &[(String, PathBuf)],
) -> Result<(Vm, String)> {
    let machine = Machine::new(arguments.kernel, arguments.device);
    let vm = session.boot(&Machine { programs, peers: true, ..machine })?;
    let device = vm.greeting.devices.first().cloned().unwrap_or_default();
    Ok((vm, device))
}

/// One program's samples of all its rounds, and why it could not go on.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) samples: Vec<Sample>,
    pub(super) failure: Option<String>,
    /// Why each round that was run a second time failed the first time.
    repeated: Vec<String>,
}

impl Found {
    fn add(&mut self, sample: Sample) {
        let known = self
            .samples
            .iter_mut()
            .find(|known| known.operation == sample.operation && known.way == sample.way);
        match known {
            Some(known) => known.runs.extend(sample.runs),
            None => self.samples.push(sample),
        }
    }

    /// The samples of an operation, one for each way.
    pub(super) fn of(&self, operation: &str) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(move |sample| sample.operation == operation)
    }
}

impl Found {
    /// Adds the samples of a command of `library`, and fails if the command did.
    fn take(&mut self, library: Library, left: Left) -> Result<()> {
        let samples = samples(&left.output);
        for sample in samples.map_err(|failure| anyhow!("{}: {failure}", library.program()))? {
            self.add(sample);
        }
        self.fail(&left);
        Ok(())
    }

    fn fail(&mut self, left: &Left) {
        if left.status != 0 {
            self.failure = Some(left.reason());
        }
    }

    /// The samples of one round; a round that fails is run once more, and its first output does not count.
    fn round(&mut self, library: Library, mut perform: impl FnMut() -> Result<Left>) -> Result<()> {
        let mut left = perform()?;
        if left.status != 0 {
            self.repeated.push(left.reason());
            left = perform()?;
        }
        self.take(library, left)
    }
}

/// Runs a command of one side for a while at most, and takes and shows what it finds as it comes. Of a
/// machine that is no more to be used because of that, the result is an error.
pub(super) fn watch(
    vm: &mut Vm,
    library: Library,
    arguments: &[&str],
    patience: Duration,
    found: &mut Found,
) -> Result<()> {
    let command = [&[library.program()], arguments].concat();
    let mut line = Vec::new();
    let left = perform(vm, &command, patience, |bytes| {
        for &byte in bytes {
            if byte != b'\n' {
                line.push(byte);
                continue;
            }
            if let Ok(sample) = String::from_utf8_lossy(&line).parse::<Sample>() {
                let Sample { operation, way, runs } = &sample;
                errln!("{}: {operation}, {way}: {runs:.2?}", library.program());
                found.add(sample);
            }
            line.clear();
        }
    })?;
    found.fail(&left);
    Ok(())
}

/// The failures of both programs, in words.
pub(super) fn failures(found: &[Found; 2]) -> Vec<String> {
    let failures = Library::BOTH.into_iter().zip(found);
    failures
        .flat_map(|(library, found)| {
            let repeated = found.repeated.iter().map(|reason| format!("repeated after {reason}"));
            let all: Vec<String> = repeated.chain(found.failure.clone()).collect();
            all.into_iter().map(move |failure| format!("{}: {failure}", library.program()))
        })
        .collect()
}

/// A command's output and end.
struct Left {
    status: i32,
    output: String,
    errors: String,
}

impl Left {
    /// Why it failed.
    fn reason(&self) -> String {
        format!("status {}: {}", self.status, self.errors)
    }
}

/// Runs a command as root, because a user's limit of pinned memory is not measured. `watch` sees its output.
fn perform(
    vm: &mut Vm,
    command: &[&str],
    patience: Duration,
    mut watch: impl FnMut(&[u8]),
) -> Result<Left> {
    let command = command.iter().map(|word| (*word).to_owned()).collect();
    let (mut output, mut errors) = (Vec::new(), Vec::new());
    let order = Order { command, root: true, ..Order::default() };
    let ending = vm.run(&order, patience, |event| match event {
        GuestEvent::Stdout(_, bytes) => {
            watch(bytes);
            output.extend_from_slice(bytes);
        }
        GuestEvent::Stderr(_, bytes) => errors.extend_from_slice(bytes),
        GuestEvent::Exit(..) => {}
    })?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).trim().to_owned();
    Ok(Left { status: ending.status(), output: text(output), errors: text(errors) })
}

/// The output of a command.
pub(super) fn output(vm: &mut Vm, command: &[&str]) -> Result<String> {
    let left = perform(vm, command, PATIENCE, |_| {})?;
    match left.status {
        0 => Ok(left.output),
        status => bail!("{command:?} ended with status {status}: {}", left.errors),
    }
}

/// System calls, opened files and file mappings of a command.
pub(super) fn counts(vm: &mut Vm, command: &[&str]) -> Result<[f64; 3]> {
    let left = perform(vm, &[&["lab-count"], command].concat(), PATIENCE, |_| {})?;
    if left.status != 0 {
        bail!("{command:?} ended with status {}: {}", left.status, left.errors);
    }
    counted(&left.errors).with_context(|| format!("no counts in {:?}", left.errors))
}

/// The system calls of a command, in words, in the order in which they returned.
pub(super) fn each(vm: &mut Vm, command: &[&str]) -> Result<Vec<String>> {
    let left = perform(vm, &[&["lab-count", "--each"], command].concat(), PATIENCE, |_| {})?;
    if left.status != 0 {
        bail!("{command:?} ended with status {}: {}", left.status, left.errors);
    }
    let mut words: Vec<_> =
        left.errors.lines().filter_map(|line| line.strip_prefix("lab-count: ")).collect();
    // The last is the counts.
    words.pop();
    Ok(words.into_iter().map(str::to_owned).collect())
}

/// The numbers of the counter's line.
fn counted(errors: &str) -> Option<[f64; 3]> {
    let line = errors.lines().rev().find_map(|line| line.strip_prefix("lab-count: "))?;
    let mut numbers =
        line.split(", ").map_while(|part| part.split_whitespace().next()?.parse().ok());
    Some([numbers.next()?, numbers.next()?, numbers.next()?])
}

/// Runs both programs with the same arguments, in turns.
pub(super) fn play(vm: &mut Vm, arguments: &[String], rounds: u32) -> Result<[Found; 2]> {
    let mut found = Library::BOTH.map(|_| Found::default());
    for _ in 0..rounds {
        for (library, found) in Library::BOTH.into_iter().zip(&mut found) {
            if found.failure.is_some() {
                continue;
            }
            let mut command = vec![library.program()];
            command.extend(arguments.iter().map(String::as_str));
            found.round(library, || perform(vm, &command, PATIENCE, |_| {}))?;
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_all_rounds_are_put_together() {
        let sample = |operation: &str, runs: &[f64]| Sample {
            operation: operation.into(),
            way: "classic".into(),
            runs: runs.to_vec(),
        };
        let mut found = Found::default();
        found.add(sample("write", &[1.0]));
        found.add(sample("read", &[2.0]));
        found.add(sample("write", &[3.0]));
        assert_eq!(found.of("write").collect::<Vec<_>>(), [&sample("write", &[1.0, 3.0])]);
    }

    #[test]
    fn a_round_that_fails_is_run_once_more_and_told() {
        let left =
            |status, errors: &str| Left { status, output: String::new(), errors: errors.into() };
        let mut found = [Found::default(), Found::default()];
        let mut answers = vec![left(0, ""), left(1, "WR_FLUSH_ERR")];
        found[1].round(Library::Theirs, || Ok(answers.pop().unwrap())).unwrap();
        assert!(answers.is_empty() && found[1].failure.is_none());
        assert_eq!(failures(&found), ["bench-theirs: repeated after status 1: WR_FLUSH_ERR"]);
        let mut answers = vec![left(2, "again"), left(1, "first")];
        found[0].round(Library::Ours, || Ok(answers.pop().unwrap())).unwrap();
        assert_eq!(found[0].failure.as_deref(), Some("status 2: again"));
    }

    #[test]
    fn the_counters_line_is_read() {
        let errors =
            "noise, 7 noises\nlab-count: 120 system calls, 5 files opened, 9 file mappings";
        assert_eq!(counted(errors), Some([120.0, 5.0, 9.0]));
        assert_eq!(counted("lab-count: 120 system calls"), None);
        assert_eq!(counted("noise"), None);
    }
}
