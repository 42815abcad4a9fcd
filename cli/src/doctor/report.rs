//! `uverbs doctor --report`: a Markdown report of a run on hardware, for an issue. It names no address, GUID, host or
//! user; the device suite's lines are copied unchanged.

use super::{Finding, Level};
use crate::devinfo::limits::Limits;
use crate::failure::{Failure, Result};
use crate::output::{out, outln};
use std::fs;
use std::path::Path;
use uverbs::{Context, Device};

/// The results in a file with the device suite's output.
pub(super) fn results(path: &Path) -> Result<Results> {
    let text = fs::read_to_string(path).map_err(|error| {
        Failure::usage(format!("--results {}: {error}", path.display()))
            .advice("name the file that the device suite's output went to: docs/HARDWARE.md")
    })?;
    Ok(Results::of(&text))
}

pub(super) fn print(devices: &[Device], findings: &[Finding], results: Option<&Results>) {
    outln!("## uverbs on hardware\n");
    for finding in findings.iter().filter(|finding| finding.check == "versions") {
        outln!("- {}, {}", finding.message, std::env::consts::ARCH);
    }
    for device in devices {
        outln!("- {}", description(device));
    }
    outln!("\n### What the doctor found\n\n| | check | of | |\n|---|---|---|---|");
    // The checks that could show them: GIDs, also the peer's, are addresses, functions have PCI addresses, and control
    // groups have names of users and containers.
    const ADDRESSES: [&str; 5] = ["gid", "peer", "route", "functions", "cgroup"];
    let shown =
        |finding: &&Finding| finding.check != "versions" && !ADDRESSES.contains(&finding.check);
    for finding in findings.iter().filter(shown) {
        let level = match finding.level {
            Level::Ok => "ok",
            Level::Note => "note",
            Level::Warning => "**warning**",
            Level::Problem => "**problem**",
        };
        outln!(
            "| {level} | {} | {} | {} |",
            finding.check,
            cell(finding.subject.as_deref().unwrap_or("the machine")),
            cell(&finding.message)
        );
    }
    for device in devices {
        capabilities(device);
    }
    outln!("\n### The device suite\n");
    match results {
        None => outln!("Not run, or not told with `--results FILE`."),
        Some(results) => out!("{results}"),
    }
}

/// Text in a cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

fn description(device: &Device) -> String {
    let firmware = device.firmware().unwrap_or("unknown");
    format!("{device}, firmware {firmware}, {} port(s)", device.port_count())
}

fn capabilities(device: &Device) {
    let attr = Context::open(device).and_then(|context| context.query_device());
    // The findings report a device that does not open.
    let Ok(attr) = attr else { return };
    outln!("\n<details><summary>Capabilities of {device}</summary>\n\n| | |\n|---|---|");
    if let Ok(serde_json::Value::Object(limits)) = serde_json::to_value(Limits::of(&attr)) {
        for (name, value) in limits.iter().filter(|(_, value)| !value.is_null()) {
            outln!("| {name} | {} |", cell(&value.to_string()));
        }
    }
    outln!("\n</details>");
}

/// The device suite's output.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Results {
    /// The lines before the first test: the device, and its peculiarities.
    first: Vec<String>,
    passed: usize,
    failed: Vec<String>,
    /// Names of skipped tests, with the reasons.
    skipped: Vec<(String, String)>,
}

impl Results {
    fn of(text: &str) -> Results {
        let mut results = Results::default();
        let is_test = |line: &str| line.starts_with("running ") || line.starts_with("test ");
        let first = text.lines().take_while(|line| !is_test(line));
        results.first = first.filter(|line| !line.is_empty()).map(str::to_owned).collect();
        for line in text.lines() {
            let Some((name, ending)) =
                line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... "))
            else {
                continue;
            };
            let name = name.trim_end().to_owned();
            match ending {
                "ok" => results.passed += 1,
                "FAILED" => results.failed.push(name),
                _ => {
                    let why = ending.strip_prefix("ignored").unwrap_or(ending).trim();
                    let why = why.trim_start_matches('(').trim_end_matches(')');
                    results.skipped.push((name, why.to_owned()));
                }
            }
        }
        results
    }
}

impl std::fmt::Display for Results {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for line in &self.first {
            writeln!(f, "> {line}")?;
        }
        let (failed, skipped) = (self.failed.len(), self.skipped.len());
        writeln!(f, "\n{} passed, {failed} failed, {skipped} skipped", self.passed)?;
        for name in &self.failed {
            writeln!(f, "- **failed**: {name}")?;
        }
        for (name, why) in &self.skipped {
            writeln!(f, "- skipped: {name}: {why}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_the_suite_are_counted_and_named() {
        let text = "note: tests between two devices skip\ndevice under test: mlx5_1\n\nrunning 3 tests\n\
                    test rc::a   ... ok\ntest mr::odp ... ignored ([odp] not advertised)\n\
                    test cq::c ... FAILED\n\ntest result: FAILED. 1 passed\n";
        let results = Results::of(text);
        assert_eq!(
            results.first,
            ["note: tests between two devices skip", "device under test: mlx5_1"]
        );
        assert_eq!((results.passed, &results.failed[..]), (1, &["cq::c".to_owned()][..]));
        assert_eq!(results.skipped, [("mr::odp".to_owned(), "[odp] not advertised".to_owned())]);
        assert!(
            results.to_string().contains("\n1 passed, 1 failed, 1 skipped\n- **failed**: cq::c\n")
        );
    }

    #[test]
    fn a_cell_ends_where_its_text_does() {
        assert_eq!(cell("a|b\nc"), "a\\|b c");
    }
}
