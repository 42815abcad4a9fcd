//! Devices, their kernel and their network in the program's own process: for tests, and for machines without RDMA.
//!
//! With the environment variable `UVERBS_SIM=2` a program has two devices, `mlx5_0` and `mlx5_1`, on one network,
//! and none of Linux's. It needs no privilege, no module and no hardware. A line on standard error says so. Programs
//! that run with another user's rights (set-user-id) ignore the variable.
//!
//! With `UVERBS_SIM=udp:ADDRESS`, or `udp:ADDRESS:PORT`, it has one device, which speaks RoCE v2 over a UDP socket at
//! that address: with other processes of this machine that have other addresses, of 127.0.0.0/8 for one, and with other
//! machines. `udp` alone is 127.0.0.1. RoCE has neither authentication nor encryption: `docs/TRANSPORT.md` of the
//! repository says what that means before you name an address that others reach. [`FabricBuilder::udp`] makes such a
//! device for a test.
//!
//! A test makes a [`Fabric`] of its own, so that tests run side by side:
//!
//! ```
//! use uverbs::device::devices_on;
//! use uverbs::sim::{Fabric, Mode};
//! use uverbs::Context;
//!
//! let fabric = Fabric::new(2, Mode::Trapped);
//! let [left, right] = &devices_on(&fabric.system())[..] else { panic!("two devices") };
//! let (left, right) = (Context::open(left)?, Context::open(right)?);
//! assert_eq!(left.default_gid(1)?.gid.ip().to_string(), "10.0.0.1");
//! # drop(right);
//! # Ok::<(), uverbs::Error>(())
//! ```
//!
//! Use it in tests, and to try a program without RDMA. It does not model the speed of a device, or soft-RoCE: a program
//! should meet a real kernel before its users.
//!
//! `docs/TESTING.md` of the repository tells how to test a program: faults, seeds, histories, replay, tokio.
//!
//! The devices stay with the process that made them. In a child of `fork` they are not listed, and every call fails
//! with `ENODEV` at once; the child may make a [`Fabric`] of its own, but gets none by the variable.
//!
//! The devices are emulated ConnectX-5s, which unmodified mlx5 drivers accept; the library drives them as it drives
//! hardware. **Unstable**: this interface changes in any release.

pub use uverbs_sim::{
    Clock, CqeError, Device, Fabric, FabricBuilder, FabricError, Findings, Limits, MAX_DEVICES,
    Mode, Network, POISON, PacketFault, PacketKind, Profile, ROCE_PORT, Rates, Side, Syndrome,
    Traffic, UdpCounters, Verb, each_seed,
};

#[cfg(feature = "tokio")]
mod clock;
#[cfg(feature = "tokio")]
pub use clock::TokioClock;

use rustix::process::{getegid, geteuid, getgid, getuid};
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Once;

/// The environment variable with the number of devices to emulate in the process, or with the address of one.
const VARIABLE: &str = "UVERBS_SIM";
/// Its value for a device over UDP begins so.
const UDP: &str = "udp";
/// The most devices that it may ask for.
const MOST: usize = 64;

/// Makes the fabric that the environment asks for, once.
pub(crate) fn install_from_environment() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let Some(asked) = std::env::var_os(VARIABLE) else { return };
        if getuid() != geteuid() || getgid() != getegid() {
            return;
        }
        if let Some(text) = asked.to_str().filter(|text| text.starts_with(UDP)) {
            return install_over_udp(text);
        }
        let count = asked.to_str().and_then(|text| text.parse().ok());
        let Some(count) = count.filter(|count| (1..=MOST).contains(count)) else {
            let asked = asked.to_string_lossy();
            return say(&format!(
                "uverbs: {VARIABLE}={asked} is ignored: it is a number of devices, 1 to {MOST}, or udp:ADDRESS:PORT"
            ));
        };
        if Fabric::new(count, Mode::Trapped).install().is_ok() {
            say(&format!("uverbs: {VARIABLE}={count}: the devices are in this process, and Linux's are not used"));
        }
    });
}

/// Makes the fabric of one device over UDP.
fn install_over_udp(asked: &str) {
    let Some(at) = udp_address(asked) else {
        return say(&format!(
            "uverbs: {VARIABLE}={asked} is ignored: give udp:ADDRESS or udp:ADDRESS:PORT, as in udp:127.0.0.2 or \
             udp:[fd00::1]:4791"
        ));
    };
    match Fabric::builder().udp(at).build().map(Fabric::install) {
        Ok(Ok(())) => say(&format!(
            "uverbs: {VARIABLE}={asked}: the device is in this process, speaks RoCE at {at}, unencrypted, and Linux's \
             devices are not used"
        )),
        Ok(Err(_)) => {}
        Err(error) => say(&format!("uverbs: {VARIABLE}={asked} is ignored: {error}")),
    }
}

/// The address of `udp`, `udp:ADDRESS` or `udp:ADDRESS:PORT`.
fn udp_address(asked: &str) -> Option<SocketAddr> {
    let rest = asked.strip_prefix(UDP)?;
    if rest.is_empty() {
        return Some((Ipv4Addr::LOCALHOST, ROCE_PORT).into());
    }
    let rest = rest.strip_prefix(':')?;
    let bare = rest.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let address: Option<IpAddr> = bare.unwrap_or(rest).parse().ok();
    address.map(|address| (address, ROCE_PORT).into()).or_else(|| rest.parse().ok())
}

/// Prints a line on standard error, if that can be written to.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::udp_address;

    #[test]
    fn the_address_of_a_device_over_udp_may_have_a_port() {
        for (asked, address) in [
            ("udp", Some("127.0.0.1:4791")),
            ("udp:127.0.0.2", Some("127.0.0.2:4791")),
            ("udp:10.1.2.3:14791", Some("10.1.2.3:14791")),
            ("udp:::1", Some("[::1]:4791")),
            ("udp:[fd00::1]", Some("[fd00::1]:4791")),
            ("udp:[fd00::1]:5000", Some("[fd00::1]:5000")),
            ("udp:", None),
            ("udp:name", None),
            ("udp127.0.0.1", None),
            ("udp:127.0.0.1:65536", None),
        ] {
            let found = udp_address(asked).map(|address| address.to_string());
            assert_eq!(found.as_deref(), address, "{asked}");
        }
    }
}
