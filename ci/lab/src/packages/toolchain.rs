//! The oldest Rust that the published packages support: rustup's if it is installed, else Debian's,
//! unpacked into the cache and run from there by its own loader.
//!
//! Debian's compiler links procedural macros with the machine's `cc`. Rust's own toolchain asks for
//! one too, so a machine on which this lab was built has it.

use crate::arch::Arch;
use crate::packages::apt::{Apt, DebPackage, DebSuite};
use crate::packages::cache::{Cache, Filling};
use crate::packages::deb;
use anyhow::{Context, Result, bail};
use std::fmt;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The releases of Rust that a suite of Debian carries.
const RELEASES: [(&str, DebSuite); 1] = [("1.85", DebSuite::Trixie)];

/// Processors of 32 bits, for which the libraries are checked and nothing is run: Rust's name of the target,
/// and Debian's of the architecture.
pub(crate) const NARROW: [(&str, &str); 2] =
    [("i686-unknown-linux-gnu", "i386"), ("armv7-unknown-linux-gnueabihf", "armhf")];

/// The package of the standard library, for each architecture.
pub(crate) const STANDARD: &str = "libstd-rust-dev";

/// Rust of one release.
#[derive(Clone, Debug)]
pub(crate) struct Toolchain {
    /// The beginning of the output of `rustc --version`.
    version: String,
    /// First two numbers of it.
    release: String,
    source: Source,
}

/// Where the programs lie.
#[derive(Clone, Debug)]
enum Source {
    /// `cargo`, `rustc` and `rustdoc` in this directory.
    Rustup(PathBuf),
    /// The unit of the cache.
    Debian(PathBuf),
}

impl fmt::Display for Toolchain {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from = match self.source {
            Source::Rustup(_) => "rustup",
            Source::Debian(_) => "Debian",
        };
        write!(to, "{} of {from}", self.version)
    }
}

fn unit(release: &str) -> String {
    format!("rust-{release}")
}

impl Toolchain {
    /// The toolchain of a release, fetched if it must be; or why it cannot be had.
    pub(crate) fn of(release: &str) -> Result<Self> {
        if let Some(directory) = rustup(release) {
            let source = Source::Rustup(directory);
            return Self::new(release, source);
        }
        let cache = Cache::open()?;
        let directory = match cache.unit(&unit(release)) {
            Some(directory) => directory,
            None => fetch(&cache, release, false)?,
        };
        Self::new(release, Source::Debian(directory))
    }

    fn new(release: &str, source: Source) -> Result<Self> {
        let mut toolchain = Self { version: String::new(), release: release.to_owned(), source };
        let output = toolchain.direct("rustc").arg("--version").stdin(Stdio::null()).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let Some(version) = version(&text, release) else {
            bail!("rustc {release} says {text:?} {}", String::from_utf8_lossy(&output.stderr));
        };
        toolchain.version = version.to_owned();
        Ok(toolchain)
    }

    /// The words that begin a program of the toolchain.
    fn words(&self, program: &str) -> Vec<String> {
        match &self.source {
            Source::Rustup(directory) => vec![directory.join(program).display().to_string()],
            Source::Debian(unit) if program == "cargo" => from_unit(unit, program),
            Source::Debian(unit) => compiler(unit, program),
        }
    }

    fn direct(&self, program: &str) -> Command {
        let words = self.words(program);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command
    }

    /// Its cargo in the workspace `root`, with a target directory of its own in `lab`.
    pub(crate) fn cargo(&self, root: &Path, lab: &Path) -> Result<Command> {
        let target = self.target_directory(lab)?;
        let env = ["env", "RUSTC_BOOTSTRAP=1"].map(str::to_owned).to_vec();
        let mut command = self.direct("cargo");
        command
            .current_dir(root)
            .env("CARGO_TARGET_DIR", &target)
            .env_remove("RUSTUP_TOOLCHAIN")
            .env_remove("RUSTC_WRAPPER")
            .env_remove("RUSTC_WORKSPACE_WRAPPER")
            .env_remove("RUSTDOCFLAGS")
            .env_remove("RUSTFLAGS")
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .env("RUSTC", script(&target, "rustc", &self.words("rustc"), &[])?)
            // rustdoc alone is told to know its unstable options: dependencies would be compiled
            // differently, and twice.
            .env(
                "RUSTDOC",
                script(&target, "rustdoc", &[env, self.words("rustdoc")].concat(), &[])?,
            );
        Ok(command)
    }

