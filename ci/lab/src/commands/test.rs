//! `cargo ci test`: the host's tests, and the device suites on each requested kernel and device, in
//! parallel.

use crate::arch::Arch;
use crate::check;
use crate::commands::smoke;
use crate::host::cargo_test;
use crate::machine::device::{DeviceName, Emulation};
use crate::machine::session::{self, Machine, Session};
use crate::output::outln;
use crate::packages::cache::Cache;
use crate::packages::cross::Cross;
use crate::packages::fetch::{self, Needs};
use crate::packages::kernel::KernelName;
use crate::packages::musl::Musl;
use crate::run::jobs::{self, Job};
use crate::run::junit;
use crate::run::outcome::{Report, TestOutcome};
use crate::run::stages;
use crate::run::summary::{Section, Summary};
use crate::suites::capability::RunOptions;
use crate::suites::cases::{self, CaseContext, EmulatorCheck};
use crate::suites::examples;
use crate::suites::suite::{self, Guest, Suite, TestScope};
use crate::workspace::{Profile, Workspace, has_static_libc};
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::OnceLock;
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
/// What leaks in the library leaks on any kernel, and what a driver forgets shows in 100 rounds. The soak has 10,000.
const FULL_ROUNDS: u32 = 5;

/// Names of jobs that other jobs wait for.
const SETUP: &str = "setup";
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
                jobs::run(jobs::count(), jobs(arguments, &workspace, &setup, &scope, &logs));
            if let Some(Ok(ready)) = setup.ready.get() {
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

/// Turns the error that kept a suite from running into a failed report.
fn reports_of(suite: &str, outcome: Result<Vec<Report>>) -> Vec<Report> {
    outcome.unwrap_or_else(|error| vec![failure(suite, &error)])
}

fn failure(name: &str, error: &anyhow::Error) -> Report {
    Report { name: name.to_owned(), outcome: TestOutcome::Failed(format!("{error:#}")) }
}

/// A job's section, or one with the error that kept the job from running.
pub(crate) fn section_of(name: &str, outcome: Result<Section>) -> Section {
    outcome.unwrap_or_else(|error| Section {
        name: name.to_owned(),
        reports: vec![failure(name, &error)],
        ..Section::default()
    })
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

/// The setup that all guests of a run share, made by the first job.
#[derive(Default)]
pub(crate) struct LazySetup {
    ready: OnceLock<Result<TestSetup, String>>,
}

/// The downloads and the built programs.
pub(crate) struct TestSetup {
    pub(crate) session: Session,
    suites: Vec<Suite>,
    programs: Vec<(String, PathBuf)>,
}

impl LazySetup {
    /// The setup, or the reason why it failed.
    pub(crate) fn ready(&self) -> Result<&TestSetup> {
        match self.ready.get() {
            Some(Ok(ready)) => Ok(ready),
            Some(Err(why)) => bail!("nothing could boot: {why}"),
            None => bail!("nothing was made ready to boot"),
        }
    }

    /// Fetches and builds. The section reports a failure, and so does every job that asks for the
    /// setup.
    pub(crate) fn prepare(&self, request: &SetupRequest) -> Section {
        let made = request.make();
        let reports = match &made {
            Ok(_) => Vec::new(),
            Err(error) => vec![failure(SETUP, error)],
        };
        let _first = self.ready.set(made.map_err(|error| format!("{error:#}")));
        Section { name: SETUP.into(), reports, ..Section::default() }
    }
}

/// What to fetch and build for the guests of a run.
#[derive(Clone, Debug)]
pub(crate) struct SetupRequest {
    pub(crate) needs: Needs,
    pub(crate) console: bool,
    /// The devices that suites are for; none if no suite runs.
    pub(crate) suites: Vec<DeviceName>,
    /// Whether suites and programs have musl in place of glibc.
    pub(crate) musl: bool,
    pub(crate) examples: bool,
}

impl SetupRequest {
    fn make(&self) -> Result<TestSetup> {
        let session = Session::open(&self.needs, self.console)?;
        let stage = stages::stage("build: guest and emulator");
        session::programs()?;
        drop(stage);
        let with_musl = self.musl.then(with_musl).transpose()?;
        let workspace = with_musl.as_ref().unwrap_or(&session.workspace);
        let (mut suites, mut programs) = (Vec::new(), Vec::new());
        if !self.suites.is_empty() {
            let _stage = stages::stage("build: device suites");
            suites = suite::build(workspace, &self.suites)?;
            if !workspace.arch().is_host() && self.suites.contains(&DeviceName::Rxe) {
                suites.push(suite::build_unit(workspace)?);
            }
            programs.extend(suites.iter().map(|suite| (suite.program(), suite.binary.clone())));
            if workspace.has("uverbs-cli", "bin", "uverbs") {
                let uverbs = workspace.static_program("uverbs-cli", "uverbs", Profile::Checked)?;
                programs.push(("uverbs".into(), uverbs));
            }
        }
        if self.examples {
            let _stage = stages::stage("build: examples");
            examples::programs(workspace)?;
        }
        Ok(TestSetup { session, suites, programs })
    }
}

/// The workspace, whose static programs have musl.
fn with_musl() -> Result<Workspace> {
    let cache = Cache::open()?;
    fetch::musl(&cache)?;
    Ok(Workspace::find()?.with_musl(Some(Musl::find(&cache)?)))
}

/// The jobs of a run. One chain of host checks runs beside one lane of guests until the checks are
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
                    machines.push(Job::new(format!("{name} {}", group.name), run).on(group.lanes));
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

/// The name of a guest.
fn guest(kernel: KernelName, device: DeviceName, emulation: Emulation) -> String {
    format!("{} {}", kernel.label(), device.with(emulation))
}

/// The name of the section and the stages of a guest.
fn label(
    session: &Session,
    kernel: KernelName,
    device: DeviceName,
    emulation: Emulation,
) -> String {
    session.arch().stage(guest(kernel, device, emulation))
}

/// Runs the suites of a device in one guest.
pub(crate) fn suites_on(
    setup: &LazySetup,
    kernel: KernelName,
    device: DeviceName,
    scope: &TestScope<'_>,
    logs: &Path,
) -> Result<Section> {
    let TestSetup { session, suites, programs } = setup.ready()?;
    Ok(suites_with(session, suites, programs, kernel, device, scope, logs))
}

/// The same in a guest that has nothing but the suites.
pub(crate) fn suites_in(
    session: &Session,
    suites: &[Suite],
    kernel: KernelName,
    device: DeviceName,
    scope: &TestScope<'_>,
    logs: &Path,
) -> Section {
    let programs: Vec<_> =
        suites.iter().map(|suite| (suite.program(), suite.binary.clone())).collect();
    suites_with(session, suites, &programs, kernel, device, scope, logs)
}

fn suites_with(
    session: &Session,
    suites: &[Suite],
    programs: &[(String, PathBuf)],
    kernel: KernelName,
    device: DeviceName,
    scope: &TestScope<'_>,
    logs: &Path,
) -> Section {
    let start = Instant::now();
    let machine = Machine {
        programs,
        peers: scope.options.peers,
        // The tests of imports run a program of rdma-core's bindings.
        python: scope.options.peers && device == DeviceName::Mlx5,
        emulation: scope.emulation,
        ..Machine::new(kernel, device)
    };
    let name = label(session, kernel, device, scope.emulation);
    let mut section = Section { name, ..Section::default() };
    run_suites(session, &machine, suites, scope, logs, &mut section);
    section.note.push_str(&format!("{} s", start.elapsed().as_secs()));
    section
}

/// Runs a group of cases.
pub(crate) fn group_on(
    group: &cases::Group,
    setup: &LazySetup,
    kernel: KernelName,
    scope: &TestScope<'_>,
    logs: &Path,
) -> Result<Section> {
    let session = &setup.ready()?.session;
    let reports = group.run(&CaseContext { session, kernel, scope, logs });
    let name = label(session, kernel, DeviceName::Mlx5, Emulation::default());
    Ok(Section { name, reports, ..Section::default() })
}

/// Runs the examples.
pub(crate) fn examples_on(
    setup: &LazySetup,
    kernel: KernelName,
    device: DeviceName,
    scope: &TestScope<'_>,
    logs: &Path,
) -> Result<Section> {
    let (emulation, session) = (scope.emulation, &setup.ready()?.session);
    let name = label(session, kernel, device, emulation);
    let _stage = stages::stage(format!("{name} examples"));
    let reports = examples::run(session, kernel, device, emulation, scope.filter, logs);
    Ok(Section { name, reports, ..Section::default() })
}

/// Runs each suite. After a suite that breaks its guest, the next one gets a new guest.
fn run_suites(
    session: &Session,
    machine: &Machine<'_>,
    suites: &[Suite],
    scope: &TestScope<'_>,
    logs: &Path,
    section: &mut Section,
) {
    let (device, kernel) = (machine.device, machine.kernel);
    let (mut vm, mut looked) = (None, None);
    for suite in suites.iter().filter(|suite| suite.is_for(machine.device)) {
        if vm.is_none() {
            match session.boot(machine) {
                Ok(booted) => {
                    section.note = format!(
                        "{}, booted in {:.1} s, ",
                        booted.greeting.release,
                        booted.boot_time.as_secs_f64()
                    );
                    vm = Some(booted);
                }
                Err(error) => section.reports.extend(reports_of("boot", Err(error))),
            }
        }
        let Some(running) = vm.as_mut() else { return };
        let names = label(session, machine.kernel, machine.device, machine.emulation);
        let _stage = stages::stage(format!("{names} {}", suite.name));
        let outcome = (|| {
            // The check needs the command line in the guest, which `cargo ci quick` leaves out.
            let uses = machine.programs.iter().any(|(name, _)| name == "uverbs");
            let check = match machine.device {
                DeviceName::Mlx5 if uses => {
                    Some(EmulatorCheck::new(running, machine.emulation.infiniband)?)
                }
                _ => None,
            };
            if looked.is_none() {
                let found = suite::running(running, device, machine.emulation)?;
                section.reports.extend(suite::check_probes(&found, kernel, scope.filter));
                looked = Some(found);
            }
            let shown = looked.as_ref().context("the kernel was looked at")?;
            let guest = Guest { device, kernel, running: shown };
            let mut reports = suite::run(running, suite, scope, guest, logs)?;
            if let (Some(check), false) = (check, reports.is_empty()) {
                reports.extend(check.reports(running));
            }
            Ok(reports)
        })();
        section.reports.extend(reports_of(suite.name, outcome));
        if running.ended() {
            vm = None;
        }
    }
    if let Some(vm) = vm
        && let Err(error) = vm.power_off()
    {
        section.reports.extend(reports_of("power off", Err(error)));
    }
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
