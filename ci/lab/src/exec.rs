//! `cargo ci exec` and `cargo ci shell`: one command in a guest, with the host's standard streams.
//!
//! The exit status is passed through, too.

use crate::arch::Arch;
use crate::device::{DeviceName, Emulation};
use crate::fetch::Needs;
use crate::kernel::KernelName;
use crate::session::{Machine, Session};
use crate::vm::GuestEvent;
use crate::workspace::{Profile, Workspace};
use anyhow::{Context, Result};
use clap::Args;
use lab_guest::order::Order;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::{IsTerminal, Write, stderr, stdin, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

/// The guest to boot, and the files that it gets.
#[derive(Args, Clone, Debug)]
pub(crate) struct MachineArguments {
    /// The kernel to boot: 6.1, 6.12, newest, or a version that Debian's suites carry (6.18, 6.18.9)
    #[arg(long, default_value = "newest")]
    kernel: KernelName,
    /// The processors of the machine
    #[arg(long, value_enum, default_value = "x86_64")]
    arch: Arch,
    /// The RDMA device that it has
    #[arg(long, value_enum, default_value = "rxe")]
    device: DeviceName,
    /// Directory to lay over the guest's root; may be given several times
    #[arg(long, value_name = "DIR")]
    overlay: Vec<PathBuf>,
    /// Add rdma-core's tools (ibv_*, perftest, rping, rdma)
    #[arg(long)]
    peers: bool,
    /// Add Python with rdma-core's bindings and their tests, and what --peers adds
    #[arg(long)]
    python: bool,
    #[command(flatten)]
    emulation: Emulation,
    /// Run as root instead of as a user with 8 MiB of memlock
    #[arg(long)]
    as_root: bool,
    /// Record what an emulated device sees and does, in this directory of this machine
    #[arg(long, value_name = "DIR")]
    record: Option<PathBuf>,
    /// Do not build this workspace's programs for the guest
    #[arg(long)]
    no_build: bool,
    /// Show the kernel's console
    #[arg(long)]
    console: bool,
    /// Seconds after which the command is given up
    #[arg(long, default_value_t = 3600)]
    timeout: u64,
}

/// `cargo ci exec`
#[derive(Args, Clone, Debug)]
pub(crate) struct ExecArguments {
    #[command(flatten)]
    machine: MachineArguments,
    /// Command and arguments; a path to a program of this machine takes it into the guest
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

/// The programs that the workspace has, with their names in the guest.
pub(crate) fn programs(workspace: &Workspace, profile: Profile) -> Result<Vec<(String, PathBuf)>> {
    let mut programs = Vec::new();
    if workspace.has("uverbs-cli", "bin", "uverbs") {
        programs
            .push(("uverbs".into(), workspace.static_program("uverbs-cli", "uverbs", profile)?));
    }
    if workspace.has("uverbs", "test", "device") {
        let test = workspace.static_test("uverbs", "device", profile)?;
        programs.push(("uverbs-device-tests".into(), test));
    }
    Ok(programs)
}

/// Runs the command and returns its exit status.
pub(crate) fn exec(arguments: &ExecArguments) -> Result<ExitCode> {
    run(&arguments.machine, arguments.command.clone(), false)
}

/// Runs a shell.
pub(crate) fn shell(arguments: &MachineArguments) -> Result<ExitCode> {
    run(arguments, vec!["sh".into(), "-l".into()], stdin().is_terminal())
}

fn run(arguments: &MachineArguments, mut command: Vec<String>, terminal: bool) -> Result<ExitCode> {
    for overlay in &arguments.overlay {
        if !overlay.is_dir() {
            anyhow::bail!("--overlay {}: not a directory", overlay.display());
        }
    }
    let peers = arguments.peers || arguments.python;
    let needs = Needs {
        arch: arguments.arch,
        kernels: vec![arguments.kernel],
        peers,
        python: arguments.python,
    };
    let session = Session::open(&needs, arguments.console)?;
    let mut programs = if arguments.no_build {
        Vec::new()
    } else {
        programs(&session.workspace, Profile::Checked)?
    };
    if is_from_here(&command[0], &arguments.overlay) {
        let here = Path::new(&command[0]);
        let name = here.file_name().and_then(|name| name.to_str()).context("program name")?;
        programs.push((name.to_owned(), here.canonicalize()?));
        command[0] = format!("/usr/local/bin/{name}");
    }
    let mut vm = session.boot(&Machine {
        programs: &programs,
        overlays: &arguments.overlay,
        peers,
        python: arguments.python,
        emulation: arguments.emulation,
        record: arguments.record.as_deref(),
        ..Machine::new(arguments.kernel, arguments.device)
    })?;
    if stderr().is_terminal() || arguments.console {
        eprintln!(
            "{} ready after {:.1} s: {}",
            vm.greeting.release,
            vm.boot_time.as_secs_f64(),
            vm.greeting.devices.join(", ")
        );
    }
    let raw = if terminal { Some(RawTerminal::enter()?) } else { None };
    let size = tcgetwinsize(rustix::stdio::stdout()).map(|size| (size.ws_col, size.ws_row));
    let process = vm.start(&Order {
        command,
        root: arguments.as_root,
        terminal: terminal.then(|| size.unwrap_or((80, 24))),
        ..Order::default()
    })?;
    let mut feeder = vm.feeder()?;
    // This thread ends with the process, because a read of standard input cannot be interrupted.
    thread::spawn(move || feeder.copy(process, stdin()));
    let ending = vm.wait(process, Duration::from_secs(arguments.timeout), &mut |event| {
        // The guest's process does not notice that the reader of its output is gone.
        let _closed = match event {
            GuestEvent::Stdout(_, bytes) => {
                stdout().write_all(bytes).and_then(|()| stdout().flush())
            }
            GuestEvent::Stderr(_, bytes) => stderr().write_all(bytes),
            GuestEvent::Exit(..) => Ok(()),
        };
    })?;
    drop(raw);
    vm.power_off()?;
    Ok(ExitCode::from(u8::try_from(ending.status() & 0xff).unwrap_or(1)))
}

/// Whether a command is a program of the host that the guest needs: a path to a file that the guest
/// does not have itself.
fn is_from_here(command: &str, overlays: &[PathBuf]) -> bool {
    const SYSTEM: [&str; 5] = ["/bin", "/sbin", "/usr", "/lib", "/lab"];
    let path = Path::new(command);
    let in_overlay = path
        .strip_prefix("/")
        .is_ok_and(|path| overlays.iter().any(|overlay| overlay.join(path).exists()));
    command.contains('/')
        && path.is_file()
        && !SYSTEM.iter().any(|system| path.starts_with(system))
        && !in_overlay
}

/// Raw mode of the terminal, until dropped.
struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    fn enter() -> Result<Self> {
        let before = tcgetattr(rustix::stdio::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(rustix::stdio::stdin(), OptionalActions::Flush, &raw)?;
        Ok(Self { before })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // A terminal that is gone needs no reset.
        let _gone = tcsetattr(rustix::stdio::stdin(), OptionalActions::Flush, &self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::is_from_here;

    #[test]
    fn programs_of_the_guest_are_not_copied() {
        let own = std::env::current_exe().unwrap();
        assert!(is_from_here(own.to_str().unwrap(), &[]));
        assert!(!is_from_here("/bin/sh", &[]));
        assert!(!is_from_here("sh", &[]));
        assert!(!is_from_here("/nonexistent/program", &[]));
        assert!(!is_from_here(own.to_str().unwrap(), &["/".into()]), "an overlay has it");
    }
}
