//! One device: its node, whether it opens and registers memory, and its ports.

use super::machine::series;
use super::{Findings, flow_control, peer};
use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use uverbs::device::DriverId;
use uverbs::{Context, Device, Errno, GidFilter, LinkLayer, PortState};

/// Bytes of the region that is registered for a test: within the smallest useful limit of locked memory.
const REGION: usize = 64 << 10;
/// The usual mode of a node, which lets all users work with a device. The kernel checks each command.
const USUAL_MODE: u32 = 0o666;
/// The first kernel in which soft-RoCE waits for a timer after an RNR NAK.
const RNR_TIMER: (u32, u32) = (6, 0);

/// Looks at a device; returns whether one of its ports is on the route to the peer.
pub(super) fn look(device: &Device, peer: Option<IpAddr>, findings: &mut Findings) -> bool {
    findings.about(device.to_string());
    if !device.is_supported() {
        let message = match Context::open(device) {
            Err(error) => error.to_string(),
            Ok(_) => "it opens".into(),
        };
        findings.note("driver", message);
        return false;
    }
    let firmware = device.firmware().map(|version| format!(", firmware {version}"));
    let driver = device.driver().map(|driver| driver.to_string()).unwrap_or_default();
    findings.ok("driver", format!("{driver}{}", firmware.unwrap_or_default()));
    if device.driver() == Some(DriverId::RXE) {
        soft_roce(&rustix::system::uname().release().to_string_lossy(), findings);
    }
    node(device, findings);
    let context = match Context::open(device) {
        Ok(context) => context,
        Err(error) => {
            findings.failed("open", error);
            return false;
        }
    };
    findings.ok("open", "it opens");
    register(&context, findings);
    let mut reaches = false;
    for number in 1..=context.device().port_count() {
        findings.about(format!("{device} port {number}"));
        reaches |= port(&context, number, peer, findings);
    }
    reaches
}

/// Warns of older kernels, in which soft-RoCE repeats a message without a receive in an endless loop.
fn soft_roce(release: &str, findings: &mut Findings) {
    if series(release).is_some_and(|series| series < RNR_TIMER) {
        findings.warning(
            "soft-roce",
            "before Linux 6.0 soft-RoCE sends a message that finds no receive again at once: between two \
             queue pairs of this device that can take a processor until the next boot",
            "boot Linux 6.1 or later; else post receives before the peer sends, or set rnr_retry below 7",
        );
    }
}

fn node(device: &Device, findings: &mut Findings) {
    let Some(name) = device.uverbs_name() else { return };
    let path = format!("/dev/infiniband/{name}");
    let Ok(node) = fs::metadata(&path) else { return };
    let mode = node.permissions().mode() & 0o777;
    if mode & USUAL_MODE == USUAL_MODE {
        findings.ok("node", format!("{path} has mode {mode:04o}"));
    } else {
        findings.warning(
            "node",
            format!("{path} has mode {mode:04o}, user {} and group {}", node.uid(), node.gid()),
            format!("other users cannot open it: `chmod 666 {path}`, and a udev rule to keep it"),
        );
    }
}

fn register(context: &Context, findings: &mut Findings) {
    let made = context.alloc_pd().and_then(|pd| pd.mr_builder().allocate::<u8>(REGION).map(drop));
    match made {
        Ok(()) => findings.ok("memory", format!("{} KiB can be registered", REGION >> 10)),
        Err(error) => findings.failed("memory", error),
    }
}

/// Looks at a port; returns whether it is on the route to the peer.
fn port(context: &Context, number: u32, peer: Option<IpAddr>, findings: &mut Findings) -> bool {
    let attr = match context.query_port(number) {
        Ok(attr) => attr,
        Err(error) => {
            findings.failed("link", error);
            return false;
        }
    };
    let netdev = context.device().netdev(number).ok().flatten();
    let rate = attr.link_rate_mbps().map(|mbps| format!(", {} Gbit/s", f64::from(mbps) / 1000.0));
    if attr.state == PortState::ACTIVE {
        let rate = rate.unwrap_or_default();
        findings.ok("link", format!("{}, {}{rate}", attr.state, attr.link_layer));
    } else {
        let advice = match &netdev {
            Some(netdev) => format!("`ip link set {netdev} up`, and see that it has a carrier"),
            None => "see the cable and, on InfiniBand, that a subnet manager runs".into(),
        };
        findings.problem("link", format!("{}, {}", attr.state, attr.phys_state), advice);
    }

    let filter = peer.map_or(GidFilter::new(), |peer| GidFilter::new().peer(peer));
    let chosen = context.choose_gid(number, &filter);
    let reaches = peer.is_some() && chosen.is_ok();
    match &chosen {
        Ok(chosen) => {
            findings.ok("gid", format!("index {}: {}", chosen.entry.index, chosen.reason));
        }
        Err(error) if error.errno() == Errno::NODATA => {
            match (peer, context.default_gid(number)) {
                (Some(peer), Ok(_)) => off_route(peer, error, findings),
                _ => {
                    let netdev = netdev.as_deref().unwrap_or("INTERFACE");
                    findings.problem(
                        "gid",
                        error.message(),
                        format!("`ip link set {netdev} up`, and give it an address of the peers' network"),
                    );
                }
            }
        }
        Err(error) => findings.failed("gid", error.clone()),
    }

    if attr.link_layer == LinkLayer::ETHERNET {
        ethernet(netdev.as_deref(), &attr, findings);
        if let (Some(peer), Ok(chosen), Some(mtu)) = (peer, &chosen, attr.active_mtu.bytes()) {
            peer::look(chosen.entry.gid.ip(), peer, mtu, findings);
        }
        if let Some(netdev) = &netdev {
            flow_control::look(context.device().name(), number, netdev, findings);
        }
    }
    reaches
}

/// Notes that a port has a GID, but that packets to the peer do not leave through it.
fn off_route(peer: IpAddr, error: &uverbs::Error, findings: &mut Findings) {
    findings.note("gid", format!("not on the route to {peer}: {}", error.message()));
}

fn ethernet(netdev: Option<&str>, attr: &uverbs::PortAttr, findings: &mut Findings) {
    let netdev = netdev.unwrap_or("INTERFACE");
    let path = attr.active_mtu.bytes().unwrap_or(0);
    let interface = fs::read_to_string(format!("/sys/class/net/{netdev}/mtu"));
    let interface = interface.ok().map_or("unknown".into(), |mtu| mtu.trim().to_owned());
    let message = format!("{path} bytes on the path, {interface} on {netdev}");
    if attr.active_mtu < attr.max_mtu {
        findings.note(
            "mtu",
            format!(
                "{message}; `ip link set {netdev} mtu 9000` gives {}, if switch and peers have it",
                attr.max_mtu.bytes().unwrap_or(0)
            ),
        );
    } else {
        findings.ok("mtu", message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft_roce_that_sends_again_at_once_is_warned_of() {
        let warns = |release| {
            let mut findings = Findings::default();
            soft_roce(release, &mut findings);
            !findings.found.is_empty()
        };
        assert!(warns("5.10.0-32-amd64") && warns("5.19.17"));
        assert!(!warns("6.1.0-50-amd64") && !warns("7.3.4") && !warns("unknown"));
    }
}
