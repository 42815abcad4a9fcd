//! Cases that show that the emulated ConnectX behaves like one: rdma-core's own programs, which
//! know nothing of this project, run on the kernel's own drivers.
//!
//! `commands/test.rs` runs them after the suites. Cases that suit one guest share it. When a guest is lost,
//! its remaining cases fail.

mod absence;
mod cargo_runner;
pub(crate) mod case;
mod confined;
mod doctor;
mod emulator_check;
mod ethernet;
mod faults;
mod figures;
mod guest_processes;
mod machines;
mod mutants;
mod native;
mod ours;
mod perftest;
mod pyverbs;
mod rdmacm;
mod runner;
mod soak;
mod verbs;
mod wire;
mod workflow;

use crate::machine::device::{DeviceName, Emulation};
use crate::machine::session::{Machine, Session};
use crate::packages::kernel::KernelName;
use crate::run::jobs::say;
use crate::run::outcome::{Report, TestOutcome};
use crate::run::stages;
use crate::suites::suite::TestScope;
use crate::workspace::Profile;
use anyhow::{Context, Result, ensure};
use case::Case;
use emulator_check::DoorbellFaults;
pub(crate) use emulator_check::EmulatorCheck;
use std::fs;
use std::path::{Path, PathBuf};
use verbs::Addressing;

/// Cases that are run together.
pub(crate) struct Group {
    /// The prefix of their names.
    pub(crate) name: &'static str,
    /// Job slots that it takes: two guests take two, and a measurement of time takes all.
    pub(crate) slots: usize,
    /// The kernels that it runs on, unless a filter names it.
    kernels: &'static [KernelName],
    /// Whether a full run has it; the others are in `cargo ci soak`.
    full: bool,
    run: fn(&CaseContext<'_>) -> Vec<Report>,
}

impl Group {
    const fn new(name: &'static str, run: fn(&CaseContext<'_>) -> Vec<Report>) -> Self {
        Self { name, slots: 1, kernels: &[KernelName::Newest], full: true, run }
    }

    /// Runs the group's cases, as one stage of the run's times. With a filter that names no group there may be no
    /// cases, and so no stage.
    pub(crate) fn run(&self, context: &CaseContext<'_>) -> Vec<Report> {
        let whole = context.scope.filter.is_none_or(suffices);
        let names = || format!("{} mlx5 {}", context.kernel.label(), self.name);
        let stage = || stages::stage(context.session.arch().stage(names()));
        let _stage = whole.then(stage);
        (self.run)(context)
    }
}

/// The longest ones first, so that no long one runs alone at the end.
const GROUPS: &[Group] = &[
    Group::new("pyverbs", pyverbs::run),
    Group::new("faults", faults::run),
    Group::new("soak", soak::run),
    Group { kernels: &KernelName::ALL, ..Group::new("programs", programs) },
    Group::new("rxe_programs", rxe_programs),
    Group::new("wire", wire),
    // In these the device differs, and not the driver.
    Group::new("infiniband", infiniband),
    Group::new("no_wc", no_wc),
    Group::new("minimal", minimal),
    // Linux 6.12 is the first that knows such functions.
    Group {
        kernels: &[KernelName::V6_12, KernelName::Newest],
        ..Group::new("data_direct", data_direct)
    },
    Group::new("real_time", real_time),
    Group::new("runner", runner::run),
    Group::new("cargo_runner", cargo_runner::run),
    Group { slots: 2, ..Group::new("machines", machines::run) },
    Group { full: false, ..Group::new("mutants", mutants::run) },
    Group { full: false, ..Group::new("foreign", foreign) },
    Group { slots: usize::MAX, ..Group::new("figures", figures::run) },
];

/// Whether a filter names a group, so that no suite need be built.
pub(crate) fn suffices(filter: &str) -> bool {
    GROUPS.iter().any(|group| filter.split("::").next() == Some(group.name))
}

/// A group by its name.
pub(crate) fn group(name: &str) -> Option<&'static Group> {
    GROUPS.iter().find(|group| group.name == name)
}

/// The groups of a run on a kernel: those of a full run, or those that may have cases for a filter.
/// The group itself filters its cases.
pub(crate) fn groups(kernel: KernelName, filter: Option<&str>) -> Vec<&'static Group> {
    let wanted = |group: &&Group| match filter {
        None => group.full && group.kernels.contains(&kernel),
        // Whole groups are requested by name. On other kernels than the newest few groups run.
        Some(filter) if suffices(filter) => filter.split("::").next() == Some(group.name),
        Some(_) => group.name != "pyverbs",
    };
    GROUPS.iter().filter(wanted).collect()
}

