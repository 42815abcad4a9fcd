//! An Ethernet port's measures against loss: priority flow control (PFC), and explicit congestion notification (ECN).
//!
//! The kernel reports PFC by netlink. Pairs with `linux/dcbnl.h`: `DCB_CMD_IEEE_GET` answers `struct ieee_pfc`. It
//! tells no process whether ECN is on; drivers count its effects.

use super::Findings;
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with,
};
use std::fs;

pub(super) fn look(device: &str, port: u32, netdev: &str, findings: &mut Findings) {
    pfc(netdev, ask(netdev), findings);
    let counters = format!("/sys/class/infiniband/{device}/ports/{port}/hw_counters");
    ecn(
        |name| fs::read_to_string(format!("{counters}/{name}")).ok()?.trim().parse().ok(),
        findings,
    );
}

/// `RTM_GETDCB`
const GET_DCB: u16 = 78;
/// `DCB_CMD_IEEE_GET`
const IEEE_GET: u8 = 21;
/// `DCB_ATTR_IFNAME`
const IFNAME: u16 = 1;
/// `DCB_ATTR_IEEE`
const IEEE: u16 = 13;
/// `DCB_ATTR_IEEE_PFC`
const IEEE_PFC: u16 = 2;
/// `NLMSG_ERROR`
const ERROR: u16 = 2;
/// `NLM_F_REQUEST`
const REQUEST: u16 = 1;
/// Bytes of `struct nlmsghdr`.
const HEADER: usize = 16;
/// Bytes of `struct dcbmsg`.
const DCB: usize = 4;
/// The flag of attributes that hold others.
const NESTED: u16 = 1 << 15;

/// The request for an interface's PFC.
fn request(netdev: &str) -> Vec<u8> {
    let name = [netdev.as_bytes(), &[0]].concat();
    let mut bytes = vec![0; HEADER + DCB];
    bytes[4..6].copy_from_slice(&GET_DCB.to_ne_bytes());
    bytes[6..8].copy_from_slice(&REQUEST.to_ne_bytes());
    bytes[HEADER + 1] = IEEE_GET;
    bytes.extend((4 + name.len() as u16).to_ne_bytes());
    bytes.extend(IFNAME.to_ne_bytes());
    bytes.extend(name);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let length = bytes.len() as u32;
    bytes[..4].copy_from_slice(&length.to_ne_bytes());
    bytes
}

