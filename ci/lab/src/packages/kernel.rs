//! The kernels that the lab boots: image and modules, from Debian packages or from the user.
//!
//! The packages were split differently in 6.19, so files are recognised by their paths.

pub(crate) mod module;
pub(crate) mod release;

use crate::arch::Arch;
use crate::packages::apt::{self, Apt, DebPackage, DebSuite};
use crate::packages::cache::{Cache, Filling};
use crate::packages::deb;
use crate::packages::kernel::release::Series;
use anyhow::{Context, Error, Result, bail};
use lab_guest::order::Module;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Modules that some test, device or person may want; their dependencies come along.
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
    // types of virtqueues, which only this driver describes
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
    // storage over RDMA
    "nvmet_rdma",
    "brd",
    // the host's file system
    "9p",
    "9pnet_virtio",
];

/// A kernel by the name that the command line gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelName {
    /// Debian 12's.
    V6_1,
    /// Debian 13's.
    V6_12,
    /// Debian 13 backports'.
    Newest,
    /// Another one: its release, or the first parts of it.
    Release(&'static str),
}

impl KernelName {
    /// The kernels that every whole run boots, oldest first.
    pub(crate) const ALL: [KernelName; 3] =
        [KernelName::V6_1, KernelName::V6_12, KernelName::Newest];

    /// As the command line spells it.
    pub(crate) fn label(self) -> &'static str {
        match self {
            KernelName::V6_1 => "6.1",
            KernelName::V6_12 => "6.12",
            KernelName::Newest => "newest",
            KernelName::Release(release) => release,
        }
    }

    /// The suite whose default kernel it is.
    pub(crate) fn suite(self) -> Option<DebSuite> {
        match self {
            KernelName::V6_1 => Some(DebSuite::Bookworm),
            KernelName::V6_12 => Some(DebSuite::Trixie),
            KernelName::Newest => Some(DebSuite::TrixieBackports),
            KernelName::Release(_) => None,
        }
    }

    fn unit(self, arch: Arch) -> String {
        arch.unit(&format!("kernel-{}", self.label()))
    }

    /// The package that depends on the suite's default kernel. Of the newest for aarch64 it is the one with
    /// pages of 16 KiB, so that the suites run with both sizes.
    fn package(self, arch: Arch) -> String {
        let larger = arch == Arch::Aarch64 && self == KernelName::Newest;
        format!("linux-image-{}{}", arch.debian(), if larger { "-16k" } else { "" })
    }

    fn variable(self, arch: Arch, what: &str) -> String {
        let name = arch.unit(self.label()).replace(|c: char| !c.is_ascii_alphanumeric(), "_");
        format!("UVERBS_LAB_{what}_{}", name.to_uppercase())
    }
}

impl FromStr for KernelName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some(name) = Self::ALL.into_iter().find(|name| name.label() == text) {
            return Ok(name);
        }
        let release = ["-amd64", "-arm64"].iter().find_map(|suffix| text.strip_suffix(suffix));
        let release = release.unwrap_or(text);
        let spelt = |c: char| c.is_ascii_alphanumeric() || ".-+~".contains(c);
        if Series::of(release).is_err() || !release.chars().all(spelt) {
            bail!(
                "a kernel is 6.1, 6.12, newest, or a version such as 5.10, 6.18, 6.18.15 or 6.1.0-50"
            );
        }
        // There is one for each `--kernel` of a run.
        Ok(Self::Release(Box::leak(release.to_owned().into_boxed_str())))
    }
}

impl fmt::Display for KernelName {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(self.label())
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
    /// Whether it loads only modules that were signed when it was built.
    pub(crate) only_signed: bool,
    built_in: BTreeSet<String>,
}

/// The file of a unit that makes it so.
const ONLY_SIGNED: &str = "only-signed";

