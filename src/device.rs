//! RDMA devices: finding them, describing them, and opening the node behind which a device's
//! uverbs ABI lives.
//!
//! RDMA netlink is asked first; where there is none (a sandbox, an old kernel), sysfs is read
//! instead, and a node in `/dev/infiniband` that neither shows is opened and asked for its driver.
//! Devices that this library has no provider for are listed, too. Where none is listed,
//! [`absence()`] says why.
//!
//! ```no_run
//! for device in uverbs::device::devices()? {
//!     println!("{device}: {} port(s)", device.port_count());
//! }
//! # Ok::<(), uverbs::Error>(())
//! ```

mod absence;
pub(crate) mod addresses;
mod by_node;
mod cdev;
mod driver_id;
pub(crate) mod guid;
mod hosted;
pub mod link;
mod netlink;
mod nldev;
mod node_type;
mod protocol;
mod rdma_cm;
mod resources;
mod sysfs;
mod system;

pub use absence::{Absence, IdleFunction, absence};
pub use cdev::DeviceNumber;
pub(crate) use driver_id::ProviderKind;
pub use driver_id::{DriverId, PciId};
pub use guid::Guid;
pub use node_type::{NodeType, Transport};
pub use protocol::Protocol;
pub(crate) use rdma_cm::open_rdma_cm;
pub use resources::ResourceCounts;
pub(crate) use system::copies_on_fork;
pub use system::{System, system};

use crate::error::{Error, Result};
use crate::platform::Platform;
use crate::sync::fork::Epoch;
use crate::uverbs::open_file::OpenFile;
use by_node::DevTree;
use cdev::{Node, Nodes};
use driver_id::Mismatch;
use netlink::{Client, NetlinkTransport};
use nldev::{Listed, NodeAnswer};
use rustix::io::Errno;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use sysfs::{LazyBus, Sysfs, SysfsDevice};
use uverbs_host::HostSystem;

/// The verb on whose behalf a device is matched and its node opened.
const OPEN: &str = "open_device";

/// An RDMA device, as it was when it was listed.
///
/// This is a description, not a handle: it keeps nothing open, may be sent anywhere, and outlives
/// the device. Names are reused when a device is replaced, [indices](Device::index) are not.
///
/// ```no_run
/// for device in uverbs::devices()? {
///     println!("{}: GUID {}", device.name(), device.node_guid());
/// }
/// # Ok::<(), uverbs::Error>(())
/// ```
///
/// Reasons why the list is empty:
///
/// ```no_run
/// use uverbs::device::absence;
///
/// let absence = absence();
/// for function in &absence.idle {
///     println!("{} needs the module {}", function.address, function.module);
/// }
/// println!("{absence}");
/// ```
///
/// A soft-RoCE device, which root may add to a network interface, found by its name:
///
/// ```no_run
/// # fn main() -> uverbs::Result<()> {
/// use uverbs::device::{Device, link};
///
/// link::add_link("rxe0", "rxe", "eth0")?;
/// let device = Device::by_name("rxe0")?;
/// link::remove_link("rxe0")?;
/// # drop(device); Ok(()) }
/// ```
#[doc(alias = "ibv_device")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    name: String,
    index: Option<u32>,
    node: Option<Node>,
    node_type: Option<NodeType>,
    node_guid: Guid,
    sys_image_guid: Guid,
    firmware: Option<String>,
    ports: u32,
    protocol: Option<Protocol>,
    driver: Option<DriverId>,
    bus: LazyBus,
    /// The path that [`by_path`](Self::by_path) was given, or where its node was found; without one the node is
    /// looked for in `/dev`.
    path: Option<PathBuf>,
    /// Netlink or sysfs described it; otherwise only its node is known.
    described: bool,
    /// The system that has it.
    platform: Platform,
}

