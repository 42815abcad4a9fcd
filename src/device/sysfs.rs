//! Devices in sysfs: the list of devices where there is no netlink, and the bus of a device always. Pairs with
//! `core/sysfs.c` and `core/uverbs_main.c` of the kernel.
//!
//! The tree's root is a parameter so that tests can plant their own; the environment never moves
//! it, because programs with privileges trust what they find here.

use super::cdev::{DeviceNumber, Node};
use super::driver_id::{DriverId, PciId, driver_of_pci};
use super::guid::Guid;
use super::node_type::NodeType;
use super::protocol::Protocol;
use crate::sync::lock::TryLock;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Longest file that is read: sysfs hands out a page.
const FILE_MAX: u64 = 4096;

/// The sysfs tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sysfs {
    root: PathBuf,
}

/// The bus of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Bus {
    pub(super) pci: Option<PciId>,
    pub(super) numa_node: Option<u32>,
    /// The name under which the kernel driver is bound.
    pub(super) kernel_driver: Option<String>,
}

/// The bus of a device, read when it is first asked for: most programs never ask, and it takes more system
/// calls than all other facts about a device.
#[derive(Debug)]
pub(super) enum LazyBus {
    Known(Bus),
    /// Its path and, once read, its content. A forked child that finds this locked reads again.
    Unread(Sysfs, String, TryLock<Option<Bus>>),
}

impl LazyBus {
    pub(super) fn new(sysfs: &Sysfs, device: &str) -> LazyBus {
        LazyBus::Unread(sysfs.clone(), device.to_owned(), TryLock::new(None))
    }

    pub(super) fn get(&self) -> Bus {
        let (sysfs, device, read) = match self {
            LazyBus::Known(bus) => return bus.clone(),
            LazyBus::Unread(sysfs, device, read) => (sysfs, device, read),
        };
        if let Some(bus) = read.try_lock().and_then(|read| read.clone()) {
            return bus;
        }
        let bus = sysfs.bus(device);
        if let Some(mut read) = read.try_lock() {
            *read = Some(bus.clone());
        }
        bus
    }
}

impl Clone for LazyBus {
    fn clone(&self) -> LazyBus {
        match self {
            LazyBus::Known(bus) => LazyBus::Known(bus.clone()),
            LazyBus::Unread(sysfs, device, read) => {
                let read = read.try_lock().and_then(|read| read.clone());
                LazyBus::Unread(sysfs.clone(), device.clone(), TryLock::new(read))
            }
        }
    }
}

impl From<Bus> for LazyBus {
    fn from(bus: Bus) -> LazyBus {
        LazyBus::Known(bus)
    }
}

/// Compares the device's path, whether or not the bus was read.
impl PartialEq for LazyBus {
    fn eq(&self, other: &LazyBus) -> bool {
        match (self, other) {
            (LazyBus::Known(one), LazyBus::Known(other)) => one == other,
            (LazyBus::Unread(sysfs, device, _), LazyBus::Unread(others, other, _)) => {
                (sysfs, device) == (others, other)
            }
            _ => false,
        }
    }
}

impl Eq for LazyBus {}

/// A device as sysfs alone has it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SysfsDevice {
    pub(super) name: String,
    pub(super) node: Node,
    pub(super) node_type: Option<NodeType>,
    pub(super) node_guid: Guid,
    pub(super) sys_image_guid: Guid,
    pub(super) firmware: Option<String>,
    pub(super) ports: u32,
    pub(super) protocol: Option<Protocol>,
    pub(super) driver: Option<DriverId>,
    pub(super) bus: Bus,
}

impl Sysfs {
    /// The sysfs of the running system.
    pub(super) fn system() -> Self {
        Sysfs::at("/sys")
    }

    /// A tree with another root.
    pub(super) fn at(root: impl Into<PathBuf>) -> Self {
        Sysfs { root: root.into() }
    }

