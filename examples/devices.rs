//! Lists the RDMA devices of this machine with their driver, their attributes, and the numbers of
//! objects on them.

use std::process::ExitCode;
use uverbs::device::{self, Device};

fn main() -> ExitCode {
    match print() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn print() -> uverbs::Result<()> {
    let devices = device::devices()?;
    if devices.is_empty() {
        println!("no RDMA devices");
        return Ok(());
    }
    let system = device::system()?;
    println!("copy on fork: {}, shared: {:?}", system.copy_on_fork, system.netns_shared);
    for device in &devices {
        describe(device)?;
    }
    Ok(())
}

fn describe(device: &Device) -> uverbs::Result<()> {
    println!("{device}");
    line("supported", device.is_supported());
    some("index", device.index());
    some("uverbs", device.uverbs_name());
    some("number", device.device_number());
    some("node type", device.node_type());
    line("transport", device.transport());
    some("protocol", device.protocol());
    line("node GUID", device.node_guid());
    line("system GUID", device.sys_image_guid());
    some("firmware", device.firmware());
    some("driver ABI", device.driver_abi());
    some("PCI", device.pci_id());
    some("NUMA node", device.numa_node());
    for port in 1..=device.port_count() {
        some(&format!("port {port}"), device.netdev(port)?);
    }
    line("objects", device.resources()?);
    Ok(())
}

fn line(what: &str, value: impl std::fmt::Display) {
    println!("  {what:<12} {value}");
}

fn some(what: &str, value: Option<impl std::fmt::Display>) {
    if let Some(value) = value {
        line(what, value);
    }
}
