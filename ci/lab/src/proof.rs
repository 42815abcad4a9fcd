//! What shows that the emulated ConnectX is one: rdma-core's own programs, which know nothing of
//! this project, on the kernel's own drivers.
//!
//! `test.rs` runs this after the suites. Cases that suit one machine share it; a machine that is lost takes
//! its remaining cases along as failures.

pub(crate) mod case;
mod conversation;
mod ethernet;
mod faults;
mod figures;
mod machines;
mod mutants;
mod ours;
mod perftest;
mod pyverbs;
mod rdmacm;
mod soak;
mod verbs;
mod witness;

use crate::device::{DeviceName, Emulation};
use crate::exec;
use crate::kernel::KernelName;
use crate::outcome::{Outcome, Report};
use crate::session::{Machine, Session};
use crate::suite::Scope;
use crate::workspace::Profile;
use anyhow::{Context, Result, ensure};
use case::Case;
use std::fs;
use std::path::{Path, PathBuf};
use verbs::Addressing;
use witness::Doorbells;
pub(crate) use witness::Witness;

/// What names begin with.
const GROUPS: &[&str] = &[
    "figures",
    "programs",
    "infiniband",
    "no_wc",
    "minimal",
    "machines",
    "soak",
    "faults",
    "mutants",
    "pyverbs",
];

/// Whether a filter asks for nothing but what is here, so that no suite need be built.
pub(crate) fn suffices(filter: &str) -> bool {
    GROUPS.iter().any(|group| filter.split("::").next() == Some(group))
}

/// Where the cases run.
pub(crate) struct Proof<'a> {
    pub(crate) session: &'a Session,
    pub(crate) kernel: KernelName,
    pub(crate) scope: &'a Scope<'a>,
    pub(crate) logs: &'a Path,
    /// Long ones as well.
    pub(crate) full: bool,
}

/// Runs everything that the scope asks for.
pub(crate) fn run(proof: &Proof<'_>) -> Vec<Report> {
    let mut reports = Vec::new();
    // They are of the device, and of this machine.
    if proof.kernel == KernelName::Newest || proof.scope.filter.is_some() {
        reports.extend(figures::run(proof));
    }
    let mut cases = vec![verbs::devinfo(Addressing::Gid)];
    cases.extend(verbs::pingpongs(Addressing::Gid));
    cases.extend(verbs::forms(Addressing::Gid));
    cases.extend(rdmacm::programs());
    cases.extend(perftest::programs());
    cases.extend(ethernet::cases());
    reports.extend(proof.group("programs", Emulation::default(), cases));
    // What differs below is the device and not the driver, so that one kernel will do.
    if proof.kernel == KernelName::Newest {
        let mut cases = vec![verbs::devinfo(Addressing::Lid)];
        cases.extend(verbs::pingpongs(Addressing::Lid));
        cases.extend(ours::over_infiniband());
        let infiniband = Emulation { infiniband: true, ..Emulation::default() };
        reports.extend(proof.group("infiniband", infiniband, cases));
        let no_wc = Emulation { no_wc: true, ..Emulation::default() };
        let mut cases = verbs::pingpongs(Addressing::Gid);
        cases.extend(ours::without_combining());
        reports.extend(proof.group("no_wc", no_wc, cases));
        let minimal = Emulation { minimal: true, ..Emulation::default() };
        reports.extend(proof.group("minimal", minimal, verbs::pingpongs(Addressing::Gid)));
        reports.extend(machines::run(proof));
    }
    // For the sake of time on one kernel, unless they are asked for.
    if proof.kernel == KernelName::Newest || proof.scope.filter.is_some() {
        reports.extend(soak::run(proof));
        reports.extend(faults::run(proof));
        reports.extend(mutants::run(proof));
    }
    reports.extend(pyverbs::run(proof));
    reports
}

impl Proof<'_> {
    /// A machine with rdma-core's programs.
    fn machine(&self, emulation: Emulation) -> Machine<'static> {
        Machine { peers: true, emulation, ..Machine::new(self.kernel, DeviceName::Mlx5) }
    }

    /// This project's programs, with their names in the guest.
    fn ours(&self) -> Result<Vec<(String, PathBuf)>> {
        exec::programs(&self.session.workspace, Profile::Checked)
    }

    fn wanted(&self, name: &str) -> bool {
        self.scope.filter.is_none_or(|filter| name.contains(filter))
    }

    /// Keeps what a group printed.
    fn keep(&self, group: &str, log: &str) -> Result<()> {
        let path = self.logs.join(format!("{}-mlx5-{group}.log", self.kernel.label()));
        fs::write(&path, log).with_context(|| format!("write {}", path.display()))
    }

    /// Runs cases in one machine.
    fn group(&self, group: &str, emulation: Emulation, cases: Vec<Case>) -> Vec<Report> {
        let cases: Vec<Case> = cases
            .into_iter()
            .map(|case| Case { name: format!("{group}::{}", case.name), ..case })
            .filter(|case| self.wanted(&case.name))
            .collect();
        let mut reports = Vec::new();
        if cases.is_empty() {
            return reports;
        }
        println!("\n{group} on {} mlx5", self.kernel.label());
        let mut log = String::new();
        let outcome = (|| {
            let ours = match cases.iter().any(|case| case.name.contains("::ours::")) {
                true => self.ours()?,
                false => Vec::new(),
            };
            let machine = Machine { programs: &ours, ..self.machine(emulation) };
            let mut vm = self.session.boot(&machine)?;
            // The driver tests write combining when somebody first opens a device.
            let opened = case::run_script(&mut vm, "ibv_devinfo -v >/dev/null", false)?;
            let before = Doorbells::of(&vm)?;
            ensure!(opened.is_ok(), "{opened:?}");
            for case in &cases {
                reports.push(case::run(&mut vm, case, &mut log)?);
                if vm.ended() {
                    return Ok(());
                }
            }
            let seen = Doorbells::of(&vm)?.none_since(before);
            let name = format!("{group}::doorbells");
            reports.push(match seen {
                Ok(()) => Report { name, outcome: Outcome::Passed },
                Err(error) => failed(&name, &error),
            });
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
    Report { name: name.to_owned(), outcome: Outcome::Failed(format!("{error:#}")) }
}

#[cfg(test)]
mod tests {
    use super::suffices;

    #[test]
    fn filters_that_name_a_group_need_no_suite() {
        assert!(suffices("pyverbs"));
        assert!(suffices("soak::reload"));
        assert!(!suffices("cq"));
        assert!(!suffices("verbs::devinfo"), "a suite's tests may have that in their names");
    }
}
