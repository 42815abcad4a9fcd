//! `lab-launch`: sets up a session, limits and a user for itself, and then executes the ordered
//! program.
//!
//! A program of its own, because a process with threads must not allocate between fork and exec.
//! `processes.rs` starts it.

use crate::output::errln;
use lab_guest::order::{HOST_PATH, OnHost, Order, USER, USER_MEMLOCK};
use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::{Gid, Uid, chroot, setgid, setgroups, setsid, setuid};
use std::env;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// The arguments for `lab-launch` that carry out an order.
pub(crate) fn arguments(order: &Order) -> Result<Vec<String>, serde_json::Error> {
    let user = match (&order.on_host, order.root) {
        (Some(on_host), _) => serde_json::to_string(on_host)?,
        (None, true) => "root".into(),
        (None, false) => "user".into(),
    };
    let terminal = if order.terminal.is_some() { "terminal" } else { "plain" };
    let first = [user, terminal.into(), "--".into()].into_iter();
    Ok(first.chain(order.command.iter().cloned()).collect())
}

/// `lab-launch root|user|ON-HOST terminal|plain -- COMMAND…`, where `ON-HOST` is [`OnHost`] as JSON; returns only if
/// that fails.
pub(crate) fn become_ordered() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [user, terminal, _, program, rest @ ..] = arguments.as_slice() else {
        errln!("lab-launch root|user|ON-HOST terminal|plain -- COMMAND…");
        return ExitCode::from(2);
    };
    if let Err(error) = take_place(user, terminal == "terminal") {
        errln!("lab-launch: {error}");
        return ExitCode::from(126);
    }
    let error = Command::new(program).args(rest).exec();
    errln!("{program}: {error}");
    ExitCode::from(if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 })
}

fn take_place(user: &str, terminal: bool) -> Result<(), Box<dyn std::error::Error>> {
    setsid()?;
    if terminal {
        rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
    }
    match user {
        "root" => Ok(()),
        "user" => become_user(USER.1, USER.1, &[]),
        on_host => {
            let OnHost { directory, user, group, groups } = serde_json::from_str(on_host)?;
            chroot(HOST_PATH)?;
            become_user(user, group, &groups)?;
            // After the change of user, because root may be allowed to enter it and the user not.
            env::set_current_dir(&directory).map_err(|error| format!("{directory}: {error}").into())
        }
    }
}

/// Becomes a user, with a user's limit of memory that it may pin unless that is root.
fn become_user(user: u32, group: u32, groups: &[u32]) -> Result<(), Box<dyn std::error::Error>> {
    // So that it can open its own streams by `/dev/stdout` and the like.
    for stream in [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()] {
        rustix::fs::fchown(stream, Some(rustix::process::Uid::from_raw(user)), None)?;
    }
    if user != 0 {
        setrlimit(Resource::RLIMIT_MEMLOCK, USER_MEMLOCK, USER_MEMLOCK)?;
    }
    let groups: Vec<Gid> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
    setgroups(&groups)?;
    setgid(Gid::from_raw(group))?;
    setuid(Uid::from_raw(user))?;
    Ok(())
}
