//! The cargo workspace whose binaries go into the guest, and their static builds.
//!
//! Static builds have a target directory of their own, so that they never invalidate the files of a
//! plain `cargo build`.

pub(crate) mod mistake;

use crate::arch::Arch;
use crate::packages::cross::{Cross, Linking};
use crate::packages::musl::{self, Musl};
use crate::run::progress;
use crate::run::stages;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The variable that names the runner of this machine's programs to Cargo.
pub(crate) const RUNNER: &str = "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER";

#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    workspace_root: PathBuf,
    target_directory: PathBuf,
}

/// A package of the workspace.
#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    targets: Vec<CargoTarget>,
    features: std::collections::BTreeMap<String, Vec<String>>,
    /// The oldest release of Rust that it supports.
    pub(crate) rust_version: Option<String>,
    /// Empty where it must not be published.
    publish: Option<Vec<String>>,
}

/// Something that cargo builds of a package.
#[derive(Debug, Deserialize)]
pub(crate) struct CargoTarget {
    pub(crate) name: String,
    kind: Vec<String>,
    /// The file that it begins with.
    #[serde(default)]
    pub(crate) src_path: PathBuf,
    #[serde(default, rename = "required-features")]
    required_features: Vec<String>,
}

impl CargoTarget {
    /// Whether it is built with this feature alone.
    pub(crate) fn builds_with(&self, feature: &str) -> bool {
        self.required_features.iter().all(|name| name == feature)
    }

    /// Whether it is built without features.
    pub(crate) fn builds_plain(&self) -> bool {
        self.required_features.is_empty()
    }

    /// Whether it is the package's library.
    pub(crate) fn is_library(&self) -> bool {
        self.kind.iter().any(|kind| kind == "lib")
    }

    /// The option of cargo that chooses it.
    pub(crate) fn option(&self) -> Vec<String> {
        match self.kind.first().map(String::as_str) {
            Some(kind @ ("bin" | "test" | "example" | "bench")) => {
                vec![format!("--{kind}"), self.name.clone()]
            }
            // A package has one library.
            _ => vec!["--lib".into()],
        }
    }
}

/// A workspace.
#[derive(Debug)]
pub(crate) struct Workspace {
    metadata: Metadata,
    /// The compiler and linker of static programs, if they are for another processor than this machine's.
    cross: Option<Cross>,
    /// The toolchain for static programs with musl in place of glibc.
    musl: Option<Musl>,
}

/// Optimisation of a build, and whether it is static.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    /// Optimised, with debug assertions: for tests.
    Checked,
    /// The same, but not static: for tests on this machine, where it has no static libc.
    Here,
    /// Optimised: for measurements.
    Release,
    /// Optimised across crates (LTO), as a shipped program would be.
    Whole,
    /// As for measurements, without symbols: for the size of programs.
    Stripped,
    /// As for measurements, but not static.
    Dynamic,
    /// Not optimised, with debug assertions: for programs that run once.
    Quick,
    /// The same, with incremental builds after each edit.
    Edited,
}

/// A line of cargo's messages in JSON.
#[derive(Deserialize)]
pub(crate) struct CargoMessage {
    reason: String,
    #[serde(default)]
    executable: Option<PathBuf>,
    #[serde(default)]
    target: Option<CargoTarget>,
    #[serde(default)]
    fresh: bool,
}

/// A program that cargo built, or would have built.
pub(crate) struct Built {
    /// The name of its target.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// Whether it was there before.
    pub(crate) is_fresh: bool,
}

impl CargoMessage {
    /// Whether something was compiled that was not there before.
    fn is_compiled(&self) -> bool {
        self.reason == "compiler-artifact" && !self.fresh
    }

    /// The program that the message is about, if it is about one.
    pub(crate) fn program(self) -> Option<Built> {
        let kinds = ["bin", "test", "example", "lib"];
        let target = self.target.filter(|_| self.reason == "compiler-artifact")?;
        let is_program = target.kind.iter().any(|kind| kinds.contains(&kind.as_str()));
        let path = self.executable.filter(|_| is_program)?;
        Some(Built { name: target.name, path, is_fresh: self.fresh })
    }
}

