//! The device suites: static test binaries. The guest runs them as an ordinary user, and tests
//! whose names begin with `root::` as root. Where the guest has another processor than this machine, the
//! library's unit tests are a suite as well.

use crate::machine::device::{DeviceName, Emulation};
use crate::machine::vm::{GuestEvent, Vm};
use crate::output::outln;
use crate::packages::kernel::KernelName;
use crate::run::jobs::say;
use crate::run::outcome::{self, Report, TestOutcome};
use crate::run::stages;
use crate::run::subprocess;
use crate::suites::capability::{self, RunOptions, RunningKernel};
use crate::workspace::{Profile, Workspace, has_static_libc};
use anyhow::{Context, Result, bail};
use lab_guest::order::{Ending, Order};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The suite whose tests can be chosen one by one.
const CHOSEN: &str = "device";

/// The same tests on the devices in the process.
const FABRIC: &str = "fabric";

/// The suite of the library's unit tests, whose harness is the standard library's.
const UNIT: &str = "unit";

/// The variable by which a test prints a new record in place of comparing with the old one.
const RECORD: &str = "UVERBS_TEST_RECORD";

/// Tests of this module run as root, all others as the user.
const ROOT: &str = "root::";

/// An integration test whose binary is run on devices.
struct SuiteTarget {
    package: &'static str,
    test: &'static str,
    /// Kernel modules that it inspects and that the device does not need.
    modules: &'static [&'static str],
    /// The same, of which a kernel may be built without: then a test skips, and says so.
    if_there: &'static [&'static str],
    devices: &'static [DeviceName],
}

const TARGETS: &[SuiteTarget] = &[
    SuiteTarget {
        package: "uverbs",
        test: "device",
        modules: &[],
        if_there: &[],
        devices: &DeviceName::ALL,
    },
    // It inspects the kernel only, so one device suffices.
    SuiteTarget {
        package: "uverbs-uapi",
        test: "btf",
        modules: &["rdma_rxe", "rdma_ucm", "mlx5_core", "mlx5_ib"],
        if_there: &["mlx5_vdpa"],
        devices: &[DeviceName::Rxe],
    },
];

impl SuiteTarget {
    fn build(&self, workspace: &Workspace, profile: Profile) -> Result<Suite> {
        Ok(self.suite(workspace.static_test(self.package, self.test, profile)?))
    }

    fn suite(&self, binary: PathBuf) -> Suite {
        let SuiteTarget { test: name, modules, if_there, devices, .. } = *self;
        Suite { name, binary, modules, if_there, devices }
    }
}

/// A built suite.
#[derive(Clone, Debug)]
pub(crate) struct Suite {
    /// Name of its test target.
    pub(crate) name: &'static str,
    pub(crate) binary: PathBuf,
    modules: &'static [&'static str],
    if_there: &'static [&'static str],
    devices: &'static [DeviceName],
}

impl Suite {
    /// Whether it runs on a device.
    pub(crate) fn is_for(&self, device: DeviceName) -> bool {
        self.devices.contains(&device)
    }

    /// The tests of a device on those in the process. They need no device, so that soft-RoCE's guest has them.
    pub(crate) fn on_fabric(&self) -> Option<Suite> {
        (self.name == CHOSEN).then(|| Suite {
            name: FABRIC,
            devices: &[DeviceName::Rxe],
            ..self.clone()
        })
    }

    /// Whether its tests can be chosen one by one.
    fn has_choice(&self) -> bool {
        [CHOSEN, FABRIC].contains(&self.name)
    }

    /// Name of its binary in the guest.
    pub(crate) fn program(&self) -> String {
        format!("uverbs-{}-tests", self.name)
    }
}

/// Builds the suites that the workspace has for any of these devices.
pub(crate) fn build(workspace: &Workspace, devices: &[DeviceName]) -> Result<Vec<Suite>> {
    let mut suites = Vec::new();
    let wanted =
        |target: &&SuiteTarget| devices.iter().any(|device| target.devices.contains(device));
    for target in TARGETS.iter().filter(wanted) {
        if workspace.has(target.package, "test", target.test) {
            suites.push(target.build(workspace, Profile::Checked)?);
        }
    }
    Ok(suites)
}

/// The library's unit tests as a suite. They need no device, so that soft-RoCE's guest has them.
pub(crate) fn build_unit(workspace: &Workspace) -> Result<Suite> {
    let binary = workspace.static_unit_tests("uverbs", Profile::Checked)?;
    Ok(Suite { name: UNIT, binary, modules: &[], if_there: &[], devices: &[DeviceName::Rxe] })
}

