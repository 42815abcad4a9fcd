//! Programs for another processor: a compiler that has the target's standard library, and a linker
//! with the C library's files.
//!
//! The machine's own compiler is used if it has the target (`rustup target add`), else Debian's with
//! the standard library of the same version, from the cache. The linker is Debian's in both cases.
//! rustc starts it without a C compiler between them, so the script of the linker names the files
//! that it would add: the start files, libgcc and the C library, for a program at a fixed address. Programs
//! are static, but for one that opens rdma-core's libraries: it is linked with the guest's own.

use crate::arch::Arch;
use crate::packages::apt::{self, Apt, DebPackage, DebSuite};
use crate::packages::cache::{Cache, Filling};
use crate::packages::deb;
use crate::packages::rdma_core;
use crate::packages::toolchain::{self, STANDARD};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The suite of the linker.
pub(crate) const LINKER_SUITE: DebSuite = DebSuite::Trixie;
/// Where to look for the compiler, in this order.
const COMPILER_SUITES: [DebSuite; 3] = [DebSuite::TrixieBackports, DebSuite::Forky, DebSuite::Sid];

/// Packages for this machine that know the other architecture: the linker, and files of the C library
/// and of libgcc that are linked.
const LINKER: [&str; 3] =
    ["binutils-aarch64-linux-gnu", "libc6-dev-arm64-cross", "libgcc-14-dev-arm64-cross"];

/// The linker and compiler of static programs for another architecture.
#[derive(Clone, Debug)]
pub(crate) struct Cross {
    arch: Arch,
    /// The unit of the linker.
    linker: PathBuf,
    /// The unit of the compiler; `None` if it is the machine's own.
    compiler: Option<PathBuf>,
    /// The shared libraries of the guest, if rdma-core's tools are there.
    shared: Option<PathBuf>,
}

/// Where a program has its libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Linking {
    /// In itself.
    Static,
    /// In the guest, which gets them with rdma-core's tools.
    Dynamic,
}

/// The unit of the linker, if it is there.
pub(crate) fn linker(arch: Arch, cache: &Cache) -> Option<PathBuf> {
    cache.unit(&arch.unit("linker"))
}

/// Whether a compiler is there: the machine's own, or Debian's.
pub(crate) fn has_compiler(arch: Arch, cache: &Cache) -> bool {
    toolchain::machine_has(arch.target()) || cache.unit(&arch.unit("rust")).is_some()
}

impl Cross {
    /// The linker and compiler for an architecture, from the machine and the cache.
    pub(crate) fn find(arch: Arch, cache: &Cache) -> Result<Self> {
        let linker = linker(arch, cache).context("the linker has gone from the cache")?;
        let compiler = match toolchain::machine_has(arch.target()) {
            true => None,
            false => Some(cache.unit(&arch.unit("rust")).context("Rust has gone from the cache")?),
        };
        let shared = rdma_core::peers(arch, cache).map(|unit| unit.join(arch.libraries()));
        Ok(Self { arch, linker, compiler, shared })
    }

    /// The architecture that it builds for.
    pub(crate) fn arch(&self) -> Arch {
        self.arch
    }

    /// Makes cargo build with it; `directory` gets the scripts that cargo and rustc start.
    pub(crate) fn configure(
        &self,
        command: &mut Command,
        directory: &Path,
        linking: Linking,
    ) -> Result<()> {
        fs::create_dir_all(directory)?;
        let (before, after) = match linking {
            Linking::Static => self.linker_words(&[], &STATIC)?,
            Linking::Dynamic => self.dynamic_words(&directory.join("shared"))?,
        };
        let linker = toolchain::script(directory, "ld", &before, &after)?;
        let libraries = if linking == Linking::Static { "+" } else { "-" };
        let flags = [
            &format!("-Ctarget-feature={libraries}crt-static"),
            "-Crelocation-model=static",
            "-Clinker-flavor=ld",
            // glibc's static library warns of functions that load others, of which no program here calls one.
            "-Alinker-messages",
        ];
        command
            .env(toolchain::target_variable(self.arch.target(), "LINKER"), linker)
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
        if let Some(unit) = &self.compiler {
            let words = toolchain::compiler(unit, "rustc");
            command
                .env("RUSTC", toolchain::script(directory, "rustc", &words, &[])?)
                .env_remove("RUSTUP_TOOLCHAIN")
                .env_remove("RUSTC_WRAPPER")
                .env_remove("RUSTC_WORKSPACE_WRAPPER");
        }
        Ok(())
    }

