//! `cargo ci fetch`: downloads into the cache whatever is missing.
//!
//! Every command that boots a guest calls this first, for its own needs only.

use crate::apt::{Apt, Suite};
use crate::cache::{Cache, Filling};
use crate::kernel::{self, Kernel, KernelName};
use crate::peers;
use crate::python;
use crate::qemu::{self, Qemu};
use anyhow::{Context, Result};

/// The downloads that a command needs.
#[derive(Clone, Debug)]
pub(crate) struct Needs {
    /// Kernels to boot.
    pub(crate) kernels: Vec<KernelName>,
    /// rdma-core's tools as well.
    pub(crate) peers: bool,
    /// Python with rdma-core's bindings and their tests as well, and rdma-core's libraries of the
    /// next Debian.
    pub(crate) python: bool,
}

impl Needs {
    /// Everything there is.
    pub(crate) fn all() -> Self {
        Self { kernels: KernelName::ALL.to_vec(), peers: true, python: true }
    }

    /// Kernels, with what boots them.
    pub(crate) fn kernels(kernels: &[KernelName]) -> Self {
        Self { kernels: kernels.to_vec(), peers: false, python: false }
    }
}

/// One thing to fetch.
#[derive(Clone, Copy, Debug)]
enum Item {
    Kernel(KernelName),
    Qemu,
    Shell,
    Peers,
    Python,
    Newer,
}

impl Item {
    /// The suite that it comes from, unless that is searched for.
    fn suite(self) -> Option<Suite> {
        match self {
            Item::Kernel(name) => name.suite(),
            Item::Qemu => Some(Suite::TrixieBackports),
            Item::Shell | Item::Peers | Item::Python => Some(Suite::Trixie),
            Item::Newer => Some(Suite::Forky),
        }
    }

    fn present(self, cache: &Cache) -> Result<bool> {
        Ok(match self {
            Item::Kernel(name) => Kernel::find(name, cache)?.is_some(),
            Item::Qemu => Qemu::find(cache)?.is_some(),
            Item::Shell => peers::shell(cache)?.is_some(),
            Item::Peers => peers::peers(cache).is_some(),
            Item::Python => python::python(cache).is_some(),
            Item::Newer => peers::newer(cache).is_some(),
        })
    }

    fn fetch(self, filling: &Filling<'_>, apt: &Apt) -> Result<()> {
        match self {
            Item::Kernel(name) => kernel::fetch(name, filling, apt)
                .with_context(|| format!("kernel {}", name.label())),
            Item::Qemu => qemu::fetch(filling, apt).context("QEMU"),
            Item::Shell => peers::fetch_shell(filling, apt).context("the guest's shell"),
            Item::Peers => peers::fetch_peers(filling, apt).context("rdma-core's tools"),
            Item::Python => python::fetch(filling, apt).context("Python"),
            Item::Newer => peers::fetch_newer(filling, apt).context("newer libraries"),
        }
    }
}

/// Fetches missing units, or everything anew with `refresh`.
pub(crate) fn fetch(cache: &Cache, needs: &Needs, refresh: bool) -> Result<()> {
    let mut items: Vec<Item> = needs.kernels.iter().copied().map(Item::Kernel).collect();
    items.extend([Item::Qemu, Item::Shell]);
    if needs.peers {
        items.push(Item::Peers);
    }
    if needs.python {
        items.extend([Item::Python, Item::Newer]);
    }
    let missing = |items: &[Item]| -> Result<Vec<Item>> {
        let mut missing = Vec::new();
        for item in items {
            if refresh || !item.present(cache)? {
                missing.push(*item);
            }
        }
        Ok(missing)
    };
    if missing(&items)?.is_empty() {
        return Ok(());
    }
    let filling = cache.filling()?;
    // Another run may have fetched some of it while this one waited for the lock.
    let missing = missing(&items)?;
    for suite in [Suite::Bookworm, Suite::Trixie, Suite::TrixieBackports, Suite::Forky] {
        let of_suite: Vec<Item> =
            missing.iter().copied().filter(|item| item.suite() == Some(suite)).collect();
        if of_suite.is_empty() {
            continue;
        }
        let apt = Apt::update(suite, &filling.scratch(&format!("apt-{suite:?}"))?)?;
        for item in of_suite {
            item.fetch(&filling, &apt)?;
        }
    }
    for item in missing {
        if let (Item::Kernel(name), None) = (item, item.suite()) {
            kernel::search(name, &filling).with_context(|| format!("kernel {name}"))?;
        }
    }
    Ok(())
}