/// Builds the device suite for this machine.
pub(crate) fn build_native(workspace: &Workspace) -> Result<Suite> {
    device(workspace, if has_static_libc() { Profile::Checked } else { Profile::Here })
}

/// Builds the device suite alone.
pub(crate) fn device(workspace: &Workspace, profile: Profile) -> Result<Suite> {
    let target = TARGETS.iter().find(|target| target.test == CHOSEN);
    let Some(target) = target.filter(|target| workspace.has(target.package, "test", target.test))
    else {
        bail!("{} has no device suite", workspace.root().display());
    };
    target.build(workspace, profile)
}

/// The suites of a change that is being edited; with `abi` also those that compare the ABI.
pub(crate) fn edited(built: &[(String, PathBuf)], abi: bool) -> Vec<Suite> {
    let of = |target: &'static SuiteTarget| {
        let (_, binary) = built.iter().find(|(name, _)| name == target.test)?;
        Some(target.suite(binary.clone()))
    };
    of_an_edit(abi).filter_map(of).collect()
}

/// Builds the same suites for the processors of the workspace's machines.
pub(crate) fn build_edited(workspace: &Workspace, abi: bool) -> Result<Vec<Suite>> {
    of_an_edit(abi).map(|target| target.build(workspace, Profile::Quick)).collect()
}

fn of_an_edit(abi: bool) -> impl Iterator<Item = &'static SuiteTarget> {
    TARGETS.iter().filter(move |target| abi || target.test == CHOSEN)
}

/// Which tests to run and how long to wait.
#[derive(Clone, Debug)]
pub(crate) struct TestScope<'a> {
    pub(crate) filter: Option<&'a str>,
    /// Of the tests that pass the filter, only those that this accepts.
    pub(crate) choice: Option<&'a NamePrefixes>,
    pub(crate) options: RunOptions,
    /// Options of the emulated ConnectX that the suites run on.
    pub(crate) emulation: Emulation,
    /// Factor for the rounds of tests that repeat their work, on the newest kernel.
    pub(crate) rounds: u32,
    /// The limit for one run of one suite.
    pub(crate) patience: Duration,
    /// The limit for silence.
    pub(crate) silence: Duration,
}

/// Prefixes of test names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NamePrefixes(pub(crate) BTreeSet<String>);

impl NamePrefixes {
    /// Whether a test is one of these.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.iter().any(|beginning| name.starts_with(beginning.as_str()))
    }
}

/// The guest that a suite runs in, which decides which skips are legitimate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guest<'a> {
    pub(crate) device: DeviceName,
    pub(crate) kernel: KernelName,
    pub(crate) running: &'a RunningKernel,
}

/// Probes the kernel of a guest.
pub(crate) fn running(
    vm: &mut Vm,
    device: DeviceName,
    emulation: Emulation,
) -> Result<RunningKernel> {
    let release = vm.greeting.release.clone();
    let running = RunningKernel::probe(device, &release, true, |file| {
        let command = ["cat", file].map(str::to_owned).to_vec();
        let order = Order { command, root: true, ..Order::default() };
        let (ending, contents, _) = collect(vm, &order, Duration::from_secs(60));
        Ok((ending?.status() == 0).then_some(contents))
    })?;
    Ok(running.on_infiniband(emulation.infiniband))
}

/// Compares the capability probes with the table's versions. On the three kernels of a whole run a
/// contradiction fails the run; on others it is printed, and the probe decides.
pub(crate) fn check_probes(
    running: &RunningKernel,
    kernel: KernelName,
    filter: Option<&str>,
) -> Vec<Report> {
    const NAME: &str = "capabilities::kernel_shows_what_the_table_says";
    if filter.is_some_and(|filter| !NAME.contains(filter)) {
        return Vec::new();
    }
    let found = running.contradictions();
    if !KernelName::ALL.contains(&kernel) {
        for contradiction in found {
            outln!("kernel {kernel}: {contradiction}; the probe decides");
        }
        return Vec::new();
    }
    let outcome =
        if found.is_empty() { TestOutcome::Passed } else { TestOutcome::Failed(found.join("\n")) };
    vec![Report { name: NAME.into(), outcome }]
}