/// Lists the RDMA devices that this process's network namespace may see, in the order in which the
/// kernel made them. A system without RDMA has none; that is no error, and [`absence()`] says why.
///
/// Where there is no netlink, devices that sysfs does not show are found by opening their nodes in
/// `/dev/infiniband`; they are [not described](Device::is_described).
///
/// Safe to call from any thread, at any time; needs no privilege.
///
/// # Errors
///
/// `EAGAIN` if the list changed during each attempt to read it; `EBADMSG` if the kernel's response is
/// malformed; otherwise the kernel's error.
#[doc(alias = "ibv_get_device_list")]
#[doc(alias = "ibv_free_device_list")]
pub fn devices() -> Result<Vec<Device>> {
    const VERB: &str = "list_devices";
    match Platform::current().hosted() {
        Some(system) => Ok(devices_on(system)),
        None => list(Client::open(VERB), &Sysfs::system(), &DevTree::system(), VERB),
    }
}

/// Lists the devices of a hosted kernel, which stands for Linux in this process.
///
/// **Unstable**, as `uverbs-host` is.
pub fn devices_on(system: &Arc<dyn HostSystem>) -> Vec<Device> {
    system.devices().into_iter().map(|device| hosted::device(system, device)).collect()
}

fn list<W: NetlinkTransport>(
    client: Result<Client<W>>,
    sysfs: &Sysfs,
    dev: &DevTree<'_>,
    verb: &'static str,
) -> Result<Vec<Device>> {
    let error = match client.and_then(|mut client| by_netlink(&mut client, sysfs)) {
        Ok(devices) => return Ok(devices),
        Err(error) => error,
    };
    let listed = sysfs.list();
    let described = listed.as_ref().map(Vec::as_slice).unwrap_or_default();
    let bare = dev.list(described.iter().map(|device| device.node.number).collect());
    match listed {
        Ok(found) if found.is_empty() && bare.is_empty() && !nldev::is_absent(&error) => Err(error),
        Ok(found) => {
            let described = found.into_iter().map(|found| dev.complete(Device::from(found)));
            Ok(described.chain(bare).collect())
        }
        Err(_) if !bare.is_empty() => Ok(bare),
        Err(unreadable) => {
            let errno = Errno::from_io_error(&unreadable).unwrap_or(Errno::IO);
            Err(Error::from_kernel(verb, errno)
                .detail(format!("RDMA netlink failed ({error}) and so did reading sysfs")))
        }
    }
}

fn by_netlink<W: NetlinkTransport>(client: &mut Client<W>, sysfs: &Sysfs) -> Result<Vec<Device>> {
    let mut listed = client.list()?;
    listed.sort_by_key(|device| device.index);
    let nodes = client.uverbs_nodes(listed.iter().map(|device| device.index))?;
    let mut devices = Vec::with_capacity(listed.len());
    for (listed, node) in listed.into_iter().zip(nodes) {
        let (node, driver) = match node {
            NodeAnswer::Gone => continue,
            NodeAnswer::None => (None, None),
            NodeAnswer::Node(uverbs) => (Some(uverbs.node), uverbs.driver),
        };
        let bus = LazyBus::new(sysfs, &listed.name);
        devices.push(Device::new(listed, node, driver, bus));
    }
    Ok(devices)
}

impl From<SysfsDevice> for Device {
    fn from(found: SysfsDevice) -> Self {
        Device {
            name: found.name,
            index: None,
            node: Some(found.node),
            node_type: found.node_type,
            node_guid: found.node_guid,
            sys_image_guid: found.sys_image_guid,
            firmware: found.firmware,
            ports: found.ports,
            protocol: found.protocol,
            driver: found.driver,
            bus: found.bus.into(),
            path: None,
            described: true,
            platform: Platform::LINUX,
        }
    }
}

impl Device {
    fn new(listed: Listed, node: Option<Node>, driver: Option<DriverId>, bus: LazyBus) -> Self {
        Device {
            name: listed.name,
            index: Some(listed.index),
            node,
            node_type: listed.node_type,
            node_guid: listed.node_guid,
            sys_image_guid: listed.sys_image_guid,
            firmware: listed.firmware,
            ports: listed.ports,
            protocol: listed.protocol,
            // A driver that keeps its id to itself is known by its PCI function.
            driver: driver.or_else(|| bus.get().pci.and_then(driver_id::driver_of_pci)),
            bus,
            path: None,
            described: true,
            platform: Platform::LINUX,
        }
    }

