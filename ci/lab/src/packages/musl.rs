//! Static programs with musl for a C library, for this machine's processor.
//!
//! The machine's own compiler builds them if it has the target (`rustup target add x86_64-unknown-linux-musl`).
//! Else Debian's does, from the cache: cargo then builds the standard library from Debian's sources of it, and
//! the machine's `cc` links with Debian's musl. No C is compiled: LLVM's library as Debian has it
//! unwinds the stack; it was compiled for glibc and needs two functions that musl has not; the machine's `crtend.o`
//! ends its table of frames.

use crate::packages::apt::{Apt, DebPackage, DebSuite};
use crate::packages::cache::{Cache, Filling};
use crate::packages::deb;
use crate::packages::toolchain;
use anyhow::{Context, Result, bail};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// As Rust's compiler spells it.
pub(crate) const TARGET: &str = "x86_64-unknown-linux-musl";
/// The suite of the parts; it includes the suite that it is a backport for.
pub(crate) const SUITE: DebSuite = DebSuite::TrixieBackports;

const UNIT: &str = "rust-musl";
const PACKAGES: [&str; 5] = ["rustc", "rust-src", "musl-dev", "libunwind-19-dev", "libc6"];
/// The unit's directories of the C library and of the unwinder.
const C_LIBRARY: &str = "usr/lib/x86_64-linux-musl";
const UNWIND: &str = "usr/lib/llvm-19/lib";
/// Where Debian has sources of the standard library, in a directory of the version; and where the compiler
/// looks for them.
const SOURCES: &str = "usr/src";
const EXPECTED: &str = "usr/lib/rustlib/src/rust";

/// The compiler and linker for such programs.
#[derive(Clone, Debug)]
pub(crate) struct Musl {
    /// `None` if it is the machine's own compiler.
    unit: Option<PathBuf>,
}

/// Whether a compiler is there: the machine's own, or Debian's.
pub(crate) fn is_here(cache: &Cache) -> bool {
    toolchain::machine_has(TARGET) || cache.unit(UNIT).is_some()
}

impl Musl {
    /// The compiler and linker, from the machine or the cache.
    pub(crate) fn find(cache: &Cache) -> Result<Self> {
        if toolchain::machine_has(TARGET) {
            return Ok(Self { unit: None });
        }
        let unit = cache.unit(UNIT).context("Rust for musl has gone from the cache")?;
        Ok(Self { unit: Some(unit) })
    }

    /// Makes cargo build with it; `directory` gets the scripts that cargo and rustc start.
    pub(crate) fn configure(&self, command: &mut Command, directory: &Path) -> Result<()> {
        let Some(unit) = &self.unit else { return Ok(()) };
        fs::create_dir_all(directory)?;
        let compiler = toolchain::compiler(unit, "rustc");
        // The name tells rustc how to speak to it.
        let linker =
            toolchain::script(directory, "cc", &before(unit), &after(unit, &end_of_frames()?))?;
        let flags = [
            "-Ctarget-feature=+crt-static",
            "-Crelocation-model=static",
            // Debian has no start files among the compiler's own.
            "-Clink-self-contained=no",
        ];
        command
            .arg("-Zbuild-std=std,panic_unwind,test")
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTC", toolchain::script(directory, "rustc", &compiler, &[])?)
            .env(toolchain::target_variable(TARGET, "LINKER"), linker)
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
            .env_remove("RUSTUP_TOOLCHAIN")
            .env_remove("RUSTC_WRAPPER")
            .env_remove("RUSTC_WORKSPACE_WRAPPER");
        Ok(())
    }
}

/// The linker's words before its arguments.
fn before(unit: &Path) -> Vec<String> {
    let library = unit.join(C_LIBRARY);
    let path = |file: &str| library.join(file).display().to_string();
    let mut words: Vec<String> =
        ["cc", "-nostartfiles", "-nodefaultlibs", "-static", "-no-pie"].map(str::to_owned).into();
    words.extend([path("crt1.o"), path("crti.o")]);
    words.extend([&library, &unit.join(UNWIND)].map(|from| format!("-L{}", from.display())));
    words
}