    /// The devices that have a uverbs node, in the order of their nodes. An error only if the
    /// directory of nodes is there and cannot be read.
    pub(super) fn list(&self) -> io::Result<Vec<SysfsDevice>> {
        let nodes = match fs::read_dir(self.root.join("class/infiniband_verbs")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            nodes => nodes?,
        };
        let mut found = Vec::new();
        for node in nodes {
            // The directory holds the class's own files, too.
            let path = node?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
            if let Some(number) = name.strip_prefix("uverbs").and_then(|n| n.parse::<u32>().ok()) {
                found.extend(self.device(&path, name).map(|device| (number, device)));
            }
        }
        found.sort_by_key(|(number, _)| *number);
        Ok(found.into_iter().map(|(_, device)| device).collect())
    }

    /// The device behind a node; `None` if it is gone or in another network namespace.
    fn device(&self, node: &Path, node_name: &str) -> Option<SysfsDevice> {
        let name = read(&node.join("ibdev"))?;
        let dir = self.device_dir(&name)?;
        if !dir.is_dir() {
            return None;
        }
        let node = Node {
            name: node_name.to_owned(),
            number: DeviceNumber::from_sysfs(&read(&node.join("dev"))?)?,
            abi: read(&node.join("abi_version"))?.parse().ok()?,
        };
        let guid = |file| {
            read(&dir.join(file)).and_then(|text| Guid::from_sysfs(&text)).unwrap_or_default()
        };
        let node_type = read(&dir.join("node_type")).and_then(|text| {
            let digits = text.split(':').next().unwrap_or("");
            digits.parse().ok().map(NodeType::new)
        });
        let bus = self.bus(&name);
        Some(SysfsDevice {
            node_type,
            node_guid: guid("node_guid"),
            sys_image_guid: guid("sys_image_guid"),
            firmware: read(&dir.join("fw_ver")),
            ports: ports(&dir),
            protocol: protocol(node_type, &dir, &bus),
            driver: driver(&dir, &bus),
            name,
            node,
            bus,
        })
    }

    /// The bus behind a device; nothing for a software device.
    pub(super) fn bus(&self, device: &str) -> Bus {
        let Some(dir) = self.device_dir(device).map(|dir| dir.join("device")) else {
            return Bus::default();
        };
        Bus {
            pci: read(&dir.join("modalias")).and_then(|text| PciId::from_modalias(&text)),
            // -1 stands for "no node in particular".
            numa_node: read(&dir.join("numa_node")).and_then(|text| text.parse().ok()),
            kernel_driver: fs::read_link(dir.join("driver"))
                .ok()
                .and_then(|link| Some(link.file_name()?.to_str()?.to_owned())),
        }
    }

    /// The network interface behind a port, by the first entry of the port's GID table.
    pub(super) fn port_netdev(&self, device: &str, port: u32) -> Option<String> {
        let dir = self.device_dir(device)?.join("ports").join(port.to_string());
        read(&dir.join("gid_attrs/ndevs/0"))
    }

    /// A device's directory; `None` for a name that would lead elsewhere.
    fn device_dir(&self, device: &str) -> Option<PathBuf> {
        let plain = !device.is_empty() && !device.starts_with('.') && !device.contains(['/', '\0']);
        plain.then(|| self.root.join("class/infiniband").join(device))
    }
}

