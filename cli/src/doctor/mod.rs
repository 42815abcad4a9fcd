//! `uverbs doctor`: what would keep a program from working on this machine, and what to do about it.
//!
//! [`machine`] looks at what all devices share, [`device`] opens each device and looks at its ports. Both
//! read only, but for a protection domain and a small region that are made and dropped, and datagrams to the
//! [`peer`] that was named.

mod device;
mod flow_control;
mod machine;
mod peer;
mod report;

use crate::args::DoctorArgs;
use crate::failure::{self, Failure, Result};
use crate::open;
use serde::Serialize;
use uverbs::Device;

/// How much a finding matters.
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

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// The name of the check, for programs: it stays the same.
    check: &'static str,
    /// The device and port that it is about; `null` for the machine.
    subject: Option<String>,
    level: Level,
    message: String,
    /// What to do.
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

/// Findings as they are made.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    subject: Option<String>,
    found: Vec<Finding>,
}

impl Findings {
    /// What follows is about this.
    pub(crate) fn about(&mut self, subject: impl Into<String>) {
        self.subject = Some(subject.into());
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
    for device in &devices {
        device::look(device, args.peer, &mut findings);
    }
    let (problems, warnings) = (findings.count(Level::Problem), findings.count(Level::Warning));
    if args.report {
        report::print(&devices, &findings.found, args.results.as_deref());
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
    let mut subject = &None;
    for finding in findings {
        if finding.level < Level::Warning && !verbose && finding.level != Level::Ok {
            continue;
        }
        if finding.subject != *subject {
            subject = &finding.subject;
            println!("{}", subject.as_deref().unwrap_or("this machine"));
        }
        let mark = match finding.level {
            Level::Ok => "ok     ",
            Level::Note => "note   ",
            Level::Warning => "WARNING",
            Level::Problem => "PROBLEM",
        };
        println!("  {mark} {}: {}", finding.check, finding.message);
        if let Some(advice) = &finding.advice {
            println!("          what to do: {advice}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
