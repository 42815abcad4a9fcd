//! The kernels that the lab boots: image and modules, from Debian packages or from the user.
//!
//! Which package holds which part changed with 6.19, so files are recognised by where they lie.

use crate::apt::{Apt, Package, Suite};
use crate::cache::{Cache, Filling};
use crate::{deb, module};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use lab_guest::order::Module;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Modules that some test, device or person may want; what they depend on comes along.
const MODULES: &[&str] = &[
    // the channel to the host
    "virtio_pci",
    "virtio_console",
    // RDMA
    "rdma_rxe",
    "siw",
    "ib_uverbs",
    "ib_umad",
    "rdma_ucm",
    "rdma_cm",
    "ib_cm",
    "ib_ipoib",
    "mlx5_core",
    "mlx5_ib",
    "mlx5_vdpa",
    // checksums that soft-RoCE asks for by name
    "crc32_generic",
    "crc32_pclmul",
    "crc32c_generic",
    "crc32_cryptoapi",
    "crc32c_cryptoapi",
    // network
    "veth",
    "dummy",
    "bridge",
    "macvlan",
    "tun",
    "8021q",
    "vrf",
    "sch_netem",
    "sch_tbf",
    "sch_prio",
    "sch_ingress",
    "cls_u32",
    "cls_matchall",
    "act_gact",
    "act_mirred",
    "nf_tables",
    "nft_limit",
    // memory to share
    "udmabuf",
];

/// A kernel by the name that the command line gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum KernelName {
    /// Debian 12's
    #[value(name = "6.1")]
    V6_1,
    /// Debian 13's
    #[value(name = "6.12")]
    V6_12,
    /// Debian 13 backports'
    #[value(name = "newest")]
    Newest,
}

impl KernelName {
    /// All of them, oldest first.
    pub(crate) const ALL: [KernelName; 3] =
        [KernelName::V6_1, KernelName::V6_12, KernelName::Newest];

    /// As the command line spells it.
    pub(crate) fn label(self) -> &'static str {
        match self {
            KernelName::V6_1 => "6.1",
            KernelName::V6_12 => "6.12",
            KernelName::Newest => "newest",
        }
    }

    pub(crate) fn suite(self) -> Suite {
        match self {
            KernelName::V6_1 => Suite::Bookworm,
            KernelName::V6_12 => Suite::Trixie,
            KernelName::Newest => Suite::TrixieBackports,
        }
    }

    fn unit(self) -> String {
        format!("kernel-{}", self.label())
    }

    fn variable(self, what: &str) -> String {
        format!("UVERBS_LAB_{what}_{}", self.label().replace('.', "_").to_uppercase())
    }
}

/// A kernel ready to boot.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// Its release, as `uname -r` will say.
    pub(crate) release: String,
    /// The bootable image.
    pub(crate) image: PathBuf,
    /// Modules, with paths on this machine.
    pub(crate) modules: Vec<Module>,
    built_in: BTreeSet<String>,
}

impl Kernel {
    /// The kernel if it is there: named by the environment or complete in the cache.
    pub(crate) fn find(name: KernelName, cache: &Cache) -> Result<Option<Self>> {
        if let Some(own) = Self::from_environment(name, cache)? {
            return Ok(Some(own));
        }
        cache.unit(&name.unit()).map(|directory| Self::read(&directory)).transpose()
    }

    fn read(directory: &Path) -> Result<Self> {
        let release = fs::read_to_string(directory.join("release"))?;
        let mut modules: Vec<Module> =
            serde_json::from_slice(&fs::read(directory.join("modules.json"))?)?;
        for module in &mut modules {
            module.path = directory.join("modules").join(&module.path).display().to_string();
        }
        let built_in = module::built_in(&fs::read_to_string(directory.join("modules.builtin"))?);
        Ok(Self { release, image: directory.join("vmlinuz"), modules, built_in })
    }

