//! `lab-count`: runs a program and says how many system calls it made, with all of its threads and
//! children, and how many files they opened and mapped.
//!
//! The last line of standard error is `lab-count: N system calls, M files opened, K file mappings`.
//! Used by `bench.rs` of `lab`. With `--each` a line for each call stands before it, in the order in
//! which they returned.

use crate::output::errln;
use crate::{Failure, call};
use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::{env, fs};

/// Tells the copy of this program that becomes the counted one.
const BECOME: &str = "--become";

/// Lists each call in words.
const EACH: &str = "--each";

/// `lab-count [--each] COMMAND…`; ends with the command's status.
pub(crate) fn count() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.as_slice() {
        [word, program, rest @ ..] if word == BECOME => {
            // The count is complete only if the process is traced from its first instruction.
            if let Err(error) = ptrace::traceme() {
                errln!("lab-count: be traced: {error}");
                return ExitCode::from(126);
            }
            let error = Command::new(program).args(rest).exec();
            errln!("{program}: {error}");
            ExitCode::from(127)
        }
        words @ [first, ..] => match trace(words, first == EACH) {
            Ok((status, Counts { calls, each, opened, mapped })) => {
                for words in each.into_iter().flatten() {
                    errln!("lab-count: {words}");
                }
                errln!(
                    "lab-count: {calls} system calls, {opened} files opened, {mapped} file mappings"
                );
                ExitCode::from(status)
            }
            Err(failure) => {
                errln!("lab-count: {failure}");
                ExitCode::from(126)
            }
        },
        [] => {
            errln!("lab-count [--each] COMMAND…");
            ExitCode::from(2)
        }
    }
}

/// The counts.
#[derive(Default)]
struct Counts {
    calls: u64,
    /// Each call in words, with `--each`.
    each: Option<Vec<String>>,
    opened: u64,
    mapped: u64,
}

impl Counts {
    /// At the end of a call of x86: files that were opened or mapped.
    fn returned(&mut self, thread: Pid) -> nix::Result<()> {
        const OPEN: u64 = 2;
        const MMAP: u64 = 9;
        const OPENAT: u64 = 257;
        let registers = ptrace::getregs(thread)?;
        let succeeded = (registers.rax as i64) >= 0 || registers.rax < (-4095_i64) as u64;
        if let Some(each) = &mut self.each {
            each.push(call::words(thread, &registers));
        }
        match registers.orig_rax {
            OPEN | OPENAT if succeeded => self.opened += 1,
            // Memory of its own has no file.
            MMAP if succeeded && registers.r8 as i32 >= 0 => self.mapped += 1,
            _ => {}
        }
        Ok(())
    }
}

/// Runs a command; the first word is none of it if it asks for `each` call.
fn trace(words: &[String], each: bool) -> Result<(u8, Counts), Failure> {
    let command = &words[usize::from(each)..];
    let child = Command::new(fs::read_link("/proc/self/exe")?)
        .arg0("lab-count")
        .arg(BECOME)
        .args(command)
        .spawn()?;
    let child = Pid::from_raw(child.id().try_into()?);
    // Stopped at its exec, or it never got there.
    match waitpid(child, None)? {
        WaitStatus::Stopped(..) => {}
        ended => return Err(format!("the program did not start: {ended:?}").into()),
    }
    ptrace::setoptions(
        child,
        Options::PTRACE_O_TRACESYSGOOD
            | Options::PTRACE_O_TRACECLONE
            | Options::PTRACE_O_TRACEFORK
            | Options::PTRACE_O_TRACEVFORK
            | Options::PTRACE_O_TRACEEXEC
            | Options::PTRACE_O_EXITKILL,
    )?;
    resume(child, None)?;
    let mut counts = Counts { each: each.then(Vec::new), ..Counts::default() };
    // Whether a thread is inside a system call.
    let mut inside = BTreeMap::new();
    loop {
        match waitpid(None, Some(WaitPidFlag::__WALL)) {
            Ok(WaitStatus::PtraceSyscall(thread)) => {
                let inside: &mut bool = inside.entry(thread).or_default();
                *inside = !*inside;
                counts.calls += u64::from(*inside);
                if !*inside && counts.returned(thread) == Err(Errno::ESRCH) {
                    // It was killed meanwhile, which the next wait will tell.
                    continue;
                }
                resume(thread, None)?;
            }
            Ok(WaitStatus::PtraceEvent(thread, ..)) => resume(thread, None)?,
            // The first stop of a new thread is no signal of its own.
            Ok(WaitStatus::Stopped(thread, Signal::SIGSTOP)) => resume(thread, None)?,
            Ok(WaitStatus::Stopped(thread, signal)) => resume(thread, Some(signal))?,
            Ok(WaitStatus::Exited(ended, status)) if ended == child => {
                return Ok((u8::try_from(status & 0xff)?, counts));
            }
            Ok(WaitStatus::Signaled(ended, signal, _)) if ended == child => {
                return Ok((128 + signal as u8, counts));
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn resume(thread: Pid, signal: Option<Signal>) -> Result<(), Failure> {
    match ptrace::syscall(thread, signal) {
        // It was killed meanwhile, which the next wait will tell.
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
