//! `cargo ci test --junit FILE`: the results of a run for the web pages of GitHub, GitLab and Jenkins.

use crate::run::outcome::TestOutcome;
use crate::run::summary::{Section, Summary};
use anyhow::{Context, Result};
use std::path::Path;
use xml::{Case, Ending};

/// The device suite writes the same where there is no `cargo ci`.
#[path = "../../../../tests/device/junit.rs"]
mod xml;

/// Fails if another file would be lost at this path.
pub(crate) fn check_place(path: &Path) -> Result<()> {
    xml::check_place(path).with_context(|| format!("--junit {}", path.display()))
}

/// A test suite for each section, a test case for each report.
pub(crate) fn document(summary: &Summary) -> String {
    let suites: Vec<_> =
        summary.sections.iter().map(|section| (section.name.as_str(), cases(section))).collect();
    xml::document(suites.iter().map(|(name, cases)| (*name, cases.as_slice())))
}

fn cases(section: &Section) -> Vec<Case> {
    let ending = |outcome: &TestOutcome| match outcome {
        TestOutcome::Passed => Ending::Passed,
        TestOutcome::Skipped(why) => Ending::Skipped(why.clone()),
        TestOutcome::Failed(why) => Ending::Failed(why.clone()),
    };
    let case = |name: &String, outcome| Case {
        name: name.clone(),
        seconds: None,
        ending: ending(outcome),
    };
    section.reports.iter().map(|report| case(&report.name, &report.outcome)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::outcome::Report;
    use std::fs;

    #[test]
    fn only_results_of_an_earlier_run_are_replaced() {
        let folder = std::env::temp_dir().join(format!("lab-junit-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("results.xml");
        check_place(&path).unwrap();
        fs::write(&path, "").unwrap();
        check_place(&path).unwrap();
        fs::write(&path, document(&Summary { sections: Vec::new() })).unwrap();
        check_place(&path).unwrap();
        check_place(Path::new("/dev/null")).unwrap();
        fs::write(&path, "<?xml version=\"1.0\"?>\n<project/>\n").unwrap();
        for refused in [&path, &folder, &folder.join("absent/results.xml"), &path.join("x")] {
            let error = format!("{:#}", check_place(refused).unwrap_err());
            assert!(error.contains(refused.to_str().unwrap()), "{error}");
        }
        assert!(fs::read_to_string(&path).unwrap().contains("<project/>"));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn each_outcome_has_its_element() {
        let report = |name: &str, outcome| Report { name: name.into(), outcome };
        let reports = vec![
            report("device::rc::a", TestOutcome::Passed),
            report("device::b", TestOutcome::Skipped("[odp] \"no\"".into())),
            report("c", TestOutcome::Failed("1 < 2\n\u{1b}[0mno".into())),
        ];
        let sections = vec![Section { name: "native a&b".into(), reports, ..Section::default() }];
        assert_eq!(
            document(&Summary { sections }).lines().collect::<Vec<_>>(),
            [
                r#"<?xml version="1.0" encoding="UTF-8"?>"#,
                "<testsuites>",
                r#"  <testsuite name="native a&amp;b" tests="3" failures="1" skipped="1">"#,
                r#"    <testcase classname="device::rc" name="a"/>"#,
                concat!(
                    r#"    <testcase classname="device" name="b">"#,
                    r#"<skipped message="[odp] &quot;no&quot;"/></testcase>"#
                ),
                concat!(
                    r#"    <testcase classname="" name="c"><failure message="1 &lt; 2">"#,
                    "1 &lt; 2&#10;\u{fffd}[0mno</failure></testcase>"
                ),
                "  </testsuite>",
                "</testsuites>",
            ]
        );
    }
}