/// Runs one suite in a guest, as the user and as root.
pub(crate) fn run(
    vm: &mut Vm,
    suite: &Suite,
    scope: &TestScope<'_>,
    guest: Guest<'_>,
    logs: &Path,
) -> Result<Vec<Report>> {
    let needed = suite.modules.iter().map(|module| (module, true));
    for (module, must) in needed.chain(suite.if_there.iter().map(|module| (module, false))) {
        let order = Order {
            command: vec!["modprobe".into(), (*module).into()],
            root: true,
            ..Order::default()
        };
        let (ending, _, errors) = collect(vm, &order, Duration::from_secs(60));
        let failed = ending.as_ref().is_ok_and(|ending| ending.status() != 0);
        if failed && (must || !errors.contains("the lab has no module")) {
            bail!("modprobe {module} failed: {errors}");
        }
        ending?;
    }
    let list = order(suite, scope, &["--list"], false, guest);
    let (ending, names, errors) = collect(vm, &list, Duration::from_secs(60));
    if ending?.status() != 0 {
        bail!("{} --list failed: {errors}", suite.program());
    }
    let mut plan = Passes::of(&outcome::listed(&names), scope.filter)?;
    if let Some(choice) = scope.choice.filter(|_| suite.has_choice()) {
        plan.user.retain(|name| choice.has(name));
        plan.root.retain(|name| choice.has(name));
    }
    let mut reports = Vec::new();
    if !plan.user.is_empty() {
        let mut arguments = vec!["--skip", ROOT];
        arguments.extend(scope.filter);
        reports.extend(pass(vm, suite, scope, guest, &arguments, false, &plan.user, logs)?);
    }
    match scope.filter {
        None if !plan.root.is_empty() => {
            reports.extend(pass(vm, suite, scope, guest, &[ROOT], true, &plan.root, logs)?);
        }
        _ => {
            for name in &plan.root {
                let arguments = ["--exact", name.as_str()];
                let names = std::slice::from_ref(name);
                reports.extend(pass(vm, suite, scope, guest, &arguments, true, names, logs)?);
            }
        }
    }
    if reports.is_empty() && scope.filter.is_none() {
        bail!("{} has no test at all", suite.program());
    }
    Ok(reports)
}

/// Names of the tests of each pass.
#[derive(Debug, Default, PartialEq, Eq)]
struct Passes {
    user: Vec<String>,
    root: Vec<String>,
}

impl Passes {
    fn of(names: &[String], filter: Option<&str>) -> Result<Self> {
        let mut passes = Self::default();
        for name in names {
            if filter.is_some_and(|filter| !name.contains(filter)) {
                continue;
            }
            if name.starts_with(ROOT) {
                passes.root.push(name.clone());
            } else if name.contains(ROOT) {
                // The binary matches filters by substring only, so this test would run in no pass.
                bail!("test {name}: `{ROOT}` may stand only at the start of a name");
            } else {
                passes.user.push(name.clone());
            }
        }
        Ok(passes)
    }
}

fn order(
    suite: &Suite,
    scope: &TestScope<'_>,
    arguments: &[&str],
    root: bool,
    guest: Guest<'_>,
) -> Order {
    let mut command = vec![suite.program()];
    command.extend(arguments.iter().map(|argument| (*argument).to_owned()));
    let mut environment = environment(scope.options);
    if scope.rounds > 1 && guest.kernel == KernelName::Newest {
        environment.push(("UVERBS_ROUNDS".into(), scope.rounds.to_string()));
    }
    let (device, second) = match guest.device {
        DeviceName::Rxe => ("rxe0", "rxe1"),
        DeviceName::Mlx5 => ("mlx5_0", "mlx5_1"),
    };
    if suite.name != FABRIC {
        environment.push(("UVERBS_TEST_DEVICE".into(), device.into()));
        environment.push(("UVERBS_TEST_SECOND_DEVICE".into(), second.into()));
    }
    Order { command, environment, root, ..Order::default() }
}

fn environment(options: RunOptions) -> Vec<(String, String)> {
    let mut environment = vec![("RUST_BACKTRACE".into(), "1".into())];
    if options.peers {
        environment.push(("UVERBS_PEERS".into(), "1".into()));
    }
    if options.soak {
        environment.push(("UVERBS_SOAK".into(), "1".into()));
    }
    // Asks a test to print what it records.
    if std::env::var_os(RECORD).is_some() {
        environment.push((RECORD.into(), "1".into()));
    }
    environment
}

