//! `cargo ci exec` and `cargo ci shell`: one command in a guest, with the host's standard streams.
//!
//! The exit status is passed through, too.

use crate::arch::Arch;
use crate::machine::device::{self, DeviceName, Emulation};
use crate::machine::initramfs::Initramfs;
use crate::machine::session::{Machine, Session};
use crate::machine::vm::{GuestEvent, Vm};
use crate::output::{self, errln};
use crate::packages::fetch::Needs;
use crate::packages::kernel::KernelName;
use crate::run::stages;
use crate::run::terminal::RawTerminal;
use crate::workspace::Profile;
use anyhow::{Context, Result, bail};
use clap::Args;
use lab_guest::order::{Ending, Order};
use object::LittleEndian;
use object::elf::FileHeader64;
use object::read::elf::{FileHeader, ProgramHeader};
use rustix::termios::tcgetwinsize;
use std::io::{IsTerminal, stdin};
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
    /// Add Python with rdma-core's bindings and their tests; implies --peers
    #[arg(long)]
    python: bool,
    #[command(flatten)]
    emulation: Emulation,
    /// Run as root instead of as a user with 8 MiB of memlock
    #[arg(long)]
    as_root: bool,
    /// Record the input and output of an emulated device, in this directory of this machine, and its packets in
    /// packets.pcap there
    #[arg(long, value_name = "DIR")]
    record: Option<PathBuf>,
    /// Do not build this workspace's programs for the guest
    #[arg(long)]
    no_build: bool,
    /// Build all of this workspace's programs for the guest: `uverbs` and `uverbs-device-tests`
    #[arg(long, conflicts_with = "no_build")]
    build: bool,
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
    /// Command and arguments; the path of a static program of this machine takes it into the guest, unless the guest
    /// has a file of that path. `uverbs` and `uverbs-device-tests` are built if the command names them
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

/// Runs the command and returns its exit status.
pub(crate) fn exec(arguments: &ExecArguments) -> Result<ExitCode> {
    let command = arguments.command.clone();
    run(&arguments.machine, command, named(&arguments.command), false)
}

/// Runs a shell.
pub(crate) fn shell(arguments: &MachineArguments) -> Result<ExitCode> {
    let own = Own { command_line: true, suite: false };
    run(arguments, vec!["sh".into(), "-l".into()], own, stdin().is_terminal())
}

/// Which of the workspace's programs a guest needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Own {
    command_line: bool,
    suite: bool,
}

/// The programs of the workspace that a command names, in a script as well.
fn named(command: &[String]) -> Own {
    let in_name = |c: char| c.is_alphanumeric() || "-_./".contains(c);
    let names: Vec<&str> = command
        .iter()
        .flat_map(|word| word.split(|c| !in_name(c)))
        .filter_map(|word| word.rsplit('/').next())
        .collect();
    Own { command_line: names.contains(&"uverbs"), suite: names.contains(&"uverbs-device-tests") }
}

fn run(
    arguments: &MachineArguments,
    mut command: Vec<String>,
    own: Own,
    terminal: bool,
) -> Result<ExitCode> {
    for overlay in &arguments.overlay {
        if !overlay.is_dir() {
            bail!("--overlay {}: not a directory", overlay.display());
        }
    }
    if let Some(directory) = &arguments.record {
        device::check_recordings(directory)?;
    }
    let peers = arguments.peers || arguments.python;
    let needs = Needs {
        arch: arguments.arch,
        kernels: vec![arguments.kernel],
        peers,
        python: arguments.python,
    };
    let session = Session::open(&needs, arguments.console)?;
    let machine = Machine {
        overlays: &arguments.overlay,
        peers,
        python: arguments.python,
        emulation: arguments.emulation,
        record: arguments.record.as_deref(),
        ..Machine::new(arguments.kernel, arguments.device)
    };
    let mut from_here = None;
    let here = Path::new(&command[0]);
    if command[0].contains('/') && here.is_file() {
        let root = session.root(&machine)?;
        if !root.has(here) {
            runs_in(&root, here)?;
            let name = here.file_name().and_then(|name| name.to_str()).context("program name")?;
            from_here = Some((name.to_owned(), here.canonicalize()?));
        }
    }
    let is_from_here = |name: &str| from_here.as_ref().is_some_and(|(known, _)| known == name);
    let own = Own {
        command_line: own.command_line && !is_from_here("uverbs"),
        suite: own.suite && !is_from_here("uverbs-device-tests"),
    };
    let stage = stages::stage("build: programs for the guest");
    let mut programs = match own {
        _ if arguments.no_build => Vec::new(),
        Own { command_line: true, suite: false } if !arguments.build => {
            let path = session.workspace.static_program_alone("uverbs-cli", "uverbs")?;
            vec![("uverbs".into(), path)]
        }
        Own { command_line: false, suite: false } if !arguments.build => Vec::new(),
        _ => session.workspace.programs(Profile::Checked)?,
    };
    drop(stage);
    if let Some((name, path)) = from_here {
        command[0] = format!("/usr/local/bin/{name}");
        programs.push((name, path));
    }
    let mut vm = session.boot(&Machine { programs: &programs, ..machine })?;
    if output::is_watched() || arguments.console {
        errln!(
            "{} ready after {:.1} s: {}",
            vm.greeting.release,
            vm.boot_time.as_secs_f64(),
            vm.greeting.devices.join(", ")
        );
    }
    let stage = stages::stage(format!("the command {}", command[0]));
    let raw = if terminal { Some(RawTerminal::enter()?) } else { None };
    let size = tcgetwinsize(rustix::stdio::stdout()).map(|size| (size.ws_col, size.ws_row));
    let order = Order {
        command,
        root: arguments.as_root,
        terminal: terminal.then(|| size.unwrap_or((80, 24))),
        ..Order::default()
    };
    let ending = carry_out(&mut vm, &order, Duration::from_secs(arguments.timeout))?;
    drop(stage);
    drop(raw);
    vm.power_off()?;
    Ok(exit_code(ending))
}