    /// A device that does not exist, for tests with a scripted kernel.
    #[cfg(test)]
    pub(crate) fn planted(name: &str, driver: DriverId, ports: u32) -> Device {
        let number = DeviceNumber { major: 231, minor: 192 };
        let abi = if driver == DriverId::RXE { 2 } else { 1 };
        let node = Node { name: "uverbs0".into(), number, abi };
        let listed = Listed { name: name.into(), ports, ..Listed::default() };
        Device {
            index: None,
            ..Device::new(listed, Some(node), Some(driver), sysfs::Bus::default().into())
        }
    }

    /// The device with this name ("mlx5_0", "rxe0"), or else with a node of this name ("uverbs0").
    ///
    /// # Errors
    ///
    /// `ENODEV` if there is none, with the names of the devices that exist; otherwise as [`devices`].
    pub fn by_name(name: &str) -> Result<Device> {
        let mut devices = devices()?;
        let named = devices.iter().position(|device| device.name == name);
        let by_node = || devices.iter().position(|device| device.uverbs_name() == Some(name));
        match named.or_else(by_node) {
            Some(place) => Ok(devices.swap_remove(place)),
            None => Err(absent(name, &devices)),
        }
    }

    /// The name, for example "mlx5_0"; the node's name for a device that is not
    /// [described](Self::is_described).
    #[doc(alias = "ibv_get_device_name")]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether netlink or sysfs described the device. Otherwise only its node and its driver are known,
    /// which the library asked the device for; ports, GUIDs and firmware are known once it is open
    /// ([`Context::device`](crate::Context::device)). Calls that need more say so.
    pub fn is_described(&self) -> bool {
        self.described
    }

    /// The device's folder in sysfs, whether or not sysfs is mounted; `device` in it leads to the PCI
    /// function.
    #[doc(alias = "ibdev_path")]
    pub fn sysfs_path(&self) -> std::path::PathBuf {
        std::path::Path::new("/sys/class/infiniband").join(&self.name)
    }

    /// The kernel's number for the device; not used again soon after the device is gone. `None`
    /// without netlink.
    #[doc(alias = "ibv_get_device_index")]
    pub fn index(&self) -> Option<u32> {
        self.index
    }

    /// The name of the uverbs node, for example "uverbs0"; `None` for a device that user space
    /// cannot open.
    pub fn uverbs_name(&self) -> Option<&str> {
        Some(&self.node.as_ref()?.name)
    }

    /// The path of the uverbs node, `/dev/infiniband/uverbs0` for example: the one given to
    /// [`by_path`](Self::by_path), or the one where udev makes it. A container needs it. The path was not checked and
    /// may lead to nothing. `None` for a device that user space cannot open.
    #[doc(alias = "dev_path")]
    pub fn node_path(&self) -> Option<PathBuf> {
        let named = || Some(PathBuf::from("/dev/infiniband").join(self.uverbs_name()?));
        self.path.clone().or_else(named)
    }

    /// The number of the uverbs node.
    pub fn device_number(&self) -> Option<DeviceNumber> {
        Some(self.node.as_ref()?.number)
    }

    /// The node type; `None` if the kernel did not say.
    pub fn node_type(&self) -> Option<NodeType> {
        self.node_type
    }

    /// The transport that goes with the node type.
    pub fn transport(&self) -> Transport {
        self.node_type.map_or(Transport::Unknown, NodeType::transport)
    }

    /// The wire protocol of the first port; `None` for a device with one of its own.
    pub fn protocol(&self) -> Option<&Protocol> {
        self.protocol.as_ref()
    }

    /// The GUID of the device; zero if it has none.
    #[doc(alias = "ibv_get_device_guid")]
    pub fn node_guid(&self) -> Guid {
        self.node_guid
    }