/// Runs the binary once, and checks its skips.
#[expect(clippy::too_many_arguments, reason = "each says one thing about the one call there is")]
fn pass(
    vm: &mut Vm,
    suite: &Suite,
    scope: &TestScope<'_>,
    guest: Guest<'_>,
    arguments: &[&str],
    root: bool,
    names: &[String],
    logs: &Path,
) -> Result<Vec<Report>> {
    let mut order = order(suite, scope, arguments, root, guest);
    order.command.extend(["--test-threads".into(), "1".into()]);
    if scope.choice.is_some() && suite.has_choice() {
        order.environment.push(("UVERBS_TEST_NAMES".into(), names.join(",")));
    }
    // Results go to the former standard output; output of the tests joins standard error. The standard
    // library's harness keeps that output itself.
    let redirect = match suite.name {
        UNIT => r#"exec "$@""#,
        _ => r#"exec "$@" --logfile /dev/fd/3 3>&1 1>&2"#,
    };
    let mut command: Vec<String> =
        ["sh", "-c", redirect, "lab"].iter().map(|word| (*word).to_owned()).collect();
    command.append(&mut order.command);
    order.command = command;
    let (ending, results, noise) = follow(vm, &order, scope);
    let who = if root { "root" } else { "user" };
    let log = logs.join(format!(
        "{}-{}-{}-{who}.log",
        guest.kernel.label(),
        guest.device.with(scope.emulation).replace(' ', "-"),
        suite.name
    ));
    fs::write(&log, format!("{results}\n--- printed by tests ---\n{noise}"))
        .with_context(|| format!("write {}", log.display()))?;
    let how = ending.map_err(|error| format!("{error:#}"));
    let reports = judge(&results, &noise, names, &how)
        .into_iter()
        .map(|report| match suite.name {
            // A unit test that skips does so on every machine, and the suite judges its skips on the fabric.
            UNIT | FABRIC => report,
            _ => {
                object(report, |reason| capability::objection(reason, guest.running, scope.options))
            }
        })
        .map(|report| Report { name: format!("{}::{}", suite.name, report.name), ..report })
        .collect();
    Ok(reports)
}

/// Turns a skip that is not legitimate into a failure.
fn object(report: Report, objection: impl Fn(&str) -> Option<String>) -> Report {
    let TestOutcome::Skipped(reason) = &report.outcome else { return report };
    match objection(reason) {
        Some(objection) => {
            let text = format!("skipped for \"{reason}\", but {objection}");
            Report { outcome: TestOutcome::Failed(text), ..report }
        }
        None => report,
    }
}

/// The reports of a run, with a failure for each expected report that is missing.
fn judge(
    results: &str,
    noise: &str,
    names: &[String],
    how: &Result<Ending, String>,
) -> Vec<Report> {
    let mut reports = outcome::parse(results);
    let missing: Vec<&str> = names
        .iter()
        .map(String::as_str)
        .filter(|name| !reports.iter().any(|report| report.name == **name))
        .collect();
    let failed = reports.iter().any(|report| matches!(report.outcome, TestOutcome::Failed(_)));
    let end = match how {
        Ok(Ending::Exited(0)) => "it ended with status 0".to_owned(),
        Ok(Ending::Exited(status)) => format!("it ended with status {status}"),
        Ok(Ending::Killed(signal)) => format!("it was killed by signal {signal}"),
        Err(why) => why.clone(),
    };
    let last: Vec<&str> = noise.lines().collect();
    let last = last[last.len().saturating_sub(20)..].join("\n");
    if !missing.is_empty() {
        let at = outcome::unfinished(results).unwrap_or_else(|| missing[0].to_owned());
        let text = format!(
            "the run broke off here: {end}\n{} of {} tests did not report\n{last}",
            missing.len(),
            names.len()
        );
        reports.push(Report { name: at, outcome: TestOutcome::Failed(text) });
    } else if *how != Ok(Ending::Exited(0)) && !failed {
        let text = format!("no test failed, but {end}\n{last}");
        reports
            .push(Report { name: "the binary itself".into(), outcome: TestOutcome::Failed(text) });
    }
    reports
}

/// Runs a command in the guest, without a limit on silence.
pub(crate) fn collect(
    vm: &mut Vm,
    order: &Order,
    patience: Duration,
) -> (Result<Ending>, String, String) {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let ending = vm.run(order, patience, |event| match event {
        GuestEvent::Stdout(_, bytes) => stdout.extend_from_slice(bytes),
        GuestEvent::Stderr(_, bytes) => stderr.extend_from_slice(bytes),
        GuestEvent::Exit(..) => {}
    });
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (ending, text(stdout), text(stderr))
}