/// The machine's `crtend.o`, which holds the zero entry that ends `.eh_frame`. Without it, LLVM's library reads past
/// the table when it looks up a function of musl that has no entry.
fn end_of_frames() -> Result<String> {
    let output = Command::new("cc").arg("-print-file-name=crtend.o").output();
    let output = output.context("ask cc where crtend.o is")?;
    let path = String::from_utf8(output.stdout).context("cc: the path of crtend.o")?;
    let path = path.trim();
    // A compiler that has none answers the bare name.
    if !output.status.success() || !Path::new(path).is_absolute() || !Path::new(path).is_file() {
        bail!("cc has no crtend.o: it answers {path:?}");
    }
    Ok(path.to_owned())
}

/// The linker's words behind its arguments.
fn after(unit: &Path, end_of_frames: &str) -> Vec<String> {
    // glibc's checked forms of functions, by which LLVM's library says why it aborts.
    let missing = ["__vfprintf_chk", "__vsnprintf_chk"];
    let mut words: Vec<String> =
        missing.iter().map(|name| format!("-Wl,--defsym={name}=abort")).collect();
    let libraries = ["-Wl,--start-group", "-lunwind", "-lgcc", "-lc", "-Wl,--end-group"];
    words.extend(libraries.map(str::to_owned));
    words.push(end_of_frames.to_owned());
    words.push(unit.join(C_LIBRARY).join("crtn.o").display().to_string());
    words
}

/// Downloads Debian's compiler, the sources of its standard library, and musl.
pub(crate) fn fetch(filling: &Filling<'_>, apt: &Apt) -> Result<()> {
    let packages: Vec<DebPackage> = apt
        .closure(&PACKAGES)?
        .into_iter()
        .filter(|package| toolchain::needed(&package.name))
        .collect();
    let files = apt.download("Rust with musl", &packages)?;
    filling.add(UNIT, |unit| {
        for file in &files {
            deb::unpack(file, unit, wanted)?;
            fs::remove_file(file)?;
        }
        let sources = sources(unit)?;
        let link = unit.join(EXPECTED);
        fs::create_dir_all(link.parent().unwrap_or(unit))?;
        symlink(Path::new("../../..").join("src").join(sources), &link)?;
        for file in ["crt1.o", "libc.a"] {
            if !unit.join(C_LIBRARY).join(file).is_file() {
                bail!("{file} is not in the packages");
            }
        }
        Ok(packages.iter().map(DebPackage::to_string).collect())
    })?;
    Ok(())
}

/// The directory of the sources, which has the version in its name.
fn sources(unit: &Path) -> Result<PathBuf> {
    let mut found = fs::read_dir(unit.join(SOURCES)).with_context(|| format!("list {SOURCES}"))?;
    let first = found.next().context("no sources of the standard library")??;
    Ok(first.file_name().into())
}

/// The compiler with its libraries, the sources of the standard library, and the files that are linked.
fn wanted(path: &Path) -> bool {
    let is_linked = |directory: &str| {
        path.parent() == Some(Path::new(directory))
            && path.extension().is_some_and(|extension| extension == "o" || extension == "a")
    };
    let of_library = path.strip_prefix(SOURCES).is_ok_and(|inside| {
        inside.components().nth(1).is_some_and(|part| part.as_os_str() == "library")
    });
    toolchain::wanted(path) || of_library || is_linked(C_LIBRARY) || is_linked(UNWIND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_frames_ends_behind_all_libraries() {
        let words = after(Path::new("/unit"), "/gcc/crtend.o");
        let last = words.len() - 2;
        assert_eq!(words[last - 1], "-Wl,--end-group");
        assert_eq!(words[last], "/gcc/crtend.o");
        assert!(words[last + 1].ends_with("/crtn.o"));
    }

    #[test]
    fn the_sources_of_the_standard_library_are_unpacked_with_what_is_linked() {
        let wanted = |path: &str| wanted(Path::new(path));
        assert!(wanted("usr/src/rustc-1.96.1/library/std/src/lib.rs"));
        assert!(wanted("usr/lib/x86_64-linux-musl/crt1.o"));
        assert!(wanted("usr/lib/llvm-19/lib/libunwind.a"));
        assert!(wanted("usr/bin/rustc"));
        assert!(!wanted("usr/src/rustc-1.96.1/compiler/rustc/src/main.rs"));
        assert!(!wanted("usr/include/x86_64-linux-musl/stdio.h"));
        assert!(!wanted("usr/lib/llvm-19/lib/libunwind.so"));
    }
}
