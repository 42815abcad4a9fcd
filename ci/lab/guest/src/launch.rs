//! `lab-launch`: sets up a session, limits and a user for itself, and then executes the ordered
//! program.
//!
//! A program of its own, because a process with threads must not allocate between fork and exec.
//! `processes.rs` starts it.

use crate::output::errln;
use lab_guest::order::{USER, USER_MEMLOCK};
use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::{Gid, Uid, setgid, setgroups, setsid, setuid};
use std::env;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// `lab-launch root|user terminal|plain -- COMMAND…`; returns only if that fails.
pub(crate) fn become_ordered() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [user, terminal, _, program, rest @ ..] = arguments.as_slice() else {
        errln!("lab-launch root|user terminal|plain -- COMMAND…");
        return ExitCode::from(2);
    };
    if let Err(error) = take_place(user == "root", terminal == "terminal") {
        errln!("lab-launch: {error}");
        return ExitCode::from(126);
    }
    let error = Command::new(program).args(rest).exec();
    errln!("{program}: {error}");
    ExitCode::from(if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 })
}

fn take_place(root: bool, terminal: bool) -> Result<(), Box<dyn std::error::Error>> {
    setsid()?;
    if terminal {
        rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
    }
    if !root {
        let (_, id) = USER;
        // So that it can open its own streams by `/dev/stdout` and the like.
        for stream in [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()] {
            let user = rustix::process::Uid::from_raw(id);
            rustix::fs::fchown(stream, Some(user), None)?;
        }
        setrlimit(Resource::RLIMIT_MEMLOCK, USER_MEMLOCK, USER_MEMLOCK)?;
        setgroups(&[])?;
        setgid(Gid::from_raw(id))?;
        setuid(Uid::from_raw(id))?;
    }
    Ok(())
}
