//! Processes that end when the lab ends, however that happens.
//!
//! The kernel kills a process when its parent ends (`PR_SET_PDEATHSIG`), if the process itself asks
//! for that. The lab therefore starts itself once more; that process asks and then executes the
//! program, so no code runs between fork and exec.

use anyhow::{Context, Result, bail};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::unistd::{Pid, getppid};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Name of the hidden subcommand that calls `become_program`.
pub(crate) const SUBCOMMAND: &str = "die-with-parent";

/// A command that runs `program` and is killed when the calling *thread* ends. Program, arguments,
/// environment and directory carry over; the caller sets the streams.
pub(crate) fn die_with_this_thread(program: &Command) -> Command {
    // Not by its path: the host's tests run cargo, which may replace the file there.
    let mut command = Command::new("/proc/self/exe");
    command.arg(SUBCOMMAND).arg(std::process::id().to_string()).arg(program.get_program());
    command.args(program.get_args());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    if let Some(directory) = program.get_current_dir() {
        command.current_dir(directory);
    }
    command
}

/// Becomes `command`, to be killed when `parent` ends.
pub(crate) fn become_program(parent: i32, command: &[String]) -> Result<()> {
    set_pdeathsig(Signal::SIGKILL)?;
    if getppid() != Pid::from_raw(parent) {
        bail!("the lab ended while it started {command:?}");
    }
    let [program, arguments @ ..] = command else { bail!("no program to become") };
    // A process group of its own: ^C reaches the lab alone, whose end kills this process.
    nix::unistd::setpgid(Pid::from_raw(0), Pid::from_raw(0))?;
    Err(Command::new(program).args(arguments).exec()).with_context(|| format!("start {program}"))
}