/// Everything that a case needs to run.
pub(crate) struct CaseContext<'a> {
    pub(crate) session: &'a Session,
    pub(crate) kernel: KernelName,
    pub(crate) scope: &'a TestScope<'a>,
    pub(crate) logs: &'a Path,
}

fn programs(context: &CaseContext<'_>) -> Vec<Report> {
    let mut cases = vec![verbs::devinfo(Addressing::Gid)];
    cases.extend(verbs::pingpongs(Addressing::Gid));
    cases.extend(verbs::forms(Addressing::Gid));
    cases.extend(rdmacm::programs());
    cases.extend(ours::by_address());
    cases.extend(doctor::cases());
    cases.extend(confined::cases("mlx5_0", "mlx5_1"));
    cases.extend(perftest::programs());
    cases.extend(native::on_ethernet());
    // These last: they unload modules, and move an interface into another namespace. On 6.1 a driver that is loaded
    // again tests write combining by WQEs that differ from their doorbells, as no other program may.
    if context.kernel == KernelName::Newest {
        cases.extend(absence::on_mlx5());
    }
    cases.extend(ethernet::cases());
    context.group("programs", Emulation::default(), cases)
}

/// Connections by address on soft-RoCE, programs under a filter, and the doctor asked about a peer.
fn rxe_programs(context: &CaseContext<'_>) -> Vec<Report> {
    let mut cases = ours::by_address();
    cases.extend(confined::cases("rxe0", "rxe1"));
    cases.extend(doctor::peers());
    cases.extend(absence::on_rxe());
    context.group_on(DeviceName::Rxe, "rxe_programs", Emulation::default(), cases)
}

/// Our transport over UDP, with soft-RoCE at the other end.
fn wire(context: &CaseContext<'_>) -> Vec<Report> {
    context.group_on(DeviceName::Rxe, "wire", Emulation::default(), wire::cases())
}

fn infiniband(context: &CaseContext<'_>) -> Vec<Report> {
    let mut cases = vec![verbs::devinfo(Addressing::Lid)];
    cases.extend(verbs::pingpongs(Addressing::Lid));
    cases.extend(ours::over_infiniband());
    cases.extend(native::on_infiniband());
    let infiniband = Emulation { infiniband: true, ..Emulation::default() };
    context.group("infiniband", infiniband, cases)
}

fn no_wc(context: &CaseContext<'_>) -> Vec<Report> {
    let no_wc = Emulation { no_wc: true, ..Emulation::default() };
    let mut cases = verbs::pingpongs(Addressing::Gid);
    cases.extend(ours::without_combining());
    context.group("no_wc", no_wc, cases)
}

/// The whole device suite as on a stranger's machine.
fn foreign(context: &CaseContext<'_>) -> Vec<Report> {
    let partition = Emulation { infiniband: true, partition: true, ..Emulation::default() };
    let mut reports = context.group("foreign", Emulation::default(), native::whole_on_mlx5());
    reports.extend(context.group("foreign_partition", partition, native::whole_in_a_partition()));
    let rxe = native::whole_on_rxe();
    reports.extend(context.group_on(DeviceName::Rxe, "foreign_rxe", Emulation::default(), rxe));
    reports
}

fn minimal(context: &CaseContext<'_>) -> Vec<Report> {
    let minimal = Emulation { minimal: true, ..Emulation::default() };
    context.group("minimal", minimal, verbs::pingpongs(Addressing::Gid))
}

/// Dma-bufs on a device whose first function has a data-direct function.
fn data_direct(context: &CaseContext<'_>) -> Vec<Report> {
    let data_direct = Emulation { data_direct: true, ..Emulation::default() };
    context.group("data_direct", data_direct, ours::through_data_direct())
}

/// Completion queues on a device with a clock of real time, which the kernel's own queues use, too.
fn real_time(context: &CaseContext<'_>) -> Vec<Report> {
    let real_time = Emulation { real_time: true, ..Emulation::default() };
    context.group("real_time", real_time, ours::in_real_time())
}