impl Kernel {
    /// The kernel if it is there: named by the environment or complete in the cache.
    pub(crate) fn find(name: KernelName, arch: Arch, cache: &Cache) -> Result<Option<Self>> {
        if let Some(own) = Self::from_environment(name, arch, cache)? {
            return Ok(Some(own));
        }
        let unit = cache.unit(&name.unit(arch)).filter(|directory| is_complete(directory));
        unit.map(|directory| Self::read(&directory)).transpose()
    }

    fn read(directory: &Path) -> Result<Self> {
        let release = fs::read_to_string(directory.join("release"))?;
        let mut modules: Vec<Module> =
            serde_json::from_slice(&fs::read(directory.join("modules.json"))?)?;
        for module in &mut modules {
            module.path = directory.join("modules").join(&module.path).display().to_string();
        }
        let built_in = module::built_in(&fs::read_to_string(directory.join("modules.builtin"))?);
        let only_signed = directory.join(ONLY_SIGNED).exists();
        Ok(Self { release, image: directory.join("vmlinuz"), modules, only_signed, built_in })
    }

    /// A kernel that the user names instead of Debian's.
    fn from_environment(name: KernelName, arch: Arch, cache: &Cache) -> Result<Option<Self>> {
        let (image_variable, modules_variable) =
            (name.variable(arch, "KERNEL"), name.variable(arch, "MODULES"));
        let Some(image) = std::env::var_os(&image_variable) else { return Ok(None) };
        let modules = std::env::var_os(&modules_variable).with_context(|| {
            format!("{image_variable} is set, {modules_variable} is not: both are needed")
        })?;
        let image = PathBuf::from(image);
        let tree = PathBuf::from(modules).canonicalize().context(modules_variable)?;
        let directory = cache
            .unit_of_file(&arch.unit(&format!("own-{}", name.label())), &image, |unit| {
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

/// The file of a unit that lists the modules that were looked for when it was filled.
const WANTED: &str = "wanted.json";

/// Whether all of [`MODULES`] were looked for when a unit was filled. One of an older lab is fetched again.
fn is_complete(unit: &Path) -> bool {
    let read = || serde_json::from_slice::<Vec<String>>(&fs::read(unit.join(WANTED)).ok()?).ok();
    read().is_some_and(|wanted| MODULES.iter().all(|name| wanted.iter().any(|known| known == name)))
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
    fs::write(unit.join(WANTED), serde_json::to_vec(MODULES)?)?;
    Ok(())
}

/// Downloads a suite's default kernel into the cache.
pub(crate) fn fetch(name: KernelName, arch: Arch, filling: &Filling<'_>, apt: &Apt) -> Result<()> {
    let packages: Vec<DebPackage> =
        apt.closure(&[&name.package(arch)])?.into_iter().filter(is_part).collect();
    let files = apt.download(&format!("kernel {name} for {}", arch.debian()), &packages)?;
    let sources = packages.iter().map(DebPackage::to_string).collect();
    unpack(&name.unit(arch), filling, &files, &[], sources)
}

/// Downloads the newest kernel that `name` covers from the first suite that carries one.
pub(crate) fn search(name: KernelName, arch: Arch, filling: &Filling<'_>) -> Result<()> {
    let mut known = Vec::new();
    for suite in DebSuite::WITH_KERNELS {
        let lists = filling.scratch(&apt::lists_directory(suite, arch))?;
        let apt = Apt::update(suite, arch.debian(), &lists)?;
        let carried = carried(&apt.listed("linux-")?, arch);
        if let Some(kernel) = newest(&carried, name.label()) {
            return fetch_carried(&name.unit(arch), kernel, filling, &apt);
        }
        known.extend(carried.into_iter().map(|kernel| kernel.release));
    }
    known.sort_by(|one, other| release::compare(one, other));
    known.dedup();
    bail!(
        "no suite carries a kernel {name}. There are: {}.\n{} (image) and {} (its directory under \
         lib/modules) name one of your own.",
        known.join(", "),
        name.variable(arch, "KERNEL"),
        name.variable(arch, "MODULES")
    )
}

/// A kernel that a suite lists.
#[derive(Debug, PartialEq, Eq)]
struct Carried {
    /// Its release without the architecture.
    release: String,
    /// Its parts.
    packages: Vec<DebPackage>,
    /// Parts that the list no longer has; the archive may keep them.
    unlisted: Vec<DebPackage>,
}

/// The kernels among packages.
fn carried(packages: &[DebPackage], arch: Arch) -> Vec<Carried> {
    let flavour = format!("-{}", arch.debian());
    let mut releases: BTreeMap<&str, BTreeMap<&str, &DebPackage>> = BTreeMap::new();
    for package in packages {
        let Some(rest) = package.name.strip_prefix("linux-") else { continue };
        let Some((kind, release)) = rest.split_once('-') else { continue };
        let Some(release) = release.strip_suffix(flavour.as_str()) else { continue };
        // The architecture alone, and builds for clouds and real time, are others.
        let plain = Series::of(release).is_ok() && !release.ends_with(|c: char| c.is_alphabetic());
        if ["image", "binary", "modules", "base"].contains(&kind) && plain {
            releases.entry(release).or_default().insert(kind, package);
        }
    }
    releases
        .into_iter()
        .filter(|(_, parts)| parts.contains_key("image"))
        .map(|(release, parts)| {
            // Since 6.19 the signed image is apart from the rest, which a list drops sooner.
            let dropped = |kind: &&str| !parts.contains_key(kind);
            let unlisted = parts.get("binary").map_or_else(Vec::new, |binary| {
                ["base", "modules"]
                    .iter()
                    .filter(|kind| dropped(kind))
                    .map(|kind| DebPackage {
                        name: format!("linux-{kind}-{release}{flavour}"),
                        version: binary.version.clone(),
                    })
                    .collect()
            });
            let packages = parts.into_values().cloned().collect();
            Carried { release: release.to_owned(), packages, unlisted }
        })
        .collect()
}

/// The newest of the kernels that `wanted` names.
fn newest<'a>(carried: &'a [Carried], wanted: &str) -> Option<&'a Carried> {
    carried
        .iter()
        .filter(|kernel| release::names(wanted, &kernel.release))
        .max_by(|one, other| release::compare(&one.release, &other.release))
}

fn fetch_carried(name: &str, kernel: &Carried, filling: &Filling<'_>, apt: &Apt) -> Result<()> {
    let files = apt.download(&format!("kernel {}", kernel.release), &kernel.packages)?;
    let mut sources: Vec<String> = kernel.packages.iter().map(DebPackage::to_string).collect();
    let mut unchecked = Vec::new();
    for package in &kernel.unlisted {
        let file = apt.download_unlisted("linux", package).with_context(|| {
            format!("Debian neither lists all parts of {} any more, nor keeps them", kernel.release)
        })?;
        unchecked.push(file);
        sources.push(format!("{package} (unlisted)"));
    }
    unpack(name, filling, &files, &unchecked, sources)
}

/// Makes a kernel's unit of packages that were checked against a signed list and others that were not.
/// The image is one of the former, and refuses modules that were not built with it.
fn unpack(
    name: &str,
    filling: &Filling<'_>,
    checked: &[PathBuf],
    unchecked: &[PathBuf],
    sources: Vec<String>,
) -> Result<()> {
    let in_modules = |path: &Path| path.starts_with("usr/lib/modules");
    let is_image = |path: &Path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz"))
    };
    let scratch = filling.scratch(&format!("tree-{name}"))?;
    for file in checked {
        deb::unpack(file, &scratch, |path| {
            in_modules(path) || (path.starts_with("boot") && is_image(path))
        })?;
        fs::remove_file(file)?;
    }
    let image = image(&scratch).with_context(|| format!("no kernel image in {sources:?}"))?;
    filling.add(name, |unit| {
        fs::copy(image, unit.join("vmlinuz"))?;
        // Apart from the checked files, so that none of them can be replaced.
        let mut tree = scratch.clone();
        if !unchecked.is_empty() {
            tree = filling.scratch(&format!("unchecked-{name}"))?;
            for file in unchecked {
                deb::unpack_files(file, &tree, in_modules)?;
                fs::remove_file(file)?;
            }
            fs::write(unit.join(ONLY_SIGNED), "")?;
        }
        let trees: Vec<PathBuf> = fs::read_dir(tree.join("usr/lib/modules"))?
            .flatten()
            .map(|entry| entry.path())
            .collect();
        let [tree] = trees.as_slice() else {
            bail!("{} kernels in the packages of {name}", trees.len());
        };
        fill(unit, tree)?;
        Ok(sources)
    })?;
    fs::remove_dir_all(&scratch)?;
    Ok(())
}

/// The bootable image in an unpacked kernel.
fn image(root: &Path) -> Option<PathBuf> {
    let mut images = Vec::new();
    if let Ok(trees) = fs::read_dir(root.join("usr/lib/modules")) {
        images.extend(trees.flatten().map(|tree| tree.path().join("vmlinuz")));
    }
    if let Ok(entries) = fs::read_dir(root.join("boot")) {
        images.extend(entries.flatten().map(|entry| entry.path()));
    }
    images.into_iter().find(|path| path.is_file())
}

/// Whether a package of the image's closure is part of the kernel itself.
fn is_part(package: &DebPackage) -> bool {
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
    fn recommended_packages_are_no_part_of_the_kernel() {
        let part = |name: &str| is_part(&DebPackage { name: name.into(), version: "1".into() });
        assert!(part("linux-image-6.1.0-44-amd64"));
        assert!(part("linux-binary-7.2.12+deb13-amd64"));
        assert!(part("linux-modules-7.2.12+deb13-amd64"));
        assert!(part("linux-base-7.2.12+deb13-amd64"));
        assert!(!part("linux-base"));
        assert!(!part("linux-image-amd64"));
        assert!(!part("linux-base-amd64"));
    }

    fn packages(list: &[(&str, &str)]) -> Vec<DebPackage> {
        let package = |(name, version): &(&str, &str)| DebPackage {
            name: (*name).into(),
            version: (*version).into(),
        };
        list.iter().map(package).collect()
    }

    #[test]
    fn a_kernel_is_the_newest_that_its_name_covers() {
        let list = packages(&[
            ("linux-image-amd64", "7.3"),
            ("linux-image-cloud-amd64", "7.3"),
            ("linux-image-6.18.9+deb13-amd64", "6.18.9-1"),
            ("linux-image-6.18.12+deb13-amd64", "6.18.12-1"),
            ("linux-image-6.18.15+deb13-cloud-amd64", "6.18.15-1"),
            ("linux-image-6.18.15+deb13-rt-amd64", "6.18.15-1"),
            ("linux-headers-6.18.16+deb13-amd64", "6.18.16-1"),
            ("linux-image-6.1.0-50-amd64", "6.1.176-1"),
        ]);
        let carried = carried(&list, Arch::X86_64);
        let release = |wanted: &str| newest(&carried, wanted).map(|kernel| kernel.release.as_str());
        assert_eq!(carried.len(), 3, "{carried:?}");
        assert_eq!(release("6.18"), Some("6.18.12+deb13"));
        assert_eq!(release("6.18.9"), Some("6.18.9+deb13"));
        assert_eq!(release("6.1.0-50"), Some("6.1.0-50"));
        assert_eq!(release("6.16"), None);
        assert!(carried.iter().all(|kernel| kernel.unlisted.is_empty()));
    }

    #[test]
    fn parts_that_the_list_dropped_are_known() {
        let list = packages(&[
            ("linux-image-7.0.13+deb13-amd64", "7.0.13-1"),
            ("linux-binary-7.0.13+deb13-amd64", "7.0.13-1"),
            ("linux-image-7.2.12+deb13-amd64", "7.2.12-1"),
            ("linux-binary-7.2.12+deb13-amd64", "7.2.12-1"),
            ("linux-modules-7.2.12+deb13-amd64", "7.2.12-1"),
            ("linux-base-7.2.12+deb13-amd64", "7.2.12-1"),
        ]);
        let carried = carried(&list, Arch::X86_64);
        let [old, new] = carried.as_slice() else { panic!("{carried:?}") };
        let unlisted: Vec<String> = old.unlisted.iter().map(DebPackage::to_string).collect();
        assert_eq!(
            unlisted,
            ["linux-base-7.0.13+deb13-amd64=7.0.13-1", "linux-modules-7.0.13+deb13-amd64=7.0.13-1"]
        );
        assert!(new.unlisted.is_empty() && new.packages.len() == 4, "{new:?}");
    }

    #[test]
    fn kernels_are_named_by_version() {
        let parse = |text: &str| text.parse::<KernelName>();
        assert_eq!(parse("6.1").unwrap(), KernelName::V6_1);
        assert_eq!(parse("newest").unwrap(), KernelName::Newest);
        assert_eq!(parse("6.18").unwrap(), KernelName::Release("6.18"));
        assert_eq!(parse("6.18.15+deb13-amd64").unwrap().label(), "6.18.15+deb13");
        for bad in ["", "latest", "6", "v6.18", "6.18/..", "6.18 ", "all"] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.contains("6.1, 6.12, newest"), "{bad}: {error}");
        }
    }

    #[test]
    fn aarch64_has_kernels_with_both_sizes_of_pages() {
        assert_eq!(KernelName::V6_12.package(Arch::Aarch64), "linux-image-arm64");
        assert_eq!(KernelName::Newest.package(Arch::Aarch64), "linux-image-arm64-16k");
        assert_eq!(KernelName::Newest.package(Arch::X86_64), "linux-image-amd64");
        let list = packages(&[
            ("linux-image-6.18.15+deb13-arm64", "6.18.15-1"),
            ("linux-image-6.18.15+deb13-arm64-16k", "6.18.15-1"),
        ]);
        let carried = carried(&list, Arch::Aarch64);
        assert_eq!(carried.len(), 1, "{carried:?}");
        assert_eq!(carried[0].release, "6.18.15+deb13");
    }

    #[test]
    fn a_kernel_without_a_module_that_is_wanted_now_is_fetched_again() {
        let unit = std::env::temp_dir().join(format!("lab-wanted-{}", std::process::id()));
        fs::create_dir_all(&unit).unwrap();
        let filled_for = |wanted: &[&str]| {
            fs::write(unit.join(WANTED), serde_json::to_vec(wanted).unwrap()).unwrap();
            is_complete(&unit)
        };
        assert!(!is_complete(&unit), "one of a lab that kept no list");
        assert!(filled_for(MODULES));
        assert!(filled_for(&[MODULES, &["another"]].concat()));
        assert!(!filled_for(&MODULES[1..]));
        fs::remove_dir_all(&unit).unwrap();
    }

    #[test]
    fn variables_are_named_after_the_kernel() {
        let release = KernelName::Release("6.1.0-50+x");
        let [x86, arm] = [Arch::X86_64, Arch::Aarch64];
        assert_eq!(release.variable(x86, "KERNEL"), "UVERBS_LAB_KERNEL_6_1_0_50_X");
        assert_eq!(KernelName::V6_12.variable(x86, "KERNEL"), "UVERBS_LAB_KERNEL_6_12");
        assert_eq!(KernelName::Newest.variable(x86, "MODULES"), "UVERBS_LAB_MODULES_NEWEST");
        let own = KernelName::Newest.variable(arm, "MODULES");
        assert_eq!(own, "UVERBS_LAB_MODULES_NEWEST_AARCH64");
    }
}
