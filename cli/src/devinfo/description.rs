//! The full description of a device, in the form for programs.
//!
//! Fields keep their names, types and units; new ones may be added. A fact that is unknown, or that does not exist on a
//! device, is `null`.

use super::limits::Limits;
use super::sysfs;
use crate::failure::Failure;
use serde::Serialize;
use uverbs::{Context, Device, GidEntry, LinkSpeed, PortAttr, Result};

/// The object that `--json` prints.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Listing {
    /// Counts up if ever a field changes its meaning.
    schema: u32,
    pub(crate) devices: Vec<Description>,
}

impl Default for Listing {
    fn default() -> Self {
        Listing { schema: 1, devices: Vec::new() }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Description {
    pub(crate) name: String,
    pub(crate) index: Option<u32>,
    /// Name of the node in `/dev/infiniband`.
    pub(crate) uverbs: Option<String>,
    /// Major and minor number of the node.
    pub(crate) device_number: Option<String>,
    pub(crate) node_type: Option<String>,
    pub(crate) transport: String,
    pub(crate) protocol: Option<String>,
    pub(crate) node_guid: String,
    pub(crate) sys_image_guid: String,
    pub(crate) firmware: Option<String>,
    pub(crate) driver: Option<String>,
    pub(crate) driver_abi: Option<u32>,
    /// Vendor and device.
    pub(crate) pci_id: Option<String>,
    pub(crate) numa_node: Option<u32>,
    /// Whether this library has a provider for it.
    pub(crate) supported: bool,
    /// The reason that it was not opened. Ports are described from sysfs then, and `limits` is missing.
    pub(crate) error: Option<String>,
    pub(crate) completion_vectors: Option<u32>,
    pub(crate) ports: Vec<PortDescription>,
    pub(crate) limits: Option<Limits>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct PortDescription {
    pub(crate) port: u32,
    pub(crate) state: Option<String>,
    pub(crate) physical_state: Option<String>,
    pub(crate) link_layer: Option<String>,
    pub(crate) netdev: Option<String>,
    /// Bytes.
    pub(crate) max_mtu: Option<u32>,
    /// Bytes.
    pub(crate) active_mtu: Option<u32>,
    pub(crate) lid: Option<u16>,
    pub(crate) lmc: Option<u8>,
    pub(crate) sm_lid: Option<u16>,
    pub(crate) sm_sl: Option<u8>,
    /// Signalling rate of all lanes.
    pub(crate) gbit_per_second: Option<f64>,
    pub(crate) width_and_speed: Option<String>,
    /// Bytes.
    pub(crate) max_msg_size: Option<u32>,
    pub(crate) grh_required: Option<bool>,
    pub(crate) caps: Option<Vec<String>>,
    pub(crate) caps_bits: Option<u32>,
    pub(crate) caps2_bits: Option<u16>,
    pub(crate) max_vl_num: Option<u8>,
    pub(crate) subnet_timeout: Option<u8>,
    pub(crate) init_type_reply: Option<u8>,
    pub(crate) bad_pkey_count: Option<u32>,
    pub(crate) qkey_violation_count: Option<u32>,
    pub(crate) pkey_table_len: Option<u16>,
    pub(crate) gid_table_len: Option<u32>,
    /// Index of the GID that is used unless another is chosen.
    pub(crate) default_gid_index: Option<u32>,
    /// The table without its empty entries.
    pub(crate) gids: Vec<GidDescription>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct GidDescription {
    pub(crate) index: u32,
    pub(crate) gid: String,
    #[serde(rename = "type")]
    pub(crate) gid_type: Option<String>,
    pub(crate) netdev: Option<String>,
}

impl Description {
    /// Describes a device; with the failure if it has a provider and did not open.
    pub(crate) fn of(device: &Device) -> (Self, Option<Failure>) {
        let mut description = Description::unopened(device);
        let failure = match description.open(device) {
            Ok(()) => None,
            Err(error) => {
                description.error = Some(error.to_string());
                description.ports = sysfs::ports(device.name(), device.port_count());
                device.is_supported().then(|| Failure::from(error))
            }
        };
        for port in &mut description.ports {
            port.netdev = device.netdev(port.port).ok().flatten();
        }
        (description, failure)
    }

    fn unopened(device: &Device) -> Self {
        Description {
            name: device.name().to_owned(),
            index: device.index(),
            uverbs: device.uverbs_name().map(str::to_owned),
            device_number: device.device_number().map(|number| number.to_string()),
            node_type: device.node_type().map(|node_type| node_type.to_string()),
            transport: device.transport().to_string(),
            protocol: device.protocol().map(|protocol| protocol.to_string()),
            node_guid: device.node_guid().to_string(),
            sys_image_guid: device.sys_image_guid().to_string(),
            firmware: device.firmware().map(str::to_owned),
            driver: device.driver().map(|driver| driver.to_string()),
            driver_abi: device.driver_abi(),
            pci_id: device.pci_id().map(|pci| pci.to_string()),
            numa_node: device.numa_node(),
            supported: device.is_supported(),
            ..Description::default()
        }
    }

    /// Adds the facts that only an open device has.
    fn open(&mut self, device: &Device) -> Result<()> {
        let context = Context::open(device)?;
        // Without netlink and sysfs an open device has facts that the list of devices lacks.
        let device = context.device();
        *self = Description::unopened(device);
        let limits = Limits::of(&context.query_device()?);
        let table = context.gid_table()?;
        let mut ports = Vec::new();
        for number in 1..=device.port_count() {
            let attr = context.query_port(number)?;
            let gids = table.iter().filter(|entry| entry.port == number);
            ports.push(PortDescription {
                default_gid_index: context.default_gid(number).ok().map(|entry| entry.index),
                gids: gids.map(GidDescription::from).collect(),
                ..PortDescription::of(number, &attr)
            });
        }
        self.completion_vectors = Some(context.completion_vectors());
        self.limits = Some(limits);
        self.ports = ports;
        Ok(())
    }
}

impl PortDescription {
    fn of(port: u32, attr: &PortAttr) -> Self {
        let lanes = attr.active_width.lanes();
        let caps = attr.caps.iter_names().map(|(name, _)| name.to_ascii_lowercase());
        PortDescription {
            port,
            state: Some(attr.state.to_string()),
            physical_state: Some(attr.phys_state.to_string()),
            link_layer: Some(attr.link_layer.to_string()),
            netdev: None,
            max_mtu: attr.max_mtu.bytes(),
            active_mtu: attr.active_mtu.bytes(),
            lid: Some(attr.lid),
            lmc: Some(attr.lmc),
            sm_lid: Some(attr.sm_lid),
            sm_sl: Some(attr.sm_sl),
            gbit_per_second: lanes
                .zip(lane_rate(attr.active_speed))
                .map(|(lanes, rate)| f64::from(lanes) * rate),
            width_and_speed: lanes.map(|_| format!("{} {}", attr.active_width, attr.active_speed)),
            max_msg_size: Some(attr.max_msg_size),
            grh_required: Some(attr.grh_required),
            caps: Some(caps.collect()),
            caps_bits: Some(attr.caps.bits()),
            caps2_bits: Some(attr.caps2),
            max_vl_num: Some(attr.max_vl_num),
            subnet_timeout: Some(attr.subnet_timeout),
            init_type_reply: Some(attr.init_type_reply),
            bad_pkey_count: Some(attr.bad_pkey_count),
            qkey_violation_count: Some(attr.qkey_violation_count),
            pkey_table_len: Some(attr.pkey_table_len),
            gid_table_len: Some(attr.gid_table_len),
            default_gid_index: None,
            gids: Vec::new(),
        }
    }
}

impl From<&GidEntry> for GidDescription {
    fn from(entry: &GidEntry) -> Self {
        GidDescription {
            index: entry.index,
            gid: entry.gid.to_string(),
            gid_type: Some(entry.gid_type.to_string()),
            netdev: netdev_name(entry.ifindex),
        }
    }
}

/// The interface with an index, if it is in this network namespace.
fn netdev_name(ifindex: u32) -> Option<String> {
    if ifindex == 0 {
        return None;
    }
    let socket =
        rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None);
    rustix::net::netdevice::index_to_name(socket.ok()?, ifindex).ok()
}

/// Gbit/s of a lane as signalled, encoding included.
fn lane_rate(speed: LinkSpeed) -> Option<f64> {
    Some(match speed {
        LinkSpeed::SDR => 2.5,
        LinkSpeed::DDR => 5.0,
        LinkSpeed::QDR => 10.0,
        LinkSpeed::FDR10 => 10.3125,
        LinkSpeed::FDR => 14.0625,
        LinkSpeed::EDR => 25.78125,
        LinkSpeed::HDR => 53.125,
        LinkSpeed::NDR => 106.25,
        LinkSpeed::XDR => 212.5,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_for_programs_is_stable() {
        let mut listing = Listing::default();
        listing.devices.push(Description {
            name: "rxe0".into(),
            ports: vec![PortDescription {
                port: 1,
                gids: vec![GidDescription { index: 1, ..GidDescription::default() }],
                ..PortDescription::default()
            }],
            ..Description::default()
        });
        let value = serde_json::to_value(&listing).unwrap();
        assert_eq!(value["schema"], 1);
        let device = &value["devices"][0];
        let names: Vec<_> = device.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(
            names.join(" "),
            "completion_vectors device_number driver driver_abi error firmware index limits name \
             node_guid node_type numa_node pci_id ports protocol supported sys_image_guid \
             transport uverbs"
        );
        let port = &device["ports"][0];
        let names: Vec<_> = port.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(
            names.join(" "),
            "active_mtu bad_pkey_count caps caps2_bits caps_bits default_gid_index \
             gbit_per_second gid_table_len gids grh_required init_type_reply lid link_layer lmc \
             max_msg_size max_mtu max_vl_num netdev physical_state pkey_table_len port \
             qkey_violation_count sm_lid sm_sl state subnet_timeout width_and_speed"
        );
        let gid = &port["gids"][0];
        let names: Vec<_> = gid.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(names.join(" "), "gid index netdev type");
    }
}
