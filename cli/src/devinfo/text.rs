//! Devices for people to read.

use super::description::{Description, GidDescription, PortDescription};
use crate::output::out;
use std::fmt::{self, Write};

/// The column where values start.
const COLUMN: usize = 18;

pub(crate) fn print(description: &Description, verbose: bool) {
    out!("{}", Text { description, verbose });
}

struct Text<'a> {
    description: &'a Description,
    verbose: bool,
}

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.description;
        writeln!(f, "{}", device.name)?;
        line(f, 2, "driver", &driver(device))?;
        line(f, 2, "transport", &transport(device))?;
        line(f, 2, "node GUID", &device.node_guid)?;
        line(f, 2, "system GUID", &device.sys_image_guid)?;
        some(f, 2, "firmware", device.firmware.as_deref())?;
        some(f, 2, "PCI", device.pci_id.as_deref())?;
        some(f, 2, "NUMA node", device.numa_node)?;
        some(f, 2, "vectors", device.completion_vectors)?;
        some(f, 2, "not opened", device.error.as_deref())?;
        if let Some(limits) = self.description.limits.as_ref().filter(|_| self.verbose) {
            writeln!(f, "  limits")?;
            for (name, value) in limits.iter() {
                writeln!(f, "    {name:<26}{value}")?;
            }
        }
        device.ports.iter().try_for_each(|port| self.port(f, port))
    }
}

impl Text<'_> {
    fn port(&self, f: &mut fmt::Formatter<'_>, port: &PortDescription) -> fmt::Result {
        let mut heading = port.state.clone().unwrap_or_else(|| "state unknown".into());
        for part in [&port.physical_state, &port.link_layer, &port.netdev].into_iter().flatten() {
            write!(heading, ", {part}")?;
        }
        line(f, 2, &format!("port {}", port.port), &heading)?;
        if let (Some(active), Some(max)) = (port.active_mtu, port.max_mtu) {
            line(f, 4, "MTU", &format!("{active}, at most {max}"))?;
        }
        if let Some(rate) = port.gbit_per_second {
            let lanes = port.width_and_speed.as_deref().map(|text| format!(" ({text})"));
            line(f, 4, "speed", &format!("{rate} Gbit/s{}", lanes.unwrap_or_default()))?;
        }
        // On Ethernet packets are addressed by GID, and a subnet manager's LIDs mean nothing.
        if port.lid.is_some_and(|lid| lid != 0) || port.link_layer.as_deref() == Some("InfiniBand")
        {
            some(f, 4, "LID", port.lid.map(|lid| format!("{lid:#06x}")))?;
            some(f, 4, "SM LID", port.sm_lid.map(|lid| format!("{lid:#06x}")))?;
        }
        if self.verbose {
            self.port_details(f, port)?;
        }
        self.gids(f, port)
    }

    fn port_details(&self, f: &mut fmt::Formatter<'_>, port: &PortDescription) -> fmt::Result {
        some(f, 4, "LMC", port.lmc)?;
        some(f, 4, "SM SL", port.sm_sl)?;
        some(f, 4, "longest message", port.max_msg_size)?;
        some(f, 4, "capabilities", port.caps.as_ref().map(|caps| caps.join(" ")))?;
        some(f, 4, "capability bits", port.caps_bits.map(|bits| format!("{bits:#010x}")))?;
        some(f, 4, "GRH required", port.grh_required)?;
        some(f, 4, "max VL", port.max_vl_num)?;
        some(f, 4, "subnet timeout", port.subnet_timeout)?;
        some(f, 4, "init type", port.init_type_reply)?;
        some(f, 4, "bad P_Keys", port.bad_pkey_count)?;
        some(f, 4, "bad Q_Keys", port.qkey_violation_count)?;
        some(f, 4, "P_Key table", port.pkey_table_len)?;
        some(f, 4, "GID table", port.gid_table_len)
    }

    /// The table of GIDs, or its default entry only.
    fn gids(&self, f: &mut fmt::Formatter<'_>, port: &PortDescription) -> fmt::Result {
        let is_default = |gid: &&GidDescription| Some(gid.index) == port.default_gid_index;
        if !self.verbose {
            let Some(gid) = port.gids.iter().find(is_default).or(port.gids.first()) else {
                return Ok(());
            };
            let others = match port.gids.len() {
                1 => String::new(),
                count => format!("; {} more with -v", count - 1),
            };
            return line(f, 4, "GID", &format!("{}{others}", entry(gid)));
        }
        for gid in &port.gids {
            let mark = if is_default(&gid) { ", chosen by default" } else { "" };
            line(f, 4, &format!("GID {}", gid.index), &format!("{}{mark}", value(gid)))?;
        }
        Ok(())
    }
}

