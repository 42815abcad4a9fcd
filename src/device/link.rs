//! Software devices: made on a network interface, removed again. Pairs with
//! `RDMA_NLDEV_CMD_NEWLINK` and `RDMA_NLDEV_CMD_DELLINK`.

use super::netlink::Client;
use crate::error::{Error, Result};
use rustix::io::Errno;

/// Longest name of a device: `IB_DEVICE_NAME_MAX` less its terminator.
const DEVICE_NAME_MAX: usize = 63;
/// Longest name of a network interface or a kind of link: `IFNAMSIZ` less its terminator.
const INTERFACE_NAME_MAX: usize = 15;

/// Makes a software device called `name` on network interface `netdev`. `kind` is the driver's
/// name for such devices: "rxe" (soft-RoCE) or "siw" (soft-iWARP); the kernel loads the driver if
/// it finds its module. The same as `rdma link add NAME type KIND netdev NETDEV`.
///
/// # Errors
///
/// `EPERM` without `CAP_NET_ADMIN`; `ENODEV` if there is no such interface in this network
/// namespace; `EINVAL` if the kernel has no such kind or a name is not usable; `EEXIST` if the
/// interface has such a device already; `ENFILE` if another device has this name.
pub fn add_link(name: &str, kind: &str, netdev: &str) -> Result<()> {
    const VERB: &str = "add_link";
    for (what, text, limit) in [
        ("device name", name, DEVICE_NAME_MAX),
        ("kind of link", kind, INTERFACE_NAME_MAX),
        ("network interface", netdev, INTERFACE_NAME_MAX),
    ] {
        if text.is_empty() || text.len() > limit || text.contains(['\0', '/']) {
            return Err(Error::invalid(
                VERB,
                format!("{what} {text:?} must have 1 to {limit} bytes, none of them / or NUL"),
            ));
        }
    }
    if name.contains('%') {
        return Err(Error::invalid(VERB, format!("device name {name:?} must not contain %")));
    }
    Client::open(VERB)?.new_link(name, kind, netdev).map_err(|error| match error.kernel_errno() {
        Some(Errno::PERM) => error.detail("adding a link needs CAP_NET_ADMIN"),
        Some(Errno::NODEV) => error
            .detail(format!("there is no network interface {netdev:?} in this network namespace")),
        Some(Errno::INVAL) => error.detail(format!(
            "the kernel does not know links of kind {kind:?}, or cannot make one on {netdev:?}"
        )),
        Some(Errno::EXIST) => {
            error.detail(format!("{netdev:?} has a device of kind {kind:?} already"))
        }
        Some(Errno::NFILE) => error.detail(format!("there is a device {name:?} already")),
        _ => error.detail(format!("{kind} link {name:?} on {netdev:?}")),
    })
}

/// Removes the software device `name`. The same as `rdma link delete NAME`.
///
/// A driver that cannot let go of open contexts keeps the caller waiting until the last of them is
/// closed: siw, and rxe before Linux 7.3. Others take the device away, and every call on what is open
/// fails with `EIO` from then on.
///
/// # Errors
///
/// `EPERM` without `CAP_NET_ADMIN`; `ENODEV` if there is no such device; `EINVAL` if it is not a
/// software device.
pub fn remove_link(name: &str) -> Result<()> {
    const VERB: &str = "remove_link";
    let mut client = Client::open(VERB)?;
    let Some(device) = client.list()?.into_iter().find(|device| device.name == name) else {
        return Err(Error::new(VERB, Errno::NODEV)
            .detail(format!("there is no RDMA device {name:?} in this network namespace")));
    };
    client.delete_link(device.index).map_err(|error| match error.kernel_errno() {
        Some(Errno::PERM) => error.detail("removing a link needs CAP_NET_ADMIN"),
        Some(Errno::INVAL) => {
            error.detail(format!("{name:?} is not a software device, or was removed meanwhile"))
        }
        _ => error.detail(format!("link {name:?}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusable_names_do_not_reach_the_kernel() {
        let long = "x".repeat(64);
        for (name, kind, netdev) in [
            ("", "rxe", "eth0"),
            (long.as_str(), "rxe", "eth0"),
            ("rxe%d", "rxe", "eth0"),
            ("a/b", "rxe", "eth0"),
            ("rxe0", "", "eth0"),
            ("rxe0", "rxe", "sixteen-letters-"),
            ("rxe0", "rxe", "eth\0"),
        ] {
            let error = add_link(name, kind, netdev).unwrap_err();
            assert_eq!(error.errno(), Errno::INVAL);
            assert_eq!(error.kernel_errno(), None, "{error}");
        }
    }
}