    /// The words before and after the linker's arguments, with these libraries, which it looks for in
    /// `directories` first.
    fn linker_words(
        &self,
        directories: &[&Path],
        libraries: &[&str],
    ) -> Result<(Vec<String>, Vec<String>)> {
        let library = self.linker.join(C_LIBRARY);
        let compiler = compiler_files(&self.linker)?;
        let path = |directory: &Path, file: &str| directory.join(file).display().to_string();
        let mut before = toolchain::from_unit(&self.linker, LD);
        // A file of the C library is a script that names others from the root.
        before.push(format!("--sysroot={}", self.linker.display()));
        before.extend([path(&library, "crt1.o"), path(&library, "crti.o")]);
        before.push(path(&compiler, "crtbeginT.o"));
        for directory in directories.iter().chain(&[&*library, &*compiler]) {
            before.push(format!("-L{}", directory.display()));
        }
        let mut after: Vec<String> = libraries.iter().map(|word| (*word).to_owned()).collect();
        after.extend([path(&compiler, "crtend.o"), path(&library, "crtn.o")]);
        Ok((before, after))
    }

    /// The same for a program that loads the guest's libraries. `directory` gets files by which the linker
    /// finds these under the names that it looks for.
    fn dynamic_words(&self, directory: &Path) -> Result<(Vec<String>, Vec<String>)> {
        let shared =
            self.shared.as_deref().context("no shared libraries of the guest are there")?;
        fs::create_dir_all(directory)?;
        let rest = self.linker.join(C_LIBRARY).join("libc_nonshared.a");
        for (name, version) in [("c", "6"), ("m", "6"), ("gcc_s", "1")] {
            let library = shared.join(format!("lib{name}.so.{version}"));
            let mut files = format!("\"{}\"", library.display());
            if name == "c" {
                // The loader has a part of the C library.
                let loader = shared.join("ld-linux-aarch64.so.1");
                files += &format!(" \"{}\" AS_NEEDED ( \"{}\" )", rest.display(), loader.display());
            }
            fs::write(directory.join(format!("lib{name}.so")), format!("GROUP ( {files} )\n"))?;
        }
        let (mut before, after) = self.linker_words(&[directory], &DYNAMIC)?;
        let shared = shared.display().to_string();
        before.extend(["-dynamic-linker", LOADER, "-rpath-link", &shared].map(str::to_owned));
        Ok((before, after))
    }
}

const STATIC: [&str; 6] = ["-Bstatic", "--start-group", "-lgcc", "-lgcc_eh", "-lc", "--end-group"];
const DYNAMIC: [&str; 6] = ["-Bdynamic", "--start-group", "-lgcc", "-lgcc_s", "-lc", "--end-group"];
/// The guest's loader of dynamic programs.
const LOADER: &str = "/lib/ld-linux-aarch64.so.1";

const LD: &str = "aarch64-linux-gnu-ld.bfd";
/// Where the linker's unit has the C library.
const C_LIBRARY: &str = "usr/aarch64-linux-gnu/lib";
/// Where it has a directory with the files of each version of gcc.
const COMPILERS: &str = "usr/lib/gcc-cross/aarch64-linux-gnu";

/// The directory of libgcc.
fn compiler_files(unit: &Path) -> Result<PathBuf> {
    let versions =
        fs::read_dir(unit.join(COMPILERS)).with_context(|| format!("list {COMPILERS}"))?;
    let mut found = versions.flatten().map(|entry| entry.path());
    found.find(|path| path.join("libgcc.a").is_file()).context("no libgcc in the linker's unit")
}

/// Downloads the linker, by the lists of this machine's architecture.
pub(crate) fn fetch_linker(arch: Arch, filling: &Filling<'_>, apt: &Apt) -> Result<()> {
    let mut wanted = LINKER.to_vec();
    wanted.push("libc6");
    let packages: Vec<DebPackage> = apt
        .closure(&wanted)?
        .into_iter()
        .filter(|package| {
            LINKER.contains(&package.name.as_str()) || !package.name.ends_with("-cross")
        })
        .collect();
    let files = apt.download(&format!("linker for {}", arch.label()), &packages)?;
    filling.add(&arch.unit("linker"), |unit| {
        for file in &files {
            deb::unpack(file, unit, is_of_linker)?;
            fs::remove_file(file)?;
        }
        runs(&toolchain::from_unit(unit, LD)).context("the fetched linker")?;
        for file in ["crt1.o", "libc.a"] {
            if !unit.join(C_LIBRARY).join(file).is_file() {
                bail!("{file} is not in the packages");
            }
        }
        compiler_files(unit)?;
        Ok(packages.iter().map(DebPackage::to_string).collect())
    })?;
    Ok(())
}

