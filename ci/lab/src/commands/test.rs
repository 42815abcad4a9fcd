//! `cargo ci test`: the host's tests, and the device suites on each requested kernel and device, in
//! parallel.

use crate::arch::Arch;
use crate::check;
use crate::commands::smoke;
use crate::host::cargo_test;
use crate::machine::device::{DeviceName, Emulation};
use crate::output::outln;
use crate::packages::cache::Cache;
use crate::packages::cross::Cross;
use crate::packages::fetch::{self, Needs};
use crate::packages::kernel::KernelName;
use crate::run::jobs::{self, Job};
use crate::run::junit;
use crate::run::stages;
use crate::run::summary::{Section, Summary};
use crate::suites::capability::RunOptions;
use crate::suites::cases;
use crate::suites::examples;
use crate::suites::setup::{
    LazySetup, SETUP, SetupRequest, examples_on, group_on, guest, reports_of, section_of, suites_on,
};
use crate::suites::suite::{self, TestScope};
use crate::workspace::{Workspace, has_static_libc};
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// One kernel or all.
#[derive(Clone, Copy, Debug)]
enum Kernels {
    One(KernelName),
    All,
}

impl FromStr for Kernels {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "all" { Ok(Self::All) } else { text.parse().map(Self::One) }
    }
}

/// One device or all.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Devices {
    Rxe,
    Mlx5,
    All,
}

/// `cargo ci test`
#[derive(Args, Clone, Debug)]
pub(crate) struct TestArguments {
    /// Kernels to run on: 6.1, 6.12, newest, all three, or a version that Debian's suites carry (6.18,
    /// 6.18.9) [default: newest, with --full all]
    #[arg(long)]
    kernel: Option<Kernels>,
    /// Devices to run on [default: all]
    #[arg(long, value_enum)]
    device: Option<Devices>,
    /// The processors of the machines; the host's tests run on this machine's only
    #[arg(long, value_enum, default_value = "x86_64")]
    arch: Arch,
    /// Run on this RDMA device of this machine instead of in a VM, changing nothing of the machine
    #[arg(long, value_name = "DEV", conflicts_with_all = ["kernel", "device", "arch"])]
    native: Option<String>,
    /// InfiniBand ports in place of Ethernet ones, and so mlx5 alone
    #[arg(long, conflicts_with_all = ["native", "full", "arch"])]
    infiniband: bool,
    /// All kernels, the suites against rdma-core's tools, and formatting, lints and documentation
    #[arg(long, conflicts_with = "arch")]
    full: bool,
    /// The suites against rdma-core's tools, too, as with --full
    #[arg(long, conflicts_with = "native")]
    peers: bool,
    /// Leave out the host's tests, and with --full also `cargo ci check`
    #[arg(long)]
    no_host: bool,
    /// Write the results into this file as JUnit XML
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Show the kernels' consoles
    #[arg(long)]
    console: bool,
    /// Write the time of each stage into ci/lab/times.txt, for later runs to be compared with
    #[arg(long)]
    record_times: bool,
    /// Run only tests whose names contain this, and leave out `cargo ci check`
    filter: Option<String>,
}

impl TestArguments {
    fn kernels(&self) -> Vec<KernelName> {
        match self.kernel {
            Some(Kernels::One(kernel)) => vec![kernel],
            Some(Kernels::All) => KernelName::ALL.to_vec(),
            None if self.full => KernelName::ALL.to_vec(),
            None => vec![KernelName::Newest],
        }
    }

    fn devices(&self) -> Vec<DeviceName> {
        match self.device {
            None | Some(Devices::All) if self.infiniband => vec![DeviceName::Mlx5],
            None | Some(Devices::All) => DeviceName::ALL.to_vec(),
            Some(Devices::Rxe) => vec![DeviceName::Rxe],
            Some(Devices::Mlx5) => vec![DeviceName::Mlx5],
        }
    }

    fn emulation(&self) -> Emulation {
        Emulation { infiniband: self.infiniband, ..Emulation::default() }
    }

    /// The downloads that the run needs.
    fn needs(&self) -> Needs {
        let proven = self.devices().contains(&DeviceName::Mlx5);
        let against = self.full || self.peers;
        let more = against || self.filter.is_some();
        Needs {
            arch: self.arch,
            kernels: self.kernels(),
            peers: more && (against || proven),
            python: more && proven,
        }
    }

    fn scope(&self) -> TestScope<'_> {
        let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
        TestScope {
            filter: self.filter.as_deref(),
            choice: None,
            options: RunOptions { peers: self.full || self.peers, soak: false },
            emulation: self.emulation(),
            rounds: if self.full { FULL_ROUNDS } else { 1 },
            patience: if self.full { minutes(30) } else { minutes(12) },
            silence: if self.full { minutes(10) } else { minutes(3) },
        }
    }
}

/// A full run repeats five times as often as an ordinary one on the newest kernel: 500 rounds in place of 100.
/// A leak of the library shows on any kernel, and a leak of a driver in 100 rounds. The soak has 10,000.
const FULL_ROUNDS: u32 = 5;

