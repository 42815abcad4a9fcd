//! The device suites: static test binaries, run in a machine as an ordinary user and, for tests
//! whose names begin with `root::`, as root.

use crate::capability::{self, Offer};
use crate::device::DeviceName;
use crate::kernel::KernelName;
use crate::outcome::{self, Outcome, Report};
use crate::vm::{Event, Vm};
use crate::watch;
use crate::workspace::{Profile, Workspace};
use anyhow::{Context, Result, bail};
use lab_guest::order::{Ending, Order};
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Tests under this module run as root, all others do not.
const ROOT: &str = "root::";

/// An integration test whose binary is run on devices.
struct Target {
    package: &'static str,
    test: &'static str,
    /// Modules that it looks into and the device does not bring.
    modules: &'static [&'static str],
    devices: &'static [DeviceName],
}

const TARGETS: &[Target] = &[
    Target { package: "uverbs", test: "device", modules: &[], devices: &DeviceName::ALL },
    // What it asks is the kernel's to answer, so that one device will do.
    Target {
        package: "uverbs-uapi",
        test: "btf",
        modules: &["rdma_rxe", "mlx5_core", "mlx5_ib"],
        devices: &[DeviceName::Rxe],
    },
];

/// A suite's binary, built.
#[derive(Clone, Debug)]
pub(crate) struct Suite {
    /// Name of its test target.
    pub(crate) name: &'static str,
    pub(crate) binary: PathBuf,
    modules: &'static [&'static str],
    devices: &'static [DeviceName],
}

impl Suite {
    /// Whether it runs on a device.
    pub(crate) fn is_for(&self, device: DeviceName) -> bool {
        self.devices.contains(&device)
    }

    /// Name of its binary in the guest.
    pub(crate) fn program(&self) -> String {
        format!("uverbs-{}-tests", self.name)
    }
}

/// Builds the suites that the workspace has for any of these devices.
pub(crate) fn build(workspace: &Workspace, devices: &[DeviceName]) -> Result<Vec<Suite>> {
    let mut suites = Vec::new();
    let wanted = |target: &&Target| devices.iter().any(|device| target.devices.contains(device));
    for target in TARGETS.iter().filter(wanted) {
        if workspace.has(target.package, "test", target.test) {
            let binary = workspace.static_test(target.package, target.test, Profile::Checked)?;
            suites.push(Suite {
                name: target.test,
                binary,
                modules: target.modules,
                devices: target.devices,
            });
        }
    }
    Ok(suites)
}

/// Which tests to run and how long to wait.
#[derive(Clone, Debug)]
pub(crate) struct Scope<'a> {
    pub(crate) filter: Option<&'a str>,
    pub(crate) offer: Offer,
    /// For one run of one suite.
    pub(crate) patience: Duration,
    /// Without a sign of life.
    pub(crate) silence: Duration,
}

/// Where the suites run, for judging what they skip.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ground {
    pub(crate) device: DeviceName,
    pub(crate) kernel: KernelName,
}

