//! Devices by their nodes: at a path, behind an open file, and those that neither netlink nor sysfs shows.
//!
//! Pairs with `ib_uverbs_cmd_verbs` in `core/uverbs_ioctl.c`, which compares the driver's id of a command
//! with that of the device.

use super::cdev::{self, DeviceNumber, Node};
use super::driver_id::DriverId;
use super::sysfs::Bus;
use super::{Device, OPEN, devices, hosted};
use crate::error::{Error, Result};
use crate::platform::Platform;
use crate::uverbs::fd::driver_among;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use std::path::{Path, PathBuf};

/// The directory of nodes, which numbers may be those of uverbs devices, and how to ask an open node for its
/// driver.
pub(super) struct DevTree<'a> {
    dev: &'a Path,
    may_be_uverbs: fn(DeviceNumber) -> bool,
    ask: fn(BorrowedFd<'_>) -> std::result::Result<Option<DriverId>, Errno>,
}

fn ask_kernel(fd: BorrowedFd<'_>) -> std::result::Result<Option<DriverId>, Errno> {
    Ok(driver_among(fd, DriverId::probe_order().map(DriverId::get))?.map(DriverId::new))
}

impl DevTree<'static> {
    /// The nodes of the running system.
    pub(super) fn system() -> Self {
        DevTree { dev: Path::new("/dev"), may_be_uverbs: cdev::may_be_uverbs, ask: ask_kernel }
    }
}

impl<'a> DevTree<'a> {
    /// Another directory, whose nodes the kernel is asked about.
    #[cfg(test)]
    pub(super) fn at(dev: &'a Path) -> Self {
        DevTree { dev, may_be_uverbs: |_| true, ask: ask_kernel }
    }

    /// The paths of uverbs nodes, in the order of their numbers.
    pub(super) fn nodes(&self) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(self.dev.join("infiniband")) else { return Vec::new() };
        let number = |path: &PathBuf| {
            path.file_name()?.to_str()?.strip_prefix("uverbs")?.parse::<u32>().ok()
        };
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        let mut found: Vec<_> = paths.filter_map(|path| Some((number(&path)?, path))).collect();
        found.sort();
        found.into_iter().map(|(_, path)| path).collect()
    }

    /// The devices whose nodes can be opened, without those of these numbers.
    pub(super) fn list(&self, known: Vec<DeviceNumber>) -> Vec<Device> {
        let mut found: Vec<Device> = Vec::new();
        for path in self.nodes() {
            let number = cdev::number_at(OPEN, &path).ok();
            let new = number.filter(|number| {
                !known.contains(number)
                    && !found.iter().any(|device| device.device_number() == Some(*number))
            });
            found.extend(new.and_then(|number| self.open(OPEN, &path, number).ok()));
        }
        found
    }

    /// Opens the node at a path and asks it for its driver. A device of another kind is not opened, since that
    /// can have effects: a tape rewinds, a watchdog starts.
    fn open(&self, verb: &'static str, path: &Path, number: DeviceNumber) -> Result<Device> {
        if !(self.may_be_uverbs)(number) {
            return Err(Error::new(verb, Errno::NODEV)
                .detail(format!("character device {number} is no uverbs device")));
        }
        let device = Device::undescribed(path, number, None);
        let node = Node { name: device.name.clone(), number, abi: 0 };
        let fd = cdev::open_at(verb, &device.name, &node, &path.to_owned())?;
        let driver = self.driver(verb, fd.as_fd(), number)?;
        Ok(Device { driver, ..device })
    }

    /// The reason why the node at a path is no device of this process; `None` if it is one.
    pub(super) fn refusal(&self, path: &Path) -> Option<String> {
        let number = cdev::number_at(OPEN, path);
        let opened = number.and_then(|number| self.open(OPEN, path, number));
        opened.err().map(|error| error.message().to_owned())
    }

    /// The driver behind an open file; `None` if it is one that this library cannot name.
    pub(super) fn driver(
        &self,
        verb: &'static str,
        fd: BorrowedFd<'_>,
        number: DeviceNumber,
    ) -> Result<Option<DriverId>> {
        (self.ask)(fd).map_err(|errno| match errno {
            Errno::NOTTY => Error::new(verb, Errno::NODEV)
                .detail(format!("character device {number} is no uverbs device")),
            errno => Error::from_kernel(verb, errno)
                .detail(format!("character device {number} does not tell its driver")),
        })
    }

    /// Asks a device for its driver where sysfs does not tell it, as for a function on no PCI bus.
    pub(super) fn complete(&self, mut device: Device) -> Device {
        if let (None, Some(node)) = (device.driver, &device.node) {
            let path = self.dev.join("infiniband").join(&node.name);
            let opened = cdev::open_at(OPEN, &device.name, node, &path).ok();
            device.driver =
                opened.and_then(|fd| self.driver(OPEN, fd.as_fd(), node.number).ok()).flatten();
        }
        device
    }
}

