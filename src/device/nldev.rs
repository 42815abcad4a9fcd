//! The questions that RDMA netlink answers about devices, and their answers. Pairs with
//! `uverbs_uapi::nldev`; `netlink.rs` carries the messages.

use super::cdev::{DeviceNumber, Node};
use super::driver_id::DriverId;
use super::guid::Guid;
use super::netlink::{Attributes, Client, Malformed, NetlinkTransport, Request};
use super::node_type::NodeType;
use super::protocol::Protocol;
use super::resources::ResourceCounts;
use super::system::System;
use crate::error::{Error, Result};
use rustix::io::Errno;
use uverbs_uapi::nldev::*;

type Parsed<T> = std::result::Result<T, Malformed>;

/// A device as the dump of all devices has it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) index: u32,
    pub(super) name: String,
    pub(super) ports: u32,
    pub(super) firmware: Option<String>,
    pub(super) node_guid: Guid,
    pub(super) sys_image_guid: Guid,
    pub(super) node_type: Option<NodeType>,
    pub(super) protocol: Option<Protocol>,
}

/// The uverbs node of a device, and the driver it leads to.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Uverbs {
    pub(super) node: Node,
    pub(super) driver: Option<DriverId>,
}

/// The answer to the question for a device's uverbs node.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NodeAnswer {
    /// It has one.
    Node(Uverbs),
    /// It has none: for the kernel only, or `ib_uverbs` is not loaded.
    None,
    /// The device itself is gone.
    Gone,
}

impl NodeAnswer {
    fn of(answer: Result<Uverbs>) -> Result<NodeAnswer> {
        match answer {
            Ok(uverbs) => Ok(NodeAnswer::Node(uverbs)),
            Err(error) => match error.kernel_errno() {
                Some(Errno::OPNOTSUPP | Errno::NOENT | Errno::NODEV) => Ok(NodeAnswer::None),
                // The request is well formed, so it is the index that is not valid any more.
                Some(Errno::INVAL) => Ok(NodeAnswer::Gone),
                _ => Err(error),
            },
        }
    }
}

fn node_request(index: u32) -> Request {
    Request::new(RDMA_NLDEV_CMD_GET_CHARDEV)
        .number(RDMA_NLDEV_ATTR_DEV_INDEX, index)
        .string(RDMA_NLDEV_ATTR_CHARDEV_TYPE, "uverbs")
}

impl<W: NetlinkTransport> Client<W> {
    /// All devices that this network namespace may see.
    pub(super) fn list(&mut self) -> Result<Vec<Listed>> {
        self.dump(&Request::new(RDMA_NLDEV_CMD_GET), listed)
    }

    /// The uverbs node of the device with this index.
    pub(super) fn uverbs_node(&mut self, index: u32) -> Result<NodeAnswer> {
        let answer = self.ask(&node_request(index), uverbs);
        NodeAnswer::of(answer)
    }

    /// The uverbs nodes of the devices with these indices, in their order.
    pub(super) fn uverbs_nodes(
        &mut self,
        indices: impl Iterator<Item = u32>,
    ) -> Result<Vec<NodeAnswer>> {
        let requests: Vec<Request> = indices.map(node_request).collect();
        self.ask_each(&requests, uverbs)?.into_iter().map(NodeAnswer::of).collect()
    }

    /// The node of the connection manager, which belongs to no device. The kernel tries to load its
    /// module before it answers that there is none.
    pub(super) fn rdma_cm_node(&mut self) -> Result<Node> {
        let request = Request::new(RDMA_NLDEV_CMD_GET_CHARDEV)
            .string(RDMA_NLDEV_ATTR_CHARDEV_TYPE, "rdma_cm");
        Ok(self.ask(&request, uverbs)?.node)
    }

    /// The network interface behind a port. `EINVAL` if there is no such device or port.
    pub(super) fn port_netdev(&mut self, index: u32, port: u32) -> Result<Option<String>> {
        let request = Request::new(RDMA_NLDEV_CMD_PORT_GET)
            .number(RDMA_NLDEV_ATTR_DEV_INDEX, index)
            .number(RDMA_NLDEV_ATTR_PORT_INDEX, port);
        self.ask(&request, netdev)
    }

    /// The number of objects of each kind on a device. `EINVAL` if there is no such device.
    pub(super) fn resources(&mut self, index: u32) -> Result<ResourceCounts> {
        let request = Request::new(RDMA_NLDEV_CMD_RES_GET).number(RDMA_NLDEV_ATTR_DEV_INDEX, index);
        self.ask(&request, resources)
    }

    /// Settings of the whole subsystem.
    pub(super) fn system(&mut self) -> Result<System> {
        self.ask(&Request::new(RDMA_NLDEV_CMD_SYS_GET), system)
    }

    /// Makes a software device.
    pub(super) fn new_link(&mut self, name: &str, kind: &str, netdev: &str) -> Result<()> {
        let request = Request::new(RDMA_NLDEV_CMD_NEWLINK)
            .string(RDMA_NLDEV_ATTR_DEV_NAME, name)
            .string(RDMA_NLDEV_ATTR_LINK_TYPE, kind)
            .string(RDMA_NLDEV_ATTR_NDEV_NAME, netdev);
        self.command(&request)
    }

    /// Removes a software device.
    pub(super) fn delete_link(&mut self, index: u32) -> Result<()> {
        let request = Request::new(RDMA_NLDEV_CMD_DELLINK).number(RDMA_NLDEV_ATTR_DEV_INDEX, index);
        self.command(&request)
    }
}

