//! The reasons why a machine, or a container on it, has no RDMA device: the modules, PCI functions,
//! nodes and namespaces to look at.

use super::by_node::DevTree;
use super::driver_id::{DriverId, PciId, driver_of_pci};
use super::system;
use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// The drivers of PCI functions whose RDMA part is a module of its own.
const RDMA_PARTS: [(&str, &str); 9] = [
    ("mlx5_core", "mlx5_ib"),
    ("mlx4_core", "mlx4_ib"),
    ("bnxt_en", "bnxt_re"),
    ("ice", "irdma"),
    ("cxgb4", "iw_cxgb4"),
    ("qede", "qedr"),
    ("hns3", "hns_roce_hw_v2"),
    ("ionic", "ionic_rdma"),
    ("mana", "mana_ib"),
];

/// The modules that matter beside those of [`RDMA_PARTS`].
const MODULES: [&str; 9] =
    ["ib_core", "ib_uverbs", "rdma_cm", "rdma_ucm", "rdma_rxe", "siw", "efa", "erdma", "hfi1"];

/// A PCI function that could be an RDMA device and is none, because a module is not loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IdleFunction {
    /// Its address, "0000:3b:00.0".
    pub address: String,
    /// Its vendor and device.
    pub pci: PciId,
    /// The driver that is bound to it; `None` if none is.
    pub driver: Option<String>,
    /// The module to load.
    pub module: &'static str,
}

/// The reasons why no RDMA device is listed, returned by [`absence()`]. Displays as sentences, each with a remedy.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Absence {
    /// The loaded modules (or built-in parts) of the RDMA stack; `None` without sysfs.
    pub modules: Option<Vec<String>>,
    /// PCI functions that lack a module.
    pub idle: Vec<IdleFunction>,
    /// Nodes that this process cannot open, each with the reason.
    pub refused: Vec<(PathBuf, String)>,
    /// Nodes that sysfs shows and `/dev/infiniband` does not have, with their devices.
    pub without_node: Vec<(String, String)>,
    /// Whether network namespaces share the devices; `None` if the kernel does not say.
    pub netns_shared: Option<bool>,
}

/// Looks for the reasons why [`devices`](super::devices) lists none. Safe to call from any thread; needs
/// no privilege, and opens each uverbs node that it can.
pub fn absence() -> Absence {
    let netns_shared = system().ok().and_then(|system| system.netns_shared);
    Absence { netns_shared, ..look(Path::new("/sys"), &DevTree::system()) }
}

fn look(sys: &Path, dev: &DevTree<'_>) -> Absence {
    let modules = modules(sys);
    let idle = modules.as_ref().map(|loaded| idle(sys, loaded)).unwrap_or_default();
    let nodes = dev.nodes();
    let refused =
        nodes.iter().filter_map(|path| Some((path.clone(), dev.refusal(path)?))).collect();
    let has_node = |name: &str| nodes.iter().any(|path| path.ends_with(name));
    let without_node = shown(sys).into_iter().filter(|(node, _)| !has_node(node)).collect();
    Absence { modules, idle, refused, without_node, netns_shared: None }
}