impl Device {
    /// A device known only by its node.
    fn undescribed(path: &Path, number: DeviceNumber, driver: Option<DriverId>) -> Device {
        let name = path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
        let name = name.unwrap_or_else(|| format!("uverbs-{number}"));
        Device {
            node: Some(Node { name: name.clone(), number, abi: 0 }),
            name,
            index: None,
            node_type: None,
            node_guid: Default::default(),
            sys_image_guid: Default::default(),
            firmware: None,
            ports: 0,
            protocol: None,
            driver,
            bus: Bus::default().into(),
            path: Some(path.to_owned()),
            described: false,
            platform: Platform::LINUX,
        }
    }

    /// The device of the node at `path`, `/dev/infiniband/uverbs3` for example, which
    /// [`Context::open`](crate::Context::open) then opens at that path. Neither netlink nor sysfs is
    /// needed; if neither shows the device, its node is opened to ask for its driver, and the device is not
    /// [described](Self::is_described).
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is nothing at `path`; `EINVAL` if it is no character device; `ENODEV` if it is
    /// another kind of device; `EACCES` without permission for it; `EPERM` if it belongs to another network
    /// namespace, or a device policy of the container does not permit it.
    pub fn by_path(path: impl AsRef<Path>) -> Result<Device> {
        const VERB: &str = "find_device";
        let path = path.as_ref();
        let number = cdev::number_at(VERB, path)?;
        match of_number(number) {
            Some(device) => Ok(Device { path: Some(path.to_owned()), ..device }),
            None => DevTree::system().open(VERB, path, number),
        }
    }

    /// The device behind an open file, on behalf of `verb`.
    pub(crate) fn of_file(verb: &'static str, fd: BorrowedFd<'_>) -> Result<Device> {
        if let Some(found) = hosted::of_file(verb, fd) {
            return found;
        }
        let number = cdev::number_of_file(verb, fd)?;
        match of_number(number) {
            Some(device) => Ok(device),
            None => {
                let driver = DevTree::system().driver(verb, fd, number)?;
                let path = PathBuf::from(format!("/dev/char/{number}"));
                Ok(Device::undescribed(&path, number, driver))
            }
        }
    }

    /// Fills in the attributes that the open device reports.
    pub(crate) fn describe_opened(&mut self, attr: &crate::device_attr::DeviceAttr) {
        self.node_guid = attr.node_guid;
        self.sys_image_guid = attr.sys_image_guid;
        self.ports = attr.phys_port_cnt;
    }
}