    /// Makes cargo build for a target of [`NARROW`], whose standard library is fetched if it must be.
    pub(crate) fn aim(&self, command: &mut Command, target: &str) -> Result<()> {
        command.args(["--target", target]);
        let Source::Debian(_) = self.source else {
            // rustup's compiler names the target that it lacks.
            return Ok(());
        };
        let unit = standard(&Cache::open()?, &self.release, target)?;
        add_library(command, &unit, target);
        Ok(())
    }

    /// Its target directory in the lab's.
    pub(crate) fn target_directory(&self, lab: &Path) -> Result<PathBuf> {
        let directory = lab.join(unit(&self.release));
        fs::create_dir_all(&directory)?;
        Ok(directory)
    }
}

/// Whether the machine's own compiler has the target's standard library.
pub(crate) fn machine_has(target: &str) -> bool {
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(compiler).args(["--print", "sysroot"]).stdin(Stdio::null()).output();
    let Some(output) = output.ok().filter(|output| output.status.success()) else { return false };
    let sysroot = String::from_utf8_lossy(&output.stdout).into_owned();
    let libraries = Path::new(sysroot.trim_end()).join("lib/rustlib").join(target).join("lib");
    let is_standard = |name: &str| name.starts_with("libstd-") && name.ends_with(".rlib");
    fs::read_dir(libraries).is_ok_and(|files| {
        files.flatten().any(|file| is_standard(&file.file_name().to_string_lossy()))
    })
}

/// The words that start a program of a unit for this machine, by the unit's own loader.
pub(crate) fn from_unit(unit: &Path, program: &str) -> Vec<String> {
    let path = |relative: &str| unit.join(relative).display().to_string();
    vec![
        path("usr/lib64/ld-linux-x86-64.so.2"),
        "--library-path".into(),
        path(Arch::X86_64.libraries()),
        path(&format!("usr/bin/{program}")),
    ]
}

/// The words that start a compiler of a unit. It would look for its libraries beside the loader.
pub(crate) fn compiler(unit: &Path, program: &str) -> Vec<String> {
    let mut words = from_unit(unit, program);
    words.extend(["--sysroot".to_owned(), unit.join("usr").display().to_string()]);
    words
}

/// A script that starts a program with words around its arguments: cargo and rustc start files, not
/// command lines.
pub(crate) fn script(
    directory: &Path,
    name: &str,
    before: &[String],
    after: &[String],
) -> Result<PathBuf> {
    let quoted =
        |words: &[String]| words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
    let text = format!("#!/bin/sh\nexec {} \"$@\" {}\n", quoted(before), quoted(after));
    let path = directory.join(name);
    // A script that stays as it is keeps its time, by which cargo knows the compiler.
    if !fs::read_to_string(&path).is_ok_and(|before| before == text) {
        fs::write(&path, text)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    }
    Ok(path)
}

/// The variable by which cargo takes a setting of one target.
pub(crate) fn target_variable(target: &str, setting: &str) -> String {
    format!("CARGO_TARGET_{}_{setting}", target.to_uppercase().replace('-', "_"))
}

/// A word as a shell reads it.
pub(crate) fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The version in the output of `rustc --version`, if it is of the release.
fn version<'t>(text: &'t str, release: &str) -> Option<&'t str> {
    let words = text.strip_prefix("rustc ")?;
    let version = words.split_whitespace().next()?;
    let rest = version.strip_prefix(release)?;
    (rest.is_empty() || rest.starts_with('.')).then(|| &text[.."rustc ".len() + version.len()])
}

/// The programs of a release that rustup has installed.
fn rustup(release: &str) -> Option<PathBuf> {
    let mut command = Command::new("rustup");
    command.args(["which", "--toolchain", release, "rustc"]).env("RUSTUP_AUTO_INSTALL", "0");
    let output = command.stdin(Stdio::null()).output().ok()?;
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim_end());
    let directory = path.parent()?.to_owned();
    let programs = ["cargo", "rustc", "rustdoc"];
    let whole = programs.iter().all(|program| directory.join(program).is_file());
    (output.status.success() && whole).then_some(directory)
}