impl CaseContext<'_> {
    /// A guest with rdma-core's programs.
    fn machine(&self, emulation: Emulation) -> Machine<'static> {
        Machine { peers: true, emulation, ..Machine::new(self.kernel, DeviceName::Mlx5) }
    }

    /// This project's programs, with their names in the guest.
    fn ours(&self) -> Result<Vec<(String, PathBuf)>> {
        self.session.workspace.programs(Profile::Checked)
    }

    fn wanted(&self, name: &str) -> bool {
        self.scope.filter.is_none_or(|filter| name.contains(filter))
    }

    /// Keeps the output of a group.
    fn keep(&self, group: &str, log: &str) -> Result<()> {
        let path = self.logs.join(format!("{}-mlx5-{group}.log", self.kernel.label()));
        fs::write(&path, log).with_context(|| format!("write {}", path.display()))
    }

    /// Runs cases in one guest.
    fn group(&self, group: &str, emulation: Emulation, cases: Vec<Case>) -> Vec<Report> {
        self.group_on(DeviceName::Mlx5, group, emulation, cases)
    }

    /// As [`group`](Self::group), on a device. Only the emulated one shows the doorbells that were rung.
    fn group_on(
        &self,
        device: DeviceName,
        group: &str,
        emulation: Emulation,
        cases: Vec<Case>,
    ) -> Vec<Report> {
        let cases: Vec<Case> = cases
            .into_iter()
            .map(|case| Case { name: format!("{group}::{}", case.name), ..case })
            .filter(|case| self.wanted(&case.name))
            .collect();
        let mut reports = Vec::new();
        if cases.is_empty() {
            return reports;
        }
        let emulated = device == DeviceName::Mlx5;
        say!("\n{group} on {} {}", self.kernel.label(), device.label());
        let mut log = String::new();
        let outcome = (|| {
            let of_ours = |case: &Case| {
                ["::ours::", "::doctor::", "::confined::", "::absence::"]
                    .iter()
                    .any(|part| case.name.contains(part))
            };
            let ours = match cases.iter().any(of_ours) {
                true => self.ours()?,
                false => Vec::new(),
            };
            let machine = Machine { device, programs: &ours, ..self.machine(emulation) };
            let mut vm = self.session.boot(&machine)?;
            // The driver tests write combining when a device is first opened.
            let opened = case::run_script(&mut vm, "ibv_devinfo -v >/dev/null", false)?;
            let before = if emulated { Some(DoorbellFaults::of(&vm)?) } else { None };
            ensure!(opened.is_ok(), "{opened:?}");
            for case in &cases {
                reports.push(case::run(&mut vm, case, &mut log)?);
                if vm.ended() {
                    return Ok(());
                }
            }
            if let Some(before) = before {
                let mut seen = DoorbellFaults::of(&vm)?;
                // The device suite rings pages of its own without a queue.
                if cases.iter().any(|case| case.name.contains("::native::")) {
                    seen.stray = before.stray;
                }
                let seen = seen.none_since(before);
                let name = format!("{group}::doorbells");
                reports.push(match seen {
                    Ok(()) => Report { name, outcome: TestOutcome::Passed },
                    Err(error) => failed(&name, &error),
                });
            }
            vm.power_off()
        })();
        if let Err(error) = outcome.and_then(|()| self.keep(group, &log)) {
            reports.push(failed(&format!("{group}::machine"), &error));
        }
        for case in &cases[reports.len().min(cases.len())..] {
            reports.push(failed(&case.name, &anyhow::anyhow!("its machine was lost before")));
        }
        reports
    }
}

fn failed(name: &str, error: &anyhow::Error) -> Report {
    Report { name: name.to_owned(), outcome: TestOutcome::Failed(format!("{error:#}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_about_the_device_run_on_the_newest_kernel() {
        let names = |kernel, filter| -> Vec<&str> {
            groups(kernel, filter).iter().map(|group| group.name).collect()
        };
        assert_eq!(names(KernelName::V6_1, None), ["programs"]);
        assert_eq!(names(KernelName::V6_12, None), ["programs", "data_direct"]);
        let newest = names(KernelName::Newest, None);
        assert!(newest.contains(&"pyverbs") && !newest.contains(&"mutants"));
        assert_eq!(names(KernelName::V6_1, Some("mutants::x")), ["mutants"]);
        assert!(!names(KernelName::V6_1, Some("devinfo")).contains(&"pyverbs"));
    }

    #[test]
    fn filters_that_name_a_group_need_no_suite() {
        assert!(suffices("pyverbs"));
        assert!(suffices("soak::reload"));
        assert!(!suffices("cq"));
        assert!(!suffices("verbs::devinfo"), "a suite's tests may have that in their names");
    }
}
