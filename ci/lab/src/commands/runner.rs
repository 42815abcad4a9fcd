//! `cargo ci runner`: a program of Cargo's in a guest, as `target.….runner` wants it.
//!
//! Cargo appends the program and its arguments to the runner's words, and takes the runner's streams and end for the
//! program's. The guest's kernel and devices are the lab's. Its files are this machine's (`mounts.rs` of the guest), so
//! that shared libraries, fixtures, and files that a test writes are where the test expects them.

use crate::arch::Arch;
use crate::commands::exec;
use crate::machine::device::{DeviceName, Emulation};
use crate::machine::session::{self, Machine, Session};
use crate::output::{errln, outln};
use crate::packages::fetch::Needs;
use crate::packages::kernel::KernelName;
use crate::run::progress;
use crate::workspace;
use anyhow::{Context, Result, bail};
use clap::Args;
use lab_guest::order::{Ending, GUEST_DIRECTORIES, HostFiles, OnHost, Order};
use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::{getegid, geteuid, getgroups};
use std::collections::BTreeSet;
use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

/// The guest to boot for a program of Cargo's.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = HELP)]
pub(crate) struct RunnerArguments {
    /// The kernel to boot: 6.1, 6.12, newest, or a version that Debian's suites carry (6.18, 6.18.9)
    #[arg(long, default_value = "newest")]
    kernel: KernelName,
    /// The RDMA device that the machine has
    #[arg(long, value_enum, default_value = "rxe")]
    device: DeviceName,
    #[command(flatten)]
    emulation: Emulation,
    /// Run as root of the guest instead of as your user with 8 MiB of memlock
    #[arg(long)]
    as_root: bool,
    /// Show the kernel's console
    #[arg(long)]
    console: bool,
    /// Seconds after which the program is given up
    #[arg(long, default_value_t = 3600)]
    timeout: u64,
    /// The program and its arguments, as Cargo appends them. Without them the command fetches and builds the
    /// parts of the machine, and prints the runner for Cargo
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

const HELP: &str = "\
In this workspace:
  CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=\"$(cargo ci runner --device mlx5)\" cargo test
In a package elsewhere, where UVERBS is the path of this workspace:
  runner=\"$(cargo run --manifest-path UVERBS/ci/lab/Cargo.toml -- runner --device mlx5)\"
  CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=\"$runner\" cargo test
or for ever, in its .cargo/config.toml:
  [target.x86_64-unknown-linux-gnu]
  runner = [\"UVERBS/target/debug/lab\", \"runner\", \"--device\", \"mlx5\"]

The guest has this machine's files, but its own /dev, /proc, /sys, /run and /tmp.";

/// Runs the program and ends as it did; without one, prints the runner.
pub(crate) fn runner(arguments: &RunnerArguments) -> Result<ExitCode> {
    let Some(program) = arguments.command.first() else {
        prepare(arguments)?;
        outln!("{}", words(&env::current_exe()?, env::args().skip(2))?);
        return Ok(ExitCode::SUCCESS);
    };
    progress::be_patient();
    let ending = run(arguments, Path::new(program))?;
    // Cargo says by which signal a program ended, and the runner is the program to it.
    if let Ending::Killed(signal) = ending {
        // The memory of this process explains nothing.
        setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
        signal_hook::low_level::emulate_default_handler(signal)?;
    }
    Ok(exec::exit_code(ending))
}

/// The downloads for a machine.
fn needs(arguments: &RunnerArguments, arch: Arch) -> Needs {
    Needs::kernels(arch, &[arguments.kernel])
}

/// Fetches and builds everything that the machine needs, so that the program starts soon.
fn prepare(arguments: &RunnerArguments) -> Result<()> {
    Session::open(&needs(arguments, Arch::default()), false)?;
    if arguments.device == DeviceName::Mlx5 {
        session::programs()?;
    }
    Ok(())
}

/// The runner's words for Cargo, which splits them at spaces.
fn words(lab: &Path, options: impl Iterator<Item = String>) -> Result<String> {
    let lab = lab.to_str().with_context(|| format!("{} is no UTF-8", lab.display()))?;
    if lab.contains(char::is_whitespace) {
        bail!(
            "Cargo would split {lab:?} at its space: write it into `.cargo/config.toml`, as the first of \
             `runner = [\"…/lab\", \"runner\"]`"
        );
    }
    let options = options.filter(|option| option != "--");
    let words: Vec<String> = [lab.to_owned(), "runner".into()].into_iter().chain(options).collect();
    Ok(words.join(" "))
}

fn run(arguments: &RunnerArguments, program: &Path) -> Result<Ending> {
    let arch = runs_on(program)?;
    let directory = env::current_dir().context("the current directory")?;
    let files = HostFiles { kept: kept(&directory, &program.canonicalize()?)? };
    let session = Session::open(&needs(arguments, arch), arguments.console)?;
    let machine = Machine {
        emulation: arguments.emulation,
        host: Some(&files),
        ..Machine::new(arguments.kernel, arguments.device)
    };
    let mut vm = session.boot(&machine)?;
    let order = Order {
        command: arguments.command.clone(),
        environment: environment(env::vars_os(), of_package(&directory)?),
        on_host: Some(on_host(&directory, arguments.as_root)?),
        ..Order::default()
    };
    let ending = exec::carry_out(&mut vm, &order, Duration::from_secs(arguments.timeout))?;
    vm.power_off()?;
    Ok(ending)
}

/// The processor that a program is for; fails if it cannot run there.
fn runs_on(program: &Path) -> Result<Arch> {
    let read = || -> std::io::Result<Vec<u8>> {
        // The headers, and the name of the loader behind them.
        let mut bytes = Vec::new();
        File::open(program)?.take(64 << 10).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().with_context(|| format!("read {}", program.display()))?;
    let arch = arch_of(&bytes).with_context(|| program.display().to_string())?;
    match exec::interpreter(&bytes) {
        Some(loader) if !Path::new(&loader).exists() => bail!(
            "{} is linked dynamically, and this machine has no {loader}: install the C library of its processor, or link \
             it statically (RUSTFLAGS=\"-C target-feature=+crt-static\")",
            program.display()
        ),
        _ => Ok(arch),
    }
}

/// The processor in the header of an ELF file. Another file is a script of this machine's.
fn arch_of(bytes: &[u8]) -> Result<Arch> {
    const X86_64: u8 = 62;
    const AARCH64: u8 = 183;
    match *bytes {
        [0x7f, b'E', b'L', b'F', 2, 1, ..] => match bytes.get(18..20) {
            Some([X86_64, 0]) => Ok(Arch::X86_64),
            Some([AARCH64, 0]) => Ok(Arch::Aarch64),
            other => bail!(
                "it is for the processor {other:?} of ELF; guests are {} ({X86_64}) or {} ({AARCH64})",
                Arch::X86_64.label(),
                Arch::Aarch64.label()
            ),
        },
        [0x7f, b'E', b'L', b'F', ..] => {
            bail!("it is no little-endian program of 64 bits, and guests run no others")
        }
        _ => Ok(Arch::default()),
    }
}

/// Directories below the guest's own ones that the guest has to see as this machine does: those with the program and
/// with the current directory in them.
fn kept(directory: &Path, program: &Path) -> Result<Vec<String>> {
    let own = |path: &Path| GUEST_DIRECTORIES.iter().find(|own| path.starts_with(own));
    if let Some(own) = own(program).filter(|own| program.parent() == Some(Path::new(own))) {
        bail!(
            "{} is in {own} itself, which is the guest's: move it into a directory",
            program.display()
        );
    }
    let mut kept = BTreeSet::new();
    for path in [Some(directory), program.parent()].into_iter().flatten() {
        let Some(own) = own(path) else { continue };
        if let Some(first) = path.strip_prefix(own)?.components().next() {
            let top = Path::new(own).join(first);
            kept.insert(top.to_str().with_context(|| format!("{top:?} is no UTF-8"))?.to_owned());
        }
    }
    Ok(kept.into_iter().collect())
}

/// The place and the user of the program.
fn on_host(directory: &Path, as_root: bool) -> Result<OnHost> {
    let directory = directory.to_str().with_context(|| format!("{directory:?} is no UTF-8"))?;
    let directory = directory.to_owned();
    if as_root {
        return Ok(OnHost { directory, ..OnHost::default() });
    }
    let groups = getgroups().context("the groups of this process")?;
    Ok(OnHost {
        directory,
        user: geteuid().as_raw(),
        group: getegid().as_raw(),
        groups: groups.into_iter().map(|group| group.as_raw()).collect(),
    })
}

/// Variables that name something which the guest does not have: a directory below `/tmp` or `/run`, or a socket there.
const NOT_THERE: &[&str] = &[
    "TMPDIR",
    "TMP",
    "TEMP",
    "XDG_RUNTIME_DIR",
    "DBUS_SESSION_BUS_ADDRESS",
    "DISPLAY",
    "WAYLAND_DISPLAY",
    "XAUTHORITY",
    "SSH_AUTH_SOCK",
];

/// The program's environment: all of this process's, as without a runner, because the files that it names are there.
/// `package` replaces Cargo's variables for the lab's package.
fn environment(
    variables: impl Iterator<Item = (OsString, OsString)>,
    package: Option<Vec<(String, String)>>,
) -> Vec<(String, String)> {
    let mut environment = Vec::new();
    for (name, value) in variables {
        let (Some(known), Some(value)) = (name.to_str(), value.to_str()) else {
            errln!("the guest does not get the variable {name:?}, which is no UTF-8");
            continue;
        };
        // A Cargo that the program starts is in a guest already.
        let is_runner = known.starts_with("CARGO_TARGET_") && known.ends_with("_RUNNER");
        let is_of_lab = package.is_some()
            && (known.starts_with("CARGO_PKG_")
                || ["CARGO_MANIFEST_DIR", "CARGO_MANIFEST_PATH", "OUT_DIR"].contains(&known));
        if !is_runner && !is_of_lab && !NOT_THERE.contains(&known) {
            environment.push((known.to_owned(), value.to_owned()));
        }
    }
    environment.extend(package.into_iter().flatten());
    environment
}

/// The variables that Cargo set for the program, if those of this process are the lab's: `cargo ci` is `cargo run`,
/// which sets them anew.
fn of_package(directory: &Path) -> Result<Option<Vec<(String, String)>>> {
    let lab = Path::new(env!("CARGO_MANIFEST_DIR"));
    let is_of_lab = env::var_os("CARGO_MANIFEST_DIR").is_some_and(|set| Path::new(&set) == lab);
    (is_of_lab && directory != lab).then(|| variables_of(directory)).transpose()
}

/// The variables that Cargo sets for tests of the package in a directory; none where there is no package.
fn variables_of(directory: &Path) -> Result<Vec<(String, String)>> {
    let output = Command::new(workspace::cargo())
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(directory)
        .stdin(Stdio::null())
        .output()
        .context("run cargo metadata")?;
    let manifest = directory.join("Cargo.toml");
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let mut packages = metadata["packages"].as_array().into_iter().flatten();
    let Some(package) = packages.find(|package| {
        package["manifest_path"].as_str().is_some_and(|path| Path::new(path) == manifest)
    }) else {
        return Ok(Vec::new());
    };
    let text = |field: &str| package[field].as_str().unwrap_or_default().to_owned();
    let authors = package["authors"].as_array().into_iter().flatten();
    let authors: Vec<&str> = authors.filter_map(|author| author.as_str()).collect();
    let version = text("version");
    let numbers = version.split_once('+').map_or(version.as_str(), |(numbers, _)| numbers);
    let (numbers, pre) = numbers.split_once('-').unwrap_or((numbers, ""));
    let mut variables = vec![
        ("CARGO_MANIFEST_DIR".to_owned(), directory.display().to_string()),
        ("CARGO_MANIFEST_PATH".to_owned(), manifest.display().to_string()),
        ("CARGO_PKG_AUTHORS".to_owned(), authors.join(":")),
        ("CARGO_PKG_VERSION_PRE".to_owned(), pre.to_owned()),
    ];
    for (part, number) in ["MAJOR", "MINOR", "PATCH"].into_iter().zip(numbers.split('.')) {
        variables.push((format!("CARGO_PKG_VERSION_{part}"), number.to_owned()));
    }
    let same = [
        "name",
        "version",
        "description",
        "homepage",
        "repository",
        "license",
        "license_file",
        "rust_version",
        "readme",
    ];
    let same = same.map(|field| (format!("CARGO_PKG_{}", field.to_uppercase()), text(field)));
    variables.extend(same);
    Ok(variables)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cli, Verb};
    use clap::Parser;

    fn parsed(line: &str) -> RunnerArguments {
        let cli = Cli::try_parse_from(line.split(' ')).unwrap_or_else(|error| panic!("{error}"));
        let Verb::Runner(arguments) = cli.command else { panic!("{line}: another command") };
        arguments
    }

    #[test]
    fn words_behind_the_program_are_its_own() {
        let arguments =
            parsed("lab runner --device mlx5 /t/deps/a-0123 --device --kernel x --help");
        assert_eq!(arguments.device, DeviceName::Mlx5);
        assert_eq!(arguments.command, ["/t/deps/a-0123", "--device", "--kernel", "x", "--help"]);
        let arguments = parsed("lab runner --kernel 6.12 -- target/debug/a -- b");
        assert_eq!((arguments.kernel, arguments.device), (KernelName::V6_12, DeviceName::Rxe));
        assert_eq!(arguments.command, ["target/debug/a", "--", "b"]);
        assert!(parsed("lab runner").command.is_empty());
    }

    #[test]
    fn the_runner_for_cargo_has_the_options_that_were_given() {
        let options = ["--device", "mlx5", "--"].map(str::to_owned).into_iter();
        let printed = words(Path::new("/u/target/debug/lab"), options).unwrap();
        assert_eq!(printed, "/u/target/debug/lab runner --device mlx5");
        let error = words(Path::new("/my code/lab"), std::iter::empty()).unwrap_err().to_string();
        assert!(error.contains("my code") && error.contains("config.toml"), "{error}");
    }

    #[test]
    fn the_program_gets_the_environment_but_names_of_what_the_guest_has_not() {
        let given = [
            ("CARGO_MANIFEST_DIR", "/p"),
            (workspace::RUNNER, "lab runner"),
            ("LD_LIBRARY_PATH", "/p/target/debug/deps"),
            ("PROPTEST_CASES", "7"),
            ("TMPDIR", "/tmp/mine"),
            ("XDG_RUNTIME_DIR", "/run/user/1000"),
        ];
        let given = given.map(|(name, value)| (name.into(), value.into()));
        let names: Vec<String> =
            environment(given.into_iter(), None).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["CARGO_MANIFEST_DIR", "LD_LIBRARY_PATH", "PROPTEST_CASES"]);
    }

    #[test]
    fn variables_of_the_labs_package_give_way_to_those_of_the_programs() {
        let given = [
            ("CARGO_MANIFEST_DIR", "/lab"),
            ("CARGO_PKG_NAME", "lab"),
            ("OUT_DIR", "/o"),
            ("A", "b"),
        ];
        let given = given.map(|(name, value)| (name.into(), value.into()));
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest");
        let package = variables_of(&directory).unwrap();
        let environment = environment(given.into_iter(), Some(package));
        let value = |name: &str| {
            let mut values = environment.iter().filter(|(known, _)| known == name);
            let value = values.next().map(|(_, value)| value.as_str());
            assert!(values.next().is_none(), "{name} is there twice");
            value
        };
        assert_eq!(value("A"), Some("b"));
        assert_eq!(value("OUT_DIR"), None);
        assert_eq!(value("CARGO_PKG_NAME"), Some("lab-guest"));
        assert_eq!(value("CARGO_PKG_VERSION"), Some(env!("CARGO_PKG_VERSION")));
        assert_eq!(value("CARGO_PKG_VERSION_MINOR"), Some(env!("CARGO_PKG_VERSION_MINOR")));
        assert_eq!(value("CARGO_PKG_VERSION_PRE"), Some(""));
        assert_eq!(value("CARGO_PKG_LICENSE"), Some(env!("CARGO_PKG_LICENSE")));
        assert_eq!(value("CARGO_PKG_AUTHORS"), Some(""));
        assert_eq!(value("CARGO_MANIFEST_DIR"), directory.to_str());
        assert_eq!(value("CARGO_MANIFEST_PATH"), directory.join("Cargo.toml").to_str());
    }

    #[test]
    fn directories_below_the_guests_own_ones_stay_this_machines() {
        let kept = |directory: &str, program: &str| kept(Path::new(directory), Path::new(program));
        assert_eq!(kept("/home/a/p", "/home/a/target/t").unwrap(), [""; 0]);
        assert_eq!(kept("/tmp/p/q", "/tmp/p/target/debug/t").unwrap(), ["/tmp/p"]);
        assert_eq!(kept("/run/user/p", "/dev/shm/target/t").unwrap(), ["/dev/shm", "/run/user"]);
        assert_eq!(kept("/tmp", "/tmporary/t").unwrap(), [""; 0]);
        let error = kept("/home", "/tmp/t").unwrap_err().to_string();
        assert!(error.contains("/tmp/t") && error.contains("move it"), "{error}");
    }

    #[test]
    fn a_program_runs_on_its_processor_or_not_at_all() {
        assert_eq!(runs_on(&env::current_exe().unwrap()).unwrap(), Arch::X86_64);
        let mut elf = b"\x7fELF\x02\x01".to_vec();
        elf.resize(64, 0);
        elf[18] = 183;
        assert_eq!(arch_of(&elf).unwrap(), Arch::Aarch64);
        elf[18] = 243;
        let error = arch_of(&elf).unwrap_err().to_string();
        assert!(error.contains("243") && error.contains("aarch64 (183)"), "{error}");
        elf[4] = 1;
        assert!(arch_of(&elf).unwrap_err().to_string().contains("64 bits"));
        assert!(arch_of(&elf[..5]).is_err());
        assert_eq!(arch_of(b"#!/bin/sh\n").unwrap(), Arch::X86_64);
        let error = runs_on(Path::new("/nowhere/t")).unwrap_err().to_string();
        assert!(error.contains("/nowhere/t"), "{error}");
    }
}
