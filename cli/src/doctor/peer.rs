//! Tests whether packets as long as this port makes them reach a peer: UDP datagrams to a port without a listener. The
//! peer's kernel answers each datagram that arrives with an ICMP error, which the socket reports.

use super::Findings;
use rustix::net::sockopt::{
    Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover,
};
use std::io::{ErrorKind, Result};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

/// The first port of traceroute, on which no program listens.
const PORT: u16 = 33434;
/// The longest time of an answer, and the number of tries.
const PATIENCE: Duration = Duration::from_millis(400);
const TRIES: u32 = 3;
/// The path MTUs of RDMA except the largest, in bytes.
const MTUS: [u32; 4] = [256, 512, 1024, 2048];

/// Bytes of a packet of RoCE v2 with a full payload: IP, UDP, the headers of a write with immediate data, checksum.
fn packet(mtu: u32, peer: IpAddr) -> u32 {
    mtu + if peer.is_ipv4() { 20 } else { 40 } + 8 + 12 + 16 + 4 + 4
}

/// Whether the peer answers a packet of that many bytes.
fn answers(from: IpAddr, peer: IpAddr, bytes: u32) -> Result<bool> {
    let socket = UdpSocket::bind(SocketAddr::new(from, 0))?;
    // No router may fragment the packet, and this host's cached path MTU is ignored.
    match peer {
        IpAddr::V4(_) => set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::PROBE)?,
        IpAddr::V6(_) => set_ipv6_mtu_discover(&socket, Ipv6PathMtuDiscovery::PROBE)?,
    }
    socket.connect(SocketAddr::new(peer, PORT))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let headers = packet(0, peer) - 36;
    let datagram = vec![0; (bytes - headers) as usize];
    for _ in 0..TRIES {
        let told = socket.send(&datagram).and_then(|_| socket.recv(&mut [0; 16]));
        match told.map_err(|error| error.kind()) {
            Ok(_) | Err(ErrorKind::ConnectionRefused) => return Ok(true),
            Err(ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            // A router, or this host, reports that the peer is unreachable or the packet too long.
            Err(_) => return Ok(false),
        }
    }
    Ok(false)
}

/// Looks at the path from an address of the port to the peer, with the port's active MTU.
pub(super) fn look(from: IpAddr, peer: IpAddr, mtu: u32, findings: &mut Findings) {
    judge(peer, mtu, |bytes| answers(from, peer, bytes), findings);
}

fn judge(peer: IpAddr, mtu: u32, answers: impl Fn(u32) -> Result<bool>, findings: &mut Findings) {
    const CHECK: &str = "peer";
    let whole = packet(mtu, peer);
    let longest = || -> Result<Option<u32>> {
        if answers(whole)? {
            return Ok(Some(mtu));
        }
        let [least, more @ ..] = MTUS;
        if !answers(packet(least, peer))? {
            return Ok(None);
        }
        for lower in more.into_iter().rev().filter(|lower| *lower < mtu) {
            if answers(packet(lower, peer))? {
                return Ok(Some(lower));
            }
        }
        Ok(Some(least))
    };
    match longest() {
        Ok(Some(longest)) if longest == mtu => {
            findings.ok(CHECK, format!("{peer} answers packets of {whole} bytes, the longest of this port"));
        }
        Ok(Some(longest)) => findings.problem(
            CHECK,
            format!(
                "{peer} answers packets of {} bytes, and none of {whole}, which this port sends with its MTU \
                 of {mtu}",
                packet(longest, peer)
            ),
            format!(
                "give the interfaces of both hosts and the switches between them one MTU, or queue pairs a \
                 path MTU of {longest}"
            ),
        ),
        Ok(None) => findings.note(
            CHECK,
            format!("{peer} answers no datagram, as behind a firewall: its MTU cannot be told"),
        ),
        Err(error) => findings.note(CHECK, format!("no datagram to {peer} can be sent: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    /// The finding for a peer that takes packets of `room` bytes.
    fn found(mtu: u32, room: u32) -> (Level, String, Option<String>) {
        let mut findings = Findings::default();
        judge(IpAddr::from([10, 0, 0, 2]), mtu, |bytes| Ok(bytes <= room), &mut findings);
        let [finding] = &findings.found[..] else { panic!("{findings:?}") };
        (finding.level, finding.message.clone(), finding.advice.clone())
    }

    #[test]
    fn a_peer_with_a_smaller_mtu_is_a_problem() {
        let (level, message, advice) = found(4096, 1500);
        assert_eq!(level, Level::Problem);
        assert!(message.contains("packets of 1088 bytes, and none of 4160"), "{message}");
        assert!(advice.unwrap().contains("a path MTU of 1024"));
        assert_eq!(found(4096, 9000).0, Level::Ok);
        assert_eq!(found(1024, 1500).0, Level::Ok);
    }

    #[test]
    fn a_silent_peer_is_no_problem() {
        let (level, message, _) = found(4096, 0);
        assert_eq!(level, Level::Note);
        assert!(message.contains("firewall"), "{message}");
    }

    /// The loopback interface has room for every packet.
    #[test]
    fn this_host_answers() {
        let here = IpAddr::from([127, 0, 0, 1]);
        assert!(answers(here, here, packet(4096, here)).unwrap());
    }
}
