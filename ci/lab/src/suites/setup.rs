//! The setup that the guests of a run share, and the suites, cases and examples that run in each.

use crate::machine::device::{DeviceName, Emulation};
use crate::machine::session::{self, Machine, Session};
use crate::packages::cache::Cache;
use crate::packages::fetch::{self, Needs};
use crate::packages::kernel::KernelName;
use crate::packages::musl::Musl;
use crate::run::outcome::{Report, TestOutcome};
use crate::run::stages;
use crate::run::summary::Section;
use crate::suites::cases::{self, CaseContext, EmulatorCheck};
use crate::suites::examples;
use crate::suites::suite::{self, Guest, Suite, TestScope};
use crate::workspace::{Profile, Workspace};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Instant;

/// The name of the job that makes the setup.
pub(crate) const SETUP: &str = "setup";

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

/// Downloads and builds for the guests of a run.
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
                let on_fabric: Vec<_> = suites.iter().filter_map(Suite::on_fabric).collect();
                suites.extend(on_fabric);
                suites.push(suite::build_unit(workspace)?);
            }
            programs.extend(suites.iter().map(|suite| (suite.program(), suite.binary.clone())));
            programs.extend(workspace.command_line(Profile::Checked)?);
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

/// The name of a guest.
pub(crate) fn guest(kernel: KernelName, device: DeviceName, emulation: Emulation) -> String {
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

/// Turns the error that kept a suite from running into a failed report.
pub(crate) fn reports_of(suite: &str, outcome: Result<Vec<Report>>) -> Vec<Report> {
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