/// Runs one process to its end with the standard streams of this one.
pub(crate) fn carry_out(vm: &mut Vm, order: &Order, timeout: Duration) -> Result<Ending> {
    let process = vm.start(order)?;
    let mut feeder = vm.feeder()?;
    // This thread ends with the process, because a read of standard input cannot be interrupted.
    thread::spawn(move || feeder.copy(process, stdin()));
    vm.wait(process, timeout, &mut |event| show(event))
}

/// The status that a shell would show.
pub(crate) fn exit_code(ending: Ending) -> ExitCode {
    ExitCode::from(u8::try_from(ending.status() & 0xff).unwrap_or(1))
}

/// Fails if a program of this machine needs a loader that the guest does not have.
fn runs_in(root: &Initramfs, program: &Path) -> Result<()> {
    let bytes = std::fs::read(program).with_context(|| format!("read {}", program.display()))?;
    match interpreter(&bytes) {
        Some(loader) if !root.has(Path::new(&loader)) => bail!(
            "{} is linked dynamically, and the guest has no {loader}: link it statically (RUSTFLAGS=\"-C \
             target-feature=+crt-static\" with a --target), or bring its libraries by --overlay",
            program.display()
        ),
        _ => Ok(()),
    }
}

/// The loader that a 64-bit ELF file names (`PT_INTERP`).
pub(crate) fn interpreter(elf: &[u8]) -> Option<String> {
    let header = FileHeader64::<LittleEndian>::parse(elf).ok()?;
    let mut segments = header.program_headers(LittleEndian, elf).ok()?.iter();
    let path = segments.find_map(|segment| segment.interpreter(LittleEndian, elf).ok()?)?;
    Some(String::from_utf8_lossy(path).into_owned())
}

/// Shows the output of a process of the guest. If that fails the lab ends, and the guest with it.
pub(crate) fn show(event: &GuestEvent) {
    match event {
        GuestEvent::Stdout(_, bytes) => {
            output::write(bytes).unwrap_or_else(|error| output::fail(&error));
        }
        GuestEvent::Stderr(_, bytes) => output::pass_on(bytes),
        GuestEvent::Exit(..) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn programs_that_a_command_names_are_built() {
        let of = |text| {
            let own = named(&words(text));
            (own.command_line, own.suite)
        };
        assert_eq!(of("uverbs devinfo"), (true, false));
        assert_eq!(of("uverbs-device-tests rc::"), (false, true));
        assert_eq!(of("ibv_devinfo -v"), (false, false));
        assert_eq!(of("./target/uverbs/echo 10.0.0.1"), (false, false));
        let script = ["sh", "-c", "(uverbs pingpong rc&);uverbs-device-tests"].map(str::to_owned);
        assert_eq!(named(&script), Own { command_line: true, suite: true });
        assert_eq!(of("/usr/local/bin/uverbs doctor"), (true, false));
    }

    #[test]
    fn a_program_of_the_guest_is_its_own() {
        let own = std::env::current_exe().unwrap();
        let mut root = Initramfs::new(&own);
        assert!(!root.has(&own) && !root.has(Path::new("/usr/bin/ping")));
        root.program("usr/bin/ping", &own);
        for path in ["/usr/bin/ping", "/bin/ping", "/sbin/modprobe", "/init"] {
            assert!(root.has(Path::new(path)), "{path}");
        }
        assert!(!root.has(Path::new("/usr/bin")), "a directory");
        assert!(!root.has(Path::new("usr/bin/ping")), "a path of this machine");
    }

    #[test]
    fn a_dynamic_program_names_its_loader() {
        let own = std::env::current_exe().unwrap();
        let root = Initramfs::new(&own);
        let loader = interpreter(&std::fs::read(&own).unwrap());
        // The tests themselves may be static.
        match loader {
            Some(loader) => {
                let error = runs_in(&root, &own).unwrap_err().to_string();
                assert!(error.contains(&loader) && error.contains("statically"), "{error}");
            }
            None => runs_in(&root, &own).unwrap(),
        }
        let mut elf = vec![0; 200];
        elf[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        (elf[32], elf[54], elf[56]) = (64, 56, 1);
        assert_eq!(interpreter(&elf), None);
        (elf[64], elf[72], elf[96]) = (3, 150, 3);
        elf[150..153].copy_from_slice(b"/l\0");
        assert_eq!(interpreter(&elf).as_deref(), Some("/l"));
        for length in 0..elf.len() {
            let _cut = interpreter(&elf[..length]);
        }
    }
}
