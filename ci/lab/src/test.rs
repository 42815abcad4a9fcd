//! `cargo ci test`: host checks, then the device suites on each kernel and device asked for.

use crate::ahead::Ahead;
use crate::capability::Offer;
use crate::checks;
use crate::device::DeviceName;
use crate::examples;
use crate::fetch::Needs;
use crate::kernel::KernelName;
use crate::outcome::{Outcome, Report};
use crate::proof::{self, Proof, Witness};
use crate::session::{Machine, Session};
use crate::suite::{self, Ground, Scope, Suite};
use crate::summary::{Place, Summary};
use crate::workspace::{Profile, Workspace};
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// One kernel or all.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kernels {
    #[value(name = "6.1")]
    V6_1,
    #[value(name = "6.12")]
    V6_12,
    Newest,
    All,
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
    /// Kernels to run on [default: newest, with --full all]
    #[arg(long, value_enum)]
    kernel: Option<Kernels>,
    /// Devices to run on [default: rxe, with --full all]
    #[arg(long, value_enum)]
    device: Option<Devices>,
    /// Run on this RDMA device of this machine instead of in a VM, changing nothing of the machine
    #[arg(long, value_name = "DEV", conflicts_with_all = ["kernel", "device"])]
    native: Option<String>,
    /// All kernels and devices, long runs, and the suites against rdma-core's tools
    #[arg(long)]
    full: bool,
    /// Leave out what needs no device: formatting, lints, documentation and host tests
    #[arg(long)]
    no_host: bool,
    /// Show the kernels' consoles
    #[arg(long)]
    console: bool,
    /// Run only tests whose names contain this, and no formatting, lint and documentation checks
    filter: Option<String>,
}

impl TestArguments {
    fn kernels(&self) -> Vec<KernelName> {
        match self.kernel {
            Some(Kernels::V6_1) => vec![KernelName::V6_1],
            Some(Kernels::V6_12) => vec![KernelName::V6_12],
            Some(Kernels::Newest) => vec![KernelName::Newest],
            Some(Kernels::All) => KernelName::ALL.to_vec(),
            None if self.full => KernelName::ALL.to_vec(),
            None => vec![KernelName::Newest],
        }
    }

    fn devices(&self) -> Vec<DeviceName> {
        match self.device {
            None if self.full => DeviceName::ALL.to_vec(),
            None | Some(Devices::Rxe) => vec![DeviceName::Rxe],
            Some(Devices::Mlx5) => vec![DeviceName::Mlx5],
            Some(Devices::All) => DeviceName::ALL.to_vec(),
        }
    }

    /// What is to be fetched.
    fn needs(&self) -> Needs {
        let proven = self.devices().contains(&DeviceName::Mlx5);
        Needs { kernels: self.kernels(), peers: self.full || proven, python: proven }
    }
}

