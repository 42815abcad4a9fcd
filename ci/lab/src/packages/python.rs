//! Python with rdma-core's bindings and the tests that come with them, for the guest.
//!
//! Debian ships the tests as documentation of `python3-pyverbs`. They are laid over the guest's
//! root beside the peers, whose libraries they use; `pyverbs.rs` runs them.

use crate::arch::Arch;
use crate::packages::apt::{Apt, DebPackage};
use crate::packages::cache::{Cache, Filling};
use crate::packages::deb;
use anyhow::{Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

const UNIT: &str = "python";

/// Where the tests lie in the guest, some of them compressed.
pub(crate) const TESTS: &str = "/usr/share/doc/rdma-core/tests";

/// The bindings, and the library that some of their tests build packets with.
const PACKAGES: &[&str] = &["python3-pyverbs", "python3-scapy"];

/// Libraries that Python's modules load and the peers do not bring.
const LIBRARIES: &[&str] = &["libbz2-1.0", "libexpat1", "libffi8", "liblzma5", "libuuid1"];

/// Parts of the standard library that nothing here imports.
const UNUSED: &[&str] =
    &["ensurepip", "idlelib", "lib2to3", "pydoc_data", "sqlite3", "tkinter", "turtledemo"];

/// The directory with Python, laid over the guest's root.
pub(crate) fn python(arch: Arch, cache: &Cache) -> Option<PathBuf> {
    cache.unit(&arch.unit(UNIT))
}

/// Downloads Python, the bindings and their tests.
pub(crate) fn fetch(arch: Arch, filling: &Filling<'_>, apt: &Apt) -> Result<()> {
    let packages: Vec<DebPackage> = apt
        .closure(PACKAGES)?
        .into_iter()
        .filter(|package| {
            let name = package.name.as_str();
            name.starts_with("python3")
                || name.starts_with("libpython3")
                || LIBRARIES.contains(&name)
        })
        .collect();
    let files = apt.download("Python", &packages)?;
    filling.add(&arch.unit(UNIT), |unit| {
        for file in &files {
            deb::unpack(file, unit, |path| wanted(arch, path))?;
            fs::remove_file(file)?;
        }
        for path in ["usr/bin/python3", &TESTS[1..]] {
            if !unit.join(path).exists() {
                bail!("/{path} is not in the packages");
            }
        }
        Ok(packages.iter().map(DebPackage::to_string).collect())
    })?;
    Ok(())
}

/// Interpreter, modules and tests, without the modules that come for people.
fn wanted(arch: Arch, path: &Path) -> bool {
    let text = path.to_string_lossy();
    // Under `usr/lib/python3.13` for one; its version is the suite's.
    let module = text.strip_prefix("usr/lib/python3").is_some_and(|below| {
        let part = below.split('/').nth(1).unwrap_or_default();
        !UNUSED.contains(&part)
    });
    let library = path.starts_with(arch.libraries()) && text.contains(".so");
    let program = path.starts_with("usr/bin") && text.contains("python3");
    library || module || program || path.starts_with(&TESTS[1..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_the_tests_need_are_kept() {
        let wanted = |path: &Path| wanted(Arch::X86_64, path);
        assert!(wanted(Path::new("usr/bin/python3.13")));
        assert!(wanted(Path::new("usr/lib/python3.13/unittest/case.py")));
        assert!(wanted(Path::new("usr/lib/python3/dist-packages/pyverbs/__init__.py")));
        assert!(wanted(Path::new("usr/lib/x86_64-linux-gnu/libexpat.so.1")));
        assert!(wanted(Path::new("usr/share/doc/rdma-core/tests/test_cq.py.gz")));
        assert!(!wanted(Path::new("usr/lib/python3.13/pydoc_data/topics.py")));
        assert!(!wanted(Path::new("usr/share/doc/libffi8/copyright")));
    }
}
