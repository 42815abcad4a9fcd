//! rdma-core's tools for the guest, and its libraries of the next Debian.
//!
//! The tools are the other side of a connection; this project neither links them nor copies from
//! them.

use crate::arch::Arch;
use crate::packages::apt::{Apt, DebPackage};
use crate::packages::cache::{Cache, Filling};
use crate::packages::deb;
use anyhow::{Result, bail};
use std::fs;
use std::path::PathBuf;

const PEERS_UNIT: &str = "peers";

/// Packages whose programs `--peers` adds.
const PEERS: &[&str] =
    &["ibverbs-utils", "ibverbs-providers", "perftest", "rdmacm-utils", "iproute2"];

const NEWER_UNIT: &str = "newer";

/// Libraries of the next Debian beside the peers: a release of rdma-core with functions that the
/// peers' release lacks. They run with the peers' other libraries.
const NEWER: &[&str] = &["libibverbs1", "ibverbs-providers"];

/// Its path in the guest, which only programs that name it use.
const NEWER_ROOT: &str = "opt/rdma-core";

/// The directory with rdma-core's tools, laid over the guest's root.
pub(crate) fn peers(arch: Arch, cache: &Cache) -> Option<PathBuf> {
    cache.unit(&arch.unit(PEERS_UNIT))
}

/// The directory with rdma-core's libraries of the next Debian, laid over the guest's root.
pub(crate) fn newer(arch: Arch, cache: &Cache) -> Option<PathBuf> {
    cache.unit(&arch.unit(NEWER_UNIT))
}

/// Downloads rdma-core's libraries of the next Debian.
pub(crate) fn fetch_newer(arch: Arch, filling: &Filling<'_>, apt: &Apt) -> Result<()> {
    let packages: Vec<DebPackage> = apt
        .closure(NEWER)?
        .into_iter()
        .filter(|package| NEWER.contains(&package.name.as_str()))
        .collect();
    let files = apt.download("rdma-core's newer libraries", &packages)?;
    filling.add(&arch.unit(NEWER_UNIT), |unit| {
        let root = unit.join(NEWER_ROOT);
        for file in &files {
            deb::unpack(file, &root, |path| path.to_string_lossy().contains(".so"))?;
            fs::remove_file(file)?;
        }
        for library in ["libibverbs.so.1", "libmlx5.so.1"] {
            if !root.join(arch.libraries()).join(library).exists() {
                bail!("{library} is not in the packages");
            }
        }
        Ok(packages.iter().map(DebPackage::to_string).collect())
    })?;
    Ok(())
}

/// Downloads rdma-core's tools with their libraries.
pub(crate) fn fetch_peers(arch: Arch, filling: &Filling<'_>, apt: &Apt) -> Result<()> {
    // Needed to install, not to run.
    const NEEDLESS: &[&str] = &[
        "adduser",
        "base-passwd",
        "debconf",
        "libpam-modules",
        "libpam-modules-bin",
        "login.defs",
        "passwd",
        "libcap2-bin",
        "pci.ids",
        "gcc-14-base",
    ];
    let packages: Vec<DebPackage> = apt
        .closure(PEERS)?
        .into_iter()
        .filter(|package| !NEEDLESS.contains(&package.name.as_str()))
        .collect();
    let files = apt.download("rdma-core's tools", &packages)?;
    filling.add(&arch.unit(PEERS_UNIT), |unit| {
        for file in &files {
            let package = deb::package_name(file);
            let chosen = PEERS.iter().any(|name| package == *name);
            deb::unpack(file, unit, |path| {
                let library = (path.starts_with("usr/lib64")
                    || path.starts_with("usr/lib/ld-linux-aarch64.so.1")
                    || path.starts_with(arch.libraries()))
                    && path.to_string_lossy().contains(".so")
                    && !path.to_string_lossy().contains("/gconv/")
                    && !path.to_string_lossy().contains("/ossl-modules/");
                let program =
                    chosen && (path.starts_with("usr/bin") || path.starts_with("usr/sbin"));
                let configuration = path.starts_with("etc/libibverbs.d");
                library || program || configuration
            })?;
            fs::remove_file(file)?;
        }
        // iproute2's package is there for `rdma`; some of its siblings need more libraries.
        for program in ["usr/bin/ibv_devinfo", "usr/bin/ibv_rc_pingpong", "usr/bin/rping"] {
            if !unit.join(program).is_file() {
                bail!("{program} is not in the packages");
            }
        }
        Ok(packages.iter().map(DebPackage::to_string).collect())
    })?;
    Ok(())
}