/// Runs everything, prints the summary, and answers success only if nothing failed.
pub(crate) fn test(arguments: &TestArguments) -> Result<ExitCode> {
    let workspace = Workspace::find()?;
    let filter = arguments.filter.as_deref();
    let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
    let scope = Scope {
        filter,
        offer: Offer { peers: arguments.full, soak: arguments.full },
        patience: if arguments.full { minutes(30) } else { minutes(12) },
        silence: if arguments.full { minutes(10) } else { minutes(3) },
    };
    let mut summary = Summary::default();
    // Where checks are long enough to hide it.
    let whole = arguments.full && !arguments.no_host && arguments.native.is_none();
    let ahead =
        (whole && filter.is_none()).then(|| Ahead::begin(arguments.needs(), arguments.devices()));
    if !arguments.no_host {
        summary.places.push(checks::run(&workspace, filter)?);
    }
    if let Some(ahead) = ahead {
        ahead.wait();
    }
    match &arguments.native {
        Some(device) => native(&workspace, device, &scope, &mut summary)?,
        None => lab(arguments, &scope, &mut summary)?,
    }
    println!("\n{summary}");
    Ok(if summary.failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Turns what kept a suite from running into a failed report.
fn reports_of(suite: &str, outcome: Result<Vec<Report>>) -> Vec<Report> {
    outcome.unwrap_or_else(|error| {
        vec![Report { name: suite.to_owned(), outcome: Outcome::Failed(format!("{error:#}")) }]
    })
}

fn native(
    workspace: &Workspace,
    device: &str,
    scope: &Scope<'_>,
    summary: &mut Summary,
) -> Result<()> {
    if !Path::new("/sys/class/infiniband").join(device).exists() {
        bail!("--native {device}: this machine has no such RDMA device");
    }
    let start = Instant::now();
    let mut reports = Vec::new();
    for suite in
        suite::build(workspace, &DeviceName::ALL)?.iter().filter(|suite| suite.name == "device")
    {
        reports.extend(reports_of(suite.name, suite::run_native(suite, device, scope)));
    }
    let note = format!("{} s", start.elapsed().as_secs());
    summary.places.push(Place { name: format!("native {device}"), reports, note });
    Ok(())
}

fn lab(arguments: &TestArguments, scope: &Scope<'_>, summary: &mut Summary) -> Result<()> {
    let session = Session::open(&arguments.needs(), arguments.console)?;
    let suites = match scope.filter {
        Some(filter) if proof::suffices(filter) || examples::suffices(filter) => Vec::new(),
        _ => suite::build(&session.workspace, &arguments.devices())?,
    };
    let mut programs: Vec<_> =
        suites.iter().map(|suite| (suite.program(), suite.binary.clone())).collect();
    if !suites.is_empty() && session.workspace.has("uverbs", "bin", "uverbs") {
        let uverbs = session.workspace.static_program("uverbs", "uverbs", Profile::Checked)?;
        programs.push(("uverbs".into(), uverbs));
    }
    let logs = session.workspace.log_directory()?;
    let before = summary.places.len();
    for device in arguments.devices() {
        for kernel in arguments.kernels() {
            let name = format!("{} {}", kernel.label(), device.label());
            let start = Instant::now();
            let machine = Machine {
                programs: &programs,
                peers: scope.offer.peers,
                // A program of rdma-core's bindings imports and exports.
                python: scope.offer.peers && device == DeviceName::Mlx5,
                ..Machine::new(kernel, device)
            };
            let mut place = Place { name, ..Place::default() };
            // What shows after thousands of rounds, and what the kernel has no part in, one kernel
            // shows.
            let soak = scope.offer.soak && kernel == KernelName::Newest;
            let scope = &Scope { offer: Offer { soak, ..scope.offer }, ..scope.clone() };
            run_suites(&session, &machine, &suites, scope, &logs, &mut place);
            if device == DeviceName::Mlx5 {
                let full = arguments.full;
                let proof = Proof { session: &session, kernel, scope, logs: &logs, full };
                place.reports.extend(proof::run(&proof));
            }
            // One kernel will do for programs, too, unless they are asked for.
            let named = scope.filter.is_some_and(examples::suffices);
            let all = arguments.full && scope.filter.is_none() && kernel == KernelName::Newest;
            if named || all {
                let reports = examples::run(&session, kernel, device, scope.filter, &logs);
                place.reports.extend(reports);
            }
            place.note.push_str(&format!("{} s", start.elapsed().as_secs()));
            summary.places.push(place);
        }
    }
    if summary.places[before..].iter().all(|place| place.reports.is_empty())
        && summary.places[..before].iter().all(|place| place.reports.is_empty())
    {
        bail!("no test's name contains {:?}", scope.filter.unwrap_or_default());
    }
    Ok(())
}

/// Runs each suite; one that breaks its machine gets the next a new one.
fn run_suites(
    session: &Session,
    machine: &Machine<'_>,
    suites: &[Suite],
    scope: &Scope<'_>,
    logs: &Path,
    place: &mut Place,
) {
    let ground = Ground { device: machine.device, kernel: machine.kernel };
    let mut vm = None;
    for suite in suites.iter().filter(|suite| suite.is_for(machine.device)) {
        if vm.is_none() {
            match session.boot(machine) {
                Ok(booted) => {
                    place.note = format!(
                        "{}, booted in {:.1} s, ",
                        booted.greeting.release,
                        booted.boot_time.as_secs_f64()
                    );
                    vm = Some(booted);
                }
                Err(error) => place.reports.extend(reports_of("boot", Err(error))),
            }
        }
        let Some(running) = vm.as_mut() else { return };
        println!("\n{} on {} {}", suite.program(), machine.kernel.label(), machine.device.label());
        let outcome = (|| {
            let witness = match machine.device {
                DeviceName::Rxe => None,
                DeviceName::Mlx5 => Some(Witness::new(running)?),
            };
            let mut reports = suite::run(running, suite, scope, ground, logs)?;
            if let (Some(witness), false) = (witness, reports.is_empty()) {
                reports.extend(witness.reports(running));
            }
            Ok(reports)
        })();
        place.reports.extend(reports_of(suite.name, outcome));
        if running.ended() {
            vm = None;
        }
    }
    if let Some(vm) = vm
        && let Err(error) = vm.power_off()
    {
        place.reports.extend(reports_of("power off", Err(error)));
    }
}

/// `cargo ci bundle`
#[derive(Args, Clone, Debug)]
pub(crate) struct BundleArguments {
    /// Where to put the binary [default: uverbs-device-tests in the target directory's `lab`]
    path: Option<PathBuf>,
}

/// Copies the static device suite to a path.
pub(crate) fn bundle(arguments: &BundleArguments) -> Result<ExitCode> {
    crate::vm::check_host()?;
    let workspace = Workspace::find()?;
    let suites = suite::build(&workspace, &DeviceName::ALL)?;
    let Some(suite) = suites.iter().find(|suite| suite.name == "device") else {
        bail!("{} has no device suite to bundle", workspace.root().display());
    };
    let path = match &arguments.path {
        Some(path) => path.clone(),
        None => workspace.lab_directory()?.join(suite.program()),
    };
    fs::copy(&suite.binary, &path).with_context(|| format!("write {}", path.display()))?;
    println!(
        "{}: static, for any x86_64 Linux. UVERBS_TEST_DEVICE names the device to test; nothing of \
         the machine is changed.",
        path.display()
    );
    Ok(ExitCode::SUCCESS)
}
