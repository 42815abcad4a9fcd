//! herd, from Debian's package `herdtools7`, unpacked into the cache and run from there by its own loader.

use crate::arch::Arch;
use crate::packages::apt::{Apt, DebPackage, DebSuite};
use crate::packages::cache::Cache;
use crate::packages::deb;
use crate::run::progress;
use crate::run::subprocess;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The unit of the cache.
const UNIT: &str = "herd";
/// The first suite that has the package.
const SUITE: DebSuite = DebSuite::Forky;
const PACKAGE: &str = "herdtools7";
const PROGRAM: &str = "usr/bin/herd7";
/// Where the package has the models.
const MODELS: &str = "usr/share/herdtools7/herd";
/// How long all tests of an architecture may take.
const PATIENCE: Duration = Duration::from_secs(20 * 60);

/// The simulator.
pub(super) struct Herd {
    unit: PathBuf,
    version: String,
}

impl Herd {
    /// From the cache, or fetched into it.
    pub(super) fn get() -> Result<Herd> {
        let cache = Cache::open()?;
        let unit = match cache.unit(UNIT) {
            Some(unit) => unit,
            None => fetch(&cache)?,
        };
        let is_herd = |source: &String| source.starts_with(PACKAGE);
        let version = cache.sources(UNIT).into_iter().find(is_herd).unwrap_or_default();
        Ok(Herd { unit, version })
    }

    /// The package and its version.
    pub(super) fn version(&self) -> &str {
        &self.version
    }

    /// Whether the model allows the outcome of each test, or why herd gave no verdict. The names in their first
    /// lines differ. Leaves the tests in `scratch`.
    pub(super) fn judge(
        &self,
        scratch: &Path,
        texts: &[&str],
    ) -> Result<Vec<std::result::Result<bool, String>>> {
        if scratch.exists() {
            fs::remove_dir_all(scratch)?;
        }
        fs::create_dir_all(scratch)?;
        let mut command = self.command();
        let mut names = Vec::new();
        for text in texts {
            let name = name_of(text).context("a test without a name")?;
            let path = scratch.join(format!("{name}.litmus"));
            fs::write(&path, text)?;
            command.arg(path);
            names.push(name);
        }
        let spinner = progress::spinner("herd");
        let run = subprocess::run(command, PATIENCE)?;
        spinner.finish_and_clear();
        let verdicts = verdicts(&run.stdout);
        let problem = || format!("herd gives no verdict: {}", last_lines(&run.stderr));
        Ok(names.into_iter().map(|name| verdicts.get(name).copied().ok_or_else(problem)).collect())
    }

    fn command(&self) -> Command {
        let mut command = Command::new(self.unit.join("usr/lib64/ld-linux-x86-64.so.2"));
        command
            .arg("--library-path")
            .arg(self.unit.join("usr/lib/x86_64-linux-gnu"))
            .arg(self.unit.join(PROGRAM))
            .arg("-set-libdir")
            .arg(self.unit.join(MODELS));
        command
    }
}

fn name_of(text: &str) -> Option<&str> {
    text.lines().next()?.split_once(' ').map(|(_, name)| name)
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(5)..].join("; ")
}

/// The verdicts in lines `Observation NAME Never 0 3`: whether the outcome was observed.
fn verdicts(text: &str) -> BTreeMap<&str, bool> {
    fn verdict(line: &str) -> Option<(&str, bool)> {
        let mut words = line.split(' ');
        match (words.next()?, words.next()?, words.next()?) {
            ("Observation", name, "Never") => Some((name, false)),
            ("Observation", name, "Sometimes" | "Always") => Some((name, true)),
            _ => None,
        }
    }
    text.lines().filter_map(verdict).collect()
}

fn fetch(cache: &Cache) -> Result<PathBuf> {
    let filling = cache.filling()?;
    // Another run may have brought it while this one waited.
    if let Some(unit) = cache.unit(UNIT) {
        return Ok(unit);
    }
    let apt = Apt::update(SUITE, Arch::X86_64.debian(), &filling.scratch("apt-herd")?)?;
    let packages = apt.closure(&[PACKAGE])?;
    let files = apt.download("herd", &packages)?;
    filling.add(UNIT, |unit| {
        for file in &files {
            deb::unpack(file, unit, wanted)?;
            fs::remove_file(file)?;
        }
        for path in [PROGRAM, MODELS] {
            if !unit.join(path).exists() {
                bail!("{PACKAGE} has no {path}");
            }
        }
        Ok(packages.iter().map(DebPackage::to_string).collect())
    })
}

/// The simulator of the suite, its models, and the libraries that it loads.
fn wanted(path: &Path) -> bool {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    let directory = path.parent().unwrap_or(Path::new(""));
    let libraries = ["usr/lib64", "usr/lib/x86_64-linux-gnu"];
    path == Path::new(PROGRAM)
        || path.starts_with(MODELS)
        || (file.contains(".so") && libraries.iter().any(|known| directory == Path::new(known)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_is_whether_the_outcome_was_observed() {
        let text = "Test a Forbidden\nObservation a Never 0 3\nObservation a.0 Sometimes 1 3\n\
                    Observation b Always 2 0\nObservation c Undefined\n";
        let found = verdicts(text);
        assert_eq!(
            (found["a"], found["a.0"], found["b"], found.get("c")),
            (false, true, true, None)
        );
        assert_eq!(name_of("AArch64 a.0\n{\n"), Some("a.0"));
    }
}
