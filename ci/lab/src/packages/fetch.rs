//! `cargo ci fetch`: downloads into the cache whatever is missing.
//!
//! Every command that boots a guest calls this first, for its own needs only.

use crate::arch::Arch;
use crate::packages::apt::{self, Apt, DebSuite};
use crate::packages::busybox;
use crate::packages::cache::{Cache, Filling};
use crate::packages::cross;
use crate::packages::kernel::{self, Kernel, KernelName};
use crate::packages::musl;
use crate::packages::python;
use crate::packages::qemu::{self, Qemu};
use crate::packages::rdma_core;
use anyhow::{Context, Result, bail};

/// The downloads that a command needs.
#[derive(Clone, Debug)]
pub(crate) struct Needs {
    /// The guests' processors.
    pub(crate) arch: Arch,
    /// Kernels to boot.
    pub(crate) kernels: Vec<KernelName>,
    /// rdma-core's tools as well.
    pub(crate) peers: bool,
    /// Python with rdma-core's bindings and their tests as well, and rdma-core's libraries of the
    /// next Debian.
    pub(crate) python: bool,
}

impl Needs {
    /// Everything there is for an architecture.
    pub(crate) fn all(arch: Arch) -> Self {
        Self { arch, kernels: KernelName::ALL.to_vec(), peers: true, python: true }
    }

    /// Kernels, with QEMU and a shell.
    pub(crate) fn kernels(arch: Arch, kernels: &[KernelName]) -> Self {
        Self { arch, kernels: kernels.to_vec(), peers: false, python: false }
    }

    /// The parts, each before those that need it.
    fn items(&self) -> Vec<Item> {
        let arch = self.arch;
        let kernels = self.kernels.iter().map(|name| Item::Kernel(*name, arch));
        let mut items: Vec<Item> = kernels.collect();
        items.push(Item::Qemu(arch));
        if !arch.is_host() {
            // Its programs tell their names only on this machine.
            items.push(Item::Shell(Arch::default()));
            items.extend([Item::Linker(arch), Item::Compiler(arch)]);
        }
        items.push(Item::Shell(arch));
        if self.peers {
            items.push(Item::Peers(arch));
        }
        if self.python {
            items.extend([Item::Python(arch), Item::Newer(arch)]);
        }
        items
    }
}

/// One thing to fetch.
#[derive(Clone, Copy, Debug)]
enum Item {
    Kernel(KernelName, Arch),
    Qemu(Arch),
    Shell(Arch),
    Peers(Arch),
    Python(Arch),
    Newer(Arch),
    Linker(Arch),
    Compiler(Arch),
    Musl,
}

impl Item {
    /// The suite that it comes from, unless that is searched for.
    fn suite(self) -> Option<DebSuite> {
        match self {
            Item::Kernel(name, _) => name.suite(),
            Item::Qemu(_) => Some(DebSuite::TrixieBackports),
            Item::Shell(_) | Item::Peers(_) | Item::Python(_) => Some(DebSuite::Trixie),
            Item::Newer(_) => Some(DebSuite::Forky),
            Item::Linker(_) => Some(cross::LINKER_SUITE),
            Item::Compiler(_) => None,
            Item::Musl => Some(musl::SUITE),
        }
    }

    /// The architecture by whose lists it comes: that of the guest, or of this machine for programs that
    /// run here.
    fn lists(self) -> Arch {
        match self {
            Item::Kernel(_, arch)
            | Item::Shell(arch)
            | Item::Peers(arch)
            | Item::Python(arch)
            | Item::Newer(arch) => arch,
            Item::Qemu(_) | Item::Linker(_) | Item::Compiler(_) | Item::Musl => Arch::default(),
        }
    }