    /// The GUID of the system or board that the device belongs to; zero if it has none.
    pub fn sys_image_guid(&self) -> Guid {
        self.sys_image_guid
    }

    /// The firmware's version; `None` where there is no firmware.
    pub fn firmware(&self) -> Option<&str> {
        self.firmware.as_deref()
    }

    /// The number of ports; ports count from 1. 0 for a device that is not
    /// [described](Self::is_described) and not open.
    pub fn port_count(&self) -> u32 {
        self.ports
    }

    /// The kernel driver; `None` if neither the kernel, the PCI function nor the node tells.
    pub fn driver(&self) -> Option<DriverId> {
        self.driver
    }

    /// The version of the driver's own part of the uverbs ABI; `None` without a uverbs node, and for a
    /// device that is not [described](Self::is_described).
    pub fn driver_abi(&self) -> Option<u32> {
        Some(self.node.as_ref().filter(|_| self.described)?.abi)
    }

    /// The PCI function, looked up when it is asked for the first time; `None` for software devices
    /// and other buses, and for a device that is gone by then.
    pub fn pci_id(&self) -> Option<PciId> {
        self.bus.get().pci
    }

    /// The NUMA node that the device is attached to, looked up with [`pci_id`](Self::pci_id); `None`
    /// if it is near none in particular.
    pub fn numa_node(&self) -> Option<u32> {
        self.bus.get().numa_node
    }

    /// Whether this library can open the device.
    pub fn is_supported(&self) -> bool {
        self.provider().is_ok()
    }

    /// The network interface behind a port, counted from 1; asked of the kernel anew each time.
    /// `None` if the port has none or has one in another network namespace.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there is no such port; `ENODEV` if the device is gone; `EOPNOTSUPP` if it is not
    /// [described](Self::is_described).
    pub fn netdev(&self, port: u32) -> Result<Option<String>> {
        const VERB: &str = "query_netdev";
        self.check_described(VERB, "the network interface; `GidEntry::ifindex` has its number")?;
        self.check_port(VERB, port)?;
        if let Some(system) = self.platform.hosted() {
            return hosted::netdev(VERB, system, self, port);
        }
        match self.index {
            Some(index) => {
                Client::open(VERB)?.port_netdev(index, port).map_err(|error| self.gone(error))
            }
            None => Ok(Sysfs::system().port_netdev(&self.name, port)),
        }
    }

    /// The system that the device belongs to.
    pub(crate) fn platform(&self) -> &Platform {
        &self.platform
    }

    /// Refuses, on behalf of `verb`, a question `what` that cannot be answered for a device of
    /// which only the node is known.
    pub(crate) fn check_described(&self, verb: &'static str, what: &str) -> Result<()> {
        if self.described {
            return Ok(());
        }
        Err(Error::new(verb, Errno::OPNOTSUPP).detail(format!(
            "this process has neither RDMA netlink nor sysfs of {}; only these tell {what}",
            self.name
        )))
    }

    /// Refuses a port that the device does not have, on behalf of `verb`.
    pub(crate) fn check_port(&self, verb: &'static str, port: u32) -> Result<()> {
        if (1..=self.ports).contains(&port) {
            return Ok(());
        }
        let detail = format!("port {port} of {}, which has ports 1 to {}", self.name, self.ports);
        Err(Error::invalid(verb, detail))
    }

    /// The number of objects of each kind on the device, in all processes and the kernel.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device was listed without netlink; `ENODEV` if it is gone.
    pub fn resources(&self) -> Result<ResourceCounts> {
        const VERB: &str = "query_resources";
        let Some(index) = self.index else {
            return Err(Error::new(VERB, Errno::OPNOTSUPP)
                .detail(format!("only RDMA netlink counts the objects of {}", self.name)));
        };
        if let Some(system) = self.platform.hosted() {
            return hosted::resources(VERB, system, self, index);
        }
        Client::open(VERB)?.resources(index).map_err(|error| self.gone(error))
    }

