//! `uverbs cm`: programs that connect by address, through the kernel's connection manager. Each speaks the messages of
//! rdma-core's program of the same name, so that either side can be rdma-core's.
//!
//! [`rping`] has its queue pair in [`link`]; the programs that exchange a number of messages ([`ucmatose`], [`udaddy`],
//! [`mckey`]) have theirs in [`burst`]. [`cmtime`] sends no message.

mod burst;
mod cmtime;
mod link;
mod mckey;
mod report;
mod rping;
mod ucmatose;
mod udaddy;

pub(crate) use rping::LONGEST;

use crate::args::CmCommand;
use crate::failure::{CHANNEL, Failure, Result};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::time::Duration;
use uverbs::Errno;
use uverbs::cm::{ConnectError, Connection, ConnectionEvent, RejectReason};

pub(crate) fn run(command: &CmCommand) -> Result<()> {
    match command {
        CmCommand::Rping(args) => rping::run(args),
        CmCommand::Ucmatose(args) => ucmatose::run(args),
        CmCommand::Udaddy(args) => udaddy::run(args),
        CmCommand::Mckey(args) => mckey::run(args),
        CmCommand::Cmtime(args) => cmtime::run(args),
    }
}

/// The address of a host name or of an IP address.
fn resolve(host: &str, port: u16) -> Result<SocketAddr> {
    let found = (host, port).to_socket_addrs().map(|mut addresses| addresses.next());
    found.ok().flatten().ok_or_else(|| {
        Failure::peer(format!("`{host}` is no address, and no host name that is known here"))
    })
}

/// The address that a server listens on: one of this host, or all of them.
fn listening_address(host: Option<&str>, port: u16) -> Result<SocketAddr> {
    match host {
        Some(host) => resolve(host, port),
        None => Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port)),
    }
}

/// Fails if the connection ended.
fn check_alive(connection: &Connection) -> Result<()> {
    match connection.next_event(Some(Duration::ZERO))? {
        Some(ConnectionEvent::DeviceRemoval) => {
            Err(Failure::device("the kernel is removing the device"))
        }
        Some(ConnectionEvent::Unreachable) => Err(Failure::peer(
            "the peer moved to another MAC address, where no packet of the connection goes",
        )
        .advice("connect again")),
        _ if connection.is_closed() => {
            Err(Failure::peer("the peer closed the connection before all messages came")
                .advice("give both sides the same -C and -S"))
        }
        _ => Ok(()),
    }
}

/// The failure of a handshake that began and did not end.
fn unfinished(error: uverbs::Error, peer: SocketAddr) -> Failure {
    Failure::peer(format!("{peer} did not complete the handshake in time: {error}"))
        .advice("allow more time with --timeout")
}

/// The failure to bind an id to a local address.
fn cannot_listen(error: uverbs::Error, address: IpAddr) -> Failure {
    let errno = error.errno();
    let failure = Failure::device(error.to_string());
    match errno {
        Errno::ADDRINUSE => failure.advice("choose another --port on both sides"),
        Errno::ADDRNOTAVAIL => failure.advice(format!(
            "`ip address` lists the addresses of this host; {address} is none of them"
        )),
        _ => failure,
    }
}

/// The failure to connect. The library's message names the failed step, and the fault of the network.
fn cannot_connect(error: &ConnectError, peer: SocketAddr) -> Failure {
    // No request went to the peer yet.
    if error.error().verb() == CHANNEL {
        return error.error().clone().into();
    }
    let failure = Failure::peer(format!("{peer}: {error}"));
    match error.rejection().and_then(|rejection| rejection.reason()) {
        Some(RejectReason::INVALID_SERVICE_ID) => {
            return failure.advice(
                "start the server first, with the same --port; a server that listens on one address is \
                 not heard on others",
            );
        }
        Some(RejectReason::CONSUMER_DEFINED) => {
            return failure.advice("the server's own output says why it refused");
        }
        _ => {}
    }
    match error.errno() {
        Errno::NODEV => failure.advice(
            "`rdma link` shows the network interfaces with an RDMA device; the route to the peer has to lead \
             through one of them: `ip route get ADDRESS` shows which it takes, and --source chooses another",
        ),
        Errno::ADDRNOTAVAIL => failure.advice("--source takes an address of this host"),
        Errno::TIMEDOUT => failure.advice(
            "check that `ping` reaches the address, that the peer's interface has an RDMA device (`rdma link` \
             there), and that no firewall on the way drops UDP port 4791",
        ),
        Errno::NETUNREACH | Errno::HOSTUNREACH => {
            failure.advice("add a route: `ip route get ADDRESS` has to find one")
        }
        _ => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_names_are_resolved() {
        assert_eq!(resolve("10.0.0.2", 7174).unwrap(), "10.0.0.2:7174".parse().unwrap());
        assert_eq!(resolve("::1", 1).unwrap(), "[::1]:1".parse().unwrap());
        let failure = resolve("no host of this name", 1).unwrap_err();
        assert!(failure.to_string().contains("`no host of this name`"), "{failure}");
    }
}