/// Runs a command in the guest, prints result lines as they come, and gives up when it is silent
/// for too long.
pub(crate) fn follow(
    vm: &mut Vm,
    order: &Order,
    scope: &TestScope<'_>,
) -> (Result<Ending>, String, String) {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let mut shown = 0;
    // Tests run one after the other, so each starts when the one before it ends.
    let mut since = Instant::now();
    let end = Instant::now() + scope.patience;
    let ending = (|| {
        let process = vm.start(order)?;
        vm.end_input(process)?;
        let mut heard = Instant::now();
        loop {
            let deadline = end.min(heard + scope.silence);
            match vm.next_event(deadline)? {
                Some(GuestEvent::Exit(ended, ending)) if ended == process => return Ok(ending),
                Some(GuestEvent::Stdout(_, bytes)) => {
                    stdout.extend_from_slice(&bytes);
                    while let Some(length) = stdout[shown..].iter().position(|byte| *byte == b'\n')
                    {
                        let line = String::from_utf8_lossy(&stdout[shown..shown + length]);
                        if outcome::is_result(&line) {
                            say!("{line}");
                            if let Some(name) = outcome::named(&line) {
                                stages::case(name, since.elapsed());
                            }
                            since = Instant::now();
                        }
                        shown += length + 1;
                    }
                }
                Some(GuestEvent::Stderr(_, bytes)) => stderr.extend_from_slice(&bytes),
                Some(GuestEvent::Exit(..)) => {}
                None if Instant::now() >= end => {
                    return Err(
                        vm.failure(&format!("given up after {} s", scope.patience.as_secs()))
                    );
                }
                None => {
                    return Err(vm.failure(&format!("silent for {} s", scope.silence.as_secs())));
                }
            }
            heard = Instant::now();
        }
    })();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (ending, text(stdout), text(stderr))
}

/// The device suite prints this, with the fault, if it runs no test.
const NOT_RUN: &str = "device tests not run: ";

/// Runs a suite on a device of this machine, and changes nothing of the machine: tests that do skip outside
/// of the lab. The first lines, which describe the device, and the result of each test are printed as they
/// come. The table decides on skips for features of the driver; a skip for a feature of a real device is
/// always legitimate.
pub(crate) fn run_native(
    suite: &Suite,
    device: &str,
    scope: &TestScope<'_>,
) -> Result<Vec<Report>> {
    let mut command = std::process::Command::new(&suite.binary);
    command
        .args(["--test-threads", "1", "--color", "never"])
        .args(scope.filter)
        .envs(environment(scope.options))
        .env("UVERBS_TEST_DEVICE", device)
        .env_remove("UVERBS_LAB");
    let run = subprocess::run_showing(command, scope.patience, |line| {
        if !line.is_empty() {
            say!("{line}");
        }
    })?;
    if let Some(fault) = run.stdout.lines().find_map(|line| line.strip_prefix(NOT_RUN)) {
        bail!("{fault}");
    }
    let how = match run.status {
        Some(status) => Ok(match (status.code(), status.signal()) {
            (Some(status), _) => Ending::Exited(status),
            (None, signal) => Ending::Killed(signal.unwrap_or(0)),
        }),
        None => Err(format!("given up after {} s", scope.patience.as_secs())),
    };
    let unfinished = outcome::unfinished(&run.stdout);
    let names: Vec<String> = unfinished.into_iter().collect();
    let running = native_kernel(Path::new("/"), device)?;
    let mut reports: Vec<Report> = judge(&run.stdout, &run.stderr, &names, &how)
        .into_iter()
        .map(|report| {
            object(report, |reason| capability::objection(reason, running.as_ref()?, scope.options))
        })
        .collect();
    if reports.is_empty() && scope.filter.is_none() {
        bail!("{} ran no test", suite.program());
    }
    for report in &mut reports {
        report.name = format!("{}::{}", suite.name, report.name);
    }
    Ok(reports)
}