fn read(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// The loaded modules that matter; `None` without sysfs.
fn modules(sys: &Path) -> Option<Vec<String>> {
    let loaded = fs::read_dir(sys.join("module")).ok()?;
    let names: BTreeSet<String> =
        loaded.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    let parts = RDMA_PARTS.iter().flat_map(|(core, rdma)| [*core, *rdma]);
    let matter = MODULES.into_iter().chain(parts);
    Some(matter.filter(|name| names.contains(*name)).map(str::to_owned).collect())
}

fn idle(sys: &Path, loaded: &[String]) -> Vec<IdleFunction> {
    let Ok(functions) = fs::read_dir(sys.join("bus/pci/devices")) else { return Vec::new() };
    let mut found: Vec<_> =
        functions.filter_map(|entry| idle_function(&entry.ok()?.path(), loaded)).collect();
    found.sort_by(|one, other| one.address.cmp(&other.address));
    found
}

fn idle_function(dir: &Path, loaded: &[String]) -> Option<IdleFunction> {
    let id = |file| u16::from_str_radix(read(&dir.join(file))?.strip_prefix("0x")?, 16).ok();
    let pci = PciId { vendor: id("vendor")?, device: id("device")? };
    let driver = fs::read_link(dir.join("driver")).ok();
    let driver = driver.and_then(|link| Some(link.file_name()?.to_str()?.to_owned()));
    let module = match &driver {
        Some(driver) => RDMA_PARTS.iter().find(|(core, _)| core == driver)?.1,
        // The PCI ids of other drivers are not known here, and a function without a driver may be meant for a guest.
        None => (driver_of_pci(pci) == Some(DriverId::MLX5)).then_some("mlx5_core")?,
    };
    let missing = driver.is_none() || !loaded.iter().any(|name| name == module);
    let address = dir.file_name()?.to_str()?.to_owned();
    missing.then_some(IdleFunction { address, pci, driver, module })
}

/// The uverbs nodes that sysfs shows, each with the name of its device.
fn shown(sys: &Path) -> Vec<(String, String)> {
    let Ok(nodes) = fs::read_dir(sys.join("class/infiniband_verbs")) else { return Vec::new() };
    let node = |path: PathBuf| {
        let device = read(&path.join("ibdev"))?;
        Some((path.file_name()?.to_str()?.to_owned(), device))
    };
    let mut found: Vec<_> = nodes.filter_map(|entry| node(entry.ok()?.path())).collect();
    found.sort();
    found
}

impl Absence {
    fn has(&self, module: &str) -> bool {
        self.modules.iter().flatten().any(|name| name == module)
    }

    /// The reasons, each a sentence with its remedy; there is at least one.
    pub fn reasons(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        for IdleFunction { address, pci, driver, module } in &self.idle {
            reasons.push(match driver {
                Some(driver) => format!(
                    "PCI function {address} ({pci}) has driver {driver} without its RDMA part: \
                     `modprobe {module}`"
                ),
                None => format!(
                    "PCI function {address} ({pci}) has no driver: `modprobe {module}`, unless it is \
                     meant for a virtual machine"
                ),
            });
        }
        for (path, why) in &self.refused {
            reasons.push(format!("{}: {why}", path.display()));
        }
        for (node, device) in &self.without_node {
            reasons.push(format!(
                "{device} has no /dev/infiniband/{node}: run udev, or in a container pass the device \
                 through"
            ));
        }
        let devices_elsewhere = self.refused.is_empty() && self.without_node.is_empty();
        if self.netns_shared == Some(false) && devices_elsewhere {
            reasons.push(
                "each device belongs to one network namespace (`rdma system` says exclusive), and this \
                 one has none: `rdma dev set DEVICE netns NAME` moves one here"
                    .into(),
            );
        }
        match &self.modules {
            None => reasons.push(
                "sysfs is not mounted at /sys, so that neither modules nor PCI functions can be told"
                    .into(),
            ),
            Some(_) if !self.has("ib_core") => reasons.push(
                "the kernel's RDMA core is not loaded: `modprobe` the driver of the adapter (mlx5_ib), \
                 or rdma_rxe for a software device"
                    .into(),
            ),
            Some(_) if !self.has("ib_uverbs") => reasons.push(
                "the module ib_uverbs is not loaded, which makes the nodes in /dev/infiniband: \
                 `modprobe ib_uverbs`"
                    .into(),
            ),
            Some(modules) if reasons.is_empty() => reasons.push(format!(
                "the modules {} are loaded and have no device; make a software one on a network \
                 interface, as root: `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev \
                 INTERFACE`",
                modules.join(", ")
            )),
            Some(_) => {}
        }
        reasons
    }
}

impl fmt::Display for Absence {
    /// The reasons, in one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reasons().join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::sysfs::scratch::Scratch;

    fn found(sys: &Scratch, dev: &Scratch) -> Absence {
        look(sys.path(), &DevTree::at(dev.path()))
    }

    fn plant_function(sys: &Scratch, driver: Option<&str>) {
        let dir = "bus/pci/devices/0000:3b:00.0";
        sys.file(&format!("{dir}/vendor"), "0x15b3\n");
        sys.file(&format!("{dir}/device"), "0x101d\n");
        if let Some(driver) = driver {
            sys.link(&format!("{dir}/driver"), &format!("../../drivers/{driver}"));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn a_function_whose_rdma_part_is_not_loaded_names_the_module() {
        let (sys, dev) = (Scratch::new("absence-idle"), Scratch::new("absence-idle-dev"));
        sys.file("module/mlx5_core/refcnt", "0\n");
        sys.file("module/ib_core/refcnt", "0\n");
        sys.file("module/ib_uverbs/refcnt", "0\n");
        plant_function(&sys, Some("mlx5_core"));
        let absence = found(&sys, &dev);
        assert_eq!(absence.idle.len(), 1);
        let reasons = absence.reasons();
        assert_eq!(reasons.len(), 1, "{reasons:?}");
        assert!(reasons[0].contains("0000:3b:00.0 (15b3:101d)"), "{reasons:?}");
        assert!(reasons[0].contains("`modprobe mlx5_ib`"), "{reasons:?}");
        // With this module loaded there is nothing to report about the function.
        sys.file("module/mlx5_ib/refcnt", "0\n");
        let absence = found(&sys, &dev);
        assert_eq!(absence.idle, []);
        assert!(absence.to_string().contains("mlx5_core, mlx5_ib are loaded"), "{absence}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn a_function_without_driver_names_the_driver() {
        let (sys, dev) = (Scratch::new("absence-bare"), Scratch::new("absence-bare-dev"));
        sys.file("module/kernel/refcnt", "0\n");
        plant_function(&sys, None);
        let text = found(&sys, &dev).to_string();
        assert!(text.contains("has no driver: `modprobe mlx5_core`"), "{text}");
        assert!(text.contains("RDMA core is not loaded"), "{text}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn nodes_that_cannot_be_opened_or_are_missing_are_named() {
        let (sys, dev) = (Scratch::new("absence-node"), Scratch::new("absence-node-dev"));
        sys.file("module/ib_core/refcnt", "0\n");
        sys.file("module/ib_uverbs/refcnt", "0\n");
        sys.file("class/infiniband_verbs/uverbs1/ibdev", "rxe0\n");
        sys.file("class/infiniband_verbs/abi_version", "6\n");
        dev.link("infiniband/uverbs0", "/dev/null");
        let reasons = found(&sys, &dev).reasons();
        assert_eq!(reasons.len(), 2, "{reasons:?}");
        assert!(reasons[0].contains("infiniband/uverbs0: "), "{reasons:?}");
        assert!(reasons[1].contains("rxe0 has no /dev/infiniband/uverbs1"), "{reasons:?}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn namespaces_and_sysfs_are_named() {
        let (sys, dev) = (Scratch::new("absence-none"), Scratch::new("absence-none-dev"));
        let absence = Absence { netns_shared: Some(false), ..found(&sys, &dev) };
        let text = absence.to_string();
        assert!(text.contains("`rdma system` says exclusive"), "{text}");
        assert!(text.contains("sysfs is not mounted"), "{text}");
    }
}