fn driver(device: &Description) -> String {
    let mut text = device.driver.clone().unwrap_or_else(|| "unknown".into());
    if let Some(abi) = device.driver_abi {
        text += &format!(", ABI {abi}");
    }
    if let Some(node) = &device.uverbs {
        text += &format!(", /dev/infiniband/{node}");
    }
    if !device.supported {
        text += "; no provider";
    }
    text
}

fn transport(device: &Description) -> String {
    let mut text = device.transport.clone();
    for part in [&device.protocol, &device.node_type].into_iter().flatten() {
        text += &format!(", {part}");
    }
    text
}

/// `1: ::ffff:10.0.0.1 (RoCE v2)`
fn entry(gid: &GidDescription) -> String {
    format!("{}: {}", gid.index, value(gid))
}

fn value(gid: &GidDescription) -> String {
    let qualities: Vec<&str> =
        [&gid.gid_type, &gid.netdev].into_iter().flatten().map(String::as_str).collect();
    match qualities.is_empty() {
        true => gid.gid.clone(),
        false => format!("{} ({})", gid.gid, qualities.join(", ")),
    }
}

fn line(f: &mut fmt::Formatter<'_>, indent: usize, what: &str, value: &str) -> fmt::Result {
    let width = COLUMN + 4 - indent;
    writeln!(f, "{:indent$}{what:<width$}{value}", "")
}

fn some(
    f: &mut fmt::Formatter<'_>,
    indent: usize,
    what: &str,
    value: Option<impl fmt::Display>,
) -> fmt::Result {
    match value {
        Some(value) => line(f, indent, what, &value.to_string()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u32, gid: &str) -> GidDescription {
        GidDescription {
            index,
            gid: gid.into(),
            gid_type: Some("RoCE v2".into()),
            netdev: Some("h0".into()),
        }
    }

    fn description() -> Description {
        Description {
            name: "rxe0".into(),
            uverbs: Some("uverbs0".into()),
            transport: "InfiniBand".into(),
            protocol: Some("RoCE".into()),
            node_guid: "505a:00ff:fe00:0001".into(),
            sys_image_guid: "505a:00ff:fe00:0001".into(),
            driver: Some("rxe".into()),
            driver_abi: Some(2),
            supported: true,
            ports: vec![PortDescription {
                port: 1,
                state: Some("active".into()),
                link_layer: Some("Ethernet".into()),
                netdev: Some("h0".into()),
                active_mtu: Some(1024),
                max_mtu: Some(4096),
                lid: Some(0),
                gbit_per_second: Some(2.5),
                width_and_speed: Some("1x SDR".into()),
                default_gid_index: Some(1),
                gids: vec![gid(0, "fe80::1"), gid(1, "::ffff:10.0.0.1")],
                ..PortDescription::default()
            }],
            ..Description::default()
        }
    }

    #[test]
    fn a_device_in_short() {
        let text = Text { description: &description(), verbose: false }.to_string();
        let expected = "\
rxe0
  driver              rxe, ABI 2, /dev/infiniband/uverbs0
  transport           InfiniBand, RoCE
  node GUID           505a:00ff:fe00:0001
  system GUID         505a:00ff:fe00:0001
  port 1              active, Ethernet, h0
    MTU               1024, at most 4096
    speed             2.5 Gbit/s (1x SDR)
    GID               1: ::ffff:10.0.0.1 (RoCE v2, h0); 1 more with -v
";
        assert_eq!(text, expected);
    }

    #[test]
    fn all_of_the_gids() {
        let text = Text { description: &description(), verbose: true }.to_string();
        assert!(text.contains("    GID 0             fe80::1 (RoCE v2, h0)\n"), "{text}");
        assert!(text.contains("::ffff:10.0.0.1 (RoCE v2, h0), chosen by default\n"), "{text}");
    }

    #[test]
    fn a_device_without_provider_says_so() {
        let description = Description {
            supported: false,
            driver: Some("bnxt_re".into()),
            error: Some("open_device: no provider".into()),
            ..description()
        };
        let text = Text { description: &description, verbose: false }.to_string();
        assert!(text.contains("bnxt_re, ABI 2, /dev/infiniband/uverbs0; no provider\n"), "{text}");
        assert!(text.contains("  not opened          open_device: no provider\n"), "{text}");
        assert!(text.contains("port 1"), "{text}");
    }
}