/// Probes this machine's kernel; `None` if the table does not know the device's driver. `/proc` and
/// `/sys` are under `root`.
fn native_kernel(root: &Path, device: &str) -> Result<Option<RunningKernel>> {
    let directory = root.join("sys/class/infiniband").join(device);
    let driver = fs::read_link(directory.join("device/driver")).ok();
    let is_mlx5 = driver.is_some_and(|path| path.ends_with("mlx5_core"));
    let device = if is_mlx5 {
        DeviceName::Mlx5
    } else if directory.join("parent").exists() {
        // Of all drivers only soft-RoCE names the interface below it.
        DeviceName::Rxe
    } else {
        return Ok(None);
    };
    let release = fs::read_to_string(root.join("proc/sys/kernel/osrelease"))?;
    let look = RunningKernel::probe(device, &release, false, |file| {
        let contents = fs::read(root.join(file.trim_start_matches('/')));
        Ok(contents.ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
    });
    look.map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_native_device_is_judged_by_its_driver_and_kernel() {
        let root = std::env::temp_dir().join(format!("lab-native-{}", std::process::id()));
        let class = root.join("sys/class/infiniband");
        for directory in ["proc/sys/kernel", "sys/kernel/btf", "drivers/mlx5_core"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        for device in ["rocep1s0/device", "soft0", "siw0"] {
            fs::create_dir_all(class.join(device)).unwrap();
        }
        let driver = root.join("drivers/mlx5_core");
        std::os::unix::fs::symlink(driver, class.join("rocep1s0/device/driver")).unwrap();
        fs::write(class.join("soft0/parent"), "eth0\n").unwrap();
        fs::write(root.join("proc/sys/kernel/osrelease"), "6.8.0-45-generic\n").unwrap();
        fs::write(root.join("sys/kernel/btf/rdma_rxe"), b"\xeb\x9f\0rxe_ib_advise_mr\0").unwrap();
        let judged = |device: &str, reason: &str| {
            let running = native_kernel(&root, device).unwrap();
            running.map(|running| capability::objection(reason, &running, RunOptions::default()))
        };
        assert_eq!(judged("siw0", "[srq] no"), None, "a driver that the table does not know");
        assert_eq!(judged("rocep1s0", "[device_memory] no"), Some(None));
        assert!(judged("rocep1s0", "[srq] no").unwrap().is_some());
        // Backported: upstream's 6.8 lacks it.
        assert!(judged("soft0", "[advise_mr] no").unwrap().is_some());
        assert_eq!(judged("soft0", "[netns] no"), Some(None));
        fs::remove_dir_all(&root).unwrap();
    }

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn tests_are_split_by_user_and_root() {
        let all = names(&["pd::a", "root::link", "mr::b"]);
        let passes = Passes::of(&all, None).unwrap();
        assert_eq!(passes.user, names(&["pd::a", "mr::b"]));
        assert_eq!(passes.root, names(&["root::link"]));
        let filtered = Passes::of(&all, Some("link")).unwrap();
        assert_eq!(filtered, Passes { user: vec![], root: names(&["root::link"]) });
        assert!(Passes::of(&names(&["chroot::x"]), None).is_err());
    }

    #[test]
    fn a_prefix_chooses_the_tests_that_begin_with_it() {
        let choice = NamePrefixes(["rc::", "cq::poll"].map(str::to_owned).into());
        assert!(choice.has("rc::send") && choice.has("cq::polls_in_order"));
        assert!(!choice.has("cq::resize") && !choice.has("mlx5::rc::send"));
    }

    #[test]
    fn a_run_that_breaks_off_fails_where_it_did() {
        let results = "test a ... ok\ntest b ... ";
        let reports = judge(results, "boom", &names(&["a", "b", "c"]), &Ok(Ending::Killed(11)));
        assert_eq!(reports.len(), 2);
        assert_eq!(reports[1].name, "b");
        let TestOutcome::Failed(text) = &reports[1].outcome else { panic!("{reports:?}") };
        assert!(text.contains("signal 11") && text.contains("2 of 3") && text.contains("boom"));
    }

    #[test]
    fn a_bad_status_without_a_failed_test_is_a_failure() {
        let results = "test a ... ok\n";
        let good = judge(results, "", &names(&["a"]), &Ok(Ending::Exited(0)));
        assert_eq!(good.len(), 1);
        let bad = judge(results, "", &names(&["a"]), &Ok(Ending::Exited(3)));
        assert!(matches!(bad[1].outcome, TestOutcome::Failed(_)));
        let told = judge("test a ... FAILED\n", "", &names(&["a"]), &Ok(Ending::Exited(101)));
        assert_eq!(told.len(), 1, "the failed test says it all");
    }

    #[test]
    fn an_unwarranted_skip_becomes_a_failure() {
        let skip = Report { name: "a".into(), outcome: TestOutcome::Skipped("[rc] no".into()) };
        let judged = object(skip.clone(), |_| Some("rxe has [rc]".into()));
        assert!(matches!(judged.outcome, TestOutcome::Failed(_)));
        assert_eq!(object(skip.clone(), |_| None), skip);
    }
}
