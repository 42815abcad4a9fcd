//! Errors of addresses that the kernel refuses, with the reason.

use crate::error::Error;
use crate::platform::Platform;
use rustix::io::Errno;
use std::net::{SocketAddr, UdpSocket};

pub(super) fn explain_bind(error: Error, address: &SocketAddr, platform: &Platform) -> Error {
    let (ip, port) = (address.ip(), address.port());
    match error.errno() {
        // The kernel answers `EADDRNOTAVAIL`, too, if one of two ids on a port is bound to any address
        // (`cma_check_port`).
        Errno::ADDRNOTAVAIL if !ip.is_unspecified() && !is_of_this_host(address, platform) => {
            error.detail(format!("this host does not have the address {ip}"))
        }
        Errno::ADDRINUSE | Errno::ADDRNOTAVAIL if port == 0 => error
            .meaning(Errno::ADDRINUSE)
            .detail(format!("no port that the kernel may choose is left on {ip}")),
        Errno::ADDRINUSE | Errno::ADDRNOTAVAIL => error.meaning(Errno::ADDRINUSE).detail(format!(
            "port {port} is in use on {ip}; choose another one, or 0 to have the kernel choose"
        )),
        Errno::INVAL if is_unscoped(address) => error.detail(format!(
            "{ip} is of one link only: name its interface, as in SocketAddrV6::set_scope_id. The GID of an \
             InfiniBand port is no IP address; bind_ib takes it"
        )),
        Errno::NODEV => error.detail(format!(
            "the network interface with {ip} belongs to no RDMA device (`rdma link` lists those that \
             do)"
        )),
        _ => explain_privileged(error, port)
            .context(|| format!("the kernel binds no id to {address}")),
    }
}

/// Whether the address belongs to this host: the kernel binds a socket to no other. Asked only to explain an error.
fn is_of_this_host(address: &SocketAddr, platform: &Platform) -> bool {
    if let Some(system) = platform.hosted() {
        return system.interfaces().iter().any(|found| found.addresses.contains(&address.ip()));
    }
    let mut any_port = *address;
    any_port.set_port(0);
    // Miri has no network.
    !cfg!(miri) && UdpSocket::bind(any_port).is_ok()
}

/// The reason that no RDMA device is on the way to an address.
pub(super) fn no_device(to: &SocketAddr) -> String {
    let ip = to.ip().to_canonical();
    if ip.is_loopback() || ip.is_unspecified() {
        return format!(
            "{} leads through the loopback interface, which belongs to no RDMA device; connect to the address of an \
             RDMA device of this host (`rdma link` lists them with their network interfaces)",
            to.ip()
        );
    }
    format!(
        "the network interface that leads to {to} belongs to no RDMA device (`rdma link` lists those that do)"
    )
}

/// Whether the address is link-local and lacks the interface (`scope_id`) that names the link.
fn is_unscoped(address: &SocketAddr) -> bool {
    matches!(address, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0)
}

/// Explains `EACCES` for a port number. For other commands the same error means other credentials.
pub(super) fn explain_privileged(error: Error, port: u16) -> Error {
    match error.errno() {
        Errno::ACCESS if (1..1024).contains(&port) => error
            .detail(format!("port number {port} is below 1024, which needs CAP_NET_BIND_SERVICE")),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_bind_have_a_remedy() {
        // An address for documentation (RFC 5737), which no host has.
        let address: SocketAddr = "203.0.113.1:80".parse().unwrap();
        for (errno, advice) in [
            (Errno::ADDRINUSE, "port 80 is in use"),
            (Errno::ADDRNOTAVAIL, "does not have the address 203.0.113.1"),
            (Errno::NODEV, "rdma link"),
            (Errno::ACCESS, "CAP_NET_BIND_SERVICE"),
            (Errno::NOMEM, "no id to 203.0.113.1:80"),
        ] {
            let error =
                explain_bind(Error::from_kernel("bind_addr", errno), &address, &Platform::LINUX);
            assert!(error.message().contains(advice), "{error}");
            assert_eq!(error.errno(), errno);
        }
        let errors = ["[fe80::1]:80", "[fe80::1%2]:80"].map(|address| {
            let error = Error::from_kernel("bind_addr", Errno::INVAL);
            explain_bind(error, &address.parse().unwrap(), &Platform::LINUX).message().to_owned()
        });
        assert!(errors[0].contains("fe80::1 is of one link only"), "{errors:?}");
        assert!(!errors[1].contains("of one link"), "{errors:?}");
        let any: SocketAddr = "[::]:80".parse().unwrap();
        let error = explain_bind(
            Error::from_kernel("bind_addr", Errno::ADDRNOTAVAIL),
            &any,
            &Platform::LINUX,
        );
        assert!(error.message().contains("port 80 is in use on ::"), "{error}");
        assert_eq!(error.errno(), Errno::ADDRINUSE);
    }

    /// The kernel may answer `EADDRNOTAVAIL`, as for an address that this host does not have.
    #[test]
    #[cfg_attr(miri, ignore = "it binds sockets")]
    fn a_used_port_is_eaddrinuse_whichever_number_the_kernel_has_for_it() {
        for (address, told) in [
            ("127.0.0.1:80", "port 80 is in use on 127.0.0.1"),
            ("0.0.0.0:80", "port 80 is in use on 0.0.0.0"),
            ("127.0.0.1:0", "no port that the kernel may choose is left"),
        ] {
            let error = Error::from_kernel("bind_addr", Errno::ADDRNOTAVAIL);
            let error = explain_bind(error, &address.parse().unwrap(), &Platform::LINUX);
            assert_eq!(error.errno(), Errno::ADDRINUSE, "{error}");
            assert_eq!(error.kernel_errno(), Some(Errno::ADDRNOTAVAIL));
            assert!(error.to_string().contains(told), "{error}");
        }
    }

    #[test]
    fn loopback_addresses_lead_through_no_device() {
        for address in
            ["127.0.0.1:7", "127.9.9.9:7", "[::1]:7", "0.0.0.0:7", "[::]:7", "[::ffff:127.0.0.1]:7"]
        {
            let told = no_device(&address.parse().unwrap());
            assert!(told.contains("leads through the loopback interface"), "{told}");
        }
        let told = no_device(&"10.0.0.1:7".parse().unwrap());
        assert!(told.contains("interface that leads to 10.0.0.1:7"), "{told}");
    }
}