/// Names of jobs that other jobs wait for.
const CHECK: &str = "check";
const HOST: &str = "host tests";

/// A job returns a section, or its part of a section that several jobs fill.
type Work<'a> = Job<'a, Section>;

/// Runs the tests and prints the summary. It returns success only if nothing failed.
pub(crate) fn test(arguments: &TestArguments) -> Result<ExitCode> {
    if arguments.infiniband && matches!(arguments.device, Some(Devices::Rxe)) {
        bail!("soft-RoCE has no InfiniBand ports: leave out --infiniband, or take --device mlx5");
    }
    if let Some(path) = &arguments.junit {
        junit::check_place(path)?;
    }
    let workspace = Workspace::find()?;
    let logs = workspace.log_directory()?;
    stages::start(&logs).with_context(|| format!("write into {}", logs.display()))?;
    let scope = arguments.scope();
    let mut accelerator = "no machine";
    let sections = match &arguments.native {
        Some(device) => {
            let mut sections = Vec::new();
            if !arguments.no_host {
                sections.push(cargo_test::tests(&workspace, scope.filter, arguments.full)?);
            }
            sections.push(native(&workspace, device, &scope)?);
            sections
        }
        None => {
            let setup = LazySetup::default();
            let sections =
                jobs::run(jobs::slots(), jobs(arguments, &workspace, &setup, &scope, &logs));
            if let Ok(ready) = setup.ready() {
                accelerator = ready.session.accelerator().label();
            }
            sections
        }
    };
    let summary = Summary { sections: joined(sections) };
    if summary.sections.iter().all(|section| section.reports.is_empty()) {
        bail!("no test's name contains {:?}", scope.filter.unwrap_or_default());
    }
    outln!("\n{summary}");
    if let Some(path) = &arguments.junit {
        fs::write(path, junit::document(&summary))
            .with_context(|| format!("write {}", path.display()))?;
    }
    let command = if arguments.full { "full" } else { "test" };
    let whole = arguments.filter.is_none()
        && arguments.kernel.is_none()
        && arguments.device.is_none()
        && arguments.arch.is_host();
    let class = stages::machine_class(accelerator);
    let table = stages::finish(
        workspace.root(),
        &logs,
        if whole { command } else { "part" },
        &class,
        arguments.record_times,
    );
    outln!("\n{}", table.context("the table of stages")?);
    outln!("{summary:#}; logs in {}", logs.display());
    Ok(if summary.failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Joins the parts of each section.
fn joined(parts: Vec<Section>) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    for part in parts {
        match sections.iter_mut().find(|section| section.name == part.name) {
            Some(section) => {
                section.reports.extend(part.reports);
                let gap = if section.note.is_empty() || part.note.is_empty() { "" } else { ", " };
                section.note = format!("{}{gap}{}", section.note, part.note);
            }
            None => sections.push(part),
        }
    }
    sections.retain(|section| !section.reports.is_empty());
    sections
}

fn native(workspace: &Workspace, device: &str, scope: &TestScope<'_>) -> Result<Section> {
    if !Path::new("/sys/class/infiniband").join(device).exists() {
        bail!("--native {device}: this machine has no such RDMA device");
    }
    let start = Instant::now();
    let suite = suite::build_native(workspace)?;
    let reports = reports_of(suite.name, suite::run_native(&suite, device, scope));
    let note = format!("{} s", start.elapsed().as_secs());
    Ok(Section { name: format!("native {device}"), reports, note })
}

/// The jobs of a run. One chain of host checks runs beside one job slot of guests until the checks are
/// over; the longest guests come first.
fn jobs<'a>(
    arguments: &'a TestArguments,
    workspace: &'a Workspace,
    setup: &'a LazySetup,
    scope: &'a TestScope<'a>,
    logs: &'a Path,
) -> Vec<Work<'a>> {
    let filter = scope.filter;
    let suites = !filter.is_some_and(|filter| {
        cases::suffices(filter) || examples::suffices(filter) || smoke::suffices(filter)
    });
    let all_examples = arguments.full && filter.is_none();
    let request = SetupRequest {
        needs: arguments.needs(),
        console: arguments.console,
        suites: if suites { arguments.devices() } else { Vec::new() },
        musl: false,
        examples: all_examples,
    };
    let mut jobs = vec![Job::new(SETUP, move || setup.prepare(&request))];
    if !arguments.no_host && arguments.arch.is_host() {
        if arguments.full && filter.is_none() {
            jobs.push(Job::new(CHECK, || section_of(CHECK, check::run(workspace))));
            jobs.push(
                Job::new("loom", || {
                    section_of("host", cargo_test::loom(workspace, cargo_test::Bounds::Usual))
                })
                .after(HOST),
            );
        }
        jobs.push(
            Job::new(HOST, move || {
                section_of("host", cargo_test::tests(workspace, filter, arguments.full))
            })
            .after(CHECK),
        );
    }
    // The emulated device takes longer than soft-RoCE, and the newest kernel has the most tests.
    let mut devices = arguments.devices();
    devices.reverse();
    let mut kernels = arguments.kernels();
    kernels.reverse();
    let mut machines = Vec::new();
    for &kernel in &kernels {
        for &device in &devices {
            let name = guest(kernel, device, scope.emulation);
            if suites {
                let section = name.clone();
                machines.push(Job::new(name.clone(), move || {
                    section_of(&section, suites_on(setup, kernel, device, scope, logs))
                }));
            }
            // One kernel suffices for programs, unless a filter names them.
            let named = filter.is_some_and(examples::suffices);
            if named || (all_examples && kernel == KernelName::Newest) {
                let section = name.clone();
                machines.push(Job::new(format!("{name} examples"), move || {
                    section_of(&section, examples_on(setup, kernel, device, scope, logs))
                }));
            }
            // Groups have devices of their own.
            let grouped = device == DeviceName::Mlx5 && !arguments.infiniband;
            if grouped && (arguments.full || filter.is_some()) {
                for group in cases::groups(kernel, filter) {
                    let section = name.clone();
                    let run =
                        move || section_of(&section, group_on(group, setup, kernel, scope, logs));
                    machines.push(Job::new(format!("{name} {}", group.name), run).on(group.slots));
                }
            }
        }
    }
    let of_smoke = match filter {
        None => arguments.full && arguments.kernel.is_none() && arguments.device.is_none(),
        Some(filter) => smoke::suffices(filter),
    };
    if of_smoke && arguments.arch.is_host() {
        let run = || section_of(smoke::GROUP, smoke::section(scope, arguments.console, logs));
        machines.push(Job::new(smoke::GROUP, run));
    }
    jobs.extend(machines.into_iter().map(|job| job.after(SETUP)));
    jobs
}

