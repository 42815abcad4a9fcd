//! The guest's shell: Debian's static busybox.

use crate::arch::Arch;
use crate::packages::apt::{Apt, DebPackage};
use crate::packages::cache::{Cache, Filling};
use crate::packages::deb;
use anyhow::{Context, Result, bail};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

const UNIT: &str = "shell";

/// Names a static busybox to use where none can be fetched.
pub(crate) const OWN: &str = "UVERBS_LAB_BUSYBOX";

/// The directory with the shell, laid over the guest's root, if it is there.
pub(crate) fn shell(arch: Arch, cache: &Cache) -> Result<Option<PathBuf>> {
    let own = std::env::var_os(OWN).filter(|value| !value.is_empty() && arch.is_host());
    let Some(own) = own else { return Ok(cache.unit(&arch.unit(UNIT))) };
    let own = PathBuf::from(own);
    let unit = cache.unit_of_file("own-shell", &own, |unit| {
        fs::create_dir_all(unit.join("usr/bin"))?;
        let program = unit.join("usr/bin/busybox");
        fs::copy(&own, &program)?;
        name_programs(unit, &program)
    });
    unit.map(Some).context(OWN)
}

/// Downloads the shell.
pub(crate) fn fetch(arch: Arch, filling: &Filling<'_>, apt: &Apt) -> Result<()> {
    // Static, so one for this machine runs here and can list its programs itself. That of another
    // processor is the same release, and has the same.
    let lister = match arch.is_host() {
        true => None,
        false => Some(filling.cache().unit(UNIT).context("this machine's shell is not there")?),
    };

    let packages: Vec<DebPackage> = apt
        .closure(&["busybox-static"])?
        .into_iter()
        .filter(|package| package.name == "busybox-static")
        .collect();
    let files = apt.download("shell", &packages)?;
    filling.add(&arch.unit(UNIT), |unit| {
        for file in &files {
            deb::unpack(file, unit, |path| path == Path::new("usr/bin/busybox"))?;
            fs::remove_file(file)?;
        }
        name_programs(unit, &lister.as_deref().unwrap_or(unit).join("usr/bin/busybox"))?;
        Ok(packages.iter().map(DebPackage::to_string).collect())
    })?;
    Ok(())
}

/// Gives a unit's busybox the names that `lister` tells.
fn name_programs(unit: &Path, lister: &Path) -> Result<()> {
    let list = Command::new(lister).arg("--list").output().context("run the guest's busybox")?;
    let names = String::from_utf8_lossy(&list.stdout).into_owned();
    if !list.status.success() || !names.lines().any(|name| name == "sh") {
        bail!("the guest's busybox lists no shell ({})", list.status);
    }
    // PID 1 and `modprobe` are the lab's own.
    for name in names.lines().filter(|name| !["busybox", "modprobe", "init"].contains(name)) {
        symlink("busybox", unit.join("usr/bin").join(name))?;
    }
    Ok(())
}