fn ask(netdev: &str) -> Result<Vec<u8>, Errno> {
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    sendto(&socket, &request(netdev), SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    // The kernel has answered when send(2) returns.
    let mut answer = vec![0; 8192];
    let (received, _) = recv(&socket, &mut answer[..], RecvFlags::DONTWAIT)?;
    answer.truncate(received);
    Ok(answer)
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The value of an attribute in a list of attributes.
fn attribute(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let (length, kind) = (usize::from(half(bytes, 0)?), half(bytes, 2)? & !NESTED);
        let value = bytes.get(4..length)?;
        if kind == wanted {
            return Some(value);
        }
        bytes = bytes.get(length.next_multiple_of(4)..)?;
    }
}

/// `struct ieee_pfc`
#[derive(Debug, PartialEq, Eq)]
struct Pfc {
    /// The priorities that PFC is on for, a bit each.
    enabled: u8,
    /// The pauses that the port requested from its neighbour, and those that the neighbour requested from it
    /// (`indications`), over all priorities.
    requests: u64,
    indications: u64,
}

/// The kernel's answer: `None` where the driver has no PFC.
fn parse(answer: &[u8]) -> Result<Option<Pfc>, Errno> {
    if half(answer, 4) == Some(ERROR) {
        let error = answer.get(HEADER..).and_then(|rest| rest.first_chunk());
        return match error.map(|bytes| -i32::from_ne_bytes(*bytes)) {
            Some(error @ 1..4096) if error != Errno::OPNOTSUPP.raw_os_error() => {
                Err(Errno::from_raw_os_error(error))
            }
            _ => Ok(None),
        };
    }
    let found = (|| {
        let attributes = answer.get(HEADER + DCB..)?;
        let pfc = attribute(attribute(attributes, IEEE)?, IEEE_PFC)?;
        let counts = |at: usize| -> Option<u64> {
            let counts = pfc.get(at..at + 64)?.chunks_exact(8);
            Some(counts.filter_map(|count| Some(u64::from_ne_bytes(count.try_into().ok()?))).sum())
        };
        Some(Pfc { enabled: *pfc.get(1)?, requests: counts(8)?, indications: counts(72)? })
    })();
    Ok(found)
}

fn pfc(netdev: &str, answer: Result<Vec<u8>, Errno>, findings: &mut Findings) {
    const CHECK: &str = "pfc";
    match answer.and_then(|answer| parse(&answer)) {
        Ok(Some(pfc)) if pfc.enabled == 0 => findings.note(
            CHECK,
            format!(
                "{netdev} pauses for no priority: a full queue in a switch drops packets; `dcb pfc set dev \
                 {netdev} prio-pfc 3:on` here and on the switch lets priority 3 wait instead"
            ),
        ),
        Ok(Some(pfc)) => {
            let priorities: Vec<String> =
                (0..8).filter(|bit| pfc.enabled >> bit & 1 == 1).map(|bit| bit.to_string()).collect();
            findings.ok(
                CHECK,
                format!(
                    "{netdev} pauses for priority {}; it asked for {} pauses, and was asked for {}",
                    priorities.join(", "),
                    pfc.requests,
                    pfc.indications
                ),
            );
        }
        Ok(None) => findings.note(CHECK, format!("the driver of {netdev} does not report PFC")),
        Err(error) => {
            findings.note(CHECK, format!("the kernel does not report the PFC of {netdev}: {error}"));
        }
    }
}

fn ecn(count: impl Fn(&str) -> Option<u64>, findings: &mut Findings) {
    const CHECK: &str = "ecn";
    let counts = ["np_ecn_marked_roce_packets", "np_cnp_sent", "rp_cnp_handled"].map(count);
    findings.note(
        CHECK,
        match counts {
            [Some(0), Some(0), Some(0)] => {
                "no packet came with a mark of congestion, and no peer reported one: ECN is off, or the network \
                 was never full"
                    .into()
            }
            [Some(marked), Some(sent), Some(handled)] => format!(
                "{marked} packets came with a mark of congestion, which {sent} notifications told their \
                 senders; this port slowed down for {handled}"
            ),
            _ => "the driver does not count what ECN does; on mlx5 root sees its parameters in cc_params of \
                  debugfs"
                .into(),
        },
    );
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    fn padded(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = (4 + value.len() as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    /// An answer with the attributes that the kernel puts before those of PFC.
    fn answer(enabled: u8, requests: u64) -> Vec<u8> {
        let mut pfc = vec![8, enabled, 0, 0, 0, 0, 0, 0];
        for priority in 0..8 {
            pfc.extend((if priority == 3 { requests } else { 0 }).to_ne_bytes());
        }
        pfc.extend([0; 64]);
        let ieee = [padded(1, &[7; 59]), padded(IEEE_PFC, &pfc)].concat();
        let attributes = [padded(IFNAME, b"eth0\0"), padded(IEEE | NESTED, &ieee)].concat();
        let mut bytes = vec![0; HEADER + DCB];
        bytes[4..6].copy_from_slice(&GET_DCB.to_ne_bytes());
        bytes.extend(attributes);
        bytes
    }

    fn refusal(error: Errno) -> Vec<u8> {
        let mut bytes = vec![0; HEADER];
        bytes[4..6].copy_from_slice(&ERROR.to_ne_bytes());
        bytes.extend((-error.raw_os_error()).to_ne_bytes());
        bytes
    }

    fn found(look: impl FnOnce(&mut Findings)) -> (Level, String) {
        let mut findings = Findings::default();
        look(&mut findings);
        (findings.found[0].level, findings.found[0].message.clone())
    }

    #[test]
    fn priorities_that_pause_are_named() {
        let of = |answer| found(|findings| pfc("eth0", answer, findings));
        let (level, message) = of(Ok(answer(0b1000_1000, 17)));
        assert_eq!(level, Level::Ok);
        assert!(message.contains("priority 3, 7; it asked for 17 pauses, and was asked for 0"));
        let (level, message) = of(Ok(answer(0, 0)));
        assert!(level == Level::Note && message.contains("dcb pfc set dev eth0"), "{message}");
        assert!(of(Ok(refusal(Errno::OPNOTSUPP))).1.contains("driver of eth0 does not report"));
        assert!(of(Ok(refusal(Errno::NODEV))).1.contains("kernel does not report"));
        assert!(of(Err(Errno::ACCESS)).1.contains("kernel does not report"));
    }

    #[test]
    fn answers_that_end_early_are_none() {
        let whole = answer(8, 1);
        assert!(parse(&whole).unwrap().is_some());
        for length in HEADER..whole.len() {
            assert_eq!(parse(&whole[..length]), Ok(None), "{length}");
        }
    }

    #[test]
    fn a_request_names_the_interface_and_its_own_length() {
        let bytes = request("enp1s0f0");
        assert_eq!(bytes.len(), 36);
        assert_eq!(u32::from_ne_bytes(*bytes.first_chunk().unwrap()), 36);
        assert_eq!(attribute(&bytes[HEADER + DCB..], IFNAME), Some(&b"enp1s0f0\0"[..]));
    }

    #[test]
    fn counts_of_ecn_are_reported() {
        let of = |count: Option<u64>| found(|findings| ecn(|_| count, findings)).1;
        assert!(of(Some(0)).contains("ECN is off, or"));
        assert!(of(Some(5)).contains("5 packets came with a mark"));
        assert!(of(None).contains("does not count"));
    }
}