/// The programs in cargo's messages, with the names of their targets; `note` gets the number of crates compiled so far.
fn programs(
    messages: impl BufRead,
    mut note: impl FnMut(String),
) -> std::io::Result<Vec<(String, PathBuf)>> {
    let (mut programs, mut compiled) = (Vec::new(), 0);
    for line in messages.split(b'\n') {
        let Ok(message) = serde_json::from_slice::<CargoMessage>(&line?) else { continue };
        if let Some(target) = message.target.as_ref().filter(|_| message.is_compiled()) {
            compiled += 1;
            note(format!("{compiled} compiled, {} last", target.name));
        }
        programs.extend(message.program().map(|built| (built.name, built.path)));
    }
    Ok(programs)
}

/// Whether this machine can link static programs: some distributions leave `libc.a` out, or package it apart.
pub(crate) fn has_static_libc() -> bool {
    // The linker's driver prints the bare name of a file that it does not find.
    let found = Command::new("cc").arg("-print-file-name=libc.a").output();
    found.is_ok_and(|found| found.stdout.contains(&b'/'))
}

/// Features of the programs under test: the same for every program, so that the library is built
/// once for all of them.
const CHECKED: &[&str] = &["serde", "tokio", "stream"];

/// The tests of a change that is being edited.
pub(crate) struct Edited {
    /// Unit tests, for this machine.
    pub(crate) host: Vec<PathBuf>,
    /// Suites, with the names of their targets.
    pub(crate) suites: Vec<(String, PathBuf)>,
}

/// The cargo that runs the lab, or the one on `PATH`.
pub(crate) fn cargo() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Makes a directory below the target directory.
fn create(directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory).with_context(|| {
        format!("create {}: CARGO_TARGET_DIR names another target directory", directory.display())
    })
}

/// Copies the sources, without builds and history.
pub(crate) fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from).with_context(|| format!("read {}", from.display()))? {
        let entry = entry?;
        let name = entry.file_name();
        let kind = entry.file_type()?;
        if kind.is_file() {
            std::fs::copy(entry.path(), to.join(name))?;
        } else if kind.is_dir() && name != "target" && name != ".git" {
            copy_tree(&entry.path(), &to.join(name))?;
        }
    }
    Ok(())
}

impl Workspace {
    /// The workspace of the current directory if it is this project's, else the lab's own.
    pub(crate) fn find() -> Result<Self> {
        if let Ok(here) = Self::at(Path::new("."))
            && here.package("uverbs").is_some()
        {
            return Ok(here);
        }
        Self::of_lab()
    }

    /// The workspace that this lab was built in.
    pub(crate) fn of_lab() -> Result<Self> {
        Self::at(Path::new(env!("CARGO_MANIFEST_DIR")))
    }

    /// A copy of the workspace with a target directory of its own, whatever the environment says.
    pub(crate) fn of_copy(directory: &Path, target: &Path) -> Result<Self> {
        let mut copy = Self::at(directory)?;
        copy.metadata.target_directory = target.to_owned();
        Ok(copy)
    }