/// The listed device with this number. An error while listing counts as "not listed": the node decides.
fn of_number(number: DeviceNumber) -> Option<Device> {
    let mut devices = devices().unwrap_or_default();
    let is_it = |device: &Device| device.described && device.device_number() == Some(number);
    let place = devices.iter().position(is_it)?;
    Some(devices.swap_remove(place))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::ProviderKind;
    use crate::device::sysfs::scratch::Scratch;

    const NULL: DeviceNumber = DeviceNumber { major: 1, minor: 3 };
    const ZERO: DeviceNumber = DeviceNumber { major: 1, minor: 5 };

    /// Says that /dev/null is a ConnectX, and that /dev/zero is no uverbs device.
    fn ask(fd: BorrowedFd<'_>) -> std::result::Result<Option<DriverId>, Errno> {
        match cdev::number_of_file(OPEN, fd).map(|number| number == NULL) {
            Ok(true) => Ok(Some(DriverId::MLX5)),
            _ => Err(Errno::NOTTY),
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn nodes_that_open_are_devices() {
        let dev = Scratch::new("by-node");
        dev.link("infiniband/uverbs10", "/dev/null");
        dev.link("infiniband/uverbs9", "/dev/zero");
        dev.link("infiniband/uverbs11", "/dev/null");
        dev.link("infiniband/rdma_cm", "/dev/null");
        dev.file("infiniband/uverbs3", "");
        let tree = DevTree { dev: dev.path(), may_be_uverbs: |_| true, ask };
        let found = tree.list(Vec::new());
        // One number is one device, and the lower node names it.
        assert_eq!(found.len(), 1, "{found:?}");
        let device = &found[0];
        assert_eq!(device.name(), "uverbs10");
        assert_eq!(device.device_number(), Some(NULL));
        assert_eq!(device.provider().unwrap(), ProviderKind::Mlx5);
        assert_eq!((device.driver_abi(), device.index()), (None, None));
        assert!(!device.is_described());
        assert_eq!(device.node_path(), Some(dev.path().join("infiniband/uverbs10")));
        device.open_node(crate::sync::fork::Epoch::current().unwrap()).unwrap();
        assert_eq!(tree.list(vec![NULL]), []);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn a_call_that_needs_more_than_the_node_says_so() {
        let device = Device::undescribed(Path::new("/dev/uverbs3"), NULL, Some(DriverId::RXE));
        for error in [device.netdev(1).map(drop), device.resources().map(drop)] {
            let error = error.unwrap_err();
            assert!(error.is_unsupported() && error.message().contains("netlink"), "{error}");
            assert!(error.message().contains("uverbs3"), "{error}");
        }
        let unknown = Device::undescribed(Path::new("/dev/uverbs3"), NULL, None);
        let error = unknown.provider().unwrap_err();
        assert!(error.is_unsupported() && error.message().contains("driver unknown"), "{error}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn paths_that_lead_to_no_uverbs_device_are_refused() {
        let dir = Scratch::new("by-path");
        dir.file("file", "");
        let refusal = |path: &Path| Device::by_path(path).unwrap_err();
        let error = refusal(&dir.path().join("file"));
        assert!(error.errno() == Errno::INVAL && error.message().contains("regular"), "{error}");
        let error = refusal(&dir.path().join("none"));
        assert!(error.errno() == Errno::NOENT && error.message().contains("none"), "{error}");
        let error = refusal(Path::new("/dev/null"));
        assert!(error.errno() == Errno::NODEV && error.message().contains("1:3"), "{error}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn a_driver_that_sysfs_does_not_tell_is_asked_of_the_node() {
        let dev = Scratch::new("by-node-driver");
        dev.link("infiniband/uverbs1", "/dev/null");
        dev.link("infiniband/uverbs2", "/dev/zero");
        let tree = DevTree { dev: dev.path(), may_be_uverbs: |_| true, ask };
        let listed = |name, number| {
            let device = Device::undescribed(Path::new(name), number, None);
            Device { described: true, ..device }
        };
        assert_eq!(tree.complete(listed("uverbs1", NULL)).driver(), Some(DriverId::MLX5));
        assert_eq!(tree.complete(listed("uverbs2", ZERO)).driver(), None);
        // A node that is another device's is not asked.
        assert_eq!(tree.complete(listed("uverbs1", ZERO)).driver(), None);
    }
}
