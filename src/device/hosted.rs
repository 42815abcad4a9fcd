//! Devices of a hosted kernel, which stands for Linux in this process.

use super::cdev::{DeviceNumber, Node};
use super::nldev::Listed;
use super::resources::ResourceCounts;
use super::sysfs::Bus;
use super::{Device, DriverId, Guid, NodeType, Protocol};
use crate::error::{Error, Result};
use crate::platform::Platform;
use crate::sync::fork::Epoch;
use crate::uverbs::open_file::OpenFile;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_host::{HostDevice, HostSystem};

/// The description of a device.
pub(super) fn device(system: &Arc<dyn HostSystem>, device: HostDevice) -> Device {
    let (major, minor) = device.number;
    let node = Node { name: device.node, number: DeviceNumber { major, minor }, abi: device.abi };
    let listed = Listed {
        index: device.index,
        name: device.name,
        ports: device.interfaces.len() as u32,
        firmware: Some(device.firmware).filter(|version| !version.is_empty()),
        node_guid: Guid::new(device.node_guid),
        sys_image_guid: Guid::new(device.sys_image_guid),
        node_type: Some(NodeType::new(device.node_type)),
        protocol: Some(Protocol::from_kernel(&device.protocol)),
    };
    let driver = Some(DriverId::new(device.driver));
    Device {
        platform: Platform::from(system.clone()),
        ..Device::new(listed, Some(node), driver, Bus::default().into())
    }
}

/// The error of a question about a device that is gone.
fn gone(verb: &'static str, device: &Device, errno: Errno) -> Error {
    let error = Error::from_kernel(verb, errno);
    match errno {
        Errno::NODEV => error.detail(format!(
            "{} is gone, or in the process that this one was forked from",
            device.name
        )),
        _ => device.gone(error),
    }
}

/// Opens a device's node.
pub(super) fn open(
    verb: &'static str,
    system: &Arc<dyn HostSystem>,
    device: &Device,
    epoch: Epoch,
) -> Result<OpenFile> {
    let index = device.index.unwrap_or_default();
    let file = system.open(index).map_err(|errno| gone(verb, device, errno))?;
    Ok(OpenFile::hosted(file, epoch))
}

/// The network interface behind a port.
pub(super) fn netdev(
    verb: &'static str,
    system: &Arc<dyn HostSystem>,
    device: &Device,
    port: u32,
) -> Result<Option<String>> {
    let found = system.devices().into_iter().find(|found| Some(found.index) == device.index);
    let found = found.ok_or_else(|| gone(verb, device, Errno::INVAL))?;
    Ok(found.interfaces.into_iter().nth(port as usize - 1).flatten())
}

impl Device {
    /// A partition key of a port of a hosted system's device.
    pub(crate) fn hosted_pkey(&self, port: u32, index: u16) -> Option<u16> {
        let devices = self.platform.hosted()?.devices();
        let found = devices.into_iter().find(|found| Some(found.index) == self.index)?;
        let port = (port as usize).checked_sub(1)?;
        found.pkeys.get(port)?.get(usize::from(index)).copied()
    }
}

/// The number of objects of each kind on a device.
pub(super) fn resources(
    verb: &'static str,
    system: &Arc<dyn HostSystem>,
    device: &Device,
    index: u32,
) -> Result<ResourceCounts> {
    let counts = system.resources(index).map_err(|errno| match errno {
        Errno::NODEV => gone(verb, device, Errno::INVAL),
        errno => gone(verb, device, errno),
    })?;
    let mut resources = ResourceCounts::default();
    counts.into_iter().for_each(|(kind, count)| resources.insert(kind, count));
    Ok(resources)
}

/// The device behind an open file of a hosted kernel; `None` for a file of Linux.
pub(super) fn of_file(verb: &'static str, fd: BorrowedFd<'_>) -> Option<Result<Device>> {
    let (system, index) = uverbs_host::device_of(fd)?;
    let index = match index {
        Ok(index) => index,
        Err(errno) => return Some(Err(Error::from_kernel(verb, errno))),
    };
    let found = system.devices().into_iter().find(|device| device.index == index);
    let found = found.map(|found| device(&system, found));
    Some(found.ok_or_else(|| Error::from_kernel(verb, Errno::IO).detail("the device is gone")))
}