    /// A kernel that the user names instead of Debian's.
    fn from_environment(name: KernelName, cache: &Cache) -> Result<Option<Self>> {
        let (image_variable, modules_variable) =
            (name.variable("KERNEL"), name.variable("MODULES"));
        let Some(image) = std::env::var_os(&image_variable) else { return Ok(None) };
        let modules = std::env::var_os(&modules_variable).with_context(|| {
            format!("{image_variable} is set, {modules_variable} is not: both are needed")
        })?;
        let image = PathBuf::from(image);
        let tree = PathBuf::from(modules).canonicalize().context(modules_variable)?;
        let directory = cache
            .unit_of_file(&format!("own-{}", name.label()), &image, |unit| {
                fs::copy(&image, unit.join("vmlinuz"))?;
                fill(unit, &tree)
            })
            .context(image_variable)?;
        Self::read(&directory).map(Some)
    }

    /// Whether a module is there, as a file or built in.
    pub(crate) fn has(&self, module: &str) -> bool {
        self.built_in.contains(module) || self.modules.iter().any(|known| known.name == module)
    }
}

/// Fills a unit's modules from a directory like `/lib/modules/6.1.0-x`.
fn fill(unit: &Path, tree: &Path) -> Result<()> {
    let release = tree.file_name().context("a modules directory without name")?;
    fs::write(unit.join("release"), release.to_string_lossy().as_bytes())?;
    fs::copy(tree.join("modules.builtin"), unit.join("modules.builtin"))
        .with_context(|| format!("{} has no modules.builtin", tree.display()))?;
    let all = module::find(tree)?;
    let list = module::collect(&all, MODULES, &unit.join("modules"))?;
    fs::write(unit.join("modules.json"), serde_json::to_vec(&list)?)?;
    Ok(())
}

/// Downloads a kernel into the cache.
pub(crate) fn fetch(name: KernelName, filling: &Filling<'_>, apt: &Apt) -> Result<()> {
    let packages: Vec<Package> =
        apt.closure(&["linux-image-amd64"])?.into_iter().filter(is_part).collect();
    let files = apt.download(&format!("kernel {}", name.label()), &packages)?;
    let scratch = filling.scratch(&format!("tree-{}", name.label()))?;
    for file in &files {
        deb::unpack(file, &scratch, |path| {
            let modules = path.starts_with("usr/lib/modules");
            let image = path.starts_with("boot")
                && path
                    .file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz"));
            modules || image
        })?;
        fs::remove_file(file)?;
    }
    filling.add(&name.unit(), |unit| {
        let trees: Vec<PathBuf> = fs::read_dir(scratch.join("usr/lib/modules"))?
            .flatten()
            .map(|entry| entry.path())
            .collect();
        let [tree] = trees.as_slice() else {
            bail!("{} kernels in the packages of {}", trees.len(), name.label());
        };
        let mut images = vec![tree.join("vmlinuz")];
        if let Ok(entries) = fs::read_dir(scratch.join("boot")) {
            images.extend(entries.flatten().map(|entry| entry.path()));
        }
        let image = images
            .into_iter()
            .find(|path| path.is_file())
            .with_context(|| format!("no kernel image in {packages:?}"))?;
        fs::copy(image, unit.join("vmlinuz"))?;
        fill(unit, tree)?;
        Ok(packages.iter().map(Package::to_string).collect())
    })?;
    fs::remove_dir_all(&scratch)?;
    Ok(())
}

/// Whether a package of the image's closure is part of the kernel itself.
fn is_part(package: &Package) -> bool {
    ["linux-image-", "linux-binary-", "linux-modules-", "linux-base-"].iter().any(|prefix| {
        package
            .name
            .strip_prefix(prefix)
            .is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_the_kernel_are_told_from_what_it_recommends() {
        let part = |name: &str| is_part(&Package { name: name.into(), version: "1".into() });
        assert!(part("linux-image-6.1.0-44-amd64"));
        assert!(part("linux-binary-7.2.12+deb13-amd64"));
        assert!(part("linux-modules-7.2.12+deb13-amd64"));
        assert!(part("linux-base-7.2.12+deb13-amd64"));
        assert!(!part("linux-base"));
        assert!(!part("linux-image-amd64"));
        assert!(!part("linux-base-amd64"));
    }

    #[test]
    fn variables_are_named_after_the_kernel() {
        assert_eq!(KernelName::V6_12.variable("KERNEL"), "UVERBS_LAB_KERNEL_6_12");
        assert_eq!(KernelName::Newest.variable("MODULES"), "UVERBS_LAB_MODULES_NEWEST");
    }
}