/// Runs one suite in a machine, as the user and as root.
pub(crate) fn run(
    vm: &mut Vm,
    suite: &Suite,
    scope: &Scope<'_>,
    ground: Ground,
    logs: &Path,
) -> Result<Vec<Report>> {
    for module in suite.modules {
        let order = Order {
            command: vec!["modprobe".into(), (*module).into()],
            root: true,
            ..Order::default()
        };
        let (ending, _, errors) = collect(vm, &order, Duration::from_secs(60));
        if ending.as_ref().is_ok_and(|ending| ending.status() != 0) {
            bail!("modprobe {module} failed: {errors}");
        }
        ending?;
    }
    let list = order(suite, scope, &["--list"], false, ground);
    let (ending, names, errors) = collect(vm, &list, Duration::from_secs(60));
    if ending?.status() != 0 {
        bail!("{} --list failed: {errors}", suite.program());
    }
    let plan = Passes::of(&outcome::listed(&names), scope.filter)?;
    let mut reports = Vec::new();
    if !plan.user.is_empty() {
        let mut arguments = vec!["--skip", ROOT];
        arguments.extend(scope.filter);
        reports.extend(pass(vm, suite, scope, ground, &arguments, false, &plan.user, logs)?);
    }
    match scope.filter {
        None if !plan.root.is_empty() => {
            reports.extend(pass(vm, suite, scope, ground, &[ROOT], true, &plan.root, logs)?);
        }
        _ => {
            for name in &plan.root {
                let arguments = ["--exact", name.as_str()];
                let names = std::slice::from_ref(name);
                reports.extend(pass(vm, suite, scope, ground, &arguments, true, names, logs)?);
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
                // The binary knows filters by substring only, so this one would never run.
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
    scope: &Scope<'_>,
    arguments: &[&str],
    root: bool,
    ground: Ground,
) -> Order {
    let mut command = vec![suite.program()];
    command.extend(arguments.iter().map(|argument| (*argument).to_owned()));
    let mut environment = environment(scope.offer);
    let (device, second) = match ground.device {
        DeviceName::Rxe => ("rxe0", "rxe1"),
        DeviceName::Mlx5 => ("mlx5_0", "mlx5_1"),
    };
    environment.push(("UVERBS_TEST_DEVICE".into(), device.into()));
    environment.push(("UVERBS_TEST_SECOND_DEVICE".into(), second.into()));
    Order { command, environment, root, terminal: None }
}

fn environment(offer: Offer) -> Vec<(String, String)> {
    let mut environment = vec![("RUST_BACKTRACE".into(), "1".into())];
    if offer.peers {
        environment.push(("UVERBS_PEERS".into(), "1".into()));
    }
    if offer.soak {
        environment.push(("UVERBS_SOAK".into(), "1".into()));
    }
    environment
}

/// One run of the binary; what it reports is judged.
#[expect(clippy::too_many_arguments, reason = "each says one thing about the one call there is")]
fn pass(
    vm: &mut Vm,
    suite: &Suite,
    scope: &Scope<'_>,
    ground: Ground,
    arguments: &[&str],
    root: bool,
    names: &[String],
    logs: &Path,
) -> Result<Vec<Report>> {
    let mut order = order(suite, scope, arguments, root, ground);
    order.command.extend(["--test-threads".into(), "1".into()]);
    // Results go where standard output went; what tests print themselves joins standard error.
    let redirect = r#"exec "$@" --logfile /dev/fd/3 3>&1 1>&2"#;
    let mut command: Vec<String> =
        ["sh", "-c", redirect, "lab"].iter().map(|word| (*word).to_owned()).collect();
    command.append(&mut order.command);
    order.command = command;
    let (ending, results, noise) = follow(vm, &order, scope);
    let who = if root { "root" } else { "user" };
    let log = logs.join(format!(
        "{}-{}-{}-{who}.log",
        ground.kernel.label(),
        ground.device.label(),
        suite.name
    ));
    fs::write(&log, format!("{results}\n--- printed by tests ---\n{noise}"))
        .with_context(|| format!("write {}", log.display()))?;
    let how = ending.map_err(|error| format!("{error:#}"));
    let reports = judge(&results, &noise, names, &how)
        .into_iter()
        .map(|report| {
            object(report, |reason| {
                capability::objection(reason, ground.device, ground.kernel, scope.offer)
            })
        })
        .map(|report| Report { name: format!("{}::{}", suite.name, report.name), ..report })
        .collect();
    Ok(reports)
}

/// Turns a skip that is not legitimate into a failure.
fn object(report: Report, objection: impl Fn(&str) -> Option<String>) -> Report {
    let Outcome::Skipped(reason) = &report.outcome else { return report };
    match objection(reason) {
        Some(objection) => {
            let text = format!("skipped for \"{reason}\", but {objection}");
            Report { outcome: Outcome::Failed(text), ..report }
        }
        None => report,
    }
}

/// What a run reported, with a failure for everything that it should have and did not.
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
    let failed = reports.iter().any(|report| matches!(report.outcome, Outcome::Failed(_)));
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
        reports.push(Report { name: at, outcome: Outcome::Failed(text) });
    } else if *how != Ok(Ending::Exited(0)) && !failed {
        let text = format!("no test failed, but {end}\n{last}");
        reports.push(Report { name: "the binary itself".into(), outcome: Outcome::Failed(text) });
    }
    reports
}

/// Runs an order without limits on silence.
pub(crate) fn collect(
    vm: &mut Vm,
    order: &Order,
    patience: Duration,
) -> (Result<Ending>, String, String) {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let ending = vm.run(order, patience, |event| match event {
        Event::Stdout(_, bytes) => stdout.extend_from_slice(bytes),
        Event::Stderr(_, bytes) => stderr.extend_from_slice(bytes),
        Event::Exit(..) => {}
    });
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (ending, text(stdout), text(stderr))
}

/// Runs an order, shows result lines as they come, and gives up on too long a silence.
pub(crate) fn follow(
    vm: &mut Vm,
    order: &Order,
    scope: &Scope<'_>,
) -> (Result<Ending>, String, String) {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let mut shown = 0;
    let end = Instant::now() + scope.patience;
    let ending = (|| {
        let process = vm.start(order)?;
        vm.end_input(process)?;
        let mut heard = Instant::now();
        loop {
            let deadline = end.min(heard + scope.silence);
            match vm.next_event(deadline)? {
                Some(Event::Exit(ended, ending)) if ended == process => return Ok(ending),
                Some(Event::Stdout(_, bytes)) => {
                    stdout.extend_from_slice(&bytes);
                    while let Some(length) = stdout[shown..].iter().position(|byte| *byte == b'\n')
                    {
                        let line = String::from_utf8_lossy(&stdout[shown..shown + length]);
                        if outcome::is_result(&line) {
                            println!("{line}");
                        }
                        shown += length + 1;
                    }
                }
                Some(Event::Stderr(_, bytes)) => stderr.extend_from_slice(&bytes),
                Some(Event::Exit(..)) => {}
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

/// Runs a suite on a device of this very machine. Nothing of the machine is changed: tests that do
/// so run as root in the lab only, and what a real device lacks is for its owner to judge.
pub(crate) fn run_native(suite: &Suite, device: &str, scope: &Scope<'_>) -> Result<Vec<Report>> {
    let mut command = std::process::Command::new(&suite.binary);
    command
        .args(["--skip", ROOT, "--test-threads", "1", "--color", "never"])
        .args(scope.filter)
        .envs(environment(scope.offer))
        .env("UVERBS_TEST_DEVICE", device)
        .env_remove("UVERBS_LAB");
    let run = watch::run(command, scope.patience)?;
    let how = match run.status {
        Some(status) => Ok(match (status.code(), status.signal()) {
            (Some(status), _) => Ending::Exited(status),
            (None, signal) => Ending::Killed(signal.unwrap_or(0)),
        }),
        None => Err(format!("given up after {} s", scope.patience.as_secs())),
    };
    let unfinished = outcome::unfinished(&run.stdout);
    let names: Vec<String> = unfinished.into_iter().collect();
    let mut reports = judge(&run.stdout, &run.stderr, &names, &how);
    if reports.is_empty() && scope.filter.is_none() {
        bail!("{} ran no test", suite.program());
    }
    for report in &mut reports {
        report.name = format!("{}::{}", suite.name, report.name);
    }
    Ok(reports)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn tests_are_parted_by_who_runs_them() {
        let all = names(&["pd::a", "root::link", "mr::b"]);
        let passes = Passes::of(&all, None).unwrap();
        assert_eq!(passes.user, names(&["pd::a", "mr::b"]));
        assert_eq!(passes.root, names(&["root::link"]));
        let filtered = Passes::of(&all, Some("link")).unwrap();
        assert_eq!(filtered, Passes { user: vec![], root: names(&["root::link"]) });
        assert!(Passes::of(&names(&["chroot::x"]), None).is_err());
    }

    #[test]
    fn a_run_that_breaks_off_fails_where_it_did() {
        let results = "test a ... ok\ntest b ... ";
        let reports = judge(results, "boom", &names(&["a", "b", "c"]), &Ok(Ending::Killed(11)));
        assert_eq!(reports.len(), 2);
        assert_eq!(reports[1].name, "b");
        let Outcome::Failed(text) = &reports[1].outcome else { panic!("{reports:?}") };
        assert!(text.contains("signal 11") && text.contains("2 of 3") && text.contains("boom"));
    }

    #[test]
    fn a_bad_status_without_a_failed_test_is_a_failure() {
        let results = "test a ... ok\n";
        let good = judge(results, "", &names(&["a"]), &Ok(Ending::Exited(0)));
        assert_eq!(good.len(), 1);
        let bad = judge(results, "", &names(&["a"]), &Ok(Ending::Exited(3)));
        assert!(matches!(bad[1].outcome, Outcome::Failed(_)));
        let told = judge("test a ... FAILED\n", "", &names(&["a"]), &Ok(Ending::Exited(101)));
        assert_eq!(told.len(), 1, "the failed test says it all");
    }

    #[test]
    fn an_unwarranted_skip_becomes_a_failure() {
        let skip = Report { name: "a".into(), outcome: Outcome::Skipped("[rc] no".into()) };
        let judged = object(skip.clone(), |_| Some("rxe has [rc]".into()));
        assert!(matches!(judged.outcome, Outcome::Failed(_)));
        assert_eq!(object(skip.clone(), |_| None), skip);
    }
}