    fn present(self, cache: &Cache) -> Result<bool> {
        Ok(match self {
            Item::Kernel(name, arch) => Kernel::find(name, arch, cache)?.is_some(),
            Item::Qemu(arch) => Qemu::find(arch, cache)?.is_some(),
            Item::Shell(arch) => busybox::shell(arch, cache)?.is_some(),
            Item::Peers(arch) => rdma_core::peers(arch, cache).is_some(),
            Item::Python(arch) => python::python(arch, cache).is_some(),
            Item::Newer(arch) => rdma_core::newer(arch, cache).is_some(),
            Item::Linker(arch) => cross::linker(arch, cache).is_some(),
            Item::Compiler(arch) => cross::has_compiler(arch, cache),
            Item::Musl => musl::is_here(cache),
        })
    }

    fn fetch(self, filling: &Filling<'_>, apt: &Apt) -> Result<()> {
        match self {
            Item::Kernel(name, arch) => kernel::fetch(name, arch, filling, apt)
                .with_context(|| format!("kernel {}", name.label())),
            Item::Qemu(arch) => qemu::fetch(arch, filling, apt).context("QEMU"),
            Item::Shell(arch) => busybox::fetch(arch, filling, apt).context("the guest's shell"),
            Item::Peers(arch) => {
                rdma_core::fetch_peers(arch, filling, apt).context("rdma-core's tools")
            }
            Item::Python(arch) => python::fetch(arch, filling, apt).context("Python"),
            Item::Newer(arch) => {
                rdma_core::fetch_newer(arch, filling, apt).context("newer libraries")
            }
            Item::Linker(arch) => cross::fetch_linker(arch, filling, apt).context("the linker"),
            Item::Compiler(arch) => bail!("Rust for {} is in no one suite", arch.label()),
            Item::Musl => musl::fetch(filling, apt).context("Rust for musl"),
        }
    }

    /// Fetches what has no one suite, from the first that carries it.
    fn search(self, filling: &Filling<'_>) -> Result<()> {
        match self {
            Item::Kernel(name, arch) => {
                kernel::search(name, arch, filling).with_context(|| format!("kernel {name}"))
            }
            Item::Compiler(arch) => {
                cross::fetch_compiler(arch, filling).context("Rust for another processor")
            }
            _ => bail!("{self:?} is of one suite"),
        }
    }
}

/// Fetches missing units, or everything anew with `refresh`.
pub(crate) fn fetch(cache: &Cache, needs: &Needs, refresh: bool) -> Result<()> {
    fetch_items(cache, &needs.items(), refresh)
}

/// Fetches the linker and compiler for another architecture.
pub(crate) fn compilers(cache: &Cache, arch: Arch) -> Result<()> {
    fetch_items(cache, &[Item::Linker(arch), Item::Compiler(arch)], false)
}

/// Fetches the compiler for programs with musl.
pub(crate) fn musl(cache: &Cache) -> Result<()> {
    fetch_items(cache, &[Item::Musl], false)
}

fn fetch_items(cache: &Cache, items: &[Item], refresh: bool) -> Result<()> {
    let missing = |items: &[Item]| -> Result<Vec<Item>> {
        let mut missing = Vec::new();
        for item in items {
            if refresh || !item.present(cache)? {
                missing.push(*item);
            }
        }
        Ok(missing)
    };
    if missing(items)?.is_empty() {
        return Ok(());
    }
    let filling = cache.filling()?;
    // Another run may have fetched some of it while this one waited for the lock.
    let missing = missing(items)?;
    for suite in [DebSuite::Bookworm, DebSuite::Trixie, DebSuite::TrixieBackports, DebSuite::Forky]
    {
        for arch in [Arch::X86_64, Arch::Aarch64] {
            let by_lists = |item: &&Item| item.suite() == Some(suite) && item.lists() == arch;
            let of_lists: Vec<Item> = missing.iter().filter(by_lists).copied().collect();
            if of_lists.is_empty() {
                continue;
            }
            let lists = filling.scratch(&apt::lists_directory(suite, arch))?;
            let apt = Apt::update(suite, arch.debian(), &lists)?;
            for item in of_lists {
                item.fetch(&filling, &apt)?;
            }
        }
    }
    for item in missing.into_iter().filter(|item| item.suite().is_none()) {
        item.search(&filling)?;
    }
    Ok(())
}