/// A file's text without the white space around it; `None` if there is none.
fn read(path: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(FILE_MAX).read_to_string(&mut text).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// The highest port number, which is how netlink counts them, too.
fn ports(dir: &Path) -> u32 {
    let Ok(ports) = fs::read_dir(dir.join("ports")) else { return 0 };
    ports.filter_map(|port| port.ok()?.file_name().to_str()?.parse().ok()).max().unwrap_or(0)
}

/// sysfs does not name the protocol; it follows from the node type and the first port's link layer.
fn protocol(node_type: Option<NodeType>, dir: &Path, bus: &Bus) -> Option<Protocol> {
    match node_type? {
        NodeType::RNIC => Some(Protocol::Iwarp),
        NodeType::USNIC | NodeType::USNIC_UDP => Some(Protocol::Usnic),
        NodeType::CA | NodeType::SWITCH | NodeType::ROUTER => {
            match read(&dir.join("ports/1/link_layer"))?.as_str() {
                "Ethernet" => Some(Protocol::Roce),
                "InfiniBand" if bus.kernel_driver.as_deref() == Some("hfi1") => {
                    Some(Protocol::OmniPath)
                }
                "InfiniBand" => Some(Protocol::InfiniBand),
                _ => None,
            }
        }
        _ => None,
    }
}

/// sysfs has no driver id. Of all drivers only rxe gives its devices a file `parent`; the rest
/// must be known by their PCI function. The order matters: an rxe device may show the PCI function
/// of the interface below it.
fn driver(dir: &Path, bus: &Bus) -> Option<DriverId> {
    if dir.join("parent").is_file() {
        return Some(DriverId::RXE);
    }
    bus.pci.and_then(driver_of_pci)
}

/// Directories for tests to plant trees in.
#[cfg(test)]
pub(super) mod scratch {
    use std::fs;
    use std::path::{Path, PathBuf};

    /// A directory that is removed when this is dropped.
    pub(in crate::device) struct Scratch(PathBuf);

    impl Scratch {
        pub(in crate::device) fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("uverbs-{}-{name}", std::process::id()));
            fs::create_dir_all(&dir).unwrap();
            Scratch(dir)
        }

        pub(in crate::device) fn path(&self) -> &Path {
            &self.0
        }

        fn place(&self, path: &str) -> PathBuf {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            path
        }

        pub(in crate::device) fn file(&self, path: &str, text: &str) {
            fs::write(self.place(path), text).unwrap();
        }

        pub(in crate::device) fn link(&self, path: &str, target: &str) {
            std::os::unix::fs::symlink(target, self.place(path)).unwrap();
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::scratch::Scratch;
    use super::*;

    fn plant_rxe(tree: &Scratch) {
        let node = "class/infiniband_verbs/uverbs1/";
        tree.file(&format!("{node}ibdev"), "rxe0\n");
        tree.file(&format!("{node}dev"), "231:193\n");
        tree.file(&format!("{node}abi_version"), "2\n");
        let dir = "class/infiniband/rxe0/";
        tree.file(&format!("{dir}node_type"), "1: CA\n");
        tree.file(&format!("{dir}node_guid"), "5054:00ff:fe12:3456\n");
        tree.file(&format!("{dir}sys_image_guid"), "5054:00ff:fe12:3457\n");
        tree.file(&format!("{dir}fw_ver"), "\n");
        tree.file(&format!("{dir}parent"), "eth0\n");
        tree.file(&format!("{dir}ports/1/link_layer"), "Ethernet\n");
        tree.file(&format!("{dir}ports/1/gid_attrs/ndevs/0"), "eth0\n");
    }

    fn plant_mlx5(tree: &Scratch) {
        let node = "class/infiniband_verbs/uverbs0/";
        tree.file(&format!("{node}ibdev"), "mlx5_0\n");
        tree.file(&format!("{node}dev"), "231:192\n");
        tree.file(&format!("{node}abi_version"), "1\n");
        let dir = "class/infiniband/mlx5_0/";
        tree.file(&format!("{dir}node_type"), "1: CA\n");
        tree.file(&format!("{dir}node_guid"), "9803:9b03:0012:3456\n");
        tree.file(&format!("{dir}fw_ver"), "16.35.2000\n");
        tree.file(&format!("{dir}ports/1/link_layer"), "InfiniBand\n");
        tree.file(&format!("{dir}ports/2/link_layer"), "InfiniBand\n");
        tree.file(
            &format!("{dir}device/modalias"),
            "pci:v000015B3d00001017sv000015B3sd00000007bc02sc00i00\n",
        );
        tree.file(&format!("{dir}device/numa_node"), "1\n");
        tree.link(&format!("{dir}device/driver"), "../../bus/pci/drivers/mlx5_core");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn a_tree_of_two_devices_is_read_in_node_order() {
        let tree = Scratch::new("sysfs-two");
        plant_rxe(&tree);
        plant_mlx5(&tree);
        tree.file("class/infiniband_verbs/abi_version", "6\n");
        let sysfs = Sysfs::at(tree.path());
        let found = sysfs.list().unwrap();
        assert_eq!(found.len(), 2);

        let mlx5 = &found[0];
        assert_eq!(mlx5.name, "mlx5_0");
        assert_eq!(mlx5.node.number, DeviceNumber { major: 231, minor: 192 });
        assert_eq!(mlx5.driver, Some(DriverId::MLX5));
        assert_eq!(mlx5.bus.pci, Some(PciId { vendor: 0x15b3, device: 0x1017 }));
        assert_eq!(mlx5.bus.numa_node, Some(1));
        assert_eq!(mlx5.bus.kernel_driver.as_deref(), Some("mlx5_core"));
        assert_eq!(mlx5.firmware.as_deref(), Some("16.35.2000"));
        assert_eq!(mlx5.ports, 2);
        assert_eq!(mlx5.protocol, Some(Protocol::InfiniBand));
        assert_eq!(mlx5.sys_image_guid, Guid::default());

        let rxe = &found[1];
        assert_eq!(
            *rxe,
            SysfsDevice {
                name: "rxe0".into(),
                node: Node {
                    name: "uverbs1".into(),
                    number: DeviceNumber { major: 231, minor: 193 },
                    abi: 2,
                },
                node_type: Some(NodeType::CA),
                node_guid: Guid::new(0x5054_00ff_fe12_3456),
                sys_image_guid: Guid::new(0x5054_00ff_fe12_3457),
                firmware: None,
                ports: 1,
                protocol: Some(Protocol::Roce),
                driver: Some(DriverId::RXE),
                bus: Bus::default(),
            }
        );
        assert_eq!(sysfs.port_netdev("rxe0", 1).as_deref(), Some("eth0"));
        assert_eq!(sysfs.port_netdev("rxe0", 2), None);
    }

    /// The text of each file, and the value that it is parsed into, which prints as the same text.
    #[test]
    fn any_text_is_a_value_or_none() {
        let known = [
            "5054:00ff:fe12:3456",
            "231:192",
            "pci:v000015B3d00001017sv000015B3sd00000007bc02sc00i00",
        ];
        let known = known.map(|text| text.as_bytes().to_vec());
        let tally = crate::tests::hostile::explore("texts of sysfs", 1, &known, |bytes| {
            let text = String::from_utf8_lossy(bytes);
            let guid = Guid::from_sysfs(&text);
            if let Some(guid) = guid {
                assert_eq!(guid.to_string(), text.to_lowercase());
            }
            let number = DeviceNumber::from_sysfs(&text);
            if let Some(number) = number {
                assert_eq!(DeviceNumber::from_sysfs(&number.to_string()), Some(number));
            }
            let pci = PciId::from_modalias(&text);
            let driver = pci.and_then(driver_of_pci);
            let _ = (driver, Protocol::from_kernel(&text));
            guid.is_some() || number.is_some() || pci.is_some()
        });
        assert!(tally.taken > 0 && tally.refused > 0, "{tally:?}");
    }

    /// The same through the files of a tree, each with a text of its own.
    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn a_tree_of_any_texts_is_listed() {
        let files = [
            "class/infiniband_verbs/uverbs0/ibdev",
            "class/infiniband_verbs/uverbs0/dev",
            "class/infiniband_verbs/uverbs0/abi_version",
            "class/infiniband/mlx5_0/node_type",
            "class/infiniband/mlx5_0/node_guid",
            "class/infiniband/mlx5_0/fw_ver",
            "class/infiniband/mlx5_0/ports/1/link_layer",
            "class/infiniband/mlx5_0/device/modalias",
            "class/infiniband/mlx5_0/device/numa_node",
        ];
        let tree = Scratch::new("sysfs-hostile");
        let known =
            [b"mlx5_0\n231:192\n1\n1: CA\n9803:9b03:0012:3456\n1.2\nEthernet\npci:v0\n7".to_vec()];
        let tally = crate::tests::hostile::explore("a tree of sysfs", 100, &known, |bytes| {
            let mut texts = bytes.split(|byte| *byte == b'\n');
            for file in files {
                let path = tree.path().join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, texts.next().unwrap_or_default()).unwrap();
            }
            let sysfs = Sysfs::at(tree.path());
            let found = sysfs.list().unwrap();
            assert!(found.len() <= 1 && !format!("{found:?}").is_empty());
            let name = String::from_utf8_lossy(bytes);
            let _ = (sysfs.bus(&name), sysfs.port_netdev(&name, 1));
            !found.is_empty()
        });
        assert!(tally.taken > 0 && tally.refused > 0, "{tally:?}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn a_system_without_rdma_has_no_devices() {
        let tree = Scratch::new("sysfs-none");
        assert_eq!(Sysfs::at(tree.path()).list().unwrap(), []);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn devices_that_are_gone_or_elsewhere_are_left_out() {
        let tree = Scratch::new("sysfs-gone");
        plant_rxe(&tree);
        // Unplugged: reading the file fails.
        fs::create_dir_all(tree.path().join("class/infiniband_verbs/uverbs2/ibdev")).unwrap();
        // Another namespace's: its own directory is not there.
        tree.file("class/infiniband_verbs/uverbs3/ibdev", "mlx5_9\n");
        tree.file("class/infiniband_verbs/uverbs3/dev", "231:195\n");
        tree.file("class/infiniband_verbs/uverbs3/abi_version", "1\n");
        // Nonsense.
        tree.file("class/infiniband_verbs/uverbs4/ibdev", "../../class\n");
        tree.file("class/infiniband_verbs/uverbs5/ibdev", "rxe0\n");
        tree.file("class/infiniband_verbs/uverbs5/dev", "231:194\n");
        tree.file("class/infiniband_verbs/uverbs5/abi_version", "two\n");
        let found = Sysfs::at(tree.path()).list().unwrap();
        let names: Vec<_> = found.iter().map(|device| device.node.name.as_str()).collect();
        assert_eq!(names, ["uverbs1"]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn rxe_above_a_connectx_is_rxe() {
        let tree = Scratch::new("sysfs-rxe-on-mlx5");
        plant_rxe(&tree);
        tree.file("class/infiniband/rxe0/device/modalias", "pci:v000015B3d00001017sv0\n");
        assert_eq!(Sysfs::at(tree.path()).list().unwrap()[0].driver, Some(DriverId::RXE));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn names_do_not_leave_the_tree() {
        let tree = Scratch::new("sysfs-traversal");
        tree.file("class/infiniband/rxe0/node_type", "1: CA\n");
        tree.file("class/device/numa_node", "3\n");
        tree.file("class/infiniband/device/numa_node", "3\n");
        let sysfs = Sysfs::at(tree.path());
        for name in ["..", ".", "", "../../class", "a\0b"] {
            assert_eq!(sysfs.bus(name), Bus::default(), "{name:?}");
        }
    }

    #[test]
    #[cfg(not(loom))]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_reads_a_bus_that_another_thread_was_reading() {
        let tree = Scratch::new("sysfs-forked");
        plant_mlx5(&tree);
        let bus = LazyBus::new(&Sysfs::at(tree.path()), "mlx5_0");
        let LazyBus::Unread(_, _, read) = &bus else { panic!("nobody read it") };
        let child = || assert_eq!(bus.get().numa_node, Some(1));
        crate::sync::lock::in_child_while_held(|| read.try_lock(), child);
        assert_eq!(bus.get(), bus.clone().get());
    }
}
