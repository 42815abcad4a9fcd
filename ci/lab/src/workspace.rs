//! The cargo workspace whose binaries go into the guest, and their static builds.
//!
//! Static builds have a target directory of their own, so that they never invalidate what a plain
//! `cargo build` made.

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The only machine that the lab boots.
const TARGET: &str = "x86_64-unknown-linux-gnu";

#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    workspace_root: PathBuf,
    target_directory: PathBuf,
}

#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    targets: Vec<Target>,
    features: std::collections::BTreeMap<String, Vec<String>>,
}

#[derive(Debug, Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

/// A workspace.
#[derive(Debug)]
pub(crate) struct Workspace {
    metadata: Metadata,
}

/// How a build is optimised, and that it is static.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    /// Optimised, with debug assertions: what tests run.
    Checked,
    /// Optimised: what is measured.
    Release,
    /// The same across crates, as who ships a program would: what consists of small functions of
    /// several.
    Whole,
    /// What is measured, without symbols: what is weighed.
    Stripped,
    /// What is measured, but not static.
    Dynamic,
    /// Not optimised, with debug assertions: what is built to be run once.
    Quick,
}

#[derive(Deserialize)]
struct Message {
    reason: String,
    #[serde(default)]
    executable: Option<PathBuf>,
    #[serde(default)]
    target: Option<Target>,
}

/// The cargo that runs the lab, or the one on `PATH`.
pub(crate) fn cargo() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
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

    /// A copy of the workspace, built elsewhere than the original whatever the environment says.
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
        Ok(Self { metadata: serde_json::from_slice(&output.stdout)? })
    }

    /// Its top directory.
    pub(crate) fn root(&self) -> &Path {
        &self.metadata.workspace_root
    }

    /// A directory for what this run makes.
    pub(crate) fn run_directory(&self) -> Result<PathBuf> {
        let runs = self.metadata.target_directory.join("lab/run");
        std::fs::create_dir_all(&runs)?;
        for entry in std::fs::read_dir(&runs)?.flatten() {
            // Directories are named after the process that made them.
            if !Path::new("/proc").join(entry.file_name()).exists() {
                // Another run may be sweeping as well.
                let _gone = std::fs::remove_dir_all(entry.path());
            }
        }
        let own = runs.join(std::process::id().to_string());
        std::fs::create_dir_all(&own)?;
        Ok(own)
    }

    /// The lab's part of the target directory.
    pub(crate) fn lab_directory(&self) -> Result<PathBuf> {
        let directory = self.metadata.target_directory.join("lab");
        std::fs::create_dir_all(&directory)?;
        Ok(directory)
    }

    /// A directory for what suites print, kept until the next run.
    pub(crate) fn log_directory(&self) -> Result<PathBuf> {
        let logs = self.lab_directory()?.join("log");
        std::fs::create_dir_all(&logs)?;
        Ok(logs)
    }

    /// The features that a package declares.
    pub(crate) fn features(&self, package: &str) -> impl Iterator<Item = &str> {
        self.package(package)
            .into_iter()
            .flat_map(|package| package.features.keys().map(String::as_str))
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

    /// Builds a static program of a package, with the feature `cli` where it has one.
    pub(crate) fn static_program(
        &self,
        package: &str,
        program: &str,
        profile: Profile,
    ) -> Result<PathBuf> {
        let mut arguments = vec!["build".to_owned(), "--bin".into(), program.into()];
        if self.features(package).any(|name| name == "cli") {
            arguments.extend(["--features".into(), "cli".into()]);
        }
        self.build(package, &arguments, program, profile)
    }

    /// Builds a program of a package that loads shared libraries, to be measured.
    pub(crate) fn dynamic_program(&self, package: &str, program: &str) -> Result<PathBuf> {
        let arguments = ["build".to_owned(), "--bin".into(), program.into()];
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
        let arguments = ["build", "--example", example, "--features", feature];
        self.build(package, &arguments.map(str::to_owned), example, profile)
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
        for feature in ["cli", "tokio", "stream"] {
            if self.features(package).any(|name| name == feature) {
                arguments.extend(["--features".into(), feature.into()]);
            }
        }
        self.build(package, &arguments, test, profile)
    }

    /// Builds the static test binary of an integration test as fast as can be, without the features
    /// that would build programs beside it.
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
        let mut command = Command::new(cargo());
        command
            .args(arguments)
            .args(["--package", package, "--target", TARGET, "--profile", "release"])
            .args(["--message-format", "json-render-diagnostics"])
            .current_dir(self.root())
            .env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static")
            .env("CARGO_PROFILE_RELEASE_STRIP", "debuginfo")
            .env_remove("RUSTFLAGS")
            .stdin(Stdio::null())
            .stderr(Stdio::inherit());
        let directory = match profile {
            Profile::Checked => {
                command.env("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true");
                command.env("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "true");
                command.env("CARGO_PROFILE_RELEASE_INCREMENTAL", "true");
                "lab/checked"
            }
            Profile::Release => "lab/release",
            Profile::Whole => {
                command.env("CARGO_PROFILE_RELEASE_LTO", "fat");
                command.env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1");
                "lab/whole"
            }
            Profile::Stripped => {
                command.env("CARGO_PROFILE_RELEASE_STRIP", "symbols");
                "lab/stripped"
            }
            Profile::Quick => {
                command.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0");
                command.env("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true");
                "lab/quick"
            }
            Profile::Dynamic => {
                command.env_remove("CARGO_ENCODED_RUSTFLAGS");
                command.env("CARGO_PROFILE_RELEASE_STRIP", "symbols");
                "lab/dynamic"
            }
        };
        command.arg("--target-dir").arg(self.metadata.target_directory.join(directory));
        if !std::io::IsTerminal::is_terminal(&std::io::stderr()) {
            command.arg("--quiet");
        }
        let output = command.output().context("run cargo")?;
        if !output.status.success() {
            bail!("{package}'s {name} does not build");
        }
        String::from_utf8_lossy(&output.stdout)
            .lines()
            .filter_map(|line| serde_json::from_str::<Message>(line).ok())
            .filter(|message| message.reason == "compiler-artifact")
            .find(|message| {
                message.target.as_ref().is_some_and(|target| {
                    target.name == name
                        && target
                            .kind
                            .iter()
                            .any(|kind| ["bin", "test", "example"].contains(&kind.as_str()))
                }) && message.executable.is_some()
            })
            .and_then(|message| message.executable)
            .with_context(|| format!("cargo built no program {name} in {package}"))
    }
}