/// Whether an error of this module means that there is no RDMA netlink to ask, rather than that
/// the question went wrong.
pub(super) fn is_absent(error: &Error) -> bool {
    matches!(
        error.errno(),
        // No RDMA in the kernel, or no netlink in the sandbox.
        Errno::OPNOTSUPP | Errno::AFNOSUPPORT | Errno::SOCKTNOSUPPORT | Errno::PERM | Errno::ACCESS
    )
}

fn listed(attributes: Attributes<'_>) -> Parsed<Listed> {
    let mut index = None;
    let mut device = Listed::default();
    for attribute in attributes.iter() {
        let (kind, value) = attribute?;
        match kind {
            RDMA_NLDEV_ATTR_DEV_INDEX => index = Some(value.narrow()?),
            RDMA_NLDEV_ATTR_DEV_NAME => device.name = value.string(),
            RDMA_NLDEV_ATTR_PORT_INDEX => device.ports = value.narrow()?,
            RDMA_NLDEV_ATTR_FW_VERSION => {
                device.firmware = Some(value.string()).filter(|text| !text.is_empty());
            }
            RDMA_NLDEV_ATTR_NODE_GUID => device.node_guid = Guid::new(value.number()?),
            RDMA_NLDEV_ATTR_SYS_IMAGE_GUID => device.sys_image_guid = Guid::new(value.number()?),
            RDMA_NLDEV_ATTR_DEV_NODE_TYPE => {
                device.node_type = Some(NodeType::new(value.narrow()?));
            }
            RDMA_NLDEV_ATTR_DEV_PROTOCOL => {
                device.protocol = Some(Protocol::from_kernel(&value.string()));
            }
            _ => {}
        }
    }
    device.index = index.ok_or(Malformed("a device without index"))?;
    if device.name.is_empty() {
        return Err(Malformed("a device without name"));
    }
    Ok(device)
}

fn uverbs(attributes: Attributes<'_>) -> Parsed<Uverbs> {
    let (mut name, mut number, mut abi, mut driver) = (None, None, None, None);
    for attribute in attributes.iter() {
        let (kind, value) = attribute?;
        match kind {
            RDMA_NLDEV_ATTR_CHARDEV_NAME => name = Some(value.string()),
            RDMA_NLDEV_ATTR_CHARDEV => number = Some(DeviceNumber::from_kernel(value.number()?)),
            // The kernel widens a 32-bit version.
            RDMA_NLDEV_ATTR_CHARDEV_ABI => abi = Some(value.number()? as u32),
            // Zero: the driver has no id.
            RDMA_NLDEV_ATTR_UVERBS_DRIVER_ID => {
                driver = Some(DriverId::new(value.narrow()?)).filter(|driver| driver.get() != 0);
            }
            _ => {}
        }
    }
    match (name, number, abi) {
        (Some(name), Some(number), Some(abi)) if !name.is_empty() => {
            Ok(Uverbs { node: Node { name, number, abi }, driver })
        }
        _ => Err(Malformed("a character device without name, number or ABI version")),
    }
}

fn netdev(attributes: Attributes<'_>) -> Parsed<Option<String>> {
    let mut netdev = None;
    for attribute in attributes.iter() {
        let (kind, value) = attribute?;
        if kind == RDMA_NLDEV_ATTR_NDEV_NAME {
            netdev = Some(value.string());
        }
    }
    Ok(netdev)
}

fn resources(attributes: Attributes<'_>) -> Parsed<ResourceCounts> {
    let mut counts = None;
    for attribute in attributes.iter() {
        let (kind, value) = attribute?;
        if kind != RDMA_NLDEV_ATTR_RES_SUMMARY {
            continue;
        }
        let counts = counts.get_or_insert_with(ResourceCounts::default);
        for entry in value.nest().iter() {
            let (kind, entry) = entry?;
            if kind == RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY {
                let (name, count) = summary_entry(entry.nest())?;
                counts.insert(name, count);
            }
        }
    }
    counts.ok_or(Malformed("a resource summary without summary"))
}

fn summary_entry(attributes: Attributes<'_>) -> Parsed<(String, u64)> {
    let (mut name, mut count) = (None, None);
    for attribute in attributes.iter() {
        let (kind, value) = attribute?;
        match kind {
            RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_NAME => name = Some(value.string()),
            RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_CURR => count = Some(value.number()?),
            _ => {}
        }
    }
    name.zip(count).ok_or(Malformed("a resource count without name or number"))
}

fn system(attributes: Attributes<'_>) -> Parsed<System> {
    let mut system = System::default();
    for attribute in attributes.iter() {
        let (kind, value) = attribute?;
        match kind {
            RDMA_NLDEV_SYS_ATTR_NETNS_MODE => system.netns_shared = Some(value.number()? != 0),
            RDMA_NLDEV_SYS_ATTR_COPY_ON_FORK => system.copy_on_fork = value.number()? != 0,
            RDMA_NLDEV_SYS_ATTR_PRIVILEGED_QKEY_MODE => {
                system.privileged_qkey = Some(value.number()? != 0);
            }
            RDMA_NLDEV_SYS_ATTR_MONITOR_MODE => system.monitor = value.number()? != 0,
            _ => {}
        }
    }
    Ok(system)
}

#[cfg(test)]
mod tests;