/// Downloads the toolchain of a release; one that is there only with `refresh`.
pub(crate) fn fetch(cache: &Cache, release: &str, refresh: bool) -> Result<PathBuf> {
    let Some((_, suite)) = RELEASES.iter().find(|(known, _)| *known == release) else {
        bail!(
            "no suite of Debian that the lab knows carries Rust {release}; \
             `rustup toolchain install {release} --profile minimal` brings it"
        );
    };
    let filling = cache.filling()?;
    // Another run may have brought it while this one waited.
    if let (false, Some(directory)) = (refresh, cache.unit(&unit(release))) {
        return Ok(directory);
    }
    let apt = Apt::update(*suite, Arch::X86_64.debian(), &filling.scratch("apt-rust")?)?;
    unpack(&filling, &apt, release).with_context(|| format!("Rust {release}"))
}

fn unpack(filling: &Filling<'_>, apt: &Apt, release: &str) -> Result<PathBuf> {
    let packages: Vec<DebPackage> = apt
        .closure(&["cargo", "rustc", "libc6"])?
        .into_iter()
        .filter(|package| needed(&package.name))
        .collect();
    let files = apt.download(&format!("Rust {release}"), &packages)?;
    filling.add(&unit(release), |unit| {
        for file in &files {
            deb::unpack(file, unit, wanted)?;
            fs::remove_file(file)?;
        }
        Toolchain::new(release, Source::Debian(unit.to_owned()))
            .context("the fetched toolchain")?;
        Ok(packages.iter().map(DebPackage::to_string).collect())
    })
}

/// Lets the compiler find the standard library of a unit. Of cargo's variables with flags only this one does
/// not part them at a space in the path.
fn add_library(command: &mut Command, unit: &Path, target: &str) {
    let libraries = unit.join(format!("usr/lib/rustlib/{target}/lib"));
    command.env("CARGO_ENCODED_RUSTFLAGS", format!("-L{}", libraries.display()));
}

/// The standard library for a target of [`NARROW`], in the version of the toolchain in the cache; fetched if
/// that version is not there.
fn standard(cache: &Cache, release: &str, target: &str) -> Result<PathBuf> {
    let unknown = || format!("the lab knows no package for {target} with Rust {release}");
    let (_, suite) = RELEASES.iter().find(|(known, _)| *known == release).with_context(unknown)?;
    let (_, arch) = NARROW.iter().find(|(known, _)| *known == target).with_context(unknown)?;
    let package = same_version(&cache.sources(&unit(release)))
        .with_context(|| format!("Rust {release} came without {STANDARD}"))?;
    let source = format!("{}:{arch}={}", package.name, package.version);
    let name = format!("{}-{target}", unit(release));
    let present = || cache.unit(&name).filter(|_| cache.sources(&name) == [source.as_str()]);
    if let Some(unit) = present() {
        return Ok(unit);
    }
    let filling = cache.filling()?;
    // Another run may have brought it while this one waited.
    if let Some(unit) = present() {
        return Ok(unit);
    }
    let by_lists = |suite: DebSuite| -> Result<Vec<PathBuf>> {
        let lists = filling.scratch(&format!("apt-rust-{}-{arch}", suite.name()))?;
        let what = format!("Rust's library for {target}");
        Apt::update(suite, arch, &lists)?.download(&what, std::slice::from_ref(&package))
    };
    // A mirror may have lists of rare processors that are older than the signature under one of the names.
    let files = by_lists(*suite).or_else(|error| {
        by_lists(DebSuite::Stable).map_err(|other| {
            error.context(format!(
                "{source} cannot be had by signed lists; if {} has another version now, \
                 `cargo ci fetch --refresh` fetches the compiler of the same version. By the lists of {}: \
                 {other:#}. By the first",
                suite.name(),
                DebSuite::Stable.name()
            ))
        })
    })?;
    filling.add(&name, |unit| {
        for file in &files {
            deb::unpack(file, unit, wanted)?;
            fs::remove_file(file)?;
        }
        Ok(vec![source.clone()])
    })
}

/// The package of the standard library in the version that a toolchain's packages have.
fn same_version(sources: &[String]) -> Option<DebPackage> {
    let versions = sources.iter().filter_map(|package| package.strip_prefix(STANDARD));
    let version = versions.filter_map(|rest| rest.strip_prefix('=')).next()?;
    Some(DebPackage { name: STANDARD.into(), version: version.into() })
}