/// `cargo ci bundle`
#[derive(Args, Clone, Debug)]
pub(crate) struct BundleArguments {
    /// Where to put the binary [default: uverbs-device-tests in the target directory's `lab`]
    path: Option<PathBuf>,
    /// The processors of the machines on which it will run
    #[arg(long, value_enum, default_value = "x86_64")]
    arch: Arch,
}

/// Words that each device suite has in it.
const SUITE_SAYS: &[u8] = b"device tests not run: ";

/// Fails if a file that is no bundle would be lost at a path.
fn check_bundle(path: &Path) -> Result<()> {
    let named = || format!("the bundle's path {}", path.display());
    match fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        there => {
            if !there.with_context(named)?.is_file() {
                bail!("{}: something that is no file is there", named());
            }
        }
    }
    let bytes = fs::read(path).with_context(named)?;
    let is_suite = bytes.windows(SUITE_SAYS.len()).any(|words| words == SUITE_SAYS);
    if !bytes.starts_with(b"\x7fELF") || !is_suite {
        bail!(
            "{}: a file that is no bundle is there, and stays: remove it, or take another path",
            named()
        );
    }
    Ok(())
}

/// Copies the static device suite to a path.
pub(crate) fn bundle(arguments: &BundleArguments) -> Result<ExitCode> {
    crate::machine::vm::check_host()?;
    let arch = arguments.arch;
    if let Some(path) = &arguments.path {
        check_bundle(path)?;
    }
    if arch.is_host() && !has_static_libc() {
        bail!("a bundle is static, and there is no libc.a: install glibc-static or libc6-dev");
    }
    let cross = match arch.is_host() {
        true => None,
        false => {
            let cache = Cache::open()?;
            fetch::compilers(&cache, arch)?;
            Some(Cross::find(arch, &cache)?)
        }
    };
    let workspace = Workspace::find()?.built_by(cross);
    let suites = suite::build(&workspace, &DeviceName::ALL)?;
    let Some(suite) = suites.iter().find(|suite| suite.name == "device") else {
        bail!("{} has no device suite to bundle", workspace.root().display());
    };
    let path = match &arguments.path {
        Some(path) => path.clone(),
        None => workspace.lab_directory()?.join(arch.unit(&suite.program())),
    };
    fs::copy(&suite.binary, &path).with_context(|| format!("write {}", path.display()))?;
    outln!(
        "{}: static, for any {} Linux. UVERBS_TEST_DEVICE names the device to test; nothing of \
         the machine is changed. docs/HARDWARE.md says more.",
        path.display(),
        arch.label()
    );
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_bundle_is_replaced_by_a_bundle() {
        let folder = std::env::temp_dir().join(format!("lab-bundle-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("README.md");
        check_bundle(&path).unwrap();
        for other in ["text", "text with device tests not run: in it", "\x7fELF and no suite"] {
            fs::write(&path, other).unwrap();
            let error = check_bundle(&path).unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), other);
        }
        assert!(check_bundle(&folder).is_err());
        fs::write(&path, "\x7fELF … device tests not run: …").unwrap();
        check_bundle(&path).unwrap();
        fs::remove_dir_all(&folder).unwrap();
    }
}