    fn at(directory: &Path) -> Result<Self> {
        let output = Command::new(cargo())
            .args(["metadata", "--no-deps", "--format-version", "1"])
            .current_dir(directory)
            .stdin(Stdio::null())
            .output()
            .context("run cargo metadata")?;
        if !output.status.success() {
            bail!("cargo metadata failed:\n{}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(Self { metadata: serde_json::from_slice(&output.stdout)?, cross: None, musl: None })
    }

    /// The same with static programs for another processor.
    pub(crate) fn built_by(self, cross: Option<Cross>) -> Self {
        Self { cross, ..self }
    }

    /// The same with musl in static programs.
    pub(crate) fn with_musl(self, musl: Option<Musl>) -> Self {
        Self { musl, ..self }
    }

    /// The processor of static programs.
    pub(crate) fn arch(&self) -> Arch {
        self.cross.as_ref().map_or(Arch::default(), Cross::arch)
    }

    /// Its top directory.
    pub(crate) fn root(&self) -> &Path {
        &self.metadata.workspace_root
    }

    /// Where cargo builds it.
    pub(crate) fn target_directory(&self) -> &Path {
        &self.metadata.target_directory
    }

    /// A directory for the files of this run.
    pub(crate) fn run_directory(&self) -> Result<PathBuf> {
        let runs = self.metadata.target_directory.join("lab/run");
        create(&runs)?;
        for entry in std::fs::read_dir(&runs)?.flatten() {
            // Directories are named after the process that made them.
            if !Path::new("/proc").join(entry.file_name()).exists() {
                // Another run may be sweeping as well.
                let _gone = std::fs::remove_dir_all(entry.path());
            }
        }
        let own = runs.join(std::process::id().to_string());
        create(&own)?;
        Ok(own)
    }

    /// The lab's part of the target directory.
    pub(crate) fn lab_directory(&self) -> Result<PathBuf> {
        let directory = self.metadata.target_directory.join("lab");
        create(&directory)?;
        Ok(directory)
    }

    /// A directory for the logs of suites, kept until the next run.
    pub(crate) fn log_directory(&self) -> Result<PathBuf> {
        let logs = self.lab_directory()?.join("log");
        create(&logs)?;
        Ok(logs)
    }

    /// The features that a package declares.
    pub(crate) fn features(&self, package: &str) -> impl Iterator<Item = &str> {
        self.package(package)
            .into_iter()
            .flat_map(|package| package.features.keys().map(String::as_str))
    }

    /// The targets of a package.
    pub(crate) fn targets(&self, package: &str) -> impl Iterator<Item = &CargoTarget> {
        self.package(package).into_iter().flat_map(|package| &package.targets)
    }

    /// The packages that may be published.
    pub(crate) fn published(&self) -> impl Iterator<Item = &Package> {
        let may = |package: &&Package| package.publish.as_ref().is_none_or(|to| !to.is_empty());
        self.metadata.packages.iter().filter(may)
    }

    fn package(&self, name: &str) -> Option<&Package> {
        self.metadata.packages.iter().find(|package| package.name == name)
    }

    /// Whether a package has a target of this kind and name.
    pub(crate) fn has(&self, package: &str, kind: &str, name: &str) -> bool {
        self.package(package).is_some_and(|package| {
            package
                .targets
                .iter()
                .any(|target| target.name == name && target.kind.iter().any(|k| k == kind))
        })
    }

    /// The programs for a guest, with their names in it.
    pub(crate) fn programs(&self, profile: Profile) -> Result<Vec<(String, PathBuf)>> {
        let mut programs: Vec<_> = self.command_line(profile)?.into_iter().collect();
        if self.has("uverbs", "test", "device") {
            let test = self.static_test("uverbs", "device", profile)?;
            programs.push(("uverbs-device-tests".into(), test));
        }
        Ok(programs)
    }

    /// The command line for a guest, with its name in it, if the workspace has one.
    pub(crate) fn command_line(&self, profile: Profile) -> Result<Option<(String, PathBuf)>> {
        if !self.has("uverbs-cli", "bin", "uverbs") {
            return Ok(None);
        }
        Ok(Some(("uverbs".into(), self.static_program("uverbs-cli", "uverbs", profile)?)))
    }

    /// Builds a static program of a package.
    pub(crate) fn static_program(
        &self,
        package: &str,
        program: &str,
        profile: Profile,
    ) -> Result<PathBuf> {
        self.build_program(package, program, profile, true)
    }

    /// Builds a static program of a package and nothing else, for a guest that has no device suite.
    pub(crate) fn static_program_alone(&self, package: &str, program: &str) -> Result<PathBuf> {
        self.build_program(package, program, Profile::Checked, false)
    }

    fn build_program(
        &self,
        package: &str,
        program: &str,
        profile: Profile,
        with_suite: bool,
    ) -> Result<PathBuf> {
        let mut arguments = vec!["build".to_owned(), "--bin".into(), program.into()];
        if profile == Profile::Checked && with_suite && self.has("uverbs", "test", "device") {
            // Dependencies of tests enable features of their own. With the suite in the same call,
            // the library is built once for the suite and the examples.
            arguments.extend(["--package", "uverbs", "--test", "device"].map(str::to_owned));
            for feature in CHECKED {
                arguments.extend(["--features".into(), format!("uverbs/{feature}")]);
            }
        }
        self.build(package, &arguments, program, profile)
    }

    /// Builds a program of a package that loads shared libraries, to be measured.
    pub(crate) fn dynamic_program(&self, package: &str, program: &str) -> Result<PathBuf> {
        let arguments = ["build".to_owned(), "--bin".into(), program.into()];
        self.build(package, &arguments, program, Profile::Dynamic)
    }

    /// Builds a program of a package that needs a feature, to be measured on this machine.
    pub(crate) fn program_here(
        &self,
        package: &str,
        program: &str,
        feature: &str,
    ) -> Result<PathBuf> {
        let arguments = ["build", "--bin", program, "--features", feature].map(str::to_owned);
        self.build(package, &arguments, program, Profile::Dynamic)
    }

    /// Builds a static example that needs a feature.
    pub(crate) fn static_example(
        &self,
        package: &str,
        example: &str,
        feature: &str,
        profile: Profile,
    ) -> Result<PathBuf> {
        let mut arguments = ["build", "--example", example].map(str::to_owned).to_vec();
        let wanted = if profile == Profile::Checked { CHECKED } else { &[feature][..] };
        arguments.extend(self.known_features(package, wanted));
        self.build(package, &arguments, example, profile)
    }

    /// Builds the static test binary of an integration test.
    pub(crate) fn static_test(
        &self,
        package: &str,
        test: &str,
        profile: Profile,
    ) -> Result<PathBuf> {
        let mut arguments =
            vec!["test".to_owned(), "--no-run".into(), "--test".into(), test.into()];
        arguments.extend(self.known_features(package, CHECKED));
        self.build(package, &arguments, test, profile)
    }

    /// Builds the static binary of a package's unit tests.
    pub(crate) fn static_unit_tests(&self, package: &str, profile: Profile) -> Result<PathBuf> {
        let mut arguments = ["test", "--no-run", "--lib"].map(str::to_owned).to_vec();
        arguments.extend(self.known_features(package, CHECKED));
        self.build(package, &arguments, &package.replace('-', "_"), profile)
    }

    /// Options for those of these features that a package has.
    fn known_features(&self, package: &str, features: &[&str]) -> Vec<String> {
        let known = |name: &&&str| self.features(package).any(|known| known == **name);
        features
            .iter()
            .filter(known)
            .flat_map(|name| ["--features".to_owned(), (*name).to_owned()])
            .collect()
    }

    /// Builds the unit tests and the suites for a change that is being edited, with one call of
    /// cargo: it compiles them in parallel, without optimising, and incrementally.
    pub(crate) fn edited(&self) -> Result<Edited> {
        let mut arguments =
            ["test", "--no-run", "--lib", "--package", "uverbs-uapi"].map(str::to_owned).to_vec();
        for suite in ["device", "btf"] {
            arguments.extend(["--test".into(), suite.into()]);
        }
        for feature in CHECKED {
            arguments.extend(["--features".into(), format!("uverbs/{feature}")]);
        }
        let mut edited = Edited { host: Vec::new(), suites: Vec::new() };
        for (name, path) in self.build_all("uverbs", &arguments, Profile::Edited)? {
            match name.replace('-', "_").as_str() {
                "uverbs" | "uverbs_uapi" => edited.host.push(path),
                _ => edited.suites.push((name, path)),
            }
        }
        Ok(edited)
    }

    /// Builds the static test binary of an integration test as fast as possible, without the
    /// features that would build further programs.
    pub(crate) fn quick_test(&self, package: &str, test: &str) -> Result<PathBuf> {
        let arguments = ["test", "--no-run", "--test", test].map(str::to_owned);
        self.build(package, &arguments, test, Profile::Quick)
    }

    fn build(
        &self,
        package: &str,
        arguments: &[String],
        name: &str,
        profile: Profile,
    ) -> Result<PathBuf> {
        let programs =
            self.build_all(package, arguments, profile).context(format!("{package}'s {name}"))?;
        let program = programs.into_iter().find(|(known, _)| known == name);
        program
            .map(|(_, path)| path)
            .with_context(|| format!("cargo built no program {name} in {package}"))
    }

    /// Builds, and returns the programs with the names of their targets.
    fn build_all(
        &self,
        package: &str,
        arguments: &[String],
        profile: Profile,
    ) -> Result<Vec<(String, PathBuf)>> {
        let target = if self.musl.is_some() { musl::TARGET } else { self.arch().target() };
        let mut command = Command::new(cargo());
        command
            .args(arguments)
            .args(["--package", package, "--target", target, "--profile", "release"])
            .args(["--message-format", "json-render-diagnostics"])
            .current_dir(self.root())
            .env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static")
            .env("CARGO_PROFILE_RELEASE_STRIP", "debuginfo")
            .env_remove("RUSTFLAGS")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        let (directory, settings): (_, &[(&str, &str)]) = match profile {
            Profile::Checked => (
                "lab/checked",
                &[
                    ("DEBUG_ASSERTIONS", "true"),
                    ("OVERFLOW_CHECKS", "true"),
                    ("INCREMENTAL", "true"),
                ],
            ),
            Profile::Here => {
                ("lab/here", &[("DEBUG_ASSERTIONS", "true"), ("OVERFLOW_CHECKS", "true")])
            }
            Profile::Release => ("lab/release", &[]),
            Profile::Whole => ("lab/whole", &[("LTO", "fat"), ("CODEGEN_UNITS", "1")]),
            Profile::Stripped => ("lab/stripped", &[("STRIP", "symbols")]),
            Profile::Quick => {
                ("lab/quick", &[("OPT_LEVEL", "0"), ("DEBUG", "0"), ("DEBUG_ASSERTIONS", "true")])
            }
            Profile::Edited => (
                "lab/edited",
                &[
                    ("OPT_LEVEL", "0"),
                    ("DEBUG", "0"),
                    ("STRIP", "none"),
                    ("DEBUG_ASSERTIONS", "true"),
                    ("OVERFLOW_CHECKS", "true"),
                    ("INCREMENTAL", "true"),
                    ("CODEGEN_UNITS", "256"),
                ],
            ),
            Profile::Dynamic => ("lab/dynamic", &[("STRIP", "symbols")]),
        };
        if matches!(profile, Profile::Here | Profile::Dynamic) {
            command.env_remove("CARGO_ENCODED_RUSTFLAGS");
        }
        for (name, value) in settings {
            command.env(format!("CARGO_PROFILE_RELEASE_{name}"), value);
        }
        let mut directory = self.metadata.target_directory.join(directory);
        if let Some(cross) = &self.cross {
            // Another compiler builds procedural macros and build scripts anew, too.
            let of_arch = self.lab_directory()?.join(cross.arch().label());
            directory = of_arch.join(directory.file_name().unwrap_or_default());
            let linking = match profile {
                Profile::Dynamic => Linking::Dynamic,
                _ => Linking::Static,
            };
            cross.configure(&mut command, &directory, linking)?;
        }
        if let Some(musl) = &self.musl {
            directory =
                self.lab_directory()?.join("musl").join(directory.file_name().unwrap_or_default());
            musl.configure(&mut command, &directory)?;
        }
        command.arg("--target-dir").arg(directory);
        if !progress::shows_all() {
            command.arg("--quiet");
        }
        let step = progress::build(format!("building {package}"));
        let mut child = command.spawn().context("run cargo")?;
        stages::alive(child.id());
        let stdout = child.stdout.take().context("cargo has no output")?;
        let read = programs(BufReader::new(stdout), |note| step.note(note));
        stages::wait_and_count(child.id());
        let status = child.wait()?;
        let programs = read.context("read cargo's messages")?;
        if !status.success() {
            bail!("cargo failed ({status})");
        }
        Ok(programs)
    }
}