    /// "Invalid argument" to a well-formed question about a device means that the device is gone.
    fn gone(&self, error: Error) -> Error {
        match error.kernel_errno() {
            Some(Errno::INVAL) => Error::new(error.verb(), Errno::NODEV)
                .detail(format!("{} is gone; list the devices afresh", self.name)),
            _ => error.context(|| format!("RDMA netlink tells nothing of {}", self.name)),
        }
    }

    /// The name of the driver, for errors.
    fn driver_name(&self) -> String {
        match self.driver {
            Some(driver) => driver.to_string(),
            None => self.bus.get().kernel_driver.unwrap_or_else(|| "unknown".into()),
        }
    }

    /// The provider that drives this device's queues. `EOPNOTSUPP` if there is none, or none for
    /// this version of the driver's ABI.
    pub(crate) fn provider(&self) -> Result<ProviderKind> {
        let node = self.node()?;
        let driver = self.driver.unwrap_or(DriverId::new(0));
        if !self.described {
            // The version is unknown. The provider knows every one that its driver had since uverbs has ioctls.
            return driver_id::any_provider_of(driver).ok_or_else(|| self.no_provider());
        }
        driver_id::provider_of(driver, node.abi).map_err(|mismatch| {
            let (name, driver) = (&self.name, self.driver_name());
            match mismatch {
                Mismatch::Driver => self.no_provider(),
                Mismatch::Abi(known) => Error::new(OPEN, Errno::OPNOTSUPP).detail(format!(
                    "driver {driver} of {name} has ABI version {}, the provider knows {} to {}",
                    node.abi,
                    known.start(),
                    known.end()
                )),
            }
        })
    }

    fn no_provider(&self) -> Error {
        let (name, driver) = (&self.name, self.driver_name());
        Error::new(OPEN, Errno::OPNOTSUPP)
            .detail(format!("no provider for driver {driver} of {name}; there are rxe and mlx5"))
    }

    /// Opens the uverbs node for reading and writing, closed on exec. The file is checked to be the
    /// very device that was listed.
    pub(crate) fn open_node(&self, epoch: Epoch) -> Result<OpenFile> {
        let node = self.node()?;
        if let Some(system) = self.platform.hosted() {
            return hosted::open(OPEN, system, self, epoch);
        }
        let fd = match &self.path {
            Some(path) => cdev::open_at(OPEN, &self.name, node, path)?,
            None => Nodes::system().open(OPEN, &self.name, node)?,
        };
        // A new device may have got the node's name and number of one that is gone. Its index is
        // another, and while the file is open the number stays with the device that it leads to.
        if let (Some(index), Ok(mut client)) = (self.index, Client::open(OPEN)) {
            self.confirm(client.uverbs_node(index)?, node)?;
        }
        Ok(fd.into())
    }

    /// Checks that the node is still this device's.
    fn confirm(&self, answer: NodeAnswer, node: &Node) -> Result<()> {
        match answer {
            NodeAnswer::Node(uverbs) if uverbs.node.number == node.number => Ok(()),
            _ => Err(Error::new(OPEN, Errno::NODEV).detail(format!(
                "{} is gone and its node is another device's by now; list the devices afresh",
                self.name
            ))),
        }
    }

    fn node(&self) -> Result<&Node> {
        self.node.as_ref().ok_or_else(|| {
            Error::new(OPEN, Errno::NODEV).detail(format!(
                "{} has no uverbs node; load the module ib_uverbs, unless the device is for the \
                 kernel only",
                self.name
            ))
        })
    }
}

fn absent(name: &str, devices: &[Device]) -> Error {
    let names: Vec<_> = devices.iter().map(Device::name).collect();
    let present = if names.is_empty() { "none".into() } else { names.join(", ") };
    Error::new("find_device", Errno::NODEV)
        .detail(format!("there is no RDMA device {name:?}; there is: {present}"))
}

impl fmt::Display for Device {
    /// The name and the driver: `mlx5_0 (mlx5)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.driver_name())
    }
}

#[cfg(test)]
mod tests;