/// Downloads Debian's compiler by the lists of this machine's architecture, and the standard library of
/// the same version by those of the other, from the first suite that has both: Debian builds a new version
/// for one architecture days before the other.
pub(crate) fn fetch_compiler(arch: Arch, filling: &Filling<'_>) -> Result<()> {
    let mut differences = Vec::new();
    for suite in COMPILER_SUITES {
        let [here, there] = [Arch::X86_64, arch].map(|of| {
            let lists = filling.scratch(&apt::lists_directory(suite, of))?;
            Apt::update(suite, of.debian(), &lists)
        });
        let (here, there) = (here?, there?);
        let packages: Vec<DebPackage> = here
            .closure(&["rustc", "libc6"])?
            .into_iter()
            .filter(|package| toolchain::needed(&package.name))
            .collect();
        let same = packages.iter().find(|package| package.name == STANDARD);
        let standard = same.with_context(|| format!("rustc comes without {STANDARD}"))?;
        let others = there.listed(STANDARD)?;
        if others.contains(standard) {
            return unpack_compiler(arch, filling, (&here, &packages), (&there, standard));
        }
        let other = others.iter().find(|package| package.name == STANDARD);
        let other = other.map_or("none", |package| &package.version);
        differences.push(format!(
            "{} has {standard} for {} and {other} for {}",
            suite.name(),
            Arch::X86_64.debian(),
            arch.debian()
        ));
    }
    bail!("{}; `rustup target add {}` brings it as well", differences.join("; "), arch.target())
}

/// Downloads the packages of the compiler, and the library with the other architecture's lists.
fn unpack_compiler(
    arch: Arch,
    filling: &Filling<'_>,
    (here, packages): (&Apt, &[DebPackage]),
    (there, standard): (&Apt, &DebPackage),
) -> Result<()> {
    let files = here.download("Rust", packages)?;
    let what = format!("Rust's library for {}", arch.label());
    let library = there.download(&what, std::slice::from_ref(standard))?;
    filling.add(&arch.unit("rust"), |unit| {
        for file in files.iter().chain(&library) {
            deb::unpack(file, unit, toolchain::wanted)?;
            fs::remove_file(file)?;
        }
        runs(&toolchain::compiler(unit, "rustc")).context("the fetched compiler")?;
        let mut sources: Vec<String> = packages.iter().map(DebPackage::to_string).collect();
        sources.push(format!("{standard} ({})", arch.debian()));
        Ok(sources)
    })?;
    Ok(())
}

/// Fails unless a program tells its version.
fn runs(words: &[String]) -> Result<()> {
    let output =
        Command::new(&words[0]).args(&words[1..]).arg("--version").stdin(Stdio::null()).output()?;
    if !output.status.success() {
        bail!("--version: {} {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// The linker and a disassembler with their libraries, and the files that are linked.
fn is_of_linker(path: &Path) -> bool {
    const PROGRAMS: [&str; 2] =
        ["usr/bin/aarch64-linux-gnu-ld.bfd", "usr/bin/aarch64-linux-gnu-objdump"];
    const OF_COMPILER: [&str; 4] = ["crtbeginT.o", "crtend.o", "libgcc.a", "libgcc_eh.a"];
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    let directory = path.parent().unwrap_or(Path::new(""));
    if path.starts_with(C_LIBRARY) {
        return file.ends_with(".o") || file.ends_with(".a");
    }
    if path.starts_with(COMPILERS) {
        return OF_COMPILER.contains(&&*file);
    }
    let libraries = ["usr/lib64", Arch::X86_64.libraries()];
    PROGRAMS.iter().any(|program| path == Path::new(program))
        || (file.contains(".so") && libraries.iter().any(|known| directory == Path::new(known)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_linker_is_unpacked_with_what_it_links() {
        let wanted = |path: &str| is_of_linker(Path::new(path));
        assert!(wanted("usr/bin/aarch64-linux-gnu-ld.bfd"));
        assert!(wanted("usr/lib/x86_64-linux-gnu/libbfd-2.44-arm64.so"));
        assert!(wanted("usr/aarch64-linux-gnu/lib/crt1.o"));
        assert!(wanted("usr/lib/gcc-cross/aarch64-linux-gnu/14/libgcc_eh.a"));
        assert!(!wanted("usr/lib/gcc-cross/aarch64-linux-gnu/14/libgcov.a"));
        assert!(!wanted("usr/aarch64-linux-gnu/include/stdio.h"));
        assert!(!wanted("usr/bin/aarch64-linux-gnu-as"));
    }

    #[test]
    fn a_script_puts_arguments_between_start_and_end_files() {
        let directory = std::env::temp_dir().join(format!("lab-script-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let words =
            |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let path =
            toolchain::script(&directory, "echo", &words(&["echo", "a b"]), &words(&["it's"]))
                .unwrap();
        let output = Command::new(path).args(["one", "t w o"]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "a b one t w o it's\n");
        fs::remove_dir_all(&directory).unwrap();
    }
}
