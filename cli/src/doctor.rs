//! `uverbs doctor`: finds faults that keep programs from working on this machine, with their remedies.
//!
//! [`machine`] checks the facts that all devices share, [`device`] opens each device and checks its ports. Both
//! read only, except for a protection domain and a small region that are made and dropped, and datagrams to the
//! [`peer`] that the user named.

mod device;
mod flow_control;
mod machine;
mod peer;
mod report;

use crate::args::DoctorArgs;
use crate::failure::{self, Failure, Result};
use crate::open;
use crate::output::outln;
use serde::Serialize;
use uverbs::Device;

/// The weight of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    /// As it should be.
    Ok,
    /// Good to know.
    Note,
    /// Some programs do not work, or not as fast as they could.
    Warning,
    /// Programs do not work.
    Problem,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// The name of the check, for programs: it stays the same.
    check: &'static str,
    /// The device and port that were checked; `null` for the machine.
    subject: Option<String>,
    level: Level,
    message: String,
    /// The remedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    /// Counts up if ever a field changes its meaning.
    schema: u32,
    problems: usize,
    warnings: usize,
    findings: &'a [Finding],
}

/// The findings so far, with the subject of the next ones.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    subject: Option<String>,
    found: Vec<Finding>,
}

impl Findings {
    /// Later findings are about this subject.
    pub(crate) fn about(&mut self, subject: impl Into<String>) {
        self.subject = Some(subject.into());
    }

    /// Later findings are about the machine.
    pub(crate) fn about_machine(&mut self) {
        self.subject = None;
    }

    fn add(&mut self, check: &'static str, level: Level, message: String, advice: Option<String>) {
        let subject = self.subject.clone();
        self.found.push(Finding { check, subject, level, message, advice });
    }

    pub(crate) fn ok(&mut self, check: &'static str, message: impl Into<String>) {
        self.add(check, Level::Ok, message.into(), None);
    }

    pub(crate) fn note(&mut self, check: &'static str, message: impl Into<String>) {
        self.add(check, Level::Note, message.into(), None);
    }

    pub(crate) fn warning(
        &mut self,
        check: &'static str,
        message: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.add(check, Level::Warning, message.into(), Some(advice.into()));
    }

    pub(crate) fn problem(
        &mut self,
        check: &'static str,
        message: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.add(check, Level::Problem, message.into(), Some(advice.into()));
    }

    /// A call of the library failed.
    pub(crate) fn failed(&mut self, check: &'static str, error: uverbs::Error) {
        let failure = Failure::from(error);
        let advice = failure.remedy().map(str::to_owned);
        self.add(check, Level::Problem, failure.message().to_owned(), advice);
    }

    fn count(&self, level: Level) -> usize {
        self.found.iter().filter(|finding| finding.level == level).count()
    }
}

pub(crate) fn run(args: &DoctorArgs) -> Result<()> {
    let mut findings = Findings::default();
    machine::look(&mut findings);
    let devices: Vec<Device> = if args.devices.is_empty() {
        machine::devices(&mut findings)
    } else {
        args.devices.iter().map(|name| open::find(name)).collect::<Result<_>>()?
    };
    let results = args.results.as_deref().map(report::results).transpose()?;
    let mut reaches = false;
    for device in &devices {
        reaches |= device::look(device, args.peer, &mut findings);
    }
    if let Some(peer) = args.peer.filter(|_| !reaches && !devices.is_empty()) {
        machine::no_route(peer, &mut findings);
    }
    let (problems, warnings) = (findings.count(Level::Problem), findings.count(Level::Warning));
    if args.report {
        report::print(&devices, &findings.found, results.as_ref());
    } else if args.json {
        failure::print(&Report { schema: 1, problems, warnings, findings: &findings.found });
    } else {
        print(&findings.found, args.verbose);
    }
    match (problems, warnings) {
        (0, warnings) if warnings == 0 || !args.strict => Ok(()),
        _ => Err(Failure::device(format!("{problems} problem(s), {warnings} warning(s)")).shown()),
    }
}

fn print(findings: &[Finding], verbose: bool) {
    for line in lines(findings, verbose) {
        outln!("{line}");
    }
}

/// Problems and then warnings, each with its remedy; after them, by subject, the checks that passed.
fn lines(findings: &[Finding], verbose: bool) -> Vec<String> {
    let mut lines = Vec::new();
    for (level, mark) in [(Level::Problem, "PROBLEM"), (Level::Warning, "WARNING")] {
        for finding in findings.iter().filter(|finding| finding.level == level) {
            let subject = finding.subject.as_ref().map(|subject| format!("{subject}: "));
            let subject = subject.unwrap_or_default();
            lines.push(format!("{mark} {}: {subject}{}", finding.check, finding.message));
            lines.extend(
                finding.advice.iter().map(|advice| format!("        what to do: {advice}")),
            );
        }
    }
    let shown = |finding: &&Finding| match finding.level {
        Level::Ok => true,
        Level::Note => verbose,
        Level::Warning | Level::Problem => false,
    };
    let mut last = None;
    for finding in findings.iter().filter(shown) {
        let subject = finding.subject.as_deref().unwrap_or("this machine");
        if last != Some(subject) {
            lines.push(subject.to_owned());
            last = Some(subject);
        }
        let mark = if finding.level == Level::Ok { "ok  " } else { "note" };
        lines.push(format!("  {mark} {}: {}", finding.check, finding.message));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_are_the_first_lines_each_with_a_remedy() {
        let mut findings = Findings::default();
        findings.ok("versions", "6.12");
        findings.warning("modules", "rdma_ucm is not loaded", "load it");
        findings.note("iommu", "none");
        findings.about("rxe0 port 1");
        findings.ok("gid", "index 1");
        findings.problem("link", "down", "set it up");
        let quiet = [
            "PROBLEM link: rxe0 port 1: down",
            "        what to do: set it up",
            "WARNING modules: rdma_ucm is not loaded",
            "        what to do: load it",
            "this machine",
            "  ok   versions: 6.12",
            "rxe0 port 1",
            "  ok   gid: index 1",
        ];
        assert_eq!(lines(&findings.found, false), quiet);
        assert_eq!(lines(&findings.found, true)[6], "  note iommu: none");
    }

    #[test]
    fn json_names_check_level_and_advice() {
        let mut findings = Findings::default();
        findings.ok("kernel", "6.12");
        findings.about("rxe0 port 1");
        findings.problem("link", "down", "set it up");
        let text = serde_json::to_string(&findings.found).unwrap();
        assert_eq!(
            text,
            concat!(
                r#"[{"check":"kernel","subject":null,"level":"ok","message":"6.12"},"#,
                r#"{"check":"link","subject":"rxe0 port 1","level":"problem","message":"down","#,
                r#""advice":"set it up"}]"#
            )
        );
        assert_eq!(findings.count(Level::Problem), 1);
    }
}