/// Whether cargo or the compiler loads something of a package. The linker is the machine's.
pub(crate) fn needed(package: &str) -> bool {
    const NEEDLESS: &[&str] = &[
        "binutils",
        "cpp",
        "gcc",
        "libasan",
        "libatomic",
        "libbinutils",
        "libc-dev-bin",
        "libc6-dev",
        "libcc1",
        "libcrypt",
        "libctf",
        "libgcc-1",
        "libgomp",
        "libgprofng",
        "libhwasan",
        "libisl",
        "libitm",
        "libjansson",
        "liblsan",
        "libmpc",
        "libmpfr",
        "libquadmath",
        "libsframe",
        "libtsan",
        "libubsan",
        "linux-libc-dev",
        "openssl-provider",
        "rpcsvc-proto",
    ];
    !NEEDLESS.iter().any(|needless| package.starts_with(needless))
}

/// The compiler's programs and the libraries that they load, and standard libraries.
pub(crate) fn wanted(path: &Path) -> bool {
    const PROGRAMS: [&str; 3] = ["usr/bin/cargo", "usr/bin/rustc", "usr/bin/rustdoc"];
    if PROGRAMS.iter().any(|program| path == Path::new(program)) {
        return true;
    }
    if path.starts_with("usr/lib/rustlib") {
        return !path.starts_with("usr/lib/rustlib/src");
    }
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    let directory = path.parent().unwrap_or(Path::new(""));
    let libraries = ["usr/lib64", "usr/lib/x86_64-linux-gnu"];
    file.contains(".so") && libraries.iter().any(|known| directory == Path::new(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_release_is_not_taken_for_the_oldest() {
        let text = "rustc 1.85.1 (4eb161250 2025-03-15) (built from a source tarball)\n";
        assert_eq!(version(text, "1.85"), Some("rustc 1.85.1"));
        assert_eq!(version("rustc 1.85\n", "1.85"), Some("rustc 1.85"));
        assert_eq!(version(text, "1.8"), None);
        assert_eq!(version("rustc 1.95.0 (f2d3ce0bd 2026-03-21)", "1.85"), None);
        assert_eq!(version("", "1.85"), None);
    }

    #[test]
    fn the_compiler_is_unpacked_without_a_linker() {
        assert!(needed("libllvm19") && needed("libstd-rust-dev") && needed("libgcc-s1"));
        assert!(!needed("libgcc-14-dev") && !needed("libgcc-16-dev"));
        assert!(!needed("gcc-14") && !needed("binutils-x86-64-linux-gnu") && !needed("libc6-dev"));
        assert!(wanted(Path::new("usr/bin/rustdoc")));
        assert!(wanted(Path::new("usr/lib/x86_64-linux-gnu/libLLVM.so.19.1")));
        assert!(wanted(Path::new("usr/lib/rustlib/x86_64-unknown-linux-gnu/lib/libstd.rlib")));
        assert!(!wanted(Path::new("usr/lib/x86_64-linux-gnu/gconv/BIG5.so")));
        assert!(!wanted(Path::new("usr/share/doc/rustc/copyright")));
    }

    #[test]
    fn the_library_of_a_target_has_the_version_of_the_compiler() {
        let sources = ["rustc=1.85.0+dfsg3-1", "libstd-rust-dev=1.85.0+dfsg3-1", "x=2"];
        let package = same_version(&sources.map(str::to_owned)).unwrap();
        assert_eq!(package.to_string(), "libstd-rust-dev=1.85.0+dfsg3-1");
        assert_eq!(same_version(&["libstd-rust-dev-wasm32=1".to_owned()]), None);
    }

    #[test]
    fn a_space_in_the_path_of_the_cache_parts_no_flag() {
        let mut command = Command::new("cargo");
        add_library(&mut command, Path::new("/a b/unit"), "i686-unknown-linux-gnu");
        let set: Vec<_> = command.get_envs().map(|(name, value)| (name, value.unwrap())).collect();
        let flags = "-L/a b/unit/usr/lib/rustlib/i686-unknown-linux-gnu/lib";
        assert_eq!(set, [("CARGO_ENCODED_RUSTFLAGS".as_ref(), flags.as_ref())]);
    }

    #[test]
    fn a_directory_with_any_name_starts_a_program() {
        assert_eq!(quoted("/a b/it's"), r"'/a b/it'\''s'");
    }
}
