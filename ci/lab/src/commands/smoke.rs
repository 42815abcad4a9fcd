//! The part of a full run on emulated aarch64: the smoke tests of `cargo ci quick` with pages of 16 KiB, on both
//! devices and on those in the process. The soak runs the whole suite there.

use crate::arch::Arch;
use crate::commands::quick;
use crate::machine::device::DeviceName;
use crate::machine::session::Session;
use crate::packages::fetch::Needs;
use crate::packages::kernel::KernelName;
use crate::run::outcome::Report;
use crate::run::stages;
use crate::run::summary::Section;
use crate::suites::capability::RunOptions;
use crate::suites::setup;
use crate::suites::suite::{self, TestScope};
use crate::workspace::Profile;
use anyhow::Result;
use std::fs;
use std::path::Path;

/// The prefix of the names, and the section of the summary.
pub(crate) const GROUP: &str = "aarch64";

/// Whether a filter names these tests only.
pub(crate) fn suffices(filter: &str) -> bool {
    filter.split("::").next() == Some(GROUP)
}

/// Fetches, builds and runs them; with a filter, those whose names contain the rest of it behind the prefix.
pub(crate) fn section(scope: &TestScope<'_>, console: bool, logs: &Path) -> Result<Section> {
    let needs = Needs::kernels(Arch::Aarch64, &[KernelName::Newest]);
    let session = Session::open(&needs, console)?;
    let stage = stages::stage(needs.arch.stage("build: device suite"));
    // Optimising takes longer than the tests do without.
    let suite = suite::device(&session.workspace, Profile::Quick)?;
    let suites: Vec<_> = suite.on_fabric().into_iter().chain([suite]).collect();
    drop(stage);
    let (own, choice) = (logs.join(GROUP), quick::smoke());
    fs::create_dir_all(&own)?;
    let filter = scope.filter.and_then(|filter| filter.split_once("::")).map(|(_, rest)| rest);
    // None of these tests runs rdma-core's programs, which a full run fetches for other processors nowhere else.
    let options = RunOptions { peers: false, soak: false };
    let scope = TestScope { filter, choice: Some(&choice), options, rounds: 1, ..scope.clone() };
    let mut section = Section { name: GROUP.into(), ..Section::default() };
    for device in DeviceName::ALL {
        let part = setup::suites_in(&session, &suites, KernelName::Newest, device, &scope, &own);
        let renamed = |report: Report| {
            let name = format!("{GROUP}::{}::{}", device.label(), report.name);
            Report { name, ..report }
        };
        section.reports.extend(part.reports.into_iter().map(renamed));
        let gap = if section.note.is_empty() { "" } else { ", " };
        section.note.push_str(&format!("{gap}{} {}", device.label(), part.note));
    }
    Ok(section)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_filter_that_begins_with_the_group_names_these_tests() {
        assert!(suffices("aarch64") && suffices("aarch64::rc::"));
        assert!(!suffices("rc::aarch64") && !suffices("aarch64_thing"));
    }
}
